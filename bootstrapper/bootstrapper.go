// Package bootstrapper makes an unused machine a node of a cluster, once.
//
// It runs on every new machine. A control plane listens for a console that wants to
// begin a cluster (InitServer, the contract of package initproto, on port 9000 over
// attested TLS), and every machine asks the join services of its cloud's control
// planes for a ticket ([JoinClient]). Both run side by side; whichever takes the
// node lock first wins, once, for ever. Then it installs components, runs kubeadm
// and stops.
//
// # The node lock
//
// A machine is free, claimed by an init or a join for one cluster, or a member. The
// lock is a file, made by a link that can succeed only once, and register 15 of the
// TPM, which carries the cluster's ID from the claim on, so that nobody can be made
// to believe that the machine is unused. At each start both must agree; a register
// that is set without a file, or for another cluster, is refused.
//
// What happens after a death half-way depends on who had claimed the node:
//
//   - Init. The request and everything that was told to the console are on disk. The
//     next start extends register 15 first if the machine was rebooted, undoes with
//     "kubeadm reset" what the unfinished init left, and begins again, for the same
//     cluster. The console attaches again and gets the replay.
//   - Join. The ticket is on disk. The next start goes on with it while it is valid.
//     Without one, a machine that was rebooted asks for another, and takes it from the
//     same cluster only; one that was not cannot, as it no longer looks unused, and
//     says that it must be restarted.
//   - A reported failure of an init is final, unless kubeadm had not run yet or had got
//     no further than its preflight: then there is the claim and nothing of a cluster,
//     and the next request for the same cluster begins the work again.
//   - In any state, [Reset] followed by a reboot makes the machine unused again; in
//     the sandbox it is as cheap to replace it.
//
// A member that boots extends register 15 before anything else, starts its kubelet,
// and is done.
//
// The package never decides which version is installed, and never talks to a
// Kubernetes API.
package bootstrapper

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
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
	"constellation/engine/cloud"
	"constellation/engine/component"
	"constellation/engine/kubeadm"
)

// Where things are on a machine.
const (
	DefaultStateDir = "/var/lib/constellation"
	DefaultListen   = ":9000"
)

// Machine is what a Bootstrapper must know of its machine. All fields without a
// word on their zero value are required.
type Machine struct {
	// StateDir outlives a reboot, and is gone with the machine. Only root enters it.
	StateDir string
	// RunDir holds files with secrets while kubeadm runs. What is in it at the start
	// is removed.
	RunDir string
	// Root is where the host's file system begins; "" means "/".
	Root string
	// Listen is the address of the InitServer.
	Listen   string
	Metadata Metadata
	// TPM is the address of the machine's TPM; see attestation.OpenTPM.
	TPM    string
	Issuer attestation.Issuer
	// Roots are whom this machine believes which machine is which.
	Roots *x509.CertPool
	// Images are the measurements of further images that a join service may run,
	// beside that of this machine.
	Images []attestation.Measurements
	// Kubeadm is the path of kubeadm once it is installed; "" means where components
	// put it.
	Kubeadm string
	// Client downloads components; nil means that of package component.
	Client *http.Client
	// StartKubelet starts the kubelet of a member; nil asks systemd.
	StartKubelet func(context.Context) error
	// Ready, unless nil, is called when the machine can be used as far as it can: it
	// listens, or asks for tickets, or its kubelet was started.
	Ready func()
	Log   *slog.Logger

	registers registers      // nil: those of TPM
	apiPort   int            // of API servers at the load balancer; 0: 6443
	joinPort  int            // of join services; 0: 30090
	listening func(net.Addr) // nil: nobody asks
	hurry     time.Duration  // bounds pauses; 0: they are as long as they are
}

// Metadata is what a machine asks its cloud.
type Metadata interface {
	Self(context.Context) (cloud.Instance, error)
	// Peers returns all instances of the cluster, this one included. It may be behind.
	Peers(context.Context) ([]cloud.Instance, error)
	// LoadBalancer returns the host in front of the control planes.
	LoadBalancer(context.Context) (string, error)
	// InitSecretHash returns the SHA-256 of the secret that its owner gave the cluster.
	InitSecretHash(context.Context) ([]byte, error)
}

