package compat

import (
	"cmp"
	"fmt"
	"math"
	"runtime"
	"slices"

	"constellation/engine/lifecycle"
	"constellation/engine/plan"
	"constellation/engine/release"
	"constellation/engine/version"
)

// The planner is a breadth-first search over states of a cluster. An edge is a hop that no
// rule forbids; it leads to the state after the hop. The first layer that contains the goal
// contains a shortest path. Within a layer, a state keeps the path with the fewest
// replacements of workers, then with the fewest changes, then with the newest versions first.
//
// Choices for a hop are pruned without losing a path: of equivalent neighbours only the
// newest is tried (see planner.releases).

// Path returns the best upgrade path from the running versions to goal, one hop for each
// `upgrade apply`. Zero fields of goal are free, with one exception: a release without an
// image means the newest image of that release's minor. At the end all nodes run the
// versions of the control planes.
//
// The best path has the fewest hops; among those the fewest replacements of workers, then
// the fewest changes, then the newest patches. It depends only on the arguments and the
// matrix, not on the order of releases.
//
// If there is no path, the hops are nil and the results are the blocking rules. If nothing
// needs to change, both are empty.
func (m *Matrix) Path(now Running, goal Planned, o Offer) ([]Hop, []*RuleResult) {
	p := newPlanner(m, now, o)
	if p.underspecified() {
		return nil, p.unchecked(goal)
	}
	goal = p.complete(goal)
	p.goal = goal
	if p.start.reached(&goal) {
		return nil, nil
	}
	// Whether a path exists does not depend on keeping workers, because newer workers never
	// block a hop. The first search therefore uses the much smaller space without kept workers.
	if p.search(false) == nil {
		return nil, p.blockers(goal)
	}
	return p.hops(p.search(true)), nil
}

// Goal completes given to the newest reachable state: first the newest release, then the
// newest Kubernetes, then the newest image. Versions in given are met exactly; its other
// fields are ignored. If given is zero and nothing newer is reachable, the result is the
// running versions.
//
// Pre-releases are excluded unless given names them. If given is not reachable, it is
// returned unchanged; [Matrix.Path] returns the reasons.
func (m *Matrix) Goal(now Running, given Planned, o Offer) Planned {
	p := newPlanner(m, now, o)
	given = Planned{Services: p.intern(given.Services), Image: p.intern(given.Image), Kubernetes: p.intern(given.Kubernetes)}
	open := given == Planned{}
	switch {
	case p.underspecified() && open:
		return Planned{Services: now.Services.Newest, Image: now.ControlPlaneImage.Newest, Kubernetes: now.Kubernetes.Newest}
	case p.underspecified():
		return given
	}
	p.goal = given
	var best *vertex
	if open {
		best = p.start
	}
	at := func(s Span, want version.Version) bool { return want.IsZero() || s.Is(want) }
	p.explore(false, func(layer []*vertex) bool {
		for _, n := range layer {
			if !at(n.services, given.Services) || !at(n.image, given.Image) || !at(n.kubernetes, given.Kubernetes) {
				continue
			}
			if best == nil || cmp.Or(n.services.Newest.Compare(best.services.Newest), n.kubernetes.Newest.Compare(best.kubernetes.Newest), n.image.Newest.Compare(best.image.Newest)) > 0 {
				best = n
			}
		}
		return false
	})
	if best == nil {
		return given
	}
	return Planned{Services: best.services.Newest, Image: best.image.Newest, Kubernetes: best.kubernetes.Newest}
}

// state is the versions of a cluster that rules depend on. Versions are interned, so that
// states can be map keys.
type state struct {
	services, image, kubernetes, kubelet Span
	workerImage, workerKubelet           Span
	etcd                                 string
}

// vertex is a state and the best path to it.
type vertex struct {
	state
	from                  *vertex // nil at the start
	hop                   move    // the last hop
	depth, workers, count int     // hops; hops that replace workers; changes
	rank                  int     // in its layer, the newest versions first
}

// move is the target of a hop.
type move struct {
	services, image, kubernetes version.Version
	keep                        bool   // keep workers of older versions
	etcd                        string // tag that etcd gets without another Kubernetes; empty: none
}

// planner searches the path for one request.
type planner struct {
	m     *Matrix
	now   Running
	start *vertex
	goal  Planned // zero fields are free
	o     Offer
	seen  map[string]version.Version // interned
	all   []*vertex                  // in the order of the search
	// caches of pruned choices
	bySpan  map[version.Version][]*known
	images  map[version.Version][]version.Version
	patches map[[2]version.Version][]version.Version
}

