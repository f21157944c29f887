package view

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"constellation/engine"
	"constellation/engine/check"
	"constellation/engine/cluster"
	"constellation/engine/plan"
	"constellation/engine/rollout"
	"constellation/engine/words"
	"constellation/tui/term"
)

// SortBy is the order of a list of machines.
type SortBy int

// The orders of machines.
const (
	SortSlowest SortBy = iota
	sortName
	sortState
	sortGroup
	Sorts
)

func (s SortBy) String() string { return [...]string{"slowest", "name", "state", "group"}[s] }

// InFlight reports whether a machine is in transition or has failed.
func InFlight(n *rollout.BoardNode) bool {
	switch n.State {
	case plan.NodeOutdated, plan.NodeReady, plan.NodeGone:
		return false
	}
	return true
}

// MachinesOf are the machines in flight, or those that match the filter, if there is one.
func MachinesOf(b *rollout.Board, f Filter, by SortBy, now time.Time) []*rollout.BoardNode {
	list := make([]*rollout.BoardNode, 0, 64)
	all := b.Nodes()
	if len(f.Terms) == 0 {
		all = b.Moving()
	}
	for n := range all {
		if f.Node(n, now) {
			list = append(list, n)
		}
	}
	if len(f.Terms) == 0 && by == SortSlowest { // already in the board's order
		return list
	}
	slices.SortFunc(list, func(x, y *rollout.BoardNode) int {
		var d int
		switch by {
		case SortSlowest:
			d = x.Since.Compare(y.Since)
		case sortState:
			d = cmp.Compare(slices.Index(NodeStates, x.State), slices.Index(NodeStates, y.State))
		case sortGroup:
			d = strings.Compare(x.Group, y.Group)
		}
		return cmp.Or(d, strings.Compare(x.Name, y.Name))
	})
	return list
}

// NodeLine is the row of a machine as text.
func NodeLine(pg Page, n *rollout.BoardNode) string {
	return strings.TrimSpace(fmt.Sprintf("%s  %s  %s  %s  %s", term.Clean(n.Name), term.Clean(n.Group), term.Clean(n.State), age(pg, n), term.Clean(n.Text)))
}

// age is how long a machine has been in its state. If it was in that state at the first
// observation, the age is a lower bound.
func age(pg Page, n *rollout.BoardNode) string {
	d := seconds(pg.Now.Sub(n.Since))
	if !n.Seen {
		return "≥" + d
	}
	return d
}

// seconds is short without fractions of seconds, which would flicker.
func seconds(d time.Duration) string {
	if d < 10*time.Second {
		return strconv.Itoa(int(max(d, 0)/time.Second)) + "s"
	}
	return term.Duration(d)
}

// TargetText is the target of the rollout, for display.
func TargetText(pg Page, b *rollout.Board) string {
	if b.Plan == nil {
		return term.Clean(b.To)
	}
	to := term.Clean(b.Plan.To.Kubernetes)
	if from := term.Clean(b.Plan.From.Kubernetes); from != "" && to != "" && from != to {
		to = from + pg.To + to
	}
	if i := term.Clean(b.Plan.To.Image); i != "" {
		to = strings.TrimSpace(to + "  image " + i)
	}
	return to
}

// ETA is the estimated remaining time as a range.
func ETA(pg Page, b *rollout.Board, now time.Time) string {
	if b.ETAMost.IsZero() || b.Result != nil {
		return ""
	}
	least, most := b.ETALeast.Sub(now), b.ETAMost.Sub(now)
	switch {
	case most < 0:
		return "ETA exceeded"
	case least < time.Second:
		return "ETA within " + seconds(most)
	}
	return "ETA " + seconds(least) + "-" + seconds(most)
}

// Pipeline shows the number of machines and the median dwell time of each stage, and on wide
// screens also the rate per minute and the 95th percentile.
func Pipeline(pg Page, b *rollout.Board, w, h int) []string {
	now := pg.Now
	done, total := b.Places()
	remark := fmt.Sprintf("%d of %d nodes %s", done, total, aimOf(b))
	if p := b.Pace(now); p > 0 {
		remark += ", " + perMinute(p)
	}
	lines := []string{pg.Rule(w, "Pipeline", remark)}
	if w >= 112 {
		return append(lines, wideStages(pg, b, w, now, done, total)...)
	}
	brief := h < 16
	lines = append(lines, stageRows(pg, b, "old", oldStages(b), w, brief)...)
	lines = append(lines, stageRows(pg, b, "new", newStages, w, brief)...)
	return append(lines, doneBar(pg, w, done, total))
}

