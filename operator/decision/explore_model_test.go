package decision

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/util/intstr"

	"constellation/engine/cloud"
	"constellation/engine/revocation"
	"constellation/operator/api/v1alpha1"
)

// The model world of the explorer: a cluster so small that all of its states can be visited, with
// all events of large clusters. A state is a plain value of bytes.

const (
	maxMachines    = 7
	maxPlaces      = 3               // of a surge of two slots, one may be stuck
	deletedMachine = maxMachines + 1 // a name whose machine no longer exists
)

// Life of a machine in the cloud.
const (
	absent = iota
	booting
	running
	terminating
	terminated // and the cloud still lists it
)

// Groups: the first holds the control planes.
const (
	cpModel = iota
	workersA
	workersB
	modelGroups
)

type modelMachine struct {
	life, group, image, comps, token uint8
	failed                           bool // it never joins
	isNode, ready, known             bool
	cordon                           uint8
	drained, postponed, obsolete     bool
	held                             bool
	oldNode, newNode                 uint8 // 0: none, else machine+1
	late, drainLate                  bool
	member                           uint8 // 0 none, 1 learner, 2 voter
	api                              uint8
	tracked                          uint8 // PendingNode without a surge slot: 0 none, 1 Join, 2 Leave
	trackedLate                      bool
	noted                            uint8 // components in the Node's annotation
	run, runComps                    uint8 // of its agent for the node: 0 none, 1 active, 2 done, 3 failed
	silent, broken                   bool  // the agent does not answer; fails each time
	recent                           bool  // the run failed recently
	retry                            uint8 // retry request of the Node: 0 none, 1 by its owner, 2 for this run, 3 for an earlier run
	origin                           uint8 // that it was created to replace, by its token: 0 none, else machine+1
	revoked                          bool  // a person has revoked it, and the intent exists
	captured                         bool  // an attacker writes its Node
	lie, about                       uint8 // false claim of the Node; machine+1 that it concerns
	alias                            uint8 // machine+1 whose name and ID the cloud gave to it; 0: its own
	died                             bool  // not by a request of the operator
}

// Lies of a captured machine's Node.
const (
	honest     = iota
	lieClaim   // it is another machine, and obsolete
	lieOldNode // it replaces another node
	lieGroup   // it is a control plane
	lieImage   // it has the target's image
	lieKubelet // its kubelet is newer than everything
	lieNoID    // it names no machine
	lieDenies  // it replaces nothing
	lies
)

// liarName is the name of a Node without a machine.
const liarName = "liar"

// misses reports whether m has no Node that names it.
func (m *modelMachine) misses() bool { return !m.isNode || m.lie == lieClaim || m.lie == lieNoID }

type modelPlace struct {
	used, leave, upgrade bool
	oldNode, token       uint8
	machine              uint8 // machine+1 that it is bound to
	group                uint8
	late                 bool
	spent                bool // its token has made a machine that the cloud has forgotten
}

// modelAction is a delayed action. A leader that is slow, or is no longer leader, decided it. It
// takes effect at any later time, or never.
type modelAction struct {
	kind                                ActionKind
	node, other, place, token, group    uint8
	target, pubCP, pubW, oldNode, extra uint8
	flag, up                            bool // up: of an intent to upgrade
}

type modelState struct {
	m      [maxMachines]modelMachine
	places [maxPlaces]modelPlace
	flying modelAction

	target                     uint8
	paused, pausedLong, cancel bool
	enabled, ours, scaling     bool // the autoscaler: enabled, paused by us, running
	images                     [modelGroups]uint8
	inPlace                    [modelGroups]bool
	pubCP, pubW                uint8
	addons                     uint8             // components that kubeadm has upgraded the add-ons to
	run, runTarget, runNode    uint8             // run: 0 none, 1 active, 2 done, 3 failed
	blocked                    [modelGroups]bool // by a PodDisruptionBudget
	lease, leader              uint8
	floor                      [modelGroups]uint8 // Ready nodes that only the operator could remove
	voters                     uint8
	faults                     uint8 // that may still happen
	liar                       uint8 // machine+1 that a Node without a machine claims; 0: no such Node
	liarGoes                   bool  // and it claims to be obsolete
	more                       uint8 // machines that the cloud has made on its own
}

// scenario is the initial state of an exploration, with its possible events.
type scenario struct {
	name               string
	nodes              [modelGroups]int
	surge, faults      int
	from, target       uint8
	keepWorkers        bool
	inPlace            [modelGroups]bool // they are upgraded in place
	stale              bool              // slow leaders and incomplete views
	with               string            // kinds of faults, see fault
	othersStoppedScale bool
	lies               []uint8 // false claims of a captured machine's Node; nil: all
	taken              bool    // it begins with control planes at the target, and with a captured worker that has replaced another
	reuses             bool    // the cloud gives names and IDs of deleted machines to new ones
	joins              bool    // its last machine joins, and was not made by the operator
	halfGone           bool    // it begins with a control plane that has left etcd and lost its intent and its cordon
}

func (c *scenario) total() int { return c.nodes[0] + c.nodes[1] + c.nodes[2] }

