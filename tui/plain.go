package tui

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"syscall"
	"time"

	"constellation/engine/cluster"
	"constellation/engine/plan"
	"constellation/engine/rollout"
	"constellation/engine/words"
	"constellation/tui/term"
	"constellation/tui/view"
)

// tailLines is the number of log lines printed when a step fails.
const tailLines = 25

// heartbeats are the intervals without output after which the printer writes a heartbeat
// line; the last one repeats.
var heartbeats = []time.Duration{10 * time.Second, 30 * time.Second, 60 * time.Second}

// sink takes the events of a run, in order, never concurrently.
type sink interface {
	event(plan.Event)
	// close is called once, after the last event.
	close()
}

// plainPrinter prints a run as lines, one for each change, for logs and pipes:
//
//	07:05:01Z init-first-node  ok     Initialise the first control plane, 18.2s
//
// If nothing changes it prints a heartbeat after 10 seconds, then 30, then every 60, with
// the reason and the interval to the next one. It folds events as the console does.
type plainPrinter struct {
	out *guarded
	// first is the heartbeat's reason before a step runs; may be empty.
	first string
	live  *term.LiveLine // on a terminal: the current activity, instead of heartbeats
	now   func() time.Time

	mu       sync.Mutex
	t        view.Timeline
	last     time.Time         // time of the last line
	beat     int               // index into heartbeats
	groups   time.Time         // time of the last summary of groups
	waited   view.Waiting      // the last wait printed
	printed  map[string]string // the last text printed for each group and check
	dirty    bool              // machines have changed since the last summary
	findings int
	closed   bool
	timer    *time.Timer
	spin     int
	th       *term.Theme
	sp       view.CommandFormatter
}

// newPlainPrinter returns a printer. live may be nil.
func newPlainPrinter(out *guarded, live *term.LiveLine, now func() time.Time) *plainPrinter {
	l := term.Display{Ascii: true}
	if live != nil {
		l = live.Display
	}
	p := &plainPrinter{out: out, live: live, now: now, th: term.NewTheme(l)}
	p.last = now()
	p.timer = time.AfterFunc(p.pause(), p.tick)
	return p
}

// pause is the time until the next heartbeat or redraw.
func (p *plainPrinter) pause() time.Duration {
	if p.live != nil {
		return 250 * time.Millisecond
	}
	return heartbeats[min(p.beat, len(heartbeats)-1)]
}

func (p *plainPrinter) tick() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return
	}
	if p.live != nil {
		p.spin++
		p.draw()
		p.timer.Reset(p.pause())
		return
	}
	if wait := p.pause() - p.now().Sub(p.last); wait > 0 {
		p.timer.Reset(wait)
		return
	}
	if p.dirty {
		p.printGroups()
	} else {
		p.printHeartbeat()
	}
	p.last = p.now()
	p.beat++
	p.timer.Reset(p.pause())
}

// draw shows the current activity on the live line.
func (p *plainPrinter) draw() {
	s := p.t.Running()
	if s == nil {
		p.live.Clear()
		return
	}
	text := s.Title
	if d := s.Doing(); d != "" {
		text += ": " + d
	}
	if s.Total > 0 {
		text += "  " + p.th.Meter(s.Progress, s.Total, 20) + s.Amount(" ")
	}
	p.live.Set(p.th.Spin(p.spin) + " " + text + "  " + term.Duration(p.now().Sub(s.Began)))
}

func (p *plainPrinter) event(ev plan.Event) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.print(ev) {
		p.last, p.beat = p.now(), 0
		if p.live == nil && !p.closed {
			p.timer.Reset(p.pause())
		}
	}
	if p.live != nil && p.t.Result == nil {
		p.draw()
	}
}

// print folds an event and writes its lines. It reports whether it wrote any.
func (p *plainPrinter) print(ev plan.Event) bool {
	c, i := p.t.Apply(ev)
	switch c {
	case view.Began:
		p.printBegin(ev.Time)
	case view.Planned:
		p.printPlan(ev.Time)
	case view.Checked:
		return p.printCheck(ev.Time, p.t.Checks[i])
	case view.NodePlanChanged:
		return p.printNodePlan(ev)
	case view.Stepped:
		p.printChecks(ev.Time)
		p.printStep(ev.Time, &p.t.Steps[i])
	case view.Moved:
		return p.printMachine(ev.Time, &p.t.Machines[i])
	case view.Waits:
		return p.printWait(ev.Time)
	case view.Logged:
		x := p.t.Log.At(i)
		// Machines log many harmless warnings; the record of the run keeps them. A watch itself
		// logs what the output lacks in this cluster.
		if x.Level != "error" && (x.Level != "warn" || x.Node != "") && view.Source(x) != string(plan.VerbWatch) {
			return false
		}
		p.line(ev.Time, view.Source(x), x.Level, x.Text)
	case view.Concluded:
		p.printChecks(ev.Time)
		if p.dirty {
			p.printGroups()
		}
		p.printResult(ev.Time)
	default:
		return false
	}
	return true
}

