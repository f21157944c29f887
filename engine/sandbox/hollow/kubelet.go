package hollow

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"sync"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/types"
	coordinationclient "k8s.io/client-go/kubernetes/typed/coordination/v1"
	coreclient "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"

	"constellation/engine/cloud"
	"constellation/operator/api/v1alpha1"
)

// User agents. With them an audit log separates the requests of machines from
// others.
const (
	KubeletAgent     = "hollow-kubelet"
	JoinServiceAgent = "hollow-joinservice"
)

const (
	systemNamespace = "kube-system"
	leaseNamespace  = "kube-node-lease"
	leaseSeconds    = 40

	// joinTime is how long a joining machine is expected, as in the join service.
	joinTime = 30 * time.Minute
)

// kubelet acts as the kubelets of all hollow machines, and as the join service for
// them.
type kubelet struct {
	cloud *Cloud
	core  coreclient.CoreV1Interface
	coord coordinationclient.LeasesGetter
	joins *rest.RESTClient // our own kinds

	pods     cache.Store // those that are bound to a node
	nodes    cache.Store // with the fields of trimNode
	target   cache.Store // the NodeVersion
	watches  []cache.Controller
	versions sync.Map // name of a components ConfigMap to the version of Kubernetes
	ending   sync.Map // UID of a pod to when its deletion was seen
	ended    sync.Map // UIDs of pods that were ended and may still be in the store
	leases   sync.Map // name of a machine to its Lease as it was written last
}

func newKubelet(cluster *rest.Config, c *Cloud) (*kubelet, error) {
	k := &kubelet{cloud: c}
	access := rest.CopyConfig(cluster)
	access.QPS, access.UserAgent = -1, KubeletAgent // as many rate limits as kubelets
	access.ContentType = "application/vnd.kubernetes.protobuf"
	access.AcceptContentTypes = "application/vnd.kubernetes.protobuf,application/json"
	core, err := coreclient.NewForConfig(access)
	if err != nil {
		return nil, err
	}
	k.core = core
	if k.coord, err = coordinationclient.NewForConfig(access); err != nil {
		return nil, err
	}
	scheme := runtime.NewScheme()
	if err := v1alpha1.AddToScheme(scheme); err != nil {
		return nil, err
	}
	joins := rest.CopyConfig(cluster)
	joins.QPS, joins.UserAgent = -1, JoinServiceAgent
	joins.GroupVersion, joins.APIPath = &v1alpha1.GroupVersion, "/apis"
	joins.NegotiatedSerializer = serializer.NewCodecFactory(scheme).WithoutConversion()
	if k.joins, err = rest.RESTClientFor(joins); err != nil {
		return nil, err
	}
	changed := func(obj any) {
		if p, ok := obj.(*corev1.Pod); ok {
			c.queue.Add(task{taskPod, p.Namespace + "/" + p.Name, 0})
		}
	}
	k.pods = k.informer(core.RESTClient(), "pods", fields.OneTermNotEqualSelector("spec.nodeName", ""), &corev1.Pod{}, cache.ResourceEventHandlerFuncs{
		AddFunc:    changed,
		UpdateFunc: func(_, obj any) { changed(obj) },
		DeleteFunc: func(obj any) {
			if p, ok := obj.(*corev1.Pod); ok {
				k.ending.Delete(p.UID)
				k.ended.Delete(p.UID)
			}
		},
	}, trimPod)
	k.nodes = k.informer(core.RESTClient(), "nodes", fields.Everything(), &corev1.Node{}, cache.ResourceEventHandlerFuncs{}, trimNode)
	k.target = k.informer(k.joins, "nodeversions", fields.OneTermEqualSelector("metadata.name", v1alpha1.NodeVersionName), &v1alpha1.NodeVersion{}, cache.ResourceEventHandlerFuncs{}, nil)
	return k, nil
}

