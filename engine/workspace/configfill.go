package workspace

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"gopkg.in/yaml.v3"

	"constellation/engine/attestation"
	"constellation/engine/cloud/providers"
	"constellation/engine/cloud/section"
	"constellation/engine/plan"
)

// Fields of a configuration whose values come from the cloud.
const (
	fieldMeasurements = "attestation.tpm2.measurements"
	fieldTrustRoots   = "attestation.tpm2.trustRoots"
)

// sectionField is the path of a field of a provider's section in a configuration.
func sectionField(provider, field string) string { return "provider." + provider + "." + field }

// isPlaceholder reports whether a measurement is one that GenerateConfig writes for want
// of a better one.
func isPlaceholder(digest string) bool {
	return strings.Count(strings.ToLower(digest), "1234") == 16
}

// placeholders are the parts of a configuration that are still to be filled in.
type placeholders struct {
	registers []uint32
	roots     *yaml.Node // nil unless they are an empty text, or what GenerateConfig wrote beside placeholders of registers
}

func (p placeholders) any() bool { return len(p.registers) > 0 || p.roots != nil }

// holds reports whether the value of a field is a placeholder.
func (p placeholders) holds(field string) bool {
	if field == fieldTrustRoots {
		return p.roots != nil
	}
	register, found := strings.CutPrefix(field, fieldMeasurements+".")
	n, err := strconv.ParseUint(register, 10, 32)
	return found && err == nil && slices.Contains(p.registers, uint32(n))
}

func placeholdersOf(doc *yaml.Node) (p placeholders) {
	tpm := find(find(doc, "attestation"), "tpm2")
	if m := find(tpm, "measurements"); m != nil && m.Kind == yaml.MappingNode {
		for i := 0; i+1 < len(m.Content); i += 2 {
			n, err := strconv.ParseUint(m.Content[i].Value, 10, 32)
			expected := find(resolve(m.Content[i+1]), "expected")
			if err == nil && expected != nil && isPlaceholder(expected.Value) {
				p.registers = append(p.registers, uint32(n))
			}
		}
	}
	if n := valueOf(tpm, "trustRoots"); n != nil && n.Kind == yaml.ScalarNode {
		text := strings.TrimSpace(n.Value)
		if text == "" || len(p.registers) > 0 && text == generatedRoots(doc) {
			p.roots = n
		}
	}
	return p
}

// generatedRoots returns the trust roots that GenerateConfig writes for the provider of a configuration; empty: none.
func generatedRoots(doc *yaml.Node) string {
	for _, p := range providers.Clouds() {
		if p.Roots != nil && find(find(doc, "provider"), p.Name) != nil {
			return strings.TrimSpace(string(p.Roots()))
		}
	}
	return ""
}

// checkUnfilled is ParseConfig for a configuration whose placeholders will be filled in:
// they are no errors.
func checkUnfilled(b []byte) error {
	_, err := ParseConfig(b)
	list, ok := AsConfigErrors(err)
	if !ok {
		return err
	}
	p := placeholdersOf((&reader{}).document(b))
	list.Errors = slices.DeleteFunc(list.Errors, func(e FieldError) bool { return p.holds(e.Field) })
	if len(list.Errors) == 0 {
		return nil
	}
	return list
}

// fillConfig returns the configuration b with the values of a sandbox in the place of
// its placeholders, and the names of the fields that it filled. Comments and layout stay.
// The name of the sandbox is filled in with the others: a file that has none of them was
// written before there was one. A file without placeholders is returned as it is.
func fillConfig(b []byte, i SandboxInfo) (out []byte, filled []string, err error) {
	doc := (&reader{}).document(b)
	blank := placeholdersOf(doc)
	if !blank.any() {
		return b, nil, nil
	}
	fail := func(err error) error {
		return &plan.Error{
			Op: "fill in " + ConfigFile, Err: err, Exit: plan.ExitUsage,
			Remedy: "move the file away and run the same command again, which writes one; or write by hand what `constellation sandbox status -o json` shows as measurements and trustRoots",
		}
	}
	s := newSource(b)
	p, err := providers.Find(i.Provider())
	if err != nil {
		return nil, nil, err
	}
	mapping := find(find(doc, "provider"), p.Name)
	for _, f := range p.Config {
		want := i.config().Text(f.Name)
		if n := valueOf(mapping, f.Name); f.Identity && n != nil && resolve(n).Value != want {
			if err := s.set(n, want, nil); err != nil {
				return nil, nil, fail(err)
			}
			filled = append(filled, sectionField(p.Name, f.Name))
		}
	}
	if len(blank.registers) > 0 {
		if err := s.fillRegisters(find(find(find(doc, "attestation"), "tpm2"), "measurements"), blank.registers, i.Measurements); err != nil {
			return nil, nil, fail(err)
		}
		filled = append(filled, fieldMeasurements)
	}
	if blank.roots != nil {
		if err := s.fillRoots(find(find(doc, "attestation"), "tpm2"), blank.roots, i.TrustRoots); err != nil {
			return nil, nil, fail(err)
		}
		filled = append(filled, fieldTrustRoots)
	}
	if out, err = s.result(); err != nil {
		return nil, nil, fail(err)
	}
	c, err := ParseConfig(out)
	if err != nil {
		return nil, nil, fail(err)
	}
	if d := configDiffers(c, i); blank.roots != nil && slices.Contains(d, fieldTrustRoots) || slices.ContainsFunc(d, func(f string) bool { return strings.HasPrefix(f, "provider.") }) {
		return nil, nil, fail(errTied)
	}
	return out, filled, nil
}

