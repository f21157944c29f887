// Package assets embeds the files of the program: charts, CRDs, release data and samples.
//
// Charts and CRDs are stored once, in the version of the newest release. For an older
// release [ChartFor] and [CRDsFor] leave out the later additions, which additions.yaml
// lists. The package contains no policy and imports no other package of ours.
package assets

import (
	"bytes"
	"embed"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strings"
	"sync"

	"gopkg.in/yaml.v3"
)

//go:embed additions.yaml all:charts all:clouds all:config all:crds all:plans all:releases all:samples all:systemd
var files embed.FS

// ErrUnknownRelease means that the program has no charts of that release.
var ErrUnknownRelease = errors.New("unknown release")

// File is one file of a chart, or one kind.
type File struct {
	// Name is the path in the chart, such as templates/rbac.yaml, or the name of a CRD.
	Name string
	Data []byte
}

// Releases returns the program's releases in the layout of a feed; package release reads
// it.
func Releases() fs.FS { return sub("releases") }

// DefaultConfig returns the commented configuration that package engine fills in: a
// text/template.
func DefaultConfig() []byte {
	b, err := files.ReadFile("config/cluster.yaml")
	if err != nil { // it is embedded
		panic(err)
	}
	return b
}

// Systemd returns the units of machines, their drop-ins and the script they run, flat.
func Systemd() fs.FS { return sub("systemd") }

// Samples returns one YAML file for each kind of our APIs.
func Samples() fs.FS { return sub("samples") }

// ChartFor returns the files of a chart as the release has it. Version and
// appVersion of its Chart.yaml are the release's.
func ChartFor(name, release string) ([]File, error) {
	later, err := addedAfter(release)
	if err != nil {
		return nil, err
	}
	chart := path.Join("charts", name)
	if info, err := fs.Stat(files, chart); err != nil || !info.IsDir() || path.Dir(chart) != "charts" {
		return nil, fmt.Errorf("chart %q: %w", name, fs.ErrNotExist)
	}
	var out []File
	err = fs.WalkDir(files, chart, func(p string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		f := File{Name: strings.TrimPrefix(p, chart+"/")}
		if f.Data, err = files.ReadFile(p); err != nil {
			return err
		}
		switch f.Name {
		case "Chart.yaml":
			f.Data, err = stamp(f.Data, release)
		case "values.yaml":
			f.Data, err = withoutValues(f.Data, later, name)
		case "values.schema.json":
			f.Data, err = withoutProperties(f.Data, later, name)
		}
		if err != nil {
			return fmt.Errorf("read %s of chart %s: %w", f.Name, name, err)
		}
		out = append(out, f)
		return nil
	})
	if name == PlansChart {
		out = append(out, File{Name: "crds/plans.yaml", Data: PlanKind()})
	}
	return out, err
}

// CloudChart returns the files of a chart of third-party software that clusters in a cloud need. Version and appVersion of
// its Chart.yaml are those of the software, such as v35.0.2.
func CloudChart(name, version string) ([]File, error) {
	chart := path.Join("clouds/charts", name)
	if info, err := fs.Stat(files, chart); err != nil || !info.IsDir() || path.Dir(chart) != "clouds/charts" {
		return nil, fmt.Errorf("chart %q: %w", name, fs.ErrNotExist)
	}
	var out []File
	err := fs.WalkDir(files, chart, func(p string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		f := File{Name: strings.TrimPrefix(p, chart+"/")}
		if f.Data, err = files.ReadFile(p); err == nil && f.Name == "Chart.yaml" {
			f.Data, err = stamp(f.Data, version)
		}
		out = append(out, f)
		return err
	})
	return out, err
}

// CloudImage is a container image of a third party.
type CloudImage struct {
	Name    string `yaml:"name"`
	Version string `yaml:"version"`
	// Kubernetes is the minor that the image is built for, such as v1.35; empty: it fits all.
	Kubernetes string `yaml:"kubernetes"`
	// Image is the reference with its digest.
	Image string `yaml:"image"`
	// Source states the digest; empty: public repositories pin it.
	Source string `yaml:"source"`
}

// CloudImages returns the images of the charts of [CloudChart], the older versions of each name first.
func CloudImages() ([]CloudImage, error) {
	b, err := files.ReadFile("clouds/images.yaml")
	if err != nil {
		return nil, err
	}
	var out []CloudImage
	d := yaml.NewDecoder(bytes.NewReader(b))
	d.KnownFields(true)
	if err := d.Decode(&out); err != nil {
		return nil, fmt.Errorf("read clouds/images.yaml: %w", err)
	}
	return out, nil
}

