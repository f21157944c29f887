package engine

import (
	"context"
	"io"

	"constellation/engine/backup"
)

// EtcdSnapshots is what takes snapshots of etcd.
type EtcdSnapshots interface {
	// EtcdSnapshot writes a snapshot of one member to w, in bounded memory, and returns what
	// is known of it. It is whole if there is no error; after an error, what was written is
	// worth nothing. The error is an [Error] with a remedy. It wraps ErrAbsent if nobody in
	// the cluster takes snapshots, ErrForbidden if the user may not have one, and
	// ErrUnreachable if trying once more may help.
	EtcdSnapshot(ctx context.Context, w io.Writer) (backup.Snapshot, error)
}
