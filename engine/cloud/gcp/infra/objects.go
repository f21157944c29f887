package infra

import (
	"cmp"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"

	compute "google.golang.org/api/compute/v1"

	"constellation/engine/cloud"
	"constellation/engine/cloud/gcp"
	"constellation/engine/infra"
)

// healthSources are the addresses from which Google checks the health of machines behind a regional proxy load balancer:
// https://cloud.google.com/load-balancing/docs/health-check-concepts.
var healthSources = []string{"35.191.0.0/16", "130.211.0.0/22"}

// port is a port of the load balancer. Each has a named port of the groups, a health check, a backend service, a proxy and
// a forwarding rule of this name: a proxy drops the connections of a port without a healthy machine, and before init
// only bootstrappers listen.
type port struct {
	name, serves string
	number       int
	affinity     string
}

var ports = []port{
	{name: "api", serves: "API servers", number: infra.APIPort, affinity: "NONE"},
	// The console reaches the bootstrapper again that it reached before.
	{name: "init", serves: "bootstrappers", number: infra.InitPort, affinity: "CLIENT_IP"},
	{name: "join", serves: "join services", number: infra.JoinPort, affinity: "NONE"},
}

// idle is how many seconds a connection may be silent. Clients of Kubernetes and gRPC ping earlier.
const idle = 3600

const (
	// proxyScheme is that of load balancers whose proxies Google runs in the region, with addresses of a subnetwork of
	// proxyPurpose. A network has one of them with proxyRole.
	proxyScheme  = "EXTERNAL_MANAGED"
	proxyPurpose = "REGIONAL_MANAGED_PROXY"
	proxyRole    = "ACTIVE"
)

// object is an object of the infrastructure.
type object struct {
	infra.Object
	kind  kind
	place string
	own   bool
	// want returns the object as it is made, in the type of Google's client; nil for one that the configuration names.
	want func() any
	// loose are fields that others change, and that are not compared.
	loose []string
	// named has the group name the ports of the load balancer.
	named bool
}

// unnamed reports whether a group lacks one of the named ports.
func (o *object) unnamed(f found) bool {
	listed, _ := f.fields["namedPorts"].([]any)
	return o.named && slices.ContainsFunc(ports, func(p port) bool {
		return !slices.ContainsFunc(listed, func(x any) bool {
			have, _ := x.(map[string]any)
			return have["name"] == p.name && fmt.Sprint(have["port"]) == strconv.Itoa(p.number)
		})
	})
}

func (i *Infra) path(parts ...string) string {
	return "projects/" + i.project + "/" + strings.Join(parts, "/")
}

// add completes an object by what follows from its kind.
func (i *Infra) add(list []object, id, kindID, name, purpose string, o object) []object {
	o.kind = kindOf(kindID)
	if o.kind.scope == regional {
		o.place = i.region
	}
	o.Object = infra.Object{ID: id, Kind: o.kind.title, Name: name, Place: o.place, Purpose: purpose, Details: o.Details, State: infra.Absent}
	return append(list, o)
}

