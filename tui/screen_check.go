package tui

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	tea "github.com/charmbracelet/bubbletea"

	"constellation/engine"
	"constellation/tui/term"
	"constellation/tui/view"
)

// checkStale is the age from which a check is shown as STALE. It is longer than that of a
// status, because a check is not polled.
const checkStale = 5 * time.Minute

// Panes of the screen of a check.
const (
	checkFindings = iota
	checkPath
	checkChanges
	checkPanes
)

// checkScreen is the check for upgrades: its result, and the state of the screen. Its text
// comes unfiltered from outside; rendering cleans it.
type checkScreen struct {
	c *console
	result *engine.Check // the newest result; nil if there is none yet
	// complete is set if known is the result of a complete check, preflight included.
	complete bool
	at       time.Time // when known was set
	err      error     // of the last check
	// busy is set while a check runs; live is its progress.
	busy     bool
	began    time.Time
	progress view.RunningCheck
	// backgroundStarted is set once the home screen has started its background check of versions.
	backgroundStarted bool

	pane         int
	sel          [checkPanes]int
	showPassed   bool // passed checks are listed as well
	open         bool // the selected row fills the screen
	scroll       int  // of the open row
	filter       string
	typing       bool
	confirmWrite bool // the question whether to write the configuration is shown
	writing      bool
}

// Messages of checks.
type (
	checkEnded struct {
		check engine.Check
		err   error
	}
	backgroundEnded struct {
		check engine.Check
		err   error
	}
	configWritten struct {
		check engine.Check
		err   error
	}
)

var checkKeys = []binding{
	on("enter", "Enter", "open the finding, or the rule that blocks", "view", act((*console).openSelected)).footed("open").unless(func(c *console) string {
		if c.chk.pane == checkChanges && !c.chk.open || len(c.checkItems()) == 0 {
			return "there is nothing to open here"
		}
		return ""
	}),
	on("a", "a", "upgrade: plan the next hop and confirm it", "do", (*console).startUpgrade).footed("apply").unless(func(c *console) string {
		switch {
		case c.chk.busy:
			return "a check is running"
		case c.chk.writing:
			return "the configuration is being written"
		case c.chk.result == nil:
			return "there is no result yet; r checks"
		case len(c.chk.result.Path) == 0:
			return "there is no next hop"
		}
		return ""
	}),
	on("W", "W", "write the next hop into the configuration (asks)", "do", act(func(c *console) { c.chk.confirmWrite = true })).footed("write").unless((*console).nothingToWrite),
	on("r", "r", "check again", "do", (*console).startCheck).unless(func(c *console) string {
		switch {
		case c.chk.busy:
			return "a check is running"
		case c.chk.writing:
			return "the configuration is being written"
		}
		return ""
	}),
	on("esc", "Esc", "back", "back", (*console).leaveCheck).footed("back"),
	on("Y", "Y", "copy the finding's command, or that of the check", "copy", act((*console).copyCheckCommand)).footed("copy"),
	on("y", "y", "copy the line", "copy", act((*console).copyCheckLine)),
	on("tab", "Tab", "next pane", "panes", act((*console).nextCheckPane)).footed("pane"),
	on("up k", "↑ k", "up", "move", act(func(c *console) { c.moveCheck(-1) })),
	on("down j", "↓ j", "down", "move", act(func(c *console) { c.moveCheck(1) })),
	on("pgup", "PgUp", "a page up", "move", act(func(c *console) { c.moveCheck(-8) })),
	on("pgdown", "PgDn", "a page down", "move", act(func(c *console) { c.moveCheck(8) })),
	on("home g", "g", "to the first", "move", act(func(c *console) { c.moveCheck(-1 << 20) })),
	on("end G", "G", "to the last", "move", act(func(c *console) { c.moveCheck(1 << 20) })),
	on("/", "/", "filter findings", "view", act(func(c *console) { c.chk.typing, c.chk.open, c.chk.pane = true, false, checkFindings })).footed("filter"),
	on("b", "b", "list backups or create one", "do", (*console).openBackup).unless(func(c *console) string {
		if c.chk.writing {
			return "the configuration is being written"
		}
		return ""
	}),
}

