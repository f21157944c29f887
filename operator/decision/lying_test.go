package decision

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"constellation/engine/cloud/sandboxapi"
	"constellation/operator/api/v1alpha1"
)

// A Node that claims the machine of a control plane, and marks itself obsolete, once had
// that machine deleted without its etcd member leaving first.
func TestLyingNodeGetsNoMachineDeleted(t *testing.T) {
	s, w := rollout(func(_ *v1alpha1.NodeVersionSpec, w *World) {
		w.Nodes[3].Image, w.Nodes[4].Image = image2, image2
		w.Nodes = append(w.Nodes, machine("worker-9", func(n *Node) {
			n.ProviderID, n.Obsolete = w.Nodes[0].ProviderID, true
		}))
	})
	actions, _ := decide(s, w)
	for _, a := range actions {
		if a.Kind == RecordIntent {
			t.Errorf("decided to %s", a)
			// Decisions that the PendingNode causes.
			w.Intents = append(w.Intents, a.Intent)
		}
	}
	for i := range w.Nodes {
		w.Nodes[i].Cordon, w.Nodes[i].Drained = CordonedByUs, true
	}
	actions, _ = decide(s, w)
	for _, a := range actions {
		if a.Kind == DeleteInstance || a.Kind == BindIntent || a.Kind == RemoveMember {
			t.Errorf("decided to %s", a)
		}
	}
}

// lying adds a Node without a machine of its name, and edits it.
func lying(edit func(n *Node, w *World)) func(*v1alpha1.NodeVersionSpec, *World) {
	return func(_ *v1alpha1.NodeVersionSpec, w *World) {
		n := machine("worker-9")
		edit(&n, w)
		w.Nodes = append(w.Nodes, n)
	}
}

// A Node that contradicts the cloud changes no decision, and the status names it.
func TestImpostorsChangeNoDecision(t *testing.T) {
	all, _ := decide(rollout())
	var want []string
	for _, a := range all {
		want = append(want, a.String())
	}
	for name, edit := range map[string]func(n *Node, w *World){
		"it is obsolete":              func(n *Node, _ *World) { n.Obsolete = true },
		"it replaces":                 func(n *Node, _ *World) { n.OldNode = "worker-0" },
		"it is replaced":              func(n *Node, _ *World) { n.Replacement, n.Cordon, n.Drained = "worker-1", CordonedByUs, true },
		"it is an old control plane":  func(n *Node, _ *World) { n.Role, n.Group, n.Image = v1alpha1.ControlPlaneRole, cpGroup, image1 },
		"its kubelet is newer":        func(n *Node, _ *World) { n.Kubelet = "v1.99.0" },
		"it claims in another case":   func(n *Node, _ *World) { n.ProviderID = strings.ToUpper(n.ProviderID) },
		"it runs where the leader is": func(n *Node, w *World) { w.LeaderNode = "worker-9" },
	} {
		t.Run(name, func(t *testing.T) {
			s, w := rollout(lying(func(n *Node, w *World) {
				n.ProviderID = w.Nodes[0].ProviderID
				edit(n, w)
			}))
			before := slices.Clone(w.Nodes)
			actions, status := decide(s, w)
			var got []string
			for _, a := range actions {
				got = append(got, a.String())
			}
			if d := cmp.Diff(want, got); d != "" {
				t.Errorf("actions, want and got:\n%s", d)
			}
			if d := cmp.Diff([]v1alpha1.Reference{{Kind: "Node", Name: "worker-9"}}, status.Invalid); d != "" || status.Nodes.Invalid != 1 || status.Nodes.Total != 6 {
				t.Errorf("counts %+v; invalid, want and got:\n%s", status.Nodes, d)
			}
			if d := cmp.Diff(before, w.Nodes, cmp.AllowUnexported(Node{})); d != "" {
				t.Errorf("the world was changed:\n%s", d)
			}
		})
	}
}

