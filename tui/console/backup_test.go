package console

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"constellation/engine"
	"constellation/engine/cluster"
	"constellation/engine/plan"
	"constellation/tui/internal/enginefake"
	"constellation/tui/term"
)

// backupScenes are the screen of backups at moments that matter.
var backupScenes = []scene{
	{"backup-first", func(_ *testing.T, s func(*enginefake.Engine) *stage) *stage {
		return backupsOf(s, func(e *enginefake.Engine) { e.Backups = nil })
	}},
	{"backup-list", func(_ *testing.T, s func(*enginefake.Engine) *stage) *stage {
		return backupsOf(s, nil).press("down", "e")
	}},
	{"backup-volumes", func(_ *testing.T, s func(*enginefake.Engine) *stage) *stage {
		return backupsOf(s, func(e *enginefake.Engine) {
			for i := range 40 {
				e.Local.Volumes = append(e.Local.Volumes, cluster.LocalVolume{Namespace: "cache", Claim: fmt.Sprintf("shard-%02d", i), Nodes: []string{fmt.Sprintf("worker-%d", i)}})
			}
		}).press("enter", "down")
	}},
	{"backup-unknown", func(_ *testing.T, s func(*enginefake.Engine) *stage) *stage {
		return backupsOf(s, func(e *enginefake.Engine) {
			e.Backups, e.BackupsErr = nil, &plan.Error{
				Op: "list backups in /home/ops/demo/constellation-upgrade", Err: errors.New("refused: others may write it"), Remedy: "if you trust its contents, make it writable by you only (chown, chmod go-w)",
			}
			e.Local, e.LocalErr = cluster.LocalData{}, errors.New("look for volumes on nodes: the API server does not answer")
		})
	}},
	{"backup-running", func(_ *testing.T, s func(*enginefake.Engine) *stage) *stage { return backupAt(s, 4) }},
	{"backup-etcd", func(_ *testing.T, s func(*enginefake.Engine) *stage) *stage { return backupAt(s, 7) }},
	{"backup-verifying", func(_ *testing.T, s func(*enginefake.Engine) *stage) *stage { return backupAt(s, 11) }},
	{"backup-leaving", func(_ *testing.T, s func(*enginefake.Engine) *stage) *stage { return backupAt(s, 4).press("ctrl+c") }},
	{"backup-done", func(_ *testing.T, s func(*enginefake.Engine) *stage) *stage { return backupAt(s, 0) }},
	{"backup-stopped", func(_ *testing.T, s func(*enginefake.Engine) *stage) *stage {
		st := backupAt(s, 4).press("esc")
		st.settle()
		return st
	}},
	{"backup-failed", func(_ *testing.T, s func(*enginefake.Engine) *stage) *stage {
		st := backupsOf(s, func(e *enginefake.Engine) {
			e.Plan, e.Events = enginefake.BackupPlan(), enginefake.BackupEvents()[:4]
			e.RunErr = &plan.Error{
				Op: "back up to /home/ops/demo/constellation-upgrade/backup-20261121070501-1a2b3c4d", Err: errors.New("write example.com/widgets.json: no space left on device"),
				Remedy: "free some space (`constellation backup prune --keep 1` removes old backups), or use another disk with --dir; nothing is left of this one",
			}
		}).press("b")
		st.settle()
		return st
	}},
	{"backup-verified", func(_ *testing.T, s func(*enginefake.Engine) *stage) *stage {
		st := backupsOf(s, func(e *enginefake.Engine) { e.BackupVerified.Authentication = engine.BackupAuthenticated }).press("v")
		st.settle()
		return st
	}},
	{"backup-foreign", func(_ *testing.T, s func(*enginefake.Engine) *stage) *stage {
		st := backupsOf(s, func(e *enginefake.Engine) { e.BackupVerified.Authentication = engine.BackupForeign }).press("v")
		st.settle()
		return st
	}},
	{"backup-damaged", func(_ *testing.T, s func(*enginefake.Engine) *stage) *stage {
		st := backupsOf(s, func(e *enginefake.Engine) {
			e.VerifyErr = errors.New("backup backup-20261120050000-0a1b2c3d: example.com/widgets.json is not what was written: its SHA-256 differs")
		}).press("v")
		st.settle()
		return st
	}},
	{"backup-help", func(_ *testing.T, s func(*enginefake.Engine) *stage) *stage { return backupsOf(s, nil).press("?") }},
	{"home-backup", func(_ *testing.T, s func(*enginefake.Engine) *stage) *stage {
		h, st := enginefake.DemoHome(engine.StageCluster), enginefake.DemoStatus()
		h.Next = []engine.Suggestion{{Title: "Create a backup", Command: "constellation -C .demo backup create", Why: "the last one is 26h old"}}
		st.Backup = &plan.LastBackup{ID: "backup-20261120050000-0a1b2c3d", Created: enginefake.Start.Add(-26 * time.Hour), Objects: 12345, Bytes: 18 << 20, Etcd: true}
		st.Health = []plan.Finding{{ID: plan.BackupAge, Severity: plan.Warn, Source: "backup", Title: "the last backup is 26h old", Remedy: "create one: `constellation -C .demo backup create`"}}
		return s(&enginefake.Engine{HomeData: h, StatusData: st}).begin()
	}},
}

