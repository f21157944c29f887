package evidence

import (
	"bytes"
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"constellation/internal/journal"
)

// enrolledPrefix begins the address of an enrolled machine's identity: a directory.
const enrolledPrefix = "enrolled:"

// Files of an identity. Only an enrolment writes the first three.
const (
	// keyFile has the key of a machine without a TPM, tpmFile the reference to one in a TPM.
	keyFile         = "key.pem"
	tpmFile         = "tpm"
	certificateFile = "certificate.pem"
	// clusterFile takes the place of register 15 on a machine without a TPM: the cluster's ID in
	// hex. It survives reboots.
	clusterFile = "cluster"

	maxIdentityFile = 16 << 10
)

// machineError is an error of the identity in a directory. Callers treat it as one of the TPM.
type machineError struct{ err error }

func (e machineError) Error() string      { return "identity of this machine not usable: " + e.err.Error() }
func (e machineError) Unwrap() error      { return e.err }
func (machineError) Is(target error) bool { return target == ErrTPM }

// machine is the identity of an enrolled machine: an open directory.
type machine struct {
	dir *os.Root
}

// machineKey is the key of an enrolled machine, either in a file or in a TPM.
type machineKey struct {
	file *ecdsa.PrivateKey
	tpm  *tpmKey
}

// kind is "" without a key.
func (k machineKey) kind() Kind {
	switch {
	case k.file != nil:
		return KindKey
	case k.tpm != nil:
		return KindTPM
	}
	return ""
}

// is reports whether pub is the public half.
func (k machineKey) is(pub crypto.PublicKey) bool {
	if k.tpm != nil {
		return k.tpm.public.is(pub)
	}
	return k.file != nil && k.file.PublicKey.Equal(pub)
}

// withMachine opens the identity in the directory, which may be read-only, calls f, and closes it.
func withMachine(dir string, f func(machine) error) error {
	root, err := os.OpenRoot(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%w: enrol the machine with `constellation machine add`", err)
	}
	if err != nil {
		return err
	}
	defer root.Close()
	return f(machine{root})
}

// changeMachine is withMachine for one enrolment at a time.
func changeMachine(ctx context.Context, dir string, f func(machine) error) error {
	return withMachine(dir, func(m machine) error {
		lock, err := lockFile(ctx, filepath.Join(dir, "enrolment.lock"))
		if err != nil {
			return fmt.Errorf("wait for another enrolment of this machine: %w", err)
		}
		defer lock.Close()
		return f(m)
	})
}

// useMachine is withMachine for an identity in use. Errors wrap ErrTPM.
func useMachine(dir string, f func(machine) error) error {
	if err := withMachine(dir, f); err != nil {
		return machineError{err}
	}
	return nil
}

// read returns a file, nil without one.
func (m machine) read(name string) ([]byte, error) {
	f, err := m.dir.Open(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxIdentityFile+1))
	if err != nil {
		return nil, err
	}
	if len(b) > maxIdentityFile {
		return nil, fmt.Errorf("%s has more than %d bytes", name, maxIdentityFile)
	}
	return b, nil
}

// replace writes a file that only root may read, whole or not at all.
func (m machine) replace(name string, data []byte) error {
	f, err := journal.Replace(m.dir, name, data)
	if err != nil {
		return fmt.Errorf("write %s: %w", name, err)
	}
	return f.Close()
}

// key returns the machine's key.
func (m machine) key() (k machineKey, err error) {
	if k.file, err = m.fileKey(); err != nil {
		return k, err
	}
	if k.tpm, err = m.tpmKey(); err != nil {
		return k, err
	}
	if k.file != nil && k.tpm != nil {
		return k, fmt.Errorf("it has a key in %s and one in %s: remove the directory, and enrol the machine with `constellation machine add`", keyFile, tpmFile)
	}
	return k, nil
}

// fileKey returns the key in a file; nil without one.
func (m machine) fileKey() (*ecdsa.PrivateKey, error) {
	b, err := m.read(keyFile)
	if b == nil {
		return nil, err
	}
	// Causes could quote the key.
	block, rest := pem.Decode(b)
	if block == nil || block.Type != "PRIVATE KEY" || len(bytes.TrimSpace(rest)) > 0 {
		return nil, fmt.Errorf("%s is not one PEM block PRIVATE KEY", keyFile)
	}
	k, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	if err != nil {
		return nil, fmt.Errorf("%s is not PKCS #8", keyFile)
	}
	key, ok := k.(*ecdsa.PrivateKey)
	if !ok || key.Curve != elliptic.P256() {
		return nil, fmt.Errorf("%s is not a key on P-256", keyFile)
	}
	return key, nil
}

// newFileKey creates a key in a file.
func (m machine) newFileKey() (*ecdsa.PrivateKey, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("create key: %w", err)
	}
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, fmt.Errorf("create key: %w", err)
	}
	return key, m.replace(keyFile, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}))
}

// certificate returns the machine's certificate; nil without one.
func (m machine) certificate() (*x509.Certificate, error) {
	b, err := m.read(certificateFile)
	if b == nil {
		return nil, err
	}
	return parseMachineCertificate(b)
}

func parseMachineCertificate(pemBytes []byte) (*x509.Certificate, error) {
	certs, err := parseCertificates(pemBytes)
	if err != nil {
		return nil, fmt.Errorf("read certificate of the machine: %w", err)
	}
	if len(certs) != 1 {
		return nil, fmt.Errorf("read certificate of the machine: %d certificates, want 1", len(certs))
	}
	return certs[0], nil
}

