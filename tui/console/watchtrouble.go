package console

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	tea "github.com/charmbracelet/bubbletea"

	"constellation/engine/plan"
	"constellation/engine/rollout"
	"constellation/engine/words"
	"constellation/tui/term"
	"constellation/tui/view"
)

// troubleLens shows failures and possible actions.
type troubleLens struct {
	scr    *watchScreen
	choice int // index of the selected action
}

func (l *troubleLens) title() string { return "watch: trouble" }

// trouble is a cause of failure with its machines.
type trouble struct {
	cause string
	nodes []*rollout.BoardNode
}

// choice is a possible action: a change of the rollout, another lens, or a command to copy.
type choice struct {
	title, says, command string
	do                   func() tea.Cmd
}

func (l *troubleLens) keys() []binding {
	return slices.Concat([]binding{
		on("up k", "↑ k", "up", "move", act(func() { l.choice = max(0, l.choice-1) })),
		on("down j", "↓ j", "down", "move", act(func() { l.choice = min(l.choice+1, len(l.choices())-1) })),
		on("enter", "Enter", "do it (asks first), or copy the command", "do", l.choose).footed("choose"),
		l.scr.lensLogKey(),
		on("y", "y", "copy the cause", "copy", act(func() { l.scr.c.copyText(l.cause(), "the cause") })).footed("copy cause"),
		l.scr.backKey(),
	}, l.scr.lensKeys())
}

// troubles are the machines that failed, are retried or are waited for, grouped by cause, the
// most frequent cause first.
func (l *troubleLens) troubles() []trouble {
	b := l.scr.shown()
	var out []trouble
	for n := range b.Moving() {
		if n.State != plan.NodeFailed && n.Attempts < 2 && (b.Wait.Node == "" || n.Name != b.Wait.Node) {
			continue
		}
		cause := term.Clean(n.Text)
		if n.Name == b.Wait.Node {
			cause = cmp.Or(cause, term.Clean(b.Wait.Text))
		}
		cause = cmp.Or(cause, term.Clean(n.State)+", no reason reported")
		i := slices.IndexFunc(out, func(t trouble) bool { return t.cause == cause })
		if i < 0 {
			out = append(out, trouble{cause: cause})
			i = len(out) - 1
		}
		out[i].nodes = append(out[i].nodes, n)
	}
	for _, t := range out {
		slices.SortFunc(t.nodes, func(x, y *rollout.BoardNode) int {
			return cmp.Or(x.Since.Compare(y.Since), strings.Compare(x.Name, y.Name))
		})
	}
	slices.SortFunc(out, func(x, y trouble) int {
		return cmp.Or(len(y.nodes)-len(x.nodes), strings.Compare(x.cause, y.cause))
	})
	return out
}

func (l *troubleLens) none() string {
	b := l.scr.shown()
	if b.Wait.Remedy == "" && b.Exit == 0 && len(l.troubles()) == 0 {
		return "there are no failures"
	}
	return ""
}

// cause is the most important failure in one sentence.
func (l *troubleLens) cause() string {
	b := l.scr.shown()
	switch t := l.troubles(); {
	case b.Wait.Remedy != "":
		return term.Clean(b.Wait.Text)
	case b.Result != nil && b.Exit != 0:
		return term.Clean(b.Outcome)
	case len(t) > 0:
		return term.Clean(t[0].nodes[0].Name) + ": " + t[0].cause
	}
	return ""
}

func (l *troubleLens) choices() []choice {
	b := l.scr.shown()
	var out []choice
	remedy := cmp.Or(b.Wait.Remedy, b.Remedy)
	if _, rest, ok := strings.Cut(remedy, "`"); ok {
		if cmd, _, ok := strings.Cut(rest, "`"); ok {
			out = append(out, choice{title: "copy the suggested command", command: l.scr.c.deps.Commands.Text("`" + term.Clean(cmd) + "`")})
		}
	}
	if t := l.troubles(); len(t) > 0 {
		n := t[0].nodes[0]
		out = append(out, choice{title: "show " + term.Clean(n.Name), says: "the first one, with its log", do: func() tea.Cmd { l.scr.openNode(n.Name); return nil }})
		if len(t[0].nodes) > 1 {
			out = append(out, choice{title: fmt.Sprintf("list the %d affected machines", len(t[0].nodes)), says: "in the table", do: func() tea.Cmd {
				l.scr.lens, l.scr.table.filter = lensTable, "state:"+term.Clean(n.State)
				return nil
			}})
		}
	}
	for _, k := range l.scr.c.rollout.keys() {
		if k.disabled() == "" {
			what, says, _ := strings.Cut(k.help, ": ")
			out = append(out, choice{title: what, says: says, do: k.do})
		}
	}
	return append(out, choice{title: "leave, and come back later", says: "to reattach", command: l.scr.c.deps.Commands.Command("watch")})
}