// HasValue reports whether a chart, as [ChartFor] returns it, has a default for
// the value at path.
func HasValue(chart []File, path ...string) bool {
	for _, f := range chart {
		if f.Name == "values.yaml" {
			var doc yaml.Node
			return yaml.Unmarshal(f.Data, &doc) == nil && child(&doc, path...) != nil
		}
	}
	return false
}

// SetValues sets values, by their paths such as operator.autoscaler.standIn, in the values of a
// chart, as [ChartFor] returns it. It leaves out those that the chart does not have: a chart of an
// older release has them built in.
func SetValues(values map[string]any, chart []File, byPath map[string]any) {
	for path, v := range byPath {
		keys := strings.Split(path, ".")
		if !HasValue(chart, keys...) {
			continue
		}
		SetValue(values, v, keys...)
	}
}

// SetValue sets a value below nested keys.
func SetValue(values map[string]any, to any, keys ...string) {
	last := len(keys) - 1
	for _, k := range keys[:last] {
		next, ok := values[k].(map[string]any)
		if !ok {
			next = map[string]any{}
			values[k] = next
		}
		values = next
	}
	values[keys[last]] = to
}

// kindsOf has the result of CRDsFor for each release. They are constant, and to decode and encode
// them takes as long as all other planning of an upgrade.
var kindsOf sync.Map

// CRDsFor returns the CustomResourceDefinitions of a release, one per file, by name. The caller may
// change the list, and not the data of a file.
func CRDsFor(release string) ([]File, error) {
	if known, ok := kindsOf.Load(release); ok {
		return slices.Clone(known.([]File)), nil
	}
	all, err := decodeCRDs(release)
	if err != nil {
		return nil, err
	}
	kindsOf.Store(release, all)
	return slices.Clone(all), nil
}

// decodeCRDs is CRDsFor without what it has decoded before.
func decodeCRDs(release string) ([]File, error) {
	later, err := addedAfter(release)
	if err != nil {
		return nil, err
	}
	entries, err := files.ReadDir("crds")
	if err != nil {
		return nil, err
	}
	var out []File
	for _, e := range entries {
		if e.Name() == planKind {
			continue
		}
		b, err := files.ReadFile(path.Join("crds", e.Name()))
		if err != nil {
			return nil, err
		}
		var doc yaml.Node
		if err := yaml.Unmarshal(b, &doc); err != nil {
			return nil, fmt.Errorf("read %s: %w", e.Name(), err)
		}
		name := scalar(&doc, "metadata", "name")
		f := File{Name: name, Data: b}
		for _, a := range later {
			for _, field := range a.CRDs[name] {
				if err := removeField(&doc, field); err != nil {
					return nil, fmt.Errorf("remove %s from %s: %w", field, name, err)
				}
			}
			if len(a.CRDs[name]) > 0 {
				if f.Data, err = encode(&doc); err != nil {
					return nil, err
				}
			}
		}
		out = append(out, f)
	}
	slices.SortFunc(out, func(a, b File) int { return strings.Compare(a.Name, b.Name) })
	return out, nil
}

// PlansChart is the chart of the controller of Plans for any other cluster. It contains the kind
// Plan, which Helm installs and never changes or removes.
const PlansChart = "constellation-plans"

// planKind is the file of a kind that belongs to no release: the controller of Plans installs it.
const planKind = "upgrade.cattle.io_plans.yaml"

// PlanKind returns the CustomResourceDefinition of Plans.
func PlanKind() []byte {
	b, err := files.ReadFile("crds/" + planKind)
	if err != nil { // it is embedded
		panic(err)
	}
	return b
}

// PlansManifest returns the objects that run the controller of Plans in any other cluster, as a
// YAML stream: what [PlansChart] renders. A test of this package generates it.
func PlansManifest() []byte {
	b, err := files.ReadFile("plans/system-upgrade.yaml")
	if err != nil { // it is embedded
		panic(err)
	}
	return b
}

// PlanExamples returns Plans for some systems, with the objects that they need, flat.
func PlanExamples() fs.FS { return sub("plans/examples") }

func sub(dir string) fs.FS {
	s, err := fs.Sub(files, dir)
	if err != nil { // the argument is constant
		panic(err)
	}
	return s
}

// additions is what one release added, by object; fields are dotted paths.
type additions struct {
	Release string              `yaml:"release"`
	CRDs    map[string][]string `yaml:"crds"`
	Values  map[string][]string `yaml:"values"`
}

