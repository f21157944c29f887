package tui

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"constellation/engine"
	"constellation/engine/backup"
	"constellation/engine/cluster"
	"constellation/engine/plan"
	"constellation/tui/term"
)

// backupScenes are the screen of backups at moments that matter.
var backupScenes = []scene{
	{"backup-first", func(_ *testing.T, s func(*fakeEngine) *stage) *stage {
		return backupsOf(s, func(e *fakeEngine) { e.backups = nil })
	}},
	{"backup-list", func(_ *testing.T, s func(*fakeEngine) *stage) *stage {
		return backupsOf(s, nil).press("down", "e")
	}},
	{"backup-volumes", func(_ *testing.T, s func(*fakeEngine) *stage) *stage {
		return backupsOf(s, func(e *fakeEngine) {
			for i := range 40 {
				e.local.Volumes = append(e.local.Volumes, cluster.LocalVolume{Namespace: "cache", Claim: fmt.Sprintf("shard-%02d", i), Nodes: []string{fmt.Sprintf("worker-%d", i)}})
			}
		}).press("enter", "down")
	}},
	{"backup-unknown", func(_ *testing.T, s func(*fakeEngine) *stage) *stage {
		return backupsOf(s, func(e *fakeEngine) {
			e.backups, e.backupsErr = nil, &plan.Error{
				Op: "list backups in /home/ops/demo/constellation-upgrade", Err: errors.New("refused: others may write it"), Remedy: "if you trust what is there, make it yours alone (chown, chmod go-w)",
			}
			e.local, e.localErr = cluster.LocalData{}, errors.New("look for volumes on nodes: the API server does not answer")
		})
	}},
	{"backup-running", func(_ *testing.T, s func(*fakeEngine) *stage) *stage { return backupAt(s, 4) }},
	{"backup-etcd", func(_ *testing.T, s func(*fakeEngine) *stage) *stage { return backupAt(s, 7) }},
	{"backup-verifying", func(_ *testing.T, s func(*fakeEngine) *stage) *stage { return backupAt(s, 11) }},
	{"backup-leaving", func(_ *testing.T, s func(*fakeEngine) *stage) *stage { return backupAt(s, 4).press("ctrl+c") }},
	{"backup-done", func(_ *testing.T, s func(*fakeEngine) *stage) *stage { return backupAt(s, 0) }},
	{"backup-stopped", func(_ *testing.T, s func(*fakeEngine) *stage) *stage {
		st := backupAt(s, 4).press("esc")
		st.settle()
		return st
	}},
	{"backup-failed", func(_ *testing.T, s func(*fakeEngine) *stage) *stage {
		st := backupsOf(s, func(e *fakeEngine) {
			e.plan, e.events = backupPlan(), backupEvents()[:4]
			e.runErr = &plan.Error{
				Op: "back up to /home/ops/demo/constellation-upgrade/backup-20261121070501-1a2b3c4d", Err: errors.New("write example.com/widgets.json: no space left on device"),
				Remedy: "free some space (`constellation backup prune --keep 1` removes old backups), or use another disk with --dir; nothing is left of this one",
			}
		}).press("b")
		st.settle()
		return st
	}},
	{"backup-verified", func(_ *testing.T, s func(*fakeEngine) *stage) *stage {
		st := backupsOf(s, nil).press("v")
		st.settle()
		return st
	}},
	{"backup-damaged", func(_ *testing.T, s func(*fakeEngine) *stage) *stage {
		st := backupsOf(s, func(e *fakeEngine) {
			e.verifyErr = errors.New("backup backup-20261120050000-0a1b2c3d: example.com/widgets.json is not what was written: its SHA-256 differs")
		}).press("v")
		st.settle()
		return st
	}},
	{"backup-help", func(_ *testing.T, s func(*fakeEngine) *stage) *stage { return backupsOf(s, nil).press("?") }},
	{"home-backup", func(_ *testing.T, s func(*fakeEngine) *stage) *stage {
		h, st := demoHome(engine.StageCluster), demoStatus()
		h.Next = []engine.Suggestion{{Title: "Make a backup", Command: "constellation -C .demo backup create", Why: "the last one is 26h old"}}
		st.Backup = &plan.LastBackup{ID: "backup-20261120050000-0a1b2c3d", Created: start.Add(-26 * time.Hour), Objects: 12345, Bytes: 18 << 20, Etcd: true}
		st.Health = []plan.Finding{{ID: plan.BackupAge, Severity: plan.Warn, Source: "backup", Title: "the last backup is 26h old", Remedy: "make one: `constellation -C .demo backup create`"}}
		return s(&fakeEngine{home: h, status: st}).begin()
	}},
}

