package plans

import (
	"testing"

	batchv1 "k8s.io/api/batch/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"constellation/internal/gitopstest"
	"constellation/operator/api/upgradev1"
)

// TestArgoHealthOfAPlan follows a Plan through a rollout with a failure and a change.
func TestArgoHealthOfAPlan(t *testing.T) {
	const script = "../../docs/gitops/health.lua"
	d := newDesk(t, planOf(), 2)
	health := func(want string) {
		t.Helper()
		p := d.book.plan(d.name).DeepCopy()
		p.TypeMeta = metav1.TypeMeta{APIVersion: "upgrade.cattle.io/v1", Kind: "Plan"}
		if got, message := gitopstest.Argo(t, script, p); got != want || message == "" {
			t.Errorf("Argo CD reports %s (%q), want %s: %+v", got, message, want, p.Status)
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