// aimOf is what counts as done: at the target, or, where others upgrade the cluster, ready.
func aimOf(b *rollout.Board) string {
	if unmanaged(b) {
		return "ready and not cordoned"
	}
	return "at the target"
}

// unmanaged reports whether a watched cluster has no target.
func unmanaged(b *rollout.Board) bool {
	return b.Plan != nil && b.Plan.Verb == plan.VerbWatch && b.Plan.To == (plan.Target{}) && b.Plan.From == (plan.Target{})
}

// newStages are the states of new machines, and of failed ones.
var newStages = append(slices.Clone(rollout.StagesNew), plan.NodeFailed)

// oldStages are the states of old nodes. If nodes are upgraded in place, the states of a
// replacement are shown only if they have occurred.
func oldStages(b *rollout.Board) []string {
	return slices.DeleteFunc(slices.Clone(rollout.StagesOld), func(s string) bool {
		switch s {
		case plan.NodeUpgrading:
			return !b.Saw(s)
		case plan.NodeReplacing, plan.NodeLeaving, plan.NodeGone:
			return b.Saw(plan.NodeUpgrading) && !b.Saw(s)
		}
		return false
	})
}

func doneBar(pg Page, w, done, total int) string {
	if total == 0 {
		return ""
	}
	return pg.Row(w).Pad(1).Add(term.Good, pg.Meter(int64(done), int64(total), w-10)).Add(term.Plain, fmt.Sprintf(" %5.1f%%", 100*float64(done)/float64(total))).String()
}

// stageRows are the rows of some stages: names, numbers and, unless brief, median dwell times.
func stageRows(pg Page, b *rollout.Board, title string, stages []string, w int, brief bool) []string {
	col := (w - 7) / 6
	names, numbers, dwells := pg.Row(w).Pad(1).Col(term.Faint, title, 4), pg.Row(w).Pad(6), pg.Row(w).Pad(2).Col(term.Faint, "p50", 3)
	for i, s := range stages {
		link := " " + term.AsciiIf(pg.Ascii, pg.Arrow)
		if i == len(stages)-1 || s == plan.NodeReady {
			link = "  "
		}
		n := b.Count(s)
		st := term.Faint
		if n > 0 {
			_, st = stageSign(pg, s)
		}
		names.Pad(col-term.Width(s)-term.Width(link)).Add(st, s).Add(term.Faint, link)
		number := strconv.FormatInt(n, 10)
		numbers.Pad(col-2-term.Width(number)).Add(st, number).Pad(2)
		dwell := stageDwell(b, s)
		dwells.Pad(col-2-term.Width(dwell)).Add(term.Faint, dwell).Pad(2)
	}
	out := []string{names.String(), numbers.String()}
	if !brief {
		out = append(out, dwells.String())
	}
	return out
}

// stageDwell is the median dwell time of a stage; empty if it is unknown or has no end.
func stageDwell(b *rollout.Board, s string) string {
	if s == plan.NodeOutdated || s == plan.NodeGone || s == plan.NodeReady || s == plan.NodeFailed {
		return ""
	}
	if d := b.Dwell(s, 0.5); d > 0 {
		return term.Duration(d)
	}
	return ""
}

// wideStages is the pipeline with a row for each stage, for wide screens.
func wideStages(pg Page, b *rollout.Board, w int, now time.Time, done, total int) []string {
	half := (w - 1) / 2
	side := func(title string, stages []string) []string {
		head := pg.Row(half).Pad(1).Col(term.Faint, title, 12).Num(term.Faint, "nodes", 7).Num(term.Faint, "rate", 9).Num(term.Faint, "p50", 7).Num(term.Faint, "p95", 7)
		rows := []string{head.String()}
		most := int64(1)
		for _, s := range stages {
			if s != plan.NodeGone && s != plan.NodeReady && s != plan.NodeOutdated {
				most = max(most, b.Count(s))
			}
		}
		for _, s := range stages {
			n := b.Count(s)
			sign, st := stageSign(pg, s)
			if n == 0 {
				st = term.Faint
			}
			r := pg.Row(half).Pad(1).Add(st, sign).Add(term.Plain, " ").Col(st, s, 10).Num(st, strconv.FormatInt(n, 10), 7)
			flow, p50, p95 := "", "", ""
			if f := b.Flow(s, now); f > 0 && s != plan.NodeGone && s != plan.NodeReady {
				flow = perMinute(f)
			}
			if d := b.Dwell(s, 0.5); d > 0 && s != plan.NodeOutdated && s != plan.NodeReady {
				p50, p95 = term.Duration(d), term.Duration(b.Dwell(s, 0.95))
			}
			r.Num(term.Faint, flow, 9).Num(term.Faint, p50, 7).Num(term.Faint, p95, 7)
			if room := half - r.Used - 2; room > 4 && n > 0 && s != plan.NodeGone && s != plan.NodeReady && s != plan.NodeOutdated {
				r.Add(st, strings.Repeat(pg.Bar, int(max(1, n*int64(room)/most))))
			}
			rows = append(rows, r.String())
		}
		return rows
	}
	old, come := side("old", oldStages(b)), side("new", newStages)
	old = append(old, sparkline(pg, b, half, now))
	var out []string
	for i := range max(len(old), len(come)) {
		l, r := "", ""
		if i < len(old) {
			l = old[i]
		}
		if i < len(come) {
			r = come[i]
		}
		out = append(out, l+strings.Repeat(" ", max(0, half-term.StyledWidth(l)))+pg.Paint(term.Faint, pg.Side)+r)
	}
	return append(out, doneBar(pg, w, done, total))
}

