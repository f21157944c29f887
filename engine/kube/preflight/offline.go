package preflight

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	autoscalingv2 "k8s.io/api/autoscaling/v2"
	batchv1 "k8s.io/api/batch/v1"
	certificatesv1 "k8s.io/api/certificates/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	policyv1 "k8s.io/api/policy/v1"
	storagev1 "k8s.io/api/storage/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	"constellation/engine/check"
	"constellation/engine/plan"
	"constellation/engine/version"
)

// Removal is a version of an API that a minor of Kubernetes no longer serves.
type Removal struct {
	Group, Version, Resource, Kind string
	// Minor is the first minor of v1 without it.
	Minor int
	// Remedy is what to do about a client that uses it.
	Remedy string
}

// Removals returns all known removals, in the order of the minors. who, the client that must
// change, is named in the remedies.
func Removals(who string) (out []Removal) {
	for _, a := range knownRemovals() {
		r := a.resource
		out = append(out, Removal{Group: r.Group, Version: r.Version, Resource: r.Resource, Kind: a.kind, Minor: a.minor, Remedy: a.remedy(who)})
	}
	return out
}

// Info describes one check.
type Info struct {
	// ID is stable, Title what should be true.
	ID, Title, Area, Reference string
}

// Checks returns all checks of a cluster.
func Checks() (out []Info) {
	for _, c := range checks() {
		out = append(out, Info{c.id, c.title, c.area, c.ref})
	}
	return out
}

// Reviews returns the requests of an upgrade that rules of a webhook match, such as "new pods"
// and "nodes". pods is whether new pods are among them.
func Reviews(rules []admissionv1.RuleWithOperations) (requests []string, pods bool) {
	for i := range targets {
		if t := &targets[i]; slices.ContainsFunc(rules, func(r admissionv1.RuleWithOperations) bool { return t.hits(&r) }) && !slices.Contains(requests, t.text) {
			requests = append(requests, t.text)
			pods = pods || i == 0
		}
	}
	return requests, pods
}

// Printable returns untrusted text in a form that is safe for a terminal, at most 300 runes of
// it.
func Printable(s string) string { return printable(s) }

// Object is "kind/namespace/name" of untrusted names, as findings have it.
func Object(kind, namespace, name string) string { return object(kind, namespace, name) }

// NextMinor is the first patch of the minor after a version.
func NextMinor(v version.Version) version.Version { return minorAfter(v) }

// Objects is a cluster at one time, without an API server: what a snapshot of etcd or a backup
// has. Its methods must not be called concurrently.
type Objects struct {
	w world
	// has are the sources that were complete.
	has map[source]bool
	// stored counts the objects of built-in types by the version in which etcd has them.
	stored map[schema.GroupVersionKind]int
	// example is one object of each.
	example map[schema.GroupVersionKind]string
}

// NewObjects returns a cluster without objects. at is the time of the snapshot.
func NewObjects(at time.Time) *Objects {
	return &Objects{
		w: world{
			now: at, unread: map[source]string{}, leases: map[string]time.Time{}, namespaces: map[string]metav1.ObjectMeta{}, replicaSets: map[types.UID]owner{},
			services: map[types.NamespacedName]corev1.Service{}, volumes: map[string]corev1.PersistentVolume{}, claims: map[types.NamespacedName]corev1.PersistentVolumeClaim{},
			actors: map[schema.GroupResource][]actor{}, configs: map[string]map[string]string{}, leaders: map[string]coordinationv1.LeaseSpec{},
			writers: map[schema.GroupVersionResource][]writer{},
		},
		has: map[source]bool{}, stored: map[schema.GroupVersionKind]int{}, example: map[schema.GroupVersionKind]string{},
	}
}

// snapshotSources are complete in a snapshot of etcd.
var snapshotSources = []source{
	sourceNodes, sourceLeases, sourcePods, sourcePDBs, sourceNamespaces, sourceQuotas, sourceDeployments, sourceStatefulSets, sourceDaemonSets, sourceReplicaSets,
	sourceServices, sourceSlices, sourceValidating, sourceMutating, sourceVolumes, sourceClaims, sourceAttachments, sourceCSINodes, sourceJobs, sourceAutoscalers,
	sourceActors, sourceKinds, sourceAPIServices, sourceConfigs, sourceLeaders, sourceSignings, sourceCharts, sourceWriters,
}

