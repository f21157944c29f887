package engine_test

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"constellation/engine"
	"constellation/engine/attestation/keyprocess"
	"constellation/engine/kms"
	"constellation/engine/plan"
	"constellation/engine/workspace"
)

// encryptedStage is a stage with three control planes whose cluster encrypts Secrets, and the keys of its key services.
func encryptedStage(t *testing.T) (*stage, *kms.Keys) {
	t.Helper()
	s := newStage(t, 3, 0)
	s.mustInit()
	w, err := workspace.OpenWorkspace(s.dir)
	if err != nil {
		t.Fatal(err)
	}
	m, err := w.MasterSecret()
	if err != nil {
		t.Fatal(err)
	}
	k, err := kms.First(m.KMSSecret(), 1)
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range s.machines {
		m.stop()
	}
	return s, k
}

// recover plans and runs once.
func (s *stage) recover(r engine.RecoverRequest) ([]plan.Event, *plan.Plan, error) {
	s.t.Helper()
	e := s.engine()
	p, err := e.PlanRecover(s.t.Context(), r)
	if err != nil {
		return nil, nil, err
	}
	var events []plan.Event
	err = e.Run(s.t.Context(), p, func(ev plan.Event) { events = append(events, ev) })
	return events, p, err
}

// TestRecoverSendsKeys has control planes without keys. Their API servers read Secrets when all have theirs.
func TestRecoverSendsKeys(t *testing.T) {
	s, keys := encryptedStage(t)
	for _, m := range s.machines {
		m.lose(keyprocess.KeyService, keys.Fingerprint())
	}
	s.cluster.OnCall(func(call string) error {
		for _, m := range s.machines {
			if got, _ := m.got(); call == "SecretsReadable" && len(got) == 0 {
				return errors.New("no key service")
			}
		}
		return nil
	})
	rehearsed, p, err := s.recover(engine.RecoverRequest{Rehearse: true})
	if err != nil || p.Finished() || !strings.Contains(strings.Join(p.Steps[0].Details, "\n"), "waits for keys of the key service: its file is missing") {
		t.Errorf("rehearsal: %v, %+v", err, p)
	}
	for _, m := range s.machines {
		if got, _ := m.got(); len(got) > 0 {
			t.Fatal("a rehearsal sent keys")
		}
	}
	events, _, err := s.recover(engine.RecoverRequest{})
	if err != nil {
		t.Fatalf("%v (%s)\n%s", err, plan.Remedy(err), states(events))
	}
	checkStream(t, events, nil)
	for _, m := range s.machines {
		got, certifier := m.got()
		if k, err := kms.Parse(got); err != nil || k.ID() != keys.ID() || len(certifier) > 0 {
			t.Errorf("%s got %v, %v, and %d bytes for a certifier", m.name, k, err, len(certifier))
		}
	}
	text, err := json.Marshal(append(rehearsed, events...))
	if err != nil {
		t.Fatal(err)
	}
	got, _ := s.machines[0].got()
	var secret struct{ Secret []byte }
	if err := json.Unmarshal(got, &secret); err != nil || len(secret.Secret) != kms.SecretSize {
		t.Fatal("the keys have another form")
	}
	for _, b := range [][]byte{text, s.log.Bytes()} {
		if bytes.Contains(b, []byte(base64.StdEncoding.EncodeToString(secret.Secret))) {
			t.Error("events or the log have the secret")
		}
	}
	if _, p, err := s.recover(engine.RecoverRequest{}); plan.ExitCode(err) != plan.ExitNothing || !p.Finished() {
		t.Errorf("a second time: %v", err)
	}
}

// TestRecoverOneOfSeveral gives keys to the named control plane alone.
func TestRecoverOneOfSeveral(t *testing.T) {
	s, keys := encryptedStage(t)
	for _, m := range s.machines[1:] {
		m.lose(keyprocess.KeyService, keys.Fingerprint())
	}
	if _, _, err := s.recover(engine.RecoverRequest{Nodes: []string{"control-plane-2"}}); err != nil {
		t.Fatal(err)
	}
	if got, _ := s.machines[1].got(); len(got) > 0 {
		t.Error("another control plane got keys")
	}
	if got, _ := s.machines[2].got(); len(got) == 0 {
		t.Error("the named control plane got no keys")
	}
	if _, _, err := s.recover(engine.RecoverRequest{Nodes: []string{"worker-9"}}); plan.ExitCode(err) != plan.ExitUsage || !strings.Contains(err.Error(), "worker-9 is no control plane") {
		t.Errorf("an unknown name: %v", err)
	}
}

