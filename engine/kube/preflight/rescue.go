package preflight

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	autoscalingv2 "k8s.io/api/autoscaling/v2"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"

	"constellation/engine/plan"
)

// stuckDrain is the ID of the check of drains that wait for what does not happen by itself.
const stuckDrain = "stuck-drain"

// rescueSources are what the advice for stuck drains is computed from.
var rescueSources = []source{
	sourceNodes, sourcePods, sourcePDBs, sourceReplicaSets, sourceDeployments, sourceStatefulSets, sourceDaemonSets, sourceAutoscalers,
	sourceServices, sourceSlices, sourceNamespaces, sourceValidating, sourceMutating,
}

var rescueChecks = []checkItem{{
	id: stuckDrain, area: "disruption", ref: evictionPage, run: func(w *world, _ *probe) []plan.Finding { return w.stuckDrains() },
	title: "no cordoned node waits for a pod that cannot leave it", needs: rescueSources,
}}

// StuckDrains returns one finding for each cause that keeps pods on cordoned nodes, or deleted
// pods on nodes that are not ready: the objects that wait for each other, the command that frees
// them, and its risk. It reads the pods of such nodes alone, and sends list requests only, one if
// there is no such node.
func StuckDrains(ctx context.Context, config *rest.Config) ([]plan.Finding, error) {
	config = rest.CopyConfig(config)
	config.WarningHandler = rest.NoWarnings{}
	core, err := kubernetes.NewForConfig(protobuf(config))
	if err != nil {
		return nil, fmt.Errorf("make Kubernetes client: %w", err)
	}
	meta, err := metadata.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("make Kubernetes client: %w", err)
	}
	w := &world{now: time.Now(), unread: map[source]string{}, kubelets: &kubelets{}}
	r := &reader{config: config, core: core, meta: meta, w: w}
	sources := r.sources()
	limited, cancel := context.WithTimeout(ctx, sourceLimit)
	defer cancel()
	if err := sources[sourceNodes](limited); err != nil {
		return nil, fmt.Errorf("list nodes: %w", err)
	}
	if !slices.ContainsFunc(w.nodes, func(n corev1.Node) bool { return emptying(&n) }) {
		return nil, nil
	}
	sources[sourcePods] = r.podsOfCordoned
	delete(sources, sourceNodes)
	var mu sync.Mutex // of unread
	var reading sync.WaitGroup
	for id, read := range sources {
		if !slices.Contains(rescueSources, id) {
			continue
		}
		reading.Go(func() {
			if err := read(limited); err != nil {
				mu.Lock()
				defer mu.Unlock()
				w.unread[id] = reason(limited, err)
			}
		})
	}
	reading.Wait()
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	found := rescueChecks[0].find(w, nil)
	return slices.DeleteFunc(found, func(f plan.Finding) bool { return f.Severity == plan.Info }), nil
}

// emptying reports whether pods leave n: it is cordoned, or taints of a node that is not ready
// evict them.
func emptying(n *corev1.Node) bool { return n.Spec.Unschedulable || !nodeReady(n) }

// podsOfCordoned reads the pods of nodes that pods leave.
func (r *reader) podsOfCordoned(ctx context.Context) error {
	var errs []error
	for i := range r.w.nodes {
		if !emptying(&r.w.nodes[i]) {
			continue
		}
		on := fields.OneTermEqualSelector("spec.nodeName", r.w.nodes[i].Name).String()
		errs = append(errs, pages(ctx, func(ctx context.Context, o metav1.ListOptions) (*corev1.PodList, error) {
			o.FieldSelector = on
			return r.core.CoreV1().Pods("").List(ctx, o)
		}, func(l *corev1.PodList) {
			for i := range l.Items {
				r.w.pods = append(r.w.pods, slimPod(&l.Items[i]))
			}
		}))
	}
	slices.SortFunc(r.w.pods, func(a, b pod) int {
		return cmp.Or(cmp.Compare(a.namespace, b.namespace), cmp.Compare(a.name, b.name))
	})
	return errors.Join(errs...)
}

