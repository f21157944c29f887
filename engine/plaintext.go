package engine

import "constellation/engine/plain"

// TextFilter finds the characters of a text that a terminal does not show as themselves.
type TextFilter = plain.Filter

// HiddenRune reports whether a terminal never shows r as itself.
func HiddenRune(r rune) bool { return plain.Hidden(r) }
