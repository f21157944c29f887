package bootstrapper

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"constellation/bootstrapper/initproto"
	"constellation/engine/attestation"
	"constellation/engine/cloud"
	"constellation/engine/component"
	"constellation/engine/component/componentproto"
	"constellation/engine/kubeadm"
	"constellation/engine/release"
	"constellation/engine/release/releasetest"
	"constellation/internal/testneeds"
)

const goodInit = "claim-node:running claim-node:done install-components:running install-components:done " +
	"kubeadm-init:running kubeadm-init:done success control-plane-0"

func TestInitMakesTheFirstNode(t *testing.T) {
	r := newRig(t, cloud.ControlPlane)
	x := r.start()
	client := r.console(x.addr)
	got, err := collect(client.Init(t.Context(), r.request(clusterA)))
	if err != nil {
		t.Fatalf("%v\n%s", err, r.logged())
	}
	if outline(got) != goodInit {
		t.Errorf("reported %s", outline(got))
	}
	if endpoint, err := os.ReadFile(filepath.Join(r.ctl, "endpoint-init")); err != nil || !strings.HasSuffix(string(endpoint), fmt.Sprint(":", r.m.APIServerPort)) {
		t.Errorf("kubeadm got controlPlaneEndpoint %q, %v, want port %d", endpoint, err, r.m.APIServerPort)
	}
	s := got[len(got)-1].GetSuccess()
	if string(s.GetKubeconfig()) != "kubeconfig with canary-admin-key" || string(s.GetClusterId()) != string(clusterA) {
		t.Errorf("result %v", s)
	}
	var lines, phases []string
	for _, m := range got {
		if l := m.GetLog(); l != nil {
			lines = append(lines, l.Source+" "+l.Level+" "+l.Line)
		}
		if p := m.GetProgress(); p.GetTotal() == int64(len(initPhases)) {
			phases = append(phases, fmt.Sprintf("%d %s", p.Current, p.Text))
		}
	}
	if !strings.Contains(strings.Join(lines, "\n"), "kubeadm warn [WARNING Service-Kubelet]: kubelet service is not enabled") {
		t.Errorf("lines of kubeadm: %q", lines)
	}
	if strings.Join(phases, "; ") != "1 preflight: Running pre-flight checks; 2 certs: Using certificateDir folder; 6 kubelet-start: Starting the kubelet; 14 addons: Applied essential addon: kube-proxy" {
		t.Errorf("phases: %q", phases)
	}
	if string(r.tpm.sealed()) != string(clusterA) || r.calls() != "init-phase-certs-ca init" {
		t.Errorf("register 15 %x, kubeadm was called with %s", r.tpm.sealed(), r.calls())
	}

	// The kubelet serves with a certificate of the cluster's authority.
	block, _ := pem.Decode([]byte(r.file(kubeadm.KubeletCertFile)))
	cert, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM([]byte(r.file(kubeadm.PKIDir + "/ca.crt")))
	for _, name := range []string{"control-plane-0", "10.42.0.10"} {
		if _, err := cert.Verify(x509.VerifyOptions{Roots: roots, DNSName: name, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}}); err != nil {
			t.Errorf("serving certificate: %v", err)
		}
	}
	if _, err := tls.X509KeyPair([]byte(r.file(kubeadm.KubeletCertFile)), []byte(r.file(kubeadm.KubeletKeyFile))); err != nil {
		t.Errorf("serving key: %v", err)
	}
	r.hidden()
	if i, _ := os.Stat(filepath.Join(r.m.Root, kubeadm.KubeletKeyFile)); i.Mode() != 0o600 {
		t.Errorf("serving key is %s", i.Mode())
	}

	// Until the result is acknowledged it can be fetched again; then it is deleted.
	again, err := collect(client.Init(t.Context(), r.request(clusterA)))
	if err != nil || fmt.Sprint(again) != fmt.Sprint(got) {
		t.Errorf("the replay differs: %v", err)
	}
	if i, err := os.Stat(filepath.Join(r.m.StateDir, kubeconfigFile)); err != nil || i.Mode() != 0o600 {
		t.Errorf("kept result: %v %v", i, err)
	}
	if _, err := client.Ack(t.Context(), &initproto.AckRequest{InitSecret: []byte("wrong")}); status.Code(err) != codes.Unauthenticated {
		t.Errorf("ack with a wrong secret: %v", err)
	}
	if _, err := client.Ack(t.Context(), &initproto.AckRequest{InitSecret: initSecret}); err != nil {
		t.Fatal(err)
	}
	if err := x.end(t); err != nil {
		t.Errorf("ended with %v", err)
	}
	entries, _ := os.ReadDir(r.m.StateDir)
	for _, e := range entries {
		if e.Name() != holderFile && e.Name() != lockFileName {
			t.Errorf("left behind: %s", e.Name())
		}
	}
	for _, secret := range []string{"canary", "zyxwvu"} {
		if strings.Contains(r.logged(), secret) {
			t.Errorf("the log shows %s:\n%s", secret, r.logged())
		}
	}

	// A member only starts its kubelet, after register 15 was extended.
	r.tpm.reboot()
	if err := r.start().end(t); err != nil {
		t.Errorf("reboot: %v", err)
	}
	if len(r.kubelets) != 1 || r.kubelets[0] != fmt.Sprintf("%x", clusterA) || r.calls() != "init-phase-certs-ca init" {
		t.Errorf("kubelet was started with register 15 %q, kubeadm was called with %s", r.kubelets, r.calls())
	}
}

