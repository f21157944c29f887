package console

import (
	"bytes"
	"context"
	"io"
	"math/rand/v2"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/creack/pty"

	"constellation/engine"
	"constellation/engine/plan"
	"constellation/tui/internal/enginefake"
	"constellation/tui/term"
)

// screenTimeout is the timeout of one event of BenchmarkEventToScreen.
const screenTimeout = 4 * time.Second

// BenchmarkEventToScreen measures the latency from a progress event of a run to the bytes that
// the terminal receives, including the gaps between batches and between frames. Events occur
// at random moments of the gaps. The target is 100 ms.
func BenchmarkEventToScreen(b *testing.B) {
	tty, own, err := pty.Open()
	if err != nil {
		b.Skipf("needs pseudo terminals: %v", err)
	}
	defer tty.Close()
	defer own.Close()
	if err := pty.Setsize(tty, &pty.Winsize{Cols: 120, Rows: 40}); err != nil {
		b.Fatal(err)
	}
	events := enginefake.Recorded(b, "init")
	emits := make(chan func(plan.Event), 1)
	e := &liveEngine{enginefake.Engine{HomeData: enginefake.DemoHome(engine.StagePartial), Plan: enginefake.PlanIn(b, events)}, emits}
	painted := term.NewTerminal(own, own, func(k string) string { return map[string]string{"TERM": "xterm-256color", "LANG": "C.UTF-8"}[k] })
	c := newConsole(b.Context(), painted.Display, consoleDeps{Options: Options{Engine: e, Now: time.Now}, send: painted.Send})
	ended := make(chan error, 1)
	go func() { _, err := painted.Run(b.Context(), c); ended <- err }()
	seen := make(chan struct{})
	wanted := make(chan string, 1)
	go func() {
		buf := make([]byte, 1<<16)
		var received []byte
		for marker := range wanted {
			for !bytes.Contains(received, []byte(marker)) {
				n, err := tty.Read(buf)
				if err != nil {
					return
				}
				received = append(received, buf[:n]...)
			}
			received = received[:0]
			seen <- struct{}{}
		}
		_, _ = io.Copy(io.Discard, tty) // an unread terminal blocks the last frame
	}()
	emit := <-emits
	emit(events[0])
	emit(plan.Event{Kind: plan.KindStep, Step: "init-first-node", State: plan.StateRunning, Time: time.Now()})
	var took []time.Duration
	i := 0
	for b.Loop() {
		time.Sleep(time.Duration(rand.IntN(70)) * time.Millisecond)
		marker := distinctMarker(i)
		i++
		wanted <- marker
		began := time.Now()
		emit(plan.Event{Kind: plan.KindProgress, Step: "init-first-node", Time: began, Text: marker})
		select {
		case <-seen:
		case <-time.After(screenTimeout):
			b.Fatalf("event %d does not reach the screen", i)
		}
		took = append(took, time.Since(began))
	}
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)/2].Microseconds())/1000, "p50-ms")
	b.ReportMetric(float64(took[len(took)*99/100].Microseconds())/1000, "p99-ms")
	b.ReportMetric(float64(took[len(took)-1].Microseconds())/1000, "max-ms")
	close(wanted)
	painted.Send(term.Signalled{Sig: syscall.SIGTERM})
	if err := <-ended; err != nil {
		b.Fatal(err)
	}
}

// distinctMarker returns a text that differs from that of i-1 in every column. The terminal
// receives changed columns only, so a marker with a column in common never arrives whole.
func distinctMarker(i int) string {
	marker := []byte("benchmark")
	for k, c := range marker {
		marker[k] = 'a' + byte((int(c-'a')+i)%26)
	}
	return string(marker)
}

// liveEngine passes its emit function to the test.
type liveEngine struct {
	enginefake.Engine
	emits chan func(plan.Event)
}

func (l *liveEngine) Run(ctx context.Context, _ *plan.Plan, emit func(plan.Event)) error {
	l.emits <- emit
	<-ctx.Done()
	return ctx.Err()
}
