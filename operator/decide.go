package operator

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/util/intstr"

	"constellation/engine/version"
	"constellation/operator/api/v1alpha1"
)

// Times of the policy, all measured by our own clock. Creating is short because the
// cloud accepts a request or does not; joining is as long as the slowest machine that
// was seen to join.
const (
	createDeadline  = 5 * time.Minute
	joinDeadline    = 30 * time.Minute
	drainDeadline   = 15 * time.Minute
	postponement    = 10 * time.Minute
	upgradeRetry    = 2 * time.Minute
	pausedGivesBack = 10 * time.Minute
)

// Decide returns what to do next to bring the world to spec, and what to tell about
// it. It is pure, and all policy is in it and in the table of rules.
//
// The actions are independent of each other: each is safe by itself, in any order,
// when the others fail, when it is done twice, and when the world has moved on since
// it was observed. So a reader may go through the rules one by one, and whoever acts
// may stop after any of them.
func Decide(spec v1alpha1.NodeVersionSpec, w world) *decision { return plan(spec, w, everyRule) }

// plan decides with one rule switched off; everyRule is none.
func plan(spec v1alpha1.NodeVersionSpec, w world, off rule) *decision {
	d := &decision{off: off, spec: spec, w: w}
	d.read()
	d.kubernetes()
	for i := range d.places {
		d.carry(&d.places[i])
	}
	for i := range w.intents {
		d.settle(&w.intents[i])
	}
	d.strays()
	d.begin()
	d.cordons()
	d.marks()
	d.retries()
	d.autoscaling()
	return d
}

// decision is the working state of one call of decide.
type decision struct {
	off  rule
	spec v1alpha1.NodeVersionSpec
	w    world

	*lookup
	groups  map[string]*group
	places  []replacement      // those under way, by place
	donors  map[string]bool    // names of nodes with a replacement
	leaving map[string]*intent // by ID of the machine
	tracked map[string]bool    // IDs and tokens that an intent speaks of
	taken   map[int]bool       // places that an intent holds
	lost    []*instance        // machines of ours that lost their intent
	// A control plane is on its way in or out beside the one place: its intent was
	// deleted, or it is bound to leave by an intent that holds no place.
	looseControlPlane bool
	cordoned          map[string]bool // nodes whose cordon is meant
	refused           string          // why the target is not gone to; empty: it is
	cpDone            bool            // every control plane is at the target, and none on its way in or out
	cpWork            bool            // a control plane is to be replaced
	cpHeld            bool            // one that is to be replaced is held by its owner
	cpUnknown         bool            // the cloud does not describe one's machine
	inFlight          int             // machines beyond those that the groups shall have, or upgraded in place
	surge             int
	stuck             map[string]int // upgrades in place that do not get on, by group, in lower case
	stuckPlaces       int            // that these hold

	actions []action
	waits   []wait
	// alone says that the cluster's nodes are not to be touched by others: some are being replaced
	// or upgraded, or are to be.
	alone bool
}

// replacement is an intent with what it speaks of; each of donor, machine and heir
// may be missing.
type replacement struct {
	*intent
	place   int
	donor   *node
	machine *instance
	heir    *node
}

// placePrefix begins the names of intents that hold a place of the surge budget. Names
// are unique, so two leaders cannot exceed the budget, whatever they last saw.
const (
	placePrefix   = "replace-"
	machinePrefix = "machine-"
)

func placeOf(name string) (int, bool) {
	s, ok := strings.CutPrefix(name, placePrefix)
	if !ok {
		return 0, false
	}
	n, err := strconv.Atoi(s)
	return n, err == nil && n >= 0
}

// read orders what was observed.
func (d *decision) read() {
	d.groups, d.leaving = make(map[string]*group, 2*len(d.w.groups)), map[string]*intent{}
	d.tracked, d.cordoned, d.donors, d.taken, d.stuck = map[string]bool{}, map[string]bool{}, map[string]bool{}, map[int]bool{}, map[string]int{}
	if d.lookup = d.w.found; d.lookup == nil || !byName(d.w.nodes) {
		d.w.nodes = sorted(d.w.nodes) // a copy, because they are judged
		d.lookup = lookupWithout(&d.w, d.off)
	}
	for i := range d.w.groups {
		g := &d.w.groups[i]
		d.groups[g.id], d.groups[strings.ToLower(g.id)] = g, g
	}
	for i := range d.w.intents {
		in := &d.w.intents[i]
		_, place := placeOf(in.name)
		if in.goal == v1alpha1.LeaveGoal {
			d.leaving[d.idOf(in.machine)] = in
			d.looseControlPlane = d.looseControlPlane || !place && d.roleOf(in) == v1alpha1.ControlPlaneRole
		} else if in.refills() {
			d.looseControlPlane = d.looseControlPlane || d.roleOf(in) == v1alpha1.ControlPlaneRole
		}
		if in.machine != "" {
			d.tracked[d.idOf(in.machine)] = true
		}
		if in.token != "" {
			d.tracked[in.token] = true
		}
		if p, ok := placeOf(in.name); ok {
			d.taken[p] = true
			if d.when(ruleInPlaceStuck, d.stands(in)) {
				d.stuck[strings.ToLower(in.group)]++
				d.stuckPlaces++
			} else {
				d.inFlight++
			}
			if in.goal == v1alpha1.UpgradeGoal {
				d.donors[in.node] = true
			}
			if in.goal == v1alpha1.JoinGoal {
				d.places = append(d.places, d.replacement(in, p))
			}
			if in.donor != "" {
				d.donors[in.donor] = true
			}
		}
	}
	slices.SortFunc(d.places, func(a, b replacement) int { return cmp.Compare(a.place, b.place) })
	for i := range d.w.instances {
		m := &d.w.instances[i]
		leaves := m.state == "Terminating" && d.machineOf[m.id] == nil && !d.tracked[m.id] && !d.tracked[m.token]
		lost := d.lostHeir(m)
		if lost {
			d.lost = append(d.lost, m)
		}
		if g := d.group(m.group); g != nil && g.role == v1alpha1.ControlPlaneRole {
			d.looseControlPlane = d.looseControlPlane || lost || leaves
		}
		if d.when(ruleStrayBudget, lost || leaves) {
			d.inFlight++
		}
	}
	confirmed := 0
	for i := range d.w.nodes {
		n := &d.w.nodes[i]
		d.looseControlPlane = d.looseControlPlane || d.halfGone(n) && !d.leaves(n)
		if n.confirmed { // no others raise what is a part of all
			confirmed++
		}
	}
	d.surge = surge(d.spec.Rollout.MaxSurge, confirmed-d.doubles())
	d.refused = d.refuse()
	d.controlPlanes()
}

// byName reports whether nodes are in the order of their names.
func byName(nodes []node) bool {
	for i := 1; i < len(nodes); i++ {
		if nodes[i].name < nodes[i-1].name {
			return false
		}
	}
	return true
}

// sorted returns a copy of nodes in the order of their names. It sorts pointers, because
// a node is large.
func sorted(nodes []node) []node {
	if byName(nodes) {
		return slices.Clone(nodes)
	}
	order := make([]*node, len(nodes))
	for i := range nodes {
		order[i] = &nodes[i]
	}
	slices.SortStableFunc(order, func(a, b *node) int { return strings.Compare(a.name, b.name) })
	out := make([]node, len(nodes))
	for i, n := range order {
		out[i] = *n
	}
	return out
}

