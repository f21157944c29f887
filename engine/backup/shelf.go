package backup

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"time"
)

// Entry is a backup in a list.
type Entry struct {
	ID string
	// Created, Objects and Bytes are from the manifest; without one Created is from the ID, or
	// zero.
	Created  time.Time
	Objects  int64
	Bytes    int64
	Complete bool
	// Why is why it is not whole; empty if it is.
	Why string
	// Etcd is whether it has a snapshot of etcd.
	Etcd bool
	// Cluster is its origin; zero if unknown.
	Cluster Cluster
	// Encrypted is whether it is encrypted; Bytes are those of its files.
	Encrypted bool
	// Authentication is that of the backup, see [Backup.Authentication]; empty if unknown, or if the backup is damaged.
	Authentication string
}

// List returns the backups in dir, newest first; none if dir does not exist. Whole is judged
// by names and sizes; only [ListVerified] detects changed bytes.
func List(dir string, keys Keys) ([]Entry, error) {
	return list(context.Background(), dir, keys, func(ctx context.Context, b *Backup) error { return b.Look(ctx) })
}

// ListVerified is List with [Backup.Verify] of each. progress, which may be nil, receives the
// backup being read and its progress.
func ListVerified(ctx context.Context, dir string, keys Keys, progress func(id string, done, total int64)) ([]Entry, error) {
	return list(ctx, dir, keys, func(ctx context.Context, b *Backup) error {
		return b.Verify(ctx, func(done, total int64) {
			if progress != nil {
				progress(b.id, done, total)
			}
		})
	})
}

func list(ctx context.Context, dir string, keys Keys, judge func(context.Context, *Backup) error) ([]Entry, error) {
	if _, err := os.Lstat(dir); errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	d, err := openDisk(dir)
	if err != nil {
		return nil, err
	}
	defer d.close()
	runs, err := d.entries(".")
	if err != nil {
		return nil, err
	}
	var out []Entry
	for _, r := range runs {
		id := r.Name()
		if !ValidID(id) {
			continue
		}
		if _, err := d.root.Lstat(id + "/" + Dir); errors.Is(err, fs.ErrNotExist) {
			continue // a run without a backup
		}
		e := Entry{ID: id}
		e.Created, _ = time.Parse("20060102150405", id[len(id)-23:len(id)-9])
		b, err := Open(dir, id, keys)
		if err == nil {
			m := b.Manifest()
			e.Created, e.Objects, e.Bytes, e.Etcd, e.Cluster = m.Created, m.Objects, m.Bytes, m.Etcd != nil, m.Cluster
			e.Authentication, e.Encrypted = b.Authentication(), m.Encrypted != nil
			if x := m.Encrypted; x != nil {
				e.Objects, e.Etcd, e.Bytes = x.Objects, x.Etcd, b.front.Bytes
			}
			err = judge(ctx, b)
			b.Close()
			if n := (*NotWhole)(nil); errors.As(err, &n) && len(n.Damage) > 0 {
				e.Authentication = "" // damage proves nothing
			}
		}
		if ctx.Err() != nil {
			return nil, fmt.Errorf("list backups in %s: %w", dir, context.Cause(ctx))
		}
		e.Complete = err == nil
		if err != nil {
			e.Why = why(err)
		}
		out = append(out, e)
	}
	slices.SortStableFunc(out, func(a, b Entry) int {
		return cmp.Or(b.Created.Compare(a.Created), cmp.Compare(b.ID, a.ID))
	})
	return out, nil
}

// why is err without the name of the backup.
func why(err error) string {
	var n *NotWhole
	if errors.As(err, &n) {
		bare := *n
		bare.ID = ""
		return bare.Error()[len("backup : "):]
	}
	return err.Error()
}

// Prune removes all backups from dir except the newest keep whole ones, at least one. It
// returns the IDs of the removed backups, oldest first. A backup that is not whole is removed
// only if a whole one is newer: otherwise it may be in progress. If the directory of a run has
// other files, only the backup is removed. After an error, removed has the backups removed so
// far.
func Prune(dir string, keep int, keys Keys) (removed []string, err error) {
	return prune(dir, keep, keys, nil)
}

func prune(dir string, keep int, keys Keys, before func(op, name string, n int) error) (removed []string, err error) {
	all, err := ListVerified(context.Background(), dir, keys, nil)
	if err != nil {
		return nil, err
	}
	keep = max(keep, 1)
	var gone []string
	whole := 0
	for _, e := range all {
		switch {
		case e.Complete && whole < keep:
			whole++
		case whole > 0:
			gone = append(gone, e.ID)
		}
	}
	if len(gone) == 0 {
		return nil, nil
	}
	d, err := openDisk(dir)
	if err != nil {
		return nil, err
	}
	d.before = before
	defer d.close()
	slices.Reverse(gone)
	for _, id := range gone {
		if err := d.removeBackup(id); err != nil {
			return removed, fmt.Errorf("remove backup %s: %w", id, err)
		}
		removed = append(removed, id)
	}
	return removed, nil
}

// removeBackup first removes the manifest durably, so that an interrupted removal leaves no
// valid backup.
func (d *disk) removeBackup(id string) error {
	run, err := d.sub(id)
	if err != nil {
		return err
	}
	defer run.close()
	b, err := run.sub(Dir)
	if err != nil {
		return err
	}
	err = b.remove(ManifestFile)
	if err == nil {
		err = b.syncDir(".")
	}
	b.close()
	if err != nil {
		return err
	}
	if err := run.removeTree(Dir); err != nil {
		return err
	}
	rest, err := run.entries(".")
	if err != nil {
		return err
	}
	if len(rest) > 0 {
		return run.syncDir(".")
	}
	if err := d.remove(id); err != nil {
		return err
	}
	return d.syncDir(".")
}