// stuckDrains reports what keeps pods on cordoned nodes.
func (w *world) stuckDrains() []plan.Finding {
	k := kept{world: w, dead: w.deadHooks(), byBudget: map[*budget][]*pod{}, byHook: map[*hook][]*pod{}}
	for i := range w.nodes {
		if n := &w.nodes[i]; emptying(n) {
			k.on(n)
		}
	}
	found := k.found
	for _, h := range k.dead {
		if pods := k.byHook[h]; len(pods) > 0 {
			found = append(found, w.refused(h, pods))
		}
	}
	for _, p := range k.overlapping {
		found = append(found, w.overlapped(p))
	}
	for _, b := range w.lookup().budgets {
		if pods := k.byBudget[b]; len(pods) > 0 {
			found = append(found, w.untied(b, pods))
		}
	}
	return fold(found, "causes of stuck drains")
}

// kept sorts the pods that stay on emptying nodes by their causes.
type kept struct {
	*world
	dead        []*hook // webhooks that reject all evictions
	found       []plan.Finding
	byBudget    map[*budget][]*pod
	byHook      map[*hook][]*pod
	overlapping []*pod // two budgets select them
}

// on adds the pods of node n.
func (k *kept) on(n *corev1.Node) {
	var lost []*pod
	for _, p := range k.lookup().pods[n.Name] {
		if p.mirror || p.controller.kind == "DaemonSet" {
			continue
		}
		switch {
		case p.terminating.IsZero():
			if n.Spec.Unschedulable && !p.over() {
				k.evicted(p)
			}
		case len(p.finalizers) > 0 && k.now.After(p.terminating):
			k.found = append(k.found, k.finalizing(p))
		case !k.now.After(p.terminating.Add(terminationSlack)):
		case !nodeReady(n):
			lost = append(lost, p)
		default:
			k.found = append(k.found, k.lingering(p))
		}
	}
	if len(lost) > 0 {
		k.found = append(k.found, k.unanswered(n, lost))
	}
}

// evicted adds p if its eviction is refused.
func (k *kept) evicted(p *pod) {
	if h := k.refusedBy(k.dead, p); h != nil {
		k.byHook[h] = append(k.byHook[h], p)
		return
	}
	covering := k.lookup().covering[p]
	switch {
	case p.needless():
	case len(covering) > 1:
		k.overlapping = append(k.overlapping, p)
	case len(covering) == 1 && covering[0].spends(p) && (covering[0].stale() || covering[0].Status.DisruptionsAllowed <= 0):
		k.byBudget[covering[0]] = append(k.byBudget[covering[0]], p)
	}
}

// nodeReady reports whether the kubelet of n reports Ready.
func nodeReady(n *corev1.Node) bool {
	return slices.ContainsFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
	})
}

// waits is the start of the titles: "node worker-1 waits for pod shop/web-1 and 2 more".
func waits(pods []*pod) string {
	more := ""
	if len(pods) > 1 {
		more = fmt.Sprintf(" and %d more", len(pods)-1)
	}
	p := pods[0]
	return fmt.Sprintf("node %s waits for pod %s%s", printable(p.node), printable(p.namespace+"/"+p.name), more)
}

// nodeOf is the node of a pod as an object of a finding.
func nodeOf(p *pod) string { return object("node", "", p.node) }

// deadHooks are webhooks that reject evictions because their service has no ready endpoint.
func (w *world) deadHooks() (out []*hook) {
	for _, h := range w.hooks() {
		key, ok := h.service()
		if !ok || !slices.Contains(h.hits, evictions) {
			continue
		}
		if service, ok := w.services[key]; ok && service.Spec.Type == corev1.ServiceTypeExternalName || ok && w.backends(key).ready > 0 {
			continue
		}
		out = append(out, h)
	}
	return out
}

// refusedBy is the first of hooks that reviews the eviction of p; nil if none does.
func (w *world) refusedBy(hooks []*hook, p *pod) *hook {
	for _, h := range hooks {
		if h.namespaces.Matches(w.namespaceLabels(p.namespace)) {
			return h
		}
	}
	return nil
}

