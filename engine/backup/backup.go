// Package backup keeps what an upgrade can destroy in a directory that can be judged,
// read again, and used with kubectl alone.
//
// A backup is the directory <parent>/<id>/backups:
//
//	manifest.json                 what the backup holds, written last
//	crds.json                     every CustomResourceDefinition
//	<group>/<resource>.json       objects without owners; the core group is "core"
//	<group>/<resource>.owned.json objects that have owners, without their ownerReferences
//	helm/releases.json            the records of Helm, which are Secrets
//	core/secrets.json             all other Secrets, only where asked for
//	etcd.snapshot                 only where asked for
//
// Every .json file but the manifest is a List that `kubectl create -f` takes, one object
// a line. What an API server sets itself and refuses at creation is cut out of it:
// resourceVersion, managedFields, creationTimestamp, generation, selfLink and the
// deletion's fields. The uid stays, though a new object gets another one, because owners
// are known by it. An object whose ownerReferences name a UID that is no more would be
// collected within seconds; so the references are in the manifest.
//
// The manifest gets its name when all else is on the disk, and holds size, SHA-256 and
// number of objects of each file and a SHA-256 of itself. [Backup.Verify] alone decides
// whether a backup is whole.
//
// Directories are 0700, files 0600. A directory or file that is a symbolic link, belongs
// to somebody else or may be written by others is refused. The package knows nothing of a
// cluster: what it is given are bytes.
package backup

import (
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"time"
)

// Schema is the version of the format of a backup. Additions raise its minor; a reader
// refuses another major.
const Schema = "1.0"

// Names in a backup's directory.
const (
	ManifestFile = "manifest.json"
	SnapshotFile = "etcd.snapshot"
	// Dir is the directory of a backup in that of its run.
	Dir = "backups"

	// Files whose name does not follow from group and resource, without ".json".
	CRDs     = "crds"
	Releases = "helm/releases"
)

// Manifest says what a backup holds. As JSON (lower snake case) it is manifest.json,
// which has also the owners, see [Backup.Owners], and a digest of itself.
type Manifest struct {
	Schema string `json:"schema"`
	// ID is "backup-<YYYYMMDDhhmmss>-<8 hex digits>", or begins with "upgrade-".
	ID      string    `json:"id"`
	Created time.Time `json:"created"`
	Ended   time.Time `json:"ended"`
	Cluster Cluster   `json:"cluster"`
	// Secrets is whether Secrets were asked for. The records of Helm, which are Secrets
	// too, are there in any case.
	Secrets bool `json:"secrets"`
	// Objects and Bytes count what is in Files, the snapshot's bytes included.
	Objects int64 `json:"objects"`
	Bytes   int64 `json:"bytes"`
	// Holes are what could not be read. A backup with one is not whole.
	Holes []Hole    `json:"holes"`
	Types []Type    `json:"types"`
	Files []File    `json:"files"`
	Etcd  *Snapshot `json:"etcd,omitempty"`
	// Notes are sentences for people: what vanished while it was read.
	Notes []string `json:"notes,omitempty"`
}

// Cluster is where a backup comes from.
type Cluster struct {
	// Name is what the configuration calls it; empty if there is none.
	Name string `json:"name,omitempty"`
	// ID is what the cluster's machines are bound to, in hex; empty if it is not known.
	ID string `json:"id,omitempty"`
	// UID is that of the namespace kube-system.
	UID string `json:"uid"`
	// Server is the version of the API server, such as v1.35.4.
	Server string `json:"server"`
}

// Type is a kind of objects as it was read. Two may have the same resource: Helm's
// records and all other Secrets.
type Type struct {
	Group string `json:"group"` // empty for the core group
	// Version is the one that was read: the one stored, where it is served.
	Version    string `json:"version"`
	Resource   string `json:"resource"` // plural, lower case
	Kind       string `json:"kind"`
	Namespaced bool   `json:"namespaced,omitempty"`
	// Status is whether the status is a subresource: creating an object leaves it out.
	Status bool `json:"status,omitempty"`
	// ResourceVersion is the state of the cluster that all objects of the type show.
	ResourceVersion string `json:"resource_version"`
	Objects         int64  `json:"objects"`
	// Files are the names of its files, slash-separated: that without owners first. Empty
	// if there are no objects.
	Files []string `json:"files,omitempty"`
}

// String is "widgets.example.com", or "secrets" of the core group.
func (t Type) String() string { return resourceName(t.Group, t.Resource) }

func resourceName(group, resource string) string {
	if group == "" {
		return resource
	}
	return resource + "." + group
}

// APIVersion is "example.com/v1", or "v1" of the core group.
func (t Type) APIVersion() string {
	if t.Group == "" {
		return t.Version
	}
	return t.Group + "/" + t.Version
}

