package tui

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"unicode/utf8"

	"constellation/engine"
	"constellation/engine/plan"
)

// jsonPrinter writes each event as one line of JSON: the -o json format is the event
// itself.
type jsonPrinter struct{ out io.Writer }

func (p jsonPrinter) event(ev plan.Event) {
	b, err := encode(ev, "")
	if err != nil { // only invalid JSON in Data can fail
		ev.Data = nil
		b, _ = encode(ev, "")
	}
	_, _ = p.out.Write(b)
}

func (p jsonPrinter) close() {}

// document writes the JSON document of a read-only verb.
func document(w io.Writer, v any) error {
	b, err := encode(v, "  ")
	if err != nil {
		return fmt.Errorf("encode output: %w", err)
	}
	_, err = w.Write(b)
	return err
}

// encode marshals v and appends a newline. Control characters that a terminal would
// interpret are written as JSON escapes, which every JSON parser decodes.
func encode(v any, indent string) ([]byte, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	e.SetIndent("", indent)
	if err := e.Encode(v); err != nil {
		return nil, err
	}
	return escapeHidden(b.Bytes()), nil
}

// escapeHidden writes as \uXXXX the characters that encoding/json leaves as they are but a
// terminal interprets, hides or stacks. Outside of strings JSON has only ASCII.
func escapeHidden(b []byte) []byte {
	var f engine.TextFilter
	found := false
	for i := 0; i < len(b) && !found; {
		r, n := utf8.DecodeRune(b[i:])
		found = !shownInJSON(&f, r)
		i += n
	}
	if !found {
		return b
	}
	f = engine.TextFilter{}
	var out bytes.Buffer
	for _, r := range string(b) {
		switch {
		case shownInJSON(&f, r):
			out.WriteRune(r)
		case r <= 0xffff:
			fmt.Fprintf(&out, `\u%04x`, r)
		default:
			r -= 0x10000
			fmt.Fprintf(&out, `\u%04x\u%04x`, 0xd800+(r>>10), 0xdc00+(r&0x3ff))
		}
	}
	return out.Bytes()
}

// shownInJSON is f.Shows, and true for newlines, which occur outside of strings only.
func shownInJSON(f *engine.TextFilter, r rune) bool {
	return f.Shows(r) || r == '\n'
}
