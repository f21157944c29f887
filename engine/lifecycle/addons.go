package lifecycle

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"constellation/engine/version"
)

// addOnsFile is the content of data/addons.yaml.
type addOnsFile struct {
	Sources map[string]string `yaml:"sources"`
	AddOns  []AddOn           `yaml:"addOns"`
}

// AddOn is software that people run in clusters and that supports only some minors of
// Kubernetes.
type AddOn struct {
	Name string `yaml:"name"`
	// Images are ends of image repositories, whole path elements: "calico/node". Their tag is
	// the version of the add-on.
	Images []string `yaml:"images"`
	// Charts are names of Helm charts. Their appVersion is the version of the add-on.
	Charts []string `yaml:"charts"`
	// ChartSource shows that the charts have the version of the add-on, too; empty if they have
	// versions of their own, or if that is unknown.
	ChartSource string `yaml:"chartSource"`
	// PartOf is a value of the label app.kubernetes.io/part-of. The label
	// app.kubernetes.io/version has the version of the add-on then.
	PartOf string `yaml:"partOf"`
	// Follows is whether each minor of the add-on is made for the minor of Kubernetes with the
	// same number.
	Follows bool `yaml:"follows"`
	// Nodes is what the add-on does to nodes: "drains and reboots nodes"; empty if nothing.
	Nodes string `yaml:"nodes"`
	// Source is that of Follows and Nodes; empty if neither is set.
	Source   string         `yaml:"source"`
	Versions []AddOnVersion `yaml:"versions"`
}

// AddOnVersion is one minor of an add-on.
type AddOnVersion struct {
	// Version is "1.20", or "3.19.2" for a single patch.
	Version string `yaml:"version"`
	// From and To are the oldest and the newest minor of Kubernetes that its documentation
	// lists, "v1.31". To is empty if it names no newest one.
	From string `yaml:"from"`
	To   string `yaml:"to"`
	// Source is the page or document itself.
	Source string `yaml:"source"`
}

func (f *addOnsFile) check() error {
	c := checker{sources: f.Sources, used: map[string]bool{}}
	var names []string
	for i := range f.AddOns {
		a := &f.AddOns[i]
		list := "addOns"
		names = append(names, a.Name)
		complete := a.Name != "" && len(a.Images)+len(a.Charts)+len(a.PartOf) > 0 && (a.Follows || a.Nodes != "") == (a.Source != "")
		if a.Source != "" {
			for _, names := range [][]string{a.Images, a.Charts} { // a chart may have the name of its image
				c.row(list, i, a.Source, complete, slices.Clone(names))
			}
			a.Source = f.Sources[a.Source]
		} else if !complete {
			c.errs = append(c.errs, fmt.Errorf("row %d of %s: fields are missing", i+1, list))
		}
		if a.ChartSource != "" {
			c.row("chart sources of "+a.Name, 0, a.ChartSource, len(a.Charts) > 0, nil)
			a.ChartSource = f.Sources[a.ChartSource]
		}
		var versions []string
		for j := range a.Versions {
			r := &a.Versions[j]
			_, ok := parseAddOn(r.Version)
			versions = append(versions, r.Version)
			c.row("versions of "+a.Name, j, r.Source, ok && (r.From != "" || r.To != "") && isMinor(r.From) && isMinor(r.To), nil)
			r.Source = f.Sources[r.Source]
		}
		slices.Sort(versions)
		if len(slices.Compact(versions)) != len(a.Versions) {
			c.errs = append(c.errs, fmt.Errorf("row %d of %s: a version is listed twice", i+1, list))
		}
	}
	slices.Sort(names)
	if len(slices.Compact(names)) != len(f.AddOns) {
		c.errs = append(c.errs, fmt.Errorf("addOns: a name is listed twice"))
	}
	return c.done()
}

// AddOns returns all add-ons. Callers must not change them.
func AddOns() []AddOn { return all().addOns.AddOns }

// ByImage returns the add-on of an image and its version, which is empty for an image without
// a tag; nil if the image belongs to none.
func ByImage(image string) (a *AddOn, version string) {
	repository, _, _ := strings.Cut(image, "@")
	tag := ""
	// A colon before the last slash is that of a registry's port.
	if i := strings.LastIndexByte(repository, ':'); i > strings.LastIndexByte(repository, '/') {
		repository, tag = repository[:i], repository[i+1:]
	}
	addOns := all().addOns.AddOns
	for i := range addOns {
		for _, end := range addOns[i].Images {
			if repository == end || strings.HasSuffix(repository, "/"+end) {
				return &addOns[i], tag
			}
		}
	}
	return nil, ""
}

