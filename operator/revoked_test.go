package operator

import (
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"constellation/engine/revocation"
	"constellation/operator/api/v1alpha1"
)

// atRest is the cluster of rollout with all workers at the target, and its edits.
func atRest(edit ...func(*world)) (v1alpha1.NodeVersionSpec, world) {
	return rollout(func(_ *v1alpha1.NodeVersionSpec, w *world) {
		w.autoscaler = autoscaler{}
		w.nodes[3].image, w.nodes[4].image = image2, image2
		for _, e := range edit {
			e(w)
		}
	})
}

// revoked is the intent of a node's machine that the console has revoked.
func revoked(node, group string) intent {
	return intent{name: revocation.RemovalPrefix + node, goal: v1alpha1.LeaveGoal, machine: machine(node).providerID, node: node, group: group, revoked: true}
}

// refilling is the intent of the machine in its place.
func refilling(node, group string) intent {
	return intent{name: revocation.RefillPrefix + node, goal: v1alpha1.JoinGoal, token: "r", donor: node, group: group, deadline: modelNow.Add(joinDeadline)}
}

// without removes a node, and gives its machine a state.
func (w *world) without(name string, state v1alpha1.InstanceState) {
	for i := range w.nodes {
		if w.nodes[i].name == name {
			w.nodes = append(w.nodes[:i:i], w.nodes[i+1:]...)
			break
		}
	}
	for i := range w.instances {
		if w.instances[i].name == name {
			w.instances[i].state = state
		}
	}
}

