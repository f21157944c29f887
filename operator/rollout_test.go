package operator

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"constellation/engine/cloud"
	"constellation/engine/component"
	"constellation/operator/api/upgradev1"
	"constellation/operator/api/v1alpha1"
	"constellation/operator/decision"
	"constellation/operator/readiness"
	"constellation/operator/replica"
)

// cloudInTest is a fake cloud for the operator's tests. Its machines are Nodes that run nothing, and
// agents and etcd are lists. It checks requests against the invariants of a rollout, and injects
// the faults of its fields. It is safe for concurrent use.
type cloudInTest struct {
	t     *testing.T
	admin client.Client
	now   func() time.Time // of everybody

	mu        sync.Mutex
	groups    []cloud.Group
	instances map[string]*cloud.Instance
	byToken   map[string]string // ID
	next      int
	shall     int // machines without surge
	surge     int
	leader    string
	members   map[string]time.Time // voters by node, and since when
	listed    map[string]bool      // IDs
	run       decision.UpgradeRun
	calls     map[string]int
	breaches  []string
	stopped   bool // the scenario has ended

	applying chan struct{} // if not nil, upgrades of Kubernetes stay in progress until it is closed

	// faults
	fail        func(verb string) error // before anything happens; nil: works
	createLies  int                     // number of creates that succeed but return a timeout
	deleteLost  int                     // number of deletes that are accepted and lost
	partial     bool                    // two of three lists lack half, one of them with an error
	lists       int
	neverJoin   map[string]bool // groups
	joinLate    time.Duration
	joinTime    time.Duration // from its ticket to its Node
	hidden      string        // a group that lists no longer contain
	wrongJoin   int           // number of machines that join with other components
	upgradeFail int

	work sync.WaitGroup
}

const bootTime, endTime = 60 * time.Millisecond, 60 * time.Millisecond

func (c *cloudInTest) breach(format string, args ...any) {
	c.breaches = append(c.breaches, fmt.Sprintf(format, args...))
}

func (c *cloudInTest) enter(verb string) error {
	c.mu.Lock()
	c.calls[verb]++
	fail := c.fail
	c.mu.Unlock()
	if fail != nil {
		return fail(verb)
	}
	return nil
}

func (c *cloudInTest) Groups(context.Context) ([]cloud.Group, error) {
	if err := c.enter("groups"); err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(c.groups), func(g cloud.Group) bool { return g.ID == c.hidden }), nil
}

func (c *cloudInTest) Instances(context.Context) ([]cloud.Instance, error) {
	if err := c.enter("list"); err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	var all []cloud.Instance
	for _, id := range slices.Sorted(maps.Keys(c.instances)) {
		if i := c.instances[id]; i.State != cloud.Terminated {
			all = append(all, *i)
			c.listed[id] = true
		}
	}
	if c.partial {
		c.lists++
		half := all[:len(all)/2]
		if c.lists%2 == 0 {
			half = all[len(all)/2:]
		}
		switch c.lists % 3 {
		case 0:
			return half, cloud.ErrPartial
		case 1:
			return half, nil
		}
	}
	return all, nil
}

