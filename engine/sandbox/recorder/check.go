package recorder

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"constellation/engine/cloud"
	"constellation/engine/version"
)

// Limits are the limits of a rollout. The zero value has those of a NodeVersion without
// settings.
type Limits struct {
	// Surge is the maximum number of machines beyond those at Begin. Zero means 1.
	Surge int
	// Join is how long a machine may exist without a Node or a PendingNode. Zero means
	// 30 minutes.
	Join time.Duration
	// Settle is how long two kinds of objects may contradict each other: their watches are
	// independent. Time in which a watch was interrupted does not count. Zero means 10 seconds.
	Settle time.Duration
	// Blink is how long a node may be not Ready before it counts as such, as during a restart of its
	// kubelet. Zero means one minute.
	Blink time.Duration
	// Repair is how long an old node and its replacement node may lack references to each other, and
	// how long a finished rollout may keep the autoscaler paused. Zero means one minute.
	Repair time.Duration
	// Gap is the maximum time without an answer of a service to a machine. Zero means 15 seconds.
	Gap time.Duration
	// FirstAnswer is the same for a machine that no service has answered yet. Its kube-proxy is a pod
	// that controller manager and scheduler must place, and both may just have lost their leader: a
	// Lease ends after 15 seconds and is taken within 2. Zero means 45 seconds.
	FirstAnswer time.Duration
	// NoMembers is for machines without etcd: the journal need not contain its members.
	NoMembers bool
	// Secret is the name of a Secret that the journal must contain at Begin and at End. Empty: none.
	Secret string
	// Encrypted means that API servers encrypt Secrets in etcd.
	Encrypted bool
}

func (l Limits) filled() Limits {
	or := func(d *time.Duration, by time.Duration) {
		if *d == 0 {
			*d = by
		}
	}
	or(&l.Join, 30*time.Minute)
	or(&l.Settle, 10*time.Second)
	or(&l.Blink, time.Minute)
	or(&l.Repair, time.Minute)
	or(&l.Gap, 15*time.Second)
	or(&l.FirstAnswer, 45*time.Second)
	l.Surge = max(l.Surge, 1)
	return l
}

// Rule is an invariant of a rollout.
type Rule string

// The invariants whose violation a journal can show.
const (
	// ReadyFloor: Ready nodes of a group never fall below the number at Begin.
	ReadyFloor Rule = "ready-floor"
	// SurgeBudget: the number of machines never exceeds that at Begin plus the surge; of control
	// planes never more than one more.
	SurgeBudget Rule = "surge-budget"
	// EtcdVoters: etcd never has fewer voters than at Begin, and no machine is deleted whose
	// member still exists.
	EtcdVoters Rule = "etcd-voters"
	// WorkersLast: no replacement of a worker begins while a control plane is outdated or
	// being replaced.
	WorkersLast Rule = "workers-last"
	// Pairs: an old node and its replacement node refer to each other, and an old node has one replacement.
	Pairs Rule = "pairs"
	// AutoscalerPaused: it runs if and only if no replacement is under way.
	AutoscalerPaused Rule = "autoscaler-paused"
	// MachineTracked: every machine is a Node or in a PendingNode; no Node is deleted
	// whose machine runs.
	MachineTracked Rule = "machine-tracked"
	// MachineKept: a node that is upgraded in place keeps its Node and its machine, its group gets no
	// other machine, and its kubelet is replaced while it is cordoned. A lone control plane is excepted, because it
	// cannot be drained.
	MachineKept Rule = "machine-kept"
	// BudgetKept: a workload never has fewer healthy pods than its PodDisruptionBudget demands.
	BudgetKept Rule = "budget-kept"
	// VersionSkew: no version decreases or skips a minor, no kubelet is newer than the API
	// servers that it may connect to.
	VersionSkew Rule = "version-skew"
	// ForeignCordon: nodes that others cordoned stay cordoned.
	ForeignCordon Rule = "foreign-cordon"
	// LeaseMoved: the operator does not delete the machine that it runs on.
	LeaseMoved Rule = "lease-moved"
	// ServiceAnswers: services always answer every machine, also after each
	// replacement.
	ServiceAnswers Rule = "service-answers"
	// OutageOver: after a power cut of all machines, all that exist become Ready nodes again without help.
	OutageOver Rule = "outage-over"
	// SecretsKept: in the end, each API server returns a Secret from before the rollout with the same
	// content, and etcd has it encrypted if the cluster encrypts Secrets.
	SecretsKept Rule = "secrets-kept"
	// Converged: in the end all nodes are at the target, except workers that must be kept.
	Converged Rule = "converged"
	// NothingLeft: in the end there is no surplus cordon, intent, taint, mark, lease, member or
	// machine, no unfinished run of an agent, and no copy of files that an upgrade made.
	NothingLeft Rule = "nothing-left"
	// Whole: the journal is complete enough for the check.
	Whole Rule = "whole-journal"
)