// The targets: image and components. The second components have a newer Kubernetes.
var modelTargets = [...]struct{ image, comps uint8 }{{0, 0}, {1, 0}, {1, 1}}

var (
	modelNow    = time.Date(2030, 1, 1, 12, 0, 0, 0, time.UTC)
	modelImages = [...]string{image1, image2}
	modelComps  = [...]string{refA, refB}
	modelKube   = [...]string{"v1.35.4", "v1.36.3"}
	modelByRef  = map[string]string{refA: modelKube[0], refB: modelKube[1]}
	modelName   = table("m", maxMachines)
	modelID     = table("id", maxMachines)
	modelGroup  = table("g", modelGroups)
	modelToken  = table("t", 16)
	modelMark   = table("mark", maxMachines)
)

func table(prefix string, n int) []string {
	out := make([]string, n)
	for i := range out {
		out[i] = prefix + strconv.Itoa(i)
	}
	return out
}

func index(all []string, s string) int { return slices.Index(all, s) }

// mention is the name of machine number i-1.
func mention(i uint8) string {
	switch i {
	case 0:
		return ""
	case deletedMachine:
		return "gone"
	}
	return modelName[i-1]
}

// base returns the machine whose name and ID machine i has, which is i itself unless they are reused.
func (s *modelState) base(i int) int {
	if a := s.m[i].alias; a != 0 {
		return int(a) - 1
	}
	return i
}

// mention is the name of machine number i-1.
func (s *modelState) mention(i uint8) string {
	if i == 0 || i == deletedMachine {
		return mention(i)
	}
	return modelName[s.base(int(i)-1)]
}

// id returns the ID of machine i, with an incarnation if the cloud reuses IDs.
func (s *modelState) id(c *scenario, i int) string {
	if !c.reuses {
		return modelID[i]
	}
	return cloud.Key(modelID[s.base(i)], strconv.Itoa(i))
}

// address returns the address of machine i, if it matters.
func (s *modelState) address(c *scenario, i int) string {
	if !c.reuses {
		return ""
	}
	return "10.0.0." + strconv.Itoa(i)
}

// numbered is the inverse of mention. Of several machines with one name it prefers that with a Node.
func (s *modelState) numbered(name string) uint8 {
	return s.prefer(name, func(m *modelMachine) bool { return m.isNode })
}

// prefer returns the number of a machine called name. Of several, it is the first that is wanted, or
// else one that exists.
func (s *modelState) prefer(name string, wanted func(m *modelMachine) bool) uint8 {
	switch name {
	case "":
		return 0
	case "gone":
		return deletedMachine
	}
	best, rank := index(modelName, name), 0
	for i := range s.m {
		m := &s.m[i]
		if modelName[s.base(i)] != name || *m == (modelMachine{}) {
			continue
		}
		r := 1
		if m.life == booting || m.life == running {
			r = 2
		}
		if wanted(m) {
			r = 3
		}
		if r > rank {
			best, rank = i, r
		}
	}
	return uint8(best + 1)
}

// byID returns the number of the machine that the cloud has for an ID.
func (s *modelState) byID(c *scenario, id string) uint8 {
	for i := range s.m {
		if s.m[i].life != absent && s.id(c, i) == id {
			return uint8(i + 1)
		}
	}
	best := 0
	for i := range s.m { // an ID without incarnation
		if m := &s.m[i]; m.life != absent && modelID[s.base(i)] == id && (best == 0 || m.life == booting || m.life == running) {
			best = i + 1
		}
	}
	if bare, _ := cloud.SplitKey(id); best == 0 {
		best = index(modelID, bare) + 1
	}
	return uint8(best)
}

// sharesName reports whether another machine with the name of i matches.
func (s *modelState) sharesName(i int, matches func(m *modelMachine) bool) bool {
	for k := range s.m {
		if k != i && s.base(k) == s.base(i) && matches(&s.m[k]) {
			return true
		}
	}
	return false
}

func (c *scenario) start() modelState {
	var s modelState
	i := 0
	for g, n := range c.nodes {
		for range n {
			s.m[i] = modelMachine{
				life: running, group: uint8(g), image: modelTargets[c.from].image, comps: modelTargets[c.from].comps,
				isNode: true, ready: true, known: true, noted: modelTargets[c.from].comps,
			}
			if g == cpModel {
				s.m[i].member, s.m[i].api = 2, s.m[i].comps
			}
			i++
		}
		s.floor[g], s.images[g] = uint8(n), modelTargets[c.from].image
	}
	s.pubCP, s.pubW, s.addons = modelTargets[c.from].comps, modelTargets[c.from].comps, modelTargets[c.from].comps
	s.target, s.faults, s.voters = c.target, uint8(c.faults), uint8(c.nodes[0])
	s.enabled, s.scaling, s.inPlace = !c.othersStoppedScale, !c.othersStoppedScale, c.inPlace
	if c.taken {
		t := modelTargets[c.target]
		s.images[cpModel], s.images[workersA], s.enabled, s.scaling, s.ours = t.image, t.image, false, false, true
		for k := range c.nodes[cpModel] + 1 {
			s.m[k].image, s.m[k].comps, s.m[k].noted = t.image, t.comps, t.comps
		}
		taken := &s.m[c.nodes[cpModel]]
		taken.captured, taken.token, taken.origin, taken.oldNode = true, 1, deletedMachine, deletedMachine
		s.floor[workersA]--
	}
	if c.joins {
		i--
		s.m[i] = modelMachine{life: booting, group: s.m[i].group, image: s.m[i].image, tracked: 1}
		s.floor[s.m[i].group]--
	}
	if c.halfGone {
		s.m[0].member, s.lease, s.leader = 0, 1, 1
		s.m[i] = modelMachine{life: running, group: cpModel, image: modelTargets[c.target].image, comps: modelTargets[c.target].comps, noted: modelTargets[c.target].comps, isNode: true, ready: true, known: true, token: 1, origin: 1, oldNode: 1, member: 2, api: modelTargets[c.target].comps}
		s.images[cpModel], s.enabled, s.scaling, s.ours = modelTargets[c.target].image, false, false, true
	}
	return s
}

