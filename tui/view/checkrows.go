package view

import (
	"cmp"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"constellation/engine/check"
	"constellation/engine/compat"
	"constellation/engine/plan"
	"constellation/engine/words"
	"constellation/tui/term"
)

// The sections of an upgrade check, for the screen and for print. All are pure functions of
// a check and a width.

// Prose wraps a text into indented lines, on the screen and in print.
func Prose(pg Page, w, indent int, st term.Style, text string) []string {
	var lines []string
	for _, p := range term.Wrap(text, max(20, w-indent)) {
		lines = append(lines, pg.Row(w).Pad(indent).Add(st, p).String())
	}
	return lines
}

// last is the newest of the reachable versions; "" if there is none.
func last(versions []string) string {
	if n := len(versions); n > 0 {
		return versions[n-1]
	}
	return ""
}

// VersionRows is the version table: current version, newest version that this program can
// upgrade to, version after the next hop, and newest known version. Without parts it leaves
// out the parts of components.
func VersionRows(pg Page, w int, k *check.Check, remark string, parts bool) []string {
	about := "reachable: in one hop with this CLI"
	if remark != "" {
		about = remark + ", " + about
	}
	lines := []string{pg.Rule(w, "Versions", about)}
	widths := []int{14, 10, 10, 10, 10}
	if w < 80 {
		widths[0] = 11
	}
	var rows []plan.ComponentCheck
	for _, x := range k.Components {
		if parts || !x.Part {
			rows = append(rows, x)
		}
	}
	for _, x := range rows {
		name := term.Width(x.Name) + 1
		if x.Part {
			name += 2
		}
		for i, s := range []string{strings.Repeat("x", name), x.Now, last(x.Reachable), x.NextHop, x.Newest} {
			widths[i] = min(max(widths[i], term.Width(term.Clean(s))), 24)
		}
	}
	verdicts := 12
	for _, x := range rows {
		verdicts = max(verdicts, term.Width(term.Clean(verdictText(x))))
	}
	columns := fitColumns(widths, w-verdicts, w >= 80 && !pg.Uncut)
	row := func(st term.Style, name string, cells ...string) *term.Row {
		r := pg.Row(w).Pad(2).Col(st, name, widths[0])
		for i, s := range cells[:columns-1] {
			st := st
			if s == "-" {
				st = term.Faint
			}
			r.Col(st, s, widths[i+1])
		}
		return r
	}
	lines = append(lines, row(term.Faint, "component", "now", "reachable", "next hop", "newest").Add(term.Faint, "verdict").String())
	for i, x := range rows {
		name := term.Clean(x.Name)
		if x.Part {
			branch := pg.Tee
			if i+1 == len(rows) || !rows[i+1].Part {
				branch = pg.Branch
			}
			name = branch + " " + name
		}
		st := term.Plain
		if x.Part {
			st = term.Faint
		}
		reachable, next := nextVersions(x)
		r := row(st, name, Dash(term.Clean(x.Now)), Dash(term.Clean(reachable)), Dash(term.Clean(next)), Dash(term.Clean(x.Newest)))
		lines = append(lines, r.Add(verdictStyle(x), term.Clean(verdictText(x))).String())
	}
	return lines
}

// fitColumns makes columns of these widths fit into w and returns how many are shown. It
// shortens the widest column, if cuts is set; then it drops columns from the last one on, but
// never the first three.
func fitColumns(widths []int, w int, cuts bool) int {
	n := len(widths)
	sum := func() int {
		s := 2
		for _, x := range widths[:n] {
			s += x + 1
		}
		return s
	}
	for cuts && sum() > w {
		widest := slices.Index(widths, slices.Max(widths))
		if widths[widest] <= 10 {
			break
		}
		widths[widest]--
	}
	for n > 3 && sum() > w {
		n--
	}
	return n
}

// notUpdated is the verdict on a component that no hop changes.
const notUpdated = "not updated"

// verdictText is the verdict of a row. For an unchanged component it states whether a newer
// version is known.
func verdictText(x plan.ComponentCheck) string {
	switch {
	case x.Verdict != notUpdated:
		return x.Verdict
	case x.Newest != "":
		return "unchanged"
	}
	return "up to date"
}

// nextVersions are the newest version that is reachable in one hop, and the version after the
// next hop. The CLI has none: no hop changes it, and its verdict names the CLI that a hop needs.
func nextVersions(x plan.ComponentCheck) (reachable, next string) {
	if x.Kind == "cli" {
		return "", ""
	}
	return last(x.Reachable), x.NextHop
}

