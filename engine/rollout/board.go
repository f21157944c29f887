package rollout

import (
	"encoding/json"
	"fmt"
	"iter"
	"maps"
	"slices"
	"strings"
	"time"

	"constellation/engine/cloud/providers"
	"constellation/engine/cluster"
	"constellation/engine/plan"
)

// Limits of a board's memory. A rollout of 5,000 nodes has 10,000 machines.
const (
	boardLines = 50_000 // of the log
	boardBytes = 16 << 20
	boardText  = 4 << 10 // of one text
	boardNodes = 40_000  // machines, those that are gone included
	boardGone  = 12_000  // machines that are gone
	boardSteps = 256     // steps, and parts of one
	boardPast  = 24      // moments of one machine
	boardSwing = 256     // durations of one stage
)

// Stages are the states of machines in the order of a rollout: those of old nodes, and those
// of their replacement nodes.
var (
	StagesOld = []string{plan.NodeOutdated, plan.NodeReplacing, plan.NodeDraining, plan.NodeUpgrading, plan.NodeLeaving, plan.NodeGone}
	StagesNew = []string{plan.NodeCreating, plan.NodeBooting, plan.NodeJoining, plan.NodeNotReady, plan.NodeReady}
)

// Board is the state of a rollout as the fold of its events: the states of each machine, the
// speed, the messages, and the current wait. It is pure, so that a live watch, a replay and
// a test that apply the same events show the same. Its memory is bounded, and the cost of an
// event does not depend on the number of nodes.
//
// All texts are as the events have them: clean them before they are shown. The zero value
// is a rollout of which nothing is known. It is not safe for concurrent use.
type Board struct {
	Run, Cluster, Tool, By string
	// Simulated says that the machines only do as machines would.
	Simulated bool
	// NotAttested says that no evidence of hardware vouches for the machines.
	NotAttested bool
	// From and To are the versions of the plan, as text.
	From, To string
	Plan     *plan.Plan // nil if the stream has none
	// Started and Last are the times of the first and of the newest event.
	Started, Last time.Time
	Events        int
	Steps         []BoardStep
	Plans         []BoardPlan // of nodes, by name
	Wait          BoardWait
	// UnreachableSince is since when the API server is not heard of; zero while it answers. What the
	// board shows is then as old.
	UnreachableSince time.Time
	// Current of Total nodes are at the target and Ready, and between ETALeast and ETAMost
	// all will be, as last told; zero if that was not.
	Current, Total    int64
	ETALeast, ETAMost time.Time
	Result            *plan.Result
	// Outcome is the text of the result, Remedy what to do about it, Exit its code.
	Outcome, Remedy string
	Exit            int
	Log             BoardLog
	// Left is how many machines were not taken because there are too many.
	Left int

	nodes   map[string]*BoardNode
	groups  map[string]*BoardGroup
	ordered []*BoardGroup // by name
	gone    []*BoardNode  // oldest first
	counts  map[string]int64
	stages  map[string]*stage
	ended   recently     // places that were done while we watched
	moving  []*BoardNode // longest in its state first
	// moved counts changes of machines, for those who keep lists of them.
	moved int
	// worked is when the first machine went from one state to another.
	worked time.Time
}

// BoardStep is a step, as far as it is.
type BoardStep struct {
	ID, Title, State, Text, Remedy string
	Began                          time.Time
	Took                           time.Duration
	Current, Total                 int64
	Parts                          []BoardPart
}

// BoardPart is a named part of a step.
type BoardPart struct {
	Name, State, Text string
	Current, Total    int64
}

// BoardWait is what is waited for; an empty Text means nothing.
type BoardWait struct {
	Text, Reason, Node, Object, Remedy string
	Since                              time.Time
}

// BoardPlan is a Plan of upgrade.cattle.io; its fields are those of [NodePlan].
type BoardPlan struct {
	Name, State, Version, Channel, Text, Remedy string
	Alone                                       bool
	Total, Done, Applying, Failed, Pending      int64
	// Since is when it came into its state, or when it was first told of.
	Since time.Time
}

