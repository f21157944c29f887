package main

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"constellation/engine/plan"
	"constellation/engine/sandbox/recorder"
	"constellation/internal/testneeds"
)

// olderCommit is the newest commit whose clusters have no admission policies, no signed
// components and kubeadm's auto-approval of bootstrap tokens.
const olderCommit = "aa0efa06175ffbe2551c8ee29d1fe58c83722a7d"

// olderKubernetes and olderNext are the versions before and after the upgrades of such clusters: the
// newest minor that olderCommit starts with, and the next one.
const olderKubernetes, olderNext = "v1.35.4", "v1.36.4"

// kubeadmTokens is the group of the bootstrap tokens of such clusters.
const kubeadmTokens = "system:bootstrappers:kubeadm:default-node-token"

// newOlderCluster makes a cluster of one control plane and two workers with the console and the
// daemons of olderCommit. The sandbox is of this build: it serves the daemons of olderCommit as
// release and image v1.0.0, and those of this build as v1.1.0.
func newOlderCluster(t *testing.T) *cloud {
	t.Helper()
	testneeds.OptIn(t, "CONSTELLATION_E2E_ROLLOUT", "ten minutes")
	testneeds.Kubernetes(t, olderKubernetes)
	testneeds.Kubernetes(t, olderNext)
	if out, err := exec.CommandContext(t.Context(), "git", "cat-file", "-e", olderCommit+"^{commit}").CombinedOutput(); err != nil {
		t.Skipf("commit %s is not in the history of this clone: %v %s", olderCommit, err, out)
	}
	c := newReal(t)
	sh := func(dir, script string, args ...string) {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), "bash", append([]string{"-euo", "pipefail", "-c", script, "bash"}, args...)...)
		cmd.Dir, cmd.Env = dir, append(os.Environ(), "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%s: %v\n%s", script, err, tail(string(out)))
		}
	}
	source, mixed := t.TempDir(), t.TempDir()
	sh(".", `git archive "$1" | tar -x -C "$2"`, olderCommit, source)
	build := `go build -trimpath -buildvcs=false -ldflags "-s -w -X constellation/engine/version.Release=$1" `
	sh(source, build+`-o bin/constellation .`, "v1.1.0")
	for _, daemon := range []string{"bootstrapper", "agent", "joinservice", "operator"} {
		sh(source, build+`-o "bin/releases/v1.0.0/$2" "./$2/cmd"`, "v1.0.0", daemon)
	}
	sh(mixed, `cp "$1/constellation" "$1/constellation-sandbox" "$1/kubectl" . && mkdir releases && cp -r "$1/releases/v1.1.0" releases/ && cp -r "$2/bin/releases/v1.0.0" releases/`, c.bin, source)
	c.bin = mixed
	c.up(1, 2, "--release", "v1.0.0", "--image", "v1.0.0", "--kubernetes", olderKubernetes)
	older := *c
	older.bin = filepath.Join(source, "bin")
	older.run(8*time.Minute, "init", "--non-interactive", "--yes").want(plan.ExitDone)
	if found, err := c.escalations(t.Context(), kubeadmTokens); err != nil || len(found) == 0 {
		t.Errorf("a cluster of %.7s: %d attempts to escalate succeed, want some (%v)", olderCommit, len(found), err)
	} else {
		t.Logf("before: %d attempts to escalate succeed", len(found))
	}
	return c
}

// wantProtected fails the test if an attempt to escalate succeeds, with tokens of either group, or
// if kubeadm's binding exists.
func (c *cloud) wantProtected(when string) {
	c.t.Helper()
	c.wantGuarded(when)
	found, err := c.escalations(c.t.Context(), kubeadmTokens)
	if err != nil {
		c.t.Errorf("attempts to escalate with kubeadm's tokens %s: %v", when, err)
	}
	for _, f := range found {
		c.t.Errorf("%s, with kubeadm's tokens: %s", when, f)
	}
	c.wantNoAutoApproval()
}

// wantImages fails the test unless the nodes are these: their role and their image, sorted.
func (c *cloud) wantImages(want ...string) {
	c.t.Helper()
	var got []string
	for _, n := range c.status().Nodes {
		_, version, _ := strings.Cut(n.Image, "/images/")
		got = append(got, fmt.Sprintf("%s %s", n.Role, version))
	}
	if slices.Sort(got); !slices.Equal(got, want) {
		c.t.Errorf("nodes have the images %v, want %v", got, want)
	}
}