func verdictStyle(x plan.ComponentCheck) term.Style {
	switch {
	case x.Verdict == notUpdated:
		return term.Faint
	case x.Kind == "cli":
		return term.Caution
	case x.NextHop != "":
		return term.Good
	case x.Verdict == "not reachable":
		return term.Caution
	}
	return term.Plain
}

// PathRows renders the hops, each with its requirements and reasons. most bounds the number
// of reasons; 0 means all.
func PathRows(pg Page, w int, k *check.Check, most int) []string {
	if len(k.Path) == 0 {
		if len(k.Blocked) == 0 {
			return nil
		}
		return append([]string{pg.Rule(w, "Path", "none")}, blockedRows(pg, w, k, most)...)
	}
	lines := []string{pg.Rule(w, "Path", PathRemark(k))}
	lines = append(lines, Rails(pg, w, k)...)
	lines = append(lines, HopRows(pg, w, k, most)...)
	return append(lines, blockedRows(pg, w, k, most)...)
}

// PathRemark summarises a path for its heading.
func PathRemark(k *check.Check) string {
	if len(k.Path) == 1 {
		return "1 hop: run upgrade apply once"
	}
	return fmt.Sprintf("%d hops: run upgrade apply once for each", len(k.Path))
}

// HopRows renders for each hop the CLI that it needs and the nodes that it changes. With
// most > 0 it leaves out the reasons.
func HopRows(pg Page, w int, k *check.Check, most int) []string {
	var lines []string
	for _, h := range k.Path {
		with := "with constellation " + term.Clean(h.CLI.String())
		switch {
		case h.Get == "" && h.Number == 1:
			with = "now, with this CLI"
		case h.Get == "":
			with = "with this CLI"
		}
		r := pg.Row(w).Pad(2).Col(term.Strong, fmt.Sprintf("hop %d", h.Number), 6)
		if what := hopNodes(h); w >= 78 {
			r.Col(term.Plain, with, 27).Add(term.Plain, what)
		} else {
			with = strings.Replace(with, "with constellation ", "with ", 1)
			r.Col(term.Plain, with, 19).Add(term.Plain, strings.TrimSuffix(what, ", workers stay"))
		}
		if h.Number == 1 && k.Changes != nil && k.Changes.Most > 0 {
			if est := "  takes " + DurationRange(k.Changes.Least, k.Changes.Most); r.Used+term.Width(est) <= w {
				r.Add(term.Faint, est)
			}
		}
		lines = append(lines, r.String())
		if most > 0 {
			continue
		}
		if h.Get != "" {
			lines = append(lines, Prose(pg, w, 9, term.Accent, term.Clean(pg.Commands.Text(h.Get)))...)
		}
		for _, s := range h.Why {
			lines = append(lines, Prose(pg, w, 9, term.Faint, term.Clean(s))...)
		}
	}
	return lines
}

// hopNodes names the nodes that a hop replaces or upgrades in place.
func hopNodes(h compat.Hop) string {
	kubernetes := h.From.Kubernetes != h.To.Kubernetes
	fate := func(touched bool, kept compat.Share, upgraded bool) string {
		switch {
		case !touched, kept == compat.AllNodes && !upgraded: // the machine keeps its image, and nothing else changes
			return "stay"
		case kept == compat.AllNodes:
			return "in place"
		case kept == compat.SomeNodes:
			return "mixed"
		}
		return "replaced"
	}
	cps := fate(h.ReplaceControlPlanes, h.ControlPlanesInPlace, kubernetes || h.To.Etcd != "")
	workers := fate(h.ReplaceWorkers, h.WorkersInPlace, kubernetes)
	if cps == "mixed" || workers == "mixed" {
		return "replaces some nodes, others in place"
	}
	return map[[2]string]string{
		{"replaced", "replaced"}: "replaces every node",
		{"replaced", "stay"}:     "replaces the control planes, workers stay",
		{"replaced", "in place"}: "replaces control planes, workers in place",
		{"stay", "replaced"}:     "replaces the workers",
		{"stay", "in place"}:     "upgrades the workers in place",
		{"in place", "replaced"}: "replaces workers, control planes in place",
		{"in place", "stay"}:     "control planes in place, workers stay",
		{"in place", "in place"}: "upgrades every node in place",
		{"stay", "stay"}:         "replaces no node",
	}[[2]string{cps, workers}]
}

