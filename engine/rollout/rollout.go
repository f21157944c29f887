// Package rollout answers: how far are the nodes on their way to the target, and when will they
// be there?
//
// It turns observations of a cluster into what a watch shows: the state of each node
// ([NodeDiff]), a [Board] of events, an [Estimate] of the end, and the past of recorded runs.
// It decides nothing and changes nothing: the operator replaces nodes.
package rollout

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"maps"
	"slices"
	"strings"
	"time"

	"constellation/engine/cluster"
	"constellation/engine/plan"
	"constellation/engine/version"
)

// NodeDiff derives what state each machine of a rollout is in, look after look. Of what has not
// changed since the look before it keeps what it derived and counted, so that a look among
// thousands costs as much as what moves. The zero value has not looked yet.
type NodeDiff struct {
	target cluster.NodeTarget
	moves  []cluster.Move
	agent  cluster.AgentRun
	plans  map[string]planOf
	nodes  []*cluster.Node
	known  []*Entry // of nodes, in their order
	rest   []*Entry // those that are no nodes, by name
	spare  []*Entry // room for the next known

	byNode, donors map[string]cluster.Move // moves, by the node that each is about and by who is replaced
	expected       []cluster.ExpectedNode

	states  map[string]int64         // how many of known are in each
	late    map[*Entry]*cluster.Node // those of known that are not Ready
	goes    int64                    // how many of known leave for another one
	kept    int64                    // how many of known are upgraded as they are, now or later
	kubelet map[string]int64         // how many of nodes have each version of Kubernetes
}

// nodeView is one observation of all machines, compared with the one before.
type nodeView struct {
	cluster.Rollout
	nodes          []*cluster.Node         // by name
	byNode, donors map[string]cluster.Move // see NodeDiff
	plans          map[string]planOf       // by node
	touched        map[int]bool            // the indices of nodes whose moves or plans have changed
}

// index returns the index of a node.
func (o *nodeView) index(name string) (int, bool) {
	return slices.BinarySearchFunc(o.nodes, name, func(n *cluster.Node, name string) int { return strings.Compare(n.Name, name) })
}

// touch marks the nodes of m as possibly changed.
func (o *nodeView) touch(m cluster.Move) {
	for _, name := range []string{m.Node, m.Donor} {
		if i, is := o.index(name); is {
			o.touched[i] = true
		}
	}
}

// indexMoves indexes the moves and touches the nodes of those that began or ended since before.
func (o *nodeView) indexMoves(before []cluster.Move) {
	o.byNode, o.donors = make(map[string]cluster.Move, len(o.Moves)), make(map[string]cluster.Move, len(o.Moves))
	was, is := make(map[cluster.Move]bool, len(before)), make(map[cluster.Move]bool, len(o.Moves))
	for _, m := range before {
		was[m] = true
	}
	for _, m := range o.Moves {
		if m.Node != "" {
			o.byNode[m.Node] = m
		}
		if m.Donor != "" && m.Donor != m.Node {
			o.donors[m.Donor] = m
		}
		if is[m] = true; !was[m] {
			o.touch(m)
		}
	}
	for _, m := range before {
		if !is[m] {
			o.touch(m)
		}
	}
}

// touchPlanned touches the nodes whose plans differ from before.
func (o *nodeView) touchPlanned(before map[string]planOf) {
	for name, is := range o.plans {
		if before[name] != is {
			o.touch(cluster.Move{Node: name})
		}
	}
	for name := range before {
		if _, is := o.plans[name]; !is {
			o.touch(cluster.Move{Node: name})
		}
	}
}

