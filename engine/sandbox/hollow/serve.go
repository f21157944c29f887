package hollow

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	goruntime "runtime"
	"slices"
	"strings"
	"sync"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/intstr"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"constellation/assets"
	"constellation/assets/render"
	"constellation/engine/cloud"
	"constellation/engine/cloud/providers"
	"constellation/engine/cloud/sandboxapi"
	"constellation/engine/cluster"
	"constellation/engine/component"
	"constellation/engine/release"
	"constellation/engine/sandbox"
	"constellation/engine/sandbox/controlplane"
	"constellation/engine/version"
	"constellation/operator/api/v1alpha1"
)

const (
	operatorNamespace = "constellation-system"
	operatorAccount   = "constellation-operator"

	// surge is the default share of nodes that may be replaced at a time: 500 machines
	// one by one would take too long.
	surge = "10%"

	operatorGrace = 5 * time.Second
	// operatorPause is between the end of an operator and the start of the next.
	operatorPause = 500 * time.Millisecond
	watchPause    = 200 * time.Millisecond
)

// Serve runs a whole sandbox of hollow machines: a control plane of plain processes, the
// machines as its nodes, each worker with a pod, and the operator, which is the real
// program with the rights of its chart. It runs until ctx ends or its owner shuts it
// down. All processes end with it in any case. Only files are left in h.Dir.
//
// The owner's API answers at once, and reports the progress.
func Serve(ctx context.Context, h sandbox.Hollow, log *slog.Logger) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	b := &box{Hollow: h, log: log, stop: cancel, doing: "start etcd and the API server"}
	var work sync.WaitGroup
	defer work.Wait()
	defer cancel()
	if err := b.answer(ctx, &work); err != nil {
		return err
	}
	err := b.live(ctx, &work)
	if ctx.Err() != nil {
		log.Info("hollow sandbox ends", "sandbox", h.Name)
		return nil
	}
	return err
}

// box is a running sandbox of hollow machines.
type box struct {
	sandbox.Hollow
	log  *slog.Logger
	stop context.CancelFunc
	cp   *controlplane.ControlPlane

	mu         sync.Mutex
	doing      string
	cloud      *Cloud       // nil before there is one
	api        http.Handler // of the cloud
	endpoint   string       // host:port of the API server
	components map[string]component.List
}

func (b *box) now(doing string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.doing = doing
	if doing != "" {
		b.log.Info("hollow sandbox starts", "doing", doing)
	}
}

// answer serves the owner's API.
func (b *box) answer(ctx context.Context, work *sync.WaitGroup) error {
	if err := os.Remove(b.Socket); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("serve hollow sandbox: %w", err)
	}
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "unix", b.Socket)
	if err != nil {
		return fmt.Errorf("serve hollow sandbox: %w", err)
	}
	if err := os.Chmod(b.Socket, 0o600); err != nil {
		l.Close()
		return fmt.Errorf("serve hollow sandbox: %w", err)
	}
	mux := http.NewServeMux()
	reply := func(w http.ResponseWriter, v any) {
		w.Header().Set("Content-Type", "application/json")
		if err := json.NewEncoder(w).Encode(v); err != nil {
			b.log.Debug("answer not sent", "err", err)
		}
	}
	mux.HandleFunc("GET /v1/sandbox", func(w http.ResponseWriter, _ *http.Request) { reply(w, b.describe()) })
	mux.HandleFunc("POST /v1/shutdown", func(w http.ResponseWriter, _ *http.Request) {
		reply(w, struct{}{})
		b.stop()
	})
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		b.mu.Lock()
		api := b.api
		b.mu.Unlock()
		if api == nil {
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(http.StatusServiceUnavailable)
			reply(w, sandboxapi.Problem{Message: "the hollow sandbox is starting"})
			return
		}
		api.ServeHTTP(w, r)
	})
	srv := &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second, ErrorLog: slog.NewLogLogger(b.log.Handler(), slog.LevelDebug)}
	work.Go(func() {
		if err := srv.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			b.log.Warn("hollow sandbox not served", "err", err)
		}
	})
	work.Go(func() {
		<-ctx.Done()
		grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		if srv.Shutdown(grace) != nil {
			srv.Close()
		}
	})
	return nil
}

