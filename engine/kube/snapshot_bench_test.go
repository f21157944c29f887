package kube

import (
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
)

// BenchmarkEtcdSnapshot takes snapshots of a cluster with 10,000 custom resources of 1.5 kB,
// 200 of 64 kB, and 500 each of Secrets and ConfigMaps of 1.5 kB, which are compared as a
// whole. It reports how long one takes with all that is compared, and of what size it is.
func BenchmarkEtcdSnapshot(b *testing.B) {
	r := newSnapshotRig(b)
	fillEtcd(b, r.cp, 10_000)
	etcd := etcdOf(b, r.cp)
	for i := range 500 {
		for kind, dir := range map[string]string{"Secret": "secrets", "ConfigMap": "configmaps"} {
			meta := fmt.Sprintf(`"metadata":{"name":"o-%d","namespace":"default","uid":"%08x-0000-4000-8000-000000000000","creationTimestamp":"2026-11-21T07:05:01Z"}`, i, i)
			if _, err := etcd.Put(b.Context(), fmt.Sprintf("/registry/%s/default/o-%d", dir, i),
				fmt.Sprintf(`{"apiVersion":"v1","kind":%q,%s,"data":{"k":%q}}`, kind, meta, strings.Repeat("YWJj", 375))); err != nil {
				b.Fatal(err)
			}
		}
	}
	r.account()
	r.deploy()
	r.pod(r.port, corev1.ConditionTrue)
	r.serve(r.live)
	admin := r.client("admin", "system:masters")
	var s sinkBuffer
	for b.Loop() {
		s = sinkBuffer{b: s.b[:0]}
		if _, err := admin.EtcdSnapshot(b.Context(), &s, confirm); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(len(s.b))/1e6, "MB")
}
