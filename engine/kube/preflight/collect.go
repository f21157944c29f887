package preflight

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/url"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
	"k8s.io/component-helpers/resource"

	"constellation/engine/check"
)

const (
	// sourceLimit bounds the wait for a page of a source.
	sourceLimit = 30 * time.Second
	// sourcePages is how many times sourceLimit all pages of a source may take.
	sourcePages = 10
	// pageSize is the number of objects per page. It bounds the memory of a request in the API
	// server and here.
	pageSize = 500
	// kindPageSize is smaller because a CustomResourceDefinition can be a megabyte.
	kindPageSize = 50
)

// protobuf returns config with protobuf encoding, which is several times faster for builtin
// kinds.
func protobuf(config *rest.Config) *rest.Config {
	config = rest.CopyConfig(config)
	config.AcceptContentTypes = runtime.ContentTypeProtobuf + "," + runtime.ContentTypeJSON
	config.ContentType = runtime.ContentTypeProtobuf
	return config
}

// reader reads sources into a world. Each source writes fields that no other touches.
type reader struct {
	config *rest.Config
	core   kubernetes.Interface
	meta   metadata.Interface
	w      *world
}

// collect reads all sources of the cluster concurrently. Sources that could not be read are
// in world.unread; the error is that of ctx.
func collect(ctx context.Context, config *rest.Config, core kubernetes.Interface, request check.PreflightRequest) (*world, error) {
	return collectWithin(ctx, sourceLimit, config, core, request)
}

// collectWithin is collect with a limit for each page of a source.
func collectWithin(ctx context.Context, limit time.Duration, config *rest.Config, core kubernetes.Interface, request check.PreflightRequest) (*world, error) {
	meta, err := metadata.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("make Kubernetes client: %w", err)
	}
	w := &world{now: time.Now(), request: request, unread: map[source]string{}, kubelets: &kubelets{}}
	r := &reader{config: config, core: core, meta: meta, w: w}
	var mu sync.Mutex // of unread
	var reading sync.WaitGroup
	for id, read := range r.sources() {
		reading.Go(func() {
			ctx, cancel := whilePagesArrive(ctx, limit)
			defer cancel()
			if err := read(ctx); err != nil {
				mu.Lock()
				defer mu.Unlock()
				w.unread[id] = reason(ctx, err)
			}
		})
	}
	reading.Wait()
	w.noMetrics()
	for i := range w.servers {
		if !w.servers[i].date.IsZero() {
			w.now = w.servers[i].date // all other times are the cluster's too; this computer's clock may be wrong
		}
	}
	return w, ctx.Err()
}

// patienceKey is the key of a context's function that starts the wait for a page again.
type patienceKey struct{}

// whilePagesArrive returns a context that ends limit after the last page, or after sourcePages
// limits: a large cluster may take long, and one that does not answer must not.
func whilePagesArrive(ctx context.Context, limit time.Duration) (context.Context, func()) {
	ctx, cancelAll := context.WithTimeout(ctx, sourcePages*limit)
	ctx, cancel := context.WithCancelCause(ctx)
	timer := time.AfterFunc(limit, func() { cancel(context.DeadlineExceeded) })
	arrived := func() { timer.Reset(limit) }
	return context.WithValue(ctx, patienceKey{}, arrived), func() {
		timer.Stop()
		cancel(nil)
		cancelAll()
	}
}

// pageArrived starts the wait for the next page.
func pageArrived(ctx context.Context) {
	if arrived, ok := ctx.Value(patienceKey{}).(func()); ok {
		arrived()
	}
}

// errAnswer means that the API server's response is malformed.
var errAnswer = errors.New("the response cannot be decoded")

