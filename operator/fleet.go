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

// Times of the view of the cloud. A machine that is coming or going changes within
// seconds, and is asked for by its ID as often; all are listed less often the more of
// them move, and otherwise as often as groups are.
const (
	fleetMoves = 2 * time.Second
	fleetSick  = time.Minute // while a Node is not Ready: its machine may be gone
	fleetLeast = 500 * time.Millisecond

	// An instance of which the cloud's answer to its creation is all that was ever
	// seen may be unknown for a while to whoever asks for it. One whose Node is Ready
	// is believed to be there for a while.
	unseenLag = decision.CreateDeadline
	readyLag  = time.Minute

	// askedFor is how long a deletion that was accepted is not asked for again though
	// nothing was heard of the instance since.
	askedFor = 5 * time.Second
)

// never is the age of a view that nobody has seen.
const never = time.Duration(1<<63 - 1)

// describer is a cloud that can be asked for many instances at a time. What it does
// not know is not in the answer.
type describer interface {
	Describe(ctx context.Context, providerIDs []string) ([]cloud.Instance, error)
}

// fleet is the last view of the cloud's instances. It asks the cloud only when it is
// told to, and is safe for concurrent use.
//
// An instance that is missing from the list is asked for by its ID, if somebody speaks
// of it. If the cloud does not know the ID it is gone, and is remembered as
// Terminated; if it does, the list was partial.
type fleet struct {
	cloudAPI
	now func() time.Time

	mu       sync.Mutex
	known    map[string]seen     // by ID
	since    map[string]shown    // those of known as view first showed them
	sorted   []decision.Instance // known as view returns it; nil: known has changed
	finder   *decision.Index     // what finds those of sorted
	complete bool
	listed   time.Time // when the last list was asked for
	heard    time.Time // when anything was
	// asked is when the deletion of instances was asked for that nothing was heard of since.
	asked map[string]time.Time
}

// seen is an instance if it is unchanged last.
type seen struct {
	cloud.Instance
	at      time.Time // when the cloud was asked what it then said
	listed  bool      // by the list or by its ID, not only by the answer to its creation
	missing time.Time // since when the cloud says that there is none; zero: it does not
}

// claim is an instance that a Node or an intent speaks of.
type claim struct {
	ready  bool   // its Node is Ready
	leaves bool   // it is bound to go
	name   string // that an intent has noted; empty: none
}

// shown is what does not change about an instance.
type shown struct {
	at   time.Time // when view first showed it
	mark string
}

func newFleet(m cloudAPI, now func() time.Time) *fleet {
	return &fleet{cloudAPI: m, now: now, known: map[string]seen{}, since: map[string]shown{}, asked: map[string]time.Time{}}
}

