package operator

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"

	"constellation/operator/api/v1alpha1"
	"constellation/operator/decision"
)

// server is an API server that answers with one NodeVersion, or not at all.
type server struct {
	client.Reader
	version string
	err     error
	asked   int
}

func (s *server) Get(_ context.Context, _ client.ObjectKey, o client.Object, _ ...client.GetOption) error {
	s.asked++
	if s.err == nil {
		o.SetResourceVersion(s.version)
	}
	return s.err
}

func TestStaleCacheIsNotUsedForActions(t *testing.T) {
	api, now := &server{version: "7"}, testNow
	r := &nodeVersions{live: api, now: func() time.Time { return now }, log: slog.New(slog.DiscardHandler)}
	r.init()
	for _, tt := range []struct {
		name   string
		after  time.Duration
		edit   func()
		cached string
		want   bool
		asked  int // so far
		fails  bool
	}{
		{name: "the first observation is compared with the API server", cached: "7", want: true, asked: 1},
		{name: "the API server is not read again soon", after: askAgain, cached: "7", want: true, asked: 1},
		{name: "the API server is read again after a while", after: 2 * time.Second, cached: "7", want: true, asked: 2},
		{name: "a stale cache may catch up", after: askAgain + time.Second, edit: func() { api.version = "9" }, cached: "7", want: true, asked: 3},
		{name: "a stale cache is checked in every round", after: time.Second, cached: "8", want: true, asked: 4},
		{name: "the cache has caught up", after: time.Second, cached: "9", want: true, asked: 5},
		{name: "a cache may be ahead", after: askAgain + time.Second, edit: func() { api.version = "8" }, cached: "9", want: true, asked: 6},
		{name: "the cache is stale again", after: askAgain + time.Second, edit: func() { api.version = "10" }, cached: "9", want: true, asked: 7},
		{name: "a cache that is stale for a minute is not used for actions", after: tooOld, cached: "9", asked: 8},
		{name: "a cache that has caught up is used again", after: time.Second, cached: "10", want: true, asked: 9},
		{name: "an API server may be unavailable for a while", after: askAgain + time.Second, edit: func() { api.err = errors.New("refused") }, cached: "10", want: true, asked: 10},
		{name: "an API server that is unavailable for a minute is an error", after: tooOld, cached: "10", asked: 11, fails: true},
		{name: "the API server is available again", after: time.Second, edit: func() { api.err = nil }, cached: "10", want: true, asked: 12},
	} {
		now = now.Add(tt.after)
		if tt.edit != nil {
			tt.edit()
		}
		ok, err := r.current(t.Context(), &v1alpha1.NodeVersion{ObjectMeta: metav1.ObjectMeta{ResourceVersion: tt.cached}})
		if ok != tt.want || (err != nil) != tt.fails || api.asked != tt.asked {
			t.Errorf("%s: current %t, %v, asked %d times; want %t, error %t, %d", tt.name, ok, err, api.asked, tt.want, tt.fails, tt.asked)
		}
	}
}

