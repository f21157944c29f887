package plans

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	yamlutil "k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/kubernetes"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"constellation/assets"
	"constellation/engine/sandbox/controlplane"
	"constellation/operator/api/upgradev1"
)

func TestMain(m *testing.M) {
	// Both log what a test provokes.
	ctrl.SetLogger(logr.Discard())
	klog.SetLogger(logr.Discard())
	os.Exit(m.Run())
}

// world is a real control plane with its controllers and scheduler, and kubemark-style hollow nodes.
// A pod of a Plan only reports that its containers run, one after the other, except for cordon and
// drain, which really run.
type world struct {
	cp    *controlplane.ControlPlane
	admin client.Client
	core  kubernetes.Interface

	kubelet *httptest.Server // of all nodes

	mu    sync.Mutex
	sites map[string]*site // by namespace
	began map[types.UID]bool
	wg    sync.WaitGroup
}

func newWorld(t testing.TB) *world {
	t.Helper()
	cp := controlplane.ForTest(t, controlplane.Options{Controllers: true, APIServerArgs: []string{"--allow-privileged=true"}, ControllerManagerArgs: []string{
		"--kube-api-qps=500", "--kube-api-burst=1000", "--node-monitor-grace-period=30m",
	}})
	w := &world{cp: cp, sites: map[string]*site{}, began: map[types.UID]bool{}}
	w.kubelet = httptest.NewTLSServer(http.HandlerFunc(w.log))
	t.Cleanup(w.kubelet.Close)
	scheme := runtime.NewScheme()
	if err := errors.Join(clientgoscheme.AddToScheme(scheme), upgradev1.AddToScheme(scheme)); err != nil {
		t.Fatal(err)
	}
	var err error
	if w.admin, err = client.New(cp.Config(), client.Options{Scheme: scheme}); err != nil {
		t.Fatal(err)
	}
	w.core = kubernetes.NewForConfigOrDie(cp.Config())
	ctx, cancel := context.WithCancel(context.Background())
	_, pods := cache.NewInformerWithOptions(cache.InformerOptions{
		ListerWatcher: cache.NewListWatchFromClient(w.core.CoreV1().RESTClient(), "pods", metav1.NamespaceAll, everything),
		ObjectType:    &corev1.Pod{},
		Handler: cache.ResourceEventHandlerFuncs{
			AddFunc: func(o any) { w.pod(ctx, o.(*corev1.Pod)) }, UpdateFunc: func(_, o any) { w.pod(ctx, o.(*corev1.Pod)) },
		},
	})
	w.wg.Go(func() { pods.RunWithContext(ctx) })
	t.Cleanup(func() { cancel(); w.wg.Wait() })
	return w
}

// log serves the log of a pod's drain, as its kubelet would.
func (w *world) log(to http.ResponseWriter, r *http.Request) {
	parts := strings.Split(r.URL.Path, "/") // /containerLogs/NAMESPACE/POD/CONTAINER
	if len(parts) != 5 || parts[1] != "containerLogs" || parts[4] != "drain" {
		http.NotFound(to, r)
		return
	}
	w.mu.Lock()
	s := w.sites[parts[2]]
	w.mu.Unlock()
	s.mu.Lock()
	said := s.logs[parts[3]]
	s.mu.Unlock()
	_, _ = io.WriteString(to, said.tail())
}

// pod does for a pod what a kubelet would.
func (w *world) pod(ctx context.Context, p *corev1.Pod) {
	w.mu.Lock()
	s := w.sites[p.Namespace]
	w.mu.Unlock()
	if s == nil || p.Spec.NodeName == "" {
		return
	}
	if p.DeletionTimestamp != nil {
		_ = w.core.CoreV1().Pods(p.Namespace).Delete(ctx, p.Name, metav1.DeleteOptions{GracePeriodSeconds: new(int64)})
		return
	}
	w.mu.Lock()
	begun := w.began[p.UID]
	w.began[p.UID] = true
	w.mu.Unlock()
	if begun {
		return
	}
	w.wg.Go(func() { s.run(ctx, p) })
}

// site is a namespace with a controller, and nodes of its own that only its Plans select.
type site struct {
	testing.TB
	w     *world
	ns    string
	nodes []string

	mu sync.Mutex
	// does is what containers other than cordon and drain do; an error is that they fail.
	does   func(ctx context.Context, pod *corev1.Pod, container string) error
	ran    []string          // "node container", in order
	logs   map[string]*lines // of drains, by pod
	denied []string          // requests that were answered with 403

	controller, pods *rest.Config
}

