package machines

import (
	"cmp"
	"crypto/sha256"
	"net/netip"
	"regexp"

	"constellation/engine/cloud/section"
)

// BalancerMap is the name of the balancer in the section of enrolled machines.
const BalancerMap = "balancer"

// APIPort is the port of API servers on their machines, and of an endpoint without a [Balancer].
const APIPort = 6443

// balancerPort is the default port of a balancer. API servers have theirs on the same machines.
const balancerPort = 8443

// Balancer is the load balancer that `machine add` sets up on control planes: haproxy in front of the API servers, and
// keepalived, which moves one address between the machines.
type Balancer struct {
	// Address is the one that moves.
	Address netip.Addr
	// Interface is the network interface of each machine that gets it; empty: see machinecheck.
	Interface string
	// Port is that of haproxy.
	Port int
	// RouterID is the virtual router ID of VRRP, 1 to 255; 0: [RouterID].
	RouterID int
}

var interfaceRE = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,14}$`)

// ValidInterface reports whether s can name a network interface in a configuration file.
func ValidInterface(s string) bool { return interfaceRE.MatchString(s) }

func balancerField() section.Field {
	return section.Field{Name: BalancerMap, Kind: section.Map, Columns: section.Schema{
		{
			Name: "address", Required: true, Valid: func(s string) bool {
				a, err := netip.ParseAddr(s)
				return err == nil && a.Is4() && !a.IsUnspecified() && !a.IsLoopback() && !a.IsMulticast()
			}, Problem: "is no IPv4 address", Remedy: "write a free IPv4 address of the control planes' network, without a port",
			Ask: "balancer", Hint: "empty: you have a load balancer", Help: "a free address: haproxy and keepalived are set up on the control planes and serve the API there",
		},
		{Name: "interface", Valid: ValidInterface, Problem: "cannot name a network interface", Remedy: "write the name that `ip link` prints on the control planes, or remove the field"},
		{Name: "port", Kind: section.Int, Lowest: 1, Highest: 65535},
		{Name: "routerID", Kind: section.Int, Lowest: 1, Highest: 255},
	}}
}

// BalancerOf returns the balancer of a section; nil if it has none, or one that is not valid.
func BalancerOf(v section.Values) *Balancer {
	m := v.Map(BalancerMap)
	a, err := netip.ParseAddr(m.Text("address"))
	if err != nil {
		return nil
	}
	return &Balancer{Address: a, Interface: m.Text("interface"), Port: cmp.Or(m.Int("port"), balancerPort), RouterID: m.Int("routerID")}
}

// EndpointPort returns the port of API servers at the endpoint of a section.
func EndpointPort(v section.Values) int {
	if b := BalancerOf(v); b != nil {
		return b.Port
	}
	return APIPort
}

// RouterID returns the virtual router ID of a cluster that chose none.
func RouterID(uid string) int {
	sum := sha256.Sum256([]byte("vrrp " + uid))
	return int(sum[0])%255 + 1
}
