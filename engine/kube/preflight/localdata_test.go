package preflight

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"

	"constellation/engine/cluster"
)

func TestLocalDataNamesVolumesAndTheirWorkloads(t *testing.T) {
	w := village()
	w.addVolume("db", "pg-0", "worker-0", func(pv *corev1.PersistentVolume) {
		pv.Spec.Capacity = corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("5Gi")}
	})
	w.addStatefulSet("db", "postgres", func(p *pod) { p.claims = []string{"pg-0"} }, "worker-0")
	w.addVolume("db", "unused", "worker-1", nil)
	w.addVolume("shop", "uploads", "", func(pv *corev1.PersistentVolume) {
		pv.Spec.HostPath = &corev1.HostPathVolumeSource{Path: "/srv/\x1b[31muploads"}
	})
	w.replicaSets["rs"] = owner{apiVersion: "apps/v1", kind: "Deployment", name: "web", uid: "web"}
	w.team("shop", "web", owner{apiVersion: "apps/v1", kind: "ReplicaSet", name: "web-1", uid: "rs"}, func(p *pod) {
		p.claims, p.emptyDir, p.hostPath = []string{"uploads"}, []string{"cache"}, []string{"log (/var/log/web)"}
	}, []string{"worker-0", "worker-1"})
	w.addVolume("shop", "cloud", "", func(pv *corev1.PersistentVolume) { pv.Spec.CSI = &corev1.CSIPersistentVolumeSource{Driver: "ebs"} })
	w.claims[types.NamespacedName{Namespace: "shop", Name: "waiting"}] = corev1.PersistentVolumeClaim{}

	want := cluster.LocalData{
		Volumes: []cluster.LocalVolume{
			{Namespace: "db", Claim: "pg-0", Volume: "pv-pg-0", Nodes: []string{"worker-0"}, Path: "/mnt/disk", Bytes: 5 << 30, Workloads: []string{"statefulset/db/postgres"}},
			{Namespace: "db", Claim: "unused", Volume: "pv-unused", Nodes: []string{"worker-1"}, Path: "/mnt/disk"},
			{Namespace: "shop", Claim: "uploads", Volume: "pv-uploads", Nodes: []string{"worker-0", "worker-1"}, Path: `/srv/\x1b[31muploads`, Workloads: []string{"deployment/shop/web"}},
		},
		EmptyDirs: 2, HostPaths: 2,
	}
	if d := cmp.Diff(want, w.localData()); d != "" {
		t.Errorf("-want +got:\n%s", d)
	}
}