// rail is the upgrade path of one component, or of several with the same versions.
type rail struct {
	name  string
	stops []string // the version before the first hop and after each hop
}

// railsOf are the upgrade paths of the components that change.
func railsOf(k *check.Check) []rail {
	var out []rail
	for _, of := range []struct {
		name string
		at   func(plan.Target) string
	}{
		{"Kubernetes", func(t plan.Target) string { return t.Kubernetes }},
		{"OS image", func(t plan.Target) string { return t.Image }},
		{"Services", func(t plan.Target) string { return t.Release }},
	} {
		stops := []string{of.at(k.Path[0].From)}
		moves := false
		for i, h := range k.Path {
			to := cmp.Or(of.at(h.To), stops[i])
			moves = moves || to != stops[i]
			stops = append(stops, to)
		}
		if moves {
			out = append(out, rail{of.name, stops})
		}
	}
	return out
}

// link is the line character of a hop and its style: the next hop is heavy, and green if it
// is possible.
func link(pg Page, k *check.Check, hop int) (string, term.Style) {
	if hop > 1 {
		return pg.Signs.Rule, term.Plain
	}
	switch severity, _ := Verdict(k); severity {
	case plan.Block:
		return pg.Heavy, term.Bad
	case plan.Warn:
		return pg.Heavy, term.Caution
	}
	return pg.Heavy, term.Good
}

// Rails draws the upgrade paths: v1.0.0 ━━hop 1━━▶ v1.1.0.
func Rails(pg Page, w int, k *check.Check) []string {
	var list []rail
	for _, r := range railsOf(k) {
		if n := len(list); n > 0 && slices.Equal(list[n-1].stops, r.stops) {
			list[n-1].name = "image, services"
			continue
		}
		list = append(list, r)
	}
	widest := 0
	for _, x := range list {
		for _, v := range x.stops {
			widest = max(widest, term.Width(term.Clean(v)))
		}
	}
	label := func(hop int) string { return fmt.Sprintf("hop %d", hop) }
	bars := 2
	if len(k.Path) > 2 && w < 100 {
		label = strconv.Itoa
	}
	// step is the number of columns of a hop, up to its target version.
	step := func() int { return term.Width(label(len(k.Path))) + 2*bars + 2 }
	long := func() bool { return 18+widest+len(k.Path)*(step()+1+widest) > w }
	if long() {
		label, bars = strconv.Itoa, 1
	}
	if long() {
		label, bars = func(int) string { return pg.Signs.Rule }, 0
	}
	var lines []string
	for _, x := range list {
		r := pg.Row(w).Pad(2).Col(term.Faint, x.name, 15).Col(term.Plain, term.Clean(x.stops[0]), widest)
		end := len(x.stops) // after the last change
		for end > 1 && x.stops[end-1] == x.stops[end-2] {
			end--
		}
		for i, to := range x.stops[1:end] {
			sign, st := link(pg, k, i+1)
			if to == x.stops[i] { // unchanged by this hop
				r.Add(term.Faint, strings.Repeat(pg.Signs.Rule, step()+1+widest))
				continue
			}
			way := strings.Repeat(sign, bars)
			r.Add(st, way+label(i+1)+way+pg.Arrow).Pad(1).Col(term.Plain, term.Clean(to), widest)
		}
		lines = append(lines, r.String())
	}
	return lines
}

// BoardReason is why newer versions cannot be reached. It stands for all versions that one rule
// blocks with the same text.
type reason struct {
	What                          string // "Kubernetes v1.36.4"
	rule, Text, remedy, reference string
	// Beyond is set if no hop of the path reaches the versions.
	Beyond bool
}