// Counts is "2 of 5 nodes done, 1 applying, 1 failed, 1 pending", without unknown counts.
func (p *BoardPlan) Counts() string {
	var parts []string
	if p.Total > 0 {
		parts = append(parts, fmt.Sprintf("%d of %d nodes done", p.Done, p.Total))
	}
	for _, x := range []struct {
		n    int64
		word string
	}{{p.Applying, cluster.PlanApplying}, {p.Failed, cluster.PlanFailed}, {p.Pending, "pending"}} {
		if x.n > 0 {
			parts = append(parts, fmt.Sprintf("%d %s", x.n, x.word))
		}
	}
	return strings.Join(parts, ", ")
}

// BoardNode is a machine.
type BoardNode struct {
	Name, Group, State, Text string
	// Counterpart is the other machine of its replacement; empty if there is none.
	Counterpart string
	Control     bool
	// ProviderID is that of its machine; empty if it is not known.
	ProviderID string
	// Attempts is how often its replacement was begun; at least 1 once it was.
	Attempts int
	// Since is when it came into its state. Seen says that this was seen; else it was in it
	// before anybody looked.
	Since, First time.Time
	Seen         bool
	// Past are its states before, the oldest first.
	Past []Moment
	// Place is where it stands in its group.
	Place *BoardPlace
}

// Page is the page of the machine in the console of its vendor; empty if there is none, or none is known.
func (n *BoardNode) Page() string { return providers.MachinePage(n.ProviderID) }

// Moment is a state that a machine was in.
type Moment struct {
	State, Text string
	Since       time.Time
	Took        time.Duration
	Seen        bool // its beginning was
}

// BoardPlace is the row of one node in a group. It outlives its machines: a replacement node gets
// the row of the old node. Old is the node that is or was replaced, New its replacement; either may
// be nil.
type BoardPlace struct {
	Old, New *BoardNode
	Index    int
	group    *BoardGroup
	was      string // the state that is counted
	due      bool   // it is on its way to the target, and counts when it is there
}

// State is the one that matters of the two machines: what goes wrong, else how far the
// replacement is, else the node's. It is empty if nothing is left at the place.
func (p *BoardPlace) State() string {
	o, n := "", ""
	if p.Old != nil {
		o = p.Old.State
	}
	if p.New != nil {
		n = p.New.State
	}
	switch {
	case n == plan.NodeFailed || o == plan.NodeFailed:
		return plan.NodeFailed
	case o == plan.NodeDraining, o == plan.NodeUpgrading, o == plan.NodeLeaving:
		return o
	case n == "" || n == plan.NodeGone:
		if o == plan.NodeGone {
			return ""
		}
		return o
	case n == plan.NodeReady && o == plan.NodeReplacing:
		return plan.NodeReplacing // its replacement is Ready, and its readiness gate runs
	}
	return n
}

// Node is the machine that the place is about now; nil if there is none.
func (p *BoardPlace) Node() *BoardNode {
	switch {
	case p.New == nil || p.New.State == plan.NodeGone && p.Old != nil:
		return p.Old
	case p.Old != nil && (p.Old.State == plan.NodeDraining || p.Old.State == plan.NodeLeaving):
		return p.Old
	}
	return p.New
}

// BoardGroup is a scaling group.
type BoardGroup struct {
	Name    string
	Control bool
	// Places are in the order of the first events of their nodes.
	Places []*BoardPlace
	// Counts is how many places are in which state; a place without a machine is in none.
	Counts map[string]int
	Total  int
}

// Serving is how many places of how many have a node that is up, be it an old one: one that
// is emptied is up until it leaves.
func (g *BoardGroup) Serving() (up, total int) {
	for _, p := range g.Places {
		if p.Old.serves() || p.New.serves() {
			up++
		}
	}
	return up, g.Total
}

func (n *BoardNode) serves() bool {
	return n != nil && (n.State == plan.NodeReady || n.State == plan.NodeOutdated || n.State == plan.NodeReplacing || n.State == plan.NodeDraining || n.State == plan.NodeUpgrading)
}

