package attest

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-eventlog/testdata"
	"google.golang.org/protobuf/encoding/protowire"

	"constellation/engine/attestation"
	"constellation/engine/attestation/attestationtest"
	"constellation/engine/cloud"
	"constellation/engine/cloud/gcp"
)

// Files in testdata/go-tpm-tools are those of the module github.com/google/go-tpm-tools v0.4.10, under the
// Apache License 2.0 beside them. Machines of Google Cloud made them.

func read(t testing.TB, name string) []byte {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("testdata", "go-tpm-tools", name))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// fields calls f for each field of a protobuf message that has bytes or a number.
func fields(t testing.TB, b []byte, f func(n protowire.Number, value []byte, number uint64)) {
	t.Helper()
	for len(b) > 0 {
		n, kind, size := protowire.ConsumeTag(b)
		if size < 0 {
			t.Fatal(protowire.ParseError(size))
		}
		b = b[size:]
		var value []byte
		var number uint64
		switch kind {
		case protowire.BytesType:
			value, size = protowire.ConsumeBytes(b)
		case protowire.VarintType:
			number, size = protowire.ConsumeVarint(b)
		default:
			t.Fatalf("field %d has the type %d", n, kind)
		}
		if size < 0 {
			t.Fatal(protowire.ParseError(size))
		}
		b = b[size:]
		f(n, value, number)
	}
}

// Hash algorithms of the recorded quotes, by their numbers in a TPM.
const (
	sha1Bank   = 4
	sha256Bank = 11
	sha384Bank = 12
)

// sample returns the parts of a recorded attestation with the quote of a bank. Its messages are
// Attestation and Quote of the module's proto files.
func sample(t testing.TB, name string, bank uint64) (p attestationtest.VendorParts) {
	t.Helper()
	fields(t, read(t, name), func(n protowire.Number, value []byte, _ uint64) {
		switch n {
		case 1:
			p.Public = value
		case 2:
			var q, sig []byte
			var hash uint64
			pcrs := map[uint32][]byte{}
			fields(t, value, func(n protowire.Number, value []byte, _ uint64) {
				switch n {
				case 1:
					q = value
				case 2:
					sig = value
				case 3:
					fields(t, value, func(n protowire.Number, value []byte, number uint64) {
						if n == 1 {
							hash = number
							return
						}
						var index uint64
						var digest []byte
						fields(t, value, func(n protowire.Number, value []byte, number uint64) {
							if n == 1 {
								index = number
							} else {
								digest = value
							}
						})
						pcrs[uint32(index)] = digest
					})
				}
			})
			if hash == bank {
				p.Quote, p.Signature, p.PCRs = q, sig, pcrs
			}
		case 3:
			p.Log = value
		case 6:
			p.Certificate = value
		}
	})
	if p.Public == nil || p.Quote == nil || p.Log == nil || p.Certificate == nil || len(p.PCRs) != 24 {
		t.Fatalf("%s cannot be read", name)
	}
	return p
}

const (
	recorded     = "gce-cos-85-nonce9009.pb"
	withoutNonce = "gce-cos-85-no-nonce.pb"
)

var (
	nonce = []byte{0x90, 0x09}
	// then is when the evidence was made: its key was certified the day before.
	then = time.Date(2021, 9, 1, 12, 0, 0, 0, time.UTC)
)

// The machine that made the evidence.
const (
	itsProject = "google.com:wuale-gcp-testing"
	itsZone    = "us-central1-a"
	itsName    = "cos-test"
	itsNumber  = "6797026933021542085"
	clusterUID = "demo-1"
)

func itsID() string { return gcp.ProviderID(itsProject, itsZone, itsName) }

// instances are the machines of a cluster by key.
type instances struct {
	byKey map[string]cloud.Instance
	err   error
	asked int
}

// Instance implements Instances.
func (i *instances) Instance(_ context.Context, key string) (cloud.Instance, error) {
	i.asked++
	if i.err != nil {
		return cloud.Instance{}, i.err
	}
	m, ok := i.byKey[key]
	if !ok {
		return cloud.Instance{}, cloud.ErrNotFound
	}
	return m, nil
}