func (w *world) refused(h *hook, pods []*pod) plan.Finding {
	key, _ := h.service()
	why := "has no ready endpoint"
	if _, ok := w.services[key]; !ok {
		why = "does not exist"
	}
	severity := plan.Block
	if h.conditions {
		severity = plan.Warn
	}
	f := h.finding(severity, fmt.Sprintf("%s: every eviction calls %s, whose service %s %s", waits(pods), h.title(), printable(key.String()), why))
	f.Objects = append(f.Objects, append(objects(pods), nodeOf(pods[0]))...)
	f.Remedy = "let evictions pass without the webhook, or restore its pods. Risk: until failurePolicy is Fail again, requests pass without its review while it is down"
	f.Command = h.ignore()
	return f
}

// overlapped is a pod whose eviction the API server refuses because two budgets select it.
func (w *world) overlapped(p *pod) plan.Finding {
	budgets := w.lookup().covering[p]
	young := youngest(budgets)
	f := plan.Finding{
		Severity: plan.Block, Owner: keeperOf(&young.ObjectMeta), Objects: []string{p.object(), nodeOf(p)},
		Title:   fmt.Sprintf("%s: PodDisruptionBudgets %s select it, and the API server evicts no pod with two", waits([]*pod{p}), budgetNames(budgets)),
		Detail:  w.chain(p),
		Remedy:  "delete the newest. Risk: its limit no longer applies; the others still do",
		Command: young.remove(),
	}
	for _, b := range budgets {
		f.Objects = append(f.Objects, b.object())
	}
	return f
}

// chain is the workload of p with its ready pods: "Deployment shop/web has 1 of 1 ready".
func (w *world) chain(p *pod) string {
	o := w.workload(p)
	name := o.kind + " " + printable(p.namespace+"/"+o.name)
	for i := range w.deployments {
		if d := &w.deployments[i]; d.UID == o.uid {
			return fmt.Sprintf("%s has %d of %d ready", name, d.Status.ReadyReplicas, replicas(d.Spec.Replicas))
		}
	}
	for i := range w.statefulSets {
		if s := &w.statefulSets[i]; s.UID == o.uid {
			return fmt.Sprintf("%s has %d of %d ready", name, s.Status.ReadyReplicas, replicas(s.Spec.Replicas))
		}
	}
	return "it belongs to " + name
}

// deployment is the Deployment of p that nothing else scales; nil if there is none.
func (w *world) deployment(p *pod) *appsv1.Deployment {
	o := w.workload(p)
	i := slices.IndexFunc(w.deployments, func(d appsv1.Deployment) bool { return d.UID == o.uid })
	if i < 0 || slices.ContainsFunc(w.autoscalers, autoscales(p.namespace, o)) {
		return nil
	}
	return &w.deployments[i]
}

// autoscales reports whether an autoscaler sets the replicas of a workload.
func autoscales(namespace string, o owner) func(autoscalingv2.HorizontalPodAutoscaler) bool {
	return func(a autoscalingv2.HorizontalPodAutoscaler) bool {
		return a.Namespace == namespace && a.Spec.ScaleTargetRef.Kind == o.kind && a.Spec.ScaleTargetRef.Name == o.name
	}
}

// allows reports whether b allows a disruption of n healthy pods.
func (b *budget) allows(n int) bool {
	if b.Spec.MinAvailable == nil {
		return false // more pods do not change maxUnavailable: 0
	}
	least, err := intstr.GetScaledValueFromIntOrPercent(b.Spec.MinAvailable, n, true)
	return err == nil && least < n
}