// objects returns all objects in the order in which they are made.
func (i *Infra) objects() (out []object) {
	i.mu.Lock()
	nodes, host, image, pods, proxies, ownProxies := i.nodes, i.host, i.image, i.pods, i.proxies, i.ownProxies
	i.mu.Unlock()
	c, name := i.request.Config, i.prefix()
	in := i.path("global", "networks", cmp.Or(c.Text(Network), name))
	if own := c.Text(Network); own != "" {
		out = i.add(out, network, network, own, "connects the machines", object{own: true})
	} else {
		out = i.add(out, network, network, name, "connects the machines", object{want: func() any {
			return &compute.Network{Name: name, Description: i.mark(), AutoCreateSubnetworks: false, ForceSendFields: []string{"AutoCreateSubnetworks"}}
		}})
	}
	sub := i.path("regions", i.region, "subnetworks", cmp.Or(c.Text(Subnetwork), name))
	details := []string{"machines " + nodes.String(), "pods " + i.request.PodCIDR.String()}
	if own := c.Text(Subnetwork); own != "" {
		out = i.add(out, subnetwork, subnetwork, own, "has the addresses of machines and pods", object{own: true, Object: infra.Object{Details: details}})
	} else {
		out = i.add(out, subnetwork, subnetwork, name, "has the addresses of machines and pods", object{Object: infra.Object{Details: details}, want: func() any {
			return &compute.Subnetwork{
				Name: name, Description: i.mark(), Network: in, IpCidrRange: nodes.String(),
				SecondaryIpRanges: []*compute.SubnetworkSecondaryRange{{RangeName: podRange, IpCidrRange: i.request.PodCIDR.String()}},
			}
		}})
	}
	if ownProxies != "" {
		out = i.add(out, subnetwork+"-proxies", subnetwork, ownProxies, "has the addresses of the load balancer's proxies", object{own: true, Object: infra.Object{Details: []string{proxies.String()}}})
	} else {
		out = i.add(out, subnetwork+"-proxies", subnetwork, name+"-proxies", "has the addresses of the load balancer's proxies", object{Object: infra.Object{Details: []string{proxies.String()}}, want: func() any {
			return &compute.Subnetwork{Name: name + "-proxies", Description: i.mark(), Network: in, IpCidrRange: proxies.String(), Purpose: proxyPurpose, Role: proxyRole}
		}})
	}
	rule := func(id, purpose string, from []string, tag string, allowed *compute.FirewallAllowed) {
		admitted := strings.TrimSpace(allowed.IPProtocol + " " + strings.Join(allowed.Ports, ", "))
		out = i.add(out, "firewall-"+id, firewall, name+"-"+id, purpose, object{
			Object: infra.Object{Details: []string{"from " + strings.Join(from, ", "), "to machines with the tag " + tag, admitted}},
			want: func() any {
				return &compute.Firewall{
					Name: name + "-" + id, Description: i.mark(), Network: in, Direction: "INGRESS", SourceRanges: from, TargetTags: []string{tag}, Allowed: []*compute.FirewallAllowed{allowed},
				}
			},
		})
	}
	control := name + "-" + string(cloud.ControlPlane)
	balanced := &compute.FirewallAllowed{IPProtocol: "tcp"}
	for _, p := range ports {
		balanced.Ports = append(balanced.Ports, strconv.Itoa(p.number))
	}
	rule("internal", "lets machines and pods reach each other", []string{nodes.String(), i.request.PodCIDR.String()}, name, &compute.FirewallAllowed{IPProtocol: "all"})
	rule("health", "lets Google check the health of control planes", healthSources, control, balanced)
	rule("balancer", "lets the load balancer's proxies reach API servers, bootstrappers and join services", []string{proxies.String()}, control, balanced)
	if from := c.List(SSHFrom); len(from) > 0 {
		rule("ssh", "lets the configured addresses reach machines by SSH", from, name, &compute.FirewallAllowed{IPProtocol: "tcp", Ports: []string{"22"}})
	}
	if own := c.Text(Address); own != "" {
		out = i.add(out, address, address, own, "is that of the load balancer", object{own: true})
	} else {
		out = i.add(out, address, address, name, "is that of the load balancer", object{want: func() any {
			return &compute.Address{Name: name, Description: i.mark(), AddressType: "EXTERNAL", NetworkTier: "PREMIUM"}
		}})
	}
	for _, p := range ports {
		check, details := &compute.HealthCheck{Name: name + "-" + p.name, Description: i.mark(), Type: "TCP", CheckIntervalSec: 5, TimeoutSec: 5, HealthyThreshold: 1, UnhealthyThreshold: 2}, fmt.Sprintf("TCP at port %d", p.number)
		if p.number == infra.APIPort {
			check.Type, check.HttpsHealthCheck, details = "HTTPS", &compute.HTTPSHealthCheck{Port: infra.APIPort, RequestPath: "/readyz"}, fmt.Sprintf("HTTPS /readyz at port %d", p.number)
		} else {
			check.TcpHealthCheck = &compute.TCPHealthCheck{Port: int64(p.number)}
		}
		out = i.add(out, healthCheck+"-"+p.name, healthCheck, check.Name, "checks the "+p.serves, object{Object: infra.Object{Details: []string{details}}, want: func() any { return check }})
	}
	for _, g := range i.request.Groups {
		out = i.addTemplate(out, g, in, sub, host, image, pods)
	}
	var backends []*compute.Backend
	for _, g := range i.request.Groups {
		for n, zone := range i.zones {
			count := (g.Count + len(i.zones) - 1 - n) / len(i.zones) // the first zones have one more
			id := gcp.GroupNameIn(i.uid(), g.Name, zone)
			details := []string{"no autohealing; updates only when the operator replaces a machine"}
			if g.Role == cloud.ControlPlane { // partial URLs are not supported here
				backends = append(backends, &compute.Backend{Group: "https://www.googleapis.com/compute/v1/" + i.path("zones", zone, "instanceGroups", id), BalancingMode: "UTILIZATION"})
				details = append(details, "named ports "+portNames())
			}
			out = i.add(out, "group-"+g.Name+"-"+zone[strings.LastIndexByte(zone, '-')+1:], group, id, fmt.Sprintf("has %d of %d machines of group %s", count, g.Count, g.Name), object{
				place: zone, loose: []string{"targetSize", "instanceTemplate"}, named: g.Role == cloud.ControlPlane,
				Object: infra.Object{Details: details},
				want: func() any {
					return &compute.InstanceGroupManager{
						Name: id, Description: i.mark(), BaseInstanceName: i.baseName(g, zone), InstanceTemplate: i.path("global", "instanceTemplates", i.templateName(g)),
						TargetSize: int64(count), ForceSendFields: []string{"TargetSize"}, ListManagedInstancesResults: "PAGINATED",
						UpdatePolicy: &compute.InstanceGroupManagerUpdatePolicy{Type: "OPPORTUNISTIC", MinimalAction: "REPLACE"},
					}
				},
			})
		}
	}
	return i.addBalancer(out, in, host, backends)
}

