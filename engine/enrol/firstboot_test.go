package enrol_test

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"gopkg.in/yaml.v3"

	"constellation/engine/enrol"
	"constellation/internal/testneeds"
)

// boots is a machine of a cloud that boots for the first time, and the server with the programs.
type boots struct {
	*box
	programs string // folder of the fake programs
	release  string // folder of the release on the console's computer
	state    string
	server   *httptest.Server
	machine  string // what `uname -m` prints

	mu     sync.Mutex
	asked  []string
	answer http.Handler // in the place of the files; nil: the files
}

func newBoots(t *testing.T) *boots {
	t.Helper()
	testneeds.Root(t, "to write files as root")
	b := &boots{box: &box{t: t, dir: memory(t)}, programs: fakePrograms(t), release: t.TempDir(), machine: "x86_64"}
	b.fill()
	b.state = filepath.Join(b.dir, "first")
	for _, arch := range []string{"amd64", "arm64"} {
		dir := filepath.Join(b.release, "linux_"+arch)
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		for _, name := range []string{"bootstrapper", "agent"} {
			write(t, filepath.Join(dir, name), strings.Repeat(name+" of "+arch+"\n", 5000), 0o755)
		}
	}
	files := http.StripPrefix("/v1.1.0/", http.FileServer(http.Dir(b.release)))
	b.server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		b.mu.Lock()
		b.asked = append(b.asked, strings.TrimSpace(r.URL.Path+" "+r.Header.Get("Range")))
		h := b.answer
		b.mu.Unlock()
		if h == nil {
			h = files
		}
		h.ServeHTTP(w, r)
	}))
	t.Cleanup(b.server.Close)
	return b
}

// serve changes what the server answers.
func (b *boots) serve(h http.HandlerFunc) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.answer, b.asked = nil, nil
	if h != nil {
		b.answer = h
	}
}

func (b *boots) requests() []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Clone(b.asked)
}

// spec is a Spec with a bit of everything that a node gets.
func (b *boots) spec() enrol.Spec {
	return enrol.Spec{
		Cluster: "demo", ClusterName: "demo", Machine: "a new machine", Release: "v1.1.0",
		Files: []enrol.File{
			{Path: b.path("usr/lib/it/bootstrapper"), Mode: 0o755, Local: filepath.Join(b.release, "linux_amd64/bootstrapper")},
			{Path: b.path("usr/lib/it/agent"), Mode: 0o755, Local: filepath.Join(b.release, "linux_amd64/agent")},
			{Path: b.path("etc/systemd/new.service"), Mode: 0o644, Data: []byte("[Unit]\nDescription=It's $HOME \\ `id`\n")},
			{Path: b.path("etc/runtime/conf"), Mode: 0o644, Data: []byte("ours\n\ttab\n"), Default: "runtime"},
			{Path: b.path("opt/bin/plugin"), Link: "/usr/lib/plugin", Keep: true},
			{Path: b.path("opt/bin/kept"), Link: "/usr/lib/kept", Keep: true},
		},
		Packages: []enrol.Package{{Name: "runtime", Program: b.path("bin/runtime")}, {Name: "shell", Program: "/bin/sh"}},
		Units:    []enrol.Unit{{Name: "runtime.service", Start: true}, {Name: "new.service", Start: true}, {Name: "old.service"}},
	}
}

func (b *boots) sources() enrol.Sources {
	p := map[string]enrol.Programs{}
	for uname, arch := range map[string]string{"x86_64": "amd64", "aarch64": "arm64"} {
		dir := filepath.Join(b.release, "linux_"+arch)
		p[uname] = enrol.Programs{Bootstrapper: filepath.Join(dir, "bootstrapper"), Agent: filepath.Join(dir, "agent")}
	}
	return enrol.Sources{Address: b.server.URL + "/v1.1.0", Programs: p, Reread: []string{"guest-agent*.service"}}.On(b.state)
}

