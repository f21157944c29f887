package hollow_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"constellation/assets/render"
	"constellation/engine/cloud"
	"constellation/engine/cloud/gcp"
	"constellation/engine/cloud/providers"
	"constellation/engine/cloud/sandboxapi"
	"constellation/engine/sandbox/controlplane"
	"constellation/engine/sandbox/hollow"
	"constellation/engine/sandbox/recorder"
	"constellation/internal/testneeds"
	"constellation/operator/api/v1alpha1"
	"constellation/operator/decision"
)

// effects are the operator's actions to replace workers, by the names of its points.
// Package operator tests those of control planes, with an agent.
var effects = []string{
	"publish components", "set image of group", "release", "pause autoscaler", "record intent", "create machine", "adopt heir", "cordon", "drain",
	"bind intent", "delete machine", "delete node", "clear intent", "resume autoscaler",
}

// TestOperatorIsKilled replaces workers with operators that are killed repeatedly.
// First one dies before and after each effect, and restarts as the leader with the
// rights of its chart. Then two run at once, the second without leader
// election, and both die at random moments. A recorder watches.
func TestOperatorIsKilled(t *testing.T) {
	testneeds.Time(t, "a minute")
	operatorIsKilled(t, providers.Local)
}

// TestOperatorIsKilledAtEmulatedGoogleCloud is TestOperatorIsKilled with Google's client.
func TestOperatorIsKilledAtEmulatedGoogleCloud(t *testing.T) {
	testneeds.OptIn(t, "CONSTELLATION_KILL_GCP", "two minutes")
	operatorIsKilled(t, gcp.Name)
}

