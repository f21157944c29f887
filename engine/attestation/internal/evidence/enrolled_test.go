package evidence

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/x509"
	encasn1 "encoding/asn1"
	"encoding/pem"
	"errors"
	"fmt"
	mathrand "math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"constellation/engine/cloud"
	"constellation/internal/mutation"
	"constellation/internal/testneeds"
)

// enrol makes a machine with a key in a file, and returns the directory of its identity.
func enrol(t testing.TB, ca *CA, id Identity) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "identity")
	request, _, err := RequestIdentity(context.Background(), dir, NoTPM)
	if err != nil {
		t.Fatal(err)
	}
	certify(t, ca, dir, request, id)
	return dir
}

func certify(t testing.TB, ca *CA, dir string, request []byte, id Identity) {
	t.Helper()
	var r MachineRequest
	if err := DecodeMessage(request, &r, &r.Version); err != nil {
		t.Fatal(err)
	}
	csr, err := x509.ParseCertificateRequest(r.CSR)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := CertifyMachine(ca, csr.PublicKey.(*ecdsa.PublicKey), r.Kind, id)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := StoreIdentity(context.Background(), dir, cert); err != nil {
		t.Fatal(err)
	}
}

func issueEnrolled(t testing.TB, dir string) []byte {
	t.Helper()
	doc, err := NewEnrolledIssuer("enrolled:"+dir).Issue(context.Background(), nonce)
	if err != nil {
		t.Fatal(err)
	}
	return doc
}

// enrolledForger makes documents with any content.
type enrolledForger struct {
	ca    *CA
	key   *ecdsa.PrivateKey
	doc   enrolled
	bound []byte // user data that the proof covers
	quote *forger
}

// useTPM gives f a key in a TPM.
func (f *enrolledForger) useTPM(t testing.TB) {
	t.Helper()
	f.quote = newForger(t, f.ca)
	f.quote.key = f.key
	f.quote.public = ecPublic(t, &f.key.PublicKey)
	f.quote.editDocument = func(d *document) { d.certificate, d.log = nil, nil }
	f.doc.kind = KindTPM
	f.certify(t, f.key.Public(), KindTPM.usage())
}

func newEnrolledForger(t testing.TB, ca *CA) *enrolledForger {
	t.Helper()
	f := &enrolledForger{ca: ca, key: fixedKey(t, "machine"), bound: nonce}
	f.doc = enrolled{kind: KindKey, membership: make([]byte, pcrSize)}
	f.certify(t, f.key.Public(), KindKey.usage())
	return f
}

func (f *enrolledForger) certify(t testing.TB, key any, usage encasn1.ObjectIdentifier) {
	t.Helper()
	var err error
	if f.doc.certificate, err = f.ca.certify(key, usage, worker(0)); err != nil {
		t.Fatal(err)
	}
}

