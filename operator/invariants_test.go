package operator

import (
	"fmt"
	"slices"
)

// The invariants of a rollout, written against the model world and not in terms of
// decide. broken looks at a state; wrongEffect at one effect in the state before it.

// broken says which invariant does not hold in s; empty: all do.
func (c *scenario) broken(s *modelState) string {
	machines, controlPlanes, healthy := 0, 0, 0
	var ready [modelGroups]uint8
	oldestAPI := uint8(255)
	for i := range s.m {
		m := &s.m[i]
		if m.life == booting || m.life == running || m.life == terminating {
			machines++
			if m.group == cpModel {
				controlPlanes++
			}
		}
		if m.isNode && m.ready && m.life == running {
			ready[m.group]++
		}
		if m.member == 2 && m.life == running {
			healthy++
		}
		if m.isNode && m.group == cpModel && m.life == running {
			oldestAPI = min(oldestAPI, m.api)
		}
	}
	for g := range ready {
		if ready[g] < s.floor[g] {
			return fmt.Sprintf("invariant 1: %d nodes of group %d are Ready because of us, there were %d", ready[g], g, s.floor[g])
		}
	}
	allowed := c.total() + c.surge
	t := modelTargets[s.target]
	for i := range s.m {
		// A person has made us forget it, and then it was outdated: a node like any other.
		if m := &s.m[i]; m.isNode && m.token != 0 && s.placeOfToken(m.token) < 0 && (m.image != t.image || m.comps != t.comps) && m.donor != nobody {
			allowed++
		}
	}
	if machines > allowed {
		return fmt.Sprintf("invariant 2: %d machines exist, %d are allowed", machines, allowed)
	}
	if controlPlanes > c.nodes[cpModel]+1 {
		return fmt.Sprintf("invariant 2: %d control planes exist, one more than %d is allowed", controlPlanes, c.nodes[cpModel])
	}
	voters := s.countVoters()
	if voters < int(s.voters) {
		return fmt.Sprintf("invariant 3: etcd has %d voters, it had %d", voters, s.voters)
	}
	if healthy < voters/2+1 {
		return fmt.Sprintf("invariant 3: etcd has lost its quorum: %d of %d voters are healthy", healthy, voters)
	}
	for i := range s.m {
		m := &s.m[i]
		if m.isNode && m.ready && m.group != cpModel && m.comps > oldestAPI {
			return fmt.Sprintf("invariant 11: the kubelet of worker m%d is newer than an API server", i)
		}
	}
	return ""
}