func (c *cloudInTest) Instance(_ context.Context, id string) (cloud.Instance, error) {
	if err := c.enter("get"); err != nil {
		return cloud.Instance{}, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	i := c.instances[id]
	if i == nil || i.State == cloud.Terminated {
		return cloud.Instance{}, fmt.Errorf("read instance %s: %w", id, cloud.ErrNotFound)
	}
	return *i, nil
}

// Describe implements describer.
func (c *cloudInTest) Describe(_ context.Context, ids []string) (found []cloud.Instance, err error) {
	if err := c.enter("describe"); err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, id := range ids {
		if i := c.instances[id]; i != nil && i.State != cloud.Terminated {
			found = append(found, *i)
		}
	}
	return found, nil
}

func (c *cloudInTest) SetGroupImage(_ context.Context, id, image string) error {
	if err := c.enter("image"); err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if id == c.hidden {
		return fmt.Errorf("set image of %s: %w", id, cloud.ErrNotFound)
	}
	for i := range c.groups {
		if c.groups[i].ID == id {
			c.groups[i].Image = image
		}
	}
	return nil
}

func (c *cloudInTest) group(id string) cloud.Group {
	i := slices.IndexFunc(c.groups, func(g cloud.Group) bool { return g.ID == id })
	return c.groups[i]
}

// alive counts the machines that the owner pays for.
func (c *cloudInTest) alive() (n int) {
	for _, i := range c.instances {
		if i.State != cloud.Terminated {
			n++
		}
	}
	return n
}

func (c *cloudInTest) CreateInstances(_ context.Context, group string, tokens []string) ([]cloud.Instance, error) {
	if err := c.enter("create"); err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if group == c.hidden {
		return nil, fmt.Errorf("create in %s: %w", group, cloud.ErrNotFound)
	}
	g := c.group(group)
	var made []cloud.Instance
	for _, token := range tokens {
		if id, ok := c.byToken[token]; ok {
			made = append(made, *c.instances[id])
			continue
		}
		if !c.intended(token) {
			c.breach("machine created for token %s, which no PendingNode has", token)
		}
		made = append(made, c.add(g, token))
	}
	if n := c.alive(); n > c.shall+c.surge {
		c.breach("%d machines, want %d and at most %d more", n, c.shall, c.surge)
	}
	if c.createLies > 0 {
		c.createLies--
		return nil, fmt.Errorf("create in %s: %w", group, context.DeadlineExceeded)
	}
	return made, nil
}

func (c *cloudInTest) intended(token string) bool {
	var l v1alpha1.PendingNodeList
	if err := c.admin.List(context.Background(), &l); err != nil {
		return true // nothing can be checked while the API server is unavailable
	}
	return slices.ContainsFunc(l.Items, func(p v1alpha1.PendingNode) bool { return p.Spec.Token == token })
}

// add creates a machine; the caller holds mu.
func (c *cloudInTest) add(g cloud.Group, token string) cloud.Instance {
	c.next++
	name := fmt.Sprintf("%s-%d", strings.ToLower(g.Name), c.next)
	i := &cloud.Instance{
		Name: name, ProviderID: "sandbox://t/" + name, Group: g.ID, Role: g.Role, Image: g.Image, Token: token, State: cloud.Creating, Created: c.now(),
	}
	c.instances[i.ProviderID] = i
	if token != "" {
		c.byToken[token] = i.ProviderID
		late := c.joinLate
		c.work.Go(func() { c.boot(i, late) })
	}
	return *i
}

// boot joins a machine as in a real cluster: a JoiningNode, a Node, and then it is Ready.
func (c *cloudInTest) boot(i *cloud.Instance, late time.Duration) {
	time.Sleep(bootTime + late)
	c.mu.Lock()
	never := c.neverJoin[i.Group]
	lives := i.State == cloud.Creating && !c.stopped
	if lives {
		i.State = cloud.Ready
	}
	wrong := lives && !never && c.wrongJoin > 0
	if wrong {
		c.wrongJoin--
	}
	c.mu.Unlock()
	if lives && !never {
		c.join(i, wrong)
	}
}

// join creates the Node of a machine; wrong gives it other components than those of its role.
func (c *cloudInTest) join(i *cloud.Instance, wrong bool) {
	c.persist("join "+i.Name, func(ctx context.Context) error {
		var nv v1alpha1.NodeVersion
		if err := c.admin.Get(ctx, client.ObjectKey{Name: v1alpha1.NodeVersionName}, &nv); err != nil {
			return err
		}
		ref := nv.Status.JoinComponents.Worker
		if i.Role == cloud.ControlPlane {
			ref = nv.Status.JoinComponents.ControlPlane
		}
		if wrong {
			ref = refA
		}
		err := c.admin.Create(ctx, &v1alpha1.JoiningNode{
			ObjectMeta: metav1.ObjectMeta{Name: i.Name},
			Spec: v1alpha1.JoiningNodeSpec{
				Name: i.Name, ComponentsReference: ref, ProviderID: i.ProviderID, IsControlPlane: i.Role == cloud.ControlPlane, Deadline: &metav1.Time{Time: c.now().Add(20 * time.Minute)},
			},
		})
		return ignoreExists(err)
	})
	time.Sleep(c.joinTime)
	c.register(i, "v1.36.3", nil)
	if i.Role == cloud.ControlPlane {
		c.mu.Lock()
		c.members[i.Name] = time.Now()
		c.mu.Unlock()
	}
}

func ignoreExists(err error) error {
	if apierrors.IsAlreadyExists(err) {
		return nil
	}
	return err
}

// persist retries a request while the API server is unavailable.
func (c *cloudInTest) persist(what string, do func(context.Context) error) {
	deadline := time.Now().Add(time.Minute)
	for {
		err := do(context.Background())
		if err == nil {
			return
		}
		c.mu.Lock()
		stopped := c.stopped
		c.mu.Unlock()
		if stopped || time.Now().After(deadline) {
			if !stopped {
				c.mu.Lock()
				c.breach("%s: %v", what, err)
				c.mu.Unlock()
			}
			return
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// register makes the Node of a machine, Ready.
func (c *cloudInTest) register(i *cloud.Instance, kubelet string, edit func(*corev1.Node)) {
	c.persist("register "+i.Name, func(ctx context.Context) error {
		n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: i.Name, Labels: map[string]string{"kubernetes.io/hostname": i.Name}}, Spec: corev1.NodeSpec{ProviderID: i.ProviderID}}
		if i.Role == cloud.ControlPlane {
			n.Labels["node-role.kubernetes.io/control-plane"] = ""
		}
		if edit != nil {
			edit(n)
		}
		if err := ignoreExists(c.admin.Create(ctx, n)); err != nil {
			return err
		}
		if err := c.admin.Get(ctx, client.ObjectKey{Name: i.Name}, n); err != nil {
			return err
		}
		n.Status.NodeInfo.KubeletVersion = kubelet
		n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
		return c.admin.Status().Update(ctx, n)
	})
}

func (c *cloudInTest) DeleteInstances(ctx context.Context, ids []string) error {
	if err := c.enter("delete"); err != nil {
		return err
	}
	for _, id := range ids {
		c.judgeDelete(id)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.deleteLost > 0 {
		c.deleteLost--
		return nil
	}
	for _, id := range ids {
		c.terminate(id)
	}
	return nil
}

// terminate ends a machine; the caller holds mu.
func (c *cloudInTest) terminate(id string) {
	i := c.instances[id]
	if i == nil || i.State == cloud.Terminating || i.State == cloud.Terminated {
		return
	}
	i.State = cloud.Terminating
	c.work.Go(func() {
		time.Sleep(endTime)
		c.mu.Lock()
		defer c.mu.Unlock()
		i.State = cloud.Terminated
	})
}

// judgeDelete checks that a machine may be deleted: a PendingNode is bound to it, the node is cordoned and
// empty, and its member has left etcd.
func (c *cloudInTest) judgeDelete(id string) {
	ctx := context.Background()
	var pending v1alpha1.PendingNodeList
	var pods corev1.PodList
	if c.admin.List(ctx, &pending) != nil || c.admin.List(ctx, &pods) != nil {
		return // nothing can be checked while the API server is unavailable
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	i := c.instances[id]
	if i == nil || i.State == cloud.Terminating || i.State == cloud.Terminated {
		return
	}
	if !slices.ContainsFunc(pending.Items, func(p v1alpha1.PendingNode) bool {
		return p.Spec.ProviderID == id && p.Spec.Goal == v1alpha1.LeaveGoal
	}) {
		c.breach("%s deleted without a PendingNode that is bound to it", id)
	}
	for _, p := range pods.Items {
		if p.Spec.NodeName == i.Name {
			c.breach("%s deleted with pod %s on it", id, p.Name)
		}
	}
	// A new Node may not be observed yet; it is removed when its machine is gone.
	if since, ok := c.members[i.Name]; ok && time.Since(since) > actMembers {
		c.breach("%s deleted as a member of etcd", id)
	}
}

// hostInTest is the agent of one of the machines of a cloudInTest.
type hostInTest struct {
	*cloudInTest
	node string
}

func (h hostInTest) Members(context.Context) (all []decision.Member, err error) {
	if err := h.enter("members"); err != nil {
		return nil, err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, name := range slices.Sorted(maps.Keys(h.members)) {
		i := h.instances["sandbox://t/"+name]
		all = append(all, decision.Member{Node: name, Voter: true, Healthy: i.State == cloud.Ready, Leader: name == h.leader})
	}
	return all, nil
}

func (h hostInTest) MoveLeader(_ context.Context, from, to string) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.leader == from {
		h.leader = to
	}
	return nil
}

func (h hostInTest) RemoveMember(_ context.Context, node, _ string, voters int) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if _, ok := h.members[node]; !ok {
		return nil
	}
	if len(h.members)-1 < voters || h.leader == node {
		return errors.New("refused")
	}
	delete(h.members, node)
	return nil
}

func (h hostInTest) Run(context.Context) (decision.UpgradeRun, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.run.Node != h.node {
		return decision.UpgradeRun{}, nil
	}
	return h.run, nil
}

func (h hostInTest) UpgradeAddons(context.Context, string, string, string, component.Signed, []string, func(decision.UpgradeRun)) error {
	h.breach("add-ons upgraded that the cluster does not have")
	return errors.New("refused")
}

func (h hostInTest) Upgrade(ctx context.Context, _, version, reference string, list component.Signed, keepKubelet bool, tell func(decision.UpgradeRun)) error {
	if len(list.List) == 0 {
		return errors.New("no components")
	}
	var n corev1.Node
	if err := h.admin.Get(ctx, client.ObjectKey{Name: h.node}, &n); err != nil {
		return err
	}
	h.mu.Lock()
	h.calls["upgrade"]++
	if takesPods := n.Labels[v1alpha1.LabelInPlace] == "true" && len(h.members) > 1; takesPods && !keepKubelet {
		h.breach("the kubelet of %s is replaced while it takes pods", h.node)
	}
	if h.run.Active() && h.run.Node != h.node {
		h.breach("two control planes upgraded at a time")
	}
	if h.run.Phase == "done" && h.run.Version == version {
		h.mu.Unlock()
		return nil
	}
	h.run = decision.UpgradeRun{Version: version, Components: reference, Node: h.node, Phase: "download", Started: time.Now()}
	fails := h.upgradeFail > 0
	if fails {
		h.upgradeFail--
	}
	h.mu.Unlock()
	for _, phase := range []string{"plan", "apply"} {
		h.mu.Lock()
		h.run.Phase, h.run.Line = phase, "[upgrade] "+phase
		run := h.run
		h.mu.Unlock()
		tell(run)
		time.Sleep(20 * time.Millisecond)
	}
	if h.applying != nil {
		<-h.applying
		return nil // the operator that follows the run has ended
	}
	var err error
	h.mu.Lock()
	h.run.Phase, h.run.Ended = "done", time.Now()
	if fails {
		h.run.Phase, h.run.Line, h.run.Ended = "failed", "kubeadm has failed", time.Now().Add(-decision.UpgradeRetry)
		err = errors.New("kubeadm has failed")
	}
	run := h.run
	h.mu.Unlock()
	tell(run)
	return err
}

// rolling is a scenario on a cluster: a cloud, and operators that may be killed.
type rolling struct {
	*cluster
	cloud  *cloudInTest
	writes *writeCounter

	relay   bool   // agents of other machines are reached through relays
	agents  agents // used instead; nil: unreachable
	elects  bool   // operators have to be elected, as they are in a cluster
	mu      sync.Mutex
	host    string          // see onHost
	crashed map[string]bool // points that were reached
	crashes bool
	ahead   time.Duration   // of our clock
	skews   []time.Duration // of the clock of the next operators, in turn
}

// onHost sets where the next operators run; empty: on the first control plane that is not cordoned.
func (r *rolling) onHost(name string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.host = name
}

// now returns the time for the operator and the cloud.
func (r *rolling) now() time.Time {
	r.mu.Lock()
	defer r.mu.Unlock()
	return time.Now().Add(r.ahead)
}

// pass advances that time.
func (r *rolling) pass(d time.Duration) {
	r.t.Helper()
	r.mu.Lock()
	r.ahead += d
	ahead := r.ahead
	r.mu.Unlock()
	// The operator sleeps by the real clock. An event wakes it.
	var nodes corev1.NodeList
	if err := r.admin.List(r.t.Context(), &nodes); err != nil || len(nodes.Items) == 0 {
		r.t.Fatalf("%d nodes, %v", len(nodes.Items), err)
	}
	p := client.RawPatch(types.MergePatchType, fmt.Appendf(nil, `{"metadata":{"annotations":{"example.com/ahead":"%s"}}}`, ahead))
	for i := range nodes.Items {
		_ = r.admin.Patch(r.t.Context(), &nodes.Items[i], p) // it may be gone
	}
}

// writeCounter counts the operator's requests to the API server.
type writeCounter struct {
	mu        sync.Mutex
	all       map[string]int
	requests  int // writes or not, answered or not
	conflicts int // answers
}

func (w *writeCounter) wrap(next http.RoundTripper) http.RoundTripper {
	return roundTripper(func(r *http.Request) (*http.Response, error) {
		w.mu.Lock()
		w.requests++
		w.mu.Unlock()
		if r.Method != http.MethodGet {
			path := strings.Split(strings.TrimPrefix(strings.TrimPrefix(r.URL.Path, "/api/v1/"), "/apis/"), "/")
			key := r.Method + " " + path[0]
			switch {
			case strings.Contains(r.URL.Path, "/events"):
				key = "events"
			case strings.Contains(r.URL.Path, "/leases/"):
				key = "leases"
			case strings.HasSuffix(r.URL.Path, "/eviction"):
				key = "evictions"
			case len(path) > 2 && strings.Contains(path[0], "."):
				key = r.Method + " " + path[2]
				if strings.HasSuffix(r.URL.Path, "/status") {
					key += " status"
				}
			}
			w.mu.Lock()
			w.all[key]++
			w.mu.Unlock()
		}
		resp, err := next.RoundTrip(r)
		if err == nil && resp.StatusCode == http.StatusConflict && !strings.Contains(r.URL.Path, "/leases/") {
			w.mu.Lock()
			w.conflicts++
			w.mu.Unlock()
		}
		return resp, err
	})
}

const rolloutGroupCP, rolloutGroupW = "sandboxes/t/groups/cp", "sandboxes/t/groups/w"

// newRollout creates a cluster of old machines on the API server, from scratch.
func (c *cluster) newRollout(t *testing.T, controlPlanes, workers, surge int) *rolling {
	t.Helper()
	inner := *c
	inner.t = t
	inner.denied = &denials{}
	r := &rolling{cluster: &inner, writes: &writeCounter{all: map[string]int{}}, crashed: map[string]bool{}}
	r.cloud = &cloudInTest{
		t: t, admin: c.admin, now: r.now, instances: map[string]*cloud.Instance{}, byToken: map[string]string{}, members: map[string]time.Time{}, listed: map[string]bool{}, calls: map[string]int{},
		neverJoin: map[string]bool{}, shall: controlPlanes + workers, surge: surge,
		groups: []cloud.Group{
			{ID: rolloutGroupCP, Name: "cp", Role: cloud.ControlPlane, Image: image1, AutoscalerName: "cp"},
			{ID: rolloutGroupW, Name: "w", Role: cloud.Worker, Image: image1, AutoscalerName: "w"},
		},
	}
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(func() {
		r.cloud.mu.Lock()
		r.cloud.stopped = true
		r.cloud.mu.Unlock()
		cancel()
		r.cloud.work.Wait()
		for _, b := range r.cloud.breaches {
			t.Errorf("invariant broken: %s", b)
		}
	})
	for _, o := range []client.Object{&v1alpha1.NodeVersion{}, &v1alpha1.PendingNode{}, &v1alpha1.JoiningNode{}, &v1alpha1.ScalingGroup{}, &v1alpha1.AutoscalingStrategy{}, &corev1.Node{}} {
		if err := c.admin.DeleteAllOf(t.Context(), o); err != nil {
			t.Fatal(err)
		}
	}
	if err := c.admin.DeleteAllOf(t.Context(), &corev1.Pod{}, client.InNamespace("default"), client.GracePeriodSeconds(0)); err != nil {
		t.Fatal(err)
	}
	for ref, v := range map[string]string{refA: "v1.35.4", refB: "v1.36.3"} {
		list, err := json.Marshal(component.List{{Name: "kubeadm"}})
		if err != nil {
			t.Fatal(err)
		}
		m := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: ref, Namespace: "kube-system"}, Data: map[string]string{"cluster-version": v, "components": string(list)}}
		if err := ignoreExists(c.admin.Create(t.Context(), m)); err != nil {
			t.Fatal(err)
		}
	}
	for i := range controlPlanes + workers {
		g := r.cloud.groups[0]
		if i >= controlPlanes {
			g = r.cloud.groups[1]
		}
		r.cloud.mu.Lock()
		made := r.cloud.add(g, "")
		m := r.cloud.instances[made.ProviderID]
		m.State = cloud.Ready
		if g.Role == cloud.ControlPlane {
			r.cloud.members[m.Name], r.cloud.leader = time.Now(), m.Name
		}
		r.cloud.mu.Unlock()
		r.cloud.register(m, "v1.35.4", func(n *corev1.Node) {
			n.Annotations = map[string]string{v1alpha1.AnnotationImage: image1, v1alpha1.AnnotationComponents: refA, v1alpha1.AnnotationGroup: g.ID}
			n.Labels["disk"] = "ssd-" + n.Name
			n.Labels["topology.kubernetes.io/zone"] = "a"
			n.Spec.Taints = []corev1.Taint{{Key: "dedicated", Value: n.Name, Effect: corev1.TaintEffectPreferNoSchedule}}
		})
	}
	r.cloud.work.Go(func() { r.deployments(ctx) })
	old := spec()
	old.Image, old.KubernetesComponentsReference, old.KubernetesClusterVersion = image1, refA, "v1.35.4"
	n := intstr.FromInt32(int32(surge))
	old.Rollout.MaxSurge = &n
	nv := &v1alpha1.NodeVersion{ObjectMeta: metav1.ObjectMeta{Name: v1alpha1.NodeVersionName}, Spec: old}
	r.create(nv)
	nv.Status.JoinComponents = v1alpha1.JoinComponents{ControlPlane: refA, Worker: refA}
	if err := c.admin.Status().Update(t.Context(), nv); err != nil {
		t.Fatal(err)
	}
	return r
}

// deployments replaces the Deployment controller for the autoscaler: it reports the observed
// generation and replicas. It runs no pods.
func (r *rolling) deployments(ctx context.Context) {
	for ; ctx.Err() == nil; time.Sleep(100 * time.Millisecond) {
		var d appsv1.Deployment
		if r.admin.Get(ctx, client.ObjectKey{Namespace: "kube-system", Name: newStrategy().Spec.DeploymentName}, &d) != nil || d.Spec.Replicas == nil {
			continue
		}
		if is := (appsv1.DeploymentStatus{ObservedGeneration: d.Generation, Replicas: *d.Spec.Replicas}); d.Status.ObservedGeneration != is.ObservedGeneration || d.Status.Replicas != is.Replicas {
			d.Status = is
			_ = r.admin.Status().Update(ctx, &d) // seen again in a moment
		}
	}
}

// pod puts a pod on a node; it ends as soon as it is evicted and has none of the finalizers any more.
func (r *rolling) pod(name, node string, finalizers ...string) {
	zero := int64(0)
	r.create(&corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "default", Finalizers: finalizers},
		Spec:       corev1.PodSpec{NodeName: node, TerminationGracePeriodSeconds: &zero, AutomountServiceAccountToken: ptr(false), Containers: []corev1.Container{{Name: "c", Image: "i"}}},
	})
}

