package workspace

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"gopkg.in/yaml.v3"

	"constellation/engine/cloud/providers"
	"constellation/engine/version"
)

// FieldError is one thing that is wrong with a file.
type FieldError struct {
	// Field is the path of the field: "nodeGroups.workers.count". Empty for the file as a whole.
	Field string `json:"field,omitempty"`
	// Line counts from 1; zero if the field is absent.
	Line    int    `json:"line,omitempty"`
	Problem string `json:"problem"`
	Remedy  string `json:"remedy,omitempty"`
}

// Error returns "line 4: nodeGroups.workers.count: problem (remedy)".
func (e FieldError) Error() string {
	var b strings.Builder
	if e.Line > 0 {
		fmt.Fprintf(&b, "line %d: ", e.Line)
	}
	if e.Field != "" {
		b.WriteString(e.Field + ": ")
	}
	b.WriteString(e.Problem)
	if e.Remedy != "" {
		b.WriteString(" (" + e.Remedy + ")")
	}
	return b.String()
}

// ConfigErrors is everything that is wrong with a file, in the order of its lines;
// what is missing comes last.
type ConfigErrors struct {
	File   string       `json:"file"`
	Errors []FieldError `json:"errors"`
}

// Error returns one line per problem.
func (e *ConfigErrors) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s has %d problem", e.File, len(e.Errors))
	if len(e.Errors) != 1 {
		b.WriteByte('s')
	}
	for _, f := range e.Errors {
		b.WriteString("\n  " + f.Error())
	}
	return b.String()
}

// maxFile bounds configuration and state in bytes; the largest real ones have a few kB.
const maxFile = 1 << 20

// reader reads one YAML file strictly and collects everything that is wrong with
// it. It works on nodes, not on Go types, so that each problem has its line and
// that "1.10" is a text and not a number.
type reader struct {
	errs []FieldError
}

// field reads the node of one key. path is the key's path in the file.
type field func(n *yaml.Node, path string)

func (r *reader) bad(n *yaml.Node, path, problem, remedy string) {
	line := 0
	if n != nil {
		line = n.Line
	}
	r.errs = append(r.errs, FieldError{path, line, problem, remedy})
}

// err returns what was found; nil if nothing.
func (r *reader) err(file string) error {
	if len(r.errs) == 0 {
		return nil
	}
	slices.SortStableFunc(r.errs, func(a, b FieldError) int {
		switch {
		case a.Line == b.Line:
			return 0
		case a.Line == 0:
			return 1
		case b.Line == 0:
			return -1
		}
		return cmp.Compare(a.Line, b.Line)
	})
	return &ConfigErrors{file, r.errs}
}

// document returns the top node of b; nil with an error noted if b is no single
// YAML document.
func (r *reader) document(b []byte) *yaml.Node {
	if len(b) > maxFile {
		r.bad(nil, "", fmt.Sprintf("is larger than %d bytes", maxFile), "is it the right file?")
		return nil
	}
	d := yaml.NewDecoder(strings.NewReader(string(b)))
	var doc, second yaml.Node
	if err := d.Decode(&doc); err != nil {
		if len(strings.TrimSpace(string(b))) == 0 || err.Error() == "EOF" {
			r.bad(nil, "", "is empty", "move it away, then write a new one: "+providers.Start())
			return nil
		}
		line, problem := yamlProblem(err)
		r.errs = append(r.errs, FieldError{"", line, "is not YAML: " + problem, "check indentation, colons and quotes near this line"})
		return nil
	}
	if err := d.Decode(&second); err == nil {
		r.bad(&second, "", "holds more than one document", "remove everything from the second --- on")
		return nil
	}
	return doc.Content[0]
}

var yamlLineRE = regexp.MustCompile(`^yaml: (?:line (\d+): )?(.*)$`)

// yamlProblem takes the line out of an error of the YAML library.
func yamlProblem(err error) (line int, problem string) {
	m := yamlLineRE.FindStringSubmatch(strings.SplitN(err.Error(), "\n", 2)[0])
	if m == nil {
		return 0, err.Error()
	}
	line, _ = strconv.Atoi(m[1]) // absent: 0
	return line, m[2]
}

