package engine_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"constellation/engine"
	"constellation/engine/backup"
	"constellation/engine/cloud"
	"constellation/engine/cluster"
	"constellation/engine/plan"
	"constellation/engine/workspace"
)

// backupTwin is a cluster that has nothing but etcd, whose snapshots fail with one error
// after the other before one succeeds.
type backupTwin struct {
	engine.BackupCluster
	errs    []error
	taken   int
	confirm engine.ConfirmControlPlane // what it was given
	etcd    string                     // its cluster ID
}

func (*backupTwin) ClusterUID(context.Context) (string, error) { return "", nil }

func (*backupTwin) Version(context.Context) (string, error) { return "v1.35.4", nil }

func (*backupTwin) Dump(context.Context, *backup.Writer, engine.DumpOptions, func(engine.BackupProgress)) error {
	return nil
}

func (b *backupTwin) EtcdSnapshot(_ context.Context, w backup.Sink, confirm engine.ConfirmControlPlane) (backup.Snapshot, error) {
	b.taken++
	b.confirm = confirm
	if b.taken <= len(b.errs) {
		_, _ = w.Write([]byte("the beginning of one")) // of which nothing may be left
		return backup.Snapshot{}, b.errs[b.taken-1]
	}
	page := bytes.Repeat([]byte("etcd"), 128)
	sum := sha256.Sum256(page)
	_, err := w.Write(append(page, sum[:]...))
	return backup.Snapshot{Member: "control-plane-0", Revision: 7, Version: "3.6.6", ClusterID: b.etcd}, err
}

func TestBackupsHaveASnapshotOfEtcdWhereOneCanBeHad(t *testing.T) {
	broke := &plan.Error{Op: "take a snapshot of etcd", Err: fmt.Errorf("%w: it broke off", cluster.ErrUnreachable)}
	absent := &plan.Error{Op: "take a snapshot of etcd", Err: fmt.Errorf("%w: the operator has no pod", cluster.ErrAbsent)}
	denied := &plan.Error{Op: "take a snapshot of etcd", Err: fmt.Errorf("%w: ask somebody", cluster.ErrForbidden)}
	for _, tt := range []struct {
		name, etcd string
		errs       []error
		taken      int
		has        bool   // a snapshot
		says       string // the log, or the hole
		exit       int
	}{
		{name: "a snapshot is taken by default", etcd: engine.EtcdAuto, taken: 1, has: true, exit: plan.ExitDone},
		{name: "a snapshot is left out on request", etcd: engine.EtcdSkip, exit: plan.ExitDone},
		{name: "by default the backup succeeds if the operator has no pod", etcd: engine.EtcdAuto, errs: []error{absent}, taken: 1, says: "without a snapshot of etcd: take a snapshot of etcd: not found: the operator has no pod", exit: plan.ExitDone},
		{name: "by default the backup succeeds if the user lacks the right", etcd: engine.EtcdAuto, errs: []error{denied}, taken: 1, says: "too few rights: ask somebody", exit: plan.ExitDone},
		{name: "a required snapshot that is unavailable makes the backup incomplete", etcd: engine.EtcdRequired, errs: []error{absent}, taken: 1, says: "missing: etcd: take a snapshot of etcd", exit: plan.ExitFailed},
		{name: "a required snapshot that is denied makes the backup incomplete", etcd: engine.EtcdRequired, errs: []error{denied}, taken: 1, says: "missing: etcd", exit: plan.ExitFailed},
		{name: "a transfer that breaks off is retried", etcd: engine.EtcdRequired, errs: []error{broke}, taken: 2, has: true, says: "once more: ", exit: plan.ExitDone},
		{name: "a transfer that breaks off twice fails", etcd: engine.EtcdAuto, errs: []error{broke, broke}, taken: 2, says: "missing: etcd: take a snapshot of etcd", exit: plan.ExitFailed},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newCheckStage(t)
			w, err := workspace.OpenWorkspace(s.dir)
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
			err = e.Run(t.Context(), p, func(ev plan.Event) { said = append(said, ev.Text) })
			if plan.ExitCode(err) != tt.exit || cluster.taken != tt.taken {
				t.Errorf("exit %d (%v) after %d snapshots, want %d after %d", plan.ExitCode(err), err, cluster.taken, tt.exit, tt.taken)
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
			if _, err := e.VerifyBackup(t.Context(), "", p.ID, nil); (err == nil) != (tt.exit == plan.ExitDone) {
				t.Errorf("verify: %v", err)
			}
		})
	}
}

