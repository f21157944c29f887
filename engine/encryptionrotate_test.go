package engine_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"constellation/engine"
	"constellation/engine/cluster"
	"constellation/engine/kms"
	"constellation/engine/plan"
	"constellation/engine/workspace"
)

// rotatingStage is a stage whose API servers, a and b, encrypt with the keys of a generation each.
type rotatingStage struct {
	*stage
	generations [2]atomic.Uint32
}

func newRotatingStage(t *testing.T) *rotatingStage {
	t.Helper()
	s := &rotatingStage{stage: newStage(t, 1, 0)}
	s.mustInit()
	secret := s.master().KMSSecret()
	s.cluster.SetAPIServerKeys(func() []cluster.APIServerKey {
		out := []cluster.APIServerKey{{Node: "a"}, {Node: "b"}}
		for n := range out {
			g := s.generations[n].Load()
			if g == 0 {
				out[n].Err = errors.New("its pod is gone")
				continue
			}
			k, err := kms.First(secret, g)
			if err != nil {
				panic(err)
			}
			out[n].Key = kms.HashedID(k.ID())
		}
		return out
	})
	s.serve(1, 1)
	return s
}

// serve sets the generations of a and b; 0: it does not answer.
func (s *rotatingStage) serve(a, b uint32) {
	s.generations[0].Store(a)
	s.generations[1].Store(b)
}

func (s *rotatingStage) master() workspace.MasterSecret {
	s.t.Helper()
	w, err := workspace.OpenWorkspace(s.dir)
	if err != nil {
		s.t.Fatal(err)
	}
	m, err := w.MasterSecret()
	if err != nil {
		s.t.Fatal(err)
	}
	return m
}

// rotate plans and runs once. see is called with each event.
func (s *rotatingStage) rotate(ctx context.Context, r engine.RotateKeyRequest, see func(plan.Event)) (*plan.Plan, error) {
	s.t.Helper()
	e := s.engine()
	p, err := e.PlanRotateKey(ctx, r)
	if err != nil {
		return nil, err
	}
	return p, e.Run(ctx, p, see)
}

// keys is what the cluster has about its key.
func (s *rotatingStage) keys() kms.Rotation {
	s.t.Helper()
	k, err := s.cluster.KeyRotation(s.t.Context())
	if err != nil {
		s.t.Fatal(err)
	}
	return k
}

func (s *rotatingStage) rewrites() int {
	n := 0
	for _, c := range s.cluster.Calls() {
		if c == "RewriteSecrets" {
			n++
		}
	}
	return n
}

// TestRotateKey rotates twice. Secrets are written again when all API servers encrypt with the next key, and not before.
func TestRotateKey(t *testing.T) {
	s := newRotatingStage(t)
	silent := func(plan.Event) {}
	if _, err := s.rotate(t.Context(), engine.RotateKeyRequest{Rehearse: true}, silent); err != nil || s.keys() != (kms.Rotation{}) || s.master().KMS > 1 {
		t.Fatalf("a rehearsal: %v, %+v", err, s.keys())
	}
	p, err := s.rotate(t.Context(), engine.RotateKeyRequest{Reason: "yearly"}, func(e plan.Event) {
		if e.Kind == plan.KindWait && e.Step == engine.StepKeyWait && strings.Contains(e.Text, "former key") {
			if s.rewrites() > 0 {
				t.Error("Secrets were written before all API servers had the next key")
			}
			if a := s.generations[0].Load(); a == 1 { // first one, then the other
				s.serve(2, 1)
			} else {
				s.serve(2, 2)
			}
		}
	})
	if err != nil {
		t.Fatalf("%v (%s)", err, plan.Remedy(err))
	}
	if k := s.keys(); k.Generation != 2 || k.Rewritten != 2 || !strings.HasSuffix(k.Record, ": yearly") || s.master().KMS != 2 || s.rewrites() != 1 {
		t.Errorf("the cluster has %+v, the file %d, and Secrets were written %d times", k, s.master().KMS, s.rewrites())
	}
	if i := slices.IndexFunc(p.Steps, func(s plan.Step) bool { return s.Final }); i != 0 {
		t.Errorf("step %d is final", i)
	}
	status, err := s.engine().Encryption(t.Context())
	if err != nil || status.Generation != 2 || status.Recorded != 2 || !status.Rewritten || len(status.APIServers) != 2 || status.APIServers[0] != (engine.APIServerKey{Node: "a", Generation: 2}) {
		t.Errorf("status %+v, %v", status, err)
	}
	s.serve(3, 3)
	if _, err := s.rotate(t.Context(), engine.RotateKeyRequest{}, silent); err != nil || s.keys().Rewritten != 3 || s.rewrites() != 2 {
		t.Errorf("a second rotation: %v, %+v", err, s.keys())
	}
}