func (c *scenario) spec(s *modelState) v1alpha1.NodeVersionSpec {
	t := modelTargets[s.target]
	surge := intstr.FromInt32(int32(c.surge))
	return v1alpha1.NodeVersionSpec{
		Image: modelImages[t.image], ImageVersion: "v1.1.0", KubernetesComponentsReference: modelComps[t.comps], KubernetesClusterVersion: modelKube[t.comps],
		Rollout: v1alpha1.Rollout{MaxSurge: &surge, Paused: s.paused, Cancel: s.cancel, KeepWorkers: c.keepWorkers},
	}
}

// hidden lists what is missing from an observation; -1: nothing.
type hidden struct{ node, instance, place int }

var everything = hidden{-1, -1, -1}

// view returns an operator's observation of s.
func (c *scenario) view(s *modelState, h hidden) World {
	w := World{
		Now: modelNow, Complete: h.instance < 0, Versions: modelByRef, LeaderNode: s.mention(s.lease + 1),
		Autoscaler: Autoscaler{Enabled: s.enabled, PausedByUs: s.ours, Running: s.scaling},
		Nodes:      make([]Node, 0, maxMachines), Instances: make([]Instance, 0, maxMachines), Etcd: make([]Member, 0, 4), Groups: make([]Group, 0, modelGroups), Intents: make([]Intent, 0, 4),
	}
	w.Addons = Addons{Read: true, CoreDNS: "registry.k8s.io/coredns/coredns:v1.13.1", KubeProxy: "registry.k8s.io/kube-proxy:" + modelKube[s.addons]}
	w.Before.JoinComponents = v1alpha1.JoinComponents{ControlPlane: modelComps[s.pubCP], Worker: modelComps[s.pubW]}
	if s.paused {
		since := modelNow
		if s.pausedLong {
			since = since.Add(-2 * pausedGivesBack)
		}
		w.Before.Waiting = &v1alpha1.Waiting{Reason: reasonPaused}
		w.Before.Waiting.Since.Time = since
	}
	if s.run != 0 {
		t := modelTargets[s.runTarget]
		w.Run = UpgradeRun{Version: modelKube[t.comps], Components: modelComps[t.comps], Node: s.mention(s.runNode + 1), Phase: [...]string{"", "apply", "done", "failed"}[s.run], Ended: modelNow.Add(-time.Hour)}
	}
	for g := range modelGroups {
		if c.nodes[g] == 0 {
			continue
		}
		mg := Group{Name: modelGroup[g], ID: modelGroup[g], Role: v1alpha1.WorkerRole, Image: modelImages[s.images[g]], Strategy: v1alpha1.ReplaceStrategy}
		if g == cpModel {
			mg.Role = v1alpha1.ControlPlaneRole
		}
		if s.inPlace[g] {
			mg.Strategy = v1alpha1.InPlaceStrategy
		}
		w.Groups = append(w.Groups, mg)
	}
	if s.liar != 0 {
		w.Nodes = append(w.Nodes, Node{
			Name: liarName, Role: v1alpha1.WorkerRole, Ready: true, ProviderID: s.id(c, int(s.liar-1)), Obsolete: s.liarGoes, Kubelet: "v1.99.0", OldNode: mention(s.liar), Replacement: mention(s.liar),
			Group: modelGroup[workersA], Image: modelImages[0], Components: modelComps[0], Cordon: CordonedByUs, Drained: true,
		})
	}
	for i := range s.m {
		m := &s.m[i]
		if m.life != absent && i != h.instance && (!c.reuses || !s.unnamed(i)) {
			in := Instance{ID: s.id(c, i), Name: modelName[s.base(i)], Address: s.address(c, i), Group: modelGroup[m.group], Image: modelImages[m.image], Hash: modelMark[i], State: "Ready", Since: modelNow.Add(-time.Minute)}
			switch m.origin {
			case 0:
			case deletedMachine:
				in.ReplacesHash = "mark of none"
			default:
				in.ReplacesHash = modelMark[m.origin-1]
			}
			if m.token != 0 {
				in.Token = modelToken[m.token]
			}
			if m.late {
				in.Since = modelNow.Add(-2 * JoinDeadline)
			}
			switch m.life {
			case terminating:
				in.State = "Terminating"
			case terminated:
				in.State = "Terminated"
			}
			w.Instances = append(w.Instances, in)
		}
		if m.isNode && i != h.node {
			n := Node{
				Name: modelName[s.base(i)], Role: v1alpha1.WorkerRole, Ready: m.ready, ProviderID: s.id(c, i), Group: modelGroup[m.group], Kubelet: modelKube[m.comps],
				OldNode: s.mention(m.oldNode), Replacement: s.mention(m.newNode), Obsolete: m.obsolete, Cordon: Cordon(m.cordon), Drained: m.drained, CordonedSince: modelNow.Add(-time.Minute), OnHold: m.held,
			}
			if m.group == cpModel {
				n.Role = v1alpha1.ControlPlaneRole
			}
			if c.reuses && !m.known { // its incarnation is annotated with the rest
				n.ProviderID = modelID[s.base(i)]
				if m.life == running { // its JoiningNode exists until the Node is annotated
					if w.Joining == nil {
						w.Joining = map[string]bool{}
					}
					w.Joining[n.Name] = true
				}
			}
			if m.known {
				n.Image, n.Components = modelImages[m.image], modelComps[m.noted]
			}
			n.InPlaceLabel = s.inPlace[m.group]
			switch m.lie {
			case lieClaim:
				n.ProviderID, n.Obsolete = s.id(c, int(m.about-1)), true
			case lieOldNode:
				n.OldNode = s.mention(m.about)
			case lieGroup:
				n.Group, n.Role = modelGroup[cpModel], v1alpha1.ControlPlaneRole
			case lieImage:
				n.Image = modelImages[modelTargets[s.target].image]
			case lieKubelet:
				n.Kubelet = "v1.99.0"
			case lieNoID:
				n.ProviderID = ""
			case lieDenies:
				n.OldNode = ""
			}
			switch m.retry {
			case 1:
				n.RetryRequest = "now"
			case 2:
				n.RetryRequest = m.latest("").RetryMark()
			case 3:
				n.RetryRequest = markPrefix + "1"
			}
			if m.drainLate {
				n.CordonedSince = modelNow.Add(-2 * DrainDeadline)
			}
			if m.postponed {
				n.PostponedUntil = modelNow.Add(time.Minute)
			}
			if s.blocked[m.group] && !m.drained && n.Cordon != Uncordoned {
				n.DrainBlocker = "PodDisruptionBudget web/web allows no eviction"
			}
			w.Nodes = append(w.Nodes, n)
		}
		if m.member != 0 {
			w.Etcd = append(w.Etcd, Member{Node: modelName[s.base(i)], Address: s.address(c, i), Voter: m.member == 2, Healthy: m.life == running, Leader: int(s.leader) == i})
		}
		if m.revoked {
			w.Intents = append(w.Intents, Intent{Name: revocation.RemovalPrefix + modelName[s.base(i)], Goal: v1alpha1.LeaveGoal, Machine: s.id(c, i), Node: modelName[s.base(i)], Group: modelGroup[m.group], Revoked: true})
		}
		if m.tracked != 0 {
			in := Intent{Name: MachinePrefix + modelName[s.base(i)], Goal: v1alpha1.JoinGoal, Machine: s.id(c, i), Node: modelName[s.base(i)], Group: modelGroup[m.group], Deadline: modelNow.Add(time.Minute)}
			if m.tracked == 2 {
				in.Goal = v1alpha1.LeaveGoal
			}
			if m.trackedLate {
				in.Deadline = modelNow.Add(-time.Minute)
			}
			w.Intents = append(w.Intents, in)
		}
	}
	for p := range s.places {
		l := &s.places[p]
		if !l.used || p == h.place {
			continue
		}
		w.Intents = append(w.Intents, s.intent(c, p))
		if m := &s.m[max(l.machine, 1)-1]; l.upgrade && !m.silent {
			if w.NodeRuns == nil {
				w.NodeRuns = map[string]UpgradeRun{}
			}
			r := UpgradeRun{}
			if m.run != 0 {
				r = m.latest(s.mention(l.machine))
			}
			w.NodeRuns[s.id(c, int(l.machine-1))] = r
		}
	}
	return w
}

