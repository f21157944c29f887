package release

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"constellation/engine/version"
)

// The tests TestAttack* have the names of the attacks in the specification of The Update Framework
// (TUF), section 1.5.2. Each is tried on a feed with a root.

// ceremony is a feed with a root of three keys, two of which must sign, and two index keys.
type ceremony struct {
	ada, bob, eve, index, spare *PrivateKey
	roots                       *Roots
	from, dir                   string
	cache                       string
	now                         time.Time
}

func newCeremony(t testing.TB) *ceremony {
	t.Helper()
	c := &ceremony{
		ada: newTestKey(t, "ada"), bob: newTestKey(t, "bob"), eve: newTestKey(t, "eve"), index: newTestKey(t, "index"), spare: newTestKey(t, "spare"),
		from: sources(t), dir: filepath.Join(t.TempDir(), "feed"), cache: t.TempDir(), now: today,
	}
	var err error
	c.roots, err = NewRoots(NewRootOptions{
		Threshold: 2, Keys: []Key{c.ada.Key, c.bob.Key, c.eve.Key}, IndexKeys: []Key{c.index.Key, c.spare.Key}, Now: today.Add(-time.Hour),
	})
	if err != nil {
		t.Fatal(err)
	}
	sign(t, c.roots, c.ada, c.bob)
	publish(t, BuildOptions{From: c.from, Out: c.dir, Key: c.index, Root: c.roots})
	return c
}

func sign(t testing.TB, r *Roots, keys ...*PrivateKey) {
	t.Helper()
	for _, k := range keys {
		if err := r.Sign(k); err != nil {
			t.Fatal(err)
		}
	}
}

// change adds a signed version of the root.
func (c *ceremony) change(t testing.TB, change RootChange, signers ...*PrivateKey) {
	t.Helper()
	change.Now = c.now
	c.roots = cloneRoots(t, c.roots)
	if err := c.roots.Change(change); err != nil {
		t.Fatal(err)
	}
	sign(t, c.roots, signers...)
}