func TestOwnWritesPrevailOverTheCache(t *testing.T) {
	now := testNow
	v := newView(nil, func() time.Time { return now })
	object := func(name, uid, version string) corev1.Node {
		return corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID(uid), ResourceVersion: version}}
	}
	var book nodeBook
	see := func(cached ...corev1.Node) map[string]string {
		var all []any
		for i := range cached {
			all = append(all, &cached[i])
		}
		book.update(all, v)
		out, order := map[string]string{}, []string{}
		for name, n := range book.objects {
			out[name] = fmt.Sprint(n.UID, " ", n.ResourceVersion)
		}
		for _, k := range book.order {
			order = append(order, k.Name)
		}
		if d := cmp.Diff(slices.Sorted(maps.Keys(out)), order, cmpopts.EquateEmpty()); d != "" {
			t.Errorf("nodes by name and in order differ:\n%s", d)
		}
		return out
	}
	want := func(what string, got, want map[string]string) {
		t.Helper()
		if d := cmp.Diff(want, got); d != "" {
			t.Errorf("%s: want and got:\n%s", what, d)
		}
	}
	a, b := object("a", "1", "10"), object("b", "2", "5")
	written, made := object("a", "1", "12"), object("c", "3", "13")
	v.wrote(kindNode, &written)
	v.wrote(kindNode, &made)
	v.wrote(kindPending, &v1alpha1.PendingNode{ObjectMeta: metav1.ObjectMeta{Name: "b", ResourceVersion: "99"}})
	v.deleted(kindNode, &b)
	want("own writes and deletions prevail", see(a, b), map[string]string{"a": "1 12", "c": "3 13"})
	want("an older cache does not prevail", see(object("a", "1", "11"), b), map[string]string{"a": "1 12", "c": "3 13"})
	want("a newer cache prevails, and a new object of an old name is another object", see(object("a", "1", "14"), object("b", "9", "15"), object("c", "3", "13")),
		map[string]string{"a": "1 14", "b": "9 15", "c": "3 13"})
	want("a newer cache prevails from then on", see(object("a", "1", "14")), map[string]string{"a": "1 14"})
	again := object("b", "10", "17")
	v.wrote(kindNode, &again)
	v.deleted(kindNode, &b)
	want("the answer to a deletion arrives after the next object of that name was made", see(), map[string]string{"b": "10 17"})
	v.deleted(kindNode, &again)
	want("the next object is deleted, too", see(again), map[string]string{})
	v.wrote(kindNode, &made)
	now = now.Add(unseenWrite + time.Second)
	want("an object that the cache lacks for long was deleted by somebody else", see(), map[string]string{})
	v.wrote(kindNode, &written)
	v.forget(kindNode, "a")
	want("after a conflict the cache prevails", see(a), map[string]string{"a": "1 10"})
}

// A Node that claims "n" is machine "i". The cloud's data about the machine counts.
func TestNodesGetTheCloudsDataOfTheirMachines(t *testing.T) {
	labelled := map[string]string{"node-role.kubernetes.io/control-plane": ""}
	groups := []decision.Group{{ID: cpGroup, Role: v1alpha1.ControlPlaneRole}, {ID: workerGroup, Role: v1alpha1.WorkerRole}}
	const id = "sandbox://t/n"
	machineIn := func(group string, edit ...func(*decision.Instance)) []decision.Instance {
		m := decision.Instance{ID: id, Name: "n", Group: group, Image: image2, State: "Ready"}
		for _, e := range edit {
			e(&m)
		}
		return []decision.Instance{m}
	}
	worker, controlPlane := v1alpha1.WorkerRole, v1alpha1.ControlPlaneRole
	for _, tt := range []struct {
		name      string
		labels    map[string]string
		claims    string // group
		instances []decision.Instance
		want      decision.Node
		rejected  string // name of the machine that the Node claims
	}{
		{name: "a control plane that kubeadm has labelled", labels: labelled, claims: cpGroup, instances: machineIn(cpGroup), want: decision.Node{Role: controlPlane, Group: cpGroup, Image: image2, Confirmed: true}},
		{name: "a joining control plane without a label or an annotation", instances: machineIn(cpGroup), want: decision.Node{Role: controlPlane, Group: cpGroup, Image: image2, Confirmed: true}},
		{name: "IDs of groups are compared without case", instances: machineIn("SANDBOXES/T/Groups/Control-Plane"), want: decision.Node{Role: controlPlane, Group: "SANDBOXES/T/Groups/Control-Plane", Image: image2, Confirmed: true}},
		{name: "a worker stays a worker whatever it claims", labels: labelled, claims: cpGroup, instances: machineIn(workerGroup), want: decision.Node{Role: worker, Group: workerGroup, Image: image2, Confirmed: true}},
		{name: "a control plane stays a control plane whatever it claims", claims: workerGroup, instances: machineIn(cpGroup), want: decision.Node{Role: controlPlane, Group: cpGroup, Image: image2, Confirmed: true}},
		{name: "without a ScalingGroup the role is that of the cloud", instances: machineIn("other", func(m *decision.Instance) { m.Role = controlPlane }), want: decision.Node{Role: controlPlane, Group: "other", Image: image2, Confirmed: true}},
		{name: "without a role in the cloud it is that of the label", labels: labelled, instances: machineIn("other"), want: decision.Node{Role: controlPlane, Group: "other", Image: image2, Confirmed: true}},
		{name: "IDs of machines are compared without case", instances: machineIn(workerGroup, func(m *decision.Instance) { m.ID = "SANDBOX://T/n" }), want: decision.Node{Role: worker, Group: workerGroup, Image: image2, Confirmed: true}},
		{name: "an image that the cloud does not name is unknown", instances: machineIn(workerGroup, func(m *decision.Instance) { m.Image = "" }), want: decision.Node{Role: worker, Group: workerGroup, Confirmed: true}},
		{name: "a machine that the cloud does not list is unknown", labels: labelled, claims: cpGroup, want: decision.Node{Role: controlPlane, Group: cpGroup, Image: image1}},
		{name: "a machine that the cloud has never described is unknown", claims: workerGroup, instances: machineIn("", func(m *decision.Instance) { m.Name, m.Image, m.State = "", "", "Terminated" }), want: decision.Node{Role: worker, Group: workerGroup, Image: image1}},
		{name: "a machine of another name is not the machine of this Node", labels: labelled, claims: cpGroup, instances: machineIn(cpGroup, func(m *decision.Instance) { m.Name = "control-plane-0" }), want: decision.Node{}, rejected: "control-plane-0"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			n := &corev1.Node{
				ObjectMeta: metav1.ObjectMeta{Name: "n", Labels: tt.labels, Annotations: map[string]string{v1alpha1.AnnotationGroup: tt.claims, v1alpha1.AnnotationImage: image1}},
				Spec:       corev1.NodeSpec{ProviderID: id},
			}
			r := new(nodeVersions)
			r.book.update([]any{n}, newView(nil, time.Now))
			w := decision.World{Nodes: r.nodesOf(), Groups: groups, Instances: tt.instances}
			x := decision.NewLookup(&w)
			if tt.rejected != "" {
				if len(w.Nodes) > 0 || len(w.Impostors) != 1 || w.Impostors[0].Name != "n" || w.Impostors[0].Machine != tt.rejected || x.Nodes["n"] != nil || x.NodeOf[id] != nil {
					t.Errorf("nodes %+v, impostors %+v", w.Nodes, w.Impostors)
				}
				return
			}
			tt.want.Name, tt.want.ProviderID, tt.want.Unlabeled = "n", id, tt.labels == nil
			if tt.want.Confirmed {
				tt.want.ProviderID = tt.instances[0].ID
			}
			if d := cmp.Diff([]decision.Node{tt.want}, w.Nodes, cmp.AllowUnexported(decision.Node{})); d != "" {
				t.Errorf("nodes, want and got:\n%s", d)
			}
			if is := x.NodeOf[tt.want.ProviderID] != nil; is != tt.want.Confirmed {
				t.Errorf("found by its machine: %t", is)
			}
		})
	}
}

