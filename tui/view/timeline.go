package view

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"constellation/engine/plan"
	"constellation/engine/rollout"
	"constellation/tui/term"
)

// LogLines is the maximum number of log lines in a timeline; older ones are counted as
// dropped. The record of the run has them all.
const LogLines = 20_000

// Timeline is the state of a run, folded from its events. Console and plain printer both use
// it, so they cannot disagree. All text in it is clean.
//
// The zero value is a run that has not started.
type Timeline struct {
	Run, Cluster, Tool string
	Simulated          bool // the machines are simulated
	NotAttested        bool // no evidence of hardware vouches for the machines
	schema             string
	Started, Last      time.Time
	Plan               *plan.Plan
	Checks             []Check
	Steps              []Step
	Machines           []Machine
	byName             map[string]int // index into machines
	unnamed            string         // deleted machine that the cloud had not named; "" if none
	Log                Lines
	Why                Waiting
	counts             map[string]int64
	ETALeast, ETAMost  time.Time // range of the estimated end of a rollout; zero if unknown
	Result             *Outcome
	Events             uint64
	current            int // index of the running step, -1 if none; valid when steps is not empty
}

// Check is the state of a check: running, then ok, warn or block.
type Check struct {
	ID, State, Title, Detail, Remedy, source string
	took                                     time.Duration
}

// Step is the state of a step of the plan.
type Step struct {
	ID, Title, State string
	Text             string // its progress, or why it failed
	Remedy           string
	final            bool
	Began            time.Time
	Took             time.Duration
	Progress         int64 // out of total
	Total            int64
	textHasProgress  bool // text contains the progress
	parts            []part
}

// Doing is the current progress of the step in a few words; empty if unknown.
func (s *Step) Doing() string {
	if s.Text != "" {
		return s.Text
	}
	for i := len(s.parts) - 1; i >= 0; i-- {
		if p := &s.parts[i]; !p.ended() {
			text := p.name
			if p.total > 0 {
				text += ", " + Amount(p.current, p.total)
			}
			if p.text != "" {
				text += ": " + p.text
			}
			return text
		}
	}
	return ""
}

// Amount is the progress of the step behind a separator; empty if the text contains it.
func (s *Step) Amount(separator string) string {
	if s.textHasProgress {
		return ""
	}
	return separator + Amount(s.Progress, s.Total)
}

// ended reports whether a part is complete.
func (p *part) ended() bool {
	return p.state != "" && p.state != plan.StateRunning || p.state == "" && p.total > 0 && p.current >= p.total
}

// part is a named part of a step: a component that is downloaded, a chart.
type part struct {
	name, state, text string
	current, total    int64
	took              time.Duration
}

// Machine is the state of a machine.
type Machine struct {
	Name, Group, State, Text string
	since                    time.Time // start of this state
	first                    time.Time // first-seen time
	Took                     time.Duration
	attempt                  int
}

// Waiting is what the run waits for. An empty text means that it does not wait.
type Waiting struct {
	Text, node, Object, Remedy string
	Since                      time.Time
}

// Outcome is the result of the run.
type Outcome struct {
	Ended, Text, Remedy string
	Exit                int
	plan.Result
}

// LogLine is one log line of an event.
type LogLine struct {
	at                        time.Time
	source, Node, Level, Text string
}

// Lines is a ring of log lines.
type Lines struct {
	ring    []LogLine
	first   int
	Dropped int
}

// Add appends a line and drops the oldest one if the log is full.
func (l *Lines) Add(x LogLine) {
	if len(l.ring) < LogLines {
		l.ring = append(l.ring, x)
		return
	}
	l.ring[l.first] = x
	l.first = (l.first + 1) % LogLines
	l.Dropped++
}

// Len is the number of lines kept.
func (l *Lines) Len() int { return len(l.ring) }

// At returns the i-th oldest line that is kept.
func (l *Lines) At(i int) LogLine { return l.ring[(l.first+i)%len(l.ring)] }

// change is the kind of change that an event made, for printers of changes.
type change int

