package decision

import (
	"cmp"
	"container/heap"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"time"

	"k8s.io/apimachinery/pkg/util/intstr"

	"constellation/engine/cloud"
	"constellation/engine/revocation"
	"constellation/operator/api/v1alpha1"
)

// The model world of the simulator: a cluster of any size with a cloud, people and injected faults.
// It is a discrete-event simulation in virtual time. All randomness comes from one seed, and nothing
// from the real clock or from the order of a map, so every run of a seed is the same.

// happening is an event with its time.
type happening struct {
	at  time.Duration
	seq int
	do  func()
}

type eventQueue []happening

func (q eventQueue) Len() int { return len(q) }
func (q eventQueue) Less(i, j int) bool {
	return q[i].at < q[j].at || q[i].at == q[j].at && q[i].seq < q[j].seq
}
func (q eventQueue) Swap(i, j int) { q[i], q[j] = q[j], q[i] }
func (q *eventQueue) Push(x any)   { *q = append(*q, x.(happening)) }
func (q *eventQueue) Pop() any {
	last := len(*q) - 1
	e := (*q)[last]
	(*q)[last] = happening{}
	*q = (*q)[:last]
	return e
}

// Versions for targets. Two sets of components have the same Kubernetes.
var (
	simImages = table("sandboxes/s/images/v1.", 4)
	simComps  = table("k8s-components-", 4)
	simKube   = []string{"v1.35.4", "v1.35.4", "v1.36.3", "v1.36.4"}
	simOrder  = []int{0, 0, 1, 2}
	simByRef  = map[string]string{simComps[0]: simKube[0], simComps[1]: simKube[1], simComps[2]: simKube[2], simComps[3]: simKube[3]}
)

// simMachine is the state of a machine that the invariants do not need.
type simMachine struct {
	id, name, token string
	mark            string // see markOf
	lie             int    // false claim of its Node since it was captured; see the explorer's
	about           int    // machine that the claim concerns
	created         time.Time
	node            *Node  // as stored in the API server, never changed in place; nil: no Node
	listed          string // state that the cloud lists; empty: not listed
	silent          time.Duration
	neverJoins      bool
	wrong           bool          // it joins with another version
	late            time.Duration // delay of its join
	unnamed         bool          // its member of etcd has not started
	run             UpgradeRun    // of its agent for the node
	ended           time.Duration // when it was gone; 0: it exists
	untracked       time.Duration // since when it has neither a Node nor an intent; 0: it has one
}

type simGroup struct {
	Group // from the ScalingGroup; empty name: not created yet
	id    string
	role  v1alpha1.Role
}

// simIntent is a PendingNode as stored in the API server, never changed in place.
type simIntent struct {
	Intent
	place                int // -1: none
	machineNo, oldNodeNo int
	recorded             time.Duration
}

// simVersion is the NodeVersion as stored in the API server, never changed in place.
type simVersion struct {
	spec        v1alpha1.NodeVersionSpec
	status      v1alpha1.NodeVersionStatus
	generation  int64
	image, comp int // target
}

// simulation is one seed.
type simulation struct {
	facts
	seed  uint64
	off   rule
	rng   *rand.Rand
	now   time.Duration
	queue eventQueue
	seq   int

	m       []*simMachine
	byName  map[string][]int // machines that had a name, one after the other
	byID    map[string]int
	byToken map[string]int
	gs      []simGroup
	intents []*simIntent
	version *simVersion
	upgrade UpgradeRun
	liars   []Node // Nodes without a machine
	ops     [2]*simOperator
	surgeIs intstr.IntOrString

	// Injected faults.
	kinds        []faultKind
	patience     time.Duration // after the last fault
	calm, healed bool          // faults have ended; and all operators have observed that
	healAt       time.Duration
	latency      time.Duration // maximum of observations, without faults
	apiAway      time.Duration // until when
	apiWent      time.Duration // since when
	cloudFails   time.Duration // until when
	cloudLags    time.Duration
	cloudPartial time.Duration
	cloudVersion int // counts changes of what the cloud lists
	unlisted     int // changes that the cloud does not list yet
	slowJoins    time.Duration
	lagMost      time.Duration // maximum lag of the list
	reuses       bool          // the cloud gives names and IDs of deleted machines to new ones
	slowBoot     time.Duration

	// Counters and the log.
	events, passes int
	tell           bool
	lines          []string
	breach         string
	finished       bool
}

func (s *simulation) say(format string, args ...any) {
	if s.tell {
		s.lines = append(s.lines, fmt.Sprintf("%10s  ", s.now.Round(time.Millisecond))+fmt.Sprintf(format, args...))
	}
}

func (s *simulation) clock() time.Time { return modelNow.Add(s.now) }

func (s *simulation) after(d time.Duration, do func()) {
	s.seq++
	heap.Push(&s.queue, happening{s.now + d, s.seq, do})
}

// between returns a random duration.
func (s *simulation) between(a, b time.Duration) time.Duration {
	if b <= a {
		return a
	}
	return a + time.Duration(s.rng.Int64N(int64(b-a)))
}

func (s *simulation) chance(percent int) bool { return s.rng.IntN(100) < percent }

func (s *simulation) fail(format string, args ...any) {
	if s.breach == "" {
		s.breach = fmt.Sprintf(format, args...)
	}
}

// Kinds of objects. Each has its own watch.
const (
	simNodes = iota
	simIntents
	simVersions
	simAutoscaler
	simGroups
	kinds
)

// changed notifies the operators of a change, each when its watch delivers it.
func (s *simulation) changed(kind int, see func(o *simOperator)) {
	for _, o := range s.ops {
		if !o.up {
			continue
		}
		at := max(s.now, o.delivers[kind])
		if s.latency > 0 && !s.calm {
			at = max(at, s.now+s.between(0, s.latency))
		}
		at = max(at, o.frozen[kind], s.apiAway)
		if at == s.now && o.undelivered == 0 {
			see(o)
			o.wake()
			continue
		}
		o.delivers[kind] = at
		o.undelivered++
		life := o.life
		s.after(at-s.now, func() {
			if o.life == life {
				o.undelivered--
				see(o)
				o.wake()
			}
		})
	}
}

// setNode writes a Node. It passes a copy to change.
func (s *simulation) setNode(i int, change func(n *Node)) {
	var n Node
	if s.m[i].node != nil {
		n = *s.m[i].node
	}
	change(&n)
	s.storeNode(i, &n)
}