func (k *kubelet) informer(c cache.Getter, resource string, which fields.Selector, kind runtime.Object, h cache.ResourceEventHandler, trim cache.TransformFunc) cache.Store {
	store, controller := cache.NewInformerWithOptions(cache.InformerOptions{
		ListerWatcher: cache.NewListWatchFromClient(c, resource, metav1.NamespaceAll, which),
		ObjectType:    kind, Handler: h, Transform: trim,
	})
	k.watches = append(k.watches, controller)
	return store
}

// trimPod keeps only the fields of a pod that a hollow kubelet reads.
func trimPod(obj any) (any, error) {
	p, ok := obj.(*corev1.Pod)
	if !ok { // a tombstone
		return obj, nil
	}
	out := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: p.Namespace, Name: p.Name, UID: p.UID, ResourceVersion: p.ResourceVersion,
			DeletionTimestamp: p.DeletionTimestamp, DeletionGracePeriodSeconds: p.DeletionGracePeriodSeconds,
		},
		Spec:   corev1.PodSpec{NodeName: p.Spec.NodeName},
		Status: corev1.PodStatus{Phase: p.Status.Phase},
	}
	for _, c := range p.Spec.Containers {
		out.Spec.Containers = append(out.Spec.Containers, corev1.Container{Name: c.Name, Image: c.Image})
	}
	return out, nil
}

// trimNode keeps only the fields of a Node that a hollow kubelet reads.
func trimNode(obj any) (any, error) {
	n, ok := obj.(*corev1.Node)
	if !ok { // a tombstone
		return obj, nil
	}
	out := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: n.Name, UID: n.UID, ResourceVersion: n.ResourceVersion}}
	for _, t := range n.Spec.Taints {
		if t.Key == corev1.TaintNodeNotReady || t.Key == corev1.TaintNodeUnreachable {
			out.Spec.Taints = append(out.Spec.Taints, corev1.Taint{Key: t.Key})
		}
	}
	for _, c := range n.Status.Conditions {
		if c.Type == corev1.NodeReady {
			out.Status.Conditions = append(out.Status.Conditions, corev1.NodeCondition{Type: c.Type, Status: c.Status})
		}
	}
	return out, nil
}

// notReady reports whether the Node of a machine is not Ready in the API, or still has the taint of a Node that is not.
func (k *kubelet) notReady(m machine) bool {
	obj, ok, err := k.nodes.GetByKey(m.Name)
	if err != nil || !ok {
		return false
	}
	n, ok := obj.(*corev1.Node)
	return ok && n.UID == m.uid && (len(n.Spec.Taints) > 0 || len(n.Status.Conditions) != 1 || n.Status.Conditions[0].Status != corev1.ConditionTrue)
}

// watch keeps the stores up to date until ctx ends.
func (k *kubelet) watch(ctx context.Context) {
	var wg sync.WaitGroup
	for _, w := range k.watches {
		wg.Go(func() { w.RunWithContext(ctx) })
	}
	wg.Wait()
}

// joinComponents returns the name of the components for machines of a role; empty while
// none may join.
func (k *kubelet) joinComponents(role cloud.Role) string {
	obj, ok, err := k.target.GetByKey(v1alpha1.NodeVersionName)
	if err != nil || !ok {
		return ""
	}
	j := obj.(*v1alpha1.NodeVersion).Status.JoinComponents
	if role == cloud.ControlPlane {
		return j.ControlPlane
	}
	return j.Worker
}