// sparkline shows how many nodes reached the target per ten seconds of the last minutes.
func sparkline(pg Page, b *rollout.Board, w int, now time.Time) string {
	list := b.Finished(min(30, w-24), now)
	most := slices.Max(list)
	if most == 0 {
		return ""
	}
	bars := []rune("▁▂▃▄▅▆▇█")
	if pg.Ascii {
		bars = []rune("_.:-=+*#")
	}
	var s strings.Builder
	for _, n := range list {
		i := 0
		if n > 0 {
			i = 1 + (n*(len(bars)-2))/most
		}
		s.WriteRune(bars[min(i, len(bars)-1)])
	}
	return pg.Row(w).Pad(1).Col(term.Faint, "done per 10s", 12).Raw(term.Good, s.String()).Add(term.Faint, " last 5m").String()
}

// perMinute is "24/min".
func perMinute(f float64) string {
	if f < 9.95 {
		return strconv.FormatFloat(f, 'f', 1, 64) + "/min"
	}
	n := int(math.Round(f))
	for step := 10; n >= 10*step; step *= 10 { // two significant digits: more would flicker
		n = (n + step/2) / step * step
	}
	return strconv.Itoa(n) + "/min"
}

// stageSign is the sign of a state and its style.
func stageSign(pg Page, state string) (string, term.Style) {
	switch state {
	case plan.NodeDraining:
		return pg.Running, term.Caution
	case plan.NodeReplacing, plan.NodeUpgrading, plan.NodeLeaving, plan.NodeBooting, plan.NodeCreating:
		return pg.Running, term.Accent
	case plan.NodeGone:
		return pg.Dot, term.Faint
	}
	return NodeSign(pg, state)
}

// GroupRows are the groups with their progress.
func GroupRows(pg Page, b *rollout.Board, w, most int) []string {
	lines := []string{pg.Rule(w, "Groups", "")}
	groups := b.Groups()
	for i, g := range groups {
		if i == most-1 && len(groups) > most {
			lines = append(lines, pg.Row(w).Pad(3).Add(term.Faint, fmt.Sprintf("… %d more groups", len(groups)-i)).String())
			break
		}
		r := pg.Row(w).Pad(1).Col(term.Plain, term.Clean(g.Name), 18).Num(term.Plain, fmt.Sprintf("%d/%d", g.Done(), g.Total), 12)
		r.Add(term.Good, pg.Meter(int64(g.Done()), int64(max(g.Total, 1)), min(30, w/4))).Pad(2)
		for _, s := range NodeStates[1:] {
			if n := g.Counts[s]; n > 0 {
				_, st := stageSign(pg, s)
				r.Add(st, strconv.Itoa(n)+" "+s+"  ")
			}
		}
		lines = append(lines, r.String())
	}
	return lines
}

// planSign is the sign of a state of a Plan, its style, and its order in the list.
func planSign(pg Page, state string) (sign string, st term.Style, order int) {
	switch state {
	case cluster.PlanFailed, cluster.PlanInvalid:
		return pg.Fail, term.Bad, 0
	case cluster.PlanApplying:
		return pg.Running, term.Accent, 1
	case cluster.PlanComplete:
		return pg.OK, term.Good, 3
	case cluster.PlanUnseen:
		return pg.Pending, term.Faint, 2
	}
	return pg.Stopped, term.Caution, 2
}

