package term

import (
	"fmt"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/charmbracelet/x/ansi"

	"constellation/engine/plain"
)

// Clean makes text from outside safe to show: text of machines, servers or files may contain
// sequences that move the cursor, change the title or hide other text. Characters that are
// not visible are escaped, as \x1b or \u202e, and so are stacked combining marks; tabs become
// spaces and a trailing line end is removed.
func Clean(s string) string {
	s = strings.TrimRight(s, "\r\n")
	if harmless(s) {
		return s
	}
	var b strings.Builder
	var f plain.Filter
	b.Grow(len(s) + 16)
	for i := 0; i < len(s); {
		r, n := utf8.DecodeRuneInString(s[i:])
		switch shown := f.Shows(r); {
		case r == '\t':
			b.WriteString("    ")
		case r == '\n':
			b.WriteString(`\n`)
		case r == '\r':
			b.WriteString(`\r`)
		case r == utf8.RuneError && n == 1:
			fmt.Fprintf(&b, `\x%02x`, s[i])
		case r < 0x20 || r == 0x7f:
			fmt.Fprintf(&b, `\x%02x`, r)
		case !shown:
			fmt.Fprintf(&b, `\u%04x`, r)
		default:
			b.WriteRune(r)
		}
		i += n
	}
	return b.String()
}

// CleanLines is clean for text of several lines.
func CleanLines(s string) string {
	lines := strings.Split(strings.TrimRight(s, "\r\n"), "\n")
	for i := range lines {
		lines[i] = Clean(lines[i])
	}
	return strings.Join(lines, "\n")
}

// OneLine joins the lines of a text.
func OneLine(s string) string {
	var parts []string
	for l := range strings.SplitSeq(s, "\n") {
		if l = strings.TrimSpace(l); l != "" {
			parts = append(parts, l)
		}
	}
	return strings.Join(parts, "; ")
}

// harmless reports whether clean leaves s unchanged.
func harmless(s string) bool {
	i := 0
	for i < len(s) && s[i] >= 0x20 && s[i] < 0x7f { // the common case: printable ASCII only
		i++
	}
	if i == len(s) {
		return true
	}
	var f plain.Filter
	for i = 0; i < len(s); {
		r, n := utf8.DecodeRuneInString(s[i:])
		if r == utf8.RuneError && n == 1 || !f.Shows(r) {
			return false
		}
		i += n
	}
	return true
}

// Width returns the number of columns of s.
func Width(s string) int {
	n := 0
	for i := 0; i < len(s); n++ {
		if c := s[i]; c >= 0x20 && c < utf8.RuneSelf {
			i++
			continue
		}
		k := narrow(s[i:])
		if k == 0 {
			return ansi.StringWidth(s)
		}
		i += k
	}
	return n
}

// narrow returns the length in bytes of the first character of s if it is one of the symbols
// of our screens: one column wide and never combined with its neighbours. It is 0 for all
// other characters, whatever their width.
func narrow(s string) int {
	switch {
	case len(s) > 1 && (s[0] == 0xc2 && s[1] == 0xb7 || s[0] == 0xc3 && s[1] == 0x97): // · ×
		return 2
	case len(s) < 3 || s[0] != 0xe2 || s[1]&0xc0 != 0x80 || s[2]&0xc0 != 0x80:
		return 0
	}
	switch r := 0x2000 | rune(s[1]&0x3f)<<6 | rune(s[2]&0x3f); {
	case r >= 0x2500 && r <= 0x25fc, r >= 0x2800 && r <= 0x28ff: // lines, bars, discs; what spins
		return 3
	case r >= 0x2190 && r <= 0x2193, r == 0x2026, r == 0x2264, r == 0x2265, r == 0x2713, r == 0x2717, r == 0x21b7: // arrows … ≤ ≥ ✓ ✗ ↷
		return 3
	}
	return 0
}

// Cut shortens s to w columns with an ellipsis at the end.
func Cut(s string, w int, ellipsis string) string {
	if w <= 0 {
		return ""
	}
	if Width(s) <= w {
		return s
	}
	if w <= Width(ellipsis) {
		return ansi.Truncate(s, w, "")
	}
	return ansi.Truncate(s, w, ellipsis)
}

// CutMiddle shortens s to w columns with an ellipsis in the middle; of a path it keeps the
// file name if that fits.
func CutMiddle(s string, w int, ellipsis string) string {
	room := w - Width(ellipsis)
	if Width(s) <= w || room < 2 {
		return Cut(s, w, ellipsis)
	}
	tail := room * 2 / 3
	if i := strings.LastIndexByte(s, '/'); i >= 0 && Width(s[i:]) <= room {
		tail = max(tail, Width(s[i:]))
	}
	return ansi.Truncate(s, room-tail, "") + ellipsis + ansi.TruncateLeft(s, Width(s)-tail, "")
}

