package decision

import (
	"bytes"
	"flag"
	"fmt"
	"hash/maphash"
	"os"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
	"unsafe"
)

var (
	exploreStates  = flag.Int("explore.states", 0, "maximum of states per scenario, with mutants; 0: a short run without mutants")
	exploreReplay  = flag.String("explore.replay", "", "print the trace of scenario:rule:numbers")
	exploreOnly    = flag.String("explore.scenario", "", "explore only this scenario")
	exploreRule    = flag.Int("explore.rule", 0, "test only the mutant without this rule, and print its trace")
	exploreMutants = flag.Bool("explore.mutants", true, "test mutants")
)

// explorer searches all states of a scenario breadth first, with at most one rule switched off.
type explorer struct {
	*scenario
	off   rule
	limit int

	states   []modelState
	seen     map[uint64]int32
	parent   []int32
	ordinal  []uint16 // of the step from the parent
	goal     []bool
	expanded int
	edges    [][2]int32 // good ones, from and to
	decided  int
	seed     maphash.Seed
	actual   facts
}

type finding struct {
	text  string
	state int32
	last  int // ordinal of the wrong step; -1: the state itself is wrong
}

func (e *explorer) hash(s *modelState) uint64 {
	return maphash.Bytes(e.seed, unsafe.Slice((*byte)(unsafe.Pointer(s)), unsafe.Sizeof(*s)))
}

// canonical returns s with its machines in canonical order, so that states that differ only in the
// numbering of machines are equal.
func (s *modelState) canonical() modelState {
	var order [maxMachines]int
	var keys [maxMachines]modelMachine
	for i := range order {
		order[i], keys[i] = i, s.m[i]
		k := &keys[i]
		k.token, k.oldNode, k.newNode, k.origin, k.about, k.alias = min(k.token, 1), min(k.oldNode, 1), min(k.newNode, 1), min(k.origin, 1), 0, min(k.alias, 1)
		if s.m[i].oldNode == deletedMachine {
			k.oldNode = 2
		}
		if s.m[i].origin == deletedMachine {
			k.origin = 2
		}
		if k.life == absent {
			k.group = modelGroups
		}
	}
	less := func(a, b int) bool {
		x, y := &keys[a], &keys[b]
		if x.group != y.group {
			return x.group < y.group
		}
		p := unsafe.Slice((*byte)(unsafe.Pointer(x)), unsafe.Sizeof(*x))
		q := unsafe.Slice((*byte)(unsafe.Pointer(y)), unsafe.Sizeof(*y))
		return bytes.Compare(p, q) < 0
	}
	for i := 1; i < len(order); i++ {
		for k := i; k > 0 && less(order[k], order[k-1]); k-- {
			order[k], order[k-1] = order[k-1], order[k]
		}
	}
	var name [deletedMachine + 1]uint8
	name[deletedMachine] = deletedMachine
	var tokens [16]uint8
	for to, from := range order {
		name[from+1] = uint8(to + 1)
		if t := s.m[from].token; t != 0 {
			tokens[t] = uint8(to + 1)
		}
	}
	next := uint8(maxMachines + 1)
	retoken := func(t uint8) uint8 {
		if t != 0 && tokens[t] == 0 {
			tokens[t] = next
			next++
		}
		return tokens[t]
	}
	out := *s
	for to, from := range order {
		m := s.m[from]
		m.oldNode, m.newNode, m.token = name[m.oldNode], name[m.newNode], retoken(m.token)
		m.origin, m.about, m.alias = name[m.origin], name[m.about], name[m.alias]
		out.m[to] = m
	}
	for i := range out.places {
		l := &out.places[i]
		l.oldNode, l.machine, l.token = name[l.oldNode], name[l.machine], retoken(l.token)
	}
	f := &out.flying
	f.token = retoken(f.token)
	if f.kind != 0 {
		f.node, f.other, f.oldNode = name[f.node], name[f.other], name[f.oldNode]
	}
	out.liar = name[s.liar]
	out.lease, out.leader = name[s.lease+1], name[s.leader+1]
	if s.run == 1 {
		out.runNode = name[s.runNode+1]
	} else {
		out.runNode = 0
	}
	return out
}

func (e *explorer) add(s *modelState, parent int32, ordinal int) int32 {
	c := s.canonical()
	h := e.hash(&c)
	if i, ok := e.seen[h]; ok {
		return i
	}
	i := int32(len(e.states))
	e.seen[h] = i
	e.states, e.parent, e.ordinal, e.goal = append(e.states, *s), append(e.parent, parent), append(e.ordinal, uint16(ordinal)), append(e.goal, false)
	return i
}

// explore returns the first finding in breadth-first order, or else a state from which
// the goal cannot be reached any more.
func (e *explorer) explore() *finding {
	e.seed, e.seen = maphash.MakeSeed(), map[uint64]int32{}
	start := e.start()
	e.add(&start, -1, 0)
	var buf []step
	for i := 0; i < len(e.states) && len(e.states) < e.limit; i++ {
		s := e.states[i]
		var acts int
		buf, acts = e.steps(&s, buf[:0])
		e.expanded++
		// A drain that a PodDisruptionBudget blocks permanently is retried indefinitely.
		e.goal[i] = (acts == 0 || s.blocked != [modelGroups]bool{} || s.anyBroken()) && e.finished(&s)
		for n := range buf {
			t := &buf[n]
			if t.wrong != "" {
				return &finding{t.wrong, int32(i), n}
			}
			if w := e.facts(&t.next).broken(); w != "" {
				return &finding{w, int32(i), n}
			}
			j := e.add(&t.next, int32(i), n)
			if t.good && j != int32(i) {
				e.edges = append(e.edges, [2]int32{int32(i), j})
			}
		}
	}
	return e.reach()
}

