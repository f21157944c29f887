package preflight

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"

	"constellation/engine"
	"constellation/engine/check"
	"constellation/engine/plan"
)

const (
	controlPlaneLabel = "node-role.kubernetes.io/control-plane"
	// ownNamespace is the namespace of this product's pods, except static pods.
	ownNamespace = "constellation-system"
	// maxObjects bounds the objects of one finding.
	maxObjects = 300
	// maxTold is the number of findings of one kind that a check lists individually.
	maxTold = 10
	// defaultDrainTimeout is the drain timeout of a request without one.
	defaultDrainTimeout = 10 * time.Minute
)

// lookups are built from a world at first use.
type lookups struct {
	lookupOnce, placeOnce, hooksOnce sync.Once
	lookup                           *lookup
	placement                        *placement
	hooks                            []*hook
	// lenient are webhooks with failurePolicy Ignore.
	lenient []*hook
}

// lookup is an index of a world for the checks of workloads. Its pointers refer to the world.
type lookup struct {
	nodes map[string]*corev1.Node
	pods  map[string][]*pod // by node
	// order are the nodes that the hop replaces, in that order: control planes first, each
	// role by name.
	order []string
	place map[string]int // in order, from 1
	// moving are the evicted pods in the order of the drains.
	moving  []*pod
	budgets []*budget
	// covering are the budgets that select a pod, sorted by name.
	covering map[*pod][]*budget
	meta     map[types.UID]*metav1.ObjectMeta
	byName   map[types.NamespacedName]*pod
	slices   map[types.NamespacedName][]*discoveryv1.EndpointSlice // by service
}

// budget is a PodDisruptionBudget and the pods that it selects.
type budget struct {
	*policyv1.PodDisruptionBudget
	selector labels.Selector
	// pods are all that have not terminated, moving those that a drain evicts.
	pods, moving []*pod
}

// made returns the lookups of w. The first call allocates them and must not run concurrently
// with another one.
func (w *world) made() *lookups {
	if w.lookups == nil {
		w.lookups = &lookups{}
	}
	return w.lookups
}

// under returns the same cluster for another hop. The data is shared.
func (w *world) under(r check.PreflightRequest) *world {
	other := *w
	other.request, other.lookups = r, nil // the index depends on the hop
	return &other
}

func (w *world) lookup() *lookup {
	m := w.made()
	m.lookupOnce.Do(func() { m.lookup = newLookup(w) })
	return m.lookup
}

func newLookup(w *world) *lookup {
	l := &lookup{
		nodes: map[string]*corev1.Node{}, pods: map[string][]*pod{}, place: map[string]int{}, covering: map[*pod][]*budget{},
		meta: map[types.UID]*metav1.ObjectMeta{}, byName: make(map[types.NamespacedName]*pod, len(w.pods)),
		slices: map[types.NamespacedName][]*discoveryv1.EndpointSlice{},
	}
	var controlPlanes, workers []string
	for i := range w.nodes {
		n := &w.nodes[i]
		l.nodes[n.Name] = n
		if _, ok := n.Labels[controlPlaneLabel]; ok {
			controlPlanes = append(controlPlanes, n.Name)
		} else {
			workers = append(workers, n.Name)
		}
	}
	if w.request.ReplaceControlPlanes {
		l.order = append(l.order, controlPlanes...)
	}
	if w.request.ReplaceWorkers {
		l.order = append(l.order, workers...)
	}
	for i, name := range l.order {
		l.place[name] = i + 1
	}
	for i := range w.deployments {
		l.meta[w.deployments[i].UID] = &w.deployments[i].ObjectMeta
	}
	for i := range w.statefulSets {
		l.meta[w.statefulSets[i].UID] = &w.statefulSets[i].ObjectMeta
	}
	for i := range w.daemonSets {
		l.meta[w.daemonSets[i].UID] = &w.daemonSets[i].ObjectMeta
	}
	for i := range w.jobs {
		l.meta[w.jobs[i].UID] = &w.jobs[i].ObjectMeta
	}
	for i := range w.slices {
		s := &w.slices[i]
		key := types.NamespacedName{Namespace: s.Namespace, Name: s.Labels[discoveryv1.LabelServiceName]}
		l.slices[key] = append(l.slices[key], s)
	}
	for i := range w.pods {
		p := &w.pods[i]
		l.byName[p.key()] = p
		if p.node != "" {
			l.pods[p.node] = append(l.pods[p.node], p)
		}
	}
	moves := map[*pod]bool{}
	for _, node := range l.order {
		for _, p := range l.pods[node] {
			if !p.mirror && !p.over() && p.controller.kind != "DaemonSet" && !p.ofPlan() {
				l.moving = append(l.moving, p)
				moves[p] = true
			}
		}
	}
	l.selectPods(w, moves)
	return l
}

