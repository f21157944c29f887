package bootstrapper

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	mathrand "math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"constellation/engine/atls"
	"constellation/engine/attestation"
	"constellation/engine/cloud"
	"constellation/engine/component"
	"constellation/engine/kubeadm"
	"constellation/joinservice/joinproto"
)

const (
	// joinPort is the NodePort of the join service.
	joinPort = "30090"

	ticketTimeout = 30 * time.Second
	// Pauses between tries are drawn between minPause and three times the last one,
	// at most maxPause (decorrelated jitter), so that machines that booted together
	// do not ask together.
	minPause = 500 * time.Millisecond
	maxPause = 30 * time.Second
	// maxAsked bounds what a join service can ask a machine to wait.
	maxAsked = 2 * time.Minute
	// maxJoins bounds how often kubeadm join is tried with one ticket.
	maxJoins = 5
	// ticketLife is how long a ticket is good for; its token is valid for 15 minutes.
	ticketLife = 14 * time.Minute

	keyFile    = "kubelet-serving.key"
	ticketFile = "join-ticket"
)

// errClaimed means that an init holds the node.
var errClaimed = errors.New("the node was claimed by an init")

// nodeLock is what a JoinClient needs of the lock of this node.
type nodeLock interface {
	// ClaimJoin takes the node for the cluster, persists it and extends PCR 15. The
	// error wraps errClaimed if an init holds it. Calling it again with the same
	// cluster is fine.
	ClaimJoin(ctx context.Context, clusterID []byte) error
	// Joined records that the node is a member.
	Joined(ctx context.Context) error
	// Claimed is closed when an init has claimed the node.
	Claimed() <-chan struct{}
}

// metadata is what a JoinClient asks its cloud.
type metadata interface {
	Self(context.Context) (cloud.Instance, error)
	Peers(context.Context) ([]cloud.Instance, error)
	LoadBalancer(context.Context) (string, error)
}

// JoinClient makes this machine a node of the cluster whose join service accepts
// its evidence. All fields but Root are required.
type JoinClient struct {
	Metadata metadata
	Lock     nodeLock
	// Issuer proves what this machine booted; Validator judges join services.
	Issuer    attestation.Issuer
	Validator func() attestation.Validator
	Installer *component.Installer
	Kubeadm   *kubeadm.Runner
	// Dir keeps the node's key and an unused ticket over restarts; only root enters it.
	Dir string
	// Root is where the host's file system begins; "" means "/".
	Root string
	Log  *slog.Logger
}

// Run asks for a ticket until it gets one, claims the node and joins. It returns nil
// when the node is a member, or when an init claimed it first. It returns an error
// when ctx ends, and when a claimed node could not join: then only a restart of the
// machine, which resets its TPM, lets it ask again.
func (c *JoinClient) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	done := make(chan struct{})
	defer close(done)
	go func() {
		select {
		case <-c.Lock.Claimed():
			cancel(errClaimed)
		case <-done:
		}
	}()
	err := c.run(ctx)
	if errors.Is(err, errClaimed) || err != nil && errors.Is(context.Cause(ctx), errClaimed) {
		c.Log.Info("join ended, an init claimed the node")
		return nil
	}
	return err
}

func (c *JoinClient) run(ctx context.Context) error {
	self, err := c.self(ctx)
	if err != nil {
		return err
	}
	key, err := c.key()
	if err != nil {
		return err
	}
	csr, err := request(self, key)
	if err != nil {
		return err
	}
	t, err := c.keptTicket(time.Now())
	if err != nil {
		return err
	}
	if t != nil {
		c.Log.Info("join resumed with the ticket at hand")
		return c.join(ctx, self, key, t, nil)
	}
	t, conn, err := c.ticket(ctx, self, csr)
	if err != nil {
		return err
	}
	defer conn.Close()
	if err := c.Lock.ClaimJoin(ctx, t.GetClusterId()); err != nil {
		return fmt.Errorf("claim the node: %w", err)
	}
	// From here on nobody else can have this node, so the ticket is worth keeping: a
	// machine that was claimed gets no other one.
	if err := c.keepTicket(t); err != nil {
		return err
	}
	return c.join(ctx, self, key, t, conn)
}

