package decision

import (
	"slices"
	"strconv"
	"time"

	"constellation/operator/api/v1alpha1"
)

// World is what was observed, as plain values: nothing in it is a pointer into a
// cache, and who decides from it may keep it. An observation may be stale or
// incomplete; what is missing from it is unknown, never gone. A machine is gone only
// if the cloud says so of its ID.
type World struct {
	Nodes []Node
	// Impostors are Nodes that the cloud contradicts. judge takes them out of nodes.
	Impostors []Impostor
	Groups    []Group
	Pending   []PendingMachine // for the status
	Joining   map[string]bool  // names of nodes whose machine was given a ticket a moment ago; see joiningNodes

	// What only decide looks at.
	Generation int64                      // of the spec
	Before     v1alpha1.NodeVersionStatus // the status so far
	Now        time.Time
	Instances  []Instance
	Complete   bool // every group's instances were listed
	Intents    []Intent
	Etcd       []Member
	LeaderNode string // node that runs the operator's leader; empty: outside of the cluster
	Run        UpgradeRun
	NodeRuns   map[string]UpgradeRun // latest of the agents of machines that are upgraded in place, by ID; absent: not heard
	Autoscaler Autoscaler
	// NodesLocked says that nothing may begin, since somebody else has the cluster's nodes to
	// themselves, or might; bar says who, and is empty while that is being found out.
	NodesLocked   bool
	NodesLockedBy string
	Versions      map[string]string // Kubernetes of a components ConfigMap, by its name

	// What finds the above, where whoever observed has made it already; nil: it is made
	// when it is needed. found is of nodes that are in order.
	Index  *Index
	Lookup *Lookup
}

type Node struct {
	Name string
	// Confirmed says that the cloud's machine of providerID bears the Node's name. Then
	// role, group and image are those of the machine, and otherwise what the Node claims.
	Confirmed         bool
	Role              v1alpha1.Role
	Ready             bool
	NotReadyPod       string // pod without which an heir that is Ready is of no use yet
	ProviderID        string
	Kubelet           string // version
	Image, Components string // empty: not known yet
	Group             string // ID
	Donor, Heir       string
	Obsolete          bool

	Cordon         Cordon
	CordonedSince  time.Time // when we cordoned it
	Drained        bool      // nothing on it is left to evict
	DrainBlocker   string    // what refused the last eviction; empty: nothing
	PostponedUntil time.Time // not replaced before; zero: any time
	OnHold         bool      // not replaced until its owner lets it go
	InPlaceLabel   bool      // as one that is upgraded in place
	RetryRequest   string    // mark of the failed run that is tried again now, or what its owner has written for it; empty: none
}

// Cordon is whether a node takes new pods, and if not, at whose wish.
type Cordon int

const (
	Uncordoned Cordon = iota
	CordonedByUs
	CordonedByOthers
)

type Group struct {
	Name, ID  string
	Role      v1alpha1.Role
	Image     string // of its next machine; empty: not known yet
	Strategy  v1alpha1.Strategy
	NotListed bool // the cloud did not list it last
	OnHold    bool // as all of its nodes
}

// PendingMachine is a machine that is tracked and not, or no longer, a Node.
type PendingMachine struct {
	Kind, Name string
	Node       string // name of its Node
	Ready      bool   // the cloud says that it runs and is to join
}

// Instance is a machine as the cloud describes it. One that is asked for by ID and
// not known is there with the state Terminated, and without a name if the cloud has
// never described it.
type Instance struct {
	ID, Name, Group string
	Role            v1alpha1.Role // empty: not known
	Image           string        // that it was created from; empty: not known
	Hash            string        // of its ID; see markOf
	ReplacesHash    string        // mark of the machine that it was created to replace; empty: not known
	Token           string        // that it was created with; empty: not by us
	State           v1alpha1.InstanceState
	Since           time.Time // when it was first seen, by our own clock
	Address         string    // in the cluster's network; empty: not known
}

// Intent is a PendingNode: what we are about to do with a machine. It is written
// before the cloud is asked for anything.
//
// One with a token is a replacement: it holds a place of the surge budget, which its
// name says, from before its machine is created until the donor's machine is gone.
// While it says Join the machine is the heir, found by the token. Then it is bound,
// once and for ever, to the machine that has to go: the donor's when all went well,
// the heir's when it is given up. Because one object is bound, and the API server
// binds it once, donor and heir cannot both go, whoever acts on whatever old view.
//
// One that says Upgrade holds a place, too: its machine is upgraded as it is, from
// before it is cordoned until it is uncordoned or given up.
type Intent struct {
	Name     string
	Goal     v1alpha1.Goal
	Token    string
	Donor    string // name of the Node to replace
	Machine  string // ID; empty until it is bound
	Node     string // name of the machine's Node, as far as known
	Group    string // ID
	Deadline time.Time
	Revoked  bool // its machine goes without a drain; see revoked.go
}

// Member is one of etcd.
type Member struct {
	Node                   string
	Voter, Healthy, Leader bool // a voter that has not started is no voter
	// It has not started, so node is the URL of its peers and not a name. address is the
	// host in it, and since is when it was first seen so, by our own clock.
	NotStarted bool
	Address    string
	Since      time.Time
}

// UpgradeRun is the last run of an agent, as its journal or the last status says.
type UpgradeRun struct {
	Version, Components, Node string
	Phase                     string // as in UpgradeProgress; empty: no run
	InPlace                   bool   // of a node, and not of the cluster's Kubernetes
	Line                      string
	Started, Ended            time.Time
}

// markPrefix begins the marks of runs.
const markPrefix = "run-"

// RetryMark names a run that has failed, for one more try to be that of this run alone; empty if
// it has not, or if it is tried again without a pause.
func (r UpgradeRun) RetryMark() string {
	if r.Phase != "failed" || r.Ended.IsZero() {
		return ""
	}
	return markPrefix + strconv.FormatInt(r.Ended.UnixMilli(), 10)
}

// OfCluster is r if it was about the cluster's Kubernetes; zero: it was not.
func (r UpgradeRun) OfCluster() UpgradeRun {
	if r.InPlace {
		return UpgradeRun{}
	}
	return r
}

func (r UpgradeRun) Active() bool {
	return r.Phase == "download" || r.Phase == "plan" || r.Phase == "apply"
}

// Autoscaler is the state of the cluster autoscaler.
type Autoscaler struct {
	Enabled    bool // it is told to run
	Running    bool // it does, or may
	PausedByUs bool // we told it to stop
}

// LostMember reports whether etcd has a member that is not healthy, or has no Node.
func (w *World) LostMember() bool {
	return slices.ContainsFunc(w.Etcd, func(m Member) bool {
		return !m.Healthy || !slices.ContainsFunc(w.Nodes, func(n Node) bool { return n.Name == m.Node })
	})
}
