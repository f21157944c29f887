package console

import (
	"slices"
	"strings"
	"unicode/utf8"

	tea "github.com/charmbracelet/bubbletea"

	"constellation/tui/term"
	"constellation/tui/view"
)

// form is a list of fields that take text at once: letters go into the selected one.
type form struct {
	c      *console
	fields []formField
	at     int
}

// value returns the value of a field.
func (f *form) value(key string) string {
	for _, x := range f.fields {
		if x.key == key {
			return x.value
		}
	}
	return ""
}

// list returns the values of a field, separated by spaces or commas.
func (f *form) list(key string) []string {
	return strings.FieldsFunc(f.value(key), func(r rune) bool { return r == ' ' || r == ',' })
}

func (f *form) yes(key string) bool { return f.value(key) == "yes" }

// bound reports whether a key has a binding and is no text.
func (f *form) bound(k tea.KeyMsg) bool {
	switch k.Type {
	case tea.KeyRunes, tea.KeySpace, tea.KeyBackspace, tea.KeyCtrlU:
		return false
	}
	return true
}

// typed changes the selected field. A space chooses the next choice.
func (f *form) typed(k tea.KeyMsg) {
	x := &f.fields[f.at]
	switch {
	case len(x.choices) == 0:
		x.value, _ = editFilter(x.value, k)
	case k.Type == tea.KeySpace:
		f.choose(1)
	}
}

func (f *form) choose(by int) {
	if x := &f.fields[f.at]; len(x.choices) > 0 {
		i := slices.Index(x.choices, x.value)
		x.value = x.choices[(i+by+len(x.choices))%len(x.choices)]
	}
}

func (f *form) move(by int) {
	f.at = (f.at + by + len(f.fields)) % len(f.fields)
}

// keys are the keys of the form; submit and back are the actions of Enter and Esc.
func (f *form) keys(word string, submit func() tea.Cmd, back func()) []binding {
	return []binding{
		on("enter", "Enter", word, "form", submit).footed(word),
		on("down tab", "↓ Tab", "next field", "move", act(func() { f.move(1) })).footed("next field"),
		on("up shift+tab", "↑", "previous field", "move", act(func() { f.move(-1) })),
		on("right", "← →", "next choice", "form", act(func() { f.choose(1) })).footed("choose"),
		on("left", "←", "previous choice", "form", act(func() { f.choose(-1) })),
		on("esc", "Esc", "back", "back", act(back)).footed("back"),
		on("ctrl+c", "Ctrl-C", "leave", "leave", f.c.quit.leave).footed("leave"),
	}
}

// page is the form with a heading, and the error of the last values.
func (f *form) page(w, h int, title, remark string, err error) []string {
	pg := f.c.page()
	var below []string
	if err != nil {
		below = view.ProblemWithin(pg, w, 2, "correct the field", err)
	}
	return append(append([]string{pg.Rule(w, title, remark)}, f.view(w, max(2, h-1-len(below)))...), below...)
}

// view renders the fields around the selected one in h lines.
func (f *form) view(w, h int) (lines []string) {
	t := f.c.th
	from, to := view.Window(len(f.fields), f.at, h)
	for i := from; i < to; i++ {
		x, here := f.fields[i], i == f.at
		st := term.Plain
		if here {
			st = term.Strong
		}
		r := t.Row(w).Add(term.Accent, " "+view.Marker(f.c.page(), here)).Col(st, x.title, 14)
		room := max(8, w-r.Used-term.Width(x.key)-3)
		switch value := term.Clean(x.value); {
		case len(x.choices) > 0:
			for _, v := range x.choices {
				if v == x.value {
					r.Add(term.Chosen, " "+v+" ")
				} else {
					r.Add(term.Faint, " "+v+" ")
				}
			}
		case here:
			for term.Width(value) > room-2 { // the end, where text is added, is visible
				_, n := utf8.DecodeRuneInString(value)
				value = value[n:]
			}
			r.Add(term.Plain, value).Add(term.Accent, "▏")
			if value == "" {
				r.Add(term.Faint, term.Cut(x.hint, room-2, t.Ellipsis))
			}
		case value == "":
			r.Add(term.Faint, "-")
		default:
			r.Add(term.Plain, term.Cut(value, room, t.Ellipsis))
		}
		lines = append(lines, r.Right(term.Faint, x.key).String())
	}
	return lines
}
