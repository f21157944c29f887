package evidence

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"fmt"
	"slices"

	"golang.org/x/crypto/cryptobyte"
	"golang.org/x/crypto/cryptobyte/asn1"
)

// SoftwareIssuer is a simulation: it makes the document of a TPM for a machine that need not
// exist, in pure Go and without a TPM. It is for load tests, where thousands of machines join
// from one process. It proves nothing about the machine it runs on. It requires the CA's key,
// and no production program constructs one.
type SoftwareIssuer struct {
	key       *ecdsa.PrivateKey
	cert, pub []byte
	signer    []byte
	pcrs      []register
	digest    []byte
	log       []byte
}

// NewSoftwareIssuer simulates the instance id, which ca certifies, after a boot
// that measured events. With a clusterID it is a member of that cluster; nil
// stands for an unused machine.
func NewSoftwareIssuer(ca *CA, id Identity, events []MeasuredEvent, clusterID []byte) (*SoftwareIssuer, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("create attestation key: %w", err)
	}
	cert, err := ca.certify(key.Public(), oidAttestationKey(), id)
	if err != nil {
		return nil, fmt.Errorf("certify attestation key: %w", err)
	}
	point, err := key.PublicKey.Bytes() // 4, x, y
	if err != nil {
		return nil, fmt.Errorf("encode attestation key: %w", err)
	}
	s := &SoftwareIssuer{key: key, cert: cert, pub: akPublic(point[1:33], point[33:])}
	s.signer = publicArea{raw: s.pub}.qualifiedName()
	if len(events) > 0 {
		s.log = newEventLog()
	}
	for _, e := range events {
		if err := e.check(); err != nil {
			return nil, err
		}
		s.log = appendEvent(s.log, e)
	}
	pcrs := PredictPCRs(events)
	if clusterID != nil {
		pcrs[pcrCluster] = ClusterIDPCR(clusterID)
	}
	h := sha256.New()
	for i := range uint32(quotedPCRs) {
		v := pcrs[i]
		if v == nil {
			v = make([]byte, pcrSize)
		}
		h.Write(v)
		s.pcrs = append(s.pcrs, register{i, v})
	}
	s.digest = h.Sum(nil)
	return s, nil
}

// Variant implements Issuer.
func (*SoftwareIssuer) Variant() Variant { return TPM2 }

// Issue implements Issuer. It never blocks.
func (s *SoftwareIssuer) Issue(_ context.Context, userData []byte) ([]byte, error) {
	if len(userData) == 0 || len(userData) > MaxUserData {
		return nil, fmt.Errorf("issue evidence: %d bytes are to be bound, want 1 to %d", len(userData), MaxUserData)
	}
	q, err := quote{
		signer:    s.signer,
		extraData: slices.Clone(userData),
		resets:    1,
		safe:      1,
		firmware:  1,
		selected:  1<<quotedPCRs - 1,
		digest:    s.digest,
	}.marshal()
	if err != nil {
		return nil, fmt.Errorf("issue evidence: %w", err)
	}
	h := sha256.Sum256(q)
	der, err := ecdsa.SignASN1(rand.Reader, s.key, h[:])
	if err != nil {
		return nil, fmt.Errorf("issue evidence: %w", err)
	}
	sig := signature{scheme: algECDSA}
	var (
		in   = cryptobyte.String(der)
		pair cryptobyte.String
	)
	if !in.ReadASN1(&pair, asn1.SEQUENCE) || !pair.ReadASN1Integer(&sig.r) || !pair.ReadASN1Integer(&sig.s) {
		return nil, fmt.Errorf("issue evidence: signature cannot be read")
	}
	sigBytes, err := sig.marshal()
	if err != nil {
		return nil, fmt.Errorf("issue evidence: %w", err)
	}
	doc, err := document{certificate: s.cert, public: s.pub, quote: q, signature: sigBytes, pcrs: s.pcrs, log: s.log}.marshal()
	if err != nil {
		return nil, fmt.Errorf("issue evidence: %w", err)
	}
	return doc, nil
}
