package workspace

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"constellation/engine/cloud"
	"constellation/engine/cloud/machines"
	"constellation/engine/plan"
)

func adoption() Adoption {
	return Adoption{
		Name: "prod", UID: "uid-1", Kubernetes: "v1.36.4", Server: "https://10.0.0.1:6443",
		Kubeconfig: []byte("apiVersion: v1\nkind: Config\ncurrent-context: c\nclusters: [{name: k, cluster: {server: 'https://10.0.0.1:6443'}}]\nusers: [{name: u, user: {token: secret}}]\ncontexts: [{name: c, context: {cluster: k, user: u}}]\n"),
		Machines:   []machines.Machine{{Name: "cp-0", Address: "10.0.0.11", Group: cloud.ControlPlane}, {Name: "w-0", Group: cloud.Worker}},
	}
}

func namesIn(t *testing.T, dir string) (out []string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		out = append(out, e.Name())
	}
	return out
}

func TestAdoptAndUndo(t *testing.T) {
	t.Parallel()
	w := &Workspace{t.TempDir()}
	if err := os.WriteFile(w.Path("notes.txt"), []byte("mine"), 0o600); err != nil {
		t.Fatal(err)
	}
	written, err := w.Adopt(adoption(), time.Now())
	if err != nil || !slices.Equal(written, []string{KubeconfigFile, ConfigFile, StateFile}) {
		t.Fatalf("wrote %v, %v", written, err)
	}
	for _, name := range []string{KubeconfigFile, StateFile, JournalFile} {
		if info, err := os.Stat(w.Path(name)); err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("%s: %v, %v", name, info.Mode(), err)
		}
	}
	c, err := w.Config()
	if err != nil || c.Name != "prod" || c.ControlPlanes() != 1 || c.Workers() != 1 || !slices.Equal(machines.List(c.Provider.Section), adoption().Machines) {
		t.Errorf("configuration %+v, %v", c, err)
	}
	if s, err := w.State(); err != nil || s.Infrastructure.UID != "uid-1" || s.Infrastructure.ClusterEndpoint != "10.0.0.1:6443" || !w.IsAdopted() {
		t.Errorf("state %+v, %v", s, err)
	}
	if _, _, err := w.Load(); !errors.Is(err, ErrAdopted) || plan.ExitCode(err) != plan.ExitUsage || !strings.Contains(plan.Remedy(err), "kubeadm") {
		t.Errorf("a verb that needs the operator: %v", err)
	}
	if written, err := w.Adopt(adoption(), time.Now()); err != nil || len(written) > 0 {
		t.Errorf("adopted again: wrote %v, %v", written, err)
	}
	other := adoption()
	other.UID = "uid-2"
	if _, err := w.Adopt(other, time.Now()); plan.ExitCode(err) != plan.ExitUsage {
		t.Errorf("another cluster: %v", err)
	}
	done, err := w.UndoAdopt()
	if err != nil || len(done.Removed) != 4 || len(done.Kept) != 0 {
		t.Errorf("undone: %+v, %v", done, err)
	}
	if left := namesIn(t, w.Dir()); !slices.Equal(left, []string{"notes.txt"}) {
		t.Errorf("left: %q", left)
	}
	if _, err := w.UndoAdopt(); plan.ExitCode(err) != plan.ExitNothing {
		t.Errorf("undone again: %v", err)
	}
}

