package console

import (
	"slices"
	"strings"

	"constellation/engine/rollout"
	"constellation/engine/words"
	"constellation/tui/term"
	"constellation/tui/view"
)

// machineLens shows the details of one machine.
type machineLens struct {
	scr  *watchScreen
	name string
}

func (l *machineLens) title() string { return "watch: node" }

func (l *machineLens) keys() []binding {
	return slices.Concat([]binding{
		on("up k", "↑ k", "older lines", "move", act(func() { l.scr.log.moveLine(-1) })),
		on("down j", "↓ j", "newer lines", "move", act(func() { l.scr.log.moveLine(1) })),
		on("left p", "←", "previous machine", "move", act(func() { l.stepNode(-1) })),
		on("right n", "→", "next machine", "move", act(func() { l.stepNode(1) })).footed("next"),
		on("o", "o", "the other machine of the replacement", "view", act(l.otherNode)).footed("other").unless(func() string {
			if n := l.scr.shown().Node(l.name); n == nil || l.scr.shown().Node(n.Counterpart) == nil {
				return "no other machine is known"
			}
			return ""
		}),
		on("l L", "l", "its log, with filters", "view", act(func() {
			l.scr.log.filter = "node:" + strings.ReplaceAll(l.name, " ", "?") // filter terms cannot contain spaces
			l.scr.showLens(lensLog)
		})).footed("log"),
		on("y", "y", "copy its newest log line, or its state", "copy", act(l.copyNode)).footed("copy"),
		l.scr.backKey(),
	}, l.scr.lensKeys())
}

// stepNode shows the previous or next machine, in the order of the table or, if the machine
// is not in the table, by name.
func (l *machineLens) stepNode(by int) {
	list := l.scr.table.machines()
	i := slices.IndexFunc(list, func(n *rollout.BoardNode) bool { return n.Name == l.name })
	if i < 0 {
		list = list[:0:0]
		for n := range l.scr.shown().Nodes() {
			list = append(list, n)
		}
		slices.SortFunc(list, func(x, y *rollout.BoardNode) int { return strings.Compare(x.Name, y.Name) })
		i = slices.IndexFunc(list, func(n *rollout.BoardNode) bool { return n.Name == l.name })
	}
	if len(list) > 0 {
		l.scr.openNode(list[max(0, min(i+by, len(list)-1))].Name)
	}
}

func (l *machineLens) otherNode() {
	if n := l.scr.shown().Node(l.name); n != nil {
		l.scr.openNode(n.Counterpart)
	}
}

func (l *machineLens) copyNode() {
	if x, ok := l.scr.log.lineAt(); ok {
		l.scr.c.copyText(term.Clean(x.Text), "the line")
		return
	}
	if n := l.scr.shown().Node(l.name); n != nil {
		l.scr.c.copyText(view.NodeLine(l.scr.page(), n), "its state")
		return
	}
	l.scr.c.copyText("", "")
}

// view shows the details of one machine.
func (l *machineLens) view(b *rollout.Board, w, h int) []string {
	n := b.Node(l.name)
	if n == nil {
		return []string{l.scr.c.th.Rule(w, "Machine "+term.Clean(l.name), ""), l.scr.c.th.Row(w).Add(term.Faint, "   not known now; Esc goes back").String()}
	}
	lines := []string{l.scr.c.th.Rule(w, "Machine "+term.Clean(n.Name), "group "+term.Clean(n.Group))}
	pair := []*rollout.BoardNode{n}
	if o := b.Node(n.Counterpart); o != nil {
		pair = []*rollout.BoardNode{o, n}
		if slices.Contains(rollout.StagesOld, n.State) {
			pair = []*rollout.BoardNode{n, o}
		}
	}
	for _, x := range pair {
		lines = append(lines, view.StateHistoryRows(l.scr.page(), b, x, x == n, w)...)
	}
	if len(pair) > 1 && h >= 16 {
		lines = append(lines, view.ReplacementTimeline(l.scr.page(), pair, w)...)
	}
	lines = append(lines, "")
	facts := []string{view.Facts(l.scr.page(), n)}
	if wt := b.Wait; wt.Node == n.Name && wt.Text != "" {
		facts = append(facts, "waiting: "+term.Clean(wt.Text))
	}
	if n.Text != "" {
		facts = append(facts, term.Clean(n.State)+": "+term.Clean(n.Text))
	}
	if page := n.Page(); page != "" && !b.Simulated { // that of an emulated machine does not exist
		facts = append(facts, term.Clean(page))
	}
	for _, f := range facts {
		lines = append(lines, l.scr.c.th.Below(w, 2, 2, term.Plain, f)...)
	}
	list := l.scr.log.lines()
	remark := words.Count(len(list), "line")
	if !l.scr.log.pinned {
		remark += ", following"
	}
	lines = append(lines, l.scr.c.th.Rule(w, "Log", remark))
	if len(list) == 0 {
		return append(lines, l.scr.c.th.Row(w).Add(term.Faint, "   no log lines yet").String())
	}
	return append(lines, l.scr.log.linePart(b, list, w, max(1, h-len(lines)), true)...)
}
