package operator

import (
	"fmt"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/util/intstr"

	"constellation/operator/api/v1alpha1"
)

// BenchmarkDecide is one decision with its status, about many workers, of which 100 may
// be replaced at a time.
func BenchmarkDecide(b *testing.B) {
	for _, size := range []int{100, 1000, 5000} {
		for _, tt := range []struct {
			name string
			edit func(*world)
		}{
			{"begins", func(*world) {}},
			{"half-way", halfWay},
			{"autoscaler-runs", func(w *world) { w.autoscaler = autoscaler{running: true, ours: true} }},
		} {
			b.Run(fmt.Sprintf("%s/%d", tt.name, size), func(b *testing.B) {
				s, w := rollout(func(s *v1alpha1.NodeVersionSpec, w *world) {
					surge := intstr.FromInt(100)
					s.Rollout.MaxSurge = &surge
					for i := 2; i < size; i++ {
						n := machine(fmt.Sprintf("worker-%d", i), func(n *node) { n.image = image1 })
						w.nodes = append(w.nodes, n)
						w.instances = append(w.instances, instance{id: n.providerID, name: n.name, group: n.group, state: "Ready"})
					}
					tt.edit(w)
				})
				for b.Loop() {
					decide(s, w)
				}
			})
		}
	}
}

// halfWay has half of the workers replaced, and of up to 100 of the others the machines
// are there, a part of them Nodes already.
func halfWay(w *world) {
	workers, busy := len(w.nodes)-3, 0
	for i := range w.nodes {
		n := &w.nodes[i]
		if n.role == v1alpha1.ControlPlaneRole {
			continue
		}
		if i < workers/2 {
			n.image, n.donor = image2, "old-"+n.name
			w.instances[i].token = "token-" + n.name
			continue
		}
		if busy == 100 {
			break
		}
		heir := machine("heir-of-" + n.name)
		m := instance{id: heir.providerID, name: heir.name, group: n.group, token: "token-" + heir.name, state: "Ready", since: w.now}
		w.instances = append(w.instances, m)
		w.intents = append(w.intents, intent{
			name: fmt.Sprint(placePrefix, busy), goal: v1alpha1.JoinGoal, token: m.token, donor: n.name, group: n.group, deadline: w.now.Add(time.Minute),
		})
		if busy%2 == 0 {
			heir.donor, n.heir, n.cordon, n.cordonedSince = n.name, heir.name, cordonedByUs, w.now
			w.nodes = append(w.nodes, heir)
		}
		busy++
	}
}
