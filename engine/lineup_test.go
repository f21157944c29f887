package engine

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestALookTellsWhatIsNow lets nodes, moves and targets change at random: a line-up that has
// looked before says the same as one that looks for the first time, and what it does not call
// fresh is as it was.
func TestALookTellsWhatIsNow(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	one := func(of ...string) string { return of[rnd.IntN(len(of))] }
	name := func() string { return fmt.Sprintf("worker-%d", rnd.IntN(12)) }
	nodes := map[string]*Node{}
	var ro Rollout
	var seen lineup
	was := map[string]rollEntry{}
	fresh := 0
	for step := range 5000 {
		for range rnd.IntN(3) {
			switch n := name(); rnd.IntN(5) {
			case 0:
				delete(nodes, n)
			case 1:
				ro.Target = NodeTarget{Image: one("a", "b"), Components: "c", KeepWorkers: rnd.IntN(4) == 0}
			case 2:
				ro.Moves = slices.DeleteFunc(ro.Moves, func(m Move) bool { return m.Name == "replace-"+n })
				if rnd.IntN(3) > 0 {
					ro.Moves = append(ro.Moves, Move{
						Name: "replace-" + n, Node: one("", name()), Leaves: rnd.IntN(3) == 0, Donor: one("", name()), Machine: one("", "Creating", "Ready", "Failed", "Terminating"), Reached: rnd.IntN(5) == 0,
					})
				}
			default:
				nodes[n] = &Node{Name: n, State: one(NodeReady, NodeReady, NodeNotReady), Image: one("", "a", "b"), Components: one("", "c"), Heir: one("", "", name()), Cordoned: rnd.IntN(3) == 0, Message: one("", "why"), Kubernetes: one("v1.35.4", "v1.36.3")}
			}
		}
		list := make([]*Node, 0, len(nodes))
		for _, k := range slices.Sorted(maps.Keys(nodes)) {
			list = append(list, nodes[k])
		}
		var expected []ExpectedNode
		if rnd.IntN(2) == 0 {
			expected = []ExpectedNode{{Name: name()}}
		}
		some := seen.look(ro, list, expected)
		anew := new(lineup)
		anew.look(ro, list, expected)
		all, want := slices.Collect(seen.all()), slices.Collect(anew.all())
		if d := cmp.Diff([]any{anew.states, anew.goes, anew.kubelet, len(want)}, []any{seen.states, seen.goes, seen.kubelet, seen.size()}); d != "" {
			t.Fatalf("step %d: counted (-looking for the first time +having looked before)\n%s", step, d)
		}
		got, isFresh := map[string]rollEntry{}, map[string]bool{}
		for _, e := range some {
			isFresh[e.name] = true
		}
		fresh += len(some)
		if d := cmp.Diff(entries(want), entries(all), cmp.AllowUnexported(rollEntry{})); d != "" {
			t.Fatalf("step %d: (-looked for the first time +looked before)\n%s", step, d)
		}
		for _, e := range all {
			got[e.name] = *e
			if !isFresh[e.name] && was[e.name] != *e {
				t.Fatalf("step %d: %+v is not called fresh, and was %+v", step, *e, was[e.name])
			}
		}
		was = got
	}
	if fresh == 0 || fresh > 5000*9 {
		t.Errorf("%d of about 60000 were called fresh: nothing is kept", fresh)
	}
}

func entries(all []*rollEntry) (out []rollEntry) {
	for _, e := range all {
		out = append(out, *e)
	}
	return out
}

// A machine that is a Node before the operator has annotated it belongs where its record says.
func TestGroupOfANewNode(t *testing.T) {
	moves := []Move{{Name: "replace-0", Node: "worker-3", Group: "workers", Donor: "worker-0"}}
	nodes := []*Node{{Name: "worker-3", Role: "worker"}, {Name: "worker-4", Role: "worker"}}
	var l lineup
	l.look(Rollout{Moves: moves}, nodes, nil)
	var got []string
	for e := range l.all() {
		got = append(got, e.name+" of "+e.group)
	}
	if want := []string{"worker-3 of workers", "worker-4 of worker"}; !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}
