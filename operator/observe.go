package operator

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"constellation/engine/cloud"
	"constellation/operator/api/v1alpha1"
	"constellation/operator/decision"
	"constellation/operator/nodelock"
	"constellation/operator/readiness"
)

// view is the informer cache with our own last writes laid over it, so that a stale cache decides nothing
// twice.
//
// It is safe for concurrent use.
type view struct {
	client client.Client
	now    func() time.Time

	mu  sync.Mutex
	own map[viewKey]ownWrite
}

type viewKey struct{ kind, name string }

// ownWrite is an object after our write; nil means deleted.
type ownWrite struct {
	object client.Object
	uid    types.UID
	at     time.Time
}

// unseenWrite is how long our own write counts while the cache does not show the object. After that,
// somebody else has deleted it.
const unseenWrite = 5 * time.Second

func newView(c client.Client, now func() time.Time) *view {
	return &view{client: c, now: now, own: map[viewKey]ownWrite{}}
}

// wrote remembers an object as the API server returned it.
func (v *view) wrote(kind string, o client.Object) {
	if n, ok := o.(*corev1.Node); ok {
		_, _ = trimNode(n)
	}
	o.SetManagedFields(nil)
	v.mu.Lock()
	defer v.mu.Unlock()
	if w := v.own[viewKey{kind, o.GetName()}]; w.object != nil && w.uid == o.GetUID() && newer(w.object, o) {
		return // answers arrived out of order
	}
	v.own[viewKey{kind, o.GetName()}] = ownWrite{object: o, uid: o.GetUID(), at: v.now()}
}

// deleted remembers that an object is gone. The cache may show that before the answer arrives, and an object of the same name
// may have been written meanwhile: that one is not gone.
func (v *view) deleted(kind string, o client.Object) {
	v.mu.Lock()
	defer v.mu.Unlock()
	key := viewKey{kind, o.GetName()}
	if w := v.own[key]; w.object != nil && w.uid != o.GetUID() && newer(w.object, o) {
		return
	}
	v.own[key] = ownWrite{uid: o.GetUID(), at: v.now()}
}

// forget drops our writes of an object: the cache is newer.
func (v *view) forget(kind, name string) {
	v.mu.Lock()
	defer v.mu.Unlock()
	delete(v.own, viewKey{kind, name})
}

// over lays our writes of a kind over the objects of the cache. They belong to the cache and must
// not be changed.
func over[T any, P interface {
	*T
	client.Object
}](v *view, kind string, cached []T,
) map[string]P {
	out := make(map[string]P, len(cached))
	for i := range cached {
		o := P(&cached[i])
		out[o.GetName()] = o
	}
	lay(v, kind, out)
	return out
}

// lay lays our writes of a kind over what the cache has, by name.
func lay[P client.Object](v *view, kind string, out map[string]P) {
	v.mu.Lock()
	defer v.mu.Unlock()
	for k, w := range v.own {
		if k.kind != kind {
			continue
		}
		c, there := out[k.name]
		switch {
		case w.object == nil: // deleted
			if there && c.GetUID() == w.uid {
				delete(out, k.name)
				continue
			}
			delete(v.own, k)
		case there && !newer(w.object, c):
			delete(v.own, k)
		case !there && v.now().Sub(w.at) > unseenWrite:
			delete(v.own, k)
		default:
			if o, ok := w.object.(P); ok {
				out[k.name] = o
			}
		}
	}
}

// names returns which objects of a kind we wrote that the cache may not show yet.
func (v *view) names(kind string) map[string]bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	out := map[string]bool{}
	for k := range v.own {
		if k.kind == kind {
			out[k.name] = true
		}
	}
	return out
}

// newer reports whether a is a later state than b.
func newer(a, b client.Object) bool {
	c, err := resourceversion.CompareResourceVersion(a.GetResourceVersion(), b.GetResourceVersion())
	return err == nil && c > 0
}

// observed is a world with the objects that it was read from, by name.
type observed struct {
	decision.World
	version *v1alpha1.NodeVersion
	nodes   map[string]*corev1.Node // belongs to the round; see of
	pending map[string]*v1alpha1.PendingNode
	begins  bool      // no replacement was being recorded
	woken   time.Time // arrival of the first event that it may be the first to include; zero: none
}

