package drill

import (
	"constellation/engine/cloud"
	"constellation/engine/sandbox/recorder"
)

// Points of an upgrade at which a fault can begin, as the recorder sees them. Each is
// counted: the first node that is cordoned is "cordoned 1".
const (
	pointBegun     = "begun"     // the target is set
	pointKubeadm   = "kubeadm"   // the agent upgrades Kubernetes; on its node
	pointIntent    = "intent"    // a replacement is recorded; on the old node
	pointRequested = "requested" // the cloud makes a machine; on that machine
	pointAdopted   = "adopted"   // a replacement node has joined and is not Ready; on that node
	pointReady     = "ready"     // a replacement node is Ready; on that node
	pointCordoned  = "cordoned"  // a node will be drained; on that node
	pointBound     = "bound"     // the machine to delete is decided; on its node
	pointGoing     = "going"     // the cloud deletes a machine; on that machine

	// Of upgrades in place.
	pointScheduled = "scheduled" // a node will be upgraded in place; on that node
	pointUpgrading = "upgrading" // its agent has begun; on that node
	pointApplying  = "applying"  // its agent runs kubeadm, or has; on that node
	pointUpgraded  = "upgraded"  // its new components are recorded; on that node
)

// perNode are the points that each replacement has.
var perNode = []string{pointIntent, pointRequested, pointAdopted, pointReady, pointCordoned, pointBound, pointGoing}

// perUpgrade are the points that each upgrade in place has.
var perUpgrade = []string{pointScheduled, pointCordoned, pointUpgrading, pointApplying, pointUpgraded}

// at is a reached point, and its subject.
type at struct {
	point   string
	nth     int
	subject string
}

// seen counts points.
type seen struct {
	begun bool
	known map[string]bool // point and whom it was about
	count map[string]int
	had   map[string]string // components that a Node had first, by UID
}

func newSeen() *seen {
	return &seen{known: map[string]bool{}, count: map[string]int{}, had: map[string]string{}}
}

// points returns those that an entry is the first to show.
func (s *seen) points(e *recorder.Entry) (reached []at) {
	if e.Fact == recorder.Begin {
		s.begun = true
	}
	// The state before the upgrade contains no points.
	reach := func(point, key, subject string) {
		if s.known[point+" "+key] {
			return
		}
		s.known[point+" "+key] = true
		if s.begun {
			s.count[point]++
			reached = append(reached, at{point, s.count[point], subject})
		}
	}
	switch f := e.Fact.(type) {
	case *recorder.Target:
		if s.begun && !f.Ready {
			reach(pointBegun, "", "")
		}
		if f.Phase == "apply" {
			reach(pointKubeadm, f.Node, f.Node)
		}
	case *recorder.Pending:
		ofPending(f, reach)
	case *recorder.Machines:
		for _, m := range f.List {
			if m.Token != "" {
				reach(pointRequested, m.Token, m.Name)
			}
			if m.State == string(cloud.Terminating) {
				reach(pointGoing, m.ID, m.Name)
			}
		}
	case *recorder.Node:
		s.ofNode(f, reach)
	}
	return reached
}

// ofPending reaches the points that a PendingNode shows.
func ofPending(f *recorder.Pending, reach func(point, key, subject string)) {
	if f.Gone {
		return
	}
	if f.Token != "" {
		reach(pointIntent, f.Token, f.Donor)
		if f.Goal == "Leave" {
			reach(pointBound, f.Token, f.Node)
		}
	}
	if f.Goal == "Upgrade" {
		reach(pointScheduled, f.Node, f.Node)
		if f.Phase != "" {
			reach(pointUpgrading, f.Node, f.Node)
		}
		if f.Phase == "apply" || f.Phase == "done" {
			reach(pointApplying, f.Node, f.Node)
		}
	}
}

// ofNode reaches the points that a Node shows.
func (s *seen) ofNode(f *recorder.Node, reach func(point, key, subject string)) {
	if f.Gone {
		return
	}
	if f.Donor != "" {
		reach(pointAdopted, f.UID, f.Name)
		if f.Ready {
			reach(pointReady, f.UID, f.Name)
		}
	}
	if f.CordonedByUs {
		reach(pointCordoned, f.UID, f.Name)
	}
	if _, known := s.had[f.UID]; !known {
		s.had[f.UID] = f.Components
	}
	if f.InPlace && f.Components != s.had[f.UID] {
		reach(pointUpgraded, f.UID, f.Name)
	}
}
