// Package infra makes the infrastructure of a cluster in Google Cloud, and deletes it: network, firewall, load balancer
// of the API servers, instance templates and managed instance groups. It implements [constellation/engine/infra.Cloud].
//
// Only the console links it. Requests, errors and rate limits are those of package api. It was run against the
// emulator of package gcptest alone, never against Google.
//
// # Whose an object is
//
// Each object has "constellation-uid=UID" in its description, and the label constellation-uid where objects of its
// kind have labels. Nothing else is changed or deleted. Names follow from the UID. So a repeated creation is refused
// by the cloud, and never makes a second object.
//
// # Why the load balancer is a proxy
//
// A machine behind a passthrough load balancer reaches itself at the address of the load balancer: Google's guest agent
// gives the address to the machine. kubeadm takes the address for every request of a join until the API server of the
// joining control plane runs. So only the first control plane could exist. These ways out were weighed:
//
//   - A regional external proxy load balancer. Nothing on machines differs, each port has a health check of its own, and
//     machines accept connections from its proxies alone. Its price: machines see addresses of proxies instead of those
//     of clients, and proxies cost money. This is what the package makes.
//   - A global external proxy. Its connections end outside of the region, and it needs the premium tier.
//   - haproxy on each machine. It is one more program to install, to update and to measure, and a list of control planes
//     that each machine has to keep.
//   - An address of one API server in the join ticket, with an entry in /etc/hosts or a rule of nftables during a join. It
//     changes the machine while kubeadm runs, has to be undone after every crash, and needs a name in certificates where
//     we have an address. A control plane whose own API server is down still would reach no other.
//
// Attested TLS ends at the machines, and its evidence is bound to the TLS session, not to addresses. These parts use the
// client's address: shares of handshakes and of quotes (package atls), the limit of wrong init secrets, and the filter of
// revoked machines in the join service. Behind the proxies, callers share the few addresses of the subnetwork of proxies.
// Revoked machines are still refused their ticket by name.
package infra

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"sync"

	"constellation/engine/cloud"
	"constellation/engine/cloud/gcp"
	"constellation/engine/cloud/gcp/api"
	"constellation/engine/cloud/section"
	"constellation/engine/infra"
	"constellation/engine/plan"
	"constellation/engine/version"
)

// Fields of the section of a configuration.
const (
	Project             = "project"
	Zones               = "zones"
	Network             = "network"
	Subnetwork          = "subnetwork"
	Address             = "address"
	ControlPlaneMachine = "controlPlaneMachineType"
	WorkerMachine       = "workerMachineType"
	DiskSize            = "diskGiB"
	ServiceAccount      = "serviceAccount"
	WorkerAccount       = "workerServiceAccount"
	SSHFrom             = "sshFrom"
	NodeCIDR            = "nodeCIDR"
	ProxyCIDR           = "proxyCIDR"
	Controller          = "cloudControllerManager"
	Disks               = "persistentDisksChart"
	Images              = "images"
	Programs            = "programs"
	Proxy               = "proxy"
)

// Defaults of these fields.
const (
	DefaultMachine  = "e2-standard-2"
	DefaultDiskSize = 30
	DefaultNodeCIDR = "10.128.0.0/20"
	// DefaultProxyCIDR has the size that Google recommends.
	DefaultProxyCIDR = "10.128.16.0/23"
)

// podRange is the name of the range of pods in a subnetwork of ours. Each machine gets a part of podPart.
const (
	podRange = "pods"
	podPart  = "/24"
)

// Vendor is the entry of Google Cloud.
var Vendor = infra.Vendor{
	Open: open, Roles: Roles, Stock: stock,
	Note: "This was run against an emulator of Google Cloud alone, never against Google. Use a project of its own, and look at its bill.",
}

func open(ctx context.Context, r infra.Request) (infra.Cloud, error) {
	return New(ctx, r, gcp.Options{})
}