var confirmWriteKeys = []binding{
	on("enter", "Enter", "write the configuration", "do", (*console).writeConfig).footed("write").unless(func(c *console) string {
		if c.chk.writing {
			return "it is being written"
		}
		return ""
	}),
	on("esc n q", "Esc", "keep the file as it is", "back", act(func(c *console) { c.chk.confirmWrite = false })).footed("keep the file"),
	on("ctrl+c", "Ctrl-C", "leave", "leave", (*console).leave),
}

// nothingToWrite returns why W is off.
func (c *console) nothingToWrite() string {
	k := c.chk.result
	switch {
	case c.chk.busy || k == nil:
		return "a check is running"
	case len(k.Path) == 0:
		return "there is no next hop"
	case k.Config == nil:
		return "the configuration cannot be edited; the notes say why"
	case k.Config.Written:
		return "it is written already"
	case len(k.Config.Fields) == 0:
		return "the configuration already has the next hop"
	}
	return ""
}

// openCheck shows the check. It starts a new one unless the last complete one is recent.
func (c *console) openCheck() tea.Cmd {
	c.screen = screenCheck
	c.chk.open, c.chk.confirmWrite, c.chk.typing = false, false, false
	if c.chk.complete && c.chk.err == nil && c.now.Sub(c.chk.at) <= staleAfter {
		return nil
	}
	return c.startCheck()
}

// startCheck checks for upgrades. The last result stays on the screen meanwhile.
func (c *console) startCheck() tea.Cmd {
	c.chk.busy, c.chk.began, c.chk.progress, c.chk.err = true, c.now, view.RunningCheck{}, nil
	return c.launch("checking for upgrades", func(ctx context.Context, emit func(engine.Event)) tea.Msg {
		k, err := c.deps.engine.Check(ctx, engine.CheckRequest{}, emit)
		return checkEnded{k, err}
	})
}

// backgroundCheck checks versions in the background, once; nil if there is nothing to do. Its
// error is dropped: the check screen runs its own check and shows the error.
func (c *console) backgroundCheck() tea.Cmd {
	if c.chk.backgroundStarted || c.chk.result != nil || c.chk.busy {
		return nil
	}
	c.chk.backgroundStarted = true
	return func() tea.Msg {
		ctx, cancel := context.WithTimeout(c.ctx, staleAfter)
		defer cancel()
		k, err := c.deps.engine.Check(ctx, engine.CheckRequest{NoPreflight: true}, func(engine.Event) {})
		return backgroundEnded{k, err}
	}
}

// takeCheckEvents applies the events of the running check.
func (c *console) takeCheckEvents(events []engine.Event) {
	for _, ev := range events {
		if ev.Kind != engine.KindCheck || ev.Object != engine.CheckVersions {
			c.chk.progress.Apply(ev)
			continue
		}
		var k engine.Check
		if json.Unmarshal(ev.Data, &k) != nil || k.Current == (engine.Target{}) && c.chk.result != nil {
			continue // keep the last result: this one has no cluster data
		}
		c.chk.result, c.chk.at, c.chk.complete = &k, c.now, false
	}
}

// tookCheck takes the end of a check.
func (c *console) tookCheck(msg checkEnded) tea.Cmd {
	c.chk.busy, c.chk.err = false, msg.err
	if msg.check.Schema != "" && (msg.err == nil || c.chk.result == nil || c.chk.result.Current == (engine.Target{})) {
		c.chk.result, c.chk.at, c.chk.complete = &msg.check, c.now, msg.err == nil
	}
	c.chk.progress = view.RunningCheck{}
	c.moveCheck(0)
	if k := c.chk.result; k != nil && len(k.Findings) == 0 && len(k.Blocked) > 0 && c.chk.pane == checkFindings {
		c.chk.pane = checkPath // the only pane with content
	}
	return tea.Tick(checkStale, func(time.Time) tea.Msg { return refresh{-1} }) // draws again
}

func (c *console) tookBackground(msg backgroundEnded) {
	if msg.err == nil && msg.check.Schema != "" && c.chk.result == nil {
		c.chk.result, c.chk.at = &msg.check, c.now
	}
}

// leaveCheck closes the open row or clears the filter; else it cancels the check and goes home.
func (c *console) leaveCheck() tea.Cmd {
	switch {
	case c.chk.open:
		c.chk.open = false
		return nil
	case c.chk.filter != "":
		c.chk.filter = ""
		return nil
	}
	if c.chk.busy && c.cancel != nil {
		c.cancel()
		c.cancel = nil
		c.task++ // drops its late messages
		c.chk.busy, c.chk.progress = false, view.RunningCheck{}
	}
	return c.goHome()
}

