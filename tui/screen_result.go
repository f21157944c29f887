package tui

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	tea "github.com/charmbracelet/bubbletea"
	"github.com/charmbracelet/x/ansi"

	"constellation/engine"
	"constellation/tui/term"
	"constellation/tui/view"
)

// resultScreen shows how a run ended.
type resultScreen struct{ c *console }

var resultKeys = []binding{
	on("enter", "Enter", "home", "do", (*console).goHome).footed("home").unless(func(c *console) string {
		if !c.succeeded() && !c.upgrading() {
			return "there is no cluster to show; r retries"
		}
		return ""
	}),
	on("r", "r", "retry; finished steps are skipped", "do", (*console).retry).footed("retry").unless(func(c *console) string {
		if c.succeeded() {
			return "the run succeeded"
		}
		if c.deadEnd() {
			return "a retry would fail the same way; apply the fix first"
		}
		return ""
	}),
	watchKey,
	on("l", "l", "full log", "view", act(func(c *console) { c.openLog() })).footed("full log"),
	on("y", "y", "copy the next command, or the cause", "copy", act((*console).copyResult)).footed("copy"),
	on("esc", "Esc", "home", "back", (*console).goHome),
}

// deadEnd reports whether every retry of this plan must fail. If the obstacle is outside of
// the plan, such as another run or a file, a retry checks for it again.
func (c *console) deadEnd() bool {
	return c.ran && c.t.Result != nil && c.t.Result.Resume == "" && engine.ExitCode(c.err) == engine.ExitFailed
}

// retry makes a new plan and resumes the run.
func (c *console) retry() tea.Cmd {
	if c.upgrading() {
		return c.openUpgrade(c.upg.start)
	}
	c.resumed = c.ran
	c.err = nil
	if c.ran {
		c.screen = screenRun
		c.plan = nil
		return c.makePlan()
	}
	return c.startPreflight()
}

func (c *console) copyResult() {
	if c.t.Result != nil && c.succeeded() && len(c.t.Result.Next) > 0 {
		c.copyText(c.deps.commands.Line(c.t.Result.Next[0]), "the command")
		return
	}
	if c.err != nil {
		c.copyText(term.Clean(c.err.Error()), "the cause")
		return
	}
	c.copyText("", "")
}

func (c *console) resultView(w, h int) []string {
	if c.succeeded() {
		return c.successView(w, h)
	}
	return c.failureView(w, h)
}

func (c *console) successView(w, h int) []string {
	name := c.t.Cluster
	if name == "" && c.home != nil {
		name = term.Clean(c.home.Cluster)
	}
	if name == "" {
		name = "the cluster"
	}
	remark, title := "", name+" is up"
	if c.upgrading() {
		title = name + " is upgraded"
	}
	var res engine.Result
	if c.t.Result != nil {
		res = c.t.Result.Result
		if res.Nodes > 0 {
			remark = term.Count(res.Nodes, "node") + " ready in " + term.Duration(c.t.Elapsed(c.now))
		}
		switch c.t.Result.Ended {
		case engine.StateNothing:
			title = name + ": nothing to do"
		case engine.StateDetached:
			title = name + " continues on its own"
		}
	}
	switch {
	case c.upgrading() && !c.ran && c.err != nil: // nothing to upgrade
		title = name + ": nothing to do"
	case c.plan != nil && c.plan.Rehearsal:
		title = name + ": rehearsed"
	}
	lines := []string{c.th.Rule(w, title, remark)}
	if c.t.Result != nil && c.t.Result.Text != "" {
		for i, l := range c.th.Below(w, 4, 3, term.Plain, c.t.Result.Text) {
			if i == 0 {
				l = "  " + c.th.Paint(term.Good, c.th.OK+" ") + strings.TrimPrefix(l, "    ")
			}
			lines = append(lines, l)
		}
	}
	if c.plan != nil && c.plan.Rehearsal {
		lines = append(lines, "")
		for i := range c.t.Steps {
			s := &c.t.Steps[i]
			sign, st := view.StepSign(c.page(), s, c.running)
			r := c.th.Row(w).Add(term.Plain, "  ").Add(st, sign).Add(term.Plain, " ").Col(term.Strong, s.ID, 17)
			if s.State == engine.StateSkipped {
				lines = append(lines, r.Add(term.Faint, "already done").String())
				continue
			}
			for n, l := range term.Wrap(cmp.Or(s.Text, s.Title), max(20, w-24)) {
				if n > 0 {
					r = c.th.Row(w).Pad(22)
				}
				lines = append(lines, r.Add(term.Plain, l).String())
			}
		}
	}
	if c.t.Result == nil && c.err != nil {
		x := view.Explain(c.err, c.deps.commands)
		lines = append(lines, c.th.Below(w, 2, 3, term.Plain, x.What)...)
		lines = append(lines, c.th.Below(w, 2, 3, term.Faint, x.Remedy)...)
	}
	if len(res.Files) > 0 {
		dir := ""
		if c.home != nil {
			dir = " in " + term.CutMiddle(term.Clean(c.home.Dir), w-18, c.th.Ellipsis)
		}
		lines = append(lines, "", c.th.Row(w).Add(term.Plain, " ").Add(term.Strong, "Files written"+dir).String())
		names := 20
		for _, f := range res.Files {
			names = max(names, term.Width(c.inWorkspace(f.Path)))
		}
		names = min(names, w/2)
		for _, f := range res.Files {
			r := c.th.Row(w).Pad(2).Col(term.Plain, term.CutMiddle(c.inWorkspace(f.Path), names, c.th.Ellipsis), names)
			if f.Secret {
				r.Col(term.Caution, "SECRET", 6)
			} else {
				r.Pad(7)
			}
			r.Col(term.Faint, term.Clean(f.Mode), 4)
			note := term.Clean(f.Note)
			if r.Fits(" " + note) {
				lines = append(lines, r.Add(term.Plain, " "+note).String())
			} else {
				lines = append(append(lines, r.String()), c.th.Below(w, 4, 2, term.Faint, note)...)
			}
		}
	}
	if len(res.Next) > 0 {
		lines = append(lines, "")
		for i, n := range res.Next {
			for j, l := range strings.Split(ansi.Hardwrap(c.deps.commands.Line(term.Clean(n)), w-8, true), "\n") {
				r := c.th.Row(w)
				if i == 0 && j == 0 {
					r.Add(term.Plain, " ").Col(term.Strong, "Next", 5)
				} else {
					r.Pad(7)
				}
				lines = append(lines, r.Add(term.Accent, l).String())
			}
			if i == 0 {
				lines = append(lines, c.th.Row(w).Pad(7).Add(term.Faint, "y copies it").String())
			}
		}
	}
	if left := h - len(lines); left > len(c.t.Machines)+1 && len(c.t.Machines) > 0 {
		lines = append(lines, "")
		lines = append(lines, c.machinesView(w, min(len(c.t.Machines), left-2))...)
	}
	return lines
}

