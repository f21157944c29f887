package main

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"constellation/engine/plan"
	"constellation/engine/sandbox"
	"constellation/engine/sandbox/build"
	"constellation/engine/sandbox/machine"
	"constellation/engine/sshhost/sshdtest"
	"constellation/internal/testneeds"
)

// Releases of Debian that machines can run.
const (
	debian12 = "bookworm"
	debian13 = "trixie"
)

// Linux machines that have OpenSSH and nothing of ours are enrolled, become a cluster whose network their owner brings, are
// upgraded in place to the next minor with the packages of their runtime, and one is given back. The console is in their network. It logs in to three by SSH, and
// the last one calls it.
//
// It takes five minutes, so it is opt-in. The variable can have the release of Debian that the machines run:
//
//	CONSTELLATION_E2E_ENROL=1 CONSTELLATION_TEST_NETWORK=1 go test -run TestEnrolledMachinesBecomeACluster .
//	CONSTELLATION_E2E_ENROL=trixie CONSTELLATION_TEST_NETWORK=1 go test -run TestEnrolledMachinesBecomeACluster .
func TestEnrolledMachinesBecomeACluster(t *testing.T) {
	testneeds.OptIn(t, "CONSTELLATION_E2E_ENROL", "five minutes")
	const to = "v1.37.2"
	testneeds.Kubernetes(t, to)
	testneeds.Network(t, "to download wget of Debian")
	release := debian12
	if v := os.Getenv("CONSTELLATION_E2E_ENROL"); v == debian13 {
		release = v
	} else if v != "1" {
		t.Fatalf("CONSTELLATION_E2E_ENROL is %q, want 1 or %s", v, debian13)
	}
	c := newReal(t)
	if release != debian12 {
		c.env = append(c.env, machine.DebianVariable+"="+release)
	}
	c.up(1, 3)
	all := machineNames(1, 3)
	a, login, connect := c.owner(all)
	given := "worker-2"
	wget := debianPackages(t, release, "wget") // for the command that is printed
	for _, m := range []string{given, "worker-1"} {
		c.unpack(m, wget)
		if out, code := c.asRoot(m, "apt-get update -q && apt-get install -qy wget"); code != 0 {
			t.Fatalf("install wget on %s: %s", m, out)
		}
	}
	if out, _ := c.asRoot(given, ". /etc/os-release; echo $VERSION_CODENAME; containerd --version; runc --version | head -n 1; systemctl --version | head -n 1"); strings.Fields(out + " -")[0] != release {
		t.Fatalf("%s runs\n%s\nwant %s", given, out, release)
	} else {
		t.Logf("machines:\n%s", out)
	}
	before, _ := c.asRoot(given, enrolledFiles)

	a.run(time.Minute, "config", "generate", "machines").want(plan.ExitDone)
	a.edit("endpoint: api.example.com", "endpoint: 10.42.0.1")
	a.run(time.Minute, "init", "--yes").want(plan.ExitUsage) // nothing is enrolled
	begin := time.Now()
	a.run(3*time.Minute, "machine", "add", "--ssh", login["control-plane-0"], "--group", "control-plane", "--yes").want(plan.ExitDone)
	a.run(3*time.Minute, "machine", "add", "--ssh", login["worker-0"], "--ssh", login["worker-1"], "--label", "disk=ssd", "--taint", "batch=yes:NoSchedule", "--yes").want(plan.ExitDone)
	a.run(time.Minute, "machine", "add", "--ssh", login[given], "--label", "node-role.kubernetes.io/control-plane=", "--yes").want(plan.ExitUsage)
	t.Logf("enrolment of 3 machines: %s", time.Since(begin).Round(time.Second))
	a.run(time.Minute, "machine", "add", "--ssh", login["worker-1"], "--yes").want(plan.ExitDone) // again
	a.edit("    machines:\n", a.componentRows(build.DefaultVersion, to)+"    machines:\n")

	connect()
	begin = time.Now()
	first := a.run(10*time.Minute, "init", "--yes", "-o", "json").want(plan.ExitDone)
	t.Logf("init: %s", time.Since(begin).Round(time.Second))
	if events := first.events(); !events[0].NotAttested {
		t.Error("init does not report that the machines are not attested")
	}
	a.wantNodes(all[:3]...)
	a.run(time.Minute, "init", "--yes").want(plan.ExitNothing)
	if out := a.run(time.Minute, "status").want(plan.ExitDone).stdout; !strings.Contains(out, "not attested") {
		t.Errorf("status:\n%s", out)
	}

	// Nodes have the labels and taints of the list, and follow it. Those of others stay.
	settings := func(node, label, taint string) {
		t.Helper()
		const path = "jsonpath={.metadata.labels.disk} {.spec.taints[?(@.key=='batch')].value}"
		want := strings.TrimSpace(label + " " + taint)
		a.eventually(2*time.Minute, fmt.Sprintf("label and taint %q of %s", want, node), func(out string) bool { return strings.TrimSpace(out) == want }, "get", "node", node, "-o", path)
	}
	settings("worker-0", "ssd", "yes")
	a.kubectl("label", "node", "worker-0", "team=a")
	b, err := os.ReadFile(filepath.Join(a.dir, "constellation-conf.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	row := regexp.MustCompile(`\{name: worker-0,.*`).FindString(string(b))
	a.edit(row, strings.Replace(row, `"disk=ssd", taints: "batch=yes:NoSchedule"`, `"disk=hdd"`, 1))
	a.run(time.Minute, "init", "--yes").want(plan.ExitDone)
	begin = time.Now()
	settings("worker-0", "hdd", "")
	t.Logf("a changed label and taint: %s", time.Since(begin).Round(time.Second))
	settings("worker-1", "ssd", "yes")
	if is := a.kubectl("get", "node", "worker-0", "-o", "jsonpath={.metadata.labels.team}"); is != "a" {
		t.Errorf("the label of somebody else is %q", is)
	}

	// Another machine joins later. It calls the console, which does not log in. The same command is worthless elsewhere.
	begin = time.Now()
	added := a.background(3*time.Minute, "machine", "add", given, "--address", address(login[given]), "--label", "disk=ssd", "--print-command")
	command := added.printed("\nCONSTELLATION\n")
	if out, code := c.asRoot("worker-1", command); code == 0 || !strings.Contains(out, "the token of "+given+" is for "+address(login[given])) {
		t.Errorf("the command on another machine: exit code %d\n%s", code, out)
	}
	if out, code := c.asRoot(given, command); code != 0 || !strings.Contains(out, "this machine is prepared as "+given) {
		t.Fatalf("the command: exit code %d\n%s", code, out)
	}
	if r := added.want(plan.ExitDone); !strings.HasPrefix(r.stdout, command) || !strings.Contains(r.stderr, "refused a call from "+address(login["worker-1"])) {
		t.Errorf("stdout and stderr of machine add:\n%s\n%s", r.stdout, r.stderr)
	}
	t.Logf("enrolment of a machine that calls: %s", time.Since(begin).Round(time.Second))
	a.run(5*time.Minute, "init", "--yes").want(plan.ExitDone)
	a.wantNodes(all...)
	settings(given, "ssd", "")
	if out := a.run(time.Minute, "machine", "list").want(plan.ExitDone).stdout; strings.Count(out, "worker") < 3 || !strings.Contains(out, given) {
		t.Errorf("machine list:\n%s", out)
	}

	// The hop also upgrades the packages of the runtime, which worker-0 holds, when that is published.
	newer := newerPackages(t, release)
	for _, m := range all {
		c.unpack(m, newer)
	}
	if out, code := c.asRoot("worker-0", "apt-mark hold "+strings.Join(runtimePackages, " ")); code != 0 {
		t.Fatalf("hold packages: %s", out)
	}
	a.edit("# packages: held", "packages: upgrade")
	if out := a.run(time.Minute, "upgrade", "check", "--kubernetes", to).stdout; !strings.Contains(out, "publish the configuration first") {
		t.Errorf("upgrade check before init:\n%s", out)
	}
	a.run(time.Minute, "init", "--yes").want(plan.ExitDone)
	if out := a.run(time.Minute, "upgrade", "check", "--kubernetes", to).want(plan.ExitDone).stdout; !strings.Contains(out, "in place") || strings.Contains(out, "OS image with") {
		t.Errorf("upgrade check:\n%s", out)
	}
	begin = time.Now()
	a.run(20*time.Minute, "upgrade", "apply", "--kubernetes", to, "--yes").want(plan.ExitDone)
	t.Logf("apply: %s", time.Since(begin).Round(time.Second))
	if is, want := a.kubectl("get", "nodes", "-o", "jsonpath={.items[*].status.nodeInfo.kubeletVersion}"), strings.TrimSpace(strings.Repeat(to+" ", len(all))); is != want {
		t.Errorf("kubelets run %q, want %s", is, to)
	}
	for _, m := range all {
		c.wantNewer(m, m == "worker-0")
	}

	// A machine is given back, and nothing of ours is left there.
	a.run(time.Minute, "machine", "remove", given, "--ssh", login[given], "--yes").want(plan.ExitBlocked) // it is a node
	a.kubectl("drain", given, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=110s")
	a.kubectl("delete", "node", given)
	a.run(3*time.Minute, "machine", "remove", given, "--ssh", login[given], "--yes").want(plan.ExitDone)
	after, _ := c.asRoot(given, enrolledFiles)
	for _, path := range strings.Split(after, "\n") {
		if !slices.Contains(strings.Split(before, "\n"), path) && !strings.HasPrefix(path, "/etc/cni/net.d/") { // the network is its owner's
			t.Errorf("%s is left on %s", path, given)
		}
	}
	a.run(5*time.Minute, "init", "--yes").want(plan.ExitDone) // publishes the shorter list
	a.wantNodes(all[:3]...)
}

// address is the host of a login.
func address(login string) string { return login[strings.Index(login, "@")+1:] }

// background is a verb that runs, and whose output is read meanwhile.
type background struct {
	c      *cloud
	args   []string
	cmd    *exec.Cmd
	ended  chan struct{} // closed when it ended
	mu     sync.Mutex
	stdout strings.Builder
	stderr bytes.Buffer
}

// background starts a verb.
func (c *cloud) background(limit time.Duration, args ...string) *background {
	c.t.Helper()
	ctx, cancel := context.WithTimeout(c.t.Context(), limit)
	b := &background{c: c, args: args, cmd: c.command(ctx, args...), ended: make(chan struct{})}
	b.cmd.Stdout, b.cmd.Stderr = b, &b.stderr
	if err := b.cmd.Start(); err != nil {
		c.t.Fatalf("constellation %s: %v", strings.Join(args, " "), err)
	}
	go func() {
		defer close(b.ended)
		defer cancel()
		_ = b.cmd.Wait()
	}()
	c.t.Cleanup(func() { cancel(); <-b.ended })
	return b
}

// Write takes stdout.
func (b *background) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.stdout.Write(p)
}

// printed waits for the end of a text on stdout, and returns the text.
func (b *background) printed(end string) string {
	b.c.t.Helper()
	for over := false; ; time.Sleep(50 * time.Millisecond) {
		b.mu.Lock()
		text := b.stdout.String()
		b.mu.Unlock()
		if i := strings.Index(text, end); i >= 0 {
			return text[:i+len(end)]
		}
		if over {
			b.want(plan.ExitDone)
			b.c.t.Fatalf("constellation %s did not print %q:\n%s", strings.Join(b.args, " "), end, text)
		}
		select {
		case <-b.ended:
			over = true // its last words may have come meanwhile
		default:
		}
	}
}

// want waits until it ends.
func (b *background) want(code int) *result {
	b.c.t.Helper()
	<-b.ended
	return (&result{c: b.c, args: b.args, stdout: b.stdout.String(), stderr: b.stderr.String(), code: b.cmd.ProcessState.ExitCode()}).want(code)
}

// owner takes everything of ours from machines, and returns the console of their owner: in their network, with an empty
// workspace and the logins by SSH. connect installs the owner's network when the first node is there.
func (c *cloud) owner(machines []string) (a *cloud, login map[string]string, connect func()) {
	t := c.t
	t.Helper()
	dirs, err := sandbox.DefaultDirs()
	if err != nil {
		t.Fatal(err)
	}
	home := t.TempDir()
	a = &cloud{
		t: t, bin: c.bin, dir: t.TempDir(), env: []string{"HOME=" + home, "SSH_AUTH_SOCK="},
		netns: filepath.Join(dirs.State, "sandbox", c.name(), "netns", "hub"),
	}
	login = map[string]string{}
	var known strings.Builder
	key := sshdtest.NewKey(t)
	for _, m := range machines {
		c.stripped(m)
		host, ip := c.servesSSH(m, key)
		login[m] = "root@" + ip
		fmt.Fprintf(&known, "%s %s", ip, sshdtest.Authorized(t, host))
	}
	if err := os.Mkdir(filepath.Join(home, ".ssh"), 0o700); err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{"known_hosts": known.String(), "id_ed25519": sshdtest.Private(t, key)} {
		if err := os.WriteFile(filepath.Join(home, ".ssh", name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	const network = "/etc/cni/net.d" // of the owner, here that of the sandbox
	for _, m := range machines {
		c.asRoot(m, "mv "+network+" /root/network && mkdir "+network)
	}
	return a, login, func() {
		var wg sync.WaitGroup
		t.Cleanup(wg.Wait)
		wg.Go(func() {
			for t.Context().Err() == nil {
				cmd := a.inNetwork(t.Context(), filepath.Join(a.bin, "kubectl"), "--kubeconfig", filepath.Join(a.dir, "constellation-admin.conf"), "get", "nodes", "-o", "jsonpath={.items[*].status.conditions[?(@.type=='Ready')].message}")
				if out, err := cmd.Output(); err == nil && strings.Contains(string(out), "cni") {
					break
				}
				time.Sleep(time.Second)
			}
			for _, m := range machines {
				c.asRoot(m, "cp /root/network/* "+network)
			}
		})
	}
}

// enrolledFiles lists the files of a machine where programs and their data are.
const enrolledFiles = `find /usr /etc /opt /var/lib -xdev -not -path '/var/lib/containerd/*' -not -path '/var/lib/systemd/*' -not -path '/usr/lib/modules*' 2>/dev/null | sort`

// stripped takes everything of ours from a machine.
func (c *cloud) stripped(machine string) {
	c.t.Helper()
	if out, code := c.asRoot(machine, `systemctl disable --now constellation-bootstrapper constellation-agent
rm -rf /usr/lib/constellation/{agent,bootstrapper,release-keys.pem,peers.json} /etc/constellation /run/constellation-agent /var/lib/constellation
rm -rf /lib/systemd/system/constellation-* /lib/systemd/system/kubelet.service* && systemctl daemon-reload`); code != 0 {
		c.t.Fatalf("%s: %s", machine, out)
	}
}

// servesSSH starts the sshd of this computer's OpenSSH on a machine, which accepts key for root, and returns its host key
// and its address.
func (c *cloud) servesSSH(machine string, key ed25519.PrivateKey) (host ed25519.PrivateKey, ip string) {
	c.t.Helper()
	put := func(path string, mode os.FileMode, b []byte) {
		c.t.Helper()
		cmd := c.command(c.t.Context(), "sandbox", "shell", machine, "--", "bash", "-ec", `mkdir -p "$(dirname "$0")" && cat >"$0" && chmod "$1" "$0"`, path, fmt.Sprintf("%o", mode))
		cmd.Stdin = bytes.NewReader(b)
		if out, err := cmd.CombinedOutput(); err != nil {
			c.t.Fatalf("write %s on %s: %v\n%s", path, machine, err, out)
		}
	}
	for _, path := range []string{testneeds.Program(c.t, "/usr/sbin/sshd", "openssh-server"), "/usr/lib/openssh/sftp-server"} {
		b, err := os.ReadFile(path)
		if err != nil {
			c.t.Fatal(err)
		}
		put(path, 0o755, b)
	}
	host = sshdtest.NewKey(c.t)
	put("/root/ssh/host", 0o600, []byte(sshdtest.Private(c.t, host)))
	put("/root/ssh/keys", 0o600, []byte(sshdtest.Authorized(c.t, key)))
	put("/root/ssh/config", 0o600, []byte("HostKey /root/ssh/host\nAuthorizedKeysFile /root/ssh/keys\nPermitRootLogin prohibit-password\nUsePAM no\nSubsystem sftp /usr/lib/openssh/sftp-server\n"))
	out, code := c.asRoot(machine, `set -e; id sshd >/dev/null 2>&1 || useradd --system --no-create-home --home-dir /run/sshd --shell /usr/sbin/nologin sshd
mkdir -p /run/sshd && systemd-run --quiet --unit=sshd /usr/sbin/sshd -D -f /root/ssh/config && hostname -I`)
	if code != 0 || len(strings.Fields(out)) == 0 {
		c.t.Fatalf("start sshd on %s: %s", machine, out)
	}
	return host, strings.Fields(out)[0]
}

// edit replaces a text in the configuration.
func (c *cloud) edit(from, to string) {
	c.t.Helper()
	path := filepath.Join(c.dir, "constellation-conf.yaml")
	b, err := os.ReadFile(path)
	if err == nil && !bytes.Contains(b, []byte(from)) {
		err = errors.New("it lacks " + from)
	}
	if err == nil {
		err = os.WriteFile(path, bytes.Replace(b, []byte(from), []byte(to), 1), 0o644)
	}
	if err != nil {
		c.t.Fatalf("edit the configuration: %v", err)
	}
}