func TestWrongSecretGetsNoInformation(t *testing.T) {
	r := newRig(t, cloud.ControlPlane)
	x := r.start()
	client := r.console(x.addr)
	req := r.request(clusterA)
	for i, secret := range []string{"", "x", "canary-init-secret-of-32-bytes!?", "canary-init-secret-of-32-bytes!!x", string(make([]byte, 32))} {
		req.InitSecret = []byte(secret)
		got, err := collect(client.Init(t.Context(), req))
		if status.Code(err) != codes.Unauthenticated || len(got) != 0 {
			t.Errorf("attempt %d: %v, %v", i, got, err)
		}
	}
	for range 20 {
		_, err := collect(client.Init(t.Context(), req))
		var wait bool
		for _, d := range status.Convert(err).Details() {
			if i, ok := d.(*errdetails.RetryInfo); ok && i.RetryDelay.AsDuration() > 0 && i.RetryDelay.AsDuration() <= sourceRefill {
				wait = true
			}
		}
		if status.Code(err) != codes.ResourceExhausted || !wait {
			t.Fatalf("too many: %v", err)
		}
	}
	if _, err := client.Ack(t.Context(), &initproto.AckRequest{InitSecret: req.InitSecret}); status.Code(err) != codes.ResourceExhausted {
		t.Errorf("Ack bypasses the limit: %v", err)
	}
	// It started nothing, so there is nothing to acknowledge; but it is answered.
	if _, err := client.Ack(t.Context(), &initproto.AckRequest{InitSecret: initSecret}); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("the right secret, after too many wrong ones from the same source: %v", err)
	}
	if n := strings.Count(r.logged(), "init request refused"); n == 0 || n > 10 {
		t.Errorf("26 guesses are logged %d times", n)
	}
	if _, held := (&rig{m: r.m, t: t}).holder(); held || r.tpm.sealed() != nil || r.calls() != "" {
		t.Error("a wrong secret had an effect")
	}
	x.stop(t)
}

// holder reads the claimant from disk.
func (r *rig) holder() (holder, bool) {
	r.t.Helper()
	root, err := os.OpenRoot(r.m.StateDir)
	if err != nil {
		r.t.Fatal(err)
	}
	defer root.Close()
	h, err := readHolder(root)
	if err != nil {
		r.t.Fatal(err)
	}
	if h == nil {
		return holder{}, false
	}
	return *h, true
}

func TestInvalidRequestsNameTheirField(t *testing.T) {
	r := newRig(t, cloud.ControlPlane)
	x := r.start()
	client := r.console(x.addr)
	for field, change := range map[string]func(*initproto.InitRequest){
		"cluster_name":                 func(q *initproto.InitRequest) { q.ClusterName = "a\nb" },
		"cluster_id":                   func(q *initproto.InitRequest) { q.ClusterId = clusterA[:31] },
		"kubernetes_version":           func(q *initproto.InitRequest) { q.KubernetesVersion = "latest" },
		"etcd_image_tag":               func(q *initproto.InitRequest) { q.EtcdImageTag = "3.6.11-0\n    dataDir: /" },
		"components: component":        func(q *initproto.InitRequest) { q.Components[0].Digest = "" },
		"components: kubelet":          func(q *initproto.InitRequest) { q.Components = q.Components[:1] },
		"components: kubeadm":          func(q *initproto.InitRequest) { q.Components = q.Components[1:] },
		"components: kubeadm must":     func(q *initproto.InitRequest) { q.Components[0].Path = "/tmp/kubeadm" },
		"api_server_cert_sans":         func(q *initproto.InitRequest) { q.ApiServerCertSans = []string{"a b"} },
		"api_server_cert_sans: 65":     func(q *initproto.InitRequest) { q.ApiServerCertSans = make([]string, 65) },
		"service_cidr":                 func(q *initproto.InitRequest) { q.ServiceCidr = "10.96.0.0" },
		"pod_cidr":                     func(q *initproto.InitRequest) { q.PodCidr = "" },
		"pod_cidr: 10.96.0.0/16 overl": func(q *initproto.InitRequest) { q.PodCidr = "10.96.0.0/16" },
	} {
		req := r.request(clusterA)
		change(req)
		_, err := collect(client.Init(t.Context(), req))
		if status.Code(err) != codes.InvalidArgument || !strings.HasPrefix(status.Convert(err).Message(), field) {
			t.Errorf("%s: %v", field, err)
		}
	}
	if _, held := r.holder(); held || r.tpm.sealed() != nil {
		t.Error("a bad request claimed the node")
	}
	x.stop(t)
}

func TestTwoInitsAtOnce(t *testing.T) {
	r := newRig(t, cloud.ControlPlane)
	x := r.start()
	var wg sync.WaitGroup
	results := make([]string, 8)
	for i := range results {
		client := r.console(x.addr)
		cluster := clusterA
		if i%2 == 1 {
			cluster = clusterB
		}
		wg.Go(func() {
			got, err := collect(client.Init(t.Context(), r.request(cluster)))
			results[i] = fmt.Sprint(status.Code(err), " ", outline(got))
		})
	}
	wg.Wait()
	good, other := "OK "+goodInit, "AlreadyExists "
	winner := results[0]
	for i, got := range results {
		want := good
		if (i%2 == 0) != (winner == good) {
			want = other
		}
		if got != want {
			t.Errorf("console %d: %s", i, got)
		}
	}
	if r.calls() != "init-phase-certs-ca init" || r.tpm.extends != 1 {
		t.Errorf("kubeadm was called with %s, register 15 extended %d times", r.calls(), r.tpm.extends)
	}
	x.stop(t)
}

