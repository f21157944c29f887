package plans

import (
	"context"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/validation"

	"constellation/engine/plain"
)

// Only the drain itself reports its blocker: it writes it to its log, and retries. So the
// controller reads the logs of slow drains. These are its own pods, so it needs no access to
// the logs of other pods.
const (
	// drainsAsked is the interval of reads. A drain that did not exist at the last read is skipped.
	drainsAsked = 5 * time.Second
	// drainLogAge is the maximum age of log lines that count: a drain retries every five seconds.
	drainLogAge = 15 * time.Second
	// drainLog is the maximum number of bytes read from a log.
	drainLog = 64 << 10
	// drainsAtOnce is the number of concurrent reads.
	drainsAtOnce = 8
	// logsDenied is the pause after the API server denied access to logs.
	logsDenied = 10 * time.Minute
)

// blockedPod matches the line of kubectl drain about a pod whose eviction is refused.
var blockedPod = regexp.MustCompile(`^error when evicting pods?[/ ]("(?:[^"\\]|\\.)*") (?:-n|from terminating namespace) ("(?:[^"\\]|\\.)*") \(will retry after [^)]*\): (.*)$`)

// drainAsked is a running drain.
type drainAsked struct{ job, pod string }

// listenToDrains records in the book what blocks drains, until ctx ends.
func (k *controller) listenToDrains(ctx context.Context) {
	t := time.NewTicker(k.drainsAsked)
	defer t.Stop()
	var before []drainAsked
	var denied time.Time
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		now := k.book.draining()
		if time.Since(denied) < logsDenied {
			continue
		}
		var (
			wg    sync.WaitGroup
			slots = make(chan struct{}, drainsAtOnce)
			mu    sync.Mutex
		)
		for _, d := range now {
			if !slices.Contains(before, d) {
				continue
			}
			slots <- struct{}{}
			wg.Go(func() {
				defer func() { <-slots }()
				log, err := k.drainLog(ctx, d.pod)
				switch {
				case apierrors.IsForbidden(err):
					mu.Lock()
					defer mu.Unlock()
					if time.Since(denied) >= logsDenied {
						k.Log.Warn("logs of drains not read, so the status lacks blocked evictions", "err", err)
					}
					denied = time.Now()
				case err != nil: // for example the node is unreachable: the last record still counts
					k.Log.Debug("log of a drain not read", "pod", d.pod, "err", err)
				default:
					k.book.setDrain(d, blockedPods(log))
				}
			})
		}
		wg.Wait()
		before = now
	}
}

// drainLog returns the recent log lines of a drain.
func (k *controller) drainLog(ctx context.Context, pod string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, drainsAsked)
	defer cancel()
	b, err := k.pods.Pods(k.Namespace).GetLogs(pod, &corev1.PodLogOptions{
		Container: "drain", SinceSeconds: new(int64(drainLogAge / time.Second)), TailLines: new(int64(500)), LimitBytes: new(int64(drainLog)),
	}).Do(ctx).Raw()
	return string(b), err
}

// blockedPods returns which pods cannot be evicted, and why; empty: none.
func blockedPods(log string) string {
	why := map[string]string{}
	var pods []string
	for line := range strings.Lines(log) {
		m := blockedPod.FindStringSubmatch(strings.TrimSpace(line))
		if m == nil {
			continue
		}
		name, err := strconv.Unquote(m[1])
		if err != nil {
			continue
		}
		namespace, err := strconv.Unquote(m[2])
		if err != nil || len(validation.IsDNS1123Label(namespace))+len(validation.IsDNS1123Subdomain(name)) > 0 {
			continue
		}
		pod := namespace + "/" + name
		if why[pod] == "" {
			pods = append(pods, pod)
		}
		var f plain.Filter
		why[pod] = strings.Map(func(r rune) rune {
			if !f.Shows(r) {
				return ' '
			}
			return r
		}, m[3])
		// If the budget is named, the rest adds nothing.
		if _, budget, ok := strings.Cut(why[pod], "The disruption budget "); ok {
			why[pod] = "the disruption budget " + budget
		}
	}
	if len(pods) == 0 {
		return ""
	}
	slices.Sort(pods)
	text := fmt.Sprintf("pod %s may not be evicted: %s", pods[0], lastLine(why[pods[0]]))
	switch n := len(pods) - 1; {
	case n == 1:
		text += fmt.Sprintf("; nor may %s", pods[1])
	case n > 1:
		text += fmt.Sprintf("; nor may %s and %d more", pods[1], n-1)
	}
	return text
}

// draining lists the running drains.
func (b *book) draining() (all []drainAsked) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for job, n := range b.news {
		if n.reason == reasonDraining || n.reason == reasonDrainBlocked {
			all = append(all, drainAsked{job, n.pod})
		}
	}
	return all
}

// setDrain stores what blocks a drain; empty: nothing.
func (b *book) setDrain(d drainAsked, blocked string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	was := b.news[d.job]
	n := was
	if n.reason, n.message = reasonDrainBlocked, blocked; blocked == "" {
		n.reason, n.message = reasonDraining, runs("drain", d.pod)
	}
	if was.pod != d.pod || was.reason != reasonDraining && was.reason != reasonDrainBlocked || was == n {
		return
	}
	b.news[d.job] = n
	if j := b.jobs[d.job]; j != nil {
		b.wake(j.plan, podsGather)
	}
}
