package preflight

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	helpers "k8s.io/component-helpers/scheduling/corev1"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"

	"constellation/engine/plan"
)

const schedulingPage = "https://kubernetes.io/docs/concepts/scheduling-eviction/kube-scheduler/"

var capacityChecks = []checkItem{
	{
		id: "capacity", area: "capacity", ref: schedulingPage, run: capacity,
		title: "every evicted pod fits on another node",
		needs: append([]source{sourceVolumes, sourceClaims, sourceCSINodes}, workloadSources...),
	},
	{
		id: "pending-pods", area: "capacity", ref: schedulingPage, run: pendingPods,
		title: "no pod is unschedulable",
		needs: workloadSources,
	},
}

// room is a node and its free resources.
type room struct {
	node  *corev1.Node
	free  resources
	slots int64 // pods
	ports map[int32]bool
	// volumes is the free attachments of each CSI driver; a driver without a limit is absent.
	volumes map[string]int64
	pods    []*pod
	// coming are the pods that a new node will run but does not yet.
	coming []*pod
	// guarded are those of its pods with anti-affinity.
	guarded []*pod
}

// placement is the result of scheduling evicted pods.
type placement struct {
	// lost maps the pods that fit nowhere to the reason.
	lost map[*pod]string
	// approximate are workloads with rules that are not fully evaluated.
	approximate map[owner]bool
}

// scheduler simulates kube-scheduler: it places pods one after the other.
type scheduler struct {
	w *world
	placement
	rooms  []*room                     // in no special order
	cursor int                         // where the last search ended
	limits map[string]map[string]int64 // of volumes: by node and driver
	rules  map[types.UID]*nodeaffinity.RequiredNodeAffinity
	// zones are selectors of volumes; nil if a volume can be used everywhere.
	zones map[string]*nodeaffinity.NodeSelector
}

// placed simulates draining node after node and reschedules the evicted pods. With surge,
// each drain begins once the replacement node, a machine of the same kind, is there.
// Without surge, the replacement comes after the old node is removed.
func (w *world) placed() *placement {
	m := w.made()
	m.placeOnce.Do(func() {
		s := newScheduler(w)
		for _, node := range w.lookup().order {
			s.drain(node)
		}
		m.placement = &s.placement
	})
	return m.placement
}

func newScheduler(w *world) *scheduler {
	s := &scheduler{
		w: w, placement: placement{lost: map[*pod]string{}, approximate: map[owner]bool{}},
		rules: map[types.UID]*nodeaffinity.RequiredNodeAffinity{}, zones: map[string]*nodeaffinity.NodeSelector{},
	}
	l := w.lookup()
	s.limits = w.volumeLimits()
	for i := range w.nodes {
		n := &w.nodes[i]
		r := newRoom(n, s.limits[n.Name])
		for _, p := range l.pods[n.Name] {
			s.take(r, p)
		}
		s.rooms = append(s.rooms, r)
	}
	return s
}

// volumeLimits is how many volumes each driver can attach, by node.
func (w *world) volumeLimits() map[string]map[string]int64 {
	out := map[string]map[string]int64{}
	for i := range w.csiNodes {
		for _, d := range w.csiNodes[i].Spec.Drivers {
			if d.Allocatable == nil || d.Allocatable.Count == nil {
				continue
			}
			if out[w.csiNodes[i].Name] == nil {
				out[w.csiNodes[i].Name] = map[string]int64{}
			}
			out[w.csiNodes[i].Name][d.Name] = int64(*d.Allocatable.Count)
		}
	}
	return out
}

func newRoom(n *corev1.Node, limits map[string]int64) *room {
	r := &room{node: n, free: resources{other: map[corev1.ResourceName]int64{}}, slots: 110, ports: map[int32]bool{}, volumes: maps.Clone(limits)}
	for name, q := range n.Status.Allocatable {
		switch name {
		case corev1.ResourceCPU:
			r.free.cpu = q.MilliValue()
		case corev1.ResourceMemory:
			r.free.memory = q.Value()
		case corev1.ResourceEphemeralStorage:
			r.free.ephemeral = q.Value()
		case corev1.ResourcePods:
			r.slots = q.Value()
		default:
			r.free.other[name] = q.Value()
		}
	}
	return r
}

