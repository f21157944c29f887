package decision

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/util/intstr"

	"constellation/operator/api/v1alpha1"
)

// rollout is a cluster of three control planes at the target and two old workers, with
// the autoscaler stopped, ready for its first worker to be replaced.
func rollout(edit ...func(*v1alpha1.NodeVersionSpec, *World)) (v1alpha1.NodeVersionSpec, World) {
	s := spec()
	w := World{
		Now: modelNow, Complete: true, Autoscaler: Autoscaler{PausedByUs: true}, Versions: map[string]string{refA: "v1.35.4", refB: "v1.36.3"},
		Groups: []Group{{Name: "control-plane", ID: cpGroup, Role: v1alpha1.ControlPlaneRole, Image: image2}, {Name: "workers", ID: workerGroup, Role: v1alpha1.WorkerRole, Image: image2}},
	}
	w.Before.JoinComponents = v1alpha1.JoinComponents{ControlPlane: refA, Worker: refA}
	for i := range 3 {
		n := machine(fmt.Sprintf("control-plane-%d", i))
		w.Nodes = append(w.Nodes, n)
		w.Etcd = append(w.Etcd, Member{Node: n.Name, Voter: true, Healthy: true, Leader: i == 0})
		w.Instances = append(w.Instances, Instance{ID: n.ProviderID, Name: n.Name, Group: n.Group, State: "Ready"})
	}
	for i := range 2 {
		n := machine(fmt.Sprintf("worker-%d", i), func(n *Node) { n.Image = image1 })
		w.Nodes = append(w.Nodes, n)
		w.Instances = append(w.Instances, Instance{ID: n.ProviderID, Name: n.Name, Group: n.Group, State: "Ready"})
	}
	for _, e := range edit {
		e(&s, &w)
	}
	agree(&w)
	return s, w
}

// agree copies the Nodes' data to the cloud's machines, except for machines to which a test has
// given an image.
func agree(w *World) {
	byID := make(map[string]*Node, len(w.Nodes))
	for i := range w.Nodes {
		byID[w.Nodes[i].ProviderID+w.Nodes[i].Name] = &w.Nodes[i]
	}
	for i := range w.Instances {
		m := &w.Instances[i]
		if n := byID[m.ID+m.Name]; n != nil && (m.Image == "" || m.Hash != "") {
			m.Group, m.Image, m.Hash = n.Group, n.Image, MachineHash(m.ID)
		}
	}
}

// membersAddressed gives the members of etcd the addresses of the machines of their names.
func membersAddressed(w *World) {
	for i := range w.Etcd {
		for _, m := range w.Instances {
			if m.Name == w.Etcd[i].Node {
				w.Etcd[i].Address = m.Address
			}
		}
	}
}

// addressed assigns addresses to the machines, from 10.42.0.1 on.
func addressed(w *World) {
	for i := range w.Instances {
		w.Instances[i].Address = fmt.Sprintf("10.42.0.%d", i+1)
	}
}