// NodePlanRows are the Plans with their progress, in at most most rows.
func NodePlanRows(pg Page, b *rollout.Board, w, most int) []string {
	list := make([]*rollout.BoardPlan, len(b.Plans))
	complete := 0
	for i := range b.Plans {
		if list[i] = &b.Plans[i]; list[i].State == cluster.PlanComplete {
			complete++
		}
	}
	slices.SortStableFunc(list, func(x, y *rollout.BoardPlan) int {
		_, _, i := planSign(pg, x.State)
		_, _, k := planSign(pg, y.State)
		return i - k
	})
	lines := []string{pg.Rule(w, "Plans", fmt.Sprintf("%d of %d complete", complete, len(list)))}
	names := 12
	for _, p := range list[:min(len(list), most)] {
		names = max(names, term.Width(term.Clean(p.Name)))
	}
	names = min(names, max(16, w/3))
	for i, p := range list {
		if i == most-1 && len(list) > most && most > 1 || i == most {
			if most > 1 {
				lines = append(lines, pg.Row(w).Pad(3).Add(term.Faint, fmt.Sprintf("… %d more", len(list)-i)).String())
			}
			break
		}
		sign, st, _ := planSign(pg, p.State)
		r := pg.Row(w).Pad(1).Add(st, sign).Pad(1).Col(term.Plain, term.Clean(p.Name), names).Col(st, term.Clean(p.State), 10)
		if w >= 112 {
			r.Add(term.Good, pg.Meter(p.Done, max(p.Total, 1), 16)).Pad(1)
		}
		if p.Total > 0 {
			r.Add(term.Plain, fmt.Sprintf("%d/%d ", p.Done, p.Total))
		}
		for _, x := range []struct {
			n    int64
			word string
			st   term.Style
		}{{p.Failed, cluster.PlanFailed, term.Bad}, {p.Applying, cluster.PlanApplying, term.Accent}, {p.Pending, "pending", term.Faint}} {
			if x.n > 0 {
				r.Add(x.st, fmt.Sprintf("%d %s ", x.n, x.word))
			}
		}
		text := term.Clean(p.Text)
		if p.Alone {
			text = strings.TrimSuffix("exclusive; "+text, "; ")
		}
		from := ""
		if p.Channel != "" {
			from = "  from " + term.Clean(p.Channel)
		}
		if text == "" || w >= 112 {
			text = strings.TrimSpace(term.Clean(p.Version)+"  "+text) + from
		}
		if left := w - r.Used - 1; left > 3 {
			r.Add(term.Faint, term.Cut(term.AsciiIf(pg.Ascii, text), left, pg.Ellipsis))
		}
		lines = append(lines, r.String())
	}
	return lines
}

// Flight is the list of machines of a board, and how it is shown.
type Flight struct {
	List   []*rollout.BoardNode
	At     int // index of the selected machine
	Sort   SortBy
	Filter string
	Typing bool  // the filter is being typed
	Err    error // of the filter
}

// FlightView lists machines in h lines.
func FlightView(pg Page, b *rollout.Board, x Flight, w, h int) []string {
	if h < 2 {
		return nil
	}
	list := x.List
	_, total := b.Places()
	title := fmt.Sprintf("In progress %d of %d", len(list), total)
	if x.Filter != "" {
		title = fmt.Sprintf("Matches %d", len(list))
	}
	lines := []string{pg.Rule(w, title, "sort: "+x.Sort.String())}
	if x.Typing || x.Filter != "" {
		r := pg.Row(w).Add(term.Plain, " ").Add(term.Accent, "/ ").Add(term.Strong, x.Filter)
		if x.Typing {
			r.Add(term.Accent, "▏")
		}
		if err := x.Err; err != nil {
			r.Add(term.Caution, "  "+term.Clean(err.Error()))
		} else if x.Typing {
			r.Add(term.Faint, "  Enter applies it, Esc clears it")
		}
		lines = append(lines, r.String())
	}
	if len(list) == 0 {
		text := "no node is in progress; / filters all nodes, m shows the map"
		switch {
		case x.Filter != "":
			text = "no machine matches; Esc clears the filter"
		case b.Moves() == 0:
			text = "no machine seen yet"
		}
		return append(lines, pg.Row(w).Add(term.Faint, "   "+text).String())[:min(len(lines)+1, h)]
	}
	names := 12
	for _, n := range list[:min(len(list), 200)] {
		names = max(names, term.Width(term.Clean(n.Name)))
	}
	names = min(names, max(16, w/3))
	const attempt = "attempt"
	groups := 0
	if w >= 112 {
		groups = 14
	}
	head := pg.Row(w).Pad(3).Col(term.Faint, "node", names).Col(term.Faint, "state", 10).Num(term.Faint, "time", 8)
	if groups > 0 {
		head.Col(term.Faint, "group", groups).Col(term.Faint, "counterpart", names)
	}
	head.Add(term.Faint, "message").Right(term.Faint, attempt)
	room := h - len(lines)
	if room > 3 {
		lines = append(lines, head.String())
		room--
	}
	at := x.At
	from, to := Window(len(list), at, room)
	if to < len(list) && room > 2 {
		from, to = Window(len(list), at, room-1)
	}
	for i := from; i < to; i++ {
		n := list[i]
		_, st := stageSign(pg, n.State)
		name := term.Plain
		if i == at {
			name = term.Strong
		}
		r := pg.Row(w).Add(term.Accent, " "+Marker(pg, i == at)).Col(name, term.Clean(n.Name), names).Col(st, term.Clean(n.State), 10).Num(term.Plain, age(pg, n), 8)
		if groups > 0 {
			r.Col(term.Faint, term.Clean(n.Group), groups).Col(term.Faint, term.Clean(n.Counterpart), names)
		}
		tail := ""
		if n.Attempts > 0 {
			tail = strconv.Itoa(n.Attempts)
		}
		if left := w - r.Used - len(attempt) - 2; left > 3 {
			r.Add(textStyle(b, n), term.Cut(term.AsciiIf(pg.Ascii, term.Clean(n.Text)), left, pg.Ellipsis))
		}
		lines = append(lines, r.Right(term.Faint, tail).String())
	}
	if left := len(list) - to; left > 0 && len(lines) < h {
		lines = append(lines, pg.Row(w).Pad(3).Add(term.Faint, fmt.Sprintf("… %d more (↓, G, / filter)", left)).String())
	}
	return lines
}

