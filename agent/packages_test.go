//go:build linux

package agent

import (
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"

	"constellation/agent/upgradeproto"
	"constellation/internal/testneeds"
)

// debs are the packages of a fake machine: the version, the newest one of the repositories, and whether it is held.
type debs map[string]struct {
	version, newest string
	held            bool
}

// ofDebian are those of an enrolled machine.
var ofDebian = debs{
	"containerd":                  {version: "1.6.20~ds1-1+b1", newest: "1.6.20~ds1-1+deb12u1", held: true},
	"runc":                        {version: "1.1.5+ds1-1+deb12u1", newest: "1.1.5+ds1-1+deb12u2", held: true},
	"containernetworking-plugins": {version: "1.1.1+ds1-3+b4", newest: "1.1.1+ds1-3+b4", held: true},
}

const withPackages = "verify:running upgrade-packages:running install-kubeadm:running node:running install-kubelet:running restart-kubelet:running wait-for-api:running success"

// withDebs gives the machine a fake of apt-get, dpkg and systemctl (testdata/fake-packages.sh), these packages, and a fake of the CRI.
func (r *rig) withDebs(list debs) {
	r.t.Helper()
	testneeds.Program(r.t, "flock", "util-linux")
	script, err := filepath.Abs("testdata/fake-packages.sh")
	if err != nil {
		r.t.Fatal(err)
	}
	bin := filepath.Join(filepath.Dir(r.settings.Ctl), "bin")
	put := func(name, text string, mode os.FileMode) {
		r.t.Helper()
		if err := os.MkdirAll(filepath.Dir(name), 0o700); err != nil {
			r.t.Fatal(err)
		}
		if err := os.WriteFile(name, []byte(text), mode); err != nil {
			r.t.Fatal(err)
		}
	}
	for _, name := range []string{"apt-get", "apt-mark", "dpkg", "dpkg-query", "systemctl"} {
		put(filepath.Join(bin, name), fmt.Sprintf("#!/bin/sh\nexec sh '%s' '%s' %s \"$@\"\n", script, r.debs(), name), 0o755)
	}
	if err := os.MkdirAll(r.debs(), 0o700); err != nil {
		r.t.Fatal(err)
	}
	for name, d := range list {
		want := "install"
		if d.held {
			want = "hold"
		}
		for file, text := range map[string]string{"version": d.version, "newest": d.newest, "want": want, "status": "installed"} {
			put(filepath.Join(r.debs(), name, file), text, 0o600)
		}
	}
	r.settings.Programs = bin + ":/usr/bin:/bin"
	r.settings.PackagesWait = 20 * time.Second
	r.settings.Runtime = filepath.Join(filepath.Dir(r.settings.Ctl), "cri.sock")
	l, err := net.Listen("unix", r.settings.Runtime)
	if err != nil {
		r.t.Fatal(err)
	}
	cri := grpc.NewServer(grpc.UnknownServiceHandler(func(_ any, s grpc.ServerStream) error {
		method, _ := grpc.MethodFromServerStream(s)
		if err := s.RecvMsg(&emptypb.Empty{}); err != nil {
			return err
		}
		if method != "/runtime.v1.RuntimeService/Version" || exists(filepath.Join(r.debs(), "mute")) {
			return status.Error(codes.Unavailable, "server is not initialized yet")
		}
		return s.SendMsg(&emptypb.Empty{})
	}))
	go cri.Serve(l)
	r.t.Cleanup(cri.Stop)
}

// debs is the state of the fake of apt and dpkg.
func (r *rig) debs() string { return filepath.Join(filepath.Dir(r.settings.Ctl), "debs") }

// fake writes a file for the fake of apt and dpkg.
func (r *rig) fake(name, text string) {
	r.t.Helper()
	if err := os.WriteFile(filepath.Join(r.debs(), name), []byte(text), 0o600); err != nil {
		r.t.Fatal(err)
	}
}

// seen is what the fake of apt and dpkg has in a file, in one line.
func (r *rig) seen(name string) string {
	b, _ := os.ReadFile(filepath.Join(r.debs(), name))
	return strings.Join(strings.Fields(string(b)), " ")
}

