package console

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	tea "github.com/charmbracelet/bubbletea"

	"constellation/engine/plan"
	"constellation/engine/words"
	"constellation/tui/term"
	"constellation/tui/view"
)

const (
	// machineLogLines is how many lines of a machine's log are kept, machineLogWidth the bytes of each.
	machineLogLines, machineLogWidth = 5000, 4 << 10
)

// machineLogScreen follows the journal of a machine by SSH. Its lines are hostile: tui cleans them before they come
// here.
type machineLogScreen struct {
	defaults
	c       *console
	name    string
	lines   []string
	dropped int
	at      int // line at the bottom, among those that match
	follow  bool
	wrap    bool
	filter  string
	types   bool
	err     error
	ended   bool
}

// machineLogEnded is the end of the log.
type machineLogEnded struct {
	name string
	err  error
}

// open follows the log of a machine.
func (scr *machineLogScreen) open(name string) tea.Cmd {
	*scr = machineLogScreen{c: scr.c, name: name, follow: true}
	scr.c.screen = scr
	login, read := scr.c.machine.login(), scr.c.deps.Machines.Logs
	return scr.c.task.launch("following the log of "+term.Clean(name), scr.events, func(ctx context.Context, emit func(plan.Event)) tea.Msg {
		err := read(ctx, name, login, scr.c.secret.ask, func(line string) {
			emit(plan.Event{Kind: plan.KindLog, Text: line[:min(len(line), machineLogWidth)]})
		})
		return machineLogEnded{name, err}
	})
}

func (scr *machineLogScreen) events(events []plan.Event) tea.Cmd {
	if n := len(events) - machineLogLines; n > 0 {
		events, scr.dropped = events[n:], scr.dropped+n
	}
	for _, e := range events {
		scr.lines = append(scr.lines, journalLine(e.Text))
	}
	if n := len(scr.lines) - machineLogLines; n > 0 {
		scr.lines, scr.dropped = slices.Delete(scr.lines, 0, n), scr.dropped+n
		scr.at = max(0, scr.at-n)
	}
	return nil
}

// journalLine shortens the time of a line of the journal, and leaves out the host.
func journalLine(s string) string {
	s = strings.ToValidUTF8(s, "")
	stamp, rest, _ := strings.Cut(s, " ")
	_, text, ok := strings.Cut(rest, " ")
	for _, layout := range []string{time.RFC3339, "2006-01-02T15:04:05-0700"} {
		if t, err := time.Parse(layout, stamp); err == nil && ok {
			return t.UTC().Format(time.TimeOnly) + " " + text
		}
	}
	return s
}

func (scr *machineLogScreen) take(msg tea.Msg) (tea.Cmd, bool) {
	m, ok := msg.(machineLogEnded)
	if ok && m.name == scr.name {
		scr.ended, scr.err = true, m.err
	}
	return nil, ok
}

func (scr *machineLogScreen) title() string   { return "machine log" }
func (scr *machineLogScreen) takesText() bool { return scr.types }

func (scr *machineLogScreen) mode() string {
	if scr.ended {
		return "ENDED"
	}
	return "LIVE"
}

func (scr *machineLogScreen) command() string {
	return scr.c.deps.Commands.Command("machine logs " + view.QuoteArg(scr.name) + " " + scr.c.machine.login().flags() + " -f")
}

func (scr *machineLogScreen) safety() string { return "scripted  " + scr.command() }

func (scr *machineLogScreen) typed(k tea.KeyMsg) {
	scr.filter, scr.types = editFilter(scr.filter, k)
	scr.follow = true
}

// matching are the lines that have all words of the filter.
func (scr *machineLogScreen) matching() []string {
	want := strings.Fields(strings.ToLower(scr.filter))
	if len(want) == 0 {
		return scr.lines
	}
	var out []string
	for _, l := range scr.lines {
		low := strings.ToLower(l)
		if !slices.ContainsFunc(want, func(w string) bool { return !strings.Contains(low, w) }) {
			out = append(out, l)
		}
	}
	return out
}

