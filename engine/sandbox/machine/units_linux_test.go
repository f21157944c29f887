package machine

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"golang.org/x/sys/unix"
)

func TestMirrorOfThisComputer(t *testing.T) {
	for _, tt := range []struct {
		name           string
		lists, sources []string
		want           string
	}{
		{name: "no sources mean the default", want: defaultMirror},
		{
			name:    "the mirror of a deb822 source",
			sources: []string{"Types: deb\n# a comment\nURIs: http://mirror.example/debian\nSuites: bookworm bookworm-updates\nComponents: main\n"},
			want:    "http://mirror.example/debian",
		},
		{
			name: "security updates are no mirror, another vendor's neither",
			sources: []string{
				"Types: deb\nURIs: http://security.example/debian-security\nSuites: bookworm-security\nComponents: main\n\nTypes: deb\nURIs: http://a.example/debian\nSuites: trixie\nComponents: main contrib\n",
				"Types: deb\nURIs: https://node.example\nSuites: nodistro\nComponents: main\n",
			},
			want: "http://a.example/debian",
		},
		{
			name:    "a disabled source does not count",
			sources: []string{"Types: deb\nEnabled: no\nURIs: http://off.example/debian\nSuites: bookworm\nComponents: main\n"},
			want:    defaultMirror,
		},
		{name: "source packages do not count", sources: []string{"Types: deb-src\nURIs: http://src.example/debian\nSuites: bookworm\nComponents: main\n"}, want: defaultMirror},
		{
			name:    "the mirror of a one-line source with options",
			lists:   []string{"# deb http://old.example/debian bookworm main\ndeb [arch=amd64 signed-by=/x.gpg] http://line.example/debian bookworm main contrib\n"},
			sources: nil,
			want:    "http://line.example/debian",
		},
		{name: "Ubuntu's archive is not Debian's", lists: []string{"deb http://archive.ubuntu.example/ubuntu noble main universe\n"}, want: defaultMirror},
		{name: "a source of an unknown scheme is left alone", lists: []string{"deb cdrom:[Debian]/ bookworm main\n"}, want: defaultMirror},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := mirrorOf(tt.lists, tt.sources); got != tt.want {
				t.Errorf("mirror is %s, want %s", got, tt.want)
			}
		})
	}
}

// Everything that affects a machine's behavior must change the digest; nothing else may.
func TestContentDigest(t *testing.T) {
	make := func(t *testing.T) string {
		dir := t.TempDir()
		for name, data := range map[string]string{"bin/program": "one", "etc/config": "two"} {
			if err := os.MkdirAll(filepath.Join(dir, filepath.Dir(name)), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(dir, name), []byte(data), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		if err := os.Symlink("program", filepath.Join(dir, "bin/link")); err != nil {
			t.Fatal(err)
		}
		return dir
	}
	for _, tt := range []struct {
		name    string
		change  func(dir string) error
		changed string
	}{
		{name: "nothing", change: func(string) error { return nil }, changed: ""},
		{name: "the time of a file", change: func(d string) error {
			return os.Chtimes(filepath.Join(d, "bin/program"), time.Now(), time.Unix(1, 0))
		}, changed: ""},
		{name: "a copy of a file in its place", change: func(d string) error {
			if err := os.WriteFile(filepath.Join(d, "new"), []byte("one"), 0o644); err != nil {
				return err
			}
			return os.Rename(filepath.Join(d, "new"), filepath.Join(d, "bin/program"))
		}, changed: ""},
		{name: "a byte, with size and time as before", change: func(d string) error {
			p := filepath.Join(d, "bin/program")
			info, err := os.Stat(p)
			if err != nil {
				return err
			}
			return errors.Join(os.WriteFile(p, []byte("0ne"), 0o644), os.Chtimes(p, time.Time{}, info.ModTime()))
		}, changed: "bin/program"},
		{name: "a mode", change: func(d string) error { return os.Chmod(filepath.Join(d, "bin/program"), 0o755) }, changed: "bin/program"},
		{name: "a link", change: func(d string) error {
			return errors.Join(os.Remove(filepath.Join(d, "bin/link")), os.Symlink("other", filepath.Join(d, "bin/link")))
		}, changed: "bin/link"},
		{name: "one file more", change: func(d string) error { return os.WriteFile(filepath.Join(d, "etc/more"), nil, 0o644) }, changed: "etc/more"},
		{name: "one file less", change: func(d string) error { return os.Remove(filepath.Join(d, "etc/config")) }, changed: "etc/config"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			ctx, dir := context.Background(), make(t)
			before, err := scan(ctx, dir, nil)
			if err != nil {
				t.Fatal(err)
			}
			if err := tt.change(dir); err != nil {
				t.Fatal(err)
			}
			// With the previous content, as at a machine's start, and without.
			for _, known := range []content{before, nil} {
				after, err := scan(ctx, dir, known)
				if err != nil {
					t.Fatal(err)
				}
				if got := before.difference(after); got != tt.changed {
					t.Errorf("differs in %q, want %q", got, tt.changed)
				}
				if same := bytes.Equal(before.digest(), after.digest()); same != (tt.changed == "") {
					t.Errorf("digest is the same: %v", same)
				}
			}
		})
	}
}

func TestContentIsReadOnce(t *testing.T) {
	ctx, dir := context.Background(), t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "file"), []byte("data"), 0o600); err != nil {
		t.Fatal(err)
	}
	known, err := scan(ctx, dir, nil)
	if err != nil {
		t.Fatal(err)
	}
	// A line that does not match the file: it is kept if the file is not read again.
	e := known["file"]
	e.Line += "!"
	known["file"] = e
	again, err := scan(ctx, dir, known)
	if err != nil {
		t.Fatal(err)
	}
	if again["file"].Line != e.Line {
		t.Error("a file with the stamp of before was read again")
	}
}

