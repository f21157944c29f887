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
// distribution. They are not recorded from clusters, except those of kubeadm.
func TestRecognise(t *testing.T) {
	kubeadm := node("v1.35.4", "", "Debian GNU/Linux 13 (trixie)", nil, []string{"kubeadm.alpha.kubernetes.io/cri-socket"})
	kind := node("v1.35.0", "kind://docker/kind/kind-control-plane", "Debian GNU/Linux 12 (bookworm)", nil, []string{"kubeadm.alpha.kubernetes.io/cri-socket"})
	kind.KubeadmConfig = true
	ours := kubeadm
	ours.Groups = []string{"apps", "update.edgeless.systems"}
	openshift := node("v1.33.4", "", "Red Hat Enterprise Linux CoreOS", []string{"node.openshift.io/os_id"}, nil)
	openshift.Groups = []string{"config.openshift.io"}
	for _, tt := range []struct {
		name    string
		facts   Facts
		managed bool
		want    string // among the evidence
	}{
		{Kubeadm, kubeadm, false, "annotation kubeadm.alpha.kubernetes.io/cri-socket on n-1"},
		{Kubeadm, Facts{GitVersion: "v1.35.4", KubeadmConfig: true}, false, "ConfigMap kube-system/kubeadm-config"},
		{Kind, kind, false, "providerID kind://docker/kind/kind-control-plane on n-1"},
		{K3s, node("v1.35.4+k3s1", "k3s://n-1", "K3s", nil, []string{"k3s.io/node-args"}), false, "API server v1.35.4+k3s1"},
		{RKE2, node("v1.35.4+rke2r1", "rke2://n-1", "Ubuntu", nil, []string{"rke2.io/node-args"}), false, "API server v1.35.4+rke2r1"},
		{EKS, node("v1.33.4-eks-3025e55", "aws:///eu-central-1a/i-0", "Amazon Linux 2023", []string{"eks.amazonaws.com/nodegroup"}, nil), true, "API server v1.33.4-eks-3025e55"},
		{GKE, node("v1.33.4-gke.1172000", "gce://p/z/n-1", "Container-Optimized OS from Google", []string{"cloud.google.com/gke-nodepool"}, nil), true, "API server v1.33.4-gke.1172000"},
		{AKS, node("v1.33.4", "azure:///subscriptions/s", "Ubuntu 24.04", []string{"kubernetes.azure.com/cluster"}, nil), true, "label kubernetes.azure.com/cluster on n-1"},
		{OpenShift, openshift, false, "API group config.openshift.io"},
		{Talos, node("v1.35.4", "", "Talos (v1.12.0)", nil, nil), false, "OS image Talos (v1.12.0) on n-1"},
		{Constellation, ours, false, "API group update.edgeless.systems"},
		{Unknown, Facts{GitVersion: "v1.35.4"}, false, ""},
	} {
		got := Recognise(tt.facts)
		if got.Name != tt.name || got.Managed != tt.managed {
			t.Errorf("recognised %s, managed %t; want %s, %t", got.Name, got.Managed, tt.name, tt.managed)
		}
		if tt.want != "" && !slices.Contains(got.Evidence, tt.want) {
			t.Errorf("%s: evidence %q lacks %q", tt.name, got.Evidence, tt.want)
		}
		if tt.want == "" && len(got.Evidence) > 0 {
			t.Errorf("%s: evidence %q, want none", tt.name, got.Evidence)
		}
	}
}

func TestNotApplicable(t *testing.T) {
	for _, tt := range []struct {
		name, id string
		want     bool
	}{
		{EKS, "etcd-members", true},
		{K3s, "proxy-mode", true},
		{Kubeadm, "etcd-members", false},
		{Unknown, "permissions", true},
		{Kubeadm, "pdb-room", false},
		{Talos, "etcd-members", true},
		{Kind, "kubeadm-config", false},
		{OpenShift, "kubeadm-config", true},
		{RKE2, "kubeadm-config", true},
		{RKE2, "etcd-members", false},
	} {
		d := Distribution{Name: tt.name, Title: tt.name}
		if why := d.NotApplicable()[tt.id]; (why != "") != tt.want {
			t.Errorf("%s of %s: %q, want a reason: %t", tt.id, tt.name, why, tt.want)
		}
	}
}
