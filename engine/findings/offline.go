package findings

import (
	"constellation/engine/plan"
	"constellation/engine/version"
)

// OfflineRequest configures a check without a cluster. Either Manifests or Backup is set.
type OfflineRequest struct {
	// Manifests is a directory with manifests, Backup that of a backup.
	Manifests, Backup string
	// To is the target, and From what runs now. Zero: the newest minor whose changes are known,
	// and unknown.
	To, From version.Version
}

// Offline is the result of a check without a cluster.
type Offline struct {
	// Kubernetes is the target that was checked.
	Kubernetes version.Version `json:"kubernetes"`
	// From is the version that ran when a backup was made; zero for manifests.
	From version.Version `json:"from,omitzero"`
	// Files is the number of files that were read, Objects that of the objects in them.
	Files   int `json:"files"`
	Objects int `json:"objects"`
	// Bytes is the size of the files.
	Bytes int64 `json:"bytes"`
	// Skipped are files and documents that were not checked, by file and line.
	Skipped []Skipped `json:"skipped,omitempty"`
	// Findings are sorted: the worst first, then by file and line.
	Findings []plan.Finding `json:"findings"`
}

// Skipped is a file, directory or document that was not checked.
type Skipped struct {
	plan.Location
	// Reason is a sentence for users, without content of the file.
	Reason string `json:"reason"`
}
