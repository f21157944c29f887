package compat

import (
	"cmp"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"constellation/engine/plan"
	"constellation/engine/release"
	"constellation/engine/version"
)

// told formats a path, one line per hop: CLI, image, Kubernetes and replaced nodes.
func told(hops []Hop) []string {
	var out []string
	for _, h := range hops {
		s := h.To.Release + " " + h.To.Image + " " + h.To.Kubernetes
		if h.ReplaceControlPlanes {
			s += " control-planes"
		}
		if h.ReplaceWorkers {
			s += " workers"
		}
		out = append(out, s)
	}
	return out
}

func TestPaths(t *testing.T) {
	real := NewMatrix(two())
	minors := NewMatrix([]release.Summary{
		invented("v1.0.0", "", "v1.33.0", "v1.34.0"),
		invented("v1.1.0", "v1.0.0", "v1.34.0", "v1.35.0"),
		faulty(invented("v1.1.1", "v1.0.0", "v1.34.0", "v1.35.0")),
		invented("v1.2.0", "v1.1.0", "v1.35.0", "v1.36.0"),
		invented("v1.3.0-rc.1", "v1.2.0", "v1.36.0", "v1.37.0"),
	})
	// One release supports many minors of Kubernetes, so workers may stay behind.
	long := NewMatrix([]release.Summary{invented("v1.0.0", "", "v1.33.0", "v1.34.0", "v1.35.0", "v1.36.0", "v1.37.0", "v1.38.0")})
	old := NewMatrix([]release.Summary{invented("v1.0.0", "", "v1.33.1=3.5.20-0", "v1.33.5=3.5.24-0", "v1.33.9=3.5.27-0", "v1.34.2=3.6.5-0")})
	floor := NewMatrix([]release.Summary{invented("v1.0.0", "", "v1.35.8=3.6.6-0", "v1.36.3=3.6.8-0", "v1.37.2=3.7.0-0")})
	raised := func(r Running) Running { r.Etcd = raisedEtcd; return r }
	broken := NewMatrix([]release.Summary{
		invented("v1.0.0", "", "v1.34.0"), faulty(invented("v1.1.0", "v1.0.0", "v1.34.0")), invented("v1.2.0", "v1.1.0", "v1.34.0"),
	})
	hole := NewMatrix([]release.Summary{invented("v1.0.0", "", "v1.34.0"), invented("v1.2.0", "v1.1.0", "v1.34.0")})
	target := func(r Running, kubernetes string) Running { r.Target.Kubernetes = kubernetes; return r }
	noFaults := func(v version.Version) (bool, string, string) {
		return v.String() != "v1.36.4", "the mirror has no v1.36.4", "run `constellation sandbox fetch v1.36.4`"
	}
	for _, tt := range []struct {
		name    string
		m       *Matrix
		now     Running
		goal    Planned // zero is Goal
		offer   Offer
		want    []string
		blocked []string
	}{
		{name: "from the oldest to the newest in three hops, with workers replaced at the end", m: real, now: at("v1.0.0", "v1.0.0", "v1.34.3"), want: []string{
			"v1.0.0 v1.0.0 v1.35.4 control-planes", "v1.1.0 v1.1.0 v1.35.4 control-planes", "v1.1.0 v1.1.0 v1.36.4 control-planes workers",
		}},
		{name: "from the middle in two hops", m: real, now: at("v1.0.0", "v1.0.0", "v1.35.4"), want: []string{
			"v1.1.0 v1.1.0 v1.35.4 control-planes", "v1.1.0 v1.1.0 v1.36.4 control-planes workers",
		}},
		{name: "from the newest release in one hop", m: real, now: at("v1.1.0", "v1.1.0", "v1.35.4"), want: []string{"v1.1.0 v1.1.0 v1.36.4 control-planes workers"}},
		{name: "a patch only", m: real, now: at("v1.1.0", "v1.1.0", "v1.36.3"), want: []string{"v1.1.0 v1.1.0 v1.36.4 control-planes workers"}},
		{name: "a patch that is not the newest", m: real, now: at("v1.1.0", "v1.1.0", "v1.36.0"), goal: to("", "", "v1.36.3"), want: []string{"v1.1.0 v1.1.0 v1.36.3 control-planes workers"}},
		{name: "nothing is newer", m: real, now: at("v1.1.0", "v1.1.0", "v1.36.4")},
		{name: "without workers", m: real, now: workers(at("v1.0.0", "v1.0.0", "v1.35.4"), "", ""), want: []string{
			"v1.1.0 v1.1.0 v1.35.4 control-planes", "v1.1.0 v1.1.0 v1.36.4 control-planes",
		}},
		{name: "only the workers are behind", m: real, now: workers(at("v1.1.0", "v1.1.0", "v1.36.4"), "v1.0.0", "v1.34.3"), want: []string{"v1.1.0 v1.1.0 v1.36.4 workers"}},
		{name: "a release brings its image and leaves Kubernetes", m: real, now: at("v1.0.0", "v1.0.0", "v1.35.4"), goal: to("v1.1.0", "", ""), want: []string{"v1.1.0 v1.1.0 v1.35.4 control-planes workers"}},
		{name: "Kubernetes of the running release keeps the release", m: real, now: at("v1.0.0", "v1.0.0", "v1.34.3"), goal: to("", "", "v1.35.3"), want: []string{"v1.0.0 v1.0.0 v1.35.3 control-planes workers"}},
		{name: "Kubernetes of another release upgrades the release", m: real, now: at("v1.0.0", "v1.0.0", "v1.35.4"), goal: to("", "", "v1.36.3"), want: []string{
			"v1.1.0 v1.1.0 v1.35.4 control-planes", "v1.1.0 v1.1.0 v1.36.3 control-planes workers",
		}},
		{name: "patch in no release stays until Kubernetes is upgraded", m: real, now: at("v1.0.0", "v1.0.0", "v1.35.99"), want: []string{
			"v1.1.0 v1.1.0 v1.35.99 control-planes", "v1.1.0 v1.1.0 v1.36.4 control-planes workers",
		}},
		{name: "patch in no release and nothing newer", m: real, now: at("v1.1.0", "v1.1.0", "v1.36.99")},
		{name: "an interrupted upgrade of the services is completed first", m: real, now: func() Running {
			r := at("v1.1.0", "v1.0.0", "v1.35.4")
			r.Services = span("v1.0.0-v1.1.0")
			return r
		}(), want: []string{"v1.1.0 v1.1.0 v1.35.4 control-planes", "v1.1.0 v1.1.0 v1.36.4 control-planes workers"}},
		{name: "a rollout ends before the next minor", m: real, now: func() Running {
			r := workers(at("v1.0.0", "v1.0.0", "v1.34.3-v1.35.4"), "v1.0.0", "v1.34.3")
			r.ControlPlaneKubelet = span("v1.34.3-v1.35.4")
			return r
		}(), want: []string{
			"v1.0.0 v1.0.0 v1.35.4 control-planes", "v1.1.0 v1.1.0 v1.35.4 control-planes", "v1.1.0 v1.1.0 v1.36.4 control-planes workers",
		}},
		{name: "the target of a rollout that has not begun counts as running", m: real, now: target(at("v1.1.0", "v1.1.0", "v1.35.4"), "v1.36.3"), want: []string{"v1.1.0 v1.1.0 v1.36.4 control-planes workers"}},
		{name: "versions that the provider does not offer are excluded", m: real, now: at("v1.1.0", "v1.1.0", "v1.35.4"), offer: Offer{Kubernetes: noFaults}, want: []string{"v1.1.0 v1.1.0 v1.36.3 control-planes workers"}},
		{name: "three minors of releases with a faulty one in between", m: minors, now: at("v1.0.0", "v1.0.0", "v1.33.0"), want: []string{
			"v1.0.0 v1.0.0 v1.34.0 control-planes",
			"v1.1.0 v1.1.0 v1.34.0 control-planes",
			"v1.1.0 v1.1.0 v1.35.0 control-planes workers",
			"v1.2.0 v1.2.0 v1.35.0 control-planes",
			"v1.2.0 v1.2.0 v1.36.0 control-planes workers",
		}},
		{name: "upgrade from a faulty release", m: NewMatrix([]release.Summary{faulty(invented("v1.0.0", "", "v1.34.0")), invented("v1.0.1", "v1.0.0", "v1.34.0")}), now: at("v1.0.0", "v1.0.0", "v1.34.0"), want: []string{
			"v1.0.1 v1.0.1 v1.34.0 control-planes workers",
		}},
		{name: "a pre-release only if it is named", m: minors, now: at("v1.2.0", "v1.2.0", "v1.36.0"), goal: to("v1.3.0-rc.1", "", ""), want: []string{"v1.3.0-rc.1 v1.3.0-rc.1 v1.36.0 control-planes workers"}},
		{name: "kubelets stay three minors behind at most", m: long, now: at("v1.0.0", "v1.0.0", "v1.33.0"), want: []string{
			"v1.0.0 v1.0.0 v1.34.0 control-planes", "v1.0.0 v1.0.0 v1.35.0 control-planes", "v1.0.0 v1.0.0 v1.36.0 control-planes workers",
			"v1.0.0 v1.0.0 v1.37.0 control-planes", "v1.0.0 v1.0.0 v1.38.0 control-planes workers",
		}},
		{name: "kubelets stay two minors behind", m: long, now: at("v1.0.0", "v1.0.0", "v1.33.0"), goal: to("", "", "v1.36.0"), want: []string{
			"v1.0.0 v1.0.0 v1.34.0 control-planes", "v1.0.0 v1.0.0 v1.35.0 control-planes", "v1.0.0 v1.0.0 v1.36.0 control-planes workers",
		}},
		{name: "etcd goes to its newest patch before the next minor", m: old, now: at("v1.0.0", "v1.0.0", "v1.33.1"), want: []string{
			"v1.0.0 v1.0.0 v1.33.9 control-planes", "v1.0.0 v1.0.0 v1.34.2 control-planes workers",
		}},
		{name: "an etcd below the floor of the next minor", m: floor, now: at("v1.0.0", "v1.0.0", "v1.36.3"), goal: to("v1.0.0", "v1.0.0", "v1.37.2"), blocked: []string{"etcd-step"}},
		{name: "an etcd that was raised by its tag stays raised", m: floor, now: raised(at("v1.0.0", "v1.0.0", "v1.35.8")), goal: to("v1.0.0", "v1.0.0", "v1.37.2"), want: []string{
			"v1.0.0 v1.0.0 v1.36.3 control-planes", "v1.0.0 v1.0.0 v1.37.2 control-planes workers",
		}},

		{name: "an impossible Kubernetes", m: real, now: at("v1.0.0", "v1.0.0", "v1.35.4"), goal: to("", "", "v1.37.0"), blocked: []string{"kubernetes-offered"}},
		{name: "an older release", m: real, now: at("v1.1.0", "v1.1.0", "v1.35.4"), goal: to("v1.0.0", "", ""), blocked: []string{"never-down"}},
		{name: "an unknown release", m: real, now: at("v1.1.0", "v1.1.0", "v1.35.4"), goal: to("v1.2.0", "", ""), blocked: []string{"unknown-release"}},
		{name: "another major", m: NewMatrix([]release.Summary{invented("v1.0.0", "", "v1.34.0"), invented("v2.0.0", "v1.0.0", "v1.34.0")}), now: at("v1.0.0", "v1.0.0", "v1.34.0"), goal: to("v2.0.0", "", ""), blocked: []string{"same-major"}},
		{name: "a version that the provider does not offer is not reachable", m: real, now: at("v1.1.0", "v1.1.0", "v1.35.4"), goal: to("", "", "v1.36.4"), offer: Offer{Kubernetes: noFaults}, blocked: []string{"offered-kubernetes"}},
		{name: "the only path leads through a faulty release", m: broken, now: at("v1.0.0", "v1.0.0", "v1.34.0"), goal: to("v1.2.0", "", ""), blocked: []string{"faulty"}},
		{name: "the newest reachable version is the running one behind a faulty release", m: broken, now: at("v1.0.0", "v1.0.0", "v1.34.0")},
		{name: "the release in between is unknown", m: hole, now: at("v1.0.0", "v1.0.0", "v1.34.0"), goal: to("v1.2.0", "", ""), blocked: []string{"minor-drift", "upgrade-from", "cli-services", "image-services"}},
		{name: "the path ends at an unsupported Kubernetes", m: NewMatrix([]release.Summary{invented("v1.0.0", "", "v1.33.0"), invented("v1.1.0", "v1.0.0", "v1.34.0")}), now: at("v1.0.0", "v1.0.0", "v1.33.0"), goal: to("v1.1.0", "", ""), blocked: []string{"services-support-kubernetes"}},
		{name: "the running services are unknown", m: real, now: func() Running { r := at("v1.0.0", "v1.0.0", "v1.35.4"); r.Services = Span{}; return r }(), goal: to("v1.1.0", "", ""), blocked: []string{
			"same-major", "never-down", "minor-drift", "upgrade-from", "cli-services",
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			goal := tt.goal
			if goal == (Planned{}) {
				goal = tt.m.Goal(tt.now, Planned{}, tt.offer)
			}
			hops, why := tt.m.Path(tt.now, goal, tt.offer)
			if diff := gocmp.Diff(tt.want, told(hops)); diff != "" {
				t.Errorf("to %v: %s%+v", goal, diff, why)
			}
			got := append(ids(why, plan.Block), ids(why, plan.NotChecked)...)
			if !slices.Equal(got, tt.blocked) {
				t.Errorf("blocked by %v, want %v: %+v", got, tt.blocked, why)
			}
			now := tt.now
			for i, h := range hops {
				if h.Number != i+1 || i > 0 && h.From != hops[i-1].To {
					t.Errorf("hop %d does not start where the previous one ends: %+v", i+1, h)
				}
				if found := Blocks(tt.m.Check(h.CLI, now, h.Planned(), tt.offer)); len(found) > 0 {
					t.Errorf("hop %d is forbidden: %+v", i+1, found)
				}
				now = reach(now, h)
			}
		})
	}
}

