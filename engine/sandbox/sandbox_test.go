package sandbox

import (
	"context"
	"errors"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"constellation/assets"
	"constellation/engine"
	"constellation/engine/attestation/attestationtest"
	"constellation/engine/cloud"
	"constellation/engine/cloud/sandboxapi"
	"constellation/engine/plan"
	"constellation/engine/release"
	"constellation/engine/sandbox/build"
	"constellation/engine/version"
	"constellation/engine/workspace"
)

func testCA(t *testing.T) (cert, key string) {
	t.Helper()
	c, k, err := attestationtest.CreateCA("demo")
	if err != nil {
		t.Fatal(err)
	}
	return string(c), string(k)
}

func TestNamesOfSandboxes(t *testing.T) {
	for workspace, prefix := range map[string]string{
		"/home/me/demo":                     "demo-",
		"/home/me/My Cluster (prod)":        "my-cluster-prod-",
		"/":                                 "",
		"/x/" + strings.Repeat("long-", 20): "long-long-long-long-long-",
		"/x/ünïcode":                        "n-code-",
	} {
		name := defaultName(workspace)
		if !strings.HasPrefix(name, prefix) || len(name) != len(prefix)+4 {
			t.Errorf("%s: %s, want %s and four hex digits", workspace, name, prefix)
		}
		if got, err := (Dirs{}).resolve(name); err != nil || got != name {
			t.Errorf("%s makes %s: %v", workspace, name, err)
		}
	}
	if defaultName("/a/demo") == defaultName("/b/demo") {
		t.Error("two workspaces called demo share a sandbox")
	}
}

func TestWorkspaceFindsItsSandboxByAnyName(t *testing.T) {
	d := Dirs{State: t.TempDir()}
	st := newState("chosen", "/home/me/demo", time.Now())
	if err := os.MkdirAll(d.of("chosen"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := st.write(d.of("chosen", stateName)); err != nil {
		t.Fatal(err)
	}
	if got, err := d.resolve("/home/me/demo/"); err != nil || got != "chosen" {
		t.Errorf("got %s, %v", got, err)
	}
	if got, err := d.resolve("/home/me/other"); err != nil || got != defaultName("/home/me/other") {
		t.Errorf("got %s, %v", got, err)
	}
}

func TestBadSpecsAreRefusedBeforeAnythingIsTouched(t *testing.T) {
	dirs := Dirs{Cache: filepath.Join(t.TempDir(), "cache"), State: filepath.Join(t.TempDir(), "state")}
	s := New(dirs, "", discard())
	w := t.TempDir()
	for name, tt := range map[string]struct {
		spec engine.SandboxSpec
		want string
	}{
		"relative workspace":                   {engine.SandboxSpec{Workspace: "demo"}, "no absolute path"},
		"bad name":                             {engine.SandboxSpec{Workspace: w, Name: "Demo!"}, "cannot be the name"},
		"bad version":                          {engine.SandboxSpec{Workspace: w, Kubernetes: "latest"}, "latest"},
		"unknown fault":                        {engine.SandboxSpec{Workspace: w, Faults: []string{"meteor"}}, `"meteor" is unknown`},
		"fault of no machine":                  {engine.SandboxSpec{Workspace: w, Faults: []string{"never-boot=nope"}}, "the machines are control-plane-0, worker-0, worker-1"},
		"machines of no kind":                  {engine.SandboxSpec{Workspace: w, Machines: "imagined"}, `no "imagined" machines`},
		"times of real ones":                   {engine.SandboxSpec{Workspace: w, Boot: time.Second}, "only hollow machines have configurable times"},
		"too many hollow":                      {engine.SandboxSpec{Workspace: w, Machines: "hollow", Workers: 5001}, "5001 hollow workers are too many"},
		"fault of real ones":                   {engine.SandboxSpec{Workspace: w, Machines: "hollow", Faults: []string{"registry-empty"}}, "only machines in which something runs can have registry-empty"},
		"hollow of an image that there is not": {engine.SandboxSpec{Workspace: w, Machines: "hollow", Image: "v9.0.0"}, "there is no OS image v9.0.0"},
		"unknown release":                      {engine.SandboxSpec{Workspace: w, Release: "v9.0.0"}, "v9.0.0"},
		"Kubernetes too new":                   {engine.SandboxSpec{Workspace: w, Release: "v1.0.0", Kubernetes: "v1.36.3"}, "1.36"},
		"Kubernetes made up":                   {engine.SandboxSpec{Workspace: w, Kubernetes: "v1.99.0"}, "1.99"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := s.Up(t.Context(), tt.spec, nil)
			if plan.ExitCode(err) != plan.ExitUsage || plan.Remedy(err) == "" || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %v (exit %d, remedy %q)", err, plan.ExitCode(err), plan.Remedy(err))
			}
		})
	}
	for _, dir := range []string{dirs.Cache, dirs.State} {
		if _, err := os.Lstat(dir); err == nil {
			t.Errorf("%s was made", dir)
		}
	}
	if got := files(t, w); len(got) != 0 {
		t.Errorf("the workspace has %v", got)
	}
}

