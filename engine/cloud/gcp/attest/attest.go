// Package attest judges and makes the evidence of Google's virtual TPMs.
//
// Google certifies two attestation keys of each Shielded VM, one on P-256 and one of RSA. Their
// certificates are in the memory of the machine's TPM. They name the project, the zone, the name
// and the number of the instance. [Method] makes evidence with such a key, and accepts it under
// these conditions, in this order:
//
//   - The certificates lead to a trust root, are valid now, and are those of a signing key of a
//     virtual TPM in production. See certificate.go.
//   - The key signed the quote over the caller's data, and the registers and the event log agree.
//     Package attestation judges that.
//   - The API of Compute Engine has a machine of this cluster with that provider ID and number. Its
//     group, role and address are those of the API.
//
// The certificates of a machine neither expire with it nor are they revoked when it is deleted. So
// the API alone decides whether the machine exists. The cluster's certifier can vouch for an earlier answer
// of the API, for some days: see package certifier.
//
// Trust roots are configuration. [Roots] has Google's.
//
// # Which evidence a program accepts
//
// A sandbox can emulate Google Cloud. Its machines have evidence of another variant, [Emulated], in the same format, from an
// authority of the sandbox. A program must never accept that in the place of Google's. The entry of the
// provider chooses between the two, and these rules make it fail closed:
//
//   - The choice depends on addresses that the program was started with, never on an answer. So a
//     metadata server that lies cannot change it. In the console, it depends on the state file.
//   - Two addresses must agree: that of the metadata server and that of the TPM. Google's default address
//     and a TPM that is a device mean Google. An emulator's address and a TPM that is a socket mean a
//     sandbox. A program with any other pair ends.
//   - Trust roots decide at last. A sandbox's evidence needs the authority of that sandbox among the
//     roots, and Emulated refuses everything if one of the roots is Google's. So with wrong flags
//     alone, nothing is accepted. An attacker who can also replace the roots needs no flags.
//   - join-config names the variant. A join service that chose another one does not use it.
//   - With Google's method, the API is at Google's address, by HTTPS. No flag changes that.
//
// The metadata server also says which cluster the machine belongs to. A lie about it does not help: each
// program first judges the evidence of its own machine. Google's certificate names the project, and the
// API must have the machine under the UID. Then it demands the same project and UID of other machines.
//
// The package was tested with evidence that other projects recorded on Google's machines. It never
// ran there itself. docs/clouds/gcp.md lists what tests cover.
package attest

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"sync"
	"time"

	"constellation/engine/attestation"
	"constellation/engine/cloud"
)

// Instances is what a method needs from the API of Compute Engine.
type Instances interface {
	// Instance returns the machine of the cluster with this cloud.Key, as it is now. The error wraps
	// cloud.ErrNotFound if the cluster has none.
	Instance(ctx context.Context, key string) (cloud.Instance, error)
}

// Cluster is what machines must belong to.
type Cluster struct {
	// Project is the ID of the cluster's project.
	Project string
	// UID becomes that of an attestation.Identity.
	UID string
	// Instances has the machines of the cluster alone.
	Instances Instances
}

// Config configures a method. Cluster is required.
type Config struct {
	// Cluster finds the cluster of this program, from the metadata server or from a state file. The
	// method calls it when it judges a machine, until it succeeds once.
	Cluster func(context.Context) (Cluster, error)
	// SecureBoot refuses machines that booted without Secure Boot.
	SecureBoot bool
	// HTTP fetches certificates of Google's authorities that this package does not have. Nil: a client
	// with a timeout of some seconds. It is used on machines that make evidence, not by those that
	// judge it.
	HTTP *http.Client
}

// Indices of the memory of Google's virtual TPMs. The key on P-256 is preferred: a TPM makes it from
// its template in milliseconds.
func keys() []attestation.NVKey {
	return []attestation.NVKey{
		{Certificate: 0x01c10002, Template: 0x01c10003}, // P-256
		{Certificate: 0x01c10000, Template: 0x01c10001}, // RSA
	}
}

