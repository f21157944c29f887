package evidence

import (
	"bytes"
	"context"
	"crypto/aes"
	"crypto/cipher"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"strings"

	"github.com/google/go-tpm/tpm2"
	"github.com/google/go-tpm/tpm2/transport"
)

// ErrSealed means that this machine, as it booted, cannot read a sealed secret.
var ErrSealed = errors.New("secret is sealed to another machine or boot")

const (
	sealedVersion = 1
	// maxSealed bounds a secret, in bytes.
	maxSealed     = 16 << 10
	sealedPurpose = "constellation: secret sealed to a TPM, version 1"
)

// sealRegisters are the registers that a secret is sealed to: boot loader, its commands, what it loads, the image's layer, and
// the cluster.
func sealRegisters() []uint32 { return []uint32{4, 8, 9, 11, pcrCluster} }

// sealedSecret is a sealed secret as JSON. The TPM keeps the key of Data in the object of Public and Private.
type sealedSecret struct {
	Version int    `json:"version"`
	Public  []byte `json:"public"`  // TPMT_PUBLIC
	Private []byte `json:"private"` // content of TPM2B_PRIVATE
	Data    []byte `json:"data"`
	// PCRs are for the reason why a TPM does not unseal. They decide nothing.
	PCRs map[uint32][]byte `json:"pcrs"`
}

// Seal encrypts a secret such that only the TPM at address decrypts it: on a member of the cluster, which booted what it
// booted this time. The machine need not be a member yet. Errors wrap ErrTPM.
func Seal(ctx context.Context, address string, clusterID, secret []byte) ([]byte, error) {
	if len(clusterID) == 0 || len(secret) == 0 || len(secret) > maxSealed {
		return nil, fmt.Errorf("seal secret: it has %d bytes, want 1 to %d, and the ID of the cluster has %d", len(secret), maxSealed, len(clusterID))
	}
	key := make([]byte, 32)
	rand.Read(key)
	defer clear(key)
	aead, err := sealer(key)
	if err != nil {
		return nil, fmt.Errorf("seal secret: %w", err)
	}
	s := sealedSecret{Version: sealedVersion, Data: aead.Seal(nil, nil, secret, []byte(sealedPurpose))}
	if err := use(ctx, address, func(t transport.TPM) error { return s.wrap(t, key, clusterID) }); err != nil {
		return nil, fmt.Errorf("seal secret: %w", err)
	}
	return EncodeMessage(s)
}

// Unseal is the inverse of Seal. The error wraps ErrSealed if the TPM is another one, or the machine booted something else, or
// is not a member of the cluster.
func Unseal(ctx context.Context, address string, sealed []byte) ([]byte, error) {
	var s sealedSecret
	if err := decodeVersioned(sealed, &s, &s.Version, sealedVersion); err != nil {
		return nil, fmt.Errorf("read sealed secret: %w", err)
	}
	var key []byte
	if err := use(ctx, address, func(t transport.TPM) (err error) { key, err = s.unwrap(t); return err }); err != nil {
		return nil, fmt.Errorf("unseal secret: %w", err)
	}
	defer clear(key)
	aead, err := sealer(key)
	if err != nil {
		return nil, fmt.Errorf("unseal secret: %w", err)
	}
	secret, err := aead.Open(nil, nil, s.Data, []byte(sealedPurpose))
	if err != nil {
		return nil, fmt.Errorf("unseal secret: %w: the file was changed", ErrSealed)
	}
	return secret, nil
}

func sealer(key []byte) (cipher.AEAD, error) {
	block, err := aes.NewCipher(key)
	if err != nil {
		return nil, err
	}
	return cipher.NewGCMWithRandomNonce(block)
}

// wrap has the TPM keep key for a member of the cluster with the registers of now.
func (s *sealedSecret) wrap(t transport.TPM, key, clusterID []byte) (err error) {
	now := sealRegisters()
	if s.PCRs, err = readPCRs(t, now[:len(now)-1]); err != nil {
		return err
	}
	s.PCRs[pcrCluster] = ClusterIDPCR(clusterID)
	policy, err := tpm2.NewPolicyCalculator(tpm2.TPMAlgSHA256)
	if err != nil {
		return err
	}
	var values []byte
	for _, i := range sealRegisters() { // ascending, as a TPM hashes them
		values = append(values, s.PCRs[i]...)
	}
	digest := sha256.Sum256(values)
	demand := tpm2.PolicyPCR{Pcrs: selection(sealRegisters()...), PcrDigest: tpm2.TPM2BDigest{Buffer: digest[:]}}
	if err := demand.Update(policy); err != nil {
		return err
	}
	root, err := storageRoot(t)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, flush(t, root.handle)) }()
	r, err := tpm2.Create{
		ParentHandle: root.auth(),
		InSensitive:  tpm2.TPM2BSensitiveCreate{Sensitive: &tpm2.TPMSSensitiveCreate{Data: tpm2.NewTPMUSensitiveCreate(&tpm2.TPM2BSensitiveData{Buffer: key})}},
		InPublic: tpm2.New2B(tpm2.TPMTPublic{
			Type: tpm2.TPMAlgKeyedHash, NameAlg: tpm2.TPMAlgSHA256,
			ObjectAttributes: tpm2.TPMAObject{FixedTPM: true, FixedParent: true, NoDA: true}, // no password: the policy alone unseals
			AuthPolicy:       tpm2.TPM2BDigest{Buffer: policy.Hash().Digest},
		}),
	}.Execute(t)
	if err != nil {
		return fmt.Errorf("create sealed object: %w", err)
	}
	s.Public, s.Private = r.OutPublic.Bytes(), r.OutPrivate.Buffer
	return nil
}

