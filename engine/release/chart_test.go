package release

import (
	"strings"
	"testing"
)

func TestInvalidSources(t *testing.T) {
	for source, want := range map[string]string{
		"file:charts": "", "file:/a/b.tgz": "", "https://charts.example.com": "", "http://127.0.0.1:8080/x": "", "oci://ghcr.io/example/cilium": "", "oci://localhost:5000/cilium": "",
		"": "is not a source", "charts": "is not a source", "file:": "is not a source", " https://x": "is not a source",
		"http://charts.example.com": "not encrypted", "ftp://x/y": "scheme", "https://": "is not an address", "https://x/?token=a": "contains credentials or a query",
		"https://user:pass@x": "credentials", "oci://ghcr.io/a/b:v1@sha256:0": "not a repository", "oci://cilium": "not a repository", "https://x/%zz": "is not an address",
	} {
		problem, remedy := BadSource(source)
		if (want == "") != (problem == "") || !strings.Contains(problem, want) || problem != "" && remedy == "" || strings.Contains(problem, "pass") {
			t.Errorf("%q: %q, %q; want %q", source, problem, remedy, want)
		}
	}
}

// A third-party chart is accepted only with all fields that identify it.
func TestThirdPartyCharts(t *testing.T) {
	good := Chart{Name: "cilium", Namespace: "kube-system", Source: "oci://ghcr.io/example/cilium", Version: "1.17.4", Digest: "sha256:" + strings.Repeat("a", 64)}
	for _, tt := range []struct {
		name, want string
		change     func(*Chart)
	}{
		{"whole", "", func(*Chart) {}},
		{"with the program", "", func(c *Chart) { *c = Chart{Name: "own", Namespace: "n", Needs: []string{"above"}} }},
		{"everything", "", func(c *Chart) {
			c.Chart, c.CRDs, c.Destructive, c.Needs = "other", SkipCRDs, "the custom resources", []string{"above"}
		}},
		{"without a digest", "digest: is missing", func(c *Chart) { c.Digest = "" }},
		{"with a tag for a digest", "digest: \"1.17.4\" is not a digest", func(c *Chart) { c.Digest = "1.17.4" }},
		{"without a version", "version: \"\" is not a version", func(c *Chart) { c.Version = "" }},
		{"without a source", "source: is missing", func(c *Chart) { c.Source = "" }},
		{"with a tag", "source: is not a repository", func(c *Chart) { c.Source += ":v1" }},
		{"twice", "name: above occurs twice", func(c *Chart) { c.Name = "above" }},
		{"with an invalid name", "name: ", func(c *Chart) { c.Name = "A b" }},
		{"with an invalid namespace", "namespace: ", func(c *Chart) { c.Namespace = "a.b" }},
		{"that needs what comes later", "needs: there is no earlier chart later", func(c *Chart) { c.Needs = []string{"later"} }},
		{"with two lines", "destructive: ", func(c *Chart) { c.Destructive = "a\nb" }},
		{"with crds", "crds: is \"later\"", func(c *Chart) { c.CRDs = "later" }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := good
			tt.change(&c)
			got := c.Check(func(name string) bool { return name == "above" })
			if tt.want == "" && len(got) > 0 || tt.want != "" && (len(got) != 1 || !strings.HasPrefix(got[0].String(), tt.want) || got[0].Remedy == "") {
				t.Errorf("%v, want %q", got, tt.want)
			}
		})
	}
}