func (f *enrolledForger) document(t testing.TB) []byte {
	t.Helper()
	var err error
	switch {
	case f.doc.proof != nil:
	case f.quote != nil:
		f.quote.quote.extraData = f.doc.binding(f.bound)
		f.doc.proof = f.quote.document(t)
	default:
		if f.doc.proof, err = ecdsa.SignASN1(rand.Reader, f.key, f.doc.binding(f.bound)); err != nil {
			t.Fatal(err)
		}
	}
	b, err := f.doc.marshal()
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestEnrolledValidator(t *testing.T) {
	t.Parallel()
	ca, other := newCA(t, "workspace"), newCA(t, "another workspace")
	cluster := []byte("cluster of the workspace")
	for _, tt := range []struct {
		name   string
		change func(t *testing.T, f *enrolledForger)
		edit   func(doc []byte) []byte
		opts   Options
		want   error
		text   string
	}{
		{name: "an unused machine"},
		{name: "its role and workspace", opts: Options{Role: cloud.Worker, UID: "demo"}},
		{name: "another role", opts: Options{Role: cloud.ControlPlane}, want: ErrIdentity, text: "worker-0 is a worker"},
		{name: "another workspace", opts: Options{UID: "other"}, want: ErrIdentity, text: `belongs to "demo"`},
		{name: "a member", change: func(_ *testing.T, f *enrolledForger) { f.doc.membership = ClusterIDPCR(cluster) }, opts: Options{PCR15: PCR15ClusterID(cluster)}},
		{name: "a member of some cluster", change: func(_ *testing.T, f *enrolledForger) { f.doc.membership = ClusterIDPCR(cluster) }, opts: Options{PCR15: PCR15Member()}},
		{name: "a member that should be unused", change: func(_ *testing.T, f *enrolledForger) { f.doc.membership = ClusterIDPCR(cluster) }, want: ErrMember},
		{name: "an unused machine that should be a member", opts: Options{PCR15: PCR15ClusterID(cluster)}, want: ErrMember},
		{name: "a member of another cluster", change: func(_ *testing.T, f *enrolledForger) { f.doc.membership = ClusterIDPCR([]byte("other")) }, opts: Options{PCR15: PCR15ClusterID(cluster)}, want: ErrMember},
		{name: "another authority", change: func(t *testing.T, f *enrolledForger) { f.ca = other; f.certify(t, f.key.Public(), KindKey.usage()) }, want: ErrTrust},
		{name: "an expired certificate", opts: Options{Now: func() time.Time { return time.Now().AddDate(11, 0, 0) }}, want: ErrTrust, text: "expired"},
		{name: "a certificate of a cloud's attestation key", change: func(t *testing.T, f *enrolledForger) { f.certify(t, f.key.Public(), oidAttestationKey()) }, want: ErrTrust, text: "usage 1.3.6.1.4.1.32473.3.1"},
		{name: "a stolen certificate", change: func(t *testing.T, f *enrolledForger) { f.key = fixedKey(t, "thief") }, want: ErrQuote, text: "the certified key did not sign it"},
		{name: "evidence of another connection", change: func(_ *testing.T, f *enrolledForger) { f.bound = []byte("another nonce") }, want: ErrQuote},
		{name: "a register that was changed", change: func(t *testing.T, f *enrolledForger) {
			f.doc.membership = ClusterIDPCR(cluster)
			f.document(t)
			f.doc.membership = make([]byte, pcrSize)
		}, want: ErrQuote},
		{name: "an RSA key", change: func(t *testing.T, f *enrolledForger) {
			k, err := rsa.GenerateKey(rand.Reader, 2048)
			if err != nil {
				t.Fatal(err)
			}
			f.certify(t, k.Public(), KindKey.usage())
		}, want: ErrTrust, text: "not on P-256"},
		{name: "a key on another curve", change: func(t *testing.T, f *enrolledForger) {
			var err error
			if f.key, err = ecdsa.GenerateKey(elliptic.P384(), rand.Reader); err != nil {
				t.Fatal(err)
			}
			f.certify(t, f.key.Public(), KindKey.usage())
		}, want: ErrTrust, text: "not on P-256"},
		{name: "a TPM", change: func(t *testing.T, f *enrolledForger) { f.useTPM(t) }},
		{name: "a member with a TPM", change: func(t *testing.T, f *enrolledForger) {
			f.useTPM(t)
			f.doc.membership = ClusterIDPCR(cluster)
			f.quote.pcrs[15].value = f.doc.membership
		}, opts: Options{PCR15: PCR15ClusterID(cluster)}},
		{name: "a TPM that quotes another register 15", change: func(t *testing.T, f *enrolledForger) {
			f.useTPM(t)
			f.quote.pcrs[15].value = ClusterIDPCR(cluster)
		}, want: ErrQuote, text: "not the quoted one"},
		{name: "a TPM that does not quote register 15", change: func(t *testing.T, f *enrolledForger) {
			f.useTPM(t)
			f.quote.pcrs = f.quote.pcrs[:15]
		}, want: ErrQuote, text: "not the quoted one"},
		{name: "a quote for another connection", change: func(t *testing.T, f *enrolledForger) { f.useTPM(t); f.bound = []byte("other") }, want: ErrQuote, text: "another connection"},
		{name: "a certificate of a key in a file for a TPM", change: func(t *testing.T, f *enrolledForger) {
			f.useTPM(t)
			f.certify(t, f.key.Public(), KindKey.usage())
		}, want: ErrTrust, text: "usage 1.3.6.1.4.1.32473.3.2"},
		{name: "a certificate of a key in a TPM for a file", change: func(t *testing.T, f *enrolledForger) { f.certify(t, f.key.Public(), KindTPM.usage()) }, want: ErrTrust, text: "usage 1.3.6.1.4.1.32473.3.1"},
		{name: "a signature of a key in a file for a TPM", change: func(t *testing.T, f *enrolledForger) {
			f.useTPM(t)
			f.quote = nil
		}, want: ErrDocument},
		{name: "a quote of another TPM", change: func(t *testing.T, f *enrolledForger) {
			f.useTPM(t)
			f.certify(t, fixedKey(t, "other").Public(), KindTPM.usage())
		}, want: ErrTrust, text: "belongs to another key"},
		{name: "a key that signs anything", change: func(t *testing.T, f *enrolledForger) {
			f.useTPM(t)
			f.quote.public = withAttributes(f.quote.public, akAttributes&^attrRestricted)
		}, want: ErrTrust, text: "may sign things"},
		{name: "an event log in the quote", change: func(t *testing.T, f *enrolledForger) {
			f.useTPM(t)
			f.quote.editDocument = func(d *document) { d.certificate = nil }
		}, want: ErrDocument, text: "an event log of its own"},
		{name: "a short register", change: func(_ *testing.T, f *enrolledForger) { f.doc.membership = make([]byte, 31) }, want: ErrDocument, text: "membership has 31 bytes"},
		{name: "a long proof", change: func(_ *testing.T, f *enrolledForger) { f.doc.proof = make([]byte, maxProof+1) }, want: ErrDocument, text: "proof has 8193 bytes"},
		{name: "a long certificate", change: func(_ *testing.T, f *enrolledForger) { f.doc.certificate = make([]byte, maxCertificate+1) }, want: ErrDocument, text: "certificate has 4097 bytes"},
		{name: "an unknown kind", change: func(_ *testing.T, f *enrolledForger) { f.doc.kind = "moon" }, want: ErrDocument, text: "unknown kind 0"},
		{name: "another version", edit: func(b []byte) []byte { return bytes.Replace(b, []byte{2, 1, 1, 2, 1, 1}, []byte{2, 1, 2, 2, 1, 1}, 1) }, want: ErrDocument, text: "it has version 2"},
		{name: "data at its end", edit: func(b []byte) []byte { return append(b, 0) }, want: ErrDocument},
		{name: "nothing", edit: func([]byte) []byte { return nil }, want: ErrDocument},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			f := newEnrolledForger(t, ca)
			if tt.change != nil {
				tt.change(t, f)
			}
			doc := f.document(t)
			if tt.edit != nil {
				doc = tt.edit(doc)
			}
			st, err := NewEnrolledValidator(ca.Roots(), tt.opts).Validate(t.Context(), doc, nonce)
			if tt.want != nil {
				if !errors.Is(err, tt.want) || !strings.Contains(err.Error(), tt.text) {
					t.Errorf("got %v, want %v with %q", err, tt.want, tt.text)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			cert, err := x509.ParseCertificate(f.doc.certificate)
			if err != nil {
				t.Fatal(err)
			}
			want := Statement{Identity: worker(0), Key: fmt.Sprintf("sha256:%x", sha256.Sum256(cert.RawSubjectPublicKeyInfo)), PCRs: map[uint32][]byte{15: f.doc.membership}}
			if f.quote != nil {
				want.Attested, want.Firmware, want.Resets = true, 1, 1
				for _, r := range f.quote.pcrs {
					want.PCRs[r.index] = r.value
				}
			}
			if !reflect.DeepEqual(st, want) {
				t.Errorf("states %+v, want %+v", st, want)
			}
		})
	}
	t.Run("no roots", func(t *testing.T) {
		t.Parallel()
		if _, err := NewEnrolledValidator(nil, Options{}).Validate(t.Context(), newEnrolledForger(t, ca).document(t), nonce); !errors.Is(err, ErrTrust) {
			t.Errorf("got %v", err)
		}
	})
	t.Run("as a quote of a TPM", func(t *testing.T) { // with the same root
		t.Parallel()
		if _, err := NewTPMValidator(ca.Roots(), images(), Options{}).Validate(t.Context(), newEnrolledForger(t, ca).document(t), nonce); !errors.Is(err, ErrDocument) {
			t.Errorf("got %v", err)
		}
		f := newForger(t, ca)
		f.template.UnknownExtKeyUsage = []encasn1.ObjectIdentifier{KindKey.usage()}
		if _, err := NewTPMValidator(ca.Roots(), images(), Options{}).Validate(t.Context(), f.document(t), nonce); !errors.Is(err, ErrTrust) {
			t.Errorf("a certificate of an enrolled key: %v", err)
		}
	})
}

// TestMutatedEnrolledEvidence changes genuine evidence at random. A validator must refuse each
// change or state exactly what it states of an original.
func TestMutatedEnrolledEvidence(t *testing.T) {
	t.Parallel()
	ca := newCA(t, "workspace")
	v := NewEnrolledValidator(ca.Roots(), Options{})
	var docs []enrolled
	var raws [][]byte
	var states []Statement
	tpm := newEnrolledForger(t, ca)
	tpm.useTPM(t)
	for _, raw := range [][]byte{issueEnrolled(t, enrol(t, ca, worker(0))), issueEnrolled(t, enrol(t, ca, worker(1))), tpm.document(t)} {
		d, err := parseEnrolled(raw)
		if err != nil {
			t.Fatal(err)
		}
		st, err := v.Validate(t.Context(), raw, nonce)
		if err != nil {
			t.Fatal(err)
		}
		docs, raws, states = append(docs, d), append(raws, raw), append(states, st)
	}
	total := testneeds.Number(t, "CONSTELLATION_EVIDENCE_MUTATIONS", 2000)
	for kind, of := range map[string][]int{"key in a file": {0, 1}, "key in a TPM": {2}} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			judgeMutations(t, v, mathrand.New(mathrand.NewPCG(7, 18)), total, of, docs, raws, states)
		})
	}
}

