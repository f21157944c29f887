package main

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/pem"
	"fmt"
	"strings"
	"time"

	"constellation/engine/plan"
)

// rootOnAWorkerGetsNoOtherIdentity acts as root on one of two workers of real machines. Its kubelet's
// credentials, static pods, network position and a reboot yield no other identity. `machine revoke
// --replace` then removes it while users send requests to a service of four replicas.
func (c *cloud) rootOnAWorkerGetsNoOtherIdentity(captured, controlPlane, other string) {
	t := c.t
	t.Helper()
	l := c.startLoad()
	c.staysItself(captured, controlPlane)
	c.kubectl("wait", "node/"+captured, "--for=condition=Ready=Unknown", "--timeout=110s")
	began := time.Now()
	c.revokesACapturedWorker(captured)
	answered, failed := 0, 0
	for _, r := range l.end() {
		switch {
		case r.begun.Before(began) || r.machine != controlPlane && r.machine != other:
		case r.err == nil:
			answered++
		default:
			failed++
			t.Logf("failed during the revocation: %s", r)
		}
	}
	t.Logf("during the revocation %d requests were answered and %d failed", answered, failed)
	// The machine goes without a drain: until its endpoints are removed, the Service still sends some requests to its pods.
	if answered == 0 || failed*20 > answered {
		t.Errorf("during the revocation %d requests were answered and %d failed, want at most 5 %% of them", answered, failed)
	}
}

// asRoot runs a script as root in a machine and returns what it printed and its exit code.
func (c *cloud) asRoot(machine, script string, args ...string) (string, int) {
	c.t.Helper()
	r := c.run(2*time.Minute, append([]string{"sandbox", "shell", machine, "--", "bash", "-c", script, "bash"}, args...)...)
	return r.stdout + r.stderr, r.code
}

// worksWithKubelet are commands for the kubeconfig of a worker's own kubelet that the cluster must
// deny. $W is the worker, $CP a control plane.
var worksWithKubelet = []string{
	"label node $W node-role.kubernetes.io/control-plane=",
	"annotate node $W constellation.edgeless.systems/obsolete=true",
	"annotate --overwrite node $W constellation.edgeless.systems/kubernetes-components=x",
	"label --overwrite node $W constellation.edgeless.systems/in-place=no",
	`patch node $W -p '{"spec":{"unschedulable":true}}'`,
	`patch node $W -p '{"spec":{"providerID":"sandbox://x/control-plane-0"}}'`,
	"annotate node $CP x=y",
	"delete node $CP",
	"-n kube-system get secrets",
	"-n constellation-system create token constellation-operator",
	"-n constellation-system create token joinservice",
	"get --raw /api/v1/nodes/$CP/proxy/pods",
	`patch nodeversion constellation-version --type merge -p '{"spec":{"imageVersion":"v9.9.9"}}'`,
	`-n kube-system patch configmap join-config --type merge -p '{"data":{"a":"b"}}'`,
	"create clusterrolebinding x --clusterrole=cluster-admin --user=system:node:$W",
}