// reach searches backwards from the goal and from states that were not expanded, and returns the
// first state that it does not reach.
func (e *explorer) reach() *finding {
	first, next := make([]int32, len(e.states)), make([]int32, len(e.edges))
	for i := range first {
		first[i] = -1
	}
	for k, edge := range e.edges {
		next[k], first[edge[1]] = first[edge[1]], int32(k)
	}
	good := make([]bool, len(e.states))
	var todo []int32
	for i := range e.states {
		if e.goal[i] || i >= e.expanded {
			good[i] = true
			todo = append(todo, int32(i))
		}
	}
	for len(todo) > 0 {
		i := todo[len(todo)-1]
		todo = todo[:len(todo)-1]
		for k := first[i]; k >= 0; k = next[k] {
			if from := e.edges[k][0]; !good[from] {
				good[from] = true
				todo = append(todo, from)
			}
		}
	}
	for i := range good {
		if !good[i] {
			return &finding{"the goal cannot be reached from here", int32(i), -1}
		}
	}
	return nil
}

// trace are the ordinals of the steps to a finding.
func (e *explorer) trace(f *finding) []int {
	var out []int
	if f.last >= 0 {
		out = append(out, f.last)
	}
	for i := f.state; e.parent[i] >= 0; i = e.parent[i] {
		out = append([]int{int(e.ordinal[i])}, out...)
	}
	return out
}

// replay is what the flag of the same name takes.
func replay(c *scenario, off rule, trace []int) string {
	parts := make([]string, len(trace))
	for i, n := range trace {
		parts[i] = strconv.Itoa(n)
	}
	return fmt.Sprintf("%s:%d:%s", c.name, off, strings.Join(parts, ","))
}

// story describes the steps of a trace in words.
func (e *explorer) story(trace []int) string {
	var b strings.Builder
	s := e.start()
	fmt.Fprintf(&b, "scenario %s: %v nodes by group, surge %d, target %d\n", e.name, e.nodes, e.surge, s.target)
	for i, n := range trace {
		steps, _ := e.steps(&s, nil)
		if n >= len(steps) {
			fmt.Fprintf(&b, "%3d. the trace is of another version of the model\n", i+1)
			break
		}
		t := &steps[n]
		fmt.Fprintf(&b, "%3d. %s\n", i+1, t)
		if w := t.wrong + e.facts(&t.next).broken(); w != "" {
			fmt.Fprintf(&b, "     -> %s\n", w)
		}
		s = t.next
	}
	d := plan(e.spec(&s), e.view(&s, everything), e.off)
	for _, a := range d.Actions {
		fmt.Fprintf(&b, "     next: %s\n", a)
	}
	if w := d.Status().Waiting; w != nil {
		fmt.Fprintf(&b, "     waits: %s\n", w.Message)
	}
	fmt.Fprintf(&b, "     %s", s.String())
	return b.String()
}

func (s *modelState) String() string {
	var b strings.Builder
	for i := range s.m {
		if m := s.m[i]; m.life != absent || m.isNode || m.member != 0 {
			fmt.Fprintf(&b, "m%d%+v\n     ", i, m)
		}
	}
	rest := *s
	fmt.Fprintf(&b, "places=%+v target=%d paused=%v cancel=%v enabled=%v ours=%v scaling=%v images=%v pub=%d/%d run=%d/%d blocked=%v lease=%d leader=%d floor=%v faults=%d flying=%s\n",
		rest.places, s.target, s.paused, s.cancel, s.enabled, s.ours, s.scaling, s.images, s.pubCP, s.pubW, s.run, s.runTarget, s.blocked, s.lease, s.leader, s.floor, s.faults, s.flying)
	return b.String()
}

