package gcptest

import (
	_ "embed"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"math/big"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"constellation/engine/cloud/cloudtest/wire"
)

// document is the description of the API that Google's client is generated from.
type document struct {
	BasePath   string             `json:"basePath"`
	Parameters map[string]*schema `json:"parameters"`
	Schemas    map[string]*schema `json:"schemas"`
	Resources  map[string]struct {
		Methods map[string]*method `json:"methods"`
	} `json:"resources"`

	methods map[string]*method // by ID
}

type method struct {
	ID         string             `json:"id"`
	HTTPMethod string             `json:"httpMethod"`
	FlatPath   string             `json:"flatPath"`
	Parameters map[string]*schema `json:"parameters"`
	Request    *schema            `json:"request"`
	Response   *schema            `json:"response"`
	Scopes     []string           `json:"scopes"`

	segments []string
}

// schema is the type of a parameter or of a field.
type schema struct {
	Ref                  string             `json:"$ref"`
	Type                 string             `json:"type"`
	Format               string             `json:"format"`
	Pattern              string             `json:"pattern"`
	Minimum              string             `json:"minimum"`
	Maximum              string             `json:"maximum"`
	Enum                 []string           `json:"enum"`
	Location             string             `json:"location"`
	Required             bool               `json:"required"`
	Repeated             bool               `json:"repeated"`
	Properties           map[string]*schema `json:"properties"`
	Items                *schema            `json:"items"`
	AdditionalProperties *schema            `json:"additionalProperties"`
	Annotations          struct {
		Required []string `json:"required"`
	} `json:"annotations"`
}

// methodsJSON has the methods that the emulator serves, and their types, without descriptions. TestMethodsAreCurrent
// compares it with the document in the module of Google's client, and writes it with the flag -update.
//
//go:embed methods.json
var methodsJSON []byte

// discovery reads methodsJSON, once.
var discovery = sync.OnceValues(func() (*document, error) {
	d := &document{methods: map[string]*method{}}
	if err := json.Unmarshal(methodsJSON, d); err != nil {
		return nil, fmt.Errorf("read methods.json: %w", err)
	}
	for _, r := range d.Resources {
		for _, m := range r.Methods {
			m.segments = strings.Split(m.FlatPath, "/")
			d.methods[m.ID] = m
		}
	}
	if len(d.methods) == 0 {
		return nil, errors.New("methods.json has no methods")
	}
	return d, nil
})

// find returns the method of a request with the parameters of its path. A literal segment wins over a
// parameter.
func (d *document) find(r *http.Request) (m *method, params map[string]string) {
	path, ok := strings.CutPrefix(r.URL.Path, d.BasePath)
	if !ok {
		return nil, nil
	}
	got, best := strings.Split(path, "/"), -1
	for _, c := range d.methods {
		if c.HTTPMethod != r.Method || len(c.segments) != len(got) {
			continue
		}
		p, literal := map[string]string{}, 0
		for n, want := range c.segments {
			switch name, isParam := strings.CutPrefix(want, "{"); {
			case isParam:
				p[strings.TrimSuffix(name, "}")] = got[n]
			case want != got[n]:
				literal = -1 << 20
			default:
				literal++
			}
		}
		if literal > best {
			m, params, best = c, p, literal
		}
	}
	return m, params
}

// request checks a request.
func (d *document) request(r *http.Request, body []byte) (wire.Call, []string) {
	m, params := d.find(r)
	if m == nil {
		return wire.Call{}, []string{"the API has no such path and method"}
	}
	call, problems := wire.Call{Method: m.ID, Params: params, Body: body, Limit: limitOf(m)}, []string(nil)
	for name, values := range r.URL.Query() {
		s := m.Parameters[name]
		if s == nil {
			s = d.Parameters[name]
		}
		switch {
		case s == nil || s.Location != "query":
			problems = append(problems, "unknown parameter "+name)
			continue
		case len(values) > 1 && !s.Repeated:
			problems = append(problems, "parameter "+name+" is repeated")
		}
		params[name] = values[0]
	}
	for name, s := range m.Parameters {
		v, ok := params[name]
		if !ok {
			if s.Required {
				problems = append(problems, "parameter "+name+" is missing")
			}
			continue
		}
		problems = append(problems, s.text("parameter "+name, v)...)
	}
	switch {
	case m.Request == nil && len(body) > 0:
		problems = append(problems, "the method has no body")
	case m.Request != nil:
		v, err := decode(body)
		if err != nil {
			problems = append(problems, "body: "+err.Error())
			break
		}
		problems = append(problems, d.value(m.Request, "body", v, m.ID)...)
	}
	slices.Sort(problems)
	return call, problems
}

// response checks an answer of a method.
func (d *document) response(id string, body []byte) []string {
	v, err := decode(body)
	if err != nil {
		return []string{err.Error()}
	}
	if m := d.methods[id]; m != nil && m.Response != nil {
		return d.value(m.Response, "answer", v, "")
	}
	return []string{"the API has no method " + id}
}