// ByChart returns the add-on of a Helm chart; nil if it belongs to none.
func ByChart(chart string) *AddOn {
	addOns := all().addOns.AddOns
	i := slices.IndexFunc(addOns, func(a AddOn) bool { return slices.Contains(a.Charts, chart) })
	if i < 0 {
		return nil
	}
	return &addOns[i]
}

// ByLabels returns the add-on of a workload with labels, and its version; nil if it belongs to
// none.
func ByLabels(labels map[string]string) (a *AddOn, version string) {
	part := labels["app.kubernetes.io/part-of"]
	if part == "" {
		return nil, ""
	}
	addOns := all().addOns.AddOns
	i := slices.IndexFunc(addOns, func(a AddOn) bool { return a.PartOf == part })
	if i < 0 {
		return nil, ""
	}
	return &addOns[i], labels["app.kubernetes.io/version"]
}

// Support is what the data has about a version of an add-on on a minor of Kubernetes.
type Support int

// Values of Support.
const (
	// SupportUnknown means that the data has no row for the version.
	SupportUnknown Support = iota
	// Supported means that the documentation of the version lists the minor.
	Supported
	// NotListed means that it lists other minors alone.
	NotListed
)

// On returns whether a version of the add-on supports a minor of Kubernetes, and the row that
// decides; the row of an add-on that follows Kubernetes is made for it.
func (a *AddOn) On(addOn string, kubernetes version.Version) (Support, AddOnVersion) {
	v, ok := parseAddOn(addOn)
	if !ok {
		return SupportUnknown, AddOnVersion{}
	}
	if a.Follows && v[0] == kubernetes.Major() {
		minor := fmt.Sprintf("v%d.%d", v[0], v[1])
		row := AddOnVersion{Version: fmt.Sprintf("%d.%d", v[0], v[1]), From: minor, To: minor, Source: a.Source}
		return row.on(kubernetes), row
	}
	found := -1
	for i := range a.Versions {
		r, _ := parseAddOn(a.Versions[i].Version)
		if len(r) > len(v) || !slices.Equal(r, v[:len(r)]) {
			continue
		}
		if found < 0 || len(a.Versions[i].Version) > len(a.Versions[found].Version) {
			found = i // the row of a patch precedes that of its minor
		}
	}
	if found < 0 {
		return SupportUnknown, AddOnVersion{}
	}
	return a.Versions[found].on(kubernetes), a.Versions[found]
}

// Newest returns the row of the newest version that lists a minor of Kubernetes; ok is false if
// none does.
func (a *AddOn) Newest(kubernetes version.Version) (row AddOnVersion, ok bool) {
	if a.Follows {
		minor := kubernetes.MinorString()
		return AddOnVersion{Version: strings.TrimPrefix(minor, "v"), From: minor, To: minor, Source: a.Source}, true
	}
	for _, r := range a.Versions {
		if r.on(kubernetes) != Supported {
			continue
		}
		was, _ := parseAddOn(row.Version)
		if is, _ := parseAddOn(r.Version); !ok || slices.Compare(was, is) < 0 {
			row, ok = r, true
		}
	}
	return row, ok
}

func (r *AddOnVersion) on(kubernetes version.Version) Support {
	from, errFrom := version.Parse(r.From + ".0")
	to, errTo := version.Parse(r.To + ".0")
	if errFrom == nil && kubernetes.Major() == from.Major() && kubernetes.Minor() < from.Minor() ||
		errTo == nil && kubernetes.Major() == to.Major() && kubernetes.Minor() > to.Minor() {
		return NotListed
	}
	return Supported
}

// Range is "v1.31 to v1.35", "v1.25 and newer".
func (r *AddOnVersion) Range() string {
	switch {
	case r.To == "":
		return r.From + " and newer"
	case r.From == "":
		return r.To + " and older"
	case r.From == r.To:
		return r.To
	}
	return r.From + " to " + r.To
}

// parseAddOn returns the numbers of a version such as "v1.20.3-rc.1", at least two and at most
// three.
func parseAddOn(s string) ([]int, bool) {
	s = strings.TrimPrefix(s, "v")
	if i := strings.IndexAny(s, "-+_"); i >= 0 {
		s = s[:i]
	}
	parts := strings.Split(s, ".")
	if len(parts) < 2 || len(parts) > 3 {
		return nil, false
	}
	var out []int
	for _, p := range parts {
		n, err := strconv.ParseUint(p, 10, 31)
		if err != nil {
			return nil, false
		}
		out = append(out, int(n))
	}
	return out, true
}
