package operator

import (
	"context"
	"fmt"
	"log/slog"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/kubernetes/fake"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"constellation/engine/cloud"
	"constellation/operator/api/v1alpha1"
)

// BenchmarkRound is what a round costs before anything is done: the cache read, decided
// from, and told about, with half of the workers replaced, 100 on their way, and two
// Nodes changed since the round before.
func BenchmarkRound(b *testing.B) {
	for _, size := range []int{100, 1000, 5000} {
		b.Run(fmt.Sprint(size), func(b *testing.B) {
			spec, w := halfReplaced(size)
			c := cacheOf(w)
			var all []any
			for i := range w.nodes {
				all = append(all, nodeObject(w.nodes[i]))
			}
			r := &nodeVersions{
				client: c, live: componentsServer{}, cached: func() []any { return all }, fleet: newFleet(nil, time.Now), drains: idle{}, scaling: noScaling{},
				settled: newSettled(fake.NewClientset(), func() {}, slog.New(slog.DiscardHandler)), log: slog.New(slog.DiscardHandler),
			}
			b.Cleanup(r.settled.close)
			r.init()
			for _, m := range w.instances {
				r.fleet.known[m.id] = seen{listed: true, Instance: cloud.Instance{ProviderID: m.id, Name: m.name, Group: m.group, Image: m.image, Token: m.token, State: cloud.State(m.state)}}
			}
			r.fleet.complete, r.fleet.listed = true, time.Now()
			nv := &v1alpha1.NodeVersion{ObjectMeta: metav1.ObjectMeta{Name: v1alpha1.NodeVersionName, Generation: 1}, Spec: spec, Status: w.before}
			n := 0
			b.ReportAllocs()
			for b.Loop() {
				for range 2 {
					n = (n + 7) % len(all)
					changed := all[n].(*corev1.Node).DeepCopy()
					all[n] = changed
				}
				o, err := r.observe(b.Context(), nv)
				if err != nil {
					b.Fatal(err)
				}
				status := Decide(spec, o.world).status()
				if len(o.world.nodes) != len(all) || status.Nodes.Donors == 0 {
					b.Fatal("not the world that was meant")
				}
			}
		})
	}
}

// halfReplaced is a cluster of three control planes and size workers. Half of the workers are
// replaced, and the machines that replace 100 others exist, half of them as Nodes already.
func halfReplaced(size int) (v1alpha1.NodeVersionSpec, world) {
	s, surge := spec(), intstr.FromInt(100)
	s.Rollout.MaxSurge = &surge
	now := testNow
	w := world{
		groups: []group{{name: "control-plane", id: cpGroup, role: v1alpha1.ControlPlaneRole, image: image2}, {name: "workers", id: workerGroup, role: v1alpha1.WorkerRole, image: image2}},
		before: v1alpha1.NodeVersionStatus{JoinComponents: v1alpha1.JoinComponents{ControlPlane: refA, Worker: refA}},
	}
	add := func(name, group, image, token string) *node {
		role := v1alpha1.WorkerRole
		if group == cpGroup {
			role = v1alpha1.ControlPlaneRole
		}
		w.nodes = append(w.nodes, node{name: name, role: role, ready: true, providerID: "sandbox://t/" + name, kubelet: "v1.35.4", image: image, components: refA, group: group})
		w.instances = append(w.instances, instance{id: "sandbox://t/" + name, name: name, group: group, image: image, token: token, state: "Ready"})
		return &w.nodes[len(w.nodes)-1]
	}
	for i := range 3 {
		add(fmt.Sprintf("control-plane-%d", i), cpGroup, image2, "")
	}
	for i := range size {
		name := fmt.Sprintf("worker-%d", i)
		if i < size/2 {
			add(name, workerGroup, image2, "token-"+name).donor = "old-" + name
		} else {
			add(name, workerGroup, image1, "")
		}
	}
	for busy := range min(100, size-size/2) {
		donor, heir := 3+size/2+busy, fmt.Sprintf("heir-of-worker-%d", size/2+busy)
		w.intents = append(w.intents, intent{
			name: fmt.Sprint("replace-", busy), goal: v1alpha1.JoinGoal, token: "token-" + heir, donor: w.nodes[donor].name, group: workerGroup, deadline: now.Add(time.Minute),
		})
		add(heir, workerGroup, image2, "token-"+heir)
		if busy%2 == 0 {
			n := &w.nodes[donor]
			w.nodes[len(w.nodes)-1].donor, n.heir, n.cordon, n.cordonedSince = n.name, heir, cordonedByUs, now
		} else {
			w.nodes = w.nodes[:len(w.nodes)-1] // its machine has not joined
		}
	}
	return s, w
}

// nodeObject is an object that n can be read from.
func nodeObject(n node) *corev1.Node {
	o := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: n.name, UID: types.UID(n.name), ResourceVersion: "1", Annotations: map[string]string{}},
		Spec:       corev1.NodeSpec{ProviderID: n.providerID, Unschedulable: n.cordon != uncordoned},
		Status: corev1.NodeStatus{
			NodeInfo:   corev1.NodeSystemInfo{KubeletVersion: n.kubelet},
			Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}},
		},
	}
	if n.role == v1alpha1.ControlPlaneRole {
		o.Labels = map[string]string{"node-role.kubernetes.io/control-plane": ""}
	}
	for k, v := range map[string]string{
		v1alpha1.AnnotationImage: n.image, v1alpha1.AnnotationComponents: n.components, v1alpha1.AnnotationGroup: n.group,
		v1alpha1.AnnotationDonor: n.donor, v1alpha1.AnnotationHeir: n.heir,
	} {
		if v != "" {
			o.Annotations[k] = v
		}
	}
	if n.cordon == cordonedByUs {
		o.Annotations[v1alpha1.AnnotationCordoned] = n.cordonedSince.UTC().Format(time.RFC3339)
	}
	return o
}

// listed is a cache of groups and intents.
type listed struct {
	client.Client
	groups  []v1alpha1.ScalingGroup
	pending []v1alpha1.PendingNode
}

func cacheOf(w world) *listed {
	l := &listed{}
	for _, g := range w.groups {
		l.groups = append(l.groups, v1alpha1.ScalingGroup{
			ObjectMeta: metav1.ObjectMeta{Name: g.name}, Spec: v1alpha1.ScalingGroupSpec{GroupID: g.id, Role: g.role}, Status: v1alpha1.ScalingGroupStatus{ImageReference: g.image},
		})
	}
	for _, in := range w.intents {
		p := in.pendingNode()
		p.UID = types.UID(p.Name)
		l.pending = append(l.pending, *p)
	}
	return l
}

func (l *listed) List(_ context.Context, into client.ObjectList, _ ...client.ListOption) error {
	switch into := into.(type) {
	case *v1alpha1.ScalingGroupList:
		into.Items = l.groups
	case *v1alpha1.PendingNodeList:
		into.Items = l.pending
	}
	return nil
}

// noScaling is a cluster without an autoscaler.
type noScaling struct{}

func (noScaling) observe(context.Context) (autoscaler, error) { return autoscaler{}, nil }
func (noScaling) pause(context.Context) error                 { return nil }
func (noScaling) resume(context.Context) error                { return nil }
