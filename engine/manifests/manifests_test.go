package manifests

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"syscall"
	"testing"

	"gopkg.in/yaml.v3"

	"constellation/engine/plan"
	"constellation/engine/version"
	"constellation/internal/testneeds"
)

// tree writes files into a new directory.
func tree(t testing.TB, files map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	for name, text := range files {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// lines are the findings that files show: "block pdb-room a.yaml:3".
func lines(r *Result) (out []string) {
	for _, f := range r.Findings {
		if len(f.Locations) == 0 {
			continue
		}
		var at []string
		for _, l := range f.Locations {
			at = append(at, fmt.Sprintf("%s:%d", l.File, l.Line))
		}
		out = append(out, fmt.Sprintf("%s %s %s", f.Severity, f.ID, strings.Join(at, " ")))
	}
	return out
}

func skipped(r *Result) (out []string) {
	for _, s := range r.Skipped {
		out = append(out, fmt.Sprintf("%s:%d: %s", s.File, s.Line, s.Reason))
	}
	return out
}

func check(t testing.TB, files map[string]string, r Request) *Result {
	t.Helper()
	result, err := Check(t.Context(), tree(t, files), r)
	if err != nil {
		t.Fatal(err)
	}
	return result
}

const web = `apiVersion: apps/v1
kind: Deployment
metadata: {name: web, namespace: shop}
spec:
  replicas: 3
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec:
      containers: [{name: web, image: "registry.example/web:1"}]
`

func budgetOf(spec string) string {
	return "apiVersion: policy/v1\nkind: PodDisruptionBudget\nmetadata: {name: web, namespace: shop}\nspec:\n  selector: {matchLabels: {app: web}}\n  " + spec + "\n"
}

func podWith(spec string) string {
	return "apiVersion: v1\nkind: Pod\nmetadata: {name: p}\nspec:\n" + spec
}

func webhook(fields string) string {
	return `apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingWebhookConfiguration
metadata: {name: policy}
webhooks:
- name: policy.example.com
  clientConfig: {service: {namespace: policy, name: policy}}
  rules: [{apiGroups: ["*"], apiVersions: ["*"], operations: ["*"], resources: ["*"]}]
` + fields
}

// helmRelease is one of Flux.
func helmRelease(chart string) string {
	return "apiVersion: helm.toolkit.fluxcd.io/v2\nkind: HelmRelease\nmetadata: {name: r, namespace: flux}\nspec:\n  chart: {\n    spec: {" + chart + "}}\n  values: {token: sekret}\n"
}

// The details of findings about HelmReleases give the reason why a chart is not checked. Values are not shown.
func TestChartsOfHelmReleases(t *testing.T) {
	r := check(t, map[string]string{
		"a.yaml": helmRelease("chart: cert-manager, version: \">=1.19\""),
		"b.yaml": helmRelease("chart: cert-manager"),
		"c.yaml": helmRelease("chart: kyverno, version: 3.5.2"),
		"d.yaml": helmRelease("chart: podinfo, version: 6.5.0"),
		"e.yaml": helmRelease("chart: \"evil\\e[2J\", version: 6.x"),
		"f.yaml": strings.Replace(helmRelease(""), "chart: {", "chartRef: {kind: OCIRepository, name: web}\n  values: {", 1),
		"g.yaml": helmRelease("chart: keda, version: \"2.21.1\""),
	}, Request{To: version.MustParse("v1.37.0")})
	var got []string
	for _, f := range r.Findings {
		if f.ID == idAddOnVersions {
			got = append(got, fmt.Sprintf("%s: %s: %s", f.Severity, f.Title, f.Detail))
		}
	}
	want := []string{
		"warn: KEDA 2.21.1 does not list Kubernetes v1.37: version 2.21 lists v1.34 to v1.36; first found in HelmRelease flux/r",
		`not-checked: not checked whether cert-manager supports Kubernetes v1.37: its version is unknown: ">=1.19" is not one version of the chart; first found in HelmRelease flux/r`,
		"not-checked: not checked whether cert-manager supports Kubernetes v1.37: its version is unknown: the HelmRelease does not name the version of the chart; first found in HelmRelease flux/r",
		"not-checked: not checked whether Kyverno supports Kubernetes v1.37: its version is unknown: the data of this program does not have the version that chart kyverno 3.5.2 installs; first found in HelmRelease flux/r",
		`not-checked: not checked whether the charts of 3 HelmReleases support Kubernetes v1.37: this program has no data about them: podinfo 6.5.0, evil\x1b[2J 6.x, of OCIRepository web`,
	}
	if !slices.Equal(got, want) {
		t.Errorf("findings\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

func TestFindings(t *testing.T) {
	v137 := version.MustParse("v1.37.0")
	for _, tt := range []struct {
		name, text string
		request    Request
		want       []string
	}{
		{name: "a clean deployment", text: web, request: Request{}, want: nil},
		{name: "removed API", text: "apiVersion: networking.k8s.io/v1beta1\nkind: Ingress\nmetadata: {name: a}\n", request: Request{To: v137}, want: []string{"block removed-apis-written m.yaml:1"}},
		{name: "removed API in the second document", text: "a: 1\n---\n# comment\nkind: CronJob\napiVersion: batch/v1beta1\n", request: Request{To: v137}, want: []string{"block removed-apis-written m.yaml:5"}},
		{name: "removed definition of kinds", text: "apiVersion: apiextensions.k8s.io/v1beta1\nkind: CustomResourceDefinition\n", request: Request{To: v137}, want: []string{"block removed-apis-written m.yaml:1"}},
		{name: "API that the minor after removes", text: "apiVersion: resource.k8s.io/v1beta1\nkind: ResourceClaim\n", request: Request{To: v137}, want: []string{"warn removed-apis-written m.yaml:1"}},
		{name: "API that the target serves", text: "apiVersion: networking.k8s.io/v1beta1\nkind: IPAddress\n", request: Request{To: version.MustParse("v1.35.0")}, want: nil},
		{
			name: "API that was gone before", text: "apiVersion: networking.k8s.io/v1beta1\nkind: Ingress\n",
			request: Request{From: version.MustParse("v1.36.0"), To: v137},
			want:    nil,
		},
		{name: "list of objects", text: "apiVersion: v1\nkind: List\nitems:\n- apiVersion: batch/v1beta1\n  kind: CronJob\n", request: Request{To: v137}, want: []string{"block removed-apis-written m.yaml:4"}},
		{name: "budget without a disruption", text: budgetOf("maxUnavailable: 0"), request: Request{}, want: []string{"block pdb-room m.yaml:6"}},
		{name: "budget of all pods", text: web + "---\n" + budgetOf("minAvailable: 3"), request: Request{}, want: []string{"block pdb-room m.yaml:17"}},
		{name: "budget with room", text: web + "---\n" + budgetOf("minAvailable: 2"), request: Request{}, want: nil},
		{name: "budget of percents", text: web + "---\n" + budgetOf("minAvailable: 90%"), request: Request{}, want: []string{"block pdb-room m.yaml:17"}},
		{name: "budget of other pods", text: strings.ReplaceAll(web, "app: web", "app: other") + "---\n" + budgetOf("minAvailable: 3"), request: Request{}, want: nil},
		{
			name: "budget of pods that are scaled", text: web + "---\n" + budgetOf("minAvailable: 3") +
				"---\napiVersion: autoscaling/v2\nkind: HorizontalPodAutoscaler\nmetadata: {name: web, namespace: shop}\nspec: {minReplicas: 2, maxReplicas: 9, scaleTargetRef: {kind: Deployment, name: web}}\n",
			request: Request{},
			want:    nil,
		},
		{
			name: "two budgets", text: web + "---\n" + budgetOf("maxUnavailable: 1") + "---\n" + strings.Replace(budgetOf("maxUnavailable: 1"), "name: web", "name: other", 1),
			request: Request{},
			want:    []string{"block pdb-overlap m.yaml:5 m.yaml:24 m.yaml:17"},
		},
		{name: "single replica", text: strings.Replace(web, "replicas: 3", "replicas: 1", 1), request: Request{}, want: []string{"warn single-replica m.yaml:5"}},
		{name: "replicas by default", text: strings.Replace(web, "  replicas: 3\n", "", 1), request: Request{}, want: []string{"warn single-replica m.yaml:1"}},
		{name: "patch of a kustomization, without selector and replicas", text: strings.NewReplacer("  replicas: 3\n", "", "  selector: {matchLabels: {app: web}}\n", "").Replace(web), request: Request{}, want: nil},
		{name: "replicas by a placeholder", text: strings.Replace(web, "replicas: 3", "replicas: ${REPLICAS}", 1), request: Request{}, want: nil},
		{
			name: "gitRepo volume", text: podWith("  volumes:\n  - name: src\n    gitRepo: {repository: \"https://example.com\"}\n"),
			request: Request{To: v137},
			want:    []string{"block git-repo-volumes m.yaml:7"},
		},
		{
			name: "gitRepo volume before the gate is locked", text: podWith("  volumes:\n  - name: src\n    gitRepo: {repository: \"https://example.com\"}\n"),
			request: Request{To: version.MustParse("v1.35.0")},
			want:    []string{"warn git-repo-volumes m.yaml:7"},
		},
		{name: "volume of a removed plugin", text: podWith("  volumes: [{name: a, rbd: {}}]\n"), request: Request{To: v137}, want: []string{"block deprecated-fields m.yaml:5"}},
		{name: "deprecated node label", text: podWith("  nodeSelector:\n    beta.kubernetes.io/os: linux\n"), request: Request{To: v137}, want: []string{"warn deprecated-fields m.yaml:6"}},
		{
			name:    "deprecated node label in an affinity",
			text:    podWith("  affinity: {nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: [{matchExpressions: [\n    {key: failure-domain.beta.kubernetes.io/zone, operator: Exists}]}]}}}\n"),
			request: Request{To: v137},
			want:    []string{"warn deprecated-fields m.yaml:6"},
		},
		{
			name:    "deprecated annotation of a CronJob's pods",
			text:    "apiVersion: batch/v1\nkind: CronJob\nspec: {jobTemplate: {spec: {template: {metadata: {annotations: {\n  container.apparmor.security.beta.kubernetes.io/web: unconfined}}, spec: {}}}}}\n",
			request: Request{To: v137},
			want:    []string{"warn deprecated-fields m.yaml:4"},
		},
		{name: "external IPs", text: "apiVersion: v1\nkind: Service\nmetadata: {name: a}\nspec:\n  externalIPs: [192.0.2.1]\n", request: Request{}, want: []string{"warn external-ips m.yaml:5"}},
		{name: "external IPs that are ignored", text: "apiVersion: v1\nkind: Service\nspec: {clusterIP: None, externalIPs: [192.0.2.1]}\n", request: Request{}, want: nil},
		{name: "webhook on everything", text: webhook("  failurePolicy: Fail\n"), request: Request{}, want: []string{"warn webhook-exemption m.yaml:8"}},
		{name: "webhook that may fail", text: webhook("  failurePolicy: Ignore\n"), request: Request{}, want: nil},
		{
			name: "webhook with exemptions", text: webhook("  namespaceSelector: {matchExpressions: [{key: kubernetes.io/metadata.name, operator: NotIn, values: [kube-system, policy]}]}\n"),
			request: Request{},
			want:    nil,
		},
		{name: "slow webhook", text: webhook("  objectSelector: {matchLabels: {a: b}}\n  timeoutSeconds: 30\n"), request: Request{}, want: []string{"warn webhook-timeout m.yaml:9"}},
		{
			name: "add-on whose version does not list the target", text: strings.Replace(web, "registry.example/web:1", "quay.io/jetstack/cert-manager-controller:v1.19.2", 1),
			request: Request{To: v137},
			want:    []string{"warn add-on-versions m.yaml:10"},
		},
		{
			name: "add-on whose version lists the target", text: strings.Replace(web, "registry.example/web:1", "quay.io/jetstack/cert-manager-controller:v1.19.2@sha256:00", 1),
			request: Request{To: version.MustParse("v1.35.2")},
			want:    nil,
		},
		{
			name: "add-on whose version is unknown", text: strings.Replace(web, "registry.example/web:1", "mirror:5000/jetstack/cert-manager-controller:v9.9", 1),
			request: Request{To: v137},
			want:    []string{"not-checked add-on-versions m.yaml:10"},
		},
		{
			name: "add-on by its labels", text: strings.Replace(web, "namespace: shop", "namespace: shop, labels: {app.kubernetes.io/part-of: flux, app.kubernetes.io/version: v2.7.5}", 1),
			request: Request{To: v137},
			want:    []string{"warn add-on-versions m.yaml:1"},
		},
		{
			name: "add-on that drains nodes", text: strings.Replace(web, "registry.example/web:1", "ghcr.io/kubereboot/kured:1.20.0", 1),
			request: Request{To: version.MustParse("v1.34.0")},
			want:    []string{"warn node-actors m.yaml:10"},
		},
		{name: "HelmRelease with a version that lists the target", text: helmRelease("chart: cert-manager, version: v1.19.2"), request: Request{To: version.MustParse("v1.35.2")}, want: nil},
		{name: "HelmRelease with a version that does not list the target", text: helmRelease("chart: cert-manager, version: 1.19.2"), request: Request{To: v137}, want: []string{"warn add-on-versions m.yaml:6"}},
		{name: "HelmRelease with a range", text: helmRelease("chart: cert-manager, version: 1.19.x"), request: Request{To: v137}, want: []string{"not-checked add-on-versions m.yaml:6"}},
		{name: "HelmRelease without a version", text: helmRelease("chart: cert-manager"), request: Request{To: v137}, want: []string{"not-checked add-on-versions m.yaml:6"}},
		{name: "HelmRelease of a chart with versions of its own", text: helmRelease("chart: kyverno, version: 3.5.2"), request: Request{To: v137}, want: []string{"not-checked add-on-versions m.yaml:6"}},
		{name: "HelmRelease of a chart in a Git repository", text: helmRelease("chart: ./charts/cert-manager, version: 1.19.2"), request: Request{To: v137}, want: []string{"warn add-on-versions m.yaml:6"}},
		{name: "HelmRelease of an unknown chart", text: helmRelease("chart: podinfo, version: 6.5.0"), request: Request{To: v137}, want: []string{"not-checked add-on-versions m.yaml:6"}},
		{name: "HelmRelease of another object's chart", text: strings.Replace(helmRelease(""), "chart: {", "chartRef: {kind: OCIRepository, name: podinfo}\n  values: {", 1), request: Request{To: v137}, want: []string{"not-checked add-on-versions m.yaml:5"}},
		{name: "patch of a HelmRelease", text: helmRelease("version: 1.19.2"), request: Request{To: v137}, want: nil},
		{name: "HelmRelease of another group", text: strings.Replace(helmRelease("chart: cert-manager, version: 1.19.2"), "helm.toolkit.fluxcd.io", "example.com", 1), request: Request{To: v137}, want: nil},
		{
			name: "HelmRelease of what drains nodes", text: helmRelease("chart: kured, version: 5.6.1"),
			request: Request{To: v137},
			want:    []string{"warn node-actors m.yaml:6", "not-checked add-on-versions m.yaml:6"},
		},
		{name: "Plan", text: "apiVersion: upgrade.cattle.io/v1\nkind: Plan\nmetadata: {name: os}\n", request: Request{}, want: []string{"warn node-actors m.yaml:1"}},
		{name: "kustomization", text: "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\n", request: Request{}, want: []string{"not-checked kustomize m.yaml:0"}},
		{name: "aliases and merges", text: "x: &x {replicas: 1}\napiVersion: apps/v1\nkind: Deployment\nmetadata: {name: a}\nspec:\n  <<: *x\n  selector: {}\n  template: {spec: {}}\n", request: Request{}, want: []string{"warn single-replica m.yaml:1"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := check(t, map[string]string{"m.yaml": tt.text}, tt.request)
			if got := lines(r); !slices.Equal(got, tt.want) {
				t.Errorf("findings %q, want %q; skipped %q", got, tt.want, skipped(r))
			}
			for _, f := range r.Findings {
				if len(f.Locations) > 0 && f.Severity != plan.NotChecked && (f.Title == "" || f.Remedy == "" || f.Source == "" || len(f.Objects) == 0) {
					t.Errorf("the finding %+v lacks a field", f)
				}
			}
		})
	}
}

// The output of `kustomize build` has the selectors of a patch, and the files have not.
func TestPatchesOfWebhooks(t *testing.T) {
	const patch = `apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingWebhookConfiguration
metadata: {name: policy}
webhooks: [{name: policy.example.com, namespaceSelector: {matchExpressions: [{key: kubernetes.io/metadata.name, operator: NotIn, values: [kube-system]}]}}]
`
	kustomization := func(fields string) string {
		return "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\n" + fields
	}
	inline := func(patch string) string {
		return "|\n    " + strings.ReplaceAll(strings.TrimSpace(patch), "\n", "\n    ") + "\n"
	}
	const found, other = "warn webhook-exemption webhook/m.yaml:8", "not-checked kustomize webhook/kustomization.yaml:0"
	for _, tt := range []struct {
		name          string
		kustomization string
		files         map[string]string
		want          []string
	}{
		{name: "an inline patch", kustomization: "patches:\n- patch: " + inline(patch), want: []string{other}},
		{name: "an inline patch in a deprecated field", kustomization: "patchesStrategicMerge:\n- " + inline(patch), want: []string{other}},
		{name: "a patch in a file", kustomization: "patches: [{path: patch.yaml}]\n", files: map[string]string{"webhook/patch.yaml": patch}, want: []string{other}},
		{name: "a patch of another webhook", kustomization: "patches:\n- patch: " + inline(strings.Replace(patch, "policy.example.com", "x.example.com", 1)), want: []string{found, other}},
		{name: "a patch that excludes another namespace", kustomization: "patches:\n- patch: " + inline(strings.Replace(patch, "[kube-system]", "[policy]", 1)), want: []string{found, other}},
		{name: "a patch in another directory", kustomization: "patches: []\n", files: map[string]string{"another/patch.yaml": patch}, want: []string{found, other}},
		{name: "a patch that is not YAML", kustomization: "patches:\n- patch: \"[WebhookConfiguration\"\n", want: []string{found, other}},
		{name: "an entry without a patch", kustomization: "patches: [{target: {kind: Pod}}]\n", want: []string{found, other}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			files := map[string]string{"webhook/m.yaml": webhook("  failurePolicy: Fail\n"), "webhook/kustomization.yaml": kustomization(tt.kustomization)}
			maps.Copy(files, tt.files)
			if got := lines(check(t, files, Request{})); !slices.Equal(got, tt.want) {
				t.Errorf("findings %q, want %q", got, tt.want)
			}
		})
	}
}

// Aliases that multiply are refused before they are followed.
func TestAliasesThatMultiply(t *testing.T) {
	bomb := "apiVersion: v1\nkind: List\nx0: &x0 {replicas: 1}\n"
	for i := range 10 {
		bomb += fmt.Sprintf("x%d: &x%d {<<: [%s]}\n", i+1, i+1, strings.TrimSuffix(strings.Repeat(fmt.Sprintf("*x%d, ", i), 9), ", "))
	}
	lists := "apiVersion: v1\nkind: List\nl0: &l0 {apiVersion: v1, kind: Service}\n"
	for i := range 3 {
		lists += fmt.Sprintf("l%d: &l%d {apiVersion: v1, kind: List, items: [%s]}\n", i+1, i+1, strings.TrimSuffix(strings.Repeat(fmt.Sprintf("*l%d, ", i), 1000), ", "))
	}
	for name, text := range map[string]string{"merges": bomb + "items: [*x10]\n", "lists": lists + "items: [*l3]\n", "within itself": "apiVersion: v1\nkind: List\nitems: &a [*a]\n"} {
		t.Run(name, func(t *testing.T) {
			r := check(t, map[string]string{"m.yaml": text}, Request{})
			if got := skipped(r); len(got) != 1 || len(r.Findings) > 0 && slices.ContainsFunc(r.Findings, func(f plan.Finding) bool { return len(f.Locations) > 0 }) {
				t.Errorf("skipped %q, findings %q", got, lines(r))
			}
		})
	}
}

// Lines of JSON count like those of YAML, and tabs are allowed.
func TestLinesOfJSON(t *testing.T) {
	r := check(t, map[string]string{"a/b.json": "{\n\t\"kind\": \"Service\",\n\t\"apiVersion\": \"v1\",\n\t\"spec\": {\n\t\t\"externalIPs\": [\"192.0.2.1\"]}}\n", "package.json": `{"name": "x"}`}, Request{})
	if got, want := lines(r), []string{"warn external-ips a/b.json:5"}; !slices.Equal(got, want) {
		t.Errorf("findings %q, want %q", got, want)
	}
	if r.Files != 2 || r.Objects != 1 {
		t.Errorf("%d files and %d objects, want 2 and 1", r.Files, r.Objects)
	}
}

// Overlays repeat objects: one directory does not change what another one means.
func TestDirectoriesAreDeployments(t *testing.T) {
	r := check(t, map[string]string{
		"base/web.yaml": web, "base/pdb.yaml": budgetOf("minAvailable: 2"),
		"other/web.yaml": strings.Replace(web, "replicas: 3", "replicas: 2", 1),
	}, Request{})
	if got := lines(r); len(got) > 0 {
		t.Errorf("findings %q, want none", got)
	}
}

// The result does not depend on the number of workers.
func TestResultIsDeterministic(t *testing.T) {
	files := map[string]string{}
	for i := range 300 {
		files[fmt.Sprintf("d%d/f%d.yaml", i%7, i)] = strings.Replace(web, "replicas: 3", "replicas: 1", 1) + "---\napiVersion: batch/v1beta1\nkind: CronJob\nmetadata: {name: a}\n---\napiVersion: v1\nkind: [\n"
	}
	dir := tree(t, files)
	var first *Result
	for _, workers := range []int{1, 2, 7} {
		r, err := Check(t.Context(), dir, Request{Workers: workers})
		if err != nil {
			t.Fatal(err)
		}
		if first == nil {
			first = r
			if len(r.Findings) < 600 || len(r.Skipped) != 300 || r.Objects != 600 {
				t.Fatalf("%d findings, %d skipped, %d objects", len(r.Findings), len(r.Skipped), r.Objects)
			}
		} else if !reflect.DeepEqual(r, first) {
			t.Errorf("%d workers have another result", workers)
		}
	}
}

// A directory with 100,000 files is read completely. All but a few are hard links to one file, which
// are created faster. Each is a file of its own for the check.
func TestDirectoryWithManyFiles(t *testing.T) {
	testneeds.Time(t, "five seconds")
	const number, sub = 100_000, 100
	dir := tree(t, map[string]string{
		"first.yaml": "apiVersion: batch/v1beta1\nkind: CronJob\n", "zz/last.yaml": budgetOf("maxUnavailable: 0"),
		"zz/template.yaml": "apiVersion: v1\nkind: Service\nspec: {{ .Values.spec }}\n",
	})
	const text = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: a}\n"
	source := ""
	for i := range sub {
		if err := os.MkdirAll(filepath.Join(dir, fmt.Sprint(i)), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for i := range number - 3 {
		// A file system may limit the links to a file: ext4 allows 65,000.
		if i%50_000 == 0 {
			source = filepath.Join(dir, "0", fmt.Sprintf("f%d.yaml", i))
			if err := os.WriteFile(source, []byte(text), 0o644); err != nil {
				t.Fatal(err)
			}
			continue
		}
		if err := os.Link(source, filepath.Join(dir, fmt.Sprint(i%sub), fmt.Sprintf("f%d.yaml", i))); err != nil {
			t.Fatal(err)
		}
	}
	r, err := Check(t.Context(), dir, Request{To: version.MustParse("v1.37.0")})
	if err != nil {
		t.Fatal(err)
	}
	if r.Files != number || r.Objects != number-1 {
		t.Errorf("%d files and %d objects, want %d and %d", r.Files, r.Objects, number, number-1)
	}
	if got, want := lines(r), []string{"block removed-apis-written first.yaml:1", "block pdb-room zz/last.yaml:6"}; !slices.Equal(got, want) {
		t.Errorf("findings %q, want %q", got, want)
	}
	if got := skipped(r); len(got) != 1 || !strings.HasPrefix(got[0], "zz/template.yaml:1: it is a template") {
		t.Errorf("skipped %q, want the template alone", got)
	}
}

// Files that are not manifests are named or ignored, and never stop the check.
func TestHostileFiles(t *testing.T) {
	outside := tree(t, map[string]string{"secret.yaml": "apiVersion: batch/v1beta1\nkind: CronJob\n"})
	dir := tree(t, map[string]string{
		"good.yaml":                       "apiVersion: batch/v1beta1\nkind: CronJob\n",
		"template.yaml":                   "apiVersion: apps/v1\nkind: Deployment\nmetadata:\n  name: {{ .Values.name }}\n",
		"branch.yml":                      "apiVersion: apps/v1\nkind: Deployment\n{{- if .Values.x }}\nspec: {}\n{{- end }}\n",
		"broken.yaml":                     "apiVersion: v1\nkind: Service\nspec: [\n---\napiVersion: batch/v1beta1\nkind: CronJob\n",
		"broken.json":                     "{\"apiVersion\": \"v1\",\n\n oops}",
		"chart/Chart.yaml":                "apiVersion: v2\nname: chart\n",
		"chart/templates/deployment.yaml": "{{ not yaml",
		"utf16.yaml":                      "\xff\xfea\x00p\x00i\x00",
		"deep.json":                       `{"apiVersion":"v1","kind":"Service","spec":` + strings.Repeat("[", 500) + strings.Repeat("]", 500) + "}",
		"deep.yaml":                       "apiVersion: v1\nkind: Service\nspec: " + strings.Repeat("[", 20000) + "\n",
		"values.yaml":                     "apiVersion: v1\nkind: Service\nspec: [" + strings.Repeat("0,", maxValues) + "0]\n",
		"bomb.yaml":                       "apiVersion: v1\nkind: Pod\na: &a [x,x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b,*b,*b,*b,*b]\nd: &d [*c,*c,*c,*c,*c,*c,*c]\nspec: {volumes: *d}\n",
		"self.yaml":                       "apiVersion: v1\nkind: Pod\nspec: &s\n  volumes: [*s]\n",
		"secret.yaml":                     "apiVersion: v1\nkind: Secret\nstringData: {password: hunter2, anchor: *hunter3}\n",
		"list.yaml":                       "apiVersion: v1\nkind: List\nitems: [{apiVersion: v1, kind: Secret, stringData: {password: hunter2}}]\n",
		"name.yaml":                       "apiVersion: batch/v1beta1\nkind: CronJob\nmetadata: {name: \"a\\e[31m|b\\nc\"}\n",
		"README.md":                       "apiVersion: batch/v1beta1\nkind: CronJob\n",
		".git/config.yaml":                "apiVersion: batch/v1beta1\nkind: CronJob\n",
		"unknown-anchor.yaml":             "apiVersion: v1\nkind: Service\nspec: *hunter2\n",
	})
	for link, target := range map[string]string{"out.yaml": filepath.Join(outside, "secret.yaml"), "dir": outside, "loop": ".", "in.yaml": "good.yaml", "nowhere.yaml": "none"} {
		if err := os.Symlink(target, filepath.Join(dir, link)); err != nil {
			t.Fatal(err)
		}
	}
	if err := syscall.Mkfifo(filepath.Join(dir, "pipe.yaml"), 0o600); err != nil {
		t.Fatal(err)
	}
	huge, err := os.Create(filepath.Join(dir, "huge.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	if err := huge.Truncate(1 << 40); err != nil {
		t.Fatal(err)
	}
	huge.Close()
	r, err := Check(t.Context(), dir, Request{To: version.MustParse("v1.37.0")})
	if err != nil {
		t.Fatal(err)
	}
	if got, want := lines(r), []string{"block removed-apis-written broken.yaml:5", "block removed-apis-written good.yaml:1", "block removed-apis-written name.yaml:1"}; !slices.Equal(got, want) {
		t.Errorf("findings %q, want %q", got, want)
	}
	want := []string{
		"branch.yml:1: it is a template", "broken.json:1: it is not JSON: see line 3", "broken.yaml:1: it is not YAML: see line", "chart/templates:0: templates of a Helm chart",
		"deep.json:1: it is not JSON", "deep.yaml:1: it is not YAML", "huge.yaml:0: it has 1099511627776 bytes", "nowhere.yaml:0: it is a symbolic link", "out.yaml:0: it is a symbolic link", "pipe.yaml:0: it is not a regular file",
		"self.yaml:1: the document has more than", "template.yaml:1: it is a template", "unknown-anchor.yaml:1: it is not YAML", "utf16.yaml:0: it is UTF-16", "values.yaml:1: the document has more than",
	}
	got := skipped(r)
	if !slices.EqualFunc(got, want, strings.HasPrefix) {
		t.Errorf("skipped\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	b, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	for _, secret := range []string{"hunter", "password", "\x1b", outside} {
		if bytes.Contains(b, []byte(secret)) {
			t.Errorf("the result has %q", secret)
		}
	}
}

func TestNoDirectory(t *testing.T) {
	if _, err := Check(t.Context(), filepath.Join(t.TempDir(), "none"), Request{}); err == nil || !strings.Contains(err.Error(), "read manifests: ") {
		t.Errorf("the error is %v", err)
	}
}

// Each check of a cluster that files do not show is listed once.
func TestOtherChecksAreNotChecked(t *testing.T) {
	r := check(t, nil, Request{})
	n := 0
	for _, f := range r.Findings {
		if f.Severity != plan.NotChecked || f.Title == "" || f.Remedy == "" {
			t.Errorf("finding %+v", f)
		}
		if f.ID == "drain-rehearsal" {
			n++
		}
		if f.ID == idBudgetRoom {
			t.Error("a check of files is not checked")
		}
	}
	if n != 1 {
		t.Errorf("drain-rehearsal is listed %d times", n)
	}
}

// The header, which is read without parsing, is the one that the parser finds.
func FuzzHeader(f *testing.F) {
	for _, s := range []string{web, "apiVersion: v1\nkind: \"List\"\n", "kind: a\nkind: b\napiVersion: v1\n", "'kind': x\napiVersion: v1\n", "# x\n---\nkind: Pod # y\napiVersion: v1", "kind: |\n  Pod\napiVersion: v1\n", "a: \"\nkind: Pod\n\"\napiVersion: v1\nkind: Service\n"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		h, ok := header([]byte(s))
		if !ok || h.kind == "" || h.apiVersion == "" {
			return
		}
		var n yaml.Node
		if yaml.Unmarshal([]byte(s), &n) != nil || len(n.Content) == 0 {
			return // such a document has no object
		}
		if got := (head{str(get(n.Content[0], "apiVersion")), str(get(n.Content[0], "kind"))}); got != h {
			t.Errorf("the parser finds %+v, the header is %+v", got, h)
		}
	})
}