// A rollout ends when the honest nodes are at the target.
func TestRolloutEndsInSpiteOfImpostors(t *testing.T) {
	for name, tt := range map[string]struct {
		id   string
		want string
	}{
		"one that claims another's machine": {"sandbox://t/control-plane-0", "True NodesRejected"},
		"one that claims none":              {"", "True UpToDate"},
	} {
		t.Run(name, func(t *testing.T) {
			s, w := rollout(lying(func(n *Node, w *World) {
				w.Nodes[3].Image, w.Nodes[4].Image = image2, image2
				n.ProviderID = tt.id
			}))
			actions, status := decide(s, w)
			if is := conditionText(status, v1alpha1.ConditionReady); len(actions) != 1 || actions[0].Kind != ResumeAutoscaler || is != tt.want {
				t.Errorf("actions %v, Ready is %s; want %s", actions, is, tt.want)
			}
		})
	}
	// The operator waits for the Node of a machine that the cloud lists.
	s, w := rollout(func(_ *v1alpha1.NodeVersionSpec, w *World) {
		w.Nodes[3].Image, w.Nodes[4].Image = image2, image2
	})
	w.Nodes[4].ProviderID = ""
	if _, status := decide(s, w); conditionText(status, v1alpha1.ConditionReady) != "False NodesInvalid" {
		t.Errorf("Ready is %s", conditionText(status, v1alpha1.ConditionReady))
	}
}

// A machine that is missing from the cloud's list is unknown. Its node is neither replaced nor
// deleted, and if it is a control plane, workers wait.
func TestNodesOfUndescribedMachinesStay(t *testing.T) {
	without := func(names ...string) func(*v1alpha1.NodeVersionSpec, *World) {
		return func(_ *v1alpha1.NodeVersionSpec, w *World) {
			w.Instances = slices.DeleteFunc(w.Instances, func(m Instance) bool { return slices.Contains(names, m.Name) })
		}
	}
	wantActions(t, "a worker", decided(everyRule, without("worker-0")), "record intent replace-0 Join donor=worker-1")
	wantActions(t, "a control plane", decided(everyRule, without("control-plane-1")))
	bind := "bind intent replace-0 Leave donor=worker-0 machine=sandbox://t/worker-0"
	wantActions(t, "an old node that may leave", decided(everyRule, replacing(v1alpha1.JoinGoal, "Ready", true)), bind)
	wantActions(t, "an old node whose machine the cloud does not describe", decided(everyRule, replacing(v1alpha1.JoinGoal, "Ready", true), without("worker-0")))
	wantActions(t, "an obsolete worker", decided(everyRule, without("worker-0", "worker-1"), func(_ *v1alpha1.NodeVersionSpec, w *World) { w.Nodes[3].Obsolete = true }), "resume autoscaler")
}

