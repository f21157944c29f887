package view

import (
	"cmp"
	"fmt"
	"strings"

	"constellation/engine/check"
	"constellation/engine/cluster"
	"constellation/engine/plan"
	"constellation/tui/term"
)

// ClusterRow is a context in the list of clusters.
type ClusterRow struct {
	cluster.Context
	// Glance is how the cluster answered; nil before that.
	Glance *check.Glance
	// Checked is its check in this session; nil without one.
	Checked *check.ClusterCheck
	Guarded bool
}

// Clusters lists contexts in h lines. at is the index of the selected row, first that of the
// first visible one.
func Clusters(pg Page, w, h int, rows []ClusterRow, at, first int) []string {
	names := 16
	for i := range rows {
		names = max(names, term.Width(term.Clean(rows[i].Name))+1)
	}
	names = min(names, max(16, w/3))
	wide := w >= 76
	head := pg.Row(w).Pad(5).Col(term.Faint, "context", names).Col(term.Faint, "version", 14)
	if wide {
		head.Col(term.Faint, "distribution", 13)
	}
	lines := []string{pg.Rule(w, "Clusters", clusterCounts(rows)), head.Col(term.Faint, "ready", 8).Add(term.Faint, "findings").String()}
	fit := max(1, h-len(lines))
	last := min(len(rows), first+fit)
	for i := first; i < last; i++ {
		lines = append(lines, clusterRow(pg, w, names, wide, &rows[i], i == at))
	}
	return lines
}

// VisibleClusters is the number of rows that Clusters shows in h lines.
func VisibleClusters(h int) int { return max(1, h-2) }

func clusterRow(pg Page, w, names int, wide bool, x *ClusterRow, chosen bool) string {
	r := pg.Row(w)
	cursor, name := "  ", term.Plain
	if chosen {
		cursor, name = pg.Cursor+" ", term.Strong
	}
	sign, st := pg.Pending, term.Faint
	switch {
	case x.Glance == nil:
	case x.Glance.State != check.GlanceReachable:
		sign, st = pg.Fail, term.Bad
	case len(x.Glance.Findings) > 0:
		sign, st = pg.Warn, term.Caution
	default:
		sign, st = pg.OK, term.Good
	}
	r.Add(term.Accent, " "+cursor).Add(st, sign).Add(term.Plain, " ")
	label := term.Clean(x.Name)
	if x.Guarded {
		mark := " GUARDED"
		r.Add(name, term.Cut(label, names-len(mark), pg.Ellipsis)).Add(term.Bad, mark).To(5 + names + 1)
	} else {
		r.Col(name, label, names)
	}
	g := x.Glance
	switch {
	case g == nil && x.Plugin != "":
		return r.Add(term.Faint, "needs its credential plugin: press Enter").String()
	case g == nil && x.Server == "":
		return r.Add(term.Bad, "the kubeconfig has no such cluster").String()
	case g == nil:
		return r.Add(term.Faint, "waiting for its answer").String()
	case g.State != check.GlanceReachable:
		return r.Add(term.Plain, string(g.State)).Add(term.Faint, ": "+term.Clean(g.Problem)).String()
	}
	r.Col(term.Plain, term.Clean(g.Kubernetes), 14)
	if wide {
		r.Col(term.Faint, shortDistribution(g), 13)
	}
	ready := 0
	for i := range g.Nodes {
		if g.Nodes[i].Ready {
			ready++
		}
	}
	nodes := fmt.Sprintf("%d/%d", ready, len(g.Nodes))
	switch {
	case g.NodesUnknown != "":
		nodes = "?"
	case g.MoreNodes > 0:
		nodes = fmt.Sprintf("%d/%d+", ready, len(g.Nodes))
	}
	r.Col(term.Plain, nodes, 8)
	if k := x.Checked; k != nil {
		n := map[plan.Severity]int{}
		for _, f := range k.Findings() {
			n[f.Severity]++
		}
		st := term.Good
		switch {
		case n[plan.Block] > 0:
			st = term.Bad
		case n[plan.Warn] > 0:
			st = term.Caution
		}
		return r.Add(st, fmt.Sprintf("%d blocking, %d warn", n[plan.Block], n[plan.Warn])).String()
	}
	switch len(g.Findings) {
	case 0:
		r.Add(term.Faint, "none at a glance")
	case 1:
		r.Add(term.Caution, term.Clean(g.Findings[0].Title))
	default:
		r.Add(term.Caution, fmt.Sprintf("%s and %d more", term.Clean(g.Findings[0].Title), len(g.Findings)-1))
	}
	return r.String()
}

func shortDistribution(g *check.Glance) string {
	if g.Distribution.Name == "unknown" {
		return "not known"
	}
	return g.Distribution.Title
}

// clusterCounts is "12 reachable, 5 not, 3 not asked".
func clusterCounts(rows []ClusterRow) string {
	var up, down, waiting, plugin int
	for i := range rows {
		switch x := &rows[i]; {
		case x.Glance == nil && x.Plugin != "":
			plugin++
		case x.Glance == nil:
			waiting++
		case x.Glance.State == check.GlanceReachable:
			up++
		default:
			down++
		}
	}
	parts := []string{fmt.Sprintf("%d reachable", up)}
	for _, p := range []struct {
		n    int
		what string
	}{{down, "not reachable"}, {waiting, "waiting"}, {plugin, "not queried"}} {
		if p.n > 0 {
			parts = append(parts, fmt.Sprintf("%d %s", p.n, p.what))
		}
	}
	return strings.Join(parts, ", ")
}

// ClusterGlance shows a cluster before its check.
func ClusterGlance(pg Page, w int, x *ClusterRow) []string {
	lines := []string{pg.Rule(w, "Cluster", "")}
	row := func(head, text string) {
		lines = append(lines, pg.Row(w).Pad(2).Col(term.Faint, head, 14).Add(term.Plain, term.Clean(text)).String())
	}
	row("context", x.Name)
	row("API server", cmp.Or(x.Server, "-"))
	if x.Plugin != "" {
		row("credentials", "from its plugin "+x.Plugin)
	}
	g := x.Glance
	if g == nil {
		return lines
	}
	if g.State != check.GlanceReachable {
		row("state", string(g.State)+": "+g.Problem)
		return lines
	}
	row("Kubernetes", g.Kubernetes)
	row("distribution", g.Distribution.Title)
	return append(lines, Findings(pg, w, g.Findings, 4)...)
}

// Guarded draws a frame around lines, in h lines of w columns. The inner width is GuardedWidth.
func Guarded(pg Page, w, h int, title string, lines []string) []string {
	side, bar := "┃", "━"
	if pg.Ascii {
		side, bar = "|", "="
	}
	edge := func(s string) string {
		s = term.Cut(s, w-4, pg.Ellipsis)
		return pg.Paint(term.Bad, bar+bar+s+strings.Repeat(bar, max(0, w-2-term.Width(s))))
	}
	out := []string{edge(" " + title + " ")}
	for i := range max(0, h-2) {
		l := ""
		if i < len(lines) {
			l = lines[i]
		}
		out = append(out, pg.Paint(term.Bad, side)+" "+l+strings.Repeat(" ", max(0, w-4-term.StyledWidth(l)))+" "+pg.Paint(term.Bad, side))
	}
	return append(out, edge(""))
}

// GuardedWidth is the width inside a frame of Guarded.
func GuardedWidth(w int) int { return w - 4 }