// of returns the part of the observation that an action needs. It may be kept beyond the round.
func (o *observed) of(a decision.Action) *observed {
	out := &observed{version: o.version, nodes: map[string]*corev1.Node{}, pending: map[string]*v1alpha1.PendingNode{}, woken: o.woken}
	for _, name := range []string{a.Node, a.OldNode, a.Intent.OldNode, a.Intent.Node} {
		if n := o.nodes[name]; n != nil && (name == a.Node || o.find().Nodes[name] != nil) { // nothing is inherited from an impostor
			out.nodes[name] = n
		}
	}
	if p := o.pending[a.Intent.Name]; p != nil {
		out.pending[p.Name] = p
	}
	return out
}

// find returns the Lookup of the world, which judges the nodes. Nodes, instances and intents must be
// complete.
func (o *observed) find() *decision.Lookup {
	if o.Lookup == nil {
		o.Lookup = decision.NewLookup(&o.World)
	}
	return o.Lookup
}

// Kinds in a view.
const (
	kindNode    = "Node"
	kindPending = "PendingNode"
	kindVersion = "NodeVersion"
)

// observe builds the world from the cache and from the last answers of the cloud and the host. It waits
// for the network only to read a components ConfigMap for the first time.
func (r *nodeVersions) observe(ctx context.Context, nv *v1alpha1.NodeVersion) (*observed, error) {
	var (
		groups  v1alpha1.ScalingGroupList
		pending v1alpha1.PendingNodeList
		joining v1alpha1.JoiningNodeList
	)
	r.retries.round()
	woken := time.Time{}
	if at := r.woken.Swap(0); at != 0 {
		woken = time.Unix(0, at)
	}
	begins := r.beginning.Load() == 0
	r.book.update(r.cached(), r.view)
	for _, l := range []client.ObjectList{&groups, &pending, &joining} {
		if err := r.client.List(ctx, l, client.UnsafeDisableDeepCopy); err != nil {
			return nil, err
		}
	}
	o := &observed{
		begins:  begins,
		woken:   woken,
		nodes:   r.book.objects,
		pending: over(r.view, kindPending, pending.Items),
	}
	o.version = over(r.view, kindVersion, []v1alpha1.NodeVersion{*nv})[nv.Name]
	w := &o.World
	w.Now, w.Generation, w.Before, w.LeaderNode = r.now(), o.version.Generation, o.version.Status, r.nodeName
	w.Instances, w.Complete, _, w.Index = r.fleet.view()
	for i := range groups.Items {
		g := &groups.Items[i]
		w.Groups = append(w.Groups, decision.Group{Name: g.Name, ID: g.Spec.GroupID, Role: g.Spec.Role, Image: g.Status.ImageReference, Strategy: g.Spec.Strategy, NotListed: notListed(g), OnHold: g.Annotations[v1alpha1.AnnotationHeld] == "true"})
	}
	w.Nodes = r.nodesOf()
	for _, p := range o.pending {
		in := decision.IntentOf(p)
		least := decision.CreateDeadline
		if in.Token == "" { // its machine exists and must join
			least = decision.JoinDeadline / 2
		}
		in.Deadline = r.clocks.Until("intent "+string(p.UID)+string(in.Goal), in.Deadline, w.Now, least)
		w.Intents = append(w.Intents, in)
	}
	sortIntents(w.Intents)
	w.NodeRuns = r.inPlaceRuns(w.Intents, o.version.Status.Upgrade)
	x := o.find()
	r.gateReplacements(o, x)
	for i := range w.Intents {
		in := &w.Intents[i]
		s := decision.PendingStatus(*in, x, decision.UpgradeRun{}, v1alpha1.PendingNodeStatus{})
		p := decision.PendingMachine{Kind: kindPending, Name: in.Name, Node: in.Node, Ready: in.Goal == v1alpha1.JoinGoal && s.CSPState == v1alpha1.InstanceState(cloud.Ready)}
		if m := x.ByToken[in.Token]; in.Node == "" && in.Token != "" && m != nil {
			p.Node = m.Name
		}
		w.Pending = append(w.Pending, p)
	}
	w.Shortages = r.sizes.shortages()
	w.Revoked = r.revoked.read(ctx, r.live, w, x, r.log)
	w.Joining = make(map[string]bool, len(joining.Items))
	for i := range joining.Items {
		w.Joining[joining.Items[i].Spec.Name] = true
		w.Pending = append(w.Pending, decision.PendingMachine{Kind: "JoiningNode", Name: joining.Items[i].Name, Node: joining.Items[i].Spec.Name})
	}
	var err error
	if w.Autoscaler, err = r.scaling.observe(ctx); err != nil {
		return nil, err
	}
	if r.lock != nil {
		have, other, trouble := r.lock.State(nodelock.Replacements)
		w.NodesLocked = !have
		switch {
		case have:
		case other != "":
			w.NodesLockedBy = fmt.Sprintf("waiting for %s, which holds the node lock", other)
		case trouble != nil:
			w.NodesLockedBy = fmt.Sprintf("acquire the node lock: %v", trouble)
		}
	}
	if w.Versions, err = r.componentVersions(ctx, o.version); err != nil {
		return nil, err
	}
	r.observeEtcd(w)
	journal, _ := r.hostView.run()
	known := time.Duration(0)
	if u := o.version.Status.Upgrade; u != nil {
		known = w.Now.Sub(r.clocks.Since("run "+u.Node+u.Started.String(), w.Now))
	}
	w.Run = decision.LastRun(journal, o.version.Status.Upgrade, r.hostView.answerTo(o.version.Status.Upgrade), known, o.version.Spec, *x, w.LeaderNode)
	return o, nil
}

