package engine_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"constellation/engine"
	"constellation/engine/backup"
	"constellation/engine/cluster"
	"constellation/engine/plan"
	"constellation/engine/workspace"
)

func TestSelectors(t *testing.T) {
	widget := engine.ObjectName{Group: "example.com", Resource: "widgets", Namespace: "shop", Name: "blue"}
	fleet := engine.ObjectName{Group: "example.com", Resource: "fleets", Name: "one"}
	password := engine.ObjectName{Resource: "secrets", Namespace: "shop", Name: "password"}
	for _, tt := range []struct {
		text    string
		want    engine.Selector
		matches []engine.ObjectName
		bad     bool
	}{
		{text: "example.com/widgets", want: engine.Selector{Group: "example.com", Resource: "widgets"}, matches: []engine.ObjectName{widget}},
		{text: "widgets.example.com", want: engine.Selector{Group: "example.com", Resource: "widgets"}, matches: []engine.ObjectName{widget}},
		{text: "example.com/widgets/shop", want: engine.Selector{Group: "example.com", Resource: "widgets", Namespace: "shop"}, matches: []engine.ObjectName{widget}},
		{text: "example.com/widgets/blue", want: engine.Selector{Group: "example.com", Resource: "widgets", Namespace: "blue"}},
		{text: "example.com/widgets/shop/blue", want: engine.Selector{Group: "example.com", Resource: "widgets", Namespace: "shop", Name: "blue"}, matches: []engine.ObjectName{widget}},
		{text: "example.com/fleets/one", want: engine.Selector{Group: "example.com", Resource: "fleets", Namespace: "one"}, matches: []engine.ObjectName{fleet}},
		{text: "core/secrets", want: engine.Selector{Resource: "secrets"}, matches: []engine.ObjectName{password}},
		{text: "core/secrets/shop/password", want: engine.Selector{Resource: "secrets", Namespace: "shop", Name: "password"}, matches: []engine.ObjectName{password}},
		{text: "", bad: true},
		{text: "widgets", bad: true},
		{text: ".", bad: true},
		{text: "widgets.", bad: true},
		{text: "/", bad: true},
		{text: "/widgets", bad: true},
		{text: "example.com/", bad: true},
		{text: "example.com/widgets/", bad: true},
		{text: "example.com/widgets/shop/", bad: true},
		{text: "example.com/widgets/shop/blue/more", bad: true},
	} {
		t.Run(tt.text, func(t *testing.T) {
			got, err := engine.ParseSelector(tt.text)
			if (err != nil) != tt.bad || got != tt.want {
				t.Fatalf("%+v, %v", got, err)
			}
			if tt.bad {
				return
			}
			again, err := engine.ParseSelector(got.String())
			if err != nil || again != got {
				t.Errorf("%s is read as %+v, %v", got, again, err)
			}
			var matches []engine.ObjectName
			for _, o := range []engine.ObjectName{widget, fleet, password} {
				if got.Matches(o) {
					matches = append(matches, o)
				}
			}
			if fmt.Sprint(matches) != fmt.Sprint(tt.matches) {
				t.Errorf("matches %v, want %v", matches, tt.matches)
			}
		})
	}
}

// failingTwin is a cluster that gives a little, and then what end says.
type failingTwin struct {
	engine.BackupCluster
	silent error // that of Version
	asked  int   // calls of Version
	end    func(ctx context.Context, w *backup.Writer) error
}

func (f *failingTwin) Version(context.Context) (string, error) {
	f.asked++
	return "v1.35.4", f.silent
}

func (f *failingTwin) Dump(ctx context.Context, w *backup.Writer, _ engine.DumpOptions, report func(engine.BackupProgress)) error {
	t, err := w.Type(backup.Type{Group: "example.com", Version: "v1", Resource: "widgets", Kind: "Widget", Namespaced: true}, "")
	if err != nil {
		return err
	}
	s := backup.NewScanner(strings.NewReader(`{"metadata":{"resourceVersion":"7"},"items":[{"apiVersion":"example.com/v1","kind":"Widget","metadata":{"name":"w","namespace":"shop","uid":"u"}}]}`))
	for s.Next() {
		if err := t.Add(s.Item()); err != nil {
			return err
		}
	}
	if err := errors.Join(s.Err(), t.Close("7")); err != nil {
		return err
	}
	report(engine.BackupProgress{Objects: 1})
	return f.end(ctx, w)
}

