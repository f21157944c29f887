package plans

import (
	"cmp"
	"iter"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/google/btree"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"

	"constellation/operator/api/upgradev1"
)

// book is an index of the observed cluster in the order that Plans need. Informers and the answers to
// our own writes update it. An object replaces an older version only, so a stale cache undoes
// nothing. It is safe for concurrent use.
type book struct {
	controller string
	now        func() time.Time
	wake       func(plan string, after time.Duration)

	mu          sync.Mutex
	plans       map[string]*planPage
	nodes       map[string]*node             // by name
	hosts       map[string][]string          // names of nodes by hostname label
	jobs        map[string]*job              // by name
	jobsOf      map[string]map[string][]*job // by plan and node, as in their labels
	unavailable int                          // nodes that are not Ready, or cordoned
	cordoned    map[string]map[string]bool   // nodes with the cordon annotation of a Plan, by Plan
	waited      map[string]map[string]bool   // nodes that are noted as waited for by a Plan, by Plan
	inPlace     map[string]bool              // nodes that the operator has cordoned for an upgrade in place
	changes     int                          // of Nodes, of what matters to Plans
	secrets     map[string]string            // resource versions by name
	news        map[string]podNews           // of pods, by the name of their job, until that is complete
	buried      map[types.UID]bool           // Jobs that were deleted recently
	long        map[string]string            // node names that are too long for a label, by their label value
}

// planPage is a Plan and its nodes.
type planPage struct {
	plan  *upgradev1.Plan
	short string // its name as the value of a label
	// Sort keys of the nodes below; see order.
	selector labels.Selector
	text     string // of the selector
	hash     string
	label    string

	todo     *btree.BTreeG[candidate]
	keys     map[string]string  // of its nodes, by name, in todo; empty: the node is done
	suspects map[string]bool    // names of Jobs that may have to be deleted, or whose node may have to be marked
	refused  map[string]string  // why the Job of a node could not be created
	credited map[types.UID]bool // Jobs whose node was marked
}

// candidate is a node that must be upgraded.
type candidate struct{ key, name string }

func newBook(controller string, now func() time.Time, wake func(string, time.Duration)) *book {
	return &book{
		controller: controller, now: now, wake: wake, plans: map[string]*planPage{}, nodes: map[string]*node{}, hosts: map[string][]string{},
		jobs: map[string]*job{}, jobsOf: map[string]map[string][]*job{}, cordoned: map[string]map[string]bool{}, waited: map[string]map[string]bool{}, inPlace: map[string]bool{}, secrets: map[string]string{}, news: map[string]podNews{}, buried: map[types.UID]bool{}, long: map[string]string{},
	}
}

// newer reports whether version a of an object is newer than b.
func newer(a, b string) bool {
	c, err := resourceversion.CompareResourceVersion(a, b)
	return err != nil || c > 0
}

func put(m map[string]map[string]bool, key, value string) {
	if m[key] == nil {
		m[key] = map[string]bool{}
	}
	m[key][value] = true
}

func drop(m map[string]map[string]bool, key, value string) {
	delete(m[key], value)
	if len(m[key]) == 0 {
		delete(m, key)
	}
}

// setPlan stores a Plan. ours is true for the answer to a write of the status, which needs no new
// round.
func (b *book) setPlan(p *upgradev1.Plan, ours bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	page := b.plans[p.Name]
	switch {
	case page == nil && ours: // it is gone
		return
	case page == nil:
		page = newPage(p.Name)
		b.plans[p.Name] = page
	case page.plan.UID == p.UID && !newer(p.ResourceVersion, page.plan.ResourceVersion):
		return
	case page.plan.UID != p.UID:
		page = newPage(p.Name)
		b.plans[p.Name] = page
	}
	if !ours {
		b.wake(p.Name, 0)
	}
	// Wake the Plans that depend on it.
	for name, other := range b.plans {
		if other.plan != nil && slices.Contains(rollout(other.plan).DependsOn, p.Name) {
			b.wake(name, soon)
		}
	}
	page.plan = p
}

func newPage(plan string) *planPage {
	return &planPage{short: labelValue(plan), suspects: map[string]bool{}, credited: map[types.UID]bool{}, refused: map[string]string{}}
}

func (b *book) dropPlan(name string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.plans, name)
	b.wake(name, 0)
}

