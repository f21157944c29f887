package engine_test

import (
	"os"
	"path/filepath"
	"testing"

	"constellation/engine"
	"constellation/engine/cluster"
	"constellation/engine/plan"
	"constellation/engine/workspace"
)

// operatorReplicas notes the replicas that the operator's chart is applied with; nil is the
// chart's own number.
func operatorReplicas(hook func(func(cluster.Chart) bool)) *any {
	var replicas any = "never applied"
	hook(func(c cluster.Chart) bool {
		if c.Name == "constellation-operator" {
			values, _ := c.Values["operator"].(map[string]any)
			replicas = values["replicas"]
		}
		return false
	})
	return &replicas
}

func TestInitRunsASecondOperatorWithSeveralControlPlanes(t *testing.T) {
	for controlPlanes, want := range map[int]any{1: nil, 3: 2} {
		s := newStage(t, controlPlanes, 0)
		got := operatorReplicas(s.cluster.NeverReady)
		s.mustInit()
		if *got != want {
			t.Errorf("%d control planes: the operator has %v replicas, want %v", controlPlanes, *got, want)
		}
	}
}

func TestApplyRunsASecondOperatorWithSeveralControlPlanes(t *testing.T) {
	for _, tt := range []struct {
		name  string
		extra []cluster.Node // besides control-plane-0
		want  any
	}{
		{name: "one control plane", want: nil},
		{name: "one control plane that is being replaced", extra: []cluster.Node{{Name: "control-plane-1", Heir: "control-plane-0"}}, want: nil},
		{name: "two control planes", extra: []cluster.Node{{Name: "control-plane-1"}}, want: 2},
		{name: "three control planes, two of them cordoned or not ready", extra: []cluster.Node{{Name: "control-plane-1", Cordoned: true}, {Name: "control-plane-2", State: plan.NodeNotReady}}, want: 2},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newApplyStage(t)
			for _, n := range tt.extra {
				n.Group, n.Role, n.Image, n.Kubernetes = "control-plane", "control-plane", "sandboxes/demo/images/v1.0.0", "v1.35.4"
				s.inside.running.Nodes = append(s.inside.running.Nodes, n)
			}
			got := operatorReplicas(s.cluster.NeverReady)
			if err := os.Remove(filepath.Join(s.dir, workspace.ConfigFile)); err != nil { // it counts what there is
				t.Fatal(err)
			}
			if _, err := s.execute(engine.ApplyRequest{}); err != nil {
				t.Fatal(err)
			}
			if *got != tt.want {
				t.Errorf("the operator has %v replicas, want %v", *got, tt.want)
			}
		})
	}
}
