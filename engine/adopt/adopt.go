// Package adopt answers: what is a cluster that plain kubeadm made, what would adopting it do, and
// what stands in the way?
//
// [Examine] makes a [Report] of observed [Facts]. It is a pure function: it reads no file and sends
// no request. Package engine/kube observes the facts, package workspace writes the files.
package adopt

import (
	"cmp"
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"time"

	"gopkg.in/yaml.v3"

	"constellation/engine/cloud"
	"constellation/engine/cloud/machines"
	"constellation/engine/distribution"
	"constellation/engine/plan"
	"constellation/engine/version"
	"constellation/engine/words"
)

// Facts are what the API of a cluster shows. What could not be read is in Unread.
type Facts struct {
	// UID is that of the namespace kube-system, which no other cluster has.
	UID string
	// Unread maps what could not be read to the reason.
	Unread map[Part]string
	Nodes  []Node
	// Config is the ClusterConfiguration of kubeadm, as YAML; empty if the cluster has none.
	Config     string
	StaticPods []StaticPod
	// Network are the network plugins, AddOns the other add-ons that were recognised.
	Network, AddOns []AddOn
	Certificates    []Certificate
	Tokens          []Token
}

// Part is a part of the facts.
type Part string

// Parts that can be unread.
const (
	PartIdentity Part = "the namespace kube-system"
	PartNodes    Part = "nodes"
	PartConfig   Part = "the ConfigMap kubeadm-config"
	PartPods     Part = "pods"
	PartAddOns   Part = "add-ons"
	PartServers  Part = "certificates of the API servers"
	PartTokens   Part = "bootstrap tokens"
)

// Node is a node of the cluster.
type Node struct {
	Name        string     `json:"name"`
	Address     string     `json:"address,omitempty"` // InternalIP; empty if the node reports none
	Role        cloud.Role `json:"role"`
	Kubernetes  string     `json:"kubernetes"` // of the kubelet
	Runtime     string     `json:"runtime,omitempty"`
	OS          string     `json:"os,omitempty"`
	Ready       bool       `json:"ready"`
	Unscheduled bool       `json:"cordoned,omitempty"`
	ProviderID  string     `json:"providerID,omitempty"`
}

// AddOn is a part of the cluster that an upgrade may concern.
type AddOn struct {
	Name    string `json:"name"`
	Version string `json:"version,omitempty"`
	Where   string `json:"where,omitempty"`
}

// Certificate is a certificate whose end is known.
type Certificate struct {
	Of        string    `json:"of"`
	NotBefore time.Time `json:"notBefore"`
	NotAfter  time.Time `json:"notAfter"`
}

// Token is a bootstrap token, without its secret.
type Token struct {
	ID          string    `json:"id"`
	Expires     time.Time `json:"expires,omitzero"` // zero: never
	Description string    `json:"description,omitempty"`
	// Joins reports whether nodes can join with it.
	Joins bool `json:"joins"`
}

// Etcd describes the etcd of a cluster.
type Etcd struct {
	// Mode is stacked, external or unknown.
	Mode string `json:"mode"`
	// Members are the nodes of stacked members, or the endpoints of an external etcd.
	Members []string `json:"members"`
	Version string   `json:"version,omitempty"`
}

// Modes of etcd.
const (
	Stacked  = "stacked"
	External = "external"
	Unknown  = "unknown"
)

