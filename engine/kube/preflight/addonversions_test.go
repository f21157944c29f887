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

// TestAddOnsOfHelmReleases recognises add-ons by Helm's releases: those whose images are unknown, and
// the versions of images without a tag.
func TestAddOnsOfHelmReleases(t *testing.T) {
	w := village()
	w.request.From, w.request.To, w.request.Foreign = version.MustParse("v1.36.4"), version.MustParse("v1.37.0"), true
	of := func(release string) map[string]string {
		return map[string]string{"meta.helm.sh/release-name": release, "meta.helm.sh/release-namespace": "system"}
	}
	for name, ref := range map[string]string{"istiod": "istio/pilot@sha256:0", "certs": "mirror.example/c:7", "keda": "ghcr.io/kedacore/keda:2.19.0"} {
		w.addDeployment("system", name, nil)
		d := &w.deployments[len(w.deployments)-1]
		d.Annotations = of(name)
		d.Spec.Template.Spec.Containers = []corev1.Container{{Name: "c", Image: ref}}
	}
	w.charts = []helmRelease{
		{namespace: "system", name: "istiod", chart: "istiod", version: "1.28.1", appVersion: "1.28.1"},
		{namespace: "system", name: "certs", chart: "cert-manager", version: "v1.18.2", appVersion: "v1.18.2"},
		{namespace: "system", name: "keda", chart: "keda", version: "2.19.0", appVersion: "2.19.0"},
		{namespace: "shop", name: "web", chart: "w\x1beb", version: "0.1.0", appVersion: "7"},
		{namespace: "shop", name: "bound", chart: "bound", version: "1.0.0", kubeVersion: ">=1.20"},
		{namespace: ownNamespace, name: "cert-manager", chart: "cert-manager", appVersion: "v1.17.0"},
	}
	w.made()
	var got []string
	for _, f := range addOnVersions(w, nil) {
		got = append(got, string(f.Severity)+" "+f.Title+": "+strings.Join(f.Objects, " "))
		if strings.Contains(f.Title+f.Detail, "\x1b") {
			t.Errorf("an escape code in %+v", f)
		}
	}
	slices.Sort(got)
	want := []string{
		"not-checked not checked whether the charts of 1 Helm release support Kubernetes v1.37: this program has no data about them: helmrelease/shop/web",
		"warn Istio 1.28.1 does not list Kubernetes v1.37: deployment/system/istiod",
		"warn KEDA 2.19.0 does not list Kubernetes v1.37: deployment/system/keda",
		"warn cert-manager v1.18.2 does not list Kubernetes v1.37: helmrelease/system/certs",
	}
	if !slices.Equal(got, want) {
		t.Errorf("findings\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	w.charts, w.unread[sourceCharts] = nil, "the user may not list secrets"
	found := addOnVersions(w, nil)
	if !slices.ContainsFunc(found, func(f plan.Finding) bool {
		return f.Severity == plan.NotChecked && strings.Contains(f.Title, "which add-ons Helm installed") && strings.Contains(f.Detail, "may not list secrets")
	}) {
		t.Errorf("Secrets that may not be listed: %+v", found)
	}
}
