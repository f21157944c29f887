package joinservice

import (
	"context"
	"fmt"
	"net/netip"
	"sync"
	"time"

	"golang.org/x/sync/singleflight"

	"constellation/engine/attestation"
	"constellation/engine/cloud"
)

// directory caches the cloud's list of instances. Machines that boot together share one
// look-up.
type directory struct {
	metadata metadata
	// listed is whether the instances are the list of a workspace, which its owner changes.
	listed bool
	// key returns the cloud.Key of an unused machine that matches its evidence, or why it gets no ticket.
	key    func(context.Context, cloud.Instance) (string, error)
	flight singleflight.Group

	mu        sync.Mutex
	read      time.Time
	instances map[string]cloud.Instance // by name: the machine that has it now
}

// directoryAge is the maximum age of a list that confirms an instance. Before an instance is
// denied, the list is refreshed, since it may be new.
const directoryAge = 5 * time.Second

func newDirectory(m metadata) *directory {
	return &directory{metadata: m, key: func(_ context.Context, i cloud.Instance) (string, error) { return i.Key(), nil }}
}

// verify returns the machine's cloud.Key if the cloud's data of the instance matches the
// evidence, which came from the address peer. The cloud's list may lag, so a missing instance gets errUnknownInstance, which
// asks it to retry; a different one is refused with errOtherInstance.
func (d *directory) verify(ctx context.Context, st attestation.Statement, peer netip.Addr) (key string, err error) {
	age := directoryAge
	if st.Certified { // the API was not asked about the machine in this connection
		age = 0
	}
	i, err := d.check(ctx, st, age)
	if err != nil && ctx.Err() == nil {
		i, err = d.check(ctx, st, 0)
	}
	if err != nil {
		return "", err
	}
	if d.listed { // the address of the caller is all that a copied key does not prove
		if err := d.from(peer, st.Identity); err != nil {
			return "", err
		}
	}
	return d.key(ctx, i)
}

func (d *directory) check(ctx context.Context, st attestation.Statement, age time.Duration) (cloud.Instance, error) {
	id := st.Identity
	i, ok, err := d.find(ctx, id.Name, age)
	if err != nil {
		return i, err
	}
	if !ok || i.State == cloud.Terminating || i.State == cloud.Terminated {
		return i, d.remedy(fmt.Errorf("%w: %s", errUnknownInstance, id.Name), "`constellation init` publishes the list after `machine add` and `machine remove`")
	}
	if id.Incarnation != "" && id.Incarnation != i.Incarnation { // the list may lag, or the machine is a former one
		return i, fmt.Errorf("%w: %s with the incarnation %q, the list has %q", errUnknownInstance, id.Name, id.Incarnation, i.Incarnation)
	}
	for _, f := range []struct{ field, attested, known string }{
		{"provider ID", id.ProviderID, i.ProviderID},
		{"role", string(id.Role), string(i.Role)},
		{"address", id.IP.String(), i.IP.String()},
		{"group", id.Group, i.Group},
	} {
		if f.attested != f.known {
			return i, d.remedy(fmt.Errorf("%w: %s of %s is %q, in the cloud %q", errOtherInstance, f.field, id.Name, f.attested, f.known), "run `constellation machine remove` and `machine add`, which certifies the machine again, then `constellation init`")
		}
	}
	if i.EvidenceKey != "" && st.Key != i.EvidenceKey {
		return i, fmt.Errorf("%w: %s has %s, the list has %s", errOtherKey, id.Name, st.Key, i.EvidenceKey)
	}
	return i, nil
}

// remedy adds to err what the owner of a list of machines can do.
func (d *directory) remedy(err error, how string) error {
	if !d.listed {
		return err
	}
	return fmt.Errorf("%w; %s", err, how)
}

// from returns an error if a connection comes from the address of another worker of the list than the
// one that its evidence names. Other addresses may be those of load balancers.
func (d *directory) from(peer netip.Addr, id attestation.Identity) error {
	if peer == id.IP {
		return nil
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, i := range d.instances {
		if i.IP == peer && i.Role == cloud.Worker && i.Name != id.Name {
			return fmt.Errorf("%w: evidence of %s (%s) came from %s (%s)", errOtherAddress, id.Name, id.IP, i.Name, peer)
		}
	}
	return nil
}

// supersedes reports whether a replaces b as the machine of a name. A machine that is being deleted
// gives its name to another one in some clouds.
func supersedes(a, b cloud.Instance) bool {
	ends := func(i cloud.Instance) bool { return i.State == cloud.Terminating || i.State == cloud.Terminated }
	if ends(a) != ends(b) {
		return ends(b)
	}
	return a.Created.After(b.Created)
}

func (d *directory) find(ctx context.Context, name string, age time.Duration) (cloud.Instance, bool, error) {
	d.mu.Lock()
	i, ok := d.instances[name]
	fresh := d.instances != nil && time.Since(d.read) < age
	d.mu.Unlock()
	if fresh {
		return i, ok, nil
	}
	// One caller's cancellation must not fail the others, so the look-up has its own deadline.
	_, err, _ := d.flight.Do("", func() (any, error) {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), ticketTimeout/2)
		defer cancel()
		asked := time.Now()
		list, err := d.metadata.Peers(ctx)
		if err != nil {
			return nil, fmt.Errorf("list instances: %w", err)
		}
		m := make(map[string]cloud.Instance, len(list))
		for _, i := range list {
			if o, ok := m[i.Name]; !ok || supersedes(i, o) {
				m[i.Name] = i
			}
		}
		d.mu.Lock()
		d.instances, d.read = m, asked
		d.mu.Unlock()
		return nil, nil
	})
	if err != nil {
		return cloud.Instance{}, false, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	i, ok = d.instances[name]
	return i, ok, nil
}