// steps appends all steps that are possible in s. It returns how many actions an operator with a
// complete observation would take.
func (e *explorer) steps(s *modelState, out []step) ([]step, int) {
	fault := s.faults > 0
	spec := e.spec(s)
	e.decided++
	d := plan(spec, e.view(s, everything), e.off)
	if e.off == everyRule && e.decided%16 == 0 {
		d.Status() // must not fail anywhere; it costs more than deciding
	}
	var whole []modelAction
	act := func(a modelAction, h hidden) {
		t := step{kind: stepAct, act: a, from: h, good: h == everything}
		actual, effect := e.facts(s), s.effect(&a)
		if t.wrong = actual.wrongEffect(&effect, h == everything); t.wrong == "" {
			t.wrong = actual.irrevocable(&effect, h == everything)
		}
		t.next = e.apply(*s, a)
		if again := e.apply(t.next, a); again != t.next {
			t.wrong += "invariant 6: the action is not idempotent"
		}
		t.next.settle(s)
		out = append(out, t)
		if e.stale && s.flying.kind == 0 && h == everything && a.mayFly() {
			t := step{kind: stepDelay, act: a, from: h, next: *s}
			t.next.flying = a
			out = append(out, t)
		}
	}
	believed := func(a *Action, h hidden) bool {
		if a.Node != liarName && a.Replacement != liarName && a.OldNode != liarName && a.Intent.Node != liarName && a.Intent.OldNode != liarName {
			return false
		}
		out = append(out, step{kind: stepAct, act: modelAction{kind: a.Kind, place: 255}, from: h, next: *s, wrong: "the operator trusts a Node without a machine: " + a.String()})
		return true
	}
	for i := range d.Actions {
		if believed(&d.Actions[i], everything) {
			continue
		}
		a := s.encode(e.scenario, &d.Actions[i])
		whole = append(whole, a)
		act(a, everything)
	}
	if e.stale {
		look := func(h hidden) {
			e.decided++
			for _, got := range plan(spec, e.view(s, h), e.off).Actions {
				if believed(&got, h) {
					continue
				}
				a := s.encode(e.scenario, &got)
				known := false
				for _, o := range whole {
					known = known || o == a
				}
				if !known {
					act(a, h)
				}
			}
		}
		for i := range s.m {
			m := &s.m[i]
			if m.life == absent || m.late || m.trackedLate || m.life == terminated {
				continue
			}
			if m.isNode && m.token != 0 {
				look(hidden{i, -1, -1})
			}
			if p := s.placeOfToken(m.token); p < 0 || !s.places[p].late {
				look(hidden{-1, i, -1})
			}
		}
		for p := range s.places {
			if i := s.byToken(s.places[p].token); s.places[p].used && (i < 0 || !s.m[i].trackedLate && s.m[i].tracked != 2) {
				look(hidden{-1, -1, p})
			}
		}
	}
	happens := func(kind stepKind, m int, good bool, change func(n *modelState)) {
		t := step{kind: kind, m: m, next: *s, good: good, from: everything}
		change(&t.next)
		t.next.settle(s)
		out = append(out, t)
	}
	if f := s.flying; f.kind != 0 {
		t := step{kind: stepLand, act: f, from: everything, good: true}
		t.next = e.apply(*s, f)
		t.next.flying = modelAction{}
		t.next.settle(s)
		out = append(out, t)
		t = step{kind: stepLose, act: f, from: everything, good: true, next: *s}
		t.next.flying = modelAction{}
		t.next.settle(s)
		out = append(out, t)
	}
	quorum := 0
	for i := range s.m {
		if s.m[i].member == 2 && s.m[i].life == running {
			quorum++
		}
	}
	// bad adds a fault. It uses up one fault of the scenario, and the operator is not blamed for the
	// nodes and members that the cluster loses.
	bad := func(kind stepKind, m int, change func(n *modelState)) {
		happens(kind, m, false, func(n *modelState) {
			n.faults--
			change(n)
			n.forgive()
		})
	}
	for i := range s.m {
		m := &s.m[i]
		if m.life == absent {
			continue
		}
		// A machine that is being deleted cannot become a control plane, because the join service refuses
		// machines that are bound to leave.
		deleting := s.flying.kind == DeleteInstance && int(s.flying.node) == i+1 && m.group == cpModel
		// The join service gives no ticket while there is a Node of the name.
		hasNode := s.sharesName(i, func(o *modelMachine) bool { return o.isNode })
		if m.life == booting && !m.failed && !deleting && !hasNode {
			happens(stepJoin, i, true, func(n *modelState) {
				o := &n.m[i]
				o.life, o.isNode, o.ready, o.drained, o.comps = running, true, true, true, n.pubW
				if o.group == cpModel {
					o.comps, o.api, o.member = n.pubCP, n.pubCP, 1
				}
				o.noted = o.comps
			})
			if fault && e.allows('q') {
				bad(stepHalfJoins, i, func(n *modelState) {
					o := &n.m[i]
					o.life, o.isNode, o.drained, o.failed, o.comps = running, true, true, true, n.pubW
					if o.group == cpModel {
						o.comps, o.api = n.pubCP, n.pubCP
					}
					o.noted = o.comps
				})
			}
			if fault && e.allows('j') {
				bad(stepNeverJoins, i, func(n *modelState) { n.m[i].failed = true })
			}
		}
		if m.isNode && !m.known && m.life == running {
			happens(stepAnnotate, i, true, func(n *modelState) { n.m[i].known = true })
		}
		if m.member == 1 && m.life == running {
			happens(stepVote, i, true, func(n *modelState) { n.m[i].member = 2 })
		}
		if m.life == terminating {
			happens(stepTerminated, i, true, func(n *modelState) {
				if n.m[i].life = terminated; n.m[i].captured && n.m[i].misses() { // a person removes its Node
					n.m[i] = n.m[i].withoutNode()
				}
			})
		}
		// Time passes for a machine only when no request of its attempt is on its way, and
		// for a drain only when none to etcd is.
		if m.life != terminated && m.life != terminating && !m.late && m.token != 0 && (!m.isNode || !m.ready || !m.known || m.captured || m.cordon == uint8(CordonedByOthers) || m.group == cpModel && m.member != 2) && s.flying.token != m.token {
			happens(stepLate, i, true, func(n *modelState) { n.m[i].late = true })
		}
		if m.tracked == 1 && !m.trackedLate && (m.misses() || !m.ready) && s.flying.kind == 0 {
			happens(stepTrackedLate, i, true, func(n *modelState) { n.m[i].trackedLate = true })
		}
		if m.isNode && m.cordon == uint8(CordonedByUs) && !m.drainLate && (!m.drained || m.group == cpModel && !s.votes(m.newNode)) && (m.newNode != 0 || s.upgradedBy(i) >= 0) && s.flying.kind != RemoveMember {
			happens(stepDrainLate, i, true, func(n *modelState) { n.m[i].drainLate = true })
		}
		if m.run == 1 && m.life == running {
			if !m.broken {
				happens(stepNodeUpgraded, i, true, func(n *modelState) {
					o := &n.m[i]
					o.run, o.comps = 2, o.runComps
					if o.group == cpModel {
						o.api = max(o.api, o.comps)
					}
				})
			} else {
				happens(stepNodeFails, i, true, func(n *modelState) { n.m[i].run, n.m[i].recent = 3, e.allows('y') })
			}
			if fault && e.allows('u') {
				bad(stepNodeFails, i, func(n *modelState) { n.m[i].run, n.m[i].recent = 3, e.allows('y') })
			}
		}
		if m.recent {
			happens(stepPauseOver, i, true, func(n *modelState) { n.m[i].recent = false })
		}
		if m.silent {
			happens(stepAnswers, i, true, func(n *modelState) { n.m[i].silent = false })
		}
		if m.postponed {
			happens(stepPostponedOver, i, true, func(n *modelState) { n.m[i].postponed = false })
		}
		// Workers wait while a control plane is on hold.
		if m.held && m.group == cpModel {
			happens(stepRelease, i, true, func(n *modelState) { n.m[i].held = false })
		}
		if m.isNode && m.cordon == uint8(CordonedByOthers) && !m.revoked {
			happens(stepUncordoned, i, true, func(n *modelState) { n.m[i].cordon = 0; n.m[i].drained = false })
		}
		if m.isNode && !m.ready && m.life == running && !m.failed {
			happens(stepReadyAgain, i, true, func(n *modelState) { n.m[i].ready = true })
		}
		if m.captured && !m.revoked && m.isNode && m.life == running {
			tell := func(lie uint8, about int) {
				happens(stepLies, i, false, func(n *modelState) { n.m[i].lie, n.m[i].about = lie, uint8(about+1) })
			}
			for lie := uint8(honest); lie < lies; lie++ {
				if e.lies != nil && lie != honest && !slices.Contains(e.lies, lie) {
					continue
				}
				if lie != lieClaim && lie != lieOldNode {
					tell(lie, -1)
					continue
				}
				for k := range s.m {
					if k != i && s.m[k].life != absent {
						tell(lie, k)
					}
				}
			}
		}
		if fault && e.allows('N') && m.died && m.life == terminated && s.freeName(e.scenario, m.group) == uint8(s.base(i)+1) {
			for k := range s.m {
				if s.m[k].life == absent {
					bad(stepReused, i, func(n *modelState) {
						n.m[k] = modelMachine{life: booting, group: m.group, image: n.images[m.group], alias: uint8(s.base(i) + 1)}
						n.m[i].died = false
						n.more++ // the operator may replace the Node of the old one, too
					})
					break
				}
			}
		}
		if p := s.placeOfToken(m.token); fault && e.allows('F') && p >= 0 && !s.places[p].leave && m.life == terminated && !m.isNode && m.member == 0 && m.tracked == 0 {
			bad(stepTokenForgotten, i, func(n *modelState) {
				n.places[p].spent = true
				n.forget(i)
			})
		}
		if e.allows('L') && (int(s.liar) != i+1 || !s.liarGoes) {
			happens(stepLiar, i, false, func(n *modelState) { n.liar, n.liarGoes = uint8(i+1), int(s.liar) == i+1 })
		}
		if !fault || !m.isNode || m.life != running {
			continue
		}
		if e.allows('k') && !m.captured && m.group != cpModel {
			bad(stepCaptured, i, func(n *modelState) {
				n.m[i].captured = true
				if n.floor[n.m[i].group] > 0 {
					n.floor[n.m[i].group]--
				}
			})
		}
		if e.allows('c') && m.cordon == 0 {
			bad(stepCordoned, i, func(n *modelState) { n.m[i].cordon = uint8(CordonedByOthers) })
		}
		if e.allows('g') && !m.silent && s.inPlace[m.group] {
			bad(stepSilent, i, func(n *modelState) { n.m[i].silent = true })
		}
		if e.allows('U') && !m.broken && m.group != cpModel && s.inPlace[m.group] {
			bad(stepBroken, i, func(n *modelState) { n.m[i].broken = true })
		}
		if e.allows('y') && m.retry == 0 {
			bad(stepRetry, i, func(n *modelState) { n.m[i].retry = 1 })
		}
		if e.allows('h') && !m.held {
			bad(stepHeld, i, func(n *modelState) { n.m[i].held = true })
		}
		if m.group == cpModel && (m.member == 1 || quorum-1 < s.countVoters()/2+1 || quorum < 2) && m.token == 0 {
			continue // no operator can repair a lost quorum
		}
		// The console cordons the Node, and refuses a revocation that would lose the quorum.
		if e.allows('R') && !m.revoked && (m.group != cpModel || quorum > 1 && quorum-1 >= s.countVoters()/2+1) {
			bad(stepRevoked, i, func(n *modelState) {
				n.m[i].revoked = true
				if n.m[i].cordon == 0 {
					n.m[i].cordon = uint8(CordonedByOthers)
				}
			})
		}
		if e.allows('r') && m.ready && m.group != cpModel {
			bad(stepNotReady, i, func(n *modelState) { n.m[i].ready = false })
		}
		if e.allows('x') && (m.group != cpModel || m.member == 1 || quorum-1 >= s.countVoters()/2+1) {
			bad(stepDies, i, func(n *modelState) {
				n.m[i].life, n.m[i].ready, n.m[i].died = terminated, false, e.reuses && m.token == 0
				if int(n.leader) == i {
					n.elect()
				}
				n.moveLease(i)
			})
		}
		if e.allows('d') && m.group != cpModel {
			bad(stepNodeDeleted, i, func(n *modelState) {
				n.m[i] = n.m[i].withoutNode()
			})
		}
		if e.allows('o') && !m.obsolete && m.group != cpModel {
			bad(stepObsolete, i, func(n *modelState) {
				n.m[i].obsolete = true
				if n.floor[n.m[i].group] > 0 {
					n.floor[n.m[i].group]--
				}
			})
		}
		if e.allows('l') && m.group == cpModel && int(s.lease) != i && m.ready {
			bad(stepLeaseMoves, i, func(n *modelState) { n.lease = uint8(i) })
		}
	}
	for p := range s.places {
		l := &s.places[p]
		if m := &s.m[max(l.machine, 1)-1]; l.upgrade && !l.late && (m.silent || !m.isNode || !m.ready) {
			happens(stepPlaceLate, p, true, func(n *modelState) { n.places[p].late = true })
		}
		if l.used && !l.leave && !l.upgrade && !l.late && s.byToken(l.token) < 0 && s.flying.token != l.token {
			happens(stepPlaceLate, p, true, func(n *modelState) { n.places[p].late = true })
		}
		if fault && e.allows('i') && l.used && (l.upgrade || s.flying.token != l.token || s.byToken(l.token) >= 0) {
			bad(stepIntentDeleted, p, func(n *modelState) { n.places[p] = modelPlace{} })
		}
	}
	if s.run == 1 {
		if s.m[s.runNode].life == running {
			happens(stepUpgraded, int(s.runNode), true, func(n *modelState) {
				n.run = 2
				o := &n.m[n.runNode]
				o.api = max(o.api, modelTargets[n.runTarget].comps)
			})
			if fault && e.allows('u') {
				bad(stepUpgradeFails, int(s.runNode), func(n *modelState) { n.run = 3 })
			}
		} else {
			happens(stepUpgradeFails, int(s.runNode), true, func(n *modelState) { n.run = 3 })
		}
	}
	if s.enabled != s.scaling {
		happens(stepScaling, 0, true, func(n *modelState) { n.scaling = n.enabled })
	}
	for g := range s.blocked {
		if s.blocked[g] && !e.allows('B') {
			happens(stepUnblock, g, true, func(n *modelState) { n.blocked[g] = false })
		}
		if fault && e.allows('s') && e.nodes[g] > 0 {
			bad(stepStrategy, g, func(n *modelState) { n.inPlace[g] = !n.inPlace[g] })
		}
		if fault && e.allows('b') && !s.blocked[g] && g != cpModel && e.nodes[g] > 0 {
			bad(stepBlock, g, func(n *modelState) { n.blocked[g] = true })
		}
	}
	if s.paused {
		happens(stepUnpause, 0, true, func(n *modelState) { n.paused, n.pausedLong = false, false })
		if !s.pausedLong {
			happens(stepPausedLong, 0, true, func(n *modelState) { n.pausedLong = true })
		}
	}
	if s.cancel {
		happens(stepUncancel, 0, true, func(n *modelState) { n.cancel = false })
	}
	if d.refusal != "" {
		happens(stepNewest, 0, true, func(n *modelState) { n.target = 2 })
	}
	if fault && e.allows('t') {
		for t := range modelTargets {
			if int(s.target) != t {
				bad(stepTarget, t, func(n *modelState) { n.target = uint8(t) })
			}
		}
	}
	if fault && e.allows('p') && !s.paused {
		bad(stepPause, 0, func(n *modelState) { n.paused = true })
		if !s.cancel {
			bad(stepCancel, 0, func(n *modelState) { n.cancel = true })
		}
	}
	if fault && e.allows('a') && !s.enabled {
		bad(stepAutoscalerOn, 0, func(n *modelState) { n.enabled, n.ours = true, false })
	}
	return out, len(d.Actions)
}

