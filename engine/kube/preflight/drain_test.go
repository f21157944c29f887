package preflight

import (
	"context"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	admissionapi "k8s.io/api/admission/v1"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"

	"constellation/engine/check"
	"constellation/engine/plan"
	"constellation/engine/sandbox/controlplane"
	"constellation/engine/sandbox/controlplane/controlplanetest"
)

// cluster is a real API server with nodes and pods that are objects alone.
type testCluster struct {
	t    testing.TB
	cp   *controlplane.ControlPlane
	core kubernetes.Interface
}

func startCluster(t testing.TB) *testCluster {
	cp := controlplanetest.Lend(t.(controlplanetest.T), controlplane.Options{})
	config := cp.Config()
	config.QPS = -1
	core, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	return &testCluster{t, cp, core}
}

func (c *testCluster) must(err error) {
	c.t.Helper()
	if err != nil {
		c.t.Fatal(err)
	}
}

func (c *testCluster) namespace(name string) {
	_, err := c.core.CoreV1().Namespaces().Create(c.t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
	c.must(err)
	_, err = c.core.CoreV1().ServiceAccounts(name).Create(c.t.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "default"}}, metav1.CreateOptions{})
	c.must(err)
}

func (c *testCluster) node(name string) {
	n := (&world{leases: map[string]time.Time{}}).addNode(name)
	_, err := c.core.CoreV1().Nodes().Create(c.t.Context(), n, metav1.CreateOptions{})
	c.must(err)
}

// deployment makes a Deployment, its ReplicaSet and ready pods: "web-0" on the first
// node, and so on. There is no controller that would.
func (c *testCluster) deployment(namespace, name string, nodes ...string) {
	labels := map[string]string{"app": name}
	template := corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "main", Image: "example.com/main:1"}}}}
	n := int32(len(nodes))
	d, err := c.core.AppsV1().Deployments(namespace).Create(c.t.Context(), &appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec:       appsv1.DeploymentSpec{Replicas: &n, Selector: &metav1.LabelSelector{MatchLabels: labels}, Template: template},
	}, metav1.CreateOptions{})
	c.must(err)
	set, err := c.core.AppsV1().ReplicaSets(namespace).Create(c.t.Context(), &appsv1.ReplicaSet{
		ObjectMeta: metav1.ObjectMeta{Name: name + "-5f", OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(d, appsv1.SchemeGroupVersion.WithKind("Deployment"))}},
		Spec:       appsv1.ReplicaSetSpec{Replicas: &n, Selector: &metav1.LabelSelector{MatchLabels: labels}, Template: template},
	}, metav1.CreateOptions{})
	c.must(err)
	for i, node := range nodes {
		p := &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{
				Name: fmt.Sprintf("%s-%d", name, i), Labels: labels,
				OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(set, appsv1.SchemeGroupVersion.WithKind("ReplicaSet"))},
			},
			Spec: *template.Spec.DeepCopy(),
		}
		p.Spec.NodeName = node
		p, err := c.core.CoreV1().Pods(namespace).Create(c.t.Context(), p, metav1.CreateOptions{})
		c.must(err)
		p.Status.Phase = corev1.PodRunning
		p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
		_, err = c.core.CoreV1().Pods(namespace).UpdateStatus(c.t.Context(), p, metav1.UpdateOptions{})
		c.must(err)
	}
}

// budget makes a budget over the pods of a Deployment, with a status as of its controller.
func (c *testCluster) budget(namespace, name, app string, unavailable, pods, allowed int32) {
	b, err := c.core.PolicyV1().PodDisruptionBudgets(namespace).Create(c.t.Context(), &policyv1.PodDisruptionBudget{
		ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: map[string]string{"meta.helm.sh/release-name": app + "-release"}},
		Spec:       policyv1.PodDisruptionBudgetSpec{MaxUnavailable: ptr.To(intstr.FromInt32(unavailable)), Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": app}}},
	}, metav1.CreateOptions{})
	c.must(err)
	b.Status = policyv1.PodDisruptionBudgetStatus{
		ObservedGeneration: b.Generation, ExpectedPods: pods, CurrentHealthy: pods, DesiredHealthy: pods - unavailable, DisruptionsAllowed: allowed,
	}
	_, err = c.core.PolicyV1().PodDisruptionBudgets(namespace).UpdateStatus(c.t.Context(), b, metav1.UpdateOptions{})
	c.must(err)
}