// expect records that a machine is about to join, as the join service does.
func (k *kubelet) expect(ctx context.Context, m machine, components string) error {
	d := metav1.NewTime(time.Now().Add(joinTime).UTC().Truncate(time.Second))
	jn := &v1alpha1.JoiningNode{
		TypeMeta:   metav1.TypeMeta{APIVersion: v1alpha1.GroupVersion.String(), Kind: "JoiningNode"},
		ObjectMeta: metav1.ObjectMeta{Name: m.Name},
		Spec: v1alpha1.JoiningNodeSpec{
			Name: m.Name, ComponentsReference: components, IsControlPlane: m.Role == cloud.ControlPlane, ProviderID: m.Key(), Deadline: &d,
		},
	}
	if k.cloud.identify != nil || m.Incarnation != "" { // the join service gives no ticket while there is a Node of the name
		if _, err := k.core.Nodes().Get(ctx, m.Name, metav1.GetOptions{}); !apierrors.IsNotFound(err) {
			return cmp.Or(err, fmt.Errorf("join %s: there is a Node of this name", m.Name))
		}
		if err := k.joins.Delete().Resource("joiningnodes").Name(m.Name).Do(ctx).Error(); err != nil && !apierrors.IsNotFound(err) {
			return fmt.Errorf("replace JoiningNode %s: %w", m.Name, err)
		}
	}
	err := k.joins.Post().Resource("joiningnodes").Body(jn).Do(ctx).Error()
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("write JoiningNode %s: %w", m.Name, err)
	}
	return nil
}

// version returns the version of Kubernetes that components install.
func (k *kubelet) version(ctx context.Context, components string) (string, error) {
	if v, ok := k.versions.Load(components); ok {
		return v.(string), nil
	}
	cm, err := k.core.ConfigMaps(systemNamespace).Get(ctx, components, metav1.GetOptions{})
	if err != nil {
		return "", fmt.Errorf("read components: %w", err)
	}
	v := cm.Data["cluster-version"]
	if v == "" {
		return "", fmt.Errorf("read components: %s names no version", components)
	}
	k.versions.Store(components, v)
	return v, nil
}

// register creates the Node of a machine, and its Lease. A kubelet registers before it
// is Ready. A seeded machine carries the operator's annotations.
func (k *kubelet) register(ctx context.Context, m machine, seeded bool) (types.UID, error) {
	version, err := k.version(ctx, m.components)
	if err != nil {
		return "", fmt.Errorf("register Node %s: %w", m.Name, err)
	}
	now := metav1.Now()
	amounts := corev1.ResourceList{
		corev1.ResourceCPU: resource.MustParse("4"), corev1.ResourceMemory: resource.MustParse("8Gi"), corev1.ResourcePods: resource.MustParse("110"),
	}
	n := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: m.Name, Labels: map[string]string{
			corev1.LabelHostname: m.Name, corev1.LabelOSStable: "linux", corev1.LabelArchStable: "amd64",
			// A controller would add these, in a separate write.
			"beta.kubernetes.io/os": "linux", "beta.kubernetes.io/arch": "amd64",
		}},
		Spec: corev1.NodeSpec{ProviderID: m.ProviderID, PodCIDR: m.PodCIDR.String(), PodCIDRs: []string{m.PodCIDR.String()}},
		Status: corev1.NodeStatus{
			Capacity: amounts, Allocatable: amounts,
			Addresses: []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: m.IP.String()}, {Type: corev1.NodeHostName, Address: m.Name}},
			NodeInfo: corev1.NodeSystemInfo{
				KubeletVersion: version, OperatingSystem: "linux", Architecture: "amd64", OSImage: "hollow", ContainerRuntimeVersion: "hollow://0",
			},
			Conditions: conditions(now, seeded),
		},
	}
	if m.Role == cloud.ControlPlane {
		n.Labels["node-role.kubernetes.io/control-plane"] = ""
		n.Spec.Taints = []corev1.Taint{{Key: "node-role.kubernetes.io/control-plane", Effect: corev1.TaintEffectNoSchedule}}
	}
	if seeded {
		is := k.cloud.describe(m.Instance)
		n.Annotations = map[string]string{v1alpha1.AnnotationComponents: m.components, v1alpha1.AnnotationGroup: is.Group}
		if is.Image != "" {
			n.Annotations[v1alpha1.AnnotationImage] = is.Image
		}
		if m.Incarnation != "" {
			n.Annotations[v1alpha1.AnnotationIncarnation] = m.Incarnation
		}
	}
	made, err := k.core.Nodes().Create(ctx, n, metav1.CreateOptions{})
	if apierrors.IsAlreadyExists(err) { // created by an earlier attempt
		made, err = k.core.Nodes().Get(ctx, m.Name, metav1.GetOptions{})
	}
	if err != nil {
		return "", fmt.Errorf("register Node %s: %w", m.Name, err)
	}
	lease := &coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{Name: m.Name, Namespace: leaseNamespace, OwnerReferences: []metav1.OwnerReference{
			{APIVersion: "v1", Kind: "Node", Name: m.Name, UID: made.UID},
		}},
		Spec: coordinationv1.LeaseSpec{HolderIdentity: &m.Name, LeaseDurationSeconds: new(int32(leaseSeconds)), RenewTime: &metav1.MicroTime{Time: now.Time}},
	}
	if l, err := k.coord.Leases(leaseNamespace).Create(ctx, lease, metav1.CreateOptions{}); err == nil {
		k.leases.Store(m.Name, l)
	} else if !apierrors.IsAlreadyExists(err) {
		return "", fmt.Errorf("create Lease %s: %w", m.Name, err)
	}
	return made.UID, nil
}

