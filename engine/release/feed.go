package release

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/http"
	"path"
	"slices"
	"strings"
	"sync"
	"time"

	"constellation/engine/component"
	"constellation/engine/version"
)

// Reasons why a feed, or a file of it, is not trusted.
var (
	// ErrNoKeys means that no key is available to verify a feed.
	ErrNoKeys = errors.New("there is no key to verify it")
	// ErrAddress means that the address of a feed is not supported.
	ErrAddress = errors.New("not a supported address")
	// ErrAbsent means that a source has no such file.
	ErrAbsent = errors.New("not found")
	// ErrUnreachable means that the source did not answer in time.
	ErrUnreachable = errors.New("it cannot be reached")
	// ErrRedirect means that a server redirects to an address that is not allowed.
	ErrRedirect = errors.New("it redirects")
	// ErrUntrusted means that a file is unsigned, or signed by an untrusted key.
	ErrUntrusted = errors.New("it is not trusted")
	// ErrAltered means that a file differs from the published one.
	ErrAltered = errors.New("it was altered")
	// ErrRollback means that something newer was seen before.
	ErrRollback = errors.New("it is older than what was seen before")
	// ErrExpired means that a publication has expired.
	ErrExpired = errors.New("it has expired")
	// ErrFuture means that a publication is newer than this computer's clock.
	ErrFuture = errors.New("it is from the future")
	// ErrLegacy means that a feed has no root, after [LegacyEnd].
	ErrLegacy = errors.New("it has no root")
	// ErrConflict means that a feed has other content for a release of this program.
	ErrConflict = errors.New("it is not the one that came with this program")
)

// embeddedSource is State.Source of the releases in the program.
const embeddedSource = "embedded"

// clockSkew is the tolerated difference between clocks.
const clockSkew = time.Hour

// LegacyEnd is when feeds without a root are no longer read.
var LegacyEnd = time.Date(2027, 12, 1, 0, 0, 0, 0, time.UTC)

// legacyWarning is State.Warning of a feed without a root.
func legacyWarning() string {
	return "it has no root, so one stolen key is enough to take it over; feeds without a root are refused from " + LegacyEnd.Format(time.DateOnly)
}

// Options say how a feed is opened.
type Options struct {
	// Keys are the initial trust anchors. If one is the root of a feed, only a feed with a root in
	// Keys can be opened. Otherwise one of them signed the index, or the first of the key sets that
	// lead to the key that did. Without keys no feed can be opened.
	Keys []Key
	// Cache is a directory for replay protection and the last good copy, shared by all feeds.
	// Without it there is neither.
	Cache string
	// Unconditional sends no ETag of an earlier answer, by which a server could recognise a user.
	Unconditional bool
	// Now defaults to time.Now, Client to one of this package's own.
	Now    func() time.Time
	Client *http.Client
}

// Feed has the releases of one source. *Feed implements [Source]; its methods may be called
// concurrently.
type Feed struct {
	store     store
	cache     *cache
	index     *index
	summaries []Summary
	notices   []Notice
	state     State
	// first are trusted initially, signers are the keys that may sign now.
	first, signers []Key
	// raw are the verified files of the publication that no index names.
	raw good

	mu       sync.Mutex
	releases map[string]*Release
}

// Embedded returns the releases in the program; dir is assets.Releases(). They are not signed:
// write access to them is write access to the program.
func Embedded(dir fs.FS) (*Feed, error) {
	f := &Feed{store: fsStore{dir}, state: State{Source: embeddedSource}}
	b, err := fs.ReadFile(dir, indexName)
	if err != nil {
		return nil, fmt.Errorf("read embedded releases: %w", err)
	}
	if f.index, err = parseIndex(b); err != nil {
		return nil, fmt.Errorf("read embedded releases: %w", err)
	}
	if err := f.readSummaries(context.Background()); err != nil {
		return nil, fmt.Errorf("read embedded releases: %w", err)
	}
	return f, nil
}