func operatorIsKilled(t *testing.T, provider string) {
	t.Helper()
	const workers, surge = 16, 2
	ctx := t.Context()
	bin := buildOperator(t, "-tags", "crash")
	c := newCluster(t, controlplane.Options{ControllerManagerArgs: []string{"--kube-api-qps=1000", "--kube-api-burst=2000"}})
	h, v := vendorOf(t, c, provider, hollow.Times{Boot: 200 * time.Millisecond, Join: 100 * time.Millisecond, Drain: 200 * time.Millisecond, Off: 200 * time.Millisecond})
	c.chart(v.Provider)

	// Control planes are at the target already, and the first steps publish the workers'
	// target. One-time effects run alone while the rollout is paused: nothing
	// else may end the operator between such an effect and the point behind it.
	max := intstr.FromInt32(surge)
	nv := c.target("v1.1.0", func(s *v1alpha1.NodeVersionSpec) {
		s.Image = v.Image("v1.1.0")
		s.KubernetesClusterVersion, s.KubernetesComponentsReference, s.Rollout = clusterVersionB, refB, v1alpha1.Rollout{MaxSurge: &max, Paused: true}
	})
	c.publish(nv, v1alpha1.JoinComponents{ControlPlane: refB, Worker: refA})
	if err := errors.Join(v.SetImage(ctx, cloud.ControlPlane, "v1.1.0"), v.Seed(ctx, cloud.ControlPlane, controlPlanes, refB), v.Seed(ctx, cloud.Worker, workers, refA)); err != nil {
		t.Fatal(err)
	}
	c.workload(workers)
	c.autoscaler()
	eventually(t, "pods and the autoscaler run", func() (string, bool) {
		var d appsv1.Deployment
		err := c.admin.Get(ctx, client.ObjectKey{Namespace: "kube-system", Name: "constellation-cluster-autoscaler"}, &d)
		n := len(c.pods())
		return fmt.Sprintf("%d nodes have pods, autoscaler %+v, %v", n, d.Status, err), n == workers && d.Status.Replicas == 1
	})
	rec, err := recorder.Start(ctx, recorder.Config{Cluster: c.cp.Config(), Cloud: sandboxapi.NewClient(h.Host, "")})
	if err != nil {
		t.Fatal(err)
	}
	defer rec.Close()
	rec.Begin()

	once := t.TempDir()
	var points []string
	for _, e := range effects {
		points = append(points, "before:"+e, "after:"+e)
	}
	k := &killed{t: t, c: c, bin: bin, kubeconfig: c.kubeconfigFor(t), flags: v.Flags(), env: []string{"CONSTELLATION_CRASH_AT=" + strings.Join(points, ","), "CONSTELLATION_CRASH_ONCE=" + once}}
	missing := func() (all []string) {
		for _, p := range points {
			if _, err := os.Stat(filepath.Join(once, p)); err != nil {
				all = append(all, p)
			}
		}
		return all
	}
	status := func() (v1alpha1.NodeVersionStatus, bool) {
		var nv v1alpha1.NodeVersion
		if err := c.admin.Get(ctx, client.ObjectKey{Name: v1alpha1.NodeVersionName}, &nv); err != nil {
			t.Fatal(err)
		}
		ready := false
		for _, cond := range nv.Status.Conditions {
			ready = ready || cond.Type == v1alpha1.ConditionReady && cond.Status == metav1.ConditionTrue && cond.ObservedGeneration == nv.Generation
		}
		return nv.Status, ready
	}
	// An operator that died between an intent and the request for its machine leaves the next one in doubt until the
	// deadline of the creation. That is rare: another operator must have replaced the node meanwhile.
	const limit = decision.CreateDeadline + 2*time.Minute
	within := func(what string, holds func() (string, bool)) {
		t.Helper()
		for deadline := time.Now().Add(limit); ; time.Sleep(50 * time.Millisecond) {
			is, ok := holds()
			if ok {
				return
			}
			if s, _ := status(); time.Now().After(deadline) {
				t.Fatalf("%s: not so after %v; it is: %s; %+v, waiting %+v, operators %+v; the leader's log ends with %s", what, limit, is, s.Nodes, s.Waiting, k.count(), tail(k.log))
			}
		}
	}

	// One round publishes the workers' components and sets their group's image, so a crash at
	// one may happen during the other. The image is tested afterwards.
	const image = "set image of group"
	for _, at := range []string{"before:", "after:"} {
		if err := os.WriteFile(filepath.Join(once, at+image), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	begun := time.Now()
	leader := k.operate("leader")
	died := func(upTo string) {
		t.Helper()
		within("the operator has died before and after all effects up to "+upTo, func() (string, bool) {
			m := missing()
			return fmt.Sprint("it has not at ", m), !slices.ContainsFunc(m, func(p string) bool {
				_, e, _ := strings.Cut(p, ":")
				return slices.Index(effects, e) <= slices.Index(effects, upTo)
			})
		})
	}
	died("publish components")
	for _, at := range []string{"before:", "after:"} {
		if err := os.Remove(filepath.Join(once, at+image)); err != nil {
			t.Fatal(err)
		}
	}
	if err := v.SetImage(ctx, cloud.Worker, "v1.0.0"); err != nil {
		t.Fatal(err)
	}
	died(image)
	// An earlier operator left a cordon and the mark of a deleted replacement node.
	all := c.nodes()
	last := all[slices.Max(slices.DeleteFunc(slices.Collect(maps.Keys(all)), func(name string) bool { return !strings.HasPrefix(name, "worker-") }))]
	left := last.DeepCopy()
	left.Spec.Unschedulable = true
	metav1.SetMetaDataAnnotation(&left.ObjectMeta, v1alpha1.AnnotationCordoned, time.Now().UTC().Format(time.RFC3339))
	metav1.SetMetaDataAnnotation(&left.ObjectMeta, v1alpha1.AnnotationHeir, "worker-99")
	if err := c.admin.Patch(ctx, left, client.MergeFrom(&last)); err != nil {
		t.Fatal(err)
	}
	died("release")
	if err := c.admin.Patch(ctx, &v1alpha1.NodeVersion{ObjectMeta: metav1.ObjectMeta{Name: v1alpha1.NodeVersionName}},
		client.RawPatch("application/merge-patch+json", []byte(`{"spec":{"rollout":{"paused":false}}}`))); err != nil {
		t.Fatal(err)
	}
	died("clear intent")
	old := func() (n int) {
		for _, node := range c.nodes() {
			if node.Annotations[v1alpha1.AnnotationImage] != v.Image("v1.1.0") {
				n++
			}
		}
		return n
	}
	if old() < workers/4 {
		t.Errorf("%d of %d workers were left when the second operator came", old(), workers)
	}
	t.Logf("died at %d points in %s, %d nodes are outdated yet", len(points)-len(missing()), time.Since(begun).Round(time.Millisecond), old())
	k.anytime.Store(true)
	second := k.operate("second", "--leader-elect=false")
	within("all nodes but a few are replaced", func() (string, bool) { return fmt.Sprint(old(), " are not"), old() <= surge })
	k.anytime.Store(false) // the last effect is a one-time effect, too
	within("nothing is under way, and the operator has died everywhere", func() (string, bool) {
		_, ready := status()
		m := missing()
		return fmt.Sprint("it has not at ", m), ready && len(m) == 0
	})
	// With two operators, one may have an old list of the cloud's machines and track a
	// deleted machine for a moment. Only the final state of the remaining operator counts.
	// A new generation makes it reconcile everything.
	second()
	nv = &v1alpha1.NodeVersion{ObjectMeta: metav1.ObjectMeta{Name: v1alpha1.NodeVersionName}}
	if err := c.admin.Patch(ctx, nv, client.RawPatch("application/merge-patch+json", fmt.Appendf(nil, `{"spec":{"rollout":{"maxSurge":%d}}}`, surge+1))); err != nil {
		t.Fatal(err)
	}
	within("the leader alone finds nothing to do", func() (string, bool) {
		s, ready := status()
		var intents v1alpha1.PendingNodeList
		if err := c.admin.List(ctx, &intents); err != nil {
			t.Fatal(err)
		}
		return fmt.Sprintf("%d intents, %+v", len(intents.Items), s.Conditions), ready && len(intents.Items) == 0
	})
	within("the cloud has the machines of the nodes and no other", func() (string, bool) {
		l := h.Instances()
		return fmt.Sprint(l), len(l) == workers+controlPlanes
	})
	within("the autoscaler runs", func() (string, bool) {
		var d appsv1.Deployment
		err := c.admin.Get(ctx, client.ObjectKey{Namespace: "kube-system", Name: "constellation-cluster-autoscaler"}, &d)
		return fmt.Sprint(d.Status, err), err == nil && d.Status.Replicas == 1
	})
	leader()
	lives := k.count()
	t.Logf("rollout of %d workers in %s, operators: %+v", workers, time.Since(begun).Round(time.Millisecond), lives)
	if lives.atPoints != len(points) || lives.anytime < 5 {
		t.Errorf("operators died %d times at %d points, and %d times at any moment; want at least 5", lives.atPoints, len(points), lives.anytime)
	}

	// The recording is complete when the cloud's last list has no machine in deletion.
	wait, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	if err := rec.Wait(wait, func(j []recorder.Entry) bool {
		var machines *recorder.Machines
		var lease *recorder.Lease
		for i := range j {
			switch f := j[i].Fact.(type) {
			case *recorder.Machines:
				machines = f
			case *recorder.Lease:
				lease = f
			}
		}
		if machines == nil || lease == nil || lease.Holder != "" || len(machines.List) != workers+controlPlanes {
			return false
		}
		for _, m := range machines.List {
			if m.State != string(cloud.Ready) {
				return false
			}
		}
		return true
	}); err != nil {
		t.Error("the leader's lease was not given up, or machines are left:", err)
	}
	rec.End()
	journal := rec.Journal()
	t.Logf("%d entries\n%s", len(journal), recorder.Summarize(journal))
	for _, b := range recorder.Check(journal, recorder.Limits{Surge: surge, NoMembers: true, Join: time.Minute}) {
		t.Error(b)
	}
}

// chart applies the rights of the operator's chart. Its Deployment does not run here.
func (c *cluster) chart(provider string) {
	c.t.Helper()
	const namespace = "constellation-system"
	c.create(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}})
	p, err := providers.Find(provider)
	if err != nil {
		c.t.Fatalf("%v", err)
	}
	all, err := render.Chart("constellation-operator", "v1.1.0", namespace, p.ChartValues(nil), map[string]any{"release": "v1.1.0", "plans": map[string]any{"enabled": false}})
	if err != nil {
		c.t.Fatalf("%v", err)
	}
	rights := 0
	for _, doc := range bytes.Split(all, []byte("\n---")) {
		var m metav1.TypeMeta
		if err := yaml.Unmarshal(doc, &m); err != nil {
			c.t.Fatalf("%v", err)
		}
		if !strings.HasPrefix(m.APIVersion, "rbac.authorization.k8s.io/") {
			continue
		}
		rights++
		if err := c.cp.Apply(c.t.Context(), doc); err != nil {
			c.t.Fatalf("%v", err)
		}
	}
	if rights == 0 {
		c.t.Fatalf("the chart gives no rights")
	}
}

