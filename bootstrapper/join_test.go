package bootstrapper

import (
	"bytes"
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	"constellation/bootstrapper/initproto"
	"constellation/engine/atls"
	"constellation/engine/attestation"
	"constellation/engine/cloud"
	"constellation/engine/component"
	"constellation/engine/kubeadm"
	"constellation/engine/release"
	"constellation/engine/release/releasetest"
	"constellation/joinservice/joinproto"
)

// service is a join service on a member of a cluster: real attested TLS and a real
// authority, with scripted answers.
type service struct {
	joinproto.UnimplementedJoinServiceServer
	t  *testing.T
	r  *rig
	ca authority
	// member is the machine that it runs on, issuer makes its evidence.
	member *softTPM
	issuer attestation.Issuer
	stop   func()

	mu       sync.Mutex
	answers  []error // one for each request, then tickets
	standing error   // for a member; nil: it is one
	change   func(*joinproto.IssueJoinTicketResponse)
	plain    bool // like join services of earlier releases, which encrypt no secrets
	requests [][]byte
	reports  []string
	refusals []error
	opened   int // reports
	ended    int // those that ended in order
}

// serveJoins starts a join service on the rig's load balancer.
func (r *rig) serveJoins(bend func(*service)) *service {
	r.t.Helper()
	id := identity("control-plane-9", cloud.ControlPlane)
	id.IP = netip.MustParseAddr("10.42.0.19")
	s := &service{t: r.t, r: r, ca: newAuthority(), member: &softTPM{t: r.t, ca: r.ca, id: id, events: image("v1.1.0"), cluster: clusterB}}
	s.issuer = s.member
	if bend != nil {
		bend(s)
	}
	s.serve()
	return s
}

// serve starts it, again after a stop.
func (s *service) serve() {
	s.t.Helper()
	r := s.r
	l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", r.m.joinPort))
	if err != nil {
		r.t.Fatal(err)
	}
	var v either // a machine that was claimed may report, and gets no ticket
	for _, rule := range []attestation.PCR15{attestation.PCR15Zero(), attestation.PCR15Member()} {
		v = append(v, r.judge(rule))
	}
	g := grpc.NewServer(grpc.Creds(atls.NewServer(atls.Config{
		Purpose: atls.PurposeJoin, Issuer: s.issuer, Validator: func() attestation.Validator { return v },
		OnFailure: func(_ net.Addr, err error) { s.mu.Lock(); defer s.mu.Unlock(); s.refusals = append(s.refusals, err) },
	})))
	joinproto.RegisterJoinServiceServer(g, s)
	go g.Serve(l)
	s.stop = g.Stop
	r.t.Cleanup(g.Stop)
}

func (s *service) IssueJoinTicket(ctx context.Context, req *joinproto.IssueJoinTicketRequest) (*joinproto.IssueJoinTicketResponse, error) {
	if st, _ := atls.PeerStatement(ctx); len(bytes.Trim(st.PCRs[clusterRegister], "\x00")) > 0 {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.standing != nil {
			return nil, s.standing
		}
		return nil, status.Error(codes.PermissionDenied, "the machine already belongs to the cluster")
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.requests = append(s.requests, req.GetCertificateRequest())
	if len(s.answers) > 0 {
		err := s.answers[0]
		s.answers = s.answers[1:]
		if err != nil {
			return nil, err
		}
	}
	t := s.ticket(req.GetCertificateRequest())
	if s.change != nil {
		s.change(t)
	}
	if s.plain || s.r.cloud.instance.Role != cloud.ControlPlane {
		return t, nil
	}
	return t, s.seal(ctx, req, t)
}

// seal encrypts the secrets of a ticket, as CA signers do.
func (s *service) seal(ctx context.Context, req *joinproto.IssueJoinTicketRequest, t *joinproto.IssueJoinTicketResponse) (err error) {
	if _, err := s.r.judge(attestation.PCR15Zero()).Validate(ctx, req.GetSealingEvidence(), joinproto.SealingUserData(req.GetSealingKey())); err != nil {
		return err
	}
	t.SealedSecrets, err = joinproto.Seal(req.GetSealingKey(), &joinproto.ControlPlaneSecrets{
		Files: t.ControlPlaneFiles, CertifierKeys: t.CertifierKeys, KmsKeys: t.KmsKeys,
		ApiServerEndpoint: t.ApiServerEndpoint, KmsFingerprint: t.KmsFingerprint, KmsMode: t.KmsMode,
	})
	t.ControlPlaneFiles, t.CertifierKeys, t.KmsKeys = nil, nil, nil
	t.ApiServerEndpoint, t.KmsFingerprint, t.KmsMode = "10.42.0.250:7777", "", "read" // of a captured join service
	return err
}

// ticket is a good one for the rig's machine.
func (s *service) ticket(csr []byte) *joinproto.IssueJoinTicketResponse {
	t := &joinproto.IssueJoinTicketResponse{
		ClusterId: clusterB, KubeletCertificate: s.ca.sign(s.t, csr, nil), ApiServerEndpoint: "10.42.0.1:6443",
		Token: "canary.token0123456789a"[:6] + "." + "canarytoken01234", DiscoveryTokenCaCertHash: s.ca.hash(), KubernetesVersion: "v1.35.4",
		Components: component.ToProto(s.r.components()), ComponentsReference: "k8s-components-sha256-x",
		ComponentsStatement: releasetest.Vouch(s.t, "v1.35.4", s.r.components()),
	}
	if s.r.cloud.instance.Role == cloud.ControlPlane {
		for name := range authorityFiles {
			data := []byte("canary-pki of " + name)
			switch name {
			case "ca.crt":
				data = s.ca.pem
			case "ca.key":
				data = s.ca.keyPEM()
			}
			t.ControlPlaneFiles = append(t.ControlPlaneFiles, &joinproto.File{Name: name, Data: data})
		}
	}
	return t
}

func (s *service) Report(stream grpc.ClientStreamingServer[joinproto.ReportRequest, joinproto.ReportResponse]) error {
	s.mu.Lock()
	s.opened++
	s.mu.Unlock()
	for {
		m, err := stream.Recv()
		s.mu.Lock()
		if errors.Is(err, io.EOF) {
			s.ended++
			s.mu.Unlock()
			return stream.SendAndClose(&joinproto.ReportResponse{})
		}
		if err == nil {
			s.reports = append(s.reports, fmt.Sprint(m.Step, ":", m.State, " ", m.Level, " ", m.Text))
		}
		s.mu.Unlock()
		if err != nil {
			return err
		}
	}
}

func (s *service) said() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return strings.Join(s.reports, "\n")
}

