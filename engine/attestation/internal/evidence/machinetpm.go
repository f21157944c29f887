package evidence

import (
	"bytes"
	"context"
	"crypto"
	"crypto/rand"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"

	"github.com/google/go-tpm/tpm2"
	"github.com/google/go-tpm/tpm2/transport"
	"golang.org/x/crypto/cryptobyte"
	"golang.org/x/crypto/cryptobyte/asn1"
)

// Words that RequestIdentity takes instead of the address of a TPM.
const (
	// AutoTPM is the first TPM that Linux shows, or a key in a file without one that can be used.
	AutoTPM = "auto"
	// NoTPM is a key in a file.
	NoTPM = "none"
)

// deviceTPM is the resource manager of the first TPM on a Linux machine.
const deviceTPM = "/dev/tpmrm0"

// errOtherTPM means that a reference to a key is on a machine whose TPM does not have it.
var errOtherTPM = errors.New("its TPM is not the one that made the key: the identity was copied from another machine, or the TPM was replaced; to enrol this machine, remove the directory of the identity first")

// errUsedTPM means that register 15 was extended before the machine belongs to a cluster.
var errUsedTPM = errors.New("register 15 of its TPM is in use: restart the machine, which clears it after a removal from a cluster; if the operating system extends it, use a key in a file, which is not attested")

// tpmKey refers to the key of a machine in its TPM.
type tpmKey struct {
	address string
	// template is what the TPM makes the key from.
	template []byte
	public   publicArea
}

// tpmReference is the content of tpmFile.
type tpmReference struct {
	Version  int    `json:"version"`
	Address  string `json:"address"`
	Template []byte `json:"template"` // TPMT_PUBLIC
	Public   []byte `json:"public"`   // TPMT_PUBLIC
}

func (k *tpmKey) equal(o *tpmKey) bool {
	return k.address == o.address && bytes.Equal(k.template, o.template) && bytes.Equal(k.public.raw, o.public.raw)
}

// newEnrolledTPMIssuer makes quotes with k. Their certificate is elsewhere.
func newEnrolledTPMIssuer(k *tpmKey) *TPMIssuer {
	return &TPMIssuer{address: k.address, machine: k, turn: make(chan struct{}, 1)}
}

// tpmKey returns the reference to the machine's key in a TPM; nil without one.
func (m machine) tpmKey() (*tpmKey, error) {
	b, err := m.read(tpmFile)
	if b == nil {
		return nil, err
	}
	var r tpmReference
	if err := DecodeMessage(b, &r, &r.Version); err != nil {
		return nil, fmt.Errorf("read %s: %w", tpmFile, err)
	}
	k := &tpmKey{address: r.Address, template: r.Template}
	if k.public, err = parsePublic(r.Public); err != nil {
		return nil, fmt.Errorf("read %s: %w", tpmFile, err)
	}
	return k, nil
}

func (m machine) storeTPMKey(k *tpmKey) error {
	b, err := json.Marshal(tpmReference{Version: EnrolmentVersion, Address: k.address, Template: k.template, Public: k.public.raw})
	if err != nil {
		return err
	}
	return m.replace(tpmFile, append(b, '\n'))
}

// newTPMKey has the TPM at address make a key. Each call makes another one. The TPM must have what
// evidence of a machine that belongs to no cluster needs.
func newTPMKey(address string, t transport.TPM) (_ *tpmKey, err error) {
	pcrs, err := readPCRs(t, []uint32{pcrCluster})
	if err != nil {
		return nil, err
	}
	if !isZero(pcrs[pcrCluster]) {
		return nil, errUsedTPM
	}
	x, y := make([]byte, 32), make([]byte, 32)
	for _, b := range [][]byte{x, y} {
		if _, err := rand.Read(b); err != nil {
			return nil, err
		}
	}
	k := &tpmKey{address: address, template: akPublic(x, y)}
	h, public, err := primary(t, k.template)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, flush(t, h)) }()
	k.public, err = parsePublic(public)
	return k, err
}

// load loads the key into its TPM. The caller flushes it.
func (k *tpmKey) load(t transport.TPM) (tpm2.NamedHandle, error) {
	h, public, err := primary(t, k.template)
	if err != nil {
		return h, err
	}
	if !bytes.Equal(public, k.public.raw) {
		return h, errors.Join(errOtherTPM, flush(t, h))
	}
	return h, nil
}

// ekCertificates are where vendors of TPMs store the certificates of endorsement keys, and the
// templates of these keys, by the TCG's EK Credential Profile. A key on P-256 takes milliseconds to
// make, an RSA key seconds.
func ekCertificates() []struct {
	index    tpm2.TPMHandle
	template tpm2.TPMTPublic
} {
	return []struct {
		index    tpm2.TPMHandle
		template tpm2.TPMTPublic
	}{{0x01c0000a, tpm2.ECCEKTemplate}, {0x01c00002, tpm2.RSAEKTemplate}}
}

// endorsement is the endorsement key of a TPM, loaded.
type endorsement struct {
	handle      tpm2.NamedHandle
	public      []byte // TPMT_PUBLIC
	certificate []byte // DER; empty if the TPM has none for this key
}