func (b *boots) texts(edit func(*enrol.Spec, *enrol.Sources)) enrol.FirstBoot {
	b.t.Helper()
	spec, from := b.spec(), b.sources()
	if edit != nil {
		edit(&spec, &from)
	}
	f, err := enrol.NewFirstBoot(spec, from)
	if err != nil {
		b.t.Fatal(err)
	}
	return f
}

// userData is a document of cloud-init.
type userData struct {
	WriteFiles []struct {
		Path, Owner, Permissions, Content string
	} `yaml:"write_files"`
	RunCmd [][]string `yaml:"runcmd"`
}

func parse(t *testing.T, text string) (u userData) {
	t.Helper()
	if !strings.HasPrefix(text, "#cloud-config\n") {
		t.Fatalf("it does not begin with #cloud-config: %.60s", text)
	}
	d := yaml.NewDecoder(strings.NewReader(text))
	d.KnownFields(true)
	if err := d.Decode(&u); err != nil {
		t.Fatal(err)
	}
	return u
}

// boot runs the script of user data, as the unit does, with the programs in a folder and in the system.
func (b *boots) boot(text, path string) (string, error) {
	b.t.Helper()
	file := filepath.Join(b.t.TempDir(), "first-boot")
	write(b.t, file, parse(b.t, text).WriteFiles[0].Content, 0o700)
	cmd := exec.CommandContext(b.t.Context(), "sh", file)
	write(b.t, filepath.Join(b.programs, "uname"), "#!/bin/sh\necho "+b.machine+"\n", 0o755)
	cmd.Env = []string{"PATH=" + b.programs + ":" + path, "FAKE=" + b.dir}
	out, err := cmd.CombinedOutput()
	return string(out), err
}

const systemPath = "/usr/bin:/bin"

func (b *boots) mustBoot(text string) {
	b.t.Helper()
	if out, err := b.boot(text, systemPath); err != nil {
		b.t.Fatalf("%v\n%s", err, out)
	}
}

// arrived checks the files of the machine.
func (b *boots) arrived(arch string) {
	b.t.Helper()
	for _, name := range []string{"bootstrapper", "agent"} {
		is, err := os.ReadFile(b.path("usr/lib/it/" + name))
		want, _ := os.ReadFile(filepath.Join(b.release, "linux_"+arch, name))
		if err != nil || !bytes.Equal(is, want) {
			b.t.Errorf("%s has %d bytes, want %d: %v", name, len(is), len(want), err)
		}
		if info, err := os.Stat(b.path("usr/lib/it/" + name)); err != nil || info.Mode() != 0o755 {
			b.t.Errorf("%s: %v, %v", name, info, err)
		}
	}
}