// observeEtcd adds the members of etcd that the last answer of the host named, and to each node the
// version of its member.
func (r *nodeVersions) observeEtcd(w *decision.World) {
	w.Etcd, w.LastEtcd = slices.Clone(r.hostView.etcd(w.Now)), r.hostView.lastEtcd()
	for i := range w.Nodes {
		n := &w.Nodes[i]
		n.Etcd = ""
		if m := decision.MemberOf(w.LastEtcd, n.Name); m != nil {
			n.Etcd = m.Version
		}
	}
	w.KubeadmEtcdTag, w.KubeadmRead = r.hostView.etcdTag(r.now())
	w.Addons, w.AddonRun = r.hostView.addons(r.now())
	for i := range w.Etcd {
		if m := &w.Etcd[i]; m.NotStarted {
			m.Since = r.clocks.Since("member "+m.Node, w.Now)
		}
	}
}

// nodesOf returns the nodes in the order of their names, as their Nodes claim. kubeadm labels a control
// plane some time after its Node exists, so judge takes the role from the cloud. The next call
// overwrites the result.
func (r *nodeVersions) nodesOf() []decision.Node {
	r.nodes = r.nodes[:0]
	for _, known := range r.book.order {
		r.nodes = append(r.nodes, known.Node)
		n := &r.nodes[len(r.nodes)-1]
		if n.Cordon != decision.Uncordoned {
			n.Drained, n.DrainBlocker = r.drains.state(n.Name)
		}
		if n.Cordon == decision.CordonedByUs {
			key := "cordon " + n.Name + known.object.Annotations[v1alpha1.AnnotationCordoned]
			n.CordonedSince = r.clocks.Until(key, n.CordonedSince.Add(decision.DrainDeadline), r.now(), decision.DrainDeadline/3).Add(-decision.DrainDeadline)
		}
		n.Plan, n.Lent = r.planOf(known.object)
		if !n.PostponedUntil.IsZero() { // no Node can postpone itself for longer than the operator does
			if most := r.clocks.Since("postponed "+n.Name+known.object.Annotations[v1alpha1.AnnotationPostponed], r.now()).Add(decision.Postponement); n.PostponedUntil.After(most) {
				n.PostponedUntil = most
			}
		}
	}
	return r.nodes
}

// planOf returns the Plan that upgrades a Node while it is drained, and whether the Node is lent to it. A note
// that is not renewed expires. No Plan, and no Node that writes its own notes, keeps the operator waiting for longer
// than lentMost.
func (r *nodeVersions) planOf(n *corev1.Node) (plan string, lent bool) {
	note := n.Annotations[nodelock.AnnotationWaits]
	if plan, _ = nodelock.ParseNote(note); plan == "" || r.now().Sub(r.clocks.Since("plan "+n.Name+" "+note, r.now())) > nodelock.NoteExpiry {
		return "", false
	}
	lentNote := n.Annotations[nodelock.AnnotationLent]
	if to, _ := nodelock.ParseNote(lentNote); to != plan {
		return plan, false
	}
	if r.now().Sub(r.clocks.Since("lent "+n.Name+" "+lentNote, r.now())) > lentMost {
		return "", false
	}
	return plan, true
}

// lentMost is the longest time for which a Node is lent to a Plan.
const lentMost = time.Hour

// nodeBook has the Nodes of the view and what was parsed from them. Only Nodes that changed between two
// rounds are parsed again, so that unchanged nodes cost nothing.
//
// The zero value is empty. It belongs to the rounds, of which there is one at a time.
type nodeBook struct {
	objects map[string]*corev1.Node // by name
	order   []*readNode             // the same, by name
	known   map[string]*readNode    // those of the cache, too, that we have deleted
	laid    map[string]bool         // names over which a write of ours lay the last time
	updates uint64
}

