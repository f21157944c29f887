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
			name: "in full", json: `{"4":{"expected":"` + aa + `","warnOnly":false},"11":{"expected":"` + bb + `","warnOnly":true}}`,
			yaml: "4:\n  expected: \"" + aa + "\"\n  warnOnly: false\n11:\n  expected: " + bb + "\n  warnOnly: true\n", want: both,
		},
		{name: "enforced unless they say otherwise", json: `{"4":{"expected":"` + aa + `"}}`, yaml: "4: {expected: " + aa + "}", want: Measurements{4: {raw(aa), false}}},
		{name: "a bare string is enforced", json: `{"4":"` + aa + `"}`, yaml: "4: " + aa, want: Measurements{4: {raw(aa), false}}},
		{name: "upper case", json: `{"4":"` + strings.ToUpper(aa) + `"}`, yaml: "4: " + strings.ToUpper(aa), want: Measurements{4: {raw(aa), false}}},
		{name: "none", json: `{}`, yaml: "{}", want: Measurements{}},
		{name: "the first and the last register", json: `{"0":"` + aa + `","23":"` + bb + `"}`, yaml: "0: " + aa + "\n23: " + bb, want: Measurements{0: {raw(aa), false}, 23: {raw(bb), false}}},
		{name: "quoted keys", json: `{"4":"` + aa + `"}`, yaml: `"4": ` + aa, want: Measurements{4: {raw(aa), false}}},
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
		{name: "an unknown field", json: `{"4":{"expected":"` + aa + `","warn":true}}`, yaml: "4: {expected: " + aa + ", warn: true}", text: `field "warn" is unknown`},
		{name: "a field in the wrong case", json: `{"4":{"Expected":"` + aa + `"}}`, yaml: "4: {Expected: " + aa + "}", text: `field "Expected" is unknown`},
		{name: "a value that is too short", json: `{"4":"aabb"}`, yaml: "4: aabb", text: "has 4 hex digits, want 64"},
		{name: "a value of SHA-384", json: `{"4":"` + aa + aa[:32] + `"}`, yaml: "4: " + aa + aa[:32], text: "has 96 hex digits"},
		{name: "an empty value", json: `{"4":""}`, yaml: `4: ""`, text: "has 0 hex digits"},
		{name: "half a digit", json: `{"4":"` + aa[1:] + `"}`, yaml: "4: " + aa[1:], text: "characters other than hex digits"},
		{name: "a value that is not hex", json: `{"4":"` + strings.Repeat("xy", 32) + `"}`, yaml: "4: " + strings.Repeat("xy", 32), text: "characters other than hex digits"},
		{name: "a register that does not exist", json: `{"24":"` + aa + `"}`, yaml: "24: " + aa, text: "PCR 24 does not exist"},
		{name: "a negative register", json: `{"-1":"` + aa + `"}`, yaml: "-1: " + aa, text: "is not the number of a PCR"},
		{name: "a register by another spelling", json: `{"04":"` + aa + `"}`, yaml: `"04": ` + aa, text: "is not the number of a PCR"},
		{name: "a register by a name", json: `{"four":"` + aa + `"}`, yaml: "four: " + aa, text: "is not the number of a PCR"},
		{name: "a register twice", json: `{"4":"` + aa + `","4":"` + bb + `"}`, yaml: "4: " + aa + "\n4: " + bb, text: "4"},
		{name: "a field twice", json: `{"4":{"expected":"` + aa + `","expected":"` + bb + `"}}`, yaml: "4: {expected: " + aa + ", expected: " + bb + "}", text: "expected"},
		{name: "no value", json: `{"4":{"warnOnly":true}}`, yaml: "4: {warnOnly: true}", text: "field expected is missing"},
		{name: "nothing", json: `{"4":null}`, yaml: "4: null", text: "field expected is missing"},
		{name: "a number", json: `{"4":12}`, yaml: "4: 12", text: "measurement is neither"},
		{name: "a number as value", json: `{"4":{"expected":12}}`, yaml: "4: {expected: 12}", text: "field expected is not a string"},
		{name: "a word as warnOnly", json: `{"4":{"expected":"` + aa + `","warnOnly":"yes"}}`, yaml: "4: {expected: " + aa + `, warnOnly: "yes"}`, text: "neither true nor false"},
		{name: "a list", json: `["` + aa + `"]`, yaml: "[" + aa + "]"},
		{name: "a list as measurement", json: `{"4":["` + aa + `"]}`, yaml: "4: [" + aa + "]", text: "measurement is neither"},
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
		{name: "good ones", m: Measurements{0: {raw(aa), false}, 23: {raw(bb), true}}, text: ""},
		{name: "none", text: ""},
		{name: "a register that does not exist", m: Measurements{24: {raw(aa), false}}, text: "PCR 24 does not exist"},
		{name: "a short value", m: Measurements{4: {raw(aa)[:20], false}}, text: "PCR 4: expected value has 20 bytes"},
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
		{name: "equal", m: Measurements{4: {raw(aa), false}, 9: {raw(bb), false}}},
		{name: "registers without a measurement do not matter", m: Measurements{4: {raw(aa), false}}},
		{
			name:     "an enforced register differs",
			m:        Measurements{4: {raw(bb), false}},
			warnings: nil,
			err:      "measurements differ: PCR 4 (boot loader) is " + aa + ", expected " + bb,
		},
		{
			name:     "all that differ are named in order",
			m:        Measurements{9: {raw(aa), false}, 4: {raw(bb), false}},
			warnings: nil,
			err:      "measurements differ: PCR 4 (boot loader) is " + aa + ", expected " + bb + "; PCR 9 (kernel and initrd) is " + bb + ", expected " + aa,
		},
		{name: "a register only warns", m: Measurements{4: {raw(bb), true}}, warnings: []string{"PCR 4 (boot loader) is " + aa + ", expected " + bb}},
		{name: "a register is missing", m: Measurements{7: {raw(aa), false}}, err: "measurements differ: PCR 7 (secure boot) is not part of the evidence, expected " + aa},
		{name: "a missing register only warns", m: Measurements{7: {raw(aa), true}}, warnings: []string{"PCR 7 (secure boot) is not part of the evidence, expected " + aa}},
		{
			name:     "one warns, one is refused",
			m:        Measurements{4: {raw(bb), true}, 9: {raw(aa), false}},
			warnings: []string{"PCR 4 (boot loader) is " + aa + ", expected " + bb},
			err:      "measurements differ: PCR 9 (kernel and initrd) is " + bb + ", expected " + aa,
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
		{name: "nothing changes", old: Measurements{4: enforced}, by: Measurements{4: enforced}, want: nil},
		{name: "an expected value is replaced", old: Measurements{4: enforced}, by: Measurements{4: {raw(bb), false}}, want: nil},
		{name: "a register is added", old: Measurements{4: enforced}, by: Measurements{4: enforced, 9: enforced}, want: nil},
		{name: "a warning becomes enforced", old: Measurements{4: warns}, by: Measurements{4: enforced}, want: nil},
		{name: "a warning goes away", old: Measurements{4: warns}, by: Measurements{}, want: nil},
		{
			name: "an enforced register only warns",
			old:  Measurements{4: enforced},
			by:   Measurements{4: warns},
			want: []string{"PCR 4 (boot loader) is enforced now and would only warn"},
		},
		{
			name: "registers are dropped",
			old:  Measurements{11: enforced, 4: enforced},
			by:   nil,
			want: []string{"PCR 4 (boot loader) is enforced now and would no longer be checked", "PCR 11 (unified kernel image) is enforced now and would no longer be checked"},
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
		{name: "a copy", o: m.Clone(), want: true},
		{name: "another value", o: Measurements{4: {raw(bb), false}}, want: false},
		{name: "a warning", o: Measurements{4: {raw(aa), true}}, want: false},
		{name: "another register", o: Measurements{5: {raw(aa), false}}, want: false},
		{name: "one more", o: Measurements{4: {raw(aa), false}, 5: {raw(aa), false}}, want: false},
		{name: "none", want: false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := m.Equal(tt.o); got != tt.want {
				t.Errorf("got %v", got)
			}
		})
	}
}
