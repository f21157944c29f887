// Package offline checks for obstacles to an upgrade without a cluster: in the files of a Git
// repository, or in a backup.
package offline

import (
	"context"
	"errors"

	"constellation/engine/findings"
	"constellation/engine/manifests"
)

// Check checks the directory of the request.
func Check(ctx context.Context, r findings.OfflineRequest) (*findings.Offline, error) {
	switch {
	case r.Manifests != "":
		return manifests.Check(ctx, r.Manifests, manifests.Request{To: r.To, From: r.From})
	case r.Backup != "":
		return fromBackup(ctx, r)
	}
	return nil, errors.New("check without a cluster: no directory")
}
