package preflight

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	storagev1 "k8s.io/api/storage/v1"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"

	"constellation/engine/plan"
)

const (
	evictionPage = "https://kubernetes.io/docs/concepts/scheduling-eviction/api-eviction/"
	budgetPage   = "https://kubernetes.io/docs/tasks/run-application/configure-pdb/"
	drainPage    = "https://kubernetes.io/docs/tasks/administer-cluster/safely-drain-node/"
	volumePage   = "https://kubernetes.io/docs/concepts/storage/volumes/"
)

// workloadSources are needed to know which pods are evicted, and their controllers.
var workloadSources = []source{
	sourceNodes, sourcePods, sourceReplicaSets, sourceDeployments, sourceStatefulSets, sourceDaemonSets, sourceJobs,
}

var disruptionChecks = []checkItem{
	{
		id: "pdb-room", area: "disruption", ref: budgetPage, run: budgetRoom,
		title: "every PodDisruptionBudget of evicted pods allows a disruption",
		needs: append([]source{sourcePDBs}, workloadSources...),
	},
	{
		id: "pdb-overlap", area: "disruption", ref: evictionPage, run: budgetOverlap,
		title: "no evicted pod has two PodDisruptionBudgets",
		needs: append([]source{sourcePDBs}, workloadSources...),
	},
	{
		id: "drain-rehearsal", area: "disruption", ref: evictionPage, run: rehearse,
		title: "every node that is replaced can be drained",
		needs: append([]source{sourcePDBs, sourceVolumes, sourceClaims, sourceCSINodes}, workloadSources...),
	},
	{
		id: "unmanaged-pods", area: "disruption", ref: drainPage, run: unmanagedPods,
		title: "every evicted pod has a controller that recreates it",
		needs: append([]source{sourceKinds, sourceAPIServices}, workloadSources...),
	},
	{
		id: "local-data", area: "disruption", ref: volumePage, run: localData,
		title: "no evicted pod keeps data on its node",
		needs: append([]source{sourceVolumes, sourceClaims}, workloadSources...),
	},
	{
		id: "single-replica", area: "disruption", ref: drainPage, run: singleReplica,
		title: "no evicted workload has a single replica",
		needs: append([]source{sourcePDBs}, workloadSources...),
	},
	{
		id: "volume-attachments", area: "disruption", ref: volumePage, run: volumeAttachments,
		title: "volumes can follow their pods to other nodes",
		needs: append([]source{sourceVolumes, sourceClaims, sourceAttachments}, workloadSources...),
	},
	{
		id: "termination", area: "disruption", ref: drainPage, run: termination,
		title: "every evicted pod terminates in time",
		needs: workloadSources,
	},
	{
		id: "do-not-evict", area: "disruption", ref: drainPage, run: doNotEvictPods,
		title: "no evicted pod has a do-not-evict annotation",
		needs: workloadSources,
	},
}

// needless reports whether the API server evicts p regardless of budgets.
func (p *pod) needless() bool {
	return p.over() || p.phase == corev1.PodPending || !p.terminating.IsZero()
}

// spends reports whether the eviction of p, which b selects, uses one of b's allowed
// disruptions. The rule is the API server's.
func (b *budget) spends(p *pod) bool {
	if p.needless() {
		return false
	}
	if p.ready {
		return true
	}
	if policy := b.Spec.UnhealthyPodEvictionPolicy; policy != nil && *policy == policyv1.AlwaysAllow {
		return false
	}
	return b.Status.CurrentHealthy < b.Status.DesiredHealthy || b.Status.DesiredHealthy <= 0
}

// stale reports whether the controller has not observed the latest generation of b. The API
// server rejects evictions until it has.
func (b *budget) stale() bool { return b.Status.ObservedGeneration < b.Generation }

// expected is the pod count on which b is computed.
func (b *budget) expected() int {
	if b.stale() || b.Status.ExpectedPods == 0 {
		return len(b.pods)
	}
	return int(b.Status.ExpectedPods)
}