// Report is the result of an examination. It marshals as the document of `adopt -o json`.
type Report struct {
	Schema  string    `json:"schema"`
	Time    time.Time `json:"time"`
	CLI     string    `json:"cli"`
	Context string    `json:"context"`
	Server  string    `json:"server"`
	// Name is what the workspace calls the cluster, UID what identifies it.
	Name string `json:"name"`
	UID  string `json:"uid,omitempty"`
	// Kubernetes is the version that the API server reports, Configured that of kubeadm-config.
	Kubernetes   string                    `json:"kubernetes"`
	Configured   string                    `json:"configured,omitempty"`
	Distribution distribution.Distribution `json:"distribution"`
	Endpoint     string                    `json:"controlPlaneEndpoint,omitempty"`
	Etcd         Etcd                      `json:"etcd"`
	Nodes        []Node                    `json:"nodes"`
	Network      []AddOn                   `json:"network"`
	AddOns       []AddOn                   `json:"addOns"`
	Certificates []Certificate             `json:"certificates"`
	Tokens       []Token                   `json:"tokens"`
	// Changes are differences between static pods and what kubeadm renders.
	Changes []Change `json:"manifestChanges"`
	// Would lists what adopting does, Never what it does not touch, Offers what fits a cluster that
	// cannot be adopted.
	Would  []string `json:"would"`
	Never  []string `json:"never"`
	Offers []string `json:"offers,omitempty"`
	// Hardening are the policies that the operator's installation adds if the configuration names them.
	Hardening []machines.Hardening `json:"hardening,omitempty"`
	// Findings are the worst first. Block means that the cluster is not adopted.
	Findings []plan.Finding `json:"findings"`
	Notes    []string       `json:"notes,omitempty"`
	// Upgrade is how the cluster is upgraded.
	Upgrade string `json:"upgrade"`
	DryRun  bool   `json:"dryRun,omitempty"`
	// Dir is the workspace, Written the files that were written there; both only after an adoption.
	Dir     string   `json:"dir,omitempty"`
	Written []string `json:"written,omitempty"`
}

// Request is what an examination is about.
type Request struct {
	Context, Server, CLI string
	// Flags select the context again, with a leading space.
	Flags string
	// Name is the name of the cluster; empty takes that of the context.
	Name         string
	Kubernetes   string
	Distribution distribution.Distribution
	// Found are the findings of a check of the cluster.
	Found []plan.Finding
}

// Upgrade is how an adopted cluster is upgraded, as long as the operator is not installed.
const Upgrade = "The operator is not installed in this adopted cluster: upgrade it with kubeadm. Run `kubeadm upgrade plan` on a control plane, then `kubeadm upgrade apply VERSION`. Or run `constellation adopt --operator` for `constellation upgrade`."

// relevant are the checks whose findings concern an adoption. Others concern the next upgrade.
var relevant = []string{
	"kubeadm-config", "etcd-members", "api-certificates", "kubelet-certificates", "signing-requests", "control-plane-versions", "kubelet-versions",
	"proxy-version", "api-health", "leaders", "node-conditions", "node-leases", "cordoned-nodes", "rbac",
}

// clusterConfiguration is the part of kubeadm's configuration that an adoption reads.
type clusterConfiguration struct {
	Kind              string `yaml:"kind"`
	KubernetesVersion string `yaml:"kubernetesVersion"`
	ClusterName       string `yaml:"clusterName"`
	Endpoint          string `yaml:"controlPlaneEndpoint"`
	CertificatesDir   string `yaml:"certificatesDir"`
	ImageRepository   string `yaml:"imageRepository"`
	Networking        struct {
		PodSubnet     string `yaml:"podSubnet"`
		ServiceSubnet string `yaml:"serviceSubnet"`
		DNSDomain     string `yaml:"dnsDomain"`
	} `yaml:"networking"`
	APIServer         component `yaml:"apiServer"`
	ControllerManager component `yaml:"controllerManager"`
	Scheduler         component `yaml:"scheduler"`
	Etcd              struct {
		Local *struct {
			component       `yaml:",inline"`
			DataDir         string `yaml:"dataDir"`
			ImageRepository string `yaml:"imageRepository"`
			ImageTag        string `yaml:"imageTag"`
		} `yaml:"local"`
		External *struct {
			Endpoints []string `yaml:"endpoints"`
			CAFile    string   `yaml:"caFile"`
			CertFile  string   `yaml:"certFile"`
			KeyFile   string   `yaml:"keyFile"`
		} `yaml:"external"`
	} `yaml:"etcd"`
}

// component is a component of a ClusterConfiguration.
type component struct {
	// ExtraArgs is a map in v1beta3 and a list in v1beta4.
	ExtraArgs    yaml.Node `yaml:"extraArgs"`
	ExtraVolumes []struct {
		HostPath string `yaml:"hostPath"`
	} `yaml:"extraVolumes"`
}

