package decision

import (
	"crypto/sha256"
	"encoding/hex"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"constellation/engine/revocation"
	"constellation/operator/api/v1alpha1"
)

// atRest returns the cluster of rollout with all workers at the target, after edits.
func atRest(edit ...func(*World)) (v1alpha1.NodeVersionSpec, World) {
	return rollout(func(_ *v1alpha1.NodeVersionSpec, w *World) {
		w.Autoscaler = Autoscaler{}
		w.Nodes[3].Image, w.Nodes[4].Image = image2, image2
		for _, e := range edit {
			e(w)
		}
	})
}

// revoked is the intent of a node's machine that the console has revoked.
func revoked(node, group string) Intent {
	return Intent{Name: revocation.RemovalPrefix + node, Goal: v1alpha1.LeaveGoal, Machine: machine(node).ProviderID, Node: node, Group: group, Revoked: true}
}

// refilling is the intent of the machine in its place.
func refilling(node, group string) Intent {
	return Intent{Name: revocation.RefillPrefix + node, Goal: v1alpha1.JoinGoal, Token: "r", OldNode: node, Group: group, Deadline: modelNow.Add(JoinDeadline)}
}

// without removes a node, and sets the state of its machine.
func (w *World) without(name string, state v1alpha1.InstanceState) {
	for i := range w.Nodes {
		if w.Nodes[i].Name == name {
			w.Nodes = append(w.Nodes[:i:i], w.Nodes[i+1:]...)
			break
		}
	}
	for i := range w.Instances {
		if w.Instances[i].Name == name {
			w.Instances[i].State = state
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
		edit    func(*World)
		want    []string
		waiting string
	}{
		{name: "a worker and its Node are deleted without cordon and drain", edit: func(w *World) {
			w.Intents = []Intent{revoked("worker-1", workerGroup)}
		}, want: []string{"delete machine worker-1 " + worker, "delete node worker-1 " + worker}},
		{name: "a worker is deleted while its drain is blocked", edit: func(w *World) {
			w.Nodes[4].Cordon, w.Nodes[4].DrainBlocker = CordonedByOthers, "PodDisruptionBudget web/web allows no eviction"
			w.Intents = []Intent{revoked("worker-1", workerGroup)}
		}, want: []string{"delete machine worker-1 " + worker, "delete node worker-1 " + worker}},
		{name: "a control plane leaves etcd first", edit: func(w *World) {
			w.Intents = []Intent{revoked("control-plane-2", cpGroup)}
		}, want: []string{"remove etcd member control-plane-2 leaving=2"}},
		{name: "a control plane that has left etcd is deleted with its Node", edit: func(w *World) {
			w.Etcd = w.Etcd[:2]
			w.Intents = []Intent{revoked("control-plane-2", cpGroup)}
		}, want: []string{"delete machine control-plane-2 " + cp, "delete node control-plane-2 " + cp}},
		{name: "a control plane that claims a group of workers leaves etcd first as well", edit: func(w *World) {
			w.Intents = []Intent{revoked("control-plane-2", workerGroup)}
		}, want: []string{"remove etcd member control-plane-2 leaving=2"}},
		{name: "a member leaves only while the others are healthy", edit: func(w *World) {
			w.Etcd[1].Healthy = false
			w.Intents = []Intent{revoked("control-plane-2", cpGroup)}
		}, want: nil, waiting: "EtcdUnhealthy"},
		{name: "the leadership of etcd is moved first", edit: func(w *World) {
			w.Etcd[0].Leader, w.Etcd[2].Leader = false, true
			w.Intents = []Intent{revoked("control-plane-2", cpGroup)}
		}, want: []string{"move etcd leader control-plane-2 heir=control-plane-0"}},
		{name: "the operator's leader leaves the machine before the deletion", edit: func(w *World) {
			w.LeaderNode = "control-plane-2"
			w.Intents = []Intent{revoked("control-plane-2", cpGroup)}
		}, want: []string{"yield lease control-plane-2"}},
		{name: "a machine that has another name in the cloud stays", edit: func(w *World) {
			in := revoked("worker-1", workerGroup)
			in.Machine = "sandbox://t/control-plane-0"
			w.Intents = []Intent{in}
		}, want: nil, waiting: "OtherMachine"},
		{name: "a machine that the cloud has not described stays", edit: func(w *World) {
			in := revoked("worker-9", workerGroup)
			w.Intents = []Intent{in}
		}, want: nil, waiting: "MachineUnknown"},
		{name: "a Node that claims another machine is deleted with its own", edit: func(w *World) {
			w.Nodes[4].ProviderID = "sandbox://t/control-plane-0"
			w.Intents = []Intent{revoked("worker-1", workerGroup)}
		}, want: []string{"delete machine worker-1 " + worker, "delete node worker-1 sandbox://t/control-plane-0"}},
		{name: "the intent stays until the cloud confirms that the machine is gone", edit: func(w *World) {
			w.without("worker-1", "Terminating")
			w.Intents = []Intent{revoked("worker-1", workerGroup)}
		}, want: nil, waiting: "MachineLeaves"},
		{name: "the intent ends when the machine is deleted", edit: func(w *World) {
			w.without("worker-1", "Terminated")
			w.Intents = []Intent{revoked("worker-1", workerGroup)}
		}, want: []string{"clear intent revoke-worker-1 Leave machine=" + worker}},
		{name: "a replacement waits for the removal", edit: func(w *World) {
			w.Intents = []Intent{refilling("worker-1", workerGroup), revoked("worker-1", workerGroup)}
		}, want: []string{"delete machine worker-1 " + worker, "delete node worker-1 " + worker}},
		{name: "a deleted Node whose machine runs is not replaced yet", edit: func(w *World) {
			w.without("worker-1", "Ready")
			w.Intents = []Intent{refilling("worker-1", workerGroup), revoked("worker-1", workerGroup)}
		}, want: []string{"delete machine worker-1 " + worker}, waiting: "MachineLeaves"},
		{name: "a machine is created when the old one is being deleted", edit: func(w *World) {
			w.without("worker-1", "Terminating")
			w.Intents = []Intent{refilling("worker-1", workerGroup), revoked("worker-1", workerGroup)}
		}, want: []string{"create machine refill-worker-1 Join donor=worker-1"}, waiting: "MachineLeaves"},
		{name: "no machine is created while the autoscaler runs", edit: func(w *World) {
			w.Autoscaler = Autoscaler{Enabled: true, Running: true}
			w.without("worker-1", "Terminated")
			w.Intents = []Intent{refilling("worker-1", workerGroup)}
		}, want: []string{"pause autoscaler"}},
		{name: "no machine is created from an incomplete list", edit: func(w *World) {
			w.Complete = false
			w.without("worker-1", "Terminated")
			w.Intents = []Intent{refilling("worker-1", workerGroup)}
		}, want: nil, waiting: ReasonPartial},
		{name: "no machine is created in a group that the cloud does not list", edit: func(w *World) {
			w.Groups[1].NotListed = true
			w.without("worker-1", "Terminated")
			w.Intents = []Intent{refilling("worker-1", workerGroup)}
		}, want: nil, waiting: "GroupMissing"},
		{name: "no machine is created after the deadline of the intent", edit: func(w *World) {
			w.without("worker-1", "Terminated")
			in := refilling("worker-1", workerGroup)
			in.Deadline = w.Now.Add(-time.Second)
			w.Intents = []Intent{in}
		}, want: []string{"clear intent refill-worker-1 Join donor=worker-1"}},
		{name: "no control plane is created while another one joins", edit: func(w *World) {
			w.without("control-plane-2", "Terminated")
			w.Etcd = w.Etcd[:2]
			w.Intents = []Intent{refilling("control-plane-2", cpGroup), {Name: "replace-0", Goal: v1alpha1.JoinGoal, Token: "t", OldNode: "control-plane-1", Group: cpGroup}}
			w.Nodes[1].Image = image1
			w.Instances = append(w.Instances, Instance{ID: "sandbox://t/control-plane-3", Name: "control-plane-3", Group: cpGroup, Token: "t", State: "Ready", Since: w.Now})
		}, want: nil, waiting: "MachineJoins"},
		{name: "the operator waits for a joining machine", edit: func(w *World) {
			w.without("worker-1", "Terminated")
			w.Instances = append(w.Instances, Instance{ID: "sandbox://t/worker-2", Name: "worker-2", Group: workerGroup, Token: "r", State: "Ready", Since: w.Now})
			w.Intents = []Intent{refilling("worker-1", workerGroup)}
		}, want: nil, waiting: "MachineJoins"},
		{name: "a machine that does not join in time is given up", edit: func(w *World) {
			w.without("worker-1", "Terminated")
			w.Instances = append(w.Instances, Instance{ID: "sandbox://t/worker-2", Name: "worker-2", Group: workerGroup, Token: "r", State: "Ready", Since: w.Now.Add(-JoinDeadline - time.Second)})
			w.Intents = []Intent{refilling("worker-1", workerGroup)}
		}, want: []string{"bind intent refill-worker-1 Leave donor=worker-1 machine=sandbox://t/worker-2"}},
		{name: "a machine that has joined replaces the revoked node", edit: func(w *World) {
			w.without("worker-1", "Terminated")
			w.Nodes = append(w.Nodes, machine("worker-2", func(n *Node) { n.Image = image2 }))
			w.Instances = append(w.Instances, Instance{ID: "sandbox://t/worker-2", Name: "worker-2", Group: workerGroup, Token: "r", State: "Ready", Since: w.Now})
			w.Intents = []Intent{refilling("worker-1", workerGroup)}
		}, want: []string{"adopt heir worker-2 donor=worker-1"}},
		{name: "a machine that has joined inherits nothing from a Node that came back", edit: func(w *World) {
			w.Nodes = append(w.Nodes, machine("worker-2", func(n *Node) { n.Image = image2 }))
			w.Instances = append(w.Instances, Instance{ID: "sandbox://t/worker-2", Name: "worker-2", Group: workerGroup, Token: "r", State: "Ready", Since: w.Now})
			w.Intents = []Intent{refilling("worker-1", workerGroup)}
		}, want: nil, waiting: "MachineLeaves"},
		{name: "no machine is created while a rollout is replacing the node", edit: func(w *World) {
			w.without("worker-1", "Terminated")
			w.Nodes = append(w.Nodes, machine("worker-2", func(n *Node) { n.OldNode = "worker-1" }))
			w.Instances = append(w.Instances, Instance{ID: "sandbox://t/worker-2", Name: "worker-2", Group: workerGroup, Token: "t", State: "Ready", Since: w.Now})
			w.Intents = []Intent{refilling("worker-1", workerGroup), {Name: "replace-0", Goal: v1alpha1.JoinGoal, Token: "t", OldNode: "worker-1", Group: workerGroup}}
		}, want: []string{"clear intent replace-0 Join donor=worker-1"}},
		{name: "no machine is created if a rollout has replaced the node already", edit: func(w *World) {
			w.without("worker-1", "Terminated")
			w.Nodes = append(w.Nodes, machine("worker-2", func(n *Node) { n.OldNode = "worker-1" }))
			w.Instances = append(w.Instances, Instance{ID: "sandbox://t/worker-2", Name: "worker-2", Group: workerGroup, Token: "t", State: "Ready", Since: w.Now})
			w.Intents = []Intent{refilling("worker-1", workerGroup)}
		}, want: []string{"clear intent refill-worker-1 Join donor=worker-1"}},
		{name: "a replacement node that is given up does not count", edit: func(w *World) {
			w.without("worker-1", "Terminated")
			w.Nodes = append(w.Nodes, machine("worker-2", func(n *Node) { n.OldNode, n.Cordon = "worker-1", CordonedByUs }))
			w.Instances = append(w.Instances, Instance{ID: "sandbox://t/worker-2", Name: "worker-2", Group: workerGroup, Token: "t", State: "Ready", Since: w.Now})
			w.Intents = []Intent{refilling("worker-1", workerGroup), {Name: "replace-0", Goal: v1alpha1.LeaveGoal, Token: "t", OldNode: "worker-1", Group: workerGroup, Machine: "sandbox://t/worker-2", Node: "worker-2"}}
		}, want: []string{"create machine refill-worker-1 Join donor=worker-1", "drain worker-2"}},
		{name: "a machine whose Node is not Ready has not joined", edit: func(w *World) {
			w.without("worker-1", "Terminated")
			w.Nodes = append(w.Nodes, machine("worker-2", func(n *Node) { n.Image, n.OldNode, n.Ready = image2, "worker-1", false }))
			w.Instances = append(w.Instances, Instance{ID: "sandbox://t/worker-2", Name: "worker-2", Group: workerGroup, Token: "r", State: "Ready", Since: w.Now})
			w.Intents = []Intent{refilling("worker-1", workerGroup)}
		}, want: nil, waiting: "NodeNeverReady"},
		{name: "a machine whose Node is never Ready is given up", edit: func(w *World) {
			w.without("worker-1", "Terminated")
			w.Nodes = append(w.Nodes, machine("worker-2", func(n *Node) { n.Image, n.OldNode, n.Ready = image2, "worker-1", false }))
			w.Instances = append(w.Instances, Instance{ID: "sandbox://t/worker-2", Name: "worker-2", Group: workerGroup, Token: "r", State: "Ready", Since: w.Now.Add(-JoinDeadline - time.Minute)})
			w.Intents = []Intent{refilling("worker-1", workerGroup)}
		}, want: []string{"bind intent refill-worker-1 Leave donor=worker-1 machine=sandbox://t/worker-2"}},
		{name: "the intent of a machine that was given up ends", edit: func(w *World) {
			w.without("worker-1", "Terminated")
			w.Nodes = append(w.Nodes, machine("worker-2", func(n *Node) { n.Image, n.OldNode = image2, "worker-1" }))
			w.Instances = append(w.Instances, Instance{ID: "sandbox://t/worker-2", Name: "worker-2", Group: workerGroup, Token: "r", State: "Ready", Since: w.Now})
			w.Intents = []Intent{refilling("worker-1", workerGroup)}
		}, want: []string{"clear intent refill-worker-1 Join donor=worker-1"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			wantDecision(t, tt.want, tt.waiting)(decide(atRest(tt.edit)))
		})
	}
}

// A machine that has replaced a revoked one is an ordinary machine of its group. A rollout in
// progress must not use it as the replacement node of another node.
func TestReplacementOfARevokedMachineIsNoReplacementNode(t *testing.T) {
	s, w := rollout(func(_ *v1alpha1.NodeVersionSpec, w *World) {
		w.without("worker-1", "Terminated")
		w.Nodes = append(w.Nodes, machine("worker-2", func(n *Node) { n.OldNode = "worker-1" }))
		w.Instances = append(w.Instances, Instance{ID: "sandbox://t/worker-2", Name: "worker-2", Group: workerGroup, Token: "r", State: "Ready", Since: w.Now})
	})
	actions, _ := decide(s, w)
	for _, a := range actions {
		if a.Kind == RecordIntent && a.Intent.Token == "r" || a.Kind == AdoptReplacement {
			t.Errorf("the replacement is used again: %s", a)
		}
	}
	if len(actions) != 1 || actions[0].Kind != RecordIntent || actions[0].Intent.OldNode != "worker-0" {
		t.Errorf("actions %v, want the replacement of worker-0 with a machine of its own", actions)
	}
}

func TestAnnotationMarksARevokedIntent(t *testing.T) {
	p := revoked("worker-1", workerGroup).PendingNode()
	if IntentOf(p).Revoked {
		t.Error("an intent without the annotation is revoked")
	}
	metav1.SetMetaDataAnnotation(&p.ObjectMeta, v1alpha1.AnnotationRevoked, "by ops@laptop: captured")
	if !IntentOf(p).Revoked {
		t.Error("an intent with the annotation is not revoked")
	}
}

// A cloud that reuses names gives those of revoked machines to new ones, which cannot join. Without the
// refused machine the next one would get the name again, for a year.
func TestRefusedNamesAreKeptWhileTheNextMachineIsCreated(t *testing.T) {
	refuse := func(w *World, name, group, token string) {
		w.Revoked = revocation.List{name: {ProviderID: "sandbox://t/" + name + "#1"}}
		w.Instances = append(w.Instances, Instance{ID: "sandbox://t/" + name + "#2", Name: name, Group: group, Token: token, State: "Ready", Since: w.Now})
	}
	tracking := func(w *World, name, group string) Intent {
		return Intent{Name: MachinePrefix + name, Goal: v1alpha1.JoinGoal, Machine: "sandbox://t/" + name + "#2", Node: name, Group: group, Deadline: w.Now.Add(JoinDeadline)}
	}
	again := refilling("worker-1", workerGroup)
	again.Name, again.Token = "refill-worker-1.5e4c22f2", "another"
	for _, tt := range []struct {
		name    string
		edit    func(*World)
		want    []string
		waiting string
	}{
		{name: "another machine is requested in place of the revoked one", edit: func(w *World) {
			w.Nodes[3].Image = image2
			w.without("worker-1", "Terminated")
			refuse(w, "worker-1", workerGroup, "r")
			w.Intents = []Intent{refilling("worker-1", workerGroup)}
		}, want: []string{"record intent refill-worker-1.%s Join donor=worker-1"}},
		{name: "the intent of the refused machine ends after that", edit: func(w *World) {
			w.Nodes[3].Image = image2
			w.without("worker-1", "Terminated")
			refuse(w, "worker-1", workerGroup, "r")
			w.Intents = []Intent{refilling("worker-1", workerGroup), again}
		}, want: []string{"clear intent refill-worker-1 Join donor=worker-1", "create machine refill-worker-1.%s Join donor=worker-1"}},
		{name: "the next machine is created while the refused one is tracked", edit: func(w *World) {
			w.Nodes[3].Image = image2
			w.without("worker-1", "Terminated")
			refuse(w, "worker-1", workerGroup, "r")
			w.Intents = []Intent{tracking(w, "worker-1", workerGroup), again}
		}, want: []string{"create machine refill-worker-1.%s Join donor=worker-1"}},
		{name: "a refused machine in a surge slot releases the slot", edit: func(w *World) {
			refuse(w, "worker-7", workerGroup, "t")
			w.Intents = []Intent{{Name: "replace-0", Goal: v1alpha1.JoinGoal, Token: "t", OldNode: "worker-0", Group: workerGroup, Deadline: w.Now.Add(JoinDeadline)}}
		}, want: []string{"clear intent replace-0 Join donor=worker-0"}},
		{name: "its machine is tracked and not deleted, and the node is replaced by another one", edit: func(w *World) {
			refuse(w, "worker-7", workerGroup, "t")
		}, want: []string{"record intent machine-worker-7 Join machine=sandbox://t/worker-7#2", "record intent replace-0 Join donor=worker-0"}},
		{name: "a refused control plane does not block the others", edit: func(w *World) {
			w.Nodes[0].Image = image1
			refuse(w, "control-plane-7", cpGroup, "t")
			w.Intents = []Intent{tracking(w, "control-plane-7", cpGroup)}
		}, want: []string{"record intent replace-0 Join donor=control-plane-0"}},
		{name: "it is deleted when its time to join is over", edit: func(w *World) {
			w.Nodes[3].Image, w.Nodes[4].Image = image2, image2
			refuse(w, "worker-7", workerGroup, "t")
			in := tracking(w, "worker-7", workerGroup)
			in.Deadline = w.Now.Add(-time.Second)
			w.Intents = []Intent{in}
		}, want: []string{"bind intent machine-worker-7 Leave machine=sandbox://t/worker-7#2"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s, w := rollout(func(_ *v1alpha1.NodeVersionSpec, w *World) { tt.edit(w) })
			sum := sha256.Sum256([]byte("r\x00sandbox://t/worker-1#2"))
			name := hex.EncodeToString(sum[:4])
			for i := range w.Intents {
				w.Intents[i].Name = strings.Replace(w.Intents[i].Name, "5e4c22f2", name, 1)
			}
			for i := range tt.want {
				tt.want[i] = strings.Replace(tt.want[i], "%s", name, 1)
			}
			wantDecision(t, tt.want, tt.waiting)(decide(s, w))
		})
	}
}
