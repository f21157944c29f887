//go:build linux

package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/types/known/emptypb"

	"constellation/internal/delay"
)

// Packages of the distribution that the agent upgrades if the request says so. No others are named to apt, and none is
// named that is not installed. kubeadm, kubelet and kubectl are never among them: the release's statement names their
// digests.
var packageNames = []string{"containerd", "containerd.io", "runc", "containernetworking-plugins", "kubernetes-cni"}

// runtimePackages are those of the container runtime, which is restarted after their upgrade.
var runtimePackages = []string{"containerd", "containerd.io"}

const (
	// packagesFile is on disk from before the first change of packages until they are complete, held as before, and in use.
	packagesFile = "packages.json"
	// packagesWait is how long another program may have the lock of the packages.
	packagesWait = 2 * time.Minute
	// lockPause separates the attempts to get that lock.
	lockPause = time.Second
	// aptTimeout bounds each call of apt and dpkg.
	aptTimeout = 15 * time.Minute
	// runtimeTimeout is how long containerd may take to answer after its restart, runtimeProbe before the upgrade.
	runtimeTimeout = 2 * time.Minute
	runtimeProbe   = 10 * time.Second

	defaultRuntime = "/run/containerd/containerd.sock"
)

// packages upgrades packages of a host by the distribution's own apt and dpkg.
type packages struct {
	host Host
	dir  *os.Root // of the agent
	say  func(level, text string)
}

// packagesRecord is the content of packagesFile.
type packagesRecord struct {
	// Before are the versions before the upgrade, by package.
	Before map[string]string `json:"before"`
	// Held are the packages that the distribution held back from upgrades.
	Held []string `json:"held,omitempty"`
}

// installed is a package that is installed, perhaps in part.
type installed struct {
	version  string
	complete bool
	held     bool
}

// packagesError is a failure of apt or dpkg, with its remedy.
type packagesError struct{ text, remedy string }

func (e *packagesError) Error() string { return e.text }

// orHeld ends the remedies.
const orHeld = " Then retry with a new token. `packages: held` in the configuration leaves packages as they are."

func packagesFailure(remedy, format string, args ...any) error {
	return &packagesError{text: fmt.Sprintf(format, args...), remedy: remedy + orHeld}
}

// upgradePackages is the stage of a run.
func (u *upgrader) upgradePackages(ctx context.Context, _ *order) error {
	u.packaging.Lock()
	defer u.packaging.Unlock()
	return (&packages{host: u.host, dir: u.dir, say: u.say}).upgrade(ctx)
}

// mendPackages completes an upgrade of packages that an earlier agent or a loss of power left, if there is one.
// The host may have no container runtime until then, and no request may follow.
func (u *upgrader) mendPackages(ctx context.Context) {
	if _, err := u.dir.Lstat(packagesFile); errors.Is(err, fs.ErrNotExist) {
		return
	}
	u.packaging.Lock()
	defer u.packaging.Unlock()
	p := &packages{host: u.host, dir: u.dir, say: func(level, text string) {
		u.log.Warn("interrupted upgrade of packages continued", "line", text)
		if req, _, final := u.journal.latest(); req != nil && !final {
			u.say(level, text)
		}
	}}
	r, err := p.record()
	if err == nil && r != nil {
		if err = p.configure(ctx, true); err == nil {
			err = p.settle(ctx, r, false)
		}
	}
	if err != nil {
		u.log.Warn("interrupted upgrade of packages not completed", "err", err)
	}
}

// upgrade upgrades the packages that are installed. It restarts the container runtime if its package changed.
func (p *packages) upgrade(ctx context.Context) error {
	if _, err := p.program("apt-get"); err != nil {
		return packagesFailure("Packages are upgraded with apt alone.", "packages cannot be upgraded: %v", err)
	}
	r, err := p.record()
	if err != nil {
		return err
	}
	if r != nil {
		p.say("warn", "an interrupted upgrade of packages goes on")
	}
	if err := p.configure(ctx, r != nil); err != nil {
		return err
	}
	if r == nil {
		if r, err = p.begin(ctx); err != nil || r == nil {
			return err
		}
	}
	err = p.install(ctx, slices.Sorted(maps.Keys(r.Before)))
	if ctx.Err() != nil { // the next agent goes on from the record
		return context.Cause(ctx)
	}
	// After a failure, too: the host keeps running with complete packages.
	if e := p.settle(ctx, r, err == nil); e != nil && err != nil {
		return fmt.Errorf("%w; %w", err, e)
	} else if e != nil {
		return e
	}
	return err
}

