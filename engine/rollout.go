package engine

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"constellation/engine/cluster"
	"constellation/engine/plan"
)

// lineup derives what state each machine of a rollout is in, look after look. Of what has not
// changed since the look before it keeps what it derived and counted, so that a look among
// thousands costs as much as what moves. The zero value has not looked yet.
type lineup struct {
	target cluster.NodeTarget
	moves  []cluster.Move
	agent  cluster.AgentRun
	plans  map[string]planOf
	nodes  []*cluster.Node
	known  []*rollEntry // of nodes, in their order
	rest   []*rollEntry // those that are no nodes, by name
	spare  []*rollEntry // room for the next known

	byNode, donors map[string]cluster.Move // moves, by the node that each is about and by who is replaced
	expected       []cluster.ExpectedNode

	states  map[string]int64             // how many of known are in each
	late    map[*rollEntry]*cluster.Node // those of known that are not Ready
	goes    int64                        // how many of known leave for another one
	kept    int64                        // how many of known are upgraded as they are, now or later
	kubelet map[string]int64             // how many of nodes have each version of Kubernetes
}

// look looks at all machines, of which nodes are sorted by name, and returns those among them
// that may be other than at the look before.
func (l *lineup) look(ro cluster.Rollout, plans []cluster.NodePlan, nodes []*cluster.Node, expected []cluster.ExpectedNode) (fresh []*rollEntry) {
	touched := map[int]bool{}
	find := func(name string) (int, bool) {
		return slices.BinarySearchFunc(nodes, name, func(n *cluster.Node, name string) int { return strings.Compare(n.Name, name) })
	}
	touch := func(m cluster.Move) {
		for _, name := range []string{m.Node, m.Donor} {
			if i, is := find(name); is {
				touched[i] = true
			}
		}
	}
	same := l.states != nil && slices.Equal(ro.Moves, l.moves) && slices.Equal(expected, l.expected) // and the rest, if no node comes or goes
	byNode, donors := l.byNode, l.donors
	if !same {
		byNode, donors = make(map[string]cluster.Move, len(ro.Moves)), make(map[string]cluster.Move, len(ro.Moves))
		was, is := make(map[cluster.Move]bool, len(l.moves)), make(map[cluster.Move]bool, len(ro.Moves))
		for _, m := range l.moves {
			was[m] = true
		}
		for _, m := range ro.Moves {
			if m.Node != "" {
				byNode[m.Node] = m
			}
			if m.Donor != "" && m.Donor != m.Node {
				donors[m.Donor] = m
			}
			if is[m] = true; !was[m] {
				touch(m)
			}
		}
		for _, m := range l.moves {
			if !is[m] {
				touch(m)
			}
		}
	}
	by := onNodes(plans)
	for name, is := range by {
		if l.plans[name] != is {
			touch(cluster.Move{Node: name})
		}
	}
	for name := range l.plans {
		if _, is := by[name]; !is {
			touch(cluster.Move{Node: name})
		}
	}
	if ro.Agent != l.agent {
		touch(cluster.Move{Node: ro.Agent.Node, Donor: l.agent.Node})
	}
	if l.states == nil || !l.target.Same(ro.Target) || l.target.KeepWorkers != ro.Target.KeepWorkers {
		*l = lineup{states: map[string]int64{}, late: map[*rollEntry]*cluster.Node{}, kubelet: map[string]int64{}} // all anew
		same = false
	}
	known := l.spare[:0]
	at := 0 // in the nodes of the look before
	for i, n := range nodes {
		for at < len(l.nodes) && l.nodes[at] != n && l.nodes[at].Name < n.Name {
			l.count(l.nodes[at], l.known[at], -1)
			at++
			same = false
		}
		if at < len(l.nodes) && (l.nodes[at] == n || l.nodes[at].Name == n.Name) {
			at++
			if l.nodes[at-1] == n && !touched[i] {
				known = append(known, l.known[at-1])
				continue
			}
			l.count(l.nodes[at-1], l.known[at-1], -1)
		} else {
			same = false
		}
		m, moves := byNode[n.Name]
		heir, replaced := donors[n.Name]
		e := nodeEntry(ro.Target, n, m, moves, heir, replaced)
		if a := ro.Agent; n.InPlace && a.Node == n.Name && a.Active() && !ro.Target.Has(n) {
			e.state, e.text, e.stays = plan.NodeUpgrading, runWords(a.Phase, a.Line), true
		}
		if p, is := by[n.Name]; is && !moves && !replaced && (e.state == plan.NodeReady || e.state == plan.NodeOutdated || e.state == plan.NodeNotReady) {
			e.state, e.text, e.stays = p.state, p.words(), true
		}
		l.count(n, e, 1)
		known, fresh = append(known, e), append(fresh, e)
	}
	for ; at < len(l.nodes); at++ {
		l.count(l.nodes[at], l.known[at], -1)
		same = false
	}
	l.target, l.agent, l.plans, l.nodes, l.known, l.spare = ro.Target, ro.Agent, by, nodes, known, l.known
	if same {
		return fresh
	}
	l.moves, l.byNode, l.donors, l.expected = slices.Clone(ro.Moves), byNode, donors, slices.Clone(expected)
	joining := map[string]bool{}
	for _, x := range expected {
		joining[x.Name] = true
	}
	l.rest = nil
	for _, m := range ro.Moves {
		e := &rollEntry{name: m.Node, group: m.Group}
		if m.Donor != m.Node {
			e.with = m.Donor
		}
		switch {
		case m.Upgrades || m.Node == "" && (m.Leaves || m.Reached || m.Machine == ""):
			continue
		case m.Node == "": // the cloud has not named it yet
			e.name, e.unnamed = nameless(m), true
		case byNode[m.Node] != m:
			continue
		default:
			if _, is := find(m.Node); is {
				continue
			}
		}
		switch {
		case m.Leaves:
			if e.state = plan.NodeLeaving; m.Revoked != "" {
				e.text, e.stays = "revoked "+m.Revoked, true
			}
		case joining[m.Node]:
			e.state = plan.NodeJoining
		case m.Machine == "Failed":
			e.state, e.failed = plan.NodeFailed, true
		case m.Machine == "Ready":
			e.state = plan.NodeBooting
		default:
			e.state = plan.NodeCreating
		}
		l.rest = append(l.rest, e)
	}
	slices.SortFunc(l.rest, func(a, b *rollEntry) int { return strings.Compare(a.name, b.name) })
	return append(fresh, l.rest...)
}

