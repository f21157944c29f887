package workspace

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"gopkg.in/yaml.v3"

	"constellation/engine/attestation"
	"constellation/engine/plan"
	"constellation/engine/version"
)

// HopConfig is what the configuration says after a hop. Zero versions and nil
// measurements leave what it says.
type HopConfig struct {
	Image, Services, Kubernetes version.Version
	KeepWorkers                 bool
	Measurements                attestation.Measurements
}

// Apply returns the configuration that c becomes.
func (h HopConfig) Apply(c *Config) *Config {
	out := *c
	for to, v := range map[*version.Version]version.Version{&out.Image: h.Image, &out.Services: h.Services, &out.Kubernetes: h.Kubernetes} {
		if !v.IsZero() {
			*to = v
		}
	}
	out.KeepWorkers = h.KeepWorkers
	if h.Measurements != nil {
		tpm := *c.Attestation.TPM2
		tpm.Measurements = h.Measurements
		out.Attestation.TPM2 = &tpm
	}
	return &out
}

// errTied means that a value cannot be replaced alone.
var errTied = errors.New("the layout of the file ties the value to others")

// EditConfig returns the configuration b with the values of h, and what differs.
// Comments, order, quotes, indentation and line ends stay: values are replaced where
// they stand. The result is read again and compared field by field; a layout that
// cannot be edited so is an error, which says what to write by hand.
func EditConfig(b []byte, h HopConfig) (out []byte, fields []FieldChange, err error) {
	before, err := ParseConfig(b)
	if err != nil {
		return nil, nil, err
	}
	after := h.Apply(before)
	fields = fieldChanges(before, after)
	if len(fields) == 0 {
		return b, nil, nil
	}
	tied := func(err error) error {
		var lines []string
		for _, f := range fields {
			lines = append(lines, fmt.Sprintf("%s: %s", f.Field, f.To))
		}
		return &plan.Error{Op: "edit " + ConfigFile, Err: err, Exit: plan.ExitUsage, Remedy: "write by hand: " + strings.Join(lines, ", ")}
	}
	out, err = splice(b, before, after)
	if err != nil {
		return nil, nil, tied(err)
	}
	got, err := ParseConfig(out)
	if err != nil {
		return nil, nil, tied(errTied)
	}
	want, err := json.Marshal(after)
	if err != nil {
		return nil, nil, fmt.Errorf("marshal configuration: %w", err)
	}
	have, err := json.Marshal(got)
	if err != nil {
		return nil, nil, fmt.Errorf("marshal configuration: %w", err)
	}
	if !bytes.Equal(want, have) {
		return nil, nil, tied(errTied)
	}
	return out, fields, nil
}

// fieldChanges lists what differs between two configurations, in the order of the file.
func fieldChanges(a, b *Config) (out []FieldChange) {
	add := func(field, from, to string) {
		if from != to {
			out = append(out, FieldChange{field, from, to})
		}
	}
	add("image", a.Image.String(), b.Image.String())
	add("microserviceVersion", a.Services.String(), b.Services.String())
	add("kubernetesVersion", a.Kubernetes.String(), b.Kubernetes.String())
	add("keepWorkers", strconv.FormatBool(a.KeepWorkers), strconv.FormatBool(b.KeepWorkers))
	x, y := a.Attestation.TPM2.Measurements, b.Attestation.TPM2.Measurements
	for _, i := range Registers(x, y) {
		from, inX := x[i]
		to, inY := y[i]
		switch field := fmt.Sprintf("attestation.tpm2.measurements.%d", i); {
		case !inX:
			add(field, "", hex.EncodeToString(to.Expected))
		case !inY:
			add(field, hex.EncodeToString(from.Expected), "")
		default:
			add(field+".expected", hex.EncodeToString(from.Expected), hex.EncodeToString(to.Expected))
		}
	}
	return out
}

// Registers returns the registers that one of two demands knows, in order.
func Registers(a, b attestation.Measurements) []uint32 {
	all := slices.AppendSeq(slices.Collect(maps.Keys(a)), maps.Keys(b))
	slices.Sort(all)
	return slices.Compact(all)
}

// source is a YAML text and where its lines begin, as the YAML library counts them.
type source struct {
	b     []byte
	lines []int
	edits []replacement
}

