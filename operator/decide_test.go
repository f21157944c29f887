package operator

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
func rollout(edit ...func(*v1alpha1.NodeVersionSpec, *world)) (v1alpha1.NodeVersionSpec, world) {
	s := spec()
	w := world{
		now: modelNow, complete: true, autoscaler: autoscaler{ours: true}, versions: map[string]string{refA: "v1.35.4", refB: "v1.36.3"},
		groups: []group{{name: "control-plane", id: cpGroup, role: v1alpha1.ControlPlaneRole, image: image2}, {name: "workers", id: workerGroup, role: v1alpha1.WorkerRole, image: image2}},
	}
	w.before.JoinComponents = v1alpha1.JoinComponents{ControlPlane: refA, Worker: refA}
	for i := range 3 {
		n := machine(fmt.Sprintf("control-plane-%d", i))
		w.nodes = append(w.nodes, n)
		w.etcd = append(w.etcd, member{node: n.name, voter: true, healthy: true, leader: i == 0})
		w.instances = append(w.instances, instance{id: n.providerID, name: n.name, group: n.group, state: "Ready"})
	}
	for i := range 2 {
		n := machine(fmt.Sprintf("worker-%d", i), func(n *node) { n.image = image1 })
		w.nodes = append(w.nodes, n)
		w.instances = append(w.instances, instance{id: n.providerID, name: n.name, group: n.group, state: "Ready"})
	}
	for _, e := range edit {
		e(&s, &w)
	}
	agree(&w)
	return s, w
}

// agree has the cloud say of machines what their Nodes say, but of those that a test has
// given an image.
func agree(w *world) {
	byID := make(map[string]*node, len(w.nodes))
	for i := range w.nodes {
		byID[w.nodes[i].providerID+w.nodes[i].name] = &w.nodes[i]
	}
	for i := range w.instances {
		m := &w.instances[i]
		if n := byID[m.id+m.name]; n != nil && (m.image == "" || m.mark != "") {
			m.group, m.image, m.mark = n.group, n.image, markOf(m.id)
		}
	}
}

// addressed gives the machines addresses, from 10.42.0.1.
func addressed(w *world) {
	for i := range w.instances {
		w.instances[i].address = fmt.Sprintf("10.42.0.%d", i+1)
	}
}

