package engine

import (
	"cmp"
	"fmt"
	"math"
	"runtime"
	"slices"

	"constellation/engine/release"
	"constellation/engine/version"
)

// The planner walks over states of a cluster. An edge is a hop that no rule forbids;
// it leads to the state that the cluster has when the hop is over. The search goes
// hop by hop, so the first layer that holds the goal holds a shortest path; within a
// layer, a state keeps the way with the fewest replacements of workers, then with the
// fewest changes, then with the newest versions first.
//
// What may be chosen for a hop is thinned out without losing a path: of neighbours
// that can do the same, only the newest is tried (see planner.releases).

// Path returns the best way from what runs to goal, a hop for each run of `upgrade
// apply`. Zero fields of goal are not demanded, with one exception: with a release
// and no image, the newest image of that release's minor is. At the end all nodes run
// what the control planes run.
//
// The best way has the fewest hops; among those the fewest replacements of workers,
// then the fewest changes, then the newest patches. It depends on nothing but the
// arguments and the matrix, not on their order.
//
// If there is no way, the hops are nil, and the results are what is in the way. If
// nothing needs to be done both are empty.
func (m *Matrix) Path(now Running, goal Planned, o Offer) ([]Hop, []*RuleResult) {
	p := newPlanner(m, now, o)
	if p.lost() {
		return nil, p.why(goal)
	}
	goal = p.complete(goal)
	p.goal = goal
	if p.start.reached(&goal) {
		return nil, nil
	}
	// Whether there is a way at all does not depend on workers that are kept: newer
	// ones are in nobody's way. So this is asked first, in a much smaller space.
	if p.search(false) == nil {
		return nil, p.inTheWay(goal)
	}
	return p.hops(p.search(true)), nil
}