func (b *book) plan(name string) *upgradev1.Plan {
	b.mu.Lock()
	defer b.mu.Unlock()
	if page := b.plans[name]; page != nil {
		return page.plan
	}
	return nil
}

// names returns the names of all Plans, of deleted Plans with Jobs, and of Plans with cordoned nodes.
func (b *book) names(namespace string) map[string]bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	out := map[string]bool{}
	for name := range b.plans {
		out[name] = true
	}
	for plan := range b.jobsOf {
		out[plan] = true
	}
	for _, noted := range []map[string]map[string]bool{b.cordoned, b.waited} {
		for of := range noted {
			if name, ok := strings.CutPrefix(of, namespace+"/"); ok {
				out[name] = true
			}
		}
	}
	return out
}

// setNode stores a Node. It wakes only Plans for which something relevant changed.
func (b *book) setNode(n *node, ours bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	old := b.nodes[n.name]
	if old == n || b.outdated(old, n, ours) {
		return
	}
	if old != nil && old.uid != n.uid {
		b.forget(old)
		old = nil
	}
	if n.ready {
		n.readySince = b.now()
		if old != nil && old.ready {
			n.readySince = old.readySince
		}
	}
	if old != nil && old.same(n) {
		b.nodes[n.name] = n // a heartbeat, or our own write from the informer; the old object can be freed
		return
	}
	b.changes++
	if old != nil {
		b.dropIndexes(old)
	}
	b.index(n)
	for name, page := range b.plans {
		was, is := page.has(n.name), false
		page.place(n)
		is = page.has(n.name)
		// The health of nodes outside of the Plan matters too.
		health := page.plan != nil && rollout(page.plan).Health != nil && (old == nil || old.available() != n.available())
		if was || is || health || page.plan != nil && slices.Contains(page.plan.Status.Applying, n.host) {
			b.wake(name, soon)
		}
	}
}

// hadNode reports whether a version of a Node, or a later one, was delivered before a view was filled. It may say no
// if another Node has changed since.
func (b *book) hadNode(v *view, name, version string) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	n := b.nodes[name]
	return n != nil && !newer(version, n.version) && b.changes == v.changes
}

// outdated reports whether n is older than old: an earlier version of the same Node, or the response
// to our own write of a Node that was deleted meanwhile.
func (b *book) outdated(old, n *node, ours bool) bool {
	if old == nil {
		return ours
	}
	return old.uid == n.uid && n.version != old.version && !newer(n.version, old.version)
}

// index adds a Node to all indices. The caller holds mu.
func (b *book) index(n *node) {
	b.nodes[n.name] = n
	if n.host != "" {
		b.hosts[n.host] = append(b.hosts[n.host], n.name)
	}
	if n.label != n.name {
		b.long[n.label] = n.name
	}
	if n.cordonedFor != "" {
		put(b.cordoned, n.cordonedFor, n.name)
	}
	if n.waits != "" {
		put(b.waited, n.waits, n.name)
	}
	if n.inPlace {
		b.inPlace[n.name] = true
	}
	if !n.available() {
		b.unavailable++
	}
}

// soon is the delay of a round after an event, to cover a burst of events.
const soon = 50 * time.Millisecond

func (b *book) dropIndexes(n *node) {
	delete(b.long, n.label)
	if n.host != "" {
		b.hosts[n.host] = slices.DeleteFunc(b.hosts[n.host], func(name string) bool { return name == n.name })
		if len(b.hosts[n.host]) == 0 {
			delete(b.hosts, n.host)
		}
	}
	if n.cordonedFor != "" {
		drop(b.cordoned, n.cordonedFor, n.name)
	}
	if n.waits != "" {
		drop(b.waited, n.waits, n.name)
	}
	delete(b.inPlace, n.name)
	if !n.available() {
		b.unavailable--
	}
}

func (b *book) forget(n *node) {
	b.dropIndexes(n)
	delete(b.nodes, n.name)
	for _, page := range b.plans {
		page.remove(n.name)
	}
}

func (b *book) dropNode(gone *node) {
	b.mu.Lock()
	defer b.mu.Unlock()
	n := b.nodes[gone.name]
	if n == nil || n.uid != gone.uid {
		return
	}
	for plan, page := range b.plans {
		if page.has(n.name) || page.plan != nil && slices.Contains(page.plan.Status.Applying, n.host) {
			b.wake(plan, 0)
		}
		for _, j := range b.jobsOf[page.short][n.label] {
			page.suspects[j.name] = true
			b.wake(plan, 0)
		}
	}
	b.forget(n)
}

