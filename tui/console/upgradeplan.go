package console

import (
	"fmt"
	"slices"

	tea "github.com/charmbracelet/bubbletea"

	"constellation/engine/check"
	"constellation/engine/plan"
	"constellation/engine/words"
	"constellation/tui/term"
	"constellation/tui/view"
)

// upgradePlanScreen shows the plan of an upgrade, or the progress of planning.
type upgradePlanScreen struct {
	defaults
	c *console
}

func (scr *upgradePlanScreen) title() string   { return "plan" }
func (scr *upgradePlanScreen) command() string { return scr.c.runCommand() }
func (scr *upgradePlanScreen) mode() string    { return scr.c.upgradeMode(scr) }
func (scr *upgradePlanScreen) rail() string    { return scr.c.upgradeRail(scr) }
func (scr *upgradePlanScreen) why() []string   { return scr.c.upgradeWhy() }
func (scr *upgradePlanScreen) safety() string  { return "scripted  " + scr.command() }

func (scr *upgradePlanScreen) take(msg tea.Msg) (tea.Cmd, bool) {
	if msg, ok := msg.(upgradePlanned); ok {
		return scr.c.tookUpgradePlan(msg), true
	}
	return nil, false
}

func (scr *upgradePlanScreen) keys() []binding {
	return []binding{
		on("enter", "Enter", "continue to the confirmation", "do", act(scr.c.upgradeConfirm.show)).footed("continue").unless(func() string {
			switch {
			case scr.c.upg.planning:
				return "checking and planning"
			case scr.c.plan == nil:
				return "there is no plan"
			case len(scr.c.plan.Blocked()) > 0:
				return words.Count(len(scr.c.plan.Blocked()), "blocking finding") + "; fix it, then r"
			}
			return ""
		}),
		on("r", "r", "check and plan again", "do", func() tea.Cmd { return scr.c.openUpgrade(scr.c.upg.start) }).footed("plan again").unless(func() string {
			if scr.c.upg.planning {
				return "checking and planning"
			}
			return ""
		}),
		on("up k", "↑ k", "up", "move", act(func() { scr.scroll(-1) })),
		on("down j", "↓ j", "down", "move", act(func() { scr.scroll(1) })),
		on("pgup ctrl+u", "PgUp", "page up", "move", act(func() { scr.scroll(-scr.c.h / 2) })),
		on("pgdown ctrl+d", "PgDn", "page down", "move", act(func() { scr.scroll(scr.c.h / 2) })),
		on("g home", "g", "to the beginning", "move", act(func() { scr.c.upg.scroll = 0 })),
		on("G end", "G", "to the end", "move", act(func() { scr.scroll(1 << 20) })),
		on("y", "y", "copy the blocking finding, or the equivalent command", "copy", act(func() {
			if scr.c.plan != nil && len(scr.c.plan.Blocked()) > 0 {
				f := scr.c.plan.Blocked()[0]
				scr.c.copyText(term.Clean(f.Title+": "+term.OneLine(f.Detail)), "the blocking finding")
				return
			}
			scr.c.copyText(scr.command(), "the command")
		})).footed("copy"),
		on("esc", "Esc", "back; nothing has been changed", "leave", scr.c.leavePlan).footed("back"),
	}
}

func (scr *upgradePlanScreen) scroll(by int) {
	scr.c.upg.scroll = max(0, min(scr.c.upg.scroll+by, len(scr.rows(scr.width()))-1))
}

// width is the width of the rows of the plan.
func (scr *upgradePlanScreen) width() int {
	if scr.c.w >= 110 && scr.c.h >= 26 {
		return scr.c.w * 3 / 5
	}
	return scr.c.w
}

// view renders the plan, or the progress of planning, in h lines.
func (scr *upgradePlanScreen) view(w, h int) []string {
	u := &scr.c.upg
	if u.planning || scr.c.plan == nil {
		what := "querying cluster, cloud and releases"
		if u.progress.Total > 0 {
			what = u.progress.Summary()
		}
		lines := []string{"", scr.c.th.Row(w).Add(term.Accent, "  "+scr.c.th.Spin(scr.c.frame)+" ").Add(term.Plain, "Checking the next hop, like upgrade check").String()}
		lines = append(lines, scr.c.th.Below(w, 4, 3, term.Faint, what)...)
		return append(lines, "", scr.c.th.Row(w).Pad(4).Add(term.Faint, "Then you review and confirm the plan. Nothing is changed before.").String())
	}
	left := scr.width()
	rows := scr.rows(left)
	from := max(0, min(u.scroll, len(rows)-h))
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
	if w == scr.c.w { // else the risks are beside the plan
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
	lines := []string{scr.c.th.Rule(w, "Before nodes are replaced", "")}
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