// raisedEtcd is the tag in etcd.local.imageTag of a cluster that runs it. Upgrades of Kubernetes
// keep it.
const raisedEtcd = "3.6.11-0"

// reach returns the cluster after a hop.
func reach(now Running, h Hop) Running {
	p := h.Planned()
	etcd := now.Etcd
	if !now.Kubernetes.Is(p.Kubernetes) && etcd != raisedEtcd {
		etcd = ""
	}
	if p.Etcd != "" {
		etcd = p.Etcd
	}
	next := Running{Services: At(p.Services), ControlPlaneImage: At(p.Image), Kubernetes: At(p.Kubernetes), ControlPlaneKubelet: At(p.Kubernetes), WorkerImage: now.WorkerImage, WorkerKubelet: now.WorkerKubelet, Etcd: etcd}
	if h.ReplaceWorkers {
		next.WorkerImage, next.WorkerKubelet = At(p.Image), At(p.Kubernetes)
	}
	return next
}

func TestHopReasons(t *testing.T) {
	m := NewMatrix(two())
	now := at("v1.0.0", "v1.0.0", "v1.34.3")
	hops, _ := m.Path(now, m.Goal(now, Planned{}, Offer{}), Offer{})
	want := []Hop{
		{
			Number: 1, CLI: ver("v1.0.0"), From: plan.Target{Release: "v1.0.0", Image: "v1.0.0", Kubernetes: "v1.34.3"}, To: plan.Target{Release: "v1.0.0", Image: "v1.0.0", Kubernetes: "v1.35.4"}, ReplaceControlPlanes: true,
			Why: []string{
				"precedes hop 2: release v1.1.0 does not support Kubernetes v1.34 and needs v1.35 first, provided by this hop",
				"workers stay: kubelets v1.34 may be one minor behind",
			},
			Get: "get constellation v1.0.0 from the publisher of this program",
		},
		{
			Number: 2, CLI: ver("v1.1.0"), From: plan.Target{Release: "v1.0.0", Image: "v1.0.0", Kubernetes: "v1.35.4"}, To: plan.Target{Release: "v1.1.0", Image: "v1.1.0", Kubernetes: "v1.35.4"}, ReplaceControlPlanes: true,
			Why: []string{
				"release v1.1.0 does not support Kubernetes v1.34 and needs v1.35 first, provided by hop 1",
				"workers stay: kubelets v1.34 may be one minor behind",
			},
		},
		{
			Number: 3, CLI: ver("v1.1.0"), From: plan.Target{Release: "v1.1.0", Image: "v1.1.0", Kubernetes: "v1.35.4"}, To: plan.Target{Release: "v1.1.0", Image: "v1.1.0", Kubernetes: "v1.36.4"}, ReplaceControlPlanes: true, ReplaceWorkers: true,
			Why: []string{"Kubernetes v1.36 needs image v1.1 on the control planes first, provided by hop 2"},
		},
	}
	if diff := gocmp.Diff(want, hops); diff != "" {
		t.Error(diff)
	}

	long := NewMatrix([]release.Summary{invented("v1.1.0", "", "v1.33.0", "v1.34.0", "v1.35.0", "v1.36.0", "v1.37.0", "v1.38.0")})
	hops, _ = long.Path(at("v1.1.0", "v1.1.0", "v1.33.0"), to("", "", "v1.38.0"), Offer{})
	var got []string
	for _, h := range hops {
		got = append(got, h.Why[len(h.Why)-1])
	}
	if diff := gocmp.Diff([]string{
		"workers stay: kubelets v1.33 may be one minor behind",
		"workers stay: kubelets v1.33 may be two minors behind",
		"workers are replaced now; otherwise, in hop 4, kubelets v1.33.0 of workers would be more than three minors behind Kubernetes v1.37.0",
		"workers stay: kubelets v1.36 may be one minor behind",
		"Kubernetes goes up one minor at a time: v1.38 needs v1.37 first, provided by hop 4",
	}, got); diff != "" {
		t.Error(diff)
	}
}

