package main

import (
	"context"
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
	"constellation/engine/sandbox/build"
	"constellation/internal/testneeds"
)

// balancerAddress is an address of the machines' network that no machine has.
const balancerAddress = "10.42.0.200"

// Control planes get a balancer with their cluster. One is added later, the one with the address loses power, a haproxy is
// stopped, all are upgraded in place, and one is given back. A client outside counts the requests that fail.
//
// It takes fifteen minutes, so it is opt-in:
//
//	CONSTELLATION_E2E_BALANCER=1 go test -run TestBalancerOfEnrolledMachines .
func TestBalancerOfEnrolledMachines(t *testing.T) {
	testneeds.OptIn(t, "CONSTELLATION_E2E_BALANCER", "fifteen minutes")
	testneeds.Network(t, "to download haproxy and keepalived of Debian")
	const to = "v1.37.2"
	testneeds.Kubernetes(t, to)
	c := newReal(t)
	c.up(3, 0)
	all := machineNames(3, 0)
	a, login, connect := c.owner(all)
	packages := debianPackages(t, debian12, "haproxy", "keepalived", "procps")
	for _, m := range all {
		c.unpack(m, packages)
	}
	given := all[2]
	before, _ := c.asRoot(given, enrolledFiles)

	a.run(time.Minute, "config", "generate", "machines").want(plan.ExitDone)
	a.edit("endpoint: api.example.com\n", "endpoint: "+balancerAddress+"\n    balancer: {address: "+balancerAddress+"}\n"+a.componentRows(build.DefaultVersion, to))
	add := func(names ...string) *result {
		args := []string{"machine", "add", "--group", "control-plane", "--yes"}
		for _, m := range names {
			args = append(args, "--ssh", login[m])
		}
		return a.run(5*time.Minute, args...)
	}

	// Another computer has the address, and another configuration is there: nothing is changed.
	c.asRoot(all[2], "ip addr add "+balancerAddress+"/24 dev $(ip -o route get 10.42.0.1 | sed 's/.* dev \\([^ ]*\\).*/\\1/')")
	if r := add(all[0]); r.code != plan.ExitBlocked || !strings.Contains(r.stdout, "is in use") {
		t.Errorf("an address in use: exit code %d\n%s%s", r.code, r.stdout, r.stderr)
	}
	c.asRoot(all[2], "ip addr del "+balancerAddress+"/24 dev $(ip -o route get 10.42.0.1 | sed 's/.* dev \\([^ ]*\\).*/\\1/')")
	c.asRoot(all[0], "mkdir -p /etc/keepalived && echo '# of the owner' >/etc/keepalived/keepalived.conf")
	if r := add(all[0]); r.code != plan.ExitBlocked || !strings.Contains(r.stderr, "keepalived.conf is there") {
		t.Errorf("a configuration of the owner: exit code %d\n%s%s", r.code, r.stdout, r.stderr)
	}
	c.asRoot(all[0], "rm -r /etc/keepalived")

	begin := time.Now()
	add(all[0], all[1]).want(plan.ExitDone)
	t.Logf("enrolment of 2 control planes: %s", time.Since(begin).Round(time.Second))
	begin = time.Now()
	connect()
	a.run(10*time.Minute, "init", "--yes").want(plan.ExitDone)
	t.Logf("init: %s", time.Since(begin).Round(time.Second))
	a.wantNodes(all[:2]...)

	// The others must learn of a later one.
	if r := add(given); r.code != plan.ExitUsage || !strings.Contains(r.stderr, "--ssh USER@") {
		t.Errorf("a control plane alone: exit code %d\n%s", r.code, r.stderr)
	}
	add(given, all[0], all[1]).want(plan.ExitDone)
	a.run(10*time.Minute, "init", "--yes").want(plan.ExitDone)
	a.wantNodes(all...)

	// Power.
	holder := c.holder(all)
	seen := a.pollAPI()
	c.run(time.Minute, "sandbox", "machine", "off", holder).want(plan.ExitDone)
	next := c.awaitHolder(slices.DeleteFunc(slices.Clone(all), func(m string) bool { return m == holder }))
	t.Logf("power off: %s moved from %s to %s; %s", balancerAddress, holder, next, seen().limit(t, 20*time.Second))
	begin = time.Now()
	c.run(time.Minute, "sandbox", "machine", "on", holder).want(plan.ExitDone)
	c.asRoot(holder, "mkdir -p /run/sshd && systemd-run --quiet --unit=sshd /usr/sbin/sshd -D -f /root/ssh/config") // lost with the power
	// The others report a state that stays every five minutes only.
	a.wantReady(begin, []string{holder})
	if is := c.holder(all); is != next {
		t.Errorf("the address moved back to %s", is)
	}

	// haproxy alone.
	seen = a.pollAPI()
	c.asRoot(next, "systemctl stop haproxy")
	third := c.awaitHolder(slices.DeleteFunc(slices.Clone(all), func(m string) bool { return m == next }))
	t.Logf("haproxy stopped: moved from %s to %s; %s", next, third, seen().limit(t, 15*time.Second))
	c.asRoot(next, "systemctl start haproxy")

	begin = time.Now()
	seen = a.pollAPI()
	a.run(25*time.Minute, "upgrade", "apply", "--kubernetes", to, "--yes").want(plan.ExitDone)
	t.Logf("apply: %s; %s", time.Since(begin).Round(time.Second), seen().limit(t, 10*time.Second))

	// A control plane is given back, and the others get the shorter list.
	a.kubectl("drain", given, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=110s")
	if out, code := c.asRoot(given, "kubeadm reset --force"); code != 0 {
		t.Fatalf("kubeadm reset: %s", out)
	}
	a.kubectl("delete", "node", given)
	a.run(3*time.Minute, "machine", "remove", given, "--ssh", login[given], "--yes").want(plan.ExitDone)
	after, _ := c.asRoot(given, enrolledFiles)
	// The owner's network, the state of apt, and documents of packages that were there and are newer in the repository.
	left := regexp.MustCompile(`^(/etc/cni/net\.d/|/var/lib/apt/|/usr/share/(doc|man)(/|$)|/etc/ssl(/certs)?$)`)
	for _, path := range strings.Split(after, "\n") {
		if !slices.Contains(strings.Split(before, "\n"), path) && !left.MatchString(path) {
			t.Errorf("%s is left on %s", path, given)
		}
	}
	add(all[0], all[1]).want(plan.ExitDone)
	for _, m := range all[:2] {
		if out, _ := c.asRoot(m, "cat /etc/haproxy/haproxy.cfg /etc/keepalived/keepalived.conf"); !strings.Contains(out, all[0]) || strings.Contains(out, given) {
			t.Errorf("the balancer of %s lists another set of machines:\n%s", m, out)
		}
	}
	if m := c.holder(all[:2]); m == "" {
		t.Error("no machine has the address")
	}
}

// holder returns the machine that has the balancer's address; empty unless it is exactly one.
func (c *cloud) holder(machines []string) (holder string) {
	for _, m := range machines {
		if out, code := c.asRoot(m, "ip -o addr show to "+balancerAddress); code == 0 && strings.Contains(out, balancerAddress) {
			if holder != "" {
				return ""
			}
			holder = m
		}
	}
	return holder
}

func (c *cloud) awaitHolder(machines []string) string {
	c.t.Helper()
	for deadline := time.Now().Add(30 * time.Second); time.Now().Before(deadline); {
		if m := c.holder(machines); m != "" {
			return m
		}
	}
	c.t.Fatalf("none of %s got the address", strings.Join(machines, ", "))
	return ""
}

// polled is what a client saw: how many requests it made, which failed, and the longest time without an answer.
type polled struct {
	requests, failed int
	gap              time.Duration
	last             string
}

func (p polled) String() string {
	return fmt.Sprintf("%d of %d requests failed, longest time between answers %s %s", p.failed, p.requests, p.gap.Round(10*time.Millisecond), p.last)
}

func (p polled) limit(t *testing.T, gap time.Duration) polled {
	t.Helper()
	if p.gap > gap || p.requests == p.failed {
		t.Errorf("%s, want at most %s", p, gap)
	}
	return p
}

// pollAPI makes requests through the balancer, each on a new connection, until the returned function is called and ten in a
// row were answered after that, or none for half a minute.
func (c *cloud) pollAPI() func() polled {
	ctx, cancel := context.WithCancel(c.t.Context())
	var p polled
	var wg sync.WaitGroup
	ended := make(chan struct{})
	wg.Go(func() {
		answered := time.Now()
		defer func() { p.gap = max(p.gap, time.Since(answered)) }()
		for row := 0; ctx.Err() == nil; pause(ctx, 100*time.Millisecond) {
			select {
			case <-ended:
				if row++; row > 10 || time.Since(answered) > 30*time.Second {
					return
				}
			default:
			}
			cmd := c.inNetwork(ctx, filepath.Join(c.bin, "kubectl"), "--kubeconfig", filepath.Join(c.dir, "constellation-admin.conf"), "--request-timeout=2s", "get", "--raw", "/api/v1/namespaces/default")
			out, err := cmd.CombinedOutput()
			if ctx.Err() != nil {
				return
			}
			p.requests++
			if err != nil {
				p.failed++
				p.last = "(" + strings.TrimSpace(string(out)) + ")"
				row = 0
				continue
			}
			p.gap = max(p.gap, time.Since(answered))
			answered = time.Now()
		}
	})
	c.t.Cleanup(cancel)
	return func() polled {
		close(ended)
		wg.Wait()
		return p
	}
}

// debianPackages downloads packages of a release of Debian, with all that they need on a machine of the sandbox, and
// returns an archive of a repository with them.
func debianPackages(t *testing.T, release string, names ...string) []byte {
	t.Helper()
	testneeds.Program(t, "dpkg-scanpackages", "dpkg-dev")
	dirs, err := os.UserCacheDir()
	if err != nil {
		t.Fatal(err)
	}
	trees, err := filepath.Glob(filepath.Join(dirs, "constellation/rootfs", release+"-*", "tree"))
	if err != nil || len(trees) == 0 {
		t.Fatalf("the sandbox has no root file system of %s: %v", release, err)
	}
	dir := t.TempDir()
	script := `mkdir -p repo/partial lists/partial cache
apt() {
  apt-get -q -o APT::Sandbox::User=root -o Debug::NoLocking=1 -o Dir::State::status="$tree/var/lib/dpkg/status" -o Dir::State::lists="$PWD/lists" \
    -o Dir::Etc::SourceList="$tree/etc/apt/sources.list" -o Dir::Etc::SourceParts=/dev/null -o Dir::Cache="$PWD/cache" -o Dir::Cache::archives="$PWD/repo" "$@" >&2
}
tree=$0
apt update
apt --download-only -y --no-install-recommends install "$@"
cd repo
rm -rf partial lock
dpkg-scanpackages -m . >Packages
cd .. && tar -cf - repo`
	cmd := exec.CommandContext(t.Context(), "bash", append([]string{"-ec", script, trees[len(trees)-1]}, names...)...)
	cmd.Dir = dir
	var errs strings.Builder
	cmd.Stderr = &errs
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("download %q: %v\n%s", names, err, errs.String())
	}
	return out
}

// unpack makes an archive of debianPackages the only repository of a machine.
func (c *cloud) unpack(machine string, archive []byte) {
	c.t.Helper()
	cmd := c.command(c.t.Context(), "sandbox", "shell", machine, "--", "bash", "-ec", "tar -C /root -xf - && rm -rf /etc/apt/sources.list.d/* && echo 'deb [trusted=yes] file:/root/repo ./' >/etc/apt/sources.list")
	cmd.Stdin = strings.NewReader(string(archive))
	if out, err := cmd.CombinedOutput(); err != nil {
		c.t.Fatalf("unpack packages on %s: %v\n%s", machine, err, out)
	}
}