// doubles counts the nodes beyond those that there shall be: of a replacement whose
// donor and heir are both Nodes, one is to go. One whose heir has not joined has none. An
// heir that lost its intent is one as well.
func (d *decision) doubles() int {
	n := 0
	for _, m := range d.lost {
		if d.machineOf[m.id] != nil {
			n++
		}
	}
	for i := range d.w.intents {
		in := &d.w.intents[i]
		if _, ok := placeOf(in.name); !ok || d.nodes[in.donor] == nil {
			continue
		}
		if m := d.tokens[in.token]; m != nil && d.machineOf[m.id] != nil {
			n++
		}
	}
	return n
}

func (d *decision) replacement(in *intent, place int) replacement {
	r := replacement{intent: in, place: place, donor: d.nodes[in.donor], machine: d.tokens[in.token]}
	if r.machine != nil {
		r.heir = d.machineOf[r.machine.id]
	}
	return r
}

// idOf returns the ID of a machine as the cloud writes it now.
func (d *decision) idOf(id string) string {
	if m := d.instance(id); m != nil {
		return m.id
	}
	return id
}

// lostHeir reports whether m was created by us to replace a node that is still there,
// and its intent is gone, because somebody has deleted it.
func (d *decision) lostHeir(m *instance) bool {
	if m.token == "" || d.tracked[m.token] || gone(m) {
		return false
	}
	n := d.machineOf[m.id]
	replaced, pinned := d.madeFor(m)
	pinned = pinned && d.off != ruleMadeFor
	if n == nil || !known(n) || d.leaves(n) {
		// Once what it was made for is gone it is a machine like any other, whatever its
		// Node claims or keeps to itself.
		return !pinned || !d.w.complete || replaced != nil && !gone(replaced)
	}
	if !d.atTarget(n) || d.inPlace(n) {
		return false
	}
	donor := d.donorOf(m, n)
	return donor != nil && d.outdated(donor)
}

// donorOf returns the node that m was made to replace, if that is still a node; nil:
// there is none. n is the node of m. The token of m says which it is. The Node of one
// that an older operator has created says it, and is believed if its donor agrees.
func (d *decision) donorOf(m *instance, n *node) *node {
	replaced, pinned := d.madeFor(m)
	switch {
	case d.off == ruleMadeFor:
		return d.nodes[n.donor]
	case pinned && replaced != nil:
		return d.machineOf[replaced.id]
	case pinned:
		return nil
	}
	if donor := d.nodes[n.donor]; donor != nil && donor.heir == n.name {
		return donor
	}
	return nil
}

// surge returns how many machines there may be beyond those that shall be.
func surge(max *intstr.IntOrString, nodes int) int {
	if max == nil {
		return 1
	}
	n, err := intstr.GetScaledValueFromIntOrPercent(max, nodes, true)
	if err != nil || n < 1 {
		return 1
	}
	return n
}

func gone(m *instance) bool { return m != nil && m.state == "Terminated" }

// known reports whether it is certain what n is made from.
func known(n *node) bool {
	return n.confirmed && n.image != "" && n.components != "" && n.providerID != ""
}

// atTarget reports whether n is what the target says. The image of a node that is
// upgraded in place stays.
func (d *decision) atTarget(n *node) bool {
	return n.confirmed && n.components == d.spec.KubernetesComponentsReference && (strings.EqualFold(n.image, d.spec.Image) || d.inPlace(n))
}

// inPlace reports whether n is upgraded as it is.
func (d *decision) inPlace(n *node) bool {
	g := d.group(n.group)
	return g != nil && g.strategy == v1alpha1.InPlaceStrategy
}

func (d *decision) leaves(n *node) bool { return d.leaving[n.providerID] != nil }

func (d *decision) group(id string) *group {
	if g := d.groups[id]; g != nil {
		return g
	}
	return d.groups[strings.ToLower(id)]
}

// roleOf returns the role of the machine of an intent. What the cloud says comes before
// what was written down, which may have been a Node's claim.
func (d *decision) roleOf(in *intent) v1alpha1.Role {
	m := d.instance(in.machine)
	if m == nil {
		m = d.tokens[in.token]
	}
	if m != nil {
		if g := d.group(m.group); g != nil {
			return g.role
		}
	}
	if g := d.group(in.group); g != nil {
		return g.role
	}
	if n := d.nodes[in.donor]; n != nil {
		return n.role
	}
	return ""
}

// outdated reports whether n is to be replaced or upgraded, now or later.
func (d *decision) outdated(n *node) bool {
	return d.must(ruleKnown, known(n)) && !d.atTarget(n) && !n.obsolete && !d.leaves(n) && d.group(n.group) != nil &&
		d.must(ruleKeepWorkers, n.role == v1alpha1.ControlPlaneRole || !d.spec.Rollout.KeepWorkers)
}

// postponed reports whether n is not to be replaced now. A replacement that is under way is
// given up, unless its donor cannot stay any more.
func (d *decision) postponed(n *node) bool { return d.w.now.Before(n.postponed) || d.held(n) }

// held reports whether the owner of n wants it left as it is.
func (d *decision) held(n *node) bool {
	g := d.group(n.group)
	return !d.must(ruleHeld, !n.held && (g == nil || !g.held))
}

// stopped reports whether nothing new is to begin.
func (d *decision) stopped() bool {
	return !d.must(ruleStoppedBegins, !d.spec.Rollout.Paused && !d.spec.Rollout.Cancel) || d.refused != ""
}

// controlPlanes finds out how far the control planes are.
func (d *decision) controlPlanes() {
	d.cpDone = false
	for i := range d.w.nodes {
		n := &d.w.nodes[i]
		if n.role == v1alpha1.ControlPlaneRole {
			d.cpDone = true
		}
	}
	for i := range d.w.nodes {
		n := &d.w.nodes[i]
		if n.role != v1alpha1.ControlPlaneRole {
			continue
		}
		d.cpUnknown = d.cpUnknown || !n.confirmed
		d.cpWork = d.cpWork || d.outdated(n)
		d.cpHeld = d.cpHeld || d.outdated(n) && d.held(n)
		d.cpDone = d.cpDone && d.atTarget(n) && !d.leaves(n) && !n.obsolete
	}
	for i := range d.w.intents {
		if d.roleOf(&d.w.intents[i]) == v1alpha1.ControlPlaneRole {
			d.cpDone = false
		}
	}
	d.cpDone = d.cpDone && !d.cpComes() // one may be about to join
}