// setJob stores a Job.
func (b *book) setJob(j *job, ours bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.buried[j.uid] {
		return
	}
	old := b.jobs[j.name]
	if old != nil && old.uid == j.uid && j.version != old.version && !newer(j.version, old.version) {
		return
	}
	if old != nil {
		b.unlist(old)
	}
	b.jobs[j.name] = j
	if b.jobsOf[j.plan] == nil {
		b.jobsOf[j.plan] = map[string][]*job{}
	}
	b.jobsOf[j.plan][j.node] = append(b.jobsOf[j.plan][j.node], j)
	if old != nil && old.uid == j.uid && old.version == j.version {
		return // our own write from the informer; the old object can be freed
	}
	if page := b.plans[j.plan]; page != nil {
		page.suspects[j.name] = true
	}
	if j.phase == jobComplete {
		delete(b.news, j.name)
	}
	// New and deleted pods of a Job change nothing.
	if !ours && (old == nil || old.uid != j.uid || old.phase != j.phase || old.deleting != j.deleting) {
		b.wake(j.plan, soon)
	}
}

func (b *book) unlist(j *job) {
	of := b.jobsOf[j.plan]
	of[j.node] = slices.DeleteFunc(of[j.node], func(o *job) bool { return o == j })
	if len(of[j.node]) == 0 {
		delete(of, j.node)
	}
	if len(of) == 0 {
		delete(b.jobsOf, j.plan)
	}
}

func (b *book) dropJob(j *job) {
	b.mu.Lock()
	defer b.mu.Unlock()
	// Answers to our own writes may arrive later than this event.
	if len(b.buried) > 4096 {
		clear(b.buried)
	}
	b.buried[j.uid] = true
	old := b.jobs[j.name]
	if old == nil || old.uid != j.uid {
		return
	}
	if page := b.plans[old.plan]; page != nil {
		delete(page.credited, j.uid)
		delete(page.suspects, j.name)
	}
	delete(b.jobs, j.name)
	delete(b.news, j.name)
	b.unlist(old)
	b.wake(old.plan, 0)
}

// setSecret stores the resource version of a Secret; empty: it does not exist.
func (b *book) setSecret(name, version string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if version == "" {
		delete(b.secrets, name)
	} else {
		b.secrets[name] = version
	}
	for plan, page := range b.plans {
		if page.plan != nil && slices.ContainsFunc(page.plan.Spec.Secrets, func(s upgradev1.SecretSpec) bool { return s.Name == name && !s.IgnoreUpdates }) {
			b.wake(plan, 0)
		}
	}
}

// secret returns the resource version of a Secret; empty: it does not exist.
func (b *book) secret(name string) string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.secrets[name]
}

// arrange sorts a Plan's nodes for a selector and a hash.
func (b *book) arrange(name string, s labels.Selector, hash string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	page := b.plans[name]
	if page == nil || page.todo != nil && page.text == s.String() && page.hash == hash {
		return
	}
	page.selector, page.text, page.hash, page.label = s, s.String(), hash, upgradev1.LabelOfPlan(name)
	page.todo = btree.NewG(16, func(a, b candidate) bool {
		return cmp.Or(cmp.Compare(a.key, b.key), cmp.Compare(a.name, b.name)) < 0
	})
	page.keys = map[string]string{}
	for _, n := range b.nodes {
		page.place(n)
	}
	for _, jobs := range b.jobsOf[page.short] {
		for _, j := range jobs {
			page.suspects[j.name] = true
		}
	}
}

func (p *planPage) has(name string) bool {
	_, ok := p.keys[name]
	return ok
}

func (p *planPage) remove(name string) {
	if p.todo == nil {
		return
	}
	if key := p.keys[name]; key != "" {
		p.todo.Delete(candidate{key, name})
	}
	delete(p.keys, name)
}

// place inserts a node at its position in the order.
func (p *planPage) place(n *node) {
	if p.todo == nil {
		return
	}
	p.remove(n.name)
	has := n.labels.Get(p.label)
	if n.host == "" || has == upgradev1.Disabled || !p.selector.Matches(n.labels) {
		return
	}
	if has == p.hash {
		p.keys[n.name] = ""
		return
	}
	// Control planes have their own key range, so that remaining ones are found at once.
	key := role(n.controlPlane) + order(n.uid, string(p.plan.UID), p.hash)
	p.keys[n.name] = key
	p.todo.ReplaceOrInsert(candidate{key, n.name})
}