// addBalancer adds the ports of the load balancer.
func (i *Infra) addBalancer(out []object, in, host string, backends []*compute.Backend) []object {
	for _, p := range ports {
		full := i.prefix() + "-" + p.name
		out = i.add(out, backendService+"-"+p.name, backendService, full, "distributes connections over "+p.serves, object{
			Object: infra.Object{Details: []string{fmt.Sprintf("port %s of healthy control planes; silent connections end after %d seconds", p.name, idle)}},
			want: func() any {
				return &compute.BackendService{
					Name: full, Description: i.mark(), LoadBalancingScheme: proxyScheme, Protocol: "TCP", PortName: p.name, TimeoutSec: idle, SessionAffinity: p.affinity,
					HealthChecks: []string{i.path("regions", i.region, "healthChecks", full)}, Backends: backends, ConnectionDraining: &compute.ConnectionDraining{DrainingTimeoutSec: 30},
				}
			},
		})
		out = i.add(out, targetProxy+"-"+p.name, targetProxy, full, "connects clients to "+p.serves, object{want: func() any {
			return &compute.TargetTcpProxy{Name: full, Description: i.mark(), Service: i.path("regions", i.region, "backendServices", full), ProxyHeader: "NONE"}
		}})
		out = i.add(out, forwardingRule+"-"+p.name, forwardingRule, full, "receives connections to "+p.serves+" at the address", object{
			Object: infra.Object{Details: []string{fmt.Sprintf("port %d", p.number)}},
			want: func() any {
				return &compute.ForwardingRule{
					Name: full, Description: i.mark(), LoadBalancingScheme: proxyScheme, IPProtocol: "TCP", NetworkTier: "PREMIUM", IPAddress: host, PortRange: fmt.Sprintf("%d-%d", p.number, p.number),
					Network: in, Target: i.path("regions", i.region, "targetTcpProxies", full),
				}
			},
		})
	}
	return out
}

// portNames lists the named ports of groups of control planes.
func portNames() string {
	var names []string
	for _, p := range ports {
		names = append(names, fmt.Sprintf("%s:%d", p.name, p.number))
	}
	return strings.Join(names, ", ")
}

