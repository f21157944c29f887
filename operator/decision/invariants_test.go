package decision

import "fmt"

// The invariants of a rollout, written against facts and not in terms of decide. broken checks the
// facts. wrongEffect checks a decided effect against the facts before it. irrevocable checks an
// effect when it happens, even if it was decided from a stale observation. Explorer and simulator
// share them.

// noMachine and forgotten replace the index of a machine: none, and one that no longer exists.
const (
	noMachine = -1
	forgotten = -2
)

// facts are the actual state of a cluster, independent of any observation. Machines, groups, surge
// slots, images and components are represented by their index.
type facts struct {
	machines []fact
	groups   []groupFacts
	places   []placeFacts // by surge slot
	kube     []int        // version of components: the greater number is newer

	shall, surge   int // desired number of machines, and how many may exist above it
	controlPlanes  int // desired number of control planes
	voters         int // voting members that etcd must keep
	image, comps   int // target
	keepWorkers    bool
	paused, cancel bool

	enabled, ours, scaling bool // the autoscaler: enabled, paused by us, running
	othersStopped          bool // people paused it
	pubCP, pubW            int  // components that joining machines get
	run, runComps          int  // run: 0 none, 1 active, 2 done, 3 failed
	leader                 int  // of etcd
	addons                 int  // components that the add-ons are of
}

// fact is a machine.
type fact struct {
	life, group, image, comps   int
	ours                        bool // the operator created it, with a token
	place                       int  // surge slot with its token; -1: none
	isNode, ready, known        bool
	cordon                      Cordon
	drained, obsolete           bool
	postponed, held             bool
	oldNode, newNode            int
	member                      int // 0 none, 1 learner, 2 voter
	sick                        bool
	api                         int // components of its API server
	tracked                     int // PendingNode without a surge slot: 0 none, 1 Join, 2 Leave
	trackedLate, nodeWasDeleted bool
	counted                     bool // the desired number is one higher because of it
	noted                       int  // components in its Node's annotation
	run                         int  // of its agent for the node: 0 none, 1 active, 2 done, 3 failed
	broken                      bool // every run of its agent fails
	recent                      bool // that run failed recently
	captured                    bool // an attacker writes its Node
	bare                        bool // its Node does not name its incarnation yet
	revoked                     bool // a person has revoked it: it is removed without a drain
	retry                       int  // retry request of its Node: 0 none, 1 by its owner, 2 for this run, 3 for an earlier run
}

type groupFacts struct {
	controlPlanes, inPlace, blocked bool
	broken                          bool // every run fails on one of its machines
	floor                           int  // Ready nodes that only the operator could remove
	image                           int  // of its next machine
}

type placeFacts struct {
	used, leave, late bool
	spent             bool // its token has made a machine, and the cloud has forgotten that
	group             int
	upgrades          int // machine that is upgraded in place
}

// effect is an action as the invariants see it.
type effect struct {
	kind             ActionKind
	machine          int // that it changes
	oldNode, newNode int
	made             int // machine of the intent's token
	place            int // -1: none
	group            int
	leave            bool // the intent is bound
	upgrade          bool // the intent is an in-place upgrade
	uncordon         bool
	comps            int  // that the agent must install
	keeps            bool // the agent must keep the kubelet
	pubCP, pubW      int
	host             int // machine that the operator runs on
}

func (f *facts) control(m *fact) bool { return f.groups[m.group].controlPlanes }

func (f *facts) atTarget(m *fact) bool {
	return (m.image == f.image || f.groups[m.group].inPlace) && m.comps == f.comps
}

// upgradedBy returns the surge slot of the intent to upgrade machine i, or -1.
func (f *facts) upgradedBy(i int) int {
	for p := range f.places {
		if f.places[p].used && f.places[p].upgrades == i {
			return p
		}
	}
	return -1
}

// orphan reports whether a person deleted the intent of m and m became outdated afterwards. It is an
// ordinary node then, above the desired number.
func (f *facts) orphan(m *fact) bool {
	return m.isNode && m.ours && m.place < 0 && !f.atTarget(m) && m.oldNode != forgotten && !m.counted
}

