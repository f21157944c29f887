package tui

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	tea "github.com/charmbracelet/bubbletea"

	"constellation/engine"
)

// watchHeader is the header of the watch screen: cluster, target, mode, clocks and ETA, and
// below it the progress line.
func (c *console) watchHeader() []string {
	b, now := c.wat.shown(), c.watchNow()
	r := c.th.row(c.w).add(accent, " "+c.th.brand+" ").add(strong, orElse(clean(b.Cluster), "cluster")).add(caution, c.markIf(b.Simulated))
	word, st := c.watchMode(b)
	tail := []string{now.UTC().Format("15:04:05 UTC")}
	if !b.Started.IsZero() {
		tail = append(tail, clock(now.Sub(b.Started)))
	}
	if eta := c.eta(b, now); eta != "" {
		tail = append(tail, eta)
	}
	right := strings.Join(tail, "  ")
	if to := c.targetText(b); to != "" && r.used+width(to)+width(word)+width(right)+8 <= c.w {
		r.add(faint, "  "+to)
	}
	if room := c.w - r.used - width(asciiIf(c.th.ascii, word)) - 4; width(right) > room {
		right = strings.Join(tail[:1], "  ")
		if eta := c.eta(b, now); eta != "" && width(tail[0]+"  "+eta) <= room {
			right += "  " + eta
		}
	}
	gap := c.w - r.used - width(asciiIf(c.th.ascii, word)) - width(asciiIf(c.th.ascii, right)) - 3
	r.pad(max(2, gap)).add(st, word).add(faint, "  "+right)
	return []string{r.String(), c.watchRail(b)}
}

// watchMode is the mode in the header: live, frozen, stale, replay or ended.
func (c *console) watchMode(b *engine.Board) (string, style) {
	w := &c.wat
	word, st := "LIVE", good
	switch {
	case w.origin == fromReplay:
		word, st = "REPLAY "+"×"+strconv.Itoa(speeds[w.player.speed]), accent
		switch {
		case w.player.at == len(w.player.events):
			word = "REPLAY end"
		case !w.player.playing:
			word = "REPLAY paused"
		}
	case w.frozen != nil:
		word, st = "FROZEN "+short(c.now.Sub(w.frozenAt)), caution
	case !b.Away.IsZero():
		word, st = "STALE "+short(c.now.Sub(b.Away)), bad
	case b.Result != nil || w.ended:
		word, st = "ENDED", faint
	case c.opening():
		word, st = "REPLAY opening", faint
	case b.Events == 0:
		word, st = "connecting", faint
	}
	if w.origin == fromLive && (c.deps.watch.Kubeconfig != "" || c.upg.lockedBy != "") {
		word = "READ-ONLY " + word
	}
	return word, st
}

// targetText is the target of the rollout, for display.
func (c *console) targetText(b *engine.Board) string {
	if b.Plan == nil {
		return clean(b.To)
	}
	to := clean(b.Plan.To.Kubernetes)
	if from := clean(b.Plan.From.Kubernetes); from != "" && to != "" && from != to {
		to = from + c.th.to + to
	}
	if i := clean(b.Plan.To.Image); i != "" {
		to = strings.TrimSpace(to + "  image " + i)
	}
	return to
}

