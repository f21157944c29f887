package kube

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"constellation/engine/cluster"
)

const (
	// consoleLease is the name of the Lease of the console that works on the cluster.
	consoleLease = "constellation-console"
	// annotationHolder has the holder as JSON; the Lease's own field has no room for it.
	annotationHolder = "constellation.edgeless.systems/holder"
)

// Duration of a lease, its renewal interval, and the poll interval while another console holds
// it. Only tests change them.
var (
	leaseDuration = 15 * time.Second
	leaseRenewal  = 4 * time.Second
	leaseLook     = time.Second
)

// Hold implements [engine.Cluster].
//
// A holder is alive if it renews its lease, timed by the local clock: two computers' clocks
// may differ by more than a lease lasts.
func (c *Client) Hold(ctx context.Context, h cluster.Holder, lost func(error)) (release func(), err error) {
	if err := c.takeLease(ctx, h); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	var wg sync.WaitGroup
	wg.Go(func() { c.keepLease(ctx, h, lost) })
	return func() {
		cancel()
		wg.Wait()
		limited, end := context.WithTimeout(context.Background(), 5*time.Second)
		defer end()
		// The next console then need not wait. If this fails, it waits a few seconds.
		if l, by, err := c.readLease(limited); err == nil && by.Run == h.Run {
			o := metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &l.UID, ResourceVersion: &l.ResourceVersion}}
			if err := c.core.CoordinationV1().Leases(Namespace).Delete(limited, consoleLease, o); err != nil {
				c.log.Debug("lease not released", "err", err)
			}
		}
	}, nil
}

// readLease returns the lease and its holder. A holder that cannot be decoded is named by the
// lease's own field.
func (c *Client) readLease(ctx context.Context) (*coordinationv1.Lease, cluster.Holder, error) {
	l, err := c.core.CoordinationV1().Leases(Namespace).Get(ctx, consoleLease, metav1.GetOptions{})
	if err != nil {
		return nil, cluster.Holder{}, err
	}
	var by cluster.Holder
	if json.Unmarshal([]byte(l.Annotations[annotationHolder]), &by) != nil {
		by = cluster.Holder{User: orEmpty(l.Spec.HolderIdentity)}
	}
	return l, by, nil
}

func orEmpty(s *string) string {
	if s == nil {
		return ""
	}
	return *s
}

// takeLease acquires the lease for h, and returns when it has it.
func (c *Client) takeLease(ctx context.Context, h cluster.Holder) error {
	var seen string // the revision that has not changed since
	var since time.Time
	for {
		var l *coordinationv1.Lease
		var by cluster.Holder
		err := retry(ctx, func(ctx context.Context) (err error) {
			l, by, err = c.readLease(ctx)
			if apierrors.IsNotFound(err) {
				l, by, err = nil, cluster.Holder{}, nil
			}
			return err
		})
		if err != nil {
			return fmt.Errorf("read Lease %s: %w", consoleLease, err)
		}
		free := l == nil || orEmpty(l.Spec.HolderIdentity) == "" || by.Same(h)
		switch {
		case free:
		case seen == "":
			seen, since = l.ResourceVersion, time.Now()
		case seen != l.ResourceVersion:
			return &cluster.HeldError{By: by}
		case time.Since(since) > leaseDuration:
			free = true
		}
		if free {
			err := c.writeLease(ctx, l, h)
			if err == nil {
				return nil
			}
			if l == nil && apierrors.IsNotFound(err) {
				err = c.ownNamespace(ctx)
			}
			if err != nil && !apierrors.IsConflict(err) && !apierrors.IsAlreadyExists(err) && !apierrors.IsNotFound(err) {
				return fmt.Errorf("take Lease %s: %w", consoleLease, classify(err))
			}
			seen = "" // another console was faster
		}
		select {
		case <-ctx.Done():
			if errors.Is(ctx.Err(), context.Canceled) || by.User == "" {
				return ctx.Err()
			}
			return &cluster.HeldError{By: by}
		case <-time.After(leaseLook):
		}
	}
}

// writeLease acquires or renews the lease; l is the lease that was read, nil if there was
// none.
func (c *Client) writeLease(ctx context.Context, l *coordinationv1.Lease, h cluster.Holder) error {
	b, err := json.Marshal(h)
	if err != nil {
		return fmt.Errorf("marshal holder: %w", err)
	}
	leases := c.core.CoordinationV1().Leases(Namespace)
	fresh := l == nil
	if fresh {
		l = &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: consoleLease, Namespace: Namespace, Labels: map[string]string{partOfLabel: partOf}}}
	}
	if l.Annotations == nil {
		l.Annotations = map[string]string{}
	}
	l.Annotations[annotationHolder] = string(b)
	now := metav1.NowMicro()
	name, seconds := h.User+"@"+h.Host, int32(leaseDuration/time.Second)
	l.Spec.HolderIdentity, l.Spec.LeaseDurationSeconds, l.Spec.RenewTime, l.Spec.AcquireTime = &name, &seconds, &now, &metav1.MicroTime{Time: h.Since}
	limited, cancel := context.WithTimeout(ctx, requestLimit)
	defer cancel()
	if fresh {
		_, err = leases.Create(limited, l, metav1.CreateOptions{FieldManager: fieldManager})
	} else {
		_, err = leases.Update(limited, l, metav1.UpdateOptions{FieldManager: fieldManager})
	}
	return err
}

// keepLease renews the lease until ctx ends. It retries failed requests, and creates the lease
// again if it was deleted.
func (c *Client) keepLease(ctx context.Context, h cluster.Holder, lost func(error)) {
	t := time.NewTicker(leaseRenewal)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		l, by, err := c.readLease(ctx)
		switch {
		case apierrors.IsNotFound(err):
			l, err = nil, nil
		case err == nil && by.Run != h.Run:
			lost(&cluster.HeldError{By: by})
			return
		}
		if err == nil {
			err = c.writeLease(ctx, l, h)
		}
		if err != nil && ctx.Err() == nil {
			c.log.Debug("lease not renewed", "err", err)
		}
	}
}
