package tui

import (
	"fmt"
	"strings"

	"constellation/engine"
	"constellation/tui/term"
	"constellation/tui/view"
)

// View renders the screen. It is pure: the same model gives the same frame.
func (c *console) View() string {
	if c.w < minWidth || c.h < minHeight {
		return strings.Join(c.tooSmall(), "\n")
	}
	head := c.header()
	foot := c.footer()
	room := c.h - len(head) - len(foot)
	var body []string
	switch {
	case c.pal.open:
		body = c.paletteView(c.w, room)
	case c.help:
		body = c.helpView(c.w, room)
	default:
		body = c.body(c.w, room)
	}
	if len(body) > room {
		body = body[:room]
	}
	for len(body) < room {
		body = append(body, "")
	}
	if c.stale() {
		for i := range body {
			body[i] = view.Dim(c.page(), body[i])
		}
	}
	return strings.Join(append(append(head, body...), foot...), "\n")
}

func (c *console) body(w, h int) []string {
	switch c.screen {
	case screenHome:
		return c.homeView(w, h)
	case screenConfig:
		return c.configView(w, h)
	case screenPreflight:
		return c.preflightView(w, h)
	case screenInitConfirm:
		return c.initConfirmView(w, h)
	case screenRun:
		return c.runView(w, h)
	case screenResult:
		return c.resultView(w, h)
	case screenLog:
		return c.logView(w, h)
	case screenCheck:
		return c.checkView(w, h)
	case screenBackup:
		return c.backupView(w, h)
	case screenWatch:
		return c.watchView(w, h)
	case screenUpgradePlan:
		return c.upgradePlanView(w, h)
	case screenUpgradeConfirm:
		return c.upgradeConfirmView(w, h)
	}
	return []string{"", " " + c.th.Spin(c.frame) + " " + c.busy}
}

// tooSmall replaces the screen in a window that is too small.
func (c *console) tooSmall() []string {
	var short []string
	if c.w < minWidth {
		short = append(short, fmt.Sprintf("width %d of %d", c.w, minWidth))
	}
	if c.h < minHeight {
		short = append(short, fmt.Sprintf("height %d of %d", c.h, minHeight))
	}
	lines := []string{"The window is too small: " + strings.Join(short, ", ")}
	if c.running {
		lines = append(lines, c.why(), "The run continues.")
	}
	lines = append(lines, "q: "+c.quitLabel())
	if c.confirmLeave {
		lines = append(lines, "Leave? Enter leaves, Esc stays")
	}
	var out []string
	for _, l := range lines {
		out = append(out, term.Wrap(term.AsciiIf(c.th.Ascii, l), max(c.w, 1))...)
	}
	return out[:min(len(out), max(c.h, 1))]
}

// wizardSteps are the screens of init, in order.
var wizardSteps = []struct {
	id   screenID
	name string
}{
	{screenConfig, "Config"}, {screenPreflight, "Preflight"}, {screenInitConfirm, "Confirm"}, {screenRun, "Create"}, {screenResult, "Result"},
}

// header is the top of the screen: cluster, target, mode, and the progress of the steps.
func (c *console) header() []string {
	if c.screen == screenWatch {
		return c.watchHeader()
	}
	name := "no cluster yet"
	switch {
	case c.t.Cluster != "" && (c.ran || c.upgrading()):
		name = c.t.Cluster
	case c.home != nil && c.home.Cluster != "":
		name = term.Clean(c.home.Cluster)
	}
	r := c.th.Row(c.w).Add(term.Accent, " "+c.th.Brand+" ").Add(term.Strong, name).Add(term.Caution, c.mark())
	if to := c.headTarget(); to != "" {
		r.Add(term.Faint, "  "+to)
	}
	screen := c.screen
	if screen == screenLog {
		screen = c.back
	}
	r.Right(term.Faint, c.mode(screen))
	lines := []string{r.String()}
	switch i := wizardAt(screen); {
	case c.aboutUpgrade(screen):
		lines = append(lines, c.upgradeRail(screen))
	case i >= 0:
		lines = append(lines, c.rail(i))
	}
	return lines
}

// mark is the label behind the cluster's name in the header.
func (c *console) mark() string {
	return view.MarkIf(c.page(), c.w, c.t.Simulated || c.home != nil && c.home.Simulated || c.plan != nil && c.plan.Simulated)
}

// aboutUpgrade reports whether a screen belongs to an upgrade.
func (c *console) aboutUpgrade(s screenID) bool {
	return c.upgrading() && (s == screenUpgradePlan || s == screenUpgradeConfirm || s == screenRun || s == screenResult)
}

func wizardAt(s screenID) int {
	for i, w := range wizardSteps {
		if w.id == s {
			return i
		}
	}
	return -1
}

