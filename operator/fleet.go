package operator

import (
	"context"
	"errors"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"constellation/engine/cloud"
	"constellation/operator/api/v1alpha1"
	"constellation/operator/decision"
)

// Intervals of requests to the cloud. A machine that is being created or deleted changes within
// seconds, so it is described by ID at that interval. All machines are listed less often the more of
// them change, and as often as groups if none does.
const (
	fleetMoves = 2 * time.Second
	fleetSick  = time.Minute // while a Node is not Ready: its machine may be gone
	fleetLeast = 500 * time.Millisecond

	// The cloud is eventually consistent: it may not find an instance for a while after it has
	// accepted the creation. An instance whose Node is Ready is assumed to exist for a while.
	unseenLag = decision.CreateDeadline
	readyLag  = time.Minute

	// askedFor is how long an accepted deletion is not repeated while the state of the instance is
	// unknown.
	askedFor = 5 * time.Second
)

// never is the age of a list that was never read.
const never = time.Duration(1<<63 - 1)

// describer is a cloud that can describe many instances in one request. The answer omits unknown
// instances.
type describer interface {
	Describe(ctx context.Context, keys []string) ([]cloud.Instance, error)
}

// fleet is the last observation of the cloud's instances. It calls the cloud only in methods that
// refresh or change it, and is safe for concurrent use.
//
// If a Node or an intent names an instance that is missing from the list, fleet describes it by its
// key. If the cloud does not find the key, the instance is gone and is kept as Terminated. Otherwise
// the list was partial. In this file, the ID of an instance is its cloud.Key.
type fleet struct {
	cloudAPI
	now func() time.Time

	mu       sync.Mutex
	known    map[string]seen     // by ID
	since    map[string]shown    // those of known, as first returned by view
	sorted   []decision.Instance // result of view; nil: known has changed
	finder   *decision.Index     // index of sorted
	complete bool
	listed   time.Time // time of the last list request
	heard    time.Time // time of the last request of any kind
	// asked has the times of deletion requests for instances that were not described since.
	asked map[string]time.Time
}

// seen is the last observation of an instance.
type seen struct {
	cloud.Instance
	at      time.Time // time of the request whose answer this is
	listed  bool      // by the list or by its ID, not only by the answer to its creation
	missing time.Time // since when the cloud does not find it; zero: it does
}

// claim is a reference of a Node or an intent to an instance.
type claim struct {
	ready  bool   // its Node is Ready
	leaves bool   // it is bound to leave
	name   string // that an intent has recorded; empty: none
}

// shown has the immutable data of an instance.
type shown struct {
	at   time.Time // when view first returned it
	mark string
}

func newFleet(m cloudAPI, now func() time.Time) *fleet {
	return &fleet{cloudAPI: m, now: now, known: map[string]seen{}, since: map[string]shown{}, asked: map[string]time.Time{}}
}

// view returns the instances, whether they are complete, their age, and their index. Before the
// first list the age is never. Callers must not modify the result, because it is shared until the
// next change.
func (f *fleet) view() (all []decision.Instance, complete bool, age time.Duration, x *decision.Index) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.sorted == nil {
		f.sorted = make([]decision.Instance, 0, len(f.known))
		before := f.since
		f.since = make(map[string]shown, len(f.known))
		now := f.now()
		for id, s := range f.known {
			// Not the time of its creation, because that is from another clock.
			since, ok := before[id]
			if !ok {
				since = shown{at: now, mark: decision.MachineHash(id)}
			}
			f.since[id] = since
			f.sorted = append(f.sorted, decision.Instance{
				ID: id, Name: s.Name, Group: s.Group, Role: roles[s.Role], Image: s.Image, Token: s.Token, Hash: since.mark, ReplacesHash: decision.ReplacedHash(s.Token),
				State: v1alpha1.InstanceState(s.State), Since: since.at, Address: addressOf(s.IP), Created: s.Created,
			})
		}
		slices.SortFunc(f.sorted, func(a, b decision.Instance) int { return strings.Compare(a.ID, b.ID) })
		f.finder = decision.NewIndex(f.sorted)
	}
	if f.listed.IsZero() {
		return f.sorted, false, never, f.finder
	}
	return f.sorted, f.complete, f.now().Sub(f.listed), f.finder
}

// roles maps roles of the cloud to roles of the API.
var roles = map[cloud.Role]v1alpha1.Role{cloud.ControlPlane: v1alpha1.ControlPlaneRole, cloud.Worker: v1alpha1.WorkerRole}

func addressOf(ip netip.Addr) string {
	if !ip.IsValid() {
		return ""
	}
	return ip.Unmap().String()
}

// quiet returns the time since the last request about instances.
func (f *fleet) quiet() time.Duration {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.heard.IsZero() {
		return never
	}
	return f.now().Sub(f.heard)
}