// reason describes why something could not be read.
func reason(ctx context.Context, err error) string {
	var status apierrors.APIStatus
	switch {
	case errors.Is(context.Cause(ctx), context.DeadlineExceeded) || errors.Is(err, context.DeadlineExceeded):
		return "the API server did not answer in time"
	case apierrors.IsForbidden(err), apierrors.IsUnauthorized(err):
		return "forbidden: the kubeconfig's user may not read it"
	case apierrors.IsTooManyRequests(err):
		return "the API server is overloaded"
	case apierrors.IsNotFound(err):
		return "the API server does not serve it"
	case errors.As(err, &status), errors.Is(err, errAnswer):
		return printable(err.Error())
	}
	return "the API server does not answer: " + printable(plain(err).Error())
}

// plain removes method and URL from an error of the HTTP client.
func plain(err error) error {
	var u *url.Error
	if errors.As(err, &u) {
		return u.Err
	}
	return err
}

func (r *reader) sources() map[source]func(context.Context) error {
	c, w := r.core, r.w
	w.services = map[types.NamespacedName]corev1.Service{}
	w.volumes = map[string]corev1.PersistentVolume{}
	w.claims = map[types.NamespacedName]corev1.PersistentVolumeClaim{}
	return map[source]func(context.Context) error{
		sourceNodes:        r.nodes,
		sourceLeases:       r.leases,
		sourcePods:         r.pods,
		sourcePDBs:         into(c.PolicyV1().PodDisruptionBudgets("").List, &w.pdbs),
		sourceNamespaces:   r.namespaces,
		sourceQuotas:       r.quotas,
		sourceDeployments:  into(c.AppsV1().Deployments("").List, &w.deployments),
		sourceStatefulSets: into(c.AppsV1().StatefulSets("").List, &w.statefulSets),
		sourceDaemonSets:   into(c.AppsV1().DaemonSets("").List, &w.daemonSets),
		sourceReplicaSets:  r.replicaSets,
		sourceServices:     byKey(c.CoreV1().Services("").List, w.services, nameOf),
		sourceSlices:       into(c.DiscoveryV1().EndpointSlices("").List, &w.slices),
		sourceValidating:   into(c.AdmissionregistrationV1().ValidatingWebhookConfigurations().List, &w.validating),
		sourceMutating:     into(c.AdmissionregistrationV1().MutatingWebhookConfigurations().List, &w.mutating),
		sourceVolumes:      byKey(c.CoreV1().PersistentVolumes().List, w.volumes, (*corev1.PersistentVolume).GetName),
		sourceClaims:       byKey(c.CoreV1().PersistentVolumeClaims("").List, w.claims, nameOf),
		sourceAttachments:  into(c.StorageV1().VolumeAttachments().List, &w.attachments),
		sourceCSINodes:     into(c.StorageV1().CSINodes().List, &w.csiNodes),
		sourceJobs:         r.jobs,
		sourceAutoscalers:  into(c.AutoscalingV2().HorizontalPodAutoscalers("").List, &w.autoscalers),
		sourceActors:       r.actors,
		sourceKinds:        r.kinds,
		sourceAPIServices:  r.apiServices,
		sourceServers:      r.servers,
		sourceWriters:      r.writers,
		sourceConfigs:      r.configs,
		sourceLeaders:      r.leaders,
		sourceSignings:     r.signings,
		sourceCharts:       r.charts,
		sourceActions:      r.actions,
	}
}

// list is a typed list of the API.
type list interface {
	GetContinue() string
}

// pages calls f with every page that get lists. All pages have the same resource version.
func pages[L list](ctx context.Context, get func(context.Context, metav1.ListOptions) (L, error), f func(L)) error {
	o := metav1.ListOptions{Limit: pageSize}
	for {
		l, err := get(ctx, o)
		if err != nil {
			return err
		}
		pageArrived(ctx)
		f(l)
		if o.Continue = l.GetContinue(); o.Continue == "" {
			return nil
		}
	}
}

// slim removes metadata that no check uses, which is most of a small object.
func slim(o metav1.Object) {
	delete(o.GetAnnotations(), corev1.LastAppliedConfigAnnotation)
	// Checks need the writer, and for cordoned nodes also the written fields.
	fields := o.GetManagedFields()
	for i := range fields {
		fields[i].FieldsV1 = nil
	}
}