// entry returns the state of a node, including upgrades in place by its agent or a plan.
func (o *nodeView) entry(n *cluster.Node) *Entry {
	if o.Unmanaged {
		return o.unmanagedEntry(n)
	}
	m, moves := o.byNode[n.Name]
	heir, replaced := o.donors[n.Name]
	e := nodeEntry(o.Target, n, m, moves, heir, replaced)
	if a := o.Agent; n.InPlace && a.Node == n.Name && a.Active() && !o.Target.Has(n) {
		e.State, e.Text, e.stays = plan.NodeUpgrading, runWords(a.Phase, a.Line), true
	}
	// After its own upgrade, the operator lends a drained node to a Plan.
	free := !moves && (e.State == plan.NodeReady || e.State == plan.NodeOutdated || e.State == plan.NodeNotReady)
	lent := moves && m.Upgrades && m.Phase == "done"
	if p, is := o.plans[n.Name]; is && !replaced && (free || lent) {
		e.State, e.Text, e.stays = p.state, p.words(), true
	}
	return e
}

// unmanagedEntry returns the state of a node that others upgrade: its version, and whether it is
// cordoned, as before a drain.
func (o *nodeView) unmanagedEntry(n *cluster.Node) *Entry {
	e := &Entry{Name: n.Name, Group: cmp.Or(n.Group, n.Role), State: n.State, Text: n.Message, stays: true, machine: n.ProviderID}
	if n.Role == cluster.ControlPlaneRole {
		e.role = n.Role
	}
	if n.State == plan.NodeReady && n.Cordoned {
		e.State, e.Text = plan.NodeDraining, "cordoned, runs "+n.Kubernetes
	}
	if p, is := o.plans[n.Name]; is && (e.State == plan.NodeReady || e.State == plan.NodeDraining) {
		e.State, e.Text = p.state, p.words()
	}
	return e
}

// withoutNode returns the machines of moves that have no Node yet, or none any more, by name.
func (o *nodeView) withoutNode(expected []cluster.ExpectedNode) (rest []*Entry) {
	joining := map[string]bool{}
	for _, x := range expected {
		joining[x.Name] = true
	}
	for _, m := range o.Moves {
		if o.hasNoNode(m) {
			rest = append(rest, machineEntry(m, joining[m.Node]))
		}
	}
	slices.SortFunc(rest, func(a, b *Entry) int { return strings.Compare(a.Name, b.Name) })
	return rest
}

// hasNoNode reports whether m is about a machine that no Node shows.
func (o *nodeView) hasNoNode(m cluster.Move) bool {
	switch {
	case m.Upgrades:
		return false
	case m.Node == "":
		return !m.Leaves && !m.Reached && m.Machine != ""
	case o.byNode[m.Node] != m: // another move shows this machine
		return false
	}
	_, is := o.index(m.Node)
	return !is
}

// machineEntry returns the state of a machine without a Node.
func machineEntry(m cluster.Move, joining bool) *Entry {
	e := &Entry{Name: m.Node, Group: m.Group}
	if m.Node == "" { // the cloud has not named it yet
		e.Name, e.Unnamed = nameless(m), true
	}
	if m.Donor != m.Node {
		e.With = m.Donor
	}
	switch {
	case m.Leaves:
		if e.State = plan.NodeLeaving; m.Revoked != "" {
			e.Text, e.stays = "revoked "+m.Revoked, true
		}
	case joining:
		e.State = plan.NodeJoining
	case m.Machine == "Failed":
		e.State, e.failed = plan.NodeFailed, true
	case m.Machine == "Ready":
		e.State = plan.NodeBooting
	default:
		e.State = plan.NodeCreating
	}
	return e
}

// look takes an observation of all machines, with nodes sorted by name, and returns the machines
// whose state may have changed since the observation before.
func (l *NodeDiff) look(ro cluster.Rollout, plans []cluster.NodePlan, nodes []*cluster.Node, expected []cluster.ExpectedNode) (fresh []*Entry) {
	same := l.states != nil && slices.Equal(ro.Moves, l.moves) && slices.Equal(expected, l.expected) // and the rest, if no node comes or goes
	o := &nodeView{Rollout: ro, nodes: nodes, byNode: l.byNode, donors: l.donors, plans: onNodes(plans), touched: map[int]bool{}}
	if !same {
		o.indexMoves(l.moves)
	}
	o.touchPlanned(l.plans)
	if ro.Agent != l.agent {
		o.touch(cluster.Move{Node: ro.Agent.Node, Donor: l.agent.Node})
	}
	if l.states == nil || !l.target.Same(ro.Target) || l.target.KeepWorkers != ro.Target.KeepWorkers || ro.Target.Etcd != "" && !slices.Equal(l.target.Members, ro.Target.Members) {
		*l = NodeDiff{states: map[string]int64{}, late: map[*Entry]*cluster.Node{}, kubelet: map[string]int64{}} // start over
		same = false
	}
	fresh, sameNodes := l.merge(o)
	if same && sameNodes {
		return fresh
	}
	l.moves, l.byNode, l.donors, l.expected = slices.Clone(ro.Moves), o.byNode, o.donors, slices.Clone(expected)
	l.rest = o.withoutNode(expected)
	return append(fresh, l.rest...)
}