// guard is a webhook that denies the eviction of pods whose name begins with "locked".
func (c *testCluster) guard() (requests func() []*admissionapi.AdmissionRequest) {
	var mu sync.Mutex
	var seen []*admissionapi.AdmissionRequest
	server := httptest.NewTLSServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		var review admissionapi.AdmissionReview
		if err := json.NewDecoder(r.Body).Decode(&review); err != nil {
			http.Error(rw, err.Error(), http.StatusBadRequest)
			return
		}
		mu.Lock()
		seen = append(seen, review.Request)
		mu.Unlock()
		review.Response = &admissionapi.AdmissionResponse{UID: review.Request.UID, Allowed: !strings.HasPrefix(review.Request.Name, "locked")}
		if !review.Response.Allowed {
			review.Response.Result = &metav1.Status{Message: "the safe is closed\x1b[2J until Monday"}
		}
		review.Request = nil
		_ = json.NewEncoder(rw).Encode(review) // the API server tells if it misses the answer
	}))
	c.t.Cleanup(server.Close)
	_, err := c.core.AdmissionregistrationV1().ValidatingWebhookConfigurations().Create(c.t.Context(), &admissionv1.ValidatingWebhookConfiguration{
		ObjectMeta: metav1.ObjectMeta{Name: "safe", Labels: map[string]string{"app.kubernetes.io/managed-by": "bank-operator"}},
		Webhooks: []admissionv1.ValidatingWebhook{{
			Name: "safe.bank.example", AdmissionReviewVersions: []string{"v1"}, SideEffects: ptr.To(admissionv1.SideEffectClassNoneOnDryRun),
			ClientConfig: admissionv1.WebhookClientConfig{
				URL:      ptr.To(server.URL + "/safe"),
				CABundle: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw}),
			},
			Rules: []admissionv1.RuleWithOperations{{
				Operations: []admissionv1.OperationType{admissionv1.Create},
				Rule:       admissionv1.Rule{APIGroups: []string{""}, APIVersions: []string{"v1"}, Resources: []string{"pods/eviction"}},
			}},
		}},
	}, metav1.CreateOptions{})
	c.must(err)
	return func() []*admissionapi.AdmissionRequest {
		mu.Lock()
		defer mu.Unlock()
		return slices.Clone(seen)
	}
}

// look runs one check as config's user. The admin reads what the user may not read,
// since only the evictions are tested.
func (c *testCluster) look(config *rest.Config, id string, r check.PreflightRequest, progress func(int64, int64)) []plan.Finding {
	w, err := collect(c.t.Context(), c.cp.Config(), c.core, r)
	c.must(err)
	found := checkOf(id).find(w, &probe{ctx: c.t.Context(), config: config, core: c.core, progress: progress})
	for i := range found {
		found[i].Took = 0
	}
	return found
}

// state is what evictions would change.
func (c *testCluster) state() (out []string) {
	pods, err := c.core.CoreV1().Pods("").List(c.t.Context(), metav1.ListOptions{})
	c.must(err)
	for i := range pods.Items {
		out = append(out, pods.Items[i].Name+" "+pods.Items[i].ResourceVersion)
	}
	budgets, err := c.core.PolicyV1().PodDisruptionBudgets("").List(c.t.Context(), metav1.ListOptions{})
	c.must(err)
	for i := range budgets.Items {
		out = append(out, budgets.Items[i].Name+" "+budgets.Items[i].ResourceVersion)
	}
	return out
}

