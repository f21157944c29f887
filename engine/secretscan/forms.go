package secretscan

import (
	"bytes"
	"regexp"
)

// form is a pattern of lines with secrets. The first group is the secret.
type form struct {
	kind string
	// words are parts of each line that matches, in lower case. A search for them is a hundred times faster than the expression.
	words []string
	re    *regexp.Regexp
}

// quoted begins a value: it may be in JSON that is a string of JSON.
const quoted = `\\*["']?[ \t]*[:=][ \t]*\\*["']?`

var forms = []form{
	{kind: WebToken, words: []string{"eyj"}, re: regexp.MustCompile(`(eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*)`)},
	{kind: AgeIdentity, words: []string{"age-secret-key-"}, re: regexp.MustCompile(`(?i)(AGE-SECRET-KEY-(?:PQ-)?1[A-Z0-9]{16,})`)},
	{kind: Authorization, words: []string{"authorization"}, re: regexp.MustCompile(`(?i)authorization` + quoted + `\[?["']?((?:bearer|basic|digest|negotiate|token)[ \t]+[^\s"',\]\\()]+|[^\s"',\]\\()]{20,})`)},
	{kind: Authorization, words: []string{"bearer", "basic"}, re: regexp.MustCompile(`(?i)\b(?:bearer|basic)[ \t]+([A-Za-z0-9._~+/=-]{16,})`)},
	{kind: URLPassword, words: []string{"://"}, re: regexp.MustCompile(`[A-Za-z][A-Za-z0-9+.-]*://[^/\s:@"']*:([^/\s@"'()]+)@`)},
	{kind: Password, words: []string{"passw", "passphrase", "secret", "key", "token"}, re: regexp.MustCompile(`(?i)(?:passw(?:or)?d|passphrase|client[-_]?secret|secret[-_]?(?:access[-_]?)?key|access[-_]?key|api[-_]?key|private[-_]?key|client[-_]key[-_]data|(?:identity|registry|refresh|access|id|auth|session|bearer)[-_]?token)` + quoted + `([^\s"',;&()\\]{4,})`)},
	{kind: Password, words: []string{"token"}, re: regexp.MustCompile(`(?i)\btoken(?:[ \t]*=[ \t]*\\*["']?|\\*["'][ \t]*:[ \t]*\\*["'])([^\s"',;&()\\]{8,})`)},
	{kind: Password, words: []string{"token"}, re: regexp.MustCompile(`(?i)\btoken(?::[ \t]+|[ \t]+)["']?([A-Za-z0-9._~+/=-]{20,})`)},
	{kind: Password, words: []string{"auth"}, re: regexp.MustCompile(`\\*"auth\\*"[ \t]*:[ \t]*\\*"([A-Za-z0-9+/=]{8,})`)},
	{kind: CloudKey, words: []string{"akia", "asia", "gh", "aiza", "ya29.", "xox", "glpat-"}, re: regexp.MustCompile(`\b((?:AKIA|ASIA)[0-9A-Z]{16}\b|gh[pousr]_[A-Za-z0-9]{30,}|github_pat_\w{22,}|AIza[0-9A-Za-z_-]{35}|ya29\.[0-9A-Za-z_-]{20,}|xox[abprs]-[0-9A-Za-z-]{10,}|glpat-[0-9A-Za-z_-]{20,})`)},
}

// Private keys take several lines. In a string of JSON they end with it. A key whose end is missing takes the rest; one whose beginning
// is missing takes all before it.
var (
	wholeKey = regexp.MustCompile(`-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY-----(?:[^"]*?-----END (?:[A-Z0-9]+ )*PRIVATE KEY-----|[^"]*)`)
	keyEnd   = regexp.MustCompile(`[^"]*-----END (?:[A-Z0-9]+ )*PRIVATE KEY-----`)
	keyMark  = []byte("PRIVATE KEY-----")
)

// byForm returns the places of secrets of a known form. They may overlap.
func byForm(b []byte) (out []span) {
	if bytes.Contains(b, keyMark) {
		at := 0
		for _, m := range append(wholeKey.FindAllIndex(b, -1), []int{len(b), len(b)}) {
			for _, e := range keyEnd.FindAllIndex(b[at:m[0]], -1) {
				out = append(out, span{PrivateKey, at + e[0], at + e[1]})
			}
			if m[0] < m[1] {
				out = append(out, span{PrivateKey, m[0], m[1]})
			}
			at = m[1]
		}
	}
	out = append(out, bootstrapTokens(b)...)
	at := 0
	for line := range bytes.Lines(b) {
		lower := bytes.ToLower(line)
		for _, f := range forms {
			for _, w := range f.words {
				if !bytes.Contains(lower, []byte(w)) {
					continue
				}
				for _, m := range f.re.FindAllSubmatchIndex(line, -1) {
					if !bytes.HasPrefix(line[m[2]:m[3]], []byte("(redacted:")) {
						out = append(out, span{f.kind, at + m[2], at + m[3]})
					}
				}
				break
			}
		}
		at += len(line)
	}
	return out
}

// A bootstrap token is an ID, a dot and a secret.
const (
	tokenID     = 6
	tokenSecret = 16
)

// bootstrapTokens returns the places of tokens such as abcdef.0123456789abcdef. Names with a hyphen before or after them are names of
// objects, such as those of Events.
func bootstrapTokens(b []byte) (out []span) {
	for dot := tokenID; dot+tokenSecret < len(b); dot++ {
		next := bytes.IndexByte(b[dot:], '.')
		if next < 0 {
			break
		}
		if dot += next; dot+tokenSecret >= len(b) {
			break
		}
		from, to := dot-tokenID, dot+1+tokenSecret
		if !allOf(b[from:dot], isTokenChar) || !allOf(b[dot+1:to], isTokenChar) {
			continue
		}
		if to < len(b) && isNameChar(b[to]) {
			continue
		}
		// In JSON, a line can end with \n before the token.
		escaped := from > 1 && b[from-2] == '\\'
		if from > 0 && (isNameChar(b[from-1]) || b[from-1] == '.') && !escaped {
			continue
		}
		out = append(out, span{BootstrapToken, from, to})
	}
	return out
}

func allOf(b []byte, f func(byte) bool) bool {
	for _, c := range b {
		if !f(c) {
			return false
		}
	}
	return true
}

func isTokenChar(c byte) bool { return c >= 'a' && c <= 'z' || c >= '0' && c <= '9' }

func isNameChar(c byte) bool {
	return isTokenChar(c) || c >= 'A' && c <= 'Z' || c == '-' || c == '_'
}