// Examine reports on a cluster. now is the time of the examination.
func Examine(f Facts, r Request, now time.Time) Report {
	out := Report{
		Schema: plan.Schema, Time: now.UTC(), CLI: r.CLI, Context: r.Context, Server: r.Server, Name: cmp.Or(r.Name, NameOf(r.Context)), UID: f.UID,
		Kubernetes: r.Kubernetes, Distribution: r.Distribution, Etcd: Etcd{Mode: Unknown, Members: []string{}},
		Nodes: f.Nodes, Network: f.Network, AddOns: f.AddOns, Certificates: f.Certificates, Tokens: f.Tokens,
		Changes: []Change{}, Would: []string{}, Never: never(), Findings: []plan.Finding{}, Upgrade: Upgrade,
	}
	if out.Nodes == nil {
		out.Nodes = []Node{}
	}
	for _, list := range []*[]AddOn{&out.Network, &out.AddOns} {
		if *list == nil {
			*list = []AddOn{}
		}
	}
	if out.Certificates == nil {
		out.Certificates = []Certificate{}
	}
	if out.Tokens == nil {
		out.Tokens = []Token{}
	}
	if r.Distribution.Name != distribution.Kubeadm {
		out.refuse(f, r)
		return out
	}
	for _, x := range r.Found {
		if x.Severity != plan.Info && slices.Contains(relevant, x.ID) {
			if x.Severity == plan.NotChecked && strings.Contains(x.Remedy, "--dry-run-requests") { // a flag of check alone
				x.Remedy = "run `constellation check --dry-run-requests" + r.Flags + "`"
			}
			out.Findings = append(out.Findings, x)
		}
	}
	c, err := parse(f.Config)
	out.unreadable(f, err)
	if err == nil && f.Config != "" {
		out.Configured, out.Endpoint = c.KubernetesVersion, c.Endpoint
		out.examineEtcd(f, &c)
		if f.Unread[PartPods] == "" {
			out.examinePods(f.StaticPods, &c)
		}
	}
	out.examineNodes(f)
	out.examineVersions(f)
	out.examineTokens(f, now)
	out.Would, out.Hardening = would(out.Name, f), machines.Hardenings()
	order := []plan.Severity{plan.Block, plan.Warn, plan.NotChecked, plan.Info}
	slices.SortStableFunc(out.Findings, func(a, b plan.Finding) int {
		return cmp.Or(cmp.Compare(slices.Index(order, a.Severity), slices.Index(order, b.Severity)), cmp.Compare(a.ID, b.ID))
	})
	return out
}

// parse reads a ClusterConfiguration.
func parse(config string) (c clusterConfiguration, err error) {
	if err := yaml.Unmarshal([]byte(config), &c); err != nil {
		return clusterConfiguration{}, err
	}
	if config != "" && c.Kind != "ClusterConfiguration" {
		return clusterConfiguration{}, fmt.Errorf("it contains a %q, want a ClusterConfiguration", c.Kind)
	}
	return c, nil
}

func (r *Report) add(f plan.Finding) {
	f.Source = cmp.Or(f.Source, "adopt")
	r.Findings = append(r.Findings, f)
}

// Blocked returns the findings that stand in the way.
func (r *Report) Blocked() (out []plan.Finding) {
	for _, f := range r.Findings {
		if f.Severity == plan.Block {
			out = append(out, f)
		}
	}
	return out
}

// Machines returns the inventory of the nodes.
func (r *Report) Machines() (out []machines.Machine) {
	for _, n := range r.Nodes {
		out = append(out, machines.Machine{Name: n.Name, Address: n.Address, Group: n.Role, ProviderID: n.ProviderID})
	}
	return out
}

