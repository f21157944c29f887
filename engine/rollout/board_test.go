package rollout_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"constellation/engine/plan"
	"constellation/engine/rollout"
)

var boardStart = time.Date(2026, 11, 21, 7, 5, 1, 0, time.UTC)

// replacement returns the events of one node's replacement, beginning at a time. The events of
// the replacement node begin before or after those of the old node.
func replacement(group, donor, heir string, at time.Time, heirFirst bool) []plan.Event {
	node := func(after time.Duration, name, with, from, to string) plan.Event {
		return plan.Event{Time: at.Add(after), Kind: plan.KindNode, Node: name, With: with, Group: group, From: from, To: to}
	}
	begin := []plan.Event{
		node(0, donor, heir, plan.NodeOutdated, plan.NodeReplacing),
		node(0, heir, donor, "", plan.NodeCreating),
	}
	if heirFirst {
		begin[0], begin[1] = begin[1], begin[0]
	}
	return append(begin,
		node(2*time.Second, heir, donor, plan.NodeCreating, plan.NodeBooting),
		node(12*time.Second, heir, donor, plan.NodeBooting, plan.NodeJoining),
		node(15*time.Second, heir, donor, plan.NodeJoining, plan.NodeNotReady),
		node(20*time.Second, heir, donor, plan.NodeNotReady, plan.NodeReady),
		node(21*time.Second, donor, heir, plan.NodeReplacing, plan.NodeDraining),
		node(51*time.Second, donor, heir, plan.NodeDraining, plan.NodeLeaving),
		node(54*time.Second, donor, heir, plan.NodeLeaving, plan.NodeGone),
	)
}

func TestBoardFollowsAReplacement(t *testing.T) {
	for _, heirFirst := range []bool{false, true} {
		t.Run(fmt.Sprintf("replacement node first %v", heirFirst), func(t *testing.T) {
			var b rollout.Board
			for i := range 4 {
				b.Apply(plan.Event{Time: boardStart, Kind: plan.KindNode, Node: fmt.Sprintf("worker-%d", i), Group: "workers", To: plan.NodeOutdated})
			}
			place := b.Node("worker-1").Place
			var states []string
			for _, e := range replacement("workers", "worker-1", "worker-9", boardStart.Add(time.Minute), heirFirst) {
				b.Apply(e)
				states = append(states, place.State())
				if _, total := b.Places(); total != 4 {
					t.Fatalf("%d places after %s of %s, want 4", total, e.To, e.Node)
				}
			}
			want := []string{"creating", "booting", "joining", "not-ready", "replacing", "draining", "leaving", "ready"}
			if diff := cmp.Diff(want, states[1:]); diff != "" {
				t.Errorf("states of the place (-want +got):\n%s", diff)
			}
			if got := b.Node("worker-9").Place; got != place || place.Index != 1 {
				t.Errorf("the replacement node is in row %v, want the row of the old node", got)
			}
			if done, total := b.Places(); done != 1 || total != 4 {
				t.Errorf("%d of %d done, want 1 of 4", done, total)
			}
			if diff := cmp.Diff(map[string]int64{"outdated": 3, "ready": 1}, b.Counts()); diff != "" {
				t.Errorf("counts (-want +got):\n%s", diff)
			}
			now := boardStart.Add(2 * time.Minute)
			if got := b.Dwell(plan.NodeDraining, 0.5); got != 30*time.Second {
				t.Errorf("half drain in %s, want 30s", got)
			}
			if got := b.Pace(now); got != 0.5 {
				t.Errorf("%v nodes per minute, want 0.5", got)
			}
		})
	}
}