// begin records the packages before the first change; it returns nil if there are none.
func (p *packages) begin(ctx context.Context) (*packagesRecord, error) {
	all, err := p.list(ctx)
	if err != nil {
		return nil, err
	}
	if len(all) == 0 {
		p.say("info", "no package of containerd, runc or network plugins is installed")
		return nil, nil
	}
	r := &packagesRecord{Before: map[string]string{}}
	for _, name := range slices.Sorted(maps.Keys(all)) {
		r.Before[name] = all[name].version
		if all[name].held {
			r.Held = append(r.Held, name)
		}
	}
	if r.hasRuntime() { // else nothing would show whether the new one works
		if err := p.awaitRuntime(ctx, runtimeProbe); err != nil {
			return nil, packagesFailure("See `journalctl -u containerd` on the machine.", "containerd does not answer before its upgrade: %v", err)
		}
	}
	b, err := json.Marshal(r)
	if err == nil {
		err = putWhole(filepath.Join(p.host.stateDir(), packagesFile), b, 0o600)
	}
	if err != nil {
		return nil, fmt.Errorf("record the packages: %w", err)
	}
	return r, nil
}

// record reads the record of an upgrade that has not ended; nil: there is none. A damaged one does not exist: it is
// renamed when it is complete.
func (p *packages) record() (*packagesRecord, error) {
	b, err := p.dir.ReadFile(packagesFile)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	r := &packagesRecord{}
	if err == nil {
		err = json.Unmarshal(b, r)
	}
	if err != nil {
		return nil, fmt.Errorf("read the record of packages: %w", err)
	}
	return r, nil
}

func (r *packagesRecord) hasRuntime() bool {
	return slices.ContainsFunc(runtimePackages, func(name string) bool { return r.Before[name] != "" })
}

// install upgrades packages to the newest versions that the host's repositories have.
func (p *packages) install(ctx context.Context, names []string) error {
	// apt drops the hold of a package that it installs; settle sets it again.
	only := append([]string{"install", "--only-upgrade", "--no-remove", "--no-install-recommends", "--allow-change-held-packages"}, names...)
	for _, step := range []struct {
		what string
		args []string
	}{
		// Without the option, apt succeeds with old lists if a repository does not answer.
		{"update the lists of packages", []string{"-o", "APT::Update::Error-Mode=any", "update"}},
		{"download packages", append([]string{"--download-only"}, only...)},
		{"install packages", only},
	} {
		if out, err := p.patient(ctx, "apt-get", append(p.aptOptions(), step.args...)...); err != nil {
			return aptFailure(step.what, out, err)
		}
	}
	return nil
}

// aptOptions are those of every call of apt-get.
func (p *packages) aptOptions() []string {
	out := []string{"-q", "-y", "-o", fmt.Sprintf("DPkg::Lock::Timeout=%d", int(p.wait().Seconds())), "-o", "Dpkg::Options::=--force-confold"}
	// The unit of an enrolled machine has the proxy of `machine add`.
	for _, x := range [][2]string{{"HTTP_PROXY", "http"}, {"HTTPS_PROXY", "https"}} {
		if proxy := os.Getenv(x[0]); proxy != "" {
			out = append(out, "-o", "Acquire::"+x[1]+"::Proxy="+proxy)
		}
	}
	return out
}

// settle completes packages that were interrupted, holds them as before, restarts the runtime if its package changed,
// and deletes the record. With all, it also reports packages that did not change.
func (p *packages) settle(ctx context.Context, r *packagesRecord, all bool) error {
	if err := p.configure(ctx, false); err != nil {
		return err
	}
	now, err := p.list(ctx)
	if err != nil {
		return err
	}
	restart := false
	var hold []string
	for _, name := range slices.Sorted(maps.Keys(r.Before)) {
		is, before := now[name], r.Before[name]
		switch {
		case !is.complete:
			return packagesFailure("Run `dpkg --configure -a` and `apt-get install -f` on the machine.", "package %s is not installed completely", name)
		case is.version != before:
			p.say("info", fmt.Sprintf("package %s was upgraded from %s to %s", name, before, is.version))
			restart = restart || slices.Contains(runtimePackages, name)
		case all:
			p.say("info", fmt.Sprintf("package %s stays at %s: the repositories have no newer version", name, before))
		}
		if slices.Contains(r.Held, name) && !is.held {
			hold = append(hold, name)
		}
	}
	if len(hold) > 0 {
		if out, err := p.patient(ctx, "apt-mark", append([]string{"hold"}, hold...)...); err != nil {
			return aptFailure("hold packages", out, err)
		}
	}
	if restart {
		if out, err := p.call(ctx, "systemctl", "restart", "containerd.service"); err != nil {
			return packagesFailure("See `journalctl -u containerd` on the machine.", "restart containerd: %v: %s", err, lastLines(out))
		}
		if err := p.awaitRuntime(ctx, runtimeTimeout); err != nil {
			return packagesFailure("See `journalctl -u containerd` on the machine.", "containerd does not answer after its upgrade: %v", err)
		}
		p.say("info", "containerd was restarted, and answers")
	}
	if err := p.dir.Remove(packagesFile); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("delete the record of packages: %w", err)
	}
	return nil
}