// textStyle highlights the text of a machine that failed or is waited for.
func textStyle(b *rollout.Board, n *rollout.BoardNode) term.Style {
	if w := b.Wait; n.State == plan.NodeFailed || w.Node != "" && w.Node == n.Name {
		return term.Caution
	}
	return term.Faint
}

// LogExcerpt shows the newest log lines in h lines.
func LogExcerpt(pg Page, b *rollout.Board, w, h int) []string {
	if h < 2 {
		return nil
	}
	n := b.Log.Len()
	remark := "l full log"
	if n > 0 {
		remark = words.Count(n+b.Log.Dropped(), "line")
	}
	lines := []string{pg.Rule(w, "Log", remark)}
	if n == 0 {
		return append(lines, pg.Row(w).Add(term.Faint, "   log lines of operator and machines appear here").String())
	}
	from := max(0, n-h+1)
	col := SourceColumnOf(pg, w, func(i int) LogLine { return LineOf(b.Log.At(from + i)) }, n-from)
	col.Node = ""
	for i := from; i < n; i++ {
		lines = append(lines, LogRow(pg, LineOf(b.Log.At(i)), w, col))
	}
	return lines
}

// LineOf cleans a line of a board.
func LineOf(x rollout.BoardLine) LogLine {
	return LogLine{x.Time, term.Clean(x.Source), term.Clean(x.Node), x.Level, term.Clean(x.Text)}
}

// BoardReason is what the rollout waits for or does, with the remedy.
func BoardReason(pg Page, b *rollout.Board) (text, remedy string) {
	switch w := b.Wait; {
	case w.Text != "":
		return "Why waiting (" + seconds(pg.Now.Sub(w.Since)) + "): " + term.Clean(w.Text), term.Clean(w.Remedy)
	case b.Result != nil && b.Plan != nil && b.Plan.Verb == plan.VerbWatch: // the watch ended, not the rollout
		return "At the last observation: " + cmp.Or(term.Clean(b.Outcome), term.Clean(b.Result.Status)), term.Clean(b.Remedy)
	case b.Result != nil:
		return "Ended: " + cmp.Or(term.Clean(b.Outcome), term.Clean(b.Result.Status)), term.Clean(b.Remedy)
	}
	done, total := b.Places()
	if s := b.Running(); s != nil && s.ID != plan.StepRollout {
		return "Now (" + seconds(pg.Now.Sub(s.Began)) + "): " + term.Clean(s.Title) + tailOf(term.Clean(s.Text), term.Clean(s.Title)), ""
	}
	n := b.Slowest()
	switch {
	case b.Events == 0:
		return "Waiting for the first response of the cluster", ""
	case n != nil && n.State != plan.NodeNotReady:
		left := b.InFlight() - 1
		text = fmt.Sprintf("Nothing is stuck. Slowest: %s, %s for %s", term.Clean(n.Name), term.Clean(n.State), age(pg, n))
		if left > 0 {
			text += fmt.Sprintf("; %d more in progress", left)
		}
		return text, ""
	case n != nil:
		return fmt.Sprintf("%s has not been ready for %s: %s", term.Clean(n.Name), age(pg, n), cmp.Or(term.Clean(n.Text), "no reason reported")), ""
	case total > 0 && done == total:
		return fmt.Sprintf("Nothing to wait for: all %s are %s", words.Count(total, "node"), aimOf(b)), ""
	case total == 0:
		return "Waiting for the first node", ""
	}
	if s := b.Running(); s != nil { // the Kubernetes upgrade comes before the first replacement
		for _, p := range s.Parts {
			if p.State == plan.StateRunning {
				return "Now: " + term.Clean(p.Name) + tailOf(term.Clean(p.Text), ""), ""
			}
		}
	}
	return fmt.Sprintf("Waiting for the operator to start the next of %s", words.Count(total-done, "node")), ""
}

