package console

import (
	"context"
	"fmt"
	"slices"
	"time"

	tea "github.com/charmbracelet/bubbletea"

	"constellation/engine/check"
	"constellation/engine/plan"
	"constellation/engine/words"
	"constellation/tui/term"
	"constellation/tui/view"
)

// upgradePlanScreen shows the plan of an upgrade, or the progress of planning.
// Its text comes unfiltered from outside; rendering cleans it.
type upgradePlanScreen struct {
	defaults
	c        *console
	planning bool
	began    time.Time
	progress view.RunningCheck
	top      int // first row shown
	// locked is set if the plan was made for a guarded cluster, without dry-run requests.
	locked bool
}

// upgradePlanned is the end of planning.
type upgradePlanned struct {
	plan *plan.Plan
	err  error
}

func (scr *upgradePlanScreen) title() string   { return "plan" }
func (scr *upgradePlanScreen) command() string { return scr.c.runCommand() }
func (scr *upgradePlanScreen) safety() string  { return "scripted  " + scr.command() }

func (scr *upgradePlanScreen) mode() string {
	if scr.planning {
		return scr.c.upg.badge() + "planning"
	}
	return scr.c.upg.badge() + "plan"
}

func (scr *upgradePlanScreen) rail() string {
	if scr.planning {
		return scr.c.upg.rail(0)
	}
	return scr.c.upg.rail(1)
}

// why is the progress of planning, or the verdict.
func (scr *upgradePlanScreen) why() []string {
	c := scr.c
	r := c.th.Row(c.w).Add(term.Plain, " ")
	switch {
	case scr.planning:
		r.Add(term.Accent, c.th.Spin(c.frame)+" ").Add(term.Strong, "Now ("+term.Duration(c.now.Sub(scr.began))+"): checking and planning. Nothing is changed.")
	case c.plan == nil:
		return nil
	case len(c.plan.Blocked()) > 0:
		return c.upg.blockedWhy()
	case c.plan.Rehearsal:
		r.Add(term.Strong, "Review the plan, then press Enter. Rehearsal: nothing will be changed.")
	default:
		r.Add(term.Strong, "Review the plan, then press Enter. Nothing is changed before you confirm.")
	}
	return []string{r.String()}
}

// open checks and plans an upgrade and shows the plan.
func (scr *upgradePlanScreen) open(start *Upgrade) tea.Cmd {
	c := scr.c
	from := c.upg.from
	switch c.screen {
	case c.overview, c.check, c.start:
		from = c.screen
	}
	c.upg = upgradeState{c: c, start: start, from: from}
	*scr, *c.upgradeConfirm = upgradePlanScreen{c: c, planning: true, began: c.now, locked: c.guard.locked()}, upgradeConfirmScreen{c: c}
	c.screen, c.plan, c.err, c.quit.exit = scr, nil, nil, plan.ExitDone
	c.ran, c.t, c.backup.ended = false, view.Timeline{}, false
	c.check.busy, c.check.progress = false, view.RunningCheck{} // launch cancels a running check
	r := start.Request
	r.NoDryRun = r.NoDryRun || scr.locked
	planning := c.task.launch("planning the upgrade", scr.takeEvents, func(ctx context.Context, emit func(plan.Event)) tea.Msg {
		p, err := start.Plan(ctx, c.deps.Engine, r, emit)
		return upgradePlanned{p, err}
	})
	return tea.Batch(planning, c.backup.read())
}

// takeEvents takes events of the check that precedes the plan.
func (scr *upgradePlanScreen) takeEvents(events []plan.Event) tea.Cmd {
	for _, ev := range events {
		if ev.Object != check.CheckVersions {
			scr.progress.Apply(ev)
		}
	}
	return nil
}

func (scr *upgradePlanScreen) take(msg tea.Msg) (tea.Cmd, bool) {
	if msg, ok := msg.(upgradePlanned); ok {
		return scr.tookPlan(msg), true
	}
	return nil, false
}

// tookPlan shows the plan; it starts one that needs no confirmation.
func (scr *upgradePlanScreen) tookPlan(msg upgradePlanned) tea.Cmd {
	c, u := scr.c, &scr.c.upg
	scr.planning, scr.progress, c.note = false, view.RunningCheck{}, "" // the note may say that Enter is off
	if msg.err != nil {
		c.result.fail(msg.err)
		return nil
	}
	c.plan = msg.plan
	c.t.Cluster = term.Clean(c.plan.Cluster)
	u.need = plan.ConsentTo(c.plan, u.start.yes, u.start.Request.Acknowledge)
	switch {
	case len(c.plan.Blocked()) > 0:
		c.quit.exit = plan.ExitBlocked
	case len(u.need.Findings) == 0 && !u.need.Plan && (u.start.yes || !c.plan.Rehearsal) && !c.guard.locked():
		return u.run() // accepted, or the plan only waits
	case !c.plan.Rehearsal:
		c.quit.exit = plan.ExitUnacknowledged // the exit code if the user leaves without accepting
	}
	return nil
}