// heirOf is the replacement of node n: of the same kind, with another name, and without
// labels and taints that only reflect the current state of n.
func heirOf(n *corev1.Node) *corev1.Node {
	name := "heir-of-" + n.Name
	out := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: make(map[string]string, len(n.Labels))}}
	for k, v := range n.Labels {
		if v == n.Name || k == corev1.LabelHostname {
			v = name
		}
		out.Labels[k] = v
	}
	for _, t := range n.Spec.Taints {
		if !strings.HasPrefix(t.Key, "node.kubernetes.io/") {
			out.Spec.Taints = append(out.Spec.Taints, t)
		}
	}
	out.Status.Allocatable = n.Status.Allocatable
	return out
}

// take assigns p to r, whether it fits or not.
func (s *scheduler) take(r *room, p *pod) {
	if p.over() {
		return
	}
	r.free.cpu -= p.request.cpu
	r.free.memory -= p.request.memory
	r.free.ephemeral -= p.request.ephemeral
	for name, n := range p.request.other {
		r.free.other[name] -= n
	}
	r.slots--
	for _, port := range p.hostPorts {
		r.ports[port] = true
	}
	for _, driver := range s.drivers(p) {
		if _, ok := r.volumes[driver]; ok {
			r.volumes[driver]--
		}
	}
	r.pods = append(r.pods, p)
	if p.affinity != nil && p.affinity.PodAntiAffinity != nil && len(p.affinity.PodAntiAffinity.RequiredDuringSchedulingIgnoredDuringExecution) > 0 {
		r.guarded = append(r.guarded, p)
	}
}

// drivers are the CSI drivers of p's volumes, one for each volume.
func (s *scheduler) drivers(p *pod) []string {
	var out []string
	for _, name := range p.claims {
		claim, ok := s.w.claims[types.NamespacedName{Namespace: p.namespace, Name: name}]
		if !ok {
			continue
		}
		if pv, ok := s.w.volumes[claim.Spec.VolumeName]; ok && pv.Spec.CSI != nil {
			out = append(out, pv.Spec.CSI.Driver)
		}
	}
	return out
}

// drain reschedules the pods of a node and removes the node.
func (s *scheduler) drain(name string) {
	l := s.w.lookup()
	i := slices.IndexFunc(s.rooms, func(r *room) bool { return r.node.Name == name })
	old := s.rooms[i]
	s.rooms[i] = s.rooms[len(s.rooms)-1]
	s.rooms = s.rooms[:len(s.rooms)-1]

	// Pods that an earlier drain scheduled here are evicted again. DaemonSet pods and static
	// pods exist on every node.
	var moving, staying []*pod
	for _, p := range old.pods {
		switch {
		case p.mirror || p.controller.kind == "DaemonSet":
			staying = append(staying, p)
		case !p.ofPlan():
			moving = append(moving, p)
		}
	}
	slices.SortStableFunc(moving, func(a, b *pod) int {
		return cmp.Or(cmp.Compare(b.priority, a.priority), cmp.Compare(b.request.memory, a.request.memory), cmp.Compare(b.request.cpu, a.request.cpu))
	})
	heir := newRoom(heirOf(l.nodes[name]), s.limits[name])
	for _, p := range staying {
		s.take(heir, p)
	}
	surge := s.w.request.Surge > 0
	if surge {
		heir.coming = moving
		s.rooms = append(s.rooms, heir)
	}
	failed := map[types.UID]string{}
	for _, p := range moving {
		if why, ok := failed[p.controller.uid]; ok && p.controller.uid != "" {
			s.lost[p] = why
			continue
		}
		if p.controller.kind == "" {
			continue // no controller recreates it
		}
		if why := s.place(p, heir, surge); why != "" {
			s.lost[p] = why
			failed[p.controller.uid] = why
		}
	}
	heir.coming = nil
	if !surge {
		s.rooms = append(s.rooms, heir)
	}
}

// place finds a node for p, the replacement first if it is there. It returns the reasons
// if there is none.
func (s *scheduler) place(p *pod, heir *room, there bool) string {
	if there && s.misfit(heir, p) == "" {
		s.take(heir, p)
		return ""
	}
	reasons := map[string]int{}
	for n := range s.rooms {
		i := (s.cursor + n) % len(s.rooms)
		r := s.rooms[i]
		why := s.misfit(r, p)
		if why == "" {
			s.take(r, p)
			s.cursor = i
			return ""
		}
		reasons[why]++
	}
	if len(reasons) == 0 {
		return "no other node exists"
	}
	var lines []string
	for _, why := range sortedKeys(reasons) {
		lines = append(lines, fmt.Sprintf("%s: %s", count(reasons[why], "node"), why))
	}
	return strings.Join(lines, ", ")
}