func (s *simulation) storeNode(i int, n *Node) {
	m := &s.machines[i]
	s.m[i].node = n
	if n == nil {
		*m = fact{life: m.life, group: m.group, image: m.image, comps: m.comps, ours: m.ours, place: m.place, member: m.member, sick: m.sick, api: m.api, noted: m.comps, run: m.run, captured: m.captured, revoked: m.revoked, tracked: m.tracked, trackedLate: m.trackedLate, nodeWasDeleted: m.nodeWasDeleted, counted: m.counted, oldNode: noMachine, newNode: noMachine}
	} else {
		if m.cordon != Uncordoned && n.Cordon == Uncordoned {
			m.drained = false // pods come back
		}
		if m.noted = m.comps; n.Components != "" {
			m.noted = slices.Index(simComps, n.Components)
		}
		m.held = n.OnHold || s.gs[m.group].OnHold
		m.isNode, m.known, m.obsolete, m.cordon = true, n.Image != "" && n.Components != "", n.Obsolete, n.Cordon
		m.oldNode, m.newNode = s.named(n.OldNode), s.named(n.Replacement)
	}
	s.changed(simNodes, func(o *simOperator) {
		for len(o.nodes) <= i {
			o.nodes = append(o.nodes, nil)
		}
		o.nodes[i] = n
		if n == nil || n.Cordon == Uncordoned {
			delete(o.drains, i)
		}
	})
}

// named returns the index of the machine with a node's name.
func (s *simulation) named(name string) int {
	if name == "" {
		return noMachine
	}
	if i := s.find(name); i >= 0 && (s.machines[i].life != terminated || s.machines[i].isNode) {
		return i
	}
	return forgotten
}

// find returns the machine with a name: that with the Node, or else the last one.
func (s *simulation) find(name string) int {
	return s.prefer(name, func(i int) bool { return s.m[i].node != nil })
}

// prefer returns the machine with a name that is wanted, or else the last one.
func (s *simulation) prefer(name string, wanted func(i int) bool) int {
	all := s.byName[name]
	if k := slices.IndexFunc(all, wanted); k >= 0 {
		return all[k]
	}
	if len(all) == 0 {
		return noMachine
	}
	return all[len(all)-1]
}

// identify gives machine i a name and an ID: new ones, or those of a deleted machine of its group.
func (s *simulation) identify(i, g int, m *simMachine) {
	m.name, m.id = "m"+strconv.Itoa(i), "sandbox://s/m"+strconv.Itoa(i)
	if s.reuses {
		if s.has(namesReused) && s.chance(70) {
			m.name = cmp.Or(s.freeName(g), m.name)
			m.id = "sandbox://s/" + m.name
		}
		m.id = cloud.Key(m.id, strconv.Itoa(i))
	}
	m.mark = MachineHash(m.id)
	s.byID[m.id] = i
	s.byName[m.name] = append(s.byName[m.name], i)
	s.byName[peerURL(i)] = []int{i}
}

// freeName returns the name of a deleted machine of a group that no other machine has; empty: none.
func (s *simulation) freeName(g int) string {
	exists := func(i int) bool { return s.machines[i].life != terminated }
	for i := range s.machines {
		if name := s.m[i].name; s.machines[i].group == g && !slices.ContainsFunc(s.byName[name], exists) {
			return name
		}
	}
	return ""
}

// bare returns the provider ID of machine i.
func (s *simulation) bare(i int) string {
	id, _ := cloud.SplitKey(s.m[i].id)
	return id
}

func (s *simulation) setVersion(change func(v *simVersion)) {
	v := *s.version
	change(&v)
	s.version = &v
	s.image, s.comps = v.image, v.comp
	s.paused, s.cancel, s.keepWorkers = v.spec.Rollout.Paused, v.spec.Rollout.Cancel, v.spec.Rollout.KeepWorkers
	s.pubCP, s.pubW = slices.Index(simComps, v.status.JoinComponents.ControlPlane), slices.Index(simComps, v.status.JoinComponents.Worker)
	s.changed(simVersions, func(o *simOperator) { o.version = &v })
}

func (v *simVersion) setTarget(image, comps int) {
	v.image, v.comp = image, comps
	v.spec.Image, v.spec.ImageVersion = simImages[image], "v1."+strconv.Itoa(image)
	v.spec.KubernetesComponentsReference, v.spec.KubernetesClusterVersion = simComps[comps], simKube[comps]
	v.generation++
}

func (s *simulation) setAutoscaler(enabled, ours bool) {
	s.enabled, s.ours = enabled, ours
	a := Autoscaler{Enabled: enabled, PausedByUs: ours, Running: s.scaling}
	s.changed(simAutoscaler, func(o *simOperator) { o.autoscaler = a })
	s.after(s.between(time.Second, 10*time.Second), func() {
		if s.scaling != s.enabled {
			s.scaling = s.enabled
			s.say("the autoscaler runs: %v", s.scaling)
			a := Autoscaler{Enabled: s.enabled, PausedByUs: s.ours, Running: s.scaling}
			s.changed(simAutoscaler, func(o *simOperator) { o.autoscaler = a })
		}
	})
}

func (s *simulation) setGroup(g int) {
	v := s.gs[g].Group
	s.changed(simGroups, func(o *simOperator) {
		for len(o.groups) <= g {
			o.groups = append(o.groups, Group{})
		}
		o.groups[g] = v
	})
}

func (s *simulation) findIntent(name string) int {
	return slices.IndexFunc(s.intents, func(in *simIntent) bool { return in.Name == name })
}

// storeIntent replaces old by next; either may be nil.
func (s *simulation) storeIntent(old, next *simIntent) {
	if old != nil {
		if next == nil {
			s.intents = slices.DeleteFunc(s.intents, func(in *simIntent) bool { return in == old })
		} else {
			s.intents[slices.Index(s.intents, old)] = next
		}
		if old.place >= 0 {
			s.places[old.place] = placeFacts{}
			if i, ok := s.byToken[old.Token]; ok {
				s.machines[i].place = -1
			}
		} else if old.machineNo >= 0 {
			s.machines[old.machineNo].tracked, s.machines[old.machineNo].trackedLate = 0, false
		}
	} else {
		s.intents = append(s.intents, next)
	}
	if next != nil {
		if next.place >= 0 {
			for len(s.places) <= next.place {
				s.places = append(s.places, placeFacts{})
			}
			s.places[next.place] = placeFacts{used: true, leave: next.Goal == v1alpha1.LeaveGoal, group: s.groupNo(next.Group), upgrades: noMachine}
			if next.Goal == v1alpha1.UpgradeGoal {
				s.places[next.place].upgrades = next.machineNo
			}
			if i, ok := s.byToken[next.Token]; ok {
				s.machines[i].place = next.place
			}
		} else if next.machineNo >= 0 {
			s.machines[next.machineNo].tracked = 1
			if next.Goal == v1alpha1.LeaveGoal {
				s.machines[next.machineNo].tracked = 2
			}
		}
	}
	s.changed(simIntents, func(o *simOperator) {
		if old != nil {
			if i := slices.Index(o.intents, old); i >= 0 {
				if next == nil {
					o.intents = slices.Delete(o.intents, i, i+1)
				} else {
					o.intents[i] = next
				}
				return
			}
		}
		if next != nil && old == nil {
			o.intents = append(o.intents, next)
		}
	})
}

