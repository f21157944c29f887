package engine

import (
	"encoding/hex"
	"fmt"
	"slices"
	"time"

	"constellation/engine/backup"
	"constellation/engine/plan"
	"constellation/engine/workspace"
)

// lastBackup looks in the directories of the workspace's runs; nil if there is none.
// Those of another cluster, which had this workspace before, do not count.
func (e *Engine) lastBackup(s *workspace.State) (*plan.LastBackup, error) {
	all, err := backup.List(e.ws.Path(plan.RunsDir), e.backupKeys())
	if err != nil {
		return nil, err
	}
	id := ""
	if s != nil {
		id = hex.EncodeToString(s.ClusterValues.ClusterID)
	}
	i := slices.IndexFunc(all, func(b backup.Entry) bool {
		return b.Complete && (b.Cluster.ID == "" || id == "" || b.Cluster.ID == id)
	})
	if i < 0 {
		return nil, nil
	}
	b := all[i]
	return &plan.LastBackup{ID: b.ID, Created: b.Created, Objects: b.Objects, Bytes: b.Bytes, Etcd: b.Etcd}, nil
}

// backupFinding judges the age of the last backup. err is why it is not known.
func (e *Engine) backupFinding(b *plan.LastBackup, err error) plan.Finding {
	f := plan.Finding{ID: plan.BackupAge, Severity: plan.Warn, Source: "backup", Reference: "docs/backup.md", Remedy: "create one: `" + e.command("backup create") + "`"}
	switch {
	case err != nil:
		f.Severity, f.Title, f.Detail, f.Remedy = plan.NotChecked, "not checked how old the last backup is", err.Error(), plan.Remedy(err)
	case b == nil:
		f.Title = "this cluster has no complete backup"
		f.Detail = "searched: " + e.ws.Path(plan.RunsDir)
	case b.Old(e.now()):
		f.Title = fmt.Sprintf("the last backup is %s old", hours(e.now().Sub(b.Created)))
		f.Detail = b.ID + " of " + b.Created.UTC().Format(time.RFC3339)
	default:
		f.Severity, f.Title, f.Detail, f.Remedy = plan.Info, "the last backup is less than 24h old", b.ID+" of "+b.Created.UTC().Format(time.RFC3339), ""
	}
	return f
}

// hours is "26h", or "3 days" from two days on.
func hours(d time.Duration) string {
	if d >= 48*time.Hour {
		return fmt.Sprintf("%d days", int(d/(24*time.Hour)))
	}
	return fmt.Sprintf("%dh", int(d/time.Hour))
}