// unnamed reports whether machine i is gone and no Node or intent leads the operator to it.
func (s *modelState) unnamed(i int) bool {
	m := &s.m[i]
	named := m.isNode || m.tracked != 0 || m.revoked || s.placeOfToken(m.token) >= 0
	for p := range s.places {
		named = named || s.places[p].used && int(s.places[p].machine) == i+1
	}
	return m.life == terminated && !named
}

// latest returns the last run of m's agent. The agent must have had one.
func (m *modelMachine) latest(name string) UpgradeRun {
	r := UpgradeRun{Version: modelKube[m.runComps], Components: modelComps[m.runComps], Node: name, InPlace: true, Phase: [...]string{"", "apply", "done", "failed"}[m.run], Ended: modelNow.Add(-time.Hour)}
	if m.recent {
		r.Ended = modelNow.Add(-time.Second)
	}
	return r
}

func (s *modelState) intent(c *scenario, p int) Intent {
	l := &s.places[p]
	in := Intent{Name: slotPrefix + strconv.Itoa(p), Goal: v1alpha1.JoinGoal, Token: modelToken[l.token], OldNode: s.mention(l.oldNode), Deadline: modelNow.Add(time.Minute), Group: modelGroup[l.group], Seen: l.spent}
	if l.late {
		in.Deadline = modelNow.Add(-time.Minute)
	}
	if l.upgrade {
		in.Goal, in.Token, in.Machine, in.Node = v1alpha1.UpgradeGoal, "", s.id(c, int(l.machine-1)), s.mention(l.machine)
	}
	if l.leave {
		in.Goal, in.Machine, in.Node = v1alpha1.LeaveGoal, s.id(c, int(l.machine-1)), s.mention(l.machine)
	}
	return in
}

