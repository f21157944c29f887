package operator

import (
	"errors"
	"fmt"
	"slices"
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

func TestRequestsAboutDifferentMachinesRunBesideEachOther(t *testing.T) {
	now := time.Now()
	e := newRetries(func() time.Time { return now })
	idle := func(what string, want ...string) {
		t.Helper()
		if is := e.idle([]string{"a", "b"}, time.Second); !slices.Equal(is, want) {
			t.Errorf("%s: %q may be requested, want %q", what, is, want)
		}
	}
	send := func(want string, machine string) {
		t.Helper()
		key, ok := e.slot("create")
		if key != want || ok != (want != "") || ok && !e.begin(key) {
			t.Errorf("machine %s: key %q, %t, want %q", machine, key, ok, want)
		}
		if ok {
			e.asks([]string{machine})
		}
	}
	receive := func(key, machine string, err error) {
		e.answered([]string{machine}, err)
		e.end(key, time.Second, err)
	}
	idle("nothing is requested", "a", "b")
	send("create", "a")
	idle("a is requested", "b")
	send("create (2)", "b")
	send("create (3)", "c")
	send("", "d")
	receive("create (2)", "b", nil)
	idle("b was made, and the round may not know it")
	send("", "d") // the second rests
	now = now.Add(time.Second)
	idle("b was made a second ago", "b")
	receive("create", "a", errors.New("quota"))
	idle("a was refused", "a", "b")
	now = now.Add(time.Minute)
	send("create", "a")
	send("", "b") // one at a time while the cloud refuses
}
