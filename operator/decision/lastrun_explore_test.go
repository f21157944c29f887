package decision

import (
	"fmt"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"constellation/operator/api/v1alpha1"
)

// bootModel is a control plane that loses its power, and the leader on another one, which must infer
// what became of the run. Boots are numbered from 1.
type bootModel struct {
	boot, posted uint8    // of the machine, and as its kubelet has reported it
	seen         [2]uint8 // posted, as each leader's cache shows it
	run          uint8    // 0 none, 1 active, 2 interrupted, 3 ended
	runBoot      uint8
	leader       uint8 // 0: on the machine itself, 1: on another
	due          uint8 // posted when leader 1 began
	settled      bool  // leader 1 has observed for longer than bootSeen
	wrote        bool  // the status has the run
	wroteBoot    uint8
}

// bootMutant leaves a guard out.
type bootMutant int

const (
	bootGuarded   bootMutant = iota
	bootUnwaited             // a new leader does not wait until its observation is new enough
	bootAnyRun               // the status has the run's boot although the Node has not reported it
	bootUnwritten            // a run starts while the status has an earlier one
	bootOfNode               // the status has the Node's boot, whatever that of the run is
	bootIgnored              // the boot is not used, as in earlier programs
)

func bootName(n uint8) string {
	if n == 0 {
		return ""
	}
	return fmt.Sprint("boot-", n)
}

// modelHost is the machine's name.
const modelHost = "control-plane-0"

func (m *bootModel) reported() *v1alpha1.UpgradeProgress {
	if !m.wrote {
		return nil
	}
	return &v1alpha1.UpgradeProgress{Version: "v1.37.2", Node: modelHost, Phase: "apply", Started: metav1.NewTime(modelNow), BootID: bootName(m.wroteBoot)}
}

// infers returns the last run as a leader derives it from what it sees.
func (m *bootModel) infers(mutant bootMutant) UpgradeRun {
	const there = modelHost
	here, journal, known := "control-plane-1", UpgradeRun{}, time.Duration(0)
	if m.settled || mutant == bootUnwaited {
		known = 2 * bootSeen
	}
	reported := m.reported()
	if m.leader == 0 {
		here = there
		if m.run != 0 {
			journal = UpgradeRun{Version: "v1.37.2", Node: there, Phase: [...]string{"", "apply", "failed", "failed"}[m.run], Started: modelNow}
		}
		if m.run == 1 {
			journal.BootID = bootName(m.runBoot)
		}
	}
	n := machine(there, func(n *Node) { n.Kubelet, n.BootID = "v1.36.4", bootName(m.seen[m.leader]) })
	r := LastRun(journal, reported, UpgradeRun{}, known, v1alpha1.NodeVersionSpec{KubernetesClusterVersion: "v1.37.2"}, Lookup{Nodes: map[string]*Node{there: &n}}, here)
	switch {
	case m.leader == 1 && mutant == bootIgnored:
		reported.BootID = ""
		r = LastRun(journal, reported, UpgradeRun{}, known, v1alpha1.NodeVersionSpec{}, Lookup{Nodes: map[string]*Node{there: &n}}, here)
	case m.leader == 0 && mutant == bootAnyRun:
		r.BootID = journal.BootID
	case m.leader == 0 && mutant == bootOfNode && m.run == 1:
		r.BootID = n.BootID
	}
	return r
}

// next returns all states that one event leads to.
func (m bootModel) next(mutant bootMutant) (out []bootModel) {
	add := func(edit func(*bootModel)) {
		n := m
		edit(&n)
		if n != m {
			out = append(out, n)
		}
	}
	if m.boot < 3 {
		add(func(n *bootModel) { // a power cut
			n.boot++
			if n.run == 1 {
				n.run = 2
			}
		})
	}
	add(func(n *bootModel) { n.posted = n.boot })
	add(func(n *bootModel) { n.seen[n.leader] = n.posted })
	if m.run == 1 {
		add(func(n *bootModel) { n.run = 3 })
	}
	add(func(n *bootModel) { // the leader moves
		n.leader, n.settled = 1-n.leader, false
		if n.due = 0; n.leader == 1 {
			n.due = n.posted
		}
	})
	if m.leader == 1 {
		add(func(n *bootModel) { n.settled, n.seen[1] = true, max(n.seen[1], n.due) })
		return out
	}
	if mutant == bootUnwritten || !m.wrote || !stillReported(m.reported(), m.infers(mutant), modelHost) {
		add(func(n *bootModel) { n.run, n.runBoot = 1, n.boot }) // it starts, or continues after an interruption
	}
	add(func(n *bootModel) {
		if r := n.infers(mutant); r.Active() {
			n.wrote, n.wroteBoot = true, 0
			if p := r.progress(); p.BootID != "" {
				n.wroteBoot = p.BootID[len(p.BootID)-1] - '0'
			}
		} else {
			n.wrote = false
		}
	})
	return out
}

// explore visits all states. It returns whether a leader may give up a run that goes on, and whether
// it may wait for one that cannot go on although its observation is current.
func (mutant bootMutant) explore() (states int, unsafe, stuck bool) {
	start := bootModel{boot: 1, posted: 1, seen: [2]uint8{1, 1}}
	known, queue := map[bootModel]bool{start: true}, []bootModel{start}
	for ; len(queue) > 0; queue = queue[1:] {
		m := queue[0]
		if m.leader == 1 && m.wrote {
			gone := !m.infers(mutant).Active()
			unsafe = unsafe || gone && m.run == 1
			stuck = stuck || !gone && m.run == 2 && m.wroteBoot == m.runBoot && m.settled && m.seen[1] == m.boot
		}
		for _, n := range m.next(mutant) {
			if !known[n] {
				known[n], queue = true, append(queue, n)
			}
		}
	}
	return len(known), unsafe, stuck
}

// A leader never starts a second run while another control plane restarts its etcd, and does not wait
// for a run that a power cut has ended.
func TestRunOfARebootedNode(t *testing.T) {
	for _, tt := range []struct {
		name          string
		mutant        bootMutant
		unsafe, stuck bool
	}{
		{name: "with all guards", mutant: bootGuarded},
		{name: "a new leader with an old observation gives up a run", mutant: bootUnwaited, unsafe: true},
		{name: "a boot that the Node has not reported gives up a run", mutant: bootAnyRun, unsafe: true},
		{name: "a boot of an earlier run gives up a run", mutant: bootUnwritten, unsafe: true},
		{name: "an old boot of the Node gives up a run", mutant: bootOfNode, unsafe: true},
		{name: "without boots the next leader waits", mutant: bootIgnored, stuck: true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			states, unsafe, stuck := tt.mutant.explore()
			if states < 100 || unsafe != tt.unsafe || stuck != tt.stuck {
				t.Errorf("%d states, unsafe %t, stuck %t, want unsafe %t, stuck %t", states, unsafe, stuck, tt.unsafe, tt.stuck)
			}
			t.Logf("%d states", states)
		})
	}
}