// readNode is a Node and its parsed form, without the state of its drain.
type readNode struct {
	decision.Node
	cached, object *corev1.Node // from the cache, and with our write laid over it; nil: missing
	seen           uint64       // the last update that found it in the cache
}

// update updates the book from the cache and our own writes. Objects of the cache are replaced, never
// changed.
func (b *nodeBook) update(cached []any, v *view) {
	if b.known == nil {
		b.known, b.objects = map[string]*readNode{}, map[string]*corev1.Node{}
	}
	b.updates++
	changed, there := b.laid, 0
	if changed == nil {
		changed = map[string]bool{}
	}
	for _, c := range cached {
		n, ok := c.(*corev1.Node)
		if !ok {
			continue
		}
		k := b.known[n.Name]
		if k == nil {
			k = &readNode{Node: decision.Node{Name: n.Name}}
			b.known[n.Name] = k
		}
		if k.seen, there = b.updates, there+1; k.cached != n {
			k.cached, changed[n.Name] = n, true
		}
	}
	if there < len(b.known) {
		for name, k := range b.known {
			if k.seen != b.updates && k.cached != nil {
				k.cached, changed[name] = nil, true
			}
		}
	}
	b.laid = v.names(kindNode)
	over := make(map[string]*corev1.Node, len(b.laid))
	for name := range b.laid {
		changed[name] = true
		if k := b.known[name]; k != nil && k.cached != nil {
			over[name] = k.cached
		}
	}
	lay(v, kindNode, over)
	gone := false
	for name := range changed {
		k := b.known[name]
		if k == nil {
			k = &readNode{Node: decision.Node{Name: name}}
			b.known[name] = k
		}
		is := k.cached
		if b.laid[name] {
			is = over[name]
		}
		was := k.object
		k.object = is
		switch {
		case is == nil:
			gone = gone || was != nil
			delete(b.objects, name)
			if k.cached == nil {
				delete(b.known, name)
			}
		case is != was:
			k.Node = nodeFrom(is)
			b.objects[name] = is
			if was == nil {
				at, _ := slices.BinarySearchFunc(b.order, name, func(k *readNode, name string) int { return strings.Compare(k.Name, name) })
				b.order = slices.Insert(b.order, at, k)
			}
		}
	}
	if gone {
		b.order = slices.DeleteFunc(b.order, func(k *readNode) bool { return k.object == nil })
	}
}

// nodeFrom returns a Node's claims, with times by the clocks of others, and without the state of its
// drain.
func nodeFrom(n *corev1.Node) decision.Node {
	a := n.Annotations
	out := decision.Node{
		Name: n.Name, Created: n.CreationTimestamp.Time, Role: roleOf(n), Ready: readiness.Node(n), ProviderID: keyOf(n), Kubelet: n.Status.NodeInfo.KubeletVersion, BootID: n.Status.NodeInfo.BootID,
		Image: a[v1alpha1.AnnotationImage], Components: a[v1alpha1.AnnotationComponents],
		Group: a[v1alpha1.AnnotationGroup], OldNode: a[v1alpha1.AnnotationDonor],
		Replacement: a[v1alpha1.AnnotationHeir], Obsolete: a[v1alpha1.AnnotationObsolete] == "true", OnHold: a[v1alpha1.AnnotationHeld] == "true", RetryRequest: a[v1alpha1.AnnotationRetry], InPlaceLabel: n.Labels[v1alpha1.LabelInPlace] == "true",
	}
	out.Unlabeled = out.Role != v1alpha1.ControlPlaneRole
	if n.Spec.Unschedulable {
		out.Cordon = decision.CordonedByOthers
		if since, ok := a[v1alpha1.AnnotationCordoned]; ok {
			out.Cordon, out.CordonedSince = decision.CordonedByUs, stamp(since)
		}
	}
	out.PostponedUntil = stamp(a[v1alpha1.AnnotationPostponed])
	return out
}

// keyOf returns the cloud.Key of a Node's machine, as the Node claims.
func keyOf(n *corev1.Node) string {
	return cloud.Key(n.Spec.ProviderID, n.Annotations[v1alpha1.AnnotationIncarnation])
}

// stamp parses a time in our format; zero if it is not valid.
func stamp(s string) time.Time {
	t, err := time.Parse(time.RFC3339, s)
	if err != nil {
		return time.Time{}
	}
	return t
}

