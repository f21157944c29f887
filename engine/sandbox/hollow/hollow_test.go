package hollow_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"
	appsv1 "k8s.io/api/apps/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/klog/v2"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"constellation/assets"
	"constellation/engine/cloud"
	"constellation/engine/cloud/cloudtest"
	"constellation/engine/cloud/sandboxapi"
	"constellation/engine/sandbox/controlplane"
	"constellation/engine/sandbox/controlplane/controlplanetest"
	"constellation/engine/sandbox/hollow"
	"constellation/operator/api/v1alpha1"
)

// Components of two versions of Kubernetes.
var (
	refA = "k8s-components-sha256-" + strings.Repeat("a", 64)
	refB = "k8s-components-sha256-" + strings.Repeat("b", 64)
)

const clusterVersionA, clusterVersionB = "v1.35.4", "v1.36.3"

// cluster is a real control plane with the kinds installed and a target published.
type cluster struct {
	t     controlplane.T
	cp    *controlplane.ControlPlane
	admin client.Client
}

func newCluster(t controlplanetest.T, o controlplane.Options) *cluster {
	t.Helper()
	o.Controllers = true
	c := &cluster{t: t}
	if len(o.APIServerArgs) > 0 { // other tests have other flags
		c.cp = controlplane.ForTest(t, o)
		if err := withKinds.Run(t.Context(), c.cp); err != nil {
			t.Fatalf("%v", err)
		}
	} else {
		c.cp = controlplanetest.Lend(t, o, withKinds)
	}
	var err error
	scheme := runtime.NewScheme()
	if err := errors.Join(clientgoscheme.AddToScheme(scheme), v1alpha1.AddToScheme(scheme)); err != nil {
		t.Fatalf("%v", err)
	}
	if c.admin, err = client.New(c.cp.Config(), client.Options{Scheme: scheme}); err != nil {
		t.Fatalf("%v", err)
	}
	for ref, version := range map[string]string{refA: clusterVersionA, refB: clusterVersionB} {
		c.create(&corev1.ConfigMap{
			ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: ref},
			Data:       map[string]string{"cluster-version": version, "components": "[]"},
		})
	}
	return c
}

var withKinds = controlplanetest.Setup{Name: "kinds", Run: func(ctx context.Context, cp *controlplane.ControlPlane) error {
	crds, err := assets.CRDsFor("v1.1.0")
	if err != nil {
		return err
	}
	for _, f := range crds {
		if err := cp.Apply(ctx, f.Data); err != nil {
			return err
		}
	}
	return nil
}}

func (c *cluster) create(o client.Object) {
	c.t.Helper()
	if err := c.admin.Create(c.t.Context(), o); err != nil {
		c.t.Fatalf("create %T %s: %v", o, o.GetName(), err)
	}
}

// target makes the NodeVersion.
func (c *cluster) target(image string, edit ...func(*v1alpha1.NodeVersionSpec)) *v1alpha1.NodeVersion {
	c.t.Helper()
	nv := &v1alpha1.NodeVersion{
		ObjectMeta: metav1.ObjectMeta{Name: v1alpha1.NodeVersionName},
		Spec: v1alpha1.NodeVersionSpec{
			Image: sandboxapi.ImageReference("hollow", image), ImageVersion: image, KubernetesComponentsReference: refA, KubernetesClusterVersion: clusterVersionA,
		},
	}
	for _, e := range edit {
		e(&nv.Spec)
	}
	c.create(nv)
	return nv
}

// publish publishes the components of joining machines, as the operator does.
func (c *cluster) publish(nv *v1alpha1.NodeVersion, j v1alpha1.JoinComponents) {
	c.t.Helper()
	nv.Status.JoinComponents = j
	if err := c.admin.Status().Update(c.t.Context(), nv); err != nil {
		c.t.Fatalf("publish components: %v", err)
	}
}

