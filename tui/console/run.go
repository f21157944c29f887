package console

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"

	tea "github.com/charmbracelet/bubbletea"

	"constellation/engine/plan"
	"constellation/tui/term"
	"constellation/tui/view"
)

// pane is a part of the run screen that can be scrolled.
type pane int

const (
	paneSteps pane = iota
	paneMachines
	paneLog
	panes
)

// runScreen is the state of the run screen: the scroll position of each pane and the focus.
type runScreen struct {
	defaults
	c     *console
	focus pane
	at    [panes]int // last row shown, or -1 to follow the newest
}

// runEnded is the end of a run.
type runEnded struct{ err error }

func (scr *runScreen) take(msg tea.Msg) (tea.Cmd, bool) {
	if msg, ok := msg.(runEnded); ok {
		return scr.tookEnd(msg.err), true
	}
	return nil, false
}

func (scr *runScreen) title() string   { return "run" }
func (scr *runScreen) command() string { return scr.c.runCommand() }
func (scr *runScreen) mode() string    { return scr.c.run.modeOf(scr) }
func (scr *runScreen) rail() string    { return scr.c.run.railOf(scr) }

func (scr *runScreen) keys() []binding {
	if scr.c.upg.active() {
		return slices.Concat(scr.runKeys(), []binding{scr.c.upg.watchKey()}, scr.c.rollout.keys())
	}
	return scr.runKeys()
}

func (scr *runScreen) why() []string {
	c := scr.c
	if !c.running && c.task.busy == "" {
		return nil
	}
	// The steps show the progress as well, and it changes often: a growing why line
	// must not move the panes. A small window needs its lines for them.
	most := 3
	if c.t.Why.Text == "" || c.h < 22 {
		most = 1
	}
	lines := c.th.Below(c.w, 1, most, term.Strong, c.run.doing())
	if c.running && !c.quit.pending && c.t.Why.Remedy != "" {
		for i, l := range c.th.Below(c.w, 8, max(2, most), term.Accent, c.deps.Commands.Text(c.t.Why.Remedy)) {
			if i == 0 {
				l = " " + c.th.Paint(term.Faint, "To do:") + " " + strings.TrimLeft(l, " ")
			}
			lines = append(lines, l)
		}
	}
	return lines
}

// safety shows the ready nodes and what leaving does.
func (scr *runScreen) safety() string {
	c := scr.c
	if c.upg.active() {
		return c.upg.safety()
	}
	ready, wanted := c.t.Ready()
	parts := []string{fmt.Sprintf("nodes %d/%d ready", ready, wanted)}
	switch {
	case c.t.PastFinal():
		parts = append(parts, "the cluster continues on its own")
	default:
		parts = append(parts, "leaving loses nothing")
	}
	if c.t.Run != "" && c.w >= 120 {
		parts = append(parts, "record "+plan.RunsDir+"/"+c.t.Run)
	}
	return "safety  " + strings.Join(parts, " "+c.th.Dot+" ")
}

func newRunScreen(c *console) *runScreen {
	return &runScreen{c: c, focus: paneLog, at: [panes]int{-1, -1, -1}}
}

func (scr *runScreen) runKeys() []binding {
	return []binding{
		on("tab", "Tab", "next pane", "panes", act(func() { scr.focus = (scr.focus + 1) % panes })).footed("pane"),
		on("shift+tab", "⇧Tab", "previous pane", "panes", act(func() { scr.focus = (scr.focus + panes - 1) % panes })),
		on("up k", "↑ k", "scroll up", "move", act(func() { scr.scroll(-1) })),
		on("down j", "↓ j", "scroll down", "move", act(func() { scr.scroll(1) })),
		on("G end f", "G", "follow the newest", "move", act(func() { scr.at[scr.focus] = -1 })),
		on("l", "l", "full log", "view", act(func() { scr.c.log.show() })).footed("full log"),
		on("y", "y", "copy the newest line of the log", "copy", act(scr.copyLastLine)).footed("copy line"),
	}
}

func (scr *runScreen) copyLastLine() {
	if n := scr.c.t.Log.Len(); n > 0 {
		scr.c.copyText(scr.c.t.Log.At(n-1).Text, "the line")
		return
	}
	scr.c.copyText("", "")
}

// rows returns how many rows a pane has.
func (scr *runScreen) rows(p pane) int {
	switch p {
	case paneSteps:
		return len(view.StepRows(scr.c.page(), scr.c.bodyWidth(), &scr.c.t, scr.c.running))
	case paneMachines:
		if scr.c.upg.active() {
			return len(scr.c.t.Machines) // the run has not changed the others yet
		}
		return len(scr.c.t.Machines) + len(scr.c.t.Missing())
	}
	return scr.c.t.Log.Len()
}

func (scr *runScreen) scroll(by int) {
	p := scr.focus
	n := scr.rows(p)
	at := scr.at[p]
	if at < 0 {
		at = max(0, n-1)
	}
	at += by
	switch {
	case at >= n-1:
		scr.at[p] = -1
	default:
		scr.at[p] = max(at, 0)
	}
}