// node is a request that also upgrades packages.
func (r *rig) node(token string) *upgradeproto.UpgradeRequest {
	req := r.request(token)
	req.What, req.UpgradePackages = upgradeproto.What_NODE, true
	return req
}

// wantDebs checks that all packages are complete, of the newest versions, and held as they were, and that containerd
// runs that version.
func (r *rig) wantDebs(list debs) {
	r.t.Helper()
	for name, d := range list {
		want := "install"
		if d.held {
			want = "hold"
		}
		if is := r.seen(name+"/version") + " " + r.seen(name+"/status") + " " + r.seen(name+"/want"); is != d.newest+" installed "+want {
			r.t.Errorf("%s is %s, want %s installed %s", name, is, d.newest, want)
		}
	}
	if is := r.seen("runs"); is != list["containerd"].newest {
		r.t.Errorf("containerd runs %q, want %s", is, list["containerd"].newest)
	}
	if exists(filepath.Join(r.settings.Root, "var/lib/constellation/agent", packagesFile)) {
		r.t.Error("the record of packages is left")
	}
}

func TestPackagesAreUpgraded(t *testing.T) {
	t.Setenv("HTTP_PROXY", "http://10.0.0.1:3128")
	t.Setenv("HTTPS_PROXY", "")
	r := newRig(t, false)
	r.withDebs(ofDebian)
	c := r.inside()
	if s, err := c.Status(t.Context(), &upgradeproto.StatusRequest{}); err != nil || !s.UpgradesPackages {
		t.Fatalf("status %v, %v", s, err)
	}
	all, err := collect(c.Upgrade(t.Context(), r.node("t1")))
	if err != nil || outline(all) != withPackages {
		t.Fatalf("%v\n%s\n%s", err, outline(all), strings.Join(lines(all), "\n"))
	}
	r.wantDebs(ofDebian)
	if is, want := r.seen("steps"), "update download unpack configure hold restart"; is != want {
		t.Errorf("steps %s, want %s", is, want)
	}
	options := "-q -y -o DPkg::Lock::Timeout=20 -o Dpkg::Options::=--force-confold -o Acquire::http::Proxy=http://10.0.0.1:3128 "
	only := "install --only-upgrade --no-remove --no-install-recommends --allow-change-held-packages containerd containernetworking-plugins runc"
	if is, want := r.seen("arguments"), options+"-o APT::Update::Error-Mode=any update "+options+"--download-only "+only+" "+options+only; is != want {
		t.Errorf("apt-get was called with\n%s\nwant\n%s", is, want)
	}
	if is := r.seen("environment"); is != strings.TrimSpace(strings.Repeat("noninteractive C 1 ", 3)) {
		t.Errorf("environment %s", is)
	}
	want := []string{
		"agent info package containerd was upgraded from 1.6.20~ds1-1+b1 to 1.6.20~ds1-1+deb12u1",
		"agent info package containernetworking-plugins stays at 1.1.1+ds1-3+b4: the repositories have no newer version",
		"agent info package runc was upgraded from 1.1.5+ds1-1+deb12u1 to 1.1.5+ds1-1+deb12u2",
		"agent info containerd was restarted, and answers",
	}
	if is := lines(all); len(is) < len(want) || !slices.Equal(is[:len(want)], want) {
		t.Errorf("lines\n%s\nwant\n%s", strings.Join(is, "\n"), strings.Join(want, "\n"))
	}

	// With the newest packages nothing is restarted.
	os.Remove(filepath.Join(r.debs(), "steps"))
	if all, err := collect(c.Upgrade(t.Context(), r.node("t2"))); err != nil || outline(all) != withPackages || r.seen("steps") != "update download unpack configure" {
		t.Errorf("%v\n%s\n%s", err, outline(all), r.seen("steps"))
	}
	// Without the switch they are left alone.
	os.Remove(filepath.Join(r.debs(), "steps"))
	held := r.node("t3")
	held.UpgradePackages = false
	if all, err := collect(c.Upgrade(t.Context(), held)); err != nil || strings.Contains(outline(all), stagePackages) || r.seen("steps") != "" {
		t.Errorf("%v\n%s\n%s", err, outline(all), r.seen("steps"))
	}
}

