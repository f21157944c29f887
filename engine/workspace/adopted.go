package workspace

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	"gopkg.in/yaml.v3"

	"constellation/engine/cloud"
	"constellation/engine/cloud/machines"
	"constellation/engine/cloud/section"
	"constellation/engine/plan"
	"constellation/engine/release"
)

// JournalFile lists the files that an adoption wrote, with their digests.
const JournalFile = ".constellation-adopted.json"

// ErrAdopted is inside the error of a verb that needs more than an adopted cluster has.
var ErrAdopted = errors.New("its cluster was adopted, and the operator is not installed there")

// adoptedError is the error of a verb that cannot work with an adopted cluster.
func (w *Workspace) adoptedError() error {
	return &plan.Error{
		Op: "use workspace " + w.root, Err: ErrAdopted, Exit: plan.ExitUsage,
		Remedy: "install it with `constellation adopt --operator`, or upgrade with kubeadm: `constellation check` shows what stands against an upgrade, and `kubeadm upgrade plan` on a control plane the versions",
	}
}

// NeedsOperator returns the error of a verb that needs the operator; nil unless the cluster was adopted.
// The error has plan.ExitUsage and wraps [ErrAdopted].
func (w *Workspace) NeedsOperator() error {
	if !w.Unmanaged() {
		return nil
	}
	return w.adoptedError()
}

// Unmanaged reports whether this is the workspace of an adopted cluster without our operator.
func (w *Workspace) Unmanaged() bool {
	s, err := w.State()
	return err == nil && s.Unmanaged()
}

// Managed reports whether this is the workspace of an adopted cluster with our operator.
func (w *Workspace) Managed() bool {
	s, err := w.State()
	return err == nil && s.Adopted() && !s.Unmanaged()
}

// Touched reports whether the cluster of this workspace, which was adopted, may have something of ours: the first
// step of installing the operator makes the signing key.
func (w *Workspace) Touched() bool { return w.Managed() || w.IsAdopted() && w.Has(SigningKeyFile) }

// SetManaged notes whether the operator is installed in the adopted cluster.
func (w *Workspace) SetManaged(yes bool) error {
	unlock, err := w.lockDir()
	if err != nil {
		return err
	}
	defer unlock()
	s, err := w.State()
	if err != nil || !s.Adopted() || s.Unmanaged() != yes {
		return err
	}
	if s.Infrastructure.Section = nil; yes {
		s.Infrastructure.Section = section.Values{managedField: true}
	}
	b, err := s.marshal()
	if err != nil {
		return fmt.Errorf("write %s: %w", StateFile, err)
	}
	return w.writeAdopted(StateFile, b)
}

// SigningKeyFile has the private key that signs what machines of an adopted cluster, and enrolled ones, install. It
// is 0600.
const SigningKeyFile = "constellation-signing-key.pem"

// SigningKeyIfAny returns the key of an adopted cluster; nil if there is none yet.
func (w *Workspace) SigningKeyIfAny() (*release.PrivateKey, error) {
	b, err := w.read(SigningKeyFile)
	if errors.Is(err, ErrAbsent) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	k, err := release.ParsePrivateKey(SigningKeyFile, b)
	if err != nil {
		return nil, &plan.Error{Err: err, Exit: plan.ExitUsage, Remedy: "restore the file from your copy"}
	}
	return k, nil
}

// SigningKey is SigningKeyIfAny. It makes a key if there is none.
func (w *Workspace) SigningKey() (*release.PrivateKey, error) {
	unlock, err := w.lockDir()
	if err != nil {
		return nil, err
	}
	defer unlock()
	return w.signingKey(func(b []byte) error { return w.writeAdopted(SigningKeyFile, b) })
}

// signingKey is SigningKey, which write stores. The caller holds the lock of the directory.
func (w *Workspace) signingKey(write func([]byte) error) (*release.PrivateKey, error) {
	k, err := w.SigningKeyIfAny()
	if k != nil || err != nil {
		return k, err
	}
	if k, err = release.NewPrivateKey(SigningKeyFile); err != nil {
		return nil, fmt.Errorf("make %s: %w", SigningKeyFile, err)
	}
	b, err := k.PrivatePEM()
	if err != nil {
		return nil, fmt.Errorf("make %s: %w", SigningKeyFile, err)
	}
	return k, write(b)
}

