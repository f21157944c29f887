package conformance

import (
	"fmt"
	"strings"
	"time"
)

// Markdown returns the report as a page to publish.
func (r *Report) Markdown() string {
	var b strings.Builder
	title := "Conformance of provider " + r.Provider
	if r.Emulated {
		title += " (emulated)"
	}
	fmt.Fprintf(&b, "# %s\n\n", title)
	switch {
	case r.Ended.IsZero():
		b.WriteString("**Not finished.** This is the state of a suite that runs or was interrupted.\n\n")
	case r.Passed:
		b.WriteString("**Passed.** All steps passed or had nothing to do.\n\n")
	default:
		b.WriteString("**Failed.** A step failed, or the budget allowed no more.\n\n")
	}
	if r.Emulated {
		b.WriteString("The cloud was **emulated**: no request reached a vendor. This report proves nothing about the vendor's cloud.\n\n")
	}
	row := func(name, value string) {
		if value != "" {
			fmt.Fprintf(&b, "| %s | %s |\n", name, strings.ReplaceAll(value, "|", "\\|"))
		}
	}
	b.WriteString("| | |\n|---|---|\n")
	row("program", "constellation "+r.Tool)
	row("started", r.Started.Format(time.RFC3339))
	if !r.Ended.IsZero() {
		row("took", r.Ended.Sub(r.Started).Round(time.Second).String())
	}
	row("machines", fmt.Sprint(r.Machines))
	row("before the upgrade", r.Before.text())
	row("after the upgrade", r.After.text())
	if c := r.Cost; c != nil {
		row("budget", fmt.Sprintf("%.2f", c.Budget))
		row("prices", fmt.Sprintf("%.4f for a machine-hour, %.4f for an hour of the rest; source: %s", c.Machine, c.Other, orUser(c.Source)))
		row("spent, upper estimate", fmt.Sprintf("%.2f", r.Spent))
	}
	b.WriteString("\n| step | verdict | took | calls | |\n|---|---|---|---|---|\n")
	for _, s := range r.Steps {
		took, calls := "", ""
		if s.TookMS > 0 {
			took = (time.Duration(s.TookMS) * time.Millisecond).Round(time.Second).String()
		}
		if s.Calls != nil {
			calls = fmt.Sprint(*s.Calls)
		}
		why := s.Why
		if s.Attempts > 1 {
			why = strings.TrimPrefix(why+fmt.Sprintf("; started %d times", s.Attempts), "; ")
		}
		fmt.Fprintf(&b, "| %s | %s | %s | %s | %s |\n", s.Title, s.Verdict, took, calls, strings.ReplaceAll(strings.ReplaceAll(why, "|", "\\|"), "\n", " "))
	}
	b.WriteString("\nCommands:\n\n```\n")
	for _, s := range r.Steps {
		if s.Command != "" {
			fmt.Fprintln(&b, s.Command)
		}
	}
	b.WriteString("```\n")
	if !r.Emulated {
		b.WriteString("\nCalls of the vendor's API are not counted.\n")
	}
	return b.String()
}

func (v *Versions) text() string {
	if v == nil {
		return ""
	}
	return fmt.Sprintf("%d nodes, Kubernetes %s, images %s", v.Nodes, strings.Join(v.Kubernetes, ", "), strings.Join(v.Images, ", "))
}

func orUser(source string) string {
	if source == "" {
		return "given by the user"
	}
	return source
}
