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
)

// perNode are the points that each replacement has.
var perNode = []string{pointIntent, pointRequested, pointAdopted, pointReady, pointCordoned, pointBound, pointGoing}

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
}

func newSeen() *seen { return &seen{known: map[string]bool{}, count: map[string]int{}} }

// points returns those that an entry is the first to show.
func (s *seen) points(e *recorder.Entry) (reached []at) {
	if e.Mark == recorder.Begin {
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
	switch {
	case e.Target != nil:
		if s.begun && !e.Target.Ready {
			reach(pointBegun, "", "")
		}
		if e.Target.Phase == "apply" {
			reach(pointKubeadm, e.Target.Node, e.Target.Node)
		}
	case e.Pending != nil && !e.Pending.Gone && e.Pending.Token != "":
		reach(pointIntent, e.Pending.Token, e.Pending.Donor)
		if e.Pending.Goal == "Leave" {
			reach(pointBound, e.Pending.Token, e.Pending.Node)
		}
	case e.Machines != nil:
		for _, m := range e.Machines.List {
			if m.Token != "" {
				reach(pointRequested, m.Token, m.Name)
			}
			if m.State == string(cloud.Terminating) {
				reach(pointGoing, m.ID, m.Name)
			}
		}
	case e.Node != nil && !e.Node.Gone:
		if e.Node.Donor != "" {
			reach(pointAdopted, e.Node.UID, e.Node.Name)
			if e.Node.Ready {
				reach(pointReady, e.Node.UID, e.Node.Name)
			}
		}
		if e.Node.CordonedByUs {
			reach(pointCordoned, e.Node.UID, e.Node.Name)
		}
	}
	return reached
}