func (c *scenario) allows(f rune) bool { return strings.ContainsRune(c.with, f) }

// mayFly reports whether to explore the late effect of an action. Effects of the same process that
// every later reconcile repeats are not explored.
func (a *modelAction) mayFly() bool {
	switch a.kind {
	case YieldLease, MoveLeader, DrainNode, PostponeNode, DeleteNode:
		return false
	}
	return true
}

// settle drops actions that became impossible when s became n: writes conditional on an observed
// object. It also elects an etcd leader and a lease holder where that is possible.
func (n *modelState) settle(before *modelState) {
	f := &n.flying
	switch f.kind {
	case UpgradeNode:
		// A request to an agent ends with its intent, and covers one attempt.
		if n.upgradedBy(int(f.node)-1) < 0 || n.m[f.node-1].run != before.m[f.node-1].run {
			n.flying = modelAction{}
		}
	case CordonNode, ReleaseNode, AdoptReplacement, NoteComponents, MarkRetry:
		if f.kind == MarkRetry && n.m[f.node-1].run != before.m[f.node-1].run {
			f.extra = 1 // it belongs to an earlier run
		}
		a, b := &n.m[f.node-1], &before.m[f.node-1]
		if a.cordon != b.cordon || a.newNode != b.newNode || a.oldNode != b.oldNode || a.isNode != b.isNode || a.postponed != b.postponed || a.noted != b.noted || a.retry != b.retry {
			n.flying = modelAction{}
		}
	case BindIntent, ClearIntent:
		if f.place != 255 {
			a, b := n.places[f.place], before.places[f.place]
			if a.late = b.late; a != b {
				n.flying = modelAction{}
			}
		} else if n.m[f.node-1].tracked != before.m[f.node-1].tracked || n.m[f.node-1].revoked != before.m[f.node-1].revoked {
			n.flying = modelAction{}
		}
	case PublishComponents:
		if n.pubCP != before.pubCP || n.pubW != before.pubW || n.target != before.target {
			n.flying = modelAction{}
		}
	}
	for i := range n.m {
		if m := &n.m[i]; m.life == terminated && !n.mentions(i) { // the cloud no longer lists it
			n.forget(i)
		} else if m.isNode && m.ready && m.known && m.late && n.placeOfToken(m.token) < 0 {
			m.late = false // no request refers to it any more
		}
	}
	if m := &n.m[n.lease]; m.life != running || !m.isNode {
		n.moveLease(int(n.lease))
	}
	if m := &n.m[n.leader]; m.member != 2 || m.life != running {
		n.elect()
	}
}