// refuse says why the target cannot be gone to, whatever the cluster does.
func (d *decision) refuse() string {
	want, err := version.Parse(d.spec.KubernetesClusterVersion)
	if err != nil {
		return err.Error()
	}
	newest := version.Version{}
	seen := map[string]bool{} // thousands of nodes run one or two versions
	see := func(s string) {
		if seen[s] {
			return
		}
		seen[s] = true
		if v, err := version.Parse(s); err == nil && (newest.IsZero() || newest.Less(v)) {
			newest = v
		}
	}
	// A kubelet reports its own version. A worker's is never above what was published.
	for i := range d.w.nodes {
		if n := &d.w.nodes[i]; n.role == v1alpha1.ControlPlaneRole || d.off == ruleOwnVersions {
			see(n.kubelet)
		}
	}
	see(d.w.versions[d.w.before.JoinComponents.ControlPlane])
	if d.w.run.phase != "" && d.w.run.phase != "download" && d.w.run.phase != "plan" {
		see(d.w.run.version) // an apply that failed may have switched the API server
	}
	if newest.IsZero() {
		return ""
	}
	if !d.must(ruleNeverDown, !want.Less(newest)) {
		return fmt.Sprintf("the cluster runs Kubernetes %s already and never goes down to %s; set kubernetesClusterVersion to %s or newer", newest, want, newest)
	}
	if have, err := version.Parse(d.w.versions[d.w.before.JoinComponents.ControlPlane]); err == nil && (have.Major() != want.Major() || want.Minor() > have.Minor()+1) {
		return fmt.Sprintf("Kubernetes %s is more than one minor version above %s; go to v%d.%d first", want, have, have.Major(), have.Minor()+1)
	}
	return ""
}

// kubernetes brings the control plane's Kubernetes to the target through the agent,
// once per target, then lets joining machines have it, role by role, and gives groups
// their image. What is published is the memory of what was done: no API server is
// asked which version it is.
func (d *decision) kubernetes() {
	pub, want := d.w.before.JoinComponents, d.spec.KubernetesComponentsReference
	if pub.ControlPlane == "" || pub.Worker == "" {
		if first := joinComponents(d.spec, pub, d.w); first != pub {
			d.publish(first)
		} else {
			d.wait("ComponentsUnknown", "what joining machines shall install was never published, and the control plane does not run the target's Kubernetes", v1alpha1.Reference{}, time.Time{})
		}
		return
	}
	if d.refused != "" {
		d.wait("TargetRefused", d.refused, v1alpha1.Reference{}, time.Time{})
		return
	}
	if pub.ControlPlane != want {
		if d.upgraded(pub.ControlPlane) {
			pub.ControlPlane = want
			d.publish(pub)
		} else {
			d.upgrade()
		}
		return
	}
	if d.spec.Rollout.Cancel {
		return // groups and workers stay as they are
	}
	if pub.Worker != want && d.must(ruleWorkersLast, d.cpDone) {
		if d.when(ruleSecondPublish, true) {
			pub.Worker = want
			d.publish(pub)
		}
	}
	for i := range d.w.groups {
		g := &d.w.groups[i]
		given := pub.Worker
		if g.role == v1alpha1.ControlPlaneRole {
			given = pub.ControlPlane
		}
		if given == want && !g.missing && !strings.EqualFold(g.image, d.spec.Image) {
			d.do(action{kind: setGroupImage, group: g.id, image: d.spec.Image})
		}
	}
}

// upgraded reports whether control planes may be made from the target's components.
func (d *decision) upgraded(published string) bool {
	r, want := d.w.run, d.spec.KubernetesClusterVersion
	done := r.phase == "done" && r.version == want && r.components == d.spec.KubernetesComponentsReference
	return d.must(ruleAgentFirst, d.w.versions[published] == want || d.when(ruleOnce, done))
}

func (d *decision) upgrade() {
	r := d.w.run
	same, host := d.aimsAt(r), d.agent()
	switch {
	case r.active():
		return // seen in status.upgrade
	case d.stopped():
		return
	case same && r.phase == "failed" && !d.when(ruleRetry, true):
		return
	case same && r.phase == "failed" && d.w.now.Before(r.ended.Add(upgradeRetry)) && !again(d.nodes[r.node], r):
		d.wait("UpgradeFailed", fmt.Sprintf("the upgrade of Kubernetes to %s on %s failed: %s", r.version, r.node, shorten(r.line)), ref(r.node), r.ended.Add(upgradeRetry))
	case d.isBarred():
	case d.w.autoscaler.running:
		d.wait("AutoscalerRuns", "the cluster autoscaler has not stopped yet", v1alpha1.Reference{}, time.Time{})
	case d.cpMoves():
		d.wait("ControlPlaneMoves", "a control plane is on its way in or out; Kubernetes is upgraded when it has settled", v1alpha1.Reference{}, time.Time{})
	case host == nil:
		d.wait("NoControlPlane", "no control plane is Ready whose agent could upgrade Kubernetes", v1alpha1.Reference{}, time.Time{})
	default:
		a := action{kind: startUpgrade, node: host.name, version: d.spec.KubernetesClusterVersion, components: d.spec.KubernetesComponentsReference}
		if same {
			a.ended = r.ended
		}
		d.do(a)
	}
}

// isBarred reports whether nothing may begin now, and says what is waited for.
func (d *decision) isBarred() bool {
	if d.w.barred && d.w.bar != "" {
		d.wait("NodesTaken", d.w.bar, v1alpha1.Reference{}, time.Time{})
	}
	return d.w.barred
}

// cpMoves reports whether a control plane is joining or leaving.
func (d *decision) cpMoves() bool {
	for i := range d.w.intents {
		if d.roleOf(&d.w.intents[i]) == v1alpha1.ControlPlaneRole {
			return true
		}
	}
	return false
}

// cpComes reports whether the cloud has a machine of a control plane that is no Node yet.
func (d *decision) cpComes() bool {
	return slices.ContainsFunc(d.w.instances, func(m instance) bool {
		g := d.group(m.group)
		return g != nil && g.role == v1alpha1.ControlPlaneRole && d.machineOf[m.id] == nil && !gone(&m)
	})
}

// agent returns the control plane whose agent upgrades Kubernetes: the one that the
// operator is on, whose socket it has.
func (d *decision) agent() *node {
	if n := d.nodes[d.w.leader]; n != nil && n.ready && n.role == v1alpha1.ControlPlaneRole && !d.leaves(n) {
		return n
	}
	for i := range d.w.nodes {
		if n := &d.w.nodes[i]; n.ready && n.role == v1alpha1.ControlPlaneRole && !d.leaves(n) {
			return n
		}
	}
	return nil
}

func (d *decision) publish(j v1alpha1.JoinComponents) {
	d.do(action{kind: publishComponents, join: j})
}

// carry does the next thing for a replacement that is under way.
func (d *decision) carry(r *replacement) {
	switch {
	case r.machine == nil:
		d.create(r)
	case gone(r.machine):
		if r.heir == nil { // else its Node goes first
			d.do(action{kind: clearIntent, intent: *r.intent})
		}
	case d.when(ruleHeirStays, d.replaced(r)):
		if r.heir == nil {
			d.wait("IntentSettles", fmt.Sprintf("the etcd member of %s votes, and its Node is not seen", r.machine.name), v1alpha1.Reference{Kind: "PendingNode", Name: r.name}, time.Time{})
			return
		}
		d.do(action{kind: clearIntent, intent: *r.intent}) // the donor goes as one that is half gone
	case d.unneeded(r) || r.donor != nil && d.postponed(r.donor):
		d.giveUp(r)
	case r.heir == nil:
		late := d.w.now.After(r.machine.since.Add(joinDeadline)) || r.machine.state == "Failed"
		if d.when(ruleOverdue, late) {
			d.postpone(r, "")
			return
		}
		d.wait("MachineJoins", fmt.Sprintf("machine %s, which replaces %s, has not joined yet; it is given up when its time is over", r.machine.name, r.intent.donor), v1alpha1.Reference{Kind: "PendingNode", Name: r.name}, r.machine.since.Add(joinDeadline))
	default:
		d.handOver(r)
	}
}

