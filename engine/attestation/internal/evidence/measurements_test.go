package evidence

import (
	"encoding/hex"
	"encoding/json"
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"gopkg.in/yaml.v3"
	sigsyaml "sigs.k8s.io/yaml"
)

var (
	aa = strings.Repeat("aa", 32)
	bb = strings.Repeat("bb", 32)
)

func raw(h string) []byte {
	b, err := hex.DecodeString(h)
	if err != nil {
		panic(err)
	}
	return b
}

func TestMeasurementsAreRead(t *testing.T) {
	both := Measurements{4: {raw(aa), false}, 11: {raw(bb), true}}
	for _, tt := range []struct {
		name, json, yaml string
		want             Measurements
	}{
		{
			"in full", `{"4":{"expected":"` + aa + `","warnOnly":false},"11":{"expected":"` + bb + `","warnOnly":true}}`,
			"4:\n  expected: \"" + aa + "\"\n  warnOnly: false\n11:\n  expected: " + bb + "\n  warnOnly: true\n", both,
		},
		{"enforced unless they say otherwise", `{"4":{"expected":"` + aa + `"}}`, "4: {expected: " + aa + "}", Measurements{4: {raw(aa), false}}},
		{"a bare string is enforced", `{"4":"` + aa + `"}`, "4: " + aa, Measurements{4: {raw(aa), false}}},
		{"upper case", `{"4":"` + strings.ToUpper(aa) + `"}`, "4: " + strings.ToUpper(aa), Measurements{4: {raw(aa), false}}},
		{"none", `{}`, "{}", Measurements{}},
		{"the first and the last register", `{"0":"` + aa + `","23":"` + bb + `"}`, "0: " + aa + "\n23: " + bb, Measurements{0: {raw(aa), false}, 23: {raw(bb), false}}},
		{"quoted keys", `{"4":"` + aa + `"}`, `"4": ` + aa, Measurements{4: {raw(aa), false}}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			for lang, read := range map[string]func(*Measurements) error{
				"JSON":      func(m *Measurements) error { return json.Unmarshal([]byte(tt.json), m) },
				"YAML":      func(m *Measurements) error { return yaml.Unmarshal([]byte(tt.yaml), m) },
				"sigs YAML": func(m *Measurements) error { return sigsyaml.UnmarshalStrict([]byte(tt.yaml), m) },
			} {
				var got Measurements
				if err := read(&got); err != nil {
					t.Errorf("%s: %v", lang, err)
				} else if d := cmp.Diff(tt.want, got); d != "" {
					t.Errorf("%s (-want +got):\n%s", lang, d)
				}
			}
		})
	}
}