// forget removes machine i from the cloud's list. Another machine with its name keeps the name.
func (n *modelState) forget(i int) {
	newNode := uint8(0)
	for k := range n.m {
		if n.m[k].alias == uint8(i+1) {
			if newNode == 0 {
				newNode = uint8(k + 1)
				n.m[k].alias = 0
			} else {
				n.m[k].alias = newNode
			}
		}
	}
	n.m[i] = modelMachine{}
	for k := range n.m {
		if n.m[k].oldNode == uint8(i+1) {
			n.m[k].oldNode = deletedMachine
		}
		if n.m[k].origin == uint8(i+1) {
			n.m[k].origin = deletedMachine
		}
		if n.m[k].about == uint8(i+1) {
			n.m[k].lie, n.m[k].about = honest, 0
		}
	}
	if n.liar == uint8(i+1) {
		n.liar, n.liarGoes = 0, false
	}
}

func (n *modelState) moveLease(from int) {
	for i := range n.m {
		if m := &n.m[i]; i != from && m.isNode && m.group == cpModel && m.life == running {
			n.lease = uint8(i)
			return
		}
	}
}

// forgive lowers the numbers that must be kept to those that a fault has left.
func (n *modelState) forgive() {
	var ready [modelGroups]uint8
	for i := range n.m {
		if m := &n.m[i]; m.isNode && m.ready && m.life == running && !n.extra(i) && !m.captured {
			ready[m.group]++
		}
	}
	for g := range ready {
		n.floor[g] = min(n.floor[g], ready[g])
	}
	healthy := uint8(0)
	for i := range n.m {
		if m := &n.m[i]; m.member == 2 && m.life == running && !n.extra(i) {
			healthy++
		}
	}
	n.voters = min(n.voters, healthy)
}