func (c *console) writeConfig() tea.Cmd {
	c.chk.writing = true
	return c.launch("writing the configuration", func(ctx context.Context, _ func(engine.Event)) tea.Msg {
		k, err := c.deps.engine.Check(ctx, engine.CheckRequest{WriteConfig: true, NoPreflight: true}, func(engine.Event) {})
		return configWritten{k, err}
	})
}

func (c *console) tookWritten(msg configWritten) {
	c.chk.writing, c.chk.confirmWrite = false, false
	switch x := msg.check.Config; {
	case msg.err != nil:
		e := view.Explain(msg.err, c.deps.commands)
		c.note = "not written: " + e.What
		if e.Why != "" {
			c.note += ": " + e.Why
		}
	case x == nil || !x.Written:
		c.note = "nothing was written: the configuration is already up to date; r checks again"
	default:
		k := *c.chk.result
		c.note = fmt.Sprintf("wrote %s into %s", term.Count(len(x.Fields), "value"), term.Clean(x.Path))
		if !slices.Equal(k.Config.Fields, x.Fields) {
			c.note += "; they differ from those shown, r checks again"
		}
		k.Config = x
		k.Findings = slices.DeleteFunc(slices.Clone(k.Findings), func(f engine.Finding) bool { return f.ID == engine.CheckConfigTarget })
		c.chk.result = &k
	}
}

// findingsNow are the findings so far, the most severe first.
func (c *console) findingsNow() []engine.Finding {
	if c.chk.result == nil {
		return nil
	}
	if len(c.chk.progress.Found) == 0 {
		return c.chk.result.Findings
	}
	out := slices.Concat(c.chk.result.Findings, c.chk.progress.Found)
	order := []engine.Severity{engine.Block, engine.Warn, engine.NotChecked, engine.Info}
	slices.SortStableFunc(out, func(a, b engine.Finding) int {
		return slices.Index(order, a.Severity) - slices.Index(order, b.Severity)
	})
	return out
}

// shown are the findings that match the filter. folded is the number of passed checks that
// are folded into one line.
func (c *console) shown() (list []engine.Finding, folded int) {
	words := strings.Fields(strings.ToLower(c.chk.filter))
	for _, f := range c.findingsNow() {
		text := strings.ToLower(strings.Join([]string{f.ID, string(f.Severity), f.Source, f.Title, f.Detail, f.Owner, strings.Join(f.Objects, " ")}, " "))
		switch {
		case slices.ContainsFunc(words, func(w string) bool { return !strings.Contains(text, w) }):
		case f.Severity == engine.Info && !c.chk.showPassed && len(words) == 0:
			folded++
		default:
			list = append(list, f)
		}
	}
	return list, folded
}

// checkItems are the rows of the pane that has the focus.
func (c *console) checkItems() (items []view.CheckItem) {
	if c.chk.result == nil {
		return nil
	}
	switch c.chk.pane {
	case checkPath:
		for _, r := range view.ReasonsOf(c.chk.result) {
			items = append(items, view.CheckItem{Reason: &r})
		}
	case checkFindings:
		list, folded := c.shown()
		for i := range list {
			items = append(items, view.CheckItem{Finding: &list[i]})
		}
		if folded > 0 || c.chk.showPassed && c.chk.filter == "" && len(list) > 0 {
			items = append(items, view.CheckItem{Folded: folded})
		}
	}
	return items
}

// selected is the selected row; the zero value if there is none.
func (c *console) selected() view.CheckItem {
	items := c.checkItems()
	if len(items) == 0 {
		return view.CheckItem{}
	}
	return items[max(0, min(c.chk.sel[c.chk.pane], len(items)-1))]
}

func (c *console) openSelected() {
	switch x := c.selected(); {
	case c.chk.open:
		c.chk.open = false
	case x.Finding != nil || x.Reason != nil:
		c.chk.open, c.chk.scroll = true, 0
	default:
		c.chk.showPassed = !c.chk.showPassed
		c.moveCheck(0)
	}
}

func (c *console) nextCheckPane() {
	c.chk.open = false
	c.chk.pane = (c.chk.pane + 1) % checkPanes
}

