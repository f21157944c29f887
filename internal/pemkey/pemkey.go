// Package pemkey decodes the private keys of a cluster's PKI.
package pemkey

import (
	"crypto"
	"crypto/x509"
	"encoding/pem"
)

// Parse returns the first private key in PEM data. It decodes the formats in which kubeadm and users
// store keys: SEC 1, PKCS #1 and PKCS #8. Blocks of other types are skipped. It reports false if
// there is no key or the first one is damaged, and nothing about the content.
func Parse(data []byte) (crypto.Signer, bool) {
	for block, rest := pem.Decode(data); block != nil; block, rest = pem.Decode(rest) {
		var key any
		var err error
		switch block.Type {
		case "EC PRIVATE KEY":
			key, err = x509.ParseECPrivateKey(block.Bytes)
		case "RSA PRIVATE KEY":
			key, err = x509.ParsePKCS1PrivateKey(block.Bytes)
		case "PRIVATE KEY":
			key, err = x509.ParsePKCS8PrivateKey(block.Bytes)
		default:
			continue // such as EC PARAMETERS
		}
		s, ok := key.(crypto.Signer)
		return s, ok && err == nil
	}
	return nil, false
}
