package release

import (
	"fmt"
	"net/url"
	"regexp"
	"strings"
	"unicode"
)

// Chart is a chart of a release, or one from a user's configuration.
type Chart struct {
	// Name is the name of its Helm release, in Namespace.
	Name      string         `yaml:"name" json:"name"`
	Namespace string         `yaml:"namespace" json:"namespace"`
	Values    map[string]any `yaml:"values" json:"-"` // may hold secrets
	// Needs are names of earlier charts that must be ready before it is installed.
	Needs []string `yaml:"needs,omitempty" json:"needs,omitempty"`

	// Source is where it is fetched from; empty for a chart of the program, which has none of the
	// following fields. Version and Digest identify the chart.
	Source  string `yaml:"source,omitempty" json:"source,omitempty"`
	Version string `yaml:"version,omitempty" json:"version,omitempty"`
	Digest  string `yaml:"digest,omitempty" json:"digest,omitempty"`
	// Chart is its name in Chart.yaml; empty if that is Name.
	Chart string `yaml:"chart,omitempty" json:"chart,omitempty"`
	// CRDs is SkipCRDs, or empty: the definitions in its folder crds are applied first.
	CRDs string `yaml:"crds,omitempty" json:"crds,omitempty"`
	// Destructive describes the loss when it replaces another version; empty if there is none.
	Destructive string `yaml:"destructive,omitempty" json:"destructive,omitempty"`
}

// SkipCRDs leaves the definitions of a chart to its user.
const SkipCRDs = "skip"

// ChartName is the name in its Chart.yaml.
func (c Chart) ChartName() string {
	if c.Chart != "" {
		return c.Chart
	}
	return c.Name
}

// ChartProblem is a problem of a chart's field.
type ChartProblem struct{ Field, Problem, Remedy string }

// String is the problem in one line.
func (p ChartProblem) String() string {
	if p.Remedy == "" {
		return p.Field + ": " + p.Problem
	}
	return p.Field + ": " + p.Problem + " (" + p.Remedy + ")"
}

var chartVersionRE = regexp.MustCompile(`^v?[0-9]+\.[0-9]+\.[0-9]+([-+][0-9A-Za-z.+-]+)?$`)

// Check returns the problems of a chart; known has the names of earlier charts.
func (c Chart) Check(known func(name string) bool) (out []ChartProblem) {
	bad := func(field, remedy, format string, args ...any) {
		out = append(out, ChartProblem{field, fmt.Sprintf(format, args...), remedy})
	}
	const names = "use a-z, 0-9, - and ."
	switch {
	case !nameRE.MatchString(c.Name) || len(c.Name) > 53: // Helm's limit
		bad("name", names+", at most 53", "%q is invalid", shorten(c.Name))
	case known(c.Name):
		bad("name", "give each its own name", "%s occurs twice", c.Name)
	}
	if !nameRE.MatchString(c.Namespace) || len(c.Namespace) > 63 || strings.Contains(c.Namespace, ".") {
		bad("namespace", "use a-z, 0-9 and -, at most 63", "%q is invalid", shorten(c.Namespace))
	}
	for _, n := range c.Needs { // an earlier chart cannot need it in turn
		if !known(n) {
			bad("needs", "name earlier charts only", "there is no earlier chart %s", shorten(n))
		}
	}
	if c.Source == "" {
		if c.Version != "" || c.Digest != "" || c.Chart != "" || c.CRDs != "" || c.Destructive != "" {
			bad("source", "add the chart's address: file:, https: or oci:", "is missing")
		}
		return out
	}
	if problem, remedy := BadSource(c.Source); problem != "" {
		bad("source", remedy, "%s", problem)
	}
	if !chartVersionRE.MatchString(c.Version) || len(c.Version) > maxVersion {
		bad("version", "write it as in its Chart.yaml, such as 1.17.4 or v1.19.1", "%q is not a version", shorten(c.Version))
	}
	if c.Digest == "" {
		bad("digest", digestRemedy, "is missing: without it, anyone with write access to the source could change the cluster")
	} else if problem, remedy := BadDigest(c.Digest); problem != "" {
		bad("digest", remedy, "%s", problem)
	}
	if c.Chart != "" && !nameRE.MatchString(c.Chart) {
		bad("chart", names, "%q is not a valid chart name", shorten(c.Chart))
	}
	if c.CRDs != "" && c.CRDs != SkipCRDs {
		bad("crds", "write "+SkipCRDs+", or leave it out", "is %q", shorten(c.CRDs))
	}
	if badText(c.Destructive) {
		bad("destructive", "describe the loss in one line", "is not one line of text")
	}
	return out
}

const digestRemedy = "write sha256: and 64 hex digits: `sha256sum` of the .tgz, or for oci:// the digest that `helm pull` prints"

// BadDigest returns the problem of a digest and its remedy; empty if it is valid.
func BadDigest(s string) (problem, remedy string) {
	if digestRE.MatchString(s) {
		return "", ""
	}
	return fmt.Sprintf("%q is not a digest", shorten(s)), digestRemedy
}

var repositoryRE = regexp.MustCompile(`^oci://([a-z0-9-]+(\.[a-z0-9-]+)+|localhost|\[[0-9a-f:]+\])(:[0-9]{1,5})?(/[a-z0-9]+([._-]+[a-z0-9]+)*)+/?$`)

// BadSource returns the problem of a chart's source and its remedy; empty if it is valid.
func BadSource(s string) (problem, remedy string) {
	const how = "write file:DIR, https://host/path or oci://host/path/chart"
	scheme, rest, ok := strings.Cut(s, ":")
	switch {
	case !ok || rest == "" || s != strings.TrimSpace(s) || strings.ContainsFunc(s, unicode.IsControl):
		if strings.Contains(s, "@") { // possibly a password
			return "is not a source", how
		}
		return fmt.Sprintf("%q is not a source", shorten(s)), how
	case scheme == "file":
		return "", ""
	case scheme != "https" && scheme != "http" && scheme != "oci":
		return fmt.Sprintf("has the scheme %q", shorten(scheme)), how
	}
	u, err := url.Parse(s)
	switch {
	case err != nil:
		return "is not an address", how // the cause may quote a password
	case u.User != nil || u.RawQuery != "":
		return "contains credentials or a query", "write the address only; `docker login` and `helm registry login` store credentials"
	case u.Host == "" || u.Fragment != "" || u.Opaque != "":
		return "is not an address", how
	case scheme == "http" && !loopback(u.Hostname()):
		return "is not encrypted", "write https://; http is for this computer only"
	case scheme == "oci" && !repositoryRE.MatchString(s):
		return "is not a repository of a registry", "write oci://host/path/chart as for `helm pull`, without a tag: the digest selects the chart"
	}
	return "", ""
}