func TestFirstBoot(t *testing.T) {
	t.Parallel()
	b := newBoots(t)
	if err := os.MkdirAll(b.path("opt/bin"), 0o755); err != nil {
		t.Fatal(err)
	}
	write(t, b.path("opt/bin/kept"), "mine", 0o755)
	f := b.texts(nil)
	b.mustBoot(f.CloudInit)
	b.arrived("amd64")
	for name, want := range map[string]string{"etc/systemd/new.service": "[Unit]\nDescription=It's $HOME \\ `id`\n", "etc/runtime/conf": "ours\n\ttab\n", "opt/bin/kept": "mine"} {
		if is, err := os.ReadFile(b.path(name)); err != nil || string(is) != want {
			t.Errorf("%s is %q, want %q: %v", name, is, want, err)
		}
	}
	if to, err := os.Readlink(b.path("opt/bin/plugin")); err != nil || to != "/usr/lib/plugin" {
		t.Errorf("the link leads to %q: %v", to, err)
	}
	if info, err := os.Stat(b.path("etc/systemd/new.service")); err != nil || info.Mode() != 0o644 {
		t.Errorf("the unit: %v, %v", info, err)
	}
	log := b.log()
	if !strings.Contains(log, "install") || !strings.Contains(log, "try-restart guest-agent*.service") {
		t.Errorf("the log is\n%s", log)
	}
	for _, unit := range []string{"runtime.service", "new.service"} {
		if _, err := os.Stat(filepath.Join(b.dir, "active", unit)); err != nil {
			t.Errorf("%s does not run: %v\n%s", unit, err, log)
		}
	}
	// Another boot does nothing, whatever later upgrades changed.
	asked := b.requests()
	write(t, b.path("usr/lib/it/agent"), "of a later release", 0o755)
	b.mustBoot(f.CloudInit)
	if is, _ := os.ReadFile(b.path("usr/lib/it/agent")); string(is) != "of a later release" || b.log() != log || len(b.requests()) != len(asked) {
		t.Error("the second boot changed something")
	}
	if left, _ := filepath.Glob(filepath.Join(b.state, "downloads")); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

// TestFirstBootOfAnotherArchitecture has the digests of each architecture.
func TestFirstBootOfAnotherArchitecture(t *testing.T) {
	t.Parallel()
	b := newBoots(t)
	b.machine = "aarch64"
	b.mustBoot(b.texts(nil).CloudInit)
	b.arrived("arm64")
	b = newBoots(t)
	b.machine = "riscv64"
	if out, err := b.boot(b.texts(nil).CloudInit, systemPath); err == nil || !strings.Contains(out, "there is no program for riscv64") {
		t.Errorf("%v\n%s", err, out)
	}
}

// TestFirstBootRefusesAnotherProgram serves a program that differs in one byte. Nothing of it is left, and nothing starts.
func TestFirstBootRefusesAnotherProgram(t *testing.T) {
	t.Parallel()
	for _, tool := range []string{"curl", "wget"} {
		t.Run(tool, func(t *testing.T) {
			t.Parallel()
			testneeds.Program(t, tool, tool)
			b := newBoots(t)
			path := b.only(tool)
			f := b.texts(nil)
			b.serve(func(w http.ResponseWriter, r *http.Request) {
				text := strings.Repeat("bootstrapper of amd64\n", 5000)
				fmt.Fprint(w, text[:len(text)-2]+"!\n")
			})
			out, err := b.boot(f.CloudInit, path)
			if err == nil || !strings.Contains(out, "it has the SHA-256") || !strings.Contains(out, "want "+fmt.Sprintf("%x", sha256.Sum256([]byte(strings.Repeat("bootstrapper of amd64\n", 5000))))) {
				t.Errorf("%v\n%s", err, out)
			}
			if _, err := os.Stat(b.path("usr/lib/it/bootstrapper")); err == nil {
				t.Error("the program is there")
			}
			if _, err := os.Stat(filepath.Join(b.dir, "active/new.service")); err == nil {
				t.Error("a unit was started")
			}
			// The next attempt gets the right one.
			b.serve(nil)
			if out, err := b.boot(f.CloudInit, path); err != nil {
				t.Fatalf("%v\n%s", err, out)
			}
			b.arrived("amd64")
		})
	}
}

// only returns a folder with the programs of a small image, and one of curl and wget.
func (b *boots) only(tool string) string {
	b.t.Helper()
	dir := b.t.TempDir()
	for _, name := range []string{"sh", "mkdir", "chmod", "cat", "mv", "rm", "ln", "sha256sum", "sync", "flock", "sed", "cut", "tail", "head", "grep", "awk", "md5sum", "touch", "rmdir", "stat", tool} {
		if err := os.Symlink(testneeds.Program(b.t, name, name), filepath.Join(dir, name)); err != nil {
			b.t.Fatal(err)
		}
	}
	return dir
}

// TestFirstBootResumes cuts a download off, and continues where it ended.
func TestFirstBootResumes(t *testing.T) {
	t.Parallel()
	for _, tool := range []string{"curl", "wget"} {
		t.Run(tool, func(t *testing.T) {
			t.Parallel()
			testneeds.Program(t, tool, tool)
			b := newBoots(t)
			path := b.only(tool)
			f := b.texts(nil)
			text := strings.Repeat("bootstrapper of amd64\n", 5000)
			b.serve(func(w http.ResponseWriter, r *http.Request) {
				if r.Header.Get("Range") != "" {
					http.Error(w, "later", http.StatusForbidden)
					return
				}
				w.Header().Set("Content-Length", fmt.Sprint(len(text)))
				fmt.Fprint(w, text[:60000])
				if c, _, err := http.NewResponseController(w).Hijack(); err == nil {
					c.Close()
				}
			})
			begin := time.Now()
			out, err := b.boot(strings.ReplaceAll(strings.ReplaceAll(f.CloudInit, "--retry 5", "--retry 0"), "--tries=5", "--tries=1"), path)
			if err == nil {
				t.Fatalf("it succeeded\n%s", out)
			}
			if part, _ := filepath.Glob(filepath.Join(b.state, "downloads/*")); len(part) != 1 {
				t.Fatalf("parts %v after %v\n%s", part, time.Since(begin), out)
			}
			b.serve(nil)
			if out, err := b.boot(f.CloudInit, path); err != nil {
				t.Fatalf("%v\n%s", err, out)
			}
			b.arrived("amd64")
			if r := b.requests(); len(r) == 0 || !strings.Contains(r[0], "bytes=") {
				t.Errorf("it did not continue: %q", r)
			}
		})
	}
}

// TestFirstBootIsInterrupted fails in each program that the script calls, one after the other, and then succeeds.
func TestFirstBootIsInterrupted(t *testing.T) {
	t.Parallel()
	b := newBoots(t)
	f := b.texts(nil)
	whole := false
	for n := 1; n < 200 && !whole; n++ {
		b.empty()
		count := filepath.Join(b.dir, "count")
		write(t, count, fmt.Sprint(n), 0o644)
		dir := t.TempDir()
		for _, name := range []string{"mv", "curl", "chmod", "sync", "apt-get", "systemctl", "ln"} {
			real := filepath.Join(b.programs, name)
			if _, err := os.Stat(real); err != nil {
				real = testneeds.Program(t, name, name)
			}
			write(t, filepath.Join(dir, name), fmt.Sprintf("#!/bin/sh\nread -r n <%[1]s\nn=$((n-1)); echo $n >%[1]s\nif [ $n = 0 ]; then kill -9 $PPID; exit 1; fi\nexec %[2]s \"$@\"\n", count, real), 0o755)
		}
		file := filepath.Join(t.TempDir(), "first-boot")
		write(t, file, parse(t, f.CloudInit).WriteFiles[0].Content, 0o700)
		cmd := exec.CommandContext(t.Context(), "sh", file)
		cmd.Env = []string{"PATH=" + dir + ":" + b.programs + ":" + systemPath, "FAKE=" + b.dir}
		out, err := cmd.CombinedOutput()
		whole = err == nil
		left, _ := os.ReadFile(count)
		if whole && strings.TrimSpace(string(left)) == "0" {
			t.Fatalf("it succeeded although call %d failed\n%s", n, out)
		}
		b.mustBoot(f.CloudInit)
		b.arrived("amd64")
		if _, err := os.Stat(filepath.Join(b.dir, "active/new.service")); err != nil {
			t.Errorf("after call %d: %v", n, err)
		}
	}
	if !whole {
		t.Error("it never succeeded without an interruption")
	}
}

// TestFirstBootByProxy has programs and packages come by the proxy.
func TestFirstBootByProxy(t *testing.T) {
	t.Parallel()
	b := newBoots(t)
	var mu sync.Mutex
	var asked []string
	proxy := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		asked = append(asked, r.URL.Host)
		mu.Unlock()
		http.FileServer(http.Dir(b.release)).ServeHTTP(w, r)
	}))
	t.Cleanup(proxy.Close)
	b.mustBoot(b.texts(func(s *enrol.Spec, from *enrol.Sources) {
		s.Proxy, from.Address = proxy.URL, "http://programs.invalid"
	}).CloudInit)
	b.arrived("amd64")
	mu.Lock()
	defer mu.Unlock()
	if len(asked) != 2 || asked[0] != "programs.invalid" {
		t.Errorf("the proxy was asked for %q", asked)
	}
	if args, _ := os.ReadFile(filepath.Join(b.dir, "args")); !strings.Contains(string(args), "Acquire::http::Proxy="+proxy.URL) {
		t.Errorf("apt-get was called with %s", args)
	}
}

