package tui

import (
	"strings"
	"time"

	"constellation/tui/term"
)

// page is what all pages share: how the terminal looks and which moment is shown. A page is a
// pure function of it, a width and the values to show. Pages return lines.
type page struct {
	*term.Theme
	now      time.Time
	frame    int              // of the spinner
	commands commandFormatter // formats commands to copy
}

// Spin is the current frame of the spinner.
func (p page) Spin() string { return p.Theme.Spin(p.frame) }

// dim removes the colours of a line that may be out of date.
func dim(pg page, line string) string {
	if pg.Colours == term.NoColours {
		return line
	}
	return pg.Paint(term.Faint, term.StripStyle(line))
}

// simulatedLabel are in every screen and answer about simulated machines.
const simulatedLabel = "simulated machines"

// marked returns the label for a cluster of simulated machines, or "" for a real one.
func marked(simulated bool, before string) string {
	if !simulated {
		return ""
	}
	return before + simulatedLabel
}

func markIf(pg page, w int, simulated bool) string {
	if w < 80 && simulated {
		return "  simulated"
	}
	return marked(simulated, "  ")
}

func boxTop(pg page, w, inner int, title string) string {
	t := pg.Theme
	r := t.Row(w).Pad((w-inner-2)/2).Add(term.Faint, t.CornerTL+t.Signs.Rule).Add(term.Strong, title)
	return r.Add(term.Faint, strings.Repeat(t.Signs.Rule, max(0, inner-1-term.Width(term.AsciiIf(t.Ascii, title))))+t.CornerTR).String()
}

func boxLine(pg page, w, inner int, line string) string {
	t := pg.Theme
	r := t.Row(w).Pad((w-inner-2)/2).Add(term.Faint, t.Side)
	gap := inner - 1 - term.StyledWidth(line)
	return r.String() + " " + line + strings.Repeat(" ", max(0, gap)) + t.Paint(term.Faint, t.Side)
}

func boxBottom(pg page, w, inner int, foot string) string {
	t := pg.Theme
	r := t.Row(w).Pad((w-inner-2)/2).Add(term.Faint, t.CornerBL+strings.Repeat(t.Signs.Rule, max(0, inner-1-term.Width(foot))))
	return r.Add(term.Faint, foot).Add(term.Faint, t.Signs.Rule+t.CornerBR).String()
}

// window returns the part of a list of n rows that fits into h lines and contains row at.
func window(n, at, h int) (from, to int) {
	if n <= h || h <= 0 {
		return 0, min(n, max(h, 0))
	}
	from = min(max(at-h/2, 0), n-h)
	return from, from + h
}

// marker is the cursor sign of a selected row, else blanks.
func marker(pg page, here bool) string {
	if here {
		return pg.Cursor + " "
	}
	return "  "
}

// printedWidth is the width of printed output; longer cells overflow.
const printedWidth = 100
