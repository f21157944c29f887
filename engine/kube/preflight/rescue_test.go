package preflight

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/kubernetes"

	"constellation/engine/plan"
	"constellation/engine/sandbox/controlplane"
)

// deadlock is a real control plane with its controllers and scheduler, two planted nodes, and a
// kubelet's part played by this test: bound pods become ready, deleted ones end.
type deadlock struct {
	*site
	kubectl, kubeconfig string
}

func newDeadlock(t *testing.T) *deadlock {
	cp := controlplane.ForTest(t, controlplane.Options{
		Controllers:           true,
		APIServerArgs:         []string{"--disable-admission-plugins=ServiceAccount,TaintNodesByCondition"},
		ControllerManagerArgs: []string{"--controllers=*,-node-lifecycle-controller,-taint-eviction-controller"}, // no kubelet renews leases
	})
	d := &deadlock{site: &site{t: t, cp: cp, config: cp.Config()}, kubeconfig: filepath.Join(t.TempDir(), "kubeconfig")}
	bin, err := controlplane.FindBinaries()
	d.must(err)
	d.kubectl = filepath.Join(bin, "kubectl")
	b, err := cp.Kubeconfig()
	d.must(err)
	d.must(os.WriteFile(d.kubeconfig, b, 0o600))
	d.core, err = kubernetes.NewForConfig(d.config)
	d.must(err)
	for _, name := range []string{"worker-0", "worker-1"} {
		n, err := d.core.CoreV1().Nodes().Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
		d.must(err)
		n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
		n.Status.Capacity = corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("4"), corev1.ResourceMemory: resource.MustParse("4Gi"), corev1.ResourcePods: resource.MustParse("20")}
		n.Status.Allocatable = n.Status.Capacity
		_, err = d.core.CoreV1().Nodes().UpdateStatus(t.Context(), n, metav1.UpdateOptions{})
		d.must(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	t.Cleanup(func() { cancel(); <-ended })
	go func() { defer close(ended); d.kubelets(ctx) }()
	return d
}

// kubelets plays the kubelets until ctx ends. Errors are transient: the next round repeats.
func (d *deadlock) kubelets(ctx context.Context) {
	for ctx.Err() == nil {
		l, err := d.core.CoreV1().Pods("").List(ctx, metav1.ListOptions{})
		for i := 0; err == nil && i < len(l.Items); i++ {
			p := &l.Items[i]
			pods := d.core.CoreV1().Pods(p.Namespace)
			switch {
			case p.Spec.NodeName == "":
			case p.DeletionTimestamp != nil:
				_ = pods.Delete(ctx, p.Name, metav1.DeleteOptions{GracePeriodSeconds: new(int64(0))})
			case p.Status.Phase == corev1.PodPending:
				p.Status.Phase = corev1.PodRunning
				p.Status.Conditions = append(p.Status.Conditions, corev1.PodCondition{Type: corev1.PodReady, Status: corev1.ConditionTrue})
				_, _ = pods.UpdateStatus(ctx, p, metav1.UpdateOptions{})
			}
		}
		select {
		case <-ctx.Done():
		case <-time.After(200 * time.Millisecond):
		}
	}
}

// deploy makes a Deployment with one replica and waits until its pod runs.
func (d *deadlock) deploy(namespace, name string) (node string) {
	d.t.Helper()
	ctx := d.t.Context()
	_, err := d.core.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}, metav1.CreateOptions{})
	d.must(err)
	labels := map[string]string{"app": name}
	_, err = d.core.AppsV1().Deployments(namespace).Create(ctx, &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: appsv1.DeploymentSpec{
		Replicas: new(int32(1)), Selector: &metav1.LabelSelector{MatchLabels: labels},
		Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "example.com/c:1"}}}},
	}}, metav1.CreateOptions{})
	d.must(err)
	d.eventually("a ready pod of "+name, func() bool {
		l, err := d.core.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{})
		for i := 0; err == nil && i < len(l.Items); i++ {
			if node = l.Items[i].Spec.NodeName; l.Items[i].Status.Phase == corev1.PodRunning {
				return true
			}
		}
		return false
	})
	return node
}

func (d *deadlock) eventually(what string, holds func() bool) {
	d.t.Helper()
	for deadline := time.Now().Add(60 * time.Second); !holds(); time.Sleep(100 * time.Millisecond) {
		if time.Now().After(deadline) {
			d.t.Fatalf("not within 60 s: %s", what)
		}
	}
}

// drain starts a real `kubectl drain`. The channel gets its output and error.
func (d *deadlock) drain(node string) <-chan string {
	out := make(chan string, 1)
	cmd := exec.CommandContext(d.t.Context(), d.kubectl, "--kubeconfig", d.kubeconfig, "drain", node, "--ignore-daemonsets", "--timeout=120s")
	go func() {
		b, err := cmd.CombinedOutput()
		if err == nil {
			out <- ""
			return
		}
		out <- err.Error() + ": " + string(b)
	}()
	return out
}

