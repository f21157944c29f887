package operator

import (
	"testing"

	"constellation/operator/api/v1alpha1"
)

// A Node that claims the machine of a control plane, and marks itself obsolete, once had
// that machine deleted without its etcd member leaving first.
func TestLyingNodeGetsNoMachineDeleted(t *testing.T) {
	s, w := rollout(func(_ *v1alpha1.NodeVersionSpec, w *world) {
		w.nodes[3].image, w.nodes[4].image = image2, image2
		w.nodes = append(w.nodes, machine("worker-9", func(n *node) {
			n.providerID, n.obsolete = w.nodes[0].providerID, true
		}))
	})
	actions, _ := decide(s, w)
	for _, a := range actions {
		if a.kind == recordIntent {
			t.Errorf("decided to %s", a)
			// What the PendingNode leads to.
			w.intents = append(w.intents, a.intent)
		}
	}
	for i := range w.nodes {
		w.nodes[i].cordon, w.nodes[i].drained = cordonedByUs, true
	}
	actions, _ = decide(s, w)
	for _, a := range actions {
		if a.kind == deleteInstance || a.kind == bindIntent || a.kind == removeMember {
			t.Errorf("decided to %s", a)
		}
	}
}