func cloneRoots(t testing.TB, r *Roots) *Roots {
	t.Helper()
	out, err := ParseRootDraft(r.Bytes())
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func (c *ceremony) build(t testing.TB, key *PrivateKey) BuildReport {
	t.Helper()
	return publish(t, BuildOptions{From: c.from, Out: c.dir, Key: key, Root: c.roots, Now: at(c.now)})
}

// options pin the present root.
func (c *ceremony) options(t testing.TB) Options {
	return Options{Keys: []Key{cloneRoots(t, c.roots).Anchor()}, Now: func() time.Time { return c.now }, Cache: c.cache}
}

// open opens a feed that must be fresh.
func open(t testing.TB, location string, o Options) State {
	t.Helper()
	f, err := Open(t.Context(), location, o)
	if err != nil {
		t.Fatal(err)
	}
	if f.state.Stale {
		t.Fatalf("%s is stale: %s", location, f.state.Problem)
	}
	return f.State()
}

// refused fails the test unless a feed is refused: with an error, or in favour of an older copy.
func refused(t testing.TB, location string, o Options, is error, want string) {
	t.Helper()
	f, err := Open(t.Context(), location, o)
	if err == nil {
		err = f.state.Err
	}
	if err == nil {
		t.Fatalf("accepted: %+v", f.State())
	}
	if is != nil && !errors.Is(err, is) || !strings.Contains(err.Error(), want) {
		t.Fatalf("got %v, want %q", err, want)
	}
}

// copyOf copies a feed to another place.
func copyOf(t testing.TB, dir string) string {
	t.Helper()
	out := filepath.Join(t.TempDir(), "copy")
	if err := os.CopyFS(out, os.DirFS(dir)); err != nil {
		t.Fatal(err)
	}
	return out
}

func TestFeedWithRoot(t *testing.T) {
	c := newCeremony(t)
	o := c.options(t)
	if s := open(t, c.dir, o); s.Root != 1 || s.Warning != "" || s.Signer != c.index.String() || s.Sequence != 1 {
		t.Errorf("state %+v", s)
	}
	f, err := Open(t.Context(), c.dir, o)
	if err != nil {
		t.Fatal(err)
	}
	v := version.MustParse("v1.1.0")
	r, err := f.Release(t.Context(), v)
	if err != nil {
		t.Fatal(err)
	}
	k := r.DefaultKubernetes
	list, err := r.Components(k, "amd64")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.Vouch(t.Context(), v, k, "amd64", list); err != nil {
		t.Errorf("statement: %v", err)
	}
	if r, err := Verify(t.Context(), c.dir, o); err != nil || !r.OK() || r.Root != 1 || r.Warning != "" {
		t.Errorf("verify: %+v, %v", r.Problems, err)
	}
	server := serve(t, c.dir)
	open(t, server.URL, o)
	if got, want := server.requests(), []string{"root.json", "index.json", "index.json.sig"}; !slices.Equal(got[:3], want) {
		t.Errorf("requests %v", got)
	}
	open(t, server.URL, o)
	if got, want := server.requests(), []string{"root.json", "index.json"}; !slices.Equal(got, want) {
		t.Errorf("requests %v, want %v", got, want)
	}
	// A program that trusts one key only reads it, too.
	if s := open(t, c.dir, Options{Keys: []Key{c.index.Key}, Now: at(today)}); s.Root != 0 || s.Warning == "" {
		t.Errorf("by a key: %+v", s)
	}
	// The offline copy needs no source.
	remove(t, c.dir, indexName)
	if f, err := Open(t.Context(), c.dir, o); err != nil || !f.state.Stale || f.state.Sequence != 1 {
		t.Errorf("last good copy: %v", err)
	}
}

// Somebody without a key, or with one that is not an index key, signs releases.
func TestAttackArbitrarySoftware(t *testing.T) {
	c := newCeremony(t)
	o := c.options(t)
	open(t, c.dir, o)
	for _, key := range []*PrivateKey{newTestKey(t, "stranger"), c.ada} {
		dir := copyOf(t, c.dir)
		forge(t, dir, key, func(i *index) { i.Sequence = 7 })
		refused(t, dir, o, ErrSigner, "an untrusted key signed it")
	}
	for _, change := range []struct {
		name string
		do   func(dir string)
		is   error
	}{
		{name: "without a root", do: func(dir string) { remove(t, dir, rootName) }, is: ErrRoot},
		{name: "with another root", do: func(dir string) { write(t, dir, rootName, string(newCeremony(t).roots.Bytes())) }, is: ErrRoot},
		{name: "with other data", do: func(dir string) { write(t, dir, rootName, "{}") }, is: ErrUntrusted},
	} {
		dir := copyOf(t, c.dir)
		change.do(dir)
		t.Run(change.name, func(t *testing.T) { refused(t, dir, o, change.is, "root.json") })
	}
}

// A server sends more data than the client can store.
func TestAttackEndlessData(t *testing.T) {
	c := newCeremony(t)
	for _, name := range []string{rootName, indexName, indexName + signature, summariesName} {
		t.Run(name, func(t *testing.T) {
			server := serve(t, c.dir)
			sent := 0
			server.answer(func(w http.ResponseWriter, r *http.Request) bool {
				if r.URL.Path != "/"+name {
					return false
				}
				chunk := []byte(strings.Repeat(" ", 64<<10))
				for r.Context().Err() == nil {
					n, err := w.Write(chunk)
					if sent += n; err != nil {
						break
					}
				}
				return true
			})
			o := c.options(t)
			o.Cache = t.TempDir()
			refused(t, server.URL, o, ErrAltered, "more than")
			if server.Close(); sent > 64<<20 {
				t.Errorf("read %d bytes", sent)
			}
		})
	}
}

// A compromised publisher of one release makes clients install another one with it: a statement
// covers exactly the components of its release.
func TestAttackExtraneousDependencies(t *testing.T) {
	c := newCeremony(t)
	f, err := Open(t.Context(), c.dir, c.options(t))
	if err != nil {
		t.Fatal(err)
	}
	v := version.MustParse("v1.1.0")
	r, err := f.Release(t.Context(), v)
	if err != nil {
		t.Fatal(err)
	}
	list, err := r.Components(r.DefaultKubernetes, "amd64")
	if err != nil {
		t.Fatal(err)
	}
	more := slices.Clone(list)
	more = append(more, list[0])
	more[len(more)-1].Name = "backdoor"
	if _, err := f.Vouch(t.Context(), v, r.DefaultKubernetes, "amd64", more); !errors.Is(err, ErrNotOffered) {
		t.Errorf("one component more: %v", err)
	}
	// A file that no index names is not part of the feed.
	write(t, c.dir, "releases/v9.0.0.yaml", string(read(t, c.dir, "releases/v1.1.0.yaml")))
	if _, err := f.Release(t.Context(), version.MustParse("v9.0.0")); !errors.Is(err, ErrNotOffered) {
		t.Errorf("a file more: %v", err)
	}
}

// A stolen key counts up to the last number, so that clients refuse all later publications. The root
// revokes the key, and the count starts again.
func TestAttackFastForward(t *testing.T) {
	c := newCeremony(t)
	o := c.options(t)
	open(t, c.dir, o)
	c.now = today.Add(time.Hour)
	forge(t, c.dir, c.index, func(i *index) { i.Sequence = maxSequence })
	if s := open(t, c.dir, o); s.Sequence != maxSequence {
		t.Fatalf("the attack needs publication %d: %+v", uint64(maxSequence), s)
	}
	c.now = today.Add(2 * time.Hour)
	c.change(t, RootChange{RevokeIndexKeys: []string{c.index.ID()}}, c.bob, c.eve)
	if r := c.build(t, c.spare); r.Sequence != 1 || r.Root != 2 {
		t.Fatalf("publication %d of root %d, want 1 of 2", r.Sequence, r.Root)
	}
	if s := open(t, c.dir, o); s.Sequence != 1 || s.Root != 2 || s.Signer != c.spare.String() {
		t.Errorf("state %+v", s)
	}
	// The count does not start again a second time.
	c.build(t, c.spare)
	older := copyOf(t, c.dir)
	c.build(t, c.spare)
	open(t, c.dir, o)
	refused(t, older, o, ErrRollback, "it is publication 2, but 3 was seen")
}

// A server always answers with the same old publication.
func TestAttackIndefiniteFreeze(t *testing.T) {
	c := newCeremony(t)
	o := c.options(t)
	open(t, c.dir, o)
	c.now = today.Add(DefaultExpiry)
	refused(t, c.dir, o, ErrExpired, "it ended on")
	// A stolen index key cannot make a publication that lasts.
	forge(t, c.dir, c.index, func(i *index) { i.Sequence, i.Expires = 2, today.AddDate(100, 0, 0) })
	refused(t, c.dir, o, ErrUntrusted, "valid for longer than 90 days")
	forge(t, c.dir, c.index, func(i *index) { i.Created = today.AddDate(99, 0, 0); i.Expires = i.Created.Add(time.Hour) })
	refused(t, c.dir, o, ErrFuture, "made on 2125")
	// Nor does the root last.
	c.now = today.Add(DefaultRootExpiry)
	forge(t, c.dir, c.index, func(i *index) { i.Created, i.Expires = c.now, c.now.Add(time.Hour) })
	refused(t, c.dir, o, ErrExpired, "version 1 ended on")
	if _, err := NewRoots(NewRootOptions{Threshold: 1, Keys: []Key{c.ada.Key}, IndexKeys: []Key{c.index.Key}, Expires: MaxExpiry + time.Hour, Now: today}); err == nil {
		t.Error("a root for more than 400 days")
	}
}

// A mirror that answers nothing or wrong data must not prevent updates from another one.
func TestAttackMaliciousMirrorsPreventingUpdates(t *testing.T) {
	c := newCeremony(t)
	o := c.options(t)
	bad := serve(t, c.dir)
	for _, answer := range []func(http.ResponseWriter, *http.Request) bool{
		func(w http.ResponseWriter, _ *http.Request) bool { w.WriteHeader(http.StatusNotFound); return true },
		func(w http.ResponseWriter, r *http.Request) bool { fmt.Fprint(w, r.URL.Path); return true },
	} {
		bad.answer(answer)
		refused(t, bad.URL, o, nil, "")
	}
	forged := copyOf(t, c.dir)
	forge(t, forged, newTestKey(t, "stranger"), func(i *index) { i.Sequence = maxSequence })
	refused(t, forged, o, ErrUntrusted, "")
	open(t, c.dir, o)
}

// Files of different publications are combined.
func TestAttackMixAndMatch(t *testing.T) {
	c := newCeremony(t)
	o := c.options(t)
	old := copyOf(t, c.dir)
	write(t, c.from, "notices.yaml", "faulty:\n- {kubernetes: v1.36.4, reason: loses volumes}\n")
	c.build(t, c.index)
	for _, name := range []string{summariesName, indexName} {
		dir := copyOf(t, c.dir)
		for _, n := range []string{name, name + signature} {
			write(t, dir, n, string(read(t, old, n)))
		}
		o.Cache = t.TempDir()
		refused(t, dir, o, ErrAltered, summariesName)
	}
	dir := copyOf(t, c.dir)
	write(t, dir, indexName+signature, string(read(t, old, indexName+signature)))
	refused(t, dir, o, ErrSigner, "")
}

// A client that saw a publication accepts an older one, at whatever place and with whatever other
// trust anchors.
func TestAttackRollback(t *testing.T) {
	c := newCeremony(t)
	o := c.options(t)
	oldRoot := cloneRoots(t, c.roots)
	old := copyOf(t, c.dir)
	bundled := bundleOf(t, old, o)
	c.now = today.Add(time.Hour)
	c.change(t, RootChange{}, c.ada, c.bob)
	c.build(t, c.index)
	open(t, c.dir, o)
	another := newCeremony(t).roots.Anchor()
	for name, tt := range map[string]struct {
		location string
		keys     []Key
	}{
		"the same place":         {c.dir, o.Keys},
		"another place":          {copyOf(t, old), o.Keys},
		"an address":             {serve(t, old).URL, o.Keys},
		"one root more":          {copyOf(t, old), append([]Key{another}, o.Keys...)},
		"one key more":           {copyOf(t, old), append([]Key{c.spare.Key}, o.Keys...)},
		"the root of later":      {copyOf(t, old), []Key{c.roots.Anchor()}},
		"the root of before":     {copyOf(t, old), []Key{oldRoot.Anchor()}},
		"a bundle":               {BundleScheme + bundled, o.Keys},
		"a bundle elsewhere":     {BundleScheme + copyFile(t, bundled), o.Keys},
		"the copy for a bundle":  {old, nil},
		"an old index, new root": {withRoot(t, old, c.roots), o.Keys},
	} {
		t.Run(name, func(t *testing.T) {
			o := o
			if name == "the copy for a bundle" {
				if _, _, err := CopyFeed(t.Context(), tt.location, o); !errors.Is(err, ErrRollback) {
					t.Errorf("copied: %v", err)
				}
				return
			}
			if o.Keys = tt.keys; name == "the same place" {
				kept := copyOf(t, c.dir)
				defer func() { _ = os.RemoveAll(c.dir); _ = os.CopyFS(c.dir, os.DirFS(kept)) }()
				_ = os.RemoveAll(c.dir)
				_ = os.CopyFS(c.dir, os.DirFS(old))
			}
			refused(t, tt.location, o, ErrRollback, "")
		})
	}
	open(t, c.dir, o)
}

func withRoot(t testing.TB, dir string, r *Roots) string {
	t.Helper()
	out := copyOf(t, dir)
	write(t, out, rootName, string(r.Bytes()))
	return out
}

func copyFile(t testing.TB, file string) string {
	t.Helper()
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	write(t, dir, "copy.tar", string(b))
	return filepath.Join(dir, "copy.tar")
}

// bundleOf makes a bundle of a feed, with a cache of its own.
func bundleOf(t testing.TB, location string, o Options) string {
	t.Helper()
	o.Cache = ""
	files, _, err := CopyFeed(t.Context(), location, o)
	if err != nil {
		t.Fatal(err)
	}
	out, err := os.Create(filepath.Join(t.TempDir(), "bundle.tar"))
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	if err := WriteBundle(out, BundleContents{}, files, nil); err != nil {
		t.Fatal(err)
	}
	return out.Name()
}

// A server sends so slowly that clients wait for hours, and never see that they are attacked.
func TestAttackSlowRetrieval(t *testing.T) {
	c := newCeremony(t)
	for _, name := range []string{rootName, indexName, indexName + signature, summariesName} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				o := c.options(t)
				o.Cache = t.TempDir()
				o.Client = &http.Client{Transport: slowFile{c.dir, name}}
				start := time.Now()
				refused(t, "http://127.0.0.1/", o, ErrUnreachable, "")
				if took := time.Since(start); took != requestTimeout {
					t.Errorf("gave up after %s, want %s", took, requestTimeout)
				}
			})
		})
	}
}

