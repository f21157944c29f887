package manifests

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"regexp"
	"strconv"
	"strings"
	"syscall"

	"gopkg.in/yaml.v3"

	"constellation/engine/kube/preflight"
	"constellation/engine/plan"
)

// walk sends the path of each YAML and JSON file below root.
func walk(ctx context.Context, root *os.Root, paths chan<- string, f *facts) error {
	files := 0
	err := fs.WalkDir(root.FS(), ".", func(name string, d fs.DirEntry, err error) error {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil {
			if name == "." {
				return err
			}
			f.skip(name, 0, "it cannot be read: "+cause(err))
			return nil
		}
		if d.IsDir() {
			switch {
			case d.Name() == ".git":
				return fs.SkipDir
			case d.Name() == "templates":
				if _, err := root.Lstat(path.Join(path.Dir(name), "Chart.yaml")); err == nil {
					f.skip(name, 0, "templates of a Helm chart are not YAML: check the output of `helm template`")
					return fs.SkipDir
				}
			}
			return nil
		}
		if !named(d.Name()) {
			return nil
		}
		switch {
		case d.Type()&fs.ModeSymlink != 0:
			// The target of a link inside the directory is read under its own name.
			if _, err := root.Stat(name); err != nil {
				f.skip(name, 0, "it is a symbolic link that leads out of the directory or nowhere")
			}
			return nil
		case !d.Type().IsRegular():
			f.skip(name, 0, "it is not a regular file")
			return nil
		}
		if files++; files > maxFiles {
			return fmt.Errorf("read manifests: more than %d files: check subdirectories one by one", maxFiles)
		}
		select {
		case paths <- name:
		case <-ctx.Done():
			return ctx.Err()
		}
		return nil
	})
	if err != nil && ctx.Err() == nil {
		return fmt.Errorf("read manifests: %w", err)
	}
	return err
}

// named reports whether a file has the name of a manifest.
func named(file string) bool {
	switch strings.ToLower(path.Ext(file)) {
	case ".yaml", ".yml", ".json":
		return true
	}
	return false
}

// cause is an error without the path, which the result has already.
func cause(err error) string {
	var p *fs.PathError
	if errors.As(err, &p) {
		err = p.Err
	}
	return preflight.Printable(err.Error())
}

// parser reads files into facts. Its buffer is reused.
type parser struct {
	rules *rules
	facts *facts
	buf   bytes.Buffer
}

func (p *parser) file(root *os.Root, name string) {
	// Without O_NONBLOCK, opening a pipe that has replaced the file would block.
	f, err := root.OpenFile(name, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		p.facts.skip(name, 0, "it cannot be opened: "+cause(err))
		return
	}
	defer f.Close()
	info, err := f.Stat()
	switch {
	case err != nil:
		p.facts.skip(name, 0, "it cannot be read: "+cause(err))
		return
	case !info.Mode().IsRegular():
		p.facts.skip(name, 0, "it is not a regular file")
		return
	case info.Size() > maxFile:
		p.facts.skip(name, 0, fmt.Sprintf("it has %d bytes, and files of more than %d MiB are not read", info.Size(), maxFile>>20))
		return
	}
	p.buf.Reset()
	p.buf.Grow(int(info.Size()) + bytes.MinRead)
	if _, err := p.buf.ReadFrom(io.LimitReader(f, maxFile)); err != nil {
		p.facts.skip(name, 0, "it cannot be read: "+cause(err))
		return
	}
	p.text(name, p.buf.Bytes())
}

var (
	mark16, mark16Swapped = []byte("\xff\xfe"), []byte("\xfe\xff")
	separator             = []byte("---")
	apiVersionKey         = []byte("apiVersion")
	templateMark          = []byte("{{")
	endMark               = []byte("\n...")
)