func TestDecide(t *testing.T) {
	for _, tt := range []struct {
		name    string
		edit    func(*v1alpha1.NodeVersionSpec, *World)
		want    []string
		waiting string
		ready   string
	}{
		{name: "a worker's replacement begins with an intent", edit: func(*v1alpha1.NodeVersionSpec, *World) {}, want: []string{"record intent replace-0 Join donor=worker-0"}, ready: "False RollingOut"},
		{name: "as many as the surge allows", edit: func(s *v1alpha1.NodeVersionSpec, _ *World) {
			surge := intstr.FromString("40%")
			s.Rollout.MaxSurge = &surge
		}, want: []string{"record intent replace-0 Join donor=worker-0", "record intent replace-1 Join donor=worker-1"}, ready: "False RollingOut"},
		{name: "a control plane with an older etcd than the target's is replaced", edit: func(s *v1alpha1.NodeVersionSpec, w *World) {
			s.EtcdImageTag, s.Rollout.KeepWorkers = "3.6.11-0", true
			w.KubeadmEtcdTag, w.KubeadmRead = "3.6.11-0", true
			for i, v := range []string{"3.6.11", "3.6.8", "3.6.8"} {
				w.Nodes[i].Etcd = v
			}
		}, want: []string{"record intent replace-0 Join donor=control-plane-1"}, ready: "False RollingOut"},
		{name: "a control plane is not replaced by one that gets an older etcd", edit: func(s *v1alpha1.NodeVersionSpec, w *World) {
			s.EtcdImageTag, s.Rollout.KeepWorkers = "3.6.11-0", true
			w.KubeadmEtcdTag, w.KubeadmRead = "3.6.9-0", true
			for i := range 3 {
				w.Nodes[i].Etcd = "3.6.8"
			}
		}, want: nil, waiting: "EtcdTagMissing", ready: "False EtcdTagMissing"},
		{name: "a control plane that joined with an older etcd is not replaced again", edit: func(s *v1alpha1.NodeVersionSpec, w *World) {
			s.EtcdImageTag, s.Rollout.KeepWorkers = "3.6.11-0", true
			w.KubeadmRead = true
			for i, v := range []string{"3.6.11", "3.6.11", "3.6.8"} {
				w.Nodes[i].Etcd = v
			}
		}, want: nil, waiting: "EtcdTagMissing", ready: "False EtcdTagMissing"},
		{name: "no control plane is replaced before kubeadm's configuration was read", edit: func(s *v1alpha1.NodeVersionSpec, w *World) {
			s.EtcdImageTag, s.Rollout.KeepWorkers = "3.6.11-0", true
			for i := range 3 {
				w.Nodes[i].Etcd = "3.6.8"
			}
		}, want: nil, waiting: "EtcdTagUnread", ready: "False EtcdTagUnread"},
		{name: "an older etcd in kubeadm's configuration holds no worker", edit: func(s *v1alpha1.NodeVersionSpec, w *World) {
			s.EtcdImageTag = "3.6.11-0"
			w.KubeadmRead = true
			for i := range 3 {
				w.Nodes[i].Etcd = "3.6.11"
			}
		}, want: []string{"record intent replace-0 Join donor=worker-0"}, ready: "False RollingOut"},
		{name: "a control plane whose etcd is not known stays, and workers wait", edit: func(s *v1alpha1.NodeVersionSpec, w *World) {
			s.EtcdImageTag = "3.6.11-0"
			for i, v := range []string{"3.6.11", "", "3.7.0"} {
				w.Nodes[i].Etcd = v
			}
		}, want: []string{"resume autoscaler"}, ready: "False RollingOut"},
		{name: "the autoscaler is stopped first", edit: func(_ *v1alpha1.NodeVersionSpec, w *World) {
			w.Autoscaler = Autoscaler{Enabled: true, Running: true}
		}, want: []string{"pause autoscaler"}, ready: "False RollingOut"},
		{name: "keepWorkers keeps workers, and the autoscaler is resumed", edit: func(s *v1alpha1.NodeVersionSpec, _ *World) { s.Rollout.KeepWorkers = true }, want: []string{"resume autoscaler"}, ready: "True WorkersKept"},
		{name: "a worker on hold is skipped, the next one is replaced", edit: func(_ *v1alpha1.NodeVersionSpec, w *World) { w.Nodes[3].OnHold = true }, want: []string{"record intent replace-0 Join donor=worker-1"}, ready: "False RollingOut"},
		{name: "a group on hold is skipped, the autoscaler is resumed", edit: func(_ *v1alpha1.NodeVersionSpec, w *World) { w.Groups[1].OnHold = true }, want: []string{"resume autoscaler"}, ready: "True NodesHeld"},
		{name: "workers wait for a control plane on hold", edit: func(_ *v1alpha1.NodeVersionSpec, w *World) { w.Nodes[0].Image, w.Nodes[0].OnHold = image1, true }, want: []string{"resume autoscaler"}, waiting: "ControlPlaneHeld", ready: "False ControlPlaneHeld"},
		{name: "nodes without a group are not changed, but reported", edit: func(_ *v1alpha1.NodeVersionSpec, w *World) { w.Groups = w.Groups[:1] }, want: []string{"resume autoscaler"}, ready: "False GroupsLeftAlone"},
		{name: "a cancelled rollout resumes the autoscaler", edit: func(s *v1alpha1.NodeVersionSpec, _ *World) { s.Rollout.Cancel = true }, want: []string{"resume autoscaler"}, ready: "False Cancelled"},
		{name: "Kubernetes is never downgraded", edit: func(s *v1alpha1.NodeVersionSpec, w *World) {
			s.KubernetesClusterVersion, s.KubernetesComponentsReference = "v1.34.1", "other"
		}, want: []string{"resume autoscaler"}, waiting: "TargetRefused", ready: "False TargetRefused"},
		{name: "no minor version is skipped", edit: func(s *v1alpha1.NodeVersionSpec, w *World) {
			s.KubernetesClusterVersion, s.KubernetesComponentsReference = "v1.37.0", "other"
		}, want: []string{"resume autoscaler"}, waiting: "TargetRefused", ready: "False TargetRefused"},
		{name: "Kubernetes is upgraded by the agent beside the operator", edit: func(s *v1alpha1.NodeVersionSpec, w *World) {
			s.KubernetesClusterVersion, s.KubernetesComponentsReference, w.LeaderNode = "v1.36.3", refB, "control-plane-1"
		}, want: []string{"start upgrade control-plane-1 v1.36.3"}, ready: "False RollingOut"},
		{name: "a member that has not started stays while a control plane joins", edit: func(_ *v1alpha1.NodeVersionSpec, w *World) {
			w.Etcd = append(w.Etcd, Member{Node: "https://10.42.0.9:2380", NotStarted: true})
			w.Instances = append(w.Instances, Instance{ID: "sandbox://demo/control-plane-3", Name: "control-plane-3", Group: cpGroup, Token: "t", State: "Ready", Since: w.Now})
			w.Nodes[2].Image = image1
			w.Intents = []Intent{{Name: "replace-0", Goal: v1alpha1.JoinGoal, Token: "t", OldNode: "control-plane-2", Group: cpGroup}}
		}, want: nil, waiting: "MachineJoins", ready: "False MachineJoins"},
		{name: "a member that never started is removed when no control plane joins", edit: func(_ *v1alpha1.NodeVersionSpec, w *World) {
			w.Etcd = append(w.Etcd, Member{Node: "https://10.42.0.9:2380", NotStarted: true})
			w.Nodes[3].Image, w.Nodes[4].Image = image2, image2
		}, want: []string{"remove etcd member https://10.42.0.9:2380 leaving=3", "resume autoscaler"}, ready: "True UpToDate"},
		{name: "a member that may be about to start stays", edit: func(_ *v1alpha1.NodeVersionSpec, w *World) {
			w.Etcd = append(w.Etcd, Member{Node: "https://10.42.0.9:2380", NotStarted: true, Address: "10.42.0.9", Since: w.Now.Add(-time.Minute)})
			w.Nodes[3].Image, w.Nodes[4].Image = image2, image2
		}, want: []string{"resume autoscaler"}, ready: "True UpToDate"},
		{name: "a member that has not started stays while its control plane exists", edit: func(_ *v1alpha1.NodeVersionSpec, w *World) {
			w.Etcd = append(w.Etcd, Member{Node: "https://10.42.0.2:2380", NotStarted: true, Address: "10.42.0.2"})
			w.Nodes[3].Image, w.Nodes[4].Image = image2, image2
			addressed(w)
		}, want: []string{"resume autoscaler"}, ready: "True UpToDate"},
		{name: "a member without a control plane at its address is removed at once, even while another leaves", edit: func(s *v1alpha1.NodeVersionSpec, w *World) {
			leavingControlPlane(nil)(s, w)
			addressed(w)
			w.Etcd = append(w.Etcd, Member{Node: "https://10.42.0.99:2380", NotStarted: true, Address: "10.42.0.99"})
		}, want: []string{"remove etcd member https://10.42.0.99:2380 leaving=4"}, waiting: "EtcdUnhealthy", ready: "False EtcdUnhealthy"},
		{name: "a member without a control plane stays while a requested machine is not listed", edit: func(s *v1alpha1.NodeVersionSpec, w *World) {
			leavingControlPlane(nil)(s, w)
			addressed(w)
			w.Etcd = append(w.Etcd, Member{Node: "https://10.42.0.99:2380", NotStarted: true, Address: "10.42.0.99"})
			w.Intents = append(w.Intents, Intent{Name: "replace-1", Goal: v1alpha1.JoinGoal, Token: "u", OldNode: "control-plane-1", Group: cpGroup, Deadline: w.Now.Add(time.Minute)})
		}, want: nil, waiting: "EtcdUnhealthy", ready: "False EtcdUnhealthy"},
		{name: "the member of a machine that is given up is removed", edit: func(_ *v1alpha1.NodeVersionSpec, w *World) {
			w.Intents = []Intent{{Name: "replace-0", Goal: v1alpha1.LeaveGoal, Token: "t", OldNode: "control-plane-2", Group: cpGroup, Machine: "sandbox://t/control-plane-9", Node: "control-plane-9"}}
			w.Instances = append(w.Instances, Instance{ID: "sandbox://t/control-plane-9", Name: "control-plane-9", Group: cpGroup, Token: "t", State: "Ready", Since: w.Now})
			addressed(w)
			last := w.Instances[len(w.Instances)-1]
			w.Etcd = append(w.Etcd, Member{Node: "https://" + last.Address + ":2380", NotStarted: true, Address: last.Address})
		}, want: []string{"remove etcd member https://10.42.0.6:2380 leaving=3"}, ready: "False RollingOut"},
		{name: "the member of an earlier machine of a control plane's name is removed, and the later one counts as a voter", edit: func(_ *v1alpha1.NodeVersionSpec, w *World) {
			w.Nodes[3].Image, w.Nodes[4].Image = image2, image2
			addressed(w)
			membersAddressed(w)
			w.Etcd = append(w.Etcd, Member{Node: "control-plane-2", Voter: true, Address: "10.42.0.99"})
		}, want: []string{"remove etcd member control-plane-2 leaving=3", "resume autoscaler"}, ready: "True UpToDate"},
		{name: "the member of an earlier machine is removed before that of the later one, which leaves", edit: func(s *v1alpha1.NodeVersionSpec, w *World) {
			leavingControlPlane(nil)(s, w)
			addressed(w)
			membersAddressed(w)
			w.Etcd = append(w.Etcd, Member{Node: "control-plane-2", Voter: true, Address: "10.42.0.99"})
		}, want: []string{"remove etcd member control-plane-2 leaving=4"}, waiting: "EtcdUnhealthy", ready: "False EtcdUnhealthy"},
		{name: "a control plane that is a Node before it is a member of etcd may join", edit: func(_ *v1alpha1.NodeVersionSpec, w *World) {
			newNode := machine("control-plane-3", func(n *Node) { n.OldNode = "control-plane-2" })
			w.Nodes[2].Image = image1
			w.Nodes = append(w.Nodes, newNode)
			w.Instances = append(w.Instances, Instance{ID: newNode.ProviderID, Name: newNode.Name, Group: cpGroup, Token: "t", State: "Ready", Since: w.Now})
			w.Intents = []Intent{{Name: "replace-0", Goal: v1alpha1.JoinGoal, Token: "t", OldNode: "control-plane-2", Group: cpGroup}}
		}, want: nil, waiting: "HeirNotVoting", ready: "False HeirNotVoting"},
		{name: "a control plane that votes before its join is complete does not take over yet", edit: func(_ *v1alpha1.NodeVersionSpec, w *World) {
			newNode := machine("control-plane-3", func(n *Node) { n.OldNode, n.Unlabeled = "control-plane-2", true })
			w.Nodes[2].Image = image1
			w.Nodes = append(w.Nodes, newNode)
			w.Instances = append(w.Instances, Instance{ID: newNode.ProviderID, Name: newNode.Name, Group: cpGroup, Token: "t", State: "Ready", Since: w.Now})
			w.Intents = []Intent{{Name: "replace-0", Goal: v1alpha1.JoinGoal, Token: "t", OldNode: "control-plane-2", Group: cpGroup}}
			w.Etcd = append(w.Etcd, Member{Node: newNode.Name, Voter: true, Healthy: true})
		}, want: nil, waiting: "HeirNotReady", ready: "False HeirNotReady"},
		{name: "a control plane that a person added may join, however old its machine is", edit: func(_ *v1alpha1.NodeVersionSpec, w *World) {
			added := machine("control-plane-3")
			w.Nodes[3].Image, w.Nodes[4].Image = image2, image2
			w.Nodes = append(w.Nodes, added)
			w.Instances = append(w.Instances, Instance{ID: added.ProviderID, Name: added.Name, Group: cpGroup, State: "Ready", Since: w.Now.Add(-24 * time.Hour)})
		}, want: []string{"resume autoscaler"}, ready: "True UpToDate"},
		{name: "a control plane outside of etcd is removed when its replacement node votes, even without intent and cordon", edit: func(s *v1alpha1.NodeVersionSpec, w *World) {
			s.Rollout.Paused = true
			w.Nodes[1].OldNode = "control-plane-2"
			w.Etcd = w.Etcd[:2]
		}, want: []string{"record intent machine-control-plane-2 Leave machine=sandbox://t/control-plane-2"}, ready: "False Paused"},
		{name: "a group that the cloud does not list is reported as missing, and its nodes stay", edit: func(_ *v1alpha1.NodeVersionSpec, w *World) {
			w.Groups[1].NotListed, w.Groups[1].Image = true, image1
		}, want: nil, waiting: "GroupMissing", ready: "False GroupMissing"},
		{name: "the nodes of other groups are replaced meanwhile", edit: func(_ *v1alpha1.NodeVersionSpec, w *World) {
			w.Groups[1].NotListed = true
			w.Groups = append(w.Groups, Group{Name: "more", ID: "more", Role: v1alpha1.WorkerRole, Image: image2})
			w.Nodes[4].Group = "more"
		}, want: []string{"record intent replace-0 Join donor=worker-1"}, waiting: "GroupMissing", ready: "False GroupMissing"},
		{name: "a control plane comes before workers", edit: func(_ *v1alpha1.NodeVersionSpec, w *World) { w.Nodes[2].Image = image1 }, want: []string{"record intent replace-0 Join donor=control-plane-2"}, ready: "False RollingOut"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			actions, status := decide(rollout(tt.edit))
			wantDecision(t, tt.want, tt.waiting)(actions, status)
			if ready := conditionText(status, v1alpha1.ConditionReady); ready != tt.ready {
				t.Errorf("Ready is %q, want %q", ready, tt.ready)
			}
		})
	}
}

