package decision

import (
	"slices"
	"strconv"
	"strings"
	"time"

	"constellation/engine/revocation"
	"constellation/operator/api/v1alpha1"
)

// World is the observed state as plain values. It has no pointer into a cache, so a decision
// may keep it. An observation may be stale or incomplete: what is missing from it is unknown,
// never gone. A machine is gone only if the cloud reports that for its ID.
type World struct {
	Nodes []Node
	// Impostors are Nodes that the cloud contradicts. judge moves them here from Nodes.
	Impostors []Impostor
	Groups    []Group
	Pending   []PendingMachine // for the status
	Joining   map[string]bool  // names of nodes whose machine has a join ticket

	// Read by Decide alone.
	Generation int64                      // of the spec
	Before     v1alpha1.NodeVersionStatus // the status so far
	Now        time.Time
	Instances  []Instance
	Complete   bool // the cloud listed the instances of every group
	Intents    []Intent
	Etcd       []Member
	LastEtcd   []Member // as last listed, however long ago: for versions
	// KubeadmEtcdTag is etcd.local.imageTag of ConfigMap kubeadm-config, if KubeadmRead. It is read
	// while WantsEtcdTag.
	KubeadmEtcdTag string
	KubeadmRead    bool
	Addons         Addons
	LeaderNode     string // node of the operator's leader; empty: the operator runs outside of the cluster
	Run            UpgradeRun
	AddonRun       UpgradeRun            // last run of the leader's agent that upgrades add-ons
	NodeRuns       map[string]UpgradeRun // latest run of each agent of an in-place upgrade, by machine ID; absent: the agent has not answered
	Autoscaler     Autoscaler
	// NodesLocked says that nothing may start, because another program holds the node lock, or may
	// hold it. NodesLockedBy names the holder. It is empty until the holder is known.
	NodesLocked   bool
	NodesLockedBy string
	Versions      map[string]string // Kubernetes of a components ConfigMap, by its name

	// Shortages are sentences about groups of enrolled machines that cannot get their size.
	Shortages []string

	// Revoked is the record of revoked machines. It is read only while a machine has no Node.
	Revoked revocation.List

	// Index and Lookup find the values above, if the observer has built them already; nil: Decide
	// builds them. Lookup requires Nodes in the order of their names.
	Index  *Index
	Lookup *Lookup
}

// Node is a Node of the cluster with what the cloud and the records say about its machine.
type Node struct {
	Name string
	// Confirmed says that the cloud's machine of ProviderID bears the Node's name. Then Role, Group
	// and Image are those of the machine. Otherwise they are the Node's own claims.
	Confirmed            bool
	Role                 v1alpha1.Role
	Ready                bool
	NotReadyPod          string // node-critical pod that is not Ready yet on a replacement node
	Unlabeled            bool   // it lacks the label of control planes, which kubeadm sets at the end of a join
	ProviderID           string
	Kubelet              string // version
	BootID               string // of its last boot; empty: not known
	Image, Components    string // empty: not known yet
	Etcd                 string // version of its member; empty: none, or not known
	Group                string // ID
	OldNode, Replacement string
	Obsolete             bool
	Created              time.Time // by the API server's clock

	Cordon         Cordon
	CordonedSince  time.Time // when we cordoned it
	Drained        bool      // nothing on it is left to evict
	DrainBlocker   string    // what refused the last eviction; empty: nothing
	PostponedUntil time.Time // not replaced before; zero: any time
	OnHold         bool      // on hold: not replaced until its owner resumes it
	InPlaceLabel   bool      // it has the label of nodes that are upgraded in place
	RetryRequest   string    // mark of the failed run that is retried now, or the owner's own text; empty: no retry request
	// Plan is the Plan, as namespace/name, that upgrades the node while it is drained; empty: none. Lent says that
	// it may do so now.
	Plan string
	Lent bool
}

// Cordon is whether a node takes new pods, and if not, who cordoned it.
type Cordon int

// Values of Cordon.
const (
	Uncordoned Cordon = iota
	CordonedByUs
	CordonedByOthers
)

// Group is a scaling group with its policy for rollouts.
type Group struct {
	Name, ID  string
	Role      v1alpha1.Role
	Image     string // of its next machine; empty: not known yet
	Strategy  v1alpha1.Strategy
	NotListed bool // the cloud did not list it last
	OnHold    bool // on hold with all of its nodes
}

// PendingMachine is a tracked machine that has no Node.
type PendingMachine struct {
	Kind, Name string
	Node       string // name of its Node
	Ready      bool   // the cloud reports it as running, and it must join
}

// Instance is a machine as the cloud describes it. A machine that the cloud no longer knows has
// the state Terminated. It has no name if the cloud never described it.
//
// IDs of machines are keys of package cloud, in all types of this package: provider ID and
// incarnation. Two machines can have the same name, one after the other.
type Instance struct {
	ID, Name, Group string
	Role            v1alpha1.Role // empty: not known
	Image           string        // that it was created from; empty: not known
	Hash            string        // of its ID; see MachineHash
	ReplacesHash    string        // hash of the machine that it was created to replace; empty: not known
	Token           string        // of its create request; empty: the operator did not create it
	State           v1alpha1.InstanceState
	Since           time.Time // first-seen time by the operator's clock
	Address         string    // in the cluster's network; empty: not known
	Created         time.Time // by the cloud's clock; zero: not known
}