// broken returns the first violated invariant; empty: all hold.
func (f *facts) broken() string {
	machines, controlPlanes, healthy, voters := 0, 0, 0, 0
	allowed, allowedControl := f.shall+f.surge, f.controlPlanes+1
	var ready [32]int
	oldestAPI, upgraded, upgradable := 1<<30, 0, 0
	for i := range f.machines {
		m := &f.machines[i]
		cp := f.control(m)
		if m.life == booting || m.life == running || m.life == terminating {
			machines++
			if cp {
				controlPlanes++
			}
			// A person has deleted its record.
			if m.nodeWasDeleted || m.captured || f.orphan(m) {
				allowed++
				if cp {
					allowedControl++
				}
			}
		}
		if m.member == 2 {
			voters++
		}
		if m.run == 1 && m.life == running {
			upgraded++
		}
		if m.life != running {
			continue
		}
		if m.isNode && m.ready && !m.captured {
			ready[m.group]++
		}
		if m.member == 2 && !m.sick {
			healthy++
		}
		if m.isNode && cp {
			oldestAPI = min(oldestAPI, f.kube[m.api])
		}
	}
	for g := range f.groups {
		if ready[g] < f.groups[g].floor {
			return fmt.Sprintf("invariant 1: %d nodes of group %d are Ready, want at least %d", ready[g], g, f.groups[g].floor)
		}
	}
	if machines > allowed {
		return fmt.Sprintf("invariant 2: %d machines exist, the maximum is %d", machines, allowed)
	}
	if controlPlanes > allowedControl {
		return fmt.Sprintf("invariant 2: %d control planes exist, the maximum is %d", controlPlanes, allowedControl)
	}
	// An upgrade that failed once releases its surge slot to another group, and is retried.
	for _, g := range f.groups {
		if g.inPlace && !g.controlPlanes {
			upgradable++
		}
	}
	if upgraded > f.surge+upgradable {
		return fmt.Sprintf("invariant 2: %d nodes are upgraded at a time, the maximum is %d", upgraded, f.surge)
	}
	if voters < f.voters {
		return fmt.Sprintf("invariant 3: etcd has %d voters, want at least %d", voters, f.voters)
	}
	if healthy < voters/2+1 {
		return fmt.Sprintf("invariant 3: etcd has lost its quorum: %d of %d voters are healthy", healthy, voters)
	}
	if f.kube[f.addons] > oldestAPI {
		return "invariant 11: kube-proxy is newer than an API server"
	}
	for i := range f.machines {
		m := &f.machines[i]
		if m.isNode && m.ready && f.kube[m.comps] > oldestAPI && !f.control(m) {
			return fmt.Sprintf("invariant 11: the kubelet of worker m%d is newer than an API server", i)
		}
	}
	return ""
}

func (f *facts) controlPlanesDone(whole bool) bool {
	for i := range f.machines {
		if m := &f.machines[i]; m.isNode && f.control(m) && (!m.known || !f.atTarget(m) || m.noted != m.comps) {
			return false
		}
	}
	for _, p := range f.places {
		if whole && p.used && f.groups[p.group].controlPlanes {
			return false
		}
	}
	return true
}

