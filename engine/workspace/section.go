package workspace

import (
	"fmt"
	"strings"

	"gopkg.in/yaml.v3"

	"constellation/engine/cloud/section"
)

// section reads the section of a provider. The result is never nil.
func (r *reader) section(n *yaml.Node, path string, schema section.Schema) section.Values {
	out := section.Values{}
	fields := map[string]field{}
	var required []string
	for _, f := range schema {
		if f.Required {
			required = append(required, f.Name)
		}
		fields[f.Name] = func(n *yaml.Node, path string) {
			valid := f.Valid
			if valid == nil {
				valid = func(string) bool { return true }
			}
			switch f.Kind {
			case section.Bool:
				var v bool
				r.boolean(&v)(n, path)
				out[f.Name] = v
			case section.Int:
				var v int
				r.integer(&v, f.Lowest, f.Highest)(n, path)
				out[f.Name] = v
			case section.List:
				var v []string
				r.list(&v, valid, f.Problem)(n, path)
				out[f.Name] = v
			case section.Table:
				out[f.Name] = r.table(n, path, f.Columns)
			case section.Map:
				out[f.Name] = r.section(n, path, f.Columns)
			default:
				var v string
				r.str(&v, valid, f.Problem, f.Remedy)(n, path)
				out[f.Name] = v
			}
		}
	}
	if n = resolve(n); n.Kind == yaml.ScalarNode && n.Tag == "!!null" && len(required) == 0 {
		return out // a provider without required fields may be named alone
	}
	r.mapping(n, path, fields, required...)
	return out
}

// table reads the rows of a table.
func (r *reader) table(n *yaml.Node, path string, columns section.Schema) (rows []section.Values) {
	if n = resolve(n); n.Kind != yaml.SequenceNode {
		r.bad(n, path, "is "+kindOf(n)+", want a list", "begin each entry with a dash")
		return nil
	}
	seen := map[[2]string]bool{}
	for i, item := range n.Content {
		at := fmt.Sprintf("%s[%d]", path, i)
		row := r.section(item, at, columns)
		for _, c := range columns {
			key := [2]string{c.Name, row.Text(c.Name)}
			if c.Unique && key[1] != "" && seen[key] {
				r.bad(item, at+"."+c.Name, fmt.Sprintf("%q occurs twice", key[1]), "remove one of the entries")
			}
			seen[key] = true
		}
		rows = append(rows, row)
	}
	return rows
}

// sectionNode returns a section as YAML, in the order of its schema. Fields that are not
// required are left out if they are zero.
func sectionNode(schema section.Schema, values section.Values) (*yaml.Node, error) {
	out := &yaml.Node{Kind: yaml.MappingNode}
	for _, f := range schema {
		if !f.Required && values.Zero(f.Name) {
			continue
		}
		value := &yaml.Node{}
		switch f.Kind {
		case section.Map:
			n, err := sectionNode(f.Columns, values.Map(f.Name))
			if err != nil {
				return nil, err
			}
			value = n
		case section.Table:
			value.Kind = yaml.SequenceNode
			for _, row := range values.Table(f.Name) {
				n, err := sectionNode(f.Columns, row)
				if err != nil {
					return nil, err
				}
				value.Content = append(value.Content, n)
			}
		default:
			if err := value.Encode(values[f.Name]); err != nil {
				return nil, fmt.Errorf("write field %s: %w", f.Name, err)
			}
		}
		out.Content = append(out.Content, &yaml.Node{Kind: yaml.ScalarNode, Value: f.Name}, value)
	}
	if len(out.Content) == 0 {
		out.Style = yaml.FlowStyle
	}
	return out, nil
}

// sectionText returns a section of a configuration below the name of its provider.
func sectionText(name string, schema section.Schema, values section.Values) (string, error) {
	n, err := sectionNode(schema, values)
	if err != nil {
		return "", err
	}
	var b strings.Builder
	e := yaml.NewEncoder(&b)
	e.SetIndent(2)
	if err := e.Encode(map[string]*yaml.Node{name: n}); err != nil {
		return "", err
	}
	return "  " + strings.ReplaceAll(strings.TrimSpace(b.String()), "\n", "\n  "), e.Close()
}