// Intent is a PendingNode: the operator's record of what it does with a machine. It is written
// before any request to the cloud.
//
// An intent with a token is a replacement. It holds a surge slot, named by the intent, from before
// its machine is created until the old node's machine is gone. Intent.OldNode names the old node, and
// Node.Replacement its replacement node. While the goal is Join, the machine is the replacement node, found
// by the token. Then the intent is bound once to the machine that leaves: the old node's if the
// replacement node took over, the replacement node's if the replacement is given up. The API server
// permits only one binding, so old node and replacement node cannot both leave, even by a stale
// observation.
//
// An intent with the goal Upgrade also holds a surge slot. Its machine is upgraded in place, from
// before the cordon until the node is uncordoned or the upgrade is given up.
type Intent struct {
	Name     string
	Goal     v1alpha1.Goal
	Token    string
	OldNode  string // name of the Node to replace
	Machine  string // ID; empty until it is bound
	Node     string // name of the machine's Node, as far as known
	Group    string // ID
	Deadline time.Time
	Revoked  bool // its machine leaves without a drain; see revoked.go
	Seen     bool // a machine with the token was seen
}

// Member is a member of etcd.
type Member struct {
	Node                   string
	Voter, Healthy, Leader bool // a voter that has not started is no voter
	// Address is the host of its peer URL; empty: not known.
	Address string
	// Version is that of its etcd, Storage that of the format of its data; empty: not known.
	Version, Storage string
	// The member has not started, so Node is its peer URL and not a name. Since is its first-seen
	// time by the operator's clock.
	NotStarted bool
	Since      time.Time
}

// UpgradeRun is the last run of an agent, from its journal or from the last status.
type UpgradeRun struct {
	Version, Components, Node string
	Phase                     string // as in UpgradeProgress; empty: no run
	InPlace                   bool   // of a node, and not of the cluster's Kubernetes
	Addons                    bool   // of the add-ons
	Etcd                      string // mark of the etcd that the target names, of a control plane's in-place upgrade
	Line                      string
	PackagesKept              string // why the agent leaves packages as they are, although they are to be upgraded
	BootID                    string // boot of the machine in which the agent works; empty: it does not, or it is not known
	Started, Ended            time.Time
}

// markPrefix begins the marks of runs.
const markPrefix = "run-"

// RetryMark names a failed run, so that a retry request permits one retry of that run. It is empty
// if the run has not failed, or if it is retried without a pause.
func (r UpgradeRun) RetryMark() string {
	if r.Phase != "failed" || r.Ended.IsZero() {
		return ""
	}
	return markPrefix + strconv.FormatInt(r.Ended.UnixMilli(), 10)
}

// failed returns r as a run that has failed: its outcome is not what was wanted.
func (r UpgradeRun) failed() UpgradeRun {
	r.Phase = "failed"
	return r
}

// OfCluster returns r if it upgraded the cluster's Kubernetes, else the zero value.
func (r UpgradeRun) OfCluster() UpgradeRun {
	if r.InPlace || r.Addons {
		return UpgradeRun{}
	}
	return r
}

// OfAddons returns r if it upgraded add-ons, else the zero value.
func (r UpgradeRun) OfAddons() UpgradeRun {
	if !r.Addons {
		return UpgradeRun{}
	}
	return r
}

// Active reports whether the agent is at work.
func (r UpgradeRun) Active() bool {
	return r.Phase == "download" || r.Phase == "plan" || r.Phase == "apply"
}

// Autoscaler is the state of the cluster autoscaler.
type Autoscaler struct {
	Enabled    bool // the AutoscalingStrategy enables it
	Running    bool // it runs, or may run
	PausedByUs bool // the operator paused it
}

// KeepsKubelet reports whether the upgrade of the cluster's Kubernetes by the agent of n keeps the kubelet:
// n takes pods at that time, and its own in-place upgrade drains it. The only control plane is
// not drained, so its kubelet is replaced at once.
func (w *World) KeepsKubelet(n *Node) bool {
	alone := len(w.Etcd) == 1 && w.Etcd[0].Node == n.Name
	return !alone && slices.ContainsFunc(w.Groups, func(g Group) bool {
		return strings.EqualFold(g.ID, n.Group) && g.Strategy == v1alpha1.InPlaceStrategy
	})
}

// LostMember reports whether etcd has a member that is not healthy, or has no Node.
func (w *World) LostMember() bool {
	return slices.ContainsFunc(w.Etcd, func(m Member) bool {
		return !m.Healthy || !slices.ContainsFunc(w.Nodes, func(n Node) bool { return n.Name == m.Node })
	})
}