// edit changes the spec of the NodeVersion.
func (r *rolling) edit(change func(*v1alpha1.NodeVersionSpec)) {
	r.t.Helper()
	r.eventually("the target is written", func() (string, bool) {
		var nv v1alpha1.NodeVersion
		r.get(v1alpha1.NodeVersionName, &nv)
		change(&nv.Spec)
		err := r.admin.Update(r.t.Context(), &nv)
		return fmt.Sprint(err), err == nil
	})
}

func toNew(s *v1alpha1.NodeVersionSpec) {
	s.Image, s.ImageVersion = image2, "v1.1.0"
	s.KubernetesClusterVersion, s.KubernetesComponentsReference = "v1.36.3", refB
}

// operate runs an operator as if on the first control plane that is not cordoned, and
// starts it again there when it has crashed or left. stop ends it permanently.
func (r *rolling) operate() (stop func()) {
	r.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		for ctx.Err() == nil {
			r.life(ctx)
		}
	}()
	stop = sync.OnceFunc(func() { cancel(); <-done })
	r.t.Cleanup(stop)
	return stop
}

// life is that of one process.
func (r *rolling) life(ctx context.Context) {
	ctx, die := context.WithCancel(ctx)
	defer die()
	node := ""
	var nodes corev1.NodeList
	if r.admin.List(ctx, &nodes) != nil {
		time.Sleep(50 * time.Millisecond)
		return
	}
	r.mu.Lock()
	host := r.host
	r.mu.Unlock()
	for _, n := range nodes.Items {
		if roleOf(&n) == v1alpha1.ControlPlaneRole && !n.Spec.Unschedulable && readiness.Node(&n) && (host == "" || host == n.Name) {
			node = n.Name
			break
		}
	}
	r.mu.Lock()
	skew := time.Duration(0)
	if len(r.skews) > 0 {
		skew = r.skews[0]
		r.skews = append(r.skews[1:], skew)
	}
	r.mu.Unlock()
	access := r.access()
	access.Wrap(r.writes.wrap)
	cfg := Config{
		Cluster: access, Namespace: namespace, Cloud: r.cloud, Node: node, DiscoveryInterval: time.Minute,
		CloudInterval: 100 * time.Millisecond, NoElection: !r.elects, Log: slog.New(slog.NewTextHandler(r.t.Output(), nil)),
		leave: func(context.Context) error { die(); return nil }, now: func() time.Time { return r.now().Add(skew) },
		at: func(point string) {
			r.mu.Lock()
			first := r.crashes && !r.crashed[point]
			r.crashed[point] = true
			r.mu.Unlock()
			if first {
				die()
				<-ctx.Done()
			}
		},
	}
	cfg.Relay, cfg.agents = r.relay, r.agents
	if node != "" {
		cfg.Host = hostInTest{r.cloud, node}
	}
	if err := Run(ctx, cfg); err != nil && ctx.Err() == nil && !r.elects {
		r.t.Errorf("operator ended: %v", err)
		time.Sleep(time.Second)
	}
}

// within waits longer than eventually does.
func (r *rolling) within(limit time.Duration, what string, holds func() (string, bool)) {
	r.t.Helper()
	r.await(50*time.Millisecond, limit, what, holds)
}

// await looks at the given interval.
func (r *rolling) await(interval, limit time.Duration, what string, holds func() (string, bool)) {
	r.t.Helper()
	for deadline := time.Now().Add(limit); ; time.Sleep(interval) {
		is, ok := holds()
		if ok {
			return
		}
		if time.Now().After(deadline) {
			r.t.Fatalf("%s: not so after %s; it is: %s", what, limit, is)
		}
	}
}