// The hop of etcd comes where it is needed, changes nothing else and keeps workers.
func TestEtcdHop(t *testing.T) {
	floor := NewMatrix([]release.Summary{invented("v1.0.0", "", "v1.35.8=3.6.6-0", "v1.36.3=3.6.8-0", "v1.36.4=3.6.8-0", "v1.37.2=3.7.0-0")})
	runs := func(r Running, etcd string) Running { r.Etcd = etcd; return r }
	now := runs(at("v1.0.0", "v1.0.0", "v1.36.3"), "3.6.8-0")
	same := plan.Target{Release: "v1.0.0", Image: "v1.0.0", Kubernetes: "v1.36.3"}
	from, to, end := same, same, same
	from.Etcd, to.Etcd, end.Kubernetes = "3.6.8-0", "3.6.11-0", "v1.37.2"
	why := "etcd v3.7 of Kubernetes v1.37 can be started on data of etcd v3.6.11 or newer, and v3.6.8 runs, provided by "
	want := []Hop{
		{Number: 1, CLI: ver("v1.0.0"), From: from, To: to, ReplaceControlPlanes: true, Why: []string{"precedes hop 2: " + why + "this hop"}, Get: "get constellation v1.0.0 from the publisher of this program"},
		{Number: 2, CLI: ver("v1.0.0"), From: same, To: end, ReplaceControlPlanes: true, ReplaceWorkers: true, Why: []string{why + "hop 1"}, Get: "get constellation v1.0.0 from the publisher of this program"},
	}
	hops, blocked := floor.Path(now, floor.Goal(now, Planned{}, Offer{}), Offer{})
	if diff := gocmp.Diff(want, hops); diff != "" || len(blocked) > 0 {
		t.Error(diff, blocked)
	}
	for name, tt := range map[string]struct {
		now  Running
		goal string
		want []string // Kubernetes and etcd after each hop
	}{
		"from an older minor":         {now: runs(at("v1.0.0", "v1.0.0", "v1.35.8"), "3.6.6-0"), goal: "v1.37.2", want: []string{"v1.36.4 ", "v1.36.4 3.6.11-0", "v1.37.2 "}},
		"not for a patch":             {now: now, goal: "v1.36.4", want: []string{"v1.36.4 "}},
		"not for an etcd above it":    {now: runs(now, "3.6.12-0"), goal: "v1.37.2", want: []string{"v1.37.2 "}},
		"not for an etcd at it":       {now: runs(now, "3.6.11-0"), goal: "v1.37.2", want: []string{"v1.37.2 "}},
		"not for an etcd outside":     {now: runs(now, ""), goal: "v1.37.2", want: nil},
		"not for a known one outside": {now: func() Running { r := now; r.Etcd, r.ExternalEtcd = "", true; return r }(), goal: "v1.37.2", want: []string{"v1.37.2 "}},
		"before workers catch up":     {now: workers(runs(now, "3.6.8-0"), "v1.0.0", "v1.35.8"), goal: "v1.37.2", want: []string{"v1.36.3 3.6.11-0", "v1.37.2 "}},
		"workers that are left stay":  {now: workers(now, "v1.0.0", "v1.36.3"), goal: "v1.37.2", want: []string{"v1.36.3 3.6.11-0", "v1.37.2 "}},
	} {
		t.Run(name, func(t *testing.T) {
			var got []string
			hops, blocked := floor.Path(tt.now, Planned{Kubernetes: ver(tt.goal)}, Offer{})
			for _, h := range hops {
				got = append(got, h.To.Kubernetes+" "+h.To.Etcd)
				if h.To.Etcd != "" && h.ReplaceWorkers {
					t.Errorf("%+v replaces workers", h)
				}
			}
			if !slices.Equal(got, tt.want) || (len(hops) == 0) != slices.ContainsFunc(blocked, func(r *RuleResult) bool { return r.Rule == "etcd-step" }) {
				t.Errorf("got %q, want %q; blocked %v", got, tt.want, blocked)
			}
		})
	}
	both := Planned{Services: ver("v1.0.0"), Image: ver("v1.0.0"), Kubernetes: ver("v1.37.2"), Etcd: "3.6.11-0"}
	if got := ids(floor.Check(ver("v1.0.0"), now, both, Offer{}), plan.Block); !slices.Contains(got, "etcd-step") {
		t.Errorf("etcd and Kubernetes in one hop: %v", got)
	}
}