// wantAnswered ends the load. Requests may fail at machines that join or leave, but not at machines
// that exist from the beginning to the end.
func (c *cloud) wantAnswered(l *load, stay ...string) {
	t := c.t
	t.Helper()
	all := l.end()
	answered, failed, elsewhere := 0, 0, 0
	for _, r := range all {
		switch {
		case r.err == nil:
			answered++
		case slices.Contains(stay, r.machine):
			failed++
			t.Logf("failed: %s", r)
		default:
			elsewhere++
		}
	}
	t.Logf("%d requests were answered; %d failed at %v, %d at machines that came or went", answered, failed, stay, elsewhere)
	if answered < 1000 || failed*500 > answered {
		t.Errorf("%d requests were answered and %d failed at %v, want at least 1000, and one failure in 500 at most", answered, failed, stay)
	}
}

// renews gives a node's kubelet a client certificate and a serving certificate with 5 % of their
// lifetime left. The kubelet must renew both by itself.
func (c *cloud) renews(node, controlPlane string) {
	t := c.t
	t.Helper()
	ca, code := c.asRoot(controlPlane, "cat /etc/kubernetes/pki/ca.crt /etc/kubernetes/pki/ca.key")
	if code != 0 {
		t.Fatalf("read the certificate authority on %s: exit %d, nodes %s", controlPlane, code, c.kubectl("get", "nodes", "-o", "name"))
	}
	pair, err := tls.X509KeyPair([]byte(ca), []byte(ca))
	if err != nil {
		t.Fatal(err)
	}
	issuer, err := x509.ParseCertificate(pair.Certificate[0])
	if err != nil {
		t.Fatal(err)
	}
	address := strings.TrimSpace(c.kubectl("get", "node", node, "-o", `jsonpath={.status.addresses[?(@.type=="InternalIP")].address}`))
	began := time.Now()
	script := "cd /var/lib/kubelet/pki\n"
	for file, usage := range map[string]x509.ExtKeyUsage{"kubelet-client": x509.ExtKeyUsageClientAuth, "kubelet-server": x509.ExtKeyUsageServerAuth} {
		key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		if err != nil {
			t.Fatal(err)
		}
		der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{
			SerialNumber: big.NewInt(began.UnixNano()),
			Subject:      pkix.Name{CommonName: "system:node:" + node, Organization: []string{"system:nodes"}},
			NotBefore:    began.Add(-95 * time.Minute), NotAfter: began.Add(5 * time.Minute),
			KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{usage},
			DNSNames: []string{node}, IPAddresses: []net.IP{net.ParseIP(address)},
		}, issuer, key.Public(), pair.PrivateKey)
		if err != nil {
			t.Fatal(err)
		}
		private, err := x509.MarshalECPrivateKey(key)
		if err != nil {
			t.Fatal(err)
		}
		old := string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})) + string(pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: private}))
		script += fmt.Sprintf("umask 077; cat >%[1]s-ending.pem <<'END'\n%[2]sEND\nln -sfn %[1]s-ending.pem %[1]s-current.pem\n", file, old)
	}
	c.shell(time.Minute, node, strings.NewReader(script+"systemctl restart kubelet\n"), "bash -es")
	for _, file := range []string{"kubelet-client", "kubelet-server"} {
		var life time.Duration
		for deadline := time.Now().Add(2 * time.Minute); ; time.Sleep(500 * time.Millisecond) {
			out, _ := c.asRoot(node, "cat /var/lib/kubelet/pki/"+file+"-current.pem")
			if block, _ := pem.Decode([]byte(out)); block != nil {
				if cert, err := x509.ParseCertificate(block.Bytes); err == nil && cert.NotAfter.After(began.Add(time.Hour)) {
					life = cert.NotAfter.Sub(cert.NotBefore)
					break
				}
			}
			if time.Now().After(deadline) {
				t.Errorf("%s did not renew its %s certificate:\n%s", node, file, c.kubectl("get", "certificatesigningrequests"))
				break
			}
		}
		t.Logf("%s renewed its %s certificate within %v, for %v", node, file, time.Since(began).Round(100*time.Millisecond), life)
		if most := 15 * 24 * time.Hour; life > most {
			t.Errorf("the %s certificate of %s lives for %v, want %v at most", file, node, life, most)
		}
	}
	c.kubectl("get", "--raw", "/api/v1/nodes/"+node+"/proxy/healthz") // by the new serving certificate
	c.kubectl("wait", "node/"+node, "--for=condition=Ready", "--timeout=60s")
}

