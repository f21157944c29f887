package recorder

import (
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

const (
	oldImage, newImage = "sandboxes/s/images/v1.0.0", "sandboxes/s/images/v1.1.0"
	oldParts, newParts = "k8s-components-sha256-old", "k8s-components-sha256-new"
	cps, workers       = "sandboxes/s/groups/control-planes", "sandboxes/s/groups/workers"
)

// story is a journal under construction, in seconds.
type story []Entry

var start = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

func at(second float64) time.Time { return start.Add(time.Duration(second * float64(time.Second))) }

// tell adds entries at a time, after those of the same time.
func (s *story) tell(second float64, entries ...Entry) {
	for _, e := range entries {
		e.Time = at(second)
		*s = append(*s, e)
	}
	slices.SortStableFunc(*s, func(a, b Entry) int { return a.Time.Compare(b.Time) })
}

// drop removes entries.
func (s *story) drop(which func(Entry) bool) { *s = slices.DeleteFunc(*s, which) }

// edit changes entries, after a copy of their pointers' targets.
func (s *story) edit(change func(*Entry)) {
	for i := range *s {
		e := &(*s)[i]
		switch f := e.Fact.(type) {
		case *Node:
			n := *f
			e.Fact = &n
		case *Target:
			t := *f
			e.Fact = &t
		case *Members:
			e.Fact = &Members{List: slices.Clone(f.List)}
		case *Machines:
			e.Fact = &Machines{List: slices.Clone(f.List)}
		}
		change(e)
	}
}

// later delays all entries from a time on.
func (s *story) later(from, by float64) {
	for i := range *s {
		if e := &(*s)[i]; !e.Time.Before(at(from)) {
			e.Time = e.Time.Add(at(by).Sub(start))
		}
	}
}

func node(name string, change func(*Node)) Entry {
	cp := name[0] == 'c'
	n := &Node{Name: name, UID: "uid of " + name, Ready: true, ControlPlane: cp, ProviderID: "sandbox://s/" + name, Kubelet: "v1.35.4", Image: oldImage, Components: oldParts, Group: workers}
	if cp {
		n.Group, n.Taints = cps, []string{"node-role.kubernetes.io/control-plane"}
	}
	if change != nil {
		change(n)
	}
	return Entry{Fact: n}
}

// replaces makes a node the replacement of an old node.
func replaces(donor string) func(*Node) {
	return func(n *Node) {
		n.Kubelet, n.Image, n.Components, n.Donor = "v1.36.3", newImage, newParts, donor
	}
}

// leaving makes a node the old node of a replacement.
func leaving(heir string) func(*Node) {
	return func(n *Node) {
		n.Heir, n.Cordoned, n.CordonedByUs = heir, true, true
		n.Taints = append(n.Taints, "node.kubernetes.io/unschedulable")
	}
}

func gone(name string) Entry { return Entry{Fact: &Node{Name: name, Gone: true}} }

// cloudHas lists machines, as "worker-2 Creating token".
func cloudHas(list ...[3]string) Entry {
	m := &Machines{}
	for _, l := range list {
		e := Machine{ID: "sandbox://s/" + l[0], Name: l[0], Group: workers, State: l[1], Token: l[2]}
		if l[0][0] == 'c' {
			e.Group, e.ControlPlane = cps, true
		}
		m.List = append(m.List, e)
	}
	return Entry{Fact: m}
}

func etcdHas(names ...string) Entry {
	m := &Members{}
	for _, n := range names {
		m.List = append(m.List, Member{Name: n})
	}
	return Entry{Fact: m}
}

func target(kubernetes, cp, worker, phase string, ready bool) Entry {
	t := &Target{Image: newImage, Components: newParts, Kubernetes: "v1.36.3", ControlPlane: cp, Worker: worker, Phase: phase, Ready: ready}
	if kubernetes == "v1.35.4" {
		t.Image, t.Components, t.Kubernetes = oldImage, oldParts, kubernetes
	}
	return Entry{Fact: t}
}

func intent(name, donor, group, goal, machine string) Entry {
	return Entry{Fact: &Pending{Name: name, Goal: goal, Token: "token of " + donor, Donor: donor, Group: group, Machine: machine}}
}

func cleared(name, donor string) Entry {
	return Entry{Fact: &Pending{Name: name, Gone: true, Token: "token of " + donor, Donor: donor}}
}

// good is the journal of a correct rollout: one control plane, one worker.
func good() story {
	var s story
	cp, w := [3]string{"control-plane-0", "Ready"}, [3]string{"worker-0", "Ready"}
	s.tell(0,
		node("control-plane-0", nil), node("worker-0", nil), cloudHas(cp, w), etcdHas("control-plane-0"), target("v1.35.4", oldParts, oldParts, "", true),
		Entry{Fact: &Strategy{Enabled: true}}, Entry{Fact: &Scaler{Replicas: 1, Pods: 1}}, Entry{Fact: &Lease{Holder: "control-plane-0"}},
		Entry{Fact: &Server{Node: "control-plane-0", Version: "v1.35.4"}}, Entry{Fact: Begin})
	s.tell(1, target("v1.36.3", oldParts, oldParts, "", false))
	s.tell(2, Entry{Fact: &Strategy{Paused: true}}, Entry{Fact: &Scaler{}})
	s.tell(3, target("v1.36.3", oldParts, oldParts, "apply", false))
	s.tell(60, Entry{Fact: &Stream{Kind: "nodes", Cut: true}})
	s.tell(150, Entry{Fact: &Stream{Kind: "nodes"}}, Entry{Fact: &Server{Node: "control-plane-0", Version: "v1.36.3"}})
	s.tell(151, node("control-plane-0", func(n *Node) { n.Ready, n.Kubelet = false, "v1.36.3" }))
	s.tell(160, node("control-plane-0", func(n *Node) { n.Kubelet = "v1.36.3" }))
	s.tell(170, target("v1.36.3", newParts, oldParts, "done", false))

	kubelet := func(n *Node) { n.Kubelet = "v1.36.3" }
	cp1 := [3]string{"control-plane-1", "Ready", "token of control-plane-0"}
	s.tell(171, intent("replace-0", "control-plane-0", cps, "Join", ""))
	s.tell(172, cloudHas(cp, w, [3]string{cp1[0], "Creating", cp1[2]}))
	s.tell(175, cloudHas(cp, w, cp1))
	s.tell(180, node("control-plane-1", func(n *Node) { replaces("")(n); n.Ready = false }), Entry{Fact: &Joining{Name: "control-plane-1"}})
	s.tell(182, etcdHas("control-plane-0", "control-plane-1"), Entry{Fact: &Joining{Name: "control-plane-1", Gone: true}})
	s.tell(185, node("control-plane-1", replaces("control-plane-0")), Entry{Fact: &Server{Node: "control-plane-1", Version: "v1.36.3"}}, Entry{Fact: &Probe{From: "control-plane-1"}})
	s.tell(186, node("control-plane-0", func(n *Node) { kubelet(n); leaving("control-plane-1")(n) }))
	s.tell(190, Entry{Fact: &Lease{Holder: "control-plane-1"}})
	s.tell(200, intent("replace-0", "control-plane-0", cps, "Leave", "sandbox://s/control-plane-0"))
	s.tell(202, etcdHas("control-plane-1"))
	s.tell(203, cloudHas([3]string{cp[0], "Terminating"}, w, cp1))
	s.tell(205, cloudHas(w, cp1), gone("control-plane-0"), Entry{Fact: &Server{Node: "control-plane-0", Gone: true}})
	s.tell(206, cleared("replace-0", "control-plane-0"), target("v1.36.3", newParts, newParts, "done", false))

	w1 := [3]string{"worker-1", "Ready", "token of worker-0"}
	s.tell(210, intent("replace-0", "worker-0", workers, "Join", ""))
	s.tell(212, cloudHas(w, cp1, w1))
	s.tell(216, node("worker-1", replaces("worker-0")), Entry{Fact: &Probe{From: "worker-1"}})
	s.tell(217, node("worker-0", leaving("worker-1")))
	s.tell(225, intent("replace-0", "worker-0", workers, "Leave", "sandbox://s/worker-0"))
	s.tell(226, cloudHas([3]string{w[0], "Terminating"}, cp1, w1))
	s.tell(228, cloudHas(cp1, w1), gone("worker-0"))
	s.tell(229, cleared("replace-0", "worker-0"))
	s.tell(230, target("v1.36.3", newParts, newParts, "done", true), Entry{Fact: &Strategy{Enabled: true}}, Entry{Fact: &Scaler{Replicas: 1}})
	s.tell(235, Entry{Fact: &Probe{From: "control-plane-1"}}, Entry{Fact: &Probe{From: "worker-1"}})
	s.tell(240, Entry{Fact: End})
	return s
}

func TestCheck(t *testing.T) {
	isPending := func(e Entry) bool { return As[*Pending](e.Fact) != nil }
	between := func(e Entry, from, to float64) bool { return !e.Time.Before(at(from)) && e.Time.Before(at(to)) }
	for _, tt := range []struct {
		name string
		bad  func(s *story)
		want []Rule // each once, in alphabetical order
	}{
		{name: "a rollout as it should be", bad: func(*story) {}, want: nil},
		{name: "nothing at all", bad: func(s *story) { *s = nil }, want: []Rule{Whole}},
		{name: "no end", bad: func(s *story) { s.drop(func(e Entry) bool { return e.Fact == End }) }, want: []Rule{Whole}},
		{name: "no observation of etcd members", bad: func(s *story) { s.drop(func(e Entry) bool { return As[*Members](e.Fact) != nil }) }, want: []Rule{Whole}},

		{name: "an old node goes although its replacement is not Ready", bad: func(s *story) {
			s.edit(func(e *Entry) {
				if f := As[*Node](e.Fact); f != nil && f.Name == "worker-1" {
					f.Ready = false
				}
			})
			s.tell(232, node("worker-1", replaces("worker-0")))
			s.tell(236, Entry{Fact: &Probe{From: "worker-1"}})
		}, want: []Rule{ReadyFloor}},
		{name: "the group of the new node is recorded late", bad: func(s *story) {
			s.edit(func(e *Entry) {
				if f := As[*Node](e.Fact); f != nil && f.Name == "worker-1" {
					f.Group = ""
				}
			})
		}, want: nil},
		{name: "a node is deleted before its replacement exists", bad: func(s *story) { s.tell(207, gone("worker-0")); s.tell(208, node("worker-0", nil)) }, want: []Rule{ReadyFloor}},
		{name: "a node is not Ready for two minutes", bad: func(s *story) {
			s.tell(20, node("worker-0", func(n *Node) { n.Ready = false }))
			s.tell(59, target("v1.36.3", oldParts, oldParts, "apply", false))
			s.tell(190, node("worker-0", nil))
		}, want: []Rule{ReadyFloor}},
		{name: "a node is not Ready while its kubelet restarts", bad: func(s *story) {
			s.tell(20, node("worker-0", func(n *Node) { n.Ready = false }))
			s.tell(40, node("worker-0", nil))
		}, want: nil},

		{name: "a machine too many", bad: func(s *story) {
			s.tell(213, cloudHas([3]string{"worker-0", "Ready"}, [3]string{"control-plane-1", "Ready"}, [3]string{"worker-1", "Ready", "token of worker-0"}, [3]string{"worker-2", "Creating"}))
		}, want: []Rule{SurgeBudget}},

		{name: "a member leaves before the replacement node has started", bad: func(s *story) {
			s.drop(func(e Entry) bool { return As[*Members](e.Fact) != nil && between(e, 170, 200) })
		}, want: nil},
		{name: "a voter is missing for a moment", bad: func(s *story) { s.tell(181, etcdHas("")) }, want: []Rule{EtcdVoters}},
		{name: "the replacement node is only a learner", bad: func(s *story) {
			s.edit(func(e *Entry) {
				if f := As[*Members](e.Fact); f != nil && between(*e, 182, 204) {
					for i := range f.List {
						f.List[i].Learner = f.List[i].Name == "control-plane-1"
					}
				}
			})
			s.tell(204, etcdHas("control-plane-1"))
		}, want: []Rule{EtcdVoters}},
		{name: "a machine goes before its member", bad: func(s *story) {
			s.drop(func(e Entry) bool {
				return between(e, 202, 203) || between(e, 205, 206) && As[*Machines](e.Fact) != nil
			})
			s.tell(218, etcdHas("control-plane-1"))
			s.edit(func(e *Entry) {
				if f := As[*Machines](e.Fact); f != nil && between(*e, 203, 220) {
					f.List = append([]Machine{{ID: "sandbox://s/control-plane-0", Name: "control-plane-0", Group: cps, ControlPlane: true, State: "Terminating"}}, slices.DeleteFunc(f.List, func(m Machine) bool {
						return m.Name == "control-plane-0" || m.Name == "worker-1" && between(*e, 205, 219)
					})...)
				}
			})
			s.tell(219, cloudHas([3]string{"worker-0", "Ready"}, [3]string{"control-plane-1", "Ready"}, [3]string{"worker-1", "Ready", "token of worker-0"}))
		}, want: []Rule{EtcdVoters}},

		{name: "a worker is replaced before the control plane", bad: func(s *story) {
			s.tell(100, intent("replace-1", "worker-0", workers, "Join", ""))
			s.tell(165, target("v1.36.3", oldParts, oldParts, "apply", false))
			s.tell(168, cleared("replace-1", "worker-0"))
		}, want: []Rule{WorkersLast}},
		{name: "a worker is replaced while a control plane is on its way", bad: func(s *story) {
			s.tell(172, Entry{Fact: &Pending{Name: "replace-1", Goal: "Join", Token: "other", Donor: "worker-0", Group: workers}})
			s.tell(189, Entry{Fact: &Pending{Name: "replace-1", Token: "other", Donor: "worker-0", Gone: true}})
		}, want: []Rule{WorkersLast}},

		{name: "an old node names a replacement that does not name it", bad: func(s *story) {
			s.tell(2, node("worker-0", func(n *Node) { n.Heir = "control-plane-0" }))
			s.tell(200, node("worker-0", nil))
		}, want: []Rule{Pairs}},
		{name: "two replacements of one old node", bad: func(s *story) {
			s.drop(func(e Entry) bool { return between(e, 217, 230) })
			s.later(230, 100)
			s.tell(218, node("control-plane-1", replaces("worker-0")))
			s.tell(285, Entry{Fact: Note("a minute later")})
			s.tell(300, cloudHas([3]string{"control-plane-1", "Ready"}, [3]string{"worker-1", "Ready"}), gone("worker-0"), cleared("replace-0", "worker-0"))
		}, want: []Rule{Pairs}},

		{name: "the autoscaler runs on", bad: func(s *story) { s.drop(func(e Entry) bool { return between(e, 2, 3) }) }, want: []Rule{AutoscalerPaused}},
		{name: "its Deployment runs on", bad: func(s *story) { s.drop(func(e Entry) bool { return As[*Scaler](e.Fact) != nil && between(e, 2, 3) }) }, want: []Rule{AutoscalerPaused}},
		{name: "the autoscaler is kept", bad: func(s *story) {
			s.drop(func(e Entry) bool { return As[*Strategy](e.Fact) != nil && between(e, 230, 231) })
		}, want: []Rule{AutoscalerPaused}},
		{name: "the autoscaler is given back late", bad: func(s *story) {
			s.drop(func(e Entry) bool {
				return (As[*Strategy](e.Fact) != nil || As[*Scaler](e.Fact) != nil) && between(e, 230, 231)
			})
			s.later(235, 90)
			s.tell(300, Entry{Fact: Note("a minute later")})
			s.tell(320, Entry{Fact: &Strategy{Enabled: true}}, Entry{Fact: &Scaler{Replicas: 1}})
		}, want: []Rule{AutoscalerPaused}},

		{name: "the new machine has no pending node", bad: func(s *story) {
			s.drop(func(e Entry) bool { return isPending(e) && between(e, 210, 230) })
			s.later(213, 40*60)
			s.tell(35*60, Entry{Fact: Note("half an hour later")})
		}, want: []Rule{MachineTracked}},
		{name: "the Node of a running machine is deleted", bad: func(s *story) {
			s.drop(func(e Entry) bool {
				return As[*Node](e.Fact) != nil && As[*Node](e.Fact).Name == "worker-0" && between(e, 217, 229)
			})
			s.later(217, 15)
			s.tell(217, gone("worker-0"))
		}, want: []Rule{MachineTracked}},
		{name: "the Node of a lost machine is deleted, and another machine has its name", bad: func(s *story) {
			s.drop(func(e Entry) bool {
				return As[*Node](e.Fact) != nil && As[*Node](e.Fact).Name == "worker-0" && between(e, 217, 229)
			})
			s.later(217, 15)
			s.tell(217, gone("worker-0"))
			s.edit(func(e *Entry) {
				if f := As[*Machines](e.Fact); f != nil && !between(*e, 0, 210) {
					f.List = slices.Clone(f.List)
					for i := range f.List {
						if f.List[i].Name == "worker-0" {
							f.List[i].Incarnation = "2"
						}
					}
				}
			})
		}, want: nil},

		{name: "a kubelet goes down", bad: func(s *story) {
			s.tell(165, node("control-plane-0", nil))
			s.tell(166, node("control-plane-0", kubelet36))
		}, want: []Rule{VersionSkew}},
		{name: "a replacement node is older than the old node", bad: func(s *story) {
			s.tell(185.5, node("control-plane-1", func(n *Node) { replaces("control-plane-0")(n); n.UID = "other"; n.Kubelet = "v1.35.4" }), node("control-plane-1", func(n *Node) { replaces("control-plane-0")(n); n.UID = "other" }))
		}, want: []Rule{VersionSkew}},
		{name: "a kubelet is newer than its API server", bad: func(s *story) {
			s.drop(func(e Entry) bool { return As[*Server](e.Fact) != nil && between(e, 150, 151) })
		}, want: []Rule{VersionSkew}},
		{name: "a worker is newer than the oldest API server", bad: func(s *story) {
			s.tell(10, node("worker-0", kubelet36))
			s.tell(30, target("v1.36.3", oldParts, oldParts, "apply", false))
			s.edit(func(e *Entry) {
				if f := As[*Node](e.Fact); f != nil && f.Name == "worker-0" && between(*e, 100, 300) && !f.Gone {
					f.Kubelet = "v1.36.3"
				}
			})
		}, want: []Rule{VersionSkew}},
		{name: "joining machines get less than before", bad: func(s *story) {
			s.tell(207, target("v1.36.3", oldParts, newParts, "done", false), target("v1.36.3", newParts, newParts, "done", false))
		}, want: []Rule{VersionSkew}},
		{name: "joining machines jump a minor", bad: func(s *story) {
			s.edit(func(e *Entry) {
				if f := As[*Target](e.Fact); f != nil && f.Kubernetes == "v1.35.4" {
					f.Kubernetes = "v1.34.9"
				}
			})
		}, want: []Rule{VersionSkew}},

		{name: "a foreign cordon is taken off", bad: func(s *story) {
			s.tell(20, node("worker-0", func(n *Node) { n.Cordoned = true }))
			s.tell(30, node("worker-0", nil))
		}, want: []Rule{ForeignCordon}},
		{name: "a foreign cordon becomes ours", bad: func(s *story) { s.tell(20, node("worker-0", func(n *Node) { n.Cordoned = true })) }, want: []Rule{ForeignCordon}},
		{name: "the operator removes its own machine", bad: func(s *story) {
			s.edit(func(e *Entry) {
				if f := As[*Lease](e.Fact); f != nil && e.Time.After(at(2)) {
					e.Time = at(234)
				}
			})
			s.drop(func(e Entry) bool { return As[*Machines](e.Fact) != nil && between(e, 205, 206) })
			s.tell(217.5, cloudHas([3]string{"worker-0", "Ready"}, [3]string{"control-plane-1", "Ready"}, [3]string{"worker-1", "Ready", "token of worker-0"}))
			s.drop(func(e Entry) bool { return As[*Machines](e.Fact) != nil && between(e, 206, 217) })
		}, want: []Rule{LeaseMoved}},

		{name: "a service is silent after a replacement", bad: func(s *story) {
			s.drop(func(e Entry) bool {
				return As[*Probe](e.Fact) != nil && between(e, 235, 236) && As[*Probe](e.Fact).From == "worker-1"
			})
		}, want: []Rule{ServiceAnswers}},
		{name: "a service is silent for twenty seconds", bad: func(s *story) {
			s.tell(190, Entry{Fact: &Probe{From: "control-plane-1", Err: "timeout"}})
			s.tell(207, Entry{Fact: &Probe{From: "control-plane-1", Err: "timeout"}})
			s.tell(208, Entry{Fact: &Probe{From: "control-plane-1"}})
		}, want: []Rule{ServiceAnswers}},
		{name: "the first answer takes twenty seconds", bad: func(s *story) {
			s.drop(func(e Entry) bool { return As[*Probe](e.Fact) != nil && between(e, 185, 186) })
			s.tell(205, Entry{Fact: &Probe{From: "control-plane-1", Err: "refused"}})
			s.tell(206, Entry{Fact: &Probe{From: "control-plane-1"}})
		}, want: nil},
		{name: "the first answer takes fifty seconds", bad: func(s *story) {
			s.drop(func(e Entry) bool { return As[*Probe](e.Fact) != nil && between(e, 185, 186) })
			s.tell(231, Entry{Fact: &Probe{From: "control-plane-1", Err: "refused"}})
		}, want: []Rule{ServiceAnswers}},
		{name: "a service is silent for ten seconds", bad: func(s *story) {
			s.tell(190, Entry{Fact: &Probe{From: "control-plane-1", Err: "timeout"}})
			s.tell(195, Entry{Fact: &Probe{From: "control-plane-1"}})
		}, want: nil},

		{name: "a node is forgotten", bad: func(s *story) {
			s.drop(func(e Entry) bool { return between(e, 210, 230) })
			s.edit(func(e *Entry) {
				if f := As[*Probe](e.Fact); f != nil && f.From == "worker-1" {
					e.Fact = &Probe{From: "worker-0"}
				}
			})
		}, want: []Rule{Converged}},
		{name: "workers are kept", bad: func(s *story) {
			s.drop(func(e Entry) bool { return between(e, 210, 230) })
			s.edit(func(e *Entry) {
				if f := As[*Target](e.Fact); f != nil {
					f.KeepWorkers = true
				}
				if f := As[*Probe](e.Fact); f != nil && f.From == "worker-1" {
					e.Fact = &Probe{From: "worker-0"}
				}
			})
		}, want: nil},
		{name: "NodeVersion is not Ready", bad: func(s *story) {
			s.edit(func(e *Entry) {
				if f := As[*Target](e.Fact); f != nil {
					f.Ready = false
				}
			})
		}, want: []Rule{Converged}},

		{name: "a cordon is left", bad: func(s *story) {
			s.tell(239, node("worker-1", func(n *Node) { replaces("worker-0")(n); n.Cordoned, n.CordonedByUs = true, true }))
		}, want: []Rule{NothingLeft}},
		{name: "a taint is left", bad: func(s *story) {
			s.tell(239, node("worker-1", func(n *Node) {
				replaces("worker-0")(n)
				n.Taints = []string{"node.cloudprovider.kubernetes.io/uninitialized"}
			}))
		}, want: []Rule{NothingLeft}},
		{name: "a mark is left", bad: func(s *story) {
			s.tell(239, node("worker-1", func(n *Node) { replaces("worker-0")(n); n.Heir = "worker-0" }))
		}, want: []Rule{NothingLeft}},
		{name: "an intent is left", bad: func(s *story) { s.tell(239, Entry{Fact: &Pending{Name: "machine-worker-7", Goal: "Join"}}) }, want: []Rule{NothingLeft}},
		{name: "a joining node is left", bad: func(s *story) { s.tell(239, Entry{Fact: &Joining{Name: "worker-7"}}) }, want: []Rule{NothingLeft}},
		{name: "a machine is left", bad: func(s *story) {
			s.tell(239, cloudHas([3]string{"control-plane-1", "Ready"}, [3]string{"worker-1", "Ready"}, [3]string{"worker-2", "Ready"}))
		}, want: []Rule{NothingLeft}},
		{name: "a member is left", bad: func(s *story) { s.tell(239, etcdHas("control-plane-0", "control-plane-1")) }, want: []Rule{NothingLeft}},
		{name: "the lease of a gone node is left", bad: func(s *story) { s.drop(func(e Entry) bool { return As[*Lease](e.Fact) != nil && e.Time.After(at(2)) }) }, want: []Rule{NothingLeft}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := good()
			tt.bad(&s)
			var got []Rule
			breaches := Check(s, Limits{})
			for _, b := range breaches {
				got = append(got, b.Rule)
			}
			slices.Sort(got)
			if d := cmp.Diff(tt.want, slices.Compact(got)); d != "" {
				t.Errorf("rules that were broken (-want +got):\n%s%v", d, breaches)
			}
		})
	}
}