// wrongEffect returns the invariant that an effect violates if it was decided from these facts.
// whole is true if the operator observed all of them.
func (f *facts) wrongEffect(e *effect, whole bool) string {
	at := func(i int) *fact {
		if i < 0 {
			return nil
		}
		return &f.machines[i]
	}
	m, d := at(e.machine), at(e.oldNode)
	worker := false
	switch e.kind {
	case RecordIntent, CreateInstance:
		worker = e.place >= 0 && !f.groups[e.group].controlPlanes
		switch {
		case e.kind == RecordIntent && e.place >= 0 && d != nil && e.group != d.group:
			return "a node is replaced in a group that is not its own"
		case e.kind == RecordIntent && e.leave && m != nil && !m.obsolete && !m.captured && (!f.control(m) || m.member != 0):
			return "a machine must leave because of the claim of another machine's Node"
		}
		if e.place >= 0 && e.kind == RecordIntent && d != nil {
			switch {
			case f.paused || f.cancel:
				return "a replacement starts while the rollout is stopped"
			case d.isNode && !d.known:
				return "a node is replaced before its image, components and machine are known"
			case d.held:
				return "a node on hold is replaced"
			case f.groups[d.group].inPlace:
				return "a node of an in-place group is replaced"
			case f.keepWorkers && !f.control(d):
				return "a worker is replaced in spite of keepWorkers"
			}
		}
		if e.upgrade && m != nil {
			switch {
			case f.paused || f.cancel:
				return "an in-place upgrade starts while the rollout is stopped"
			case m.isNode && !m.known:
				return "a node is upgraded before its components and machine are known"
			case m.held:
				return "a node on hold is upgraded"
			case !f.groups[m.group].inPlace:
				return "a node of a group with the strategy Replace is upgraded in place"
			case f.keepWorkers && !f.control(m):
				return "a worker is upgraded in spite of keepWorkers"
			}
		}
		if f.scaling && e.place >= 0 {
			return "invariant 7: a machine is created while the autoscaler runs"
		}
		if e.kind == CreateInstance && e.place >= 0 && f.places[e.place].spent {
			return "invariant 15: a token makes a second machine"
		}
		if e.kind == CreateInstance && e.made < 0 {
			pub := f.pubW
			if f.groups[e.group].controlPlanes {
				pub = f.pubCP
			}
			if f.groups[e.group].image != f.image || pub != f.comps {
				return "a machine is created that will not be at the target"
			}
		}
	case BindIntent:
		leaves := d != nil && e.machine == e.oldNode // the old node, and not its replacement node
		if e.place >= 0 && e.oldNode >= 0 && !leaves && e.machine != e.made {
			return "an intent is bound to a machine that is neither its old node's nor its replacement node's"
		}
		worker = e.place >= 0 && leaves && !f.control(m)
		if e.place >= 0 && leaves {
			h := at(e.made)
			switch {
			case m.held && (!f.control(m) || m.member == 2):
				return "a node on hold is removed"
			case h == nil || !h.isNode || !h.ready:
				return "invariant 1: an old node must leave without a Ready replacement node"
			case !f.atTarget(h):
				return "an old node must leave for a replacement node of another version"
			case h.cordon == CordonedByOthers:
				return "an old node must leave for a cordoned replacement node"
			case f.control(m) && h.member != 2:
				return "invariant 3: a control plane must leave before its replacement node votes"
			}
		}
		if whole && e.place >= 0 && !leaves && d != nil && d.life == terminated && !d.isNode && m.isNode && m.ready && m.known && f.atTarget(m) && !m.obsolete && m.cordon == Uncordoned && f.newNodes(e.oldNode) == 1 {
			return "a replacement node is given up whose old node is gone"
		}
		if e.place < 0 && !m.trackedLate {
			return "a machine is given up before its time to join is over"
		}
		if e.place < 0 && whole && m.isNode && m.ready && !m.captured && !m.bare {
			return "a machine is given up that has joined"
		}
	case CordonNode:
		worker = e.newNode != noMachine && !f.control(m) && m.newNode != e.newNode
	case DeleteInstance:
		if m.isNode && m.ready && !m.drained && !m.captured && !m.revoked && whole {
			return "a machine is deleted before it is drained"
		}
		if e.host == e.machine && m.isNode && m.ready && whole {
			return "the operator deletes the machine that it runs on"
		}
	case RemoveMember:
		if f.leader == e.machine && m.life == running {
			return "invariant 3: the leader of etcd is removed"
		}
		for i := range f.machines {
			o := &f.machines[i]
			if i != e.machine && o.member != 0 && m.life == running && (o.member == 1 || o.life != running || o.sick) {
				return "invariant 3: a member is removed while another is not healthy"
			}
		}
	case ClearIntent:
		switch {
		case !e.upgrade:
		case whole && m.life == running && m.run == 1:
			return "invariant 8: an intent is deleted while the agent upgrades the node"
		case whole && m.life == running && m.isNode && m.known && m.noted == f.comps && f.groups[m.group].inPlace && !m.ready:
			return "an upgraded node is uncordoned before it is Ready"
		}
		if e.place >= 0 && !e.leave && !e.upgrade && e.made < 0 && !f.places[e.place].late && whole {
			return "invariant 8: an intent is deleted although its machine may still be created"
		}
	case ResumeAutoscaler:
		if !f.ours {
			return "the operator resumes an autoscaler that somebody else stopped"
		}
		for _, p := range f.places {
			if whole && p.used {
				return "invariant 7: the autoscaler is resumed while a replacement is under way"
			}
		}
		if whole && f.run == 1 {
			return "invariant 7: the autoscaler is resumed while Kubernetes is upgraded"
		}
	case UpgradeNode:
		worker = !f.control(m)
		pub := f.pubW
		if f.control(m) {
			pub = f.pubCP
		}
		switch {
		case m.held && whole:
			return "a node on hold is upgraded"
		case m.run == 3 && m.recent && m.retry != 2:
			return "a run that failed recently is retried without a request"
		case f.paused || f.cancel:
			return "an agent starts while the rollout is stopped"
		case whole && f.upgradedBy(e.machine) < 0:
			return "invariant 8: an agent starts without an intent"
		case f.scaling:
			return "invariant 7: a node is upgraded while the autoscaler runs"
		case e.comps != pub:
			return "an agent must install components that are not published yet"
		case f.kube[e.comps] < f.kube[m.comps]:
			return "invariant 11: Kubernetes is downgraded"
		case whole && !m.drained && m.isNode && (worker || f.countMembers() > 1):
			return "an agent starts before its node is drained"
		case whole && e.host == e.machine && (worker || f.countMembers() > 1):
			return "the operator upgrades the machine that it runs on"
		}
		for i := range f.machines {
			if o := &f.machines[i]; f.control(m) && o.member != 0 && (o.member == 1 || o.life != running || o.sick || i != e.machine && o.run == 1) {
				return "invariant 3: a control plane is upgraded while a member of etcd is not healthy"
			}
		}
	case NoteComponents:
		if whole && e.comps != m.comps {
			return "a Node gets components that its agent has not installed"
		}
	case UpgradeAddons:
		switch {
		case f.paused || f.cancel:
			return "add-ons are upgraded while the rollout is stopped"
		case whole && f.kube[e.comps] <= f.kube[f.addons]:
			return "add-ons of the target's version are upgraded"
		case !f.controlPlanesDone(whole):
			return "add-ons are upgraded while a control plane is outdated or being replaced"
		}
	case StartUpgrade:
		for i := range f.machines {
			if o := &f.machines[i]; whole && f.control(o) && o.run == 1 && o.life == running {
				return "invariant 3: two control planes are upgraded at a time"
			}
		}
		if whole && !e.keeps && m != nil && m.isNode && f.groups[m.group].inPlace && f.countMembers() > 1 {
			return "the kubelet of a node that is upgraded in place is replaced while the node takes pods"
		}
		if f.run == 2 && f.runComps == e.comps {
			return "a finished upgrade of Kubernetes is repeated"
		}
		if f.kube[e.comps] < f.kube[f.pubCP] {
			return "invariant 11: Kubernetes is downgraded"
		}
	}
	if worker && !f.controlPlanesDone(whole) {
		return "invariant 4: a worker is replaced while a control plane is outdated or being replaced"
	}
	return ""
}