// Kinds of change.
const (
	nothing change = iota
	Began
	Planned
	Checked
	NodePlanChanged // a Plan changed; the event has all of it
	Stepped         // a step changed its state
	Moved           // a machine changed its state
	Logged          // a line was added to the log
	advanced        // progress or text changed
	Waits           // the reason for waiting changed
	Concluded       // the run ended
)

// Apply folds one event into t and returns the kind of change. For stepped and moved it also
// returns the index of the step or machine.
func (t *Timeline) Apply(ev plan.Event) (change, int) {
	t.Events++
	t.dropUnnamed()
	if t.Started.IsZero() {
		t.Started = ev.Time
	}
	if ev.Time.After(t.Last) {
		t.Last = ev.Time
	}
	if ev.Run != "" {
		t.Run = term.Clean(ev.Run)
	}
	switch ev.Kind {
	case plan.KindHello:
		t.schema, t.Tool, t.Cluster, t.Simulated, t.NotAttested = term.Clean(ev.Schema), term.Clean(ev.Tool), term.Clean(ev.Object), ev.Simulated, ev.NotAttested
		return Began, 0
	case plan.KindPlan:
		return t.applyPlan(ev)
	case plan.KindCheck:
		return t.applyCheck(ev)
	case plan.KindStep:
		return t.applyStep(ev)
	case plan.KindNode:
		return t.applyNode(ev)
	case plan.KindLog:
		t.Log.Add(LogLine{ev.Time, term.Clean(ev.Source), term.Clean(ev.Node), ev.Level, term.Clean(ev.Text)})
		return Logged, t.Log.Len() - 1
	case plan.KindProgress:
		return t.applyProgress(ev)
	case plan.KindWait:
		return t.applyWait(ev)
	case plan.KindNodePlan:
		return NodePlanChanged, 0
	case plan.KindResult:
		o := &Outcome{Ended: ev.State, Text: term.Clean(ev.Text), Remedy: term.Clean(ev.Remedy)}
		if len(ev.Data) > 0 {
			// A newer schema minor may have other fields; unreadable data is ignored.
			_ = json.Unmarshal(ev.Data, &o.Result)
		}
		if o.Ended == "" {
			o.Ended = o.Status
		}
		if ev.Exit != nil {
			o.Exit = *ev.Exit
		}
		t.Result, t.Why = o, Waiting{}
		if o.Ended == plan.StateFailed {
			// The result screen shows only the beginning of a long text; the log keeps all of it.
			for l := range strings.SplitSeq(term.CleanLines(ev.Text), "\n") {
				t.Log.Add(LogLine{at: ev.Time, Level: "error", Text: l})
			}
		}
		return Concluded, 0
	}
	return nothing, 0
}

func (t *Timeline) applyPlan(ev plan.Event) (change, int) {
	var p plan.Plan
	if json.Unmarshal(ev.Data, &p) != nil {
		return nothing, 0
	}
	t.SetPlan(&p)
	return Planned, 0
}

// SetPlan sets the plan and keeps the state of its known steps.
func (t *Timeline) SetPlan(p *plan.Plan) {
	t.Plan = p
	t.Cluster, t.Simulated, t.NotAttested = term.Clean(p.Cluster), p.Simulated, p.NotAttested
	old := t.Steps
	t.Steps = make([]Step, 0, len(p.Steps))
	t.current = -1
	for _, s := range p.Steps {
		row := Step{ID: term.Clean(s.ID), Title: term.Clean(s.Title), final: s.Final}
		if i := slices.IndexFunc(old, func(o Step) bool { return o.ID == row.ID }); i >= 0 {
			row = old[i]
		} else if s.Finished {
			row.State = plan.StateSkipped
		}
		t.Steps = append(t.Steps, row)
	}
	for _, f := range p.Findings {
		c := CheckOf(f)
		if !slices.ContainsFunc(t.Checks, func(o Check) bool { return o.ID == c.ID }) {
			t.Checks = append(t.Checks, c)
		}
	}
	t.findCurrent()
}

