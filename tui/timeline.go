package tui

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"constellation/engine"
	"constellation/tui/term"
)

// logLines is the maximum number of log lines in a timeline; older ones are counted as
// dropped. The record of the run has them all.
const logLines = 20_000

// timeline is the state of a run, folded from its events. Console and plain printer both use
// it, so they cannot disagree. All text in it is clean.
//
// The zero value is a run that has not started.
type timeline struct {
	run, cluster, tool string
	simulated          bool // the machines are simulated
	schema             string
	started, last      time.Time
	plan               *engine.Plan
	checks             []check
	steps              []step
	machines           []machine
	byName             map[string]int // index into machines
	unnamed            string         // deleted machine that the cloud had not named; "" if none
	log                lines
	why                waiting
	counts             map[string]int64
	etaLeast, etaMost  time.Time // range of the estimated end of a rollout; zero if unknown
	result             *outcome
	events             uint64
	current            int // index of the running step, -1 if none; valid when steps is not empty
}

// check is the state of a check: running, then ok, warn or block.
type check struct {
	id, state, title, detail, remedy, source string
	took                                     time.Duration
}

// step is the state of a step of the plan.
type step struct {
	id, title, state string
	text             string // its progress, or why it failed
	remedy           string
	final            bool
	began            time.Time
	took             time.Duration
	progress         int64 // out of total
	total            int64
	textHasProgress  bool // text contains the progress
	parts            []part
}

// doing is the current progress of the step in a few words; empty if unknown.
func (s *step) doing() string {
	if s.text != "" {
		return s.text
	}
	for i := len(s.parts) - 1; i >= 0; i-- {
		if p := &s.parts[i]; !p.ended() {
			text := p.name
			if p.total > 0 {
				text += ", " + amount(p.current, p.total)
			}
			if p.text != "" {
				text += ": " + p.text
			}
			return text
		}
	}
	return ""
}

// amount is the progress of the step behind a separator; empty if the text contains it.
func (s *step) amount(separator string) string {
	if s.textHasProgress {
		return ""
	}
	return separator + amount(s.progress, s.total)
}

// ended reports whether a part is complete.
func (p *part) ended() bool {
	return p.state != "" && p.state != engine.StateRunning || p.state == "" && p.total > 0 && p.current >= p.total
}

// part is a named part of a step: a component that is downloaded, a chart.
type part struct {
	name, state, text string
	current, total    int64
	took              time.Duration
}

// machine is the state of a machine.
type machine struct {
	name, group, state, text string
	since                    time.Time // start of this state
	first                    time.Time // first-seen time
	took                     time.Duration
	attempt                  int
}

// waiting is what the run waits for. An empty text means that it does not wait.
type waiting struct {
	text, node, object, remedy string
	since                      time.Time
}

// outcome is the result of the run.
type outcome struct {
	status, text, remedy string
	exit                 int
	engine.Result
}

// logLine is one log line of an event.
type logLine struct {
	at                        time.Time
	source, node, level, text string
}

// lines is a ring of log lines.
type lines struct {
	ring    []logLine
	first   int
	dropped int
}

func (l *lines) add(x logLine) {
	if len(l.ring) < logLines {
		l.ring = append(l.ring, x)
		return
	}
	l.ring[l.first] = x
	l.first = (l.first + 1) % logLines
	l.dropped++
}

func (l *lines) len() int { return len(l.ring) }

// at returns the i-th oldest line that is kept.
func (l *lines) at(i int) logLine { return l.ring[(l.first+i)%len(l.ring)] }

// change is the kind of change that an event made, for printers of changes.
type change int

const (
	nothing change = iota
	began
	planned
	checked
	nodePlanChanged // a Plan changed; the event has all of it
	stepped         // a step changed its state
	moved           // a machine changed its state
	logged          // a line was added to the log
	advanced        // progress or text changed
	waits           // the reason for waiting changed
	concluded       // the run ended
)