// Rules lists all rules.
var Rules = []Rule{
	ReadyFloor, SurgeBudget, EtcdVoters, WorkersLast, Pairs, AutoscalerPaused, MachineTracked, MachineKept, BudgetKept, VersionSkew, ForeignCordon, LeaseMoved, ServiceAnswers,
	OutageOver, SecretsKept, Converged, NothingLeft, Whole,
}

// Breach is a violation of an invariant.
type Breach struct {
	Time time.Time
	Rule Rule
	What string
}

// String describes the breach in one line.
func (b Breach) String() string {
	return fmt.Sprintf("%s %s: %s", b.Time.UTC().Format("15:04:05.000"), b.Rule, b.What)
}

// Check evaluates a journal of one rollout, from Begin to End, in which only the
// operator deleted machines. It returns the violations, each once, in order of
// detection.
func Check(journal []Entry, limits Limits) []Breach {
	c := &checker{limits: limits.filled(), v: newView(), since: map[string]time.Duration{}, told: map[string]bool{}, healthy: map[string]bool{}}
	for i := range journal {
		c.next(&journal[i])
	}
	switch {
	case c.start == nil:
		c.tell(Whole, "", "the journal has no beginning")
	case !c.ended:
		c.tell(Whole, "", "the journal has no end")
	}
	return c.breaches
}

// view is the observed state after some entries.
type view struct {
	now  time.Time
	seen time.Duration // time without an interrupted watch
	cut  map[string]bool

	nodes    map[string]Node
	pending  map[string]Pending
	joining  map[string]bool
	servers  map[string]string // version of the API server, by node
	machines map[string]Machine
	members  []Member
	target   *Target
	strategy *Strategy
	scaler   Scaler
	lease    string
	runs     map[string]Run
	secrets  map[string]Secret // by name
	versions map[string]string // Kubernetes versions of components that were ever a target

	lastReady map[string]time.Duration // in seen, by node
	listed    bool                     // machines and members were listed
	asked     bool
}

func newView() *view {
	return &view{
		cut: map[string]bool{}, nodes: map[string]Node{}, pending: map[string]Pending{}, joining: map[string]bool{}, servers: map[string]string{},
		machines: map[string]Machine{}, runs: map[string]Run{}, secrets: map[string]Secret{}, versions: map[string]string{}, lastReady: map[string]time.Duration{},
	}
}