// upgraded is a node with its Job, if it has one.
type upgraded struct {
	*node
	key  string // sort key in the Plan, after its role; empty: the node is done
	want string // name of the Job that the Plan requires for it
	job  *job
	// credited is true if the node was already marked for the Job.
	credited bool
	// refused is why its Job could not be created recently.
	refused string
	// news is the state of the newest pod of the Job.
	news podNews
	// also is another Plan that works on the node and may keep it cordoned.
	also string
}

// suspect is a Job, and its node if it exists.
type suspect struct {
	job  *job
	node *upgraded
}

// view is the input of a decision about one Plan.
type view struct {
	now  time.Time
	plan *upgradev1.Plan
	// asked is the duration of reads of Secrets, which does not count as time of the decision.
	asked time.Duration
	rules
	settings Settings

	// invalid is why the Plan cannot be carried out, unresolved why its version is not known.
	invalid, unresolved error
	// stale is why the last poll of a channel failed; its previous answer still counts.
	stale   error
	version string
	hash    string
	polled  time.Time
	channel string
	depends string // the condition of other Plans that it waits for; empty: none
	mayLock bool   // we hold the node lock
	lock    string // other holder of the lock; empty: none known
	awaited bool   // the operator waits for the lock that we hold
	// lockTrouble is why the lock cannot be taken; nil: no error.
	lockTrouble error

	// begun are the nodes of status.applying that still must be upgraded. failed are other nodes that
	// the status lists as failed.
	begun []upgraded
	// suspects are Jobs that may have to be deleted, or whose node may have to be marked.
	suspects []suspect
	// cordoned are the nodes that are cordoned for this Plan.
	cordoned []upgraded
	// inPlace are the nodes to upgrade that the operator has cordoned for its upgrade in place, and waited those
	// that are noted as waited for by this Plan.
	inPlace, waited []upgraded
	total           int
	done            int
	changes         int // of Nodes in the book so far
	nodes           int // of the cluster
	absent          int // of these: not Ready or cordoned
	// candidates of a role, in the order in which they are taken.
	candidates func(controlPlanes bool) iter.Seq[upgraded]
}

// fill adds the data of the book.
func (b *book) fill(v *view) {
	b.mu.Lock()
	defer b.mu.Unlock()
	page := b.plans[v.plan.Name]
	if page == nil || page.todo == nil {
		v.candidates = func(bool) iter.Seq[upgraded] { return func(func(upgraded) bool) {} }
		return
	}
	v.changes = b.changes
	v.total, v.done, v.nodes, v.absent = len(page.keys), len(page.keys)-page.todo.Len(), len(b.nodes), b.unavailable
	begun := v.plan.Status.Applying
	seen := make(map[string]bool, len(begun))
	v.begun = make([]upgraded, 0, len(begun))
	var at []upgraded
	for _, host := range begun {
		at = at[:0]
		for _, name := range slices.Sorted(slices.Values(b.hosts[host])) {
			if page.keys[name] != "" && !seen[name] {
				at = append(at, b.upgraded(v.plan, name))
			}
		}
		// Of several nodes with one host name, the upgrade of the one with a Job was started.
		if len(at) > 0 {
			one := at[max(0, slices.IndexFunc(at, func(u upgraded) bool { return u.job != nil }))]
			seen[one.name] = true
			v.begun = append(v.begun, one)
		}
	}
	slices.SortFunc(v.begun, func(a, b upgraded) int { return strings.Compare(a.name, b.name) })
	for _, name := range slices.Sorted(maps.Keys(b.cordoned[v.plan.Namespace+"/"+v.plan.Name])) {
		v.cordoned = append(v.cordoned, b.upgraded(v.plan, name))
	}
	for _, name := range slices.Sorted(maps.Keys(b.waited[v.plan.Namespace+"/"+v.plan.Name])) {
		v.waited = append(v.waited, b.upgraded(v.plan, name))
	}
	for _, name := range slices.Sorted(maps.Keys(b.inPlace)) {
		if page.keys[name] != "" && !seen[name] {
			v.inPlace = append(v.inPlace, b.upgraded(v.plan, name))
		}
	}
	for name := range page.suspects {
		delete(page.suspects, name)
		j := b.jobs[name]
		if j == nil {
			continue
		}
		s := suspect{job: j}
		if n := b.nodes[b.nodeOf(j)]; n != nil {
			s.node = new(b.upgraded(v.plan, n.name))
			if j.phase == jobComplete && n.labels.Get(page.label) == page.hash && j.hash == page.hash {
				page.credited[j.uid] = true
			}
		}
		v.suspects = append(v.suspects, s)
	}
	// A decision needs few of many candidates, so they are read lazily.
	v.candidates = func(cp bool) iter.Seq[upgraded] {
		return func(yield func(upgraded) bool) {
			for after := (candidate{key: role(cp)}); ; {
				some, last := b.next(v.plan, after, seen)
				for _, u := range some {
					if !yield(u) {
						return
					}
				}
				if len(some) == 0 {
					return
				}
				after = last
			}
		}
	}
}