// Goal fills in what given leaves open, so that the result is the newest state that
// there is a path to: first the release is as new as can be, then Kubernetes, then the
// image. Versions of given are met exactly; its other fields are not looked at. With a
// zero given and nothing newer that can be reached, it is what runs.
//
// Releases that are a pre-release are left out, unless given names them. If there is
// no path to what is given, it is returned as it is; [Matrix.Path] says why.
func (m *Matrix) Goal(now Running, given Planned, o Offer) Planned {
	p := newPlanner(m, now, o)
	given = Planned{Services: p.intern(given.Services), Image: p.intern(given.Image), Kubernetes: p.intern(given.Kubernetes)}
	open := given == Planned{}
	switch {
	case p.lost() && open:
		return Planned{Services: now.Services.Newest, Image: now.ControlPlaneImage.Newest, Kubernetes: now.Kubernetes.Newest}
	case p.lost():
		return given
	}
	p.goal = given
	var best *place
	if open {
		best = p.start
	}
	at := func(s Span, want version.Version) bool { return want.IsZero() || s.is(want) }
	p.explore(false, func(layer []*place) bool {
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

// Planned returns what a hop leads to, as [Matrix.Check] takes it. It is zero in fields
// that are no versions.
func (h Hop) Planned() Planned {
	parse := func(s string) version.Version {
		v, err := version.Parse(s)
		if err != nil {
			return version.Version{}
		}
		return v
	}
	return Planned{Services: parse(h.To.Release), Image: parse(h.To.Image), Kubernetes: parse(h.To.Kubernetes), KeepWorkers: !h.ReplaceWorkers}
}

// state is what a cluster runs, as far as rules care. Versions are interned: equal
// ones are identical, so that states can be keys of a map.
type state struct {
	services, image, kubernetes, kubelet Span
	workerImage, workerKubelet           Span
	etcd                                 string
}

// place is a state and the best way to it.
type place struct {
	state
	from                  *place // nil at the start
	hop                   move   // the last one
	depth, workers, count int    // hops; of these with workers replaced; changes
	rank                  int    // among its layer, the newest versions first
}

// move is what a hop does.
type move struct {
	services, image, kubernetes version.Version
	keep                        bool // the workers, although they are not at the rest
}

// planner searches. It is made for one question.
type planner struct {
	m     *Matrix
	now   Running
	start *place
	goal  Planned // zero fields are not demanded
	o     Offer
	seen  map[string]version.Version // interned
	all   []*place                   // in the order in which they were found
	// thinned lists, by what they depend on
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
	p.start = &place{state: state{
		services: span(now.Services), image: span(widen(now.ControlPlaneImage, now.Target.ImageVersion)),
		kubernetes: span(widen(now.Kubernetes, now.Target.Kubernetes)), kubelet: span(now.ControlPlaneKubelet),
		workerImage: span(now.WorkerImage), workerKubelet: span(now.WorkerKubelet), etcd: now.Etcd,
	}}
	return p
}

// memo asks a provider once per version: its answers may cost a request.
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

// lost reports whether too little is known to plan anything.
func (p *planner) lost() bool {
	return p.start.services.IsZero() || p.start.image.IsZero() || p.start.kubernetes.IsZero()
}

// why returns what cannot be checked.
func (p *planner) why(goal Planned) []*RuleResult {
	cli := goal.Services
	if cli.IsZero() {
		cli = p.now.Services.Newest
	}
	results := p.m.Check(cli, p.now, goal, p.o)
	return slices.DeleteFunc(results, func(r *RuleResult) bool { return r.Severity != Block && r.Severity != NotChecked })
}

// complete fills in the image that a release comes with, and interns.
func (p *planner) complete(goal Planned) Planned {
	goal = Planned{Services: p.intern(goal.Services), Image: p.intern(goal.Image), Kubernetes: p.intern(goal.Kubernetes)}
	if goal.Services.IsZero() || !goal.Image.IsZero() {
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
		offered = running // there is nothing newer
	}
	if offered.IsZero() {
		offered = newest // the provider has none: the rule about that says so
	}
	goal.Image = p.intern(offered)
	return goal
}

func (p *planner) offersImage(v version.Version) bool {
	if p.o.Images == nil {
		return true
	}
	ok, _, _ := p.o.Images(v)
	return ok
}

func (p *planner) offersKubernetes(v version.Version) bool {
	if p.o.Kubernetes == nil {
		return true
	}
	ok, _, _ := p.o.Kubernetes(v)
	return ok
}

// reached reports whether the state is what goal demands, on all nodes.
func (s *state) reached(goal *Planned) bool {
	at := func(span Span, want version.Version) bool {
		return !span.Mixed() && (want.IsZero() || span.Oldest.Equal(want))
	}
	return at(s.services, goal.Services) && at(s.image, goal.Image) && at(s.kubernetes, goal.Kubernetes) &&
		(s.kubelet.IsZero() || s.kubelet.is(s.kubernetes.Oldest)) &&
		(s.workerImage.IsZero() || s.workerImage.is(s.image.Oldest)) &&
		(s.workerKubelet.IsZero() || s.workerKubelet.is(s.kubernetes.Oldest))
}

// running returns the state as the rules take it.
func (s *state) running() Running {
	return Running{
		Services: s.services, ControlPlaneImage: s.image, WorkerImage: s.workerImage, Kubernetes: s.kubernetes,
		ControlPlaneKubelet: s.kubelet, WorkerKubelet: s.workerKubelet, Etcd: s.etcd,
	}
}

// replaces reports which nodes a move makes anew.
func (s *state) replaces(mv move) (controlPlanes, workers bool) {
	controlPlanes = !s.image.is(mv.image) || !s.kubernetes.is(mv.kubernetes) || !s.kubelet.IsZero() && !s.kubelet.is(mv.kubernetes)
	behind := !s.workerImage.IsZero() && !s.workerImage.is(mv.image) || !s.workerKubelet.IsZero() && !s.workerKubelet.is(mv.kubernetes)
	return controlPlanes, behind && !mv.keep
}

// after returns the state when a hop is over.
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
	if !s.kubernetes.is(mv.kubernetes) {
		out.etcd = "" // that of the new patch
		if k := p.m.find(mv.services); k != nil {
			for _, q := range k.Kubernetes {
				if q.Version.Equal(mv.kubernetes) {
					out.etcd = q.Etcd
				}
			}
		}
	}
	return out
}

// changes counts what a move brings to another version.
func (s *state) changes(mv move) int {
	n := 0
	for _, c := range [...]struct {
		span Span
		to   version.Version
	}{{s.services, mv.services}, {s.image, mv.image}, {s.kubernetes, mv.kubernetes}} {
		if !c.span.is(c.to) {
			n++
		}
	}
	return n
}

// newer orders moves: the newest versions first, then those that keep workers.
func (mv move) newer(other move) int {
	return cmp.Or(other.services.Compare(mv.services), other.kubernetes.Compare(mv.kubernetes), other.image.Compare(mv.image), keepFirst(mv.keep, other.keep))
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

// search returns the best place that is the goal, or nil.
func (p *planner) search(keep bool) *place {
	var found *place
	p.explore(keep, func(layer []*place) bool {
		for _, n := range layer { // the newest first
			if n.reached(&p.goal) && (found == nil || cmp.Or(n.workers-found.workers, n.count-found.count) < 0) {
				found = n
			}
		}
		return found != nil
	})
	return found
}

// explore visits all states that can be reached, layer by layer, until done says so.
// Workers are kept only if keep allows it.
func (p *planner) explore(keep bool, done func(layer []*place) bool) {
	p.bySpan = map[version.Version][]*known{}
	p.images = map[version.Version][]version.Version{}
	p.patches = map[[2]version.Version][]version.Version{}
	visited := map[state]bool{p.start.state: true}
	p.all = []*place{p.start}
	layer := []*place{p.start}
	for len(layer) > 0 && !done(layer) {
		next := map[state]*place{}
		for _, from := range layer {
			p.expand(from, keep, func(mv move) {
				s := p.after(&from.state, mv)
				if visited[s] {
					return
				}
				n := &place{state: s, from: from, hop: mv, depth: from.depth + 1, workers: from.workers, count: from.count + from.changes(mv)}
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
		// Two ways of one layer differ in a hop, so the order is total.
		slices.SortFunc(layer, func(a, b *place) int { return cmp.Or(a.from.rank-b.from.rank, a.hop.newer(b.hop)) })
		for i, n := range layer {
			n.rank = i
		}
		p.all = append(p.all, layer...)
	}
}

// better orders two ways of one length to one state.
func (n *place) better(o *place) int {
	return cmp.Or(n.workers-o.workers, n.count-o.count, n.from.rank-o.from.rank, n.hop.newer(o.hop))
}

// expand calls yield with every hop from a place that changes something and that no
// rule forbids.
func (p *planner) expand(from *place, keep bool, yield func(move)) {
	now := from.running()
	keeps := []bool{false}
	if keep && !from.workerKubelet.IsZero() {
		keeps = []bool{false, true}
	}
	for _, r := range p.releases(from.services.Newest) {
		services := p.intern(r.Version)
		for _, image := range p.imagesOf(r, from.image.Newest) {
			for _, k := range p.patchesOf(r, from.kubernetes.Newest) {
				for _, keep := range keeps {
					mv := move{services, image, k, keep}
					cps, workers := from.replaces(mv)
					if !cps && !workers && from.services.is(services) {
						continue // nothing happens
					}
					if keep {
						if _, behind := from.replaces(move{services, image, k, false}); !behind {
							continue // there is nothing to keep
						}
					}
					s := step{m: p.m, cli: services, now: &now, o: &p.o, to: Planned{Services: mv.services, Image: mv.image, Kubernetes: mv.kubernetes, KeepWorkers: mv.keep}}
					s.prepare()
					if s.allowed() {
						yield(mv)
					}
				}
			}
		}
	}
}

// releases returns which releases may come next: the one that runs, and newer ones of
// its minor and the next that nothing speaks against. Of neighbours in the same minor
// the older is left out if the newer one can be gone to from all releases that it can,
// and has all its patches of Kubernetes: whatever is done with the older one can be
// done with the newer.
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
		// Unknown or faulty: the rules say what can still be done with it.
		if k := p.m.find(runs); k != nil {
			out = append(out, k)
		} else {
			out = append(out, &known{Summary: release.Summary{Version: runs}})
		}
	}
	p.bySpan[runs] = out
	return out
}

// beyond reports whether v is not to be chosen: it is newer than what is demanded, or
// a pre-release that nobody demanded.
func (p *planner) beyond(v, demanded version.Version) bool {
	return !demanded.IsZero() && demanded.Less(v) || v.Prerelease() != "" && !v.Equal(demanded)
}

// replaces reports whether newer can do what older can.
func (p *planner) replaces(newer, older *known) bool {
	if newer.UpgradeFrom.IsZero() || !older.UpgradeFrom.IsZero() && older.UpgradeFrom.Less(newer.UpgradeFrom) {
		return false
	}
	for i := range older.patches {
		o := &older.patches[i]
		if o.faulty != "" { // nobody goes to it; but who runs a patch of its minor may stay there
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

// imagesOf returns which images a CLI may bring: the one that runs, and newer ones of
// its minor. Of neighbours that support the same minors of Kubernetes the newest is
// enough, but for the one that workers have already: it spares their replacement.
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
			if minors := k.supported; minors != last || len(newer) == 0 || p.start.workerImage.is(k.Version) {
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

// patchesOf returns which Kubernetes a release may bring: the one that runs, and newer
// patches of its minor and the next. Of neighbours with one etcd the newest is enough,
// but for the one that workers have already.
func (p *planner) patchesOf(r *known, runs version.Version) []version.Version {
	key := [2]version.Version{r.Version, runs}
	if out, ok := p.patches[key]; ok {
		return out
	}
	var out []version.Version
	var last *patch
	for i := range slices.Backward(r.patches) {
		q := &r.patches[i]
		if up := minorsUp(runs, q.version); up < 0 || up > 1 || !runs.Less(q.version) || q.faulty != "" || p.beyond(q.version, p.goal.Kubernetes) || !p.offersKubernetes(q.version) {
			continue
		}
		if last == nil || !last.version.SameMinor(q.version) || !last.etcd.Equal(q.etcd) || p.start.workerKubelet.is(q.version) {
			out, last = append(out, p.intern(q.version)), q
		}
	}
	out = append(out, runs)
	p.patches[key] = out
	return out
}

// static are the rules that no path can get around: they are about the goal itself.
var static = []string{"unknown-release", "faulty", "same-major", "never-down", "kubernetes-offered", "kubeadm-floor", "offered-image", "offered-kubernetes", "control-plane-skew"}

// inTheWay returns what forbids the goal: what is wrong with the goal itself, else
// what forbids the last steps that could still be made.
func (p *planner) inTheWay(goal Planned) []*RuleResult {
	cli := goal.Services
	if cli.IsZero() {
		// The release that has this Kubernetes, or the newest, which says that it has not.
		cli = p.start.services.Newest
		for i := range p.m.releases {
			if k := &p.m.releases[i]; cli.Less(k.Version) && k.Faulty == "" && k.Version.Prerelease() == "" {
				if here := p.m.find(cli); here != nil && here.patch(goal.Kubernetes) != nil {
					break
				}
				cli = k.Version
			}
		}
		goal.Services = cli
	}
	direct := blocks(p.m.Check(cli, p.now, goal, p.o))
	if out := slices.DeleteFunc(slices.Clone(direct), func(r *RuleResult) bool { return !slices.Contains(static, r.Rule) }); len(out) > 0 {
		return out
	}
	// From the state that is nearest to the goal, look at all next steps, also those
	// that are not worth trying, and tell about the one with the least in its way.
	nearest := p.start
	far := func(s *state) int {
		return minorsUp(s.services.Newest, goal.Services) + max(0, minorsUp(s.kubernetes.Newest, orVersion(goal.Kubernetes, s.kubernetes.Newest))) + minorsUp(s.image.Newest, orVersion(goal.Image, s.image.Newest))
	}
	for _, n := range p.all {
		if far(&n.state) < far(&nearest.state) {
			nearest = n
		}
	}
	best, bestFar := direct, math.MaxInt
	now := nearest.running()
	if nearest == p.start {
		now = p.now
	}
	for i := range p.m.releases {
		r := &p.m.releases[i]
		if up := minorsUp(nearest.services.Newest, r.Version); r.Version.Less(nearest.services.Newest) || up > 1 || goal.Services.Less(r.Version) {
			continue
		}
		versions := []version.Version{nearest.kubernetes.Newest}
		for _, q := range r.patches {
			if up := minorsUp(nearest.kubernetes.Newest, q.version); up >= 0 && up <= 1 && nearest.kubernetes.Newest.Less(q.version) && (goal.Kubernetes.IsZero() || !goal.Kubernetes.Less(q.version)) {
				versions = append(versions, q.version)
			}
		}
		images := []version.Version{nearest.image.Newest}
		if nearest.image.Newest.Less(r.Version) && (goal.Image.IsZero() || !goal.Image.Less(r.Version)) {
			images = append(images, r.Version)
		}
		for _, image := range images {
			for _, k := range versions {
				mv := move{r.Version, image, k, false}
				after := p.after(&nearest.state, mv)
				d := far(&after)
				if d >= far(&nearest.state) && !after.reached(&goal) {
					continue // leads nowhere
				}
				found := blocks(p.m.Check(r.Version, now, Planned{Services: r.Version, Image: image, Kubernetes: k}, p.o))
				if len(found) > 0 && (bestFar == math.MaxInt || len(found) < len(best) || len(found) == len(best) && d < bestFar) {
					best, bestFar = found, d
				}
			}
		}
	}
	if len(best) == 0 {
		best = p.gap(nearest, goal)
	}
	return best
}

// gap is said if nothing leads on from a place: a minor is missing.
func (p *planner) gap(nearest *place, goal Planned) []*RuleResult {
	return []*RuleResult{{
		Rule: "unknown-release", Severity: Block, Reference: policyPage,
		Title:  fmt.Sprintf("nothing that is known leads from services %s and Kubernetes %s to services %s and Kubernetes %s", nearest.services.Newest, nearest.kubernetes.Newest, goal.Services, orVersion(goal.Kubernetes, nearest.kubernetes.Newest)),
		Remedy: "known are " + p.m.list() + "; point `--feed` to where the releases in between are published",
	}}
}

func orVersion(v, other version.Version) version.Version {
	if v.IsZero() {
		return other
	}
	return v
}

// hops tells the way to a place.
func (p *planner) hops(end *place) []Hop {
	var way []*place
	for n := end; n.from != nil; n = n.from {
		way = append(way, n)
	}
	slices.Reverse(way)
	target := func(s *state) Target {
		return Target{Release: s.services.Newest.String(), Image: s.image.Newest.String(), Kubernetes: s.kubernetes.Newest.String()}
	}
	var out []Hop
	for i, n := range way {
		h := Hop{Number: i + 1, CLI: n.hop.services, From: target(&n.from.state), To: target(&n.state), Get: p.m.get(n.hop.services)}
		if i == 0 { // as it runs: the rollout that is under way may not have begun
			h.From = Target{Release: p.now.Services.String(), Image: p.now.ControlPlaneImage.String(), Kubernetes: p.now.Kubernetes.String()}
		}
		h.ReplaceControlPlanes, h.ReplaceWorkers = n.from.replaces(n.hop)
		h.Why = p.explain(way, i)
		out = append(out, h)
	}
	return out
}

// get says how to get the CLI of a release; empty if it is this program.
func (m *Matrix) get(v version.Version) string {
	if v.String() == version.Release {
		return ""
	}
	k := m.find(v)
	if k == nil || len(k.CLI) == 0 {
		return "take constellation " + v.String() + " from where you got this one"
	}
	for _, d := range k.CLI {
		if d.OS == runtime.GOOS && d.Arch == runtime.GOARCH {
			if d.Digest == "" {
				return "download " + d.URL + " (its digest is not known: ask who published it)"
			}
			return "download " + d.URL + " and compare its digest with " + d.Digest
		}
	}
	return fmt.Sprintf("build constellation %s from source: there is no download for %s on %s", v, runtime.GOOS, runtime.GOARCH)
}

// explain says why a hop is one of its own, and what it does with workers.
func (p *planner) explain(way []*place, i int) []string {
	var why []string
	n := way[i]
	if i == 0 && (n.from.services.Mixed() || n.from.image.Mixed() || n.from.kubernetes.Mixed()) {
		why = append(why, "the rollout that is under way ends first")
	}
	if i > 0 {
		why = append(why, p.together(way[i-1], n, i, fmt.Sprintf("hop %d", i))...)
	} else if len(way) > 1 {
		for _, s := range p.together(n, way[1], 1, "this hop") {
			why = append(why, "it comes before hop 2: "+s)
		}
	}
	return append(why, p.workers(way, i)...)
}

// together says why two hops in a row cannot be one, a sentence per reason. first is
// how to call the earlier one, which is number.
func (p *planner) together(a, b *place, number int, first string) []string {
	now := a.from.running()
	if a.from == p.start {
		now = p.now
	}
	var out []string
	brings := ", which " + first + " brings"
	for _, r := range blocks(p.m.Check(b.hop.services, now, Planned{Services: b.hop.services, Image: b.hop.image, Kubernetes: b.hop.kubernetes}, p.o)) {
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
			out = append(out, r.Title+brings)
		case "rollout-running":
			out = append(out, r.Title+fmt.Sprintf(", and ends with hop %d", number))
		case "cli-services", "cli-image":
			// Often minor-drift again, seen from the CLI.
			if len(out) == 0 {
				out = append(out, r.Title)
			}
		default:
			out = append(out, r.Title)
		}
	}
	return out
}

// oldestKubelet is of all nodes.
func (s *state) oldestKubelet() version.Version {
	return s.kubelet.Add(s.workerKubelet.Oldest).Oldest
}

// workers says what a hop does with them, if that is not plain.
func (p *planner) workers(way []*place, i int) []string {
	n := way[i]
	_, replaced := n.from.replaces(n.hop)
	behind := minorsUp(n.workerKubelet.Oldest, n.kubernetes.Newest)
	switch {
	case n.hop.keep && behind > 0:
		return []string{fmt.Sprintf("workers stay: kubelets %s may be %s behind", n.workerKubelet.Oldest.MinorString(), minors(behind))}
	case n.hop.keep && !n.workerImage.Oldest.SameMinor(n.services.Newest):
		return []string{fmt.Sprintf("workers stay: image %s may be one minor older than the services", n.workerImage.Oldest.MinorString())}
	case n.hop.keep:
		return []string{"workers stay: a later hop replaces them"}
	case !replaced || i == len(way)-1:
		return nil
	}
	// What would go wrong in the next hop if they stayed? It is the next hop or one
	// after it; the first that forbids it is named.
	kept := n.state
	kept.workerImage, kept.workerKubelet = n.from.workerImage, n.from.workerKubelet
	for j, next := range way[i+1:] {
		now := kept.running()
		for _, r := range blocks(p.m.Check(next.hop.services, now, Planned{Services: next.hop.services, Image: next.hop.image, Kubernetes: next.hop.kubernetes, KeepWorkers: true}, p.o)) {
			return []string{fmt.Sprintf("workers are replaced now; otherwise, in hop %d, %s", i+j+2, r.Title)}
		}
		kept.services, kept.image, kept.kubernetes, kept.kubelet, kept.etcd = next.services, next.image, next.kubernetes, next.kubelet, next.etcd
	}
	return nil
}

// minors is "two minors".
func minors(n int) string {
	if n == 1 {
		return "one minor"
	}
	return number(n) + " minors"
}

// Reach is what is newer of one component, from where a cluster is.
type Reach struct {
	// Component is cli, services, image or kubernetes.
	Component string
	// Versions may be gone to in one hop, oldest first. Those of cli can take over the
	// cluster as it is.
	Versions []version.Version
	// Blocked are the others that are known and newer, oldest first, with why.
	Blocked []Unreachable
}

// Reachable returns for each component, in the order cli, services, image, kubernetes,
// the newer versions that are one hop away with a CLI, newer patches of the same minor
// included, and why each other newer version is not.
func (m *Matrix) Reachable(cli version.Version, now Running, o Offer) []Reach {
	o = Offer{Images: memo(o.Images), Kubernetes: memo(o.Kubernetes)}
	image, kubernetes := widen(now.ControlPlaneImage, now.Target.ImageVersion).Newest, widen(now.Kubernetes, now.Target.Kubernetes).Newest
	out := []Reach{{Component: "cli"}, {Component: "services"}, {Component: "image"}, {Component: "kubernetes"}}
	add := func(r *Reach, v version.Version, cli version.Version, to Planned) {
		for _, res := range m.Check(cli, now, to, o) {
			if res.Severity == Block {
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

// Sentences of Notes.
const (
	NoteNewerCLI       = "In newer CLI versions there are even newer versions available."
	NoteFinishServices = "Finish the service upgrade with this CLI first."
)

// Notes returns what people must read about CLIs: that there are newer ones with newer
// versions, and that the services must be brought to this one before.
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