// apply folds one event into t and returns the kind of change. For stepped and moved it also
// returns the index of the step or machine.
func (t *timeline) apply(ev engine.Event) (change, int) {
	t.events++
	t.dropUnnamed()
	if t.started.IsZero() {
		t.started = ev.Time
	}
	if ev.Time.After(t.last) {
		t.last = ev.Time
	}
	if ev.Run != "" {
		t.run = term.Clean(ev.Run)
	}
	switch ev.Kind {
	case engine.KindHello:
		t.schema, t.tool, t.cluster, t.simulated = term.Clean(ev.Schema), term.Clean(ev.Tool), term.Clean(ev.Object), ev.Simulated
		return began, 0
	case engine.KindPlan:
		return t.applyPlan(ev)
	case engine.KindCheck:
		return t.applyCheck(ev)
	case engine.KindStep:
		return t.applyStep(ev)
	case engine.KindNode:
		return t.applyNode(ev)
	case engine.KindLog:
		t.log.add(logLine{ev.Time, term.Clean(ev.Source), term.Clean(ev.Node), ev.Level, term.Clean(ev.Text)})
		return logged, t.log.len() - 1
	case engine.KindProgress:
		return t.applyProgress(ev)
	case engine.KindWait:
		return t.applyWait(ev)
	case engine.KindNodePlan:
		return nodePlanChanged, 0
	case engine.KindResult:
		o := &outcome{status: ev.State, text: term.Clean(ev.Text), remedy: term.Clean(ev.Remedy)}
		if len(ev.Data) > 0 {
			// A newer schema minor may have other fields; unreadable data is ignored.
			_ = json.Unmarshal(ev.Data, &o.Result)
		}
		if o.status == "" {
			o.status = o.Status
		}
		if ev.Exit != nil {
			o.exit = *ev.Exit
		}
		t.result, t.why = o, waiting{}
		if o.status == engine.StateFailed {
			// The result screen shows only the beginning of a long text; the log keeps all of it.
			for l := range strings.SplitSeq(term.CleanLines(ev.Text), "\n") {
				t.log.add(logLine{at: ev.Time, level: "error", text: l})
			}
		}
		return concluded, 0
	}
	return nothing, 0
}

func (t *timeline) applyPlan(ev engine.Event) (change, int) {
	var p engine.Plan
	if json.Unmarshal(ev.Data, &p) != nil {
		return nothing, 0
	}
	t.setPlan(&p)
	return planned, 0
}

// setPlan sets the plan and keeps the state of its known steps.
func (t *timeline) setPlan(p *engine.Plan) {
	t.plan = p
	t.cluster, t.simulated = term.Clean(p.Cluster), p.Simulated
	old := t.steps
	t.steps = make([]step, 0, len(p.Steps))
	t.current = -1
	for _, s := range p.Steps {
		row := step{id: term.Clean(s.ID), title: term.Clean(s.Title), final: s.Final}
		if i := slices.IndexFunc(old, func(o step) bool { return o.id == row.id }); i >= 0 {
			row = old[i]
		} else if s.Finished {
			row.state = engine.StateSkipped
		}
		t.steps = append(t.steps, row)
	}
	for _, f := range p.Findings {
		c := checkOf(f)
		if !slices.ContainsFunc(t.checks, func(o check) bool { return o.id == c.id }) {
			t.checks = append(t.checks, c)
		}
	}
	t.findCurrent()
}

// checkOf converts a finding into a completed check.
func checkOf(f engine.Finding) check {
	return check{term.Clean(f.ID), string(f.Severity), term.Clean(f.Title), term.CleanLines(f.Detail), term.Clean(f.Remedy), term.Clean(f.Source), f.Took.Round(time.Millisecond)}
}

func (t *timeline) applyCheck(ev engine.Event) (change, int) {
	id := term.Clean(ev.Object)
	c := check{
		id: id, state: ev.State, title: term.Clean(ev.Text), remedy: term.Clean(ev.Remedy),
		source: term.Clean(ev.Source), took: time.Duration(ev.TookMS) * time.Millisecond,
	}
	var f engine.Finding
	if len(ev.Data) > 0 && json.Unmarshal(ev.Data, &f) == nil && f.ID == ev.Object {
		c = checkOf(f)
	}
	i := slices.IndexFunc(t.checks, func(o check) bool { return o.id == id })
	if i < 0 {
		t.checks = append(t.checks, c)
		return checked, len(t.checks) - 1
	}
	if t.checks[i] == c {
		return nothing, i
	}
	t.checks[i] = c
	return checked, i
}

func (t *timeline) step(id string) int {
	if id == "" {
		return -1
	}
	i := slices.IndexFunc(t.steps, func(s step) bool { return s.id == id })
	if i < 0 { // a stream without a plan, such as one of a sandbox
		t.steps = append(t.steps, step{id: id, title: id})
		i = len(t.steps) - 1
	}
	return i
}

