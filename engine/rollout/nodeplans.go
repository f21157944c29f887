package rollout

import (
	"errors"
	"fmt"
	"reflect"
	"strings"

	"constellation/engine/cluster"
	"constellation/engine/plan"
)

// planVerbs say of a Plan that does not go on how it is, unless its own words do.
var planVerbs = map[string]string{cluster.PlanFailed: " has failed", cluster.PlanInvalid: " cannot be carried out", cluster.PlanWaiting: " waits"}

// sourcePlans is who speaks about Plans in general.
const sourcePlans = "plans"

// planOf is what Plans do with a node.
type planOf struct{ plan, state, text string }

// onNodes says what Plans do with each node. Where two do something with one, that which
// failed matters most.
func onNodes(plans []cluster.NodePlan) map[string]planOf {
	out := map[string]planOf{}
	for i := range plans {
		for _, n := range plans[i].Nodes {
			if was, is := out[n.Name]; is && (was.state == plan.NodeFailed || n.State != plan.NodeFailed) {
				continue
			}
			out[n.Name] = planOf{plans[i].Name, n.State, n.Text}
		}
	}
	return out
}

// words describes the state of a node that a Plan applies to.
func (p planOf) words() string {
	text := "plan " + p.plan[strings.IndexByte(p.plan, '/')+1:]
	if p.text != "" {
		text += ": " + p.text
	}
	return text
}

// PlanTeller reports changes of Plans. The zero value has reported none.
type PlanTeller struct {
	told   map[string]cluster.NodePlan
	unseen string // reported reason why Plans cannot be read
}

// Tell reports the changes since its last call. err is why Plans cannot be listed.
func (t *PlanTeller) Tell(r *plan.Reporter, plans []cluster.NodePlan, err error) {
	if err != nil {
		level, text := "warn", "Plans are not shown: "+err.Error()
		switch {
		case errors.Is(err, cluster.ErrForbidden):
			text = "Plans are not shown: this user may not list plans of upgrade.cattle.io; ClusterRole constellation:watch, bound to the user, allows it"
		case errors.Is(err, cluster.ErrAbsent):
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
	now := make(map[string]cluster.NodePlan, len(plans))
	for _, p := range plans {
		p.Nodes = nil // of which the events of nodes tell
		now[p.Name] = p
		if was, is := t.told[p.Name]; !is || !reflect.DeepEqual(was, p) {
			r.Send(p.Event())
		}
	}
	for name := range t.told {
		if _, is := now[name]; !is {
			r.Send(plan.Event{Kind: plan.KindNodePlan, Object: name, State: cluster.PlanGone})
		}
	}
	t.told = now
}

// WhyPlans is why no Plan goes on, as a wait event; an empty text if none is waited for, or
// one goes on.
func WhyPlans(plans []cluster.NodePlan) plan.Event {
	ways := []func(*cluster.NodePlan) plan.Event{}
	for _, state := range []string{cluster.PlanFailed, cluster.PlanInvalid} {
		ways = append(ways, whyState(state))
	}
	ways = append(ways, whyHeld, whyState(cluster.PlanWaiting), whyState(cluster.PlanPaused))
	for i := range plans {
		if plans[i].Applying > int64(plans[i].Held()) {
			return plan.Event{Kind: plan.KindWait}
		}
	}
	for _, why := range ways {
		for i := range plans {
			if e := why(&plans[i]); e.Text != "" {
				return e
			}
		}
	}
	return plan.Event{Kind: plan.KindWait}
}

// whyState describes a Plan in a state in which it starts no nodes.
func whyState(state string) func(*cluster.NodePlan) plan.Event {
	return func(p *cluster.NodePlan) plan.Event {
		if p.State != state {
			return plan.Event{}
		}
		return plan.Event{Kind: plan.KindWait, Object: p.Name, State: p.State, Text: strings.TrimSuffix("plan "+p.Name+planVerbs[state]+": "+p.Text, ": "), Remedy: p.Remedy}
	}
}

// whyHeld describes the first blocked node.
func whyHeld(p *cluster.NodePlan) plan.Event {
	for _, x := range p.Nodes {
		if x.Held != "" {
			return plan.Event{Kind: plan.KindWait, Object: p.Name, State: p.State, Node: x.Name, Text: fmt.Sprintf("plan %s at node %s: %s", p.Name, x.Name, x.Text), Remedy: x.Held}
		}
	}
	return plan.Event{}
}
