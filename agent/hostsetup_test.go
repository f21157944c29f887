//go:build linux

package agent

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"constellation/engine/release"
)

const packagesUnit = "{ path=/usr/bin/kubelet ; argv[]=/usr/bin/kubelet $KUBELET_CONFIG_ARGS $KUBELET_EXTRA_ARGS ; ignore_errors=no ; start_time=[n/a] }\n"

// foreignHost is a host that somebody else made, with the programs of Kubernetes' packages.
type foreignHost struct {
	testing.TB
	Setup
	calls []string
	exec  string // of kubelet.service
	fails map[string]error
}

func newForeignHost(t testing.TB) *foreignHost {
	key, err := release.NewPrivateKey("test")
	if err != nil {
		t.Fatal(err)
	}
	h := &foreignHost{TB: t, exec: packagesUnit, fails: map[string]error{}}
	h.Setup = Setup{
		Root: t.TempDir(), Program: filepath.Join(t.TempDir(), "agent"), Keys: key.PEM(),
		systemctl: func(_ context.Context, args ...string) (string, error) {
			call := strings.Join(args, " ")
			h.calls = append(h.calls, call)
			if err := h.fails[args[0]]; err != nil {
				return "", err
			}
			if args[0] == "show" {
				return h.exec, nil
			}
			return "", nil
		},
		answers: func(context.Context) error { return nil },
		running: func(context.Context) error { return nil },
	}
	h.file(h.Program, "the agent")
	for _, name := range []string{"kubeadm", "kubelet", "kubectl"} {
		h.file(h.path("usr/bin/"+name), name+" of the packages")
	}
	return h
}

func (h *foreignHost) file(path, content string) {
	h.Helper()
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(content), 0o755)); err != nil {
		h.Fatal(err)
	}
}

// upgradesOnce is an upgrade that the agent has recorded.
func (h *foreignHost) upgradesOnce() {
	h.Helper()
	h.file(h.path("var/lib/constellation/agent/"+journalFile), "{}")
}

// tree returns all paths below the root, with the content of files.
func (h *foreignHost) tree() (out []string) {
	h.Helper()
	err := filepath.WalkDir(h.Root, func(path string, d os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		text := path
		if !d.IsDir() {
			b, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			text += ": " + string(b)
		}
		out = append(out, text)
		return nil
	})
	if err != nil {
		h.Fatal(err)
	}
	return out
}