// extra reports whether machine i is joining and does not count yet, or is leaving.
func (n *modelState) extra(i int) bool {
	for _, l := range n.places {
		if l.used && (!l.leave && !l.upgrade && l.token == n.m[i].token || l.leave && int(l.machine) == i+1) {
			return true
		}
	}
	return n.m[i].tracked == 2 || n.m[i].revoked
}

// mentions reports whether any object still refers to machine i.
func (s *modelState) mentions(i int) bool {
	m := &s.m[i]
	if m.isNode || m.member != 0 || m.tracked != 0 || m.revoked || s.placeOfToken(m.token) >= 0 || int(s.lease) == i || s.flying.kind != 0 {
		return true
	}
	for p := range s.places {
		if l := &s.places[p]; l.used && (int(l.oldNode) == i+1 || int(l.machine) == i+1) {
			return true
		}
	}
	return false
}

func (s *modelState) placeOfToken(t uint8) int {
	for p := range s.places {
		if t != 0 && s.places[p].used && s.places[p].token == t {
			return p
		}
	}
	return -1
}

// upgradedBy returns the surge slot of the intent to upgrade machine i, or -1.
func (s *modelState) upgradedBy(i int) int {
	for p := range s.places {
		if l := &s.places[p]; l.used && l.upgrade && int(l.machine) == i+1 {
			return p
		}
	}
	return -1
}

func (s *modelState) anyBroken() bool {
	for i := range s.m {
		if s.m[i].broken {
			return true
		}
	}
	return false
}

func (m modelMachine) withoutNode() modelMachine {
	return modelMachine{alias: m.alias, died: m.died, origin: m.origin, captured: m.captured, revoked: m.revoked, recent: m.recent, run: m.run, runComps: m.runComps, silent: m.silent, broken: m.broken, life: m.life, group: m.group, image: m.image, comps: m.comps, token: m.token, member: m.member, api: m.api, late: m.late, tracked: m.tracked, trackedLate: m.trackedLate}
}

