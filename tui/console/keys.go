package console

import (
	"slices"
	"strings"

	tea "github.com/charmbracelet/bubbletea"

	"constellation/tui/term"
)

// binding is a key and its action. Key line, help, palette and dispatch all use the same
// tables of bindings, so they cannot differ.
type binding struct {
	keys      []string // as Bubble Tea names them
	label     string   // as shown: "↑↓ jk"
	help      string   // the action, in the imperative
	group     string   // heading in the help
	footLabel string   // label in the key line; empty: not shown there
	// off returns why the key is disabled; nil or "" means that it works.
	off func() string
	// effect is set if the action changes the cluster, or sends requests that others can notice.
	effect bool
	do     func() tea.Cmd
}

func (b binding) disabled() string {
	if b.off == nil {
		return ""
	}
	return b.off()
}

// on makes a binding.
func on(keys, label, help, group string, do func() tea.Cmd) binding {
	return binding{keys: strings.Fields(keys), label: label, help: help, group: group, do: do}
}

func (b binding) footed(word string) binding          { b.footLabel = word; return b }
func (b binding) unless(reason func() string) binding { b.off = reason; return b }
func (b binding) effects() binding                    { b.effect = true; return b }

// act wraps an action that returns no command.
func act(f func()) func() tea.Cmd {
	return func() tea.Cmd { f(); return nil }
}

// bindings are the active keys, those of the innermost overlay first.
func (c *console) bindings() []binding {
	switch {
	case c.quit.asking:
		return c.quit.keys()
	case c.rollout.prompt != nil:
		return c.rollout.promptKeys()
	case c.guard.types:
		return c.guard.promptKeys()
	case c.secret.open():
		return c.secret.keys()
	case c.help.open:
		return c.help.keys()
	case c.pal.open:
		return c.pal.keys(c)
	}
	if keys := c.screen.promptKeys(); keys != nil {
		return keys
	}
	return c.actions()
}

// actions are the bindings of the screen, then those that every screen has.
func (c *console) actions() []binding {
	return c.guard.over(slices.Concat(c.guard.keys(), c.screen.keys(), c.globalKeys()))
}

func (c *console) globalKeys() []binding {
	return []binding{
		on("?", "?", "show these keys", "anywhere", act(func() { c.help.open = true })).footed("help"),
		on(":", ":", "search for an action by name", "anywhere", act(func() { c.pal.open = true })),
		on("Y", "Y", "copy the equivalent command", "anywhere", act(func() { c.copyText(c.screen.command(), "the command") })),
		on("F ctrl+l", "F", "redraw the screen", "anywhere", act(func() { c.deps.redraw() })),
		on("q ctrl+c", "q", "leave", "leave", c.quit.leave),
	}
}

// keys handles a key message. On a slow line one message holds several keys. Pasted text
// goes into a text field or is dropped: it is never a command.
func (c *console) keys(k tea.KeyMsg) tea.Cmd {
	if k.Type != tea.KeyRunes || len(k.Runes) < 2 || c.typing() {
		return c.key(k)
	}
	if k.Paste {
		return nil
	}
	var cmds []tea.Cmd
	for i, r := range k.Runes {
		if c.typing() {
			cmds = append(cmds, c.key(tea.KeyMsg{Type: tea.KeyRunes, Runes: k.Runes[i:]}))
			break
		}
		cmds = append(cmds, c.key(tea.KeyMsg{Type: tea.KeyRunes, Runes: []rune{r}}))
	}
	return tea.Batch(cmds...)
}

// key finds the binding of a key and runs it.
func (c *console) key(k tea.KeyMsg) tea.Cmd {
	c.note, c.lastNote = "", ""
	if c.typing() && c.typed(k) {
		return nil
	}
	name := k.String()
	for _, b := range c.bindings() {
		if !slices.Contains(b.keys, name) {
			continue
		}
		if why := b.disabled(); why != "" {
			c.note = b.label + " is off: " + why
			return nil
		}
		return b.do()
	}
	return nil
}

// keyLine is the line at the bottom with the most useful keys, as many as fit. The help key
// always fits. Disabled keys are left out except for Enter, so that the user sees that it
// does not work yet.
func (c *console) keyLine(w int) string {
	leave := ""
	if !c.quit.asking && !c.help.open && !c.pal.open && !c.guard.types && !c.secret.open() && c.rollout.prompt == nil {
		leave = "q " + c.quit.label()
	}
	if s, ok := c.screen.(textKeys); ok && s.takesText() {
		leave = "" // q is text
	}
	shown := c.bindings()
	helps := slices.IndexFunc(shown, func(b binding) bool { return b.label == "?" && b.footLabel != "" })
	end := w - term.Width(leave) - 3 // of the columns for keys
	if helps >= 0 {
		end -= term.Width(shown[helps].label) + term.Width(shown[helps].footLabel) + 3
	}
	r := c.th.Row(w).Add(term.Plain, " ")
	for i, b := range shown {
		if i == helps {
			end = w - term.Width(leave) - 3
		}
		if b.footLabel == "" {
			continue
		}
		st, word := term.Accent, b.footLabel
		if b.disabled() != "" {
			if b.label != "Enter" {
				continue
			}
			st, word = term.Faint, word+" (off)"
		}
		if r.Used+term.Width(b.label)+term.Width(word)+3 > end {
			continue // a shorter one may fit
		}
		if r.Used > 1 {
			r.Add(term.Plain, "  ")
		}
		r.Add(st, b.label).Add(term.Faint, " "+word)
	}
	return r.Right(term.Faint, leave).String()
}

// typing reports whether keys go into a text field.
func (c *console) typing() bool {
	if c.quit.asking || c.help.open || c.rollout.prompt != nil {
		return false
	}
	return c.guard.types || c.secret.open() || c.pal.open || c.screen.takesText()
}

// textKeys is a screen with keys that work while it takes text.
type textKeys interface {
	takesText() bool
	bound(tea.KeyMsg) bool
}

// typed passes a key to the open text field. It reports false for keys that keep their
// binding.
func (c *console) typed(k tea.KeyMsg) bool {
	switch {
	case k.Type == tea.KeyCtrlC:
		return false
	case c.guard.types:
		return c.guard.typed(k)
	case c.secret.open():
		return c.secret.typed(k)
	case c.pal.open:
		return c.pal.typed(k)
	}
	if s, ok := c.screen.(textKeys); ok && s.bound(k) {
		return false
	}
	c.screen.typed(k)
	return true
}

// editFilter returns the filter after a key, and whether the user goes on typing it.
func editFilter(filter string, k tea.KeyMsg) (edited string, typing bool) {
	switch k.Type {
	case tea.KeyEnter:
		return filter, false
	case tea.KeyEsc:
		return "", false
	case tea.KeyBackspace:
		if r := []rune(filter); len(r) > 0 {
			filter = string(r[:len(r)-1])
		}
	case tea.KeyCtrlU:
		filter = ""
	case tea.KeyRunes, tea.KeySpace:
		filter += term.Clean(string(k.Runes))
	}
	return filter, true
}