// Done is how many places have a node that is at the target.
func (g *BoardGroup) Done() int { return g.Counts[plan.NodeReady] }

// stage has the statistics of machines that were in one state.
type stage struct {
	left  recently
	took  [boardSwing]time.Duration // a ring
	total int                       // durations that were ever put there
	order [boardSwing]time.Duration // what took holds, the least first
}

// stayed notes for how long a machine was in the state.
func (s *stage) stayed(d time.Duration) {
	n, next := min(s.total, boardSwing), s.total%boardSwing
	if n == boardSwing {
		n--
		i, _ := slices.BinarySearch(s.order[:], s.took[next])
		copy(s.order[i:], s.order[i+1:])
	}
	i, _ := slices.BinarySearch(s.order[:n], d)
	copy(s.order[i+1:n+1], s.order[i:n])
	s.order[i], s.took[next] = d, d
	s.total++
}

// recently counts what happens in the last minutes.
type recently struct {
	bins  [60]int32
	at    int64 // number of the newest bin since 1970
	total int
}

const (
	binWidth = 10 * time.Second
	flowOver = 5 * time.Minute // period over which flows are computed
)

func (m *recently) add(t time.Time) { m.turn(t); m.bins[m.at%int64(len(m.bins))]++; m.total++ }

// turn empties the bins between the newest one and t.
func (m *recently) turn(t time.Time) {
	n := t.UnixNano() / int64(binWidth)
	switch {
	case n <= m.at: // clocks may go back a little
		return
	case n-m.at >= int64(len(m.bins)) || m.at == 0:
		m.bins = [60]int32{}
	default:
		for k := m.at + 1; k <= n; k++ {
			m.bins[k%int64(len(m.bins))] = 0
		}
	}
	m.at = n
}

// over is how many there were in the last d before t.
func (m *recently) over(t time.Time, d time.Duration) (n int) {
	if m.at == 0 {
		return 0
	}
	last := t.UnixNano() / int64(binWidth)
	for k := max(last-int64(d/binWidth)+1, m.at-int64(len(m.bins))+1, 1); k <= min(last, m.at); k++ {
		n += int(m.bins[k%int64(len(m.bins))])
	}
	return n
}

// Apply folds an event in.
func (b *Board) Apply(e plan.Event) {
	b.Events++
	if b.Started.IsZero() {
		b.Started = e.Time
	}
	if e.Time.After(b.Last) {
		b.Last = e.Time
	}
	if e.Run != "" {
		b.Run = bounded(e.Run)
	}
	switch e.Kind {
	case plan.KindHello:
		b.Cluster, b.Tool, b.By, b.Simulated, b.NotAttested = bounded(e.Object), bounded(e.Tool), bounded(e.By), e.Simulated, e.NotAttested
	case plan.KindPlan:
		b.plan(e)
	case plan.KindStep:
		b.step(e)
	case plan.KindNode:
		b.node(e)
	case plan.KindLog:
		b.Log.add(BoardLine{Time: e.Time, Source: bounded(e.Source), Node: bounded(e.Node), Level: bounded(e.Level), Text: bounded(e.Text)})
	case plan.KindProgress:
		b.progress(e)
	case plan.KindWait:
		b.wait(e)
	case plan.KindNodePlan:
		b.nodePlan(e)
	case plan.KindResult:
		r := plan.Result{Status: e.State}
		_ = json.Unmarshal(e.Data, &r) // fields that a newer minor has changed are ignored
		b.Result, b.Outcome, b.Remedy = &r, bounded(e.Text), bounded(e.Remedy)
		if e.State != "" {
			r.Status = e.State
		}
		if e.Exit != nil {
			b.Exit = *e.Exit
		}
		b.Wait, b.UnreachableSince = BoardWait{}, time.Time{}
		b.ETALeast, b.ETAMost = time.Time{}, time.Time{}
	}
}

// bounded limits the length of a text.
func bounded(s string) string {
	if len(s) > boardText {
		return strings.ToValidUTF8(s[:boardText], "")
	}
	return s
}

