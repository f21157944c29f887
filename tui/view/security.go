package view

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"constellation/engine/check"
	"constellation/engine/words"
	"constellation/tui/term"
)

// securityWords are the statuses in counts.
var securityWords = map[check.SecurityStatus]string{
	check.SecurityFailed: "failed", check.SecurityPassed: "passed", check.SecurityNotVisible: "not visible", check.SecurityManual: "manual", check.SecurityNotApplicable: "not applicable",
}

// securitySign returns the sign of a status and its style.
func securitySign(pg Page, s check.SecurityStatus) (string, term.Style) {
	switch s {
	case check.SecurityFailed:
		return pg.Fail, term.Bad
	case check.SecurityPassed:
		return pg.OK, term.Good
	case check.SecurityNotVisible:
		return "?", term.Caution
	case check.SecurityManual:
		return pg.Pending, term.Caution
	}
	return "-", term.Faint
}

// securityCounts is "3 failed, 20 passed".
func securityCounts(results []check.SecurityResult) string {
	n := map[check.SecurityStatus]int{}
	for i := range results {
		n[results[i].Status]++
	}
	var parts []string
	for _, s := range check.SecurityStatuses {
		if n[s] > 0 {
			parts = append(parts, fmt.Sprintf("%d %s", n[s], securityWords[s]))
		}
	}
	return strings.Join(parts, ", ")
}

// number is the number of a check without the name of the guide CIS.
func number(r *check.SecurityCheck) string {
	id := strings.TrimPrefix(r.ID, "cis-")
	return strings.TrimPrefix(id, "nsa-")
}

// SecurityCheck renders how a cluster stands against the guides: the checks by section, the failed ones
// with evidence and remedy, and the counts.
func SecurityCheck(pg Page, w int, s *check.Security) []string {
	lines := []string{"security of " + term.Clean(s.Name) + inParentheses(term.Clean(s.Server)) + Marked(s.Simulated, s.NotAttested, ", ")}
	about := fmt.Sprintf("Kubernetes %s, %s, %s, %s", s.Kubernetes, s.Distribution.Title, words.Count(s.Nodes, "node"), words.Count(s.Workloads, "workload"))
	lines = append(lines, Prose(pg, w, 2, term.Plain, term.Clean(about))...)
	for _, g := range s.Guides {
		lines = append(lines, Prose(pg, w, 2, term.Faint, g.Title+" "+g.Version)...)
	}
	for i := 0; i < len(s.Results); {
		n := i + 1
		for n < len(s.Results) && s.Results[n].Section == s.Results[i].Section {
			n++
		}
		lines = append(lines, "")
		lines = append(lines, securitySection(pg, w, s.Results[i:n])...)
		i = n
	}
	lines = append(lines, "", pg.Rule(w, "Result", ""))
	for _, x := range check.SecurityStatuses {
		if s.Counts[x] == 0 {
			continue
		}
		sign, st := securitySign(pg, x)
		lines = append(lines, pg.Row(w).Pad(2).Add(st, sign+" ").Col(term.Strong, fmt.Sprintf("%4d %s", s.Counts[x], securityWords[x]), 22).Add(term.Faint, securityMeaning(s, x)).String())
	}
	if s.MissingRules != "" {
		lines = append(lines, "", pg.Rule(w, "Missing rules", ""))
		lines = append(lines, strings.Split(strings.TrimRight(term.CleanLines(s.MissingRules), "\n"), "\n")...)
	}
	for i, n := range s.Notes {
		if i == 0 {
			lines = append(lines, "")
		}
		lines = append(lines, term.Wrap(term.Clean(pg.Commands.Text(n)), w)...)
	}
	return lines
}

// securityMeaning explains a count.
func securityMeaning(s *check.Security, x check.SecurityStatus) string {
	switch x {
	case check.SecurityFailed:
		n := 0
		for i := range s.Results {
			if s.Results[i].Status == x && s.Results[i].Level == 1 {
				n++
			}
		}
		return fmt.Sprintf("%d of level 1", n)
	case check.SecurityNotVisible:
		return "check manually: --explain ID has the command"
	case check.SecurityManual:
		return "a person must decide: --explain ID"
	}
	return ""
}

// securitySection renders the checks of a section. Neighbours that are not visible for the same reason
// are one line.
func securitySection(pg Page, w int, results []check.SecurityResult) []string {
	lines := []string{pg.Rule(w, results[0].Section, securityCounts(results))}
	const column = 8
	for i := 0; i < len(results); i++ {
		r := &results[i]
		n := i + 1
		for n < len(results) && r.Reason != "" && results[n].Status == r.Status && results[n].Reason == r.Reason {
			n++
		}
		sign, st := securitySign(pg, r.Status)
		id := number(&r.SecurityCheck)
		row := pg.Row(w).Pad(1).Add(st, sign+" ")
		if n-i > 2 {
			last := number(&results[n-1].SecurityCheck)
			lines = append(lines, row.Hang(term.Plain, fmt.Sprintf("%s to %s (%s): %s", id, last, words.Count(n-i, "check"), term.Clean(r.Reason)))...)
			i = n - 1
			continue
		}
		if len(id) > column {
			lines = append(lines, row.Hang(term.Plain, r.Title+" ["+r.ID+"]")...)
		} else {
			lines = append(lines, row.Col(term.Plain, id, column).Hang(term.Plain, r.Title)...)
		}
		lines = append(lines, securityDetail(pg, w, r)...)
	}
	return lines
}

