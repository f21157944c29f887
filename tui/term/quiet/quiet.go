// Package quiet stops the console libraries from querying the terminal during program
// initialisation.
//
// Bubble Tea queries the terminal's background colour in a package init function, in every
// command that links it, and waits up to five seconds for a terminal that never answers.
// Lip Gloss skips the query if the colour is set already.
//
// Go initialises ready packages in the order of their import paths. Therefore this package
// must import Lip Gloss and nothing else that Bubble Tea needs, and its path must sort
// before github.com/charmbracelet/bubbletea. A test of package tui runs the program on a
// terminal that never answers.
package quiet

import "github.com/charmbracelet/lipgloss"

func init() { lipgloss.SetHasDarkBackground(true) }