// ReasonsOf groups the unreachable versions by reason. Those that no hop reaches come first.
func ReasonsOf(k *check.Check) []reason {
	type group struct {
		reason
		component string
		versions  []string
	}
	var order []*group
	for _, b := range k.Blocked {
		if b.Component == "cli" && len(k.Path) > 0 {
			continue // the path names the CLI of each hop
		}
		beyond := Newer(b.Version, goalOf(k, b.Component))
		without := func(s string) string { return strings.ReplaceAll(s, b.Version, "\x00") }
		i := slices.IndexFunc(order, func(g *group) bool {
			last := g.versions[len(g.versions)-1]
			return g.rule == b.Rule && g.Beyond == beyond && strings.ReplaceAll(g.Text, last, "\x00") == without(b.Reason) && (g.component == b.Component || g.Text == b.Reason)
		})
		if i < 0 {
			order = append(order, &group{reason: reason{Beyond: beyond}, component: b.Component})
			i = len(order) - 1
		}
		g := order[i]
		if g.component == b.Component {
			g.versions = append(g.versions, b.Version)
		} else {
			g.What += ", " + componentName(b.Component) + " " + b.Version
		}
		g.rule, g.Text, g.remedy, g.reference = b.Rule, b.Reason, b.Remedy, b.Reference
	}
	var out []reason
	for _, g := range order {
		n := len(g.versions)
		head := componentName(g.component) + " " + g.versions[0]
		switch {
		case n == 2:
			head += " and " + g.versions[1]
		case n > 2:
			head += fmt.Sprintf(" to %s (%d)", g.versions[n-1], n)
		}
		if n > 1 && strings.Contains(g.Text, g.versions[n-1]) {
			others := g.versions[0]
			if n > 2 {
				others = fmt.Sprintf("the other %d", n-1)
			}
			g.Text += ", likewise " + others
		}
		g.What = head + g.What
		out = append(out, g.reason)
	}
	slices.SortStableFunc(out, func(a, b reason) int {
		switch {
		case a.Beyond == b.Beyond:
			return 0
		case a.Beyond:
			return -1
		}
		return 1
	})
	return out
}

// goalOf is the version of a component at the end of the path; empty if there is no path.
func goalOf(k *check.Check, component string) string {
	if len(k.Path) == 0 {
		return ""
	}
	to := k.Path[len(k.Path)-1].To
	switch component {
	case "kubernetes":
		return to.Kubernetes
	case "image":
		return to.Image
	case "services":
		return to.Release
	}
	return ""
}

// Newer reports whether version a is newer than b. An invalid version is older than all.
func Newer(a, b string) bool {
	var x, y check.Request // its fields are versions
	if x.Release.UnmarshalText([]byte(a)) != nil {
		return false
	}
	return y.Release.UnmarshalText([]byte(b)) != nil || y.Release.Less(x.Release)
}

// blockedRows lists why newer versions cannot be reached. most bounds the number of one-line
// rows; 0 means all, with the remedy.
func blockedRows(pg Page, w int, k *check.Check, most int) []string {
	var lines []string
	list := ReasonsOf(k)
	for i, x := range list {
		if most > 0 && i == most {
			lines = append(lines, pg.Row(w).Pad(4).Add(term.Faint, fmt.Sprintf("%s %s", pg.Ellipsis, words.Count(len(list)-i, "more reason"))).String())
			break
		}
		if most > 0 {
			lines = append(lines, ReasonRow(pg, w, x, false))
			continue
		}
		lines = append(lines, ReasonBlock(pg, w, x, false)...)
	}
	return lines
}

// ReasonBlock is a reason with its remedy, on as many lines as it needs.
func ReasonBlock(pg Page, w int, x reason, here bool) []string {
	var lines []string
	sign, st := reasonSign(pg, x)
	name := term.Plain
	if here {
		name = term.Strong
	}
	lines = append(lines, pg.Row(w).Add(term.Accent, Marker(pg, here)).Add(st, sign+" ").Hang(name, term.Clean(x.What)+": "+term.Clean(x.Text))...)
	if !x.Beyond || x.remedy == "" {
		return lines
	}
	lines = append(lines, pg.Row(w).Pad(4).Add(term.Faint, pg.Branch+" ").Hang(term.Accent, "fix: "+term.Clean(pg.Commands.Text(x.remedy)))...)
	return lines
}

// reasonSign distinguishes versions that no hop reaches from those that a later hop reaches.
func reasonSign(pg Page, x reason) (string, term.Style) {
	if x.Beyond {
		return pg.Fail, term.Caution
	}
	return pg.Dot, term.Faint
}

// ReasonRow is a reason on one line.
func ReasonRow(pg Page, w int, x reason, here bool) string {
	sign, st := reasonSign(pg, x)
	name := term.Plain
	if here {
		name = term.Strong
	}
	return pg.Row(w).Add(term.Accent, Marker(pg, here)).Add(st, sign+" ").Add(name, term.Clean(x.What)).Add(term.Faint, ": "+term.Clean(x.Text)).String()
}

