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
		{name: "throttled", status: http.StatusTooManyRequests, body: `{"error":"slower"}`, want: []error{cloud.ErrThrottled}},
		{name: "throttled until a time", status: http.StatusTooManyRequests, header: http.Header{"Retry-After": {"30"}}, body: `{"error":"slower"}`, want: []error{cloud.ErrThrottled}, wait: 30 * time.Second},
		{name: "throttled until a time that is no number", status: http.StatusTooManyRequests, header: http.Header{"Retry-After": {"soon"}}, body: `{}`, want: []error{cloud.ErrThrottled}},
		{name: "no capacity", status: http.StatusServiceUnavailable, body: `{"error":"full","reason":"capacity"}`, want: []error{cloud.ErrUnavailable, cloud.ErrCapacity}},
		{name: "no quota", status: http.StatusServiceUnavailable, body: `{"error":"full","reason":"quota"}`, want: []error{cloud.ErrUnavailable, cloud.ErrQuota}},
		{name: "a failure without a reason", status: http.StatusServiceUnavailable, body: `{"error":"down"}`, want: []error{cloud.ErrUnavailable}},
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
