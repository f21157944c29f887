package engine_test

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"constellation/engine"
	"constellation/engine/backup"
	"constellation/engine/cluster"
	"constellation/engine/plan"
	"constellation/engine/workspace"
)

// TestBackupOfAContextInAWorkspace checks whose name and ID the backup of a context has.
func TestBackupOfAContextInAWorkspace(t *testing.T) {
	const other = "https://other.example:6443"
	for _, tt := range []struct {
		name     string
		lacks    string // a file of the workspace
		server   string // empty: the workspace's
		dir      bool
		exit     int
		workname bool // name and ID are the workspace's
	}{
		{name: "the workspace's cluster", workname: true},
		{name: "another cluster", server: other, exit: plan.ExitUsage},
		{name: "no kubeconfig", lacks: workspace.KubeconfigFile, server: other, exit: plan.ExitUsage},
		{name: "no kubeconfig, and a folder", lacks: workspace.KubeconfigFile, server: other, dir: true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newCheckStage(t)
			w, err := workspace.OpenWorkspace(s.dir)
			if err != nil {
				t.Fatal(err)
			}
			own := []byte("apiVersion: v1\nkind: Config\nclusters: [{name: c, cluster: {server: https://own.example, certificate-authority-data: YQ==}}]\nusers: [{name: u, user: {client-certificate-data: YQ==, client-key-data: YQ==}}]\n")
			if err := os.WriteFile(filepath.Join(s.dir, workspace.KubeconfigFile), own, 0o600); err != nil {
				t.Fatal(err)
			}
			config, err := w.Config()
			if err != nil {
				t.Fatal(err)
			}
			if tt.lacks != "" {
				if err := os.Remove(filepath.Join(s.dir, tt.lacks)); err != nil {
					t.Fatal(err)
				}
			}
			e := engine.New(w, engine.Deps{
				Backups: func(context.Context, []byte) (engine.BackupCluster, error) { return &backupTwin{}, nil },
				Now:     func() time.Time { return checkTime },
			})
			r := engine.BackupRequest{Etcd: engine.EtcdSkip, Cluster: &cluster.Selected{
				Context: "prod", Server: "https://own.example", Kubeconfig: own,
				Access: cluster.Access{Kubeconfig: "some/config", As: "ops", AsGroups: []string{"a b"}, RequestTimeout: 10 * time.Second},
			}}
			if tt.server != "" {
				r.Cluster.Server = tt.server
			}
			if tt.dir {
				r.Dir = t.TempDir()
			}
			p, err := e.PlanBackup(t.Context(), r)
			if plan.ExitCode(err) != tt.exit || err != nil && !strings.Contains(plan.Remedy(err), "--dir") {
				t.Fatalf("exit %d: %v, want %d", plan.ExitCode(err), err, tt.exit)
			}
			if err != nil {
				return
			}
			path, err := filepath.Abs("some/config")
			if err != nil {
				t.Fatal(err)
			}
			if want := " --kubeconfig " + path + " --context prod --as ops --as-group 'a b' --request-timeout 10s"; !strings.Contains(p.End.Command, want) {
				t.Errorf("the command to repeat is %q, want%s", p.End.Command, want)
			}
			if err := e.Run(t.Context(), p, func(plan.Event) {}); err != nil {
				t.Fatal(err)
			}
			m, _, err := e.ShowBackup(r.Dir, p.ID)
			if err != nil {
				t.Fatal(err)
			}
			name, id := "prod", ""
			if tt.workname {
				name, id = config.Name, clusterID
			}
			if m.Cluster.Name != name || m.Cluster.ID != id {
				t.Errorf("the backup is of %+v, want %q with ID %q", m.Cluster, name, id)
			}
		})
	}
}

// identifiedTwin is a cluster with a UID, which its backups have.
type identifiedTwin struct {
	backupTwin
	uid string
}

func (i *identifiedTwin) ClusterUID(context.Context) (string, error) { return i.uid, nil }

func (i *identifiedTwin) Dump(_ context.Context, w *backup.Writer, _ engine.DumpOptions, _ func(engine.BackupProgress)) error {
	w.From(backup.Cluster{UID: i.uid})
	return nil
}

// TestBackupsOfTwoClustersWithOneName backs up two clusters whose contexts have one name into one
// folder.
func TestBackupsOfTwoClustersWithOneName(t *testing.T) {
	w, err := workspace.OpenWorkspace(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	kubeconfig := []byte("apiVersion: v1\nkind: Config\nclusters: [{name: c, cluster: {server: https://a.example, certificate-authority-data: YQ==}}]\nusers: [{name: u, user: {client-certificate-data: YQ==, client-key-data: YQ==}}]\n")
	for _, tt := range []struct {
		uid   string
		other bool // into another folder
		exit  int
	}{{uid: "one"}, {uid: "one"}, {uid: "two", exit: plan.ExitUsage}, {uid: "two", other: true}} {
		e := engine.New(w, engine.Deps{Backups: func(context.Context, []byte) (engine.BackupCluster, error) { return &identifiedTwin{uid: tt.uid}, nil }})
		r := engine.BackupRequest{Etcd: engine.EtcdSkip, Cluster: &cluster.Selected{Context: "admin@kubernetes", Server: "https://a.example", Kubeconfig: kubeconfig}}
		if tt.other {
			r.Dir = t.TempDir()
		}
		p, err := e.PlanBackup(t.Context(), r)
		if err != nil {
			t.Fatal(err)
		}
		err = e.Run(t.Context(), p, func(plan.Event) {})
		if plan.ExitCode(err) != tt.exit || err != nil && !strings.Contains(plan.Remedy(err), "--dir") {
			t.Errorf("cluster %s, another folder %t: exit %d, want %d: %v", tt.uid, tt.other, plan.ExitCode(err), tt.exit, err)
		}
	}
}
