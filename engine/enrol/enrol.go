// Package enrol answers: how does a machine get what a node needs before it is one, and how is it given
// back?
//
// [Install] brings a [Spec] to a machine by SSH: files, Debian packages, and units that start. [Remove]
// takes it back. Both can be repeated after an interruption at any point. Files that the machine has
// already are not sent again.
//
// Before the first change, the machine gets a [Journal] of its previous files and of our changes. From it,
// Remove restores each file that was replaced, and deletes those that did not exist. A lock on the machine
// keeps a second console out. A machine that is enrolled for another cluster is refused.
//
// The package never judges whether a machine can become a node (package machinecheck), and never makes it
// one. Secrets are only in files that it uploads: in no argument, error or journal.
package enrol

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"regexp"
	"slices"
	"time"

	"constellation/engine/plan"
	"constellation/engine/sshhost"
)

// Spec is what a machine gets.
type Spec struct {
	// Cluster is the unique ID of the cluster that the machine is for, and ClusterName its name.
	Cluster, ClusterName string
	// Machine is the name of the machine in this cluster.
	Machine string
	// Others are the names of the other machines of the cluster. A machine with the journal of one of them is a copy.
	Others []string
	// Release is the release of this program.
	Release  string
	Files    []File
	Packages []Package
	// Debs are the packages, and what they depend on, as PackageFiles returns them. Without any, apt gets them from
	// the repositories of the machine, by Proxy if that is not empty.
	Debs  []File
	Proxy string
	Units []Unit
	// Trees are folders and files that programs of the machine write after the enrolment. Those that did not
	// exist before are deleted when the machine is removed.
	Trees []string
	// Part marks a Spec with a part of what the machine gets. A machine that is not enrolled is refused.
	Part bool
}

// File is a file of the machine, with owner root.
type File struct {
	// Path is absolute.
	Path string
	Mode fs.FileMode
	// Data is its content, unless Local names a file of this computer with it.
	Data  []byte
	Local string
	// Link makes the file a symbolic link to this path.
	Link string
	// Default is a package whose own configuration the file replaces. A file that differs from that of the
	// package was changed by hand, and stays. The result names what a node Needs of it.
	Default, Needs string
	// Own refuses a machine whose file is neither of an enrolment nor that of Default. Needs is what to do then.
	Own bool
	// Keep leaves anything that exists at Path as it is.
	Keep bool
}

// Package is a Debian package.
type Package struct {
	Name string
	// Program is a file of it. If it exists, the package is not installed.
	Program string
}

// Unit is a unit of systemd.
type Unit struct {
	Name string
	// Start enables and starts it. Others are only stopped when the machine is removed.
	Start bool
	// Reload has it read its files again in place of a restart.
	Reload bool
}

// Causes of errors. Each error that wraps one of them has a remedy.
var (
	// ErrHeld: another console works on the machine.
	ErrHeld = errors.New("another console works on the machine")
	// ErrOtherCluster: the machine is enrolled for another cluster.
	ErrOtherCluster = errors.New("the machine is enrolled for another cluster")
	// ErrNotEnrolled: there is no journal.
	ErrNotEnrolled = errors.New("the machine is not enrolled")
)

// Machine runs commands and writes files on a machine. *sshhost.Host implements it.
type Machine interface {
	Run(context.Context, sshhost.Command) (sshhost.Result, error)
	Upload(ctx context.Context, file string, mode fs.FileMode, size int64, r io.Reader) error
	Target() sshhost.Target
}

// Request is one enrolment or removal.
type Request struct {
	Spec Spec
	// The lock names this console: the user and the computer, such as admin@laptop.
	Who string
	Now func() time.Time
	// Rejoin makes Install reset a node that its cluster does not have any more, so that it can join again.
	Rejoin bool
	// Prepare is called by Install when the files are in place, before units start; Reset by Remove and by Rejoin
	// when units are stopped, before files change. Both may be nil, and both are called again after an interruption.
	Prepare, Reset func(context.Context, Machine) error
	// Report is called at the begin of each step. It may be nil.
	Report func(Step)

	state, lock string // folder and file on the machine; empty: the defaults
}

// Step is a step of an enrolment or removal.
type Step struct {
	// Title names it: install packages, send /usr/lib/constellation/agent.
	Title string
	// Done and Total count the steps. Total is 0 until it is known.
	Done, Total int
}