// kubeconfigFor writes a kubeconfig of the chart's ServiceAccount.
func (c *cluster) kubeconfigFor(t *testing.T) string {
	t.Helper()
	const namespace, user = "constellation-system", "operator"
	r, err := c.cp.ConfigFor("system:serviceaccount:"+namespace+":constellation-operator", "system:serviceaccounts", "system:serviceaccounts:"+namespace, "system:authenticated")
	if err != nil {
		t.Fatal(err)
	}
	k := clientcmdapi.NewConfig()
	k.Clusters[user] = &clientcmdapi.Cluster{Server: r.Host, CertificateAuthorityData: r.CAData}
	k.AuthInfos[user] = &clientcmdapi.AuthInfo{ClientCertificateData: r.CertData, ClientKeyData: r.KeyData}
	k.Contexts[user] = &clientcmdapi.Context{Cluster: user, AuthInfo: user}
	k.CurrentContext = user
	path := filepath.Join(t.TempDir(), "kubeconfig")
	if err := clientcmd.WriteToFile(*k, path); err != nil {
		t.Fatal(err)
	}
	return path
}

// autoscaler creates the owner's objects of the autoscaler.
func (c *cluster) autoscaler() {
	c.t.Helper()
	const name, ns = "constellation-cluster-autoscaler", "kube-system"
	labels := map[string]string{"app": name}
	c.create(&appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: name},
		Spec: appsv1.DeploymentSpec{
			Replicas: new(int32(1)), Selector: &metav1.LabelSelector{MatchLabels: labels},
			Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: name, Image: "none"}}}},
		},
	})
	c.create(&v1alpha1.AutoscalingStrategy{
		ObjectMeta: metav1.ObjectMeta{Name: v1alpha1.AutoscalingStrategyName},
		Spec:       v1alpha1.AutoscalingStrategySpec{Enabled: true, DeploymentName: name, DeploymentNamespace: ns},
	})
}