// mapping reads a mapping. Every key must be in fields; those in required must be
// there. It reports whether n was a mapping.
func (r *reader) mapping(n *yaml.Node, path string, fields map[string]field, required ...string) bool {
	known := func() []string {
		var out []string
		for k := range fields {
			out = append(out, k)
		}
		slices.Sort(out)
		return out
	}
	seen, ok := r.each(n, path, func(key *yaml.Node, value *yaml.Node, path string) {
		f := fields[key.Value]
		if f == nil {
			remedy := "known here: " + strings.Join(known(), ", ")
			if near := nearest(key.Value, known()); near != "" {
				remedy = "did you mean " + near + "?"
			}
			r.bad(key, path, "is not known", remedy)
			return
		}
		f(value, path)
	})
	if !ok {
		return false
	}
	for _, k := range required {
		if !seen[k] {
			r.bad(nil, join(path, k), "is missing", "`constellation config generate` shows an example")
		}
	}
	return true
}

// each calls f for every key of a mapping, in order, and returns the keys.
func (r *reader) each(n *yaml.Node, path string, f func(key, value *yaml.Node, path string)) (map[string]bool, bool) {
	n = resolve(n)
	if n.Kind != yaml.MappingNode {
		r.bad(n, path, "is "+kindOf(n)+", want keys and values", "indent its fields below it")
		return nil, false
	}
	seen := map[string]bool{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		key, value := n.Content[i], n.Content[i+1]
		p := join(path, key.Value)
		switch {
		case key.Kind != yaml.ScalarNode:
			r.bad(key, path, "has a key that is "+kindOf(key), "keys are words")
		case seen[key.Value]:
			r.bad(key, p, "occurs twice", "remove one of them")
		default:
			seen[key.Value] = true
			at := *value
			at.Line = key.Line // problems of a value are reported at its key, also if the value starts further down
			f(key, &at, p)
		}
	}
	return seen, true
}

// text reads a scalar as it is written.
func (r *reader) text(n *yaml.Node, path string) (string, bool) {
	n = resolve(n)
	if n.Kind != yaml.ScalarNode || n.Tag == "!!null" || n.Tag == "!!bool" || n.Tag == "!!binary" {
		r.bad(n, path, "is "+kindOf(n)+", want a text", "put the value in quotes")
		return "", false
	}
	return n.Value, true
}

// str returns a field that stores a text for which ok is true. problem and remedy
// describe any other.
func (r *reader) str(to *string, ok func(string) bool, problem, remedy string) field {
	return func(n *yaml.Node, path string) {
		s, isText := r.text(n, path)
		if !isText {
			return
		}
		if !ok(s) {
			r.bad(n, path, fmt.Sprintf("%q %s", s, problem), remedy)
			return
		}
		*to = s
	}
}

func (r *reader) integer(to *int, lowest, highest int) field {
	return func(n *yaml.Node, path string) {
		n = resolve(n)
		v, err := strconv.Atoi(n.Value)
		if n.Kind != yaml.ScalarNode || n.Tag != "!!int" || err != nil {
			r.bad(n, path, "is "+kindOf(n)+", want a number", fmt.Sprintf("write a number from %d to %d, without quotes", lowest, highest))
			return
		}
		if v < lowest || v > highest {
			r.bad(n, path, fmt.Sprintf("is %d, want %d to %d", v, lowest, highest), "")
			return
		}
		*to = v
	}
}

func (r *reader) boolean(to *bool) field {
	return func(n *yaml.Node, path string) {
		n = resolve(n)
		if n.Kind != yaml.ScalarNode || n.Tag != "!!bool" || n.Decode(to) != nil {
			r.bad(n, path, "is "+kindOf(n)+", want true or false", "")
		}
	}
}

func (r *reader) version(to *version.Version, example string) field {
	return func(n *yaml.Node, path string) {
		s, ok := r.text(n, path)
		if !ok {
			return
		}
		v, err := version.Parse(s)
		if err != nil {
			r.bad(n, path, fmt.Sprintf("%q is not a full version", s), "write major, minor and patch, such as "+example)
			return
		}
		*to = v
	}
}