// HasSnapshot says that all objects of a snapshot were added.
func (o *Objects) HasSnapshot() {
	for _, s := range snapshotSources {
		o.has[s] = true
	}
}

// HasKinds says that all CustomResourceDefinitions and records of Helm were added.
func (o *Objects) HasKinds() {
	o.has[sourceKinds], o.has[sourceCharts] = true, true
}

// Add adds an object of a built-in type. stored is the version in which etcd has it; zero if
// it is not from etcd.
func (o *Objects) Add(obj runtime.Object, stored schema.GroupVersionKind) {
	w := &o.w
	m, err := meta.Accessor(obj)
	if err != nil {
		return
	}
	if !stored.Empty() {
		o.Stored(stored, m.GetNamespace(), m.GetName())
		o.note(stored, m)
	}
	switch x := obj.(type) {
	case *corev1.Node:
		fields := slices.Clone(x.ManagedFields)
		slim(x)
		if x.Spec.Unschedulable {
			x.ManagedFields = fields
		}
		x.Status.Images, x.Status.VolumesInUse, x.Status.VolumesAttached = nil, nil, nil
		w.nodes = append(w.nodes, *x)
		return
	case *corev1.Pod:
		slim(x)
		w.pods = append(w.pods, slimPod(x))
		return
	case *corev1.Secret:
		if x.Type == helmRecords && x.Labels["status"] == "deployed" {
			o.w.addRelease(x)
		}
		return
	}
	slim(m)
	if w.addSimple(obj) {
		return
	}
	switch x := obj.(type) {
	case *coordinationv1.Lease:
		if x.Namespace == corev1.NamespaceNodeLease && x.Spec.RenewTime != nil {
			w.leases[x.Name] = x.Spec.RenewTime.Time
		}
		if x.Namespace == metav1.NamespaceSystem {
			w.leaders[x.Name] = x.Spec
		}
	case *corev1.Namespace:
		w.namespaces[x.Name] = x.ObjectMeta
		if x.Status.Phase == corev1.NamespaceTerminating {
			w.terminating = append(w.terminating, x.Name+": it waits for its contents to be deleted")
		}
	case *corev1.ResourceQuota:
		if slices.Contains(systemNamespaces, x.Namespace) {
			w.quotas = append(w.quotas, *x)
		}
	case *admissionv1.ValidatingWebhookConfiguration:
		w.validating = append(w.validating, *x)
	case *admissionv1.MutatingWebhookConfiguration:
		w.mutating = append(w.mutating, *x)
	case *corev1.ConfigMap:
		if x.Namespace == metav1.NamespaceSystem && slices.Contains([]string{kubeadmConfig, kubeletConfig, proxyConfig}, x.Name) {
			w.configs[x.Name] = x.Data
		}
	case *certificatesv1.CertificateSigningRequest:
		if len(x.Status.Conditions) == 0 {
			x.Spec.Request = nil
			w.signings = append(w.signings, *x)
		}
	}
}

// addSimple adds an object of a kind of which checks use everything. It reports whether obj is one.
func (w *world) addSimple(obj runtime.Object) bool {
	switch x := obj.(type) {
	case *policyv1.PodDisruptionBudget:
		w.pdbs = append(w.pdbs, *x)
	case *appsv1.Deployment:
		w.deployments = append(w.deployments, *x)
	case *appsv1.StatefulSet:
		w.statefulSets = append(w.statefulSets, *x)
	case *appsv1.DaemonSet:
		w.daemonSets = append(w.daemonSets, *x)
	case *appsv1.ReplicaSet:
		if metav1.GetControllerOf(x) != nil {
			w.replicaSets[x.UID] = ownerOf(x)
		}
	case *corev1.Service:
		w.services[nameOf(x)] = *x
	case *discoveryv1.EndpointSlice:
		w.slices = append(w.slices, *x)
	case *corev1.PersistentVolume:
		w.volumes[x.Name] = *x
	case *corev1.PersistentVolumeClaim:
		w.claims[nameOf(x)] = *x
	case *storagev1.VolumeAttachment:
		w.attachments = append(w.attachments, *x)
	case *storagev1.CSINode:
		w.csiNodes = append(w.csiNodes, *x)
	case *batchv1.Job:
		x.Spec.Template = corev1.PodTemplateSpec{}
		w.jobs = append(w.jobs, *x)
	case *autoscalingv2.HorizontalPodAutoscaler:
		w.autoscalers = append(w.autoscalers, *x)
	default:
		return false
	}
	return true
}

