package joinservice

import (
	"bytes"
	"context"
	"crypto/x509"
	"fmt"
	"log/slog"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"constellation/engine/atls"
	"constellation/engine/attestation"
	"constellation/engine/attestation/keyprocess"
	"constellation/engine/cloud"
	"constellation/engine/revocation"
	"constellation/internal/syncbuffer"
	"constellation/joinservice/joinproto"
)

// TestCapturedJoinServiceGetsNoKeys asks a CA signer as an attacker does who has captured its join service.
func TestCapturedJoinServiceGetsNoKeys(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	r := s.start("control-plane-0")
	ca, err := os.ReadFile(s.cp.PKI() + "/ca.key")
	if err != nil {
		t.Fatal(err)
	}
	ask := func(m keyprocess.Message) (keyprocess.Message, error) {
		return keyprocess.Call(t.Context(), keyprocess.CASigner, r.socket, m)
	}
	// sealing returns the request of a machine, and its key.
	sealing := func(issuer attestation.Issuer) (keyprocess.Message, *joinproto.Sealing) {
		t.Helper()
		key, err := joinproto.NewSealing(t.Context(), issuer.Issue)
		if err != nil {
			t.Fatal(err)
		}
		var req joinproto.IssueJoinTicketRequest
		key.Ask(&req)
		return keyprocess.Message{Op: keyprocess.SealSecrets, Recipient: req.GetSealingKey(), Document: req.GetSealingEvidence()}, key
	}
	good, goodIssuer := s.machine("control-plane-1", cloud.ControlPlane, goodBoot, nil)
	_, worker := s.machine("worker-1", cloud.Worker, goodBoot, nil)
	other := s.issuer(good, nextBoot, nil)
	node, nodeIssuer := s.machine("control-plane-2", cloud.ControlPlane, goodBoot, nil)
	if _, err := s.admin.CoreV1().Nodes().Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: node.Name}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	revoked, revokedIssuer := s.machine("control-plane-3", cloud.ControlPlane, goodBoot, nil)
	s.revoke(map[string]revocation.Entry{revoked.Name: entry(revoked)})
	defer s.forgive()
	unlisted, unlistedIssuer := s.machine("control-plane-4", cloud.ControlPlane, goodBoot, nil)
	s.sky.set(func(k *sky) {
		for n := range k.instances {
			if k.instances[n].Name == unlisted.Name {
				k.instances[n].Role = cloud.Worker
			}
		}
	})
	genuine, key := sealing(goodIssuer)
	foreign, _ := sealing(goodIssuer)
	foreign.Recipient = genuine.Recipient
	of := func(issuer attestation.Issuer) keyprocess.Message {
		m, _ := sealing(issuer)
		return m
	}
	// The signer attests its own machine for any caller.
	own := of(signerIssuer{&signerClient{socket: r.socket}, attestation.TPM2})
	elsewhere, service := good, good
	elsewhere.IP = netip.MustParseAddr("10.42.0.250")
	foreignAddress := keyprocess.Message{Op: keyprocess.SignServing, Machine: &elsewhere, Request: csr(t, elsewhere, p256(t), nil)}
	service.Name = "kubernetes.default.svc"
	unknown := keyprocess.Message{Op: keyprocess.SignServing, Machine: &service, Request: csr(t, service, p256(t), nil)}
	client := &x509.CertificateRequest{}
	for _, tt := range []struct {
		name string
		m    keyprocess.Message
		want string
	}{
		{name: "by a name alone", m: keyprocess.Message{Op: keyprocess.SealSecrets, Machine: &good}, want: "join-config accepts no image before v1.1.0"},
		{name: "without evidence", m: keyprocess.Message{Op: keyprocess.SealSecrets, Recipient: genuine.Recipient, Machine: &good}, want: "a document of 0 bytes"},
		{name: "evidence of another key", m: foreign, want: "quote"},
		{name: "evidence of this machine", m: own, want: "quote"},
		{name: "a certificate of another address", m: foreignAddress, want: "address of control-plane-1"},
		{name: "a certificate of an address of the cluster", m: unknown, want: "does not list this instance"},
		{name: "a certificate of a node", m: keyprocess.Message{Op: keyprocess.SignServing, Machine: &node, Request: csr(t, node, p256(t), nil)}, want: "a Node of this name exists"},
		{name: "a worker", m: of(worker), want: "only control planes"},
		{name: "another boot", m: of(other), want: "PCR 4 (boot loader)"},
		{name: "a former node", m: of(nodeIssuer), want: "a Node of this name exists"},
		{name: "a revoked machine", m: of(revokedIssuer), want: "was revoked"},
		{name: "a worker of the cloud", m: of(unlistedIssuer), want: "role of control-plane-4"},
		{name: "the keys of the certifier", m: keyprocess.Message{Op: keyprocess.HandOver, Machine: &good}, want: `operation "hand-over" is not known`},
		{name: "the certifier of a cluster without one", m: keyprocess.Message{Op: keyprocess.Rotate}, want: "this cluster has no certifier"},
		{name: "a generation of no owner", m: keyprocess.Message{Op: keyprocess.Raise, Generation: 2}, want: "join-config does not have this generation"},
		{name: "a mode of no owner", m: keyprocess.Message{Op: keyprocess.Encryption, Encryption: "read"}, want: "join-config does not have this generation or mode"},
		{name: "a certificate for no machine", m: keyprocess.Message{Op: keyprocess.SignServing, Request: csr(t, good, p256(t), nil)}, want: "names no machine"},
		{name: "a certificate of an administrator", m: keyprocess.Message{Op: keyprocess.SignServing, Machine: &good, Request: csr(t, good, p256(t), func(c *x509.CertificateRequest) {
			client = c
			c.Subject.CommonName, c.Subject.Organization = "admin", []string{"system:masters"}
		})}, want: "its subject is"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, err := ask(tt.m)
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error %v, want %q", err, tt.want)
			}
			if len(got.Sealed)+len(got.Keys)+len(got.Certificate) > 0 {
				t.Errorf("the answer has content: %v", got)
			}
		})
	}
	t.Run("evidence for another purpose", func(t *testing.T) {
		member := attestation.NewTPMValidator(s.ca.Roots(), attestation.Enforced(attestation.PredictPCRs(goodBoot)), attestation.Options{PCR15: attestation.PCR15Member()})
		nonce, public := bytes.Repeat([]byte{1}, 32), []byte("a public key")
		join := atls.ServerBinding(atls.PurposeJoin, nonce, public)
		for name, m := range map[string]keyprocess.Message{
			"as a server":        {Op: keyprocess.Evidence, Request: nonce, Recipient: public},
			"of a chosen digest": {Op: keyprocess.OwnEvidence, Request: join},
			"of a chosen nonce":  {Op: keyprocess.Evidence, Request: atls.ServerBinding(atls.PurposeInit, nonce, public)},
		} {
			got, err := ask(m)
			if err != nil {
				t.Fatal(err)
			}
			_, err = member.Validate(t.Context(), got.Document, join)
			if ok := err == nil; ok != (name == "as a server") {
				t.Errorf("%s: accepted as a join service %t, %v", name, ok, err)
			}
			if _, err := member.Validate(t.Context(), got.Document, atls.ServerBinding(atls.PurposeInit, nonce, public)); err == nil {
				t.Errorf("%s: accepted as a machine that waits for keys", name)
			}
		}
	})
	if client.Subject.CommonName != "admin" {
		t.Error("the request of an administrator was not made")
	}

	t.Run("a machine that may join", func(t *testing.T) {
		got, err := ask(genuine)
		if err != nil {
			t.Fatal(err)
		}
		if bytes.Contains(got.Sealed, bytes.TrimSpace(ca)[30:60]) {
			t.Error("the answer has the CA's key in the clear")
		}
		_, another := sealing(goodIssuer)
		if err := another.Open(&joinproto.IssueJoinTicketResponse{SealedSecrets: bytes.Clone(got.Sealed)}); err == nil {
			t.Error("another key opens it")
		}
		for _, n := range []int{0, len(got.Sealed) / 2, len(got.Sealed) - 1} {
			damaged := bytes.Clone(got.Sealed)
			damaged[n] ^= 1
			if err := key.Open(&joinproto.IssueJoinTicketResponse{SealedSecrets: damaged}); err == nil {
				t.Errorf("it opens with a change at byte %d", n)
			}
		}
		var ticket joinproto.IssueJoinTicketResponse
		ticket.SealedSecrets = got.Sealed
		ticket.ApiServerEndpoint, ticket.KmsMode = "10.42.0.250:7777", "read" // of a captured join service
		if err := key.Open(&ticket); err != nil {
			t.Fatal(err)
		}
		if want := "10.42.0.1:6443"; ticket.GetApiServerEndpoint() != want {
			t.Errorf("the machine joins at %q, want %q", ticket.GetApiServerEndpoint(), want)
		}
		var have []byte
		for _, f := range ticket.GetControlPlaneFiles() {
			if f.GetName() == "ca.key" {
				have = f.GetData()
			}
		}
		if ticket.GetKmsMode() != "" {
			t.Errorf("the machine gets mode %q of the join service", ticket.GetKmsMode())
		}
		if !bytes.Equal(have, ca) {
			t.Errorf("the machine gets %d bytes of ca.key, want %d", len(have), len(ca))
		}
		for name, log := range map[string]string{"signer": r.signed.String(), "join service": r.log.String()} {
			if strings.Contains(log, string(bytes.TrimSpace(ca)[30:60])) {
				t.Errorf("the log of the %s has the CA's key", name)
			}
		}
		if !strings.Contains(r.signed.String(), `"msg":"keys encrypted for a control plane","caller_pid":`) {
			t.Errorf("the log of the signer does not say who got keys:\n%s", &r.signed)
		}
	})
}