func TestChangedEtcdClusterIDIsReported(t *testing.T) {
	s := newCheckStage(t)
	w, err := workspace.OpenWorkspace(s.dir)
	if err != nil {
		t.Fatal(err)
	}
	cluster, now := &backupTwin{}, checkTime
	e := engine.New(w, engine.Deps{
		Backups: func(context.Context, []byte) (engine.BackupCluster, error) { return cluster, nil },
		Now:     func() time.Time { return now },
	})
	for _, tt := range []struct {
		etcd string
		told bool
	}{
		{"cdf818194e3a8c32", false}, // there is no earlier one
		{"cdf818194e3a8c32", false},
		{"", false}, // an older operator does not say
		{"1", true},
		{"1", false}, // it was reported once
		{"cdf818194e3a8c32", true},
	} {
		now = now.Add(time.Hour)
		cluster.etcd = tt.etcd
		p, err := e.PlanBackup(t.Context(), engine.BackupRequest{})
		if err != nil {
			t.Fatal(err)
		}
		told := false
		if err := e.Run(t.Context(), p, func(ev plan.Event) {
			told = told || strings.HasPrefix(ev.Text, "etcd has the cluster ID "+tt.etcd+", and had ")
		}); err != nil {
			t.Fatal(err)
		}
		m, _, err := e.ShowBackup("", p.ID)
		if err != nil {
			t.Fatal(err)
		}
		if told != tt.told || (len(m.Notes) > 0) != tt.told || m.Etcd.ClusterID != tt.etcd {
			t.Errorf("etcd %q: told %t, notes %q, manifest %+v", tt.etcd, told, m.Notes, m.Etcd)
		}
	}
}

// machines is a cloud that has machines.
type machines struct {
	engine.Cloud
	list []cluster.CloudMachine
	err  error
}

func (m *machines) Machines(context.Context) ([]cluster.CloudMachine, error) { return m.list, m.err }

func TestTheCloudConfirmsWhereSnapshotsComeFrom(t *testing.T) {
	s := newCheckStage(t)
	w, err := workspace.OpenWorkspace(s.dir)
	if err != nil {
		t.Fatal(err)
	}
	machine := func(name, id string, role cloud.Role, state cloud.State) cluster.CloudMachine {
		return cluster.CloudMachine{Instance: cloud.Instance{Name: name, ProviderID: id, Role: role, State: state}}
	}
	has := &machines{list: []cluster.CloudMachine{
		machine("control-plane-0", "sandbox://demo/control-plane-0", cloud.ControlPlane, cloud.Ready),
		machine("control-plane-1", "sandbox://demo/control-plane-1", cloud.ControlPlane, cloud.Stopped),
		machine("worker-1", "sandbox://demo/worker-1", cloud.Worker, cloud.Ready),
	}}
	twinned := &backupTwin{}
	var asked error
	e := engine.New(w, engine.Deps{
		Backups: func(context.Context, []byte) (engine.BackupCluster, error) { return twinned, nil },
		Provider: func(context.Context, *workspace.Config, *workspace.State) (engine.Cloud, error) {
			return has, asked
		},
		Now: func() time.Time { return checkTime },
	})
	run := func() (said []string) {
		t.Helper()
		p, err := e.PlanBackup(t.Context(), engine.BackupRequest{Dir: t.TempDir()})
		if err != nil {
			t.Fatal(err)
		}
		if err := e.Run(t.Context(), p, func(ev plan.Event) { said = append(said, ev.Text) }); err != nil {
			t.Fatal(err)
		}
		return said
	}
	run()
	for _, tt := range []struct {
		name, node, id string
		err            error
	}{
		{name: "a control plane", node: "control-plane-0", id: "sandbox://demo/control-plane-0"},
		{name: "a worker with its own ID", node: "worker-1", id: "sandbox://demo/worker-1", err: engine.ErrImpostor},
		{name: "a worker with the ID of a control plane", node: "worker-1", id: "sandbox://demo/control-plane-0", err: engine.ErrImpostor},
		{name: "a Node with the name of a control plane and another ID", node: "control-plane-0", id: "sandbox://demo/worker-1", err: engine.ErrImpostor},
		{name: "a machine that the cloud does not know", node: "control-plane-9", id: "sandbox://demo/control-plane-9", err: engine.ErrImpostor},
		{name: "a Node that names no machine", node: "control-plane-0", err: engine.ErrImpostor},
		{name: "a control plane that is switched off", node: "control-plane-1", id: "sandbox://demo/control-plane-1", err: cluster.ErrUnreachable},
	} {
		if err := twinned.confirm(t.Context(), tt.node, tt.id); !errors.Is(err, tt.err) || (err == nil) != (tt.err == nil) {
			t.Errorf("%s: %v, want %v", tt.name, err, tt.err)
		}
	}
	has.err = cloud.ErrUnavailable
	if err := twinned.confirm(t.Context(), "control-plane-0", "sandbox://demo/control-plane-0"); !errors.Is(err, cluster.ErrUnreachable) {
		t.Errorf("a cloud that does not answer: %v", err)
	}

	asked = errors.New("provider \"x\" is not in this release")
	said := run()
	if twinned.confirm != nil || !slices.ContainsFunc(said, func(l string) bool { return strings.Contains(l, "only taken at the address of an API server") }) {
		t.Errorf("without a cloud: asked %t, said %q", twinned.confirm != nil, said)
	}
}
