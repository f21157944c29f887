package tui

import (
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"syscall"
	"time"

	"constellation/engine"
)

// manyMachines is the number of machines from which on single ones are no longer
// told, but groups are.
const manyMachines = 50

// tailLines is how many lines of the log are printed when a step fails.
const tailLines = 25

// beats are the pauses after which a printer that had nothing to tell says that it
// still runs; the last one repeats.
var beats = []time.Duration{10 * time.Second, 30 * time.Second, 60 * time.Second}

// sink takes the events of a run, in order, never concurrently.
type sink interface {
	event(engine.Event)
	// close is called once, after the last event.
	close()
}

// plainPrinter tells a run in lines, one for each change, for logs and pipes:
//
//	07:05:01Z init-first-node  ok     Initialise the first control plane, 18.2s
//
// When nothing changes it says so after 10 seconds, then 30, then every 60, with the
// reason and the time of the next word. It folds events as the console does.
type plainPrinter struct {
	out *guarded
	// first is what is waited for before anything is under way; empty if that is not known.
	first string
	live  *liveLine // on a terminal: what happens now, instead of words every so often
	now   func() time.Time

	mu       sync.Mutex
	t        timeline
	last     time.Time // of the last line
	beat     int
	groups   time.Time         // of the last summary of groups
	waited   waiting           // what was last told to be waited for
	told     map[string]string // what was last said of each group and check
	dirty    bool              // machines have changed since
	findings int
	closed   bool
	timer    *time.Timer
	spin     int
	th       *theme
	sp       speller
}

// newPlainPrinter returns a printer. live may be nil.
func newPlainPrinter(out *guarded, live *liveLine, now func() time.Time) *plainPrinter {
	l := look{ascii: true}
	if live != nil {
		l = live.look
	}
	p := &plainPrinter{out: out, live: live, now: now, th: newTheme(l)}
	p.last = now()
	p.timer = time.AfterFunc(p.pause(), p.tick)
	return p
}

// pause is how long until the printer has a reason of its own to write.
func (p *plainPrinter) pause() time.Duration {
	if p.live != nil {
		return 250 * time.Millisecond
	}
	return beats[min(p.beat, len(beats)-1)]
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
		p.tellGroups()
	} else {
		p.tellStill()
	}
	p.last = p.now()
	p.beat++
	p.timer.Reset(p.pause())
}

// draw shows what happens now on the live line.
func (p *plainPrinter) draw() {
	s := p.t.running()
	if s == nil {
		p.live.clear()
		return
	}
	text := s.title
	if d := s.doing(); d != "" {
		text += ": " + d
	}
	if s.total > 0 {
		text += "  " + p.th.meter(s.progress, s.total, 20) + s.amount(" ")
	}
	p.live.set(p.th.spin(p.spin) + " " + text + "  " + short(p.now().Sub(s.began)))
}

// amount writes how much of a total is there; large totals are bytes.
func amount(n, total int64) string {
	if total >= 1<<16 {
		return bytesOf(n) + " of " + bytesOf(total)
	}
	return fmt.Sprintf("%d of %d", n, total)
}