// printBegin writes the program, the cluster and the ID of the run.
func (p *plainPrinter) printBegin(at time.Time) {
	text := p.t.Tool
	if p.t.Cluster != "" {
		text += "  cluster " + p.t.Cluster
	}
	text += view.Marked(p.t.Simulated, p.t.NotAttested, "  ")
	if p.t.Run != "" {
		text += "  run " + p.t.Run
	}
	p.line(at, "run", "start", strings.TrimSpace(text))
}

// printWait writes why the run waits. Of the ends of waits it writes only those of waits with a
// remedy: the user may be acting on it.
func (p *plainPrinter) printWait(at time.Time) bool {
	if p.t.Why.Text == "" {
		before := p.waited
		p.waited = view.Waiting{}
		if before.Remedy == "" {
			return false
		}
		p.line(at, p.subject(), "go on", "wait ended after "+term.Duration(at.Sub(before.Since)))
		return true
	}
	if p.waited.Remedy == "" || p.waited.Object != p.t.Why.Object {
		p.waited = p.t.Why
	}
	p.line(at, p.subject(), "wait", p.t.Why.Text+p.remedyTail(p.t.Why.Remedy))
	return true
}

func (p *plainPrinter) close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed = true
	p.timer.Stop()
	if p.live != nil {
		p.live.Clear()
	}
}

// line writes one line: time, subject, state and text.
func (p *plainPrinter) line(at time.Time, subject, state, text string) {
	if p.live != nil {
		p.live.Clear()
	}
	fmt.Fprintln(p.out, strings.TrimRight(fmt.Sprintf("%s %-18s %-9s %s", at.UTC().Format("15:04:05Z"), subject, state, text), " "))
}

func (p *plainPrinter) subject() string {
	if s := p.t.Running(); s != nil {
		return s.ID
	}
	return "run"
}

func (p *plainPrinter) remedyTail(remedy string) string {
	if remedy == "" {
		return ""
	}
	return "; to do: " + p.sp.Text(remedy)
}

func (p *plainPrinter) printPlan(at time.Time) {
	plan := p.t.Plan
	done := 0
	for _, s := range plan.Steps {
		if s.Finished {
			done++
		}
	}
	text := fmt.Sprintf("%s %s: %s", plan.Verb, term.Clean(plan.Cluster), words.Count(len(plan.Steps), "step"))
	if len(plan.Steps) == 0 { // blocked before its steps were planned
		text = fmt.Sprintf("%s %s", plan.Verb, term.Clean(plan.Cluster))
	}
	if done > 0 {
		text += fmt.Sprintf(", %d done before", done)
	}
	if to := view.Target(plan.To); to != "" {
		text += "  to " + to
	}
	if n := view.NodesOf(plan); n > 0 {
		text += "  " + words.Count(n, "machine")
	}
	p.line(at, "plan", "ok", text)
	for _, x := range plan.Components {
		p.line(at, "version", "plan", fmt.Sprintf("%s %s -> %s", term.Clean(x.Name), cmp.Or(term.Clean(x.Now), "(none)"), term.Clean(x.NextHop)))
	}
	for _, c := range p.t.Checks {
		p.printCheck(at, c)
	}
	p.printChecks(at)
	for _, n := range plan.Notes {
		p.line(at, "plan", "note", p.sp.Text(term.Clean(n)))
	}
	for _, s := range plan.Steps {
		if s.Finished {
			continue
		}
		for _, d := range s.Details {
			p.line(at, term.Clean(s.ID), "plan", term.Clean(d))
		}
	}
}

// printCheck writes a finding that is a warning, blocks or was not checked. It counts the
// others for printChecks.
func (p *plainPrinter) printCheck(at time.Time, c view.Check) bool {
	switch plan.Severity(c.State) {
	case plan.Info:
		p.findings++
		return false
	case plan.Warn, plan.Block, plan.NotChecked:
		p.findings++
		if !p.news("check "+c.ID, c.State+c.Title+c.Detail) {
			return false
		}
		state := map[plan.Severity]string{plan.Warn: "WARN", plan.Block: "BLOCK", plan.NotChecked: "unknown"}[plan.Severity(c.State)]
		text := c.Title
		if c.Detail != "" {
			text += ": " + term.OneLine(c.Detail)
		}
		p.line(at, "check", state, text+p.remedyTail(c.Remedy))
		return true
	}
	return false
}