// untied is a budget that keeps pods on a cordoned node, with the command that frees them.
func (w *world) untied(b *budget, pods []*pod) plan.Finding {
	p := pods[0]
	f := plan.Finding{
		Severity: plan.Block, Owner: keeperOf(&b.ObjectMeta), Objects: append([]string{b.object(), nodeOf(p)}, objects(pods)...),
		Title:  fmt.Sprintf("%s: PodDisruptionBudget %s allows no eviction", waits(pods), b.name()),
		Detail: b.evidence() + "; " + w.chain(p),
	}
	sick := slices.IndexFunc(pods, func(p *pod) bool { return !p.ready })
	d := w.deployment(p)
	switch {
	case b.stale():
		f.Severity = plan.Warn
		f.Detail = fmt.Sprintf("generation %d, observed %d: evictions are refused until its controller has observed it", b.Generation, b.Status.ObservedGeneration)
		f.Remedy = "wait; if it persists, check kube-controller-manager. Risk: none"
		f.Command = command("kubectl -n %s wait --for=jsonpath='{.status.observedGeneration}'=%d poddisruptionbudget/%s --timeout=1m", b.Namespace, b.Generation, b.Name)
	case sick >= 0:
		f.Detail += "; not ready: " + printable(pods[sick].name)
		f.Remedy = "allow the eviction of unready pods, or repair them. Risk: their replacements may not become ready either; ready pods stay protected"
		f.Command = b.patch(sickMayGo)
	case b.permanent() != "" && d != nil && b.allows(b.expected()+1):
		n := replicas(d.Spec.Replicas)
		f.Detail += "; " + b.permanent()
		f.Remedy = fmt.Sprintf("run one replica more until the drain has ended, then scale back to %d. Risk: the new pod needs room on another node, and the workload must tolerate %d at once", n, n+1)
		f.Command = command("kubectl -n %s scale %s --replicas=%d", p.namespace, "deployment/"+d.Name, n+1)
	case b.permanent() != "":
		f.Detail += "; " + b.permanent()
		f.Remedy = "allow one disruption at a time. Risk: one pod fewer is available than the budget demands until its replacement is ready"
		f.Command = b.patch(b.oneLess())
	default:
		f.Severity = plan.Warn
		f.Remedy = "wait until its other pods are ready. Risk: none"
		if o, ok := scalable(w.workload(p)); ok {
			f.Command = command("kubectl -n %s rollout status %s --timeout=10m", p.namespace, o)
		}
	}
	return f
}

// finalizing is a deleted pod that finalizers keep.
func (w *world) finalizing(p *pod) plan.Finding {
	return plan.Finding{
		Severity: plan.Warn, Owner: w.keeper(p), Objects: []string{p.object(), nodeOf(p)},
		Title:   fmt.Sprintf("%s: it is deleted and has finalizers: %s", waits([]*pod{p}), enumerate(p.finalizers, 3)),
		Detail:  fmt.Sprintf("its grace period ended %s ago; %s", plainDuration(w.now.Sub(p.terminating)), w.chain(p)),
		Remedy:  "repair the controllers of the finalizers, or remove the finalizers. Risk: their controllers then do not clean up after the pod",
		Command: command(`kubectl -n %s patch pod %s --type=merge -p '{"metadata":{"finalizers":null}}'`, p.namespace, p.name),
	}
}

// unanswered are deleted pods on a node whose kubelet does not report.
func (w *world) unanswered(n *corev1.Node, pods []*pod) plan.Finding {
	p := pods[0]
	why := "its kubelet has reported no readiness"
	for _, c := range n.Status.Conditions {
		if c.Type == corev1.NodeReady {
			why = fmt.Sprintf("its condition Ready is %s since %s: %s", c.Status, c.LastTransitionTime.UTC().Format(time.RFC3339), printable(c.Message))
		}
	}
	return plan.Finding{
		Severity: plan.Warn, Owner: w.keeper(p), Objects: append(objects(pods), nodeOf(p)),
		Title:   waits(pods) + ": deleted, and the node is not ready to confirm it",
		Detail:  fmt.Sprintf("%s; not gone: %s", why, podNames(pods)),
		Remedy:  "repair the node; or, once its machine is powered off, taint it, so that its pods and volumes are released. Risk: if the machine still runs, two pods may write to one volume",
		Command: command("kubectl taint node %s node.kubernetes.io/out-of-service=nodeshutdown:NoExecute", n.Name),
	}
}

// lingering is a deleted pod on a ready node that has not ended.
func (w *world) lingering(p *pod) plan.Finding {
	f := w.stuckPod(p)
	f.Severity = plan.Warn
	f.Title = fmt.Sprintf("%s: it should have terminated %s ago", waits([]*pod{p}), plainDuration(w.now.Sub(p.terminating)))
	f.Detail = strings.TrimPrefix(f.Detail+"; "+w.chain(p), "; ")
	f.Objects = append(f.Objects, nodeOf(p))
	f.Remedy = "check the kubelet of the node, or delete the pod by force. Risk: its processes may still run, and two pods may write to one volume"
	return f
}
