// Package backup stores the objects that an upgrade can destroy in a directory that can be
// verified, read again, and used with kubectl alone.
//
// A backup is the directory <parent>/<id>/backups:
//
//	manifest.json                 description of the backup, written last
//	crds.json                     every CustomResourceDefinition
//	<group>/<resource>.json       objects without owners; the core group is "core"
//	<group>/<resource>.owned.json objects that have owners, without their ownerReferences
//	helm/releases.json            the records of Helm, which are Secrets
//	core/secrets.json             all other Secrets, only on request
//	etcd.snapshot                 only on request
//
// Every .json file except the manifest is a List for `kubectl create -f`, one object per
// line. Fields that an API server sets itself and rejects at creation are removed:
// resourceVersion, managedFields, creationTimestamp, generation, selfLink and the
// deletion's fields. The uid stays, although a new object gets another one, because it
// identifies owners. The garbage collector would delete an object whose ownerReferences
// name an old UID within seconds, so the references are in the manifest.
//
// The manifest gets its name when all other files are on disk. It has size, SHA-256 and
// number of objects of each file, and a SHA-256 of itself. [Backup.Verify] alone decides
// whether a backup is whole. With a secret, the manifest ends with an HMAC-SHA256 of itself, so
// that a backup that others changed or made is recognized.
//
// A backup can be encrypted: see [Writer.Encrypt].
//
// Directories are 0700, files 0600. A directory or file is refused if it is a symbolic
// link, or owned or writable by other users. The package handles bytes and has no access
// to a cluster.
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
const Schema = "1.1"

// File names in a backup's directory.
const (
	ManifestFile = "manifest.json"
	SnapshotFile = "etcd.snapshot"
	// Dir is the backup's directory below that of its run.
	Dir = "backups"

	// Files whose name does not follow from group and resource, without ".json".
	CRDs     = "crds"
	Releases = "helm/releases"
)

// Manifest describes a backup's content. As JSON (lower snake case) it is manifest.json, which
// additionally has the owners, see [Backup.Owners], and a digest of itself.
type Manifest struct {
	Schema string `json:"schema"`
	// ID is "backup-<YYYYMMDDhhmmss>-<8 hex digits>", or begins with "upgrade-".
	ID      string    `json:"id"`
	Created time.Time `json:"created"`
	Ended   time.Time `json:"ended"`
	Cluster Cluster   `json:"cluster"`
	// Secrets is whether Secrets were requested. The records of Helm, which are Secrets too, are
	// always included.
	Secrets bool `json:"secrets"`
	// Objects and Bytes are the sums over Files, including the snapshot's bytes.
	Objects int64 `json:"objects"`
	Bytes   int64 `json:"bytes"`
	// Holes are types that could not be read. A backup with a hole is not whole.
	Holes []Hole    `json:"holes"`
	Types []Type    `json:"types"`
	Files []File    `json:"files"`
	Etcd  *Snapshot `json:"etcd,omitempty"`
	// Notes are sentences for users: kinds that disappeared during the backup.
	Notes []string `json:"notes,omitempty"`
	// AuthenticatedBy is the ID of the key of the tag at the end of manifest.json; empty without
	// a tag. The key is derived from a secret and Cluster.UID.
	AuthenticatedBy string `json:"authenticated_by,omitempty"`
	// Encrypted is set if the files are encrypted. Without an identity, the fields above are then those that a list
	// needs.
	Encrypted *Encryption `json:"encrypted,omitempty"`
}

// Cluster is the origin of a backup.
type Cluster struct {
	// Name is from the configuration; empty if it has none.
	Name string `json:"name,omitempty"`
	// ID is the cluster ID to which machines are bound, in hex; empty if unknown.
	ID string `json:"id,omitempty"`
	// UID is that of the namespace kube-system.
	UID string `json:"uid"`
	// Server is the version of the API server, such as v1.35.4.
	Server string `json:"server"`
}

// Type is a kind of objects in the version that was read. Two types may have the same
// resource: Helm's records and all other Secrets.
type Type struct {
	Group string `json:"group"` // empty for the core group
	// Version is the version that was read: the storage version if it is served.
	Version    string `json:"version"`
	Resource   string `json:"resource"` // plural, lower case
	Kind       string `json:"kind"`
	Namespaced bool   `json:"namespaced,omitempty"`
	// Status is whether the status is a subresource, which is ignored at creation.
	Status bool `json:"status,omitempty"`
	// ResourceVersion is the state of the cluster that all objects of the type are from.
	ResourceVersion string `json:"resource_version"`
	Objects         int64  `json:"objects"`
	// Files are the names of its files, slash-separated, the one without owners first. Empty
	// without objects.
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
	SHA256  string `json:"sha256"` // hex; empty of the content of an encrypted file but a snapshot
	// Owners is the position of the objects' owners in the manifest; nil without owners.
	Owners *Span `json:"owners,omitempty"`
	// Stored is the name of the encrypted file; empty without encryption. Skip are its parts that do not belong to the
	// content, in bytes of what age decrypts.
	Stored string `json:"stored,omitempty"`
	Skip   []Span `json:"skip,omitempty"`
}