func (c *cluster) nodes() map[string]corev1.Node {
	c.t.Helper()
	var l corev1.NodeList
	if err := c.admin.List(c.t.Context(), &l); err != nil {
		c.t.Fatalf("%v", err)
	}
	out := map[string]corev1.Node{}
	for _, n := range l.Items {
		out[n.Name] = n
	}
	return out
}

// pods returns the Ready pods, by node.
func (c *cluster) pods() map[string][]corev1.Pod {
	c.t.Helper()
	var l corev1.PodList
	if err := c.admin.List(c.t.Context(), &l, client.InNamespace("default")); err != nil {
		c.t.Fatalf("%v", err)
	}
	out := map[string][]corev1.Pod{}
	for _, p := range l.Items {
		for _, cond := range p.Status.Conditions {
			if cond.Type == corev1.PodReady && cond.Status == corev1.ConditionTrue {
				out[p.Spec.NodeName] = append(out[p.Spec.NodeName], p)
			}
		}
	}
	return out
}

// workload creates pods, one per machine.
func (c *cluster) workload(count int) {
	labels := map[string]string{"app": "web"}
	c.create(&appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web"},
		Spec: appsv1.DeploymentSpec{
			Replicas: new(int32(count)), Selector: &metav1.LabelSelector{MatchLabels: labels},
			Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: corev1.PodSpec{
				Containers: []corev1.Container{{Name: "web", Image: "none", Resources: corev1.ResourceRequirements{
					Requests: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("3")},
				}}},
			}},
		},
	})
}

func isReady(n corev1.Node) bool {
	for _, c := range n.Status.Conditions {
		if c.Type == corev1.NodeReady {
			return c.Status == corev1.ConditionTrue
		}
	}
	return false
}

func eventually(t controlplane.T, what string, holds func() (string, bool)) {
	t.Helper()
	deadline := time.Now().Add(60 * time.Second)
	for {
		is, ok := holds()
		if ok {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s: not so after 60 s; it is: %s", what, is)
		}
		time.Sleep(50 * time.Millisecond)
	}
}

func TestMain(m *testing.M) {
	ctrl.SetLogger(logr.Discard())
	klog.SetLogger(logr.Discard()) // watches that end with a test are news to it
	os.Exit(controlplanetest.Run(m))
}

func start(t controlplane.T, c *cluster, times hollow.Times) *hollow.Cloud {
	t.Helper()
	machines, wait, err := hollow.Start(t.Context(), hollow.Options{Cluster: c.cp.Config(), Images: []string{"v1.0.0", "v1.1.0"}, Times: times})
	if err != nil {
		t.Fatalf("%v", err)
	}
	t.Cleanup(wait) // the context has ended by then
	return machines
}

// vendorOf starts hollow machines, and the cloud of a provider in front of them.
func vendorOf(t controlplane.T, c *cluster, provider string, times hollow.Times) (*hollow.Cloud, hollow.Vendor) {
	t.Helper()
	machines := start(t, c, times)
	v, err := hollow.Vendors[provider](t.Context(), machines, slog.New(slog.NewTextHandler(os.Stderr, nil)))
	if err != nil {
		t.Fatalf("%v", err)
	}
	t.Cleanup(func() {
		if n := v.Problems(); n > 0 {
			t.Fatalf("%d calls are outside of the schema of the emulated cloud", n)
		}
	})
	return machines, v
}

