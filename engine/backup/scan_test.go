package backup

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"reflect"
	"strings"
	"testing"
	"testing/iotest"
)

// decoded is a list as decoded by encoding/json, the reference.
type decoded struct {
	meta  ListMeta
	items []cut
}

type cut struct {
	object any    // without removed fields
	owners any    // nil without owners
	uid    string // as JSON
	typed  bool
}

// reference decodes a list, and reports whether it is valid.
func reference(b []byte) (decoded, bool) {
	var out decoded
	var members map[string]json.RawMessage
	trimmed := bytes.TrimLeft(b, " \t\r\n")
	if len(trimmed) == 0 || trimmed[0] != '{' || json.Unmarshal(b, &members) != nil {
		return out, false
	}
	if m := members["metadata"]; m != nil && json.Unmarshal(m, &out.meta) != nil {
		return out, false
	}
	items := members["items"]
	if items == nil || string(items) == "null" {
		return out, true
	}
	var raw []json.RawMessage
	if json.Unmarshal(items, &raw) != nil {
		return out, false
	}
	for _, r := range raw {
		var o map[string]json.RawMessage
		if len(r) == 0 || r[0] != '{' || json.Unmarshal(r, &o) != nil {
			return out, false
		}
		c := cut{typed: o["apiVersion"] != nil && o["kind"] != nil}
		var m map[string]json.RawMessage
		if len(o["metadata"]) > 0 && o["metadata"][0] == '{' && json.Unmarshal(o["metadata"], &m) == nil {
			var owners []any
			if json.Unmarshal(m["ownerReferences"], &owners) == nil && len(owners) > 0 {
				c.owners = owners
			}
			c.uid = string(m["uid"])
			for k := range m {
				if serverSet([]byte(k)) || k == "ownerReferences" {
					delete(m, k)
				}
			}
			o["metadata"], _ = json.Marshal(m)
		}
		whole, _ := json.Marshal(o)
		_ = json.Unmarshal(whole, &c.object)
		out.items = append(out.items, c)
	}
	return out, true
}

// scanned is a list as decoded by the scanner.
func scanned(t *testing.T, r io.Reader) (decoded, error) {
	t.Helper()
	var out decoded
	s := NewScanner(r)
	for s.Next() {
		i := s.Item()
		if bytes.ContainsAny(i.JSON, "\n\r") {
			t.Errorf("an object is on more than one line: %q", i.JSON)
		}
		c := cut{typed: i.Typed}
		if err := json.Unmarshal(i.JSON, &c.object); err != nil {
			t.Fatalf("%v: %q", err, i.JSON)
		}
		if i.Owners != nil {
			if err := json.Unmarshal(i.Owners, &c.owners); err != nil {
				t.Fatalf("%v: %q", err, i.Owners)
			}
		}
		c.uid = string(i.UID)
		out.items = append(out.items, c)
	}
	if s.Err() != nil {
		return out, s.Err()
	}
	var err error
	out.meta, err = s.Meta()
	return out, err
}

// repeated reports whether an object in b has a key twice, of which encoding/json takes the
// last, or two keys that differ in case only.
func repeated(b []byte) bool {
	if !json.Valid(b) {
		return false
	}
	d := json.NewDecoder(bytes.NewReader(b))
	var walk func() bool
	walk = func() bool {
		t, err := d.Token()
		if err != nil {
			return false
		}
		switch t {
		case json.Delim('{'):
			seen := map[string]bool{}
			for d.More() {
				k, err := d.Token()
				if err != nil {
					return false
				}
				key := strings.ToLower(fmt.Sprint(k))
				if seen[key] || walk() {
					return true
				}
				seen[key] = true
			}
			d.Token()
		case json.Delim('['):
			for d.More() {
				if walk() {
					return true
				}
			}
			d.Token()
		}
		return false
	}
	return walk()
}

func compare(t *testing.T, b []byte) {
	t.Helper()
	if repeated(b) {
		return
	}
	want, ok := reference(b)
	for name, r := range map[string]io.Reader{"at once": bytes.NewReader(b), "byte by byte": iotest.OneByteReader(bytes.NewReader(b))} {
		got, err := scanned(t, r)
		if (err == nil) != ok {
			t.Fatalf("%s: %q: error %v, encoding/json accepts it: %t", name, b, err, ok)
		}
		if err == nil && !reflect.DeepEqual(got, want) {
			t.Fatalf("%s: %q:\n got %+v\nwant %+v", name, b, got, want)
		}
		if err != nil && !errors.Is(err, ErrSyntax) && !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Fatalf("%s: %q: %v", name, b, err)
		}
	}
}

