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
	b, err := render.Chart("constellation-plans", "v1.1.0", "system-upgrade", map[string]any{"settings": map[string]any{"SYSTEM_UPGRADE_JOB_TTL_SECONDS_AFTER_FINISH": float64(1_209_600)}})
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(b), `SYSTEM_UPGRADE_JOB_TTL_SECONDS_AFTER_FINISH: "1209600"`) {
		t.Error("the setting is not 1209600")
	}
}