// Workers that are upgraded in place skip no minor, so they do not stay where they could if they were replaced.
func TestWorkersInPlaceSkipNoMinor(t *testing.T) {
	m := NewMatrix([]release.Summary{invented("v1.0.0", "", "v1.35.8", "v1.36.4", "v1.37.2")})
	for _, tt := range []struct {
		name string
		now  Running
		want []string // Kubernetes after each hop, and whether workers are upgraded
	}{
		{name: "replaced", now: at("v1.0.0", "v1.0.0", "v1.35.8"), want: []string{"v1.36.4 false", "v1.37.2 true"}},
		{name: "in place", now: inPlace(at("v1.0.0", "v1.0.0", "v1.35.8")), want: []string{"v1.36.4 true", "v1.37.2 true"}},
		{name: "left in place two minors behind", now: inPlace(workers(at("v1.0.0", "v1.0.0", "v1.37.2"), "v1.0.0", "v1.35.8")), want: nil},
		{name: "left in place by an interrupted path", now: inPlace(workers(at("v1.0.0", "v1.0.0", "v1.36.4"), "v1.0.0", "v1.35.8")), want: []string{"v1.36.4 true", "v1.37.2 true"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			var got []string
			hops, _ := m.Path(tt.now, Planned{Kubernetes: ver("v1.37.2")}, Offer{})
			for _, h := range hops {
				got = append(got, fmt.Sprintf("%s %t", h.To.Kubernetes, h.ReplaceWorkers))
			}
			if !slices.Equal(got, tt.want) {
				t.Errorf("got %q, want %q", got, tt.want)
			}
		})
	}
}