// configure completes packages that an interrupted dpkg left. After an interruption it first waits for an apt-get
// that an earlier agent started and that still runs: it has the lock.
func (p *packages) configure(ctx context.Context, interrupted bool) error {
	out, err := p.call(ctx, "dpkg", "--audit")
	complete := err == nil && strings.TrimSpace(out) == ""
	if complete && !interrupted {
		return nil
	}
	if !complete {
		p.say("warn", "packages are not installed completely: dpkg configures them")
	}
	if out, err := p.patient(ctx, "dpkg", "--force-confold", "--configure", "-a"); err != nil {
		return aptFailure("configure packages", out, err)
	}
	return nil
}

// list returns those of packageNames that are installed.
func (p *packages) list(ctx context.Context) (map[string]installed, error) {
	out, err := p.call(ctx, "dpkg-query", append([]string{"-W", "-f", `${Package}\t${db:Status-Want}\t${db:Status-Status}\t${Version}\n`}, packageNames...)...)
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.ExitCode() == 1 {
		err = nil // one of them is not known, which is usual
	}
	if err != nil {
		return nil, aptFailure("list packages", out, err)
	}
	all := map[string]installed{}
	for line := range strings.Lines(out) {
		f := strings.Split(strings.TrimSuffix(line, "\n"), "\t")
		if len(f) != 4 || !slices.Contains(packageNames, f[0]) || f[2] == "not-installed" || f[2] == "config-files" {
			continue
		}
		all[f[0]] = installed{version: f[3], complete: f[2] == "installed", held: f[1] == "hold"}
	}
	return all, nil
}

func (p *packages) wait() time.Duration {
	if p.host.PackagesWait > 0 {
		return p.host.PackagesWait
	}
	return packagesWait
}

// locked matches what apt-get, apt-mark and dpkg print if another program has one of their locks.
var locked = regexp.MustCompile(`(?m)^E: (Could not get lock|Unable to acquire|Unable to lock)|(was|is) locked by another process`)

// patient is call that waits while another program has the lock of the packages.
func (p *packages) patient(ctx context.Context, name string, args ...string) (string, error) {
	end := time.Now().Add(p.wait())
	for told := false; ; told = true {
		out, err := p.call(ctx, name, args...)
		if err == nil || ctx.Err() != nil || !locked.MatchString(out) || time.Now().After(end) {
			return out, err
		}
		if !told {
			p.say("warn", "another program installs packages: "+name+" waits")
		}
		if !delay.For(ctx, lockPause) {
			return out, context.Cause(ctx)
		}
	}
}

// call executes a program of the host and returns what it prints. A package must not be left half installed, so the
// program does not depend on the agent: if ctx ends first, it continues, and its lock keeps others away.
func (p *packages) call(ctx context.Context, name string, args ...string) (string, error) {
	path, err := p.program(name)
	if err != nil {
		return "", err
	}
	// A file, not a pipe: the program outlives the agent. In memory: the disk may be full.
	fd, err := unix.MemfdCreate("agent-"+name, unix.MFD_CLOEXEC)
	if err != nil {
		return "", fmt.Errorf("keep the output of %s: %w", name, err)
	}
	f := os.NewFile(uintptr(fd), name)
	defer f.Close()
	c := exec.Command(path, args...) //nolint:noctx // see above
	c.Dir, c.Stdout, c.Stderr, c.SysProcAttr = "/", f, f, &syscall.SysProcAttr{Setpgid: true}
	// needrestart would restart services, such as the kubelet.
	c.Env = []string{"PATH=" + p.path(), "HOME=/root", "LC_ALL=C", "DEBIAN_FRONTEND=noninteractive", "NEEDRESTART_SUSPEND=1"}
	if err := c.Start(); err != nil {
		return "", fmt.Errorf("start %s: %w", name, err)
	}
	ended := make(chan error, 1)
	go func() { ended <- c.Wait() }() // it also ends the zombie of a program that ctx left
	limit := time.NewTimer(aptTimeout)
	defer limit.Stop()
	select {
	case err = <-ended:
	case <-ctx.Done():
		err = context.Cause(ctx)
	case <-limit.C:
		err = fmt.Errorf("%s did not end within %s, and continues", name, aptTimeout)
	}
	return output(f), err
}

