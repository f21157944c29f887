// Package distribution recognises the distribution of a Kubernetes cluster by what its API shows,
// and records which preflight checks cannot apply to it.
package distribution

import (
	"fmt"
	"slices"
	"strings"
)

// Names of distributions. They are stable.
const (
	Constellation = "constellation"
	Kubeadm       = "kubeadm"
	K3s           = "k3s"
	RKE2          = "rke2"
	Kind          = "kind"
	EKS           = "eks"
	GKE           = "gke"
	AKS           = "aks"
	OpenShift     = "openshift"
	Talos         = "talos"
	Kops          = "kops"
	ClusterAPI    = "cluster-api"
	Unknown       = "unknown"
)

// Facts are what the API of a cluster shows. Facts that could not be read are absent.
type Facts struct {
	// GitVersion is the version that the API server reports: "v1.35.4-eks-3025e55".
	GitVersion string
	Nodes      []Node
	// Groups are the API groups that are served.
	Groups []string
	// KubeadmConfig is set if kube-system has the ConfigMap kubeadm-config.
	KubeadmConfig bool
}

// Node is what a Node object shows about its distribution.
type Node struct {
	Name, ProviderID, OSImage, KubeletVersion string
	Labels, Annotations                       map[string]string
}

// Distribution is a recognised distribution.
type Distribution struct {
	// Name is one of the constants, Title its name in a sentence.
	Name  string `json:"name"`
	Title string `json:"title"`
	// Evidence is what it was recognised by, the strongest first; empty if it is unknown.
	Evidence []string `json:"evidence"`
	// Managed is set if a provider runs the control plane. Its nodes are then not visible.
	Managed bool `json:"managed,omitempty"`
	// Upgrade is how its users upgrade it.
	Upgrade string `json:"upgrade,omitempty"`
}

// entry is the description of one distribution.
type entry struct {
	name, title, upgrade string
	managed              bool
	build                string   // part of its versions
	groups               []string // API groups
	labels, annotations  []string // prefixes of keys of nodes
	provider, system     string   // prefixes of providerID and of the OS image
}

// entries are the distributions in order of precedence: one that is built from another precedes
// it. Sources: the distributions' public documentation.
var entries = []entry{
	{name: Constellation, title: "Constellation", upgrade: "constellation upgrade apply", groups: []string{"update.edgeless.systems"}},
	{name: OpenShift, title: "OpenShift", upgrade: "oc adm upgrade", groups: []string{"config.openshift.io"}, labels: []string{"node.openshift.io/"}},
	{name: EKS, title: "Amazon EKS", upgrade: "aws eks update-cluster-version", managed: true, build: "-eks-", labels: []string{"eks.amazonaws.com/"}},
	{name: GKE, title: "Google GKE", upgrade: "gcloud container clusters upgrade", managed: true, build: "-gke.", labels: []string{"cloud.google.com/gke-"}},
	{name: AKS, title: "Azure AKS", upgrade: "az aks upgrade", managed: true, labels: []string{"kubernetes.azure.com/"}},
	{name: RKE2, title: "RKE2", upgrade: "RKE2's installer, or a Plan of the system-upgrade-controller", build: "+rke2", annotations: []string{"rke2.io/"}},
	{name: K3s, title: "K3s", upgrade: "K3s' installer, or a Plan of the system-upgrade-controller", build: "+k3s", annotations: []string{"k3s.io/"}},
	{name: Talos, title: "Talos Linux", upgrade: "talosctl upgrade-k8s", annotations: []string{"talos.dev/"}, system: "Talos ("},
	{name: Kind, title: "kind", upgrade: "a new cluster with a newer node image", provider: "kind://"},
	{name: Kops, title: "kOps", upgrade: "kops upgrade cluster", labels: []string{"kops.k8s.io/"}},
	{name: ClusterAPI, title: "Cluster API", upgrade: "the version of its Cluster, or of its KubeadmControlPlane and MachineDeployments, in the management cluster", annotations: []string{"cluster.x-k8s.io/"}},
	{name: Kubeadm, title: "kubeadm", upgrade: "kubeadm upgrade apply", annotations: []string{"kubeadm.alpha.kubernetes.io/"}},
}

