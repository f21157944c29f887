package main

import (
	"bytes"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"helm.sh/helm/v3/pkg/chart/loader"
	"helm.sh/helm/v3/pkg/chartutil"
	helmregistry "helm.sh/helm/v3/pkg/registry"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/api/resmap"
	"sigs.k8s.io/kustomize/kyaml/filesys"
	"sigs.k8s.io/yaml"

	"constellation/assets"
	"constellation/assets/render"
	"constellation/internal/golden"
)

// Two runs make the same bytes, and helm pulls the layout from a registry.
func TestPack(t *testing.T) {
	one, two := t.TempDir(), t.TempDir()
	for _, dir := range []string{one, two} {
		if err := pack(assets.PlansChart, "v1.1.0", dir); err != nil {
			t.Fatal(err)
		}
	}
	archive, again := contents(t, one), contents(t, two)
	if d := cmp.Diff(archive, again); d != "" {
		t.Errorf("two runs differ:\n%s", d)
	}

	server := httptest.NewServer(registry.New())
	defer server.Close()
	repository := strings.TrimPrefix(server.URL, "http://") + "/charts/constellation-plans"
	index, err := layout.ImageIndexFromPath(filepath.Join(one, "constellation-plans-1.1.0.oci"))
	if err != nil {
		t.Fatal(err)
	}
	m, err := index.IndexManifest()
	if err != nil {
		t.Fatal(err)
	}
	image, err := index.Image(m.Manifests[0].Digest)
	if err != nil {
		t.Fatal(err)
	}
	ref, err := name.NewTag(repository+":"+m.Manifests[0].Annotations["org.opencontainers.image.ref.name"], name.Insecure)
	if err != nil {
		t.Fatal(err)
	}
	if err := remote.Write(ref, image); err != nil {
		t.Fatal(err)
	}
	helm, err := helmregistry.NewClient(helmregistry.ClientOptPlainHTTP())
	if err != nil {
		t.Fatal(err)
	}
	pulled, err := helm.Pull(ref.String())
	if err != nil {
		t.Fatal(err)
	}
	if string(pulled.Chart.Data) != archive["constellation-plans-1.1.0.tgz"] || pulled.Chart.Meta.Version != "1.1.0" {
		t.Errorf("helm pulled another chart: %+v", pulled.Chart.Meta)
	}
	c, err := loader.LoadArchive(bytes.NewReader(pulled.Chart.Data))
	if err != nil {
		t.Fatal(err)
	}
	var files []string
	for _, f := range c.Raw {
		files = append(files, f.Name)
	}
	for _, want := range []string{"README.md", "values.schema.json", "crds/plans.yaml"} {
		if !slices.Contains(files, want) {
			t.Errorf("the chart has no %s: %q", want, files)
		}
	}
	if c.Metadata.AppVersion != "v1.1.0" || c.Metadata.Annotations["artifacthub.io/license"] != "Apache-2.0" || len(c.CRDObjects()) != 1 {
		t.Errorf("metadata: %+v", c.Metadata)
	}
	for _, values := range []map[string]any{
		{"image": "no image"},
		{"image": ":latest"},
		{"settings": map[string]any{"PATH": "/"}},
		{"metricsPort": 80},
		{"imagePullSecrets": []any{"registry"}},
		{"unknown": true},
	} {
		if _, err := chartutil.ToRenderValues(c, values, chartutil.ReleaseOptions{}, chartutil.DefaultCapabilities); err == nil {
			t.Errorf("the schema accepts %v", values)
		}
	}
}

