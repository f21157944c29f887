package evidence

import (
	"bytes"
	"crypto/subtle"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
)

// lastPCR is the highest register of a TPM for a PC client.
const lastPCR = 23

// pcrSize is the size of a SHA-256 register in bytes.
const pcrSize = 32

// Measurement is the expected value of one PCR.
type Measurement struct {
	// Expected is the SHA-256 register's value, 32 bytes; hex in JSON and YAML.
	Expected []byte
	// WarnOnly turns a difference from a refusal into a warning.
	WarnOnly bool
}

// Measurements maps the index of a PCR, 0 to 23, to its expected value. A register without an
// entry may have any value.
//
// In JSON and YAML it is an object such as {"4": {"expected": "<64 hex digits>", "warnOnly":
// false}}. A bare string of hex digits is accepted in place of the inner object and means
// enforced. Decoding is strict: unknown fields, repeated registers, other lengths and other
// indices are errors.
type Measurements map[uint32]Measurement

// Enforced returns measurements that require exactly pcrs.
func Enforced(pcrs map[uint32][]byte) Measurements {
	m := make(Measurements, len(pcrs))
	for i, v := range pcrs {
		m[i] = Measurement{Expected: bytes.Clone(v)}
	}
	return m
}

// Enforces reports whether a machine can fail m: at least one register is not WarnOnly.
func (m Measurements) Enforces() bool {
	for _, v := range m {
		if !v.WarnOnly {
			return true
		}
	}
	return false
}

// Check returns an error if an index or a length is out of range.
func (m Measurements) Check() error {
	for _, i := range m.indices() {
		if i > lastPCR {
			return fmt.Errorf("PCR %d does not exist: registers are numbered 0 to %d", i, lastPCR)
		}
		if n := len(m[i].Expected); n != pcrSize {
			return fmt.Errorf("PCR %d: expected value has %d bytes, want %d", i, n, pcrSize)
		}
	}
	return nil
}

// Clone returns a deep copy.
func (m Measurements) Clone() Measurements {
	if m == nil {
		return nil
	}
	c := make(Measurements, len(m))
	for i, v := range m {
		c[i] = Measurement{Expected: bytes.Clone(v.Expected), WarnOnly: v.WarnOnly}
	}
	return c
}

// Equal reports whether m and o require the same, warnings included.
func (m Measurements) Equal(o Measurements) bool {
	return maps.EqualFunc(m, o, func(a, b Measurement) bool {
		return a.WarnOnly == b.WarnOnly && bytes.Equal(a.Expected, b.Expected)
	})
}

func (m Measurements) indices() []uint32 { return slices.Sorted(maps.Keys(m)) }

// Mismatch is a register with an unexpected value.
type Mismatch struct {
	PCR      uint32
	Expected []byte
	Actual   []byte // nil: the register was not quoted
}

// String is a sentence part such as "PCR 4 (boot loader) is ab.., expected cd..".
func (m Mismatch) String() string {
	if m.Actual == nil {
		return fmt.Sprintf("%s is not part of the evidence, expected %x", pcrName(m.PCR), m.Expected)
	}
	return fmt.Sprintf("%s is %x, expected %x", pcrName(m.PCR), m.Actual, m.Expected)
}

// pcrName is the common name of a register.
func pcrName(i uint32) string {
	n := ""
	switch i {
	case 0, 2:
		n = "firmware"
	case 1, 3:
		n = "firmware configuration"
	case 4:
		n = "boot loader"
	case 5:
		n = "boot loader configuration"
	case 7:
		n = "secure boot"
	case 8, 12:
		n = "kernel command line"
	case 9:
		n = "kernel and initrd"
	case 11:
		n = "unified kernel image"
	case 13:
		n = "system extensions"
	case pcrCluster:
		n = "cluster ID"
	}
	if n == "" {
		return fmt.Sprintf("PCR %d", i)
	}
	return fmt.Sprintf("PCR %d (%s)", i, n)
}

