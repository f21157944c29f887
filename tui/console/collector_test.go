package console

import (
	"context"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"constellation/engine/plan"
	"constellation/tui/internal/enginefake"
	"constellation/tui/term"
	"constellation/tui/view"
)

func TestCollectorKeepsOrderAndDropsNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var got []uint64
		var sizes []int
		c := newCollector(func(b []plan.Event) {
			time.Sleep(10 * time.Millisecond) // a busy screen
			sizes = append(sizes, len(b))
			for _, ev := range b {
				got = append(got, ev.Seq)
			}
		})
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		wg.Go(func() { c.Run(ctx) })
		began := time.Now()
		for i := range uint64(1000) {
			c.emit(plan.Event{Seq: i + 1})
			time.Sleep(time.Millisecond)
		}
		if d := time.Since(began); d != time.Second {
			t.Errorf("emit blocked the run: %s for a second of events", d)
		}
		cancel()
		wg.Wait()
		c.flush()
		for i, seq := range got {
			if seq != uint64(i+1) {
				t.Fatalf("event %d is number %d", i+1, seq)
			}
		}
		if len(got) != 1000 {
			t.Fatalf("%d events of 1000", len(got))
		}
		if n := len(sizes); n > 31 {
			t.Errorf("%d batches in a second, want at most 30 and a last one", n)
		}
		if sizes[0] != 1 {
			t.Errorf("the first batch has %d events, want the first event alone and at once", sizes[0])
		}
	})
}

func TestCollectorIsIdleWithoutEvents(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCollector(func([]plan.Event) {})
		ctx, cancel := context.WithCancel(t.Context())
		go c.Run(ctx)
		c.emit(plan.Event{})
		time.Sleep(time.Hour) // with a ticker in it the bubble would be busy; with none it is at once
		synctest.Wait()
		cancel()
	})
}

// BenchmarkEventToFrame measures one event from the run to the finished frame, on the most
// expensive screen, without the pauses between frames.
func BenchmarkEventToFrame(b *testing.B) {
	for _, size := range []struct {
		name string
		w, h int
	}{{name: "80x24", w: 80, h: 24}, {name: "120x40", w: 120, h: 40}, {name: "200x60", w: 200, h: 60}} {
		b.Run(size.name, func(b *testing.B) {
			s := benchStage(b, size.w, size.h)
			ev := plan.Event{Kind: plan.KindLog, Source: "kubeadm", Node: "control-plane-0", Level: "info", Text: "[certs] Generating \"etcd/healthcheck-client\" certificate and key"}
			b.ReportAllocs()
			for b.Loop() {
				s.Update(batch{s.task.id, []plan.Event{ev}})
				if len(s.View()) == 0 {
					b.Fatal("no frame")
				}
			}
		})
	}
}

// BenchmarkFold measures the fold of one event.
func BenchmarkFold(b *testing.B) {
	events := enginefake.Recorded(b, "many")
	b.ReportAllocs()
	for b.Loop() {
		var t view.Timeline
		for _, ev := range events {
			t.Apply(ev)
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(len(events)), "ns/event")
}

// benchStage is a console in the middle of a run.
func benchStage(b *testing.B, w, h int) *console {
	events := enginefake.Recorded(b, "init")
	c := newConsole(b.Context(), term.Display{Colours: term.Colours256}, consoleDeps{Options: Options{Engine: &enginefake.Engine{}, Now: time.Now}})
	c.w, c.h = w, h
	c.plan = enginefake.PlanIn(b, events)
	c.screen, c.running, c.ran = c.run, true, true
	*c.run = *newRunScreen(c)
	c.ticking = true // no tick of its own
	for _, ev := range events[:40] {
		c.t.Apply(ev)
	}
	return c
}