// judgeMutations judges changes of those of docs that of has the indices of.
func judgeMutations(t *testing.T, v Validator, r *mathrand.Rand, total int, of []int, docs []enrolled, raws [][]byte, states []Statement) {
	t.Helper()
	refused, same := 0, 0
	for refused+same < total {
		i := of[r.IntN(len(of))]
		d := docs[i]
		var b []byte
		field := []*[]byte{&d.certificate, &d.membership, &d.proof}[r.IntN(3)]
		switch r.IntN(4) {
		case 0:
			b = mutation.Bytes(r, raws[i])
		case 1: // a field of another machine
			other := docs[(i+1+r.IntN(len(docs)-1))%len(docs)]
			*[]*[]byte{&d.certificate, &d.proof}[r.IntN(2)] = [][]byte{other.certificate, other.proof}[r.IntN(2)]
			b, _ = d.marshal()
		default:
			*field = mutation.Bytes(r, *field)
			b, _ = d.marshal()
		}
		if slices.ContainsFunc(raws, func(raw []byte) bool { return bytes.Equal(raw, b) }) {
			continue // no change
		}
		st, err := v.Validate(t.Context(), b, nonce)
		if err != nil {
			refused++
			continue
		}
		if !slices.ContainsFunc(states, func(s Statement) bool { return reflect.DeepEqual(s, st) }) {
			t.Fatalf("accepted as %+v: %x", st, b)
		}
		same++
	}
	t.Logf("%d mutations, %d refused, %d that state what the original does", total, refused, same)
	if refused < total*9/10 {
		t.Errorf("only %d of %d changes were refused", refused, total)
	}
}