func TestReattachedConsoleGetsReplay(t *testing.T) {
	r := newRig(t, cloud.ControlPlane)
	r.script("hang-init", "")
	x := r.start()
	ctx, cancel := context.WithCancel(t.Context())
	stream, err := r.console(x.addr).Init(ctx, r.request(clusterA))
	if err != nil {
		t.Fatal(err)
	}
	first, err := stream.Recv()
	if err != nil || first.Seq != 1 {
		t.Fatalf("%v %v", first, err)
	}
	wait(t, "kubeadm hangs", func() bool { return exists(filepath.Join(r.ctl, "hanging-init")) })
	cancel() // the console is killed

	client := r.console(x.addr)
	if _, err := client.Ack(t.Context(), &initproto.AckRequest{InitSecret: initSecret}); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("ack before there is a result: %v", err)
	}
	stream, err = client.Init(t.Context(), r.request(clusterA))
	if err != nil {
		t.Fatal(err)
	}
	again, err := stream.Recv()
	if err != nil || fmt.Sprint(again) != fmt.Sprint(first) {
		t.Errorf("the replay begins with %v, %v", again, err)
	}
	if r.calls() != "init-phase-certs-ca init" {
		t.Errorf("kubeadm was called with %s", r.calls())
	}
	x.stop(t) // systemd stops the unit: the stream ends and can be resumed
	if _, err := collect(stream, nil); status.Code(err) != codes.Unavailable {
		t.Errorf("the stream of a bootstrapper that stops: %v", err)
	}

	// The next process undoes the unfinished init and starts over.
	r.unscript("hang-init")
	r.tpm.reboot()
	x = r.start()
	if string(r.tpm.sealed()) != string(clusterA) {
		t.Error("it listens and looks unused")
	}
	got, err := collect(r.console(x.addr).Init(t.Context(), r.request(clusterA)))
	if err != nil || !strings.HasSuffix(outline(got), "reset-node:running reset-node:done install-components:running install-components:done kubeadm-init:running kubeadm-init:done success control-plane-0") {
		t.Errorf("reported %s, %v", outline(got), err)
	}
	if r.calls() != "init-phase-certs-ca init reset init-phase-certs-ca init" {
		t.Errorf("kubeadm was called with %s", r.calls())
	}
	if _, err := collect(r.console(x.addr).Init(t.Context(), r.request(clusterB))); status.Code(err) != codes.AlreadyExists {
		t.Errorf("init for another cluster: %v", err)
	}
	x.stop(t)

	// A member whose result was not fetched serves it, also after a reboot.
	r.tpm.reboot()
	x = r.start()
	replay, err := collect(r.console(x.addr).Init(t.Context(), r.request(clusterA)))
	if err != nil || fmt.Sprint(replay) != fmt.Sprint(got) {
		t.Errorf("the replay differs: %s, %v", outline(replay), err)
	}
	if len(r.kubelets) != 1 || r.kubelets[0] == "" {
		t.Errorf("kubelets: %q", r.kubelets)
	}
	if _, err := r.console(x.addr).Ack(t.Context(), &initproto.AckRequest{InitSecret: initSecret}); err != nil {
		t.Fatal(err)
	}
	if err := x.end(t); err != nil {
		t.Error(err)
	}
}

func TestUnreportedSuccessIsReportedLater(t *testing.T) {
	r := newRig(t, cloud.ControlPlane)
	x := r.start()
	if _, err := collect(r.console(x.addr).Init(t.Context(), r.request(clusterA))); err != nil {
		t.Fatal(err)
	}
	x.stop(t)
	// This is the state after a crash between the membership and its report.
	file := filepath.Join(r.m.StateDir, recordFile)
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	cut := strings.LastIndex(strings.TrimSpace(string(b)), "\n") + 1
	os.WriteFile(file, b[:cut], 0o600)
	x = r.start()
	got, err := collect(r.console(x.addr).Init(t.Context(), r.request(clusterA)))
	if err != nil || outline(got) != goodInit || len(got[len(got)-1].GetSuccess().GetKubeconfig()) == 0 {
		t.Errorf("reported %s, %v", outline(got), err)
	}
	x.stop(t)
}