func componentName(s string) string {
	switch s {
	case "cli":
		return "CLI"
	case "services":
		return "release"
	case "kubernetes":
		return "Kubernetes"
	}
	return s
}

// mostValues is the maximum number of listed values of a chart.
const mostValues = 20

// ChangeRows lists the changes of the next hop and its estimated duration.
func ChangeRows(pg Page, w int, k *check.Check) []string {
	x := k.Changes
	if x == nil || len(k.Path) == 0 {
		return nil
	}
	lines := []string{pg.Rule(w, "Will change in hop 1", "")}
	add := func(head, text string) {
		if text == "" {
			return
		}
		for i, p := range term.Wrap(text, max(20, w-18)) {
			if i > 0 {
				head = ""
			}
			lines = append(lines, pg.Row(w).Pad(2).Col(term.Faint, head, 14).Add(term.Plain, p).String())
		}
	}
	var nodes []string
	total := 0
	for _, g := range slices.Sorted(maps.Keys(x.Nodes)) {
		nodes = append(nodes, fmt.Sprintf("%d of %s", x.Nodes[g], term.Clean(g)))
		total += x.Nodes[g]
	}
	replaces := "replaces " + strings.Join(nodes, ", ")
	switch {
	case total == 0:
		replaces = "none is replaced"
	case total > 1:
		replaces += ", one after the other"
	}
	if kept := InPlaceOf(x); len(kept) > 0 {
		if total == 0 {
			replaces = ""
		} else {
			replaces += "; "
		}
		replaces += "upgrades in place " + strings.Join(kept, ", ") + ": their machines stay"
	}
	add("nodes", replaces)
	var kinds []string
	for _, l := range []struct {
		word  string
		names []string
	}{{"added", x.KindsAdded}, {"changed", x.KindsChanged}, {"removed", x.KindsRemoved}} {
		if len(l.names) > 0 {
			kinds = append(kinds, fmt.Sprintf("%d %s (%s)", len(l.names), l.word, term.Clean(SomeNames(shortKinds(l.names), 4))))
		}
	}
	add("CRDs", strings.Join(kinds, ", "))
	var pcrs []string
	weaker := false
	for _, m := range x.Measurements {
		pcrs = append(pcrs, fmt.Sprintf("PCR %d %s %s %s", m.PCR, shortDigest(m.From, pg.Ellipsis), pg.To, shortDigest(m.To, pg.Ellipsis)))
		weaker = weaker || m.Weaker
	}
	add("measurements", strings.Join(pcrs, ", "))
	if weaker {
		lines = append(lines, pg.Row(w).Pad(16).Add(term.Bad, "some are enforced less strictly than before").String())
	}
	add("ConfigMaps", shortDigests(term.Clean(strings.Join(x.ConfigMaps, ", ")), pg.Ellipsis))
	add("charts", term.Clean(strings.Join(x.Charts, ", ")))
	head := "values"
	for _, ch := range x.ChartChanges {
		for i, v := range ch.Values {
			if i == mostValues {
				add(head, fmt.Sprintf("%s: %s more; -o json lists all", term.Clean(ch.Chart), words.Count(len(ch.Values)-i, "value")))
				break
			}
			add(head, term.Clean(ch.Chart+": "+v.String()))
			head = " " // only the first has a heading
		}
	}
	var images []string
	for _, i := range x.Images {
		images = append(images, i.Service)
	}
	add("images", term.Clean(strings.Join(images, ", ")))
	if x.Most > 0 {
		add("takes", DurationRange(x.Least, x.Most)+": "+term.Clean(x.Basis))
	}
	return lines
}

// DurationRange formats a range with the precision of an estimate: 36s to 12m.
func DurationRange(least, most time.Duration) string {
	a, b := coarse(least), coarse(most)
	if a == b {
		return "about " + a
	}
	return a + " to " + b
}

// coarse formats a duration in seconds below two minutes, else in minutes.
func coarse(d time.Duration) string {
	switch {
	case d < 2*time.Minute:
		return fmt.Sprintf("%ds", int(d.Round(time.Second)/time.Second))
	case d < 2*time.Hour:
		return fmt.Sprintf("%dm", int(d.Round(time.Minute)/time.Minute))
	}
	d = d.Round(time.Minute)
	return fmt.Sprintf("%dh%02dm", int(d/time.Hour), int(d/time.Minute)%60)
}