func tailOf(text, title string) string {
	if text == "" || text == title {
		return ""
	}
	return ": " + text
}

// WatchSafety is the safety line: extra machines, control planes and quorum, API server,
// backup age.
func WatchSafety(pg Page, b *rollout.Board, w int, api string, backup time.Time) string {
	var parts []string
	extra := b.Extra()
	surge := ""
	if b.Plan != nil && b.Plan.Surge != "" {
		surge = "/" + term.Clean(b.Plan.Surge)
	}
	parts = append(parts, fmt.Sprintf("extra machines %d%s", extra, surge))
	if n := b.Count(plan.NodeFailed); n > 0 {
		parts = append(parts, fmt.Sprintf("failed %d", n))
	}
	ready, total := 0, 0
	for _, g := range b.Groups() {
		if g.Control {
			r, t := g.Serving()
			ready, total = ready+r, total+t
		}
	}
	if total > 0 {
		// Each control plane has an etcd member; writes need a majority of them.
		parts = append(parts, fmt.Sprintf("control planes %d/%d up, quorum %d", ready, total, total/2+1))
	}
	switch {
	case !b.UnreachableSince.IsZero():
		down := "API down"
		if w >= 100 { // else only header and why line have the time
			down += " since " + b.UnreachableSince.UTC().Format("15:04:05Z")
		}
		parts = append(parts, down)
	case api != "" && b.Moves() > 0:
		parts = append(parts, api)
	}
	if made := backup; !made.IsZero() {
		for _, s := range b.Steps { // this run may have taken a newer one
			if at := s.Began.Add(s.Took); s.ID == check.StepBackup && s.State == plan.StateDone && at.After(made) {
				made = at
			}
		}
		parts = append(parts, "backup "+term.Duration(pg.Now.Sub(made))+" old")
	}
	return "safety  " + strings.Join(parts, " "+pg.Dot+" ")
}

// staleResponse is the age from which the last response of the API server is shown.
const staleResponse = 6 * time.Second

// APIStatus is the health of the API server: its latency or the age of its last response.
func APIStatus(pg Page, p engine.APIHealth) string {
	if p.At.IsZero() {
		return "API reachable"
	}
	word := fmt.Sprintf("API p99 %dms", max(1, p.P99.Milliseconds()))
	if age := pg.Now.Sub(p.At); age >= staleResponse {
		word += ", last response " + seconds(age) + " ago"
	}
	return word
}

// mapCells are the signs of states on the map.
var mapCells = map[string]struct {
	sign, ascii string
	st          term.Style
}{
	plan.NodeReady: {"█", "#", term.Good}, plan.NodeNotReady: {"▓", "n", term.Caution}, plan.NodeJoining: {"▓", "j", term.Accent},
	plan.NodeBooting: {"░", "b", term.Accent}, plan.NodeCreating: {"░", "c", term.Accent}, plan.NodeReplacing: {"░", "r", term.Accent},
	plan.NodeDraining: {"▒", "d", term.Caution}, plan.NodeLeaving: {"▒", "l", term.Caution}, plan.NodeOutdated: {"·", ".", term.Faint},
	plan.NodeFailed: {"✗", "X", term.Bad}, plan.NodeUpgrading: {"▒", "u", term.Accent},
}

// MapCell is the sign of a state on the map.
func MapCell(pg Page, state string) (string, term.Style) {
	x := mapCells[state]
	switch {
	case x.sign == "":
		return " ", term.Plain
	case pg.Ascii:
		return x.ascii, x.st
	}
	return x.sign, x.st
}

// worstFirst are the states, the most severe first.
var worstFirst = []string{
	plan.NodeFailed, plan.NodeNotReady, plan.NodeDraining, plan.NodeUpgrading, plan.NodeLeaving, plan.NodeReplacing, plan.NodeCreating, plan.NodeBooting,
	plan.NodeJoining, plan.NodeOutdated, plan.NodeReady, "",
}

