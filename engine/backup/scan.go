package backup

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
)

// ErrSyntax is wrapped if a list is not in the format of an API server.
var ErrSyntax = errors.New("not a list in JSON")

const (
	windowSize = 256 << 10
	// maxItem bounds one object: etcd takes 1.5 MiB, and JSON needs more for it.
	maxItem  = 64 << 20
	maxDepth = 10000 // like encoding/json
)

// Item is one object of a list, without the fields that an API server sets itself. It is valid
// until the next item is requested.
type Item struct {
	// JSON is the object on one line. It has apiVersion and kind if they were present.
	JSON []byte
	// Owners is metadata.ownerReferences, which is not in JSON; nil if there are none.
	Owners []byte
	// Namespace, Name and UID are the values of the metadata as JSON, quotes included; nil
	// if absent.
	Namespace, Name, UID []byte
	// Typed is whether the object has apiVersion and kind, which objects of built-in types in a
	// list lack.
	Typed bool
}

// Scanner splits a List into its objects as it arrives, without decoding it: memory is that of
// the largest object. It accepts the syntax of encoding/json.
type Scanner struct {
	r    io.Reader
	buf  []byte
	pos  int // the unread part of buf
	end  int // of what was read
	eof  bool
	err  error
	read int64

	state  int
	meta   []byte // of the list, raw
	out    []byte
	item   Item
	spaced bool // the skipped part had spaces
}

// States of a Scanner.
const (
	atStart = iota
	inItems
	afterItems
	atEnd
)

// NewScanner returns a scanner of the list that r gives.
func NewScanner(r io.Reader) *Scanner {
	return &Scanner{r: r, buf: make([]byte, windowSize)}
}

// Reset restarts with another list, and keeps the memory.
func (s *Scanner) Reset(r io.Reader) {
	*s = Scanner{r: r, buf: s.buf, out: s.out}
}

// Item returns the object that Next found.
func (s *Scanner) Item() *Item { return &s.item }

// Err returns why Next returned false: nil at the end of the list, the reader's error,
// [io.ErrUnexpectedEOF] if the list is truncated, or one that wraps [ErrSyntax].
func (s *Scanner) Err() error { return s.err }

// Read returns the number of bytes read.
func (s *Scanner) Read() int64 { return s.read }

// ListMeta is the metadata of a list.
type ListMeta struct {
	ResourceVersion    string `json:"resourceVersion"`
	Continue           string `json:"continue"`
	RemainingItemCount *int64 `json:"remainingItemCount"`
}

// Meta returns the metadata of the list. API servers send it before the items; it is
// complete when Next has returned false.
func (s *Scanner) Meta() (ListMeta, error) {
	var m ListMeta
	if len(s.meta) == 0 {
		return m, nil
	}
	if err := json.Unmarshal(s.meta, &m); err != nil {
		return m, fmt.Errorf("%w: its metadata: %w", ErrSyntax, err)
	}
	return m, nil
}

// errShort means that a value exceeds the bytes read so far.
var errShort = errors.New("short")

// Next goes to the next object, and reports whether there is one.
func (s *Scanner) Next() bool {
	if s.err != nil || s.state == atEnd {
		return false
	}
	if s.state == atStart && !s.head(true) {
		return false
	}
	if s.state == inItems {
		first := s.state == inItems && s.item.JSON == nil
		c, ok := s.peek()
		if !ok {
			return false
		}
		switch {
		case c == ']':
			s.pos++
			s.state = afterItems
		case !first && c != ',':
			return s.fail("an object is followed by %q", c)
		default:
			if !first {
				s.pos++
				if _, ok := s.peek(); !ok {
					return false
				}
			}
			return s.whole(s.cutItem)
		}
	}
	return s.state == afterItems && s.head(false) && false
}

func (s *Scanner) fail(format string, a ...any) bool {
	s.err = fmt.Errorf("%w: "+format, append([]any{ErrSyntax}, a...)...)
	return false
}

// fill reads more; false at the end or after an error.
func (s *Scanner) fill() bool {
	if s.eof {
		return false
	}
	if s.pos > 0 {
		s.end = copy(s.buf, s.buf[s.pos:s.end])
		s.pos = 0
	}
	if s.end == len(s.buf) {
		if len(s.buf) >= maxItem {
			return s.fail("an object has more than %d MiB", maxItem>>20)
		}
		s.buf = append(s.buf, make([]byte, len(s.buf))...)
	}
	for range 100 {
		n, err := s.r.Read(s.buf[s.end:])
		s.end += n
		s.read += int64(n)
		if err == io.EOF {
			s.eof = true
			return n > 0
		}
		if err != nil {
			s.err = err
			return false
		}
		if n > 0 {
			return true
		}
	}
	s.err = io.ErrNoProgress
	return false
}