func newPlanner(m *Matrix, now Running, o Offer) *planner {
	p := &planner{m: m, now: now, seen: map[string]version.Version{}}
	p.o = Offer{Images: memo(o.Images), Kubernetes: memo(o.Kubernetes)}
	for i := range m.releases {
		p.intern(m.releases[i].Version)
		for _, k := range m.releases[i].patches {
			p.intern(k.version)
		}
	}
	span := func(s Span) Span { return Span{p.intern(s.Oldest), p.intern(s.Newest)} }
	p.start = &vertex{state: state{
		services: span(now.Services), image: span(widen(now.ControlPlaneImage, now.Target.ImageVersion)),
		kubernetes: span(widen(now.Kubernetes, now.Target.Kubernetes)), kubelet: span(now.ControlPlaneKubelet),
		workerImage: span(now.WorkerImage), workerKubelet: span(now.WorkerKubelet), etcd: now.Etcd,
	}}
	return p
}

// memo caches the provider's answers, which may cost a request each.
func memo(f func(version.Version) (bool, string, string)) func(version.Version) (bool, string, string) {
	if f == nil {
		return nil
	}
	type answer struct {
		ok          bool
		why, remedy string
	}
	known := map[string]answer{}
	return func(v version.Version) (bool, string, string) {
		a, ok := known[v.String()]
		if !ok {
			a.ok, a.why, a.remedy = f(v)
			known[v.String()] = a
		}
		return a.ok, a.why, a.remedy
	}
}

func (p *planner) intern(v version.Version) version.Version {
	if v.IsZero() {
		return v
	}
	if same, ok := p.seen[v.String()]; ok {
		return same
	}
	p.seen[v.String()] = v
	return v
}

// underspecified reports whether too few running versions are known to plan a path.
func (p *planner) underspecified() bool {
	return p.start.services.IsZero() || p.start.image.IsZero() && !p.now.NoImages || p.start.kubernetes.IsZero()
}

// unchecked returns the rules that block or cannot be evaluated.
func (p *planner) unchecked(goal Planned) []*RuleResult {
	cli := goal.Services
	if cli.IsZero() {
		cli = p.now.Services.Newest
	}
	results := p.m.Check(cli, p.now, goal, p.o)
	return slices.DeleteFunc(results, func(r *RuleResult) bool { return r.Severity != plan.Block && r.Severity != plan.NotChecked })
}

// complete adds the image of a goal's release and interns all versions.
func (p *planner) complete(goal Planned) Planned {
	goal = Planned{Services: p.intern(goal.Services), Image: p.intern(goal.Image), Kubernetes: p.intern(goal.Kubernetes)}
	if goal.Services.IsZero() || !goal.Image.IsZero() || p.now.NoImages {
		return goal
	}
	newest, offered := version.Version{}, version.Version{}
	for i := range p.m.releases {
		k := &p.m.releases[i]
		if !k.Version.SameMinor(goal.Services) || k.Faulty != "" || k.Version.Prerelease() != "" && !k.Version.Equal(goal.Services) {
			continue
		}
		newest = k.Version
		if p.offersImage(k.Version) {
			offered = k.Version
		}
	}
	if running := p.start.image.Newest; offered.Less(running) && running.SameMinor(goal.Services) {
		offered = running
	}
	if offered.IsZero() {
		offered = newest // not offered by the provider: rule offered-image reports it
	}
	goal.Image = p.intern(offered)
	return goal
}

func (p *planner) offersImage(v version.Version) bool {
	if p.now.NoImages {
		return false
	}
	if p.o.Images == nil {
		return true
	}
	ok, _, _ := p.o.Images(v)
	return ok
}

// offersKubernetes reports whether machines can install a patch. Without digests in the release
// they need a provider with components of its own.
func (p *planner) offersKubernetes(q *patch) bool {
	if p.o.Kubernetes == nil {
		return q.unpinned == ""
	}
	ok, _, _ := p.o.Kubernetes(q.version)
	return ok
}

// reached reports whether all nodes of the state meet goal.
func (s *state) reached(goal *Planned) bool {
	at := func(span Span, want version.Version) bool {
		return !span.Mixed() && (want.IsZero() || span.Oldest.Equal(want))
	}
	return at(s.services, goal.Services) && at(s.image, goal.Image) && at(s.kubernetes, goal.Kubernetes) &&
		(s.kubelet.IsZero() || s.kubelet.Is(s.kubernetes.Oldest)) &&
		(s.workerImage.IsZero() || s.workerImage.Is(s.image.Oldest)) &&
		(s.workerKubelet.IsZero() || s.workerKubelet.Is(s.kubernetes.Oldest))
}

// running returns the state as input of the rules.
func (p *planner) running(s *state) Running {
	return Running{
		Services: s.services, ControlPlaneImage: s.image, WorkerImage: s.workerImage, Kubernetes: s.kubernetes,
		ControlPlaneKubelet: s.kubelet, WorkerKubelet: s.workerKubelet, Etcd: s.etcd,
		NoImages: p.now.NoImages, WorkersInPlace: p.now.WorkersInPlace, ExternalEtcd: p.now.ExternalEtcd,
	}
}