// A patch without digests in its release can be installed by a provider with components of its own
// only.
func TestUnpinnedPatchesNeedAProvider(t *testing.T) {
	r := invented("v1.0.0", "", "v1.35.4", "v1.36.3=3.6.8-0")
	r.Kubernetes[1].Unpinned = "its digests are not verified"
	m := NewMatrix([]release.Summary{r})
	now := at("v1.0.0", "v1.0.0", "v1.35.4")
	if goal := m.Goal(now, Planned{}, Offer{}); !goal.Kubernetes.Equal(ver("v1.35.4")) {
		t.Errorf("the goal is %v", goal)
	}
	hops, blocked := m.Path(now, Planned{Kubernetes: ver("v1.36.3")}, Offer{})
	if len(hops) > 0 || len(blocked) != 1 || blocked[0].Rule != "offered-kubernetes" || !strings.Contains(blocked[0].Title, "its digests are not verified") || blocked[0].Remedy == "" {
		t.Errorf("%v, %v", hops, blocked)
	}
	own := Offer{Kubernetes: func(version.Version) (bool, string, string) { return true, "", "" }}
	if hops, blocked := m.Path(now, m.Goal(now, Planned{}, own), own); len(hops) != 1 || len(blocked) > 0 {
		t.Errorf("with a provider of components: %v, %v", hops, blocked)
	}
}

func TestGetCLI(t *testing.T) {
	here := release.Download{OS: runtime.GOOS, Arch: runtime.GOARCH, URL: "https://example.com/constellation-v1.5.0"}
	signed := here
	signed.Digest = "sha256:" + strings.Repeat("ab", 32)
	for _, tt := range []struct {
		name string
		list []release.Download
		want string
	}{
		{name: "no download", want: "get constellation v1.5.0 from the publisher of this program"},
		{name: "with a digest", list: []release.Download{{OS: "plan9"}, signed}, want: "download https://example.com/constellation-v1.5.0 and compare its digest with " + signed.Digest},
		{name: "without a digest", list: []release.Download{here}, want: "download https://example.com/constellation-v1.5.0 (its digest is unknown: ask the publisher)"},
		{name: "for other platforms only", list: []release.Download{{OS: "plan9"}}, want: fmt.Sprintf("build constellation v1.5.0 from source: no download for %s/%s", runtime.GOOS, runtime.GOARCH)},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := invented("v1.5.0", "")
			s.CLI = tt.list
			if got := NewMatrix([]release.Summary{s}).Get(ver("v1.5.0")); got != tt.want {
				t.Errorf("%q, want %q", got, tt.want)
			}
		})
	}
	if got := NewMatrix(nil).Get(ver(version.Release)); got != "" {
		t.Errorf("this program: %q", got)
	}
}

// A path leads from every state of the embedded releases to the newest one.
func TestEmbeddedReleasesReachTheNewest(t *testing.T) {
	m := NewMatrix(ours(t))
	newest := m.releases[len(m.releases)-1]
	var top version.Version
	for _, q := range newest.patches {
		if q.unpinned == "" {
			top = q.version
		}
	}
	for _, k := range m.releases {
		for _, p := range k.patches {
			if p.unpinned != "" {
				continue
			}
			now := at(k.Version.String(), k.Version.String(), p.version.String())
			goal := m.Goal(now, Planned{}, Offer{})
			if !goal.Services.Equal(newest.Version) || !goal.Kubernetes.Equal(top) {
				t.Errorf("from %s and Kubernetes %s only %v is reachable", k.Version, p.version, goal)
			}
			hops, why := m.Path(now, goal, Offer{})
			if len(hops) == 0 && !p.version.Equal(top) || len(hops) > 3 {
				t.Errorf("from %s and Kubernetes %s: %q, %v", k.Version, p.version, told(hops), why)
			}
		}
	}
}

// A brute-force planner as test oracle: it implements the rules of the documentation with
// its own version type, tries every hop and prunes nothing.

// num is MAJOR.MINOR.PATCH as three numbers; the zero value is no version.
type num [3]int

func (n num) v() version.Version {
	if n == (num{}) {
		return version.Version{}
	}
	return ver(fmt.Sprintf("v%d.%d.%d", n[0], n[1], n[2]))
}

func (n num) cmp(o num) int { return slices.Compare(n[:], o[:]) }

type toyRelease struct {
	v, from num
	faulty  bool
	patches []num
}

type toy struct {
	releases   []toyRelease
	etcd       map[num]num // by version of Kubernetes
	badPatches map[num]bool
	noImage    map[num]bool // not offered
	noPatch    map[num]bool
}

func (y *toy) summaries() []release.Summary {
	var out []release.Summary
	for _, r := range y.releases {
		s := release.Summary{Version: r.v.v(), UpgradeFrom: r.from.v()}
		if r.faulty {
			s.Faulty = "it is"
		}
		for _, p := range r.patches {
			k := release.KubernetesSummary{Version: p.v(), Etcd: strings.TrimPrefix(y.etcd[p].v().String(), "v") + "-0"}
			if y.badPatches[p] {
				k.Faulty = "it is"
			}
			s.Kubernetes = append(s.Kubernetes, k)
		}
		out = append(out, s)
	}
	return out
}

func (y *toy) offer() Offer {
	offered := func(not map[num]bool) func(version.Version) (bool, string, string) {
		return func(v version.Version) (bool, string, string) {
			return !not[num{v.Major(), v.Minor(), v.Patch()}], "not there", "fetch it"
		}
	}
	return Offer{Images: offered(y.noImage), Kubernetes: offered(y.noPatch)}
}

// toyState is a cluster without a rollout in progress.
type toyState struct {
	services, image, kubernetes, workerImage, kubelet num
	// etcd runs; zero: that of kubernetes.
	etcd num
}

// etcdOf is the etcd that runs in a state.
func (y *toy) etcdOf(s toyState) num {
	if s.etcd != (num{}) {
		return s.etcd
	}
	return y.etcd[s.kubernetes]
}