// finished waits until every node is at the target and no orphans are left. It looks less often: a look is four requests.
func (r *rolling) finished(image string) {
	r.t.Helper()
	r.await(200*time.Millisecond, 3*time.Minute, "every node is at the target and no orphan is left", func() (string, bool) {
		var (
			nodes   corev1.NodeList
			pending v1alpha1.PendingNodeList
			as      v1alpha1.AutoscalingStrategy
			nv      v1alpha1.NodeVersion
		)
		for _, l := range []client.ObjectList{&nodes, &pending} {
			if err := r.admin.List(r.t.Context(), l); err != nil {
				return err.Error(), false
			}
		}
		r.get(v1alpha1.AutoscalingStrategyName, &as)
		r.get(v1alpha1.NodeVersionName, &nv)
		r.cloud.mu.Lock()
		alive := r.cloud.alive()
		members := len(r.cloud.members)
		r.cloud.mu.Unlock()
		is := fmt.Sprintf("Ready %s, waiting %+v, %+v, %d machines, %d members, autoscaler %v; intents", conditionText(nv.Status, v1alpha1.ConditionReady), nv.Status.Waiting, nv.Status.Nodes, alive, members, as.Spec.Enabled)
		for _, p := range pending.Items {
			is += fmt.Sprintf(" %s %s %s donor=%s", p.Name, p.Spec.Goal, p.Spec.NodeName, p.Spec.Donor)
		}
		ok := len(pending.Items) == 0 && alive == r.cloud.shall && len(nodes.Items) == r.cloud.shall && as.Spec.Enabled && as.Annotations[v1alpha1.AnnotationPaused] == "" &&
			conditionText(nv.Status, v1alpha1.ConditionReady) == "True UpToDate" && nv.Status.ObservedGeneration == nv.Generation
		cps := 0
		for _, n := range nodes.Items {
			ok = ok && n.Annotations[v1alpha1.AnnotationImage] == image && !n.Spec.Unschedulable && n.Annotations[v1alpha1.AnnotationHeir] == ""
			if roleOf(&n) == v1alpha1.ControlPlaneRole {
				cps++
			}
		}
		return is, ok && members == cps
	})
	b, err := json.Marshal(func() v1alpha1.NodeVersionStatus {
		var nv v1alpha1.NodeVersion
		r.get(v1alpha1.NodeVersionName, &nv)
		return nv.Status
	}())
	if err != nil || len(b) > 4096 {
		r.t.Errorf("status of %d bytes, %v", len(b), err)
	}
}

// trial is a scenario for a cluster of its own.
type trial struct {
	name                          string
	controlPlanes, workers, surge int
	run                           func(*testing.T, *rolling)
}

// trials runs scenarios on one real API server, one after the other, with the rights
// of the chart.
func trials(t *testing.T, all []trial) {
	t.Parallel() // they wait most of the time
	c := newCluster(t)
	// No controllers run here that would make it.
	c.create(&corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "default", Namespace: "default"}})
	for _, tt := range all {
		t.Run(tt.name, func(t *testing.T) { tt.run(t, c.newRollout(t, tt.controlPlanes, tt.workers, tt.surge)) })
	}
}

func TestRollout(t *testing.T) {
	trials(t, []trial{
		{name: "control planes first, then workers, and replacement nodes inherit labels and taints", controlPlanes: 3, workers: 3, surge: 2, run: everythingInOrder},
		{name: "a killed operator continues, from each point", controlPlanes: 3, workers: 2, surge: 1, run: killedAtEachPoint},
		{name: "two operators at once", controlPlanes: 3, workers: 4, surge: 2, run: twoOperators},
		{name: "few writes and calls per node", controlPlanes: 1, workers: 24, surge: 8, run: fewWrites},
		{name: "in place, with an operator that is killed at each point", controlPlanes: 3, workers: 4, surge: 2, run: inPlaceKilled},
		{name: "in place, the next leader learns the end of the upgrade of Kubernetes from the agent", controlPlanes: 3, workers: 1, surge: 1, run: nextLeaderAsks},
	})
}

func TestRolloutWithInterventions(t *testing.T) {
	trials(t, []trial{
		{name: "paused, cancelled, and the target changed twice", controlPlanes: 1, workers: 4, surge: 1, run: mindsChange},
		{name: "intents are deleted and a machine vanishes", controlPlanes: 1, workers: 3, surge: 1, run: peopleIntervene},
		{name: "cordons of somebody else stay", controlPlanes: 1, workers: 3, surge: 1, run: foreignCordons},
		{name: "a group and a node are put on hold and resumed", controlPlanes: 1, workers: 3, surge: 1, run: ownersHold},
		{name: "objects are deleted and created again while no operator runs", controlPlanes: 1, workers: 4, surge: 1, run: objectsMadeAnew},
		{name: "a Plan with alone and replacements exclude each other", controlPlanes: 1, workers: 2, surge: 1, run: takeTurns},
		{name: "a Plan upgrades nodes while they are drained for their upgrade in place", controlPlanes: 1, workers: 3, surge: 1, run: sharesDrains},
		{name: "a Plan gives way to an upgrade in place between two nodes", controlPlanes: 1, workers: 3, surge: 1, run: givesWay},
		{name: "somebody changes every object all the time", controlPlanes: 1, workers: 4, surge: 2, run: conflicts},
		{name: "generic tools follow it", controlPlanes: 1, workers: 1, surge: 1, run: genericToolsFollow},
	})
}

func TestRolloutWithFaults(t *testing.T) {
	trials(t, []trial{
		{name: "a cloud that fails, times out after success, and loses requests", controlPlanes: 1, workers: 4, surge: 2, run: badCloud},
		{name: "a cloud that seldom lists all machines", controlPlanes: 1, workers: 4, surge: 2, run: partialLists},
		{name: "a machine that joins with other components is given up", controlPlanes: 1, workers: 2, surge: 1, run: badMachines},
		{name: "a machine that joins too late is given up", controlPlanes: 1, workers: 2, surge: 1, run: lateMachine},
		{name: "a machine that never joins is given up, and other nodes are replaced first", controlPlanes: 1, workers: 2, surge: 1, run: lostMachine},
		{name: "a group is missing from the cloud for a while, and another appears", controlPlanes: 1, workers: 2, surge: 1, run: groupsChange},
		{name: "the API server is unavailable for ten minutes, and the lease is lost", controlPlanes: 1, workers: 3, surge: 1, run: apiServerAwayForLong},
		{name: "the clocks of operators are half an hour off", controlPlanes: 1, workers: 3, surge: 1, run: clocksDiffer},
		{name: "the API server is unavailable", controlPlanes: 1, workers: 3, surge: 1, run: apiServerAway},
	})
}