// HasTicket reports whether a ticket is kept that can still be used. A node that was
// claimed for a join and has none cannot go on.
func (c *JoinClient) HasTicket() bool {
	t, err := c.keptTicket(time.Now())
	return err == nil && t != nil
}

// self waits until the cloud says who this machine is.
func (c *JoinClient) self(ctx context.Context) (cloud.Instance, error) {
	for p := (pause{}); ; {
		self, err := c.Metadata.Self(ctx)
		if err == nil && (self.Name == "" || !self.Role.Valid() || !self.IP.IsValid()) {
			err = errors.New("name, role or address of this machine is not known yet")
		}
		if err == nil {
			return self, nil
		}
		c.Log.Warn("cloud did not say who this machine is", "err", err)
		if err := p.wait(ctx, 0); err != nil {
			return cloud.Instance{}, err
		}
	}
}

// ticket asks the join services of the cluster, one after the other, until one
// issues a ticket. The connection stays open for the report.
func (c *JoinClient) ticket(ctx context.Context, self cloud.Instance, csr []byte) (*joinproto.IssueJoinTicketResponse, *grpc.ClientConn, error) {
	var p pause
	var told string
	for {
		endpoints, err := c.endpoints(ctx, self)
		var asked time.Duration
		for _, e := range endpoints {
			t, conn, e1 := c.ask(ctx, e, csr)
			if e1 == nil {
				return t, conn, nil
			}
			if ctx.Err() != nil {
				return nil, nil, context.Cause(ctx)
			}
			err = fmt.Errorf("ask the join service at %s: %w", e, e1)
			asked = max(asked, askedToWait(e1))
		}
		if err == nil {
			err = errors.New("the cloud knows no control plane yet")
		}
		// Before there is a cluster this fails for minutes; each new reason is told once.
		if why := err.Error(); why != told {
			c.Log.Info("no join ticket yet", "err", err)
			told = why
		}
		if err := p.wait(ctx, asked); err != nil {
			return nil, nil, err
		}
	}
}

// endpoints are the load balancer, which knows who is healthy, then every other
// control plane, in random order.
func (c *JoinClient) endpoints(ctx context.Context, self cloud.Instance) ([]string, error) {
	var out []string
	lb, lbErr := c.Metadata.LoadBalancer(ctx)
	if lbErr == nil && lb != "" {
		out = append(out, net.JoinHostPort(lb, joinPort))
	}
	peers, err := c.Metadata.Peers(ctx)
	if err != nil && len(out) == 0 {
		return nil, fmt.Errorf("find control planes: %w", errors.Join(lbErr, err))
	}
	mathrand.Shuffle(len(peers), func(i, j int) { peers[i], peers[j] = peers[j], peers[i] })
	for _, i := range peers {
		if i.Role != cloud.ControlPlane || i.Name == self.Name || i.IP == self.IP || !i.IP.IsValid() {
			continue
		}
		if e := net.JoinHostPort(i.IP.String(), joinPort); !slices.Contains(out, e) {
			out = append(out, e)
		}
	}
	return out, nil
}

// ask requests a ticket from one join service and checks that the service is a
// member of the cluster that the ticket names.
func (c *JoinClient) ask(ctx context.Context, endpoint string, csr []byte) (_ *joinproto.IssueJoinTicketResponse, _ *grpc.ClientConn, err error) {
	conn, err := grpc.NewClient("passthrough:///"+endpoint,
		grpc.WithTransportCredentials(atls.NewClient(atls.Config{Purpose: atls.PurposeJoin, Issuer: c.Issuer, Validator: c.Validator})),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 15 * time.Second, Timeout: 10 * time.Second}),
	)
	if err != nil {
		return nil, nil, err
	}
	defer func() {
		if err != nil {
			conn.Close()
		}
	}()
	ctx, cancel := context.WithTimeout(ctx, ticketTimeout)
	defer cancel()
	var p peer.Peer
	t, err := joinproto.NewJoinServiceClient(conn).IssueJoinTicket(ctx, &joinproto.IssueJoinTicketRequest{CertificateRequest: csr}, grpc.Peer(&p))
	if err != nil {
		return nil, nil, err
	}
	st, ok := atls.PeerStatement(peer.NewContext(ctx, &p))
	if !ok {
		return nil, nil, errors.New("the join service showed no evidence")
	}
	if len(t.GetClusterId()) == 0 || !bytes.Equal(st.PCRs[15], attestation.ClusterIDPCR(t.GetClusterId())) {
		return nil, nil, fmt.Errorf("the join service on %s issued a ticket for a cluster that it is no member of", st.Identity.Name)
	}
	return t, conn, nil
}