// etcdHop reports whether etcd may get v3.6.11 in a hop of its own: the release has a patch of the
// next minor that needs it, and the other rules permit a hop that changes nothing else.
func (y *toy) etcdHop(s toyState, most num) bool {
	e := y.etcdOf(s)
	if e[0] != 3 || e[1] != 6 || e[2] >= 11 || !y.may(s, s.services, s.image, s.kubernetes) {
		return false
	}
	return slices.ContainsFunc(y.find(s.services).patches, func(k num) bool {
		return k[1] == s.kubernetes[1]+1 && y.etcd[k][1] == 7 && !y.badPatches[k] && !y.noPatch[k] && (most == num{} || k.cmp(most) <= 0)
	})
}

func (y *toy) find(v num) *toyRelease {
	for i := range y.releases {
		if y.releases[i].v == v {
			return &y.releases[i]
		}
	}
	return nil
}

func (r *toyRelease) has(minor int) bool {
	return slices.ContainsFunc(r.patches, func(p num) bool { return p[1] == minor })
}

// may is an independent implementation of the rules of docs/compatibility.md.
func (y *toy) may(s toyState, services, image, kubernetes num) bool {
	r, ir := y.find(services), y.find(image)
	switch {
	case r == nil || r.faulty: // the CLI itself
		return false
	case services.cmp(s.services) < 0 || image.cmp(s.image) < 0 || image.cmp(s.workerImage) < 0 || kubernetes.cmp(s.kubernetes) < 0:
		return false
	case services[1]-s.services[1] > 1 || image[1]-s.image[1] > 1 || image[1]-s.workerImage[1] > 1 || kubernetes[1]-s.kubernetes[1] > 1:
		return false
	case services != s.services && (r.from == num{} || s.services.cmp(r.from) < 0):
		return false
	case services != s.services && !r.has(s.kubernetes[1]):
		return false
	case image[1] > services[1] || services[1]-image[1] > 1 || services[1]-s.image[1] > 1 || services[1]-s.workerImage[1] > 1:
		return false
	case s.image[1] > services[1] || s.workerImage[1] > services[1]:
		return false
	case kubernetes[1]-s.kubelet[1] > 3 || s.kubelet[1] > kubernetes[1] && s.kubelet[1] > s.kubernetes[1]:
		return false
	}
	if image != s.image {
		if ir == nil || ir.faulty || y.noImage[image] || image[1] != services[1] || !ir.has(kubernetes[1]) && r.has(kubernetes[1]) {
			return false
		}
	}
	if kubernetes != s.kubernetes {
		from, to := y.etcdOf(s), y.etcd[kubernetes]
		if !slices.Contains(r.patches, kubernetes) || y.badPatches[kubernetes] || y.noPatch[kubernetes] {
			return false
		}
		if to[1] < from[1] || to[1]-from[1] > 1 || to[1] == 6 && from[1] == 5 && from[2] < 26 || to[1] == 7 && from[1] == 6 && from[2] < 11 {
			return false
		}
	}
	if kubernetes[1] > s.kubernetes[1] {
		if old := y.find(s.image); old == nil || !old.has(kubernetes[1]) || !ir.has(kubernetes[1]) {
			return false
		}
	}
	return true
}

// toyCost counts hops, replacements of workers, and changes.
type toyCost [3]int

// explore returns the least cost of each state, by relaxing all edges until no shorter path
// to a reached state is possible.
//
// most is the Kubernetes version of the goal; zero: any. hopsOfEtcd is whether etcd's version is
// known, so that it may get a hop of its own.
func (y *toy) explore(start toyState, most num, hopsOfEtcd bool, reached func(toyState) bool) map[toyState]toyCost {
	shortest := 1 << 30
	var patches []num
	for _, r := range y.releases {
		patches = append(patches, r.patches...)
	}
	least := map[toyState]toyCost{start: {}}
	queue := []toyState{start}
	for len(queue) > 0 {
		s := queue[0]
		queue = queue[1:]
		if reached(s) {
			shortest = min(shortest, least[s][0])
		}
		if least[s][0] >= shortest {
			continue
		}
		relax := func(next toyState, c toyCost) {
			if old, ok := least[next]; !ok || slices.Compare(c[:], old[:]) < 0 {
				least[next] = c
				queue = append(queue, next)
			}
		}
		if hopsOfEtcd && y.etcdHop(s, most) {
			next, c := s, least[s]
			next.etcd = num{3, 6, 11}
			relax(next, toyCost{c[0] + 1, c[1], c[2] + 1})
		}
		images, kubes := []num{s.image}, append([]num{s.kubernetes}, patches...)
		for _, r := range y.releases {
			images = append(images, r.v)
		}
		for _, r := range y.releases {
			if r.v.cmp(s.services) < 0 || r.v[1]-s.services[1] > 1 {
				continue // forbidden, whatever else is planned
			}
			for _, i := range images {
				for _, k := range kubes {
					if !y.may(s, r.v, i, k) {
						continue
					}
					for _, keep := range []bool{false, true} {
						next := toyState{r.v, i, k, i, k, num{}}
						if k == s.kubernetes {
							next.etcd = s.etcd
						}
						c := least[s]
						c[0]++
						if keep {
							next.workerImage, next.kubelet = s.workerImage, s.kubelet
						} else if s.workerImage != i || s.kubelet != k {
							c[1]++
						}
						for _, changed := range []bool{s.services != r.v, s.image != i, s.kubernetes != k} {
							if changed {
								c[2]++
							}
						}
						relax(next, c)
					}
				}
			}
		}
	}
	return least
}

// best returns the least cost of the goal.
func (y *toy) best(start toyState, services, image, kubernetes num) (best toyCost, found bool) {
	reached := func(s toyState) bool {
		return (services == num{} || s.services == services) && (image == num{} || s.image == image) && (kubernetes == num{} || s.kubernetes == kubernetes) && s.workerImage == s.image && s.kubelet == s.kubernetes
	}
	for s, c := range y.explore(start, kubernetes, true, reached) {
		if reached(s) && (!found || slices.Compare(c[:], best[:]) < 0) {
			best, found = c, true
		}
	}
	return best, found
}

