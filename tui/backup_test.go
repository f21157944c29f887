package tui

import (
	"encoding/json"
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"constellation/engine"
	"constellation/engine/backup"
	"constellation/engine/plan"
	"constellation/tui/internal/enginefake"
)

// listedBackups are three backups, one of which is not whole.
func listedBackups() []engine.BackupEntry {
	return []engine.BackupEntry{
		{ID: "backup-20261120050000-0a1b2c3d", Created: enginefake.Start.Add(-26 * time.Hour), Objects: 12345, Bytes: 18 << 20, Complete: true, Etcd: true, Authentication: engine.BackupAuthenticated},
		{ID: "backup-20261119050000-99aa00ff", Created: enginefake.Start.Add(-50 * time.Hour), Why: "manifest.json is not there: it was not made to the end"},
		{ID: "upgrade-20261101120000-00ff00ff", Created: enginefake.Start.Add(-20 * 24 * time.Hour), Objects: 987, Bytes: 3 << 30, Complete: true, Authentication: engine.BackupForeign},
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

// lockedBackup is what an encrypted backup shows without an identity.
func lockedBackup() engine.BackupManifest {
	m := shownBackup()
	m.Secrets, m.Objects, m.Holes, m.Notes, m.Types, m.Cluster.Server = false, 0, nil, nil, nil, ""
	m.Files = []backup.File{{Name: "0001.age", Size: 2 << 20, SHA256: "00"}, {Name: backup.SealedManifest, Size: 1 << 10, SHA256: "01"}}
	m.Encrypted = &backup.Encryption{Recipients: []string{"age1alice", "age1bob"}, Objects: 1203, Etcd: true}
	return m
}

// backup decrypt needs a directory, and prints the path of the decrypted files.
func TestDecryptOutput(t *testing.T) {
	e := enginefake.Engine{}
	if _, errs, code := printedHere(t, &e, "backup", "decrypt", restoredID); code != plan.ExitUsage || !strings.Contains(errs, "--to is missing") {
		t.Errorf("without --to: exit %d, %q", code, errs)
	}
	out, _, code := printedHere(t, &e, "backup", "decrypt", restoredID, "--to", "/safe", "--identity", "key.txt")
	if code != plan.ExitDone || out != "/safe/"+restoredID+"/backups\n" || e.Identity != "key.txt" {
		t.Errorf("exit %d, %q, identity %q", code, out, e.Identity)
	}
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
		e    enginefake.Engine
		args string
		code int
	}{
		{name: "create", e: enginefake.Engine{Plan: enginefake.BackupPlan(), Events: enginefake.BackupEvents()}, args: "create --etcd --dir /mnt/safe --secrets"},
		{name: "list", e: enginefake.Engine{Backups: listedBackups()}, args: "list"},
		{name: "list-none", e: enginefake.Engine{}, args: "list"},
		{name: "show", e: enginefake.Engine{Manifest: shownBackup()}, args: "show backup-20261120050000-0a1b2c3d"},
		{name: "verify", e: enginefake.Engine{BackupVerified: engine.BackupVerification{Authentication: engine.BackupAuthenticated}}, args: "verify backup-20261120050000-0a1b2c3d"},
		{name: "verify-foreign", e: enginefake.Engine{BackupVerified: engine.BackupVerification{Authentication: engine.BackupForeign}}, args: "verify backup-20261120050000-0a1b2c3d"},
		{name: "verify-old", e: enginefake.Engine{BackupVerified: engine.BackupVerification{Authentication: engine.BackupUnauthenticated}}, args: "verify backup-20261120050000-0a1b2c3d"},
		{name: "verify-locked", e: enginefake.Engine{BackupVerified: engine.BackupVerification{Authentication: engine.BackupAuthenticated, Recipients: []string{"age1alice", "age1bob"}, Locked: true}}, args: "verify backup-20261120050000-0a1b2c3d"},
		{name: "show-locked", e: enginefake.Engine{Manifest: lockedBackup()}, args: "show backup-20261120050000-0a1b2c3d"},
		{name: "verify-broken", e: enginefake.Engine{VerifyErr: broken}, args: "verify backup-20261120050000-0a1b2c3d", code: plan.ExitFailed},
		{name: "prune", e: enginefake.Engine{Pruned: []string{"upgrade-20261101120000-00ff00ff"}}, args: "prune --keep 1"},
		{name: "prune-none", e: enginefake.Engine{VerifyErr: &plan.Error{Err: errors.New("nothing to prune"), Exit: plan.ExitNothing}}, args: "prune --keep 1", code: plan.ExitNothing},
	} {
		for format, ext := range map[string]string{"text": "txt", "json": "json"} {
			t.Run(tt.name+"/"+format, func(t *testing.T) {
				e := tt.e
				out, errs, code := printedHere(t, &e, append(append([]string{"backup"}, strings.Fields(tt.args)...), "-o", format)...)
				t.Chdir(root)
				if code != tt.code || (errs != "") != (tt.code != 0 && (format == "text" || tt.name == "prune-none")) {
					t.Errorf("exit %d, stderr %q", code, errs)
				}
				enginefake.CheckGolden(t, "backup/"+tt.name+"."+ext, out)
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
				if want := (engine.BackupRequest{Dir: "/mnt/safe", Etcd: engine.EtcdRequired, Secrets: true}); tt.name == "create" && e.BackedUpAs != want {
					t.Errorf("PlanBackup called with %+v", e.BackedUpAs)
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
		e          enginefake.Engine
	}{
		{args: "show ", want: ids, e: enginefake.Engine{}},
		{args: "verify ", want: ids, e: enginefake.Engine{}},
		{args: "restore ", want: ids, e: enginefake.Engine{}},
		{args: "diff ", want: ids, e: enginefake.Engine{}},
		{args: "show backup-20261120050000-0a1b2c3d ", want: "", e: enginefake.Engine{}},
		{args: "restore backup-20261120050000-0a1b2c3d --only ", want: types, e: enginefake.Engine{Manifest: shownBackup()}},
		{args: "diff --only ", want: types, e: enginefake.Engine{Manifest: shownBackup()}},
		{args: "list --dir ", want: "", e: enginefake.Engine{}},
		{args: "create --etcd=", want: "true\nfalse\n", e: enginefake.Engine{}},
		{args: "prune --keep ", want: "1\n3\n10\n", e: enginefake.Engine{}},
	} {
		t.Run(tt.args, func(t *testing.T) {
			e := tt.e
			e.Backups = listedBackups()
			out, _, code := printedHere(t, &e, append([]string{"__complete", "backup"}, strings.Split(tt.args, " ")...)...)
			got, rest, ok := strings.Cut(out, ":")
			if got != tt.want || code != 0 || !ok || strings.HasPrefix(rest, "0\n") {
				t.Errorf("exit %d\n%s", code, out)
			}
		})
	}
	// Without complete backups there are no completions and no error output.
	e := &enginefake.Engine{Backups: listedBackups()[1:2]}
	if out, _, code := printedHere(t, e, "__complete", "backup", "diff", "--only", ""); !strings.HasPrefix(out, ":") || code != 0 {
		t.Errorf("exit %d\n%s", code, out)
	}
	e = &enginefake.Engine{BackupsErr: errors.New("refused")}
	if out, _, code := printedHere(t, e, "__complete", "backup", "show", ""); !strings.HasPrefix(out, ":") || code != 0 {
		t.Errorf("exit %d\n%s", code, out)
	}
}

func TestPruneRequiresKeep(t *testing.T) {
	var e enginefake.Engine
	_, errs, code := printedHere(t, &e, "backup", "prune")
	if code != plan.ExitUsage || !strings.Contains(errs, "--keep is missing") || !strings.Contains(errs, "fix ") {
		t.Errorf("exit %d, stderr %q", code, errs)
	}
}