// misfit returns why p cannot run on r; empty if it can.
func (s *scheduler) misfit(r *room, p *pod) string {
	if r.node.Spec.Unschedulable {
		return "cordoned"
	}
	if ok, err := s.affinity(p).Match(r.node); err != nil || !ok {
		return "its node selector or affinity does not match"
	}
	if len(r.node.Spec.Taints) > 0 {
		taint, not := helpers.FindMatchingUntoleratedTaint(logr.Discard(), r.node.Spec.Taints, p.tolerations, func(t *corev1.Taint) bool {
			return t.Effect == corev1.TaintEffectNoSchedule || t.Effect == corev1.TaintEffectNoExecute
		}, true)
		if not {
			return "taint " + printable(taint.Key)
		}
	}
	if why := r.short(p); why != "" {
		return why
	}
	if why := s.volumes(r, p); why != "" {
		return why
	}
	return s.neighbours(r, p)
}

// short returns the resource of r that is insufficient for p.
func (r *room) short(p *pod) string {
	switch q := &p.request; {
	case r.slots < 1:
		return "maximum number of pods reached"
	case q.cpu > 0 && q.cpu > r.free.cpu:
		return "insufficient CPU"
	case q.memory > 0 && q.memory > r.free.memory:
		return "insufficient memory"
	case q.ephemeral > 0 && q.ephemeral > r.free.ephemeral:
		return "insufficient ephemeral storage"
	}
	for name, n := range p.request.other {
		if n > r.free.other[name] {
			return "insufficient " + printable(string(name))
		}
	}
	for _, port := range p.hostPorts {
		if r.ports[port] {
			return fmt.Sprintf("host port %d is in use", port)
		}
	}
	return ""
}

// affinity is p's node selector and required node affinity. Pods of one controller share it.
func (s *scheduler) affinity(p *pod) *nodeaffinity.RequiredNodeAffinity {
	if a := s.rules[p.controller.uid]; a != nil && p.controller.uid != "" {
		return a
	}
	a := nodeaffinity.GetRequiredNodeAffinity(&corev1.Pod{Spec: corev1.PodSpec{NodeSelector: p.nodeSelector, Affinity: p.affinity}})
	s.rules[p.controller.uid] = &a
	return &a
}

// volumes returns why the volumes of p cannot be used on r.
func (s *scheduler) volumes(r *room, p *pod) string {
	if len(p.claims) == 0 {
		return ""
	}
	for _, name := range p.claims {
		claim, ok := s.w.claims[types.NamespacedName{Namespace: p.namespace, Name: name}]
		if !ok || claim.Spec.VolumeName == "" {
			continue // bound when the pod is scheduled
		}
		if zone := s.zone(claim.Spec.VolumeName); zone != nil && !zone.Match(r.node) {
			return "its volume is in another zone or on another node"
		}
	}
	if len(r.volumes) == 0 {
		return ""
	}
	need := map[string]int64{}
	for _, driver := range s.drivers(p) {
		need[driver]++
		if left, limited := r.volumes[driver]; limited && need[driver] > left {
			return "maximum number of volumes of " + printable(driver) + " reached"
		}
	}
	return ""
}

// zone selects the nodes that can use a volume; nil means all.
func (s *scheduler) zone(volume string) *nodeaffinity.NodeSelector {
	zone, ok := s.zones[volume]
	if ok {
		return zone
	}
	if pv, known := s.w.volumes[volume]; known && pv.Spec.NodeAffinity != nil && pv.Spec.NodeAffinity.Required != nil {
		// One that cannot be parsed matches no node, and the API server refuses it.
		if selector, err := nodeaffinity.NewNodeSelector(pv.Spec.NodeAffinity.Required); err == nil {
			zone = selector
		}
	}
	s.zones[volume] = zone
	return zone
}

