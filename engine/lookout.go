package engine

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"constellation/engine/cloud"
)

// lookout looks after the API server while a step works in the cluster: the calls of
// the step wait until it answers and say nothing meanwhile.
type lookout struct {
	i *initRun
	r *Reporter

	mu    sync.Mutex
	since time.Time // of the first look that had no answer; zero while it answers
	told  bool
	last  string // what is said about the time before
}

// lookOut begins to look, until stop is called or ctx ends. While the API server does
// not answer, the wait events of the step are the lookout's; away tells the step so.
func (i *initRun) lookOut(ctx context.Context, r *Reporter, k Cluster) (l *lookout, stop func()) {
	l = &lookout{i: i, r: r}
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			began := i.e.now()
			limited, end := context.WithTimeout(ctx, max(i.e.limits.quiet, i.e.limits.poll))
			_, err := k.Version(limited)
			silent := errors.Is(err, ErrUnreachable) || errors.Is(err, context.DeadlineExceeded)
			end()
			if ctx.Err() != nil {
				return
			}
			l.note(ctx, silent, began)
			if pause(ctx, i.e.limits.poll) != nil {
				return
			}
		}
	})
	return l, func() { cancel(); wg.Wait() }
}

// note takes the outcome of a look that began at a time, and tells what the user does
// not know yet.
func (l *lookout) note(ctx context.Context, silent bool, began time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !silent {
		if l.told {
			l.r.Wait("", "", "")
		}
		l.since, l.told = time.Time{}, false
		return
	}
	if l.since.IsZero() {
		l.since = began
	}
	if l.i.e.now().Sub(l.since) < l.i.e.limits.quiet {
		return
	}
	e := l.i.silence(ctx, l.since)
	if l.last != "" {
		e.Text += "; " + l.last
	}
	if ctx.Err() == nil {
		l.r.send(e)
		l.told = true
	}
}

// remember has what was last known told with every silence from now on. What is known
// while there is one is older than it looks.
func (l *lookout) remember(text string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.since.IsZero() {
		l.last = text
	}
}

// away reports whether the user was told that the API server does not answer.
func (l *lookout) away() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.told
}

// silence is the event that says that the API server does not answer, since when, and
// what to do about it.
func (i *initRun) silence(ctx context.Context, since time.Time) Event {
	e := Event{
		Kind: KindWait, Object: "api-server",
		Text: fmt.Sprintf("the API server at %s has not answered since %s; this goes on by itself when it does",
			i.state.Infrastructure.ClusterEndpoint, since.UTC().Format("15:04:05Z")),
		Remedy: "`constellation sandbox status` shows whether a control plane is up",
	}
	limited, cancel := context.WithTimeout(ctx, i.e.limits.glance)
	defer cancel()
	if i.provider == nil {
		return e
	}
	if _, err := i.provider.Describe(limited); errors.Is(err, cloud.ErrUnavailable) {
		e.Text = "the cloud has ended, and with it the way in: " + e.Text
		e.Remedy = i.restart()
	}
	return e
}

// restart is what to do about a cloud that does not answer.
func (i *initRun) restart() string {
	return "run `" + i.e.command("sandbox up") + "` in another terminal, which starts it again; its machines are kept"
}
