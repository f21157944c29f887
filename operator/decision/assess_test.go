package decision

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"constellation/operator/api/v1alpha1"
)

const (
	image1, image2 = "sandboxes/t/images/v1.0.0", "sandboxes/t/images/v1.1.0"
	refA           = "k8s-components-sha256-aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
	refB           = "k8s-components-sha256-bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb"
	cpGroup        = "sandboxes/t/groups/control-plane"
	workerGroup    = "sandboxes/t/groups/workers"
)

func spec() v1alpha1.NodeVersionSpec {
	return v1alpha1.NodeVersionSpec{Image: image2, ImageVersion: "v1.1.0", KubernetesComponentsReference: refA, KubernetesClusterVersion: "v1.35.4"}
}

// machine returns an up-to-date node after edits.
func machine(name string, edit ...func(*Node)) Node {
	n := Node{
		Name: name, Role: v1alpha1.WorkerRole, Ready: true, ProviderID: "sandbox://t/" + name, Kubelet: "v1.35.4",
		Image: image2, Components: refA, Group: workerGroup,
	}
	if strings.HasPrefix(name, "control-plane") {
		n.Role, n.Group = v1alpha1.ControlPlaneRole, cpGroup
	}
	for _, e := range edit {
		e(&n)
	}
	return n
}

// A target that names an etcd concerns the members of control planes only.
func TestClassifyByEtcd(t *testing.T) {
	for _, tt := range []struct {
		node, etcd, tag string
		want            class
	}{
		{node: "control-plane-0", etcd: "3.6.8", want: upToDate},
		{node: "control-plane-0", want: upToDate},
		{node: "control-plane-0", etcd: "3.6.8", tag: "3.6.11-0", want: outdated},
		{node: "control-plane-0", etcd: "3.6.11", tag: "3.6.11-0", want: upToDate},
		{node: "control-plane-0", etcd: "3.7.0", tag: "3.6.11-0", want: upToDate},
		{node: "control-plane-0", tag: "3.6.11-0", want: awaiting},
		{node: "worker-0", tag: "3.6.11-0", want: upToDate},
	} {
		s := spec()
		s.EtcdImageTag = tt.tag
		n := machine(tt.node, func(n *Node) { n.Etcd = tt.etcd })
		if got := classify(s, &n, false, false, false, nil); got != tt.want {
			t.Errorf("%s with etcd %q at target %q: class %d, want %d", tt.node, tt.etcd, tt.tag, got, tt.want)
		}
	}
}

func TestClassify(t *testing.T) {
	for _, tt := range []struct {
		name string
		edit func(*Node)
		want class
	}{
		{name: "at the target", edit: func(*Node) {}, want: upToDate},
		{name: "image in another case is the same", edit: func(n *Node) { n.Image = strings.ToUpper(n.Image) }, want: upToDate},
		{name: "older image", edit: func(n *Node) { n.Image = image1 }, want: outdated},
		{name: "other components", edit: func(n *Node) { n.Components = refB }, want: outdated},
		{name: "outdated with a replacement node", edit: func(n *Node) { n.Image, n.Replacement = image1, "x" }, want: oldNode},
		{name: "replaces another", edit: func(n *Node) { n.OldNode = "x" }, want: newNode},
		{name: "outdated replacement node of an older target", edit: func(n *Node) { n.Image, n.OldNode = image1, "x" }, want: outdated},
		{name: "unknown image", edit: func(n *Node) { n.Image = "" }, want: awaiting},
		{name: "unknown components", edit: func(n *Node) { n.Components = "" }, want: awaiting},
		{name: "no machine", edit: func(n *Node) { n.ProviderID, n.Image = "", image1 }, want: invalid},
		{name: "obsolete", edit: func(n *Node) { n.Obsolete, n.Image = true, image1 }, want: obsolete},
		{name: "new and without an old node", edit: func(n *Node) { n.Name = "new" }, want: mint},
		{name: "new, but with other components", edit: func(n *Node) { n.Name, n.Components = "new", refB }, want: outdated},
	} {
		t.Run(tt.name, func(t *testing.T) {
			n := machine("worker-0", tt.edit)
			if got := classify(spec(), &n, false, n.Replacement != "", n.OldNode != "", map[string]bool{"new": true}); got != tt.want {
				t.Errorf("class %d, want %d", got, tt.want)
			}
		})
	}
}

// TestTargetWithoutImage has a cloud that selects no image: no node is outdated, unknown or
// replaced for its image, and no group gets one.
func TestTargetWithoutImage(t *testing.T) {
	target := spec()
	target.Image, target.ImageVersion = "", ""
	for _, tt := range []struct {
		name string
		edit func(*Node)
		want class
	}{
		{name: "without an image", edit: func(n *Node) { n.Image = "" }, want: upToDate},
		{name: "with an image that the cloud reports", edit: func(n *Node) { n.Image = image1 }, want: upToDate},
		{name: "with other components", edit: func(n *Node) { n.Image, n.Components = "", refB }, want: outdated},
		{name: "nothing known of the components", edit: func(n *Node) { n.Image, n.Components = "", "" }, want: awaiting},
	} {
		t.Run(tt.name, func(t *testing.T) {
			n := machine("worker-0", tt.edit)
			if got := classify(target, &n, false, false, false, nil); got != tt.want {
				t.Errorf("class %d, want %d", got, tt.want)
			}
			d := &Decision{observed: observed{spec: target, w: World{}}}
			n.Confirmed = true
			if known, at := d.known(&n), d.atTarget(&n); known != (n.Components != "") || at != (tt.want == upToDate) {
				t.Errorf("known %t, at the target %t", known, at)
			}
		})
	}
}

