package operator

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"constellation/engine/cloud/local"
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

// lying adds a Node that no machine bears, and edits it.
func lying(edit func(n *node, w *world)) func(*v1alpha1.NodeVersionSpec, *world) {
	return func(_ *v1alpha1.NodeVersionSpec, w *world) {
		n := machine("worker-9")
		edit(&n, w)
		w.nodes = append(w.nodes, n)
	}
}

// A Node that the cloud contradicts changes no decision, and the status names it.
func TestImpostorsChangeNoDecision(t *testing.T) {
	all, _ := decide(rollout())
	var want []string
	for _, a := range all {
		want = append(want, a.String())
	}
	for name, edit := range map[string]func(n *node, w *world){
		"it is obsolete":              func(n *node, _ *world) { n.obsolete = true },
		"it replaces":                 func(n *node, _ *world) { n.donor = "worker-0" },
		"it is replaced":              func(n *node, _ *world) { n.heir, n.cordon, n.drained = "worker-1", cordonedByUs, true },
		"it is an old control plane":  func(n *node, _ *world) { n.role, n.group, n.image = v1alpha1.ControlPlaneRole, cpGroup, image1 },
		"its kubelet is newer":        func(n *node, _ *world) { n.kubelet = "v1.99.0" },
		"it claims in another case":   func(n *node, _ *world) { n.providerID = strings.ToUpper(n.providerID) },
		"it runs where the leader is": func(n *node, w *world) { w.leader = "worker-9" },
	} {
		t.Run(name, func(t *testing.T) {
			s, w := rollout(lying(func(n *node, w *world) {
				n.providerID = w.nodes[0].providerID
				edit(n, w)
			}))
			before := slices.Clone(w.nodes)
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
			if d := cmp.Diff(before, w.nodes, cmp.AllowUnexported(node{})); d != "" {
				t.Errorf("the world was changed:\n%s", d)
			}
		})
	}
}

// A rollout has ended when the honest nodes are at the target.
func TestImpostorsDoNotKeepTheRolloutFromItsEnd(t *testing.T) {
	for name, tt := range map[string]struct {
		id   string
		want string
	}{
		"one that claims another's machine": {"sandbox://t/control-plane-0", "True NodesRejected"},
		"one that claims none":              {"", "True UpToDate"},
	} {
		t.Run(name, func(t *testing.T) {
			s, w := rollout(lying(func(n *node, w *world) {
				w.nodes[3].image, w.nodes[4].image = image2, image2
				n.providerID = tt.id
			}))
			actions, status := decide(s, w)
			if is := conditionText(status, v1alpha1.ConditionReady); len(actions) != 1 || actions[0].kind != resumeAutoscaler || is != tt.want {
				t.Errorf("actions %v, Ready is %s; want %s", actions, is, tt.want)
			}
		})
	}
	// The Node of a machine that the cloud has is waited for.
	s, w := rollout(func(_ *v1alpha1.NodeVersionSpec, w *world) {
		w.nodes[3].image, w.nodes[4].image = image2, image2
	})
	w.nodes[4].providerID = ""
	if _, status := decide(s, w); conditionText(status, v1alpha1.ConditionReady) != "False NodesInvalid" {
		t.Errorf("Ready is %s", conditionText(status, v1alpha1.ConditionReady))
	}
}

// What is missing from the cloud's list is unknown: its node is neither replaced nor
// deleted, and a control plane keeps workers waiting.
func TestNodesOfMachinesThatAreNotDescribedStay(t *testing.T) {
	without := func(names ...string) func(*v1alpha1.NodeVersionSpec, *world) {
		return func(_ *v1alpha1.NodeVersionSpec, w *world) {
			w.instances = slices.DeleteFunc(w.instances, func(m instance) bool { return slices.Contains(names, m.name) })
		}
	}
	wantActions(t, "a worker", decided(everyRule, without("worker-0")), "record intent replace-0 Join donor=worker-1")
	wantActions(t, "a control plane", decided(everyRule, without("control-plane-1")))
	bind := "bind intent replace-0 Leave donor=worker-0 machine=sandbox://t/worker-0"
	wantActions(t, "a donor that may go", decided(everyRule, replacing(v1alpha1.JoinGoal, "Ready", true)), bind)
	wantActions(t, "a donor whose machine is not described", decided(everyRule, replacing(v1alpha1.JoinGoal, "Ready", true), without("worker-0")))
	wantActions(t, "an obsolete worker", decided(everyRule, without("worker-0", "worker-1"), func(_ *v1alpha1.NodeVersionSpec, w *world) { w.nodes[3].obsolete = true }), "resume autoscaler")
}