func (c *console) headTarget() string {
	if c.plan != nil && c.upgrading() {
		if !c.aboutUpgrade(c.screen) && c.screen != screenLog {
			return "" // the upgrade has ended
		}
		return view.ChangeSummary(c.page(), c.plan)
	}
	if c.plan != nil && c.w >= 80 {
		var parts []string
		for _, v := range []string{c.plan.To.Kubernetes, c.plan.To.Release} {
			if v != "" {
				parts = append(parts, term.Clean(v))
			}
		}
		return strings.Join(parts, " "+c.th.Dot+" ")
	}
	return ""
}

// mode is the right end of the first line.
func (c *console) mode(s screenID) string {
	switch {
	case s == screenHome:
		utc := c.now.UTC().Format("15:04:05 UTC")
		switch {
		case c.status == nil:
			return utc
		case c.stale():
			return "STALE " + term.Duration(c.now.Sub(c.statusAt)) + "  " + utc
		}
		return "LIVE  as of " + c.statusAt.UTC().Format("15:04:05 UTC")
	case s == screenCheck:
		return c.checkMode()
	case s == screenBackup:
		return view.BackupMode(c.page())
	case c.aboutUpgrade(s):
		return c.upgradeMode(s)
	case c.ran && (s == screenRun || s == screenResult):
		word := "init"
		if c.resumed {
			word = "init, resumed"
		}
		return word + "   elapsed " + term.Clock(c.t.Elapsed(c.now))
	}
	if i := wizardAt(s); i >= 0 {
		return fmt.Sprintf("init  step %d of %d", i+1, len(wizardSteps))
	}
	return ""
}

// stale reports whether the screen may be out of date.
func (c *console) stale() bool {
	switch c.screen {
	case screenCheck:
		return c.staleCheck()
	case screenWatch:
		return c.staleWatch()
	}
	return c.screen == screenHome && c.status != nil && (c.statusErr != nil || c.now.Sub(c.statusAt) > staleAfter)
}

// rail shows the screens of init as a progress line.
func (c *console) rail(at int) string {
	r := c.th.Row(c.w).Add(term.Plain, " ")
	link := 4
	if c.w < 80 {
		link = 1
	}
	for i, s := range wizardSteps {
		sign, st, line := c.th.Pending, term.Faint, c.th.Signs.Rule
		switch {
		case !c.succeeded() && at == len(wizardSteps)-1 && i >= c.failedAt():
			sign, st = c.th.Fail, term.Bad
			if i > c.failedAt() && i < at {
				sign, st = c.th.Pending, term.Faint
			}
		case i < at || i == at && s.id == screenResult:
			sign, st = c.th.OK, term.Good
		case i == at:
			sign, st = c.th.Running, term.Accent
		}
		if i < at {
			line = c.th.Heavy
		}
		name := term.Plain
		if i > at {
			name = term.Faint
		}
		if i == at {
			name = term.Strong
		}
		r.Add(st, sign).Add(name, " "+s.name)
		if i < len(wizardSteps)-1 {
			r.Add(term.Faint, " "+strings.Repeat(line, link)+" ")
		}
	}
	return r.String()
}

// failedAt is the index of the failed screen on the rail.
func (c *console) failedAt() int {
	if c.ran {
		return wizardAt(screenRun)
	}
	return wizardAt(screenPreflight)
}

func (c *console) succeeded() bool {
	return c.err == nil || engine.ExitCode(c.err) == engine.ExitNothing
}

// footer is the bottom of the screen: why line or question, key line, safety line.
func (c *console) footer() []string {
	var lines []string
	if q := c.rolloutPrompt; q != nil {
		lines = append(lines, c.th.Row(c.w).Add(term.Plain, " ").Add(term.Caution, c.th.Warn+" "+q.text+" ").String())
		lines = append(lines, c.th.Below(c.w, 3, 2, term.Plain, q.detail+" Enter confirms, Esc goes back.")...)
	} else if c.confirmLeave {
		lines = append(lines, c.leaveQuestion()...)
	} else {
		lines = append(lines, c.whyLines()...)
	}
	lines = append(lines, c.th.Paint(term.Faint, strings.Repeat(c.th.Signs.Rule, c.w)))
	if c.note != "" {
		lines = append(lines, c.th.Below(c.w, 1, 2, term.Caution, c.note)...)
	} else {
		lines = append(lines, c.keyLine(c.w))
	}
	if s := c.safetyLine(); s != "" {
		lines = append(lines, c.th.Row(c.w).Add(term.Faint, " "+s).String())
	}
	return lines
}