// componentVersions returns the Kubernetes versions of the components that matter. The
// ConfigMaps never change, so each is read once.
func (r *nodeVersions) componentVersions(ctx context.Context, nv *v1alpha1.NodeVersion) (map[string]string, error) {
	out := map[string]string{}
	j := nv.Status.JoinComponents
	for _, name := range []string{nv.Spec.KubernetesComponentsReference, j.ControlPlane, j.Worker} {
		if name == "" {
			continue
		}
		if _, ok := r.versions[name]; !ok {
			c, err := r.readComponents(ctx, name)
			if apierrors.IsNotFound(err) {
				continue
			}
			if err != nil {
				return nil, err
			}
			r.versions[name] = c.version
		}
		out[name] = r.versions[name]
	}
	return out, nil
}

// hostView has the last answers of this host's agent. It is safe for concurrent use.
type hostView struct {
	mu       sync.Mutex
	members  []decision.Member
	heard    time.Time // time of the request for members
	outdated bool      // we have changed them since
	latest   decision.UpgradeRun
	runKnown bool
	images   decision.Addons
	imagesAt time.Time           // when they were read
	addonRun decision.UpgradeRun // latest, of add-ons
	answer   decision.UpgradeRun // of another host's agent, about the run that answered names
	answered string
	tag      string // etcd.local.imageTag of ConfigMap kubeadm-config
	tagRead  time.Time
}

// Members are listed again after freshMembers while control planes join or leave. After staleMembers
// the list no longer counts.
const (
	freshMembers = 2 * time.Second
	staleMembers = time.Minute
)

func (h *hostView) etcd(now time.Time) []decision.Member {
	h.mu.Lock()
	defer h.mu.Unlock()
	if now.Sub(h.heard) > staleMembers {
		return nil
	}
	return h.members
}

// fresh reports whether the list of members is fresh enough for a change.
func (h *hostView) fresh(now time.Time, within time.Duration) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return !h.outdated && now.Sub(h.heard) <= within
}

func (h *hostView) outdate() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.outdated = true
}

// lastEtcd returns the members as last listed.
func (h *hostView) lastEtcd() []decision.Member {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.members
}

// setMembers replaces the list. A member that does not answer at the moment keeps its version: it
// restarts, and reports the new one then.
func (h *hostView) setMembers(m []decision.Member, asked time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for i := range m {
		if m[i].Version != "" {
			continue
		}
		for _, before := range h.members {
			if before.Node == m[i].Node && before.Address == m[i].Address {
				m[i].Version, m[i].Storage = before.Version, before.Storage
			}
		}
	}
	h.members, h.heard, h.outdated = m, asked, false
}

// etcdTag returns the tag of etcd's image in kubeadm's configuration. One that was read long ago, for
// an earlier control plane, counts as not read.
func (h *hostView) etcdTag(now time.Time) (tag string, read bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.tag, now.Sub(h.tagRead) < staleMembers
}

// tagAge returns how long ago the tag was read.
func (h *hostView) tagAge(now time.Time) time.Duration {
	h.mu.Lock()
	defer h.mu.Unlock()
	return now.Sub(h.tagRead)
}

func (h *hostView) setEtcdTag(tag string, read time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.tag, h.tagRead = tag, read
}

// run returns the latest run; known is false before it was asked for.
func (h *hostView) run() (latest decision.UpgradeRun, known bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.latest, h.runKnown
}

func (h *hostView) setRun(r decision.UpgradeRun) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.latest, h.runKnown = r, true
}

// claims returns the machines that Nodes and intents name. Claims of impostors do not count.
func (o *observed) claims() map[string]claim {
	out := make(map[string]claim, len(o.Nodes))
	for i := range o.Nodes {
		if n := &o.Nodes[i]; n.ProviderID != "" {
			out[n.ProviderID] = claim{ready: n.Ready}
		}
	}
	tokens := o.find().ByToken
	for _, in := range o.Intents {
		if m := tokens[in.Token]; m != nil {
			out[m.ID] = claim{ready: out[m.ID].ready}
		}
		if in.Machine != "" {
			s := out[in.Machine]
			s.leaves = s.leaves || in.Goal == v1alpha1.LeaveGoal
			s.name = in.Node
			out[in.Machine] = s
		}
	}
	for id := range out {
		if !strings.Contains(id, "://") { // not the ID of a machine in a cloud
			delete(out, id)
		}
	}
	return out
}

// current returns our last write of an object that the cache may not show yet; a typed
// nil if it was deleted.
func (v *view) current(kind, name string) client.Object {
	v.mu.Lock()
	defer v.mu.Unlock()
	w, ok := v.own[viewKey{kind, name}]
	if !ok {
		return nil
	}
	if w.object == nil {
		return (*v1alpha1.PendingNode)(nil)
	}
	return w.object
}
