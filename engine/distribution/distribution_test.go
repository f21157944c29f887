package distribution

import (
	"slices"
	"testing"
)

// node returns the facts of one node as the public documentation of a distribution shows it.
func node(version, provider, system string, labels, annotations []string) Facts {
	n := Node{Name: "n-1", ProviderID: provider, OSImage: system, KubeletVersion: version, Labels: map[string]string{}, Annotations: map[string]string{}}
	for _, k := range labels {
		n.Labels[k] = "x"
	}
	for _, k := range annotations {
		n.Annotations[k] = "x"
	}
	return Facts{GitVersion: version, Nodes: []Node{n}}
}

// TestRecognise uses versions, labels and annotations from the public documentation of each
// distribution, which source names. They are not recorded from clusters, except those of kubeadm.
func TestRecognise(t *testing.T) {
	kubeadm := node("v1.35.4", "", "Debian GNU/Linux 13 (trixie)", nil, []string{"kubeadm.alpha.kubernetes.io/cri-socket"})
	kind := node("v1.35.0", "kind://docker/kind/kind-control-plane", "Debian GNU/Linux 12 (bookworm)", nil, []string{"kubeadm.alpha.kubernetes.io/cri-socket"})
	kind.KubeadmConfig = true
	ours := kubeadm
	ours.Groups = []string{"apps", "update.edgeless.systems"}
	openshift := node("v1.33.4", "", "Red Hat Enterprise Linux CoreOS", []string{"node.openshift.io/os_id"}, []string{"machineconfiguration.openshift.io/currentConfig"})
	openshift.Groups = []string{"config.openshift.io"}
	for _, tt := range []struct {
		name    string
		source  string
		facts   Facts
		managed bool
		want    string // among the evidence
	}{
		{name: Kubeadm, source: "a cluster of the sandbox", facts: kubeadm, want: "annotation kubeadm.alpha.kubernetes.io/cri-socket on n-1"},
		{name: Kubeadm, source: "a cluster of the sandbox", facts: Facts{GitVersion: "v1.35.4", KubeadmConfig: true}, want: "ConfigMap kube-system/kubeadm-config"},
		{name: Kind, source: "https://kind.sigs.k8s.io/docs/user/quick-start/", facts: kind, want: "providerID kind://docker/kind/kind-control-plane on n-1"},
		{name: K3s, source: "https://docs.k3s.io/networking/networking-services", facts: node("v1.35.4+k3s1", "k3s://n-1", "K3s", []string{"node.kubernetes.io/instance-type"}, []string{"k3s.io/node-args", "k3s.io/internal-ip"}), want: "API server v1.35.4+k3s1"},
		{name: RKE2, source: "https://docs.rke2.io/release-notes/v1.35.X", facts: node("v1.35.4+rke2r1", "rke2://n-1", "Ubuntu", nil, []string{"rke2.io/node-args"}), want: "API server v1.35.4+rke2r1"},
		{
			name: EKS, source: "https://docs.aws.amazon.com/eks/latest/userguide/managed-node-groups.html",
			facts:   node("v1.33.4-eks-3025e55", "aws:///eu-central-1a/i-0", "Amazon Linux 2023", []string{"eks.amazonaws.com/nodegroup", "eks.amazonaws.com/capacityType"}, nil),
			managed: true, want: "API server v1.33.4-eks-3025e55",
		},
		{
			name: GKE, source: "https://cloud.google.com/kubernetes-engine/docs/concepts/node-pools",
			facts:   node("v1.33.4-gke.1172000", "gce://p/z/n-1", "Container-Optimized OS from Google", []string{"cloud.google.com/gke-nodepool"}, nil),
			managed: true, want: "API server v1.33.4-gke.1172000",
		},
		{
			name: AKS, source: "https://learn.microsoft.com/en-us/azure/aks/use-labels",
			facts:   node("v1.33.4", "azure:///subscriptions/s", "Ubuntu 24.04", []string{"kubernetes.azure.com/cluster", "kubernetes.azure.com/mode"}, nil),
			managed: true, want: "label kubernetes.azure.com/cluster on n-1",
		},
		{name: OpenShift, source: "https://docs.redhat.com/en/documentation/openshift_container_platform/4.19/html/machine_configuration/machine-config-index", facts: openshift, want: "API group config.openshift.io"},
		{name: Talos, source: "https://talos.dev/v0.9/introduction/quickstart/", facts: node("v1.20.2", "", "Talos (v0.9.0)", nil, nil), want: "OS image Talos (v0.9.0) on n-1"},
		{name: Talos, source: "https://docs.siderolabs.com/talos/v1.13/getting-started/quickstart", facts: node("v1.35.4", "", "Talos (v1.12.0)", nil, nil), want: "OS image Talos (v1.12.0) on n-1"},
		{name: Constellation, source: "operator/api", facts: ours, want: "API group update.edgeless.systems"},
		{name: Unknown, source: "https://kubernetes.io/releases/", facts: Facts{GitVersion: "v1.35.4"}, want: ""},
	} {
		got := Recognise(tt.facts)
		if got.Name != tt.name || got.Managed != tt.managed {
			t.Errorf("%s: recognised %s, managed %t; want %s, %t", tt.source, got.Name, got.Managed, tt.name, tt.managed)
		}
		if tt.want != "" && !slices.Contains(got.Evidence, tt.want) {
			t.Errorf("%s: evidence %q lacks %q", tt.name, got.Evidence, tt.want)
		}
		if tt.want == "" && len(got.Evidence) > 0 {
			t.Errorf("%s: evidence %q, want none", tt.name, got.Evidence)
		}
	}
}

