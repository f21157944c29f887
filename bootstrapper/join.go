package bootstrapper

import (
	"bytes"
	"cmp"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	mathrand "math/rand/v2"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"constellation/engine/atls"
	"constellation/engine/attestation"
	"constellation/engine/cloud"
	"constellation/engine/component"
	"constellation/engine/kubeadm"
	"constellation/engine/release"
	"constellation/internal/delay"
	"constellation/joinservice/joinproto"
)

const (
	// joinPort is the NodePort of the join service.
	joinPort = 30090

	// ticketTimeout bounds one request for a ticket, dialTimeout its connection.
	ticketTimeout = 30 * time.Second
	dialTimeout   = 3 * time.Second
	// Pauses between attempts are drawn between minPause and three times the last one
	// (decorrelated jitter), so that machines that booted together do not retry together. They
	// grow to maxPause after refusals, and only to quietPause without an answer: that costs no
	// server anything, and a cluster that starts should not wait for its machines.
	minPause   = 500 * time.Millisecond
	maxPause   = 30 * time.Second
	quietPause = time.Second
	// maxAsked bounds the delay that a join service can request.
	maxAsked = 2 * time.Minute
	// maxDirect is how many control planes are tried directly, beside the load balancer.
	maxDirect = 3
	// maxJoins bounds the attempts to join with one ticket. Pauses of about two seconds, doubled
	// each time up to maxPause, add up to two minutes, so that a short outage of a mirror or a
	// load balancer costs no machine.
	maxJoins     = 8
	firstOfJoins = 2 * time.Second
	// earlierNodeLife is how long the Node of a machine that joined before, and was reset, may still
	// look alive to the cluster, which notices after 50 s. kubeadm refuses to join until then,
	// which is not a failure of this machine.
	earlierNodeLife = 3 * time.Minute
	// ticketLife is how long a ticket is used; its token is valid for 15 minutes.
	ticketLife = 14 * time.Minute

	keyFile    = "kubelet-serving.key"
	requestCSR = "kubelet-serving.csr"
	ticketFile = "join-ticket"
	// maxTicket is in bytes. Components can have small inline content.
	maxTicket = 4 << 20

	stepJoin = "kubeadm-join" // the other steps are those of an init
)

// errClaimed means that an init holds the node.
var errClaimed = errors.New("the node was claimed by an init")

// errJoinFailed means that a claimed node could not join, and a retry cannot help.
var errJoinFailed = errors.New("join failed")

// nodeLock is the part of this node's lock that a JoinClient uses.
type nodeLock interface {
	// ClaimJoin claims the node for the cluster, persists the claim and extends register 15. The
	// error wraps errClaimed if an init has claimed it. Repeating it with the same cluster
	// succeeds.
	ClaimJoin(ctx context.Context, clusterID []byte) error
	// Joined records that the node, called name, is a member.
	Joined(ctx context.Context, name string) error
	// Claimed is closed when an init has claimed the node.
	Claimed() <-chan struct{}
}

// nodeKeys is what a JoinClient does with secret keys.
type nodeKeys interface {
	// storeKeys seals keys. Those that the machine had are removed. awaited is the fingerprint of the keys of the key service, if those may
	// come later.
	storeKeys(ctx context.Context, clusterID []byte, keys secretKeys, awaited string) error
	// encrypts reports whether keys for the API server are stored.
	encrypts() (bool, error)
	// awaitKeyService waits until the process with these keys answers, if there are any.
	awaitKeyService(context.Context) error
}