// Infra implements infra.Cloud. It is safe for concurrent use.
type Infra struct {
	request infra.Request
	project string
	region  string
	zones   []string // of the configuration
	all     []string // with those that the state has
	client  *api.Client
	cloud   *gcp.Cloud // nil without a UID

	mu    sync.Mutex
	image string       // reference, as Look found it
	host  string       // of the load balancer
	nodes netip.Prefix // of the subnetwork
	pods  string       // name of the range of pods
	// proxies is the range of the load balancer's proxies. ownProxies is the name of a subnetwork that the network
	// already has for them; empty: it has none.
	proxies    netip.Prefix
	ownProxies string
}

// New returns the infrastructure of a cluster. It sends nothing yet. Of the options, only HTTP and Endpoint count.
func New(ctx context.Context, r infra.Request, o gcp.Options) (*Infra, error) {
	i := &Infra{request: r, project: cmp.Or(r.Known.Text(Project), r.Config.Text(Project)), zones: r.Config.List(Zones), pods: podRange}
	if len(i.zones) == 0 { // to terminate, no configuration is needed
		i.zones = r.Known.List(Zones)
	}
	if i.project == "" || len(i.zones) == 0 {
		return nil, errors.New("open Google Cloud: project or zones are missing")
	}
	if r.UID != "" && !uidRE.MatchString(r.UID) {
		return nil, &plan.Error{Op: "open Google Cloud", Err: fmt.Errorf("the UID %q is not one of `infra create`: want 8 hexadecimal digits", r.UID), Exit: plan.ExitUsage, Remedy: "use another folder for machines that this program makes; it does not take over others"}
	}
	i.region = regionOf(append(slices.Clone(r.Known.List(Zones)), i.zones...)[0])
	i.all = slices.Compact(slices.Sorted(slices.Values(slices.Concat(i.zones, r.Known.List(Zones)))))
	i.nodes, _ = netip.ParsePrefix(cmp.Or(r.Config.Text(NodeCIDR), DefaultNodeCIDR)) // the schema has checked it
	i.proxies, _ = netip.ParsePrefix(cmp.Or(r.Config.Text(ProxyCIDR), DefaultProxyCIDR))
	var err error
	if i.client, err = api.Dial(ctx, o.Endpoint, o.HTTP); err != nil {
		return nil, explain(err)
	}
	if r.UID != "" {
		i.cloud, err = gcp.New(ctx, gcp.Options{Project: i.project, UID: r.UID, Zones: i.all, Endpoint: o.Endpoint, HTTP: o.HTTP})
	}
	return i, err
}

var uidRE = regexp.MustCompile(`^[0-9a-f]{8}$`)

// regionOf returns the region of a zone.
func regionOf(zone string) string { return zone[:max(0, strings.LastIndexByte(zone, '-'))] }

// prefix begins the names of all objects.
func (i *Infra) prefix() string { return "constellation-" + i.uid() }

// uid stands for the UID that is not chosen yet.
func (i *Infra) uid() string { return cmp.Or(i.request.UID, "UID") }

// mark is the description of all objects.
func (i *Infra) mark() string {
	return "constellation-uid=" + i.uid() + " cluster=" + i.request.Cluster
}

// bears reports whether an object bears the UID.
func (i *Infra) bears(o found) bool {
	uid := i.request.UID
	return uid != "" && (slices.Contains(strings.Fields(o.description), "constellation-uid="+uid) || o.labels[gcp.LabelUID] == uid)
}

// explain returns an error with a remedy for a person at this computer.
func explain(err error) error {
	e, ok := errors.AsType[*api.Error](err)
	switch {
	case ok:
	case errors.Is(err, cloud.ErrUnavailable) && plan.Remedy(err) == "": // no answer of the API, or of what has the credentials
		return &plan.Error{Op: "use Google Cloud", Err: err, Remedy: "check the network; to have credentials, " + api.NoCredentials}
	default:
		return err
	}
	out := &plan.Error{Op: e.Op, Err: err, Remedy: e.Remedy}
	short := *e
	short.Op, short.Remedy = "", ""
	out.Err = trimmed{strings.TrimPrefix(short.Error(), ": "), err}
	if e.Permission != "" {
		out.Remedy = "grant " + e.Permission + " to your account; `constellation infra plan --print-role` prints the least role"
	}
	return out
}