// text reads the documents of one file.
func (p *parser) text(name string, b []byte) {
	p.facts.files++
	p.facts.bytes += int64(len(b))
	if bytes.HasPrefix(b, mark16) || bytes.HasPrefix(b, mark16Swapped) {
		p.facts.skip(name, 0, "it is UTF-16: convert it to UTF-8")
		return
	}
	if !bytes.Contains(b, apiVersionKey) {
		return // no object
	}
	if strings.EqualFold(path.Ext(name), ".json") {
		p.document(name, 1, b, true)
		return
	}
	line, start, startLine := 1, 0, 1
	for at := 0; at < len(b); {
		end := bytes.IndexByte(b[at:], '\n')
		if end < 0 {
			end = len(b)
		} else {
			end += at + 1
		}
		if at > start && isSeparator(b[at:end]) {
			p.document(name, startLine, b[start:at], false)
			start, startLine = at, line
		}
		at = end
		line++
	}
	p.document(name, startLine, b[start:], false)
}

// isSeparator reports whether a line begins a new document.
func isSeparator(line []byte) bool {
	rest, ok := bytes.CutPrefix(line, separator)
	return ok && (len(rest) == 0 || rest[0] == '\n' || rest[0] == '\r' || rest[0] == ' ' || rest[0] == '\t')
}

// document reads one document, whose first line is the given one of the file.
func (p *parser) document(name string, line int, b []byte, isJSON bool) {
	if !bytes.Contains(b, apiVersionKey) {
		return
	}
	if h, ok := header(b); ok && !isJSON {
		if h.kind == "" || h.apiVersion == "" {
			return
		}
		if !p.rules.wants(h) {
			p.facts.objects++
			return
		}
	}
	if len(b) > maxDocument {
		p.facts.skip(name, line, fmt.Sprintf("the document has %d bytes, and documents of more than %d MiB are not read", len(b), maxDocument>>20))
		return
	}
	values := bytes.Count(b, []byte{'\n'}) + bytes.Count(b, []byte{','}) + bytes.Count(b, []byte{'['}) + bytes.Count(b, []byte{'{'}) + bytes.Count(b, []byte("- "))
	if values > maxValues {
		p.facts.skip(name, line, fmt.Sprintf("the document has more than %d values", maxValues))
		return
	}
	if isJSON {
		n, err := fromJSON(b)
		if err != nil {
			p.facts.skip(name, line, notParsed("JSON", b, err))
			return
		}
		p.object(name, 0, n, 0)
		return
	}
	if !bytes.Contains(b, endMark) {
		// Unmarshal reads the first document without copying it.
		var n yaml.Node
		if err := yaml.Unmarshal(b, &n); err != nil {
			p.facts.skip(name, line, notParsed("YAML", b, err))
			return
		}
		p.root(name, line, b, &n)
		return
	}
	dec := yaml.NewDecoder(bytes.NewReader(b))
	for {
		var n yaml.Node
		err := dec.Decode(&n)
		if errors.Is(err, io.EOF) {
			return
		}
		if err != nil {
			p.facts.skip(name, line, notParsed("YAML", b, err))
			return
		}
		if !p.root(name, line, b, &n) {
			return
		}
	}
}

// root checks a parsed document. It returns false for a template.
func (p *parser) root(name string, line int, b []byte, n *yaml.Node) bool {
	if len(n.Content) == 0 {
		return true
	}
	if bytes.Contains(b, templateMark) && templated(n.Content[0], 0) {
		p.facts.skip(name, line, "it is a template, not YAML: check what it is rendered to")
		return false
	}
	if bytes.IndexByte(b, '*') >= 0 && expanded(n.Content[0], map[*yaml.Node]int{}) > maxValues {
		p.facts.skip(name, line, fmt.Sprintf("the document has more than %d values", maxValues))
		return true
	}
	p.object(name, line-1, n.Content[0], 0)
	return true
}

// expanded counts the values of a document whose aliases are replaced by what they stand for. It
// stops above maxValues. sizes has the nodes that were counted; zero: being counted, so that an
// alias of a node within itself is too large.
func expanded(n *yaml.Node, sizes map[*yaml.Node]int) int {
	if size, ok := sizes[n]; ok {
		if size == 0 {
			return maxValues + 1
		}
		return size
	}
	sizes[n] = 0
	size := 1
	if n.Alias != nil {
		size += expanded(n.Alias, sizes)
	}
	for _, c := range n.Content {
		if size > maxValues {
			break
		}
		size += expanded(c, sizes)
	}
	size = min(size, maxValues+1)
	sizes[n] = size
	return size
}

var lineRE = regexp.MustCompile(`line (\d+)`)