func (t *timeline) applyStep(ev engine.Event) (change, int) {
	i := t.step(term.Clean(ev.Step))
	if i < 0 {
		return nothing, 0
	}
	s := &t.steps[i]
	before := s.state
	s.state = ev.State
	switch text := term.Clean(ev.Text); {
	case ev.State == engine.StateRunning && s.title == s.id && text != "":
		s.title = text // a stream without a plan has titles in its step events
	case text == s.title: // repeats the title
		if ev.State != engine.StateRunning {
			s.text = ""
		}
	case text != "" || ev.State != engine.StateRunning:
		s.text = text
	}
	s.remedy = term.Clean(ev.Remedy)
	switch ev.State {
	case engine.StateRunning:
		if before != engine.StateRunning {
			s.began = ev.Time
		}
	default:
		s.took = time.Duration(ev.TookMS) * time.Millisecond
		if s.took == 0 && !s.began.IsZero() {
			s.took = ev.Time.Sub(s.began)
		}
		t.why = waiting{}
	}
	t.findCurrent()
	if before == s.state && s.state == engine.StateRunning {
		return advanced, i
	}
	return stepped, i
}

func (t *timeline) findCurrent() {
	t.current = -1
	for i := range t.steps {
		if t.steps[i].state == engine.StateRunning {
			t.current = i
		}
	}
}

// running returns the running step, nil if there is none.
func (t *timeline) running() *step {
	if len(t.steps) == 0 || t.current < 0 {
		return nil
	}
	return &t.steps[t.current]
}

func (t *timeline) applyNode(ev engine.Event) (change, int) {
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
		i = len(t.machines)
		t.byName[name] = i
		t.machines = append(t.machines, machine{name: name, since: ev.Time, first: ev.Time})
	}
	m := &t.machines[i]
	before := *m
	if ev.Group != "" {
		m.group = term.Clean(ev.Group)
	}
	if state != "" && state != m.state {
		m.state, m.since = state, ev.Time
		m.took = ev.Time.Sub(m.first)
	}
	m.text, m.attempt = term.Clean(ev.Text), ev.Attempt
	if m.state == engine.NodeGone && engine.Unnamed(ev.Node) {
		t.unnamed = name
	}
	switch {
	case m.state != before.state:
		return moved, i
	case m.text != before.text || m.attempt != before.attempt:
		return advanced, i
	}
	return nothing, i
}

// dropUnnamed drops the machine of the previous event if that event deleted an entry that the
// cloud had not named: the machine has a row under its name now, or was never created.
func (t *timeline) dropUnnamed() {
	i, is := t.byName[t.unnamed]
	t.unnamed = ""
	if !is {
		return
	}
	delete(t.byName, t.machines[i].name)
	t.machines = slices.Delete(t.machines, i, i+1)
	for ; i < len(t.machines); i++ {
		t.byName[t.machines[i].name] = i
	}
}

func (t *timeline) applyProgress(ev engine.Event) (change, int) {
	if len(ev.Counts) > 0 {
		t.counts = ev.Counts
		t.etaLeast, t.etaMost = ev.ETALeast, ev.ETAMost
	}
	i := t.step(term.Clean(ev.Step))
	if i < 0 {
		i = t.current
	}
	if i < 0 || i >= len(t.steps) {
		return advanced, 0
	}
	s := &t.steps[i]
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
		s.text = text
	}
	if ev.Total != s.total { // the unit of progress has changed
		s.progress, s.total = 0, ev.Total
	}
	s.progress, s.textHasProgress = max(s.progress, ev.Current), ev.Text != "" && ev.Counts["objects"] > 0
	return advanced, i
}

func (t *timeline) applyWait(ev engine.Event) (change, int) {
	w := waiting{text: term.Clean(ev.Text), node: term.Clean(ev.Node), object: term.Clean(ev.Object), remedy: term.Clean(ev.Remedy), since: ev.Time}
	if w.text == "" {
		w.since = time.Time{}
	}
	if w.text == t.why.text {
		return nothing, 0
	}
	t.why = w
	return waits, 0
}

// ready returns the number of ready nodes and the expected number of machines.
func (t *timeline) ready() (ready, wanted int) {
	for i := range t.machines {
		switch t.machines[i].state {
		case engine.NodeReady:
			ready++
			wanted++
		case engine.NodeGone:
		default:
			wanted++
		}
	}
	if t.plan != nil {
		sum := 0
		for _, n := range t.plan.Nodes {
			sum += n
		}
		wanted = max(wanted, sum)
	}
	return ready, wanted
}