func (p *plainPrinter) event(ev engine.Event) {
	p.mu.Lock()
	defer p.mu.Unlock()
	c, i := p.t.apply(ev)
	wrote := true
	switch c {
	case began:
		text := p.t.tool
		if p.t.cluster != "" {
			text += "  cluster " + p.t.cluster
		}
		text += marked(p.t.simulated, "  ")
		if p.t.run != "" {
			text += "  run " + p.t.run
		}
		p.line(ev.Time, "run", "start", strings.TrimSpace(text))
	case planned:
		p.tellPlan(ev.Time)
	case checked:
		wrote = p.tellCheck(ev.Time, p.t.checks[i])
	case carried:
		wrote = p.tellNodePlan(ev)
	case stepped:
		p.tellChecks(ev.Time)
		p.tellStep(ev.Time, &p.t.steps[i])
	case moved:
		wrote = p.tellMachine(ev.Time, &p.t.machines[i])
	case waits:
		if p.t.why.text == "" {
			// A wait that the user was to do something about has an end worth telling.
			if wrote = p.waited.remedy != ""; wrote {
				p.line(ev.Time, p.subject(), "go on", "the wait is over after "+short(ev.Time.Sub(p.waited.since)))
			}
			p.waited = waiting{}
			break
		}
		if p.waited.remedy == "" || p.waited.object != p.t.why.object {
			p.waited = p.t.why
		}
		p.line(ev.Time, p.subject(), "wait", p.t.why.text+p.remedyTail(p.t.why.remedy))
	case logged:
		x := p.t.log.at(i)
		// Machines warn a lot about things that are as they should be; their record has it.
		if wrote = x.level == "error" || x.level == "warn" && x.node == ""; wrote {
			p.line(ev.Time, source(x), x.level, x.text)
		}
	case concluded:
		p.tellChecks(ev.Time)
		if p.dirty {
			p.tellGroups()
		}
		p.tellResult(ev.Time)
	default:
		wrote = false
	}
	if wrote {
		p.last, p.beat = p.now(), 0
		if p.live == nil && !p.closed {
			p.timer.Reset(p.pause())
		}
	}
	if p.live != nil && p.t.result == nil {
		p.draw()
	}
}

func (p *plainPrinter) close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed = true
	p.timer.Stop()
	if p.live != nil {
		p.live.clear()
	}
}

// line writes one line: when, about what, how it is, and the rest.
func (p *plainPrinter) line(at time.Time, subject, state, text string) {
	if p.live != nil {
		p.live.clear()
	}
	fmt.Fprintln(p.out, strings.TrimRight(fmt.Sprintf("%s %-18s %-9s %s", at.UTC().Format("15:04:05Z"), subject, state, text), " "))
}

func (p *plainPrinter) subject() string {
	if s := p.t.running(); s != nil {
		return s.id
	}
	return "run"
}

func source(x logLine) string {
	if x.node != "" && x.source != "" {
		return x.node + "/" + x.source
	}
	return x.node + x.source
}

func (p *plainPrinter) remedyTail(remedy string) string {
	if remedy == "" {
		return ""
	}
	return "; to do: " + p.sp.text(remedy)
}

func (p *plainPrinter) tellPlan(at time.Time) {
	plan := p.t.plan
	done := 0
	for _, s := range plan.Steps {
		if s.Finished {
			done++
		}
	}
	text := fmt.Sprintf("%s %s: %s", plan.Verb, clean(plan.Cluster), count(len(plan.Steps), "step"))
	if len(plan.Steps) == 0 { // it is blocked, and nobody knows of what
		text = fmt.Sprintf("%s %s", plan.Verb, clean(plan.Cluster))
	}
	if done > 0 {
		text += fmt.Sprintf(", %d done before", done)
	}
	if to := target(plan.To); to != "" {
		text += "  to " + to
	}
	if n := nodesOf(plan); n > 0 {
		text += "  " + count(n, "machine")
	}
	p.line(at, "plan", "ok", text)
	for _, x := range plan.Components {
		p.line(at, "version", "plan", fmt.Sprintf("%s %s -> %s", clean(x.Name), orElse(clean(x.Now), "(none)"), clean(x.NextHop)))
	}
	for _, c := range p.t.checks {
		p.tellCheck(at, c)
	}
	p.tellChecks(at)
	for _, n := range plan.Notes {
		p.line(at, "plan", "note", p.sp.text(clean(n)))
	}
	for _, s := range plan.Steps {
		if s.Finished {
			continue
		}
		for _, d := range s.Details {
			p.line(at, clean(s.ID), "plan", clean(d))
		}
	}
}