func (s *simulation) groupNo(id string) int {
	return slices.IndexFunc(s.gs, func(g simGroup) bool { return g.id == id })
}

// list makes the cloud list a state of a machine, after its lag.
func (s *simulation) list(i int, state string) {
	show := func() {
		s.m[i].listed = state
		s.cloudVersion++
		for _, o := range s.ops {
			o.wake()
		}
	}
	if lag := s.cloudLags - s.now; lag > 0 {
		s.unlisted++
		s.after(min(lag, s.between(0, s.lagMost)), func() {
			s.unlisted--
			if order := []string{"", "Creating", "Ready", "Terminating", "Terminated"}; slices.Index(order, s.m[i].listed) < slices.Index(order, state) {
				show()
			}
		})
		return
	}
	show()
}

// Bounds that the operator may rely on: the longest duration of a request to the cloud, and the lag
// of the cloud's list.
const (
	maxRequest     = time.Minute
	maxDescribeLag = 45 * time.Second
	maxMinutes     = 4 * time.Minute // of a cloud whose list lags by minutes
)

// machine creates a machine in the cloud.
func (s *simulation) machine(g int, token string) int {
	i := len(s.m)
	m := &simMachine{token: token, created: s.clock()}
	s.identify(i, g, m)
	s.m = append(s.m, m)
	s.machines = append(s.machines, fact{life: booting, group: g, image: s.groups[g].image, ours: token != "", place: -1, oldNode: noMachine, newNode: noMachine})
	if token != "" {
		s.byToken[token] = i
		if k := slices.IndexFunc(s.intents, func(in *simIntent) bool { return in.Token == token }); k >= 0 {
			s.machines[i].place = s.intents[k].place
		}
	}
	s.list(i, "Creating")
	boot := s.between(5*time.Second, s.slowBoot)
	s.after(boot, func() {
		if s.machines[i].life == booting {
			s.list(i, "Ready")
		}
	})
	s.after(boot+s.between(5*time.Second, s.slowJoins), func() {
		if late := m.late; late > 0 {
			m.late = 0
			s.after(late, func() { s.join(i) })
			return
		}
		s.join(i)
	})
	return i
}

// join creates the Node of a machine, now or later.
func (s *simulation) join(i int) {
	m, f := s.m[i], &s.machines[i]
	if f.life != booting || f.isNode {
		return
	}
	cp := s.control(f)
	learner := cp && slices.ContainsFunc(s.machines, func(o fact) bool { return o.member == 1 && o.life == running })
	hasNode := slices.ContainsFunc(s.byName[m.name], func(k int) bool { return s.m[k].node != nil })
	switch {
	case m.neverJoins:
		return
	case s.now < s.apiAway || learner || hasNode: // the join service gives no ticket while there is a Node of the name
		s.after(s.between(5*time.Second, 15*time.Second), func() { s.join(i) })
		return
	case cp && slices.ContainsFunc(s.intents, func(in *simIntent) bool { return in.Goal == v1alpha1.LeaveGoal && in.machineNo == i }):
		return // the join service refuses it
	}
	f.life, f.drained, f.comps = running, true, s.pubW
	if cp {
		f.comps, f.member = s.pubCP, 1
		f.api = f.comps
	}
	if m.wrong && !cp {
		f.comps = 0
	}
	if m.wrong {
		f.image = (f.image + 1) % len(simImages)
	}
	s.say("%s joins with image %d and components %d", m.name, f.image, f.comps)
	s.setNode(i, func(n *Node) {
		*n = Node{Name: m.name, Role: s.gs[f.group].role, ProviderID: s.bare(i), Group: s.gs[f.group].id, Kubelet: simKube[f.comps]}
	})
	s.after(s.between(time.Second, 10*time.Second), func() { s.setReady(i, true) })
	s.after(s.between(time.Second, 20*time.Second), func() {
		if f := &s.machines[i]; f.isNode {
			s.setNode(i, func(n *Node) { n.Image, n.Components, n.ProviderID = simImages[f.image], simComps[f.comps], m.id })
		}
	})
	s.after(s.between(10*time.Second, time.Minute), func() {
		if f := &s.machines[i]; f.cordon == Uncordoned {
			f.drained = false
		}
	})
	if cp {
		m.unnamed = true
		s.after(s.between(0, 15*time.Second), func() { m.unnamed = m.unnamed && s.machines[i].life != running })
		s.vote(i)
	}
}

func simAddress(i int) string { return fmt.Sprintf("10.0.%d.%d", i/256, i%256) }
func peerURL(i int) string    { return "https://" + simAddress(i) + ":2380" }

// vote promotes a learner to a voter.
func (s *simulation) vote(i int) {
	s.after(s.between(2*time.Second, 15*time.Second), func() {
		if f := &s.machines[i]; f.member == 1 && f.life == running && !f.sick && !s.m[i].unnamed {
			f.member = 2
			s.say("etcd: %s becomes a voter", s.m[i].name)
			s.wakeAll()
		} else if f.member == 1 && f.life == running {
			s.vote(i)
		}
	})
}

func (s *simulation) wakeAll() {
	for _, o := range s.ops {
		o.wake()
	}
}

func (s *simulation) setReady(i int, ready bool) {
	f := &s.machines[i]
	if !f.isNode || f.life != running {
		return
	}
	f.ready = ready
	s.setNode(i, func(n *Node) { n.Ready = ready })
}

// terminate carries out a deletion that the cloud has accepted.
func (s *simulation) terminate(i int) {
	f := &s.machines[i]
	if f.life != booting && f.life != running {
		return
	}
	s.say("the cloud deletes %s", s.m[i].name)
	f.life, f.ready = terminating, false
	s.list(i, "Terminating")
	s.elect()
	s.lost(i)
	s.after(s.between(5*time.Second, time.Minute), func() { s.end(i) })
}

// end removes a machine permanently.
func (s *simulation) end(i int) {
	f := &s.machines[i]
	if f.life == terminated {
		return
	}
	f.life, f.ready, s.m[i].ended = terminated, false, s.now
	s.say("%s is gone", s.m[i].name)
	s.list(i, "Terminated")
	for k := range s.machines {
		if s.machines[k].oldNode == i && !f.isNode {
			s.machines[k].oldNode = forgotten
		}
	}
	if m := s.m[i]; m.lie == lieClaim || m.lie == lieNoID {
		s.after(s.between(time.Second, time.Minute), func() {
			if f.isNode = s.m[i].node != nil; f.isNode {
				s.say("a person deletes the Node %s, which has no machine any more", m.name)
				s.removeNode(i)
			}
		})
	}
	s.elect()
	s.lost(i)
}

