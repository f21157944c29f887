package engine

import (
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
	"strings"
	"time"

	"constellation/engine/plan"
	"constellation/engine/release"
	"constellation/engine/workspace"
)

// Defaults of a root.
const (
	DefaultRootExpiry = release.DefaultRootExpiry
	DefaultIndexDays  = release.DefaultIndexDays
)

// RootKey is a key in a root.
type RootKey = release.RootKey

// RootReport describes the file of the root of a feed.
type RootReport struct {
	Schema string `json:"schema"`
	File   string `json:"file"`
	// Identity is that of the feed, Digest that of the newest version.
	Identity string `json:"identity"`
	Digest   string `json:"digest"`
	release.Root
	// Signers signed the newest version. Missing is why it is not valid; empty if it is.
	Signers []RootKey `json:"signers"`
	Missing string    `json:"missing,omitempty"`
}

// RootNew describes the first version of a root. Keys and IndexKeys are files with public keys.
type RootNew struct {
	Out             string
	Threshold       int
	Keys, IndexKeys []string
	Valid           time.Duration
	IndexDays       int
}

// RootChange describes the next version of a root. Keys to add are files with public keys; those to
// remove are such files, or IDs.
type RootChange struct {
	File                                               string
	AddKeys, RemoveKeys, AddIndexKeys, RevokeIndexKeys []string
	Threshold, IndexDays                               int
	Valid                                              time.Duration
}

// NewRoot writes a file with the first version of a root without signatures.
func NewRoot(n RootNew) (RootReport, error) {
	o := release.NewRootOptions{Threshold: n.Threshold, Expires: n.Valid, IndexDays: n.IndexDays, Now: time.Now()}
	var err error
	if o.Keys, err = readPublicKeys(n.Keys); err != nil {
		return RootReport{}, err
	}
	if o.IndexKeys, err = readPublicKeys(n.IndexKeys); err != nil {
		return RootReport{}, err
	}
	r, err := release.NewRoots(o)
	if err != nil {
		return RootReport{}, &plan.Error{Op: "make root " + n.Out, Err: err, Exit: plan.ExitUsage, Remedy: "see `constellation release root new --help`"}
	}
	if err := writeNew(n.Out, r.Bytes(), 0o644); err != nil {
		e := &plan.Error{Op: "write " + n.Out, Err: workspace.WithoutPath(err), Exit: plan.ExitUsage, Remedy: "pass a file in an existing, writable folder"}
		if errors.Is(err, os.ErrExist) {
			e.Remedy = "pass another file: an existing root is changed with `constellation release root change`"
		}
		return RootReport{}, e
	}
	return rootReport(n.Out, r), nil
}

// ChangeRoot adds a version to the file of a root without signatures.
func ChangeRoot(c RootChange) (RootReport, error) {
	r, err := readRoot(c.File)
	if err != nil {
		return RootReport{}, err
	}
	next := release.RootChange{Threshold: c.Threshold, IndexDays: c.IndexDays, Expires: c.Valid, Now: time.Now()}
	if next.AddKeys, err = readPublicKeys(c.AddKeys); err != nil {
		return RootReport{}, err
	}
	if next.AddIndexKeys, err = readPublicKeys(c.AddIndexKeys); err != nil {
		return RootReport{}, err
	}
	if next.RemoveKeys, err = keyIDs(c.RemoveKeys); err != nil {
		return RootReport{}, err
	}
	if next.RevokeIndexKeys, err = keyIDs(c.RevokeIndexKeys); err != nil {
		return RootReport{}, err
	}
	if err := r.Change(next); err != nil {
		e := &plan.Error{Op: "change root " + c.File, Err: err, Exit: plan.ExitUsage, Remedy: "see `constellation release root show " + c.File + "`"}
		if errors.Is(err, release.ErrUnsigned) {
			e.Remedy = "sign the pending version with `constellation release root sign`, or discard it: start from the root.json of the feed"
		}
		return RootReport{}, e
	}
	return writeRoot(c.File, r)
}

