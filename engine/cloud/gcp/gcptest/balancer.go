package gcptest

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	compute "google.golang.org/api/compute/v1"

	"constellation/engine/cloud"
	"constellation/engine/cloud/cloudtest/wire"
)

// managedScheme is that of load balancers with proxies, passScheme that of those that pass packets through.
const (
	managedScheme = "EXTERNAL_MANAGED"
	passScheme    = "EXTERNAL"
)

// probers are the addresses from which the health of machines is checked, by scheme:
// https://cloud.google.com/load-balancing/docs/health-check-concepts.
var probers = map[string][]string{
	managedScheme: {"35.191.0.0/16", "130.211.0.0/22"},
	passScheme:    {"35.191.0.0/16", "209.85.152.0/22", "209.85.204.0/22"},
}

// same reports whether two URLs are of one object.
func (c *Cloud) same(a, b any) bool { return c.keyOf(fmt.Sprint(a)) == c.keyOf(fmt.Sprint(b)) }

// active reports whether an object is the subnetwork from which proxies of a region have their addresses.
func active(subnetwork map[string]any) bool {
	return subnetwork["purpose"] == "REGIONAL_MANAGED_PROXY" && subnetwork["role"] == "ACTIVE"
}

// proxies returns the active subnetwork of proxies of a network and a region, except that at a path; nil: there is none.
func (c *Cloud) proxies(network any, region, except string) map[string]any {
	for key, o := range c.objects {
		if key != except && strings.HasPrefix(key, region+"/subnetworks/") && active(o) && c.same(o["network"], network) {
			return o
		}
	}
	return nil
}

// regionPart is the first part of the path of a regional object: regions/REGION.
func regionPart(key string) string {
	parts := strings.SplitN(key, "/", 3)
	return parts[0] + "/" + parts[1]
}

// subnetworkProblem refuses a subnetwork whose range another one of the network has, and a second one of proxies.
func subnetworkProblem(c *Cloud, key string, o map[string]any) string {
	if active(o) && c.proxies(o["network"], regionPart(key), key) != nil {
		return "Invalid value for field 'resource.role': 'ACTIVE'. There is an active proxy-only subnetwork in the region and network already."
	}
	return overlaps(c, key, o)
}

// portsOf returns the first and the last port of each range of a forwarding rule.
func portsOf(rule map[string]any) (out [][2]int) {
	for _, text := range append(texts(rule, "ports"), texts(rule, "portRange")...) {
		from, to, is := strings.Cut(text, "-")
		if !is {
			to = from
		}
		a, errA := strconv.Atoi(from)
		b, errB := strconv.Atoi(to)
		if errA == nil && errB == nil {
			out = append(out, [2]int{a, b})
		}
	}
	if len(out) == 0 {
		out = [][2]int{{1, 65535}}
	}
	return out
}

// completeRange writes the range of ports of a rule as answers have it.
func completeRange(_ *Cloud, rule map[string]any) {
	if one, _ := rule["portRange"].(string); one != "" && !strings.Contains(one, "-") {
		rule["portRange"] = one + "-" + one
	}
}

// ruleProblem refuses a forwarding rule whose address and port another one has, one without proxies, and one whose load
// balancing scheme its backend service does not have.
func ruleProblem(c *Cloud, key string, o map[string]any) string {
	ip, _ := o["IPAddress"].(string)
	for other, x := range c.objects {
		if ip == "" || other == key || x["IPAddress"] != ip {
			continue
		}
		for _, a := range portsOf(o) {
			for _, b := range portsOf(x) {
				if a[0] <= b[1] && b[0] <= a[1] {
					return fmt.Sprintf("Invalid value for field 'resource.IPAddress': '%s'. Specified IP address is in-use and would result in a conflict.", ip)
				}
			}
		}
	}
	service := c.serviceOf(o)
	if s := service["loadBalancingScheme"]; s != nil && s != o["loadBalancingScheme"] {
		return fmt.Sprintf("Invalid value for field 'resource.loadBalancingScheme': '%v'. The backend service has %v.", o["loadBalancingScheme"], s)
	}
	if o["loadBalancingScheme"] == managedScheme && c.proxies(o["network"], regionPart(key), "") == nil {
		return "Invalid value for field 'resource.network': An active proxy-only subnetwork is required in the same region and VPC where the forwarding rule is defined."
	}
	return ""
}

// serviceOf returns the backend service of a forwarding rule.
func (c *Cloud) serviceOf(rule map[string]any) map[string]any {
	url, _ := rule["backendService"].(string)
	if target, _ := rule["target"].(string); target != "" {
		url, _ = c.objects[c.keyOf(target)]["service"].(string)
	}
	return c.objects[c.keyOf(url)]
}

func (c *Cloud) setNamedPorts(call wire.Call) wire.Reply {
	var body compute.InstanceGroupsSetNamedPortsRequest
	if err := json.Unmarshal(call.Body, &body); err != nil {
		return refusal(http.StatusBadRequest, "parseError", err.Error())
	}
	id := call.Params["zone"] + "/" + call.Params["instanceGroup"]
	g := c.groups[id]
	if g == nil {
		return c.missing("zones/" + call.Params["zone"] + "/instanceGroups/" + call.Params["instanceGroup"])
	}
	return c.mutate(call, "setNamedPorts", c.url("zones/"+call.Params["zone"]+"/instanceGroups/"+call.Params["instanceGroup"]), func(time.Time) (string, string) {
		g.NamedPorts = body.NamedPorts
		return "", ""
	})
}