// TestRotateKeyIsResumed has a rotation end at each step. The same command completes it, and begins no other one.
func TestRotateKeyIsResumed(t *testing.T) {
	for _, step := range []string{engine.StepKeyPublish, engine.StepKeyRecord, engine.StepKeyWait, engine.StepKeyRewrite} {
		t.Run(step, func(t *testing.T) {
			s := newRotatingStage(t)
			if step == engine.StepKeyRewrite {
				s.serve(2, 2)
			}
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			if _, err := s.rotate(ctx, engine.RotateKeyRequest{}, func(e plan.Event) {
				if e.Kind == plan.KindStep && e.Step == step && e.State == plan.StateRunning {
					cancel()
				}
			}); err != nil && plan.ExitCode(err) != plan.ExitStopped {
				t.Fatal(err)
			}
			s.serve(2, 2)
			p, err := s.rotate(t.Context(), engine.RotateKeyRequest{}, func(plan.Event) {})
			if err != nil || s.keys().Generation != 2 || s.keys().Rewritten != 2 || s.master().KMS != 2 {
				t.Errorf("completed with %v: %+v, the file has %d", err, s.keys(), s.master().KMS)
			}
			if step != engine.StepKeyPublish && len(p.Notes) == 0 {
				t.Error("the plan does not say that a rotation is under way")
			}
		})
	}
}

// TestRotateKeyReportsWhatIsBehind has an API server that never uses the next key, and a Secret that cannot be written.
func TestRotateKeyReportsWhatIsBehind(t *testing.T) {
	s := newRotatingStage(t)
	s.serve(2, 1)
	if _, err := s.rotate(t.Context(), engine.RotateKeyRequest{}, func(plan.Event) {}); err == nil || !strings.Contains(err.Error(), "b encrypts with a former key") || !strings.Contains(plan.Remedy(err), "join service") {
		t.Errorf("got %v (%s)", err, plan.Remedy(err))
	}
	s.serve(2, 0)
	if _, err := s.rotate(t.Context(), engine.RotateKeyRequest{}, func(plan.Event) {}); err == nil || !strings.Contains(err.Error(), "b: its pod is gone") {
		t.Errorf("got %v", err)
	}
	if status, err := s.engine().Encryption(t.Context()); err != nil || status.APIServers[1].Problem != "its pod is gone" {
		t.Errorf("status %+v, %v", status, err)
	}
	if s.rewrites() != 0 {
		t.Error("Secrets were written")
	}
	s.serve(2, 2)
	s.cluster.OnCall(func(call string) error {
		if call == "RewriteSecrets" {
			return errors.New("1 was refused: default/held")
		}
		return nil
	})
	if _, err := s.rotate(t.Context(), engine.RotateKeyRequest{}, func(plan.Event) {}); err == nil || !strings.Contains(err.Error(), "default/held") || s.keys().Rewritten != 0 {
		t.Errorf("got %v, %+v", err, s.keys())
	}
	status, err := s.engine().Encryption(t.Context())
	if err != nil || status.Rewritten || status.Generation != 2 {
		t.Errorf("status %+v, %v", status, err)
	}
}
