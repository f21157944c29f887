package plans

import (
	"context"
	"errors"
	"fmt"
	"testing"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"constellation/assets"
	"constellation/internal/gitopstest"
	"constellation/operator/api/upgradev1"
)

const healthScript = "../../docs/gitops/health.lua"

// TestHealthOfAPlan follows a Plan through a rollout with a failure and a change, as Flux and Argo CD
// see it.
func TestHealthOfAPlan(t *testing.T) {
	d := newDesk(t, planOf(), 2)
	kstatus := map[string]string{"Progressing": "InProgress", "Degraded": "Failed", "Healthy": "Current"}
	health := func(want string) {
		t.Helper()
		p := d.book.plan(d.name).DeepCopy()
		if p.Status.ObservedGeneration == 0 {
			p.Status.ObservedGeneration = -1 // the default of the field
		}
		p.TypeMeta = metav1.TypeMeta{APIVersion: "upgrade.cattle.io/v1", Kind: "Plan"}
		if got, message := gitopstest.Argo(t, healthScript, p); got != want || message == "" {
			t.Errorf("Argo CD reports %s (%q), want %s: %+v", got, message, want, p.Status)
		}
		if got := gitopstest.Kstatus(t, p); got != kstatus[want] {
			t.Errorf("kstatus is %s, want %s: %+v", got, kstatus[want], p.Status)
		}
	}
	health("Progressing") // no controller has seen it
	first := creates(d.step())
	health("Progressing")
	d.end(first[0], batchv1.JobFailed)
	d.step()
	health("Degraded")
	d.edit(func(p *upgradev1.Plan) { p.Spec.Upgrade.Args = []string{"other"} })
	health("Progressing") // the failure was of the generation before
	for range 10 {
		out := d.step()
		if len(out.creates) == 0 && len(out.status.Applying) == 0 {
			break
		}
		health("Progressing")
		for _, n := range creates(out) {
			d.end(n, batchv1.JobComplete)
		}
	}
	d.step()
	health("Healthy")
	d.edit(func(p *upgradev1.Plan) { p.Spec.PostCompleteDelay = new(upgradev1.Duration("-1m")) })
	health("Progressing")
	d.step()
	health("Degraded") // not valid
}

// sees waits until Flux and Argo CD see a Plan so.
func (s *site) sees(plan, want string) {
	s.Helper()
	s.eventually("Plan "+plan+" is "+want, func() (string, bool) {
		o := &unstructured.Unstructured{}
		o.SetGroupVersionKind(upgradev1.GroupVersion.WithKind("Plan"))
		if err := s.w.admin.Get(s.Context(), client.ObjectKey{Namespace: s.ns, Name: plan}, o); err != nil {
			return err.Error(), false
		}
		argo, _ := gitopstest.Argo(s, healthScript, o.Object)
		is := gitopstest.Kstatus(s, o.Object) + "/" + argo
		return fmt.Sprintf("%s: %v", is, o.Object["status"]), is == want
	})
}

// genericToolsFollow follows a Plan on the API server.
func genericToolsFollow(t *testing.T, w *world) {
	const working, stuck, done = "InProgress/Progressing", "Failed/Degraded", "Current/Healthy"
	s := w.site(t, "generic-tools", 2)
	results := make(chan error)
	s.set(func(ctx context.Context, _ *corev1.Pod, _ string) error {
		select {
		case err := <-results:
			return err
		case <-ctx.Done():
			return ctx.Err()
		}
	})
	if err := w.cp.Apply(t.Context(), assets.PlanKind()); err != nil {
		t.Fatal(err)
	}
	s.plan(`
metadata: {name: all}
spec: {concurrency: 1, version: v1, upgrade: {image: i}, constellation: {retry: "0"}}
`)
	s.sees("all", working) // no controller has seen it
	s.start()
	s.is("all", "Complete=False/SyncJob version v1 is applied to Nodes")
	s.sees("all", working)
	results <- errors.New("no space left")
	s.sees("all", stuck)
	s.edit("all", `{"spec":{"constellation":{"retry":"1"}}}`)
	s.sees("all", working)
	for i := range s.nodes {
		results <- nil
		s.is("all", map[bool]string{true: "Complete=False/SyncJob", false: "Complete=True/Complete"}[i == 0])
	}
	s.sees("all", done)
	s.edit("all", `{"spec":{"constellation":{"state":"Paused"},"version":"v2"}}`)
	s.is("all", "Ready=False/Paused", "Reconciling=False/Paused", "Stalled=False/Paused")
	s.sees("all", working)
	s.edit("all", `{"spec":{"constellation":null,"postCompleteDelay":"-1s"}}`)
	s.sees("all", stuck)
}