// refuse reports a cluster that kubeadm did not make, and what fits it.
func (r *Report) refuse(f Facts, q Request) {
	r.Upgrade = q.Distribution.Upgrade
	r.Offers = []string{
		"`constellation check" + q.Flags + "` lists what stands against an upgrade",
		"`constellation backup create" + q.Flags + "` backs up custom resources and Helm releases",
		"`constellation watch" + q.Flags + "` shows nodes, versions and stuck drains live",
	}
	x := plan.Finding{ID: "adopt-distribution", Severity: plan.Block, Detail: strings.Join(q.Distribution.Evidence, "; ")}
	switch q.Distribution.Name {
	case distribution.Unknown:
		x.Title = "this cluster does not look like one of kubeadm"
		x.Detail = "there is no ConfigMap kubeadm-config in kube-system, and no node has an annotation of kubeadm"
		x.Remedy = "adopt supports clusters that were made by `kubeadm init`"
		if len(f.Unread) > 0 {
			x.ID, x.Title = "adopt-unreadable", "not checked whether kubeadm made this cluster: "+unreadParts(f.Unread)
			x.Detail = unreadReasons(f.Unread)
			x.Remedy, x.Command = "use a kubeconfig whose user may read the cluster", "constellation check --print-rbac"
		}
	case distribution.Constellation:
		x.Title = "this cluster was made by constellation"
		x.Remedy = "use its own workspace; `constellation upgrade check` there checks the next upgrade"
		r.Offers = r.Offers[:0]
	case distribution.K3s, distribution.RKE2:
		x.Title = fmt.Sprintf("this is a cluster of %s, which kubeadm cannot upgrade", q.Distribution.Title)
		x.Remedy = "upgrade it with " + q.Distribution.Upgrade
		r.Offers = append(r.Offers, "a Plan of upgrade.cattle.io upgrades its nodes; `constellation watch"+q.Flags+"` shows Plans and their progress")
	default:
		x.Title = fmt.Sprintf("this is a cluster of %s, which kubeadm must not upgrade", q.Distribution.Title)
		if q.Distribution.Upgrade != "" {
			x.Remedy = "upgrade it with " + q.Distribution.Upgrade
		}
	}
	r.add(x)
}

func unreadParts(unread map[Part]string) string {
	var parts []string
	for p := range unread {
		parts = append(parts, string(p))
	}
	slices.Sort(parts)
	return words.And(parts) + " could not be read"
}

func unreadReasons(unread map[Part]string) string {
	var out []string
	for p, why := range unread {
		out = append(out, string(p)+": "+why)
	}
	slices.Sort(out)
	return strings.Join(out, "; ")
}

// unreadable reports what could not be read. Without some parts no workspace can be written.
func (r *Report) unreadable(f Facts, config error) {
	needed := map[Part]string{}
	for _, p := range []Part{PartIdentity, PartNodes, PartConfig} {
		if why := f.Unread[p]; why != "" {
			needed[p] = why
		}
	}
	if len(needed) > 0 {
		r.add(plan.Finding{
			ID: "adopt-unreadable", Severity: plan.Block, Title: "an adoption needs what could not be read: " + unreadParts(needed), Detail: unreadReasons(needed),
			Remedy: "use a kubeconfig whose user may read them", Command: "constellation check --print-rbac",
		})
	}
	known := func(id string) bool {
		return slices.ContainsFunc(r.Findings, func(x plan.Finding) bool { return x.ID == id && x.Severity == plan.Block })
	}
	if f.Unread[PartConfig] == "" && !known("kubeadm-config") {
		switch {
		case f.Config == "":
			r.add(plan.Finding{
				ID: "kubeadm-config", Severity: plan.Block, Title: "the ConfigMap kubeadm-config has no ClusterConfiguration: kubeadm init did not end, or it was deleted",
				Remedy: "complete kubeadm init, or recreate it on a control plane", Command: "kubeadm init phase upload-config all --config FILE",
			})
		case config != nil:
			r.add(plan.Finding{
				ID: "kubeadm-config", Severity: plan.Block, Title: "the ClusterConfiguration of the ConfigMap kubeadm-config cannot be read", Detail: config.Error(),
				Remedy: "correct it, or recreate it on a control plane", Command: "kubeadm init phase upload-config all --config FILE",
			})
		}
	}
	for _, x := range []struct {
		part              Part
		id, title, remedy string
	}{
		{PartPods, "adopt-manifests", "not checked whether static pods were changed by hand", "allow the user to list pods"},
		{PartAddOns, "adopt-add-ons", "not checked which add-ons and which network plugin the cluster has", "allow the user to list DaemonSets and Deployments"},
		{PartServers, "adopt-certificates", "not checked when the certificates of the API servers end", "run `kubeadm certs check-expiration` on each control plane"},
		{PartTokens, "adopt-tokens", "not checked which bootstrap tokens exist", "run `kubeadm token list` on a control plane"},
	} {
		if why := f.Unread[x.part]; why != "" {
			r.add(plan.Finding{ID: x.id, Severity: plan.NotChecked, Title: x.title, Detail: why, Remedy: x.remedy})
		}
	}
}