// join makes the claimed node a member with ticket t, and reports on conn, which may
// be nil.
func (c *JoinClient) join(ctx context.Context, self cloud.Instance, key *ecdsa.PrivateKey, t *joinproto.IssueJoinTicketResponse, conn *grpc.ClientConn) (err error) {
	r := newReport(ctx, conn, c.Log)
	defer func() {
		if err != nil {
			r.say(r.step, "failed", slog.LevelError, err.Error())
		}
		r.close()
	}()
	if err := c.Lock.ClaimJoin(ctx, t.GetClusterId()); err != nil { // again after a restart
		return fmt.Errorf("claim the node: %w", err)
	}
	r.say("claim-node", "done", slog.LevelInfo, "this machine belongs to the cluster now")

	list, err := component.FromProto(t.GetComponents())
	if err != nil {
		return fmt.Errorf("read the ticket's components: %w", err)
	}
	r.say("install-components", "running", slog.LevelInfo, fmt.Sprintf("%d components", len(list)))
	if err := c.Installer.Install(ctx, list, nil); err != nil {
		return fmt.Errorf("install components: %w", err)
	}
	r.say("install-components", "done", slog.LevelInfo, t.GetKubernetesVersion())

	cfg, err := kubeadm.NewJoin(kubeadm.Join{
		ControlPlane: self.Role == cloud.ControlPlane, Endpoint: t.GetApiServerEndpoint(),
		Token: t.GetToken(), CAHash: t.GetDiscoveryTokenCaCertHash(),
	}, kubeadm.Node{Name: self.Name, ProviderID: self.ProviderID, IP: self.IP})
	if err != nil {
		return err
	}
	var p pause
	for try := 1; ; try++ {
		err := c.joinOnce(ctx, self, key, t, cfg, r, try)
		if err == nil {
			break
		}
		var ke *kubeadm.Error
		if ctx.Err() != nil || try == maxJoins || errors.As(err, &ke) && ke.InvalidConfig() {
			return err
		}
		r.say("kubeadm-join", "running", slog.LevelWarn, fmt.Sprintf("try %d of %d failed: %v", try, maxJoins, err))
		if err := p.wait(ctx, 0); err != nil {
			return err
		}
	}
	if err := c.Lock.Joined(ctx); err != nil {
		return fmt.Errorf("record the membership: %w", err)
	}
	r.say("kubeadm-join", "done", slog.LevelInfo, "this machine is a node")
	if err := os.Remove(filepath.Join(c.Dir, ticketFile)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove the used ticket: %w", err)
	}
	c.Log.Info("node joined", "node", self.Name, "version", t.GetKubernetesVersion())
	return nil
}

// joinOnce cleans up what an earlier try left, writes what the ticket brought and
// runs kubeadm join.
func (c *JoinClient) joinOnce(ctx context.Context, self cloud.Instance, key *ecdsa.PrivateKey, t *joinproto.IssueJoinTicketResponse, cfg kubeadm.Config, r *report, try int) error {
	lines := func(l kubeadm.Line) {
		text := l.Text
		if l.Phase != "" {
			text = "[" + l.Phase + "] " + text
		}
		r.say("kubeadm-join", "running", l.Level, text)
	}
	began, err := c.begun()
	if err != nil {
		return err
	}
	if began {
		r.say("kubeadm-join", "running", slog.LevelWarn, "removing what an unfinished join left")
		if err := c.Kubeadm.Reset(ctx, lines); err != nil {
			return err
		}
	}
	if err := c.writeFiles(self, key, t); err != nil {
		return err
	}
	r.say("kubeadm-join", "running", slog.LevelInfo, fmt.Sprintf("kubeadm join, try %d of %d", try, maxJoins))
	return c.Kubeadm.Join(ctx, cfg, lines)
}

