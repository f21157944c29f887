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
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"constellation/engine/plan"
	"constellation/engine/sandbox/build"
	"constellation/internal/testneeds"
)

// A cluster of plain kubeadm on real machines without anything of ours, with the units of Kubernetes' packages, is adopted,
// gets the operator and the agents, is upgraded in place to the next minor, and is given back. The variable has the size:
// 1 is one control plane and one worker. With two workers or more, clients of a service must not notice the upgrade. With
// three control planes, one loses power while its agent upgrades it.
//
// A version behind @ is the one that the cluster begins with: from v1.35.4 it is upgraded by two minors.
//
// It takes 8 minutes with 1+1 and 20 with 3+2, so it is opt-in:
//
//	CONSTELLATION_E2E_ADOPT=1           go test -run TestAdoptedClusterIsUpgradedAndGivenBack .
//	CONSTELLATION_E2E_ADOPT=3+2         go test -timeout 40m -run TestAdoptedClusterIsUpgradedAndGivenBack .
//	CONSTELLATION_E2E_ADOPT=1+2@v1.35.4 go test -timeout 40m -run TestAdoptedClusterIsUpgradedAndGivenBack .
func TestAdoptedClusterIsUpgradedAndGivenBack(t *testing.T) {
	testneeds.OptIn(t, "CONSTELLATION_E2E_ADOPT", "eight minutes")
	const to = "v1.37.2"
	controlPlanes, workers := 1, 1
	size, from, other := strings.Cut(os.Getenv("CONSTELLATION_E2E_ADOPT"), "@")
	versions, hops := []string{build.DefaultVersion, to}, []string{build.DefaultVersion, to} // a hop of etcd comes first
	if !other {
		from = build.DefaultVersion
	} else if from != build.DefaultVersion {
		versions, hops = slices.Insert(versions, 0, from), slices.Insert(hops, 0, build.DefaultVersion)
	}
	for _, v := range versions {
		testneeds.Kubernetes(t, v)
	}
	if strings.Contains(size, "+") {
		if n, err := fmt.Sscanf(size, "%d+%d", &controlPlanes, &workers); n != 2 || err != nil || controlPlanes < 1 || workers < 1 {
			t.Fatalf("CONSTELLATION_E2E_ADOPT is %q, want 1 or a size such as 3+2", size)
		}
	}
	all := machineNames(controlPlanes, workers)
	c := newReal(t)
	c.up(controlPlanes, workers, "--kubernetes", from)
	kubeconfig := c.plainKubeadm(from, controlPlanes, workers)
	a := &cloud{t: t, bin: c.bin, dir: t.TempDir()}
	if b, err := os.ReadFile(kubeconfig); err != nil || os.WriteFile(filepath.Join(c.dir, "constellation-admin.conf"), b, 0o600) != nil {
		t.Fatalf("copy the kubeconfig: %v", err)
	}
	kubectl := c.kubectl
	ready := func() {
		t.Helper()
		for {
			out, err := c.tryKubectl("-n", "kube-system", "wait", "--for=condition=Ready", "pod", "--all", "--timeout=110s")
			if err == nil {
				return
			}
			if !strings.Contains(out, "NotFound") { // else a DaemonSet has replaced the pod meanwhile
				t.Fatalf("pods are not Ready: %v\n%s", err, out)
			}
		}
	}
	ready()
	const files = `find /usr /etc /var/lib/constellation /run/constellation-agent -not -path '/etc/kubernetes/*' 2>/dev/null | sort`
	before, kubelets := map[string]string{}, map[string]string{}
	started := func(m string) string {
		out, _ := c.asRoot(m, "systemctl show --property=ActiveEnterTimestampMonotonic --value kubelet")
		return out
	}
	for _, m := range all {
		before[m], _ = c.asRoot(m, files)
		kubelets[m] = started(m)
	}
	adopts := func() {
		t.Helper()
		a.run(time.Minute, "adopt", "--kubeconfig", kubeconfig, "--name", "old", "--yes").want(plan.ExitDone)
	}

	adopts()
	a.run(time.Minute, "upgrade", "apply", "--yes").want(plan.ExitUsage) // no operator
	a.addComponents(versions...)
	a.run(3*time.Minute, "adopt", "--operator", "--non-interactive").want(plan.ExitUnacknowledged)
	if _, err := os.Stat(filepath.Join(a.dir, "constellation-signing-key.pem")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a plan that was not accepted made a key: %v", err)
	}
	// Interrupted while agents are being installed, and given back.
	a.killedAt(`"object":"agents"`, "adopt", "--operator")
	a.run(3*time.Minute, "adopt", "--undo", "--yes").want(plan.ExitDone)
	if out := kubectl("get", "namespace", "-o", "name"); strings.Contains(out, "constellation") {
		t.Errorf("the undo of an interrupted installation left %s", out)
	}
	if err := os.Remove(filepath.Join(a.dir, "constellation-conf.yaml")); err != nil { // it had been changed, so it was kept
		t.Fatal(err)
	}
	begin := time.Now()
	adopts()
	a.addComponents(versions...)
	a.run(3*time.Minute, "adopt", "--operator", "--yes").want(plan.ExitDone)
	t.Logf("adoption of %d+%d, operator included: %s", controlPlanes, workers, time.Since(begin).Round(time.Second))
	// Nodes get these pods when the operator has labelled them, which is after the charts.
	kubectl("-n", "constellation-system", "rollout", "status", "daemonset/constellation-relay", "--timeout=110s")
	a.run(time.Minute, "adopt", "--operator", "--yes").want(plan.ExitNothing)
	// Hardening is added by name, and taken out again.
	for _, list := range []string{"[kubelet-pods, control-plane-label, machine-configuration]", "[]"} {
		a.setHardening(list)
		a.run(3*time.Minute, "adopt", "--operator", "--yes").want(plan.ExitDone)
		policies := kubectl("get", "validatingadmissionpolicies", "-o", "name")
		for _, name := range []string{"constellation-pods-kubelets", "constellation-nodes-control-plane", "constellation-machine-configuration"} {
			if strings.Contains(policies, name) != (list != "[]") {
				t.Errorf("with hardening %s there are the policies\n%s", list, policies)
			}
		}
	}
	for m, was := range kubelets {
		if is := started(m); is != was {
			t.Errorf("the kubelet of %s was restarted", m)
		}
	}
	a.run(time.Minute, "init", "--yes").want(plan.ExitUsage)
	if out := a.run(time.Minute, "upgrade", "check", "--kubernetes", to).want(plan.ExitDone).stdout; !strings.Contains(out, "in place") || strings.Contains(out, "replaces") {
		t.Errorf("upgrade check:\n%s", out)
	}

	var users *load
	cut := "" // the machine that loses power; it has no pods then, and its own clients do not count
	if workers > 1 {
		users = c.startLoad()
	}
	for hop, kubernetes := range hops {
		ready()
		begin := time.Now()
		if hop == 0 { // the console is killed, and the cluster goes on
			a.killedAt(`"step":"`+plan.StepRollout+`"`, "upgrade", "apply", "--kubernetes", to)
		} else if controlPlanes > 2 && hop == len(hops)-1 {
			cut = "control-plane-1"
			c.losesPowerInUpgrade(cut)
		}
		a.run(20*time.Minute, "upgrade", "apply", "--kubernetes", to, "--yes").want(plan.ExitDone)
		t.Logf("hop %d: %s", hop+1, time.Since(begin).Round(time.Second))
		// Workers may stay until the last hop: their kubelets may be two minors older.
		nodes := all
		if hop < len(hops)-1 {
			nodes = machineNames(controlPlanes, 0)
		}
		for _, n := range nodes {
			if is := kubectl("get", "node", n, "-o", "jsonpath={.status.nodeInfo.kubeletVersion}"); is != kubernetes {
				t.Fatalf("the kubelet of %s runs %s, want %s", n, is, kubernetes)
			}
		}
	}
	if users != nil {
		failed := slices.DeleteFunc(users.end(), func(r request) bool { return r.err == nil || r.machine == cut })
		for _, r := range failed {
			t.Errorf("a request failed: %s", r)
		}
		t.Logf("%d requests, %d failed", len(users.asked), len(failed))
	}
	a.wantNodes(all...)

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
	for _, m := range machineNames(controlPlanes, 0) {
		if out, code := c.asRoot(m, "KUBECONFIG=/etc/kubernetes/admin.conf kubeadm upgrade plan --ignore-preflight-errors=all 2>&1"); code != 0 || !strings.Contains(out, "Cluster version: "+strings.TrimPrefix(to, "v")) {
			t.Errorf("kubeadm upgrade plan on %s: exit %d\n%s", m, code, out)
		}
	}
}

