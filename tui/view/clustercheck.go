package view

import (
	"cmp"
	"fmt"
	"strings"
	"time"

	"constellation/engine/check"
	"constellation/tui/term"
)

// ClusterCheck renders a check without a workspace: the verdict, the cluster, findings per hop.
func ClusterCheck(pg Page, w int, k *check.ClusterCheck) []string {
	severity, text := k.Verdict()
	sign, st := SeveritySignOf(pg, severity)
	lines := []string{"check of " + k.Source + " " + term.Clean(k.Name) + inParentheses(term.Clean(k.Server))}
	for _, p := range term.Wrap(term.Clean(text), w-2) {
		lines = append(lines, pg.Row(w).Add(st, sign+" ").Add(term.Strong, p).String())
		sign = " "
	}
	row := func(head, text string) {
		lines = append(lines, pg.Row(w).Pad(2).Col(term.Faint, head, 14).Hang(term.Plain, term.Clean(text))...)
	}
	lines = append(lines, "")
	row("Kubernetes", cmp.Or(k.Kubernetes, "unknown"))
	row("distribution", k.Distribution.Title)
	for i, e := range k.Distribution.Evidence {
		head := ""
		if i == 0 {
			head = "evidence"
		}
		row(head, e)
	}
	if k.Distribution.Upgrade != "" {
		row("upgraded by", k.Distribution.Upgrade)
	}
	for i, h := range k.Hops {
		name := "Findings"
		if len(k.Hops) > 1 {
			name = fmt.Sprintf("Hop %d", i+1)
		}
		list := check.Check{Findings: h.Findings}
		lines = append(lines, "", pg.Row(w).Add(term.Strong, term.AsciiIf(pg.Ascii, fmt.Sprintf("%s: %s → %s", name, term.Clean(h.From), term.Clean(h.To)))).String())
		if len(h.Findings) == 0 {
			lines = append(lines, pg.Row(w).Pad(2).Add(term.Plain, "nothing that the previous hop does not have").String())
		}
		lines = append(lines, FindingGroups(pg, w, &list)...)
	}
	if len(k.NotApplicable) > 0 {
		lines = append(lines, "", pg.Rule(w, "Not applicable", ""))
		for _, x := range k.NotApplicable {
			lines = append(lines, pg.Row(w).Pad(2).Col(term.Faint, term.Clean(x.ID), 25).Hang(term.Plain, term.Clean(x.Why))...)
		}
	}
	if k.MissingRules != "" {
		lines = append(lines, "", pg.Rule(w, "Missing rules", ""))
		lines = append(lines, strings.Split(strings.TrimRight(term.CleanLines(k.MissingRules), "\n"), "\n")...)
	}
	for i, n := range k.Notes {
		if i == 0 {
			lines = append(lines, "")
		}
		lines = append(lines, term.Wrap(term.Clean(pg.Commands.Text(n)), w)...)
	}
	return lines
}

func inParentheses(s string) string {
	if s == "" {
		return ""
	}
	return " (" + s + ")"
}

// ClusterCheckMarkdown renders a check without a workspace for an issue or a merge request.
func ClusterCheckMarkdown(k *check.ClusterCheck, sp CommandFormatter) string {
	var b strings.Builder
	severity, text := k.Verdict()
	fmt.Fprintf(&b, "## Check of %s %s\n\n%s, constellation %s\n\n**%s**: %s\n\n", k.Source, CodeOf(k.Name), k.Time.UTC().Format(time.RFC3339), CellOf(k.CLI), severity, CellOf(text))
	fmt.Fprintf(&b, "| Kubernetes | distribution | evidence |\n|---|---|---|\n| %s | %s | %s |\n", CellOf(k.Kubernetes), CellOf(k.Distribution.Title), CellOf(strings.Join(k.Distribution.Evidence, "; ")))
	for _, h := range k.Hops {
		findingsMarkdown(&b, CellOf(h.From)+" → "+CellOf(h.To), h.Findings, sp)
	}
	if len(k.NotApplicable) > 0 {
		b.WriteString("\n### Not applicable\n\n")
		for _, x := range k.NotApplicable {
			fmt.Fprintf(&b, "- %s: %s\n", CodeOf(x.ID), CellOf(x.Why))
		}
	}
	if k.MissingRules != "" {
		fmt.Fprintf(&b, "\n### Missing rules\n\n```yaml\n%s```\n", term.CleanLines(k.MissingRules))
	}
	for _, n := range k.Notes {
		fmt.Fprintf(&b, "\n%s\n", CellOf(sp.Text(n)))
	}
	return b.String()
}