// MeasurementError lists the enforced registers that differ. It wraps
// ErrMeasurement.
type MeasurementError struct{ Mismatches []Mismatch }

func (e *MeasurementError) Error() string {
	parts := make([]string, len(e.Mismatches))
	for i, m := range e.Mismatches {
		parts[i] = m.String()
	}
	return ErrMeasurement.Error() + ": " + strings.Join(parts, "; ")
}

// Unwrap makes errors.Is(err, ErrMeasurement) true.
func (e *MeasurementError) Unwrap() error { return ErrMeasurement }

// Compare checks pcrs, SHA-256 registers by index, against m. The error, a *MeasurementError,
// lists every enforced register that differs or is missing; warnings name those that only
// warn, in order.
func (m Measurements) Compare(pcrs map[uint32][]byte) (warnings []string, err error) {
	var wrong []Mismatch
	for _, i := range m.indices() {
		want, got := m[i], pcrs[i]
		if subtle.ConstantTimeCompare(want.Expected, got) == 1 {
			continue
		}
		d := Mismatch{PCR: i, Expected: want.Expected, Actual: got}
		if want.WarnOnly {
			warnings = append(warnings, d.String())
		} else {
			wrong = append(wrong, d)
		}
	}
	if len(wrong) > 0 {
		return warnings, &MeasurementError{wrong}
	}
	return warnings, nil
}

// Weakened describes where by, the newer measurements, protect less than m: a register that is
// no longer checked, or only warns. A changed expected value weakens nothing. The result is
// nil if by is at least as strict.
func (m Measurements) Weakened(by Measurements) []string {
	var s []string
	for _, i := range m.indices() {
		if m[i].WarnOnly {
			continue // removing a warning weakens nothing
		}
		switch n, ok := by[i]; {
		case !ok:
			s = append(s, pcrName(i)+" is enforced now and would no longer be checked")
		case n.WarnOnly:
			s = append(s, pcrName(i)+" is enforced now and would only warn")
		}
	}
	return s
}

// measurementText is the form of a Measurement in JSON and YAML.
type measurementText struct {
	Expected string `json:"expected" yaml:"expected"`
	WarnOnly bool   `json:"warnOnly" yaml:"warnOnly"`
}

func (m Measurement) text() measurementText {
	return measurementText{hex.EncodeToString(m.Expected), m.WarnOnly}
}

// MarshalJSON implements json.Marshaler.
func (m Measurement) MarshalJSON() ([]byte, error) { return json.Marshal(m.text()) }

// MarshalYAML implements the marshaler of YAML libraries.
func (m Measurement) MarshalYAML() (any, error) { return m.text(), nil }

// UnmarshalJSON implements json.Unmarshaler. It is strict; see Measurements.
func (m *Measurement) UnmarshalJSON(b []byte) error {
	d := json.NewDecoder(bytes.NewReader(b))
	tok, err := d.Token()
	if err != nil {
		return fmt.Errorf("read measurement: %w", err)
	}
	switch t := tok.(type) {
	case nil: // null leaves the value alone, as everywhere in encoding/json
		return nil
	case string:
		return m.set(map[string]any{"expected": t})
	case json.Delim:
		if t != '{' {
			break
		}
		fields := map[string]any{}
		if err := members(d, func(key string) error {
			var v any
			if err := d.Decode(&v); err != nil {
				return err
			}
			fields[key] = v
			return nil
		}); err != nil {
			return fmt.Errorf("read measurement: %w", err)
		}
		return m.set(fields)
	}
	return errors.New("measurement is neither an object nor a string of hex digits")
}

// UnmarshalYAML implements the unmarshaler of YAML libraries. It is strict; see
// Measurements.
func (m *Measurement) UnmarshalYAML(unmarshal func(any) error) error {
	var v any
	if err := unmarshal(&v); err != nil {
		return err
	}
	switch t := v.(type) {
	case string:
		return m.set(map[string]any{"expected": t})
	case map[string]any:
		return m.set(t)
	}
	return errors.New("measurement is neither a mapping nor a string of hex digits (digits alone must be quoted)")
}