func TestRevokedMachines(t *testing.T) {
	const (
		worker = "sandbox://t/worker-1"
		cp     = "sandbox://t/control-plane-2"
	)
	for _, tt := range []struct {
		name    string
		edit    func(*world)
		want    []string
		waiting string
	}{
		{"a worker goes with its Node, without cordon and drain", func(w *world) {
			w.intents = []intent{revoked("worker-1", workerGroup)}
		}, []string{"delete machine worker-1 " + worker, "delete node worker-1 " + worker}, ""},
		{"so it does while its drain is blocked", func(w *world) {
			w.nodes[4].cordon, w.nodes[4].blocker = cordonedByOthers, "PodDisruptionBudget web/web allows no eviction"
			w.intents = []intent{revoked("worker-1", workerGroup)}
		}, []string{"delete machine worker-1 " + worker, "delete node worker-1 " + worker}, ""},
		{"a control plane leaves etcd first", func(w *world) {
			w.intents = []intent{revoked("control-plane-2", cpGroup)}
		}, []string{"remove etcd member control-plane-2 leaving=2"}, ""},
		{"then its machine and its Node go", func(w *world) {
			w.etcd = w.etcd[:2]
			w.intents = []intent{revoked("control-plane-2", cpGroup)}
		}, []string{"delete machine control-plane-2 " + cp, "delete node control-plane-2 " + cp}, ""},
		{"a control plane that claims a group of workers leaves etcd first as well", func(w *world) {
			w.intents = []intent{revoked("control-plane-2", workerGroup)}
		}, []string{"remove etcd member control-plane-2 leaving=2"}, ""},
		{"a member leaves only while the others are healthy", func(w *world) {
			w.etcd[1].healthy = false
			w.intents = []intent{revoked("control-plane-2", cpGroup)}
		}, nil, "EtcdUnhealthy"},
		{"the leader of etcd is moved off first", func(w *world) {
			w.etcd[0].leader, w.etcd[2].leader = false, true
			w.intents = []intent{revoked("control-plane-2", cpGroup)}
		}, []string{"move etcd leader control-plane-2 heir=control-plane-0"}, ""},
		{"the operator leaves the machine before it goes", func(w *world) {
			w.leader = "control-plane-2"
			w.intents = []intent{revoked("control-plane-2", cpGroup)}
		}, []string{"yield lease control-plane-2"}, ""},
		{"a machine that has another name in the cloud stays", func(w *world) {
			in := revoked("worker-1", workerGroup)
			in.machine = "sandbox://t/control-plane-0"
			w.intents = []intent{in}
		}, nil, "OtherMachine"},
		{"a machine that the cloud has not described stays", func(w *world) {
			in := revoked("worker-9", workerGroup)
			w.intents = []intent{in}
		}, nil, "MachineUnknown"},
		{"a Node that claims another machine is deleted with its own", func(w *world) {
			w.nodes[4].providerID = "sandbox://t/control-plane-0"
			w.intents = []intent{revoked("worker-1", workerGroup)}
		}, []string{"delete machine worker-1 " + worker, "delete node worker-1 sandbox://t/control-plane-0"}, ""},
		{"the intent stays until the cloud confirms that the machine is gone", func(w *world) {
			w.without("worker-1", "Terminating")
			w.intents = []intent{revoked("worker-1", workerGroup)}
		}, nil, "MachineLeaves"},
		{"then it ends", func(w *world) {
			w.without("worker-1", "Terminated")
			w.intents = []intent{revoked("worker-1", workerGroup)}
		}, []string{"clear intent revoke-worker-1 Leave machine=" + worker}, ""},
		{"a replacement waits for the removal", func(w *world) {
			w.intents = []intent{refilling("worker-1", workerGroup), revoked("worker-1", workerGroup)}
		}, []string{"delete machine worker-1 " + worker, "delete node worker-1 " + worker}, ""},
		{"a Node that is gone while its machine runs is not replaced yet", func(w *world) {
			w.without("worker-1", "Ready")
			w.intents = []intent{refilling("worker-1", workerGroup), revoked("worker-1", workerGroup)}
		}, []string{"delete machine worker-1 " + worker}, "MachineLeaves"},
		{"a machine is made when the old one is being deleted", func(w *world) {
			w.without("worker-1", "Terminating")
			w.intents = []intent{refilling("worker-1", workerGroup), revoked("worker-1", workerGroup)}
		}, []string{"create machine refill-worker-1 Join donor=worker-1"}, "MachineLeaves"},
		{"not while the autoscaler runs", func(w *world) {
			w.autoscaler = autoscaler{enabled: true, running: true}
			w.without("worker-1", "Terminated")
			w.intents = []intent{refilling("worker-1", workerGroup)}
		}, []string{"pause autoscaler"}, ""},
		{"not from half a list", func(w *world) {
			w.complete = false
			w.without("worker-1", "Terminated")
			w.intents = []intent{refilling("worker-1", workerGroup)}
		}, nil, reasonPartial},
		{"not in a group that the cloud does not list", func(w *world) {
			w.groups[1].missing = true
			w.without("worker-1", "Terminated")
			w.intents = []intent{refilling("worker-1", workerGroup)}
		}, nil, "GroupMissing"},
		{"not after its deadline", func(w *world) {
			w.without("worker-1", "Terminated")
			in := refilling("worker-1", workerGroup)
			in.deadline = w.now.Add(-time.Second)
			w.intents = []intent{in}
		}, []string{"clear intent refill-worker-1 Join donor=worker-1"}, ""},
		{"a control plane is not made while another one joins", func(w *world) {
			w.without("control-plane-2", "Terminated")
			w.etcd = w.etcd[:2]
			w.intents = []intent{refilling("control-plane-2", cpGroup), {name: "replace-0", goal: v1alpha1.JoinGoal, token: "t", donor: "control-plane-1", group: cpGroup}}
			w.nodes[1].image = image1
			w.instances = append(w.instances, instance{id: "sandbox://t/control-plane-3", name: "control-plane-3", group: cpGroup, token: "t", state: "Ready", since: w.now})
		}, nil, "MachineJoins"},
		{"a machine that joins is waited for", func(w *world) {
			w.without("worker-1", "Terminated")
			w.instances = append(w.instances, instance{id: "sandbox://t/worker-2", name: "worker-2", group: workerGroup, token: "r", state: "Ready", since: w.now})
			w.intents = []intent{refilling("worker-1", workerGroup)}
		}, nil, "MachineJoins"},
		{"one that does not join in time is given up", func(w *world) {
			w.without("worker-1", "Terminated")
			w.instances = append(w.instances, instance{id: "sandbox://t/worker-2", name: "worker-2", group: workerGroup, token: "r", state: "Ready", since: w.now.Add(-joinDeadline - time.Second)})
			w.intents = []intent{refilling("worker-1", workerGroup)}
		}, []string{"bind intent refill-worker-1 Leave donor=worker-1 machine=sandbox://t/worker-2"}, ""},
		{"one that has joined takes the place", func(w *world) {
			w.without("worker-1", "Terminated")
			w.nodes = append(w.nodes, machine("worker-2", func(n *node) { n.image = image2 }))
			w.instances = append(w.instances, instance{id: "sandbox://t/worker-2", name: "worker-2", group: workerGroup, token: "r", state: "Ready", since: w.now})
			w.intents = []intent{refilling("worker-1", workerGroup)}
		}, []string{"adopt heir worker-2 donor=worker-1"}, ""},
		{"it inherits nothing from a Node that came back", func(w *world) {
			w.nodes = append(w.nodes, machine("worker-2", func(n *node) { n.image = image2 }))
			w.instances = append(w.instances, instance{id: "sandbox://t/worker-2", name: "worker-2", group: workerGroup, token: "r", state: "Ready", since: w.now})
			w.intents = []intent{refilling("worker-1", workerGroup)}
		}, nil, "MachineLeaves"},
		{"no machine is made while a rollout settles which of two goes", func(w *world) {
			w.without("worker-1", "Terminated")
			w.nodes = append(w.nodes, machine("worker-2", func(n *node) { n.donor = "worker-1" }))
			w.instances = append(w.instances, instance{id: "sandbox://t/worker-2", name: "worker-2", group: workerGroup, token: "t", state: "Ready", since: w.now})
			w.intents = []intent{refilling("worker-1", workerGroup), {name: "replace-0", goal: v1alpha1.JoinGoal, token: "t", donor: "worker-1", group: workerGroup}}
		}, []string{"clear intent replace-0 Join donor=worker-1"}, ""},
		{"nor if a rollout had replaced it already", func(w *world) {
			w.without("worker-1", "Terminated")
			w.nodes = append(w.nodes, machine("worker-2", func(n *node) { n.donor = "worker-1" }))
			w.instances = append(w.instances, instance{id: "sandbox://t/worker-2", name: "worker-2", group: workerGroup, token: "t", state: "Ready", since: w.now})
			w.intents = []intent{refilling("worker-1", workerGroup)}
		}, []string{"clear intent refill-worker-1 Join donor=worker-1"}, ""},
		{"an heir of a rollout that is given up does not count", func(w *world) {
			w.without("worker-1", "Terminated")
			w.nodes = append(w.nodes, machine("worker-2", func(n *node) { n.donor, n.cordon = "worker-1", cordonedByUs }))
			w.instances = append(w.instances, instance{id: "sandbox://t/worker-2", name: "worker-2", group: workerGroup, token: "t", state: "Ready", since: w.now})
			w.intents = []intent{refilling("worker-1", workerGroup), {name: "replace-0", goal: v1alpha1.LeaveGoal, token: "t", donor: "worker-1", group: workerGroup, machine: "sandbox://t/worker-2", node: "worker-2"}}
		}, []string{"create machine refill-worker-1 Join donor=worker-1", "drain worker-2"}, ""},
		{"while it is not Ready its join may break off", func(w *world) {
			w.without("worker-1", "Terminated")
			w.nodes = append(w.nodes, machine("worker-2", func(n *node) { n.image, n.donor, n.ready = image2, "worker-1", false }))
			w.instances = append(w.instances, instance{id: "sandbox://t/worker-2", name: "worker-2", group: workerGroup, token: "r", state: "Ready", since: w.now})
			w.intents = []intent{refilling("worker-1", workerGroup)}
		}, nil, "NodeNeverReady"},
		{"and is given up when its time is over", func(w *world) {
			w.without("worker-1", "Terminated")
			w.nodes = append(w.nodes, machine("worker-2", func(n *node) { n.image, n.donor, n.ready = image2, "worker-1", false }))
			w.instances = append(w.instances, instance{id: "sandbox://t/worker-2", name: "worker-2", group: workerGroup, token: "r", state: "Ready", since: w.now.Add(-joinDeadline - time.Minute)})
			w.intents = []intent{refilling("worker-1", workerGroup)}
		}, []string{"bind intent refill-worker-1 Leave donor=worker-1 machine=sandbox://t/worker-2"}, ""},
		{"then the intent ends", func(w *world) {
			w.without("worker-1", "Terminated")
			w.nodes = append(w.nodes, machine("worker-2", func(n *node) { n.image, n.donor = image2, "worker-1" }))
			w.instances = append(w.instances, instance{id: "sandbox://t/worker-2", name: "worker-2", group: workerGroup, token: "r", state: "Ready", since: w.now})
			w.intents = []intent{refilling("worker-1", workerGroup)}
		}, []string{"clear intent refill-worker-1 Join donor=worker-1"}, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			wantDecision(t, tt.want, tt.waiting)(decide(atRest(tt.edit)))
		})
	}
}