// Span is a part of the manifest, in bytes after the start of the owners.
type Span struct {
	At   int64 `json:"at"`
	Size int64 `json:"size"`
}

// Hole is a type that the backup lacks.
type Hole struct {
	Group    string `json:"group"`
	Resource string `json:"resource"` // "etcd" without group is the snapshot
	// Reason is a sentence for users, without content of an object.
	Reason string `json:"reason"`
}

// String is "widgets.example.com: reason".
func (h Hole) String() string {
	return resourceName(h.Group, h.Resource) + ": " + h.Reason
}

// Snapshot describes etcd.snapshot.
type Snapshot struct {
	// Member is the machine of the etcd member; empty if unknown.
	Member string `json:"member,omitempty"`
	// Revision is the revision of the snapshot, or one less.
	Revision int64 `json:"revision,omitempty"`
	// Version is that of etcd.
	Version string `json:"version,omitempty"`
	Size    int64  `json:"size"`   // bytes
	SHA256  string `json:"sha256"` // hex, of the whole file
	// ClusterID is the ID of the etcd cluster, in hex; empty in older backups.
	ClusterID string `json:"cluster_id,omitempty"`
	// MemberID is the ID of Member, in hex; empty in older backups.
	MemberID string `json:"member_id,omitempty"`
	// Witnesses are other members of etcd with the same hash at the revision before the
	// snapshot.
	Witnesses []string `json:"witnesses,omitempty"`
	// Unchecked describes the part that could not be compared with the API server; empty if all
	// was compared, and in older backups.
	Unchecked []string `json:"unchecked,omitempty"`
}

// Object is one object of a backup.
type Object struct {
	// JSON is the object as stored, on one line. It is valid until the next iteration.
	JSON []byte
	// Owners are its original metadata.ownerReferences, a JSON array; nil without owners. Their
	// UIDs are from the backup's cluster.
	Owners json.RawMessage
}

// Owned has the owners of an object.
type Owned struct {
	Namespace string `json:"namespace,omitempty"`
	Name      string `json:"name"`
	UID       string `json:"uid"`
	// References are its original metadata.ownerReferences, a JSON array.
	References json.RawMessage `json:"references"`
}

// NotWhole is the error of a backup that is not whole. Errors unrelated to the backup, such as
// the end of a context, are not wrapped by it.
type NotWhole struct {
	ID string
	// Damage lists problems of files and directories, as sentences.
	Damage []string
	// Holes are the gaps since the backup was made. Without Damage, all content that the manifest
	// lists is intact.
	Holes []Hole
}

// Error names the first reason.
func (e *NotWhole) Error() string {
	n, text := len(e.Damage)+len(e.Holes), "it is not whole"
	switch {
	case len(e.Damage) > 0:
		text = e.Damage[0]
	case len(e.Holes) > 0:
		text = "it lacks " + e.Holes[0].String()
	}
	if n > 1 {
		text += fmt.Sprintf(" (and %d more)", n-1)
	}
	return "backup " + e.ID + ": " + text
}

// ErrRefused is wrapped if a directory or file is not safe to use: a symbolic link, or owned
// or writable by other users.
var ErrRefused = errors.New("refused")

var idRE = regexp.MustCompile(`^[a-z][a-z-]*-[0-9]{14}-[0-9a-f]{8}$`)

// ValidID reports whether id has the form of a backup's ID: "backup-20261121070501-1a2b3c4d".
func ValidID(id string) bool { return idRE.MatchString(id) }

var partRE = regexp.MustCompile(`^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$`)

// labelRE matches versions and resources of types (RFC 1035 labels).
var labelRE = regexp.MustCompile(`^[a-z]([a-z0-9-]*[a-z0-9])?$`)

// checkName returns an error unless name has the form of a backup's file.
func checkName(name string) error {
	dir, base, ok := strings.Cut(name, "/")
	if !ok {
		dir, base = "x", name
	}
	if len(name) > 400 || !partRE.MatchString(dir) || !partRE.MatchString(base) || strings.Contains(name, "..") {
		return fmt.Errorf("invalid file name %q in a backup", name)
	}
	return nil
}