func TestFailuresOfKubeadm(t *testing.T) {
	for _, tt := range []struct {
		name, script, want, calls string
	}{
		{
			name: "a transient failure is retried", script: "1",
			want:  "claim-node:running claim-node:done install-components:running install-components:done kubeadm-init:running reset-node:running reset-node:done kubeadm-init:running kubeadm-init:done success control-plane-0",
			calls: "init-phase-certs-ca init reset init-phase-certs-ca init",
		},
		{
			name: "a permanent failure is reported", script: "1\n1",
			want:  "claim-node:running claim-node:done install-components:running install-components:done kubeadm-init:running reset-node:running reset-node:done kubeadm-init:running kubeadm-init:failed failure kubeadm-init",
			calls: "init-phase-certs-ca init reset init-phase-certs-ca init",
		},
		{
			name: "a configuration that kubeadm refuses is not retried", script: "3",
			want:  "claim-node:running claim-node:done install-components:running install-components:done kubeadm-init:running kubeadm-init:failed failure kubeadm-init",
			calls: "init-phase-certs-ca init",
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := newRig(t, cloud.ControlPlane)
			r.script("fail-init", tt.script)
			x := r.start()
			got, err := collect(r.console(x.addr).Init(t.Context(), r.request(clusterA)))
			if err != nil || outline(got) != tt.want || r.calls() != tt.calls {
				t.Errorf("reported %s, %v; kubeadm was called with %s", outline(got), err, r.calls())
			}
			if strings.Contains(fmt.Sprint(got), "zyxwvu.98") || strings.Contains(r.logged(), "zyxwvu.98") || strings.Contains(r.logged(), "canary") {
				t.Error("a secret leaked")
			}
			f := got[len(got)-1].GetFailure()
			if f == nil {
				x.stop(t)
				return
			}
			if !strings.Contains(f.Message, "error execution phase init: scripted") || f.Remedy == "" || f.Retry {
				t.Errorf("failure %v", f)
			}
			// It is final for later callers, for the next process, and for an Ack.
			again, err := collect(r.console(x.addr).Init(t.Context(), r.request(clusterA)))
			if err != nil || fmt.Sprint(again) != fmt.Sprint(got) {
				t.Errorf("again: %s, %v", outline(again), err)
			}
			x.stop(t)
			x = r.start()
			again, err = collect(r.console(x.addr).Init(t.Context(), r.request(clusterA)))
			if err != nil || fmt.Sprint(again) != fmt.Sprint(got) || r.calls() != tt.calls {
				t.Errorf("after a restart: %s, %v", outline(again), err)
			}
			if _, err := r.console(x.addr).Ack(t.Context(), &initproto.AckRequest{InitSecret: initSecret}); status.Code(err) != codes.FailedPrecondition {
				t.Errorf("ack of a failure: %v", err)
			}
			x.stop(t)
		})
	}
}

// TestInitRunsOnlyVouchedComponents: the init secret alone does not permit programs to run as
// root. A refused request leaves the machine free.
func TestInitRunsOnlyVouchedComponents(t *testing.T) {
	r := newRig(t, cloud.ControlPlane)
	var fetched atomic.Int64
	evil := []byte("#!/bin/sh\n")
	attacker := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		fetched.Add(1)
		w.Write(evil)
	}))
	t.Cleanup(attacker.Close)
	stranger, err := release.NewPrivateKey("stranger")
	if err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256(evil)
	theirs := func(q *initproto.InitRequest) {
		q.Components[0].Url, q.Components[0].Digest = attacker.URL+"/kubeadm", "sha256:"+hex.EncodeToString(sum[:])
	}
	x := r.start()
	init := func(q *initproto.InitRequest) error {
		_, err := collect(r.console(x.addr).Init(t.Context(), q))
		return err
	}
	for _, tt := range []struct {
		name, want string
		change     func(*initproto.InitRequest)
	}{
		{name: "no statement", want: "no statement of a release builder", change: func(q *initproto.InitRequest) { q.ComponentsStatement = "" }},
		{name: "other programs", want: "does not cover these components", change: theirs},
		{name: "other programs with a statement by another key", want: "an untrusted key signed it", change: func(q *initproto.InitRequest) {
			theirs(q)
			l, _ := component.FromProto(q.Components)
			q.ComponentsStatement, err = stranger.Vouch(release.Vouched{"v1.35.4": {runtime.GOARCH: l.Digest()}})
		}},
		{name: "another version", want: "does not name Kubernetes v1.36.3", change: func(q *initproto.InitRequest) { q.KubernetesVersion = "v1.36.3" }},
		{name: "another path", want: "does not cover these components", change: func(q *initproto.InitRequest) { q.Components[1].Path = "/etc/cron.d/kubelet" }},
		{name: "a further component", want: "does not cover these components", change: func(q *initproto.InitRequest) {
			q.Components = append(q.Components, &componentproto.Component{Name: "x", Url: attacker.URL, Digest: q.Components[0].Digest, Path: "/etc/cron.d/x"})
		}},
	} {
		q := r.request(clusterA)
		tt.change(q)
		if err := init(q); status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), tt.want) || !strings.Contains(err.Error(), "components_statement") {
			t.Errorf("%s: got %v, want %q", tt.name, err, tt.want)
		}
	}
	if err := os.Remove(filepath.Join(r.m.Root, release.MachineKeys)); err != nil {
		t.Fatal(err)
	}
	if err := init(r.request(clusterA)); status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "no release keys; replace it") {
		t.Errorf("a machine without keys: %v", err)
	}
	if n := fetched.Load(); n != 0 || r.calls() != "" {
		t.Errorf("%d fetched, kubeadm was called with %q", n, r.calls())
	}
	releasetest.Furnish(t, r.m.Root)
	if got, err := collect(r.console(x.addr).Init(t.Context(), r.request(clusterA))); err != nil || outline(got) != goodInit {
		t.Errorf("components with the release builder's statement: %s, %v", outline(got), err)
	}
}

// The console can ask for a newer etcd than that of Kubernetes.
func TestInitWithAnotherEtcd(t *testing.T) {
	r := newRig(t, cloud.ControlPlane)
	q := r.request(clusterA)
	q.EtcdImageTag = "3.6.11-0"
	got, err := collect(r.console(r.start().addr).Init(t.Context(), q))
	if err != nil || outline(got) != goodInit {
		t.Fatalf("%v, reported %s", err, outline(got))
	}
	if tag, err := os.ReadFile(filepath.Join(r.ctl, "etcd-init")); string(tag) != "3.6.11-0" {
		t.Errorf("kubeadm got etcd.local.imageTag %q, %v", tag, err)
	}
	if !slices.ContainsFunc(got, func(m *initproto.InitResponse) bool {
		return m.GetProgress().GetText() == "Kubernetes v1.35.4 with etcd 3.6.11-0"
	}) {
		t.Error("no step names the etcd")
	}
}