// permanent returns why b allows no disruption even if all its pods are healthy; empty if it
// does.
func (b *budget) permanent() string {
	n := b.expected()
	if v := b.Spec.MaxUnavailable; v != nil {
		if most, err := intstr.GetScaledValueFromIntOrPercent(v, n, true); err == nil && most <= 0 {
			return fmt.Sprintf("maxUnavailable is %s", printable(v.String()))
		}
	}
	if v := b.Spec.MinAvailable; v != nil {
		if least, err := intstr.GetScaledValueFromIntOrPercent(v, n, true); err == nil && least >= n {
			return fmt.Sprintf("minAvailable is %s, and it has %s", printable(v.String()), count(n, "pod"))
		}
	}
	return ""
}

func (b *budget) object() string { return object("poddisruptionbudget", b.Namespace, b.Name) }

func (b *budget) name() string { return printable(b.Namespace + "/" + b.Name) }

func (b *budget) evidence() string {
	s := &b.Status
	return fmt.Sprintf("%s expected, %d healthy, %d must stay healthy, %d can be evicted now", count(int(s.ExpectedPods), "pod"), s.CurrentHealthy, s.DesiredHealthy, s.DisruptionsAllowed)
}

// needing are the evicted pods that use a disruption of b.
func (b *budget) needing() []*pod {
	var out []*pod
	for _, p := range b.moving {
		if b.spends(p) {
			out = append(out, p)
		}
	}
	return out
}

// budgetRoom reports budgets that allow no disruption, permanently or now.
func budgetRoom(w *world, _ *probe) []plan.Finding {
	l := w.lookup()
	var found []plan.Finding
	for _, b := range l.budgets {
		f, ok := w.roomOf(b)
		if !ok || b.permanent() == "" && w.doubled(b) {
			continue
		}
		found = append(found, f)
	}
	return fold(found, "PodDisruptionBudgets that allow no disruption")
}

// doubled reports whether every evicted pod of b has another budget too, which then is the
// cause.
func (w *world) doubled(b *budget) bool {
	return !slices.ContainsFunc(b.needing(), func(p *pod) bool { return len(w.lookup().covering[p]) < 2 })
}

func (w *world) roomOf(b *budget) (plan.Finding, bool) {
	needing := b.needing()
	if len(needing) == 0 {
		return plan.Finding{}, false
	}
	l := w.lookup()
	node := needing[0].node // moving is in the order of the drains
	where := fmt.Sprintf("%s on nodes that are %s, the first on %s (%s)", count(len(needing), "pod"), w.taken(), printable(node), l.position(node))
	f := plan.Finding{
		Severity: plan.Block, Owner: keeperOf(&b.ObjectMeta), Objects: append([]string{b.object()}, objects(needing)...),
		Detail: b.evidence() + "; " + where,
	}
	sick := 0
	for _, p := range needing {
		if !p.ready {
			sick++
		}
	}
	condition := apimeta.FindStatusCondition(b.Status.Conditions, policyv1.DisruptionAllowedCondition)
	switch why := b.permanent(); {
	case why != "":
		f.Title = fmt.Sprintf("PodDisruptionBudget %s never allows a disruption: %s", b.name(), why)
		f.Remedy = "allow one disruption at a time; one more replica keeps as many available as now"
		f.Command = b.patch(b.oneLess())
		// Only healthy pods allow disruptions: an unready pod would still be blocked.
		if sick > 0 {
			f.Remedy = "allow one disruption at a time, and evict unready pods at once"
			f.Command = b.patch(b.oneLess() + "," + sickMayGo)
		}
		if sick == len(needing) {
			f.Remedy = "allow the eviction of unready pods, or repair them"
			f.Command = b.patch(sickMayGo)
		}
	case b.stale():
		f.Severity = plan.Warn
		f.Title = fmt.Sprintf("PodDisruptionBudget %s has changed, and its controller has not observed it", b.name())
		f.Detail = fmt.Sprintf("generation %d, observed %d; evictions are refused until then; %s", b.Generation, b.Status.ObservedGeneration, where)
		f.Remedy = "wait; if it persists, check kube-controller-manager"
		f.Command = command("kubectl -n %s wait --for=jsonpath='{.status.observedGeneration}'=%d poddisruptionbudget/%s --timeout=1m", b.Namespace, b.Generation, b.Name)
	case condition != nil && condition.Status == metav1.ConditionFalse && condition.Reason == policyv1.SyncFailedReason:
		f.Title = fmt.Sprintf("PodDisruptionBudget %s cannot be computed, and allows no disruption", b.name())
		f.Detail = printable(condition.Message) + "; " + where
		f.Remedy = "give the number of available pods as an absolute number: it works without a scalable controller"
		f.Command = b.patch(fmt.Sprintf(`"maxUnavailable":null,"minAvailable":%d`, len(b.pods)-1))
		if sick == len(needing) {
			f.Remedy = "allow the eviction of unready pods, or repair them"
			f.Command = b.patch(sickMayGo)
		}
	case b.Status.DisruptionsAllowed > 0:
		return plan.Finding{}, false
	default:
		w.shortNow(b, needing, &f)
	}
	return f, true
}

