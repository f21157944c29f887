// Package enginefake has an engine that replays recorded runs, and values that tests of the
// user interface show: plans, statuses, checks and rollouts. Tests of tui and tui/console use
// it; no other package may import it.
package enginefake

import "embed"

// Data has recorded runs in testdata/streams and checks in testdata/checks.
//
//go:embed testdata
var Data embed.FS
