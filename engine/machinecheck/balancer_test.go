package machinecheck

import (
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"constellation/engine/cloud"
	"constellation/engine/plan"
	"constellation/internal/testneeds"
)

func TestBalancerFindings(t *testing.T) {
	t.Parallel()
	const cluster = "0123456789abcdef"
	own := []string{"+balancer.cluster " + cluster, "+address 10.0.0.10/32 enp1s0", "+listen 8443 haproxy"}
	for _, tt := range []struct {
		name     string
		edits    []string
		change   func(*Balancer)
		role     cloud.Role
		severity plan.Severity // empty: no finding
		id       string
		text     string
		command  string
	}{
		{name: "free address", edits: []string{"+balancer.holder -"}},
		{name: "worker", edits: []string{"+balancer.holder 52:54:00:12:34:56"}, role: cloud.Worker},
		{name: "held by another computer", edits: []string{"+balancer.holder 52:54:00:12:34:56"}, severity: plan.Block, id: findingHeld, text: "52:54:00:12:34:56"},
		{name: "held by a control plane of the cluster", edits: []string{"+balancer.holder 52:54:00:12:34:56"}, change: func(b *Balancer) { b.Expected = true }},
		{name: "not known who holds it", edits: []string{"+balancer.holder ?"}, severity: plan.NotChecked, id: findingHeld},
		{name: "own address", edits: []string{"+address 10.0.0.10/24 enp1s0"}, severity: plan.Block, id: "machine-balancer-own-address", text: "10.0.0.10"},
		{name: "address of another cluster's balancer", edits: []string{"+address 10.0.0.10/32 enp1s0", "+balancer.cluster other"}, severity: plan.Block, id: "machine-balancer-own-address"},
		{name: "set up already", edits: own},
		{name: "port in use", edits: []string{"+listen 8443 nginx"}, severity: plan.Block, id: "machine-ports", text: "port 8443 of the balancer is in use by nginx"},
		{name: "other network", change: func(b *Balancer) { b.Address = netip.MustParseAddr("10.0.1.10") }, severity: plan.Warn, id: "machine-balancer-network", text: "10.0.0.0/24"},
		{name: "named interface", change: func(b *Balancer) { b.Interface = "enp1s0" }},
		{name: "no such interface", change: func(b *Balancer) { b.Interface = "eth7" }, severity: plan.Block, id: "machine-balancer-interface", text: "enp1s0"},
		{name: "interface of another network", edits: []string{"+address 192.168.0.11/24 eth7"}, change: func(b *Balancer) { b.Interface = "eth7" }, severity: plan.Warn, id: "machine-balancer-network", text: "192.168.0.0/24"},
		{name: "firewall", edits: []string{"+firewall ufw active"}, severity: plan.Warn, id: "machine-firewall", text: "30090 and 8443, and other control planes VRRP (IP protocol 112)", command: "ufw allow proto tcp from NETWORK to any port 2379,2380,6443,9000,10250,30090,8443 && ufw default allow routed && ufw allow proto vrrp from NETWORK"},
	} {
		b := Balancer{Cluster: cluster, Address: netip.MustParseAddr("10.0.0.10"), Port: 8443}
		if tt.change != nil {
			tt.change(&b)
		}
		if tt.role == "" {
			tt.role = cloud.ControlPlane
		}
		found := Judge(parse(t, recorded(t, "debian12.txt", tt.edits...)), Needs{Role: tt.role, Balancer: &b})
		if tt.severity == "" {
			if len(found) > 0 {
				t.Errorf("%s: %+v", tt.name, found)
			}
			continue
		}
		if len(found) != 1 || found[0].ID != tt.id || found[0].Severity != tt.severity || !strings.Contains(found[0].Title+found[0].Detail, tt.text) || tt.command != "" && found[0].Command != tt.command || found[0].Remedy == "" {
			t.Errorf("%s: %+v", tt.name, found)
		}
	}
}

func TestInterfaceForBalancer(t *testing.T) {
	t.Parallel()
	f := parse(t, recorded(t, "debian12.txt", "+address 192.168.0.11/24 eth1", "+address 192.168.0.10/32 eth1", "+address 172.16.0.1/16 evil;"))
	own := netip.MustParseAddr("10.0.0.11")
	for address, want := range map[string]string{"192.168.0.10": "eth1", "10.0.0.10": "enp1s0", "10.9.9.9": "enp1s0", "172.16.0.9": "enp1s0"} {
		if got := f.InterfaceFor(netip.MustParseAddr(address), own); got != want {
			t.Errorf("%s: %q, want %q", address, got, want)
		}
	}
	if len(f.Addresses) != 4 || slices.ContainsFunc(f.Networks, func(n Network) bool { return n.Interface == "evil;" }) {
		t.Errorf("networks %+v", f.Networks)
	}
}

// The script finds out which computer answers at an address: in a network of its own, with another namespace behind a cable.
func TestProbeFindsTheHolderOfAnAddress(t *testing.T) {
	testneeds.Root(t, "to make network namespaces")
	testneeds.Program(t, "ip", "iproute2")
	probe := filepath.Join(t.TempDir(), "probe.sh")
	if err := os.WriteFile(probe, []byte(strings.TrimSuffix(script, "main \"$1\" </dev/null\n")+"holder \"$1\"\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	out, err := exec.CommandContext(t.Context(), "unshare", "--net", "--mount", "bash", "-ec", `
mount -t tmpfs tmpfs /run && mkdir /run/netns
ip netns add other
ip link add name host0 address 02:00:00:00:00:01 type veth peer name peer0 address 02:00:00:00:00:02 netns other
ip addr add 10.9.0.1/24 dev host0 && ip link set host0 up
ip ntable change name arp_cache dev host0 delay_probe 100 retrans 100 # ms; a machine has 5 s and 1 s
ip -n other addr add 10.9.0.2/24 dev peer0 && ip -n other link set peer0 up
for address in 10.9.0.2 10.9.0.3 10.8.0.1; do sh "$0" $address; done
ip -n other addr del 10.9.0.2/24 dev peer0 # an old entry proves nothing
for state in stale reachable; do
  ip neigh replace 10.9.0.2 lladdr 02:00:00:00:00:02 dev host0 nud $state
  sh "$0" 10.9.0.2
done`, probe).Output()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	want := "02:00:00:00:00:02\n-\n-\n-\n-\n"
	if string(out) != want {
		t.Errorf("got\n%swant\n%s", out, want)
	}
}
