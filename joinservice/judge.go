package joinservice

import (
	"context"
	"log/slog"
	"net/netip"
	"sync/atomic"

	"k8s.io/client-go/rest"

	"constellation/engine/attestation"
	"constellation/engine/cloud/machines"
)

// judge decides which machines may join. The join service has one for each connection from the network, and the CA signer has another
// one for machines that want the keys of control planes.
type judge struct {
	log       *slog.Logger
	kube      *kube
	directory *directory
	issuer    attestation.Issuer
	method    attestation.Method
	spares    *spares // nil: all machines belong to their groups
	// certification is nil without a certifier: then the vendor's API confirms each machine.
	certification *certification

	// snapshot has the present attestation requirements; nil until they were read.
	snapshot atomic.Pointer[snapshot]
}

// Access is what both processes of the join service have of the cluster and its cloud. All fields except Spares and Log are required.
type Access struct {
	// Cluster is the access to the API server. Its rate limits are replaced.
	Cluster *rest.Config
	// Namespace is that of the join service.
	Namespace string
	// Metadata is the cloud's metadata service.
	Metadata metadata
	// Attestation judges the machines of this cloud.
	Attestation attestation.Method
	// Spares is whether machines are enrolled, and some belong to their group only while they are assigned.
	Spares bool
	// Log is nil for none.
	Log *slog.Logger
}

func (a Access) judge(issuer attestation.Issuer, c *certification) (*judge, error) {
	if a.Log == nil {
		a.Log = slog.New(slog.DiscardHandler)
	}
	k, err := newKube(a.Cluster, a.Namespace)
	if err != nil {
		return nil, err
	}
	d := newDirectory(a.Metadata)
	d.listed = a.Attestation.Unmeasured
	j := &judge{log: a.Log, kube: k, directory: d, issuer: issuer, method: a.Attestation, certification: c}
	if a.Spares {
		j.spares = &spares{kube: k, told: map[string]machines.Seen{}}
		d.key = j.spares.key
	}
	return j, nil
}

// machine returns a machine as records name it, if the cloud lists it as its evidence says, it is not about to leave and was not
// revoked. peer is the address of its connection.
func (j *judge) machine(ctx context.Context, st attestation.Statement, peer netip.Addr) (attestation.Identity, error) {
	m := st.Identity
	key, err := j.directory.verify(ctx, st, peer)
	if err != nil {
		return m, err
	}
	m.ProviderID = key
	if err := j.kube.staying(m); err != nil {
		return m, err
	}
	return m, j.kube.allowed(m)
}
