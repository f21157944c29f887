package view

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"constellation/engine/check"
	"constellation/engine/plan"
	"constellation/engine/words"
	"constellation/engine/workspace"
	"constellation/tui/term"
)

// CellOf escapes a text for a cell of a Markdown table; an empty one becomes a dash.
func CellOf(s string) string {
	s = strings.NewReplacer("|", `\|`, "\n", " ", "<", "&lt;", "`", "'", "[", `\[`, "]", `\]`).Replace(term.Clean(s))
	return cmp.Or(s, "-")
}

// CodeOf quotes text from outside as inline code, where Markdown has no effect.
func CodeOf(s string) string { return "`" + strings.ReplaceAll(term.Clean(s), "`", "'") + "`" }

// RunningCheck is the progress of a check.
type RunningCheck struct {
	Total, Done int
	running     []string // IDs in the order of their start
	progress    map[string]string
	Found       []plan.Finding
}

// Apply applies an event of a check.
func (l *RunningCheck) Apply(ev plan.Event) {
	i := slices.Index(l.running, ev.Object)
	switch {
	case ev.Kind == plan.KindProgress && i >= 0:
		if l.progress == nil {
			l.progress = map[string]string{}
		}
		l.progress[ev.Object] = Amount(ev.Current, ev.Total)
	case ev.Kind != plan.KindCheck:
	case ev.State == plan.StateRunning:
		l.Total++
		l.running = append(l.running, ev.Object)
	default:
		if i >= 0 {
			l.running = slices.Delete(l.running, i, i+1)
			l.Done++
		}
		var f plan.Finding
		if json.Unmarshal(ev.Data, &f) == nil && f.Severity != "" {
			l.Found = append(l.Found, f)
		}
	}
}

// Summary is the progress as text: "31 of 44 checked; drain-rehearsal 42 of 300".
func (l *RunningCheck) Summary() string {
	s := fmt.Sprintf("%d of %d checked", l.Done, l.Total)
	var names []string
	for _, id := range l.running {
		name := term.Clean(id)
		if p := l.progress[id]; p != "" {
			name += " " + p
		}
		names = append(names, name)
	}
	if len(names) > 0 {
		s += "; " + SomeNames(names, 3)
	}
	return s
}

// CheckItem is a selectable row: a finding, a reason, or the line for the passed checks.
type CheckItem struct {
	Finding *plan.Finding
	Reason  *reason
	Folded  int
}

// Signed is a sentence behind a sign, on at most two lines.
func Signed(pg Page, w int, st term.Style, sign, text string) []string {
	lines := pg.Below(w, 3, 2, term.Strong, text)
	lines[0] = " " + pg.Paint(st, term.AsciiIf(pg.Ascii, sign)) + lines[0][2:]
	return lines
}

// NoteRows are the notes of a check.
func NoteRows(pg Page, w int, k *check.Check) []string {
	var lines []string
	for _, n := range k.Notes {
		lines = append(lines, pg.Below(w, 2, 2, term.Plain, term.Clean(pg.Commands.Text(n)))...)
	}
	return lines
}

// FieldRows are values of the configuration that change.
func FieldRows(pg Page, w int, fields []workspace.FieldChange) []string {
	names := 20
	for _, f := range fields {
		names = max(names, term.Width(term.Clean(f.Field)))
	}
	names = min(names, w/2)
	var lines []string
	for _, f := range fields {
		from, to := cmp.Or(shortDigests(f.From, pg.Ellipsis), "not set"), cmp.Or(shortDigests(f.To, pg.Ellipsis), "removed")
		lines = append(lines, pg.Row(w).Pad(2).Col(term.Plain, term.CutMiddle(term.Clean(f.Field), names, pg.Ellipsis), names).
			Add(term.Bad, term.Clean(term.OneLine(from))).Add(term.Faint, " "+pg.To+" ").Add(term.Good, term.Clean(term.OneLine(to))).String())
	}
	return lines
}

