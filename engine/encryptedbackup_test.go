package engine_test

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"filippo.io/age"

	"constellation/engine"
	"constellation/engine/backup"
	"constellation/engine/plan"
	"constellation/engine/workspace"
)

// Backups of a workspace with recipients are encrypted, and read with the identity alone.
func TestBackupIsEncryptedToRecipients(t *testing.T) {
	s := newCheckStage(t)
	w, err := workspace.OpenWorkspace(s.dir)
	if err != nil {
		t.Fatal(err)
	}
	me, err := age.GenerateX25519Identity()
	if err != nil {
		t.Fatal(err)
	}
	key := filepath.Join(t.TempDir(), "key.txt")
	if err := os.WriteFile(key, []byte(me.String()+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	config, err := w.ReadConfig()
	if err != nil {
		t.Fatal(err)
	}
	with := func(recipient string) {
		t.Helper()
		if err := w.ReplaceConfig(append(bytes.Clone(config), "\nbackup:\n  recipients:\n  - "+recipient+"\n"...)); err != nil {
			t.Fatal(err)
		}
	}
	newEngine := func() *engine.Engine {
		return engine.New(w, engine.Deps{
			Backups: func(context.Context, []byte) (engine.BackupCluster, error) {
				return &failingTwin{end: func(context.Context, *backup.Writer) error { return nil }}, nil
			},
			Now: func() time.Time { return checkTime },
		})
	}
	e := newEngine()
	run := func() (string, error) {
		p, err := e.PlanBackup(t.Context(), engine.BackupRequest{Etcd: engine.EtcdSkip})
		if err != nil {
			t.Fatal(err)
		}
		return p.ID, e.Run(t.Context(), p, func(plan.Event) {})
	}
	// The plan names the files that the backup will have.
	with(me.Recipient().String())
	p, err := e.PlanBackup(t.Context(), engine.BackupRequest{Etcd: engine.EtcdSkip})
	if err != nil {
		t.Fatal(err)
	}
	if len(p.Files) != 3 || filepath.Base(p.Files[1].Path) != backup.SealedManifest || p.Files[2].Secret {
		t.Errorf("the plan names %+v", p.Files)
	}
	for _, wrong := range []string{"me", "age1qqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqq", me.String()} {
		with(wrong)
		id, err := run()
		if plan.ExitCode(err) != plan.ExitUsage || strings.Contains(err.Error(), me.String()) {
			t.Errorf("recipient %q: exit %d, %v", wrong, plan.ExitCode(err), err)
		}
		if left, err := os.Lstat(filepath.Join(w.Path(plan.RunsDir), id, backup.Dir)); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("recipient %q: left %v, %v", wrong, left, err)
		}
	}
	with(me.Recipient().String())
	if err := w.WriteMasterSecret(workspace.NewMasterSecret()); err != nil && !errors.Is(err, fs.ErrExist) {
		t.Fatal(err)
	}
	id, err := run()
	if err != nil {
		t.Fatal(err)
	}
	v, err := e.VerifyBackup(t.Context(), "", id, nil)
	if err != nil || !v.Locked || len(v.Recipients) != 1 || v.Authentication != engine.BackupAuthenticated {
		t.Errorf("without an identity: %+v, %v", v, err)
	}
	if m, _, err := e.ShowBackup("", id); err != nil || len(m.Types) > 0 || m.Encrypted == nil {
		t.Errorf("without an identity: %+v, %v", m, err)
	}
	if _, err := e.PlanRestore(t.Context(), engine.RestoreRequest{ID: id}, func(plan.Event) {}); plan.ExitCode(err) != plan.ExitUsage || !errors.Is(err, backup.ErrLocked) || !strings.Contains(plan.Remedy(err), "--identity") {
		t.Errorf("restore without an identity: %v", err)
	}
	if _, err := e.DecryptBackup(t.Context(), "", id, t.TempDir(), nil); !errors.Is(err, backup.ErrLocked) {
		t.Errorf("decrypt without an identity: %v", err)
	}

	t.Setenv(engine.IdentityVariable, key)
	e = newEngine()
	if err := e.UseIdentity(""); err != nil {
		t.Fatal(err)
	}
	if v, err = e.VerifyBackup(t.Context(), "", id, nil); err != nil || v.Locked {
		t.Errorf("with an identity: %+v, %v", v, err)
	}
	if m, _, err := e.ShowBackup("", id); err != nil || len(m.Types) != 1 || m.Objects != 1 {
		t.Errorf("with an identity: %+v, %v", m, err)
	}
	to := filepath.Join(t.TempDir(), "plain")
	path, err := e.DecryptBackup(t.Context(), "", id, to, nil)
	if err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(filepath.Join(path, "example.com", "widgets.json")); err != nil || !bytes.Contains(b, []byte(`"name":"w"`)) {
		t.Errorf("decrypted: %s, %v", b, err)
	}
	if v, err = e.VerifyBackup(t.Context(), to, id, nil); err != nil || v.Authentication != engine.BackupAuthenticated || len(v.Recipients) > 0 {
		t.Errorf("the decrypted one: %+v, %v", v, err)
	}
	if _, err := e.DecryptBackup(t.Context(), "", id, to, nil); plan.ExitCode(err) != plan.ExitUsage || !strings.Contains(plan.Remedy(err), "--to") {
		t.Errorf("decrypt to the same directory: %v", err)
	}
	if err := e.UseIdentity(filepath.Join(to, "none")); plan.ExitCode(err) != plan.ExitUsage {
		t.Errorf("a missing identity: %v", err)
	}
}

// A configuration that mentions recipients never leads to a backup without encryption. Any other one does not prevent a backup.
func TestRecipientsThatCannotBeReadStopABackup(t *testing.T) {
	s := newCheckStage(t)
	w, err := workspace.OpenWorkspace(s.dir)
	if err != nil {
		t.Fatal(err)
	}
	valid, err := w.ReadConfig()
	if err != nil {
		t.Fatal(err)
	}
	e := engine.New(w, engine.Deps{
		Backups: func(context.Context, []byte) (engine.BackupCluster, error) {
			return &failingTwin{end: func(context.Context, *backup.Writer) error { return nil }}, nil
		},
		Now: func() time.Time { return checkTime },
	})
	for _, x := range []struct {
		name, added string
		stops       bool
		warns       string
	}{
		{name: "no recipients"},
		{name: "an empty list", added: "backup:\n  recipients: []\n"},
		{name: "a comment", added: "# recipients\n"},
		{name: "at the top", added: "recipients: [age1x]\n", stops: true},
		{name: "a misspelled section", added: "backups:\n  recipients: [age1x]\n", stops: true},
		{name: "no YAML, with recipients", added: "backup: {recipients: [age1x]\n", stops: true},
		{name: "no YAML, without recipients", added: "backup: {\n", warns: "not encrypted"},
	} {
		if err := w.ReplaceConfig(append(bytes.Clone(valid), "\n"+x.added...)); err != nil {
			t.Fatal(err)
		}
		p, err := e.PlanBackup(t.Context(), engine.BackupRequest{Etcd: engine.EtcdSkip})
		if err != nil {
			t.Fatal(err)
		}
		warned := false
		err = e.Run(t.Context(), p, func(ev plan.Event) {
			warned = warned || ev.Level == "warn" && x.warns != "" && strings.Contains(ev.Text, x.warns)
		})
		if stops := plan.ExitCode(err) == plan.ExitUsage; stops != x.stops || !stops && err != nil {
			t.Errorf("%s: %v, want a usage error: %v", x.name, err, x.stops)
		}
		if warned != (x.warns != "") {
			t.Errorf("%s: warned %v", x.name, warned)
		}
	}
}
