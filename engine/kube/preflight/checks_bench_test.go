package preflight

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"constellation/engine/check"
)

// city is a village with many nodes and pods: Deployments of ten pods with a budget each,
// twenty to a namespace, and some of everything that is slow to look at.
func city(nodes, pods int) *world {
	w := village()
	names := []string{"worker-0", "worker-1"}
	for i := 3; i < nodes; i++ {
		names = append(names, fmt.Sprintf("worker-%d", i))
		w.addNode(names[len(names)-1])
	}
	next := 0
	node := func() string { next++; return names[next%len(names)] }
	for i := 0; len(w.pods) < pods; i++ {
		ns, name := fmt.Sprintf("team-%d", i/20), fmt.Sprintf("app-%d", i)
		w.namespaces[ns] = metav1.ObjectMeta{Name: ns, Labels: map[string]string{corev1.LabelMetadataName: ns}}
		var on []string
		for range 10 {
			on = append(on, node())
		}
		w.addDeployment(ns, name, func(p *pod) {
			p.request = resources{cpu: 100, memory: 128 << 20}
			p.emptyDir = []string{"tmp"}
			if i%4 == 0 {
				p.affinity = &corev1.Affinity{PodAntiAffinity: &corev1.PodAntiAffinity{RequiredDuringSchedulingIgnoredDuringExecution: []corev1.PodAffinityTerm{{
					TopologyKey: corev1.LabelHostname, LabelSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": name}},
				}}}}
			}
		}, on...)
		// The status is set here: addBudget counts pods one by one.
		w.addBudget(ns, name, "", maxUnavailable(1))
		b := &w.pdbs[len(w.pdbs)-1]
		b.Spec.Selector.MatchLabels["app"] = name
		b.Status.ExpectedPods, b.Status.CurrentHealthy, b.Status.DesiredHealthy, b.Status.DisruptionsAllowed = 10, 10, 9, 1
	}
	w.addWebhook([]string{"worker-0", "worker-1"}, func(h *admissionv1.ValidatingWebhook) { h.NamespaceSelector = nil })
	return w
}

// BenchmarkChecks is what looking takes when everything has been read, without evictions.
func BenchmarkChecks(b *testing.B) {
	for _, size := range []struct{ nodes, pods, surge int }{{nodes: 100, pods: 5_000, surge: 1}, {nodes: 1_000, pods: 20_000, surge: 1}, {nodes: 1_000, pods: 20_000, surge: 0}} {
		b.Run(fmt.Sprintf("nodes=%d/pods=%d/surge=%d", size.nodes, size.pods, size.surge), func(b *testing.B) {
			w := city(size.nodes, size.pods)
			w.request.Surge = size.surge
			b.ReportAllocs()
			for b.Loop() {
				w.lookups = nil
				for _, c := range workloadChecks() {
					c.find(w, &probe{ctx: context.Background(), progress: func(int64, int64) {}})
				}
			}
		})
	}
}

// BenchmarkEvictions compares our dry-run evictions with the same requests sent as fast
// as the client can: "ratio" is to be 0.8 at least.
func BenchmarkEvictions(b *testing.B) {
	c := startCluster(b)
	c.node("worker-0")
	c.namespace("shop")
	nodes := make([]string, 10)
	for i := range nodes {
		nodes[i] = "worker-0"
	}
	for i := range maxEvictions / len(nodes) {
		name := fmt.Sprintf("app-%d", i)
		c.deployment("shop", name, nodes...)
		c.budget("shop", name, name, 1, 10, 1)
	}
	w, err := collect(b.Context(), c.cp.Config(), c.core, check.PreflightRequest{ReplaceWorkers: true, Surge: 1, DryRun: true})
	c.must(err)
	pods := w.rehearsed()
	p := &probe{ctx: b.Context(), config: c.cp.Config(), core: c.core, progress: func(int64, int64) {}}
	var raw, ours time.Duration
	for b.Loop() {
		start := time.Now()
		rawEvictions(b, c.core, pods, evictionWorkers)
		raw += time.Since(start)
		start = time.Now()
		answers, _, err := ask(p, pods)
		c.must(err)
		ours += time.Since(start)
		for p, a := range answers {
			if a.verdict != evictable {
				b.Fatalf("eviction of %s: %+v", p.name, a)
			}
		}
	}
	requests := float64(b.N * len(pods))
	b.ReportMetric(requests/raw.Seconds(), "raw/s")
	b.ReportMetric(requests/ours.Seconds(), "ours/s")
	b.ReportMetric(raw.Seconds()/ours.Seconds(), "ratio")
}

func rawEvictions(b *testing.B, core kubernetes.Interface, pods []*pod, workers int) {
	next := make(chan *pod)
	var wait sync.WaitGroup
	for range workers {
		wait.Go(func() {
			for p := range next {
				if err := evict(b.Context(), core.PolicyV1().RESTClient(), p); err != nil {
					b.Error(err)
				}
			}
		})
	}
	for _, p := range pods {
		next <- p
	}
	close(next)
	wait.Wait()
}