// count notes that a node is there once more, or once less.
func (l *lineup) count(n *cluster.Node, e *rollEntry, by int64) {
	add := func(to map[string]int64, key string) {
		if to[key] += by; to[key] == 0 {
			delete(to, key)
		}
	}
	add(l.states, e.state)
	add(l.kubelet, n.Kubernetes)
	if n.InPlace && !n.Skipped && e.state != plan.NodeReady {
		l.kept += by
	}
	if e.leavesForAnother() {
		l.goes += by
	}
	if by > 0 && e.state == plan.NodeNotReady {
		l.late[e] = n
	} else {
		delete(l.late, e)
	}
}

// unready is how many nodes that are not Ready hold a place of their own: all but those that
// the operator does not know yet, and heirs whose donor holds theirs.
func (l *lineup) unready() (n int64) {
	for e, node := range l.late {
		if node.Image == "" {
			continue
		}
		donor := e.with
		if m, moves := l.byNode[e.name]; donor == "" && moves && !m.Leaves && !m.Upgrades {
			donor = m.Donor
		}
		at, is := slices.BinarySearchFunc(l.nodes, donor, func(n *cluster.Node, name string) int { return strings.Compare(n.Name, name) })
		if !is || l.known[at].leavesForAnother() { // of which it is known that it leaves its place
			n++
		}
	}
	return n
}

// size is how many machines there are, all who they are, nodes before those that are none.
// Both are as of the look before, until the next.
func (l *lineup) size() int { return len(l.known) + len(l.rest) }

func (l *lineup) all() iter.Seq[*rollEntry] {
	return func(yield func(*rollEntry) bool) {
		for _, list := range [][]*rollEntry{l.known, l.rest} {
			for _, e := range list {
				if !yield(e) {
					return
				}
			}
		}
	}
}

// leavesForAnother reports whether a machine leaves and another one has its place.
func (e *rollEntry) leavesForAnother() bool {
	return !e.stays && (e.state == plan.NodeDraining || e.state == plan.NodeLeaving)
}