// apply updates the view with one entry.
func (v *view) apply(e *Entry) {
	if !v.now.IsZero() && len(v.cut) == 0 {
		v.seen += max(0, e.Time.Sub(v.now))
	}
	v.now = e.Time
	set := func(gone bool, put, drop func()) {
		if gone {
			drop()
		} else {
			put()
		}
	}
	switch f := e.Fact.(type) {
	case *Stream:
		set(!f.Cut, func() { v.cut[f.Kind] = true }, func() { delete(v.cut, f.Kind) })
	case *Node:
		set(f.Gone, func() { v.nodes[f.Name] = *f }, func() { delete(v.nodes, f.Name); delete(v.lastReady, f.Name) })
	case *Pending:
		set(f.Gone, func() { v.pending[f.Name] = *f }, func() { delete(v.pending, f.Name) })
	case *Joining:
		set(f.Gone, func() { v.joining[f.Name] = true }, func() { delete(v.joining, f.Name) })
	case *Server:
		set(f.Gone, func() { v.servers[f.Node] = f.Version }, func() { delete(v.servers, f.Node) })
	case *Target:
		v.target = f
		v.versions[f.Components] = f.Kubernetes
	case *Strategy:
		v.strategy = f
	case *Scaler:
		v.scaler = *f
	case *Lease:
		v.lease = f.Holder
	case *Machines:
		v.machines = make(map[string]Machine, len(f.List))
		for _, m := range f.List {
			if m.State != string(cloud.Terminated) {
				v.machines[m.ID] = m
			}
		}
		v.listed = true
	case *Members:
		v.members, v.asked = f.List, true
	case *Run:
		v.runs[f.Node] = *f
	case *Secret:
		v.secrets[f.Name] = *f
	}
	for name, n := range v.nodes {
		if n.Ready {
			v.lastReady[name] = v.seen
		}
	}
}

// clone copies the parts that are compared later.
func (v *view) clone() *view {
	c := *v
	c.nodes, c.machines, c.lastReady, c.secrets = maps.Clone(v.nodes), maps.Clone(v.machines), maps.Clone(v.lastReady), maps.Clone(v.secrets)
	return &c
}

func (v *view) voters() int {
	n := 0
	for _, m := range v.members {
		if m.Name != "" && !m.Learner {
			n++
		}
	}
	return n
}

func (v *view) isMember(node string) bool {
	return slices.ContainsFunc(v.members, func(m Member) bool { return m.Name == node })
}

func (v *view) controlPlanes() int {
	n := 0
	for _, m := range v.machines {
		if m.ControlPlane {
			n++
		}
	}
	return n
}

// leaves reports whether the cloud is deleting a machine.
func (v *view) leaves(id string) bool {
	m, ok := v.machines[id]
	return v.listed && (!ok || m.State == string(cloud.Terminating))
}

// ready counts the nodes of each group that are Ready, or were within blink, and whose
// machine is not being deleted.
func (v *view) ready(blink time.Duration) map[string]int {
	count := map[string]int{}
	for name, n := range v.nodes {
		last, ever := v.lastReady[name]
		// The operator annotates the group after an answer of the cloud, which may take long. The list of machines contains it earlier.
		if group := cmp.Or(n.Group, v.machines[n.ProviderID].Group); group != "" && ever && v.seen-last <= blink && !v.leaves(n.ProviderID) {
			count[group]++
		}
	}
	return count
}

// atTarget reports whether a node matches the target. A node that is
// upgraded in place keeps its image.
func (v *view) atTarget(n Node) bool {
	return v.target != nil && (n.InPlace || n.Image == v.target.Image) && n.Components == v.target.Components
}

// replacement reports whether p replaces a node, or upgrades it in place, and whether that
// node is a worker.
func (v *view) replacement(p Pending) (replaces, worker bool) {
	if p.Goal == "Upgrade" {
		return true, !v.nodes[p.Node].ControlPlane
	}
	if p.Donor == "" {
		return false, false
	}
	if n, ok := v.nodes[p.Donor]; ok {
		return true, !n.ControlPlane
	}
	for _, m := range v.machines {
		if m.Group == p.Group {
			return true, !m.ControlPlane
		}
	}
	return true, false
}

// key distinguishes p from earlier objects of the same name.
func (p Pending) key() string {
	if p.Token == "" {
		return p.Name + " " + p.Machine
	}
	return p.Token
}

// controlPlanesSettled reports whether all are at the target and none is being replaced.
func (v *view) controlPlanesSettled() bool {
	for _, n := range v.nodes {
		if n.ControlPlane && !v.atTarget(n) {
			return false
		}
	}
	for _, p := range v.pending {
		if replaces, worker := v.replacement(p); replaces && !worker {
			return false
		}
	}
	return true
}