// scenarios are the worlds that are explored. Letters of with are faults: t target,
// p pause and cancel, c cordon by a person, x machine dies, d Node deleted, i intent
// deleted, j never joins, r NotReady, u upgrade fails, a autoscaler, o obsolete, l
// leader moves, h a person puts a node on hold, b a PodDisruptionBudget blocks, B permanently,
// g an agent does not answer, U every run of an agent fails, y a person requests the retry of a
// failed upgrade, s the strategy of a group is changed, L a Node without a machine claims any
// machine at any time, R a machine is revoked, k a worker is captured, whose Node then claims
// anything at any time, N the cloud replaces a machine that has died by one of its name and ID,
// F the cloud drops that a token has made a machine.
var scenarios = []scenario{
	{name: "plain", nodes: [3]int{1, 1, 0}, surge: 1, target: 2, faults: 0},
	{name: "no-autoscaler", nodes: [3]int{1, 1, 0}, surge: 1, target: 1, faults: 0, othersStoppedScale: true},
	{name: "machines", nodes: [3]int{1, 1, 0}, surge: 1, target: 2, faults: 1, with: "xjru"},
	{name: "half-joined", nodes: [3]int{1, 2, 0}, surge: 1, from: 1, target: 1, faults: 1, with: "q", joins: true},
	{name: "half-joined-heir", nodes: [3]int{2, 1, 0}, surge: 1, target: 1, faults: 1, with: "q", stale: true},
	{name: "cordoned", nodes: [3]int{1, 1, 0}, surge: 1, target: 1, faults: 1, with: "ca"},
	{name: "node-deleted", nodes: [3]int{1, 1, 0}, surge: 1, target: 1, faults: 1, with: "do"},
	{name: "paused", nodes: [3]int{1, 1, 0}, surge: 1, target: 1, faults: 1, with: "p"},
	{name: "target", nodes: [3]int{1, 1, 0}, surge: 1, target: 1, faults: 1, with: "t"},
	{name: "intent-deleted", nodes: [3]int{1, 1, 0}, surge: 1, target: 1, faults: 1, with: "i"},
	{name: "intent-of-control-plane", nodes: [3]int{2, 0, 0}, surge: 2, target: 1, faults: 1, with: "i", stale: true},
	{name: "half-gone", nodes: [3]int{2, 0, 0}, surge: 1, target: 1, faults: 1, with: "t", stale: true, halfGone: true},
	{name: "two-groups", nodes: [3]int{1, 1, 1}, surge: 1, target: 1, faults: 1, with: "Bbj"},
	{name: "two-at-a-time", nodes: [3]int{1, 2, 0}, surge: 2, target: 1, faults: 1, with: "tx"},
	{name: "three-control-planes", nodes: [3]int{3, 0, 0}, surge: 2, target: 2, faults: 1, with: "xl"},
	{name: "kept", nodes: [3]int{1, 1, 1}, surge: 1, target: 2, faults: 1, with: "t", keepWorkers: true},
	{name: "in-place", nodes: [3]int{1, 1, 1}, surge: 1, target: 2, faults: 1, with: "c", inPlace: [3]bool{workersB: true}},
	{name: "in-place-workers", nodes: [3]int{1, 2, 0}, surge: 1, target: 2, faults: 1, with: "urxg", inPlace: [3]bool{workersA: true}},
	{name: "in-place-people", nodes: [3]int{1, 1, 0}, surge: 1, from: 1, target: 2, faults: 1, with: "cdhpot", inPlace: [3]bool{workersA: true}},
	{name: "in-place-blocked", nodes: [3]int{1, 1, 1}, surge: 1, from: 1, target: 2, faults: 1, with: "Bb", inPlace: [3]bool{workersA: true, workersB: true}},
	{name: "in-place-fails", nodes: [3]int{1, 1, 1}, surge: 1, from: 1, target: 2, faults: 1, with: "U", inPlace: [3]bool{workersA: true, workersB: true}},
	{name: "in-place-control-planes", nodes: [3]int{3, 1, 0}, surge: 1, from: 1, target: 2, faults: 1, with: "uxl", inPlace: [3]bool{cpModel: true, workersA: true}},
	{name: "in-place-target", nodes: [3]int{2, 1, 0}, surge: 1, from: 0, target: 1, faults: 1, with: "t", inPlace: [3]bool{cpModel: true, workersA: true}},
	{name: "in-place-switched", nodes: [3]int{1, 2, 0}, surge: 2, target: 2, faults: 1, with: "s", inPlace: [3]bool{workersA: true}},
	{name: "in-place-slow", nodes: [3]int{1, 1, 1}, surge: 2, from: 1, target: 2, faults: 1, with: "ugs", inPlace: [3]bool{workersA: true, workersB: true}, stale: true},
	{name: "in-place-retried", nodes: [3]int{1, 1, 0}, surge: 1, from: 1, target: 2, faults: 4, with: "uy", inPlace: [3]bool{workersA: true}, stale: true},
	{name: "held", nodes: [3]int{1, 2, 0}, surge: 1, target: 1, faults: 1, with: "h"},
	{name: "held-control-plane", nodes: [3]int{3, 0, 0}, surge: 1, target: 1, faults: 1, with: "h", stale: true},
	{name: "slow-leader", nodes: [3]int{1, 1, 0}, surge: 1, target: 1, faults: 0, stale: true},
	{name: "slow-leader-target", nodes: [3]int{1, 1, 0}, surge: 1, target: 1, faults: 1, with: "t", stale: true},
	{name: "slow-leader-two", nodes: [3]int{1, 2, 0}, surge: 2, target: 1, faults: 0, stale: true},
	{name: "slow-leader-faults", nodes: [3]int{1, 1, 0}, surge: 1, target: 1, faults: 1, with: "xjid", stale: true},
	{name: "liar", nodes: [3]int{1, 1, 0}, surge: 1, target: 1, faults: 0, with: "L"},
	{name: "captured-slow", nodes: [3]int{1, 1, 0}, surge: 1, target: 1, faults: 1, with: "kL", stale: true},
	{name: "captured-of-two", nodes: [3]int{1, 2, 0}, surge: 1, target: 1, faults: 1, with: "k"},
	{name: "captured", nodes: [3]int{1, 1, 0}, surge: 1, target: 1, faults: 1, with: "k"},
	{name: "captured-evades", nodes: [3]int{1, 1, 0}, surge: 1, target: 1, faults: 1, with: "k", lies: []uint8{lieImage, lieDenies}},
	{name: "captured-heir", nodes: [3]int{1, 2, 0}, surge: 1, target: 1, faults: 0, with: "k", lies: []uint8{lieOldNode}, taken: true},
	{name: "revoked", nodes: [3]int{1, 2, 0}, surge: 1, from: 1, target: 1, faults: 2, with: "RkBb"},
	{name: "revoked-control-plane", nodes: [3]int{3, 0, 0}, surge: 1, from: 1, target: 1, faults: 1, with: "R", stale: true},
	{name: "revoked-in-rollout", nodes: [3]int{1, 1, 0}, surge: 1, target: 1, faults: 1, with: "R", stale: true},
	{name: "reused", nodes: [3]int{1, 1, 0}, surge: 1, target: 1, faults: 2, with: "xN", reuses: true},
	{name: "reused-worker", nodes: [3]int{1, 1, 0}, surge: 1, target: 1, faults: 2, with: "xN", inPlace: [3]bool{cpModel: true}, reuses: true},
	{name: "reused-slow", nodes: [3]int{1, 1, 0}, surge: 1, target: 1, faults: 2, with: "xN", stale: true, reuses: true},
	{name: "reused-control-plane", nodes: [3]int{3, 0, 0}, surge: 1, from: 1, target: 1, faults: 2, with: "xN", reuses: true},
	{name: "token-forgotten", nodes: [3]int{1, 1, 0}, surge: 1, target: 1, faults: 2, with: "xF"},
	{name: "large", nodes: [3]int{3, 2, 1}, surge: 2, target: 2, faults: 1, with: "tx", stale: true},
}

