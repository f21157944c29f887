package main

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"constellation/engine/plan"
	"constellation/engine/sandbox/build"
	"constellation/internal/testneeds"
)

// A cluster of plain kubeadm on real machines without anything of ours, with the units of Kubernetes' packages, is adopted,
// gets the operator and the agents, is upgraded in place to the next minor, and is given back.
//
// It takes eight minutes, so it is opt-in:
//
//	CONSTELLATION_E2E_ADOPT=1 go test -run TestAdoptedClusterIsUpgradedAndGivenBack .
func TestAdoptedClusterIsUpgradedAndGivenBack(t *testing.T) {
	testneeds.OptIn(t, "CONSTELLATION_E2E_ADOPT", "eight minutes")
	const to = "v1.37.2"
	testneeds.Kubernetes(t, to)
	c := newReal(t)
	c.up(1, 1)
	kubeconfig := c.plainKubeadm(build.DefaultVersion)
	a := &cloud{t: t, bin: c.bin, dir: t.TempDir()}
	kubectl := func(args ...string) string {
		t.Helper()
		out, err := exec.Command(filepath.Join(c.bin, "kubectl"), append([]string{"--kubeconfig", kubeconfig}, args...)...).CombinedOutput()
		if err != nil {
			t.Fatalf("kubectl %s: %v\n%s", strings.Join(args, " "), err, out)
		}
		return string(out)
	}
	ready := func() {
		t.Helper()
		kubectl("-n", "kube-system", "wait", "--for=condition=Ready", "pod", "--all", "--timeout=120s")
	}
	ready()
	const files = `find /usr /etc /var/lib/constellation /run/constellation-agent -not -path '/etc/kubernetes/*' 2>/dev/null | sort`
	before := map[string]string{}
	for _, m := range []string{"control-plane-0", "worker-0"} {
		before[m], _ = c.asRoot(m, files)
	}
	started := func(m string) string {
		out, _ := c.asRoot(m, "systemctl show --property=ActiveEnterTimestampMonotonic --value kubelet")
		return out
	}
	kubelets := map[string]string{"control-plane-0": started("control-plane-0"), "worker-0": started("worker-0")}

	a.run(time.Minute, "adopt", "--kubeconfig", kubeconfig, "--name", "old", "--yes").want(plan.ExitDone)
	a.run(time.Minute, "upgrade", "apply", "--yes").want(plan.ExitUsage) // no operator
	a.addComponents(build.DefaultVersion, to)
	a.run(3*time.Minute, "adopt", "--operator", "--non-interactive").want(plan.ExitUnacknowledged)
	if _, err := os.Stat(filepath.Join(a.dir, "constellation-signing-key.pem")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a plan that was not accepted made a key: %v", err)
	}
	// Interrupted while agents are being installed, and given back.
	cmd := a.command(t.Context(), "adopt", "--operator", "--yes", "-o", "json")
	events, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	for lines := bufio.NewScanner(events); lines.Scan() && !strings.Contains(lines.Text(), `"object":"agents"`); {
	}
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	a.run(3*time.Minute, "adopt", "--undo", "--yes").want(plan.ExitDone)
	if out := kubectl("get", "namespace", "-o", "name"); strings.Contains(out, "constellation") {
		t.Errorf("the undo of an interrupted installation left %s", out)
	}
	if err := os.Remove(filepath.Join(a.dir, "constellation-conf.yaml")); err != nil { // it had been changed, so it was kept
		t.Fatal(err)
	}
	a.run(time.Minute, "adopt", "--kubeconfig", kubeconfig, "--name", "old", "--yes").want(plan.ExitDone)
	a.addComponents(build.DefaultVersion, to)
	a.run(3*time.Minute, "adopt", "--operator", "--yes").want(plan.ExitDone)
	a.run(time.Minute, "adopt", "--operator", "--yes").want(plan.ExitNothing)
	for m, was := range kubelets {
		if is := started(m); is != was {
			t.Errorf("the kubelet of %s was restarted", m)
		}
	}
	a.run(time.Minute, "init", "--yes").want(plan.ExitUsage)

	for _, kubernetes := range []string{build.DefaultVersion, to} { // a hop of etcd comes first
		ready()
		// The leaders of the only control plane are elected again after its hop.
		for deadline := time.Now().Add(time.Minute); ; time.Sleep(time.Second) {
			r := a.run(10*time.Minute, "upgrade", "apply", "--kubernetes", to, "--yes")
			if r.code != plan.ExitBlocked || time.Now().After(deadline) {
				r.want(plan.ExitDone)
				break
			}
		}
		if is := kubectl("get", "nodes", "-o", "jsonpath={.items[*].status.nodeInfo.kubeletVersion}"); is != kubernetes+" "+kubernetes {
			t.Fatalf("kubelets run %q, want %s", is, kubernetes)
		}
	}
	a.wantNodes("control-plane-0", "worker-0")

	a.run(3*time.Minute, "adopt", "--undo", "--yes").want(plan.ExitDone)
	for _, what := range []string{"crd", "namespace", "clusterrole", "clusterrolebinding", "validatingadmissionpolicy"} {
		for _, line := range strings.Split(kubectl("get", what, "-o", "name"), "\n") {
			if strings.Contains(line, "constellation") || strings.Contains(line, "edgeless") || strings.Contains(line, "system-upgrade") || strings.Contains(line, "plans.upgrade") {
				t.Errorf("%s is left", line)
			}
		}
	}
	if out := kubectl("get", "nodes", "-o", "yaml"); strings.Contains(out, "constellation.edgeless.systems") {
		t.Errorf("Nodes keep labels or annotations of ours:\n%s", out)
	}
	// The upgraded programs and the drop-in that starts them stay.
	kept := map[string]bool{
		"/usr/local/bin/kubeadm": true, "/usr/local/bin/kubelet": true, "/usr/local/bin/kubectl": true,
		"/etc/systemd/system/kubelet.service.d": true, "/etc/systemd/system/kubelet.service.d/90-constellation.conf": true,
	}
	for m, was := range before {
		is, _ := c.asRoot(m, files)
		for _, path := range strings.Split(is, "\n") {
			if !strings.Contains("\n"+was+"\n", "\n"+path+"\n") && !kept[path] && !strings.HasPrefix(path, "/usr/lib/modules") {
				t.Errorf("%s is left on %s", path, m)
			}
		}
	}
	if out, code := c.asRoot("control-plane-0", "KUBECONFIG=/etc/kubernetes/admin.conf kubeadm upgrade plan --ignore-preflight-errors=all 2>&1"); code != 0 || !strings.Contains(out, "Cluster version: "+strings.TrimPrefix(to, "v")) {
		t.Errorf("kubeadm upgrade plan: exit %d\n%s", code, out)
	}
}