func (b *Board) plan(e plan.Event) {
	var p plan.Plan
	if json.Unmarshal(e.Data, &p) != nil {
		return
	}
	b.Plan, b.From, b.To = &p, bounded(e.From), bounded(e.To)
	b.Simulated, b.NotAttested = b.Simulated || p.Simulated, b.NotAttested || p.NotAttested
	if p.Cluster != "" {
		b.Cluster = bounded(p.Cluster)
	}
	for _, s := range p.Steps[:min(len(p.Steps), boardSteps)] {
		if x := b.stepOf(bounded(s.ID)); x != nil {
			x.Title = bounded(s.Title)
			if s.Finished && x.State == "" {
				x.State = plan.StateSkipped
			}
		}
	}
}

func (b *Board) stepOf(id string) *BoardStep {
	if id == "" {
		return nil
	}
	if i := slices.IndexFunc(b.Steps, func(s BoardStep) bool { return s.ID == id }); i >= 0 {
		return &b.Steps[i]
	}
	if len(b.Steps) >= boardSteps {
		return nil
	}
	b.Steps = append(b.Steps, BoardStep{ID: id, Title: id})
	return &b.Steps[len(b.Steps)-1]
}

func (b *Board) step(e plan.Event) {
	s := b.stepOf(bounded(e.Step))
	if s == nil {
		return
	}
	if e.State == plan.StateRunning && s.State != plan.StateRunning {
		s.Began = e.Time
	}
	if s.Title == s.ID && e.Text != "" && e.State == plan.StateRunning {
		s.Title = bounded(e.Text)
	}
	s.State, s.Text, s.Remedy = bounded(e.State), bounded(e.Text), bounded(e.Remedy)
	if e.State != plan.StateRunning {
		s.Took = time.Duration(e.TookMS) * time.Millisecond
		b.Wait = BoardWait{}
	}
}

// Running returns the step that is under way; nil if none is.
func (b *Board) Running() *BoardStep {
	for i := len(b.Steps) - 1; i >= 0; i-- {
		if b.Steps[i].State == plan.StateRunning {
			return &b.Steps[i]
		}
	}
	return nil
}

func (b *Board) progress(e plan.Event) {
	if len(e.Counts) > 0 && e.Object == "" {
		b.Current, b.Total, b.ETALeast, b.ETAMost = e.Current, e.Total, e.ETALeast, e.ETAMost
	}
	s := b.stepOf(bounded(e.Step))
	if s == nil {
		if s = b.Running(); s == nil {
			return
		}
	}
	if e.Object == "" {
		s.Current, s.Total = e.Current, e.Total
		if e.Text != "" {
			s.Text = bounded(e.Text)
		}
		return
	}
	name := bounded(e.Object)
	i := slices.IndexFunc(s.Parts, func(p BoardPart) bool { return p.Name == name })
	if i < 0 {
		if len(s.Parts) >= boardSteps {
			return
		}
		s.Parts = append(s.Parts, BoardPart{Name: name})
		i = len(s.Parts) - 1
	}
	s.Parts[i] = BoardPart{name, bounded(e.State), bounded(e.Text), e.Current, e.Total}
}

// awayObject is what a wait is about while the API server does not answer.
const awayObject = "api-server"

func (b *Board) wait(e plan.Event) {
	if e.Object == awayObject && e.Text != "" {
		if b.UnreachableSince.IsZero() {
			b.UnreachableSince = e.Time
		}
	} else {
		b.UnreachableSince = time.Time{}
	}
	if e.Text == "" {
		b.Wait = BoardWait{}
		return
	}
	w := BoardWait{bounded(e.Text), bounded(e.State), bounded(e.Node), bounded(e.Object), bounded(e.Remedy), e.Time}
	if b.Wait.Text != "" && b.Wait.Reason == w.Reason && b.Wait.Object == w.Object && b.Wait.Node == w.Node {
		w.Since = b.Wait.Since // the same in other words
	}
	b.Wait = w
}

