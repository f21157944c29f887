package bootstrapper

import (
	"crypto/ecdsa"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"regexp"
	"runtime"
	"time"

	"google.golang.org/protobuf/proto"

	"constellation/engine/cloud"
	"constellation/engine/component"
	"constellation/engine/kms"
	"constellation/engine/kubeadm"
	"constellation/engine/registry"
	"constellation/engine/release"
	"constellation/engine/version"
	"constellation/joinservice/joinproto"
)

// authorityFiles are the files of the cluster's PKI for a control plane, with their modes. All
// must be present, and no others.
var authorityFiles = map[string]fs.FileMode{
	"ca.crt": 0o644, "ca.key": 0o600,
	"sa.pub": 0o644, "sa.key": 0o600,
	"front-proxy-ca.crt": 0o644, "front-proxy-ca.key": 0o600,
	"etcd/ca.crt": 0o644, "etcd/ca.key": 0o600,
}

var fingerprintRE = regexp.MustCompile(`^[0-9a-f]{16}$`)

var hashRE = regexp.MustCompile(`^sha256:[0-9a-f]{64}$`)

// ticket is a validated join ticket.
type ticket struct {
	raw        *joinproto.IssueJoinTicketResponse
	received   time.Time
	cluster    []byte
	version    version.Version
	components component.List
	config     kubeadm.Config
	files      []hostFile
}

// parseTicket validates everything about a ticket that a machine can validate before it joins.
// The connection proves the issuer; the statement proves the origin of the components, because
// a ConfigMap names them.
func parseTicket(raw *joinproto.IssueJoinTicketResponse, self cloud.Instance, key *ecdsa.PrivateKey, trust release.Trust, cloudProvider string) (*ticket, error) {
	t := &ticket{raw: raw, received: time.Now(), cluster: raw.GetClusterId()}
	if len(t.cluster) != clusterIDSize {
		return nil, fmt.Errorf("the cluster's ID has %d bytes, want %d", len(t.cluster), clusterIDSize)
	}
	var err error
	if t.version, err = version.Parse(raw.GetKubernetesVersion()); err != nil {
		return nil, err
	}
	if t.components, err = component.FromProto(raw.GetComponents()); err != nil {
		return nil, err
	}
	if err := trust.Verify(raw.GetComponentsStatement(), t.version, runtime.GOARCH, t.components); err != nil {
		return nil, err
	}
	k, ok := t.components.ByName("kubeadm")
	if !ok || k.Path != kubeadm.DefaultPath {
		return nil, fmt.Errorf("its components lack kubeadm with the path %s", kubeadm.DefaultPath)
	}
	controlPlane := self.Role == cloud.ControlPlane
	hash := raw.GetDiscoveryTokenCaCertHash()
	if !hashRE.MatchString(hash) {
		return nil, errors.New("the hash of the cluster's CA is malformed")
	}
	if t.config, err = kubeadm.NewJoin(kubeadm.Join{
		ControlPlane: controlPlane, Endpoint: raw.GetApiServerEndpoint(), Token: raw.GetToken(), CAHash: hash,
	}, kubeadm.Node{Name: self.Name, ProviderID: self.ProviderID, IP: self.IP, CloudProvider: cloudProvider}); err != nil {
		return nil, err
	}
	cert, err := kubeletCertificate(raw.GetKubeletCertificate(), self, key)
	if err != nil {
		return nil, err
	}
	if t.files, err = servingFiles(raw.GetKubeletCertificate(), key); err != nil {
		return nil, err
	}
	from, err := registry.FromProto(raw.GetRegistry())
	if err != nil {
		return nil, err
	}
	t.files = append(t.files, registryFiles(from)...)
	if !controlPlane {
		if len(raw.GetControlPlaneFiles())+len(raw.GetCertifierKeys())+len(raw.GetKmsKeys())+len(raw.GetKmsFingerprint())+len(raw.GetSealedSecrets()) > 0 {
			// They must not be on a worker's disk, not even unused.
			return nil, errors.New("it contains keys of the cluster, which a worker must not have")
		}
		return t, nil
	}
	if err := checkEncryption(raw); err != nil {
		return nil, err
	}
	t.files = append(t.files, hostFiles(kubeadm.ControlPlaneFiles())...)
	got := map[string]bool{}
	for _, f := range raw.GetControlPlaneFiles() {
		mode, ok := authorityFiles[f.GetName()]
		if !ok || got[f.GetName()] || len(f.GetData()) == 0 {
			return nil, fmt.Errorf("it contains an unexpected file %.80q", f.GetName())
		}
		got[f.GetName()] = true
		t.files = append(t.files, hostFile{path.Join(kubeadm.PKIDir, f.GetName()), f.GetData(), mode})
		if f.GetName() == "ca.crt" {
			ca, err := parseCertificate("cluster's CA", f.GetData())
			if err != nil {
				return nil, err
			}
			sum := sha256.Sum256(ca.RawSubjectPublicKeyInfo)
			if "sha256:"+hex.EncodeToString(sum[:]) != hash || cert.CheckSignatureFrom(ca) != nil {
				return nil, errors.New("the cluster's CA does not match its hash and the kubelet certificate")
			}
		}
	}
	if len(got) != len(authorityFiles) {
		return nil, fmt.Errorf("it contains %d of the %d files of the cluster's PKI that a control plane needs", len(got), len(authorityFiles))
	}
	return t, nil
}