// lost marks the Node of a silent machine as not Ready, and moves operators that ran on it.
func (s *simulation) lost(i int) {
	s.after(40*time.Second, func() {
		if s.m[i].node != nil && s.m[i].node.Ready {
			s.setNode(i, func(n *Node) { n.Ready = false })
		}
	})
	for _, o := range s.ops {
		if o.up && o.host == i {
			o.stop()
			if o.leads {
				s.after(s.between(15*time.Second, time.Minute), func() { o.start() })
			}
		}
	}
	if s.run == 1 && s.upgrade.Node == s.m[i].name {
		s.after(s.between(time.Second, 2*time.Minute), func() { s.endUpgrade(s.m[i].name, false) })
	}
}

// elect makes etcd elect a leader among its healthy members.
func (s *simulation) elect() {
	if s.leader >= 0 {
		if m := &s.machines[s.leader]; m.member == 2 && m.life == running && !m.sick {
			return
		}
	}
	s.leader = noMachine
	for i := range s.machines {
		if m := &s.machines[i]; m.member == 2 && m.life == running && !m.sick {
			s.leader = i
			return
		}
	}
}

// upgradeNode starts an upgrade by the agent of a machine.
func (s *simulation) upgradeNode(i, comps int, a *Action) {
	s.machines[i].run = 1
	s.m[i].run = UpgradeRun{Version: a.Version, Components: a.Components, Node: a.Node, InPlace: true, Phase: "apply", Started: s.clock()}
	done := !s.occurs(upgradeFails, 40)
	s.after(s.between(10*time.Second, 3*time.Minute), func() {
		m, f := s.m[i], &s.machines[i]
		if f.life != running || f.run != 1 {
			return
		}
		if f.run, m.run.Phase, m.run.Ended = 3, "failed", s.clock(); done {
			f.run, m.run.Phase, f.comps = 2, "done", comps
			if s.control(f) {
				f.api = comps
			}
			if f.isNode {
				s.setNode(i, func(n *Node) { n.Kubelet = simKube[comps] })
			}
		}
		s.say("the agent of %s has ended: %s", m.name, m.run.Phase)
		s.wakeAll()
	})
}

func (s *simulation) endUpgrade(node string, done bool) {
	if s.run != 1 || s.upgrade.Node != node {
		return
	}
	i := s.find(node)
	switched := done || s.chance(30)
	if f := &s.machines[i]; switched && f.life == running && f.isNode && simOrder[s.runComps] > simOrder[f.api] {
		f.api = s.runComps
	}
	s.run, s.upgrade.Phase, s.upgrade.Ended = 3, "failed", s.clock()
	if done {
		s.run, s.upgrade.Phase = 2, "done"
	}
	s.say("the agent on %s has ended: %s", node, s.upgrade.Phase)
	s.wakeAll()
}

// quorumWithout reports whether etcd keeps its quorum without machine i.
func (s *simulation) quorumWithout(i int) bool {
	voters, healthy := 0, 0
	for k := range s.machines {
		m := &s.machines[k]
		if m.member == 2 {
			voters++
			if m.life == running && !m.sick && k != i {
				healthy++
			}
		}
	}
	return healthy >= voters/2+1
}

// otherIsOpen reports whether another control plane than machine i is Ready, takes pods and is
// not revoked.
func (s *simulation) otherIsOpen(i int) bool {
	for k := range s.machines {
		if m := &s.machines[k]; k != i && m.isNode && m.ready && m.life == running && s.control(m) && m.cordon == Uncordoned && !m.revoked {
			return true
		}
	}
	return false
}

// counts returns the Ready nodes by group and the healthy voters that only the operator could remove:
// those of machines that are neither joining nor leaving.
func (s *simulation) counts() (ready [32]int, voters int) {
	leaves := s.leaving()
	for i := range s.machines {
		m := &s.machines[i]
		if m.captured && m.oldNode >= 0 { // it counts instead of an honest one
			leaves[m.oldNode] = true
		}
	}
	for _, in := range s.intents {
		if i, ok := s.byToken[in.Token]; ok && in.oldNodeNo >= 0 && s.machines[i].captured {
			leaves[in.oldNodeNo] = true
		}
	}
	for i := range s.machines {
		m := &s.machines[i]
		if m.life != running || !s.stays(i, leaves) {
			continue
		}
		if m.isNode && m.ready && !m.captured {
			ready[m.group]++
		}
		if m.member == 2 && !m.sick {
			voters++
		}
	}
	return ready, voters
}

// stays reports whether a machine is neither joining nor leaving.
func (s *simulation) stays(i int, leaves map[int]bool) bool {
	m := &s.machines[i]
	newNode := m.ours && m.oldNode != forgotten && (m.oldNode < 0 || s.machines[m.oldNode].isNode && !leaves[m.oldNode])
	if h := m.newNode; h >= 0 && s.machines[h].life == terminated && s.m[h].node != nil && s.m[h].node.Ready {
		return false // it may leave before an operator can observe that its replacement node has died
	}
	return m.isNode && !m.obsolete && !leaves[i] && !newNode && (m.place < 0 || s.places[m.place].leave)
}

func (s *simulation) leaving() map[int]bool {
	out := map[int]bool{}
	for _, in := range s.intents {
		if in.Goal == v1alpha1.LeaveGoal {
			out[in.machineNo] = true
		}
	}
	return out
}

// forgive lowers the numbers that must be kept to those that a fault has left.
func (s *simulation) forgive() {
	ready, voters := s.counts()
	for g := range s.groups {
		s.groups[g].floor = min(s.groups[g].floor, ready[g])
	}
	s.voters = min(s.voters, voters)
}

// rely raises the numbers that must be kept to the current ones.
func (s *simulation) rely() {
	ready, voters := s.counts()
	for g := range s.groups {
		s.groups[g].floor = max(s.groups[g].floor, ready[g])
	}
	s.voters = max(s.voters, min(voters, s.controlPlanes))
}

// size returns the number of nodes of a group that are neither joining nor leaving.
func (s *simulation) size(g int) (n int) {
	leaves := s.leaving()
	for i := range s.machines {
		if m := &s.machines[i]; m.group == g && m.life == running && s.stays(i, leaves) {
			n++
		}
	}
	return n
}

// deadlines records which intents have passed their deadline.
func (s *simulation) deadlines() {
	for _, in := range s.intents {
		// This is independent of the clocks of the operators.
		age := s.now - in.recorded
		if in.place >= 0 {
			s.places[in.place].late = age >= CreateDeadline
		} else if in.machineNo >= 0 {
			s.machines[in.machineNo].trackedLate = age >= JoinDeadline/2
		}
	}
}

// check checks the invariants.
func (s *simulation) check() {
	if s.breach != "" {
		return
	}
	s.breach = s.broken()
	for i := range s.machines {
		f, m := &s.machines[i], s.m[i]
		if s.orphan(f) {
			f.counted = true
			s.grow(1)
			if s.control(f) {
				s.controlPlanes++
			}
		}
		if f.isNode || f.place >= 0 || f.tracked != 0 || f.life != booting && f.life != running {
			m.untracked = 0
			continue
		}
		if m.untracked == 0 {
			m.untracked = s.now + 1
		}
		// The operator could not track it while the API server was unavailable.
		if s.now-m.untracked > JoinDeadline && s.now-s.apiAway > 5*time.Minute {
			s.fail("invariant 8: %s is neither a Node nor tracked for longer than the time to join", m.name)
		}
	}
}

