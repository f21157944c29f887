package console

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	tea "github.com/charmbracelet/bubbletea"

	"constellation/engine/check"
	"constellation/engine/plan"
	"constellation/engine/words"
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
	defaults
	c      *console
	result *check.Check // the newest result; nil if there is none yet
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

func (scr *checkScreen) title() string   { return "upgrade check" }
func (scr *checkScreen) command() string { return scr.c.deps.Commands.Command("upgrade check") }
func (scr *checkScreen) takesText() bool { return scr.typing }

func (scr *checkScreen) promptKeys() []binding {
	if scr.confirmWrite {
		return scr.confirmWriteKeys()
	}
	return nil
}

func (scr *checkScreen) take(msg tea.Msg) (tea.Cmd, bool) {
	switch msg := msg.(type) {
	case checkEnded:
		return scr.tookCheck(msg), true
	case backgroundEnded:
		scr.tookBackground(msg)
		return nil, true
	case configWritten:
		scr.tookWritten(msg)
		return nil, true
	}
	return nil, false
}

// safety is the scripted command with its exit code.
func (scr *checkScreen) safety() string {
	s := "scripted  " + scr.command()
	if !scr.complete || scr.busy {
		return s
	}
	exit := fmt.Sprintf("   exit %d", scr.result.Exit)
	return term.Cut(s+" --exit-code", scr.c.w-1-term.Width(exit), scr.c.th.Ellipsis) + exit
}

// Messages of checks.
type (
	checkEnded struct {
		check check.Check
		err   error
	}
	backgroundEnded struct {
		check check.Check
		err   error
	}
	configWritten struct {
		check check.Check
		err   error
	}
)

func (scr *checkScreen) keys() []binding {
	return []binding{
		on("enter", "Enter", "open the finding, or the rule that blocks", "view", act(scr.openSelected)).footed("open").unless(func() string {
			if scr.pane == checkChanges && !scr.open || len(scr.items()) == 0 {
				return "there is nothing to open here"
			}
			return ""
		}),
		on("a", "a", "upgrade: plan the next hop and confirm it", "do", scr.c.upg.openNextHop).footed("apply").unless(func() string {
			switch {
			case scr.busy:
				return "a check is running"
			case scr.writing:
				return "the configuration is being written"
			case scr.result == nil:
				return "there is no result yet; r checks"
			case len(scr.result.Path) == 0:
				return "there is no next hop"
			}
			return ""
		}),
		on("W", "W", "write the next hop into the configuration", "do", act(func() { scr.confirmWrite = true })).footed("write").unless(scr.nothingToWrite),
		on("r", "r", "check again", "do", scr.start).unless(func() string {
			switch {
			case scr.busy:
				return "a check is running"
			case scr.writing:
				return "the configuration is being written"
			}
			return ""
		}),
		on("esc", "Esc", "back", "back", scr.leave).footed("back"),
		on("Y", "Y", "copy the finding's command, or that of the check", "copy", act(scr.copyCheckCommand)).footed("copy"),
		on("y", "y", "copy the line", "copy", act(scr.copyCheckLine)),
		on("tab", "Tab", "next pane", "panes", act(scr.nextPane)).footed("pane"),
		on("up k", "↑ k", "up", "move", act(func() { scr.move(-1) })),
		on("down j", "↓ j", "down", "move", act(func() { scr.move(1) })),
		on("pgup", "PgUp", "a page up", "move", act(func() { scr.move(-8) })),
		on("pgdown", "PgDn", "a page down", "move", act(func() { scr.move(8) })),
		on("home g", "g", "to the first", "move", act(func() { scr.move(-1 << 20) })),
		on("end G", "G", "to the last", "move", act(func() { scr.move(1 << 20) })),
		on("/", "/", "filter findings", "view", act(func() { scr.typing, scr.open, scr.pane = true, false, checkFindings })).footed("filter"),
		on("b", "b", "list backups or create one", "do", scr.c.backup.show).unless(func() string {
			if scr.writing {
				return "the configuration is being written"
			}
			return ""
		}),
	}
}