// refresh lists the instances, and describes those of about that are missing from the list.
func (f *fleet) refresh(ctx context.Context, about map[string]claim) error {
	begun := f.now()
	// The list may miss instances that are created or end during the request. It must contain those that
	// existed before.
	f.mu.Lock()
	before := maps.Clone(f.known)
	f.mu.Unlock()
	list, err := f.Instances(ctx)
	partial := errors.Is(err, cloud.ErrPartial)
	if err != nil && !partial {
		return err
	}
	known, listed := make(map[string]seen, len(list)), make(map[string]bool)
	for _, i := range list {
		known[i.Key()] = seen{Instance: i, at: begun, listed: true}
		if i.Incarnation != "" {
			listed[i.ProviderID] = true
		}
	}
	var ask []string
	for id := range about {
		if _, ok := known[id]; ok || listed[id] {
			continue
		}
		if s, ok := before[id]; ok && s.ended(id) {
			known[id] = s
			continue
		}
		ask = append(ask, id)
	}
	for id, s := range before { // the operator just created it
		if _, ok := known[id]; !ok && !s.listed && s.State != cloud.Terminated {
			if _, ok := about[id]; !ok {
				ask = append(ask, id)
			}
		}
	}
	slices.Sort(ask)
	found, asked := f.describe(ctx, ask) // IDs without an answer are requested again
	for _, id := range ask {
		if _, there := found[id]; there {
			partial = true // without an error of the list
		}
		s, was := before[id]
		if asked[id] {
			s = s.afterRequest(id, found, about[id], begun)
			known[s.Key()] = s
		} else if was {
			known[id] = s
		}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	for id, s := range f.known {
		if s.at.After(begun) {
			// The list may contain an instance whose creation was answered meanwhile.
			in := known[id]
			s.listed = s.listed || in.listed && in.missing.IsZero()
			known[id] = s
		}
	}
	f.known, f.sorted, f.complete, f.listed, f.heard = known, nil, !partial, begun, begun
	return nil
}

// follow describes those of about that are being created or deleted, or are bound to leave. It keeps
// the last observation of the others. If the cloud describes only one instance per request, follow
// lists all instead.
func (f *fleet) follow(ctx context.Context, about map[string]claim) error {
	begun := f.now()
	var ask []string
	f.mu.Lock()
	for id, s := range f.known {
		if a, ok := about[id]; s.State != cloud.Terminated && (a.leaves || ok && s.moves()) {
			ask = append(ask, id)
		}
	}
	f.mu.Unlock()
	slices.Sort(ask)
	found, asked, err := f.bulk(ctx, ask)
	if errors.Is(err, errors.ErrUnsupported) {
		return f.refresh(ctx, about)
	}
	if err != nil {
		return err
	}
	ask = slices.DeleteFunc(ask, func(id string) bool { return !asked[id] })
	f.store(ask, found, about, begun)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.heard = begun
	return nil
}

// confirmDeletion describes instances whose deletion was just accepted. It reports whether the cloud
// lists all of them as terminating or gone.
func (f *fleet) confirmDeletion(ctx context.Context, ids []string) bool {
	begun, about := f.now(), make(map[string]claim, len(ids))
	for _, id := range ids {
		about[id] = claim{leaves: true}
	}
	found, asked, err := f.bulk(ctx, ids)
	if err != nil || len(asked) < len(ids) {
		return false
	}
	f.store(ids, found, about, begun)
	return !slices.ContainsFunc(ids, func(id string) bool {
		i, ok := found[id]
		return ok && i.State != cloud.Terminating && i.State != cloud.Terminated
	})
}

// store stores the cloud's descriptions of instances, except those older than the stored one.
// Answers may arrive out of order.
func (f *fleet) store(ids []string, found map[string]cloud.Instance, about map[string]claim, begun time.Time) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, id := range ids {
		if s := f.known[id]; !s.at.After(begun) {
			s = s.afterRequest(id, found, about[id], begun)
			delete(f.known, id) // an ID without incarnation
			f.known[s.Key()] = s
		}
	}
	f.sorted = nil
}

// moves reports whether the instance is in a transitional state.
func (s seen) moves() bool {
	return s.State == cloud.Creating || s.State == cloud.Terminating || s.State == cloud.Unknown
}

// ended reports whether the machine of a key is gone for good. An ID without incarnation can be that
// of another machine by now, so the cloud is asked again.
func (s seen) ended(id string) bool {
	_, incarnation := cloud.SplitKey(id)
	return s.State == cloud.Terminated && incarnation != ""
}

// afterRequest returns the observation of an instance after a request by its ID. s is the observation before;
// zero: none.
func (s seen) afterRequest(id string, found map[string]cloud.Instance, a claim, now time.Time) seen {
	if i, ok := found[id]; ok {
		return seen{Instance: i, at: now, listed: true}
	}
	s.at = now
	if s.ProviderID == "" {
		s = seen{Instance: cloud.Instance{Name: a.name}, at: now, listed: true}
		s.ProviderID, s.Incarnation = cloud.SplitKey(id)
	}
	if s.missing.IsZero() {
		s.missing = now
	}
	lag := now.Sub(s.missing)
	switch {
	case s.State == cloud.Terminating, a.leaves && s.listed, lag >= unseenLag, s.listed && (!a.ready || lag >= readyLag):
		s.State = cloud.Terminated
	case s.State == "":
		s.State = cloud.Unknown
	}
	return s
}

