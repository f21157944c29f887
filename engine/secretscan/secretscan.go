// Package secretscan answers: which bytes of a text or a file are secrets?
//
// A [Scanner] finds two kinds. Secrets whose values it was given are found verbatim and in the forms in which programs write
// bytes: base64 at each alignment, hex, lists of decimal numbers, escapes of URLs and of JSON. Secrets of a known form are found whatever
// their value is: private keys, tokens, passwords in addresses. The package reads no files, and its results name the kind
// of a secret and never its value.
package secretscan

import (
	"bytes"
	"cmp"
	"crypto"
	"crypto/x509"
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"net/url"
	"slices"
	"strings"
	"unicode/utf8"
)

// Secret is a value that must not be found.
type Secret struct {
	// Kind names it in results, such as "init secret".
	Kind  string
	Value []byte
}

// MinLength is the length of the shortest secret, in bytes, that is searched for by its value. Shorter ones would be found by chance.
const MinLength = 8

// The kinds of secrets that are found by their form.
const (
	PrivateKey     = "private key"
	WebToken       = "JSON web token"
	BootstrapToken = "bootstrap token"
	AgeIdentity    = "age identity"
	Authorization  = "authorization header"
	URLPassword    = "password in an address"
	Password       = "password or token"
	CloudKey       = "key of a cloud or forge"
)

// needle is one form of a secret.
type needle struct {
	text []byte
	kind string
	// more reports whether a byte beside the needle is part of the same encoded value.
	more func(byte) bool
}

// Scanner finds secrets. It is safe for concurrent use.
type Scanner struct {
	needles map[uint64][]needle // by their first eight bytes
	filter  [1 << 10]uint64     // a bit for each hash of such bytes
	longest int
}

// New returns a scanner for secrets, and for secrets of known forms. Secrets shorter than MinLength are left out.
func New(secrets []Secret) *Scanner {
	s := &Scanner{needles: map[uint64][]needle{}}
	for _, x := range secrets {
		s.add(x.Kind, x.Value)
		s.add(x.Kind, bytes.TrimSpace(x.Value))
		var public []byte
		if block, _ := pem.Decode(x.Value); block != nil {
			s.add(x.Kind, block.Bytes)
			public = publicPart(block.Bytes)
		}
		for line := range bytes.Lines(x.Value) {
			line = bytes.TrimSpace(line)
			if len(line) < 24 || len(line) >= len(x.Value)-2 || bytes.HasPrefix(line, []byte("-----")) {
				continue
			}
			if raw, err := base64.StdEncoding.DecodeString(string(line)); err != nil || !bytes.Contains(public, raw) {
				s.add(x.Kind, line) // a file that was cut has lines of a key
			}
		}
	}
	for _, form := range []struct{ kind, text string }{{PrivateKey, " PRIVATE KEY-----"}, {AgeIdentity, "AGE-SECRET-KEY-1"}} {
		for _, b := range base64Forms([]byte(form.text)) {
			s.put(needle{b, form.kind, isBase64})
		}
	}
	return s
}

// publicPart returns the public key of a private one; nil if it is of another kind. The encoding of the private key contains it, and
// certificates do, too.
func publicPart(der []byte) []byte {
	var key any
	for _, parse := range []func([]byte) (any, error){
		x509.ParsePKCS8PrivateKey,
		func(b []byte) (any, error) { return x509.ParseECPrivateKey(b) },
		func(b []byte) (any, error) { return x509.ParsePKCS1PrivateKey(b) },
	} {
		if k, err := parse(der); err == nil {
			key = k
			break
		}
	}
	signer, ok := key.(crypto.Signer)
	if !ok {
		return nil
	}
	public, err := x509.MarshalPKIXPublicKey(signer.Public())
	if err != nil {
		return nil
	}
	return public
}

// add adds the forms of a value.
func (s *Scanner) add(kind string, value []byte) {
	if len(value) < MinLength {
		return
	}
	put := func(b []byte, more func(byte) bool) { s.put(needle{b, kind, more}) }
	put(value, nil)
	lower, upper := hex.EncodeToString(value), strings.ToUpper(hex.EncodeToString(value))
	std := base64.StdEncoding.EncodeToString(value)
	put([]byte(lower), isHex)
	put([]byte(upper), isHex)
	for _, b := range base64Forms(value) {
		put(b, isBase64)
	}
	for _, text := range []string{lower, std} { // a Secret or an annotation that has the text
		for _, b := range base64Forms([]byte(text)) {
			put(b, isBase64)
		}
	}
	for _, separator := range []string{" ", ",", ", "} { // fmt.Print and JSON of bytes
		numbers := make([]string, len(value))
		for i, c := range value {
			numbers[i] = fmt.Sprint(c)
		}
		put([]byte(strings.Join(numbers, separator)), nil)
	}
	for _, text := range []string{string(value), std} {
		for _, escaped := range []string{url.QueryEscape(text), url.PathEscape(text)} {
			put([]byte(escaped), nil)
			put([]byte(lowerEscapes(escaped)), nil)
		}
	}
	if utf8.Valid(value) {
		once := escapeJSON(string(value))
		put([]byte(once), nil)
		put([]byte(escapeJSON(once)), nil)
		put(bytes.ReplaceAll(value, []byte("\n"), []byte("\r\n")), nil)
	}
}

func escapeJSON(s string) string {
	b, err := json.Marshal(s)
	if err != nil {
		return s // a string can be marshalled
	}
	return string(b[1 : len(b)-1])
}

