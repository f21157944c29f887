package tui

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"constellation/engine"
)

// The sections of an upgrade check, as the screen and the printed answer show them. All
// are pure functions of a check and a width.

// prose breaks a text into lines that stand indented, on the screen and in print.
func (c *console) prose(w, indent int, st style, text string) []string {
	var lines []string
	for _, p := range wrap(text, max(20, w-indent)) {
		lines = append(lines, c.th.row(w).pad(indent).add(st, p).String())
	}
	return lines
}

// last is the newest of the versions that this program can go to.
func last(versions []string) string {
	if n := len(versions); n > 0 {
		return versions[n-1]
	}
	return ""
}

// versionRows is the version table: what runs, what this program can go to, what the next
// hop brings, and the newest that is known. Without parts it has those rows alone that
// others belong to.
func (c *console) versionRows(w int, k *engine.Check, remark string, parts bool) []string {
	about := "this CLI: in one hop"
	if remark != "" {
		about = remark + ", " + about
	}
	lines := []string{c.th.rule(w, "Versions", about)}
	widths := []int{14, 10, 10, 10, 10}
	if w < 80 {
		widths[0] = 11
	}
	var rows []engine.ComponentCheck
	for _, x := range k.Components {
		if parts || !x.Part {
			rows = append(rows, x)
		}
	}
	for _, x := range rows {
		name := width(x.Name) + 1
		if x.Part {
			name += 2
		}
		for i, s := range []string{strings.Repeat("x", name), x.Now, last(x.Reachable), x.NextHop, x.Newest} {
			widths[i] = min(max(widths[i], width(clean(s))), 24)
		}
	}
	verdicts := 12
	for _, x := range rows {
		verdicts = max(verdicts, width(clean(verdictWord(x))))
	}
	columns := fitColumns(widths, w-verdicts, w >= 80 && !c.th.uncut)
	row := func(st style, name string, cells ...string) *row {
		r := c.th.row(w).pad(2).col(st, name, widths[0])
		for i, s := range cells[:columns-1] {
			st := st
			if s == "-" {
				st = faint
			}
			r.col(st, s, widths[i+1])
		}
		return r
	}
	lines = append(lines, row(faint, "component", "now", "this CLI", "next hop", "newest").add(faint, "verdict").String())
	for i, x := range rows {
		name := clean(x.Name)
		if x.Part {
			branch := c.th.tee
			if i+1 == len(rows) || !rows[i+1].Part {
				branch = c.th.branch
			}
			name = branch + " " + name
		}
		st := plain
		if x.Part {
			st = faint
		}
		this := last(x.Reachable)
		if x.Kind == "cli" {
			this = ""
		}
		r := row(st, name, dash(clean(x.Now)), dash(clean(this)), dash(clean(x.NextHop)), dash(clean(x.Newest)))
		lines = append(lines, r.add(verdictStyle(x), clean(verdictWord(x))).String())
	}
	return lines
}

// fitColumns makes columns of these widths fit into w and returns how many are shown.
// What is too wide is cut, if it may be; then columns go, the last one first, but never
// the first three.
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

// notUpdated is the verdict of what no hop changes.
const notUpdated = "not updated"

// verdictWord is the verdict of a row in words. A program is not what a hop updates.
func verdictWord(x engine.ComponentCheck) string {
	if x.Kind == "cli" && x.Verdict == notUpdated && x.Newest == "" {
		return "newest known"
	}
	return x.Verdict
}

func verdictStyle(x engine.ComponentCheck) style {
	switch {
	case x.Verdict == notUpdated:
		return faint
	case x.NextHop != "":
		return good
	case x.Verdict == "not reachable":
		return caution
	}
	return plain
}