// role is the key prefix of control planes, or of other nodes.
func role(controlPlane bool) string {
	if controlPlane {
		return "c"
	}
	return "w"
}

// next returns a page of the remaining nodes of a role, except some, and the key to continue from.
func (b *book) next(p *upgradev1.Plan, after candidate, without map[string]bool) (out []upgraded, last candidate) {
	const few = 16
	b.mu.Lock()
	defer b.mu.Unlock()
	page := b.plans[p.Name]
	if page == nil || page.todo == nil {
		return nil, after
	}
	page.todo.AscendGreaterOrEqual(after, func(c candidate) bool {
		if c == after || without[c.name] {
			return true
		}
		if c.key[:1] != after.key[:1] || len(out) == few {
			return false
		}
		out, last = append(out, b.upgraded(p, c.name)), c
		return true
	})
	return out, last
}

func (b *book) upgraded(p *upgradev1.Plan, name string) upgraded {
	n := b.nodes[name]
	page := b.plans[p.Name]
	u := upgraded{node: n, want: jobName(p.Name, name, page.hash), refused: page.refused[name]}
	if key := page.keys[name]; key != "" {
		u.key = key[1:]
	}
	// Of several Jobs the one with this hash counts, or else one that has not finished.
	for _, j := range b.jobsOf[page.short][n.label] {
		if u.job == nil || j.name == u.want || u.job.name != u.want && j.phase == jobActive {
			u.job = j
		}
	}
	if u.job != nil {
		u.news, u.credited = b.news[u.job.name], page.credited[u.job.uid]
	}
	for other, page := range b.plans {
		if other == p.Name || page.plan == nil || page.plan.Spec.Drain == nil && !page.plan.Spec.Cordon {
			continue
		}
		for _, j := range b.jobsOf[page.short][n.label] {
			if j.phase == jobActive {
				u.also = other
			}
		}
	}
	return u
}

// jobsOfPlan returns all Jobs of a Plan.
func (b *book) jobsOfPlan(plan string) (out []*job) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, jobs := range b.jobsOf[labelValue(plan)] {
		out = append(out, jobs...)
	}
	return out
}

// marked returns the nodes that are cordoned for a Plan, and those that are noted as waited for by it.
func (b *book) marked(namespace, plan string) (cordoned, waited []*node) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for name := range b.cordoned[namespace+"/"+plan] {
		cordoned = append(cordoned, b.nodes[name])
	}
	for name := range b.waited[namespace+"/"+plan] {
		waited = append(waited, b.nodes[name])
	}
	return cordoned, waited
}

// nodeOf returns the name of a Job's node. For names that are too long for a label it looks up the
// label value.
func (b *book) nodeOf(j *job) string {
	if _, ok := b.nodes[j.node]; !ok {
		return b.long[j.node]
	}
	return j.node
}

// suspect makes the next round check a Job again.
func (b *book) suspect(plan, job string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if page := b.plans[plan]; page != nil {
		page.suspects[job] = true
	}
}

// refuse records why the Job of a node could not be created; empty: it was. It reports whether that
// changed.
func (b *book) refuse(plan, node, why string) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	page := b.plans[plan]
	if page == nil || page.refused[node] == why {
		return false
	}
	if page.refused[node] = why; why == "" {
		delete(page.refused, node)
	}
	return true
}

// credit records that a node was marked for its Job.
func (b *book) credit(plan string, job types.UID) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if page := b.plans[plan]; page != nil {
		page.credited[job] = true
	}
}