func TestAssess(t *testing.T) {
	twoGroups := []Group{
		{Name: "workers", ID: workerGroup, Role: v1alpha1.WorkerRole, Image: image2},
		{Name: "control-plane", ID: cpGroup, Role: v1alpha1.ControlPlaneRole, Image: image2},
	}
	published := v1alpha1.JoinComponents{ControlPlane: refA, Worker: refA}
	for _, tt := range []struct {
		name   string
		w      World
		counts v1alpha1.NodeCounts
		join   v1alpha1.JoinComponents
	}{
		{name: "no nodes", w: World{Groups: twoGroups}, counts: v1alpha1.NodeCounts{}, join: v1alpha1.JoinComponents{}},
		{
			name:   "everything at the target",
			w:      World{Nodes: []Node{machine("control-plane-0"), machine("worker-0")}, Groups: twoGroups},
			counts: v1alpha1.NodeCounts{Total: 2, UpToDate: 2},
			join:   published,
		},
		{
			name:   "a machine joins",
			w:      World{Nodes: []Node{machine("control-plane-0")}, Groups: twoGroups, Pending: []PendingMachine{{Kind: "JoiningNode", Name: "worker-0", Node: "worker-0"}}},
			counts: v1alpha1.NodeCounts{Total: 1, UpToDate: 1, Pending: 1},
			join:   published,
		},
		{
			name: "a registered node without annotations",
			w: World{
				Nodes:   []Node{machine("control-plane-0"), machine("worker-0", func(n *Node) { n.Image, n.Components, n.Group = "", "", "" })},
				Groups:  twoGroups,
				Pending: []PendingMachine{{Kind: "JoiningNode", Name: "worker-0", Node: "worker-0"}},
			},
			counts: v1alpha1.NodeCounts{Total: 2, UpToDate: 1, AwaitingAnnotation: 1},
			join:   published,
		},
		{
			name: "PendingNode and JoiningNode of one machine count once",
			w: World{Nodes: []Node{machine("control-plane-0")}, Groups: twoGroups, Pending: []PendingMachine{
				{Kind: "PendingNode", Name: "token-1", Node: "worker-0"}, {Kind: "JoiningNode", Name: "worker-0", Node: "worker-0"},
			}},
			counts: v1alpha1.NodeCounts{Total: 1, UpToDate: 1, Pending: 1},
			join:   published,
		},
		{
			name:   "outdated nodes are reported",
			w:      World{Nodes: []Node{machine("control-plane-0"), machine("worker-0", func(n *Node) { n.Image = image1 })}, Groups: twoGroups},
			counts: v1alpha1.NodeCounts{Total: 2, UpToDate: 1, Outdated: 1},
			join:   published,
		},
		{
			name:   "a single old node is not up to date",
			w:      World{Nodes: []Node{machine("control-plane-0"), machine("worker-0", func(n *Node) { n.Image, n.Replacement = image1, "gone" })}, Groups: twoGroups},
			counts: v1alpha1.NodeCounts{Total: 2, UpToDate: 1, Donors: 1},
			join:   published,
		},
		{
			name:   "a group would create machines with the old image",
			w:      World{Nodes: []Node{machine("control-plane-0")}, Groups: []Group{{Name: "workers", ID: workerGroup, Role: v1alpha1.WorkerRole, Image: image1}}},
			counts: v1alpha1.NodeCounts{Total: 1, UpToDate: 1},
			join:   published,
		},
		{
			name:   "no providerID",
			w:      World{Nodes: []Node{machine("control-plane-0"), machine("worker-0", func(n *Node) { n.ProviderID = "" })}, Groups: twoGroups},
			counts: v1alpha1.NodeCounts{Total: 2, UpToDate: 1, Invalid: 1},
			join:   published,
		},
		{
			name:   "the control plane runs another version than the first target asks for",
			w:      World{Nodes: []Node{machine("control-plane-0", func(n *Node) { n.Kubelet = "v1.34.4" })}, Groups: twoGroups},
			counts: v1alpha1.NodeCounts{Total: 1, UpToDate: 1},
			join:   v1alpha1.JoinComponents{},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := assess(spec(), 7, v1alpha1.NodeVersionStatus{}, tt.w, time.Now())
			want := "False NodeVersionsUpToDate"
			if tt.counts.Outdated+tt.counts.Donors+tt.counts.Obsolete > 0 {
				want = "True NodeVersionsOutOfDate"
			}
			if got := conditionText(s, v1alpha1.ConditionOutdated); got != want {
				t.Errorf("Outdated is %s, want %s", got, want)
			}
			if d := cmp.Diff(tt.counts, s.Nodes); d != "" {
				t.Errorf("counts (-want +got):\n%s", d)
			}
			if s.JoinComponents != tt.join {
				t.Errorf("joining machines get %+v, want %+v", s.JoinComponents, tt.join)
			}
			if s.ObservedGeneration != 7 {
				t.Errorf("generation %d", s.ObservedGeneration)
			}
			sum := s.Nodes.UpToDate + s.Nodes.Outdated + s.Nodes.Donors + s.Nodes.Heirs + s.Nodes.Mints + s.Nodes.AwaitingAnnotation + s.Nodes.Obsolete + s.Nodes.Invalid
			if sum != s.Nodes.Total {
				t.Errorf("classes add up to %d of %d nodes", sum, s.Nodes.Total)
			}
		})
	}
}