// wrongEffect says which invariant an effect breaks that was decided in s; whole is
// whether the operator saw all of s.
func (c *scenario) wrongEffect(s *modelState, a *modelAction, whole bool) string {
	t := modelTargets[s.target]
	var m *modelMachine
	if a.node != 0 && a.node != nobody {
		m = &s.m[a.node-1]
	}
	donor := func() *modelMachine {
		if a.donor == 0 || a.donor == nobody {
			return nil
		}
		return &s.m[a.donor-1]
	}
	controlPlanesDone := true
	for i := range s.m {
		if o := &s.m[i]; o.isNode && o.group == cpModel {
			controlPlanesDone = controlPlanesDone && o.known && o.image == t.image && o.comps == t.comps
		}
	}
	for p := range s.places {
		controlPlanesDone = controlPlanesDone && (!whole || !s.places[p].used || s.places[p].group != cpModel)
	}
	worker := false
	switch a.kind {
	case recordIntent, createInstance:
		worker = a.place != 255 && a.group != cpModel
		if d := donor(); a.place != 255 && a.kind == recordIntent && d != nil {
			switch {
			case s.paused || s.cancel:
				return "a replacement is begun while the rollout is stopped"
			case d.isNode && !d.known:
				return "a node of which too little is known is replaced"
			case c.inPlace && d.group == workersB:
				return "a node of a group that is upgraded in place is replaced"
			case c.keepWorkers && d.group != cpModel:
				return "a kept worker is replaced"
			}
		}
		if s.scaling && a.place != 255 {
			return "invariant 7: a machine is made while the autoscaler runs"
		}
		if a.kind == createInstance && s.byToken(a.token) < 0 {
			pub := s.pubW
			if a.group == cpModel {
				pub = s.pubCP
			}
			if s.images[a.group] != t.image || pub != t.comps {
				return "a machine is made that will not be at the target"
			}
		}
	case bindIntent:
		d := donor()
		worker = a.place != 255 && d != nil && m == d && m.group != cpModel
		if a.place != 255 && m == d {
			h := s.byToken(a.token)
			switch {
			case h < 0 || !s.m[h].isNode || !s.m[h].ready:
				return "invariant 1: a donor is to leave without a Ready heir"
			case s.m[h].image != t.image || s.m[h].comps != t.comps:
				return "a donor is to leave for an heir of another version"
			case s.m[h].cordon == uint8(cordonedByOthers):
				return "a donor is to leave for an heir that takes no pods"
			case m.group == cpModel && s.m[h].member != 2:
				return "invariant 3: a control plane is to leave before its heir votes"
			}
		}
		if a.place == 255 && !m.trackedLate {
			return "a machine is given up that had time to join"
		}
	case cordonNode:
		worker = a.other != 0 && m.group != cpModel && m.heir != a.other
	case releaseNode:
		if a.flag && m.cordon == uint8(cordonedByOthers) {
			return "invariant 13: what somebody else cordoned is uncordoned"
		}
	case deleteInstance:
		if m.isNode && m.ready && !m.drained && whole {
			return "a machine is deleted with work on it"
		}
		if m.member != 0 {
			return "a control plane is deleted that is still a member of etcd"
		}
		if int(s.lease) == int(a.node-1) && m.isNode && m.ready && whole {
			return "the operator deletes the machine that it runs on"
		}
	case deleteNode:
		if m.life == running || m.life == booting {
			return "the Node of a running machine is deleted"
		}
	case removeMember:
		if int(s.leader) == int(a.node-1) && m.life == running {
			return "invariant 3: the leader of etcd is removed"
		}
		for i := range s.m {
			if o := &s.m[i]; o != m && o.member != 0 && m.life == running && (o.member == 1 || o.life != running) {
				return "invariant 3: a member is removed while another is not healthy"
			}
		}
	case clearIntent:
		if a.flag && m.life != terminated && m.life != absent && m.member == 0 && (!m.isNode || m.group != cpModel) {
			return "invariant 8: a machine that leaves is forgotten before it is gone"
		}
		if a.place != 255 && !a.flag && s.byToken(a.token) < 0 && !s.places[a.place].late && whole {
			return "invariant 8: an intent is forgotten whose machine may be on its way"
		}
	case resumeAutoscaler:
		if !s.ours {
			return "an autoscaler is started that somebody else stopped"
		}
		if whole && (s.places[0].used || s.places[1].used || s.run == 1) {
			return "invariant 7: the autoscaler is given back while a replacement is under way"
		}
	case startUpgrade:
		if s.run == 2 && s.runTarget == a.target {
			return "a finished upgrade of Kubernetes is started again"
		}
		if modelTargets[a.target].comps < s.pubCP {
			return "invariant 11: Kubernetes goes down"
		}
	case publishComponents:
		if a.pubCP > s.pubCP && (s.run != 2 || modelTargets[s.runTarget].comps < a.pubCP) {
			return "invariant 11: joining control planes get what no agent has finished"
		}
		if a.pubW > s.pubW && !controlPlanesDone {
			return "invariant 11: joining workers get what not every control plane has"
		}
		if a.pubCP < s.pubCP || a.pubW < s.pubW {
			return "invariant 11: what joining machines get goes down"
		}
	}
	if worker && !controlPlanesDone {
		return "invariant 4: a worker is replaced while a control plane is outdated or being replaced"
	}
	return ""
}

// done reports whether s is where a rollout ends: nothing is under way, nothing is left
// behind, and every node that shall be is at the target.
func (c *scenario) done(s *modelState) bool {
	t := modelTargets[s.target]
	stuck := slices.Contains(s.blocked[:], true)
	if s.flying.kind != 0 || s.run == 1 || s.paused || s.cancel || (s.places[0].used || s.places[1].used) && !stuck || s.pubCP != t.comps || s.pubW != t.comps {
		return false
	}
	if !stuck && (s.ours || s.enabled != s.scaling || s.enabled == c.othersStoppedScale) {
		return false
	}
	for i := range s.m {
		m := &s.m[i]
		if s.blocked[m.group] {
			continue // it says why it waits
		}
		kept := c.keepWorkers && m.group != cpModel || c.inPlace && m.group == workersB
		switch {
		case m.life == absent && !m.isNode && m.member == 0:
		case m.life != running || !m.isNode || !m.ready || !m.known || m.tracked != 0:
			return false
		case m.cordon != 0 || m.heir != 0 || m.postponed || m.obsolete || m.member == 1:
			return false
		case !kept && (m.image != t.image || m.comps != t.comps):
			return false
		}
	}
	return true
}