// takeTurns: a Plan holds the node lock while its Job runs, so no replacement starts. Then
// replacements hold the lock, and the next Plan waits.
func takeTurns(t *testing.T, r *rolling) {
	const ns = "turns"
	admin := r.carryOutPlans(ns)
	// Here no label gives the name of a node to its pods.
	named := func() {
		t.Helper()
		var nodes corev1.NodeList
		if err := admin.List(t.Context(), &nodes); err != nil {
			t.Fatal(err)
		}
		for _, n := range nodes.Items {
			patch := client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"labels":{"kubernetes.io/hostname":"`+n.Name+`"}}}`))
			if err := client.IgnoreNotFound(admin.Patch(t.Context(), &n, patch)); err != nil {
				t.Fatal(err)
			}
		}
	}
	begin := func(name string) {
		t.Helper()
		r.eventually("Plan "+name+" is accepted", func() (string, bool) {
			err := admin.Create(t.Context(), &upgradev1.Plan{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: name}, Spec: upgradev1.PlanSpec{
				Concurrency: 1, Version: "v1", NodeSelector: &metav1.LabelSelector{}, Upgrade: &upgradev1.ContainerSpec{Image: "i"}, Constellation: &upgradev1.Rollout{Alone: true},
			}})
			return fmt.Sprint(err), err == nil || apierrors.IsAlreadyExists(err)
		})
	}
	job := func(plan string) *batchv1.Job {
		t.Helper()
		var found *batchv1.Job
		r.eventually("Plan "+plan+" has a Job", func() (string, bool) {
			var jobs batchv1.JobList
			err := admin.List(t.Context(), &jobs, client.InNamespace(ns), client.MatchingLabels{upgradev1.LabelPlan: plan})
			if len(jobs.Items) > 0 {
				found = &jobs.Items[0]
			}
			var p upgradev1.Plan
			err = errors.Join(err, admin.Get(t.Context(), client.ObjectKey{Namespace: ns, Name: plan}, &p))
			return fmt.Sprint(err, p.Status), found != nil
		})
		return found
	}

	// No node is drained before the test permits it.
	var nodes corev1.NodeList
	if err := admin.List(t.Context(), &nodes); err != nil {
		t.Fatal(err)
	}
	for _, n := range nodes.Items {
		r.pod("stays-on-"+n.Name, n.Name, "example.com/test")
	}
	release := func() {
		t.Helper()
		for _, n := range nodes.Items {
			p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "stays-on-" + n.Name}}
			if err := client.IgnoreNotFound(admin.Patch(t.Context(), p, client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`)))); err != nil {
				t.Error(err)
			}
		}
	}
	named()
	begin("first")
	running := job("first")
	r.edit(toNew)
	r.operate()
	r.eventually("replacements wait for the Plan", func() (string, bool) {
		var nv v1alpha1.NodeVersion
		r.get(v1alpha1.NodeVersionName, &nv)
		w := nv.Status.Waiting
		return fmt.Sprintf("%+v", w), w != nil && w.Reason == "NodesTaken" && w.Message == "waiting for plan turns/first, which holds the node lock"
	})
	var intents v1alpha1.PendingNodeList
	var strategy v1alpha1.AutoscalingStrategy
	if err := r.admin.List(t.Context(), &intents); err != nil || len(intents.Items) > 0 || r.get(v1alpha1.AutoscalingStrategyName, &strategy) && !strategy.Spec.Enabled {
		t.Errorf("something has started: %v, %d intents, autoscaler %+v", err, len(intents.Items), strategy.Spec)
	}
	// The Plan ends with the only node that it is for.
	r.eventually("the Plan is for no more nodes", func() (string, bool) {
		var p upgradev1.Plan
		err := admin.Get(t.Context(), client.ObjectKey{Namespace: ns, Name: "first"}, &p)
		if err == nil {
			p.Spec.NodeSelector.MatchLabels = map[string]string{corev1.LabelHostname: running.Spec.Template.Spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms[0].MatchExpressions[0].Values[0]}
			err = admin.Update(t.Context(), &p)
		}
		return fmt.Sprint(err), err == nil
	})
	now := metav1.Now()
	running.Status = batchv1.JobStatus{Succeeded: 1, StartTime: &now, CompletionTime: &now, Conditions: []batchv1.JobCondition{
		{Type: batchv1.JobSuccessCriteriaMet, Status: corev1.ConditionTrue}, {Type: batchv1.JobComplete, Status: corev1.ConditionTrue},
	}}
	if err := admin.Status().Update(t.Context(), running); err != nil {
		t.Fatal(err)
	}
	r.eventually("replacements begin", func() (string, bool) {
		err := r.admin.List(t.Context(), &intents)
		return fmt.Sprint(err), len(intents.Items) > 0
	})
	begin("second")
	r.eventually("the next Plan waits for replacements", func() (string, bool) {
		var p upgradev1.Plan
		err := admin.Get(t.Context(), client.ObjectKey{Namespace: ns, Name: "second"}, &p)
		text := fmt.Sprint(err, p.Status.Conditions)
		return text, strings.Contains(text, "waiting for node replacements, which holds the node lock")
	})
	release()
	r.eventually("all nodes are at the target", func() (string, bool) {
		var nv v1alpha1.NodeVersion
		r.get(v1alpha1.NodeVersionName, &nv)
		text := conditionText(nv.Status, v1alpha1.ConditionReady)
		return text, text == "True UpToDate" && nv.Status.ObservedGeneration == nv.Generation
	})
	named()
	job("second")
}

func everythingInOrder(t *testing.T, r *rolling) {
	var nodes corev1.NodeList
	if err := r.admin.List(t.Context(), &nodes); err != nil {
		t.Fatal(err)
	}
	for i, n := range nodes.Items {
		r.pod(fmt.Sprintf("pod-%d", i), n.Name)
	}
	r.operate()
	r.eventually("no work is left", func() (string, bool) {
		var nv v1alpha1.NodeVersion
		r.get(v1alpha1.NodeVersionName, &nv)
		return conditionText(nv.Status, v1alpha1.ConditionReady), conditionText(nv.Status, v1alpha1.ConditionReady) == "True UpToDate"
	})
	stop := r.watch(t)
	r.edit(toNew)
	r.finished(image2)
	stop()
	if err := r.admin.List(t.Context(), &nodes); err != nil {
		t.Fatal(err)
	}
	for _, n := range nodes.Items {
		oldNode := n.Annotations[v1alpha1.AnnotationDonor]
		if n.Labels["disk"] != "ssd-"+oldNode || n.Labels["kubernetes.io/hostname"] != n.Name || n.Labels["topology.kubernetes.io/zone"] != "" {
			t.Errorf("%s replaces %s and has labels %v", n.Name, oldNode, n.Labels)
		}
		if !slices.ContainsFunc(n.Spec.Taints, func(t corev1.Taint) bool { return t.Key == "dedicated" && t.Value == oldNode }) {
			t.Errorf("%s replaces %s and has taints %v", n.Name, oldNode, n.Spec.Taints)
		}
	}
	if n := r.cloud.calls["upgrade"]; n != 1 {
		t.Errorf("Kubernetes was upgraded %d times", n)
	}
	var events corev1.EventList
	if err := r.admin.List(t.Context(), &events); err != nil {
		t.Fatal(err)
	}
	told := map[string]bool{}
	for _, e := range events.Items {
		told[e.Reason] = true
	}
	for _, reason := range []string{"ReplacementBegins", "Replaces", "Cordoned", "Drained", "Leaves", "Deleted", "UpgradeStarted", "UpgradeCompleted", "UpToDate"} {
		if !told[reason] {
			t.Errorf("no event %s among %v", reason, slices.Sorted(maps.Keys(told)))
		}
	}
}

// watch checks invariants continuously: no worker is changed before the last control plane is at the
// target, and only one control plane at a time.
func (r *rolling) watch(t *testing.T) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		for ctx.Err() == nil {
			var nodes corev1.NodeList
			if r.admin.List(ctx, &nodes) == nil {
				old, cordoned, worker := 0, 0, 0
				for _, n := range nodes.Items {
					switch cp := roleOf(&n) == v1alpha1.ControlPlaneRole; {
					case cp && n.Annotations[v1alpha1.AnnotationImage] == image1:
						old++
						if n.Spec.Unschedulable {
							cordoned++
						}
					case !cp && (n.Spec.Unschedulable || n.Annotations[v1alpha1.AnnotationDonor] != ""):
						worker++
					}
				}
				if cordoned > 1 {
					t.Errorf("%d control planes cordoned at a time", cordoned)
				}
				if old > 0 && worker > 0 {
					t.Errorf("%d workers changed while %d control planes are old", worker, old)
				}
			}
			time.Sleep(10 * time.Millisecond)
		}
	}()
	stop = sync.OnceFunc(func() { cancel(); <-done })
	t.Cleanup(stop)
	return stop
}

func killedAtEachPoint(t *testing.T, r *rolling) {
	r.pod("pod-0", "w-4")
	r.crashes = true
	r.edit(toNew)
	r.operate()
	r.finished(image2)
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, kind := range []decision.ActionKind{
		decision.PauseAutoscaler, decision.ResumeAutoscaler, decision.SetGroupImage, decision.RecordIntent, decision.BindIntent, decision.ClearIntent, decision.CreateInstance, decision.AdoptReplacement, decision.CordonNode, decision.DrainNode,
		decision.YieldLease, decision.MoveLeader, decision.RemoveMember, decision.DeleteInstance, decision.DeleteNode, decision.StartUpgrade, decision.PublishComponents,
	} {
		for _, when := range []string{"before:", "after:"} {
			if !r.crashed[when+kind.String()] {
				t.Errorf("never reached %s%s", when, kind.String())
			}
		}
	}
	// A finished run is not started again.
	if n := r.cloud.calls["upgrade"]; n > 3 {
		t.Errorf("Kubernetes was upgraded %d times", n)
	}
}

func twoOperators(t *testing.T, r *rolling) {
	r.edit(toNew)
	r.operate()
	r.operate()
	r.finished(image2)
}

func mindsChange(t *testing.T, r *rolling) {
	r.cloud.joinLate = 200 * time.Millisecond
	r.operate()
	r.edit(toNew)
	count := func(image string) (n int) {
		var nodes corev1.NodeList
		if err := r.admin.List(t.Context(), &nodes); err != nil {
			t.Fatal(err)
		}
		for _, n_ := range nodes.Items {
			if n_.Annotations[v1alpha1.AnnotationImage] == image {
				n++
			}
		}
		return n
	}
	r.within(30*time.Second, "two are new", func() (string, bool) { n := count(image2); return fmt.Sprint(n), n >= 2 })
	settled := func(reason string) {
		t.Helper()
		r.within(30*time.Second, "nothing changes: "+reason, func() (string, bool) {
			var nv v1alpha1.NodeVersion
			var l v1alpha1.PendingNodeList
			r.get(v1alpha1.NodeVersionName, &nv)
			if err := r.admin.List(t.Context(), &l); err != nil {
				t.Fatal(err)
			}
			is := readyCondition(nv.Status).Reason
			return fmt.Sprintf("%s, %d intents", is, len(l.Items)), is == reason && len(l.Items) == 0
		})
	}
	r.edit(func(s *v1alpha1.NodeVersionSpec) { s.Rollout.Paused = true })
	settled("Paused")
	before := count(image2)
	if before == 5 {
		t.Fatal("nothing was left to pause")
	}
	time.Sleep(300 * time.Millisecond)
	if n := count(image2); n != before {
		t.Errorf("%d new nodes became %d while paused", before, n)
	}
	r.edit(func(s *v1alpha1.NodeVersionSpec) { s.Rollout.Paused, s.Rollout.Cancel = false, true })
	settled("Cancelled")
	r.eventually("the autoscaler is resumed", func() (string, bool) {
		var as v1alpha1.AutoscalingStrategy
		r.get(v1alpha1.AutoscalingStrategyName, &as)
		return fmt.Sprint(as.Spec.Enabled), as.Spec.Enabled
	})
	// Back to the old image, then to the new one, while machines are joining.
	r.edit(func(s *v1alpha1.NodeVersionSpec) { s.Rollout.Cancel = false })
	r.within(30*time.Second, "the rollout continues", func() (string, bool) { n := count(image2); return fmt.Sprint(n), n > before })
	r.edit(func(s *v1alpha1.NodeVersionSpec) { s.Image = image1 })
	r.within(30*time.Second, "the rollout returns to the old target", func() (string, bool) { n := count(image1); return fmt.Sprint(n), n >= 3 })
	r.edit(func(s *v1alpha1.NodeVersionSpec) { s.Image = image2 })
	r.finished(image2)
}