// ItemDetail are the details of a row; the first line is their heading.
func ItemDetail(pg Page, w int, x CheckItem) []string {
	switch {
	case x.Finding != nil:
		f := x.Finding
		sign, st := SeveritySignOf(pg, f.Severity)
		lines := []string{pg.Rule(w, term.Clean(f.ID), severityText(f.Severity))}
		lines = append(lines, pg.Row(w).Pad(1).Add(st, sign+" ").Hang(term.Strong, term.Clean(f.Title))...)
		lines = append(lines, "")
		return append(lines, FindingDetail(pg, w, 1, *f)...)
	case x.Reason != nil:
		title := "Version of a later hop"
		if x.Reason.Beyond {
			title = "Version that is not reachable"
		}
		lines := []string{pg.Rule(w, title, "")}
		add := func(head string, st term.Style, s string) {
			if s == "" {
				return
			}
			for i, p := range term.Wrap(s, max(20, w-11)) {
				if i > 0 {
					head = ""
				}
				lines = append(lines, pg.Row(w).Pad(1).Col(term.Faint, head, 8).Add(st, p).String())
			}
		}
		add("version", term.Strong, term.Clean(x.Reason.What))
		add("why", term.Plain, term.Clean(x.Reason.Text))
		add("fix", term.Accent, term.Clean(pg.Commands.Text(x.Reason.remedy)))
		add("rule", term.Faint, term.Clean(x.Reason.rule))
		add("source", term.Faint, term.Clean(x.Reason.reference))
		if !x.Reason.Beyond {
			add("", term.Faint, "A later hop of the path reaches it or a newer version.")
		}
		return lines
	case x.Folded > 0:
		return []string{pg.Rule(w, "Details", ""), pg.Row(w).Pad(1).Add(term.Faint, "Enter lists the checks that passed.").String()}
	}
	return []string{pg.Rule(w, "Details", "")}
}

func severityText(s plan.Severity) string {
	switch s {
	case plan.Block:
		return "blocks"
	case plan.Warn:
		return "warning"
	case plan.NotChecked:
		return "not checked"
	}
	return "passed"
}

// Beside puts two blocks next to each other, h lines high.
func Beside(a, b []string, left, h int, t *term.Theme) []string {
	var lines []string
	for i := range min(h, max(len(a), len(b))) {
		var l, r string
		if i < len(a) {
			l = a[i]
		}
		if i < len(b) {
			r = b[i]
		}
		lines = append(lines, l+strings.Repeat(" ", max(0, left-term.StyledWidth(l)))+" "+t.Paint(term.Faint, t.Side)+" "+r)
	}
	return lines
}

// cell is a minor version in the lattice.
type cell struct {
	version string
	at      int // the hop that reaches it; 0 for the current version, -1 if none does
}

// Lattice draws components as rows and minor versions as columns. Versions on the path are
// linked. The rows of reasons have the rules that block the others.
func Lattice(pg Page, w int, k *check.Check) []string {
	var lines []string
	var minors []string // of the rows above
	for _, row := range []struct{ name, component string }{{"Kubernetes", "kubernetes"}, {"OS image", "image"}, {"Services", "services"}} {
		cells := latticeRow(k, row.component)
		if len(cells) == 0 {
			continue
		}
		var heads []string
		for _, x := range cells {
			heads = append(heads, minorOf(x.version))
		}
		col := max(20, min(28, (w-18)/len(cells)))
		if !slices.Equal(heads, minors) {
			r := pg.Row(w).Pad(18)
			for _, m := range heads {
				r.Col(term.Faint, m, col-1)
			}
			lines, minors = append(lines, strings.TrimRight(r.String(), " ")), heads
		}
		r := pg.Row(w).Pad(2).Col(term.Faint, row.name, 13)
		for i, x := range cells {
			r.To(16 + i*col)
			switch {
			case x.at < 0:
				r.Add(term.Bad, pg.Fail+" ").Add(term.Faint, term.Clean(x.version)+" not reachable")
			default:
				sign, st := pg.Running, term.Accent
				if x.at > 0 {
					sign, st = pg.Pending, term.Good
				}
				r.Add(st, sign+" ").Add(term.Plain, term.Clean(x.version)+" ")
			}
			if i+1 < len(cells) && cells[i+1].at > 0 {
				link, st := link(pg, k, cells[i+1].at)
				label := fmt.Sprintf("hop %d", cells[i+1].at)
				n := 16 + (i+1)*col - r.Used - term.Width(label) - 2
				r.Add(st, strings.Repeat(link, max(1, n/2))+label+strings.Repeat(link, max(1, n-n/2))+pg.Arrow)
			}
		}
		lines = append(lines, r.String())
	}
	return lines
}

