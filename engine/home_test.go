package engine_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"constellation/engine"
	"constellation/engine/check"
	"constellation/engine/plan"
	"constellation/engine/workspace"
)

func TestHomeOfAClusterWhoseKubeconfigWasLost(t *testing.T) {
	s := newStage(t, 1, 1)
	s.mustInit()
	kubeconfig := s.read(workspace.KubeconfigFile)
	home := func() engine.Home {
		t.Helper()
		h, err := s.engine().Home(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return h
	}
	if err := os.Remove(filepath.Join(s.dir, workspace.KubeconfigFile)); err != nil {
		t.Fatal(err)
	}
	lost := func() {
		t.Helper()
		h := home()
		if h.Stage != engine.StagePartial || len(h.Problems) != 1 || h.Problems[0].ID != workspace.KubeconfigFile || !strings.HasPrefix(h.Problems[0].Remedy, "restore the file from your copy") {
			t.Errorf("stage %s, problems %+v", h.Stage, h.Problems)
		}
		for _, n := range h.Next {
			if strings.Contains(n.Command, " init") {
				t.Errorf("suggested is %q, which cannot succeed", n.Command)
			}
		}
		_, err := s.engine().Check(t.Context(), check.Request{}, func(plan.Event) {})
		if plan.ExitCode(err) != plan.ExitUsage || !strings.HasPrefix(plan.Remedy(err), "restore the file from your copy") {
			t.Errorf("check: %v (remedy %q)", err, plan.Remedy(err))
		}
	}
	lost()
	if _, _, err := s.init(t.Context(), nil); err == nil {
		t.Fatal("init went on without a kubeconfig")
	}
	lost()
	if err := os.WriteFile(filepath.Join(s.dir, workspace.KubeconfigFile), []byte(kubeconfig), 0o600); err != nil {
		t.Fatal(err)
	}
	h := home()
	if len(h.Runs) != 2 || h.Runs[0].Status == plan.StateDone {
		t.Fatalf("runs %+v", h.Runs)
	}
	if h.Stage != engine.StageCluster || len(h.Problems) > 0 {
		t.Errorf("with the file restored: stage %s, problems %+v", h.Stage, h.Problems)
	}

	// A run that ended before the master secret was written was of an earlier cluster.
	later := time.Now().Add(time.Hour)
	if err := os.Chtimes(filepath.Join(s.dir, workspace.MasterSecretFile), later, later); err != nil {
		t.Fatal(err)
	}
	if h := home(); h.Stage != engine.StagePartial {
		t.Errorf("with runs of an earlier cluster: stage %s", h.Stage)
	}
}

// A workspace whose first enrolment was interrupted has no machines yet: the next step is to add them, and not init.
func TestHomeWithoutEnrolledMachines(t *testing.T) {
	ws, err := workspace.OpenWorkspace(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	b, err := workspace.GenerateConfig("machines", workspace.GenerateOptions{})
	if err == nil {
		_, err = ws.WriteConfig(b)
	}
	if err == nil {
		_, err = ws.Enrolment()
	}
	if err != nil {
		t.Fatal(err)
	}
	h, err := engine.New(ws, engine.Deps{}).Home(t.Context())
	if err != nil || h.Stage != engine.StageConfigured || len(h.Next) == 0 || !strings.Contains(h.Next[0].Command, "machine add") {
		t.Errorf("stage %s, next %+v, %v", h.Stage, h.Next, err)
	}
	if err := ws.AddMachine(workspace.Machine{Name: "a", Address: "10.0.0.11", Group: "control-plane", Key: "sha256:" + strings.Repeat("a", 64)}); err != nil {
		t.Fatal(err)
	}
	if h, err = engine.New(ws, engine.Deps{}).Home(t.Context()); err != nil || h.Stage != engine.StageReady {
		t.Errorf("with a machine: stage %s, %v", h.Stage, err)
	}
}

// A configuration with placeholders of measurements is what machines of a vendor begin with. Everything else in it counts.
func TestHomeBeforeInfrastructureIsCreated(t *testing.T) {
	dir := t.TempDir()
	ws, err := workspace.OpenWorkspace(dir)
	if err != nil {
		t.Fatal(err)
	}
	b, err := workspace.GenerateConfig("gcp", workspace.GenerateOptions{Name: "demo"})
	if err != nil {
		t.Fatal(err)
	}
	write := func(text string) engine.Home {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, workspace.ConfigFile), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		h, err := engine.New(ws, engine.Deps{}).Home(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return h
	}
	h := write(string(b))
	if h.Stage != engine.StageConfigured || len(h.Problems) > 0 || len(h.Next) == 0 || !strings.Contains(h.Next[0].Command, "infra plan") {
		t.Errorf("stage %s, problems %+v, next %+v", h.Stage, h.Problems, h.Next)
	}
	_, err = engine.New(ws, engine.Deps{}).Status(t.Context())
	if e, ok := errors.AsType[*plan.Error](err); !ok || !strings.Contains(e.Remedy, "infra create") {
		t.Errorf("status: %+v", err)
	}
	h = write(strings.Replace(string(b), "project: my-project", "project: My Project", 1))
	if len(h.Problems) != 1 || len(h.Next) == 0 || !strings.Contains(h.Next[0].Command, "config validate") {
		t.Errorf("a wrong project: problems %+v, next %+v", h.Problems, h.Next)
	}
}