// addComponents adds the components of versions, as the cloud serves them, to the configuration of an adopted cluster.
func (c *cloud) addComponents(versions ...string) {
	c.t.Helper()
	var rows strings.Builder
	rows.WriteString("    components:\n")
	for _, v := range versions {
		for _, name := range []string{"kubeadm", "kubelet", "kubectl"} {
			b, err := os.ReadFile(filepath.Join(testneeds.Kubernetes(c.t, v), name))
			if err != nil {
				c.t.Fatal(err)
			}
			sum := sha256.Sum256(b)
			fmt.Fprintf(&rows, "      - {kubernetes: %s, name: %s, url: \"http://10.42.0.1:8080/kubernetes/%s/%s\", digest: \"sha256:%s\"}\n", v, name, v, name, hex.EncodeToString(sum[:]))
		}
	}
	path := filepath.Join(c.dir, "constellation-conf.yaml")
	b, err := os.ReadFile(path)
	if err == nil {
		err = os.WriteFile(path, []byte(strings.Replace(string(b), "nodeGroups:", rows.String()+"nodeGroups:", 1)), 0o644)
	}
	if err != nil {
		c.t.Fatal(err)
	}
}

// plainKubeadm takes everything of ours off one control plane and one worker, installs kubeadm, kubelet and kubectl where
// Kubernetes' packages install them, with their units, and creates a cluster. It returns the path of the administrator's
// kubeconfig.
func (c *cloud) plainKubeadm(version string) (kubeconfig string) {
	t := c.t
	t.Helper()
	do := func(machine, script string, stdin []byte) string {
		t.Helper()
		cmd := c.command(t.Context(), "sandbox", "shell", machine, "--", "bash", "-ec", script)
		cmd.Stdin = bytes.NewReader(stdin)
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("%s: %v\n%s", machine, err, out)
		}
		return string(out)
	}
	for _, m := range []string{"control-plane-0", "worker-0"} {
		do(m, `systemctl disable --now constellation-bootstrapper constellation-agent
rm -rf /usr/lib/constellation/{agent,bootstrapper,release-keys.pem,peers.json} /etc/constellation /run/constellation-agent /var/lib/constellation
rm -rf /lib/systemd/system/constellation-* /lib/systemd/system/kubelet.service*`, nil)
		for _, name := range []string{"kubeadm", "kubelet", "kubectl"} {
			b, err := os.ReadFile(filepath.Join(testneeds.Kubernetes(t, version), name))
			if err != nil {
				t.Fatal(err)
			}
			do(m, "cat >/usr/bin/"+name+" && chmod 755 /usr/bin/"+name, b)
		}
		do(m, "cat >/lib/systemd/system/kubelet.service", []byte(packagesKubelet))
		do(m, "mkdir -p /lib/systemd/system/kubelet.service.d && cat >/lib/systemd/system/kubelet.service.d/10-kubeadm.conf && systemctl daemon-reload && systemctl enable kubelet", []byte(packagesDropIn))
	}
	do("control-plane-0", "cat >/root/init.yaml && kubeadm init --config /root/init.yaml", fmt.Appendf(nil, strangerInit, version))
	join := strings.TrimSpace(do("control-plane-0", "kubeadm token create --print-join-command", nil))
	do("worker-0", join+" --ignore-preflight-errors=SystemVerification,Swap,Mem,NumCPU", nil)

	var sandbox struct{ ClusterEndpoint string }
	if err := json.Unmarshal([]byte(c.run(time.Minute, "sandbox", "status", "-o", "json").want(plan.ExitDone).stdout), &sandbox); err != nil || sandbox.ClusterEndpoint == "" {
		t.Fatalf("sandbox status has no address of the API server: %v", err)
	}
	admin := do("control-plane-0", "cat /etc/kubernetes/admin.conf", nil)
	kubeconfig = filepath.Join(t.TempDir(), "config")
	if err := os.WriteFile(kubeconfig, []byte(strings.Replace(admin, "https://10.42.0.1:6443", "https://"+sandbox.ClusterEndpoint, 1)), 0o600); err != nil {
		t.Fatal(err)
	}
	return kubeconfig
}

// The units of the kubelet as Kubernetes' packages have them, but for --config-dir: a file of the sandbox in it has what
// machines that are containers need.
const (
	packagesKubelet = `[Unit]
Description=kubelet
[Service]
ExecStart=/usr/bin/kubelet
Restart=always
RestartSec=1s
KillMode=process
[Install]
WantedBy=multi-user.target
`
	packagesDropIn = `[Service]
Environment="KUBELET_KUBECONFIG_ARGS=--bootstrap-kubeconfig=/etc/kubernetes/bootstrap-kubelet.conf --kubeconfig=/etc/kubernetes/kubelet.conf"
Environment="KUBELET_CONFIG_ARGS=--config=/var/lib/kubelet/config.yaml --config-dir=/usr/lib/constellation/kubelet.conf.d"
EnvironmentFile=-/var/lib/kubelet/kubeadm-flags.env
EnvironmentFile=-/etc/default/kubelet
ExecStart=
ExecStart=/usr/bin/kubelet $KUBELET_KUBECONFIG_ARGS $KUBELET_CONFIG_ARGS $KUBELET_KUBEADM_ARGS $KUBELET_EXTRA_ARGS
`
)
