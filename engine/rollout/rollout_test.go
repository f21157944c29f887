package rollout

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"constellation/engine/cluster"
	"constellation/engine/plan"
)

// TestALookTellsWhatIsNow lets nodes, moves and targets change at random: a line-up that has
// looked before says the same as one that looks for the first time, and what it does not call
// fresh is as it was.
func TestPollReportsCurrentState(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	one := func(of ...string) string { return of[rnd.IntN(len(of))] }
	name := func() string { return fmt.Sprintf("worker-%d", rnd.IntN(12)) }
	nodes := map[string]*cluster.Node{}
	var ro cluster.Rollout
	var seen NodeDiff
	was := map[Entry]bool{}
	var expected []cluster.ExpectedNode
	fresh := 0
	for step := range 5000 {
		for range rnd.IntN(3) {
			switch n := name(); rnd.IntN(5) {
			case 0:
				delete(nodes, n)
			case 1:
				ro.Target = cluster.NodeTarget{Image: one("a", "b"), Components: "c", KeepWorkers: rnd.IntN(4) == 0}
			case 2:
				ro.Moves = slices.DeleteFunc(ro.Moves, func(m cluster.Move) bool { return m.Name == "replace-"+n })
				if rnd.IntN(3) > 0 {
					ro.Moves = append(ro.Moves, cluster.Move{
						Name: "replace-" + n, Node: one("", name()), Leaves: rnd.IntN(3) == 0, Donor: one("", name()), Machine: one("", "Creating", "Ready", "Failed", "Terminating"), Reached: rnd.IntN(5) == 0,
					})
				}
			default:
				nodes[n] = &cluster.Node{Name: n, State: one(plan.NodeReady, plan.NodeReady, plan.NodeNotReady), Image: one("", "a", "b"), Components: one("", "c"), Heir: one("", "", name()), Cordoned: rnd.IntN(3) == 0, Message: one("", "why"), Kubernetes: one("v1.35.4", "v1.36.3")}
			}
		}
		list := make([]*cluster.Node, 0, len(nodes))
		for _, k := range slices.Sorted(maps.Keys(nodes)) {
			list = append(list, nodes[k])
		}
		if rnd.IntN(4) == 0 {
			expected = nil
			if rnd.IntN(2) == 0 {
				expected = []cluster.ExpectedNode{{Name: name()}}
			}
		}
		var plans []cluster.NodePlan
		for range rnd.IntN(3) {
			plans = append(plans, cluster.NodePlan{Name: one("a/b", "a/c"), Nodes: []cluster.NodePlanNode{{Name: name(), State: one(plan.NodeUpgrading, plan.NodeDraining, plan.NodeFailed), Text: one("", "why")}}})
		}
		some := seen.look(ro, plans, list, expected)
		anew := new(NodeDiff)
		anew.look(ro, plans, list, expected)
		all, want := slices.Collect(seen.All()), slices.Collect(anew.All())
		if d := cmp.Diff([]any{anew.states, anew.goes, anew.kubelet, anew.unready(), len(want)}, []any{seen.states, seen.goes, seen.kubelet, seen.unready(), seen.Size()}); d != "" {
			t.Fatalf("step %d: counted (-looking for the first time +having looked before)\n%s", step, d)
		}
		got, isFresh := map[Entry]bool{}, map[string]bool{}
		for _, e := range some {
			isFresh[e.Name] = true
		}
		fresh += len(some)
		if d := cmp.Diff(entries(want), entries(all), cmp.AllowUnexported(Entry{})); d != "" {
			t.Fatalf("step %d: (-looked for the first time +looked before)\n%s", step, d)
		}
		for _, e := range all {
			got[*e] = true
			if !isFresh[e.Name] && !was[*e] {
				t.Fatalf("step %d: %+v is not called fresh, and was not so", step, *e)
			}
		}
		was = got
	}
	if fresh == 0 || fresh > 5000*9 {
		t.Errorf("%d of about 60000 were called fresh: nothing is kept", fresh)
	}
}