// neighbours returns why p cannot run beside the pods of r. Rules over several nodes (zones,
// topology spread) count as satisfied, because a replacement node is in the zone of the old
// node; the workload is then marked as approximate.
func (s *scheduler) neighbours(r *room, p *pod) string {
	for _, c := range p.spread {
		if c.WhenUnsatisfiable == corev1.DoNotSchedule {
			s.approximate[s.w.workload(p)] = true
		}
	}
	for _, other := range r.guarded {
		for i := range other.affinity.PodAntiAffinity.RequiredDuringSchedulingIgnoredDuringExecution {
			t := &other.affinity.PodAntiAffinity.RequiredDuringSchedulingIgnoredDuringExecution[i]
			if t.TopologyKey == corev1.LabelHostname && s.selects(t, other, p) {
				return "the anti-affinity of a pod there excludes it"
			}
		}
	}
	if p.affinity == nil {
		return ""
	}
	if anti := p.affinity.PodAntiAffinity; anti != nil {
		for i := range anti.RequiredDuringSchedulingIgnoredDuringExecution {
			t := &anti.RequiredDuringSchedulingIgnoredDuringExecution[i]
			if t.TopologyKey != corev1.LabelHostname {
				s.approximate[s.w.workload(p)] = true
				continue
			}
			if slices.ContainsFunc(r.pods, func(other *pod) bool { return s.selects(t, p, other) }) {
				return "its anti-affinity excludes a pod there"
			}
		}
	}
	if with := p.affinity.PodAffinity; with != nil {
		for i := range with.RequiredDuringSchedulingIgnoredDuringExecution {
			t := &with.RequiredDuringSchedulingIgnoredDuringExecution[i]
			if t.TopologyKey != corev1.LabelHostname {
				s.approximate[s.w.workload(p)] = true
				continue
			}
			// The first pod of a group with mutual affinity may run anywhere.
			wanted := func(other *pod) bool { return s.selects(t, p, other) }
			if !wanted(p) && !slices.ContainsFunc(r.pods, wanted) && !slices.ContainsFunc(r.coming, wanted) {
				return "no pod there matches its affinity"
			}
		}
	}
	return ""
}

// selects reports whether term t of pod p selects other.
func (s *scheduler) selects(t *corev1.PodAffinityTerm, p, other *pod) bool {
	if t.LabelSelector == nil || !s.inNamespaces(t, p, other) {
		return false
	}
	selector, err := metav1.LabelSelectorAsSelector(t.LabelSelector)
	if err != nil || !selector.Matches(labels.Set(other.labels)) {
		return false
	}
	for _, key := range t.MatchLabelKeys {
		if p.labels[key] != other.labels[key] {
			return false
		}
	}
	return true
}

func (s *scheduler) inNamespaces(t *corev1.PodAffinityTerm, p, other *pod) bool {
	if len(t.Namespaces) == 0 && t.NamespaceSelector == nil {
		return p.namespace == other.namespace
	}
	if slices.Contains(t.Namespaces, other.namespace) {
		return true
	}
	if t.NamespaceSelector == nil {
		return false
	}
	selector, err := metav1.LabelSelectorAsSelector(t.NamespaceSelector)
	return err == nil && selector.Matches(s.w.namespaceLabels(other.namespace))
}

// capacity reports pods that fit nowhere when their node is drained.
func capacity(w *world, _ *probe) []plan.Finding {
	placement := w.placed()
	var homeless []*pod
	for _, p := range w.lookup().moving {
		// Volumes bound to one node are reported as local data.
		if placement.lost[p] == "" || slices.ContainsFunc(w.localVolumes(p), func(v localVolume) bool { return v.pinned }) {
			continue
		}
		homeless = append(homeless, p)
	}
	var found []plan.Finding
	for _, t := range w.teams(homeless) {
		found = append(found, w.homeless(t, placement))
	}
	return fold(found, "workloads whose pods do not fit")
}

// loneControlPlane reports whether a node is the only control plane of the cluster.
func (w *world) loneControlPlane(node string) bool {
	is := false
	n := 0
	for i := range w.nodes {
		if _, ok := w.nodes[i].Labels[controlPlaneLabel]; ok {
			n++
			is = is || w.nodes[i].Name == node
		}
	}
	return is && n == 1
}