func (s *service) asked() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.requests)
}

func TestJoinMakesANode(t *testing.T) {
	for _, role := range []cloud.Role{cloud.Worker, cloud.ControlPlane} {
		t.Run(string(role), func(t *testing.T) {
			r := newRig(t, role)
			s := r.serveJoins(nil)
			if err := r.start().end(t); err != nil {
				t.Fatalf("%v\n%s", err, r.logged())
			}
			if h, _ := r.holder(); h.State != member || h.By != byJoin || h.Node != r.cloud.instance.Name || string(r.tpm.sealed()) != string(clusterB) {
				t.Errorf("holder %+v, register 15 %x", h, r.tpm.sealed())
			}
			if r.calls() != "join" {
				t.Errorf("kubeadm was called with %s", r.calls())
			}
			r.hidden()
			for name, mode := range authorityFiles {
				i, err := os.Stat(filepath.Join(r.m.Root, kubeadm.PKIDir, name))
				if (err == nil) != (role == cloud.ControlPlane) || err == nil && i.Mode() != mode {
					t.Errorf("%s: %v, %v", name, i, err)
				}
			}
			if i, err := os.Stat(filepath.Join(r.m.Root, kubeadm.KubeletKeyFile)); err != nil || i.Mode() != 0o600 {
				t.Errorf("serving key: %v, %v", i, err)
			}
			for _, name := range []string{ticketFile, keyFile, requestCSR} {
				if exists(filepath.Join(r.m.StateDir, name)) {
					t.Errorf("%s still exists", name)
				}
			}
			want := "claim-node:running info writing the cluster's ID to register 15 of the TPM\n" +
				"claim-node:done info this machine belongs to the cluster\n" +
				"install-components:running info kubeadm, kubelet\n" +
				"install-components:done info Kubernetes v1.35.4\n" +
				"kubeadm-join:running info Kubernetes v1.35.4\n" +
				"kubeadm-join:running info [preflight] Running pre-flight checks\n" +
				"kubeadm-join:done info this machine is a node"
			if s.said() != want || s.ended != 1 {
				t.Errorf("reported (ended %d)\n%s", s.ended, s.said())
			}
			if strings.Contains(r.logged(), "canary") {
				t.Errorf("the log shows a secret:\n%s", r.logged())
			}
			r.tpm.reboot()
			if err := r.start().end(t); err != nil || len(r.kubelets) != 1 || r.kubelets[0] != fmt.Sprintf("%x", clusterB) {
				t.Errorf("reboot: %v, kubelets %q", err, r.kubelets)
			}
		})
	}
}