// slowFile answers with the files of a feed, one of them at a byte every second.
type slowFile struct{ dir, name string }

func (s slowFile) RoundTrip(r *http.Request) (*http.Response, error) {
	name := strings.TrimPrefix(r.URL.Path, "/")
	b, err := os.ReadFile(filepath.Join(s.dir, name))
	if err != nil {
		return nil, err
	}
	res := &http.Response{StatusCode: http.StatusOK, ContentLength: int64(len(b)), Header: http.Header{}, Body: io.NopCloser(bytes.NewReader(b)), Request: r}
	if name == s.name {
		res.Body = slowBody{r.Context(), bytes.NewReader(b)}
	}
	return res, nil
}

type slowBody struct {
	ctx  context.Context
	rest *bytes.Reader
}

func (s slowBody) Read(p []byte) (int, error) {
	select {
	case <-time.After(time.Second):
		return s.rest.Read(p[:1])
	case <-s.ctx.Done():
		return 0, s.ctx.Err()
	}
}

func (slowBody) Close() error { return nil }

// One key is stolen. An index key can name no other keys, a root key alone changes nothing, and both
// are revoked while the feed goes on.
func TestAttackVulnerabilityToKeyCompromises(t *testing.T) {
	t.Run("an index key makes a key set of itself", func(t *testing.T) {
		c := newCeremony(t)
		o := c.options(t)
		open(t, c.dir, o)
		stolen := copyOf(t, c.dir)
		set := signSet(t, c.index, keySet{Schema: schema, Type: keySetType, Sequence: 9, Created: today, Expires: today.AddDate(100, 0, 0), Keys: []setKey{{"index", string(c.index.PEM())}}})
		forge(t, stolen, c.index, func(i *index) { i.Sequence, i.Keys = 9, append(i.Keys, set) })
		open(t, stolen, o) // it may sign, but its key set is ignored
		c.now = today.Add(time.Hour)
		c.change(t, RootChange{RevokeIndexKeys: []string{c.index.ID()}}, c.ada, c.eve)
		c.build(t, c.spare)
		if s := open(t, c.dir, o); s.Signer != c.spare.String() {
			t.Errorf("the publisher's answer: %+v", s)
		}
		refused(t, stolen, o, ErrRollback, "version 1 of the root, but version 2 was seen")
		forge(t, c.dir, c.index, func(i *index) { i.Sequence = 99 })
		refused(t, c.dir, o, ErrSigner, "")
	})
	t.Run("what it signed is refused even before the next publication", func(t *testing.T) {
		c := newCeremony(t)
		o := c.options(t)
		open(t, c.dir, o)
		c.now = today.Add(time.Hour)
		c.change(t, RootChange{RevokeIndexKeys: []string{c.index.ID()}}, c.ada, c.eve)
		write(t, c.dir, rootName, string(c.roots.Bytes()))
		for range 2 { // the last good copy is of the revoked key
			if f, err := Open(t.Context(), c.dir, o); err == nil {
				t.Fatalf("accepted: %+v", f.State())
			}
		}
	})
	t.Run("the other index key replays an older publication of its own", func(t *testing.T) {
		c := newCeremony(t)
		o := c.options(t)
		c.build(t, c.spare)
		old := copyOf(t, c.dir)
		c.now = today.Add(time.Hour)
		c.change(t, RootChange{RevokeIndexKeys: []string{c.index.ID()}}, c.ada, c.eve)
		refused(t, withRoot(t, old, c.roots), o, ErrRollback, "before a key was revoked")
	})
	t.Run("one root key of three", func(t *testing.T) {
		c := newCeremony(t)
		o := c.options(t)
		open(t, c.dir, o)
		for name, forged := range map[string]func(r *Roots){
			"signs alone": func(r *Roots) { sign(t, r, c.eve) },
			"signs twice": func(r *Roots) {
				sign(t, r, c.eve)
				s := &r.Roots[1]
				s.Signatures = append(s.Signatures, s.Signatures[0])
			},
			"signs under other names": func(r *Roots) {
				sign(t, r, c.eve)
				s := &r.Roots[1]
				for _, k := range []*PrivateKey{c.ada, c.bob} {
					s.Signatures = append(s.Signatures, rootSignature{k.id, s.Signatures[0].Signature})
				}
			},
		} {
			t.Run(name, func(t *testing.T) {
				r := cloneRoots(t, c.roots)
				if err := r.Change(RootChange{RemoveKeys: []string{c.ada.ID(), c.bob.ID()}, Threshold: 1, Now: today}); err != nil {
					t.Fatal(err)
				}
				forged(r)
				refused(t, withRoot(t, c.dir, r), o, ErrUnsigned, "1 of the keys of version 1, want 2")
			})
		}
	})
	t.Run("a removed root key", func(t *testing.T) {
		c := newCeremony(t)
		o := c.options(t)
		dan := newTestKey(t, "dan")
		c.now = today.Add(time.Hour)
		c.change(t, RootChange{RemoveKeys: []string{c.eve.ID()}, AddKeys: []Key{dan.Key}}, c.ada, c.bob)
		c.build(t, c.index)
		open(t, c.dir, o)
		r := cloneRoots(t, c.roots)
		if err := r.Change(RootChange{Now: c.now}); err != nil {
			t.Fatal(err)
		}
		sign(t, r, c.ada)
		if err := r.Sign(c.eve); !errors.Is(err, ErrKeySet) {
			t.Errorf("a removed key signs: %v", err)
		}
		refused(t, withRoot(t, c.dir, r), o, ErrUnsigned, "")
		sign(t, r, dan)
		open(t, withRoot(t, c.dir, r), o)
	})
	t.Run("keys of a new version that do not sign it", func(t *testing.T) {
		c := newCeremony(t)
		r := cloneRoots(t, c.roots)
		x, y := newTestKey(t, "x"), newTestKey(t, "y")
		if err := r.Change(RootChange{RemoveKeys: []string{c.ada.ID(), c.bob.ID(), c.eve.ID()}, AddKeys: []Key{x.Key, y.Key}, Now: today}); err != nil {
			t.Fatal(err)
		}
		sign(t, r, c.ada, c.bob)
		refused(t, withRoot(t, c.dir, r), c.options(t), ErrUnsigned, "0 of the keys of version 2, want 2")
		sign(t, r, x, y)
		open(t, withRoot(t, c.dir, r), c.options(t))
	})
}

