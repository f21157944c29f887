package console

import (
	"fmt"
	"slices"
	"strings"

	tea "github.com/charmbracelet/bubbletea"

	"constellation/engine/plan"
	"constellation/engine/words"
	"constellation/tui/term"
	"constellation/tui/view"
)

// resultScreen shows how a run ended.
type resultScreen struct {
	defaults
	c *console
}

func (scr *resultScreen) title() string   { return "result" }
func (scr *resultScreen) command() string { return scr.c.runCommand() }
func (scr *resultScreen) mode() string    { return scr.c.runMode(scr) }
func (scr *resultScreen) rail() string    { return scr.c.runRail(scr) }

func (scr *resultScreen) keys() []binding {
	return []binding{
		on("enter", "Enter", "home", "do", scr.c.goHome).footed("home").unless(func() string {
			if !scr.c.succeeded() && !scr.c.upgrading() {
				return "there is no cluster to show; r retries"
			}
			return ""
		}),
		on("r", "r", "retry; finished steps are skipped", "do", scr.retry).footed("retry").unless(func() string {
			if scr.c.succeeded() {
				return "the run succeeded"
			}
			if scr.deadEnd() {
				return "a retry would fail the same way; apply the fix first"
			}
			return ""
		}),
		scr.c.watchKey(),
		on("l", "l", "full log", "view", act(func() { scr.c.openLog() })).footed("full log"),
		on("y", "y", "copy the next command, or the cause", "copy", act(scr.copyResult)).footed("copy"),
		on("esc", "Esc", "home", "back", scr.c.goHome),
	}
}

// deadEnd reports whether every retry of this plan must fail. If the obstacle is outside of
// the plan, such as another run or a file, a retry checks for it again.
func (scr *resultScreen) deadEnd() bool {
	return scr.c.ran && scr.c.t.Result != nil && scr.c.t.Result.Resume == "" && plan.ExitCode(scr.c.err) == plan.ExitFailed
}

// retry makes a new plan and resumes the run.
func (scr *resultScreen) retry() tea.Cmd {
	if scr.c.upgrading() {
		return scr.c.openUpgrade(scr.c.upg.start)
	}
	scr.c.resumed = scr.c.ran
	scr.c.err = nil
	if scr.c.ran {
		scr.c.screen = scr.c.run
		scr.c.plan = nil
		return scr.c.makePlan()
	}
	return scr.c.startPreflight()
}

func (scr *resultScreen) copyResult() {
	if scr.c.t.Result != nil && scr.c.succeeded() && len(scr.c.t.Result.Next) > 0 {
		scr.c.copyText(scr.c.deps.Commands.Line(scr.c.t.Result.Next[0]), "the command")
		return
	}
	if scr.c.err != nil {
		scr.c.copyText(term.Clean(scr.c.err.Error()), "the cause")
		return
	}
	scr.c.copyText("", "")
}

func (scr *resultScreen) view(w, h int) []string {
	if scr.c.succeeded() {
		return scr.successView(w, h)
	}
	return scr.failureView(w, h)
}

func (scr *resultScreen) successView(w, h int) []string {
	name := scr.c.t.Cluster
	if name == "" && scr.c.home != nil {
		name = term.Clean(scr.c.home.Cluster)
	}
	if name == "" {
		name = "the cluster"
	}
	remark, title := "", name+" is up"
	if scr.c.upgrading() {
		title = name + " is upgraded"
	}
	var res plan.Result
	if scr.c.t.Result != nil {
		res = scr.c.t.Result.Result
		if res.Nodes > 0 {
			remark = words.Count(res.Nodes, "node") + " ready in " + term.Duration(scr.c.t.Elapsed(scr.c.now))
		}
		switch scr.c.t.Result.Ended {
		case plan.StateNothing:
			title = name + ": nothing to do"
		case plan.StateDetached:
			title = name + " continues on its own"
		}
	}
	switch {
	case scr.c.upgrading() && !scr.c.ran && scr.c.err != nil: // nothing to upgrade
		title = name + ": nothing to do"
	case scr.c.plan != nil && scr.c.plan.Rehearsal:
		title = name + ": rehearsed"
	}
	lines := []string{scr.c.th.Rule(w, title, remark)}
	if scr.c.t.Result != nil && scr.c.t.Result.Text != "" {
		for i, l := range scr.c.th.Below(w, 4, 3, term.Plain, scr.c.t.Result.Text) {
			if i == 0 {
				l = "  " + scr.c.th.Paint(term.Good, scr.c.th.OK+" ") + strings.TrimPrefix(l, "    ")
			}
			lines = append(lines, l)
		}
	}
	if scr.c.plan != nil && scr.c.plan.Rehearsal {
		lines = append(append(lines, ""), view.Rehearsed(scr.c.page(), w, scr.c.t.Steps)...)
	}
	if scr.c.t.Result == nil && scr.c.err != nil {
		x := view.Explain(scr.c.err, scr.c.deps.Commands)
		lines = append(lines, scr.c.th.Below(w, 2, 3, term.Plain, x.What)...)
		lines = append(lines, scr.c.th.Below(w, 2, 3, term.Faint, x.Remedy)...)
	}
	dir := ""
	if scr.c.home != nil {
		dir = term.Clean(scr.c.home.Dir)
	}
	lines = append(lines, view.FilesWritten(scr.c.page(), w, res.Files, dir)...)
	lines = append(lines, view.NextCommands(scr.c.page(), w, res.Next)...)
	if left := h - len(lines); left > len(scr.c.t.Machines)+1 && len(scr.c.t.Machines) > 0 {
		lines = append(lines, "")
		lines = append(lines, scr.c.run.machinesView(w, min(len(scr.c.t.Machines), left-2))...)
	}
	return lines
}