// Which node a machine replaces follows from its token.
func TestTokensNameTheReplacedMachine(t *testing.T) {
	now := modelNow
	old, other := machine("worker-0"), machine("worker-1")
	made := token(&old, "replace-0", now)
	switch {
	case !sandboxapi.ValidToken(made) || len(made) > 63:
		t.Errorf("the token %q is not valid", made)
	case ReplacedHash(made) != MachineHash(old.ProviderID) || ReplacedHash(made) == MachineHash(other.ProviderID):
		t.Errorf("the token %q does not name the replaced machine", made)
	case MachineHash(old.ProviderID) != MachineHash(strings.ToUpper(old.ProviderID)):
		t.Error("the mark of an ID depends on its case")
	case made == token(&old, "replace-0", now.Add(time.Second)) || made == token(&old, "replace-1", now):
		t.Error("another attempt has the same token")
	case ReplacedHash(strings.Repeat("0", 24)) != "":
		t.Error("the token of an older operator is taken to name a replaced machine")
	}
	// The worker that replaced it claims the machine of another worker. The size of the other's group
	// stays the same.
	claims := func(token string, agrees bool) func(*v1alpha1.NodeVersionSpec, *World) {
		return func(_ *v1alpha1.NodeVersionSpec, w *World) {
			w.Nodes = append(w.Nodes, machine("worker-7", func(n *Node) { n.OldNode = "worker-0" }))
			w.Instances = append(w.Instances, Instance{ID: "sandbox://t/worker-7", Name: "worker-7", Group: workerGroup, Token: token, ReplacesHash: ReplacedHash(token), State: "Ready", Since: modelNow})
			if agrees {
				w.Nodes[3].Replacement = "worker-7"
			}
		}
	}
	begun := func(edit func(*v1alpha1.NodeVersionSpec, *World)) string {
		actions, _ := decide(rollout(edit))
		for _, a := range actions {
			if a.Kind == RecordIntent {
				return a.Intent.Token
			}
		}
		return ""
	}
	gone := Node{ProviderID: "sandbox://t/worker-6"}
	for name, tt := range map[string]struct {
		token   string
		agrees  bool
		replace bool // by worker-7
	}{
		"created for worker-0":                            {token: token(&old, "replace-0", now), agrees: false, replace: true},
		"created for a deleted machine":                   {token: token(&gone, "replace-0", now), agrees: false, replace: false},
		"created for a captured worker-0":                 {token: token(&gone, "replace-0", now), agrees: true, replace: false},
		"created by an older operator":                    {token: "0123456789abcdef01234567", agrees: false, replace: false},
		"created by an older operator, both Nodes agree":  {token: "0123456789abcdef01234567", agrees: true, replace: true},
		"created by an older operator, token with a dash": {token: "replace-0", agrees: false, replace: false},
	} {
		if got := begun(claims(tt.token, tt.agrees)); got == "" || (got == tt.token) != tt.replace {
			t.Errorf("%s: worker-0 is replaced by the machine of token %q, that of worker-7 is %q", name, got, tt.token)
		}
	}
}

// A Node's claim alone does not make the operator track a machine that the cloud no longer lists.
func TestMachinesThatTheCloudNeverDescribedAreNotTracked(t *testing.T) {
	const id = "sandbox://t/ghost"
	s, w := rollout(lying(func(n *Node, _ *World) { n.Name, n.ProviderID = "ghost", id }))
	w.Instances = append(w.Instances, Instance{ID: id, Hash: MachineHash(id), State: "Unknown"})
	actions, _ := decide(s, w)
	for _, a := range actions {
		if strings.Contains(a.String(), "ghost") {
			t.Errorf("decided to %s", a)
		}
	}
}

// Of several Nodes that claim one machine, only the one with its name counts.
func TestOfNodesThatClaimOneMachineTheHonestOneCounts(t *testing.T) {
	w := World{Instances: []Instance{{ID: "sandbox://t/b", Name: "b", Group: workerGroup, Image: image2, State: "Ready"}}}
	for _, name := range []string{"a", "b", "c"} {
		w.Nodes = append(w.Nodes, Node{Name: name, ProviderID: strings.Replace("sandbox://t/b", "sandbox", map[string]string{"a": "SANDBOX", "b": "sandbox", "c": "Sandbox"}[name], 1)})
	}
	x := NewLookup(&w)
	if n := x.NodeOf["sandbox://t/b"]; n == nil || n.Name != "b" || len(w.Nodes) != 1 || len(w.Impostors) != 2 {
		t.Errorf("the machine's Node is %+v, nodes %+v, impostors %+v", n, w.Nodes, w.Impostors)
	}
	// While the cloud does not describe the machine, only the operator's own record counts.
	w = World{Nodes: []Node{{Name: "a", ProviderID: "sandbox://t/b"}, {Name: "b", ProviderID: "sandbox://t/b"}}}
	if x := NewLookup(&w); x.NodeOf["sandbox://t/b"] != nil || len(w.Impostors) > 0 {
		t.Errorf("the machine's Node is %+v, impostors %+v", x.NodeOf["sandbox://t/b"], w.Impostors)
	}
	w.Intents = []Intent{{Name: "machine-b", Goal: v1alpha1.LeaveGoal, Machine: "sandbox://t/b", Node: "b"}}
	if n := NewLookup(&w).NodeOf["sandbox://t/b"]; n == nil || n.Name != "b" {
		t.Errorf("the machine's Node is %+v", n)
	}
}