// The provider decides whether the Node is initialized by a cloud controller manager.
func TestKubeletGetsTheCloudProviderOfItsProvider(t *testing.T) {
	for _, call := range []string{"init", "join"} {
		for provider, want := range map[string]string{"": "", "external": "value: external", "of the machine": "value: external"} {
			t.Run(call+" "+provider, func(t *testing.T) {
				r := newRig(t, cloud.ControlPlane)
				r.m.KubeletCloudProvider = provider
				if provider == "of the machine" {
					r.m.KubeletCloudProvider, r.cloud.instance.CloudProvider = "", "external"
				}
				if call == "join" {
					r.serveJoins(nil)
				}
				x := r.start()
				if call == "init" {
					if got, err := collect(r.console(x.addr).Init(t.Context(), r.request(clusterA))); err != nil || outline(got) != goodInit {
						t.Fatalf("%v, reported %s\n%s", err, outline(got), r.logged())
					}
				} else if err := x.end(t); err != nil {
					t.Fatalf("%v\n%s", err, r.logged())
				}
				b, err := os.ReadFile(filepath.Join(filepath.Dir(r.m.Root), "cloud-"+call))
				if string(b) != want || (err == nil) != (want != "") {
					t.Errorf("kubeadm %s got --cloud-provider %q, %v, want %q", call, b, err, want)
				}
			})
		}
	}
}

// A machine whose image or owner brings patches of the static pods gets them from its first start.
func TestPatchesOfTheHostAreAppliedToANewNode(t *testing.T) {
	for _, call := range []string{"init", "join"} {
		for _, patched := range []bool{true, false} {
			t.Run(fmt.Sprint(call, " ", patched), func(t *testing.T) {
				r := newRig(t, cloud.ControlPlane)
				want := ""
				if patched {
					want = filepath.Join(r.m.Root, "etc/kubernetes/patches")
					if err := os.MkdirAll(want, 0o700); err != nil {
						t.Fatal(err)
					}
				}
				if call == "join" {
					r.serveJoins(nil)
				}
				x := r.start()
				if call == "init" {
					if got, err := collect(r.console(x.addr).Init(t.Context(), r.request(clusterA))); err != nil || outline(got) != goodInit {
						t.Fatalf("%v, reported %s\n%s", err, outline(got), r.logged())
					}
				} else if err := x.end(t); err != nil {
					t.Fatalf("%v\n%s", err, r.logged())
				}
				b, err := os.ReadFile(filepath.Join(filepath.Dir(r.m.Root), "patches-"+call))
				if string(b) != want || patched != (err == nil) {
					t.Errorf("kubeadm %s applies the patches in %q, %v, want %q", call, b, err, want)
				}
			})
		}
	}
}

func TestJoinServicesThatAreNotTrusted(t *testing.T) {
	for _, tt := range []struct {
		name string
		bend func(*service)
		want string // in the log
	}{
		{name: "a join service with another image", bend: func(s *service) { s.member.events = image("evil") }, want: "measurements differ"},
		{name: "a join service on a worker", bend: func(s *service) { s.member.id.Role = cloud.Worker }, want: "expected a control-plane"},
		{name: "a join service of another project", bend: func(s *service) { s.member.id.UID = "other" }, want: "wrong instance"},
		{name: "a join service on a machine that is not a member", bend: func(s *service) { s.member.cluster = nil }, want: "belongs to no cluster"},
		{name: "a join service of another cloud", bend: func(s *service) { s.member.ca = newCA(s.t) }, want: "not trusted"},
		{
			name: "a join service with tickets of another cluster",
			bend: func(s *service) { s.change = func(t *joinproto.IssueJoinTicketResponse) { t.ClusterId = clusterA } }, want: "issued a ticket for a cluster of which it is not a member",
		},
		{name: "a join service whose ticket has no cluster", bend: func(s *service) { s.change = func(t *joinproto.IssueJoinTicketResponse) { t.ClusterId = nil } }, want: "issued a ticket for a cluster of which it is not a member"},
		{name: "a join service whose ticket is malformed", bend: func(s *service) { s.change = func(t *joinproto.IssueJoinTicketResponse) { t.Token = "" } }, want: "token is malformed"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := newRig(t, cloud.Worker)
			r.serveJoins(tt.bend)
			x := r.start()
			wait(t, tt.want, func() bool { return strings.Contains(r.logged(), tt.want) })
			x.stop(t)
			if _, held := r.holder(); held || r.tpm.sealed() != nil || r.calls() != "" || exists(filepath.Join(r.m.StateDir, ticketFile)) {
				t.Error("it had an effect")
			}
		})
	}
}

func TestListedImageIsTrusted(t *testing.T) {
	r := newRig(t, cloud.Worker)
	r.m.Images = []attestation.Measurements{measured("v0.9.0"), measured("v1.0.0")}
	r.serveJoins(func(s *service) { s.member.events = image("v1.0.0") })
	if err := r.start().end(t); err != nil {
		t.Error(err)
	}
}

