package engine

import (
	"errors"
	"testing"

	"constellation/engine/attestation"
	"constellation/engine/plan"
)

func TestTrustRootsThatAreNotWholeAreRefused(t *testing.T) {
	good := testRoot(t)
	for _, tt := range []struct {
		name, roots, want string // want "": they are taken
	}{
		{"one certificate", good, ""},
		{"two", good + "\n" + good, ""},
		{"none", "", "read attestation.tpm2.trustRoots: read trust roots: there is no certificate"},
		{"text between two", good + "garbage\n" + good, "read attestation.tpm2.trustRoots: read trust roots: it holds a damaged PEM block, or text beside its PEM blocks"},
		{"text behind", good + "garbage", "read attestation.tpm2.trustRoots: read trust roots: it is not PEM"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c, s := &Config{}, &State{}
			c.Attestation.TPM2 = &TPM2Config{TrustRoots: tt.roots, Measurements: attestation.Measurements{}}
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