// replacement puts text in the place of b[from:to].
type replacement struct {
	from, to int
	text     string
}

func newSource(b []byte) *source {
	s := &source{b: b, lines: []int{0}}
	for i := 0; i < len(b); {
		n := breakAt(b[i:])
		if n == 0 {
			i++
			continue
		}
		i += n
		s.lines = append(s.lines, i)
	}
	return s
}

// breakAt returns the length of the line break that b begins with; zero if it begins
// with none. YAML 1.1 has five of them.
func breakAt(b []byte) int {
	switch {
	case bytes.HasPrefix(b, []byte("\r\n")):
		return 2
	case len(b) > 0 && (b[0] == '\n' || b[0] == '\r'):
		return 1
	case bytes.HasPrefix(b, []byte("\u0085")):
		return 2
	case bytes.HasPrefix(b, []byte("\u2028")) || bytes.HasPrefix(b, []byte("\u2029")):
		return 3
	}
	return 0
}

// offset is where a node begins in the text; columns count characters.
func (s *source) offset(n *yaml.Node) (int, error) {
	if n.Line < 1 || n.Line > len(s.lines) || n.Column < 1 {
		return 0, errTied
	}
	at := s.lines[n.Line-1]
	if n.Line == 1 && bytes.HasPrefix(s.b, []byte("\ufeff")) {
		at += len("\ufeff")
	}
	for range n.Column - 1 {
		_, size := utf8.DecodeRune(s.b[at:])
		if size == 0 {
			return 0, errTied
		}
		at += size
	}
	return at, nil
}

// endOfLine is where the line that holds at ends, before its break.
func (s *source) endOfLine(at int) int {
	for at < len(s.b) && breakAt(s.b[at:]) == 0 {
		at++
	}
	return at
}

// afterLine is where the next line begins.
func (s *source) afterLine(at int) int {
	at = s.endOfLine(at)
	return at + breakAt(s.b[at:])
}

func (s *source) startOfLine(at int) int {
	i, found := slices.BinarySearch(s.lines, at)
	if !found {
		i--
	}
	return s.lines[i]
}

// newline is how the line that holds at ends, or the first one if it is the last.
func (s *source) newline(at int) string {
	end := s.endOfLine(at)
	if n := breakAt(s.b[end:]); n > 0 {
		return string(s.b[end : end+n])
	}
	end = s.endOfLine(0)
	if n := breakAt(s.b[end:]); n > 0 {
		return string(s.b[end : end+n])
	}
	return "\n"
}

// blank returns where, from at on, something else than white space and comments begins.
func (s *source) blank(at int) int {
	for at < len(s.b) {
		n := breakAt(s.b[at:])
		switch {
		case n > 0:
			at += n
		case s.b[at] == ' ' || s.b[at] == '\t':
			at++
		case s.b[at] == '#' && (at == 0 || strings.IndexByte(" \t\r\n", s.b[at-1]) >= 0 || s.startOfLine(at) == at):
			at = s.endOfLine(at)
		default:
			return at
		}
	}
	return at
}

// scalar returns the text of a scalar without its quotes, and its end including them. Edited
// scalars are on one line and contain no blanks.
func (s *source) scalar(n *yaml.Node) (from, to, end int, err error) {
	at, err := s.offset(n)
	if err != nil {
		return 0, 0, 0, err
	}
	for at < len(s.b) && (s.b[at] == '&' || s.b[at] == '!') { // an anchor or a tag
		for at < len(s.b) && s.b[at] != ' ' && s.b[at] != '\t' && breakAt(s.b[at:]) == 0 {
			at++
		}
		at = s.blank(at)
	}
	if at >= len(s.b) {
		return 0, 0, 0, errTied
	}
	switch s.b[at] {
	case '"', '\'':
		quote := s.b[at]
		for i := at + 1; i < len(s.b); i++ {
			switch {
			case quote == '"' && s.b[i] == '\\':
				i++
			case quote == '\'' && s.b[i] == quote && i+1 < len(s.b) && s.b[i+1] == quote:
				i++
			case s.b[i] == quote:
				return at + 1, i, i + 1, nil
			}
		}
		return 0, 0, 0, errTied
	case '|', '>':
		at = s.afterLine(at)
		for at < len(s.b) && (s.b[at] == ' ' || s.b[at] == '\t') {
			at++
		}
	}
	value := strings.TrimRight(n.Value, "\n")
	if value == "" || !bytes.HasPrefix(s.b[at:], []byte(value)) {
		return 0, 0, 0, errTied
	}
	return at, at + len(value), at + len(value), nil
}