// A fault that is accepted without effect would look like a cloud that tolerates it.
func TestFaultsThatComeTooLateAreRefused(t *testing.T) {
	info := sandboxapi.Info{
		Faults: []string{"never-boot=worker-1"},
		Machines: []sandboxapi.Machine{
			{Instance: cloud.Instance{Name: "worker-0"}, Boot: sandboxapi.BootReady},
			{Instance: cloud.Instance{Name: "worker-1"}, Boot: sandboxapi.BootBooting},
			{Instance: cloud.Instance{Name: "worker-2"}, Boot: sandboxapi.BootCreating},
		},
	}
	for _, tt := range []struct {
		faults []string
		want   string // "": they are accepted
	}{
		{[]string{"api-429=0.2", "kill=worker-0:image"}, ""},
		{[]string{}, ""},
		{[]string{"never-boot=worker-1"}, ""}, // it was there before
		{[]string{"boot-delay=worker-2:30s"}, ""},
		{[]string{"never-boot=worker-7"}, ""},
		{[]string{"never-boot=worker-0"}, "fault never-boot strikes when a machine is made, and worker-0 is there already"},
		{[]string{"api-500=1", "boot-delay=worker-1:30s"}, "fault boot-delay strikes when a machine is made, and worker-1 is there already"},
	} {
		err := inTime("set up sandbox demo", tt.faults, info)
		if tt.want == "" && err != nil || tt.want != "" && (err == nil || err.Error() != "set up sandbox demo: "+tt.want || plan.Remedy(err) == "" || plan.ExitCode(err) != plan.ExitUsage) {
			t.Errorf("%v: got %v, want %q", tt.faults, err, tt.want)
		}
	}
}

func TestAbsentSandboxIsNotFound(t *testing.T) {
	s := New(Dirs{Cache: t.TempDir(), State: t.TempDir()}, "", discard())
	_, statusErr := s.Status(t.Context(), "/nowhere")
	_, execErr := s.Exec(t.Context(), "nobody", "worker-0", nil, nil, nil, nil, false)
	for _, err := range []error{statusErr, execErr} {
		if !errors.Is(err, cloud.ErrNotFound) || plan.Remedy(err) == "" {
			t.Errorf("got %v", err)
		}
	}
}

// Sandboxes, generated configurations and the newest release have one default version, and every
// release offers it: upgrades of the sandbox begin with the oldest.
func TestDefaultVersionsAgree(t *testing.T) {
	catalogue, err := release.Load(assets.Releases())
	if err != nil {
		t.Fatal(err)
	}
	all := catalogue.Releases()
	newest := all[len(all)-1]
	if is := newest.DefaultKubernetes.String(); is != build.DefaultVersion || workspace.DefaultKubernetes != build.DefaultVersion {
		t.Errorf("the default is %s in release %s, %s in a configuration, and %s in a sandbox", is, newest.Version, workspace.DefaultKubernetes, build.DefaultVersion)
	}
	for _, r := range all {
		if _, err := r.ForKubernetes(version.MustParse(build.DefaultVersion)); err != nil {
			t.Error(err)
		}
	}
	if _, err := newest.ForKubernetes(version.MustParse(build.NextVersion)); err != nil {
		t.Error(err)
	}
}