func (w *world) site(t testing.TB, name string, nodes int) *site {
	t.Helper()
	s := &site{TB: t, w: w, ns: name, does: func(context.Context, *corev1.Pod, string) error { return nil }, logs: map[string]*lines{}}
	s.create(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}})
	s.install()
	s.controller, s.pods = s.access("system-upgrade-controller"), s.access("system-upgrade")
	s.Cleanup(func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if len(s.denied) > 0 {
			s.Errorf("the manifest's rights lack: %s", strings.Join(s.denied, ", "))
		}
	})
	w.mu.Lock()
	w.sites[name] = s
	w.mu.Unlock()
	for i := range nodes {
		s.node(fmt.Sprintf("%s-%d", name, i), nil)
	}
	return s
}

func (s *site) node(name string, l map[string]string) *corev1.Node {
	s.Helper()
	labels := map[string]string{corev1.LabelHostname: name, corev1.LabelOSStable: "linux", "site": s.ns}
	maps.Copy(labels, l)
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels}}
	s.create(n)
	s.ready(name, true)
	s.nodes = append(s.nodes, name)
	s.Cleanup(func() {
		_ = s.w.admin.Delete(context.Background(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}})
	})
	return n
}

func (s *site) ready(name string, is bool) {
	s.Helper()
	status := corev1.ConditionFalse
	if is {
		status = corev1.ConditionTrue
	}
	s.patch(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}, fmt.Sprintf(`{"status":{
		"nodeInfo": {"kubeletVersion":"v1.35.4"},
		"addresses":[{"type":"InternalIP","address":"127.0.0.1"}],"daemonEndpoints":{"kubeletEndpoint":{"Port":%s}},
		"capacity":{"pods":"110","cpu":"8","memory":"8Gi"},"allocatable":{"pods":"110","cpu":"8","memory":"8Gi"},
		"conditions":[{"type":"Ready","status":%q,"lastHeartbeatTime":%q}]}}`, s.w.kubelet.URL[strings.LastIndexByte(s.w.kubelet.URL, ':')+1:], status, time.Now().UTC().Format(time.RFC3339)), "status")
}

func (s *site) patch(o client.Object, body string, subresource ...string) {
	s.Helper()
	p := client.RawPatch(types.MergePatchType, []byte(body))
	var err error
	if len(subresource) > 0 {
		err = s.w.admin.SubResource(subresource[0]).Patch(s.Context(), o, p)
	} else {
		err = s.w.admin.Patch(s.Context(), o, p)
	}
	if err != nil {
		s.Fatal(err)
	}
}

func (s *site) create(o client.Object) {
	s.Helper()
	if err := s.w.admin.Create(s.Context(), o); err != nil {
		s.Fatal(err)
	}
}

// run runs a pod to its end.
func (s *site) run(ctx context.Context, p *corev1.Pod) {
	pods := s.w.core.CoreV1().Pods(p.Namespace)
	setState := func(status corev1.PodStatus) {
		b, _ := json.Marshal(map[string]any{"metadata": map[string]any{"uid": p.UID}, "status": status})
		_, err := pods.Patch(ctx, p.Name, types.StrategicMergePatchType, b, metav1.PatchOptions{}, "status")
		if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) && ctx.Err() == nil {
			s.w.mu.Lock()
			defer s.w.mu.Unlock()
			fmt.Fprintln(os.Stderr, "hollow pod:", err)
		}
	}
	running := corev1.PodStatus{Phase: corev1.PodRunning, StartTime: new(metav1.Now()), Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}}
	setState(running)
	if p.Labels[upgradev1.LabelPlan] == "" {
		return
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	exit := func(phase corev1.PodPhase, end corev1.ContainerStateTerminated, all ...corev1.Container) {
		end.FinishedAt = metav1.Now()
		done := corev1.PodStatus{Phase: phase, StartTime: running.StartTime}
		for _, c := range all {
			done.ContainerStatuses = append(done.ContainerStatuses, corev1.ContainerStatus{Name: c.Name, Image: c.Image, State: corev1.ContainerState{Terminated: &end}})
		}
		if phase == corev1.PodFailed && all[0].Name != "upgrade" {
			done.InitContainerStatuses, done.ContainerStatuses = done.ContainerStatuses, nil
		}
		setState(done)
	}
	for _, c := range append(slices.Clone(p.Spec.InitContainers), p.Spec.Containers...) {
		s.mu.Lock()
		s.ran = append(s.ran, p.Spec.NodeName+" "+c.Name)
		does := s.does
		s.mu.Unlock()
		var err error
		if IsKubectl(c.Args) {
			out := &lines{}
			s.mu.Lock()
			s.logs[p.Name] = out
			s.mu.Unlock()
			draining := running
			draining.InitContainerStatuses = []corev1.ContainerStatus{
				{Name: c.Name, Image: c.Image, State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{StartedAt: metav1.Now()}}},
			}
			setState(draining)
			if err = Kubectl(ctx, s.pods, c.Args, out, out); err != nil {
				err = fmt.Errorf("%s%w", out.tail(), err)
			}
		} else {
			err = does(ctx, p, c.Name)
		}
		if err != nil {
			exit(corev1.PodFailed, corev1.ContainerStateTerminated{ExitCode: 1, Message: err.Error()}, c)
			return
		}
	}
	exit(corev1.PodSucceeded, corev1.ContainerStateTerminated{}, p.Spec.Containers...)
}