func TestRehearsalAsksTheAPIServer(t *testing.T) {
	c := startCluster(t)
	for _, name := range []string{"cp-0", "worker-0", "worker-1"} {
		c.node(name)
	}
	c.namespace("shop")
	c.deployment("shop", "free", "worker-0", "worker-0")
	c.deployment("shop", "web", "worker-0", "worker-1")
	c.budget("shop", "web", "web", 1, 2, 1)
	r := check.PreflightRequest{ReplaceControlPlanes: true, ReplaceWorkers: true, Surge: 1, DryRun: true}
	quiet := func(int64, int64) {}

	t.Run("every eviction is granted", func(t *testing.T) {
		want := []plan.Finding{{
			ID: "drain-rehearsal", Severity: plan.Info, Title: "every node that is replaced can be drained",
			Detail: "tested by dry run: 3 of 4 evictions; the other 1 computed from the status of PodDisruptionBudgets",
			Source: "disruption", Reference: evictionPage,
		}}
		if d := cmp.Diff(want, c.look(c.cp.Config(), "drain-rehearsal", r, quiet)); d != "" {
			t.Errorf("findings (-want +got):\n%s", d)
		}
	})

	c.deployment("shop", "full", "worker-1", "worker-1")
	c.budget("shop", "full", "full", 0, 2, 0)
	c.deployment("shop", "double", "worker-1")
	c.budget("shop", "double-a", "double", 1, 1, 1)
	c.budget("shop", "double-b", "double", 1, 1, 1)
	c.deployment("shop", "locked", "worker-1", "worker-1")
	c.budget("shop", "locked", "locked", 1, 2, 1)
	requests := c.guard()
	// The API server learns of webhooks a moment later.
	for deadline := time.Now().Add(20 * time.Second); len(requests()) == 0; {
		if time.Now().After(deadline) {
			t.Fatal("the API server never asks the webhook")
		}
		c.must(evict(t.Context(), c.core.PolicyV1().RESTClient(), c.pod("free-0")))
	}
	before := c.state()

	t.Run("budgets, two budgets and a webhook refuse", func(t *testing.T) {
		var mu sync.Mutex
		var last, total int64
		found := c.look(c.cp.Config(), "drain-rehearsal", r, func(current, of int64) {
			mu.Lock()
			defer mu.Unlock()
			last, total = max(last, current), of
		})
		checkFindings(t, "drains.yaml", "budgets, two budgets and a webhook refuse", found)
		if last != total || total != 8 {
			t.Errorf("progress ended at %d of %d, want 8 of 8", last, total)
		}
	})
	t.Run("the verdicts are the API server's", func(t *testing.T) {
		client := c.core.PolicyV1().RESTClient()
		for name, want := range map[string]answer{
			"free-0":   {verdict: evictable},
			"web-0":    {verdict: evictable},
			"full-0":   {verdict: noRoom, text: "The disruption budget full needs 2 healthy pods and has 2 currently"},
			"double-0": {verdict: overlap, text: "This pod has more than one PodDisruptionBudget, which the eviction subresource does not support."},
			"locked-1": {verdict: denied, by: "webhook safe.bank.example", text: `admission webhook "safe.bank.example" denied the request: the safe is closed\x1b[2J until Monday`},
			"nobody":   {verdict: gone, text: `pods "nobody" not found`},
		} {
			if got := classify(evict(t.Context(), client, c.pod(name))); got != want {
				t.Errorf("%s: %+v, want %+v", name, got, want)
			}
		}
	})
	t.Run("a user who may not evict", func(t *testing.T) {
		nobody, err := c.cp.ConfigFor("nobody")
		c.must(err)
		checkFindings(t, "drains.yaml", "a user who may not evict", c.look(nobody, "drain-rehearsal", r, quiet))
	})
	t.Run("dry runs are switched off", func(t *testing.T) {
		r := r
		r.DryRun = false
		n := len(requests())
		checkFindings(t, "drains.yaml", "dry runs are switched off", c.look(c.cp.Config(), "drain-rehearsal", r, quiet))
		if len(requests()) != n {
			t.Error("the webhook was asked")
		}
	})
	t.Run("nothing has changed", func(t *testing.T) {
		if d := cmp.Diff(before, c.state()); d != "" {
			t.Errorf("objects (-before +after):\n%s", d)
		}
		for _, r := range requests() {
			if r.DryRun == nil || !*r.DryRun {
				t.Fatalf("the webhook received the eviction of %s without dryRun", r.Name)
			}
		}
	})
}