// missing counts the machines of the plan that have not been seen, by group in the order of
// their names. It is nil if there are too many machines to list.
func (t *timeline) missing() []groupCounts {
	if t.plan == nil || len(t.machines) > manyMachines {
		return nil
	}
	var list []groupCounts
	for _, name := range slices.Sorted(maps.Keys(t.plan.Nodes)) {
		n := t.plan.Nodes[name]
		for i := range t.machines {
			if m := &t.machines[i]; m.group == term.Clean(name) && m.state != engine.NodeGone {
				n--
			}
		}
		if n > 0 {
			list = append(list, groupCounts{group: term.Clean(name), total: n})
		}
	}
	return list
}

// groupCounts are the numbers of machines of a group by state.
type groupCounts struct {
	group  string
	total  int
	states map[string]int
}

// groups counts the machines by group, in the order of the groups' names.
func (t *timeline) groups() []groupCounts {
	by := map[string]*groupCounts{}
	var out []*groupCounts
	for i := range t.machines {
		m := &t.machines[i]
		g := by[m.group]
		if g == nil {
			g = &groupCounts{group: m.group, states: map[string]int{}}
			by[m.group] = g
			out = append(out, g)
		}
		g.total++
		g.states[m.state]++
	}
	slices.SortFunc(out, func(a, b *groupCounts) int { return strings.Compare(a.group, b.group) })
	list := make([]groupCounts, len(out))
	for i, g := range out {
		list[i] = *g
		if t.plan != nil {
			list[i].total = max(g.total, t.plan.Nodes[g.group])
		}
	}
	return list
}

// nodeStates is the display order of the states of machines.
var nodeStates = []string{
	engine.NodeReady, engine.NodeOutdated, engine.NodeReplacing, engine.NodeDraining, engine.NodeUpgrading, engine.NodeLeaving, engine.NodeNotReady, engine.NodeJoining, engine.NodeBooting,
	engine.NodeCreating, engine.NodeFailed, engine.NodeGone,
}

func (g groupCounts) String() string {
	var parts []string
	for _, s := range nodeStates {
		if n := g.states[s]; n > 0 && s != engine.NodeReady {
			parts = append(parts, strconv.Itoa(n)+" "+s)
		}
	}
	head := g.group + " " + strconv.Itoa(g.states[engine.NodeReady]) + "/" + strconv.Itoa(g.total) + " ready"
	if len(parts) > 0 {
		head += ", " + strings.Join(parts, ", ")
	}
	return head
}

// finished returns the number of steps that are done or were skipped.
func (t *timeline) finished() int {
	n := 0
	for i := range t.steps {
		if s := t.steps[i].state; s == engine.StateDone || s == engine.StateSkipped {
			n++
		}
	}
	return n
}

// pastFinal reports whether the step that is the point of no return is done: the cluster
// then continues without this program.
func (t *timeline) pastFinal() bool {
	for i := range t.steps {
		if s := &t.steps[i]; s.final && (s.state == engine.StateDone || s.state == engine.StateSkipped) {
			return true
		}
	}
	return false
}

// checkCounts counts the checks by result; running ones are in total only.
func (t *timeline) checkCounts() (total, ok, warn, block int) {
	for _, c := range t.checks {
		switch engine.Severity(c.state) {
		case engine.Info:
			ok++
		case engine.Warn:
			warn++
		case engine.Block:
			block++
		}
	}
	return len(t.checks), ok, warn, block
}

// elapsed is the duration of the run until now, or until its end if it has ended.
func (t *timeline) elapsed(now time.Time) time.Duration {
	if t.started.IsZero() {
		return 0
	}
	if t.result != nil {
		return t.last.Sub(t.started)
	}
	if now.Before(t.last) {
		now = t.last
	}
	return now.Sub(t.started)
}

// manyMachines is the number of machines above which the printer summarises groups instead
// of printing single machines.
const manyMachines = 50

// amount formats a progress; large totals are bytes.
func amount(n, total int64) string {
	if total >= 1<<16 {
		return term.Bytes(n) + " of " + term.Bytes(total)
	}
	return fmt.Sprintf("%d of %d", n, total)
}

func source(x logLine) string {
	if x.node != "" && x.source != "" {
		return x.node + "/" + x.source
	}
	return x.node + x.source
}

// target formats the versions of a target.
func target(t engine.Target) string {
	var parts []string
	for _, x := range [][2]string{{"kubernetes", t.Kubernetes}, {"image", t.Image}, {"release", t.Release}} {
		if x[1] != "" {
			parts = append(parts, x[0]+" "+term.Clean(x[1]))
		}
	}
	return strings.Join(parts, ", ")
}

func nodesOf(p *engine.Plan) int {
	n := 0
	for _, c := range p.Nodes {
		n += c
	}
	return n
}
