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
		{"the first observation is compared with the API server", 0, nil, "7", true, 1, false},
		{"the API server is not read again soon", askAgain, nil, "7", true, 1, false},
		{"the API server is read again after a while", 2 * time.Second, nil, "7", true, 2, false},
		{"a stale cache may catch up", askAgain + time.Second, func() { api.version = "9" }, "7", true, 3, false},
		{"a stale cache is checked in every round", time.Second, nil, "8", true, 4, false},
		{"the cache has caught up", time.Second, nil, "9", true, 5, false},
		{"a cache may be ahead", askAgain + time.Second, func() { api.version = "8" }, "9", true, 6, false},
		{"the cache is stale again", askAgain + time.Second, func() { api.version = "10" }, "9", true, 7, false},
		{"a cache that is stale for a minute is not used for actions", tooOld, nil, "9", false, 8, false},
		{"a cache that has caught up is used again", time.Second, nil, "10", true, 9, false},
		{"an API server may be unavailable for a while", askAgain + time.Second, func() { api.err = errors.New("refused") }, "10", true, 10, false},
		{"an API server that is unavailable for a minute is an error", tooOld, nil, "10", false, 11, true},
		{"the API server is available again", time.Second, func() { api.err = nil }, "10", true, 12, false},
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
	v.deleted(kindNode, "b", "2")
	want("own writes and deletions prevail", see(a, b), map[string]string{"a": "1 12", "c": "3 13"})
	want("an older cache does not prevail", see(object("a", "1", "11"), b), map[string]string{"a": "1 12", "c": "3 13"})
	want("a newer cache prevails, and a new object of an old name is another object", see(object("a", "1", "14"), object("b", "9", "15"), object("c", "3", "13")),
		map[string]string{"a": "1 14", "b": "9 15", "c": "3 13"})
	want("a newer cache prevails from then on", see(object("a", "1", "14")), map[string]string{"a": "1 14"})
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
		{"a control plane that kubeadm has labelled", labelled, cpGroup, machineIn(cpGroup), decision.Node{Role: controlPlane, Group: cpGroup, Image: image2, Confirmed: true}, ""},
		{"a joining control plane without a label or an annotation", nil, "", machineIn(cpGroup), decision.Node{Role: controlPlane, Group: cpGroup, Image: image2, Confirmed: true}, ""},
		{"IDs of groups are compared without case", nil, "", machineIn("SANDBOXES/T/Groups/Control-Plane"), decision.Node{Role: controlPlane, Group: "SANDBOXES/T/Groups/Control-Plane", Image: image2, Confirmed: true}, ""},
		{"a worker stays a worker whatever it claims", labelled, cpGroup, machineIn(workerGroup), decision.Node{Role: worker, Group: workerGroup, Image: image2, Confirmed: true}, ""},
		{"a control plane stays a control plane whatever it claims", nil, workerGroup, machineIn(cpGroup), decision.Node{Role: controlPlane, Group: cpGroup, Image: image2, Confirmed: true}, ""},
		{"without a ScalingGroup the role is that of the cloud", nil, "", machineIn("other", func(m *decision.Instance) { m.Role = controlPlane }), decision.Node{Role: controlPlane, Group: "other", Image: image2, Confirmed: true}, ""},
		{"without a role in the cloud it is that of the label", labelled, "", machineIn("other"), decision.Node{Role: controlPlane, Group: "other", Image: image2, Confirmed: true}, ""},
		{"IDs of machines are compared without case", nil, "", machineIn(workerGroup, func(m *decision.Instance) { m.ID = "SANDBOX://T/n" }), decision.Node{Role: worker, Group: workerGroup, Image: image2, Confirmed: true}, ""},
		{"an image that the cloud does not name is unknown", nil, "", machineIn(workerGroup, func(m *decision.Instance) { m.Image = "" }), decision.Node{Role: worker, Group: workerGroup, Confirmed: true}, ""},
		{"a machine that the cloud does not list is unknown", labelled, cpGroup, nil, decision.Node{Role: controlPlane, Group: cpGroup, Image: image1}, ""},
		{"a machine that the cloud has never described is unknown", nil, workerGroup, machineIn("", func(m *decision.Instance) { m.Name, m.Image, m.State = "", "", "Terminated" }), decision.Node{Role: worker, Group: workerGroup, Image: image1}, ""},
		{"a machine of another name is not the machine of this Node", labelled, cpGroup, machineIn(cpGroup, func(m *decision.Instance) { m.Name = "control-plane-0" }), decision.Node{}, "control-plane-0"},
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
