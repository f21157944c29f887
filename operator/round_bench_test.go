package operator

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"constellation/engine/cloud"
	"constellation/operator/api/v1alpha1"
	"constellation/operator/decision"
)

// BenchmarkRound measures a round without its actions: read the cache, decide, and report. Half of
// the workers are replaced, 100 machines are joining, and two Nodes have changed since the last
// round.
func BenchmarkRound(b *testing.B) {
	for _, size := range []int{100, 1000, 5000} {
		b.Run(fmt.Sprint(size), func(b *testing.B) {
			spec, w := halfReplaced(size)
			c := cacheOf(w)
			var all []any
			for i := range w.Nodes {
				all = append(all, nodeObject(w.Nodes[i]))
			}
			r := &nodeVersions{
				client: c, live: componentsServer{}, cached: func() []any { return all }, fleet: newFleet(nil, time.Now), drains: idle{}, scaling: noScaling{},
				gate: newReadinessGate(kubernetes.NewForConfigOrDie(&rest.Config{QPS: -1, Transport: noPods{}}), func() {}, slog.New(slog.DiscardHandler)), log: slog.New(slog.DiscardHandler),
			}
			b.Cleanup(r.gate.close)
			r.init()
			for _, m := range w.Instances {
				r.fleet.known[m.ID] = seen{listed: true, Instance: cloud.Instance{ProviderID: m.ID, Name: m.Name, Group: m.Group, Image: m.Image, Token: m.Token, State: cloud.State(m.State)}}
			}
			r.fleet.complete, r.fleet.listed = true, time.Now()
			nv := &v1alpha1.NodeVersion{ObjectMeta: metav1.ObjectMeta{Name: v1alpha1.NodeVersionName, Generation: 1}, Spec: spec, Status: w.Before}
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
				status := decision.Decide(spec, o.World).Status()
				if len(o.Nodes) != len(all) || status.Nodes.Donors == 0 {
					b.Fatal("not the expected world")
				}
			}
		})
	}
}

// halfReplaced is a cluster of three control planes and size workers. Half of the workers are
// replaced, and the machines that replace 100 others exist, half of them as Nodes already.
func halfReplaced(size int) (v1alpha1.NodeVersionSpec, decision.World) {
	s, surge := spec(), intstr.FromInt(100)
	s.Rollout.MaxSurge = &surge
	now := testNow
	w := decision.World{
		Groups: []decision.Group{{Name: "control-plane", ID: cpGroup, Role: v1alpha1.ControlPlaneRole, Image: image2}, {Name: "workers", ID: workerGroup, Role: v1alpha1.WorkerRole, Image: image2}},
		Before: v1alpha1.NodeVersionStatus{JoinComponents: v1alpha1.JoinComponents{ControlPlane: refA, Worker: refA}},
	}
	add := func(name, group, image, token string) *decision.Node {
		role := v1alpha1.WorkerRole
		if group == cpGroup {
			role = v1alpha1.ControlPlaneRole
		}
		w.Nodes = append(w.Nodes, decision.Node{Name: name, Role: role, Ready: true, ProviderID: "sandbox://t/" + name, Kubelet: "v1.35.4", Image: image, Components: refA, Group: group})
		w.Instances = append(w.Instances, decision.Instance{ID: "sandbox://t/" + name, Name: name, Group: group, Image: image, Token: token, State: "Ready"})
		return &w.Nodes[len(w.Nodes)-1]
	}
	for i := range 3 {
		add(fmt.Sprintf("control-plane-%d", i), cpGroup, image2, "")
	}
	for i := range size {
		name := fmt.Sprintf("worker-%d", i)
		if i < size/2 {
			add(name, workerGroup, image2, "token-"+name).OldNode = "old-" + name
		} else {
			add(name, workerGroup, image1, "")
		}
	}
	for busy := range min(100, size-size/2) {
		oldNode, newNode := 3+size/2+busy, fmt.Sprintf("heir-of-worker-%d", size/2+busy)
		w.Intents = append(w.Intents, decision.Intent{
			Name: fmt.Sprint("replace-", busy), Goal: v1alpha1.JoinGoal, Token: "token-" + newNode, OldNode: w.Nodes[oldNode].Name, Group: workerGroup, Deadline: now.Add(time.Minute),
		})
		add(newNode, workerGroup, image2, "token-"+newNode)
		if busy%2 == 0 {
			n := &w.Nodes[oldNode]
			w.Nodes[len(w.Nodes)-1].OldNode, n.Replacement, n.Cordon, n.CordonedSince = n.Name, newNode, decision.CordonedByUs, now
		} else {
			w.Nodes = w.Nodes[:len(w.Nodes)-1] // its machine has not joined
		}
	}
	return s, w
}

// nodeObject is an object that n can be read from.
func nodeObject(n decision.Node) *corev1.Node {
	o := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: n.Name, UID: types.UID(n.Name), ResourceVersion: "1", Annotations: map[string]string{}},
		Spec:       corev1.NodeSpec{ProviderID: n.ProviderID, Unschedulable: n.Cordon != decision.Uncordoned},
		Status: corev1.NodeStatus{
			NodeInfo:   corev1.NodeSystemInfo{KubeletVersion: n.Kubelet},
			Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}},
		},
	}
	if n.Role == v1alpha1.ControlPlaneRole {
		o.Labels = map[string]string{"node-role.kubernetes.io/control-plane": ""}
	}
	for k, v := range map[string]string{
		v1alpha1.AnnotationImage: n.Image, v1alpha1.AnnotationComponents: n.Components, v1alpha1.AnnotationGroup: n.Group,
		v1alpha1.AnnotationDonor: n.OldNode, v1alpha1.AnnotationHeir: n.Replacement,
	} {
		if v != "" {
			o.Annotations[k] = v
		}
	}
	if n.Cordon == decision.CordonedByUs {
		o.Annotations[v1alpha1.AnnotationCordoned] = n.CordonedSince.UTC().Format(time.RFC3339)
	}
	return o
}

// listed is a cache of groups and intents.
type listed struct {
	client.Client
	groups  []v1alpha1.ScalingGroup
	pending []v1alpha1.PendingNode
}

func cacheOf(w decision.World) *listed {
	l := &listed{}
	for _, g := range w.Groups {
		l.groups = append(l.groups, v1alpha1.ScalingGroup{
			ObjectMeta: metav1.ObjectMeta{Name: g.Name}, Spec: v1alpha1.ScalingGroupSpec{GroupID: g.ID, Role: g.Role}, Status: v1alpha1.ScalingGroupStatus{ImageReference: g.Image},
		})
	}
	for _, in := range w.Intents {
		p := in.PendingNode()
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

func (noScaling) observe(context.Context) (decision.Autoscaler, error) {
	return decision.Autoscaler{}, nil
}
func (noScaling) pause(context.Context) error  { return nil }
func (noScaling) resume(context.Context) error { return nil }

// noPods is an API server without pods: lists are empty, and watches are silent. The clientset of client-go's package fake
// would compile for half a minute.
type noPods struct{}

func (noPods) RoundTrip(r *http.Request) (*http.Response, error) {
	body := io.NopCloser(strings.NewReader(`{"items":[]}`))
	if r.URL.Query().Has("watch") {
		silent, end := io.Pipe()
		context.AfterFunc(r.Context(), func() { end.Close() })
		body = silent
	}
	return &http.Response{StatusCode: http.StatusOK, Header: http.Header{"Content-Type": {"application/json"}}, Body: body, Request: r}, nil
}