// one returns a cluster with the machine that made the evidence.
func one() *instances {
	i := cloud.Instance{
		Name: itsName, ProviderID: itsID(), Incarnation: itsNumber, Group: gcp.GroupID(itsProject, itsZone, "workers"), Role: cloud.Worker,
		State: cloud.Ready, IP: netip.MustParseAddr("10.128.0.7"),
	}
	return &instances{byKey: map[string]cloud.Instance{i.Key(): i}}
}

func roots(t testing.TB) *x509.CertPool {
	t.Helper()
	p, err := attestation.ParseRoots(Roots())
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func document(t testing.TB, p attestationtest.VendorParts) []byte {
	t.Helper()
	b, err := p.Document()
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// judge is what a judgement depends on.
type judge struct {
	config       Config
	cluster      Cluster
	roots        *x509.CertPool
	measurements attestation.Measurements
	options      attestation.Options
	parts        attestationtest.VendorParts
	nonce        []byte
}

// accepting returns a judgement that accepts the recorded evidence.
func accepting(t testing.TB) judge {
	t.Helper()
	p := sample(t, recorded, sha256Bank)
	return judge{
		cluster: Cluster{Project: itsProject, UID: clusterUID, Instances: one()}, roots: roots(t),
		measurements: attestation.Enforced(map[uint32][]byte{0: p.PCRs[0], 4: p.PCRs[4], 7: p.PCRs[7], 8: p.PCRs[8], 9: p.PCRs[9]}),
		options:      attestation.Options{Now: func() time.Time { return then }}, parts: p, nonce: nonce,
	}
}

func (j judge) validator() attestation.Validator {
	c := j.config
	if c.Cluster == nil {
		c.Cluster = func(context.Context) (Cluster, error) { return j.cluster, nil }
	}
	return Method(c).Validator(j.roots, j.measurements, j.options)
}

func (j judge) judge(t testing.TB) (attestation.Statement, error) {
	t.Helper()
	return j.validator().Validate(t.Context(), document(t, j.parts), j.nonce)
}

func TestRootsArePinned(t *testing.T) {
	var got []string
	for rest := slices.Concat(rootsPEM, intermediatesPEM); ; {
		var b *pem.Block
		if b, rest = pem.Decode(rest); b == nil {
			break
		}
		h := sha256.Sum256(b.Bytes)
		got = append(got, hex.EncodeToString(h[:]))
	}
	// In the order of roots.pem and intermediates.pem.
	want := []string{
		"594759594b9b61524f6c8ef668f7177f7b9066bc0674f2f49fe9e052be78beb2", // EK/AK CA Root
		"9bd5285f8fb18502a7947e621ffd470266f49fcd3b73e19a190f690ad32a7caf", // tpm_ek_v1_cloud_host_root
		"c84de8116dfaf5a908f21e810487791f5437e206d00ad8025050cca6bd2ff627", // EK/AK CA Intermediate
		"5d8dbcf8c8053dd8ffad711b6219355032b7122c34cac0f90ccb49def69ec504", // tpm_ek_v1_cloud_host, 2020
		"7132b6ea71101f6c51bb58f98c3798c19b65be510eca0344318900510b593178", // tpm_ek_v1_cloud_host, 2021
	}
	if !slices.Equal(got, want) {
		t.Errorf("certificates are %q, want %q", got, want)
	}
	if n := len(pinned()); n != 3 {
		t.Errorf("%d intermediate certificates were parsed", n)
	}
}

// TestRecordedEvidence judges the evidence of a machine in Google Cloud.
func TestRecordedEvidence(t *testing.T) {
	j := accepting(t)
	j.config.SecureBoot = true
	j.options.UID, j.options.Role = clusterUID, cloud.Worker
	st, err := j.judge(t)
	if err != nil {
		t.Fatal(err)
	}
	want := attestation.Identity{
		Name: itsName, ProviderID: "gce://google.com:wuale-gcp-testing/us-central1-a/cos-test", Incarnation: itsNumber, UID: clusterUID,
		Group: gcp.GroupID(itsProject, itsZone, "workers"), Role: cloud.Worker, IP: netip.MustParseAddr("10.128.0.7"),
	}
	if st.Identity != want || !st.Attested || st.SecureBoot != attestation.SecureBootOn || len(st.Warnings) > 0 || st.Resets != 10 {
		t.Errorf("got %+v, want %+v", st, want)
	}
	for i := range uint32(24) {
		if !bytes.Equal(st.PCRs[i], j.parts.PCRs[i]) {
			t.Errorf("PCR %d is %x", i, st.PCRs[i])
		}
	}
	t.Logf("a document of %d bytes, an event log of %d", len(document(t, j.parts)), len(j.parts.Log))
}

// change returns the only machine of j after f changed it.
func (j *judge) change(f func(*cloud.Instance)) {
	i := one()
	for key, m := range i.byKey {
		f(&m)
		i.byKey[key] = m
	}
	j.cluster.Instances = i
}

func TestRecordedEvidenceIsRefusedElsewhere(t *testing.T) {
	at := func(when time.Time) func(*judge) {
		return func(j *judge) { j.options.Now = func() time.Time { return when } }
	}
	other := func(t *testing.T, file string) []byte { // a certificate of another machine
		b, _ := pem.Decode(read(t, file))
		return b.Bytes
	}
	for _, tt := range []struct {
		name string
		edit func(*judge)
		want error
		text string
		// unasked means that the API gets no request.
		unasked bool
	}{
		{name: "a second before the certificate", edit: at(time.Date(2021, 8, 31, 23, 11, 4, 0, time.UTC)), want: attestation.ErrTrust, text: "compare the clock", unasked: true},
		{name: "a second after the certificate", edit: at(time.Date(2051, 8, 24, 23, 16, 6, 0, time.UTC)), want: attestation.ErrTrust, text: "compare the clock", unasked: true},
		{name: "no root", edit: func(j *judge) { j.roots = nil }, want: attestation.ErrTrust, text: "trustRoots", unasked: true},
		{name: "the root of later machines", edit: func(j *judge) { j.roots = pool(t, 0) }, want: attestation.ErrTrust, text: "trustRoots", unasked: true},
		{name: "a root of somebody else with the same name", edit: func(j *judge) { j.roots = namesake(t, rootOf(t, 1)) }, want: attestation.ErrTrust, text: "trustRoots", unasked: true},
		{name: "another nonce", edit: func(j *judge) { j.nonce = []byte{0x90, 0x0a} }, want: attestation.ErrQuote, text: "another connection", unasked: true},
		{name: "a longer nonce", edit: func(j *judge) { j.nonce = []byte{0x90, 0x09, 0} }, want: attestation.ErrQuote, text: "another connection", unasked: true},
		{name: "no nonce", edit: func(j *judge) { j.nonce = nil }, want: attestation.ErrQuote, text: "want 1 to 32", unasked: true},
		{name: "a quote without a nonce", edit: func(j *judge) { j.parts = sample(t, withoutNonce, sha256Bank) }, want: attestation.ErrQuote, text: "another connection", unasked: true},
		{name: "a quote without a nonce, and none expected", edit: func(j *judge) { j.parts, j.nonce = sample(t, withoutNonce, sha256Bank), nil }, want: attestation.ErrQuote, text: "want 1 to 32", unasked: true},
		{name: "registers of SHA-1", edit: func(j *judge) { j.parts = sample(t, recorded, sha1Bank) }, want: attestation.ErrDocument, text: "want 32", unasked: true},
		{name: "registers of SHA-384", edit: func(j *judge) { j.parts = sample(t, recorded, sha384Bank) }, want: attestation.ErrDocument, text: "want 32", unasked: true},
		{name: "the quote of SHA-1 with the registers of SHA-256", edit: func(j *judge) { j.parts.Quote = sample(t, recorded, sha1Bank).Quote }, want: attestation.ErrQuote, text: "SHA-256", unasked: true},
		{name: "the signature of another quote", edit: func(j *judge) { j.parts.Signature = sample(t, recorded, sha384Bank).Signature }, want: attestation.ErrQuote, text: "signature is invalid", unasked: true},
		{name: "the certificate of another machine's key", edit: func(j *judge) {
			j.parts.Certificate = other(t, "uca_tpm_rsa_sign_cert.pem")
			at(then.AddDate(3, 0, 0))(j)
		}, want: attestation.ErrTrust, text: "belongs to another key", unasked: true},
		{name: "the certificate of an endorsement key", edit: func(j *judge) {
			j.parts.Certificate = other(t, "uca_tpm_rsa_enc_cert.pem")
			at(then.AddDate(3, 0, 0))(j)
		}, want: attestation.ErrTrust, text: "not its endorsement key", unasked: true},
		{name: "certificates that are not needed", edit: func(j *judge) { j.parts.Intermediates = [][]byte{other(t, "uca_tpm_rsa_sign_cert.pem")} }, want: attestation.ErrTrust, text: "do not vouch", unasked: true},
		{name: "no event log", edit: func(j *judge) { j.parts.BootLog = []byte{} }, want: attestation.ErrDocument, text: "event log", unasked: true},
		{name: "the event log of another machine", edit: func(j *judge) { j.parts.Log = otherLog() }, want: attestation.ErrDocument, text: "add up to", unasked: true},
		{name: "another image", edit: func(j *judge) { j.measurements[8] = attestation.Measurement{Expected: make([]byte, 32)} }, want: attestation.ErrMeasurement, text: "PCR 8", unasked: true},
		{name: "no measurements", edit: func(j *judge) { j.measurements = nil }, want: attestation.ErrMeasurement, text: "none are configured", unasked: true},
		{name: "a member is expected", edit: func(j *judge) { j.options.PCR15 = attestation.PCR15Member() }, want: attestation.ErrMember, unasked: true},
		{name: "another project", edit: func(j *judge) { j.cluster.Project = "customer" }, want: attestation.ErrIdentity, text: `the cluster in "customer"`, unasked: true},
		{name: "a machine that the cluster does not have", edit: func(j *judge) { j.cluster.Instances = &instances{} }, want: attestation.ErrIdentity, text: "number " + itsNumber},
		{name: "a new machine of that name", edit: func(j *judge) { j.change(func(i *cloud.Instance) { i.Incarnation = "1" }) }, want: attestation.ErrIdentity, text: "former machine"},
		{name: "a machine without a number", edit: func(j *judge) { j.change(func(i *cloud.Instance) { i.Incarnation = "" }) }, want: attestation.ErrIdentity, text: "former machine"},
		{name: "a machine of another zone", edit: func(j *judge) {
			j.change(func(i *cloud.Instance) { i.ProviderID = gcp.ProviderID(itsProject, "us-central1-b", itsName) })
		}, want: attestation.ErrIdentity, text: "in the place of"},
		{name: "a machine of another name", edit: func(j *judge) { j.change(func(i *cloud.Instance) { i.Name = "cos-test-2" }) }, want: attestation.ErrIdentity, text: "in the place of"},
		{name: "a machine that is being deleted", edit: func(j *judge) { j.change(func(i *cloud.Instance) { i.State = cloud.Terminating }) }, want: attestation.ErrIdentity, text: "is Terminating"},
		{name: "a machine that was stopped", edit: func(j *judge) { j.change(func(i *cloud.Instance) { i.State = cloud.Stopped }) }, want: attestation.ErrIdentity, text: "start the machine"},
		{name: "a machine without a role", edit: func(j *judge) { j.change(func(i *cloud.Instance) { i.Role = "" }) }, want: attestation.ErrIdentity, text: "role"},
		{name: "a machine without an address", edit: func(j *judge) { j.change(func(i *cloud.Instance) { i.IP = netip.Addr{} }) }, want: attestation.ErrIdentity, text: "address"},
		{name: "another cluster", edit: func(j *judge) { j.options.UID = "demo-2" }, want: attestation.ErrIdentity, text: `expected "demo-2"`},
		{name: "another role", edit: func(j *judge) { j.options.Role = cloud.ControlPlane }, want: attestation.ErrIdentity, text: "expected a control-plane"},
		{name: "an API that does not answer", edit: func(j *judge) { j.cluster.Instances = &instances{err: cloud.ErrUnavailable} }, want: cloud.ErrUnavailable, text: itsID()},
		{name: "an API that denies the request", edit: func(j *judge) { j.cluster.Instances = &instances{err: cloud.ErrDenied} }, want: cloud.ErrDenied, text: "compute.instances.get"},
		{name: "a cluster that cannot be found", edit: func(j *judge) {
			j.config.Cluster = func(context.Context) (Cluster, error) { return Cluster{}, cloud.ErrUnavailable }
		}, want: cloud.ErrUnavailable, text: "find the cluster", unasked: true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			j := accepting(t)
			tt.edit(&j)
			st, err := j.judge(t)
			if !errors.Is(err, tt.want) || !strings.Contains(err.Error(), tt.text) {
				t.Errorf("got %v, want %v with %q", err, tt.want, tt.text)
			}
			for _, other := range []error{attestation.ErrDocument, attestation.ErrTrust, attestation.ErrQuote, attestation.ErrMeasurement, attestation.ErrMember, attestation.ErrIdentity} {
				if !errors.Is(tt.want, other) && errors.Is(err, other) {
					t.Errorf("%v is %v, too", err, other)
				}
			}
			if i, ok := j.cluster.Instances.(*instances); ok && tt.unasked && i.asked > 0 {
				t.Errorf("the API got %d requests", i.asked)
			}
			_ = st
		})
	}
}

// TestRecordedCertificates judges the certificates of two other machines: an older kind and today's.
func TestRecordedCertificates(t *testing.T) {
	machines := map[string]instance{
		"pca": {itsZone, itsProject, "cs-debug-pca", 117478743145, 218557372616137117},
		"uca": {itsZone, itsProject, "cs-debug", 117478743145, 0},
	}
	for _, file := range []string{"pca_tpm_ecc_enc", "pca_tpm_ecc_sign", "pca_tpm_rsa_enc", "pca_tpm_rsa_sign", "uca_tpm_ecc_enc", "uca_tpm_ecc_sign", "uca_tpm_rsa_enc", "uca_tpm_rsa_sign"} {
		t.Run(file, func(t *testing.T) {
			b, _ := pem.Decode(read(t, file+"_cert.pem"))
			c, err := x509.ParseCertificate(b.Bytes)
			if err != nil {
				t.Fatal(err)
			}
			own, foreign := pool(t, 0), pool(t, 1)
			if strings.HasPrefix(file, "uca") {
				own, foreign = foreign, own
			}
			when := time.Date(2023, 1, 1, 0, 0, 0, 0, time.UTC)
			got, err := certified([]*x509.Certificate{c}, own, when)
			if strings.Contains(file, "_enc") {
				if err == nil {
					t.Fatal("the certificate of an endorsement key was accepted")
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			want := machines[file[:3]]
			if want.number == 0 {
				want.number = got.number
			}
			if got != want || got.number == 0 {
				t.Errorf("it names %+v, want %+v", got, want)
			}
			for name, err := range map[string]error{
				"another root of Google": fails(certified([]*x509.Certificate{c}, foreign, when)),
				"no root":                fails(certified([]*x509.Certificate{c}, x509.NewCertPool(), when)),
				"before it is valid":     fails(certified([]*x509.Certificate{c}, own, c.NotBefore.Add(-time.Second))),
				"after it was valid":     fails(certified([]*x509.Certificate{c}, own, c.NotAfter.Add(time.Second))),
			} {
				if err == nil {
					t.Errorf("%s: it was accepted", name)
				}
			}
			for name, at := range map[string]time.Time{"the first second": c.NotBefore, "the last second": c.NotAfter} {
				if _, err := certified([]*x509.Certificate{c}, own, at); err != nil {
					t.Errorf("%s: %v", name, err)
				}
			}
		})
	}
}

func fails(_ instance, err error) error { return err }

// rootOf returns one of Google's roots: 0 is that of today's machines, 1 the one before.
func rootOf(t testing.TB, n int) *x509.Certificate {
	t.Helper()
	rest := rootsPEM
	for ; ; n-- {
		var b *pem.Block
		if b, rest = pem.Decode(rest); b == nil {
			t.Fatal("there is no such root")
		}
		if n == 0 {
			c, err := x509.ParseCertificate(b.Bytes)
			if err != nil {
				t.Fatal(err)
			}
			return c
		}
	}
}

func pool(t testing.TB, n int) *x509.CertPool {
	t.Helper()
	p := x509.NewCertPool()
	p.AddCert(rootOf(t, n))
	return p
}

// namesake returns a pool with an authority of somebody else that has the name of c.
func namesake(t testing.TB, c *x509.Certificate) *x509.CertPool {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{
		RawSubject: c.RawSubject, SubjectKeyId: c.SubjectKeyId, NotBefore: c.NotBefore, NotAfter: c.NotAfter, KeyUsage: c.KeyUsage, BasicConstraintsValid: true, IsCA: true,
	}, &x509.Certificate{RawSubject: c.RawSubject}, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	out, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	p := x509.NewCertPool()
	p.AddCert(out)
	return p
}

func otherLog() []byte { return testdata.Cos121AmdSevEventLog }