// keptGroups are the groups whose nodes are upgraded in place, all of them.
func (v *view) keptGroups() map[string]bool {
	kept := map[string]bool{}
	for _, n := range v.nodes {
		before, known := kept[n.Group]
		kept[n.Group] = n.InPlace && (before || !known)
	}
	return kept
}

func (v *view) upgrading() bool {
	if v.target == nil {
		return false
	}
	switch v.target.Phase {
	case "download", "plan", "apply":
		return true
	}
	return false
}

type checker struct {
	limits   Limits
	v        *view
	start    *view // at Begin
	ended    bool
	breaches []Breach
	told     map[string]bool
	since    map[string]time.Duration // in seen, since when a condition holds
	answered map[string]time.Time     // when a service answered last, by machine
	readyAt  map[string]time.Time     // when a node became Ready
	removed  time.Time                // when the last Node was deleted
	begun    map[string]bool          // replacements of workers that began in order, by key
	healthy  map[string]bool          // budgets that were ever fulfilled, by name

	secretRead bool // since Begin
}

// tell records a breach. key separates breaches that are reported individually.
func (c *checker) tell(rule Rule, key, format string, args ...any) {
	if id := string(rule) + "\x00" + key; !c.told[id] {
		c.told[id] = true
		c.breaches = append(c.breaches, Breach{Time: c.v.now, Rule: rule, What: fmt.Sprintf(format, args...)})
	}
}

// lasting records a breach if a condition has held for longer than limit; zero means at once.
func (c *checker) lasting(holds bool, limit time.Duration, rule Rule, key, format string, args ...any) {
	id := string(rule) + "\x00" + key
	if !holds {
		delete(c.since, id)
		delete(c.told, id)
		return
	}
	since, ok := c.since[id]
	if !ok {
		since = c.v.seen
		c.since[id] = since
	}
	if limit == 0 || c.v.seen-since > limit {
		c.tell(rule, key, format, args...)
	}
}

func (c *checker) next(e *Entry) {
	before, there := Node{}, false
	if n := As[*Node](e.Fact); n != nil {
		before, there = c.v.nodes[n.Name]
	}
	was := c.v.target
	c.v.apply(e)
	if b := As[*Budget](e.Fact); b != nil && !b.Gone && b.Healthy >= b.Wanted {
		c.healthy[b.Name] = true
	}
	if e.Fact == Begin {
		c.start = c.v.clone()
		c.answered, c.readyAt, c.begun = map[string]time.Time{}, map[string]time.Time{}, map[string]bool{}
		for name, n := range c.v.nodes {
			if n.Ready {
				c.readyAt[name] = e.Time
			}
		}
		c.complete()
		return
	}
	if c.start == nil || c.ended {
		return
	}
	switch f := e.Fact.(type) {
	case Mark:
		if f == End {
			c.end()
			c.ended = true
			return
		}
	case *Node:
		c.node(before, there, *f)
	case *Target:
		c.published(was, f)
	case *Probe:
		c.probe(f)
	case *Machines:
		c.machines()
	case *Outage:
		for _, name := range f.Away {
			c.tell(OutageOver, name+e.Time.String(), "%s is not Ready %s after the power of all machines was cut", name, (time.Duration(f.TookMS) * time.Millisecond).Round(time.Second))
		}
	case *Secret:
		c.secret(*f)
		c.secretRead = true
	case *Budget:
		c.lasting(!f.Gone && c.healthy[f.Name] && f.Healthy < f.Wanted, 0, BudgetKept, f.Name, "PodDisruptionBudget %s demands %d healthy pods, there are %d", f.Name, f.Wanted, f.Healthy)
	}
	c.always()
}

// complete checks that Begin has the data for later comparisons.
func (c *checker) complete() {
	for what, ok := range map[string]bool{
		"nodes": len(c.v.nodes) > 0, "machines": c.v.listed, "members of etcd": c.limits.NoMembers || c.v.asked && c.v.voters() > 0, "NodeVersion": c.v.target != nil,
		"AutoscalingStrategy": c.v.strategy != nil, "the Secret": c.limits.Secret == "" || len(c.v.secrets[c.limits.Secret].On) > 0,
	} {
		if !ok {
			c.tell(Whole, what, "nothing is known of %s at the beginning", what)
		}
	}
	for _, s := range c.v.secrets {
		c.secret(s)
	}
}