// replaces reports which nodes a move replaces.
func (s *state) replaces(mv move) (controlPlanes, workers bool) {
	controlPlanes = mv.etcd != "" || !s.image.Is(mv.image) || !s.kubernetes.Is(mv.kubernetes) || !s.kubelet.IsZero() && !s.kubelet.Is(mv.kubernetes)
	behind := !s.workerImage.IsZero() && !s.workerImage.Is(mv.image) || !s.workerKubelet.IsZero() && !s.workerKubelet.Is(mv.kubernetes)
	return controlPlanes, behind && !mv.keep
}

// after returns the state after a hop.
func (p *planner) after(s *state, mv move) state {
	out := *s
	out.services, out.image, out.kubernetes = At(mv.services), At(mv.image), At(mv.kubernetes)
	if !s.kubelet.IsZero() {
		out.kubelet = At(mv.kubernetes)
	}
	if !mv.keep {
		if !s.workerImage.IsZero() || !s.workerKubelet.IsZero() {
			out.workerImage = At(mv.image)
		}
		if !s.workerKubelet.IsZero() {
			out.workerKubelet = At(mv.kubernetes)
		}
	}
	if mv.etcd != "" {
		out.etcd = mv.etcd
	}
	if !s.kubernetes.Is(mv.kubernetes) {
		out.etcd = "" // set from the new patch
		if k := p.m.find(mv.services); k != nil {
			for _, q := range k.Kubernetes {
				if q.Version.Equal(mv.kubernetes) {
					out.etcd = q.Etcd
				}
			}
		}
		if p.m.pinned(s) && parseEtcd(s.etcd).SameMinor(parseEtcd(out.etcd)) && parseEtcd(out.etcd).Less(parseEtcd(s.etcd)) {
			out.etcd = s.etcd
		}
	}
	return out
}

// pinned reports whether the cluster runs a newer etcd than its Kubernetes deploys: the
// configuration names it (etcd.local.imageTag), and kubeadm keeps it.
func (m *Matrix) pinned(s *state) bool {
	q := findPatch(m.patches, s.kubernetes.Oldest)
	return q != nil && s.etcd != "" && !q.etcd.IsZero() && q.etcd.Less(parseEtcd(s.etcd))
}

// changes counts the components whose version a move changes.
func (s *state) changes(mv move) int {
	n := 0
	for _, c := range [...]struct {
		span Span
		to   version.Version
	}{{s.services, mv.services}, {s.image, mv.image}, {s.kubernetes, mv.kubernetes}} {
		if !c.span.Is(c.to) {
			n++
		}
	}
	if mv.etcd != "" {
		n++
	}
	return n
}

// newer orders moves: newest versions first, then moves that keep workers.
func (mv move) newer(other move) int {
	return cmp.Or(other.services.Compare(mv.services), other.kubernetes.Compare(mv.kubernetes), other.image.Compare(mv.image), keepFirst(mv.keep, other.keep), cmp.Compare(mv.etcd, other.etcd))
}

func keepFirst(a, b bool) int {
	switch {
	case a == b:
		return 0
	case a:
		return -1
	}
	return 1
}

// search returns the best vertex that reaches the goal, or nil.
func (p *planner) search(keep bool) *vertex {
	var found *vertex
	p.explore(keep, func(layer []*vertex) bool {
		for _, n := range layer { // newest first
			if n.reached(&p.goal) && (found == nil || cmp.Or(n.workers-found.workers, n.count-found.count) < 0) {
				found = n
			}
		}
		return found != nil
	})
	return found
}

// explore visits all reachable states layer by layer until done returns true. Moves keep
// workers only if keep is set.
func (p *planner) explore(keep bool, done func(layer []*vertex) bool) {
	p.bySpan = map[version.Version][]*known{}
	p.images = map[version.Version][]version.Version{}
	p.patches = map[[2]version.Version][]version.Version{}
	visited := map[state]bool{p.start.state: true}
	p.all = []*vertex{p.start}
	layer := []*vertex{p.start}
	for len(layer) > 0 && !done(layer) {
		next := map[state]*vertex{}
		for _, from := range layer {
			p.expand(from, keep, func(mv move) {
				s := p.after(&from.state, mv)
				if visited[s] {
					return
				}
				n := &vertex{state: s, from: from, hop: mv, depth: from.depth + 1, workers: from.workers, count: from.count + from.changes(mv)}
				if _, w := from.replaces(mv); w {
					n.workers++
				}
				if old := next[s]; old == nil || n.better(old) < 0 {
					next[s] = n
				}
			})
		}
		layer = layer[:0:0]
		for s, n := range next {
			visited[s] = true
			layer = append(layer, n)
		}
		// Two paths of one layer differ in a hop, so the order is total.
		slices.SortFunc(layer, func(a, b *vertex) int { return cmp.Or(a.from.rank-b.from.rank, a.hop.newer(b.hop)) })
		for i, n := range layer {
			n.rank = i
		}
		p.all = append(p.all, layer...)
	}
}