// notParsed describes a document that is not of a format. The parser's message may have
// content of the document: only its line is used.
func notParsed(format string, b []byte, err error) string {
	if bytes.Contains(b, templateMark) {
		return "it is a template, not " + format + ": check what it is rendered to"
	}
	var syntax *json.SyntaxError
	if errors.As(err, &syntax) {
		return fmt.Sprintf("it is not %s: see line %d", format, 1+bytes.Count(b[:min(len(b), int(syntax.Offset))], []byte{'\n'}))
	}
	if m := lineRE.FindStringSubmatch(err.Error()); m != nil {
		return fmt.Sprintf("it is not %s: see line %s of the document", format, m[1])
	}
	return "it is not " + format
}

// templated reports whether a document has a template expression where YAML has a value: it is
// then a mapping whose key is a mapping.
func templated(n *yaml.Node, depth int) bool {
	if depth > maxDepth {
		return false
	}
	if n.Kind == yaml.MappingNode {
		for i := 0; i+1 < len(n.Content); i += 2 {
			if n.Content[i].Kind == yaml.MappingNode {
				return true
			}
		}
	}
	for _, c := range n.Content {
		if templated(c, depth+1) {
			return true
		}
	}
	return false
}

// head is the type of an object.
type head struct{ apiVersion, kind string }

// header reads the type of an object from the lines of a document, without parsing it. ok is
// false if the document must be parsed to know.
func header(b []byte) (h head, ok bool) {
	first := true
	for len(b) > 0 {
		line := b
		if end := bytes.IndexByte(b, '\n'); end >= 0 {
			line, b = b[:end], b[end+1:]
		} else {
			b = nil
		}
		if len(line) == 0 || line[0] == ' ' || line[0] == '#' || line[0] == '\r' || line[0] == '\t' {
			continue
		}
		if !bytes.HasPrefix(line, separator) && (first && !isLetter(line[0]) || bytes.IndexByte([]byte(`"'?{[&*!<%`), line[0]) >= 0) {
			return head{}, false // JSON, a quoted key, a list, a merge, a directive
		}
		first = first && bytes.HasPrefix(line, separator)
		for _, key := range []struct {
			name  string
			value *string
		}{{"apiVersion:", &h.apiVersion}, {"kind:", &h.kind}} {
			rest, is := bytes.CutPrefix(line, []byte(key.name))
			if !is {
				continue
			}
			value, plain := plainScalar(rest)
			if !plain || *key.value != "" {
				return head{}, false
			}
			*key.value = value
		}
		if isSeparator(line) && len(bytes.TrimSpace(line)) > len(separator) || bytes.HasPrefix(line, []byte("...")) {
			return head{}, false
		}
	}
	return h, true
}

func isLetter(c byte) bool { return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' }

// plainScalar returns the value of a key if it is a plain word, quoted or not.
func plainScalar(b []byte) (string, bool) {
	if i := bytes.Index(b, []byte(" #")); i >= 0 {
		b = b[:i]
	}
	b = bytes.TrimSpace(b)
	if n := len(b); n >= 2 && (b[0] == '"' || b[0] == '\'') && b[n-1] == b[0] {
		b = b[1 : n-1]
	}
	for _, c := range b {
		if !isLetter(c) && (c < '0' || c > '9') && c != '.' && c != '/' && c != '-' {
			return "", false
		}
	}
	return string(b), len(b) > 0
}

// maxDepth bounds the nesting of values that are looked at.
const maxDepth = 100

var errDepth = errors.New("it is nested too deeply")

// fromJSON parses JSON into the form of YAML, with lines.
func fromJSON(b []byte) (*yaml.Node, error) {
	dec := json.NewDecoder(bytes.NewReader(b))
	dec.UseNumber()
	j := jsonReader{dec: dec, text: b, line: 1}
	n, err := j.value(0)
	if err != nil {
		return nil, err
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return nil, &json.SyntaxError{Offset: dec.InputOffset()}
	}
	return n, nil
}

type jsonReader struct {
	dec  *json.Decoder
	text []byte
	at   int
	line int
}

func (j *jsonReader) value(depth int) (*yaml.Node, error) {
	if depth > maxDepth {
		return nil, errDepth
	}
	t, err := j.dec.Token()
	if err != nil {
		return nil, err
	}
	at := int(j.dec.InputOffset())
	j.line += bytes.Count(j.text[j.at:at], []byte{'\n'})
	j.at = at
	n := &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Line: j.line}
	switch t := t.(type) {
	case json.Delim:
		n.Kind, n.Tag = yaml.MappingNode, "!!map"
		if t == '[' {
			n.Kind, n.Tag = yaml.SequenceNode, "!!seq"
		}
		for j.dec.More() {
			c, err := j.value(depth + 1)
			if err != nil {
				return nil, err
			}
			n.Content = append(n.Content, c)
			if n.Kind == yaml.MappingNode {
				v, err := j.value(depth + 1)
				if err != nil {
					return nil, err
				}
				n.Content = append(n.Content, v)
			}
		}
		_, err := j.dec.Token()
		return n, err
	case string:
		n.Value = t
	case json.Number:
		n.Tag, n.Value = "!!int", t.String()
	case bool:
		n.Tag, n.Value = "!!bool", strconv.FormatBool(t)
	case nil:
		n.Tag, n.Value = "!!null", "null"
	}
	return n, nil
}

