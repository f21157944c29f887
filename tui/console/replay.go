package console

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"strings"
	"time"

	tea "github.com/charmbracelet/bubbletea"

	"constellation/engine/plan"
	"constellation/engine/rollout"
	"constellation/tui/term"
)

const (
	// playGap is the time between two frames of a replay.
	playGap = 100 * time.Millisecond
	// checkpoints is the number of events between two saved boards. Seeking backwards starts
	// from a saved board instead of the first event.
	checkpoints = 20_000
	// longGap is the longest idle time that is played; the rest of a gap is skipped.
	longGap = 30 * time.Second
)

// speeds are the factors of real time that a replay can run at.
var speeds = []int{1, 2, 4, 8, 16, 32, 64, 128, 256, 512}

// player replays a record. The zero value has no record.
type player struct {
	events []plan.Event // by time
	at     int          // number of events already played
	now    time.Time
	speed  int // index into speeds
	// playing is false while paused, and at the end.
	playing bool
	moved   time.Time // wall-clock time of the last step
	kept    []checkpoint
}

// checkpoint is the board after at events.
type checkpoint struct {
	at    int
	board *rollout.Board
}

func newPlayer(events []plan.Event) player {
	return player{events: events, now: events[0].Time, speed: 3, playing: true}
}

func (p *player) first() time.Time { return p.events[0].Time }
func (p *player) last() time.Time  { return p.events[len(p.events)-1].Time }

func (p *player) faster(by int) { p.speed = max(0, min(p.speed+by, len(speeds)-1)) }

func (p *player) toggle() { p.playing = !p.playing && p.at < len(p.events) }

// play advances the replay by the wall-clock time since the last step.
func (scr *watchScreen) play() {
	p := &scr.player
	passed := min(scr.c.now.Sub(p.moved), time.Second)
	if p.moved.IsZero() {
		passed = playGap
	}
	p.moved = scr.c.now
	to := p.now.Add(passed * time.Duration(speeds[p.speed]))
	if p.at < len(p.events) {
		if next := p.events[p.at].Time; next.Sub(p.now) > longGap && next.After(to.Add(longGap)) {
			to = next.Add(-longGap)
		}
	}
	scr.playTo(to)
}

// playTo applies the events up to a time, which must not be before p.now.
func (scr *watchScreen) playTo(to time.Time) {
	p := &scr.player
	if last := p.last(); to.After(last) {
		to = last
	}
	n := p.at
	for n < len(p.events) && !p.events[n].Time.After(to) {
		n++
	}
	for p.at < n {
		if p.at%checkpoints == 0 && p.at > 0 && !slices.ContainsFunc(p.kept, func(k checkpoint) bool { return k.at == p.at }) {
			p.kept = append(p.kept, checkpoint{p.at, scr.board.Clone()})
		}
		scr.board.Apply(p.events[p.at])
		p.at++
	}
	p.now = to
	if p.at == len(p.events) {
		p.playing = false
	}
}

// seek moves the replay forwards or backwards.
func (scr *watchScreen) seek(by time.Duration) { scr.seekTo(scr.player.now.Add(by)) }

// seekTo moves the replay to a time of the record.
func (scr *watchScreen) seekTo(to time.Time) {
	p := &scr.player
	if to.Before(p.first()) {
		to = p.first()
	}
	if to.Before(p.now) {
		p.at, scr.board = 0, &rollout.Board{}
		for _, k := range p.kept {
			if k.at > p.at && !p.events[k.at-1].Time.After(to) {
				p.at, scr.board = k.at, k.board.Clone()
			}
		}
	}
	scr.playTo(to)
}

// opening reports whether a record is loaded but not shown yet.
func (scr *watchScreen) opening() bool { return scr.c.deps.Replay != nil && scr.origin != fromReplay }

// openReplay shows a record from its beginning, or paused at r.at.
func (scr *watchScreen) openReplay(r *Record) tea.Cmd {
	scr.close()
	scr.restart(watchScreen{origin: fromReplay, gen: scr.gen + 1, board: &rollout.Board{}, player: newPlayer(r.Events)}, scr.table.filter)
	scr.enter()
	scr.c.note = r.Note
	if r.At.IsZero() {
		scr.playTo(scr.player.first())
	} else {
		scr.playTo(r.At)
		scr.player.playing = false
	}
	return scr.ticking()
}

// Record is a recorded run.
type Record struct {
	Path   string
	Events []plan.Event
	At     time.Time // start of the replay; zero for the beginning
	Note   string    // remark about at for the user; may be empty
	Bad    []rollout.BadLine
}

// progressEach is the number of bytes between two progress reports of readRecord.
const progressEach = 1 << 20

