package build

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/x509"
	"encoding/asn1"
	"encoding/base64"
	"encoding/pem"
	"errors"
	"fmt"
)

// signer is the identity that a certificate of Fulcio, sigstore's authority, names.
type signer struct {
	Identity string `json:"identity"` // e-mail address
	Issuer   string `json:"issuer"`   // URL of the OpenID provider that authenticated it
}

// issuerOIDs are extensions of Fulcio's certificates with the issuer, the later form first:
// https://github.com/sigstore/fulcio/blob/main/docs/oid-info.md
var (
	issuerV2 = asn1.ObjectIdentifier{1, 3, 6, 1, 4, 1, 57264, 1, 8} // a DER UTF8String
	issuerV1 = asn1.ObjectIdentifier{1, 3, 6, 1, 4, 1, 57264, 1, 1} // the text itself
)

// verify checks that s has signed a file with the SHA-256 digest sum. sig is the signature and
// cert the certificate as "cosign sign-blob" writes them, the latter PEM or base64 of PEM.
//
// The certificate is valid for minutes, around the time of the signature. The transparency log
// proves that time; it is not asked, which would take one more server. So the certificate is
// verified at its own time: somebody who steals the signer's short-lived key later is not
// noticed. The key never leaves the memory of the process that signs.
func (s signer) verify(trust roots, sum, sig, cert []byte) error {
	if b, err := base64.StdEncoding.DecodeString(string(bytes.TrimSpace(cert))); err == nil {
		cert = b
	}
	certificates, err := parseCertificates(cert)
	if err != nil {
		return err
	}
	leaf := certificates[0]
	intermediates := trust.intermediates.Clone()
	for _, c := range certificates[1:] {
		intermediates.AddCert(c)
	}
	_, err = leaf.Verify(x509.VerifyOptions{
		Roots: trust.roots, Intermediates: intermediates, CurrentTime: leaf.NotBefore,
		KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageCodeSigning},
	})
	if err != nil {
		return fmt.Errorf("verify the certificate: %w", err)
	}
	if len(leaf.EmailAddresses) != 1 || leaf.EmailAddresses[0] != s.Identity {
		return fmt.Errorf("the certificate names %q, want %s", leaf.EmailAddresses, s.Identity)
	}
	if issuer := issuerOf(leaf); issuer != s.Issuer {
		return fmt.Errorf("the certificate's issuer is %q, want %s", issuer, s.Issuer)
	}
	key, ok := leaf.PublicKey.(*ecdsa.PublicKey)
	if !ok {
		return fmt.Errorf("the certificate has a key of type %T, want ECDSA", leaf.PublicKey)
	}
	raw, err := base64.StdEncoding.DecodeString(string(bytes.TrimSpace(sig)))
	if err != nil || !ecdsa.VerifyASN1(key, sum, raw) {
		return errors.New("the signature is wrong")
	}
	return nil
}

func issuerOf(c *x509.Certificate) string {
	for _, e := range c.Extensions {
		if e.Id.Equal(issuerV2) {
			var text string
			if rest, err := asn1.Unmarshal(e.Value, &text); err != nil || len(rest) > 0 {
				return ""
			}
			return text
		}
	}
	for _, e := range c.Extensions {
		if e.Id.Equal(issuerV1) {
			return string(e.Value)
		}
	}
	return ""
}

func parseCertificates(b []byte) ([]*x509.Certificate, error) {
	var out []*x509.Certificate
	for {
		var block *pem.Block
		if block, b = pem.Decode(b); block == nil {
			break
		}
		c, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return nil, fmt.Errorf("read the certificate: %w", err)
		}
		out = append(out, c)
	}
	if len(out) == 0 {
		return nil, errors.New("there is no PEM certificate")
	}
	return out, nil
}

func mustCertificates(b []byte) []*x509.Certificate {
	out, err := parseCertificates(b)
	if err != nil {
		panic(fmt.Sprintf("read embedded certificates: %v", err)) // a test verifies them
	}
	return out
}