// SignRoot adds the signature of a key to the newest version in the file of a root. If begins is not
// empty, the digest of that version must begin with it.
func SignRoot(file, keyFile, begins string) (RootReport, error) {
	r, err := readRoot(file)
	if err != nil {
		return RootReport{}, err
	}
	if !strings.HasPrefix(r.Digest(), strings.ToLower(begins)) {
		return RootReport{}, &plan.Error{
			Op: "sign root " + file, Err: fmt.Errorf("its digest is %s", r.Digest()), Exit: plan.ExitUsage,
			Remedy: "compare the file with that of the other signers, and sign none of them until they agree",
		}
	}
	key, err := readPrivateKey(keyFile)
	if err != nil {
		return RootReport{}, err
	}
	if err := r.Sign(key); err != nil {
		return RootReport{}, &plan.Error{Op: "sign root " + file, Err: err, Exit: plan.ExitUsage, Remedy: "pass the private key of a root key with --key"}
	}
	return writeRoot(file, r)
}

// ShowRoot returns what is in the file of a root.
func ShowRoot(file string) (RootReport, error) {
	r, err := readRoot(file)
	if err != nil {
		return RootReport{}, err
	}
	return rootReport(file, r), nil
}

func rootReport(file string, r *release.Roots) RootReport {
	out := RootReport{Schema: plan.Schema, File: file, Identity: r.Identity(), Digest: r.Digest(), Root: r.Newest(), Signers: r.Signers()}
	if err := r.Missing(); err != nil {
		out.Missing = err.Error()
	}
	return out
}

func readRoot(file string) (*release.Roots, error) {
	const remedy = "pass the file that `constellation release root new` made, or the root.json of a feed"
	b, err := os.ReadFile(file)
	if err != nil {
		return nil, &plan.Error{Op: "read root " + file, Err: workspace.WithoutPath(err), Exit: plan.ExitUsage, Remedy: remedy}
	}
	r, err := release.ParseRootDraft(b)
	if err != nil {
		return nil, &plan.Error{Op: "read root " + file, Err: err, Exit: plan.ExitUsage, Remedy: remedy}
	}
	return r, nil
}

func writeRoot(file string, r *release.Roots) (RootReport, error) {
	err := writeWhole(file, func(w io.Writer) error {
		_, err := w.Write(r.Bytes())
		return err
	})
	if err != nil {
		return RootReport{}, &plan.Error{Op: "write " + file, Err: workspace.WithoutPath(err), Remedy: "check that the folder is writable and has room: the file was not changed"}
	}
	return rootReport(file, r), nil
}

// readPublicKeys reads files with public keys for a root.
func readPublicKeys(files []string) ([]release.Key, error) {
	keys, err := readFeedKeys(files)
	for _, k := range keys {
		if k.IsRoot() {
			return nil, &plan.Error{Op: "read key " + k.File, Err: errors.New("it is the root of a feed"), Exit: plan.ExitUsage, Remedy: "pass a file with a public key, such as feed.key.pub"}
		}
	}
	return keys, err
}

var keyIDRE = regexp.MustCompile(`^[0-9a-f]{16}$`)

// keyIDs returns the IDs of keys, which are IDs or files with public keys.
func keyIDs(names []string) (out []string, err error) {
	for _, name := range names {
		if _, err := os.Stat(name); err != nil && keyIDRE.MatchString(name) {
			out = append(out, name)
			continue
		}
		keys, err := readPublicKeys([]string{name})
		if err != nil {
			return nil, err
		}
		for _, k := range keys {
			out = append(out, k.ID())
		}
	}
	return out, nil
}

// readPrivateKey reads a key that signs feeds or roots.
func readPrivateKey(file string) (*release.PrivateKey, error) {
	pem, err := os.ReadFile(file)
	if err != nil {
		return nil, &plan.Error{Op: "read key " + file, Err: workspace.WithoutPath(err), Exit: plan.ExitUsage, Remedy: "make one with `constellation release key new " + file + "`"}
	}
	key, err := release.ParsePrivateKey(keyName(file), pem)
	if err != nil {
		return nil, &plan.Error{Err: err, Exit: plan.ExitUsage, Remedy: "name the private key that `constellation release key new` made"}
	}
	return key, nil
}
