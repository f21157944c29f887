package api

import (
	"context"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"constellation/engine/cloud"
)

// quotaGroup is a group of methods that have one rate limit.
type quotaGroup string

// Groups of https://cloud.google.com/compute/api-quota. Each has 1,500 requests in a minute.
const (
	// Share is the part of the documented rate limits of a project that a client uses.
	Share = 0.8

	reads      quotaGroup = "read_requests"
	lists      quotaGroup = "list_requests"
	operations quotaGroup = "operation_read_requests"
	writes     quotaGroup = "default"

	perMinute = 1500
	burst     = 100
)

// limits keep requests below the rate limits of the project. It is safe for concurrent use.
type limits struct {
	buckets map[quotaGroup]*rate.Limiter

	mu     sync.Mutex
	closed map[quotaGroup]time.Time // no request before
}

func newLimits() *limits {
	l := &limits{buckets: map[quotaGroup]*rate.Limiter{}, closed: map[quotaGroup]time.Time{}}
	for _, g := range []quotaGroup{reads, lists, operations, writes} {
		l.buckets[g] = rate.NewLimiter(Share*perMinute/60, burst)
	}
	return l
}

// do sends one request when its limit allows it. While Compute Engine refuses requests of the group,
// none is sent.
func (l *limits) do(ctx context.Context, g quotaGroup, op string, send func() error) error {
	l.mu.Lock()
	until := l.closed[g]
	l.mu.Unlock()
	if time.Now().Before(until) {
		return &Error{Op: op, Kind: &cloud.ThrottledError{Until: until}, Code: "rateLimitExceeded", Message: "not sent"}
	}
	if err := l.buckets[g].Wait(ctx); err != nil {
		if ctx.Err() != nil {
			err = ctx.Err()
		}
		return explain(op, err, time.Now())
	}
	err := explain(op, send(), time.Now())
	if until := cloud.ThrottledUntil(err); !until.IsZero() {
		l.mu.Lock()
		l.closed[g] = until
		l.mu.Unlock()
	}
	return err
}

// pages sends requests of a list until an answer has no token of a next page.
func (l *limits) pages(ctx context.Context, op string, send func(token string) (next string, err error)) error {
	for token := ""; ; {
		if err := l.do(ctx, lists, op, func() (err error) {
			token, err = send(token)
			return err
		}); err != nil || token == "" {
			return err
		}
	}
}