// selectPods finds the pods of every budget. It builds each selector once and matches it
// only against pods of its namespace.
func (l *lookup) selectPods(w *world, moves map[*pod]bool) {
	byNamespace := map[string][]*budget{}
	for i := range w.pdbs {
		b := &budget{PodDisruptionBudget: &w.pdbs[i]}
		selector, err := metav1.LabelSelectorAsSelector(b.Spec.Selector)
		if err != nil {
			selector = labels.Nothing() // the API server rejects such a budget
		}
		b.selector = selector
		l.budgets = append(l.budgets, b)
		byNamespace[b.Namespace] = append(byNamespace[b.Namespace], b)
	}
	slices.SortFunc(l.budgets, func(a, b *budget) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})
	for _, budgets := range byNamespace {
		slices.SortFunc(budgets, func(a, b *budget) int { return cmp.Compare(a.Name, b.Name) })
	}
	for i := range w.pods {
		p := &w.pods[i]
		if p.over() {
			continue
		}
		for _, b := range byNamespace[p.namespace] {
			if !b.selector.Matches(labels.Set(p.labels)) {
				continue
			}
			b.pods = append(b.pods, p)
			l.covering[p] = append(l.covering[p], b)
			if moves[p] {
				b.moving = append(b.moving, p)
			}
		}
	}
}

func (w *world) anyPod(is func(*pod) bool) bool {
	for i := range w.pods {
		if is(&w.pods[i]) {
			return true
		}
	}
	return false
}

// over reports whether p has terminated: a drain only deletes it.
func (p *pod) over() bool { return p.phase == corev1.PodSucceeded || p.phase == corev1.PodFailed }

// ours reports whether p belongs to this product, which handles its own upgrade.
func (p *pod) ours() bool {
	return p.namespace == ownNamespace || p.namespace == metav1.NamespaceSystem && p.labels["k8s-app"] == "kube-dns" ||
		p.namespace == engine.PlansNamespace && p.labels["app.kubernetes.io/name"] == "constellation-plans"
}

// ofPlan reports whether p upgrades its node for a Plan. It is for that node alone, and writes to the node's disk.
func (p *pod) ofPlan() bool {
	return p.controller.kind == "Job" && p.labels[plans.Group+"/plan"] != "" && p.labels[plans.Group+"/controller"] != ""
}

func (p *pod) object() string { return object("pod", p.namespace, p.name) }

// position is "2 of 5": when node is replaced.
func (l *lookup) position(node string) string {
	return fmt.Sprintf("%d of %d", l.place[node], len(l.order))
}

// workload is the top-level owner of p: the Deployment rather than its ReplicaSet, or p
// itself without a controller.
func (w *world) workload(p *pod) owner {
	o := p.controller
	if o.kind == "ReplicaSet" {
		if above := w.replicaSets[o.uid]; above.kind != "" {
			o = above
		}
	}
	if o.kind == "" {
		return owner{apiVersion: "v1", kind: "Pod", name: p.name, uid: p.uid}
	}
	return o
}

// keeper is the owner who can change p's workload.
func (w *world) keeper(p *pod) string {
	if m := w.lookup().meta[w.workload(p).uid]; m != nil {
		return keeperOf(m)
	}
	return cmp.Or(p.keeper, "namespace "+printable(p.namespace))
}

// keeperOf returns the owner of an object: "namespace shop, Helm release web", "Argo CD
// application web", "rancher". Labels and annotations take precedence over field managers,
// of which the last writer counts that is neither a controller nor kubectl.
func keeperOf(m *metav1.ObjectMeta) string {
	var parts []string
	if m.Namespace != "" {
		parts = append(parts, "namespace "+m.Namespace)
	}
	if who := tool(m); who != "" {
		parts = append(parts, who)
	}
	return printable(strings.Join(parts, ", "))
}

func tool(m *metav1.ObjectMeta) string {
	if id := m.Annotations["argocd.argoproj.io/tracking-id"]; id != "" {
		app, _, _ := strings.Cut(id, ":")
		return "Argo CD application " + app
	}
	if app := m.Labels["argocd.argoproj.io/instance"]; app != "" {
		return "Argo CD application " + app
	}
	for _, flux := range []struct{ group, what string }{
		{"kustomize.toolkit.fluxcd.io", "Flux kustomization "}, {"helm.toolkit.fluxcd.io", "Flux Helm release "},
	} {
		if name := m.Labels[flux.group+"/name"]; name != "" {
			return flux.what + strings.TrimPrefix(m.Labels[flux.group+"/namespace"]+"/", "/") + name
		}
	}
	if release := m.Annotations["meta.helm.sh/release-name"]; release != "" {
		if ns := m.Annotations["meta.helm.sh/release-namespace"]; ns != "" && ns != m.Namespace {
			return fmt.Sprintf("Helm release %s of namespace %s", release, ns)
		}
		return "Helm release " + release
	}
	if by := m.Labels["app.kubernetes.io/managed-by"]; by != "" {
		return by
	}
	var last *metav1.ManagedFieldsEntry
	for i := range m.ManagedFields {
		f := &m.ManagedFields[i]
		switch {
		case f.Subresource != "", byHand(f.Manager), f.Manager == "kube-controller-manager", f.Manager == "kubelet", f.Manager == "kube-scheduler":
		case last == nil, f.Time != nil && (last.Time == nil || last.Time.Before(f.Time)):
			last = f
		}
	}
	if last == nil {
		return ""
	}
	return last.Manager
}