func TestSetupOfAForeignHost(t *testing.T) {
	h := newForeignHost(t)
	before := h.tree()
	for range 2 { // it can be repeated
		if err := h.Install(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	for path, want := range map[string]string{
		programPath: "the agent", release.MachineKeys: string(h.Keys), "usr/local/bin/kubelet": "kubelet of the packages",
	} {
		if b, err := os.ReadFile(h.path(path)); err != nil || string(b) != want {
			t.Errorf("/%s is %q (%v), want %q", path, b, err, want)
		}
	}
	b, err := os.ReadFile(h.path(dropInPath))
	if want := "ExecStart=\nExecStart=/usr/local/bin/kubelet $KUBELET_CONFIG_ARGS $KUBELET_EXTRA_ARGS\n"; err != nil || !strings.HasSuffix(string(b), want) {
		t.Errorf("the drop-in is %q (%v), want the end %q", b, err, want)
	}
	if slices.ContainsFunc(h.calls, func(c string) bool { return strings.Contains(c, "restart kubelet") }) {
		t.Errorf("the kubelet was restarted: %q", h.calls)
	}
	r, err := h.Remove(t.Context())
	if err != nil || len(r.Kept) > 0 {
		t.Fatalf("removed %+v, %v", r, err)
	}
	if after := h.tree(); !slices.Equal(after, before) {
		t.Errorf("the host is\n%s\nwant\n%s", strings.Join(after, "\n"), strings.Join(before, "\n"))
	}
	if r, err := h.Remove(t.Context()); err != nil || len(r.Removed) > 0 {
		t.Errorf("removed again: %+v, %v", r, err)
	}
}

// TestSetupIsTakenBackWithoutAnAgent removes an agent that never started. The agent cannot say that no upgrade is in progress,
// and none was ever requested.
func TestSetupIsTakenBackWithoutAnAgent(t *testing.T) {
	h := newForeignHost(t)
	before := h.tree()
	dead := errors.New("no answer")
	h.answers = func(context.Context) error { return dead }
	h.running = func(context.Context) error { return dead }
	if err := h.Install(t.Context()); !errors.Is(err, dead) {
		t.Fatalf("Install: %v", err)
	}
	if _, err := h.Remove(t.Context()); err != nil {
		t.Fatal(err)
	}
	if after := h.tree(); !slices.Equal(after, before) {
		t.Errorf("the host is\n%s\nwant\n%s", strings.Join(after, "\n"), strings.Join(before, "\n"))
	}
}

// A pod that is killed while it writes a program leaves a part of it.
func TestUnfinishedFilesAreRemoved(t *testing.T) {
	h := newForeignHost(t)
	before := h.tree()
	if err := h.Install(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"usr/local/bin/.kubelet.enrol", "var/lib/constellation/.setup.json.enrol"} {
		h.file(h.path(name), "half")
	}
	if _, err := h.Remove(t.Context()); err != nil {
		t.Fatal(err)
	}
	if after := h.tree(); !slices.Equal(after, before) {
		t.Errorf("the host is\n%s\nwant\n%s", strings.Join(after, "\n"), strings.Join(before, "\n"))
	}
}

func TestSetupKeepsWhatIsInUse(t *testing.T) {
	h := newForeignHost(t)
	if err := h.Install(t.Context()); err != nil {
		t.Fatal(err)
	}
	h.file(h.path("usr/local/bin/kubelet"), "a newer kubelet") // as an upgrade does
	r, err := h.Remove(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{dropInPath, "usr/local/bin/kubelet", "usr/local/bin/kubeadm"} {
		if _, err := os.Stat(h.path(path)); err != nil || r.Kept["/"+path] == "" {
			t.Errorf("/%s is not kept: %v, %v", path, err, r.Kept)
		}
	}
	if _, err := os.Stat(h.path(programPath)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the agent is still there: %v", err)
	}
}

func TestSetupRefuses(t *testing.T) {
	for _, tt := range []struct {
		name, want string
		change     func(*foreignHost)
	}{
		{name: "an agent of an image", want: "has an agent already", change: func(h *foreignHost) { h.file(h.path(programPath), "of an image") }},
		{name: "another kubeadm in /usr/local", want: "/usr/local/bin/kubeadm is another one", change: func(h *foreignHost) { h.file(h.path("usr/local/bin/kubeadm"), "other") }},
		{name: "a kubelet in a shell", want: "under another name", change: func(h *foreignHost) {
			h.exec = strings.ReplaceAll(packagesUnit, "argv[]=/usr/bin/kubelet", "argv[]=kubelet")
		}},
		{name: "no kubelet", want: "does not start one kubelet", change: func(h *foreignHost) { h.exec = "\n" }},
		{name: "no keys", want: "read key", change: func(h *foreignHost) { h.Keys = nil }},
		{name: "no systemd", want: "not systemd", change: func(h *foreignHost) { h.fails["show"] = errors.New("not systemd") }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			h := newForeignHost(t)
			tt.change(h)
			before := h.tree()
			if err := h.Install(t.Context()); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("Install: %v, want %q", err, tt.want)
			}
			if after := h.tree(); !slices.Equal(after, before) {
				t.Errorf("the refusal changed the host:\n%s", strings.Join(after, "\n"))
			}
		})
	}
	h := newForeignHost(t)
	if err := h.Install(t.Context()); err != nil {
		t.Fatal(err)
	}
	h.upgradesOnce()
	busy := errors.New("an upgrade is in progress")
	h.running = func(context.Context) error { return busy }
	if _, err := h.Remove(t.Context()); !errors.Is(err, busy) {
		t.Errorf("Remove during an upgrade: %v", err)
	}
	if _, err := os.Stat(h.path(programPath)); err != nil {
		t.Errorf("the agent is gone: %v", err)
	}
}

// TestSetupIsInterrupted ends installation and removal at each call of systemctl, and repeats them.
func TestSetupIsInterrupted(t *testing.T) {
	for _, verb := range []string{"daemon-reload", "enable", "restart", "disable"} {
		t.Run(verb, func(t *testing.T) {
			h := newForeignHost(t)
			before := h.tree()
			cut := errors.New("cut")
			h.fails[verb] = cut
			if err := h.Install(t.Context()); (verb == "disable") == (err != nil) {
				t.Fatalf("Install: %v", err)
			}
			h.upgradesOnce()
			if _, err := h.Remove(t.Context()); (verb == "disable" || verb == "daemon-reload") != (err != nil) {
				t.Fatalf("Remove: %v", err)
			}
			delete(h.fails, verb)
			h.running = func(context.Context) error { return errors.New("the agent is gone") }
			if _, err := h.Remove(t.Context()); err != nil {
				t.Fatalf("Remove again: %v", err)
			}
			if after := h.tree(); !slices.Equal(after, before) {
				t.Errorf("the host is\n%s\nwant\n%s", strings.Join(after, "\n"), strings.Join(before, "\n"))
			}
		})
	}
}

// A program that is still open for writing, as by a process forked meanwhile, is run once it is closed.
func TestVersionOfBusyProgram(t *testing.T) {
	program := filepath.Join(t.TempDir(), "kubelet")
	if err := os.WriteFile(program, []byte("#!/bin/sh\necho Kubernetes v1.37.2\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	writer, err := os.OpenFile(program, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*busyPause)
	defer cancel()
	if v, err := programVersion(ctx, program); !errors.Is(err, syscall.ETXTBSY) {
		t.Errorf("open for writing: version %q, %v, want ETXTBSY", v, err)
	}
	time.AfterFunc(5*busyPause, func() { writer.Close() })
	if v, err := programVersion(t.Context(), program); v != "v1.37.2" || err != nil {
		t.Errorf("closed meanwhile: version %q, %v", v, err)
	}
}