// printChecks writes the number of checks, warnings and failures, once for each result.
func (p *plainPrinter) printChecks(at time.Time) {
	if p.findings == 0 {
		return
	}
	p.findings = 0
	total, _, warn, block := p.t.CheckCounts()
	text := words.Count(total, "check")
	if warn > 0 {
		text += ", " + words.Count(warn, "warning")
	}
	state := "ok"
	if block > 0 {
		state = "BLOCK"
		text += fmt.Sprintf(", %d failed", block)
	}
	if p.news("checks", text) {
		p.line(at, "check", state, text)
	}
}

// news reports whether text differs from the last text printed for subject.
func (p *plainPrinter) news(subject, text string) bool {
	if p.printed == nil {
		p.printed = map[string]string{}
	}
	if p.printed[subject] == text {
		return false
	}
	p.printed[subject] = text
	return true
}

func (p *plainPrinter) printStep(at time.Time, s *view.Step) {
	switch s.State {
	case plan.StateRunning:
		text := s.Title
		if s.Text != "" {
			text += ": " + s.Text
		}
		p.line(at, s.ID, "start", text)
	case plan.StateDone:
		p.line(at, s.ID, "ok", cmp.Or(s.Text, s.Title)+", "+term.Duration(s.Took))
	case plan.StateSkipped:
		text := s.Title
		if s.Text != "" {
			text += ": " + s.Text
		}
		p.line(at, s.ID, "skip", text)
	case plan.StateFailed:
		p.tail(at)
		p.line(at, s.ID, "FAIL", s.Text+p.remedyTail(s.Remedy))
	default:
		p.line(at, s.ID, s.State, s.Text)
	}
}

// tail writes the last lines of the log after a step failed.
func (p *plainPrinter) tail(at time.Time) {
	n := p.t.Log.Len()
	if n == 0 {
		return
	}
	from := max(0, n-tailLines)
	p.line(at, "log", "last", fmt.Sprintf("%d of %s", n-from, words.Count(n+p.t.Log.Dropped, "line")))
	for i := from; i < n; i++ {
		x := p.t.Log.At(i)
		fmt.Fprintf(p.out, "  | %s %s\n", view.Source(x), x.Text)
	}
}

// printMachine writes the state of a machine. With more than view.ManyMachines it writes only
// failures, and summarises the rest.
func (p *plainPrinter) printMachine(at time.Time, m *view.Machine) bool {
	state := m.State
	if state == plan.NodeFailed {
		state = "FAIL"
	}
	if len(p.t.Machines) > view.ManyMachines || p.t.Plan != nil && view.NodesOf(p.t.Plan) > view.ManyMachines {
		p.dirty = true
		if state != "FAIL" {
			if p.groups.IsZero() {
				p.groups = p.t.Started
			}
			return at.Sub(p.groups) >= heartbeats[0] && p.printGroups()
		}
	}
	text := m.Name
	if m.Group != "" {
		text += " (" + m.Group + ")"
	}
	if m.Text != "" {
		text += ": " + m.Text
	}
	if m.State == plan.NodeReady && m.Took > 0 {
		text += ", " + term.Duration(m.Took)
	}
	p.line(at, "node", state, text)
	return true
}

// printNodePlan writes the state of a Plan of upgrade.cattle.io.
func (p *plainPrinter) printNodePlan(ev plan.Event) bool {
	var b rollout.Board
	b.Apply(ev)
	name := term.Clean(ev.Object)
	text := name + " deleted"
	if len(b.Plans) > 0 {
		text = planWords(&b.Plans[0])
	}
	if !p.news("node plan "+name, ev.State+text) {
		return false
	}
	state := ev.State
	if state == cluster.PlanFailed || state == cluster.PlanInvalid {
		state = strings.ToUpper(state)
	}
	p.line(ev.Time, "node-plan", term.Clean(state), text+p.remedyTail(term.Clean(ev.Remedy)))
	return true
}

// planWords describes a Plan without its state: "system-upgrade/k3s-server v1.36.3: 2 of 5
// nodes done, 1 applying; waits for ...".
func planWords(p *rollout.BoardPlan) string {
	text := strings.TrimSpace(term.Clean(p.Name) + " " + term.Clean(p.Version))
	alone := ""
	if p.Alone {
		alone = "exclusive"
	}
	sep := ": "
	for _, more := range []string{p.Counts(), alone, term.Clean(p.Text)} {
		if more != "" {
			text += sep + more
			sep = "; "
		}
	}
	return text
}

// printGroups writes one line for each group of machines that has changed.
func (p *plainPrinter) printGroups() (wrote bool) {
	p.dirty, p.groups = false, p.t.Last
	for _, g := range p.t.Groups() {
		if text := g.String(); p.news("group "+g.Group, text) {
			wrote = true
			p.line(p.t.Last, "nodes", "now", text)
		}
	}
	if eta := p.eta(); eta != "" && wrote {
		p.line(p.t.Last, "nodes", "ETA", eta)
	}
	return wrote
}

