package operator

import (
	"context"
	"fmt"
	"sync"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"constellation/operator/api/v1alpha1"
)

// settled remembers the new nodes on which everything runs that pods need there. A
// kubelet calls its node Ready before kube-proxy runs on it, and pods that come to it
// then, because its donor is emptied, reach no Service for a while. It is safe for
// concurrent use.
type settled struct {
	mu    sync.Mutex
	nodes map[types.UID]bool
}

func (s *settled) has(uid types.UID) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.nodes[uid]
}

func (s *settled) add(uid types.UID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.nodes == nil {
		s.nodes = map[types.UID]bool{}
	}
	s.nodes[uid] = true
}

// keep forgets the nodes that are gone.
func (s *settled) keep(nodes map[string]*corev1.Node) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.nodes) <= len(nodes) {
		return
	}
	there := make(map[types.UID]bool, len(nodes))
	for _, n := range nodes {
		there[n.UID] = s.nodes[n.UID]
	}
	s.nodes = there
}

// settle takes from the heirs of a world that they are Ready, until they have settled.
func (r *nodeVersions) settle(o *observed, x *lookup) {
	r.settled.keep(o.nodes)
	for i := range o.intents {
		in := &o.intents[i]
		m := x.tokens[in.token]
		if in.goal != v1alpha1.JoinGoal || m == nil {
			continue
		}
		n := x.machineOf[m.id]
		if n == nil || !n.ready {
			continue
		}
		is := o.nodes[n.name]
		if n.ready = r.settled.has(is.UID); n.ready {
			continue
		}
		r.try("look whether "+n.name+" has settled", func(ctx context.Context) error {
			var pods corev1.PodList
			// Not older than what says that the Node is Ready; the API server has it in memory.
			which := &client.ListOptions{Raw: &metav1.ListOptions{ResourceVersion: is.ResourceVersion}}
			if err := r.live.List(ctx, &pods, which, client.MatchingFields{"spec.nodeName": is.Name}); err != nil {
				return err
			}
			for i := range pods.Items {
				if p := &pods.Items[i]; critical(p) && !podReady(p) {
					return fmt.Errorf("%s/%s is not Ready yet", p.Namespace, p.Name)
				}
			}
			r.settled.add(is.UID)
			return nil
		})
	}
}

// critical reports whether p is part of what makes its node a node: a pod of a
// DaemonSet that says so by its priority, as kube-proxy and network plugins do.
func critical(p *corev1.Pod) bool {
	c := metav1.GetControllerOf(p)
	return c != nil && c.Kind == "DaemonSet" && p.Spec.PriorityClassName == "system-node-critical" && p.DeletionTimestamp == nil
}

func podReady(p *corev1.Pod) bool {
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodReady {
			return c.Status == corev1.ConditionTrue
		}
	}
	return false
}