// secret checks how control planes return and store a Secret.
func (c *checker) secret(s Secret) {
	sum := ""
	if was := c.start.secrets[s.Name]; len(was.On) > 0 {
		sum = was.On[0].Sum
	}
	for _, on := range s.On {
		switch {
		case on.Err != "":
			c.tell(SecretsKept, s.Name+on.Node, "Secret %s cannot be read on %s: %s", s.Name, on.Node, on.Err)
		case on.Sum != sum:
			c.tell(SecretsKept, s.Name+on.Node, "Secret %s has another content on %s", s.Name, on.Node)
		case c.limits.Encrypted && !strings.HasPrefix(on.Stored, encryptedPrefix):
			c.tell(SecretsKept, s.Name+on.Node, "the etcd of %s stores Secret %s as %q, want %s", on.Node, s.Name, on.Stored, encryptedPrefix)
		}
	}
}

// node checks a change of a Node.
func (c *checker) node(before Node, there bool, n Node) {
	same := there && before.UID == n.UID
	if n.Gone {
		c.removed = c.v.now
		delete(c.readyAt, n.Name)
		delete(c.answered, n.Name)
		return
	}
	if n.Ready && (!same || !before.Ready) {
		c.readyAt[n.Name] = c.v.now
	}
	if same && older(n.Kubelet, before.Kubelet) {
		c.tell(VersionSkew, n.Name, "the kubelet of %s goes down from %s to %s", n.Name, before.Kubelet, n.Kubelet)
	}
	if same && n.InPlace && !n.Cordoned && older(before.Kubelet, n.Kubelet) && (!n.ControlPlane || len(c.start.members) > 1) {
		c.tell(MachineKept, n.Name+n.Kubelet, "the kubelet of %s is exchanged while it takes pods", n.Name)
	}
	if same && before.Cordoned && !before.CordonedByUs && (!n.Cordoned || n.CordonedByUs) {
		c.tell(ForeignCordon, n.Name, "%s was cordoned by somebody else, and is not so any more", n.Name)
	}
	if d, ok := c.v.nodes[n.Donor]; ok && older(n.Kubelet, d.Kubelet) {
		c.tell(VersionSkew, "new "+n.Name, "%s with kubelet %s replaces %s, which has %s", n.Name, n.Kubelet, d.Name, d.Kubelet)
	}
}

// published checks the target of joining machines.
func (c *checker) published(was, is *Target) {
	if was == nil {
		return
	}
	for _, r := range []struct{ role, before, after string }{{"control planes", was.ControlPlane, is.ControlPlane}, {"workers", was.Worker, is.Worker}} {
		from, to := c.v.versions[r.before], c.v.versions[r.after]
		if from == "" || to == "" || from == to {
			continue
		}
		a, err1 := version.Parse(from)
		b, err2 := version.Parse(to)
		switch {
		case err1 != nil || err2 != nil:
		case b.Less(a):
			c.tell(VersionSkew, "join "+r.role+to, "what joining %s get goes down from %s to %s", r.role, from, to)
		case a.Major() != b.Major() || b.Minor() > a.Minor()+1:
			c.tell(VersionSkew, "join "+r.role+to, "what joining %s get jumps from %s to %s", r.role, from, to)
		}
	}
}

// machines checks a list of the cloud.
func (c *checker) machines() {
	if n, most := len(c.v.machines), len(c.start.machines)+c.limits.Surge; n > most {
		c.tell(SurgeBudget, fmt.Sprint(n), "there are %d machines, %d are allowed", n, most)
	}
	if n, most := c.v.controlPlanes(), c.start.controlPlanes()+1; n > most {
		c.tell(SurgeBudget, fmt.Sprint("control planes ", n), "there are %d control planes, %d are allowed", n, most)
	}
	kept := c.start.keptGroups()
	for id, m := range c.v.machines {
		if _, before := c.start.machines[id]; kept[m.Group] && !before {
			c.tell(MachineKept, id, "machine %s was created in a group that is upgraded in place", m.Name)
		}
	}
}

