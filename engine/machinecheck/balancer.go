package machinecheck

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"

	"constellation/engine/cloud"
	"constellation/engine/plan"
	"constellation/engine/words"
)

// Balancer is the load balancer that control planes are to have: an address that moves between them.
type Balancer struct {
	// Cluster is the ID of the cluster; empty before its first machine.
	Cluster string
	Address netip.Addr
	Port    int
	// Interface is the network interface that gets the address; empty: see [Facts.InterfaceFor].
	Interface string
	// Expected is whether a machine may have the address already: one of this cluster.
	Expected bool
}

// balancer returns the one that the machine is to have; nil if it gets none.
func (n *Needs) balancer() *Balancer {
	if n.Role != cloud.ControlPlane {
		return nil
	}
	return n.Balancer
}

// address is that of the balancer; the zero value without one.
func (n *Needs) address() netip.Addr {
	if b := n.balancer(); b != nil {
		return b.Address
	}
	return netip.Addr{}
}

// findingHeld is the finding about an address that another computer has.
const findingHeld = "machine-balancer-address"

// heldBy reports whether a machine has the address because it is a control plane of this cluster.
func (b *Balancer) heldBy(f Facts) bool {
	return b.Cluster != "" && f.BalancerCluster == b.Cluster && slices.ContainsFunc(f.Addresses, func(p netip.Prefix) bool { return p.Addr() == b.Address })
}

// InterfaceFor returns the network interface for an address that is to move between machines: the one whose network it is
// in, else the one with the machine's own address. It is empty if there is neither.
func (f *Facts) InterfaceFor(address, own netip.Addr) string {
	for _, n := range f.Networks {
		if !n.Address.IsSingleIP() && n.Address.Masked().Contains(address) {
			return n.Interface
		}
	}
	for _, n := range f.Networks {
		if n.Address.Addr() == own {
			return n.Interface
		}
	}
	return ""
}

// balancerPorts are those of a balancer, unless its own haproxy has them.
func (j *judge) balancerPorts() []port {
	b := j.n.balancer()
	if b == nil || b.Cluster != "" && j.f.BalancerCluster == b.Cluster {
		return nil
	}
	return []port{{b.Port, "balancer", ""}}
}

func (j *judge) balancer() {
	b := j.n.balancer()
	if b == nil {
		return
	}
	has := slices.ContainsFunc(j.f.Addresses, func(p netip.Prefix) bool { return p.Addr() == b.Address })
	choose := "write a free address into balancer and endpoint of the configuration"
	switch {
	case has && !b.heldBy(j.f):
		j.add(plan.Block, "machine-balancer-own-address", plan.Finding{
			Title: fmt.Sprintf("the balancer's address %s is one of this machine", b.Address), Detail: "keepalived moves the address between control planes", Remedy: choose, Command: "ip addr show to " + b.Address.String(),
		})
	case b.Expected || has || j.f.Holder == "":
	case j.f.Holder == string(Unread):
		j.add(plan.NotChecked, findingHeld, plan.Finding{
			Title: fmt.Sprintf("not checked whether another computer has the balancer's address %s", b.Address), Remedy: "install iproute2 and bash on the machine, or check it by hand", Command: "ip neigh show to " + b.Address.String(),
		})
	default:
		j.add(plan.Block, findingHeld, plan.Finding{
			Title: fmt.Sprintf("the balancer's address %s is in use: a computer with the hardware address %s answers there", b.Address, j.f.Holder), Remedy: choose, Command: "ip neigh show to " + b.Address.String(),
		})
	}
	var names, networks []string
	inside := false
	for _, n := range j.f.Networks {
		if !slices.Contains(names, n.Interface) {
			names = append(names, n.Interface)
		}
		if n.Address.IsSingleIP() || b.Interface != "" && n.Interface != b.Interface {
			continue
		}
		networks = append(networks, n.Address.Masked().String())
		inside = inside || n.Address.Masked().Contains(b.Address)
	}
	switch {
	case b.Interface != "" && !slices.Contains(names, b.Interface):
		j.add(plan.Block, "machine-balancer-interface", plan.Finding{
			Title:  fmt.Sprintf("the machine has no network interface %s with an address", b.Interface),
			Detail: "it has " + cmp.Or(words.And(names), "none"), Remedy: "correct the balancer's interface in the configuration, or remove it: the interface is then found by its network", Command: "ip -br addr",
		})
	case !inside:
		j.add(plan.Warn, "machine-balancer-network", plan.Finding{
			Title:  fmt.Sprintf("the balancer's address %s is in no network of %s", b.Address, cmp.Or(b.Interface, "this machine")),
			Detail: "the networks are " + cmp.Or(words.And(networks), "none"), Remedy: "choose an address of the machines' network; other computers reach this one only if a router sends it to them", Command: "ip route get " + b.Address.String(),
		})
	}
}