func TestMeasurementsAreRefused(t *testing.T) {
	for _, tt := range []struct{ name, json, yaml, text string }{
		{"an unknown field", `{"4":{"expected":"` + aa + `","warn":true}}`, "4: {expected: " + aa + ", warn: true}", `field "warn" is unknown`},
		{"a field in the wrong case", `{"4":{"Expected":"` + aa + `"}}`, "4: {Expected: " + aa + "}", `field "Expected" is unknown`},
		{"a value that is too short", `{"4":"aabb"}`, "4: aabb", "has 4 hex digits, want 64"},
		{"a value of SHA-384", `{"4":"` + aa + aa[:32] + `"}`, "4: " + aa + aa[:32], "has 96 hex digits"},
		{"an empty value", `{"4":""}`, `4: ""`, "has 0 hex digits"},
		{"half a digit", `{"4":"` + aa[1:] + `"}`, "4: " + aa[1:], "characters other than hex digits"},
		{"a value that is not hex", `{"4":"` + strings.Repeat("xy", 32) + `"}`, "4: " + strings.Repeat("xy", 32), "characters other than hex digits"},
		{"a register that does not exist", `{"24":"` + aa + `"}`, "24: " + aa, "PCR 24 does not exist"},
		{"a negative register", `{"-1":"` + aa + `"}`, "-1: " + aa, "is not the number of a PCR"},
		{"a register by another spelling", `{"04":"` + aa + `"}`, `"04": ` + aa, "is not the number of a PCR"},
		{"a register by a name", `{"four":"` + aa + `"}`, "four: " + aa, "is not the number of a PCR"},
		{"a register twice", `{"4":"` + aa + `","4":"` + bb + `"}`, "4: " + aa + "\n4: " + bb, "4"},
		{"a field twice", `{"4":{"expected":"` + aa + `","expected":"` + bb + `"}}`, "4: {expected: " + aa + ", expected: " + bb + "}", "expected"},
		{"no value", `{"4":{"warnOnly":true}}`, "4: {warnOnly: true}", "field expected is missing"},
		{"nothing", `{"4":null}`, "4: null", "field expected is missing"},
		{"a number", `{"4":12}`, "4: 12", "measurement is neither"},
		{"a number as value", `{"4":{"expected":12}}`, "4: {expected: 12}", "field expected is not a string"},
		{"a word as warnOnly", `{"4":{"expected":"` + aa + `","warnOnly":"yes"}}`, "4: {expected: " + aa + `, warnOnly: "yes"}`, "neither true nor false"},
		{"a list", `["` + aa + `"]`, "[" + aa + "]", ""},
		{"a list as measurement", `{"4":["` + aa + `"]}`, "4: [" + aa + "]", "measurement is neither"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			for lang, read := range map[string]func(*Measurements) error{
				"JSON": func(m *Measurements) error { return json.Unmarshal([]byte(tt.json), m) },
				"YAML": func(m *Measurements) error { return yaml.Unmarshal([]byte(tt.yaml), m) },
			} {
				m := Measurements{7: {raw(aa), false}}
				err := read(&m)
				if err == nil || !strings.Contains(err.Error(), tt.text) {
					t.Errorf("%s: got %v, want an error with %q", lang, err, tt.text)
				}
				if len(m) != 1 {
					t.Errorf("%s: the value was changed to %v", lang, m)
				}
			}
		})
	}
}

func TestMeasurementsSurviveWriting(t *testing.T) {
	m := Measurements{4: {raw(aa), false}, 11: {raw(bb), true}}
	j, err := json.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	if want := `{"11":{"expected":"` + bb + `","warnOnly":true},"4":{"expected":"` + aa + `","warnOnly":false}}`; string(j) != want {
		t.Errorf("JSON is %s, want %s", j, want)
	}
	y, err := yaml.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	if want := "4:\n    expected: " + aa + "\n    warnOnly: false\n11:\n    expected: " + bb + "\n    warnOnly: true\n"; string(y) != want {
		t.Errorf("YAML is\n%s, want\n%s", y, want)
	}
	var fromJSON, fromYAML Measurements
	if err := errors.Join(json.Unmarshal(j, &fromJSON), yaml.Unmarshal(y, &fromYAML)); err != nil {
		t.Fatal(err)
	}
	if !fromJSON.Equal(m) || !fromYAML.Equal(m) {
		t.Errorf("came back as %v and %v", fromJSON, fromYAML)
	}
}

func TestMeasurementsCheck(t *testing.T) {
	for _, tt := range []struct {
		name string
		m    Measurements
		text string
	}{
		{"good ones", Measurements{0: {raw(aa), false}, 23: {raw(bb), true}}, ""},
		{"none", nil, ""},
		{"a register that does not exist", Measurements{24: {raw(aa), false}}, "PCR 24 does not exist"},
		{"a short value", Measurements{4: {raw(aa)[:20], false}}, "PCR 4: expected value has 20 bytes"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if err := tt.m.Check(); (err == nil) != (tt.text == "") || err != nil && !strings.Contains(err.Error(), tt.text) {
				t.Errorf("got %v, want %q", err, tt.text)
			}
		})
	}
}