// better orders two paths of the same length to the same state.
func (n *vertex) better(o *vertex) int {
	return cmp.Or(n.workers-o.workers, n.count-o.count, n.from.rank-o.from.rank, n.hop.newer(o.hop))
}

// expand calls yield with every hop from a vertex that changes something and that no rule
// forbids.
func (p *planner) expand(from *vertex, keep bool, yield func(move)) {
	now := p.running(&from.state)
	keeps := []bool{false}
	if keep && !from.workerKubelet.IsZero() {
		keeps = []bool{false, true}
	}
	for _, r := range p.releases(from.services.Newest) {
		services := p.intern(r.Version)
		for _, image := range p.imagesOf(r, from.image.Newest) {
			for _, k := range p.patchesOf(r, from.kubernetes.Newest) {
				for _, keep := range keeps {
					mv := move{services, image, k, keep, ""}
					cps, workers := from.replaces(mv)
					if !cps && !workers && from.services.Is(services) {
						continue // no change
					}
					if keep {
						if _, behind := from.replaces(move{services, image, k, false, ""}); !behind {
							continue // no older workers to keep
						}
					}
					if p.allows(&now, mv) {
						yield(mv)
					}
				}
			}
		}
	}
	if mv, ok := p.etcdMove(from); ok && p.allows(&now, mv) {
		yield(mv)
	}
}

// allows reports whether no rule forbids a move.
func (p *planner) allows(now *Running, mv move) bool {
	s := step{m: p.m, cli: mv.services, now: now, o: &p.o, to: mv.planned()}
	s.prepare()
	return s.allowed()
}

func (mv move) planned() Planned {
	return Planned{Services: mv.services, Image: mv.image, Kubernetes: mv.kubernetes, Etcd: mv.etcd, KeepWorkers: mv.keep}
}

// etcdMove returns the hop that brings the oldest etcd from which the next minor of Kubernetes can
// start. It changes nothing else, and workers stay. It needs a release that has that minor, because
// older programs cannot make it, and a known version of etcd: outside of the cluster, etcd is not
// ours to upgrade.
func (p *planner) etcdMove(from *vertex) (mv move, ok bool) {
	if p.start.etcd == "" || from.services.Mixed() || from.image.Mixed() || from.kubernetes.Mixed() || !from.kubelet.IsZero() && !from.kubelet.Is(from.kubernetes.Newest) {
		return move{}, false
	}
	k := p.m.find(from.services.Newest)
	if k == nil {
		return move{}, false
	}
	runs := parseEtcd(from.etcd)
	for i := range k.patches {
		q := &k.patches[i]
		if minorsUp(from.kubernetes.Newest, q.version) != 1 || q.faulty != "" || p.beyond(q.version, p.goal.Kubernetes) || !p.offersKubernetes(q) {
			continue
		}
		if floor, below := lifecycle.BelowFloor(runs, q.etcd); below && floor.Tag != "" {
			mv = move{services: from.services.Newest, image: from.image.Newest, kubernetes: from.kubernetes.Newest, etcd: floor.Tag}
			_, mv.keep = from.replaces(move{services: mv.services, image: mv.image, kubernetes: mv.kubernetes})
			return mv, true
		}
	}
	return move{}, false
}

// releases returns the candidates for the next release: the running one, and newer ones of
// its minor and of the next minor that are neither faulty nor beyond the goal. Of neighbours
// in one minor the older is pruned if the newer one can be reached from the same releases
// and contains the same Kubernetes patches: the newer one can then take its role in any path.
func (p *planner) releases(runs version.Version) []*known {
	if out, ok := p.bySpan[runs]; ok {
		return out
	}
	var out []*known
	var kept *known
	for i := range slices.Backward(p.m.releases) {
		k := &p.m.releases[i]
		if up := minorsUp(runs, k.Version); up < 0 || up > 1 || k.Version.Major() != runs.Major() || k.Version.Less(runs) || k.Faulty != "" || p.beyond(k.Version, p.goal.Services) {
			continue
		}
		if kept != nil && !k.Version.Equal(runs) && kept.Version.SameMinor(k.Version) && p.replaces(kept, k) {
			continue
		}
		kept = k
		out = append(out, k)
	}
	if len(out) == 0 || !out[len(out)-1].Version.Equal(runs) {
		// The running release is unknown or faulty: the rules decide which hops it allows.
		if k := p.m.find(runs); k != nil {
			out = append(out, k)
		} else {
			out = append(out, &known{Summary: release.Summary{Version: runs}})
		}
	}
	p.bySpan[runs] = out
	return out
}