// byHand reports whether a field manager is kubectl, which identifies no owner.
func byHand(manager string) bool {
	return manager == "kubectl" || strings.HasPrefix(manager, "kubectl-")
}

// asked is manager if it identifies an owner; otherwise empty.
func asked(manager string) string {
	if byHand(manager) {
		return ""
	}
	return printable(manager)
}

// object is "kind/namespace/name", or "kind/name" without a namespace.
func object(kind, namespace, name string) string {
	if namespace != "" {
		name = namespace + "/" + name
	}
	return printable(strings.ToLower(kind) + "/" + name)
}

// objects are those of pods, sorted, the first few hundred.
func objects(pods []*pod) []string {
	out := make([]string, len(pods))
	for i, p := range pods {
		out[i] = p.object()
	}
	return first(out)
}

// first sorts names, removes duplicates and returns the first few hundred.
func first(names []string) []string {
	slices.Sort(names)
	names = slices.Compact(names)
	return names[:min(len(names), maxObjects)]
}

// enumerate is "a, b and 3 more", of cleaned names.
func enumerate(names []string, most int) string {
	var b strings.Builder
	for i, n := range names[:min(len(names), most)] {
		if i > 0 {
			b.WriteString(", ")
		}
		b.WriteString(printable(n))
	}
	if rest := len(names) - most; rest > 0 {
		fmt.Fprintf(&b, " and %d more", rest)
	}
	return b.String()
}

// count is "1 pod", "2 pods".
func count(n int, one string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %ss", n, one)
}

const commandLetters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._:/=-"

// command formats a command for a shell. Arguments come from the API and are untrusted: if
// one has other characters than letters, digits and . _ : / = - , or begins with a dash,
// command returns none.
func command(format string, args ...any) string {
	for _, a := range args {
		s, ok := a.(string)
		if !ok {
			continue
		}
		if s == "" || s[0] == '-' {
			return ""
		}
		if strings.ContainsFunc(s, func(r rune) bool { return !strings.ContainsRune(commandLetters, r) }) {
			return ""
		}
	}
	return fmt.Sprintf(format, args...)
}

// follows returns the end of a finding's detail that names its cause: the finding of check
// id on the same object, if there is one.
func follows(found []plan.Finding, id, object string) string {
	if slices.ContainsFunc(found, func(f plan.Finding) bool { return slices.Contains(f.Objects, object) }) {
		return "; caused by " + id
	}
	return ""
}

// lookAt returns the end of a remedy with a read-only command, if there is one.
func lookAt(format string, args ...any) string {
	if c := command(format, args...); c != "" {
		return "; inspect with `" + c + "`"
	}
	return ""
}

// fold lists the worst findings individually and summarizes the rest in one more.
func fold(found []plan.Finding, what string) []plan.Finding {
	if len(found) <= maxTold+1 {
		return found
	}
	slices.SortStableFunc(found, func(a, b plan.Finding) int {
		return cmp.Compare(rank(cmp.Or(a.Severity, plan.Warn)), rank(cmp.Or(b.Severity, plan.Warn)))
	})
	told, rest := found[:maxTold:maxTold], found[maxTold:]
	more := plan.Finding{
		Severity: rest[0].Severity, Title: fmt.Sprintf("%d more %s", len(rest), what),
		Remedy: "resolve those above and run the check again, or inspect the objects",
	}
	var titles []string
	for _, f := range rest {
		titles = append(titles, f.Title)
		more.Objects = append(more.Objects, f.Objects...)
	}
	more.Detail, more.Objects = enumerate(titles, maxTold), first(more.Objects)
	return append(told, more)
}

// replicas is the replica count of a workload; nil means 1.
func replicas(n *int32) int32 {
	if n == nil {
		return 1
	}
	return *n
}

// scalable is the argument of kubectl for the workload, and whether it can be scaled.
func scalable(o owner) (string, bool) {
	if strings.HasPrefix(o.apiVersion, appsv1.GroupName+"/") && (o.kind == "Deployment" || o.kind == "StatefulSet") {
		return strings.ToLower(o.kind) + "/" + o.name, true
	}
	return "", false
}

// plainDuration is "1h", "2m30s": without parts that are zero.
func plainDuration(d time.Duration) string {
	s := d.Round(time.Second).String()
	if strings.HasSuffix(s, "m0s") {
		s = strings.TrimSuffix(s, "0s")
	}
	if strings.HasSuffix(s, "h0m") {
		s = strings.TrimSuffix(s, "0m")
	}
	return s
}
