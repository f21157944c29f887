package check

import (
	"context"
	"errors"
	"time"

	"constellation/engine/cloud"
	"constellation/engine/cloud/providers"
	"constellation/engine/plan"
)

// CloudError translates a provider's error for the user.
func CloudError(op string, a providers.Advice, err error) error {
	e := &plan.Error{Op: op, Err: err}
	switch {
	case errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded):
		return err
	case errors.Is(err, cloud.ErrUnavailable):
		e.Remedy = a.Unreachable
	case errors.Is(err, cloud.ErrDenied):
		e.Remedy = a.Denied
	case errors.Is(err, cloud.ErrThrottled):
		e.Remedy = "wait a minute, and run the same command again"
		if until := cloud.ThrottledUntil(err); !until.IsZero() {
			e.Remedy = "run the same command again after " + until.UTC().Format(time.RFC3339)
		}
	}
	return e
}