// taken is what happens to nodes: others drain them, and may keep them.
func (w *world) taken() string {
	if w.request.Foreign {
		return "drained"
	}
	return "replaced"
}

// shortNow reports a budget that would allow a disruption if its pods were healthy.
func (w *world) shortNow(b *budget, needing []*pod, f *plan.Finding) {
	var unready []string
	var sick *pod
	for _, p := range b.pods {
		if !p.ready {
			unready = append(unready, p.name)
		}
	}
	for _, p := range needing {
		if !p.ready && sick == nil {
			sick = p
		}
	}
	if len(unready) > 0 {
		f.Detail += "; not ready: " + enumerate(unready, 5)
	}
	if n := len(b.Status.DisruptedPods); n > 0 {
		f.Detail += fmt.Sprintf("; %s being evicted now", count(n, "pod"))
	}
	if sick != nil {
		// Unready pods use up the budget that blocks their own eviction.
		f.Title = fmt.Sprintf("PodDisruptionBudget %s allows no disruption now, and blocks unready pods", b.name())
		f.Remedy = "allow the eviction of unready pods, or repair them"
		f.Command = b.patch(sickMayGo)
		return
	}
	f.Severity = plan.Warn
	f.Title = fmt.Sprintf("PodDisruptionBudget %s allows no disruption now", b.name())
	if len(unready) == 0 && int(b.Status.ExpectedPods) <= len(b.pods) {
		f.Remedy = "run the check again in a minute: its pods are ready, and its controller will count them"
		return
	}
	f.Remedy = "wait until its pods are ready"
	if o, ok := scalable(w.workload(needing[0])); ok {
		f.Command = command("kubectl -n %s rollout status %s --timeout=10m", b.Namespace, o)
	}
}

// sickMayGo is the field of a budget that allows the eviction of unready pods.
const sickMayGo = `"unhealthyPodEvictionPolicy":"AlwaysAllow"`

// oneLess is the field that makes b allow one disruption.
func (b *budget) oneLess() string {
	if b.Spec.MaxUnavailable != nil {
		return `"maxUnavailable":1`
	}
	return fmt.Sprintf(`"minAvailable":%d`, max(b.expected()-1, 0))
}

// patch is the command that sets fields of b, JSON without braces.
func (b *budget) patch(fields string) string {
	if kubectl := command("kubectl -n %s patch poddisruptionbudget %s --type=merge", b.Namespace, b.Name); kubectl != "" {
		return kubectl + ` -p '{"spec":{` + fields + `}}'`
	}
	return ""
}

// budgetOverlap reports pods with two budgets: the API server evicts none of them.
func budgetOverlap(w *world, _ *probe) []plan.Finding {
	l := w.lookup()
	type group struct {
		budgets []*budget
		pods    []*pod
	}
	groups := map[string]*group{}
	var order []string
	for _, p := range l.moving {
		covering := l.covering[p]
		if len(covering) < 2 || p.needless() {
			continue
		}
		key := covering[0].Namespace + "/" + budgetNames(covering)
		if groups[key] == nil {
			groups[key] = &group{budgets: covering}
			order = append(order, key)
		}
		groups[key].pods = append(groups[key].pods, p)
	}
	var found []plan.Finding
	for _, key := range order {
		g := groups[key]
		youngest := youngest(g.budgets)
		node := g.pods[0].node
		f := plan.Finding{
			Severity: plan.Block,
			Title:    fmt.Sprintf("%s in namespace %s cannot be evicted: PodDisruptionBudgets %s all select the same", count(len(g.pods), "pod"), printable(youngest.Namespace), budgetNames(g.budgets)),
			Detail:   fmt.Sprintf("the API server responds with 500 to the eviction of a pod with more than one budget; the first is %s on %s (%s)", printable(g.pods[0].name), printable(node), l.position(node)),
			Remedy:   "keep one of them; the command deletes the newest",
			Owner:    keeperOf(&youngest.ObjectMeta),
			Command:  youngest.remove(),
		}
		for _, b := range g.budgets {
			f.Objects = append(f.Objects, b.object())
		}
		f.Objects = append(f.Objects, objects(g.pods)...)
		found = append(found, f)
	}
	return fold(found, "groups of pods with two PodDisruptionBudgets")
}

