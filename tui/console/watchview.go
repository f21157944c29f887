package console

import (
	"cmp"
	"strconv"
	"strings"
	"time"

	"constellation/engine/rollout"
	"constellation/tui/term"
	"constellation/tui/view"
)

// header is the header of the watch screen: cluster, target, mode, clocks and ETA, and
// below it the progress line.
func (scr *watchScreen) header() []string {
	b, now := scr.shown(), scr.clock()
	r := scr.c.th.Row(scr.c.w).Add(term.Accent, " "+scr.c.th.Brand+" ").Add(term.Strong, cmp.Or(term.Clean(b.Cluster), "cluster")).Add(term.Caution, view.MarkIf(scr.page(), scr.c.w, b.Simulated, b.NotAttested))
	word, st := scr.badge(b)
	tail := []string{now.UTC().Format("15:04:05 UTC")}
	if !b.Started.IsZero() {
		tail = append(tail, "elapsed "+term.Clock(now.Sub(b.Started)))
	}
	if eta := view.ETA(scr.page(), b, now); eta != "" {
		tail = append(tail, eta)
	}
	right := strings.Join(tail, "  ")
	if to := view.TargetText(scr.page(), b); to != "" && r.Used+term.Width(to)+term.Width(word)+term.Width(right)+8 <= scr.c.w {
		r.Add(term.Faint, "  "+to)
	}
	if room := scr.c.w - r.Used - term.Width(term.AsciiIf(scr.c.th.Ascii, word)) - 4; term.Width(right) > room {
		right = strings.Join(tail[:1], "  ")
		if eta := view.ETA(scr.page(), b, now); eta != "" && term.Width(tail[0]+"  "+eta) <= room {
			right += "  " + eta
		}
	}
	gap := scr.c.w - r.Used - term.Width(term.AsciiIf(scr.c.th.Ascii, word)) - term.Width(term.AsciiIf(scr.c.th.Ascii, right)) - 3
	r.Pad(max(2, gap)).Add(st, word).Add(term.Faint, "  "+right)
	return []string{r.String(), view.BoardRail(scr.c.page(), scr.c.w, b)}
}

// badge is the mode in the header: live, frozen, stale, replay or ended.
func (scr *watchScreen) badge(b *rollout.Board) (string, term.Style) {
	word, st := "LIVE", term.Good
	switch {
	case scr.origin == fromReplay:
		word, st = "REPLAY "+"×"+strconv.Itoa(speeds[scr.player.speed]), term.Accent
		switch {
		case scr.player.at == len(scr.player.events):
			word = "REPLAY end"
		case !scr.player.playing:
			word = "REPLAY paused"
		}
	case scr.frozen != nil:
		word, st = "FROZEN "+term.Duration(scr.c.now.Sub(scr.frozenAt)), term.Caution
	case !b.UnreachableSince.IsZero():
		word, st = "STALE "+term.Duration(scr.c.now.Sub(b.UnreachableSince)), term.Bad
	case b.Result != nil || scr.ended:
		word, st = "ENDED", term.Faint
	case scr.opening():
		word, st = "REPLAY opening", term.Faint
	case b.Events == 0:
		word, st = "connecting", term.Faint
	}
	if scr.origin == fromLive && (scr.c.deps.Watch.Kubeconfig != "" || scr.c.upg.lockedBy != "") {
		word = "READ-ONLY " + word
	}
	return word, st
}

// stale reports whether the watch screen may be out of date.
func (scr *watchScreen) stale() bool {
	return scr.origin != fromReplay && scr.frozen == nil && !scr.shown().UnreachableSince.IsZero()
}

// view renders the lens in w columns and h lines.
func (scr *watchScreen) view(w, h int) []string { return scr.shownLens().view(scr.shown(), w, h) }

// reason is reason for the board on the screen, or why there is none.
func (scr *watchScreen) reason() (text, remedy string) {
	switch {
	case scr.err != nil && scr.frozen == nil:
		x := view.Explain(scr.err, scr.c.deps.Commands)
		return "The watch has ended: " + x.What, x.Remedy
	case scr.opening():
		return "Opening the record", ""
	}
	return view.BoardReason(scr.page(), scr.shown())
}

// watchWhy is the why line of the watch screen and the remedy, if there is one.
func (scr *watchScreen) watchWhy() []string {
	text, remedy := scr.reason()
	most := 3
	if scr.c.h < 22 || scr.lens == lensTrouble {
		most = 1
	}
	lines := scr.c.th.Below(scr.c.w, 1, most, term.Strong, text)
	if scr.lens == lensTrouble { // which shows the remedy itself
		return lines
	}
	if remedy != "" {
		for i, l := range scr.c.th.Below(scr.c.w, 8, most, term.Accent, scr.c.deps.Commands.Text(remedy)) {
			if i == 0 {
				l = " " + scr.c.th.Paint(term.Faint, "To do:") + " " + strings.TrimLeft(l, " ")
			}
			lines = append(lines, l)
		}
	}
	return lines
}

// boardSafety is view.WatchSafety for the board on the screen.
func (scr *watchScreen) boardSafety() string {
	api, backup := "", time.Time{}
	if scr.origin != fromReplay {
		if !scr.ended {
			api = view.APIStatus(scr.c.page(), scr.pulse)
		}
		if scr.c.home != nil && scr.c.home.Backup != nil {
			backup = scr.c.home.Backup.Created
		}
	}
	return view.WatchSafety(scr.c.page(), scr.shown(), scr.c.w, api, backup)
}