// view returns the instances, whether they are all, how old the view is, and what finds
// them. Before the first list it is older than anything. What it returns must not be
// changed: it is the same as long as nothing changes.
func (f *fleet) view() (all []decision.Instance, complete bool, age time.Duration, x *decision.Index) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.sorted == nil {
		f.sorted = make([]decision.Instance, 0, len(f.known))
		before := f.since
		f.since = make(map[string]shown, len(f.known))
		now := f.now()
		for id, s := range f.known {
			// Not when it was created: that is told by another clock.
			since, ok := before[id]
			if !ok {
				since = shown{at: now, mark: decision.MachineHash(id)}
			}
			f.since[id] = since
			f.sorted = append(f.sorted, decision.Instance{
				ID: s.ProviderID, Name: s.Name, Group: s.Group, Role: roles[s.Role], Image: s.Image, Token: s.Token, Hash: since.mark, ReplacesHash: decision.ReplacedHash(s.Token),
				State: v1alpha1.InstanceState(s.State), Since: since.at, Address: addressOf(s.IP),
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

// roles are those of the cloud in the words of our kinds.
var roles = map[cloud.Role]v1alpha1.Role{cloud.ControlPlane: v1alpha1.ControlPlaneRole, cloud.Worker: v1alpha1.WorkerRole}

func addressOf(ip netip.Addr) string {
	if !ip.IsValid() {
		return ""
	}
	return ip.String()
}

// quiet returns how long nothing was asked about instances.
func (f *fleet) quiet() time.Duration {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.heard.IsZero() {
		return never
	}
	return f.now().Sub(f.heard)
}

// refresh lists the instances, and asks for those of about that the list lacks.
func (f *fleet) refresh(ctx context.Context, about map[string]claim) error {
	begun := f.now()
	// What is made or ends while the cloud answers may be in the list or not, so what was
	// there before is what it must have.
	f.mu.Lock()
	before := maps.Clone(f.known)
	f.mu.Unlock()
	list, err := f.Instances(ctx)
	partial := errors.Is(err, cloud.ErrPartial)
	if err != nil && !partial {
		return err
	}
	known := make(map[string]seen, len(list))
	for _, i := range list {
		known[i.ProviderID] = seen{Instance: i, at: begun, listed: true}
	}
	var ask []string
	for id := range about {
		if _, ok := known[id]; ok {
			continue
		}
		if s, ok := before[id]; ok && s.State == cloud.Terminated {
			known[id] = s // an ID is given once
			continue
		}
		ask = append(ask, id)
	}
	for id, s := range before { // made by us a moment ago
		if _, ok := known[id]; !ok && !s.listed && s.State != cloud.Terminated {
			if _, ok := about[id]; !ok {
				ask = append(ask, id)
			}
		}
	}
	slices.Sort(ask)
	found, asked := f.describe(ctx, ask) // what was not answered is asked again
	for _, id := range ask {
		if _, there := found[id]; there {
			partial = true // and the list does not say so
		}
		s, was := before[id]
		if asked[id] {
			known[id] = s.told(id, found, about[id], begun)
		} else if was {
			known[id] = s
		}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	for id, s := range f.known {
		if s.at.After(begun) {
			known[id] = s
		}
	}
	f.known, f.sorted, f.complete, f.listed, f.heard = known, nil, !partial, begun, begun
	return nil
}

// follow asks for those of about that were seen to come or go, or are bound to go, and
// leaves the others as they were seen. A cloud that can only be asked for one at a time
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
	found, _, err := f.bulk(ctx, ask)
	if errors.Is(err, errors.ErrUnsupported) {
		return f.refresh(ctx, about)
	}
	if err != nil {
		return err
	}
	f.heardOf(ask, found, about, begun)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.heard = begun
	return nil
}

// confirmDeletion asks what has become of instances whose deletion was just accepted, and reports
// whether the cloud says of all that they go or are gone.
func (f *fleet) confirmDeletion(ctx context.Context, ids []string) bool {
	begun, about := f.now(), make(map[string]claim, len(ids))
	for _, id := range ids {
		about[id] = claim{leaves: true}
	}
	found, _, err := f.bulk(ctx, ids)
	if err != nil {
		return false
	}
	f.heardOf(ids, found, about, begun)
	return !slices.ContainsFunc(ids, func(id string) bool {
		i, ok := found[id]
		return ok && i.State != cloud.Terminating && i.State != cloud.Terminated
	})
}

// heardOf takes in what the cloud said when it was asked for instances by their IDs, unless
// more is known since: answers may overtake each other.
func (f *fleet) heardOf(ids []string, found map[string]cloud.Instance, about map[string]claim, begun time.Time) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, id := range ids {
		if s := f.known[id]; !s.at.After(begun) {
			f.known[id] = s.told(id, found, about[id], begun)
		}
	}
	f.sorted = nil
}

// moves reports whether the cloud says that it changes by itself.
func (s seen) moves() bool {
	return s.State == cloud.Creating || s.State == cloud.Terminating || s.State == cloud.Unknown
}

// told is what is known of an instance after the cloud was asked for it by its ID. s is
// what was known before; zero: nothing.
func (s seen) told(id string, found map[string]cloud.Instance, a claim, now time.Time) seen {
	if i, ok := found[id]; ok {
		return seen{Instance: i, at: now, listed: true}
	}
	s.at = now
	if s.ProviderID == "" {
		s = seen{Instance: cloud.Instance{ProviderID: id, Name: a.name}, at: now, listed: true}
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

// bulk asks for instances by ID in one call. asked are those about which there was an
// answer. The error is errors.ErrUnsupported if the cloud cannot be asked like that.
func (f *fleet) bulk(ctx context.Context, ids []string) (found map[string]cloud.Instance, asked map[string]bool, err error) {
	found, asked = map[string]cloud.Instance{}, map[string]bool{}
	if len(ids) == 0 {
		return found, asked, nil
	}
	d, ok := f.cloudAPI.(describer)
	if !ok {
		return found, asked, errors.ErrUnsupported
	}
	list, err := d.Describe(ctx, ids)
	if err != nil {
		return found, asked, err
	}
	for _, id := range ids {
		asked[id] = true
	}
	for _, i := range list {
		found[i.ProviderID] = i
	}
	return found, asked, nil
}

// describe asks for instances by ID, in one call if possible.
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
	_ = g.Wait() // asked has those that were answered
	return found, asked
}

// Instance implements machines. What was listed is not asked for again: what the
// callers want to know of a machine, its group and image, does not change.
func (f *fleet) Instance(ctx context.Context, id string) (cloud.Instance, error) {
	f.mu.Lock()
	s, ok := f.known[id]
	f.mu.Unlock()
	if ok && s.missing.IsZero() && s.Image != "" && s.Group != "" {
		return s.Instance, nil
	}
	return f.cloudAPI.Instance(ctx, id)
}

// DeleteInstances implements machines, and remembers what was asked for.
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

// goes reports whether the deletion of an instance was asked for and what has become of
// it not yet. After a while it is to be asked for again.
func (f *fleet) goes(id string) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	at, ok := f.asked[id]
	return ok && !f.heard.After(at) && f.now().Sub(at) < askedFor
}

// CreateInstances implements machines, and takes the answer into the view.
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
		if _, ok := f.known[i.ProviderID]; !ok {
			f.known[i.ProviderID] = seen{Instance: i, at: f.now()}
		}
	}
	return made, nil
}