func (i *Infra) templateName(g infra.Group) string { return i.prefix() + "-" + g.Name }

// baseName begins the names of the machines of a group. It has at most 21 characters, and differs for each zone.
func (i *Infra) baseName(g infra.Group, zone string) string {
	short := g.Name
	if g.Role == cloud.ControlPlane {
		short = "cp"
	} else if len(short) > 9 {
		sum := digest(g.Name)
		short = strings.TrimRight(short[:4], "-") + sum[:4]
	}
	return "c" + i.uid() + "-" + short + "-" + zone[strings.LastIndexByte(zone, '-')+1:]
}

func (i *Infra) addTemplate(out []object, g infra.Group, in, sub, host, image, pods string) []object {
	c, name := i.request.Config, i.prefix()
	machineType, account := cmp.Or(c.Text(WorkerMachine), DefaultMachine), c.Text(WorkerAccount)
	if g.Role == cloud.ControlPlane {
		machineType, account = cmp.Or(c.Text(ControlPlaneMachine), DefaultMachine), c.Text(ServiceAccount)
	}
	size := cmp.Or(c.Int(DiskSize), DefaultDiskSize)
	details := []string{fmt.Sprintf("%s, disk of %d GiB, image %s", machineType, size, cmp.Or(image, i.request.Image.String())), "Shielded VM: Secure Boot, virtual TPM, integrity monitoring"}
	if account != "" {
		details = append(details, "account "+account)
	}
	if c.Bool(Controller) {
		details = append(details, "kubelet with --cloud-provider=external")
	}
	if i.request.UserData != "" {
		details = append(details, "first boot: packages, units, and programs by their digests from "+c.Text(Programs))
	}
	return i.add(out, "template-"+g.Name, template, i.templateName(g), "describes the machines of group "+g.Name, object{
		Object: infra.Object{Details: details}, loose: []string{"properties.disks.initializeParams.sourceImage"},
		want: func() any {
			labels := map[string]string{gcp.LabelUID: i.uid(), gcp.LabelRole: string(g.Role)}
			p := &compute.InstanceProperties{
				MachineType: machineType, Labels: labels, Tags: &compute.Tags{Items: []string{name, name + "-" + string(g.Role)}},
				Disks: []*compute.AttachedDisk{{Boot: true, AutoDelete: true, InitializeParams: &compute.AttachedDiskInitializeParams{
					SourceImage: image, DiskSizeGb: int64(size), DiskType: "pd-balanced", Labels: map[string]string{gcp.LabelUID: i.uid()},
				}}},
				NetworkInterfaces: []*compute.NetworkInterface{{
					Network: in, Subnetwork: sub, AliasIpRanges: []*compute.AliasIpRange{{IpCidrRange: podPart, SubnetworkRangeName: pods}},
					AccessConfigs: []*compute.AccessConfig{{Name: "External NAT", Type: "ONE_TO_ONE_NAT"}},
				}},
				ShieldedInstanceConfig: &compute.ShieldedInstanceConfig{EnableSecureBoot: true, EnableVtpm: true, EnableIntegrityMonitoring: true},
				Metadata:               &compute.Metadata{},
			}
			items := [][2]string{
				{gcp.LabelUID, i.uid()},
				{gcp.LabelRole, string(g.Role)},
				{gcp.AttributeLoadBalancer, host},
				{gcp.AttributeInitSecretHash, hex.EncodeToString(i.request.InitSecretHash)},
				{gcp.AttributeZones, strings.Join(i.zones, " ")},
				{"block-project-ssh-keys", strconv.FormatBool(len(c.List(SSHFrom)) == 0)},
			}
			if c.Bool(Controller) {
				items = append(items, [2]string{gcp.AttributeCloudProvider, gcp.External})
			}
			if i.request.UserData != "" {
				items = append(items, [2]string{"user-data", i.request.UserData}, [2]string{"startup-script", i.request.BootScript})
			}
			for _, item := range items {
				p.Metadata.Items = append(p.Metadata.Items, &compute.MetadataItems{Key: item[0], Value: &item[1]})
			}
			if account != "" {
				p.ServiceAccounts = []*compute.ServiceAccount{{Email: account, Scopes: []string{"https://www.googleapis.com/auth/compute"}}}
			}
			return &compute.InstanceTemplate{Name: i.templateName(g), Description: i.mark(), Properties: p}
		},
	})
}