func (scr *upgradePlanScreen) keys() []binding {
	return []binding{
		on("enter", "Enter", "continue to the confirmation", "do", act(scr.c.upgradeConfirm.show)).footed("continue").unless(func() string {
			switch {
			case scr.planning:
				return "checking and planning"
			case scr.c.plan == nil:
				return "there is no plan"
			case len(scr.c.plan.Blocked()) > 0:
				return words.Count(len(scr.c.plan.Blocked()), "blocking finding") + "; fix it, then r"
			}
			return ""
		}),
		on("r", "r", "check and plan again", "do", func() tea.Cmd { return scr.open(scr.c.upg.start) }).footed("plan again").unless(func() string {
			if scr.planning {
				return "checking and planning"
			}
			return ""
		}),
		on("up k", "↑ k", "up", "move", act(func() { scr.scroll(-1) })),
		on("down j", "↓ j", "down", "move", act(func() { scr.scroll(1) })),
		on("pgup ctrl+u", "PgUp", "page up", "move", act(func() { scr.scroll(-scr.c.h / 2) })),
		on("pgdown ctrl+d", "PgDn", "page down", "move", act(func() { scr.scroll(scr.c.h / 2) })),
		on("g home", "g", "to the beginning", "move", act(func() { scr.top = 0 })),
		on("G end", "G", "to the end", "move", act(func() { scr.scroll(1 << 20) })),
		on("y", "y", "copy the blocking finding, or the equivalent command", "copy", act(func() {
			if scr.c.plan != nil && len(scr.c.plan.Blocked()) > 0 {
				f := scr.c.plan.Blocked()[0]
				scr.c.copyText(term.Clean(f.Title+": "+term.OneLine(f.Detail)), "the blocking finding")
				return
			}
			scr.c.copyText(scr.command(), "the command")
		})).footed("copy"),
		on("esc", "Esc", "back; nothing has been changed", "leave", scr.c.upg.leave).footed("back"),
	}
}

func (scr *upgradePlanScreen) scroll(by int) {
	scr.top = max(0, min(scr.top+by, len(scr.rows(scr.width()))-1))
}

// width is the width of the rows of the plan.
func (scr *upgradePlanScreen) width() int {
	w := scr.c.bodyWidth()
	if w >= 110 && scr.c.h >= 26 {
		return w * 3 / 5
	}
	return w
}

// view renders the plan, or the progress of planning, in h lines.
func (scr *upgradePlanScreen) view(w, h int) []string {
	if scr.planning || scr.c.plan == nil {
		what := "querying cluster, cloud and releases"
		if scr.progress.Total > 0 {
			what = scr.progress.Summary()
		}
		lines := []string{"", scr.c.th.Row(w).Add(term.Accent, "  "+scr.c.th.Spin(scr.c.frame)+" ").Add(term.Plain, "Checking the next hop, like upgrade check").String()}
		lines = append(lines, scr.c.th.Below(w, 4, 3, term.Faint, what)...)
		return append(lines, "", scr.c.th.Row(w).Pad(4).Add(term.Faint, "Then you review and confirm the plan. Nothing is changed before.").String())
	}
	left := scr.width()
	rows := scr.rows(left)
	from := max(0, min(scr.top, len(rows)-h))
	to := min(len(rows), from+h)
	lines := slices.Clone(rows[from:to])
	if to < len(rows) {
		lines[len(lines)-1] = scr.c.th.Row(left).Pad(3).Add(term.Faint, fmt.Sprintf("%s %s: ↓", scr.c.th.Ellipsis, words.Count(len(rows)-to+1, "more line"))).String()
	}
	if left == w {
		return lines
	}
	right := w - left - 3
	side := scr.riskRows(right, h)
	return view.Beside(lines, side, left, h, scr.c.th)
}

// rows is the plan: changes, risks, steps. The most important for the decision comes
// first.
func (scr *upgradePlanScreen) rows(w int) []string {
	p := scr.c.plan
	lines := view.UpgradeSections(scr.c.page(), w, p)
	if w == scr.c.bodyWidth() { // else the risks are beside the plan
		i := slices.Index(lines, scr.c.th.Rule(w, "Steps", words.Count(len(p.Steps), "step")))
		if i < 0 {
			i = len(lines)
		}
		lines = slices.Insert(lines, i, scr.riskRows(w, 24)...)
	}
	return lines
}

// riskRows show the risks: which data is backed up, which is lost, what is irreversible.
func (scr *upgradePlanScreen) riskRows(w, h int) []string {
	p := scr.c.plan
	lines := []string{scr.c.th.Rule(w, "Before nodes are changed", "")}
	lines = append(lines, view.BackupCoverageRows(scr.c.page(), w, h, &scr.c.backup.Backups, "")...)
	i := slices.IndexFunc(p.Steps, func(s plan.Step) bool { return s.ID == check.StepBackup })
	switch {
	case i >= 0 && p.Steps[i].Finished:
		lines = append(lines, view.Signed(scr.c.page(), w, term.Good, scr.c.th.OK, "this upgrade already has a backup")...)
	case i >= 0:
		lines = append(lines, view.Signed(scr.c.page(), w, term.Good, scr.c.th.OK, "a backup is taken and verified first")...)
	case !p.OnlyWatches():
		lines = append(lines, view.Signed(scr.c.page(), w, term.Caution, scr.c.th.Warn, "no backup is taken")...)
	}
	return append(lines, view.RollbackRows(scr.c.page(), w, p)...)
}