func later1(c codes.Code, d time.Duration) error { return later(c, "come back", d) }

func TestJoinRetriesUntilItGetsATicket(t *testing.T) {
	r := newRig(t, cloud.Worker)
	s := r.serveJoins(func(s *service) {
		s.answers = []error{
			later1(codes.Unavailable, 10*time.Millisecond),
			later1(codes.ResourceExhausted, 10*time.Millisecond),
			later1(codes.Unavailable, 10*time.Millisecond),
		}
	})
	if err := r.start().end(t); err != nil {
		t.Fatal(err)
	}
	if s.asked() != 4 {
		t.Errorf("asked %d times", s.asked())
	}
	for _, csr := range s.requests[1:] {
		if string(csr) != string(s.requests[0]) {
			t.Error("a second identity")
		}
	}
	csr, err := x509.ParseCertificateRequest(s.requests[0])
	if err != nil {
		t.Fatal(err)
	}
	if csr.Subject.String() != "CN=system:node:worker-0,O=system:nodes" || !slices.Equal(csr.DNSNames, []string{"worker-0"}) ||
		len(csr.IPAddresses) != 1 || csr.IPAddresses[0].String() != "10.42.0.10" {
		t.Errorf("request for %s %v %v", csr.Subject, csr.DNSNames, csr.IPAddresses)
	}
}

func TestJoinKeepsItsIdentityOverRestarts(t *testing.T) {
	r := newRig(t, cloud.Worker)
	s := r.serveJoins(func(s *service) { s.answers = []error{status.Error(codes.PermissionDenied, "not yet")} })
	x := r.start()
	wait(t, "the first request", func() bool { return s.asked() == 1 })
	x.stop(t)
	if err := r.start().end(t); err != nil {
		t.Fatal(err)
	}
	if s.asked() != 2 || string(s.requests[0]) != string(s.requests[1]) {
		t.Errorf("%d requests, and another identity", s.asked())
	}
	os.WriteFile(filepath.Join(r.m.StateDir, keyFile), []byte("torn"), 0o600)
	if _, _, err := (&JoinClient{State: openState(t, r.m.StateDir)}).identity(r.cloud.instance); err == nil || !strings.Contains(err.Error(), "damaged") {
		t.Errorf("damaged key: %v", err)
	}
}

