package drill

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	k8sruntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/intstr"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"constellation/assets"
	"constellation/assets/render"
	"constellation/engine/cloud"
	"constellation/engine/cloud/providers"
	"constellation/engine/cloud/sandboxapi"
	"constellation/engine/sandbox/build"
	"constellation/engine/sandbox/controlplane"
	hollowmachines "constellation/engine/sandbox/hollow"
	"constellation/engine/sandbox/recorder"
	"constellation/operator/api/v1alpha1"
	"constellation/operator/decision"
)

// A drill of hollow machines: enough workers for points to differ.
const (
	hollowWorkers       = 6
	hollowControlPlanes = 3
	hollowSurge         = 2
	hollowName          = "drill"
	hollowNamespace     = "constellation-system"
)

// Components that hollow machines are said to have; none installs any.
var (
	refFrom = "k8s-components-sha256-" + strings.Repeat("a", 64)
	refTo   = "k8s-components-sha256-" + strings.Repeat("b", 64)
)

// hollow creates a cluster of hollow machines: a real control plane of plain processes, a
// real operator with the rights of its chart, and machines that run nothing. Only workers
// are replaced: a hollow control plane has neither an agent nor an etcd member.
// cloudName is the provider that is emulated; ownCloud: none.
func (d *Drills) hollow(ctx context.Context, place, cloudName string, v versions, say teller) (_ *site, err error) {
	program, err := build.ReleaseBinary(v.releaseTo, "operator")
	if err != nil {
		return nil, err
	}
	var bin string // the control planes are at the target
	if !v.defaults() {
		a, err := build.Load(d.dirs.Cache, v.kubernetesTo)
		if err != nil {
			return nil, err
		}
		bin = filepath.Dir(a.Binaries["kube-apiserver"])
	}
	dir := filepath.Join(place, "control-plane")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	cp, err := controlplane.Start(ctx, controlplane.Options{Dir: dir, BinDir: bin, Controllers: true, ControllerManagerArgs: []string{"--kube-api-qps=200", "--kube-api-burst=400"}})
	if err != nil {
		return nil, err
	}
	alive, end := context.WithCancel(context.WithoutCancel(ctx))
	wait := func() {}
	var op *operators
	stop := sync.OnceFunc(func() {
		if op != nil {
			op.stop()
		}
		end()
		wait()
		cp.Stop()
	})
	defer func() {
		if err != nil {
			stop()
		}
	}()
	box, w, err := hollowmachines.Start(alive, hollowmachines.Options{
		Cluster: cp.Config(), Name: hollowName, Images: slices.Compact([]string{v.releaseFrom, v.releaseTo}), Log: d.log,
		Times: hollowmachines.Times{Boot: 400 * time.Millisecond, Join: 200 * time.Millisecond, Settle: 300 * time.Millisecond, Drain: 500 * time.Millisecond, Off: 400 * time.Millisecond},
	})
	if err != nil {
		return nil, err
	}
	wait = w
	owner := sandboxapi.NewClient(box.Host, "")
	vendor, err := hollowmachines.Vendors[cmp.Or(cloudName, providers.Local)](alive, box, d.log)
	if err != nil {
		return nil, err
	}
	c := &hollowCluster{versions: v, cp: cp, vendor: vendor}
	if err := c.prepare(ctx); err != nil {
		return nil, err
	}
	if err := errors.Join(
		vendor.SetImage(ctx, cloud.ControlPlane, v.releaseTo),
		vendor.Seed(ctx, cloud.ControlPlane, hollowControlPlanes, refTo), vendor.Seed(ctx, cloud.Worker, hollowWorkers, refFrom),
	); err != nil {
		return nil, err
	}
	if err := c.workload(ctx); err != nil {
		return nil, err
	}
	say("%d hollow workers run pods; the operator starts", hollowWorkers)
	op, err = startOperators(program, place, c)
	if err != nil {
		return nil, err
	}
	limit, in := 4*time.Minute, ""
	if cloudName != ownCloud {
		// A machine whose operation is lost is given up after the deadline of its creation.
		limit, in = 3*decision.CreateDeadline, ", in an emulated "+cloudName
	}
	return &site{
		kubernetes: v.kubernetesTo,
		what:       fmt.Sprintf("%d hollow workers %s; %d control planes are at the target and stay (hollow machines run nothing)%s", hollowWorkers, v, hollowControlPlanes, in),
		cluster:    cp.Config(), cloud: owner, limit: limit, size: hollowWorkers + hollowControlPlanes,
		setFaults: func(_ context.Context, spec []string) error { return vendor.SetFaults(spec) },
		unseen:    []recorder.Rule{recorder.EtcdVoters, recorder.LeaseMoved, recorder.ServiceAnswers, recorder.SecretsKept},
		limits:    recorder.Limits{Surge: hollowSurge, NoMembers: true, Join: time.Minute},
		begin: func(ctx context.Context, _ func(error) bool) error {
			return c.admin.Patch(ctx, &v1alpha1.NodeVersion{ObjectMeta: metav1.ObjectMeta{Name: v1alpha1.NodeVersionName}},
				client.RawPatch("application/merge-patch+json", []byte(`{"spec":{"rollout":{"paused":false}}}`)))
		},
		rest: func(context.Context) { op.stop() },
		close: func(context.Context) error {
			stop()
			if n := vendor.Problems(); n > 0 {
				return fmt.Errorf("%d calls are outside of the schema of the emulated cloud", n)
			}
			return nil
		},

		killOperator: op.kill, stopAPIServer: cp.StopAPIServer, startAPI: cp.StartAPIServer,
	}, nil
}