// nameless is what a machine is called that the cloud has not named yet. No machine can have
// a name with spaces.
func nameless(m cluster.Move) string {
	if m.Donor != "" {
		return "new for " + m.Donor
	}
	return "new (" + m.Name + ")"
}

// Unnamed reports whether an event calls a machine by what it is for, such as "new for
// worker-0", because the cloud had not named it yet.
func Unnamed(machine string) bool { return strings.Contains(machine, " ") }

// nodeEntry says what state a node is in on its way to t: m is its own move if moves, heir that of
// the machine that will replace it if replaced.
func nodeEntry(t cluster.NodeTarget, n *cluster.Node, m cluster.Move, moves bool, heir cluster.Move, replaced bool) *rollEntry {
	e := &rollEntry{name: n.Name, group: cmp.Or(n.Group, m.Group, n.Role), state: plan.NodeNotReady, text: n.Message, with: cmp.Or(n.Heir, n.Donor)}
	if n.Role == cluster.ControlPlaneRole {
		e.role = n.Role
	}
	switch current := t.Has(n); {
	case moves && m.Revoked != "":
		e.state, e.text, e.stays = plan.NodeLeaving, "revoked "+m.Revoked, replaced
		if replaced {
			e.with = heir.Node
		}
	case moves && m.Leaves && gone(m.Machine):
		e.state = plan.NodeLeaving
	case moves && m.Leaves && n.Cordoned:
		e.state = plan.NodeDraining
	case moves && m.Leaves:
		e.state = plan.NodeReplacing
	case moves && m.Upgrades:
		e.state, e.text = upgradeOf(n, m)
		e.stays = true
	case replaced || n.Heir != "" && !current:
		if e.state = plan.NodeReplacing; n.Cordoned {
			e.state = plan.NodeDraining
		}
		e.with = cmp.Or(n.Heir, heir.Node)
		switch {
		case e.text != "":
		case e.with != "":
			e.text = "by " + e.with
		default:
			e.text = heirWords[heir.Machine]
		}
	case n.State != plan.NodeReady && (current || n.Image == "" || moves):
	case current, t.KeepWorkers && n.Role != cluster.ControlPlaneRole && n.Image != "":
		e.state = plan.NodeReady
	case n.Image == "" || n.Components == "":
		e.state, e.text = plan.NodeJoining, "ready, and not known to the operator yet"
	default:
		if e.state = plan.NodeOutdated; n.Skipped {
			e.text = "skipped, and left as it is"
		}
	}
	return e
}

// upgradeOf is the state of a node that is upgraded as it is, with what is said of it.
func upgradeOf(n *cluster.Node, m cluster.Move) (state, text string) {
	switch m.Phase {
	case "":
		if n.Cordoned {
			return plan.NodeDraining, cmp.Or(n.Message, "to be upgraded in place")
		}
		return plan.NodeOutdated, "its agent is asked"
	case "failed":
		return plan.NodeFailed, runWords("the upgrade has failed"+nextTry(m.NextTry), m.Line)
	case "done":
		if n.State != plan.NodeReady {
			return plan.NodeUpgrading, "its agent has finished, and its kubelet is not Ready yet"
		}
		return plan.NodeUpgrading, "its agent has finished"
	}
	return plan.NodeUpgrading, runWords(m.Phase, m.Line)
}

// nextTry says when something is tried again, as the end of a sentence; empty if that is not
// known.
func nextTry(at time.Time) string {
	if at.IsZero() {
		return ""
	}
	return ", next try at " + at.UTC().Format("15:04:05Z")
}

// runWords say how far the run of an agent is.
func runWords(phase, line string) string {
	if line == "" {
		return phase
	}
	return phase + ": " + line
}

// heirWords say how far the machine is that will replace a node, by what the cloud says.
var heirWords = map[string]string{
	"Creating": "its heir is being created", "Ready": "its heir is up, and has not joined yet", "Failed": "its heir has failed", "Stopped": "its heir is stopped",
}

// gone reports whether the cloud removes a machine, or has.
func gone(machine string) bool { return machine == "Terminating" || machine == "Terminated" }

