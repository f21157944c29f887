package view

import (
	"fmt"
	"slices"
	"strings"

	"constellation/engine"
	"constellation/engine/infra"
	"constellation/engine/plan"
	"constellation/engine/words"
	"constellation/tui/term"
)

// infraStates are the words for the states of objects.
var infraStates = map[infra.State]string{
	infra.Absent: "to be made", infra.Exists: "exists", infra.Differs: "differs", infra.Taken: "name taken", infra.Own: "yours", infra.Wrong: "wrong", infra.Unknown: "not read",
}

// InfraReport renders the infrastructure of a cluster.
func InfraReport(pg Page, w int, r *engine.InfraReport) []string {
	uid := "UID chosen by create"
	if r.UID != "" {
		uid = "UID " + r.UID
	}
	lines := []string{term.Clean(fmt.Sprintf("infrastructure of cluster %s in %s, %s", r.Cluster, r.Cloud, uid))}
	count := map[infra.State]int{}
	for _, o := range r.Objects {
		count[o.State]++
	}
	severity, verdict := plan.Info, fmt.Sprintf("create makes %d of %s", count[infra.Absent], words.Count(len(r.Objects), "object"))
	if count[infra.Absent] == 0 {
		verdict = "all objects exist"
	}
	for _, f := range r.Findings {
		switch {
		case f.Severity == plan.Block:
			severity, verdict = plan.Block, "create cannot run: see the findings"
		case f.Severity == plan.Warn && severity != plan.Block:
			severity = plan.Warn
		}
	}
	sign, st := SeveritySignOf(pg, severity)
	lines = append(lines, pg.Row(w).Add(st, sign+" ").Add(term.Strong, verdict).String(), "")
	for _, o := range r.Objects {
		style := map[infra.State]term.Style{infra.Exists: term.Good, infra.Own: term.Good, infra.Absent: term.Plain}[o.State]
		if o.State != infra.Exists && o.State != infra.Own && o.State != infra.Absent {
			_, style = SeveritySignOf(pg, plan.Warn)
		}
		lines = append(lines, pg.Row(w).Pad(2).Col(style, infraStates[o.State], 12).Hang(term.Plain, term.Clean(o.String()))...)
		for _, d := range slices.Concat([]string{o.Purpose}, o.Details, o.Differences, []string{o.Link}) {
			if d != "" {
				lines = append(lines, pg.Row(w).Pad(15).Hang(term.Faint, term.Clean(d))...)
			}
		}
	}
	if len(r.Findings) > 0 {
		lines = append(lines, "", pg.Rule(w, "Findings", ""))
		for i := range r.Findings {
			f := &r.Findings[i]
			sign, st := SeveritySignOf(pg, f.Severity)
			lines = append(lines, pg.Row(w).Pad(2).Add(st, sign+" ").Hang(term.Plain, term.Clean(f.Title+" ["+f.ID+"]"))...)
			lines = append(lines, FindingDetail(pg, w, 4, *f)...)
		}
	}
	for _, n := range r.Notes {
		lines = append(lines, "")
		lines = append(lines, term.Wrap(term.Clean(strings.TrimSpace(pg.Commands.Text(n))), w)...)
	}
	return lines
}
