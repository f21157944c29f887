package console

import (
	"context"
	"fmt"
	"strings"

	tea "github.com/charmbracelet/bubbletea"

	"constellation/engine"
	"constellation/engine/plan"
	"constellation/tui/term"
	"constellation/tui/view"
)

// wizard is the way through the screens of init, from the configuration to the run.
type wizard struct {
	c       *console
	resumed bool // the run continues one that was confirmed before
}

// planMade is the plan of init.
type planMade struct {
	plan *plan.Plan
	err  error
}

// wizardStep is a screen of init on its rail.
type wizardStep struct {
	screen screen
	name   string
}

// makePlan asks the engine for the plan of init.
func (z *wizard) makePlan() tea.Cmd {
	return z.c.task.launch("planning", nil, func(ctx context.Context, _ func(plan.Event)) tea.Msg {
		p, err := z.c.deps.Engine.PlanInit(ctx)
		return planMade{p, err}
	})
}

func (z *wizard) tookPlan(msg planMade) tea.Cmd {
	if msg.err != nil {
		z.c.result.fail(msg.err)
		return nil
	}
	z.c.plan = msg.plan
	if z.c.plan.Finished() && len(z.c.plan.Blocked()) == 0 {
		z.c.quit.exit = plan.ExitNothing
		z.c.note = "the cluster is complete: there is nothing to do"
		return z.c.overview.show()
	}
	if (z.resumed || z.c.deps.Yes) && !z.c.guard.locked() {
		if len(z.c.plan.Blocked()) == 0 {
			return z.c.run.start()
		}
	}
	z.c.screen = z.c.initConfirm
	*z.c.initConfirm = *newInitConfirm(z.c, z.c.plan, z.c.now)
	return nil
}

// rail shows the screens of init as a progress line.
func (z *wizard) rail(at int) string {
	r := z.c.th.Row(z.c.w).Add(term.Plain, " ")
	link := 4
	if z.c.w < 80 {
		link = 1
	}
	for i, s := range z.steps() {
		sign, st, line := z.c.th.Pending, term.Faint, z.c.th.Signs.Rule
		switch {
		case !z.c.result.succeeded() && at == len(z.steps())-1 && i >= z.failedAt():
			sign, st = z.c.th.Fail, term.Bad
			if i > z.failedAt() && i < at {
				sign, st = z.c.th.Pending, term.Faint
			}
		case i < at || i == at && s.screen == z.c.result:
			sign, st = z.c.th.OK, term.Good
		case i == at:
			sign, st = z.c.th.Running, term.Accent
		}
		if i < at {
			line = z.c.th.Heavy
		}
		name := term.Plain
		if i > at {
			name = term.Faint
		}
		if i == at {
			name = term.Strong
		}
		r.Add(st, sign).Add(name, " "+s.name)
		if i < len(z.steps())-1 {
			r.Add(term.Faint, " "+strings.Repeat(line, link)+" ")
		}
	}
	return r.String()
}

// failedAt is the index of the failed screen on the rail.
func (z *wizard) failedAt() int {
	if z.c.ran {
		return z.at(z.c.run)
	}
	return z.at(z.c.preflight)
}

// steps are the screens of init, in order.
func (z *wizard) steps() []wizardStep {
	return []wizardStep{{z.c.config, "Config"}, {z.c.preflight, "Preflight"}, {z.c.initConfirm, "Confirm"}, {z.c.run, "Create"}, {z.c.result, "Result"}}
}

// at is the index of a screen of init.
func (z *wizard) at(s screen) int {
	for i, w := range z.steps() {
		if w.screen == s {
			return i
		}
	}
	return -1
}

// mode is the mode of a screen of init.
func (z *wizard) mode(s screen) string {
	return fmt.Sprintf("init  step %d of %d", z.at(s)+1, len(z.steps()))
}

// show shows the first screen of init. A workspace without a configuration gets one first.
func (z *wizard) show() tea.Cmd {
	if z.c.home != nil && z.c.home.Stage == engine.StageEmpty && z.c.deps.Setup != nil {
		return z.c.setup.open("")
	}
	if z.c.infra.active { // its run has ended
		z.c.infra.active, z.c.ran, z.c.plan, z.c.t = false, false, nil, view.Timeline{}
	}
	z.c.screen = z.c.config
	return nil
}