// ranks are the indices of states in worst.
var ranks = func() map[string]int {
	out := map[string]int{}
	for i, s := range worstFirst {
		out[s] = i
	}
	return out
}()

// WorstPlace is the place with the most severe state of a cell.
func WorstPlace(places []*rollout.BoardPlace) *rollout.BoardPlace {
	var out *rollout.BoardPlace
	rank := len(worstFirst)
	for _, p := range places {
		if r, ok := ranks[p.State()]; ok && r < rank {
			out, rank = p, r
		}
	}
	return out
}

// MapScale is the number of nodes per cell with which all groups fit into h lines.
func MapScale(groups []*rollout.BoardGroup, columns, h int) int {
	for each := 1; ; each++ {
		rows := 0
		for _, g := range groups {
			cells := (len(g.Places) + each - 1) / each
			rows += max(1, (cells+columns-1)/columns)
		}
		if rows <= max(h, len(groups)) || each > 1<<16 {
			return each
		}
	}
}

// BesideAt puts a pane to the right of some lines.
func BesideAt(pg Page, left, right []string, at, h int) []string {
	out := make([]string, 0, h)
	for i := range h {
		l, r := "", ""
		if i < len(left) {
			l = left[i]
		}
		if i < len(right) {
			r = right[i]
		}
		out = append(out, l+strings.Repeat(" ", max(0, at-term.StyledWidth(l)))+pg.Paint(term.Faint, pg.Side)+r)
	}
	return out
}

// CellPlaces are the places of a cell.
func CellPlaces(g *rollout.BoardGroup, cell, each int) []*rollout.BoardPlace {
	from := min(cell*each, len(g.Places))
	return g.Places[from:min(len(g.Places), from+each)]
}

// CellLine describes the cell under the cursor.
func CellLine(pg Page, g *rollout.BoardGroup, cell, each, w int) string {
	places := CellPlaces(g, cell, each)
	r := pg.Row(w).Add(term.Faint, " cursor ").Add(term.Strong, term.Clean(g.Name)+":"+strconv.Itoa(cell*each)+"  ")
	if len(places) == 1 {
		if n := places[0].Node(); n != nil {
			_, st := stageSign(pg, n.State)
			return r.Add(term.Plain, term.Clean(n.Name)+"  ").Add(st, term.Clean(n.State)+" ").Add(term.Faint, age(pg, n)+"  "+term.Clean(n.Text)).Right(term.Faint, "Enter opens").String()
		}
		return r.Add(term.Faint, "empty").String()
	}
	counts := map[string]int{}
	first, last := "", ""
	for _, p := range places {
		counts[p.State()]++
		if n := p.Node(); n != nil {
			last = term.Clean(n.Name)
			if first == "" {
				first = last
			}
		}
	}
	r.Add(term.Plain, first+" … "+last+"  ")
	for _, s := range worstFirst {
		if n := counts[s]; n > 0 && s != "" {
			_, st := stageSign(pg, s)
			r.Add(st, strconv.Itoa(n)+" "+s+" ")
		}
	}
	return r.Right(term.Faint, "Enter opens").String()
}

// CellDetail lists the nodes of the cell under the cursor.
func CellDetail(pg Page, g *rollout.BoardGroup, cell, each, w, h int) []string {
	places := CellPlaces(g, cell, each)
	lines := []string{pg.Row(w).Add(term.Faint, fmt.Sprintf(" group %s  cell %d", term.Clean(g.Name), cell)).String()}
	for _, p := range places {
		n := p.Node()
		if n == nil {
			continue
		}
		if len(lines) == h-1 && len(places) > h-1 {
			lines = append(lines, pg.Row(w).Pad(1).Add(term.Faint, "…").String())
			break
		}
		sign, st := stageSign(pg, n.State)
		lines = append(lines, pg.Row(w).Pad(1).Add(st, sign).Add(term.Plain, " ").Add(term.Plain, term.Cut(term.Clean(n.Name), w-20, pg.Ellipsis)+" ").Add(st, term.Clean(n.State)).Right(term.Faint, age(pg, n)).String())
	}
	return lines
}