func TestHollowMachines(t *testing.T) {
	c := newCluster(t, controlplane.Options{})
	times := hollow.Times{Boot: 400 * time.Millisecond, Join: 200 * time.Millisecond, Drain: 1200 * time.Millisecond, Off: 300 * time.Millisecond, Heartbeat: time.Second}
	h := start(t, c, times)
	ctx := t.Context()
	remote, host := sandboxapi.NewClient(h.Control, h.Token()), sandboxapi.NewClient(h.Host, "")
	workers := sandboxapi.GroupID("hollow", sandboxapi.WorkerGroup)

	if token, err := sandboxapi.NewMetadata(h.Metadata).Token(ctx); err != nil || token != h.Token() {
		t.Errorf("metadata has the token %q, %v", token, err)
	}
	if _, err := sandboxapi.NewClient(h.Control, "guess").Groups(ctx); !errors.Is(err, cloud.ErrDenied) {
		t.Errorf("with a wrong token: %v", err)
	}

	// No machine joins before the operator publishes components.
	nv := c.target("v1.1.0")
	if err := remote.SetGroupImage(ctx, workers, sandboxapi.ImageReference("hollow", "v1.1.0")); err != nil {
		t.Fatal(err)
	}
	l, err := remote.CreateInstances(ctx, workers, []string{"a", "b", "c"})
	if err != nil || len(l) != 3 || l[2].Name != "worker-2" || l[2].Token != "c" || l[2].State != cloud.Creating || l[2].Image != "sandboxes/hollow/images/v1.1.0" {
		t.Fatalf("created %+v, %v", l, err)
	}
	eventually(t, "the cloud calls all ready", func() (string, bool) {
		l, err := remote.Instances(ctx)
		return fmt.Sprint(l, err), err == nil && len(l) == 3 && !slices.ContainsFunc(l, func(i cloud.Instance) bool { return i.State != cloud.Ready })
	})
	if n := c.nodes(); len(n) != 0 {
		t.Errorf("nodes joined with nothing: %v", n)
	}
	c.publish(nv, v1alpha1.JoinComponents{Worker: refB})
	eventually(t, "all are Ready nodes without a taint", func() (string, bool) {
		nodes := c.nodes()
		for _, i := range l {
			n := nodes[i.Name]
			if !isReady(n) || len(n.Spec.Taints) > 0 || n.Spec.ProviderID != i.ProviderID || n.Status.NodeInfo.KubeletVersion != clusterVersionB {
				return fmt.Sprintf("%+v", n), false
			}
		}
		return "", len(nodes) == 3
	})
	var jn v1alpha1.JoiningNode
	if err := c.admin.Get(ctx, client.ObjectKey{Name: "worker-1"}, &jn); err != nil || jn.Spec.ComponentsReference != refB || jn.Spec.ProviderID != l[1].ProviderID || jn.Spec.Deadline == nil {
		t.Errorf("JoiningNode %+v, %v", jn.Spec, err)
	}

	// Pods run where the scheduler places them. An eviction ends them after a
	// delay and respects disruption budgets.
	c.workload(2)
	ran := func(want int) func() (string, bool) {
		return func() (string, bool) {
			n := 0
			for _, l := range c.pods() {
				n += len(l)
			}
			return fmt.Sprint(n, " pods are ready"), n == want
		}
	}
	eventually(t, "both pods run", ran(2))
	all := intstr.FromInt32(2)
	budget := &policyv1.PodDisruptionBudget{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web"},
		Spec:       policyv1.PodDisruptionBudgetSpec{MinAvailable: &all, Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "web"}}},
	}
	c.create(budget)
	eventually(t, "the budget knows its pods", func() (string, bool) {
		err := c.admin.Get(ctx, client.ObjectKeyFromObject(budget), budget)
		return fmt.Sprintf("%+v, %v", budget.Status, err), err == nil && budget.Status.CurrentHealthy == 2
	})
	var donor string
	for name := range c.pods() {
		donor = name
	}
	node := c.nodes()[donor]
	cordoned := node.DeepCopy()
	cordoned.Spec.Unschedulable = true
	if err := c.admin.Patch(ctx, cordoned, client.MergeFrom(&node)); err != nil {
		t.Fatal(err)
	}
	victim := c.pods()[donor][0]
	evict := func(p corev1.Pod) error {
		return c.admin.SubResource("eviction").Create(ctx, &p, &policyv1.Eviction{})
	}
	if err := evict(victim); !apierrors.IsTooManyRequests(err) {
		t.Errorf("an eviction against the budget: %v", err)
	}
	if err := c.admin.Delete(ctx, budget); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the eviction is allowed", func() (string, bool) {
		err := evict(victim)
		return fmt.Sprint(err), err == nil
	})
	begun := time.Now()
	eventually(t, "the evicted pod is gone", func() (string, bool) {
		err := c.admin.Get(ctx, client.ObjectKeyFromObject(&victim), &corev1.Pod{})
		return fmt.Sprint(err), apierrors.IsNotFound(err)
	})
	if took := time.Since(begun); took < times.Drain-100*time.Millisecond {
		t.Errorf("the pod ended after %s, want %s", took, times.Drain)
	}
	eventually(t, "its replacement runs elsewhere", ran(2))
	if p := c.pods()[donor]; len(p) > 0 {
		t.Errorf("pods on a cordoned node: %v", p)
	}

	// Only machines that are on renew their Leases.
	lease := c.renewed
	before := lease("worker-0")
	eventually(t, "the lease is renewed", func() (string, bool) { return before.String(), lease("worker-0").After(before) })
	// The node lifecycle controller sets a Node to Unknown when its Lease expires. A machine that is on reports Ready again.
	lost := corev1.NodeCondition{Type: corev1.NodeReady, Status: corev1.ConditionUnknown, Reason: "NodeStatusUnknown", LastHeartbeatTime: metav1.Now(), LastTransitionTime: metav1.Now()}
	judged := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "worker-0"}}
	if body, err := json.Marshal(map[string]any{"status": map[string]any{"conditions": []corev1.NodeCondition{lost}}}); err != nil {
		t.Fatal(err)
	} else if err := c.admin.Status().Patch(ctx, judged, client.RawPatch(types.StrategicMergePatchType, body)); err != nil {
		t.Fatal(err)
	}
	if isReady(*judged) {
		t.Fatalf("the Node is Ready in spite of the patch: %+v", judged.Status.Conditions)
	}
	eventually(t, "the Node is Ready again", func() (string, bool) {
		n := c.nodes()["worker-0"]
		return fmt.Sprintf("%+v", n.Status.Conditions), isReady(n)
	})
	h.PowerOff("worker-0")
	if i, err := remote.Instance(ctx, sandboxapi.ProviderID("hollow", "worker-0")); err != nil || i.State != cloud.Stopped {
		t.Errorf("without power: %+v, %v", i, err)
	}
	time.Sleep(2 * times.Heartbeat) // one in flight may still arrive
	before = lease("worker-0")
	time.Sleep(3 * times.Heartbeat)
	if after := lease("worker-0"); after.After(before) {
		t.Errorf("a machine without power renewed its lease")
	}

	// A delete takes some time and consumes the token.
	if err := remote.DeleteInstances(ctx, []string{sandboxapi.ProviderID("hollow", donor), sandboxapi.ProviderID("hollow", "worker-99")}); err != nil {
		t.Fatal(err)
	}
	if i, err := remote.Instance(ctx, sandboxapi.ProviderID("hollow", donor)); err != nil || i.State != cloud.Terminating {
		t.Errorf("being deleted: %+v, %v", i, err)
	}
	eventually(t, "the machine is gone", func() (string, bool) {
		_, err := remote.Instance(ctx, sandboxapi.ProviderID("hollow", donor))
		return fmt.Sprint(err), errors.Is(err, cloud.ErrNotFound)
	})
	spent := map[string]string{"worker-0": "a", "worker-1": "b", "worker-2": "c"}[donor]
	if l, err := remote.CreateInstances(ctx, workers, []string{spent}); err != nil || l[0].Name != donor || l[0].State != cloud.Terminated {
		t.Errorf("the spent token made %+v, %v", l, err)
	}

	// A machine under the fault never-join joins after the fault ends.
	if err := host.SetFaults(ctx, []string{"never-join=worker-3", "boot-delay=worker-4:1h", "never-boot=worker-5"}); err != nil {
		t.Fatal(err)
	}
	if err := host.SetGroupCount(ctx, workers, 6); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the new machines are there, but not all boot", func() (string, bool) {
		var is []string
		for _, i := range h.Instances() {
			is = append(is, i.Name+" "+string(i.State))
		}
		return fmt.Sprint(is), slices.Contains(is, "worker-3 Ready") && slices.Contains(is, "worker-4 Creating") &&
			slices.Contains(is, "worker-5 Creating") && slices.Contains(is, "worker-6 Ready")
	})
	eventually(t, "the one without a fault has joined", func() (string, bool) { return "", isReady(c.nodes()["worker-6"]) })
	if n := c.nodes(); n["worker-3"].Name != "" {
		t.Error("worker-3 joined although it never should")
	}
	if err := host.SetFaults(ctx, nil); err != nil {
		t.Fatal(err)
	}
	for _, late := range []string{"worker-3", "worker-5"} {
		eventually(t, late+" joins late", func() (string, bool) { return "", isReady(c.nodes()[late]) })
	}
	if calls := h.Calls(); calls["create"] != 2 || calls["delete"] != 1 || calls["set image"] != 1 || calls["list groups"] != 1 {
		t.Errorf("counted calls %v", calls)
	}
}