// bulk describes instances by ID in one call, if the cloud accepts all IDs. asked has the IDs that the
// answer covers. The error is errors.ErrUnsupported if the cloud has no such call.
func (f *fleet) bulk(ctx context.Context, ids []string) (found map[string]cloud.Instance, asked map[string]bool, err error) {
	found, asked = map[string]cloud.Instance{}, map[string]bool{}
	if len(ids) == 0 {
		return found, asked, nil
	}
	d, ok := f.cloudAPI.(describer)
	if !ok {
		return found, asked, errors.ErrUnsupported
	}
	refusals := 0
	return found, asked, inBulk(ctx, d, ids, found, asked, &refusals)
}

// maxRefusals bounds the requests of inBulk: it finds five refused IDs among some thousands.
const maxRefusals = 64

// inBulk adds the descriptions of ids to found and asked. A cloud may refuse a request because of one
// ID, and IDs come from Nodes, whose kubelets write them. So inBulk halves a refused request until
// it has found that ID, which stays without an answer. After maxRefusals it returns the error.
func inBulk(ctx context.Context, d describer, ids []string, found map[string]cloud.Instance, asked map[string]bool, refusals *int) error {
	list, err := d.Describe(ctx, ids)
	switch {
	case err == nil:
	case len(ids) == 1 && errors.Is(err, cloud.ErrNotFound):
	case *refusals >= maxRefusals || ctx.Err() != nil || errors.Is(err, errors.ErrUnsupported) || errors.Is(err, cloud.ErrThrottled) || errors.Is(err, cloud.ErrUnavailable) || errors.Is(err, cloud.ErrDenied):
		return err // of the cloud, not of an ID
	case len(ids) == 1:
		*refusals++
		return nil
	default:
		*refusals++
		half := len(ids) / 2
		if err := inBulk(ctx, d, ids[:half], found, asked, refusals); err != nil {
			return err
		}
		return inBulk(ctx, d, ids[half:], found, asked, refusals)
	}
	for _, id := range ids {
		asked[id] = true
	}
	for _, i := range list {
		found[i.Key()] = i
		if asked[i.ProviderID] {
			found[i.ProviderID] = i
		}
	}
	return nil
}

// describe describes instances by ID, in one call if possible.
func (f *fleet) describe(ctx context.Context, ids []string) (found map[string]cloud.Instance, asked map[string]bool) {
	found, asked, err := f.bulk(ctx, ids)
	if !errors.Is(err, errors.ErrUnsupported) {
		return found, asked
	}
	var mu sync.Mutex
	var g errgroup.Group
	g.SetLimit(8)
	for _, id := range ids {
		g.Go(func() error {
			i, err := f.cloudAPI.Instance(ctx, id)
			mu.Lock()
			defer mu.Unlock()
			if err == nil {
				found[id] = i
			}
			asked[id] = err == nil || errors.Is(err, cloud.ErrNotFound)
			return nil
		})
	}
	_ = g.Wait() // asked has the IDs with an answer
	return found, asked
}

// Instance implements cloudAPI. It answers from the list if possible, because callers need only the
// group and the image of a machine, which do not change.
func (f *fleet) Instance(ctx context.Context, id string) (cloud.Instance, error) {
	f.mu.Lock()
	s, ok := f.known[id]
	f.mu.Unlock()
	if ok && s.missing.IsZero() && s.Image != "" && s.Group != "" {
		return s.Instance, nil
	}
	// Clouds describe machines that joined together by fewer requests.
	if d, ok := f.cloudAPI.(describer); ok {
		if l, err := d.Describe(ctx, []string{id}); err == nil && len(l) == 1 && l[0].Image != "" && l[0].Group != "" {
			return l[0], nil
		}
	}
	return f.cloudAPI.Instance(ctx, id)
}

// DeleteInstances implements cloudAPI, and records the requests.
func (f *fleet) DeleteInstances(ctx context.Context, ids []string) error {
	if err := f.cloudAPI.DeleteInstances(ctx, ids); err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	now := f.now()
	maps.DeleteFunc(f.asked, func(_ string, at time.Time) bool { return now.Sub(at) > askedFor })
	for _, id := range ids {
		f.asked[id] = now
	}
	return nil
}

// goes reports whether the deletion of an instance was requested and its new state is not known yet.
// After a while the deletion must be requested again.
func (f *fleet) goes(id string) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	at, ok := f.asked[id]
	return ok && !f.heard.After(at) && f.now().Sub(at) < askedFor
}

// CreateInstances implements cloudAPI, and stores the created instances.
func (f *fleet) CreateInstances(ctx context.Context, groupID string, tokens []string) ([]cloud.Instance, error) {
	made, err := f.cloudAPI.CreateInstances(ctx, groupID, tokens)
	if err != nil {
		return nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.sorted = nil
	for _, i := range made {
		if i.Token == "" || i.ProviderID == "" {
			continue
		}
		if _, ok := f.known[i.Key()]; !ok {
			f.known[i.Key()] = seen{Instance: i, at: f.now()}
		}
	}
	return made, nil
}