// beyond reports whether v is excluded: it is newer than the goal, or a pre-release that the
// goal does not name.
func (p *planner) beyond(v, goal version.Version) bool {
	return !goal.IsZero() && goal.Less(v) || v.Prerelease() != "" && !v.Equal(goal)
}

// replaces reports whether newer can take the role of older in any path.
func (p *planner) replaces(newer, older *known) bool {
	if newer.UpgradeFrom.IsZero() || !older.UpgradeFrom.IsZero() && older.UpgradeFrom.Less(newer.UpgradeFrom) {
		return false
	}
	for i := range older.patches {
		o := &older.patches[i]
		if o.faulty != "" { // never a target, but a cluster that runs a patch of its minor may stay there
			if !slices.ContainsFunc(newer.patches, func(n patch) bool { return n.version.SameMinor(o.version) }) {
				return false
			}
			continue
		}
		if n := newer.patch(o.version); n == nil || n.faulty != "" || !n.etcd.Equal(o.etcd) {
			return false
		}
	}
	return true
}

// imagesOf returns the candidates for the image of a hop with a CLI: the running one, and
// newer ones of the CLI's minor. Of neighbours that support the same Kubernetes minors only
// the newest is a candidate, and the one that workers run already: it saves their replacement.
func (p *planner) imagesOf(cli *known, runs version.Version) []version.Version {
	newer, ok := p.images[cli.Version]
	if !ok {
		last := ""
		for i := range slices.Backward(p.m.releases) {
			k := &p.m.releases[i]
			if !k.Version.SameMinor(cli.Version) || k.Faulty != "" || !p.offersImage(k.Version) {
				continue
			}
			if p.beyond(k.Version, p.goal.Image) && (!k.Version.Equal(cli.Version) || !p.goal.Image.IsZero()) {
				continue
			}
			if minors := k.supported; minors != last || len(newer) == 0 || p.start.workerImage.Is(k.Version) {
				newer, last = append(newer, p.intern(k.Version)), minors
			}
		}
		p.images[cli.Version] = newer
	}
	out := make([]version.Version, 0, len(newer)+1)
	for _, v := range newer {
		if runs.Less(v) {
			out = append(out, v)
		}
	}
	return append(out, runs)
}

// patchesOf returns the candidates for Kubernetes in a hop with a release: the running
// patch, and newer patches of its minor and of the next. Of neighbours with the same etcd
// only the newest is a candidate, and the one that workers run already.
func (p *planner) patchesOf(r *known, runs version.Version) []version.Version {
	key := [2]version.Version{r.Version, runs}
	if out, ok := p.patches[key]; ok {
		return out
	}
	var out []version.Version
	var last *patch
	for i := range slices.Backward(r.patches) {
		q := &r.patches[i]
		if up := minorsUp(runs, q.version); up < 0 || up > 1 || !runs.Less(q.version) || q.faulty != "" || p.beyond(q.version, p.goal.Kubernetes) || !p.offersKubernetes(q) {
			continue
		}
		if last == nil || !last.version.SameMinor(q.version) || !last.etcd.Equal(q.etcd) || p.start.workerKubelet.Is(q.version) {
			out, last = append(out, p.intern(q.version)), q
		}
	}
	out = append(out, runs)
	p.patches[key] = out
	return out
}

// static are the rules about the goal itself, which no path can avoid.
var static = []string{"unknown-release", "faulty", "same-major", "never-down", "kubernetes-offered", "kubeadm-floor", "offered-image", "offered-kubernetes", "control-plane-skew"}

// blockers returns the results that forbid the goal: violated rules about the goal itself,
// else the rules that forbid the next hop from the nearest reachable state.
func (p *planner) blockers(goal Planned) []*RuleResult {
	if goal.Services.IsZero() {
		goal.Services = p.releaseWith(goal.Kubernetes)
	}
	direct := Blocks(p.m.Check(goal.Services, p.now, goal, p.o))
	if out := slices.DeleteFunc(slices.Clone(direct), func(r *RuleResult) bool { return !slices.Contains(static, r.Rule) }); len(out) > 0 {
		return out
	}
	// From the state nearest to the goal, check all next hops, pruned ones included, and
	// report the hop with the fewest violated rules.
	nearest := p.start
	for _, n := range p.all {
		if distance(&n.state, goal) < distance(&nearest.state, goal) {
			nearest = n
		}
	}
	best, bestFar := direct, math.MaxInt
	now := p.running(&nearest.state)
	if nearest == p.start {
		now = p.now
	}
	for _, mv := range p.hopsTowards(nearest, goal) {
		after := p.after(&nearest.state, mv)
		d := distance(&after, goal)
		if d >= distance(&nearest.state, goal) && !after.reached(&goal) {
			continue // not nearer to the goal
		}
		found := Blocks(p.m.Check(mv.services, now, Planned{Services: mv.services, Image: mv.image, Kubernetes: mv.kubernetes}, p.o))
		if len(found) > 0 && (bestFar == math.MaxInt || len(found) < len(best) || len(found) == len(best) && d < bestFar) {
			best, bestFar = found, d
		}
	}
	if len(best) == 0 {
		best = p.gap(nearest, goal)
	}
	return best
}