// unneeded reports whether the donor of r is not to be replaced by r any more.
func (d *decision) unneeded(r *replacement) bool {
	if r.machine != nil && d.leaving[r.machine.id] != nil || r.heir != nil && d.halfGone(r.heir) {
		return true
	}
	if r.donor == nil || !r.donor.confirmed {
		return false
	}
	// A donor whose member has left etcd cannot stay, so its heir has to.
	if !d.halfGone(r.donor) && (known(r.donor) && d.atTarget(r.donor) || r.donor.obsolete || d.leaves(r.donor) || !d.must(ruleInPlace, !d.inPlace(r.donor)) || d.upgrades(r.donor)) {
		return true
	}
	for i := range d.places {
		if o := &d.places[i]; o.intent.donor == r.intent.donor && o.place < r.place {
			return true
		}
	}
	for i := range d.w.intents { // one that is already bound to the donor
		if o := &d.w.intents[i]; o.name != r.name && o.donor == r.intent.donor && o.machine == r.donor.providerID {
			return true
		}
	}
	return r.heir != nil && r.heir.obsolete
}

// replaced reports whether the donor of r has left etcd, and the heir votes in its
// place. The intent under which that happened was deleted by somebody. It is settled
// all the same that the donor goes, and the heir must not be given up any more,
// however long the donor's drain takes. Members are not known to be gone by Nodes,
// which may not be seen.
func (d *decision) replaced(r *replacement) bool {
	return d.roleOf(r.intent) == v1alpha1.ControlPlaneRole && r.donor != nil && !d.isMember(r.donor.name) && d.votes(r.machine.name) &&
		(r.heir == nil || d.donorOf(r.machine, r.heir) == r.donor)
}

// create asks the cloud for the machine of an intent. It is the same request however
// often it is made, since the token is the same.
func (d *decision) create(r *replacement) {
	late := d.w.now.After(r.deadline)
	needed := r.donor != nil && d.outdated(r.donor) && !d.held(r.donor) && !d.unneeded(r)
	switch role, g := d.roleOf(r.intent), d.group(r.group); {
	case late && !d.w.complete:
		d.wait(reasonPartial, fmt.Sprintf("whether the cloud has made a machine for %s is known when it lists all machines again", r.intent.donor), v1alpha1.Reference{Kind: "PendingNode", Name: r.name}, time.Time{})
	case !d.must(ruleNoLateCreate, !late):
		// A request that is still on its way has arrived or failed by now.
		if needed && !d.postponed(r.donor) {
			d.postpone(r, "the cloud has not made its machine")
		} else if d.when(ruleUnseenOverdue, true) {
			d.do(action{kind: clearIntent, intent: *r.intent})
		}
	case !needed:
		if !d.when(ruleUnseenKept, true) {
			d.do(action{kind: clearIntent, intent: *r.intent})
			return
		}
		d.wait("IntentSettles", fmt.Sprintf("%s needs no replacement any more; whether the cloud has made a machine for it is known soon", r.intent.donor), v1alpha1.Reference{Kind: "PendingNode", Name: r.name}, r.deadline)
	case d.lostHeirFor(r.donor) != nil:
		d.wait("IntentSettles", fmt.Sprintf("a machine that can replace %s is there already; its intent was deleted", r.intent.donor), v1alpha1.Reference{Kind: "PendingNode", Name: r.name}, r.deadline)
	case role == v1alpha1.ControlPlaneRole && !d.must(ruleCountedTwice, !d.looseControlPlane):
		d.wait("ControlPlaneMoves", "another control plane is on its way in or out; the next one waits until it has settled", v1alpha1.Reference{Kind: "PendingNode", Name: r.name}, r.deadline)
	case !d.mayCreate(role, g):
	default:
		d.do(action{kind: createInstance, intent: *r.intent})
	}
}

// mayCreate reports whether a new machine of a group would be at the target, and
// nobody else changes the number of machines meanwhile. It says what it waits for.
func (d *decision) mayCreate(role v1alpha1.Role, g *group) bool {
	switch {
	case g == nil || d.refused != "":
		return false
	case g.missing:
		d.wait("GroupMissing", fmt.Sprintf("the cloud does not list group %s, so none of its machines can be made; delete its ScalingGroup if it is gone", g.name), v1alpha1.Reference{Kind: "ScalingGroup", Name: g.name}, time.Time{})
		return false
	case !d.must(ruleWholeList, d.w.complete):
		d.wait(reasonPartial, "the cloud did not list all machines, so no more are made", v1alpha1.Reference{}, time.Time{})
		return false
	case !d.must(ruleCountedTwice, d.inFlight <= d.surge):
		d.wait("BudgetExceeded", fmt.Sprintf("%d machines are on their way in or out already, and %d may be", d.inFlight, d.surge), v1alpha1.Reference{}, time.Time{})
		return false
	case !d.must(ruleAutoscalerStopped, !d.w.autoscaler.running):
		d.wait("AutoscalerRuns", "the cluster autoscaler has not stopped yet", v1alpha1.Reference{}, time.Time{})
		return false
	case !d.must(rulePublishedFirst, d.published(role)):
		return false
	case !d.must(ruleGroupImage, strings.EqualFold(g.image, d.spec.Image)):
		d.wait("GroupImage", fmt.Sprintf("the cloud makes machines of group %s from another image yet", g.name), v1alpha1.Reference{Kind: "ScalingGroup", Name: g.name}, time.Time{})
		return false
	case !d.must(ruleControlPlaneFirst, role == v1alpha1.ControlPlaneRole || d.cpDone):
		d.wait("ControlPlanesFirst", "workers wait until all control planes are at the target", v1alpha1.Reference{}, time.Time{})
		return false
	}
	return true
}

// giveUp binds the intent to the heir: the machine goes, the donor stays.
func (d *decision) giveUp(r *replacement) {
	in := *r.intent
	in.goal, in.machine, in.node = v1alpha1.LeaveGoal, r.machine.id, r.machine.name
	d.do(action{kind: bindIntent, intent: in})
}

// postpone notes on the donor that others come first. The intent is given up after
// that, so that a crash in between cannot make the same attempt begin again.
func (d *decision) postpone(r *replacement, why string) {
	switch {
	case r.donor != nil && d.outdated(r.donor):
		d.do(action{kind: postponeNode, node: r.donor.name, until: d.w.now.Add(postponement)})
		d.wait("Postponed", fmt.Sprintf("the replacement of %s is tried again later: %s", r.donor.name, cmp.Or(why, "its new machine did not join in time")), ref(r.donor.name), d.w.now.Add(postponement))
	case r.machine != nil:
		d.giveUp(r)
	}
}

