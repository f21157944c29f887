package engine_test

import (
	"slices"
	"strings"
	"testing"

	"constellation/engine"
	"constellation/engine/check"
	"constellation/engine/cluster"
	"constellation/engine/plan"
	"constellation/engine/workspace"
)

// A tag of etcd's image is set by the hop that needs it and removed by the next one, which knows it by
// the target. Tags of users stay.
func TestApplySetsAndRemovesTheTagOfEtcd(t *testing.T) {
	const between = "3.6.11-0"
	for name, tt := range map[string]struct {
		runs, target, tag string // etcd, and its tag in the target and in kubeadm's configuration
		kubernetes        string // after the hop
		wantTarget, want  string
		step              bool
		exit              int
		skip              []string
	}{
		"the hop of etcd":                   {runs: "3.6.8-0", kubernetes: "v1.36.3", wantTarget: between, want: between, step: true, exit: plan.ExitDone},
		"the hop after it":                  {runs: between, target: between, tag: between, kubernetes: "v1.37.2", step: true, exit: plan.ExitDone},
		"the hop after a user's tag":        {runs: between, tag: between, kubernetes: "v1.37.2", want: between, exit: plan.ExitDone},
		"a user's tag in its place":         {runs: between, target: between, tag: "3.6.12-0", kubernetes: "v1.37.2", want: "3.6.12-0", step: true, exit: plan.ExitDone},
		"a user's tag before the hop":       {runs: "3.6.8-0", tag: "3.6.9-0", want: "3.6.9-0", step: true, exit: plan.ExitBlocked},
		"the hop after it, without target":  {runs: between, target: between, tag: between, kubernetes: "v1.36.3", wantTarget: between, want: between, exit: plan.ExitDone, skip: []string{check.StepTarget}},
		"the hop was interrupted before it": {runs: "3.6.8-0", tag: between, kubernetes: "v1.36.3", wantTarget: between, want: between, step: true, exit: plan.ExitDone},
	} {
		t.Run(name, func(t *testing.T) {
			s := newApplyStage(t)
			s.cloud.kubernetes = append(s.cloud.kubernetes, v("v1.37.2"))
			r := &s.inside.running
			r.Services, r.ControlPlaneImage, r.WorkerImage = at("v1.1.0"), at("v1.1.0"), at("v1.1.0")
			r.Kubernetes, r.ControlPlaneKubelet, r.WorkerKubelet, r.Etcd = at("v1.36.3"), at("v1.36.3"), at("v1.36.3"), tt.runs
			r.Target.ImageVersion, r.Target.Kubernetes, r.Target.Etcd = "v1.1.0", "v1.36.3", tt.target
			for i := range r.Nodes {
				r.Target.Members = append(r.Target.Members, cluster.EtcdMember{Node: r.Nodes[i].Name, Version: strings.TrimSuffix(tt.runs, "-0")})
			}
			for old, now := range map[string]string{"image: v1.0.0": "image: v1.1.0", "v1.35.4": "v1.36.3"} {
				s.edit(old, now)
			}
			if err := s.cluster.SetNodeTarget(t.Context(), r.Target); err != nil {
				t.Fatal(err)
			}
			if err := s.cluster.SetEtcdTag(t.Context(), "", tt.tag); err != nil {
				t.Fatal(err)
			}
			_, events, err := s.apply(t.Context(), engine.ApplyRequest{PrepareRequest: engine.PrepareRequest{Request: check.Request{Kubernetes: v("v1.37.2")}}, Detach: true, Skip: tt.skip}, nil)
			if plan.ExitCode(err) != tt.exit {
				t.Fatalf("%v (exit %d), want exit %d; steps %q", err, plan.ExitCode(err), tt.exit, steps(events))
			}
			if tag, err := s.cluster.EtcdTag(t.Context()); err != nil || tag != tt.want {
				t.Errorf("the tag is %q, %v, want %q", tag, err, tt.want)
			}
			if has := slices.ContainsFunc(steps(events), func(s string) bool { return strings.HasPrefix(s, engine.StepEtcdTag) }); has != tt.step {
				t.Errorf("steps %q", steps(events))
			}
			if err != nil || tt.skip != nil {
				return
			}
			target, err := s.cluster.NodeTarget(t.Context())
			if err != nil || target.Etcd != tt.wantTarget || target.Kubernetes != tt.kubernetes || target.KeepWorkers != (tt.wantTarget != "") {
				t.Errorf("the target is %+v, %v", target, err)
			}
		})
	}
}

// A new cluster starts with the etcd that the next minor needs, and its target records who set the
// tag. Another init leaves both as they are.
func TestInitStartsWithTheEtcdOfTheNextMinor(t *testing.T) {
	for name, tt := range map[string]struct {
		kubernetes string
		ignores    bool
		later      string // tag in the target when init runs again
		want       string
	}{
		"etcd is new enough":              {kubernetes: "v1.35.4"},
		"the next minor needs a newer":    {kubernetes: "v1.36.3", want: "3.6.11-0"},
		"a machine of an older image":     {kubernetes: "v1.36.3", ignores: true},
		"a later hop has removed the tag": {kubernetes: "v1.36.3", want: "3.6.11-0", later: "none"},
		"a later hop has set one":         {kubernetes: "v1.35.4", later: "3.6.11-0"},
	} {
		t.Run(name, func(t *testing.T) {
			s := newStage(t, 1, 1)
			s.machines[0].ignores = tt.ignores
			s.cloud.mirrored = tt.kubernetes
			if tt.kubernetes != "v1.35.4" {
				s.edit(workspace.ConfigFile, "v1.35.4", tt.kubernetes)
			}
			_, p := s.mustInit()
			if has := strings.Contains(p.Steps[1].Effect, "etcd 3.6.11-0, which the next minor needs"); has != (tt.kubernetes == "v1.36.3") {
				t.Errorf("the plan has %q", p.Steps[1].Effect)
			}
			target, err := s.cluster.NodeTarget(t.Context())
			if err != nil || target.Etcd != tt.want {
				t.Fatalf("the target has the tag %q, %v, want %q", target.Etcd, err, tt.want)
			}
			if tag, err := s.cluster.EtcdTag(t.Context()); err != nil || tag != tt.want {
				t.Errorf("kubeadm's configuration has the tag %q, %v, want %q", tag, err, tt.want)
			}
			if tt.later != "" {
				target.Etcd = strings.TrimPrefix(tt.later, "none")
				if err := s.cluster.SetNodeTarget(t.Context(), target); err != nil {
					t.Fatal(err)
				}
			}
			calls := len(s.cluster.Calls())
			if _, _, err := s.init(t.Context(), nil); plan.ExitCode(err) != plan.ExitNothing || len(s.cluster.Calls()) != calls {
				t.Errorf("init again: %v, %v", err, s.cluster.Calls()[calls:])
			}
		})
	}
}
