package operator

import (
	"fmt"
	"log/slog"
	"net/http"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"constellation/engine/sandbox/controlplane"
)

// BenchmarkDrain empties 100 nodes of five pods each at the same time. The pods have
// no grace, so the API server deletes them itself, and what is measured is ours.
func BenchmarkDrain(b *testing.B) {
	const nodes, pods = 100, 5
	cp := controlplane.ForTest(b, controlplane.Options{})
	cfg := cp.Config()
	cfg.QPS = -1
	var requests atomic.Int64
	cfg.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return roundTripper(func(r *http.Request) (*http.Response, error) {
			requests.Add(1)
			return next.RoundTrip(r)
		})
	})
	c := kubernetes.NewForConfigOrDie(cfg)
	if _, err := c.CoreV1().ServiceAccounts("default").Create(b.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "default"}}, metav1.CreateOptions{}); err != nil {
		b.Fatal(err)
	}
	round := 0
	for b.Loop() {
		b.StopTimer()
		round++
		for n := range nodes {
			for p := range pods {
				_, err := c.CoreV1().Pods("default").Create(b.Context(), &corev1.Pod{
					ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("p-%d-%d-%d", round, n, p)},
					Spec: corev1.PodSpec{
						NodeName: fmt.Sprintf("n%d", n), TerminationGracePeriodSeconds: ptr(int64(0)),
						Containers: []corev1.Container{{Name: "c", Image: "registry.example/c:v1"}},
					},
				}, metav1.CreateOptions{})
				if err != nil {
					b.Fatal(err)
				}
			}
		}
		woken := make(chan struct{}, 1)
		d := newDrainer(c, func() {
			select {
			case woken <- struct{}{}:
			default:
			}
		}, slog.New(slog.DiscardHandler))
		before, start := requests.Load(), time.Now()
		b.StartTimer()
		for n := range nodes {
			d.drain(fmt.Sprintf("n%d", n))
		}
		for left := nodes; left > 0; {
			<-woken
			left = 0
			for n := range nodes {
				if drained, _ := d.state(fmt.Sprintf("n%d", n)); !drained {
					left++
				}
			}
		}
		b.StopTimer()
		b.ReportMetric(float64(requests.Load()-before)/nodes, "requests/node")
		b.ReportMetric(nodes*pods/time.Since(start).Seconds(), "evictions/s")
		d.close()
		b.StartTimer()
	}
}
