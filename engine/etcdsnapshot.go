package engine

import (
	"context"
	"errors"
	"io"
	"syscall"

	"constellation/engine/backup"
)

// Snapshots takes snapshots of etcd.
type Snapshots interface {
	// EtcdSnapshot writes a snapshot of one member, which its agent has verified, to w, in
	// bounded memory, and returns what is known of it. After an error, what was written is
	// worth nothing. The error is an [Error] with a remedy. It wraps ErrAbsent if nobody in
	// the cluster takes snapshots, ErrForbidden if the user may not have one, and
	// ErrUnreachable if trying once more may help.
	EtcdSnapshot(ctx context.Context, w io.Writer) (backup.Snapshot, error)
}

// etcd takes the snapshot. One that was asked for and cannot be had is a hole; where it
// was not, it is left out if nobody can take one for this user.
func (b *backupRun) etcd(ctx context.Context, r *Reporter) error {
	err := b.snapshot(ctx, r)
	if errors.Is(err, ErrUnreachable) && ctx.Err() == nil {
		r.Log("backup", "", "warn", "once more: "+err.Error())
		err = b.snapshot(ctx, r)
	}
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return ctx.Err()
	case b.request.Etcd == EtcdAuto && (errors.Is(err, ErrAbsent) || errors.Is(err, ErrForbidden)):
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

func (b *backupRun) snapshot(ctx context.Context, r *Reporter) error {
	var n int64
	said := b.e.now()
	err := b.w.Snapshot(func(w io.Writer) (backup.Snapshot, error) {
		return b.cluster.(Snapshots).EtcdSnapshot(ctx, counted(func(p []byte) (int, error) {
			n += int64(len(p))
			if now := b.e.now(); now.Sub(said) >= progressEvery {
				said = now
				r.Progress(n, 0, "bytes")
			}
			return w.Write(p)
		}))
	})
	if err == nil {
		r.Progress(n, n, "bytes")
	}
	return err
}