// addedAfter returns what the releases after this one added, newest first.
func addedAfter(release string) ([]additions, error) {
	b, err := files.ReadFile("additions.yaml")
	if err != nil {
		return nil, err
	}
	var all []additions
	d := yaml.NewDecoder(bytes.NewReader(b))
	d.KnownFields(true)
	if err := d.Decode(&all); err != nil {
		return nil, fmt.Errorf("read additions.yaml: %w", err)
	}
	var known []string
	for i, a := range all {
		if a.Release == release {
			return all[:i], nil
		}
		known = append(known, a.Release)
	}
	return nil, fmt.Errorf("%w %q: there are charts of %s", ErrUnknownRelease, release, strings.Join(known, ", "))
}

func stamp(chart []byte, release string) ([]byte, error) {
	var doc yaml.Node
	if err := yaml.Unmarshal(chart, &doc); err != nil {
		return nil, err
	}
	for key, value := range map[string]string{"version": strings.TrimPrefix(release, "v"), "appVersion": release} {
		n := child(&doc, key)
		if n == nil {
			return nil, fmt.Errorf("no %s", key)
		}
		n.SetString(value)
	}
	return encode(&doc)
}

func withoutValues(values []byte, later []additions, chart string) ([]byte, error) {
	var doc yaml.Node
	if err := yaml.Unmarshal(values, &doc); err != nil {
		return nil, err
	}
	changed := false
	for _, a := range later {
		for _, v := range a.Values[chart] {
			keys := strings.Split(v, ".")
			last := len(keys) - 1
			if !removeKey(child(&doc, keys[:last]...), keys[last]) {
				return nil, fmt.Errorf("no value %s", v)
			}
			changed = true
		}
	}
	if !changed {
		return values, nil // as it was written
	}
	return encode(&doc)
}

func withoutProperties(schema []byte, later []additions, chart string) ([]byte, error) {
	var doc map[string]any
	if err := json.Unmarshal(schema, &doc); err != nil {
		return nil, err
	}
	changed := false
	for _, a := range later {
		for _, v := range a.Values[chart] {
			at := doc
			keys := strings.Split(v, ".")
			for i, key := range keys {
				props, _ := at["properties"].(map[string]any)
				next, ok := props[key].(map[string]any)
				if !ok {
					return nil, fmt.Errorf("no property %s", v)
				}
				if i == len(keys)-1 {
					delete(props, key)
				}
				at = next
			}
			changed = true
		}
	}
	if !changed {
		return schema, nil
	}
	return json.MarshalIndent(doc, "", "  ")
}

// removeField removes a field from every version of a kind: from its schema and from the
// printer columns.
func removeField(crd *yaml.Node, field string) error {
	versions := child(crd, "spec", "versions")
	if versions == nil || len(versions.Content) == 0 {
		return errors.New("no versions")
	}
	for _, v := range versions.Content {
		at := child(v, "schema", "openAPIV3Schema")
		keys := strings.Split(field, ".")
		for i, key := range keys {
			props := child(at, "properties")
			if i < len(keys)-1 {
				at = child(props, key)
				continue
			}
			if !removeKey(props, key) {
				return errors.New("no such field")
			}
			if r := child(at, "required"); r != nil {
				r.Content = slices.DeleteFunc(r.Content, func(n *yaml.Node) bool { return n.Value == key })
			}
		}
		if columns := child(v, "additionalPrinterColumns"); columns != nil {
			columns.Content = slices.DeleteFunc(columns.Content, func(c *yaml.Node) bool {
				return scalar(c, "jsonPath") == "."+field
			})
		}
	}
	return nil
}

// child returns the value found by following keys through mappings; nil if there is none.
func child(n *yaml.Node, keys ...string) *yaml.Node {
	if n != nil && n.Kind == yaml.DocumentNode {
		n = n.Content[0]
	}
	if len(keys) == 0 || n == nil {
		return n
	}
	for i := 0; n.Kind == yaml.MappingNode && i < len(n.Content); i += 2 {
		if n.Content[i].Value == keys[0] {
			return child(n.Content[i+1], keys[1:]...)
		}
	}
	return nil
}

func scalar(n *yaml.Node, keys ...string) string {
	if c := child(n, keys...); c != nil {
		return c.Value
	}
	return ""
}

// removeKey reports whether n was a mapping with that key.
func removeKey(n *yaml.Node, key string) bool {
	if n == nil || n.Kind != yaml.MappingNode {
		return false
	}
	for i := 0; i < len(n.Content); i += 2 {
		if n.Content[i].Value == key {
			n.Content = slices.Delete(n.Content, i, i+2)
			return true
		}
	}
	return false
}

func encode(doc *yaml.Node) ([]byte, error) {
	var b bytes.Buffer
	e := yaml.NewEncoder(&b)
	e.SetIndent(2)
	if err := e.Encode(doc); err != nil {
		return nil, err
	}
	return b.Bytes(), e.Close()
}