// What etcd has acknowledged stays until etcd has let the member go.
func TestEtcdDataIsKeptUntilTheMemberIsRemoved(t *testing.T) {
	r := newRig(t, cloud.ControlPlane)
	r.script("fail-join", "1")
	s := r.serveJoins(nil)
	if err := os.MkdirAll(filepath.Join(r.m.Root, memberDir), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := r.start().end(t); !errors.Is(err, ErrStuck) {
		t.Errorf("%v, want a failure", err)
	}
	if r.calls() != "join" {
		t.Errorf("kubeadm was called with %s, want no reset", r.calls())
	}
	if said := s.said(); !strings.Contains(said, "read etcd client credentials") {
		t.Errorf("the log lacks the reason:\n%s", said)
	}
}

func TestJoinIsRetriedAfterAReset(t *testing.T) {
	r := newRig(t, cloud.ControlPlane)
	r.script("fail-join", "1\n2")
	s := r.serveJoins(nil)
	if err := r.start().end(t); err != nil {
		t.Fatal(err)
	}
	if r.calls() != "join reset join reset join" || s.asked() != 1 {
		t.Errorf("kubeadm was called with %s, with %d tickets", r.calls(), s.asked())
	}
	said := s.said()
	if !strings.Contains(said, "kubeadm-join:running warn try 2 of 8 failed: kubeadm join: error execution phase join: scripted") || strings.Contains(said, ":failed") {
		t.Errorf("reported\n%s", said)
	}
	if strings.Contains(said, "canary") || strings.Contains(r.logged(), "canary") || strings.Contains(said, "zyxwvu.98") {
		t.Error("a secret leaked")
	}
}

func TestJoinWaitsForItsEarlierNode(t *testing.T) {
	r := newRig(t, cloud.Worker)
	r.script("fail-join", strings.Repeat("1 a Node with name \"worker-0\" and status \"Ready\" already exists in the cluster\n", 3*maxJoins))
	s := r.serveJoins(nil)
	if err := r.start().end(t); err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(r.calls(), "reset join"); n != 3*maxJoins || strings.Contains(s.said(), "try 1 of") {
		t.Errorf("%d further tries:\n%s", n, s.said())
	}
}

func TestJoinThatKeepsFailingEnds(t *testing.T) {
	r := newRig(t, cloud.Worker)
	r.script("fail-join", strings.Repeat("1\n", 3*maxJoins))
	r.serveJoins(nil)
	if err := r.start().end(t); !errors.Is(err, ErrStuck) {
		t.Errorf("got %v", err)
	}
	if n := strings.Count(r.calls(), "join"); n != maxJoins {
		t.Errorf("%d tries", n)
	}
}

func TestJoinThatFailsEndsUntilTheMachineIsRestarted(t *testing.T) {
	r := newRig(t, cloud.Worker)
	r.script("fail-join", "3") // a permanent failure
	s := r.serveJoins(nil)
	err := r.start().end(t)
	if !errors.Is(err, ErrStuck) || !strings.Contains(err.Error(), "scripted") || !strings.Contains(err.Error(), "restart the machine") {
		t.Errorf("ended with %v", err)
	}
	if !strings.Contains(s.said(), "kubeadm-join:failed error ") {
		t.Errorf("reported\n%s", s.said())
	}
	if err := r.start().end(t); !errors.Is(err, ErrStuck) || r.calls() != "join" {
		t.Errorf("a restart of the process: %v, kubeadm was called with %s", err, r.calls())
	}
	r.tpm.reboot()
	if err := r.start().end(t); err != nil {
		t.Errorf("a restart of the machine: %v", err)
	}
	if h, _ := r.holder(); h.State != member || h.Failure != "" || r.calls() != "join reset join" {
		t.Errorf("holder %+v, kubeadm was called with %s", h, r.calls())
	}
}

func TestKilledJoinContinuesWithItsTicket(t *testing.T) {
	r := newRig(t, cloud.ControlPlane)
	r.script("hang-join", "")
	s := r.serveJoins(nil)
	x := r.start()
	wait(t, "kubeadm hangs", func() bool { return exists(filepath.Join(r.ctl, "hanging-join")) })

	// In the meantime a console gets the claimant.
	if _, err := collect(r.console(x.addr).Init(t.Context(), r.request(clusterA))); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("init during a join: %v", err)
	}
	x.stop(t)
	if i, err := os.Stat(filepath.Join(r.m.StateDir, ticketFile)); err != nil || i.Mode() != 0o600 {
		t.Errorf("kept ticket: %v %v", i, err)
	}

	// In the same boot no join service gives it another one.
	r.unscript("hang-join")
	if err := r.start().end(t); err != nil {
		t.Fatal(err)
	}
	if s.asked() != 1 || r.calls() != "join reset join" {
		t.Errorf("%d tickets, kubeadm was called with %s", s.asked(), r.calls())
	}
	// It is reported as the first part was.
	if said := s.said(); !strings.HasSuffix(said, "kubeadm-join:done info this machine is a node") || s.ended != 2 {
		t.Errorf("reported (ended %d)\n%s\n%s", s.ended, said, r.logged())
	}
}

func TestKilledJoinWithoutATicket(t *testing.T) {
	r := newRig(t, cloud.Worker)
	r.script("hang-join", "")
	s := r.serveJoins(nil)
	x := r.start()
	wait(t, "kubeadm hangs", func() bool { return exists(filepath.Join(r.ctl, "hanging-join")) })
	x.stop(t)
	r.unscript("hang-join")
	file := filepath.Join(r.m.StateDir, ticketFile)
	old := time.Now().Add(-ticketLife - time.Second)
	os.Chtimes(file, old, old)
	if err := r.start().end(t); !errors.Is(err, ErrStuck) || !strings.Contains(err.Error(), "restart the machine") {
		t.Errorf("in the same boot: %v", err)
	}
	if exists(file) {
		t.Error("an expired ticket stays on disk")
	}
	// After a reboot it looks unused and is given another one, of its own cluster.
	r.tpm.reboot()
	s.mu.Lock()
	s.change = func(t *joinproto.IssueJoinTicketResponse) { t.ClusterId = clusterA }
	s.member.cluster = clusterA
	s.mu.Unlock()
	x = r.start()
	wait(t, "the other cluster is refused", func() bool {
		return strings.Contains(r.logged(), "belongs to a cluster other than the one that claimed this machine")
	})
	x.stop(t)
	s.mu.Lock()
	s.change, s.member.cluster = nil, clusterB
	s.mu.Unlock()
	if err := r.start().end(t); err != nil {
		t.Errorf("own cluster: %v", err)
	}
}