// A node that is upgraded in place keeps its row, serves all the time, and is counted when
// it is at the target. A failed upgrade is retried.
func TestBoardFollowsAnUpgradeInPlace(t *testing.T) {
	var b rollout.Board
	states, attempts := []string{}, []int{}
	from := ""
	for i, to := range []string{plan.NodeOutdated, plan.NodeDraining, plan.NodeUpgrading, plan.NodeFailed, plan.NodeUpgrading, plan.NodeReady} {
		b.Apply(plan.Event{Time: boardStart.Add(time.Duration(i) * time.Minute), Kind: plan.KindNode, Node: "worker-0", Group: "workers", From: from, To: to})
		n := b.Node("worker-0")
		states, attempts, from = append(states, n.Place.State()), append(attempts, n.Attempts), to
		if up, total := b.Groups()[0].Serving(); to != plan.NodeFailed && (up != 1 || total != 1) {
			t.Errorf("%d of %d nodes serve while it is %s", up, total, to)
		}
	}
	if diff := cmp.Diff([]string{"outdated", "draining", "upgrading", "failed", "upgrading", "ready"}, states); diff != "" {
		t.Errorf("states of the place (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]int{0, 0, 1, 1, 2, 2}, attempts); diff != "" {
		t.Errorf("attempts (-want +got):\n%s", diff)
	}
	if done, total := b.Places(); done != 1 || total != 1 || b.InFlight() != 0 || b.Finished(1, boardStart.Add(5*time.Minute))[0] != 1 {
		t.Errorf("%d of %d are done, %d in flight", done, total, b.InFlight())
	}
	if d := b.Dwell(plan.NodeUpgrading, 1); d != time.Minute {
		t.Errorf("upgrading took %v", d)
	}
}

// A place is done once, however often its node is not Ready afterwards.
func TestBoardCountsAPlaceOnce(t *testing.T) {
	for name, tt := range map[string]struct {
		states []string
		want   int64
	}{
		"it was there already":                   {[]string{plan.NodeReady, plan.NodeNotReady, plan.NodeReady}, 0},
		"it is replaced":                         {[]string{plan.NodeOutdated, plan.NodeReplacing, plan.NodeDraining, plan.NodeLeaving, plan.NodeReady}, 1},
		"it is not Ready for a while afterwards": {[]string{plan.NodeOutdated, plan.NodeUpgrading, plan.NodeReady, plan.NodeNotReady, plan.NodeReady}, 1},
		"it was not Ready before":                {[]string{plan.NodeOutdated, plan.NodeUpgrading, plan.NodeNotReady, plan.NodeReady}, 1},
		"it is done again":                       {[]string{plan.NodeOutdated, plan.NodeReady, plan.NodeOutdated, plan.NodeReady}, 2},
		"it joins":                               {[]string{plan.NodeCreating, plan.NodeJoining, plan.NodeNotReady, plan.NodeReady}, 1},
	} {
		t.Run(name, func(t *testing.T) {
			var b rollout.Board
			for i, to := range tt.states {
				b.Apply(plan.Event{Time: boardStart.Add(time.Duration(i) * time.Second), Kind: plan.KindNode, Node: "worker-0", Group: "workers", To: to})
			}
			var done int64
			for _, n := range b.Finished(1, boardStart.Add(time.Duration(len(tt.states))*time.Second)) {
				done += int64(n)
			}
			if done != tt.want {
				t.Errorf("done %d times, want %d", done, tt.want)
			}
		})
	}
}

// A board of recorded events shows whether the machines were simulated.
func TestBoardMarksSimulatedMachines(t *testing.T) {
	for _, tt := range []struct {
		name   string
		events []plan.Event
		want   bool
	}{
		{name: "neither says so", events: []plan.Event{{Kind: plan.KindHello, Object: "demo"}, {Kind: plan.KindPlan, Data: []byte(`{"cluster":"demo"}`)}}, want: false},
		{name: "the greeting says so", events: []plan.Event{{Kind: plan.KindHello, Object: "demo", Simulated: true}}, want: true},
		{name: "the plan says so", events: []plan.Event{{Kind: plan.KindHello, Object: "demo"}, {Kind: plan.KindPlan, Data: []byte(`{"simulated":true}`)}}, want: true},
	} {
		var b rollout.Board
		for _, e := range tt.events {
			b.Apply(e)
		}
		if b.Simulated != tt.want {
			t.Errorf("%s: %v", tt.name, b.Simulated)
		}
	}
}

// TestBoardIsBounded feeds a board more machines, lines and steps than there can be.
func TestBoardIsBounded(t *testing.T) {
	var b rollout.Board
	at := boardStart
	big := strings.Repeat("x", 100_000)
	for i := range 120_000 {
		at = at.Add(time.Millisecond)
		name := fmt.Sprintf("worker-%d", i)
		b.Apply(plan.Event{Time: at, Kind: plan.KindNode, Node: name, Group: fmt.Sprint("g", i%3), To: plan.NodeReady, Text: big[:i%10]})
		b.Apply(plan.Event{Time: at, Kind: plan.KindNode, Node: name, Group: fmt.Sprint("g", i%3), From: plan.NodeReady, To: plan.NodeGone})
		b.Apply(plan.Event{Time: at, Kind: plan.KindLog, Source: fmt.Sprint("s", i), Text: big[:200+i%50_000]})
		b.Apply(plan.Event{Time: at, Kind: plan.KindStep, Step: fmt.Sprint("step", i), State: plan.StateRunning})
	}
	machines := 0
	for range b.Nodes() {
		machines++
	}
	bytes := 0
	for i := range b.Log.Len() {
		bytes += len(b.Log.At(i).Text)
	}
	if machines > 12_000 || b.Log.Len() > 50_000 || bytes > 16<<20 || len(b.Steps) > 256 || len(b.Log.Sources()) > 256 {
		t.Errorf("%d machines, %d lines of %d bytes, %d steps, %d sources", machines, b.Log.Len(), bytes, len(b.Steps), len(b.Log.Sources()))
	}
	if b.Log.Len()+b.Log.Dropped() != 120_000 {
		t.Errorf("%d lines are kept and %d are not", b.Log.Len(), b.Log.Dropped())
	}
}

// TestCloneStaysAsItIs takes a copy of a board in the middle of a rollout.
func TestCloneStaysAsItIs(t *testing.T) {
	var b rollout.Board
	for i := range 6 {
		b.Apply(plan.Event{Time: boardStart, Kind: plan.KindNode, Node: fmt.Sprintf("worker-%d", i), Group: "workers", To: plan.NodeOutdated})
	}
	events := replacement("workers", "worker-1", "worker-9", boardStart.Add(time.Minute), false)
	for _, e := range events[:6] {
		b.Apply(e)
	}
	clone := b.Clone()
	want := clone.Counts()
	for _, e := range events[6:] {
		b.Apply(e)
	}
	if diff := cmp.Diff(want, clone.Counts()); diff != "" {
		t.Errorf("the copy has changed (-want +got):\n%s", diff)
	}
	for _, e := range events[6:] {
		clone.Apply(e)
	}
	if diff := cmp.Diff(b.Counts(), clone.Counts()); diff != "" {
		t.Errorf("the copy takes other ways (-want +got):\n%s", diff)
	}
	if n := clone.Node("worker-9"); n.Place == b.Node("worker-9").Place || n.Place.Old != clone.Node("worker-1") {
		t.Error("the copy shares machines with the board")
	}
}
