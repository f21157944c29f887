package term

import (
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/charmbracelet/x/ansi"
)

// The fast paths of width and StyledWidth give the same result as the library.
func TestWidthMatchesTheLibrary(t *testing.T) {
	var known []string
	for r := rune(' '); r < 0x3000; r++ {
		if s := string(r); r != 0x7f && narrow(s) > 0 {
			if narrow(s) != len(s) || ansi.StringWidth(s) != 1 {
				t.Errorf("%q is called narrow, takes %d columns, and has %d bytes, not %d", s, ansi.StringWidth(s), len(s), narrow(s))
			}
			known = append(known, s)
		}
	}
	if len(known) < 300 {
		t.Fatalf("only %d characters are known", len(known))
	}
	others := []string{"a", "Z", " ", "0", "~", "é", "e\u0301", "日", "👩‍🚀", "\ufe0f", "\u200d", "\u0301", "🇪🇺", "\x1b[1m", "\x1b[0m", "\x1b[38;5;145m", "\x1b[2K", "\x1b]0;x\x07", "\x1b[", "\x1b", "\xe2", "\xe2\x94"}
	rnd := rand.New(rand.NewPCG(1, 2))
	for range 20000 {
		var b strings.Builder
		for range rnd.IntN(8) {
			if rnd.IntN(3) > 0 {
				b.WriteString(known[rnd.IntN(len(known))])
			} else {
				b.WriteString(others[rnd.IntN(len(others))])
			}
		}
		s := b.String()
		if got, want := StyledWidth(s), ansi.StringWidth(s); got != want {
			t.Fatalf("%q takes %d columns with its colours, want %d", s, got, want)
		}
		if got, want := Width(s), ansi.StringWidth(s); got != want {
			t.Fatalf("%q takes %d columns, want %d", s, got, want)
		}
	}
}