// always checks the conditions of every entry.
func (c *checker) always() {
	v, l := c.v, c.limits
	have := v.ready(l.Blink)
	for group, floor := range c.start.ready(0) {
		c.lasting(have[group] < floor, 0, ReadyFloor, group, "group %s has %d Ready nodes, it had %d", group, have[group], floor)
	}
	if v.asked {
		c.lasting(v.voters() < c.start.voters(), 0, EtcdVoters, "", "etcd has %d voters, it had %d", v.voters(), c.start.voters())
	}
	settled := v.controlPlanesSettled()
	replaces := 0
	for name, p := range v.pending {
		is, worker := v.replacement(p)
		if !is {
			continue
		}
		replaces++
		if worker && settled {
			c.begun[p.key()] = true // later changes of the target are not its fault
		}
		c.lasting(worker && !settled && !c.begun[p.key()], l.Settle, WorkersLast, name+p.Token, "the replacement of worker %s has begun while a control plane is outdated or being replaced", cmp.Or(p.Donor, p.Node))
	}
	c.pairs()
	busy := replaces > 0 || v.upgrading()
	runs := v.strategy != nil && v.strategy.Enabled || v.scaler.Replicas > 0 || v.scaler.Pods > 0
	c.lasting(busy && runs, l.Settle, AutoscalerPaused, "runs", "the autoscaler runs, or is enabled, while a replacement is under way")
	c.lasting(!busy && v.strategy != nil && v.strategy.Paused && v.target != nil && v.target.Ready, l.Repair, AutoscalerPaused, "kept", "the autoscaler is still paused though the rollout is over")
	c.tracked()
	c.skew()
}

func (c *checker) pairs() {
	v := c.v
	heirs := map[string][]string{} // replacement nodes by old node
	for _, name := range slices.Sorted(maps.Keys(v.nodes)) {
		n := v.nodes[name]
		h, exists := v.nodes[n.Heir]
		c.lasting(n.Heir != "" && !v.leaves(n.ProviderID) && (!exists || h.Donor != name), c.limits.Repair, Pairs, name, "%s names %s as its replacement node, which does not name it as its old node", name, n.Heir)
		if donor, exists := v.nodes[n.Donor]; !exists || v.leaves(n.ProviderID) || v.atTarget(donor) || c.bound(n.ProviderID) {
			continue
		}
		heirs[n.Donor] = append(heirs[n.Donor], name)
	}
	for name := range v.nodes {
		c.lasting(len(heirs[name]) > 1, c.limits.Repair, Pairs, "two "+name, "%v are all replacement nodes of %s", heirs[name], name)
	}
}

// bound reports whether the operator decided to delete a machine.
func (c *checker) bound(id string) bool {
	for _, p := range c.v.pending {
		if p.Goal == "Leave" && p.Machine == id {
			return true
		}
	}
	return false
}

func (c *checker) tracked() {
	v := c.v
	known, tokens := map[string]bool{}, map[string]bool{}
	for _, n := range v.nodes {
		known[n.ProviderID] = true
	}
	for _, p := range v.pending {
		known[p.Machine] = true
		if p.Token != "" {
			tokens[p.Token] = true
		}
	}
	for id, m := range v.machines {
		going := m.State == string(cloud.Terminating)
		c.lasting(!known[id] && !tokens[m.Token] && !going, c.limits.Join, MachineTracked, id, "machine %s is neither a Node nor in a PendingNode", m.Name)
		c.lasting(going && v.lease == m.Name, c.limits.Settle, LeaseMoved, id, "%s is deleted while the operator runs on it", m.Name)
		c.lasting(going && m.ControlPlane && v.isMember(m.Name), c.limits.Settle, EtcdVoters, id, "machine %s is deleted though it is a member of etcd", m.Name)
	}
	if !v.listed {
		return
	}
	for name := range c.start.nodes {
		if _, there := v.nodes[name]; there {
			continue
		}
		id := c.start.nodes[name].ProviderID
		m, running := v.machines[id]
		if was, listed := c.start.machines[id]; listed && m.Incarnation != was.Incarnation { // a later machine with the same name
			running = false
		}
		c.lasting(running && m.State != string(cloud.Terminating), c.limits.Settle, MachineTracked, "node "+name, "Node %s was deleted, its machine runs", name)
	}
}