// helmRecords is the type of Secrets that hold Helm's records.
const helmRecords = "helm.sh/release.v1"

// AddJSON adds a custom resource, a CustomResourceDefinition or an APIService, which etcd has
// as JSON.
func (o *Objects) AddJSON(text []byte) error {
	var t metav1.TypeMeta
	if err := json.Unmarshal(text, &t); err != nil {
		return fmt.Errorf("decode object: %w", err)
	}
	switch gvk := t.GroupVersionKind(); {
	case gvk.Kind == "CustomResourceDefinition" && gvk.Group == apiextensionsv1.GroupName:
		var k kind
		if err := json.Unmarshal(text, &k); err != nil {
			return fmt.Errorf("decode object: %w", err)
		}
		slim(&k.ObjectMeta)
		o.w.kinds = append(o.w.kinds, k)
	case gvk.Kind == "APIService" && gvk.Group == "apiregistration.k8s.io":
		var s apiService
		if err := json.Unmarshal(text, &s); err != nil {
			return fmt.Errorf("decode object: %w", err)
		}
		slim(&s.ObjectMeta)
		o.w.apiServices = append(o.w.apiServices, s)
	default:
		for _, r := range actorKinds {
			if r.Group != gvk.Group || !strings.EqualFold(r.Resource, gvk.Kind+"s") {
				continue
			}
			var a actor
			if err := json.Unmarshal(text, &a); err != nil {
				return fmt.Errorf("decode object: %w", err)
			}
			slim(&a.ObjectMeta)
			o.w.actors[r] = append(o.w.actors[r], a)
		}
	}
	return nil
}

// Stored counts an object in the version in which etcd has it.
func (o *Objects) Stored(stored schema.GroupVersionKind, namespace, name string) {
	o.stored[stored]++
	if o.example[stored] == "" {
		o.example[stored] = object(stored.Kind, namespace, name)
	}
}

// note records who wrote an object through a removed API.
func (o *Objects) note(stored schema.GroupVersionKind, m metav1.Object) {
	partial := &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{
		Name: m.GetName(), Namespace: m.GetNamespace(), CreationTimestamp: m.GetCreationTimestamp(), Annotations: m.GetAnnotations(), ManagedFields: m.GetManagedFields(),
	}}
	for _, a := range knownRemovals() {
		if a.resource.Group != stored.Group || a.kind != stored.Kind {
			continue
		}
		by := map[string]*writer{}
		for i := range o.w.writers[a.resource] {
			by[o.w.writers[a.resource][i].manager] = &o.w.writers[a.resource][i]
		}
		note(by, partial, a.resource.GroupVersion().String())
		var all []writer
		for _, w := range by {
			all = append(all, *w)
		}
		slices.SortFunc(all, func(a, b writer) int { return cmp.Or(b.at.Compare(a.at), cmp.Compare(a.manager, b.manager)) })
		o.w.writers[a.resource] = all
	}
}

// sendsRequests are checks that send requests of their own.
var sendsRequests = []string{"permissions", "kubelet-certificates", "running-kubelets", "cgroups", "pod-admission"}