// eta is the estimated range of the rollout's end: "17:16Z-17:44Z"; empty if unknown.
func (p *plainPrinter) eta() string {
	if p.t.ETAMost.IsZero() {
		return ""
	}
	layout := "15:04Z"
	if p.t.ETAMost.Sub(p.t.Last) < 10*time.Minute {
		layout = "15:04:05Z"
	}
	return p.t.ETALeast.UTC().Format(layout) + "-" + p.t.ETAMost.UTC().Format(layout)
}

// printHeartbeat writes the running step, its duration, and the interval to the next
// heartbeat.
func (p *plainPrinter) printHeartbeat() {
	next := heartbeats[min(p.beat+1, len(heartbeats)-1)]
	text := cmp.Or(p.first, "waiting")
	now := p.now()
	if s := p.t.Running(); s != nil {
		text = s.Title + " for " + term.Duration(now.Sub(s.Began))
		if d := s.Doing(); d != "" {
			text += ": " + d
		}
		if s.Total > 0 {
			text += s.Amount(", ")
		}
	}
	if p.t.Why.Text != "" {
		text += "; why: " + p.t.Why.Text
	}
	if eta := p.eta(); eta != "" {
		text += "; ETA " + eta
	}
	p.line(now, p.subject(), "still", fmt.Sprintf("%s; next report in %s", text, term.Duration(next)))
}

// resultWord is the result of a run, for the second column.
func resultWord(o *view.Outcome) string {
	switch {
	case o.Ended == plan.StateDone || o.Ended == plan.StateNothing || o.Exit == plan.ExitDone:
		return "ok"
	case o.Ended == plan.StateStopped || o.Ended == plan.StateDetached:
		return "left"
	}
	return "FAIL"
}

func (p *plainPrinter) printResult(at time.Time) {
	o := p.t.Result
	text := o.Text
	if text == "" {
		text = o.Ended
	}
	p.line(at, "done", resultWord(o), fmt.Sprintf("%s  exit %d", text, o.Exit))
	for _, f := range o.Files {
		note := term.Clean(f.Note)
		if f.Secret {
			note = strings.TrimSpace("SECRET  " + note)
		}
		p.line(at, "file", term.Clean(f.Mode), strings.TrimSpace(term.Clean(f.Path)+"  "+note))
	}
	for _, m := range o.Etcd {
		p.line(at, "etcd", "ok", term.Clean(m))
	}
	if o.Resume != "" {
		p.line(at, "resume", "", p.sp.Line(term.Clean(o.Resume)))
	}
	for _, n := range o.Next {
		p.line(at, "next", "", p.sp.Line(term.Clean(n)))
	}
}

// guarded writes to the user's stdout. When the reader has closed the pipe, it calls gone
// once and discards the rest: a run must not end for lack of a reader. It keeps any other
// error, such as a full disk, in failed.
type guarded struct {
	w      io.Writer
	gone   func()
	lost   bool
	failed error
}

func (g *guarded) Write(p []byte) (int, error) {
	if g.lost {
		return len(p), nil
	}
	if _, err := g.w.Write(p); err != nil {
		g.lost = true
		switch {
		case errors.Is(err, syscall.EBADF): // stdout was closed on purpose
		case errors.Is(err, syscall.EPIPE) || errors.Is(err, io.ErrClosedPipe):
			if g.gone != nil {
				g.gone()
			}
		default:
			g.failed = err
		}
	}
	return len(p), nil
}

// printSteps writes the steps of a plan for the prompt.
func (p *plainPrinter) printSteps(plan *plan.Plan) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, st := range plan.Steps {
		state := "would"
		if st.Finished {
			state = "skip"
		}
		p.line(p.now(), term.Clean(st.ID), state, term.Clean(st.Title)+": "+term.Clean(st.Effect))
		if st.Warning != "" && !st.Finished {
			p.line(p.now(), term.Clean(st.ID), "WARN", term.Clean(st.Warning))
		}
	}
}

// printRestored writes the result for one object, or in a dry run what would happen.
// Failures are errors, which the printer writes already; unchanged objects are omitted.
func (p *plainPrinter) printRestored(ev plan.Event, dryRun bool) {
	if ev.Kind != plan.KindLog || ev.Object == "" || ev.Level != "info" {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if dryRun {
		p.line(ev.Time, ev.Source, "would", term.Clean(ev.Text))
		return
	}
	p.line(ev.Time, ev.Source, ev.State, term.Clean(strings.TrimPrefix(ev.Text, ev.State+" ")))
}
