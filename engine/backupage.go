package engine

import (
	"encoding/hex"
	"fmt"
	"slices"
	"time"

	"constellation/engine/backup"
)

// BackupAge is the ID of the finding about the age of the last backup.
const BackupAge = "backup-age"

// backupMaxAge is how old the last backup may be.
const backupMaxAge = 24 * time.Hour

// LastBackup is the newest whole backup of the workspace's cluster, as far as names and
// sizes tell: that no byte changed, only `backup verify` knows.
type LastBackup struct {
	ID      string    `json:"id"`
	Created time.Time `json:"created"`
	Objects int64     `json:"objects"`
	Bytes   int64     `json:"bytes"`
	// Etcd is whether it has a snapshot of etcd.
	Etcd bool `json:"etcd"`
}

// lastBackup looks in the directories of the workspace's runs; nil if there is none.
// Those of another cluster, which had this workspace before, do not count.
func (e *Engine) lastBackup(s *State) (*LastBackup, error) {
	all, err := backup.List(e.ws.Path(RunsDir))
	if err != nil {
		return nil, err
	}
	id := ""
	if s != nil {
		id = hex.EncodeToString(s.ClusterValues.ClusterID)
	}
	i := slices.IndexFunc(all, func(b backup.Entry) bool {
		return b.Whole && (b.Cluster.ID == "" || id == "" || b.Cluster.ID == id)
	})
	if i < 0 {
		return nil, nil
	}
	b := all[i]
	return &LastBackup{ID: b.ID, Created: b.Created, Objects: b.Objects, Bytes: b.Bytes, Etcd: b.Etcd}, nil
}

// Old reports whether it is so old at a moment that it should be made anew. Nil is none,
// and old.
func (b *LastBackup) Old(now time.Time) bool { return b == nil || now.Sub(b.Created) > backupMaxAge }

// backupFinding judges the age of the last backup. err is why it is not known.
func (e *Engine) backupFinding(b *LastBackup, err error) Finding {
	f := Finding{ID: BackupAge, Severity: Warn, Source: "backup", Reference: "docs/backup.md", Remedy: "make one: `" + e.command("backup create") + "`"}
	switch {
	case err != nil:
		f.Severity, f.Title, f.Detail, f.Remedy = NotChecked, "not checked how old the last backup is", err.Error(), Remedy(err)
	case b == nil:
		f.Title = "there is no whole backup of this cluster"
		f.Detail = "looked for in " + e.ws.Path(RunsDir)
	case b.Old(e.now()):
		f.Title = fmt.Sprintf("the last backup is %s old", hours(e.now().Sub(b.Created)))
		f.Detail = b.ID + " of " + b.Created.UTC().Format(time.RFC3339)
	default:
		f.Severity, f.Title, f.Detail, f.Remedy = Info, "the last backup is less than 24h old", b.ID+" of "+b.Created.UTC().Format(time.RFC3339), ""
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
