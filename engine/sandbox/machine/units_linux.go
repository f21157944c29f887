package machine

import "embed"

// ownUnits prepare a machine of the sandbox, whose root is an overlay and whose kernel is that of
// this computer. A real machine needs none of it.
//
//go:embed units
var ownUnits embed.FS