// observed is what an observation of a rollout reads of a cluster.
type observed interface {
	Rollout(ctx context.Context) (cluster.Rollout, error)
	Nodes(ctx context.Context) ([]*cluster.Node, error)
	Expected(ctx context.Context) ([]cluster.ExpectedNode, error)
	Plans(ctx context.Context) ([]cluster.NodePlan, error)
}

// rolloutView is a rollout at one moment.
type rolloutView struct {
	cluster.Rollout
	at       time.Time
	machines *lineup      // until the next look
	fresh    []*rollEntry // those that may be other than at the look before
	// current of total nodes are at the target, and Ready.
	current, total int64
	states         map[string]int64
	oldest         string // version of Kubernetes among the nodes
	plans          []cluster.NodePlan
	planless       error // why no Plan can be seen
}

func seeRollout(ctx context.Context, k observed, l *lineup, at time.Time) (rolloutView, error) {
	ro, err := k.Rollout(ctx)
	if err != nil {
		return rolloutView{}, err
	}
	nodes, err := k.Nodes(ctx)
	if err != nil {
		return rolloutView{}, err
	}
	expected, err := k.Expected(ctx)
	if err != nil && !errors.Is(err, cluster.ErrAbsent) {
		return rolloutView{}, err
	}
	v := rolloutView{Rollout: ro, at: at, machines: l}
	v.plans, err = k.Plans(ctx)
	if v.planless = err; err != nil && !errors.Is(err, cluster.ErrAbsent) && !errors.Is(err, cluster.ErrDenied) { // which keep nobody from seeing the rest
		return rolloutView{}, err
	}
	v.fresh = l.look(ro, v.plans, ro.WithoutStrangers(nodes, at), expected)
	v.oldest = oldestVersion(maps.Keys(l.kubelet))
	v.states = maps.Clone(l.states)
	replacements := l.goes // Ready nodes that have come for one that has not gone yet
	for _, m := range l.rest {
		v.states[m.state]++
		if m.leavesForAnother() {
			replacements++
		}
	}
	v.current = v.states[plan.NodeReady]
	v.total = v.current - min(replacements, v.current) + l.states[plan.NodeFailed] // a node fails in place, and no other comes for it
	for _, s := range []string{plan.NodeOutdated, plan.NodeReplacing, plan.NodeDraining, plan.NodeUpgrading, plan.NodeLeaving} {
		v.total += v.states[s]
	}
	v.total = max(v.current, v.total+l.unready())
	return v, nil
}

// String is "3 of 5 nodes at the target, 1 draining, 1 outdated".
func (v *rolloutView) String() string {
	parts := []string{fmt.Sprintf("%d of %d nodes at the target", v.current, v.total)}
	for _, s := range []string{plan.NodeFailed, plan.NodeCreating, plan.NodeBooting, plan.NodeJoining, plan.NodeNotReady, plan.NodeReplacing, plan.NodeDraining, plan.NodeUpgrading, plan.NodeLeaving, plan.NodeOutdated} {
		if n := v.states[s]; n > 0 {
			parts = append(parts, fmt.Sprintf("%d %s", n, s))
		}
	}
	return strings.Join(parts, ", ")
}

// What to do about a rollout that waits, by reason. For others there is nothing to do.
var rolloutRemedies = map[string]string{
	"Paused":            "`constellation upgrade resume` goes on",
	"Cancelled":         "`constellation upgrade resume` goes on with the same target",
	"DrainBlocked":      "make room for the pod that is named; `constellation upgrade check` has the command that clears it",
	"HeirCordoned":      "uncordon the new node with kubectl",
	"EtcdUnhealthy":     "mend the member of etcd that is named",
	"UpgradeFailed":     "kubeadm's lines are in the operator's log: `kubectl -n constellation-system logs deploy/constellation-operator`; it is tried again by itself, at once with `constellation upgrade retry NODE`; `constellation upgrade skip NODE` leaves the node as it is",
	"TargetRefused":     "set a target that can be gone to: `constellation upgrade check`",
	"ComponentsUnknown": "`constellation upgrade prepare` publishes what nodes install",
	"NoAgent":           "the operator must run in the cluster, beside the agent of a control plane: `kubectl -n constellation-system get pods`",
}