// more adds the routes that only whole sandboxes have to the owner's API.
func (b *box) more(mux *http.ServeMux) {
	problem := func(w http.ResponseWriter, status int, message string) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(status)
		_ = json.NewEncoder(w).Encode(sandboxapi.Problem{Message: message}) // the client may be gone
	}
	mux.HandleFunc("GET /v1/images", func(w http.ResponseWriter, _ *http.Request) {
		var l sandboxapi.ImageList
		for _, v := range b.Images {
			l.Images = append(l.Images, cloud.Image{Reference: sandboxapi.ImageReference(b.Name, v), Version: v})
		}
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(l)
	})
	mux.HandleFunc("GET /v1/components", func(w http.ResponseWriter, r *http.Request) {
		v := r.URL.Query().Get("kubernetes")
		l, ok := b.components[v]
		if !ok {
			problem(w, http.StatusNotFound, fmt.Sprintf("Kubernetes %q is not known to release %s", v, b.Release))
			return
		}
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(sandboxapi.ComponentList{Components: l})
	})
	mux.HandleFunc("PUT /v1/times", func(w http.ResponseWriter, r *http.Request) {
		var t sandboxapi.HollowTimes
		if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, 1<<10)).Decode(&t); err != nil || t.Boot < 0 || t.Join < 0 || t.Drain < 0 {
			problem(w, http.StatusBadRequest, "these are no times")
			return
		}
		b.cloud.SetTimes(timesOf(t, b.cloud.Times()))
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write([]byte("{}"))
	})
}

// timesOf are the user's times; zero ones stay unchanged. Half of the join time
// is until the Node is registered, the other half until it is Ready.
func timesOf(t sandboxapi.HollowTimes, before Times) Times {
	if t.Boot > 0 {
		before.Boot = t.Boot
	}
	if t.Join > 0 {
		before.Join, before.Settle = t.Join/2, t.Join-t.Join/2
	}
	if t.Drain > 0 {
		before.Drain = t.Drain
	}
	return before
}

// describe returns all data of the sandbox, for its owner.
func (b *box) describe() sandboxapi.Info {
	b.mu.Lock()
	defer b.mu.Unlock()
	info := sandboxapi.Info{
		Name: b.Name, UID: b.UID, Release: b.Release, Kubernetes: b.Kubernetes, KubernetesEndpoint: b.endpoint, InitEndpoint: b.endpoint,
		Workspace: b.Workspace, Created: b.Created, Machines: []sandboxapi.Machine{}, Groups: []cloud.Group{}, Faults: b.Faults,
		Hollow: &sandboxapi.Hollow{Doing: b.doing, HollowTimes: b.Times},
	}
	for v := range b.components {
		info.KubernetesVersions = append(info.KubernetesVersions, v)
	}
	slices.Sort(info.KubernetesVersions)
	if b.cloud == nil {
		return info
	}
	t := b.cloud.Times()
	info.Hollow.HollowTimes = sandboxapi.HollowTimes{Boot: t.Boot, Join: t.Join + t.Settle, Drain: t.Drain}
	info.Groups, info.Faults = b.cloud.Groups(), b.cloud.Faults().Spec()
	for _, i := range b.cloud.Instances() {
		m := sandboxapi.Machine{Instance: i, Boot: sandboxapi.BootReady, Started: i.Created}
		switch i.State {
		case cloud.Creating:
			m.Boot = sandboxapi.BootBooting
		case cloud.Stopped:
			m.Boot = sandboxapi.BootStopped
		}
		info.Machines = append(info.Machines, m)
	}
	return info
}