// trimmed is an error whose text leaves out what another part of the message has.
type trimmed struct {
	text string
	err  error
}

func (t trimmed) Error() string { return t.text }

func (t trimmed) Unwrap() error { return t.err }

// Look implements infra.Cloud.
func (i *Infra) Look(ctx context.Context) ([]infra.Object, []plan.Finding, error) {
	findings := i.check()
	seen, denied := map[string][]found{}, map[string]bool{}
	for _, k := range kinds {
		if k.id == machine {
			continue
		}
		for _, place := range i.places(k) {
			l, err := i.list(ctx, k, place)
			if f, ok := missingRight(err); ok {
				denied[k.id] = true
				findings = appendNew(findings, f)
				continue
			}
			if err != nil {
				return nil, findings, explain(err)
			}
			seen[k.id+place] = l
		}
	}
	more, err := i.prerequisites(ctx)
	for _, f := range more {
		findings = appendNew(findings, f)
	}
	if err != nil {
		return nil, findings, explain(err)
	}
	findings = append(findings, i.own(seen, denied)...)
	findings = append(findings, i.checkProxies(seen)...)
	for _, f := range seen[forwardingRule+i.region] {
		if f.name == i.prefix() && i.bears(f) {
			b := blocked("", "the load balancer is one of an earlier version", f.name+" passes connections through, so control planes cannot join", "run `constellation infra terminate`, then `constellation infra create`")
			b.ID = "infra-earlier"
			findings = append(findings, b)
		}
	}
	i.takeHost(seen[address+i.region])
	var out []infra.Object
	for _, o := range i.objects() {
		if denied[o.kind.id] {
			o.State = infra.Unknown
		} else {
			o.judge(i, seen[o.kind.id+o.place])
			if o.State != infra.Absent && o.State != infra.Wrong {
				o.Link = i.link(&o)
			}
		}
		out = append(out, o.Object)
	}
	return out, append(findings, infra.Findings(out)...), nil
}

// appendNew appends a finding, unless there is one of its title.
func appendNew(list []plan.Finding, f plan.Finding) []plan.Finding {
	if slices.ContainsFunc(list, func(x plan.Finding) bool { return x.Title == f.Title }) {
		return list
	}
	return append(list, f)
}

// missingRight returns the finding of an error about a missing permission.
func missingRight(err error) (plan.Finding, bool) {
	e, ok := errors.AsType[*api.Error](err)
	if !ok || e.Permission == "" {
		return plan.Finding{}, false
	}
	return plan.Finding{
		ID: infra.FindingRight, Severity: plan.Block, Title: "the permission " + e.Permission + " is missing", Detail: e.Message, Source: "infrastructure",
		Remedy: "grant it to your account; `constellation infra plan --print-role` prints the least role",
	}, true
}

func blocked(field, title, detail, remedy string) plan.Finding {
	f := plan.Finding{ID: "infra-" + kebab(field), Severity: plan.Block, Title: title, Detail: detail, Remedy: remedy, Source: "infrastructure"}
	if field != "" {
		f.Field = "provider." + gcp.Name + "." + field
	}
	return f
}

var capital = regexp.MustCompile(`[A-Z]+`)

// kebab writes camelCase in kebab case.
func kebab(s string) string {
	return capital.ReplaceAllStringFunc(s, func(x string) string { return "-" + strings.ToLower(x) })
}