// Open opens the feed at a location, a directory or an address (https, or http to this
// computer). It verifies the signature, the expiry, and that nothing newer was seen before.
//
// Untrusted content is not used. If the cache has a good copy, Open uses that, and State
// reports it as stale with the reason; otherwise it returns an error. Open makes at most three
// requests, and one if nothing changed; with a root one more.
func Open(ctx context.Context, location string, o Options) (*Feed, error) {
	s, c, now, err := prepare(location, o)
	if err != nil {
		return nil, err
	}
	f, err := current(ctx, s, c, o.Keys, now)
	if err == nil {
		return f, nil
	}
	if errors.Is(ctx.Err(), context.Canceled) {
		return nil, context.Cause(ctx) // the caller has given up
	}
	f, ok := lastGood(s, c, o.Keys, now)
	if !ok {
		return nil, err
	}
	f.state.Stale, f.state.Problem, f.state.Err = true, err.Error(), err
	return f, nil
}

// prepare opens store and cache of a feed.
func prepare(location string, o Options) (store, *cache, time.Time, error) {
	now := time.Now
	if o.Now != nil {
		now = o.Now
	}
	if len(o.Keys) == 0 {
		return nil, nil, time.Time{}, fmt.Errorf("open feed %s: %w", shorten(location), ErrNoKeys)
	}
	s, err := openStore(location, o)
	if err != nil {
		return nil, nil, time.Time{}, err
	}
	if o.Unconditional {
		s = unconditional{s}
	}
	c, err := openCache(o.Cache, s.location(), o.Keys)
	return s, c, now(), err
}

// current returns the source's present publication.
func current(ctx context.Context, s store, c *cache, anchors []Key, now time.Time) (*Feed, error) {
	var a authority
	var err error
	pinned, keys := split(anchors)
	if len(pinned) > 0 {
		if a.roots, err = currentRoots(ctx, s, c, pinned, now); err != nil {
			return nil, err
		}
	}
	kept, _ := c.good()
	raw, err := currentIndex(ctx, s, kept)
	if err != nil {
		return nil, err
	}
	if a.roots != nil {
		raw.Roots = string(a.roots.Bytes())
	} else {
		a.keys = keys
	}
	identities := a.identities([]byte(raw.Index), []byte(raw.Signature))
	last, err := c.seen(identities)
	if err != nil {
		return nil, err
	}
	if last.Location == s.location() {
		last.Location = "" // errors name another location only
	}
	t, err := a.trust([]byte(raw.Index), []byte(raw.Signature), last)
	if err == nil {
		err = t.fresh(now)
	}
	if err != nil {
		return nil, in(s, indexName, err)
	}
	t.seen.Location = s.location()
	if err := c.note(t.seen, identities); err != nil {
		return nil, err
	}
	raw.Confirmed = now
	f := newFeed(s, c, t, a, raw)
	if err := f.readSummaries(ctx); err != nil {
		return nil, err
	}
	if err := c.keep(raw, t.index.Files); err != nil {
		return nil, fmt.Errorf("keep a copy of %s: %w", s.location(), err)
	}
	return f, nil
}

func newFeed(s store, c *cache, t *trusted, a authority, raw good) *Feed {
	f := &Feed{store: s, cache: c, index: t.index, first: a.first(), signers: t.keys, raw: raw, state: State{
		Source: s.location(), Fetched: raw.Confirmed, Signer: t.signer.String(), Sequence: t.index.Sequence, Expires: t.index.Expires,
	}}
	if a.roots == nil {
		f.state.Warning = legacyWarning()
	} else {
		f.state.Root = a.roots.newest().Version
	}
	return f
}

func in(s store, name string, err error) error {
	return fmt.Errorf("read %s of %s: %w", name, s.location(), err)
}

// currentIndex returns the source's index with its signature, not verified.
func currentIndex(ctx context.Context, s store, kept good) (good, error) {
	found, err := s.read(ctx, indexName, maxIndex, kept.ETag)
	if err != nil {
		return good{}, in(s, indexName, err)
	}
	if found.unchanged {
		return good{Index: kept.Index, Signature: kept.Signature, ETag: found.etag}, nil
	}
	sig, err := s.read(ctx, indexName+signature, maxSignature, "")
	if errors.Is(err, ErrAbsent) {
		err = fmt.Errorf("%w: it is not signed", ErrUntrusted)
	}
	if err != nil {
		return good{}, in(s, indexName+signature, err)
	}
	return good{Index: string(found.bytes), Signature: string(sig.bytes), ETag: found.etag}, nil
}