func TestHollowMachinesConform(t *testing.T) {
	c := newCluster(t, controlplane.Options{})
	h := start(t, c, hollow.Times{Boot: 50 * time.Millisecond, Join: 50 * time.Millisecond, Drain: 50 * time.Millisecond, Off: 50 * time.Millisecond})
	o := cloudtest.Options{
		Cloud: sandboxapi.NewInCluster(sandboxapi.NewMetadata(h.Metadata), h.Control), Group: sandboxapi.GroupID("hollow", sandboxapi.WorkerGroup),
		Unknown: sandboxapi.ProviderID("hollow", "worker-999"), Images: []string{sandboxapi.ImageReference("hollow", "v1.0.0"), sandboxapi.ImageReference("hollow", "v1.1.0")},
	}
	t.Run("without faults", func(t *testing.T) { cloudtest.Run(t, o) })
	if err := sandboxapi.NewClient(h.Host, "").SetFaults(t.Context(), []string{"api-429=0.3", "create-timeout=0.5", "partial-list=0.3"}); err != nil {
		t.Fatal(err)
	}
	t.Run("throttled, with partial lists and answers that are lost", func(t *testing.T) { cloudtest.Run(t, o) })
}

func TestSeededMachinesJoinedLongAgo(t *testing.T) {
	c := newCluster(t, controlplane.Options{})
	h := start(t, c, hollow.Times{Drain: time.Second})
	if err := h.Seed(t.Context(), sandboxapi.WorkerGroup, 40, refA); err != nil {
		t.Fatal(err)
	}
	if err := h.Seed(t.Context(), sandboxapi.ControlPlaneGroup, 3, refA); err != nil {
		t.Fatal(err)
	}
	nodes := c.nodes()
	n := nodes["control-plane-2"]
	_, role := n.Labels["node-role.kubernetes.io/control-plane"]
	if len(nodes) != 43 || len(h.Instances()) != 43 || !role || !isReady(n) || n.Annotations[v1alpha1.AnnotationImage] != "sandboxes/hollow/images/v1.0.0" ||
		n.Annotations[v1alpha1.AnnotationComponents] != refA || n.Annotations[v1alpha1.AnnotationGroup] != "sandboxes/hollow/groups/control-plane" {
		t.Errorf("%d nodes, one of them %+v", len(nodes), n)
	}
	c.workload(40)
	eventually(t, "a pod runs on every worker", func() (string, bool) {
		pods := c.pods()
		return fmt.Sprint(len(pods), " machines have one"), len(pods) == 40
	})
	if err := h.Seed(t.Context(), "gpu", 1, refA); !errors.Is(err, cloud.ErrNotFound) {
		t.Errorf("a group that there is not: %v", err)
	}
}

// renewed returns the last renewal of a machine's Lease.
func (c *cluster) renewed(name string) time.Time {
	c.t.Helper()
	var l coordinationv1.Lease
	if err := c.admin.Get(c.t.Context(), client.ObjectKey{Namespace: "kube-node-lease", Name: name}, &l); err != nil {
		c.t.Fatalf("%v", err)
	}
	return l.Spec.RenewTime.Time
}