// faultKind is a kind of injected fault. Each seed has some of them.
type faultKind int

const (
	crashes faultKind = iota
	writesFail
	repeats
	slowWrites
	oldViews
	twoLeaders
	apiAway
	createsFail
	createsTimeOut
	deletesLost
	cloudAway
	cloudLags
	cloudPartial
	cloudSilent
	neverJoins
	joinsLate
	joinsWrong
	machineDies
	notReady
	memberSick
	upgradeFails
	budgetBlocks
	cordons
	uncordons
	switches
	nodeDeleted
	intentDeleted
	marksObsolete
	targetChanges
	pauses
	cancels
	autoscalerActs
	autoscalerSet
	groupAppears
	clockSkew
	holds
	liars
	captures
	revokes
	namesReused
	minuteLags
	lucks
)

var faultNames = [...]string{
	crashes: "crashes", writesFail: "writes-fail", repeats: "repeats", slowWrites: "slow-writes", oldViews: "old-views", twoLeaders: "two-leaders", apiAway: "api-away",
	createsFail: "creates-fail", createsTimeOut: "creates-time-out", deletesLost: "deletes-lost", cloudAway: "cloud-away", cloudLags: "cloud-lags", cloudPartial: "cloud-partial", cloudSilent: "cloud-silent",
	neverJoins: "never-joins", joinsLate: "joins-late", joinsWrong: "joins-wrong", machineDies: "machine-dies", notReady: "not-ready", memberSick: "member-sick", upgradeFails: "upgrade-fails",
	budgetBlocks: "budget-blocks", cordons: "cordons", uncordons: "uncordons", switches: "switches", nodeDeleted: "node-deleted", intentDeleted: "intent-deleted", marksObsolete: "marks-obsolete",
	targetChanges: "target-changes", pauses: "pauses", cancels: "cancels", autoscalerActs: "autoscaler-acts", autoscalerSet: "autoscaler-set", groupAppears: "group-appears", clockSkew: "clock-skew", holds: "holds", liars: "liars", captures: "captures", revokes: "revokes", namesReused: "names-reused", minuteLags: "minute-lags",
}

func (l faultKind) String() string { return faultNames[l] }

func (s *simulation) has(l faultKind) bool { return !s.calm && slices.Contains(s.kinds, l) }

// occurs reports whether a fault of this kind occurs now.
func (s *simulation) occurs(l faultKind, percent int) bool { return s.has(l) && s.chance(percent) }

func newSimulation(seed uint64, off rule) *simulation {
	s := &simulation{seed: seed, off: off, rng: rand.New(rand.NewPCG(seed, 1)), byName: map[string][]int{}, byID: map[string]int{}, byToken: map[string]int{}, latency: 0}
	nodes := 10 + s.rng.IntN(20)
	switch p := s.rng.IntN(1000); {
	case p < 2:
		nodes = 300 + s.rng.IntN(201)
	case p < 15:
		nodes = 60 + s.rng.IntN(100)
	}
	s.controlPlanes = []int{1, 3, 3, 3, 5}[s.rng.IntN(5)]
	workerGroups := 1 + s.rng.IntN(6)
	s.surgeIs = intstr.FromInt32(int32(1 + s.rng.IntN(max(2, nodes/6))))
	if s.chance(40) {
		s.surgeIs = intstr.FromString(strconv.Itoa(1+s.rng.IntN(40)) + "%")
	}
	if s.chance(50) {
		s.latency = s.between(10*time.Millisecond, time.Second)
	}
	for range s.rng.IntN(10) {
		s.kinds = append(s.kinds, faultKind(s.rng.IntN(int(liars))))
	}
	attackers := rand.New(rand.NewPCG(seed, 2)) // a source of its own, so that seeds without attackers run as before
	for _, l := range []faultKind{liars, captures, revokes} {
		if attackers.IntN(100) < 30 {
			s.kinds = append(s.kinds, l)
		}
	}
	odd := rand.New(rand.NewPCG(seed, 3))
	for _, l := range []faultKind{namesReused, minuteLags} {
		if odd.IntN(100) < 20 {
			s.kinds = append(s.kinds, l)
		}
	}
	s.reuses, s.lagMost = slices.Contains(s.kinds, namesReused), maxDescribeLag
	if slices.Contains(s.kinds, minuteLags) {
		s.lagMost = maxMinutes
	}
	slices.Sort(s.kinds)
	s.kinds = slices.Compact(s.kinds)
	s.slowBoot, s.slowJoins = s.between(6*time.Second, time.Minute), s.between(10*time.Second, 3*time.Minute)

	s.kube = simOrder
	s.leader = noMachine
	s.version = &simVersion{}
	for g := range 1 + workerGroups {
		role := v1alpha1.WorkerRole
		if g == 0 {
			role = v1alpha1.ControlPlaneRole
		}
		s.addGroup(role)
	}
	for i := range nodes {
		g := 0
		if i >= s.controlPlanes {
			g = 1 + s.rng.IntN(workerGroups)
		}
		s.addNode(g)
	}
	s.shall, s.surge = nodes, surge(&s.surgeIs, nodes)
	s.rely()
	s.elect()
	s.enabled = s.chance(80)
	s.scaling, s.othersStopped = s.enabled, !s.enabled
	s.version.status.JoinComponents = v1alpha1.JoinComponents{ControlPlane: simComps[0], Worker: simComps[0]}
	s.version.setTarget(0, 0)
	max := s.surgeIs
	s.version.spec.Rollout = v1alpha1.Rollout{MaxSurge: &max, KeepWorkers: s.chance(5)}
	for no := range s.ops {
		s.ops[no] = &simOperator{s: s, no: no}
	}
	s.setVersion(func(*simVersion) {})
	s.ops[0].leads = true
	s.ops[0].start()

	s.after(s.between(0, time.Minute), func() { s.target(1, s.rng.IntN(4)) })
	s.healAt = s.between(10*time.Minute, 100*time.Minute)
	s.after(s.healAt, s.heal)
	for _, l := range s.kinds {
		s.scheduleFaults(l)
	}
	s.everyMinute()
	return s
}

func (s *simulation) everyMinute() {
	s.rely()
	s.after(time.Minute, s.everyMinute)
}

func (s *simulation) addGroup(role v1alpha1.Role) int {
	g := len(s.gs)
	id := fmt.Sprintf("sandboxes/s/groups/g%d", g)
	strategy := v1alpha1.ReplaceStrategy
	if s.chance(10) {
		strategy = v1alpha1.InPlaceStrategy
	}
	s.gs = append(s.gs, simGroup{Group: Group{Name: fmt.Sprintf("g%d", g), ID: id, Role: role, Image: simImages[0], Strategy: strategy}, id: id, role: role})
	s.groups = append(s.groups, groupFacts{controlPlanes: role == v1alpha1.ControlPlaneRole, inPlace: strategy == v1alpha1.InPlaceStrategy})
	return g
}