// shownEvidence is the number of pieces of evidence that a failed check shows in the list.
const shownEvidence = 3

// securityDetail are the lines below a check in the list.
func securityDetail(pg Page, w int, r *check.SecurityResult) (lines []string) {
	const indent = 12
	switch r.Status {
	case check.SecurityFailed:
		left := 0
		for i, e := range r.Evidence {
			if !e.Wrong {
				break
			}
			if i >= shownEvidence {
				left++
				continue
			}
			lines = append(lines, Prose(pg, w, indent, term.Plain, term.Clean(e.String()))...)
		}
		if left > 0 {
			lines = append(lines, Prose(pg, w, indent, term.Faint, fmt.Sprintf("and %d more: --explain %s", left, r.ID))...)
		}
		lines = append(lines, pg.Row(w).Pad(indent).Add(term.Faint, "fix ").Hang(term.Accent, term.Clean(pg.Commands.Text(r.Remedy)))...)
	case check.SecurityNotVisible, check.SecurityNotApplicable:
		lines = append(lines, Prose(pg, w, indent, term.Faint, securityWords[r.Status]+": "+term.Clean(r.Reason))...)
	}
	return lines
}

// SecurityExplained renders one check whole. cluster is where it ran; without a status there is only what
// the check demands.
func SecurityExplained(pg Page, w int, cluster string, r *check.SecurityResult) []string {
	lines := []string{pg.Rule(w, r.ID, r.Section)}
	if r.Status != "" {
		sign, st := securitySign(pg, r.Status)
		lines = append(lines, pg.Row(w).Pad(1).Add(st, sign+" ").Add(st, securityWords[r.Status]+"  ").Hang(term.Strong, r.Title)...)
	} else {
		lines = append(lines, pg.Row(w).Pad(3).Hang(term.Strong, r.Title)...)
	}
	lines = append(lines, "")
	row := func(head string, st term.Style, text string) {
		if text != "" {
			lines = append(lines, pg.Row(w).Pad(3).Col(term.Faint, head, 10).Hang(st, term.Clean(text))...)
		}
	}
	level := ""
	if r.Level > 0 {
		level = fmt.Sprintf("level %d, ", r.Level)
	}
	kind := "decided by a person"
	switch {
	case r.Automated:
		kind = "decided by this program"
	case strings.HasPrefix(r.LooksAt, "mode and owner"):
		kind = "decided by what you see on the machine"
	}
	row("cluster", term.Plain, cluster)
	row("source", term.Plain, strings.Join(r.Sources, "; "))
	row("kind", term.Plain, level+kind)
	row("looks at", term.Plain, r.LooksAt)
	row("why", term.Plain, r.Reason)
	for _, e := range r.Evidence {
		head, st := "evidence", term.Plain
		if e.Wrong {
			head, st = "wrong", term.Caution
		}
		row(head, st, e.Text)
		for _, o := range e.Objects {
			lines = append(lines, pg.Row(w).Pad(16).Add(term.Plain, term.Clean(o)).String())
		}
		if e.More > 0 {
			lines = append(lines, pg.Row(w).Pad(16).Add(term.Faint, fmt.Sprintf("and %d more", e.More)).String())
		}
	}
	row("fix", term.Accent, pg.Commands.Text(r.Remedy))
	row("look", term.Accent, pg.Commands.Text(r.Command))
	return lines
}

// SecurityMarkdown renders how a cluster stands against the guides for an issue or a merge request.
func SecurityMarkdown(s *check.Security, sp CommandFormatter) string {
	var b strings.Builder
	fmt.Fprintf(&b, "## Security of %s\n\n%s, constellation %s, Kubernetes %s\n\n**%s**\n", CodeOf(s.Name)+Marked(s.Simulated, s.NotAttested, ", "), s.Time.UTC().Format(time.RFC3339), CellOf(s.CLI), CellOf(s.Kubernetes), securityCounts(s.Results))
	section := ""
	for i := range s.Results {
		r := &s.Results[i]
		if r.Section != section {
			section = r.Section
			fmt.Fprintf(&b, "\n### %s\n\n| check | result | what should be so | evidence | fix |\n|---|---|---|---|---|\n", CellOf(section))
		}
		var seen []string
		if r.Reason != "" {
			seen = append(seen, r.Reason)
		}
		for _, e := range r.Evidence {
			if e.Wrong || r.Status != check.SecurityFailed {
				seen = append(seen, e.String())
			}
		}
		fix := ""
		if r.Status == check.SecurityFailed {
			fix = sp.Text(r.Remedy)
		}
		cells := []string{CodeOf(r.ID), securityWords[r.Status], CellOf(r.Title), CellOf(strings.Join(seen[:min(len(seen), shownEvidence)], "; ")), CellOf(fix)}
		b.WriteString("| " + strings.Join(cells, " | ") + " |\n")
	}
	if s.MissingRules != "" {
		fmt.Fprintf(&b, "\n### Missing rules\n\n```yaml\n%s```\n", term.CleanLines(s.MissingRules))
	}
	for _, n := range s.Notes {
		fmt.Fprintf(&b, "\n%s\n", CellOf(sp.Text(n)))
	}
	return b.String()
}

// SecurityIDs are the IDs of checks, for completion.
func SecurityIDs(checks []check.SecurityCheck) []string {
	out := make([]string, 0, len(checks))
	for i := range checks {
		out = append(out, checks[i].ID)
	}
	slices.Sort(out)
	return out
}
