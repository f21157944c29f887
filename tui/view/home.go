package view

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"constellation/engine"
	"constellation/engine/check"
	"constellation/engine/plan"
	"constellation/engine/words"
	"constellation/engine/workspace"
	"constellation/tui/term"
)

// ConfigFile is the name of the configuration in a workspace.
const ConfigFile = "constellation-conf.yaml"

// WorkspaceView shows the workspace while there is no cluster.
func WorkspaceView(pg Page, w int, home *engine.Home) []string {
	words := map[engine.Stage]string{
		engine.StageEmpty:      "This folder has no " + ConfigFile + " yet. Create machines first.",
		engine.StageConfigured: "There is a configuration, but there are no machines yet.",
		engine.StageReady:      "The machines exist. The cluster can be created.",
		engine.StagePartial:    "An init started here and did not finish.",
	}
	lines := []string{
		pg.Rule(w, "Workspace", ""),
		pg.Row(w).Add(term.Plain, "  ").Add(term.Plain, term.Clean(home.Dir)).String(),
		pg.Row(w).Add(term.Plain, "  ").Add(term.Strong, words[home.Stage]).String(),
	}
	return append(lines, Findings(pg, w, home.Problems, 4)...)
}

// findingLines is the maximum number of lines of a finding's detail or remedy.
const findingLines = 4

// Findings lists findings with their remedies.
func Findings(pg Page, w int, list []plan.Finding, most int) []string {
	if len(list) == 0 {
		return nil
	}
	lines := []string{pg.Rule(w, fmt.Sprintf("Needs attention (%d)", len(list)), "")}
	for i, f := range list {
		if i == most {
			lines = append(lines, pg.Row(w).Pad(4).Add(term.Faint, fmt.Sprintf("… %d more", len(list)-most)).String())
			break
		}
		sign, st := severitySign(pg, f.Severity)
		title := term.Wrap(term.Clean(f.Title), w-5)
		if pg.Uncut {
			title = []string{term.Clean(f.Title)}
		}
		r := pg.Row(w).Add(term.Plain, "  ").Add(st, sign).Add(term.Plain, " ").Add(term.Plain, title[0])
		for _, l := range title[1:] {
			lines = append(lines, r.String())
			r = pg.Row(w).Pad(4).Add(term.Plain, l)
		}
		detail := term.CleanLines(f.Detail)
		if detail != "" && !strings.Contains(detail, "\n") && r.Fits(": "+detail) {
			r.Add(term.Faint, ": "+detail)
			detail = ""
		}
		lines = append(lines, r.String())
		for l := range strings.SplitSeq(detail, "\n") {
			if l != "" {
				lines = append(lines, pg.Below(w, 4, findingLines, term.Faint, l)...)
			}
		}
		if f.Remedy != "" {
			for i, l := range pg.Below(w, 6, findingLines, term.Accent, pg.Commands.Text(term.Clean(f.Remedy))) {
				if i == 0 {
					l = "    " + pg.Paint(term.Faint, pg.Branch+" ") + strings.TrimPrefix(l, "      ")
				}
				lines = append(lines, l)
			}
		}
		switch command := term.Clean(pg.Commands.Line(f.Command)); {
		case command == "":
		case pg.Uncut: // so that it can be copied
			lines = append(lines, "      "+pg.Paint(term.Accent, command))
		default:
			lines = append(lines, pg.Below(w, 6, findingLines, term.Accent, command)...)
		}
	}
	return lines
}

func severitySign(pg Page, s plan.Severity) (string, term.Style) {
	switch s {
	case plan.Block:
		return pg.Fail, term.Bad
	case plan.Warn:
		return pg.Warn, term.Caution
	}
	return pg.OK, term.Good
}

