package plans

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"constellation/operator/api/upgradev1"
)

// TestConformance is what users of Plans rely on, on a real API server with the real
// controller of Jobs.
func TestConformance(t *testing.T) {
	w := newWorld(t)
	for _, part := range []struct {
		name string
		run  func(*testing.T, *world)
	}{
		{"a plan is carried out", carriedOut},
		{"a node is cordoned, and given back", cordonedAndGivenBack},
		{"a failed node keeps its place", failedKeepsPlace},
	} {
		t.Run(part.name, func(t *testing.T) {
			t.Parallel()
			part.run(t, w)
		})
	}
}

func carriedOut(t *testing.T, w *world) {
	s := w.site(t, "carried-out", 3)
	var mu sync.Mutex
	at, most := 0, 0
	s.set(func(ctx context.Context, p *corev1.Pod, container string) error {
		mu.Lock()
		at++
		most = max(most, at)
		mu.Unlock()
		listed := slices.Contains(s.get(p.Labels[upgradev1.LabelPlan]).Status.Applying, p.Spec.NodeName)
		mu.Lock()
		defer mu.Unlock()
		at--
		if !listed {
			return fmt.Errorf("%s runs and is not in status.applying", p.Spec.NodeName)
		}
		return nil
	})
	s.start()
	s.plan(`
metadata: {name: all}
spec:
  concurrency: 1
  version: v1.36.3+k3s1
  upgrade: {image: rancher/k3s-upgrade}
  postCompleteLabels: {upgraded-to: $(LATEST_VERSION)}
`)
	p := s.done("all")
	if p.Status.LatestVersion != "v1.36.3-k3s1" || len(p.Status.Applying) > 0 {
		t.Errorf("status: %+v", p.Status)
	}
	if most != 1 {
		t.Errorf("%d nodes were upgraded at a time", most)
	}
	for _, name := range s.nodes {
		n := s.nodeNamed(name)
		got := map[string]string{"hash": n.Labels["plan.upgrade.cattle.io/all"], "label": n.Labels["upgraded-to"]}
		if want := map[string]string{"hash": p.Status.LatestHash, "label": "v1.36.3-k3s1"}; !cmp.Equal(got, want) {
			t.Error(cmp.Diff(want, got))
		}
	}
	if want := (upgradev1.Counts{Total: 3, Done: 3}); p.Status.Constellation.Counts != want {
		t.Errorf("counts are %+v, want %+v", p.Status.Constellation.Counts, want)
	}
	s.event("all", "Resolved", "v1.36.3-k3s1")
	s.event("all", "Validated", "")
	s.event("all", "SyncJob", s.nodes[0])
	s.event("all", "JobComplete", s.nodes[0])
	s.event("all", "Complete", p.Status.LatestHash)
}

func cordonedAndGivenBack(t *testing.T, w *world) {
	s := w.site(t, "cordoned", 3)
	s.patch(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: s.nodes[2]}}, `{"spec":{"unschedulable":true}}`)
	s.set(func(_ context.Context, p *corev1.Pod, _ string) error {
		if n := s.nodeNamed(p.Spec.NodeName); !n.Spec.Unschedulable {
			return errors.New("it is not cordoned")
		}
		return nil
	})
	s.start()
	s.plan(`
metadata: {name: cordon}
spec: {concurrency: 2, version: v1, cordon: true, upgrade: {image: a}}
`)
	s.done("cordon")
	for i, name := range s.nodes {
		n := s.nodeNamed(name)
		if by, noted := n.Annotations[annotationCordoned]; n.Spec.Unschedulable != (i == 2) || noted {
			t.Errorf("node %d: unschedulable is %t, noted for %q", i, n.Spec.Unschedulable, by)
		}
	}
}

func failedKeepsPlace(t *testing.T, w *world) {
	s := w.site(t, "failed", 2)
	s.set(func(context.Context, *corev1.Pod, string) error { return errors.New("no") })
	s.start()
	s.plan(`
metadata: {name: fails}
spec: {concurrency: 1, version: v1, upgrade: {image: a}}
`)
	p := s.is("fails", "Complete=False/JobFailed Job failed/apply-fails-on-")
	if len(p.Status.Applying) != 1 || len(s.jobs()) != 1 {
		t.Errorf("%v have a place, %d have Jobs; want one", p.Status.Applying, len(s.jobs()))
	}
	s.event("fails", "JobFailed", "failed on Node "+p.Status.Applying[0]+": BackoffLimitExceeded: ")
	s.set(func(context.Context, *corev1.Pod, string) error { return nil })
	s.edit("fails", `{"spec":{"upgrade":{"args":["again"]}}}`)
	s.done("fails")
}