// fillRegisters gives the registers of m that are placeholders the values of a sandbox;
// those that it does not have go, those that m lacks are added.
func (s *source) fillRegisters(m *yaml.Node, registers []uint32, values map[uint32]string) error {
	want := attestation.Measurements{}
	var added []uint32
	for r, text := range values {
		b, err := hex.DecodeString(text)
		if err != nil {
			return fmt.Errorf("register %d of the sandbox: %w", r, err)
		}
		want[r] = attestation.Measurement{Expected: b}
		if registerOf(m, r) == nil {
			added = append(added, r)
		}
	}
	slices.Sort(added)
	for _, r := range registers {
		text, ok := values[r]
		if !ok {
			if err := s.removeRegister(m, r); err != nil {
				return err
			}
			continue
		}
		if err := s.set(valueOf(registerOf(m, r), "expected"), text, nil); err != nil {
			return err
		}
	}
	return s.addRegisters(m, added, want)
}

// fillRoots puts certificates in the place of the text n of the mapping m, which is empty or a block: on
// lines of their own, or as one text where something else follows on the line.
func (s *source) fillRoots(m, n *yaml.Node, roots string) error {
	from, end, err := s.block(n)
	if err != nil {
		return err
	}
	isBlock := end > from
	if !isBlock {
		if _, _, end, err = s.scalar(n); err != nil {
			return err
		}
		if m.Style&yaml.FlowStyle != 0 || len(bytes.TrimSpace(s.b[end:s.endOfLine(end)])) > 0 {
			return s.replace(n, strconv.Quote(roots))
		}
	}
	nl, indent := s.newline(end), strings.Repeat(" ", m.Content[0].Column+1)
	var text strings.Builder
	text.WriteString("|")
	for l := range strings.SplitSeq(strings.TrimSpace(roots), "\n") {
		text.WriteString(nl + indent + l)
	}
	if !isBlock {
		return s.replace(n, text.String())
	}
	s.edits = append(s.edits, replacement{from, end, text.String()})
	return nil
}

// block returns where a literal block of lines begins, with its indicator, and where its last line ends. Both are zero for
// another scalar.
func (s *source) block(n *yaml.Node) (from, end int, err error) {
	if n.Style&yaml.LiteralStyle == 0 || n.Anchor != "" {
		return 0, 0, nil
	}
	if from, err = s.offset(n); err != nil {
		return 0, 0, err
	}
	end = s.endOfLine(from)
	for line := range strings.SplitSeq(strings.TrimRight(n.Value, "\n"), "\n") {
		start := s.afterLine(end)
		end = s.endOfLine(start)
		if strings.TrimSpace(string(s.b[start:end])) != strings.TrimSpace(line) {
			return 0, 0, errTied
		}
	}
	return from, end, nil
}

// configDiffers lists the fields in which a configuration is not for this sandbox.
func configDiffers(c *Config, i SandboxInfo) (fields []string) {
	if p, err := providers.Find(i.Provider()); err == nil && c.Provider.Name == p.Name {
		if f := section.Differs(p.Config, p.State, c.Provider.Section, i.state()); f != "" {
			fields = append(fields, sectionField(p.Name, f))
		}
	}
	for _, r := range Registers(c.Attestation.TPM2.Measurements, nil) {
		want, ok := i.Measurements[r]
		if have := c.Attestation.TPM2.Measurements[r]; ok && !have.WarnOnly && hex.EncodeToString(have.Expected) != want && c.Image.String() == i.Image {
			fields = append(fields, fmt.Sprintf("%s.%d.expected", fieldMeasurements, r))
		}
	}
	if !strings.Contains(c.Attestation.TPM2.TrustRoots, strings.TrimSpace(i.TrustRoots)) {
		fields = append(fields, fieldTrustRoots)
	}
	return fields
}

