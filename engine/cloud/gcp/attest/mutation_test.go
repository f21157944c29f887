package attest

import (
	"bytes"
	"crypto/x509"
	"encoding/asn1"
	"fmt"
	"maps"
	mathrand "math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	"constellation/engine/attestation"
	"constellation/engine/attestation/attestationtest"
	"constellation/internal/mutation"
	"constellation/internal/testneeds"
)

// mutations is how many mutations of each kind TestMutatedRecordings judges by default. The variable
// CONSTELLATION_EVIDENCE_MUTATIONS replaces it. `make soak` judges 100,000.
const mutations = 500

// TestMutatedRecordings mutates the parts of evidence that a machine in Google Cloud made. No document that
// differs from the recorded one may be accepted.
//
// An issuer takes from an event log what a verifier judges, and drops the rest: descriptions, types of events
// and digests of other algorithms. A mutation of what it drops gives the recorded document again. The test
// counts these mutations apart. All other bytes of a document are judged, without exception.
func TestMutatedRecordings(t *testing.T) {
	total := testneeds.Number(t, "CONSTELLATION_EVIDENCE_MUTATIONS", mutations)
	j := accepting(t)
	j.parts.Intermediates = [][]byte{issuerOf(t, j.parts.Certificate)} // judged as well, though verifiers have it
	v := j.validator()
	original := document(t, j.parts)
	if _, err := v.Validate(t.Context(), original, j.nonce); err != nil {
		t.Fatal(err)
	}
	boot, err := attestationtest.BootLog(j.parts.Log)
	if err != nil {
		t.Fatal(err)
	}
	// Parts of other evidence: of the same machine with another nonce, and of other machines.
	others := []attestationtest.VendorParts{sample(t, withoutNonce, sha256Bank), sample(t, recorded, sha384Bank), sample(t, recorded, sha1Bank)}
	for _, tt := range []struct {
		name string
		// mutate changes p, and returns the bytes of a document if p has none.
		mutate func(r *mathrand.Rand, p *attestationtest.VendorParts) []byte
		// lossy is whether an issuer drops parts of what is mutated.
		lossy bool
	}{
		{name: "certificate", mutate: func(r *mathrand.Rand, p *attestationtest.VendorParts) []byte {
			p.Certificate = mutation.Bytes(r, p.Certificate)
			return nil
		}},
		{name: "extension", mutate: func(r *mathrand.Rand, p *attestationtest.VendorParts) []byte {
			p.Certificate = withExtension(t, p.Certificate, func(b []byte) []byte { return mutation.Bytes(r, b) })
			return nil
		}},
		{name: "intermediate certificate", mutate: func(r *mathrand.Rand, p *attestationtest.VendorParts) []byte {
			p.Intermediates = [][]byte{mutation.Bytes(r, p.Intermediates[0])}
			return nil
		}},
		{name: "public area", mutate: func(r *mathrand.Rand, p *attestationtest.VendorParts) []byte {
			p.Public = mutation.Bytes(r, p.Public)
			return nil
		}},
		{name: "quote", mutate: func(r *mathrand.Rand, p *attestationtest.VendorParts) []byte {
			p.Quote = mutation.Bytes(r, p.Quote)
			return nil
		}},
		{name: "signature", mutate: func(r *mathrand.Rand, p *attestationtest.VendorParts) []byte {
			p.Signature = mutation.Bytes(r, p.Signature)
			return nil
		}},
		{name: "registers", mutate: func(r *mathrand.Rand, p *attestationtest.VendorParts) []byte {
			p.PCRs = maps.Clone(p.PCRs)
			i, j := uint32(r.IntN(24)), uint32(r.IntN(24))
			switch r.IntN(4) {
			case 0:
				delete(p.PCRs, i)
			case 1:
				p.PCRs[i], p.PCRs[j] = p.PCRs[j], p.PCRs[i]
			default:
				p.PCRs[i] = mutation.Bytes(r, p.PCRs[i])
			}
			return nil
		}},
		{name: "event log of the firmware", lossy: true, mutate: func(r *mathrand.Rand, p *attestationtest.VendorParts) []byte {
			p.Log = mutation.Bytes(r, p.Log)
			return nil
		}},
		{name: "event log in the document", mutate: func(r *mathrand.Rand, p *attestationtest.VendorParts) []byte {
			p.BootLog = mutation.Bytes(r, boot)
			return nil
		}},
		{name: "document", mutate: func(r *mathrand.Rand, _ *attestationtest.VendorParts) []byte { return mutation.Bytes(r, original) }},
		{name: "parts of other evidence", mutate: func(r *mathrand.Rand, p *attestationtest.VendorParts) []byte {
			o := others[r.IntN(len(others))]
			for _, f := range []func(){
				func() { p.Quote = o.Quote }, func() { p.Signature = o.Signature }, func() { p.PCRs = o.PCRs }, func() { p.Log = otherLog() },
			} {
				if r.IntN(3) == 0 {
					f()
				}
			}
			if r.IntN(2) == 0 {
				p.Quote = mutation.Bytes(r, p.Quote)
			}
			return nil
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			var refused, same, unmade, next atomic.Int64
			var wg sync.WaitGroup
			for range runtime.GOMAXPROCS(0) {
				wg.Go(func() {
					for seed := next.Add(1); seed <= int64(total) && !t.Failed(); seed = next.Add(1) {
						r := mathrand.New(mathrand.NewPCG(uint64(seed), 24))
						p := j.parts
						b := tt.mutate(r, &p)
						for b == nil {
							var err error
							if b, err = p.Document(); err != nil || tt.lossy || !bytes.Equal(b, original) {
								break
							}
							p = j.parts
							b = tt.mutate(r, &p)
						}
						switch {
						case b == nil: // the issuer cannot read its event log
							unmade.Add(1)
						case bytes.Equal(b, original):
							same.Add(1)
						case refusal(t, v, b, j.nonce) == nil:
							t.Errorf("seed %d was accepted: %x", seed, b)
						default:
							refused.Add(1)
						}
					}
				})
			}
			wg.Wait()
			if !tt.lossy && refused.Load() != int64(total) {
				t.Errorf("%d of %d mutations were refused", refused.Load(), total)
			}
			t.Logf("%s: %d mutations, %d refused, %d without a document, %d that made the recorded document", tt.name, total, refused.Load(), unmade.Load(), same.Load())
		})
	}
}

