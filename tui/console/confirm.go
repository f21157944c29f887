package console

import (
	"fmt"
	"slices"
	"time"

	tea "github.com/charmbracelet/bubbletea"

	"constellation/engine/plan"
	"constellation/engine/words"
	"constellation/tui/term"
	"constellation/tui/view"
)

// initConfirmScreen is the screen of init's plan and its confirmation.
type initConfirmScreen struct {
	defaults
	c      *console
	yes    bool // the cursor is on "create"
	scroll int
	shown  time.Time
	plan   *plan.Plan
}

func (scr *initConfirmScreen) title() string   { return "confirm" }
func (scr *initConfirmScreen) mode() string    { return scr.c.wizard.mode(scr) }
func (scr *initConfirmScreen) rail() string    { return scr.c.wizard.rail(scr.c.wizard.at(scr)) }
func (scr *initConfirmScreen) safety() string  { return "scripted  " + scr.command() }
func (scr *initConfirmScreen) command() string { return scr.c.runCommand() }

// newInitConfirm selects the safe answer if there are warnings.
func newInitConfirm(c *console, p *plan.Plan, now time.Time) *initConfirmScreen {
	return &initConfirmScreen{c: c, plan: p, shown: now, yes: len(p.Warnings()) == 0 && !slices.ContainsFunc(p.Steps, func(s plan.Step) bool { return s.Warning != "" && !s.Finished })}
}

func (scr *initConfirmScreen) take(msg tea.Msg) (tea.Cmd, bool) {
	if msg, ok := msg.(planMade); ok {
		return scr.c.wizard.tookPlan(msg), true
	}
	return nil, false
}

func (scr *initConfirmScreen) keys() []binding {
	return []binding{
		on("enter", "Enter", "confirm the selected answer", "wizard", scr.answer).footed("answer").unless(func() string {
			switch {
			case !scr.yes:
				return ""
			case scr.c.plan != nil && len(scr.c.plan.Blocked()) > 0:
				return "the plan is blocked"
			}
			return scr.c.guard.reason()
		}),
		on("left right tab h l shift+tab", "← →", "choose", "wizard", act(func() { scr.yes = !scr.yes })).footed("choose"),
		on("up k", "↑ k", "scroll up", "move", act(func() { scr.scroll = max(0, scr.scroll-1) })),
		on("down j", "↓ j", "scroll down", "move", act(func() {
			scr.scroll = min(scr.scroll+1, len(view.InitPlanRows(scr.c.page(), scr.c.bodyWidth(), scr.c.plan)))
		})),
		on("esc", "Esc", "back to the checks", "back", scr.c.preflight.start).footed("back"),
	}
}

func (scr *initConfirmScreen) answer() tea.Cmd {
	if scr.c.now.Sub(scr.shown) < confirmDelay {
		scr.c.note = "read it first, then press Enter"
		return nil
	}
	if scr.yes {
		return scr.c.run.start()
	}
	return scr.c.preflight.start()
}

func (a *initConfirmScreen) why() []string {
	c := a.c
	create, back := "Create the cluster", "Back"
	if a.plan != nil && a.plan.Resumes() {
		create = "Resume"
	}
	r := c.th.Row(c.w).Add(term.Plain, " ")
	if a.plan != nil && len(a.plan.Blocked()) > 0 {
		return []string{r.Add(term.Bad, c.th.Fail+" ").Add(term.Strong, "Blocked: "+term.Clean(a.plan.Blocked()[0].Title)).String()}
	}
	if a.yes {
		return []string{r.Add(term.Accent, c.th.Cursor+" ").Add(term.Chosen, " "+create+" ").Add(term.Plain, "   ").Add(term.Faint, "  "+back+" ").String()}
	}
	return []string{r.Add(term.Faint, "   "+create+" ").Add(term.Plain, "   ").Add(term.Accent, c.th.Cursor+" ").Add(term.Chosen, " "+back+" ").String()}
}

func (scr *initConfirmScreen) view(w, h int) []string {
	p := scr.c.plan
	remark := words.Count(len(p.Steps), "step")
	if n := view.NodesOf(p); n > 0 {
		remark += ", " + words.Count(n, "machine")
	}
	lines := []string{scr.c.th.Rule(w, "Plan: "+string(p.Verb)+" "+term.Clean(p.Cluster), remark)}
	if to := view.Target(p.To); to != "" {
		lines = append(lines, scr.c.th.Row(w).Add(term.Plain, " ").Add(term.Faint, "to ").Add(term.Plain, to).String())
	}
	rows := view.InitPlanRows(scr.c.page(), w, p)
	room := h - len(lines)
	from := max(0, min(scr.scroll, len(rows)-room))
	to := min(len(rows), from+room)
	shown := rows[from:to]
	lines = append(lines, shown...)
	if to < len(rows) {
		lines[len(lines)-1] = scr.c.th.Row(w).Pad(5).Add(term.Faint, fmt.Sprintf("… %d more lines: ↓", len(rows)-to+1)).String()
	}
	return lines
}