// JoinClient makes this machine a node of the cluster whose join service accepts its evidence.
// A field is required unless its comment describes the zero value.
type JoinClient struct {
	Metadata Metadata
	Lock     nodeLock
	// Issuer proves what this machine booted; Validator verifies join services.
	Issuer    attestation.Issuer
	Validator func() attestation.Validator
	Installer *component.Installer
	Kubeadm   *kubeadm.Runner
	// StartKubelet starts the kubelet of a machine whose join was in progress.
	StartKubelet func(context.Context) error
	// Keys are the secret keys of this machine, if it becomes a control plane. Nil: it stores none, and refuses a ticket with keys.
	Keys nodeKeys
	// State stores the node's key and an unused ticket across restarts; only root has access.
	State *os.Root
	// KubeletCloudProvider is the kubelet's --cloud-provider; "" means that it gets no such flag.
	KubeletCloudProvider string
	// Root is the root of the host's file system; "" means "/".
	Root string
	// Cluster is the ID of the only cluster that may be joined, if the node was claimed for it
	// before; nil means any.
	Cluster []byte
	Log     *slog.Logger

	port  int           // of join services; 0: joinPort
	hurry time.Duration // bounds all pauses; 0: no bound
}

// Run requests a ticket until it gets one, claims the node and joins. It returns nil when the
// node is a member, or when an init claimed it first. It returns an error when ctx ends, and
// one that wraps errJoinFailed when a claimed node could not join.
func (c *JoinClient) Run(parent context.Context) error {
	ctx, cancel := context.WithCancelCause(parent)
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
	if err != nil && parent.Err() != nil { // the process ends, the next one continues
		return context.Cause(parent)
	}
	return err
}

func (c *JoinClient) run(ctx context.Context) error {
	self, err := waitSelf(ctx, c.Metadata, c.Log)
	if err != nil {
		return err
	}
	key, csr, err := c.identity(self)
	if err != nil {
		return err
	}
	raw, received, err := keptTicket(c.State, time.Now())
	if err != nil {
		return err
	}
	if raw != nil && c.Cluster != nil {
		t, err := c.parse(raw, self, key)
		if err != nil {
			return fmt.Errorf("%w: read the kept ticket: %w", errJoinFailed, err)
		}
		t.received = received
		c.Log.Info("stored ticket used")
		return c.join(ctx, self, t, c.newReport(ctx, self, t, nil))
	}
	t, conn, err := c.ticket(ctx, self, key, csr)
	if err != nil {
		return err
	}
	if err := c.storeKeys(ctx, t); err != nil {
		conn.Close()
		return err
	}
	c.certify(ctx, conn)
	// On disk before the claim: a machine that is claimed looks used and is given no
	// other ticket until it is restarted.
	if err := keepTicket(c.State, t.raw); err != nil {
		conn.Close()
		return err
	}
	return c.join(ctx, self, t, c.newReport(ctx, self, t, conn))
}

// noKeys is a machine that stores no secret keys.
type noKeys struct{}

func (noKeys) storeKeys(_ context.Context, _ []byte, keys secretKeys, awaited string) error {
	if len(keys.certifier)+len(keys.kms)+len(awaited) > 0 {
		return errors.New("the ticket has secret keys, and this machine cannot store them")
	}
	return nil
}

func (noKeys) encrypts() (bool, error) { return false, nil }

func (noKeys) awaitKeyService(context.Context) error { return nil }

func (c *JoinClient) keys() nodeKeys {
	if c.Keys == nil {
		return noKeys{}
	}
	return c.Keys
}

// storeKeys seals the secret keys of a ticket, and removes them from it, since it is stored next.
func (c *JoinClient) storeKeys(ctx context.Context, t *ticket) error {
	keys := secretKeys{t.raw.GetCertifierKeys(), t.raw.GetKmsKeys()}
	t.raw.CertifierKeys, t.raw.KmsKeys = nil, nil
	defer clear(keys.certifier)
	defer clear(keys.kms)
	if err := c.keys().storeKeys(ctx, t.cluster, keys, t.raw.GetKmsFingerprint()); err != nil {
		return err
	}
	if len(keys.certifier) > 0 {
		c.Log.Info("certifier keys sealed")
	}
	if len(keys.kms) > 0 {
		c.Log.Info("keys of the key service sealed")
	}
	return nil
}