// set replaces the text of a scalar, unless it is that already. An alias is replaced
// by the text unless what it stands for becomes the text too, which becomes says.
func (s *source) set(n *yaml.Node, text string, becomes map[*yaml.Node]string) error {
	if n.Kind == yaml.AliasNode {
		if to, ok := becomes[n.Alias]; ok && to == text || !ok && n.Alias.Value == text {
			return nil
		}
		at, err := s.offset(n)
		if err != nil {
			return err
		}
		alias := "*" + n.Value
		if !bytes.HasPrefix(s.b[at:], []byte(alias)) {
			return errTied
		}
		s.edits = append(s.edits, replacement{at, at + len(alias), text})
		return nil
	}
	if n.Value == text {
		return nil
	}
	from, to, _, err := s.scalar(n)
	if err == nil {
		s.edits = append(s.edits, replacement{from, to, text})
	}
	return err
}

// replace puts a text in the place of a scalar and its quotes.
func (s *source) replace(n *yaml.Node, text string) error {
	from, to, end, err := s.scalar(n)
	if err == nil {
		s.edits = append(s.edits, replacement{from - (end - to), end, text}) // a quote on either side, or none
	}
	return err
}

// result applies the edits, which must not overlap. An aliased value may have been edited
// twice in the same way.
func (s *source) result() ([]byte, error) {
	slices.SortStableFunc(s.edits, func(a, b replacement) int { return a.from - b.from })
	s.edits = slices.Compact(s.edits)
	var out []byte
	at := 0
	for _, e := range s.edits {
		if e.from < at {
			return nil, errTied
		}
		out = append(append(out, s.b[at:e.from]...), e.text...)
		at = e.to
	}
	return append(out, s.b[at:]...), nil
}

// splice makes of the text b, which says before, one that says after.
func splice(b []byte, before, after *Config) ([]byte, error) {
	if !utf8.Valid(b) {
		return nil, errors.New("the file is not UTF-8")
	}
	doc := (&reader{}).document(b) // it was read before
	s := newSource(b)
	becomes := map[*yaml.Node]string{}
	type wanted struct {
		n    *yaml.Node
		text string
	}
	var all []wanted
	want := func(n *yaml.Node, text string) {
		all = append(all, wanted{n, text})
		if n.Kind != yaml.AliasNode {
			becomes[n] = text
		}
	}
	for _, f := range []struct {
		key      string
		from, to version.Version
	}{
		{"image", before.Image, after.Image},
		{"microserviceVersion", before.Services, after.Services},
		{"kubernetesVersion", before.Kubernetes, after.Kubernetes},
	} {
		n := valueOf(doc, f.key)
		switch {
		case n == nil && f.from.Equal(f.to):
			continue // such as image, where the cloud selects none
		case n == nil:
			return nil, errTied
		case f.from.Equal(f.to):
			want(n, resolve(n).Value)
			continue
		}
		want(n, likeWritten(resolve(n).Value, f.to))
	}
	keep := valueOf(doc, "keepWorkers")
	switch {
	case keep != nil && before.KeepWorkers != after.KeepWorkers:
		want(keep, strconv.FormatBool(after.KeepWorkers))
	case keep != nil:
		want(keep, resolve(keep).Value)
	case after.KeepWorkers:
		if err := s.addKey(doc, "kubernetesVersion", "keepWorkers", "true"); err != nil {
			return nil, err
		}
	}
	m := find(find(find(doc, "attestation"), "tpm2"), "measurements")
	x, y := before.Attestation.TPM2.Measurements, after.Attestation.TPM2.Measurements
	var added []uint32
	for _, i := range Registers(x, y) {
		from, inX := x[i]
		to, inY := y[i]
		switch {
		case !inX:
			added = append(added, i)
		case !inY:
			if err := s.removeRegister(m, i); err != nil {
				return nil, err
			}
		default:
			n := valueOf(registerOf(m, i), "expected")
			if n == nil {
				return nil, errTied
			}
			if bytes.Equal(from.Expected, to.Expected) {
				want(n, resolve(n).Value)
				continue
			}
			want(n, hex.EncodeToString(to.Expected))
		}
	}
	for _, w := range all {
		if err := s.set(w.n, w.text, becomes); err != nil {
			return nil, err
		}
	}
	if err := s.addRegisters(m, added, y); err != nil {
		return nil, err
	}
	return s.result()
}