// check returns what is wrong with the configuration by itself.
func (i *Infra) check() (out []plan.Finding) {
	for _, zone := range i.zones {
		if regionOf(zone) != i.region {
			out = append(out, blocked(Zones, fmt.Sprintf("zone %s is not in region %s", zone, i.region), "the load balancer and the subnetwork are of one region", "name zones of that region"))
		}
	}
	if known := i.request.Known.List(Zones); len(known) > 0 && !slices.Equal(slices.Sorted(slices.Values(known)), slices.Sorted(slices.Values(i.zones))) {
		out = append(out, blocked(Zones, fmt.Sprintf("zones are %s, and were %s when create began", strings.Join(i.zones, ", "), strings.Join(known, ", ")), "machines and load balancer have the first ones", "write these again, or run `constellation infra terminate` and create again"))
	}
	for _, a := range [][3]string{{ServiceAccount, "control planes", "control-plane"}, {WorkerAccount, "workers", "worker"}} {
		if i.request.Config.Text(a[0]) == "" {
			out = append(out, blocked(a[0], "no service account of "+a[1]+" is configured", "they read machines of the cluster with it",
				"make one, and write its address into the configuration; `constellation infra plan --print-role="+a[2]+"` prints the commands"))
		}
	}
	if one := i.request.Config.Text(ServiceAccount); one != "" && one == i.request.Config.Text(WorkerAccount) {
		out = append(out, blocked(WorkerAccount, "control planes and workers have one service account", "workers would have the right to replace machines", "make an account of workers"))
	}
	if stockImage(i.request.Config, i.request.Image) != "" && i.request.Config.Text(Programs) == "" {
		out = append(out, blocked(Programs, "no address of programs is configured", "machines with a stock image fetch bootstrapper and agent from it at their first boot",
			"upload the folders linux_amd64 and linux_arm64 of the release, and write the address of the folder with them into the configuration"))
	}
	if own := i.request.Config; (own.Text(Network) == "") != (own.Text(Subnetwork) == "") {
		out = append(out, blocked(Subnetwork, "network and subnetwork belong together", "one of them is configured alone", "name both, or none"))
	}
	for _, g := range i.request.Groups {
		if n := 63 - len(gcp.GroupNameIn("00000000", "", "x-y")); len(g.Name) > n {
			f := blocked("", fmt.Sprintf("the name of group %s has %d characters, and names in the cloud have room for %d", g.Name, len(g.Name), n), "", "choose a shorter name")
			f.ID, f.Field = "infra-group-name", "nodeGroups."+g.Name
			out = append(out, f)
		}
	}
	if i.request.Config.Text(Subnetwork) == "" {
		for what, r := range map[string]netip.Prefix{"podCIDR": i.request.PodCIDR, "serviceCIDR": i.request.ServiceCIDR} {
			if r.IsValid() && r.Overlaps(i.nodes) {
				out = append(out, blocked(NodeCIDR, fmt.Sprintf("the range of machines %s overlaps %s %s", i.nodes, what, r), "", "set "+NodeCIDR+" to another range"))
			}
		}
	}
	return out
}

// checkProxies uses the proxy-only subnetwork of a network of the user, and returns what is wrong with the
// range of ours.
func (i *Infra) checkProxies(seen map[string][]found) (out []plan.Finding) {
	i.mu.Lock()
	defer i.mu.Unlock()
	taken := [][2]string{{"podCIDR", i.request.PodCIDR.String()}, {"serviceCIDR", i.request.ServiceCIDR.String()}}
	own := i.request.Config.Text(Network)
	if own == "" {
		taken = append(taken, [2]string{NodeCIDR, i.nodes.String()})
	}
	i.ownProxies = ""
	for _, s := range seen[subnetwork+i.region] {
		if own == "" || last(fmt.Sprint(s.fields["network"])) != own || i.bears(s) {
			continue
		}
		r := fmt.Sprint(s.fields["ipCidrRange"])
		if s.fields["purpose"] == proxyPurpose && s.fields["role"] == proxyRole {
			if p, err := netip.ParsePrefix(r); err == nil {
				i.ownProxies, i.proxies = s.name, p
				return nil
			}
		}
		taken = append(taken, [2]string{"subnetwork " + s.name, r})
	}
	for _, t := range taken {
		if p, err := netip.ParsePrefix(t[1]); err == nil && p.Overlaps(i.proxies) {
			out = append(out, blocked(ProxyCIDR, fmt.Sprintf("the range of proxies %s overlaps %s %s", i.proxies, t[0], p), "the load balancer's proxies need addresses of their own", "set "+ProxyCIDR+" to another range"))
		}
	}
	return out
}

