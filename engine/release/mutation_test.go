package release

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"constellation/internal/testneeds"
)

// memoryStore is a feed in memory.
type memoryStore map[string][]byte

func (memoryStore) location() string { return "memory" }

func (m memoryStore) read(_ context.Context, name string, limit int64, _ string) (answer, error) {
	b, ok := m[name]
	switch {
	case !ok:
		return answer{}, ErrAbsent
	case int64(len(b)) > limit:
		return answer{}, tooLong(int64(len(b)), limit)
	}
	return answer{bytes: b}, nil
}

// mutate returns a copy of b with one change: bits, bytes, a piece that is cut out, doubled or replaced
// by a piece of another file, or another end. The result differs from b.
func mutate(r *rand.Rand, b, other []byte) []byte {
	for {
		if out := mutateOnce(r, b, other); !bytes.Equal(out, b) {
			return out
		}
	}
}

func mutateOnce(r *rand.Rand, b, other []byte) []byte {
	out := bytes.Clone(b)
	if len(out) == 0 {
		return []byte{byte(r.UintN(256))}
	}
	at := r.IntN(len(out))
	n := min(1+r.IntN(40), len(out)-at)
	switch r.IntN(8) {
	case 0, 1:
		out[at] ^= 1 << r.UintN(8)
	case 2:
		out[at] = byte(r.UintN(256))
	case 3:
		out = slices.Delete(out, at, at+n)
	case 4:
		out = slices.Insert(out, at, bytes.Clone(out[at:at+n])...)
	case 5:
		out = out[:at]
	case 6:
		out = append(out, byte(r.UintN(256)))
	case 7:
		if len(other) > 0 {
			from := r.IntN(len(other))
			copy(out[at:at+n], other[from:])
		}
	}
	return out
}

// mutations is the number of mutations of each test; make soak sets it to 100,000.
func mutations(t *testing.T) int {
	t.Helper()
	n := 1000
	if testneeds.Short() {
		n = 200
	}
	return testneeds.Number(t, "CONSTELLATION_FEED_MUTATIONS", n)
}

// contentOf is everything that a client takes from a feed.
func contentOf(t *testing.T, s store, c *ceremony) (map[string]string, error) {
	t.Helper()
	f, err := current(t.Context(), s, nil, c.options(t).Keys, today)
	if err != nil {
		return nil, err
	}
	out := map[string]string{indexName: f.raw.Index}
	for _, r := range f.raw.rootTexts(t) {
		out["root "+digest([]byte(r))] = r
	}
	for name := range f.index.Files {
		b, err := f.file(t.Context(), name)
		if err != nil {
			return nil, err
		}
		out[name] = string(b)
	}
	for _, s := range f.summaries {
		r, err := f.Release(t.Context(), s.Version)
		if err != nil {
			return nil, err
		}
		for _, k := range r.Kubernetes[:1] {
			list, err := r.Components(k.Version, "amd64")
			if errors.Is(err, ErrUnpinned) {
				continue
			}
			if err != nil {
				return nil, err
			}
			if _, err := f.Vouch(t.Context(), s.Version, k.Version, "amd64", list); err != nil {
				return nil, err
			}
		}
	}
	return out, nil
}

// rootTexts are the signed versions of the root.
func (g good) rootTexts(t *testing.T) (out []string) {
	t.Helper()
	r, err := readRoots([]byte(g.Roots))
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range r.Roots {
		out = append(out, s.Root)
	}
	return out
}