// Reached is a machine that a connection ends at.
type Reached struct {
	Machine string
	// Port is that of the machine.
	Port int
	// Source is the address that the machine sees.
	Source netip.Addr
}

// Connect returns the machines that a new connection to an address can end at, in order. Without one, it is refused or
// gets no answer. from is the name of a machine, or an address of the internet. listens reports whether a program of a
// machine accepts connections at a port. Checks of health see the same.
func (c *Cloud) Connect(from string, to netip.Addr, port int, listens func(machine string, port int) bool) (out []Reached) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.settle(time.Now())
	source, _ := netip.ParseAddr(from)
	machines := c.machines()
	for _, vm := range machines {
		if vm.Name == from {
			source, _ = netip.ParseAddr(vm.NetworkInterfaces[0].NetworkIP)
		}
	}
	for _, vm := range machines {
		if vm.NetworkInterfaces[0].NetworkIP == to.String() && c.permits(source, vm, port) && listens(vm.Name, port) {
			return []Reached{{vm.Name, port, source}}
		}
	}
	for key, rule := range c.objects {
		if rule["IPAddress"] == to.String() && slices.ContainsFunc(portsOf(rule), func(r [2]int) bool { return r[0] <= port && port <= r[1] }) {
			return c.balance(key, rule, from, source, port, listens)
		}
	}
	return nil
}

// balance returns the machines that a connection to a forwarding rule can end at.
func (c *Cloud) balance(key string, rule map[string]any, from string, source netip.Addr, port int, listens func(machine string, port int) bool) (out []Reached) {
	service, proxied := c.serviceOf(rule), rule["loadBalancingScheme"] == managedScheme
	if proxied {
		proxies, err := netip.ParsePrefix(fmt.Sprint(c.proxies(rule["network"], regionPart(key), "")["ipCidrRange"]))
		if err != nil {
			return nil
		}
		source = proxies.Addr().Next().Next()
	}
	var members, healthy []Reached
	for _, url := range texts(service, "backends.group") {
		parts := strings.Split(c.keyOf(url), "/")
		g := c.groups[parts[1]+"/"+parts[len(parts)-1]]
		if g == nil {
			continue
		}
		at := port
		if proxied {
			n := slices.IndexFunc(g.NamedPorts, func(p *compute.NamedPort) bool { return p.Name == service["portName"] })
			if n < 0 {
				continue // the group has no port of this name
			}
			at = int(g.NamedPorts[n].Port)
		}
		for _, m := range g.managed {
			if m.vm == nil || c.state(m.vm) != cloud.Ready {
				continue
			}
			r := Reached{m.name, at, source}
			if m.name == from && !proxied { // the guest agent gave it the address
				if listens(m.name, at) {
					return []Reached{r}
				}
				return nil
			}
			if !c.permits(source, m.vm, at) {
				continue
			}
			members = append(members, r)
			if c.healthy(service, m.vm, listens) {
				healthy = append(healthy, r)
			}
		}
	}
	if len(healthy) == 0 && !proxied { // all get connections then
		healthy = members
	}
	healthy = slices.DeleteFunc(healthy, func(r Reached) bool { return !listens(r.Machine, r.Port) })
	slices.SortFunc(healthy, func(a, b Reached) int { return strings.Compare(a.Machine, b.Machine) })
	return healthy
}

// healthy reports whether the checks of a backend service reach a machine.
func (c *Cloud) healthy(service map[string]any, vm *compute.Instance, listens func(machine string, port int) bool) bool {
	for _, url := range texts(service, "healthChecks") {
		var check compute.HealthCheck
		b, err := json.Marshal(c.objects[c.keyOf(url)])
		if err != nil || json.Unmarshal(b, &check) != nil {
			return false
		}
		port := 80
		switch {
		case check.TcpHealthCheck != nil:
			port = int(check.TcpHealthCheck.Port)
		case check.HttpsHealthCheck != nil:
			port = int(check.HttpsHealthCheck.Port)
		}
		for _, from := range probers[fmt.Sprint(service["loadBalancingScheme"])] {
			if !c.permits(netip.MustParsePrefix(from).Addr().Next(), vm, port) {
				return false
			}
		}
		if !listens(vm.Name, port) {
			return false
		}
	}
	return true
}

// permits reports whether a firewall rule lets packets of an address reach a port of a machine. Without a rule, no packet does.
func (c *Cloud) permits(from netip.Addr, vm *compute.Instance, port int) bool {
	for key, o := range c.objects {
		var rule compute.Firewall
		b, err := json.Marshal(o)
		if !strings.HasPrefix(key, "global/firewalls/") || err != nil || json.Unmarshal(b, &rule) != nil || !c.same(rule.Network, vm.NetworkInterfaces[0].Network) {
			continue
		}
		tagged := len(rule.TargetTags) == 0 || vm.Tags != nil && slices.ContainsFunc(rule.TargetTags, func(t string) bool { return slices.Contains(vm.Tags.Items, t) })
		source := slices.ContainsFunc(rule.SourceRanges, func(r string) bool {
			p, err := netip.ParsePrefix(r)
			return err == nil && p.Contains(from)
		})
		allowed := slices.ContainsFunc(rule.Allowed, func(a *compute.FirewallAllowed) bool {
			return a.IPProtocol == "all" || a.IPProtocol == "tcp" && (len(a.Ports) == 0 || slices.Contains(a.Ports, strconv.Itoa(port)))
		})
		if rule.Direction != "EGRESS" && tagged && source && allowed {
			return true
		}
	}
	return false
}
