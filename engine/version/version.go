// Package version parses and compares versions of Kubernetes and of releases of this
// product, and computes the distance between two.
//
// Parse versions once, at input, and never compare them as strings: "v1.10.0" is newer than
// "v1.9.0", and a pre-release is older than its release. Package engine decides which
// distances are allowed.
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

// Version is a semantic version. The zero value means no version: it prints as "", is older
// than any other, and marshals to an empty string.
//
// Compare versions with [Version.Equal], never with ==.
type Version struct{ p *parsed }

// parsed is a version in parts. Values that the planner reads very often are precomputed;
// go-version only orders pre-releases.
type parsed struct {
	major, minor, patch int
	prerelease          string
	text, minorText     string // "v1.35.4", "v1.35"
	v                   *goversion.Version
}

// Parse parses MAJOR.MINOR.PATCH with an optional leading "v", pre-release and build
// metadata. It rejects shorter forms such as "1.35", because only patch releases are
// installed.
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
		// go-version would accept leading zeros such as "01", and numbers that overflow an int.
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

// MustParse is Parse for constants. It panics if s is invalid.
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

// Compare returns -1 if v is older than other, 1 if it is newer, else 0. It ignores build
// metadata.
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

// Equal reports whether both have the same precedence.
func (v Version) Equal(other Version) bool { return v.p == other.p || v.Compare(other) == 0 }

// SameMinor reports whether both have the same major and minor.
func (v Version) SameMinor(other Version) bool {
	return v.Major() == other.Major() && v.Minor() == other.Minor()
}

// MinorDistance returns how many minors other is ahead of v; negative if it is behind.
// Across majors the distance is undefined: the result exceeds any sensible limit and has the
// sign of the difference.
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
		return errors.New("want a version as a string, such as v1.35.4")
	}
	return v.UnmarshalText([]byte(s))
}
