package engine

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"constellation/engine/cloud"
	"constellation/engine/cluster"
	"constellation/engine/plan"
)

// APIHealth is how the API server of a workspace's cluster answers while a run or a watch looks
// after it. The zero value means that none has.
type APIHealth struct {
	// At is when it last answered; P99 is what 99 of a hundred of the last hundred answers took
	// at most, the way to it included.
	At  time.Time
	P99 time.Duration
}

// pulse takes notes for an APIHealth.
type pulse struct {
	mu   sync.Mutex
	at   time.Time
	took []time.Duration // a ring
	next int
}

func (p *pulse) note(at time.Time, took time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.at = at
	if len(p.took) < 100 {
		p.took = append(p.took, took)
		return
	}
	p.took[p.next%len(p.took)] = took
	p.next++
}

// APIHealth returns how the API server answers.
func (e *Engine) APIHealth() APIHealth {
	e.pulse.mu.Lock()
	defer e.pulse.mu.Unlock()
	if len(e.pulse.took) == 0 {
		return APIHealth{}
	}
	sorted := slices.Sorted(slices.Values(e.pulse.took))
	return APIHealth{e.pulse.at, sorted[(len(sorted)-1)*99/100]}
}

// lookout is the API health monitor of a step that works in the cluster: the step's calls
// block silently until the API server answers.
type lookout struct {
	i *clusterRun
	r *plan.Reporter

	doubt chan struct{} // holds that there is a reason to look now

	mu    sync.Mutex
	since time.Time // of the first look that had no answer; zero while it answers
	told  bool
	last  string // text about the last known state
}

// lookOut polls the API server until stop is called or ctx ends: at a long interval while it
// answers, otherwise at each poll interval. While it does not answer, the monitor sends the
// wait events of the step; away reports this to the step.
func (i *clusterRun) lookOut(ctx context.Context, r *plan.Reporter, k Cluster, every time.Duration) (l *lookout, stop func()) {
	l = &lookout{i: i, r: r, doubt: make(chan struct{}, 1)}
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			began := i.e.now()
			limited, end := context.WithTimeout(ctx, max(i.e.limits.quiet, i.e.limits.poll))
			_, err := k.Version(limited)
			if err == nil {
				i.e.pulse.note(i.e.now(), i.e.now().Sub(began))
			}
			silent := errors.Is(err, cluster.ErrUnreachable) || errors.Is(err, context.DeadlineExceeded)
			end()
			if ctx.Err() != nil {
				return
			}
			l.note(ctx, silent, began)
			rest := every
			if silent {
				rest = i.e.limits.poll
			}
			select {
			case <-ctx.Done():
				return
			case <-l.doubt:
			case <-i.rest(rest):
			}
		}
	})
	return l, func() { cancel(); wg.Wait() }
}

// rest is time.After, or what its caller has this run wait with.
func (i *clusterRun) rest(d time.Duration) <-chan time.Time {
	if i.after != nil {
		return i.after(d)
	}
	return time.After(d)
}

// look has the API server looked at now, if that is not done already.
func (l *lookout) look() {
	select {
	case l.doubt <- struct{}{}:
	default:
	}
}

// note processes the result of a poll that began at a time, and reports the news.
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
		l.r.Send(e)
		l.told = true
	}
}

// remember sets the last known state, which is reported with every later outage, since the
// displayed state is stale then.
func (l *lookout) remember(text string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.since.IsZero() {
		l.last = text
	}
}

// away reports whether the user was informed that the API server does not answer.
func (l *lookout) away() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.told
}

// silence is the event that says that the API server does not answer, since when, and
// what to do about it.
func (i *clusterRun) silence(ctx context.Context, since time.Time) plan.Event {
	e := plan.Event{
		Kind: plan.KindWait, Object: "api-server",
		Text: fmt.Sprintf("the API server at %s has not answered since %s; this goes on by itself when it does",
			i.state.Infrastructure.ClusterEndpoint, since.UTC().Format("15:04:05Z")),
		Remedy: i.config.Advice().Look + " shows whether a control plane is up",
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
func (i *clusterRun) restart() string {
	a := i.config.Advice()
	if a.Up == "" {
		return a.Unreachable
	}
	return "run `" + i.e.command(a.Up) + "` in another terminal, which starts it again; its machines are kept"
}
