package rollout

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"constellation/engine/cloud"
	"constellation/engine/cloud/providers"
	"constellation/engine/cluster"
	"constellation/engine/plan"
	"constellation/engine/words"
)

// Tracker knows the last state of each machine and emits what changes.
type Tracker struct {
	mu      sync.Mutex
	states  map[string]machineState
	byState map[string]int64 // how many are in each; none is zero
}

// count notes that so many more machines are in a state. The caller holds mu.
func (t *Tracker) count(state string, more int64) {
	if t.byState[state] += more; t.byState[state] == 0 {
		delete(t.byState, state)
	}
}

type machineState struct{ group, state, text, with, role, id string }

// Rank orders the states on the way into a cluster, so that a cloud that lags behind
// does not send a machine back to where it came from.
var Rank = map[string]int{plan.NodeCreating: 1, plan.NodeBooting: 2, plan.NodeJoining: 3, plan.NodeNotReady: 4, plan.NodeReady: 5}

// Set notes what a machine is and emits an event if that changed. An empty group, other
// machine or role keeps the one that is known.
func (t *Tracker) Set(r *plan.Reporter, m Entry) (changed bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.states == nil {
		t.states, t.byState = map[string]machineState{}, map[string]int64{}
	}
	old, known := t.states[m.Name]
	id, _ := cloud.SplitKey(m.machine)
	now := machineState{cmp.Or(m.Group, old.group), m.State, m.Text, cmp.Or(m.With, old.with), cmp.Or(m.role, old.role), cmp.Or(id, old.id)}
	if old == now || old.state == now.state && old.with == now.with && now.text == "" {
		return false
	}
	t.states[m.Name] = now
	if known {
		t.count(old.state, -1)
	}
	t.count(now.state, 1)
	r.Send(plan.Event{Kind: plan.KindNode, Node: m.Name, Group: now.group, From: old.state, To: now.state, Text: now.text, With: now.with, Role: now.role, ProviderID: now.id})
	return old.state != now.state
}

// Forget removes machines that are not in names and reports their removal. A machine may have
// a name by now: named has those of replacement nodes, by their old nodes.
func (t *Tracker) Forget(r *plan.Reporter, names map[string]bool, named map[string]string) (changed bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, name := range slices.Sorted(maps.Keys(t.states)) {
		if s := t.states[name]; !names[name] {
			delete(t.states, name)
			t.count(s.state, -1)
			text := ""
			if is := named[s.with]; s.with != "" && is != "" && name == nameless(cluster.Move{Donor: s.with}) {
				text = "it is called " + is + " now"
			}
			r.Send(plan.Event{Kind: plan.KindNode, Node: name, Group: s.group, From: s.state, To: plan.NodeGone, Text: text, With: s.with, Role: s.role})
			changed = true
		}
	}
	return changed
}

// Counts returns how many machines are in each state.
func (t *Tracker) Counts() map[string]int64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	out := maps.Clone(t.byState)
	if out == nil {
		out = map[string]int64{}
	}
	return out
}

// Size is how many machines are known.
func (t *Tracker) Size() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.states)
}

// State returns the last state of a machine; empty if it is not known.
func (t *Tracker) State(name string) string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.states[name].state
}

// Joining is the machines of a cluster at one moment, each with its state.
type Joining struct {
	Machines []Entry
	wanted   map[string]int // by group
}

// Entry is one machine with its state.
type Entry struct {
	Name, Group, State, Text string
	Unnamed                  bool   // the cloud has not named it yet
	With                     string // the other machine of its replacement
	role                     string // control-plane of one that is
	machine                  string // its provider ID or key in the cloud; empty if it is not known
	stays                    bool   // it is upgraded as it is, and no other takes its place
	failed                   bool   // for good, says the cloud
	booting                  bool   // it has not come up yet, says the cloud
	console                  string // path of its console's log; empty if there is none
	since                    time.Time
}

// roleControlPlane is the role of machines and nodes of a control plane.
const roleControlPlane = "control-plane"

// Join merges what cloud and cluster say about the machines.
func Join(machines []cluster.CloudMachine, nodes []*cluster.Node, expected []cluster.ExpectedNode, wanted map[string]int) Joining {
	byName := map[string]*cluster.Node{}
	for _, n := range nodes {
		byName[n.Name] = n
	}
	joining := map[string]bool{}
	for _, x := range expected {
		joining[x.Name] = true
	}
	out := Joining{wanted: wanted}
	for _, m := range machines {
		if m.Stage == plan.NodeGone {
			continue
		}
		e := Entry{Name: m.Name, Group: m.GroupName, Text: m.Message, booting: m.Stage == plan.NodeBooting, console: m.Console, since: m.Since, machine: m.ProviderID}
		n, isNode := byName[m.Name]
		switch {
		case isNode:
			e.State, e.Text = n.State, n.Message
			if n.State == plan.NodeReady && m.Role == roleControlPlane && n.Role != roleControlPlane {
				// The kubelet is Ready before kubeadm has added the etcd member; the role label comes last.
				e.State, e.Text = plan.NodeNotReady, "kubeadm has not labelled it as a control plane yet"
			}
			e.failed = m.Stage == plan.NodeFailed && e.State != plan.NodeReady
		case m.Stage == plan.NodeFailed:
			e.State, e.failed = plan.NodeFailed, true
		case joining[m.Name]:
			e.State = plan.NodeJoining
		case m.Stage != "":
			e.State = m.Stage
		default: // it is up and has not been let in yet
			e.State = plan.NodeBooting
		}
		delete(byName, m.Name)
		out.Machines = append(out.Machines, e)
	}
	slices.SortFunc(out.Machines, func(a, b Entry) int { return strings.Compare(a.Name, b.Name) })
	return out
}

