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

// APIHealth is the response time of the cluster's API server during a run or a watch. The zero
// value means that it has not answered yet.
type APIHealth struct {
	// At is when it last answered. P99 is the 99th percentile of the last hundred response
	// times, network included.
	At  time.Time
	P99 time.Duration
}

// responseTimes records the response times for an APIHealth.
type responseTimes struct {
	mu   sync.Mutex
	at   time.Time
	took []time.Duration // a ring
	next int
}

func (p *responseTimes) add(at time.Time, took time.Duration) {
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

// APIHealth returns the response time of the API server.
func (e *Engine) APIHealth() APIHealth {
	e.responses.mu.Lock()
	defer e.responses.mu.Unlock()
	if len(e.responses.took) == 0 {
		return APIHealth{}
	}
	sorted := slices.Sorted(slices.Values(e.responses.took))
	return APIHealth{e.responses.at, sorted[(len(sorted)-1)*99/100]}
}

// monitor is the API health monitor of a step that works in the cluster: the step's calls
// block silently until the API server answers.
type monitor struct {
	i *clusterRun
	r *plan.Reporter

	pollNow chan struct{} // capacity 1: a pending request to poll before the interval ends

	mu       sync.Mutex
	since    time.Time // of the first poll without an answer; zero while it answers
	reported bool      // that it does not answer
	last     string    // text about the last known state
}

// monitorAPI polls the API server until stop is called or ctx ends: at a long interval while it
// answers, otherwise at each poll interval. While it does not answer, the monitor sends the
// wait events of the step; away reports this to the step.
func (i *clusterRun) monitorAPI(ctx context.Context, r *plan.Reporter, k Cluster, every time.Duration) (l *monitor, stop func()) {
	l = &monitor{i: i, r: r, pollNow: make(chan struct{}, 1)}
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			began := i.e.now()
			limited, end := context.WithTimeout(ctx, max(i.e.limits.quiet, i.e.limits.poll))
			_, err := k.Version(limited)
			if err == nil {
				i.e.responses.add(i.e.now(), i.e.now().Sub(began))
			}
			silent := errors.Is(err, cluster.ErrUnreachable) || errors.Is(err, context.DeadlineExceeded)
			end()
			if ctx.Err() != nil {
				return
			}
			l.note(ctx, silent, began)
			pause := every
			if silent {
				pause = i.e.limits.poll
			}
			select {
			case <-ctx.Done():
				return
			case <-l.pollNow:
			case <-i.timer(pause):
			}
		}
	})
	return l, func() { cancel(); wg.Wait() }
}

// timer is time.After, or the replacement that a test has set.
func (i *clusterRun) timer(d time.Duration) <-chan time.Time {
	if i.after != nil {
		return i.after(d)
	}
	return time.After(d)
}

// poll polls the API server now, unless such a poll is pending.
func (l *monitor) poll() {
	select {
	case l.pollNow <- struct{}{}:
	default:
	}
}

// note processes the result of a poll that began at the given time, and reports changes.
func (l *monitor) note(ctx context.Context, silent bool, began time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !silent {
		if l.reported {
			l.r.Wait("", "", "")
		}
		l.since, l.reported = time.Time{}, false
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
		l.reported = true
	}
}

// remember sets the last known state, which is reported with every later outage, since the
// displayed state is stale then.
func (l *monitor) remember(text string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.since.IsZero() {
		l.last = text
	}
}

// away reports whether the user was informed that the API server does not answer.
func (l *monitor) away() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.reported
}

// silence returns the event that the API server does not answer, with since when and a remedy.
func (i *clusterRun) silence(ctx context.Context, since time.Time) plan.Event {
	e := plan.Event{
		Kind: plan.KindWait, Object: "api-server",
		Text: fmt.Sprintf("the API server at %s has not answered since %s; the run continues when it does",
			i.state.Infrastructure.ClusterEndpoint, since.UTC().Format("15:04:05Z")),
		Remedy: i.config.Advice().Look + " shows whether a control plane is up",
	}
	limited, cancel := context.WithTimeout(ctx, i.e.limits.glance)
	defer cancel()
	if i.provider == nil {
		return e
	}
	if _, err := i.provider.Describe(limited); errors.Is(err, cloud.ErrUnavailable) {
		e.Text = "the cloud has stopped, so the cluster is unreachable: " + e.Text
		e.Remedy = i.restart()
	}
	return e
}

// restart is the remedy for a cloud that does not answer.
func (i *clusterRun) restart() string {
	a := i.config.Advice()
	if a.Up == "" {
		return a.Unreachable
	}
	return "run `" + i.e.command(a.Up) + "` in another terminal: it restarts the cloud and keeps its machines"
}
