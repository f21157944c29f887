package workspace

import (
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"constellation/engine/plan"
)

func testWorkspace(t testing.TB) *Workspace {
	t.Helper()
	w, err := OpenWorkspace(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	return w
}

func (w *Workspace) list(t testing.TB) []string {
	t.Helper()
	entries, err := os.ReadDir(w.root)
	if err != nil {
		t.Fatal(err)
	}
	names := []string{}
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

func TestStateIsReadBackAsItWasWritten(t *testing.T) {
	w := testWorkspace(t)
	s, err := newState(*testSandbox(t))
	if err != nil {
		t.Fatal(err)
	}
	s.ClusterValues = ClusterValues{ClusterID: bytes.Repeat([]byte{7}, 32), MeasurementSalt: bytes.Repeat([]byte{8}, 32), InitNode: "sandbox://demo/control-plane-0"}
	if err := w.WriteState(s); err != nil {
		t.Fatal(err)
	}
	got, err := w.State()
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(s, got, cmp.Comparer(func(a, b fmt.Stringer) bool { return a.String() == b.String() })); d != "" {
		t.Errorf("state (-written +read):\n%s", d)
	}
	if !bytes.Equal(got.Infrastructure.InitSecret, testSandbox(t).InitSecret) {
		t.Error("the init secret changed")
	}
	info, err := os.Stat(w.Path(StateFile))
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
	if names := w.list(t); !cmp.Equal(names, []string{StateFile}) {
		t.Errorf("files %v", names)
	}
}

func TestStateProblems(t *testing.T) {
	s, err := newState(*testSandbox(t))
	if err != nil {
		t.Fatal(err)
	}
	s.ClusterValues = ClusterValues{ClusterID: bytes.Repeat([]byte{0xc7}, 32), MeasurementSalt: bytes.Repeat([]byte{0x5a}, 32)}
	b, err := s.marshal()
	if err != nil {
		t.Fatal(err)
	}
	good := string(b)
	secret := hex.EncodeToString(testSandbox(t).InitSecret)
	for _, tt := range []struct{ name, old, new, field string }{
		{name: "an unknown key", old: "initEndpoint:", new: "initEndpiont:", field: "infrastructure.initEndpiont"},
		{name: "another format", old: "version: v1", new: "version: v9", field: "version"},
		{name: "a secret cut short", old: secret, new: secret[:20], field: "infrastructure.initSecret"},
		{name: "a secret that is no hex", old: secret, new: "swordfish-" + secret, field: "infrastructure.initSecret"},
		{name: "an endpoint without port", old: "127.0.0.1:36443", new: "127.0.0.1", field: "infrastructure.clusterEndpoint"},
		{name: "an invalid address range", old: "10.42.0.0/24", new: "10.42.0.0", field: "infrastructure.ipCidrNode"},
		{name: "another provider", old: "provider: sandbox", new: "provider: mars", field: "infrastructure.provider"},
		{name: "a relative socket", old: "socket: /run", new: "socket: run", field: "infrastructure.sandbox.socket"},
		{name: "a cluster ID without its salt", old: "measurementSalt:", new: "#", field: "clusterValues.measurementSalt"},
		{name: "a list where a text belongs", old: "uid: 0123456789abcdef", new: "uid: [x]", field: "infrastructure.uid"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			text := strings.Replace(good, tt.old, tt.new, 1)
			if text == good {
				t.Fatalf("no %q in\n%s", tt.old, good)
			}
			_, err := ParseState([]byte(text))
			list, ok := AsConfigErrors(err)
			if !ok || list.Errors[0].Field != tt.field {
				t.Fatalf("got %v, want a problem with %s", err, tt.field)
			}
			if strings.Contains(err.Error(), secret[:20]) {
				t.Errorf("the error shows the secret: %v", err)
			}
		})
	}
}

func TestStateHidesItsSecretsFromPrinting(t *testing.T) {
	s, err := newState(*testSandbox(t))
	if err != nil {
		t.Fatal(err)
	}
	m := NewMasterSecret()
	for _, text := range []string{fmt.Sprint(s.Infrastructure), fmt.Sprintf("%v %+v", *s, m), fmt.Sprintf("%s %#v", m, m)} {
		for _, secret := range [][]byte{s.Infrastructure.InitSecret, m.Key, m.Salt} {
			for _, form := range []string{string(secret), hex.EncodeToString(secret), fmt.Sprintf("%d", secret)} {
				if strings.Contains(text, form) {
					t.Errorf("%q shows a secret", text)
				}
			}
		}
	}
}

func TestAdoptSandbox(t *testing.T) {
	for _, tt := range []struct {
		name    string
		prepare func(*testing.T, *Workspace)
		info    func(*SandboxInfo)
		written []string
		err     string
	}{
		{name: "an empty workspace gets both files", prepare: func(*testing.T, *Workspace) {}, written: []string{StateFile, ConfigFile}},
		{name: "a configuration of the user is kept", prepare: func(t *testing.T, w *Workspace) {
			if err := os.WriteFile(w.Path(ConfigFile), []byte("mine"), 0o644); err != nil {
				t.Fatal(err)
			}
		}, written: []string{StateFile}},
		{name: "the same sandbox again changes nothing", prepare: adopted},
		{name: "new ports of the same sandbox are noted", prepare: adopted, info: func(i *SandboxInfo) { i.ClusterEndpoint = "127.0.0.1:40000" }, written: []string{StateFile}},
		{name: "a sandbox that tells its secret no more", prepare: adopted, info: func(i *SandboxInfo) { i.InitSecret = nil }},
		{name: "another sandbox", prepare: adopted, info: func(i *SandboxInfo) { i.Name = "other" }, err: `it belongs to sandbox "demo"`},
		{name: "an earlier sandbox of that name", prepare: adopted, info: func(i *SandboxInfo) { i.UID = "fedcba" }, err: "an earlier sandbox"},
		{name: "secrets of an unknown cluster", prepare: func(t *testing.T, w *Workspace) {
			if err := w.WriteMasterSecret(NewMasterSecret()); err != nil {
				t.Fatal(err)
			}
		}, err: "constellation-mastersecret.json of another cluster"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w, i := testWorkspace(t), testSandbox(t)
			tt.prepare(t, w)
			before, _ := os.ReadFile(w.Path(StateFile))
			if tt.info != nil {
				tt.info(i)
			}
			written, err := w.AdoptSandbox(*i)
			if tt.err != "" {
				if err == nil || !strings.Contains(err.Error(), tt.err) || plan.ExitCode(err) != plan.ExitUsage || plan.Remedy(err) == "" {
					t.Fatalf("got %v (exit %d, remedy %q)", err, plan.ExitCode(err), plan.Remedy(err))
				}
				if after, _ := os.ReadFile(w.Path(StateFile)); !bytes.Equal(before, after) {
					t.Error("the state file changed")
				}
				return
			}
			if err != nil || !cmp.Equal(written, tt.written) {
				t.Fatalf("wrote %v, %v; want %v", written, err, tt.written)
			}
			s, err := w.State()
			if err != nil || s.Infrastructure.ClusterEndpoint != i.ClusterEndpoint || len(s.Infrastructure.InitSecret) == 0 {
				t.Errorf("state %+v, %v", s, err)
			}
		})
	}
}