func (c *console) moveCheck(by int) {
	k := c.chk
	switch {
	case k.open:
		k.scroll = max(0, k.scroll+by)
	case k.pane == checkChanges:
		k.sel[k.pane] = max(0, min(k.sel[k.pane]+by, 200))
	default:
		k.sel[k.pane] = max(0, min(k.sel[k.pane]+by, len(c.checkItems())-1))
	}
}

func (c *console) copyCheckCommand() {
	if f := c.selected().Finding; f != nil && f.Command != "" {
		if term.Clean(f.Command) != f.Command {
			c.note = "the command contains control characters: it is not copied"
			return
		}
		c.copyText(c.deps.commands.Alone(f.Command), "the command")
		return
	}
	c.copyText(c.deps.commands.Command("upgrade check"), "the command of the check")
}

func (c *console) copyCheckLine() {
	switch x := c.selected(); {
	case x.Finding != nil:
		s := term.Clean(x.Finding.Title)
		if d := term.Clean(term.OneLine(x.Finding.Detail)); d != "" {
			s += ": " + d
		}
		c.copyText(s, "the line")
	case x.Reason != nil:
		c.copyText(term.Clean(x.Reason.What)+": "+term.Clean(x.Reason.Text), "the line")
	case c.chk.result != nil:
		_, s := view.Verdict(c.chk.result)
		c.copyText(term.Clean(s), "the line")
	default:
		c.copyText("", "")
	}
}

// typeFilter handles a key of the filter.
func (v *checkScreen) typeFilter(k tea.KeyMsg) {
	switch k.Type {
	case tea.KeyEnter:
		v.typing = false
	case tea.KeyEsc:
		v.typing, v.filter = false, ""
	case tea.KeyBackspace:
		if r := []rune(v.filter); len(r) > 0 {
			v.filter = string(r[:len(r)-1])
		}
	case tea.KeyCtrlU:
		v.filter = ""
	case tea.KeyRunes, tea.KeySpace:
		v.filter += term.Clean(string(k.Runes))
	}
	v.sel[checkFindings] = 0
}

// staleCheck reports whether the check on the screen may be out of date.
func (c *console) staleCheck() bool {
	k := c.chk
	if k.busy { // the last result is shown meanwhile
		return k.result != nil && k.began.Sub(k.at) > staleAfter
	}
	return k.result != nil && (k.err != nil && k.result.Current != (engine.Target{}) || c.now.Sub(k.at) > checkStale)
}

// checkMode is the right end of the first line.
func (c *console) checkMode() string {
	k := c.chk
	switch {
	case k.busy && k.progress.Total > 0:
		return fmt.Sprintf("upgrade check  %d of %d", k.progress.Done, k.progress.Total)
	case k.busy:
		return "upgrade check"
	case k.result == nil:
		return "upgrade check  " + c.now.UTC().Format("15:04:05 UTC")
	case c.staleCheck():
		return "upgrade check  STALE " + term.Duration(c.now.Sub(k.at)) + "  r refresh"
	}
	return "upgrade check  as of " + k.at.UTC().Format("15:04:05 UTC")
}

// checkWhy is the line below the body: the progress, the error or the verdict.
func (c *console) checkWhy(w int) []string {
	k := c.chk
	r := c.th.Row(w).Add(term.Plain, " ")
	switch {
	case k.busy && k.progress.Total > 0:
		return []string{r.Add(term.Accent, c.th.Spin(c.frame)+" ").Add(term.Strong, "Now ("+term.Duration(c.now.Sub(k.began))+"): "+k.progress.Summary()).String()}
	case k.busy:
		return []string{r.Add(term.Accent, c.th.Spin(c.frame)+" ").Add(term.Strong, "Now ("+term.Duration(c.now.Sub(k.began))+"): querying cluster, cloud and releases").String()}
	case k.err != nil:
		e := view.Explain(k.err, c.deps.commands)
		what := e.What
		if e.Why != "" {
			what += ": " + e.Why
		}
		lines := view.Signed(c.page(), w, term.Bad, c.th.Fail, what)
		if e.Remedy != "" {
			lines = append(lines, c.th.Row(w).Add(term.Faint, "   fix ").Add(term.Accent, e.Remedy).String())
		}
		return lines
	case k.result == nil:
		return nil
	case !k.complete:
		return []string{r.Add(term.Faint, "Versions only; r runs the preflight checks of the next hop.").String()}
	}
	severity, text := view.Verdict(k.result)
	sign, st := view.SeveritySignOf(c.page(), severity)
	return view.Signed(c.page(), w, st, sign, term.Clean(text))
}