func TestCompare(t *testing.T) {
	pcrs := map[uint32][]byte{4: raw(aa), 9: raw(bb)}
	for _, tt := range []struct {
		name     string
		m        Measurements
		warnings []string
		err      string
	}{
		{"equal", Measurements{4: {raw(aa), false}, 9: {raw(bb), false}}, nil, ""},
		{"registers without a measurement do not matter", Measurements{4: {raw(aa), false}}, nil, ""},
		{
			"an enforced register differs",
			Measurements{4: {raw(bb), false}},
			nil,
			"measurements differ: PCR 4 (boot loader) is " + aa + ", expected " + bb,
		},
		{
			"all that differ are named in order",
			Measurements{9: {raw(aa), false}, 4: {raw(bb), false}},
			nil,
			"measurements differ: PCR 4 (boot loader) is " + aa + ", expected " + bb + "; PCR 9 (kernel and initrd) is " + bb + ", expected " + aa,
		},
		{"a register only warns", Measurements{4: {raw(bb), true}}, []string{"PCR 4 (boot loader) is " + aa + ", expected " + bb}, ""},
		{"a register is missing", Measurements{7: {raw(aa), false}}, nil, "measurements differ: PCR 7 (secure boot) is not part of the evidence, expected " + aa},
		{"a missing register only warns", Measurements{7: {raw(aa), true}}, []string{"PCR 7 (secure boot) is not part of the evidence, expected " + aa}, ""},
		{
			"one warns, one is refused",
			Measurements{4: {raw(bb), true}, 9: {raw(aa), false}},
			[]string{"PCR 4 (boot loader) is " + aa + ", expected " + bb},
			"measurements differ: PCR 9 (kernel and initrd) is " + bb + ", expected " + aa,
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			warnings, err := tt.m.Compare(pcrs)
			if d := cmp.Diff(tt.warnings, warnings); d != "" {
				t.Errorf("warnings (-want +got):\n%s", d)
			}
			switch {
			case tt.err == "" && err != nil:
				t.Errorf("got %v", err)
			case tt.err != "" && (err == nil || err.Error() != tt.err || !errors.Is(err, ErrMeasurement)):
				t.Errorf("got %v, want %s", err, tt.err)
			}
		})
	}
}

func TestWeakened(t *testing.T) {
	enforced, warns := Measurement{raw(aa), false}, Measurement{raw(aa), true}
	for _, tt := range []struct {
		name    string
		old, by Measurements
		want    []string
	}{
		{"nothing changes", Measurements{4: enforced}, Measurements{4: enforced}, nil},
		{"an expected value is replaced", Measurements{4: enforced}, Measurements{4: {raw(bb), false}}, nil},
		{"a register is added", Measurements{4: enforced}, Measurements{4: enforced, 9: enforced}, nil},
		{"a warning becomes enforced", Measurements{4: warns}, Measurements{4: enforced}, nil},
		{"a warning goes away", Measurements{4: warns}, Measurements{}, nil},
		{
			"an enforced register only warns",
			Measurements{4: enforced},
			Measurements{4: warns},
			[]string{"PCR 4 (boot loader) is enforced now and would only warn"},
		},
		{
			"registers are dropped",
			Measurements{11: enforced, 4: enforced},
			nil,
			[]string{"PCR 4 (boot loader) is enforced now and would no longer be checked", "PCR 11 (unified kernel image) is enforced now and would no longer be checked"},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if d := cmp.Diff(tt.want, tt.old.Weakened(tt.by)); d != "" {
				t.Errorf("(-want +got):\n%s", d)
			}
		})
	}
}

func TestEqual(t *testing.T) {
	m := Measurements{4: {raw(aa), false}}
	for _, tt := range []struct {
		name string
		o    Measurements
		want bool
	}{
		{"a copy", m.Clone(), true},
		{"another value", Measurements{4: {raw(bb), false}}, false},
		{"a warning", Measurements{4: {raw(aa), true}}, false},
		{"another register", Measurements{5: {raw(aa), false}}, false},
		{"one more", Measurements{4: {raw(aa), false}, 5: {raw(aa), false}}, false},
		{"none", nil, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := m.Equal(tt.o); got != tt.want {
				t.Errorf("got %v", got)
			}
		})
	}
}