func TestFilesOfTheUpperLayer(t *testing.T) {
	lower := t.TempDir()
	for _, d := range []string{"usr/bin", "etc", "root"} {
		if err := os.MkdirAll(filepath.Join(lower, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chmod(filepath.Join(lower, "root"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("usr/bin", filepath.Join(lower, "bin")); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(lower, "etc/passwd"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name, path string
		mode       fs.FileMode
		want       fs.FileMode // of the file; 0 if it must be refused
		dirMode    fs.FileMode
	}{
		{name: "a file gets its mode", path: "/etc/key", mode: 0o600, want: 0o600, dirMode: 0o755},
		{name: "no mode means readable by all", path: "/etc/name", mode: 0, want: 0o644, dirMode: 0o755},
		{name: "a directory keeps the image's mode", path: "/root/.profile", mode: 0, want: 0o644, dirMode: 0o700},
		{name: "a new directory is made", path: "/opt/a/file", mode: 0, want: 0o644, dirMode: 0o755},
		{name: "a directory must not hide a link", path: "/bin/tool", mode: 0, want: 0, dirMode: 0},
		{name: "a directory must not hide a file", path: "/etc/passwd/x", mode: 0, want: 0, dirMode: 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			upper, err := os.OpenRoot(dir)
			if err != nil {
				t.Fatal(err)
			}
			defer upper.Close()
			err = writeUpper(upper, []string{t.TempDir(), lower}, tt.path, File{Data: []byte("x"), Mode: tt.mode})
			if tt.want == 0 {
				if err == nil {
					t.Fatal("it was written")
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			for path, want := range map[string]fs.FileMode{tt.path: tt.want, filepath.Dir(tt.path): tt.dirMode} {
				info, err := os.Lstat(filepath.Join(dir, path))
				if err != nil {
					t.Fatal(err)
				}
				if info.Mode().Perm() != want {
					t.Errorf("%s has mode %o, want %o", path, info.Mode().Perm(), want)
				}
			}
		})
	}
}

func TestSpecs(t *testing.T) {
	good := Spec{Name: "worker-0", IP: netip.MustParseAddr("10.42.0.20"), PodCIDR: netip.MustParsePrefix("10.244.3.0/24"), Image: &Image{}}
	for _, tt := range []struct {
		name string
		spec func(*Spec)
		ok   bool
	}{
		{name: "a good one", spec: func(*Spec) {}, ok: true},
		{name: "the gateway's address", spec: func(s *Spec) { s.IP = Gateway }, ok: false},
		{name: "an address outside of the network", spec: func(s *Spec) { s.IP = netip.MustParseAddr("192.0.2.1") }, ok: false},
		{name: "no address", spec: func(s *Spec) { s.IP = netip.Addr{} }, ok: false},
		{name: "no range for pods", spec: func(s *Spec) { s.PodCIDR = netip.Prefix{} }, ok: false},
		{name: "a range for pods with host bits", spec: func(s *Spec) { s.PodCIDR = netip.MustParsePrefix("10.244.3.1/24") }, ok: false},
		{name: "a range for pods that holds machines", spec: func(s *Spec) { s.PodCIDR = netip.MustParsePrefix("10.42.0.0/16") }, ok: false},
		{name: "no image", spec: func(s *Spec) { s.Image = nil }, ok: false},
		{name: "a relative path of a file", spec: func(s *Spec) { s.Files = map[string]File{"etc/x": {}} }, ok: false},
		{name: "a path that climbs", spec: func(s *Spec) { s.Files = map[string]File{"/etc/../../x": {}} }, ok: false},
		{name: "a file that is setuid", spec: func(s *Spec) { s.Files = map[string]File{"/etc/x": {Mode: fs.ModeSetuid | 0o755}} }, ok: false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := good
			tt.spec(&s)
			if err := checkSpec(s); (err == nil) != tt.ok {
				t.Errorf("err is %v", err)
			}
		})
	}
}

func TestNames(t *testing.T) {
	for name, ok := range map[string]bool{
		"worker-0": true, "a": true, strings.Repeat("a", 63): true,
		"": false, strings.Repeat("a", 64): false, "A": false, "-a": false, "a-": false, "a/b": false, "..": false, "a.b": false, "--root": false,
	} {
		if got := nameRule.MatchString(name); got != ok {
			t.Errorf("%q may be a name: %v, want %v", name, got, ok)
		}
	}
}

func TestImageVersionIsNoWayIntoTheImage(t *testing.T) {
	for _, version := range []string{"", "v1\nPATH=x", "../v1.0.0", "v1.0.0;reboot", "$(x)", "v 1"} {
		if _, err := OSImage(context.Background(), t.TempDir(), t.TempDir(), ImageSpec{Version: version}, nil); err == nil {
			t.Errorf("%q was taken as a version", version)
		}
	}
}

// The bundle defines the isolation: it is compared with the design, field by field.
func TestBundleIsolates(t *testing.T) {
	b := bundle(bundleSpec{name: "worker-0", root: "/r", namespace: "/n", cgroup: "constellation/x/worker-0", disk: "/d", tpm: "/t"})
	for _, c := range []string{"CAP_SYS_TIME", "CAP_SYS_MODULE", "CAP_SYS_RAWIO", "CAP_SYS_BOOT", "CAP_SYS_RESOURCE", "CAP_MAC_ADMIN", "CAP_MAC_OVERRIDE", "CAP_BPF", "CAP_PERFMON", "CAP_SYSLOG", "CAP_AUDIT_CONTROL", "CAP_DAC_READ_SEARCH"} {
		for _, set := range [][]string{b.Process.Capabilities.Bounding, b.Process.Capabilities.Effective, b.Process.Capabilities.Permitted, b.Process.Capabilities.Inheritable, b.Process.Capabilities.Ambient} {
			if slices.Contains(set, c) {
				t.Errorf("the machine has %s", c)
			}
		}
	}
	if b.Linux.Seccomp != nil {
		t.Error("the filter is part of what is measured: images of before would have other measurements")
	}
	for _, unified := range []bool{false, true} {
		h := bundle(bundleSpec{})
		harden(h, unified)
		var all []string
		for _, c := range h.Linux.Seccomp.Syscalls {
			if c.Action != specs.ActErrno || c.ErrnoRet == nil || *c.ErrnoRet == 0 {
				t.Errorf("system calls %v do not fail", c.Names)
			}
			all = append(all, c.Names...)
		}
		for _, c := range []string{"kexec_load", "init_module", "open_by_handle_at", "fanotify_init", "reboot", "clock_settime", "userfaultfd", "keyctl"} {
			if !slices.Contains(all, c) {
				t.Errorf("a machine may call %s", c)
			}
		}
		if slices.Contains(all, "bpf") == unified {
			t.Errorf("with cgroup v2 alone %t, bpf is refused: %t", unified, !unified)
		}
		for _, c := range []string{"mount", "setns", "unshare", "clone", "clone3", "pivot_root", "seccomp", "ptrace", "mknodat"} {
			if slices.Contains(all, c) {
				t.Errorf("a machine cannot run containers without %s", c)
			}
		}
	}
	namespaces := map[string]string{}
	for _, n := range b.Linux.Namespaces {
		namespaces[string(n.Type)] = n.Path
	}
	for _, n := range []string{"pid", "ipc", "uts", "mount", "cgroup"} {
		if path, ok := namespaces[n]; !ok || path != "" {
			t.Errorf("the machine has no new %s namespace", n)
		}
	}
	if namespaces["network"] != "/n" {
		t.Errorf("the machine's network is %q", namespaces["network"])
	}
	if r := b.Linux.Resources; len(r.Devices) != 1 || r.Devices[0].Allow || r.Devices[0].Access != "rwm" || r.Devices[0].Type != "" {
		t.Errorf("devices are not denied: %v", r.Devices)
	}
	if filepath.IsAbs(b.Linux.CgroupsPath) {
		t.Error("the machine's cgroup leaves that of its parent")
	}
	for _, p := range []string{"/proc/sysrq-trigger", "/proc/kcore", "/sys/firmware"} {
		if !slices.Contains(b.Linux.MaskedPaths, p) {
			t.Errorf("%s is not masked", p)
		}
	}
	for _, p := range []string{"/proc/sys/kernel", "/proc/sys/vm", "/proc/sys/fs"} {
		if !slices.Contains(b.Linux.ReadonlyPaths, p) {
			t.Errorf("%s is writable", p)
		}
	}
	for _, m := range b.Mounts {
		switch {
		case m.Type == "bind" && m.Destination == TPMDir:
			if !slices.Contains(m.Options, "ro") {
				t.Error("the machine can replace its TPM's socket")
			}
		case m.Type == "bind" && !strings.HasPrefix(m.Source, "/d/"):
			t.Errorf("the machine sees %s of this computer", m.Source)
		case m.Destination == "/sys" && !slices.Contains(m.Options, "ro"):
			t.Error("/sys is writable")
		}
	}
	var mask uint64
	for _, c := range capabilities {
		bit, ok := capabilityBits[c]
		if !ok {
			t.Errorf("Check does not look for %s", c)
		}
		mask |= 1 << bit
	}
	// In the format of the kernel's CapBnd. docs/machines.md lists the purpose of each.
	if measured := uint64(0xa82c35fb); mask != measured {
		t.Errorf("machines have capabilities %x, want %x: no other was measured to be needed", mask, measured)
	}
}

func TestCNIList(t *testing.T) {
	b, err := cniList(netip.MustParsePrefix("10.244.7.0/24"))
	if err != nil {
		t.Fatal(err)
	}
	var list struct {
		CNIVersion string `json:"cniVersion"`
		Plugins    []struct {
			Type string
			IPAM struct{ Ranges [][]struct{ Subnet string } }
		}
	}
	if err := json.Unmarshal(b, &list); err != nil {
		t.Fatal(err)
	}
	if list.CNIVersion != "0.4.0" || len(list.Plugins) != 2 || list.Plugins[0].Type != "ptp" || list.Plugins[1].Type != "portmap" {
		t.Errorf("list is %+v", list)
	}
	if got := list.Plugins[0].IPAM.Ranges[0][0].Subnet; got != "10.244.7.0/24" {
		t.Errorf("pods get addresses of %s", got)
	}
}

func TestChangesCannotLeaveTheRoot(t *testing.T) {
	outside := t.TempDir()
	if err := os.WriteFile(filepath.Join(outside, "canary"), []byte("alive"), 0o600); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if err := os.Symlink(outside, filepath.Join(dir, "way-out")); err != nil {
		t.Fatal(err)
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	for _, c := range []change{
		removed{"way-out/canary"},
		newFile{"way-out/new", []byte("x"), 0o600},
		newLink{"way-out/link", "canary"},
		newDir{"way-out/dir", 0o700},
		newFile{"../escaped", []byte("x"), 0o600},
	} {
		if err := c.apply(root); err == nil {
			t.Errorf("made the change %s", c)
		}
	}
	left, err := os.ReadDir(outside)
	if err != nil {
		t.Fatal(err)
	}
	if len(left) != 1 || left[0].Name() != "canary" {
		t.Errorf("outside of the root there is %v", left)
	}
}

func TestOverlayPaths(t *testing.T) {
	for path, ok := range map[string]bool{
		"/var/lib/x": true, "/home/a b/x": true,
		"relative": false, "/a:b": false, "/a,b": false, `/a\b`: false, "/a/../b": false, "": false,
	} {
		if got := checkOverlayPath(path) == nil; got != ok {
			t.Errorf("%q can be used: %v, want %v", path, got, ok)
		}
	}
}

func TestProcessIdentity(t *testing.T) {
	cmd := exec.Command("sleep", "60")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	defer func() { <-ended }()
	p, err := identify(cmd.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	go func() { defer close(ended); _ = cmd.Wait() }()
	if !p.alive() {
		t.Error("a running process is not alive")
	}
	for name, other := range map[string]process{
		"that started at another time":             {PID: p.PID, Start: p.Start + 1, Boot: p.Boot},
		"of another boot":                          {PID: p.PID, Start: p.Start, Boot: "another"},
		"without a PID":                            {},
		"that is the computer's first":             {PID: 1, Start: p.Start, Boot: p.Boot},
		"with a negative PID, which means a group": {PID: -p.PID, Start: p.Start, Boot: p.Boot},
	} {
		if other.alive() {
			t.Errorf("a process %s is alive", name)
		}
		if err := other.stop(t.Context(), unix.SIGTERM, 0); err != nil {
			t.Errorf("stop a process %s: %v", name, err)
		}
	}
	if !p.alive() {
		t.Fatal("stopping others has stopped it")
	}
	soon, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if err := p.wait(soon); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("waiting for a running process: %v", err)
	}
	if err := p.stop(t.Context(), unix.SIGTERM, 5*time.Second); err != nil {
		t.Error(err)
	}
	if p.alive() {
		t.Error("a stopped process is alive")
	}
	if err := p.wait(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestLockIsWaitedFor(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	unlock, err := lockFile(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	soon, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if _, err := lockFile(soon, path); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("a lock was taken twice: %v", err)
	}
	got := make(chan error, 1)
	go func() {
		unlock, err := lockFile(t.Context(), path)
		if err == nil {
			unlock()
		}
		got <- err
	}()
	unlock()
	if err := <-got; err != nil {
		t.Error(err)
	}
}

func TestUnknownPackagesAreNotHandedToApt(t *testing.T) {
	for _, name := range []string{"--allow-unauthenticated", "a b", "", "./x.deb", "a=1"} {
		if err := InstallPackages(t.Context(), []string{name}, nil); err == nil {
			t.Errorf("%q was taken as a package", name)
		}
	}
}

func TestMissingPackagesAreNamedInOneLine(t *testing.T) {
	if p := packagesProblem(missing([]need{{"sh", "dash"}, {"/etc/passwd", "base-passwd"}})); p != nil {
		t.Errorf("an existing entry is reported as missing: %v", p)
	}
	p := packagesProblem(missing([]need{{"sh", "dash"}, {"no-such-program", "swtpm"}, {"/no/such/keyring", "debian-archive-keyring"}}))
	if p == nil {
		t.Fatal("a missing entry is not reported")
	}
	if _, err := program("apt-get"); err != nil {
		t.Skip("this is no Debian")
	}
	want := []string{"swtpm", "debian-archive-keyring"}
	if !slices.Equal(p.Packages, want) || !strings.HasSuffix(p.Remedy, " swtpm debian-archive-keyring") {
		t.Errorf("packages are %v, remedy is %q", p.Packages, p.Remedy)
	}
}

func TestLockOfARemovedFileIsWorthNothing(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	old, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer old.Close()
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if same, err := sameFile(old, path); err != nil || same {
		t.Errorf("a removed file is the lock: %v, %v", same, err)
	}
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if same, err := sameFile(old, path); err != nil || same {
		t.Errorf("a replaced file is the lock: %v, %v", same, err)
	}
}
