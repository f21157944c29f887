package tui

import (
	"cmp"
	"fmt"
	"strings"
	"time"

	"constellation/engine"
	"constellation/tui/term"
)

// runSummary prints a run as Markdown at its end, for the job page of a CI pipeline. Meanwhile
// lines prints the events to another writer.
type runSummary struct {
	out   *guarded
	lines *plainPrinter
	sp    commandFormatter
	t     timeline
	waits []wait
}

// wait is a reason for waiting with its total duration.
type wait struct {
	text string
	long time.Duration
}

func (m *runSummary) event(ev engine.Event) {
	m.lines.event(ev)
	before := m.t.why
	if c, _ := m.t.apply(ev); before.text != "" && (c == waits || c == stepped || c == concluded) && m.t.why.text != before.text {
		m.add(before.text, ev.Time.Sub(before.since))
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
	if m.t.events == 0 { // the run was not confirmed
		return
	}
	fmt.Fprint(m.out, m.String())
}

// String is the summary of the events so far.
func (m *runSummary) String() string {
	t := &m.t
	var b strings.Builder
	verb, status, text, exit := "run", "interrupted", "", -1
	if t.plan != nil {
		verb = string(t.plan.Verb)
		if t.plan.Rehearsal {
			verb += " (rehearsal)"
		}
	}
	if o := t.result; o != nil {
		status, text, exit = o.status, o.text, o.exit
	}
	fmt.Fprintf(&b, "## %s of cluster %s: %s\n\n", strings.ToUpper(verb[:1])+verb[1:], codeOf(t.cluster)+marked(t.simulated, ", "), cellOf(status))
	fmt.Fprintf(&b, "%s (exit %d, %s, %s)\n", cellOf(text), exit, term.Duration(t.last.Sub(t.started)), cmp.Or(cellOf(t.tool), "-"))
	if o := t.result; o != nil && o.remedy != "" {
		fmt.Fprintf(&b, "\n**To do**: %s\n", cellOf(m.sp.text(o.remedy)))
	}
	if p := t.plan; p != nil && len(p.Components) > 0 {
		b.WriteString("\n| component | from | to |\n|---|---|---|\n")
		for _, x := range p.Components {
			fmt.Fprintf(&b, "| %s | %s | %s |\n", cellOf(x.Name), cellOf(x.Now), cellOf(x.NextHop))
		}
	}
	if len(t.steps) > 0 {
		b.WriteString("\n| step | state | took | outcome |\n|---|---|---|---|\n")
		for _, s := range t.steps {
			took := "-"
			if s.took > 0 {
				took = term.Duration(s.took)
			}
			fmt.Fprintf(&b, "| %s | %s | %s | %s |\n", cellOf(s.id), cmp.Or(cellOf(s.state), "not started"), took, cellOf(cmp.Or(s.text, s.title)))
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
		fmt.Fprintf(&b, "- %s: %s\n", term.Duration(w.long), cellOf(w.text))
	}
	if o := t.result; o != nil {
		for _, c := range append([]string{o.Resume}, o.Next...) {
			if c != "" {
				fmt.Fprintf(&b, "\n    %s\n", term.Clean(m.sp.line(c)))
			}
		}
	}
	if t.run != "" {
		fmt.Fprintf(&b, "\nRun %s\n", codeOf(t.run))
	}
	return b.String()
}

// nodes writes the final states of the machines by group.
func (m *runSummary) nodes(b *strings.Builder) {
	t := &m.t
	if len(t.machines) == 0 {
		return
	}
	total := ""
	for _, s := range t.steps {
		if s.id == engine.StepRollout && s.total > 0 {
			total = fmt.Sprintf(": %d of %d at the target", s.progress, s.total)
		}
	}
	fmt.Fprintf(b, "\n### Nodes%s\n\n| group | ready | replaced | other |\n|---|---|---|---|\n", total)
	for _, g := range t.groups() {
		var other []string
		for _, s := range nodeStates {
			if n := g.states[s]; n > 0 && s != engine.NodeReady && s != engine.NodeGone {
				other = append(other, fmt.Sprintf("%d %s", n, s))
			}
		}
		fmt.Fprintf(b, "| %s | %d | %d | %s |\n", cellOf(g.group), g.states[engine.NodeReady], g.states[engine.NodeGone], cellOf(strings.Join(other, ", ")))
	}
}

// findings writes the findings of the plan and which of them were accepted by name.
func (m *runSummary) findings(b *strings.Builder) {
	if m.t.plan == nil {
		return
	}
	list, fine := needAttention(m.t.plan.Findings)
	if len(m.t.plan.Findings) == 0 {
		return
	}
	fmt.Fprintf(b, "\n### Findings: %s\n\n", countBySeverity(m.t.plan.Findings))
	accepted := map[string]bool{}
	for _, id := range m.t.plan.Acknowledged {
		accepted[id] = true
	}
	for _, f := range list {
		how := ""
		if accepted[f.ID] {
			how = ", accepted by name"
		}
		fmt.Fprintf(b, "- **%s**%s: %s %s\n", f.Severity, how, cellOf(f.Title), codeOf(f.ID))
	}
	if fine > 0 {
		fmt.Fprintf(b, "- %s passed\n", term.Count(fine, "check"))
	}
}