func TestVersionThatCannotBeBuiltIsRefused(t *testing.T) {
	s := New(Dirs{Cache: t.TempDir(), State: t.TempDir()}, "", discard())
	for _, v := range []string{"v1.2.3", "nonsense", ""} {
		err := s.Fetch(t.Context(), v, engine.FetchOptions{}, nil)
		if plan.ExitCode(err) != plan.ExitUsage || !strings.Contains(plan.Remedy(err), "v1.35.4") {
			t.Errorf("%q: %v", v, err)
		}
	}
}

func TestTwoVerbsTakeTurns(t *testing.T) {
	d := Dirs{State: t.TempDir()}
	unlock, err := d.lock(t.Context(), "demo", func() { t.Error("waited for nobody") })
	if err != nil {
		t.Fatal(err)
	}
	other, err := d.lock(t.Context(), "other", func() { t.Error("two sandboxes wait for each other") })
	if err != nil {
		t.Fatal(err)
	}
	other(true)

	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	if _, err := d.lock(ctx, "demo", func() {}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v", err)
	}
	got := make(chan func(bool))
	waited := make(chan struct{})
	go func() {
		unlock, err := d.lock(t.Context(), "demo", func() { close(waited) })
		if err != nil {
			t.Error(err)
		}
		got <- unlock
	}()
	<-waited
	unlock(true) // as down does: the file that the other waits for is gone
	second := <-got
	ctx, cancel = context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	if _, err := d.lock(ctx, "demo", func() {}); err == nil {
		t.Error("two hold the lock")
	}
	second(true)
	if left := files(t, d.sandboxes()); len(left) != 0 {
		t.Errorf("left %v", left)
	}
}

func TestProcessIsNotMistakenForALaterOne(t *testing.T) {
	cmd := exec.Command("sleep", "60")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() { cmd.Wait(); close(done) }()
	p := process{pid: cmd.Process.Pid}
	p.start, _ = startOf(p.pid)
	file := filepath.Join(t.TempDir(), pidName)
	if err := p.write(file); err != nil {
		t.Fatal(err)
	}
	if got, err := readProcess(file); err != nil || got != p || !got.alive() {
		t.Errorf("%+v, %v", got, err)
	}
	imposter := process{p.pid, "another-boot/123"}
	if err := imposter.end(t.Context(), 0); err != nil || !p.alive() {
		t.Errorf("a process with the number of an older one was ended: %v", err)
	}
	if err := p.end(t.Context(), time.Second); err != nil || p.alive() {
		t.Errorf("it lives: %v", err)
	}
	<-done
	for _, bad := range []string{"", "0 x", "1 x", "-5 x", "text"} {
		os.WriteFile(file, []byte(bad), 0o600)
		if p, err := readProcess(file); err == nil {
			t.Errorf("%q is %+v", bad, p)
		}
	}
}

func TestPortsAreKeptOrRefused(t *testing.T) {
	var port uint16
	l, err := hostListener(t.Context(), "demo", &port, "init")
	if err != nil {
		t.Fatal(err)
	}
	if port < firstHostPort || port >= lastHostPort || l.Addr().(*net.TCPAddr).Port != int(port) {
		t.Errorf("port %d, listens on %s", port, l.Addr())
	}
	var second uint16
	l2, err := hostListener(t.Context(), "demo", &second, "init")
	if err != nil || second == port {
		t.Errorf("second port %d: %v", second, err)
	}
	l2.Close()

	_, err = hostListener(t.Context(), "demo", &port, "the API server")
	if err == nil || !strings.Contains(err.Error(), "address already in use") || !strings.Contains(err.Error(), "end the program") {
		t.Errorf("a port that is taken: %v", err)
	}
	l.Close()
	l, err = hostListener(t.Context(), "demo", &port, "the API server")
	if err != nil || l.Addr().(*net.TCPAddr).Port != int(port) {
		t.Errorf("the same port again: %v", err)
	}
	l.Close()
}