// checkView renders the check in h lines.
func (c *console) checkView(w, h int) []string {
	k := c.chk.result
	switch {
	case k == nil && c.chk.err != nil:
		return view.Problem(c.page(), w, c.chk.err)
	case k == nil:
		return []string{"", c.th.Row(w).Add(term.Accent, "  "+c.th.Spin(c.frame)+" ").Add(term.Plain, "querying cluster, cloud and releases").String()}
	case c.chk.confirmWrite:
		return c.confirmWriteView(w, h)
	case c.chk.open:
		return c.openView(w, h)
	case w >= 110 && h >= 26:
		return c.checkWide(w, h)
	}
	trouble, _ := view.NeedAttention(c.findingsNow())
	roomy := len(k.Path) == 0 && len(trouble) == 0 && len(k.Components)+10 <= h
	lines := view.VersionRows(c.page(), w, k, view.FeedRemark(k.Feed, c.now), roomy)
	most := h - len(lines) - 3
	switch low := h < 14; {
	case low && c.chk.pane == checkPath:
		most = h - len(lines)
	case low:
		most = h - len(lines) - 2
	case len(trouble) > 0 && c.chk.pane != checkPath:
		most -= min(2, len(trouble)-1) // keeps the most severe finding visible
	}
	lines = append(lines, c.checkPathPane(w, most, k)...)
	lines = append(lines, view.NoteRows(c.page(), w, k)...)
	room := h - len(lines)
	if c.chk.pane == checkChanges {
		return append(lines, c.changesPane(w, room, k)...)
	}
	lines = append(lines, c.findingsPane(w, room)...)
	return append(lines, c.findingsFooter(w, h-len(lines), k)...)
}

// findingsFooter fills the room under the findings of a narrow screen with details of the selected
// one or with the changes of the next hop.
func (c *console) findingsFooter(w, room int, k *engine.Check) []string {
	f := c.selected().Finding
	if f != nil && f.Severity != engine.Info && room > 2 {
		detail := view.FindingDetail(c.page(), w, 4, *f)
		lines := []string{c.th.Rule(w, term.Clean(f.ID), "Enter shows all")}
		if len(detail)+1 <= room {
			lines[0] = c.th.Rule(w, term.Clean(f.ID), "")
		}
		return append(lines, detail[:min(len(detail), room-1)]...)
	}
	if f != nil && room > 0 && (f.Command != "" || f.Remedy != "") { // only one line: show the command or the remedy
		what := term.Clean(cmp.Or(c.deps.commands.Line(f.Command), c.deps.commands.Text(f.Remedy)))
		return []string{c.th.Row(w).Pad(2).Add(term.Faint, "To do: ").Add(term.Accent, what).String()}
	}
	if changes := view.ChangeRows(c.page(), w, k); room > 2 && len(changes) > 0 {
		if len(changes) > room {
			changes[0] = c.th.Rule(w, "Will change in hop 1", "Tab shows all")
		}
		return changes[:min(len(changes), room)]
	}
	return nil
}

// focusRule is the heading of a pane; the focused one is marked with the cursor.
func (c *console) focusRule(w, pane int, title, remark string) string {
	if c.chk.pane == pane {
		title += " " + c.th.Cursor
	}
	return c.th.Rule(w, title, remark)
}