func TestExplore(t *testing.T) {
	if *exploreReplay != "" {
		parts := strings.SplitN(*exploreReplay, ":", 3)
		off, err := strconv.Atoi(parts[1])
		if err != nil || len(parts) != 3 {
			t.Fatalf("-explore.replay is scenario:rule:numbers, not %q", *exploreReplay)
		}
		var trace []int
		for _, n := range strings.Split(parts[2], ",") {
			i, err := strconv.Atoi(n)
			if err != nil {
				t.Fatal(err)
			}
			trace = append(trace, i)
		}
		for i := range scenarios {
			if scenarios[i].name == parts[0] {
				e := &explorer{scenario: &scenarios[i], off: rule(off)}
				t.Log("\n" + e.story(trace))
			}
		}
		return
	}
	defer debug.SetGCPercent(debug.SetGCPercent(300))
	limit := *exploreStates
	if limit == 0 {
		limit = 4_000
		if testing.Short() {
			limit = 400
		}
	}
	total := 0
	for i := range scenarios {
		c := &scenarios[i]
		if *exploreOnly != "" && c.name != *exploreOnly {
			continue
		}
		began := time.Now()
		e := &explorer{scenario: c, limit: limit}
		f := e.explore()
		total += len(e.states)
		how := "all"
		if e.expanded < len(e.states) {
			how = "the first"
		}
		fmt.Fprintf(os.Stderr, "%-22s %s %d states, %d good steps, %d decisions, %s\n", c.name, how, len(e.states), len(e.edges), e.decided, time.Since(began).Round(time.Millisecond))
		if f != nil {
			trace := e.trace(f)
			t.Errorf("%s\n%sreplay with: go test ./operator -run TestExplore -v -explore.replay=%s", f.text, e.story(trace), replay(c, 0, trace))
		}
	}
	fmt.Printf("states %d\n", total)
}

// TestMutants switches the rules off one by one. Without each of them an invariant must break, or
// the goal must become unreachable from some state.
func TestMutants(t *testing.T) {
	if *exploreReplay != "" || !*exploreMutants {
		t.Skip("not requested")
	}
	defer debug.SetGCPercent(debug.SetGCPercent(300))
	if *exploreStates == 0 && *exploreRule == 0 {
		t.Skip("takes a minute: make explore")
	}
	killed, mutants := 0, 0
	for off := everyRule + 1; off < rules; off++ {
		if *exploreRule != 0 && rule(*exploreRule) != off {
			continue
		}
		mutants++
		began := time.Now()
		known := func(c *scenario) bool { return slices.Contains(killers[c.name], off) }
		all := func(*scenario) bool { return true }
		found := kills(t, off, 10_000, began, known) || kills(t, off, 1_000, began, all) || kills(t, off, 10_000, began, all)
		if found {
			killed++
		}
		if !found {
			t.Errorf("no scenario fails without rule %d", off)
			fmt.Fprintf(os.Stderr, "mutant %d survived %s\n", off, time.Since(began).Round(time.Millisecond))
		}
	}
	fmt.Printf("mutants %d/%d killed\n", killed, mutants)
}

// killers are scenarios that failed early without a rule. They are explored first; all others follow if they do not fail.
var killers = map[string][]rule{
	"captured":                {ruleCloudGroup},
	"captured-evades":         {ruleCloudImage, ruleReplacementDenies},
	"captured-heir":           {ruleMadeFor},
	"captured-slow":           {ruleUnknownKept},
	"cordoned":                {ruleForeignCordon},
	"half-gone":               {ruleReplacementVotes, ruleReplacementStays},
	"half-joined":             {ruleKnown, ruleOrphanDeadline, ruleNeverReady},
	"half-joined-heir":        {ruleUnseenKept},
	"in-place":                {ruleReplacementOpen, ruleInPlace, ruleInPlaceEnds, ruleInPlaceNoted},
	"in-place-blocked":        {ruleInPlaceDrained, ruleBlockedGoesBy, ruleInPlaceEnough},
	"in-place-control-planes": {ruleInPlaceKubelet, ruleInPlaceMembers},
	"in-place-fails":          {ruleInPlaceStuck},
	"in-place-people":         {ruleHeld},
	"in-place-workers":        {ruleInPlaceReady},
	"intent-deleted":          {ruleOrphanBudget, ruleUncordon, ruleHalfGone},
	"intent-of-control-plane": {ruleWholeList, ruleCountedTwice, ruleOneControlPlane},
	"kept":                    {ruleNeverDown, ruleKeepWorkers},
	"machines":                {ruleReplacementReady, ruleMembersHealthy, ruleOverdue, ruleDeadMember, ruleDeadNode, ruleRetry},
	"no-autoscaler":           {ruleControlPlaneFirst, ruleOthersAutoscaler},
	"node-deleted":            {ruleLeavingDrained, ruleTrack},
	"paused":                  {ruleStoppedBegins},
	"plain":                   {ruleAutoscalerStopped, ruleGroupImage, rulePublishedFirst, ruleMemberFirst, ruleLeaderMoved, ruleLeaseMoved, ruleGone, ruleOnce, ruleAgentFirst, ruleWorkersLast, ruleWorkBeforeGivenBack, ruleAddonsLast, ruleGiveBack, ruleUnseenOverdue, ruleSecondPublish, ruleAddons},
	"reused-control-plane":    {ruleMemberAddress},
	"reused-worker":           {ruleIncarnation, ruleBareUnknown, ruleDonorMachine},
	"revoked":                 {ruleMachinesName, ruleOwnVersions, ruleRevoked},
	"target":                  {ruleReplacementVersion, ruleNoLateCreate},
	"three-control-planes":    {ruleRevive, ruleVanishedOldNode},
	"token-forgotten":         {ruleSpentToken},
	"two-groups":              {ruleDrained},
}

// kills reports whether some scenario that use accepts fails within its first states without the rule off. Few states of
// every scenario are faster than many of the first ones: most mutants die early in a scenario made for them.
func kills(t *testing.T, off rule, states int, began time.Time, use func(*scenario) bool) bool {
	for i := range scenarios {
		c := &scenarios[i]
		if !use(c) {
			continue
		}
		if *exploreOnly != "" && c.name != *exploreOnly || c.name == "large" {
			continue
		}
		e := &explorer{scenario: c, off: off, limit: states}
		f := e.explore()
		if f == nil {
			continue
		}
		trace := e.trace(f)
		fmt.Fprintf(os.Stderr, "mutant %d killed in %s (%s): %s after %d steps\n", off, c.name, time.Since(began).Round(time.Millisecond), f.text, len(trace))
		if *exploreRule != 0 {
			t.Log("\n" + e.story(trace) + replay(c, off, trace))
		}
		return true
	}
	return false
}