// ErrStuck means that this machine gets nowhere without somebody's help; the error
// says which. Starting the bootstrapper again changes nothing.
var ErrStuck = errors.New("this machine cannot go on by itself")

const lockFileName = "bootstrapper.lock"

// Run makes the machine a node, or lets it be one. It returns nil when its work is
// done for this boot: the machine is a member, its kubelet was started, and the
// result of an init was fetched. It returns an error that wraps ErrStuck if only
// somebody's help, or a reboot, can change anything, and other errors if another
// try can. At most one Run or [Reset] of a StateDir is under way.
func Run(ctx context.Context, m Machine) error {
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
	h, held := b.lock.holder()
	switch {
	case !held:
		// What a process left that died before its claim: nobody was promised anything.
		if err := removeAll(b.state, ticketFile, requestFile, recordFile, kubeconfigFile); err != nil {
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
		return b.serve(ctx, nil)
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

// open makes the state directory this process's own.
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
	if m.Ready == nil {
		m.Ready = func() {}
	}
	if m.apiPort == 0 {
		m.apiPort = apiPort
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
			return nil, errors.New("another bootstrapper is at work: `systemctl stop constellation-bootstrapper` ends it")
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

// free offers the machine to whoever comes first.
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
	// A worker can be no first node, so nobody has a reason to talk to it.
	if self.Role != cloud.ControlPlane {
		b.m.Ready()
		return join()
	}
	return b.serve(ctx, join)
}

// serve runs the InitServer until a console has fetched the result of its init, or
// until join, unless nil, has made the machine a member. It takes an init up that
// was under way.
func (b *bootstrapper) serve(ctx context.Context, join func() error) error {
	rec, err := openRecord(b.state, b.m.Log)
	if err != nil {
		return err
	}
	defer rec.close()
	var wg sync.WaitGroup
	defer wg.Wait() // after cancel: kubeadm ends before we do
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	s := newInitServer(b, rec, func(work func(context.Context)) { wg.Go(func() { work(ctx) }) })
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp", b.m.Listen)
	if err != nil {
		return fmt.Errorf("listen for a console: %w", err)
	}
	if err := s.resume(); err != nil {
		l.Close()
		return err
	}
	joined := make(chan error, 1)
	if join != nil {
		wg.Go(func() { joined <- join() })
	}
	stop := make(chan struct{})
	served := make(chan error, 1)
	go func() { served <- s.run(l, stop) }()
	end := func() error { close(stop); return <-served }
	b.m.Log.Info("waiting for a console", "address", l.Addr().String())
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
		case <-s.acked:
			b.m.Log.Info("result fetched, the bootstrapper's work is done")
			return end()
		case err := <-joined:
			h, _ := b.lock.holder()
			if err == nil && h.By == byInit {
				joined = nil // the console was first; the server goes on
				continue
			}
			return errors.Join(err, end())
		}
	}
}

// member does what a member does at each boot.
func (b *bootstrapper) member(ctx context.Context, h holder) error {
	// Before anything else: until register 15 says so, this machine looks unused.
	if err := b.lock.seal(ctx); err != nil {
		return err
	}
	if err := b.m.StartKubelet(ctx); err != nil {
		return err
	}
	b.m.Log.Info("kubelet of a member started", "claimed_by", h.By, "since", h.Time)
	// A ticket and the key of a request that nobody makes any more.
	if err := removeAll(b.state, ticketFile, keyFile, requestCSR); err != nil {
		return err
	}
	if _, err := b.state.Lstat(kubeconfigFile); err == nil {
		return b.serve(ctx, nil) // nobody has fetched the result yet
	}
	b.m.Ready()
	return nil
}

// resumeJoin goes on with a join whose process died.
func (b *bootstrapper) resumeJoin(ctx context.Context, h holder) error {
	zero, err := b.lock.unsealed(ctx)
	if err != nil {
		return err
	}
	log := b.m.Log.With("claimed_at", h.Time, "rebooted", zero)
	if h.Failure != "" && !zero {
		return fmt.Errorf("%w: its join failed: %s; restart the machine to let it try again, or replace it", ErrStuck, h.Failure)
	}
	ticket, _, err := keptTicket(b.state, time.Now())
	if err != nil {
		return err
	}
	if ticket == nil && !zero {
		return fmt.Errorf("%w: it was claimed for a join and has no valid ticket any more, and no join service gives another one to a machine that does not look unused; restart the machine, or replace it", ErrStuck)
	}
	b.m.Ready()
	log.Info("join taken up", "ticket", ticket != nil)
	return b.join(ctx, h.clusterID())
}

// join runs the JoinClient and records how it ends. cluster is the only one that may
// be joined, since the node was claimed for it; nil if it was not.
func (b *bootstrapper) join(ctx context.Context, cluster []byte) error {
	validator, err := b.serviceValidator(ctx)
	if err != nil {
		return err
	}
	c := &JoinClient{
		Metadata: b.m.Metadata, Lock: b.lock, Issuer: b.m.Issuer,
		Validator: func() attestation.Validator { return validator },
		Installer: b.host.installer, Kubeadm: &b.host.kubeadm, StartKubelet: b.m.StartKubelet,
		State: b.state, Root: b.m.Root, Cluster: cluster, Log: b.m.Log, port: b.m.joinPort, hurry: b.m.hurry,
	}
	err = c.Run(ctx)
	if errors.Is(err, errJoinFailed) {
		// Restarting the process would only repeat what was tried often enough.
		if e := b.lock.fail(err.Error(), false); e != nil {
			return errors.Join(err, e)
		}
		return fmt.Errorf("%w: %w; restart the machine to let it try again, or replace it", ErrStuck, err)
	}
	return err
}

// imageRegisters are what an OS image decides; see package sandbox/machine.
var imageRegisters = []uint32{4, 9, 11}

// serviceValidator returns what judges join services: a control plane of this
// machine's own project that runs this machine's image or one that the image knows,
// and that is a member of some cluster. Of which one is checked with the ticket.
func (b *bootstrapper) serviceValidator(ctx context.Context) (attestation.Validator, error) {
	pcrs, err := b.m.registers.read(ctx, imageRegisters...)
	if err != nil {
		return nil, fmt.Errorf("measure this machine: %w", err)
	}
	own := attestation.Enforced(pcrs)
	// Which project this machine belongs to is in the certificate of its own key.
	self, err := attestSelf(ctx, b.m.Issuer, b.m.Roots, own)
	if err != nil {
		return nil, err
	}
	return attestation.NewTPMValidator(b.m.Roots, own, attestation.Options{
		PCR15: attestation.PCR15Member(), Role: cloud.ControlPlane, UID: self.UID, Alternatives: b.m.Images,
	}), nil
}

// attestSelf returns who this machine can prove to be.
func attestSelf(ctx context.Context, issuer attestation.Issuer, roots *x509.CertPool, own attestation.Measurements) (attestation.Identity, error) {
	nonce, err := randomBytes(attestation.MaxUserData)
	if err != nil {
		return attestation.Identity{}, err
	}
	doc, err := issuer.Issue(ctx, nonce)
	if err != nil {
		return attestation.Identity{}, fmt.Errorf("attest this machine: %w", err)
	}
	var st attestation.Statement
	for _, rule := range []attestation.PCR15{attestation.PCR15Zero(), attestation.PCR15Member()} {
		st, err = attestation.NewTPMValidator(roots, own, attestation.Options{PCR15: rule}).Validate(ctx, doc, nonce)
		if !errors.Is(err, attestation.ErrMember) {
			break
		}
	}
	if err != nil {
		return attestation.Identity{}, fmt.Errorf("attest this machine: %w", err)
	}
	return st.Identity, nil
}

// self waits until the cloud says who this machine is.
func (b *bootstrapper) self(ctx context.Context) (cloud.Instance, error) {
	return waitSelf(ctx, b.m.Metadata, b.m.Log)
}

// emptyDir removes what is in dir. It is ours alone and holds files only.
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

// cloneRequest returns the request without its secret.
func cloneRequest(r *initproto.InitRequest) *initproto.InitRequest {
	c := proto.Clone(r).(*initproto.InitRequest)
	c.InitSecret = nil
	return c
}

// stopGrace is how long open streams may take when the server stops.
const stopGrace = 3 * time.Second