func TestPackagesOfOthers(t *testing.T) {
	for _, tt := range []struct {
		name  string
		list  debs
		steps string
		line  string
	}{
		{
			name: "of Docker and Kubernetes", steps: "update download unpack configure restart", line: "package containerd.io was upgraded from 1.7.27-1 to 2.1.4-1",
			list: debs{"containerd.io": {version: "1.7.27-1", newest: "2.1.4-1", held: false}, "kubernetes-cni": {version: "1.7.1-1.1", newest: "1.8.0-1.1", held: false}, "docker-ce": {version: "1", newest: "2", held: false}},
		},
		{name: "runc alone needs no restart", list: debs{"runc": {version: "1", newest: "2", held: true}}, steps: "update download unpack configure hold", line: "package runc was upgraded from 1 to 2"},
		{name: "none is installed", list: debs{"docker-ce": {version: "1", newest: "2", held: false}}, line: "no package of containerd, runc or network plugins is installed"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, false)
			r.withDebs(tt.list)
			all, err := collect(r.inside().Upgrade(t.Context(), r.node("t1")))
			if err != nil || outline(all) != withPackages || r.seen("steps") != tt.steps || !slices.Contains(lines(all), "agent info "+tt.line) {
				t.Errorf("%v\n%s\nsteps %s\n%s", err, outline(all), r.seen("steps"), strings.Join(lines(all), "\n"))
			}
			if tt.list["docker-ce"].version != "" && r.seen("docker-ce/version") != "1" {
				t.Error("a package was upgraded that the agent must not name")
			}
		})
	}
}