func entries(all []*Entry) (out []Entry) {
	for _, e := range all {
		out = append(out, *e)
	}
	return out
}

// A machine that is a Node before the operator has annotated it belongs where its record says.
func TestGroupOfANewNode(t *testing.T) {
	moves := []cluster.Move{{Name: "replace-0", Node: "worker-3", Group: "workers", Donor: "worker-0"}}
	nodes := []*cluster.Node{{Name: "worker-3", Role: "worker"}, {Name: "worker-4", Role: "worker"}}
	var l NodeDiff
	l.look(cluster.Rollout{Moves: moves}, nil, nodes, nil)
	var got []string
	for e := range l.All() {
		got = append(got, e.Name+" of "+e.Group)
	}
	if want := []string{"worker-3 of workers", "worker-4 of worker"}; !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}

// Each node counts as one, a replacement node together with its old node, whether it is Ready or
// not.
func TestNodesThatAreNotReadyAreCounted(t *testing.T) {
	fresh := func(name, state, donor string) *cluster.Node {
		return &cluster.Node{Name: name, State: state, Image: "b", Components: "c", Donor: donor}
	}
	old := func(name, heir string, cordoned bool) *cluster.Node {
		return &cluster.Node{Name: name, State: plan.NodeReady, Image: "a", Components: "c", Heir: heir, Cordoned: cordoned}
	}
	leaves := cluster.Move{Name: "replace-0", Node: "w0", Leaves: true, Machine: "Ready"}
	for name, tt := range map[string]struct {
		nodes []*cluster.Node
		moves []cluster.Move
		want  string
	}{
		"all are Ready": {nodes: []*cluster.Node{fresh("w1", plan.NodeReady, ""), fresh("w2", plan.NodeReady, "")}, want: "2 of 2"},
		"one is not":    {nodes: []*cluster.Node{fresh("w1", plan.NodeReady, ""), fresh("w2", plan.NodeNotReady, "")}, want: "1 of 2"},
		"the new node is not Ready, and the old one is gone": {nodes: []*cluster.Node{fresh("w1", plan.NodeReady, ""), fresh("w2", plan.NodeNotReady, "w0")}, want: "1 of 2"},
		"the new node has joined, and the old one exists":    {nodes: []*cluster.Node{old("w0", "w2", false), fresh("w1", plan.NodeReady, ""), fresh("w2", plan.NodeNotReady, "w0")}, want: "1 of 2"},
		"one has come that only its record knows": {
			nodes: []*cluster.Node{old("w0", "", false), fresh("w1", plan.NodeReady, ""), fresh("w2", plan.NodeNotReady, "")},
			moves: []cluster.Move{{Name: "replace-0", Node: "w2", Donor: "w0", Machine: "Ready"}},
			want:  "1 of 2",
		},
		"an unknown node has joined":                        {nodes: []*cluster.Node{old("w0", "", false), fresh("w1", plan.NodeReady, ""), {Name: "w2", State: plan.NodeNotReady}}, want: "1 of 2"},
		"the old node leaves, and the new one is Ready":     {nodes: []*cluster.Node{old("w0", "w2", true), fresh("w1", plan.NodeReady, ""), fresh("w2", plan.NodeReady, "w0")}, moves: []cluster.Move{leaves}, want: "2 of 2"},
		"the old node leaves, and the new one is not Ready": {nodes: []*cluster.Node{old("w0", "w2", true), fresh("w1", plan.NodeReady, ""), fresh("w2", plan.NodeNotReady, "w0")}, moves: []cluster.Move{leaves}, want: "1 of 2"},
	} {
		t.Run(name, func(t *testing.T) {
			c := &looked{ro: cluster.Rollout{Target: cluster.NodeTarget{Image: "b", Components: "c"}, Moves: tt.moves}, nodes: tt.nodes}
			v, err := See(t.Context(), c, new(NodeDiff), time.Now())
			if err != nil {
				t.Fatal(err)
			}
			if got := fmt.Sprintf("%d of %d", v.Current, v.Total); got != tt.want {
				t.Errorf("%s, want %s: %v", got, tt.want, &v)
			}
		})
	}
}

