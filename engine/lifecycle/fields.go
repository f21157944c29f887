package lifecycle

import (
	"slices"

	"constellation/engine/version"
)

// Places of a deprecated name.
const (
	AtPodAnnotation       = "pod-annotation"
	AtPodAnnotationPrefix = "pod-annotation-prefix"
	AtNodeLabel           = "node-label"
	AtVolume              = "volume"
	AtServiceAnnotation   = "service-annotation"
	AtClaimAnnotation     = "claim-annotation"
	AtVolumeAnnotation    = "volume-annotation"
	AtIngressAnnotation   = "ingress-annotation"
)

var places = []string{
	AtPodAnnotation, AtPodAnnotationPrefix, AtNodeLabel, AtVolume, AtServiceAnnotation, AtClaimAnnotation, AtVolumeAnnotation, AtIngressAnnotation,
}

// fieldsFile is the content of data/fields.yaml.
type fieldsFile struct {
	Sources map[string]string `yaml:"sources"`
	Fields  []Field           `yaml:"fields"`
}

// Field is a field, annotation or label that Kubernetes deprecates.
type Field struct {
	// At is where it stands: AtVolume.
	At   string `yaml:"at"`
	Name string `yaml:"name"`
	// Deprecated is the minor that deprecated it, "v1.30"; empty if unknown.
	Deprecated string `yaml:"deprecated"`
	// Gone is the first minor in which it has no effect; empty if it still has one.
	Gone string `yaml:"gone"`
	// Instead is what to use: "the field priorityClassName".
	Instead string `yaml:"instead"`
	// Source is the page or document itself.
	Source string `yaml:"source"`
}

// GoneIn reports whether the field has no effect in a version.
func (f *Field) GoneIn(v version.Version) bool {
	gone, err := version.Parse(f.Gone + ".0")
	return err == nil && !v.Less(gone)
}

// Fields returns all deprecated fields. Callers must not change them.
func Fields() []Field { return all().fields.Fields }

func (f *fieldsFile) check() error {
	c := checker{sources: f.Sources, used: map[string]bool{}}
	for i, r := range f.Fields {
		c.row("fields", i, r.Source, slices.Contains(places, r.At) && r.Name != "" && r.Instead != "" && isMinor(r.Deprecated) && isMinor(r.Gone), nil)
		f.Fields[i].Source = f.Sources[r.Source]
	}
	return c.done()
}

// isMinor reports whether s is empty or a minor such as "v1.37".
func isMinor(s string) bool {
	_, err := version.Parse(s + ".0")
	return s == "" || err == nil
}

// Locks returns the first minor that locks a feature gate to off, as its first patch; zero if
// none does.
func Locks(gate string) version.Version {
	for _, m := range all().minors {
		for _, g := range m.Gates {
			if slices.Contains(g.LockedOff, gate) {
				return version.MustParse(m.Kubernetes + ".0")
			}
		}
	}
	return version.Version{}
}
