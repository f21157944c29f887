package attest

import (
	"crypto/x509"
	_ "embed" // the certificates
	"encoding/asn1"
	"errors"
	"fmt"
	"math"
	"regexp"
	"slices"
	"strconv"
	"sync"
	"time"

	"golang.org/x/crypto/cryptobyte"
	der "golang.org/x/crypto/cryptobyte/asn1"
)

//go:embed certificates/roots.pem
var rootsPEM []byte

//go:embed certificates/intermediates.pem
var intermediatesPEM []byte

// Roots returns the certificates of Google's authorities that certify keys of virtual TPMs, in PEM:
// the one of machines since the end of 2022, and the one before. A test has their fingerprints.
func Roots() []byte { return slices.Clone(rootsPEM) }

// pinned returns the authorities below the roots that this package has.
var pinned = sync.OnceValue(func() []*x509.Certificate { return mustParse(intermediatesPEM) })

// Object identifiers of Google and of the Trusted Computing Group.
func oidInstance() asn1.ObjectIdentifier {
	return asn1.ObjectIdentifier{1, 3, 6, 1, 4, 1, 11129, 2, 1, 21}
}
func oidEKCertificate() asn1.ObjectIdentifier  { return asn1.ObjectIdentifier{2, 23, 133, 8, 1} }
func oidAIKCertificate() asn1.ObjectIdentifier { return asn1.ObjectIdentifier{2, 23, 133, 8, 3} }
func oidManufacturer() asn1.ObjectIdentifier   { return asn1.ObjectIdentifier{2, 23, 133, 2, 1} }
func oidModel() asn1.ObjectIdentifier          { return asn1.ObjectIdentifier{2, 23, 133, 2, 2} }
func oidVersion() asn1.ObjectIdentifier        { return asn1.ObjectIdentifier{2, 23, 133, 2, 3} }
func oidAlternativeName() asn1.ObjectIdentifier {
	return asn1.ObjectIdentifier{2, 5, 29, 17}
}

// What certificates of Google's virtual TPMs say about the TPM and its machine.
const (
	manufacturer = "id:474F4F47" // GOOG
	model        = "vTPM"
	organization = "Google Compute Engine"
)

// instance is a machine as its certificate names it.
type instance struct {
	zone, project, name   string
	projectNumber, number uint64
}

// certified returns the machine whose key chain[0] certifies, if one of roots vouches for it at the
// time now. It refuses certificates in chain that are not needed for that.
//
// Certificates up to 2022 have the extended key usage of endorsement keys for attestation keys, too,
// and later ones have none. So only the basic key usage distinguishes keys that sign from those that
// decrypt.
func certified(chain []*x509.Certificate, roots *x509.CertPool, now time.Time) (instance, error) {
	leaf := *chain[0] // fields of it are changed
	i, err := named(&leaf)
	switch {
	case err != nil:
		return instance{}, err
	case leaf.IsCA || leaf.KeyUsage != x509.KeyUsageDigitalSignature:
		return instance{}, errors.New("its certificate is not one of a signing key alone; use the attestation key of the TPM, not its endorsement key")
	case len(leaf.ExtKeyUsage) > 0 || slices.ContainsFunc(leaf.UnknownExtKeyUsage, notOfATPM):
		return instance{}, errors.New("its certificate is for another usage than the keys of TPMs")
	}
	if err := subject(&leaf, i); err != nil {
		return instance{}, err
	}
	between := x509.NewCertPool()
	for _, c := range slices.Concat(pinned(), chain[1:]) {
		between.AddCert(c)
	}
	paths, err := leaf.Verify(x509.VerifyOptions{
		Roots: roots, Intermediates: between, CurrentTime: now,
		KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny}, // checked above; the package knows only its own
	})
	if err != nil {
		return instance{}, remedied(err, leaf.Issuer.String())
	}
	if !slices.ContainsFunc(paths, func(path []*x509.Certificate) bool {
		return !slices.ContainsFunc(chain[1:], func(c *x509.Certificate) bool { return !slices.ContainsFunc(path, c.Equal) })
	}) {
		return instance{}, errors.New("its evidence has certificates that do not vouch for it")
	}
	return i, nil
}

func notOfATPM(usage asn1.ObjectIdentifier) bool {
	return !usage.Equal(oidEKCertificate()) && !usage.Equal(oidAIKCertificate())
}

// remedied adds to the reason why a certificate is not trusted what can be done.
func remedied(err error, issuer string) error {
	var invalid x509.CertificateInvalidError
	var unknown x509.UnknownAuthorityError
	switch {
	case errors.As(err, &invalid) && invalid.Reason == x509.Expired:
		return fmt.Errorf("%w; compare the clock of the program that judges with Google's", err)
	case errors.As(err, &unknown):
		return fmt.Errorf("%w (issuer %q); if the machine is in Google Cloud, compare attestation.tpm2.trustRoots in the configuration with Google's roots", err, issuer)
	}
	return err
}

// named returns the machine that a certificate names.
func named(c *x509.Certificate) (instance, error) {
	for _, e := range c.Extensions {
		if e.Id.Equal(oidInstance()) { // the parser refuses certificates that repeat an extension
			return parseInstance(e.Value)
		}
	}
	return instance{}, fmt.Errorf("its certificate names no instance (extension %s); create the machine as a Shielded VM with a virtual TPM", oidInstance())
}

var (
	// segment is what parts of provider IDs may be. IDs of projects can start with a domain and a colon.
	segment = regexp.MustCompile(`^[a-z]([-a-z0-9]{0,61}[a-z0-9])?$`)
	project = regexp.MustCompile(`^([a-z0-9][-.a-z0-9]{0,100}:)?[a-z]([-a-z0-9]{0,61}[a-z0-9])?$`)
)