func TestEtcdTagOfAnEarlierRolloutIsNotUsed(t *testing.T) {
	var h hostView
	if _, read := h.etcdTag(testNow); read {
		t.Error("a tag was never read, and counts as read")
	}
	h.setEtcdTag("3.6.11-0", testNow)
	if tag, read := h.etcdTag(testNow.Add(freshTag)); tag != "3.6.11-0" || !read {
		t.Errorf("the tag is %q, read is %t", tag, read)
	}
	if _, read := h.etcdTag(testNow.Add(time.Hour)); read {
		t.Error("a tag of an hour ago counts as read")
	}
}

func TestNodeMatters(t *testing.T) {
	for _, tt := range []struct {
		name string
		edit func(*corev1.Node)
		want bool
	}{
		{name: "a heartbeat", edit: func(n *corev1.Node) { n.Status.Conditions[0].LastHeartbeatTime = metav1.NewTime(testNow) }, want: false},
		{name: "a Node that is not Ready any more", edit: func(n *corev1.Node) { n.Status.Conditions[0].Status = corev1.ConditionFalse }, want: true},
		{name: "a new kubelet", edit: func(n *corev1.Node) { n.Status.NodeInfo.KubeletVersion = "v1.37.2" }, want: true},
		{name: "a restart of the machine", edit: func(n *corev1.Node) { n.Status.NodeInfo.BootID = "2" }, want: true},
		{name: "a cordon", edit: func(n *corev1.Node) { n.Spec.Unschedulable = true }, want: true},
	} {
		before := &corev1.Node{Status: corev1.NodeStatus{
			Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}},
			NodeInfo:   corev1.NodeSystemInfo{KubeletVersion: "v1.36.3", BootID: "1"},
		}}
		after := before.DeepCopy()
		tt.edit(after)
		if got := nodeMatters().Update(event.UpdateEvent{ObjectOld: before, ObjectNew: after}); got != tt.want {
			t.Errorf("%s: wakes a round is %t", tt.name, got)
		}
	}
}