// target writes the versions of a target.
func target(t engine.Target) string {
	var parts []string
	for _, x := range [][2]string{{"kubernetes", t.Kubernetes}, {"image", t.Image}, {"release", t.Release}} {
		if x[1] != "" {
			parts = append(parts, x[0]+" "+clean(x[1]))
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

// tellCheck writes a finding that asks for something; those that are fine are
// counted later.
func (p *plainPrinter) tellCheck(at time.Time, c check) bool {
	switch engine.Severity(c.state) {
	case engine.Info:
		p.findings++
		return false
	case engine.Warn, engine.Block, engine.NotChecked:
		p.findings++
		if !p.news("check "+c.id, c.state+c.title+c.detail) {
			return false
		}
		state := map[engine.Severity]string{engine.Warn: "WARN", engine.Block: "BLOCK", engine.NotChecked: "unknown"}[engine.Severity(c.state)]
		text := c.title
		if c.detail != "" {
			text += ": " + oneLine(c.detail)
		}
		p.line(at, "check", state, text+p.remedyTail(c.remedy))
		return true
	}
	return false
}

// tellChecks writes once how the checks ended.
func (p *plainPrinter) tellChecks(at time.Time) {
	if p.findings == 0 {
		return
	}
	p.findings = 0
	total, _, warn, block := p.t.checkCounts()
	text := count(total, "check")
	if warn > 0 {
		text += ", " + count(warn, "warning")
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

// news reports whether text was not the last thing said about a subject.
func (p *plainPrinter) news(subject, text string) bool {
	if p.told == nil {
		p.told = map[string]string{}
	}
	if p.told[subject] == text {
		return false
	}
	p.told[subject] = text
	return true
}

func (p *plainPrinter) tellStep(at time.Time, s *step) {
	switch s.state {
	case engine.StateRunning:
		text := s.title
		if s.text != "" {
			text += ": " + s.text
		}
		p.line(at, s.id, "start", text)
	case engine.StateDone:
		p.line(at, s.id, "ok", orElse(s.text, s.title)+", "+short(s.took))
	case engine.StateSkipped:
		text := s.title
		if s.text != "" {
			text += ": " + s.text
		}
		p.line(at, s.id, "skip", text)
	case engine.StateFailed:
		p.tail(at)
		p.line(at, s.id, "FAIL", s.text+p.remedyTail(s.remedy))
	default:
		p.line(at, s.id, s.state, s.text)
	}
}

// tail writes the end of the log: where a step failed, what was said last matters.
func (p *plainPrinter) tail(at time.Time) {
	n := p.t.log.len()
	if n == 0 {
		return
	}
	from := max(0, n-tailLines)
	p.line(at, "log", "last", fmt.Sprintf("%d of %s", n-from, count(n+p.t.log.dropped, "line")))
	for i := from; i < n; i++ {
		x := p.t.log.at(i)
		fmt.Fprintf(p.out, "  | %s %s\n", source(x), x.text)
	}
}

// tellMachine writes what became of a machine. Of many machines only failures are
// told one by one.
func (p *plainPrinter) tellMachine(at time.Time, m *machine) bool {
	state := m.state
	if state == engine.NodeFailed {
		state = "FAIL"
	}
	if len(p.t.machines) > manyMachines || p.t.plan != nil && nodesOf(p.t.plan) > manyMachines {
		p.dirty = true
		if state != "FAIL" {
			if p.groups.IsZero() {
				p.groups = p.t.started
			}
			return at.Sub(p.groups) >= beats[0] && p.tellGroups()
		}
	}
	text := m.name
	if m.group != "" {
		text += " (" + m.group + ")"
	}
	if m.text != "" {
		text += ": " + m.text
	}
	if m.state == engine.NodeReady && m.took > 0 {
		text += ", " + short(m.took)
	}
	p.line(at, "node", state, text)
	return true
}

// tellNodePlan writes how a Plan is.
func (p *plainPrinter) tellNodePlan(ev engine.Event) bool {
	var b engine.Board
	b.Apply(ev)
	name := clean(ev.Object)
	text := name + " is deleted"
	if len(b.Plans) > 0 {
		text = planWords(&b.Plans[0])
	}
	if !p.news("node plan "+name, ev.State+text) {
		return false
	}
	state := ev.State
	if state == engine.PlanFailed || state == engine.PlanInvalid {
		state = strings.ToUpper(state)
	}
	p.line(ev.Time, "node-plan", clean(state), text+p.remedyTail(clean(ev.Remedy)))
	return true
}

// planWords say all about a Plan but its state: "system-upgrade/k3s-server v1.36.3: 2 of 5
// nodes done, 1 applying; waits for ...".
func planWords(p *engine.BoardPlan) string {
	text := strings.TrimSpace(clean(p.Name) + " " + clean(p.Version))
	alone := ""
	if p.Alone {
		alone = "has the nodes to itself"
	}
	sep := ": "
	for _, more := range []string{p.Counts(), alone, clean(p.Text)} {
		if more != "" {
			text += sep + more
			sep = "; "
		}
	}
	return text
}

// tellGroups writes one line for each group of machines that has changed.
func (p *plainPrinter) tellGroups() (wrote bool) {
	p.dirty, p.groups = false, p.t.last
	for _, g := range p.t.groups() {
		if text := g.String(); p.news("group "+g.group, text) {
			wrote = true
			p.line(p.t.last, "nodes", "now", text)
		}
	}
	if eta := p.eta(); eta != "" && wrote {
		p.line(p.t.last, "nodes", "ETA", eta)
	}
	return wrote
}

// eta is between which times a rollout will be over: "17:16Z-17:44Z"; empty if nobody knows.
func (p *plainPrinter) eta() string {
	if p.t.etaMost.IsZero() {
		return ""
	}
	layout := "15:04Z"
	if p.t.etaMost.Sub(p.t.last) < 10*time.Minute {
		layout = "15:04:05Z"
	}
	return p.t.etaLeast.UTC().Format(layout) + "-" + p.t.etaMost.UTC().Format(layout)
}

// tellStill says what is under way and for how long, and when it will be said again.
func (p *plainPrinter) tellStill() {
	next := beats[min(p.beat+1, len(beats)-1)]
	text := orElse(p.first, "waiting")
	now := p.now()
	if s := p.t.running(); s != nil {
		text = s.title + " for " + short(now.Sub(s.began))
		if d := s.doing(); d != "" {
			text += ": " + d
		}
		if s.total > 0 {
			text += s.amount(", ")
		}
	}
	if p.t.why.text != "" {
		text += "; why: " + p.t.why.text
	}
	if eta := p.eta(); eta != "" {
		text += "; ETA " + eta
	}
	p.line(now, p.subject(), "still", fmt.Sprintf("%s; next report in %s", text, short(next)))
}

// resultWord is how a run ended, in one word for the second column.
func resultWord(o *outcome) string {
	switch {
	case o.status == engine.StateDone || o.status == engine.StateNothing || o.exit == engine.ExitDone:
		return "ok"
	case o.status == engine.StateStopped || o.status == engine.StateDetached:
		return "left"
	}
	return "FAIL"
}

func (p *plainPrinter) tellResult(at time.Time) {
	o := p.t.result
	text := o.text
	if text == "" {
		text = o.status
	}
	p.line(at, "done", resultWord(o), fmt.Sprintf("%s  exit %d", text, o.exit))
	for _, f := range o.Files {
		note := clean(f.Note)
		if f.Secret {
			note = strings.TrimSpace("SECRET  " + note)
		}
		p.line(at, "file", clean(f.Mode), strings.TrimSpace(clean(f.Path)+"  "+note))
	}
	if o.Resume != "" {
		p.line(at, "resume", "", p.sp.line(clean(o.Resume)))
	}
	for _, n := range o.Next {
		p.line(at, "next", "", p.sp.line(clean(n)))
	}
}

// guarded writes to the user's stdout. When the reader has gone it says so once and
// swallows the rest: a run must not end because nobody listens. Any other error, such
// as a full disk, is kept for the end.
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