func TestBlockedDrainIsNamedAndItsTimeKept(t *testing.T) {
	since := modelNow.Add(-7 * time.Minute)
	s, w := rollout(func(_ *v1alpha1.NodeVersionSpec, w *World) {
		newNode := machine("worker-2", func(n *Node) { n.OldNode = "worker-0" })
		w.Nodes[3].Replacement, w.Nodes[3].Cordon, w.Nodes[3].CordonedSince, w.Nodes[3].DrainBlocker = "worker-2", CordonedByUs, since, "PodDisruptionBudget web/web allows no eviction"
		w.Nodes = append(w.Nodes, newNode)
		w.Instances = append(w.Instances, Instance{ID: newNode.ProviderID, Name: newNode.Name, Group: newNode.Group, Token: "t", State: "Ready", Since: since})
		w.Intents = []Intent{{Name: "replace-0", Goal: v1alpha1.JoinGoal, Token: "t", OldNode: "worker-0", Group: workerGroup}}
		w.Before.Waiting = &v1alpha1.Waiting{Reason: "DrainBlocked", Object: &v1alpha1.Reference{Kind: "Node", Name: "worker-0"}}
		w.Before.Waiting.Since.Time = since
	})
	_, status := decide(s, w)
	want := &v1alpha1.Waiting{Reason: "DrainBlocked", Message: "worker-0 cannot be drained: PodDisruptionBudget web/web allows no eviction", Object: &v1alpha1.Reference{Kind: "Node", Name: "worker-0"}}
	want.Since.Time = since
	if d := cmp.Diff(want, status.Waiting); d != "" {
		t.Errorf("waiting, want and got:\n%s", d)
	}
}

