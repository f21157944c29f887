package decision

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

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

// kubeadmConfig has the tag of etcd's image that kubeadm gives to control planes.
var kubeadmConfig = v1alpha1.Reference{Kind: "ConfigMap", Name: "kubeadm-config"}

// givesEtcd reports whether kubeadm gives the target's etcd to a control plane that joins or is
// upgraded now. Otherwise it adds a wait: such a node would be outdated again, without end.
func (d *Decision) givesEtcd(role v1alpha1.Role) bool {
	if d.spec.EtcdImageTag == "" || role != v1alpha1.ControlPlaneRole {
		return true
	}
	want, err := etcdVersion(d.spec.EtcdImageTag)
	if err != nil {
		return true // the CRD refuses such a tag
	}
	if is, err := etcdVersion(d.w.KubeadmEtcdTag); err == nil && !is.Less(want) {
		return true
	}
	reason, text := "EtcdTagMissing", fmt.Sprintf("ConfigMap kubeadm-config has no etcd.local.imageTag, and the target names %s: a new control plane would get an older etcd; set it to that", d.spec.EtcdImageTag)
	switch {
	case !d.w.KubeadmRead:
		reason, text = "EtcdTagUnread", "the operator has not read ConfigMap kubeadm-config yet, so no control plane gets the target's etcd"
	case d.w.KubeadmEtcdTag != "":
		text = fmt.Sprintf("ConfigMap kubeadm-config has etcd.local.imageTag %q, and the target names %s: a new control plane would get an older etcd; set it to that", Truncate(d.w.KubeadmEtcdTag, 64), d.spec.EtcdImageTag)
	}
	d.Wait(reason, text, kubeadmConfig, time.Time{})
	return false
}

// WantsEtcdTag reports whether the tag of etcd's image in kubeadm's configuration decides what happens
// next: a control plane is outdated, or waits for the tag.
func (d *Decision) WantsEtcdTag() bool {
	return d.spec.EtcdImageTag != "" && (d.controlPlanesOutdated || slices.ContainsFunc(d.Waits, func(w Wait) bool { return w.Object == kubeadmConfig }))
}

// etcdVersion parses the tag of an image, such as 3.6.11-0, or what a member reports, such as 3.6.11.
func etcdVersion(tag string) (version.Version, error) {
	v, _, _ := strings.Cut(tag, "-")
	return version.Parse(v)
}

// maxMembers bounds the members in a status. etcd's manual advises seven at most.
const maxMembers = 9

// etcdMembers returns the versions of the members for the status, by the names of their nodes. Of
// several members of a name it returns a healthy one: the others are those of earlier machines.
func etcdMembers(members []Member) (out []v1alpha1.EtcdMember) {
	for i := range members {
		m := &members[i]
		if m.Version != "" && MemberOf(members, m.Node) == m {
			out = append(out, v1alpha1.EtcdMember{Node: m.Node, Version: m.Version, StorageVersion: m.Storage})
		}
	}
	slices.SortFunc(out, func(a, b v1alpha1.EtcdMember) int { return strings.Compare(a.Node, b.Node) })
	return out[:min(len(out), maxMembers)]
}

// MemberOf returns the member of a node whose version counts, or nil: the first healthy one, or else
// the first with a version.
func MemberOf(members []Member, node string) (found *Member) {
	for i := range members {
		if m := &members[i]; m.Node == node && m.Version != "" && (found == nil || m.Healthy && !found.Healthy) {
			found = m
		}
	}
	return found
}

// EtcdMoves reports whether the members change their version, or the format of their data, at the
// moment. No event reports the end of that.
func EtcdMoves(members []Member) bool {
	first := ""
	for i := range members {
		m := &members[i]
		is, err := etcdVersion(m.Version)
		if err != nil {
			continue // it has not answered
		}
		first = cmp.Or(first, m.Version)
		if format, err := etcdVersion(m.Storage); m.Version != first || err == nil && !is.SameMinor(format) {
			return true
		}
	}
	return false
}