// pointer is a pointer to an object of the API.
type pointer[T any] interface {
	*T
	metav1.Object
}

// typedList is a list whose elements meta.EachListItem finds.
type typedList interface {
	list
	runtime.Object
}

// each calls f with every object that get lists, slimmed. T must be the element of L.
func each[T any, O pointer[T], L typedList](ctx context.Context, get func(context.Context, metav1.ListOptions) (L, error), f func(O)) error {
	var wrong error
	err := pages(ctx, get, func(l L) {
		wrong = cmp.Or(wrong, meta.EachListItem(l, func(item runtime.Object) error {
			o, ok := item.(O)
			if !ok {
				return fmt.Errorf("list objects: got %T, want %T", item, o)
			}
			slim(o)
			f(o)
			return nil
		}))
	})
	return cmp.Or(err, wrong)
}

// into returns a source that appends every object which get lists to all.
func into[T any, O pointer[T], L typedList](get func(context.Context, metav1.ListOptions) (L, error), all *[]T) func(context.Context) error {
	return func(ctx context.Context) error {
		return each(ctx, get, func(o O) { *all = append(*all, *o) })
	}
}

// byKey returns a source that puts every object which get lists into all.
func byKey[K comparable, T any, O pointer[T], L typedList](get func(context.Context, metav1.ListOptions) (L, error), all map[K]T, key func(O) K) func(context.Context) error {
	return func(ctx context.Context) error {
		return each(ctx, get, func(o O) { all[key(o)] = *o })
	}
}

func nameOf[O metav1.Object](o O) types.NamespacedName {
	return types.NamespacedName{Namespace: o.GetNamespace(), Name: o.GetName()}
}

func (r *reader) nodes(ctx context.Context) error {
	err := pages(ctx, r.core.CoreV1().Nodes().List, func(l *corev1.NodeList) {
		for _, n := range l.Items {
			fields := slices.Clone(n.ManagedFields)
			slim(&n.ObjectMeta)
			if n.Spec.Unschedulable {
				n.ManagedFields = fields
			}
			n.Status.Images, n.Status.VolumesInUse, n.Status.VolumesAttached = nil, nil, nil
			r.w.nodes = append(r.w.nodes, n)
		}
	})
	slices.SortFunc(r.w.nodes, func(a, b corev1.Node) int { return cmp.Compare(a.Name, b.Name) })
	return err
}

func (r *reader) leases(ctx context.Context) error {
	r.w.leases = map[string]time.Time{}
	return pages(ctx, r.core.CoordinationV1().Leases(corev1.NamespaceNodeLease).List, func(l *coordinationv1.LeaseList) {
		for i := range l.Items {
			if t := l.Items[i].Spec.RenewTime; t != nil {
				r.w.leases[l.Items[i].Name] = t.Time
			}
		}
	})
}

func (r *reader) pods(ctx context.Context) error {
	firsts := map[types.UID]int{}
	err := pages(ctx, r.core.CoreV1().Pods("").List, func(l *corev1.PodList) {
		if n := l.RemainingItemCount; n != nil && len(r.w.pods) == 0 {
			// A slice that grows is copied, and has capacity that nothing uses.
			r.w.pods = make([]pod, 0, min(len(l.Items)+int(max(*n, 0)), maxExpected))
		}
		for i := range l.Items {
			r.w.addPod(slimPod(&l.Items[i]), firsts)
		}
	})
	slices.SortFunc(r.w.pods, func(a, b pod) int {
		return cmp.Or(cmp.Compare(a.namespace, b.namespace), cmp.Compare(a.name, b.name))
	})
	return err
}

// maxExpected bounds the pods for which memory is reserved when the API server announces more.
const maxExpected = 200_000