// backupsOf shows the screen of a cluster with backups and local volumes.
func backupsOf(s func(*fakeEngine) *stage, change func(*fakeEngine)) *stage {
	e := &fakeEngine{
		home: demoHome(engine.StageCluster), status: demoStatus(),
		backups: []engine.BackupEntry{
			{ID: "backup-20261120050000-0a1b2c3d", Created: start.Add(-26 * time.Hour), Objects: 12345, Bytes: 18 << 20, Complete: true},
			{ID: "backup-20261119050000-99aa00ff", Created: start.Add(-50 * time.Hour), Why: "manifest.json is not there: it was not made to the end"},
			{ID: "upgrade-20261101120000-00ff00ff", Created: start.Add(-20 * 24 * time.Hour), Objects: 987, Bytes: 3 << 30, Complete: true, Etcd: true},
		},
		local: cluster.LocalData{
			Volumes: []cluster.LocalVolume{
				{Namespace: "db", Claim: "pg-data-0", Volume: "pv-1", Nodes: []string{"worker-0"}, Path: "/mnt/disks/a", Bytes: 200 << 30, Workloads: []string{"statefulset/db/postgres"}},
				{Namespace: "db", Claim: "pg-data-1", Volume: "pv-2", Nodes: []string{"worker-1"}, Path: "/mnt/disks/a", Bytes: 200 << 30, Workloads: []string{"statefulset/db/postgres"}},
				{Namespace: "shop", Claim: "up\x1b[31mloads", Volume: "pv-3", Path: "/srv/uploads"},
			},
			EmptyDirs: 14, HostPaths: 1,
		},
	}
	if change != nil {
		change(e)
	}
	st := s(e).begin()
	st.press("b")
	st.settle()
	return st
}

func backupPlan() *plan.Plan {
	return &plan.Plan{
		ID: "backup-20261121070501-1a2b3c4d", Verb: plan.VerbBackup, Cluster: "demo", Created: start,
		Steps: []plan.Step{
			{ID: engine.StepBackupResources, Title: "Back up custom resources"},
			{ID: engine.StepBackupEtcd, Title: "Take a snapshot of etcd"},
			{ID: engine.StepBackupFinish, Title: "Complete and verify the backup"},
		},
	}
}

// backupEvents are those of a run that makes a backup.
func backupEvents() []plan.Event {
	at := func(ms int, e plan.Event) plan.Event {
		e.Time, e.Run = start.Add(time.Duration(ms)*time.Millisecond), "backup-20261121070501-1a2b3c4d"
		return e
	}
	step := func(ms int, id, state, title string, took int64) plan.Event {
		return at(ms, plan.Event{Kind: plan.KindStep, Step: id, State: state, Text: title, TookMS: took})
	}
	p, err := json.Marshal(backupPlan())
	if err != nil {
		panic(err)
	}
	res, err := json.Marshal(plan.Result{Status: plan.StateDone, TookMS: 7900})
	if err != nil {
		panic(err)
	}
	exit := 0
	return []plan.Event{
		at(0, plan.Event{Kind: plan.KindHello, Schema: "1.0", Object: "demo"}),
		at(1, plan.Event{Kind: plan.KindPlan, Data: p}),
		step(2, engine.StepBackupResources, plan.StateRunning, "Back up custom resources", 0),
		at(2000, plan.Event{
			Kind: plan.KindProgress, Step: engine.StepBackupResources, Object: "certificates.cert-manager.io", Current: 41000, Total: 102000,
			Counts: map[string]int64{"types": 9, "all_types": 22, "objects": 41000, "bytes": 64 << 20, "bytes_per_second": 32 << 20, "seconds_left": 3},
			Text:   "9 of 22 types, 41000 of 102000 objects, 64 MiB, 32 MiB/s, 3s left",
		}),
		step(5000, engine.StepBackupResources, plan.StateDone, "Back up custom resources", 5000),
		step(5001, engine.StepBackupEtcd, plan.StateRunning, "Take a snapshot of etcd", 0),
		at(6500, plan.Event{Kind: plan.KindProgress, Step: engine.StepBackupEtcd, Current: 90 << 20, Text: "bytes"}),
		at(6600, plan.Event{Kind: plan.KindLog, Source: "backup", Level: "warn", Text: "once more: take a snapshot of etcd: through the operator on cp-0: the API server does not answer: it broke off"}),
		step(7000, engine.StepBackupEtcd, plan.StateDone, "Take a snapshot of etcd", 1999),
		step(7001, engine.StepBackupFinish, plan.StateRunning, "Complete and verify the backup", 0),
		at(7500, plan.Event{Kind: plan.KindProgress, Step: engine.StepBackupFinish, Current: 128 << 20, Total: 264 << 20, Text: "bytes verified"}),
		step(7800, engine.StepBackupFinish, plan.StateDone, "Complete and verify the backup", 799),
		at(7900, plan.Event{Kind: plan.KindResult, State: plan.StateDone, Text: "backup backup-20261121070501-1a2b3c4d of cluster demo is whole", Data: res, Exit: &exit}),
	}
}

