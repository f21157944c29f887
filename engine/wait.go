package engine

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"constellation/engine/cloud"
	"constellation/engine/cluster"
	"constellation/engine/plan"
	"constellation/engine/words"
)

// tracker knows the last state of each machine and emits what changes.
type tracker struct {
	mu      sync.Mutex
	states  map[string]machineState
	byState map[string]int64 // how many are in each; none is zero
}

// count notes that so many more machines are in a state. The caller holds mu.
func (t *tracker) count(state string, more int64) {
	if t.byState[state] += more; t.byState[state] == 0 {
		delete(t.byState, state)
	}
}

type machineState struct{ group, state, text, with, role string }

// rank orders the states on the way into a cluster, so that a cloud that lags behind
// does not send a machine back to where it came from.
var rank = map[string]int{plan.NodeCreating: 1, plan.NodeBooting: 2, plan.NodeJoining: 3, plan.NodeNotReady: 4, plan.NodeReady: 5}

// set notes what a machine is and emits an event if that changed. An empty group, other
// machine or role keeps the one that is known.
func (t *tracker) set(r *plan.Reporter, m rollEntry) (changed bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.states == nil {
		t.states, t.byState = map[string]machineState{}, map[string]int64{}
	}
	old, known := t.states[m.name]
	now := machineState{cmp.Or(m.group, old.group), m.state, m.text, cmp.Or(m.with, old.with), cmp.Or(m.role, old.role)}
	if old == now || old.state == now.state && old.with == now.with && now.text == "" {
		return false
	}
	t.states[m.name] = now
	if known {
		t.count(old.state, -1)
	}
	t.count(now.state, 1)
	r.Send(plan.Event{Kind: plan.KindNode, Node: m.name, Group: now.group, From: old.state, To: now.state, Text: now.text, With: now.with, Role: now.role})
	return old.state != now.state
}

// forget drops machines that are not in names and tells that they are gone. One that had no
// name may have it now: named are those of heirs, by their donors.
func (t *tracker) forget(r *plan.Reporter, names map[string]bool, named map[string]string) (changed bool) {
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

// counts returns how many machines are in each state.
func (t *tracker) counts() map[string]int64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	out := maps.Clone(t.byState)
	if out == nil {
		out = map[string]int64{}
	}
	return out
}

// size is how many machines are known.
func (t *tracker) size() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.states)
}

func (t *tracker) state(name string) string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.states[name].state
}

// roll is the machines of a cluster at one moment, each with its state.
type roll struct {
	machines []rollEntry
	wanted   map[string]int // by group
}

type rollEntry struct {
	name, group, state, text string
	unnamed                  bool   // the cloud has not named it yet
	with                     string // the other machine of its replacement
	role                     string // control-plane of one that is
	stays                    bool   // it is upgraded as it is, and no other takes its place
	failed                   bool   // for good, says the cloud
	booting                  bool   // it has not come up yet, says the cloud
	console                  string // path of its console's log; empty if there is none
	since                    time.Time
}

// call merges what cloud and cluster say about the machines.
func call(machines []cluster.CloudMachine, nodes []*cluster.Node, expected []cluster.ExpectedNode, wanted map[string]int) roll {
	byName := map[string]*cluster.Node{}
	for _, n := range nodes {
		byName[n.Name] = n
	}
	joining := map[string]bool{}
	for _, x := range expected {
		joining[x.Name] = true
	}
	out := roll{wanted: wanted}
	for _, m := range machines {
		if m.Stage == plan.NodeGone {
			continue
		}
		e := rollEntry{name: m.Name, group: cluster.GroupName(m.Group), text: m.Message, booting: m.Stage == plan.NodeBooting, console: m.Console, since: m.Since}
		n, isNode := byName[m.Name]
		switch {
		case isNode:
			e.state, e.text = n.State, n.Message
			e.failed = m.Stage == plan.NodeFailed && n.State != plan.NodeReady
		case m.Stage == plan.NodeFailed:
			e.state, e.failed = plan.NodeFailed, true
		case joining[m.Name]:
			e.state = plan.NodeJoining
		case m.Stage != "":
			e.state = m.Stage
		default: // it is up and has not been let in yet
			e.state = plan.NodeBooting
		}
		delete(byName, m.Name)
		out.machines = append(out.machines, e)
	}
	slices.SortFunc(out.machines, func(a, b rollEntry) int { return strings.Compare(a.name, b.name) })
	return out
}

