package console

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	tea "github.com/charmbracelet/bubbletea"

	"constellation/engine/plan"
	"constellation/engine/words"
	"constellation/tui/term"
	"constellation/tui/view"
)

// upgradeConfirmScreen asks for the acceptance of an upgrade: finding IDs that must be typed, one
// after the other, then yes or no.
type upgradeConfirmScreen struct {
	defaults
	c     *console
	at    int    // index of the finding whose ID is being typed
	text  string // the part typed so far
	wrong bool   // the typed ID did not match
	yes   bool   // the cursor is on yes
	shown time.Time
}

func (scr *upgradeConfirmScreen) title() string   { return "confirm" }
func (scr *upgradeConfirmScreen) command() string { return scr.c.runCommand() }
func (scr *upgradeConfirmScreen) mode() string    { return scr.c.upg.badge() + "confirm" }
func (scr *upgradeConfirmScreen) rail() string    { return scr.c.upg.rail(2) }
func (scr *upgradeConfirmScreen) safety() string  { return "scripted  " + scr.command() }
func (scr *upgradeConfirmScreen) takesText() bool { return scr.typing() }

// why are the answers, or how to type an ID.
func (scr *upgradeConfirmScreen) why() []string {
	c := scr.c
	r := c.th.Row(c.w).Add(term.Plain, " ")
	switch {
	case c.plan == nil:
		return nil
	case len(c.plan.Blocked()) > 0:
		return c.upg.blockedWhy()
	case scr.typing():
		return []string{r.Add(term.Faint, "Enter accepts the name, Esc returns to the plan. Nothing has been changed yet.").String()}
	}
	text := "Upgrade cluster " + term.Clean(c.plan.Cluster) + "?"
	if c.plan.Rehearsal {
		text = "Rehearse it?"
	}
	r.Add(term.Strong, text+"  ")
	for _, a := range []struct {
		word string
		here bool
	}{{"yes", scr.yes}, {"No", !scr.yes}} {
		if a.here {
			r.Add(term.Accent, c.th.Cursor+" ").Add(term.Chosen, " "+a.word+" ").Add(term.Plain, "   ")
		} else {
			r.Add(term.Faint, "   "+a.word+" ").Add(term.Plain, "   ")
		}
	}
	return []string{r.String()}
}

func (scr *upgradeConfirmScreen) keys() []binding {
	return []binding{
		on("enter", "Enter", "accept the name, or confirm the selected answer", "do", scr.answer).footed("answer").unless(func() string {
			if scr.yes {
				return scr.c.guard.reason()
			}
			return ""
		}),
		on("left right tab shift+tab h l", "← →", "choose", "do", act(func() { scr.yes = !scr.yes })).footed("choose"),
		on("y", "y", "choose yes", "do", act(func() { scr.yes = true })),
		on("n", "n", "choose no", "do", act(func() { scr.yes = false })),
		on("esc", "Esc", "back to the plan", "leave", act(func() { scr.c.screen = scr.c.upgradePlan })).footed("plan"),
	}
}

// show shows the confirmation of the upgrade. The safe answer is selected.
func (scr *upgradeConfirmScreen) show() {
	scr.c.screen = scr
	scr.at, scr.text, scr.wrong = 0, "", false
	scr.shown, scr.yes = scr.c.now, scr.c.plan.Rehearsal
}

// typing reports whether the ID of a finding is being typed.
func (scr *upgradeConfirmScreen) typing() bool {
	return scr.c.screen == scr && scr.at < len(scr.c.upg.need.Findings)
}

// typed handles a key of the ID being typed.
func (scr *upgradeConfirmScreen) typed(k tea.KeyMsg) {
	u := &scr.c.upg
	scr.wrong = false
	switch k.Type {
	case tea.KeyEsc:
		scr.c.screen = scr.c.upgradePlan
	case tea.KeyEnter:
		id := u.need.Findings[scr.at].ID
		if strings.TrimSpace(scr.text) != id {
			scr.wrong = true
			return
		}
		scr.text = ""
		for scr.at < len(u.need.Findings) && u.need.Findings[scr.at].ID == id { // two findings may have one ID
			scr.at++
		}
		scr.shown = scr.c.now
	case tea.KeyBackspace:
		if r := []rune(scr.text); len(r) > 0 {
			scr.text = string(r[:len(r)-1])
		}
	case tea.KeyCtrlU:
		scr.text = ""
	case tea.KeyRunes, tea.KeySpace:
		if scr.text += term.Clean(string(k.Runes)); len(scr.text) > 64 {
			scr.text = scr.text[:64]
		}
	}
}