func conditionText(s v1alpha1.NodeVersionStatus, kind string) string {
	for _, c := range s.Conditions {
		if c.Type == kind {
			return string(c.Status) + " " + c.Reason
		}
	}
	return "absent"
}

func TestPublishedComponentsDoNotFollowTheTarget(t *testing.T) {
	w := World{Nodes: []Node{machine("control-plane-0"), machine("control-plane-1")}}
	before := assess(spec(), 1, v1alpha1.NodeVersionStatus{}, w, time.Now())
	next := spec()
	next.KubernetesClusterVersion, next.KubernetesComponentsReference = "v1.36.3", refB
	after := assess(next, 2, before, w, time.Now())
	if after.JoinComponents != before.JoinComponents || after.JoinComponents.Worker != refA {
		t.Errorf("joining machines get %+v before the control plane was upgraded", after.JoinComponents)
	}
	// One control plane alone does not determine the cluster's version.
	w.Nodes[1].Kubelet = "v1.34.4"
	if s := assess(spec(), 1, v1alpha1.NodeVersionStatus{}, w, time.Now()); s.JoinComponents.Worker != "" {
		t.Errorf("published %q although a control plane is older", s.JoinComponents.Worker)
	}
}

func TestConditionsKeepTheirTime(t *testing.T) {
	w := World{Nodes: []Node{machine("control-plane-0")}}
	start := time.Date(2026, 11, 21, 8, 0, 0, 0, time.UTC)
	first := assess(spec(), 1, v1alpha1.NodeVersionStatus{}, w, start)
	again := assess(spec(), 1, first, w, start.Add(time.Hour))
	if d := cmp.Diff(first, again); d != "" {
		t.Errorf("the status differs without a change of the world (-first +again):\n%s", d)
	}
	w.Nodes[0].Image = image1
	changed := assess(spec(), 1, again, w, start.Add(time.Hour))
	for _, c := range changed.Conditions {
		want := metav1.NewTime(start.Add(time.Hour))
		if !c.LastTransitionTime.Equal(&want) {
			t.Errorf("%s changed at %v, want %v", c.Type, c.LastTransitionTime, want)
		}
	}
}

func TestStatusStaysBelow4kB(t *testing.T) {
	long := strings.Repeat("n", 200)
	for _, name := range []string{"worker-%05d", long + "-%05d"} {
		w := World{}
		for i := range 10_000 {
			n := machine(fmt.Sprintf(name, i))
			switch i % 7 {
			case 0:
				n.Image = image1
			case 1:
				n.Image, n.Replacement = image1, "x"
			case 2:
				n.OldNode = "x"
			case 3:
				n.Image = ""
			case 4:
				n.Obsolete = true
			case 5:
				n.ProviderID = ""
			}
			n.Group = fmt.Sprintf("g-%d", i%200)
			w.Nodes = append(w.Nodes, n)
			w.Pending = append(w.Pending, PendingMachine{Kind: "PendingNode", Name: fmt.Sprintf(name, 20_000+i)})
		}
		for i := range 200 {
			w.Groups = append(w.Groups, Group{Name: fmt.Sprintf("%.55s%d", long, i), ID: fmt.Sprintf("g-%d", i), Role: v1alpha1.WorkerRole, Image: image1})
		}
		s := assess(spec(), 1, v1alpha1.NodeVersionStatus{JoinComponents: v1alpha1.JoinComponents{ControlPlane: refA, Worker: refA}}, w, time.Now())
		b, err := json.Marshal(s)
		if err != nil {
			t.Fatal(err)
		}
		examples := len(s.Outdated) + len(s.UpToDate) + len(s.Donors) + len(s.Heirs) + len(s.Mints) + len(s.AwaitingAnnotation) + len(s.Pending) + len(s.Obsolete) + len(s.Invalid)
		if len(b) > 4096 || examples == 0 || examples > maxExamples || len(s.Groups) == 0 {
			t.Errorf("status of %d bytes with %d examples and %d groups", len(b), examples, len(s.Groups))
		}
		if s.Nodes.Total != 10_000 || s.Nodes.Pending != 10_000 {
			t.Errorf("counts %+v", s.Nodes)
		}
	}
}