func TestFailuresBeforeKubeadm(t *testing.T) {
	for _, tt := range []struct {
		name   string
		change func(*rig, *initproto.InitRequest)
		step   string
		want   string
	}{
		{name: "an altered component", change: func(_ *rig, q *initproto.InitRequest) { q.Components[1].Url = "data:,other" }, step: stepInstall, want: "digest mismatch"},
		{name: "a missing component", change: func(r *rig, q *initproto.InitRequest) {
			s := httptest.NewServer(nil)
			r.t.Cleanup(s.Close)
			q.Components[1].Url = s.URL + "/kubelet?signature=canary"
		}, step: stepInstall, want: "HTTP 404"},
		{name: "a kubeadm of another version", change: func(r *rig, _ *initproto.InitRequest) { r.script("version", "v1.36.3") }, step: stepInstall, want: "installed kubeadm is v1.36.3, want v1.35.4"},
		{name: "a TPM that fails", change: func(r *rig, _ *initproto.InitRequest) {
			r.tpm.mu.Lock()
			defer r.tpm.mu.Unlock()
			r.tpm.broken = fmt.Errorf("%w: it hums", attestation.ErrTPM)
		}, step: stepClaim, want: "it hums"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := newRig(t, cloud.ControlPlane)
			x := r.start()
			req := r.request(clusterA)
			tt.change(r, req)
			got, err := collect(r.console(x.addr).Init(t.Context(), r.vouched(req)))
			if err != nil || len(got) == 0 {
				t.Fatalf("%v %v", got, err)
			}
			f := got[len(got)-1].GetFailure()
			if f.GetStep() != tt.step || !f.GetRetry() || !strings.Contains(f.GetMessage(), tt.want) || f.GetRemedy() == "" || strings.Contains(f.GetMessage(), "canary") {
				t.Errorf("failure %v", f)
			}
			if h, held := r.holder(); !held || h.Failure == "" || !h.Retry {
				t.Errorf("holder %+v", h)
			}
			x.stop(t)
		})
	}
}

// mirror serves a component like a broken mirror, until it is fixed.
type mirror struct {
	mu    sync.Mutex
	body  []byte
	asked int
	bend  func(w http.ResponseWriter, body []byte) // nil: it is whole
}

func (m *mirror) ServeHTTP(w http.ResponseWriter, _ *http.Request) {
	m.mu.Lock()
	bend := m.bend
	m.asked++
	m.mu.Unlock()
	if bend == nil {
		bend = func(w http.ResponseWriter, b []byte) { w.Write(b) }
	}
	bend(w, m.body)
}

func (m *mirror) mend() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.bend = nil
}

// attempts is how often package component retries a download in one try.
const attempts = 10