// eta is the estimated remaining time as a range.
func (c *console) eta(b *engine.Board, now time.Time) string {
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

// railPart is an entry of the progress line.
type railPart struct {
	name, state string
}

// watchRail is the progress line: the steps of the run, then the groups of the rollout.
func (c *console) watchRail(b *engine.Board) string {
	var parts []railPart
	for _, s := range b.Steps {
		if s.ID == engine.StepRollout {
			continue
		}
		parts = append(parts, railPart{clean(s.ID), clean(s.State)})
	}
	steps := len(parts)
	for _, s := range b.Steps {
		for _, p := range s.Parts {
			if s.ID == engine.StepRollout && p.Name == "kubernetes" {
				parts = append(parts, railPart{"kubeadm", clean(p.State)})
			}
		}
	}
	for _, control := range []bool{true, false} {
		for _, g := range b.Groups() {
			if g.Control != control || g.Total == 0 {
				continue
			}
			p := railPart{fmt.Sprintf("%s %d/%d", clean(g.Name), g.Done(), g.Total), engine.StateRunning}
			switch {
			case g.Done() == g.Total:
				p.state = engine.StateDone
			case g.Counts[engine.NodeFailed] > 0:
				p.state = engine.StateFailed
			case g.Counts[engine.NodeOutdated]+g.Done() == g.Total:
				p.state = ""
			}
			parts = append(parts, p)
		}
	}
	long := func(ps []railPart) int {
		n := 1
		for _, p := range ps {
			n += width(p.name) + 5
		}
		return n
	}
	if steps > 1 && long(parts) > c.w && !slices.ContainsFunc(parts[:steps], func(p railPart) bool { return p.state != engine.StateDone && p.state != engine.StateSkipped }) {
		parts = append([]railPart{{fmt.Sprintf("%d steps", steps), engine.StateDone}}, parts[steps:]...)
	}
	if most := max(2, (c.w-20)/14); len(parts) > most && long(parts) > c.w { // only the first groups fit
		more := len(parts) - most
		parts = append(parts[:most:most], railPart{fmt.Sprintf("%d more", more), ""})
	}
	r := c.th.row(c.w).add(plain, " ")
	for i, p := range parts {
		sign, st, name := c.th.pending, faint, faint
		switch p.state {
		case engine.StateDone, engine.StateSkipped:
			sign, st, name = c.th.ok, good, plain
		case engine.StateRunning:
			sign, st, name = c.th.running, accent, strong
		case engine.StateFailed:
			sign, st, name = c.th.fail, bad, strong
		case engine.StateStopped, engine.StateDetached:
			sign, st, name = c.th.stopped, caution, plain
		}
		if i > 0 {
			line := c.th.signs.rule
			if p.state != "" {
				line = c.th.heavy
			}
			r.add(faint, " "+line+" ")
		}
		r.add(st, sign).add(name, " "+p.name)
	}
	if len(parts) == 0 {
		r.add(faint, "nothing is known yet")
	}
	return r.String()
}

// staleWatch reports whether the watch screen may be out of date.
func (c *console) staleWatch() bool {
	return c.wat.origin != fromReplay && c.wat.frozen == nil && !c.wat.shown().Away.IsZero()
}

// watchView renders the lens in w columns and h lines.
func (c *console) watchView(w, h int) []string {
	b := c.wat.shown()
	switch c.wat.lens {
	case lensMap:
		return c.mapView(b, w, h)
	case lensNode:
		return c.nodeView(b, w, h)
	case lensLog:
		return c.linesView(b, w, h)
	case lensTrouble:
		return c.troubleView(b, w, h)
	}
	return c.tableView(b, w, h)
}

func (c *console) tableView(b *engine.Board, w, h int) []string {
	if b.Events == 0 || b.Moves() == 0 && b.Running() == nil && c.wat.origin == fromLive {
		return c.emptyWatch(b, w)
	}
	lines := c.pipeline(b, w, h)
	if g := b.Groups(); h >= 30 && len(g) > 1 {
		lines = append(lines, c.groupRows(b, w, min(len(g), h/6))...)
	}
	if n := min(len(b.Plans), max(1, h/8)); n > 0 && h-len(lines) >= n+4 {
		lines = append(lines, c.nodePlanRows(b, w, n)...)
	}
	said := 0
	if h-len(lines) >= 8 {
		said = min(max(4, (h-len(lines))/3), 14)
	}
	lines = append(lines, c.flightView(b, w, h-len(lines)-said)...)
	if said > 0 { // with the room that few machines leave
		lines = append(lines, c.logExcerpt(b, w, h-len(lines))...)
	}
	return lines
}

// emptyWatch is the screen before the first events.
func (c *console) emptyWatch(b *engine.Board, w int) []string {
	switch {
	case c.wat.err != nil:
		return append([]string{""}, c.problem(w, c.wat.err)...)
	case c.opening():
		return []string{"", c.th.row(w).add(accent, "  "+c.th.running+" ").add(plain, "opening the record "+clean(c.deps.replay.path)).String()}
	case b.Events == 0 && c.wat.origin == fromRun:
		return []string{"", c.th.row(w).add(faint, "  No run is in progress here. Esc goes back.").String()}
	}
	return []string{"", c.th.row(w).add(accent, "  "+c.th.running+" ").add(plain, "listing the nodes of the cluster").String()}
}

// pipeline shows the number of machines, the flow per minute and the median dwell time of
// each stage.
func (c *console) pipeline(b *engine.Board, w, h int) []string {
	now := c.watchNow()
	done, total := b.Places()
	remark := fmt.Sprintf("%d of %d nodes at the target", done, total)
	if p := b.Pace(now); p > 0 {
		remark += ", " + perMinute(p)
	}
	lines := []string{c.th.rule(w, "Pipeline", remark)}
	if w >= 112 {
		return append(lines, c.wideStages(b, w, now, done, total)...)
	}
	brief := h < 16
	lines = append(lines, c.stageRows(b, "old", oldStages(b), w, now, brief)...)
	lines = append(lines, c.stageRows(b, "new", newStages, w, now, brief)...)
	return append(lines, c.doneBar(w, done, total))
}

// newStages are the states of new machines, and of failed ones.
var newStages = append(slices.Clone(engine.StagesNew), engine.NodeFailed)

// oldStages are the states of old nodes. If nodes are upgraded in place, the states of a
// replacement are shown only if they have occurred.
func oldStages(b *engine.Board) []string {
	return slices.DeleteFunc(slices.Clone(engine.StagesOld), func(s string) bool {
		switch s {
		case engine.NodeUpgrading:
			return !b.Saw(s)
		case engine.NodeReplacing, engine.NodeLeaving, engine.NodeGone:
			return b.Saw(engine.NodeUpgrading) && !b.Saw(s)
		}
		return false
	})
}

func (c *console) doneBar(w, done, total int) string {
	if total == 0 {
		return ""
	}
	return c.th.row(w).pad(1).add(good, c.th.meter(int64(done), int64(total), w-10)).add(plain, fmt.Sprintf(" %5.1f%%", 100*float64(done)/float64(total))).String()
}

// stageRows are the rows of some stages: names, numbers and, unless brief, flow and dwell time.
func (c *console) stageRows(b *engine.Board, title string, stages []string, w int, now time.Time, brief bool) []string {
	col := (w - 7) / 6
	names, numbers, speeds := c.th.row(w).pad(1).col(faint, title, 4), c.th.row(w).pad(6), c.th.row(w).pad(6)
	for i, s := range stages {
		link := " " + asciiIf(c.th.ascii, c.th.arrow)
		if i == len(stages)-1 || s == engine.NodeReady {
			link = "  "
		}
		n := b.Count(s)
		st := faint
		if n > 0 {
			_, st = c.stageSign(s)
		}
		names.pad(col-width(s)-width(link)).add(st, s).add(faint, link)
		number := strconv.FormatInt(n, 10)
		numbers.pad(col-2-width(number)).add(st, number).pad(2)
		speed := c.stageSpeed(b, s, now, col-3)
		speeds.pad(col-2-width(speed)).add(faint, speed).pad(2)
	}
	out := []string{names.String(), numbers.String()}
	if !brief {
		out = append(out, speeds.String())
	}
	return out
}

// stageSpeed is the flow per minute and the median dwell time of a stage, in at most most
// columns.
func (c *console) stageSpeed(b *engine.Board, s string, now time.Time, most int) string {
	if s == engine.NodeGone || s == engine.NodeReady || s == engine.NodeFailed {
		return ""
	}
	var parts []string
	if f := b.Flow(s, now); f > 0 {
		parts = append(parts, perMinute(f))
	}
	if d := b.Dwell(s, 0.5); d > 0 && s != engine.NodeOutdated {
		parts = append(parts, short(d))
	}
	if text := strings.Join(parts, " "); width(text) <= most {
		return text
	}
	return parts[len(parts)-1]
}

// wideStages is the pipeline with a row for each stage, for wide screens.
func (c *console) wideStages(b *engine.Board, w int, now time.Time, done, total int) []string {
	half := (w - 1) / 2
	side := func(title string, stages []string) []string {
		head := c.th.row(half).pad(1).col(faint, title, 12).num(faint, "nodes", 7).num(faint, "flow", 9).num(faint, "p50", 7).num(faint, "p95", 7)
		rows := []string{head.String()}
		most := int64(1)
		for _, s := range stages {
			if s != engine.NodeGone && s != engine.NodeReady && s != engine.NodeOutdated {
				most = max(most, b.Count(s))
			}
		}
		for _, s := range stages {
			n := b.Count(s)
			sign, st := c.stageSign(s)
			if n == 0 {
				st = faint
			}
			r := c.th.row(half).pad(1).add(st, sign).add(plain, " ").col(st, s, 10).num(st, strconv.FormatInt(n, 10), 7)
			flow, p50, p95 := "", "", ""
			if f := b.Flow(s, now); f > 0 && s != engine.NodeGone && s != engine.NodeReady {
				flow = perMinute(f)
			}
			if d := b.Dwell(s, 0.5); d > 0 && s != engine.NodeOutdated && s != engine.NodeReady {
				p50, p95 = short(d), short(b.Dwell(s, 0.95))
			}
			r.num(faint, flow, 9).num(faint, p50, 7).num(faint, p95, 7)
			if room := half - r.used - 2; room > 4 && n > 0 && s != engine.NodeGone && s != engine.NodeReady && s != engine.NodeOutdated {
				r.add(st, strings.Repeat(c.th.bar, int(max(1, n*int64(room)/most))))
			}
			rows = append(rows, r.String())
		}
		return rows
	}
	old, come := side("old", oldStages(b)), side("new", newStages)
	old = append(old, c.sparkline(b, half, now))
	var out []string
	for i := range max(len(old), len(come)) {
		l, r := "", ""
		if i < len(old) {
			l = old[i]
		}
		if i < len(come) {
			r = come[i]
		}
		out = append(out, l+strings.Repeat(" ", max(0, half-styledWidth(l)))+c.th.paint(faint, c.th.side)+r)
	}
	return append(out, c.doneBar(w, done, total))
}

// sparkline shows how many nodes reached the target per ten seconds of the last minutes.
func (c *console) sparkline(b *engine.Board, w int, now time.Time) string {
	list := b.Finished(min(30, w-24), now)
	most := slices.Max(list)
	if most == 0 {
		return ""
	}
	bars := []rune("▁▂▃▄▅▆▇█")
	if c.th.ascii {
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
	return c.th.row(w).pad(1).col(faint, "done/10s", 12).raw(good, s.String()).add(faint, " last 5m").String()
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
func (c *console) stageSign(state string) (string, style) {
	switch state {
	case engine.NodeDraining:
		return c.th.running, caution
	case engine.NodeReplacing, engine.NodeUpgrading, engine.NodeLeaving, engine.NodeBooting, engine.NodeCreating:
		return c.th.running, accent
	case engine.NodeGone:
		return c.th.dot, faint
	}
	return c.nodeSign(state)
}

// groupRows are the groups with their progress.
func (c *console) groupRows(b *engine.Board, w, most int) []string {
	lines := []string{c.th.rule(w, "Groups", "")}
	groups := b.Groups()
	for i, g := range groups {
		if i == most-1 && len(groups) > most {
			lines = append(lines, c.th.row(w).pad(3).add(faint, fmt.Sprintf("… %d more groups", len(groups)-i)).String())
			break
		}
		r := c.th.row(w).pad(1).col(plain, clean(g.Name), 18).num(plain, fmt.Sprintf("%d/%d", g.Done(), g.Total), 12)
		r.add(good, c.th.meter(int64(g.Done()), int64(max(g.Total, 1)), min(30, w/4))).pad(2)
		for _, s := range nodeStates[1:] {
			if n := g.Counts[s]; n > 0 {
				_, st := c.stageSign(s)
				r.add(st, strconv.Itoa(n)+" "+s+"  ")
			}
		}
		lines = append(lines, r.String())
	}
	return lines
}

// planSign is the sign of a state of a Plan, its style, and its order in the list.
func (c *console) planSign(state string) (sign string, st style, order int) {
	switch state {
	case engine.PlanFailed, engine.PlanInvalid:
		return c.th.fail, bad, 0
	case engine.PlanApplying:
		return c.th.running, accent, 1
	case engine.PlanComplete:
		return c.th.ok, good, 3
	case engine.PlanUnseen:
		return c.th.pending, faint, 2
	}
	return c.th.stopped, caution, 2
}

// nodePlanRows are the Plans with their progress, in at most most rows.
func (c *console) nodePlanRows(b *engine.Board, w, most int) []string {
	list := make([]*engine.BoardPlan, len(b.Plans))
	complete := 0
	for i := range b.Plans {
		if list[i] = &b.Plans[i]; list[i].State == engine.PlanComplete {
			complete++
		}
	}
	slices.SortStableFunc(list, func(x, y *engine.BoardPlan) int {
		_, _, i := c.planSign(x.State)
		_, _, k := c.planSign(y.State)
		return i - k
	})
	lines := []string{c.th.rule(w, "Plans", fmt.Sprintf("%d of %d complete", complete, len(list)))}
	names := 12
	for _, p := range list[:min(len(list), most)] {
		names = max(names, width(clean(p.Name)))
	}
	names = min(names, max(16, w/3))
	for i, p := range list {
		if i == most-1 && len(list) > most && most > 1 || i == most {
			if most > 1 {
				lines = append(lines, c.th.row(w).pad(3).add(faint, fmt.Sprintf("… %d more", len(list)-i)).String())
			}
			break
		}
		sign, st, _ := c.planSign(p.State)
		r := c.th.row(w).pad(1).add(st, sign).pad(1).col(plain, clean(p.Name), names).col(st, clean(p.State), 10)
		if w >= 112 {
			r.add(good, c.th.meter(p.Done, max(p.Total, 1), 16)).pad(1)
		}
		if p.Total > 0 {
			r.add(plain, fmt.Sprintf("%d/%d ", p.Done, p.Total))
		}
		for _, x := range []struct {
			n    int64
			word string
			st   style
		}{{p.Failed, engine.PlanFailed, bad}, {p.Applying, engine.PlanApplying, accent}, {p.Pending, "pending", faint}} {
			if x.n > 0 {
				r.add(x.st, fmt.Sprintf("%d %s ", x.n, x.word))
			}
		}
		text := clean(p.Text)
		if p.Alone {
			text = strings.TrimSuffix("exclusive; "+text, "; ")
		}
		from := ""
		if p.Channel != "" {
			from = "  from " + clean(p.Channel)
		}
		if text == "" || w >= 112 {
			text = strings.TrimSpace(clean(p.Version)+"  "+text) + from
		}
		if left := w - r.used - 1; left > 3 {
			r.add(faint, cut(asciiIf(c.th.ascii, text), left, c.th.ellipsis))
		}
		lines = append(lines, r.String())
	}
	return lines
}

// flightView lists machines in h lines.
func (c *console) flightView(b *engine.Board, w, h int) []string {
	if h < 2 {
		return nil
	}
	list := c.machines()
	_, total := b.Places()
	title := fmt.Sprintf("In flight %d of %d", len(list), total)
	if c.wat.filter != "" {
		title = fmt.Sprintf("Matches %d", len(list))
	}
	lines := []string{c.th.rule(w, title, "sort: "+c.wat.sort.String())}
	if c.wat.typing || c.wat.filter != "" {
		r := c.th.row(w).add(plain, " ").add(accent, "/ ").add(strong, c.wat.filter)
		if c.wat.typing {
			r.add(accent, "▏")
		}
		if err := c.wat.rows.err; err != nil {
			r.add(caution, "  "+clean(err.Error()))
		} else if c.wat.typing {
			r.add(faint, "  Enter applies it, Esc clears it")
		}
		lines = append(lines, r.String())
	}
	if len(list) == 0 {
		text := "no node is in flight; / filters all nodes, m shows the map"
		switch {
		case c.wat.filter != "":
			text = "no machine matches; Esc clears the filter"
		case b.Moves() == 0:
			text = "no machine seen yet"
		}
		return append(lines, c.th.row(w).add(faint, "   "+text).String())[:min(len(lines)+1, h)]
	}
	names := 12
	for _, n := range list[:min(len(list), 200)] {
		names = max(names, width(clean(n.Name)))
	}
	names = min(names, max(16, w/3))
	groups := 0
	if w >= 112 {
		groups = 14
	}
	head := c.th.row(w).pad(3).col(faint, "node", names).col(faint, "state", 10).num(faint, "for", 8)
	if groups > 0 {
		head.col(faint, "group", groups).col(faint, "with", names)
	}
	head.add(faint, "what").right(faint, "try")
	room := h - len(lines)
	if room > 3 {
		lines = append(lines, head.String())
		room--
	}
	at := c.rowAt(list)
	from, to := window(len(list), at, room)
	if to < len(list) && room > 2 {
		from, to = window(len(list), at, room-1)
	}
	for i := from; i < to; i++ {
		n := list[i]
		_, st := c.stageSign(n.State)
		name := plain
		if i == at {
			name = strong
		}
		r := c.th.row(w).add(accent, " "+c.marker(i == at)).col(name, clean(n.Name), names).col(st, clean(n.State), 10).num(plain, c.age(n), 8)
		if groups > 0 {
			r.col(faint, clean(n.Group), groups).col(faint, clean(n.With), names)
		}
		tail := ""
		if n.Attempts > 0 {
			tail = strconv.Itoa(n.Attempts)
		}
		if left := w - r.used - width(tail) - 3; left > 3 {
			r.add(c.textStyle(n), cut(asciiIf(c.th.ascii, clean(n.Text)), left, c.th.ellipsis))
		}
		lines = append(lines, r.right(faint, tail).String())
	}
	if left := len(list) - to; left > 0 && len(lines) < h {
		lines = append(lines, c.th.row(w).pad(3).add(faint, fmt.Sprintf("… %d more (↓, G, / filter)", left)).String())
	}
	return lines
}

// textStyle highlights the text of a machine that failed or is waited for.
func (c *console) textStyle(n *engine.BoardNode) style {
	if w := c.wat.shown().Wait; n.State == engine.NodeFailed || w.Node != "" && w.Node == n.Name {
		return caution
	}
	return faint
}

// logExcerpt shows the newest log lines in h lines.
func (c *console) logExcerpt(b *engine.Board, w, h int) []string {
	if h < 2 {
		return nil
	}
	n := b.Log.Len()
	remark := "l full log"
	if n > 0 {
		remark = count(n+b.Log.Dropped(), "line")
	}
	lines := []string{c.th.rule(w, "Log", remark)}
	if n == 0 {
		return append(lines, c.th.row(w).add(faint, "   log lines of operator and machines appear here").String())
	}
	from := max(0, n-h+1)
	col := c.sourceColumn(func(i int) logLine { return lineOf(b.Log.At(from + i)) }, n-from)
	col.node = ""
	for i := from; i < n; i++ {
		lines = append(lines, c.logRow(lineOf(b.Log.At(i)), w, col))
	}
	return lines
}

// lineOf cleans a line of a board.
func lineOf(x engine.BoardLine) logLine {
	return logLine{x.Time, clean(x.Source), clean(x.Node), x.Level, clean(x.Text)}
}

// watchWhy is the why line of the watch screen and the remedy, if there is one.
func (c *console) watchWhy() []string {
	b, now := c.wat.shown(), c.watchNow()
	text, remedy := c.reason(b, now)
	most := 3
	if c.h < 22 || c.wat.lens == lensTrouble {
		most = 1
	}
	lines := c.th.below(c.w, 1, most, strong, text)
	if c.wat.lens == lensTrouble { // which shows the remedy itself
		return lines
	}
	if remedy != "" {
		for i, l := range c.th.below(c.w, 8, most, accent, c.deps.commands.text(remedy)) {
			if i == 0 {
				l = " " + c.th.paint(faint, "To do:") + " " + strings.TrimLeft(l, " ")
			}
			lines = append(lines, l)
		}
	}
	return lines
}

// reason is what the rollout waits for or does, with the remedy.
func (c *console) reason(b *engine.Board, now time.Time) (text, remedy string) {
	if c.wat.err != nil && c.wat.frozen == nil {
		x := explain(c.wat.err, c.deps.commands)
		return "The watch has ended: " + x.what, x.remedy
	}
	switch w := b.Wait; {
	case w.Text != "":
		return "Why waiting (" + seconds(now.Sub(w.Since)) + "): " + clean(w.Text), clean(w.Remedy)
	case b.Result != nil && b.Plan != nil && b.Plan.Verb == engine.VerbWatch: // the watch ended, not the rollout
		return "At the last observation: " + orElse(clean(b.Outcome), clean(b.Result.Status)), clean(b.Remedy)
	case b.Result != nil:
		return "Ended: " + orElse(clean(b.Outcome), clean(b.Result.Status)), clean(b.Remedy)
	}
	done, total := b.Places()
	if s := b.Running(); s != nil && s.ID != engine.StepRollout {
		return "Now (" + seconds(now.Sub(s.Began)) + "): " + clean(s.Title) + tailOf(clean(s.Text), clean(s.Title)), ""
	}
	n := b.Slowest()
	switch {
	case c.opening():
		return "Opening the record", ""
	case b.Events == 0:
		return "Waiting for the first response of the cluster", ""
	case n != nil && n.State != engine.NodeNotReady:
		left := b.InFlight() - 1
		text = fmt.Sprintf("Nothing is stuck. Slowest: %s, %s for %s", clean(n.Name), clean(n.State), c.age(n))
		if left > 0 {
			text += fmt.Sprintf("; %d more in flight", left)
		}
		return text, ""
	case n != nil:
		return fmt.Sprintf("%s has not been ready for %s: %s", clean(n.Name), c.age(n), orElse(clean(n.Text), "no reason reported")), ""
	case total > 0 && done == total:
		return fmt.Sprintf("Nothing to wait for: all %s are at the target", count(total, "node")), ""
	case total == 0:
		return "Waiting for the first node", ""
	}
	if s := b.Running(); s != nil { // the Kubernetes upgrade comes before the first replacement
		for _, p := range s.Parts {
			if p.State == engine.StateRunning {
				return "Now: " + clean(p.Name) + tailOf(clean(p.Text), ""), ""
			}
		}
	}
	return fmt.Sprintf("Waiting for the operator to start the next of %s", count(total-done, "node")), ""
}

func tailOf(text, title string) string {
	if text == "" || text == title {
		return ""
	}
	return ": " + text
}

// watchSafety is the safety line: extra machines, control planes and quorum, API server,
// backup age.
func (c *console) watchSafety() string {
	b := c.wat.shown()
	var parts []string
	extra := b.Extra()
	surge := ""
	if b.Plan != nil && b.Plan.Surge != "" {
		surge = "/" + clean(b.Plan.Surge)
	}
	parts = append(parts, fmt.Sprintf("extra machines %d%s", extra, surge))
	if n := b.Count(engine.NodeFailed); n > 0 {
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
	case !b.Away.IsZero():
		down := "API down"
		if c.w >= 100 { // else only header and why line have the time
			down += " since " + b.Away.UTC().Format("15:04:05Z")
		}
		parts = append(parts, down)
	case c.wat.origin != fromReplay && b.Moves() > 0 && !c.wat.ended:
		parts = append(parts, c.apiStatus())
	}
	if c.wat.origin != fromReplay && c.home != nil && c.home.Backup != nil {
		made := c.home.Backup.Created
		for _, s := range b.Steps { // this run may have taken a newer one
			if at := s.Began.Add(s.Took); s.ID == engine.StepBackup && s.State == engine.StateDone && at.After(made) {
				made = at
			}
		}
		parts = append(parts, "backup "+short(c.now.Sub(made))+" old")
	}
	return "safety  " + strings.Join(parts, " "+c.th.dot+" ")
}

// staleResponse is the age from which the last response of the API server is shown.
const staleResponse = 6 * time.Second

// apiStatus is the health of the API server: its latency or the age of its last response.
func (c *console) apiStatus() string {
	p := c.wat.pulse
	if p.At.IsZero() {
		return "API reachable"
	}
	word := fmt.Sprintf("API p99 %dms", max(1, p.P99.Milliseconds()))
	if age := c.now.Sub(p.At); age >= staleResponse {
		word += ", last response " + seconds(age) + " ago"
	}
	return word
}

// linesView is the log lens.
func (c *console) linesView(b *engine.Board, w, h int) []string {
	list := c.lines()
	v := &c.wat.log
	remark := count(b.Log.Len(), "line")
	if len(list) != b.Log.Len() {
		remark = fmt.Sprintf("%d of %s", len(list), remark)
	}
	if d := b.Log.Dropped(); d > 0 {
		remark += fmt.Sprintf(", %d older lines in the record", d)
	}
	if !v.pinned {
		remark += ", following"
	}
	lines := []string{c.th.rule(w, "Log", remark)}
	r := c.th.row(w).add(faint, " sources ")
	counts := b.Log.Sources()
	for _, s := range c.sources()[1:] {
		st := faint
		if v.source == "" || v.source == s {
			st = accent
		}
		r.add(st, clean(s)).add(faint, " "+strconv.Itoa(counts[s])+"  ")
	}
	if v.level > 1 {
		r.right(caution, logLevels[v.level]+" and above")
	}
	lines = append(lines, r.String())
	r = c.th.row(w).add(plain, " ").add(accent, "/ ")
	switch {
	case c.wat.typing:
		r.add(strong, v.filter).add(accent, "▏").add(faint, "  Enter applies the filter, Esc clears it")
	case v.filter != "":
		r.add(plain, v.filter)
	default:
		r.add(faint, "no filter")
	}
	if v.matched.err != nil {
		r.add(caution, "  "+clean(v.matched.err.Error()))
	}
	lines = append(lines, r.String())
	if len(list) == 0 {
		text := "no log lines yet"
		if b.Log.Len() > 0 {
			text = "no line matches; Esc clears the filter"
		}
		return append(lines, c.th.row(w).add(faint, "   "+text).String())
	}
	return append(lines, c.linePart(b, list, w, h-len(lines), v.wrap)...)
}

// linePart renders the lines around the cursor that fit into h rows.
func (c *console) linePart(b *engine.Board, list []int, w, h int, wraps bool) []string {
	at := c.lineIndex(list)
	v := &c.wat.log
	first, last := at, at
	var rows []string
	entry := func(i int) []string {
		x := lineOf(b.Log.At(list[i] - b.Log.Dropped()))
		col := sourceColumn{width: min(22, w/4)}
		here := i == at && v.pinned
		if !wraps || !here && width(x.text) < w-col.width-14 {
			row := c.logRow(x, w, col)
			if here {
				row = c.th.paint(chosen, stripStyle(row))
			}
			return []string{row}
		}
		head := x
		parts := wrap(x.text, max(20, w-col.width-14))
		head.text = parts[0]
		out := []string{c.logRow(head, w, col)}
		for _, p := range parts[1:] {
			out = append(out, c.th.row(w).pad(col.width+13).add(plain, p).String())
		}
		if here {
			for k := range out {
				out[k] = c.th.paint(chosen, stripStyle(out[k]))
			}
		}
		return out
	}
	rows = entry(at)
	for len(rows) < h {
		grown := false
		if first > 0 {
			first--
			rows = append(entry(first), rows...)
			grown = true
		}
		if last < len(list)-1 && len(rows) < h {
			last++
			rows = append(rows, entry(last)...)
			grown = true
		}
		if !grown {
			break
		}
	}
	if n := len(rows) - h; n > 0 {
		rows = rows[n:]
	}
	return rows
}

// mapCursor is a cell of the map.
type mapCursor struct {
	group string
	cell  int
	// Columns and nodes per cell of the last frame, for cursor keys.
	columns, each int
}

// mapCells are the signs of states on the map.
var mapCells = map[string]struct {
	sign, ascii string
	st          style
}{
	engine.NodeReady: {"█", "#", good}, engine.NodeNotReady: {"▓", "n", caution}, engine.NodeJoining: {"▓", "j", accent},
	engine.NodeBooting: {"░", "b", accent}, engine.NodeCreating: {"░", "c", accent}, engine.NodeReplacing: {"░", "r", accent},
	engine.NodeDraining: {"▒", "d", caution}, engine.NodeLeaving: {"▒", "l", caution}, engine.NodeOutdated: {"·", ".", faint},
	engine.NodeFailed: {"✗", "X", bad}, engine.NodeUpgrading: {"▒", "u", accent},
}

// mapCell is the sign of a state on the map.
func (c *console) mapCell(state string) (string, style) {
	x := mapCells[state]
	switch {
	case x.sign == "":
		return " ", plain
	case c.th.ascii:
		return x.ascii, x.st
	}
	return x.sign, x.st
}

// worstFirst are the states, the most severe first.
var worstFirst = []string{
	engine.NodeFailed, engine.NodeNotReady, engine.NodeDraining, engine.NodeUpgrading, engine.NodeLeaving, engine.NodeReplacing, engine.NodeCreating, engine.NodeBooting,
	engine.NodeJoining, engine.NodeOutdated, engine.NodeReady, "",
}

// ranks are the indices of states in worst.
var ranks = func() map[string]int {
	out := map[string]int{}
	for i, s := range worstFirst {
		out[s] = i
	}
	return out
}()

// worstPlace is the place with the most severe state of a cell.
func worstPlace(places []*engine.BoardPlace) *engine.BoardPlace {
	var out *engine.BoardPlace
	rank := len(worstFirst)
	for _, p := range places {
		if r, ok := ranks[p.State()]; ok && r < rank {
			out, rank = p, r
		}
	}
	return out
}

const mapName = 12 // columns of a group's name

// mapScale is the number of nodes per cell with which all groups fit into h lines.
func mapScale(groups []*engine.BoardGroup, columns, h int) int {
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

func (c *console) mapView(b *engine.Board, w, h int) []string {
	groups := b.Groups()
	columns := w - mapName - 10
	if w >= 112 {
		columns = w - mapName - 10 - 36
	}
	room := h - 4
	each := mapScale(groups, columns, room)
	c.wat.place.columns, c.wat.place.each = columns, each
	remark := "1 cell = " + count(each, "node")
	if each > 1 {
		remark += ", shows the worst"
	}
	lines := []string{c.th.rule(w, "Fleet map", remark)}
	at, cell := c.cursorCell(groups)
	var rows []string
	cursorRow := 0
	for gi, g := range groups {
		cells := (len(g.Places) + each - 1) / each
		for row := 0; row == 0 || row*columns < cells; row++ {
			r := c.th.row(w).pad(1)
			switch row {
			case 0:
				r.col(plain, clean(g.Name), mapName).num(faint, strconv.Itoa(g.Total), 6)
			default:
				r.pad(mapName + 8)
			}
			// Cells of one state are written together: an escape sequence for each cell would
			// be ten times the bytes.
			var run strings.Builder
			style := plain
			flush := func() {
				r.raw(style, run.String())
				run.Reset()
			}
			for k := row * columns; k < min(cells, (row+1)*columns); k++ {
				sign, st := " ", plain
				if p := worstPlace(g.Places[k*each : min(len(g.Places), (k+1)*each)]); p != nil {
					sign, st = c.mapCell(p.State())
				}
				if gi == at && k == cell {
					flush()
					r.raw(chosen, sign)
					cursorRow = len(rows)
					continue
				}
				if st != style {
					flush()
					style = st
				}
				run.WriteString(sign)
			}
			flush()
			rows = append(rows, r.String())
		}
	}
	from, to := window(len(rows), cursorRow, room)
	rows = rows[from:to]
	if w >= 112 && at >= 0 {
		rows = c.beside(rows, c.cellDetail(groups[at], cell, each, 34, room), w-36, room)
	}
	lines = append(lines, rows...)
	for len(lines) < h-3 {
		lines = append(lines, "")
	}
	if at >= 0 {
		lines = append(lines, c.cellLine(groups[at], cell, each, w))
	} else {
		lines = append(lines, c.th.row(w).add(faint, "   no node seen yet").String())
	}
	return append(lines, c.legend(b, w)...)
}

// beside puts a pane to the right of some lines.
func (c *console) beside(left, right []string, at, h int) []string {
	out := make([]string, 0, h)
	for i := range h {
		l, r := "", ""
		if i < len(left) {
			l = left[i]
		}
		if i < len(right) {
			r = right[i]
		}
		out = append(out, l+strings.Repeat(" ", max(0, at-styledWidth(l)))+c.th.paint(faint, c.th.side)+r)
	}
	return out
}

// cursorCell is the group and the cell under the cursor; -1 if there are no groups.
func (c *console) cursorCell(groups []*engine.BoardGroup) (group, cell int) {
	if len(groups) == 0 {
		return -1, 0
	}
	i := max(0, slices.IndexFunc(groups, func(g *engine.BoardGroup) bool { return g.Name == c.wat.place.group }))
	each := max(1, c.wat.place.each)
	cells := max(1, (len(groups[i].Places)+each-1)/each)
	return i, min(c.wat.place.cell, cells-1)
}

// cellPlaces are the places of a cell.
func cellPlaces(g *engine.BoardGroup, cell, each int) []*engine.BoardPlace {
	from := min(cell*each, len(g.Places))
	return g.Places[from:min(len(g.Places), from+each)]
}

// cellLine describes the cell under the cursor.
func (c *console) cellLine(g *engine.BoardGroup, cell, each, w int) string {
	places := cellPlaces(g, cell, each)
	r := c.th.row(w).add(faint, " cursor ").add(strong, clean(g.Name)+":"+strconv.Itoa(cell*each)+"  ")
	if len(places) == 1 {
		if n := places[0].Node(); n != nil {
			_, st := c.stageSign(n.State)
			return r.add(plain, clean(n.Name)+"  ").add(st, clean(n.State)+" ").add(faint, c.age(n)+"  "+clean(n.Text)).right(faint, "Enter opens").String()
		}
		return r.add(faint, "empty").String()
	}
	counts := map[string]int{}
	first, last := "", ""
	for _, p := range places {
		counts[p.State()]++
		if n := p.Node(); n != nil {
			last = clean(n.Name)
			if first == "" {
				first = last
			}
		}
	}
	r.add(plain, first+" … "+last+"  ")
	for _, s := range worstFirst {
		if n := counts[s]; n > 0 && s != "" {
			_, st := c.stageSign(s)
			r.add(st, strconv.Itoa(n)+" "+s+" ")
		}
	}
	return r.right(faint, "Enter opens").String()
}

// cellDetail lists the nodes of the cell under the cursor.
func (c *console) cellDetail(g *engine.BoardGroup, cell, each, w, h int) []string {
	places := cellPlaces(g, cell, each)
	lines := []string{c.th.row(w).add(faint, fmt.Sprintf(" group %s  cell %d", clean(g.Name), cell)).String()}
	for _, p := range places {
		n := p.Node()
		if n == nil {
			continue
		}
		if len(lines) == h-1 && len(places) > h-1 {
			lines = append(lines, c.th.row(w).pad(1).add(faint, "…").String())
			break
		}
		sign, st := c.stageSign(n.State)
		lines = append(lines, c.th.row(w).pad(1).add(st, sign).add(plain, " ").add(plain, cut(clean(n.Name), w-20, c.th.ellipsis)+" ").add(st, clean(n.State)).right(faint, c.age(n)).String())
	}
	return lines
}

// legend explains the signs of the map, with the number of nodes of each.
func (c *console) legend(b *engine.Board, w int) []string {
	counts := map[string]int{}
	for _, g := range b.Groups() {
		for s, n := range g.Counts {
			counts[s] += n
		}
	}
	lines := make([]string, 0, 2)
	r := c.th.row(w).pad(1)
	for _, s := range []string{
		engine.NodeReady, engine.NodeOutdated, engine.NodeReplacing, engine.NodeCreating, engine.NodeBooting, engine.NodeJoining, engine.NodeNotReady,
		engine.NodeDraining, engine.NodeUpgrading, engine.NodeLeaving, engine.NodeFailed,
	} {
		if counts[s] == 0 && s != engine.NodeReady && s != engine.NodeOutdated {
			continue
		}
		sign, st := c.mapCell(s)
		text := " " + s + " " + strconv.Itoa(counts[s]) + "  "
		if r.used+1+width(text) > w && len(lines) == 0 {
			lines = append(lines, r.String())
			r = c.th.row(w).pad(1)
		}
		r.raw(st, sign).add(plain, text)
	}
	lines = append(lines, r.String())
	for len(lines) < 2 {
		lines = append(lines, "")
	}
	return lines[:2]
}

// moveCell moves the cursor of the map.
func (c *console) moveCell(rows, columns int) {
	groups := c.wat.shown().Groups()
	g, cell := c.cursorCell(groups)
	if g < 0 {
		return
	}
	p := &c.wat.place
	wide, each := max(1, p.columns), max(1, p.each)
	cells := func(i int) int { return max(1, (len(groups[i].Places)+each-1)/each) }
	to := cell + rows*wide + columns
	switch {
	case to < 0 && rows < 0 && g > 0: // to the last line of the group above
		g--
		to = min(cells(g)-1, (cells(g)-1)/wide*wide+cell%wide)
	case to >= cells(g) && rows > 0 && cell/wide == (cells(g)-1)/wide && g < len(groups)-1:
		g++
		to = min(cells(g)-1, cell%wide)
	}
	p.group, p.cell = groups[g].Name, max(0, min(to, cells(g)-1))
}

func (c *console) nextGroup(by int) {
	groups := c.wat.shown().Groups()
	if g, _ := c.cursorCell(groups); g >= 0 {
		c.wat.place.group, c.wat.place.cell = groups[(g+by+len(groups))%len(groups)].Name, 0
	}
}

// nextActiveCell goes to the next cell with a failed or moving node.
func (c *console) nextActiveCell() tea.Cmd {
	groups := c.wat.shown().Groups()
	g, cell := c.cursorCell(groups)
	if g < 0 {
		return nil
	}
	each := max(1, c.wat.place.each)
	at := cell + 1
	for range len(groups) + 1 {
		cells := (len(groups[g].Places) + each - 1) / each
		for ; at < cells; at++ {
			if p := worstPlace(cellPlaces(groups[g], at, each)); p != nil && p.Node() != nil && inFlight(p.Node()) {
				c.wat.place.group, c.wat.place.cell = groups[g].Name, at
				return nil
			}
		}
		g, at = (g+1)%len(groups), 0
	}
	c.note = "no node is in flight"
	return nil
}

func (c *console) openCell() tea.Cmd {
	groups := c.wat.shown().Groups()
	g, cell := c.cursorCell(groups)
	if g >= 0 {
		if p := worstPlace(cellPlaces(groups[g], cell, max(1, c.wat.place.each))); p != nil && p.Node() != nil {
			c.openNode(p.Node().Name)
			return nil
		}
	}
	c.note = "no machine in this cell"
	return nil
}

func (c *console) copyCell() {
	groups := c.wat.shown().Groups()
	g, cell := c.cursorCell(groups)
	var names []string
	if g >= 0 {
		for _, p := range cellPlaces(groups[g], cell, max(1, c.wat.place.each)) {
			if n := p.Node(); n != nil {
				names = append(names, clean(n.Name))
			}
		}
	}
	c.copyText(strings.Join(names, " "), count(len(names), "name"))
}

// nodeView shows the details of one machine.
func (c *console) nodeView(b *engine.Board, w, h int) []string {
	n := b.Node(c.wat.node)
	if n == nil {
		return []string{c.th.rule(w, "Machine "+clean(c.wat.node), ""), c.th.row(w).add(faint, "   not known now; Esc goes back").String()}
	}
	lines := []string{c.th.rule(w, "Machine "+clean(n.Name), "group "+clean(n.Group))}
	pair := []*engine.BoardNode{n}
	if o := b.Node(n.With); o != nil {
		pair = []*engine.BoardNode{o, n}
		if slices.Contains(engine.StagesOld, n.State) {
			pair = []*engine.BoardNode{n, o}
		}
	}
	for _, x := range pair {
		lines = append(lines, c.stateHistoryRows(b, x, x == n, w)...)
	}
	if len(pair) > 1 && h >= 16 {
		lines = append(lines, c.replacementTimeline(pair, w)...)
	}
	lines = append(lines, "")
	facts := []string{c.facts(n)}
	if wt := b.Wait; wt.Node == n.Name && wt.Text != "" {
		facts = append(facts, "waiting: "+clean(wt.Text))
	}
	if n.Text != "" {
		facts = append(facts, clean(n.State)+": "+clean(n.Text))
	}
	for _, f := range facts {
		lines = append(lines, c.th.below(w, 2, 2, plain, f)...)
	}
	list := c.lines()
	remark := count(len(list), "line")
	if !c.wat.log.pinned {
		remark += ", following"
	}
	lines = append(lines, c.th.rule(w, "Log", remark))
	if len(list) == 0 {
		return append(lines, c.th.row(w).add(faint, "   no log lines yet").String())
	}
	return append(lines, c.linePart(b, list, w, max(1, h-len(lines)), true)...)
}

func (c *console) facts(n *engine.BoardNode) string {
	role := "worker"
	if n.Control {
		role = "control plane"
	}
	parts := []string{role, "first seen " + n.First.UTC().Format("15:04:05Z")}
	if n.Attempts > 0 {
		parts = append(parts, "try "+strconv.Itoa(n.Attempts))
	}
	if n.With != "" {
		word := "replaces "
		if slices.Contains(engine.StagesOld, n.State) {
			word = "replaced by "
		}
		parts = append(parts, word+clean(n.With))
	}
	return strings.Join(parts, " "+c.th.dot+" ")
}

// stateHistoryRows is the state history of a machine, with the start and the duration of each state.
func (c *console) stateHistoryRows(b *engine.Board, n *engine.BoardNode, here bool, w int) []string {
	now := c.watchNow()
	all := append(slices.Clone(n.Past), engine.Moment{State: n.State, Since: n.Since, Took: now.Sub(n.Since), Seen: n.Seen})
	most := max(2, (w-4)/13)
	if len(all) > most {
		all = all[len(all)-most:]
	}
	st := plain
	if here {
		st = strong
	}
	names, times, tooks := c.th.row(w).pad(2), c.th.row(w).pad(2), c.th.row(w).pad(2)
	for i, m := range all {
		_, style := c.stageSign(m.State)
		name := clean(m.State)
		now := i == len(all)-1
		if !now {
			name += " " + c.th.arrow
			style = faint
		}
		names.col(style, name, 12)
		if m.Seen {
			times.col(faint, m.Since.UTC().Format("15:04:05"), 12)
			tooks.col(plain, short(m.Took), 12)
		} else {
			times.col(faint, "before "+m.Since.UTC().Format("15:04"), 12)
			tooks.col(plain, "≥"+short(m.Took), 12)
		}
	}
	head := c.th.row(w).pad(1).add(st, clean(n.Name))
	if p50 := b.Dwell(n.State, 0.5); p50 > 0 && inFlight(n) {
		head.add(faint, "  median time "+clean(n.State)+": "+short(p50))
	}
	return []string{head.String(), names.String(), times.String(), tooks.String()}
}

// replacementTimeline draws the states of the two machines of a replacement over time, old above new.
func (c *console) replacementTimeline(pair []*engine.BoardNode, w int) []string {
	now := c.watchNow()
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
	lines := []string{c.th.rule(w, "Timeline", begin.UTC().Format("15:04:05")+" - "+now.UTC().Format("15:04:05")+"  1 column = "+short(span/time.Duration(room)))}
	for i, n := range pair {
		r := c.th.row(w).pad(1).col(faint, []string{"old", "new"}[i], 4).pad(10)
		all := append(slices.Clone(n.Past), engine.Moment{State: n.State, Since: n.Since, Took: now.Sub(n.Since)})
		used := 0
		for _, m := range all {
			from := int(m.Since.Sub(begin) * time.Duration(room) / span)
			to := int(m.Since.Add(m.Took).Sub(begin) * time.Duration(room) / span)
			from, to = max(from, used, 0), min(max(to, 0), room)
			if to <= from {
				continue
			}
			sign, st := c.mapCell(m.State)
			r.pad(from-used).raw(st, strings.Repeat(sign, to-from))
			used = to
		}
		lines = append(lines, r.String())
	}
	return lines
}
