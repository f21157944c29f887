// Package bootstrapper makes an unused machine a node of a cluster, once.
//
// It runs on every new machine. A control plane listens for a console that initializes a
// cluster (InitServer, the contract of package initproto, on port 9000 over attested TLS), and
// every machine requests a ticket from the join services on its cloud's control planes
// ([JoinClient]). Both run concurrently; the first one takes the node lock, permanently. Then
// it installs components, runs kubeadm and stops.
//
// # The node lock
//
// A machine is free, claimed by an init or a join for one cluster, or a member. The lock is a
// file, created by a link that can succeed only once, and register 15 of the TPM. The register
// contains the cluster's ID from the claim on, so that a claimed machine cannot be presented
// as unused. At each start both must agree; a register that is set without a file, or for
// another cluster, is an error.
//
// A restart after a crash depends on the claimant:
//
//   - Init. The request and all messages to the console are on disk. After a reboot the
//     next start first extends register 15. It undoes the unfinished init with "kubeadm
//     reset", and starts over for the same cluster. The console reattaches and gets the
//     replay.
//   - Join. The ticket is on disk. The next start continues with it while it is valid.
//     Without one, a rebooted machine requests another, from the same cluster only. A
//     machine that was not rebooted cannot, since it no longer looks unused, and reports
//     that it must be restarted.
//   - A reported failure of an init is final, unless kubeadm has not run yet, or has not
//     passed its preflight: then only the claim exists, and the next request for the same
//     cluster starts over.
//   - In any state, [Reset] followed by a reboot makes the machine unused again.
//
// An enrolled machine without a TPM has a file in the place of register 15, which survives
// reboots. There, [Reset] makes the machine unused at once. A join that failed or has no ticket
// clears the file itself when the bootstrapper starts again: a reboot does no more elsewhere.
//
// A member that boots extends register 15 before anything else, starts its kubelet, and exits.
// A control plane that cannot read its secret keys then listens until the owner has sent them
// ([initproto.BootstrapperServer]).
//
// The package does not decide which version is installed, and does not use the Kubernetes API.
package bootstrapper

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"google.golang.org/protobuf/proto"

	"constellation/bootstrapper/initproto"
	"constellation/engine/attestation"
	"constellation/engine/attestation/certifier/signer"
	"constellation/engine/attestation/keyprocess"
	"constellation/engine/cloud"
	"constellation/engine/component"
	"constellation/engine/kms"
	"constellation/engine/kubeadm"
)

// Paths on a machine.
const (
	DefaultStateDir = "/var/lib/constellation"
	DefaultListen   = ":9000"
)

// Machine configures a Bootstrapper. A field is required unless its comment describes the zero
// value.
type Machine struct {
	// StateDir survives a reboot, and is deleted with the machine. Only root has access.
	StateDir string
	// RunDir holds files with secrets while kubeadm runs. It is emptied at the start.
	RunDir string
	// Root is the root of the host's file system; "" means "/".
	Root string
	// Listen is the address of the InitServer.
	Listen   string
	Metadata Metadata
	// TPM is the address of the machine's TPM, see attestation.OpenTPM, or of its enrolled
	// identity.
	TPM    string
	Issuer attestation.Issuer
	// Validator verifies the evidence of this machine and of join services.
	Validator attestation.NewValidator
	// KubeletCloudProvider is the kubelet's --cloud-provider; "" means that it gets no such flag. Metadata.Self can
	// demand another one.
	KubeletCloudProvider string
	// KeysSocket is the socket of the key service of this machine; "" means kms.KeysSocket.
	KeysSocket string
	// APIServerPort is the port of API servers at the load balancer; 0: 6443.
	APIServerPort int
	// DividePods is whether Kubernetes gives each node its range of pod addresses. Otherwise a cloud routes
	// one to each machine.
	DividePods bool
	// Roots are the trust anchors for the identity of machines.
	Roots *x509.CertPool
	// Images are the measurements of further images that a join service may run, in addition to
	// this machine's.
	Images []attestation.Measurements
	// Kubeadm is the path of the installed kubeadm; "" means the default of the components.
	Kubeadm string
	// Client downloads components; nil means that of package component.
	Client *http.Client
	// StartKubelet starts the kubelet of a member; nil asks systemd.
	StartKubelet func(context.Context) error
	// Releases is whether the cluster can release this machine: a member asks for that until the end, and resets itself.
	Releases bool
	// Restart restarts the machine; nil asks systemd.
	Restart func(context.Context) error
	// Ready, unless nil, is called when the bootstrapper is operational: it listens, requests
	// tickets, or has started the kubelet.
	Ready func()
	Log   *slog.Logger

	registers registers      // nil: those of TPM
	joinPort  int            // of join services; 0: 30090
	listening func(net.Addr) // nil: no requests for tickets
	hurry     time.Duration  // bounds pauses; 0: no bound
}