func (s *sealedSecret) unwrap(t transport.TPM) (key []byte, err error) {
	root, err := storageRoot(t)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, flush(t, root.handle)) }()
	l, err := tpm2.Load{
		ParentHandle: root.auth(),
		InPrivate:    tpm2.TPM2BPrivate{Buffer: s.Private},
		InPublic:     tpm2.BytesAs2B[tpm2.TPMTPublic](s.Public),
	}.Execute(t)
	if errors.Is(err, tpm2.TPMRCIntegrity) {
		return nil, fmt.Errorf("%w: this TPM did not seal it, or was cleared since: %w", ErrSealed, err)
	}
	if err != nil {
		return nil, fmt.Errorf("load sealed object: %w", err)
	}
	object := tpm2.NamedHandle{Handle: l.ObjectHandle, Name: l.Name}
	defer func() { err = errors.Join(err, flush(t, object)) }()
	r, err := tpm2.Unseal{ItemHandle: tpm2.AuthHandle{Handle: object.Handle, Name: object.Name, Auth: tpm2.Policy(
		tpm2.TPMAlgSHA256, 16,
		func(t transport.TPM, session tpm2.TPMISHPolicy, _ tpm2.TPM2BNonce) error {
			_, err := tpm2.PolicyPCR{PolicySession: session, Pcrs: selection(sealRegisters()...)}.Execute(t)
			return err
		},
		tpm2.AESEncryption(128, tpm2.EncryptOut), tpm2.Salted(root.handle.Handle, root.public),
	)}}.Execute(t)
	if errors.Is(err, tpm2.TPMRCPolicyFail) {
		return nil, fmt.Errorf("%w: %s", ErrSealed, s.differs(t))
	}
	if err != nil {
		return nil, fmt.Errorf("unseal object: %w", err)
	}
	return r.OutData.Buffer, nil
}

// differs returns which registers have other values than when the secret was sealed.
func (s *sealedSecret) differs(t transport.TPM) string {
	now, err := readPCRs(t, sealRegisters())
	if err != nil {
		return err.Error()
	}
	var names []string
	for _, i := range sealRegisters() {
		if !bytes.Equal(now[i], s.PCRs[i]) {
			names = append(names, pcrName(i))
		}
	}
	return "other values in " + strings.Join(names, ", ")
}

// storage is the storage root key of a TPM, loaded.
type storage struct {
	handle tpm2.NamedHandle
	public tpm2.TPMTPublic
}

// auth authorizes a command that sends a secret below the key, which has no password. The session encrypts the secret.
func (s storage) auth() tpm2.AuthHandle {
	return tpm2.AuthHandle{Handle: s.handle.Handle, Name: s.handle.Name, Auth: tpm2.HMAC(
		tpm2.TPMAlgSHA256, 16, tpm2.AESEncryption(128, tpm2.EncryptIn), tpm2.Salted(s.handle.Handle, s.public),
	)}
}

// storageRoot loads the storage root key, which the TPM makes from the TCG's template. The caller flushes it.
func storageRoot(t transport.TPM) (storage, error) {
	r, err := tpm2.CreatePrimary{
		PrimaryHandle: tpm2.AuthHandle{Handle: tpm2.TPMRHOwner, Auth: tpm2.PasswordAuth(nil)},
		InPublic:      tpm2.New2B(tpm2.ECCSRKTemplate),
	}.Execute(t)
	if err != nil {
		return storage{}, fmt.Errorf("create storage root key (does the owner hierarchy have a password?): %w", err)
	}
	s := storage{handle: tpm2.NamedHandle{Handle: r.ObjectHandle, Name: r.Name}}
	public, err := r.OutPublic.Contents()
	if err != nil {
		return storage{}, errors.Join(fmt.Errorf("read storage root key: %w", err), flush(t, s.handle))
	}
	s.public = *public
	return s, nil
}
