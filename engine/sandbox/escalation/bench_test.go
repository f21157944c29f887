package escalation_test

import (
	"fmt"
	"testing"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"constellation/engine/sandbox/controlplane"
	"constellation/engine/sandbox/escalation"
)

// BenchmarkKubeletWrites measures what the admission policies cost a kubelet: the same writes with
// and without them, on one API server.
//
// The policies stay in the second part, so a part cannot be run alone and the first is without.
func BenchmarkKubeletWrites(b *testing.B) {
	cp := controlplane.ForTest(b, controlplane.Options{Controllers: true})
	c := cluster(b, cp, "constellation-operator", "constellation-services")
	admin := kubernetes.NewForConfigOrDie(cp.Config())
	cfg := cp.Config()
	cfg.QPS = -1
	cfg.Impersonate = rest.ImpersonationConfig{UserName: "system:node:" + c.Worker, Groups: []string{"system:nodes", "system:authenticated"}}
	kubelet := kubernetes.NewForConfigOrDie(cfg)
	lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: c.Worker, Namespace: "kube-node-lease"}}
	if _, err := admin.CoordinationV1().Leases("kube-node-lease").Create(b.Context(), lease, metav1.CreateOptions{}); err != nil {
		b.Fatal(err)
	}
	n := 0
	writes := map[string]func() error{
		"node-status": func() error {
			n++
			patch := fmt.Sprintf(`{"status":{"conditions":[{"type":"Ready","status":"True","reason":"r%d","lastHeartbeatTime":null}]}}`, n)
			_, err := kubelet.CoreV1().Nodes().Patch(b.Context(), c.Worker, types.StrategicMergePatchType, []byte(patch), metav1.PatchOptions{}, "status")
			return err
		},
		"lease": func() error {
			n++
			patch := fmt.Sprintf(`{"spec":{"leaseDurationSeconds":%d}}`, n)
			_, err := kubelet.CoordinationV1().Leases("kube-node-lease").Patch(b.Context(), c.Worker, types.MergePatchType, []byte(patch), metav1.PatchOptions{})
			return err
		},
	}
	part := func(policies string) {
		for _, name := range []string{"node-status", "lease"} {
			b.Run(name+"/policies="+policies, func(b *testing.B) {
				for b.Loop() {
					if err := writes[name](); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
	part("no")
	apply(b, cp, "constellation-policies")
	enforced(b, escalation.Cluster{Admin: c.Admin, ControlPlane: c.ControlPlane, Worker: c.Worker})
	part("yes")
	part("yes-again")
}