// prerequisites looks up what create needs and does not make: the image, and machine types.
func (i *Infra) prerequisites(ctx context.Context) (out []plan.Finding, err error) {
	right := func(err error) error {
		if f, ok := missingRight(err); ok {
			out = append(out, f)
			return nil
		}
		return err
	}
	images, err := i.images(ctx)
	if err := right(err); err != nil {
		return out, err
	}
	stock := stockImage(i.request.Config, i.request.Image)
	switch {
	case err != nil:
	case len(images) == 0 && stock != "":
		f := blocked(Images, "there is no image "+stock, "it does not exist, or new machines may not use it any more", "name a present one: `gcloud compute images list`")
		f.ID = "infra-image"
		out = append(out, f)
	case len(images) == 0:
		f := blocked("", fmt.Sprintf("project %s has no image %s", i.project, i.request.Image), "no image that is ready has the label "+gcp.LabelVersion+"="+versionLabel(i.request.Image.String()), "import the image with that label, or write another image into the configuration")
		f.ID, f.Field = "infra-image", "image"
		out = append(out, f)
	case len(images) > 1:
		f := blocked("", fmt.Sprintf("project %s has %d images %s", i.project, len(images), i.request.Image), strings.Join(images, "\n"), "remove the label "+gcp.LabelVersion+" from all but one")
		f.ID, f.Field = "infra-image", "image"
		out = append(out, f)
	default:
		i.mu.Lock()
		i.image = images[0]
		i.mu.Unlock()
	}
	asked := map[string]bool{}
	for _, field := range []string{ControlPlaneMachine, WorkerMachine} {
		for _, zone := range i.zones {
			name := cmp.Or(i.request.Config.Text(field), DefaultMachine)
			if asked[zone+name] {
				continue
			}
			asked[zone+name] = true
			err := i.patiently(ctx, nil, func() error {
				return i.client.Read(ctx, "read machine type "+name+" of zone "+zone, func() error {
					_, err := i.client.API.MachineTypes.Get(i.project, zone, name).Fields("name").Context(ctx).Do()
					return err
				})
			})
			if errors.Is(err, cloud.ErrNotFound) {
				out = append(out, blocked(field, fmt.Sprintf("zone %s has no machine type %s", zone, name), "", fmt.Sprintf("choose another one: `gcloud compute machine-types list --project=%s --zones=%s`", i.project, zone)))
				continue
			}
			if err := right(err); err != nil {
				return out, err
			}
		}
	}
	return out, nil
}

// stockImage returns the reference of the stock image that a configuration names for a version; empty: none.
func stockImage(config section.Values, v version.Version) string {
	for _, entry := range config.List(Images) {
		if name, ref, ok := strings.Cut(entry, "="); ok && name == v.String() {
			return ref
		}
	}
	return ""
}

// stock implements infra.Vendor.
func stock(config section.Values, v version.Version) (infra.Stock, bool) {
	if stockImage(config, v) == "" {
		return infra.Stock{}, false
	}
	return infra.Stock{
		Programs: config.Text(Programs), Proxy: config.Text(Proxy), Direct: []string{"metadata.google.internal", cmp.Or(config.Text(NodeCIDR), DefaultNodeCIDR)},
		// Google's agent would otherwise claim the range of pods for the machine itself.
		Files:  []infra.StockFile{{Path: "/etc/default/instance_configs.cfg", Text: "[IpForwarding]\nip_aliases = false\n"}},
		Reread: []string{"google-guest-agent*.service"},
	}, true
}

