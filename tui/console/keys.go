package console

import (
	"slices"
	"strings"

	tea "github.com/charmbracelet/bubbletea"

	"constellation/engine/words"
	"constellation/tui/term"
	"constellation/tui/view"
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
	do  func() tea.Cmd
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

// act wraps an action that returns no command.
func act(f func()) func() tea.Cmd {
	return func() tea.Cmd { f(); return nil }
}

// bindings are the active keys, those of the innermost overlay first.
func (c *console) bindings() []binding {
	switch {
	case c.confirmLeave && c.backup.running:
		return c.stopBackupKeys()
	case c.confirmLeave:
		return c.leaveKeys()
	case c.rolloutPrompt != nil:
		return c.rolloutPromptKeys()
	case c.help:
		return c.helpKeys()
	case c.pal.open:
		return c.pal.keys(c)
	}
	if keys := c.screen.promptKeys(); keys != nil {
		return keys
	}
	return c.actions()
}

// actions are the bindings of the screen, then those that every screen has.
func (c *console) actions() []binding { return slices.Concat(c.screen.keys(), c.globalKeys()) }

func (c *console) globalKeys() []binding {
	return []binding{
		on("?", "?", "show these keys", "anywhere", act(func() { c.help = true })).footed("help"),
		on(":", ":", "search for an action by name", "anywhere", act(func() { c.pal.open = true })),
		on("Y", "Y", "copy the equivalent command", "anywhere", act(func() { c.copyText(c.screen.command(), "the command") })),
		on("F ctrl+l", "F", "redraw the screen", "anywhere", act(func() { c.deps.redraw() })),
		on("q ctrl+c", "q", "leave", "leave", c.leave),
	}
}

func (c *console) leaveKeys() []binding {
	return []binding{
		on("y enter", "Enter", "leave; the run can be resumed", "leave", c.detach).footed("leave, resume later"),
		on("ctrl+c", "Ctrl-C", "leave at once", "leave", c.interruptAgain).footed("leave at once"),
		on("n esc q", "Esc", "stay", "leave", act(func() { c.confirmLeave = false })).footed("stay"),
	}
}

func (c *console) stopBackupKeys() []binding {
	return []binding{
		on("y enter ctrl+c", "Enter", "stop the backup, delete its files, and leave", "leave", c.detach).footed("stop it and leave"),
		on("n esc q", "Esc", "stay", "leave", act(func() { c.confirmLeave = false })).footed("stay"),
	}
}

func (c *console) helpKeys() []binding {
	return []binding{
		on("? esc q enter", "Esc", "back", "back", act(func() { c.help = false })).footed("back"),
		on("ctrl+c", "Ctrl-C", "leave", "leave", c.leave),
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
	if !c.confirmLeave && !c.help && !c.pal.open && c.rolloutPrompt == nil {
		leave = "q " + c.quitLabel()
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

// helpView lists the keys of the screen in w columns and h lines.
func (c *console) helpView(w, h int) []string {
	t := c.th
	inner := min(w-4, 96)
	type heading struct {
		name string
		rows []binding
	}
	var heads []heading
	all := slices.Clone(c.screen.keys())
	for _, b := range c.globalKeys() {
		if !slices.ContainsFunc(c.screen.keys(), func(s binding) bool { return slices.Equal(s.keys, b.keys) }) {
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
	out := []string{view.BoxTop(c.page(), w, inner, " Keys: "+c.screen.title()+" ")}
	for _, l := range body[:shown] {
		out = append(out, view.BoxLine(c.page(), w, inner, l))
	}
	foot := " all keys shown "
	if shown < len(body) {
		foot = " " + words.Count(len(body)-shown, "more key") + ": make the terminal taller "
	}
	return append(out, view.BoxBottom(c.page(), w, inner, foot))
}

// typing reports whether keys go into a text field.
func (c *console) typing() bool {
	if c.confirmLeave || c.help || c.rolloutPrompt != nil {
		return false
	}
	return c.pal.open || c.screen.takesText()
}

// typed passes a key to the open text field. It reports false for keys that keep their
// binding.
func (c *console) typed(k tea.KeyMsg) bool {
	switch {
	case k.Type == tea.KeyCtrlC:
		return false
	case c.pal.open:
		return c.pal.typed(k)
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