// Check runs the checks on the objects. Checks that need more than a snapshot has are
// NotChecked. No request is sent.
func (o *Objects) Check(ctx context.Context, request check.PreflightRequest) ([]plan.Finding, error) {
	request.DryRun = false
	w := o.w.under(request)
	sortWorld(w)
	for _, c := range checks() {
		for _, s := range c.needs {
			if !o.has[s] {
				w.unread[s] = "the backup does not have it"
			}
		}
	}
	for resource := range w.writers { // as a reader, only those of the hop
		if !slices.ContainsFunc(removedAPIs(request.From, minorAfter(request.To)), func(a removedAPI) bool { return a.resource == resource }) {
			delete(w.writers, resource)
		}
	}
	all := slices.DeleteFunc(checks(), func(c checkItem) bool { return slices.Contains(sendsRequests, c.id) })
	found, err := runChecks(ctx, all, w, probe{}, func(plan.Event) {})
	if err != nil {
		return nil, err
	}
	for _, c := range checks() {
		if slices.Contains(sendsRequests, c.id) {
			found = append(found, plan.Finding{ID: c.id, Severity: plan.NotChecked, Source: c.area, Title: "not checked whether " + c.title, Detail: "only a live cluster shows it", Reference: c.ref})
		}
	}
	found = append(o.storedFindings(request.To), found...)
	if o.has[sourceKinds] && !o.has[sourceSlices] {
		found = append(w.kindsAlone(), found...)
	}
	if o.has[sourceCharts] && !o.has[sourceDeployments] {
		found = append(AddOnVersions(w.releaseUses(nil), request.To), found...)
	}
	slices.SortStableFunc(found, func(a, b plan.Finding) int { return cmp.Compare(rank(a.Severity), rank(b.Severity)) })
	return found, nil
}

// kindsAlone checks definitions of kinds without their conversion webhooks, whose services are
// unknown.
func (w *world) kindsAlone() []plan.Finding {
	alone := *w
	alone.kinds = slices.Clone(w.kinds)
	for i := range alone.kinds {
		alone.kinds[i].Spec.Convert = nil
	}
	found := kindsHealthy(&alone, nil)
	for i := range found {
		f := &found[i]
		f.ID, f.Source, f.Reference, f.Severity = "kinds", "apis", crdGuide, cmp.Or(f.Severity, plan.Warn)
	}
	return found
}

func sortWorld(w *world) {
	slices.SortFunc(w.nodes, func(a, b corev1.Node) int { return cmp.Compare(a.Name, b.Name) })
	slices.SortFunc(w.pods, func(a, b pod) int { return cmp.Or(cmp.Compare(a.namespace, b.namespace), cmp.Compare(a.name, b.name)) })
	slices.SortFunc(w.kinds, func(a, b kind) int { return cmp.Compare(a.Name, b.Name) })
	slices.SortFunc(w.apiServices, func(a, b apiService) int { return cmp.Compare(a.Name, b.Name) })
	slices.SortFunc(w.charts, func(a, b helmRelease) int {
		return cmp.Or(cmp.Compare(a.namespace, b.namespace), cmp.Compare(a.name, b.name))
	})
	slices.Sort(w.unreadableCharts)
	slices.Sort(w.terminating)
}

const storedPage = "https://kubernetes.io/docs/tasks/manage-kubernetes-objects/storage-version-migration/"

// storedFindings reports objects that etcd has in a version that the target no longer serves.
func (o *Objects) storedFindings(to version.Version) (out []plan.Finding) {
	for _, a := range knownRemovals() {
		gvk := schema.GroupVersionKind{Group: a.resource.Group, Version: a.resource.Version, Kind: a.kind}
		n := o.stored[gvk]
		if n == 0 || a.minor > to.Minor() {
			continue
		}
		out = append(out, plan.Finding{
			ID: "stored-versions", Severity: plan.Warn, Source: "apis", Reference: storedPage,
			Title:   fmt.Sprintf("etcd has %s as %s, which v1.%d no longer serves", count(n, "object"), a.title(), a.minor),
			Detail:  "an API server reads them only as long as it can decode that version; the first is " + o.example[gvk],
			Remedy:  "rewrite every object before the hop: a write stores it in the current version",
			Command: command("kubectl get %s --all-namespaces -o json | kubectl replace -f -", a.resource.Resource+"."+cmp.Or(a.resource.Group, "core")), Objects: []string{o.example[gvk]},
		})
	}
	return out
}