// TestInitSucceedsAfterMirrorIsFixed is a first node whose component is unavailable at
// first. The claim is kept, and the same request continues on the same machine.
func TestInitSucceedsAfterMirrorIsFixed(t *testing.T) {
	early := func(w http.ResponseWriter, b []byte) {
		w.Header().Set("Content-Length", strconv.Itoa(len(b)))
		w.Write(b[:4])
	}
	for _, tt := range []struct {
		name     string
		bend     func(w http.ResponseWriter, body []byte)
		want     string // in the failure
		restart  bool   // of the process before the second request
		reboot   bool   // of the machine as well
		tries    int    // of the first request
		passing  bool   // the mirror is mended while the first request works
		newOrder bool   // the second request names another URL
	}{
		{name: "altered content", bend: func(w http.ResponseWriter, _ []byte) { w.Write([]byte("altered")) }, want: "digest mismatch", tries: maxInstalls},
		{name: "altered content, and a restart", bend: func(w http.ResponseWriter, _ []byte) { w.Write([]byte("altered")) }, want: "digest mismatch", restart: true, tries: maxInstalls},
		{name: "altered content, and a reboot", bend: func(w http.ResponseWriter, _ []byte) { w.Write([]byte("altered")) }, want: "digest mismatch", restart: true, reboot: true, tries: maxInstalls},
		{name: "a download that ends early", bend: early, want: "ended after 4 of 10 bytes", tries: maxInstalls * attempts},
		{name: "a download that ends early for a moment", bend: early, passing: true},
		{name: "no component", bend: func(w http.ResponseWriter, _ []byte) { w.WriteHeader(404) }, want: "HTTP 404", tries: maxInstalls},
		{name: "another mirror", bend: func(w http.ResponseWriter, _ []byte) { w.WriteHeader(404) }, want: "HTTP 404", newOrder: true, tries: maxInstalls},
		{name: "altered content for a moment", bend: func(w http.ResponseWriter, _ []byte) { w.Write([]byte("altered")) }, passing: true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := newRig(t, cloud.ControlPlane)
			m := &mirror{body: []byte("#!/bin/sh\n"), bend: tt.bend} // the rig's kubelet
			srv := httptest.NewServer(m)
			defer srv.Close()
			req := r.request(clusterA)
			req.Components[1].Url = srv.URL + "/kubelet"
			r.vouched(req)
			if tt.passing {
				m.bend = func(w http.ResponseWriter, b []byte) { tt.bend(w, b); m.mend() }
			}
			x := r.start()
			got, err := collect(r.console(x.addr).Init(t.Context(), req))
			if err != nil {
				t.Fatal(err)
			}
			if tt.passing {
				if outline(got) != goodInit || m.asked != 2 {
					t.Errorf("reported %s, %d requests to the mirror", outline(got), m.asked)
				}
				x.stop(t)
				return
			}
			f := got[len(got)-1].GetFailure()
			if f.GetStep() != stepInstall || !strings.Contains(f.GetMessage(), tt.want) || !f.GetRetry() || m.asked != tt.tries {
				t.Errorf("failure %v, %d requests to the mirror", f, m.asked)
			}
			if string(r.tpm.sealed()) != string(clusterA) || r.calls() != "" {
				t.Errorf("register 15 %x, kubeadm was called with %s", r.tpm.sealed(), r.calls())
			}
			before, _ := r.holder()
			if tt.restart {
				x.stop(t)
				if tt.reboot {
					r.tpm.reboot()
				}
				x = r.start()
			}
			// No other claimant gets the machine in the meantime.
			if _, err := collect(r.console(x.addr).Init(t.Context(), r.request(clusterB))); status.Code(err) != codes.AlreadyExists {
				t.Errorf("another cluster: %v", err)
			}
			if !tt.newOrder {
				// While the mirror is broken, it fails as before.
				again, err := collect(r.console(x.addr).Init(t.Context(), req))
				if err != nil || again[len(again)-1].GetFailure().GetMessage() != f.GetMessage() || m.asked != 2*tt.tries {
					t.Errorf("too early: %s, %v, %d requests to the mirror", outline(again), err, m.asked)
				}
				m.mend()
			} else {
				other := httptest.NewServer(&mirror{body: m.body})
				defer other.Close()
				req.Components[1].Url = other.URL + "/kubelet"
				r.vouched(req)
			}
			got, err = collect(r.console(x.addr).Init(t.Context(), req))
			if err != nil || !strings.HasSuffix(outline(got), "install-components:failed claim-node:running claim-node:done "+
				"install-components:running install-components:done kubeadm-init:running kubeadm-init:done success control-plane-0") {
				t.Fatalf("reported %s, %v", outline(got), err)
			}
			h, _ := r.holder()
			if h.Time != before.Time || h.State != member || h.Failure != "" || h.Retry || r.tpm.extends != 1 && !tt.reboot {
				t.Errorf("holder %+v, was %+v; %d extensions of register 15", h, before, r.tpm.extends)
			}
			if calls := r.calls(); !strings.HasSuffix(calls, "init-phase-certs-ca init") || !tt.restart && strings.Contains(calls, "reset") {
				t.Errorf("kubeadm was called with %s", calls)
			}
			// A console of a later process gets the same messages.
			x.stop(t)
			x = r.start()
			again, err := collect(r.console(x.addr).Init(t.Context(), req))
			if err != nil || fmt.Sprint(again) != fmt.Sprint(got) {
				t.Errorf("replay: %s, %v", outline(again), err)
			}
			x.stop(t)
		})
	}
}

// TestInitSucceedsAfterPreflightIsFixed is a first node whose kubeadm fails in its
// preflight. Nothing of a cluster exists, so the claim is kept.
func TestInitSucceedsAfterPreflightIsFixed(t *testing.T) {
	for _, tt := range []struct {
		name    string
		restart bool // of the process before the second request
		reboot  bool // of the machine as well
		retry   bool
		trace   string // a file of a cluster
	}{
		{name: "at once", retry: true},
		{name: "after a restart", retry: true, restart: true},
		{name: "after a reboot", retry: true, restart: true, reboot: true},
		{name: "not where etcd has data", trace: "var/lib/etcd/member/wal"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := newRig(t, cloud.ControlPlane)
			r.script("preflight", "failed to pull image registry.k8s.io/etcd: not found\nfailed to pull image registry.k8s.io/pause: not found\n")
			if tt.trace != "" {
				file := filepath.Join(r.m.Root, tt.trace)
				if err := errors.Join(os.MkdirAll(filepath.Dir(file), 0o755), os.WriteFile(file, nil, 0o600)); err != nil {
					t.Fatal(err)
				}
			}
			x := r.start()
			got, err := collect(r.console(x.addr).Init(t.Context(), r.request(clusterA)))
			if err != nil {
				t.Fatal(err)
			}
			f := got[len(got)-1].GetFailure()
			if f.GetStep() != stepInit || f.GetRetry() != tt.retry || f.GetMessage() != "kubeadm init: [ERROR ImagePull]: failed to pull image registry.k8s.io/etcd: not found, and 1 more" ||
				!strings.Contains(fmt.Sprint(got), "failed to pull image registry.k8s.io/pause") || (f.GetRemedy() == retryAdvice) != tt.retry {
				t.Errorf("failure %v", f)
			}
			before, held := r.holder()
			if !held || before.Retry != tt.retry || before.Failure != f.GetMessage() {
				t.Errorf("holder %+v", before)
			}
			calls := r.calls()
			if tt.restart {
				x.stop(t)
				if tt.reboot {
					r.tpm.reboot()
				}
				x = r.start()
			}
			if _, err := collect(r.console(x.addr).Init(t.Context(), r.request(clusterB))); status.Code(err) != codes.AlreadyExists {
				t.Errorf("another cluster: %v", err)
			}
			r.unscript("preflight")
			got, err = collect(r.console(x.addr).Init(t.Context(), r.request(clusterA)))
			if !tt.retry {
				if err != nil || got[len(got)-1].GetFailure() == nil || r.calls() != calls {
					t.Errorf("reported %s, %v; kubeadm was called with %s", outline(got), err, r.calls())
				}
				x.stop(t)
				return
			}
			if err != nil || !strings.HasSuffix(outline(got), "kubeadm-init:failed claim-node:running claim-node:done reset-node:running reset-node:done "+
				"install-components:running install-components:done kubeadm-init:running kubeadm-init:done success control-plane-0") {
				t.Errorf("reported %s, %v", outline(got), err)
			}
			if r.calls() != calls+" reset init-phase-certs-ca init" {
				t.Errorf("kubeadm was called with %s", r.calls())
			}
			h, _ := r.holder()
			if h.Time != before.Time || h.State != member || h.Failure != "" || h.Retry || string(r.tpm.sealed()) != string(clusterA) || r.tpm.extends != 1 && !tt.reboot {
				t.Errorf("holder %+v, was %+v; %d extensions of register 15", h, before, r.tpm.extends)
			}
			x.stop(t)
		})
	}
}