// facts returns the input of the invariants. It is valid until the next call.
func (e *explorer) facts(s *modelState) *facts {
	f := &e.actual
	t := modelTargets[s.target]
	c := e.scenario
	if f.machines == nil {
		*f = facts{machines: make([]fact, maxMachines), groups: make([]groupFacts, modelGroups), places: make([]placeFacts, maxPlaces), kube: []int{0, 1}}
	}
	f.shall, f.surge, f.controlPlanes, f.voters = c.total()+int(s.more), c.surge, c.nodes[cpModel], int(s.voters)
	f.image, f.comps, f.keepWorkers, f.paused, f.cancel = int(t.image), int(t.comps), c.keepWorkers, s.paused, s.cancel
	f.enabled, f.ours, f.scaling, f.othersStopped = s.enabled, s.ours, s.scaling, c.othersStoppedScale
	f.addons = int(s.addons)
	f.pubCP, f.pubW, f.run, f.runComps, f.leader = int(s.pubCP), int(s.pubW), int(s.run), int(modelTargets[s.runTarget].comps), int(s.leader)
	for g := range f.groups {
		f.groups[g] = groupFacts{controlPlanes: g == cpModel, inPlace: s.inPlace[g], blocked: s.blocked[g], floor: int(s.floor[g]), image: int(s.images[g])}
	}
	for p := range f.places {
		l := &s.places[p]
		f.places[p] = placeFacts{used: l.used, leave: l.leave, late: l.late, spent: l.spent, group: int(l.group), upgrades: noMachine}
		if l.upgrade {
			f.places[p].upgrades = indexed(l.machine)
		}
	}
	for i := range f.machines {
		m := &s.m[i]
		f.machines[i] = fact{
			life: int(m.life), group: int(m.group), image: int(m.image), comps: int(m.comps), ours: m.token != 0, place: s.placeOfToken(m.token),
			isNode: m.isNode, ready: m.ready, known: m.known, cordon: Cordon(m.cordon), drained: m.drained, obsolete: m.obsolete, postponed: m.postponed, held: m.held,
			oldNode: indexed(m.oldNode), newNode: indexed(m.newNode), member: int(m.member), api: int(m.api), tracked: int(m.tracked), trackedLate: m.trackedLate,
			noted: int(m.noted), run: int(m.run), broken: m.broken, recent: m.recent, retry: int(m.retry), captured: m.captured, revoked: m.revoked, bare: c.reuses && !m.known,
		}
		f.groups[m.group].broken = f.groups[m.group].broken || m.broken
	}
	return f
}

// indexed returns the index of machine number i-1.
func indexed(i uint8) int {
	if i == deletedMachine {
		return forgotten
	}
	return int(i) - 1
}

// effect converts a for the invariants.
func (s *modelState) effect(a *modelAction) effect {
	e := effect{upgrade: a.up, kind: a.kind, machine: indexed(a.node), oldNode: indexed(a.oldNode), newNode: indexed(a.other), made: s.byToken(a.token), place: -1, group: int(a.group), leave: a.flag, uncordon: a.flag, pubCP: int(a.pubCP), pubW: int(a.pubW), host: int(s.lease)}
	if a.place != 255 {
		e.place = int(a.place)
	}
	if a.kind == StartUpgrade {
		e.comps, e.keeps, e.uncordon, e.leave = int(modelTargets[a.target].comps), a.flag, false, false
	}
	if a.kind == UpgradeNode || a.kind == NoteComponents || a.kind == UpgradeAddons {
		e.comps = int(a.extra)
	}
	return e
}

// finished reports whether the rollout has ended in s.
func (e *explorer) finished(s *modelState) bool {
	return s.flying.kind == 0 && e.facts(s).unfinished() == ""
}

func (s *modelState) byToken(t uint8) int {
	for i := range s.m {
		if t != 0 && s.m[i].token == t && s.m[i].life != absent {
			return i
		}
	}
	return -1
}