// After each failure the packages are complete and held, Kubernetes is as before, and a new run succeeds.
func TestPackagesThatFail(t *testing.T) {
	for _, tt := range []struct {
		name    string
		files   map[string]string // of the fake
		message string
		remedy  string
		mended  func(*rig) // before the next run; nil: the files are deleted
		upgrade bool       // the packages are upgraded all the same
	}{
		{
			name: "the repository is unreachable", message: "E: Failed to fetch http://deb.debian.org", remedy: "Check the repositories and the proxy",
			files: map[string]string{"fail-update": "Err:1 http://deb.debian.org/debian bookworm InRelease\n  Could not resolve 'deb.debian.org'\nReading package lists...\nE: Failed to fetch http://deb.debian.org/debian/dists/bookworm/InRelease  Could not resolve 'deb.debian.org'\nE: Some index files failed to download. They have been ignored, or old ones used instead.\n"},
		},
		{
			name: "a package is gone from the mirror", message: "download packages", remedy: "Check the repositories",
			files: map[string]string{"fail-download": "E: Failed to fetch http://deb.debian.org/debian/pool/main/r/runc/runc_1.1.5_amd64.deb  404  Not Found [IP: 10.0.0.2 80]\nE: Unable to fetch some archives, maybe run apt-get update or try with --fix-missing?\n"},
		},
		{
			name: "another program keeps the lock", message: "update the lists of packages: exit status 100: E: Could not get lock", remedy: "Wait for the other program",
			files: map[string]string{"lock": "always"},
		},
		{
			name: "a package is unknown", message: "Unable to locate package containerd", remedy: "Add the repository",
			files: map[string]string{"fail-download": "Reading package lists...\nBuilding dependency tree...\nE: Unable to locate package containerd\n"},
		},
		{
			name: "the disk is full at the download", message: "You don't have enough free space in /var/cache/apt/archives/.", remedy: "Free space",
			files: map[string]string{"fail-download": "Need to get 38.1 MB of archives.\nE: You don't have enough free space in /var/cache/apt/archives/.\n"},
		},
		{
			name: "the disk is full at the installation", message: "No space left on device", remedy: "Free space",
			files: map[string]string{"fail-unpack": "Unpacking containerd (1.6.20~ds1-1+deb12u1) over (1.6.20~ds1-1+b1) ...\ndpkg: error processing archive /var/cache/apt/archives/containerd.deb (--unpack):\n cannot copy extracted data for './usr/bin/containerd' to '/usr/bin/containerd.dpkg-new': failed to write (No space left on device)\nE: Sub-process /usr/bin/dpkg returned an error code (1)\n"},
		},
		{
			name: "a package would be removed", message: "Packages need to be removed but remove is disabled", remedy: "Run `apt-get update`",
			files: map[string]string{"fail-download": "E: Packages need to be removed but remove is disabled.\n"},
		},
		{
			name: "dpkg is interrupted", message: "install packages", remedy: "Run `dpkg --configure -a`", upgrade: true,
			files: map[string]string{"fail-configure": "dpkg: error processing package containerd (--configure):\n installed containerd package post-installation script subprocess was killed by signal (Killed)\nE: Sub-process /usr/bin/dpkg returned an error code (1)\n"},
		},
		{
			name: "containerd does not answer before", message: "containerd does not answer before its upgrade", remedy: "See `journalctl -u containerd`",
			files: map[string]string{"mute": ""},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, false)
			r.withDebs(ofDebian)
			r.settings.PackagesWait = time.Second
			for name, text := range tt.files {
				r.fake(name, text)
			}
			c := r.inside()
			all, err := collect(c.Upgrade(t.Context(), r.node("t1")))
			if err != nil || outline(all) != "verify:running upgrade-packages:running upgrade-packages:failed failure in upgrade-packages" {
				t.Fatalf("%v\n%s\n%s", err, outline(all), strings.Join(lines(all), "\n"))
			}
			f := all[len(all)-1].GetFailure()
			if !strings.Contains(f.GetMessage(), tt.message) || !strings.Contains(f.GetRemedy(), tt.remedy) || !strings.Contains(f.GetRemedy(), "`packages: held`") {
				t.Errorf("failure %v\nwant %q and %q", f, tt.message, tt.remedy)
			}
			for name, d := range ofDebian {
				want := d.version
				if tt.upgrade {
					want = d.newest
				}
				if is := r.seen(name+"/version") + " " + r.seen(name+"/status") + " " + r.seen(name+"/want"); is != want+" installed hold" {
					t.Errorf("after the failure %s is %s, want %s installed hold", name, is, want)
				}
			}
			if s, err := c.Status(t.Context(), &upgradeproto.StatusRequest{}); err != nil || s.KubeadmVersion != from || s.KubeletVersion != from || r.deeds() != "" {
				t.Errorf("Kubernetes changed: %v, %v, %s", s, err, r.deeds())
			}
			for name := range tt.files {
				os.Remove(filepath.Join(r.debs(), name))
			}
			if all, err := collect(c.Upgrade(t.Context(), r.node("t2"))); err != nil || outline(all) != withPackages {
				t.Fatalf("%v\n%s\n%s", err, outline(all), strings.Join(lines(all), "\n"))
			}
			r.wantDebs(ofDebian)
		})
	}
}

func TestPackagesWaitForALock(t *testing.T) {
	r := newRig(t, false)
	r.withDebs(ofDebian)
	r.fake("lock", "once")
	all, err := collect(r.inside().Upgrade(t.Context(), r.node("t1")))
	if err != nil || outline(all) != withPackages || !slices.Contains(lines(all), "agent warn another program installs packages: apt-get waits") {
		t.Errorf("%v\n%s\n%s", err, outline(all), strings.Join(lines(all), "\n"))
	}
	r.wantDebs(ofDebian)
}