func (w *world) homeless(t *team, placement *placement) plan.Finding {
	l := w.lookup()
	pods := w.inOrder(slices.Clone(t.pods))
	p := pods[0]
	surge := "no additional machine"
	if w.request.Surge > 0 {
		surge = "a surge machine of the same kind"
	}
	f := plan.Finding{
		Severity: plan.Block, Owner: w.keepers(pods), Objects: t.objects(pods),
		Title:  fmt.Sprintf("no room for %s of %s %s once %s (%s) is drained", count(len(pods), "pod"), t.kind, printable(t.namespace+"/"+t.name), printable(p.node), l.position(p.node)),
		Detail: fmt.Sprintf("%s requests %s; %s; computed with %s", printable(p.name), p.request, placement.lost[p], surge),
		Remedy: "make room: fewer replicas, smaller requests, or another node",
	}
	if w.request.Foreign && w.loneControlPlane(p.node) {
		f.Severity = plan.Warn
		f.Detail += "; it is the only control plane, which an upgrade of kubeadm need not drain"
	}
	if placement.approximate[t.owner] {
		f.Detail += "; topology spread and affinity over zones were not computed"
	}
	o, ok := scalable(t.owner)
	host := p.nodeSelector[corev1.LabelHostname]
	switch {
	case host != "":
		f.Remedy = "remove the node name from its node selector; the new node has another name"
		if w.request.Foreign {
			f.Remedy = "remove the node name from its node selector: its pods cannot run while the node is drained"
		}
		if ok {
			f.Command = command(`kubectl -n %s patch %s --type=json -p '[{"op":"remove","path":"/spec/template/spec/nodeSelector/kubernetes.io~1hostname"}]'`, t.namespace, o)
		}
	case ok:
		if n := w.wanted(t.uid); int(n) > len(pods) {
			f.Command = command("kubectl -n %s scale %s --replicas=%d", t.namespace, o, int(n)-len(pods))
		}
	}
	return f
}

// wanted is the replica count of a Deployment or StatefulSet; zero if there is none.
func (w *world) wanted(uid types.UID) int32 {
	for i := range w.deployments {
		if w.deployments[i].UID == uid {
			return replicas(w.deployments[i].Spec.Replicas)
		}
	}
	for i := range w.statefulSets {
		if w.statefulSets[i].UID == uid {
			return replicas(w.statefulSets[i].Spec.Replicas)
		}
	}
	return 0
}

// String is "500m CPU, 1024 MiB memory, 1 nvidia.com/gpu".
func (r resources) String() string {
	var parts []string
	if r.cpu > 0 {
		parts = append(parts, fmt.Sprintf("%dm CPU", r.cpu))
	}
	if r.memory > 0 {
		parts = append(parts, fmt.Sprintf("%d MiB memory", r.memory>>20))
	}
	if r.ephemeral > 0 {
		parts = append(parts, fmt.Sprintf("%d MiB ephemeral storage", r.ephemeral>>20))
	}
	for _, name := range slices.Sorted(maps.Keys(r.other)) {
		if r.other[name] > 0 {
			parts = append(parts, fmt.Sprintf("%d %s", r.other[name], printable(string(name))))
		}
	}
	if len(parts) == 0 {
		return "nothing"
	}
	return strings.Join(parts, ", ")
}

// placingTime is the time that scheduling a pod may take in a healthy cluster.
const placingTime = time.Minute

// pendingPods reports pods that are unschedulable already.
func pendingPods(w *world, _ *probe) []plan.Finding {
	var waiting []*pod
	for i := range w.pods {
		p := &w.pods[i]
		if p.node == "" && p.phase == corev1.PodPending && p.terminating.IsZero() && w.now.Sub(p.created) > placingTime {
			waiting = append(waiting, p)
		}
	}
	var found []plan.Finding
	for _, t := range w.teams(waiting) {
		title := fmt.Sprintf("%s of %s %s without a node", count(len(t.pods), "pod"), t.kind, printable(t.namespace+"/"+t.name))
		remedy := "add capacity or scale it down; drains reduce capacity further"
		if t.pods[0].controller.kind == "" {
			title = fmt.Sprintf("pod %s is unschedulable", printable(t.namespace+"/"+t.name))
			remedy = "add capacity or delete it; drains reduce capacity further"
		}
		f := plan.Finding{
			Title:  title,
			Detail: printable(cmp.Or(t.pods[0].pending, "the scheduler has not processed it")),
			Owner:  w.keepers(t.pods), Objects: t.objects(t.pods),
			Remedy: remedy,
		}
		if o, ok := scalable(t.owner); ok {
			if n := w.wanted(t.uid); int(n) >= len(t.pods) {
				f.Command = command("kubectl -n %s scale %s --replicas=%d", t.namespace, o, int(n)-len(t.pods))
			}
		}
		found = append(found, f)
	}
	return fold(found, "workloads with unschedulable pods")
}
