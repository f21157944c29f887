package cluster

import (
	"encoding/json"

	"constellation/engine/plan"
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

// NodePlanFacts is the Data of an event about a Plan.
type NodePlanFacts struct {
	Version string `json:"version,omitempty"`
	Channel string `json:"channel,omitempty"`
	// Alone says that it has the cluster's nodes to itself.
	Alone bool `json:"alone,omitempty"`
}

// Event tells how a Plan is.
func (p *NodePlan) Event() plan.Event {
	data, err := json.Marshal(NodePlanFacts{p.Version, p.Channel, p.Alone})
	if err != nil { // strings and a bool
		panic(err)
	}
	e := plan.Event{Kind: plan.KindNodePlan, Object: p.Name, State: p.State, Text: p.Text, Remedy: p.Remedy, Current: p.Done, Total: p.Total, Data: data, Counts: map[string]int64{}}
	for word, n := range map[string]int64{"pending": p.Pending, "applying": p.Applying, "done": p.Done, "failed": p.Failed} {
		if n > 0 {
			e.Counts[word] = n
		}
	}
	return e
}

// Held is how many of its nodes do not get on by themselves.
func (p *NodePlan) Held() (n int) {
	for _, x := range p.Nodes {
		if x.Held != "" {
			n++
		}
	}
	return n
}