// TestFirstBootDocuments reads both texts as the machine does.
func TestFirstBootDocuments(t *testing.T) {
	t.Parallel()
	b := newBoots(t)
	f := b.texts(nil)
	u := parse(t, f.CloudInit)
	if len(u.WriteFiles) != 2 || len(u.RunCmd) != 2 || u.RunCmd[1][0] != "systemctl" {
		t.Fatalf("%+v", u)
	}
	for i, want := range []struct{ path, mode string }{{"/usr/lib/constellation/first-boot", "0700"}, {"/etc/systemd/system/constellation-first-boot.service", "0644"}} {
		if w := u.WriteFiles[i]; w.Path != want.path || w.Permissions != want.mode || w.Owner != "root:root" {
			t.Errorf("file %+v, want %+v", w, want)
		}
	}
	// The other text writes the same files.
	for i, w := range u.WriteFiles {
		if !strings.Contains(f.Script, w.Content) {
			t.Errorf("the script does not write file %d", i)
		}
	}
	for name, text := range map[string]string{"the script of user data": u.WriteFiles[0].Content, "the script": f.Script} {
		for _, shell := range []string{"dash", "bash"} {
			path, err := exec.LookPath(shell)
			if err != nil {
				continue
			}
			cmd := exec.CommandContext(t.Context(), path, "-n")
			cmd.Stdin = strings.NewReader(text)
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Errorf("%s is no script for %s: %v\n%s", name, shell, err, out)
			}
		}
	}
	if n := max(len(f.CloudInit), len(f.Script)); n > 64<<10 {
		t.Errorf("%d bytes", n)
	}
}