// pod is the slim copy of a pod of shop; of one that is not there its name alone.
func (c *testCluster) pod(name string) *pod {
	p, err := c.core.CoreV1().Pods("shop").Get(c.t.Context(), name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return &pod{namespace: "shop", name: name}
	}
	c.must(err)
	out := slimPod(p)
	return &out
}

// TestTheRehearsalEndsInTime has webhooks without a backend, or late.
func TestTheRehearsalEndsInTime(t *testing.T) {
	c := startCluster(t)
	for _, name := range []string{"worker-0", "worker-1"} {
		c.node(name)
	}
	c.namespace("shop")
	c.deployment("shop", "web", slices.Repeat([]string{"worker-0"}, 40)...)
	c.budget("shop", "web", "web", 0, 40, 0)
	seen := make(chan string, 1000)
	silent := httptest.NewTLSServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		select {
		case seen <- r.URL.Path:
		default:
		}
		_, _ = io.Copy(io.Discard, r.Body) // or the server does not see that the client has gone
		<-r.Context().Done()
	}))
	t.Cleanup(silent.Close)
	refusing := httptest.NewTLSServer(http.NotFoundHandler())
	refusing.Close()

	for _, tt := range []struct {
		name    string
		url     string
		failure admissionv1.FailurePolicyType
		seconds int32
		// want begins with severities; most is how many evictions are asked for.
		want []string
		most int
	}{
		{name: "a silent webhook with a timeout of 30 s and the policy Fail", url: silent.URL + "/fail", failure: admissionv1.Fail, seconds: 30, want: []string{
			"block: webhook safe.bank.example responds to no eviction within 2s, and its failurePolicy is Fail: " +
				`kubectl patch validatingwebhookconfiguration safe --type=json -p '[{"op":"test","path":"/webhooks/0/name","value":"safe.bank.example"},{"op":"add","path":"/webhooks/0/failurePolicy","value":"Ignore"},{"op":"add","path":"/webhooks/0/timeoutSeconds","value":1}]'`,
			"block: the drain of worker-0 (1 of 2) would be the first to hang, at pod shop/web-0",
		}, most: evictionWorkers},
		{name: "a silent webhook with a timeout of 30 s and the policy Ignore", url: silent.URL + "/ignore", failure: admissionv1.Ignore, seconds: 30, want: []string{
			"block: the drain of worker-0 (1 of 2) would be the first to hang, at pod shop/web-0",
			"warn: webhook safe.bank.example is slow for evictions: more than 2s each, the drain of 40 pods would take more than 1m20s one after the other: " +
				`kubectl patch validatingwebhookconfiguration safe --type=json -p '[{"op":"test","path":"/webhooks/0/name","value":"safe.bank.example"},{"op":"add","path":"/webhooks/0/timeoutSeconds","value":1}]'`,
		}, most: evictionWorkers},
		{name: "a silent webhook with a timeout of 1 s and the policy Ignore", url: silent.URL + "/slow", failure: admissionv1.Ignore, seconds: 1, want: []string{
			"block: the drain of worker-0 (1 of 2) would be the first to hang, at pod shop/web-0",
			"warn: webhook safe.bank.example is slow for evictions",
		}, most: 3 * evictionWorkers},
		{name: "a webhook whose port is closed", url: refusing.URL + "/", failure: admissionv1.Fail, seconds: 30, want: []string{
			"block: webhook safe.bank.example denies the eviction of",
			"block: the drain of worker-0 (1 of 2) would be the first to hang, at pod shop/web-0",
		}, most: maxStrikes + evictionWorkers},
	} {
		t.Run(tt.name, func(t *testing.T) {
			hooks := c.core.AdmissionregistrationV1().ValidatingWebhookConfigurations()
			_ = hooks.Delete(t.Context(), "safe", metav1.DeleteOptions{}) // there is none the first time
			_, err := hooks.Create(t.Context(), &admissionv1.ValidatingWebhookConfiguration{
				ObjectMeta: metav1.ObjectMeta{Name: "safe"},
				Webhooks: []admissionv1.ValidatingWebhook{{
					Name: "safe.bank.example", AdmissionReviewVersions: []string{"v1"}, SideEffects: ptr.To(admissionv1.SideEffectClassNone),
					FailurePolicy: &tt.failure, TimeoutSeconds: &tt.seconds,
					ClientConfig: admissionv1.WebhookClientConfig{URL: &tt.url, CABundle: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: silent.Certificate().Raw})},
					Rules: []admissionv1.RuleWithOperations{{
						Operations: []admissionv1.OperationType{admissionv1.Create},
						Rule:       admissionv1.Rule{APIGroups: []string{""}, APIVersions: []string{"v1"}, Resources: []string{"pods/eviction"}},
					}},
				}},
			}, metav1.CreateOptions{})
			c.must(err)
			c.untilAsked(tt.url, seen)

			w, err := collect(t.Context(), c.cp.Config(), c.core, check.PreflightRequest{ReplaceWorkers: true, Surge: 1, DryRun: true})
			c.must(err)
			var asked atomic.Int64
			p := &probe{ctx: t.Context(), config: c.cp.Config(), core: c.core, limit: 2 * time.Second, progress: func(int64, int64) {}}
			p.config.WrapTransport = func(rt http.RoundTripper) http.RoundTripper {
				return transport(func(r *http.Request) (*http.Response, error) { asked.Add(1); return rt.RoundTrip(r) })
			}
			var got []string
			found := checkOf("drain-rehearsal").find(w, p)
			slices.SortStableFunc(found, func(a, b plan.Finding) int { return rank(a.Severity) - rank(b.Severity) })
			for i, f := range found {
				line := fmt.Sprintf("%s: %s: %s", f.Severity, f.Title, f.Command)
				if i < len(tt.want) && strings.HasPrefix(line, tt.want[i]) {
					line = tt.want[i]
				}
				got = append(got, line)
				if !strings.Contains(f.Detail, "computed from the status of PodDisruptionBudgets") {
					t.Errorf("%s: the detail does not say what was computed: %s", f.Title, f.Detail)
				}
			}
			if d := cmp.Diff(tt.want, got); d != "" {
				t.Errorf("findings (-want +got):\n%s", d)
			}
			if n := int(asked.Load()); n > tt.most {
				t.Errorf("%d evictions were asked for, want %d at most", n, tt.most)
			}
		})
	}
}