// writeAdopted writes a file of an adoption, with its digest in the journal first. The caller holds the lock
// of the directory.
func (w *Workspace) writeAdopted(name string, b []byte) error {
	j, err := w.journal()
	if err != nil {
		return err
	}
	entry := journalFile{Name: name, SHA256: digest(b)}
	if i := slices.IndexFunc(j.Files, func(f journalFile) bool { return f.Name == name }); i >= 0 {
		entry.Was = j.Files[i].SHA256
		j.Files[i] = entry
	} else {
		j.Files = append(j.Files, entry)
	}
	if err := w.writeJournal(j); err != nil {
		return err
	}
	return w.Write(name, b, 0o600)
}

func (w *Workspace) writeJournal(j *journal) error {
	b, err := json.MarshalIndent(j, "", "  ")
	if err != nil {
		return fmt.Errorf("write %s: %w", JournalFile, err)
	}
	return w.Write(JournalFile, append(b, '\n'), 0o600)
}

// IsAdopted reports whether this is the workspace of an adopted cluster.
func (w *Workspace) IsAdopted() bool {
	s, err := w.State()
	return err == nil && s.Adopted()
}

// Adoption is what a workspace must know about a cluster that exists already.
type Adoption struct {
	// Name is the name of the cluster, UID identifies it, Kubernetes is the version of its API server.
	Name, UID, Kubernetes string
	// Server is the address of its API server, Kubeconfig leads there.
	Server     string
	Kubeconfig []byte
	Machines   []machines.Machine
}

// journal is the content of JournalFile. It is written before the files that it lists.
type journal struct {
	Schema  string        `json:"schema"`
	UID     string        `json:"uid"`
	Server  string        `json:"server"`
	Created time.Time     `json:"created"`
	Files   []journalFile `json:"files"`
}

// journalFile is one file of a journal.
type journalFile struct {
	Name   string `json:"name"`
	SHA256 string `json:"sha256"`
	// Was is the digest before the last change of ours; empty if there was none.
	Was string `json:"was,omitempty"`
}

func digest(b []byte) string {
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}

// adoptedFiles are the names of the files that an adoption writes, in this order. The state comes
// last: with it, the folder is a workspace.
var adoptedFiles = []string{KubeconfigFile, ConfigFile, StateFile}

// Adopt writes the workspace of a cluster that exists already, and returns the names of the files that
// it wrote; none if all are there. An adoption that was interrupted is continued. Files of anything
// else are never replaced, and neither is a file that was changed after the adoption.
func (w *Workspace) Adopt(a Adoption, now time.Time) (written []string, err error) {
	unlock, err := w.lockDir()
	if err != nil {
		return nil, err
	}
	defer unlock()
	j, err := w.adoptionOf(a.UID)
	if err != nil {
		return nil, err
	}
	if j == nil {
		j = &journal{Schema: plan.Schema, UID: a.UID, Server: a.Server, Created: now.UTC()}
	}
	if err := w.removeTemporary(); err != nil {
		return nil, err
	}
	content, err := a.files()
	if err != nil {
		return nil, err
	}
	var missing []string
	for _, name := range adoptedFiles {
		if w.Has(name) {
			continue
		}
		missing = append(missing, name)
		entry := journalFile{Name: name, SHA256: digest(content[name])}
		if i := slices.IndexFunc(j.Files, func(f journalFile) bool { return f.Name == name }); i >= 0 {
			j.Files[i] = entry
		} else {
			j.Files = append(j.Files, entry)
		}
	}
	if len(missing) == 0 {
		return nil, nil
	}
	if err := w.writeJournal(j); err != nil {
		return nil, err
	}
	for _, name := range missing {
		mode := os.FileMode(0o600)
		if name == ConfigFile {
			mode = 0o644
		}
		if err := w.Write(name, content[name], mode); err != nil {
			return written, err
		}
		written = append(written, name)
	}
	return written, nil
}

// CanAdopt returns an error unless the workspace can be that of the cluster with this UID. It writes
// nothing.
func (w *Workspace) CanAdopt(uid string) error {
	_, err := w.adoptionOf(uid)
	return err
}