// causeLines is the maximum number of lines of the failed operation and of its cause.
const causeLines = 4

func (scr *resultScreen) failureView(w, h int) []string {
	rest := "l shows the log"
	if !scr.c.ran {
		rest = "y copies them" // there is no log yet
	}
	lines := view.ProblemWithin(scr.c.page(), w, causeLines, rest, scr.c.err)
	if !scr.c.ran && scr.c.upgrading() {
		return append(lines, "", scr.c.th.Row(w).Add(term.Plain, "   ").Add(term.Faint, "Nothing has been changed. r checks and plans again.").String())
	}
	if !scr.c.ran {
		return append(lines, "", scr.c.th.Row(w).Add(term.Plain, "   ").Add(term.Faint, "Nothing has been created.").String())
	}
	lines = append(lines, scr.c.th.Rule(w, "State", view.StepsRemark(scr.c.page(), &scr.c.t)))
	for i := range scr.c.t.Steps {
		s := &scr.c.t.Steps[i]
		if s.State == "" {
			continue
		}
		sign, st := view.StepSign(scr.c.page(), s, scr.c.running)
		r := scr.c.th.Row(w).Add(term.Plain, "  ").Add(st, sign).Add(term.Plain, " ").Col(term.Plain, s.Title, min(48, w-24))
		lines = append(lines, r.Right(term.Faint, term.Duration(s.Took)).String())
	}
	ready, wanted := scr.c.t.Ready()
	on := "Finished steps are kept; r or the same command resumes."
	if scr.deadEnd() {
		on = "The same command cannot resume: see the fix."
	}
	nodes := fmt.Sprintf("nodes %d/%d ready", ready, wanted)
	if scr.c.upgrading() {
		n, total := scr.c.atTarget()
		if nodes = fmt.Sprintf("%d/%d nodes at the target", n, total); total == 0 {
			nodes = "No node was replaced"
		}
	}
	lines = append(lines, scr.c.th.Below(w, 4, 2, term.Faint, nodes+". "+on)...)
	if scr.c.upgrading() {
		lines = append(lines, scr.c.th.Row(w).Pad(4).Add(term.Faint, "come back: ").Add(term.Accent, scr.c.resumeCommand()).String())
	}
	if room := h - len(lines); room > 3 {
		lines = append(lines, scr.c.run.logTail(w, room)...)
	}
	return lines
}

// logScreen is the state of the log screen.
type logScreen struct {
	defaults
	c      *console
	follow bool
	at     int // line under the cursor, among those that match
	filter string
	typing bool
	level  int // index into view.LogLevels: the lowest level shown
	wrap   bool
}

func (scr *logScreen) title() string   { return "log" }
func (scr *logScreen) command() string { return scr.c.runCommand() }
func (scr *logScreen) takesText() bool { return scr.typing }

// The lines around the log are those of the screen from which it was opened.

func (scr *logScreen) mode() string   { return scr.c.back.mode() }
func (scr *logScreen) rail() string   { return scr.c.back.rail() }
func (scr *logScreen) why() []string  { return scr.c.back.why() }
func (scr *logScreen) safety() string { return scr.c.back.safety() }

func (scr *logScreen) keys() []binding {
	return []binding{
		on("/", "/", "filter", "find", act(func() { scr.typing = true })).footed("filter"),
		on("e", "e", "toggle: warnings and errors only", "find", act(func() { scr.level = (scr.level + 2) % 4 })).footed("errors"),
		on("w", "w", "wrap long lines", "view", act(func() { scr.wrap = !scr.wrap })).footed("wrap"),
		on("up k", "↑ k", "up", "move", act(func() { scr.move(-1) })),
		on("down j", "↓ j", "down", "move", act(func() { scr.move(1) })),
		on("pgup ctrl+u", "PgUp", "page up", "move", act(func() { scr.move(-scr.c.h / 2) })),
		on("pgdown ctrl+d", "PgDn", "page down", "move", act(func() { scr.move(scr.c.h / 2) })),
		on("g home", "g", "first line", "move", act(func() { scr.move(-view.LogLines) })),
		on("G end f", "G", "follow the newest", "move", act(func() { scr.follow = true })).footed("follow"),
		on("y", "y", "copy the line", "copy", act(scr.copyLine)).footed("copy line"),
		on("esc l", "Esc", "back", "back", act(func() {
			if scr.filter != "" {
				scr.filter = ""
				return
			}
			scr.c.screen = scr.c.back
		})).footed("back"),
	}
}