func TestUnavailableCloudIsRetried(t *testing.T) {
	away, throttled := fmt.Errorf("%w: down", cloud.ErrUnavailable), fmt.Errorf("%w: too often", cloud.ErrThrottled)
	for _, tt := range []struct {
		name  string
		errs  []error // of the cloud
		want  string
		lines int
	}{
		{name: "unavailable, then throttled", errs: []error{away, away, throttled}, want: "claim-node:done reset-node:running reset-node:done install-components:running install-components:done kubeadm-init:running kubeadm-init:done success control-plane-0", lines: 3},
		{name: "denied", errs: []error{cloud.ErrDenied}, want: "claim-node:running claim-node:done claim-node:failed failure claim-node"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := newRig(t, cloud.ControlPlane)
			// A claimed machine requests only this init again.
			r.script("preflight", "not yet")
			x := r.start()
			if _, err := collect(r.console(x.addr).Init(t.Context(), r.request(clusterA))); err != nil {
				t.Fatal(err)
			}
			x.stop(t)
			r.unscript("preflight")
			x = r.start()
			r.cloud.mu.Lock()
			r.cloud.lbErrs = tt.errs
			r.cloud.mu.Unlock()
			got, err := collect(r.console(x.addr).Init(t.Context(), r.request(clusterA)))
			if err != nil || !strings.HasSuffix(outline(got), tt.want) {
				t.Errorf("reported %s, %v", outline(got), err)
			}
			lines := 0
			for _, m := range got {
				if strings.HasPrefix(m.GetLog().GetLine(), "find the load balancer: ") {
					lines++
				}
			}
			if lines != tt.lines {
				t.Errorf("%d lines about it, want %d", lines, tt.lines)
			}
			x.stop(t)
		})
	}
}

func TestTracesOfAClusterAreDetected(t *testing.T) {
	for _, tt := range []struct {
		name  string
		files []string // a directory if it ends in a slash
		want  bool
	}{
		{name: "a new machine", want: true},
		{name: "a certificate authority, which is created before the preflight", files: []string{"etc/kubernetes/pki/ca.key", "var/lib/kubelet/pki/kubelet-server.key"}, want: true},
		{name: "empty directories", files: []string{"etc/kubernetes/manifests/", "var/lib/etcd/"}, want: true},
		{name: "a kubelet's kubeconfig", files: []string{"etc/kubernetes/kubelet.conf"}, want: false},
		{name: "a static pod", files: []string{"etc/kubernetes/manifests/etcd.yaml"}, want: false},
		{name: "data of etcd", files: []string{"var/lib/etcd/member/wal/"}, want: false},
		{name: "a file in place of a directory", files: []string{"var/lib/etcd"}, want: false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			h := host{root: t.TempDir()}
			for _, f := range tt.files {
				path := filepath.Join(h.root, f)
				err := os.MkdirAll(filepath.Dir(path), 0o755)
				if strings.HasSuffix(f, "/") {
					err = os.MkdirAll(path, 0o755)
				} else if err == nil {
					err = os.WriteFile(path, nil, 0o600)
				}
				if err != nil {
					t.Fatal(err)
				}
			}
			if got := h.untouched(); got != tt.want {
				t.Errorf("untouched: %t", got)
			}
		})
	}
	if (host{root: filepath.Join(t.TempDir(), "absent")}).untouched() {
		t.Error("a file system that cannot be read is untouched")
	}
}