// kept is the journal of a correct rollout in place: one control plane, one worker.
func kept() story {
	s := good()
	s.drop(func(e Entry) bool {
		return !e.Time.Before(at(171)) || As[*Node](e.Fact) != nil && As[*Node](e.Fact).Name == "control-plane-0" && e.Time.After(at(2))
	})
	s.edit(func(e *Entry) {
		if f := As[*Node](e.Fact); f != nil {
			f.InPlace = true
		}
	})
	place := func(n *Node) { n.InPlace = true }
	upgraded := func(n *Node) { place(n); n.Kubelet, n.Components = "v1.36.3", newParts }
	intent := func(of string, phase string, gone bool) Entry {
		return Entry{Fact: &Pending{Name: "replace-0", Goal: "Upgrade", Machine: "sandbox://s/" + of, Node: of, Phase: phase, Gone: gone}}
	}
	cordoned := func(change func(*Node)) func(*Node) {
		return func(n *Node) { change(n); n.Cordoned, n.CordonedByUs = true, true }
	}
	s.tell(151, node("control-plane-0", func(n *Node) { place(n); n.Kubelet = "v1.36.3" }))
	s.tell(171, intent("control-plane-0", "", false))
	s.tell(172, node("control-plane-0", upgraded))
	s.tell(173, intent("control-plane-0", "", true), target("v1.36.3", newParts, newParts, "done", false))
	s.tell(180, intent("worker-0", "", false))
	s.tell(181, node("worker-0", cordoned(place)))
	s.tell(190, intent("worker-0", "apply", false))
	s.tell(200, node("worker-0", cordoned(func(n *Node) { place(n); n.Kubelet = "v1.36.3" })))
	s.tell(201, node("worker-0", cordoned(upgraded)))
	s.tell(202, intent("worker-0", "done", true), node("worker-0", upgraded))
	s.tell(203, target("v1.36.3", newParts, newParts, "done", true), Entry{Fact: &Strategy{Enabled: true}}, Entry{Fact: &Scaler{Replicas: 1}})
	s.tell(204, Entry{Fact: &Probe{From: "control-plane-0"}}, Entry{Fact: &Probe{From: "worker-0"}})
	s.tell(205, Entry{Fact: End})
	return s
}