// why is the wait event of a moment; an empty text if nothing is waited for.
func (v *rolloutView) why() plan.Event {
	e := plan.Event{Kind: plan.KindWait}
	w := v.Waiting
	switch {
	case !v.Observed:
		e.Object, e.Text = "operator", "the operator has not looked at the target yet"
	case w.Reason != "":
		e.Object, e.State, e.Node, e.Text = "rollout", w.Reason, w.Node, w.Message
		switch { // asked for, and not so before what is under way is finished
		case v.Target.Paused && w.Reason != "Paused":
			e.Text = "it is being paused: " + e.Text
		case v.Target.Cancelled && w.Reason != "Cancelled":
			e.Text = "it is being cancelled: " + e.Text
		}
		if !w.NextTry.IsZero() {
			e.Text += "; it is tried again at " + w.NextTry.UTC().Format("15:04:05Z")
		}
		e.Remedy = rolloutRemedies[w.Reason]
	case v.Stalled || v.Reason == "Paused" || v.Reason == "Cancelled":
		e.Object, e.State, e.Text, e.Remedy = "rollout", v.Reason, v.Message, rolloutRemedies[v.Reason]
	case len(v.Moves) == 0:
		return whyPlans(v.plans)
	}
	return e
}

// someSkipped is the reason of a rollout that has ended with nodes that people hold.
const someSkipped = "NodesHeld"

// rolloutDone reports whether all nodes are at a target.
func (i *initRun) rolloutDone(ctx context.Context, want cluster.NodeTarget) (bool, error) {
	return i.glance(ctx, func(ctx context.Context, k Cluster) (bool, error) {
		ro, err := k.Rollout(ctx)
		return ro.Observed && ro.Reached && ro.Reason != someSkipped && ro.Target.Same(want) && ro.Target.KeepWorkers == want.KeepWorkers, err
	})
}

// restPoll is how much rarer the cluster is asked while a watch of it works.
const restPoll = 5

// waitRollout watches until all nodes are at a target. It changes nothing: whoever
// leaves misses nothing but the sight.
func (i *initRun) waitRollout(ctx context.Context, r *plan.Reporter, want cluster.NodeTarget) error {
	k, err := i.connect(ctx)
	if err != nil {
		return err
	}
	err = i.followRollout(ctx, r, k, func(now *rolloutView) (bool, error) {
		return now.Observed && now.Reached, now.over(want)
	})
	if err != nil {
		return err
	}
	return i.waitServices(ctx, r, k)
}

// followRollout tells how the rollout goes until seen, which gets each look at it, says
// that it was the last one, or ctx ends.
func (i *initRun) followRollout(ctx context.Context, r *plan.Reporter, k Cluster, seen func(*rolloutView) (last bool, err error)) error {
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	// A watch that ends is the first sign of an API server that goes. One that hangs is found
	// out by asking, which wakes this computer and need not be often.
	lookout, stop := i.lookOut(ctx, r, k, i.e.limits.quiet)
	defer stop()
	changed := make(chan struct{}, 1) // holds the news that there is some
	wg.Go(func() {
		i.keepWatching(ctx, func() {
			select {
			case changed <- struct{}{}:
			default:
			}
		}, func(ctx context.Context, changed func()) error {
			defer lookout.look()
			return k.WatchRollout(ctx, changed)
		})
	})
	for _, service := range []string{"constellation-operator", "joinservice"} {
		wg.Go(func() { i.followService(ctx, r, k, service) })
	}
	outlook := newOutlook(learn(i.e.ws.Path(plan.RunsDir)))
	r.Forecast(outlook.complete)

	poll := i.rest(restPoll * i.e.limits.poll)
	var line lineup
	var plans planTeller
	var told map[string]int64
	var agent cluster.AgentRun
	var denied time.Time // since when it denies; zero: it does not
	for {
		limited, end := context.WithTimeout(ctx, i.e.limits.glance)
		now, err := seeRollout(limited, k, &line, i.e.now())
		end()
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case errors.Is(err, cluster.ErrDenied) && !denied.IsZero() && i.e.now().Sub(denied) >= i.e.limits.denials:
			return i.clusterError("watch the rollout", err)
		case errors.Is(err, cluster.ErrDenied):
			if denied.IsZero() {
				denied = i.e.now()
			}
			i.e.log.Debug("rollout not seen", "err", err)
		case err != nil:
			i.e.log.Debug("rollout not seen", "err", err) // of an API server that is away the lookout tells
		default:
			denied = time.Time{}
			lookout.remember("last seen at " + now.at.UTC().Format("15:04:05Z") + ": " + now.String())
			outlook.look(&now)
			i.tellRollout(r, &now)
			plans.tell(r, now.plans, now.planless)
			// What machines are is told one by one, and counted as it was told.
			if states := i.nodes.counts(); !maps.Equal(states, told) {
				told = states
				r.Counts(now.current, now.total, states)
			}
			if a := now.Agent; now.Observed && a.Phase != "" && a != agent && a.Version == now.Target.Kubernetes {
				agent = a
				i.tellAgent(r, a)
			}
			r.SetNodes(int(now.current))
			if last, err := seen(&now); err != nil {
				return err
			} else if last {
				r.Wait("", "", "")
				return nil
			}
			if !lookout.away() {
				r.Send(now.why())
			}
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-changed:
			if err := pause(ctx, gather); err != nil { // one change seldom comes alone
				return err
			}
		case <-poll:
			poll = i.rest(restPoll * i.e.limits.poll)
		}
	}
}

