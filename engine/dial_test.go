package engine

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"math/big"
	"testing"
	"time"

	"constellation/engine/attestation"
	"constellation/engine/plan"
	"constellation/engine/workspace"
)

func TestTrustRootsThatAreNotWholeAreRefused(t *testing.T) {
	good := cloudRoot(t)
	for _, tt := range []struct {
		name, roots, want string // want "": they are taken
	}{
		{name: "one certificate", roots: good, want: ""},
		{name: "two", roots: good + "\n" + good, want: ""},
		{name: "none", roots: "", want: "read attestation.tpm2.trustRoots: read trust roots: there is no certificate"},
		{name: "text between two", roots: good + "garbage\n" + good, want: "read attestation.tpm2.trustRoots: read trust roots: it holds a damaged PEM block, or text beside its PEM blocks"},
		{name: "text behind", roots: good + "garbage", want: "read attestation.tpm2.trustRoots: read trust roots: it is not PEM"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c, s := &workspace.Config{}, &workspace.State{}
			c.Provider.Name = "sandbox"
			c.Attestation.TPM2 = &workspace.TPM2Config{TrustRoots: tt.roots, Measurements: attestation.Measurements{}}
			_, err := initValidator(c, s)
			if tt.want == "" {
				if err != nil {
					t.Error(err)
				}
				return
			}
			var e *plan.Error
			if !errors.As(err, &e) || e.Error() != tt.want || e.Exit != plan.ExitUsage || e.Remedy == "" {
				t.Errorf("got %v, want %s", err, tt.want)
			}
		})
	}
}

// cloudRoot returns a certificate in PEM.
func cloudRoot(t testing.TB) string {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	c := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "cloud"}, IsCA: true, BasicConstraintsValid: true,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
	}
	der, err := x509.CreateCertificate(rand.Reader, c, c, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}))
}