// shortDigests shortens SHA-256 values to their beginning.
func shortDigests(s, ellipsis string) string {
	return digests.ReplaceAllStringFunc(s, func(d string) string { return d[:8] + ellipsis })
}

var digests = regexp.MustCompile(`\b[0-9a-f]{64}\b`)

// shortKinds removes the API group from the names of CRDs.
func shortKinds(names []string) []string {
	out := make([]string, len(names))
	for i, n := range names {
		out[i], _, _ = strings.Cut(n, ".")
	}
	return out
}

// SomeNames lists at most most names and the number of the others.
func SomeNames(list []string, most int) string {
	if n := len(list); n > most {
		return strings.Join(list[:most], ", ") + fmt.Sprintf(" and %d more", n-most)
	}
	return strings.Join(list, ", ")
}

// shortDigest is the beginning of a register's value.
func shortDigest(s, ellipsis string) string {
	if s == "" {
		return "not required"
	}
	hex, rest, _ := strings.Cut(s, " ")
	if len(hex) > 8 {
		hex = hex[:8] + ellipsis
	}
	return term.Clean(strings.TrimSpace(hex + " " + rest))
}

// NeedAttention are the findings that need attention; fine is the number of passed checks.
func NeedAttention(list []plan.Finding) (out []plan.Finding, fine int) {
	for _, f := range list {
		if f.Severity == plan.Info {
			fine++
		} else {
			out = append(out, f)
		}
	}
	return out, fine
}

// CountBySeverity counts findings by severity: "2 blocking, 1 warning, 31 ok".
func CountBySeverity(list []plan.Finding) string {
	n := severities(list)
	var parts []string
	for _, p := range []struct {
		s         plan.Severity
		one, many string
	}{{plan.Block, "blocking", "blocking"}, {plan.Warn, "warning", "warnings"}, {plan.NotChecked, "not checked", "not checked"}, {plan.Info, "ok", "ok"}} {
		word := p.many
		if n[p.s] == 1 {
			word = p.one
		}
		if n[p.s] > 0 {
			parts = append(parts, fmt.Sprintf("%d %s", n[p.s], word))
		}
	}
	return strings.Join(parts, ", ")
}

func severities(list []plan.Finding) map[plan.Severity]int {
	n := map[plan.Severity]int{}
	for _, f := range list {
		n[f.Severity]++
	}
	return n
}

// Verdict is the result of a check in one sentence. k may be an incomplete check.
func Verdict(k *check.Check) (plan.Severity, string) {
	n := severities(k.Findings)
	blocks := n[plan.Block]
	remark := ""
	if n[plan.Warn] > 0 {
		remark += "; " + words.Count(n[plan.Warn], "warning")
	}
	if n[plan.NotChecked] > 0 {
		remark += fmt.Sprintf("; %d not checked", n[plan.NotChecked])
	}
	switch {
	case k.Current == (plan.Target{}):
		return plan.Block, "Cluster unreachable: showing release data only."
	case len(k.Path) > 0:
		hop, to := "The upgrade", targetSummary(k.Path[0])
		if len(k.Path) > 1 {
			hop = fmt.Sprintf("Hop 1 of %d", len(k.Path))
		}
		switch {
		case blocks > 0:
			return plan.Block, fmt.Sprintf("%s (%s) is blocked by %s.", hop, to, words.Count(blocks, "finding"))
		case k.Path[0].Get != "":
			return plan.Warn, fmt.Sprintf("%s needs constellation %s: %s%s.", hop, k.Path[0].CLI, to, remark)
		case remark != "":
			return plan.Warn, hop + " is possible: " + to + remark + "."
		}
		return plan.Info, hop + " is possible: " + to + "."
	case blocks > 0:
		return plan.Block, fmt.Sprintf("No upgrade path: %s.", firstBlock(k))
	case len(k.Blocked) > 0:
		return plan.Block, "Newer versions exist, but no upgrade path reaches them."
	case remark != "":
		return plan.Warn, "The cluster is current" + remark + "."
	case len(k.Findings) == 0:
		return plan.Info, "The cluster is current."
	}
	return plan.Info, fmt.Sprintf("The cluster is current, and all %d checks passed.", len(k.Findings))
}

func firstBlock(k *check.Check) string {
	for _, f := range k.Findings {
		if f.Severity == plan.Block {
			return f.Title
		}
	}
	return ""
}