// currentRoots returns the source's versions of the root. They are recorded at once: after a key was
// revoked, nothing that it signed is accepted, even if the publication cannot be read.
func currentRoots(ctx context.Context, s store, c *cache, pinned []*Roots, now time.Time) (*Roots, error) {
	r, last, err := readAccepted(ctx, s, c, pinned)
	if err != nil {
		return nil, in(s, rootName, err)
	}
	newest := r.newest()
	clock := "this computer's clock says " + minute(now)
	switch {
	case now.Add(clockSkew).Before(newest.Created):
		return nil, in(s, rootName, fmt.Errorf("%w: version %d was made on %s, and %s", ErrFuture, newest.Version, minute(newest.Created), clock))
	case !now.Before(newest.Expires):
		return nil, in(s, rootName, fmt.Errorf("%w: version %d ended on %s, and %s", ErrExpired, newest.Version, minute(newest.Expires), clock))
	}
	if newest.Version == last.Root {
		return r, nil
	}
	last.Root, last.RootDigest, last.Location = newest.Version, r.Digest(), s.location()
	if newest.Since.After(last.Since) {
		last.Since, last.Sequence, last.Index = newest.Since, 0, ""
	}
	return r, c.note(last, []string{rootIdentity(r)})
}

func rootIdentity(r *Roots) string { return "root-" + r.Identity()[:32] }

// readAccepted reads the source's root.json, and returns what was seen of the feed.
func readAccepted(ctx context.Context, s store, c *cache, pinned []*Roots) (*Roots, seen, error) {
	found, err := s.read(ctx, rootName, maxRoots, "")
	if errors.Is(err, ErrAbsent) {
		err = fmt.Errorf("%w: %w: there is none", ErrUntrusted, ErrRoot)
	}
	if err != nil {
		return nil, seen{}, err
	}
	var first error
	for _, p := range pinned {
		last, err := c.seen([]string{rootIdentity(p)})
		if err != nil {
			return nil, seen{}, err
		}
		r, err := accept(found.bytes, p, last)
		if err == nil {
			return r, last, nil
		}
		if first == nil || !errors.Is(err, ErrRoot) {
			first = err
		}
	}
	return nil, seen{}, first
}

// lastGood returns the copy that was accepted last. Its signature is verified again with the
// keys of its time, but not its expiry: State reports its age.
func lastGood(s store, c *cache, anchors []Key, now time.Time) (*Feed, bool) {
	g, ok := c.good()
	if !ok {
		return nil, false
	}
	var a authority
	pinned, keys := split(anchors)
	a.keys = keys
	if len(pinned) > 0 {
		a.roots = keptRoots(c, g, pinned)
	}
	if (a.roots == nil) != (len(pinned) == 0) || a.roots == nil && !now.Before(LegacyEnd) {
		return nil, false
	}
	t, err := a.trust([]byte(g.Index), []byte(g.Signature), seen{})
	if err != nil {
		return nil, false
	}
	f := newFeed(s, c, t, a, g)
	e := f.index.Files[summariesName]
	b, ok := c.content(e)
	if !ok {
		return nil, false
	}
	f.summaries, f.notices, err = parseSummaries(b)
	return f, err == nil && f.complete() == nil
}

// keptRoots returns the root of the last good copy, unless a newer version was seen since; otherwise nil.
func keptRoots(c *cache, g good, pinned []*Roots) *Roots {
	for _, p := range pinned {
		last, err := c.seen([]string{rootIdentity(p)})
		if err != nil {
			return nil
		}
		if r, err := accept([]byte(g.Roots), p, last); err == nil {
			return r
		}
	}
	return nil
}

// authority is what decides who may sign a publication: a verified root or, for a feed without one,
// trusted keys.
type authority struct {
	roots *Roots
	keys  []Key
}

// first are the keys that lead to those that signed statements.
func (a authority) first() []Key {
	if a.roots != nil {
		return a.roots.everyIndexKey()
	}
	return a.keys
}

