package console

import (
	"context"
	"slices"
	"time"

	tea "github.com/charmbracelet/bubbletea"

	"constellation/engine"
	"constellation/engine/infra"
	"constellation/engine/plan"
	"constellation/engine/words"
	"constellation/tui/term"
	"constellation/tui/view"
)

// infraScreen shows what the cluster needs of its cloud, and makes it. The run screen executes the plan.
type infraScreen struct {
	defaults
	c      *console
	reads  bool                // the cloud is read; the home, which is read at the same time, ends busy of the task
	report *engine.InfraReport // nil until it was read
	plan   *plan.Plan          // nil: there is nothing to make
	err    error
	yes    bool // the cursor is on the action
	shown  time.Time
	first  int // line at the top
	most   int // greatest first of the last frame
	// active is set from the answer on: run and result are those of the infrastructure.
	active bool
}

// infraRead is the end of reading the infrastructure.
type infraRead struct {
	report engine.InfraReport
	plan   *plan.Plan
	err    error
}

// show reads what there is, and plans the objects that are missing. It changes nothing.
func (scr *infraScreen) show() tea.Cmd {
	*scr = infraScreen{c: scr.c, reads: true}
	scr.c.screen, scr.c.plan = scr, nil
	eng := scr.c.deps.Engine
	return scr.c.task.launch("reading the cloud", nil, func(ctx context.Context, _ func(plan.Event)) tea.Msg {
		var m infraRead
		if m.report, m.err = eng.Infrastructure(ctx); m.err != nil || len(m.report.Blocked()) > 0 || !absent(&m.report) {
			return m
		}
		m.plan, m.err = eng.PlanInfraCreate(ctx)
		return m
	})
}

// absent reports whether there is something to make.
func absent(r *engine.InfraReport) bool {
	return slices.ContainsFunc(r.Objects, func(o infra.Object) bool { return o.State == infra.Absent })
}

func (scr *infraScreen) take(msg tea.Msg) (tea.Cmd, bool) {
	m, ok := msg.(infraRead)
	if !ok {
		return nil, false
	}
	scr.reads, scr.err, scr.plan, scr.shown = false, m.err, m.plan, scr.c.now
	if m.report.Cluster != "" {
		scr.report = &m.report
	}
	return nil, true
}

// action is the label of the affirmative answer, and why it cannot be given; empty if it can.
func (scr *infraScreen) action() (label, off string) {
	const create = "Make all of this"
	switch {
	case scr.reads:
		return "", "the cloud is being read"
	case scr.err != nil:
		return "", "it failed; r reads again"
	case scr.report == nil:
		return "", ""
	case len(scr.report.Blocked()) > 0:
		return create, words.Count(len(scr.report.Blocked()), "finding") + " in the way: correct the cause, then r"
	case scr.plan == nil:
		return "", "all objects exist"
	case len(scr.plan.Blocked()) > 0:
		return create, "the plan is blocked"
	}
	return create, scr.c.guard.reason()
}

// answer carries out the selected answer.
func (scr *infraScreen) answer() tea.Cmd {
	if scr.c.now.Sub(scr.shown) < confirmDelay {
		scr.c.note = "read it first, then press Enter"
		return nil
	}
	if !scr.yes {
		return scr.leave()
	}
	scr.active, scr.c.plan = true, scr.plan
	return scr.c.run.start()
}

func (scr *infraScreen) leave() tea.Cmd {
	scr.c.task.drop()
	return scr.c.overview.show()
}

func (scr *infraScreen) title() string   { return "infrastructure" }
func (scr *infraScreen) mode() string    { return "infrastructure" }
func (scr *infraScreen) safety() string  { return scrolledSafety(scr, scr.first, scr.most) }
func (scr *infraScreen) command() string { return scr.c.deps.Commands.Command("infra create") }

func (scr *infraScreen) why() []string {
	if scr.reads {
		return []string{scr.c.th.Row(scr.c.w).Add(term.Plain, " "+scr.c.th.Spin(scr.c.frame)+" reading the cloud").String()}
	}
	label, off := scr.action()
	return scr.c.answerLine(label, off, scr.yes)
}

func (scr *infraScreen) view(w, h int) []string {
	pg := scr.c.page()
	var lines []string
	switch {
	case scr.err != nil:
		lines = view.Problem(pg, w, scr.err)
	case scr.report != nil:
		lines = append([]string{pg.Rule(w, "Infrastructure", "")}, view.InfraReport(pg, w, scr.report)...)
	default:
		lines = []string{""}
	}
	return scrolled(lines, h, &scr.first, &scr.most)
}

func (scr *infraScreen) keys() []binding {
	return slices.Concat(questionKeys("infrastructure", &scr.yes, scr.action, scr.answer), scr.c.scrollKeys(&scr.first, &scr.most), []binding{
		on("r", "r", "read again", "infrastructure", scr.show).footed("read again"),
		on("i", "i", "set up a cluster of these machines", "infrastructure", scr.c.wizard.show).unless(func() string {
			if scr.report == nil || absent(scr.report) {
				return "the machines do not exist yet"
			}
			return ""
		}),
		on("esc", "Esc", "home", "back", scr.leave).footed("home"),
	})
}

// ownRun is a screen with a run of its own, other than init and upgrades.
type ownRun interface {
	// word names it in the first line, finished is the heading of its success.
	word() string
	finished(cluster string) string
	// again plans once more after a failure.
	again() tea.Cmd
	command() string
}

// ownRun returns the screen that the run belongs to; nil: init, or an upgrade.
func (c *console) ownRun() ownRun {
	switch {
	case c.adopt.active:
		return c.adopt
	case c.infra.active:
		return c.infra
	}
	return nil
}

func (scr *infraScreen) word() string { return "infrastructure" }
func (scr *infraScreen) finished(cluster string) string {
	return "the infrastructure of " + cluster + " is complete"
}
func (scr *infraScreen) again() tea.Cmd                 { return scr.show() }
func (scr *adoptScreen) word() string                   { return "adopt" }
func (scr *adoptScreen) finished(cluster string) string { return cluster + " has the operator" }
func (scr *adoptScreen) again() tea.Cmd                 { return scr.makePlan() }