// FuzzEnrolled feeds arbitrary documents to a validator. It must neither panic nor accept a
// document of a dishonest machine.
func FuzzEnrolled(f *testing.F) {
	ca := fixedCA(f)
	f.Add(newEnrolledForger(f, ca).document(f))
	tpm := newEnrolledForger(f, ca)
	tpm.useTPM(f)
	f.Add(tpm.document(f))
	f.Add([]byte{})
	v := NewEnrolledValidator(ca.Roots(), Options{})
	f.Fuzz(func(t *testing.T, b []byte) {
		st, err := v.Validate(context.Background(), b, nonce)
		if err == nil && st.Identity != worker(0) {
			t.Errorf("accepted: %+v", st)
		}
		n := 0
		for _, s := range []error{ErrDocument, ErrTrust, ErrQuote, ErrMember, ErrIdentity} {
			if errors.Is(err, s) {
				n++
			}
		}
		if err != nil && n != 1 {
			t.Errorf("the error wraps %d reasons: %v", n, err)
		}
		if d, err := parseEnrolled(b); err == nil {
			if again, err := d.marshal(); err != nil || !bytes.Equal(again, b) {
				t.Errorf("the document has two forms: %x and %x, %v", b, again, err)
			}
		}
	})
}

func TestEnrolledIdentityOnDisk(t *testing.T) {
	t.Parallel()
	ca := newCA(t, "workspace")
	dir := enrol(t, ca, worker(0))
	address := "enrolled:" + dir
	for name, mode := range map[string]os.FileMode{".": os.ModeDir | 0o700, keyFile: 0o600, certificateFile: 0o600} {
		if i, err := os.Stat(filepath.Join(dir, name)); err != nil || i.Mode() != mode {
			t.Errorf("%s: %v %v, want mode %v", name, i, err, mode)
		}
	}
	membership := func() []byte {
		t.Helper()
		pcrs, err := ReadPCRs(t.Context(), address, 4, 15)
		if err != nil || len(pcrs) != 2 || !isZero(pcrs[4]) {
			t.Fatalf("registers %x, %v", pcrs, err)
		}
		st, err := NewEnrolledValidator(ca.Roots(), Options{PCR15: PCR15{member: !isZero(pcrs[15])}}).Validate(t.Context(), issueEnrolled(t, dir), nonce)
		if err != nil || !bytes.Equal(st.PCRs[15], pcrs[15]) {
			t.Fatalf("evidence states %x, %v; the register is %x", st.PCRs[15], err, pcrs[15])
		}
		return pcrs[15]
	}
	if !isZero(membership()) {
		t.Error("a new machine is not unused")
	}
	a, b := []byte("cluster A"), []byte("cluster B")
	for range 2 {
		if err := ExtendClusterID(t.Context(), address, a); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(membership(), ClusterIDPCR(a)) {
			t.Error("not a member of the cluster")
		}
	}
	if err := ExtendClusterID(t.Context(), address, b); !errors.Is(err, ErrMember) || errors.Is(err, ErrTPM) {
		t.Errorf("a member of another cluster: %v", err)
	}
	for range 2 {
		if err := ClearClusterID(address); err != nil {
			t.Fatal(err)
		}
		if !isZero(membership()) {
			t.Error("not unused after a reset")
		}
	}
	os.WriteFile(filepath.Join(dir, clusterFile), []byte("00 11"), 0o600)
	if _, err := ReadPCRs(t.Context(), address, 15); !errors.Is(err, ErrTPM) || !strings.Contains(err.Error(), "bootstrapper reset") {
		t.Errorf("a damaged marker: %v", err)
	}
	if err := ClearClusterID(address); err != nil {
		t.Errorf("reset with a damaged marker: %v", err)
	}

	// Reading does not write.
	before := tree(t, dir)
	issueEnrolled(t, dir)
	if after := tree(t, dir); before != after {
		t.Errorf("evidence changed %s to %s", before, after)
	}
}