// prefix reads an IPv4 range between /shortest and /longest.
func (r *reader) prefix(to *netip.Prefix, shortest, longest int) field {
	return func(n *yaml.Node, path string) {
		s, ok := r.text(n, path)
		if !ok {
			return
		}
		p, err := netip.ParsePrefix(s)
		switch {
		case err != nil:
			r.bad(n, path, fmt.Sprintf("%q is not an address range", s), "write it as address/length, such as 10.96.0.0/12")
		case !p.Addr().Is4():
			r.bad(n, path, fmt.Sprintf("%s is not an IPv4 range", s), "this release has IPv4 only")
		case p != p.Masked():
			r.bad(n, path, fmt.Sprintf("%s has bits beyond its length", s), "write "+p.Masked().String())
		case p.Bits() < shortest || p.Bits() > longest:
			r.bad(n, path, fmt.Sprintf("%s has length %d, want %d to %d", s, p.Bits(), shortest, longest), "")
		default:
			*to = p
		}
	}
}

// list reads a sequence of texts.
func (r *reader) list(to *[]string, ok func(string) bool, problem string) field {
	return func(n *yaml.Node, path string) {
		n = resolve(n)
		if n.Kind != yaml.SequenceNode {
			r.bad(n, path, "is "+kindOf(n)+", want a list", "write each entry on its own line after a dash")
			return
		}
		out := make([]string, 0, len(n.Content))
		for i, c := range n.Content {
			var s string
			r.str(&s, ok, problem, "")(c, fmt.Sprintf("%s[%d]", path, i))
			out = append(out, s)
		}
		*to = out
	}
}

// resolve follows an alias to what it stands for.
func resolve(n *yaml.Node) *yaml.Node {
	for n.Kind == yaml.AliasNode {
		n = n.Alias
	}
	return n
}

func join(path, key string) string {
	if path == "" {
		return key
	}
	return path + "." + key
}

// kindOf describes a node to a person.
func kindOf(n *yaml.Node) string {
	switch n.Kind {
	case yaml.MappingNode:
		return "a group of fields"
	case yaml.SequenceNode:
		return "a list"
	}
	switch n.Tag {
	case "!!null":
		return "empty"
	case "!!int", "!!float":
		return "the number " + n.Value
	case "!!bool":
		return "the word " + n.Value + ", which YAML reads as true or false"
	}
	return fmt.Sprintf("the text %q", n.Value)
}

// nearest returns the one of words that s was most likely meant to be; empty if
// none is close.
func nearest(s string, words []string) string {
	if len(s) > 64 {
		return "" // the distance takes the product of both lengths
	}
	best, at := "", max(2, len(s)/3)+1
	for _, w := range words {
		if d := distance(strings.ToLower(s), strings.ToLower(w)); d < at {
			best, at = w, d
		}
	}
	return best
}

// distance counts the letters to insert, delete, replace or swap to get from a to b.
func distance(a, b string) int {
	x, y := []rune(a), []rune(b)
	rows := make([][]int, len(x)+1)
	for i := range rows {
		rows[i] = make([]int, len(y)+1)
		rows[i][0] = i
	}
	for j := range y {
		rows[0][j+1] = j + 1
	}
	for i := 1; i <= len(x); i++ {
		for j := 1; j <= len(y); j++ {
			cost := 1
			if x[i-1] == y[j-1] {
				cost = 0
			}
			rows[i][j] = min(rows[i-1][j]+1, rows[i][j-1]+1, rows[i-1][j-1]+cost)
			if i > 1 && j > 1 && x[i-1] == y[j-2] && x[i-2] == y[j-1] {
				rows[i][j] = min(rows[i][j], rows[i-2][j-2]+1)
			}
		}
	}
	return rows[len(x)][len(y)]
}

// AsConfigErrors returns the list of problems inside err.
func AsConfigErrors(err error) (*ConfigErrors, bool) {
	var c *ConfigErrors
	ok := errors.As(err, &c)
	return c, ok
}