// A cluster keeps its name if a part of the facts may not be read: nodes or versions alone are
// enough where the documentation shows that they have a mark.
func TestRecogniseByPartOfTheFacts(t *testing.T) {
	for _, tt := range []struct {
		name  string
		facts Facts
	}{
		{EKS, Facts{GitVersion: "v1.33.4-eks-3025e55"}},
		{GKE, Facts{GitVersion: "v1.33.4-gke.1172000"}},
		{K3s, Facts{GitVersion: "v1.35.4+k3s1"}},
		{RKE2, Facts{GitVersion: "v1.35.4+rke2r1"}},
		{EKS, node("v1.33.4", "", "", []string{"eks.amazonaws.com/nodegroup"}, nil)},
		{GKE, node("v1.33.4", "", "", []string{"cloud.google.com/gke-nodepool"}, nil)},
		{OpenShift, node("v1.33.4", "", "", []string{"node.openshift.io/os_id"}, nil)},
		{RKE2, node("v1.35.4", "", "", nil, []string{"rke2.io/node-args"})},
		{K3s, node("v1.35.4", "", "", nil, []string{"k3s.io/hostname"})},
		{Unknown, node("v1.33.4", "azure:///subscriptions/s", "Ubuntu 24.04", nil, nil)}, // a cluster on Azure is not AKS
		{Unknown, node("v1.33.4", "aws:///eu-central-1a/i-0", "Amazon Linux 2023", nil, nil)},
	} {
		if got := Recognise(tt.facts); got.Name != tt.name {
			t.Errorf("%+v: recognised %s by %q, want %s", tt.facts, got.Name, got.Evidence, tt.name)
		}
	}
}

func TestNotApplicable(t *testing.T) {
	for _, tt := range []struct {
		name, id string
		want     bool
	}{
		{name: EKS, id: "etcd-members", want: true},
		{name: K3s, id: "proxy-mode", want: true},
		{name: Kubeadm, id: "etcd-members", want: false},
		{name: Unknown, id: "permissions", want: true},
		{name: Kubeadm, id: "pdb-room", want: false},
		{name: Talos, id: "etcd-members", want: true},
		{name: Kind, id: "kubeadm-config", want: false},
		{name: OpenShift, id: "kubeadm-config", want: true},
		{name: RKE2, id: "kubeadm-config", want: true},
		{name: RKE2, id: "etcd-members", want: false},
	} {
		d := Distribution{Name: tt.name, Title: tt.name}
		if why := d.NotApplicable()[tt.id]; (why != "") != tt.want {
			t.Errorf("%s of %s: %q, want a reason: %t", tt.id, tt.name, why, tt.want)
		}
	}
}