func badCloud(t *testing.T, r *rolling) {
	r.cloud.fail = func(string) error { // a seed could not reproduce the order of goroutines
		switch rand.N(16) {
		case 0:
			return fmt.Errorf("too many requests: %w", cloud.ErrThrottled)
		case 1, 2, 3:
			return fmt.Errorf("HTTP 500: %w", cloud.ErrUnavailable)
		}
		return nil
	}
	r.cloud.createLies, r.cloud.deleteLost = 2, 2
	r.operate()
	r.edit(toNew)
	r.finished(image2)
	if r.cloud.createLies+r.cloud.deleteLost != 0 {
		t.Errorf("%d timeouts and %d losses were not injected", r.cloud.createLies, r.cloud.deleteLost)
	}
	if n := len(r.cloud.byToken); n != 5 {
		t.Errorf("%d machines were created for 5 nodes", n)
	}
}

func badMachines(t *testing.T, r *rolling) {
	r.cloud.mu.Lock()
	r.cloud.wrongJoin = 1 // the first control plane that joins has the old components
	r.cloud.mu.Unlock()
	r.operate()
	r.edit(toNew)
	r.finished(image2)
	if n := len(r.cloud.byToken); n != 4 {
		t.Errorf("%d machines were created; want one for each of 3 nodes, and one for that which joined with other components", n)
	}
}

// noIntents waits until nothing is in progress.
func (r *rolling) noIntents() {
	r.t.Helper()
	r.within(60*time.Second, "no intent is left", func() (string, bool) {
		var l v1alpha1.PendingNodeList
		if err := r.admin.List(r.t.Context(), &l); err != nil {
			r.t.Fatal(err)
		}
		return fmt.Sprintf("%+v", l.Items), len(l.Items) == 0
	})
}

// outOfTime exceeds the deadline of the first new worker before it has joined. When it is bound to
// leave, outOfTime returns it and its old node's name. The cloud deletes nothing meanwhile.
func (r *rolling) outOfTime() (m *cloud.Instance, oldNode string) {
	r.t.Helper()
	r.cloud.mu.Lock()
	r.cloud.neverJoin[rolloutGroupW] = true
	r.cloud.fail = func(verb string) error {
		if verb == "delete" && m != nil {
			return fmt.Errorf("delete: %w", cloud.ErrUnavailable)
		}
		return nil
	}
	r.cloud.mu.Unlock()
	r.operate()
	r.edit(toNew)
	r.within(60*time.Second, "a new worker runs and has not joined", func() (string, bool) {
		r.cloud.mu.Lock()
		defer r.cloud.mu.Unlock()
		for _, i := range r.cloud.instances {
			if i.Group == rolloutGroupW && i.Token != "" && i.State == cloud.Ready && r.cloud.listed[i.ProviderID] {
				m = i
			}
		}
		return fmt.Sprint(len(r.cloud.byToken), " were created"), m != nil
	})
	// It is not given up before its deadline.
	r.pass(decision.JoinDeadline - time.Minute)
	r.within(10*time.Second, "the operator waits for the machine", func() (string, bool) {
		var nv v1alpha1.NodeVersion
		r.get(v1alpha1.NodeVersionName, &nv)
		w := nv.Status.Waiting
		return fmt.Sprintf("%+v", w), w != nil && w.Reason == "MachineJoins" && w.NextTry != nil && w.NextTry.Sub(r.now()) < 2*time.Minute
	})
	var p v1alpha1.PendingNode
	if !r.get("replace-0", &p) || p.Spec.Goal != v1alpha1.JoinGoal {
		r.t.Fatalf("its intent is %+v", p.Spec)
	}
	oldNode = p.Spec.Donor
	r.pass(2 * time.Minute)
	r.within(30*time.Second, "the intent is bound to the machine's removal", func() (string, bool) {
		r.get("replace-0", &p)
		return fmt.Sprintf("%+v", p.Spec), p.Spec.Goal == v1alpha1.LeaveGoal && p.Spec.ProviderID == m.ProviderID
	})
	return m, oldNode
}

// givenUp waits until a machine is gone, and checks that its old node is as it was.
func (r *rolling) givenUp(m *cloud.Instance, oldNode string) {
	r.t.Helper()
	r.cloud.mu.Lock()
	r.cloud.fail, r.cloud.neverJoin = nil, map[string]bool{}
	r.cloud.mu.Unlock()
	r.within(30*time.Second, "its machine and its Node are deleted", func() (string, bool) {
		r.cloud.mu.Lock()
		defer r.cloud.mu.Unlock()
		return string(m.State), m.State == cloud.Terminated && !r.get(m.Name, &corev1.Node{})
	})
	var n corev1.Node
	if !r.get(oldNode, &n) || n.Spec.Unschedulable || n.Annotations[v1alpha1.AnnotationHeir] != "" || n.Annotations[v1alpha1.AnnotationPostponed] == "" {
		r.t.Errorf("%s must be postponed and is %+v with %v", oldNode, n.Spec, n.Annotations)
	}
	// The other worker comes first.
	r.within(60*time.Second, "the other worker is replaced", func() (string, bool) {
		var l corev1.NodeList
		if err := r.admin.List(r.t.Context(), &l); err != nil {
			r.t.Fatal(err)
		}
		old := 0
		for _, n := range l.Items {
			if n.Annotations[v1alpha1.AnnotationImage] != image2 {
				old++
			}
		}
		return fmt.Sprint(old, " are old"), old == 1 && r.get(oldNode, &n)
	})
	r.noIntents()
	r.pass(decision.Postponement)
	r.finished(image2)
	if n := len(r.cloud.byToken); n != 4 {
		r.t.Errorf("%d machines were created; want one for each of 3 nodes, and one that was given up", n)
	}
}

func lateMachine(_ *testing.T, r *rolling) {
	m, oldNode := r.outOfTime()
	r.cloud.join(m, false)
	r.givenUp(m, oldNode)
}

func lostMachine(_ *testing.T, r *rolling) { r.givenUp(r.outOfTime()) }

func partialLists(t *testing.T, r *rolling) {
	r.cloud.partial = true
	r.operate()
	r.edit(toNew)
	r.finished(image2)
	if n := len(r.cloud.byToken); n != 5 {
		t.Errorf("%d machines were created for 5 nodes", n)
	}
}

func conflicts(t *testing.T, r *rolling) {
	ctx, cancel := context.WithCancel(t.Context())
	var busy sync.WaitGroup
	defer busy.Wait()
	defer cancel()
	busy.Go(func() {
		for n := 0; ctx.Err() == nil; n++ {
			for _, l := range []client.ObjectList{&corev1.NodeList{}, &v1alpha1.PendingNodeList{}, &v1alpha1.NodeVersionList{}} {
				_ = r.admin.List(ctx, l)
				_ = meta.EachListItem(l, func(o runtime.Object) error {
					p := client.RawPatch(types.MergePatchType, fmt.Appendf(nil, `{"metadata":{"annotations":{"example.com/noise":"%d"}}}`, n))
					_ = r.admin.Patch(ctx, o.(client.Object), p) // it may be gone
					return nil
				})
			}
		}
	})
	r.operate()
	r.edit(toNew)
	r.finished(image2)
	r.writes.mu.Lock()
	defer r.writes.mu.Unlock()
	if r.writes.conflicts == 0 {
		t.Error("no conflict occurred")
	}
	t.Logf("%d conflicts", r.writes.conflicts)
}