// identities are the names under which is recorded what was seen of a feed. Without a root these are
// the trusted keys that lead to the signature of its index, and the key that signed it. Other keys
// of its key sets do not count: a publisher could name the key of another feed there.
func (a authority) identities(b, sig []byte) (out []string) {
	if a.roots != nil {
		return []string{rootIdentity(a.roots)}
	}
	for _, k := range a.keys {
		t, err := trust(b, sig, []Key{k}, seen{})
		if err != nil {
			continue
		}
		out = append(out, "key-"+k.id, "key-"+t.signer.id)
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// trust verifies an index, and that nothing newer was seen.
func (a authority) trust(b, sig []byte, last seen) (*trusted, error) {
	if a.roots == nil {
		return trust(b, sig, a.keys, last)
	}
	i, err := parseIndex(b)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrUntrusted, err)
	}
	r := a.roots.newest()
	t := &trusted{index: i, root: r, keys: r.indexKeys, seen: seen{
		Sequence: i.Sequence, Index: digest(b), Root: r.Version, RootDigest: a.roots.Digest(), Since: r.Since,
	}}
	if t.signer, err = verify(b, sig, t.keys); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrUntrusted, err)
	}
	switch {
	case i.Created.Before(r.Since):
		return nil, fmt.Errorf("%w: it was made on %s, before a key was revoked on %s", ErrRollback, minute(i.Created), minute(r.Since))
	case i.Expires.Sub(i.Created) > time.Duration(r.IndexDays)*24*time.Hour:
		return nil, fmt.Errorf("%w: it is valid for longer than %d days", ErrUntrusted, r.IndexDays)
	}
	if r.Since.After(last.Since) {
		last.Sequence, last.Index = 0, ""
	}
	return t, t.follows(last)
}

// trusted is an index signed by a trusted key.
type trusted struct {
	index  *index
	signer Key
	keys   []Key
	set    *keySet // nil if the feed has none, or has a root
	root   *root   // nil if the feed has none
	seen   seen
}

// trust verifies the signature of an index of a feed without root, and that nothing newer was seen.
// It follows key sets from the trusted keys, the anchors or the last seen set, to the newest. Each
// is signed by a key of a set that is trusted already.
func trust(b, sig []byte, anchors []Key, last seen) (*trusted, error) {
	i, err := parseIndex(b)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrUntrusted, err)
	}
	t := &trusted{index: i, keys: anchors, seen: seen{Sequence: i.Sequence, Index: digest(b), Keys: last.Keys}}
	if last.Keys != nil { // it was verified before it was stored
		if t.set, err = parseKeySet([]byte(last.Keys.Set)); err != nil {
			return nil, err
		}
		t.keys = t.set.keys
	}
	if err := t.follow(i.Keys, last.at()); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrUntrusted, err)
	}
	if t.signer, err = verify(b, sig, t.keys); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrUntrusted, err)
	}
	if t.set != nil && t.set.Expires.Sub(t.set.Created) > MaxExpiry {
		return nil, fmt.Errorf("%w: its key set is valid for longer than 400 days", ErrUntrusted)
	}
	return t, t.follows(last)
}

// follows returns an error if something newer than t was seen, or its lifetime is not allowed.
func (t *trusted) follows(last seen) error {
	i := t.index
	switch {
	case i.Sequence == 0:
		return fmt.Errorf("%w: its sequence is zero", ErrUntrusted)
	case i.Sequence < last.Sequence:
		return fmt.Errorf("%w: it is publication %d, but %d was seen%s", ErrRollback, i.Sequence, last.Sequence, last.at())
	case i.Sequence == last.Sequence && last.Index != t.seen.Index:
		return fmt.Errorf("%w: there are two publications with the number %d%s", ErrUntrusted, i.Sequence, last.at())
	case i.Created.IsZero() || !i.Created.Before(i.Expires):
		return fmt.Errorf("%w: creation or expiry is missing", ErrUntrusted)
	case i.Expires.Sub(i.Created) > MaxExpiry:
		return fmt.Errorf("%w: it is valid for longer than 400 days", ErrUntrusted)
	}
	return nil
}