// handOver lets the heir, which is a Node, take the donor's place.
func (d *decision) handOver(r *replacement) {
	h, donor := r.heir, r.donor
	overdue := d.w.now.After(r.machine.since.Add(joinDeadline))
	worker := h.role != v1alpha1.ControlPlaneRole
	begun := donor != nil && donor.heir == h.name
	switch {
	case donor == nil:
		d.orphaned(r)
		return
	case !donor.confirmed:
		d.cordoned[donor.name] = begun
		d.wait("MachineUnknown", fmt.Sprintf("the cloud does not describe the machine of %s at the moment, so it stays", donor.name), ref(donor.name), time.Time{})
		return
	case d.mispaired(r):
		// Without the intent the machine is found again for the one that it belongs to.
		d.do(action{kind: clearIntent, intent: *r.intent})
		return
	case !known(h):
		if d.when(ruleOverdue, overdue) {
			d.postpone(r, "")
			return
		}
		d.wait("HeirUnknown", fmt.Sprintf("it is not known yet what %s runs", h.name), ref(h.name), time.Time{})
		return
	case !d.must(ruleHeirVersion, d.atTarget(h)):
		d.giveUp(r)
		return
	case worker && !d.cpDone:
		if d.cpWork && r.place == 0 {
			d.giveUp(r)
			return
		}
		d.cordoned[donor.name] = begun
		d.wait("ControlPlanesFirst", "workers wait until all control planes are at the target", ref(donor.name), time.Time{})
		return
	case !begun && h.donor != donor.name:
		// The intent says what it replaces, and the Node is only to repeat it.
		if d.when(ruleHeirDenies, d.denies(r)) {
			d.postpone(r, h.name+", its new machine, does not keep the annotation that names what it replaces")
			return
		}
		d.do(action{kind: adoptHeir, node: h.name, donor: donor.name})
		return
	}
	drainOverdue := donor.cordon == cordonedByUs && d.w.now.After(donor.cordonedSince.Add(drainDeadline))
	late := overdue && !begun || begun && drainOverdue
	switch {
	case !d.must(ruleHeirReady, h.ready):
		d.heirWaits(r, late, "HeirNotReady", fmt.Sprintf("%s, which replaces %s, is not Ready%s", h.name, donor.name, prefixed(": pod ", h.lacks)))
		return
	case !d.must(ruleHeirOpen, h.cordon == uncordoned):
		d.heirWaits(r, late, "HeirCordoned", fmt.Sprintf("%s, which replaces %s, is cordoned; uncordon it", h.name, donor.name))
		return
	case !worker && !d.votes(h.name):
		d.heirWaits(r, late, "HeirNotVoting", fmt.Sprintf("the etcd member of %s is not a started, healthy voter", h.name))
		return
	case !begun || donor.cordon == uncordoned:
		d.cordoned[donor.name] = true
		d.do(action{kind: cordonNode, node: donor.name, heir: h.name})
		return
	}
	d.cordoned[donor.name] = true
	switch {
	case !d.must(ruleLeaseMoved, d.w.leader != donor.name):
		d.do(action{kind: yieldLease, node: donor.name})
	case !d.must(ruleDrained, donor.drained):
		d.drain(donor)
		if d.when(ruleBlockedGoesBy, drainOverdue && d.othersWait(donor)) {
			d.postpone(r, "its drain is blocked: "+shorten(donor.blocker))
		}
	case !worker && !d.othersHealthy(donor.name):
		d.wait("EtcdUnhealthy", d.sickBut(donor.name), ref(donor.name), time.Time{})
	default:
		in := *r.intent
		in.goal, in.machine, in.node = v1alpha1.LeaveGoal, donor.providerID, donor.name
		d.do(action{kind: bindIntent, intent: in})
	}
}

// mispaired reports whether r's machine was created to replace another node than r's donor.
func (d *decision) mispaired(r *replacement) bool {
	if d.off == ruleMadeFor {
		return r.heir.donor != "" && r.heir.donor != r.intent.donor
	}
	replaced, _ := d.madeFor(r.machine)
	return replaced != nil && replaced.id != r.donor.providerID
}

// denies reports whether the heir of r has had more time to take the note of its donor
// than it needs.
func (d *decision) denies(r *replacement) bool {
	return d.w.now.After(r.machine.since.Add(joinDeadline + createDeadline))
}

// prefixed is a text with what introduces it; empty if there is none.
func prefixed(with, text string) string {
	if text == "" {
		return ""
	}
	return with + text
}

// heirWaits waits for an heir, as long as it has time.
func (d *decision) heirWaits(r *replacement, late bool, reason, message string) {
	if d.when(ruleOverdue, late) {
		d.postpone(r, message)
		return
	}
	if r.donor.heir == r.heir.name {
		d.cordoned[r.donor.name] = true
	}
	d.wait(reason, message, ref(r.heir.name), time.Time{})
}

// orphaned ends a replacement whose donor's Node is gone. The heir takes its place if
// somebody deleted it. If another node was its heir, the replacement was begun from an
// old view, and the machine is one too many.
func (d *decision) orphaned(r *replacement) {
	for i := range d.w.nodes {
		if n := &d.w.nodes[i]; n.confirmed && n.name != r.heir.name && d.sameDonor(r, n) {
			d.giveUp(r)
			return
		}
	}
	switch {
	case r.heir.donor != r.intent.donor && !d.when(ruleHeirDenies, d.denies(r)): // whose place it has taken, whether it is known or not
		d.do(action{kind: adoptHeir, node: r.heir.name, donor: r.intent.donor})
	case d.when(ruleVanishedDonor, true):
		d.do(action{kind: clearIntent, intent: *r.intent})
	}
}

// sameDonor reports whether the machine of n was created to replace the same node as
// that of r.
func (d *decision) sameDonor(r *replacement, n *node) bool {
	if d.off == ruleMadeFor {
		return n.donor == r.intent.donor
	}
	m := d.instance(n.providerID)
	return m != nil && m.replaces != "" && m.replaces == r.machine.replaces
}

func (d *decision) drain(n *node) {
	d.do(action{kind: drainNode, node: n.name})
	if n.blocker != "" {
		d.wait("DrainBlocked", fmt.Sprintf("%s cannot be emptied: %s", n.name, shorten(n.blocker)), ref(n.name), time.Time{})
	}
}

// othersWait reports whether another node could be replaced if n gave its place back.
func (d *decision) othersWait(n *node) bool {
	if d.freePlace(n.role) >= 0 && d.inFlight < d.surge {
		return false
	}
	for i := range d.w.nodes {
		if o := &d.w.nodes[i]; o.name != n.name && o.role == n.role && d.candidate(o) {
			return true
		}
	}
	return false
}