func TestTicketsThatAreRefused(t *testing.T) {
	worker, controlPlane := newRig(t, cloud.Worker), newRig(t, cloud.ControlPlane)
	for _, tt := range []struct {
		name   string
		r      *rig
		change func(*service, *joinproto.IssueJoinTicketResponse)
		want   string
	}{
		{name: "a short cluster ID", r: worker, change: func(_ *service, t *joinproto.IssueJoinTicketResponse) { t.ClusterId = clusterB[:8] }, want: "8 bytes"},
		{name: "no version", r: worker, change: func(_ *service, t *joinproto.IssueJoinTicketResponse) { t.KubernetesVersion = "" }, want: "version"},
		{name: "components without a digest", r: worker, change: func(_ *service, t *joinproto.IssueJoinTicketResponse) { t.Components[0].Digest = "" }, want: "digest"},
		{name: "lack kubeadm", r: worker, change: func(s *service, t *joinproto.IssueJoinTicketResponse) {
			t.Components = t.Components[1:]
			l, _ := component.FromProto(t.Components)
			t.ComponentsStatement = releasetest.Vouch(s.t, "v1.35.4", l)
		}, want: "lack kubeadm"},
		{name: "no statement, as of an old join service", r: worker, change: func(_ *service, t *joinproto.IssueJoinTicketResponse) { t.ComponentsStatement = "" }, want: "no statement of a release builder"},
		{name: "other programs", r: controlPlane, change: func(_ *service, t *joinproto.IssueJoinTicketResponse) {
			t.Components[1].Url = "http://192.0.2.1/kubelet"
		}, want: "does not cover these components"},
		{name: "another path", r: worker, change: func(_ *service, t *joinproto.IssueJoinTicketResponse) { t.Components[1].Path = "/etc/cron.d/kubelet" }, want: "does not cover these components"},
		{name: "another version", r: worker, change: func(_ *service, t *joinproto.IssueJoinTicketResponse) { t.KubernetesVersion = "v1.34.8" }, want: "does not name Kubernetes v1.34.8"},
		{name: "a statement by another key", r: worker, change: func(s *service, t *joinproto.IssueJoinTicketResponse) {
			k, err := release.NewPrivateKey("stranger")
			if err != nil {
				s.t.Fatal(err)
			}
			t.ComponentsStatement, err = k.Vouch(release.Vouched{"v1.35.4": {runtime.GOARCH: s.r.components().Digest()}})
			if err != nil {
				s.t.Fatal(err)
			}
		}, want: "an untrusted key signed it"},
		{name: "no hash", r: worker, change: func(_ *service, t *joinproto.IssueJoinTicketResponse) { t.DiscoveryTokenCaCertHash = "sha256:ab" }, want: "hash"},
		{name: "no token", r: worker, change: func(_ *service, t *joinproto.IssueJoinTicketResponse) { t.Token = "canary" }, want: "token"},
		{name: "no endpoint", r: worker, change: func(_ *service, t *joinproto.IssueJoinTicketResponse) { t.ApiServerEndpoint = "x" }, want: "endpoint"},
		{name: "no certificate", r: worker, change: func(_ *service, t *joinproto.IssueJoinTicketResponse) { t.KubeletCertificate = nil }, want: "is not a PEM certificate"},
		{name: "a certificate of another node", r: worker, change: func(s *service, t *joinproto.IssueJoinTicketResponse) {
			t.KubeletCertificate = s.ca.sign(s.t, s.requests[0], func(c *x509.Certificate) { c.DNSNames = []string{"worker-1"} })
		}, want: "another node"},
		{name: "a certificate of another key", r: worker, change: func(s *service, t *joinproto.IssueJoinTicketResponse) {
			_, other, err := (&JoinClient{State: openState(s.t, s.t.TempDir())}).identity(s.r.cloud.instance)
			if err != nil {
				s.t.Fatal(err)
			}
			t.KubeletCertificate = s.ca.sign(s.t, other, nil)
		}, want: "another key"},
		{name: "keys of the cluster for a worker", r: worker, change: func(s *service, t *joinproto.IssueJoinTicketResponse) {
			t.ControlPlaneFiles = []*joinproto.File{{Name: "ca.key", Data: s.ca.keyPEM()}}
		}, want: "a worker must not have"},
		{name: "a control plane without keys", r: controlPlane, change: func(_ *service, t *joinproto.IssueJoinTicketResponse) { t.ControlPlaneFiles = nil }, want: "0 of the 8 files"},
		{name: "a control plane with too few", r: controlPlane, change: func(_ *service, t *joinproto.IssueJoinTicketResponse) {
			t.ControlPlaneFiles = slices.DeleteFunc(t.ControlPlaneFiles, func(f *joinproto.File) bool { return f.Name == "sa.key" })
		}, want: "7 of the 8 files"},
		{name: "a file that climbs out", r: controlPlane, change: func(_ *service, t *joinproto.IssueJoinTicketResponse) {
			t.ControlPlaneFiles[0].Name = "../../cron.d/x"
		}, want: "unexpected file"},
		{name: "a file twice", r: controlPlane, change: func(_ *service, t *joinproto.IssueJoinTicketResponse) {
			t.ControlPlaneFiles = append(t.ControlPlaneFiles, t.ControlPlaneFiles[0])
		}, want: "unexpected file"},
		{name: "an empty file", r: controlPlane, change: func(_ *service, t *joinproto.IssueJoinTicketResponse) {
			for _, f := range t.ControlPlaneFiles {
				f.Data = nil
			}
		}, want: "unexpected file"},
		{name: "another authority than its hash says", r: controlPlane, change: func(_ *service, t *joinproto.IssueJoinTicketResponse) {
			other := newAuthority()
			t.DiscoveryTokenCaCertHash = other.hash()
		}, want: "does not match its hash"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := &JoinClient{State: openState(t, t.TempDir())}
			key, csr, err := c.identity(tt.r.cloud.instance)
			if err != nil {
				t.Fatal(err)
			}
			trust, err := release.MachineTrust(tt.r.m.Root)
			if err != nil {
				t.Fatal(err)
			}
			s := &service{t: t, r: tt.r, ca: newAuthority(), requests: [][]byte{csr}}
			good := s.ticket(csr)
			if _, err := parseTicket(good, tt.r.cloud.instance, key, trust, ""); err != nil {
				t.Fatalf("a good ticket: %v", err)
			}
			bad := proto.Clone(good).(*joinproto.IssueJoinTicketResponse)
			tt.change(s, bad)
			_, err = parseTicket(bad, tt.r.cloud.instance, key, trust, "")
			if err == nil || !strings.Contains(err.Error(), tt.want) || strings.Contains(err.Error(), "canary") {
				t.Errorf("got %v, want %q", err, tt.want)
			}
		})
	}
}

