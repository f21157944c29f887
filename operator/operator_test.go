package operator

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"constellation/assets"
	"constellation/assets/render"
	"constellation/engine/cloud"
	"constellation/engine/cloud/machines"
	"constellation/engine/cloud/providers"
	"constellation/engine/sandbox/controlplane"
	"constellation/engine/sandbox/controlplane/controlplanetest"
	"constellation/operator/api/v1alpha1"
)

func TestMain(m *testing.M) {
	// Both log what a test provokes.
	ctrl.SetLogger(logr.Discard())
	klog.SetLogger(logr.Discard())
	os.Exit(controlplanetest.Run(m))
}

const namespace = "constellation-system"

// cluster is a real API server with the CRDs and the operator's chart installed, and an operator
// that runs with exactly the rights of that chart.
type cluster struct {
	t      *testing.T
	cp     *controlplane.ControlPlane
	admin  client.Client
	cloud  *sky
	denied *denials
}

// sky is a cloud with two groups and injectable errors.
type sky struct {
	mu        sync.Mutex
	groups    []cloud.Group
	instances map[string]cloud.Instance
	err       error
}

func (s *sky) Groups(context.Context) ([]cloud.Group, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]cloud.Group(nil), s.groups...), s.err
}

func (s *sky) Instance(_ context.Context, id string) (cloud.Instance, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil {
		return cloud.Instance{}, s.err
	}
	i, ok := s.instances[id]
	if !ok {
		return i, fmt.Errorf("read instance %s: %w", id, cloud.ErrNotFound)
	}
	return i, nil
}

func (s *sky) Instances(context.Context) (all []cloud.Instance, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, i := range s.instances {
		all = append(all, i)
	}
	return all, s.err
}

func (s *sky) SetGroupImage(_ context.Context, id, image string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range s.groups {
		if s.err == nil && strings.EqualFold(s.groups[i].ID, id) {
			s.groups[i].Image = image
		}
	}
	return s.err
}

func (s *sky) CreateInstances(_ context.Context, group string, tokens []string) (made []cloud.Instance, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, token := range tokens {
		id := "sandbox://t/" + token
		if _, ok := s.instances[id]; !ok && s.err == nil {
			s.instances[id] = cloud.Instance{Name: token, ProviderID: id, Group: group, Token: token, State: cloud.Creating, Created: time.Now()}
		}
		made = append(made, s.instances[id])
	}
	return made, s.err
}

func (s *sky) DeleteInstances(_ context.Context, ids []string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, id := range ids {
		if s.err == nil {
			delete(s.instances, id)
		}
	}
	return s.err
}

func (s *sky) set(f func(*sky)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f(s)
}

func (s *sky) add(name, group string) {
	s.set(func(s *sky) {
		id := "sandbox://t/" + name
		s.instances[id] = cloud.Instance{Name: name, ProviderID: id, Group: group, Image: image2, State: cloud.Ready}
	})
}

// denials are the operator's requests that were answered with 403: missing rights.
type denials struct {
	mu  sync.Mutex
	all []string
}

func (d *denials) forget() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.all = nil
}

