// Package replica has what all replicas of a controller share, whether they lead or not: the options
// of their manager, their health checks, and their work without leadership.
package replica

import (
	"context"
	"errors"
	"net/http"
	"sync/atomic"

	"sigs.k8s.io/controller-runtime/pkg/healthz"
	"sigs.k8s.io/controller-runtime/pkg/manager"
)

// AddHealthChecks adds the health checks. A replica is ready when its caches are synced, leader or
// not.
func AddHealthChecks(mgr manager.Manager) error {
	var synced atomic.Bool
	return errors.Join(
		mgr.AddHealthzCheck("ping", healthz.Ping),
		mgr.AddReadyzCheck("caches", func(*http.Request) error {
			if !synced.Load() {
				return errors.New("caches are not synced yet")
			}
			return nil
		}),
		mgr.Add(Everywhere(func(ctx context.Context) error {
			if mgr.GetCache().WaitForCacheSync(ctx) {
				synced.Store(true)
			}
			<-ctx.Done()
			return nil
		})),
	)
}

// Everywhere is a Runnable that needs no leadership.
type Everywhere func(context.Context) error

// Start implements manager.Runnable.
func (f Everywhere) Start(ctx context.Context) error { return f(ctx) }

// NeedLeaderElection implements manager.LeaderElectionRunnable.
func (Everywhere) NeedLeaderElection() bool { return false }