func TestStatusOfARolloutIsBounded(t *testing.T) {
	s, w := rollout()
	long := strings.Repeat("x", 240)
	w.Run = UpgradeRun{Version: "v1.35.4", Components: refA, Node: long, Phase: "done", Line: strings.Repeat("line ", 400), Started: modelNow}
	for i := range 3000 {
		n := machine(fmt.Sprintf("%s-%d", long, i), func(n *Node) {
			n.Image, n.DrainBlocker, n.Replacement, n.Cordon = image1, strings.Repeat("budget ", 200), "heir", CordonedByUs
		})
		w.Nodes = append(w.Nodes, n)
		w.Groups = append(w.Groups, Group{Name: fmt.Sprintf("g%d", i), ID: fmt.Sprintf("g%d", i), Role: v1alpha1.WorkerRole, Image: image2})
		w.Intents = append(w.Intents, Intent{Name: fmt.Sprintf("machine-%d", i), Goal: v1alpha1.LeaveGoal, Machine: n.ProviderID, Node: n.Name, Group: workerGroup})
	}
	_, status := decide(s, w)
	b, err := json.Marshal(status)
	if err != nil || len(b) > 4096 || status.Waiting == nil {
		t.Errorf("status of %d bytes, waiting %v: %v", len(b), status.Waiting, err)
	}
}