type transport func(*http.Request) (*http.Response, error)

func (f transport) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// untilAsked waits until the API server calls the webhook at address, or
// fails to.
func (c *testCluster) untilAsked(address string, seen chan string) {
	c.t.Helper()
	for deadline := time.Now().Add(20 * time.Second); ; {
		ctx, cancel := context.WithTimeout(c.t.Context(), 200*time.Millisecond)
		err := evict(ctx, c.core.PolicyV1().RESTClient(), c.pod("web-0"))
		cancel()
		if classify(err).uncalled() {
			return
		}
		for len(seen) > 0 {
			if strings.HasSuffix(address, <-seen) {
				return
			}
		}
		if time.Now().After(deadline) {
			c.t.Fatal("the API server never asks the webhook")
		}
	}
}

// TestComputedDrainsAreThoseThatAreAskedFor looks at the same cluster twice.
func TestComputedDrainsAreThoseThatAreAskedFor(t *testing.T) {
	c := startCluster(t)
	for _, name := range []string{"worker-0", "worker-1"} {
		c.node(name)
	}
	sick := func(namespace, name string) {
		t.Helper()
		_, err := c.core.CoreV1().Pods(namespace).Patch(t.Context(), name, types.StrategicMergePatchType, []byte(`{"status":{"conditions":[{"type":"Ready","status":"False"}]}}`), metav1.PatchOptions{}, "status")
		c.must(err)
	}
	change := func(namespace, name string, change func(*policyv1.PodDisruptionBudget)) {
		t.Helper()
		budgets := c.core.PolicyV1().PodDisruptionBudgets(namespace)
		b, err := budgets.Get(t.Context(), name, metav1.GetOptions{})
		c.must(err)
		change(b)
		status := b.Status
		b, err = budgets.Update(t.Context(), b, metav1.UpdateOptions{})
		c.must(err)
		b.Status = status
		_, err = budgets.UpdateStatus(t.Context(), b, metav1.UpdateOptions{})
		c.must(err)
	}
	allowSick := func(b *policyv1.PodDisruptionBudget) {
		b.Spec.UnhealthyPodEvictionPolicy = ptr.To(policyv1.AlwaysAllow)
		b.Status.ObservedGeneration = b.Generation + 1
	}
	short := func(healthy, desired int32) func(*policyv1.PodDisruptionBudget) {
		return func(b *policyv1.PodDisruptionBudget) {
			b.Status.CurrentHealthy, b.Status.DesiredHealthy, b.Status.DisruptionsAllowed = healthy, desired, max(healthy-desired, 0)
		}
	}
	for i, tt := range []struct {
		name  string
		plant func(namespace string)
		want  string // severity and title, without the namespace
	}{
		{name: "a budget allows a disruption", plant: func(ns string) { c.budget(ns, "web", "web", 1, 2, 1) }, want: "ok every node that is replaced can be drained"},
		{name: "a budget never allows a disruption", plant: func(ns string) { c.budget(ns, "web", "web", 0, 2, 0) }, want: "block the drain of worker-0 (1 of 2) would be the first to hang, at pod /web-0"},
		{name: "a budget allows no disruption now", plant: func(ns string) {
			c.budget(ns, "web", "web", 1, 2, 0)
		}, want: "warn the drain of worker-0 (1 of 2) would be the first to wait, for pod /web-0"},
		{name: "two budgets select the pod", plant: func(ns string) {
			c.budget(ns, "a", "web", 1, 2, 1)
			c.budget(ns, "b", "web", 1, 2, 1)
		}, want: "block the drain of worker-0 (1 of 2) would be the first to hang, at pod /web-0"},
		{name: "a budget that its controller has not seen", plant: func(ns string) {
			c.budget(ns, "web", "web", 1, 2, 1)
			change(ns, "web", func(b *policyv1.PodDisruptionBudget) { b.Spec.MaxUnavailable = ptr.To(intstr.FromInt32(2)) })
		}, want: "warn the drain of worker-0 (1 of 2) would be the first to wait, for pod /web-0"},
		{name: "no pod is ready", plant: func(ns string) {
			c.budget(ns, "web", "web", 1, 2, 0)
			sick(ns, "web-0")
			sick(ns, "web-1")
			change(ns, "web", short(0, 1))
		}, want: "block the drain of worker-0 (1 of 2) would be the first to hang, at pod /web-0"},
		{name: "no pod is ready, and such may go", plant: func(ns string) {
			c.budget(ns, "web", "web", 1, 2, 0)
			sick(ns, "web-0")
			sick(ns, "web-1")
			change(ns, "web", func(b *policyv1.PodDisruptionBudget) { short(0, 1)(b); allowSick(b) })
		}, want: "ok every node that is replaced can be drained"},
		{name: "a pod that is not ready beyond what must be healthy", plant: func(ns string) {
			c.budget(ns, "web", "web", 1, 2, 0)
			sick(ns, "web-0")
			change(ns, "web", short(1, 1))
		}, want: "warn the drain of worker-1 (2 of 2) would be the first to wait, for pod /web-1"},
		{name: "a namespace that is being deleted", plant: func(ns string) {
			c.budget(ns, "web", "web", 1, 2, 1)
			c.must(c.core.CoreV1().Namespaces().Delete(t.Context(), ns, metav1.DeleteOptions{}))
			// Its end comes to the API server's admission a moment later.
			for deadline := time.Now().Add(20 * time.Second); ; {
				p := &pod{namespace: ns, name: "web-0"}
				if a := classify(evict(t.Context(), c.core.PolicyV1().RESTClient(), p)); a.verdict == ending {
					break
				} else if time.Now().After(deadline) {
					t.Fatalf("evictions are still admitted: %+v", a)
				}
			}
		}, want: "warn the drain of worker-0 (1 of 2) would be the first to wait, for pod /web-0"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			ns := fmt.Sprintf("shop-%d", i)
			c.namespace(ns)
			c.deployment(ns, "web", "worker-0", "worker-1")
			tt.plant(ns)
			look := func(dryRun bool) []plan.Finding {
				w, err := collect(t.Context(), c.cp.Config(), c.core, check.PreflightRequest{ReplaceControlPlanes: true, ReplaceWorkers: true, Surge: 1, DryRun: dryRun})
				c.must(err)
				w.pods = slices.DeleteFunc(w.pods, func(p pod) bool { return p.namespace != ns })
				found := checkOf("drain-rehearsal").find(w, &probe{ctx: t.Context(), config: c.cp.Config(), core: c.core, progress: func(int64, int64) {}})
				for i := range found {
					found[i].Detail = "" // quotes the requests
				}
				return found
			}
			asked, computed := look(true), look(false)
			if d := cmp.Diff(asked, computed); d != "" {
				t.Errorf("findings (-asked +computed):\n%s", d)
			}
			if len(asked) != 1 {
				t.Fatalf("findings %+v, want one", asked)
			}
			if got := string(asked[0].Severity) + " " + strings.ReplaceAll(asked[0].Title, ns, ""); got != tt.want {
				t.Errorf("found %q, want %q", got, tt.want)
			}
		})
	}
}