// A machine that the cloud has not named has one row, also once it is a Node.
func TestUnknownNodesAreMatchedWithUnnamedMachines(t *testing.T) {
	now := time.Now()
	unnamed := []cluster.Move{{Name: "replace-0", Donor: "w0", Group: "workers", Machine: "Creating"}}
	for name, tt := range map[string]struct {
		nodes []*cluster.Node
		moves []cluster.Move
		want  []string
	}{
		"it has just joined":                     {nodes: []*cluster.Node{{Name: "w1", Role: "worker", Created: now}}, moves: unnamed, want: []string{"new for w0"}},
		"the operator has said what it is":       {nodes: []*cluster.Node{{Name: "w1", Group: "workers", Image: "b", Created: now}}, moves: unnamed, want: []string{"w1", "new for w0"}},
		"the cloud has named it":                 {nodes: []*cluster.Node{{Name: "w1", Role: "worker", Created: now}}, moves: []cluster.Move{{Name: "replace-0", Node: "w1", Donor: "w0", Group: "workers", Machine: "Ready"}}, want: []string{"w1"}},
		"it has been there for long":             {nodes: []*cluster.Node{{Name: "w1", Role: "worker", Created: now.Add(-time.Minute)}}, moves: unnamed, want: []string{"w1", "new for w0"}},
		"nothing moves that is known":            {nodes: []*cluster.Node{{Name: "w1", Role: "worker", Created: now}}, want: nil},
		"a machine that is to be made is no one": {nodes: []*cluster.Node{{Name: "w1", Role: "worker", Created: now}}, moves: []cluster.Move{{Name: "replace-0", Donor: "w0"}}, want: nil},
	} {
		t.Run(name, func(t *testing.T) {
			var l NodeDiff
			if _, err := See(t.Context(), &looked{ro: cluster.Rollout{Moves: tt.moves}, nodes: tt.nodes}, &l, now); err != nil {
				t.Fatal(err)
			}
			var got []string
			for e := range l.All() {
				got = append(got, e.Name)
			}
			if !slices.Equal(got, tt.want) {
				t.Errorf("%q, want %q", got, tt.want)
			}
		})
	}
}

// looked is a cluster at one moment.
type looked struct {
	ro    cluster.Rollout
	nodes []*cluster.Node
}

func (l *looked) Rollout(context.Context) (cluster.Rollout, error) { return l.ro, nil }

func (l *looked) Nodes(context.Context) ([]*cluster.Node, error) { return l.nodes, nil }

func (l *looked) Expected(context.Context) ([]cluster.ExpectedNode, error) { return nil, nil }

func (l *looked) Plans(context.Context) ([]cluster.NodePlan, error) { return nil, nil }

// TestNodeThatIsLentToAPlan: after its own upgrade, the state of a drained node is that of the Plan's Job.
func TestNodeThatIsLentToAPlan(t *testing.T) {
	for _, tt := range []struct{ name, phase, want string }{
		{name: "the agent upgrades the node", phase: "apply", want: "apply"},
		{name: "the agent has finished", phase: "done", want: "plan os: container upgrade runs"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			o := &nodeView{
				byNode: map[string]cluster.Move{"w": {Node: "w", Upgrades: true, Phase: tt.phase}},
				plans:  map[string]planOf{"w": {plan: "system-upgrade/os", state: plan.NodeUpgrading, text: "container upgrade runs"}},
			}
			e := o.entry(&cluster.Node{Name: "w", State: plan.NodeReady, Cordoned: true, InPlace: true})
			if e.State != plan.NodeUpgrading || e.Text != tt.want {
				t.Errorf("%s %q, want %q", e.State, e.Text, tt.want)
			}
		})
	}
}