// live creates and monitors everything.
func (b *box) live(ctx context.Context, work *sync.WaitGroup) error {
	// An existing directory is an earlier cluster's, whose machines are gone.
	dir := filepath.Join(b.Dir, "control-plane")
	if err := errors.Join(os.RemoveAll(dir), os.MkdirAll(dir, 0o700)); err != nil {
		return fmt.Errorf("make folder of the control plane: %w", err)
	}
	cp, err := controlplane.Start(ctx, controlplane.Options{
		Dir: dir, BinDir: filepath.Dir(b.Binaries["kube-apiserver"]), Controllers: true,
		ControllerManagerArgs: []string{"--kube-api-qps=1000", "--kube-api-burst=2000"},
		SchedulerArgs:         []string{"--kube-api-qps=1000", "--kube-api-burst=2000"},
	})
	if err != nil {
		return fmt.Errorf("start the control plane: %w", err)
	}
	b.cp = cp
	defer cp.Stop()
	kubeconfig, err := cp.Kubeconfig()
	if err != nil {
		return err
	}
	if err := os.WriteFile(b.Kubeconfig, kubeconfig, 0o600); err != nil {
		return fmt.Errorf("write the kubeconfig: %w", err)
	}
	b.mu.Lock()
	b.endpoint = strings.TrimPrefix(cp.Config().Host, "https://")
	b.mu.Unlock()

	b.now("install the kinds and the rights of the operator")
	admin, err := b.install(ctx)
	if err != nil {
		return err
	}
	b.now("publish components and the target")
	reference, err := b.target(ctx, admin)
	if err != nil {
		return err
	}

	c, wait, err := Start(ctx, Options{
		Cluster: cp.Config(), Name: b.Name, Token: b.Token, Dir: b.Dir, Images: imagesFrom(b.Image, b.Images),
		Times: timesOf(b.Times, Times{Off: time.Second}), Log: b.log,
	})
	if err != nil {
		return err
	}
	work.Go(wait)
	b.mu.Lock()
	b.cloud, b.api = c, c.Owner(b.more)
	b.mu.Unlock()
	b.now(fmt.Sprintf("register %d hollow machines as nodes", b.ControlPlanes+b.Workers))
	if err := errors.Join(c.Seed(ctx, sandboxapi.ControlPlaneGroup, b.ControlPlanes, reference), c.Seed(ctx, sandboxapi.WorkerGroup, b.Workers, reference)); err != nil {
		return err
	}
	if err := c.SetFaults(b.Faults); err != nil {
		return err
	}
	b.now("give each worker a pod")
	if err := admin.Create(ctx, deployment(b.Workers)); err != nil {
		return fmt.Errorf("create the workload: %w", err)
	}
	b.now("start the operator")
	a := newAgent(c, max(b.Times.Join, 100*time.Millisecond))
	socket := filepath.Join(b.Dir, "agent.sock")
	work.Go(func() {
		if err := a.serve(ctx, socket); err != nil && ctx.Err() == nil {
			b.log.Warn("hollow agent not served", "err", err)
		}
	})
	access, err := b.operatorAccess()
	if err != nil {
		return err
	}
	work.Go(func() { b.operate(ctx, admin, a, access, socket) })
	if err := await(ctx, "the operator counts all nodes", func() (bool, error) {
		var nv v1alpha1.NodeVersion
		err := admin.Get(ctx, client.ObjectKey{Name: v1alpha1.NodeVersionName}, &nv)
		return err == nil && int(nv.Status.Nodes.Total) >= b.ControlPlanes+b.Workers, err
	}); err != nil {
		return err
	}
	b.now("")
	b.log.Info("hollow sandbox served", "sandbox", b.Name, "control_planes", b.ControlPlanes, "workers", b.Workers, "pid", os.Getpid())

	// The sandbox ends with its control plane.
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
			for _, name := range []string{"etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler"} {
				if cp.PID(name) == 0 && ctx.Err() == nil {
					return fmt.Errorf("%s has ended; its log is %s", name, filepath.Join(dir, name+".log"))
				}
			}
		}
	}
}

// imagesFrom are all images, starting with first.
func imagesFrom(first string, all []string) []string {
	return append([]string{first}, slices.DeleteFunc(slices.Clone(all), func(v string) bool { return v == first })...)
}

// await polls a condition until it holds. If ctx ends first, the error is the last one of the
// condition, or else that of ctx.
func await(ctx context.Context, what string, is func() (bool, error)) error {
	tick := time.NewTicker(watchPause)
	defer tick.Stop()
	for {
		yes, err := is()
		if yes {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("await that %s: %w", what, errors.Join(ctx.Err(), err))
		case <-tick.C:
		}
	}
}