func (scr *checkScreen) confirmWriteKeys() []binding {
	return []binding{
		on("enter", "Enter", "write the configuration", "do", scr.writeConfig).footed("write").unless(func() string {
			if scr.writing {
				return "it is being written"
			}
			return ""
		}),
		on("esc n q", "Esc", "keep the file as it is", "back", act(func() { scr.confirmWrite = false })).footed("keep the file"),
		on("ctrl+c", "Ctrl-C", "leave", "leave", scr.c.quit.leave),
	}
}

// nothingToWrite returns why W is off.
func (scr *checkScreen) nothingToWrite() string {
	k := scr.result
	switch {
	case scr.busy || k == nil:
		return "a check is running"
	case len(k.Path) == 0 && k.Config == nil:
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

// start checks for upgrades. The last result stays on the screen meanwhile.
func (scr *checkScreen) start() tea.Cmd {
	scr.busy, scr.began, scr.progress, scr.err = true, scr.c.now, view.RunningCheck{}, nil
	r := check.Request{NoDryRun: scr.c.guard.locked()} // others can notice a dry run
	return scr.c.task.launch("checking for upgrades", scr.takeEvents, func(ctx context.Context, emit func(plan.Event)) tea.Msg {
		k, err := scr.c.deps.Engine.Check(ctx, r, emit)
		return checkEnded{k, err}
	})
}

// backgroundCheck checks versions in the background, once; nil if there is nothing to do. Its
// error is dropped: the check screen runs its own check and shows the error.
func (scr *checkScreen) backgroundCheck() tea.Cmd {
	if scr.backgroundStarted || scr.result != nil || scr.busy {
		return nil
	}
	scr.backgroundStarted = true
	return func() tea.Msg {
		ctx, cancel := context.WithTimeout(scr.c.ctx, staleAfter)
		defer cancel()
		k, err := scr.c.deps.Engine.Check(ctx, check.Request{NoPreflight: true}, func(plan.Event) {})
		return backgroundEnded{k, err}
	}
}

// takeEvents applies the events of the running check.
func (scr *checkScreen) takeEvents(events []plan.Event) tea.Cmd {
	for _, ev := range events {
		if ev.Kind != plan.KindCheck || ev.Object != check.CheckVersions {
			scr.progress.Apply(ev)
			continue
		}
		var k check.Check
		if json.Unmarshal(ev.Data, &k) != nil || k.Current == (plan.Target{}) && scr.result != nil {
			continue // keep the last result: this one has no cluster data
		}
		scr.result, scr.at, scr.complete = &k, scr.c.now, false
	}
	return nil
}

// tookCheck takes the end of a check.
func (scr *checkScreen) tookCheck(msg checkEnded) tea.Cmd {
	scr.busy, scr.err = false, msg.err
	if msg.check.Schema != "" && (msg.err == nil || scr.result == nil || scr.result.Current == (plan.Target{})) {
		scr.result, scr.at, scr.complete = &msg.check, scr.c.now, msg.err == nil
	}
	scr.progress = view.RunningCheck{}
	scr.move(0)
	if k := scr.result; k != nil && len(k.Findings) == 0 && len(k.Blocked) > 0 && scr.pane == checkFindings {
		scr.pane = checkPath // the only pane with content
	}
	return tea.Tick(checkStale, func(time.Time) tea.Msg { return refresh{-1} }) // draws again
}

func (scr *checkScreen) tookBackground(msg backgroundEnded) {
	if msg.err == nil && msg.check.Schema != "" && scr.result == nil {
		scr.result, scr.at = &msg.check, scr.c.now
	}
}

// leave closes the open row or clears the filter; else it cancels the check and goes home.
func (scr *checkScreen) leave() tea.Cmd {
	switch {
	case scr.open:
		scr.open = false
		return nil
	case scr.filter != "":
		scr.filter = ""
		return nil
	}
	if scr.busy && scr.c.task.cancel != nil {
		scr.c.task.drop()
		scr.busy, scr.progress = false, view.RunningCheck{}
	}
	return scr.c.overview.show()
}

func (scr *checkScreen) writeConfig() tea.Cmd {
	scr.writing = true
	return scr.c.task.launch("writing the configuration", nil, func(ctx context.Context, _ func(plan.Event)) tea.Msg {
		k, err := scr.c.deps.Engine.Check(ctx, check.Request{WriteConfig: true, NoPreflight: true}, func(plan.Event) {})
		return configWritten{k, err}
	})
}

func (scr *checkScreen) tookWritten(msg configWritten) {
	scr.writing, scr.confirmWrite = false, false
	switch x := msg.check.Config; {
	case msg.err != nil:
		e := view.Explain(msg.err, scr.c.deps.Commands)
		scr.c.note = "not written: " + e.What
		if e.Why != "" {
			scr.c.note += ": " + e.Why
		}
	case x == nil || !x.Written:
		scr.c.note = "nothing was written: the configuration is already up to date; r checks again"
	default:
		k := *scr.result
		scr.c.note = fmt.Sprintf("wrote %s into %s", words.Count(len(x.Fields), "value"), term.Clean(x.Path))
		if !slices.Equal(k.Config.Fields, x.Fields) {
			scr.c.note += "; they differ from those shown, r checks again"
		}
		k.Config = x
		k.Findings = slices.DeleteFunc(slices.Clone(k.Findings), func(f plan.Finding) bool { return f.ID == check.CheckConfigTarget })
		k.Notes = slices.DeleteFunc(slices.Clone(k.Notes), func(n string) bool { return n == check.NoteOtherConfig })
		scr.result = &k
	}
}

// findingsNow are the findings so far, the most severe first.
func (scr *checkScreen) findingsNow() []plan.Finding {
	if scr.result == nil {
		return nil
	}
	if len(scr.progress.Found) == 0 {
		return scr.result.Findings
	}
	out := slices.Concat(scr.result.Findings, scr.progress.Found)
	order := []plan.Severity{plan.Block, plan.Warn, plan.NotChecked, plan.Info}
	slices.SortStableFunc(out, func(a, b plan.Finding) int {
		return slices.Index(order, a.Severity) - slices.Index(order, b.Severity)
	})
	return out
}

// shown are the findings that match the filter. folded is the number of passed checks that
// are folded into one line.
func (scr *checkScreen) shown() (list []plan.Finding, folded int) {
	words := strings.Fields(strings.ToLower(scr.filter))
	for _, f := range scr.findingsNow() {
		text := strings.ToLower(strings.Join([]string{f.ID, string(f.Severity), f.Source, f.Title, f.Detail, f.Owner, strings.Join(f.Objects, " ")}, " "))
		switch {
		case slices.ContainsFunc(words, func(w string) bool { return !strings.Contains(text, w) }):
		case f.Severity == plan.Info && !scr.showPassed && len(words) == 0:
			folded++
		default:
			list = append(list, f)
		}
	}
	return list, folded
}

// items are the rows of the pane that has the focus.
func (scr *checkScreen) items() (items []view.CheckItem) {
	if scr.result == nil {
		return nil
	}
	switch scr.pane {
	case checkPath:
		for _, r := range view.ReasonsOf(scr.result) {
			items = append(items, view.CheckItem{Reason: &r})
		}
	case checkFindings:
		list, folded := scr.shown()
		for i := range list {
			items = append(items, view.CheckItem{Finding: &list[i]})
		}
		if folded > 0 || scr.showPassed && scr.filter == "" && len(list) > 0 {
			items = append(items, view.CheckItem{Folded: folded})
		}
	}
	return items
}

// selected is the selected row; the zero value if there is none.
func (scr *checkScreen) selected() view.CheckItem {
	items := scr.items()
	if len(items) == 0 {
		return view.CheckItem{}
	}
	return items[max(0, min(scr.sel[scr.pane], len(items)-1))]
}

func (scr *checkScreen) openSelected() {
	switch x := scr.selected(); {
	case scr.open:
		scr.open = false
	case x.Finding != nil || x.Reason != nil:
		scr.open, scr.scroll = true, 0
	default:
		scr.showPassed = !scr.showPassed
		scr.move(0)
	}
}

func (scr *checkScreen) nextPane() {
	scr.open = false
	scr.pane = (scr.pane + 1) % checkPanes
}

func (scr *checkScreen) move(by int) {
	k := scr
	switch {
	case k.open:
		k.scroll = max(0, k.scroll+by)
	case k.pane == checkChanges:
		k.sel[k.pane] = max(0, min(k.sel[k.pane]+by, 200))
	default:
		k.sel[k.pane] = max(0, min(k.sel[k.pane]+by, len(scr.items())-1))
	}
}

func (scr *checkScreen) copyCheckCommand() {
	if f := scr.selected().Finding; f != nil && f.Command != "" {
		if term.Clean(f.Command) != f.Command {
			scr.c.note = "the command contains control characters: it is not copied"
			return
		}
		scr.c.copyText(scr.c.deps.Commands.Alone(f.Command), "the command")
		return
	}
	scr.c.copyText(scr.c.deps.Commands.Command("upgrade check"), "the command of the check")
}

func (scr *checkScreen) copyCheckLine() {
	switch x := scr.selected(); {
	case x.Finding != nil:
		s := term.Clean(x.Finding.Title)
		if d := term.Clean(term.OneLine(x.Finding.Detail)); d != "" {
			s += ": " + d
		}
		scr.c.copyText(s, "the line")
	case x.Reason != nil:
		scr.c.copyText(term.Clean(x.Reason.What)+": "+term.Clean(x.Reason.Text), "the line")
	case scr.result != nil:
		_, s := view.Verdict(scr.result)
		scr.c.copyText(term.Clean(s), "the line")
	default:
		scr.c.copyText("", "")
	}
}

// typed handles a key of the filter.
func (v *checkScreen) typed(k tea.KeyMsg) {
	v.filter, v.typing = editFilter(v.filter, k)
	v.sel[checkFindings] = 0
}

// stale reports whether the check on the screen may be out of date.
func (scr *checkScreen) stale() bool {
	k := scr
	if k.busy { // the last result is shown meanwhile
		return k.result != nil && k.began.Sub(k.at) > staleAfter
	}
	return k.result != nil && (k.err != nil && k.result.Current != (plan.Target{}) || scr.c.now.Sub(k.at) > checkStale)
}

// mode is the right end of the first line.
func (scr *checkScreen) mode() string {
	k := scr
	switch {
	case k.busy && k.progress.Total > 0:
		return fmt.Sprintf("upgrade check  %d of %d", k.progress.Done, k.progress.Total)
	case k.busy:
		return "upgrade check"
	case k.result == nil:
		return "upgrade check  " + scr.c.now.UTC().Format("15:04:05 UTC")
	case scr.stale():
		return "upgrade check  STALE " + term.Duration(scr.c.now.Sub(k.at)) + "  r refresh"
	}
	return "upgrade check  as of " + k.at.UTC().Format("15:04:05 UTC")
}

// why is the line below the body: the progress, the error or the verdict.
func (scr *checkScreen) why() []string {
	w := scr.c.w
	k := scr
	r := scr.c.th.Row(w).Add(term.Plain, " ")
	switch {
	case k.busy && k.progress.Total > 0:
		return []string{r.Add(term.Accent, scr.c.th.Spin(scr.c.frame)+" ").Add(term.Strong, "Now ("+term.Duration(scr.c.now.Sub(k.began))+"): "+k.progress.Summary()).String()}
	case k.busy:
		return []string{r.Add(term.Accent, scr.c.th.Spin(scr.c.frame)+" ").Add(term.Strong, "Now ("+term.Duration(scr.c.now.Sub(k.began))+"): querying cluster, cloud and releases").String()}
	case k.err != nil:
		e := view.Explain(k.err, scr.c.deps.Commands)
		what := e.What
		if e.Why != "" {
			what += ": " + e.Why
		}
		lines := view.Signed(scr.c.page(), w, term.Bad, scr.c.th.Fail, what)
		if e.Remedy != "" {
			lines = append(lines, scr.c.th.Row(w).Add(term.Faint, "   fix ").Add(term.Accent, e.Remedy).String())
		}
		return lines
	case k.result == nil:
		return nil
	case !k.complete:
		return []string{r.Add(term.Faint, "Versions only; r runs the preflight checks of the next hop.").String()}
	}
	severity, text := view.Verdict(k.result)
	sign, st := view.SeveritySignOf(scr.c.page(), severity)
	return view.Signed(scr.c.page(), w, st, sign, term.Clean(text))
}

// view renders the check in h lines.
func (scr *checkScreen) view(w, h int) []string {
	k := scr.result
	switch {
	case k == nil && scr.err != nil:
		return view.Problem(scr.c.page(), w, scr.err)
	case k == nil:
		return []string{"", scr.c.th.Row(w).Add(term.Accent, "  "+scr.c.th.Spin(scr.c.frame)+" ").Add(term.Plain, "querying cluster, cloud and releases").String()}
	case scr.confirmWrite:
		return scr.confirmWriteView(w, h)
	case scr.open:
		return scr.openView(w, h)
	case w >= 110 && h >= 26:
		return scr.wide(w, h)
	}
	trouble, _ := view.NeedAttention(scr.findingsNow())
	roomy := len(k.Path) == 0 && len(trouble) == 0 && len(k.Components)+10 <= h
	lines := view.VersionRows(scr.c.page(), w, k, view.FeedRemark(k.Feed, scr.c.now), roomy)
	most := h - len(lines) - 3
	switch low := h < 14; {
	case low && scr.pane == checkPath:
		most = h - len(lines)
	case low:
		most = h - len(lines) - 2
	case len(trouble) > 0 && scr.pane != checkPath:
		most -= min(2, len(trouble)-1) // keeps the most severe finding visible
	}
	lines = append(lines, scr.pathPane(w, most, k)...)
	lines = append(lines, view.NoteRows(scr.c.page(), w, k)...)
	room := h - len(lines)
	if scr.pane == checkChanges {
		return append(lines, scr.changesPane(w, room, k)...)
	}
	lines = append(lines, scr.findingsPane(w, room)...)
	return append(lines, scr.findingsFooter(w, h-len(lines), k)...)
}

// findingsFooter fills the room under the findings of a narrow screen with details of the selected
// one or with the changes of the next hop.
func (scr *checkScreen) findingsFooter(w, room int, k *check.Check) []string {
	f := scr.selected().Finding
	if f != nil && f.Severity != plan.Info && room > 2 {
		detail := view.FindingDetail(scr.c.page(), w, 4, *f)
		lines := []string{scr.c.th.Rule(w, term.Clean(f.ID), "Enter shows all")}
		if len(detail)+1 <= room {
			lines[0] = scr.c.th.Rule(w, term.Clean(f.ID), "")
		}
		return append(lines, detail[:min(len(detail), room-1)]...)
	}
	if f != nil && room > 0 && (f.Command != "" || f.Remedy != "") { // only one line: show the command or the remedy
		what := term.Clean(cmp.Or(scr.c.deps.Commands.Line(f.Command), scr.c.deps.Commands.Text(f.Remedy)))
		return []string{scr.c.th.Row(w).Pad(2).Add(term.Faint, "To do: ").Add(term.Accent, what).String()}
	}
	if changes := view.ChangeRows(scr.c.page(), w, k); room > 2 && len(changes) > 0 {
		if len(changes) > room {
			changes[0] = scr.c.th.Rule(w, "Will change in hop 1", "Tab shows all")
		}
		return changes[:min(len(changes), room)]
	}
	return nil
}

// focusRule is the heading of a pane; the focused one is marked with the cursor.
func (scr *checkScreen) focusRule(w, pane int, title, remark string) string {
	if scr.pane == pane {
		title += " " + scr.c.th.Cursor
	}
	return scr.c.th.Rule(w, title, remark)
}

// pathPane renders the path in at most h lines; its reasons can be selected while it has
// the focus.
func (scr *checkScreen) pathPane(w, h int, k *check.Check) []string {
	reasons := view.ReasonsOf(k)
	remark := "none"
	if len(k.Path) > 0 {
		remark = view.PathRemark(k)
	}
	if len(k.Path) == 0 && len(reasons) == 0 {
		if scr.pane != checkPath {
			return nil
		}
		return []string{scr.focusRule(w, checkPath, "Path", remark), scr.c.th.Row(w).Add(term.Faint, "   no newer version is known").String()}
	}
	lines := []string{scr.focusRule(w, checkPath, "Path", remark)}
	terse := 1 // leaves out why hops are needed, unless there is nothing more urgent
	if trouble, _ := view.NeedAttention(scr.findingsNow()); w >= 110 && (len(trouble) == 0 || scr.pane == checkPath) {
		terse = 0
	}
	hops := view.HopRows(scr.c.page(), w, k, terse)
	switch {
	case w >= 110:
		lines = append(lines, view.Lattice(scr.c.page(), w, k)...)
	case len(k.Path) > 0:
		more := 0
		if scr.pane == checkPath {
			more = min(2, len(reasons))
		}
		if rails := view.Rails(scr.c.page(), w, k); len(lines)+len(rails)+len(hops)+more <= h { // the other rows matter more
			lines = append(lines, rails...)
		}
	}
	lines = append(lines, hops...)
	most := h - len(lines)
	if scr.pane != checkPath {
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
	if scr.pane == checkPath {
		at = max(0, min(scr.sel[checkPath], len(reasons)-1))
	}
	if len(k.Path) == 0 {
		// Without a path, the reasons are the main content of the screen.
		var blocks []string
		from := 0
		for i, x := range reasons {
			if i == at {
				from = len(blocks)
			}
			blocks = append(blocks, view.ReasonBlock(scr.c.page(), w, x, i == at)...)
		}
		from = max(0, min(from, len(blocks)-most))
		return append(lines, blocks[from:min(len(blocks), from+most)]...)
	}
	from, to := view.Window(len(reasons), max(at, 0), most)
	for i := from; i < to; i++ {
		lines = append(lines, view.ReasonRow(scr.c.page(), w, reasons[i], i == at))
	}
	return lines
}

// findingsPane lists the findings in at most h lines.
func (scr *checkScreen) findingsPane(w, h int) []string {
	all := scr.findingsNow()
	remark := view.CountBySeverity(all)
	if scr.filter != "" || scr.typing {
		list, _ := scr.shown()
		remark = fmt.Sprintf("%d of %s", len(list), words.Count(len(all), "finding"))
	}
	lines := []string{scr.focusRule(w, checkFindings, "Findings", remark)}
	if scr.typing || scr.filter != "" {
		r := scr.c.th.Row(w).Add(term.Plain, " ").Add(term.Accent, "/ ").Add(term.Strong, scr.filter)
		if scr.typing {
			r.Add(term.Accent, "▏").Add(term.Faint, "  Enter applies the filter, Esc clears it")
		}
		lines = append(lines, r.String())
	}
	focus := scr.pane
	scr.pane = checkFindings
	items := scr.items()
	scr.pane = focus
	if len(items) == 0 {
		text := "none"
		switch {
		case scr.filter != "":
			text = "no finding matches; Esc clears the filter"
		case scr.busy:
			text = "none so far"
		case len(scr.result.Path) == 0:
			text = "none: there is no next hop to check"
		}
		return append(lines, scr.c.th.Row(w).Add(term.Faint, "   "+text).String())
	}
	at := max(0, min(scr.sel[checkFindings], len(items)-1))
	room := h - len(lines)
	from, to := view.Window(len(items), at, room)
	if to < len(items) && to-from > 1 && to-1 > at { // the last line shows how many follow
		to--
	}
	for i := from; i < to; i++ {
		lines = append(lines, scr.itemRow(w, items[i], i == at && focus == checkFindings, len(items)))
	}
	if n := len(items) - to; n > 0 && len(lines) < h {
		lines = append(lines, scr.c.th.Row(w).Pad(4).Add(term.Faint, fmt.Sprintf("%s %d more", scr.c.th.Ellipsis, n)).String())
	}
	return lines
}

func (scr *checkScreen) itemRow(w int, x view.CheckItem, here bool, items int) string {
	switch {
	case x.Finding != nil:
		sign, st := view.SeveritySignOf(scr.c.page(), x.Finding.Severity)
		title := term.Plain
		if here {
			title = term.Strong
		}
		return scr.c.th.Row(w).Add(term.Accent, view.Marker(scr.c.page(), here)).Add(st, sign+" ").Col(term.Faint, term.Clean(x.Finding.Source), view.AreaWidth).Add(title, term.Clean(x.Finding.Title)).String()
	case x.Folded == 0:
		st := term.Faint
		if here {
			st = term.Strong
		}
		return scr.c.th.Row(w).Add(term.Accent, view.Marker(scr.c.page(), here)).Add(st, "  hide passed checks").String()
	}
	return view.PassedRow(scr.c.page(), w, x.Folded, scr.busy, items == 1 && !scr.busy, here)
}

// changesPane lists what the next hop changes, scrolled.
func (scr *checkScreen) changesPane(w, h int, k *check.Check) []string {
	rows := view.ChangeRows(scr.c.page(), w, k)
	if len(rows) == 0 {
		return []string{scr.focusRule(w, checkChanges, "Will change", ""), scr.c.th.Row(w).Add(term.Faint, "   nothing: there is no next hop").String()}
	}
	rows = rows[1:]
	if x := k.Config; x != nil && len(x.Fields) > 0 {
		rows = append(rows, view.FieldRows(scr.c.page(), w, x.Fields)...)
	}
	remark := ""
	from := max(0, min(scr.sel[checkChanges], len(rows)-(h-1)))
	if from+h-1 < len(rows) {
		remark = "more below"
	}
	return append([]string{scr.focusRule(w, checkChanges, "Will change in hop 1", remark)}, rows[from:min(len(rows), from+h-1)]...)
}

// confirmWriteView shows the values to write and asks for confirmation.
func (scr *checkScreen) confirmWriteView(w, h int) []string {
	x := scr.result.Config
	lines := []string{scr.c.th.Rule(w, "Write the configuration?", words.Count(len(x.Fields), "value"))}
	lines = append(lines, scr.c.th.Row(w).Pad(2).Add(term.Faint, term.CutMiddle(term.Clean(x.Path), w-3, scr.c.th.Ellipsis)).String())
	rows := view.FieldRows(scr.c.page(), w, x.Fields)
	if room := h - len(lines) - 4; len(rows) > room && room > 0 {
		more := len(rows) - room + 1
		rows = append(rows[:room-1], scr.c.th.Row(w).Pad(2).Add(term.Faint, fmt.Sprintf("%s %d more", scr.c.th.Ellipsis, more)).String())
	}
	lines = append(append(lines, rows...), "")
	lines = append(lines, view.Prose(scr.c.page(), w, 2, term.Plain, "Comments and order of the file are kept. The cluster is not changed; upgrade apply does that.")...)
	return lines
}

// openView shows all of the selected row.
func (scr *checkScreen) openView(w, h int) []string {
	lines := view.ItemDetail(scr.c.page(), w, scr.selected())
	title := lines[0]
	lines = lines[1:]
	from := max(0, min(scr.scroll, len(lines)-(h-1)))
	return append([]string{title}, lines[from:min(len(lines), from+h-1)]...)
}

// wide is checkView for wide screens, with component parts, the lattice, and details at the right.
func (scr *checkScreen) wide(w, h int) []string {
	k := scr.result
	right := max(40, w*2/5)
	left := w - right - 3
	lines := view.VersionRows(scr.c.page(), w, k, view.FeedRemark(k.Feed, scr.c.now), true)
	lines = append(lines, scr.pathPane(w, max(3, h-len(lines)-8), k)...)
	lines = append(lines, view.NoteRows(scr.c.page(), w, k)...)
	room := h - len(lines)
	var a []string
	if scr.pane == checkChanges {
		a = scr.changesPane(left, room, k)
	} else {
		a = scr.findingsPane(left, room)
	}
	b := view.ItemDetail(scr.c.page(), right, scr.selected())
	if x := scr.selected(); x.Finding == nil && x.Reason == nil {
		if changes := view.ChangeRows(scr.c.page(), right, k); len(changes) > 0 && scr.pane != checkChanges {
			b = changes
		}
	}
	if len(b) > room && room > 1 {
		how := "Enter shows all"
		if scr.selected().Finding == nil && scr.selected().Reason == nil {
			how = "Tab shows all"
		}
		b = append(b[:room-1], scr.c.th.Row(right).Pad(1).Add(term.Faint, scr.c.th.Ellipsis+" "+how).String())
	}
	return append(lines, view.Beside(a, b, left, room, scr.c.th)...)
}

// show shows the check. It starts a new one unless the last complete one is recent.
func (scr *checkScreen) show() tea.Cmd {
	scr.c.screen = scr.c.check
	scr.open, scr.confirmWrite, scr.typing = false, false, false
	if scr.complete && scr.err == nil && scr.c.now.Sub(scr.at) <= staleAfter {
		return nil
	}
	return scr.start()
}