// TestUndoKeepsChangedFiles checks that a file that was changed after the adoption is kept and named.
func TestUndoKeepsChangedFiles(t *testing.T) {
	t.Parallel()
	w := &Workspace{t.TempDir()}
	if _, err := w.Adopt(adoption(), time.Now()); err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(w.Path(ConfigFile), os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	_, _ = f.WriteString("# mine\n")
	f.Close()
	if done, err := w.UndoAdopt(); err != nil || !slices.Equal(done.Kept, []string{ConfigFile}) || slices.Contains(done.Removed, ConfigFile) {
		t.Errorf("%+v, %v", done, err)
	}
	if left := namesIn(t, w.Dir()); !slices.Equal(left, []string{ConfigFile}) {
		t.Errorf("left: %q", left)
	}
}

// TestAdoptionResumes ends an adoption after each of its writes, with a temporary file as a kill leaves
// it. The next adoption completes the workspace, and its undo leaves nothing.
func TestAdoptionResumes(t *testing.T) {
	t.Parallel()
	for done := range 4 {
		for _, undo := range []bool{false, true} {
			w := &Workspace{t.TempDir()}
			if _, err := w.Adopt(adoption(), time.Now()); err != nil {
				t.Fatal(err)
			}
			for _, name := range adoptedFiles[done:] {
				if err := os.Remove(w.Path(name)); err != nil {
					t.Fatal(err)
				}
			}
			if err := os.WriteFile(w.Path("."+KubeconfigFile+".12345"), []byte("half"), 0o600); err != nil {
				t.Fatal(err)
			}
			again := adoption()
			again.Machines = append(again.Machines, machines.Machine{Name: "w-1", Address: "10.0.0.22", Group: cloud.Worker}) // it joined meanwhile
			if !undo {
				written, err := w.Adopt(again, time.Now())
				if err != nil || !slices.Equal(written, adoptedFiles[done:]) && len(written)+done != len(adoptedFiles) {
					t.Errorf("after %d: wrote %v, %v", done, written, err)
				}
				if _, err := w.Config(); err != nil || !w.IsAdopted() {
					t.Errorf("after %d: %v", done, err)
				}
			}
			if out, err := w.UndoAdopt(); err != nil || len(out.Kept) > 0 {
				t.Errorf("after %d: undone %+v, %v", done, out, err)
			}
			if left := namesIn(t, w.Dir()); len(left) > 0 {
				t.Errorf("after %d: left %q", done, left)
			}
		}
	}
}

func TestAdoptRefuses(t *testing.T) {
	t.Parallel()
	for _, name := range []string{ConfigFile, StateFile, KubeconfigFile, MasterSecretFile, PendingFile} {
		w := &Workspace{t.TempDir()}
		if err := os.WriteFile(w.Path(name), []byte("x"), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Adopt(adoption(), time.Now()); plan.ExitCode(err) != plan.ExitUsage || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", name, err)
		}
		if left := namesIn(t, w.Dir()); !slices.Equal(left, []string{name}) {
			t.Errorf("%s: left %q", name, left)
		}
	}
	for name, edit := range map[string]func(*Adoption){
		"a name of two machines":      func(a *Adoption) { a.Machines[1].Name = "cp-0" },
		"an escape sequence":          func(a *Adoption) { a.Machines[1].Name = "\x1b[2J" },
		"an invalid address":          func(a *Adoption) { a.Machines[1].Address = "10.0.0.300" },
		"no control plane":            func(a *Adoption) { a.Machines = a.Machines[1:] },
		"a bad name of the cluster":   func(a *Adoption) { a.Name = "Prod" },
		"a server without encryption": func(a *Adoption) { a.Server = "http://10.0.0.1" },
	} {
		w := &Workspace{t.TempDir()}
		a := adoption()
		edit(&a)
		if _, err := w.Adopt(a, time.Now()); plan.ExitCode(err) != plan.ExitUsage && !strings.Contains(name, "encryption") || err == nil {
			t.Errorf("%s: %v", name, err)
		}
		if left := namesIn(t, w.Dir()); len(left) > 0 {
			t.Errorf("%s: left %q", name, left)
		}
	}
	// A journal cannot name files of others.
	w := &Workspace{t.TempDir()}
	victim := filepath.Join(t.TempDir(), "victim")
	if err := os.WriteFile(victim, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(w.Path(JournalFile), []byte(`{"uid":"uid-1","files":[{"name":"`+victim+`","sha256":"e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"}]}`), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := w.UndoAdopt(); plan.ExitCode(err) != plan.ExitUsage {
		t.Errorf("a journal with another file: %v", err)
	}
	if _, err := os.Stat(victim); err != nil {
		t.Errorf("a file that no adoption wrote: %v", err)
	}
}

func TestManagedWorkspace(t *testing.T) {
	t.Parallel()
	w := &Workspace{t.TempDir()}
	if _, err := w.Adopt(adoption(), time.Now()); err != nil {
		t.Fatal(err)
	}
	is := func(when string, managed, touched bool) {
		t.Helper()
		if w.Managed() != managed || w.Unmanaged() == managed || w.Touched() != touched || !w.IsAdopted() {
			t.Errorf("%s: managed %t, unmanaged %t, touched %t", when, w.Managed(), w.Unmanaged(), w.Touched())
		}
	}
	is("adopted", false, false)
	if k, err := w.SigningKeyIfAny(); k != nil || err != nil {
		t.Errorf("there is a key: %v", err)
	}
	key, err := w.SigningKey()
	if err != nil {
		t.Fatal(err)
	}
	// An installation that was cut off here may have reached the cluster.
	is("with a key", false, true)
	if again, err := w.SigningKey(); err != nil || again.ID() != key.ID() {
		t.Errorf("another key: %v", err)
	}
	if info, err := os.Stat(w.Path(SigningKeyFile)); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the key has mode %v, %v", info.Mode(), err)
	}
	for range 2 {
		if err := w.SetManaged(true); err != nil {
			t.Fatal(err)
		}
	}
	is("with the operator", true, true)
	if _, _, err := w.Load(); err != nil {
		t.Errorf("a verb of upgrade: %v", err)
	}
	for _, v := range []plan.Verb{plan.VerbInit, plan.VerbRevoke, plan.VerbApply} {
		if err := w.OnMachines(v); (err == nil) != (v == plan.VerbApply) {
			t.Errorf("%s: %v", v, err)
		}
	}
	if err := w.SetManaged(false); err != nil {
		t.Fatal(err)
	}
	is("after the undo in the cluster", false, true)
	if u, err := w.UndoAdopt(); err != nil || len(u.Kept) > 0 || len(namesIn(t, w.Dir())) > 0 {
		t.Errorf("undone %+v, %v; left %q", u, err, namesIn(t, w.Dir()))
	}
}

func TestComponentsInTheConfiguration(t *testing.T) {
	t.Parallel()
	const good = `kubernetes: v1.37.2, name: kubeadm, url: "https://example.com/kubeadm", digest: "sha256:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"`
	a := adoption()
	b, err := a.config()
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct{ name, old, new, want string }{
		{name: "good"},
		{name: "a minor", old: "v1.37.2", new: "1.37", want: "is no version of Kubernetes"},
		{name: "another program", old: "name: kubeadm", new: "name: crictl", want: "write kubeadm, kubelet or kubectl"},
		{name: "a path", old: "https://example.com/kubeadm", new: "/srv/kubeadm", want: "is no address of a download"},
		{name: "a bare digest", old: "sha256:", new: "", want: "is no digest"},
		{name: "no digest", old: `, digest: "sha256:` + strings.Repeat("a", 64) + `"`, new: "", want: "digest: is missing"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			text := strings.Replace(string(b), "nodeGroups:", "    components:\n      - {"+strings.Replace(good, tt.old, tt.new, 1)+"}\nnodeGroups:", 1)
			if _, err := ParseConfig([]byte(text)); (err == nil) != (tt.want == "") || err != nil && !strings.Contains(err.Error(), tt.want) {
				t.Errorf("%v, want %q", err, tt.want)
			}
		})
	}
}

func TestKubeconfigCA(t *testing.T) {
	t.Parallel()
	with := func(data string) []byte {
		return []byte("clusters: [{name: k, cluster: {server: 'https://10.0.0.1:6443'" + data + "}}]\nusers: [{name: u, user: {token: x}}]\n")
	}
	for _, tt := range []struct {
		name       string
		kubeconfig []byte
		want       string
	}{
		{name: "an authority", kubeconfig: with(", certificate-authority-data: UEVN"), want: "PEM"},
		{name: "no authority", kubeconfig: with("")},
		{name: "no base64", kubeconfig: with(", certificate-authority-data: '*'")},
		{name: "no kubeconfig", kubeconfig: []byte("x")},
	} {
		if got := string(KubeconfigCA(tt.kubeconfig)); got != tt.want {
			t.Errorf("%s: %q, want %q", tt.name, got, tt.want)
		}
	}
}

// A child that another goroutine forks has all descriptors until it executes its program. It does not keep the lock.
func TestUnlockInSpiteOfAChild(t *testing.T) {
	t.Parallel()
	w := &Workspace{t.TempDir()}
	unlock, err := w.lockDir()
	if err != nil {
		t.Fatal(err)
	}
	const dir = "/proc/self/fd"
	all, err := os.ReadDir(dir)
	if err != nil {
		t.Skip("needs Linux: " + err.Error())
	}
	copied := -1
	for _, e := range all {
		if to, err := os.Readlink(filepath.Join(dir, e.Name())); err == nil && to == w.root {
			fd, err := strconv.Atoi(e.Name())
			if err != nil {
				t.Fatal(err)
			}
			if copied, err = unix.Dup(fd); err != nil {
				t.Fatal(err)
			}
			defer func() { _ = unix.Close(copied) }()
		}
	}
	if copied < 0 {
		t.Fatal("the lock has no descriptor")
	}
	unlock()
	again, err := w.lockDir()
	if err != nil {
		t.Fatal(err)
	}
	again()
}
