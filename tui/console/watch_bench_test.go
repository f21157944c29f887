package console

import (
	"io"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"constellation/engine/plan"
	"constellation/engine/rollout"
	"constellation/tui/internal/enginefake"
	"constellation/tui/term"
)

// BenchmarkWatch measures the watch screen of a rollout of 5,000 nodes at ten updates a
// second, each of 20 node changes and 3 log lines with a frame painted after it. One
// iteration is an update. It reports CPU utilisation and the bytes to the terminal per
// second.
func BenchmarkWatch(b *testing.B) {
	for _, size := range []struct {
		name string
		w, h int
		keys []string
	}{
		{name: "80x24", w: 80, h: 24},
		{name: "120x40", w: 120, h: 40},
		{name: "200x60", w: 200, h: 60},
		{name: "120x40-map", w: 120, h: 40, keys: []string{"m"}},
	} {
		b.Run(size.name, func(b *testing.B) {
			r, w, err := os.Pipe()
			if err != nil {
				b.Fatal(err)
			}
			var written atomic.Int64
			gone := make(chan struct{})
			go func() {
				defer close(gone)
				buf := make([]byte, 1<<16)
				for {
					n, err := r.Read(buf)
					written.Add(int64(n))
					if err == io.EOF {
						return
					}
				}
			}()
			painted := &term.Terminal{Out: w, Live: true, Width: size.w, Height: size.h}
			updates := updatesOf(b)
			c := benchWatch(b, size.w, size.h)
			for _, k := range size.keys {
				c.key(keyOf(k))
			}
			painted.Paint(c.View())
			first := written.Load()
			b.ReportAllocs()
			i := 0
			for b.Loop() {
				c.deps.Now = func() time.Time { return benchBegin.Add(time.Duration(i) * 100 * time.Millisecond) }
				c.Update(watchBatch{0, updates(i)})
				painted.Paint(c.View())
				i++
			}
			w.Close()
			<-gone
			b.ReportMetric(float64(written.Load()-first)/float64(i)*10/1000, "kB/s")
			b.ReportMetric(b.Elapsed().Seconds()/float64(i)*10*100, "%cpu")
		})
	}
}

// BenchmarkWatchBurst measures 1,000 events a second: one iteration is the events between two
// frames, and the frame.
func BenchmarkWatchBurst(b *testing.B) {
	c := benchWatch(b, 120, 40)
	updates := updatesOf(b)
	perFrame := int(1000 * term.FrameGap / time.Second)
	worst := time.Duration(0)
	i, seen := 0, []plan.Event(nil)
	for b.Loop() {
		for len(seen) < perFrame {
			seen = append(seen, updates(i)...)
			i++
		}
		began := time.Now()
		c.Update(watchBatch{0, seen[:perFrame]})
		if c.View() == "" {
			b.Fatal("no frame")
		}
		worst = max(worst, time.Since(began))
		seen = seen[perFrame:]
	}
	b.ReportMetric(float64(worst.Microseconds())/1000, "worst-ms")
}

// BenchmarkBoard measures the fold of one event among 5,000 nodes.
func BenchmarkBoard(b *testing.B) {
	events := enginefake.RolloutOf(b, 5000)
	b.ReportAllocs()
	for b.Loop() {
		var board rollout.Board
		for _, ev := range events {
			board.Apply(ev)
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(len(events)), "ns/event")
}

var benchBegin = enginefake.Start.Add(20 * time.Minute)

// benchWatch is a console that watches a rollout of 5,000 nodes.
func benchWatch(b *testing.B, w, h int) *console {
	c := newConsole(b.Context(), term.Display{Colours: term.Colours256}, consoleDeps{Options: Options{Engine: &enginefake.Engine{}, Now: func() time.Time { return benchBegin }}})
	c.w, c.h, c.screen, c.task.busy, c.ticking = w, h, c.watch, "", true
	c.watch.restart(watchScreen{origin: fromLive, board: &rollout.Board{}, ticks: true}, "")
	c.now = benchBegin
	c.watch.apply(enginefake.Until(enginefake.RolloutOf(b, 5000), benchBegin.Sub(enginefake.Start)))
	return c
}

// updatesOf returns the events of the i-th update: the next ones of the rollout, repeated cyclically.
func updatesOf(b *testing.B) func(i int) []plan.Event {
	all := enginefake.RolloutOf(b, 5000)
	from := len(enginefake.Until(all, benchBegin.Sub(enginefake.Start)))
	rest := all[from : len(all)-2]
	at := 0
	return func(i int) []plan.Event {
		var out []plan.Event
		var last plan.Event
		for nodes := 0; nodes < 20; at = (at + 1) % len(rest) {
			ev := rest[at]
			if ev.Kind == plan.KindLog {
				continue
			}
			if ev.Kind == plan.KindNode {
				nodes++
				last = ev
			}
			ev.Time = benchBegin.Add(time.Duration(i) * 100 * time.Millisecond)
			out = append(out, ev)
		}
		for range 3 {
			out = append(out, plan.Event{
				Kind: plan.KindLog, Time: benchBegin.Add(time.Duration(i) * 100 * time.Millisecond), Source: "operator", Level: "info",
				Text: "rollout  action=drain node=" + last.Node + " heir=" + last.With,
			})
		}
		return out
	}
}