// part returns the range of h rows of a pane of n rows: at the scroll position, or around row end.
func (scr *runScreen) part(p pane, n, h, end int) (from, to int) {
	if at := scr.at[p]; at >= 0 {
		to = min(n, max(at+1, h))
		return max(0, to-h), to
	}
	return view.Window(n, end, h)
}

func (scr *runScreen) paneTitle(p pane, title string) string {
	if scr.focus == p {
		return title + " " + scr.c.th.Cursor
	}
	return title
}

func (scr *runScreen) view(w, h int) []string {
	if scr.c.plan == nil {
		return []string{"", scr.c.th.Row(w).Add(term.Accent, "  "+scr.c.th.Spin(scr.c.frame)+" ").Add(term.Plain, scr.c.task.busy).String()}
	}
	steps := view.StepRows(scr.c.page(), w, &scr.c.t, scr.c.running)
	if w >= 120 {
		return scr.runWide(w, h)
	}
	// Steps come first, then machines; the log gets the rest, but at least three lines.
	const least = 4
	machines := scr.rows(paneMachines)
	sh := min(len(steps), max(3, h-2-least-min(machines+1, 4)))
	mh := 0
	if n := machines; n > 0 {
		mh = min(n, max(1, h-sh-2-least))
		if h >= 24 {
			mh = min(n, max(mh, 3))
		} else {
			mh = min(mh, max(3, (h-sh)/3))
		}
	}
	lines := []string{scr.c.th.Rule(w, scr.paneTitle(paneSteps, "Steps"), view.StepsRemark(scr.c.page(), &scr.c.t))}
	from, to := scr.part(paneSteps, len(steps), sh, view.CurrentRow(scr.c.page(), steps, sh))
	for _, s := range steps[from:to] {
		lines = append(lines, s.Line)
	}
	if mh > 0 {
		lines = append(lines, scr.machinesView(w, mh)...)
	}
	return append(lines, scr.logTail(w, h-len(lines))...)
}

// runWide shows steps and machines side by side.
func (scr *runScreen) runWide(w, h int) []string {
	left := w * 55 / 100
	right := w - left - 1
	steps := view.StepRows(scr.c.page(), left, &scr.c.t, scr.c.running)
	machineRows := scr.rows(paneMachines)
	if machineRows > view.ManyMachines && scr.at[paneMachines] < 0 {
		machineRows = len(scr.c.t.Groups())
	}
	top := max(min(max(len(steps), machineRows)+1, h*3/5), min(8, h/2))
	lines := []string{scr.c.th.Rule(left, scr.paneTitle(paneSteps, "Steps"), view.StepsRemark(scr.c.page(), &scr.c.t))}
	from, to := scr.part(paneSteps, len(steps), top-1, view.CurrentRow(scr.c.page(), steps, top-1))
	for _, s := range steps[from:to] {
		lines = append(lines, s.Line)
	}
	machines := scr.machinesView(right, top-1)
	out := make([]string, 0, h)
	for i := range top {
		var l, r string
		if i < len(lines) {
			l = lines[i]
		}
		if i < len(machines) {
			r = machines[i]
		}
		out = append(out, l+strings.Repeat(" ", max(0, left-term.StyledWidth(l)))+scr.c.th.Paint(term.Faint, scr.c.th.Side)+r)
	}
	return append(out, scr.logTail(w, h-len(out))...)
}

// machinesView shows the machines in h lines below a heading; many machines are shown by group.
func (scr *runScreen) machinesView(w, h int) []string {
	ready, wanted := scr.c.t.Ready()
	lines := []string{scr.c.th.Rule(w, scr.paneTitle(paneMachines, "Machines"), fmt.Sprintf("%d of %d ready", ready, wanted))}
	if len(scr.c.t.Machines) > view.ManyMachines && scr.at[paneMachines] < 0 {
		groups := scr.c.t.Groups()
		for _, g := range groups[:min(len(groups), h)] {
			done := g.States[plan.NodeReady]
			r := scr.c.th.Row(w).Add(term.Plain, " ").Col(term.Plain, g.Group, 16).Num(term.Plain, fmt.Sprintf("%d/%d", done, g.Total), 11)
			r.Add(term.Good, scr.c.th.Meter(int64(done), int64(g.Total), min(30, w/4))).Pad(2)
			for _, s := range view.NodeStates[1:] {
				if k := g.States[s]; k > 0 {
					_, st := view.NodeSign(scr.c.page(), s)
					r.Add(st, strconv.Itoa(k)+" "+s+" ")
				}
			}
			lines = append(lines, r.String())
		}
		return lines
	}
	rows := view.MachineList(scr.c.page(), w, &scr.c.t, scr.c.upg.active(), scr.c.running)
	from, to := scr.part(paneMachines, len(rows), h, view.FirstUnready(scr.c.page(), &scr.c.t))
	if to-from == len(rows) || h < 2 {
		return append(lines, rows[from:to]...)
	}
	lines = append(lines, rows[from:to-1]...)
	return append(lines, scr.c.th.Row(w).Pad(3).Add(term.Faint, fmt.Sprintf("… %d more: Tab to here, then ↑↓", len(rows)-(to-from)+1)).String())
}