func (s *site) set(does func(ctx context.Context, pod *corev1.Pod, container string) error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.does = does
}

// log returns what ran on nodes, in order.
func (s *site) log() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.ran)
}

// start runs a controller with the rights of the manifest; stop ends it.
func (s *site) start(change ...func(*Config)) (stop func()) {
	s.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	c := Config{Cluster: s.controller, Name: "system-upgrade-controller", Namespace: s.ns, Settings: DefaultSettings()}
	c.Settings.BackoffLimit = 0
	var said lines
	c.Log = slog.New(slog.NewTextHandler(&said, &slog.HandlerOptions{Level: slog.LevelDebug}))
	s.Cleanup(func() {
		if s.Failed() {
			s.Logf("log of the controller:\n%s", said.tail())
		}
	})
	for _, f := range change {
		f(&c)
	}
	done := make(chan error, 1)
	go func() { done <- Run(ctx, c) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			s.Errorf("controller ended: %v", err)
		}
	})
	s.Cleanup(stop)
	return stop
}

// lines are a controller's log lines.
type lines struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lines) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(b)
}

func (l *lines) tail() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	b := l.b.Bytes()
	return string(b[max(0, len(b)-6000):])
}

// install installs the manifest for this site.
func (s *site) install() {
	s.Helper()
	d := yamlutil.NewYAMLOrJSONDecoder(bytes.NewReader(assets.PlansManifest()), 4096)
	for {
		var o unstructured.Unstructured
		err := d.Decode(&o)
		if errors.Is(err, io.EOF) {
			return
		}
		if err != nil {
			s.Fatal(err)
		}
		if o.GetKind() == "Namespace" || o.GetKind() == "Deployment" {
			continue
		}
		// Objects outside of the namespace have a unique name in each site.
		switch o.GetNamespace() {
		case "system-upgrade":
			o.SetNamespace(s.ns)
		case "kube-system":
			o.SetName(o.GetName() + ":" + s.ns)
			_ = unstructured.SetNestedField(o.Object, "constellation:system-upgrade-controller:"+s.ns, "roleRef", "name")
		default:
			if o.GetKind() == "ClusterRoleBinding" {
				o.SetName(o.GetName() + ":" + s.ns)
			}
		}
		if o.GetKind() == "Role" || o.GetKind() == "ClusterRole" || o.GetKind() == "ConfigMap" || o.GetKind() == "ServiceAccount" {
			unstructured.RemoveNestedField(o.Object, "roleRef")
		}
		b, err := o.MarshalJSON()
		if err != nil {
			s.Fatal(err)
		}
		b = bytes.ReplaceAll(b, []byte(`"namespace":"system-upgrade"`), []byte(`"namespace":"`+s.ns+`"`))
		if err := s.w.cp.Apply(s.Context(), b); err != nil {
			s.Fatal(err)
		}
	}
}