func (b *Board) nodePlan(e plan.Event) {
	var facts cluster.NodePlanFacts
	_ = json.Unmarshal(e.Data, &facts) // unreadable fields are ignored
	p := BoardPlan{
		Name: bounded(e.Object), State: bounded(e.State), Version: bounded(facts.Version), Channel: bounded(facts.Channel), Text: bounded(e.Text), Remedy: bounded(e.Remedy), Alone: facts.Alone,
		Total: e.Total, Done: e.Current, Applying: e.Counts["applying"], Failed: e.Counts["failed"], Pending: e.Counts["pending"], Since: e.Time,
	}
	at, is := slices.BinarySearchFunc(b.Plans, p.Name, func(p BoardPlan, name string) int { return strings.Compare(p.Name, name) })
	switch {
	case is && p.State == cluster.PlanGone:
		b.Plans = slices.Delete(b.Plans, at, at+1)
	case is:
		if b.Plans[at].State == p.State {
			p.Since = b.Plans[at].Since
		}
		b.Plans[at] = p
	case p.State != cluster.PlanGone && len(b.Plans) < boardSteps:
		b.Plans = slices.Insert(b.Plans, at, p)
	}
}

func (b *Board) node(e plan.Event) {
	name, state := bounded(e.Node), bounded(e.To)
	if name == "" || state == "" {
		return
	}
	if b.nodes == nil {
		b.nodes, b.groups = map[string]*BoardNode{}, map[string]*BoardGroup{}
		b.counts, b.stages = map[string]int64{}, map[string]*stage{}
	}
	b.moved++
	n := b.nodes[name]
	if n == nil {
		if len(b.nodes) >= boardNodes {
			b.Left++
			return
		}
		n = &BoardNode{Name: name, First: e.Time, Since: e.Time, Seen: e.From == "" && state == plan.NodeCreating}
		b.nodes[name] = n
	} else if n.State == plan.NodeGone && state != plan.NodeGone { // another one of that name
		b.bury(n)
		n = &BoardNode{Name: name, First: e.Time, Since: e.Time, Seen: true}
		b.nodes[name] = n
	}
	if e.Group != "" {
		n.Group = bounded(e.Group)
	}
	if e.With != "" {
		n.Counterpart = bounded(e.With)
	}
	n.Control = n.Control || e.Role == roleControlPlane
	if e.ProviderID != "" {
		n.ProviderID = bounded(e.ProviderID)
	}
	if e.Attempt > 0 {
		n.Attempts = e.Attempt
	}
	if n.Place == nil || n.Place.group.Name != n.Group || n.Counterpart != "" && n.Place.Old == nil || n.Counterpart != "" && n.Place.New == nil {
		b.settle(n, state)
	}
	if state != n.State {
		b.move(n, state, e)
	}
	n.Text = bounded(e.Text)
	b.count(n.Place, e.Time)
	if state == plan.NodeGone {
		b.gone = append(b.gone, n)
		if len(b.gone) > boardGone {
			first := b.gone[0]
			b.gone = b.gone[1:]
			if b.nodes[first.Name] == first {
				delete(b.nodes, first.Name)
			}
			b.bury(first)
		}
	}
}

// move takes n from one state to another.
func (b *Board) move(n *BoardNode, state string, e plan.Event) {
	if n.State != "" {
		if n.State != plan.NodeGone {
			b.counts[n.State]--
		}
		took := max(e.Time.Sub(n.Since), 0)
		s := b.stages[n.State]
		if s == nil {
			s = &stage{}
			b.stages[n.State] = s
		}
		s.left.add(e.Time)
		if n.Seen {
			s.stayed(took)
		}
		if len(n.Past) >= boardPast {
			n.Past = slices.Delete(n.Past, 0, 1)
		}
		if b.worked.IsZero() {
			b.worked = e.Time
		}
		n.Past = append(n.Past, Moment{n.State, n.Text, n.Since, took, n.Seen})
		n.Seen = true
	}
	switch {
	case e.Attempt > 0:
	case state == plan.NodeReplacing || state == plan.NodeCreating && n.State == "":
		n.Attempts++
	case state == plan.NodeUpgrading && (n.Attempts == 0 || n.State == plan.NodeFailed):
		n.Attempts++
	}
	if at, is := b.movingAt(n); is {
		b.moving = slices.Delete(b.moving, at, at+1)
	}
	n.State, n.Since = state, e.Time
	if state != plan.NodeGone || n.served() {
		b.counts[state]++
	}
	switch state {
	case plan.NodeOutdated, plan.NodeReady, plan.NodeGone:
	default:
		at, _ := b.movingAt(n)
		b.moving = slices.Insert(b.moving, at, n)
	}
}