// membership returns what takes the place of register 15 on a machine without a TPM.
func (m machine) membership() ([]byte, error) {
	b, err := m.read(clusterFile)
	if err != nil {
		return nil, err
	}
	if b == nil {
		return make([]byte, pcrSize), nil
	}
	line, ok := bytes.CutSuffix(b, []byte("\n"))
	id, err := hex.DecodeString(string(line))
	if !ok || err != nil || len(id) == 0 {
		return nil, fmt.Errorf("%s is damaged: `bootstrapper reset` removes it", clusterFile)
	}
	return ClusterIDPCR(id), nil
}

// clear makes the machine unused.
func (m machine) clear() error {
	if err := m.dir.Remove(clusterFile); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return journal.SyncDir(m.dir)
}

// extend is ExtendClusterID for a machine without a TPM. It has one caller at a time.
func (m machine) extend(clusterID []byte) (foreign, err error) {
	now, err := m.membership()
	if err != nil {
		return nil, err
	}
	if !isZero(now) {
		return PCR15ClusterID(clusterID).check(now), nil // nil if it is this cluster
	}
	return nil, m.replace(clusterFile, fmt.Appendf(nil, "%x\n", clusterID))
}

// registers returns registers of a machine without a TPM: all but 15 are zero.
func (m machine) registers(indices []uint32) (map[uint32][]byte, error) {
	pcrs := make(map[uint32][]byte, len(indices))
	for _, i := range indices {
		pcrs[i] = make([]byte, pcrSize)
		if i != pcrCluster {
			continue
		}
		var err error
		if pcrs[i], err = m.membership(); err != nil {
			return nil, err
		}
	}
	return pcrs, nil
}

// locate returns the address of the TPM that address means, or the directory of the identity of a
// machine without one. Errors wrap ErrTPM.
func locate(address string) (tpm, dir string, err error) {
	dir, ok := strings.CutPrefix(address, enrolledPrefix)
	if !ok {
		return address, "", nil
	}
	err = useMachine(dir, func(m machine) error {
		k, err := m.tpmKey()
		if k != nil {
			tpm, dir = k.address, ""
		}
		return err
	})
	return tpm, dir, err
}

// EnrolledIssuer makes evidence with the identity of an enrolled machine. It may be used
// concurrently, and never writes.
type EnrolledIssuer struct {
	address string

	mu     sync.Mutex
	quotes *TPMIssuer // nil: none was made yet
}

// NewEnrolledIssuer returns an issuer for the identity at address: enrolled: and its directory.
func NewEnrolledIssuer(address string) *EnrolledIssuer { return &EnrolledIssuer{address: address} }

// Variant implements Issuer.
func (*EnrolledIssuer) Variant() Variant { return Enrolled }

// Issue implements Issuer. Errors wrap ErrTPM.
func (i *EnrolledIssuer) Issue(ctx context.Context, userData []byte) (doc []byte, err error) {
	if len(userData) == 0 || len(userData) > MaxUserData {
		return nil, fmt.Errorf("issue evidence: %d bytes are to be bound, want 1 to %d", len(userData), MaxUserData)
	}
	dir, ok := strings.CutPrefix(i.address, enrolledPrefix)
	if !ok {
		return nil, fmt.Errorf("issue evidence: %w: address %q is not %sDIRECTORY", ErrTPM, i.address, enrolledPrefix)
	}
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("issue evidence: %w", err)
	}
	if err := useMachine(dir, func(m machine) (err error) { doc, err = i.issue(ctx, m, userData); return err }); err != nil {
		return nil, fmt.Errorf("issue evidence: %w", err)
	}
	return doc, nil
}

// issue returns evidence of m that binds userData.
func (i *EnrolledIssuer) issue(ctx context.Context, m machine, userData []byte) ([]byte, error) {
	key, err := m.key()
	if err != nil {
		return nil, err
	}
	cert, err := m.certificate()
	switch {
	case err != nil:
		return nil, err
	case key.kind() == "" || cert == nil:
		return nil, errors.New("it has no key or no certificate: enrol the machine with `constellation machine add`")
	case !key.is(cert.PublicKey):
		return nil, fmt.Errorf("%s was issued for another key: enrol the machine with `constellation machine add`", certificateFile)
	}
	e := enrolled{kind: key.kind(), certificate: cert.Raw}
	if key.tpm != nil {
		return i.quote(ctx, key.tpm, e, userData)
	}
	if e.membership, err = m.membership(); err != nil {
		return nil, err
	}
	if e.proof, err = ecdsa.SignASN1(rand.Reader, key.file, e.binding(userData)); err != nil {
		return nil, err
	}
	return e.marshal()
}

// quote completes e with a quote of the TPM.
func (i *EnrolledIssuer) quote(ctx context.Context, key *tpmKey, e enrolled, userData []byte) ([]byte, error) {
	i.mu.Lock()
	if i.quotes == nil || !i.quotes.machine.equal(key) {
		i.quotes = newEnrolledTPMIssuer(key)
	}
	quotes := i.quotes
	i.mu.Unlock()
	for range quoteAttempts {
		pcrs, err := ReadPCRs(ctx, key.address, pcrCluster)
		if err != nil {
			return nil, err
		}
		e.membership = pcrs[pcrCluster]
		d, err := quotes.issue(ctx, e.binding(userData))
		if err != nil {
			return nil, err
		}
		if !bytes.Equal(d.pcrs[pcrCluster].value, e.membership) {
			continue
		}
		if e.proof, err = d.marshal(); err != nil {
			return nil, err
		}
		return e.marshal()
	}
	return nil, fmt.Errorf("register 15 changed during each of %d attempts", quoteAttempts)
}
