package check

import (
	"context"
	"errors"
	"fmt"

	"constellation/engine/cloud"
	"constellation/engine/plan"
)

// CloudError translates a provider's error for the user.
func CloudError(op, name string, err error) error {
	e := &plan.Error{Op: op, Err: err}
	switch {
	case errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded):
		return err
	case errors.Is(err, cloud.ErrUnavailable):
		e.Remedy = fmt.Sprintf("start sandbox %s with `constellation sandbox up`; `constellation sandbox status` shows its state", name)
	case errors.Is(err, cloud.ErrDenied):
		e.Remedy = "run as the user that started the sandbox"
	}
	return e
}