// Legend explains the signs of the map, with the number of nodes of each.
func Legend(pg Page, b *rollout.Board, w int) []string {
	counts := map[string]int{}
	for _, g := range b.Groups() {
		for s, n := range g.Counts {
			counts[s] += n
		}
	}
	lines := make([]string, 0, 2)
	r := pg.Row(w).Pad(1)
	for _, s := range []string{
		plan.NodeReady, plan.NodeOutdated, plan.NodeReplacing, plan.NodeCreating, plan.NodeBooting, plan.NodeJoining, plan.NodeNotReady,
		plan.NodeDraining, plan.NodeUpgrading, plan.NodeLeaving, plan.NodeFailed,
	} {
		if counts[s] == 0 && s != plan.NodeReady && s != plan.NodeOutdated {
			continue
		}
		sign, st := MapCell(pg, s)
		text := " " + s + " " + strconv.Itoa(counts[s]) + "  "
		if r.Used+1+term.Width(text) > w && len(lines) == 0 {
			lines = append(lines, r.String())
			r = pg.Row(w).Pad(1)
		}
		r.Raw(st, sign).Add(term.Plain, text)
	}
	lines = append(lines, r.String())
	for len(lines) < 2 {
		lines = append(lines, "")
	}
	return lines[:2]
}

// Facts describes a machine in one line.
func Facts(pg Page, n *rollout.BoardNode) string {
	role := "worker"
	if n.Control {
		role = "control plane"
	}
	parts := []string{role, "first seen " + n.First.UTC().Format("15:04:05Z")}
	if n.Attempts > 0 {
		parts = append(parts, "try "+strconv.Itoa(n.Attempts))
	}
	if n.Counterpart != "" {
		word := "replaces "
		if slices.Contains(rollout.StagesOld, n.State) {
			word = "replaced by "
		}
		parts = append(parts, word+term.Clean(n.Counterpart))
	}
	return strings.Join(parts, " "+pg.Dot+" ")
}

// StateHistoryRows is the state history of a machine, with the start and the duration of each state.
func StateHistoryRows(pg Page, b *rollout.Board, n *rollout.BoardNode, here bool, w int) []string {
	now := pg.Now
	all := append(slices.Clone(n.Past), rollout.Moment{State: n.State, Since: n.Since, Took: now.Sub(n.Since), Seen: n.Seen})
	most := max(2, (w-4)/13)
	if len(all) > most {
		all = all[len(all)-most:]
	}
	st := term.Plain
	if here {
		st = term.Strong
	}
	names, times, tooks := pg.Row(w).Pad(2), pg.Row(w).Pad(2), pg.Row(w).Pad(2)
	for i, m := range all {
		_, style := stageSign(pg, m.State)
		name := term.Clean(m.State)
		now := i == len(all)-1
		if !now {
			name += " " + pg.Arrow
			style = term.Faint
		}
		names.Col(style, name, 12)
		if m.Seen {
			times.Col(term.Faint, m.Since.UTC().Format("15:04:05"), 12)
			tooks.Col(term.Plain, term.Duration(m.Took), 12)
		} else {
			times.Col(term.Faint, "before "+m.Since.UTC().Format("15:04"), 12)
			tooks.Col(term.Plain, "≥"+term.Duration(m.Took), 12)
		}
	}
	head := pg.Row(w).Pad(1).Add(st, term.Clean(n.Name))
	if p50 := b.Dwell(n.State, 0.5); p50 > 0 && InFlight(n) {
		head.Add(term.Faint, "  median time "+term.Clean(n.State)+": "+term.Duration(p50))
	}
	return []string{head.String(), names.String(), times.String(), tooks.String()}
}

// ReplacementTimeline draws the states of the two machines of a replacement over time, old above new.
func ReplacementTimeline(pg Page, pair []*rollout.BoardNode, w int) []string {
	now := pg.Now
	room := w - 18
	begin := now
	for _, n := range pair {
		for _, m := range n.Past {
			if m.Seen && m.Since.Before(begin) {
				begin = m.Since
			}
		}
		if n.Seen && n.Since.Before(begin) {
			begin = n.Since
		}
	}
	span := now.Sub(begin)
	if span <= 0 || room < 20 {
		return nil
	}
	lines := []string{pg.Rule(w, "Timeline", begin.UTC().Format("15:04:05")+" - "+now.UTC().Format("15:04:05")+"  1 column = "+term.Duration(span/time.Duration(room)))}
	for i, n := range pair {
		r := pg.Row(w).Pad(1).Col(term.Faint, []string{"old", "new"}[i], 4).Pad(10)
		all := append(slices.Clone(n.Past), rollout.Moment{State: n.State, Since: n.Since, Took: now.Sub(n.Since)})
		used := 0
		for _, m := range all {
			from := int(m.Since.Sub(begin) * time.Duration(room) / span)
			to := int(m.Since.Add(m.Took).Sub(begin) * time.Duration(room) / span)
			from, to = max(from, used, 0), min(max(to, 0), room)
			if to <= from {
				continue
			}
			sign, st := MapCell(pg, m.State)
			r.Pad(from-used).Raw(st, strings.Repeat(sign, to-from))
			used = to
		}
		lines = append(lines, r.String())
	}
	return lines
}