// typed handles a key of the filter.
func (v *logScreen) typed(k tea.KeyMsg) {
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
	v.follow = true
}

// matching returns the indices of the lines that match the filter.
func (scr *logScreen) matching() []int {
	words := strings.Fields(strings.ToLower(scr.filter))
	out := make([]int, 0, scr.c.t.Log.Len())
	for i := range scr.c.t.Log.Len() {
		x := scr.c.t.Log.At(i)
		if scr.level > 0 && slices.Index(view.LogLevels, x.Level) < scr.level {
			continue
		}
		if len(words) > 0 {
			text := strings.ToLower(view.Source(x) + " " + x.Text)
			if slices.ContainsFunc(words, func(w string) bool { return !strings.Contains(text, w) }) {
				continue
			}
		}
		out = append(out, i)
	}
	return out
}

func (scr *logScreen) cursor(n int) int {
	if scr.follow {
		return n - 1
	}
	return max(0, min(scr.at, n-1))
}

func (scr *logScreen) move(by int) {
	n := len(scr.matching())
	at := max(0, scr.cursor(n)+by)
	scr.follow = at >= n-1
	scr.at = min(at, max(0, n-1))
}

func (scr *logScreen) copyLine() {
	if m := scr.matching(); len(m) > 0 {
		scr.c.copyText(scr.c.t.Log.At(m[scr.cursor(len(m))]).Text, "the line")
		return
	}
	scr.c.copyText("", "")
}

func (scr *logScreen) view(w, h int) []string {
	m := scr.matching()
	remark := words.Count(scr.c.t.Log.Len(), "line")
	if len(m) != scr.c.t.Log.Len() {
		remark = fmt.Sprintf("%d of %s", len(m), remark)
	}
	if scr.c.t.Log.Dropped > 0 {
		remark += fmt.Sprintf(", %d older lines in the record", scr.c.t.Log.Dropped)
	}
	if scr.follow {
		remark += ", following"
	}
	lines := []string{scr.c.th.Rule(w, "Log", remark)}
	r := scr.c.th.Row(w).Add(term.Plain, " ").Add(term.Accent, "/ ")
	switch {
	case scr.typing:
		r.Add(term.Strong, scr.filter).Add(term.Accent, "▏").Add(term.Faint, "  Enter applies the filter, Esc clears it")
	case scr.filter != "":
		r.Add(term.Plain, scr.filter)
	default:
		r.Add(term.Faint, "no filter")
	}
	if scr.level > 1 {
		r.Right(term.Caution, "level "+view.LogLevels[scr.level]+" and above")
	}
	lines = append(lines, r.String())
	if len(m) == 0 {
		text := "no log lines yet"
		if scr.c.t.Log.Len() > 0 {
			text = "no line matches; Esc clears the filter"
		}
		return append(lines, scr.c.th.Row(w).Add(term.Faint, "   "+text).String())
	}
	at := scr.cursor(len(m))
	room := h - len(lines)
	// Fill the room upwards from the cursor, because wrapped lines take several rows.
	var rows []string
	last := min(len(m)-1, at+room/2)
	first := max(0, last-room-room/2)
	col := view.SourceColumnOf(scr.c.page(), scr.c.w, func(i int) view.LogLine { return scr.c.t.Log.At(m[first+i]) }, last-first+1)
	if col.Node != "" {
		lines[0] = scr.c.th.Rule(w, "Log of "+col.Node, remark)
	}
	for i := last; i >= first && len(rows) < room+room/2; i-- {
		one := scr.entry(scr.c.t.Log.At(m[i]), w, i == at && !scr.follow, col)
		rows = append(one, rows...)
	}
	if n := len(rows); n > room {
		rows = rows[n-room:]
	}
	return append(lines, rows...)
}

func (scr *logScreen) entry(x view.LogLine, w int, here bool, col view.SourceColumn) []string {
	if !scr.wrap {
		if !here {
			return []string{view.LogRow(scr.c.page(), x, w, col)}
		}
		return []string{scr.c.th.Row(w).Add(term.Chosen, term.StripStyle(view.LogRow(scr.c.page(), x, w, col))).String()}
	}
	lead := 10 + col.Width + 1 + 2
	parts := term.Wrap(x.Text, max(10, w-lead))
	first := x
	first.Text = parts[0]
	out := []string{view.LogRow(scr.c.page(), first, w, col)}
	for _, p := range parts[1:] {
		out = append(out, scr.c.th.Row(w).Pad(lead).Add(term.Plain, p).String())
	}
	return out
}