// releaseWith returns the first release after the running one that contains a Kubernetes version,
// or the newest, whose rules report that it does not.
func (p *planner) releaseWith(kubernetes version.Version) version.Version {
	cli := p.start.services.Newest
	for i := range p.m.releases {
		k := &p.m.releases[i]
		if !cli.Less(k.Version) || k.Faulty != "" || k.Version.Prerelease() != "" {
			continue
		}
		if here := p.m.find(cli); here != nil && here.patch(kubernetes) != nil {
			break
		}
		cli = k.Version
	}
	return cli
}

// distance returns how many minors a state is below the goal.
func distance(s *state, goal Planned) int {
	return minorsUp(s.services.Newest, goal.Services) + max(0, minorsUp(s.kubernetes.Newest, orVersion(goal.Kubernetes, s.kubernetes.Newest))) + minorsUp(s.image.Newest, orVersion(goal.Image, s.image.Newest))
}

// hopsTowards returns all hops from a state that pass the goal in no version and skip no minor.
func (p *planner) hopsTowards(from *vertex, goal Planned) (hops []move) {
	for i := range p.m.releases {
		r := &p.m.releases[i]
		if up := minorsUp(from.services.Newest, r.Version); r.Version.Less(from.services.Newest) || up > 1 || goal.Services.Less(r.Version) {
			continue
		}
		versions := []version.Version{from.kubernetes.Newest}
		for _, q := range r.patches {
			if up := minorsUp(from.kubernetes.Newest, q.version); up >= 0 && up <= 1 && from.kubernetes.Newest.Less(q.version) && (goal.Kubernetes.IsZero() || !goal.Kubernetes.Less(q.version)) {
				versions = append(versions, q.version)
			}
		}
		images := []version.Version{from.image.Newest}
		if from.image.Newest.Less(r.Version) && (goal.Image.IsZero() || !goal.Image.Less(r.Version)) {
			images = append(images, r.Version)
		}
		for _, image := range images {
			for _, k := range versions {
				hops = append(hops, move{r.Version, image, k, false, ""})
			}
		}
	}
	return hops
}

// gap is the result if no hop leads on from a vertex: a minor is missing.
func (p *planner) gap(nearest *vertex, goal Planned) []*RuleResult {
	return []*RuleResult{{
		Rule: "unknown-release", Severity: plan.Block, Reference: PolicyPage,
		Title:  fmt.Sprintf("no known release leads from services %s and Kubernetes %s to services %s and Kubernetes %s", nearest.services.Newest, nearest.kubernetes.Newest, goal.Services, orVersion(goal.Kubernetes, nearest.kubernetes.Newest)),
		Remedy: "known are " + p.m.List() + "; point `--feed` to the feed that publishes the releases in between",
	}}
}

func orVersion(v, other version.Version) version.Version {
	if v.IsZero() {
		return other
	}
	return v
}

// hops returns the path to a vertex.
func (p *planner) hops(end *vertex) []Hop {
	var path []*vertex
	for n := end; n.from != nil; n = n.from {
		path = append(path, n)
	}
	slices.Reverse(path)
	target := func(s *state) plan.Target {
		return plan.Target{Release: s.services.Newest.String(), Image: s.image.Newest.String(), Kubernetes: s.kubernetes.Newest.String()}
	}
	var out []Hop
	for i, n := range path {
		h := Hop{Number: i + 1, CLI: n.hop.services, From: target(&n.from.state), To: target(&n.state), Get: p.m.Get(n.hop.services)}
		if i == 0 { // the running versions: a rollout in progress may not have replaced a node yet
			h.From = plan.Target{Release: p.now.Services.String(), Image: p.now.ControlPlaneImage.String(), Kubernetes: p.now.Kubernetes.String()}
		}
		h.ReplaceControlPlanes, h.ReplaceWorkers = n.from.replaces(n.hop)
		if n.hop.etcd != "" {
			h.From.Etcd, h.To.Etcd = n.from.etcd, n.hop.etcd
		}
		h.Why = p.explain(path, i)
		out = append(out, h)
	}
	return out
}