// addNode adds a node that joined long ago.
func (s *simulation) addNode(g int) {
	i := len(s.m)
	m := &simMachine{created: s.clock().Add(-24 * time.Hour), listed: "Ready"}
	s.identify(i, g, m)
	f := fact{life: running, group: g, place: -1, isNode: true, ready: true, known: true, oldNode: noMachine, newNode: noMachine}
	if g == 0 {
		f.member = 2
	}
	m.node = &Node{Name: m.name, Role: s.gs[g].role, Ready: true, ProviderID: m.id, Kubelet: simKube[0], Image: simImages[0], Components: simComps[0], Group: s.gs[g].id}
	s.m, s.machines = append(s.m, m), append(s.machines, f)
}

// target sets the cluster's target.
func (s *simulation) target(image, comps int) {
	s.say("a person sets the target: image %d, components %d", image, comps)
	s.setVersion(func(v *simVersion) { v.setTarget(image, comps) })
}

// some returns a random machine that matches, or -1.
func (s *simulation) some(fits func(i int, m *fact) bool) int {
	from := s.rng.IntN(len(s.m))
	for k := range s.m {
		if i := (from + k) % len(s.m); fits(i, &s.machines[i]) {
			return i
		}
	}
	return -1
}

func workerNode(s *simulation) func(int, *fact) bool {
	return func(_ int, m *fact) bool { return m.isNode && m.life == running && !s.control(m) }
}

// scheduleFaults schedules faults of a kind at random intervals.
func (s *simulation) scheduleFaults(l faultKind) {
	strike := s.strikes(l)
	if strike == nil {
		return // the code that it concerns calls occurs
	}
	var again func()
	again = func() {
		if s.calm {
			return
		}
		strike()
		s.after(s.between(time.Minute, 15*time.Minute), again)
	}
	s.after(s.between(0, 12*time.Minute), again)
}

// for a while.
func (s *simulation) until(least, most time.Duration) time.Duration {
	return s.now + s.between(least, most)
}

func (s *simulation) rollout(change func(r *v1alpha1.Rollout)) {
	s.setVersion(func(v *simVersion) { change(&v.spec.Rollout); v.generation++ })
}