// settle carries on with an intent that does not replace: one that is bound to a
// machine that goes, or one that tracks a machine nobody knows.
func (d *decision) settle(in *intent) {
	switch in.goal {
	case v1alpha1.LeaveGoal:
		d.leave(in)
		return
	case v1alpha1.UpgradeGoal:
		d.upgradeInPlace(in)
		return
	case v1alpha1.JoinGoal:
	}
	if _, ok := placeOf(in.name); ok {
		return
	}
	if in.refills() {
		d.refill(in)
		return
	}
	m, n := d.instance(in.machine), d.machineOf[in.machine]
	switch {
	case gone(m) || n != nil && d.joined(n):
		d.do(action{kind: clearIntent, intent: *in})
	case m != nil && m.token != "" && d.tracked[m.token]: // somebody else's heir
	case d.when(ruleOverdue, d.must(ruleStrayDeadline, d.w.now.After(in.deadline))):
		bound := *in
		bound.goal = v1alpha1.LeaveGoal
		d.do(action{kind: bindIntent, intent: bound})
	case n != nil && d.w.now.Add(joinDeadline/2).After(in.deadline): // most machines need a few minutes
		d.wait(reasonNeverReady, d.neverReady(n), ref(n.name), in.deadline)
	}
}

// joined reports whether a machine whose intent waits for it to join has done so. A join
// can break off after the Node was made, and the join service gives a machine that has a
// Node no other ticket: such a machine would stay as it is for ever. A node that its owner
// holds is left as it is.
func (d *decision) joined(n *node) bool {
	return n.ready || n.held || !d.when(ruleNeverReady, true)
}

const reasonNeverReady = "NodeNeverReady"

// neverReady says what becomes of a node whose machine does not finish its join, and what
// a person can do.
func (d *decision) neverReady(n *node) string {
	return fmt.Sprintf("Node %s has not been Ready since its machine began to join, and a machine that has a Node gets no other ticket; machine and Node are deleted when its time is over, and at once with `constellation machine revoke %s`", n.name, n.name)
}

// leave removes a machine that is bound to go: work, etcd member, machine, Node. The
// intent ends when the cloud has confirmed that the machine is gone.
func (d *decision) leave(in *intent) {
	if d.when(ruleRevoked, in.revoked) {
		d.dismiss(in)
		return
	}
	n, m := d.machineOf[in.machine], d.instance(in.machine)
	going := m != nil && (m.state == "Terminating" || m.state == "Terminated")
	name := in.node
	if n != nil {
		name = n.name
		d.cordoned[n.name] = true
	}
	if n != nil && !going {
		switch {
		case n.cordon == uncordoned:
			d.do(action{kind: cordonNode, node: n.name, heir: n.heir})
			return
		case !d.must(ruleLeaseMoved, d.w.leader != n.name):
			d.do(action{kind: yieldLease, node: n.name})
			return
		case !d.must(ruleLeavingDrained, n.drained):
			d.drain(n)
			return
		}
	}
	if d.roleOf(in) == v1alpha1.ControlPlaneRole && !d.must(ruleMemberFirst, d.memberGone(in, n, name)) {
		return
	}
	switch {
	case !going:
		d.do(action{kind: deleteInstance, machine: in.machine, node: name})
	case n != nil:
		d.do(action{kind: deleteNode, node: n.name, machine: in.machine})
	}
	if n == nil && !d.must(ruleGone, gone(m)) {
		d.wait("MachineLeaves", fmt.Sprintf("the cloud has not confirmed that machine %s is gone", in.machine), v1alpha1.Reference{Kind: "PendingNode", Name: in.name}, time.Time{})
	} else if n == nil {
		d.do(action{kind: clearIntent, intent: *in})
	}
}

// memberGone reports whether the member of a control plane that goes has left etcd,
// and takes the next step towards that otherwise.
func (d *decision) memberGone(in *intent, n *node, name string) bool {
	if len(d.w.etcd) == 0 {
		d.wait("EtcdUnknown", "the members of etcd could not be listed", v1alpha1.Reference{}, time.Time{})
		return false
	}
	i := slices.IndexFunc(d.w.etcd, func(m member) bool { return m.node == name || m.nameless && d.owns(name, m) })
	if i < 0 {
		return true
	}
	m := d.w.etcd[i]
	member := m.node
	if in.donor == name && n != nil && m.voter && m.healthy {
		heir := d.heirOf(n, in)
		if heir == "" || !d.isMember(heir) {
			// The heir was lost after the donor was bound, or has left etcd: it voted when that
			// was done. As long as the donor's member is in etcd nothing of its machine was
			// touched, and it stays what it was.
			if m := d.tokens[in.token]; d.when(ruleRevive, heir != "" || gone(m) || m == nil && d.w.complete) {
				d.do(action{kind: clearIntent, intent: *in})
			}
			return false
		}
		if !d.votes(heir) {
			d.wait("HeirNotVoting", fmt.Sprintf("the etcd member of %s is not a started, healthy voter", heir), ref(heir), time.Time{})
			return false
		}
	}
	switch {
	case !d.othersHealthy(member):
		d.wait("EtcdUnhealthy", d.sickBut(member), ref(name), time.Time{})
	case !d.must(ruleLeaderMoved, !m.leader):
		if to := d.nextLeader(name); to != "" {
			d.do(action{kind: moveLeader, node: name, heir: to})
		}
	default:
		d.do(action{kind: removeMember, node: member, voters: d.votersWithout(member)})
	}
	return false
}

// heirOf returns the name of what takes n's place and stays. A Node that is not seen
// may be there: what counts is the machine.
func (d *decision) heirOf(n *node, in *intent) string {
	if m := d.tokens[in.token]; m != nil && !gone(m) && d.leaving[m.id] == nil {
		return m.name
	}
	for i := range d.w.nodes {
		if h := &d.w.nodes[i]; h.role == v1alpha1.ControlPlaneRole && h.donor == n.name && !d.leaves(h) && !gone(d.instance(h.providerID)) {
			return h.name
		}
	}
	return ""
}

func (d *decision) votes(name string) bool {
	return slices.ContainsFunc(d.w.etcd, func(m member) bool { return m.node == name && m.voter && m.healthy })
}

// othersHealthy reports whether all members but one are started, healthy voters.
func (d *decision) othersHealthy(but string) bool {
	return d.must(ruleMembersHealthy, !slices.ContainsFunc(d.w.etcd, func(m member) bool { return m.node != but && (!m.voter || !m.healthy) }))
}

// sickBut says which other member keeps one from leaving.
func (d *decision) sickBut(name string) string {
	for _, m := range d.w.etcd {
		switch {
		case m.node == name:
		case m.nameless:
			return fmt.Sprintf("the member %s of etcd has not started, so %s cannot leave", m.node, name)
		case !m.voter:
			return fmt.Sprintf("the member of etcd on %s does not vote yet, so %s cannot leave", m.node, name)
		case !m.healthy:
			return fmt.Sprintf("the member of etcd on %s is not healthy, so %s cannot leave", m.node, name)
		}
	}
	return fmt.Sprintf("not every other member of etcd is healthy, so %s cannot leave", name)
}

func (d *decision) votersWithout(name string) int {
	n := 0
	for _, m := range d.w.etcd {
		if m.voter && m.node != name {
			n++
		}
	}
	return n
}

func (d *decision) nextLeader(but string) string {
	for _, m := range d.w.etcd {
		n := d.nodes[m.node]
		if m.node != but && m.voter && m.healthy && n != nil && !d.leaves(n) {
			return m.node
		}
	}
	return ""
}

