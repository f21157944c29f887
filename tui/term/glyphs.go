package term

import (
	"bytes"
	"fmt"
	"strings"
	"unicode/utf8"
)

// glyph is one column of a line: a character and the escape sequences of its style.
type glyph struct{ text, style string }

var blank = glyph{text: " "}

// glyphsOf splits a line into glyphs. It reports false for a line with characters that are not
// one column wide or with sequences other than styles: such a line is written as a whole.
func glyphsOf(line string, into []glyph) ([]glyph, bool) {
	out := into[:0]
	style := ""
	from := -1 // start of the active sequences
	space := blank
	for i := 0; i < len(line); {
		if line[i] == 0x1b {
			n := sgr(line[i:])
			if n == 0 {
				return out, false
			}
			switch seq := line[i : i+n]; {
			case seq == seqReset || seq == "\x1b[m":
				style, from = "", -1
			case from >= 0 && from+len(style) == i: // adjacent sequences
				style = line[from : i+n]
			case from >= 0:
				style += seq
			default:
				style, from = seq, i
			}
			space = blank
			if visibleOnBlank(style) {
				space = glyph{" ", style}
			}
			i += n
			continue
		}
		n := 1
		if line[i] >= utf8.RuneSelf {
			_, n = utf8.DecodeRuneInString(line[i:])
			if Width(line[i:i+n]) != 1 {
				return out, false
			}
		}
		if line[i] == ' ' {
			out = append(out, space)
		} else {
			out = append(out, glyph{line[i : i+n], style})
		}
		i += n
	}
	return out, true
}

// visibleOnBlank reports whether a style is visible on a space. False positives are harmless.
func visibleOnBlank(style string) bool {
	return strings.Contains(style, "\x1b[4") || strings.Contains(style, "\x1b[7") || strings.Contains(style, ";4") || strings.Contains(style, ";7m")
}

// shortGap is the number of unchanged columns that are cheaper to write again than to skip
// with a cursor movement.
const shortGap = 5

// brush writes glyphs and tracks the active style.
type brush struct {
	b     *bytes.Buffer
	style string
}

// use activates a style. One colour replaces another; any other style is reset first.
func (p *brush) use(style string) {
	if style == p.style {
		return
	}
	if p.style != "" && (!colourOnly(p.style) || !colourOnly(style)) {
		p.b.WriteString(seqReset)
	}
	p.b.WriteString(style)
	p.style = style
}

// colourOnly reports whether a style is only a foreground colour.
func colourOnly(style string) bool {
	return strings.HasPrefix(style, "\x1b[3") && strings.LastIndexByte(style, 0x1b) == 0
}

// difference writes the changes that turn row y from was into now. Both start at the left
// edge; the columns beyond their ends are blank.
func (p *brush) difference(y int, was, now []glyph) {
	at := func(line []glyph, x int) glyph {
		if x < len(line) {
			return line[x]
		}
		return blank
	}
	n := max(len(was), len(now))
	end := n // now is blank from here to the edge
	for end > 0 && at(now, end-1) == blank {
		end--
	}
	move := func(x int) { fmt.Fprintf(p.b, "\x1b[%d;%dH", y+1, x+1) }
	for x := 0; x < n; {
		if at(was, x) == at(now, x) {
			x++
			continue
		}
		move(x)
		move = func(x int) { fmt.Fprintf(p.b, "\x1b[%dG", x+1) } // the row is the same
		if x >= end {                                            // the rest of the line is blank
			p.use("")
			p.b.WriteString(seqClearRight)
			return
		}
		last := x // the last column to write
		for k := x + 1; k < min(n, end) && k-last <= shortGap; k++ {
			if at(was, k) != at(now, k) {
				last = k
			}
		}
		for ; x <= last; x++ {
			if g := at(now, x); g != blank || visibleOnBlank(p.style) {
				p.use(g.style)
				p.b.WriteString(g.text)
			} else {
				p.b.WriteByte(' ')
			}
		}
	}
}