func youngest(budgets []*budget) *budget {
	return slices.MaxFunc(budgets, func(a, b *budget) int {
		return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time), cmp.Compare(a.Name, b.Name))
	})
}

// remove is the command that deletes b.
func (b *budget) remove() string {
	return command("kubectl -n %s delete poddisruptionbudget %s", b.Namespace, b.Name)
}

func budgetNames(budgets []*budget) string {
	names := make([]string, len(budgets))
	for i, b := range budgets {
		names[i] = printable(b.Name)
	}
	return strings.Join(names, " and ")
}

// team is the set of pods of one workload.
type team struct {
	owner
	namespace string
	pods      []*pod
}

func (t *team) object() string { return object(t.kind, t.namespace, t.name) }

// objects are the workload and pods of it, a pod of its own once.
func (t *team) objects(pods []*pod) []string {
	return slices.Compact(append([]string{t.object()}, objects(pods)...))
}

// teams groups pods by workload, sorted by namespace, kind and name.
func (w *world) teams(pods []*pod) []*team {
	type key struct {
		namespace string
		owner     owner
	}
	byKey := map[key]*team{}
	var out []*team
	for _, p := range pods {
		k := key{p.namespace, w.workload(p)}
		t := byKey[k]
		if t == nil {
			t = &team{owner: k.owner, namespace: p.namespace}
			byKey[k] = t
			out = append(out, t)
		}
		t.pods = append(t.pods, p)
	}
	slices.SortStableFunc(out, func(a, b *team) int {
		return cmp.Or(cmp.Compare(a.namespace, b.namespace), cmp.Compare(a.kind, b.kind), cmp.Compare(a.name, b.name))
	})
	return out
}

// keepers is the common owner of all pods, if there is one.
func (w *world) keepers(pods []*pod) string {
	one := ""
	for _, p := range pods {
		k := w.keeper(p)
		if one != "" && k != one {
			return ""
		}
		one = k
	}
	return one
}

// podsByNamespace keeps the order within a namespace and sorts namespaces.
func podsByNamespace(pods []*pod) [][]*pod {
	groups := map[string][]*pod{}
	for _, p := range pods {
		groups[p.namespace] = append(groups[p.namespace], p)
	}
	var out [][]*pod
	for _, g := range groups {
		out = append(out, g)
	}
	slices.SortFunc(out, func(a, b []*pod) int { return cmp.Compare(a[0].namespace, b[0].namespace) })
	return out
}

// podNames are at most 20 names of pods for a command line.
func podNames(pods []*pod) string {
	var names []string
	for _, p := range pods[:min(len(pods), 20)] {
		if command("%s", p.name) == "" {
			return ""
		}
		names = append(names, p.name)
	}
	return strings.Join(names, " ")
}

