package gcptest

import (
	"encoding/json"
	"fmt"
	"regexp"
	"strconv"
	"strings"
)

var (
	termRule = regexp.MustCompile(`^([A-Za-z][-A-Za-z0-9_.]*) *(=|!=|:) *(\*|"(?:[^"\\]|\\.)*"|[^\s()"]+)$`)
	orRule   = regexp.MustCompile(`\s+OR\s+`)
	andRule  = regexp.MustCompile(`\s+AND\s+|\)\s*\(`)
)

// parseFilter returns what a filter matches. It has the part of the language that the provider uses:
// comparisons joined by OR, or by AND.
func parseFilter(text string) (match func(v any) bool, err error) {
	if text == "" {
		return func(any) bool { return true }, nil
	}
	or := orRule.Split(text, -1)
	parts, all := or, false
	if len(or) == 1 {
		parts, all = andRule.Split(text, -1), true
	}
	var terms []func(any) bool
	for _, p := range parts {
		p = strings.Trim(strings.TrimSpace(p), "()")
		m := termRule.FindStringSubmatch(p)
		if m == nil {
			return nil, fmt.Errorf("%q is no comparison", p)
		}
		want := m[3]
		if strings.HasPrefix(want, `"`) {
			if want, err = strconv.Unquote(want); err != nil {
				return nil, err
			}
		}
		terms = append(terms, func(v any) bool {
			is, has := field(v, strings.Split(m[1], "."))
			switch {
			case m[2] == ":" && m[3] == "*":
				return has
			case m[2] == "!=":
				return is != want
			}
			return has && is == want
		})
	}
	return func(v any) bool {
		for _, t := range terms {
			if t(v) != all {
				return !all
			}
		}
		return all
	}, nil
}

// field returns the text of a nested field.
func field(v any, path []string) (string, bool) {
	for _, name := range path {
		fields, ok := v.(map[string]any)
		if !ok {
			return "", false
		}
		if v, ok = fields[name]; !ok {
			return "", false
		}
	}
	return fmt.Sprint(v), true
}

// mask applies the parameter fields to an answer. The schema must have each field.
func (d *document) mask(id, fields string, body []byte) ([]byte, error) {
	v, err := decode(body)
	if err != nil {
		return nil, err
	}
	m := d.methods[id]
	if m == nil || m.Response == nil {
		return nil, fmt.Errorf("the API has no method %s", id)
	}
	v, rest, err := d.keep(m.Response, v, fields)
	if err != nil {
		return nil, err
	}
	if rest != "" {
		return nil, fmt.Errorf("fields %q: %q is left", fields, rest)
	}
	return json.Marshal(v)
}

var fieldRule = regexp.MustCompile(`^[A-Za-z][A-Za-z0-9]*`)

// keep returns the part of v that a list of fields selects, and the text after the list.
func (d *document) keep(s *schema, v any, fields string) (out any, rest string, err error) {
	s = d.resolve(s)
	if s != nil && s.Type == "array" {
		items, _ := v.([]any)
		kept := make([]any, 0, len(items))
		for _, x := range items {
			k, _, err := d.keep(s.Items, x, fields)
			if err != nil {
				return nil, "", err
			}
			kept = append(kept, k)
		}
		_, rest, err = d.keep(s.Items, map[string]any{}, fields)
		return kept, rest, err
	}
	have, _ := v.(map[string]any)
	kept := map[string]any{}
	for {
		name := fieldRule.FindString(fields)
		if s == nil || s.Properties[name] == nil {
			return nil, "", fmt.Errorf("invalid field selection %q", fields)
		}
		fields = fields[len(name):]
		x, has := have[name]
		if strings.HasPrefix(fields, "(") {
			if x, fields, err = d.keep(s.Properties[name], x, fields[1:]); err != nil {
				return nil, "", err
			}
			if !strings.HasPrefix(fields, ")") {
				return nil, "", fmt.Errorf("a parenthesis is not closed at %q", fields)
			}
			fields = fields[1:]
		}
		if has {
			kept[name] = x
		}
		if !strings.HasPrefix(fields, ",") {
			return kept, fields, nil
		}
		fields = fields[1:]
	}
}