// hollowCluster is the cluster as its administrator has it.
type hollowCluster struct {
	versions

	cp     *controlplane.ControlPlane
	vendor hollowmachines.Vendor
	admin  client.Client
}

// prepare installs the kinds and the operator's rights, and sets a target that waits.
func (c *hollowCluster) prepare(ctx context.Context) error {
	crds, err := assets.CRDsFor(c.releaseTo)
	if err != nil {
		return err
	}
	for _, f := range crds {
		if err := c.cp.Apply(ctx, f.Data); err != nil {
			return err
		}
	}
	scheme := k8sruntime.NewScheme()
	if err := errors.Join(clientgoscheme.AddToScheme(scheme), v1alpha1.AddToScheme(scheme)); err != nil {
		return err
	}
	if c.admin, err = client.New(c.cp.Config(), client.Options{Scheme: scheme}); err != nil {
		return err
	}
	for ref, version := range map[string]string{refFrom: c.kubernetesFrom, refTo: c.kubernetesTo} {
		if err := c.admin.Create(ctx, &corev1.ConfigMap{
			ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: ref},
			Data:       map[string]string{"cluster-version": version, "components": "[]"},
		}); err != nil {
			return err
		}
	}
	if err := c.admin.Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: hollowNamespace}}); err != nil {
		return err
	}
	if err := c.rights(ctx); err != nil {
		return err
	}
	surge := intstr.FromInt32(hollowSurge)
	nv := &v1alpha1.NodeVersion{
		ObjectMeta: metav1.ObjectMeta{Name: v1alpha1.NodeVersionName},
		Spec: v1alpha1.NodeVersionSpec{
			Image: c.vendor.Image(c.releaseTo), ImageVersion: c.releaseTo, KubernetesComponentsReference: refTo, KubernetesClusterVersion: c.kubernetesTo,
			Rollout: v1alpha1.Rollout{MaxSurge: &surge, Paused: true},
		},
	}
	if err := c.admin.Create(ctx, nv); err != nil {
		return err
	}
	nv.Status.JoinComponents = v1alpha1.JoinComponents{ControlPlane: refTo, Worker: refFrom}
	return c.admin.Status().Update(ctx, nv)
}

// rights applies those of the operator's chart; its Deployment is not for hollow machines.
func (c *hollowCluster) rights(ctx context.Context) error {
	p, err := providers.Find(c.vendor.Provider)
	if err != nil {
		return err
	}
	all, err := render.Chart("constellation-operator", c.releaseTo, hollowNamespace, p.ChartValues(nil), map[string]any{"release": c.releaseTo, "plans": map[string]any{"enabled": false}})
	if err != nil {
		return err
	}
	for _, doc := range bytes.Split(all, []byte("\n---")) {
		var m metav1.TypeMeta
		if err := yaml.Unmarshal(doc, &m); err != nil {
			return err
		}
		if strings.HasPrefix(m.APIVersion, "rbac.authorization.k8s.io/") {
			if err := c.cp.Apply(ctx, doc); err != nil {
				return err
			}
		}
	}
	return nil
}