// Counts returns how many machines are in each state, how many are ready and how many
// are wanted.
func (r Joining) Counts() (byState map[string]int64, ready, wanted int64) {
	byState = map[string]int64{}
	for _, m := range r.Machines {
		byState[m.State]++
	}
	for _, n := range r.wanted {
		wanted += int64(n)
	}
	return byState, byState[plan.NodeReady], wanted
}

// Complete reports whether every group has its number of Ready nodes, every machine is a node,
// and every machine of a control plane has the role label.
func (r Joining) Complete() bool {
	ready := map[string]int{}
	for _, m := range r.Machines {
		if m.State != plan.NodeReady {
			return false
		}
		ready[m.Group]++
	}
	return maps.Equal(ready, nonZero(r.wanted))
}

func nonZero(m map[string]int) map[string]int {
	out := map[string]int{}
	for k, v := range m {
		if v != 0 {
			out[k] = v
		}
	}
	return out
}

// failed returns the machines that the cloud has given up.
func (r Joining) failed() (out []Entry) {
	for _, m := range r.Machines {
		if m.failed {
			out = append(out, m)
		}
	}
	return out
}

// slowBoot is how long a machine may boot until its console is pointed out.
const slowBoot = 15 * time.Second

// Pending describes the machines that are not ready: "worker-1 is still booting". Many
// are summarised.
func (r Joining) Pending(at time.Time) string {
	var parts []string
	missing := maps.Clone(r.wanted)
	for _, m := range r.Machines {
		missing[m.Group]--
		if m.State == plan.NodeReady {
			continue
		}
		s := m.Name + " " + stateWords[m.State]
		if m.booting && m.State == plan.NodeBooting {
			s = m.Name + " is still booting"
		}
		var more []string
		if m.Text != "" {
			more = append(more, m.Text)
		}
		if m.console != "" && (m.failed || m.booting && at.Sub(m.since) > slowBoot) {
			more = append(more, "its console: "+m.console)
		}
		if len(more) > 0 {
			s += " (" + strings.Join(more, "; ") + ")"
		}
		parts = append(parts, s)
	}
	for _, g := range slices.Sorted(maps.Keys(missing)) {
		if missing[g] > 0 {
			parts = append(parts, fmt.Sprintf("%s of group %s missing yet", words.Count(missing[g], "machine"), g))
		}
	}
	if n := len(parts); n > 4 {
		parts = append(parts[:3], fmt.Sprintf("and %d more", n-3))
	}
	return strings.Join(parts, ", ")
}

var stateWords = map[string]string{
	plan.NodeCreating: "is being created", plan.NodeBooting: "has not joined yet", plan.NodeJoining: "is joining",
	plan.NodeNotReady: "is not ready", plan.NodeFailed: "has failed",
}

// Hopeless returns an error if only machines are missing that the cloud has given up, with
// the advice of that cloud.
func (r Joining) Hopeless(a providers.Advice) error {
	failed := r.failed()
	if len(failed) == 0 {
		return nil
	}
	byState, _, _ := r.Counts()
	if byState[plan.NodeReady]+int64(len(failed)) < int64(len(r.Machines)) {
		return nil // others are still on their way
	}
	var parts []string
	for _, m := range failed {
		s := m.Name
		if m.Text != "" {
			s += ": " + m.Text
		}
		if m.console != "" {
			s += " (its console: " + m.console + ")"
		}
		parts = append(parts, s)
	}
	return &plan.Error{
		Op: "wait for the nodes", Err: fmt.Errorf("%s failed: %s", words.Count(len(failed), "machine"), strings.Join(parts, "; ")),
		Remedy: a.Failed + "; to begin again, " + a.Renew + ", then run the same command again",
	}
}

// LogSources are the names of services as log events have them.
var LogSources = map[string]string{"joinservice": "join-service", "constellation-operator": "operator"}

const (
	// joinerSpoke is the message of the join service's line for what a joiner reported.
	joinerSpoke = "node reported"
	// joinStep is the joiner's step whose lines are kubeadm's.
	joinStep = "kubeadm-join"
)

// ParseLine takes a line of one of our services apart: JSON of slog with the keys
// that all of them use. Any other line is passed on as it is.
func ParseLine(line string) plan.Event {
	var f map[string]any
	if json.Unmarshal([]byte(line), &f) != nil || f["msg"] == nil {
		return plan.Event{Level: "info", Text: line}
	}
	str := func(key string) string { s, _ := f[key].(string); return s }
	e := plan.Event{Level: strings.ToLower(str("level")), Node: str("node"), Text: str("msg")}
	for _, k := range []string{"time", "level", "msg", "node"} {
		delete(f, k)
	}
	if e.Text == joinerSpoke {
		// The words are the joining machine's own; the join service only passed them on.
		step, state, text := str("step"), str("state"), str("text")
		e.Source, e.Text = "bootstrapper", text
		switch {
		case text == "":
			e.Text = step + " " + state
		case step == joinStep && state == plan.StateRunning:
			e.Source = "kubeadm"
		}
		for _, k := range []string{"step", "state", "text", "at"} {
			delete(f, k)
		}
	}
	var rest []string
	for _, k := range slices.Sorted(maps.Keys(f)) {
		rest = append(rest, fmt.Sprintf("%s=%v", k, f[k]))
	}
	if len(rest) > 0 {
		e.Text += "  " + strings.Join(rest, " ")
	}
	return e
}