// wantDecision returns a function that compares the result of decide with the expected actions
// and the expected reason to wait; the empty string means that it waits for nothing.
func wantDecision(t *testing.T, want []string, waiting string) func([]Action, v1alpha1.NodeVersionStatus) {
	return func(actions []Action, status v1alpha1.NodeVersionStatus) {
		t.Helper()
		var got []string
		for _, a := range actions {
			got = append(got, a.String())
		}
		if d := cmp.Diff(want, got); d != "" {
			t.Errorf("actions, want and got:\n%s", d)
		}
		reason := ""
		if status.Waiting != nil {
			reason = status.Waiting.Reason
		}
		if reason != waiting {
			t.Errorf("reason to wait %q, want %q", reason, waiting)
		}
	}
}

// decide returns the actions and the status.
func decide(spec v1alpha1.NodeVersionSpec, w World) ([]Action, v1alpha1.NodeVersionStatus) {
	d := Decide(spec, w)
	return d.Actions, d.Status()
}

// TestEveryActionKindHasAName fails when a new kind of action is not in the table of names.
func TestEveryActionKindHasAName(t *testing.T) {
	for _, kind := range ActionKinds() {
		if kind.String() == "" {
			t.Errorf("action %d has no name", kind)
		}
		repeats := kind == DrainNode || kind == CreateInstance || kind == DeleteInstance || kind == MarkRetry || kind == UpgradeAddons
		if moves := (Action{Kind: kind}).moves(); moves == repeats {
			t.Errorf("%s: moves is %t", kind, moves)
		}
	}
}