// irrevocable returns the invariant that an effect violates when it happens. It checks effects that
// cannot be undone, or that require an unchanged state since the decision.
func (f *facts) irrevocable(e *effect, whole bool) string {
	var m *fact
	if e.machine >= 0 {
		m = &f.machines[e.machine]
	}
	switch e.kind {
	case ReleaseNode:
		if e.uncordon && whole && m.run == 1 && m.life == running && f.upgradedBy(e.machine) >= 0 {
			return "a node is uncordoned while its agent upgrades it"
		}
		if e.uncordon && m.cordon == CordonedByOthers {
			return "invariant 13: a node is uncordoned that somebody else cordoned"
		}
	case DeleteInstance:
		if m.member != 0 {
			return "a control plane is deleted that is still a member of etcd"
		}
	case DeleteNode:
		if (m.life == running || m.life == booting) && !m.captured && !m.revoked {
			return "the Node of a running machine is deleted"
		}
	case ClearIntent:
		if e.leave && m.life != terminated && m.life != absent && m.member == 0 && (!m.isNode || !f.control(m)) {
			return "invariant 8: the intent of a leaving machine is deleted before the machine"
		}
	case PublishComponents:
		newer := func(a, b int) bool { return f.kube[a] > f.kube[b] }
		if newer(e.pubCP, f.pubCP) && (f.run != 2 || newer(e.pubCP, f.runComps)) {
			return "invariant 11: joining control planes get components that no agent has installed"
		}
		if newer(e.pubW, f.pubW) && !f.controlPlanesDone(whole) {
			return "invariant 11: joining workers get components that some control plane does not have"
		}
		if newer(f.pubCP, e.pubCP) || newer(f.pubW, e.pubW) {
			return "invariant 11: the components of joining machines are downgraded"
		}
	}
	return ""
}