// newReport begins the report of a join with ticket t, on conn if that is not nil, and
// otherwise, and later, to members of the ticket's cluster.
func (c *JoinClient) newReport(ctx context.Context, self cloud.Instance, t *ticket, conn *serviceConn) *report {
	dial := func(ctx context.Context) ([]*serviceConn, error) {
		endpoints, err := c.endpoints(ctx, self)
		var conns []*serviceConn
		for _, e := range endpoints {
			conn, err := c.connect(e, memberValidator{c.Validator(), t.cluster})
			if err != nil {
				closeAll(conns)
				return nil, err
			}
			conns = append(conns, conn)
		}
		return conns, err
	}
	wait := func(ctx context.Context, p *pause) error { return c.pause(ctx, p, 0, reportPause) }
	return newReport(ctx, conn, dial, wait, c.Log)
}

// memberValidator accepts members of one cluster among those that Validator accepts.
type memberValidator struct {
	attestation.Validator
	cluster []byte
}

// Validate implements attestation.Validator.
func (v memberValidator) Validate(ctx context.Context, document, userData []byte) (attestation.Statement, error) {
	st, err := v.Validator.Validate(ctx, document, userData)
	if err == nil && !bytes.Equal(st.PCRs[clusterRegister], attestation.ClusterIDPCR(v.cluster)) {
		err = fmt.Errorf("%w: %s belongs to another cluster", attestation.ErrMember, st.Identity.Name)
	}
	return st, err
}

// ticket asks the join services of the cluster, one after the other, until one
// issues a ticket. The connection stays open for the report.
func (c *JoinClient) ticket(ctx context.Context, self cloud.Instance, key *ecdsa.PrivateKey, csr []byte) (*ticket, *serviceConn, error) {
	var p pause
	var told string
	var sealing sealing
	for {
		endpoints, err := c.endpoints(ctx, self)
		var asked time.Duration
		limit := quietPause
		for _, e := range endpoints {
			start := time.Now()
			if err = sealing.renew(ctx, self.Role, c.Issuer); err != nil {
				break
			}
			t, conn, answered, e1 := c.ask(ctx, e, self, key, csr, sealing.Sealing)
			if e1 == nil {
				// With connection and evidence of both sides; without the waiting before.
				c.Log.Info("join ticket received", "from", e, "took", time.Since(start).Round(time.Millisecond))
				return t, conn, nil
			}
			if ctx.Err() != nil {
				return nil, nil, context.Cause(ctx)
			}
			err = fmt.Errorf("ask the join service at %s: %w", e, e1)
			asked = max(asked, askedToWait(e1))
			if answered {
				limit = maxPause
			}
		}
		if err == nil {
			err = errors.New("the cloud lists no control plane yet")
		}
		// Before the cluster exists this fails for minutes; each new reason is logged once.
		if why := err.Error(); why != told {
			c.Log.Info("no join ticket yet", "err", err)
			told = why
		}
		if err := c.pause(ctx, &p, asked, limit); err != nil {
			return nil, nil, err
		}
	}
}

// sealing is the key to which join services have the secrets of this machine's ticket encrypted; zero for workers.
type sealing struct {
	*joinproto.Sealing
	made time.Time
}

// sealingAge is how long requests have the same key. A TPM takes a while to attest one.
const sealingAge = time.Minute

// renew makes a key for a control plane, unless there is one that is new enough.
func (s *sealing) renew(ctx context.Context, role cloud.Role, issuer attestation.Issuer) error {
	if role != cloud.ControlPlane || time.Since(s.made) < sealingAge {
		return nil
	}
	next, err := joinproto.NewSealing(ctx, issuer.Issue)
	if err != nil {
		return err
	}
	s.Sealing, s.made = next, time.Now()
	return nil
}

func (c *JoinClient) pause(ctx context.Context, p *pause, asked, limit time.Duration) error {
	if c.hurry > 0 {
		asked, limit = min(asked, c.hurry), min(limit, c.hurry)
	}
	return p.wait(ctx, asked, limit)
}