// checkEncryption checks what a ticket says about the encryption of Secrets.
func checkEncryption(t *joinproto.IssueJoinTicketResponse) error {
	id, mode := t.GetKmsFingerprint(), kubeadm.Encryption(t.GetKmsMode())
	switch {
	case id == "" && mode == "":
		return nil
	case !fingerprintRE.MatchString(id):
		return errors.New("the fingerprint of the keys of the key service is malformed")
	case mode != kubeadm.Encrypt && mode != kubeadm.Decrypt:
		return fmt.Errorf("its mode of encryption is %.20q, want %s or %s", mode, kubeadm.Encrypt, kubeadm.Decrypt)
	}
	if len(t.GetKmsKeys()) == 0 {
		return nil
	}
	keys, err := kms.Parse(t.GetKmsKeys())
	if err != nil {
		return err
	}
	if have := keys.Fingerprint(); have != id {
		return fmt.Errorf("its keys of the key service have the fingerprint %s, want %s", have, id)
	}
	return nil
}

// kubeletCertificate parses the kubelet's serving certificate, which must be for this machine and key.
func kubeletCertificate(b []byte, self cloud.Instance, key *ecdsa.PrivateKey) (*x509.Certificate, error) {
	cert, err := parseCertificate("kubelet certificate", b)
	if err != nil {
		return nil, err
	}
	if !key.PublicKey.Equal(cert.PublicKey) {
		return nil, errors.New("the kubelet certificate is for another key")
	}
	if cert.VerifyHostname(self.Name) != nil || cert.VerifyHostname(self.IP.String()) != nil {
		return nil, errors.New("the kubelet certificate is for another node")
	}
	return cert, nil
}

func parseCertificate(what string, b []byte) (*x509.Certificate, error) {
	block, _ := pem.Decode(b)
	if block == nil || block.Type != "CERTIFICATE" {
		return nil, fmt.Errorf("the %s is not a PEM certificate", what)
	}
	cert, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		return nil, fmt.Errorf("the %s is malformed", what)
	}
	return cert, nil
}

// keepTicket stores the ticket for a later process of this boot.
func keepTicket(state *os.Root, t *joinproto.IssueJoinTicketResponse) error {
	b, err := proto.Marshal(t)
	if err != nil {
		return errors.New("encode the ticket") // the cause could quote it
	}
	return replaceFile(state, ticketFile, b, 0o600)
}

// keptTicket returns the stored ticket and its time, or nil if there is none that is valid at
// now. It removes a damaged or expired one.
func keptTicket(state *os.Root, now time.Time) (*joinproto.IssueJoinTicketResponse, time.Time, error) {
	i, err := state.Stat(ticketFile)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, time.Time{}, nil
	}
	if err != nil {
		return nil, time.Time{}, fmt.Errorf("read the ticket: %w", err)
	}
	b, err := state.ReadFile(ticketFile)
	if err != nil {
		return nil, time.Time{}, fmt.Errorf("read the ticket: %w", err)
	}
	var t joinproto.IssueJoinTicketResponse
	age := now.Sub(i.ModTime())
	if proto.Unmarshal(b, &t) != nil || age < -time.Minute || age > ticketLife {
		return nil, time.Time{}, removeAll(state, ticketFile)
	}
	return &t, i.ModTime(), nil
}