// TestBootstrappersOfEarlierReleases get secrets without encryption only while join-config accepts an image of such a release.
func TestBootstrappersOfEarlierReleases(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	r := s.start("control-plane-0")
	id, issuer := s.machine("control-plane-1", cloud.ControlPlane, goodBoot, nil)
	plain := func() (*joinproto.IssueJoinTicketResponse, error) {
		return s.dial(r.addr, issuer).IssueJoinTicket(t.Context(), &joinproto.IssueJoinTicketRequest{CertificateRequest: csr(t, id, p256(t), nil)})
	}
	_, err := plain()
	refused(t, err, codes.PermissionDenied, errSecrets.Error())
	if s.token(id.Name) != nil {
		t.Error("a machine that gets no keys got a token")
	}
	if !strings.Contains(r.log.String(), "its bootstrapper is older than v1.1.0") {
		t.Errorf("the log of the join service lacks the reason:\n%s", r.log)
	}
	for _, tt := range []struct {
		image string
		want  bool
	}{{image: "v1.0.0", want: true}, {image: "v1.1.0"}, {image: "v1.0.9", want: true}, {image: "v1.1.0-rc.1", want: true}, {image: "v1.2.0"}, {image: "unknown"}} {
		s.rawJoinConfig(s.demand(goodBoot), map[string]string{tt.image: s.demand(nextBoot)})
		eventually(t, "the answer with an image "+tt.image, func() (string, bool) {
			got, err := plain()
			if tt.want {
				return fmt.Sprint(err), err == nil && len(got.GetControlPlaneFiles()) == len(controlPlaneFiles) && len(got.GetSealedSecrets()) == 0
			}
			return fmt.Sprint(err), err != nil && strings.Contains(err.Error(), errSecrets.Error())
		})
	}
	if !strings.Contains(r.signed.String(), "keys given to a control plane without encryption") {
		t.Errorf("the log of the signer lacks the warning:\n%s", &r.signed)
	}
}

