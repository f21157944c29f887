package gcptest_test

import (
	"maps"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"time"

	compute "google.golang.org/api/compute/v1"
)

const (
	inNet   = "projects/" + project + "/global/networks/net"
	ofGroup = "https://www.googleapis.com/compute/v1/projects/" + project + "/zones/" + zone + "/instanceGroups/fresh"
)

func regional(kind string) string {
	return "projects/" + project + "/regions/" + region + "/" + kind + "/one"
}

// proxySubnet is a subnetwork of proxies.
func proxySubnet(name, prefix string) *compute.Subnetwork {
	s := subnet(name, prefix)
	s.Purpose, s.Role = "REGIONAL_MANAGED_PROXY", "ACTIVE"
	return s
}

// made waits for the operation of a region.
func (l *lab) made(o *compute.Operation, err error) {
	l.Helper()
	l.ok(err)
	l.waitRegion(o)
}

// members makes a network, a firewall that is open, an address, and a group of three machines. It returns their names.
func (l *lab) members() (names []string) {
	l.Helper()
	l.network()
	l.made(l.api.Subnetworks.Insert(project, region, subnet("one", "10.0.0.0/20")).Do())
	l.made(l.api.Addresses.Insert(project, region, &compute.Address{Name: "one"}).Do())
	o, err := l.api.Firewalls.Insert(project, &compute.Firewall{Name: "one", Network: inNet, Direction: "INGRESS", SourceRanges: []string{"0.0.0.0/0"}, Allowed: []*compute.FirewallAllowed{{IPProtocol: "tcp", Ports: []string{"6443"}}}}).Do()
	l.ok(err)
	_, err = l.api.GlobalOperations.Wait(project, o.Name).Do()
	l.ok(err)
	o, err = l.api.InstanceTemplates.Insert(project, &compute.InstanceTemplate{Name: "fresh", Properties: &compute.InstanceProperties{
		MachineType: "e2-standard-2", Metadata: &compute.Metadata{}, Disks: []*compute.AttachedDisk{{Boot: true, InitializeParams: &compute.AttachedDiskInitializeParams{SourceImage: image}}},
		NetworkInterfaces: []*compute.NetworkInterface{{Network: inNet}},
	}}).Do()
	l.ok(err)
	_, err = l.api.GlobalOperations.Wait(project, o.Name).Do()
	l.ok(err)
	o, err = l.api.InstanceGroupManagers.Insert(project, zone, &compute.InstanceGroupManager{
		Name: "fresh", BaseInstanceName: "fresh", TargetSize: 3, InstanceTemplate: "global/instanceTemplates/fresh", NamedPorts: []*compute.NamedPort{{Name: "api", Port: 6443}},
	}).Do()
	l.ok(err)
	l.wait(o)
	time.Sleep(time.Minute)
	list, err := l.api.Instances.List(project, zone).Do()
	l.ok(err)
	for _, m := range list.Items {
		names = append(names, m.Name)
	}
	l.want("machines", len(names), 3)
	slices.Sort(names)
	return names
}

// service makes a backend service of a scheme with its check of health.
func (l *lab) service(scheme, portName string) {
	l.Helper()
	l.made(l.api.RegionHealthChecks.Insert(project, region, &compute.HealthCheck{Name: "one", Type: "TCP", TcpHealthCheck: &compute.TCPHealthCheck{Port: 6443}}).Do())
	l.made(l.api.RegionBackendServices.Insert(project, region, &compute.BackendService{
		Name: "one", LoadBalancingScheme: scheme, Protocol: "TCP", PortName: portName, HealthChecks: []string{regional("healthChecks")}, Backends: []*compute.Backend{{Group: ofGroup, BalancingMode: "UTILIZATION"}},
	}).Do())
}

// rule is a forwarding rule of the proxy load balancer at the first address.
func rule(name, ports string) *compute.ForwardingRule {
	return &compute.ForwardingRule{Name: name, LoadBalancingScheme: "EXTERNAL_MANAGED", IPProtocol: "TCP", IPAddress: "203.0.113.1", PortRange: ports, Network: inNet, Target: regional("targetTcpProxies")}
}

// proxied makes a proxy load balancer in front of three machines.
func (l *lab) proxied() (names []string) {
	l.Helper()
	names = l.members()
	l.made(l.api.Subnetworks.Insert(project, region, proxySubnet("proxies", "10.1.0.0/23")).Do())
	l.service("EXTERNAL_MANAGED", "api")
	l.made(l.api.RegionTargetTcpProxies.Insert(project, region, &compute.TargetTcpProxy{Name: "one", Service: regional("backendServices"), ProxyHeader: "NONE"}).Do())
	l.made(l.api.ForwardingRules.Insert(project, region, rule("one", "6443")).Do())
	o, err := l.api.InstanceGroups.SetNamedPorts(project, zone, "fresh", &compute.InstanceGroupsSetNamedPortsRequest{NamedPorts: []*compute.NamedPort{{Name: "api", Port: 6443}}}).Do()
	l.ok(err)
	l.wait(o)
	return names
}