// pages are the parts of addresses of Google's console, by kind. Other kinds have no page of their own.
var pages = map[string]string{network: "networking/networks/details/", template: "compute/instanceTemplates/details/", subnetwork: "networking/subnetworks/details/", group: "compute/instanceGroups/details/"}

// link returns the page of an object in Google's console; empty if it has none.
func (i *Infra) link(o *object) string {
	page, ok := pages[o.kind.id]
	if !ok {
		return ""
	}
	if o.place != "" {
		page += o.place + "/"
	}
	return "https://console.cloud.google.com/" + page + o.Name + "?project=" + i.project
}

// judge sets the state of an object by what the cloud listed of its kind and place.
func (o *object) judge(i *Infra, listed []found) {
	n := slices.IndexFunc(listed, func(f found) bool { return f.name == o.Name })
	switch {
	case o.own && n < 0:
		o.State = infra.Wrong
	case o.own:
		o.State = infra.Own
	case n < 0:
		o.State = infra.Absent
	case !i.bears(listed[n]):
		o.State = infra.Taken
	case o.kind.label != nil && listed[n].labels[gcp.LabelUID] == "":
		o.State, o.Differences = infra.Absent, []string{"it exists without its label"}
	case o.unnamed(listed[n]):
		o.State, o.Differences = infra.Absent, []string{"it exists without its named ports"}
	default:
		o.State = infra.Exists
		if o.Differences = o.compare(listed[n]); len(o.Differences) > 0 {
			o.State = infra.Differs
		}
	}
}

// compare returns the fields in which an object is not as it would be made.
func (o *object) compare(f found) (out []string) {
	b, err := json.Marshal(o.want())
	if err != nil {
		return []string{err.Error()}
	}
	want := map[string]any{}
	d := json.NewDecoder(strings.NewReader(string(b)))
	d.UseNumber()
	if err := d.Decode(&want); err != nil {
		return []string{err.Error()}
	}
	delete(want, "description") // it bears the UID
	differs(want, f.fields, "", o.loose, &out)
	slices.Sort(out)
	return out
}

// differs appends the fields of want that have has not. Fields that want lacks are the server's. Lists have the same
// entries in any order.
func differs(want, have any, at string, loose []string, out *[]string) {
	if slices.Contains(loose, at) {
		return
	}
	switch w := want.(type) {
	case map[string]any:
		h, _ := have.(map[string]any)
		for name, x := range w {
			differs(x, h[name], strings.TrimPrefix(at+"."+name, "."), loose, out)
		}
	case []any:
		h, _ := have.([]any)
		in := func(x any, l []any, wanted bool) bool {
			return slices.ContainsFunc(l, func(y any) bool {
				var diff []string
				if wanted {
					differs(x, y, at, loose, &diff)
				} else {
					differs(y, x, at, loose, &diff)
				}
				return len(diff) == 0
			})
		}
		for _, x := range w {
			if !in(x, h, true) {
				*out = append(*out, at+" lacks "+text(x))
			}
		}
		for _, x := range h {
			if !in(x, w, false) {
				*out = append(*out, at+" has "+text(x))
			}
		}
	default:
		if a, b := plain(want), plain(have); a != b {
			*out = append(*out, fmt.Sprintf("%s is %s, want %s", at, cmp.Or(b, "not set"), a))
		}
	}
}

// plain writes a value so that equal ones are the same text: URLs without their host, absent values as zero ones.
func plain(v any) string {
	s := fmt.Sprint(v)
	if n := strings.Index(s, "projects/"); n >= 0 {
		s = s[n:]
	}
	switch s {
	case "<nil>", "false", "0":
		return ""
	}
	return s
}

func text(v any) string {
	b, err := json.Marshal(v)
	if err != nil || v == nil {
		return "not set"
	}
	if len(b) > 200 { // user data
		return string(b[:200]) + "…"
	}
	return string(b)
}