// begun reports whether a kubeadm join ran on this host before.
func (c *JoinClient) begun() (bool, error) {
	for _, name := range []string{"etc/kubernetes/kubelet.conf", "etc/kubernetes/bootstrap-kubelet.conf", "etc/kubernetes/manifests/kube-apiserver.yaml"} {
		switch _, err := os.Lstat(c.path(name)); {
		case err == nil:
			return true, nil
		case !errors.Is(err, fs.ErrNotExist):
			return false, fmt.Errorf("look for an unfinished join: %w", err)
		}
	}
	return false, nil
}

func (c *JoinClient) path(name string) string {
	root := c.Root
	if root == "" {
		root = "/"
	}
	return filepath.Join(root, name)
}

// writeFiles writes the kubelet's serving certificate and, on a control plane, the
// authorities of the cluster. "kubeadm reset" removes them, so each try writes them.
func (c *JoinClient) writeFiles(self cloud.Instance, key *ecdsa.PrivateKey, t *joinproto.IssueJoinTicketResponse) error {
	if err := matches(t.GetKubeletCertificate(), key); err != nil {
		return err
	}
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return fmt.Errorf("encode the kubelet's key: %w", err)
	}
	type file struct {
		name string
		data []byte
		mode fs.FileMode
	}
	files := []file{
		{kubeadm.KubeletCertFile, t.GetKubeletCertificate(), 0o644},
		{kubeadm.KubeletKeyFile, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}), 0o600},
	}
	if self.Role == cloud.ControlPlane {
		if len(t.GetControlPlaneFiles()) == 0 {
			return errors.New("the ticket of a control plane holds no authorities of the cluster")
		}
		for name, data := range kubeadm.ControlPlaneFiles() {
			files = append(files, file{name, data, 0o600})
		}
		for _, f := range t.GetControlPlaneFiles() {
			if !filepath.IsLocal(f.GetName()) || !slices.Contains([]string{".crt", ".key", ".pub"}, filepath.Ext(f.GetName())) {
				return fmt.Errorf("the ticket holds a file %q, which is none of a cluster's PKI", f.GetName())
			}
			mode := fs.FileMode(0o600)
			if filepath.Ext(f.GetName()) != ".key" {
				mode = 0o644
			}
			files = append(files, file{filepath.Join(kubeadm.PKIDir, f.GetName()), f.GetData(), mode})
		}
	}
	root, err := os.OpenRoot(c.path(""))
	if err != nil {
		return fmt.Errorf("open the host's file system: %w", err)
	}
	defer root.Close()
	for _, f := range files {
		name := strings.TrimPrefix(f.name, "/")
		if err := root.MkdirAll(filepath.Dir(name), 0o755); err != nil {
			return fmt.Errorf("write %s: %w", f.name, err)
		}
		if err := replaceFile(root, name, f.data, f.mode); err != nil {
			return err
		}
	}
	return nil
}

// replaceFile writes a file whole or not at all.
func replaceFile(root *os.Root, name string, data []byte, mode fs.FileMode) error {
	tmp := name + ".new"
	if err := root.Remove(tmp); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("write %s: %w", name, err)
	}
	f, err := root.OpenFile(tmp, os.O_CREATE|os.O_EXCL|os.O_WRONLY, mode)
	if err != nil {
		return fmt.Errorf("write %s: %w", name, err)
	}
	_, err = f.Write(data)
	err = errors.Join(err, f.Chmod(mode), f.Sync(), f.Close())
	if err == nil {
		err = root.Rename(tmp, name)
	}
	if err != nil {
		return fmt.Errorf("write %s: %w", name, errors.Join(err, root.Remove(tmp)))
	}
	return nil
}

// matches checks that the certificate is for our key.
func matches(certPEM []byte, key *ecdsa.PrivateKey) error {
	block, _ := pem.Decode(certPEM)
	if block == nil || block.Type != "CERTIFICATE" {
		return errors.New("the ticket's kubelet certificate is no PEM certificate")
	}
	cert, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		return fmt.Errorf("read the ticket's kubelet certificate: %w", err)
	}
	if !key.PublicKey.Equal(cert.PublicKey) {
		return errors.New("the ticket's kubelet certificate is for another key")
	}
	return nil
}