// set takes decoded fields over, all or nothing.
func (m *Measurement) set(fields map[string]any) error {
	var n Measurement
	found := false
	for _, k := range slices.Sorted(maps.Keys(fields)) {
		switch k {
		case "expected":
			s, ok := fields[k].(string)
			if !ok {
				return errors.New("field expected is not a string of hex digits (digits alone must be quoted)")
			}
			v, err := hex.DecodeString(s)
			if err != nil {
				return errors.New("field expected contains characters other than hex digits")
			}
			if len(v) != pcrSize {
				return fmt.Errorf("field expected has %d hex digits, want %d", len(s), 2*pcrSize)
			}
			n.Expected, found = v, true
		case "warnOnly":
			w, ok := fields[k].(bool)
			if !ok {
				return errors.New("field warnOnly is neither true nor false")
			}
			n.WarnOnly = w
		default:
			return fmt.Errorf("field %q is unknown; a measurement has expected and warnOnly", k)
		}
	}
	if !found {
		return errors.New("field expected is missing")
	}
	*m = n
	return nil
}

// UnmarshalJSON implements json.Unmarshaler. It is strict; see Measurements.
func (m *Measurements) UnmarshalJSON(b []byte) error {
	d := json.NewDecoder(bytes.NewReader(b))
	tok, err := d.Token()
	if err != nil {
		return fmt.Errorf("read measurements: %w", err)
	}
	if tok == nil { // null leaves the value alone, as everywhere in encoding/json
		return nil
	}
	if tok != json.Delim('{') {
		return errors.New("measurements are not an object")
	}
	n := Measurements{}
	if err := members(d, func(key string) error {
		i, err := parsePCR(key)
		if err != nil {
			return err
		}
		var v Measurement
		if err := d.Decode(&v); err != nil {
			return fmt.Errorf("PCR %d: %w", i, err)
		}
		if v.Expected == nil { // it was null
			return fmt.Errorf("PCR %d: field expected is missing", i)
		}
		n[i] = v
		return nil
	}); err != nil {
		return fmt.Errorf("read measurements: %w", err)
	}
	*m = n
	return nil
}

// UnmarshalYAML implements the unmarshaler of YAML libraries. It is strict; see
// Measurements.
func (m *Measurements) UnmarshalYAML(unmarshal func(any) error) error {
	var raw map[string]Measurement
	if err := unmarshal(&raw); err != nil {
		return err
	}
	n := make(Measurements, len(raw))
	for _, k := range slices.Sorted(maps.Keys(raw)) {
		i, err := parsePCR(k)
		if err != nil {
			return fmt.Errorf("read measurements: %w", err)
		}
		if raw[k].Expected == nil {
			return fmt.Errorf("read measurements: PCR %d: field expected is missing", i)
		}
		n[i] = raw[k]
	}
	*m = n
	return nil
}

// members calls each for every key of the object that d has just entered, and rejects repeated
// keys, whose meaning is ambiguous.
func members(d *json.Decoder, each func(key string) error) error {
	seen := map[string]bool{}
	for d.More() {
		tok, err := d.Token()
		if err != nil {
			return err
		}
		key, _ := tok.(string) // the decoder yields nothing else here
		if seen[key] {
			return fmt.Errorf("%q is given twice", key)
		}
		seen[key] = true
		if err := each(key); err != nil {
			return err
		}
	}
	if _, err := d.Token(); err != nil && err != io.EOF {
		return err
	}
	return nil
}

func parsePCR(s string) (uint32, error) {
	i, err := strconv.ParseUint(s, 10, 32)
	if err != nil || strconv.FormatUint(i, 10) != s {
		return 0, fmt.Errorf("%q is not the number of a PCR", s)
	}
	if i > lastPCR {
		return 0, fmt.Errorf("PCR %d does not exist: registers are numbered 0 to %d", i, lastPCR)
	}
	return uint32(i), nil
}
