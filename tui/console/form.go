package console

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"unicode/utf8"

	tea "github.com/charmbracelet/bubbletea"

	"constellation/engine/plan"
	"constellation/tui/term"
	"constellation/tui/view"
)

// form is a list of fields that take text at once: letters go into the selected one.
type form struct {
	c      *console
	fields []formField
	at     int
	// invalid returns an error if the value of a field is not valid; nil: every value is. wrong has the errors to show, by
	// key.
	invalid func(key string) error
	wrong   map[string]error
}

// moreKey is the key of the choice that shows or hides the fields with more set. It is no flag.
const (
	moreKey  = "more"
	moreHide = "hide"
	moreShow = "show"
)

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

// path is the value of a field that names a file or folder. No shell expands ~ in it, so path does.
func (f *form) path(key string) string {
	v := strings.TrimSpace(f.value(key))
	if v != "~" && !strings.HasPrefix(v, "~/") {
		return v
	}
	home, err := os.UserHomeDir()
	if err != nil {
		return v
	}
	return filepath.Join(home, v[1:])
}

// set changes the value of a field.
func (f *form) set(key, value string) {
	for i := range f.fields {
		if f.fields[i].key == key {
			f.fields[i].value = value
		}
	}
}

// exists reports whether the form has a field now. It may be hidden by moreKey.
func (f *form) exists(i int) bool { return f.fields[i].when == nil || f.fields[i].when(f) }

func (f *form) shown(i int) bool {
	return f.exists(i) && (!f.fields[i].more || f.value(moreKey) == moreShow)
}

// validate validates a field and stores its error. An empty field is valid: its default is used.
func (f *form) validate(i int) bool {
	x := &f.fields[i]
	delete(f.wrong, x.key)
	if f.invalid == nil || strings.TrimSpace(x.value) == "" {
		return true
	}
	err := f.invalid(x.key)
	if err == nil {
		return true
	}
	if f.wrong == nil {
		f.wrong = map[string]error{}
	}
	f.wrong[x.key] = err
	return false
}

// valid validates all fields. The cursor moves to the first one that is not valid.
func (f *form) valid() bool {
	first := -1
	for i := range f.fields {
		if f.exists(i) && !f.validate(i) && first < 0 {
			first = i
		}
	}
	if first < 0 {
		return true
	}
	if f.fields[first].more {
		f.set(moreKey, moreShow)
	}
	f.at = first
	return false
}

// more shows or hides fields if the cursor is on moreKey, and reports whether it is there.
func (f *form) more() bool {
	if f.fields[f.at].key != moreKey {
		return false
	}
	f.choose(1)
	return true
}

// help is the line about the selected field; empty if it has none.
func (f *form) help() string { return f.fields[f.at].help }

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
		delete(f.wrong, x.key)
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
	f.validate(f.at)
	for range f.fields {
		if f.at = (f.at + by + len(f.fields)) % len(f.fields); f.shown(f.at) {
			return
		}
	}
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

// view renders the fields around the selected one in h lines. The error of a field is below it.
func (f *form) view(w, h int) []string {
	var lines []string
	at := 0
	for i := range f.fields {
		if !f.shown(i) {
			continue
		}
		if i == f.at {
			at = len(lines)
		}
		lines = append(lines, f.row(w, i))
		if err := f.wrong[f.fields[i].key]; err != nil {
			lines = append(lines, f.c.th.Below(w, 6, 3, term.Bad, f.c.th.Fail+" "+fieldError(err))...)
		}
	}
	from, to := view.Window(len(lines), at, h)
	return lines[from:to]
}

// fieldError is the error of a field, without the operation.
func fieldError(err error) string {
	text := err.Error()
	var e *plan.Error
	if errors.As(err, &e) && e.Err != nil {
		text = e.Err.Error()
	}
	if r := plan.Remedy(err); r != "" {
		text += "; " + r
	}
	return term.Clean(text)
}

// row renders a field.
func (f *form) row(w, i int) string {
	t := f.c.th
	x, here := f.fields[i], i == f.at
	st := term.Plain
	if here {
		st = term.Strong
	}
	flag := x.key
	if flag == moreKey || flag == wayKey {
		flag = ""
	}
	r := t.Row(w).Add(term.Accent, " "+view.Marker(f.c.page(), here)).Col(st, x.title, 14)
	room := max(8, w-r.Used-term.Width(flag)-3)
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
	return r.Right(term.Faint, flag).String()
}