// adoptionOf is CanAdopt. It returns the journal of an earlier adoption of the cluster; nil without one.
func (w *Workspace) adoptionOf(uid string) (*journal, error) {
	j, err := w.journal()
	if err != nil && !errors.Is(err, ErrAbsent) {
		return nil, err
	}
	refuse := func(why string) error {
		return &plan.Error{
			Op: "adopt a cluster in " + w.root, Err: errors.New(why), Exit: plan.ExitUsage,
			Remedy: "use another folder with -C; one folder holds one cluster",
		}
	}
	if err == nil {
		if j.UID != uid {
			return nil, refuse("the folder is the workspace of another adopted cluster, " + j.Server)
		}
		return j, nil
	}
	var there []string
	for _, f := range []string{ConfigFile, StateFile, KubeconfigFile, MasterSecretFile, PendingFile} {
		if w.Has(f) {
			there = append(there, f)
		}
	}
	if len(there) > 0 {
		return nil, refuse("the folder has files of another cluster: " + strings.Join(there, ", "))
	}
	return nil, nil
}

// journal reads the journal. The error wraps ErrAbsent if there is none.
func (w *Workspace) journal() (*journal, error) {
	b, err := w.read(JournalFile)
	if err != nil {
		return nil, err
	}
	var j journal
	if err := json.Unmarshal(b, &j); err != nil || j.UID == "" {
		return nil, w.badJournal(errors.New("it is not a journal of an adoption"))
	}
	for _, f := range j.Files {
		if !slices.Contains(adoptedFiles, f.Name) && f.Name != SigningKeyFile {
			return nil, w.badJournal(fmt.Errorf("it lists %q, which no adoption writes", f.Name))
		}
	}
	return &j, nil
}

func (w *Workspace) badJournal(err error) error {
	return &plan.Error{Op: "read " + w.Path(JournalFile), Err: err, Exit: plan.ExitUsage, Remedy: "restore it from a backup, or move the files of the workspace away yourself"}
}

// Undone is the result of undoing an adoption.
type Undone struct {
	// Removed and Kept are names of files. Kept files were changed after the adoption.
	Removed []string `json:"removed"`
	Kept    []string `json:"kept"`
}

// UndoAdopt removes the files that an adoption wrote and that were not changed since. The error has
// plan.ExitNothing if there was no adoption here. It can be repeated after an interruption.
func (w *Workspace) UndoAdopt() (Undone, error) {
	out := Undone{Removed: []string{}, Kept: []string{}}
	unlock, err := w.lockDir()
	if err != nil {
		return out, err
	}
	defer unlock()
	j, err := w.journal()
	if errors.Is(err, ErrAbsent) {
		return out, &plan.Error{Op: "no cluster was adopted in " + w.root + "; nothing was removed", Exit: plan.ExitNothing}
	}
	if err != nil {
		return out, err
	}
	if err := w.removeTemporary(); err != nil {
		return out, err
	}
	for _, f := range slices.Backward(j.Files) {
		b, err := os.ReadFile(w.Path(f.Name))
		switch {
		case errors.Is(err, fs.ErrNotExist):
			continue
		case err != nil || digest(b) != f.SHA256 && digest(b) != f.Was:
			out.Kept = append(out.Kept, f.Name)
			continue
		}
		if err := w.remove(f.Name); err != nil {
			return out, err
		}
		out.Removed = append(out.Removed, f.Name)
	}
	if err := w.remove(JournalFile); err != nil {
		return out, err
	}
	out.Removed = append(out.Removed, JournalFile)
	return out, syncDir(w.root)
}

