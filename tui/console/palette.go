package console

import (
	"slices"
	"strings"

	tea "github.com/charmbracelet/bubbletea"

	"constellation/engine/words"
	"constellation/tui/term"
	"constellation/tui/view"
)

// palette searches the bindings of the screen by text. It also lists disabled ones, with the
// reason. The zero value is closed.
type palette struct {
	open bool
	text string
	at   int // index among the matches
}

// keys work while the palette is open; other keys are text.
func (p *palette) keys(c *console) []binding {
	return []binding{
		on("enter", "Enter", "run the selected action", "do", func() tea.Cmd { return p.run(c) }).footed("run"),
		on("up ctrl+p", "↑", "up", "move", act(func() { p.at-- })),
		on("down ctrl+n", "↓", "down", "move", act(func() { p.at++ })),
		on("esc", "Esc", "back", "back", act(func() { *p = palette{} })).footed("back"),
		on("ctrl+c", "Ctrl-C", "leave", "leave", c.quit.leave),
	}
}

// matches are the bindings whose key, help, group or label contain all typed words.
func (p *palette) matches(all []binding) (list []binding) {
	words := strings.Fields(strings.ToLower(p.text))
	for _, b := range all {
		if b.label == ":" || slices.ContainsFunc(list, func(o binding) bool { return slices.Equal(o.keys, b.keys) }) {
			continue // the palette itself, or overridden by the screen
		}
		about := strings.ToLower(b.label + " " + b.help + " " + b.group + " " + b.footLabel)
		if !slices.ContainsFunc(words, func(w string) bool { return !strings.Contains(about, w) }) {
			list = append(list, b)
		}
	}
	p.at = max(0, min(p.at, len(list)-1))
	return list
}

// run runs the selected binding, as its key would.
func (p *palette) run(c *console) tea.Cmd {
	list := p.matches(c.actions())
	if len(list) == 0 {
		c.note = "no action matches"
		return nil
	}
	b := list[p.at]
	*p = palette{}
	if why := b.disabled(); why != "" {
		c.note = b.label + " is off: " + why
		return nil
	}
	return b.do()
}

// typed adds a key to the text. It reports false for keys that have a binding.
func (p *palette) typed(k tea.KeyMsg) bool {
	switch k.Type {
	case tea.KeyRunes, tea.KeySpace:
		p.text += term.Clean(string(k.Runes))
	case tea.KeyBackspace:
		if r := []rune(p.text); len(r) > 0 {
			p.text = string(r[:len(r)-1])
		}
	case tea.KeyCtrlU:
		p.text = ""
	default:
		return false
	}
	p.at = 0
	return true
}

// view renders the palette for the actions of a screen, in w columns and at most h lines.
func (p *palette) view(pg view.Page, screen string, actions []binding, w, h int) []string {
	inner := min(w-4, 96)
	list := p.matches(actions)
	out := []string{view.BoxTop(pg, w, inner, " Actions: "+screen+" ")}
	out = append(out, view.BoxLine(pg, w, inner, pg.Row(inner-2).Add(term.Accent, ": ").Add(term.Strong, p.text).Add(term.Accent, "▏").String()))
	from, to := view.Window(len(list), p.at, max(1, h-3))
	for i := from; i < to; i++ {
		b := list[i]
		st := term.Plain
		if i == p.at {
			st = term.Strong
		}
		r := pg.Row(inner-2).Add(term.Accent, view.Marker(pg, i == p.at)).Col(term.Accent, b.label, 8).Add(st, b.help)
		if why := b.disabled(); why != "" {
			r.Add(term.Faint, "  off now: "+why)
		}
		out = append(out, view.BoxLine(pg, w, inner, r.String()))
	}
	foot := " " + words.Count(len(list), "key") + " "
	if len(list) == 0 {
		foot = " no action matches; Esc goes back "
	}
	return append(out, view.BoxBottom(pg, w, inner, foot))
}