// addPod adds p. It shares the values that are equal with those of the first pod of its controller:
// most of the memory of pods is equal. firsts has the index of that pod.
func (w *world) addPod(p pod, firsts map[types.UID]int) {
	if uid := p.controller.uid; uid != "" {
		if i, ok := firsts[uid]; ok {
			p.share(&w.pods[i])
		} else {
			firsts[uid] = len(w.pods)
		}
	}
	w.pods = append(w.pods, p)
}

// share replaces values by those of another pod that are equal.
func (p *pod) share(first *pod) {
	if p.controller == first.controller {
		p.controller = first.controller
	}
	if maps.Equal(p.labels, first.labels) {
		p.labels = first.labels
	}
	if maps.Equal(p.nodeSelector, first.nodeSelector) {
		p.nodeSelector = first.nodeSelector
	}
	if slices.Equal(p.images, first.images) {
		p.images = first.images
	}
	if reflect.DeepEqual(p.tolerations, first.tolerations) {
		p.tolerations = first.tolerations
	}
	if reflect.DeepEqual(p.affinity, first.affinity) {
		p.affinity = first.affinity
	}
	if reflect.DeepEqual(p.spread, first.spread) {
		p.spread = first.spread
	}
}

func (r *reader) quotas(ctx context.Context) error {
	for _, namespace := range systemNamespaces {
		if err := into(r.core.CoreV1().ResourceQuotas(namespace).List, &r.w.quotas)(ctx); err != nil {
			return err
		}
	}
	return nil
}

func (r *reader) jobs(ctx context.Context) error {
	return each(ctx, r.core.BatchV1().Jobs("").List, func(o *batchv1.Job) {
		o.Spec.Template = corev1.PodTemplateSpec{}
		r.w.jobs = append(r.w.jobs, *o)
	})
}

func (r *reader) namespaces(ctx context.Context) error {
	r.w.namespaces = map[string]metav1.ObjectMeta{}
	err := pages(ctx, r.core.CoreV1().Namespaces().List, func(l *corev1.NamespaceList) {
		for _, o := range l.Items {
			slim(&o.ObjectMeta)
			r.w.namespaces[o.Name] = o.ObjectMeta
			if o.Status.Phase != corev1.NamespaceTerminating {
				continue
			}
			why := "it waits for its contents to be deleted"
			for _, x := range o.Status.Conditions {
				if x.Status == corev1.ConditionTrue {
					why = x.Message
				}
			}
			r.w.terminating = append(r.w.terminating, o.Name+": "+why)
		}
	})
	slices.Sort(r.w.terminating)
	return err
}

func (r *reader) replicaSets(ctx context.Context) error {
	r.w.replicaSets = map[types.UID]owner{}
	get := r.meta.Resource(schema.GroupVersionResource{Group: "apps", Version: "v1", Resource: "replicasets"}).List
	return pages(ctx, get, func(l *metav1.PartialObjectMetadataList) {
		for i := range l.Items {
			if o := &l.Items[i]; metav1.GetControllerOf(o) != nil {
				r.w.replicaSets[o.UID] = ownerOf(o)
			}
		}
	})
}

// actors reads the actorKinds that the cluster serves.
func (r *reader) actors(ctx context.Context) error {
	r.w.actors = map[schema.GroupResource][]actor{}
	var groups metav1.APIGroupList
	b, err := r.core.Discovery().RESTClient().Get().AbsPath("/apis").SetHeader("Accept", runtime.ContentTypeJSON).DoRaw(ctx)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(b, &groups); err != nil {
		return fmt.Errorf("decode answer: %w", err)
	}
	preferred := map[string]string{}
	for _, g := range groups.Groups {
		preferred[g.Name] = g.PreferredVersion.Version
		for _, v := range g.Versions {
			r.w.served = append(r.w.served, schema.GroupVersion{Group: g.Name, Version: v.Version})
		}
	}
	for _, k := range actorKinds {
		if preferred[k.Group] == "" {
			continue
		}
		err := slimPages(ctx, r, "/apis/"+k.Group+"/"+preferred[k.Group]+"/"+k.Resource, pageSize, func(a *actor) {
			slim(&a.ObjectMeta)
			r.w.actors[k] = append(r.w.actors[k], *a)
		})
		// A group can be served without this kind.
		if err != nil && !apierrors.IsNotFound(err) {
			return err
		}
	}
	return nil
}