// peek skips spaces and returns the byte that follows.
func (s *Scanner) peek() (byte, bool) {
	for {
		for s.pos < s.end {
			c := s.buf[s.pos]
			if c != ' ' && c != '\n' && c != '\t' && c != '\r' {
				return c, true
			}
			s.pos++
		}
		if !s.fill() {
			if s.err == nil {
				s.err = io.ErrUnexpectedEOF
			}
			return 0, false
		}
	}
}

// whole calls f with the bytes from s.pos on, and again with more while they are too few. f
// returns how many it consumed.
func (s *Scanner) whole(f func(b []byte) (int, error)) bool {
	for {
		n, err := f(s.buf[s.pos:s.end])
		if err == nil {
			s.pos += n
			return true
		}
		if !errors.Is(err, errShort) {
			s.err = err
			return false
		}
		// Each attempt gets twice as many bytes, so all attempts together cost as much as two.
		had := s.end - s.pos
		for s.end-s.pos < 2*had && s.fill() {
		}
		if s.err != nil {
			return false
		}
		if s.end-s.pos == had {
			s.err = io.ErrUnexpectedEOF
			return false
		}
	}
}

// head reads the members of the list, up to the items if begin is set, else those after them.
func (s *Scanner) head(begin bool) bool {
	c, ok := s.peek()
	if !ok {
		return false
	}
	if begin {
		if c != '{' {
			return s.fail("it begins with %q", c)
		}
		s.pos++
		if c, ok = s.peek(); !ok {
			return false
		}
	}
	for first := begin; c != '}'; first = false {
		if !first {
			if c != ',' {
				return s.fail("a member is followed by %q", c)
			}
			s.pos++
			if _, ok = s.peek(); !ok {
				return false
			}
		}
		key, c2, ok := s.key()
		if !ok {
			return false
		}
		if key == "items" {
			if !begin {
				return s.fail("it has items twice")
			}
			if c2 == '[' {
				s.pos++
				s.state = inItems
				return true
			}
		}
		if !s.member(key) {
			return false
		}
		if c, ok = s.peek(); !ok {
			return false
		}
	}
	s.pos++
	if s.onlySpace() && s.err == nil {
		s.state = atEnd
	}
	return false
}

// key reads the key of a member with its colon. It returns the key and the first byte of the
// value, which is next.
func (s *Scanner) key() (key string, value byte, ok bool) {
	if !s.whole(func(b []byte) (int, error) {
		n, err := skipString(b, 0)
		if err == nil {
			key = string(plainKey(b[:n]))
		}
		return n, err
	}) {
		return "", 0, false
	}
	c, ok := s.peek()
	if !ok {
		return "", 0, false
	}
	if c != ':' {
		return "", 0, s.fail("a key is followed by %q", c)
	}
	s.pos++
	value, ok = s.peek()
	return key, value, ok
}

// member reads the value of a member, and keeps that of the metadata.
func (s *Scanner) member(key string) bool {
	return s.whole(func(b []byte) (int, error) {
		n, err := s.skip(b, 0, 1)
		if err == nil && n == len(b) && !s.eof && b[0] != '{' && b[0] != '[' && b[0] != '"' {
			return 0, errShort // a number may continue
		}
		if err == nil && key == "metadata" {
			s.meta = append(s.meta[:0], b[:n]...)
		}
		if err == nil && key == "items" && string(b[:n]) != "null" {
			err = fmt.Errorf("%w: its items are not an array", ErrSyntax)
		}
		return n, err
	})
}

// onlySpace reports whether the rest of the document is white space.
func (s *Scanner) onlySpace() bool {
	for {
		for ; s.pos < s.end; s.pos++ {
			if c := s.buf[s.pos]; c != ' ' && c != '\n' && c != '\t' && c != '\r' {
				return s.fail("it is followed by %q", c)
			}
		}
		if !s.fill() {
			return true
		}
	}
}

// Fields that an API server sets itself and ignores at creation.
func serverSet(key []byte) bool {
	switch string(key) {
	case "resourceVersion", "managedFields", "creationTimestamp", "generation", "selfLink", "deletionTimestamp", "deletionGracePeriodSeconds":
		return true
	}
	return false
}

