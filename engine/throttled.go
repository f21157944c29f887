package engine

import (
	"context"
	"errors"
	"time"

	"constellation/engine/cloud"
	"constellation/engine/cluster"
	"constellation/engine/component"
	"constellation/engine/version"
	"constellation/engine/workspace"
	"constellation/internal/delay"
)

const (
	// throttledFor bounds the waits of one call of the cloud together. A cloud can name a time
	// that is hours away.
	throttledFor = 30 * time.Second
	// A cloud that names no time is called again with exponential backoff.
	throttledMin = 500 * time.Millisecond
)

// patient is a Provider that repeats calls that its cloud throttles, at the time that the cloud names.
// All calls of the console read only, so a repetition has no effect. The error wraps
// cloud.ErrThrottled if the time is later than throttledFor or than the end of the context.
type patient struct{ cloud Cloud }

// patiently returns a function that opens a provider as open does.
func patiently(open func(context.Context, *workspace.Config, *workspace.State) (Cloud, error)) func(context.Context, *workspace.Config, *workspace.State) (Cloud, error) {
	return func(ctx context.Context, c *workspace.Config, s *workspace.State) (Cloud, error) {
		p, err := open(ctx, c, s)
		if err != nil {
			return nil, err
		}
		return patient{p}, nil
	}
}

func repeated[T any](ctx context.Context, call func(context.Context) (T, error)) (T, error) {
	end := time.Now().Add(throttledFor)
	if d, ok := ctx.Deadline(); ok && d.Before(end) {
		end = d
	}
	for pause := throttledMin; ; pause *= 2 {
		v, err := call(ctx)
		if !errors.Is(err, cloud.ErrThrottled) {
			return v, err
		}
		now := time.Now()
		next := cloud.ThrottledUntil(err)
		if !next.After(now) {
			next = now.Add(pause)
		}
		if next.After(end) || !delay.For(ctx, next.Sub(now)) {
			return v, err
		}
	}
}

// Describe implements Provider.
func (p patient) Describe(ctx context.Context) (cluster.ProviderInfo, error) {
	return repeated(ctx, p.cloud.Describe)
}

// Groups implements Provider.
func (p patient) Groups(ctx context.Context) ([]cloud.Group, error) {
	return repeated(ctx, p.cloud.Groups)
}

// Machines implements Provider.
func (p patient) Machines(ctx context.Context) ([]cluster.CloudMachine, error) {
	return repeated(ctx, p.cloud.Machines)
}

// Images implements Provider.
func (p patient) Images(ctx context.Context) ([]cloud.Image, error) {
	return repeated(ctx, p.cloud.Images)
}

// Components implements Provider.
func (p patient) Components(ctx context.Context, v version.Version) (component.Signed, error) {
	return repeated(ctx, func(ctx context.Context) (component.Signed, error) { return p.cloud.Components(ctx, v) })
}