// backupAt makes a backup until so many events have come; 0 means to its end.
func backupAt(s func(*fakeEngine) *stage, n int) *stage {
	st := backupsOf(s, func(e *fakeEngine) { e.plan, e.events, e.pauseAt = backupPlan(), backupEvents(), n })
	st.press("b")
	st.settle()
	time.Sleep(time.Second) // of the bubble: the collector passes on what came
	st.settle()
	if n > 0 {
		st.at(st.eng.events[n-1].Time.Sub(start) + 400*time.Millisecond)
	}
	return st
}

func TestBackupIsMadeInTheConsole(t *testing.T) {
	show := func(t *testing.T, n int) *stage {
		return backupAt(func(e *fakeEngine) *stage { return newStage(t, e, term.Display{}, 80, 24) }, n)
	}
	t.Run("as the user wants it with etcd", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			s := backupsOf(func(e *fakeEngine) *stage { return newStage(t, e, term.Display{}, 80, 24) }, func(e *fakeEngine) { e.plan, e.events = backupPlan(), backupEvents() })
			for _, want := range []string{engine.EtcdRequired, engine.EtcdSkip, engine.EtcdAuto} {
				s.press("e")
				if got := s.c.screen.command(); (want != "") != strings.Contains(got, "--etcd="+want) || want == "" && strings.Contains(got, "--etcd") {
					t.Errorf("the command is %q, want --etcd=%s", got, want)
				}
				s.press("b")
				s.settle()
				if s.eng.backedUpAs != (engine.BackupRequest{Etcd: want}) || s.c.running {
					t.Errorf("asked for %+v, running %t", s.eng.backedUpAs, s.c.running)
				}
			}
		})
	})
	t.Run("Esc stops it and stays", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			s := show(t, 4).press("b", "v", "e") // which do nothing now
			if s.eng.ran != 1 || s.c.backup.etcd != "" {
				t.Errorf("ran %d times, etcd %q", s.eng.ran, s.c.backup.etcd)
			}
			s.press("esc")
			s.settle()
			if s.quit || s.c.running || s.c.screen != s.c.backup || plan.ExitCode(s.c.backup.err) != plan.ExitStopped {
				t.Errorf("quit %t, running %t, screen %s, error %v", s.quit, s.c.running, s.c.screen.title(), s.c.backup.err)
			}
			if s.press("esc"); s.c.screen != s.c.overview {
				t.Errorf("Esc leads to %s", s.c.screen.title())
			}
		})
	})
	t.Run("Ctrl-C twice waits until nothing of it is left", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			s := show(t, 4).press("ctrl+c")
			if s.quit || !s.c.confirmLeave {
				t.Fatalf("quit %t, asking %t", s.quit, s.c.confirmLeave)
			}
			s.press("ctrl+c")
			s.settle()
			if !s.quit || s.c.backup.running || s.c.exit != plan.ExitStopped {
				t.Errorf("quit %t, running %t, exit %d", s.quit, s.c.backup.running, s.c.exit)
			}
		})
	})
	t.Run("Esc leads back to the check it was opened from", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			s := checkShown("trouble")(t, func(e *fakeEngine) *stage { return newStage(t, e, term.Display{}, 80, 24) })
			s.press("b")
			s.settle()
			if s.c.screen != s.c.backup {
				t.Fatalf("b leads to %s", s.c.screen.title())
			}
			if s.press("esc"); s.c.screen != s.c.check {
				t.Errorf("Esc leads to %s", s.c.screen.title())
			}
		})
	})
	t.Run("what is not whole is not restored", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			s := backupsOf(func(e *fakeEngine) *stage { return newStage(t, e, term.Display{}, 80, 24) }, nil).press("down", "y")
			if want := "y is off: this backup is incomplete: manifest.json is not there: it was not made to the end"; len(s.copied) != 0 || s.c.note != want {
				t.Errorf("copied %q, the note is %q, want %q", s.copied, s.c.note, want)
			}
			s = backupsOf(func(e *fakeEngine) *stage { return newStage(t, e, term.Display{}, 80, 24) }, func(e *fakeEngine) { e.verifyErr = errors.New("a file differs") }).press("v")
			s.settle()
			if s.press("y"); len(s.copied) != 0 || s.c.note != "y is off: this backup failed its verification" {
				t.Errorf("copied %q, the note is %q", s.copied, s.c.note)
			}
		})
	})
	t.Run("the command that restores is copied", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			s := backupsOf(func(e *fakeEngine) *stage { return newStage(t, e, term.Display{}, 80, 24) }, nil).press("down", "down", "y")
			if want := "backup restore upgrade-20261101120000-00ff00ff"; len(s.copied) != 1 || !strings.HasSuffix(s.copied[0], want) {
				t.Errorf("copied %q, want %q", s.copied, want)
			}
		})
	})
}