// untie waits for advice about an object, executes its command, and waits for the drain.
func (d *deadlock) untie(drained <-chan string, about string) plan.Finding {
	d.t.Helper()
	var advice plan.Finding
	d.eventually("advice about "+about, func() bool {
		found, err := StuckDrains(d.t.Context(), d.config)
		d.must(err)
		i := slices.IndexFunc(found, func(f plan.Finding) bool { return slices.Contains(f.Objects, about) && f.Command != "" })
		if i >= 0 {
			advice = found[i]
		}
		return i >= 0
	})
	select {
	case out := <-drained:
		d.t.Fatalf("the drain ended before the advice: %s", out)
	default:
	}
	if !strings.Contains(advice.Remedy, "Risk: ") {
		d.t.Errorf("the advice names no risk: %+v", advice)
	}
	cmd := exec.CommandContext(d.t.Context(), "sh", "-c", advice.Command)
	cmd.Env = append(os.Environ(), "PATH="+filepath.Dir(d.kubectl)+":"+os.Getenv("PATH"), "KUBECONFIG="+d.kubeconfig)
	if b, err := cmd.CombinedOutput(); err != nil {
		d.t.Fatalf("%s: %v: %s", advice.Command, err, b)
	}
	if out := <-drained; out != "" {
		d.t.Fatalf("`%s` did not untie the drain: %s", advice.Command, out)
	}
	return advice
}

// TestAdviceUntiesRealDrains drains planted nodes with kubectl, which waits without an end, and executes
// the command of the advice.
func TestAdviceUntiesRealDrains(t *testing.T) {
	d := newDeadlock(t)
	ctx := t.Context()
	if found, err := StuckDrains(ctx, d.config); err != nil || len(found) > 0 {
		t.Fatalf("a cluster without a drain: %v, %+v", err, found)
	}

	node := d.deploy("shop", "web")
	_, err := d.core.PolicyV1().PodDisruptionBudgets("shop").Create(ctx, &policyv1.PodDisruptionBudget{
		ObjectMeta: metav1.ObjectMeta{Name: "web"},
		Spec:       policyv1.PodDisruptionBudgetSpec{MinAvailable: new(intstr.FromInt32(1)), Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "web"}}},
	}, metav1.CreateOptions{})
	d.must(err)
	d.eventually("the budget is observed", func() bool {
		b, err := d.core.PolicyV1().PodDisruptionBudgets("shop").Get(ctx, "web", metav1.GetOptions{})
		return err == nil && b.Status.ObservedGeneration == b.Generation && b.Status.ExpectedPods == 1 && b.Status.CurrentHealthy == 1
	})
	f := d.untie(d.drain(node), "poddisruptionbudget/shop/web")
	for _, want := range []string{"node " + node + " waits for pod shop/web-", "PodDisruptionBudget shop/web allows no eviction"} {
		if !strings.Contains(f.Title, want) {
			t.Errorf("title %q lacks %q", f.Title, want)
		}
	}
	if !strings.Contains(f.Detail, "Deployment shop/web has 1 of 1 ready") || f.Command != "kubectl -n shop scale deployment/web --replicas=2" || f.Severity != plan.Block {
		t.Errorf("budget: %+v", f)
	}

	// A webhook that reviews evictions and has no backend.
	_, err = d.core.CoreV1().Nodes().Patch(ctx, node, types.MergePatchType, []byte(`{"spec":{"unschedulable":false}}`), metav1.PatchOptions{})
	d.must(err)
	node = d.deploy("bank", "teller")
	_, err = d.core.CoreV1().Services("bank").Create(ctx, &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: "guard"}, Spec: corev1.ServiceSpec{Selector: map[string]string{"app": "guard"}, Ports: []corev1.ServicePort{{Port: 443}}}}, metav1.CreateOptions{})
	d.must(err)
	_, err = d.core.AdmissionregistrationV1().ValidatingWebhookConfigurations().Create(ctx, &admissionv1.ValidatingWebhookConfiguration{
		ObjectMeta: metav1.ObjectMeta{Name: "guard"},
		Webhooks: []admissionv1.ValidatingWebhook{{
			Name: "guard.example.com", SideEffects: new(admissionv1.SideEffectClassNone), AdmissionReviewVersions: []string{"v1"}, TimeoutSeconds: new(int32(2)),
			ClientConfig:  admissionv1.WebhookClientConfig{Service: &admissionv1.ServiceReference{Namespace: "bank", Name: "guard"}},
			FailurePolicy: new(admissionv1.Fail), NamespaceSelector: &metav1.LabelSelector{MatchLabels: map[string]string{corev1.LabelMetadataName: "bank"}},
			Rules: []admissionv1.RuleWithOperations{{Operations: []admissionv1.OperationType{admissionv1.Create}, Rule: admissionv1.Rule{APIGroups: []string{""}, APIVersions: []string{"v1"}, Resources: []string{"pods/eviction"}}}},
		}},
	}, metav1.CreateOptions{})
	d.must(err)
	f = d.untie(d.drainUntil(node), "validatingwebhookconfiguration/guard")
	if !strings.Contains(f.Title, "every eviction calls webhook guard.example.com, whose service bank/guard has no ready endpoint") {
		t.Errorf("webhook: %+v", f)
	}

	// A finalizer whose controller is gone.
	_, err = d.core.CoreV1().Nodes().Patch(ctx, node, types.MergePatchType, []byte(`{"spec":{"unschedulable":false}}`), metav1.PatchOptions{})
	d.must(err)
	node = d.deploy("lab", "probe")
	l, err := d.core.CoreV1().Pods("lab").List(ctx, metav1.ListOptions{})
	d.must(err)
	_, err = d.core.CoreV1().Pods("lab").Patch(ctx, l.Items[0].Name, types.MergePatchType, []byte(`{"metadata":{"finalizers":["example.com/gone"]}}`), metav1.PatchOptions{})
	d.must(err)
	f = d.untie(d.drain(node), "pod/lab/"+l.Items[0].Name)
	if !strings.Contains(f.Title, "it is deleted and has finalizers: example.com/gone") {
		t.Errorf("finalizer: %+v", f)
	}
}