// inWorkspace is a path relative to the workspace if it is in there.
func (c *console) inWorkspace(path string) string {
	path = term.Clean(path)
	if c.home == nil {
		return path
	}
	if rel, ok := strings.CutPrefix(path, term.Clean(c.home.Dir)+"/"); ok {
		return rel
	}
	return path
}

// causeLines is the maximum number of lines of the failed operation and of its cause.
const causeLines = 4

func (c *console) failureView(w, h int) []string {
	rest := "l shows the log"
	if !c.ran {
		rest = "y copies them" // there is no log yet
	}
	lines := view.ProblemWithin(c.page(), w, causeLines, rest, c.err)
	if !c.ran && c.upgrading() {
		return append(lines, "", c.th.Row(w).Add(term.Plain, "   ").Add(term.Faint, "Nothing has been changed. r checks and plans again.").String())
	}
	if !c.ran {
		return append(lines, "", c.th.Row(w).Add(term.Plain, "   ").Add(term.Faint, "Nothing has been created.").String())
	}
	lines = append(lines, c.th.Rule(w, "State", view.StepsRemark(c.page(), &c.t)))
	for i := range c.t.Steps {
		s := &c.t.Steps[i]
		if s.State == "" {
			continue
		}
		sign, st := view.StepSign(c.page(), s, c.running)
		r := c.th.Row(w).Add(term.Plain, "  ").Add(st, sign).Add(term.Plain, " ").Col(term.Plain, s.Title, min(48, w-24))
		lines = append(lines, r.Right(term.Faint, term.Duration(s.Took)).String())
	}
	ready, wanted := c.t.Ready()
	on := "Finished steps are kept; r or the same command resumes."
	if c.deadEnd() {
		on = "The same command cannot resume: see the fix."
	}
	nodes := fmt.Sprintf("nodes %d/%d ready", ready, wanted)
	if c.upgrading() {
		n, total := c.atTarget()
		if nodes = fmt.Sprintf("%d/%d nodes at the target", n, total); total == 0 {
			nodes = "No node was replaced"
		}
	}
	lines = append(lines, c.th.Below(w, 4, 2, term.Faint, nodes+". "+on)...)
	if c.upgrading() {
		lines = append(lines, c.th.Row(w).Pad(4).Add(term.Faint, "come back: ").Add(term.Accent, c.resumeCommand()).String())
	}
	if room := h - len(lines); room > 3 {
		lines = append(lines, c.logTail(w, room)...)
	}
	return lines
}

// logScreen is the state of the log screen.
type logScreen struct {
	c *console
	follow bool
	at     int // line under the cursor, among those that match
	filter string
	typing bool
	level  int // index into view.LogLevels: the lowest level shown
	wrap   bool
}