// movingAt is where n is among those that move, or would be.
func (b *Board) movingAt(n *BoardNode) (at int, is bool) {
	return slices.BinarySearchFunc(b.moving, n, func(x, y *BoardNode) int {
		if d := x.Since.Compare(y.Since); d != 0 {
			return d
		}
		return strings.Compare(x.Name, y.Name)
	})
}

// served reports whether a machine was ever a node.
func (n *BoardNode) served() bool {
	return slices.ContainsFunc(n.Past, func(m Moment) bool {
		return m.State != plan.NodeCreating && m.State != plan.NodeBooting && m.State != plan.NodeJoining && m.State != plan.NodeFailed
	})
}

// settle gives n its place: that of the other machine of its replacement, else a new one.
func (b *Board) settle(n *BoardNode, state string) {
	comes := slices.Contains(StagesNew, state) || state == plan.NodeFailed
	if o := b.nodes[n.Counterpart]; o != nil && o != n && o.Place != nil {
		old, heir := n, o
		if comes && (n.State == "" || n.Place == nil || n.Place.Old == nil || n.Place.Old == n) && !slices.Contains(StagesOld, state) {
			old, heir = o, n
		}
		p := old.Place
		if p == nil {
			p = heir.Place
		}
		if heir.Place == p && old.Place == p && p.Old == old && p.New == heir {
			return
		}
		for _, x := range []*BoardNode{old, heir} {
			if x.Place != nil && x.Place != p {
				b.leave(x)
			}
		}
		p.Old, p.New = old, heir
		old.Place, heir.Place = p, p
		b.count(p, time.Time{})
		return
	}
	if n.Place != nil && n.Place.group.Name == n.Group {
		return
	}
	if n.Place != nil {
		b.leave(n)
	}
	g := b.groups[n.Group]
	if g == nil {
		g = &BoardGroup{Name: n.Group, Counts: map[string]int{}}
		b.groups[n.Group] = g
		at, _ := slices.BinarySearchFunc(b.ordered, g.Name, func(x *BoardGroup, name string) int { return strings.Compare(x.Name, name) })
		b.ordered = slices.Insert(b.ordered, at, g)
	}
	g.Control = g.Control || n.Control
	p := &BoardPlace{Index: len(g.Places), group: g}
	g.Places = append(g.Places, p)
	n.Place = p
	if comes {
		p.New = n
	} else {
		p.Old = n
	}
}

// leave takes n from its place. The last place of a group goes if nothing is left there;
// others stay empty, so that none moves.
func (b *Board) leave(n *BoardNode) {
	p := n.Place
	n.Place = nil
	if p.Old == n {
		p.Old = nil
	}
	if p.New == n {
		p.New = nil
	}
	b.count(p, time.Time{})
	g := p.group
	for k := len(g.Places); k > 0 && g.Places[k-1].Old == nil && g.Places[k-1].New == nil; k-- {
		g.Places = g.Places[:k-1]
	}
	if len(g.Places) == 0 {
		delete(b.groups, g.Name)
		b.ordered = slices.DeleteFunc(b.ordered, func(o *BoardGroup) bool { return o == g })
	}
}

// bury forgets a machine that is gone.
func (b *Board) bury(n *BoardNode) {
	if n.Place != nil {
		b.leave(n)
	}
	if i := slices.Index(b.gone, n); i >= 0 {
		b.gone = slices.Delete(b.gone, i, i+1)
	}
}