// drawToy draws a small matrix that exercises all rules: gaps, faulty versions, versions that
// the provider does not offer, etcd minors.
func drawToy(t *rapid.T) *toy {
	y := &toy{etcd: map[num]num{}, badPatches: map[num]bool{}, noImage: map[num]bool{}, noPatch: map[num]bool{}}
	rarely := func(label string) bool { return rapid.IntRange(0, 15).Draw(t, label) == 7 }
	var patches []num
	etcds := []num{{3, 5, 20}, {3, 5, 26}, {3, 6, 4}, {3, 6, 11}, {3, 7, 0}}
	e := rapid.IntRange(0, 3).Draw(t, "etcd")
	for minor := range rapid.IntRange(2, 6).Draw(t, "kubernetes") {
		for p := range rapid.IntRange(1, 3).Draw(t, "patches") {
			k := num{1, 33 + minor, p}
			if e < 4 && rapid.IntRange(0, 4).Draw(t, "newer etcd") == 0 {
				e++
			}
			y.etcd[k], y.badPatches[k], y.noPatch[k] = etcds[e], rarely("faulty patch"), rarely("no patch")
			patches = append(patches, k)
		}
	}
	for minor := range rapid.IntRange(1, 4).Draw(t, "minors") {
		for p := range rapid.IntRange(1, 3).Draw(t, "releases") {
			r := toyRelease{v: num{1, minor, p}, faulty: rarely("faulty release")}
			y.noImage[r.v] = rarely("no image")
			switch {
			case rarely("from"):
				r.from = num{1, minor, max(0, p-1)}
			case minor > 0 || p > 0:
				r.from = num{1, max(0, minor-1), rapid.IntRange(0, 4).Draw(t, "from patch") / 4}
			}
			for _, k := range patches {
				if k[1]-33 >= minor && k[1]-33 <= minor+1+rapid.IntRange(0, 1).Draw(t, "more") && !rarely("without") {
					r.patches = append(r.patches, k)
				}
			}
			y.releases = append(y.releases, r)
		}
	}
	return y
}

func TestPathIsOptimal(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		y := drawToy(t)
		pick := func(label string, of []num) num { return rapid.SampledFrom(of).Draw(t, label) }
		var releases, patches []num
		for _, r := range y.releases {
			releases = append(releases, r.v)
			patches = append(patches, r.patches...)
		}
		slices.SortFunc(patches, num.cmp)
		patches = slices.Compact(append(patches, num{1, 33, 9}, num{1, 34, 99})) // two that no release has
		slices.SortFunc(patches, num.cmp)
		y.etcd[num{1, 33, 9}], y.etcd[num{1, 34, 99}] = num{3, 5, 26}, num{3, 6, 4}
		low := func(of []num) []num { return of[:(len(of)+2)/3] }
		high := func(of []num) []num {
			if rapid.IntRange(0, 5).Draw(t, "any goal") == 0 {
				return of
			}
			return of[len(of)*2/3:]
		}
		s := toyState{services: pick("services", low(releases)), kubernetes: pick("runs", low(patches))}
		s.image, s.workerImage, s.kubelet = s.services, s.services, s.kubernetes
		odd := func(label string) bool { return rapid.IntRange(0, 3).Draw(t, label) == 0 }
		if odd("another image") {
			s.image = pick("image", releases)
			s.workerImage = s.image
		}
		if odd("other workers") {
			s.workerImage, s.kubelet = pick("worker image", releases), pick("kubelet", patches)
		}
		var services, image, kubernetes num
		if !odd("services are free") {
			services = pick("goal services", high(releases))
			if image = services; odd("another goal image") {
				image = pick("goal image", releases)
			}
		}
		if r := y.find(services); services == (num{}) || odd("any kubernetes") || len(r.patches) == 0 {
			kubernetes = pick("goal kubernetes", high(patches))
		} else if !odd("kubernetes is free") {
			kubernetes = pick("goal kubernetes of the release", r.patches)
		}
		now := Running{
			Services: At(s.services.v()), ControlPlaneImage: At(s.image.v()), WorkerImage: At(s.workerImage.v()), Kubernetes: At(s.kubernetes.v()),
			ControlPlaneKubelet: At(s.kubernetes.v()), WorkerKubelet: At(s.kubelet.v()), Etcd: strings.TrimPrefix(y.etcd[s.kubernetes].v().String(), "v") + "-0",
		}
		goal := Planned{Services: services.v(), Image: image.v(), Kubernetes: kubernetes.v()}

		summaries, offer := y.summaries(), y.offer()
		m := NewMatrix(summaries)
		hops, why := m.Path(now, goal, offer)
		want, ok := y.best(s, services, image, kubernetes)
		if !ok {
			if hops != nil || len(Blocks(slices.Clone(why))) == 0 {
				t.Fatalf("no path exists, but Path returned %q, %+v", told(hops), why)
			}
			return
		}
		got := costOf(now, hops)
		if got != want || len(why) > 0 {
			t.Fatalf("cost %v of %q, optimum is %v; %+v", got, told(hops), want, why)
		}

		state := now
		for i, h := range hops {
			results := m.Check(h.CLI, state, h.Planned(), offer)
			if found := Blocks(results); len(found) > 0 {
				t.Fatalf("hop %d of %q is forbidden: %+v", i+1, told(hops), found)
			}
			if m.find(h.CLI).Faulty != "" {
				t.Fatalf("hop %d needs a faulty CLI", i+1)
			}
			if len(h.Why) == 0 && len(hops) > 1 {
				t.Errorf("hop %d of %q has no reason", i+1, told(hops))
			}
			next := reach(state, h)
			if !state.ControlPlaneImage.Is(next.ControlPlaneImage.Oldest) && m.find(next.ControlPlaneImage.Oldest).Faulty != "" {
				t.Fatalf("hop %d leads to a faulty image", i+1)
			}
			if next.Etcd == "" {
				next.Etcd = strings.TrimPrefix(y.etcd[num{1, next.Kubernetes.Oldest.Minor(), next.Kubernetes.Oldest.Patch()}].v().String(), "v") + "-0"
			}
			state = next
		}

		shuffled := slices.Clone(summaries)
		for i := range shuffled {
			shuffled[i].Kubernetes = rapid.Permutation(shuffled[i].Kubernetes).Draw(t, "patches in another order")
		}
		again, _ := NewMatrix(rapid.Permutation(shuffled).Draw(t, "in another order")).Path(now, goal, offer)
		if diff := gocmp.Diff(hops, again); diff != "" {
			t.Fatalf("another order of the releases gives another path: %s", diff)
		}

		// With fewer releases the best path is not shorter.
		without := rapid.IntRange(0, len(summaries)-1).Draw(t, "without")
		fewer := slices.Delete(slices.Clone(summaries), without, without+1)
		if less, _ := NewMatrix(fewer).Path(now, goal, offer); less != nil {
			if c := costOf(now, less); slices.Compare(c[:], want[:]) < 0 {
				t.Fatalf("without %s the path costs %v, with it %v", summaries[without].Version, c, want)
			}
		}
	})
}

