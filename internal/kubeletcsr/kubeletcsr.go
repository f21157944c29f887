// Package kubeletcsr has the rules for certificate requests of kubelets that the join service
// and the operator share. Each of them also compares a request with the cloud's data of the machine.
package kubeletcsr

import (
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/rsa"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"slices"
)

// The user name of a node is UserPrefix and the name of the Node. Group has all nodes.
const (
	UserPrefix = "system:node:"
	Group      = "system:nodes"
)

// minRSA is in bits.
const minRSA = 2048

// Parse reads a PKCS #10 request in DER. The request is signed with its own key, and the key is
// ECDSA, Ed25519 or RSA of at least 2048 bits.
func Parse(der []byte) (*x509.CertificateRequest, error) {
	r, err := x509.ParseCertificateRequest(der)
	if err != nil {
		return nil, errors.New("it is not a PKCS #10 request")
	}
	if err := r.CheckSignature(); err != nil {
		return nil, errors.New("its signature is wrong")
	}
	switch k := r.PublicKey.(type) {
	case *ecdsa.PublicKey, ed25519.PublicKey:
	case *rsa.PublicKey:
		if k.N.BitLen() < minRSA {
			return nil, fmt.Errorf("its RSA key has %d bits, want at least %d", k.N.BitLen(), minRSA)
		}
	default:
		return nil, errors.New("its kind of key is not supported")
	}
	return r, nil
}

// Subject returns the subject of a certificate of the node with that name.
func Subject(node string) pkix.Name {
	return pkix.Name{CommonName: UserPrefix + node, Organization: []string{Group}}
}

// HasSubject reports whether the subject of r is user and the group of nodes, and nothing else.
func HasSubject(r *x509.CertificateRequest, user string) bool {
	return len(r.Subject.Names) == 2 && r.Subject.CommonName == user && slices.Equal(r.Subject.Organization, []string{Group})
}

// CheckServerNames returns an error if r names anything but DNS names and addresses.
func CheckServerNames(r *x509.CertificateRequest) error {
	if len(r.EmailAddresses) > 0 || len(r.URIs) > 0 {
		return errors.New("it asks for e-mail addresses or URIs")
	}
	return nil
}
