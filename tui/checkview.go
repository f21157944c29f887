package tui

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"constellation/engine"
)

// The sections of an upgrade check, as the screen and the printed answer show them. All
// are pure functions of a check and a width.

// isPart reports whether a row belongs to the one above it.
func isPart(x engine.ComponentCheck) bool {
	return x.Kind == engine.ServiceOfRelease || x.Kind == engine.ServiceOfKubernetes
}

// last is the newest of the versions that this program can go to.
func last(versions []string) string {
	if n := len(versions); n > 0 {
		return versions[n-1]
	}
	return ""
}

// versionRows is the version table: what runs, what this program can go to, what the next
// hop brings, and the newest that is known.
func (c *console) versionRows(w int, k *engine.Check) []string {
	lines := []string{c.th.rule(w, "Versions", "")}
	widths := []int{14, 10, 10, 10, 10}
	for _, x := range k.Components {
		name := width(x.Name) + 1
		if isPart(x) {
			name += 2
		}
		for i, s := range []string{strings.Repeat("x", name), x.Now, last(x.Reachable), x.NextHop, x.Newest} {
			widths[i] = min(max(widths[i], width(clean(s))), 24)
		}
	}
	for sum := 0; ; { // what a narrow screen cannot show is cut, the verdict last
		sum = 2
		for _, n := range widths {
			sum += n + 1
		}
		widest := slices.Index(widths, slices.Max(widths))
		if sum <= w-12 || widths[widest] <= 10 || c.th.uncut {
			break
		}
		widths[widest]--
	}
	row := func(st style, name string, cells ...string) *row {
		r := c.th.row(w).pad(2).col(st, name, widths[0])
		for i, s := range cells {
			st := st
			if s == "-" {
				st = faint
			}
			r.col(st, s, widths[i+1])
		}
		return r
	}
	lines = append(lines, row(faint, "component", "now", "this CLI", "next hop", "newest").add(faint, "verdict").String())
	for i, x := range k.Components {
		name := clean(x.Name)
		if isPart(x) {
			branch := c.th.tee
			if i+1 == len(k.Components) || !isPart(k.Components[i+1]) {
				branch = c.th.branch
			}
			name = branch + " " + name
		}
		st := plain
		if isPart(x) {
			st = faint
		}
		this := last(x.Reachable)
		if x.Kind == "cli" {
			this = ""
		}
		r := row(st, name, dash(clean(x.Now)), dash(clean(this)), dash(clean(x.NextHop)), dash(clean(x.Newest)))
		lines = append(lines, r.add(verdictStyle(x), clean(x.Verdict)).String())
	}
	return lines
}

