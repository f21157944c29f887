package mcpserver

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"regexp"
	"strings"
	"unicode/utf16"

	"constellation/engine/plain"
)

// removed replaces a secret.
const removed = "(secret removed)"

// secretForms are texts that are secrets by their form, whatever contains them.
var secretForms = regexp.MustCompile(`(?s)` + strings.Join([]string{
	`-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\z)`,
	`\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*`, // JSON web token
	`\b[a-z0-9]{6}\.[a-z0-9]{16}\b`,                             // bootstrap token
	`LS0tLS1CRUdJTi[A-Za-z0-9+/=]{40,}`,                         // PEM as base64: certificates or keys
}, "|"))

// credentials are what precedes a secret: a user in an address, a header.
var credentials = regexp.MustCompile(`(?i)(://[^/\s:@"]+:)[^/\s@"]+@|\b((?:bearer|basic)\s+)[A-Za-z0-9._~+/=-]{8,}`)

// redactor removes secrets from answers.
type redactor struct{ known *strings.Replacer }

// minSecret is the minimum length of a credential that is removed wherever it occurs.
const minSecret = 6

func newRedactor(secrets []string) redactor {
	var pairs []string
	for _, s := range secrets {
		if s = strings.TrimSpace(s); len(s) < minSecret {
			continue
		}
		pairs = append(pairs, s, removed, base64.StdEncoding.EncodeToString([]byte(s)), removed)
		if b, err := base64.StdEncoding.DecodeString(s); err == nil && len(b) >= minSecret {
			pairs = append(pairs, strings.TrimSpace(string(b)), removed)
		}
	}
	return redactor{strings.NewReplacer(pairs...)}
}

// text removes secrets from a text.
func (r redactor) text(s string) string {
	s = secretForms.ReplaceAllString(r.known.Replace(s), removed)
	return credentials.ReplaceAllStringFunc(s, func(m string) string {
		if i := strings.Index(m, "://"); i >= 0 {
			return m[:strings.IndexByte(m[i+3:], ':')+i+4] + removed + "@"
		}
		return m[:strings.IndexAny(m, " \t\n")+1] + removed
	})
}

// encode returns v as JSON without secrets, without angle brackets and without characters that
// are not visible.
func (r redactor) encode(v any) (string, error) {
	b, err := json.Marshal(v)
	if err != nil {
		return "", fmt.Errorf("encode answer: %w", err)
	}
	d := json.NewDecoder(bytes.NewReader(b))
	d.UseNumber()
	var tree any
	if err := d.Decode(&tree); err != nil {
		return "", fmt.Errorf("encode answer: %w", err)
	}
	if b, err = json.Marshal(r.walk(tree)); err != nil { // escapes < and >
		return "", fmt.Errorf("encode answer: %w", err)
	}
	var out strings.Builder
	for _, c := range string(b) {
		switch {
		case c < 0x20 || !plain.Hidden(c): // Marshal has escaped control characters of ASCII
			out.WriteRune(c)
		case c > 0xffff:
			hi, lo := utf16.EncodeRune(c)
			fmt.Fprintf(&out, `\u%04x\u%04x`, hi, lo)
		default:
			fmt.Fprintf(&out, `\u%04x`, c)
		}
	}
	return out.String(), nil
}

// walk removes secrets from all texts of a value, names of fields included.
func (r redactor) walk(v any) any {
	switch v := v.(type) {
	case string:
		return r.text(v)
	case []any:
		for i := range v {
			v[i] = r.walk(v[i])
		}
	case map[string]any:
		out := make(map[string]any, len(v))
		for k, x := range v {
			out[r.text(k)] = r.walk(x)
		}
		return out
	}
	return v
}
