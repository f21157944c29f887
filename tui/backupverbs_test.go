package tui

import (
	"context"

	"constellation/engine"
)

func (f *fakeEngine) ShowBackup(string, string) (engine.BackupManifest, string, error) {
	return f.manifest, "/runs/" + f.manifest.ID + "/backups", nil
}

func (f *fakeEngine) PruneBackups(context.Context, string, int) ([]string, error) {
	return f.pruned, f.verifyErr
}
