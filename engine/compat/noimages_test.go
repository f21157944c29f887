package compat

import (
	"slices"
	"strings"
	"testing"

	"constellation/engine/release"
)

// noImages returns a cluster whose target names no image.
func noImages(services, kubernetes string) Running {
	r := at(services, "v1.0.0", kubernetes)
	r.ControlPlaneImage, r.WorkerImage, r.NoImages = Span{}, Span{}, true
	return r
}

// TestHopWithoutImage plans an upgrade in a cloud that selects no image: no rule finds the image
// unknown, and no hop names one.
func TestHopWithoutImage(t *testing.T) {
	m := NewMatrix(two())
	now := noImages("v1.0.0", "v1.35.4")
	goal := m.Goal(now, Planned{}, Offer{})
	if goal.Services.String() != "v1.1.0" || goal.Kubernetes.String() != "v1.36.4" || !goal.Image.IsZero() {
		t.Fatalf("goal %+v", goal)
	}
	hops, why := m.Path(now, goal, Offer{})
	if len(hops) == 0 {
		t.Fatalf("no path: %v", why)
	}
	for _, h := range hops {
		if h.From.Image != "" || h.To.Image != "" {
			t.Errorf("hop %d from %+v to %+v", h.Number, h.From, h.To)
		}
		if h.ReplaceControlPlanes != (h.From.Kubernetes != h.To.Kubernetes) || h.ReplaceWorkers != h.ReplaceControlPlanes {
			t.Errorf("hop %d from %+v to %+v replaces %t, %t", h.Number, h.From, h.To, h.ReplaceControlPlanes, h.ReplaceWorkers)
		}
	}
	if last := hops[len(hops)-1]; last.To.Kubernetes != "v1.36.4" || last.To.Release != "v1.1.0" {
		t.Errorf("the last hop leads to %+v", last.To)
	}
	for _, r := range m.Check(ver("v1.1.0"), now, to("v1.1.0", "", ""), Offer{}) {
		if r.Severity == "not-checked" && r.Rule != "etcd-never-down" {
			t.Errorf("%v", r)
		}
	}
	blocks := Blocks(m.Check(ver("v1.0.0"), now, to("v1.0.0", "", "v1.36.4"), Offer{}))
	if want := "upgrade to release v1.1.0 first, and to Kubernetes v1.36 in the hop after it"; !slices.ContainsFunc(blocks, func(r *RuleResult) bool {
		return r.Rule == "oldest-supports-kubernetes" && r.Remedy == want
	}) {
		t.Errorf("blocked by %v, want the remedy %q", blocks, want)
	}
	unread := now
	unread.NoImages = false
	if hops, _ := m.Path(unread, goal, Offer{}); len(hops) > 0 {
		t.Errorf("a cluster whose images could not be read has a path: %+v", hops)
	}
}

// A hop of etcd starts from a version that was read. Where none was, the remedy does not name that hop.
func TestEtcdBelowTheFloorThatWasNotRead(t *testing.T) {
	m := NewMatrix([]release.Summary{invented("v1.0.0", "", "v1.36.3=3.6.8-0", "v1.37.2=3.7.0-0")})
	now, goal := at("v1.0.0", "v1.0.0", "v1.36.3"), to("v1.0.0", "v1.0.0", "v1.37.2")
	for _, tt := range []struct {
		etcd, want string
		hops       int
	}{
		{etcd: "", want: checkAgain, hops: 0},
		{etcd: "3.6.8-0", want: "in a hop of its own", hops: 2},
	} {
		now.Etcd = tt.etcd
		hops, _ := m.Path(now, goal, Offer{})
		blocks := Blocks(m.Check(ver("v1.0.0"), now, goal, Offer{}))
		if len(hops) != tt.hops || len(blocks) != 1 || blocks[0].Rule != "etcd-step" || !strings.Contains(blocks[0].Remedy, tt.want) {
			t.Errorf("etcd %q: %d hops, want %d; blocked by %v, want the remedy %q", tt.etcd, len(hops), tt.hops, blocks, tt.want)
		}
	}
}

// Without images, a hop has no results of the rules about images alone.
func TestImageRulesDoNotApplyWithoutImages(t *testing.T) {
	m := NewMatrix(two())
	ids := func(now Running) (out []string) {
		for _, r := range m.Check(ver("v1.1.0"), now, to("v1.1.0", "", ""), Offer{}) {
			out = append(out, r.Rule)
		}
		return out
	}
	var want []string
	for _, id := range ids(at("v1.0.0", "v1.0.0", "v1.35.4")) {
		if id != "cli-image" && id != "image-services" && id != "offered-image" {
			want = append(want, id)
		}
	}
	if got := ids(noImages("v1.0.0", "v1.35.4")); !slices.Equal(got, want) || len(got) != len(Rules)-3 {
		t.Errorf("results of %v, want %v", got, want)
	}
}