// install makes the kinds, and the operator's account with the rights of its chart.
func (b *box) install(ctx context.Context) (client.Client, error) {
	crds, err := assets.CRDsFor(b.Release)
	if err != nil {
		return nil, err
	}
	for _, f := range crds {
		if err := b.cp.Apply(ctx, f.Data); err != nil {
			return nil, err
		}
	}
	scheme := runtime.NewScheme()
	if err := errors.Join(clientgoscheme.AddToScheme(scheme), v1alpha1.AddToScheme(scheme)); err != nil {
		return nil, err
	}
	admin, err := client.New(b.cp.Config(), client.Options{Scheme: scheme})
	if err != nil {
		return nil, fmt.Errorf("connect to the API server: %w", err)
	}
	if err := admin.Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: operatorNamespace}}); err != nil && !apierrors.IsAlreadyExists(err) {
		return nil, fmt.Errorf("create namespace: %w", err)
	}
	// A pod would run nothing: the operator is a process beside the control plane, and
	// its Deployment only provides its version.
	const chart = "constellation-operator"
	values := map[string]any{"release": b.Release, "operator": map[string]any{"replicas": 0, "autoscaler": map[string]any{"standIn": false}}}
	files, err := assets.ChartFor(chart, b.Release)
	if err != nil {
		return nil, err
	}
	if assets.HasValue(files, "plans") {
		values["plans"] = map[string]any{"enabled": false}
	}
	all, err := render.Chart(chart, b.Release, operatorNamespace, providers.LocalValues(), values)
	if err != nil {
		return nil, err
	}
	if err := b.cp.Apply(ctx, all); err != nil {
		return nil, err
	}
	return admin, nil
}

// target publishes the components of every Kubernetes version of the release, and sets the
// target to the machines' current versions. It returns the name of their components.
func (b *box) target(ctx context.Context, admin client.Client) (string, error) {
	cat, err := release.Load(assets.Releases())
	if err != nil {
		return "", err
	}
	v, err := version.Parse(b.Release)
	if err != nil {
		return "", err
	}
	rel, err := cat.Release(v)
	if err != nil {
		return "", err
	}
	reference, lists := "", map[string]component.List{}
	for _, k := range rel.Kubernetes {
		l, err := rel.Components(k.Version, goruntime.GOARCH)
		if errors.Is(err, release.ErrUnpinned) {
			continue
		}
		if err != nil {
			return "", err
		}
		data, err := json.Marshal(l)
		if err != nil {
			return "", err
		}
		name := cluster.ComponentsName(l)
		if err := admin.Create(ctx, &corev1.ConfigMap{
			ObjectMeta: metav1.ObjectMeta{Namespace: systemNamespace, Name: name, Labels: map[string]string{"app.kubernetes.io/part-of": "constellation"}},
			Immutable:  new(true),
			Data:       map[string]string{"cluster-version": k.Version.String(), "components": string(data)},
		}); err != nil {
			return "", fmt.Errorf("publish components: %w", err)
		}
		lists[k.Version.String()] = l
		if k.Version.String() == b.Kubernetes {
			reference = name
		}
	}
	if reference == "" {
		return "", fmt.Errorf("publish components: release %s does not know Kubernetes %s", b.Release, b.Kubernetes)
	}
	b.mu.Lock()
	b.components = lists
	b.mu.Unlock()
	most := intstr.FromString(surge)
	nv := &v1alpha1.NodeVersion{
		ObjectMeta: metav1.ObjectMeta{Name: v1alpha1.NodeVersionName},
		Spec: v1alpha1.NodeVersionSpec{
			Image: sandboxapi.ImageReference(b.Name, b.Image), ImageVersion: b.Image, KubernetesComponentsReference: reference, KubernetesClusterVersion: b.Kubernetes,
			Rollout: v1alpha1.Rollout{MaxSurge: &most},
		},
	}
	if err := admin.Create(ctx, nv); err != nil {
		return "", fmt.Errorf("set the target: %w", err)
	}
	nv.Status.JoinComponents = v1alpha1.JoinComponents{ControlPlane: reference, Worker: reference}
	if err := admin.Status().Update(ctx, nv); err != nil {
		return "", fmt.Errorf("set the target: %w", err)
	}
	return reference, nil
}