func (w *Workspace) remove(name string) error {
	if err := os.Remove(w.Path(name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return &plan.Error{Op: "remove " + w.Path(name), Err: WithoutPath(err), Remedy: "make the directory writable for this user, then run the same command again"}
	}
	return nil
}

// removeTemporary removes what an adoption that was killed left beside its files. The caller holds the
// lock of the directory.
func (w *Workspace) removeTemporary() error {
	for _, name := range append(slices.Clone(adoptedFiles), JournalFile) {
		left, err := filepath.Glob(w.Path("." + name + ".[0-9]*"))
		if err != nil {
			return fmt.Errorf("look for temporary files in %s: %w", w.root, err)
		}
		for _, path := range left {
			if err := w.remove(filepath.Base(path)); err != nil {
				return err
			}
		}
	}
	return nil
}

// lockDir locks the directory itself, so that no file of a lock is left.
func (w *Workspace) lockDir() (unlock func(), err error) {
	d, err := os.Open(w.root)
	if err != nil {
		return nil, &plan.Error{Op: "open workspace " + w.root, Err: WithoutPath(err), Exit: plan.ExitUsage, Remedy: "make the directory readable for this user"}
	}
	if err := unix.Flock(int(d.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		d.Close()
		if !errors.Is(err, unix.EWOULDBLOCK) {
			return nil, &plan.Error{Op: "lock workspace " + w.root, Err: err, Remedy: "use a directory on a local disk"}
		}
		return nil, &plan.Error{Op: "lock workspace " + w.root, Err: errors.New("another adoption or its undo is running there"), Exit: plan.ExitHeld, Remedy: "wait for it to end, then run the same command again"}
	}
	return func() {
		// A child of another goroutine has the descriptor until it executes its program.
		_ = unix.Flock(int(d.Fd()), unix.LOCK_UN)
		_ = d.Close()
	}, nil
}

// files returns the content of the files of an adoption by name. What it writes can be read again.
func (a *Adoption) files() (map[string][]byte, error) {
	config, err := a.config()
	if err != nil {
		return nil, err
	}
	u, err := url.Parse(a.Server)
	if err != nil || u.Hostname() == "" {
		return nil, &plan.Error{Op: "adopt the cluster", Err: errors.New("the address of its API server is no URL"), Exit: plan.ExitUsage, Remedy: "correct the kubeconfig"}
	}
	port := u.Port()
	if port == "" {
		port = "443"
	}
	s := &State{Version: StateVersion, Infrastructure: Infrastructure{UID: a.UID, Name: a.Name, Provider: machines.Name, ClusterEndpoint: net.JoinHostPort(u.Hostname(), port)}}
	state, err := s.marshal()
	if err == nil {
		_, err = ParseState(state)
	}
	if err != nil {
		return nil, fmt.Errorf("write %s: %w", StateFile, err)
	}
	if _, server, err := KubeconfigServer(a.Kubeconfig); err != nil {
		return nil, &plan.Error{Op: "adopt the cluster", Err: err, Exit: plan.ExitUsage, Remedy: "use a kubeconfig whose server has an https address"}
	} else if server.Value != a.Server {
		return nil, &plan.Error{Op: "adopt the cluster", Err: errors.New("the kubeconfig changed during the adoption"), Remedy: "run the same command again"}
	}
	return map[string][]byte{ConfigFile: config, StateFile: state, KubeconfigFile: a.Kubeconfig}, nil
}

// config returns the configuration of an adopted cluster.
func (a *Adoption) config() ([]byte, error) {
	counts := map[cloud.Role]int{}
	for _, m := range a.Machines {
		counts[m.Group]++
	}
	text := func(s string) *yaml.Node { return &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Value: s} }
	mapping := func(pairs ...any) *yaml.Node {
		n := &yaml.Node{Kind: yaml.MappingNode}
		for i := 0; i < len(pairs); i += 2 {
			n.Content = append(n.Content, text(pairs[i].(string)), pairs[i+1].(*yaml.Node))
		}
		return n
	}
	section, err := sectionNode(machines.Config(), machines.Section(a.Machines))
	if err != nil {
		return nil, err
	}
	groups := mapping()
	for _, role := range []cloud.Role{cloud.ControlPlane, cloud.Worker} {
		if counts[role] > 0 {
			groups.Content = append(groups.Content, text(string(role)), mapping("role", text(string(role)), "count", &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!int", Value: fmt.Sprint(counts[role])}))
		}
	}
	doc := mapping("version", text(ConfigVersion), "name", text(a.Name), "kubernetesVersion", text(a.Kubernetes), "provider", mapping(machines.Name, section), "nodeGroups", groups)
	var b bytes.Buffer
	b.WriteString("# A cluster that kubeadm made. Written by `constellation adopt`, which changed nothing in it.\n# `constellation adopt --undo` removes this file, unless you change it.\n")
	e := yaml.NewEncoder(&b)
	e.SetIndent(2)
	if err := e.Encode(doc); err != nil {
		return nil, fmt.Errorf("write %s: %w", ConfigFile, err)
	}
	if err := e.Close(); err != nil {
		return nil, fmt.Errorf("write %s: %w", ConfigFile, err)
	}
	if _, err := ParseConfig(b.Bytes()); err != nil {
		return nil, &plan.Error{Op: "write " + ConfigFile, Err: err, Exit: plan.ExitUsage, Remedy: "pass another name with --name, or correct the nodes"}
	}
	return b.Bytes(), nil
}