// Method is how machines of Google Cloud prove what they are.
func Method(c Config) attestation.Method {
	f := fetcher{c.HTTP}
	if f.http == nil {
		f.http = &http.Client{CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	}
	return methodOf(c, attestation.Vendor{Intermediates: f.intermediates})
}

// methodOf returns the method of Google's machines, or of emulated ones.
func methodOf(c Config, of attestation.Vendor) attestation.Method {
	v := &vendor{Config: c}
	of.Keys, of.Certified = keys(), v.certified
	of.SecureBoot, of.SecureBootRemedy = c.SecureBoot, "delete the machine, and enable Secure Boot in the instance template (shieldedInstanceConfig.enableSecureBoot)"
	return attestation.VendorMethod(of)
}

// vendor judges certificates and instances.
type vendor struct {
	Config
	mu    sync.Mutex
	found *Cluster // nil: not yet
}

// certified implements attestation.Vendor.
func (v *vendor) certified(chain []*x509.Certificate, roots *x509.CertPool, now time.Time) (attestation.Certified, error) {
	i, err := certified(chain, roots, now)
	if err != nil {
		return nil, err
	}
	return machine{i, v}, nil
}

// cluster returns the cluster of this program.
func (v *vendor) cluster(ctx context.Context) (Cluster, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.found != nil {
		return *v.found, nil
	}
	c, err := v.Cluster(ctx)
	if err != nil {
		return Cluster{}, fmt.Errorf("find the cluster of this program: %w", err)
	}
	if c.Project == "" || c.UID == "" || c.Instances == nil {
		return Cluster{}, errors.New("find the cluster of this program: project, UID or instances are missing")
	}
	v.found = &c
	return c, nil
}

// machine is a machine whose key Google certified.
type machine struct {
	instance
	vendor *vendor
}

// String implements attestation.Certified.
func (m machine) String() string { return "gce://" + m.project + "/" + m.zone + "/" + m.name }

// Remedies of refusals.
const (
	remedyProject  = "create the machine in that project"
	remedyUnknown  = "if it belongs to the cluster, check the labels of its instance template and the zones of the configuration; if it was deleted, shut it down"
	remedyReplaced = "the evidence is of a former machine of that name: delete what still uses its TPM"
	remedyState    = "start the machine, or replace it"
	remedyRights   = "the service account of each machine needs the permission compute.instances.get"
)

// Names implements attestation.Certified.
func (m machine) Names(ctx context.Context, id attestation.Identity) error {
	c, err := m.vendor.cluster(ctx)
	if err != nil {
		return err
	}
	for _, f := range []struct{ field, stated, certified string }{
		{"project", c.Project, m.project},
		{"UID of the cluster", id.UID, c.UID},
		{"provider ID", id.ProviderID, m.String()},
		{"name", id.Name, m.name},
		{"number", id.Incarnation, strconv.FormatUint(m.number, 10)},
	} {
		if f.stated != f.certified {
			return fmt.Errorf("%w: the %s of %s is %q, expected %q", attestation.ErrIdentity, f.field, m.String(), f.stated, f.certified)
		}
	}
	return nil
}

// Identify implements attestation.Certified.
func (m machine) Identify(ctx context.Context) (attestation.Identity, error) {
	c, err := m.vendor.cluster(ctx)
	if err != nil {
		return attestation.Identity{}, err
	}
	refuse := func(remedy, format string, args ...any) (attestation.Identity, error) {
		return attestation.Identity{}, fmt.Errorf("%w: %s; %s", attestation.ErrIdentity, fmt.Sprintf(format, args...), remedy)
	}
	if m.project != c.Project {
		return refuse(remedyProject, "machine %s is in the project %q, the cluster in %q", m.name, m.project, c.Project)
	}
	id, number := m.String(), strconv.FormatUint(m.number, 10)
	i, err := c.Instances.Instance(ctx, cloud.Key(id, number))
	switch {
	case errors.Is(err, cloud.ErrNotFound):
		return refuse(remedyUnknown, "the cluster has no machine %s with the number %s", id, number)
	case errors.Is(err, cloud.ErrDenied):
		return attestation.Identity{}, fmt.Errorf("read machine %s: %w; %s", id, err, remedyRights)
	case err != nil:
		return attestation.Identity{}, fmt.Errorf("read machine %s: %w", id, err)
	case i.ProviderID != id || i.Name != m.name:
		return refuse(remedyUnknown, "the API has %s (%s) in the place of %s", i.ProviderID, i.Name, id)
	case i.Incarnation != number:
		return refuse(remedyReplaced, "machine %s has the number %q in the API, %s in its certificate", id, i.Incarnation, number)
	case i.State == cloud.Terminating || i.State == cloud.Terminated || i.State == cloud.Stopped:
		return refuse(remedyState, "machine %s is %s in the API", id, i.State)
	}
	return attestation.Identity{Name: i.Name, ProviderID: i.ProviderID, Incarnation: number, UID: c.UID, Group: i.Group, Role: i.Role, IP: i.IP}, nil
}