func (d *denials) wrap(next http.RoundTripper) http.RoundTripper {
	return roundTripper(func(r *http.Request) (*http.Response, error) {
		resp, err := next.RoundTrip(r)
		if err == nil && resp.StatusCode == http.StatusForbidden {
			d.mu.Lock()
			d.all = append(d.all, r.Method+" "+r.URL.Path)
			d.mu.Unlock()
		}
		return resp, err
	})
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

func newCluster(t *testing.T) *cluster {
	t.Helper()
	return newClusterWith(t, controlplane.Options{})
}

// withChart installs the CRDs and the operator's chart.
var withChart = controlplanetest.Setup{Name: "chart", Run: func(ctx context.Context, cp *controlplane.ControlPlane) error {
	crds, err := assets.CRDsFor("v1.1.0")
	if err != nil {
		return err
	}
	chart, err := render.Chart("constellation-operator", "v1.1.0", namespace, providers.LocalValues(), map[string]any{"release": "v1.1.0"})
	if err != nil {
		return err
	}
	manifests := [][]byte{[]byte("{apiVersion: v1, kind: Namespace, metadata: {name: " + namespace + "}}")}
	for _, f := range crds {
		manifests = append(manifests, f.Data)
	}
	for _, m := range append(manifests, chart) {
		if err := cp.Apply(ctx, m); err != nil {
			return err
		}
	}
	return nil
}}

func newClusterWith(t *testing.T, o controlplane.Options) *cluster {
	t.Helper()
	cp := controlplanetest.Lend(t, o, withChart)
	c := &cluster{t: t, cp: cp, denied: &denials{}, cloud: &sky{
		instances: map[string]cloud.Instance{},
		groups: []cloud.Group{
			{ID: cpGroup, Name: "control-plane", Role: cloud.ControlPlane, Image: image2, AutoscalerName: "cp"},
			{ID: workerGroup, Name: "Workers", Role: cloud.Worker, Image: image2, AutoscalerName: "w"},
		},
	}}
	scheme := runtime.NewScheme()
	if err := errors.Join(clientgoscheme.AddToScheme(scheme), v1alpha1.AddToScheme(scheme)); err != nil {
		t.Fatal(err)
	}
	var err error
	if c.admin, err = client.New(cp.Config(), client.Options{Scheme: scheme}); err != nil {
		t.Fatal(err)
	}
	return c
}

// access is the access of the chart's ServiceAccount.
func (c *cluster) access() *rest.Config {
	c.t.Helper()
	cfg, err := c.cp.ConfigFor("system:serviceaccount:"+namespace+":constellation-operator", "system:serviceaccounts", "system:serviceaccounts:"+namespace, "system:authenticated")
	if err != nil {
		c.t.Fatal(err)
	}
	cfg.Wrap(c.denied.wrap)
	return cfg
}

// start runs an operator; stop ends it and waits for its end.
func (c *cluster) start() (stop func()) {
	c.t.Helper()
	return c.startWith(c.access())
}

// startWith runs an operator with another access than that of the chart's ServiceAccount.
func (c *cluster) startWith(access *rest.Config) (stop func()) {
	c.t.Helper()
	return c.startCloud(access, c.cloud)
}

// startCloud runs an operator with another cloud as well.
func (c *cluster) startCloud(access *rest.Config, sky cloudAPI) (stop func()) {
	c.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	_, enrolled := sky.(*machines.Control)
	cfg := Config{Cluster: access, Namespace: namespace, Cloud: sky, Spares: enrolled, DiscoveryInterval: 200 * time.Millisecond}
	go func() {
		err := Run(ctx, cfg)
		// On a busy computer, an API server that restarts can be away for longer than a lease is renewed. A kubelet restarts the
		// operator then.
		for ctx.Err() == nil && err != nil && strings.Contains(err.Error(), "leader election lost") {
			err = Run(ctx, cfg)
		}
		done <- err
	}()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			c.t.Errorf("operator ended: %v", err)
		}
		c.denied.mu.Lock()
		defer c.denied.mu.Unlock()
		if len(c.denied.all) > 0 {
			c.t.Errorf("the chart's role lacks: %s", strings.Join(c.denied.all, ", "))
		}
	})
	c.t.Cleanup(stop)
	return stop
}

func (c *cluster) create(o client.Object) {
	c.t.Helper()
	if err := c.admin.Create(c.t.Context(), o); err != nil {
		c.t.Fatal(err)
	}
}

// node registers a machine as a kubelet does.
func (c *cluster) node(name string, controlPlane bool) {
	c.t.Helper()
	c.nodeOf(name, "sandbox://t/"+name, controlPlane)
}

// nodeOf registers the machine with a provider ID.
func (c *cluster) nodeOf(name, providerID string, controlPlane bool) {
	c.t.Helper()
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.NodeSpec{ProviderID: providerID}}
	if controlPlane {
		n.Labels = map[string]string{"node-role.kubernetes.io/control-plane": ""}
	}
	c.create(n)
	before := n.DeepCopy()
	n.Status.NodeInfo.KubeletVersion = "v1.35.4"
	n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
	if err := c.admin.Status().Patch(c.t.Context(), n, client.MergeFrom(before)); err != nil {
		c.t.Fatal(err)
	}
}

