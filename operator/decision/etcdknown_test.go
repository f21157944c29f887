package decision

import (
	"testing"

	"constellation/operator/api/v1alpha1"
)

// A node with other components is outdated whatever its etcd is. If it waited for the version of a
// broken member, it would hold all other control planes, which wait for that member.
func TestBrokenMemberDoesNotHideAnOutdatedNode(t *testing.T) {
	spec := v1alpha1.NodeVersionSpec{EtcdImageTag: "3.6.11-0", KubernetesComponentsReference: "new"}
	for _, tt := range []struct {
		name             string
		components, etcd string
		role             v1alpha1.Role
		want             bool
	}{
		{name: "other components, a silent member", components: "old", role: v1alpha1.ControlPlaneRole, want: true},
		{name: "the target's components, a silent member", components: "new", role: v1alpha1.ControlPlaneRole, want: false},
		{name: "the target's components, a member that answers", components: "new", etcd: "3.6.8", role: v1alpha1.ControlPlaneRole, want: true},
		{name: "a worker", components: "new", role: v1alpha1.WorkerRole, want: true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := etcdKnown(spec, &Node{Role: tt.role, Components: tt.components, Etcd: tt.etcd}); got != tt.want {
				t.Errorf("known %v, want %v", got, tt.want)
			}
		})
	}
}
