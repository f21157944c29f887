package tui

import (
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