// slimList is a list that decodes only some fields.
type slimList[T any] struct {
	metav1.ListMeta `json:"metadata"`
	Items           []T `json:"items"`
}

// slimPages lists objects for which no typed client is linked.
func slimPages[T any](ctx context.Context, r *reader, path string, limit int, f func(*T)) error {
	next := ""
	for {
		b, err := r.core.Discovery().RESTClient().Get().AbsPath(path).
			Param("limit", strconv.Itoa(limit)).Param("continue", next).
			SetHeader("Accept", runtime.ContentTypeJSON).DoRaw(ctx)
		if err != nil {
			return err
		}
		pageArrived(ctx)
		var l slimList[T]
		if err := json.Unmarshal(b, &l); err != nil {
			return fmt.Errorf("%w: %w", errAnswer, err)
		}
		for i := range l.Items {
			f(&l.Items[i])
		}
		if next = l.Continue; next == "" {
			return nil
		}
	}
}

func (r *reader) kinds(ctx context.Context) error {
	err := slimPages(ctx, r, "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", kindPageSize, func(k *kind) {
		slim(&k.ObjectMeta)
		r.w.kinds = append(r.w.kinds, *k)
	})
	slices.SortFunc(r.w.kinds, func(a, b kind) int { return cmp.Compare(a.Name, b.Name) })
	return err
}

func (r *reader) apiServices(ctx context.Context) error {
	err := slimPages(ctx, r, "/apis/apiregistration.k8s.io/v1/apiservices", pageSize, func(s *apiService) {
		slim(&s.ObjectMeta)
		r.w.apiServices = append(r.w.apiServices, *s)
	})
	slices.SortFunc(r.w.apiServices, func(a, b apiService) int { return cmp.Compare(a.Name, b.Name) })
	return err
}

func ownerOf(o metav1.Object) owner {
	c := metav1.GetControllerOfNoCopy(o)
	if c == nil {
		return owner{}
	}
	return owner{c.APIVersion, c.Kind, c.Name, c.UID}
}

// doNotEvict are annotations, with their value, that exclude a pod from eviction by
// autoscalers.
var doNotEvict = []struct{ key, value string }{
	{"cluster-autoscaler.kubernetes.io/safe-to-evict", "false"},
	{"karpenter.sh/do-not-disrupt", "true"},
	{"karpenter.sh/do-not-evict", "true"},
}

