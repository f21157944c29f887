package release

import (
	"fmt"
	"net/url"
	"regexp"
	"strings"
	"unicode"
)

// Chart is a chart of a release, or one that a user's configuration adds.
type Chart struct {
	// Name is what Helm calls its installation, in Namespace.
	Name      string         `yaml:"name" json:"name"`
	Namespace string         `yaml:"namespace" json:"namespace"`
	Values    map[string]any `yaml:"values" json:"-"` // may hold secrets
	// Needs are names of charts above it that must be ready before it is installed.
	Needs []string `yaml:"needs,omitempty" json:"needs,omitempty"`

	// Source is where it is fetched from; empty for one that comes with the program, which
	// has none of what follows. Version and Digest say which chart is meant.
	Source  string `yaml:"source,omitempty" json:"source,omitempty"`
	Version string `yaml:"version,omitempty" json:"version,omitempty"`
	Digest  string `yaml:"digest,omitempty" json:"digest,omitempty"`
	// Chart is its own name; empty if that is Name.
	Chart string `yaml:"chart,omitempty" json:"chart,omitempty"`
	// CRDs is SkipCRDs, or empty: the definitions in its folder crds come before it.
	CRDs string `yaml:"crds,omitempty" json:"crds,omitempty"`
	// Destructive is what is lost when it replaces another version; empty if nothing is.
	Destructive string `yaml:"destructive,omitempty" json:"destructive,omitempty"`
}

// SkipCRDs leaves the definitions of a chart to somebody else.
const SkipCRDs = "skip"

// ChartName is the name in its Chart.yaml.
func (c Chart) ChartName() string {
	if c.Chart != "" {
		return c.Chart
	}
	return c.Name
}

// ChartProblem is what is wrong with a field of a chart.
type ChartProblem struct{ Field, Problem, Remedy string }

// String is the problem in one line.
func (p ChartProblem) String() string {
	if p.Remedy == "" {
		return p.Field + ": " + p.Problem
	}
	return p.Field + ": " + p.Problem + " (" + p.Remedy + ")"
}

var chartVersionRE = regexp.MustCompile(`^v?[0-9]+\.[0-9]+\.[0-9]+([-+][0-9A-Za-z.+-]+)?$`)

// Check returns what is wrong with a chart; known says which charts stand above it.
func (c Chart) Check(known func(name string) bool) (out []ChartProblem) {
	bad := func(field, remedy, format string, args ...any) {
		out = append(out, ChartProblem{field, fmt.Sprintf(format, args...), remedy})
	}
	const names = "use a-z, 0-9, - and ."
	switch {
	case !nameRE.MatchString(c.Name) || len(c.Name) > 53: // Helm's limit
		bad("name", names+", at most 53", "%q cannot be one", shorten(c.Name))
	case known(c.Name):
		bad("name", "give each its own name", "%s occurs twice", c.Name)
	}
	if !nameRE.MatchString(c.Namespace) || len(c.Namespace) > 63 || strings.Contains(c.Namespace, ".") {
		bad("namespace", "use a-z, 0-9 and -, at most 63", "%q cannot be one", shorten(c.Namespace))
	}
	for _, n := range c.Needs { // what stands above cannot need it in turn
		if !known(n) {
			bad("needs", "name charts that stand before it", "there is no chart %s above it", shorten(n))
		}
	}
	if c.Source == "" {
		if c.Version != "" || c.Digest != "" || c.Chart != "" || c.CRDs != "" || c.Destructive != "" {
			bad("source", "say where the chart is: file:, https: or oci:", "is missing")
		}
		return out
	}
	if problem, remedy := BadSource(c.Source); problem != "" {
		bad("source", remedy, "%s", problem)
	}
	if !chartVersionRE.MatchString(c.Version) || len(c.Version) > maxVersion {
		bad("version", "write it as in its Chart.yaml, such as 1.17.4 or v1.19.1", "%q is no version", shorten(c.Version))
	}
	if c.Digest == "" {
		bad("digest", digestRemedy, "is missing: without it anybody who can change the source could change the cluster")
	} else if problem, remedy := BadDigest(c.Digest); problem != "" {
		bad("digest", remedy, "%s", problem)
	}
	if c.Chart != "" && !nameRE.MatchString(c.Chart) {
		bad("chart", names, "%q cannot be the name of a chart", shorten(c.Chart))
	}
	if c.CRDs != "" && c.CRDs != SkipCRDs {
		bad("crds", "write "+SkipCRDs+", or leave it out", "is %q", shorten(c.CRDs))
	}
	if badText(c.Destructive) {
		bad("destructive", "write what is lost in one line", "is no line of text")
	}
	return out
}

const digestRemedy = "write sha256: and 64 hex digits: `sha256sum` of the .tgz, or for oci:// what `helm pull` prints"

// BadDigest says what is wrong with a digest, and what to do; empty if nothing is.
func BadDigest(s string) (problem, remedy string) {
	if digestRE.MatchString(s) {
		return "", ""
	}
	return fmt.Sprintf("%q is no digest", shorten(s)), digestRemedy
}

var repositoryRE = regexp.MustCompile(`^oci://([a-z0-9-]+(\.[a-z0-9-]+)+|localhost|\[[0-9a-f:]+\])(:[0-9]{1,5})?(/[a-z0-9]+([._-]+[a-z0-9]+)*)+/?$`)

// BadSource says what is wrong with the source of a chart, and what to do; empty if nothing
// is.
func BadSource(s string) (problem, remedy string) {
	const how = "write file:DIR, https://host/path or oci://host/path/chart"
	scheme, rest, ok := strings.Cut(s, ":")
	switch {
	case !ok || rest == "" || s != strings.TrimSpace(s) || strings.ContainsFunc(s, unicode.IsControl):
		if strings.Contains(s, "@") { // perhaps a password
			return "is no source", how
		}
		return fmt.Sprintf("%q is no source", shorten(s)), how
	case scheme == "file":
		return "", ""
	case scheme != "https" && scheme != "http" && scheme != "oci":
		return fmt.Sprintf("has the scheme %q", shorten(scheme)), how
	}
	u, err := url.Parse(s)
	switch {
	case err != nil:
		return "is no address", how // the cause may quote a password
	case u.User != nil || u.RawQuery != "":
		return "holds credentials or a query", "name the address alone; `docker login` and `helm registry login` store credentials"
	case u.Host == "" || u.Fragment != "" || u.Opaque != "":
		return "is no address", how
	case scheme == "http" && !loopback(u.Hostname()):
		return "is not encrypted", "write https://; http is for this computer alone"
	case scheme == "oci" && !repositoryRE.MatchString(s):
		return "is no repository of a registry", "write oci://host/path/chart as for `helm pull`, without a tag: the digest says which chart it is"
	}
	return "", ""
}
