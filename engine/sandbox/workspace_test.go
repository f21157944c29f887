package sandbox

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"constellation/engine/plan"
	"constellation/engine/workspace"
)

func testInfo(t *testing.T, dirs Dirs) workspace.SandboxInfo {
	t.Helper()
	cert, _ := testCA(t)
	return workspace.SandboxInfo{
		Name: "demo-1a2b", UID: "uid-1", Release: "v1.1.0", Kubernetes: "v1.35.4", Image: "v1.1.0",
		Measurements: map[uint32]string{4: strings.Repeat("ab", 32)}, TrustRoots: cert,
		ClusterEndpoint: "127.0.0.1:20000", InitEndpoint: "127.0.0.1:20001", InClusterEndpoint: "10.42.0.1",
		NodeCIDR: "10.42.0.0/24", PodCIDR: "10.244.0.0/16", ServiceCIDR: "10.96.0.0/12", ControlPlanes: 1, Workers: 2,
		Socket: dirs.of("demo-1a2b", socketName), InitSecret: make([]byte, 32),
	}
}

// adopted returns a workspace with the files of a sandbox and its cluster, and the
// digest of its configuration.
func adopted(t *testing.T, dirs Dirs) (w, sum string) {
	t.Helper()
	w = t.TempDir()
	ws, err := workspace.OpenWorkspace(w)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := ws.AdoptSandbox(testInfo(t, dirs)); err != nil {
		t.Fatal(err)
	}
	for _, f := range []string{workspace.KubeconfigFile, workspace.MasterSecretFile, "notes.txt"} {
		if err := os.WriteFile(filepath.Join(w, f), []byte("x"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if sum, err = configSum(w); err != nil {
		t.Fatal(err)
	}
	return w, sum
}

func TestConfigurationFollowsItsSandboxUntilSomebodyEditsIt(t *testing.T) {
	dirs := Dirs{State: t.TempDir()}
	w, sumFile := t.TempDir(), filepath.Join(t.TempDir(), configSumName)
	info := testInfo(t, dirs)
	written, _, err := adopt(w, info, sumFile)
	if err != nil || !slices.Contains(written, workspace.ConfigFile) {
		t.Fatalf("wrote %v, %v", written, err)
	}
	if written, _, err = adopt(w, info, sumFile); err != nil || len(written) != 0 {
		t.Errorf("again: wrote %v, %v", written, err)
	}
	workers := func() int {
		ws, err := workspace.OpenWorkspace(w)
		if err != nil {
			t.Fatal(err)
		}
		c, err := ws.Config()
		if err != nil {
			t.Fatal(err)
		}
		return c.Workers()
	}
	info.Workers = 5
	if written, _, err = adopt(w, info, sumFile); err != nil || !slices.Equal(written, []string{workspace.ConfigFile}) || workers() != 5 {
		t.Errorf("grown: wrote %v, %v, %d workers", written, err, workers())
	}
	f, err := os.OpenFile(filepath.Join(w, workspace.ConfigFile), os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	f.WriteString("# mine\n")
	f.Close()
	info.Workers = 7
	if written, _, err = adopt(w, info, sumFile); err != nil || len(written) != 0 || workers() != 5 {
		t.Errorf("edited: wrote %v, %v, %d workers", written, err, workers())
	}
}

func files(t *testing.T, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, e := range entries {
		out = append(out, e.Name())
	}
	return out
}

var everything = []string{workspace.KubeconfigFile, workspace.ConfigFile, workspace.MasterSecretFile, workspace.StateFile, "notes.txt"}

func TestForgetRemovesWhatDescribesTheSandboxAlone(t *testing.T) {
	dirs := Dirs{State: t.TempDir()}
	for _, tt := range []struct {
		name string
		uid  string
		prep func(workspace string)
		want []string
		kept bool
	}{
		{name: "as up left it", uid: "uid-1", prep: func(string) {}, want: []string{"notes.txt"}},
		{name: "edited configuration", uid: "uid-1", prep: func(w string) {
			os.WriteFile(filepath.Join(w, workspace.ConfigFile), []byte("mine"), 0o644)
		}, want: []string{workspace.ConfigFile, "notes.txt"}, kept: true},
		{name: "a later sandbox of the same name", uid: "uid-2", prep: func(string) {}, want: everything},
		{name: "state beyond reading", uid: "uid-1", prep: func(w string) { os.WriteFile(filepath.Join(w, workspace.StateFile), []byte("{"), 0o600) }, want: everything},
		{name: "the sandbox's directory was removed by hand", prep: func(string) {}, want: []string{workspace.ConfigFile, "notes.txt"}, kept: true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w, sum := adopted(t, dirs)
			tt.prep(w)
			if tt.uid == "" {
				sum = ""
			}
			_, kept, err := forget(w, workspace.SandboxInfo{Name: "demo-1a2b", UID: tt.uid}, sum)
			if got := files(t, w); err != nil || kept != tt.kept || !slices.Equal(got, tt.want) {
				t.Errorf("left %v, configuration kept %t, %v; want %v, %t", got, kept, err, tt.want, tt.kept)
			}
		})
	}
	t.Run("another sandbox", func(t *testing.T) {
		w, sum := adopted(t, dirs)
		if _, _, err := forget(w, workspace.SandboxInfo{Name: "other", UID: "uid-1"}, sum); err != nil || !slices.Equal(files(t, w), everything) {
			t.Errorf("left %v, %v", files(t, w), err)
		}
	})
	t.Run("the sandbox lives below another state directory", func(t *testing.T) {
		w, _ := adopted(t, dirs)
		if err := os.MkdirAll(dirs.of("demo-1a2b"), 0o700); err != nil {
			t.Fatal(err)
		}
		if _, _, err := forget(w, workspace.SandboxInfo{Name: "demo-1a2b", UID: ""}, ""); err == nil || !strings.Contains(err.Error(), "XDG_STATE_HOME") || !slices.Equal(files(t, w), everything) {
			t.Errorf("left %v, %v", files(t, w), err)
		}
	})
	t.Run("no workspace any more", func(t *testing.T) {
		if _, _, err := forget(filepath.Join(t.TempDir(), "gone"), workspace.SandboxInfo{Name: "demo-1a2b", UID: ""}, ""); err != nil {
			t.Error(err)
		}
	})
}

func TestDownWithoutASandboxIsASuccess(t *testing.T) {
	s := New(Dirs{Cache: t.TempDir(), State: filepath.Join(t.TempDir(), "constellation")}, "", discard())
	var last plan.Event
	if err := s.Down(t.Context(), "/somewhere/else", func(e plan.Event) { last = e }); err != nil || last.State != plan.StateNothing {
		t.Errorf("%+v, %v", last, err)
	}
	if _, err := os.Lstat(s.dirs.State); !errors.Is(err, fs.ErrNotExist) {
		t.Error("it left a directory")
	}
	for _, name := range []string{"", "../etc", "Demo", strings.Repeat("a", 41)} {
		if err := s.Down(t.Context(), name, nil); plan.ExitCode(err) != plan.ExitUsage {
			t.Errorf("%q: %v", name, err)
		}
	}
}