// TestFirstBootOfANode has what a machine of the product gets.
func TestFirstBootOfANode(t *testing.T) {
	t.Parallel()
	b := newBoots(t)
	from := b.sources()
	spec, err := enrol.StockNode(enrol.Spec{Cluster: "demo", Files: []enrol.File{{Path: enrol.EnvironmentFile, Mode: 0o644, Data: []byte("CONSTELLATION_PROVIDER=gcp\n")}}}, &from)
	if err != nil {
		t.Fatal(err)
	}
	f, err := enrol.NewFirstBoot(spec, from)
	if err != nil {
		t.Fatal(err)
	}
	text := parse(t, f.CloudInit).WriteFiles[0].Content
	dir := t.TempDir()
	write(t, filepath.Join(dir, "user-data"), f.CloudInit, 0o600)
	write(t, filepath.Join(dir, "first-boot"), text, 0o600)
	write(t, filepath.Join(dir, "startup-script"), f.Script, 0o600)
	for _, check := range [][]string{{"cloud-init", "schema", "--config-file", "user-data"}, {"shellcheck", "--severity=warning", "--shell=sh", "first-boot", "startup-script"}} {
		path, err := exec.LookPath(check[0])
		if err != nil {
			continue // most computers have neither
		}
		cmd := exec.CommandContext(t.Context(), path, check[1:]...)
		cmd.Dir = dir
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("%s: %v\n%s", check[0], err, out)
		}
	}
	for _, want := range []string{
		"CONSTELLATION_PROVIDER=gcp", "fetch /usr/lib/constellation/bootstrapper", "fetch /usr/lib/constellation/agent", "put /etc/systemd/system/kubelet.service 644", "SystemdCgroup = true",
		"net.ipv4.ip_forward = 1", "br_netfilter", " containerd\n", " runc\n", " conntrack\n", "/opt/cni/bin/loopback /usr/lib/cni/loopback", "constellation-bootstrapper.service",
		"put /etc/systemd/system/constellation-certifier.service 644", "PathExists=/var/lib/constellation/certifier-keys.json", "constellation-certifier.path constellation-kms.path\n", "put /etc/systemd/system/constellation-kms.service 644", "try-restart 'systemd-sysctl.service'",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("it lacks %q", want)
		}
	}
	for _, name := range []string{"bootstrapper", "agent"} {
		for _, arch := range []string{"amd64", "arm64"} {
			content, _ := os.ReadFile(filepath.Join(b.release, "linux_"+arch, name))
			if sum := fmt.Sprintf("%x", sha256.Sum256(content)); !strings.Contains(text, sum) {
				t.Errorf("it lacks the digest of %s for %s", name, arch)
			}
		}
	}
}

