package version

import (
	"encoding/json"
	"slices"
	"testing"

	"gopkg.in/yaml.v3"
)

func TestParse(t *testing.T) {
	for _, tt := range []struct {
		name, in, want string // want is empty if in is invalid
	}{
		{name: "with v", in: "v1.35.4", want: "v1.35.4"},
		{name: "without v", in: "1.35.4", want: "v1.35.4"},
		{name: "pre-release", in: "v1.36.0-rc.1", want: "v1.36.0-rc.1"},
		{name: "build metadata", in: "v1.36.0+build5", want: "v1.36.0+build5"},
		{name: "minor only", in: "v1.35", want: ""},
		{name: "major only", in: "1", want: ""},
		{name: "four numbers", in: "1.2.3.4", want: ""},
		{name: "words", in: "latest", want: ""},
		{name: "empty", in: "", want: ""},
		{name: "space", in: "v1.35.4 ", want: ""},
		{name: "newline", in: "v1.35.4\n", want: ""},
		{name: "leading zero", in: "v1.035.4", want: ""},
		{name: "negative", in: "v1.-1.4", want: ""},
		{name: "two v", in: "vv1.35.4", want: ""},
		{name: "number that overflows", in: "v1.35.99999999999999999999", want: ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			v, err := Parse(tt.in)
			if (err == nil) != (tt.want != "") || v.String() != tt.want {
				t.Errorf("Parse(%q) = %q, %v; want %q", tt.in, v, err, tt.want)
			}
		})
	}
}

func TestOrderIsSemver(t *testing.T) {
	want := []string{"", "v0.9.0", "v1.2.3-alpha", "v1.2.3-alpha.1", "v1.2.3-rc.2", "v1.2.3-rc.10", "v1.2.3", "v1.9.9", "v1.10.0", "v2.0.0"}
	var got []Version
	for i := range want { // a fixed permutation: 7 and 10 have no common factor
		var v Version
		if err := v.UnmarshalText([]byte(want[i*7%len(want)])); err != nil {
			t.Fatal(err)
		}
		got = append(got, v)
	}
	slices.SortFunc(got, Version.Compare)
	for i, v := range got {
		if v.String() != want[i] {
			t.Errorf("position %d is %q, want %q", i, v, want[i])
		}
	}
	if a, b := MustParse("1.2.3+a"), MustParse("1.2.3+b"); a.Less(b) || b.Less(a) || !a.Equal(b) {
		t.Error("build metadata affects the order")
	}
}

func TestMinorDistance(t *testing.T) {
	for _, tt := range []struct {
		from, to string
		want     int
	}{
		{from: "v1.35.4", to: "v1.36.3", want: 1},
		{from: "v1.36.3", to: "v1.35.4", want: -1},
		{from: "v1.9.0", to: "v1.10.0", want: 1},
		{from: "v1.35.0", to: "v1.35.8", want: 0},
		{from: "v1.35.0", to: "v2.0.0", want: 1_000_000},
	} {
		from, to := MustParse(tt.from), MustParse(tt.to)
		if got := from.MinorDistance(to); got != tt.want {
			t.Errorf("from %s to %s: %d, want %d", from, to, got, tt.want)
		}
		if from.SameMinor(to) != (tt.want == 0) {
			t.Errorf("%s and %s: same minor is %t", from, to, from.SameMinor(to))
		}
	}
}

func TestMarshalling(t *testing.T) {
	type doc struct {
		A Version            `json:"a" yaml:"a"`
		B Version            `json:"b" yaml:"b"`
		M map[Version]string `json:"m" yaml:"-"`
	}
	var d doc
	if err := json.Unmarshal([]byte(`{"a":"1.35.4","b":"","m":{"v1.36.3":"x"}}`), &d); err != nil {
		t.Fatal(err)
	}
	if d.A.String() != "v1.35.4" || !d.B.IsZero() || len(d.M) != 1 {
		t.Errorf("decoded %v", d)
	}
	b, err := json.Marshal(d)
	if err != nil || string(b) != `{"a":"v1.35.4","b":"","m":{"v1.36.3":"x"}}` {
		t.Errorf("encoded %s, %v", b, err)
	}
	var y doc
	if err := yaml.Unmarshal([]byte("a: v1.0.0\nb: 1.2.3-rc.1\n"), &y); err != nil || y.A.String() != "v1.0.0" || y.B.Prerelease() != "rc.1" {
		t.Errorf("decoded %v, %v", y, err)
	}
	if err := yaml.Unmarshal([]byte("a: 1.35\n"), &y); err == nil {
		t.Error("a minor was accepted as a version")
	}
}

func FuzzParse(f *testing.F) {
	f.Add("v1.35.4")
	f.Add("1.2.3-rc.1+x")
	f.Fuzz(func(t *testing.T, s string) {
		v, err := Parse(s)
		if err != nil {
			return
		}
		again, err := Parse(v.String())
		if err != nil || !again.Equal(v) || again.Major() != v.Major() || again.Patch() != v.Patch() {
			t.Errorf("Parse(%q) = %q, which parses as %q, %v", s, v, again, err)
		}
	})
}