func instance(name string, role cloud.Role, ip string) cloud.Instance {
	return cloud.Instance{Name: name, Role: role, IP: netip.MustParseAddr(ip), ProviderID: "sandbox://t/" + name}
}

func TestEndpointsAreTheLoadBalancerAndOtherControlPlanes(t *testing.T) {
	self := instance("control-plane-1", cloud.ControlPlane, "10.42.0.3")
	stopped := instance("control-plane-4", cloud.ControlPlane, "10.42.0.6")
	stopped.State = cloud.Stopped
	peers := []cloud.Instance{
		instance("control-plane-0", cloud.ControlPlane, "10.42.0.2"),
		self,
		instance("control-plane-2", cloud.ControlPlane, "10.42.0.4"),
		instance("worker-0", cloud.Worker, "10.42.0.5"),
		{Name: "control-plane-3", Role: cloud.ControlPlane}, // has no address yet
		stopped,
	}
	for _, tt := range []struct {
		name, lb string
		want     []string
	}{
		{name: "with a load balancer", lb: "10.42.0.1", want: []string{"10.42.0.1:30090", "10.42.0.2:30090", "10.42.0.4:30090"}},
		{name: "without one", lb: "", want: []string{"10.42.0.2:30090", "10.42.0.4:30090"}},
		{name: "with oneself as load balancer", lb: "10.42.0.3", want: []string{"10.42.0.2:30090", "10.42.0.4:30090"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := &JoinClient{Metadata: &fakeCloud{instance: self, peers: peers, lb: tt.lb}, port: joinPort}
			got, err := c.endpoints(t.Context(), self)
			if err != nil || len(got) == 0 || got[0] != tt.want[0] && tt.lb == "10.42.0.1" {
				t.Fatalf("%v, %v: want the load balancer first", got, err)
			}
			slices.Sort(got)
			if !slices.Equal(got, tt.want) {
				t.Errorf("endpoints %v, want %v", got, tt.want)
			}
		})
	}
	var many []cloud.Instance
	for i := range 50 {
		many = append(many, instance(fmt.Sprint("control-plane-", i+5), cloud.ControlPlane, fmt.Sprint("10.42.1.", i)))
	}
	got, _ := (&JoinClient{Metadata: &fakeCloud{peers: many, lb: "10.42.0.1"}, port: joinPort}).endpoints(t.Context(), self)
	if len(got) != 1+maxDirect {
		t.Errorf("%d endpoints of a large cluster", len(got))
	}
	if _, err := (&JoinClient{Metadata: &fakeCloud{err: cloud.ErrUnavailable}}).endpoints(t.Context(), self); !errors.Is(err, cloud.ErrUnavailable) {
		t.Errorf("without its cloud: %v", err)
	}
}

