package plain

import (
	"strings"
	"testing"
	"unicode"
)

// defaultIgnorable is Unicode's derivation of Default_Ignorable_Code_Point
// (DerivedCoreProperties), computed from Go's tables.
func defaultIgnorable(r rune) bool {
	switch {
	case unicode.Is(unicode.White_Space, r), unicode.Is(unicode.Prepended_Concatenation_Mark, r), r >= 0xfff9 && r <= 0xfffb, r >= 0x13430 && r <= 0x13440:
		return false
	}
	return unicode.In(r, unicode.Other_Default_Ignorable_Code_Point, unicode.Cf, unicode.Variation_Selector)
}

func TestDefaultIgnorablesAreHidden(t *testing.T) {
	n := 0
	for r := rune(0); r <= unicode.MaxRune; r++ {
		if !defaultIgnorable(r) {
			continue
		}
		n++
		if f := (Filter{left: MaxMarks}); !Hidden(r) || f.Shows(r) {
			t.Errorf("%U is shown", r)
		}
	}
	if n < 4000 { // plane 14 alone has 4096
		t.Errorf("%d code points are ignorable, want at least 4000: the tables are incomplete", n)
	}
	for _, r := range []rune{0, 0x1b, 0x7f, 0x85, 0x9b, 0xa0, 0xad, 0x34f, 0x61c, 0x115f, 0x1160, 0x17b4, 0x180b, 0x180e, 0x2000, 0x200b, 0x200d, 0x200e, 0x2028, 0x202e, 0x2060, 0x2066, 0x2800, 0x3000, 0x3164, 0xe000, 0xfe0f, 0xfeff, 0xffa0, 0xfff9, 0x16fe4, 0x1d159, 0x1d173, 0xe0041, 0xe01ef, 0x10ffff} {
		if !Hidden(r) {
			t.Errorf("%U is shown", r)
		}
	}
	for _, r := range " ~aäß€…·×✓─│█▁漢字ไทยहिन्दीעברית العربية한국어🙂" {
		if Hidden(r) {
			t.Errorf("%U is hidden", r)
		}
	}
}

func TestMarks(t *testing.T) {
	for _, tt := range []struct {
		name, text string
		hidden     int // characters that are not shown
	}{
		{name: "real text", text: "naïve nai\u0308ve ồ o\u0302\u0300 ที่ हिन्दी שָׁלוֹם", hidden: 0},
		{name: "MaxMarks marks", text: "a" + strings.Repeat("\u0301", MaxMarks) + "b" + strings.Repeat("\u20dd", MaxMarks), hidden: 0},
		{name: "MaxMarks+1 marks", text: "a" + strings.Repeat("\u0301", MaxMarks+1), hidden: 1},
		{name: "hundreds of marks", text: "a" + strings.Repeat("\u0489\u0301", 500) + "b", hidden: 1000 - MaxMarks},
		{name: "mark without a base character", text: "\u0301a", hidden: 1},
		{name: "mark after a hidden character", text: "a\u200b\u0301", hidden: 2},
		{name: "100 Hangul finals", text: "\u1112\u1161" + strings.Repeat("\u11ab", 100), hidden: 100 + 1 - MaxMarks},
	} {
		var f Filter
		n := 0
		for _, r := range tt.text {
			if !f.Shows(r) {
				n++
			}
		}
		if n != tt.hidden {
			t.Errorf("%s: %d characters hidden, want %d", tt.name, n, tt.hidden)
		}
	}
}