// A backup that does not come to its end leaves nothing, and says what to do.
func TestWhatCannotBeBackedUpLeavesNothing(t *testing.T) {
	for _, tt := range []struct {
		name   string
		dir    func(t *testing.T) string // to put it in; empty: that of the workspace
		silent error                     // of the first request
		end    error
		exit   int
		says   string
		remedy string
	}{
		{name: "the API server does not answer the first request", silent: fmt.Errorf("read version: %w", cluster.ErrUnreachable), end: errors.New("not reached"), exit: plan.ExitFailed, says: "read the cluster: read version", remedy: "bring its API server up"},
		{name: "the first request runs into its limit", silent: fmt.Errorf("read version: %w: %w", cluster.ErrUnreachable, context.DeadlineExceeded), end: errors.New("not reached"), exit: plan.ExitFailed, says: "read the cluster: read version", remedy: "bring its API server up"},
		{name: "there is no room", end: fmt.Errorf("write x: %w", syscall.ENOSPC), exit: plan.ExitFailed, says: "no space left", remedy: "free some space"},
		{name: "a quota is used up", end: fmt.Errorf("write x: %w", syscall.EDQUOT), exit: plan.ExitFailed, says: "quota", remedy: "free some space"},
		{name: "the disk is broken", end: fmt.Errorf("write x: %w", syscall.EIO), exit: plan.ExitFailed, says: "input/output error"},
		{name: "the API server does not answer", end: fmt.Errorf("list widgets: %w", cluster.ErrUnreachable), exit: plan.ExitFailed, says: "read the cluster", remedy: "bring its API server up"},
		{name: "it is not this cluster's kubeconfig", end: fmt.Errorf("list widgets: %w", cluster.ErrDenied), exit: plan.ExitFailed, says: "read the cluster", remedy: workspace.KubeconfigFile},
		{name: "there is no room on another disk", dir: func(t *testing.T) string { return t.TempDir() }, end: fmt.Errorf("write x: %w", syscall.ENOSPC), exit: plan.ExitFailed, says: "no space left", remedy: "backup prune --keep 1 --dir "},
		{name: "the user has enough", end: context.Canceled, exit: plan.ExitStopped, remedy: "to start again; this run has left nothing behind"},
		{name: "others may write the directory", dir: func(t *testing.T) string {
			dir := t.TempDir()
			if err := os.Chmod(dir, 0o770); err != nil {
				t.Fatal(err)
			}
			return dir
		}, exit: plan.ExitUsage, says: "others may write it", remedy: "chmod 0700"},
		{name: "the directory is a link", dir: func(t *testing.T) string {
			dir := filepath.Join(t.TempDir(), "link")
			if err := os.Symlink(t.TempDir(), dir); err != nil {
				t.Fatal(err)
			}
			return dir
		}, exit: plan.ExitUsage, says: "it is a symbolic link", remedy: "restrict the directory to your user"},
		{name: "the parent directory does not exist", dir: func(t *testing.T) string { return filepath.Join(t.TempDir(), "a", "b") }, exit: plan.ExitUsage, says: "no such file or directory", remedy: "make the directory"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newCheckStage(t)
			w, err := workspace.OpenWorkspace(s.dir)
			if err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			cluster := &failingTwin{silent: tt.silent, end: func(ctx context.Context, _ *backup.Writer) error {
				if errors.Is(tt.end, context.Canceled) {
					cancel()
					return ctx.Err()
				}
				return tt.end
			}}
			e := engine.New(w, engine.Deps{
				Backups: func(context.Context, []byte) (engine.BackupCluster, error) { return cluster, nil },
				Now:     func() time.Time { return checkTime },
			})
			r := engine.BackupRequest{Etcd: engine.EtcdSkip}
			if tt.dir != nil {
				r.Dir = tt.dir(t)
			}
			p, err := e.PlanBackup(ctx, r)
			if err != nil {
				t.Fatal(err)
			}
			err = e.Run(ctx, p, func(plan.Event) {})
			if plan.ExitCode(err) != tt.exit || !strings.Contains(fmt.Sprint(err), tt.says) || !strings.Contains(plan.Remedy(err), tt.remedy) {
				t.Errorf("exit %d: %v\nfix %s", plan.ExitCode(err), err, plan.Remedy(err))
			}
			if cluster.asked > 1 {
				t.Errorf("the API server was queried %d times before the dump, want once", cluster.asked)
			}
			dir, err := e.BackupDir(r.Dir)
			if err != nil {
				t.Fatal(err)
			}
			if left, err := os.Lstat(filepath.Join(dir, p.ID, backup.Dir)); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("left: %v, %v", left, err)
			}
			list, err := e.ListBackups(t.Context(), "", true, nil)
			if err != nil || slices.ContainsFunc(list, func(b engine.BackupEntry) bool { return b.ID == p.ID }) {
				t.Errorf("listed: %v, %v", list, err)
			}
		})
	}
}