// strikes returns the effect of a kind of fault.
func (s *simulation) strikes(l faultKind) func() {
	switch l {
	case slowWrites:
		return func() {
			s.ops[0].slow = s.until(10*time.Second, 3*time.Minute)
			s.say("operator 0 is slow until %s", s.ops[0].slow)
		}
	case oldViews:
		return func() {
			o := s.ops[s.rng.IntN(2)]
			k := s.rng.IntN(kinds + 1)
			if until := s.until(time.Second, 50*time.Second); k == kinds {
				o.cloudFrozen = until
			} else {
				o.frozen[k] = until
			}
			s.say("operator %d sees no changes of kind %d for a while", o.no, k)
		}
	case twoLeaders:
		return func() {
			o := s.ops[1]
			if o.up {
				return
			}
			o.leads = true
			o.start()
			if o.slow = s.now; s.chance(50) {
				o.slow = s.until(0, 2*time.Minute)
			}
			s.after(s.between(10*time.Second, 2*time.Minute), func() { o.leads = false; o.stop() })
		}
	case apiAway:
		return func() { s.loseAPI(s.between(5*time.Second, 10*time.Minute)) }
	case cloudAway:
		return func() {
			s.cloudFails = s.until(5*time.Second, 5*time.Minute)
			s.say("the cloud refuses every request until %s", s.cloudFails)
		}
	case cloudLags:
		return func() {
			s.cloudLags = s.until(time.Minute, 10*time.Minute)
			s.say("the cloud's list lags until %s", s.cloudLags)
		}
	case minuteLags:
		return func() {
			s.cloudLags = s.until(5*time.Minute, 15*time.Minute)
			s.say("the cloud's list lags by minutes until %s", s.cloudLags)
		}
	case namesReused:
		return func() {
			if g := s.rng.IntN(len(s.gs)-1) + 1; s.freeName(g) != "" {
				i := s.machine(g, "")
				s.grow(1)
				s.say("a person adds %s to group %d", s.m[i].name, g)
			}
		}
	case cloudPartial:
		return func() {
			s.cloudPartial = s.until(time.Minute, 8*time.Minute)
			s.say("the cloud's list is partial until %s", s.cloudPartial)
		}
	case cloudSilent:
		return func() {
			if i := s.some(func(i int, m *fact) bool { return m.life == booting || m.life == running }); i >= 0 {
				s.m[i].silent = s.until(0, maxDescribeLag)
				s.say("the cloud's list lacks %s", s.m[i].name)
			}
		}
	case machineDies:
		return func() {
			if i := s.some(func(i int, m *fact) bool {
				return m.life == running && (!s.control(m) || s.quorumWithout(i) && !s.anySick())
			}); i >= 0 {
				s.say("%s dies", s.m[i].name)
				s.machines[i].ready = false
				s.end(i)
				s.forgive()
			}
		}
	case notReady:
		return func() {
			if i := s.some(func(_ int, m *fact) bool { return m.isNode && m.ready && m.life == running && !s.control(m) }); i >= 0 {
				s.say("%s is NotReady", s.m[i].name)
				s.setReady(i, false)
				s.forgive()
				s.after(s.between(time.Minute, 25*time.Minute), func() { s.setReady(i, true) })
			}
		}
	case memberSick:
		return func() {
			if i := s.some(func(i int, m *fact) bool {
				return m.member == 2 && m.life == running && s.quorumWithout(i) && !s.anySick()
			}); i >= 0 {
				s.say("the etcd member of %s is not healthy", s.m[i].name)
				s.machines[i].sick = true
				s.elect()
				s.forgive()
				s.after(s.between(10*time.Second, 20*time.Minute), func() { s.machines[i].sick = false; s.elect() })
			}
		}
	case budgetBlocks:
		return func() {
			g := 1 + s.rng.IntN(len(s.gs)-1)
			if s.groups[g].blocked {
				return
			}
			s.say("a PodDisruptionBudget blocks group %d", g)
			s.groups[g].blocked = true
			s.after(s.between(time.Minute, time.Hour), func() { s.groups[g].blocked = false })
		}
	case cordons:
		return func() {
			if i := s.some(func(_ int, m *fact) bool { return m.isNode && m.life == running && m.cordon == Uncordoned }); i >= 0 {
				s.say("a person cordons %s", s.m[i].name)
				s.setNode(i, func(n *Node) { n.Cordon = CordonedByOthers })
				s.after(s.between(time.Minute, 50*time.Minute), func() { s.uncordon(i) })
			}
		}
	case uncordons:
		return func() {
			if i := s.some(func(_ int, m *fact) bool { return m.isNode && m.cordon == CordonedByUs && !s.control(m) }); i >= 0 {
				s.say("a person uncordons %s", s.m[i].name)
				s.setNode(i, func(n *Node) { n.Cordon, n.CordonedSince = Uncordoned, time.Time{} })
			}
		}
	case switches:
		return func() {
			g := s.rng.IntN(len(s.gs))
			to := v1alpha1.InPlaceStrategy
			if s.groups[g].inPlace {
				to = v1alpha1.ReplaceStrategy
			}
			s.say("a person sets the strategy of group %d: %s", g, to)
			s.groups[g].inPlace = !s.groups[g].inPlace
			if s.gs[g].Name != "" {
				s.gs[g].Strategy = to
				s.setGroup(g)
			}
		}
	case nodeDeleted:
		return func() {
			if i := s.some(workerNode(s)); i >= 0 {
				s.say("a person deletes the Node %s", s.m[i].name)
				s.machines[i].nodeWasDeleted = true
				s.removeNode(i)
				s.forgive()
			}
		}
	case intentDeleted:
		return func() {
			var seen []*simIntent
			for _, in := range s.intents {
				// The list contains a machine that was just created or deleted only sometimes.
				i, ok := s.byToken[in.Token]
				settled := in.machineNo < 0 || s.machines[in.machineNo].life == running && s.ops[0].asked[s.m[in.machineNo].id] == 0 && s.ops[1].asked[s.m[in.machineNo].id] == 0
				if in.place >= 0 && ok && settled && (in.oldNodeNo < 0 || !s.machines[in.oldNodeNo].obsolete) && s.m[i].created.Add(2*time.Minute+s.lagMost-maxDescribeLag).Before(s.clock()) {
					seen = append(seen, in)
				}
			}
			if len(seen) > 0 {
				in := seen[s.rng.IntN(len(seen))]
				s.say("a person deletes the intent %s", in.Name)
				s.storeIntent(in, nil)
				s.forgive()
			}
		}
	case marksObsolete:
		return func() {
			if i := s.some(func(i int, m *fact) bool {
				return workerNode(s)(i, m) && !m.obsolete && (m.place < 0 || s.places[m.place].leave) && s.size(m.group) > 2
			}); i >= 0 {
				s.say("a person marks %s obsolete", s.m[i].name)
				s.setNode(i, func(n *Node) { n.Obsolete = true })
				s.forgive()
			}
		}
	case targetChanges:
		return func() {
			if s.chance(60) {
				s.target(s.rng.IntN(4), s.rng.IntN(4))
			}
		}
	case pauses:
		return func() {
			s.say("a person pauses")
			s.rollout(func(r *v1alpha1.Rollout) { r.Paused = true })
			s.after(s.between(time.Minute, 30*time.Minute), func() { s.rollout(func(r *v1alpha1.Rollout) { r.Paused = false }) })
		}
	case cancels:
		return func() {
			s.say("a person cancels")
			s.rollout(func(r *v1alpha1.Rollout) { r.Cancel = true })
			s.after(s.between(time.Minute, 20*time.Minute), func() { s.rollout(func(r *v1alpha1.Rollout) { r.Cancel = false }) })
		}
	case holds:
		return func() {
			if g := s.rng.IntN(len(s.gs)); s.chance(30) && s.gs[g].Name != "" {
				s.holdGroup(g, true)
				if s.chance(70) {
					s.after(s.between(time.Minute, 40*time.Minute), func() { s.holdGroup(g, false) })
				}
			} else if i := s.some(func(_ int, m *fact) bool { return m.isNode && m.life == running }); i >= 0 {
				s.hold(i, true)
				if s.chance(70) {
					s.after(s.between(time.Minute, 40*time.Minute), func() { s.hold(i, false) })
				}
			}
		}
	case liars:
		return s.moreLiars
	case captures:
		return func() {
			if i := s.some(workerNode(s)); i >= 0 && !s.machines[i].captured {
				s.say("%s is captured", s.m[i].name)
				s.machines[i].captured = true
				g := &s.groups[s.machines[i].group]
				g.floor = max(0, g.floor-1)
				s.forgive()
				s.lies(i)
			}
		}
	case revokes:
		return func() {
			if i := s.some(func(i int, m *fact) bool {
				if s.now < s.apiAway || !m.isNode || m.life != running || m.revoked || m.tracked != 0 || s.findIntent(revocation.RemovalPrefix+s.m[i].name) >= 0 {
					return false
				}
				// The console refuses to revoke the last control plane that takes pods.
				return s.control(m) && m.member == 2 && s.quorumWithout(i) && !s.anySick() && s.otherIsOpen(i) || !s.control(m) && s.size(m.group) > 2
			}); i >= 0 {
				s.say("a person revokes %s", s.m[i].name)
				s.machines[i].revoked = true
				s.storeIntent(nil, &simIntent{Intent: Intent{
					Name: revocation.RemovalPrefix + s.m[i].name, Goal: v1alpha1.LeaveGoal, Machine: s.m[i].id, Node: s.m[i].name, Group: s.gs[s.machines[i].group].id, Revoked: true,
				}, place: -1, machineNo: i, oldNodeNo: noMachine, recorded: s.now})
				s.setNode(i, func(n *Node) {
					if n.Cordon == Uncordoned {
						n.Cordon = CordonedByOthers
					}
				})
				s.forgive()
			}
		}
	case autoscalerSet:
		return func() {
			s.othersStopped = s.chance(50)
			s.say("a person sets the autoscaler: enabled %v", !s.othersStopped)
			s.setAutoscaler(!s.othersStopped, false)
		}
	case autoscalerActs:
		return func() {
			if s.scaling {
				s.scale()
			}
		}
	case groupAppears:
		return func() {
			if len(s.gs) >= 12 {
				return
			}
			g := s.addGroup(v1alpha1.WorkerRole)
			hidden := s.gs[g].Group
			hidden.Strategy = v1alpha1.ReplaceStrategy
			s.groups[g].inPlace = false
			s.gs[g].Group = Group{}
			n := 1 + s.rng.IntN(3)
			s.say("a person creates group %d with %d machines", g, n)
			s.groups[g].image = s.rng.IntN(len(simImages))
			hidden.Image = simImages[s.groups[g].image]
			for range n {
				s.machine(g, "")
			}
			s.grow(n)
			s.after(s.between(time.Second, 30*time.Second), func() {
				if s.groups[g].inPlace {
					hidden.Strategy = v1alpha1.InPlaceStrategy
				}
				s.gs[g].Group = hidden
				s.setGroup(g)
			})
		}
	}
	return nil
}

// lies changes the false claims of a captured machine's Node from time to time.
func (s *simulation) lies(i int) {
	if s.calm || s.machines[i].life != running {
		return
	}
	m := s.m[i]
	m.lie, m.about = s.rng.IntN(lies), s.rng.IntN(len(s.m))
	s.say("the Node %s makes false claim %d about %s", m.name, m.lie, s.m[m.about].name)
	s.wakeAll()
	s.after(s.between(time.Second, 5*time.Minute), func() { s.lies(i) })
}