// A client gets an authentic file that it did not ask for.
func TestAttackWrongSoftwareInstallation(t *testing.T) {
	c := newCeremony(t)
	for _, n := range []string{"", signature} {
		write(t, c.dir, "releases/v1.1.0.yaml"+n, string(read(t, c.dir, "releases/v1.0.0.yaml"+n)))
	}
	f, err := Open(t.Context(), c.dir, c.options(t))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.Release(t.Context(), version.MustParse("v1.1.0")); !errors.Is(err, ErrAltered) {
		t.Errorf("v1.0.0 in place of v1.1.0: %v", err)
	}
	// Both feeds are signed by the same key, but have different roots.
	other := newCeremony(t)
	other.index = c.index
	roots, err := NewRoots(NewRootOptions{Threshold: 1, Keys: []Key{other.ada.Key}, IndexKeys: []Key{c.index.Key}, Now: today})
	if err != nil {
		t.Fatal(err)
	}
	sign(t, roots, other.ada)
	dir := filepath.Join(t.TempDir(), "feed")
	publish(t, BuildOptions{From: c.from, Out: dir, Key: c.index, Root: roots})
	refused(t, dir, c.options(t), ErrRoot, "it belongs to feed")
}

// The weaknesses of feeds without a root, for which the root exists. The test shows which attacks fail nevertheless.
func TestFeedsWithoutRoot(t *testing.T) {
	one, two, three := newTestKey(t, "one"), newTestKey(t, "two"), newTestKey(t, "three")
	from, dir := sources(t), filepath.Join(t.TempDir(), "feed")
	publish(t, BuildOptions{From: from, Out: dir, Key: one, Trust: []Key{one.Key, two.Key, three.Key}})
	old := copyOf(t, dir)
	publish(t, BuildOptions{From: from, Out: dir, Key: two})
	o := Options{Keys: []Key{one.Key}, Now: at(today), Cache: t.TempDir()}
	s := open(t, dir, o)
	if !strings.Contains(s.Warning, "one stolen key is enough to take it over; feeds without a root are refused from 2027-12-01") {
		t.Errorf("warning %q", s.Warning)
	}
	for name, tt := range map[string]struct {
		location string
		keys     []Key
	}{
		"another place":   {copyOf(t, old), o.Keys},
		"one key more":    {old, []Key{one.Key, newTestKey(t, "more").Key}},
		"a bundle":        {BundleScheme + bundleOf(t, old, o), o.Keys},
		"another address": {serve(t, old).URL, o.Keys},
	} {
		t.Run("older at "+name, func(t *testing.T) {
			o := o
			o.Keys = tt.keys
			refused(t, tt.location, o, ErrRollback, "it is publication 1, but 2 was seen")
		})
	}
	if _, _, err := CopyFeed(t.Context(), old, o); !errors.Is(err, ErrRollback) {
		t.Errorf("an older publication is copied: %v", err)
	}
	// One of three keys makes a set of itself, but it cannot last.
	for _, tt := range []struct {
		name             string
		created, expires time.Time
		is               error
	}{
		{name: "to 2126", created: today, expires: today.AddDate(100, 0, 0), is: ErrUntrusted},
		{name: "from 2125 to 2126", created: today.AddDate(99, 0, 0), expires: today.AddDate(100, 0, 0), is: ErrFuture},
	} {
		forged := copyOf(t, dir)
		set := signSet(t, three, keySet{Schema: schema, Type: keySetType, Sequence: 9, Created: tt.created, Expires: tt.expires, Keys: []setKey{{"three", string(three.PEM())}}})
		forge(t, forged, three, func(i *index) { i.Sequence, i.Keys = 9, append(i.Keys, set) })
		t.Run("a key set "+tt.name, func(t *testing.T) { refused(t, forged, o, tt.is, "key set") })
	}
	forge(t, dir, two, func(i *index) { i.Sequence, i.Expires = 3, today.AddDate(100, 0, 0) })
	refused(t, dir, o, ErrUntrusted, "valid for longer than 400 days")

	// After the date it is refused, also the last good copy.
	forge(t, dir, two, func(i *index) {
		i.Sequence, i.Created, i.Expires = 4, LegacyEnd.Add(-time.Hour), LegacyEnd.Add(time.Hour)
	})
	set := signSet(t, two, keySet{Schema: schema, Type: keySetType, Sequence: 10, Created: today, Expires: today.Add(MaxExpiry), Keys: []setKey{{"two", string(two.PEM())}}})
	forge(t, dir, two, func(i *index) { i.Keys = append(i.Keys, set) }) // it is valid until then
	o.Now = at(LegacyEnd.Add(-time.Minute))
	open(t, dir, o)
	o.Now = at(LegacyEnd)
	if f, err := Open(t.Context(), dir, o); !errors.Is(err, ErrLegacy) {
		t.Errorf("after the end: %v, %v", f, err)
	}
}

