package preflight

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"constellation/engine/plan"
	"constellation/engine/version"
)

func TestRetiredFeatures(t *testing.T) {
	w := village()
	w.request.From, w.request.To = version.MustParse("v1.35.4"), version.MustParse("v1.36.0")
	w.addDeployment("shop", "web", func(p *pod) { p.gitRepo = []string{"src"} }, "worker-0", "worker-1")
	for name, s := range map[string]corev1.ServiceSpec{
		"web": {ExternalIPs: []string{"192.0.2.1"}}, "headless": {ExternalIPs: []string{"192.0.2.1"}, ClusterIP: corev1.ClusterIPNone}, "plain": {},
	} {
		w.services[types.NamespacedName{Namespace: "shop", Name: name}] = corev1.Service{ObjectMeta: metaOf("shop", name), Spec: s}
	}
	w.made()
	for _, tt := range []struct {
		to   string
		want plan.Severity
	}{{"v1.36.0", plan.Block}, {"v1.35.9", ""}} {
		w.request.To = version.MustParse(tt.to)
		found := gitRepoVolumes(w, nil)
		if len(found) != 1 || found[0].Severity != tt.want || !slices.Contains(found[0].Objects, "deployment/shop/web") || !strings.Contains(found[0].Title, "gitRepo volume src") {
			t.Errorf("to %s: %+v", tt.to, found)
		}
	}
	if found := externalIPs(w, nil); len(found) != 1 || !slices.Equal(found[0].Objects, []string{"service/shop/web"}) {
		t.Errorf("external IPs: %+v", found)
	}
	if found := gitRepoVolumes(village(), nil); len(found) > 0 {
		t.Errorf("a cluster without gitRepo volumes: %+v", found)
	}
}

func TestAddOnVersions(t *testing.T) {
	image := func(d *appsv1.Deployment, image string) {
		d.Spec.Template.Spec.Containers = []corev1.Container{{Name: "c", Image: image}}
	}
	w := village()
	w.request.From, w.request.To = version.MustParse("v1.36.4"), version.MustParse("v1.37.0")
	for name, ref := range map[string]string{
		"old": "docker.io/istio/pilot:1.28.1", "unknown": "openpolicyagent/gatekeeper:v3.19.2", "evil": "istio/pilot:1.2\x1b[31m", "mine": "registry.example/pilot:1.28.1",
		"scaler": "registry.k8s.io/autoscaling/cluster-autoscaler:v1.36.0", "scaler-next": "registry.k8s.io/autoscaling/cluster-autoscaler:v1.37.0", "reboots": "ghcr.io/kubereboot/kured:1.99.0",
	} {
		w.addDeployment("system", name, nil)
		image(&w.deployments[len(w.deployments)-1], ref)
	}
	w.addDeployment("flux-system", "source-controller", nil)
	flux := &w.deployments[len(w.deployments)-1]
	flux.Labels = map[string]string{"app.kubernetes.io/part-of": "flux", "app.kubernetes.io/version": "v2.10.1"}
	image(flux, "ghcr.io/fluxcd/source-controller:v1.10.1")
	w.addDeployment(ownNamespace, autoscalerName, nil)
	image(&w.deployments[len(w.deployments)-1], "cluster-autoscaler:v1.30.0")
	w.made()
	var got []string
	for _, f := range addOnVersions(w, nil) {
		if f.Remedy == "" || f.Reference == "" || len(f.Objects) == 0 {
			t.Errorf("the finding %+v lacks a field", f)
		}
		got = append(got, string(f.Severity)+" "+f.Title)
	}
	slices.Sort(got)
	want := []string{
		`not-checked not checked whether Gatekeeper v3.19.2 supports Kubernetes v1.37`,
		`not-checked not checked whether Istio 1.2\x1b[31m supports Kubernetes v1.37`,
		`not-checked not checked whether kured 1.99.0 supports Kubernetes v1.37`,
		`warn Istio 1.28.1 does not list Kubernetes v1.37`,
		`warn cluster-autoscaler v1.36.0 does not list Kubernetes v1.37`,
	}
	if !slices.Equal(got, want) {
		t.Errorf("findings\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	actors := nodeActors(w, nil)
	if !slices.ContainsFunc(actors, func(f plan.Finding) bool { return strings.HasPrefix(f.Title, "kured drains and reboots nodes too") }) {
		t.Errorf("controllers that replace nodes: %+v", actors)
	}
	scalers := 0
	for _, f := range actors {
		if slices.Contains(f.Objects, "deployment/system/scaler") {
			scalers++
		}
	}
	if scalers != 1 {
		t.Errorf("the autoscaler is reported %d times", scalers)
	}
	if b, err := json.Marshal(actors); err != nil || strings.Contains(string(b), "\x1b") {
		t.Error(string(b), err)
	}
}
