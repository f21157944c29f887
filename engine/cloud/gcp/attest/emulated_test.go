package attest

import (
	"crypto/x509"
	"encoding/pem"
	"errors"
	"net/netip"
	"strings"
	"testing"

	"constellation/engine/attestation"
	"constellation/engine/attestation/attestationtest"
	"constellation/engine/cloud"
)

// TestSandboxEvidenceUnderGooglesRoots has evidence of a sandbox that is good under the roots of the sandbox alone.
func TestSandboxEvidenceUnderGooglesRoots(t *testing.T) {
	certPEM, keyPEM, err := attestationtest.CreateCA("sandbox")
	if err != nil {
		t.Fatal(err)
	}
	ca, err := attestationtest.ParseCA(certPEM, keyPEM)
	if err != nil {
		t.Fatal(err)
	}
	id := attestation.Identity{Name: "worker-0", ProviderID: "gce://p/z-a/worker-0", UID: clusterUID, Group: "workers", Role: cloud.Worker, IP: netip.MustParseAddr("10.0.0.2")}
	issuer, err := attestationtest.NewSoftwareIssuer(ca, id, boot(true), nil)
	if err != nil {
		t.Fatal(err)
	}
	doc, err := issuer.Issue(t.Context(), random)
	if err != nil {
		t.Fatal(err)
	}
	block, _ := pem.Decode(certPEM)
	sandbox, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name  string
		roots *x509.CertPool
		want  string // empty: accepted
	}{
		{name: "the sandbox's", roots: poolOf(sandbox)},
		{name: "Google's", roots: roots(t), want: "evidence of a sandbox is not accepted there"},
		{name: "the sandbox's and one of Google's", roots: poolOf(sandbox, googles()[1]), want: "evidence of a sandbox is not accepted there"},
		{name: "the sandbox's and an authority below Google's roots", roots: poolOf(sandbox, pinned()[0]), want: "evidence of a sandbox is not accepted there"},
		{name: "none", want: "certificate signed by unknown authority"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			v := Emulated().Validator(tt.roots, measured(), attestation.Options{})
			if v.Variant() != attestation.TPM2 {
				t.Errorf("variant %s", v.Variant())
			}
			_, err := v.Validate(t.Context(), doc, random)
			if tt.want == "" && err != nil || tt.want != "" && (!errors.Is(err, attestation.ErrTrust) || !strings.Contains(err.Error(), tt.want)) {
				t.Errorf("got %v, want %q", err, tt.want)
			}
		})
	}
	// The method of machines at Google does not read evidence of this kind at all.
	if _, err := method(newAuthority(t), Config{}).Validator(poolOf(sandbox), measured(), attestation.Options{}).Validate(t.Context(), doc, random); !errors.Is(err, attestation.ErrDocument) {
		t.Errorf("with Google's method: %v", err)
	}
}