// follow walks from the trusted keys to the newest key set. where completes an error about the last
// seen set.
func (t *trusted) follow(chain []signedKeySet, where string) error {
	sets := make([]*keySet, len(chain))
	for n, signed := range chain {
		var err error
		if sets[n], err = parseKeySet([]byte(signed.Set)); err != nil {
			return err
		}
		if n > 0 && sets[n].Sequence <= sets[n-1].Sequence {
			return fmt.Errorf("key set %d follows key set %d", sets[n].Sequence, sets[n-1].Sequence)
		}
	}
	known := uint64(0)
	if t.set != nil {
		known = t.set.Sequence
		if len(sets) == 0 || sets[len(sets)-1].Sequence < known {
			return fmt.Errorf("key set %d was seen before, but is not among its key sets%s", known, where)
		}
	}
	// The newest set that a trusted key signed comes first: a program with newer keys need not
	// verify the earlier sets.
	for n := len(sets) - 1; n >= 0 && sets[n].Sequence > known; n-- {
		if !chain[n].signedBy(t.keys) {
			continue
		}
		t.set, t.keys, known = sets[n], sets[n].keys, sets[n].Sequence
		t.seen.Keys = &chain[n]
		n = len(sets) // start at the end again, with these keys
	}
	if len(sets) == 0 {
		return nil
	}
	newest := len(sets) - 1
	if sets[newest].Sequence != known {
		return fmt.Errorf("no trusted key leads to its key set %d", sets[newest].Sequence)
	}
	if t.seen.Keys.Set != chain[newest].Set {
		return fmt.Errorf("there are two key sets with the number %d", known)
	}
	return nil
}

// fresh returns an error if t has expired or is from the future.
func (t *trusted) fresh(now time.Time) error {
	end, of := t.index.Expires, "it"
	if t.set != nil && t.set.Expires.Before(end) {
		end, of = t.set.Expires, "its key set"
	}
	clock := "this computer's clock says " + minute(now)
	switch {
	case t.root == nil && !now.Before(LegacyEnd):
		return fmt.Errorf("%w: feeds without a root are refused from %s", ErrLegacy, LegacyEnd.Format(time.DateOnly))
	case now.Add(clockSkew).Before(t.index.Created):
		return fmt.Errorf("%w: it was made on %s, and %s", ErrFuture, minute(t.index.Created), clock)
	case t.set != nil && now.Add(clockSkew).Before(t.set.Created):
		return fmt.Errorf("%w: its key set was made on %s, and %s", ErrFuture, minute(t.set.Created), clock)
	case !now.Before(end):
		return fmt.Errorf("%w: %s ended on %s, and %s", ErrExpired, of, minute(end), clock)
	}
	return nil
}

func minute(t time.Time) string { return t.UTC().Format("2006-01-02 15:04") + " UTC" }

// readSummaries reads the file that every decision needs.
func (f *Feed) readSummaries(ctx context.Context) error {
	b, err := f.file(ctx, summariesName)
	if err != nil {
		return err
	}
	if f.summaries, f.notices, err = parseSummaries(b); err != nil {
		return fmt.Errorf("%s: %w", f.state.Source, err)
	}
	return f.complete()
}

// complete verifies that each release of the summaries has a file, and the reverse.
func (f *Feed) complete() error {
	named := map[string]bool{}
	for _, s := range f.summaries {
		named[releaseName(s.Version)] = true
		if _, ok := f.index.Files[releaseName(s.Version)]; !ok {
			return fmt.Errorf("%s: the index does not name %s", f.state.Source, releaseName(s.Version))
		}
	}
	for _, name := range slices.Sorted(maps.Keys(f.index.Files)) {
		if path.Ext(name) == ".yaml" && !named[name] {
			return fmt.Errorf("%s: %s is not among its summaries", f.state.Source, name)
		}
	}
	return nil
}

// file returns a file of the index, from the cache or the source. The error wraps ErrAbsent if
// the index does not name it, and ErrAltered if the content differs.
func (f *Feed) file(ctx context.Context, name string) ([]byte, error) {
	e, ok := f.index.Files[name]
	if !ok {
		return nil, ErrAbsent
	}
	if b, ok := f.cache.content(e); ok {
		return b, nil
	}
	in := func(err error) error { return fmt.Errorf("read %s of %s: %w", name, f.state.Source, err) }
	found, err := f.store.read(ctx, name, e.Length, "")
	if errors.Is(err, ErrAbsent) {
		err = fmt.Errorf("%w: it is missing", ErrAltered)
	}
	if err != nil {
		return nil, in(err)
	}
	if err := e.check(found.bytes); err != nil {
		return nil, in(fmt.Errorf("%w: %w", ErrAltered, err))
	}
	if err := f.cache.add(e, found.bytes); err != nil {
		return nil, in(fmt.Errorf("keep a copy: %w", err))
	}
	return found.bytes, nil
}