// tellRollout tells what became of machines since the look before.
func (i *initRun) tellRollout(r *plan.Reporter, now *rolloutView) {
	for _, m := range now.fresh {
		i.tellMachine(r, *m)
	}
	if i.nodes.size() == now.machines.size() {
		return // all that are known are there
	}
	names, named := make(map[string]bool, now.machines.size()), map[string]string{}
	for m := range now.machines.all() {
		names[m.name] = true
		if !m.unnamed && m.with != "" {
			named[m.with] = m.name
		}
	}
	i.nodes.forget(r, names, named)
}

// tellAgent passes on how far the agent is with Kubernetes.
func (i *initRun) tellAgent(r *plan.Reporter, a cluster.AgentRun) {
	state := plan.StateRunning
	switch a.Phase {
	case "done":
		state = plan.StateDone
	case "failed":
		state = plan.StateFailed
	}
	text := a.Version + " on " + a.Node + ", " + a.Phase + nextTry(a.NextTry)
	if a.Line != "" && state != plan.StateDone {
		text += ": " + a.Line
	}
	r.Part("kubernetes", state, text, 0, 0)
}

// over returns why there is no use in waiting any longer for a target; nil if there is.
func (v *rolloutView) over(want cluster.NodeTarget) error {
	switch t := v.Target; {
	case !t.Same(want):
		return &plan.Error{
			Op: "wait for the rollout", Err: fmt.Errorf("the target was changed meanwhile, to image %s and Kubernetes %s; the cluster goes there", t.ImageVersion, t.Kubernetes),
			Remedy: "`constellation status` shows how far it is",
		}
	case !v.Observed:
	case v.Reason == "Cancelled" && t.Cancelled:
		return &plan.Error{
			Op: "wait for the rollout", Err: fmt.Errorf("it was cancelled with %s; nodes stay as they are", v), Exit: plan.ExitStopped,
			Remedy: "`constellation upgrade resume` goes on with the same target",
		}
	case v.Reached && v.Reason == someSkipped:
		return &plan.Error{
			Op: "wait for the rollout", Err: errors.New(v.Message), Exit: plan.ExitStopped,
			Remedy: "`constellation upgrade retry NODE-OR-GROUP` lets one go that was skipped",
		}
	case v.Stalled && v.Reason == "TargetRefused":
		return &plan.Error{Op: "wait for the rollout", Err: errors.New("the operator refuses the target: " + v.Message), Remedy: rolloutRemedies[v.Reason]}
	}
	return nil
}

// keepWatching calls watch again whenever it ends, until ctx does.
func (i *initRun) keepWatching(ctx context.Context, changed func(), watch func(context.Context, func()) error) {
	wait := backoff{least: 200 * time.Millisecond, most: 5 * time.Second}
	for ctx.Err() == nil {
		began := i.e.now()
		err := watch(ctx, changed)
		i.e.log.Debug("watch ended", "err", err)
		if i.e.now().Sub(began) > time.Minute {
			wait.last = 0
		}
		if pause(ctx, wait.next()) != nil {
			return
		}
	}
}