// listedBackups are three backups, one of which is not whole.
func listedBackups() []engine.BackupEntry {
	return []engine.BackupEntry{
		{ID: "backup-20261120050000-0a1b2c3d", Created: start.Add(-26 * time.Hour), Objects: 12345, Bytes: 18 << 20, Complete: true, Etcd: true},
		{ID: "backup-20261119050000-99aa00ff", Created: start.Add(-50 * time.Hour), Why: "manifest.json is not there: it was not made to the end"},
		{ID: "upgrade-20261101120000-00ff00ff", Created: start.Add(-20 * 24 * time.Hour), Objects: 987, Bytes: 3 << 30, Complete: true},
	}
}

// shownBackup is the manifest of a backup with a hole.
func shownBackup() engine.BackupManifest {
	var m engine.BackupManifest
	err := json.Unmarshal([]byte(`{"schema":"1.0","id":"backup-20261120050000-0a1b2c3d","created":"2026-11-20T05:00:00Z","ended":"2026-11-20T05:00:03.5Z","cluster":{"name":"demo","uid":"4c8b2e70-0000-4000-8000-000000000000","server":"v1.35.4"},
		"secrets":false,"objects":1203,"bytes":2097152,"holes":[{"group":"example.com","resource":"gizmos","reason":"conversion webhook failed: no endpoints"}],"notes":["parts.example.com was removed while the backup was made; its objects are not in it"],
		"types":[{"group":"apiextensions.k8s.io","version":"v1","resource":"customresourcedefinitions","kind":"CustomResourceDefinition","resource_version":"7","objects":3,"files":["crds.json"]},
		{"group":"","version":"v1","resource":"configmaps","kind":"ConfigMap","namespaced":true,"resource_version":"8","objects":0},
		{"group":"","version":"v1","resource":"configmaps","kind":"ConfigMap","namespaced":true,"resource_version":"8","objects":4,"files":["kube-system/configmaps.json"]},
		{"group":"example.com","version":"v1","resource":"widgets","kind":"Widget","namespaced":true,"status":true,"resource_version":"9","objects":1196,"files":["example.com/widgets.json","example.com/widgets.owned.json"]}],
		"files":[{"name":"crds.json","size":97152,"objects":3,"sha256":"00"},{"name":"kube-system/configmaps.json","size":2000,"objects":4,"sha256":"01"},
		{"name":"example.com/widgets.json","size":1898000,"objects":1000,"sha256":"02"},{"name":"example.com/widgets.owned.json","size":100000,"objects":196,"sha256":"03","owners":{"at":0,"size":17}}]}`), &m)
	if err != nil {
		panic(err)
	}
	return m
}