// TestJoinServiceWaitsForItsSigner has the CA signer end and start again.
func TestJoinServiceWaitsForItsSigner(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	id, machine := s.machine("control-plane-0", cloud.ControlPlane, goodBoot, clusterID)
	r := s.run(machine, "127.0.0.1:0")
	joiner, issuer := s.machine("worker-1", cloud.Worker, goodBoot, nil)
	c := s.dial(r.addr, issuer)
	if _, err := request(t, c, joiner, issuer); err != nil {
		t.Fatal(err)
	}
	ready := func(want int) {
		t.Helper()
		eventually(t, "the answer of /readyz", func() (string, bool) {
			resp, err := http.Get(r.health + "/readyz")
			if err != nil {
				return err.Error(), false
			}
			resp.Body.Close()
			return resp.Status, resp.StatusCode == want
		})
	}
	r.stopSigner()
	_, err := request(t, c, joiner, issuer)
	refused(t, err, codes.Unavailable, errSigner.Error())
	ready(http.StatusServiceUnavailable)
	l, err := keyprocess.Listen(t.Context(), r.socket, nil)
	if err != nil {
		t.Fatal(err)
	}
	signer, err := NewSigner(SignerConfig{Access: Access{Cluster: s.access(), Namespace: namespace, Metadata: s.sky, Attestation: attestation.TPMMethod()}, Issuer: s.issuer(id, goodBoot, clusterID), PKI: s.cp.PKI(), APIServerPort: 6443})
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- signer.Run(t.Context(), l) }()
	t.Cleanup(func() {
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	if _, err := request(t, c, joiner, issuer); err != nil {
		t.Errorf("after its restart: %v", err)
	}
	ready(http.StatusOK)
}

// TestPanicEndsOneRequest has a process with keys panic. Its log has no part of the panic's value, which could quote a secret.
func TestPanicEndsOneRequest(t *testing.T) {
	t.Parallel()
	socket, log := filepath.Join(t.TempDir(), "s"), &syncbuffer.Buffer{}
	l, err := keyprocess.Listen(t.Context(), socket, nil)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		done <- keyprocess.Serve(ctx, l, slog.New(slog.NewJSONHandler(log, nil)), func(_ context.Context, m keyprocess.Message, _ *slog.Logger) (keyprocess.Message, error) {
			if m.Op == keyprocess.Evidence {
				panic("canary")
			}
			return keyprocess.Message{ID: "answered"}, nil
		})
	}()
	_, err = keyprocess.Call(t.Context(), keyprocess.CASigner, socket, keyprocess.Message{Op: keyprocess.Evidence})
	if err == nil || !strings.Contains(err.Error(), "the process failed, see its log") {
		t.Errorf("a request that panics: %v", err)
	}
	if got, err := keyprocess.Call(t.Context(), keyprocess.CASigner, socket, keyprocess.Message{Op: keyprocess.Authority}); err != nil || got.ID != "answered" {
		t.Errorf("the next request: %v, %v", got.ID, err)
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
	if text := log.String(); !strings.Contains(text, "request to a process with keys panicked") || strings.Contains(text, "canary") {
		t.Errorf("its log:\n%s", text)
	}
}

// Secrets that cannot be encrypted are refused, without a panic.
func TestSealRefuses(t *testing.T) {
	t.Parallel()
	secrets := &joinproto.ControlPlaneSecrets{KmsKeys: []byte("canary")}
	for name, public := range map[string][]byte{"no key": nil, "a short key": {1, 2, 3}, "a long key": make([]byte, 1<<20), "zeros": make([]byte, 32)} {
		if got, err := joinproto.Seal(public, secrets); err == nil || strings.Contains(err.Error(), "canary") {
			t.Errorf("%s: %d bytes, %v", name, len(got), err)
		}
	}
	key, err := joinproto.NewSealing(t.Context(), func(context.Context, []byte) ([]byte, error) { return []byte("evidence"), nil })
	if err != nil {
		t.Fatal(err)
	}
	var req joinproto.IssueJoinTicketRequest
	key.Ask(&req)
	sealed, err := joinproto.Seal(req.GetSealingKey(), secrets)
	if err != nil {
		t.Fatal(err)
	}
	twice := &joinproto.IssueJoinTicketResponse{SealedSecrets: sealed, KmsKeys: []byte("another")}
	if err := key.Open(twice); err == nil || !strings.Contains(err.Error(), "secrets twice") {
		t.Errorf("a ticket with secrets twice: %v", err)
	}
	want := &joinproto.IssueJoinTicketResponse{KmsKeys: []byte("old")}
	have := proto.Clone(want).(*joinproto.IssueJoinTicketResponse)
	if err := key.Open(have); err != nil || !proto.Equal(want, have) {
		t.Errorf("a ticket of an earlier release became %v, %v", have, err)
	}
}
