package engine

import (
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"strings"
)

// NodePlan is a Plan of upgrade.cattle.io/v1, by which a Job is run once on each of some nodes,
// as far as its controller says. That need not be ours; one of others says less.
type NodePlan struct {
	// Name is namespace/name.
	Name string
	// Version is what nodes are brought to, Channel who says so; either may be empty.
	Version, Channel string
	// State is one of the Plan's, such as PlanApplying.
	State string
	// Text says why nothing goes on, or what has gone wrong; empty if nothing is worth telling.
	Text string
	// Remedy says what to do about it; empty if there is nothing.
	Remedy string
	// Alone says that it has the cluster's nodes to itself.
	Alone bool
	// Total nodes are meant, of which Done have the version. Applying are being upgraded, Failed
	// have failed, and Pending wait for their turn. All but Applying are zero where the controller
	// does not count.
	Total, Done, Applying, Failed, Pending int64
	// Nodes are those that are being upgraded and those that failed, by name. Of many some are left out.
	Nodes []NodePlanNode
}

// NodePlanNode is how far a node is with a Plan.
type NodePlanNode struct {
	Name string
	// State is NodeDraining, NodeUpgrading or NodeFailed.
	State string
	Text  string
	// Held is what to do about it if it does not get on by itself; empty if it does.
	Held string
}

// States of a Plan.
const (
	PlanApplying  = "applying" // nodes are being upgraded
	PlanWaiting   = "waiting"  // for what Text says
	PlanPaused    = "paused"
	PlanCancelled = "cancelled"
	PlanFailed    = "failed"  // no more nodes are taken, or will be soon
	PlanInvalid   = "invalid" // it cannot be carried out as it is
	PlanComplete  = "complete"
	PlanUnseen    = "unseen" // no controller has looked at it
	PlanGone      = "gone"
)

// planVerbs say of a Plan that does not go on how it is, unless its own words do.
var planVerbs = map[string]string{PlanFailed: " has failed", PlanInvalid: " cannot be carried out", PlanWaiting: " waits"}

// sourcePlans is who speaks about Plans in general.
const sourcePlans = "plans"

// NodePlanFacts is the Data of an event about a Plan.
type NodePlanFacts struct {
	Version string `json:"version,omitempty"`
	Channel string `json:"channel,omitempty"`
	// Alone says that it has the cluster's nodes to itself.
	Alone bool `json:"alone,omitempty"`
}

// event tells how a Plan is.
func (p *NodePlan) event() Event {
	data, err := json.Marshal(NodePlanFacts{p.Version, p.Channel, p.Alone})
	if err != nil { // strings and a bool
		panic(err)
	}
	e := Event{Kind: KindNodePlan, Object: p.Name, State: p.State, Text: p.Text, Remedy: p.Remedy, Current: p.Done, Total: p.Total, Data: data, Counts: map[string]int64{}}
	for word, n := range map[string]int64{"pending": p.Pending, "applying": p.Applying, "done": p.Done, "failed": p.Failed} {
		if n > 0 {
			e.Counts[word] = n
		}
	}
	return e
}

// planOf is what Plans do with a node.
type planOf struct{ plan, state, text string }

// onNodes says what Plans do with each node. Where two do something with one, that which
// failed matters most.
func onNodes(plans []NodePlan) map[string]planOf {
	out := map[string]planOf{}
	for i := range plans {
		for _, n := range plans[i].Nodes {
			if was, is := out[n.Name]; is && (was.state == NodeFailed || n.State != NodeFailed) {
				continue
			}
			out[n.Name] = planOf{plans[i].Name, n.State, n.Text}
		}
	}
	return out
}

// words are what is said of a node that a Plan is at.
func (p planOf) words() string {
	text := "plan " + p.plan[strings.IndexByte(p.plan, '/')+1:]
	if p.text != "" {
		text += ": " + p.text
	}
	return text
}

// planTeller tells what becomes of Plans. The zero value has told of none.
type planTeller struct {
	told   map[string]NodePlan
	unseen string // why none is seen, as told
}

// tell tells what has changed since it was called last. err is why no Plan can be seen.
func (t *planTeller) tell(r *Reporter, plans []NodePlan, err error) {
	if err != nil {
		level, text := "warn", "Plans are not shown: "+err.Error()
		switch {
		case errors.Is(err, ErrForbidden):
			text = "Plans are not shown: this user may not list plans of upgrade.cattle.io; ClusterRole constellation:watch, bound to the user, allows it"
		case errors.Is(err, ErrAbsent):
			level, text = "info", "there are no Plans: the cluster does not have the kind plans.upgrade.cattle.io"
		}
		if text != t.unseen {
			t.unseen = text
			r.Log(sourcePlans, "", level, text)
		}
		return
	}
	if len(plans)+len(t.told) == 0 {
		return
	}
	now := make(map[string]NodePlan, len(plans))
	for _, p := range plans {
		p.Nodes = nil // of which the events of nodes tell
		now[p.Name] = p
		if was, is := t.told[p.Name]; !is || !reflect.DeepEqual(was, p) {
			r.Send(p.event())
		}
	}
	for name := range t.told {
		if _, is := now[name]; !is {
			r.Send(Event{Kind: KindNodePlan, Object: name, State: PlanGone})
		}
	}
	t.told = now
}

// whyPlans is why no Plan goes on, as a wait event; an empty text if none is waited for, or
// one goes on.
func whyPlans(plans []NodePlan) Event {
	ways := []func(*NodePlan) Event{}
	for _, state := range []string{PlanFailed, PlanInvalid} {
		ways = append(ways, whyState(state))
	}
	ways = append(ways, whyHeld, whyState(PlanWaiting), whyState(PlanPaused))
	for i := range plans {
		if plans[i].Applying > int64(plans[i].held()) {
			return Event{Kind: KindWait}
		}
	}
	for _, why := range ways {
		for i := range plans {
			if e := why(&plans[i]); e.Text != "" {
				return e
			}
		}
	}
	return Event{Kind: KindWait}
}

// whyState tells of a Plan in a state in which it takes no nodes.
func whyState(state string) func(*NodePlan) Event {
	return func(p *NodePlan) Event {
		if p.State != state {
			return Event{}
		}
		return Event{Kind: KindWait, Object: p.Name, State: p.State, Text: strings.TrimSuffix("plan "+p.Name+planVerbs[state]+": "+p.Text, ": "), Remedy: p.Remedy}
	}
}

// held is how many of its nodes do not get on by themselves.
func (p *NodePlan) held() (n int) {
	for _, x := range p.Nodes {
		if x.Held != "" {
			n++
		}
	}
	return n
}

// whyHeld tells of the first node that does not get on by itself.
func whyHeld(p *NodePlan) Event {
	for _, x := range p.Nodes {
		if x.Held != "" {
			return Event{Kind: KindWait, Object: p.Name, State: p.State, Node: x.Name, Text: fmt.Sprintf("plan %s at node %s: %s", p.Name, x.Name, x.Text), Remedy: x.Held}
		}
	}
	return Event{}
}
