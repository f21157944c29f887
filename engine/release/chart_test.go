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
		{name: "a chart with a source", want: "", change: func(*Chart) {}},
		{name: "a chart of the program", want: "", change: func(c *Chart) { *c = Chart{Name: "own", Namespace: "n", Needs: []string{"above"}} }},
		{name: "a chart with all fields", want: "", change: func(c *Chart) {
			c.Chart, c.CRDs, c.Destructive, c.Needs = "other", SkipCRDs, "the custom resources", []string{"above"}
		}},
		{name: "a chart without a digest", want: "digest: is missing", change: func(c *Chart) { c.Digest = "" }},
		{name: "a chart with a tag for a digest", want: "digest: \"1.17.4\" is not a digest", change: func(c *Chart) { c.Digest = "1.17.4" }},
		{name: "a chart without a version", want: "version: \"\" is not a version", change: func(c *Chart) { c.Version = "" }},
		{name: "a chart without a source", want: "source: is missing", change: func(c *Chart) { c.Source = "" }},
		{name: "a source with a tag", want: "source: is not a repository", change: func(c *Chart) { c.Source += ":v1" }},
		{name: "two charts of one name", want: "name: above occurs twice", change: func(c *Chart) { c.Name = "above" }},
		{name: "a chart with an invalid name", want: "name: ", change: func(c *Chart) { c.Name = "A b" }},
		{name: "a chart with an invalid namespace", want: "namespace: ", change: func(c *Chart) { c.Namespace = "a.b" }},
		{name: "a chart that needs a later one", want: "needs: there is no earlier chart later", change: func(c *Chart) { c.Needs = []string{"later"} }},
		{name: "a destructive change of two lines", want: "destructive: ", change: func(c *Chart) { c.Destructive = "a\nb" }},
		{name: "an unknown value of crds", want: "crds: is \"later\"", change: func(c *Chart) { c.CRDs = "later" }},
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