// access is the access of an account of the manifest. A missing right fails the test.
func (s *site) access(account string) *rest.Config {
	s.Helper()
	cfg, err := s.w.cp.ConfigFor("system:serviceaccount:"+s.ns+":"+account, "system:serviceaccounts", "system:serviceaccounts:"+s.ns, "system:authenticated")
	if err != nil {
		s.Fatal(err)
	}
	cfg.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return roundTripper(func(r *http.Request) (*http.Response, error) {
			resp, err := next.RoundTrip(r)
			if err == nil && resp.StatusCode == http.StatusForbidden {
				s.mu.Lock()
				defer s.mu.Unlock()
				s.denied = append(s.denied, account+": "+r.Method+" "+r.URL.Path)
			}
			return resp, err
		})
	})
	return cfg
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// plan creates a Plan from YAML, in this site and for its nodes alone, unless it says which.
func (s *site) plan(text string) *upgradev1.Plan {
	s.Helper()
	var p upgradev1.Plan
	if err := yaml.UnmarshalStrict([]byte(text), &p); err != nil {
		s.Fatal(err)
	}
	p.Namespace = s.ns
	if p.Spec.NodeSelector == nil {
		p.Spec.NodeSelector = &metav1.LabelSelector{MatchLabels: map[string]string{"site": s.ns}}
	}
	s.eventually("the kind is served", func() (string, bool) {
		err := s.w.admin.Create(s.Context(), &p)
		return fmt.Sprint(err), err == nil
	})
	return &p
}

func (s *site) edit(plan, patch string) {
	s.Helper()
	s.patch(&upgradev1.Plan{ObjectMeta: metav1.ObjectMeta{Namespace: s.ns, Name: plan}}, patch)
}

func (s *site) get(plan string) upgradev1.Plan {
	s.Helper()
	var p upgradev1.Plan
	if err := s.w.admin.Get(s.Context(), client.ObjectKey{Namespace: s.ns, Name: plan}, &p); err != nil {
		s.Fatal(err)
	}
	return p
}

func (s *site) nodeNamed(name string) corev1.Node {
	s.Helper()
	var n corev1.Node
	if err := s.w.admin.Get(s.Context(), client.ObjectKey{Name: name}, &n); err != nil {
		s.Fatal(err)
	}
	return n
}

func (s *site) jobs() map[string]batchv1.Job {
	s.Helper()
	var l batchv1.JobList
	if err := s.w.admin.List(s.Context(), &l, client.InNamespace(s.ns)); err != nil {
		s.Fatal(err)
	}
	out := map[string]batchv1.Job{}
	for _, j := range l.Items {
		out[j.Labels[upgradev1.LabelNode]] = j
	}
	return out
}

func cond(p upgradev1.Plan, kind string) upgradev1.Condition {
	for _, c := range p.Status.Conditions {
		if c.Type == kind {
			return c
		}
	}
	return upgradev1.Condition{}
}

// is waits for a condition of a Plan, as "Complete=True/Complete" or with a part of its message after a blank.
func (s *site) is(plan string, want ...string) upgradev1.Plan {
	s.Helper()
	var p upgradev1.Plan
	s.eventually(fmt.Sprintf("Plan %s is %s", plan, want), func() (string, bool) {
		p = s.get(plan)
		ok := p.Status.Constellation != nil && p.Status.Constellation.ObservedGeneration == p.Generation
		for _, w := range want {
			is, message, _ := strings.Cut(w, " ")
			kind, _, _ := strings.Cut(is, "=")
			c := cond(p, kind)
			ok = ok && is == fmt.Sprintf("%s=%s/%s", kind, c.Status, c.Reason) && strings.Contains(c.Message, message)
		}
		b, _ := json.Marshal(p.Status)
		return string(b), ok
	})
	return p
}

func (s *site) done(plan string) upgradev1.Plan {
	s.Helper()
	return s.is(plan, "LatestResolved=True/"+map[bool]string{true: "Channel", false: "Version"}[s.get(plan).Spec.Version == ""], "Validated=True/PlanIsValid", "Complete=True/Complete")
}

// eventually waits until the condition holds. On failure it reports the last state.
func (s *site) eventually(what string, holds func() (string, bool)) {
	s.Helper()
	deadline := time.Now().Add(20 * time.Second)
	for {
		is, ok := holds()
		if ok {
			return
		}
		if time.Now().After(deadline) {
			s.Fatalf("%s: not so after 20 s; it is: %s", what, is)
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// event waits for an event of a Plan.
func (s *site) event(plan, reason, note string) {
	s.Helper()
	s.eventually(fmt.Sprintf("an event %s %q", reason, note), func() (string, bool) {
		var l eventsv1.EventList
		if err := s.w.admin.List(s.Context(), &l, client.InNamespace(s.ns)); err != nil {
			s.Fatal(err)
		}
		var all []string
		for _, e := range l.Items {
			all = append(all, e.Reason+" "+e.Note)
			if e.Regarding.Name == plan && e.Reason == reason && strings.Contains(e.Note, note) {
				return "", true
			}
		}
		return strings.Join(all, "\n"), false
	})
}

var everything = fields.Everything()