// TestUpgradeFromAnOlderProgramInPlace brings a cluster that olderCommit made to this build in two
// hops. The first replaces the control plane by a machine of the new image, and the console has the
// new API server encrypt Secrets. The second upgrades Kubernetes: the control plane by its agent and a
// new machine, which gets its keys with its ticket, and the workers in place. The agents of
// olderCommit install the verifying agent there first. At last the workers are replaced.
//
//	CONSTELLATION_E2E_ROLLOUT=1 go test -timeout 60m -run TestUpgradeFromAnOlderProgram .
func TestUpgradeFromAnOlderProgramInPlace(t *testing.T) {
	c := newOlderCluster(t)
	l := c.startLoad()
	c.run(time.Minute, "upgrade", "check", "--write-config", "--to", "v1.1.0", "--kubernetes", olderKubernetes).want(plan.ExitDone)
	c.edit("# keepWorkers: false\n", "keepWorkers: true\n")
	c.applies(olderKubernetes, 1)
	c.wantProtected("between two hops")
	c.wantState("encryptsSecrets: true") // the new control plane brought the encryption
	c.wantStored("encrypted", true)
	c.wantImages("control-plane v1.1.0", "worker v1.0.0", "worker v1.0.0")

	c.kubectl("patch", "scalinggroup", "workers", "--type=merge", "-p", `{"spec":{"strategy":"InPlace"}}`)
	workers := func() string {
		return c.kubectl("get", "nodes", "-l", "!node-role.kubernetes.io/control-plane", "-o", `jsonpath={range .items[*]}{.metadata.name} {.metadata.uid} {.spec.unschedulable}{"\n"}{end}`)
	}
	stayed := workers()
	c.run(time.Minute, "upgrade", "check", "--write-config", "--to", "v1.1.0", "--kubernetes", olderNext).want(plan.ExitDone)
	guarded := c.guarded()
	c.applies(olderNext, 3)
	guarded()
	c.wantAnswered(l, "worker-0", "worker-1")
	c.wantProtected("after the last hop")
	c.wantStored("upgraded", true)
	c.wantImages("control-plane v1.1.0", "worker v1.0.0", "worker v1.0.0")
	if now := workers(); now != stayed {
		t.Errorf("workers are\n%s\nwant unchanged\n%s", now, stayed)
	}
	for _, worker := range []string{"worker-0", "worker-1"} {
		if out, code := c.asRoot(worker, "grep -c 'BEGIN PUBLIC KEY' /usr/lib/constellation/release-keys.pem"); code != 0 {
			t.Errorf("%s has no release keys after its upgrade in place: %s", worker, out)
		}
	}
	if out := c.run(time.Minute, "status", "-o", "json").stdout; strings.Contains(out, "agents-unverified") {
		t.Errorf("status still reports agents that do not verify statements: %s", out)
	}
	// A control plane that is not upgraded in place is replaced for new components.
	c.renews("worker-0", "control-plane-2")
	c.renews("control-plane-2", "control-plane-2")

	c.kubectl("patch", "scalinggroup", "workers", "--type=merge", "-p", `{"spec":{"strategy":"Replace"}}`)
	nodes := []string{"control-plane-2", "worker-2", "worker-3"}
	c.eventually(6*time.Minute, "the workers are replaced", func(out string) bool {
		names := strings.Fields(out)
		slices.Sort(names)
		return slices.Equal(names, nodes)
	}, "get", "nodes", "-o", "jsonpath={.items[*].metadata.name}")
	c.wantImages("control-plane v1.1.0", "worker v1.1.0", "worker v1.1.0")
	c.wantNodes(nodes...)
	c.wantAnswer(nodes...)
	c.wantProtected("after the workers were replaced")
}

// TestUpgradeFromAnOlderProgramReplaces brings a cluster that olderCommit made to this build in one
// hop: its agent upgrades Kubernetes, and all machines are replaced by those of the new image.
func TestUpgradeFromAnOlderProgramReplaces(t *testing.T) {
	c := newOlderCluster(t)
	l := c.startLoad()
	r := c.record()
	r.Begin()
	target := []string{"--to", "v1.1.0", "--kubernetes", olderNext}
	c.applies(olderNext, 3, append(target, "--ack", "oldest-supports-kubernetes")...)
	r.End()
	asked, journal := l.end(), r.Journal()
	for _, b := range recorder.Check(journal, recorder.Limits{Join: 2 * time.Minute}) {
		t.Error(b)
	}
	kept, lost := judge(asked, journal)
	t.Logf("%d requests were answered, %d failed at machines that came or went, %d were lost", kept, len(asked)-kept-len(lost), len(lost))
	for _, x := range lost[:min(len(lost), 10)] {
		t.Logf("lost: %s", x)
	}
	if kept < 1000 || len(lost)*500 > kept {
		t.Errorf("%d requests were answered and %d lost, want at least 1000, and one lost in 500 at most", kept, len(lost))
	}
	c.wantProtected("after the upgrade")
	c.wantState("encryptsSecrets: true") // the upgrade brought the encryption
	c.wantStored("encrypted", true)
	c.wantImages("control-plane v1.1.0", "worker v1.1.0", "worker v1.1.0")
	nodes := []string{"control-plane-1", "worker-2", "worker-3"}
	c.wantNodes(nodes...)
	c.wantAnswer(nodes...)
	c.renews("worker-3", "control-plane-1")
	c.run(2*time.Minute, append([]string{"upgrade", "apply", "--yes", "-o", "json"}, target...)...).want(plan.ExitNothing)
}
