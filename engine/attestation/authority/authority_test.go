package authority_test

import (
	"bytes"
	"context"
	"encoding/json"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"

	"constellation/engine/attestation"
	"constellation/engine/attestation/authority"
	"constellation/engine/cloud"
)

func newAuthority(t testing.TB, name string) (*authority.Authority, []byte) {
	t.Helper()
	cert, key, err := authority.Create(name)
	if err != nil {
		t.Fatal(err)
	}
	a, err := authority.Parse(cert, key)
	if err != nil {
		t.Fatal(err)
	}
	return a, cert
}

func identity(name string) attestation.Identity {
	return attestation.Identity{Name: name, ProviderID: "enrolled://demo/" + name, UID: "demo", Group: "workers", Role: cloud.Worker, IP: netip.MustParseAddr("10.0.0.11")}
}

func request(t testing.TB, dir string) []byte {
	t.Helper()
	b, _, err := attestation.RequestIdentity(context.Background(), dir, attestation.NoTPM)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestEnrolment(t *testing.T) {
	t.Parallel()
	a, root := newAuthority(t, "demo")
	dir := filepath.Join(t.TempDir(), "identity")
	var cert []byte
	for range 2 { // repeated from the start, as after a lost connection
		r := request(t, dir)
		challenge, expect, err := a.Challenge(r)
		if err != nil {
			t.Fatal(err)
		}
		answer, err := attestation.AnswerIdentity(t.Context(), dir, challenge)
		if err != nil {
			t.Fatal(err)
		}
		if cert, err = a.Certify(r, answer, expect, identity("worker-0")); err != nil {
			t.Fatal(err)
		}
		id, err := attestation.StoreIdentity(t.Context(), dir, cert)
		if err != nil || id.Kind != expect.Kind || id.Attested || id.Machine != identity("worker-0") {
			t.Errorf("identity %+v, %v", id, err)
		}
	}
	roots, err := attestation.ParseRoots(root)
	if err != nil {
		t.Fatal(err)
	}
	method, nonce := attestation.EnrolledMethod(), []byte("nonce")
	doc, err := method.Issuer("enrolled:"+dir).Issue(t.Context(), nonce)
	if err != nil {
		t.Fatal(err)
	}
	st, err := method.Validator(roots, nil, attestation.Options{UID: "demo"}).Validate(t.Context(), doc, nonce)
	if err != nil || st.Identity != identity("worker-0") || st.Attested {
		t.Errorf("statement %+v, %v", st, err)
	}
	if b, err := json.Marshal(st); err != nil || !strings.Contains(string(b), `"attested":false`) {
		t.Errorf("statement %s, %v", b, err)
	}
	if err := attestationRefuses(t, dir, cert); !strings.Contains(err, "no key") {
		t.Errorf("a stolen certificate: %v", err)
	}
}

// attestationRefuses stores a certificate on a machine without its key.
func attestationRefuses(t *testing.T, dir string, cert []byte) string {
	t.Helper()
	thief := t.TempDir()
	_, err := attestation.StoreIdentity(t.Context(), thief, cert)
	if err == nil {
		t.Fatalf("the certificate of %s was stored in %s", dir, thief)
	}
	return err.Error()
}

func TestEnrolmentRefuses(t *testing.T) {
	t.Parallel()
	a, _ := newAuthority(t, "demo")
	dir, otherDir := filepath.Join(t.TempDir(), "a"), filepath.Join(t.TempDir(), "b")
	r, other := request(t, dir), request(t, otherDir)
	challenge, expect, err := a.Challenge(r)
	if err != nil {
		t.Fatal(err)
	}
	answer, err := attestation.AnswerIdentity(t.Context(), dir, challenge)
	if err != nil {
		t.Fatal(err)
	}
	byOther, err := attestation.AnswerIdentity(t.Context(), otherDir, challenge)
	if err != nil {
		t.Fatal(err)
	}
	second, _, err := a.Challenge(r)
	if err != nil {
		t.Fatal(err)
	}
	toSecond, err := attestation.AnswerIdentity(t.Context(), dir, second)
	if err != nil {
		t.Fatal(err)
	}
	nameless := identity("")
	for _, tt := range []struct {
		name            string
		request, answer []byte
		expect          authority.Expectation
		id              attestation.Identity
		text            string
	}{
		{name: "another request", request: other, answer: answer, expect: expect, text: "made for another request"},
		{name: "the answer of another key", request: r, answer: byOther, expect: expect, text: "by another key, or to another challenge"},
		{name: "the answer to another challenge", request: r, answer: toSecond, expect: expect, text: "by another key, or to another challenge"},
		{name: "no challenge", request: r, answer: answer, text: "made for another request"},
		{name: "no answer", request: r, expect: expect, text: "read answer of the machine"},
		{name: "two answers", request: r, answer: append(bytes.Clone(answer), answer...), expect: expect, text: "unexpected data"},
		{name: "no name", request: r, answer: answer, expect: expect, id: nameless, text: "name of the instance is empty"},
	} {
		id := identity("worker-0")
		if tt.name == "no name" {
			id = tt.id
		}
		if _, err := a.Certify(tt.request, tt.answer, tt.expect, id); err == nil || !strings.Contains(err.Error(), tt.text) {
			t.Errorf("%s: %v, want %q", tt.name, err, tt.text)
		}
	}
	if _, err := a.Certify(r, answer, expect, identity("worker-0")); err != nil {
		t.Errorf("the right answer: %v", err)
	}
	for _, tt := range []struct{ name, request, text string }{
		{name: "nothing", request: "", text: "EOF"},
		{name: "another version", request: `{"version":2,"kind":"key","csr":""}`, text: "version 2"},
		{name: "another kind", request: `{"version":1,"kind":"moon","csr":""}`, text: `kind is "moon"`},
		{name: "another field", request: `{"version":1,"kind":"key","csr":"","admin":true}`, text: "unknown field"},
		{name: "no CSR", request: `{"version":1,"kind":"key","csr":""}`, text: "asn1"},
		{name: "a large one", request: `{"csr":"` + strings.Repeat("A", 70_000) + `"}`, text: "at most 65536"},
	} {
		if _, _, err := a.Challenge([]byte(tt.request)); err == nil || !strings.Contains(err.Error(), tt.text) {
			t.Errorf("%s: %v, want %q", tt.name, err, tt.text)
		}
	}
}

// requestOfATPM was recorded from an emulator.
const requestOfATPM = `{"version":1,"kind":"tpm","ak":"ACMACwAFBHIAAAAQABgACwADABAAIM4Qk29kGASMs3KJCOx2qw+6hkC1kTz33jSSgqdMHhPBACDC/ZbIl3BUOYAlqId3PruKWove2HO7Majnnuj4YG+1Dw==",` +
	`"ek":"ACMACwADALIAIINxl2dEhLP4GpDMjUal1yT9UtduBlILZPKh2hszFGmqAAYAgABDABAAAwAQACAEDv3xMMnhdX7Tn5CpiAwOrolukc2Y+6wCX9BN5W3VPgAgD2p22i66+ipV5bx62gl2uEAogPUuxuP68/mthJ5ezOo="}`

// FuzzRequest has a hostile machine enrol. The authority must not panic, and certifies nothing
// without an answer.
func FuzzRequest(f *testing.F) {
	a, _ := newAuthority(f, "demo")
	f.Add(requestOfATPM, `{"version":1,"secret":"AAAA"}`)
	f.Add(string(request(f, f.TempDir())), `{"version":1,"signature":"AAAA"}`)
	if _, e, err := a.Challenge([]byte(requestOfATPM)); err != nil || e.Kind != attestation.KindTPM {
		f.Fatalf("the recorded request: %+v, %v", e, err)
	}
	f.Fuzz(func(t *testing.T, request, answer string) {
		_, e, err := a.Challenge([]byte(request))
		if err != nil {
			return
		}
		if _, err := a.Certify([]byte(request), []byte(answer), e, identity("worker-0")); err == nil {
			t.Errorf("certified %q by the answer %q", request, answer)
		}
	})
}
