package console

import (
	"fmt"
	"slices"
	"strings"

	tea "github.com/charmbracelet/bubbletea"

	"constellation/engine/words"
	"constellation/tui/term"
	"constellation/tui/view"
)

// logScreen is the state of the log screen.
type logScreen struct {
	defaults
	c      *console
	back   screen // where Esc leads
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
func (scr *logScreen) mode() string    { return scr.c.log.back.mode() }
func (scr *logScreen) rail() string    { return scr.c.log.back.rail() }
func (scr *logScreen) why() []string   { return scr.c.log.back.why() }
func (scr *logScreen) safety() string  { return scr.c.log.back.safety() }

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
			scr.c.screen = scr.c.log.back
		})).footed("back"),
	}
}

// typed handles a key of the filter.
func (v *logScreen) typed(k tea.KeyMsg) {
	v.filter, v.typing = editFilter(v.filter, k)
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
	col := view.SourceColumnOf(scr.c.page(), w, func(i int) view.LogLine { return scr.c.t.Log.At(m[first+i]) }, last-first+1)
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

// show shows the log screen; Esc goes back.
func (scr *logScreen) show() {
	if scr.c.screen != scr.c.log {
		scr.back = scr.c.screen
	}
	scr.c.screen = scr.c.log
	scr.follow = true
}