// cutItem decodes the object at the start of b into s.item.
func (s *Scanner) cutItem(b []byte) (int, error) {
	s.item = Item{}
	s.spaced = false
	out := append(s.out[:0], '{')
	var version, kind bool
	n, err := s.object(b, 0, 2, func(rawKey, key, value []byte) error {
		if len(out) > 1 {
			out = append(out, ',')
		}
		out = append(append(out, rawKey...), ':')
		switch string(key) {
		case "apiVersion":
			version = true
		case "kind":
			kind = true
		case "metadata":
			s.item.Owners, s.item.Namespace, s.item.Name, s.item.UID = nil, nil, nil, nil
			if value[0] == '{' {
				out = s.metadata(out, value)
				return nil
			}
		}
		out = append(out, value...)
		return nil
	})
	if err != nil {
		return 0, err
	}
	s.out = append(out, '}')
	if s.spaced {
		var c bytes.Buffer
		if err := json.Compact(&c, s.out); err != nil {
			return 0, fmt.Errorf("%w: %w", ErrSyntax, err)
		}
		s.out = c.Bytes()
	}
	s.item.JSON, s.item.Typed = s.out, version && kind
	return n, nil
}

// metadata appends the metadata of an object, which is valid JSON, without server-set fields
// and owners.
func (s *Scanner) metadata(out, b []byte) []byte {
	out = append(out, '{')
	first := true
	_, _ = s.object(b, 0, 3, func(rawKey, key, value []byte) error {
		switch string(key) {
		case "ownerReferences":
			s.item.Owners = nil
			if value[0] == '[' && !emptyArray(value) {
				s.item.Owners = value
			}
			return nil
		case "namespace":
			s.item.Namespace = value
		case "name":
			s.item.Name = value
		case "uid":
			s.item.UID = value
		default:
			if serverSet(key) {
				return nil
			}
		}
		if !first {
			out = append(out, ',')
		}
		first = false
		out = append(append(append(out, rawKey...), ':'), value...)
		return nil
	})
	return append(out, '}')
}

func emptyArray(b []byte) bool { return len(bytes.TrimLeft(b[1:], " \t\r\n")) == 1 }

// object parses the object at b[i:] and calls member for each member.
func (s *Scanner) object(b []byte, i, depth int, member func(rawKey, key, value []byte) error) (int, error) {
	if i >= len(b) {
		return 0, errShort
	}
	if b[i] != '{' {
		return 0, fmt.Errorf("%w: %q, want an object", ErrSyntax, b[i])
	}
	i, err := s.space(b, i+1)
	if err != nil {
		return 0, err
	}
	if b[i] == '}' {
		return i + 1, nil
	}
	for {
		k := i
		if i, err = skipString(b, i); err != nil {
			return 0, err
		}
		rawKey := b[k:i]
		if i, err = s.space(b, i); err != nil {
			return 0, err
		}
		if b[i] != ':' {
			return 0, fmt.Errorf("%w: a key is followed by %q", ErrSyntax, b[i])
		}
		if i, err = s.space(b, i+1); err != nil {
			return 0, err
		}
		v := i
		if i, err = s.skip(b, i, depth); err != nil {
			return 0, err
		}
		if member != nil {
			if err := member(rawKey, plainKey(rawKey), b[v:i]); err != nil {
				return 0, err
			}
		}
		if i, err = s.space(b, i); err != nil {
			return 0, err
		}
		if b[i] == '}' {
			return i + 1, nil
		}
		if b[i] != ',' {
			return 0, fmt.Errorf("%w: a member is followed by %q", ErrSyntax, b[i])
		}
		if i, err = s.space(b, i+1); err != nil {
			return 0, err
		}
	}
}

// plainKey is the key between quotes.
func plainKey(raw []byte) []byte {
	if bytes.IndexByte(raw, '\\') < 0 {
		return raw[1 : len(raw)-1]
	}
	var k string
	if json.Unmarshal(raw, &k) != nil {
		return raw
	}
	return []byte(k)
}

// space returns the end of the spaces at i, followed by a byte.
func (s *Scanner) space(b []byte, i int) (int, error) {
	for j := i; j < len(b); j++ {
		if c := b[j]; c != ' ' && c != '\n' && c != '\t' && c != '\r' {
			if j > i {
				s.spaced = true
			}
			return j, nil
		}
	}
	return 0, errShort
}

