package machine

import (
	"context"
	"io"
)

// Check x
func Check(ctx context.Context, cacheDir, stateDir string, want Demand) []Problem { return nil }

// InstallPackages x
func InstallPackages(ctx context.Context, packages []string, output io.Writer) error { return nil }