func foreignCordons(t *testing.T, r *rolling) {
	cordon := func(name string, yes bool) {
		t.Helper()
		if err := r.admin.Patch(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}},
			client.RawPatch(types.MergePatchType, fmt.Appendf(nil, `{"spec":{"unschedulable":%t}}`, yes))); err != nil {
			t.Fatal(err)
		}
	}
	theirs := func(n *corev1.Node) bool {
		_, ours := n.Annotations[v1alpha1.AnnotationCordoned]
		return n.Spec.Unschedulable && !ours
	}
	// An old cordoned node is still replaced, and the cordon stays until then.
	const old = "w-2"
	cordon(old, true)
	r.operate()
	r.edit(toNew)
	kept, fresh := true, ""
	r.within(60*time.Second, "the cordoned node was replaced", func() (string, bool) {
		var n corev1.Node
		there := r.get(old, &n)
		if there && !theirs(&n) {
			kept = false
		}
		return fmt.Sprint(n.Annotations), !there
	})
	if !kept {
		t.Errorf("the cordon of %s was removed or replaced", old)
	}
	// A new cordoned node stays cordoned while others are replaced.
	r.within(30*time.Second, "its replacement node is at the target", func() (string, bool) {
		var l corev1.NodeList
		var p v1alpha1.PendingNodeList
		if err := errors.Join(r.admin.List(t.Context(), &p), r.admin.List(t.Context(), &l)); err != nil {
			t.Fatal(err)
		}
		for _, n := range l.Items {
			if n.Annotations[v1alpha1.AnnotationDonor] == old && !slices.ContainsFunc(p.Items, func(p v1alpha1.PendingNode) bool { return p.Spec.Donor == old }) {
				fresh = n.Name
				if n.Spec.Unschedulable {
					t.Errorf("%s inherited the cordon", fresh)
				}
			}
		}
		return "", fresh != ""
	})
	cordon(fresh, true)
	r.within(60*time.Second, "all nodes are replaced", func() (string, bool) {
		var l corev1.NodeList
		if err := r.admin.List(t.Context(), &l); err != nil {
			t.Fatal(err)
		}
		done := true
		for _, n := range l.Items {
			done = done && n.Annotations[v1alpha1.AnnotationImage] == image2
			if n.Name == fresh && !theirs(&n) {
				kept = false
			}
		}
		return "", done
	})
	r.noIntents()
	var n corev1.Node
	if r.get(fresh, &n); !kept || !theirs(&n) {
		t.Errorf("the cordon of %s was removed or replaced: %+v with %v", fresh, n.Spec, n.Annotations)
	}
	cordon(fresh, false)
	r.finished(image2)
}

func objectsMadeAnew(t *testing.T, r *rolling) {
	begun := func(machines int) {
		t.Helper()
		r.within(60*time.Second, fmt.Sprintf("%d machines were created", machines), func() (string, bool) {
			r.cloud.mu.Lock()
			defer r.cloud.mu.Unlock()
			return fmt.Sprint(len(r.cloud.byToken)), len(r.cloud.byToken) >= machines
		})
	}
	stop := r.operate()
	r.edit(toNew)
	begun(2) // the control plane is done
	stop()
	// Edited back and forth: only the last edit counts.
	r.edit(func(s *v1alpha1.NodeVersionSpec) { s.Image = image1 })
	r.edit(toNew)
	stop = r.operate()
	begun(3)
	stop()
	// Deleted with its status and created again, also the objects that the operator created.
	var nv v1alpha1.NodeVersion
	r.get(v1alpha1.NodeVersionName, &nv)
	for _, o := range []client.Object{&v1alpha1.NodeVersion{}, &v1alpha1.ScalingGroup{}, &v1alpha1.AutoscalingStrategy{}} {
		if err := r.admin.DeleteAllOf(t.Context(), o); err != nil {
			t.Fatal(err)
		}
	}
	r.create(&v1alpha1.NodeVersion{ObjectMeta: metav1.ObjectMeta{Name: v1alpha1.NodeVersionName}, Spec: nv.Spec})
	stop = r.operate()
	begun(4)
	// Deleted while an operator runs, it stops until there is one again.
	if err := r.admin.Delete(t.Context(), &v1alpha1.NodeVersion{ObjectMeta: metav1.ObjectMeta{Name: v1alpha1.NodeVersionName}}); err != nil {
		t.Fatal(err)
	}
	stop()
	r.create(&v1alpha1.NodeVersion{ObjectMeta: metav1.ObjectMeta{Name: v1alpha1.NodeVersionName}, Spec: nv.Spec})
	r.operate()
	r.finished(image2)
	if n := len(r.cloud.byToken); n != 5 {
		t.Errorf("%d machines were created for 5 nodes", n)
	}
	if n := r.cloud.calls["upgrade"]; n != 1 {
		t.Errorf("Kubernetes was upgraded %d times", n)
	}
}

func peopleIntervene(t *testing.T, r *rolling) {
	// Somebody has cordoned a worker, and the cordon must stay.
	var n corev1.Node
	r.get("w-2", &n)
	n.Spec.Unschedulable = true
	if err := r.admin.Update(t.Context(), &n); err != nil {
		t.Fatal(err)
	}
	r.cloud.joinLate = 300 * time.Millisecond
	stop := r.operate()
	// The old target again: nothing happens to it.
	time.Sleep(200 * time.Millisecond)
	r.get("w-2", &n)
	if !n.Spec.Unschedulable {
		t.Error("somebody else's cordon was removed")
	}
	r.edit(toNew)
	// Every intent is deleted by hand once, and a replacement node's machine vanishes.
	deleted := map[string]bool{}
	vanished := false
	r.within(90*time.Second, "a replacement node has vanished and intents were deleted", func() (string, bool) {
		var l v1alpha1.PendingNodeList
		if err := r.admin.List(t.Context(), &l); err != nil {
			t.Fatal(err)
		}
		for _, p := range l.Items {
			if !deleted[p.Spec.Token] && p.Spec.Goal == v1alpha1.JoinGoal && p.Status.CSPState == "Creating" && len(deleted) < 2 {
				deleted[p.Spec.Token] = true
				if err := r.admin.Delete(t.Context(), &p); client.IgnoreNotFound(err) != nil {
					t.Fatal(err)
				}
			} else if !vanished && len(deleted) == 2 && !deleted[p.Spec.Token] && p.Spec.Goal == v1alpha1.JoinGoal {
				r.cloud.mu.Lock()
				if id, ok := r.cloud.byToken[p.Spec.Token]; ok && r.cloud.listed[id] {
					r.cloud.terminate(id)
					vanished = true
				}
				r.cloud.mu.Unlock()
			}
		}
		return fmt.Sprintf("%d deleted, vanished %v", len(deleted), vanished), vanished
	})
	r.finished(image2)
	stop()
}

// ownersHold puts a group on hold, then one node of it, and resumes both.
func ownersHold(t *testing.T, r *rolling) {
	annotate := func(o client.Object, held string) {
		t.Helper()
		body := fmt.Sprintf(`{"metadata":{"annotations":{%q:%s}}}`, v1alpha1.AnnotationHeld, held)
		if err := r.admin.Patch(t.Context(), o, client.RawPatch(types.MergePatchType, []byte(body))); err != nil {
			t.Fatal(err)
		}
	}
	// at waits until nothing is in progress, only these nodes are not at the target, and the
	// autoscaler runs.
	at := func(ready string, old ...string) {
		t.Helper()
		r.within(90*time.Second, "on hold are "+strings.Join(old, ", "), func() (string, bool) {
			var (
				nodes corev1.NodeList
				l     v1alpha1.PendingNodeList
				as    v1alpha1.AutoscalingStrategy
				nv    v1alpha1.NodeVersion
				have  []string
			)
			if err := errors.Join(r.admin.List(t.Context(), &nodes), r.admin.List(t.Context(), &l)); err != nil {
				t.Fatal(err)
			}
			r.get(v1alpha1.AutoscalingStrategyName, &as)
			r.get(v1alpha1.NodeVersionName, &nv)
			for _, n := range nodes.Items {
				if n.Annotations[v1alpha1.AnnotationImage] != image2 && !n.Spec.Unschedulable {
					have = append(have, n.Name)
				}
			}
			is := conditionText(nv.Status, v1alpha1.ConditionReady)
			return fmt.Sprintf("%s, old %q, %d intents, autoscaler %v", is, have, len(l.Items), as.Spec.Enabled),
				is == ready && slices.Equal(have, old) && len(l.Items) == 0 && len(nodes.Items) == r.cloud.shall && as.Spec.Enabled
		})
	}
	r.operate()
	var group v1alpha1.ScalingGroup
	r.within(90*time.Second, "the group is known", func() (string, bool) {
		var l v1alpha1.ScalingGroupList
		if err := r.admin.List(t.Context(), &l); err != nil {
			t.Fatal(err)
		}
		for _, g := range l.Items {
			if g.Spec.Role == v1alpha1.WorkerRole {
				group = g
				return "", true
			}
		}
		return "it is not", false
	})
	annotate(&group, `"true"`)
	r.edit(toNew)
	at("True NodesHeld", "w-2", "w-3", "w-4")
	one := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w-3"}}
	annotate(one, `"true"`)
	annotate(&group, "null")
	at("True NodesHeld", "w-3")
	annotate(one, "null")
	r.finished(image2)
}