// Recognise returns the distribution that facts are evidence of.
func Recognise(f Facts) Distribution {
	for _, e := range entries {
		if evidence := e.evidence(f); len(evidence) > 0 {
			return Distribution{Name: e.name, Title: e.title, Evidence: evidence, Managed: e.managed, Upgrade: e.upgrade}
		}
	}
	return Distribution{Name: Unknown, Title: "unknown distribution", Evidence: []string{}}
}

func (e entry) evidence(f Facts) (out []string) {
	for _, g := range e.groups {
		if slices.Contains(f.Groups, g) {
			out = append(out, "API group "+g)
		}
	}
	if e.build != "" && strings.Contains(f.GitVersion, e.build) {
		out = append(out, "API server "+f.GitVersion)
	}
	if e.name == Kubeadm && f.KubeadmConfig {
		out = append(out, "ConfigMap kube-system/kubeadm-config")
	}
	count, first := 0, ""
	for i := range f.Nodes {
		if mark := e.mark(&f.Nodes[i]); mark != "" {
			if count++; first == "" {
				first = mark
			}
		}
	}
	switch {
	case count == 1:
		out = append(out, first)
	case count > 1:
		out = append(out, fmt.Sprintf("%s and %d more", first, count-1))
	}
	return out
}

// mark returns what shows on a node; empty if nothing does.
func (e entry) mark(n *Node) string {
	if e.build != "" && strings.Contains(n.KubeletVersion, e.build) {
		return "kubelet " + n.KubeletVersion + " on " + n.Name
	}
	if key := keyWith(n.Labels, e.labels); key != "" {
		return "label " + key + " on " + n.Name
	}
	if key := keyWith(n.Annotations, e.annotations); key != "" {
		return "annotation " + key + " on " + n.Name
	}
	if e.provider != "" && strings.HasPrefix(n.ProviderID, e.provider) {
		return "providerID " + n.ProviderID + " on " + n.Name
	}
	if e.system != "" && strings.HasPrefix(n.OSImage, e.system) {
		return "OS image " + n.OSImage + " on " + n.Name
	}
	return ""
}

// keyWith returns the smallest key with one of the prefixes.
func keyWith(m map[string]string, prefixes []string) (out string) {
	for k := range m {
		for _, p := range prefixes {
			if strings.HasPrefix(k, p) && (out == "" || k < out) {
				out = k
			}
		}
	}
	return out
}

// Checks about a control plane whose parts are pods, about kubeadm's ConfigMaps, about etcd, and
// about kube-proxy as a DaemonSet.
var (
	aboutPods    = []string{"control-plane-versions", "removed-flags"}
	aboutKubeadm = []string{"kubeadm-config"}
	aboutEtcd    = []string{"etcd-members", "etcd-size"}
	aboutProxy   = []string{"proxy-version", "proxy-mode"}
	// aboutUs are the checks of our services and of what `upgrade apply` may do.
	aboutUs = []string{"permissions", "pod-security", "pod-admission"}
)

// NotApplicable returns why checks cannot apply to a cluster of the distribution that others
// upgrade, by the ID of the check.
func (d Distribution) NotApplicable() map[string]string {
	out := map[string]string{}
	add := func(why string, lists ...[]string) {
		for _, id := range slices.Concat(lists...) {
			if out[id] == "" {
				out[id] = why
			}
		}
	}
	add("it is about the services of constellation, which do not upgrade this cluster", aboutUs)
	switch d.Name {
	case EKS, GKE, AKS:
		add(d.Title+" runs the control plane outside the cluster", aboutPods, aboutKubeadm, aboutEtcd, []string{"leaders"})
	case K3s:
		add("K3s runs the control plane, etcd and kube-proxy in one process", aboutPods, aboutKubeadm, aboutEtcd, aboutProxy, []string{"leaders"})
	case Kops:
		add("kOps has no configuration of kubeadm", aboutKubeadm)
	case RKE2:
		add("RKE2 has no configuration of kubeadm", aboutKubeadm)
	case OpenShift:
		add("operators of OpenShift configure and upgrade it", aboutPods, aboutKubeadm, aboutEtcd, aboutProxy)
	case Talos:
		add("Talos Linux has no configuration of kubeadm", aboutKubeadm)
		add("Talos Linux runs etcd outside Kubernetes", aboutEtcd)
	}
	return out
}