func TestContainerdDoesNotAnswerAfterItsUpgrade(t *testing.T) {
	r := newRig(t, false)
	r.withDebs(ofDebian)
	r.fake("fail-restart", "Job for containerd.service failed because the control process exited with error code.\n")
	c := r.inside()
	all, err := collect(c.Upgrade(t.Context(), r.node("t1")))
	if err != nil || !strings.HasSuffix(outline(all), "failure in upgrade-packages") || !strings.Contains(all[len(all)-1].GetFailure().GetMessage(), "restart containerd: exit status 100: Job for containerd.service failed") {
		t.Fatalf("%v\n%s", err, outline(all))
	}
	if r.seen("containerd/want") != "hold" {
		t.Error("the package is not held after the failure")
	}
	os.Remove(filepath.Join(r.debs(), "fail-restart"))
	// The next run restarts it, although apt has nothing to do any more.
	if all, err := collect(c.Upgrade(t.Context(), r.node("t2"))); err != nil || outline(all) != withPackages {
		t.Fatalf("%v\n%s\n%s", err, outline(all), strings.Join(lines(all), "\n"))
	}
	r.wantDebs(ofDebian)
}

func TestPackagesWithoutApt(t *testing.T) {
	r := newRig(t, false)
	r.settings.Programs = t.TempDir()
	c := r.inside()
	all, err := collect(c.Upgrade(t.Context(), r.node("t1")))
	if f := all[len(all)-1].GetFailure(); err != nil || f.GetStage() != stagePackages || !strings.Contains(f.GetMessage(), "this machine has no apt-get") || !strings.Contains(f.GetRemedy(), "`packages: held`") {
		t.Errorf("%v, %v", f, err)
	}
	// A host whose root is elsewhere never uses the programs of this computer.
	p := packages{host: Host{Root: r.settings.Root}}
	if path, err := p.program("dpkg-query"); err == nil || !strings.Contains(err.Error(), "is not used") {
		t.Errorf("%s, %v", path, err)
	}
	if path, err := (&packages{}).program("sh"); err != nil || path != "/usr/bin/sh" {
		t.Errorf("%s, %v", path, err)
	}
}

func TestPackagesAreRefused(t *testing.T) {
	r := newRig(t, true)
	c := r.inside()
	addons := r.node("t1")
	addons.What, addons.Addons = upgradeproto.What_ADDONS, []string{"coredns"}
	kept := r.node("t1")
	kept.What, kept.KeepKubelet = upgradeproto.What_APPLY, true
	for _, req := range []*upgradeproto.UpgradeRequest{addons, kept} {
		if _, err := collect(c.Upgrade(t.Context(), req)); status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), "upgrade_packages: want it for NODE") {
			t.Errorf("%v: %v", req.What, err)
		}
	}
}

// A run that was interrupted does not upgrade packages any more if the switch was set to held meanwhile.
func TestPackagesSwitchDuringARun(t *testing.T) {
	r := newRig(t, false)
	r.withDebs(ofDebian)
	r.fake("hang-update", "")
	r.up()
	if _, err := r.client().Upgrade(t.Context(), r.node("t1")); err != nil {
		t.Fatal(err)
	}
	r.waits("update")
	held := r.node("t1")
	held.UpgradePackages = false
	attached, err := r.client().Upgrade(t.Context(), held)
	if err == nil {
		_, err = attached.Recv()
	}
	if err != nil {
		t.Fatalf("a caller without the switch cannot attach: %v", err)
	}
	r.kill()
	os.Remove(filepath.Join(r.debs(), "hang-update"))
	r.up()
	all, err := collect(r.client().Upgrade(t.Context(), held))
	if err != nil || !strings.HasSuffix(outline(all), "verify:running install-kubeadm:running node:running install-kubelet:running restart-kubelet:running wait-for-api:running success") {
		t.Fatalf("%v\n%s\n%s", err, outline(all), r.out)
	}
	if is := r.seen("containerd/version"); is != ofDebian["containerd"].version {
		t.Errorf("containerd is %s", is)
	}
}

// waits waits until a step of the fake of apt and dpkg waits, and returns its process.
func (r *rig) waits(step string) (pid int) {
	r.t.Helper()
	until(r.t, step+" waits", func() bool {
		pid, _ = strconv.Atoi(r.seen("hanging-" + step))
		return pid > 0
	})
	return pid
}