// encode converts an action of decide to an action of the model.
func (s *modelState) encode(c *scenario, a *Action) modelAction {
	out := modelAction{kind: a.Kind, node: s.numbered(a.Node), other: s.numbered(a.Replacement), oldNode: s.numbered(a.OldNode), flag: a.Uncordon, extra: uint8(a.MinVoters), place: 255}
	if a.Machine != "" && a.Kind != DeleteNode { // a Node is deleted by its name; its claims do not matter
		out.node = s.byID(c, a.Machine)
	}
	if a.Kind == RemoveMember { // of several members of one name, that at the address, or else that which is not healthy
		out.node = s.prefer(a.Node, func(m *modelMachine) bool { return m.member != 0 && (m.life != running || !s.sharesMember(a.Node)) })
		if a.Address != "" {
			for i := range s.m {
				if s.m[i].member != 0 && modelName[s.base(i)] == a.Node && s.address(c, i) == a.Address {
					out.node = uint8(i) + 1
				}
			}
		}
	}
	if a.Group != "" {
		out.group = uint8(index(modelGroup, a.Group))
	}
	if a.Image != "" {
		out.extra = uint8(index(modelImages[:], a.Image))
	}
	if a.Kind == StartUpgrade {
		out.target = uint8(index(modelComps[:], a.Components)) + 1 // the targets are in this order
	}
	if a.Kind == UpgradeNode || a.Kind == NoteComponents || a.Kind == UpgradeAddons {
		out.extra = uint8(index(modelComps[:], a.Components))
	}
	out.flag = out.flag || a.RetryMark != "" || a.KeepKubelet
	if a.Kind == PublishComponents {
		out.pubCP, out.pubW = uint8(index(modelComps[:], a.JoinComponents.ControlPlane)), uint8(index(modelComps[:], a.JoinComponents.Worker))
	}
	if in := &a.Intent; in.Name != "" {
		out.flag, out.up = in.Goal == v1alpha1.LeaveGoal, in.Goal == v1alpha1.UpgradeGoal
		out.group = uint8(index(modelGroup, in.Group))
		out.oldNode, out.node = s.numbered(in.OldNode), 0
		if in.Machine != "" {
			out.node = s.byID(c, in.Machine)
		}
		if in.Revoked {
			out.extra = 1
		}
		if p, ok := SurgeSlot(in.Name); ok {
			out.place = uint8(p)
			if l := &s.places[p]; a.Kind != RecordIntent && l.used && s.mention(l.oldNode) == in.OldNode {
				out.oldNode = l.oldNode
			}
			if t := index(modelToken, in.Token); t > 0 {
				out.token = uint8(t)
			} else if !out.up {
				out.token = s.freeToken()
			}
		}
	}
	return out
}

// sharesMember reports whether several members of etcd are called name.
func (s *modelState) sharesMember(name string) bool {
	n := 0
	for i := range s.m {
		if s.m[i].member != 0 && modelName[s.base(i)] == name {
			n++
		}
	}
	return n > 1
}

func (s *modelState) freeToken() uint8 {
	for t := uint8(1); int(t) < len(modelToken); t++ {
		used := s.flying.token == t || s.byToken(t) >= 0
		for _, l := range s.places {
			used = used || l.used && l.token == t
		}
		if !used {
			return t
		}
	}
	panic("no token is free")
}