// A claim of an unknown incarnation once hid the machine of that ID: its Node was not confirmed, and
// the machine of a revoked node was never deleted.
func TestClaimOfAnIncarnationHidesNoMachine(t *testing.T) {
	const id = "sandbox://t/worker-1"
	for _, tt := range []struct{ name, key string }{
		{"the cloud has no incarnations", id},
		{"the cloud has incarnations", id + "#1"},
	} {
		for _, state := range []v1alpha1.InstanceState{"Terminated", "Unknown"} {
			real := Instance{ID: tt.key, Name: "worker-1", Group: workerGroup, State: "Ready", Since: modelNow}
			claimed := Instance{ID: id + "#999", Name: "worker-1", State: state, Since: modelNow.Add(time.Hour)}
			for _, all := range [][]Instance{{real, claimed}, {claimed, real}} {
				x := NewIndex(all)
				for _, asked := range []string{id, tt.key} {
					if m := x.Instance(asked); m == nil || m.ID != tt.key {
						t.Errorf("%s, claim %s: machine of %s is %v, want %s", tt.name, state, asked, m, tt.key)
					}
				}
			}
		}
	}
}

// In a cloud without incarnations, an incarnation that a Node claims changes nothing.
func TestRevokedNodeWithAFalseIncarnationLosesItsMachine(t *testing.T) {
	const worker = "sandbox://t/worker-1"
	for name, machine := range map[string]string{"of the cloud": worker, "of the Node": worker + "#999"} {
		s, w := atRest()
		w.Nodes[4].ProviderID = worker + "#999"
		in := revoked("worker-1", workerGroup)
		in.Machine = machine
		w.Intents = []Intent{in}
		w.Instances = append(w.Instances, Instance{ID: worker + "#999", Name: "worker-1", State: "Terminated", Since: modelNow})
		actions, _ := decide(s, w)
		if !slices.ContainsFunc(actions, func(a Action) bool { return a.Kind == DeleteInstance && a.Machine == worker }) {
			t.Errorf("machine by the key %s not deleted: %v", name, actions)
		}
	}
}

// When a provider begins to report incarnations, the Nodes of a running cluster do not name them, and
// their JoiningNodes are gone. The operator must still be able to replace them.
func TestNodesThatJoinedBeforeIncarnationsWereReported(t *testing.T) {
	for _, tt := range []struct {
		name string
		edit func(n *Node, m *Instance, w *World)
		want bool
	}{
		{name: "the machine is older than the Node", edit: func(*Node, *Instance, *World) {}, want: true},
		{name: "a later machine has the ID", edit: func(n *Node, m *Instance, _ *World) { m.Created = n.Created.Add(time.Hour) }, want: false},
		{name: "the creation of the machine is unknown", edit: func(_ *Node, m *Instance, _ *World) { m.Created = time.Time{} }, want: false},
		{name: "the machine has a ticket, so its Node will be annotated", edit: func(n *Node, _ *Instance, w *World) { w.Joining = map[string]bool{n.Name: true} }, want: false},
		{name: "no operator has annotated the Node", edit: func(n *Node, _ *Instance, _ *World) { n.Components = "" }, want: false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, w := rollout()
			n, m := &w.Nodes[3], &w.Instances[3]
			m.ID, n.Created = m.ID+"#7", w.Now.Add(-48*time.Hour)
			m.Created = n.Created.Add(-time.Minute)
			tt.edit(n, m, &w)
			name := n.Name
			NewLookup(&w)
			i := slices.IndexFunc(w.Nodes, func(n Node) bool { return n.Name == name })
			if is := w.Nodes[i]; is.Confirmed != tt.want || tt.want && is.ProviderID != m.ID {
				t.Errorf("confirmed %t as %s, want %t as %s", is.Confirmed, is.ProviderID, tt.want, m.ID)
			}
		})
	}
}