// A feed without a root gets one. Programs that trust a key read on, with a warning.
func TestFeedGetsRoot(t *testing.T) {
	c := newCeremony(t)
	dir := filepath.Join(t.TempDir(), "feed")
	publish(t, BuildOptions{From: c.from, Out: dir, Key: c.index})
	byKey := Options{Keys: []Key{c.index.Key}, Now: at(today), Cache: t.TempDir()}
	open(t, dir, byKey)
	r := publish(t, BuildOptions{From: c.from, Out: dir, Key: c.index, Root: c.roots})
	if r.Root != 1 || r.Sequence != 2 || r.Warning != "" {
		t.Errorf("published %+v", r)
	}
	open(t, dir, byKey)
	open(t, dir, c.options(t))
	// The root stays, and the other index key may sign for both.
	if r := publish(t, BuildOptions{From: c.from, Out: dir, Key: c.spare}); r.Root != 1 || r.Sequence != 3 {
		t.Errorf("published %+v", r)
	}
	open(t, dir, byKey)
	open(t, dir, c.options(t))

	refuse := func(o BuildOptions, is error, want string) {
		t.Helper()
		o.From, o.Out, o.Now = c.from, dir, at(today)
		if _, err := Build(t.Context(), o); !errors.Is(err, is) || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q", err, want)
		}
	}
	refuse(BuildOptions{Key: c.ada}, ErrKeySet, "is not an index key of version 1")
	refuse(BuildOptions{Key: c.index, Trust: []Key{c.index.Key}}, ErrKeySet, "the root of the feed decides")
	refuse(BuildOptions{Key: c.index, Expires: 91 * 24 * time.Hour}, ErrKeySet, "90 days at most")
	refuse(BuildOptions{Key: c.index, Root: newCeremony(t).roots}, ErrKeySet, "it belongs to feed")
	draft := cloneRoots(t, c.roots)
	if err := draft.Change(RootChange{Now: today}); err != nil {
		t.Fatal(err)
	}
	sign(t, draft, c.ada)
	refuse(BuildOptions{Key: c.index, Root: draft}, ErrUnsigned, "want 2")
	if err := draft.Change(RootChange{Now: today}); !errors.Is(err, ErrUnsigned) {
		t.Errorf("a change of an unsigned version: %v", err)
	}
}