// ReadRecord reads FILE[@TIME]. FILE is a file of events, or a run ID that find resolves to
// a file. Invalid lines are skipped and listed in the record. progress gets the progress of
// reading, after each progressEach bytes.
func ReadRecord(arg string, find func(run string) (string, error), progress func(string)) (*Record, error) {
	name, when := arg, ""
	f, err := os.Open(name)
	if err != nil {
		if i := strings.LastIndexByte(arg, '@'); i >= 0 {
			name, when = arg[:i], arg[i+1:]
			f, err = os.Open(name)
		}
	}
	if errors.Is(err, fs.ErrNotExist) && !strings.ContainsRune(name, os.PathSeparator) {
		if path, ferr := find(name); ferr == nil {
			name = path
			f, err = os.Open(name)
		}
	}
	if err != nil {
		var path *fs.PathError
		if errors.As(err, &path) {
			err = path.Err
		}
		return nil, &plan.Error{Op: "read record " + name, Err: err, Remedy: "pass a file of events or a run ID; `constellation history` lists the runs", Exit: plan.ExitUsage}
	}
	defer f.Close()
	if about, serr := f.Stat(); serr == nil && about.IsDir() {
		return nil, &plan.Error{Op: "read record " + name, Err: errors.New("is a directory"), Remedy: "pass a file of events or a run ID; `constellation history` lists the runs", Exit: plan.ExitUsage}
	}
	r := &Record{Path: name}
	in := &progressReader{Reader: f, progress: func(n int64) {
		text := "reading the record " + term.Clean(name) + ": " + term.Bytes(n)
		if about, serr := f.Stat(); serr == nil && about.Mode().IsRegular() {
			text += " of " + term.Bytes(about.Size())
		}
		progress(text)
	}}
	if r.Bad, err = rollout.ReadRecord(in, func(ev plan.Event) error { r.Events = append(r.Events, ev); return nil }); err != nil {
		return nil, &plan.Error{Op: "read record " + name, Err: err, Remedy: "pass a readable file of events", Exit: plan.ExitUsage}
	}
	if len(r.Events) == 0 {
		e := &plan.Error{Op: "read record " + name, Err: errors.New("no events in the file"), Remedy: "pass a record of a run, or output of -o json", Exit: plan.ExitUsage}
		if len(r.Bad) > 0 {
			e.Err = fmt.Errorf("no events in the file; %s", r.Bad[0])
		}
		return nil, e
	}
	// If the clock was set back during the run, unsorted events would stall the replay.
	slices.SortStableFunc(r.Events, func(a, b plan.Event) int { return a.Time.Compare(b.Time) })
	if when != "" {
		if err := r.begin(when); err != nil {
			return nil, &plan.Error{Op: "replay " + name, Err: err, Remedy: "pass a time such as @14:02:11 or @2026-11-21T14:02:11Z, or @+5m for an offset", Exit: plan.ExitUsage}
		}
	}
	return r, nil
}

// progressReader reports the number of bytes read, after each progressEach bytes.
type progressReader struct {
	io.Reader
	read, reported int64
	progress       func(int64)
}

// Read implements io.Reader.
func (r *progressReader) Read(p []byte) (int, error) {
	n, err := r.Reader.Read(p)
	if r.read += int64(n); r.read-r.reported >= progressEach {
		r.reported = r.read
		r.progress(r.read)
	}
	return n, err
}

// begin sets the start of a replay; see parseMoment. A time before the first event means the
// first event, with a note; a time after the last event is an error.
func (r *Record) begin(when string) error {
	const whole = "2006-01-02 15:04:05Z"
	first, last := r.Events[0].Time, r.Events[len(r.Events)-1].Time
	at, err := parseMoment(when, first, last)
	switch {
	case err != nil:
		return err
	case at.After(last):
		return fmt.Errorf("%s is after the end: the record lasts from %s to %s, %s", at.UTC().Format(whole), first.UTC().Format(whole), last.UTC().Format(whole), term.Duration(last.Sub(first)))
	case at.Before(first):
		r.Note = fmt.Sprintf("%s is before the record: playing from its beginning at %s", at.UTC().Format(whole), first.UTC().Format(whole))
		at = first
	}
	r.At = at
	return nil
}

// parseMoment parses a time of a record that lasts from first to last: an offset such as
// +5m, a time of day such as 14:02:11 in UTC, or an RFC 3339 time.
func parseMoment(s string, first, last time.Time) (time.Time, error) {
	if after, ok := strings.CutPrefix(s, "+"); ok {
		d, err := time.ParseDuration(after)
		if err != nil || d < 0 {
			return time.Time{}, fmt.Errorf("%q is not a time", s)
		}
		return first.Add(d), nil
	}
	if t, err := time.Parse(time.RFC3339, s); err == nil {
		return t, nil
	}
	for _, layout := range []string{"15:04:05", "15:04"} {
		clock, err := time.Parse(layout, strings.TrimSuffix(s, "Z"))
		if err != nil {
			continue
		}
		day := first.UTC().Truncate(24 * time.Hour)
		t := day.Add(clock.Sub(clock.Truncate(24 * time.Hour)))
		if t.Before(first.Truncate(time.Minute)) && t.Add(24*time.Hour).Before(last.Add(time.Minute)) {
			t = t.Add(24 * time.Hour)
		}
		return t, nil
	}
	return time.Time{}, fmt.Errorf("%q is not a time", s)
}
