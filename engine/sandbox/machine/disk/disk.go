// Package disk is a disk that fails as disks do: it is slow, or loses at a power cut what was
// written to it and not synced.
//
// It is a directory that a process of this program serves through FUSE to one mount
// namespace, which is not this computer's; nothing is mounted anywhere else, and what is
// mounted goes with that namespace. The directory has at every moment what was written.
// The process remembers how to take back what no sync has made durable, and does so at
// SIGTERM, before it ends. If it is killed nothing is taken back.
//
// Names (of files that were made, renamed, removed) become durable with the next sync of
// anything, as in the journal of ext4; data and the size of a file with a sync of that file.
package disk

import (
	"encoding/json"
	"fmt"
	"os"
	"time"
)

// Loss is what a power cut does to what was not synced.
type Loss string

// Values of Loss.
const (
	// Nothing is lost, as when all had been written back in time.
	Nothing Loss = ""
	// All of it is lost.
	All Loss = "all"
	// Torn: names and sizes are durable, and of the pages of 4 KiB each has or has not
	// reached the disk, by chance.
	Torn Loss = "torn"
)

// Settings say how a disk fails. They are read from a file, at the start and at SIGHUP.
type Settings struct {
	// Sync is how much longer a sync takes.
	Sync time.Duration `json:"sync,omitempty"`
	Loss Loss          `json:"loss,omitempty"`
}

// A disk NAME in a directory is, below that directory:
//
//	NAME           what is served
//	NAME.unsynced  files that were removed, as long as that is not durable
//	NAME.json      Settings
const (
	unsyncedSuffix = ".unsynced"
	settingsSuffix = ".json"
)

// Ready is what is written to ReadyFD when the disk is mounted, and nothing else then.
const Ready = "ready"

// File descriptors of the process that serves a disk, beside the usual three.
const (
	// NamespaceFD is the mount namespace.
	NamespaceFD = 3
	// ReadyFD gets [Ready], or an error, and is closed.
	ReadyFD = 4
)

// Args are the arguments with which this program serves the disk name in the absolute
// directory dir as target, a path of the namespace.
func Args(dir, name, target string) []string { return []string{"sandbox", "disk", dir, name, target} }

// IsServer reports whether the arguments of this program are such ones. People do not give
// them.
func IsServer(args []string) bool { return len(args) == 5 && args[0] == "sandbox" && args[1] == "disk" }

// SettingsFile is where the settings of a disk are.
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