func (scr *upgradeConfirmScreen) answer() tea.Cmd {
	if scr.c.now.Sub(scr.shown) < confirmDelay {
		scr.c.note = "read it first, then press Enter"
		return nil
	}
	if scr.yes {
		return scr.c.upg.run()
	}
	if scr.c.upg.from == scr.c.start {
		return tea.Quit
	}
	scr.c.note = "nothing was changed"
	return scr.c.upg.leave()
}

// view renders the confirmation of an upgrade in h lines: a summary of the changes and
// the findings whose IDs must be typed.
func (scr *upgradeConfirmScreen) view(w, h int) []string {
	p, u := scr.c.plan, &scr.c.upg
	lines := []string{scr.c.th.Rule(w, "Upgrade cluster "+term.Clean(p.Cluster), words.Count(len(p.Steps), "step"))}
	add := func(head string, st term.Style, text string) {
		for i, l := range term.Wrap(text, max(20, w-20)) {
			if i > 0 {
				head = ""
			}
			lines = append(lines, scr.c.th.Row(w).Pad(2).Col(term.Faint, head, 16).Add(st, l).String())
		}
	}
	for _, x := range p.Components {
		if !x.Part {
			add(term.Clean(x.Name), term.Strong, cmp.Or(term.Clean(x.Now), "(none)")+" "+scr.c.th.To+" "+term.Clean(x.NextHop))
		}
	}
	if x := p.Changes; x != nil {
		var groups []string
		for _, g := range slices.Sorted(maps.Keys(x.Nodes)) {
			groups = append(groups, fmt.Sprintf("%d of %s", x.Nodes[g], term.Clean(g)))
		}
		kept := view.InPlaceOf(x)
		if len(groups) > 0 || len(kept) == 0 {
			add("nodes replaced", term.Plain, cmp.Or(strings.Join(groups, ", "), "none"))
		}
		if len(kept) > 0 {
			add("in place", term.Plain, strings.Join(kept, ", "))
		}
		if x.Most > 0 {
			add("takes", term.Plain, view.DurationRange(x.Least, x.Most))
		}
	}
	if s := u.start.Request.Surge; s != "" {
		add("surge", term.Plain, "at most "+term.Clean(s)+" extra machines")
	}
	if i := slices.IndexFunc(p.Steps, func(s plan.Step) bool { return s.Final && !s.Finished }); i >= 0 {
		add("no return from", term.Caution, term.Clean(p.Steps[i].ID)+" on: "+cmp.Or(term.Clean(p.Steps[i].Warning), "the cluster continues on its own"))
	}
	if p.Rehearsal {
		add("rehearsal", term.Plain, "server-side dry run; nothing is changed or recorded")
	}
	if n := len(p.Warnings()) - len(u.need.Findings); n > 0 {
		add("warnings", term.Caution, fmt.Sprintf("%d accepted by yes alone", n))
	}
	if names := plan.IDs(u.need.Findings); len(names) > 0 {
		lines = append(lines, scr.c.th.Rule(w, "To be accepted by name", fmt.Sprintf("%d of %d", len(plan.IDs(u.need.Findings[:scr.at])), len(names))))
		var blocks [][]string
		here := 0
		for i, f := range u.need.Findings {
			if i == scr.at {
				here = len(blocks)
			}
			blocks = append(blocks, scr.findingIDRows(w, i, f))
		}
		from := 0
		for room := h - len(lines) - 1; from < here; from++ { // the one being typed must be visible
			n := 0
			for _, b := range blocks[from : here+1] {
				n += len(b)
			}
			if n <= room {
				break
			}
		}
		for _, b := range blocks[from:] {
			lines = append(lines, b...)
		}
	}
	return lines
}

// findingIDRows render a finding that must be accepted by name.
func (scr *upgradeConfirmScreen) findingIDRows(w, i int, f plan.Finding) []string {
	if i < scr.at {
		return []string{scr.c.th.Row(w).Pad(1).Add(term.Good, scr.c.th.OK+" ").Add(term.Plain, term.Clean(f.ID)).Add(term.Faint, "  accepted: "+term.Clean(f.Title)).String()}
	}
	lines := view.Signed(scr.c.page(), w, term.Caution, scr.c.th.Warn, term.Clean(f.Title))
	if i > scr.at {
		return lines
	}
	lines = append(lines, scr.c.th.Below(w, 3, 2, term.Faint, term.OneLine(term.CleanLines(f.Detail)))...)
	if len(f.Objects) > 0 {
		lines = append(lines, scr.c.th.Below(w, 3, 2, term.Faint, term.Clean(view.SomeNames(f.Objects, 6)))...)
	}
	r := scr.c.th.Row(w).Pad(3).Add(term.Plain, "Type ").Add(term.Strong, term.Clean(f.ID)).Add(term.Plain, " to accept it: ").Add(term.Chosen, " "+scr.text+" ").Add(term.Accent, "▏")
	if scr.wrong {
		r.Add(term.Bad, "  does not match")
	}
	return append(lines, r.String())
}