// count keeps the numbers of a place's group. at is zero if nothing happened, but only
// places changed.
func (b *Board) count(p *BoardPlace, at time.Time) {
	state := p.State()
	if state == p.was {
		return
	}
	g := p.group
	if p.was != "" {
		g.Counts[p.was]--
		g.Total--
	}
	if state != "" {
		g.Counts[state]++
		g.Total++
	}
	switch state {
	case plan.NodeReady:
		if p.due && !at.IsZero() {
			b.ended.add(at)
		}
		p.due = false
	case plan.NodeNotReady: // it may have been done before, and is not done twice
	default:
		p.due = true
	}
	p.was = state
}

// Node returns a machine; nil if it is not known.
func (b *Board) Node(name string) *BoardNode { return b.nodes[name] }

// Nodes are the machines, in no order.
func (b *Board) Nodes() iter.Seq[*BoardNode] {
	return func(yield func(*BoardNode) bool) {
		for _, n := range b.nodes {
			if !yield(n) {
				return
			}
		}
	}
}

// Moving are the machines on their way, and those that failed on it: the one that has been in
// its state longest first, and by name where that is the same.
func (b *Board) Moving() iter.Seq[*BoardNode] { return slices.Values(b.moving) }

// InFlight is how many machines are moving.
func (b *Board) InFlight() int { return len(b.moving) }

// Slowest is the machine in flight that has been in its state longest; nil if none is in
// flight.
func (b *Board) Slowest() *BoardNode {
	if len(b.moving) == 0 {
		return nil
	}
	return b.moving[0]
}

// Extra is how many machines there are beyond one for each place.
func (b *Board) Extra() int {
	n := 0
	for s, k := range b.counts {
		if s != plan.NodeGone {
			n += int(k)
		}
	}
	_, total := b.Places()
	return n - total
}

// Groups are the groups, by name.
func (b *Board) Groups() []*BoardGroup { return b.ordered }

// Moves counts the changes of machines: a list of them is as old as the number with which
// it was made.
func (b *Board) Moves() int { return b.moved }

// Count is how many machines are in a state now; for gone, how many nodes have gone since
// the beginning.
func (b *Board) Count(state string) int64 { return b.counts[state] }

// Saw reports whether a machine is in a state, or was.
func (b *Board) Saw(state string) bool { return b.counts[state] > 0 || b.stages[state] != nil }

// Counts are the numbers of machines by state, without those that are gone: what a
// progress event of the same moment says.
func (b *Board) Counts() map[string]int64 {
	out := map[string]int64{}
	for s, n := range b.counts {
		if n > 0 && s != plan.NodeGone {
			out[s] = n
		}
	}
	return out
}

// Places returns the number of rows, and how many of them have a node at the target.
func (b *Board) Places() (done, total int) {
	for _, g := range b.ordered {
		done += g.Done()
		total += g.Total
	}
	return done, total
}

// Flow is how many machines per minute left a state lately, as of now.
func (b *Board) Flow(state string, now time.Time) float64 {
	if s := b.stages[state]; s != nil {
		return b.rate(&s.left, now)
	}
	return 0
}

// Pace is how many nodes per minute came to the target lately, as of now.
func (b *Board) Pace(now time.Time) float64 { return b.rate(&b.ended, now) }

func (b *Board) rate(m *recently, now time.Time) float64 {
	if b.Started.IsZero() {
		return 0
	}
	span := min(max(now.Sub(b.Started), binWidth), flowOver)
	return float64(m.over(now, span+binWidth)) / span.Minutes()
}

// Finished are the numbers of nodes that came to the target in each of the last n spaces
// of ten seconds, the oldest first.
func (b *Board) Finished(n int, now time.Time) []int {
	out := make([]int, n)
	for i := range out {
		out[i] = b.ended.over(now.Add(-time.Duration(n-1-i)*binWidth), binWidth)
	}
	return out
}