func (c *checker) skew() {
	v := c.v
	oldest := ""
	for node, s := range v.servers {
		if _, there := v.nodes[node]; there && (oldest == "" || older(s, oldest)) {
			oldest = s
		}
	}
	for name, n := range v.nodes {
		server := oldest
		if n.ControlPlane {
			server = v.servers[name]
		}
		c.lasting(server != "" && older(server, n.Kubelet), c.limits.Settle, VersionSkew, "kubelet "+name, "the kubelet of %s has %s, newer than an API server with %s", name, n.Kubelet, server)
	}
}

// probe checks a request to a service.
func (c *checker) probe(p *Probe) {
	if p.From == "" {
		return
	}
	if p.Err == "" {
		c.answered[p.From] = c.v.now
		return
	}
	n, there := c.v.nodes[p.From]
	if !there || !n.Ready || c.v.leaves(n.ProviderID) || c.bound(n.ProviderID) {
		return
	}
	last, limit := c.answered[p.From], c.limits.Gap
	if last.IsZero() {
		limit = c.limits.FirstAnswer
	}
	if last.Before(c.readyAt[p.From]) {
		last = c.readyAt[p.From]
	}
	if silent := c.v.now.Sub(last); silent > limit {
		c.tell(ServiceAnswers, p.From+last.String(), "a service has not answered %s for %s: %s", p.From, silent.Round(time.Second), p.Err)
	}
}