// Summaries returns all releases, oldest first.
func (f *Feed) Summaries(context.Context) ([]Summary, error) { return f.summaries, nil }

func (f *Feed) summary(v version.Version) (Summary, error) {
	var have []string
	for _, s := range f.summaries {
		if s.Version.Equal(v) {
			return s, nil
		}
		have = append(have, s.Version.String())
	}
	where := f.state.Source
	if where == embeddedSource {
		where = "this program"
	}
	return Summary{}, fmt.Errorf("release %s is %w; %s has %s", v, ErrNotOffered, where, strings.Join(have, ", "))
}

// Release returns one release after verifying its file against the index and the summaries,
// which decisions are based on. The error wraps ErrNotOffered if there is none and lists the
// available ones, and ErrAltered if the file differs from the published one.
func (f *Feed) Release(ctx context.Context, v version.Version) (*Release, error) {
	s, err := f.summary(v)
	if err != nil {
		return nil, err
	}
	name := releaseName(s.Version)
	f.mu.Lock()
	defer f.mu.Unlock()
	if r := f.releases[name]; r != nil {
		return r, nil
	}
	b, err := f.file(ctx, name)
	if err != nil {
		return nil, err
	}
	r, err := Parse(b)
	if err != nil {
		return nil, fmt.Errorf("read %s of %s: %w", name, f.state.Source, err)
	}
	if r.Version.String() != s.Version.String() {
		return nil, fmt.Errorf("read %s of %s: %w: it contains release %s", name, f.state.Source, ErrAltered, r.Version)
	}
	r.apply(s)
	if canonical(r.Summary()) != canonical(s) {
		return nil, fmt.Errorf("read %s of %s: %w: it contradicts %s", name, f.state.Source, ErrAltered, summariesName)
	}
	if f.releases == nil {
		f.releases = map[string]*Release{}
	}
	f.releases[name] = r
	return r, nil
}

// apply adds the facts that are not part of a release's file.
func (r *Release) apply(s Summary) {
	r.Faulty, r.CLI = s.Faulty, s.CLI
	for i := range r.Kubernetes {
		for _, k := range s.Kubernetes {
			if k.Version.Equal(r.Kubernetes[i].Version) {
				r.Kubernetes[i].Faulty = k.Faulty
			}
		}
	}
}

// Images returns the images of a release with their known digests. The error wraps
// ErrNotOffered if the source lacks the release or its images.
func (f *Feed) Images(ctx context.Context, v version.Version) (*Images, error) {
	s, err := f.summary(v)
	if err != nil {
		return nil, err
	}
	b, err := f.file(ctx, imagesName(s.Version))
	if errors.Is(err, ErrAbsent) {
		return nil, fmt.Errorf("images of release %s are %w by %s", v, ErrNotOffered, f.state.Source)
	}
	if err != nil {
		return nil, err
	}
	return parseImages(b, s.Version)
}

// Measurements returns the expected measurements of a provider's machine that booted the image
// of a release. The error wraps ErrNotOffered if the source lacks them.
func (f *Feed) Measurements(ctx context.Context, v version.Version, provider string) (map[uint32]string, error) {
	b, err := []byte(nil), ErrAbsent
	if providerRE.MatchString(provider) && validVersion(v.String()) {
		b, err = f.file(ctx, measurementsName(v, provider))
	}
	if errors.Is(err, ErrAbsent) {
		return nil, fmt.Errorf("measurements of image %s for %s are %w by %s", v, shorten(provider), ErrNotOffered, f.state.Source)
	}
	if err != nil {
		return nil, err
	}
	return parseMeasurements(b, v, provider)
}

// Statement returns the publisher's statement over the components of a release in the form
// that machines verify. The error wraps ErrNotOffered if the feed has none; the releases in
// the program are not signed.
func (f *Feed) Statement(ctx context.Context, v version.Version) (string, error) {
	a, err := f.store.read(ctx, statementName(v), MaxStatement, "")
	if errors.Is(err, ErrAbsent) {
		err = ErrNotOffered
	}
	if err != nil {
		return "", fmt.Errorf("read statement of %s of %s: %w", v, f.state.Source, err)
	}
	return string(a.bytes), nil
}