// strays tracks what nobody tracks, and removes what is left of machines that are gone.
func (d *decision) strays() {
	for i := range d.w.instances {
		m := &d.w.instances[i]
		if n := d.machineOf[m.id]; m.name == "" || n != nil && (!d.w.joining[n.name] || d.joined(n)) || d.tracked[m.id] || m.token != "" && d.tracked[m.token] || gone(m) || m.state == "Terminating" {
			continue
		}
		if d.when(ruleTrack, true) {
			d.do(action{kind: recordIntent, intent: intent{
				name: machinePrefix + m.name, goal: v1alpha1.JoinGoal, machine: m.id, node: m.name, group: m.group, deadline: d.w.now.Add(joinDeadline),
			}})
		}
	}
	for i := range d.w.nodes {
		n := &d.w.nodes[i]
		switch {
		case n.providerID == "" || d.leaves(n):
		case d.when(ruleDeadNode, gone(d.instance(n.providerID))):
			d.do(action{kind: deleteNode, node: n.name, machine: n.providerID})
		case !n.confirmed:
		case d.when(ruleHalfGone, d.halfGone(n)) && !d.cpMoves(), n.obsolete && !d.heirInPlace(n) && (n.role != v1alpha1.ControlPlaneRole || !d.cpMoves()):
			d.do(action{kind: recordIntent, intent: intent{
				name: machinePrefix + n.name, goal: v1alpha1.LeaveGoal, machine: n.providerID, node: n.name, group: n.group, deadline: d.w.now.Add(joinDeadline),
			}})
		}
	}
	d.deadMembers()
}

// halfGone reports whether n is a control plane that was bound to leave and whose
// member has left etcd, while its intent was deleted by somebody: it goes all the
// same. A member is only removed after the bond, so this holds in any old view. It is
// known by our cordon or, where an old view has taken that off, by an heir that votes:
// heirs join one at a time, so n is not about to become a member then.
func (d *decision) halfGone(n *node) bool {
	if n.role != v1alpha1.ControlPlaneRole || len(d.w.etcd) == 0 || d.isMember(n.name) {
		return false
	}
	return n.cordon == cordonedByUs || d.when(ruleHeirVotes, d.heirVotes(n))
}

// heirVotes reports whether a node that took n's place, and stays, votes in etcd.
func (d *decision) heirVotes(n *node) bool {
	return slices.ContainsFunc(d.w.nodes, func(h node) bool {
		return h.role == v1alpha1.ControlPlaneRole && h.donor == n.name && h.name != n.name && !d.leaves(&h) && d.votes(h.name)
	})
}

func (d *decision) isMember(name string) bool {
	return slices.ContainsFunc(d.w.etcd, func(m member) bool { return m.node == name })
}

// heirInPlace reports whether n is the heir of a replacement, which is given up as one.
func (d *decision) heirInPlace(n *node) bool {
	return slices.ContainsFunc(d.places, func(r replacement) bool { return r.heir == n })
}

// deadMembers removes members of etcd whose machine and Node are gone; they only
// weaken it.
func (d *decision) deadMembers() {
	if !d.w.complete {
		return
	}
	for _, m := range d.w.etcd {
		n := d.nodes[m.node]
		exists := n != nil && n.providerID != "" || slices.ContainsFunc(d.w.instances, func(i instance) bool { return i.name == m.node && i.state != "Terminated" })
		bound := slices.ContainsFunc(d.w.intents, func(i intent) bool { return i.node == m.node && i.goal == v1alpha1.LeaveGoal })
		if m.nameless && !d.abandoned(m) {
			continue // whose member it is shows when it starts
		}
		if d.when(ruleDeadMember, !exists && !bound && !m.healthy) {
			d.do(action{kind: removeMember, node: m.node, voters: d.votersWithout(m.node)})
		}
	}
}

// A machine that joins etcd is a member before its etcd has started and told its name.
// That takes seconds, or as long as an image takes to be there.
const memberStarts = 2 * time.Minute

// owns reports whether a member that has not started is that of the machine called
// name. Its address is all that is known of it.
func (d *decision) owns(name string, m member) bool {
	return m.address != "" && slices.ContainsFunc(d.w.instances, func(i instance) bool {
		g := d.group(i.group)
		return i.name == name && i.address == m.address && !gone(&i) && (g == nil || g.role == v1alpha1.ControlPlaneRole)
	})
}

// abandoned reports whether the machine of a member that has not started is no more.
// Such a member keeps all others from joining and from leaving, so it does not wait
// until no control plane moves, unless the address of one is not known.
func (d *decision) abandoned(m member) bool {
	if d.w.now.Before(m.since.Add(memberStarts)) {
		return false
	}
	known := m.address != ""
	for i := range d.w.instances {
		o := &d.w.instances[i]
		if g := d.group(o.group); gone(o) || g != nil && g.role != v1alpha1.ControlPlaneRole {
			continue
		}
		if known && o.address == m.address {
			return false
		}
		known = known && o.address != ""
	}
	return known && d.seeControlPlanes() || !d.cpMoves() && !d.cpComes()
}

// seeControlPlanes reports whether the machine of each control plane, and of each that
// is asked for, is seen.
func (d *decision) seeControlPlanes() bool {
	for i := range d.w.nodes {
		if n := &d.w.nodes[i]; n.role == v1alpha1.ControlPlaneRole && d.instance(n.providerID) == nil {
			return false
		}
	}
	for i := range d.w.intents {
		in := &d.w.intents[i]
		if d.roleOf(in) == v1alpha1.ControlPlaneRole && in.goal == v1alpha1.JoinGoal && d.tokens[in.token] == nil && d.instance(in.machine) == nil {
			return false
		}
	}
	return true
}

// candidate reports whether a replacement of n, or its upgrade, could begin now, given a
// place.
func (d *decision) candidate(n *node) bool {
	return d.outdated(n) && !d.donors[n.name] && !d.postponed(n) && !d.halfGone(n)
}

