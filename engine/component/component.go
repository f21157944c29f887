// Package component describes and installs the artifacts of a node: named, pinned by digest,
// fetched over HTTP or carried inline.
//
// Nothing unverified ever becomes visible under its final path. The package does not decide
// which artifacts a node needs; release data does.
package component

import (
	"crypto/sha256"
	"crypto/sha512"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"net/url"
	"path"
	"regexp"
	"strings"
)

// Component is one artifact of a node.
type Component struct {
	// Name is unique in its list: "kubeadm", "kubelet", "cni-plugins".
	Name string `json:"name"`
	// URL is http(s), or data: for small inline content.
	URL string `json:"url"`
	// Digest is "sha256:<64 hex>" or "sha512:<128 hex>" of the downloaded bytes. It is required.
	Digest string `json:"digest"`
	// Path is absolute: the file to write or, with Extract, the directory to fill.
	Path string `json:"path"`
	// Mode is the permission of the file, such as 0o755. Zero means 0o755 for
	// a downloaded file. Archives carry their own modes.
	Mode uint32 `json:"mode,omitempty"`
	// Extract says that the artifact is a .tar.gz to unpack below Path.
	Extract bool `json:"extract,omitempty"`
}

// List has the artifacts of a node, in the order of installation.
type List []Component

// Signed is a list with its statement.
type Signed struct {
	List List
	// Statement is that of a release builder, see package release. If empty, no builder vouches
	// for the list, and no machine of an image with release keys installs it.
	Statement string
	// Agent is the enrolment program for agents that verify no statements, see package release;
	// nil: there is none. It is not part of the list.
	Agent *Component
}

// ErrDigest means that the downloaded bytes differ from the digest. A retry helps only after
// the source was fixed, or with a new list.
var ErrDigest = errors.New("digest mismatch")

// Digest identifies the list by everything that determines the installation: a change of any
// field of any component, or of their order, changes it. The form is "sha256:<64 hex>".
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

// newHash returns the hash function that c's digest names.
func (c Component) newHash() hash.Hash {
	if strings.HasPrefix(c.Digest, "sha512:") {
		return sha512.New()
	}
	return sha256.New()
}

// digestOf returns what h has hashed, in the form of c's digest.
func (c Component) digestOf(h hash.Hash) string {
	name, _, _ := strings.Cut(c.Digest, ":")
	return name + ":" + hex.EncodeToString(h.Sum(nil))
}

// short is the beginning of c's digest for names of temporary files.
func (c Component) short() string {
	_, sum, _ := strings.Cut(c.Digest, ":")
	return sum[:16]
}

var (
	nameRE   = regexp.MustCompile(`^[a-z0-9][a-z0-9._+-]{0,62}$`)
	digestRE = regexp.MustCompile(`^(sha256:[0-9a-f]{64}|sha512:[0-9a-f]{128})$`)
)

// Validate returns what is wrong with c, naming the field, or nil.
func (c Component) Validate() error {
	switch {
	case !nameRE.MatchString(c.Name):
		return fmt.Errorf("component %q: name: want at most 63 lower-case letters, digits and . _ + -", c.Name)
	case !digestRE.MatchString(c.Digest):
		return fmt.Errorf("component %s: digest: want sha256: and 64 hex digits, or sha512: and 128", c.Name)
	case !path.IsAbs(c.Path) || path.Clean(c.Path) != c.Path || strings.ContainsRune(c.Path, 0) || c.Path == "/":
		return fmt.Errorf("component %s: path %q is not absolute and clean", c.Name, c.Path)
	case c.Mode&^0o777 != 0:
		return fmt.Errorf("component %s: mode %#o has other bits than permissions", c.Name, c.Mode)
	case c.Mode&0o022 != 0:
		return fmt.Errorf("component %s: mode %#o lets others write", c.Name, c.Mode)
	}
	// errors of url.Parse repeat the URL, which may carry a signature
	scheme, _, _ := strings.Cut(c.URL, ":")
	switch strings.ToLower(scheme) {
	case "data":
	case "http", "https":
		if u, err := url.Parse(c.URL); err != nil || u.Host == "" {
			return fmt.Errorf("component %s: url is malformed", c.Name)
		}
	default:
		return fmt.Errorf("component %s: url: want http, https or data", c.Name)
	}
	return nil
}

// Validate returns everything that is wrong with the list, or nil: names and
// paths must be unique beside what each component must hold to.
func (l List) Validate() error {
	var errs []error
	names, paths := map[string]bool{}, map[string]string{}
	for _, c := range l {
		if err := c.Validate(); err != nil {
			errs = append(errs, err)
			continue
		}
		if names[c.Name] {
			errs = append(errs, fmt.Errorf("component %s is listed twice", c.Name))
		}
		names[c.Name] = true
		// Several archives may fill one directory; a file has one source.
		if other, ok := paths[c.Path]; ok && !c.Extract {
			errs = append(errs, fmt.Errorf("components %s and %s have the same path %s", other, c.Name, c.Path))
		}
		if !c.Extract {
			paths[c.Path] = c.Name
		}
	}
	return errors.Join(errs...)
}