// merge replaces the nodes by those of o. It keeps the entries of nodes that have not changed,
// returns the new entries, and whether the names are the same as before.
func (l *NodeDiff) merge(o *nodeView) (fresh []*Entry, same bool) {
	same = true
	known := l.spare[:0]
	at := 0 // in the nodes of the observation before
	for i, n := range o.nodes {
		for at < len(l.nodes) && l.nodes[at] != n && l.nodes[at].Name < n.Name {
			l.count(l.nodes[at], l.known[at], -1)
			at++
			same = false
		}
		if at < len(l.nodes) && (l.nodes[at] == n || l.nodes[at].Name == n.Name) {
			at++
			if l.nodes[at-1] == n && !o.touched[i] {
				known = append(known, l.known[at-1])
				continue
			}
			l.count(l.nodes[at-1], l.known[at-1], -1)
		} else {
			same = false
		}
		e := o.entry(n)
		l.count(n, e, 1)
		known, fresh = append(known, e), append(fresh, e)
	}
	for ; at < len(l.nodes); at++ {
		l.count(l.nodes[at], l.known[at], -1)
		same = false
	}
	l.target, l.agent, l.plans, l.nodes, l.known, l.spare = o.Target, o.Agent, o.plans, o.nodes, known, l.known
	return fresh, same
}

// count notes that a node is there once more, or once less.
func (l *NodeDiff) count(n *cluster.Node, e *Entry, by int64) {
	add := func(to map[string]int64, key string) {
		if to[key] += by; to[key] == 0 {
			delete(to, key)
		}
	}
	add(l.states, e.State)
	add(l.kubelet, n.Kubernetes)
	if n.InPlace && !n.Skipped && e.State != plan.NodeReady {
		l.kept += by
	}
	if e.leavesForAnother() {
		l.goes += by
	}
	if by > 0 && e.State == plan.NodeNotReady {
		l.late[e] = n
	} else {
		delete(l.late, e)
	}
}

// unready is the number of nodes that are not Ready and count by themselves: all except those
// without an entry by the operator yet, and replacement nodes whose old node still counts.
func (l *NodeDiff) unready() (n int64) {
	for e, node := range l.late {
		if !l.target.Noted(node) {
			continue
		}
		donor := e.With
		if m, moves := l.byNode[e.Name]; donor == "" && moves && !m.Leaves && !m.Upgrades {
			donor = m.Donor
		}
		at, is := slices.BinarySearchFunc(l.nodes, donor, func(n *cluster.Node, name string) int { return strings.Compare(n.Name, name) })
		if !is || l.known[at].leavesForAnother() { // of which it is known that it leaves its place
			n++
		}
	}
	return n
}

// Size is the number of machines, and All lists them, nodes first. Both are as of the last
// observation.
func (l *NodeDiff) Size() int { return len(l.known) + len(l.rest) }

// All iterates over all entries: first the machines with a Node, then the others.
func (l *NodeDiff) All() iter.Seq[*Entry] {
	return func(yield func(*Entry) bool) {
		for _, list := range [][]*Entry{l.known, l.rest} {
			for _, e := range list {
				if !yield(e) {
					return
				}
			}
		}
	}
}