// pathRows draws the hops, each with what it needs and why it is one of its own. most
// bounds how many reasons are told; 0 tells all.
func (c *console) pathRows(w int, k *engine.Check, most int) []string {
	if len(k.Path) == 0 {
		if len(k.Blocked) == 0 {
			return nil
		}
		return append([]string{c.th.rule(w, "Path", "none")}, c.blockedRows(w, k, most)...)
	}
	lines := []string{c.th.rule(w, "Path", pathRemark(k))}
	lines = append(lines, c.rails(w, k)...)
	lines = append(lines, c.hopRows(w, k, most)...)
	return append(lines, c.blockedRows(w, k, most)...)
}

func pathRemark(k *engine.Check) string {
	if len(k.Path) == 1 {
		return "1 hop"
	}
	return fmt.Sprintf("%d hops, one minor at a time", len(k.Path))
}

// hopRows says of each hop what it needs, and what it does. With most, reasons are left
// to whoever has more room.
func (c *console) hopRows(w int, k *engine.Check, most int) []string {
	var lines []string
	for _, h := range k.Path {
		with := "with constellation " + clean(h.CLI.String())
		switch {
		case h.Get == "" && h.Number == 1:
			with = "now, with this CLI"
		case h.Get == "":
			with = "with this CLI"
		}
		r := c.th.row(w).pad(2).col(strong, fmt.Sprintf("hop %d", h.Number), 6)
		if what := replacesWords(h); w >= 78 {
			r.col(plain, with, 27).add(plain, what)
		} else {
			with = strings.Replace(with, "with constellation ", "with ", 1)
			r.col(plain, with, 19).add(plain, strings.Replace(what, "the control planes, workers stay", "the control planes", 1))
		}
		if h.Number == 1 && k.Changes != nil && k.Changes.Most > 0 {
			if est := "  est. " + durationRange(k.Changes.Least, k.Changes.Most); r.used+width(est) <= w {
				r.add(faint, est)
			}
		}
		lines = append(lines, r.String())
		if most > 0 {
			continue
		}
		if h.Get != "" {
			lines = append(lines, c.prose(w, 9, accent, clean(c.deps.sp.text(h.Get)))...)
		}
		for _, s := range h.Why {
			lines = append(lines, c.prose(w, 9, faint, clean(s))...)
		}
	}
	return lines
}

// replacesWords says which nodes a hop makes anew.
func replacesWords(h engine.Hop) string {
	switch {
	case h.ReplaceControlPlanes && h.ReplaceWorkers:
		return "replaces every node"
	case h.ReplaceControlPlanes:
		return "replaces the control planes, workers stay"
	case h.ReplaceWorkers:
		return "replaces the workers"
	}
	return "replaces no node"
}

// rail is the way of one component, or of several that go together.
type rail struct {
	name  string
	stops []string // its version before the first hop and after each
}

// railsOf are the ways of components that move.
func railsOf(k *engine.Check) []rail {
	var out []rail
	for _, of := range []struct {
		name string
		at   func(engine.Target) string
	}{
		{"Kubernetes", func(t engine.Target) string { return t.Kubernetes }},
		{"OS image", func(t engine.Target) string { return t.Image }},
		{"Services", func(t engine.Target) string { return t.Release }},
	} {
		stops := []string{of.at(k.Path[0].From)}
		moves := false
		for i, h := range k.Path {
			to := orElse(of.at(h.To), stops[i])
			moves = moves || to != stops[i]
			stops = append(stops, to)
		}
		if moves {
			out = append(out, rail{of.name, stops})
		}
	}
	return out
}

// link is how the way of a hop is drawn: the next one is the heavy one, green if it can
// be made.
func (c *console) link(k *engine.Check, hop int) (string, style) {
	if hop > 1 {
		return c.th.signs.rule, plain
	}
	switch severity, _ := verdict(k); severity {
	case engine.Block:
		return c.th.heavy, bad
	case engine.Warn:
		return c.th.heavy, caution
	}
	return c.th.heavy, good
}

