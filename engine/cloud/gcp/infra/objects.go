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

// healthSources are the addresses from which Google checks the health of machines behind a passthrough load balancer:
// https://cloud.google.com/load-balancing/docs/health-check-concepts.
var healthSources = []string{"35.191.0.0/16", "209.85.152.0/22", "209.85.204.0/22"}

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
	nodes, host, image, pods := i.nodes, i.host, i.image, i.pods
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
	rule := func(id, purpose string, from []string, tag string, allowed *compute.FirewallAllowed) {
		ports := allowed.IPProtocol
		if len(allowed.Ports) > 0 {
			ports += " " + strings.Join(allowed.Ports, ", ")
		}
		out = i.add(out, "firewall-"+id, firewall, name+"-"+id, purpose, object{
			Object: infra.Object{Details: []string{"from " + strings.Join(from, ", "), "to machines with the tag " + tag, ports}},
			want: func() any {
				return &compute.Firewall{
					Name: name + "-" + id, Description: i.mark(), Network: in, Direction: "INGRESS", SourceRanges: from, TargetTags: []string{tag}, Allowed: []*compute.FirewallAllowed{allowed},
				}
			},
		})
	}
	control := name + "-" + string(cloud.ControlPlane)
	api, initial, join := strconv.Itoa(infra.APIPort), strconv.Itoa(infra.InitPort), strconv.Itoa(infra.JoinPort)
	rule("internal", "lets machines and pods reach each other", []string{nodes.String(), i.request.PodCIDR.String()}, name, &compute.FirewallAllowed{IPProtocol: "all"})
	rule("health", "lets Google check the health of API servers", healthSources, control, &compute.FirewallAllowed{IPProtocol: "tcp", Ports: []string{api}})
	rule("balancer", "lets everybody reach API servers, bootstrappers and join services", []string{"0.0.0.0/0"}, control, &compute.FirewallAllowed{IPProtocol: "tcp", Ports: []string{api, initial, join}})
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
	out = i.add(out, healthCheck, healthCheck, name, "checks the API servers", object{
		Object: infra.Object{Details: []string{fmt.Sprintf("HTTPS /readyz at port %d", infra.APIPort)}},
		want: func() any {
			return &compute.HealthCheck{
				Name: name, Description: i.mark(), Type: "HTTPS", CheckIntervalSec: 5, TimeoutSec: 5, HealthyThreshold: 1, UnhealthyThreshold: 2,
				HttpsHealthCheck: &compute.HTTPSHealthCheck{Port: infra.APIPort, RequestPath: "/readyz"},
			}
		},
	})
	for _, g := range i.request.Groups {
		out = i.addTemplate(out, g, in, sub, host, image, pods)
	}
	var backends []*compute.Backend
	for _, g := range i.request.Groups {
		for n, zone := range i.zones {
			count := (g.Count + len(i.zones) - 1 - n) / len(i.zones) // the first zones have one more
			id := gcp.GroupNameIn(i.uid(), g.Name, zone)
			if g.Role == cloud.ControlPlane {
				backends = append(backends, &compute.Backend{Group: i.path("zones", zone, "instanceGroups", id), BalancingMode: "CONNECTION"})
			}
			out = i.add(out, "group-"+g.Name+"-"+zone[strings.LastIndexByte(zone, '-')+1:], group, id, fmt.Sprintf("has %d of %d machines of group %s", count, g.Count, g.Name), object{
				place: zone, loose: []string{"targetSize", "instanceTemplate"},
				Object: infra.Object{Details: []string{"no autohealing; updates only when the operator replaces a machine"}},
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
	out = i.add(out, backendService, backendService, name, "distributes connections over control planes", object{
		Object: infra.Object{Details: []string{"connections of a client reach the same machine"}},
		want: func() any {
			return &compute.BackendService{
				Name: name, Description: i.mark(), LoadBalancingScheme: "EXTERNAL", Protocol: "TCP", SessionAffinity: "CLIENT_IP",
				HealthChecks: []string{i.path("regions", i.region, "healthChecks", name)}, Backends: backends, ConnectionDraining: &compute.ConnectionDraining{DrainingTimeoutSec: 30},
			}
		},
	})
	return i.add(out, forwardingRule, forwardingRule, name, "receives connections at the address", object{
		Object: infra.Object{Details: []string{"ports " + strings.Join([]string{api, initial, join}, ", ")}},
		want: func() any {
			return &compute.ForwardingRule{
				Name: name, Description: i.mark(), LoadBalancingScheme: "EXTERNAL", IPProtocol: "TCP", NetworkTier: "PREMIUM", IPAddress: host, Ports: []string{api, initial, join},
				BackendService: i.path("regions", i.region, "backendServices", name),
			}
		},
	})
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
			for _, item := range [][2]string{
				{gcp.LabelUID, i.uid()},
				{gcp.LabelRole, string(g.Role)},
				{gcp.AttributeLoadBalancer, host},
				{gcp.AttributeInitSecretHash, hex.EncodeToString(i.request.InitSecretHash)},
				{gcp.AttributeZones, strings.Join(i.zones, " ")},
				{"block-project-ssh-keys", strconv.FormatBool(len(c.List(SSHFrom)) == 0)},
			} {
				p.Metadata.Items = append(p.Metadata.Items, &compute.MetadataItems{Key: item[0], Value: &item[1]})
			}
			if account != "" {
				p.ServiceAccounts = []*compute.ServiceAccount{{Email: account, Scopes: []string{"https://www.googleapis.com/auth/compute"}}}
			}
			return &compute.InstanceTemplate{Name: i.templateName(g), Description: i.mark(), Properties: p}
		},
	})
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
	return string(b)
}
