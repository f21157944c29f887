package tui

import (
	"bytes"
	"fmt"
	"strings"
	"unicode/utf8"
)

// glyph is one column of a line as it was written: a character, and the sequences that
// style it.
type glyph struct{ text, style string }

var blank = glyph{text: " "}

// glyphsOf takes a line apart. It reports false for a line with characters of another width
// than one column, or with sequences that are no style: such a line is written as a whole.
func glyphsOf(line string, into []glyph) ([]glyph, bool) {
	out := into[:0]
	style := ""
	from := -1 // where the sequences began that are in force
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
			case from >= 0 && from+len(style) == i: // one after the other
				style = line[from : i+n]
			case from >= 0:
				style += seq
			default:
				style, from = seq, i
			}
			space = blank
			if tinges(style) {
				space = glyph{" ", style}
			}
			i += n
			continue
		}
		n := 1
		if line[i] >= utf8.RuneSelf {
			_, n = utf8.DecodeRuneInString(line[i:])
			if width(line[i:i+n]) != 1 {
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

// tinges reports whether a style can be seen on a space. It may say so of one that cannot.
func tinges(style string) bool {
	return strings.Contains(style, "\x1b[4") || strings.Contains(style, "\x1b[7") || strings.Contains(style, ";4") || strings.Contains(style, ";7m")
}

// shortGap is how many columns that stay as they are cost less to write again than to
// leave out, since the cursor must be moved across them.
const shortGap = 5

// brush writes glyphs, and knows the style that is in force.
type brush struct {
	b     *bytes.Buffer
	style string
}

// use puts a style in force. One colour replaces another; anything else is ended first.
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

// colourOnly reports whether a style is nothing but the colour of characters.
func colourOnly(style string) bool {
	return strings.HasPrefix(style, "\x1b[3") && strings.LastIndexByte(style, 0x1b) == 0
}

// difference writes what makes the line at row y show now instead of was. Both begin at the
// left edge; what is beyond their ends is blank.
func (p *brush) difference(y int, was, now []glyph) {
	at := func(line []glyph, x int) glyph {
		if x < len(line) {
			return line[x]
		}
		return blank
	}
	n := max(len(was), len(now))
	end := n // from where on now is blank to the edge
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
		if x >= end {                                            // all that is left is to be cleared
			p.use("")
			p.b.WriteString(seqClearRight)
			return
		}
		last := x // of the columns to write
		for k := x + 1; k < min(n, end) && k-last <= shortGap; k++ {
			if at(was, k) != at(now, k) {
				last = k
			}
		}
		for ; x <= last; x++ {
			if g := at(now, x); g != blank || tinges(p.style) {
				p.use(g.style)
				p.b.WriteString(g.text)
			} else {
				p.b.WriteByte(' ')
			}
		}
	}
}