// choose runs the selected action.
func (l *troubleLens) choose() tea.Cmd {
	list := l.choices()
	x := list[min(l.choice, len(list)-1)]
	switch {
	case x.do != nil:
		return x.do()
	default:
		l.scr.c.copyText(strings.Trim(x.command, "`"), "the command")
	}
	return nil
}

// view renders the failures, their scope, and the possible actions.
func (l *troubleLens) view(b *rollout.Board, w, h int) []string {
	lines := []string{l.scr.c.th.Rule(w, "What happened", "")}
	cause := l.cause()
	if cause == "" {
		lines = append(lines, l.scr.c.th.Row(w).Add(term.Good, "  "+l.scr.c.th.OK+" ").Add(term.Plain, "there are no failures").String())
	} else {
		lines = append(lines, l.scr.c.th.Below(w, 2, 4, term.Strong, cause)...)
	}
	if remedy := term.Clean(cmp.Or(b.Wait.Remedy, b.Remedy)); remedy != "" {
		lines = append(lines, l.scr.c.th.Below(w, 2, 3, term.Accent, "To do: "+l.scr.c.deps.Commands.Text(remedy))...)
	}
	all := l.troubles()
	for i, t := range all {
		if i == 4 || len(lines) > h/2 {
			lines = append(lines, l.scr.c.th.Row(w).Pad(2).Add(term.Faint, fmt.Sprintf("… %d more causes", len(all)-i)).String())
			break
		}
		r := l.scr.c.th.Row(w).Pad(2).Add(term.Bad, l.scr.c.th.Fail+" ").Add(term.Plain, words.Count(len(t.nodes), "machine"))
		if t.cause != cause { // else the first line has it
			r.Add(term.Plain, ": "+t.cause)
		}
		lines = append(lines, r.String())
		var names []string
		for _, n := range t.nodes[:min(len(t.nodes), 12)] {
			names = append(names, term.Clean(n.Name))
		}
		if more := len(t.nodes) - len(names); more > 0 {
			names = append(names, fmt.Sprintf("and %d more", more))
		}
		lines = append(lines, l.scr.c.th.Row(w).Pad(4).Add(term.Faint, "since "+t.nodes[0].Since.UTC().Format("15:04:05Z")+"  "+strings.Join(names, " ")).String())
	}
	lines = append(lines, l.scr.c.th.Rule(w, "Scope", ""))
	done, total := b.Places()
	lines = append(lines, l.scr.c.th.Row(w).Pad(2).Add(term.Plain, fmt.Sprintf("%d of %d at the target, %d outdated, %d in progress, %d failed", done, total, b.Count(plan.NodeOutdated), b.InFlight(), b.Count(plan.NodeFailed))).String())
	var hit, spared []string
	for _, g := range b.Groups() {
		if g.Counts[plan.NodeFailed] > 0 {
			hit = append(hit, fmt.Sprintf("%s %d of %d", term.Clean(g.Name), g.Counts[plan.NodeFailed], g.Total))
		} else if g.Total > 0 {
			spared = append(spared, term.Clean(g.Name))
		}
	}
	if len(hit) > 0 {
		lines = append(lines, l.scr.c.th.Row(w).Pad(2).Add(term.Plain, "failed in: "+strings.Join(hit, ", ")).String())
	}
	if len(hit) > 0 && len(spared) > 0 {
		lines = append(lines, l.scr.c.th.Row(w).Pad(2).Add(term.Faint, "no failures in: "+strings.Join(spared, ", ")).String())
	}
	lines = append(lines, l.scr.c.th.Rule(w, "Actions", "changes need a confirmation"))
	list := l.choices()
	at := min(l.choice, len(list)-1)
	from, to := view.Window(len(list), at, max(1, h-len(lines)))
	for i := from; i < to; i++ {
		x := list[i]
		st := term.Plain
		if i == at {
			st = term.Strong
		}
		lines = append(lines, l.scr.c.th.Row(w).Add(term.Plain, " ").Add(term.Accent, view.Marker(l.scr.page(), i == at)).Col(st, x.title, 32).Add(term.Accent, strings.Trim(x.command, "`")).Add(term.Faint, "  "+x.says).String())
	}
	return lines
}