// CheckOf converts a finding into a completed check.
func CheckOf(f plan.Finding) Check {
	return Check{term.Clean(f.ID), string(f.Severity), term.Clean(f.Title), term.CleanLines(f.Detail), term.Clean(f.Remedy), term.Clean(f.Source), f.Took.Round(time.Millisecond)}
}

func (t *Timeline) applyCheck(ev plan.Event) (change, int) {
	id := term.Clean(ev.Object)
	c := Check{
		ID: id, State: ev.State, Title: term.Clean(ev.Text), Remedy: term.Clean(ev.Remedy),
		source: term.Clean(ev.Source), took: time.Duration(ev.TookMS) * time.Millisecond,
	}
	var f plan.Finding
	if len(ev.Data) > 0 && json.Unmarshal(ev.Data, &f) == nil && f.ID == ev.Object {
		c = CheckOf(f)
	}
	i := slices.IndexFunc(t.Checks, func(o Check) bool { return o.ID == id })
	if i < 0 {
		t.Checks = append(t.Checks, c)
		return Checked, len(t.Checks) - 1
	}
	if t.Checks[i] == c {
		return nothing, i
	}
	t.Checks[i] = c
	return Checked, i
}

func (t *Timeline) step(id string) int {
	if id == "" {
		return -1
	}
	i := slices.IndexFunc(t.Steps, func(s Step) bool { return s.ID == id })
	if i < 0 { // a stream without a plan, such as one of a sandbox
		t.Steps = append(t.Steps, Step{ID: id, Title: id})
		i = len(t.Steps) - 1
	}
	return i
}

func (t *Timeline) applyStep(ev plan.Event) (change, int) {
	i := t.step(term.Clean(ev.Step))
	if i < 0 {
		return nothing, 0
	}
	s := &t.Steps[i]
	before := s.State
	s.State = ev.State
	switch text := term.Clean(ev.Text); {
	case ev.State == plan.StateRunning && s.Title == s.ID && text != "":
		s.Title = text // a stream without a plan has titles in its step events
	case text == s.Title: // repeats the title
		if ev.State != plan.StateRunning {
			s.Text = ""
		}
	case text != "" || ev.State != plan.StateRunning:
		s.Text = text
	}
	s.Remedy = term.Clean(ev.Remedy)
	switch ev.State {
	case plan.StateRunning:
		if before != plan.StateRunning {
			s.Began = ev.Time
		}
	default:
		s.Took = time.Duration(ev.TookMS) * time.Millisecond
		if s.Took == 0 && !s.Began.IsZero() {
			s.Took = ev.Time.Sub(s.Began)
		}
		t.Why = Waiting{}
	}
	t.findCurrent()
	if before == s.State && s.State == plan.StateRunning {
		return advanced, i
	}
	return Stepped, i
}

func (t *Timeline) findCurrent() {
	t.current = -1
	for i := range t.Steps {
		if t.Steps[i].State == plan.StateRunning {
			t.current = i
		}
	}
}

// Running returns the running step, nil if there is none.
func (t *Timeline) Running() *Step {
	if len(t.Steps) == 0 || t.current < 0 {
		return nil
	}
	return &t.Steps[t.current]
}

func (t *Timeline) applyNode(ev plan.Event) (change, int) {
	name := term.Clean(ev.Node)
	if name == "" {
		return nothing, 0
	}
	if t.byName == nil {
		t.byName = map[string]int{}
	}
	state := term.Clean(ev.To)
	if state == "" {
		state = term.Clean(ev.State)
	}
	i, known := t.byName[name]
	if !known {
		i = len(t.Machines)
		t.byName[name] = i
		t.Machines = append(t.Machines, Machine{Name: name, since: ev.Time, first: ev.Time})
	}
	m := &t.Machines[i]
	before := *m
	if ev.Group != "" {
		m.Group = term.Clean(ev.Group)
	}
	if state != "" && state != m.State {
		m.State, m.since = state, ev.Time
		m.Took = ev.Time.Sub(m.first)
	}
	m.Text, m.attempt = term.Clean(ev.Text), ev.Attempt
	if m.State == plan.NodeGone && rollout.Unnamed(ev.Node) {
		t.unnamed = name
	}
	switch {
	case m.State != before.State:
		return Moved, i
	case m.Text != before.Text || m.attempt != before.attempt:
		return advanced, i
	}
	return nothing, i
}

