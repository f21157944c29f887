package providers_test

import (
	"slices"
	"testing"

	"constellation/engine/cloud/providers"
)

// A part that an entry lacks would be noticed only when a machine or a program uses it.
func TestEntriesAreComplete(t *testing.T) {
	for _, p := range providers.Clouds() {
		for part, has := range map[string]bool{
			"Console": p.Console != nil, "Metadata": p.Metadata != nil, "Control": p.Control != nil,
			"MetadataAddress": p.MetadataAddress != "", "ControlAddress": p.ControlAddress != "", "TPMAddress": p.TPMAddress != "",
			"TPMDir, TPMDevice or IdentityDir": len(slices.DeleteFunc([]string{p.TPMDir, p.TPMDevice, p.IdentityDir}, func(s string) bool { return s == "" })) == 1,
			"Attestation":                      p.Attestation.Variant != "" && p.Attestation.Issuer != nil && p.Attestation.Validator != nil,
			"About, or Example":                p.About != "" && (p.Example != nil || len(p.Config) == 0),
		} {
			if !has {
				t.Errorf("the entry of %s lacks %s", p.Name, part)
			}
		}
	}
}
