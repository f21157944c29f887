package tui

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

	"constellation/engine"
)

const (
	// playGap is the time between two frames of a replay.
	playGap = 100 * time.Millisecond
	// checkpoints is how many events lie between two boards that a player keeps, so that
	// going back does not mean to begin anew.
	checkpoints = 20_000
	// longGap is how much of the recorded time in which nothing happened is played; the
	// rest is left out.
	longGap = 30 * time.Second
)

// speeds are how much faster than it was a replay can be.
var speeds = []int{1, 2, 4, 8, 16, 32, 64, 128, 256, 512}

// player plays a record. The zero value has none.
type player struct {
	events []engine.Event // by time
	at     int            // events that were played
	now    time.Time
	speed  int // index into speeds
	// playing is false while it is held, and at the end.
	playing bool
	moved   time.Time // on our clock, when it was last moved on
	kept    []kept
}

// kept is a board as it was after some events.
type kept struct {
	at    int
	board *engine.Board
}

func newPlayer(events []engine.Event) player {
	return player{events: events, now: events[0].Time, speed: 3, playing: true}
}

func (p *player) first() time.Time { return p.events[0].Time }
func (p *player) last() time.Time  { return p.events[len(p.events)-1].Time }

func (p *player) faster(by int) { p.speed = max(0, min(p.speed+by, len(speeds)-1)) }

func (p *player) toggle() { p.playing = !p.playing && p.at < len(p.events) }

// play moves the replay on by the time that has passed.
func (c *console) play() {
	p := &c.wat.player
	passed := min(c.now.Sub(p.moved), time.Second)
	if p.moved.IsZero() {
		passed = playGap
	}
	p.moved = c.now
	to := p.now.Add(passed * time.Duration(speeds[p.speed]))
	if p.at < len(p.events) {
		if next := p.events[p.at].Time; next.Sub(p.now) > longGap && next.After(to.Add(longGap)) {
			to = next.Add(-longGap) // nothing happened for long
		}
	}
	c.playTo(to)
}

// playTo applies the events up to a time that is not before now.
func (c *console) playTo(to time.Time) {
	p := &c.wat.player
	if last := p.last(); to.After(last) {
		to = last
	}
	n := p.at
	for n < len(p.events) && !p.events[n].Time.After(to) {
		n++
	}
	for p.at < n {
		if p.at%checkpoints == 0 && p.at > 0 && !slices.ContainsFunc(p.kept, func(k kept) bool { return k.at == p.at }) {
			p.kept = append(p.kept, kept{p.at, c.wat.board.Clone()})
		}
		c.wat.board.Apply(p.events[p.at])
		p.at++
	}
	p.now = to
	if p.at == len(p.events) {
		p.playing = false
	}
}

// seek goes some time on or back.
func (c *console) seek(by time.Duration) { c.seekTo(c.wat.player.now.Add(by)) }

// seekTo goes to a moment of the record.
func (c *console) seekTo(to time.Time) {
	p := &c.wat.player
	if to.Before(p.first()) {
		to = p.first()
	}
	if to.Before(p.now) {
		p.at, c.wat.board = 0, &engine.Board{}
		for _, k := range p.kept {
			if k.at > p.at && !p.events[k.at-1].Time.After(to) {
				p.at, c.wat.board = k.at, k.board.Clone()
			}
		}
	}
	c.playTo(to)
}

// opening reports whether a record was read and is not shown yet.
func (c *console) opening() bool { return c.deps.replay != nil && c.wat.origin != fromReplay }

// openReplay shows a record from its beginning, or held at a moment.
func (c *console) openReplay(r *record) tea.Cmd {
	c.closeWatch()
	c.wat = watchScreen{origin: fromReplay, gen: c.wat.gen + 1, board: &engine.Board{}, player: newPlayer(r.events), filter: c.wat.filter}
	c.enterWatch()
	c.note = r.word
	if r.at.IsZero() {
		c.playTo(c.wat.player.first())
	} else {
		c.playTo(r.at)
		c.wat.player.playing = false
	}
	return c.watchTicking()
}

// record is a recorded run.
type record struct {
	path   string
	events []engine.Event
	at     time.Time // where to begin; zero: at the beginning
	word   string    // about at, for the user; empty if there is none
	bad    []engine.BadLine
}

