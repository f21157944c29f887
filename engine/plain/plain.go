// Package plain tells which characters a terminal shows as themselves.
//
// Text from machines, servers and files may hold characters that nobody sees, that turn the
// direction of writing, or that pile up over the lines above. [Filter] finds them; what
// takes their place is its caller's choice. The package decides by Unicode's tables alone
// and knows no terminal and no language.
package plain

import "unicode"

// MaxMarks is how many combining marks may follow one character. Text of people has up to
// three or four; hundreds cover the lines around them.
const MaxMarks = 4

// Filter judges the characters of one text in their order. The zero value is at its
// beginning. It is not safe for concurrent use.
type Filter struct {
	left int // marks that the last character may still get
}

// Shows reports whether r, which comes next, is shown as itself: it is no control, it is to
// be seen, and it is no combining mark without a character or beyond MaxMarks of one. A
// character that is not shown takes no marks, since something else stands in its place.
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

// blank are characters that Unicode counts as visible, and that no font draws.
var blank = &unicode.RangeTable{
	R16: []unicode.Range16{{Lo: 0x2800, Hi: 0x2800, Stride: 1}}, // BRAILLE PATTERN BLANK
	R32: []unicode.Range32{{Lo: 0x16fe4, Hi: 0x16fe4, Stride: 1}, // KHITAN SMALL SCRIPT FILLER
		{Lo: 0x1d159, Hi: 0x1d159, Stride: 1}}, // MUSICAL SYMBOL NULL NOTEHEAD
}

// Hidden reports whether r is never shown as itself: controls, spaces but that of ASCII,
// whatever turns the direction of writing, what Unicode does not assign or keeps for private
// use, all of Default_Ignorable_Code_Point (fillers, variation selectors, tags), and what is
// blank for other reasons.
func Hidden(r rune) bool {
	if r < 0x7f {
		return r < 0x20
	}
	return !unicode.IsPrint(r) || unicode.In(r, unicode.Other_Default_Ignorable_Code_Point, unicode.Variation_Selector, blank)
}

// joins reports whether r takes no place of its own but joins what is before it: combining
// marks, and the vowels and finals of Hangul that are not yet composed.
func joins(r rune) bool {
	if r < 0x300 {
		return false
	}
	return unicode.Is(unicode.M, r) || r >= 0x1160 && r <= 0x11ff || r >= 0xd7b0 && r <= 0xd7ff
}