// leaveQuestion asks whether to leave and says what that does.
func (c *console) leaveQuestion() []string {
	what := "The current step finishes first; the same command resumes."
	if c.bak.running {
		return []string{
			c.th.Row(c.w).Add(term.Plain, " ").Add(term.Caution, c.th.Warn+" Stop this backup, and leave? ").Add(term.Plain, "Its files are deleted.").String(),
			c.th.Row(c.w).Add(term.Faint, "   Enter leaves, Esc stays. Complete backups are kept.").String(),
		}
	}
	if c.t.PastFinal() {
		what = "The cluster continues alone; the same command reattaches."
	}
	return []string{
		c.th.Row(c.w).Add(term.Plain, " ").Add(term.Caution, c.th.Warn+" Leave this run? ").Add(term.Plain, what).String(),
		c.th.Row(c.w).Add(term.Faint, "   Enter leaves, Esc stays, Ctrl-C again leaves at once. Nothing is lost.").String(),
	}
}

// why is the line that says what the run waits for or does.
func (c *console) why() string {
	switch {
	case c.leaving:
		return "Leaving when this step can be resumed. Ctrl-C leaves at once."
	case c.running && c.t.Why.Text != "":
		return "Why waiting (" + term.Duration(c.now.Sub(c.t.Why.Since)) + "): " + c.t.Why.Text
	case c.running:
		s := c.t.Running()
		if s == nil {
			return "Reading the current state"
		}
		text := "Now (" + term.Duration(c.now.Sub(s.Began)) + "): " + s.Title
		if d := s.Doing(); d != "" {
			text += ": " + d
		}
		return text
	case c.busy != "":
		return "Now: " + c.busy
	}
	return ""
}

// whyLines are the why line of the screen and the remedy, if there is one.
func (c *console) whyLines() []string {
	screen := c.screen
	if screen == screenLog {
		screen = c.back
	}
	switch screen {
	case screenRun:
		if c.running || c.busy != "" {
			// The steps show the progress as well, and it changes often: a growing why line
			// must not move the panes. A small window needs its lines for them.
			most := 3
			if c.t.Why.Text == "" || c.h < 22 {
				most = 1
			}
			lines := c.th.Below(c.w, 1, most, term.Strong, c.why())
			if c.running && !c.leaving && c.t.Why.Remedy != "" {
				for i, l := range c.th.Below(c.w, 8, max(2, most), term.Accent, c.deps.commands.Text(c.t.Why.Remedy)) {
					if i == 0 {
						l = " " + c.th.Paint(term.Faint, "To do:") + " " + strings.TrimLeft(l, " ")
					}
					lines = append(lines, l)
				}
			}
			return lines
		}
	case screenPreflight:
		return []string{c.pre.verdict(c)}
	case screenInitConfirm:
		return []string{c.initConfirm.verdict(c)}
	case screenConfig:
		return []string{c.form.verdict(c)}
	case screenCheck:
		return c.checkWhy(c.w)
	case screenBackup:
		return c.backupWhy()
	case screenUpgradePlan, screenUpgradeConfirm:
		return c.upgradeWhy()
	case screenWatch:
		if c.upg.lockedBy != "" {
			return append(c.th.Below(c.w, 1, 2, term.Caution, "Read-only: "+c.upg.lockedBy), c.watchWhy()...)
		}
		return c.watchWhy()
	}
	return nil
}

// safetyLine is the last line: ready nodes and what leaving does, or the scripted command.
func (c *console) safetyLine() string {
	screen := c.screen
	if screen == screenLog {
		screen = c.back
	}
	switch screen {
	case screenRun:
		if c.upgrading() {
			return c.upgradeSafety()
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
			parts = append(parts, "record "+engine.RunsDir+"/"+c.t.Run)
		}
		return "safety  " + strings.Join(parts, " "+c.th.Dot+" ")
	case screenWatch:
		return c.boardSafety()
	case screenConfig, screenPreflight, screenInitConfirm, screenBackup, screenUpgradePlan, screenUpgradeConfirm:
		return "scripted  " + c.command()
	case screenCheck:
		s := "scripted  " + c.command()
		if !c.chk.complete || c.chk.busy {
			return s
		}
		exit := fmt.Sprintf("   exit %d", c.chk.result.Exit)
		return term.Cut(s+" --exit-code", c.w-1-term.Width(exit), c.th.Ellipsis) + exit
	}
	return ""
}

// Boxes are centred in w columns. Their lines have at most inner columns.

// page is what the pages of this frame share.
func (c *console) page() view.Page {
	return view.Page{Theme: c.th, Now: c.now, Frame: c.frame, Commands: c.deps.commands}
}

// boardPage is page at the time on the clock of the board.
func (c *console) boardPage() view.Page {
	p := c.page()
	p.Now = c.watchNow()
	return p
}