// latticeRow are the minor versions of a component: the current one, those on the path, and
// newer ones that cannot be reached.
func latticeRow(k *check.Check, component string) []cell {
	of := func(t plan.Target) string {
		switch component {
		case "kubernetes":
			return t.Kubernetes
		case "image":
			return t.Image
		}
		return t.Release
	}
	now := of(k.Current)
	if len(k.Path) > 0 {
		now = cmp.Or(of(k.Path[0].From), now)
	}
	if now == "" {
		return nil
	}
	cells := []cell{{version: now}}
	for _, h := range k.Path {
		last := &cells[len(cells)-1]
		switch to := of(h.To); {
		case to == "" || to == last.version:
		case minorOf(to) == minorOf(last.version) && last.at > 0: // a newer patch of the same minor
			last.version = to
		default:
			cells = append(cells, cell{version: to, at: h.Number})
		}
	}
	for _, b := range k.Blocked {
		last := &cells[len(cells)-1]
		if b.Component != component || !Newer(b.Version, last.version) {
			continue
		}
		switch {
		case last.at < 0 && minorOf(last.version) == minorOf(b.Version):
			last.version = b.Version
		case minorOf(last.version) == minorOf(b.Version): // the reasons below list a newer patch
		default:
			cells = append(cells, cell{version: b.Version, at: -1})
		}
	}
	return cells
}

// minorOf is "v1.36" of v1.36.3.
func minorOf(v string) string {
	if i := strings.LastIndexByte(v, '.'); i > 0 && strings.Count(v, ".") >= 2 {
		j := strings.IndexByte(v[strings.IndexByte(v, '.')+1:], '.')
		return v[:strings.IndexByte(v, '.')+1+j]
	}
	return v
}

// FeedRemark is the source and age of the release data in few words.
func FeedRemark(f check.FeedState, now time.Time) string {
	if f.Source == "" || f.Source == "embedded" {
		return ""
	}
	s := "feed " + term.Ago(f.Fetched, now)
	if f.Stale {
		s = "feed STALE, fetched " + term.Ago(f.Fetched, now)
	}
	return s
}

// available is the newest reachable version of a component that is newer than now; empty if
// none is known.
func available(k *check.Check, component, now string) string {
	if k == nil {
		return ""
	}
	if goal := goalOf(k, component); Newer(goal, now) {
		return goal
	}
	return ""
}

// UpgradeSummary summarise the available upgrade; empty if none is known.
func UpgradeSummary(pg Page, k *check.Check) string {
	if k == nil || len(k.Path) == 0 {
		return ""
	}
	if len(k.Path) == 1 {
		return "the upgrade: " + targetSummary(k.Path[0])
	}
	return fmt.Sprintf("hop 1 of %d: %s", len(k.Path), targetSummary(k.Path[0]))
}

// targetOf names all versions of a target.
func targetOf(t plan.Target) string {
	var parts []string
	for _, p := range [][2]string{{"release", t.Release}, {"image", t.Image}, {"Kubernetes", t.Kubernetes}} {
		if p[1] != "" {
			parts = append(parts, p[0]+" "+p[1])
		}
	}
	return strings.Join(parts, ", ")
}

// PlanFlags returns the flags that reproduce r, each with a leading space; empty if there
// are none.
func PlanFlags(r check.Request) string {
	var b strings.Builder
	add := func(flag, value string) {
		b.WriteString(" --" + flag)
		if value != "" {
			b.WriteString(" " + QuoteArg(value))
		}
	}
	if !r.Release.IsZero() {
		add("to", r.Release.String())
	}
	if !r.Kubernetes.IsZero() {
		add("kubernetes", r.Kubernetes.String())
	}
	if r.Feed != "" {
		add("feed", r.Feed)
	}
	for _, k := range r.FeedKeys {
		add("feed-key", k)
	}
	if r.NoDryRun {
		add("no-dry-run", "")
	}
	if r.NoPreflight {
		add("no-preflight", "")
	}
	return b.String()
}

// NextRows renders the next command after the check that r asked for.
func NextRows(pg Page, k *check.Check, r check.Request) []string {
	var lines []string
	sp := pg.Commands
	switch x := k.Config; {
	case x != nil && x.Written:
		lines = append(lines, "", "written to "+term.Clean(x.Path)+":")
		for _, f := range x.Fields {
			lines = append(lines, fmt.Sprintf("  %s: %s %s %s", term.Clean(f.Field), term.Clean(cmp.Or(shortValue(f.From), "(not set)")), pg.To, term.Clean(cmp.Or(shortValue(f.To), "(removed)"))))
		}
		next := "config validate"
		if len(k.Path) > 0 && k.Path[0].CLI.String() == k.CLI { // else another version of this program must run the hop
			next = "upgrade apply" + PlanFlags(check.Request{Feed: r.Feed, FeedKeys: r.FeedKeys})
		}
		lines = append(lines, "", "next  "+sp.Command(next))
	case x != nil && len(x.Fields) > 0 && (k.Exit == plan.ExitUpgradeAvailable || len(k.Path) == 0):
		lines = append(lines, "", "next  "+sp.Command("upgrade check --write-config"+PlanFlags(r)))
	}
	return lines
}

