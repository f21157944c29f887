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

// paletteKeys work while the palette is open; other keys are text.
func (c *console) paletteKeys() []binding {
	return []binding{
		on("enter", "Enter", "run the selected action", "do", c.doPalette).footed("run"),
		on("up ctrl+p", "↑", "up", "move", act(func() { c.pal.at-- })),
		on("down ctrl+n", "↓", "down", "move", act(func() { c.pal.at++ })),
		on("esc", "Esc", "back", "back", act(func() { c.pal = palette{} })).footed("back"),
		on("ctrl+c", "Ctrl-C", "leave", "leave", c.leave),
	}
}

// paletteList are the bindings whose key, help, group or label contain all typed words.
func (c *console) paletteList() (list []binding) {
	words := strings.Fields(strings.ToLower(c.pal.text))
	for _, b := range slices.Concat(c.screen.keys(), c.globalKeys()) {
		if b.label == ":" || slices.ContainsFunc(list, func(o binding) bool { return slices.Equal(o.keys, b.keys) }) {
			continue // the palette itself, or overridden by the screen
		}
		about := strings.ToLower(b.label + " " + b.help + " " + b.group + " " + b.footLabel)
		if !slices.ContainsFunc(words, func(w string) bool { return !strings.Contains(about, w) }) {
			list = append(list, b)
		}
	}
	c.pal.at = max(0, min(c.pal.at, len(list)-1))
	return list
}

// doPalette runs the selected binding, as its key would.
func (c *console) doPalette() tea.Cmd {
	list := c.paletteList()
	if len(list) == 0 {
		c.note = "no action matches"
		return nil
	}
	b := list[c.pal.at]
	c.pal = palette{}
	if why := b.disabled(); why != "" {
		c.note = b.label + " is off: " + why
		return nil
	}
	return b.do()
}

// typedPalette adds a key to the text. It reports false for keys that have a binding.
func (c *console) typedPalette(k tea.KeyMsg) bool {
	switch k.Type {
	case tea.KeyRunes, tea.KeySpace:
		c.pal.text += term.Clean(string(k.Runes))
	case tea.KeyBackspace:
		if r := []rune(c.pal.text); len(r) > 0 {
			c.pal.text = string(r[:len(r)-1])
		}
	case tea.KeyCtrlU:
		c.pal.text = ""
	default:
		return false
	}
	c.pal.at = 0
	return true
}

// paletteView renders the palette in w columns and at most h lines.
func (c *console) paletteView(w, h int) []string {
	t, inner := c.th, min(w-4, 96)
	list := c.paletteList()
	out := []string{view.BoxTop(c.page(), w, inner, " Actions: "+c.screen.title()+" ")}
	out = append(out, view.BoxLine(c.page(), w, inner, t.Row(inner-2).Add(term.Accent, ": ").Add(term.Strong, c.pal.text).Add(term.Accent, "▏").String()))
	from, to := view.Window(len(list), c.pal.at, max(1, h-3))
	for i := from; i < to; i++ {
		b := list[i]
		st := term.Plain
		if i == c.pal.at {
			st = term.Strong
		}
		r := t.Row(inner-2).Add(term.Accent, view.Marker(c.page(), i == c.pal.at)).Col(term.Accent, b.label, 8).Add(st, b.help)
		if why := b.disabled(); why != "" {
			r.Add(term.Faint, "  off now: "+why)
		}
		out = append(out, view.BoxLine(c.page(), w, inner, r.String()))
	}
	foot := " " + words.Count(len(list), "key") + " "
	if len(list) == 0 {
		foot = " no action matches; Esc goes back "
	}
	return append(out, view.BoxBottom(c.page(), w, inner, foot))
}