// ready reports that a machine's Node, as it was registered, is Ready.
func (k *kubelet) ready(ctx context.Context, m machine) error {
	ready := map[string]any{"metadata": map[string]any{"uid": m.uid}, "status": map[string]any{"conditions": conditions(metav1.Now(), true)}}
	if err := patch(ready, func(b []byte) error {
		_, err := k.core.Nodes().PatchStatus(ctx, m.Name, b)
		return err
	}); err != nil {
		return fmt.Errorf("report Node %s ready: %w", m.Name, err)
	}
	return nil
}

// setVersion reports that the kubelet of a Node is of another version.
func (k *kubelet) setVersion(ctx context.Context, node, version string) error {
	if err := patch(map[string]any{"status": map[string]any{"nodeInfo": map[string]any{"kubeletVersion": version}}}, func(b []byte) error {
		_, err := k.core.Nodes().PatchStatus(ctx, node, b)
		return err
	}); err != nil {
		return fmt.Errorf("report version of Node %s: %w", node, err)
	}
	return nil
}

func conditions(now metav1.Time, ready bool) []corev1.NodeCondition {
	out := []corev1.NodeCondition{{
		Type: corev1.NodeReady, Status: corev1.ConditionFalse, Reason: "KubeletNotReady", Message: "hollow machine starts", LastHeartbeatTime: now, LastTransitionTime: now,
	}}
	if ready {
		out[0].Status, out[0].Reason, out[0].Message = corev1.ConditionTrue, "KubeletReady", "hollow machine runs nothing"
	}
	return out
}

func patch(body map[string]any, send func([]byte) error) error {
	b, err := json.Marshal(body)
	if err != nil {
		return err
	}
	return send(b)
}

// renew renews a machine's Lease; there is false if the Lease, and so the Node, is gone.
func (k *kubelet) renew(ctx context.Context, name string) (there bool, err error) {
	leases := k.coord.Leases(leaseNamespace)
	var l *coordinationv1.Lease
	if old, ok := k.leases.Load(name); ok {
		l = old.(*coordinationv1.Lease).DeepCopy()
	} else {
		l, err = leases.Get(ctx, name, metav1.GetOptions{})
	}
	if err == nil {
		l.Spec.RenewTime = &metav1.MicroTime{Time: time.Now()}
		l, err = leases.Update(ctx, l, metav1.UpdateOptions{})
	}
	switch {
	case err == nil:
		k.leases.Store(name, l)
		return true, nil
	case apierrors.IsNotFound(err):
		k.leases.Delete(name)
		return false, nil
	}
	k.leases.Delete(name) // another writer changed it: read it again
	return true, err
}

