package joinservice

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"constellation/engine/atls"
	"constellation/engine/attestation"
	"constellation/engine/attestation/certifier"
	"constellation/engine/attestation/keyprocess"
	"constellation/engine/cloud"
	"constellation/engine/kms"
	"constellation/engine/kubeadm"
	"constellation/engine/version"
	"constellation/joinservice/joinproto"
)

// The CA signer is a process of its own beside each join service. It has what a captured join service must not have: the keys of the
// cluster's CA, the TPM, and the sockets of the certifier and of the key service. It listens at a unix socket alone, and does for its
// join service:
//
//   - It signs serving certificates of kubelets of new machines, and nothing else with the CA's key.
//   - It makes evidence about this machine, for a server that machines join. It computes what the evidence binds.
//   - It encrypts the keys of the cluster for a joining control plane. It judges that machine by itself: by evidence that binds the
//     machine's public key, by the cloud, and by the records of the cluster. The join service carries ciphertext.
//   - It passes requests on to certifier and key service, except those for keys. A generation or a mode must be that of join-config.
//
// Its connections to the API server and to the cloud begin here.

// oldestSealing is the oldest release whose bootstrappers ask for encrypted keys.
const oldestSealing = "v1.1.0"

// SignerConfig configures a Signer.
type SignerConfig struct {
	Access
	// Issuer makes evidence about this machine.
	Issuer attestation.Issuer
	// PKI is a folder with the layout of /etc/kubernetes/pki.
	PKI string
	// APIServerPort is the API server's port at the load balancer.
	APIServerPort int
	// Certifier is the socket of this machine's certifier; empty: none. KMS is that of its key service for join services; empty: API
	// servers do not encrypt.
	Certifier, KMS string
}

// Signer is a CA signer. Create it with NewSigner.
type Signer struct {
	*judge
	authority *authority
	metadata  metadata
	apiPort   int
	certifier string // socket
	kms       string // socket
}

// NewSigner returns a Signer that has read the cluster's CA, and nothing else yet.
func NewSigner(c SignerConfig) (*Signer, error) {
	a, err := readAuthority(c.PKI)
	if err != nil {
		return nil, err
	}
	// Without certifiers: a captured join service can have any machine certified.
	j, err := c.judge(c.Issuer, nil)
	if err != nil {
		return nil, err
	}
	return &Signer{judge: j, authority: a, metadata: c.Metadata, apiPort: c.APIServerPort, certifier: c.Certifier, kms: c.KMS}, nil
}

// Run serves the join service at a listener of keyprocess.Listen until ctx ends. It closes the listener.
func (s *Signer) Run(ctx context.Context, l net.Listener) error {
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error {
		s.kube.await(ctx, s.log)
		return s.kube.watch(ctx)
	})
	g.Go(func() error { return s.watchDemands(ctx, func() {}) })
	g.Go(func() error {
		s.log.Info("CA signer started", "ca", s.authority.hash)
		return keyprocess.Serve(ctx, l, s.log, s.answer)
	})
	return g.Wait()
}

// answer answers a request of the join service.
func (s *Signer) answer(ctx context.Context, m keyprocess.Message, log *slog.Logger) (a keyprocess.Message, err error) {
	defer func() { err = unavailable(err) }()
	switch m.Op {
	case keyprocess.Authority:
		return keyprocess.Message{Certificate: s.authority.cert.Raw}, nil
	case keyprocess.SignServing:
		return s.sign(ctx, m, log)
	case keyprocess.SealSecrets:
		return s.seal(ctx, m, log)
	case keyprocess.Evidence: // of a server that machines join, and of nothing else
		a.Document, err = s.issuer.Issue(ctx, atls.ServerBinding(atls.PurposeJoin, m.Request, m.Recipient))
		return a, err
	case keyprocess.OwnEvidence:
		a.Document, err = s.issuer.Issue(ctx, ownBinding(m.Request))
		return a, err
	case keyprocess.RequestCertificate, keyprocess.AnswerChallenge, keyprocess.UseCertificate:
		return s.certificate(ctx, m)
	case keyprocess.Challenge, keyprocess.Certify, keyprocess.Authorities, keyprocess.Rotate:
		return pass(ctx, keyprocess.Certifier, s.certifier, m)
	case keyprocess.Generation, keyprocess.Used:
		return pass(ctx, keyprocess.KeyService, s.kms, m)
	case keyprocess.Raise, keyprocess.Encryption:
		if err := published(s.kube.config(), m); err != nil {
			return a, err
		}
		return pass(ctx, keyprocess.KeyService, s.kms, m)
	}
	return a, fmt.Errorf("operation %.20q is not known", m.Op)
}