// TestRecoverIsRefused has workspaces and machines that get no keys.
func TestRecoverIsRefused(t *testing.T) {
	write := func(s *stage, m workspace.MasterSecret) {
		w, err := workspace.OpenWorkspace(s.dir)
		if err == nil {
			err = w.WriteMasterSecret(m)
		}
		if err != nil {
			s.t.Fatal(err)
		}
	}
	for _, tt := range []struct {
		name        string
		change      func(*stage)
		fingerprint string // of the keys that the machine had
		exit        int
		want        string
	}{
		{name: "no master secret", exit: plan.ExitUsage, want: workspace.MasterSecretFile, change: func(s *stage) {
			if err := os.Remove(filepath.Join(s.dir, workspace.MasterSecretFile)); err != nil {
				s.t.Fatal(err)
			}
		}},
		{name: "another master secret", exit: plan.ExitUsage, want: "belongs to another cluster", change: func(s *stage) { write(s, workspace.NewMasterSecret()) }},
		{name: "the machine had other keys", fingerprint: "0123456789abcdef", exit: plan.ExitBlocked, want: "fingerprint 0123456789abcdef"},
		{name: "a wrong init secret", exit: plan.ExitFailed, want: "wrong init secret", change: func(s *stage) { s.secret = []byte("another secret") }},
		{name: "a cluster without keys", exit: plan.ExitUsage, want: "have no secret keys", change: func(s *stage) { s.edit(workspace.StateFile, "  encryptsSecrets: true\n", "") }},
		{name: "an unknown boot chain", exit: plan.ExitFailed, want: "PCR 4", change: func(s *stage) {
			s.events[0].Digest = bytes.Repeat([]byte{0xee}, 32)
			m := s.machines[0]
			m.stop()
			m.start(m.clusterID)
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s, keys := encryptedStage(t)
			if tt.fingerprint == "" {
				tt.fingerprint = keys.Fingerprint()
			}
			s.machines[0].lose(keyprocess.KeyService, tt.fingerprint)
			s.cluster.OnCall(func(call string) error {
				if call == "SecretsReadable" {
					return errors.New("no key service")
				}
				return nil
			})
			if tt.change != nil {
				tt.change(s)
			}
			_, _, err := s.recover(engine.RecoverRequest{})
			if plan.ExitCode(err) != tt.exit || !strings.Contains(err.Error(), tt.want) || plan.Remedy(err) == "" {
				t.Errorf("got %v, exit %d, remedy %q; want exit %d with %q", err, plan.ExitCode(err), plan.Remedy(err), tt.exit, tt.want)
			}
			if got, _ := s.machines[0].got(); len(got) > 0 {
				t.Error("keys were sent")
			}
		})
	}
}

// TestRecoverIsResumed ends a recovery after the first control plane. The same command completes it.
func TestRecoverIsResumed(t *testing.T) {
	s, keys := encryptedStage(t)
	for _, m := range s.machines {
		m.lose(keyprocess.KeyService, keys.Fingerprint())
	}
	var readable atomic.Bool
	s.cluster.OnCall(func(call string) error {
		if call == "SecretsReadable" && !readable.Load() {
			return errors.New("no key service")
		}
		return nil
	})
	e := s.engine()
	p, err := e.PlanRecover(t.Context(), engine.RecoverRequest{})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	err = e.Run(ctx, p, func(ev plan.Event) {
		if strings.Contains(ev.Text, "sealed keys of the key service") {
			cancel()
		}
	})
	if plan.ExitCode(err) != plan.ExitStopped {
		t.Fatalf("got %v", err)
	}
	readable.Store(true)
	if _, _, err := s.recover(engine.RecoverRequest{}); err != nil {
		t.Fatal(err)
	}
	for _, m := range s.machines {
		if got, _ := m.got(); len(got) == 0 {
			t.Errorf("%s got no keys", m.name)
		}
	}
}
