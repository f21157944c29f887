package assets

import (
	"bytes"
	"errors"
	"io/fs"
	"path"
	"slices"
	"strings"
	"testing"

	"gopkg.in/yaml.v3"
)

func file(t *testing.T, all []File, err error, name string) string {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range all {
		if f.Name == name {
			return string(f.Data)
		}
	}
	t.Fatalf("no file %s", name)
	return ""
}

func TestChartCarriesTheReleasesVersion(t *testing.T) {
	for _, release := range []string{"v1.0.0", "v1.1.0"} {
		all, err := ChartFor("constellation-services", release)
		var c struct{ Version, AppVersion string }
		// yaml.v3 lower-cases field names, so appVersion needs its own key.
		b := strings.Replace(file(t, all, err, "Chart.yaml"), "appVersion", "appversion", 1)
		if err := yaml.Unmarshal([]byte(b), &c); err != nil {
			t.Fatal(err)
		}
		if c.Version != strings.TrimPrefix(release, "v") || c.AppVersion != release {
			t.Errorf("chart of %s has version %s, appVersion %s", release, c.Version, c.AppVersion)
		}
	}
}

func TestOlderReleaseLacksLaterAdditions(t *testing.T) {
	for _, tt := range []struct{ chart, value string }{
		{"constellation-services", "maxUnavailable"},
		{"constellation-operator", "discoveryInterval"},
		{"constellation-operator", "relayPort"},
		{"constellation-operator", "plans"},
	} {
		for _, name := range []string{"values.yaml", "values.schema.json"} {
			older, err := ChartFor(tt.chart, "v1.0.0")
			if strings.Contains(file(t, older, err, name), tt.value) {
				t.Errorf("%s of %s v1.0.0 has %s", name, tt.chart, tt.value)
			}
			newer, err := ChartFor(tt.chart, "v1.1.0")
			if !strings.Contains(file(t, newer, err, name), tt.value) {
				t.Errorf("%s of %s v1.1.0 lacks %s", name, tt.chart, tt.value)
			}
		}
	}
	older, err := CRDsFor("v1.0.0")
	if err != nil {
		t.Fatal(err)
	}
	newer, err := CRDsFor("v1.1.0")
	if err != nil {
		t.Fatal(err)
	}
	if len(older) != 5 || len(newer) != 5 {
		t.Fatalf("%d and %d kinds, want 5", len(older), len(newer))
	}
	for i, n := range newer {
		o := older[i]
		if o.Name != n.Name || o.Name == "" {
			t.Fatalf("kind %d is %q and %q", i, o.Name, n.Name)
		}
		if n.Name == "nodeversions.update.edgeless.systems" {
			if strings.Contains(string(o.Data), "keepWorkers") || !strings.Contains(string(n.Data), "keepWorkers:") {
				t.Error("keepWorkers must exist from v1.1.0 on")
			}
			continue
		}
		if n.Name != "scalinggroups.update.edgeless.systems" {
			if !bytes.Equal(o.Data, n.Data) {
				t.Errorf("%s differs between the releases", n.Name)
			}
			continue
		}
		if strings.Contains(string(o.Data), "strategy") || strings.Contains(string(o.Data), "Strategy") {
			t.Errorf("v1.0.0 has the strategy of a group:\n%s", o.Data)
		}
		if !strings.Contains(string(n.Data), "strategy:") {
			t.Error("v1.1.0 lacks the strategy of a group")
		}
	}
}

func TestUnknownNamesAreErrors(t *testing.T) {
	if _, err := ChartFor("constellation-services", "v9.9.9"); !errors.Is(err, ErrUnknownRelease) || !strings.Contains(err.Error(), "v1.1.0, v1.0.0") {
		t.Errorf("unknown release: %v", err)
	}
	if _, err := CRDsFor(""); !errors.Is(err, ErrUnknownRelease) {
		t.Errorf("no release: %v", err)
	}
	for _, name := range []string{"", ".", "..", "../crds", "nginx"} {
		if _, err := ChartFor(name, "v1.1.0"); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("chart %q: %v", name, err)
		}
	}
}

func TestEveryReleaseHasCharts(t *testing.T) {
	files, err := fs.Glob(Releases(), "releases/*.yaml")
	if err != nil || len(files) == 0 {
		t.Fatal(files, err)
	}
	for _, f := range files {
		release := strings.TrimSuffix(path.Base(f), ".yaml")
		b, err := fs.ReadFile(Releases(), f)
		if err != nil {
			t.Fatal(err)
		}
		var r struct {
			Charts []struct{ Name string }
			CRDs   []string `yaml:"crds"`
		}
		if err := yaml.Unmarshal(b, &r); err != nil {
			t.Fatal(err)
		}
		for _, c := range r.Charts {
			if _, err := ChartFor(c.Name, release); err != nil {
				t.Errorf("release %s: %v", release, err)
			}
		}
		crds, err := CRDsFor(release)
		if err != nil {
			t.Fatal(err)
		}
		var names []string
		for _, c := range crds {
			names = append(names, c.Name)
		}
		if !slices.Equal(names, slices.Sorted(slices.Values(r.CRDs))) {
			t.Errorf("release %s names the kinds %v, there are %v", release, r.CRDs, names)
		}
	}
}
