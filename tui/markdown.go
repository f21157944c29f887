package tui

import (
	"cmp"
	"fmt"
	"strings"
	"time"

	"constellation/engine/plan"
	"constellation/engine/words"
	"constellation/tui/term"
	"constellation/tui/view"
)

// runSummary prints a run as Markdown at its end, for the job page of a CI pipeline. Meanwhile
// lines prints the events to another writer.
type runSummary struct {
	out   *guarded
	lines *plainPrinter
	sp    view.CommandFormatter
	t     view.Timeline
	waits []wait
}

// wait is a reason for waiting with its total duration.
type wait struct {
	text string
	long time.Duration
}

func (m *runSummary) event(ev plan.Event) {
	m.lines.event(ev)
	before := m.t.Why
	if c, _ := m.t.Apply(ev); before.Text != "" && (c == view.Waits || c == view.Stepped || c == view.Concluded) && m.t.Why.Text != before.Text {
		m.add(before.Text, ev.Time.Sub(before.Since))
	}
}

func (m *runSummary) add(text string, long time.Duration) {
	for i := range m.waits {
		if m.waits[i].text == text {
			m.waits[i].long += long
			return
		}
	}
	m.waits = append(m.waits, wait{text, long})
}

// minReportedWait is the minimum duration of a wait in the summary.
const minReportedWait = 10 * time.Second

// close writes the summary.
func (m *runSummary) close() {
	m.lines.close()
	if m.t.Events == 0 { // the run was not confirmed
		return
	}
	fmt.Fprint(m.out, m.String())
}

// String is the summary of the events so far.
func (m *runSummary) String() string {
	t := &m.t
	var b strings.Builder
	verb, status, text, exit := "run", "interrupted", "", -1
	if t.Plan != nil {
		verb = string(t.Plan.Verb)
		if t.Plan.Rehearsal {
			verb += " (rehearsal)"
		}
	}
	if o := t.Result; o != nil {
		status, text, exit = o.Ended, o.Text, o.Exit
	}
	fmt.Fprintf(&b, "## %s of cluster %s: %s\n\n", strings.ToUpper(verb[:1])+verb[1:], view.CodeOf(t.Cluster)+view.Marked(t.Simulated, t.NotAttested, ", "), view.CellOf(status))
	fmt.Fprintf(&b, "%s (exit %d, %s, %s)\n", view.CellOf(text), exit, term.Duration(t.Last.Sub(t.Started)), cmp.Or(view.CellOf(t.Tool), "-"))
	if o := t.Result; o != nil && o.Remedy != "" {
		fmt.Fprintf(&b, "\n**To do**: %s\n", view.CellOf(m.sp.Text(o.Remedy)))
	}
	if p := t.Plan; p != nil && len(p.Components) > 0 {
		b.WriteString("\n| component | from | to |\n|---|---|---|\n")
		for _, x := range p.Components {
			fmt.Fprintf(&b, "| %s | %s | %s |\n", view.CellOf(x.Name), view.CellOf(x.Now), view.CellOf(x.NextHop))
		}
	}
	if len(t.Steps) > 0 {
		b.WriteString("\n| step | state | took | outcome |\n|---|---|---|---|\n")
		for _, s := range t.Steps {
			took := "-"
			if s.Took > 0 {
				took = term.Duration(s.Took)
			}
			fmt.Fprintf(&b, "| %s | %s | %s | %s |\n", view.CellOf(s.ID), cmp.Or(view.CellOf(s.State), "not started"), took, view.CellOf(cmp.Or(s.Text, s.Title)))
		}
	}
	m.nodes(&b)
	m.findings(&b)
	first := true
	for _, w := range m.waits {
		if w.long < minReportedWait {
			continue
		}
		if first {
			b.WriteString("\n### Waited for\n\n")
			first = false
		}
		fmt.Fprintf(&b, "- %s: %s\n", term.Duration(w.long), view.CellOf(w.text))
	}
	if o := t.Result; o != nil {
		for _, c := range append([]string{o.Resume}, o.Next...) {
			if c != "" {
				fmt.Fprintf(&b, "\n    %s\n", term.Clean(m.sp.Line(c)))
			}
		}
	}
	if t.Run != "" {
		fmt.Fprintf(&b, "\nRun %s\n", view.CodeOf(t.Run))
	}
	return b.String()
}

// nodes writes the final states of the machines by group.
func (m *runSummary) nodes(b *strings.Builder) {
	t := &m.t
	if len(t.Machines) == 0 {
		return
	}
	total := ""
	for _, s := range t.Steps {
		if s.ID == plan.StepRollout && s.Total > 0 {
			total = fmt.Sprintf(": %d of %d at the target", s.Progress, s.Total)
		}
	}
	fmt.Fprintf(b, "\n### Nodes%s\n\n| group | ready | replaced | other |\n|---|---|---|---|\n", total)
	for _, g := range t.Groups() {
		var other []string
		for _, s := range view.NodeStates {
			if n := g.States[s]; n > 0 && s != plan.NodeReady && s != plan.NodeGone {
				other = append(other, fmt.Sprintf("%d %s", n, s))
			}
		}
		fmt.Fprintf(b, "| %s | %d | %d | %s |\n", view.CellOf(g.Group), g.States[plan.NodeReady], g.States[plan.NodeGone], view.CellOf(strings.Join(other, ", ")))
	}
}

// findings writes the findings of the plan and which of them were accepted by name.
func (m *runSummary) findings(b *strings.Builder) {
	if m.t.Plan == nil {
		return
	}
	list, fine := view.NeedAttention(m.t.Plan.Findings)
	if len(m.t.Plan.Findings) == 0 {
		return
	}
	fmt.Fprintf(b, "\n### Findings: %s\n\n", view.CountBySeverity(m.t.Plan.Findings))
	accepted := map[string]bool{}
	for _, id := range m.t.Plan.Acknowledged {
		accepted[id] = true
	}
	for _, f := range list {
		how := ""
		if accepted[f.ID] {
			how = ", accepted by name"
		}
		fmt.Fprintf(b, "- **%s**%s: %s %s\n", f.Severity, how, view.CellOf(f.Title), view.CodeOf(f.ID))
	}
	if fine > 0 {
		fmt.Fprintf(b, "- %s passed\n", words.Count(fine, "check"))
	}
}