// Dwell is how long machines have stayed in a state lately: the quantile q, between 0 and
// 1, of the last few hundred that left it. It is zero if none did.
func (b *Board) Dwell(state string, q float64) time.Duration {
	s := b.stages[state]
	if s == nil || s.total == 0 {
		return 0
	}
	n := min(s.total, boardSwing)
	return s.order[min(int(q*float64(n)), n-1)]
}

// BoardLine is a line that somebody said.
type BoardLine struct {
	Time                      time.Time
	Source, Node, Level, Text string
}

// BoardLog keeps the newest lines. The zero value is empty.
type BoardLog struct {
	ring    []BoardLine
	first   int
	bytes   int
	dropped int
	sources map[string]int
}

func (l *BoardLog) add(x BoardLine) {
	if l.sources == nil {
		l.sources = map[string]int{}
	}
	if len(l.sources) < boardSteps || l.sources[x.Source] > 0 {
		l.sources[x.Source]++
	}
	l.ring = append(l.ring, x)
	l.bytes += x.size()
	for l.Len() > boardLines || l.bytes > boardBytes && l.Len() > 1 {
		l.bytes -= l.ring[l.first].size()
		l.ring[l.first] = BoardLine{}
		l.first++
		l.dropped++
	}
	if l.first > 4096 && l.first > len(l.ring)/2 {
		l.ring = append(make([]BoardLine, 0, len(l.ring)), l.ring[l.first:]...)
		l.first = 0
	}
}

func (x BoardLine) size() int { return 96 + len(x.Source) + len(x.Node) + len(x.Text) }

// Len is how many lines are kept.
func (l *BoardLog) Len() int { return len(l.ring) - l.first }

// At returns the i-th oldest line that is kept.
func (l *BoardLog) At(i int) BoardLine { return l.ring[l.first+i] }

// Dropped is how many older lines are not kept any more; a line's number is that and its
// place among those that are.
func (l *BoardLog) Dropped() int { return l.dropped }

// Sources are who has spoken, with the number of lines that each has said.
func (l *BoardLog) Sources() map[string]int { return l.sources }

// Clone returns a board that does not change when b does.
func (b *Board) Clone() *Board {
	c := *b
	c.Steps = slices.Clone(b.Steps)
	for i := range c.Steps {
		c.Steps[i].Parts = slices.Clone(b.Steps[i].Parts)
	}
	c.Plans = slices.Clone(b.Plans)
	c.counts = maps.Clone(b.counts)
	c.stages = map[string]*stage{}
	for name, s := range b.stages {
		x := *s
		c.stages[name] = &x
	}
	c.Log.ring = slices.Clone(b.Log.ring)
	c.Log.sources = maps.Clone(b.Log.sources)
	machines := map[*BoardNode]*BoardNode{nil: nil}
	copied := func(n *BoardNode) *BoardNode {
		x, ok := machines[n]
		if !ok {
			y := *n
			x = &y
			x.Past = slices.Clone(n.Past)
			machines[n] = x
		}
		return x
	}
	c.groups, c.ordered = map[string]*BoardGroup{}, nil
	for _, g := range b.ordered {
		x := *g
		x.Counts = maps.Clone(g.Counts)
		x.Places = make([]*BoardPlace, len(g.Places))
		for i, p := range g.Places {
			q := *p
			q.group = &x
			q.Old, q.New = copied(p.Old), copied(p.New)
			for _, n := range []*BoardNode{q.Old, q.New} {
				if n != nil {
					n.Place = &q
				}
			}
			x.Places[i] = &q
		}
		c.groups[x.Name] = &x
		c.ordered = append(c.ordered, &x)
	}
	c.moving = make([]*BoardNode, len(b.moving))
	for i, n := range b.moving {
		c.moving[i] = copied(n)
	}
	c.nodes = map[string]*BoardNode{}
	for name, n := range b.nodes {
		c.nodes[name] = copied(n)
	}
	c.gone = make([]*BoardNode, len(b.gone))
	for i, n := range b.gone {
		c.gone[i] = copied(n)
	}
	return &c
}