// backupsOf shows the screen of a cluster with backups and local volumes.
func backupsOf(s func(*enginefake.Engine) *stage, change func(*enginefake.Engine)) *stage {
	e := &enginefake.Engine{
		HomeData: enginefake.DemoHome(engine.StageCluster), StatusData: enginefake.DemoStatus(),
		Backups: []engine.BackupEntry{
			{ID: "backup-20261120050000-0a1b2c3d", Created: enginefake.Start.Add(-26 * time.Hour), Objects: 12345, Bytes: 18 << 20, Complete: true},
			{ID: "backup-20261119050000-99aa00ff", Created: enginefake.Start.Add(-50 * time.Hour), Why: "manifest.json is not there: it was not made to the end"},
			{ID: "upgrade-20261101120000-00ff00ff", Created: enginefake.Start.Add(-20 * 24 * time.Hour), Objects: 987, Bytes: 3 << 30, Complete: true, Etcd: true},
		},
		Local: cluster.LocalData{
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

// backupAt makes a backup until so many events have come; 0 means to its end.
func backupAt(s func(*enginefake.Engine) *stage, n int) *stage {
	st := backupsOf(s, func(e *enginefake.Engine) {
		e.Plan, e.Events, e.PauseAt = enginefake.BackupPlan(), enginefake.BackupEvents(), n
	})
	st.press("b")
	st.settle()
	time.Sleep(time.Second) // of the bubble: the collector passes on what came
	st.settle()
	if n > 0 {
		st.at(st.eng.Events[n-1].Time.Sub(enginefake.Start) + 400*time.Millisecond)
	}
	return st
}

func TestBackupIsMadeInTheConsole(t *testing.T) {
	show := func(t *testing.T, n int) *stage {
		return backupAt(func(e *enginefake.Engine) *stage { return newStage(t, e, term.Display{}, 80, 24) }, n)
	}
	t.Run("as the user wants it with etcd", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			s := backupsOf(func(e *enginefake.Engine) *stage { return newStage(t, e, term.Display{}, 80, 24) }, func(e *enginefake.Engine) { e.Plan, e.Events = enginefake.BackupPlan(), enginefake.BackupEvents() })
			for _, want := range []string{engine.EtcdRequired, engine.EtcdSkip, engine.EtcdAuto} {
				s.press("e")
				if got := s.c.screen.command(); (want != "") != strings.Contains(got, "--etcd="+want) || want == "" && strings.Contains(got, "--etcd") {
					t.Errorf("the command is %q, want --etcd=%s", got, want)
				}
				s.press("b")
				s.settle()
				if s.eng.BackedUpAs != (engine.BackupRequest{Etcd: want}) || s.c.running {
					t.Errorf("asked for %+v, running %t", s.eng.BackedUpAs, s.c.running)
				}
			}
		})
	})
	t.Run("Esc stops it and stays", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			s := show(t, 4).press("b", "v", "e") // which do nothing now
			if s.eng.Ran != 1 || s.c.backup.etcd != "" {
				t.Errorf("ran %d times, etcd %q", s.eng.Ran, s.c.backup.etcd)
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
			if s.quit || !s.c.quit.asking {
				t.Fatalf("quit %t, asking %t", s.quit, s.c.quit.asking)
			}
			s.press("ctrl+c")
			s.settle()
			if !s.quit || s.c.backup.running || s.c.quit.exit != plan.ExitStopped {
				t.Errorf("quit %t, running %t, exit %d", s.quit, s.c.backup.running, s.c.quit.exit)
			}
		})
	})
	t.Run("Esc leads back to the check it was opened from", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			s := checkShown("trouble")(t, func(e *enginefake.Engine) *stage { return newStage(t, e, term.Display{}, 80, 24) })
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
	t.Run("an incomplete backup is not restored", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			s := backupsOf(func(e *enginefake.Engine) *stage { return newStage(t, e, term.Display{}, 80, 24) }, nil).press("down", "y")
			if want := "y is off: this backup is incomplete: manifest.json is not there: it was not made to the end"; len(s.copied) != 0 || s.c.note != want {
				t.Errorf("copied %q, the note is %q, want %q", s.copied, s.c.note, want)
			}
			s = backupsOf(func(e *enginefake.Engine) *stage { return newStage(t, e, term.Display{}, 80, 24) }, func(e *enginefake.Engine) { e.VerifyErr = errors.New("a file differs") }).press("v")
			s.settle()
			if s.press("y"); len(s.copied) != 0 || s.c.note != "y is off: this backup failed its verification" {
				t.Errorf("copied %q, the note is %q", s.copied, s.c.note)
			}
		})
	})
	t.Run("the command that restores is copied", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			s := backupsOf(func(e *enginefake.Engine) *stage { return newStage(t, e, term.Display{}, 80, 24) }, nil).press("down", "down", "y")
			if want := "backup restore upgrade-20261101120000-00ff00ff"; len(s.copied) != 1 || !strings.HasSuffix(s.copied[0], want) {
				t.Errorf("copied %q, want %q", s.copied, want)
			}
		})
	})
}
