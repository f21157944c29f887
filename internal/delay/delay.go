// Package delay waits between the attempts of a retry.
package delay

import (
	"context"
	"time"
)

// For waits for d. It reports false if ctx ends first.
func For(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
