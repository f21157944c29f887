package benchmark

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"constellation/engine/check"
	"constellation/engine/lifecycle"
	"constellation/engine/plan"
)

// largeCluster serves nodes with kubelets, and pods, in pages. Other lists are empty.
type largeCluster struct {
	nodes, pods      int
	lists, kubelets  atomic.Int64
	atOnce, together atomic.Int64 // requests to kubelets: now, and the maximum
}

func (c *largeCluster) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	answer := func(v any) { _ = json.NewEncoder(w).Encode(v) }
	page := func(total int) (from, to int, more string) {
		limit, _ := strconv.Atoi(r.URL.Query().Get("limit"))
		from, _ = strconv.Atoi(r.URL.Query().Get("continue"))
		if to = total; limit > 0 && from+limit < total {
			to = from + limit
			more = strconv.Itoa(to)
		}
		return from, to, more
	}
	kind := func(list string) metav1.TypeMeta { return metav1.TypeMeta{Kind: list, APIVersion: "v1"} }
	switch path := r.URL.Path; {
	case strings.HasSuffix(path, "/proxy/configz"):
		c.kubelets.Add(1)
		now := c.atOnce.Add(1)
		defer c.atOnce.Add(-1)
		for most := c.together.Load(); now > most && !c.together.CompareAndSwap(most, now); most = c.together.Load() {
		}
		answer(map[string]any{"kubeletconfig": strongKubelet})
	case strings.HasSuffix(path, "/proxy/flagz"):
		http.NotFound(w, r)
	case path == "/api/v1/nodes":
		c.lists.Add(1)
		from, to, more := page(c.nodes)
		l := corev1.NodeList{TypeMeta: kind("NodeList"), ListMeta: metav1.ListMeta{Continue: more}}
		for i := from; i < to; i++ {
			l.Items = append(l.Items, corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("worker-%d", i)}})
		}
		answer(l)
	case path == "/api/v1/pods":
		c.lists.Add(1)
		from, to, more := page(c.pods)
		l := corev1.PodList{TypeMeta: kind("PodList"), ListMeta: metav1.ListMeta{Continue: more}}
		for i := from; i < to; i++ {
			l.Items = append(l.Items, *podOf(fmt.Sprintf("web-%d-x", i), func(p *corev1.Pod) {
				p.Labels = map[string]string{"pod-template-hash": "1"}
				p.OwnerReferences = []metav1.OwnerReference{{Kind: "ReplicaSet", Name: fmt.Sprintf("web-%d-1", i%100), Controller: yes}}
			}))
		}
		answer(l)
	case strings.HasPrefix(path, "/apis/"+rbacv1.GroupName):
		c.lists.Add(1)
		answer(map[string]any{"kind": "List", "apiVersion": rbacv1.GroupName + "/v1", "items": []any{}})
	case r.Method == http.MethodPost, path == "/api", path == healthPath:
		http.Error(w, "{}", http.StatusUnauthorized)
	default:
		c.lists.Add(1)
		http.NotFound(w, r)
	}
}

func runLarge(tb testing.TB, c *largeCluster) check.Security {
	tb.Helper()
	s := httptest.NewServer(c)
	defer s.Close()
	out, err := Run(tb.Context(), &rest.Config{Host: s.URL}, Request{Version: lifecycle.Newest()}, func(plan.Event) {})
	if err != nil {
		tb.Fatal(err)
	}
	return out
}

// TestRequestsOfALargeCluster bounds the requests: one list per kind, in pages, and one question to each
// kubelet, 32 at a time.
func TestRequestsOfALargeCluster(t *testing.T) {
	c := &largeCluster{nodes: 1000, pods: 2000}
	out := runLarge(t, c)
	if out.Nodes != 1000 || out.Workloads != 100 {
		t.Errorf("%d nodes and %d workloads were seen", out.Nodes, out.Workloads)
	}
	// 2 pages of nodes, 4 of pods, and 9 further lists.
	if n := c.lists.Load(); n > 2+4+9 {
		t.Errorf("%d requests for lists", n)
	}
	if n, most := c.kubelets.Load(), c.together.Load(); n != 1000 || most > 32 {
		t.Errorf("%d requests to kubelets, %d at once", n, most)
	}
	for i := range out.Results {
		if r := &out.Results[i]; r.ID == "cis-4.2.1" && r.Status != check.SecurityPassed {
			t.Errorf("%s is %s: %s %+v", r.ID, r.Status, r.Reason, r.Evidence)
		}
	}
}

// BenchmarkSecurityOf1000Nodes compares a cluster of 1,000 nodes and 10,000 pods with the guides. A server
// of the test answers.
func BenchmarkSecurityOf1000Nodes(b *testing.B) {
	for b.Loop() {
		runLarge(b, &largeCluster{nodes: 1000, pods: 10000})
	}
}
