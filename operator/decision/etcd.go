package decision

import (
	"slices"
	"strings"

	"constellation/engine/version"
	"constellation/operator/api/v1alpha1"
)

// A target can name the tag of an etcd that is newer than that of its Kubernetes, because the next
// minor of Kubernetes needs it. Then a control plane whose member runs an older etcd is outdated. It
// is replaced or upgraded like any other: kubeadm reads the tag from its ConfigMap. Targets without a
// tag demand nothing of etcd.

// hasEtcd reports whether a node has the etcd of the target, as far as that names one.
func hasEtcd(spec v1alpha1.NodeVersionSpec, n *Node) bool {
	if spec.EtcdImageTag == "" || n.Role != v1alpha1.ControlPlaneRole {
		return true
	}
	want, err := etcdVersion(spec.EtcdImageTag)
	if err != nil {
		return true // the CRD refuses such a tag
	}
	is, err := etcdVersion(n.Etcd)
	return err == nil && !is.Less(want)
}

// etcdKnown reports whether the version of a node's member is known, if it decides whether the node
// is outdated. A node with other components is outdated in any case: it must not wait for a member
// that may be broken.
func etcdKnown(spec v1alpha1.NodeVersionSpec, n *Node) bool {
	return spec.EtcdImageTag == "" || n.Role != v1alpha1.ControlPlaneRole || n.Etcd != "" || n.Components != spec.KubernetesComponentsReference
}

// etcdVersion parses the tag of an image, such as 3.6.11-0, or what a member reports, such as 3.6.11.
func etcdVersion(tag string) (version.Version, error) {
	v, _, _ := strings.Cut(tag, "-")
	return version.Parse(v)
}

// maxMembers bounds the members in a status. etcd's manual advises seven at most.
const maxMembers = 9

// etcdMembers returns the versions of the members for the status, by the names of their nodes.
func etcdMembers(members []Member) (out []v1alpha1.EtcdMember) {
	for _, m := range members {
		if m.Version != "" {
			out = append(out, v1alpha1.EtcdMember{Node: m.Node, Version: m.Version, StorageVersion: m.Storage})
		}
	}
	slices.SortFunc(out, func(a, b v1alpha1.EtcdMember) int { return strings.Compare(a.Node, b.Node) })
	return out[:min(len(out), maxMembers)]
}