// examineEtcd reports whether etcd is stacked or external.
func (r *Report) examineEtcd(f Facts, c *clusterConfiguration) {
	if x := c.Etcd.External; x != nil {
		r.Etcd = Etcd{Mode: External, Members: slices.Clone(x.Endpoints)}
		r.add(plan.Finding{
			ID: "adopt-external-etcd", Severity: plan.NotChecked, Title: "not checked whether the external etcd is healthy: its members are not in the API",
			Detail: strings.Join(x.Endpoints, ", ") + "; `constellation adopt --operator` refuses this cluster, so upgrades stay with kubeadm", Remedy: "check it where it runs, and back it up yourself", Command: "etcdctl endpoint health --cluster",
		})
		return
	}
	if f.Unread[PartPods] != "" {
		return
	}
	r.Etcd.Mode = Stacked
	versions := map[string]bool{}
	for _, p := range f.StaticPods {
		if p.Component == "etcd" {
			r.Etcd.Members = append(r.Etcd.Members, p.Node)
			versions[tagOf(p.Image())] = true
		}
	}
	slices.Sort(r.Etcd.Members)
	var all []string
	for v := range versions {
		all = append(all, v)
	}
	slices.Sort(all)
	r.Etcd.Version = strings.Join(all, ", ")
	if len(r.Etcd.Members) == 0 {
		r.Etcd.Mode = Unknown
		r.add(plan.Finding{
			ID: "adopt-etcd", Severity: plan.NotChecked, Title: "not checked whether etcd is healthy: kubeadm-config names no external etcd, and no pod of etcd was found",
			Remedy: "look for its manifest on the control planes", Command: "ls /etc/kubernetes/manifests",
		})
	}
}

// nameRE matches names of nodes.
var nameRE = regexp.MustCompile(`^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$`)

// examineNodes reports nodes that an inventory cannot list.
func (r *Report) examineNodes(f Facts) {
	if f.Unread[PartNodes] != "" {
		return
	}
	var unnamed, nowhere, controlPlanes []string
	byAddress := map[string][]string{}
	for i := range r.Nodes {
		n := &r.Nodes[i]
		if n.Role == cloud.ControlPlane {
			controlPlanes = append(controlPlanes, n.Name)
		}
		if !nameRE.MatchString(n.Name) {
			unnamed = append(unnamed, fmt.Sprintf("%q", n.Name))
			continue
		}
		if _, err := netip.ParseAddr(n.Address); err != nil {
			n.Address = ""
			nowhere = append(nowhere, n.Name)
			continue
		}
		byAddress[n.Address] = append(byAddress[n.Address], n.Name)
	}
	if len(unnamed) > 0 {
		r.add(plan.Finding{ID: "adopt-node-names", Severity: plan.Block, Title: words.Count(len(unnamed), "node") + " with a name that no kubelet can have", Detail: some(unnamed), Remedy: "check who answers at " + r.Server})
	}
	if len(nowhere) > 0 {
		r.add(plan.Finding{
			ID: "adopt-node-addresses", Severity: plan.Warn, Title: words.Count(len(nowhere), "node") + " without an internal IP address", Detail: some(nowhere) + "; the inventory lists them without an address",
			Remedy: "set the kubelet's --node-ip, or write the address into the configuration", Command: "kubectl get nodes -o wide",
		})
	}
	for address, names := range byAddress {
		if len(names) > 1 {
			slices.Sort(names)
			r.add(plan.Finding{
				ID: "adopt-node-addresses", Severity: plan.Block, Title: fmt.Sprintf("%d nodes have the address %s", len(names), address), Detail: some(names),
				Remedy: "delete the Node of the machine that is gone", Command: "kubectl delete node NAME",
			})
		}
	}
	switch len(controlPlanes) {
	case 0:
		r.add(plan.Finding{
			ID: "adopt-control-planes", Severity: plan.Block, Title: "no node has the label node-role.kubernetes.io/control-plane", Remedy: "label the control planes, as kubeadm does",
			Command: "kubectl label node NAME node-role.kubernetes.io/control-plane=",
		})
	case 1:
		r.add(plan.Finding{
			ID: "adopt-control-planes", Severity: plan.Warn, Title: "there is one control plane: the API does not answer while it restarts or is upgraded",
			Detail: controlPlanes[0], Remedy: "add two control planes with `kubeadm join --control-plane` if the API must stay available",
		})
	}
}