// ClusterSummary is the state of the cluster in two columns. k is the newest check of versions; nil if
// there is none.
func ClusterSummary(pg Page, w int, st *engine.Status, k *check.Check) []string {
	ready := map[string][2]int{}
	for _, n := range st.Nodes {
		r := ready[n.Role]
		r[1]++
		if n.State == plan.NodeReady {
			r[0]++
		}
		ready[n.Role] = r
	}
	health := "healthy"
	if n := len(st.Health); n > 0 {
		health = words.Count(n, "finding")
	}
	narrow := w < 76
	if !st.Reachable {
		health = "API server unreachable"
		if narrow {
			health = "unreachable"
		}
	}
	if slices.ContainsFunc(st.Health, func(f plan.Finding) bool { return f.ID == workspace.KubeconfigFile }) {
		health = "invalid kubeconfig"
	}
	kubernetes := term.Clean(st.Target.Kubernetes)
	if st.APIServer != "" && st.APIServer != st.Target.Kubernetes {
		kubernetes += " (API server " + term.Clean(st.APIServer) + ")"
	}
	age, etcd := "none", "none"
	if b := st.Backup; b != nil {
		age, etcd = term.Ago(b.Created, pg.Now), "not included"
		if b.Etcd {
			etcd = "included"
		}
	}
	pair := func(role string) string { return fmt.Sprintf("%d/%d ready", ready[role][0], ready[role][1]) }
	half := max(w/2, 38)
	newer := map[string]string{}
	if st.Reachable {
		for _, x := range [][3]string{
			{"Kubernetes", "kubernetes", st.Target.Kubernetes}, {"OS image", "image", st.Target.Image}, {"Services", "services", st.Target.Release},
		} {
			if v := available(k, x[1], x[2]); v != "" {
				newer[x[0]], half = term.Clean(v), max(half, 46)
			}
		}
	}
	if narrow { // both columns need room
		half = 34
	}
	rowOf := func(a, b, d, e string) string {
		r := pg.Row(w).Add(term.Plain, "  ").Col(term.Faint, a, 12)
		v := newer[a]
		switch {
		case v != "" && narrow:
			r.Add(term.Plain, Dash(b)).Pad(2).Add(term.Good, pg.Up+" "+v)
		case v != "":
			r.Add(term.Plain, Dash(b)).Pad(2).Add(term.Good, pg.Up+" "+v).Add(term.Faint, " available")
		case narrow:
			r.Add(term.Plain, term.Cut(Dash(b), half-1-r.Used, pg.Ellipsis))
		default:
			r.Add(term.Plain, Dash(b))
		}
		return r.Pad(1).To(half).Col(term.Faint, d, 14).Add(term.Plain, Dash(e)).String()
	}
	left := [][2]string{{"Kubernetes", kubernetes}, {"OS image", term.Clean(st.Target.Image)}, {"Services", term.Clean(st.Target.Release)}, {"Last backup", age}}
	if st.Target.Image == "" && st.Target.Kubernetes != "" {
		left = slices.Delete(left, 1, 2) // the target names no image
	}
	right := [][2]string{{"control plane", pair("control-plane")}, {"workers", pair("worker")}, {"health", health}, {"etcd snapshot", etcd}}
	var lines []string
	for i, x := range right {
		if i == len(left) {
			lines = append(lines, pg.Row(w).To(half).Col(term.Faint, x[0], 14).Add(term.Plain, Dash(x[1])).String())
			continue
		}
		lines = append(lines, rowOf(left[i][0], left[i][1], x[0], x[1]))
	}
	return lines
}

// Dash is s, or "-" if s is empty.
func Dash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

// NodeRows lists the nodes, then the machines that are no nodes, in h lines, from row first on.
func NodeRows(pg Page, w, h int, st *engine.Status, first int) []string {
	if h < 2 {
		return nil
	}
	type entry struct{ name, group, state, kubernetes, image, ip, text string } // image is its version, if that is known
	rows := make([]entry, 0, len(st.Nodes)+len(st.Machines))
	for _, n := range st.Nodes {
		text := term.Clean(n.Message)
		if n.Cordoned {
			text = strings.TrimSpace("cordoned " + text)
		}
		rows = append(rows, entry{term.Clean(n.Name), term.Clean(n.Group), n.State, term.Clean(n.Kubernetes), term.Clean(cmp.Or(n.ImageVersion, n.Image)), term.Clean(n.IP), text})
	}
	for _, m := range st.Machines {
		text := term.Clean(m.Message)
		if text == "" {
			text = "not a node yet"
		}
		rows = append(rows, entry{term.Clean(m.Name), term.Clean(m.Group), m.State, "-", term.Clean(cmp.Or(m.ImageVersion, m.Image)), term.Clean(m.IP), text})
	}
	title := fmt.Sprintf("Nodes %d", len(st.Nodes))
	remark := ""
	if n := len(st.Machines); n > 0 {
		remark = "plus " + words.Count(n, "machine") + " without a Node"
	}
	lines := []string{pg.Rule(w, title, remark)}
	if len(rows) == 0 {
		return append(lines, pg.Row(w).Add(term.Faint, "   none yet: machines appear here after they join").String())
	}
	fit := h - 1
	from := max(0, min(first, len(rows)-fit))
	to := min(len(rows), from+fit)
	more := len(rows) - (to - from)
	if more > 0 && to-from > 1 {
		to--
	}
	names := 14
	for _, e := range rows[from:to] {
		names = max(names, term.Width(e.name))
	}
	if !pg.Uncut {
		names = min(names, w/3)
	}
	spare := fit - (to - from)
	if more > 0 {
		spare--
	}
	images := slices.ContainsFunc(rows, func(e entry) bool { return e.image != "" })
	for _, e := range rows[from:to] {
		sign, sty := NodeSign(pg, e.state)
		r := pg.Row(w).Add(term.Plain, " ").Add(sty, sign).Add(term.Plain, " ").Col(term.Plain, e.name, names).Col(sty, e.state, 9)
		r.Col(term.Plain, e.kubernetes, 9)
		if w >= 100 {
			r.Col(term.Faint, e.group, 14).Col(term.Faint, e.ip, 15)
		}
		if images {
			r.Col(term.Faint, e.image, 8)
		}
		var below []string // the text, if it is too long for the row and there is room
		if !r.Fits(e.text) {
			below = pg.Below(w, 4, 3, term.Faint, e.text)
		}
		if len(below) > spare {
			below = nil
		}
		if below == nil {
			r.Add(term.Faint, e.text)
		}
		spare -= len(below)
		lines = append(append(lines, r.String()), below...)
	}
	if more > 0 {
		lines = append(lines, pg.Row(w).Pad(3).Add(term.Faint, fmt.Sprintf("… %d more: J and K scroll", more+1)).String())
	}
	return lines
}