// TestPodsOfPlansAreNotMoved: the pod of a Plan's Job is for its own node alone, so it needs no other place, and has no data of its own.
func TestPodsOfPlansAreNotMoved(t *testing.T) {
	for _, tt := range []struct {
		name   string
		labels map[string]string
		want   int // findings
	}{
		{name: "the pod of a Plan", labels: map[string]string{"upgrade.cattle.io/plan": "os", "upgrade.cattle.io/controller": "system-upgrade-controller"}},
		{name: "the pod of another Job", want: 2},
		{name: "a pod that only bears the name of a Plan", labels: map[string]string{"upgrade.cattle.io/plan": "os"}, want: 2},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := clean()
			w.request.ReplaceWorkers, w.request.Surge = true, 1
			w.leases = map[string]time.Time{}
			w.addNode("worker-1")
			w.addNode("worker-2")
			w.pods = append(w.pods, pod{
				namespace: "system-upgrade", name: "apply-os", node: "worker-1", uid: "u", phase: corev1.PodRunning, labels: tt.labels, controller: owner{kind: "Job", name: "apply-os", uid: "j"},
				nodeSelector: map[string]string{"kubernetes.io/hostname": "worker-1"}, hostPath: []string{"host-root (/)"},
			})
			if found := append(capacity(w, nil), localData(w, nil)...); len(found) != tt.want {
				t.Errorf("findings %+v, want %d", found, tt.want)
			}
		})
	}
}
