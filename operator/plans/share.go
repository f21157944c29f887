package plans

import (
	"slices"

	"constellation/operator/api/upgradev1"
	"constellation/operator/nodelock"
)

// share upgrades nodes that the operator has drained for its own upgrade in place, so that their pods are moved once.
//
// The operator holds the node lock meanwhile, and the Plan waits for it. It notes on each such Node that it waits. When
// the operator's upgrade of that Node is complete, the operator lends the Node to the Plan and keeps it cordoned until
// the note is gone. share reports whether the Plan waits for such a Node, or upgrades one, without the lock.
func (r *roller) share() bool {
	us := r.plan.Namespace + "/" + r.plan.Name
	needs := map[string]bool{}
	for _, u := range r.keep {
		if !r.failedNow(u) && u.inPlace && u.lent == us {
			needs[u.name] = true
		}
	}
	if r.shares {
		free := int(min(r.plan.Spec.Concurrency, int64(r.total))) - len(r.keep)
		for _, u := range r.inPlace {
			problem, _ := r.refuses(u)
			if free <= 0 || problem != "" || u.waits != "" && u.waits != us || r.failedNow(u) {
				continue
			}
			free--
			if u.lent != us {
				needs[u.name] = true
				if u.waits == "" {
					r.d.marks = append(r.d.marks, r.note(u))
				}
			} else if r.advance(u) {
				needs[u.name] = true
				r.keep, r.d.taken = append(r.keep, u), append(r.d.taken, u.name)
			}
		}
	}
	for _, u := range r.waited {
		switch renewal := u.waitsSince.Add(nodelock.NoteRenewal); {
		case !needs[u.name]:
			r.d.marks = append(r.d.marks, r.giveBack(u))
		case !r.view.now.Before(renewal) || u.waitsSince.After(r.view.now): // perhaps by another clock
			r.d.marks = append(r.d.marks, r.note(u))
		default:
			r.d.at(renewal)
		}
	}
	return r.shares && len(needs) > 0
}

// note notes on a Node that the Plan waits for it, or renews that.
func (r *roller) note(u upgraded) mark {
	r.d.at(r.view.now.Add(nodelock.NoteRenewal))
	return mark{node: u, waits: new(nodelock.Note(r.plan.Namespace+"/"+r.plan.Name, r.view.now))}
}

// giveBack removes the note. A node on which the Plan failed stays cordoned, for the Plan.
func (r *roller) giveBack(u upgraded) mark {
	m := mark{node: u, waits: new("")}
	if (r.plan.Spec.Drain != nil || r.plan.Spec.Cordon) && r.failedNow(u) && u.inPlace && u.cordonedFor == "" {
		m.cordonedFor = new(r.plan.Namespace + "/" + r.plan.Name)
	}
	return m
}

// failedNow reports whether the Plan has failed on a node and does not retry by itself.
func (r *roller) failedNow(u upgraded) bool {
	return slices.ContainsFunc(r.failed, func(n upgradev1.NodeStatus) bool { return n.Name == u.name })
}