func costOf(now Running, hops []Hop) toyCost {
	c := toyCost{len(hops)}
	for _, h := range hops {
		if h.ReplaceWorkers {
			c[1]++
		}
		p := h.Planned()
		for _, changed := range []bool{!now.Services.Is(p.Services), !now.ControlPlaneImage.Is(p.Image), !now.Kubernetes.Is(p.Kubernetes), p.Etcd != ""} {
			if changed {
				c[2]++
			}
		}
		now = reach(now, h)
	}
	return c
}

// The proposed goal is reachable, and nothing newer is.
func TestGoalIsTheNewestReachable(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		y := drawToy(t)
		m, offer := NewMatrix(y.summaries()), y.offer()
		first := y.releases[0]
		if len(first.patches) == 0 {
			t.Skip("a release without Kubernetes")
		}
		now := at(first.v.v().String(), first.v.v().String(), first.patches[0].v().String())
		goal := m.Goal(now, Planned{}, offer)
		if _, why := m.Path(now, goal, offer); len(why) > 0 {
			t.Fatalf("%v is not reachable: %+v", goal, why)
		}
		start := toyState{first.v, first.v, first.patches[0], first.v, first.patches[0], num{}}
		for s := range y.explore(start, num{}, false, func(toyState) bool { return false }) {
			if s.workerImage != s.image || s.kubelet != s.kubernetes {
				continue
			}
			if cmp.Or(s.services.v().Compare(goal.Services), s.kubernetes.v().Compare(goal.Kubernetes), s.image.v().Compare(goal.Image)) > 0 {
				t.Fatalf("%v is reachable and newer than %v", s, goal)
			}
		}
	})
}

// Given versions are met, and nothing newer that meets them is reachable.
func TestGoalMeetsGivenVersions(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		y := drawToy(t)
		m, offer := NewMatrix(y.summaries()), y.offer()
		first := y.releases[0]
		if len(first.patches) == 0 {
			t.Skip("a release without Kubernetes")
		}
		now := at(first.v.v().String(), first.v.v().String(), first.patches[0].v().String())
		start := toyState{first.v, first.v, first.patches[0], first.v, first.patches[0], num{}}
		var ends []toyState
		for s := range y.explore(start, num{}, false, func(toyState) bool { return false }) {
			if s.workerImage == s.image && s.kubelet == s.kubernetes {
				ends = append(ends, s)
			}
		}
		slices.SortFunc(ends, func(a, b toyState) int {
			return cmp.Or(a.services.v().Compare(b.services.v()), a.kubernetes.v().Compare(b.kubernetes.v()), a.image.v().Compare(b.image.v()))
		})
		one := rapid.SampledFrom(ends).Draw(t, "end")
		var given Planned
		if rapid.Bool().Draw(t, "release") {
			given.Services = one.services.v()
		} else {
			given.Kubernetes = one.kubernetes.v()
		}
		goal := m.Goal(now, given, offer)
		if _, why := m.Path(now, goal, offer); len(why) > 0 {
			t.Fatalf("%v is not reachable: %+v", goal, why)
		}
		if !given.Services.IsZero() && !goal.Services.Equal(given.Services) || !given.Kubernetes.IsZero() && !goal.Kubernetes.Equal(given.Kubernetes) {
			t.Fatalf("%v does not meet the given %v", goal, given)
		}
		for _, s := range ends {
			if !given.Services.IsZero() && s.services != one.services || !given.Kubernetes.IsZero() && s.kubernetes != one.kubernetes {
				continue
			}
			if cmp.Or(s.services.v().Compare(goal.Services), s.kubernetes.v().Compare(goal.Kubernetes), s.image.v().Compare(goal.Image)) > 0 {
				t.Fatalf("%v is reachable and newer than %v", s, goal)
			}
		}
	})
}

func TestPartialGoals(t *testing.T) {
	m := NewMatrix(ours(t))
	now := at("v1.0.0", "v1.0.0", "v1.35.4")
	for _, tt := range []struct {
		name        string
		given, want Planned
	}{
		{name: "nothing", given: Planned{}, want: to("v1.1.0", "v1.1.0", "v1.36.4")},
		{name: "the newest release", given: to("v1.1.0", "", ""), want: to("v1.1.0", "v1.1.0", "v1.36.4")},
		{name: "a Kubernetes of the newest release", given: to("", "", "v1.36.3"), want: to("v1.1.0", "v1.1.0", "v1.36.3")},
		{name: "the running release", given: to("v1.0.0", "", ""), want: to("v1.0.0", "v1.0.0", "v1.36.4")},
		{name: "the running Kubernetes", given: to("", "", "v1.35.4"), want: to("v1.1.0", "v1.1.0", "v1.35.4")},
		{name: "an unknown release", given: to("v1.7.0", "", ""), want: to("v1.7.0", "", "")},
		{name: "a Kubernetes of no release", given: to("", "", "v1.36.99"), want: to("", "", "v1.36.99")},
		{name: "a downgrade", given: to("", "", "v1.34.2"), want: to("", "", "v1.34.2")},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := m.Goal(now, tt.given, Offer{}); fmt.Sprint(got) != fmt.Sprint(tt.want) {
				t.Errorf("goal %v, want %v", got, tt.want)
			}
		})
	}
}