// public returns the reference of a stock image if new machines can use it.
func (i *Infra) public(ctx context.Context, ref string) (out []string, err error) {
	project, name, _ := strings.Cut(strings.TrimPrefix(ref, "projects/"), "/global/images/")
	err = i.patiently(ctx, nil, func() error {
		out = nil
		return i.client.List(ctx, "read image "+ref, func(token string) (string, error) {
			page, err := i.client.API.Images.List(project).Filter(fmt.Sprintf("name = %q", name)).MaxResults(pageSize).PageToken(token).Fields("nextPageToken,items(name,status,deprecated)").Context(ctx).Do()
			if err != nil {
				return "", err
			}
			for _, img := range page.Items {
				if img.Status == "READY" && (img.Deprecated == nil || img.Deprecated.State == "" || img.Deprecated.State == "ACTIVE" || img.Deprecated.State == "DEPRECATED") {
					out = append(out, ref)
				}
			}
			return page.NextPageToken, nil
		})
	})
	if errors.Is(err, cloud.ErrNotFound) { // the project
		return nil, nil
	}
	return out, err
}

func versionLabel(v string) string { return strings.ReplaceAll(v, ".", "-") }

// images returns the references of the images of the configured version.
func (i *Infra) images(ctx context.Context) (out []string, err error) {
	if ref := stockImage(i.request.Config, i.request.Image); ref != "" {
		return i.public(ctx, ref)
	}
	err = i.patiently(ctx, nil, func() error {
		out = nil
		return i.client.List(ctx, "list images of project "+i.project, func(token string) (string, error) {
			page, err := i.client.API.Images.List(i.project).Filter("labels." + gcp.LabelVersion + ":*").MaxResults(pageSize).PageToken(token).Fields("nextPageToken,items(name,labels,status)").Context(ctx).Do()
			if err != nil {
				return "", err
			}
			for _, img := range page.Items {
				if img.Status == "READY" && img.Labels[gcp.LabelVersion] == versionLabel(i.request.Image.String()) {
					out = append(out, "projects/"+i.project+"/global/images/"+img.Name)
				}
			}
			return page.NextPageToken, nil
		})
	})
	return out, err
}

