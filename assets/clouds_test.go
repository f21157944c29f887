package assets_test

import (
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"

	"constellation/assets"
	"constellation/assets/render"
	"constellation/engine/cloud/providers"
	"constellation/engine/cloud/section"
	"constellation/engine/sandbox/controlplane"
)

// cloudCharts renders the charts of all clouds, with the newest images.
func cloudCharts(t *testing.T) map[string][]byte {
	t.Helper()
	gcp, ok := providers.Named("gcp")
	if !ok {
		t.Fatal("there is no provider gcp")
	}
	parts, err := gcp.Parts(providers.ClusterOf{
		Config:  section.Values{"cloudControllerManager": true, "cloudControllerManagerChart": true, "persistentDisksChart": true, "networkPlugin": "flannel"},
		State:   section.Values{"project": "my-project", "uid": "1a2b3c4d"},
		PodCIDR: netip.MustParsePrefix("10.244.0.0/16"),
	})
	if err != nil {
		t.Fatal(err)
	}
	images, err := assets.CloudImages()
	if err != nil {
		t.Fatal(err)
	}
	newest := map[string]assets.CloudImage{}
	for _, i := range images {
		newest[i.Name] = i
	}
	used := map[string]bool{}
	out := map[string][]byte{}
	for _, p := range parts {
		values := maps.Clone(p.Values)
		if values == nil {
			values = map[string]any{}
		}
		for value, name := range p.Images {
			if newest[name].Image == "" {
				t.Errorf("chart %s: there is no image %s", p.Chart, name)
			}
			used[name] = true
			values[value] = newest[name].Image
		}
		files, err := assets.CloudChart(p.Chart, newest[p.Images["image"]].Version)
		if err != nil {
			t.Fatal(err)
		}
		if out[p.Chart], err = render.Files(files, p.Chart, p.Namespace, values); err != nil {
			t.Fatal(err)
		}
	}
	for name := range newest {
		if !used[name] {
			t.Errorf("no chart has image %s", name)
		}
	}
	return out
}

// TestCloudImagesAreDigests has no tag decide what runs.
func TestCloudImagesAreDigests(t *testing.T) {
	t.Parallel()
	images, err := assets.CloudImages()
	if err != nil {
		t.Fatal(err)
	}
	reference := regexp.MustCompile(`^[a-z0-9.]+(/[-a-z0-9]+)+@sha256:[0-9a-f]{64}$`)
	seen := map[string]bool{}
	for _, i := range images {
		if !reference.MatchString(i.Image) || !strings.HasPrefix(i.Version, "v") || seen[i.Image] {
			t.Errorf("%+v", i)
		}
		seen[i.Image] = true
	}
	if _, err := assets.CloudChart("../../charts/constellation-operator", "v1.0.0"); err == nil {
		t.Error("a chart of another folder was found")
	}
}

// TestCloudChartsRejectTags has each chart refuse an image without a digest, and values that it does not know.
func TestCloudChartsRejectTags(t *testing.T) {
	t.Parallel()
	for _, chart := range []string{"flannel", "gcp-cloud-controller-manager", "gcp-persistent-disks"} {
		files, err := assets.CloudChart(chart, "v1.2.3")
		if err != nil {
			t.Fatal(err)
		}
		if _, err := render.Files(files, chart, "kube-system", map[string]any{"image": "registry.example/it:v1.0.0"}); err == nil || !strings.Contains(err.Error(), "image") {
			t.Errorf("%s: %v", chart, err)
		}
		if _, err := render.Files(files, chart, "kube-system", map[string]any{"imagine": "x"}); err == nil || !strings.Contains(err.Error(), "imagine") {
			t.Errorf("%s: %v", chart, err)
		}
	}
}

// TestCloudChartsRunBeforeTheNetwork has the software that Nodes wait for start on Nodes that are not initialized, without
// a network of pods.
func TestCloudChartsRunBeforeTheNetwork(t *testing.T) {
	t.Parallel()
	sets := map[string]appsv1.DaemonSet{}
	for _, stream := range cloudCharts(t) {
		var all []*appsv1.DaemonSet
		documents(t, stream, func(kind string) any {
			if kind != "DaemonSet" {
				return nil
			}
			all = append(all, &appsv1.DaemonSet{})
			return all[len(all)-1]
		})
		for _, s := range all {
			sets[s.Name] = *s
		}
	}
	if got := slices.Sorted(maps.Keys(sets)); !slices.Equal(got, []string{"cloud-controller-manager", "flannel", "gcp-persistent-disks-node"}) {
		t.Fatalf("DaemonSets %v", got)
	}
	for name, s := range sets {
		pod := s.Spec.Template.Spec
		all := slices.ContainsFunc(pod.Tolerations, func(x corev1.Toleration) bool {
			return x.Key == "" && x.Operator == corev1.TolerationOpExists && x.Effect == ""
		})
		if !pod.HostNetwork || !all {
			t.Errorf("%s: host network %t, tolerations %+v", name, pod.HostNetwork, pod.Tolerations)
		}
	}
	manager := sets["cloud-controller-manager"].Spec.Template.Spec.Containers[0]
	for _, want := range []string{"--cloud-provider=gce", "--cidr-allocator-type=CloudAllocator", "--configure-cloud-routes=false", "--cluster-cidr=10.244.0.0/16", "--cluster-name=constellation-1a2b3c4d"} {
		if !slices.Contains(manager.Args, want) {
			t.Errorf("the manager lacks %s: %q", want, manager.Args)
		}
	}
}

// TestCloudChartsFitTheAPIServer applies what the charts render to API servers of all versions that are here: fields that
// a version does not know are errors.
func TestCloudChartsFitTheAPIServer(t *testing.T) {
	cache, err := os.UserCacheDir()
	if err != nil {
		t.Fatal(err)
	}
	versions, _ := filepath.Glob(filepath.Join(cache, "constellation", "kubernetes", "v*", "bin", "kube-apiserver"))
	dirs := []string{""}
	if !testing.Short() && os.Getenv("CONSTELLATION_KUBERNETES_BIN") == "" && len(versions) > 0 {
		dirs = dirs[:0]
		for _, v := range versions {
			if _, err := os.Stat(filepath.Join(filepath.Dir(v), "etcd")); err == nil {
				dirs = append(dirs, filepath.Dir(v))
			}
		}
	}
	charts := cloudCharts(t)
	for _, dir := range dirs {
		t.Run(filepath.Base(filepath.Dir(dir)), func(t *testing.T) {
			cp := controlplane.ForTest(t, controlplane.Options{BinDir: dir})
			for _, name := range slices.Sorted(maps.Keys(charts)) {
				if err := cp.Apply(t.Context(), charts[name]); err != nil {
					t.Errorf("%s: %v", name, err)
				}
			}
		})
	}
}