func verdictStyle(x engine.ComponentCheck) style {
	switch {
	case x.Verdict == "not updated":
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
	lines := []string{c.th.rule(w, "Path", fmt.Sprintf("%s, one minor at a time", count(len(k.Path), "hop")))}
	lines = append(lines, c.rails(w, k)...)
	for _, h := range k.Path {
		head := fmt.Sprintf("hop %d", h.Number)
		with := "with constellation " + clean(h.CLI.String())
		if h.Get == "" {
			with = "with this CLI"
		}
		if h.Number == 1 && h.Get == "" {
			with = "now, with this CLI"
		}
		r := c.th.row(w).pad(2).col(strong, head, 7).col(plain, with, 30).add(plain, replacesWords(h))
		lines = append(lines, r.String())
		if h.Get != "" && most == 0 {
			lines = append(lines, c.th.below(w, 10, 2, accent, clean(h.Get))...)
		}
		why := h.Why
		if most > 0 && len(why) > most {
			why = why[:most]
		}
		for _, s := range why {
			lines = append(lines, c.th.below(w, 10, 2, faint, clean(s))...)
		}
	}
	return append(lines, c.blockedRows(w, k, most)...)
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

// rails draws one line per component that moves: v1.0.0 ━━hop 1━━▶ v1.1.0.
func (c *console) rails(w int, k *engine.Check) []string {
	var lines []string
	for _, of := range []func(engine.Target) string{
		func(t engine.Target) string { return t.Release },
		func(t engine.Target) string { return t.Image },
		func(t engine.Target) string { return t.Kubernetes },
	} {
		now := of(k.Path[0].From)
		moves := false
		r := c.th.row(w).pad(3).add(plain, clean(now))
		at := 3 + 16
		for _, h := range k.Path {
			to := of(h.To)
			sign, st := c.th.heavy, good // the hop that can be made now is the heavy one
			if h.Number > 1 {
				sign, st = c.th.signs.rule, plain
			}
			label := fmt.Sprintf("hop %d", h.Number)
			if to == "" || to == now {
				label, st = strings.Repeat(sign, width(label)), faint
			} else {
				moves = true
			}
			r.pad(1).add(st, sign+sign+label+sign+sign+c.th.arrow+" ").add(plain, clean(orElse(to, now)))
			at += 28
			r.to(at)
			now = orElse(to, now)
		}
		if moves {
			lines = append(lines, r.String())
		}
	}
	return lines
}

// blockedRows says why newer versions cannot be gone to, one line per reason. most
// bounds the number of rows; 0 tells all, with remedy and rule.
func (c *console) blockedRows(w int, k *engine.Check, most int) []string {
	type reason struct{ rule, text, remedy, ref string }
	var order []reason
	versions := map[reason][]string{}
	for _, b := range k.Blocked {
		if b.Component == "cli" && len(k.Path) > 0 {
			continue // the path says which CLI is needed when
		}
		x := reason{b.Rule, b.Reason, b.Remedy, b.Reference}
		if versions[x] == nil {
			order = append(order, x)
		}
		versions[x] = append(versions[x], componentWord(b.Component)+" "+b.Version)
	}
	var lines []string
	for i, x := range order {
		if most > 0 && i == most {
			lines = append(lines, c.th.row(w).pad(4).add(faint, fmt.Sprintf("%s %d more that cannot be reached", c.th.ellipsis, len(order)-i)).String())
			break
		}
		what := versions[x]
		names := clean(strings.Join(what, ", "))
		if len(what) > 3 {
			names = clean(fmt.Sprintf("%s and %d more", strings.Join(what[:2], ", "), len(what)-2))
		}
		r := c.th.row(w).pad(2).add(caution, c.th.fail+" ").add(plain, names).add(faint, ": "+clean(x.text))
		lines = append(lines, r.String())
		if most == 0 {
			if x.remedy != "" {
				lines = append(lines, c.th.row(w).pad(4).add(faint, c.th.branch+" ").add(accent, clean(c.deps.sp.text(x.remedy))).add(faint, "  ("+clean(x.rule)+")").String())
			}
		}
	}
	return lines
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
		parts := []string{text}
		if !c.th.uncut {
			parts = wrap(text, max(20, w-18))
		}
		for i, p := range parts {
			if i > 0 {
				head = ""
			}
			lines = append(lines, c.th.row(w).pad(2).col(faint, head, 14).add(plain, p).String())
		}
	}
	var nodes []string
	for _, g := range slices.Sorted(maps.Keys(x.Nodes)) {
		nodes = append(nodes, fmt.Sprintf("%d of %s", x.Nodes[g], clean(g)))
	}
	add("nodes", orElse(strings.Join(nodes, ", "), "none is replaced"))
	if len(nodes) > 0 {
		lines[len(lines)-1] = c.th.row(w).pad(2).col(faint, "nodes", 14).add(plain, strings.Join(nodes, ", ")+" replaced, one at a time beyond the wanted number").String()
	}
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
	add("ConfigMaps", clean(strings.Join(x.ConfigMaps, ", ")))
	add("charts", clean(strings.Join(x.Charts, ", ")))
	if x.Most > 0 {
		add("takes", durationRange(x.Least, x.Most)+" ("+clean(x.Basis)+")")
	}
	return lines
}

// durationRange writes a range in whole minutes, or seconds below two minutes.
func durationRange(least, most time.Duration) string {
	unit := time.Minute
	if most < 2*time.Minute {
		unit = time.Second
	}
	a, b := short(least.Round(unit)), short(most.Round(unit))
	if a == b {
		return "about " + a
	}
	return a + " to " + b
}

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

// tally is "2 blocked, 1 warning, 31 ok".
func tally(list []engine.Finding) string {
	n := map[engine.Severity]int{}
	for _, f := range list {
		n[f.Severity]++
	}
	var parts []string
	for _, p := range []struct {
		s    engine.Severity
		word string
	}{{engine.Block, "blocked"}, {engine.Warn, "to know"}, {engine.NotChecked, "not checked"}, {engine.Info, "ok"}} {
		if n[p.s] > 0 {
			parts = append(parts, fmt.Sprintf("%d %s", n[p.s], p.word))
		}
	}
	return strings.Join(parts, ", ")
}

// findingDetail is all that is known about a finding: evidence, owner, what to do.
func (c *console) findingDetail(w, indent int, f engine.Finding) []string {
	var lines []string
	add := func(head string, st style, text string) {
		if text == "" {
			return
		}
		for i, p := range c.lines(text, w-indent-10) {
			r := c.th.row(w).pad(indent)
			if i == 0 {
				r.col(faint, head, 9)
			} else {
				r.pad(10)
			}
			lines = append(lines, r.add(st, p).String())
		}
	}
	add("why", plain, cleanLines(f.Detail))
	if len(f.Objects) > 0 {
		add("objects", plain, clean(someNames(f.Objects, 12)))
	}
	add("owner", plain, clean(f.Owner))
	if f.Command == "" || !strings.Contains(f.Remedy, f.Command) {
		add("fix", accent, clean(c.deps.sp.text(f.Remedy)))
	}
	if f.Command != "" {
		add("command", accent, clean(c.deps.sp.line(f.Command)))
	}
	add("rule", faint, clean(f.Reference))
	return lines
}

// lines breaks a text for the screen, and leaves it whole for what is printed.
func (c *console) lines(text string, w int) []string {
	if c.th.uncut {
		return strings.Split(text, "\n")
	}
	return wrap(text, max(w, 20))
}

// severitySignOf also knows what was not checked.
func (c *console) severitySignOf(s engine.Severity) (string, style) {
	if s == engine.NotChecked {
		return "?", caution
	}
	return c.severitySign(s)
}

// findingGroups lists the findings that need somebody, by area, and folds the others
// into one line.
func (c *console) findingGroups(w int, k *engine.Check, detail bool) []string {
	list, fine := worth(k.Findings)
	lines := []string{c.th.rule(w, "Findings", tally(k.Findings))}
	for _, f := range list {
		sign, st := c.severitySignOf(f.Severity)
		lines = append(lines, c.th.row(w).pad(2).add(st, sign+" ").col(faint, clean(f.Source), 13).add(plain, clean(f.Title)).String())
		if detail {
			lines = append(lines, c.findingDetail(w, 18, f)...)
		}
	}
	switch {
	case fine > 0 && len(list) == 0:
		lines = append(lines, c.th.row(w).pad(2).add(good, c.th.ok+" ").add(plain, fmt.Sprintf("all %d checks are fine", fine)).String())
	case fine > 0:
		lines = append(lines, c.th.row(w).pad(2).add(good, c.th.ok+" ").add(faint, fmt.Sprintf("%s fine", count(fine, "other check"))).String())
	case len(list) == 0:
		return nil
	}
	return lines
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