func joiningNode(name, ref string, left time.Duration) *v1alpha1.JoiningNode {
	d := metav1.NewTime(time.Now().Add(left))
	return &v1alpha1.JoiningNode{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec:       v1alpha1.JoiningNodeSpec{Name: name, ComponentsReference: ref, ProviderID: "sandbox://t/" + name, Deadline: &d},
	}
}

// eventually waits until the condition holds. On failure it reports the last state.
func (c *cluster) eventually(what string, holds func() (string, bool)) {
	c.t.Helper()
	const limit = time.Minute // of a busy computer
	deadline := time.Now().Add(limit)
	for {
		is, ok := holds()
		if ok {
			return
		}
		if time.Now().After(deadline) {
			c.t.Fatalf("%s: not so after %v; it is: %s", what, limit, is)
		}
		time.Sleep(50 * time.Millisecond)
	}
}

func (c *cluster) get(name string, o client.Object) bool {
	c.t.Helper()
	err := c.admin.Get(c.t.Context(), client.ObjectKey{Name: name}, o)
	if err != nil && !apierrors.IsNotFound(err) {
		c.t.Fatal(err)
	}
	return err == nil
}

func (c *cluster) annotated(name string) {
	c.t.Helper()
	c.eventually("Node "+name+" has the annotations of its machine", func() (string, bool) {
		var n corev1.Node
		c.get(name, &n)
		a := n.Annotations
		return fmt.Sprint(a), a[v1alpha1.AnnotationComponents] == refA && a[v1alpha1.AnnotationImage] == image2 && a[v1alpha1.AnnotationGroup] != ""
	})
}

func (c *cluster) gone(name string) {
	c.t.Helper()
	c.eventually("JoiningNode "+name+" is gone", func() (string, bool) {
		var jn v1alpha1.JoiningNode
		return "still there", !c.get(name, &jn)
	})
}

// TestOperator runs its parts on one API server, in this order: each starts with the objects of the
// previous one.
func TestOperator(t *testing.T) {
	c := newCluster(t)
	for _, part := range []struct {
		name string
		run  func(*testing.T, *cluster)
	}{
		{"a cluster grows", clusterGrows},
		{"joins that fail", joiningNodesBadLuck},
		{"ScalingGroups are never deleted", groupsAreNeverLost},
		{"one leader acts, and another takes over", leadersChange},
		{"the operator starts before the API server", startsBeforeTheAPIServer},
	} {
		t.Run(part.name, func(t *testing.T) {
			inner := *c
			inner.t = t
			part.run(t, &inner)
		})
	}
}

func clusterGrows(t *testing.T, c *cluster) {
	c.cloud.add("control-plane-0", cpGroup)
	c.node("control-plane-0", true)
	c.create(&v1alpha1.NodeVersion{ObjectMeta: metav1.ObjectMeta{Name: v1alpha1.NodeVersionName}, Spec: spec()})
	c.create(joiningNode("control-plane-0", refA, time.Hour))
	stop := c.start()

	// The first node is annotated like any other, and groups are found.
	c.annotated("control-plane-0")
	c.gone("control-plane-0")
	for name, id := range map[string]string{"control-plane": cpGroup, "workers": workerGroup} {
		c.eventually("group "+name+" is described", func() (string, bool) {
			var g v1alpha1.ScalingGroup
			c.get(name, &g)
			return fmt.Sprintf("%+v", g), g.Spec.GroupID == id && g.Status.ImageReference == image2 && len(g.Status.Conditions) == 1 &&
				g.Status.Conditions[0].Reason == "UpToDate" && g.Spec.Strategy == v1alpha1.ReplaceStrategy && g.Spec.Min == 1 && g.Spec.Max == 10
		})
	}
	c.eventually("the autoscaler's strategy exists", func() (string, bool) {
		var s v1alpha1.AutoscalingStrategy
		return "absent", c.get(v1alpha1.AutoscalingStrategyName, &s) && s.Spec.Enabled
	})
	c.target("a single node is at the target", "True UpToDate", 1, 1)

	// A worker joins: JoiningNode first, Node later.
	c.create(joiningNode("worker-0", refA, time.Hour))
	c.target("a machine joins", "False NodesJoining", 1, 1)
	c.cloud.add("worker-0", workerGroup)
	c.node("worker-0", false)
	c.annotated("worker-0")
	c.gone("worker-0")
	c.target("both at the target", "True UpToDate", 2, 2)

	// The target changes. Joining machines still get the components of the control plane.
	var nv v1alpha1.NodeVersion
	c.get(v1alpha1.NodeVersionName, &nv)
	if want := (v1alpha1.JoinComponents{ControlPlane: refA, Worker: refA}); nv.Status.JoinComponents != want {
		t.Fatalf("joining machines get %+v", nv.Status.JoinComponents)
	}
	nv.Spec.Image, nv.Spec.ImageVersion = "sandboxes/t/images/v1.2.0", "v1.2.0"
	nv.Spec.KubernetesClusterVersion, nv.Spec.KubernetesComponentsReference = "v1.36.3", refB
	if err := c.admin.Update(t.Context(), &nv); err != nil {
		t.Fatal(err)
	}
	c.target("nothing starts while the autoscaler may run", "False AutoscalerRuns", 0, 2)
	c.get(v1alpha1.NodeVersionName, &nv)
	if nv.Status.JoinComponents.Worker != refA {
		t.Errorf("joining machines get %+v before the control plane was upgraded", nv.Status.JoinComponents)
	}
	stop()
}