// No mutation of a file of a feed changes what a client takes from it.
func TestMutatedFeedsAreRefused(t *testing.T) {
	c := newCeremony(t)
	c.change(t, RootChange{}, c.ada, c.bob)
	c.build(t, c.index)
	whole := memoryStore{}
	err := filepath.WalkDir(c.dir, func(at string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		name, err := filepath.Rel(c.dir, at)
		if err != nil {
			return err
		}
		b, err := os.ReadFile(at)
		whole[filepath.ToSlash(name)] = b
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	c.roots.Roots = c.roots.Roots[:1] // the client pins the first version
	want, err := contentOf(t, whole, c)
	if err != nil {
		t.Fatal(err)
	}
	var names []string // those that a client reads; Verify reads the signatures of the others
	for _, name := range slices.Sorted(maps.Keys(whole)) {
		if name == indexName+signature || filepath.Ext(name) != signature {
			names = append(names, name)
		}
	}
	r := rand.New(rand.NewPCG(25, 1))
	refused, harmless := 0, 0
	for range mutations(t) {
		name, other := names[r.IntN(len(names))], names[r.IntN(len(names))]
		if r.IntN(2) == 0 { // half of them in the files that decide
			name = []string{rootName, indexName, indexName + signature}[r.IntN(3)]
		}
		changed := maps.Clone(whole)
		changed[name] = mutate(r, whole[name], whole[other])
		got, err := contentOf(t, changed, c)
		switch {
		case err != nil:
			refused++
		case maps.Equal(got, want):
			harmless++ // a signature that nothing needs, or white space around signed text
		default:
			t.Fatalf("a mutation of %s was accepted:\n%q", name, changed[name])
		}
	}
	t.Logf("%d refused, %d without effect, 0 accepted", refused, harmless)
	if refused == 0 {
		t.Error("nothing was refused")
	}
}

// No mutation of a bundle changes what a client takes from it.
func TestMutatedBundlesAreRefused(t *testing.T) {
	c := newCeremony(t)
	files, _, err := CopyFeed(t.Context(), c.dir, c.options(t))
	if err != nil {
		t.Fatal(err)
	}
	blob := bytes.Repeat([]byte("chart"), 100)
	var b bytes.Buffer
	contents := BundleContents{Charts: []BundleChart{{"chart", "1.0.0", "oci://charts.example/chart", "sha256:" + digest(blob)}}}
	if err := WriteBundle(&b, contents, files, map[string][]byte{"sha256:" + digest(blob): blob}); err != nil {
		t.Fatal(err)
	}
	whole, dir := b.Bytes(), t.TempDir()
	read := func(b []byte) (map[string]string, error) {
		file := filepath.Join(dir, "bundle.tar")
		if err := os.WriteFile(file, b, 0o600); err != nil {
			t.Fatal(err)
		}
		bundle, err := OpenBundle(file)
		if err != nil {
			return nil, err
		}
		out, err := contentOf(t, bundleStore{bundle}, c)
		if err != nil {
			return nil, err
		}
		for _, x := range bundle.Charts {
			b, ok, err := bundle.Blob(x.Digest)
			if err != nil || !ok || "sha256:"+digest(b) != x.Digest {
				return nil, ErrBundle // as the reader of a chart verifies it
			}
			out[x.Name+x.Version+x.Source] = string(b)
		}
		return out, nil
	}
	want, err := read(whole)
	if err != nil {
		t.Fatal(err)
	}
	r := rand.New(rand.NewPCG(25, 2))
	refused, harmless := 0, 0
	for range mutations(t) {
		changed := mutate(r, whole, whole)
		if r.IntN(4) == 0 { // in the manifest
			changed = slices.Concat(mutate(r, whole[:8192], whole), whole[8192:])
		}
		got, err := read(changed)
		switch {
		case err != nil:
			refused++
		case maps.EqualFunc(got, want, func(a, b string) bool { return a == b }):
			harmless++ // padding, or a header that nothing reads
		case len(got) > 0:
			// The list of charts is not signed: a chart is used only by the digest of a release.
			for name, text := range want {
				if _, chart := files[name]; chart && got[name] != text {
					t.Fatalf("a mutation of the bundle was accepted: %s", name)
				}
			}
			if got[indexName] != want[indexName] {
				t.Fatal("a mutation of the bundle was accepted")
			}
			harmless++
		}
	}
	t.Logf("%d refused, %d without effect, 0 accepted", refused, harmless)
	if refused == 0 {
		t.Error("nothing was refused")
	}
}

// No mutation of a statement makes machines accept other components.
func TestMutatedStatementsAreRefused(t *testing.T) {
	key, next := newTestKey(t, "key"), newTestKey(t, "next")
	from, dir := sources(t), filepath.Join(t.TempDir(), "feed")
	publish(t, BuildOptions{From: from, Out: dir, Key: key, Trust: []Key{key.Key, next.Key}})
	publish(t, BuildOptions{From: from, Out: dir, Key: next})
	text := read(t, dir, "releases/v1.1.0/components.json")
	trust := NewTrust(key.Key)
	want, err := trust.read(string(text))
	if err != nil {
		t.Fatal(err)
	}
	r := rand.New(rand.NewPCG(25, 3))
	refused, harmless := 0, 0
	for range mutations(t) {
		got, err := trust.read(string(mutate(r, text, text)))
		if err != nil {
			refused++
			continue
		}
		if !maps.EqualFunc(got, want, func(a, b map[string]string) bool { return maps.Equal(a, b) }) {
			t.Fatal("a mutation of a statement was accepted")
		}
		harmless++ // the signature of the other key suffices
	}
	t.Logf("%d refused, %d without effect, 0 accepted", refused, harmless)
	if refused == 0 {
		t.Error("nothing was refused")
	}
}