// likeWritten writes v with or without its v, as old is written.
func likeWritten(old string, v version.Version) string {
	if !strings.HasPrefix(old, "v") {
		return strings.TrimPrefix(v.String(), "v")
	}
	return v.String()
}

// valueOf returns the value of a key as it stands, an alias as such; nil if there is
// none.
func valueOf(n *yaml.Node, key string) *yaml.Node {
	if n == nil || n.Kind != yaml.MappingNode {
		return nil
	}
	for i := 0; i+1 < len(n.Content); i += 2 {
		if n.Content[i].Value == key {
			return n.Content[i+1]
		}
	}
	return nil
}

// entry returns the index of the key of a register; -1 if it is not there.
func entry(m *yaml.Node, register uint32) int {
	for i := 0; i+1 < len(m.Content); i += 2 {
		if n, err := strconv.ParseUint(m.Content[i].Value, 10, 32); err == nil && uint32(n) == register {
			return i
		}
	}
	return -1
}

func registerOf(m *yaml.Node, register uint32) *yaml.Node {
	if i := entry(m, register); i >= 0 {
		return resolve(m.Content[i+1])
	}
	return nil
}

// end is where a value ends in the text: after its quote, bracket or last letter.
func (s *source) end(n *yaml.Node) (int, error) {
	switch n.Kind {
	case yaml.AliasNode:
		at, err := s.offset(n)
		return at + 1 + len(n.Value), err
	case yaml.ScalarNode:
		_, _, end, err := s.scalar(n)
		return end, err
	case yaml.MappingNode:
		if len(n.Content) == 0 {
			return 0, errTied
		}
		at, err := s.end(n.Content[len(n.Content)-1])
		if err != nil || n.Style&yaml.FlowStyle == 0 {
			return at, err
		}
		if at = s.blank(at); at < len(s.b) && s.b[at] == ',' {
			at = s.blank(at + 1)
		}
		if at >= len(s.b) || s.b[at] != '}' {
			return 0, errTied
		}
		return at + 1, nil
	}
	return 0, errTied
}

// addKey adds a key and its value behind another one of a mapping, on a line of its
// own, or in line. If a comment there shows the key, it comes after that.
func (s *source) addKey(m *yaml.Node, behind, key, value string) error {
	for i := 0; i+1 < len(m.Content); i += 2 {
		if m.Content[i].Value != behind {
			continue
		}
		at, err := s.end(m.Content[i+1])
		if err != nil {
			return err
		}
		if m.Style&yaml.FlowStyle != 0 {
			if m.Content[i].Style&yaml.DoubleQuotedStyle != 0 {
				key = strconv.Quote(key)
			}
			s.edits = append(s.edits, replacement{at, at, ", " + key + ": " + value})
			return nil
		}
		example := regexp.MustCompile(`^[ \t]*#[ \t]*` + key + `:`)
		for l := s.afterLine(at); l < len(s.b); l = s.afterLine(l) {
			text := s.b[l:s.endOfLine(l)]
			if example.Match(text) {
				at = l
				break
			}
			if t := bytes.TrimLeft(text, " \t"); len(t) > 0 && t[0] != '#' {
				break
			}
		}
		s.addLines(at, strings.Repeat(" ", m.Content[i].Column-1)+key+": "+value)
		return nil
	}
	return errTied
}

// addLines adds lines after the one that holds at.
func (s *source) addLines(at int, lines ...string) {
	nl, next := s.newline(at), s.afterLine(at)
	text := strings.Join(lines, nl) + nl
	if breakAt(s.b[s.endOfLine(at):]) == 0 { // the text ends without one
		text = nl + strings.Join(lines, nl)
	}
	s.edits = append(s.edits, replacement{next, next, text})
}