// apply carries out an action, under the conditions of its kind.
func (c *scenario) apply(s modelState, a modelAction) modelState {
	var m *modelMachine
	if a.node != 0 && a.node != deletedMachine {
		m = &s.m[a.node-1]
	}
	switch a.kind {
	case PauseAutoscaler:
		if s.enabled {
			s.enabled, s.ours = false, true
		}
	case ResumeAutoscaler:
		if s.ours {
			s.enabled, s.ours = true, false
		}
	case SetGroupImage:
		s.images[a.group] = a.extra
	case RecordIntent:
		if a.place != 255 {
			if l := &s.places[a.place]; !l.used {
				*l = modelPlace{used: true, oldNode: a.oldNode, token: a.token, group: a.group, upgrade: a.up}
				if a.up {
					l.machine = a.node
				}
			}
		} else if m.tracked == 0 && m.life != absent && !s.sharesName(int(a.node)-1, func(o *modelMachine) bool { return o.tracked != 0 }) {
			m.tracked = 1
			if a.flag {
				m.tracked = 2
			}
		}
	case BindIntent:
		if a.place != 255 {
			if l := &s.places[a.place]; l.used && !l.leave && l.token == a.token {
				l.leave, l.machine, l.late = true, a.node, false
			}
		} else if m.tracked == 1 {
			m.tracked, m.trackedLate = 2, false
		}
	case ClearIntent:
		if a.place != 255 {
			if l := &s.places[a.place]; l.used && l.leave == a.flag && l.token == a.token && l.upgrade == a.up {
				*l = modelPlace{}
			}
		} else if a.extra == 1 {
			m.revoked = false
		} else if m.tracked != 0 && (m.tracked == 2) == a.flag {
			m.tracked, m.trackedLate = 0, false
		}
	case CreateInstance:
		if s.byToken(a.token) < 0 {
			for i := range s.m {
				if s.m[i].life == absent {
					s.m[i] = modelMachine{life: booting, group: a.group, image: s.images[a.group], token: a.token, origin: a.oldNode, alias: s.freeName(c, a.group)}
					break
				}
			}
		}
	case AdoptReplacement:
		if m.isNode {
			m.oldNode = a.oldNode
		}
	case CordonNode:
		if m.isNode {
			if m.cordon == uint8(Uncordoned) {
				m.cordon = uint8(CordonedByUs)
			}
			m.newNode = a.other
		}
	case ReleaseNode:
		if m.isNode {
			m.newNode = 0
			if a.flag && m.cordon == uint8(CordonedByUs) {
				m.cordon, m.drained, m.drainLate = 0, false, false
			}
		}
	case PostponeNode:
		if m.isNode {
			m.postponed = true
		}
	case DrainNode:
		if m.isNode && m.cordon != 0 && (!s.blocked[m.group] || !m.ready) {
			m.drained = true
			for i := range s.m { // the operator that ran on it runs elsewhere now
				if o := &s.m[i]; o != m && o.isNode && o.group == m.group && o.cordon == 0 {
					o.drained = false
				}
			}
		}
	case YieldLease:
		if int(s.lease) == int(a.node-1) {
			for i := range s.m {
				if o := &s.m[i]; o != m && o.isNode && o.ready && o.group == cpModel && o.cordon == 0 {
					s.lease = uint8(i)
					break
				}
			}
		}
	case MoveLeader:
		if o := &s.m[a.other-1]; int(s.leader) == int(a.node-1) && o.member == 2 && o.life == running {
			s.leader = a.other - 1
		}
	case RemoveMember:
		if m.member == 2 {
			if left := s.countVoters() - 1; left < int(a.extra) || left < 1 {
				break // the agent's runs count again
			}
		}
		m.member = 0
		if int(s.leader) == int(a.node-1) {
			s.elect()
		}
	case DeleteInstance:
		if m.life == booting || m.life == running {
			m.life, m.ready = terminating, false
		}
	case DeleteNode:
		*m = m.withoutNode()
	case MarkRetry:
		if m.isNode {
			if m.retry = 0; a.flag {
				m.retry = 2 + a.extra
			}
		}
	case UpgradeNode:
		if m.life == running && m.run != 1 && (m.run != 2 || m.runComps != a.extra) {
			m.run, m.runComps, m.recent = 1, a.extra, false
			if m.retry == 2 {
				m.retry = 3
			}
		}
	case NoteComponents:
		if m.isNode {
			m.noted = a.extra
		}
	case StartUpgrade:
		if s.run != 1 && (s.run != 2 || s.runTarget != a.target) {
			s.run, s.runTarget, s.runNode = 1, a.target, a.node-1
		}
	case UpgradeAddons:
		if m.life == running && m.api == a.extra { // the agent compares it with its own API server
			s.addons = a.extra
		}
	case PublishComponents:
		s.pubCP, s.pubW = a.pubCP, a.pubW
	}
	return s
}

// freeName returns the machine number whose name and ID the next machine of a group gets; 0: new ones.
func (s *modelState) freeName(c *scenario, group uint8) uint8 {
	for i := range s.m {
		m := &s.m[i]
		if c.reuses && m.group == group && m.life == terminated && !s.sharesName(i, func(o *modelMachine) bool { return o.life != terminated && o.life != absent }) {
			return uint8(s.base(i) + 1)
		}
	}
	return 0
}

func (s *modelState) countVoters() (n int) {
	for i := range s.m {
		if s.m[i].member == 2 {
			n++
		}
	}
	return n
}

// votes reports whether machine number i-1 votes in etcd.
func (s *modelState) votes(i uint8) bool {
	return i != 0 && i != deletedMachine && s.m[i-1].member == 2 && s.m[i-1].life == running
}

// elect makes etcd elect a leader among its healthy members.
func (s *modelState) elect() {
	for i := range s.m {
		if s.m[i].member == 2 && s.m[i].life == running {
			s.leader = uint8(i)
			return
		}
	}
}

// step is one event.
type step struct {
	next  modelState
	kind  stepKind
	act   modelAction
	from  hidden
	m     int
	good  bool // it happens without intervention, so the goal may depend on it
	wrong string
}

type stepKind int

const (
	stepAct stepKind = iota
	stepDelay
	stepLand
	stepLose
	stepJoin
	stepAnnotate
	stepVote
	stepTerminated
	stepForget
	stepUpgraded
	stepScaling
	stepLate
	stepPlaceLate
	stepTrackedLate
	stepDrainLate
	stepPostponedOver
	stepUnblock
	stepUncordoned
	stepReadyAgain
	stepUnpause
	stepUncancel
	stepRelease
	stepPausedLong
	stepNewest
	stepTarget
	stepPause
	stepCancel
	stepBlock
	stepCordoned
	stepHeld
	stepNotReady
	stepDies
	stepNeverJoins
	stepNodeDeleted
	stepIntentDeleted
	stepUpgradeFails
	stepAutoscalerOn
	stepObsolete
	stepLeaseMoves
	stepNodeUpgraded
	stepNodeFails
	stepSilent
	stepAnswers
	stepBroken
	stepStrategy
	stepPauseOver
	stepRetry
	stepLies
	stepCaptured
	stepLiar
	stepHalfJoins
	stepRevoked
	stepReused
	stepTokenForgotten
)

