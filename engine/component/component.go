// Package component describes what a node must have installed, and installs it:
// named artifacts, pinned by digest, fetched over HTTP or carried inline.
//
// Nothing unverified ever becomes visible under its final path. The package never
// decides which artifacts a node needs; release data does.
package component

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
)

// Component is one artifact of a node.
type Component struct {
	// Name is unique in its list: "kubeadm", "kubelet", "cni-plugins".
	Name string `json:"name"`
	// URL is http(s), or data: for small inline content.
	URL string `json:"url"`
	// Digest is "sha256:<64 hex>" of the downloaded bytes. It is required.
	Digest string `json:"digest"`
	// Path is absolute: the file to write or, with Extract, the directory to fill.
	Path string `json:"path"`
	// Mode is the permission of the file, such as 0o755. Zero means 0o755 for
	// a downloaded file. Archives carry their own modes.
	Mode uint32 `json:"mode,omitempty"`
	// Extract says that the artifact is a .tar.gz to unpack below Path.
	Extract bool `json:"extract,omitempty"`
}

// List is what a node must have, in the order in which it is described.
type List []Component

// ErrDigest means that the bytes are not the ones named. It is final: trying
// again without a new list cannot help.
var ErrDigest = errors.New("digest mismatch")

// Digest names the list by everything that decides what is installed: a change
// of any field of any component, or of their order, changes it. The form is
// "sha256:<64 hex>".
func (l List) Digest() string {
	// Marshalling a struct of strings cannot fail; field order is fixed by the type.
	b, err := json.Marshal(l)
	if err != nil {
		panic(fmt.Sprintf("marshal component list: %v", err))
	}
	sum := sha256.Sum256(b)
	return "sha256:" + hex.EncodeToString(sum[:])
}

// ByName returns the component called name.
func (l List) ByName(name string) (Component, bool) {
	for _, c := range l {
		if c.Name == name {
			return c, true
		}
	}
	return Component{}, false
}