// targetSummary are the versions that a hop changes: "release v1.1.0, image v1.1.0".
func targetSummary(h compat.Hop) string {
	var parts []string
	if h.To.Release != h.From.Release {
		parts = append(parts, "release "+h.To.Release)
	}
	if h.To.Image != h.From.Image && h.To.Image != h.To.Release {
		parts = append(parts, "image "+h.To.Image)
	}
	if h.To.Kubernetes != h.From.Kubernetes {
		parts = append(parts, "Kubernetes "+h.To.Kubernetes)
	}
	if h.To.Etcd != h.From.Etcd {
		parts = append(parts, "etcd "+h.To.Etcd)
	}
	if len(parts) == 0 && h.To.Image != h.From.Image {
		parts = append(parts, "image "+h.To.Image)
	}
	return cmp.Or(strings.Join(parts, " and "), "outdated nodes are replaced")
}

// FindingDetail renders evidence, owner and remedy of a finding. Commands are wrapped on the
// screen only: a printed one can be copied.
func FindingDetail(pg Page, w, indent int, f plan.Finding) []string {
	var lines []string
	add := func(head string, st term.Style, parts ...string) {
		for i, p := range parts {
			r := pg.Row(w).Pad(indent)
			if i == 0 {
				r.Col(term.Faint, head, 7)
			} else {
				r.Pad(8)
			}
			lines = append(lines, r.Add(st, p).String())
		}
	}
	text := func(head string, st term.Style, s string) {
		if s != "" {
			add(head, st, term.Wrap(s, max(20, w-indent-8))...)
		}
	}
	text("at", term.Plain, term.Clean(LocationsText(f.Locations)))
	text("why", term.Plain, term.CleanLines(f.Detail))
	if len(f.Objects) > 0 {
		text("objects", term.Plain, term.Clean(SomeNames(f.Objects, 12)))
	}
	text("owner", term.Plain, term.Clean(OwnerText(f.Owner)))
	text("fix", term.Accent, term.Clean(pg.Commands.Text(f.Remedy)))
	if pg.Commands.needsExport(f.Command) && !pg.Uncut { // in print it is above all findings, once
		text("before", term.Accent, term.Clean(pg.Commands.export()))
	}
	switch command := term.Clean(pg.Commands.Line(f.Command)); {
	case command == "":
	case pg.Uncut:
		add("command", term.Accent, command)
	default:
		text("command", term.Accent, command)
	}
	if ref := term.Clean(f.Reference); ref != "" && pg.Uncut {
		add("rule", term.Faint, ref)
	} else {
		text("rule", term.Faint, ref)
	}
	return lines
}

// SeveritySignOf is severitySign with a sign for findings that were not checked.
func SeveritySignOf(pg Page, s plan.Severity) (string, term.Style) {
	if s == plan.NotChecked {
		return "?", term.Caution
	}
	return severitySign(pg, s)
}

// byKubectl matches a field manager of kubectl in the text about an owner.
var byKubectl = regexp.MustCompile(`(^|[,;] )kubectl(-[a-z-]+)?([,;]|$)`)

// OwnerText names the owner of an object. A field manager of kubectl is no owner, only the
// tool of the last change.
func OwnerText(s string) string {
	return byKubectl.ReplaceAllString(s, "${1}last changed with kubectl$3")
}

// needExport reports whether a command of a finding needs KUBECONFIG to be exported.
func (sp CommandFormatter) needExport(list []plan.Finding) bool {
	return slices.ContainsFunc(list, func(f plan.Finding) bool { return sp.needsExport(f.Command) })
}

// AreaWidth is the width of the column with the area of a finding.
const AreaWidth = 12