// rails draws the ways: v1.0.0 ━━hop 1━━▶ v1.1.0.
func (c *console) rails(w int, k *engine.Check) []string {
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
			widest = max(widest, width(clean(v)))
		}
	}
	label := func(hop int) string { return fmt.Sprintf("hop %d", hop) }
	bars := 2
	if len(k.Path) > 2 && w < 100 {
		label = strconv.Itoa
	}
	// step is how much room a hop takes, up to the version that it leads to.
	step := func() int { return width(label(len(k.Path))) + 2*bars + 2 }
	long := func() bool { return 18+widest+len(k.Path)*(step()+1+widest) > w }
	if long() {
		label, bars = strconv.Itoa, 1
	}
	if long() {
		label, bars = func(int) string { return c.th.signs.rule }, 0
	}
	var lines []string
	for _, x := range list {
		r := c.th.row(w).pad(2).col(faint, x.name, 15).col(plain, clean(x.stops[0]), widest)
		end := len(x.stops) // where it moves no more
		for end > 1 && x.stops[end-1] == x.stops[end-2] {
			end--
		}
		for i, to := range x.stops[1:end] {
			sign, st := c.link(k, i+1)
			if to == x.stops[i] { // it stays
				r.add(faint, strings.Repeat(c.th.signs.rule, step()+1+widest))
				continue
			}
			way := strings.Repeat(sign, bars)
			r.add(st, way+label(i+1)+way+c.th.arrow).pad(1).col(plain, clean(to), widest)
		}
		lines = append(lines, r.String())
	}
	return lines
}

// reason is why newer versions cannot be gone to: those that one rule forbids with the
// same words.
type reason struct {
	what                          string // "Kubernetes v1.36.4"
	rule, text, remedy, reference string
	// beyond says that no hop of the path comes that far.
	beyond bool
}

// reasonsOf groups what cannot be gone to. First comes what the path does not bring
// either.
func reasonsOf(k *engine.Check) []reason {
	type group struct {
		reason
		component string
		versions  []string
	}
	var order []*group
	for _, b := range k.Blocked {
		if b.Component == "cli" && len(k.Path) > 0 {
			continue // the path says which CLI is needed when
		}
		beyond := newer(b.Version, goalOf(k, b.Component))
		without := func(s string) string { return strings.ReplaceAll(s, b.Version, "\x00") }
		i := slices.IndexFunc(order, func(g *group) bool {
			last := g.versions[len(g.versions)-1]
			return g.rule == b.Rule && g.beyond == beyond && strings.ReplaceAll(g.text, last, "\x00") == without(b.Reason) && (g.component == b.Component || g.text == b.Reason)
		})
		if i < 0 {
			order = append(order, &group{reason: reason{beyond: beyond}, component: b.Component})
			i = len(order) - 1
		}
		g := order[i]
		if g.component == b.Component {
			g.versions = append(g.versions, b.Version)
		} else {
			g.what += ", " + componentWord(b.Component) + " " + b.Version
		}
		g.rule, g.text, g.remedy, g.reference = b.Rule, b.Reason, b.Remedy, b.Reference
	}
	var out []reason
	for _, g := range order {
		n := len(g.versions)
		head := componentWord(g.component) + " " + g.versions[0]
		switch {
		case n == 2:
			head += " and " + g.versions[1]
		case n > 2:
			head += fmt.Sprintf(" to %s (%d)", g.versions[n-1], n)
		}
		if n > 1 && strings.Contains(g.text, g.versions[n-1]) {
			g.text += ", likewise the others"
		}
		g.what = head + g.what
		out = append(out, g.reason)
	}
	slices.SortStableFunc(out, func(a, b reason) int {
		switch {
		case a.beyond == b.beyond:
			return 0
		case a.beyond:
			return -1
		}
		return 1
	})
	return out
}

