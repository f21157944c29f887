package release

import (
	"strings"
	"testing"
)

func TestSourcesSayWhatIsWrong(t *testing.T) {
	for source, want := range map[string]string{
		"file:charts": "", "file:/a/b.tgz": "", "https://charts.example.com": "", "http://127.0.0.1:8080/x": "", "oci://ghcr.io/example/cilium": "", "oci://localhost:5000/cilium": "",
		"": "no source", "charts": "no source", "file:": "no source", " https://x": "no source",
		"http://charts.example.com": "not encrypted", "ftp://x/y": "scheme", "https://": "no address", "https://x/?token=a": "credentials or a query",
		"https://user:pass@x": "credentials", "oci://ghcr.io/a/b:v1@sha256:0": "no repository", "oci://cilium": "no repository", "https://x/%zz": "no address",
	} {
		problem, remedy := BadSource(source)
		if (want == "") != (problem == "") || !strings.Contains(problem, want) || problem != "" && remedy == "" || strings.Contains(problem, "pass") {
			t.Errorf("%q: %q, %q; want %q", source, problem, remedy, want)
		}
	}
}

// A chart of others is taken only with everything that says which one it is.
func TestChartsOfOthers(t *testing.T) {
	good := Chart{Name: "cilium", Namespace: "kube-system", Source: "oci://ghcr.io/example/cilium", Version: "1.17.4", Digest: "sha256:" + strings.Repeat("a", 64)}
	for _, tt := range []struct {
		name, want string
		change     func(*Chart)
	}{
		{"whole", "", func(*Chart) {}},
		{"with the program", "", func(c *Chart) { *c = Chart{Name: "own", Namespace: "n", Needs: []string{"above"}} }},
		{"everything", "", func(c *Chart) {
			c.Chart, c.CRDs, c.Destructive, c.Needs = "other", SkipCRDs, "what was made", []string{"above"}
		}},
		{"without a digest", "digest: is missing", func(c *Chart) { c.Digest = "" }},
		{"with a tag for a digest", "digest: \"1.17.4\" is no digest", func(c *Chart) { c.Digest = "1.17.4" }},
		{"without a version", "version: \"\" is no version", func(c *Chart) { c.Version = "" }},
		{"without a source", "source: is missing", func(c *Chart) { c.Source = "" }},
		{"with a tag", "source: is no repository", func(c *Chart) { c.Source += ":v1" }},
		{"twice", "name: above occurs twice", func(c *Chart) { c.Name = "above" }},
		{"with a name that is none", "name: ", func(c *Chart) { c.Name = "A b" }},
		{"with a namespace that is none", "namespace: ", func(c *Chart) { c.Namespace = "a.b" }},
		{"that needs what comes later", "needs: there is no chart later", func(c *Chart) { c.Needs = []string{"later"} }},
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