// killed restarts operators repeatedly. It is safe for concurrent use.
type killed struct {
	t               *testing.T
	c               *cluster
	bin, kubeconfig string
	flags           []string // name the cloud
	env             []string
	log             string      // of the first operator
	anytime         atomic.Bool // they are killed at any moment, too

	mu    sync.Mutex
	lives lives
}

// lives counts the ends of operators.
type lives struct{ atPoints, anytime int }

func (k *killed) count() lives {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.lives
}

// operate runs an operator, and restarts it after each kill. stop ends it regularly.
func (k *killed) operate(name string, args ...string) (stop func()) {
	k.t.Helper()
	log := filepath.Join(k.t.TempDir(), name+".log")
	if k.log == "" {
		k.log = log
	}
	f, err := os.Create(log)
	if err != nil {
		k.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer f.Close()
		for ctx.Err() == nil {
			if err := k.live(ctx, f, args); err != nil {
				k.t.Errorf("%s: %v; its log ends with %s", name, err, tail(log))
				return
			}
		}
	}()
	stop = sync.OnceFunc(func() {
		cancel()
		<-done
		if text, err := os.ReadFile(log); err != nil || bytes.Contains(text, []byte("is forbidden")) {
			k.t.Errorf("%s lacks rights: %v, %s", name, err, tail(log))
		}
	})
	k.t.Cleanup(stop)
	return stop
}

// live runs one process. The error is that of a process that ended by itself.
func (k *killed) live(ctx context.Context, log *os.File, args []string) error {
	cmd := exec.Command(k.bin, slices.Concat([]string{"--kubeconfig", k.kubeconfig, "--metrics", "", "--health", ""}, k.flags, args)...)
	cmd.Env = append(os.Environ(), k.env...)
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		return err
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	var fate <-chan time.Time
	if k.anytime.Load() {
		fate = time.After(300*time.Millisecond + rand.N(1200*time.Millisecond))
	}
	atPoint := 1
	var err error
	for running := true; running; {
		select {
		case err = <-ended:
			running = false
		case <-ctx.Done():
			_ = cmd.Process.Signal(syscall.SIGTERM)
			err := <-ended
			if w, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); ok && w.Signal() == syscall.SIGTERM {
				return nil // it had only just started
			}
			return err
		case <-fate:
			fate = nil
			if k.anytime.Load() {
				_ = cmd.Process.Kill()
				atPoint = 0
				err = <-ended
				running = false
			}
		}
	}
	if w, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); !ok || w.Signal() != syscall.SIGKILL {
		return fmt.Errorf("ended by itself: %w", err)
	}
	k.mu.Lock()
	k.lives.atPoints += atPoint
	k.lives.anytime += 1 - atPoint
	k.mu.Unlock()
	if len(args) == 0 {
		return k.inherit(ctx)
	}
	return nil
}

// inherit takes over the leader's lease of a dead process, so that other processes need not
// wait until the lease expires.
func (k *killed) inherit(ctx context.Context) error {
	var l coordinationv1.Lease
	err := k.c.admin.Get(ctx, client.ObjectKey{Namespace: "constellation-system", Name: "constellation-operator"}, &l)
	if err != nil {
		return client.IgnoreNotFound(err)
	}
	l.Spec.HolderIdentity = new("")
	return k.c.admin.Update(ctx, &l)
}