func TestRootsThatAreRefused(t *testing.T) {
	c := newCeremony(t)
	for _, tt := range []struct {
		name   string
		change func(*root)
		want   string
	}{
		{name: "another type", change: func(r *root) { r.Type = indexType }, want: "its type is"},
		{name: "another format", change: func(r *root) { r.Schema = "9" }, want: "a newer program may support it"},
		{name: "no keys", change: func(r *root) { r.Keys = nil }, want: "it has 0 keys"},
		{name: "a key twice", change: func(r *root) { r.Keys = append(r.Keys, setKey{"again", r.Keys[0].PEM}) }, want: "occurs twice"},
		{name: "no index keys", change: func(r *root) { r.IndexKeys = nil }, want: "indexKeys: it has 0 keys"},
		{name: "a root key that is an index key", change: func(r *root) { r.IndexKeys[0] = r.Keys[0] }, want: "is a root key and an index key"},
		{name: "no threshold", change: func(r *root) { r.Threshold = 0 }, want: "the threshold is 0 of 3 keys"},
		{name: "a threshold out of reach", change: func(r *root) { r.Threshold = 4 }, want: "the threshold is 4 of 3 keys"},
		{name: "an eternal root", change: func(r *root) { r.Expires = r.Created.AddDate(100, 0, 0) }, want: "want 1 hour to 400 days"},
		{name: "publications for years", change: func(r *root) { r.IndexDays = 401 }, want: "indexDays is 401, want 1 to 400"},
		{name: "since the future", change: func(r *root) { r.Since = r.Created.Add(time.Hour) }, want: "since is"},
		{name: "a version that was left out", change: func(r *root) { r.Version = 3 }, want: "version 1 is called 3"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			changed, err := parseRoot([]byte(c.roots.Roots[0].Root))
			if err != nil {
				t.Fatal(err)
			}
			tt.change(changed)
			b, err := encodeJSON(changed)
			if err != nil {
				t.Fatal(err)
			}
			r := Roots{Schema: schema, Type: rootsType, Roots: []signedRoot{{Root: string(b), Signatures: []rootSignature{}}}}
			if _, err := ParseRootDraft(r.Bytes()); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %v, want %q", err, tt.want)
			}
		})
	}
}