// FindingGroups lists the findings that need attention with their details, and folds the
// passed checks into one line.
func FindingGroups(pg Page, w int, k *check.Check) []string {
	list, fine := NeedAttention(k.Findings)
	if len(k.Findings) == 0 {
		return nil
	}
	lines := []string{pg.Rule(w, "Findings", CountBySeverity(k.Findings))}
	if pg.Commands.needExport(list) {
		lines = append(lines, pg.Row(w).Pad(2).Add(term.Accent, term.Clean(pg.Commands.export())).String())
	}
	for _, g := range groupRelated(list) {
		f := g[0]
		sign, st := SeveritySignOf(pg, f.Severity)
		lines = append(lines, pg.Row(w).Pad(2).Add(st, sign+" ").Col(term.Faint, term.Clean(f.Source), AreaWidth).Hang(term.Plain, term.Clean(f.Title))...)
		lines = append(lines, FindingDetail(pg, w, AreaWidth+5, f)...)
		for _, also := range g[1:] {
			lines = append(lines, pg.Row(w).Pad(AreaWidth+5).Col(term.Faint, "also", 7).Add(term.Plain, term.Clean(also.Title)).String())
			if also.Command != "" && also.Command != f.Command {
				lines = append(lines, pg.Row(w).Pad(AreaWidth+13).Add(term.Accent, term.Clean(pg.Commands.Line(also.Command))).String())
			}
		}
	}
	if fine > 0 {
		lines = append(lines, PassedRow(pg, w, fine, false, len(list) == 0, false))
	}
	return lines
}

// groupRelated groups related findings, in the order of the first one of each group.
func groupRelated(list []plan.Finding) (out [][]plan.Finding) {
	for _, f := range list {
		i := slices.IndexFunc(out, func(g []plan.Finding) bool { return related(g[0], f) })
		if i < 0 {
			i, out = len(out), append(out, nil)
		}
		out[i] = append(out[i], f)
	}
	return out
}

// related reports whether f has the same cause as first: both name the same object first,
// or f is a drain that this object blocks. A drain names its node, then the pod that cannot
// be evicted, then what blocks the eviction.
func related(first, f plan.Finding) bool {
	if len(first.Objects) == 0 || len(f.Objects) == 0 {
		return false
	}
	about := f.Objects[:1]
	if f.ID == "drain-rehearsal" {
		about = f.Objects[:min(3, len(f.Objects))]
	}
	return slices.Contains(about, first.Objects[0])
}

// PassedRow is the line for the passed checks.
func PassedRow(pg Page, w, fine int, running, all, here bool) string {
	text := words.Count(fine, "other check") + " passed"
	switch {
	case running:
		text = words.Count(fine, "check") + " passed so far"
	case all && fine == 1:
		text = "the only check passed"
	case all:
		text = fmt.Sprintf("all %d checks passed", fine)
	}
	st := term.Faint
	if here {
		st = term.Strong
	}
	return pg.Row(w).Add(term.Accent, Marker(pg, here)).Add(term.Good, pg.OK+" ").Add(st, text).String()
}

// FeedText is the source, age and signer of the release data.
func FeedText(f check.FeedState, now time.Time) string {
	if f.Source == "" || f.Source == "embedded" {
		return "releases: built into this program"
	}
	s := "releases: " + term.Clean(f.Source)
	if f.Stale {
		s += ", STALE"
	}
	if !f.Fetched.IsZero() {
		s += ", " + term.Ago(f.Fetched, now)
	}
	if f.Signer != "" {
		s += ", signed by " + term.Clean(f.Signer)
	}
	return s
}

// LocationsText is "deploy/web.yaml:3, deploy/db.yaml:17 and 2 more".
func LocationsText(list []plan.Location) string {
	var names []string
	for _, l := range list {
		name := l.File
		if l.Line > 0 {
			name = fmt.Sprintf("%s:%d", l.File, l.Line)
		}
		names = append(names, name)
	}
	return SomeNames(names, 6)
}

// FindingItem is a finding as an item of a Markdown list.
func FindingItem(sp CommandFormatter, x *plan.Finding) string {
	var b strings.Builder
	fmt.Fprintf(&b, "\n- **%s** %s %s\n", x.Severity, CellOf(x.Title), CodeOf(x.ID))
	if len(x.Locations) > 0 {
		fmt.Fprintf(&b, "  - at: %s\n", CodeOf(LocationsText(x.Locations)))
	}
	for _, l := range []struct{ head, text string }{{"why", x.Detail}, {"owner", OwnerText(x.Owner)}, {"fix", sp.Text(x.Remedy)}} {
		if l.text != "" {
			fmt.Fprintf(&b, "  - %s: %s\n", l.head, CellOf(term.OneLine(l.text)))
		}
	}
	if len(x.Objects) > 0 {
		fmt.Fprintf(&b, "  - objects: %s\n", CodeOf(SomeNames(x.Objects, 12)))
	}
	if x.Command != "" {
		fmt.Fprintf(&b, "  - command: %s\n", CodeOf(sp.Line(x.Command)))
	}
	return b.String()
}