func decode(b []byte) (v any, err error) {
	d := json.NewDecoder(strings.NewReader(string(b)))
	d.UseNumber()
	err = d.Decode(&v)
	return v, err
}

// resolve follows a reference.
func (d *document) resolve(s *schema) *schema {
	for s != nil && s.Ref != "" {
		s = d.Schemas[s.Ref]
	}
	return s
}

// value checks a value of JSON. id is the method whose required fields must be present.
func (d *document) value(s *schema, at string, v any, id string) (problems []string) {
	if s = d.resolve(s); s == nil {
		return []string{at + ": the schema is missing"}
	}
	wrong := func() []string { return []string{fmt.Sprintf("%s is %T, want %s", at, v, s.Type)} }
	switch s.Type {
	case "object":
		fields, ok := v.(map[string]any)
		if !ok {
			return wrong()
		}
		for name, x := range fields {
			field := s.Properties[name]
			if field == nil {
				field = s.AdditionalProperties
			}
			if field == nil {
				problems = append(problems, fmt.Sprintf("unknown field %s.%s", at, name))
				continue
			}
			problems = append(problems, d.value(field, at+"."+name, x, id)...)
		}
		for name, field := range s.Properties {
			if _, ok := fields[name]; !ok && id != "" && slices.Contains(field.Annotations.Required, id) {
				problems = append(problems, fmt.Sprintf("field %s.%s is missing", at, name))
			}
		}
	case "array":
		items, ok := v.([]any)
		if !ok {
			return wrong()
		}
		for n, x := range items {
			problems = append(problems, d.value(s.Items, fmt.Sprintf("%s[%d]", at, n), x, id)...)
		}
	case "string":
		text, ok := v.(string)
		if !ok {
			return wrong()
		}
		return s.text(at, text)
	case "boolean":
		if _, ok := v.(bool); !ok {
			return wrong()
		}
	case "integer", "number":
		n, ok := v.(json.Number)
		if !ok {
			return wrong()
		}
		return s.text(at, n.String())
	}
	return problems
}

var patterns sync.Map // from text to *regexp.Regexp

// match reports whether a text matches a pattern as a whole.
func match(pattern, text string) (bool, error) {
	known, ok := patterns.Load(pattern)
	if !ok {
		re, err := regexp.Compile("^(?:" + pattern + ")$")
		if err != nil {
			return false, err
		}
		known, _ = patterns.LoadOrStore(pattern, re)
	}
	return known.(*regexp.Regexp).MatchString(text), nil
}

// ranges are those of the formats of integers.
var ranges = map[string][2]string{
	"int32": {"-2147483648", "2147483647"}, "uint32": {"0", "4294967295"}, "int64": {"-9223372036854775808", "9223372036854775807"}, "uint64": {"0", "18446744073709551615"},
}

// text checks a value that is written as text, as all parameters and 64-bit numbers are.
func (s *schema) text(at, v string) (problems []string) {
	bad := func(want string) { problems = append(problems, fmt.Sprintf("%s is %q, want %s", at, v, want)) }
	if len(s.Enum) > 0 && !slices.Contains(s.Enum, v) {
		bad("one of " + strings.Join(s.Enum, ", "))
	}
	if s.Pattern != "" {
		if ok, err := match(s.Pattern, v); err != nil {
			problems = append(problems, fmt.Sprintf("%s: the schema has a pattern that Go cannot read: %v", at, err))
		} else if !ok {
			bad("a text that matches " + s.Pattern)
		}
	}
	switch {
	case ranges[s.Format][1] != "":
		n, ok := new(big.Int).SetString(v, 10)
		for bound, limit := range map[int][]string{-1: {ranges[s.Format][0], s.Minimum}, 1: {ranges[s.Format][1], s.Maximum}} {
			for _, l := range limit {
				if m, has := new(big.Int).SetString(l, 10); ok && has && n.Cmp(m) == bound {
					bad("a number up to " + l)
				}
			}
		}
		if !ok {
			bad("a number of format " + s.Format)
		}
	case s.Type == "boolean":
		if v != "true" && v != "false" {
			bad("true or false")
		}
	case s.Type == "number":
		if _, err := strconv.ParseFloat(v, 64); err != nil {
			bad("a number")
		}
	case s.Format == "byte":
		_, std := base64.StdEncoding.DecodeString(v)
		if _, url := base64.URLEncoding.DecodeString(v); std != nil && url != nil {
			bad("base64")
		}
	case s.Format == "google-datetime", s.Format == "date-time":
		if _, err := time.Parse(time.RFC3339, v); err != nil {
			bad("a time")
		}
	}
	return problems
}

// limitOf returns the rate limit of a method, as https://cloud.google.com/compute/api-quota groups them.
func limitOf(m *method) string {
	words := strings.Split(m.ID, ".") // compute.instances.list
	name := words[len(words)-1]
	switch {
	case strings.Contains(m.ID, "Operations.") && (name == "get" || name == "wait"):
		return "operation_read_requests"
	case name == "list" || name == "aggregatedList" || name == "listManagedInstances":
		return "list_requests"
	case name == "get":
		return "read_requests"
	}
	return "default"
}