// Recent lists past runs in at most h lines.
func Recent(pg Page, w, h int, home *engine.Home) []string {
	if home == nil || len(home.Runs) == 0 || h < 2 {
		return nil
	}
	lines := []string{pg.Rule(w, "Recent runs", "")}
	for _, r := range home.Runs[:min(len(home.Runs), h-1)] {
		sign, st := pg.OK, term.Good
		switch r.Status {
		case plan.StateDone, plan.StateNothing, plan.StateDetached:
		case plan.StateFailed:
			sign, st = pg.Fail, term.Bad
		default:
			sign, st = pg.Stopped, term.Caution
		}
		took := ""
		if !r.Ended.IsZero() {
			took = " in " + term.Duration(r.Ended.Sub(r.Started).Round(time.Second))
		}
		text := term.Clean(r.Text)
		if text == "" && r.Step != "" && r.Status != plan.StateDone {
			text = "at " + term.Clean(r.Step)
		}
		lines = append(lines, pg.Row(w).Add(term.Plain, "  ").Add(st, sign).Add(term.Plain, " ").Col(term.Faint, term.Ago(r.Started, pg.Now), 9).
			Col(term.Plain, string(r.Verb), 6).Add(term.Plain, term.Clean(r.Status)+took).Add(term.Faint, "  "+text).String())
	}
	return lines
}

// Problem renders an error: operation, cause, remedy.
func Problem(pg Page, w int, err error) []string { return ProblemWithin(pg, w, 0, "", err) }

// ProblemWithin is problem with at most most lines for the operation and the cause each, so
// that the remedy is visible; 0 means all. rest names the place of the other lines.
func ProblemWithin(pg Page, w, most int, rest string, err error) []string {
	e := Explain(err, pg.Commands)
	lines := []string{pg.Rule(w, "What happened", "")}
	bound := func(all []string) []string {
		if most == 0 || len(all) <= most+1 { // one hidden line would only make room for the hint
			return all
		}
		return append(all[:most:most], fmt.Sprintf("%s %d more lines: %s", pg.Ellipsis, len(all)-most, rest))
	}
	for i, l := range bound(term.Wrap(e.What, w-6)) {
		r := pg.Row(w).Add(term.Plain, " ")
		if i == 0 {
			r.Add(term.Bad, pg.Fail+" ")
		} else {
			r.Pad(2)
		}
		lines = append(lines, r.Add(term.Strong, l).String())
	}
	for _, p := range []struct{ head, text string }{{"why", e.Why}, {"fix", e.Remedy}} {
		if p.text == "" {
			continue
		}
		all := term.Wrap(p.text, w-10)
		if p.head == "why" {
			all = bound(all)
		}
		for i, l := range all {
			r := pg.Row(w).Add(term.Plain, "   ")
			if i == 0 {
				r.Col(term.Faint, p.head, 4)
			} else {
				r.Pad(5)
			}
			lines = append(lines, r.Add(term.Plain, l).String())
		}
	}
	for _, d := range e.details {
		lines = append(lines, pg.Below(w, 3, findingLines, term.Plain, d)...)
	}
	return lines
}
