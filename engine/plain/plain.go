// Package plain classifies the characters that are safe to show on a terminal.
//
// Text from machines, servers and files may contain characters that are invisible, change
// the direction of writing, or stack over the lines above. [Filter] finds them; the caller
// chooses the replacement. The package uses only Unicode's tables, and depends on no terminal
// and no language.
package plain

import "unicode"

// MaxMarks is the maximum number of combining marks after one character. Real text has up to
// four; hundreds would cover the lines around them.
const MaxMarks = 4

// Filter classifies the characters of one text in order. The zero value is at the beginning
// of the text. It is not safe for concurrent use.
type Filter struct {
	left int // marks that the last character may still take
}

// Shows reports whether r, the next character, may be shown: it is visible, not a control
// character, and not a combining mark without a base character or beyond MaxMarks. A
// character that is not shown takes no marks, because the caller replaces it.
func (f *Filter) Shows(r rune) bool {
	switch {
	case Hidden(r):
		f.left = 0
		return false
	case !joins(r):
		f.left = MaxMarks
		return true
	case f.left == 0:
		return false
	}
	f.left--
	return true
}

// blank are characters that Unicode classifies as visible but that fonts render blank.
var blank = &unicode.RangeTable{
	R16: []unicode.Range16{{Lo: 0x2800, Hi: 0x2800, Stride: 1}}, // BRAILLE PATTERN BLANK
	R32: []unicode.Range32{{Lo: 0x16fe4, Hi: 0x16fe4, Stride: 1}, // KHITAN SMALL SCRIPT FILLER
		{Lo: 0x1d159, Hi: 0x1d159, Stride: 1}}, // MUSICAL SYMBOL NULL NOTEHEAD
}

// Hidden reports whether r is never shown: control characters, spaces except ASCII's,
// bidirectional controls, unassigned and private-use characters, all of
// Default_Ignorable_Code_Point (fillers, variation selectors, tags), and other blanks.
func Hidden(r rune) bool {
	if r < 0x7f {
		return r < 0x20
	}
	return !unicode.IsPrint(r) || unicode.In(r, unicode.Other_Default_Ignorable_Code_Point, unicode.Variation_Selector, blank)
}

// joins reports whether r combines with the previous character instead of occupying a cell:
// combining marks, and decomposed Hangul vowels and finals.
func joins(r rune) bool {
	if r < 0x300 {
		return false
	}
	return unicode.Is(unicode.M, r) || r >= 0x1160 && r <= 0x11ff || r >= 0xd7b0 && r <= 0xd7ff
}
