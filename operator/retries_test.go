package operator

import (
	"fmt"
	"testing"
	"time"

	"constellation/engine/cloud"
)

// A cloud that names the time of the next request is not asked earlier, and cannot stop the
// operator for longer than maxThrottle.
func TestPauseLastsAsLongAsTheCloudThrottles(t *testing.T) {
	for _, tt := range []struct{ until, atLeast, atMost time.Duration }{
		{until: 2 * time.Minute, atLeast: 2*time.Minute - 10*time.Second, atMost: 3 * time.Minute},
		{until: 24 * time.Hour, atLeast: maxThrottle, atMost: maxThrottle + time.Minute},
		{until: -time.Minute, atLeast: 0, atMost: time.Minute},
	} {
		err := fmt.Errorf("list instances: %w", &cloud.ThrottledError{Until: time.Now().Add(tt.until)})
		if d := pauseAfter(0, err); d < tt.atLeast || d > tt.atMost {
			t.Errorf("throttled for %v: the pause is %v, want %v to %v", tt.until, d, tt.atLeast, tt.atMost)
		}
	}
}

// A part of the machines in progress is a batch, unless the rest would wait for a slow request.
func TestBatchOfSlowRequestsWaitsForTheRest(t *testing.T) {
	now := time.Now()
	e := newRetries(func() time.Time { return now })
	run := func(key string, took time.Duration, err error) {
		t.Helper()
		now = now.Add(time.Hour) // no backoff
		if !e.begin(key) {
			t.Fatalf("%s does not begin", key)
		}
		now = now.Add(took)
		e.end(key, time.Millisecond, err)
	}
	run("fast", fleetLeast-1, nil)
	run("slow", fleetLeast, nil)
	run("failed", time.Hour, cloud.ErrUnavailable)
	for key, want := range map[string]bool{"fast": false, "slow": true, "failed": false, "none": false} {
		if is := e.slow(key); is != want {
			t.Errorf("%s is slow: %t, want %t", key, is, want)
		}
	}
	for _, tt := range []struct {
		name        string
		n, progress int
		slow        bool
		since, idle time.Duration
		want        time.Duration
	}{
		{name: "a part is enough", n: 25, progress: 100, want: 0},
		{name: "a part is not enough for a slow request", n: 25, progress: 100, slow: true, want: gatherQuiet},
		{name: "no more came", n: 25, progress: 100, slow: true, since: time.Second, idle: gatherQuiet, want: 0},
		{name: "its patience ends", n: 25, progress: 100, slow: true, since: patienceUp, want: 0},
		{name: "a small batch waits longer", n: 5, progress: 60, want: 2 * gatherQuiet},
	} {
		g := gathering{since: now.Add(-tt.since), grown: now.Add(-tt.idle), n: tt.n}
		if left := g.left(tt.progress, tt.slow, now); left != tt.want {
			t.Errorf("%s: %v left, want %v", tt.name, left, tt.want)
		}
	}
}