// checkPathPane renders the path in at most h lines; its reasons can be selected while it has
// the focus.
func (c *console) checkPathPane(w, h int, k *engine.Check) []string {
	reasons := view.ReasonsOf(k)
	remark := "none"
	if len(k.Path) > 0 {
		remark = view.PathRemark(k)
	}
	if len(k.Path) == 0 && len(reasons) == 0 {
		if c.chk.pane != checkPath {
			return nil
		}
		return []string{c.focusRule(w, checkPath, "Path", remark), c.th.Row(w).Add(term.Faint, "   no newer version is known").String()}
	}
	lines := []string{c.focusRule(w, checkPath, "Path", remark)}
	terse := 1 // leaves out why hops are needed, unless there is nothing more urgent
	if trouble, _ := view.NeedAttention(c.findingsNow()); w >= 110 && (len(trouble) == 0 || c.chk.pane == checkPath) {
		terse = 0
	}
	hops := view.HopRows(c.page(), w, k, terse)
	switch {
	case w >= 110:
		lines = append(lines, view.Lattice(c.page(), w, k)...)
	case len(k.Path) > 0:
		more := 0
		if c.chk.pane == checkPath {
			more = min(2, len(reasons))
		}
		if rails := view.Rails(c.page(), w, k); len(lines)+len(rails)+len(hops)+more <= h { // the other rows matter more
			lines = append(lines, rails...)
		}
	}
	lines = append(lines, hops...)
	most := h - len(lines)
	if c.chk.pane != checkPath {
		switch {
		case len(k.Path) == 0:
			most = min(most, 8)
		case w >= 110:
			most = min(most, 4)
		default:
			most = min(most, 2)
		}
		beyond := 0
		for _, x := range reasons {
			if x.Beyond {
				beyond++
			}
		}
		reasons = reasons[:beyond] // a later hop reaches the others
	}
	if most <= 0 || len(reasons) == 0 {
		return lines[:min(len(lines), max(h, 2))]
	}
	at := -1
	if c.chk.pane == checkPath {
		at = max(0, min(c.chk.sel[checkPath], len(reasons)-1))
	}
	if len(k.Path) == 0 {
		// Without a path, the reasons are the main content of the screen.
		var blocks []string
		from := 0
		for i, x := range reasons {
			if i == at {
				from = len(blocks)
			}
			blocks = append(blocks, view.ReasonBlock(c.page(), w, x, i == at)...)
		}
		from = max(0, min(from, len(blocks)-most))
		return append(lines, blocks[from:min(len(blocks), from+most)]...)
	}
	from, to := view.Window(len(reasons), max(at, 0), most)
	for i := from; i < to; i++ {
		lines = append(lines, view.ReasonRow(c.page(), w, reasons[i], i == at))
	}
	return lines
}

// findingsPane lists the findings in at most h lines.
func (c *console) findingsPane(w, h int) []string {
	all := c.findingsNow()
	remark := view.CountBySeverity(all)
	if c.chk.filter != "" || c.chk.typing {
		list, _ := c.shown()
		remark = fmt.Sprintf("%d of %s", len(list), term.Count(len(all), "finding"))
	}
	lines := []string{c.focusRule(w, checkFindings, "Findings", remark)}
	if c.chk.typing || c.chk.filter != "" {
		r := c.th.Row(w).Add(term.Plain, " ").Add(term.Accent, "/ ").Add(term.Strong, c.chk.filter)
		if c.chk.typing {
			r.Add(term.Accent, "▏").Add(term.Faint, "  Enter applies the filter, Esc clears it")
		}
		lines = append(lines, r.String())
	}
	focus := c.chk.pane
	c.chk.pane = checkFindings
	items := c.checkItems()
	c.chk.pane = focus
	if len(items) == 0 {
		text := "none"
		switch {
		case c.chk.filter != "":
			text = "no finding matches; Esc clears the filter"
		case c.chk.busy:
			text = "none so far"
		case len(c.chk.result.Path) == 0:
			text = "none: there is no next hop to check"
		}
		return append(lines, c.th.Row(w).Add(term.Faint, "   "+text).String())
	}
	at := max(0, min(c.chk.sel[checkFindings], len(items)-1))
	room := h - len(lines)
	from, to := view.Window(len(items), at, room)
	if to < len(items) && to-from > 1 && to-1 > at { // the last line shows how many follow
		to--
	}
	for i := from; i < to; i++ {
		lines = append(lines, c.itemRow(w, items[i], i == at && focus == checkFindings, len(items)))
	}
	if n := len(items) - to; n > 0 && len(lines) < h {
		lines = append(lines, c.th.Row(w).Pad(4).Add(term.Faint, fmt.Sprintf("%s %d more", c.th.Ellipsis, n)).String())
	}
	return lines
}