// lowerEscapes writes %2F as %2f.
func lowerEscapes(s string) string {
	b := []byte(s)
	for i := 0; i+2 < len(b); i++ {
		if b[i] == '%' {
			copy(b[i+1:i+3], bytes.ToLower(b[i+1:i+3]))
		}
	}
	return string(b)
}

// base64Forms returns the characters of base64 that are the same whatever surrounds the value, for each of its three alignments and
// both alphabets.
func base64Forms(value []byte) (out [][]byte) {
	for _, e := range []*base64.Encoding{base64.RawStdEncoding, base64.RawURLEncoding} {
		for before := range 3 {
			padded := append(make([]byte, before), value...)
			text := e.EncodeToString(padded)
			first := []int{0, 2, 3}[before]
			last := len(padded) * 8 / 6 // the next character has bits of what follows
			if last-first >= MinLength {
				out = append(out, []byte(text[first:last]))
			}
		}
	}
	return out
}

func isBase64(c byte) bool {
	return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || strings.IndexByte("+/=-_", c) >= 0
}

func isHex(c byte) bool {
	return c >= 'a' && c <= 'f' || c >= 'A' && c <= 'F' || c >= '0' && c <= '9'
}

func (s *Scanner) put(n needle) {
	if len(n.text) < MinLength {
		return
	}
	key := binary.LittleEndian.Uint64(n.text)
	if slices.ContainsFunc(s.needles[key], func(o needle) bool { return bytes.Equal(o.text, n.text) }) {
		return
	}
	s.needles[key] = append(s.needles[key], n)
	slices.SortStableFunc(s.needles[key], func(a, b needle) int { return cmp.Compare(len(b.text), len(a.text)) })
	h := hash(key)
	s.filter[h>>6] |= 1 << (h & 63)
	s.longest = max(s.longest, len(n.text))
}

func hash(key uint64) uint64 { return key * 0x9e3779b97f4a7c15 >> 48 }

// span is a place of a text that has a secret.
type span struct {
	kind     string
	from, to int
}

// known returns the places of needles, in order. They do not overlap.
func (s *Scanner) known(b []byte) (out []span) {
	for i := 0; i+MinLength <= len(b); i++ {
		key := binary.LittleEndian.Uint64(b[i:])
		if h := hash(key); s.filter[h>>6]&(1<<(h&63)) == 0 {
			continue
		}
		for _, n := range s.needles[key] {
			if !bytes.HasPrefix(b[i:], n.text) {
				continue
			}
			x := span{n.kind, i, i + len(n.text)}
			if n.more != nil {
				least := 0
				if len(out) > 0 {
					least = out[len(out)-1].to
				}
				for x.from > least && n.more(b[x.from-1]) {
					x.from--
				}
				for x.to < len(b) && n.more(b[x.to]) {
					x.to++
				}
			}
			out = append(out, x)
			i = x.to - 1
			break
		}
	}
	return out
}

// Redact returns b without secrets, and the number of replaced ones by kind. The text in their place names the kind. b is not
// changed. What Redact returns has no secrets that it would find.
func (s *Scanner) Redact(b []byte) ([]byte, map[string]int) {
	counts := map[string]int{}
	for range 4 { // text around a secret can become one only by its removal; this is the limit
		found := s.spans(b)
		if len(found) == 0 {
			break
		}
		b = replace(b, found, counts)
	}
	return b, counts
}

// replace replaces places, which are in order.
func replace(b []byte, found []span, counts map[string]int) []byte {
	var out bytes.Buffer
	at := 0
	for _, x := range found {
		out.Write(b[at:x.from])
		out.WriteString(Mark(x.kind))
		counts[x.kind]++
		at = x.to
	}
	out.Write(b[at:])
	return out.Bytes()
}

// Mark is the text in the place of a secret.
func Mark(kind string) string { return "(redacted: " + kind + ")" }

// spans returns the places of all secrets, in order. They do not overlap.
func (s *Scanner) spans(b []byte) []span {
	found := append(s.known(b), byForm(b)...)
	slices.SortStableFunc(found, func(x, y span) int { return cmp.Or(cmp.Compare(x.from, y.from), cmp.Compare(y.to, x.to)) })
	var out []span
	for _, x := range found {
		if n := len(out); n > 0 && x.from < out[n-1].to {
			out[n-1].to = max(out[n-1].to, x.to)
			continue
		}
		out = append(out, x)
	}
	return out
}

// Kinds returns the number of secrets in b by kind.
func (s *Scanner) Kinds(b []byte) map[string]int {
	counts := map[string]int{}
	for _, x := range s.spans(b) {
		counts[x.kind]++
	}
	return counts
}

// chunk is in bytes.
const chunk = 1 << 20

// Known reads r to its end and returns the number of secrets by kind that were found by their value. It uses little memory whatever the
// length of r is. A secret at the border of two chunks may count twice.
func (s *Scanner) Known(r io.Reader) (map[string]int, error) {
	counts := map[string]int{}
	buf := make([]byte, 0, chunk+2*s.longest)
	for {
		n, err := io.ReadFull(r, buf[len(buf):min(len(buf)+chunk, cap(buf))])
		buf = buf[:len(buf)+n]
		for _, x := range s.known(buf) {
			counts[x.kind]++
		}
		switch {
		case err == io.EOF || err == io.ErrUnexpectedEOF:
			return counts, nil
		case err != nil:
			return counts, err
		}
		keep := min(s.longest, len(buf))
		buf = buf[:copy(buf[:keep], buf[len(buf)-keep:])]
	}
}
