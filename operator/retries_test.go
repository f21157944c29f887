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