// workload makes pods of which a machine holds one, a budget that lets one of them go at a
// time, and the autoscaler that an owner has. It returns when all of them run.
func (c *hollowCluster) workload(ctx context.Context) error {
	const scaler, system = "constellation-cluster-autoscaler", "kube-system"
	deployment := func(namespace, name string, replicas int32, container corev1.Container) *appsv1.Deployment {
		labels := map[string]string{"app": name}
		return &appsv1.Deployment{
			ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
			Spec: appsv1.DeploymentSpec{
				Replicas: &replicas, Selector: &metav1.LabelSelector{MatchLabels: labels},
				Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: corev1.PodSpec{Containers: []corev1.Container{container}}},
			},
		}
	}
	one := intstr.FromInt32(hollowSurge)
	for _, o := range []client.Object{
		deployment("default", "web", hollowWorkers, corev1.Container{Name: "web", Image: "none", Resources: corev1.ResourceRequirements{
			Requests: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("3")},
		}}),
		&policyv1.PodDisruptionBudget{
			ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web"},
			Spec:       policyv1.PodDisruptionBudgetSpec{MaxUnavailable: &one, Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "web"}}},
		},
		deployment(system, scaler, 1, corev1.Container{Name: scaler, Image: "none"}),
		&v1alpha1.AutoscalingStrategy{
			ObjectMeta: metav1.ObjectMeta{Name: v1alpha1.AutoscalingStrategyName},
			Spec:       v1alpha1.AutoscalingStrategySpec{Enabled: true, DeploymentName: scaler, DeploymentNamespace: system},
		},
	} {
		if err := c.admin.Create(ctx, o); err != nil {
			return fmt.Errorf("create %T %s: %w", o, o.GetName(), err)
		}
	}
	return until(ctx, time.Minute, "pods run", func() bool {
		for key, want := range map[client.ObjectKey]int32{{Namespace: "default", Name: "web"}: hollowWorkers, {Namespace: system, Name: scaler}: 1} {
			var d appsv1.Deployment
			if err := c.admin.Get(ctx, key, &d); err != nil || d.Status.ReadyReplicas != want {
				return false
			}
		}
		return true
	})
}

// until waits for a condition.
func until(ctx context.Context, limit time.Duration, what string, holds func() bool) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	for !holds() {
		select {
		case <-ctx.Done():
			return fmt.Errorf("it is not so that %s: %w", what, context.Cause(ctx))
		case <-time.After(50 * time.Millisecond):
		}
	}
	return nil
}

// kubeconfig writes the access of the chart's ServiceAccount.
func (c *hollowCluster) kubeconfig(file string) error {
	const user = "operator"
	r, err := c.cp.ConfigFor("system:serviceaccount:"+hollowNamespace+":constellation-operator", "system:serviceaccounts", "system:serviceaccounts:"+hollowNamespace, "system:authenticated")
	if err != nil {
		return err
	}
	return clientcmd.WriteToFile(*asKubeconfig(r, user), file)
}

func asKubeconfig(r *rest.Config, user string) *clientcmdapi.Config {
	k := clientcmdapi.NewConfig()
	k.Clusters[user] = &clientcmdapi.Cluster{Server: r.Host, CertificateAuthorityData: r.CAData}
	k.AuthInfos[user] = &clientcmdapi.AuthInfo{ClientCertificateData: r.CertData, ClientKeyData: r.KeyData}
	k.Contexts[user] = &clientcmdapi.Context{Cluster: user, AuthInfo: user}
	k.CurrentContext = user
	return k
}

// operators is an operator that is restarted when it ends, as by a kubelet.
type operators struct {
	cancel context.CancelFunc
	done   chan struct{}

	mu  sync.Mutex
	cmd *exec.Cmd // that runs
}

// startOperators starts the first. Its log is in the drill's directory.
func startOperators(program, place string, c *hollowCluster) (*operators, error) {
	access := filepath.Join(place, "operator.conf")
	if err := c.kubeconfig(access); err != nil {
		return nil, err
	}
	log, err := os.OpenFile(filepath.Join(place, "operator.log"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	o := &operators{cancel: cancel, done: make(chan struct{})}
	go func() {
		// The process ends with this thread if the drill is killed.
		runtime.LockOSThread()
		defer close(o.done)
		defer log.Close()
		for ctx.Err() == nil {
			o.live(ctx, log, program, append(c.vendor.Flags(), "--kubeconfig", access, "--metrics", "", "--health", "")...)
		}
	}()
	return o, nil
}

// live is one life, and the pause before the next.
func (o *operators) live(ctx context.Context, log io.Writer, program string, args ...string) {
	cmd := exec.Command(program, args...) //nolint:noctx // it is asked to end, and gives its lease back
	cmd.Stdout, cmd.Stderr = log, log
	dieWithParent(cmd)
	if err := cmd.Start(); err != nil {
		fmt.Fprintln(log, err)
	} else {
		o.mu.Lock()
		o.cmd = cmd
		o.mu.Unlock()
		end := context.AfterFunc(ctx, func() { _ = cmd.Process.Signal(os.Interrupt) })
		_ = cmd.Wait() // however it ended, another one begins
		end()
		o.mu.Lock()
		o.cmd = nil
		o.mu.Unlock()
	}
	select {
	case <-ctx.Done():
	case <-time.After(time.Second):
	}
}

// kill kills the one that runs, as soon as one does.
func (o *operators) kill(ctx context.Context) error {
	return until(ctx, 10*time.Second, "an operator runs that could be killed", func() bool {
		o.mu.Lock()
		defer o.mu.Unlock()
		return o.cmd != nil && o.cmd.Process.Kill() == nil
	})
}

// stop ends it regularly.
func (o *operators) stop() {
	o.cancel()
	<-o.done
}