// published returns an error unless join-config has what a request wants of the key service. The join service may have read it earlier.
func published(config map[string]string, m keyprocess.Message) error {
	most, _ := strconv.ParseUint(config[kms.GenerationKey], 10, 32) // 0: none
	if uint64(m.Generation) > most || m.Op == keyprocess.Encryption && m.Encryption != config[kms.ModeKey] {
		return &keyprocess.UnavailableError{Err: errors.New("join-config does not have this generation or mode of the key service")}
	}
	return nil
}

// pass asks another process on this machine, and returns its answer.
func pass(ctx context.Context, process, socket string, m keyprocess.Message) (keyprocess.Message, error) {
	if socket == "" {
		return keyprocess.Message{}, fmt.Errorf("this cluster has no %s", process)
	}
	a, err := keyprocess.Call(ctx, process, socket, m)
	if e := (*keyprocess.RefusedError)(nil); errors.As(err, &e) {
		return a, errors.New(e.Reason) // the caller adds the rest again
	}
	if err != nil {
		return a, &keyprocess.UnavailableError{Err: err}
	}
	return a, nil
}

// unavailable marks an error after which the same request may succeed.
func unavailable(err error) error {
	if err == nil {
		return nil
	}
	switch status.Code(answer(err)) {
	case codes.Unavailable, codes.ResourceExhausted, codes.Canceled:
		return &keyprocess.UnavailableError{Err: err}
	}
	return err
}

// sign signs a kubelet's serving certificate for a machine of the cloud that is no node yet. The join service compared its name and address
// with evidence.
func (s *Signer) sign(ctx context.Context, m keyprocess.Message, log *slog.Logger) (keyprocess.Message, error) {
	if m.Machine == nil {
		return keyprocess.Message{}, errors.New("the request names no machine")
	}
	id := *m.Machine
	csr, err := parseRequest(m.Request, id)
	if err != nil {
		return keyprocess.Message{}, err
	}
	if _, err := s.machine(ctx, attestation.Statement{Identity: id, Key: m.Key}, id.IP); err != nil {
		return keyprocess.Message{}, err
	}
	if err := s.kube.notYetNode(ctx, id); err != nil {
		return keyprocess.Message{}, err
	}
	der, err := s.authority.sign(csr, id, time.Now())
	if err != nil {
		return keyprocess.Message{}, err
	}
	c, err := x509.ParseCertificate(der)
	if err != nil {
		return keyprocess.Message{}, err
	}
	log.Info("serving certificate signed", "node", id.Name, "ip", id.IP.String(), "serial", c.SerialNumber.Text(16), "until", c.NotAfter)
	return keyprocess.Message{Certificate: der, Authorities: s.authority.cert.Raw}, nil
}

// certificate has the certificate of a certifier added to the evidence of this machine.
func (s *Signer) certificate(ctx context.Context, m keyprocess.Message) (a keyprocess.Message, err error) {
	issuer, ok := s.issuer.(certified)
	if !ok {
		return a, fmt.Errorf("evidence of variant %s needs no certificate", s.method.Variant)
	}
	switch m.Op {
	case keyprocess.RequestCertificate:
		a.Request, err = issuer.RequestCertificate(ctx)
	case keyprocess.AnswerChallenge:
		a.Answer, err = issuer.AnswerChallenge(ctx, m.Challenge)
	default:
		err = issuer.UseCertificate(m.Certificate)
	}
	return a, err
}

// seal returns the keys of the cluster for a joining control plane, encrypted to the key that its evidence binds.
func (s *Signer) seal(ctx context.Context, m keyprocess.Message, log *slog.Logger) (a keyprocess.Message, err error) {
	var to attestation.Identity
	defer func() {
		if err != nil {
			log.Warn("keys for a control plane refused", "node", to.Name, "err", printable(err.Error(), maxText))
		}
	}()
	if len(m.Recipient) == 0 {
		return s.plain(ctx, m, log)
	}
	if to, err = s.controlPlane(ctx, m.Document, m.Recipient); err != nil {
		return a, err
	}
	secrets, err := s.secrets(ctx, to, log)
	if err != nil {
		return a, err
	}
	defer wipe(secrets)
	if a.Sealed, err = joinproto.Seal(m.Recipient, secrets); err != nil {
		return a, err
	}
	log.Info("keys encrypted for a control plane", "node", to.Name, "provider_id", to.ProviderID, "ip", to.IP.String())
	return a, nil
}