// FillConfig writes what only a sandbox knows into the placeholders of the configuration,
// and returns the names of the fields that it filled, none if there was nothing to fill.
// Values that are not placeholders are the user's: differs names those that are not the
// sandbox's. The error of a configuration that is absent wraps fs.ErrNotExist.
func (w *Workspace) FillConfig(i SandboxInfo) (filled, differs []string, err error) {
	b, err := w.ReadConfig()
	if err != nil {
		return nil, nil, err
	}
	out, filled, err := fillConfig(b, i)
	if err != nil {
		return nil, nil, err
	}
	c, err := ParseConfig(out)
	if err != nil {
		return nil, nil, &plan.Error{Err: err, Exit: plan.ExitUsage, Remedy: "correct the file; `constellation config validate` checks it again"}
	}
	if len(filled) > 0 {
		if err := w.UpdateConfig(b, out); err != nil {
			return nil, nil, err
		}
	}
	return filled, configDiffers(c, i), nil
}

// CheckForSandbox reports why AdoptSandbox and FillConfig would fail for a sandbox of which name, cloud
// and UID are known, before it is there; an empty UID is that of one that will be made.
// Files that are absent will be written, and placeholders filled in.
func (w *Workspace) CheckForSandbox(i SandboxInfo) error {
	switch s, err := w.State(); {
	case errors.Is(err, ErrAbsent):
		if err := w.checkLeftovers("sandbox " + i.Name); err != nil {
			return err
		}
	case err != nil:
		return err
	default:
		if err := w.sameSandbox(s, i); err != nil {
			return err
		}
	}
	b, err := w.ReadConfig()
	if errors.Is(err, ErrAbsent) && !w.Has(ConfigFile) {
		return nil
	}
	if err != nil {
		return err
	}
	if err := checkUnfilled(b); err != nil {
		return &plan.Error{Err: err, Exit: plan.ExitUsage, Remedy: "correct the file; `constellation config validate` checks it again"}
	}
	return nil
}

// Unmeasured reads a configuration whose measurements may be placeholders, and returns the registers that are. They have the
// value zero in the configuration, and only warn.
func (w *Workspace) Unmeasured() (c *Config, registers []uint32, err error) {
	b, err := w.ReadConfig()
	if err != nil {
		return nil, nil, err
	}
	registers = placeholdersOf((&reader{}).document(b)).registers
	slices.Sort(registers)
	zero := make(map[uint32]string, len(registers))
	for _, r := range registers {
		zero[r] = strings.Repeat("0", hex.EncodedLen(sha256.Size))
	}
	if b, err = measuredConfig(b, registers, zero); err != nil {
		return nil, nil, err
	}
	if c, err = ParseConfig(b); err != nil {
		return nil, nil, &plan.Error{Err: err, Exit: plan.ExitUsage, Remedy: "correct the file; `constellation config validate` checks it again"}
	}
	if c.Attestation.TPM2 != nil {
		for _, r := range registers {
			m := c.Attestation.TPM2.Measurements[r]
			m.WarnOnly = true
			c.Attestation.TPM2.Measurements[r] = m
		}
	}
	return c, registers, nil
}

// WriteMeasurements writes values, in hex, in the place of the placeholders of these registers.
func (w *Workspace) WriteMeasurements(registers []uint32, values map[uint32]string) error {
	b, err := w.ReadConfig()
	if err != nil {
		return err
	}
	out, err := measuredConfig(b, registers, values)
	if err == nil {
		_, err = ParseConfig(out)
	}
	if err != nil {
		return &plan.Error{Op: "write measurements to " + ConfigFile, Err: err, Exit: plan.ExitUsage, Remedy: "write the values by hand"}
	}
	return w.UpdateConfig(b, out)
}

// measuredConfig returns a configuration with values of registers.
func measuredConfig(b []byte, registers []uint32, values map[uint32]string) ([]byte, error) {
	if len(registers) == 0 {
		return b, nil
	}
	s := newSource(b)
	m := find(find(find((&reader{}).document(b), "attestation"), "tpm2"), "measurements")
	for _, r := range registers {
		if err := s.set(valueOf(registerOf(m, r), "expected"), values[r], nil); err != nil {
			return nil, err
		}
	}
	return s.result()
}