var stepTexts = [...]string{
	stepAct: "the operator executes: %s", stepDelay: "a slow leader decides, and does not act yet: %s", stepLand: "the slow leader executes late: %s", stepLose: "the slow leader dies before it acts: %s",
	stepJoin: "m%d joins", stepAnnotate: "m%d is annotated", stepVote: "etcd: m%d becomes a voter", stepTerminated: "the cloud has deleted m%d", stepForget: "the cloud stops listing m%d",
	stepUpgraded: "the agent on m%d has upgraded Kubernetes", stepScaling: "the autoscaler reaches its desired state (%d)", stepLate: "the time of m%d to join is over", stepPlaceLate: "the time of intent %d is over",
	stepTrackedLate: "the time of the intent of m%d is over", stepDrainLate: "the time to drain m%d is over", stepPostponedOver: "the postponement of m%d is over", stepUnblock: "the PodDisruptionBudget of group %d allows evictions",
	stepUncordoned: "somebody uncordons m%d", stepReadyAgain: "m%d is Ready again", stepUnpause: "a person ends the pause (%d)", stepUncancel: "a person ends the cancellation (%d)", stepRelease: "a person resumes m%d", stepPausedLong: "the pause lasts long (%d)",
	stepNewest: "a person sets the newest target (%d)", stepTarget: "a person sets target %d", stepPause: "a person pauses (%d)", stepCancel: "a person cancels (%d)", stepBlock: "a PodDisruptionBudget blocks group %d",
	stepCordoned: "a person cordons m%d", stepHeld: "a person puts m%d on hold", stepNotReady: "m%d is NotReady", stepDies: "m%d dies", stepNeverJoins: "m%d will never join", stepNodeDeleted: "a person deletes the Node m%d",
	stepNodeUpgraded: "the agent of m%d has upgraded it", stepNodeFails: "the agent of m%d fails", stepSilent: "the agent of m%d stops responding", stepAnswers: "the agent of m%d responds again",
	stepBroken: "every run of the agent of m%d will fail", stepStrategy: "a person changes the strategy of group %d", stepPauseOver: "the failure of the agent of m%d becomes old", stepRetry: "a person requests a retry for m%d",
	stepRevoked: "a person revokes m%d",
	stepReused:  "the cloud replaces m%d by a machine of its name and ID", stepTokenForgotten: "the cloud loses the record of m%d and its token",
	stepHalfJoins: "the join of m%d fails after its Node was created",
	stepLies:      "the Node of the captured m%d changes its claim", stepCaptured: "m%d is captured", stepLiar: "a Node without a machine claims m%d",
	stepIntentDeleted: "a person deletes intent %d", stepUpgradeFails: "the upgrade by the agent on m%d fails", stepAutoscalerOn: "a person enables the autoscaler (%d)", stepObsolete: "a person marks m%d obsolete", stepLeaseMoves: "m%d becomes the leader",
}

func (t *step) String() string {
	var s string
	switch t.kind {
	case stepAct, stepDelay, stepLand, stepLose:
		s = fmt.Sprintf(stepTexts[t.kind], t.act)
	default:
		s = fmt.Sprintf(stepTexts[t.kind], t.m)
	}
	if t.from != everything && t.kind <= stepDelay {
		s += fmt.Sprintf(" (missing from its observation: node %d, machine %d, intent %d; -1: none)", t.from.node, t.from.instance, t.from.place)
	}
	return s
}

func (a modelAction) String() string {
	var b strings.Builder
	b.WriteString(a.kind.String())
	if a.place != 255 {
		fmt.Fprintf(&b, " replace-%d token=t%d donor=%s", a.place, a.token, mention(a.oldNode))
	} else if a.oldNode != 0 {
		fmt.Fprintf(&b, " donor=%s", mention(a.oldNode))
	}
	if a.node != 0 {
		fmt.Fprintf(&b, " %s", mention(a.node))
	}
	if a.other != 0 {
		fmt.Fprintf(&b, " heir=%s", mention(a.other))
	}
	switch a.kind {
	case PublishComponents:
		fmt.Fprintf(&b, " control-plane=%d worker=%d", a.pubCP, a.pubW)
	case SetGroupImage:
		fmt.Fprintf(&b, " g%d image=%d", a.group, a.extra)
	case BindIntent, RecordIntent, ClearIntent:
		fmt.Fprintf(&b, " leave=%v upgrade=%v", a.flag, a.up)
	case UpgradeNode, NoteComponents, UpgradeAddons:
		fmt.Fprintf(&b, " components=%d", a.extra)
	case StartUpgrade:
		fmt.Fprintf(&b, " keep kubelet=%v", a.flag)
	case ReleaseNode:
		fmt.Fprintf(&b, " uncordon=%v", a.flag)
	case MarkRetry:
		fmt.Fprintf(&b, " of this run=%v", a.flag)
	}
	return b.String()
}
