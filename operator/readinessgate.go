package operator

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"

	"constellation/internal/delay"
	"constellation/operator/api/v1alpha1"
	"constellation/operator/decision"
	"constellation/operator/readiness"
)

// readinessGate tracks on which new nodes all node-critical pods are Ready. A kubelet reports its
// node as Ready before kube-proxy runs on it. Pods that move there from a drained node would then
// reach no Service for a while.
//
// The gate watches the pods of a new node as soon as its Node exists, so their state is known when
// the node becomes Ready. It needs to list and watch pods, and is safe for concurrent use.
type readinessGate struct {
	client kubernetes.Interface
	wake   func() // called from any goroutine when a node seems to pass the gate
	log    *slog.Logger
	lists  chan struct{} // lists of pods that are being read

	mu    sync.Mutex
	nodes map[types.UID]*gatedNode
	wg    sync.WaitGroup
}

// gatedNode is a watched node.
type gatedNode struct {
	cancel context.CancelFunc
	looked bool // all its pods were listed once
	// waits has its node-critical pods that are not Ready, by UID.
	waits map[types.UID]string
	done  bool // it was reported as past the gate, and is no longer watched
}

func newReadinessGate(c kubernetes.Interface, wake func(), log *slog.Logger) *readinessGate {
	return &readinessGate{client: c, wake: wake, log: log, lists: make(chan struct{}, looksAtOnce), nodes: map[types.UID]*gatedNode{}}
}

// has reports whether a node has passed the gate, and watches its pods until then. A node that has
// passed the gate is not checked again. lacks is the first pod that is not Ready, if known.
func (s *readinessGate) has(node string, uid types.UID, ready bool) (has bool, lacks string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := s.nodes[uid]
	if n == nil {
		ctx, cancel := context.WithCancel(context.Background())
		n = &gatedNode{cancel: cancel}
		s.nodes[uid] = n
		s.wg.Go(func() { s.follow(ctx, node, n) })
		return false, ""
	}
	if !n.done && ready && n.looked && len(n.waits) == 0 {
		n.done = true
		n.cancel()
	}
	if !n.done && len(n.waits) > 0 {
		lacks = slices.Min(slices.Collect(maps.Values(n.waits)))
	}
	return n.done, lacks
}

// keep ends the work on all other nodes and forgets them.
func (s *readinessGate) keep(nodes map[types.UID]bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for uid, n := range s.nodes {
		if !nodes[uid] {
			n.cancel()
			delete(s.nodes, uid)
		}
	}
}

// close ends all work and waits for its end.
func (s *readinessGate) close() {
	s.keep(nil)
	s.wg.Wait()
}

// follow watches the pods of a node until ctx ends.
func (s *readinessGate) follow(ctx context.Context, node string, n *gatedNode) {
	for pause := evictAgainMin; ctx.Err() == nil; {
		began := time.Now()
		if err := s.watch(ctx, node, n); err != nil && ctx.Err() == nil {
			s.log.Warn("pods of a new node not watched, tried again", "node", node, "err", err)
			if time.Since(began) > evictAgainMax {
				pause = evictAgainMin
			}
			delay.For(ctx, pause)
			pause = min(2*pause, evictAgainMax)
		}
	}
}

// watch lists the pods of a node and then watches them until the watch ends.
func (s *readinessGate) watch(ctx context.Context, node string, n *gatedNode) error {
	which := fields.OneTermEqualSelector("spec.nodeName", node).String()
	if !slot(ctx, s.lists) {
		return ctx.Err()
	}
	pods, err := s.client.CoreV1().Pods("").List(ctx, metav1.ListOptions{FieldSelector: which})
	<-s.lists
	if err != nil {
		return fmt.Errorf("list pods of %s: %w", node, err)
	}
	waits := map[types.UID]string{}
	for i := range pods.Items {
		if p := &pods.Items[i]; critical(p) && !readiness.Pod(p) {
			waits[p.UID] = p.Namespace + "/" + p.Name
		}
	}
	s.note(n, func() { n.looked, n.waits = true, waits })
	w, err := s.client.CoreV1().Pods("").Watch(ctx, metav1.ListOptions{FieldSelector: which, ResourceVersion: pods.ResourceVersion})
	if err != nil {
		return fmt.Errorf("watch pods of %s: %w", node, err)
	}
	defer w.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case e, ok := <-w.ResultChan():
			if !ok {
				return nil // watches end after some minutes
			}
			if e.Type == watch.Error {
				return fmt.Errorf("watch pods of %s: %w", node, apierrors.FromObject(e.Object))
			}
			if p, ok := e.Object.(*corev1.Pod); ok {
				s.note(n, func() {
					if e.Type != watch.Deleted && critical(p) && !readiness.Pod(p) {
						n.waits[p.UID] = p.Namespace + "/" + p.Name
					} else {
						delete(n.waits, p.UID)
					}
				})
			}
		}
	}
}

// note changes the state of a node, and starts a round if the node passes the gate by that.
func (s *readinessGate) note(n *gatedNode, change func()) {
	s.mu.Lock()
	before := n.looked && len(n.waits) == 0
	change()
	woken := !before && n.looked && len(n.waits) == 0
	s.mu.Unlock()
	if woken {
		s.wake()
	}
}

// gateHeirs marks replacement nodes of a world as not Ready until they pass the gate.
func (r *nodeVersions) gateHeirs(o *observed, x *decision.Lookup) {
	heirs := make(map[types.UID]bool, len(o.Intents))
	for i := range o.Intents {
		in := &o.Intents[i]
		m := x.ByToken[in.Token]
		if in.Goal != v1alpha1.JoinGoal || m == nil {
			continue
		}
		if n := x.NodeOf[m.ID]; n != nil {
			uid := o.nodes[n.Name].UID
			heirs[uid] = true
			has, lacks := r.gate.has(n.Name, uid, n.Ready)
			if n.Ready && !has {
				n.Ready, n.NotReadyPod = false, lacks
			}
		}
	}
	r.gate.keep(heirs)
}

// critical reports whether p is node-critical: a pod of a DaemonSet with a critical priority class,
// such as kube-proxy and network plugins.
func critical(p *corev1.Pod) bool {
	c := metav1.GetControllerOf(p)
	return c != nil && c.Kind == "DaemonSet" && p.Spec.PriorityClassName == "system-node-critical" && p.DeletionTimestamp == nil
}