// tree describes the files in dir.
func tree(t *testing.T, dir string) string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var b strings.Builder
	for _, e := range append(entries, nil) {
		name := "."
		if e != nil {
			name = e.Name()
		}
		i, err := os.Stat(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintln(&b, name, i.Mode(), i.ModTime().UnixNano(), i.Size())
	}
	return b.String()
}

func TestDamagedIdentity(t *testing.T) {
	t.Parallel()
	ca := newCA(t, "workspace")
	other := enrol(t, ca, worker(1))
	stolen, err := os.ReadFile(filepath.Join(other, certificateFile))
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name   string
		damage func(dir string)
		text   string
	}{
		{name: "no identity", damage: func(dir string) { os.RemoveAll(dir) }, text: "no such file"},
		{name: "no key", damage: func(dir string) { os.Remove(filepath.Join(dir, keyFile)) }, text: "no key or no certificate"},
		{name: "no certificate", damage: func(dir string) { os.Remove(filepath.Join(dir, certificateFile)) }, text: "no key or no certificate"},
		{name: "a stolen certificate", damage: func(dir string) { os.WriteFile(filepath.Join(dir, certificateFile), stolen, 0o600) }, text: "issued for another key"},
		{name: "half a key", damage: func(dir string) { os.WriteFile(filepath.Join(dir, keyFile), []byte("-----BEGIN PRIVATE"), 0o600) }, text: "key.pem is not one PEM block"},
		{name: "a large key", damage: func(dir string) { os.WriteFile(filepath.Join(dir, keyFile), make([]byte, 1<<20), 0o600) }, text: "more than 16384 bytes"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			dir := enrol(t, ca, worker(0))
			tt.damage(dir)
			if _, err := NewEnrolledIssuer("enrolled:"+dir).Issue(t.Context(), nonce); !errors.Is(err, ErrTPM) || !strings.Contains(err.Error(), tt.text) {
				t.Errorf("got %v, want %q", err, tt.text)
			}
		})
	}
	if _, err := NewEnrolledIssuer("/dev/tpmrm0").Issue(t.Context(), nonce); !errors.Is(err, ErrTPM) {
		t.Errorf("the address of a TPM: %v", err)
	}
}

