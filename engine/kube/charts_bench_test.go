package kube

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"constellation/assets"
	"constellation/engine"
	"constellation/engine/cluster"
	"constellation/engine/sandbox/controlplane"
)

// settling is how long a workload of a benchmark takes until it is ready, in place of pulling
// an image and starting.
const settling = 3 * time.Second

// BenchmarkCharts applies six charts to a real API server. Each has one Deployment, which the
// benchmark sets ready some seconds after its creation. Their dependencies resemble those of a
// cluster:
//
//	cni ── services ── csi
//	 └──── certs ───── operators
//	       dns
//
// The peers are the longest chain (cni, services, csi) alone, and all charts in sequence.
func BenchmarkCharts(b *testing.B) {
	kubeconfig, err := controlplane.ForTest(b, controlplane.Options{}).Kubeconfig()
	if err != nil {
		b.Fatal(err)
	}
	c, err := Connect(kubeconfig, nil)
	if err != nil {
		b.Fatal(err)
	}
	ctx, cancel := context.WithCancel(b.Context())
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	wg.Go(func() { makeReady(ctx, b, c, &wg) })

	needs := map[string][]string{"services": {"cni"}, "csi": {"services"}, "certs": {"cni"}, "operators": {"certs"}}
	round := 0
	bring := func(serial bool, names ...string) time.Duration {
		round++
		set := engine.ChartSet{Limit: 5 * time.Minute, Report: func(string, string, string, int64, int64) {}}
		for i, name := range names {
			ch := workChart(fmt.Sprintf("%s-%d", name, round))
			if serial && i > 0 {
				ch.Needs = []string{fmt.Sprintf("%s-%d", names[i-1], round)}
			}
			for _, n := range needs[name] {
				if !serial {
					ch.Needs = append(ch.Needs, fmt.Sprintf("%s-%d", n, round))
				}
			}
			set.Charts = append(set.Charts, ch)
		}
		began := time.Now()
		if err := set.Apply(b.Context(), c); err != nil {
			b.Fatal(err)
		}
		return time.Since(began)
	}
	all := []string{"cni", "dns", "services", "certs", "operators", "csi"}
	bring(false, "warm")
	var six, chain, serial time.Duration
	for b.Loop() {
		chain += bring(false, "cni", "services", "csi")
		six += bring(false, all...)
		serial += bring(true, all...)
	}
	n := float64(b.N)
	b.ReportMetric(six.Seconds()/n, "six-s")
	b.ReportMetric(chain.Seconds()/n, "chain-s")
	b.ReportMetric(serial.Seconds()/n, "serial-s")
}

// workChart is a chart of one Deployment and its usual companions.
func workChart(name string) cluster.Chart {
	return cluster.Chart{Name: name, Namespace: Namespace, Version: "1.0.0", Files: []assets.File{
		{Name: "Chart.yaml", Data: []byte("apiVersion: v2\nname: " + name + "\nversion: 1.0.0\n")},
		{Name: "templates/all.yaml", Data: []byte(`apiVersion: v1
kind: ServiceAccount
metadata: {name: {{ .Chart.Name }}}
---
apiVersion: v1
kind: ConfigMap
metadata: {name: {{ .Chart.Name }}}
data: {text: hello}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {name: {{ .Chart.Name }}}
rules: [{apiGroups: [""], resources: [pods], verbs: [get]}]
---
apiVersion: v1
kind: Service
metadata: {name: {{ .Chart.Name }}}
spec: {selector: {app: {{ .Chart.Name }}}, ports: [{port: 80}]}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: {{ .Chart.Name }}}
spec:
  replicas: 1
  selector: {matchLabels: {app: {{ .Chart.Name }}}}
  template:
    metadata: {labels: {app: {{ .Chart.Name }}}}
    spec: {containers: [{name: c, image: registry.constellation.example/c:v1}]}
`)},
	}}
}

// makeReady stands in for the controllers and kubelets: it sets each Deployment ready some
// time after its creation.
func makeReady(ctx context.Context, b *testing.B, c *Client, wg *sync.WaitGroup) {
	w, err := c.core.AppsV1().Deployments(Namespace).Watch(ctx, metav1.ListOptions{})
	if err != nil {
		b.Error(err)
		return
	}
	defer w.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case ev, open := <-w.ResultChan():
			if !open {
				b.Error("the watch of deployments has ended")
				return
			}
			d, ok := ev.Object.(*appsv1.Deployment)
			if !ok || ev.Type != "ADDED" {
				continue
			}
			wg.Go(func() {
				select {
				case <-ctx.Done():
					return
				case <-time.After(settling):
				}
				// Helm checks the readiness of the newest ReplicaSet.
				rs := &appsv1.ReplicaSet{
					ObjectMeta: metav1.ObjectMeta{Name: d.Name + "-1", Labels: d.Spec.Template.Labels, OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(d, appsv1.SchemeGroupVersion.WithKind("Deployment"))}, Annotations: map[string]string{"deployment.kubernetes.io/revision": "1"}},
					Spec:       appsv1.ReplicaSetSpec{Replicas: new(int32(1)), Selector: d.Spec.Selector, Template: d.Spec.Template},
				}
				sets := c.core.AppsV1().ReplicaSets(Namespace)
				if _, err := sets.Create(ctx, rs, metav1.CreateOptions{}); err != nil {
					b.Error(err)
					return
				}
				status := []byte(`{"status":{"replicas":1,"readyReplicas":1,"availableReplicas":1,"updatedReplicas":1,"observedGeneration":1}}`)
				if _, err := c.core.AppsV1().Deployments(Namespace).Patch(ctx, d.Name, types.MergePatchType, status, metav1.PatchOptions{}, "status"); err != nil {
					b.Error(err)
				}
				status = []byte(`{"status":{"replicas":1,"readyReplicas":1,"availableReplicas":1,"fullyLabeledReplicas":1,"observedGeneration":1}}`)
				if _, err := sets.Patch(ctx, rs.Name, types.MergePatchType, status, metav1.PatchOptions{}, "status"); err != nil {
					b.Error(err)
				}
			})
		}
	}
}