// lied returns n with the claims of a captured machine's Node.
func (s *simulation) lied(i int, n Node) Node {
	about := s.m[s.m[i].about]
	switch s.m[i].lie {
	case lieClaim:
		n.ProviderID, n.Obsolete = about.id, true
	case lieOldNode:
		n.OldNode = about.name
	case lieGroup:
		n.Group, n.Role = s.gs[0].id, v1alpha1.ControlPlaneRole
	case lieImage:
		n.Image = simImages[s.image]
	case lieKubelet:
		n.Kubelet = "v1.99.0"
	case lieNoID:
		n.ProviderID = ""
	case lieDenies:
		n.OldNode = ""
	}
	return n
}

// moreLiars adds a Node without a machine, and changes the claims of all such Nodes.
func (s *simulation) moreLiars() {
	s.liars = append(s.liars, Node{Name: liarName + strconv.Itoa(len(s.liars)), Role: v1alpha1.WorkerRole})
	for i := range s.liars {
		n, about := &s.liars[i], s.m[s.rng.IntN(len(s.m))]
		n.ProviderID = about.id
		if s.chance(10) {
			n.ProviderID = "sandbox://s/none"
		}
		n.Ready, n.Obsolete, n.OldNode, n.Replacement, n.Kubelet = s.chance(80), s.chance(50), s.m[s.rng.IntN(len(s.m))].name, about.name, "v1.99.0"
		n.Group, n.Image, n.Components = s.gs[s.rng.IntN(len(s.gs))].id, simImages[s.rng.IntN(len(simImages))], simComps[s.rng.IntN(len(simComps))]
		n.Cordon, n.Drained = Cordon(s.rng.IntN(3)), s.chance(50)
	}
	s.say("%d Nodes without a machine claim other machines", len(s.liars))
	s.wakeAll()
}

func (s *simulation) grow(n int) {
	s.shall += n
	s.surge = max(s.surge, surge(&s.surgeIs, s.shall))
}

func (s *simulation) anySick() bool {
	return slices.ContainsFunc(s.machines, func(m fact) bool { return m.sick || m.member != 0 && m.life != running })
}

func (s *simulation) uncordon(i int) {
	if m := &s.machines[i]; m.isNode && m.cordon == CordonedByOthers && !m.revoked {
		s.say("a person uncordons %s", s.m[i].name)
		s.setNode(i, func(n *Node) { n.Cordon = Uncordoned })
	}
}

// scale makes the autoscaler act.
func (s *simulation) scale() {
	if s.chance(50) {
		g := 1 + s.rng.IntN(len(s.gs)-1)
		i := s.machine(g, "")
		s.grow(1)
		s.say("the autoscaler creates %s", s.m[i].name)
		return
	}
	if i := s.some(func(i int, m *fact) bool {
		return workerNode(s)(i, m) && m.place < 0 && m.cordon == Uncordoned && s.size(m.group) > 2
	}); i >= 0 {
		s.say("the autoscaler deletes %s", s.m[i].name)
		s.removeNode(i)
		s.terminate(i)
		s.forgive()
	}
}

// hold makes a person skip a node, or resume it.
func (s *simulation) hold(i int, held bool) {
	if n := s.m[i].node; n == nil || n.OnHold == held {
		return
	}
	s.say("a person sets the hold of %s: %v", s.m[i].name, held)
	s.setNode(i, func(n *Node) {
		if n.OnHold = held; !held {
			n.RetryRequest = "now"
		}
	})
}

func (s *simulation) holdGroup(g int, held bool) {
	if s.gs[g].OnHold == held {
		return
	}
	s.say("a person sets the hold of group %d: %v", g, held)
	s.gs[g].OnHold = held
	for i := range s.machines {
		if m := &s.machines[i]; m.group == g && m.isNode {
			m.held = held || s.m[i].node.OnHold
		}
	}
	s.setGroup(g)
}

// release makes people resume nodes and groups that are on hold, all or a random choice. It reports
// whether there were any. Workers wait for control planes, so all control planes are resumed.
func (s *simulation) release(all bool) (some bool) {
	for g := range s.gs {
		if some = some || s.gs[g].OnHold; s.gs[g].OnHold && (all || g == 0 || s.chance(50)) {
			s.holdGroup(g, false)
		}
	}
	for i, m := range s.m {
		if m.node != nil && m.node.OnHold {
			if some = true; all || s.control(&s.machines[i]) || s.chance(50) {
				s.hold(i, false)
			}
		}
	}
	return some
}

// heal ends all faults after the operators have observed those that had begun. Their consequences
// stay. People undo their interventions, and set the newest target.
func (s *simulation) heal() {
	s.calm, s.latency = true, 0
	last := max(s.apiAway, s.ops[0].busy)
	for _, o := range s.ops {
		o.slow, o.frozen, o.cloudFrozen = 0, [kinds]time.Duration{}, 0
		last = max(last, slices.Max(o.delivers[:]))
	}
	if last > s.now {
		s.after(last-s.now+time.Second, s.heal)
		return
	}
	s.say("faults end")
	s.healed, s.healAt = true, s.now
	s.cloudFails, s.cloudPartial, s.cloudLags = 0, 0, 0
	for i, m := range s.m {
		m.silent = 0
		s.machines[i].sick = false
		if m.lie == lieKubelet && s.groups[s.machines[i].group].inPlace { // people handle an in-place upgrade that fails
			m.lie = honest
		}
		s.uncordon(i)
		if f := &s.machines[i]; f.isNode && f.life == running && !f.ready {
			s.setReady(i, true)
		}
	}
	for g := range s.groups {
		s.groups[g].blocked = false
	}
	s.ops[1].leads = false
	s.ops[1].stop()
	s.elect()
	s.rollout(func(r *v1alpha1.Rollout) { r.Paused, r.Cancel = false, false })
	newest := s.comps
	for _, c := range []int{s.pubCP, s.pubW, s.runComps} {
		if simOrder[c] > simOrder[newest] {
			newest = c
		}
	}
	if newest != s.comps {
		s.target(s.image, newest)
	}
	s.release(false)
	waves := (s.shall + s.surge - 1) / s.surge
	s.patience = 3*time.Hour + time.Duration(waves+s.controlPlanes)*10*time.Minute
	s.wakeAll()
}

// extra names a machine that was created to replace a node which is not replaced; empty: none.
func (s *simulation) extra() string {
	for i := range s.machines {
		m := &s.machines[i]
		if d := m.oldNode; m.life == running && d >= 0 && s.machines[d].life == running && s.machines[d].isNode && s.machines[d].held {
			return fmt.Sprintf("%s was created for %s, which is on hold", s.m[i].name, s.m[d].name)
		}
	}
	return ""
}
