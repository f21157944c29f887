// Package version is a parsed version of Kubernetes or of a release of this
// product, and the distance between two.
//
// Versions are parsed once, at the edge, and never compared as strings: "v1.10.0"
// is newer than "v1.9.0", and a pre-release is older than its release. The package
// never decides which distance is allowed; package engine does.
package version

import (
	"cmp"
	"errors"
	"fmt"
	"strconv"
	"strings"

	goversion "github.com/hashicorp/go-version"
)

// Release is the release that this binary belongs to. The build sets it with
// -ldflags "-X constellation/engine/version.Release=v1.1.0".
var Release = "v1.1.0"

// Version is a semantic version. The zero value is no version: it prints as "",
// is older than any other, and marshals to an empty string.
//
// Two versions are compared with [Version.Equal], never with ==.
type Version struct{ p *parsed }

// parsed is a version taken apart. What is asked for a million times a second is
// worked out once; go-version is asked only for the order of pre-releases.
type parsed struct {
	major, minor, patch int
	prerelease          string
	text, minorText     string // "v1.35.4", "v1.35"
	v                   *goversion.Version
}

// Parse reads MAJOR.MINOR.PATCH with an optional leading "v", pre-release and
// build metadata. Shorter forms such as "1.35" are refused: what is installed is
// always a patch release.
func Parse(s string) (Version, error) {
	core := strings.TrimPrefix(s, "v")
	if i := strings.IndexAny(core, "-+"); i >= 0 {
		core = core[:i]
	}
	parts := strings.Split(core, ".")
	var n [3]int
	if len(parts) != 3 {
		return Version{}, fmt.Errorf("parse version %q: want MAJOR.MINOR.PATCH, such as v1.35.4", s)
	}
	for i, p := range parts {
		// go-version also takes "01" and numbers beyond 64 bits' reach of its tables.
		u, err := strconv.ParseUint(p, 10, 31)
		if err != nil || len(p) > 1 && p[0] == '0' {
			return Version{}, fmt.Errorf("parse version %q: %q is not a number", s, p)
		}
		n[i] = int(u)
	}
	v, err := goversion.NewSemver(s)
	if err != nil {
		return Version{}, fmt.Errorf("parse version %q: want MAJOR.MINOR.PATCH, such as v1.35.4", s)
	}
	return Version{&parsed{
		major: n[0], minor: n[1], patch: n[2], prerelease: v.Prerelease(),
		text: "v" + v.String(), minorText: fmt.Sprintf("v%d.%d", n[0], n[1]), v: v,
	}}, nil
}

// MustParse is Parse for versions that are written in the program. It panics if s
// is not one.
func MustParse(s string) Version {
	v, err := Parse(s)
	if err != nil {
		panic(err)
	}
	return v
}

// IsZero reports whether v is no version.
func (v Version) IsZero() bool { return v.p == nil }

// String returns v with a leading "v", such as "v1.35.4".
func (v Version) String() string {
	if v.p == nil {
		return ""
	}
	return v.p.text
}

// Major returns the first number.
func (v Version) Major() int {
	if v.p == nil {
		return 0
	}
	return v.p.major
}

// Minor returns the second number.
func (v Version) Minor() int {
	if v.p == nil {
		return 0
	}
	return v.p.minor
}

// Patch returns the third number.
func (v Version) Patch() int {
	if v.p == nil {
		return 0
	}
	return v.p.patch
}

// MinorString returns the minor that v belongs to, such as "v1.35".
func (v Version) MinorString() string {
	if v.p == nil {
		return ""
	}
	return v.p.minorText
}

// Prerelease returns what follows the dash, such as "rc.1"; empty for a release.
func (v Version) Prerelease() string {
	if v.p == nil {
		return ""
	}
	return v.p.prerelease
}

// Compare returns -1 if v is older than other, 1 if it is newer and 0 if neither:
// build metadata does not count.
func (v Version) Compare(other Version) int {
	a, b := v.p, other.p
	switch {
	case a == b:
		return 0
	case a == nil:
		return -1
	case b == nil:
		return 1
	case a.major != b.major:
		return cmp.Compare(a.major, b.major)
	case a.minor != b.minor:
		return cmp.Compare(a.minor, b.minor)
	case a.patch != b.patch:
		return cmp.Compare(a.patch, b.patch)
	case a.prerelease == b.prerelease:
		return 0
	}
	return a.v.Compare(b.v)
}

// Less reports whether v is older than other.
func (v Version) Less(other Version) bool { return v.p != other.p && v.Compare(other) < 0 }

// Equal reports whether neither is older.
func (v Version) Equal(other Version) bool { return v.p == other.p || v.Compare(other) == 0 }

// SameMinor reports whether both belong to one minor of one major.
func (v Version) SameMinor(other Version) bool {
	return v.Major() == other.Major() && v.Minor() == other.Minor()
}

// MinorDistance returns how many minors other is ahead of v; negative if it is
// behind. Across majors the distance is not defined: the result is out of any
// useful bound, with the sign of the difference.
func (v Version) MinorDistance(other Version) int {
	if d := other.Major() - v.Major(); d != 0 {
		return d * 1_000_000
	}
	return other.Minor() - v.Minor()
}

// MarshalText returns String. JSON uses it for values and map keys.
func (v Version) MarshalText() ([]byte, error) { return []byte(v.String()), nil }

// UnmarshalText is Parse; an empty text gives the zero value.
func (v *Version) UnmarshalText(text []byte) error {
	if len(text) == 0 {
		*v = Version{}
		return nil
	}
	parsed, err := Parse(string(text))
	if err != nil {
		return err
	}
	*v = parsed
	return nil
}

// MarshalYAML returns String.
func (v Version) MarshalYAML() (any, error) { return v.String(), nil }

// UnmarshalYAML is Parse; an empty scalar gives the zero value.
func (v *Version) UnmarshalYAML(decode func(any) error) error {
	var s string
	if err := decode(&s); err != nil {
		return errors.New("a version is a text, such as v1.35.4")
	}
	return v.UnmarshalText([]byte(s))
}