// Get describes how to obtain the CLI of a release; empty if it is this program.
func (m *Matrix) Get(v version.Version) string {
	if v.String() == version.Release {
		return ""
	}
	k := m.find(v)
	if k == nil || len(k.CLI) == 0 {
		return "get constellation " + v.String() + " from the publisher of this program"
	}
	for _, d := range k.CLI {
		if d.OS == runtime.GOOS && d.Arch == runtime.GOARCH {
			if d.Digest == "" {
				return "download " + d.URL + " (its digest is unknown: ask the publisher)"
			}
			return "download " + d.URL + " and compare its digest with " + d.Digest
		}
	}
	return fmt.Sprintf("build constellation %s from source: no download for %s/%s", v, runtime.GOOS, runtime.GOARCH)
}

// explain returns why a hop is a separate one, and its effect on workers.
func (p *planner) explain(path []*vertex, i int) []string {
	var why []string
	n := path[i]
	if i == 0 && (n.from.services.Mixed() || n.from.image.Mixed() || n.from.kubernetes.Mixed()) {
		why = append(why, "the rollout in progress ends first")
	}
	if i > 0 {
		why = append(why, p.separate(path[i-1], n, i, fmt.Sprintf("hop %d", i))...)
	} else if len(path) > 1 {
		for _, s := range p.separate(n, path[1], 1, "this hop") {
			why = append(why, "precedes hop 2: "+s)
		}
	}
	return append(why, p.workers(path, i)...)
}

// separate returns the reasons why two consecutive hops cannot be one. first names the
// earlier hop in the texts; number is its number.
func (p *planner) separate(a, b *vertex, number int, first string) []string {
	now := p.running(&a.from.state)
	if a.from == p.start {
		now = p.now
	}
	var out []string
	brings := ", provided by " + first
	for _, r := range Blocks(p.m.Check(b.hop.services, now, Planned{Services: b.hop.services, Image: b.hop.image, Kubernetes: b.hop.kubernetes}, p.o)) {
		switch r.Rule {
		case "oldest-supports-kubernetes":
			out = append(out, "Kubernetes "+b.hop.kubernetes.MinorString()+" needs image "+a.hop.image.MinorString()+" on the control planes first"+brings)
		case "services-support-kubernetes":
			out = append(out, "release "+b.hop.services.String()+" does not support Kubernetes "+a.from.kubernetes.Oldest.MinorString()+" and needs "+a.hop.kubernetes.MinorString()+" first"+brings)
		case "minor-drift":
			out = append(out, "services and image go up one minor at a time: "+b.hop.services.MinorString()+" needs "+a.hop.services.MinorString()+" first"+brings)
		case "kubernetes-minor":
			out = append(out, "Kubernetes goes up one minor at a time: "+b.hop.kubernetes.MinorString()+" needs "+a.hop.kubernetes.MinorString()+" first"+brings)
		case "upgrade-from":
			out = append(out, "release "+b.hop.services.String()+" needs services "+a.hop.services.String()+" first"+brings)
		case "image-services":
			out = append(out, "services "+b.hop.services.MinorString()+" need image "+a.hop.image.MinorString()+" on all nodes first"+brings)
		case "kubelet-skew":
			out = append(out, "Kubernetes "+b.hop.kubernetes.MinorString()+" needs kubelets that are newer than "+a.from.oldestKubelet().String()+" first"+brings)
		case "etcd-step":
			out = append(out, cmp.Or(p.etcdReason(a, b), r.Title)+brings)
		case "rollout-running":
			out = append(out, r.Title+fmt.Sprintf(", and ends with hop %d", number))
		case "cli-services", "cli-image":
			// Usually the same reason as minor-drift.
			if len(out) == 0 {
				out = append(out, r.Title)
			}
		default:
			out = append(out, r.Title)
		}
	}
	return out
}

// etcdReason explains why hop a brings another etcd before b; empty if it does not.
func (p *planner) etcdReason(a, b *vertex) string {
	if a.hop.etcd == "" {
		return ""
	}
	return "etcd " + parseEtcd(b.etcd).MinorString() + " of Kubernetes " + b.hop.kubernetes.MinorString() + " can be started on data of etcd " + parseEtcd(a.etcd).String() + " or newer, and " + parseEtcd(a.from.etcd).String() + " runs"
}

// oldestKubelet returns the oldest kubelet of all nodes.
func (s *state) oldestKubelet() version.Version {
	return s.kubelet.Add(s.workerKubelet.Oldest).Oldest
}