// endpoints are the load balancer, which knows who is healthy, then some other
// control planes, in random order. This machine is never among them.
func (c *JoinClient) endpoints(ctx context.Context, self cloud.Instance) ([]string, error) {
	port := strconv.Itoa(cmp.Or(c.port, joinPort))
	var out []string
	lb, lbErr := c.Metadata.LoadBalancer(ctx)
	if lbErr == nil && lb != "" && lb != self.IP.String() {
		out = append(out, net.JoinHostPort(lb, port))
	}
	peers, err := c.Metadata.Peers(ctx)
	if err != nil && len(out) == 0 {
		return nil, fmt.Errorf("find control planes: %w", errors.Join(lbErr, err))
	}
	mathrand.Shuffle(len(peers), func(i, j int) { peers[i], peers[j] = peers[j], peers[i] })
	direct := 0
	for _, i := range peers {
		if i.Role != cloud.ControlPlane || i.Name == self.Name || i.Spare || i.IP == self.IP || !i.IP.IsValid() || gone(i.State) || direct == maxDirect {
			continue
		}
		if e := net.JoinHostPort(i.IP.String(), port); !slices.Contains(out, e) {
			out = append(out, e)
			direct++
		}
	}
	return out, nil
}

// gone reports whether an instance in state s cannot answer.
func gone(s cloud.State) bool {
	return s == cloud.Stopped || s == cloud.Terminating || s == cloud.Terminated || s == cloud.Failed
}

// serviceConn is a connection to a join service.
type serviceConn struct {
	*grpc.ClientConn

	mu      sync.Mutex
	refusal error // why the handshake failed; gRPC keeps only its text
}

// why returns what is behind err, an error of a call.
func (c *serviceConn) why(err error) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.refusal != nil {
		return c.refusal
	}
	return err
}

// connect returns a connection to a join service that v accepts. It is made by the
// first call.
func (c *JoinClient) connect(endpoint string, v attestation.Validator) (*serviceConn, error) {
	conn := &serviceConn{}
	creds := atls.NewClient(atls.Config{
		Purpose: atls.PurposeJoin, Issuer: c.Issuer, Validator: func() attestation.Validator { return v },
		OnFailure: func(_ net.Addr, err error) { conn.mu.Lock(); defer conn.mu.Unlock(); conn.refusal = err },
	})
	var err error
	conn.ClientConn, err = grpc.NewClient("passthrough:///"+endpoint,
		grpc.WithTransportCredentials(creds),
		grpc.WithDisableServiceConfig(),
		// Not gRPC's own dialer, which would ask a proxy of the environment.
		grpc.WithContextDialer(func(ctx context.Context, addr string) (net.Conn, error) {
			return (&net.Dialer{Timeout: dialTimeout}).DialContext(ctx, "tcp", addr)
		}),
		// A control plane without a report for 15 s loses the join turn.
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 10 * time.Second, Timeout: 4 * time.Second}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxTicket)),
	)
	if err != nil {
		return nil, err
	}
	return conn, nil
}

// ask requests a ticket from one join service and checks that the service is a
// member of the cluster that the ticket names. answered says that something spoke
// attested TLS there, so that asking again is not free for it.
func (c *JoinClient) ask(ctx context.Context, endpoint string, self cloud.Instance, key *ecdsa.PrivateKey, csr []byte, sealing *joinproto.Sealing) (_ *ticket, _ *serviceConn, answered bool, err error) {
	conn, err := c.connect(endpoint, c.Validator())
	if err != nil {
		return nil, nil, false, err
	}
	defer func() {
		if err != nil {
			conn.Close()
		}
	}()
	ctx, cancel := context.WithTimeout(ctx, ticketTimeout)
	defer cancel()
	var p peer.Peer
	req := &joinproto.IssueJoinTicketRequest{CertificateRequest: csr}
	if sealing != nil {
		sealing.Ask(req)
	}
	raw, err := joinproto.NewJoinServiceClient(conn).IssueJoinTicket(ctx, req, grpc.Peer(&p))
	if err != nil {
		if p.AuthInfo == nil {
			err = conn.why(err)
			return nil, nil, attested(err), err
		}
		return nil, nil, true, err
	}
	st, ok := atls.PeerStatement(peer.NewContext(ctx, &p))
	if !ok {
		return nil, nil, true, errors.New("the join service sent no evidence")
	}
	id := raw.GetClusterId()
	if len(id) == 0 || !bytes.Equal(st.PCRs[clusterRegister], attestation.ClusterIDPCR(id)) {
		return nil, nil, true, fmt.Errorf("%s issued a ticket for a cluster of which it is not a member", st.Identity.Name)
	}
	if c.Cluster != nil && !bytes.Equal(c.Cluster, id) {
		return nil, nil, true, fmt.Errorf("%s belongs to a cluster other than the one that claimed this machine", st.Identity.Name)
	}
	if sealing != nil {
		if err := sealing.Open(raw); err != nil {
			return nil, nil, true, fmt.Errorf("%s issued an invalid ticket: %w", st.Identity.Name, err)
		}
	}
	t, err := c.parse(raw, self, key)
	if err != nil {
		return nil, nil, true, fmt.Errorf("%s issued an invalid ticket: %w", st.Identity.Name, err)
	}
	return t, conn, true, nil
}

