package decision

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
			edit func(*World)
		}{
			{"begins", func(*World) {}},
			{"half-way", halfWay},
			{"autoscaler-runs", func(w *World) { w.Autoscaler = Autoscaler{Running: true, PausedByUs: true} }},
		} {
			b.Run(fmt.Sprintf("%s/%d", tt.name, size), func(b *testing.B) {
				s, w := rollout(func(s *v1alpha1.NodeVersionSpec, w *World) {
					surge := intstr.FromInt(100)
					s.Rollout.MaxSurge = &surge
					for i := 2; i < size; i++ {
						n := machine(fmt.Sprintf("worker-%d", i), func(n *Node) { n.Image = image1 })
						w.Nodes = append(w.Nodes, n)
						w.Instances = append(w.Instances, Instance{ID: n.ProviderID, Name: n.Name, Group: n.Group, State: "Ready"})
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

// halfWay is a rollout with half of the workers replaced. Up to 100 of the others have their new
// machines, and some of those are Nodes already.
func halfWay(w *World) {
	workers, busy := len(w.Nodes)-3, 0
	for i := range w.Nodes {
		n := &w.Nodes[i]
		if n.Role == v1alpha1.ControlPlaneRole {
			continue
		}
		if i < workers/2 {
			n.Image, n.OldNode = image2, "old-"+n.Name
			w.Instances[i].Token = "token-" + n.Name
			continue
		}
		if busy == 100 {
			break
		}
		newNode := machine("heir-of-" + n.Name)
		m := Instance{ID: newNode.ProviderID, Name: newNode.Name, Group: n.Group, Token: "token-" + newNode.Name, State: "Ready", Since: w.Now}
		w.Instances = append(w.Instances, m)
		w.Intents = append(w.Intents, Intent{
			Name: fmt.Sprint(slotPrefix, busy), Goal: v1alpha1.JoinGoal, Token: m.Token, OldNode: n.Name, Group: n.Group, Deadline: w.Now.Add(time.Minute),
		})
		if busy%2 == 0 {
			newNode.OldNode, n.Replacement, n.Cordon, n.CordonedSince = n.Name, newNode.Name, CordonedByUs, w.Now
			w.Nodes = append(w.Nodes, newNode)
		}
		busy++
	}
}
