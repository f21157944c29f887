package plan

import (
	"time"
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

// Old reports whether it is so old at a moment that it should be made anew. Nil is none,
// and old.
func (b *LastBackup) Old(now time.Time) bool { return b == nil || now.Sub(b.Created) > backupMaxAge }