// drainUntil repeats a real `kubectl drain`, which ends at a refusal other than that of a budget.
func (d *deadlock) drainUntil(node string) <-chan string {
	out := make(chan string, 1)
	go func() {
		last := ""
		for deadline := time.Now().Add(90 * time.Second); time.Now().Before(deadline) && d.t.Context().Err() == nil; {
			if last = <-d.drain(node); last == "" {
				break
			}
		}
		out <- last
	}()
	return out
}

// TestStuckOnADeadNode checks pods on a node that stopped to report, which a real one here cannot.
func TestStuckOnADeadNode(t *testing.T) {
	w := village()
	n := &w.nodes[len(w.nodes)-1]
	for i := range n.Status.Conditions {
		if n.Status.Conditions[i].Type == corev1.NodeReady {
			n.Status.Conditions[i].Status, n.Status.Conditions[i].Message = corev1.ConditionUnknown, "Kubelet stopped posting node status."
		}
	}
	if found := w.stuckDrains(); len(found) > 0 {
		t.Fatalf("no pod is deleted: %+v", found)
	}
	w.pods = append(w.pods, pod{namespace: "shop", name: "db-0", node: n.Name, phase: corev1.PodRunning, terminating: w.now.Add(-10 * time.Minute), controller: owner{"apps/v1", "StatefulSet", "db", "db"}})
	w.lookups = nil
	found := w.stuckDrains()
	if len(found) != 1 || !strings.Contains(found[0].Title, "waits for pod shop/db-0: deleted, and the node is not ready") || !strings.Contains(found[0].Detail, "Kubelet stopped posting") {
		t.Errorf("found %+v", found)
	}
}

// TestForeignWords checks a cluster that others upgrade: its only control plane need not be drained,
// and no text is about replacements.
func TestForeignWords(t *testing.T) {
	for _, foreign := range []bool{false, true} {
		w := village()
		w.request.Surge, w.request.Foreign = 0, foreign
		w.addDeployment("shop", "pinned", func(p *pod) {
			p.nodeSelector = map[string]string{controlPlaneLabel: ""}
			p.tolerations = []corev1.Toleration{{Operator: corev1.TolerationOpExists}}
			p.request = resources{cpu: 3000}
		}, "cp-0")
		for i := range w.nodes {
			if w.nodes[i].Name == "cp-0" {
				if w.nodes[i].Labels == nil || w.nodes[i].Labels[controlPlaneLabel] != "" {
					t.Fatalf("no control plane: %v", w.nodes[i].Labels)
				}
				w.nodes[i].Labels[controlPlaneLabel] = ""
			}
			w.nodes[i].Spec.Unschedulable = w.nodes[i].Name == "worker-1"
		}
		f := w.homeless(&team{owner: owner{"apps/v1", "Deployment", "pinned", "x"}, namespace: "shop", pods: []*pod{&w.pods[len(w.pods)-1]}}, &placement{lost: map[*pod]string{}})
		if want := map[bool]plan.Severity{false: plan.Block, true: plan.Warn}[foreign]; f.Severity != want {
			t.Errorf("foreign %t: severity %s, want %s: %+v", foreign, f.Severity, want, f)
		}
		for _, f := range cordonedNodes(w, nil) {
			if strings.Contains(f.Detail, "it is replaced") == foreign {
				t.Errorf("foreign %t: %q", foreign, f.Detail)
			}
		}
	}
}