func TestStoreIdentity(t *testing.T) {
	t.Parallel()
	ca := newCA(t, "workspace")
	dir := enrol(t, ca, worker(0))
	m := func() (key *ecdsa.PrivateKey) {
		t.Helper()
		if err := useMachine(dir, func(m machine) (err error) { key, err = m.fileKey(); return err }); err != nil {
			t.Fatal(err)
		}
		return key
	}()
	again, _, err := RequestIdentity(t.Context(), dir, NoTPM)
	if err != nil {
		t.Fatal(err)
	}
	certify(t, ca, dir, again, worker(0)) // the key is the same
	pemOf := func(key any, usage encasn1.ObjectIdentifier, id Identity) []byte {
		t.Helper()
		der, err := ca.certify(key, usage, id)
		if err != nil {
			t.Fatal(err)
		}
		return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	}
	foreign := worker(0)
	foreign.UID = "other"
	if err := ExtendClusterID(t.Context(), "enrolled:"+dir, []byte("cluster")); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name string
		cert []byte
		text string
	}{
		{name: "the machine's", cert: pemOf(m.Public(), KindKey.usage(), worker(0))},
		{name: "with another address", cert: pemOf(m.Public(), KindKey.usage(), worker(1))},
		{name: "another key's", cert: pemOf(fixedKey(t, "other").Public(), KindKey.usage(), worker(0)), text: "issued for another key"},
		{name: "another usage", cert: pemOf(m.Public(), oidAttestationKey(), worker(0)), text: "not one of a key of kind key"},
		{name: "of another workspace, on a member", cert: pemOf(m.Public(), KindKey.usage(), foreign), text: "in a cluster of the workspace demo"},
		{name: "no certificate", cert: []byte("{}"), text: "it is not PEM"},
		{name: "nothing", text: "0 certificates"},
	} {
		before := tree(t, dir)
		got, err := StoreIdentity(t.Context(), dir, tt.cert)
		if tt.text == "" {
			if err != nil || got.Kind != KindKey || got.Attested {
				t.Errorf("%s: %+v, %v", tt.name, got, err)
			}
			continue
		}
		if err == nil || !strings.Contains(err.Error(), tt.text) {
			t.Errorf("%s: %v, want %q", tt.name, err, tt.text)
		}
		if tree(t, dir) != before {
			t.Errorf("%s: the identity was changed", tt.name)
		}
	}
	if err := ClearClusterID("enrolled:" + dir); err != nil {
		t.Fatal(err)
	}
	if got, err := StoreIdentity(t.Context(), dir, pemOf(m.Public(), KindKey.usage(), foreign)); err != nil || got.Machine.UID != "other" {
		t.Errorf("of another workspace, unused: %+v, %v", got, err)
	}
}