// own checks the objects that the configuration names, and takes over what the others need of them.
func (i *Infra) own(seen map[string][]found, denied map[string]bool) (out []plan.Finding) {
	c := i.request.Config
	bad := func(field, title, detail, remedy string) {
		f := blocked(field, title, detail, remedy)
		f.ID = infra.FindingOwn
		out = append(out, f)
	}
	absent := func(field, kind, list, id, place string) *found {
		name := c.Text(field)
		if name == "" || denied[id] {
			return nil
		}
		for n, o := range seen[id+place] {
			if o.name == name {
				return &seen[id+place][n]
			}
		}
		where := "project " + i.project
		if place != "" {
			where = place + " of " + where
		}
		bad(field, fmt.Sprintf("%s %s does not exist", kind, name), "it is not in "+where, fmt.Sprintf("correct its name: `gcloud compute %s list --project=%s`", list, i.project))
		return nil
	}
	absent(Network, "network", "networks", network, "")
	if s := absent(Subnetwork, "subnetwork", "networks subnets", subnetwork, i.region); s != nil {
		if got := last(fmt.Sprint(s.fields["network"])); c.Text(Network) != "" && got != c.Text(Network) {
			bad(Subnetwork, fmt.Sprintf("subnetwork %s is not of network %s", s.name, c.Text(Network)), "it is of network "+got, "name a subnetwork of the network")
		}
		nodes, err := netip.ParsePrefix(fmt.Sprint(s.fields["ipCidrRange"]))
		pods := ""
		ranges, _ := s.fields["secondaryIpRanges"].([]any)
		for _, r := range ranges {
			if f, ok := r.(map[string]any); ok && f["ipCidrRange"] == i.request.PodCIDR.String() {
				pods, _ = f["rangeName"].(string)
			}
		}
		switch {
		case err != nil:
			bad(Subnetwork, "subnetwork "+s.name+" has no range of addresses", err.Error(), "name another subnetwork")
		case pods == "":
			bad(Subnetwork, fmt.Sprintf("subnetwork %s has no secondary range %s", s.name, i.request.PodCIDR), "machines get their part of podCIDR from it",
				fmt.Sprintf("run `gcloud compute networks subnets update %s --project=%s --region=%s --add-secondary-ranges=%s=%s`, or set podCIDR to a range that it has", s.name, i.project, i.region, podRange, i.request.PodCIDR))
		default:
			i.mu.Lock()
			i.nodes, i.pods = nodes, pods
			i.mu.Unlock()
		}
	}
	if a := absent(Address, "address", "addresses", address, i.region); a != nil {
		users, _ := a.fields["users"].([]any)
		used := slices.ContainsFunc(users, func(u any) bool { return !strings.HasPrefix(last(fmt.Sprint(u)), i.prefix()) })
		switch {
		case a.fields["addressType"] != "EXTERNAL":
			bad(Address, "address "+a.name+" is not external", "the load balancer is reached from your computer", "reserve an external address of region "+i.region)
		case used:
			bad(Address, "address "+a.name+" is in use", fmt.Sprintf("%v use it", users), "name an address that nothing uses")
		}
	}
	return out
}

// last returns the last segment of a URL.
func last(url string) string { return url[strings.LastIndexByte(url, '/')+1:] }

// Running implements infra.Cloud.
func (i *Infra) Running(ctx context.Context) (running, want int, why string, err error) {
	if i.cloud == nil {
		return 0, 1, "", nil
	}
	var groups []cloud.Group
	var machines []cloud.Instance
	if err := i.patiently(ctx, nil, func() (err error) {
		if groups, err = i.cloud.Groups(ctx); err == nil {
			machines, err = i.cloud.Instances(ctx)
		}
		return err
	}); err != nil {
		return 0, 0, "", explain(err)
	}
	for _, g := range groups {
		want += g.Count
	}
	for _, m := range machines {
		switch {
		case m.State == cloud.Ready:
			running++
		case m.Message != "":
			_, zone, _, _ := gcp.ParseProviderID(m.ProviderID)
			why = "zone " + zone + ": " + m.Message
		}
	}
	return running, max(want, i.wanted()), why, nil
}

// wanted is 1 until the groups exist: their sizes are then what counts.
func (i *Infra) wanted() int {
	for _, g := range i.request.Groups {
		if g.Count > 0 {
			return 1
		}
	}
	return 0
}

// Outcome implements infra.Cloud.
func (i *Infra) Outcome(ctx context.Context) (infra.Outcome, error) {
	objects, findings, err := i.Look(ctx)
	if err != nil {
		return infra.Outcome{}, err
	}
	for _, f := range findings {
		if f.Severity == plan.Block {
			return infra.Outcome{}, &plan.Error{Op: "describe the infrastructure", Err: errors.New(f.Title), Remedy: f.Remedy}
		}
	}
	for _, o := range objects {
		if !o.There() {
			return infra.Outcome{}, &plan.Error{Op: "describe the infrastructure", Err: fmt.Errorf("%s does not exist", o), Remedy: "run `constellation infra create`"}
		}
	}
	host, err := i.balancer(ctx)
	if err != nil {
		return infra.Outcome{}, err
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	return infra.Outcome{Host: host, NodeCIDR: i.nodes, Section: section.Values{Project: i.project, Zones: i.zones, "uid": i.request.UID}}, nil
}