// name is the name of the type's first file without ".json".
func (t Type) name() string {
	if t.Group == "" {
		return "core/" + t.Resource
	}
	return t.Group + "/" + t.Resource
}

// File is a file of a backup.
type File struct {
	// Name is slash-separated, relative to the backup's directory.
	Name    string `json:"name"`
	Size    int64  `json:"size"` // bytes
	Objects int64  `json:"objects"`
	SHA256  string `json:"sha256"` // hex
	// Owners is where the owners of its objects are in the manifest; nil unless the
	// file's objects have some.
	Owners *Span `json:"owners,omitempty"`
}

// Span is a part of the manifest, in bytes after the beginning of the owners.
type Span struct {
	At   int64 `json:"at"`
	Size int64 `json:"size"`
}

// Hole is something that the backup should hold and does not.
type Hole struct {
	Group    string `json:"group"`
	Resource string `json:"resource"` // "etcd" of no group is the snapshot
	// Reason is a sentence for people. It holds no content of an object.
	Reason string `json:"reason"`
}

// String is "widgets.example.com: reason".
func (h Hole) String() string {
	return resourceName(h.Group, h.Resource) + ": " + h.Reason
}

// Snapshot is what is known of etcd.snapshot.
type Snapshot struct {
	// Member is the machine whose etcd it is of; empty if that was not told.
	Member string `json:"member,omitempty"`
	// Revision is the revision that it shows, or one before.
	Revision int64 `json:"revision,omitempty"`
	// Version is that of etcd.
	Version string `json:"version,omitempty"`
	Size    int64  `json:"size"`   // bytes
	SHA256  string `json:"sha256"` // hex, of the whole file
	// ClusterID is that of etcd, in hex; empty if it was not told.
	ClusterID string `json:"cluster_id,omitempty"`
	// MemberID is that of Member, in hex; empty if it was not told.
	MemberID string `json:"member_id,omitempty"`
	// Witnesses are other members that had the same at the revision before it was begun.
	Witnesses []string `json:"witnesses,omitempty"`
	// Unchecked says what of it could not be compared with the API server; empty if all
	// was that can be, and for backups of before.
	Unchecked []string `json:"unchecked,omitempty"`
}

// Object is one object of a backup.
type Object struct {
	// JSON is the object as it is in its file, on one line. It is valid until the next one
	// is asked for.
	JSON []byte
	// Owners are its metadata.ownerReferences as they were, a JSON array; nil without
	// owners. Their UIDs are those of the cluster that the backup was made of.
	Owners json.RawMessage
}

// Owned tells who owned an object.
type Owned struct {
	Namespace string `json:"namespace,omitempty"`
	Name      string `json:"name"`
	UID       string `json:"uid"`
	// References are its metadata.ownerReferences as they were, a JSON array.
	References json.RawMessage `json:"references"`
}

// NotWhole is the error of a backup that is not whole. Errors that have nothing to do
// with the backup, such as the end of a context, are others.
type NotWhole struct {
	ID string
	// Damage is what is wrong with files and directories, as sentences.
	Damage []string
	// Holes are what was missing when the backup was made. Without Damage, all that the
	// backup claims to hold is there.
	Holes []Hole
}

// Error names the first reason.
func (e *NotWhole) Error() string {
	n, text := len(e.Damage)+len(e.Holes), "it is not whole"
	switch {
	case len(e.Damage) > 0:
		text = e.Damage[0]
	case len(e.Holes) > 0:
		text = "it has no " + e.Holes[0].String()
	}
	if n > 1 {
		text += fmt.Sprintf(" (and %d more)", n-1)
	}
	return "backup " + e.ID + ": " + text
}

// ErrRefused is inside the error where a directory or file is not safe to use: a symbolic
// link, somebody else's, or writable by others.
var ErrRefused = errors.New("refused")

var idRE = regexp.MustCompile(`^[a-z][a-z-]*-[0-9]{14}-[0-9a-f]{8}$`)

// ValidID reports whether id can be one of a backup: "backup-20261121070501-1a2b3c4d".
func ValidID(id string) bool { return idRE.MatchString(id) }

var partRE = regexp.MustCompile(`^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$`)

// checkName returns an error unless name can be a file of a backup.
func checkName(name string) error {
	dir, base, ok := strings.Cut(name, "/")
	if !ok {
		dir, base = "x", name
	}
	if len(name) > 400 || !partRE.MatchString(dir) || !partRE.MatchString(base) || strings.Contains(name, "..") {
		return fmt.Errorf("file name %q is not one of a backup", name)
	}
	return nil
}