// lastProperty is the greatest tag of a property that fits into a byte.
const lastProperty = der.Tag(0xbe)

// parseInstance reads the extension that names the instance:
//
//	Instance ::= SEQUENCE {
//	  zone          UTF8String,
//	  projectNumber INTEGER,
//	  projectID     UTF8String,
//	  number        INTEGER,
//	  name          UTF8String,
//	  properties    [0] SEQUENCE {
//	    securityVersion [0] INTEGER,
//	    production      [1] BOOLEAN,
//	    -- and others under greater tags, of one element each
//	  }
//	}
func parseInstance(value []byte) (instance, error) {
	var (
		i                    instance
		in                   = cryptobyte.String(value)
		body, explicit       cryptobyte.String
		zone, id, name, rest cryptobyte.String
	)
	if !in.ReadASN1(&body, der.SEQUENCE) || !in.Empty() ||
		!body.ReadASN1(&zone, der.UTF8String) || !body.ReadASN1Integer(&i.projectNumber) || !body.ReadASN1(&id, der.UTF8String) ||
		!body.ReadASN1Integer(&i.number) || !body.ReadASN1(&name, der.UTF8String) ||
		!body.ReadASN1(&explicit, property(0)) || !body.Empty() || !explicit.ReadASN1(&rest, der.SEQUENCE) || !explicit.Empty() {
		return instance{}, errors.New("the instance in its certificate cannot be read")
	}
	production, ok := parseProperties(rest)
	i.zone, i.project, i.name = string(zone), string(id), string(name)
	switch {
	case !ok:
		return instance{}, errors.New("the properties of the instance in its certificate cannot be read")
	case !production:
		return instance{}, errors.New("its certificate is of a virtual TPM that is not in production")
	case !segment.MatchString(i.zone) || !project.MatchString(i.project) || !segment.MatchString(i.name):
		return instance{}, fmt.Errorf("the instance in its certificate is %q in zone %q of project %q, which no instance can be", i.name, i.zone, i.project)
	case i.number == 0 || i.projectNumber == 0 || i.projectNumber > math.MaxInt64:
		return instance{}, errors.New("the number of the instance or of the project in its certificate is impossible")
	}
	return i, nil
}

// property returns the tag of a property.
func property(n uint8) der.Tag { return der.Tag(n).Constructed().ContextSpecific() }

// parseProperties reads the properties of an instance.
func parseProperties(props cryptobyte.String) (production, ok bool) {
	var one cryptobyte.String
	var version uint64
	if !props.ReadASN1(&one, property(0)) || !one.ReadASN1Integer(&version) || !one.Empty() ||
		!props.ReadASN1(&one, property(1)) || !one.ReadASN1Boolean(&production) || !one.Empty() {
		return false, false
	}
	for last := property(1); !props.Empty(); {
		var tag, kind der.Tag
		var element cryptobyte.String
		if !props.ReadAnyASN1(&one, &tag) || tag <= last || tag > lastProperty || !one.ReadAnyASN1Element(&element, &kind) || !one.Empty() {
			return false, false
		}
		last = tag
	}
	return production, true
}

// subject checks the names in a certificate beside the extension. Those of later certificates repeat the
// instance in the subject. Earlier ones have no subject, and the kind of TPM as a critical alternative
// name that package x509 does not understand.
func subject(c *x509.Certificate, i instance) error {
	if s := c.Subject; len(s.Names) > 0 {
		have := []string{s.CommonName}
		for _, l := range [][]string{s.Locality, s.Organization, s.OrganizationalUnit} {
			have = append(have, l...)
		}
		want := []string{strconv.FormatUint(i.number, 10), i.zone, organization, i.project}
		if len(s.Names) != len(want) || !slices.Equal(have, want) {
			return fmt.Errorf("its certificate has the subject %q, and names another instance beside it", s)
		}
	}
	n := slices.IndexFunc(c.UnhandledCriticalExtensions, oidAlternativeName().Equal)
	if n < 0 {
		return nil
	}
	for _, e := range c.Extensions {
		if e.Id.Equal(oidAlternativeName()) {
			if !ofVirtualTPM(e.Value) {
				return errors.New("the alternative name in its certificate is not of a virtual TPM of Google")
			}
		}
	}
	c.UnhandledCriticalExtensions = slices.Delete(slices.Clone(c.UnhandledCriticalExtensions), n, n+1)
	return nil
}

// ofVirtualTPM reports whether an alternative name is one directory name of a TPM of Google: its
// manufacturer, model and version, in this order.
func ofVirtualTPM(value []byte) bool {
	var names, directory, rdns cryptobyte.String
	in := cryptobyte.String(value)
	if !in.ReadASN1(&names, der.SEQUENCE) || !in.Empty() || !names.ReadASN1(&directory, der.Tag(4).Constructed().ContextSpecific()) || !names.Empty() ||
		!directory.ReadASN1(&rdns, der.SEQUENCE) || !directory.Empty() {
		return false
	}
	for _, want := range []struct {
		oid   asn1.ObjectIdentifier
		value string
	}{{oidManufacturer(), manufacturer}, {oidModel(), model}, {oidVersion(), ""}} {
		var set, pair, text cryptobyte.String
		var oid asn1.ObjectIdentifier
		if !rdns.ReadASN1(&set, der.SET) || !set.ReadASN1(&pair, der.SEQUENCE) || !set.Empty() ||
			!pair.ReadASN1ObjectIdentifier(&oid) || !oid.Equal(want.oid) || !pair.ReadASN1(&text, der.UTF8String) || !pair.Empty() ||
			want.value != "" && string(text) != want.value {
			return false
		}
	}
	return rdns.Empty()
}
