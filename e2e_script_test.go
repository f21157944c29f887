package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"constellation/engine/plan"
	"constellation/engine/sandbox/build"
	"constellation/internal/testneeds"
)

// TestHopInPlaceAgainstAScript measures a hop in place of one control plane and two workers, and what the same kubeadm commands
// take in the script of a person who follows Kubernetes' page: drain, kubeadm, kubelet, uncordon, one machine after the other.
// Both begin with a cluster of plain kubeadm. Times are logged, of the whole and of kubeadm alone. No time fails the test.
//
//	CONSTELLATION_E2E_SCRIPT=1 go test -timeout 30m -v -run TestHopInPlaceAgainstAScript .
func TestHopInPlaceAgainstAScript(t *testing.T) {
	testneeds.OptIn(t, "CONSTELLATION_E2E_SCRIPT", "ten minutes and Kubernetes v1.35.4")
	const from, to = "v1.35.4", "v1.36.4"
	for _, v := range []string{from, to} {
		testneeds.Kubernetes(t, v)
	}
	c := newReal(t)
	all := machineNames(1, 2)
	plainCluster := func(t *testing.T) *cloud {
		t.Helper()
		x := &cloud{t: t, bin: c.bin, dir: t.TempDir()}
		x.up(1, 2, "--kubernetes", from)
		b, err := os.ReadFile(x.plainKubeadm(from, 1, 2))
		if err == nil {
			err = os.WriteFile(filepath.Join(x.dir, "constellation-admin.conf"), b, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
		x.kubectl("-n", "kube-system", "wait", "--for=condition=Ready", "pod", "--all", "--timeout=110s")
		return x
	}
	runs := func(t *testing.T, x *cloud) {
		t.Helper()
		if is, want := x.kubectl("get", "nodes", "-o", "jsonpath={.items[*].status.nodeInfo.kubeletVersion}"), strings.TrimSpace(strings.Repeat(to+" ", len(all))); is != want {
			t.Fatalf("kubelets run %q, want %s", is, to)
		}
	}
	var script, ours, kubeadmOfScript, kubeadmOfOurs time.Duration
	t.Run("a script", func(t *testing.T) {
		x := plainCluster(t)
		seen := x.watchKubeadm(all)
		begin := time.Now()
		for i, m := range all {
			command := "kubeadm upgrade node --ignore-preflight-errors=all"
			if i == 0 {
				command = "kubeadm upgrade apply " + to + " --yes --ignore-preflight-errors=all"
			}
			// An API server that has just started does not know its roles yet. A person repeats the command.
			x.repeated("forbidden", "drain", m, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=110s")
			on := func(script string, stdin []byte) {
				t.Helper()
				cmd := x.command(t.Context(), "sandbox", "shell", m, "--", "bash", "-ec", script)
				cmd.Stdin = bytes.NewReader(stdin)
				if out, err := cmd.CombinedOutput(); err != nil {
					t.Fatalf("%s: %v\n%s", m, err, out)
				}
			}
			for _, name := range []string{"kubeadm", "kubelet", "kubectl"} {
				b, err := os.ReadFile(filepath.Join(testneeds.Kubernetes(t, to), name))
				if err != nil {
					t.Fatal(err)
				}
				on("cat >/usr/bin/"+name+".new && chmod 755 /usr/bin/"+name+".new", b)
			}
			on("mv /usr/bin/kubeadm.new /usr/bin/kubeadm\n"+command+"\nmv /usr/bin/kubelet.new /usr/bin/kubelet\nmv /usr/bin/kubectl.new /usr/bin/kubectl\nsystemctl restart kubelet", nil)
			x.kubectl("wait", "--for=jsonpath={.status.nodeInfo.kubeletVersion}="+to, "node/"+m, "--timeout=110s")
			x.kubectl("wait", "--for=condition=Ready", "node/"+m, "--timeout=110s")
			x.kubectl("uncordon", m)
		}
		script, kubeadmOfScript = time.Since(begin), seen()
		runs(t, x)
	})
	t.Run("in place", func(t *testing.T) {
		x := plainCluster(t)
		a := &cloud{t: t, bin: x.bin, dir: t.TempDir()}
		a.run(time.Minute, "adopt", "--kubeconfig", filepath.Join(x.dir, "constellation-admin.conf"), "--name", "old", "--yes").want(plan.ExitDone)
		a.addComponents(from, to)
		a.run(3*time.Minute, "adopt", "--operator", "--yes").want(plan.ExitDone)
		seen := x.watchKubeadm(all)
		begin := time.Now()
		a.run(20*time.Minute, "upgrade", "apply", "--kubernetes", to, "--yes").want(plan.ExitDone)
		ours, kubeadmOfOurs = time.Since(begin), seen()
		runs(t, x)
	})
	if t.Failed() {
		return // the times are of no use
	}
	t.Logf("%s to %s on 1+2: script %s, in place %s, ratio %.2f", from, to, script.Round(time.Second), ours.Round(time.Second), ours.Seconds()/script.Seconds())
	t.Logf("kubeadm upgrade apply and node alone: script %s, in place %s, ratio %.2f", kubeadmOfScript.Round(time.Second/10), kubeadmOfOurs.Round(time.Second/10), kubeadmOfOurs.Seconds()/kubeadmOfScript.Seconds())
}

// TestInitAgainstKubeadm measures kubeadm alone in init of one control plane and two workers, and in a cluster that a person
// makes with kubeadm init and join on such machines. No time fails the test.
//
//	CONSTELLATION_E2E_SCRIPT=1 go test -timeout 30m -v -run TestInitAgainstKubeadm .
func TestInitAgainstKubeadm(t *testing.T) {
	testneeds.OptIn(t, "CONSTELLATION_E2E_SCRIPT", "five minutes")
	c := newReal(t)
	testneeds.Kubernetes(t, build.DefaultVersion)
	all := machineNames(1, 2)
	took := map[string]time.Duration{}
	for _, by := range []string{"a person", "init", "init again", "a person again"} {
		t.Run(by, func(t *testing.T) {
			x := &cloud{t: t, bin: c.bin, dir: t.TempDir()}
			x.up(1, 2, "--kubernetes", build.DefaultVersion)
			seen := x.watchKubeadm(all)
			if who, _, _ := strings.Cut(by, " again"); who == "init" {
				x.run(10*time.Minute, "init", "--yes").want(plan.ExitDone)
			} else {
				x.plainKubeadm(build.DefaultVersion, 1, 2)
			}
			took[by] = seen()
			t.Logf("kubeadm init and join: %s", took[by].Round(time.Second/10))
		})
	}
	if !t.Failed() {
		t.Logf("kubeadm init and join alone, init against a person: ratio %.2f", (took["init"]+took["init again"]).Seconds()/(took["a person"]+took["a person again"]).Seconds())
	}
}

// watchKubeadm records when kubeadm works on machines. The result returns how long that was, to a fifth of a second for each
// run.
func (c *cloud) watchKubeadm(machines []string) (seen func() time.Duration) {
	c.t.Helper()
	// Arguments are separated by zero bytes, so that a shell with the same words in its script does not count.
	const script = `while :; do grep -qsaP 'kubeadm\x00(upgrade\x00(apply|node)|init|join)\x00' /proc/[0-9]*/cmdline && date +%s%N; read -t 0.2 <> <(:) || :; done >/run/kubeadm-seen`
	for _, m := range machines {
		if out, code := c.asRoot(m, `systemd-run --quiet --unit=watch-kubeadm bash -c "$1"`, script); code != 0 {
			c.t.Fatalf("watch kubeadm on %s: %s", m, out)
		}
	}
	return func() (total time.Duration) {
		c.t.Helper()
		for _, m := range machines {
			out, code := c.asRoot(m, "systemctl stop watch-kubeadm; cat /run/kubeadm-seen")
			if code != 0 || out == "" {
				c.t.Fatalf("kubeadm was not seen on %s: %s", m, out)
			}
			last := int64(0)
			for _, line := range strings.Fields(out) {
				at, err := strconv.ParseInt(line, 10, 64)
				if err != nil {
					c.t.Fatalf("kubeadm on %s: %v", m, err)
				}
				if pause := time.Duration(at - last); pause < 2*time.Second { // else another run
					total += pause
				}
				last = at
			}
		}
		return total
	}
}

// repeated runs kubectl until its output lacks the text, for a minute at most.
func (c *cloud) repeated(text string, args ...string) {
	c.t.Helper()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(time.Second) {
		out, err := c.tryKubectl(args...)
		switch {
		case err == nil:
			return
		case !strings.Contains(out, text) || time.Now().After(deadline):
			c.t.Fatalf("kubectl %s: %v\n%s", strings.Join(args, " "), err, out)
		}
	}
}
