package evidence_test

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	encasn1 "encoding/asn1"
	"encoding/json"
	"errors"
	"math/big"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-tpm/tpm2"

	"constellation/engine/attestation"
	"constellation/engine/attestation/attestationtest"
	"constellation/engine/attestation/authority"
	"constellation/engine/attestation/internal/evidence"
	"constellation/engine/cloud"
	"constellation/internal/swtpm"
)

func newAuthority(t testing.TB) (*authority.Authority, *x509.CertPool) {
	t.Helper()
	cert, key, err := authority.Create("demo")
	if err != nil {
		t.Fatal(err)
	}
	a, err := authority.Parse(cert, key)
	if err != nil {
		t.Fatal(err)
	}
	roots, err := attestation.ParseRoots(cert)
	if err != nil {
		t.Fatal(err)
	}
	return a, roots
}

func identity() attestation.Identity {
	return attestation.Identity{Name: "worker-0", ProviderID: "enrolled://demo/worker-0", UID: "demo", Group: "workers", Role: cloud.Worker, IP: netip.MustParseAddr("10.0.0.11")}
}

func request(t testing.TB, dir, tpm string) []byte {
	t.Helper()
	r, _, err := attestation.RequestIdentity(t.Context(), dir, tpm)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func TestEnrolmentOfATPM(t *testing.T) {
	t.Parallel()
	a, roots := newAuthority(t)
	tpm, reset := swtpm.Start(t)
	dir := t.TempDir()
	address, nonce, cluster := "enrolled:"+dir, []byte("nonce"), []byte("cluster")
	for range 2 { // repeated from the start, as after a lost connection
		if err := attestationtest.EnrolTPM(t.Context(), a, dir, tpm, identity()); err != nil {
			t.Fatal(err)
		}
	}
	method := attestation.EnrolledMethod()
	issuer := method.Issuer(address)
	judge := func(rule attestation.PCR15) error {
		t.Helper()
		doc, err := issuer.Issue(t.Context(), nonce)
		if err != nil {
			t.Fatal(err)
		}
		st, err := method.Validator(roots, nil, attestation.Options{PCR15: rule, UID: "demo", Role: cloud.Worker}).Validate(t.Context(), doc, nonce)
		if err == nil && (!st.Attested || st.Identity != identity() || len(st.PCRs) != 16) {
			t.Errorf("statement %+v", st)
		}
		return err
	}
	if err := judge(attestation.PCR15Zero()); err != nil {
		t.Error(err)
	}
	if attestation.SoftwareMembership(address) {
		t.Error("a file takes the place of register 15")
	}
	for range 2 {
		if err := attestation.ExtendClusterID(t.Context(), address, cluster); err != nil {
			t.Fatal(err)
		}
	}
	if err := judge(attestation.PCR15ClusterID(cluster)); err != nil {
		t.Error(err)
	}
	if err := attestation.ClearClusterID(address); err != nil {
		t.Error(err)
	}
	if err := judge(attestation.PCR15Zero()); !errors.Is(err, attestation.ErrMember) {
		t.Errorf("software cleared register 15: %v", err)
	}
	if pcrs, err := attestation.ReadPCRs(t.Context(), address, 15); err != nil || !bytes.Equal(pcrs[15], attestation.ClusterIDPCR(cluster)) {
		t.Errorf("registers %x, %v", pcrs, err)
	}
	if _, err := os.Stat(filepath.Join(dir, "cluster")); err == nil {
		t.Error("the membership is in a file, too")
	}
	reset()
	if err := judge(attestation.PCR15Zero()); err != nil {
		t.Errorf("after a power cycle: %v", err)
	}
	if _, _, err := attestation.RequestIdentity(t.Context(), dir, attestation.NoTPM); err == nil || !strings.Contains(err.Error(), "this machine has a key in the TPM") {
		t.Errorf("a key in a file instead: %v", err)
	}
	file := t.TempDir()
	request(t, file, attestation.NoTPM)
	if _, _, err := attestation.RequestIdentity(t.Context(), file, tpm); err == nil || !strings.Contains(err.Error(), "this machine has a key in a file") {
		t.Errorf("a key in the TPM instead: %v", err)
	}
}

// TestNewKeyInAUsedTPM is about TPMs in which no key can be made, or none that would be accepted.
func TestNewKeyInAUsedTPM(t *testing.T) {
	t.Parallel()
	a, _ := newAuthority(t)
	tpm, reset := swtpm.Start(t)
	dir := t.TempDir()
	if err := attestation.ExtendClusterID(t.Context(), tpm, []byte("cluster")); err != nil {
		t.Fatal(err)
	}
	_, _, named := attestation.RequestIdentity(t.Context(), dir, tpm)
	_, _, auto := evidence.RequestAuto(t.Context(), dir, tpm)
	for _, err := range []error{named, auto} {
		if err == nil || !strings.Contains(err.Error(), "register 15 of its TPM is in use") {
			t.Errorf("a member's TPM: %v", err)
		}
	}
	reset()
	request(t, dir, tpm)
	if _, unused, err := evidence.RequestAuto(t.Context(), t.TempDir(), filepath.Join(dir, "none")); err != nil || unused != nil {
		t.Errorf("no TPM: %v, unused: %v", err, unused)
	}
	if r, unused, err := evidence.RequestAuto(t.Context(), t.TempDir(), dir); err != nil || !errors.Is(unused, attestation.ErrTPM) {
		t.Errorf("a TPM that does not answer: %v, unused: %v", err, unused)
	} else if _, e, err := a.Challenge(r); err != nil || e.Kind != attestation.KindKey {
		t.Errorf("its request: %+v, %v", e, err)
	}
	if r, unused, err := evidence.RequestAuto(t.Context(), dir, dir); err != nil || unused != nil {
		t.Errorf("the present key: %v, unused: %v", err, unused)
	} else if _, e, err := a.Challenge(r); err != nil || e.Kind != attestation.KindTPM {
		t.Errorf("its request: %+v, %v", e, err)
	}
	if err := os.Remove(strings.TrimPrefix(tpm, "unix:")); err != nil {
		t.Fatal(err)
	}
	if _, _, err := attestation.RequestIdentity(t.Context(), dir, attestation.AutoTPM); !errors.Is(err, attestation.ErrTPM) {
		t.Errorf("a TPM with the machine's key does not answer: %v", err)
	}
}

// TestIdentityOnAnotherTPM copies an identity to a machine with another TPM.
func TestIdentityOnAnotherTPM(t *testing.T) {
	t.Parallel()
	a, _ := newAuthority(t)
	tpm, _ := swtpm.Start(t)
	otherTPM, _ := swtpm.Start(t)
	dir, other := t.TempDir(), t.TempDir()
	if err := attestationtest.EnrolTPM(t.Context(), a, dir, tpm, identity()); err != nil {
		t.Fatal(err)
	}
	challenge, _, err := a.Challenge(request(t, dir, tpm))
	if err != nil {
		t.Fatal(err)
	}
	request(t, other, otherTPM)
	if _, err := attestation.AnswerIdentity(t.Context(), other, challenge); err == nil || !strings.Contains(err.Error(), "was the challenge made for another machine?") {
		t.Errorf("the answer of another machine: %v", err)
	}
	if _, err := attestation.AnswerIdentity(t.Context(), dir, challenge); err != nil {
		t.Errorf("the answer of the machine: %v", err)
	}

	clone := filepath.Join(t.TempDir(), "clone")
	if err := os.CopyFS(clone, os.DirFS(dir)); err != nil {
		t.Fatal(err)
	}
	reference := filepath.Join(clone, "tpm")
	b, err := os.ReadFile(reference)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(reference, bytes.ReplaceAll(b, []byte(tpm), []byte(otherTPM)), 0o600); err != nil {
		t.Fatal(err)
	}
	_, issueErr := attestation.NewEnrolledIssuer("enrolled:"+clone).Issue(t.Context(), []byte("nonce"))
	_, _, requestErr := attestation.RequestIdentity(t.Context(), clone, attestation.AutoTPM)
	_, answerErr := attestation.AnswerIdentity(t.Context(), clone, challenge)
	for name, err := range map[string]error{"evidence": issueErr, "request": requestErr, "answer": answerErr} {
		if !errors.Is(err, attestation.ErrTPM) || !strings.Contains(err.Error(), "the identity was copied from another machine") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestEnrolmentRefusesKeysOfNoTPM(t *testing.T) {
	t.Parallel()
	a, _ := newAuthority(t)
	tpm, _ := swtpm.Start(t)
	dir, file := t.TempDir(), t.TempDir()
	honest, software := request(t, dir, tpm), request(t, file, attestation.NoTPM)
	if _, e, err := a.Challenge(honest); err != nil || e.Kind != attestation.KindTPM || len(e.EK) != 64 || e.Vendor != "" {
		t.Errorf("expectation %+v, %v", e, err)
	}
	for _, tt := range []struct {
		name string
		edit func(t *testing.T, r *evidence.MachineRequest)
		text string
	}{
		{name: "a key that signs anything", edit: func(_ *testing.T, r *evidence.MachineRequest) { r.AK[5] &^= 1 }, text: "may sign things that its TPM did not state"},
		{name: "a key that leaves the TPM", edit: func(_ *testing.T, r *evidence.MachineRequest) { r.AK[7] &^= 2 }, text: "may sign things that its TPM did not state"},
		{name: "no key", edit: func(_ *testing.T, r *evidence.MachineRequest) { r.AK = nil }, text: "attestation key"},
		{name: "an endorsement key that leaves the TPM", edit: func(_ *testing.T, r *evidence.MachineRequest) { r.EK[7] &^= 2 }, text: "not made from a template of the TCG"},
		{name: "the key as endorsement key", edit: func(_ *testing.T, r *evidence.MachineRequest) { r.EK = r.AK }, text: "not made from a template of the TCG"},
		{name: "a point that is not on the curve", edit: func(_ *testing.T, r *evidence.MachineRequest) { r.EK[len(r.EK)-1] ^= 1 }, text: "endorsement key"},
		{name: "no endorsement key", edit: func(_ *testing.T, r *evidence.MachineRequest) { r.EK = nil }, text: "endorsement key"},
		{name: "data after the endorsement key", edit: func(_ *testing.T, r *evidence.MachineRequest) { r.EK = append(r.EK, 0) }, text: "endorsement key"},
		{name: "a large endorsement key", edit: func(_ *testing.T, r *evidence.MachineRequest) { r.EK = make([]byte, 2000) }, text: "2000 bytes"},
		{name: "a damaged certificate", edit: func(_ *testing.T, r *evidence.MachineRequest) { r.EKCertificate = []byte("x") }, text: "verify certificate of the TPM's endorsement key"},
		{name: "both kinds of key", edit: func(t *testing.T, r *evidence.MachineRequest) {
			var s evidence.MachineRequest
			if err := json.Unmarshal(software, &s); err != nil {
				t.Fatal(err)
			}
			r.CSR = s.CSR
		}, text: "it has a CSR"},
		{name: "both kinds of key, as a file's", edit: func(t *testing.T, r *evidence.MachineRequest) { r.Kind = attestation.KindKey }, text: "it has keys of a TPM"},
	} {
		var r evidence.MachineRequest
		if err := json.Unmarshal(honest, &r); err != nil {
			t.Fatal(err)
		}
		tt.edit(t, &r)
		b, err := json.Marshal(r)
		if err != nil {
			t.Fatal(err)
		}
		if _, _, err := a.Challenge(b); err == nil || !strings.Contains(err.Error(), tt.text) {
			t.Errorf("%s: %v, want %q", tt.name, err, tt.text)
		}
	}
	challenge, expect, err := a.Challenge(honest)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := attestation.AnswerIdentity(t.Context(), file, challenge); err == nil || !strings.Contains(err.Error(), "nonce of the challenge has 0 bytes") {
		t.Errorf("a key in a file answers a TPM's challenge: %v", err)
	}
	for _, answer := range []string{`{"version":1}`, `{"version":1,"secret":"AAAA"}`} {
		if _, err := a.Certify(honest, []byte(answer), expect, identity()); err == nil || !strings.Contains(err.Error(), "by another key, or to another challenge") {
			t.Errorf("answer %s: %v", answer, err)
		}
	}
}

// TestEKCertificate is about TPMs with a certificate of their vendor.
func TestEKCertificate(t *testing.T) {
	t.Parallel()
	a, _ := newAuthority(t)
	vendor, stranger := newVendor(t, "vendor"), newVendor(t, "stranger")
	for _, tt := range []struct {
		name  string
		rsa   bool
		other bool // the certificate is of another key
		roots *x509.CertPool
		want  string // Vendor
		text  string // of the error
	}{
		{name: "P-256", roots: vendor.pool, want: "CN=vendor"},
		{name: "RSA", rsa: true, roots: vendor.pool, want: "CN=vendor"},
		{name: "no roots"},
		{name: "another vendor", roots: stranger.pool, text: "verify certificate of the TPM's endorsement key: none of the given vendors certified this TPM: x509: certificate signed by unknown authority"},
		{name: "a certificate of another key", other: true, roots: vendor.pool},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			tpm, _ := swtpm.Start(t)
			key := ekOf(t, tpm, tt.rsa)
			if tt.other {
				key = vendor.key.Public()
			}
			evidence.StoreEKCertificate(t, tpm, tt.rsa, append(vendor.certify(t, key), make([]byte, 50)...))
			issuing := *a
			issuing.EKRoots = tt.roots
			dir := t.TempDir()
			r := request(t, dir, tpm)
			challenge, e, err := issuing.Challenge(r)
			if tt.text != "" {
				if err == nil || !strings.Contains(err.Error(), tt.text) {
					t.Errorf("got %v, want %q", err, tt.text)
				}
				return
			}
			if err != nil || e.Vendor != tt.want {
				t.Fatalf("vendor %q, %v; want %q", e.Vendor, err, tt.want)
			}
			answer, err := attestation.AnswerIdentity(t.Context(), dir, challenge)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := issuing.Certify(r, answer, e, identity()); err != nil {
				t.Error(err)
			}
		})
	}
}

// ekOf returns the endorsement key of a TPM.
func ekOf(t *testing.T, address string, rsa bool) any {
	t.Helper()
	tpm, err := attestation.OpenTPM(t.Context(), address)
	if err != nil {
		t.Fatal(err)
	}
	defer tpm.Close()
	template := tpm2.ECCEKTemplate
	if rsa {
		template = tpm2.RSAEKTemplate
	}
	r, err := tpm2.CreatePrimary{PrimaryHandle: tpm2.TPMRHEndorsement, InPublic: tpm2.New2B(template)}.Execute(tpm)
	if err != nil {
		t.Fatal(err)
	}
	p, err := r.OutPublic.Contents()
	if err != nil {
		t.Fatal(err)
	}
	key, err := tpm2.Pub(*p)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

// vendor makes certificates of endorsement keys.
type vendor struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	pool *x509.CertPool
}

func newVendor(t *testing.T, name string) vendor {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	v := vendor{key: key, pool: x509.NewCertPool()}
	if v.cert, err = x509.ParseCertificate(der); err != nil {
		t.Fatal(err)
	}
	v.pool.AddCert(v.cert)
	return v
}

// certify has the critical extension with the model that the TCG demands.
func (v vendor) certify(t *testing.T, key any) []byte {
	t.Helper()
	model, err := encasn1.Marshal([]encasn1.RawValue{{Class: 2, Tag: 4, IsCompound: true, Bytes: []byte{0x30, 0}}}) // directoryName
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{
		SerialNumber: big.NewInt(2), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), KeyUsage: x509.KeyUsageKeyAgreement,
		ExtraExtensions: []pkix.Extension{{Id: encasn1.ObjectIdentifier{2, 5, 29, 17}, Critical: true, Value: model}},
	}, v.cert, key, v.key)
	if err != nil {
		t.Fatal(err)
	}
	return der
}