func TestCheckInPlace(t *testing.T) {
	of := func(e Entry, node string, from float64) bool {
		return As[*Node](e.Fact) != nil && As[*Node](e.Fact).Name == node && !e.Time.Before(at(from))
	}
	for _, tt := range []struct {
		name string
		bad  func(s *story)
		want []Rule
	}{
		{name: "as it should be", bad: func(*story) {}, want: nil},
		{name: "the image stays only in place", bad: func(s *story) {
			s.edit(func(e *Entry) {
				if of(*e, "worker-0", 0) {
					As[*Node](e.Fact).InPlace = false
				}
			})
		}, want: []Rule{Converged}},
		{name: "another machine under its name", bad: func(s *story) {
			s.edit(func(e *Entry) {
				if of(*e, "worker-0", 201) {
					As[*Node](e.Fact).UID = "uid of another"
				}
			})
		}, want: []Rule{MachineKept}},
		{name: "its kubelet is exchanged while it takes pods", bad: func(s *story) {
			s.edit(func(e *Entry) {
				if of(*e, "worker-0", 181) {
					As[*Node](e.Fact).Cordoned, As[*Node](e.Fact).CordonedByUs = false, false
				}
			})
		}, want: []Rule{MachineKept}},
		{name: "a worker begins before the control plane", bad: func(s *story) {
			s.drop(func(e Entry) bool { return of(e, "control-plane-0", 172) })
			s.tell(201.5, node("control-plane-0", func(n *Node) { n.InPlace, n.Kubelet, n.Components = true, "v1.36.3", newParts }))
		}, want: []Rule{WorkersLast}},
		{name: "the autoscaler runs meanwhile", bad: func(s *story) { s.tell(185, Entry{Fact: &Scaler{Replicas: 1}}) }, want: []Rule{AutoscalerPaused}},
		{name: "a machine is created in its group", bad: func(s *story) {
			s.tell(185, cloudHas([3]string{"control-plane-0", "Ready"}, [3]string{"worker-0", "Ready"}, [3]string{"worker-1", "Creating", "t"}))
			s.tell(186, cloudHas([3]string{"control-plane-0", "Ready"}, [3]string{"worker-0", "Ready"}))
		}, want: []Rule{MachineKept}},
		{name: "its components are recorded too early", bad: func(s *story) {
			s.edit(func(e *Entry) {
				if of(*e, "worker-0", 200) {
					As[*Node](e.Fact).Kubelet = "v1.35.4"
				}
			})
		}, want: []Rule{Converged}},
		{name: "its drain evicts more pods than their budget permits", bad: func(s *story) {
			s.tell(1, Entry{Fact: &Budget{Name: "web", Wanted: 2}})
			s.tell(2, Entry{Fact: &Budget{Name: "web", Healthy: 3, Wanted: 2}})
			s.tell(185, Entry{Fact: &Budget{Name: "web", Healthy: 1, Wanted: 2}})
		}, want: []Rule{BudgetKept}},
		{name: "its drain keeps the budget", bad: func(s *story) {
			s.tell(2, Entry{Fact: &Budget{Name: "web", Healthy: 3, Wanted: 2}})
			s.tell(185, Entry{Fact: &Budget{Name: "web", Healthy: 2, Wanted: 2}})
			s.tell(204.5, Entry{Fact: &Run{Node: "worker-0"}})
		}, want: nil},
		{name: "its agent has not finished", bad: func(s *story) {
			s.tell(204.5, Entry{Fact: &Run{Node: "worker-0", Stage: "install-kubelet"}})
		}, want: []Rule{NothingLeft}},
		{name: "its agent left copies", bad: func(s *story) {
			s.tell(204.5, Entry{Fact: &Run{Node: "worker-0", Left: []string{"var/lib/constellation/agent/renewed"}}})
		}, want: []Rule{NothingLeft}},
		{name: "its disk could not be read", bad: func(s *story) {
			s.tell(204.5, Entry{Fact: &Run{Node: "worker-0", Err: "it is off"}})
		}, want: []Rule{Whole}},
		{name: "its cordon is left", bad: func(s *story) { s.drop(func(e Entry) bool { return of(e, "worker-0", 202) }) }, want: []Rule{NothingLeft}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := kept()
			tt.bad(&s)
			var got []Rule
			breaches := Check(s, Limits{})
			for _, b := range breaches {
				got = append(got, b.Rule)
			}
			slices.Sort(got)
			if d := cmp.Diff(tt.want, slices.Compact(got)); d != "" {
				t.Errorf("rules that were broken (-want +got):\n%s%v", d, breaches)
			}
		})
	}
	want := []Replacement{
		{Donor: "control-plane-0", InPlace: true, Begun: at(171), Over: 2 * time.Second},
		{Donor: "worker-0", InPlace: true, Begun: at(180), Cordoned: time.Second, Over: 22 * time.Second},
	}
	if d := cmp.Diff(want, Summarize(kept()).Replacements); d != "" {
		t.Errorf("upgraded nodes (-want +got):\n%s", d)
	}
}