// Vouch returns the publisher's statement over list, the components of machines of arch for
// Kubernetes k in release v: the statement over exactly this list, or the one over the lists
// of the release. It is verified with the feed's first keys, like a machine does, and with the
// current signing keys. The error wraps ErrNotOffered if the feed has no such statement, and
// ErrUntrusted if it is not the publisher's.
func (f *Feed) Vouch(ctx context.Context, v, k version.Version, arch string, list component.List) (string, error) {
	for _, name := range []string{listStatementName(v, list.Digest()), statementName(v)} {
		text, err := f.statement(ctx, name)
		if errors.Is(err, ErrAbsent) {
			continue
		}
		if err == nil {
			err = f.believe(text, k, arch, list)
		}
		switch {
		case errors.Is(err, ErrNotVouched):
			continue
		case err != nil:
			return "", fmt.Errorf("read %s of %s: %w", name, f.state.Source, err)
		}
		return text, nil
	}
	return "", fmt.Errorf("a statement over the components %s of Kubernetes %s on %s is %w by %s", list.Digest(), k, arch, ErrNotOffered, f.state.Source)
}

// statement returns a file with a statement. No index names it, so its cached copy is not
// verified here.
func (f *Feed) statement(ctx context.Context, name string) (string, error) {
	if f.index.Sequence == 0 {
		return "", ErrAbsent // the releases in the program are not signed
	}
	kept := "statement-" + digest([]byte(name))[:32] + ".json"
	a, err := f.store.read(ctx, name, MaxStatement, "")
	if errors.Is(err, ErrUnreachable) && f.cache != nil {
		if b, e := f.cache.file(kept); e == nil {
			return string(b), nil
		}
	}
	if err != nil {
		return "", err
	}
	return string(a.bytes), f.cache.replaceIfAny(kept, a.bytes)
}

// statementsOf returns the names of the files with statements about a release, and of the file
// that lists them.
func (f *Feed) statementsOf(ctx context.Context, v version.Version) ([]string, error) {
	var out []string
	switch _, err := f.store.read(ctx, statementName(v), MaxStatement, ""); {
	case err == nil:
		out = append(out, statementName(v))
	case !errors.Is(err, ErrAbsent):
		return nil, fmt.Errorf("read %s of %s: %w", statementName(v), f.state.Source, err)
	}
	a, err := f.store.read(ctx, listsName(v), MaxStatement, "")
	if errors.Is(err, ErrAbsent) {
		return out, nil
	}
	var lists signedLists
	if err == nil {
		err = strictJSON(a.bytes, &lists)
	}
	if err != nil {
		return nil, fmt.Errorf("read %s of %s: %w", listsName(v), f.state.Source, err)
	}
	out = append(out, listsName(v))
	for _, d := range lists.Lists {
		if !digestRE.MatchString(d) {
			return nil, fmt.Errorf("read %s of %s: %q is not a digest", listsName(v), f.state.Source, shorten(d))
		}
		out = append(out, listStatementName(v, d))
	}
	return out, nil
}

// believe verifies a statement like machines do, and that its key may still sign.
func (f *Feed) believe(text string, k version.Version, arch string, list component.List) error {
	if err := NewTrust(f.first...).Verify(text, k, arch, list); err != nil {
		return err
	}
	var s signedStatement
	if err := strictJSON([]byte(text), &s); err != nil {
		return err
	}
	if _, err := verify([]byte(s.Statement), []byte(s.Signature), f.signers); err != nil {
		return fmt.Errorf("%w: the key that signed it may no longer sign", ErrUntrusted)
	}
	return nil
}

// State returns the origin of the releases.
func (f *Feed) State() State { return f.state }

// digestOf returns the SHA-256 of the file of a release; empty if there is none.
func (f *Feed) digestOf(v version.Version) string { return f.index.Files[releaseName(v)].SHA256 }

// Fallback returns embedded in place of a feed that could not be opened, marked as stale, with
// the reason.
func Fallback(embedded *Feed, why error) Source {
	s := embedded.state
	s.Stale, s.Problem, s.Err = true, why.Error(), why
	return &joined{embedded: embedded, all: embedded.summaries, state: s}
}

