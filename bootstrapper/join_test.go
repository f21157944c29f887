package bootstrapper

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"log/slog"
	"math/big"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	"constellation/engine/cloud"
	"constellation/joinservice/joinproto"
)

// fakeCloud is metadata in memory.
type fakeCloud struct {
	self  cloud.Instance
	peers []cloud.Instance
	lb    string
	err   error
}

func (f *fakeCloud) Self(context.Context) (cloud.Instance, error)    { return f.self, f.err }
func (f *fakeCloud) Peers(context.Context) ([]cloud.Instance, error) { return f.peers, f.err }
func (f *fakeCloud) LoadBalancer(context.Context) (string, error)    { return f.lb, f.err }

func instance(name string, role cloud.Role, ip string) cloud.Instance {
	return cloud.Instance{Name: name, Role: role, IP: netip.MustParseAddr(ip), ProviderID: "sandbox://t/" + name}
}

func TestEndpointsAreTheLoadBalancerAndEveryOtherControlPlane(t *testing.T) {
	self := instance("control-plane-1", cloud.ControlPlane, "10.42.0.3")
	peers := []cloud.Instance{
		instance("control-plane-0", cloud.ControlPlane, "10.42.0.2"),
		self,
		instance("control-plane-2", cloud.ControlPlane, "10.42.0.4"),
		instance("worker-0", cloud.Worker, "10.42.0.5"),
		{Name: "control-plane-3", Role: cloud.ControlPlane}, // has no address yet
	}
	for _, tt := range []struct {
		name string
		lb   string
		want []string
	}{
		{"with a load balancer", "10.42.0.1", []string{"10.42.0.1:30090", "10.42.0.2:30090", "10.42.0.4:30090"}},
		{"without one", "", []string{"10.42.0.2:30090", "10.42.0.4:30090"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := &JoinClient{Metadata: &fakeCloud{self: self, peers: slices.Clone(peers), lb: tt.lb}}
			got, err := c.endpoints(t.Context(), self)
			if err != nil {
				t.Fatal(err)
			}
			if tt.lb != "" && got[0] != tt.want[0] {
				t.Errorf("asks %s first, want the load balancer", got[0])
			}
			slices.Sort(got)
			if !slices.Equal(got, tt.want) {
				t.Errorf("endpoints %v, want %v", got, tt.want)
			}
		})
	}
	if _, err := (&JoinClient{Metadata: &fakeCloud{err: cloud.ErrUnavailable}}).endpoints(t.Context(), self); !errors.Is(err, cloud.ErrUnavailable) {
		t.Errorf("without its cloud: %v, want %v", err, cloud.ErrUnavailable)
	}
}

func TestKeyAndRequestStayTheSameOverRestarts(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	one, err := (&JoinClient{Dir: dir}).key()
	if err != nil {
		t.Fatal(err)
	}
	two, err := (&JoinClient{Dir: dir}).key()
	if err != nil {
		t.Fatal(err)
	}
	if !one.Equal(two) {
		t.Error("a restarted client has another key")
	}
	for name, mode := range map[string]os.FileMode{dir: 0o700, filepath.Join(dir, keyFile): 0o600} {
		if fi, err := os.Stat(name); err != nil || fi.Mode().Perm() != mode {
			t.Errorf("%s has mode %v (%v), want %o", name, fi.Mode().Perm(), err, mode)
		}
	}
	der, err := request(instance("worker-0", cloud.Worker, "10.42.0.5"), one)
	if err != nil {
		t.Fatal(err)
	}
	csr, err := x509.ParseCertificateRequest(der)
	if err != nil {
		t.Fatal(err)
	}
	if got := csr.Subject.String(); got != "CN=system:node:worker-0,O=system:nodes" {
		t.Errorf("subject %s", got)
	}
	if len(csr.IPAddresses) != 1 || csr.IPAddresses[0].String() != "10.42.0.5" || !slices.Equal(csr.DNSNames, []string{"worker-0"}) {
		t.Errorf("names %v %v", csr.IPAddresses, csr.DNSNames)
	}
	if err := os.WriteFile(filepath.Join(dir, keyFile), []byte("torn"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := (&JoinClient{Dir: dir}).key(); err == nil || !strings.Contains(err.Error(), "damaged") {
		t.Errorf("a damaged key: %v, want an error that says so", err)
	}
}

func TestTicketIsKeptUntilItExpires(t *testing.T) {
	c := &JoinClient{Dir: t.TempDir()}
	if c.HasTicket() {
		t.Fatal("a ticket out of nowhere")
	}
	if err := c.keepTicket(&joinproto.IssueJoinTicketResponse{Token: "abcdef.0123456789abcdef"}); err != nil {
		t.Fatal(err)
	}
	if fi, err := os.Stat(filepath.Join(c.Dir, ticketFile)); err != nil || fi.Mode().Perm() != 0o600 {
		t.Fatalf("ticket file: %v, %v", fi, err)
	}
	if got, err := c.keptTicket(time.Now().Add(ticketLife - time.Second)); err != nil || got.GetToken() != "abcdef.0123456789abcdef" {
		t.Errorf("kept ticket %v, %v", got != nil, err)
	}
	if got, err := c.keptTicket(time.Now().Add(ticketLife + time.Second)); err != nil || got != nil {
		t.Errorf("an expired ticket is used (%v)", err)
	}
	if _, err := os.Stat(filepath.Join(c.Dir, ticketFile)); err == nil {
		t.Error("an expired ticket stays on disk")
	}
	if err := os.WriteFile(filepath.Join(c.Dir, ticketFile), []byte{0xff, 0xff}, 0o600); err != nil {
		t.Fatal(err)
	}
	if c.HasTicket() {
		t.Error("a damaged ticket is used")
	}
}

// certificate returns a kubelet certificate for pub, signed by itself.
func certificate(t *testing.T, signer *ecdsa.PrivateKey) []byte {
	t.Helper()
	tmpl := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "system:node:n"}, NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, signer.Public(), signer)
	if err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
}