// awayTwin gives a whole backup, and then has an API server that is away.
type awayTwin struct {
	failingTwin
	asked func(ctx context.Context) error
}

func (a *awayTwin) ClusterUID(ctx context.Context) (string, error) { return "", a.asked(ctx) }

// Restore waits for the API server however long it is away, as the real one does.
func (a *awayTwin) Restore(ctx context.Context, _ *backup.Backup, _ engine.RestoreOptions, _ func(engine.RestoreReport)) error {
	<-ctx.Done()
	return ctx.Err()
}

func (a *awayTwin) Differences(ctx context.Context, _ *backup.Backup, _ []engine.Selector, _ func(engine.Difference)) (engine.Compared, error) {
	<-ctx.Done()
	return engine.Compared{}, ctx.Err()
}

// A restore does not wait for an API server that has not answered from the beginning.
func TestUnreachableAPIServerFailsARestoreBeforeItsFirstStep(t *testing.T) {
	s := newCheckStage(t)
	w, err := workspace.OpenWorkspace(s.dir)
	if err != nil {
		t.Fatal(err)
	}
	twinned := &awayTwin{failingTwin: failingTwin{end: func(context.Context, *backup.Writer) error { return nil }}}
	e := engine.New(w, engine.Deps{
		Backups: func(context.Context, []byte) (engine.BackupCluster, error) { return twinned, nil },
		Now:     func() time.Time { return checkTime },
	})
	p, err := e.PlanBackup(t.Context(), engine.BackupRequest{Etcd: engine.EtcdSkip})
	if err != nil {
		t.Fatal(err)
	}
	if err := e.Run(t.Context(), p, func(plan.Event) {}); err != nil {
		t.Fatal(err)
	}
	none := func(plan.Event) {}
	for _, verb := range []struct {
		name string
		do   func(ctx context.Context, r engine.RestoreRequest) error
	}{
		{"restore", func(ctx context.Context, r engine.RestoreRequest) error {
			_, err := e.PlanRestore(ctx, r, none)
			return err
		}},
		{"diff", func(ctx context.Context, r engine.RestoreRequest) error {
			_, err := e.Differ(ctx, r, none, func(engine.Difference) {})
			return err
		}},
	} {
		for _, tt := range []struct {
			name string
			last error // what the last try said; nil: it did not come back
		}{
			{"the connection is refused", fmt.Errorf("%w: connection refused", cluster.ErrUnreachable)},
			{"somebody listens and says nothing", nil},
		} {
			t.Run(verb.name+": "+tt.name, func(t *testing.T) {
				twinned.asked = func(ctx context.Context) error {
					<-ctx.Done() // tries until then
					if tt.last != nil {
						return tt.last
					}
					return ctx.Err()
				}
				synctest.Test(t, func(t *testing.T) {
					err := verb.do(t.Context(), engine.RestoreRequest{ID: p.ID})
					if plan.ExitCode(err) != plan.ExitFailed || !errors.Is(err, cluster.ErrUnreachable) || !strings.Contains(plan.Remedy(err), "bring its API server up") {
						t.Errorf("exit %d: %v\nfix %s", plan.ExitCode(err), err, plan.Remedy(err))
					}
				})
			})
		}
	}
}
