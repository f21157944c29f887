package main

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"constellation/engine/plan"
	"constellation/internal/testneeds"
)

// upgradeConfig is the kubeadm configuration for control planes and workers.
const upgradeConfig = `apiVersion: kubeadm.k8s.io/v1beta4
kind: UpgradeConfiguration
apply:
  kubernetesVersion: ` + next + `
  imagePullPolicy: IfNotPresent
  ignorePreflightErrors: [SystemVerification, Swap, Mem, NumCPU]
node:
  imagePullPolicy: IfNotPresent
  ignorePreflightErrors: [SystemVerification, Swap, Mem, NumCPU]
`

// Machines and images of a sandbox work with `kubeadm upgrade`. Regression test: kube-proxy
// starts with the rules of its predecessor, and used to break every second time without an
// error. The test therefore requests an older Service from every machine after the upgrade
// and after more restarts.
//
// It takes five minutes and needs a second Kubernetes in the cache, so it is opt-in:
//
//	CONSTELLATION_E2E_UPGRADE=1 go test -run TestKubeadmUpgrades .
func TestKubeadmUpgradesMachinesOfASandbox(t *testing.T) {
	testneeds.OptIn(t, "CONSTELLATION_E2E_UPGRADE", "five minutes")
	withNext(t)
	const from, to = current, next
	c := newCloud(t, 1, 1, "--kubernetes", from)
	c.run(10*time.Minute, "init", "--non-interactive", "--yes").want(plan.ExitDone)
	machines := []string{"control-plane-0", "worker-0"}
	c.wantVIP(machines...)

	inside := func(machine, script string) {
		t.Helper()
		c.run(10*time.Minute, "sandbox", "shell", machine, "--", "bash", "-ec", script).want(0)
	}
	install := func(machine, name string) {
		t.Helper()
		inside(machine, fmt.Sprintf(`exec 3<>/dev/tcp/10.42.0.1/8080
printf 'GET /kubernetes/%[1]s/%[2]s HTTP/1.0\r\nHost: mirror\r\n\r\n' >&3
sed '1,/^\r$/d' <&3 >/usr/local/bin/.%[2]s && chmod 755 /usr/local/bin/.%[2]s && mv /usr/local/bin/.%[2]s /usr/local/bin/%[2]s`, to, name))
	}
	for n, m := range machines {
		verb := "apply --yes"
		if n > 0 {
			verb = "node"
		}
		install(m, "kubeadm")
		inside(m, "cat >/root/upgrade.yaml <<'END'\n"+upgradeConfig+"END\nkubeadm upgrade "+verb+" --config /root/upgrade.yaml")
		install(m, "kubelet")
		inside(m, "grep -qx 'serverTLSBootstrap: true' /var/lib/kubelet/config.yaml") // kubeadm rewrote it
		inside(m, "systemctl restart kubelet")
		c.kubectl("wait", "node/"+m, "--for=jsonpath={.status.nodeInfo.kubeletVersion}="+to, "--timeout=110s")
	}
	c.kubectl("wait", "nodes", "--all", "--for=condition=Ready", "--timeout=110s")
	c.wantNodes(machines...)

	proxies := func() {
		t.Helper()
		c.kubectl("-n", "kube-system", "rollout", "status", "daemonset/kube-proxy", "--timeout=110s")
		c.wantAnswer(machines...)
	}
	proxies()
	images := c.kubectl("-n", "kube-system", "get", "pods", "-o", "jsonpath={.items[*].spec.containers[*].image}")
	if !strings.Contains(images, "/kube-proxy:"+to) || strings.Contains(images, ":"+from) {
		t.Errorf("the cluster runs images other than those of %s: %s", to, images)
	}
	for range 2 {
		c.kubectl("-n", "kube-system", "rollout", "restart", "daemonset/kube-proxy")
		proxies()
	}
}