func TestDecide(t *testing.T) {
	for _, tt := range []struct {
		name    string
		edit    func(*v1alpha1.NodeVersionSpec, *world)
		want    []string
		waiting string
		ready   string
	}{
		{"a worker's replacement begins with an intent", func(*v1alpha1.NodeVersionSpec, *world) {}, []string{"record intent replace-0 Join donor=worker-0"}, "", "False RollingOut"},
		{"as many as the surge allows", func(s *v1alpha1.NodeVersionSpec, _ *world) {
			surge := intstr.FromString("40%")
			s.Rollout.MaxSurge = &surge
		}, []string{"record intent replace-0 Join donor=worker-0", "record intent replace-1 Join donor=worker-1"}, "", "False RollingOut"},
		{"the autoscaler is stopped first", func(_ *v1alpha1.NodeVersionSpec, w *world) {
			w.autoscaler = autoscaler{enabled: true, running: true}
		}, []string{"pause autoscaler"}, "", "False RollingOut"},
		{"workers are kept and the autoscaler is given back", func(s *v1alpha1.NodeVersionSpec, _ *world) { s.Rollout.KeepWorkers = true }, []string{"resume autoscaler"}, "", "True WorkersKept"},
		{"a held worker is left as it is, the next one is replaced", func(_ *v1alpha1.NodeVersionSpec, w *world) { w.nodes[3].held = true }, []string{"record intent replace-0 Join donor=worker-1"}, "", "False RollingOut"},
		{"a held group is left as it is, the autoscaler is given back", func(_ *v1alpha1.NodeVersionSpec, w *world) { w.groups[1].held = true }, []string{"resume autoscaler"}, "", "True NodesHeld"},
		{"workers wait for a held control plane", func(_ *v1alpha1.NodeVersionSpec, w *world) { w.nodes[0].image, w.nodes[0].held = image1, true }, []string{"resume autoscaler"}, "ControlPlaneHeld", "False ControlPlaneHeld"},
		{"nodes without a group are left alone and reported", func(_ *v1alpha1.NodeVersionSpec, w *world) { w.groups = w.groups[:1] }, []string{"resume autoscaler"}, "", "False GroupsLeftAlone"},
		{"a cancelled rollout gives the autoscaler back", func(s *v1alpha1.NodeVersionSpec, _ *world) { s.Rollout.Cancel = true }, []string{"resume autoscaler"}, "", "False Cancelled"},
		{"Kubernetes never goes down", func(s *v1alpha1.NodeVersionSpec, w *world) {
			s.KubernetesClusterVersion, s.KubernetesComponentsReference = "v1.34.1", "other"
		}, []string{"resume autoscaler"}, "TargetRefused", "False TargetRefused"},
		{"no minor is skipped", func(s *v1alpha1.NodeVersionSpec, w *world) {
			s.KubernetesClusterVersion, s.KubernetesComponentsReference = "v1.37.0", "other"
		}, []string{"resume autoscaler"}, "TargetRefused", "False TargetRefused"},
		{"Kubernetes is upgraded by the agent beside the operator", func(s *v1alpha1.NodeVersionSpec, w *world) {
			s.KubernetesClusterVersion, s.KubernetesComponentsReference, w.leader = "v1.36.3", refB, "control-plane-1"
		}, []string{"start upgrade control-plane-1 v1.36.3"}, "", "False RollingOut"},
		{"a member that has not started stays while a control plane joins", func(_ *v1alpha1.NodeVersionSpec, w *world) {
			w.etcd = append(w.etcd, member{node: "https://10.42.0.9:2380", nameless: true})
			w.instances = append(w.instances, instance{id: "sandbox://demo/control-plane-3", name: "control-plane-3", group: cpGroup, token: "t", state: "Ready", since: w.now})
			w.nodes[2].image = image1
			w.intents = []intent{{name: "replace-0", goal: v1alpha1.JoinGoal, token: "t", donor: "control-plane-2", group: cpGroup}}
		}, nil, "MachineJoins", "False MachineJoins"},
		{"a member that never started goes when none joins", func(_ *v1alpha1.NodeVersionSpec, w *world) {
			w.etcd = append(w.etcd, member{node: "https://10.42.0.9:2380", nameless: true})
			w.nodes[3].image, w.nodes[4].image = image2, image2
		}, []string{"remove etcd member https://10.42.0.9:2380 leaving=3", "resume autoscaler"}, "", "True UpToDate"},
		{"nor while it may just be about to start", func(_ *v1alpha1.NodeVersionSpec, w *world) {
			w.etcd = append(w.etcd, member{node: "https://10.42.0.9:2380", nameless: true, address: "10.42.0.9", since: w.now.Add(-time.Minute)})
			w.nodes[3].image, w.nodes[4].image = image2, image2
		}, []string{"resume autoscaler"}, "", "True UpToDate"},
		{"nor that of a control plane that is there", func(_ *v1alpha1.NodeVersionSpec, w *world) {
			w.etcd = append(w.etcd, member{node: "https://10.42.0.2:2380", nameless: true, address: "10.42.0.2"})
			w.nodes[3].image, w.nodes[4].image = image2, image2
			addressed(w)
		}, []string{"resume autoscaler"}, "", "True UpToDate"},
		{"it goes at once when no control plane has its address, though one is leaving", func(s *v1alpha1.NodeVersionSpec, w *world) {
			leavingControlPlane(nil)(s, w)
			addressed(w)
			w.etcd = append(w.etcd, member{node: "https://10.42.0.99:2380", nameless: true, address: "10.42.0.99"})
		}, []string{"remove etcd member https://10.42.0.99:2380 leaving=4"}, "EtcdUnhealthy", "False EtcdUnhealthy"},
		{"but not while a machine is asked for that is not seen", func(s *v1alpha1.NodeVersionSpec, w *world) {
			leavingControlPlane(nil)(s, w)
			addressed(w)
			w.etcd = append(w.etcd, member{node: "https://10.42.0.99:2380", nameless: true, address: "10.42.0.99"})
			w.intents = append(w.intents, intent{name: "replace-1", goal: v1alpha1.JoinGoal, token: "u", donor: "control-plane-1", group: cpGroup, deadline: w.now.Add(time.Minute)})
		}, nil, "EtcdUnhealthy", "False EtcdUnhealthy"},
		{"a machine that is given up takes its member with it", func(_ *v1alpha1.NodeVersionSpec, w *world) {
			w.intents = []intent{{name: "replace-0", goal: v1alpha1.LeaveGoal, token: "t", donor: "control-plane-2", group: cpGroup, machine: "sandbox://t/control-plane-9", node: "control-plane-9"}}
			w.instances = append(w.instances, instance{id: "sandbox://t/control-plane-9", name: "control-plane-9", group: cpGroup, token: "t", state: "Ready", since: w.now})
			addressed(w)
			last := w.instances[len(w.instances)-1]
			w.etcd = append(w.etcd, member{node: "https://" + last.address + ":2380", nameless: true, address: last.address})
		}, []string{"remove etcd member https://10.42.0.6:2380 leaving=3"}, "", "False RollingOut"},
		{"a control plane that is a Node before it is a member of etcd is let join", func(_ *v1alpha1.NodeVersionSpec, w *world) {
			heir := machine("control-plane-3", func(n *node) { n.donor = "control-plane-2" })
			w.nodes[2].image = image1
			w.nodes = append(w.nodes, heir)
			w.instances = append(w.instances, instance{id: heir.providerID, name: heir.name, group: cpGroup, token: "t", state: "Ready", since: w.now})
			w.intents = []intent{{name: "replace-0", goal: v1alpha1.JoinGoal, token: "t", donor: "control-plane-2", group: cpGroup}}
		}, nil, "HeirNotVoting", "False HeirNotVoting"},
		{"so is one that a person has added, however old its machine is", func(_ *v1alpha1.NodeVersionSpec, w *world) {
			added := machine("control-plane-3")
			w.nodes[3].image, w.nodes[4].image = image2, image2
			w.nodes = append(w.nodes, added)
			w.instances = append(w.instances, instance{id: added.providerID, name: added.name, group: cpGroup, state: "Ready", since: w.now.Add(-24 * time.Hour)})
		}, []string{"resume autoscaler"}, "", "True UpToDate"},
		{"a control plane outside of etcd goes when its heir votes, though intent and cordon were taken off", func(s *v1alpha1.NodeVersionSpec, w *world) {
			s.Rollout.Paused = true
			w.nodes[1].donor = "control-plane-2"
			w.etcd = w.etcd[:2]
		}, []string{"record intent machine-control-plane-2 Leave machine=sandbox://t/control-plane-2"}, "", "False Paused"},
		{"a group that the cloud does not list is said to be missing, and its nodes stay", func(_ *v1alpha1.NodeVersionSpec, w *world) {
			w.groups[1].missing, w.groups[1].image = true, image1
		}, nil, "GroupMissing", "False GroupMissing"},
		{"the nodes of other groups are replaced meanwhile", func(_ *v1alpha1.NodeVersionSpec, w *world) {
			w.groups[1].missing = true
			w.groups = append(w.groups, group{name: "more", id: "more", role: v1alpha1.WorkerRole, image: image2})
			w.nodes[4].group = "more"
		}, []string{"record intent replace-0 Join donor=worker-1"}, "GroupMissing", "False GroupMissing"},
		{"a control plane comes before workers", func(_ *v1alpha1.NodeVersionSpec, w *world) { w.nodes[2].image = image1 }, []string{"record intent replace-0 Join donor=control-plane-2"}, "", "False RollingOut"},
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
	s, w := rollout(func(_ *v1alpha1.NodeVersionSpec, w *world) {
		heir := machine("worker-2", func(n *node) { n.donor = "worker-0" })
		w.nodes[3].heir, w.nodes[3].cordon, w.nodes[3].cordonedSince, w.nodes[3].blocker = "worker-2", cordonedByUs, since, "PodDisruptionBudget web/web allows no eviction"
		w.nodes = append(w.nodes, heir)
		w.instances = append(w.instances, instance{id: heir.providerID, name: heir.name, group: heir.group, token: "t", state: "Ready", since: since})
		w.intents = []intent{{name: "replace-0", goal: v1alpha1.JoinGoal, token: "t", donor: "worker-0", group: workerGroup}}
		w.before.Waiting = &v1alpha1.Waiting{Reason: "DrainBlocked", Object: &v1alpha1.Reference{Kind: "Node", Name: "worker-0"}}
		w.before.Waiting.Since.Time = since
	})
	_, status := decide(s, w)
	want := &v1alpha1.Waiting{Reason: "DrainBlocked", Message: "worker-0 cannot be emptied: PodDisruptionBudget web/web allows no eviction", Object: &v1alpha1.Reference{Kind: "Node", Name: "worker-0"}}
	want.Since.Time = since
	if d := cmp.Diff(want, status.Waiting); d != "" {
		t.Errorf("waiting, want and got:\n%s", d)
	}
}

func TestStatusOfARolloutIsBounded(t *testing.T) {
	s, w := rollout()
	long := strings.Repeat("x", 240)
	w.run = upgradeRun{version: "v1.35.4", components: refA, node: long, phase: "done", line: strings.Repeat("line ", 400), started: modelNow}
	for i := range 3000 {
		n := machine(fmt.Sprintf("%s-%d", long, i), func(n *node) {
			n.image, n.blocker, n.heir, n.cordon = image1, strings.Repeat("budget ", 200), "heir", cordonedByUs
		})
		w.nodes = append(w.nodes, n)
		w.groups = append(w.groups, group{name: fmt.Sprintf("g%d", i), id: fmt.Sprintf("g%d", i), role: v1alpha1.WorkerRole, image: image2})
		w.intents = append(w.intents, intent{name: fmt.Sprintf("machine-%d", i), goal: v1alpha1.LeaveGoal, machine: n.providerID, node: n.name, group: workerGroup})
	}
	_, status := decide(s, w)
	b, err := json.Marshal(status)
	if err != nil || len(b) > 4096 || status.Waiting == nil {
		t.Errorf("status of %d bytes, waiting %v: %v", len(b), status.Waiting, err)
	}
}

// wantDecision returns a function that compares the result of decide with the expected actions
// and the expected reason to wait; the empty string means that it waits for nothing.
func wantDecision(t *testing.T, want []string, waiting string) func([]action, v1alpha1.NodeVersionStatus) {
	return func(actions []action, status v1alpha1.NodeVersionStatus) {
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
			t.Errorf("waits for %q, want %q", reason, waiting)
		}
	}
}

// decide returns the actions and the status.
func decide(spec v1alpha1.NodeVersionSpec, w world) ([]action, v1alpha1.NodeVersionStatus) {
	d := Decide(spec, w)
	return d.actions, d.status()
}

// TestEveryActionKindHasAName fails when a new kind of action is not in the table of names.
func TestEveryActionKindHasAName(t *testing.T) {
	if got, want := len(actionNames), int(publishComponents)+1; got != want {
		t.Errorf("%d names, want %d", got, want)
	}
	for _, kind := range actionKinds() {
		if kind.String() == "" {
			t.Errorf("action %d has no name", kind)
		}
	}
}
