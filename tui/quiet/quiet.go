// Package quiet keeps the libraries of the console from asking the terminal
// anything before the console itself starts.
//
// Bubble Tea asks the terminal for its background colour while the program is
// being initialised, in every command that links it, and waits up to five seconds
// for a terminal that never answers. Lip Gloss does not ask once it has been told.
//
// Go initialises the packages that are ready in the order of their import paths,
// so this package must import Lip Gloss and nothing else that Bubble Tea needs, and
// its path must sort before github.com/charmbracelet/bubbletea. A test of package
// tui runs the program on a terminal that never answers.
package quiet

import "github.com/charmbracelet/lipgloss"

func init() { lipgloss.SetHasDarkBackground(true) }