// tellEach is after how many bytes of a record it is told how far reading is.
const tellEach = 1 << 20

// readRecord reads FILE[@TIME]. FILE is a file of events, or the ID of a run that find
// knows a file of. Lines that are no events are left out, and named in the record. tell is
// told how far it is while it reads what takes a while.
func readRecord(arg string, find func(run string) (string, error), tell func(string)) (*record, error) {
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
		return nil, &engine.Error{Op: "read record " + name, Err: err, Remedy: "name a file of events, or a run of this workspace: `constellation history` lists them", Exit: engine.ExitUsage}
	}
	defer f.Close()
	if about, serr := f.Stat(); serr == nil && about.IsDir() {
		return nil, &engine.Error{Op: "read record " + name, Err: errors.New("it is a folder"), Remedy: "name a file of events, or a run of this workspace: `constellation history` lists them", Exit: engine.ExitUsage}
	}
	r := &record{path: name}
	in := &counted{Reader: f, tell: func(n int64) {
		text := "reading the record " + clean(name) + ": " + bytesOf(n)
		if about, serr := f.Stat(); serr == nil && about.Mode().IsRegular() {
			text += " of " + bytesOf(about.Size())
		}
		tell(text)
	}}
	if r.bad, err = engine.ReadRecord(in, func(ev engine.Event) error { r.events = append(r.events, ev); return nil }); err != nil {
		return nil, &engine.Error{Op: "read record " + name, Err: err, Remedy: "name a file of events that can be read", Exit: engine.ExitUsage}
	}
	if len(r.events) == 0 {
		e := &engine.Error{Op: "read record " + name, Err: errors.New("it holds no events"), Remedy: "name a file that a run recorded, or that -o json printed", Exit: engine.ExitUsage}
		if len(r.bad) > 0 {
			e.Err = fmt.Errorf("it holds no events; %s", r.bad[0])
		}
		return nil, e
	}
	// A clock that was set back would have the replay stand still.
	slices.SortStableFunc(r.events, func(a, b engine.Event) int { return a.Time.Compare(b.Time) })
	if when != "" {
		if err := r.begin(when); err != nil {
			return nil, &engine.Error{Op: "replay " + name, Err: err, Remedy: "give a time such as @14:02:11, @2026-11-21T14:02:11Z or @+5m after the beginning", Exit: engine.ExitUsage}
		}
	}
	return r, nil
}

// counted tells how much was read, after each tellEach bytes.
type counted struct {
	io.Reader
	read, told int64
	tell       func(int64)
}

// Read implements io.Reader.
func (c *counted) Read(p []byte) (int, error) {
	n, err := c.Reader.Read(p)
	if c.read += int64(n); c.read-c.told >= tellEach {
		c.told = c.read
		c.tell(c.read)
	}
	return n, err
}

// begin notes where a replay begins; see momentOf. A time before the first event means
// the first one, which is said; one after the last is an error.
func (r *record) begin(when string) error {
	const whole = "2006-01-02 15:04:05Z"
	first, last := r.events[0].Time, r.events[len(r.events)-1].Time
	at, err := momentOf(when, first, last)
	switch {
	case err != nil:
		return err
	case at.After(last):
		return fmt.Errorf("%s is after its end: it goes from %s to %s, which is %s", at.UTC().Format(whole), first.UTC().Format(whole), last.UTC().Format(whole), short(last.Sub(first)))
	case at.Before(first):
		r.word = fmt.Sprintf("%s is before the record: it is played from its beginning at %s", at.UTC().Format(whole), first.UTC().Format(whole))
		at = first
	}
	r.at = at
	return nil
}

// momentOf reads a time of a record that lasted from first to last: +5m after its
// beginning, 14:02:11 in UTC, or a whole time.
func momentOf(s string, first, last time.Time) (time.Time, error) {
	if after, ok := strings.CutPrefix(s, "+"); ok {
		d, err := time.ParseDuration(after)
		if err != nil || d < 0 {
			return time.Time{}, fmt.Errorf("%q is no time", s)
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
	return time.Time{}, fmt.Errorf("%q is no time", s)
}