// A machine that has replaced a revoked one is a machine of its group like any other: a
// rollout that is under way must not use it up as the heir of another node.
func TestReplacementOfARevokedMachineIsNobodysHeir(t *testing.T) {
	s, w := rollout(func(_ *v1alpha1.NodeVersionSpec, w *world) {
		w.without("worker-1", "Terminated")
		w.nodes = append(w.nodes, machine("worker-2", func(n *node) { n.donor = "worker-1" }))
		w.instances = append(w.instances, instance{id: "sandbox://t/worker-2", name: "worker-2", group: workerGroup, token: "r", state: "Ready", since: w.now})
	})
	actions, _ := decide(s, w)
	for _, a := range actions {
		if a.kind == recordIntent && a.intent.token == "r" || a.kind == adoptHeir {
			t.Errorf("the replacement is used again: %s", a)
		}
	}
	if len(actions) != 1 || actions[0].kind != recordIntent || actions[0].intent.donor != "worker-0" {
		t.Errorf("actions %v, want the replacement of worker-0 with a machine of its own", actions)
	}
}

func TestAnnotationMarksARevokedIntent(t *testing.T) {
	p := revoked("worker-1", workerGroup).pendingNode()
	if intentOf(p).revoked {
		t.Error("an intent without the annotation is revoked")
	}
	metav1.SetMetaDataAnnotation(&p.ObjectMeta, v1alpha1.AnnotationRevoked, "by ops@laptop: captured")
	if !intentOf(p).revoked {
		t.Error("an intent with the annotation is not revoked")
	}
}
