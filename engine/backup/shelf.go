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

// Entry is a backup of a list.
type Entry struct {
	ID string
	// Created, Objects and Bytes are what the manifest says; without one Created is that of
	// the ID, or zero.
	Created time.Time
	Objects int64
	Bytes   int64
	Whole   bool
	// Why says why it is not whole; empty if it is.
	Why string
	// Etcd is whether it has a snapshot of etcd.
	Etcd bool
	// Cluster is where it comes from; zero if that cannot be told.
	Cluster Cluster
}

// List returns the backups in dir, the newest first; none if dir is not there. Whole is
// judged by names and sizes: that no byte changed, only [ListVerified] knows.
func List(dir string) ([]Entry, error) {
	return list(context.Background(), dir, func(ctx context.Context, b *Backup) error { return b.Look(ctx) })
}

// ListVerified is List with [Backup.Verify] of each. progress, which may be nil, is told
// which backup is read and how much of it.
func ListVerified(ctx context.Context, dir string, progress func(id string, done, total int64)) ([]Entry, error) {
	return list(ctx, dir, func(ctx context.Context, b *Backup) error {
		return b.Verify(ctx, func(done, total int64) {
			if progress != nil {
				progress(b.id, done, total)
			}
		})
	})
}

func list(ctx context.Context, dir string, judge func(context.Context, *Backup) error) ([]Entry, error) {
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
		b, err := Open(dir, id)
		if err == nil {
			m := b.Manifest()
			e.Created, e.Objects, e.Bytes, e.Etcd, e.Cluster = m.Created, m.Objects, m.Bytes, m.Etcd != nil, m.Cluster
			err = judge(ctx, b)
			b.Close()
		}
		if ctx.Err() != nil {
			return nil, fmt.Errorf("list backups in %s: %w", dir, context.Cause(ctx))
		}
		e.Whole = err == nil
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

// why is err without the name of the backup where it has one.
func why(err error) string {
	var n *NotWhole
	if errors.As(err, &n) {
		bare := *n
		bare.ID = ""
		return bare.Error()[len("backup : "):]
	}
	return err.Error()
}

// Prune removes backups from dir but for the newest keep whole ones, which is at least
// one, and returns the IDs of those that it removed, the oldest first. What is not whole
// goes if a whole one is newer: else it may still be in the making. Of a run that keeps
// something else in its directory, only the backup is removed. After an error, removed is
// what was removed until then.
func Prune(dir string, keep int) (removed []string, err error) { return prune(dir, keep, nil) }

func prune(dir string, keep int, before func(op, name string, n int) error) (removed []string, err error) {
	all, err := ListVerified(context.Background(), dir, nil)
	if err != nil {
		return nil, err
	}
	keep = max(keep, 1)
	var gone []string
	whole := 0
	for _, e := range all {
		switch {
		case e.Whole && whole < keep:
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

// removeBackup removes the manifest for good before anything else, so that what is left
// after an interruption is not taken for a backup.
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
