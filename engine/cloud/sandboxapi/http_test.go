package sandboxapi

import (
	"errors"
	"net/http"
	"testing"
	"time"

	"constellation/engine/cloud"
)

func TestProblemsAreErrorsOfTheCloud(t *testing.T) {
	for _, tt := range []struct {
		name   string
		status int
		header http.Header
		body   string
		want   []error
		wait   time.Duration // until the next request; zero: none is named
	}{
		{"throttled", http.StatusTooManyRequests, nil, `{"error":"slower"}`, []error{cloud.ErrThrottled}, 0},
		{"throttled until a time", http.StatusTooManyRequests, http.Header{"Retry-After": {"30"}}, `{"error":"slower"}`, []error{cloud.ErrThrottled}, 30 * time.Second},
		{"throttled until a time that is no number", http.StatusTooManyRequests, http.Header{"Retry-After": {"soon"}}, `{}`, []error{cloud.ErrThrottled}, 0},
		{"no capacity", http.StatusServiceUnavailable, nil, `{"error":"full","reason":"capacity"}`, []error{cloud.ErrUnavailable, cloud.ErrCapacity}, 0},
		{"no quota", http.StatusServiceUnavailable, nil, `{"error":"full","reason":"quota"}`, []error{cloud.ErrUnavailable, cloud.ErrQuota}, 0},
		{"a failure without a reason", http.StatusServiceUnavailable, nil, `{"error":"down"}`, []error{cloud.ErrUnavailable}, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			err := problem(tt.status, tt.header, []byte(tt.body))
			for _, want := range tt.want {
				if !errors.Is(err, want) {
					t.Errorf("error %v, want %v", err, want)
				}
			}
			until := cloud.ThrottledUntil(err)
			if until.IsZero() != (tt.wait == 0) || tt.wait > 0 && (time.Until(until) > tt.wait || time.Until(until) < tt.wait-10*time.Second) {
				t.Errorf("the next request is due at %v, want in %v", until, tt.wait)
			}
		})
	}
}