// get returns the value at a path of keys; nil if there is none.
func get(n *yaml.Node, keys ...string) *yaml.Node {
	n = resolved(n)
	for _, key := range keys {
		n = field(n, key, 0)
		if n == nil {
			return nil
		}
	}
	return n
}

func resolved(n *yaml.Node) *yaml.Node {
	for range maxDepth {
		if n == nil || n.Kind != yaml.AliasNode {
			return n
		}
		n = n.Alias
	}
	return nil
}

func field(n *yaml.Node, key string, depth int) *yaml.Node {
	if n == nil || n.Kind != yaml.MappingNode || depth > 10 {
		return nil
	}
	for i := 0; i+1 < len(n.Content); i += 2 {
		if n.Content[i].Value == key && n.Content[i].Kind == yaml.ScalarNode {
			return resolved(n.Content[i+1])
		}
	}
	for i := 0; i+1 < len(n.Content); i += 2 {
		if n.Content[i].Tag != "!!merge" {
			continue
		}
		merged := resolved(n.Content[i+1])
		if merged == nil {
			continue
		}
		if merged.Kind != yaml.SequenceNode {
			return field(merged, key, depth+1)
		}
		for _, m := range merged.Content {
			if v := field(resolved(m), key, depth+1); v != nil {
				return v
			}
		}
	}
	return nil
}

// str is the text of a scalar; empty without one.
func str(n *yaml.Node) string {
	if n == nil || n.Kind != yaml.ScalarNode || n.Tag == "!!null" {
		return ""
	}
	return n.Value
}

// num is the value of a number; ok is false if it is none.
func num(n *yaml.Node) (int, bool) {
	if n == nil || n.Kind != yaml.ScalarNode || n.Tag != "!!int" {
		return 0, false
	}
	v, err := strconv.Atoi(n.Value)
	return v, err == nil
}

// items are the elements of a list.
func items(n *yaml.Node) []*yaml.Node {
	if n = resolved(n); n == nil || n.Kind != yaml.SequenceNode {
		return nil
	}
	out := make([]*yaml.Node, 0, len(n.Content))
	for _, c := range n.Content {
		if c = resolved(c); c != nil {
			out = append(out, c)
		}
	}
	return out
}

// entry is a key of a mapping and its value.
type entry struct{ key, value *yaml.Node }

func entries(n *yaml.Node) (out []entry) {
	if n = resolved(n); n == nil || n.Kind != yaml.MappingNode {
		return nil
	}
	for i := 0; i+1 < len(n.Content); i += 2 {
		if v := resolved(n.Content[i+1]); v != nil && n.Content[i].Kind == yaml.ScalarNode {
			out = append(out, entry{n.Content[i], v})
		}
	}
	return out
}

func stringMap(n *yaml.Node) map[string]string {
	var out map[string]string
	for _, e := range entries(n) {
		if e.value.Kind == yaml.ScalarNode {
			if out == nil {
				out = map[string]string{}
			}
			out[e.key.Value] = e.value.Value
		}
	}
	return out
}

func location(file string, line int) []plan.Location {
	return []plan.Location{{File: file, Line: line}}
}