// skip returns the end of the value at i.
func (s *Scanner) skip(b []byte, i, depth int) (int, error) {
	if i >= len(b) {
		return 0, errShort
	}
	if depth > maxDepth {
		return 0, fmt.Errorf("%w: more than %d levels", ErrSyntax, maxDepth)
	}
	switch c := b[i]; {
	case c == '"':
		return skipString(b, i)
	case c == '{':
		return s.object(b, i, depth+1, nil)
	case c == '[':
		i, err := s.space(b, i+1)
		if err != nil {
			return 0, err
		}
		if b[i] == ']' {
			return i + 1, nil
		}
		for {
			if i, err = s.skip(b, i, depth+1); err != nil {
				return 0, err
			}
			if i, err = s.space(b, i); err != nil {
				return 0, err
			}
			if b[i] == ']' {
				return i + 1, nil
			}
			if b[i] != ',' {
				return 0, fmt.Errorf("%w: an element is followed by %q", ErrSyntax, b[i])
			}
			if i, err = s.space(b, i+1); err != nil {
				return 0, err
			}
		}
	case c == '-' || c >= '0' && c <= '9':
		return skipNumber(b, i)
	case c == 't':
		return skipWord(b, i, "true")
	case c == 'f':
		return skipWord(b, i, "false")
	case c == 'n':
		return skipWord(b, i, "null")
	default:
		return 0, fmt.Errorf("%w: %q, want a value", ErrSyntax, c)
	}
}

func skipWord(b []byte, i int, word string) (int, error) {
	n := min(len(word), len(b)-i)
	if string(b[i:i+n]) != word[:n] {
		return 0, fmt.Errorf("%w: %q, want a value", ErrSyntax, b[i:i+n])
	}
	if n < len(word) {
		return 0, errShort
	}
	return i + n, nil
}

// skipString returns the end of the string at i.
func skipString(b []byte, i int) (int, error) {
	if i >= len(b) {
		return 0, errShort
	}
	if b[i] != '"' {
		return 0, fmt.Errorf("%w: %q, want a string", ErrSyntax, b[i])
	}
	for i++; ; {
		// Eight bytes at a time: a high bit is set for a quote, a backslash or a control character.
		for i+8 <= len(b) {
			w := uint64(b[i]) | uint64(b[i+1])<<8 | uint64(b[i+2])<<16 | uint64(b[i+3])<<24 |
				uint64(b[i+4])<<32 | uint64(b[i+5])<<40 | uint64(b[i+6])<<48 | uint64(b[i+7])<<56
			const ones, high = 0x0101010101010101, 0x8080808080808080
			q, e := w^(ones*'"'), w^(ones*'\\')
			if ((q-ones)&^q|(e-ones)&^e|(w-ones*0x20)&^w)&high != 0 {
				break
			}
			i += 8
		}
		for end := min(i+8, len(b)); i < end; i++ {
			switch c := b[i]; {
			case c == '"':
				return i + 1, nil
			case c == '\\':
				n, err := skipEscape(b, i)
				if err != nil {
					return 0, err
				}
				i = n - 1
			case c < 0x20:
				return 0, fmt.Errorf("%w: control character %q in a string", ErrSyntax, c)
			}
		}
		if i >= len(b) {
			return 0, errShort
		}
	}
}

func skipEscape(b []byte, i int) (int, error) {
	if i+1 >= len(b) {
		return 0, errShort
	}
	switch b[i+1] {
	case '"', '\\', '/', 'b', 'f', 'n', 'r', 't':
		return i + 2, nil
	case 'u':
		for j := i + 2; j < i+6; j++ {
			if j >= len(b) {
				return 0, errShort
			}
			if c := b[j]; (c < '0' || c > '9') && (c < 'a' || c > 'f') && (c < 'A' || c > 'F') {
				return 0, fmt.Errorf("%w: %q in an escape", ErrSyntax, c)
			}
		}
		return i + 6, nil
	}
	return 0, fmt.Errorf("%w: escape of %q", ErrSyntax, b[i+1])
}

// skipNumber returns the end of the number at i. A number at the end of b may continue, which
// its caller must handle; inside objects and arrays it cannot.
func skipNumber(b []byte, i int) (int, error) {
	digits := func() error {
		from := i
		for i < len(b) && b[i] >= '0' && b[i] <= '9' {
			i++
		}
		if i == from {
			if i == len(b) {
				return errShort
			}
			return fmt.Errorf("%w: %q in a number", ErrSyntax, b[i])
		}
		return nil
	}
	if b[i] == '-' {
		i++
	}
	if i < len(b) && b[i] == '0' {
		i++
	} else if err := digits(); err != nil {
		return 0, err
	}
	if i < len(b) && b[i] == '.' {
		i++
		if err := digits(); err != nil {
			return 0, err
		}
	}
	if i < len(b) && (b[i] == 'e' || b[i] == 'E') {
		i++
		if i < len(b) && (b[i] == '+' || b[i] == '-') {
			i++
		}
		if err := digits(); err != nil {
			return 0, err
		}
	}
	return i, nil
}