// workers explains why a hop keeps or replaces workers, if that is not obvious.
func (p *planner) workers(path []*vertex, i int) []string {
	n := path[i]
	_, replaced := n.from.replaces(n.hop)
	behind := minorsUp(n.workerKubelet.Oldest, n.kubernetes.Newest)
	switch {
	case n.hop.keep && behind > 0:
		return []string{fmt.Sprintf("workers stay: kubelets %s may be %s behind", n.workerKubelet.Oldest.MinorString(), minors(behind))}
	case n.hop.keep && !n.workerImage.Oldest.SameMinor(n.services.Newest):
		return []string{fmt.Sprintf("workers stay: image %s may be one minor older than the services", n.workerImage.Oldest.MinorString())}
	case n.hop.keep:
		return []string{"workers stay: a later hop replaces them"}
	case !replaced || i == len(path)-1:
		return nil
	}
	// Name the first later hop that a rule would forbid if the workers were kept now.
	kept := n.state
	kept.workerImage, kept.workerKubelet = n.from.workerImage, n.from.workerKubelet
	for j, next := range path[i+1:] {
		now := p.running(&kept)
		for _, r := range Blocks(p.m.Check(next.hop.services, now, Planned{Services: next.hop.services, Image: next.hop.image, Kubernetes: next.hop.kubernetes, KeepWorkers: true}, p.o)) {
			return []string{fmt.Sprintf("workers are replaced now; otherwise, in hop %d, %s", i+j+2, r.Title)}
		}
		kept.services, kept.image, kept.kubernetes, kept.kubelet, kept.etcd = next.services, next.image, next.kubernetes, next.kubelet, next.etcd
	}
	return nil
}

// minors formats a number of minors: "two minors".
func minors(n int) string {
	if n == 1 {
		return "one minor"
	}
	return number(n) + " minors"
}

// Reach lists the newer versions of one component of a cluster.
type Reach struct {
	// Component is cli, services, image or kubernetes.
	Component string
	// Versions are reachable in one hop, oldest first. Versions of cli can manage the cluster
	// as it is.
	Versions []version.Version
	// Blocked are the other known newer versions, oldest first, with the reason.
	Blocked []Unreachable
}

// Reachable returns for each component, in the order cli, services, image, kubernetes, the
// newer versions that are reachable in one hop with a CLI, newer patches of the running
// minor included, and for each other newer version the reason why it is not.
func (m *Matrix) Reachable(cli version.Version, now Running, o Offer) []Reach {
	o = Offer{Images: memo(o.Images), Kubernetes: memo(o.Kubernetes)}
	image, kubernetes := widen(now.ControlPlaneImage, now.Target.ImageVersion).Newest, widen(now.Kubernetes, now.Target.Kubernetes).Newest
	out := []Reach{{Component: "cli"}, {Component: "services"}, {Component: "image"}, {Component: "kubernetes"}}
	add := func(r *Reach, v version.Version, cli version.Version, to Planned) {
		for _, res := range m.Check(cli, now, to, o) {
			if res.Severity == plan.Block {
				r.Blocked = append(r.Blocked, Unreachable{Component: r.Component, Version: v.String(), Rule: res.Rule, Reason: res.Title, Remedy: res.Remedy, Reference: res.Reference})
				return
			}
		}
		r.Versions = append(r.Versions, v)
	}
	var patches []version.Version
	for i := range m.releases {
		v := m.releases[i].Version
		if cli.Less(v) {
			add(&out[0], v, v, Planned{Services: v, Image: image, Kubernetes: kubernetes})
		}
		if now.Services.Newest.Less(v) {
			add(&out[1], v, cli, Planned{Services: v, Image: image, Kubernetes: kubernetes})
		}
		if image.Less(v) {
			add(&out[2], v, cli, Planned{Services: cli, Image: v, Kubernetes: kubernetes})
		}
		for _, q := range m.releases[i].patches {
			if kubernetes.Less(q.version) {
				patches = append(patches, q.version)
			}
		}
	}
	slices.SortFunc(patches, version.Version.Compare)
	for _, v := range slices.CompactFunc(patches, version.Version.Equal) {
		add(&out[3], v, cli, Planned{Services: cli, Image: image, Kubernetes: v})
	}
	return out
}

// Texts of Notes.
const (
	NoteNewerCLI       = "In newer CLI versions there are even newer versions available."
	NoteFinishServices = "Finish the service upgrade with this CLI first."
)

// Notes returns remarks about CLIs: newer CLIs have newer versions, and the services must be
// upgraded with this CLI first.
func (m *Matrix) Notes(cli version.Version, now Running) []string {
	newer := slices.ContainsFunc(m.releases, func(k known) bool {
		return cli.Less(k.Version) && k.Version.Major() == cli.Major() && k.Faulty == "" && (k.Version.Prerelease() == "" || k.Version.SameMinor(cli) && cli.Prerelease() != "")
	})
	if !newer {
		return nil
	}
	out := []string{NoteNewerCLI}
	if !now.Services.IsZero() && now.Services.Oldest.Less(cli) {
		out = append(out, NoteFinishServices)
	}
	return out
}