// end checks the final state.
func (c *checker) end() {
	v := c.v
	if v.target == nil || !v.target.Ready {
		c.tell(Converged, "", "NodeVersion is not Ready")
	}
	for _, name := range slices.Sorted(maps.Keys(v.nodes)) {
		c.nodeAtEnd(name, v.nodes[name])
	}
	for _, name := range slices.Sorted(maps.Keys(c.start.nodes)) {
		was := c.start.nodes[name]
		if is := v.nodes[name]; was.InPlace && (is.UID != was.UID || is.ProviderID != was.ProviderID) {
			c.tell(MachineKept, name, "%s is not the Node and the machine that it was: %s on %q", name, was.UID, is.ProviderID)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(v.runs)) {
		r := v.runs[name]
		if r.Stage != "" {
			c.left("run of the agent of %s without a success, in stage %s", name, r.Stage)
		}
		for _, path := range r.Left {
			c.left("%s on %s", path, name)
		}
		if r.Err != "" {
			c.tell(Whole, "run "+name, "the journal of the agent of %s is unknown: %s", name, r.Err)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(v.pending)) {
		c.left("PendingNode %s", name)
	}
	for _, name := range slices.Sorted(maps.Keys(v.joining)) {
		c.left("JoiningNode %s", name)
	}
	if name := c.limits.Secret; name != "" {
		c.secretAtEnd(name)
	}
	c.machinesAtEnd()
	c.membersAtEnd()
	if _, ok := v.nodes[v.lease]; v.lease != "" && !ok {
		c.left("lease of %s, which is gone", v.lease)
	}
	if a, b := v.strategy, c.start.strategy; a != nil && b != nil && *a != *b {
		c.tell(AutoscalerPaused, "end", "the AutoscalingStrategy was %+v and is %+v", *b, *a)
	}
	if v.scaler.Replicas != c.start.scaler.Replicas || v.scaler.Gone != c.start.scaler.Gone {
		c.tell(AutoscalerPaused, "replicas", "the autoscaler had %d replicas and has %d", c.start.scaler.Replicas, v.scaler.Replicas)
	}
}

// left reports something that the rollout created and did not remove.
func (c *checker) left(what string, args ...any) {
	c.tell(NothingLeft, fmt.Sprintf(what, args...), what, args...)
}

// nodeAtEnd checks that a node is Ready at the target, without marks of the rollout.
func (c *checker) nodeAtEnd(name string, n Node) {
	v := c.v
	if !v.atTarget(n) && (n.ControlPlane || v.target == nil || !v.target.KeepWorkers) {
		c.tell(Converged, name, "%s is not at the target: image %q, components %q", name, n.Image, n.Components)
	}
	if v.target != nil && n.InPlace && v.atTarget(n) && n.Kubelet != v.target.Kubernetes {
		c.tell(Converged, "kubelet "+name, "the kubelet of %s has %s, the target is %s", name, n.Kubelet, v.target.Kubernetes)
	}
	if !n.Ready {
		c.tell(Converged, "ready "+name, "%s is not Ready", name)
	}
	if n.CordonedByUs {
		c.left("cordon of %s", name)
	}
	if n.Heir != "" {
		c.left("annotation with a replacement node on %s", name)
	}
	if d, ok := v.nodes[n.Donor]; ok && n.Donor != "" {
		c.left("annotation on %s with the old node %s, which still exists", name, d.Name)
	}
	if n.Postponed || n.Obsolete {
		c.left("annotation of postponement, or as obsolete, on %s", name)
	}
	for _, t := range n.Taints {
		if !c.usual(n.ControlPlane, t) {
			c.left("taint %s of %s", t, name)
		}
	}
	if _, there := v.machines[n.ProviderID]; !there {
		c.left("Node %s without a machine", name)
	}
	if len(c.answered) > 0 && c.answered[name].Before(c.removed) {
		c.tell(ServiceAnswers, "end "+name, "no service has answered %s since the last replacement", name)
	}
}

// secretAtEnd checks that a Secret was read on all control planes since Begin.
func (c *checker) secretAtEnd(name string) {
	s := c.v.secrets[name]
	for _, node := range slices.Sorted(maps.Keys(c.v.nodes)) {
		read := c.secretRead && slices.ContainsFunc(s.On, func(on SecretOn) bool { return on.Node == node })
		if c.v.nodes[node].ControlPlane && !read {
			c.tell(SecretsKept, name+node, "Secret %s was not read on %s in the end", name, node)
		}
	}
}

// machinesAtEnd checks that each group has its machines again, and each machine a Node.
func (c *checker) machinesAtEnd() {
	v := c.v
	now, then := groups(v.machines), groups(c.start.machines)
	for _, g := range slices.Sorted(maps.Keys(then)) {
		if now[g] != then[g] {
			c.left("%d machines in group %s, which had %d", now[g], g, then[g])
		}
	}
	known := map[string]bool{}
	for _, n := range v.nodes {
		known[n.ProviderID] = true
	}
	for _, id := range slices.Sorted(maps.Keys(v.machines)) {
		if !known[id] {
			c.left("machine %s, which is no Node", v.machines[id].Name)
		}
	}
}

// membersAtEnd checks that the members of etcd are the control planes.
func (c *checker) membersAtEnd() {
	for _, m := range c.v.members {
		if n, ok := c.v.nodes[m.Name]; !ok || !n.ControlPlane || m.Learner {
			c.left("member %q of etcd, a learner or no control plane", m.Name)
		}
	}
	if len(c.v.members) != len(c.start.members) {
		c.left("%d members of etcd, which had %d", len(c.v.members), len(c.start.members))
	}
}

// usual reports whether nodes of a role had a taint at Begin.
func (c *checker) usual(controlPlane bool, taint string) bool {
	for _, n := range c.start.nodes {
		if n.ControlPlane == controlPlane && slices.Contains(n.Taints, taint) {
			return true
		}
	}
	return false
}

func groups(machines map[string]Machine) map[string]int {
	out := map[string]int{}
	for _, m := range machines {
		out[m.Group]++
	}
	return out
}

// older reports whether version a is older than b. It is false for an invalid version.
func older(a, b string) bool {
	x, err1 := version.Parse(a)
	y, err2 := version.Parse(b)
	return err1 == nil && err2 == nil && x.Less(y)
}
