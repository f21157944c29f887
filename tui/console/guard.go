package console

import (
	"slices"

	tea "github.com/charmbracelet/bubbletea"

	"constellation/tui/term"
	"constellation/tui/view"
)

// guard keeps the console of a guarded cluster read-only until the user types its name.
type guard struct {
	c        *console
	unlocked string // the name that was typed
	types    bool
	text     string
}

// name is the name of the cluster if preferences guard it; empty if not.
func (g *guard) name() string {
	c := g.c
	if c.deps.Guarded == nil {
		return ""
	}
	name := c.deps.Cluster
	if c.home != nil && c.home.Cluster != "" {
		name = c.home.Cluster
	}
	if c.plan != nil && c.plan.Cluster != "" {
		name = c.plan.Cluster
	}
	if name == "" || !c.deps.Guarded(name) {
		return ""
	}
	return term.Clean(name)
}

func (g *guard) locked() bool {
	name := g.name()
	return name != "" && g.unlocked != name
}

// reason is why an effect is disabled; empty if it is not.
func (g *guard) reason() string {
	if g.locked() {
		return "this cluster is guarded; press U and type its name"
	}
	return ""
}

// stops reports whether an effect must not begin, and shows why.
func (g *guard) stops() bool {
	why := g.reason()
	if why != "" {
		g.c.note = why
	}
	return why != ""
}

// keys unlock the cluster.
func (g *guard) keys() []binding {
	if !g.locked() {
		return nil
	}
	return []binding{on("U", "U", "unlock the guarded cluster by typing its name", "changes the cluster", act(func() { g.types, g.text = true, "" })).footed("unlock")}
}

// over disables the keys that change a locked cluster.
func (g *guard) over(keys []binding) []binding {
	if !g.locked() {
		return keys
	}
	keys = slices.Clone(keys)
	for i := range keys {
		if b := keys[i]; b.effect {
			keys[i].off = func() string {
				if why := b.disabled(); why != "" {
					return why
				}
				return g.reason()
			}
		}
	}
	return keys
}

// typed adds a key to the name. It reports false for keys that have a binding.
func (g *guard) typed(k tea.KeyMsg) bool {
	if k.Type == tea.KeyEnter || k.Type == tea.KeyEsc {
		return false
	}
	g.text, _ = editFilter(g.text, k)
	return true
}

// promptKeys work while the name is typed.
func (g *guard) promptKeys() []binding {
	return []binding{
		on("enter", "Enter", "unlock the cluster if the name is right", "changes the cluster", g.unlock).footed("unlock"),
		on("esc", "Esc", "go back; the cluster stays read-only", "back", act(func() { g.types = false })).footed("back"),
		on("ctrl+c", "Ctrl-C", "leave", "leave", func() tea.Cmd { g.types = false; return g.c.quit.leave() }),
	}
}

func (g *guard) unlock() tea.Cmd {
	g.types = false
	name := g.name()
	if g.text != name {
		g.c.note = "that is not the name: the cluster stays read-only"
		return nil
	}
	g.unlocked = name
	if p := g.c.upgradePlan; p.locked && (g.c.screen == p || g.c.screen == g.c.upgradeConfirm) {
		return p.open(g.c.upg.start) // plan with the dry-run requests that were left out
	}
	return nil
}

// prompt replaces the lines above the key line while the name is typed.
func (g *guard) prompt() string {
	return g.c.th.Row(g.c.w).Add(term.Caution, " Type "+g.name()+" to unlock: ").Add(term.Plain, g.text+"▏").String()
}

// framed reports whether the window has room for a frame around a guarded cluster.
func (g *guard) framed() bool {
	return g.name() != "" && view.GuardedWidth(g.c.w) >= view.MinWidth && g.c.h >= view.MinHeight+2
}

// frame draws the frame around a body of h lines with its edges. A small window gets the upper edge.
func (g *guard) frame(h int, body []string) []string {
	title := "guarded: read-only until its name is typed"
	if !g.locked() {
		title = "guarded: unlocked"
	}
	if g.framed() {
		return view.Guarded(g.c.page(), g.c.w, h, title, body)
	}
	return append(view.Guarded(g.c.page(), g.c.w, 2, title, nil)[:1], body...)
}

// bodyWidth is the width of the body of a screen.
func (c *console) bodyWidth() int {
	if c.guard.framed() {
		return view.GuardedWidth(c.w)
	}
	return c.w
}

// bodyRoom is the height of a body in h lines.
func (c *console) bodyRoom(h int) int {
	switch {
	case c.guard.framed():
		return h - 2
	case c.guard.name() != "":
		return h - 1
	}
	return h
}
