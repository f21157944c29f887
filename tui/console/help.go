package console

import (
	"slices"

	"constellation/engine/words"
	"constellation/tui/term"
	"constellation/tui/view"
)

// helpPage lists the keys of the screen.
type helpPage struct {
	c    *console
	open bool
}

func (p *helpPage) keys() []binding {
	return []binding{
		on("? esc q enter", "Esc", "back", "back", act(func() { p.open = false })).footed("back"),
		on("ctrl+c", "Ctrl-C", "leave", "leave", p.c.quit.leave),
	}
}

// view lists the keys of the screen in w columns and h lines.
func (p *helpPage) view(w, h int) []string {
	t := p.c.th
	inner := min(w-4, 96)
	type heading struct {
		name string
		rows []binding
	}
	var heads []heading
	all := slices.Clone(p.c.screen.keys())
	for _, b := range p.c.globalKeys() {
		if !slices.ContainsFunc(p.c.screen.keys(), func(s binding) bool { return slices.Equal(s.keys, b.keys) }) {
			all = append(all, b) // the screen overrides the others
		}
	}
	for _, b := range all {
		i := slices.IndexFunc(heads, func(x heading) bool { return x.name == b.group })
		if i < 0 {
			heads = append(heads, heading{name: b.group})
			i = len(heads) - 1
		}
		heads[i].rows = append(heads[i].rows, b)
	}
	var body []string
	for _, hd := range heads {
		for i, b := range hd.rows {
			r := t.Row(inner - 2)
			if i == 0 {
				r.Col(term.Faint, hd.name, 10)
			} else {
				r.Pad(11)
			}
			r.Col(term.Accent, b.label, 12).Add(term.Plain, b.help)
			if why := b.disabled(); why != "" {
				r.Add(term.Faint, "  off now: "+why)
			}
			body = append(body, r.String())
		}
	}
	shown := min(len(body), h-2)
	out := []string{view.BoxTop(p.c.page(), w, inner, " Keys: "+p.c.screen.title()+" ")}
	for _, l := range body[:shown] {
		out = append(out, view.BoxLine(p.c.page(), w, inner, l))
	}
	foot := " all keys shown "
	if shown < len(body) {
		foot = " " + words.Count(len(body)-shown, "more key") + ": make the terminal taller "
	}
	return append(out, view.BoxBottom(p.c.page(), w, inner, foot))
}
