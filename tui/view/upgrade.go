package view

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	"constellation/engine/check"
	"constellation/engine/compat"
	"constellation/engine/plan"
	"constellation/engine/words"
	"constellation/tui/term"
)

// UpgradeSections renders an upgrade's plan: versions, other changes, steps, findings,
// notes and warnings. On the screen a blocked plan shows only its findings.
func UpgradeSections(pg Page, w int, p *plan.Plan) []string {
	k := &check.Check{Findings: p.Findings, Changes: p.Changes, Path: []compat.Hop{{}}}
	var lines []string
	if !pg.Uncut && len(p.Blocked()) > 0 {
		return FindingGroups(pg, w, &check.Check{Findings: p.Findings})
	}
	if len(p.Components) > 0 {
		lines = append(lines, pg.Rule(w, "Versions", ""))
		for _, x := range p.Components {
			lines = append(lines, pg.Row(w).Pad(2).Add(term.Plain, componentLine(pg, x)).String())
		}
	}
	if rows := ChangeRows(pg, w, k); len(rows) > 0 {
		rows[0] = pg.Rule(w, "Will change", "")
		lines = append(lines, rows...)
		if pg.Uncut { // the screen shows the backup's age elsewhere
			lines = append(lines, pg.Row(w).Pad(2).Col(term.Faint, "last backup", 14).Add(term.Plain, backupWords(pg, p.LastBackup)).String())
		}
	}
	lines = append(lines, pg.Rule(w, "Steps", words.Count(len(p.Steps), "step")))
	const indent = 22
	for i, st := range p.Steps {
		r := pg.Row(w).Num(term.Faint, fmt.Sprint(i+1), 2).Pad(1).Col(term.Strong, term.Clean(st.ID), 17)
		if st.Finished {
			lines = append(lines, r.Add(term.Faint, "done before: "+term.Clean(st.Title)).String())
			continue
		}
		text := term.Clean(st.Title) + ": " + term.Clean(st.Effect)
		if st.Final {
			text += " (point of no return)"
		}
		for n, l := range term.Wrap(text, max(20, w-indent)) {
			if n > 0 {
				r = pg.Row(w).Pad(indent)
			}
			lines = append(lines, r.Add(term.Plain, l).String())
		}
		for _, d := range st.Details {
			lines = append(lines, Prose(pg, w, indent, term.Faint, term.Clean(d))...)
		}
	}
	lines = append(lines, FindingGroups(pg, w, k)...)
	lines = append(lines, "")
	for _, n := range p.Notes {
		lines = append(lines, Prose(pg, w, 0, term.Plain, term.Clean(pg.Commands.Text(n)))...)
	}
	for _, st := range p.Steps {
		if st.Warning != "" && !st.Finished {
			lines = append(lines, Prose(pg, w, 0, term.Caution, "Warning: "+term.Clean(st.Warning))...)
		}
	}
	return lines
}

// backupWords describes age and contents of a backup.
func backupWords(pg Page, b *plan.LastBackup) string {
	if b == nil {
		return "none"
	}
	s := fmt.Sprintf("%s, %s, %s", term.Ago(b.Created, pg.Now), amountOf(b.Objects, "object"), term.Bytes(b.Bytes))
	if !b.Etcd {
		return s + ", without an etcd snapshot"
	}
	return s + ", with an etcd snapshot"
}

// componentLine is "Kubernetes: v1.35.4 -> v1.36.3".
func componentLine(pg Page, x plan.ComponentCheck) string {
	name := term.Clean(x.Name)
	if x.Part {
		name = "  " + name
	}
	return fmt.Sprintf("%-22s %s %s %s", name, cmp.Or(term.Clean(x.Now), "(none)"), pg.To, term.Clean(x.NextHop))
}

// RollbackRows show the stop points, what is irreversible, and how to roll back.
func RollbackRows(pg Page, w int, p *plan.Plan) []string {
	lines := []string{pg.Rule(w, "Rollback", "")}
	add := func(head, text string) {
		for i, l := range term.Wrap(text, max(20, w-18)) {
			if i > 0 {
				head = ""
			}
			lines = append(lines, pg.Row(w).Pad(2).Col(term.Faint, head, 14).Add(term.Plain, l).String())
		}
	}
	if i := slices.IndexFunc(p.Steps, func(s plan.Step) bool { return s.Final && !s.Finished }); i >= 0 || p.Rehearsal {
		add("stop points", "before set-target: after each step with q; then: P pauses, C cancels")
	}
	if replaced(p) > 0 {
		add("irreversible", "disks of replaced nodes are deleted; Kubernetes cannot be downgraded")
		add("certificates", "kubelets on new machines get new ones; the certificate authority stays")
	} else {
		add("irreversible", "Kubernetes cannot be downgraded")
	}
	back := "services: helm rollback; nodes: fix forward"
	if p.To.Image != "" {
		back += ", or upgrade to the previous image"
	}
	add("rollback", back)
	return lines
}

// InPlaceOf lists how many nodes of each group are upgraded in place: "2 of workers".
func InPlaceOf(x *plan.Changes) []string {
	var groups []string
	for _, g := range slices.Sorted(maps.Keys(x.InPlace)) {
		groups = append(groups, fmt.Sprintf("%d of %s", x.InPlace[g], term.Clean(g)))
	}
	return groups
}

// replaced is how many nodes a plan replaces.
func replaced(p *plan.Plan) (n int) {
	if p.Changes != nil {
		for _, x := range p.Changes.Nodes {
			n += x
		}
	}
	return n
}

// ChangeSummary are the changed versions: "image v1.0.0→v1.1.0  k8s v1.35.4→v1.36.3".
func ChangeSummary(pg Page, p *plan.Plan) string {
	var parts []string
	for _, x := range [][3]string{{"release", p.From.Release, p.To.Release}, {"image", p.From.Image, p.To.Image}, {"k8s", p.From.Kubernetes, p.To.Kubernetes}} {
		if x[2] != "" && x[1] != x[2] {
			oldest, _, _ := strings.Cut(term.Clean(x[1]), "-v") // a range in the middle of an upgrade
			parts = append(parts, x[0]+" "+cmp.Or(oldest, "?")+pg.To+term.Clean(x[2]))
		}
	}
	return strings.Join(parts, "  ")
}