func TestRequestedDelayHasALimit(t *testing.T) {
	with := func(c codes.Code, d time.Duration) error {
		st, err := status.New(c, "later").WithDetails(&errdetails.RetryInfo{RetryDelay: durationpb.New(d)})
		if err != nil {
			t.Fatal(err)
		}
		return st.Err()
	}
	for _, tt := range []struct {
		name string
		err  error
		want time.Duration
	}{
		{name: "the requested delay", err: with(codes.Unavailable, 3*time.Second), want: 3 * time.Second},
		{name: "the requested delay of ResourceExhausted", err: with(codes.ResourceExhausted, time.Second), want: time.Second},
		{name: "a delay of hours is limited", err: with(codes.Unavailable, 5*time.Hour), want: maxAsked},
		{name: "a negative delay is ignored", err: with(codes.Unavailable, -time.Hour), want: 0},
		{name: "a refusal without a delay", err: with(codes.PermissionDenied, time.Second), want: 0},
		{name: "an error that is not a status", err: errors.New("x"), want: 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := askedToWait(tt.err); got != tt.want {
				t.Errorf("waits %v, want %v", got, tt.want)
			}
		})
	}
}

func TestPauseIsBoundedAndEndsWithItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, limit := range []time.Duration{quietPause, maxPause} {
			var p pause
			var longest time.Duration
			for range 300 {
				start := time.Now()
				if err := p.wait(t.Context(), 0, limit); err != nil {
					t.Fatal(err)
				}
				d := time.Since(start)
				if longest = max(longest, d); d < minPause || d > limit {
					t.Fatalf("paused %v, want %v to %v", d, minPause, limit)
				}
			}
			if longest < limit*3/4 {
				t.Errorf("never paused for longer than %s, although it may for %s", longest, limit)
			}
		}
		var p pause
		start := time.Now()
		if err := p.wait(t.Context(), 7*time.Second, quietPause); err != nil || time.Since(start) != 7*time.Second {
			t.Errorf("asked for 7 s, paused %s", time.Since(start))
		}
		ctx, cancel := context.WithCancelCause(t.Context())
		cancel(errClaimed)
		if err := p.wait(ctx, time.Hour, maxPause); !errors.Is(err, errClaimed) {
			t.Errorf("pause ended with %v, want the cause", err)
		}
	})
}

func TestInitEndsTheJoin(t *testing.T) {
	r := newRig(t, cloud.ControlPlane)
	s := r.serveJoins(func(s *service) {
		for range 1000 {
			s.answers = append(s.answers, later1(codes.Unavailable, 5*time.Millisecond))
		}
	})
	x := r.start()
	wait(t, "the join asks", func() bool { return s.asked() > 3 })
	if got, err := collect(r.console(x.addr).Init(t.Context(), r.request(clusterA))); err != nil || outline(got) != goodInit {
		t.Fatalf("%s, %v", outline(got), err)
	}
	wait(t, "the join ends", func() bool { return strings.Contains(r.logged(), "join ended, an init claimed the node") })
	if _, err := r.console(x.addr).Ack(t.Context(), &initproto.AckRequest{InitSecret: initSecret}); err != nil {
		t.Fatal(err)
	}
	if err := x.end(t); err != nil {
		t.Error(err)
	}
}

// TestInitAndJoinRaceForAMachine runs the race; everything except kubeadm is real.
func TestInitAndJoinRaceForAMachine(t *testing.T) {
	wins, rounds := map[string]int{}, 20
	if testing.Short() {
		rounds = 5
	}
	for round := range rounds {
		r := newRig(t, cloud.ControlPlane)
		var x *run
		ready := make(chan struct{})
		s := r.serveJoins(func(s *service) {
			s.change = func(*joinproto.IssueJoinTicketResponse) {
				<-ready
				time.Sleep(time.Duration(round%10) * 700 * time.Microsecond)
			}
		})
		x = r.start()
		client := r.console(x.addr)
		close(ready)
		got, err := collect(client.Init(t.Context(), r.request(clusterA)))
		h, _ := r.holder()
		wins[h.By]++
		if h.By == byInit {
			if err != nil || outline(got) != goodInit || string(r.tpm.sealed()) != string(clusterA) || strings.Contains(r.calls(), "join") {
				t.Errorf("round %d: %s, %v, kubeadm was called with %s", round, outline(got), err, r.calls())
			}
			x.stop(t)
			continue
		}
		// The console gets the claimant, or a lost connection.
		if c := status.Code(err); c != codes.FailedPrecondition && c != codes.Unavailable || len(got) > 0 {
			t.Errorf("round %d: %v, %s", round, err, outline(got))
		}
		if err := x.end(t); err != nil || r.calls() != "join" || string(r.tpm.sealed()) != string(clusterB) {
			t.Errorf("round %d: %v, kubeadm was called with %s", round, err, r.calls())
		}
		if s.asked() != 1 {
			t.Errorf("round %d: %d tickets", round, s.asked())
		}
	}
	t.Logf("won: %v", wins)
}