// unmanagedPods reports pods that no controller recreates.
func unmanagedPods(w *world, _ *probe) []plan.Finding {
	served := map[string]bool{}
	for i := range w.kinds {
		k := &w.kinds[i].Spec
		if slices.ContainsFunc(k.Versions, func(v kindVersion) bool { return v.Served }) {
			served[k.Group+"/"+k.Names.Kind] = true
		}
	}
	aggregated := map[string]bool{}
	for i := range w.apiServices {
		if s := &w.apiServices[i].Spec; s.Service != nil {
			aggregated[s.Group] = true
		}
	}
	var alone []*pod
	gone := map[string][]*pod{}
	for _, p := range w.lookup().moving {
		if p.ours() {
			continue
		}
		group, _, _ := strings.Cut(p.controller.apiVersion, "/")
		switch {
		case p.controller.kind == "":
			alone = append(alone, p)
		case p.controller.apiVersion == "v1", builtin(group), aggregated[group], served[group+"/"+p.controller.kind]:
		default:
			gone[p.controller.kind+"."+group] = append(gone[p.controller.kind+"."+group], p)
		}
	}
	var found []plan.Finding
	for _, pods := range podsByNamespace(alone) {
		found = append(found, w.lost(pods, fmt.Sprintf("%s in namespace %s without a controller: lost when the node is removed", count(len(pods), "pod"), printable(pods[0].namespace))))
	}
	for _, kind := range sortedKeys(gone) {
		for _, pods := range podsByNamespace(gone[kind]) {
			f := w.lost(pods, fmt.Sprintf("%s in namespace %s controlled by %s, a kind that the cluster does not serve: lost when the node is removed", count(len(pods), "pod"), printable(pods[0].namespace), printable(kind)))
			found = append(found, f)
		}
	}
	return fold(found, "groups of pods that no controller recreates")
}

func (w *world) lost(pods []*pod, title string) plan.Finding {
	f := plan.Finding{
		Title: title, Detail: placesOf(pods), Owner: w.keepers(pods), Objects: objects(pods),
		Remedy: "run them by a Deployment or a Job; the command saves their manifests",
	}
	if names := podNames(pods); names != "" {
		if get := command("kubectl -n %s get pods", pods[0].namespace); get != "" {
			f.Command = fmt.Sprintf("%s %s -o yaml > pods-of-%s.yaml", get, names, pods[0].namespace)
		}
	}
	return f
}

// placesOf is "web-0 on worker-1, web-1 on worker-2 and 3 more".
func placesOf(pods []*pod) string {
	names := make([]string, len(pods))
	for i, p := range pods {
		names[i] = p.name + " on " + p.node
	}
	return enumerate(names, 5)
}

// builtin reports whether the API server itself serves group.
func builtin(group string) bool {
	switch group {
	case "apps", "batch", "autoscaling", "policy", "extensions", "":
		return true
	}
	return false
}