// Which node a machine replaces follows from its token.
func TestTokensTellWhatIsReplaced(t *testing.T) {
	now := modelNow
	old, other := machine("worker-0"), machine("worker-1")
	made := token(&old, "replace-0", now)
	switch {
	case !local.ValidToken(made) || len(made) > 63:
		t.Errorf("the token %q is not valid", made)
	case replacedBy(made) != markOf(old.providerID) || replacedBy(made) == markOf(other.providerID):
		t.Errorf("the token %q does not tell what is replaced", made)
	case markOf(old.providerID) != markOf(strings.ToUpper(old.providerID)):
		t.Error("the mark of an ID depends on its case")
	case made == token(&old, "replace-0", now.Add(time.Second)) || made == token(&old, "replace-1", now):
		t.Error("another attempt has the same token")
	case replacedBy(strings.Repeat("0", 24)) != "":
		t.Error("the token of an older operator is taken to tell what is replaced")
	}
	// A worker that has taken its place claims that of another, and the other's group is as
	// large as before.
	claims := func(token string, agrees bool) func(*v1alpha1.NodeVersionSpec, *world) {
		return func(_ *v1alpha1.NodeVersionSpec, w *world) {
			w.nodes = append(w.nodes, machine("worker-7", func(n *node) { n.donor = "worker-0" }))
			w.instances = append(w.instances, instance{id: "sandbox://t/worker-7", name: "worker-7", group: workerGroup, token: token, replaces: replacedBy(token), state: "Ready", since: modelNow})
			if agrees {
				w.nodes[3].heir = "worker-7"
			}
		}
	}
	begun := func(edit func(*v1alpha1.NodeVersionSpec, *world)) string {
		actions, _ := decide(rollout(edit))
		for _, a := range actions {
			if a.kind == recordIntent {
				return a.intent.token
			}
		}
		return ""
	}
	gone := node{providerID: "sandbox://t/worker-6"}
	for name, tt := range map[string]struct {
		token   string
		agrees  bool
		replace bool // by worker-7
	}{
		"it was made for worker-0":                         {token(&old, "replace-0", now), false, true},
		"it was made for one that is gone":                 {token(&gone, "replace-0", now), false, false},
		"and worker-0 is captured as well":                 {token(&gone, "replace-0", now), true, false},
		"an older operator has made it":                    {"0123456789abcdef01234567", false, false},
		"an older operator has made it, and both say so":   {"0123456789abcdef01234567", true, true},
		"an older operator has made it, with a dash in it": {"replace-0", false, false},
	} {
		if got := begun(claims(tt.token, tt.agrees)); got == "" || (got == tt.token) != tt.replace {
			t.Errorf("%s: worker-0 is replaced by the machine of token %q, that of worker-7 is %q", name, got, tt.token)
		}
	}
}

// No machine is tracked because a Node has claimed it and the cloud forgets it.
func TestMachinesThatTheCloudNeverDescribedAreNotTracked(t *testing.T) {
	const id = "sandbox://t/ghost"
	s, w := rollout(lying(func(n *node, _ *world) { n.name, n.providerID = "ghost", id }))
	w.instances = append(w.instances, instance{id: id, mark: markOf(id), state: "Terminated"})
	actions, _ := decide(s, w)
	for _, a := range actions {
		if strings.Contains(a.String(), "ghost") {
			t.Errorf("decided to %s", a)
		}
	}
}

// Of several Nodes that claim one machine the one that bears its name counts on.
func TestOfNodesThatClaimOneMachineTheHonestOneCounts(t *testing.T) {
	w := world{instances: []instance{{id: "sandbox://t/b", name: "b", group: workerGroup, image: image2, state: "Ready"}}}
	for _, name := range []string{"a", "b", "c"} {
		w.nodes = append(w.nodes, node{name: name, providerID: strings.Replace("sandbox://t/b", "sandbox", map[string]string{"a": "SANDBOX", "b": "sandbox", "c": "Sandbox"}[name], 1)})
	}
	x := newLookup(&w)
	if n := x.machineOf["sandbox://t/b"]; n == nil || n.name != "b" || len(w.nodes) != 1 || len(w.impostors) != 2 {
		t.Errorf("the machine's Node is %+v, nodes %+v, impostors %+v", n, w.nodes, w.impostors)
	}
	// While the cloud does not describe the machine, only our own record does.
	w = world{nodes: []node{{name: "a", providerID: "sandbox://t/b"}, {name: "b", providerID: "sandbox://t/b"}}}
	if x := newLookup(&w); x.machineOf["sandbox://t/b"] != nil || len(w.impostors) > 0 {
		t.Errorf("the machine's Node is %+v, impostors %+v", x.machineOf["sandbox://t/b"], w.impostors)
	}
	w.intents = []intent{{name: "machine-b", goal: v1alpha1.LeaveGoal, machine: "sandbox://t/b", node: "b"}}
	if n := newLookup(&w).machineOf["sandbox://t/b"]; n == nil || n.name != "b" {
		t.Errorf("the machine's Node is %+v", n)
	}
}
