package tui

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"constellation/engine"
)

// watchNow is the time on the clock of the board that is shown: that of the replay, or
// ours.
func (c *console) watchNow() time.Time {
	if c.wat.frozen != nil {
		return c.wat.frozenAt
	}
	return c.now
}

// watchView draws the lens in w columns and h lines.
func (c *console) watchView(w, h int) []string {
	b := c.wat.shown()
	return c.pipeline(b, w, h)
}

// pipeline shows how many machines are in each stage, how many leave it in a minute, and
// how long half of them stay at most.
func (c *console) pipeline(b *engine.Board, w, h int) []string {
	now := c.watchNow()
	done, total := b.Places()
	remark := fmt.Sprintf("%d of %d nodes at the target", done, total)
	if p := b.Pace(now); p > 0 {
		remark += ", " + perMinute(p)
	}
	lines := []string{c.th.rule(w, "Pipeline", remark)}
	lines = append(lines, c.stageRows(b, "old", engine.StagesOld, w, now, h < 12)...)
	lines = append(lines, c.stageRows(b, "new", append(append([]string{}, engine.StagesNew...), engine.NodeFailed), w, now, h < 12)...)
	if total > 0 {
		lines = append(lines, c.th.row(w).pad(1).add(good, c.th.meter(int64(done), int64(total), w-10)).add(plain, fmt.Sprintf(" %5.1f%%", 100*float64(done)/float64(total))).String())
	}
	return lines
}

// stageRows are the rows of some stages: names, numbers, and unless brief flow and dwell.
func (c *console) stageRows(b *engine.Board, title string, stages []string, w int, now time.Time, brief bool) []string {
	col := (w - 6) / 6
	names, numbers, flows, dwells := c.th.row(w).pad(1).col(faint, title, 4), c.th.row(w).pad(6), c.th.row(w).pad(6), c.th.row(w).pad(6)
	for i, s := range stages {
		link := " " + c.th.arrow
		if i == len(stages)-1 || s == engine.NodeReady {
			link = ""
		}
		n := b.Count(s)
		st := plain
		if n > 0 {
			_, st = c.nodeSign(s)
		}
		names.add(plain, strings.Repeat(" ", max(0, col-1-width(s)-width(link)))).add(st, s).add(faint, link).pad(1)
		numbers.num(st, strconv.FormatInt(n, 10), col-1-width(link)).pad(width(link))
		flow, dwell := "", ""
		if f := b.Flow(s, now); f > 0 && s != engine.NodeGone {
			flow = perMinute(f)
		}
		if d := b.Dwell(s, 0.5); d > 0 && s != engine.NodeGone && s != engine.NodeReady && s != engine.NodeOutdated {
			dwell = short(d)
		}
		flows.num(faint, flow, col-1-width(link)).pad(width(link))
		dwells.num(faint, dwell, col-1-width(link)).pad(width(link))
	}
	out := []string{names.String(), numbers.String()}
	if !brief {
		out = append(out, flows.String(), dwells.String())
	}
	return out
}

// perMinute is "24/min".
func perMinute(f float64) string {
	if f < 9.95 {
		return strconv.FormatFloat(f, 'f', 1, 64) + "/min"
	}
	return strconv.Itoa(int(math.Round(f))) + "/min"
}