// examineVersions reports an upgrade that somebody else has begun.
func (r *Report) examineVersions(f Facts) {
	var old []string
	for _, n := range r.Nodes {
		if m := minorOf(n.Kubernetes); m > 0 && minorOf(r.Kubernetes)-m >= 2 {
			old = append(old, n.Name+" "+n.Kubernetes)
		}
	}
	if len(old) > 0 {
		r.add(plan.Finding{
			ID: "adopt-old-kubelets", Severity: plan.Warn, Title: words.Count(len(old), "kubelet") + " two or more minors older than the API server " + r.Kubernetes, Detail: some(old),
			Remedy: "upgrade these nodes first: a kubelet may be three minors older at most", Command: "kubeadm upgrade node",
		})
	}
	if len(f.StaticPods) == 0 || r.Configured == "" {
		return
	}
	var other []string
	for _, p := range f.StaticPods {
		if p.Component == "kube-apiserver" && tagOf(p.Image()) != r.Configured {
			other = append(other, p.Node+" "+tagOf(p.Image()))
		}
	}
	if len(other) == 0 {
		return
	}
	slices.Sort(other)
	r.add(plan.Finding{
		ID: "adopt-mixed-versions", Severity: plan.Warn, Title: fmt.Sprintf("an upgrade seems to be unfinished: kubeadm-config has %s, and %s another version", r.Configured, verb(len(other), "API server has", "API servers have")),
		Detail: some(other), Remedy: "let it end: run `kubeadm upgrade apply` on the first control plane and `kubeadm upgrade node` on the others", Command: "kubeadm upgrade node",
	})
}

func verb(n int, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %s", n, many)
}

// examineTokens reports bootstrap tokens with which nodes can join.
func (r *Report) examineTokens(f Facts, now time.Time) {
	var joins, forever []string
	for _, t := range f.Tokens {
		if !t.Joins || !t.Expires.IsZero() && t.Expires.Before(now) {
			continue
		}
		joins = append(joins, t.ID)
		if t.Expires.IsZero() {
			forever = append(forever, t.ID)
		}
	}
	switch {
	case len(forever) > 0:
		r.add(plan.Finding{
			ID: "adopt-tokens", Severity: plan.Warn, Title: words.Count(len(forever), "bootstrap token") + " without an end: its holder can join a node", Detail: some(forever),
			Remedy: "delete those that you do not need; they keep working otherwise", Command: "kubeadm token delete " + forever[0],
		})
	case len(joins) > 0:
		r.add(plan.Finding{ID: "adopt-tokens", Severity: plan.Info, Title: words.Count(len(joins), "bootstrap token") + " can join nodes; an adoption does not change that", Detail: some(joins)})
	}
}

// would lists what an adoption does.
func would(name string, f Facts) []string {
	return []string{
		"write constellation-conf.yaml: cluster " + name + " with provider " + machines.Name + " and " + words.Count(len(f.Nodes), "machine"),
		"write constellation-state.yaml: which cluster this workspace is of",
		"write constellation-admin.conf: a copy of this context of your kubeconfig, for your user alone (0600)",
		"write .constellation-adopted.json: a journal with which `constellation adopt --undo` removes these files",
	}
}

// never lists what an adoption leaves alone.
func never() []string {
	return []string{
		"the cluster: no object is created, changed or deleted, and nothing is installed, unless you run `constellation adopt --operator` afterwards",
		"your machines: nothing is sent to them, and no kubelet, manifest or certificate is changed",
		"your kubeconfig, and your join tokens, which keep working",
	}
}

// some lists the first names.
func some(list []string) string {
	if n := len(list); n > 10 {
		return strings.Join(list[:10], ", ") + fmt.Sprintf(" and %d more", n-10)
	}
	return strings.Join(list, ", ")
}

// NameOf makes the name of a cluster from that of a context.
func NameOf(context string) string {
	safe := strings.Map(func(r rune) rune {
		switch {
		case r >= 'a' && r <= 'z', r >= '0' && r <= '9':
			return r
		case r >= 'A' && r <= 'Z':
			return r + 'a' - 'A'
		}
		return '-'
	}, context)
	safe = strings.TrimLeft(safe, "-")
	return cmp.Or(strings.TrimRight(safe[:min(len(safe), 37)], "-"), "cluster")
}

// minorOf returns the minor of a version; zero if it is none.
func minorOf(v string) int {
	parsed, err := version.Parse(v)
	if err != nil {
		return 0
	}
	return parsed.Minor()
}