// logTail shows the end of the log in h lines, heading included.
func (scr *runScreen) logTail(w, h int) []string {
	if h < 2 {
		return nil
	}
	n := scr.c.t.Log.Len()
	remark := "following"
	switch {
	case n == 0:
		remark = ""
	case scr.at[paneLog] >= 0:
		remark = fmt.Sprintf("line %d of %d, G follows", scr.at[paneLog]+1, n)
	}
	lines := []string{scr.c.th.Rule(w, scr.paneTitle(paneLog, "Log"), remark)}
	if n == 0 {
		what := "log lines of kubeadm and the bootstrapper appear here"
		if scr.c.upg.active() {
			what = "log lines of services, operator and kubeadm appear here"
		} else if scr.c.ownRun() != nil {
			what = "warnings appear here"
		}
		return append(lines, scr.c.th.Row(w).Add(term.Faint, "   "+what).String())
	}
	from, to := scr.part(paneLog, n, h-1, n-1)
	if scr.at[paneLog] < 0 {
		from, to = max(0, n-h+1), n
	}
	col := view.SourceColumnOf(scr.c.page(), w, func(i int) view.LogLine { return scr.c.t.Log.At(from + i) }, to-from)
	if col.Node != "" {
		lines[0] = scr.c.th.Rule(w, scr.paneTitle(paneLog, "Log of "+col.Node), remark)
	}
	for i := from; i < to; i++ {
		lines = append(lines, view.LogRow(scr.c.page(), scr.c.t.Log.At(i), w, col))
	}
	return lines
}

var _ tea.Model = (*console)(nil)

// takeEvents takes events of the run.
func (scr *runScreen) takeEvents(events []plan.Event) tea.Cmd {
	for _, ev := range events {
		scr.c.t.Apply(ev)
	}
	scr.c.watch.apply(events)
	return scr.c.upg.watchRollout()
}

// start executes the plan, unless the cluster is guarded.
func (scr *runScreen) start() tea.Cmd {
	if scr.c.guard.stops() {
		return nil
	}
	p := scr.c.plan
	scr.c.screen, scr.c.running, scr.c.ran = scr.c.run, true, true
	scr.c.err = nil
	scr.c.t, *scr.c.run = view.Timeline{}, *newRunScreen(scr.c)
	scr.c.watch.restart(watchScreen{}, "")
	scr.c.t.SetPlan(p)
	scr.c.t.Run = term.Clean(p.ID)
	return scr.c.task.launch("running", scr.takeEvents, func(ctx context.Context, emit func(plan.Event)) tea.Msg {
		return runEnded{scr.c.deps.Engine.Run(ctx, p, emit)}
	})
}

func (scr *runScreen) tookEnd(err error) tea.Cmd {
	scr.c.running = false
	scr.c.err = err
	scr.c.quit.asking = false
	if !scr.c.quit.exitSet {
		scr.c.quit.exit = plan.ExitCode(err)
	}
	if scr.c.quit.pending {
		return tea.Quit
	}
	scr.c.screen = scr.c.result
	if scr.c.upg.active() && plan.ExitCode(err) == plan.ExitHeld {
		return scr.c.upg.attach(err)
	}
	return nil
}

// doing is the line that says what the run waits for or does.
func (scr *runScreen) doing() string {
	switch {
	case scr.c.quit.pending:
		return "Leaving when this step can be resumed. Ctrl-C leaves at once."
	case scr.c.running && scr.c.t.Why.Text != "":
		return "Why waiting (" + term.Duration(scr.c.now.Sub(scr.c.t.Why.Since)) + "): " + scr.c.t.Why.Text
	case scr.c.running:
		s := scr.c.t.Running()
		if s == nil {
			return "Reading the current state"
		}
		text := "Now (" + term.Duration(scr.c.now.Sub(s.Began)) + "): " + s.Title
		if d := s.Doing(); d != "" {
			text += ": " + d
		}
		return text
	case scr.c.task.busy != "":
		return "Now: " + scr.c.task.busy
	}
	return ""
}

// modeOf is the mode of the screens of a run and of its result.
func (scr *runScreen) modeOf(s screen) string {
	switch {
	case scr.c.upg.active():
		return scr.c.upg.runMode()
	case scr.c.ran:
		word := "init"
		if own := scr.c.ownRun(); own != nil {
			word = own.word()
		} else if scr.c.wizard.resumed {
			word = "init, resumed"
		}
		return word + "   elapsed " + term.Clock(scr.c.t.Elapsed(scr.c.now))
	}
	return scr.c.wizard.mode(s)
}

// railOf is the rail of the screens of a run and of its result.
func (scr *runScreen) railOf(s screen) string {
	if scr.c.upg.active() {
		return scr.c.upg.runRail()
	}
	if scr.c.ownRun() != nil {
		return ""
	}
	return scr.c.wizard.rail(scr.c.wizard.at(s))
}