// Join merges the program's releases with those of a feed. The feed adds to a release of the
// program whether versions are faulty, even if it has dropped the release, and the download
// addresses. Different content of the same release is an error that wraps ErrConflict.
func Join(embedded, feed *Feed) (Source, error) {
	j := &joined{embedded: embedded, feed: feed, state: feed.state}
	for _, s := range embedded.summaries {
		theirs, err := feed.summary(s.Version)
		if err == nil {
			if embedded.digestOf(s.Version) != feed.digestOf(theirs.Version) {
				return nil, fmt.Errorf("release %s of %s: %w", s.Version, feed.state.Source, ErrConflict)
			}
			s = s.with(theirs)
		}
		j.all = append(j.all, s)
	}
	for _, s := range feed.summaries {
		if _, err := embedded.summary(s.Version); err != nil {
			j.all = append(j.all, s)
		}
	}
	for i := range j.all {
		j.all[i].Kubernetes = slices.Clone(j.all[i].Kubernetes)
		for _, n := range slices.Concat(embedded.notices, feed.notices) {
			n.mark(&j.all[i])
		}
	}
	slices.SortFunc(j.all, func(a, b Summary) int { return a.Version.Compare(b.Version) })
	return j, nil
}

// with merges facts into s that were learned after its publication. A faulty version stays
// faulty.
func (s Summary) with(later Summary) Summary {
	if later.Faulty != "" {
		s.Faulty = later.Faulty
	}
	if len(later.CLI) > 0 {
		s.CLI = later.CLI
	}
	s.Kubernetes = slices.Clone(s.Kubernetes)
	for i, k := range s.Kubernetes {
		for _, l := range later.Kubernetes {
			if l.Version.Equal(k.Version) && l.Faulty != "" {
				s.Kubernetes[i].Faulty = l.Faulty
			}
		}
	}
	return s
}

// joined is the program's own releases and those of a feed; feed may be nil.
type joined struct {
	embedded, feed *Feed
	all            []Summary
	state          State
}

func (j *joined) Summaries(context.Context) ([]Summary, error) { return j.all, nil }
func (j *joined) State() State                                 { return j.state }

// InFeed reports whether the feed has a release, not only the program.
func (j *joined) InFeed(v version.Version) bool {
	if j.feed == nil {
		return false
	}
	_, err := j.feed.summary(v)
	return err == nil
}

func (j *joined) Release(ctx context.Context, v version.Version) (*Release, error) {
	from := j.feed
	if _, err := j.embedded.summary(v); err == nil || from == nil {
		from = j.embedded // it has the same content and needs no request
	}
	r, err := from.Release(ctx, v)
	if errors.Is(err, ErrNotOffered) {
		var have []string
		for _, s := range j.all {
			have = append(have, s.Version.String())
		}
		return nil, fmt.Errorf("release %s is %w; there are %s", v, ErrNotOffered, strings.Join(have, ", "))
	}
	if err != nil {
		return nil, err
	}
	out := *r
	out.Kubernetes = slices.Clone(r.Kubernetes)
	for _, s := range j.all {
		if s.Version.Equal(v) {
			out.apply(s)
		}
	}
	return &out, nil
}

func (j *joined) Measurements(ctx context.Context, v version.Version, provider string) (map[uint32]string, error) {
	if j.feed != nil {
		m, err := j.feed.Measurements(ctx, v, provider)
		if !errors.Is(err, ErrNotOffered) {
			return m, err
		}
	}
	return j.embedded.Measurements(ctx, v, provider)
}

// Vouch asks the feed only.
func (j *joined) Vouch(ctx context.Context, v, k version.Version, arch string, list component.List) (string, error) {
	if j.feed == nil {
		return "", fmt.Errorf("a statement over components of Kubernetes %s is %w by %s", k, ErrNotOffered, j.state.Source)
	}
	return j.feed.Vouch(ctx, v, k, arch, list)
}

func (j *joined) Images(ctx context.Context, v version.Version) (*Images, error) {
	if j.feed != nil {
		i, err := j.feed.Images(ctx, v)
		if !errors.Is(err, ErrNotOffered) {
			return i, err
		}
	}
	return j.embedded.Images(ctx, v)
}