func TestFilesOfATicket(t *testing.T) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	other, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	pki := []*joinproto.File{{Name: "ca.crt", Data: []byte("c")}, {Name: "etcd/ca.key", Data: []byte("k")}}
	worker, controlPlane := instance("w", cloud.Worker, "10.42.0.9"), instance("c", cloud.ControlPlane, "10.42.0.8")
	for _, tt := range []struct {
		name   string
		self   cloud.Instance
		ticket *joinproto.IssueJoinTicketResponse
		want   map[string]os.FileMode // files, or
		err    string
	}{
		{
			"a worker gets its certificate alone", worker,
			&joinproto.IssueJoinTicketResponse{KubeletCertificate: certificate(t, key), ControlPlaneFiles: pki},
			map[string]os.FileMode{"var/lib/kubelet/pki/serving.crt": 0o644, "var/lib/kubelet/pki/serving.key": 0o600}, "",
		},
		{
			"a control plane gets the authorities, keys for root alone", controlPlane,
			&joinproto.IssueJoinTicketResponse{KubeletCertificate: certificate(t, key), ControlPlaneFiles: pki},
			map[string]os.FileMode{
				"etc/kubernetes/pki/ca.crt": 0o644, "etc/kubernetes/pki/etcd/ca.key": 0o600, "var/lib/kubelet/pki/serving.key": 0o600,
				"etc/kubernetes/constellation/audit.yaml": 0o600,
			}, "",
		},
		{"a control plane without authorities", controlPlane, &joinproto.IssueJoinTicketResponse{KubeletCertificate: certificate(t, key)}, nil, "no authorities"},
		{"a certificate of somebody else", worker, &joinproto.IssueJoinTicketResponse{KubeletCertificate: certificate(t, other)}, nil, "another key"},
		{"no certificate", worker, &joinproto.IssueJoinTicketResponse{}, nil, "no PEM"},
		{
			"a file that climbs out", controlPlane,
			&joinproto.IssueJoinTicketResponse{KubeletCertificate: certificate(t, key), ControlPlaneFiles: []*joinproto.File{{Name: "../../cron.d/x.key"}}},
			nil, "none of a cluster's PKI",
		},
		{
			"a file that is no key and no certificate", controlPlane,
			&joinproto.IssueJoinTicketResponse{KubeletCertificate: certificate(t, key), ControlPlaneFiles: []*joinproto.File{{Name: "evil.sh"}}},
			nil, "none of a cluster's PKI",
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := &JoinClient{Root: t.TempDir()}
			err := c.writeFiles(tt.self, key, tt.ticket)
			if tt.err != "" {
				if err == nil || !strings.Contains(err.Error(), tt.err) {
					t.Fatalf("error %v, want one that says %q", err, tt.err)
				}
				if e, _ := os.ReadDir(c.Root); len(e) > 0 {
					t.Errorf("something was written: %v", e)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			for name, mode := range tt.want {
				if fi, err := os.Stat(filepath.Join(c.Root, name)); err != nil || fi.Mode().Perm() != mode {
					t.Errorf("%s: %v, %v; want mode %o", name, fi, err, mode)
				}
			}
			if _, err := os.Stat(filepath.Join(c.Root, "etc/kubernetes/pki")); err == nil && tt.self.Role == cloud.Worker {
				t.Error("a worker holds the cluster's authorities")
			}
		})
	}
}

func TestAskedToWaitHasALimit(t *testing.T) {
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
		{"as long as it says", with(codes.Unavailable, 3*time.Second), 3 * time.Second},
		{"also when it is exhausted", with(codes.ResourceExhausted, time.Second), time.Second},
		{"but not for hours", with(codes.Unavailable, 5*time.Hour), maxAsked},
		{"a refusal asks for nothing", with(codes.PermissionDenied, time.Second), 0},
		{"nor does an error of our own", errors.New("x"), 0},
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
		var p pause
		for range 200 {
			start := time.Now()
			if err := p.wait(t.Context(), 0); err != nil {
				t.Fatal(err)
			}
			if d := time.Since(start); d < minPause || d > maxPause {
				t.Fatalf("paused %v, want %v to %v", d, minPause, maxPause)
			}
		}
		ctx, cancel := context.WithCancelCause(t.Context())
		cancel(errClaimed)
		if err := p.wait(ctx, time.Hour); !errors.Is(err, errClaimed) {
			t.Errorf("pause ended with %v, want the cause", err)
		}
	})
}

// heldLock is a node lock that an init has taken.
type heldLock struct{ claimed chan struct{} }

func (heldLock) ClaimJoin(context.Context, []byte) error { return errClaimed }
func (heldLock) Joined(context.Context) error            { return errors.New("joined a node of an init") }
func (l heldLock) Claimed() <-chan struct{}              { return l.claimed }

func TestJoinEndsWhenAnInitClaimsTheNode(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := heldLock{make(chan struct{})}
		c := &JoinClient{Metadata: &fakeCloud{err: cloud.ErrUnavailable}, Lock: l, Dir: t.TempDir(), Log: slog.New(slog.DiscardHandler)}
		ended := make(chan error, 1)
		go func() { ended <- c.Run(t.Context()) }()
		time.Sleep(time.Minute) // of the bubble's clock: it waits for its cloud
		select {
		case err := <-ended:
			t.Fatalf("join ended with %v before anything happened", err)
		default:
		}
		close(l.claimed)
		if err := <-ended; err != nil {
			t.Errorf("join ended with %v, want nil", err)
		}
	})
}