// losesPowerInUpgrade cuts the power of a control plane when its kubeadm has replaced the API server, and leaves what a power
// cut can leave of files without a sync: an empty certificate, and one without its key.
func (c *cloud) losesPowerInUpgrade(machine string) {
	var wg sync.WaitGroup
	c.t.Cleanup(wg.Wait)
	run := func(args ...string) bool {
		out, err := c.command(c.t.Context(), args...).CombinedOutput()
		if err != nil && c.t.Context().Err() == nil {
			c.t.Errorf("constellation %s: %v\n%s", strings.Join(args, " "), err, out)
		}
		return err == nil
	}
	wg.Go(func() {
		const script = `until ls /etc/kubernetes/tmp/kubeadm-backup-manifests-*/kube-apiserver.yaml; do read -t 0.1 <> <(:) || :; done
: >/etc/kubernetes/pki/etcd/peer.crt; cp /etc/kubernetes/pki/front-proxy-client.key /etc/kubernetes/pki/apiserver.key`
		_ = run("sandbox", "shell", machine, "--", "bash", "-c", script) && run("sandbox", "machine", "power-cut", machine)
	})
}

// killedAt runs a command and kills it when an event contains a text.
func (c *cloud) killedAt(text string, args ...string) {
	c.t.Helper()
	cmd := c.command(c.t.Context(), append(args, "--yes", "-o", "json")...)
	events, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		c.t.Fatal(err)
	}
	seen := false
	for lines := bufio.NewScanner(events); !seen && lines.Scan(); {
		seen = strings.Contains(lines.Text(), text)
	}
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	if !seen {
		c.t.Fatalf("constellation %s: no event has %s", strings.Join(args, " "), text)
	}
}