// A power cut of all machines is over when all that exist are Ready again.
func TestCheckOutage(t *testing.T) {
	for name, tt := range map[string]struct {
		away []string
		want string
	}{
		"all are back":   {},
		"one stays away": {[]string{"worker-0"}, "worker-0 is not Ready 5m0s after the power of all machines was cut"},
	} {
		t.Run(name, func(t *testing.T) {
			s := good()
			s.tell(50, Entry{Fact: &Outage{Machines: []string{"control-plane-0", "worker-0"}, Away: tt.away, TookMS: 300_000}})
			wantOnly(t, Check(s, Limits{}), OutageOver, tt.want)
		})
	}
}

// A Secret is read before the rollout and after it, on all control planes of the time.
func TestCheckSecrets(t *testing.T) {
	const encrypted = "k8s:enc:kms:v2:constellation"
	read := func(node, sum, stored, err string) Entry {
		return Entry{Fact: &Secret{Name: "kept", On: []SecretOn{{Node: node, Sum: sum, Stored: stored, Err: err}}}}
	}
	before, after := read("control-plane-0", "a", encrypted, ""), read("control-plane-1", "a", encrypted, "")
	for name, tt := range map[string]struct {
		before, after Entry
		open          bool // the cluster does not encrypt
		rule          Rule
		want          string
	}{
		"it is kept":                       {before: before, after: after},
		"it is kept without encryption":    {before: read("control-plane-0", "a", "not encrypted", ""), after: read("control-plane-1", "a", "not encrypted", ""), open: true},
		"it has another content":           {before: before, after: read("control-plane-1", "b", encrypted, ""), rule: SecretsKept, want: "Secret kept has another content on control-plane-1"},
		"it cannot be read":                {before: before, after: read("control-plane-1", "", "", "no keys"), rule: SecretsKept, want: "Secret kept cannot be read on control-plane-1: no keys"},
		"it is stored without encryption":  {before: before, after: read("control-plane-1", "a", "not encrypted", ""), rule: SecretsKept, want: `the etcd of control-plane-1 stores Secret kept as "not encrypted", want k8s:enc:kms:v2:`},
		"it was stored without encryption": {before: read("control-plane-0", "a", "not encrypted", ""), after: after, rule: SecretsKept, want: `the etcd of control-plane-0 stores Secret kept as "not encrypted", want k8s:enc:kms:v2:`},
		"it is not read in the end":        {before: before, rule: SecretsKept, want: "Secret kept was not read on control-plane-1 in the end"},
		"it is read on another machine":    {before: before, after: read("control-plane-0", "a", encrypted, ""), rule: SecretsKept, want: "Secret kept was not read on control-plane-1 in the end"},
		"it was not read before":           {before: Entry{Fact: Note("nothing")}, after: read("control-plane-1", "", encrypted, ""), rule: Whole, want: "nothing is known of the Secret at the beginning"},
	} {
		t.Run(name, func(t *testing.T) {
			s := append(story{{Time: at(0), Fact: tt.before.Fact}}, good()...)
			if tt.after.Fact != nil {
				s.tell(239, tt.after)
			}
			wantOnly(t, Check(s, Limits{Secret: "kept", Encrypted: !tt.open}), tt.rule, tt.want)
		})
	}
}