// ChangeRollout pauses, resumes or cancels the rollout of the cluster and returns what it
// was before. The error has ExitNothing if it is so already.
func (e *Engine) ChangeRollout(ctx context.Context, c cluster.RolloutChange) (was cluster.Rollout, err error) {
	err = e.onCluster(ctx, "change the rollout", func(ctx context.Context, k Cluster) error {
		if was, err = k.Rollout(ctx); err != nil {
			return err
		}
		same := func(have bool, want *bool) bool { return want == nil || *want == have }
		if same(was.Target.Paused, c.Paused) && same(was.Target.Cancelled, c.Cancelled) {
			what := "is not paused and not cancelled"
			switch {
			case c.Cancelled != nil && *c.Cancelled:
				what = "is cancelled already"
			case c.Paused != nil && *c.Paused:
				what = "is paused already"
			}
			return nothingToDo("the rollout " + what)
		}
		return k.ChangeRollout(ctx, c)
	})
	return was, err
}

// Skip has rollouts leave the node, or else the group, of a name as it is, or, if skip is
// false, lets it go and tries it again now. It returns what was so before. The error has
// ExitNothing if it is so already, and ExitUsage if there is neither node nor group.
func (e *Engine) Skip(ctx context.Context, name string, skip bool) (was cluster.Holding, err error) {
	err = e.onCluster(ctx, "change what rollouts do with "+name, func(ctx context.Context, k Cluster) error {
		was, err = k.Holding(ctx, name)
		switch {
		case errors.Is(err, cluster.ErrAbsent):
			return &plan.Error{Err: fmt.Errorf("no node and no group is called %q", name), Exit: plan.ExitUsage, Remedy: "`constellation status` lists both"}
		case err != nil:
			return err
		case skip && was.Held:
			return nothingToDo(was.Kind + " " + name + " is skipped already")
		case skip && was.By != "":
			return nothingToDo("node " + name + " is skipped already, with its group " + was.By)
		case !skip && was.By != "":
			return &plan.Error{
				Err: fmt.Errorf("node %s is skipped with all of its group %s", name, was.By), Exit: plan.ExitUsage,
				Remedy: "`constellation upgrade retry " + was.By + "` lets the group go",
			}
		case !skip && !was.Held && was.Postponed.IsZero() && !was.Failed:
			what := " is neither skipped nor postponed"
			if was.Kind == cluster.HoldingNode {
				what += ", and no upgrade of it has failed"
			}
			return nothingToDo(was.Kind + " " + name + what)
		}
		return k.SetHolding(ctx, was, skip)
	})
	return was, err
}

func nothingToDo(why string) error {
	return &plan.Error{Err: errors.New(why + ": nothing to do"), Exit: plan.ExitNothing}
}

// onCluster does something short with the cluster of the workspace.
func (e *Engine) onCluster(ctx context.Context, op string, f func(context.Context, Cluster) error) error {
	b, err := e.ws.Kubeconfig()
	if errors.Is(err, errAbsent) {
		return &plan.Error{Op: op, Err: e.ws.absent(KubeconfigFile), Exit: plan.ExitUsage, Remedy: "copy the cluster's kubeconfig there under this name, or name another directory with -C"}
	}
	if err != nil {
		return err
	}
	k, err := e.connect(ctx, b)
	if err != nil {
		return &plan.Error{Op: "read " + e.ws.Path(KubeconfigFile), Err: err, Remedy: "restore the file from a backup"}
	}
	ctx, cancel := context.WithTimeout(ctx, e.limits.api)
	defer cancel()
	err = f(ctx, k)
	if told := (*plan.Error)(nil); err == nil || errors.As(err, &told) {
		return err
	}
	out := &plan.Error{Op: op, Err: err, Remedy: "`constellation status` tells whether the control plane is up; run the same command again afterwards"}
	switch {
	case errors.Is(err, cluster.ErrAbsent):
		out.Remedy = "`constellation init` sets the target of a cluster"
	case errors.Is(err, cluster.ErrDenied):
		out.Remedy = KubeconfigFile + " is not of this cluster or not its administrator's"
	}
	return out
}
