package engine_test

import (
	"slices"
	"strings"
	"testing"

	"constellation/engine"
)

// TestComponentsInUseGetTheirStatement prepares an upgrade of a cluster whose ConfigMaps an
// older program published. Until the control planes are upgraded, machines of the new image
// join with what is there, so it has to be vouched for before the target is set.
func TestComponentsInUseGetTheirStatement(t *testing.T) {
	publish := func(s *checkStage, k string, change func(*engine.Components)) engine.Components {
		t.Helper()
		l, err := s.cloud.Components(t.Context(), v(k))
		if err != nil {
			t.Fatal(err)
		}
		c := engine.Components{Kubernetes: k, List: l.List}
		change(&c)
		c.Name = engine.ComponentsName(c.List)
		if err := s.cluster.PublishComponents(t.Context(), c); err != nil {
			t.Fatal(err)
		}
		return c
	}
	use := func(s *checkStage, c engine.Components) {
		t.Helper()
		s.inside.running.Target.Components = c.Name
		if err := s.cluster.SetNodeTarget(t.Context(), s.inside.running.Target); err != nil {
			t.Fatal(err)
		}
	}
	as := func(*engine.Components) {}
	blocks := func(p *engine.Plan) (ids []string) {
		for _, f := range p.Blocked() {
			ids = append(ids, f.ID)
		}
		return ids
	}

	t.Run("what the cloud vouches for", func(t *testing.T) {
		s := newPrepareStage(t)
		old := publish(s, "v1.35.4", as)
		use(s, old)
		older := publish(s, "v1.34.2", as) // of a worker that was left behind
		s.inside.running.Nodes[1].Components = older.Name
		p, err := s.engine().PlanPrepare(t.Context(), both, func(engine.Event) {})
		if err != nil || len(p.Blocked()) > 0 {
			t.Fatalf("%v, %v", err, blocks(p))
		}
		if i := slices.IndexFunc(p.Steps, func(x engine.Step) bool { return x.ID == engine.StepComponents }); i != 0 || p.Steps[i].Finished ||
			!slices.ContainsFunc(p.Steps[i].Details, func(d string) bool {
				return strings.Contains(d, "of Kubernetes v1.35.4, gets the release builder's statement")
			}) {
			t.Errorf("steps %+v", p.Steps)
		}
		if _, _, err := s.prepare(t.Context(), both); err != nil {
			t.Fatal(err)
		}
		for _, k := range []string{"v1.34.2", "v1.35.4", "v1.36.3"} {
			want, err := s.cloud.Components(t.Context(), v(k))
			if err != nil {
				t.Fatal(err)
			}
			if got, err := s.cluster.Components(t.Context(), engine.ComponentsName(want.List)); err != nil || got.Statement != want.Statement || !slices.Equal(got.List, want.List) {
				t.Errorf("Kubernetes %s: %+v, %v", k, got, err)
			}
		}
		p, err = s.engine().PlanPrepare(t.Context(), both, func(engine.Event) {})
		if err != nil || !p.Steps[0].Finished || len(p.Steps[0].Details) > 0 {
			t.Errorf("planned again: %v, %+v", err, p.Steps[0])
		}
	})
	t.Run("what nobody vouches for any more", func(t *testing.T) {
		s := newPrepareStage(t)
		use(s, publish(s, "v1.35.4", func(c *engine.Components) { c.List[0].Digest = "sha256:" + strings.Repeat("cd", 32) }))
		p, err := s.engine().PlanPrepare(t.Context(), both, func(engine.Event) {})
		if err != nil || !slices.Equal(blocks(p), []string{"components-statement"}) {
			t.Errorf("%v, blocked by %v", err, blocks(p))
		}
	})
	t.Run("what somebody else vouches for", func(t *testing.T) {
		s := newPrepareStage(t)
		use(s, publish(s, "v1.35.4", func(c *engine.Components) {
			c.List[0].Digest, c.Statement = "sha256:"+strings.Repeat("cd", 32), "of a release builder"
		}))
		if p, err := s.engine().PlanPrepare(t.Context(), both, func(engine.Event) {}); err != nil || len(p.Blocked()) > 0 {
			t.Errorf("%v, blocked by %v", err, blocks(p))
		}
	})
}
