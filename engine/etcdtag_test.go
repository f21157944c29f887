package engine_test

import (
	"slices"
	"strings"
	"testing"

	"constellation/engine"
	"constellation/engine/check"
	"constellation/engine/cluster"
	"constellation/engine/plan"
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