func adopted(t *testing.T, w *Workspace) {
	t.Helper()
	if _, err := w.AdoptSandbox(*testSandbox(t)); err != nil {
		t.Fatal(err)
	}
}

func TestMasterSecretFile(t *testing.T) {
	w := testWorkspace(t)
	if _, err := w.MasterSecret(); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("absent: %v", err)
	}
	m := NewMasterSecret()
	if err := w.WriteMasterSecret(m); err != nil {
		t.Fatal(err)
	}
	if got, err := w.MasterSecret(); err != nil || !bytes.Equal(got.Key, m.Key) || !bytes.Equal(got.Salt, m.Salt) {
		t.Errorf("read back %v", err)
	}
	if info, _ := os.Stat(w.Path(MasterSecretFile)); info.Mode().Perm() != 0o600 {
		t.Errorf("mode %v", info.Mode())
	}
	const text = "c3dvcmRmaXNo"
	for name, content := range map[string]string{
		"short key":   `{"key":"` + text + `","salt":"` + text + `"}`,
		"no JSON":     text,
		"more fields": `{"key":"","salt":"","x":"` + text + `"}`,
		"two":         `{"key":"","salt":""}{}`,
	} {
		if err := os.WriteFile(w.Path(MasterSecretFile), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := w.MasterSecret(); err == nil || strings.Contains(err.Error(), text) || plan.Remedy(err) == "" {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// Computed from RFC 5869 with other means.
const wantClusterID = "cd40554e29112ca512c40ab93eff2304b45fc76fd675650e0e3cf8223fd28a3e"

// The cluster ID must never change for a given secret and salt: machines carry it in
// their TPM.
func TestClusterIDIsDerivedFromTheMasterSecret(t *testing.T) {
	m := MasterSecret{Key: bytes.Repeat([]byte{1}, 32), Salt: bytes.Repeat([]byte{2}, 32)}
	salt := bytes.Repeat([]byte{3}, 32)
	id := m.ClusterID(salt)
	if got := hex.EncodeToString(id); got != wantClusterID {
		t.Errorf("cluster ID %s, want %s", got, wantClusterID)
	}
	for name, other := range map[string][]byte{
		"another key":         MasterSecret{Key: bytes.Repeat([]byte{9}, 32), Salt: m.Salt}.ClusterID(salt),
		"another salt":        MasterSecret{Key: m.Key, Salt: bytes.Repeat([]byte{9}, 32)}.ClusterID(salt),
		"another measurement": m.ClusterID(bytes.Repeat([]byte{9}, 32)),
	} {
		if bytes.Equal(id, other) {
			t.Errorf("%s gives the same cluster ID", name)
		}
	}
	// Years later, a cluster may need the same keys.
	if got, want := hex.EncodeToString(m.CertifierSecret()), "b7077e6f4e781c095e6b557d4c0842eb655e7d6a0fb2bdb6d134fc37692ce4bc"; got != want {
		t.Errorf("secret of the certifier %s, want %s", got, want)
	}
	if a, b := NewMasterSecret(), NewMasterSecret(); bytes.Equal(a.Key, b.Key) || bytes.Equal(a.Key, a.Salt) || len(a.Key) != 32 {
		t.Error("master secrets repeat")
	}
}

func TestWritesAreWholeOrNotAtAll(t *testing.T) {
	w := testWorkspace(t)
	if err := w.Write(ConfigFile, []byte("old"), 0o644); err != nil {
		t.Fatal(err)
	}
	t.Run("a file that cannot be replaced stays", func(t *testing.T) {
		if err := os.Mkdir(w.Path("dir"), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(w.Path("dir"), "x"), nil, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := w.Write("dir", []byte("new"), 0o600); err == nil {
			t.Error("a directory was replaced")
		}
		if names := w.list(t); !cmp.Equal(names, []string{ConfigFile, "dir"}) {
			t.Errorf("left behind: %v", names)
		}
	})
	t.Run("the mode is set before the name", func(t *testing.T) {
		if info, _ := os.Stat(w.Path(ConfigFile)); info.Mode().Perm() != 0o644 {
			t.Errorf("mode %v", info.Mode())
		}
	})
}

func TestWorkspaceErrorsSayWhatToDo(t *testing.T) {
	w := testWorkspace(t)
	for name, call := range map[string]func() error{
		"no configuration": func() error { _, err := w.Config(); return err },
		"no state":         func() error { _, err := w.State(); return err },
		"no directory":     func() error { _, err := OpenWorkspace(w.Path("absent")); return err },
		"a directory as configuration": func() error {
			d := testWorkspace(t)
			if err := os.Mkdir(d.Path(ConfigFile), 0o755); err != nil {
				t.Fatal(err)
			}
			_, err := d.Config()
			if err != nil && !strings.Contains(err.Error(), "it is a directory, want a file") {
				t.Errorf("%v", err)
			}
			return err
		},
		"a configuration of 3 MiB": func() error {
			d := testWorkspace(t)
			if err := os.WriteFile(d.Path(ConfigFile), make([]byte, 3<<20), 0o644); err != nil {
				t.Fatal(err)
			}
			_, err := d.Config()
			if err != nil && !strings.Contains(err.Error(), "it has 3.0 MiB, and more than 1.0 MiB is never right") {
				t.Errorf("%v", err)
			}
			return err
		},
		"a wrong configuration": func() error {
			d := testWorkspace(t)
			if err := os.WriteFile(d.Path(ConfigFile), []byte("name: x\n"), 0o644); err != nil {
				t.Fatal(err)
			}
			_, err := d.Config()
			return err
		},
	} {
		if err := call(); plan.ExitCode(err) != plan.ExitUsage || plan.Remedy(err) == "" {
			t.Errorf("%s: %v, exit %d, remedy %q", name, err, plan.ExitCode(err), plan.Remedy(err))
		}
	}
}

func TestOneRunAtATime(t *testing.T) {
	w := testWorkspace(t)
	unlock, err := w.Lock("init-1", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	_, err = w.Lock("init-2", time.Now())
	if plan.ExitCode(err) != plan.ExitHeld || !strings.Contains(err.Error(), fmt.Sprintf("process %d on ", os.Getpid())) || !strings.Contains(err.Error(), "(run init-1)") {
		t.Errorf("second lock: %v, exit %d", err, plan.ExitCode(err))
	}
	unlock()
	unlock, err = w.Lock("init-3", time.Now())
	if err != nil {
		t.Fatalf("after it was given back: %v", err)
	}
	unlock()
}

func TestAMissingStateFileOfALiveClusterIsRestored(t *testing.T) {
	w, err := OpenWorkspace(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.State(); !strings.Contains(plan.Remedy(err), "constellation sandbox up") {
		t.Errorf("an empty workspace: %q", plan.Remedy(err))
	}
	if err := w.Write(KubeconfigFile, []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := w.State(); strings.Contains(plan.Remedy(err), "sandbox up") || !strings.Contains(plan.Remedy(err), "move "+KubeconfigFile+" away") {
		t.Errorf("a workspace with a cluster: %q", plan.Remedy(err))
	}
}