// refusal turns a panic of a validator into an acceptance.
func refusal(t *testing.T, v attestation.Validator, doc, userData []byte) (err error) {
	defer func() {
		if p := recover(); p != nil {
			t.Error(fmt.Sprint("panic: ", p))
			err = nil
		}
	}()
	_, err = v.Validate(t.Context(), doc, userData)
	return err
}

// issuerOf returns the certificate that this package has of the issuer of another one.
func issuerOf(t testing.TB, der []byte) []byte {
	t.Helper()
	c, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	n := slices.IndexFunc(pinned(), func(p *x509.Certificate) bool { return c.CheckSignatureFrom(p) == nil })
	if n < 0 {
		t.Fatal("the issuer is not known")
	}
	return pinned()[n].Raw
}

// withExtension returns a certificate whose extension for the instance f changed. All lengths fit, and the
// signature is that of the original.
func withExtension(t testing.TB, der []byte, f func([]byte) []byte) []byte {
	t.Helper()
	type extension struct {
		ID       asn1.ObjectIdentifier
		Critical bool `asn1:"optional"`
		Value    []byte
	}
	var outer struct {
		TBS       asn1.RawValue
		Algorithm asn1.RawValue
		Signature asn1.BitString
	}
	parse := func(b []byte, to any, params string) {
		t.Helper()
		if rest, err := asn1.UnmarshalWithParams(b, to, params); err != nil || len(rest) > 0 {
			t.Fatalf("parse certificate: %v, %d bytes more", err, len(rest))
		}
	}
	parse(der, &outer, "")
	var body []asn1.RawValue // of the certificate
	parse(outer.TBS.FullBytes, &body, "")
	last := &body[len(body)-1] // [3] SEQUENCE OF extensions
	var list []extension
	parse(last.FullBytes, &list, "explicit,tag:3")
	for i := range list {
		if list[i].ID.Equal(oidInstance()) {
			list[i].Value = f(list[i].Value)
		}
	}
	marshal := func(v any, params string) []byte {
		t.Helper()
		b, err := asn1.MarshalWithParams(v, params)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	*last = asn1.RawValue{FullBytes: marshal(list, "explicit,tag:3")}
	outer.TBS = asn1.RawValue{FullBytes: marshal(body, "")}
	return marshal(outer, "")
}
