package engine_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"
	"time"

	"constellation/engine"
	"constellation/engine/backup"
)

// backupTwin is a cluster that has nothing but etcd, whose snapshots fail with one error
// after the other before one succeeds.
type backupTwin struct {
	engine.BackupCluster
	errs  []error
	taken int
}

func (*backupTwin) Dump(context.Context, *backup.Writer, engine.DumpOptions, func(engine.BackupProgress)) error {
	return nil
}

func (b *backupTwin) EtcdSnapshot(_ context.Context, w io.Writer) (backup.Snapshot, error) {
	b.taken++
	if b.taken <= len(b.errs) {
		_, _ = w.Write([]byte("the beginning of one")) // of which nothing may be left
		return backup.Snapshot{}, b.errs[b.taken-1]
	}
	page := bytes.Repeat([]byte("etcd"), 128)
	sum := sha256.Sum256(page)
	_, err := w.Write(append(page, sum[:]...))
	return backup.Snapshot{Member: "control-plane-0", Revision: 7, Version: "3.6.6"}, err
}

func TestBackupsHaveASnapshotOfEtcdWhereOneCanBeHad(t *testing.T) {
	broke := &engine.Error{Op: "take a snapshot of etcd", Err: fmt.Errorf("%w: it broke off", engine.ErrUnreachable)}
	absent := &engine.Error{Op: "take a snapshot of etcd", Err: fmt.Errorf("%w: the operator has no pod", engine.ErrAbsent)}
	denied := &engine.Error{Op: "take a snapshot of etcd", Err: fmt.Errorf("%w: ask somebody", engine.ErrForbidden)}
	for _, tt := range []struct {
		name, etcd string
		errs       []error
		taken      int
		has        bool   // a snapshot
		says       string // the log, or the hole
		exit       int
	}{
		{"it is taken by default", engine.EtcdAuto, nil, 1, true, "", engine.ExitDone},
		{"it is left out on request", engine.EtcdLeave, nil, 0, false, "", engine.ExitDone},
		{"by default nobody need be there", engine.EtcdAuto, []error{absent}, 1, false, "without a snapshot of etcd: take a snapshot of etcd: not found: the operator has no pod", engine.ExitDone},
		{"by default the user need not have the right", engine.EtcdAuto, []error{denied}, 1, false, "too few rights: ask somebody", engine.ExitDone},
		{"what was asked for and cannot be had is missing", engine.EtcdTake, []error{absent}, 1, false, "missing: etcd: take a snapshot of etcd", engine.ExitFailed},
		{"so is what was not allowed", engine.EtcdTake, []error{denied}, 1, false, "missing: etcd", engine.ExitFailed},
		{"one that breaks off is taken once more", engine.EtcdTake, []error{broke}, 2, true, "once more: ", engine.ExitDone},
		{"and not for ever", engine.EtcdAuto, []error{broke, broke}, 2, false, "missing: etcd: take a snapshot of etcd", engine.ExitFailed},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newCheckStage(t)
			w, err := engine.OpenWorkspace(s.dir)
			if err != nil {
				t.Fatal(err)
			}
			cluster := &backupTwin{errs: tt.errs}
			e := engine.New(w, engine.Deps{
				Backups: func(context.Context, []byte) (engine.BackupCluster, error) { return cluster, nil },
				Now:     func() time.Time { return checkTime },
			})
			p, err := e.PlanBackup(t.Context(), engine.BackupRequest{Etcd: tt.etcd})
			if err != nil {
				t.Fatal(err)
			}
			var said []string
			err = e.Run(t.Context(), p, func(ev engine.Event) { said = append(said, ev.Text) })
			if engine.ExitCode(err) != tt.exit || cluster.taken != tt.taken {
				t.Errorf("exit %d (%v) after %d snapshots, want %d after %d", engine.ExitCode(err), err, cluster.taken, tt.exit, tt.taken)
			}
			if !slices.ContainsFunc(said, func(l string) bool { return strings.Contains(l, tt.says) }) {
				t.Errorf("said %q, want %q", said, tt.says)
			}
			m, _, err := e.ShowBackup("", p.ID)
			if err != nil {
				t.Fatal(err)
			}
			if m.Cluster.ID != clusterID || (m.Etcd != nil) != tt.has || tt.has && (m.Etcd.Revision != 7 || m.Etcd.Member != "control-plane-0") {
				t.Errorf("the manifest says %+v, etcd %+v", m.Cluster, m.Etcd)
			}
			if whole := e.VerifyBackup(t.Context(), "", p.ID, nil) == nil; whole != (tt.exit == engine.ExitDone) {
				t.Errorf("whole: %t", whole)
			}
		})
	}
}
