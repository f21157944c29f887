package engine

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"syscall"

	"constellation/engine/backup"
	"constellation/engine/cloud"
	"constellation/engine/cluster"
	"constellation/engine/plan"
)

// Snapshots takes snapshots of etcd.
type Snapshots interface {
	// EtcdSnapshot writes a snapshot of one member, verified by its agent, to w in bounded
	// memory, compares it with the API server, and returns its properties. The snapshot comes
	// through an operator's pod on a machine for which confirm returns nil. A nil confirm means
	// that there is no cloud; then the machine's address must be that of an API server. After
	// an error the written data is unusable. The error is an [Error] with a remedy. It wraps ErrAbsent if nobody in
	// the cluster takes snapshots, ErrForbidden if the user may not have one,
	// ErrUnreachable if trying once more may help, and ErrImpostor if what offers one, or
	// what came, is not what it should be.
	EtcdSnapshot(ctx context.Context, w backup.Sink, confirm ConfirmControlPlane) (backup.Snapshot, error)
}

// ErrImpostor means that something in the cluster is not what it claims to be.
var ErrImpostor = errors.New("not what it claims to be")

// ConfirmControlPlane asks the cloud whether the machine of a Node is a control plane that
// runs. The error wraps ErrImpostor if it is not, ErrUnreachable if the cloud does not
// answer. The arguments are the Node's name and its spec.providerID, which the machine
// itself may have written.
type ConfirmControlPlane func(ctx context.Context, node, providerID string) error

// confirmControlPlane returns how the workspace's cloud is asked; nil, and why, if the
// workspace leads to none.
func (e *Engine) confirmControlPlane(ctx context.Context) (ConfirmControlPlane, error) {
	c, err := e.ws.Config()
	if err != nil {
		return nil, err
	}
	s, err := e.ws.State()
	if err != nil {
		return nil, err
	}
	p, err := e.provider(ctx, c, s)
	if err != nil {
		return nil, err
	}
	return func(ctx context.Context, node, providerID string) error {
		all, err := p.Machines(ctx)
		if err != nil && ctx.Err() == nil {
			return fmt.Errorf("%w: read from the cloud whether %s is a control plane: %w", cluster.ErrUnreachable, node, err)
		}
		if err != nil {
			return ctx.Err()
		}
		return confirmIn(all, node, providerID)
	}, nil
}

// confirmIn looks a Node up among the cloud's machines.
func confirmIn(all []cluster.CloudMachine, node, providerID string) error {
	for i := range all {
		m := &all[i]
		switch {
		case m.ProviderID != providerID:
		case m.Name != node:
			return fmt.Errorf("%w: the machine of Node %s, %s, is called %s in the cloud", ErrImpostor, node, providerID, m.Name)
		case m.Role != cloud.ControlPlane:
			return fmt.Errorf("%w: machine %s is no control plane in the cloud", ErrImpostor, node)
		case m.Stage == plan.NodeGone || m.State != cloud.Ready:
			return fmt.Errorf("%w: machine %s does not run: its state in the cloud is %s", cluster.ErrUnreachable, node, m.State)
		default:
			return nil
		}
	}
	return fmt.Errorf("%w: the cloud has no machine %q, the providerID of Node %s", ErrImpostor, providerID, node)
}

// etcd takes the snapshot. A requested snapshot that cannot be taken is a hole; an optional
// one is left out if this user cannot take one.
func (b *backupRun) etcd(ctx context.Context, r *plan.Reporter) error {
	confirm, err := b.e.confirmControlPlane(ctx)
	if err != nil {
		// Without configuration or state, a backup is still wanted.
		r.Log("backup", "", "warn", "without a cloud the control planes are unconfirmed: a snapshot of etcd is only taken at the address of an API server: "+err.Error())
	}
	err = b.snapshot(ctx, r, confirm)
	if errors.Is(err, cluster.ErrUnreachable) && ctx.Err() == nil {
		r.Log("backup", "", "warn", "once more: "+err.Error())
		err = b.snapshot(ctx, r, confirm)
	}
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return ctx.Err()
	case b.request.Etcd == EtcdAuto && (errors.Is(err, cluster.ErrAbsent) || errors.Is(err, cluster.ErrForbidden)):
		text := "without a snapshot of etcd: " + err.Error()
		b.w.Note(text)
		r.Log("backup", "", "warn", text)
		return nil
	case errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) || errors.Is(err, syscall.EIO):
		return b.fail(err)
	}
	h := backup.Hole{Resource: "etcd", Reason: err.Error()}
	b.w.Hole(h)
	r.Log("backup", "", "error", "missing: "+h.String())
	return nil
}

func (b *backupRun) snapshot(ctx context.Context, r *plan.Reporter, confirm ConfirmControlPlane) error {
	var n int64
	said := b.e.now()
	var known backup.Snapshot
	err := b.w.Snapshot(func(w backup.Sink) (_ backup.Snapshot, err error) {
		known, err = b.cluster.(Snapshots).EtcdSnapshot(ctx, countedSink{w, func(p []byte) (int, error) {
			n += int64(len(p))
			if now := b.e.now(); now.Sub(said) >= progressEvery {
				said = now
				r.Progress(n, 0, "bytes")
			}
			return w.Write(p)
		}}, confirm)
		return known, err
	})
	if err == nil {
		r.Progress(n, n, "bytes")
		for _, text := range known.Unchecked {
			r.Log("backup", "", "warn", "snapshot of etcd not compared: "+text)
		}
		if len(known.Witnesses) > 0 {
			r.Log("backup", "", "info", "etcd has the same on "+strings.Join(known.Witnesses, ", "))
		}
		if text := b.otherEtcd(known); text != "" {
			b.w.Note(text)
			r.Log("backup", "", "warn", text)
		}
	}
	return err
}

// otherEtcd says so if the last backup of this cluster has a snapshot of an etcd with
// another ID.
func (b *backupRun) otherEtcd(s backup.Snapshot) string {
	if s.ClusterID == "" || b.clusterID == "" {
		return ""
	}
	all, err := backup.List(b.dir, b.e.backupKeys())
	if err != nil {
		return "" // completing the backup reports the problem of the directory
	}
	for _, e := range all {
		if !e.Etcd || e.Cluster.ID != b.clusterID {
			continue
		}
		old, err := backup.Open(b.dir, e.ID, b.e.backupKeys())
		if err != nil {
			continue
		}
		had := old.Manifest().Etcd
		old.Close()
		if had == nil || had.ClusterID == "" {
			continue
		}
		if had.ClusterID == s.ClusterID {
			return ""
		}
		return fmt.Sprintf("etcd has the cluster ID %s, and had %s in backup %s: only restoring etcd from a snapshot changes it; if etcd was not restored, find out what this etcd is before you restore this backup", s.ClusterID, had.ClusterID, e.ID)
	}
	return ""
}

// countedSink is a file whose writes are seen.
type countedSink struct {
	backup.Sink
	write func([]byte) (int, error)
}

// Write implements [io.Writer].
func (c countedSink) Write(b []byte) (int, error) { return c.write(b) }