// clocksDiffer has machines that join slowly, and a sequence of operators with clock skew: their
// clocks are far ahead of and behind the cloud's and each other's.
func clocksDiffer(t *testing.T, r *rolling) {
	r.cloud.joinLate, r.cloud.joinTime = 300*time.Millisecond, 300*time.Millisecond
	r.skews = []time.Duration{35 * time.Minute, -35 * time.Minute}
	stop := r.operate()
	r.edit(toNew)
	for machines := 1; machines <= 3; machines++ { // the next operator finds one that has not joined
		r.within(60*time.Second, "the next machine is created", func() (string, bool) {
			r.cloud.mu.Lock()
			defer r.cloud.mu.Unlock()
			return fmt.Sprint(len(r.cloud.byToken), " were created"), len(r.cloud.byToken) > machines-1
		})
		stop()
		stop = r.operate()
	}
	r.finished(image2)
	if n := len(r.cloud.byToken); n != 4 {
		t.Errorf("%d machines were created for 4 nodes", n)
	}
	var nodes corev1.NodeList
	if err := r.admin.List(t.Context(), &nodes); err != nil {
		t.Fatal(err)
	}
	for _, n := range nodes.Items {
		if n.Annotations[v1alpha1.AnnotationComponents] == "" {
			t.Errorf("the image and components of %s are not recorded: %v", n.Name, n.Annotations)
		}
	}
}

// addGroup makes a group of workers with one old node.
func (r *rolling) addGroup(name string) (id string) {
	r.t.Helper()
	g := cloud.Group{ID: "sandboxes/t/groups/" + name, Name: name, Role: cloud.Worker, Image: image1, AutoscalerName: name}
	r.cloud.mu.Lock()
	r.cloud.groups = append(r.cloud.groups, g)
	r.cloud.shall++
	made := r.cloud.add(g, "")
	m := r.cloud.instances[made.ProviderID]
	m.State = cloud.Ready
	r.cloud.mu.Unlock()
	r.cloud.register(m, "v1.35.4", func(n *corev1.Node) {
		n.Annotations = map[string]string{v1alpha1.AnnotationImage: image1, v1alpha1.AnnotationComponents: refA, v1alpha1.AnnotationGroup: g.ID}
	})
	return g.ID
}

func groupsChange(t *testing.T, r *rolling) {
	v := r.addGroup("v")
	r.operate()
	var g v1alpha1.ScalingGroup
	r.within(30*time.Second, "the group is known", func() (string, bool) {
		return fmt.Sprintf("%+v", g.Status), r.get("v", &g) && len(g.Status.Conditions) > 0
	})
	r.cloud.mu.Lock()
	r.cloud.hidden = v
	r.cloud.mu.Unlock()
	r.edit(toNew)
	r.within(60*time.Second, "the other groups are at the target, and the missing one is reported", func() (string, bool) {
		var nodes corev1.NodeList
		var nv v1alpha1.NodeVersion
		if err := r.admin.List(t.Context(), &nodes); err != nil {
			t.Fatal(err)
		}
		old := ""
		for _, n := range nodes.Items {
			if n.Annotations[v1alpha1.AnnotationImage] != image2 || n.Spec.Unschedulable {
				old += " " + n.Name
			}
		}
		r.get(v1alpha1.NodeVersionName, &nv)
		w := nv.Status.Waiting
		return fmt.Sprintf("not at the target:%s; waiting %+v", old, w), old == " v-4" && w != nil && w.Reason == "GroupMissing" && w.Object.Name == "v"
	})
	r.noIntents()
	if !r.get("v", &g) || !notListed(&g) {
		t.Errorf("the object of the group is %+v", g)
	}
	if n := r.cloud.calls["create"]; n > 3 {
		t.Errorf("machines were requested %d times; want once for each of 3 nodes", n)
	}
	r.cloud.mu.Lock()
	r.cloud.hidden = ""
	r.cloud.mu.Unlock()
	r.addGroup("u")
	r.finished(image2)
}

// apiServerAwayForLong stops the API server for longer than the lease duration, and advances the
// time by ten minutes meanwhile.
func apiServerAwayForLong(t *testing.T, r *rolling) {
	r.elects = true
	r.operate()
	r.edit(toNew)
	r.within(60*time.Second, "the rollout has started", func() (string, bool) {
		r.cloud.mu.Lock()
		defer r.cloud.mu.Unlock()
		return fmt.Sprint(len(r.cloud.byToken)), len(r.cloud.byToken) >= 2
	})
	r.cp.StopAPIServer()
	stopped := time.Now()
	r.writes.mu.Lock()
	before := r.writes.requests
	r.writes.mu.Unlock()
	r.cloud.mu.Lock()
	calls := maps.Clone(r.cloud.calls)
	r.cloud.mu.Unlock()
	r.mu.Lock()
	r.ahead += 10 * time.Minute
	r.mu.Unlock()
	time.Sleep(replica.LeaseDuration + 2*time.Second) // the outage
	away := time.Since(stopped).Seconds()
	r.writes.mu.Lock()
	requests := r.writes.requests - before
	r.writes.mu.Unlock()
	if perSecond := float64(requests) / away; perSecond > 20 {
		t.Errorf("%.0f requests a second were sent to an unavailable API server", perSecond)
	}
	r.cloud.mu.Lock()
	for verb, n := range r.cloud.calls {
		if perSecond := float64(n-calls[verb]) / away; perSecond > 11 { // lists may continue, ten a second
			t.Errorf("%.0f calls of %s a second without an API server", perSecond, verb)
		}
	}
	r.cloud.mu.Unlock()
	if err := r.cp.StartAPIServer(t.Context()); err != nil {
		t.Fatal(err)
	}
	back := time.Now()
	r.finished(image2)
	var leases coordinationv1.LeaseList
	if err := r.admin.List(t.Context(), &leases, client.InNamespace(namespace)); err != nil || len(leases.Items) != 1 {
		t.Fatalf("leases %+v, %v", leases.Items, err)
	}
	if s := leases.Items[0].Spec; s.HolderIdentity == nil || *s.HolderIdentity == "" || s.RenewTime == nil || s.RenewTime.Before(&metav1.MicroTime{Time: back}) {
		t.Errorf("the lease is %+v since %s", s, back)
	}
	t.Logf("%d requests in %.0f s without an API server", requests, away)
	r.denied.forget()
}

func apiServerAway(t *testing.T, r *rolling) {
	r.operate()
	r.edit(toNew)
	r.within(30*time.Second, "the rollout has started", func() (string, bool) {
		r.cloud.mu.Lock()
		defer r.cloud.mu.Unlock()
		return fmt.Sprint(len(r.cloud.byToken)), len(r.cloud.byToken) >= 2
	})
	r.cp.StopAPIServer()
	r.cloud.mu.Lock()
	before := maps.Clone(r.cloud.calls)
	r.cloud.mu.Unlock()
	requests := r.writes.total()
	time.Sleep(3 * time.Second)
	r.cloud.mu.Lock()
	for verb, n := range r.cloud.calls {
		if d := n - before[verb]; d > 40 { // lists continue, ten a second at most
			t.Errorf("%d calls of %s in 3 s without an API server", d, verb)
		}
	}
	r.cloud.mu.Unlock()
	if d := r.writes.total() - requests; d > 60 {
		t.Errorf("%d writes were tried in 3 s without an API server", d)
	}
	if err := r.cp.StartAPIServer(t.Context()); err != nil {
		t.Fatal(err)
	}
	r.finished(image2)
	r.denied.forget()
}

func (w *writeCounter) total() (n int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, v := range w.all {
		n += v
	}
	return n
}

func fewWrites(t *testing.T, r *rolling) {
	r.operate()
	r.eventually("the operator has started", func() (string, bool) {
		var as v1alpha1.AutoscalingStrategy
		var l v1alpha1.ScalingGroupList
		if err := r.admin.List(t.Context(), &l); err != nil {
			t.Fatal(err)
		}
		return "not yet", r.get(v1alpha1.AutoscalingStrategyName, &as) && len(l.Items) == 2
	})
	r.writes.mu.Lock()
	clear(r.writes.all)
	r.writes.mu.Unlock()
	r.edit(toNew)
	r.finished(image2)
	r.writes.mu.Lock()
	defer r.writes.mu.Unlock()
	// Reports about machines and about the rollout are limited per second; see eventRate, statusRate
	// and statusPace.
	perNode, rest := 0, 0
	for key, n := range r.writes.all {
		switch _, kind, _ := strings.Cut(key, " "); kind {
		case "nodes", "pendingnodes", "joiningnodes":
			perNode += n
		case "autoscalingstrategies", "autoscalingstrategies status", "apps", "nodeversions status", "scalinggroups status":
			rest += n
		}
	}
	t.Logf("writes of 25 replacements: %v", r.writes.all)
	t.Logf("calls of the cloud: %v", r.cloud.calls)
	if rest > 40 {
		t.Errorf("%d writes besides: %v", rest, r.writes.all)
	}
	if per := float64(perNode) / 25; per > 9 {
		t.Errorf("%.1f writes per node: %v", per, r.writes.all)
	}
	if n := r.writes.all["PATCH pendingnodes status"]; n > 4*25 {
		t.Errorf("%d writes of the cloud's state of 25 machines", n)
	}
	if n := r.cloud.calls["create"] + r.cloud.calls["delete"]; n > 25 {
		t.Errorf("%d requests to the cloud to replace 25 machines, 8 at a time", n)
	}
}