// Outcome is what Install or Remove did.
type Outcome struct {
	// Changes are what was changed, one sentence each. Without any, all was as it should be.
	Changes []string `json:"changes"`
	// Notes are what the user should know: files that were kept.
	Notes []string `json:"notes,omitempty"`
}

// Paths on a machine.
const (
	// StateDir has the journal and copies of files. It is 0700.
	StateDir = "/var/lib/constellation-enrolment"
	lockFile = "/run/constellation-enrolment.lock"

	journalFile = "journal.json"
	copiesDir   = "before"
	debsDir     = "packages"
)

// Limits of the time that commands take.
const (
	limit        = 2 * time.Minute
	packageLimit = 15 * time.Minute
)

var (
	pathRE = regexp.MustCompile(`^(/[A-Za-z0-9._@+:-]+)+$`)
	nameRE = regexp.MustCompile(`^[a-zA-Z0-9][A-Za-z0-9.@+:_-]{0,200}$`)
)

func validPath(s string) bool { return pathRE.MatchString(s) && path.Clean(s) == s }

// validate returns an error for a Spec that scripts could misread.
func (s *Spec) validate() error {
	if s.Cluster == "" || s.Machine == "" {
		return errors.New("enrol a machine: the cluster or the name is empty")
	}
	for i, f := range s.Files {
		switch {
		case !validPath(f.Path):
			return fmt.Errorf("enrol %s: %q is no path of a file", s.Machine, f.Path)
		case f.Link != "" && !validPath(f.Link):
			return fmt.Errorf("enrol %s: %q is no target of a link", s.Machine, f.Link)
		case f.Link == "" && f.Mode&^fs.ModePerm != 0 || f.Link == "" && f.Mode == 0:
			return fmt.Errorf("enrol %s: %s has the mode %s", s.Machine, f.Path, f.Mode)
		case slices.ContainsFunc(s.Files[:i], func(g File) bool { return g.Path == f.Path }):
			return fmt.Errorf("enrol %s: %s is there twice", s.Machine, f.Path)
		}
	}
	for _, t := range s.Trees {
		if !validPath(t) || path.Dir(path.Dir(t)) == "/" && path.Dir(t) == "/" {
			return fmt.Errorf("enrol %s: %q is no folder that may be deleted", s.Machine, t)
		}
	}
	for _, p := range s.Packages {
		if !nameRE.MatchString(p.Name) || !validPath(p.Program) {
			return fmt.Errorf("enrol %s: %q with %q is no package", s.Machine, p.Name, p.Program)
		}
	}
	if s.Proxy != "" && !ValidProxy(s.Proxy) {
		return fmt.Errorf("enrol %s: the proxy is no http://HOST:PORT without a password", s.Machine)
	}
	for _, u := range s.Units {
		if !nameRE.MatchString(u.Name) {
			return fmt.Errorf("enrol %s: %q is no unit", s.Machine, u.Name)
		}
	}
	return nil
}

// open returns the content of a file and its size. The caller closes it.
func (f File) open() (io.ReadCloser, int64, error) {
	if f.Local == "" {
		return io.NopCloser(bytes.NewReader(f.Data)), int64(len(f.Data)), nil
	}
	r, err := os.Open(f.Local)
	if err != nil {
		return nil, 0, err
	}
	info, err := r.Stat()
	if err != nil {
		_ = r.Close()
		return nil, 0, err
	}
	return r, info.Size(), nil
}

// digest is the SHA-256 of the content, in hexadecimal.
func (f File) digest() (string, error) {
	r, _, err := f.open()
	if err != nil {
		return "", err
	}
	defer r.Close()
	h := sha256.New()
	if _, err := io.Copy(h, r); err != nil {
		return "", fmt.Errorf("read %s: %w", f.Local, err)
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

// wants are the state that each file should have.
func (s *Spec) wants() ([]entry, error) {
	out := make([]entry, len(s.Files))
	for i, f := range s.Files {
		if f.Link != "" {
			out[i] = entry{Kind: kindLink, Target: f.Link}
			continue
		}
		sum, err := f.digest()
		if err != nil {
			return nil, &plan.Error{Op: "enrol " + s.Machine, Err: err, Remedy: "check the file on this computer, then run the command again"}
		}
		out[i] = entry{Kind: kindFile, Mode: fmt.Sprintf("%o", f.Mode), Owner: "0:0", Digest: sum}
	}
	return out, nil
}