// target waits for the NodeVersion's status.
func (c *cluster) target(what, ready string, upToDate, total int32) {
	c.t.Helper()
	c.eventually(what, func() (string, bool) {
		var nv v1alpha1.NodeVersion
		c.get(v1alpha1.NodeVersionName, &nv)
		is := conditionText(nv.Status, v1alpha1.ConditionReady)
		return fmt.Sprintf("Ready %s, %+v", is, nv.Status.Nodes), is == ready && nv.Status.Nodes.UpToDate == upToDate && nv.Status.Nodes.Total == total &&
			nv.Status.ObservedGeneration == nv.Generation
	})
}

func joiningNodesBadLuck(t *testing.T, c *cluster) {
	c.start()

	t.Run("a machine that never registers is given up at its deadline", func(t *testing.T) {
		c.create(joiningNode("worker-9", refA, 1500*time.Millisecond))
		time.Sleep(time.Second) // not before the deadline
		var jn v1alpha1.JoiningNode
		if !c.get("worker-9", &jn) {
			t.Fatal("given up before its deadline")
		}
		c.gone("worker-9")
		c.eventually("an event reports it", func() (string, bool) {
			var events corev1.EventList
			if err := c.admin.List(t.Context(), &events); err != nil {
				t.Fatal(err)
			}
			for _, e := range events.Items {
				if e.Reason == "JoinExpired" && e.InvolvedObject.Name == "worker-9" {
					return "", true
				}
			}
			return fmt.Sprintf("%d other events", len(events.Items)), false
		})
	})
	t.Run("while the cloud is unavailable, known data is recorded, and the rest later", func(t *testing.T) {
		c.cloud.add("worker-1", workerGroup)
		c.cloud.set(func(s *sky) { s.err = fmt.Errorf("list: %w", cloud.ErrUnavailable) })
		c.node("worker-1", false)
		c.create(joiningNode("worker-1", refA, time.Second)) // its deadline does not count: the Node exists
		c.eventually("the JoiningNode has the reason to wait", func() (string, bool) {
			var jn v1alpha1.JoiningNode
			c.get("worker-1", &jn)
			return fmt.Sprintf("%+v", jn.Status), len(jn.Status.Conditions) == 1 && jn.Status.Conditions[0].Reason == "CloudUnavailable"
		})
		var n corev1.Node
		c.get("worker-1", &n)
		if n.Annotations[v1alpha1.AnnotationComponents] != refA {
			t.Errorf("annotations %v", n.Annotations)
		}
		c.cloud.set(func(s *sky) { s.err = nil })
		c.annotated("worker-1")
		c.gone("worker-1")
	})
	t.Run("another machine with the name is not annotated", func(t *testing.T) {
		jn := joiningNode("worker-2", refA, time.Hour)
		jn.Spec.ProviderID = "sandbox://t/somebody-else"
		c.cloud.add("worker-2", workerGroup)
		c.node("worker-2", false)
		c.create(jn)
		c.eventually("the JoiningNode has the reason", func() (string, bool) {
			var jn v1alpha1.JoiningNode
			c.get("worker-2", &jn)
			return fmt.Sprintf("%+v", jn.Status), len(jn.Status.Conditions) == 1 && jn.Status.Conditions[0].Reason == "OtherMachine"
		})
		var n corev1.Node
		c.get("worker-2", &n)
		if n.Annotations[v1alpha1.AnnotationComponents] != "" {
			t.Errorf("annotated with the data of another machine: %v", n.Annotations)
		}
	})
	t.Run("the operator continues after an outage of the API server", func(t *testing.T) {
		c.cp.StopAPIServer()
		if err := c.cp.StartAPIServer(t.Context()); err != nil {
			t.Fatal(err)
		}
		c.cloud.add("worker-3", workerGroup)
		c.create(joiningNode("worker-3", refA, time.Hour))
		c.node("worker-3", false)
		c.annotated("worker-3")
		// A starting API server denies everything until it has read the roles.
		c.denied.forget()
	})
}