// dropUnnamed drops the machine of the previous event if that event deleted an entry that the
// cloud had not named: the machine has a row under its name now, or was never created.
func (t *Timeline) dropUnnamed() {
	i, is := t.byName[t.unnamed]
	t.unnamed = ""
	if !is {
		return
	}
	delete(t.byName, t.Machines[i].Name)
	t.Machines = slices.Delete(t.Machines, i, i+1)
	for ; i < len(t.Machines); i++ {
		t.byName[t.Machines[i].Name] = i
	}
}

func (t *Timeline) applyProgress(ev plan.Event) (change, int) {
	if len(ev.Counts) > 0 {
		t.counts = ev.Counts
		t.ETALeast, t.ETAMost = ev.ETALeast, ev.ETAMost
	}
	i := t.step(term.Clean(ev.Step))
	if i < 0 {
		i = t.current
	}
	if i < 0 || i >= len(t.Steps) {
		return advanced, 0
	}
	s := &t.Steps[i]
	if o := term.Clean(ev.Object); o != "" {
		j := slices.IndexFunc(s.parts, func(p part) bool { return p.name == o })
		if j < 0 {
			s.parts = append(s.parts, part{name: o})
			j = len(s.parts) - 1
		}
		p := &s.parts[j]
		p.state, p.text = ev.State, term.Clean(ev.Text)
		p.current, p.total = max(p.current, ev.Current), ev.Total
		if ev.TookMS > 0 {
			p.took = time.Duration(ev.TookMS) * time.Millisecond
		}
		return advanced, i
	}
	if text := term.Clean(ev.Text); text != "" {
		s.Text = text
	}
	if ev.Total != s.Total { // the unit of progress has changed
		s.Progress, s.Total = 0, ev.Total
	}
	s.Progress, s.textHasProgress = max(s.Progress, ev.Current), ev.Text != "" && ev.Counts["objects"] > 0
	return advanced, i
}

func (t *Timeline) applyWait(ev plan.Event) (change, int) {
	w := Waiting{Text: term.Clean(ev.Text), node: term.Clean(ev.Node), Object: term.Clean(ev.Object), Remedy: term.Clean(ev.Remedy), Since: ev.Time}
	if w.Text == "" {
		w.Since = time.Time{}
	}
	if w.Text == t.Why.Text {
		return nothing, 0
	}
	t.Why = w
	return Waits, 0
}

// Ready returns the number of ready nodes and the expected number of machines.
func (t *Timeline) Ready() (ready, wanted int) {
	for i := range t.Machines {
		switch t.Machines[i].State {
		case plan.NodeReady:
			ready++
			wanted++
		case plan.NodeGone:
		default:
			wanted++
		}
	}
	if t.Plan != nil {
		sum := 0
		for _, n := range t.Plan.Nodes {
			sum += n
		}
		wanted = max(wanted, sum)
	}
	return ready, wanted
}

// Missing counts the machines of the plan that have not been seen, by group in the order of
// their names. It is nil if there are too many machines to list.
func (t *Timeline) Missing() []groupCounts {
	if t.Plan == nil || len(t.Machines) > ManyMachines {
		return nil
	}
	var list []groupCounts
	for _, name := range slices.Sorted(maps.Keys(t.Plan.Nodes)) {
		n := t.Plan.Nodes[name]
		for i := range t.Machines {
			if m := &t.Machines[i]; m.Group == term.Clean(name) && m.State != plan.NodeGone {
				n--
			}
		}
		if n > 0 {
			list = append(list, groupCounts{Group: term.Clean(name), Total: n})
		}
	}
	return list
}

// groupCounts are the numbers of machines of a group by state.
type groupCounts struct {
	Group  string
	Total  int
	States map[string]int
}