var logKeys = []binding{
	on("/", "/", "filter", "find", act(func(c *console) { c.log.typing = true })).footed("filter"),
	on("e", "e", "toggle: warnings and errors only", "find", act(func(c *console) { c.log.level = (c.log.level + 2) % 4 })).footed("errors"),
	on("w", "w", "wrap long lines", "view", act(func(c *console) { c.log.wrap = !c.log.wrap })).footed("wrap"),
	on("up k", "↑ k", "up", "move", act(func(c *console) { c.moveLog(-1) })),
	on("down j", "↓ j", "down", "move", act(func(c *console) { c.moveLog(1) })),
	on("pgup ctrl+u", "PgUp", "page up", "move", act(func(c *console) { c.moveLog(-c.h / 2) })),
	on("pgdown ctrl+d", "PgDn", "page down", "move", act(func(c *console) { c.moveLog(c.h / 2) })),
	on("g home", "g", "first line", "move", act(func(c *console) { c.moveLog(-view.LogLines) })),
	on("G end f", "G", "follow the newest", "move", act(func(c *console) { c.log.follow = true })).footed("follow"),
	on("y", "y", "copy the line", "copy", act((*console).copyLogLine)).footed("copy line"),
	on("esc l", "Esc", "back", "back", act(func(c *console) {
		if c.log.filter != "" {
			c.log.filter = ""
			return
		}
		c.screen = c.back
	})).footed("back"),
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
func (c *console) matching() []int {
	words := strings.Fields(strings.ToLower(c.log.filter))
	out := make([]int, 0, c.t.Log.Len())
	for i := range c.t.Log.Len() {
		x := c.t.Log.At(i)
		if c.log.level > 0 && slices.Index(view.LogLevels, x.Level) < c.log.level {
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

func (c *console) logAt(n int) int {
	if c.log.follow {
		return n - 1
	}
	return max(0, min(c.log.at, n-1))
}

func (c *console) moveLog(by int) {
	n := len(c.matching())
	at := max(0, c.logAt(n)+by)
	c.log.follow = at >= n-1
	c.log.at = min(at, max(0, n-1))
}

func (c *console) copyLogLine() {
	if m := c.matching(); len(m) > 0 {
		c.copyText(c.t.Log.At(m[c.logAt(len(m))]).Text, "the line")
		return
	}
	c.copyText("", "")
}

func (c *console) logView(w, h int) []string {
	m := c.matching()
	remark := term.Count(c.t.Log.Len(), "line")
	if len(m) != c.t.Log.Len() {
		remark = fmt.Sprintf("%d of %s", len(m), remark)
	}
	if c.t.Log.Dropped > 0 {
		remark += fmt.Sprintf(", %d older lines in the record", c.t.Log.Dropped)
	}
	if c.log.follow {
		remark += ", following"
	}
	lines := []string{c.th.Rule(w, "Log", remark)}
	r := c.th.Row(w).Add(term.Plain, " ").Add(term.Accent, "/ ")
	switch {
	case c.log.typing:
		r.Add(term.Strong, c.log.filter).Add(term.Accent, "▏").Add(term.Faint, "  Enter applies the filter, Esc clears it")
	case c.log.filter != "":
		r.Add(term.Plain, c.log.filter)
	default:
		r.Add(term.Faint, "no filter")
	}
	if c.log.level > 1 {
		r.Right(term.Caution, "level "+view.LogLevels[c.log.level]+" and above")
	}
	lines = append(lines, r.String())
	if len(m) == 0 {
		text := "no log lines yet"
		if c.t.Log.Len() > 0 {
			text = "no line matches; Esc clears the filter"
		}
		return append(lines, c.th.Row(w).Add(term.Faint, "   "+text).String())
	}
	at := c.logAt(len(m))
	room := h - len(lines)
	// Fill the room upwards from the cursor, because wrapped lines take several rows.
	var rows []string
	last := min(len(m)-1, at+room/2)
	first := max(0, last-room-room/2)
	col := view.SourceColumnOf(c.page(), c.w, func(i int) view.LogLine { return c.t.Log.At(m[first+i]) }, last-first+1)
	if col.Node != "" {
		lines[0] = c.th.Rule(w, "Log of "+col.Node, remark)
	}
	for i := last; i >= first && len(rows) < room+room/2; i-- {
		one := c.logEntry(c.t.Log.At(m[i]), w, i == at && !c.log.follow, col)
		rows = append(one, rows...)
	}
	if n := len(rows); n > room {
		rows = rows[n-room:]
	}
	return append(lines, rows...)
}

func (c *console) logEntry(x view.LogLine, w int, here bool, col view.SourceColumn) []string {
	if !c.log.wrap {
		if !here {
			return []string{view.LogRow(c.page(), x, w, col)}
		}
		return []string{c.th.Row(w).Add(term.Chosen, term.StripStyle(view.LogRow(c.page(), x, w, col))).String()}
	}
	lead := 10 + col.Width + 1 + 2
	parts := term.Wrap(x.Text, max(10, w-lead))
	first := x
	first.Text = parts[0]
	out := []string{view.LogRow(c.page(), first, w, col)}
	for _, p := range parts[1:] {
		out = append(out, c.th.Row(w).Pad(lead).Add(term.Plain, p).String())
	}
	return out
}