// counts returns how many machines are in each state, how many are ready and how many
// are wanted.
func (r roll) counts() (byState map[string]int64, ready, wanted int64) {
	byState = map[string]int64{}
	for _, m := range r.machines {
		byState[m.state]++
	}
	for _, n := range r.wanted {
		wanted += int64(n)
	}
	return byState, byState[plan.NodeReady], wanted
}

// complete reports whether every group has as many Ready nodes as it shall have, and
// no machine that is none.
func (r roll) complete() bool {
	ready := map[string]int{}
	for _, m := range r.machines {
		if m.state != plan.NodeReady {
			return false
		}
		ready[m.group]++
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
func (r roll) failed() (out []rollEntry) {
	for _, m := range r.machines {
		if m.failed {
			out = append(out, m)
		}
	}
	return out
}

// slowBoot is how long a machine may boot until its console is pointed out.
const slowBoot = 15 * time.Second

// pending describes the machines that are not ready: "worker-1 is still booting". Many
// are summarised.
func (r roll) pending(at time.Time) string {
	var parts []string
	missing := maps.Clone(r.wanted)
	for _, m := range r.machines {
		missing[m.group]--
		if m.state == plan.NodeReady {
			continue
		}
		s := m.name + " " + stateWords[m.state]
		if m.booting && m.state == plan.NodeBooting {
			s = m.name + " is still booting"
		}
		var more []string
		if m.text != "" {
			more = append(more, m.text)
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

// look asks cloud and cluster.
func (i *initRun) look(ctx context.Context, k Cluster) (roll, error) {
	machines, err := i.provider.Machines(ctx)
	if err != nil {
		return roll{}, cloudError("list machines", i.config.Provider.Sandbox.Name, err)
	}
	nodes, err := k.Nodes(ctx)
	if err != nil {
		return roll{}, err
	}
	expected, err := k.Expected(ctx)
	if err != nil && !errors.Is(err, cluster.ErrAbsent) {
		return roll{}, err
	}
	return call(machines, nodes, expected, i.config.counts()), nil
}

func (i *initRun) allReady(ctx context.Context) (bool, error) {
	return i.glance(ctx, func(ctx context.Context, k Cluster) (bool, error) {
		r, err := i.look(ctx, k)
		return r.complete(), err
	})
}

// gather is how long changes are gathered before the next look.
const gather = 50 * time.Millisecond

// waitReady watches until every machine is a Ready node. It changes nothing: whoever
// leaves here misses nothing but the sight.
func (i *initRun) waitReady(ctx context.Context, r *plan.Reporter) error {
	k, err := i.connect(ctx)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()

	changed := make(chan struct{}, 1) // holds the news that there is some
	poke := func() {
		select {
		case changed <- struct{}{}:
		default:
		}
	}
	wg.Go(func() { i.keepWatching(ctx, poke, k.Watch) })
	wg.Go(func() { i.followService(ctx, r, k, "joinservice") })
	lookout, stop := i.lookOut(ctx, r, k, i.e.limits.poll)
	defer stop()

	poll := time.NewTicker(i.e.limits.poll)
	defer poll.Stop()
	progress := i.e.now() // when something last changed
	answered := progress  // when somebody last did
	var last map[string]int64
	for {
		limited, end := context.WithTimeout(ctx, i.e.limits.glance)
		now, err := i.look(limited, k)
		end()
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case err != nil:
			// Of an API server that is away the lookout tells, and better.
			if i.e.now().Sub(answered) > 2*i.e.limits.quiet && !lookout.away() {
				r.Wait("cloud", "", fmt.Sprintf("no answer (%v); machines go on joining meanwhile", err))
			}
		default:
			answered = i.e.now()
			if i.tell(r, now) {
				progress = i.e.now()
			}
			counts, ready, wanted := now.counts()
			if !maps.Equal(counts, last) {
				r.Counts(ready, wanted, counts)
				last = counts
			}
			r.SetNodes(int(ready))
			if now.complete() {
				r.Wait("", "", "") // for machines; what is still waited for is told when it is known
				return i.waitServices(ctx, r, k)
			}
			if err := now.hopeless(); err != nil {
				return err
			}
			if !lookout.away() {
				r.Wait("nodes", "", now.pending(i.e.now()))
			}
		}
		if still := i.e.now().Sub(progress); still > i.e.limits.still {
			e := &plan.Error{Op: "wait for the nodes", Remedy: "`constellation sandbox status` shows the machines and where their console is, `constellation status` the cluster; run the same command again to go on waiting"}
			e.Err = fmt.Errorf("nothing changed for %s: %s", still.Round(time.Second), now.pending(i.e.now()))
			if err != nil {
				e.Err = fmt.Errorf("no answer for %s: %w", still.Round(time.Second), err)
				if errors.Is(err, cloud.ErrUnavailable) {
					e.Remedy = i.restart() + ". Then run the same command again to go on waiting"
				}
			}
			return e
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-changed:
			// One change seldom comes alone, and a look costs as much for ten as for one.
			if err := pause(ctx, gather); err != nil {
				return err
			}
		case <-poll.C:
		}
	}
}

// waitServices waits a little for what runs on the nodes: a node is Ready a moment
// before its kube-proxy is, and until then services do not answer from there. What is
// slower than that is told and left to the cluster.
func (i *initRun) waitServices(ctx context.Context, r *plan.Reporter, k Cluster) error {
	limited, cancel := context.WithTimeout(ctx, i.e.limits.services)
	defer cancel()
	poll := time.NewTicker(i.e.limits.poll)
	defer poll.Stop()
	var late []string // as last seen
	for {
		all, err := k.Services(limited)
		switch {
		case limited.Err() != nil: // said below
		case err != nil:
			late = []string{err.Error()}
		default:
			late = nil
			for _, s := range all {
				if s.Ready < s.Wanted {
					late = append(late, named(fmt.Sprintf("%s is ready on %d of %d", s.Name, s.Ready, s.Wanted), s.Message))
				}
			}
			if len(late) == 0 {
				return nil
			}
		}
		r.Wait("services", "", some(late))
		select {
		case <-limited.Done():
			if err := ctx.Err(); err != nil {
				return err
			}
			for _, l := range late {
				r.Log("engine", "", "warn", l)
			}
			return nil
		case <-poll.C:
		}
	}
}

// tell emits what changed since the last look.
func (i *initRun) tell(r *plan.Reporter, now roll) (changed bool) {
	names := map[string]bool{}
	for _, m := range now.machines {
		names[m.name] = true
		changed = i.tellMachine(r, m) || changed
	}
	return i.nodes.forget(r, names, nil) || changed
}

// tellMachine tells what a machine is, and reports whether its state changed.
func (i *initRun) tellMachine(r *plan.Reporter, m rollEntry) (changed bool) {
	if k := rank[m.state]; k > 0 && k < rank[plan.NodeNotReady] && k < rank[i.nodes.state(m.name)] {
		return false // a cloud that lags behind
	}
	return i.nodes.set(r, m)
}

// hopeless returns an error if only machines are missing that the cloud has given up.
func (r roll) hopeless() error {
	failed := r.failed()
	if len(failed) == 0 {
		return nil
	}
	byState, _, _ := r.counts()
	if byState[plan.NodeReady]+int64(len(failed)) < int64(len(r.machines)) {
		return nil // others are still on their way
	}
	var parts []string
	for _, m := range failed {
		s := m.name
		if m.text != "" {
			s += ": " + m.text
		}
		if m.console != "" {
			s += " (its console: " + m.console + ")"
		}
		parts = append(parts, s)
	}
	return &plan.Error{
		Op: "wait for the nodes", Err: fmt.Errorf("%s failed: %s", words.Count(len(failed), "machine"), strings.Join(parts, "; ")),
		Remedy: "`constellation sandbox status` shows where their console is; to begin anew, run `constellation sandbox down` and `constellation sandbox up`, then the same command again",
	}
}

// sources are the names of services as log events have them.
var sources = map[string]string{"joinservice": "join-service", "constellation-operator": "operator"}

// followService passes on what a service says from now on, such as the join service about
// joining machines.
func (i *initRun) followService(ctx context.Context, r *plan.Reporter, k Cluster, service string) {
	since := i.e.now()
	wait := backoff{least: 500 * time.Millisecond, most: 10 * time.Second}
	for ctx.Err() == nil {
		err := k.Follow(ctx, service, since, func(l cluster.LogLine) {
			since = l.Time
			e := parseLine(l.Text)
			if e.Source == "" {
				e.Source = sources[service]
			}
			e.Kind = plan.KindLog
			r.Send(e)
		})
		i.e.log.Debug("log ended", "service", service, "err", err)
		if pause(ctx, wait.next()) != nil {
			return
		}
	}
}

const (
	// joinerSpoke is the message of the join service's line for what a joiner reported.
	joinerSpoke = "node reported"
	// joinStep is the joiner's step whose lines are kubeadm's.
	joinStep = "kubeadm-join"
)

// parseLine takes a line of one of our services apart: JSON of slog with the keys
// that all of them use. Any other line is passed on as it is.
func parseLine(line string) plan.Event {
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