// parse verifies a ticket with the release keys of this machine.
func (c *JoinClient) parse(raw *joinproto.IssueJoinTicketResponse, self cloud.Instance, key *ecdsa.PrivateKey) (*ticket, error) {
	trust, err := release.MachineTrust(c.Root)
	if err != nil {
		return nil, err
	}
	return parseTicket(raw, self, key, trust, cmp.Or(self.CloudProvider, c.KubeletCloudProvider))
}

// attested reports whether a handshake failed because of evidence, ours or theirs, and not
// because of the network.
func attested(err error) bool {
	for _, e := range []error{
		atls.ErrRefused, atls.ErrBusy, attestation.ErrDocument, attestation.ErrTrust, attestation.ErrQuote,
		attestation.ErrMeasurement, attestation.ErrMember, attestation.ErrIdentity, attestation.ErrTPM,
	} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

// join claims the node and makes it a member with ticket t.
func (c *JoinClient) join(ctx context.Context, self cloud.Instance, t *ticket, r *report) (err error) {
	defer r.close()
	r.say(stepClaim, stateRunning, slog.LevelInfo, "writing the cluster's ID to register 15 of the TPM")
	if err := c.Lock.ClaimJoin(ctx, t.cluster); err != nil {
		err = fmt.Errorf("claim the node: %w", err)
		// With this report the join service releases the turn.
		r.say(stepClaim, stateFailed, slog.LevelWarn, err.Error())
		if errors.Is(err, errClaimed) {
			return errors.Join(err, removeAll(c.State, ticketFile))
		}
		return err
	}
	r.say(stepClaim, stateDone, slog.LevelInfo, "this machine belongs to the cluster")

	var p pause
	start := time.Now()
	clean := c.Cluster != nil
	for try := 1; ; try++ {
		step, err := c.joinOnce(ctx, self, t, r, clean)
		clean = true
		if err == nil {
			break
		}
		if ctx.Err() != nil {
			return err
		}
		var k *kubeadm.Error
		final := errors.As(err, &k) && k.InvalidConfig() || errors.Is(err, errVersion)
		earlierNode := errors.As(err, &k) && strings.Contains(k.Message, earlierNodeMessage) && time.Since(start) < earlierNodeLife
		if try == maxJoins && !earlierNode || final || time.Since(t.received) > ticketLife {
			err = fmt.Errorf("%w after %d tries: %w", errJoinFailed, try, err)
			r.say(step, stateFailed, slog.LevelError, err.Error())
			return err
		}
		least, limit := min(firstOfJoins<<(try-1), maxPause), maxPause
		least = least/2 + mathrand.N(least) // machines that failed together should not retry together
		if earlierNode {
			try--
			least, limit = 0, quietPause
			r.say(step, stateRunning, slog.LevelInfo, "waiting for the cluster to notice that this machine's earlier Node is gone")
		} else {
			r.say(step, stateRunning, slog.LevelWarn, fmt.Sprintf("try %d of %d failed: %v", try, maxJoins, err))
		}
		if err := c.pause(ctx, &p, least, limit); err != nil {
			return err
		}
	}
	if err := c.Lock.Joined(ctx, self.Name); err != nil {
		return err
	}
	r.say(stepJoin, stateDone, slog.LevelInfo, "this machine is a node")
	c.Log.Info("node joined", "node", self.Name, "version", t.version.String())
	return removeAll(c.State, ticketFile, keyFile, requestCSR)
}

// earlierNodeMessage is part of kubeadm's message when a Node of this name looks alive.
const earlierNodeMessage = "already exists in the cluster"

// errVersion means that the installed version differs from the ticket.
var errVersion = errors.New("installed kubeadm is of another version")

// joinOnce runs all steps after the claim once, and names the one that failed. clean means
// that an earlier attempt may have left files.
func (c *JoinClient) joinOnce(ctx context.Context, self cloud.Instance, t *ticket, r *report, clean bool) (step string, err error) {
	var list []string
	for _, k := range t.components {
		list = append(list, k.Name)
	}
	r.say(stepInstall, stateRunning, slog.LevelInfo, strings.Join(list, ", "))
	if err := c.Installer.Install(ctx, t.components, nil); err != nil {
		return stepInstall, err
	}
	v, err := c.Kubeadm.Version(ctx)
	if err != nil {
		return stepInstall, err
	}
	if !v.Equal(t.version) {
		return stepInstall, fmt.Errorf("%w: it is %s, want %s as in the ticket", errVersion, v, t.version)
	}
	r.say(stepInstall, stateDone, slog.LevelInfo, "Kubernetes "+v.String())

	lines := func(l kubeadm.Line) { r.say(stepJoin, stateRunning, l.Level, lineText(l)) }
	if clean {
		limit, cancel := context.WithDeadlineCause(ctx, t.received.Add(ticketLife), errors.New("the ticket has expired"))
		defer cancel()
		if err := c.leaveEtcd(limit, self.IP, func(text string) { r.say(stepJoin, stateRunning, slog.LevelInfo, text) }); err != nil {
			return stepJoin, err
		}
		r.say(stepJoin, stateRunning, slog.LevelInfo, "cleaning up after an unfinished join")
		if err := c.Kubeadm.Reset(ctx, lines); err != nil {
			return stepJoin, err
		}
	}
	files := t.files
	if err := (host{root: c.Root}).forgetEncryption(); err != nil {
		return stepJoin, err
	}
	if ok, err := c.keys().encrypts(); err != nil {
		return stepJoin, err
	} else if ok || t.raw.GetKmsFingerprint() != "" {
		files = append(slices.Clone(files), encryptionFiles(t, ok)...)
	}
	if err := (host{root: c.Root}).write(files); err != nil {
		return stepJoin, err
	}
	if err := c.keys().awaitKeyService(ctx); err != nil {
		return stepJoin, err
	}
	r.say(stepJoin, stateRunning, slog.LevelInfo, "Kubernetes "+v.String())
	patches, err := kubeadm.HostPatches(c.Root)
	if err != nil {
		return stepJoin, err
	}
	if err := c.Kubeadm.Join(ctx, t.config.WithPatches(patches), lines); err != nil {
		return stepJoin, err
	}
	host{root: c.Root}.hideKubelet(lines)
	return stepJoin, nil
}

// encryptionFiles are the files of an API server that encrypts Secrets, or will. keyed is whether the key service has its keys.
func encryptionFiles(t *ticket, keyed bool) []hostFile {
	mode := kubeadm.Encrypt
	switch {
	case !keyed:
		mode = kubeadm.AwaitKeys
	case t.raw.GetKmsFingerprint() != "":
		mode = kubeadm.Encryption(t.raw.GetKmsMode())
	}
	files := kubeadm.EncryptionFiles(mode)
	if t.raw.GetKmsFingerprint() != "" {
		maps.Copy(files, kubeadm.EncryptionPatch())
	}
	return hostFiles(files)
}

// identity returns the key of the kubelet's serving certificate and its CSR. Both are created
// once and stored: every retry presents the same node.
func (c *JoinClient) identity(self cloud.Instance) (*ecdsa.PrivateKey, []byte, error) {
	b, err := c.State.ReadFile(keyFile)
	var key *ecdsa.PrivateKey
	switch {
	case errors.Is(err, fs.ErrNotExist):
		if key, err = ecdsa.GenerateKey(elliptic.P256(), rand.Reader); err != nil {
			return nil, nil, fmt.Errorf("generate the node's key: %w", err)
		}
		der, err := x509.MarshalECPrivateKey(key)
		if err != nil {
			return nil, nil, fmt.Errorf("encode the node's key: %w", err)
		}
		if err := replaceFile(c.State, keyFile, der, 0o600); err != nil {
			return nil, nil, err
		}
	case err != nil:
		return nil, nil, fmt.Errorf("read the node's key: %w", err)
	default:
		if key, err = x509.ParseECPrivateKey(b); err != nil {
			return nil, nil, fmt.Errorf("read the node's key: %s is damaged; remove it, and another one is generated", keyFile)
		}
	}
	want := &x509.CertificateRequest{
		Subject: nodeSubject(self.Name), DNSNames: []string{self.Name}, IPAddresses: []net.IP{self.IP.AsSlice()},
	}
	if der, err := c.State.ReadFile(requestCSR); err == nil {
		if r, err := x509.ParseCertificateRequest(der); err == nil && key.PublicKey.Equal(r.PublicKey) && r.Subject.String() == want.Subject.String() &&
			slices.Equal(r.DNSNames, want.DNSNames) && len(r.IPAddresses) == 1 && r.IPAddresses[0].Equal(want.IPAddresses[0]) {
			return key, der, nil
		}
	}
	der, err := x509.CreateCertificateRequest(rand.Reader, want, key)
	if err != nil {
		return nil, nil, fmt.Errorf("create the certificate request: %w", err)
	}
	return key, der, replaceFile(c.State, requestCSR, der, 0o600)
}

// waitSelf waits until the cloud returns this machine's identity.
func waitSelf(ctx context.Context, m Metadata, log *slog.Logger) (cloud.Instance, error) {
	for p := (pause{}); ; {
		self, err := m.Self(ctx)
		if err == nil && (self.Name == "" || !self.Role.Valid() || !self.IP.IsValid() || self.ProviderID == "") {
			err = errors.New("name, role or address of this machine is unknown")
		}
		if err == nil {
			return self, nil
		}
		if ctx.Err() != nil {
			return cloud.Instance{}, context.Cause(ctx)
		}
		log.Warn("identity of this machine not read from the cloud", "err", err)
		if err := p.wait(ctx, 0, quietPause); err != nil {
			return cloud.Instance{}, err
		}
	}
}

// askedToWait is the delay that the join service requests; zero if none.
func askedToWait(err error) time.Duration {
	st, ok := status.FromError(err)
	if !ok || st.Code() != codes.Unavailable && st.Code() != codes.ResourceExhausted {
		return 0
	}
	for _, d := range st.Details() {
		if ri, ok := d.(*errdetails.RetryInfo); ok {
			return max(0, min(ri.GetRetryDelay().AsDuration(), maxAsked))
		}
	}
	return 0
}

// pause is decorrelated jitter. The zero value starts with minPause.
type pause struct{ last time.Duration }

// wait pauses for at most limit; asked, if not zero, is the delay that the other side
// requests.
func (p *pause) wait(ctx context.Context, asked, limit time.Duration) error {
	p.last = max(minPause, min(p.last, limit))
	d := min(limit, minPause+mathrand.N(3*p.last-minPause+1))
	p.last = d
	if asked > 0 {
		// The other side adds jitter for the callers that it refuses.
		d, p.last = asked, minPause
	}
	if !delay.For(ctx, d) {
		return context.Cause(ctx)
	}
	return nil
}