// key returns the key of the kubelet's serving certificate. It is made once and
// kept: however often a machine asks, it is the same node.
func (c *JoinClient) key() (*ecdsa.PrivateKey, error) {
	root, err := c.dir()
	if err != nil {
		return nil, err
	}
	defer root.Close()
	b, err := root.ReadFile(keyFile)
	if errors.Is(err, fs.ErrNotExist) {
		key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		if err != nil {
			return nil, fmt.Errorf("make the node's key: %w", err)
		}
		der, err := x509.MarshalECPrivateKey(key)
		if err != nil {
			return nil, fmt.Errorf("encode the node's key: %w", err)
		}
		return key, replaceFile(root, keyFile, der, 0o600)
	}
	if err != nil {
		return nil, fmt.Errorf("read the node's key: %w", err)
	}
	key, err := x509.ParseECPrivateKey(b)
	if err != nil {
		return nil, fmt.Errorf("read the node's key: %s is damaged", filepath.Join(c.Dir, keyFile))
	}
	return key, nil
}

func (c *JoinClient) dir() (*os.Root, error) {
	if err := os.MkdirAll(c.Dir, 0o700); err != nil {
		return nil, fmt.Errorf("make the node's directory: %w", err)
	}
	root, err := os.OpenRoot(c.Dir)
	if err != nil {
		return nil, fmt.Errorf("open the node's directory: %w", err)
	}
	return root, nil
}

// keepTicket writes the ticket down: a machine that was claimed is used, and would
// be refused another one if its bootstrapper died now.
func (c *JoinClient) keepTicket(t *joinproto.IssueJoinTicketResponse) error {
	b, err := proto.Marshal(t)
	if err != nil {
		return errors.New("encode the ticket") // the cause could quote it
	}
	root, err := c.dir()
	if err != nil {
		return err
	}
	defer root.Close()
	return replaceFile(root, ticketFile, b, 0o600)
}

// keptTicket returns the ticket that keepTicket wrote, or nil if there is none that
// is still good at now. One that is damaged or has expired is removed.
func (c *JoinClient) keptTicket(now time.Time) (*joinproto.IssueJoinTicketResponse, error) {
	root, err := c.dir()
	if err != nil {
		return nil, err
	}
	defer root.Close()
	fi, err := root.Stat(ticketFile)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read the ticket: %w", err)
	}
	b, err := root.ReadFile(ticketFile)
	if err != nil {
		return nil, fmt.Errorf("read the ticket: %w", err)
	}
	var t joinproto.IssueJoinTicketResponse
	age := now.Sub(fi.ModTime())
	if proto.Unmarshal(b, &t) != nil || age < -time.Minute || age > ticketLife {
		if err := root.Remove(ticketFile); err != nil {
			return nil, fmt.Errorf("remove the expired ticket: %w", err)
		}
		return nil, nil
	}
	return &t, nil
}

// request is the PKCS #10 request for the kubelet's serving certificate. The join
// service compares every name in it with the attested identity.
func request(self cloud.Instance, key *ecdsa.PrivateKey) ([]byte, error) {
	der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{
		Subject:     pkix.Name{CommonName: "system:node:" + self.Name, Organization: []string{"system:nodes"}},
		DNSNames:    []string{self.Name},
		IPAddresses: []net.IP{self.IP.AsSlice()},
	}, key)
	if err != nil {
		return nil, fmt.Errorf("make the certificate request: %w", err)
	}
	return der, nil
}

// askedToWait is how long the join service wants to be left alone; zero if it does
// not say.
func askedToWait(err error) time.Duration {
	st, ok := status.FromError(err)
	if !ok || st.Code() != codes.Unavailable && st.Code() != codes.ResourceExhausted {
		return 0
	}
	for _, d := range st.Details() {
		if ri, ok := d.(*errdetails.RetryInfo); ok {
			return min(ri.GetRetryDelay().AsDuration(), maxAsked)
		}
	}
	return 0
}

// pause is decorrelated jitter. The zero value begins with minPause.
type pause struct{ last time.Duration }

// wait pauses; asked, if not zero, is how long the other side wants it to be.
func (p *pause) wait(ctx context.Context, asked time.Duration) error {
	if p.last == 0 {
		p.last = minPause
	}
	d := minPause + mathrand.N(3*p.last-minPause+1)
	p.last = min(d, maxPause)
	if d = p.last; asked > 0 {
		d, p.last = asked, minPause
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