// addComponents adds the components of versions, as the cloud serves them, to the configuration of an adopted cluster.
func (c *cloud) addComponents(versions ...string) {
	c.t.Helper()
	c.edit("nodeGroups:", c.componentRows(versions...)+"nodeGroups:")
}

// componentRows is a table of the components of versions, as the cloud serves them.
func (c *cloud) componentRows(versions ...string) string {
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
	return rows.String()
}

// setHardening writes the list of policies of an adopted cluster into the configuration.
func (c *cloud) setHardening(list string) {
	c.t.Helper()
	path := filepath.Join(c.dir, "constellation-conf.yaml")
	b, err := os.ReadFile(path)
	if err != nil {
		c.t.Fatal(err)
	}
	const key = "    hardening: "
	var lines []string
	for line := range strings.Lines(string(b)) {
		if strings.HasPrefix(line, key) {
			continue
		}
		if lines = append(lines, line); line == "  machines:\n" {
			lines = append(lines, key+list+"\n")
		}
	}
	if err := os.WriteFile(path, []byte(strings.Join(lines, "")), 0o644); err != nil {
		c.t.Fatal(err)
	}
}

// plainKubeadm takes everything of ours off the machines, installs kubeadm, kubelet and kubectl where Kubernetes' packages
// install them, with their units, and creates a cluster of these control planes and workers behind the cloud's load balancer.
// It returns the path of the administrator's kubeconfig.
func (c *cloud) plainKubeadm(version string, controlPlanes, workers int) (kubeconfig string) {
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
	for _, m := range machineNames(controlPlanes, workers) {
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
	join := strings.TrimSpace(do("control-plane-0", "kubeadm token create --print-join-command", nil)) + " --ignore-preflight-errors=SystemVerification,Swap,Mem,NumCPU"
	if controlPlanes > 1 {
		key := strings.Fields(do("control-plane-0", "kubeadm init phase upload-certs --upload-certs --config /root/init.yaml", nil))
		for i := 1; i < controlPlanes; i++ {
			do(fmt.Sprintf("control-plane-%d", i), join+" --control-plane --certificate-key "+key[len(key)-1], nil)
		}
	}
	for i := range workers {
		do(fmt.Sprintf("worker-%d", i), join, nil)
	}

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

// machineNames are the names of the first machines of a sandbox.
func machineNames(controlPlanes, workers int) (out []string) {
	for i := range controlPlanes {
		out = append(out, fmt.Sprintf("control-plane-%d", i))
	}
	for i := range workers {
		out = append(out, fmt.Sprintf("worker-%d", i))
	}
	return out
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