// Wrap breaks s at line ends and spaces into lines of at most w columns. It breaks only words
// that are longer than a line, so that names and paths can be copied.
func Wrap(s string, w int) []string {
	w = max(w, 1)
	if head, tail, found := strings.Cut(s, "\n"); found {
		return append(Wrap(head, w), Wrap(tail, w)...)
	}
	if Width(s) <= w {
		return []string{s}
	}
	var lines []string
	line := ""
	for _, word := range strings.Fields(s) {
		switch {
		case line == "":
			line = word
		case Width(line)+1+Width(word) <= w:
			line += " " + word
		default:
			lines = append(lines, line)
			line = word
		}
		for Width(line) > w {
			head := ansi.Truncate(line, w, "")
			if head == "" {
				break // a character wider than the line
			}
			lines = append(lines, head)
			line = line[len(head):]
		}
	}
	return append(lines, line)
}

// asciiOf replaces our own signs by ASCII and all other characters by "?", for terminals
// whose locale is not UTF-8.
func asciiOf(s string) string {
	for i := range len(s) {
		if s[i] >= utf8.RuneSelf {
			return asciiReplace(s)
		}
	}
	return s
}

// AsciiIf is asciiOf if yes is set.
func AsciiIf(yes bool, s string) string {
	if yes {
		return asciiOf(s)
	}
	return s
}

func asciiReplace(s string) string {
	var b strings.Builder
	for _, r := range s {
		switch r {
		case '…':
			b.WriteByte('~')
		case '→', '▶', '▸', '›':
			b.WriteByte('>')
		case '←':
			b.WriteByte('<')
		case '↑':
			b.WriteByte('^')
		case '↓':
			b.WriteByte('v')
		case '·', '•':
			b.WriteByte('.')
		case '–', '—', '─', '━':
			b.WriteByte('-')
		case '×':
			b.WriteByte('x')
		case '“', '”':
			b.WriteByte('"')
		case '‘', '’':
			b.WriteByte('\'')
		case '≥':
			b.WriteString(">=")
		case '≤':
			b.WriteString("<=")
		default:
			if r < utf8.RuneSelf {
				b.WriteRune(r)
			} else {
				b.WriteByte('?')
			}
		}
	}
	return b.String()
}

// Duration formats a duration in at most six columns: 0.4s, 12s, 3m07s, 2h05m, 4d.
func Duration(d time.Duration) string {
	switch {
	case d < 0:
		return "0s"
	case d < 10*time.Second:
		return strconv.FormatFloat(float64(d.Round(10*time.Millisecond))/float64(time.Second), 'f', 1, 64) + "s"
	case d < time.Minute:
		return strconv.Itoa(int(d/time.Second)) + "s"
	case d < time.Hour:
		return fmt.Sprintf("%dm%02ds", int(d/time.Minute), int(d/time.Second)%60)
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh%02dm", int(d/time.Hour), int(d/time.Minute)%60)
	}
	return fmt.Sprintf("%dd", int(d/(24*time.Hour)))
}

// Clock formats an elapsed time as 00:47 or 1:02:03.
func Clock(d time.Duration) string {
	d = max(d, 0)
	if d >= time.Hour {
		return fmt.Sprintf("%d:%02d:%02d", int(d/time.Hour), int(d/time.Minute)%60, int(d/time.Second)%60)
	}
	return fmt.Sprintf("%02d:%02d", int(d/time.Minute), int(d/time.Second)%60)
}

// Ago formats the age of t: "3m ago"; seconds only below a minute.
func Ago(t, now time.Time) string {
	switch d := now.Sub(t); {
	case t.IsZero():
		return "-"
	case d < time.Minute:
		return fmt.Sprintf("%ds ago", max(int(d/time.Second), 0))
	case d < time.Hour:
		return fmt.Sprintf("%dm ago", int(d/time.Minute))
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh ago", int(d/time.Hour))
	default:
		return fmt.Sprintf("%dd ago", int(d/(24*time.Hour)))
	}
}

// Bytes formats a number of bytes with a binary unit.
func Bytes(n int64) string {
	switch {
	case n >= 1<<30:
		return fmt.Sprintf("%.1f GiB", float64(n)/(1<<30))
	case n >= 1<<20:
		return fmt.Sprintf("%.0f MiB", float64(n)/(1<<20))
	case n >= 1<<10:
		return fmt.Sprintf("%.0f KiB", float64(n)/(1<<10))
	}
	return strconv.FormatInt(n, 10) + " B"
}

// StripStyle removes the escape sequences from a line.
func StripStyle(s string) string { return ansi.Strip(s) }

// StyledWidth is width for a line with styles.
func StyledWidth(s string) int {
	n := 0
	for i := 0; i < len(s); {
		switch c := s[i]; {
		case c >= 0x20 && c < 0x7f:
			i, n = i+1, n+1
		case c == 0x1b:
			k := sgr(s[i:])
			if k == 0 {
				return ansi.StringWidth(s)
			}
			i += k
		default:
			k := narrow(s[i:])
			if k == 0 {
				return ansi.StringWidth(s)
			}
			i, n = i+k, n+1
		}
	}
	return n
}

// sgr returns the length of the style sequence (SGR) at the beginning of s, or 0 if there is
// none.
func sgr(s string) int {
	if len(s) < 3 || s[0] != 0x1b || s[1] != '[' {
		return 0
	}
	for i := 2; i < len(s); i++ {
		switch c := s[i]; {
		case c >= '0' && c <= ';': // digits, colons and semicolons
		case c == 'm':
			return i + 1
		default:
			return 0
		}
	}
	return 0
}
