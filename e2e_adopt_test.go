package main

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"gopkg.in/yaml.v3"

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
	c.plainKubeadm(build.DefaultVersion)
	a := &cloud{t: t, bin: c.bin, dir: t.TempDir()}
	admin, code := c.asRoot("control-plane-0", "cat /etc/kubernetes/admin.conf")
	if code != 0 {
		t.Fatal(admin)
	}
	endpoint := c.endpoint()
	kubeconfig := filepath.Join(t.TempDir(), "admin.conf")
	if err := os.WriteFile(kubeconfig, []byte(regexp.MustCompile(`server: .*`).ReplaceAllString(admin, "server: https://"+endpoint)), 0o600); err != nil {
		t.Fatal(err)
	}
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
		deadline := time.Now().Add(time.Minute)
		for { // leaders have to be elected again after a hop of the only control plane
			r := a.run(10*time.Minute, "upgrade", "apply", "--kubernetes", to, "--yes")
			if r.code == plan.ExitBlocked && time.Now().Before(deadline) {
				time.Sleep(5 * time.Second)
				continue
			}
			r.want(plan.ExitDone)
			break
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

// endpoint is host:port of the load balancer to the API servers.
func (c *cloud) endpoint() string {
	c.t.Helper()
	var state struct {
		Infrastructure struct {
			ClusterEndpoint string `yaml:"clusterEndpoint"`
		} `yaml:"infrastructure"`
	}
	b, err := os.ReadFile(filepath.Join(c.dir, "constellation-state.yaml"))
	if err == nil {
		err = yaml.Unmarshal(b, &state)
	}
	if err != nil {
		c.t.Fatal(err)
	}
	return state.Infrastructure.ClusterEndpoint
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

// plainKubeadm takes everything of ours off the machines, installs kubeadm, kubelet and kubectl where Kubernetes' packages
// install them, with their units, and creates a cluster.
func (c *cloud) plainKubeadm(version string) {
	t := c.t
	t.Helper()
	do := func(machine, script string, stdin []byte) string {
		t.Helper()
		cmd := c.command(t.Context(), "sandbox", "shell", machine, "--", "bash", "-c", script)
		cmd.Stdin = strings.NewReader(string(stdin))
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("%s: %v\n%s", machine, err, out)
		}
		return string(out)
	}
	for _, m := range []string{"control-plane-0", "worker-0"} {
		do(m, `systemctl disable --now constellation-bootstrapper constellation-agent 2>/dev/null
rm -rf /usr/lib/constellation/{agent,bootstrapper,release-keys.pem,peers.json} /etc/constellation /run/constellation-agent /var/lib/constellation /lib/systemd/system/constellation-* /lib/systemd/system/kubelet.service*`, nil)
		for _, name := range []string{"kubeadm", "kubelet", "kubectl"} {
			b, err := os.ReadFile(filepath.Join(testneeds.Kubernetes(t, version), name))
			if err != nil {
				t.Fatal(err)
			}
			do(m, "cat >/usr/bin/"+name+" && chmod 755 /usr/bin/"+name, b)
		}
		do(m, "cat >/lib/systemd/system/kubelet.service", []byte("[Unit]\nDescription=kubelet\n[Service]\nExecStart=/usr/bin/kubelet\nRestart=always\nRestartSec=1s\nKillMode=process\n[Install]\nWantedBy=multi-user.target\n"))
		do(m, "mkdir -p /lib/systemd/system/kubelet.service.d && cat >/lib/systemd/system/kubelet.service.d/10-kubeadm.conf && systemctl daemon-reload && systemctl enable kubelet", []byte(`[Service]
Environment="KUBELET_KUBECONFIG_ARGS=--bootstrap-kubeconfig=/etc/kubernetes/bootstrap-kubelet.conf --kubeconfig=/etc/kubernetes/kubelet.conf"
Environment="KUBELET_CONFIG_ARGS=--config=/var/lib/kubelet/config.yaml --config-dir=/usr/lib/constellation/kubelet.conf.d"
EnvironmentFile=-/var/lib/kubelet/kubeadm-flags.env
EnvironmentFile=-/etc/default/kubelet
ExecStart=
ExecStart=/usr/bin/kubelet $KUBELET_KUBECONFIG_ARGS $KUBELET_CONFIG_ARGS $KUBELET_KUBEADM_ARGS $KUBELET_EXTRA_ARGS
`))
	}
	do("control-plane-0", "cat >/root/kubeadm.yaml", []byte(`apiVersion: kubeadm.k8s.io/v1beta4
kind: InitConfiguration
nodeRegistration: {ignorePreflightErrors: [all]}
---
apiVersion: kubeadm.k8s.io/v1beta4
kind: ClusterConfiguration
kubernetesVersion: `+version+`
controlPlaneEndpoint: 10.42.0.1:6443
networking: {podSubnet: 10.244.0.0/16}
apiServer: {certSANs: [127.0.0.1]}
controllerManager: {extraArgs: [{name: allocate-node-cidrs, value: "false"}]}
---
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
failCgroupV1: false
failSwapOn: false
cgroupDriver: systemd
---
apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: nftables
conntrack: {maxPerCore: 0, min: 0, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 0s}
`))
	do("control-plane-0", "kubeadm init --config /root/kubeadm.yaml 2>&1", nil)
	join := regexp.MustCompile(`kubeadm join .*`).FindString(do("control-plane-0", "kubeadm token create --print-join-command", nil))
	do("worker-0", strings.TrimSpace(join)+" --ignore-preflight-errors=all 2>&1", nil)
}
