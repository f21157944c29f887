package console

import (
	"context"
	"fmt"
	"math/rand/v2"
	"regexp"
	"slices"
	"strconv"
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
	seen := make(chan int, 64)
	go func() {
		buf := make([]byte, 1<<16)
		marker := regexp.MustCompile(`benchmark-([0-9]+)-`)
		for {
			n, err := tty.Read(buf)
			if err != nil {
				return
			}
			for _, m := range marker.FindAllSubmatch(buf[:n], -1) {
				i, _ := strconv.Atoi(string(m[1]))
				select {
				case seen <- i:
				default:
				}
			}
		}
	}()
	emit := <-emits
	emit(events[0])
	emit(plan.Event{Kind: plan.KindStep, Step: "init-first-node", State: plan.StateRunning, Time: time.Now()})
	var took []time.Duration
	i := 0
	for b.Loop() {
		time.Sleep(time.Duration(rand.IntN(70)) * time.Millisecond)
		i++
		began := time.Now()
		emit(plan.Event{Kind: plan.KindProgress, Step: "init-first-node", Time: began, Text: fmt.Sprintf("benchmark-%d-", i)})
		for got := 0; got < i; {
			select {
			case got = <-seen:
			case <-time.After(screenTimeout):
				b.Fatal("the event does not reach the screen")
			}
		}
		took = append(took, time.Since(began))
	}
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)/2].Microseconds())/1000, "p50-ms")
	b.ReportMetric(float64(took[len(took)*99/100].Microseconds())/1000, "p99-ms")
	b.ReportMetric(float64(took[len(took)-1].Microseconds())/1000, "max-ms")
	painted.Send(term.Signalled{Sig: syscall.SIGTERM})
	if err := <-ended; err != nil {
		b.Fatal(err)
	}
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