// Metadata is the part of the cloud's metadata service that a machine uses. (Package operator
// uses the cloud's control API, cloudAPI.)
type Metadata interface {
	Self(context.Context) (cloud.Instance, error)
	// Peers returns all instances of the cluster, including this one. The list may lag.
	Peers(context.Context) ([]cloud.Instance, error)
	// LoadBalancer returns the host in front of the control planes.
	LoadBalancer(context.Context) (string, error)
	// InitSecretHash returns the SHA-256 of the secret that its owner gave the cluster.
	InitSecretHash(context.Context) ([]byte, error)
}

// ErrStuck means that the machine needs help, which the error describes. Restarting the
// bootstrapper changes nothing.
var ErrStuck = errors.New("this machine needs manual help")

const lockFileName = "bootstrapper.lock"

// Run makes the machine a node, or starts the kubelet of one. It returns nil when its work is
// done for this boot: the machine is a member, its kubelet was started, and the result of an
// init was fetched. It returns an error that wraps ErrStuck if only manual help or a reboot
// can solve the problem, and other errors if a retry can. At most one Run or [Reset] of a
// StateDir may be in progress.
//
// With m.Releases it does not return nil. When a member was released and reset, it offers the machine again.
func Run(ctx context.Context, m Machine) error {
	for {
		if err := runOnce(ctx, m); !errors.Is(err, errReset) {
			return err
		}
	}
}

// runOnce is Run until the machine has been released and reset: then the error is errReset.
func runOnce(ctx context.Context, m Machine) error {
	b, err := open(m)
	if err != nil {
		return err
	}
	defer b.close()
	if err := emptyDir(m.RunDir); err != nil {
		return err
	}
	if b.lock, err = openLock(ctx, b.state, b.m.registers); err != nil {
		return err
	}
	if err := b.offer(ctx); err != nil || !m.Releases {
		return err
	}
	return b.watchRelease(ctx)
}

// offer makes the machine a member, or starts the kubelet of one.
func (b *bootstrapper) offer(ctx context.Context) error {
	if err := b.enter(ctx); err != nil {
		return err
	}
	return b.awaitFirstKeys(ctx)
}

func (b *bootstrapper) enter(ctx context.Context) error {
	h, held := b.lock.holder()
	switch {
	case !held:
		// Left by a process that died before its claim, so no caller depends on it.
		if err := removeAll(b.state, ticketFile, requestFile, recordFile, kubeconfigFile, signer.SealedFile, kms.SealedFile, keyIDsFile); err != nil {
			return err
		}
		return b.free(ctx)
	case h.State == member:
		return b.member(ctx, h)
	case h.By == byInit:
		// Before anything listens: after a reboot this machine looks unused.
		if err := b.lock.seal(ctx); err != nil {
			return err
		}
		return b.serve(ctx, nil, nil)
	default:
		return b.resumeJoin(ctx, h)
	}
}

// bootstrapper is one Run.
type bootstrapper struct {
	m     Machine
	state *os.Root
	flock *os.File
	lock  *lock
	host  host
}