func groupsAreNeverLost(t *testing.T, c *cluster) {
	c.start()
	var g v1alpha1.ScalingGroup
	c.eventually("groups are found", func() (string, bool) { return "absent", c.get("workers", &g) })
	g.Spec.Autoscaling, g.Spec.Min, g.Spec.Max = true, 3, 30
	if err := c.admin.Update(t.Context(), &g); err != nil {
		t.Fatal(err)
	}
	partial := func(what, reason string, f func(*sky)) {
		t.Helper()
		c.cloud.set(f)
		c.eventually(what, func() (string, bool) {
			c.get("workers", &g)
			return fmt.Sprintf("%+v", g.Status), len(g.Status.Conditions) == 1 && g.Status.Conditions[0].Reason == reason
		})
		if g.Spec.Max != 30 || !g.Spec.Autoscaling {
			t.Errorf("%s: the owner's settings are lost: %+v", what, g.Spec)
		}
	}
	all := c.cloud.groups
	partial("a partial list", "NotListed", func(s *sky) { s.groups = all[:1] })
	partial("a failing cloud", "CloudUnavailable", func(s *sky) { s.err = cloud.ErrThrottled })
	partial("the complete list again, in upper case", "ImageDiffers", func(s *sky) {
		upper := all[1]
		upper.ID = strings.ToUpper(upper.ID)
		s.groups, s.err = []cloud.Group{all[0], upper}, nil
	})
	var l v1alpha1.ScalingGroupList
	if err := c.admin.List(t.Context(), &l); err != nil || len(l.Items) != 2 {
		t.Errorf("%d groups, %v; want 2", len(l.Items), err)
	}
	// A second group of the same name is another object.
	c.cloud.set(func(s *sky) {
		twin := all[1]
		twin.ID += "-b"
		s.groups = append(s.groups, twin)
	})
	c.eventually("the group of the same name has an object", func() (string, bool) {
		if err := c.admin.List(t.Context(), &l); err != nil {
			t.Fatal(err)
		}
		return fmt.Sprint(len(l.Items)), len(l.Items) == 3
	})
}

// startsBeforeTheAPIServer is what happens on a new machine.
func startsBeforeTheAPIServer(t *testing.T, c *cluster) {
	c.cp.StopAPIServer()
	c.start()
	if err := c.cp.StartAPIServer(t.Context()); err != nil {
		t.Fatal(err)
	}
	c.cloud.add("worker-30", workerGroup)
	c.node("worker-30", false)
	c.create(joiningNode("worker-30", refA, time.Hour))
	c.annotated("worker-30")
	c.denied.forget()
}

func leadersChange(_ *testing.T, c *cluster) {
	stop := c.start()
	c.cloud.add("worker-20", workerGroup)
	c.node("worker-20", false)
	c.create(joiningNode("worker-20", refA, time.Hour))
	c.annotated("worker-20")
	c.start()
	stop() // releases the lease
	c.cloud.add("worker-21", workerGroup)
	c.node("worker-21", false)
	c.create(joiningNode("worker-21", refA, time.Hour))
	c.annotated("worker-21")
}
