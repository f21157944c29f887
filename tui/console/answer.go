package console

import (
	tea "github.com/charmbracelet/bubbletea"

	"constellation/tui/term"
)

// answerLine shows two answers, of which "Back" is the safe one, and why the other cannot be given, if off is not
// empty. Without a label there is no question.
func (c *console) answerLine(label, off string, yes bool) []string {
	r := c.th.Row(c.w).Add(term.Plain, " ")
	switch {
	case label == "":
		return nil
	case off != "":
		return []string{r.Add(term.Caution, c.th.Warn+" ").Add(term.Strong, term.Clean(off)).String()}
	case yes:
		return []string{r.Add(term.Accent, c.th.Cursor+" ").Add(term.Chosen, " "+label+" ").Add(term.Plain, "   ").Add(term.Faint, "  Back ").String()}
	}
	return []string{r.Add(term.Faint, "   "+label+" ").Add(term.Plain, "   ").Add(term.Accent, c.th.Cursor+" ").Add(term.Chosen, " Back ").String()}
}

// questionKeys are answerKeys while there is a question.
func questionKeys(group string, yes *bool, action func() (label, off string), answer func() tea.Cmd) []binding {
	if label, _ := action(); label == "" {
		return nil
	}
	return answerKeys(group, yes, action, answer)
}

// answerKeys choose and give an answer. action returns the label of the affirmative one, and why it cannot be given.
func answerKeys(group string, yes *bool, action func() (label, off string), answer func() tea.Cmd) []binding {
	return []binding{
		on("enter", "Enter", "confirm the selected answer", group, answer).footed("answer").unless(func() string {
			label, off := action()
			if *yes || label == "" {
				return off
			}
			return ""
		}),
		on("left right tab h l shift+tab", "← →", "choose", group, act(func() { *yes = !*yes })).footed("choose"),
	}
}

// scrollKeys scroll a page. first is the line at its top, most the greatest one.
func (c *console) scrollKeys(first, most *int) []binding {
	by := func(n int) func() tea.Cmd { return act(func() { *first = max(0, min(*first+n, *most)) }) }
	return []binding{
		on("down j", "↓ j", "scroll down", "move", by(1)).footed("scroll"),
		on("up k", "↑ k", "scroll up", "move", by(-1)),
		on("pgdown ctrl+d space", "PgDn", "next page", "move", func() tea.Cmd { return by(max(1, c.h-8))() }),
		on("pgup ctrl+u", "PgUp", "previous page", "move", func() tea.Cmd { return by(-max(1, c.h-8))() }),
		on("home g", "g", "first line", "move", act(func() { *first = 0 })),
		on("end G", "G", "last line", "move", act(func() { *first = *most })),
	}
}

// scrolled is the part of a page that fits into h lines. It limits first, and sets most.
func scrolled(all []string, h int, first, most *int) []string {
	*most = max(0, len(all)-h)
	*first = min(*first, *most)
	return all[*first:min(len(all), *first+h)]
}

// scrolledSafety is the line below the keys of a page: the position, and the command that does the same. A form is not
// scrolled.
func scrolledSafety(s screen, first, most int) string {
	if most > 0 && !s.takesText() {
		return "line " + itoa(first+1) + " of " + itoa(most+1) + "   scripted  " + s.command()
	}
	return "scripted  " + s.command()
}