func TestInitSucceedsAfterDiskIsFreed(t *testing.T) {
	testneeds.Root(t, "to mount a small file system")
	r := newRig(t, cloud.ControlPlane)
	disk := filepath.Join(r.m.Root, "usr")
	if err := os.MkdirAll(disk, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mount("tmpfs", disk, "tmpfs", 0, "size=128k"); err != nil {
		t.Skip("cannot mount a small file system: ", err)
	}
	t.Cleanup(func() { syscall.Unmount(disk, syscall.MNT_DETACH) })
	body := []byte("#!/bin/sh\n" + strings.Repeat("#", 256<<10))
	srv := httptest.NewServer(&mirror{body: body})
	defer srv.Close()
	req := r.request(clusterA)
	sum := sha256.Sum256(body)
	req.Components[1].Url, req.Components[1].Digest = srv.URL+"/kubelet", "sha256:"+hex.EncodeToString(sum[:])
	releasetest.Furnish(t, r.m.Root) // the file system hides it
	r.vouched(req)
	x := r.start()
	got, err := collect(r.console(x.addr).Init(t.Context(), req))
	if err != nil {
		t.Fatal(err)
	}
	if f := got[len(got)-1].GetFailure(); !strings.HasSuffix(f.GetMessage(), "no space left on device") || !f.GetRetry() {
		t.Errorf("failure %v", f)
	}
	if err := syscall.Mount("tmpfs", disk, "tmpfs", syscall.MS_REMOUNT, "size=4m"); err != nil {
		t.Fatal(err)
	}
	got, err = collect(r.console(x.addr).Init(t.Context(), req))
	if err != nil || !strings.HasSuffix(outline(got), "success control-plane-0") || r.tpm.extends != 1 {
		t.Errorf("reported %s, %v; %d extensions of register 15", outline(got), err, r.tpm.extends)
	}
	x.stop(t)
}

func TestInitIsRefused(t *testing.T) {
	t.Run("if a cluster exists", func(t *testing.T) {
		r := newRig(t, cloud.ControlPlane)
		api := httptest.NewTLSServer(nil)
		defer api.Close()
		r.m.APIServerPort = api.Listener.Addr().(*net.TCPAddr).Port
		x := r.start()
		_, err := collect(r.console(x.addr).Init(t.Context(), r.request(clusterA)))
		if status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "there is a cluster") {
			t.Errorf("got %v", err)
		}
		if _, held := r.holder(); held {
			t.Error("claimed")
		}
		x.stop(t)
	})
	t.Run("while a join has claimed the node", func(t *testing.T) {
		r := newRig(t, cloud.ControlPlane)
		x := r.start()
		root := openState(t, r.m.StateDir)
		// Another process of this machine; the running one finds out by its file.
		if _, err := createOnce(root, holderFile, holder{State: claimed, By: byJoin, ClusterID: fmt.Sprintf("%x", clusterB)}); err != nil {
			t.Fatal(err)
		}
		_, err := collect(r.console(x.addr).Init(t.Context(), r.request(clusterA)))
		if status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "joining a cluster") {
			t.Errorf("got %v", err)
		}
		if exists(filepath.Join(r.m.StateDir, requestFile)) {
			t.Error("a request that lost was kept")
		}
		x.stop(t)
	})
	t.Run("while the cloud is unavailable", func(t *testing.T) {
		r := newRig(t, cloud.ControlPlane)
		x := r.start()
		r.cloud.fail(fmt.Errorf("%w: down", cloud.ErrUnavailable))
		for range 3 * sourceBurst { // which is not the caller's fault
			if _, err := collect(r.console(x.addr).Init(t.Context(), r.request(clusterA))); status.Code(err) != codes.Unavailable {
				t.Fatalf("got %v", err)
			}
		}
		r.cloud.fail(nil)
		if _, err := collect(r.console(x.addr).Init(t.Context(), r.request(clusterA))); err != nil {
			t.Error(err)
		}
		x.stop(t)
	})
	t.Run("on a worker, which does not listen", func(t *testing.T) {
		r := newRig(t, cloud.Worker)
		x := r.start()
		if x.addr != "" {
			t.Errorf("listens on %s", x.addr)
		}
		x.stop(t)
	})
	t.Run("on a used machine, which does not listen either", func(t *testing.T) {
		r := newRig(t, cloud.ControlPlane)
		r.tpm.cluster = clusterB
		x := r.start()
		if err := x.end(t); !errors.Is(err, ErrStuck) || x.addr != "" {
			t.Errorf("listens on %q, ended with %v", x.addr, err)
		}
	})
	t.Run("if the console does not trust the machine", func(t *testing.T) {
		r := newRig(t, cloud.ControlPlane)
		r.tpm.events = image("other")
		x := r.start()
		_, err := collect(r.console(x.addr).Init(t.Context(), r.request(clusterA)))
		if status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "measurements differ") {
			t.Errorf("got %v", err)
		}
		x.stop(t)
	})
}

func TestOnlyOneBootstrapperWorks(t *testing.T) {
	r := newRig(t, cloud.ControlPlane)
	x := r.start()
	if err := Run(t.Context(), r.m); err == nil || !strings.Contains(err.Error(), "another bootstrapper") {
		t.Errorf("second: %v", err)
	}
	if _, err := Reset(t.Context(), r.m, func(string) {}); err == nil || !strings.Contains(err.Error(), "another bootstrapper") {
		t.Errorf("reset: %v", err)
	}
	x.stop(t)
}

func TestEveryErrorHasItsCode(t *testing.T) {
	for want, errs := range map[codes.Code][]error{
		codes.Unauthenticated:    {errSecret},
		codes.ResourceExhausted:  {&limitedError{1}},
		codes.InvalidArgument:    {&fieldError{"f", "p"}},
		codes.AlreadyExists:      {errOtherInit, errOtherHolder},
		codes.FailedPrecondition: {errJoinHolds, errMember, errCluster, errFetched, errNotFinished, errFailedInit, errNothing},
		codes.Unavailable:        {errStopping, cloud.ErrUnavailable, cloud.ErrThrottled, attestation.ErrTPM},
		codes.Canceled:           {context.Canceled},
		codes.DeadlineExceeded:   {context.DeadlineExceeded},
		codes.Internal:           {errors.New("x")},
		codes.Aborted:            {status.Error(codes.Aborted, "x")},
	} {
		for _, err := range errs {
			if got := status.Code(answer(fmt.Errorf("wrapped: %w", err))); got != want && want != codes.Aborted {
				t.Errorf("%v: %s, want %s", err, got, want)
			}
		}
	}
	if answer(nil) != nil {
		t.Error("no error is an error")
	}
}
