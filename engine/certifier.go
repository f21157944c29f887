package engine

import (
	"constellation/engine/attestation/certifier/signer"
	"constellation/engine/workspace"
)

// firstCertifierKeys returns the keys that the certifier of a new cluster begins with. A cluster that replaces one whose control
// planes are all lost gets the same keys, from the same master secret.
func firstCertifierKeys(m workspace.MasterSecret) ([]byte, error) {
	owner, err := signer.NewOwner(m.CertifierSecret())
	if err != nil {
		return nil, err
	}
	keys, err := owner.Keys(max(m.Certifier, 1))
	if err != nil {
		return nil, err
	}
	return keys.Encode()
}