// deployment has a pod for each worker. A worker has capacity for one.
func deployment(replicas int) *appsv1.Deployment {
	labels := map[string]string{"app": "hollow"}
	return &appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, Name: "hollow"},
		Spec: appsv1.DeploymentSpec{
			Replicas: new(int32(replicas)), Selector: &metav1.LabelSelector{MatchLabels: labels},
			Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: corev1.PodSpec{
				Containers: []corev1.Container{{Name: "hollow", Image: "hollow", Resources: corev1.ResourceRequirements{
					Requests: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("3")},
				}}},
			}},
		},
	}
}

// operatorAccess writes the operator's kubeconfig and returns its path.
func (b *box) operatorAccess() (string, error) {
	r, err := b.cp.ConfigFor("system:serviceaccount:"+operatorNamespace+":"+operatorAccount,
		"system:serviceaccounts", "system:serviceaccounts:"+operatorNamespace, "system:authenticated")
	if err != nil {
		return "", err
	}
	k := clientcmdapi.NewConfig()
	k.Clusters[operatorAccount] = &clientcmdapi.Cluster{Server: r.Host, CertificateAuthorityData: r.CAData}
	k.AuthInfos[operatorAccount] = &clientcmdapi.AuthInfo{ClientCertificateData: r.CertData, ClientKeyData: r.KeyData}
	k.Contexts[operatorAccount] = &clientcmdapi.Context{Cluster: operatorAccount, AuthInfo: operatorAccount}
	k.CurrentContext = operatorAccount
	path := filepath.Join(b.Dir, "control-plane", "operator.conf")
	if err := clientcmd.WriteToFile(*k, path); err != nil {
		return "", fmt.Errorf("write kubeconfig of the operator: %w", err)
	}
	return path, nil
}

// operate runs the operator as if on one of the control planes, and on another one when
// that is cordoned: in a real cluster the operator has its own pod evicted.
func (b *box) operate(ctx context.Context, admin client.Client, a *agent, kubeconfig, socket string) {
	for ctx.Err() == nil {
		node := ""
		if err := await(ctx, "a control plane is there for the operator", func() (_ bool, err error) {
			node, err = home(ctx, admin)
			return node != "", err
		}); err != nil {
			return
		}
		a.speakFor(node)
		child, err := controlplane.StartChild(b.Operator, []string{
			"--kubeconfig", kubeconfig, "--provider", providers.Local, "--metadata", b.cloud.Metadata, "--cloud", b.cloud.Control, "--metrics", "", "--health", "", "--agent", socket, "--node", node,
		}, filepath.Join(b.Dir, "operator.log"))
		if err != nil {
			b.log.Error("operator not started", "err", err)
			b.stop()
			return
		}
		b.log.Info("operator started", "node", node, "pid", child.PID())
		leave, stay := context.WithCancel(ctx)
		go func() {
			_ = await(leave, "the operator's node goes", func() (bool, error) { // or leave ends: it ends either way
				var n corev1.Node
				err := admin.Get(leave, client.ObjectKey{Name: node}, &n)
				return apierrors.IsNotFound(err) || err == nil && !takesPods(&n), err
			})
			child.End(operatorGrace)
		}()
		<-child.Ended()
		stay()
		b.log.Info("operator ended", "node", node)
		select {
		case <-ctx.Done():
		case <-time.After(operatorPause):
		}
	}
}

// home returns a control plane on which an operator would run; empty if there is none.
func home(ctx context.Context, admin client.Client) (string, error) {
	var l corev1.NodeList
	if err := admin.List(ctx, &l, client.HasLabels{"node-role.kubernetes.io/control-plane"}); err != nil {
		return "", fmt.Errorf("look for a control plane: %w", err)
	}
	// A newer one is less likely to be replaced.
	for i := len(l.Items) - 1; i >= 0; i-- {
		if takesPods(&l.Items[i]) {
			return l.Items[i].Name, nil
		}
	}
	return "", nil
}

// takesPods reports whether a node is Ready and not cordoned.
func takesPods(n *corev1.Node) bool {
	return !n.Spec.Unschedulable && slices.ContainsFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
	})
}