func (scr *machineLogScreen) move(by int) {
	n := len(scr.matching())
	if scr.follow {
		scr.at = n - 1
	}
	scr.at = max(0, min(scr.at+by, n-1))
	scr.follow = scr.at >= n-1
}

func (scr *machineLogScreen) view(w, h int) []string {
	pg := scr.c.page()
	m := scr.matching()
	remark := words.Count(len(scr.lines), "line")
	if len(m) != len(scr.lines) {
		remark = fmt.Sprintf("%d of %s", len(m), remark)
	}
	if scr.dropped > 0 {
		remark += fmt.Sprintf(", %d older ones dropped", scr.dropped)
	}
	if scr.follow && !scr.ended {
		remark += ", following"
	}
	lines := []string{pg.Rule(w, "Log of "+term.Clean(scr.name), remark)}
	switch r := pg.Row(w).Add(term.Accent, " / "); {
	case scr.types:
		lines = append(lines, r.Add(term.Strong, scr.filter).Add(term.Accent, term.AsciiIf(pg.Ascii, "▏")).String())
	case scr.filter != "":
		lines = append(lines, r.Add(term.Plain, scr.filter).String())
	}
	var below []string
	if scr.err != nil {
		below = view.ProblemWithin(pg, w, 3, "r repeats", scr.err)
	}
	if len(m) == 0 && scr.err == nil {
		return append(lines, pg.Row(w).Pad(3).Add(term.Faint, "no line yet: bootstrapper, agent, kubelet and containerd write here").String())
	}
	room := max(1, h-len(lines)-len(below))
	last := len(m) - 1
	if !scr.follow {
		last = min(last, max(scr.at, 0))
	}
	var rows []string
	for i := last; i >= 0 && len(rows) < room; i-- {
		rows = append(scr.entry(m[i], w), rows...)
	}
	if n := len(rows) - room; n > 0 {
		rows = rows[n:]
	}
	return append(append(lines, rows...), below...)
}

func (scr *machineLogScreen) entry(l string, w int) (rows []string) {
	if !scr.wrap {
		return []string{scr.c.th.Row(w).Add(term.Plain, " "+l).String()}
	}
	for _, p := range term.Wrap(l, w-2) {
		rows = append(rows, scr.c.th.Row(w).Add(term.Plain, " "+p).String())
	}
	return rows
}

func (scr *machineLogScreen) keys() []binding {
	return []binding{
		on("/", "/", "filter", "find", act(func() { scr.types = true })).footed("filter"),
		on("w", "w", "wrap long lines", "view", act(func() { scr.wrap = !scr.wrap })).footed("wrap"),
		on("up k", "↑ k", "up", "move", act(func() { scr.move(-1) })).footed("scroll"),
		on("down j", "↓ j", "down", "move", act(func() { scr.move(1) })),
		on("pgup ctrl+u", "PgUp", "page up", "move", act(func() { scr.move(-scr.c.h / 2) })),
		on("pgdown ctrl+d", "PgDn", "page down", "move", act(func() { scr.move(scr.c.h / 2) })),
		on("g home", "g", "first line", "move", act(func() { scr.move(-machineLogLines) })),
		on("G end f", "G", "follow the newest", "move", act(func() { scr.follow = true })).footed("follow"),
		on("y", "y", "copy the line at the bottom", "copy", act(func() {
			m, last := scr.matching(), scr.at
			if scr.follow {
				last = len(m) - 1
			}
			if last < 0 || last >= len(m) {
				scr.c.copyText("", "")
				return
			}
			scr.c.copyText(m[last], "the line")
		})).footed("copy line"),
		on("r", "r", "log in again and follow the log", "machine", func() tea.Cmd { return scr.open(scr.name) }).footed("again").unless(func() string {
			if !scr.ended {
				return "the log is being followed"
			}
			return ""
		}),
		on("esc", "Esc", "back to the machine", "back", func() tea.Cmd {
			if scr.filter != "" {
				scr.filter = ""
				return nil
			}
			scr.c.task.drop()
			return scr.c.machine.open(scr.name)
		}).footed("back"),
	}
}