// output returns the last 64 KiB that a program has printed.
func output(f *os.File) string {
	fi, err := f.Stat()
	if err != nil {
		return ""
	}
	b := make([]byte, min(fi.Size(), 64<<10))
	n, _ := f.ReadAt(b, fi.Size()-int64(len(b)))
	return strings.ToValidUTF8(string(b[:n]), "")
}

// path is the PATH of the host's programs.
func (p *packages) path() string {
	if p.host.Programs != "" {
		return p.host.Programs
	}
	return "/usr/sbin:/usr/bin:/sbin:/bin"
}

// program finds a program of the host.
func (p *packages) program(name string) (string, error) {
	if p.host.Programs == "" && p.host.path() != "/" {
		return "", fmt.Errorf("%s of a host whose root is %s is not used", name, p.host.path())
	}
	for _, dir := range filepath.SplitList(p.path()) {
		file := filepath.Join(dir, name)
		if fi, err := os.Stat(file); err == nil && fi.Mode().IsRegular() && fi.Mode()&0o111 != 0 {
			return file, nil
		}
	}
	return "", fmt.Errorf("this machine has no %s", name)
}

// awaitRuntime waits until the container runtime answers a request of the CRI.
func (p *packages) awaitRuntime(ctx context.Context, limit time.Duration) error {
	socket := p.host.Runtime
	if socket == "" {
		socket = p.host.path(defaultRuntime)
	}
	c, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithNoProxy())
	if err != nil {
		return err
	}
	defer c.Close()
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	for {
		// The messages of Version need no field, so the empty message stands for both.
		err := c.Invoke(ctx, "/runtime.v1.RuntimeService/Version", &emptypb.Empty{}, &emptypb.Empty{}, grpc.WaitForReady(true))
		if err == nil {
			return nil
		}
		if !delay.For(ctx, 200*time.Millisecond) {
			return fmt.Errorf("%s: no answer to a CRI request within %s: %w", socket, limit, err)
		}
	}
}

var (
	aptProblem = regexp.MustCompile(`^(E:|W:|Err:|dpkg: error|\s*trying to |.*No space left on device)`)
	diskFull   = regexp.MustCompile(`No space left on device|enough free space`)
	fetching   = regexp.MustCompile(`Failed to fetch|Unable to fetch|Could not resolve|Could not connect|Temporary failure|is not signed`)
)

// aptFailure is the failure of a program with this output.
func aptFailure(what, out string, err error) error {
	remedy := "Run `apt-get update` and `apt-get install --only-upgrade` for the package on the machine, and mend what they report."
	switch {
	case locked.MatchString(out):
		remedy = "Wait for the other program that installs packages on the machine, or end it."
	case diskFull.MatchString(out):
		remedy = "Free space on the machine's disk."
	case fetching.MatchString(out):
		remedy = "Check the repositories and the proxy of the machine: `apt-get update` must succeed."
	case strings.Contains(out, "Unable to locate package"):
		remedy = "Add the repository of the package to the machine again."
	case strings.HasPrefix(what, "configure") || strings.Contains(out, "dpkg: error"):
		remedy = "Run `dpkg --configure -a` on the machine, and mend what it reports."
	}
	return packagesFailure(remedy, "%s: %v: %s", what, err, lastLines(out))
}

// lastLines are the last lines of an output that name a problem, or else the last lines.
func lastLines(out string) string {
	all := strings.FieldsFunc(out, func(r rune) bool { return r == '\n' || r == '\r' })
	problems := slices.DeleteFunc(slices.Clone(all), func(l string) bool { return !aptProblem.MatchString(l) })
	if len(problems) > 0 {
		all = problems
	}
	return clip(strings.TrimSpace(strings.Join(all[max(0, len(all)-3):], " ")))
}