// wantOnly checks that there is one breach, or none if want is empty.
func wantOnly(t *testing.T, got []Breach, rule Rule, want string) {
	t.Helper()
	switch {
	case want == "" && len(got) == 0:
	case len(got) != 1 || got[0].Rule != rule || got[0].What != want:
		t.Errorf("breaches are %v, want %s: %q", got, rule, want)
	}
}

// The prefix of a value in etcd names the provider that encrypted it.
func TestStoredAs(t *testing.T) {
	for value, want := range map[string]string{
		"k8s:enc:kms:v2:constellation:\x0a\x01": "k8s:enc:kms:v2:constellation",
		"k8s:enc:kms:v2:":                       "k8s:enc:kms:v2:",
		"k8s:enc:aescbc:v1:key1:\x0a":           "not encrypted",
		"k8s\x00\x0a\x0c":                       "not encrypted",
		"":                                      "not encrypted",
	} {
		if got := storedAs([]byte(value)); got != want {
			t.Errorf("%q is stored as %q, want %q", value, got, want)
		}
	}
}

func kubelet36(n *Node) { n.Kubelet = "v1.36.3" }

func TestSummarize(t *testing.T) {
	s := good()
	for i := range 5 {
		p := Entry{Fact: &Probe{From: "control-plane-1"}}
		if i == 1 || i == 2 {
			p.Fact = &Probe{From: "control-plane-1", Err: "timeout"}
		}
		s.tell(190+float64(i), p)
	}
	s.tell(50, Entry{Fact: &Probe{Err: "refused"}})
	want := Summary{
		Makespan: 239 * time.Second, Upgrade: 167 * time.Second, Machines: 3,
		Replacements: []Replacement{
			{Donor: "control-plane-0", Heir: "control-plane-1", Begun: at(171), Joined: 14 * time.Second, Cordoned: 15 * time.Second, Over: 35 * time.Second},
			{Donor: "worker-0", Heir: "worker-1", Begun: at(210), Joined: 6 * time.Second, Cordoned: 7 * time.Second, Over: 19 * time.Second},
		},
		API: Answers{Asked: 1, Failed: 1}, Services: Answers{Asked: 9, Failed: 2, Gap: 3 * time.Second},
	}
	if d := cmp.Diff(want, Summarize(s)); d != "" {
		t.Errorf("summary (-want +got):\n%s", d)
	}
}