// goalOf is where the path brings a component; empty if there is no path.
func goalOf(k *engine.Check, component string) string {
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

// newer reports whether a version is after another one. What is no version is before all.
func newer(a, b string) bool {
	var x, y engine.CheckRequest // whose fields are versions
	if x.Release.UnmarshalText([]byte(a)) != nil {
		return false
	}
	return y.Release.UnmarshalText([]byte(b)) != nil || y.Release.Less(x.Release)
}

// blockedRows says why newer versions cannot be gone to, one line per reason. most
// bounds the number of rows; 0 tells all, with remedy and rule.
func (c *console) blockedRows(w int, k *engine.Check, most int) []string {
	var lines []string
	list := reasonsOf(k)
	for i, x := range list {
		if most > 0 && i == most {
			lines = append(lines, c.th.row(w).pad(4).add(faint, fmt.Sprintf("%s %s", c.th.ellipsis, count(len(list)-i, "more reason"))).String())
			break
		}
		if most > 0 {
			lines = append(lines, c.reasonRow(w, x, false))
			continue
		}
		lines = append(lines, c.reasonBlock(w, x, false)...)
	}
	return lines
}

// reasonBlock is a reason on as many lines as it needs, with what to do about it.
func (c *console) reasonBlock(w int, x reason, here bool) []string {
	var lines []string
	sign, st := c.reasonSign(x)
	name := plain
	if here {
		name = strong
	}
	for i, p := range wrap(clean(x.what)+": "+clean(x.text), w-4) {
		r := c.th.row(w).pad(4)
		if i == 0 {
			r = c.th.row(w).add(accent, c.marker(here)).add(st, sign+" ")
		}
		lines = append(lines, r.add(name, p).String())
	}
	if !x.beyond {
		return lines
	}
	what := clean(x.rule)
	if x.remedy != "" {
		what += ": " + clean(c.deps.sp.text(x.remedy))
	}
	for i, p := range wrap(what, w-6) {
		r := c.th.row(w).pad(6)
		if i == 0 {
			r = c.th.row(w).pad(4).add(faint, c.th.branch+" ")
		}
		lines = append(lines, r.add(accent, p).String())
	}
	return lines
}

// reasonSign tells what no hop brings from what a later one does.
func (c *console) reasonSign(x reason) (string, style) {
	if x.beyond {
		return c.th.fail, caution
	}
	return c.th.dot, faint
}

func (c *console) reasonRow(w int, x reason, here bool) string {
	sign, st := c.reasonSign(x)
	name := plain
	if here {
		name = strong
	}
	return c.th.row(w).add(accent, c.marker(here)).add(st, sign+" ").add(name, clean(x.what)).add(faint, ": "+clean(x.text)).String()
}

func componentWord(s string) string {
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

// mostValues is how many values of a chart are told one by one.
const mostValues = 20

// changeRows says what the next hop will change, and how long it takes.
func (c *console) changeRows(w int, k *engine.Check) []string {
	x := k.Changes
	if x == nil || len(k.Path) == 0 {
		return nil
	}
	lines := []string{c.th.rule(w, "Will change in hop 1", "")}
	add := func(head, text string) {
		if text == "" {
			return
		}
		for i, p := range wrap(text, max(20, w-18)) {
			if i > 0 {
				head = ""
			}
			lines = append(lines, c.th.row(w).pad(2).col(faint, head, 14).add(plain, p).String())
		}
	}
	var nodes []string
	total := 0
	for _, g := range slices.Sorted(maps.Keys(x.Nodes)) {
		nodes = append(nodes, fmt.Sprintf("%d of %s", x.Nodes[g], clean(g)))
		total += x.Nodes[g]
	}
	replaces := "replaces " + strings.Join(nodes, ", ")
	switch {
	case total == 0:
		replaces = "none is replaced"
	case total > 1:
		replaces += ", one after the other"
	}
	if kept := inPlaceOf(x); len(kept) > 0 {
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
			kinds = append(kinds, fmt.Sprintf("%d %s (%s)", len(l.names), l.word, clean(someNames(shortKinds(l.names), 4))))
		}
	}
	add("CRDs", strings.Join(kinds, ", "))
	var pcrs []string
	weaker := false
	for _, m := range x.Measurements {
		pcrs = append(pcrs, fmt.Sprintf("PCR %d %s %s %s", m.PCR, digestWord(m.From, c.th.ellipsis), c.th.to, digestWord(m.To, c.th.ellipsis)))
		weaker = weaker || m.Weaker
	}
	add("measurements", strings.Join(pcrs, ", "))
	if weaker {
		lines = append(lines, c.th.row(w).pad(16).add(bad, "some are demanded less strictly than before").String())
	}
	add("ConfigMaps", shortDigests(clean(strings.Join(x.ConfigMaps, ", ")), c.th.ellipsis))
	add("charts", clean(strings.Join(x.Charts, ", ")))
	head := "values"
	for _, ch := range x.ChartChanges {
		for i, v := range ch.Values {
			if i == mostValues {
				add(head, fmt.Sprintf("%s: %s more; -o json tells all", clean(ch.Chart), count(len(ch.Values)-i, "value")))
				break
			}
			add(head, clean(ch.Chart+": "+v.String()))
			head = " " // one word for all of them
		}
	}
	var images []string
	for _, i := range x.Images {
		images = append(images, i.Service)
	}
	add("images", clean(strings.Join(images, ", ")))
	if x.Most > 0 {
		add("takes", durationRange(x.Least, x.Most)+": "+clean(x.Basis))
	}
	return lines
}

// durationRange writes a range as coarsely as an estimate deserves: 36s to 12m.
func durationRange(least, most time.Duration) string {
	a, b := coarse(least), coarse(most)
	if a == b {
		return "about " + a
	}
	return a + " to " + b
}

// coarse writes a duration in seconds below two minutes, else in minutes.
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

// shortDigests keeps the beginning of SHA-256 values.
func shortDigests(s, ellipsis string) string {
	return digests.ReplaceAllStringFunc(s, func(d string) string { return d[:8] + ellipsis })
}

var digests = regexp.MustCompile(`\b[0-9a-f]{64}\b`)

// shortKinds leaves out the group that all share.
func shortKinds(names []string) []string {
	out := make([]string, len(names))
	for i, n := range names {
		out[i], _, _ = strings.Cut(n, ".")
	}
	return out
}

func someNames(list []string, most int) string {
	if n := len(list); n > most {
		return strings.Join(list[:most], ", ") + fmt.Sprintf(" and %d more", n-most)
	}
	return strings.Join(list, ", ")
}

// digestWord is the beginning of a register's value.
func digestWord(s, ellipsis string) string {
	if s == "" {
		return "not demanded"
	}
	hex, rest, _ := strings.Cut(s, " ")
	if len(hex) > 8 {
		hex = hex[:8] + ellipsis
	}
	return clean(strings.TrimSpace(hex + " " + rest))
}

// worth are the findings that need somebody; the number of the others is returned too.
func worth(list []engine.Finding) (out []engine.Finding, fine int) {
	for _, f := range list {
		if f.Severity == engine.Info {
			fine++
		} else {
			out = append(out, f)
		}
	}
	return out, fine
}

// tally is "2 block, 1 to know, 31 ok".
func tally(list []engine.Finding) string {
	n := severities(list)
	var parts []string
	for _, p := range []struct {
		s         engine.Severity
		one, many string
	}{{engine.Block, "blocking", "blocking"}, {engine.Warn, "to know", "to know"}, {engine.NotChecked, "not checked", "not checked"}, {engine.Info, "ok", "ok"}} {
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

func severities(list []engine.Finding) map[engine.Severity]int {
	n := map[engine.Severity]int{}
	for _, f := range list {
		n[f.Severity]++
	}
	return n
}

// verdict answers in one line what the whole check is about. It is about what k holds,
// which may be less than a whole check.
func verdict(k *engine.Check) (engine.Severity, string) {
	n := severities(k.Findings)
	blocks := n[engine.Block]
	remark := ""
	if n[engine.Warn] > 0 {
		remark += fmt.Sprintf("; %s to know before", count(n[engine.Warn], "finding"))
	}
	if n[engine.NotChecked] > 0 {
		remark += fmt.Sprintf("; %d not checked", n[engine.NotChecked])
	}
	switch {
	case k.Current == (engine.Target{}):
		return engine.Block, "The cluster could not be asked: only what is known of releases is told."
	case len(k.Path) > 0:
		hop, to := "The upgrade", targetWords(k.Path[0])
		if len(k.Path) > 1 {
			hop = fmt.Sprintf("Hop 1 of %d", len(k.Path))
		}
		switch {
		case blocks > 0:
			return engine.Block, fmt.Sprintf("%s (%s) is blocked by %s.", hop, to, count(blocks, "finding"))
		case k.Path[0].Get != "":
			return engine.Warn, fmt.Sprintf("%s needs constellation %s: %s%s.", hop, k.Path[0].CLI, to, remark)
		case remark != "":
			return engine.Warn, hop + " can be made: " + to + remark + "."
		}
		return engine.Info, hop + " can be made: " + to + "."
	case blocks > 0:
		return engine.Block, fmt.Sprintf("No way: %s.", firstBlock(k))
	case len(k.Blocked) > 0:
		return engine.Block, "There is something newer, and no way to it from here."
	case remark != "":
		return engine.Warn, "The cluster is current" + remark + "."
	case len(k.Findings) == 0:
		return engine.Info, "The cluster is current."
	}
	return engine.Info, fmt.Sprintf("The cluster is current, and all %d checks are fine.", len(k.Findings))
}

func firstBlock(k *engine.Check) string {
	for _, f := range k.Findings {
		if f.Severity == engine.Block {
			return f.Title
		}
	}
	return ""
}

// targetWords are the versions that a hop changes: "release v1.1.0, image v1.1.0".
func targetWords(h engine.Hop) string {
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
	if len(parts) == 0 && h.To.Image != h.From.Image {
		parts = append(parts, "image "+h.To.Image)
	}
	return orElse(strings.Join(parts, " and "), "the nodes catch up")
}

// findingDetail is all that is known about a finding: evidence, owner, what to do. A
// command is broken on the screen alone: what is printed can be copied.
func (c *console) findingDetail(w, indent int, f engine.Finding) []string {
	var lines []string
	add := func(head string, st style, parts ...string) {
		for i, p := range parts {
			r := c.th.row(w).pad(indent)
			if i == 0 {
				r.col(faint, head, 7)
			} else {
				r.pad(8)
			}
			lines = append(lines, r.add(st, p).String())
		}
	}
	text := func(head string, st style, s string) {
		if s != "" {
			add(head, st, wrap(s, max(20, w-indent-8))...)
		}
	}
	text("why", plain, cleanLines(f.Detail))
	if len(f.Objects) > 0 {
		text("objects", plain, clean(someNames(f.Objects, 12)))
	}
	text("owner", plain, clean(ownerWords(f.Owner)))
	text("fix", accent, clean(c.deps.sp.text(f.Remedy)))
	if c.deps.sp.needsExport(f.Command) && !c.th.uncut { // in print it stands above, once
		text("before", accent, clean(c.deps.sp.export()))
	}
	switch command := clean(c.deps.sp.line(f.Command)); {
	case command == "":
	case c.th.uncut:
		add("command", accent, command)
	default:
		text("command", accent, command)
	}
	if ref := clean(f.Reference); ref != "" && c.th.uncut {
		add("rule", faint, ref)
	} else {
		text("rule", faint, ref)
	}
	return lines
}

// severitySignOf also knows what was not checked.
func (c *console) severitySignOf(s engine.Severity) (string, style) {
	if s == engine.NotChecked {
		return "?", caution
	}
	return c.severitySign(s)
}

// byKubectl matches a field manager of kubectl among the words about an owner.
var byKubectl = regexp.MustCompile(`(^|[,;] )kubectl(-[a-z-]+)?([,;]|$)`)

// ownerWords says who can change an object. That kubectl changed it last tells how, not
// who.
func ownerWords(s string) string {
	return byKubectl.ReplaceAllString(s, "${1}last changed with kubectl$3")
}

// needExport reports whether commands of findings lead to a cluster that they do not name.
func (sp commandFormatter) needExport(list []engine.Finding) bool {
	return slices.ContainsFunc(list, func(f engine.Finding) bool { return sp.needsExport(f.Command) })
}

// areaWidth is how wide the area of a finding is shown.
const areaWidth = 12

// findingGroups lists the findings that need somebody with all that is known of them,
// and folds the others into one line.
func (c *console) findingGroups(w int, k *engine.Check) []string {
	list, fine := worth(k.Findings)
	if len(k.Findings) == 0 {
		return nil
	}
	lines := []string{c.th.rule(w, "Findings", tally(k.Findings))}
	if c.deps.sp.needExport(list) {
		lines = append(lines, c.th.row(w).pad(2).add(accent, clean(c.deps.sp.export())).String())
	}
	for _, g := range troubles(list) {
		f := g[0]
		sign, st := c.severitySignOf(f.Severity)
		for i, p := range wrap(clean(f.Title), max(20, w-areaWidth-5)) {
			r := c.th.row(w).pad(areaWidth + 5)
			if i == 0 {
				r = c.th.row(w).pad(2).add(st, sign+" ").col(faint, clean(f.Source), areaWidth)
			}
			lines = append(lines, r.add(plain, p).String())
		}
		lines = append(lines, c.findingDetail(w, areaWidth+5, f)...)
		for _, also := range g[1:] {
			lines = append(lines, c.th.row(w).pad(areaWidth+5).col(faint, "also", 7).add(plain, clean(also.Title)).String())
			if also.Command != "" && also.Command != f.Command {
				lines = append(lines, c.th.row(w).pad(areaWidth+13).add(accent, clean(c.deps.sp.line(also.Command))).String())
			}
		}
	}
	if fine > 0 {
		lines = append(lines, c.fineRow(w, fine, len(list) == 0, false))
	}
	return lines
}

// troubles puts findings that tell of the same trouble together, in the order of the
// first of each.
func troubles(list []engine.Finding) (out [][]engine.Finding) {
	for _, f := range list {
		i := slices.IndexFunc(out, func(g []engine.Finding) bool { return sameTrouble(g[0], f) })
		if i < 0 {
			i, out = len(out), append(out, nil)
		}
		out[i] = append(out[i], f)
	}
	return out
}

// sameTrouble reports whether f tells of what first tells of: both are about the same
// object above all, or f is a drain that hangs at it. A drain names its node first, then
// the pod that would stay, then what keeps the pod.
func sameTrouble(first, f engine.Finding) bool {
	if len(first.Objects) == 0 || len(f.Objects) == 0 {
		return false
	}
	about := f.Objects[:1]
	if f.ID == "drain-rehearsal" {
		about = f.Objects[:min(3, len(f.Objects))]
	}
	return slices.Contains(about, first.Objects[0])
}

// fineRow stands for the findings that need nobody.
func (c *console) fineRow(w, fine int, all, here bool) string {
	text := count(fine, "other check") + " fine"
	switch {
	case c.chk.busy:
		text = count(fine, "check") + " fine so far"
	case all && fine == 1:
		text = "the only check is fine"
	case all:
		text = fmt.Sprintf("all %d checks are fine", fine)
	}
	st := faint
	if here {
		st = strong
	}
	return c.th.row(w).add(accent, c.marker(here)).add(good, c.th.ok+" ").add(st, text).String()
}

// feedWords says where the knowledge about releases comes from.
func feedWords(f engine.FeedState, now time.Time) string {
	if f.Source == "" || f.Source == "embedded" {
		return "releases: those of this program"
	}
	s := "releases: " + clean(f.Source)
	if f.Stale {
		s += ", STALE"
	}
	if !f.Fetched.IsZero() {
		s += ", " + ago(f.Fetched, now)
	}
	if f.Signer != "" {
		s += ", signed by " + clean(f.Signer)
	}
	return s
}