// controlPlane returns the unused control plane that the evidence document is about, if it binds a public key, and if the machine may
// join. Nothing that the join service sends can replace that.
func (s *Signer) controlPlane(ctx context.Context, document, public []byte) (attestation.Identity, error) {
	demands := s.snapshot.Load()
	if demands == nil {
		return attestation.Identity{}, errNotReady
	}
	if len(document) == 0 || len(document) > attestation.MaxDocument || len(public) > joinproto.MaxSealingKey {
		return attestation.Identity{}, fmt.Errorf("the request has a document of %d bytes and a key of %d bytes", len(document), len(public))
	}
	st, err := demands.validator.Validate(ctx, document, joinproto.SealingUserData(public))
	id := st.Identity
	switch {
	case err != nil:
		return id, err
	case !unused(st):
		return id, errUsedMachine
	case id.Role != cloud.ControlPlane:
		return id, fmt.Errorf("the evidence is of a %s, and only control planes get the keys of the cluster", id.Role)
	}
	return id, s.mayJoin(ctx, st)
}

// mayJoin returns why a machine may not join, by the cloud and by fresh reads of the cluster's records.
func (s *Signer) mayJoin(ctx context.Context, st attestation.Statement) error {
	machine, err := s.machine(ctx, st, st.Identity.IP)
	if err != nil {
		return err
	}
	if err := s.kube.stayingNow(ctx, machine); err != nil {
		return err
	}
	if err := s.kube.notYetNode(ctx, st.Identity); err != nil {
		return err
	}
	return s.kube.allowedNow(ctx, machine)
}

// plain returns the keys without encryption, for a machine of the cloud that is no node yet. Bootstrappers of earlier releases need that, so
// it ends with the last image of such a release that join-config accepts.
func (s *Signer) plain(ctx context.Context, m keyprocess.Message, log *slog.Logger) (a keyprocess.Message, err error) {
	switch {
	case m.Machine == nil || m.Machine.Role != cloud.ControlPlane:
		return a, errors.New("only control planes get the keys of the cluster")
	case !acceptsOlder(s.kube.config()):
		return a, fmt.Errorf("the bootstrapper of this machine does not ask for encrypted keys, and join-config accepts no image before %s; replace the machine by one with a newer image", oldestSealing)
	}
	if err := s.mayJoin(ctx, attestation.Statement{Identity: *m.Machine, Key: m.Key}); err != nil {
		return a, err
	}
	secrets, err := s.secrets(ctx, *m.Machine, log)
	if err != nil {
		return a, err
	}
	defer wipe(secrets)
	if a.Keys, err = proto.Marshal(secrets); err != nil {
		return a, errors.New("encode keys of the cluster") // the cause could quote one
	}
	log.Warn("keys given to a control plane without encryption", "node", m.Machine.Name, "reason", "join-config accepts images before "+oldestSealing)
	return a, nil
}

// acceptsOlder reports whether join-config accepts an image of a release before oldestSealing.
func acceptsOlder(config map[string]string) bool {
	for key := range config {
		image, ok := strings.CutPrefix(key, keyGeneration)
		if !ok {
			continue
		}
		if v, err := version.Parse(image); err == nil && v.Less(version.MustParse(oldestSealing)) {
			return true
		}
	}
	return false
}

// secrets returns the keys of the cluster for a control plane, and what it does with them.
func (s *Signer) secrets(ctx context.Context, to attestation.Identity, log *slog.Logger) (*joinproto.ControlPlaneSecrets, error) {
	files, err := s.authority.controlPlaneFiles()
	if err != nil {
		return nil, err
	}
	host, err := s.metadata.LoadBalancer(ctx)
	if err != nil {
		return nil, fmt.Errorf("find API server: %w", err)
	}
	out := &joinproto.ControlPlaneSecrets{Files: files, ApiServerEndpoint: net.JoinHostPort(host, strconv.Itoa(s.apiPort))}
	if s.certifier != "" {
		if out.CertifierKeys, err = (certifier.Client{Socket: s.certifier}).HandOver(ctx, to); err != nil {
			return nil, fmt.Errorf("%w: %w", errCertifier, err)
		}
	}
	if s.kms == "" {
		return out, nil
	}
	config := s.kube.config()
	if out.KmsFingerprint = config[kms.FingerprintKey]; out.GetKmsFingerprint() != "" {
		out.KmsMode = config[kms.ModeKey]
	}
	if out.KmsKeys, err = (kms.Client{Socket: s.kms}).HandOver(ctx, to); err != nil {
		if out.GetKmsMode() != string(kubeadm.Decrypt) {
			return nil, fmt.Errorf("%w: %w", errKeyService, err)
		}
		// This machine is as old as the cluster, or has no keys yet.
		log.Info("ticket without keys of the key service", "node", to.Name, "err", err)
	}
	return out, nil
}

// wipe clears secrets in memory.
func wipe(s *joinproto.ControlPlaneSecrets) {
	for _, f := range s.GetFiles() {
		clear(f.GetData())
	}
	clear(s.GetCertifierKeys())
	clear(s.GetKmsKeys())
}