func TestFirstBootRefusals(t *testing.T) {
	t.Parallel()
	b := newBoots(t)
	for name, edit := range map[string]func(*enrol.Spec, *enrol.Sources){
		"no address": func(_ *enrol.Spec, from *enrol.Sources) { from.Address = "" },
		"a login":    func(_ *enrol.Spec, from *enrol.Sources) { from.Address = "https://me:secret@example.com/v1" },
		"a quote":    func(_ *enrol.Spec, from *enrol.Sources) { from.Address = "https://example.com/'$(id)'" },
		"a file":     func(_ *enrol.Spec, from *enrol.Sources) { from.Address = "file:///srv" },
		"a missing program": func(_ *enrol.Spec, from *enrol.Sources) {
			from.Programs["x86_64"] = enrol.Programs{Bootstrapper: "none", Agent: "none"}
		},
		"no text":         func(s *enrol.Spec, _ *enrol.Sources) { s.Files[2].Data = []byte("\x00\n") },
		"half a line":     func(s *enrol.Spec, _ *enrol.Sources) { s.Files[2].Data = []byte("half") },
		"an early end":    func(s *enrol.Spec, _ *enrol.Sources) { s.Files[2].Data = []byte("END-OF-CONSTELLATION\nid\n") },
		"too much":        func(s *enrol.Spec, _ *enrol.Sources) { s.Files[2].Data = bytes.Repeat([]byte("a line\n"), 40000) },
		"an odd path":     func(s *enrol.Spec, _ *enrol.Sources) { s.Files[2].Path = "/etc/$(id)" },
		"a proxy's login": func(s *enrol.Spec, _ *enrol.Sources) { s.Proxy = "http://me:secret@proxy:3128" },
	} {
		spec, from := b.spec(), b.sources()
		edit(&spec, &from)
		if f, err := enrol.NewFirstBoot(spec, from); err == nil || f != (enrol.FirstBoot{}) || strings.Contains(err.Error(), "secret") {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := enrol.StockNode(enrol.Spec{Cluster: "demo"}, &enrol.Sources{}); err == nil {
		t.Error("without programs")
	}
}

// TestFirstBootWithoutNetwork fails until there is one: the unit repeats it.
func TestFirstBootWithoutNetwork(t *testing.T) {
	t.Parallel()
	b := newBoots(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	closed := l.Addr().String()
	l.Close()
	f := b.texts(func(_ *enrol.Spec, from *enrol.Sources) { from.Address = "http://" + closed })
	if out, err := b.boot(strings.ReplaceAll(f.CloudInit, "--retry 5", "--retry 0"), systemPath); err == nil || !strings.Contains(out, "fetch http://"+closed) {
		t.Errorf("%v\n%s", err, out)
	}
	unit := parse(t, f.CloudInit).WriteFiles[1].Content
	for _, want := range []string{"Restart=on-failure", "ConditionPathExists=!" + b.state + "/done", "WantedBy=multi-user.target"} {
		if !strings.Contains(unit, want) {
			t.Errorf("the unit lacks %s", want)
		}
	}
}