func (c *console) itemRow(w int, x view.CheckItem, here bool, items int) string {
	switch {
	case x.Finding != nil:
		sign, st := view.SeveritySignOf(c.page(), x.Finding.Severity)
		title := term.Plain
		if here {
			title = term.Strong
		}
		return c.th.Row(w).Add(term.Accent, view.Marker(c.page(), here)).Add(st, sign+" ").Col(term.Faint, term.Clean(x.Finding.Source), view.AreaWidth).Add(title, term.Clean(x.Finding.Title)).String()
	case x.Folded == 0:
		st := term.Faint
		if here {
			st = term.Strong
		}
		return c.th.Row(w).Add(term.Accent, view.Marker(c.page(), here)).Add(st, "  hide passed checks").String()
	}
	return view.PassedRow(c.page(), w, x.Folded, c.chk.busy, items == 1 && !c.chk.busy, here)
}

// changesPane lists what the next hop changes, scrolled.
func (c *console) changesPane(w, h int, k *engine.Check) []string {
	rows := view.ChangeRows(c.page(), w, k)
	if len(rows) == 0 {
		return []string{c.focusRule(w, checkChanges, "Will change", ""), c.th.Row(w).Add(term.Faint, "   nothing: there is no next hop").String()}
	}
	rows = rows[1:]
	if x := k.Config; x != nil && len(x.Fields) > 0 {
		rows = append(rows, view.FieldRows(c.page(), w, x.Fields)...)
	}
	remark := ""
	from := max(0, min(c.chk.sel[checkChanges], len(rows)-(h-1)))
	if from+h-1 < len(rows) {
		remark = "more below"
	}
	return append([]string{c.focusRule(w, checkChanges, "Will change in hop 1", remark)}, rows[from:min(len(rows), from+h-1)]...)
}

// confirmWriteView shows the values to write and asks for confirmation.
func (c *console) confirmWriteView(w, h int) []string {
	x := c.chk.result.Config
	lines := []string{c.th.Rule(w, "Write the configuration?", term.Count(len(x.Fields), "value"))}
	lines = append(lines, c.th.Row(w).Pad(2).Add(term.Faint, term.CutMiddle(term.Clean(x.Path), w-3, c.th.Ellipsis)).String())
	rows := view.FieldRows(c.page(), w, x.Fields)
	if room := h - len(lines) - 4; len(rows) > room && room > 0 {
		more := len(rows) - room + 1
		rows = append(rows[:room-1], c.th.Row(w).Pad(2).Add(term.Faint, fmt.Sprintf("%s %d more", c.th.Ellipsis, more)).String())
	}
	lines = append(append(lines, rows...), "")
	lines = append(lines, view.Prose(c.page(), w, 2, term.Plain, "Comments and order of the file are kept. The cluster is not changed; upgrade apply does that.")...)
	return lines
}

// openView shows all of the selected row.
func (c *console) openView(w, h int) []string {
	lines := view.ItemDetail(c.page(), w, c.selected())
	title := lines[0]
	lines = lines[1:]
	from := max(0, min(c.chk.scroll, len(lines)-(h-1)))
	return append([]string{title}, lines[from:min(len(lines), from+h-1)]...)
}

// checkWide is checkView for wide screens, with component parts, the lattice, and details at the right.
func (c *console) checkWide(w, h int) []string {
	k := c.chk.result
	right := max(40, w*2/5)
	left := w - right - 3
	lines := view.VersionRows(c.page(), w, k, view.FeedRemark(k.Feed, c.now), true)
	lines = append(lines, c.checkPathPane(w, max(3, h-len(lines)-8), k)...)
	lines = append(lines, view.NoteRows(c.page(), w, k)...)
	room := h - len(lines)
	var a []string
	if c.chk.pane == checkChanges {
		a = c.changesPane(left, room, k)
	} else {
		a = c.findingsPane(left, room)
	}
	b := view.ItemDetail(c.page(), right, c.selected())
	if x := c.selected(); x.Finding == nil && x.Reason == nil {
		if changes := view.ChangeRows(c.page(), right, k); len(changes) > 0 && c.chk.pane != checkChanges {
			b = changes
		}
	}
	if len(b) > room && room > 1 {
		how := "Enter shows all"
		if c.selected().Finding == nil && c.selected().Reason == nil {
			how = "Tab shows all"
		}
		b = append(b[:room-1], c.th.Row(right).Pad(1).Add(term.Faint, c.th.Ellipsis+" "+how).String())
	}
	return append(lines, view.Beside(a, b, left, room, c.th)...)
}