func sortedKeys[K ~string, V any](m map[K]V) []K {
	keys := make([]K, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}

// localData reports data on the disks of replaced nodes.
func localData(w *world, _ *probe) []plan.Finding {
	var scratch, host, bound []*pod
	for _, p := range w.lookup().moving {
		if p.ours() {
			continue
		}
		if len(p.emptyDir) > 0 {
			scratch = append(scratch, p)
		}
		if len(p.hostPath) > 0 {
			host = append(host, p)
		}
		if len(w.localVolumes(p)) > 0 {
			bound = append(bound, p)
		}
	}
	var found []plan.Finding
	for _, t := range w.teams(bound) {
		found = append(found, w.lostVolumes(t))
	}
	found = fold(found, "workloads with data on volumes of one node")
	for _, x := range []struct {
		pods    []*pod
		title   string
		volumes func(*pod) []string
		remedy  string
	}{
		{host, "hostPath volumes that %s can write will be lost with the nodes", func(p *pod) []string { return p.hostPath }, "move persistent data from hostPath volumes to a PersistentVolumeClaim"},
		{scratch, "emptyDir volumes of %s will be lost with the nodes", func(p *pod) []string { return p.emptyDir }, "ignore it if it is scratch data; otherwise use a PersistentVolumeClaim"},
	} {
		teams := w.teams(x.pods)
		if len(teams) == 0 {
			continue
		}
		var names, lines []string
		for _, t := range teams {
			names = append(names, t.object())
			lines = append(lines, t.object()+": "+enumerate(x.volumes(t.pods[0]), 5))
		}
		found = append(found, plan.Finding{
			Title: fmt.Sprintf(x.title, count(len(teams), "workload")), Detail: enumerate(lines, maxTold), Remedy: x.remedy,
			Owner: w.keepers(x.pods), Objects: first(names),
		})
	}
	return found
}

// localVolume is a volume with its data on one node.
type localVolume struct {
	claim string
	pv    *corev1.PersistentVolume
	// pinned reports whether its pods can run on no other node.
	pinned bool
}

// localVolumes are the volumes of p whose data is lost with its node.
func (w *world) localVolumes(p *pod) []localVolume {
	node := w.lookup().nodes[p.node]
	if node == nil || len(p.claims) == 0 {
		return nil
	}
	var out []localVolume
	for _, name := range p.claims {
		claim, ok := w.claims[types.NamespacedName{Namespace: p.namespace, Name: name}]
		if !ok {
			continue
		}
		pv, ok := w.volumes[claim.Spec.VolumeName]
		if !ok {
			continue
		}
		switch {
		case pinned(&pv, node):
			out = append(out, localVolume{name, &pv, true})
		case pv.Spec.HostPath != nil || pv.Spec.Local != nil:
			out = append(out, localVolume{name, &pv, false})
		}
	}
	return out
}

// pinned reports whether pv can be used on node but not on its replacement.
func pinned(pv *corev1.PersistentVolume, node *corev1.Node) bool {
	if pv.Spec.NodeAffinity == nil || pv.Spec.NodeAffinity.Required == nil {
		return false
	}
	selector, err := nodeaffinity.NewNodeSelector(pv.Spec.NodeAffinity.Required)
	if err != nil {
		return false
	}
	return selector.Match(node) && !selector.Match(heirOf(node))
}

func (w *world) lostVolumes(t *team) plan.Finding {
	f := plan.Finding{Owner: w.keepers(t.pods)}
	var lines []string
	stuck := false
	for _, p := range t.pods {
		for _, v := range w.localVolumes(p) {
			lines = append(lines, fmt.Sprintf("%s on %s", v.claim, p.node))
			f.Objects = append(f.Objects, object("persistentvolumeclaim", p.namespace, v.claim), object("persistentvolume", "", v.pv.Name))
			stuck = stuck || v.pinned
		}
	}
	f.Title = fmt.Sprintf("data of %s %s is on volumes of one node, and will be lost: %s", t.kind, printable(t.namespace+"/"+t.name), enumerate(lines, 3))
	f.Detail = "claims: " + enumerate(lines, maxTold)
	if stuck {
		f.Detail += "; a pod cannot restart until its claim is deleted"
	}
	f.Remedy = "back up the data, or have the application replicate it to other nodes, one node at a time"
	f.Objects = append([]string{t.object()}, first(f.Objects)...)
	return f
}

// singleReplica reports workloads that are unavailable while their only pod is evicted.
func singleReplica(w *world, _ *probe) []plan.Finding {
	want := map[types.UID]int32{}
	for i := range w.deployments {
		if w.deployments[i].Name != autoscalerName { // it is stopped during the rollout
			want[w.deployments[i].UID] = replicas(w.deployments[i].Spec.Replicas)
		}
	}
	for i := range w.statefulSets {
		want[w.statefulSets[i].UID] = replicas(w.statefulSets[i].Spec.Replicas)
	}
	l := w.lookup()
	var single []*pod
	for _, p := range l.moving {
		if n, ok := want[w.workload(p).uid]; ok && n == 1 && !p.ours() && len(l.covering[p]) == 0 {
			single = append(single, p)
		}
	}
	var found []plan.Finding
	for _, pods := range podsByNamespace(single) {
		var names, scale []string
		plain := true
		for _, t := range w.teams(pods) {
			names = append(names, t.object())
			o, ok := scalable(t.owner)
			if plain = plain && ok && command("%s", o) != ""; plain && t.kind == "Deployment" {
				scale = append(scale, o)
			}
		}
		f := plan.Finding{
			Title:  fmt.Sprintf("%s in namespace %s with a single replica: unavailable during its eviction", count(len(names), "workload"), printable(pods[0].namespace)),
			Detail: enumerate(names, maxTold), Owner: w.keepers(pods), Objects: first(names),
			Remedy: "run two replicas if the application supports it; a PodDisruptionBudget then keeps one available",
		}
		if ns := pods[0].namespace; plain && len(scale) > 0 && len(scale) <= 20 && command("%s", ns) != "" {
			f.Command = fmt.Sprintf("kubectl -n %s scale --replicas=2 %s", ns, strings.Join(scale, " "))
		}
		found = append(found, f)
	}
	return fold(found, "namespaces with single-replica workloads")
}

// detachLimit is the time that detaching a volume takes at most in a healthy cluster.
const detachLimit = 6 * time.Minute

// volumeAttachments reports volumes that do not detach, and those that two pods would need
// at the same time.
func volumeAttachments(w *world, _ *probe) []plan.Finding {
	l := w.lookup()
	var found []plan.Finding
	for i := range w.attachments {
		if f, ok := stuckAttachment(w, l, &w.attachments[i]); ok {
			found = append(found, f)
		}
	}
	found = fold(found, "volumes that do not detach")
	var waiting []*pod
	for _, p := range l.moving {
		// A StatefulSet waits for the deletion of the old pod; others create the new one at once.
		if p.controller.kind == "StatefulSet" || p.controller.kind == "" || len(w.singleAttach(p)) == 0 {
			continue
		}
		waiting = append(waiting, p)
	}
	if teams := w.teams(waiting); len(teams) > 0 {
		var names, lines []string
		for _, t := range teams {
			names = append(names, t.object())
			lines = append(lines, t.object()+": "+enumerate(w.singleAttach(t.pods[0]), 3))
		}
		found = append(found, plan.Finding{
			Title:  fmt.Sprintf("volumes of %s attach to one node only: new pods wait until the old ones are deleted", count(len(teams), "workload")),
			Detail: enumerate(lines, maxTold), Objects: first(names), Owner: w.keepers(waiting),
			Remedy: "expect some minutes of unavailability while volumes are reattached",
		})
	}
	return found
}

// singleAttach are the claims of p whose volume must be detached from its node first.
func (w *world) singleAttach(p *pod) []string {
	var out []string
	for _, name := range p.claims {
		claim, ok := w.claims[types.NamespacedName{Namespace: p.namespace, Name: name}]
		if !ok {
			continue
		}
		pv, ok := w.volumes[claim.Spec.VolumeName]
		if !ok || pv.Spec.CSI == nil || pinned(&pv, w.lookup().nodes[p.node]) {
			continue
		}
		many := slices.ContainsFunc(pv.Spec.AccessModes, func(m corev1.PersistentVolumeAccessMode) bool {
			return m == corev1.ReadWriteMany || m == corev1.ReadOnlyMany
		})
		if !many {
			out = append(out, name)
		}
	}
	return out
}

func stuckAttachment(w *world, l *lookup, a *storagev1.VolumeAttachment) (plan.Finding, bool) {
	volume := "of no PersistentVolume"
	if n := a.Spec.Source.PersistentVolumeName; n != nil {
		volume = *n
	}
	f := plan.Finding{
		Owner: cmp.Or(keeperOf(&a.ObjectMeta), printable(a.Spec.Attacher)), Objects: []string{object("volumeattachment", "", a.Name), object("node", "", a.Spec.NodeName)},
		Remedy: "check the CSI driver " + printable(a.Spec.Attacher),
	}
	switch {
	case l.nodes[a.Spec.NodeName] == nil:
		f.Title = fmt.Sprintf("volume %s is attached to node %s, which no longer exists", printable(volume), printable(a.Spec.NodeName))
		f.Remedy += "; if the machine is off, delete the attachment"
		f.Command = command("kubectl delete volumeattachment %s --wait=false", a.Name)
	case a.DeletionTimestamp != nil && w.now.Sub(a.DeletionTimestamp.Time) > detachLimit:
		f.Title = fmt.Sprintf("volume %s does not detach from node %s", printable(volume), printable(a.Spec.NodeName))
		f.Detail = "requested " + plainDuration(w.now.Sub(a.DeletionTimestamp.Time)) + " ago"
		if e := a.Status.DetachError; e != nil {
			f.Detail += ": " + printable(e.Message)
		}
	case a.Status.AttachError != nil && !a.Status.Attached:
		f.Title = fmt.Sprintf("volume %s cannot be attached to node %s", printable(volume), printable(a.Spec.NodeName))
		f.Detail = printable(a.Status.AttachError.Message)
	default:
		return plan.Finding{}, false
	}
	return f, true
}

// terminationSlack is the time beyond its grace period after which a pod counts as stuck.
const terminationSlack = time.Minute

// drainTimeout is how long a drain waits for one node.
func (w *world) drainTimeout() time.Duration {
	return cmp.Or(w.request.DrainTimeout, defaultDrainTimeout)
}

// termination reports pods that terminate later than a drain waits, or not at all.
func termination(w *world, _ *probe) []plan.Finding {
	var slow []*pod
	var found []plan.Finding
	for _, p := range w.lookup().moving {
		switch {
		case p.terminating.IsZero():
			if p.grace > w.drainTimeout() {
				slow = append(slow, p)
			}
		case w.now.Sub(p.terminating) > terminationSlack:
			found = append(found, w.stuckPod(p))
		}
	}
	found = fold(found, "pods that do not terminate")
	var late []plan.Finding
	for _, t := range w.teams(slow) {
		f := plan.Finding{
			Title:  fmt.Sprintf("%s %s may take %s to terminate, and a drain waits %s", t.kind, printable(t.namespace+"/"+t.name), plainDuration(t.pods[0].grace), plainDuration(w.drainTimeout())),
			Detail: fmt.Sprintf("terminationGracePeriodSeconds is %d: %s", int(t.pods[0].grace.Seconds()), placesOf(t.pods)),
			Owner:  w.keepers(t.pods), Objects: t.objects(t.pods),
			Remedy: "shorten the grace period if its pods allow it",
		}
		if o, ok := scalable(t.owner); ok {
			f.Command = command(`kubectl -n %s patch %s --type=merge -p '{"spec":{"template":{"spec":{"terminationGracePeriodSeconds":%d}}}}'`, t.namespace, o, int(w.drainTimeout().Seconds()))
		}
		late = append(late, f)
	}
	return append(found, fold(late, "workloads with long grace periods")...)
}

func (w *world) stuckPod(p *pod) plan.Finding {
	f := plan.Finding{
		Title:  fmt.Sprintf("pod %s should have terminated %s ago", printable(p.namespace+"/"+p.name), plainDuration(w.now.Sub(p.terminating))),
		Detail: "on " + printable(p.node), Owner: w.keeper(p), Objects: []string{p.object()},
		Remedy:  "check the node's kubelet; if the node is dead, force-delete the pod",
		Command: command("kubectl -n %s delete pod %s --force --grace-period=0", p.namespace, p.name),
	}
	if len(p.finalizers) > 0 {
		f.Detail += ", held by " + enumerate(p.finalizers, 3)
		f.Remedy = "find the owners of the finalizers; remove finalizers that have none"
		f.Command = command(`kubectl -n %s patch pod %s --type=merge -p '{"metadata":{"finalizers":null}}'`, p.namespace, p.name)
	}
	return f
}

// doNotEvictPods reports pods with do-not-evict annotations, which an upgrade ignores.
func doNotEvictPods(w *world, _ *probe) []plan.Finding {
	var asking []*pod
	for _, p := range w.lookup().moving {
		if p.notEvict != "" && !p.ours() {
			asking = append(asking, p)
		}
	}
	var found []plan.Finding
	for _, pods := range podsByNamespace(asking) {
		var keys []string
		for _, p := range pods {
			key, _, _ := strings.Cut(p.notEvict, "=")
			if !slices.Contains(keys, key) {
				keys = append(keys, key)
			}
		}
		slices.Sort(keys)
		f := plan.Finding{
			Title:  fmt.Sprintf("evicted despite do-not-evict annotations: %s in namespace %s", count(len(pods), "pod"), printable(pods[0].namespace)),
			Detail: enumerate(keys, 3) + ": " + placesOf(pods), Owner: w.keepers(pods), Objects: objects(pods),
			Remedy: "wait until they complete, or accept that they restart on other nodes",
		}
		if names := podNames(pods); names != "" {
			if annotate := command("kubectl -n %s annotate pods", pods[0].namespace); annotate != "" {
				f.Command = fmt.Sprintf("%s %s %s-", annotate, names, strings.Join(keys, "- "))
			}
		}
		found = append(found, f)
	}
	return fold(found, "namespaces with pods that have do-not-evict annotations")
}