// begin records intents for nodes that are to be replaced or upgraded, as far as there
// are places.
func (d *decision) begin() {
	if d.stopped() || len(d.w.groups) == 0 {
		return
	}
	var next []*node
	busy := map[string]int{} // replacements by group: all groups get their share
	for i := range d.places {
		busy[d.places[i].group]++
	}
	for i := range d.w.nodes {
		n := &d.w.nodes[i]
		if n.role == v1alpha1.ControlPlaneRole && d.outdated(n) && d.held(n) {
			d.wait("ControlPlaneHeld", fmt.Sprintf("%s is held as it is, and workers wait for all control planes; let it go to go on", n.name), ref(n.name), time.Time{})
		}
		if n.role == v1alpha1.ControlPlaneRole && d.must(ruleOneControlPlane, !d.cpMoves()) || n.role == v1alpha1.WorkerRole && d.must(ruleControlPlaneFirst, d.cpDone) {
			if d.candidate(n) {
				next = append(next, n)
			} else if d.outdated(n) && d.postponed(n) && !d.held(n) {
				d.wait("Postponed", fmt.Sprintf("the replacement of %s is tried again later", n.name), ref(n.name), n.postponed)
			}
		}
	}
	if len(next) > 0 && d.isBarred() {
		return
	}
	for len(next) > 0 && (d.inFlight < d.surge || len(d.lost) > 0) {
		// The group with the fewest under way comes next; within it those that were never
		// postponed, then by name.
		first := 0
		for i, n := range next {
			if o := next[first]; cmp.Or(strings.Compare(string(n.role), string(o.role)), boolOrder(!n.postponed.IsZero(), !o.postponed.IsZero()), cmp.Compare(busy[n.group], busy[o.group])) < 0 {
				first = i
			}
		}
		n := next[first]
		next = slices.Delete(next, first, first+1)
		place, inPlace := d.freePlace(n.role), !d.must(ruleInPlace, !d.inPlace(n))
		var lost *instance
		if !inPlace {
			lost = d.lostHeirFor(n)
		}
		if place < 0 || lost == nil && d.inFlight >= d.surge {
			continue // a later one may have a machine already
		}
		if n.role == v1alpha1.ControlPlaneRole && lost == nil && d.looseControlPlane {
			d.wait("ControlPlaneMoves", "another control plane is on its way in or out; the next one waits until it has settled", ref(n.name), time.Time{})
			continue
		}
		if inPlace && (d.stuckGroup(n) || !d.mayUpgrade(n)) || !inPlace && !d.mayCreate(n.role, d.group(n.group)) {
			next = slices.DeleteFunc(next, func(o *node) bool { return o.role == n.role && o.group == n.group }) // nor for these
			continue
		}
		in := intent{name: placePrefix + strconv.Itoa(place), goal: v1alpha1.JoinGoal, donor: n.name, group: n.group, deadline: d.w.now.Add(createDeadline)}
		switch {
		case inPlace:
			in = intent{name: in.name, goal: v1alpha1.UpgradeGoal, machine: n.providerID, node: n.name, group: n.group, deadline: d.w.now.Add(joinDeadline)}
			d.inFlight++
		case lost != nil:
			in.token = lost.token // takes the place that it holds already
		default:
			in.token = token(n, in.name, d.w.now)
			d.inFlight++
		}
		d.do(action{kind: recordIntent, intent: in})
		d.donors[n.name], d.taken[place] = true, true
		if in.token != "" {
			d.tracked[in.token] = true
		}
		busy[n.group]++
	}
}

// replaces reports whether the machine of n was created to replace o, by its token or by
// an intent.
func (d *decision) replaces(n, o *node) bool {
	m := d.instance(n.providerID)
	if m == nil || !n.confirmed {
		return false
	}
	return d.donorOf(m, n) == o || slices.ContainsFunc(d.w.intents, func(in intent) bool { return m.token != "" && in.token == m.token && in.donor == o.name })
}

// lostHeirFor returns a machine whose intent was lost and that can replace n.
func (d *decision) lostHeirFor(n *node) *instance {
	for _, m := range d.lost {
		if !strings.EqualFold(m.group, n.group) || d.tracked[m.token] || d.leaving[m.id] != nil || m.state == "Terminating" {
			continue
		}
		if replaced, pinned := d.madeFor(m); pinned && d.off != ruleMadeFor && (replaced == nil || replaced.id != n.providerID) {
			continue
		}
		if h := d.machineOf[m.id]; h == nil || !d.halfGone(h) && (h.donor == "" || h.donor == n.name || d.donorOf(m, h) == n) && d.atTarget(h) {
			return m
		}
	}
	return nil
}

func boolOrder(a, b bool) int {
	switch {
	case a == b:
		return 0
	case b:
		return -1
	}
	return 1
}

// freePlace returns the lowest place that no intent holds, or -1. Control planes use
// the first place only, so that two leaders cannot replace two of them at a time.
func (d *decision) freePlace(role v1alpha1.Role) int {
	places := d.surge + d.stuckPlaces
	if d.when(ruleOneControlPlane, role == v1alpha1.ControlPlaneRole) {
		places = 1
	}
	for p := range places {
		if !d.taken[p] {
			return p
		}
	}
	return -1
}

// token names a request to the cloud. Decided again from the same world it is the
// same; a later attempt has another. It ends in the mark of the machine that is
// replaced. The cloud keeps it for as long as the new machine exists, so no Node can
// change what replaces what.
func token(n *node, place string, now time.Time) string {
	sum := sha256.Sum256([]byte(n.providerID + "\x00" + place + "\x00" + now.UTC().Format(time.RFC3339Nano)))
	return hex.EncodeToString(sum[:12]) + tokenSeparator + markOf(n.providerID)
}

// cordons takes back what we did to nodes that are not to go any more.
func (d *decision) cordons() {
	for i := range d.w.nodes {
		n := &d.w.nodes[i]
		if n.heir == "" && n.cordon == uncordoned || !n.confirmed {
			continue
		}
		if d.cordoned[n.name] || n.role == v1alpha1.ControlPlaneRole && n.cordon == cordonedByUs && d.when(ruleHalfGone, !d.isMember(n.name)) {
			continue
		}
		marked := n.heir != ""
		ours := d.when(ruleUncordon, n.cordon != uncordoned && d.must(ruleForeignCordon, n.cordon == cordonedByUs))
		if marked || ours {
			d.do(action{kind: releaseNode, node: n.name, uncordon: ours})
		}
	}
}

// autoscaling pauses the autoscaler while there is something to do, and gives back
// what we took.
func (d *decision) autoscaling() {
	a := d.w.autoscaler
	work := d.when(ruleWorkBeforeGivenBack, len(d.w.intents) > 0 || d.w.run.active()) ||
		slices.ContainsFunc(d.actions, func(a action) bool { return a.kind == recordIntent })
	place := func(in intent) bool { _, ok := placeOf(in.name); return ok || in.refills() }
	d.alone = d.w.run.active() || slices.ContainsFunc(d.w.intents, place)
	if !d.stopped() {
		pub := d.w.before.JoinComponents.ControlPlane
		due := pub != "" && pub != d.spec.KubernetesComponentsReference
		for i := range d.w.nodes {
			due = due || d.candidate(&d.w.nodes[i]) && (d.w.nodes[i].role == v1alpha1.ControlPlaneRole || d.cpDone || d.cpUnknown || d.cpWork && !d.cpHeld)
		}
		work, d.alone = work || due, d.alone || due
	}
	if work {
		if a.enabled && !d.w.barred {
			d.do(action{kind: pauseAutoscaler})
		}
		return
	}
	if d.spec.Rollout.Paused && !d.spec.Rollout.Cancel && d.refused == "" {
		since := d.w.now
		if b := d.w.before.Waiting; b != nil && b.Reason == reasonPaused {
			since = b.Since.Time
		}
		until := since.Add(pausedGivesBack)
		d.wait(reasonPaused, "the rollout is paused; set spec.rollout.paused to false to go on", v1alpha1.Reference{}, time.Time{})
		if d.w.now.Before(until) && d.behind() {
			return
		}
	}
	if d.when(ruleGiveBack, !a.enabled && d.must(ruleOthersAutoscaler, a.ours)) {
		d.do(action{kind: resumeAutoscaler})
	}
}

// behind reports whether a node is to be replaced or upgraded, now or later.
func (d *decision) behind() bool {
	for i := range d.w.nodes {
		if d.outdated(&d.w.nodes[i]) {
			return true
		}
	}
	return false
}