// slimPod copies the fields that checks use.
func slimPod(p *corev1.Pod) pod {
	out := pod{
		namespace: p.Namespace, name: p.Name, node: p.Spec.NodeName, uid: p.UID, labels: p.Labels,
		phase: p.Status.Phase, finalizers: p.Finalizers, created: p.CreationTimestamp.Time,
		controller: ownerOf(p), mirror: p.Annotations[corev1.MirrorPodAnnotationKey] != "",
		nodeSelector: p.Spec.NodeSelector, affinity: p.Spec.Affinity, tolerations: p.Spec.Tolerations, spread: p.Spec.TopologySpreadConstraints,
		grace:   corev1.DefaultTerminationGracePeriodSeconds * time.Second,
		request: requestOf(p), seLinux: seLinuxLabel(p),
	}
	if out.controller.kind == "" {
		out.keeper = keeperOf(&p.ObjectMeta)
	}
	if p.DeletionTimestamp != nil {
		out.terminating = p.DeletionTimestamp.Time
	}
	if p.Spec.Priority != nil {
		out.priority = *p.Spec.Priority
	}
	if s := p.Spec.TerminationGracePeriodSeconds; s != nil {
		out.grace = time.Duration(*s) * time.Second
	}
	for _, a := range doNotEvict {
		if p.Annotations[a.key] == a.value {
			out.notEvict = a.key + "=" + a.value
			break
		}
	}
	for _, x := range p.Status.Conditions {
		switch {
		case x.Type == corev1.PodReady:
			out.ready = x.Status == corev1.ConditionTrue
		case x.Type == corev1.PodScheduled && x.Status == corev1.ConditionFalse:
			out.pending = strings.Trim(x.Reason+": "+x.Message, ": ")
		}
	}
	out.addVolumes(p)
	for i := range p.Spec.Containers {
		c := &p.Spec.Containers[i]
		out.images = append(out.images, c.Image)
		out.preStop = out.preStop || c.Lifecycle != nil && c.Lifecycle.PreStop != nil
		for _, port := range c.Ports {
			if port.HostPort != 0 {
				out.hostPorts = append(out.hostPorts, port.HostPort)
			}
		}
	}
	if p.Namespace == metav1.NamespaceSystem && p.Labels["tier"] == "control-plane" {
		out.component = p.Labels["component"]
		for _, v := range p.Spec.Volumes {
			if v.HostPath != nil {
				out.hostPaths = append(out.hostPaths, v.HostPath.Path)
			}
		}
		if len(p.Spec.Containers) > 0 {
			c := &p.Spec.Containers[0]
			out.args = slices.Concat(c.Command, c.Args)
		}
	}
	return out
}

// addVolumes copies the volumes that checks look for.
func (out *pod) addVolumes(p *corev1.Pod) {
	mounted := writable(p)
	for _, v := range p.Spec.Volumes {
		switch {
		case v.EmptyDir != nil:
			out.emptyDir = append(out.emptyDir, describeEmptyDir(&v))
		case v.HostPath != nil && mounted[v.Name]:
			out.hostPath = append(out.hostPath, fmt.Sprintf("%s (%s)", v.Name, v.HostPath.Path))
		case v.PersistentVolumeClaim != nil:
			out.claims = append(out.claims, v.PersistentVolumeClaim.ClaimName)
		case v.GitRepo != nil:
			out.gitRepo = append(out.gitRepo, v.Name)
		case v.Ephemeral != nil:
			out.claims = append(out.claims, p.Name+"-"+v.Name)
		}
	}
}

// describeEmptyDir is "cache", "cache (Memory)", "cache (1Gi)" or "cache (Memory, 1Gi)".
func describeEmptyDir(v *corev1.Volume) string {
	var notes []string
	if v.EmptyDir.Medium != "" {
		notes = append(notes, string(v.EmptyDir.Medium))
	}
	if v.EmptyDir.SizeLimit != nil {
		notes = append(notes, v.EmptyDir.SizeLimit.String())
	}
	if len(notes) == 0 {
		return v.Name
	}
	return fmt.Sprintf("%s (%s)", v.Name, strings.Join(notes, ", "))
}

// writable returns the names of the volumes that a container mounts writable.
func writable(p *corev1.Pod) map[string]bool {
	out := map[string]bool{}
	for _, containers := range [][]corev1.Container{p.Spec.InitContainers, p.Spec.Containers} {
		for i := range containers {
			for _, m := range containers[i].VolumeMounts {
				out[m.Name] = out[m.Name] || !m.ReadOnly
			}
		}
	}
	return out
}

// requestOf is the resource request as the scheduler computes it.
func requestOf(p *corev1.Pod) resources {
	var out resources
	for name, q := range resource.PodRequests(p, resource.PodResourcesOptions{}) {
		switch name {
		case corev1.ResourceCPU:
			out.cpu = q.MilliValue()
		case corev1.ResourceMemory:
			out.memory = q.Value()
		case corev1.ResourceEphemeralStorage:
			out.ephemeral = q.Value()
		default:
			if out.other == nil {
				out.other = map[corev1.ResourceName]int64{}
			}
			out.other[name] = q.Value()
		}
	}
	return out
}
