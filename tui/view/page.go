// Package view draws the pages of the console and of printed output.
//
// A page is a pure function of a Page (how the terminal looks, and which moment is shown), a
// width, and the values to show; it returns lines. The same arguments give the same lines, so
// pages are tested with golden files and without a terminal. Timeline folds the events of a run
// into what pages show; the console and the plain printer share it, so that they cannot
// disagree. CommandFormatter writes commands as the user can copy them.
//
// The package has no Bubble Tea model, handles no key, and starts nothing. It imports tui/term
// and values of the engine.
package view

import (
	"strings"
	"time"

	"constellation/tui/term"
)

// MinWidth and MinHeight are the smallest window of the console. In a smaller one it shows only
// which dimension is too small.
const (
	MinWidth  = 60 // columns
	MinHeight = 16 // lines
)

// Page is what all pages share: how the terminal looks and which moment is shown. A page is a
// pure function of it, a width and the values to show. Pages return lines.
type Page struct {
	*term.Theme
	Now      time.Time
	Frame    int              // of the spinner
	Commands CommandFormatter // formats commands to copy
}

// Spin is the current frame of the spinner.
func (p Page) Spin() string { return p.Theme.Spin(p.Frame) }

// Dim removes the colours of a line that may be out of date.
func Dim(pg Page, line string) string {
	if pg.Colours == term.NoColours {
		return line
	}
	return pg.Paint(term.Faint, term.StripStyle(line))
}

// Labels that are in every screen and answer about such machines.
const (
	simulatedLabel   = "simulated machines"
	notAttestedLabel = "not attested"
)

// Marked returns the label for a cluster of simulated machines, or of machines that no evidence of hardware
// vouches for; empty for others.
func Marked(simulated, notAttested bool, before string) string {
	switch {
	case simulated:
		return before + simulatedLabel
	case notAttested:
		return before + notAttestedLabel
	}
	return ""
}

// MarkIf is the label behind the cluster's name, shortened in a narrow window.
func MarkIf(pg Page, w int, simulated, notAttested bool) string {
	if w < 80 && simulated {
		return "  simulated"
	}
	return Marked(simulated, notAttested, "  ")
}

// BoxTop is the upper border of a box.
func BoxTop(pg Page, w, inner int, title string) string {
	t := pg.Theme
	r := t.Row(w).Pad((w-inner-2)/2).Add(term.Faint, t.CornerTL+t.Signs.Rule).Add(term.Strong, title)
	return r.Add(term.Faint, strings.Repeat(t.Signs.Rule, max(0, inner-1-term.Width(term.AsciiIf(t.Ascii, title))))+t.CornerTR).String()
}

// BoxLine is a line of a box.
func BoxLine(pg Page, w, inner int, line string) string {
	t := pg.Theme
	r := t.Row(w).Pad((w-inner-2)/2).Add(term.Faint, t.Side)
	gap := inner - 1 - term.StyledWidth(line)
	return r.String() + " " + line + strings.Repeat(" ", max(0, gap)) + t.Paint(term.Faint, t.Side)
}

// BoxBottom is the lower border of a box.
func BoxBottom(pg Page, w, inner int, foot string) string {
	t := pg.Theme
	r := t.Row(w).Pad((w-inner-2)/2).Add(term.Faint, t.CornerBL+strings.Repeat(t.Signs.Rule, max(0, inner-1-term.Width(foot))))
	return r.Add(term.Faint, foot).Add(term.Faint, t.Signs.Rule+t.CornerBR).String()
}

// Window returns the part of a list of n rows that fits into h lines and contains row at.
func Window(n, at, h int) (from, to int) {
	if n <= h || h <= 0 {
		return 0, min(n, max(h, 0))
	}
	from = min(max(at-h/2, 0), n-h)
	return from, from + h
}

// Marker is the cursor sign of a selected row, else blanks.
func Marker(pg Page, here bool) string {
	if here {
		return pg.Cursor + " "
	}
	return "  "
}

// PrintedWidth is the width of printed output; longer cells overflow.
const PrintedWidth = 100