// The plain manifest is what the chart renders: go test ./assets/render/pack -update rewrites it.
func TestPlansManifestIsTheChart(t *testing.T) {
	b, err := plainPlans("v1.1.0")
	if err != nil {
		t.Fatal(err)
	}
	const file = "../../plans/system-upgrade.yaml"
	if golden.Updating() {
		if err := os.WriteFile(file, b, 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if d := cmp.Diff(string(assets.PlansManifest()), string(b)); d != "" {
		t.Errorf("assets/plans/system-upgrade.yaml is out of date (-file +chart):\n%s", d)
	}
}

// A Plan cordons the only control plane, and may drain it. The controller must be able to start there
// again: nothing else would uncordon the node.
func TestPlansControllerStartsOnACordonedNode(t *testing.T) {
	b, err := plainPlans("v1.1.0")
	if err != nil {
		t.Fatal(err)
	}
	for document := range strings.SplitSeq(string(b), "\n---\n") {
		var d appsv1.Deployment
		if err := yaml.Unmarshal([]byte(document), &d); err != nil || d.Kind != "Deployment" {
			continue
		}
		for _, toleration := range d.Spec.Template.Spec.Tolerations {
			if toleration.Key == corev1.TaintNodeUnschedulable && toleration.Operator == corev1.TolerationOpExists && toleration.Effect == corev1.TaintEffectNoSchedule {
				return
			}
		}
	}
	t.Error("no Deployment tolerates " + corev1.TaintNodeUnschedulable)
}

// The published chart of the operator has what others need.
func TestPackOperator(t *testing.T) {
	one, two := t.TempDir(), t.TempDir()
	for _, dir := range []string{one, two} {
		if err := pack(operatorChart, "v1.1.0", dir); err != nil {
			t.Fatal(err)
		}
	}
	written := contents(t, one)
	if d := cmp.Diff(written, contents(t, two)); d != "" {
		t.Errorf("two runs differ:\n%s", d)
	}
	c, err := loader.LoadArchive(strings.NewReader(written["constellation-operator-1.1.0.tgz"]))
	if err != nil {
		t.Fatal(err)
	}
	kinds, err := assets.CRDsFor("v1.1.0")
	if err != nil {
		t.Fatal(err)
	}
	if c.Metadata.AppVersion != "v1.1.0" || c.Metadata.KubeVersion == "" || len(c.CRDObjects()) != len(kinds) || c.Values["release"] != "v1.1.0" {
		t.Errorf("metadata %+v, %d kinds, release %v", c.Metadata, len(c.CRDObjects()), c.Values["release"])
	}
	hub := c.Metadata.Annotations["artifacthub.io/crds"]
	for _, want := range []string{"kind: NodeVersion", "kind: PendingNode", "name: nodeversions.update.edgeless.systems", "version: v1alpha1"} {
		if !strings.Contains(hub, want) {
			t.Errorf("Artifact Hub gets no %q:\n%s", want, hub)
		}
	}
	// With the name of a cloud, the defaults of the published chart fit its schema. The engine's own
	// chart also demands a release.
	if _, err := chartutil.ToRenderValues(c, map[string]any{"provider": "odd"}, chartutil.ReleaseOptions{}, chartutil.DefaultCapabilities); err != nil {
		t.Error(err)
	}
	for _, values := range []map[string]any{nil, {"provider": "odd", "release": "1.1"}, {"provider": ""}, {"provider": "odd", "operator": map[string]any{"replicas": 9}}, {"provider": "odd", "unknown": true}} {
		if _, err := chartutil.ToRenderValues(c, values, chartutil.ReleaseOptions{}, chartutil.DefaultCapabilities); err == nil {
			t.Errorf("the schema accepts %v", values)
		}
	}
}

// cloudOfUser is what users of the operator's Component write.
const cloudOfUser = `apiVersion: v1
kind: ConfigMap
metadata:
  name: constellation-cloud
  annotations: {config.kubernetes.io/local-config: "true"}
data:
  provider: odd
  metadataURL: http://10.0.0.1/metadata?a=b
  cloudURL: ""
`

// The operator's Component has the objects of its chart with the values of the user's cloud, and cannot be built without them.
func TestOperatorComponent(t *testing.T) {
	dir := t.TempDir()
	if err := pack(operatorChart, "v1.1.0", dir); err != nil {
		t.Fatal(err)
	}
	archive := contents(t, dir)["constellation-operator-1.1.0-kustomize.tgz"]
	all, err := loader.LoadArchiveFiles(strings.NewReader(archive))
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range all {
		if f.Name == "base/manifests.yaml" && (bytes.Contains(f.Data, []byte("sandbox")) || !bytes.Contains(f.Data, []byte("--provider=unset"))) {
			t.Errorf("%s has values of a cloud", f.Name)
		}
	}
	const user = "resources: [cloud.yaml]\ncomponents: [operator]\nimages:\n- name: registry.constellation.example/operator\n  newName: registry.example.com:5000/mirror/operator\n"
	buildAll := func(folder string, files map[string]string) (resmap.ResMap, error) {
		t.Helper()
		disk := filesys.MakeFsInMemory()
		write := func(name, content string) {
			if err := disk.WriteFile("user/"+name, []byte(content)); err != nil {
				t.Fatal(err)
			}
		}
		for _, f := range all {
			write(folder+"/"+f.Name, string(f.Data))
		}
		for name, content := range files {
			write(name, content)
		}
		return krusty.MakeKustomizer(krusty.MakeDefaultOptions()).Run(disk, "user")
	}

	build := func(kustomization, cloud string) (resmap.ResMap, error) {
		t.Helper()
		return buildAll("operator", map[string]string{"kustomization.yaml": kustomization, "cloud.yaml": cloud})
	}
	built, err := build(user, cloudOfUser)
	if err != nil {
		t.Fatal(err)
	}
	out, err := built.AsYaml()
	if err != nil {
		t.Fatal(err)
	}
	kinds, err := assets.CRDsFor("v1.1.0")
	if err != nil {
		t.Fatal(err)
	}
	rendered, err := render.Chart(operatorChart, "v1.1.0", "constellation-system", nil, map[string]any{"release": "v1.1.0", "provider": "odd", "metadataURL": "http://10.0.0.1/metadata?a=b"})
	if err != nil {
		t.Fatal(err)
	}
	if objects := strings.Count("\n"+string(rendered), "\nkind: "); built.Size() != objects+len(kinds) {
		t.Errorf("kustomize has %d objects, the chart %d and %d kinds", built.Size(), objects, len(kinds))
	}
	want, err := operatorArguments(rendered)
	if err != nil {
		t.Fatal(err)
	}
	got, err := operatorArguments(out)
	if d := cmp.Diff(want, got); d != "" || err != nil {
		t.Errorf("arguments of the operator (-chart +kustomize), %v:\n%s", err, d)
	}
	if strings.Contains(string(out), cloudConfig) {
		t.Error("the ConfigMap of the user gets into the cluster")
	}
	if !strings.Contains(string(out), "image: registry.example.com:5000/mirror/operator:v1.1.0") || strings.Contains(string(out), "image: registry.constellation.example") {
		t.Error("the user's kustomization does not change the images")
	}

	for _, tt := range []struct{ name, kustomization, cloud, want string }{
		{name: "no ConfigMap", kustomization: "components: [operator]", want: "nothing selected by ConfigMap.[noVer].[noGrp]/constellation-cloud.[noNs]:data.provider"},
		{name: "no address", kustomization: user, cloud: strings.Replace(cloudOfUser, "  metadataURL:", "  other:", 1), want: "fieldPath `data.metadataURL` is missing for replacement source ConfigMap.[noVer].[noGrp]/constellation-cloud"},
		{name: "used as a base", kustomization: "resources: [operator]", want: "expected kind != 'Component'"},
	} {
		if _, err := build(tt.kustomization, tt.cloud); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v, want %q", tt.name, err, tt.want)
		}
	}

	// The example of the documentation is complete.
	page, err := os.ReadFile("../../../docs/gitops.md")
	if err != nil {
		t.Fatal(err)
	}
	_, example, _ := strings.Cut(string(page), "```yaml\n# kustomization.yaml\n")
	example, _, _ = strings.Cut("# kustomization.yaml\n"+example, "```")
	files := map[string]string{}
	for doc := range strings.SplitSeq(example, "---\n") {
		name, content, _ := strings.Cut(strings.TrimPrefix(doc, "# "), "\n")
		files[name] = content
	}
	if built, err = buildAll("constellation-operator", files); err == nil {
		out, err = built.AsYaml()
	}
	if err != nil {
		t.Fatal(err)
	}
	if got, err = operatorArguments(out); err != nil || !slices.Contains(got, "--cloud=http://10.42.0.1:8090") || !strings.Contains(string(out), "image: registry.example.com/constellation/operator:v1.1.0") {
		t.Errorf("the example of the documentation gives the arguments %q, %v", got, err)
	}
}

func contents(t *testing.T, dir string) map[string]string {
	t.Helper()
	out := map[string]string{}
	err := filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		b, err := os.ReadFile(path)
		rel, _ := filepath.Rel(dir, path)
		out[rel] = string(b)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// Helm reads numbers as float64, whose text has an exponent from a million on.
func TestLargeSettingsStayIntegers(t *testing.T) {
	b, err := render.Chart("constellation-plans", "v1.1.0", "system-upgrade", nil, map[string]any{"settings": map[string]any{"SYSTEM_UPGRADE_JOB_TTL_SECONDS_AFTER_FINISH": float64(1_209_600)}})
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(b), `SYSTEM_UPGRADE_JOB_TTL_SECONDS_AFTER_FINISH: "1209600"`) {
		t.Error("the setting is not 1209600")
	}
}