// heirs counts the Nodes that name machine i as the one that they replace.
func (f *facts) newNodes(i int) (n int) {
	for k := range f.machines {
		if f.machines[k].isNode && f.machines[k].oldNode == i {
			n++
		}
	}
	return max(n, 1)
}

func (f *facts) countMembers() (n int) {
	for i := range f.machines {
		if f.machines[i].member != 0 {
			n++
		}
	}
	return n
}

// unfinished returns why a rollout has not ended: something is in progress or left behind, or a node
// is not at the target. A drain that a PodDisruptionBudget blocks permanently does not count, if the
// status reports the reason.
func (f *facts) unfinished() string {
	stuck := false
	for g := range f.groups {
		stuck = stuck || f.groups[g].blocked || f.groups[g].broken
	}
	switch {
	case f.run == 1:
		return "Kubernetes is being upgraded"
	case f.paused || f.cancel:
		return "the rollout is stopped"
	case f.pubCP != f.comps || f.pubW != f.comps:
		return "joining machines do not get the target's components"
	case f.kube[f.addons] != f.kube[f.comps] && f.controlPlanesDone(true):
		return "the add-ons are not at the target"
	case !stuck && (f.ours || f.enabled != f.scaling || f.enabled == f.othersStopped):
		return "the autoscaler is not resumed"
	}
	for p := range f.places {
		if f.places[p].used && !stuck {
			return fmt.Sprintf("surge slot %d is in use", p)
		}
	}
	for i := range f.machines {
		m := &f.machines[i]
		if m.revoked && (m.isNode || m.life == booting || m.life == running) {
			return fmt.Sprintf("m%d was revoked and is not removed", i)
		}
		if f.groups[m.group].blocked || f.groups[m.group].broken || m.life == absent && !m.isNode && m.member == 0 {
			continue
		}
		kept := f.keepWorkers && !f.control(m) || m.held
		what := ""
		switch {
		case m.life != running || !m.isNode:
			what = "has no Node, or no machine"
		case !m.ready || !m.known:
			what = "is not Ready, or its image and components are unknown"
		case m.tracked != 0:
			what = "is tracked by an intent"
		case m.cordon != Uncordoned:
			what = "is cordoned"
		case m.newNode >= 0 || m.newNode == forgotten || m.postponed || m.obsolete || m.retry != 0:
			what = "is marked"
		case f.control(m) && m.member != 2:
			what = "does not vote"
		case !kept && !f.atTarget(m):
			what = "is not at the target"
		case m.noted != m.comps || m.run == 1:
			what = "has other components than its Node's annotation"
		default:
			continue
		}
		return fmt.Sprintf("m%d %s", i, what)
	}
	return ""
}