// TestPackagesAreInterrupted kills the agent in each step. apt-get and dpkg either continue without it, or end as well,
// as in a loss of power. The same request then completes the upgrade.
func TestPackagesAreInterrupted(t *testing.T) {
	for _, step := range []string{"update", "download", "unpack", "configure", "hold", "restart"} {
		for _, power := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, loss of power %t", step, power), func(t *testing.T) {
				t.Parallel()
				r := newRig(t, false)
				r.withDebs(ofDebian)
				r.fake("hang-"+step, "")
				r.up()
				if _, err := r.client().Upgrade(t.Context(), r.node("t1")); err != nil {
					t.Fatal(err)
				}
				pid := r.waits(step)
				r.kill()
				if power {
					if err := syscall.Kill(-pid, syscall.SIGKILL); err != nil {
						t.Fatal(err)
					}
					os.Remove(filepath.Join(r.debs(), "hang-"+step))
				}
				r.up()
				c := r.client()
				if s, err := c.Status(t.Context(), &upgradeproto.StatusRequest{}); err != nil || s.Run.State != upgradeproto.Run_INTERRUPTED || s.Run.Stage != stagePackages {
					t.Fatalf("%v, %v\n%s", s.GetRun(), err, r.out)
				}
				stream, err := c.Upgrade(t.Context(), r.node("t1"))
				if err == nil {
					_, err = stream.Recv()
				}
				if err != nil {
					t.Fatalf("%v\n%s", err, r.out)
				}
				if !power { // the program of the killed agent still has the lock
					os.Remove(filepath.Join(r.debs(), "hang-"+step))
				}
				all, err := collect(c.Upgrade(t.Context(), r.node("t1")))
				if err != nil || !strings.HasSuffix(outline(all), withPackages) || strings.Contains(outline(all), "SEQ") {
					t.Fatalf("%v\n%s\n%s\n%s", err, outline(all), strings.Join(lines(all), "\n"), r.out)
				}
				r.wantDebs(ofDebian)
				if is, want := strings.Join(lines(all), "\n"), "package containerd was upgraded from 1.6.20~ds1-1+b1 to 1.6.20~ds1-1+deb12u1"; !strings.Contains(is, want) {
					t.Errorf("no line %q in\n%s", want, is)
				}
			})
		}
	}
}

// An agent that finds half-configured packages completes and holds them at its start, and restarts containerd: without a
// runtime no request may reach it.
func TestPackagesAreMendedAtTheStart(t *testing.T) {
	r := newRig(t, false)
	r.withDebs(ofDebian)
	r.fake("hang-configure", "")
	r.up()
	if _, err := r.client().Upgrade(t.Context(), r.node("t1")); err != nil {
		t.Fatal(err)
	}
	pid := r.waits("configure")
	r.kill()
	if err := syscall.Kill(-pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	os.Remove(filepath.Join(r.debs(), "hang-configure"))
	if r.seen("containerd/status") != "unpacked" {
		t.Fatalf("containerd is %s", r.seen("containerd/status"))
	}
	r.up()
	until(t, "the record is deleted", func() bool {
		return !exists(filepath.Join(r.settings.Root, "var/lib/constellation/agent", packagesFile))
	})
	r.wantDebs(ofDebian)
}

// A caller that retries as soon as it has the final message gets a new run, not the messages of the old one.
func TestRequestAfterAFinalMessageIsANewRun(t *testing.T) {
	r := newRig(t, false)
	r.withDebs(ofDebian)
	r.fake("fail-update", "E: The repository is not signed.\n")
	u, err := openUpgrader(t.Context(), r.settings.host(), slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(u.close)
	fails := func(token string) (begun bool) {
		o, err := parseOrder(r.node(token))
		if err == nil {
			_, begun, err = u.take(t.Context(), o)
		}
		if err != nil {
			t.Fatal(err)
		}
		until(t, "the run has a final message", func() bool { _, _, final := u.journal.latest(); return final })
		return begun
	}
	fails("t1")
	until(t, "the run has ended", func() bool { return !u.isRunning() })
	u.mu.Lock()
	u.running++ // as if the first run had sent its message alone
	u.mu.Unlock()
	if !fails("t2") {
		t.Error("the second request is attached to the first run")
	}
	u.mu.Lock()
	u.running--
	u.mu.Unlock()
}