var lists = []string{
	`{"kind":"WidgetList","apiVersion":"example.com/v1","metadata":{"resourceVersion":"12","continue":"abc","remainingItemCount":3},"items":[{"apiVersion":"example.com/v1","kind":"Widget","metadata":{"name":"a","namespace":"n","uid":"u1","resourceVersion":"5","generation":2,"creationTimestamp":"2026-11-21T07:05:01Z","managedFields":[{"manager":"x","fieldsV1":{"f:spec":{}}}],"selfLink":"/x","deletionTimestamp":null,"deletionGracePeriodSeconds":0,"labels":{"a":"b"},"finalizers":["f"]},"spec":{"x":1.5e-3,"resourceVersion":"kept","s":"q\"\\\u00e9\n"},"status":{"ok":true}},{"metadata":{"name":"b","ownerReferences":[{"apiVersion":"v1","kind":"X","name":"a","uid":"u1"}]},"data":null}]}`,
	`{"items":null}`, `{"items":[]}`, `{"items":[{}]}`, `{}`, ` { "items" : [ { "metadata" : { } } , {"a" : [ 1 , 2 ] } ] , "metadata" : { "continue" : "x" } } `,
	`{"items":[{"metadata":{"ownerReferences":[]}},{"metadata":{"ownerReferences":[ ]}},{"metadata":{"ownerReferences":null}},{"metadata":null},{"metadata":[1]}]}`,
	`{"items":[{"meta\u0064ata":{"uid":"x","generatio\u006e":1,"ownerReferences":[1]}}]}`,
	`{"items":{}}`, `{"items":[1]}`, `{"items":[{}`, `{"items":[{},]}`, `{"items":[,{}]}`, `{"items":[{} {}]}`, `{"items":[{}]}x`, `[]`, ``, `null`, `{"items":[{}]`, `{"a":01}`, `{"a":-}`, `{"a":1.}`, `{"a":1e}`, `{"a":tru}`,
	`{"a":"\x"}`, `{"a":"\u12g4"}`, "{\"a\":\"\x01\"}", "{\"a\":\"12345678\x01\"}", `{"a":"` + strings.Repeat("é\\n", 40) + `"}`, `{"a" 1}`, `{a:1}`, `{"a":1,}`, `{"a":[1,]}`, `{"a":{"b":1,}}`, `{"metadata":{"continue":1}}`, `{"metadata":3}`,
	`{"a":1`, `{"a":12345`, `{"a":"x`, `{"a":nul`, `{"a":-0.0e+10,"items":[{"b":-0}]}`, `{"a":` + strings.Repeat("[", 50) + strings.Repeat("]", 50) + `}`,
}

func TestScannerMatchesEncodingJSON(t *testing.T) {
	for _, l := range lists {
		compare(t, []byte(l))
	}
	// Every prefix of the first list, and every changed byte.
	for i := range lists[0] {
		compare(t, []byte(lists[0][:i]))
		b := []byte(lists[0])
		b[i] ^= 1 << (i % 7)
		compare(t, b)
	}
}

func TestScannerAcceptsObjectsLargerThanItsWindow(t *testing.T) {
	var b bytes.Buffer
	b.WriteString(`{"items":[`)
	for i, n := range []int{10, windowSize, 3 * windowSize, 10, windowSize - 20} {
		if i > 0 {
			b.WriteByte(',')
		}
		fmt.Fprintf(&b, `{"metadata":{"generation":1,"uid":"%d"},"x":"%s"}`, i, strings.Repeat("y", n))
	}
	b.WriteString(`]}`)
	compare(t, b.Bytes())
}

func TestScannerReturnsReaderErrors(t *testing.T) {
	want := errors.New("connection lost")
	for i := range lists[0] {
		_, err := scanned(t, io.MultiReader(strings.NewReader(lists[0][:i]), iotest.ErrReader(want)))
		if !errors.Is(err, want) {
			t.Fatalf("after %d bytes: %v", i, err)
		}
	}
}

func FuzzScanner(f *testing.F) {
	for _, l := range lists {
		f.Add([]byte(l))
	}
	f.Fuzz(func(t *testing.T, b []byte) { compare(t, b) })
}

func BenchmarkScanner(b *testing.B) {
	var list bytes.Buffer
	list.WriteString(`{"kind":"WidgetList","apiVersion":"example.com/v1","metadata":{"resourceVersion":"12"},"items":[`)
	for i := range 2000 {
		if i > 0 {
			list.WriteByte(',')
		}
		fmt.Fprintf(&list, `{"apiVersion":"example.com/v1","kind":"Widget","metadata":{"name":"widget-%d","namespace":"shop","uid":"%036d","resourceVersion":"5","generation":2,"creationTimestamp":"2026-11-21T07:05:01Z"},"spec":{"replicas":3,"payload":"%s"},"status":{"ready":true}}`, i, i, strings.Repeat("0123456789abcdef", 80))
	}
	list.WriteString(`]}`)
	b.SetBytes(int64(list.Len()))
	b.ReportAllocs()
	r := bytes.NewReader(nil)
	s := NewScanner(r)
	for b.Loop() {
		r.Reset(list.Bytes())
		s.Reset(r)
		n := 0
		for s.Next() {
			n++
		}
		if s.Err() != nil || n != 2000 {
			b.Fatal(n, s.Err())
		}
	}
}