// removeRegister removes an entry: its lines, or in line with one comma.
func (s *source) removeRegister(m *yaml.Node, register uint32) error {
	i := entry(m, register)
	if i < 0 || m.Content[i].Anchor != "" || len(m.Content) == 2 {
		return errTied
	}
	from, err := s.offset(m.Content[i])
	if err != nil {
		return err
	}
	to, err := s.end(m.Content[i+1])
	if err != nil {
		return err
	}
	if m.Style&yaml.FlowStyle == 0 {
		from, to = s.startOfLine(from), s.afterLine(to)
	} else if next := s.blank(to); next < len(s.b) && s.b[next] == ',' {
		to = next + 1
		for to < len(s.b) && s.b[to] == ' ' {
			to++
		}
	} else {
		previous, err := s.end(m.Content[i-1])
		if err != nil {
			return err
		}
		if from = s.blank(previous); from >= len(s.b) || s.b[from] != ',' {
			return errTied
		}
	}
	s.edits = append(s.edits, replacement{from, to, ""})
	return nil
}

// addRegisters adds entries behind the last one, in its layout.
func (s *source) addRegisters(m *yaml.Node, added []uint32, values attestation.Measurements) error {
	if len(added) == 0 {
		return nil
	}
	last := len(m.Content) - 1
	key, value := m.Content[last-1], m.Content[last]
	at, err := s.end(value)
	if err != nil {
		return err
	}
	flow := func(i uint32) string {
		name := strconv.FormatUint(uint64(i), 10)
		if key.Style&yaml.DoubleQuotedStyle != 0 { // JSON
			return fmt.Sprintf(`"%s": {"expected": "%x", "warnOnly": false}`, name, values[i].Expected)
		}
		return fmt.Sprintf(`%s: {expected: "%x", warnOnly: false}`, name, values[i].Expected)
	}
	if m.Style&yaml.FlowStyle != 0 {
		var text strings.Builder
		for _, i := range added {
			text.WriteString(", " + flow(i))
		}
		s.edits = append(s.edits, replacement{at, at, text.String()})
		return nil
	}
	indent := strings.Repeat(" ", key.Column-1)
	var lines []string
	for _, i := range added {
		if value.Kind != yaml.MappingNode || value.Style&yaml.FlowStyle != 0 {
			lines = append(lines, indent+flow(i))
			continue
		}
		deeper := strings.Repeat(" ", value.Content[0].Column-1)
		lines = append(lines, fmt.Sprintf("%s%d:", indent, i), fmt.Sprintf(`%sexpected: "%x"`, deeper, values[i].Expected), deeper+"warnOnly: false")
	}
	s.addLines(at, lines...)
	return nil
}

// UpdateConfig replaces the configuration if it still is what it was when it was read.
// The file keeps its mode, and a link stays a link.
func (w *Workspace) UpdateConfig(read, b []byte) error {
	path := w.Path(ConfigFile)
	fail := func(err error) error {
		return &plan.Error{Op: "write " + path, Err: WithoutPath(err), Remedy: "make the file writable for this user, or use another directory with -C"}
	}
	real, err := filepath.EvalSymlinks(path)
	if err != nil {
		return fail(err)
	}
	info, err := os.Stat(real)
	if err != nil {
		return fail(err)
	}
	if info.Mode().Perm()&0o200 == 0 {
		return fail(fs.ErrPermission)
	}
	now, err := w.ReadConfig()
	if err != nil {
		return err
	}
	if !bytes.Equal(now, read) {
		return &plan.Error{
			Op: "write " + path, Err: errors.New("somebody changed it meanwhile"), Exit: plan.ExitUsage,
			Remedy: "run the same command again: it goes by what the file says now",
		}
	}
	return WriteIn(filepath.Dir(real), filepath.Base(real), b, info.Mode().Perm())
}

// FieldChange is one value of the configuration: "kubernetesVersion", from, to.
type FieldChange struct {
	Field string `json:"field"`
	From  string `json:"from"`
	To    string `json:"to"`
}