// Formats of the backup commands are stable.
func TestBackupOutput(t *testing.T) {
	root, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	utc := time.Local
	time.Local = time.UTC // times are shown as those of the user's place
	defer func() { time.Local = utc }()
	broken := &plan.Error{Err: &backup.NotWhole{ID: "backup-20261120050000-0a1b2c3d", Damage: []string{"example.com/widgets.json is not what was written: its SHA-256 differs"}, Holes: shownBackup().Holes}}
	for _, tt := range []struct {
		name string
		e    fakeEngine
		args string
		code int
	}{
		{"create", fakeEngine{plan: backupPlan(), events: backupEvents()}, "create --etcd --dir /mnt/safe --secrets", 0},
		{"list", fakeEngine{backups: listedBackups()}, "list", 0},
		{"list-none", fakeEngine{}, "list", 0},
		{"show", fakeEngine{manifest: shownBackup()}, "show backup-20261120050000-0a1b2c3d", 0},
		{"verify", fakeEngine{}, "verify backup-20261120050000-0a1b2c3d", 0},
		{"verify-broken", fakeEngine{verifyErr: broken}, "verify backup-20261120050000-0a1b2c3d", plan.ExitFailed},
		{"prune", fakeEngine{pruned: []string{"upgrade-20261101120000-00ff00ff"}}, "prune --keep 1", 0},
		{"prune-none", fakeEngine{verifyErr: &plan.Error{Err: errors.New("nothing to prune"), Exit: plan.ExitNothing}}, "prune --keep 1", plan.ExitNothing},
	} {
		for format, ext := range map[string]string{"text": "txt", "json": "json"} {
			t.Run(tt.name+"/"+format, func(t *testing.T) {
				e := tt.e
				out, errs, code := printedHere(t, &e, append(append([]string{"backup"}, strings.Fields(tt.args)...), "-o", format)...)
				t.Chdir(root)
				if code != tt.code || (errs != "") != (tt.code != 0 && (format == "text" || tt.name == "prune-none")) {
					t.Errorf("exit %d, stderr %q", code, errs)
				}
				checkGolden(t, "backup/"+tt.name+"."+ext, out)
				if format != "json" {
					return
				}
				// As documented: one document or one event per line, with the fields of the jq examples.
				d := json.NewDecoder(strings.NewReader(out))
				for n := 0; d.More(); n++ {
					var v map[string]any
					if err := d.Decode(&v); err != nil {
						t.Fatalf("document %d: %v", n, err)
					}
					if n == 0 && v["schema"] != plan.Schema {
						t.Errorf("the schema is %v", v["schema"])
					}
				}
				if want := (engine.BackupRequest{Dir: "/mnt/safe", Etcd: engine.EtcdRequired, Secrets: true}); tt.name == "create" && e.backedUpAs != want {
					t.Errorf("PlanBackup called with %+v", e.backedUpAs)
				}
			})
		}
	}
}

func TestBackupCompletion(t *testing.T) {
	ids := "backup-20261120050000-0a1b2c3d\t26h ago, 12345 objects\nbackup-20261119050000-99aa00ff\tincomplete\nupgrade-20261101120000-00ff00ff\t20d ago, 987 objects\n"
	types := "apiextensions.k8s.io/customresourcedefinitions\t3 objects\ncore/configmaps\t4 objects\nexample.com/widgets\t1196 objects\n"
	for _, tt := range []struct {
		args, want string
		e          fakeEngine
	}{
		{"show ", ids, fakeEngine{}},
		{"verify ", ids, fakeEngine{}},
		{"restore ", ids, fakeEngine{}},
		{"diff ", ids, fakeEngine{}},
		{"show backup-20261120050000-0a1b2c3d ", "", fakeEngine{}},
		{"restore backup-20261120050000-0a1b2c3d --only ", types, fakeEngine{manifest: shownBackup()}},
		{"diff --only ", types, fakeEngine{manifest: shownBackup()}},
		{"list --dir ", "", fakeEngine{}},
		{"create --etcd=", "true\nfalse\n", fakeEngine{}},
		{"prune --keep ", "1\n3\n10\n", fakeEngine{}},
	} {
		t.Run(tt.args, func(t *testing.T) {
			e := tt.e
			e.backups = listedBackups()
			out, _, code := printedHere(t, &e, append([]string{"__complete", "backup"}, strings.Split(tt.args, " ")...)...)
			got, rest, ok := strings.Cut(out, ":")
			if got != tt.want || code != 0 || !ok || strings.HasPrefix(rest, "0\n") {
				t.Errorf("exit %d\n%s", code, out)
			}
		})
	}
	// Without complete backups there are no completions and no error output.
	e := &fakeEngine{backups: listedBackups()[1:2]}
	if out, _, code := printedHere(t, e, "__complete", "backup", "diff", "--only", ""); !strings.HasPrefix(out, ":") || code != 0 {
		t.Errorf("exit %d\n%s", code, out)
	}
	e = &fakeEngine{backupsErr: errors.New("refused")}
	if out, _, code := printedHere(t, e, "__complete", "backup", "show", ""); !strings.HasPrefix(out, ":") || code != 0 {
		t.Errorf("exit %d\n%s", code, out)
	}
}

func TestPruneRequiresKeep(t *testing.T) {
	var e fakeEngine
	_, errs, code := printedHere(t, &e, "backup", "prune")
	if code != plan.ExitUsage || !strings.Contains(errs, "--keep is missing") || !strings.Contains(errs, "fix ") {
		t.Errorf("exit %d, stderr %q", code, errs)
	}
}