// reached writes where connections from a place end, as "MACHINE from SOURCE".
func (l *lab) reached(from string, listening ...string) (out []string) {
	for _, r := range l.c.Connect(from, netip.MustParseAddr("203.0.113.1"), 6443, func(machine string, port int) bool { return port == 6443 && slices.Contains(listening, machine) }) {
		out = append(out, r.Machine+" from "+r.Source.String())
	}
	return out
}

// balancerChecks are the checks of the rules about load balancers.
var balancerChecks = map[string]func(l *lab){
	"a machine behind a passthrough load balancer reaches itself at the address of the load balancer": func(l *lab) {
		m := l.members()
		l.service("EXTERNAL", "")
		l.made(l.api.ForwardingRules.Insert(project, region, &compute.ForwardingRule{
			Name: "one", LoadBalancingScheme: "EXTERNAL", IPProtocol: "TCP", IPAddress: "203.0.113.1", Ports: []string{"6443"}, BackendService: regional("backendServices"),
		}).Do())
		const outside = "198.51.100.7"
		l.want("from outside", l.reached(outside, m[0], m[2]), []string{m[0] + " from " + outside, m[2] + " from " + outside})
		l.want("from a member that does not listen", l.reached(m[1], m[0], m[2]), []string(nil))
		got := l.reached(m[0], m...)
		l.want("from a member that listens", len(got) == 1 && strings.HasPrefix(got[0], m[0]+" "), true)
	},
	"a proxy load balancer connects all clients to healthy machines, from an address of the proxy-only subnetwork": func(l *lab) {
		m := l.proxied()
		want := []string{m[0] + " from 10.1.0.2", m[2] + " from 10.1.0.2"}
		l.want("from outside", l.reached("198.51.100.7", m[0], m[2]), want)
		l.want("from a member that does not listen", l.reached(m[1], m[0], m[2]), want)
		l.want("without a healthy machine", l.reached("198.51.100.7"), []string(nil))
	},
	"a proxy load balancer reaches the port that a group has under the name of the port": func(l *lab) {
		m := l.proxied()
		o, err := l.api.InstanceGroups.SetNamedPorts(project, zone, "fresh", &compute.InstanceGroupsSetNamedPortsRequest{NamedPorts: []*compute.NamedPort{{Name: "other", Port: 6443}}}).Do()
		l.ok(err)
		l.wait(o)
		l.want("without the name", l.reached("198.51.100.7", m...), []string(nil))
	},
	"named ports of a managed group are set by setNamedPorts, not by its creation": func(l *lab) {
		l.members()
		g, err := l.api.InstanceGroupManagers.Get(project, zone, "fresh").Do()
		l.ok(err)
		l.want("ports of a new group", len(g.NamedPorts), 0)
		o, err := l.api.InstanceGroups.SetNamedPorts(project, zone, "fresh", &compute.InstanceGroupsSetNamedPortsRequest{NamedPorts: []*compute.NamedPort{{Name: "api", Port: 6443}}}).Do()
		l.ok(err)
		l.wait(o)
		g, err = l.api.InstanceGroupManagers.Get(project, zone, "fresh").Do()
		l.ok(err)
		l.want("ports", len(g.NamedPorts) == 1 && g.NamedPorts[0].Name == "api" && g.NamedPorts[0].Port == 6443, true)
	},
	"a forwarding rule of a proxy load balancer needs an active proxy-only subnetwork of its network and region": func(l *lab) {
		l.members()
		l.service("EXTERNAL_MANAGED", "api")
		l.made(l.api.RegionTargetTcpProxies.Insert(project, region, &compute.TargetTcpProxy{Name: "one", Service: regional("backendServices")}).Do())
		_, err := l.api.ForwardingRules.Insert(project, region, rule("one", "6443")).Do()
		l.refused(err, http.StatusBadRequest, "invalid")
	},
	"a network has one active proxy-only subnetwork in a region, and keeps it while a forwarding rule needs it": func(l *lab) {
		l.proxied()
		_, err := l.api.Subnetworks.Insert(project, region, proxySubnet("more", "10.2.0.0/23")).Do()
		l.refused(err, http.StatusBadRequest, "invalid")
		_, err = l.api.Subnetworks.Delete(project, region, "proxies").Do()
		l.refused(err, http.StatusBadRequest, "resourceInUseByAnotherResource")
		l.made(l.api.ForwardingRules.Delete(project, region, "one").Do())
		l.made(l.api.Subnetworks.Delete(project, region, "proxies").Do())
	},
	"forwarding rules have one address if their ports differ": func(l *lab) {
		l.proxied()
		_, err := l.api.ForwardingRules.Insert(project, region, rule("two", "6000-7000")).Do()
		l.refused(err, http.StatusBadRequest, "invalid")
		l.made(l.api.ForwardingRules.Insert(project, region, rule("two", "9000")).Do())
		list, err := l.api.ForwardingRules.List(project, region).Do()
		l.ok(err)
		l.want("rules", len(list.Items) == 2 && list.Items[1].PortRange == "9000-9000", true)
	},
}

func init() { maps.Copy(checks, balancerChecks) }
