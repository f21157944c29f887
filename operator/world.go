package operator

import (
	"strconv"
	"time"

	"constellation/operator/api/v1alpha1"
)

// world is what was observed, as plain values: nothing in it is a pointer into a
// cache, and who decides from it may keep it. An observation may be stale or
// incomplete; what is missing from it is unknown, never gone. A machine is gone only
// if the cloud says so of its ID.
type world struct {
	nodes []node
	// impostors are Nodes that the cloud contradicts. judge takes them out of nodes.
	impostors []impostor
	groups    []group
	pending   []pendingMachine // for the status
	joining   map[string]bool  // names of nodes whose machine was given a ticket a moment ago; see joiningNodes

	// What only decide looks at.
	generation int64                      // of the spec
	before     v1alpha1.NodeVersionStatus // the status so far
	now        time.Time
	instances  []instance
	complete   bool // every group's instances were listed
	intents    []intent
	etcd       []member
	leader     string // node that runs the operator's leader; empty: outside of the cluster
	run        upgradeRun
	runs       map[string]upgradeRun // latest of the agents of machines that are upgraded in place, by ID; absent: not heard
	autoscaler autoscaler
	// barred says that nothing may begin, since somebody else has the cluster's nodes to
	// themselves, or might; bar says who, and is empty while that is being found out.
	barred   bool
	bar      string
	versions map[string]string // Kubernetes of a components ConfigMap, by its name

	// What finds the above, where whoever observed has made it already; nil: it is made
	// when it is needed. found is of nodes that are in order.
	finder *finder
	found  *lookup
}

type node struct {
	name string
	// confirmed says that the cloud's machine of providerID bears the Node's name. Then
	// role, group and image are those of the machine, and otherwise what the Node claims.
	confirmed         bool
	role              v1alpha1.Role
	ready             bool
	lacks             string // pod without which an heir that is Ready is of no use yet
	providerID        string
	kubelet           string // version
	image, components string // empty: not known yet
	group             string // ID
	donor, heir       string
	obsolete          bool

	cordon        cordon
	cordonedSince time.Time // when we cordoned it
	drained       bool      // nothing on it is left to evict
	blocker       string    // what refused the last eviction; empty: nothing
	postponed     time.Time // not replaced before; zero: any time
	held          bool      // not replaced until its owner lets it go
	marked        bool      // as one that is upgraded in place
	retry         string    // mark of the failed run that is tried again now, or what its owner has written for it; empty: none
}

// cordon is whether a node takes new pods, and if not, at whose wish.
type cordon int

const (
	uncordoned cordon = iota
	cordonedByUs
	cordonedByOthers
)

type group struct {
	name, id string
	role     v1alpha1.Role
	image    string // of its next machine; empty: not known yet
	strategy v1alpha1.Strategy
	missing  bool // the cloud did not list it last
	held     bool // as all of its nodes
}

// pendingMachine is a machine that is tracked and not, or no longer, a Node.
type pendingMachine struct {
	kind, name string
	node       string // name of its Node
	ready      bool   // the cloud says that it runs and is to join
}

// instance is a machine as the cloud describes it. One that is asked for by ID and
// not known is there with the state Terminated, and without a name if the cloud has
// never described it.
type instance struct {
	id, name, group string
	role            v1alpha1.Role // empty: not known
	image           string        // that it was created from; empty: not known
	mark            string        // of its ID; see markOf
	replaces        string        // mark of the machine that it was created to replace; empty: not known
	token           string        // that it was created with; empty: not by us
	state           v1alpha1.InstanceState
	since           time.Time // when it was first seen, by our own clock
	address         string    // in the cluster's network; empty: not known
}

// intent is a PendingNode: what we are about to do with a machine. It is written
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
type intent struct {
	name     string
	goal     v1alpha1.Goal
	token    string
	donor    string // name of the Node to replace
	machine  string // ID; empty until it is bound
	node     string // name of the machine's Node, as far as known
	group    string // ID
	deadline time.Time
	revoked  bool // its machine goes without a drain; see revoked.go
}

// member is one of etcd.
type member struct {
	node                   string
	voter, healthy, leader bool // a voter that has not started is no voter
	// It has not started, so node is the URL of its peers and not a name. address is the
	// host in it, and since is when it was first seen so, by our own clock.
	nameless bool
	address  string
	since    time.Time
}

// upgradeRun is the last run of an agent, as its journal or the last status says.
type upgradeRun struct {
	version, components, node string
	phase                     string // as in UpgradeProgress; empty: no run
	inPlace                   bool   // of a node, and not of the cluster's Kubernetes
	line                      string
	started, ended            time.Time
}

// markPrefix begins the marks of runs.
const markPrefix = "run-"

// mark names a run that has failed, for one more try to be that of this run alone; empty if
// it has not, or if it is tried again without a pause.
func (r upgradeRun) mark() string {
	if r.phase != "failed" || r.ended.IsZero() {
		return ""
	}
	return markPrefix + strconv.FormatInt(r.ended.UnixMilli(), 10)
}

// ofCluster is r if it was about the cluster's Kubernetes; zero: it was not.
func (r upgradeRun) ofCluster() upgradeRun {
	if r.inPlace {
		return upgradeRun{}
	}
	return r
}

func (r upgradeRun) active() bool {
	return r.phase == "download" || r.phase == "plan" || r.phase == "apply"
}

// autoscaler is the state of the cluster autoscaler.
type autoscaler struct {
	enabled bool // it is told to run
	running bool // it does, or may
	ours    bool // we told it to stop
}
