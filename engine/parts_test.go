package engine

import (
	"errors"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"constellation/assets"
	"constellation/engine/cloud/gcp"
	"constellation/engine/cloud/section"
	"constellation/engine/cluster"
	"constellation/engine/plan"
	"constellation/engine/release"
	"constellation/engine/version"
	"constellation/engine/workspace"
)

// atGoogle returns the run of a cluster at Google with a section of the configuration.
func atGoogle(t *testing.T, target string, config section.Values) *clusterRun {
	t.Helper()
	feed, err := release.Embedded(assets.Releases())
	if err != nil {
		t.Fatal(err)
	}
	r, err := feed.Release(t.Context(), version.MustParse("v1.1.0"))
	if err != nil {
		t.Fatal(err)
	}
	s := &workspace.State{}
	s.Infrastructure.Provider = gcp.Name
	s.Infrastructure.Section = section.Values{"project": "my-project", "zones": []string{"europe-west3-a"}, "uid": "1a2b3c4d"}
	i := &clusterRun{facts: &facts{state: s, release: r}}
	c := &workspace.Config{PodCIDR: netip.MustParsePrefix("10.244.0.0/16")}
	c.Provider.Section = config
	if target != "" {
		c.Kubernetes = version.MustParse(target)
	}
	i.want(c)
	return i
}

func runs(v string) func() (string, error) { return func() (string, error) { return v, nil } }

const ownImage = "registry.k8s.io/cloud-provider-gcp/cloud-controller-manager:v36.0.7@sha256:0000000000000000000000000000000000000000000000000000000000000000"

func TestPartCharts(t *testing.T) {
	t.Parallel()
	whole := section.Values{"cloudControllerManager": true, "cloudControllerManagerChart": true, "persistentDisksChart": true, "networkPlugin": "flannel"}
	with := func(name, value string) section.Values {
		out := section.Values{name: value}
		for k, v := range whole {
			out[k] = v
		}
		return out
	}
	for _, tt := range []struct {
		name, running, target string
		config                section.Values
		want                  []string // charts with versions
		problem               string
	}{
		{name: "nothing is switched on", running: "v1.36.4", target: "v1.36.4"},
		{name: "kubelets alone wait", running: "v1.36.4", target: "v1.36.4", config: section.Values{"cloudControllerManager": true}},
		{name: "all", running: "v1.36.4", target: "v1.36.4", config: whole, want: []string{"gcp-cloud-controller-manager 35.0.2", "flannel 0.28.4", "gcp-persistent-disks 1.22.1"}},
		{name: "disks alone", running: "v1.37.2", target: "v1.37.2", config: section.Values{"persistentDisksChart": true}, want: []string{"gcp-persistent-disks 1.22.1"}},
		{name: "the manager follows the API servers, not the target", running: "v1.34.4", target: "v1.35.4", config: whole, want: []string{"gcp-cloud-controller-manager 34.2.0", "flannel 0.28.4", "gcp-persistent-disks 1.22.1"}},
		{name: "no manager for the target", running: "v1.36.4", target: "v1.37.2", config: whole, problem: "one minor older than v1.37 at most"},
		{name: "an image of the user", running: "v1.36.4", target: "v1.37.2", config: with("cloudControllerManagerImage", ownImage), want: []string{"gcp-cloud-controller-manager 36.0.7", "flannel 0.28.4", "gcp-persistent-disks 1.22.1"}},
		{name: "an image of the user that is too new", running: "v1.35.4", target: "v1.36.4", config: with("cloudControllerManagerImage", ownImage), problem: "may not be newer than v1.35"},
		{name: "a manager without kubelets that wait", running: "v1.36.4", target: "v1.36.4", config: section.Values{"cloudControllerManagerChart": true}, problem: "needs cloudControllerManager: true"},
		{name: "a network plugin without a manager", running: "v1.36.4", target: "v1.36.4", config: section.Values{"networkPlugin": "flannel"}, problem: "needs a cloud controller manager"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			i := atGoogle(t, tt.target, tt.config)
			charts, err := i.partCharts(runs(tt.running))
			var got []string
			for _, c := range charts {
				got = append(got, c.Name+" "+c.Version)
			}
			if !slices.Equal(got, tt.want) || (err != nil) != (tt.problem != "") {
				t.Fatalf("charts %q, want %q: %v", got, tt.want, err)
			}
			f := i.partsFinding(runs(tt.running))
			if tt.problem == "" {
				if f != nil {
					t.Errorf("finding %+v", f)
				}
				return
			}
			if f == nil || f.Severity != plan.Block || !strings.Contains(f.Detail, tt.problem) || f.Remedy == "" {
				t.Errorf("finding %+v, want %q", f, tt.problem)
			}
		})
	}
}

// TestPartsAreInstalledWithTheServices has the charts of the cloud before those of the release, which do not wait for them.
func TestPartsAreInstalledWithTheServices(t *testing.T) {
	t.Parallel()
	i := atGoogle(t, "v1.36.4", section.Values{"cloudControllerManager": true, "cloudControllerManagerChart": true, "networkPlugin": "flannel"})
	charts, err := i.charts("", runs("v1.36.4"))
	if err != nil {
		t.Fatal(err)
	}
	if len(charts) != 2+len(i.release.Charts) || charts[0].Name != "gcp-cloud-controller-manager" || !slices.Equal(charts[1].Needs, []string{"gcp-cloud-controller-manager"}) {
		t.Fatalf("charts %+v", charts)
	}
	for _, c := range charts[:2] {
		var version string
		for _, f := range c.Files {
			if f.Name == "Chart.yaml" {
				version = string(f.Data)
			}
		}
		if !strings.Contains(version, "version: "+c.Version) {
			t.Errorf("%s is stamped\n%s", c.Name, version)
		}
	}
	if image, _ := charts[0].Values["image"].(string); !strings.Contains(image, "@sha256:") || charts[0].Values["nodeTag"] != "constellation-1a2b3c4d" || charts[0].Values["podCIDR"] != "10.244.0.0/16" {
		t.Errorf("values %v", charts[0].Values)
	}
	if effect := i.chartsEffect(); !strings.Contains(effect, "gcp-cloud-controller-manager, flannel") {
		t.Errorf("the plan says %q", effect)
	}
	// A cluster that does not answer is an error, and nothing is guessed.
	if _, err := i.charts("", func() (string, error) { return "", cluster.ErrAbsent }); !errors.Is(err, cluster.ErrAbsent) {
		t.Errorf("no answer: %v", err)
	}
	// Other clouds have none.
	i.state.Infrastructure.Provider = "sandbox"
	if charts, err := i.partCharts(nil); err != nil || len(charts) > 0 {
		t.Errorf("in a sandbox: %v, %v", charts, err)
	}
}
