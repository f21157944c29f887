package attest

import (
	"context"
	"crypto/x509"
	"errors"
	"strings"
	"testing"

	"constellation/engine/attestation"
	"constellation/engine/attestation/attestationtest"
	"constellation/engine/cloud"
	"constellation/engine/cloud/gcp/attest/attesttest"
)

// TestSandboxEvidenceUnderGooglesRoots has evidence of a sandbox that is good under the roots of the sandbox alone.
func TestSandboxEvidenceUnderGooglesRoots(t *testing.T) {
	certPEM, keyPEM, err := attestationtest.CreateCA("sandbox")
	if err != nil {
		t.Fatal(err)
	}
	a, err := attesttest.Of(certPEM, keyPEM)
	if err != nil {
		t.Fatal(err)
	}
	v := start(t, a, worker, true, false)
	i := v.instance(cloud.Worker, "10.0.0.2")
	m := Emulated(Config{Cluster: func(context.Context) (Cluster, error) {
		return Cluster{Project: worker.Project, UID: clusterUID, Instances: &instances{byKey: map[string]cloud.Instance{i.Key(): i}}}, nil
	}})
	doc, err := m.Issuer(v.address).Issue(t.Context(), random)
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name  string
		roots *x509.CertPool
		want  string // empty: accepted
	}{
		{name: "the sandbox's", roots: poolOf(a.Root)},
		{name: "Google's", roots: roots(t), want: "evidence of a sandbox is not accepted there"},
		{name: "the sandbox's and one of Google's", roots: poolOf(a.Root, googles()[1]), want: "evidence of a sandbox is not accepted there"},
		{name: "the sandbox's and an authority below Google's roots", roots: poolOf(a.Root, pinned()[0]), want: "evidence of a sandbox is not accepted there"},
		{name: "none", want: "certificate signed by unknown authority"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			v := m.Validator(tt.roots, measured(), attestation.Options{})
			if v.Variant() != attestation.EmulatedVendorTPM2 {
				t.Errorf("variant %s", v.Variant())
			}
			st, err := v.Validate(t.Context(), doc, random)
			if tt.want == "" && (err != nil || st.Identity.Name != worker.Name || st.SecureBoot != attestation.SecureBootOn) ||
				tt.want != "" && (!errors.Is(err, attestation.ErrTrust) || !strings.Contains(err.Error(), tt.want)) {
				t.Errorf("got %+v, %v, want %q", st, err, tt.want)
			}
		})
	}
	// Machines at Google do not read evidence of this variant, whatever their roots are.
	google := method(a, Config{}, i)
	if google.Variant == m.Variant || google.Issuer(v.address).Variant() == m.Issuer(v.address).Variant() {
		t.Error("both have one variant")
	}
	for _, r := range []*x509.CertPool{roots(t), poolOf(a.Root), poolOf(a.Root, googles()[0])} {
		if _, err := google.Validator(r, measured(), attestation.Options{}).Validate(t.Context(), doc, random); !errors.Is(err, attestation.ErrDocument) {
			t.Errorf("with Google's method: %v", err)
		}
	}
	real, err := google.Issuer(v.address).Issue(t.Context(), random)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := m.Validator(poolOf(a.Root), measured(), attestation.Options{}).Validate(t.Context(), real, random); !errors.Is(err, attestation.ErrDocument) {
		t.Errorf("evidence of Google's variant in a sandbox: %v", err)
	}
}