// loadEndorsement loads the endorsement key, preferably one with a certificate. The caller flushes
// it. The same TPM always gives the same key.
func loadEndorsement(t transport.TPM) (e endorsement, err error) {
	for _, c := range ekCertificates() {
		cert, err := readNV(t, c.index)
		if errors.Is(err, tpm2.TPMRCHandle) {
			continue // none
		}
		if err != nil {
			return e, fmt.Errorf("read certificate of the endorsement key: %w", err)
		}
		in, der := cryptobyte.String(cert), cryptobyte.String(nil)
		if !in.ReadASN1Element(&der, asn1.SEQUENCE) { // vendors pad it
			continue
		}
		parsed, err := x509.ParseCertificate(der)
		if err != nil {
			continue // as if there was none: the key is pinned then
		}
		e, err := newEndorsement(t, c.template)
		if err != nil {
			return e, err
		}
		if EndorsementKeyIs(e.public, parsed.PublicKey) {
			e.certificate = parsed.Raw
			return e, nil
		}
		if err := flush(t, e.handle); err != nil { // made from another template
			return e, err
		}
	}
	return newEndorsement(t, tpm2.ECCEKTemplate)
}

// EndorsementKeyIs reports whether pub is the endorsement key with this TPMT_PUBLIC.
func EndorsementKeyIs(public []byte, pub crypto.PublicKey) bool {
	p, err := tpm2.Unmarshal[tpm2.TPMTPublic](public)
	if err != nil {
		return false
	}
	k, err := tpm2.Pub(*p)
	if err != nil {
		return false
	}
	equal, ok := k.(interface{ Equal(x crypto.PublicKey) bool })
	return ok && equal.Equal(pub)
}

func newEndorsement(t transport.TPM, template tpm2.TPMTPublic) (endorsement, error) {
	h, public, err := primary(t, tpm2.Marshal(template))
	if err != nil {
		return endorsement{}, fmt.Errorf("create endorsement key: %w", err)
	}
	return endorsement{handle: h, public: public}, nil
}

// activate returns the secret in a credential for k, which only the TPM with both keys can read.
func (k *tpmKey) activate(t transport.TPM, credential, secret []byte) (_ []byte, err error) {
	h, err := k.load(t)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, flush(t, h)) }()
	e, err := loadEndorsement(t)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, flush(t, e.handle)) }()
	r, err := tpm2.ActivateCredential{
		ActivateHandle: tpm2.AuthHandle{Handle: h.Handle, Name: h.Name, Auth: tpm2.PasswordAuth(nil)},
		KeyHandle:      tpm2.AuthHandle{Handle: e.handle.Handle, Name: e.handle.Name, Auth: tpm2.Policy(tpm2.TPMAlgSHA256, 16, ekPolicy)},
		CredentialBlob: tpm2.TPM2BIDObject{Buffer: credential},
		Secret:         tpm2.TPM2BEncryptedSecret{Buffer: secret},
	}.Execute(t)
	if err != nil {
		return nil, fmt.Errorf("activate credential (was the challenge made for another machine?): %w", err)
	}
	return r.CertInfo.Buffer, nil
}

// ekPolicy is the policy of endorsement keys: knowledge of the hierarchy's password, which is
// empty.
func ekPolicy(t transport.TPM, session tpm2.TPMISHPolicy, nonce tpm2.TPM2BNonce) error {
	_, err := tpm2.PolicySecret{
		AuthHandle:    tpm2.AuthHandle{Handle: tpm2.TPMRHEndorsement, Auth: tpm2.PasswordAuth(nil)},
		PolicySession: session,
		NonceTPM:      nonce,
	}.Execute(t)
	return err
}

// requestTPM returns the request of a machine with a TPM. k is its key, or nil: then one is made.
func (m machine) requestTPM(ctx context.Context, k *tpmKey, address string) (MachineRequest, error) {
	r := MachineRequest{Version: EnrolmentVersion, Kind: KindTPM}
	var next *tpmKey
	err := use(ctx, address, func(t transport.TPM) (err error) {
		if next, err = k.at(address, t); err != nil {
			return err
		}
		e, err := loadEndorsement(t)
		if err != nil {
			return err
		}
		r.EK, r.EKCertificate, r.AK = e.public, e.certificate, next.public.raw
		return flush(t, e.handle)
	})
	if err != nil || k != nil && k.equal(next) {
		return r, err
	}
	return r, m.storeTPMKey(next)
}

// at returns k, which must be a key of the TPM t at address. If k is nil, t makes a key.
func (k *tpmKey) at(address string, t transport.TPM) (*tpmKey, error) {
	if k == nil {
		return newTPMKey(address, t)
	}
	h, err := k.load(t)
	if err != nil {
		return nil, err
	}
	return &tpmKey{address: address, template: k.template, public: k.public}, flush(t, h)
}

// chooseTPM returns the address of the TPM that a caller means, "" for none, on a machine with the
// key k, whose first TPM would be at the address first.
func chooseTPM(k machineKey, tpm, first string) (string, error) {
	switch {
	case k.tpm != nil && (tpm == "" || tpm == AutoTPM):
		return k.tpm.address, nil
	case k.tpm != nil && tpm == NoTPM:
		return "", fmt.Errorf("this machine has a key in the TPM at %s: to enrol it with one in a file, which is not attested, remove the directory of the identity first", k.tpm.address)
	case tpm == "" || tpm == NoTPM || k.file != nil && tpm == AutoTPM:
		return "", nil
	case k.file != nil:
		return "", errors.New("this machine has a key in a file: to enrol it with one in its TPM, remove the directory of the identity first")
	case tpm == AutoTPM:
		_, err := os.Stat(strings.TrimPrefix(first, "unix:"))
		if errors.Is(err, fs.ErrNotExist) {
			return "", nil
		}
		return first, err
	}
	return tpm, nil
}