// shortValue shortens digests.
func shortValue(s string) string {
	if len(s) > 24 && !strings.ContainsAny(s, " \n") {
		return s[:12] + "..."
	}
	return s
}

// Markdown renders a check for a ticket or a pull request.
func Markdown(k *check.Check, sp CommandFormatter) string {
	var b strings.Builder
	fmt.Fprintf(&b, "## Upgrade check of cluster %s\n\n%s, constellation %s, %s\n\n", CodeOf(k.Cluster)+Marked(k.Simulated, k.NotAttested, ", "), k.Time.UTC().Format(time.RFC3339), CellOf(k.CLI), CellOf(FeedText(k.Feed, k.Time)))
	severity, text := Verdict(k)
	fmt.Fprintf(&b, "**%s**: %s\n\n", severity, CellOf(text))
	b.WriteString("| component | now | reachable in one hop | next hop | newest | verdict |\n|---|---|---|---|---|---|\n")
	for _, x := range k.Components {
		name := CellOf(x.Name)
		if x.Part {
			name = "&nbsp;&nbsp;" + name
		}
		reachable, next := nextVersions(x)
		fmt.Fprintf(&b, "| %s | %s | %s | %s | %s | %s |\n", name, CellOf(x.Now), CellOf(reachable), CellOf(next), CellOf(x.Newest), CellOf(verdictText(x)))
	}
	if len(k.Path) > 0 {
		b.WriteString("\n### Path\n\n")
		for _, h := range k.Path {
			fmt.Fprintf(&b, "%d. %s → %s, with constellation %s; %s\n", h.Number, CellOf(targetOf(h.From)), CellOf(targetOf(h.To)), CellOf(h.CLI.String()), hopNodes(h))
			for _, why := range h.Why {
				fmt.Fprintf(&b, "   - %s\n", CellOf(why))
			}
			if h.Get != "" {
				fmt.Fprintf(&b, "   - %s\n", CellOf(h.Get))
			}
		}
	}
	if reasons := ReasonsOf(k); len(reasons) > 0 {
		b.WriteString("\n### Not reachable in one hop\n\n")
		for _, x := range reasons {
			fmt.Fprintf(&b, "- %s: %s (%s)", CellOf(x.What), CellOf(x.Text), CodeOf(x.rule))
			if x.remedy != "" && x.Beyond {
				fmt.Fprintf(&b, "; %s", CellOf(sp.Text(x.remedy)))
			}
			b.WriteString("\n")
		}
	}
	pg := Page{Theme: term.NewTheme(term.Display{}).Printed(), Commands: sp}
	if rows := ChangeRows(pg, PrintedWidth, k); len(rows) > 1 {
		b.WriteString("\n### Will change in hop 1\n\n```\n")
		for _, l := range rows[1:] {
			b.WriteString(strings.TrimRight(strings.TrimPrefix(l, "  "), " ") + "\n")
		}
		b.WriteString("```\n")
	}
	findingsMarkdown(&b, "Findings", k.Findings, sp)
	for _, n := range k.Notes {
		fmt.Fprintf(&b, "\n%s\n", CellOf(sp.Text(n)))
	}
	return b.String()
}

// findingsMarkdown writes findings under a title.
func findingsMarkdown(b *strings.Builder, title string, found []plan.Finding, sp CommandFormatter) {
	list, fine := NeedAttention(found)
	fmt.Fprintf(b, "\n### %s: %s\n", title, cmp.Or(CountBySeverity(found), "none"))
	if sp.needExport(list) {
		fmt.Fprintf(b, "\n```\n%s\n```\n", term.Clean(sp.export()))
	}
	for _, x := range list {
		b.WriteString(FindingItem(sp, &x))
	}
	if fine > 0 {
		fmt.Fprintf(b, "\n%s passed.\n", words.Count(fine, "check"))
	}
}