// open locks the state directory for this process.
func open(m Machine) (*bootstrapper, error) {
	if m.Log == nil {
		m.Log = slog.New(slog.DiscardHandler)
	}
	if m.Root == "" {
		m.Root = "/"
	}
	if m.registers == nil {
		m.registers = tpm(m.TPM)
	}
	if m.StartKubelet == nil {
		m.StartKubelet = startKubelet
	}
	if m.Restart == nil {
		m.Restart = restartMachine
	}
	if m.Ready == nil {
		m.Ready = func() {}
	}
	if m.APIServerPort == 0 {
		m.APIServerPort = apiPort
	}
	if m.KeysSocket == "" {
		m.KeysSocket = kms.KeysSocket
	}
	if m.joinPort == 0 {
		m.joinPort = joinPort
	}
	if m.Kubeadm == "" {
		m.Kubeadm = filepath.Join(m.Root, kubeadm.DefaultPath)
	}
	for _, d := range []string{m.StateDir, m.RunDir} {
		if err := os.MkdirAll(d, 0o700); err != nil {
			return nil, fmt.Errorf("create directory: %w", err)
		}
	}
	state, err := os.OpenRoot(m.StateDir)
	if err != nil {
		return nil, fmt.Errorf("open state directory: %w", err)
	}
	b := &bootstrapper{m: m, state: state, host: host{
		root:      m.Root,
		installer: &component.Installer{Root: m.Root, Client: m.Client, Log: m.Log, MaxPause: m.hurry},
		kubeadm:   kubeadm.Runner{Path: m.Kubeadm, Dir: m.RunDir},
	}}
	if b.flock, err = state.OpenFile(lockFileName, os.O_RDWR|os.O_CREATE, 0o600); err == nil {
		err = syscall.Flock(int(b.flock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
	}
	if err != nil {
		b.close()
		if errors.Is(err, syscall.EWOULDBLOCK) {
			return nil, errors.New("another bootstrapper is running: stop it with `systemctl stop constellation-bootstrapper`")
		}
		return nil, fmt.Errorf("lock state directory: %w", err)
	}
	return b, nil
}

func (b *bootstrapper) close() {
	if b.flock != nil {
		b.flock.Close()
	}
	b.state.Close()
}

// free offers the machine to inits and joins.
func (b *bootstrapper) free(ctx context.Context) error {
	self, err := b.self(ctx)
	if err != nil {
		return err
	}
	log := b.m.Log.With("node", self.Name, "role", string(self.Role))
	log.Info("machine is free")
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	join := func() error { return b.join(ctx, nil) }
	// A worker cannot be the first node, so it does not listen.
	if self.Role != cloud.ControlPlane {
		b.m.Ready()
		return join()
	}
	return b.serve(ctx, join, nil)
}

// serve runs the InitServer until a console has fetched the result of its init, or until join,
// unless nil, has made the machine a member. It resumes an init in progress. A member with lost
// keys also waits for those.
func (b *bootstrapper) serve(ctx context.Context, join func() error, lost []lostKeys) error {
	rec, err := openRecord(b.state, b.m.Log)
	if err != nil {
		return err
	}
	defer rec.close()
	var wg sync.WaitGroup
	defer wg.Wait() // after cancel: kubeadm ends first
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	s := newInitServer(b, rec, func(work func(context.Context)) { wg.Go(func() { work(ctx) }) })
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp", b.m.Listen)
	if err != nil {
		return fmt.Errorf("listen for a console: %w", err)
	}
	acked, recovered := s.acked, s.recovered
	if s.lost = lost; len(lost) == 0 {
		recovered = nil
	} else if acked, err = b.unfetched(s); err != nil {
		l.Close()
		return err
	}
	if acked != nil {
		if err := s.resume(); err != nil {
			l.Close()
			return err
		}
	}
	if recovered != nil {
		wg.Go(func() { s.awaitKeys(ctx) })
	}
	joined := make(chan error, 1)
	if join != nil {
		wg.Go(func() { joined <- join() })
	}
	stop := make(chan struct{})
	served := make(chan error, 1)
	go func() { served <- s.run(l, stop) }()
	end := func() error { close(stop); return <-served }
	b.m.Log.Info("listening for a console", "address", l.Addr().String())
	if b.m.listening != nil {
		b.m.listening(l.Addr())
	}
	b.m.Ready()
	for {
		select {
		case err := <-served:
			return err
		case <-ctx.Done():
			cause := context.Cause(ctx)
			cancel()
			return errors.Join(cause, end())
		case <-acked:
			b.m.Log.Info("init result fetched, bootstrapper done")
			if acked = nil; recovered == nil {
				return end()
			}
		case <-recovered:
			b.m.Log.Info("keys of this control plane are there, and its key service answers")
			if recovered = nil; acked == nil {
				return end()
			}
		case err := <-joined:
			h, _ := b.lock.holder()
			if err == nil && h.By == byInit {
				joined = nil // the console was first; the server continues
				continue
			}
			return errors.Join(err, end())
		}
	}
}

// member runs at each boot of a member.
func (b *bootstrapper) member(ctx context.Context, h holder) error {
	// Before anything else: until register 15 is extended, this machine looks unused.
	if err := b.lock.seal(ctx); err != nil {
		return err
	}
	lost, err := b.findLost(ctx)
	if err != nil {
		return err
	}
	// The kubelet starts the API server. One that waits for its keys is better than none: other control planes may have the cluster run.
	if !isLost(lost, keyprocess.KeyService) {
		if err := b.awaitKeyService(ctx); err != nil {
			if ctx.Err() != nil {
				return err
			}
			b.m.Log.Error("API server started without the key service", "err", err)
		}
	}
	if err := b.m.StartKubelet(ctx); err != nil {
		return err
	}
	b.m.Log.Info("kubelet of a member started", "claimed_by", h.By, "since", h.Time)
	// The ticket and key of a request that is obsolete.
	if err := removeAll(b.state, ticketFile, keyFile, requestCSR); err != nil {
		return err
	}
	if lost, err = b.recoverable(ctx, lost); err != nil {
		return err
	}
	if _, err := b.state.Lstat(kubeconfigFile); err == nil || len(lost) > 0 {
		return b.serve(ctx, nil, lost) // the result has not been fetched yet, or keys are awaited
	}
	b.m.Ready()
	return nil
}

// unfetched returns the channel that is closed when the result of an init was fetched; nil if there is none to fetch.
func (b *bootstrapper) unfetched(s *initServer) (chan struct{}, error) {
	_, err := b.state.Lstat(kubeconfigFile)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("find the result of the init: %w", err)
	}
	return s.acked, nil
}

// resumeJoin continues a join whose process died.
func (b *bootstrapper) resumeJoin(ctx context.Context, h holder) error {
	zero, err := b.lock.unsealed(ctx)
	if err != nil {
		return err
	}
	log := b.m.Log.With("claimed_at", h.Time, "rebooted", zero)
	if h.Failure != "" && !zero && !b.m.registers.survives() {
		return fmt.Errorf("%w: its join failed: %s; restart the machine to retry, or replace it", ErrStuck, h.Failure)
	}
	ticket, _, err := keptTicket(b.state, time.Now())
	if err != nil {
		return err
	}
	switch {
	case zero || ticket != nil:
	case b.m.registers.survives():
		if err := b.m.registers.clear(); err != nil {
			return fmt.Errorf("clear register 15: %w", err)
		}
	default:
		return fmt.Errorf("%w: it was claimed for a join, its ticket has expired, and join services issue tickets to unused machines only; restart the machine, or replace it", ErrStuck)
	}
	b.m.Ready()
	log.Info("join resumed", "ticket", ticket != nil)
	return b.join(ctx, h.clusterID())
}

// join runs the JoinClient and records its result. cluster is the only one that may be joined
// if the node was claimed for it; nil if it was not.
func (b *bootstrapper) join(ctx context.Context, cluster []byte) error {
	validator, err := b.serviceValidator(ctx)
	if err != nil {
		return err
	}
	c := &JoinClient{
		Metadata: b.m.Metadata, Lock: b.lock, Issuer: b.m.Issuer,
		Validator: func() attestation.Validator { return validator },
		Installer: b.host.installer, Kubeadm: &b.host.kubeadm, StartKubelet: b.m.StartKubelet,
		KubeletCloudProvider: b.m.KubeletCloudProvider,
		Keys:                 b,
		State:                b.state, Root: b.m.Root, Cluster: cluster, Log: b.m.Log, port: b.m.joinPort, hurry: b.m.hurry,
	}
	err = c.Run(ctx)
	if errors.Is(err, errJoinFailed) {
		// Restarting the process would only repeat a step that was retried often enough.
		if e := b.lock.fail(err.Error(), false); e != nil {
			return errors.Join(err, e)
		}
		return fmt.Errorf("%w: %w; restart the machine to retry, or replace it", ErrStuck, err)
	}
	return err
}

// imageRegisters are the registers that an OS image determines; see the release's measurements.
var imageRegisters = []uint32{4, 9, 11}

// serviceValidator returns the validator of join services: a control plane of this machine's
// own project that runs this machine's image or one of Images, and that is a member of some
// cluster. The cluster is checked with the ticket.
func (b *bootstrapper) serviceValidator(ctx context.Context) (attestation.Validator, error) {
	pcrs, err := b.m.registers.read(ctx, imageRegisters...)
	if err != nil {
		return nil, fmt.Errorf("measure this machine: %w", err)
	}
	own := attestation.Enforced(pcrs)
	// This machine's project is in the certificate of its own key.
	self, err := b.attestSelf(ctx, own)
	if err != nil {
		return nil, err
	}
	return b.m.Validator(b.m.Roots, own, attestation.Options{
		PCR15: attestation.PCR15Member(), Role: cloud.ControlPlane, UID: self.UID, Alternatives: b.m.Images,
	}), nil
}

// attestSelf returns the identity that this machine can prove.
func (b *bootstrapper) attestSelf(ctx context.Context, own attestation.Measurements) (attestation.Identity, error) {
	nonce, err := randomBytes(attestation.MaxUserData)
	if err != nil {
		return attestation.Identity{}, err
	}
	doc, err := b.m.Issuer.Issue(ctx, nonce)
	if err != nil {
		return attestation.Identity{}, fmt.Errorf("attest this machine: %w", err)
	}
	var st attestation.Statement
	for _, rule := range []attestation.PCR15{attestation.PCR15Zero(), attestation.PCR15Member()} {
		st, err = b.m.Validator(b.m.Roots, own, attestation.Options{PCR15: rule}).Validate(ctx, doc, nonce)
		if !errors.Is(err, attestation.ErrMember) {
			break
		}
	}
	if err != nil {
		return attestation.Identity{}, fmt.Errorf("attest this machine: %w", err)
	}
	return st.Identity, nil
}

// self waits until the cloud returns this machine's identity.
func (b *bootstrapper) self(ctx context.Context) (cloud.Instance, error) {
	return waitSelf(ctx, b.m.Metadata, b.m.Log)
}

// emptyDir removes the files in dir, which is ours alone.
func emptyDir(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("clear %s: %w", dir, err)
	}
	for _, e := range entries {
		if err := os.RemoveAll(filepath.Join(dir, e.Name())); err != nil {
			return fmt.Errorf("clear %s: %w", dir, err)
		}
	}
	return nil
}

// cloneRequest returns the request without its secrets.
func cloneRequest(r *initproto.InitRequest) *initproto.InitRequest {
	c := proto.Clone(r).(*initproto.InitRequest)
	c.InitSecret, c.CertifierKeys, c.KmsKeys = nil, nil, nil
	return c
}

// stopGrace is how long open streams may take when the server stops.
const stopGrace = 3 * time.Second