// leavesForAnother reports whether a machine leaves and another one has its place.
func (e *Entry) leavesForAnother() bool {
	return !e.stays && (e.State == plan.NodeDraining || e.State == plan.NodeLeaving)
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

// nodeEntry returns the state of a node with target t: m is its own move if moves, next is that
// of its replacement machine if replaced.
func nodeEntry(t cluster.NodeTarget, n *cluster.Node, m cluster.Move, moves bool, next cluster.Move, replaced bool) *Entry {
	e := &Entry{Name: n.Name, Group: cmp.Or(n.Group, m.Group, n.Role), State: plan.NodeNotReady, Text: n.Message, With: cmp.Or(n.Heir, n.Donor), machine: n.ProviderID}
	if n.Role == cluster.ControlPlaneRole {
		e.role = n.Role
	}
	switch current := t.Has(n); {
	case moves && m.Revoked != "":
		e.State, e.Text, e.stays = plan.NodeLeaving, "revoked "+m.Revoked, replaced
		if replaced {
			e.With = next.Node
		}
	case moves && m.Leaves:
		e.State = leavingState(n, m)
	case moves && m.Upgrades:
		e.State, e.Text = upgradeOf(n, m)
		e.stays = true
	case replaced || n.Heir != "" && !current:
		e.replacedBy(n, next)
	case n.State != plan.NodeReady && (current || !t.Noted(n) || moves):
	case current, t.KeepWorkers && n.Role != cluster.ControlPlaneRole && t.Noted(n):
		e.State = plan.NodeReady
	case !t.Noted(n) || n.Components == "":
		e.State, e.Text = plan.NodeJoining, "ready, and not yet observed by the operator"
	default:
		if e.State = plan.NodeOutdated; n.Skipped {
			e.Text = "skipped, and left as it is"
		}
	}
	return e
}

// leavingState returns the state of a node whose machine is removed.
func leavingState(n *cluster.Node, m cluster.Move) string {
	switch {
	case gone(m.Machine):
		return plan.NodeLeaving
	case n.Cordoned:
		return plan.NodeDraining
	}
	return plan.NodeReplacing
}

// replacedBy sets the state of a node that another one replaces; next is the move of the other one,
// or zero.
func (e *Entry) replacedBy(n *cluster.Node, next cluster.Move) {
	if e.State = plan.NodeReplacing; n.Cordoned {
		e.State = plan.NodeDraining
	}
	e.With = cmp.Or(n.Heir, next.Node)
	switch {
	case e.Text != "":
	case e.With != "":
		e.Text = "by " + e.With
	default:
		e.Text = replacementText[next.Machine]
	}
}

// upgradeOf is the state of a node that is upgraded in place, with its text.
func upgradeOf(n *cluster.Node, m cluster.Move) (state, text string) {
	switch m.Phase {
	case "":
		if n.Cordoned {
			return plan.NodeDraining, cmp.Or(n.Message, "to be upgraded in place")
		}
		return plan.NodeOutdated, "its agent is asked"
	case "failed":
		return plan.NodeFailed, runWords("the upgrade has failed"+NextTry(m.NextTry), m.Line)
	case "done":
		if n.State != plan.NodeReady {
			return plan.NodeUpgrading, "its agent has finished, and its kubelet is not Ready yet"
		}
		return plan.NodeUpgrading, "its agent has finished"
	}
	return plan.NodeUpgrading, runWords(m.Phase, m.Line)
}

// NextTry says when something is tried again, as the end of a sentence; empty if that is not
// known.
func NextTry(at time.Time) string {
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

// replacementText describes the progress of a replacement machine by its state in the cloud.
var replacementText = map[string]string{
	"Creating": "its replacement is being created", "Ready": "its replacement has booted and not joined yet", "Failed": "its replacement has failed", "Stopped": "its replacement is stopped",
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

// View is a rollout at one moment.
type View struct {
	cluster.Rollout
	At       time.Time
	Machines *NodeDiff // until the next look
	Fresh    []*Entry  // those that may be other than at the look before
	// current of total nodes are at the target, and Ready.
	Current, Total int64
	states         map[string]int64
	Oldest         string // version of Kubernetes among the nodes
	Plans          []cluster.NodePlan
	Planless       error // why no Plan can be seen
	// Disturbed is set if a node is cordoned or not ready.
	Disturbed bool
	// Stuck are the causes that keep pods on cordoned nodes, with the command that frees each.
	Stuck []plan.Finding
}

// See reads the rollout, the nodes and the Plans of a cluster and updates l.
func See(ctx context.Context, k observed, l *NodeDiff, at time.Time) (View, error) {
	ro, err := k.Rollout(ctx)
	if err != nil {
		return View{}, err
	}
	nodes, err := k.Nodes(ctx)
	if err != nil {
		return View{}, err
	}
	expected, err := k.Expected(ctx)
	if err != nil && !errors.Is(err, cluster.ErrAbsent) {
		return View{}, err
	}
	v := View{Rollout: ro, At: at, Machines: l}
	v.Disturbed = slices.ContainsFunc(nodes, func(n *cluster.Node) bool { return n.Cordoned || n.State != plan.NodeReady })
	v.Plans, err = k.Plans(ctx)
	if v.Planless = err; err != nil && !errors.Is(err, cluster.ErrAbsent) && !errors.Is(err, cluster.ErrDenied) { // which keep nobody from seeing the rest
		return View{}, err
	}
	v.Fresh = l.look(ro, v.Plans, ro.WithoutStrangers(nodes, at), expected)
	v.Oldest = oldestVersion(maps.Keys(l.kubelet))
	v.states = maps.Clone(l.states)
	replacements := l.goes // Ready nodes that have come for one that has not gone yet
	for _, m := range l.rest {
		v.states[m.State]++
		if m.leavesForAnother() {
			replacements++
		}
	}
	v.Current = v.states[plan.NodeReady]
	v.Total = v.Current - min(replacements, v.Current) + l.states[plan.NodeFailed] // a node fails in place, and no other comes for it
	for _, s := range []string{plan.NodeOutdated, plan.NodeReplacing, plan.NodeDraining, plan.NodeUpgrading, plan.NodeLeaving} {
		v.Total += v.states[s]
	}
	v.Total = max(v.Current, v.Total+l.unready())
	if ro.Unmanaged {
		v.Total = int64(len(nodes))
	}
	return v, nil
}

// String is "3 of 5 nodes at the target, 1 draining, 1 outdated".
func (v *View) String() string {
	parts := []string{fmt.Sprintf("%d of %d nodes at the target", v.Current, v.Total)}
	if v.Unmanaged {
		parts = []string{fmt.Sprintf("%d of %d nodes ready and not cordoned", v.Current, v.Total)}
	}
	for _, s := range []string{plan.NodeFailed, plan.NodeCreating, plan.NodeBooting, plan.NodeJoining, plan.NodeNotReady, plan.NodeReplacing, plan.NodeDraining, plan.NodeUpgrading, plan.NodeLeaving, plan.NodeOutdated} {
		if n := v.states[s]; n > 0 {
			parts = append(parts, fmt.Sprintf("%d %s", n, s))
		}
	}
	return strings.Join(parts, ", ")
}

// What to do about a rollout that waits, by reason. For others there is nothing to do.
var rolloutRemedies = map[string]string{
	"Paused":             "`constellation upgrade resume` continues the rollout",
	"Cancelled":          "`constellation upgrade resume` continues it with the same target",
	"DrainBlocked":       "make room for the named pod; `constellation upgrade check` has the command that clears it",
	"HeirCordoned":       "uncordon the new node with kubectl",
	"EtcdUnhealthy":      "repair the named member of etcd",
	"EtcdTagMissing":     "set etcd.local.imageTag with `kubectl -n kube-system edit configmap kubeadm-config` to that of the target, or run `constellation upgrade apply` again",
	"EtcdMemberOutdated": "on that node remove the patch of etcd's image from /etc/kubernetes/patches and set the target's image in /etc/kubernetes/manifests/etcd.yaml; `constellation upgrade skip NODE` leaves the node as it is",
	"UpgradeFailed":      "kubeadm's lines are in the operator's log: `kubectl -n constellation-system logs deploy/constellation-operator`; it is retried with backoff, at once with `constellation upgrade retry NODE`; `constellation upgrade skip NODE` leaves the node as it is",
	"TargetRefused":      "set a reachable target: `constellation upgrade check` lists them",
	"ComponentsUnknown":  "`constellation upgrade prepare` publishes what nodes install",
	"NoAgent":            "the operator must run in the cluster, beside the agent of a control plane: `kubectl -n constellation-system get pods`",
}

// Why is the wait event of a moment; an empty text if nothing is waited for.
func (v *View) Why() plan.Event {
	e := plan.Event{Kind: plan.KindWait}
	w := v.Waiting
	switch {
	case v.Unmanaged && len(v.Stuck) > 0:
		return v.whyStuck()
	case v.Unmanaged:
		return WhyPlans(v.Plans)
	case !v.Observed:
		e.Object, e.Text = "operator", "the operator has not observed the target yet"
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
		return WhyPlans(v.Plans)
	}
	return e
}

// whyStuck is the wait event of a drain that does not end by itself.
func (v *View) whyStuck() plan.Event {
	f := v.Stuck[0]
	e := plan.Event{Kind: plan.KindWait, Object: "drain", State: "DrainBlocked", Text: f.Title, Remedy: f.Remedy}
	for _, o := range f.Objects {
		if node, ok := strings.CutPrefix(o, "node/"); ok {
			e.Node = node
		}
	}
	if f.Detail != "" {
		e.Text += " (" + f.Detail + ")"
	}
	if f.Command != "" {
		e.Remedy = "`" + f.Command + "`: " + e.Remedy
	}
	if more := len(v.Stuck) - 1; more > 0 {
		e.Text += fmt.Sprintf("; and %d more, which `constellation check` lists", more)
	}
	return e
}

// SomeSkipped is the reason of a rollout that has ended with nodes that people hold.
const SomeSkipped = "NodesHeld"

// RestPoll is how much rarer the cluster is asked while a watch of it works.
const RestPoll = 5

// Over returns why there is no use in waiting any longer for a target; nil if there is.
func (v *View) Over(want cluster.NodeTarget) error {
	switch t := v.Target; {
	case !t.Same(want):
		return &plan.Error{
			Op: "wait for the rollout", Err: fmt.Errorf("the target was changed meanwhile, to %s; the operator follows the new target", t),
			Remedy: "`constellation status` shows how far it is",
		}
	case !v.Observed:
	case v.Reason == "Cancelled" && t.Cancelled:
		return &plan.Error{
			Op: "wait for the rollout", Err: fmt.Errorf("it was cancelled with %s; nodes stay as they are", v), Exit: plan.ExitStopped,
			Remedy: "`constellation upgrade resume` continues it with the same target",
		}
	case v.Reached && v.Reason == SomeSkipped:
		return &plan.Error{
			Op: "wait for the rollout", Err: errors.New(v.Message), Exit: plan.ExitStopped,
			Remedy: "`constellation upgrade retry NODE-OR-GROUP` resumes a skipped one",
		}
	case v.Stalled && v.Reason == "TargetRefused":
		return &plan.Error{Op: "wait for the rollout", Err: errors.New("the operator refuses the target: " + v.Message), Remedy: rolloutRemedies[v.Reason]}
	}
	return nil
}

// NothingToDo returns an error with plan.ExitNothing; why is its reason.
func NothingToDo(why string) error {
	return &plan.Error{Err: errors.New(why + ": nothing to do"), Exit: plan.ExitNothing}
}

// oldestVersion is the oldest of some versions; empty if none is one.
func oldestVersion(all iter.Seq[string]) string {
	var least version.Version
	for text := range all {
		if v, err := version.Parse(text); err == nil && (least.IsZero() || v.Less(least)) {
			least = v
		}
	}
	if least.IsZero() {
		return ""
	}
	return least.String()
}