// staysItself acts as root on a worker of real machines. Its kubelet's credentials, its position in
// the network, a static pod, and a reboot as a machine that has never joined yield no other identity.
func (c *cloud) staysItself(worker, controlPlane string) {
	t := c.t
	t.Helper()
	for _, command := range worksWithKubelet {
		out, code := c.asRoot(worker, `W=$1 CP=$2; set -f; exec kubectl --kubeconfig /etc/kubernetes/kubelet.conf `+command, worker, controlPlane)
		if refused := strings.Contains(out, "Forbidden") || strings.Contains(out, "forbidden") || strings.Contains(out, "denied request") || strings.Contains(out, "cannot be modified once set"); code == 0 || !refused {
			t.Errorf("kubelet of %s: kubectl %s: exit %d\n%s", worker, command, code, out)
		}
	}

	// Another node's identity.
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{Subject: pkix.Name{CommonName: "system:node:" + controlPlane, Organization: []string{"system:nodes"}}}, key)
	if err != nil {
		t.Fatal(err)
	}
	csr := base64.StdEncoding.EncodeToString(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der}))
	if out, code := c.asRoot(worker, `kubectl --kubeconfig /etc/kubernetes/kubelet.conf create -f - <<END
{"apiVersion": "certificates.k8s.io/v1", "kind": "CertificateSigningRequest", "metadata": {"name": "captured"},
 "spec": {"request": "`+csr+`", "signerName": "kubernetes.io/kube-apiserver-client-kubelet", "usages": ["digital signature", "client auth"]}}
END`); code == 0 || !strings.Contains(out, "forbidden") {
		t.Errorf("kubelet of %s requests the certificate of %s: exit %d: %s", worker, controlPlane, code, out)
	}
	// kubeadm init creates a token of a group without rights, which expires a minute later.
	tokens := c.kubectl("-n", "kube-system", "get", "secrets", "--field-selector", "type=bootstrap.kubernetes.io/token", "-o", `jsonpath={range .items[*]}{.metadata.name} {.data.auth-extra-groups}{"\n"}{end}`)
	for token := range strings.Lines(tokens) {
		name, encoded, _ := strings.Cut(strings.TrimSpace(token), " ")
		if groups, err := base64.StdEncoding.DecodeString(encoded); err != nil || string(groups) != "system:bootstrappers:nobody" {
			t.Errorf("bootstrap token %s of groups %q is left (%v)", name, groups, err)
		}
	}

	// A control plane's address, and the hardware address that belongs to it.
	address := strings.TrimSpace(c.kubectl("get", "node", controlPlane, "-o", `jsonpath={.status.addresses[?(@.type=="InternalIP")].address}`))
	out, _ := c.asRoot(worker, `A=$1; old=$(cat /sys/class/net/eth0/address); IFS=. read -r a b c d <<<"$A"
ask() { exec 3<>/dev/tcp/169.254.169.254/80 || return 1; printf 'GET /v1/token HTTP/1.0\r\nHost: 169.254.169.254\r\n\r\n' >&3; timeout 2 cat <&3; }
ask | tail -n 1 # as itself
ip addr add $A/32 dev eth0; ip link set eth0 address $(printf '02:42:%02x:%02x:%02x:%02x' $a $b $c $d)
ip route replace default via 10.42.0.1; ip route replace 169.254.169.254/32 via 10.42.0.1 src $A
for i in 1 2; do timeout 3 bash -c "$(declare -f ask); ask" | tail -n 1; done
ip route del 169.254.169.254/32 via 10.42.0.1; ip link set eth0 address $old; ip addr del $A/32 dev eth0; ip route replace default via 10.42.0.1`, address)
	if strings.Contains(out, `"token"`) || !strings.Contains(out, "only control planes get the token") {
		t.Errorf("the cloud answered %s at the address of %s: %s", worker, controlPlane, out)
	}

	// Static pods: the kubelet runs them, and the API server refuses their mirror pods.
	for _, pod := range []struct{ namespace, name, label, refused string }{
		{namespace: "constellation-system", name: "constellation-operator", label: `"app.kubernetes.io/name": "constellation-operator"`, refused: "there are no mirror pods in this namespace"},
		{namespace: "kube-system", name: "dns", label: `"k8s-app": "kube-dns"`, refused: "mirror pods of kube-system have the labels of control planes and no others"},
	} {
		mirror := pod.namespace + "/" + pod.name + "-" + worker
		// A kubelet parses a manifest that begins with a brace as JSON, never as YAML.
		out, code := c.asRoot(worker, `mkdir -p /etc/kubernetes/manifests && cat >/etc/kubernetes/manifests/impostor.yaml <<END
{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "`+pod.name+`", "namespace": "`+pod.namespace+`", "labels": {`+pod.label+`}},
 "spec": {"containers": [{"name": "impostor", "image": "`+agnhost+`", "command": ["/agnhost", "pause"]}]}}
END
for i in $(seq 60); do
  if journalctl -u kubelet --since -5min | grep -F "Failed creating a mirror pod" | grep -F "pod=\"$1\"" | grep -qF "$2"; then rm /etc/kubernetes/manifests/impostor.yaml; exit 0; fi
  read -t 1 <> <(:) || :
done
journalctl -u kubelet --since -2min | grep -e impostor -e "$1"; exit 1`, mirror, pod.refused)
		if code != 0 {
			t.Errorf("the kubelet's journal has no refusal of mirror pod %s:\n%s", mirror, tail(out))
		}
		if pods := c.kubectl("-n", pod.namespace, "get", "pods", "--field-selector", "spec.nodeName="+worker, "-o", "name"); strings.Contains(pods, "pod/"+pod.name) {
			t.Errorf("mirror pods in %s on %s: %s", pod.namespace, worker, pods)
		}
	}

	// A reboot as a machine that has never joined, by its TPM and its disk.
	uid := c.kubectl("get", "node", worker, "-o", "jsonpath={.metadata.uid}")
	if out, code := c.asRoot(worker, "systemctl stop constellation-bootstrapper; set -a; . /etc/constellation/environment; /usr/lib/constellation/bootstrapper reset"); code != 0 {
		t.Errorf("reset of %s: exit %d: %s", worker, code, out)
	}
	c.run(2*time.Minute, "sandbox", "machine", "reboot", worker).want(plan.ExitDone)
	refused := fmt.Sprintf(`"node":%q`, worker)
	var logs string
	for deadline := time.Now().Add(2 * time.Minute); ; time.Sleep(time.Second) {
		logs = c.kubectl("-n", "constellation-system", "logs", "daemonset/joinservice", "--since=5m")
		found := false
		for line := range strings.Lines(logs) {
			found = found || strings.Contains(line, "join ticket refused") && strings.Contains(line, refused) && strings.Contains(line, "a Node of this name exists already")
		}
		if found {
			break
		}
		if time.Now().After(deadline) {
			t.Errorf("%s did not request a ticket, or was not refused:\n%s", worker, tail(logs))
			break
		}
	}
	if now := c.kubectl("get", "node", worker, "-o", "jsonpath={.metadata.uid}"); now != uid {
		t.Errorf("Node %s was replaced", worker)
	}
}

// revokesACapturedWorker revokes and replaces a worker of real machines while users send requests
// to a service.
func (c *cloud) revokesACapturedWorker(worker string) {
	t := c.t
	t.Helper()
	before := time.Now()
	events := c.run(5*time.Minute, "machine", "revoke", worker, "--replace", "--reason", "captured", "--non-interactive", "--yes", "-o", "json").want(plan.ExitDone).events()
	t.Logf("revoked and replaced in %v: %s", time.Since(before).Round(100*time.Millisecond), events[len(events)-1].Text)
	nodes := strings.Fields(c.kubectl("get", "nodes", "-o", "jsonpath={.items[*].metadata.name}"))
	if len(nodes) != 3 || strings.Contains(strings.Join(nodes, " "), worker) {
		t.Errorf("nodes %v, want three without %s", nodes, worker)
	}
	c.wantNodes(nodes...)
	c.wantAnswer(nodes...)
}