// pod acts on a pod like its machine's kubelet: starts it, or ends it after the
// configured time.
func (k *kubelet) pod(ctx context.Context, key string) (wait time.Duration, err error) {
	obj, ok, err := k.pods.GetByKey(key)
	if err != nil || !ok {
		return 0, err
	}
	p := obj.(*corev1.Pod)
	m := k.cloud.snapshot(p.Spec.NodeName)
	if m.State != cloud.Ready { // the machine is not running
		return 0, nil
	}
	if !m.registered { // the scheduler saw the Node before we recorded it
		return again / 4, nil
	}
	if p.DeletionTimestamp != nil {
		if _, done := k.ended.Load(p.UID); done {
			return 0, nil
		}
		if left := time.Until(k.ends(p)); left > 0 {
			return left, nil
		}
		err := k.core.Pods(p.Namespace).Delete(ctx, p.Name, metav1.DeleteOptions{
			GracePeriodSeconds: new(int64), Preconditions: &metav1.Preconditions{UID: &p.UID},
		})
		if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
			return 0, fmt.Errorf("end pod %s: %w", key, err)
		}
		k.ended.Store(p.UID, true)
		k.cloud.happened(p.Spec.NodeName, func(l *Life, now time.Time) { l.Emptied = now })
		return 0, nil
	}
	if p.Status.Phase != corev1.PodPending && p.Status.Phase != "" {
		return 0, nil
	}
	now := metav1.Now()
	status := corev1.PodStatus{
		Phase: corev1.PodRunning, StartTime: &now, HostIP: m.IP.String(), PodIP: podIP(m.PodCIDR, key).String(),
	}
	status.PodIPs = []corev1.PodIP{{IP: status.PodIP}}
	status.HostIPs = []corev1.HostIP{{IP: status.HostIP}}
	for _, t := range []corev1.PodConditionType{corev1.PodInitialized, corev1.ContainersReady, corev1.PodReady} {
		status.Conditions = append(status.Conditions, corev1.PodCondition{Type: t, Status: corev1.ConditionTrue, LastTransitionTime: now})
	}
	started := true
	for _, c := range p.Spec.Containers {
		status.ContainerStatuses = append(status.ContainerStatuses, corev1.ContainerStatus{
			Name: c.Name, Image: c.Image, Ready: true, Started: &started, State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{StartedAt: now}},
		})
	}
	err = patch(map[string]any{"metadata": map[string]any{"uid": p.UID}, "status": status}, func(b []byte) error {
		_, err := k.core.Pods(p.Namespace).Patch(ctx, p.Name, types.StrategicMergePatchType, b, metav1.PatchOptions{}, "status")
		return err
	})
	if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
		return 0, fmt.Errorf("start pod %s: %w", key, err)
	}
	return 0, nil
}

// ends is when a deleted pod ends. It counts from when its machine saw the
// deletion, because the API has times in whole seconds.
func (k *kubelet) ends(p *corev1.Pod) time.Time {
	k.cloud.mu.Lock()
	drain := k.cloud.times.Drain
	k.cloud.mu.Unlock()
	if s := p.DeletionGracePeriodSeconds; s != nil {
		drain = min(drain, time.Duration(*s)*time.Second)
	}
	since, known := k.ending.LoadOrStore(p.UID, time.Now())
	if !known {
		k.cloud.happened(p.Spec.NodeName, func(l *Life, now time.Time) {
			if l.Emptying.IsZero() {
				l.Emptying = now
			}
		})
	}
	return since.(time.Time).Add(drain)
}

// podIP is an address in the machine's range, derived from the pod's name.
func podIP(r netip.Prefix, key string) netip.Addr {
	a := r.Addr().As4()
	var h byte
	for _, c := range []byte(key) {
		h = h*31 + c
	}
	a[3] = h | 1
	return netip.AddrFrom4(a)
}
