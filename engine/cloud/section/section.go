// Package section describes the section that a provider has in a file: in
// constellation-conf.yaml below provider, in constellation-state.yaml below
// infrastructure. A provider declares a [Schema]. Package workspace reads and writes
// sections by it, so that errors have a line and a remedy for every provider alike.
package section

import (
	"fmt"
	"slices"
	"strings"
)

// Kind is the type of a field.
type Kind int

// Kinds of fields, with the types of their values.
const (
	Text  Kind = iota // string
	Bool              // bool
	Int               // int
	List              // []string
	Table             // []Values, with the fields of Field.Columns
	Map               // Values, with the fields of Field.Columns
)

// Field is one field of a section.
type Field struct {
	Name string
	Kind Kind
	// Required fields must be in the file. Others are written only if they are not zero.
	Required bool
	// Identity marks a field that configuration and state must have in common: a state
	// with another value is of other machines.
	Identity bool
	// Unique marks a column of a Table: no two rows have the same text.
	Unique bool
	// Columns are the fields of each row of a Table, or those of a Map.
	Columns Schema
	// Valid reports whether a text, or an entry of a list, is valid; nil accepts all.
	Valid func(string) bool
	// Problem and Remedy complete the error about a text that is not valid:
	// `"A b" cannot name a sandbox`.
	Problem, Remedy string
	// Lowest and Highest bound an Int.
	Lowest, Highest int
	// Ask is the title of a Text or List that the console asks for when it sets up a workspace; empty: it does
	// not. Hint is an example, and Help a line about it.
	Ask, Hint, Help string
}

// Schema lists the fields of a section in the order in which they are written.
type Schema []Field

// Required reports whether a file must have the section.
func (s Schema) Required() bool {
	return slices.ContainsFunc(s, func(f Field) bool { return f.Required })
}

// Values are the fields of a section that a file has, by name. The types follow
// from the kinds.
type Values map[string]any

// Text returns a text; empty if the field is absent.
func (v Values) Text(name string) string { s, _ := v[name].(string); return s }

// Bool returns a boolean; false if the field is absent.
func (v Values) Bool(name string) bool { b, _ := v[name].(bool); return b }

// Int returns a number; zero if the field is absent.
func (v Values) Int(name string) int { i, _ := v[name].(int); return i }

// List returns a list of texts; nil if the field is absent.
func (v Values) List(name string) []string { l, _ := v[name].([]string); return l }

// Table returns the rows of a table; nil if the field is absent.
func (v Values) Table(name string) []Values { t, _ := v[name].([]Values); return t }

// Map returns a map; nil if the field is absent.
func (v Values) Map(name string) Values { m, _ := v[name].(Values); return m }

// Zero reports whether a field is absent or has the zero value of its type.
func (v Values) Zero(name string) bool {
	switch x := v[name].(type) {
	case nil:
		return true
	case string:
		return x == ""
	case bool:
		return !x
	case int:
		return x == 0
	case []string:
		return len(x) == 0
	case []Values:
		return len(x) == 0
	case Values:
		return len(x) == 0
	}
	return false
}

// Expand replaces {field} in a text by the value of the field.
func (v Values) Expand(text string) string {
	if !strings.Contains(text, "{") {
		return text
	}
	var pairs []string
	for name, value := range v {
		pairs = append(pairs, "{"+name+"}", fmt.Sprint(value))
	}
	return strings.NewReplacer(pairs...).Replace(text)
}

// Differs returns the first identity field of the schemas of configuration and state in
// which the two sections differ; empty if they are of the same machines.
func Differs(config, state Schema, c, s Values) string {
	for _, f := range config {
		if f.Identity && slices.ContainsFunc(state, func(x Field) bool { return x.Name == f.Name && x.Identity }) && fmt.Sprint(c[f.Name]) != fmt.Sprint(s[f.Name]) {
			return f.Name
		}
	}
	return ""
}