// Groups counts the machines by group, in the order of the groups' names.
func (t *Timeline) Groups() []groupCounts {
	by := map[string]*groupCounts{}
	var out []*groupCounts
	for i := range t.Machines {
		m := &t.Machines[i]
		g := by[m.Group]
		if g == nil {
			g = &groupCounts{Group: m.Group, States: map[string]int{}}
			by[m.Group] = g
			out = append(out, g)
		}
		g.Total++
		g.States[m.State]++
	}
	slices.SortFunc(out, func(a, b *groupCounts) int { return strings.Compare(a.Group, b.Group) })
	list := make([]groupCounts, len(out))
	for i, g := range out {
		list[i] = *g
		if t.Plan != nil {
			list[i].Total = max(g.Total, t.Plan.Nodes[g.Group])
		}
	}
	return list
}

// NodeStates is the display order of the states of machines.
var NodeStates = []string{
	plan.NodeReady, plan.NodeOutdated, plan.NodeReplacing, plan.NodeDraining, plan.NodeUpgrading, plan.NodeLeaving, plan.NodeNotReady, plan.NodeJoining, plan.NodeBooting,
	plan.NodeCreating, plan.NodeFailed, plan.NodeGone,
}

func (g groupCounts) String() string {
	var parts []string
	for _, s := range NodeStates {
		if n := g.States[s]; n > 0 && s != plan.NodeReady {
			parts = append(parts, strconv.Itoa(n)+" "+s)
		}
	}
	head := g.Group + " " + strconv.Itoa(g.States[plan.NodeReady]) + "/" + strconv.Itoa(g.Total) + " ready"
	if len(parts) > 0 {
		head += ", " + strings.Join(parts, ", ")
	}
	return head
}

// Finished returns the number of steps that are done or were skipped.
func (t *Timeline) Finished() int {
	n := 0
	for i := range t.Steps {
		if s := t.Steps[i].State; s == plan.StateDone || s == plan.StateSkipped {
			n++
		}
	}
	return n
}

// PastFinal reports whether the step that is the point of no return is done: the cluster
// then continues without this program.
func (t *Timeline) PastFinal() bool {
	for i := range t.Steps {
		if s := &t.Steps[i]; s.final && (s.State == plan.StateDone || s.State == plan.StateSkipped) {
			return true
		}
	}
	return false
}

// CheckCounts counts the checks by result; running ones are in total only.
func (t *Timeline) CheckCounts() (total, ok, warn, block int) {
	for _, c := range t.Checks {
		switch plan.Severity(c.State) {
		case plan.Info:
			ok++
		case plan.Warn:
			warn++
		case plan.Block:
			block++
		}
	}
	return len(t.Checks), ok, warn, block
}

// Elapsed is the duration of the run until now, or until its end if it has ended.
func (t *Timeline) Elapsed(now time.Time) time.Duration {
	if t.Started.IsZero() {
		return 0
	}
	if t.Result != nil {
		return t.Last.Sub(t.Started)
	}
	if now.Before(t.Last) {
		now = t.Last
	}
	return now.Sub(t.Started)
}

// ManyMachines is the number of machines above which the printer summarises groups instead
// of printing single machines.
const ManyMachines = 50

// Amount formats a progress; large totals are bytes.
func Amount(n, total int64) string {
	if total >= 1<<16 {
		return term.Bytes(n) + " of " + term.Bytes(total)
	}
	return fmt.Sprintf("%d of %d", n, total)
}

// Source names the node and the component of a log line.
func Source(x LogLine) string {
	if x.Node != "" && x.source != "" {
		return x.Node + "/" + x.source
	}
	return x.Node + x.source
}

// Target formats the versions of a target.
func Target(t plan.Target) string {
	var parts []string
	for _, x := range [][2]string{{"kubernetes", t.Kubernetes}, {"image", t.Image}, {"release", t.Release}} {
		if x[1] != "" {
			parts = append(parts, x[0]+" "+term.Clean(x[1]))
		}
	}
	return strings.Join(parts, ", ")
}

// NodesOf is the number of machines of a plan.
func NodesOf(p *plan.Plan) int {
	n := 0
	for _, c := range p.Nodes {
		n += c
	}
	return n
}
