// Package disk simulates a faulty disk: it is slow, or loses unsynced writes at a power cut.
//
// The disk is a directory that a process of this program serves through FUSE to one mount
// namespace other than this computer's. Nothing is mounted anywhere else, and the
// mount ends with that namespace. The directory always contains the current writes.
// The process keeps an undo log of all changes that no sync has made durable, and rolls them
// back at SIGTERM, before it ends. If it is killed, nothing is rolled back.
//
// Changes of names (create, rename, remove) become durable with the next sync of
// any file, as in the journal of ext4. Data and the size of a file need a sync of that file.
package disk

import (
	"encoding/json"
	"fmt"
	"os"
	"time"
)

// Loss is the effect of a power cut on unsynced writes.
type Loss string

// Values of Loss.
const (
	// Nothing is lost, as if the kernel had written all back in time.
	Nothing Loss = ""
	// All unsynced writes are lost.
	All Loss = "all"
	// Torn: names and sizes are durable. Each 4 KiB page has or has not
	// reached the disk, at random.
	Torn Loss = "torn"
)

// Settings are the faults of a disk. They are read from a file, at the start and at SIGHUP.
type Settings struct {
	// Sync is the additional duration of a sync.
	Sync time.Duration `json:"sync,omitempty"`
	Loss Loss          `json:"loss,omitempty"`
}

// The files of disk NAME, in its parent directory:
//
//	NAME           the served directory
//	NAME.unsynced  removed files, until the removal is durable
//	NAME.json      Settings
const (
	unsyncedSuffix = ".unsynced"
	settingsSuffix = ".json"
)

// Ready is the only content of ReadyFD once the disk is mounted.
const Ready = "ready"

// File descriptors of the process that serves a disk, beside the usual three.
const (
	// NamespaceFD is the mount namespace.
	NamespaceFD = 3
	// ReadyFD gets [Ready], or an error, and is closed.
	ReadyFD = 4
)

// Args are the arguments that make this program serve the disk name in the absolute
// directory dir. target is the mount point in the namespace.
func Args(dir, name, target string) []string { return []string{"sandbox", "disk", dir, name, target} }

// IsServer reports whether the arguments of this program are those of Args. They are
// internal.
func IsServer(args []string) bool { return len(args) == 5 && args[0] == "sandbox" && args[1] == "disk" }

// SettingsFile is the path of a disk's settings.
func SettingsFile(dir, name string) string { return dir + "/" + name + settingsSuffix }

func readSettings(path string) (s Settings, err error) {
	b, err := os.ReadFile(path)
	if err == nil {
		err = json.Unmarshal(b, &s)
	}
	if err != nil {
		return Settings{}, fmt.Errorf("read settings of disk: %w", err)
	}
	return s, nil
}
