package backup

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"constellation/internal/testneeds"
)

// ours and theirs are the secrets of two workspaces.
var (
	ours   = Keys{Secret: bytes.Repeat([]byte{1}, 32)}
	theirs = Keys{Secret: bytes.Repeat([]byte{2}, 32)}
)

// authenticated writes the backup of a cluster, with a tag if keys has a secret, and returns its directory.
func authenticated(t *testing.T, parent, id, cluster string, keys Keys) string {
	t.Helper()
	w, err := Create(parent, id)
	if err != nil {
		t.Fatal(err)
	}
	w.Authenticate(keys.Secret)
	if err := fill(w); err != nil {
		t.Fatal(err)
	}
	if _, err := w.Commit(Manifest{Cluster: Cluster{Name: cluster, UID: cluster, Server: "v1.35.4"}}); err != nil {
		t.Fatal(err)
	}
	return w.Path()
}

// judge opens and verifies a backup.
func judge(t *testing.T, parent, id string, keys Keys) (authentication string, err error) {
	t.Helper()
	b, err := Open(parent, id, keys)
	if err != nil {
		return "", err
	}
	defer b.Close()
	if err := b.Verify(t.Context(), nil); err != nil {
		return "", err
	}
	return b.Authentication(), nil
}

func TestAuthentication(t *testing.T) {
	for _, tt := range []struct {
		name        string
		write, read Keys
		want        string
	}{
		{name: "the same secret", write: ours, read: ours, want: Authenticated},
		{name: "another secret", write: theirs, read: ours, want: Foreign},
		{name: "a reader without a secret", write: ours, read: Keys{}, want: Foreign},
		{name: "a writer without a secret", write: Keys{}, read: ours, want: Unauthenticated},
		{name: "neither has a secret", write: Keys{}, read: Keys{}, want: Unauthenticated},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "runs")
			authenticated(t, dir, testID, "one", tt.write)
			if got, err := judge(t, dir, testID, tt.read); got != tt.want || err != nil {
				t.Errorf("%s, %v; want %s", got, err, tt.want)
			}
			all, err := List(dir, tt.read)
			if err != nil || len(all) != 1 || !all[0].Complete || all[0].Authentication != tt.want {
				t.Errorf("listed as %+v, %v", all, err)
			}
		})
	}
}

// The keys of two clusters differ, and so do their IDs.
func TestKeysAreOfOneCluster(t *testing.T) {
	a, idA := tagKey(ours.Secret, "one")
	b, idB := tagKey(ours.Secret, "two")
	if bytes.Equal(a, b) || idA == idB || !keyIDRE.MatchString(idA) {
		t.Errorf("%x of %s, %x of %s", a, idA, b, idB)
	}
}

// reseal makes the digest at the end of a manifest right again, as everybody can.
func reseal(manifest []byte) []byte {
	if len(manifest) < sumSize {
		return manifest
	}
	body := manifest[:len(manifest)-sumSize]
	sum := sha256.Sum256(body)
	return append(bytes.Clone(body), sumHead+hex.EncodeToString(sum[:])+sumTail...)
}

// An attacker without the secret cannot make a changed backup pass for ours.
func TestTamperedBackupIsNeverAuthenticated(t *testing.T) {
	other := filepath.Join(t.TempDir(), "runs")
	authenticated(t, other, testID, "two", ours)
	foreign := filepath.Join(t.TempDir(), "runs")
	authenticated(t, foreign, testID, "one", theirs)
	read := func(name string) []byte {
		t.Helper()
		b, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	manifestOf := func(dir string) []byte { return read(filepath.Join(dir, testID, Dir, ManifestFile)) }
	tagOf := func(m []byte) []byte { return m[len(m)-sumSize-tagSize : len(m)-sumSize] }
	replace := func(old, now string) func([]byte) []byte {
		return func(m []byte) []byte {
			if !bytes.Contains(m, []byte(old)) {
				t.Fatalf("%q is not in the manifest", old)
			}
			return reseal(bytes.Replace(m, []byte(old), []byte(now), 1))
		}
	}
	keyOf := func(m []byte) string {
		_, id, ok := strings.Cut(string(m), `"authenticated_by": "`)
		if !ok {
			t.Fatal("no key")
		}
		return id[:2*keyIDSize]
	}
	for _, tt := range []struct {
		name   string
		change func(manifest []byte) []byte
		want   string // authentication, or part of the error
	}{
		{name: "a note is added", change: replace(`"holes": []`, `"holes": [], "notes": ["x"]`), want: "its authentication tag is wrong"},
		{name: "a kind is renamed", change: replace(`"kind": "Widget"`, `"kind": "Gadget"`), want: "its authentication tag is wrong"},
		{name: "an owner is changed", change: replace(`"uid":"a.example.com-2","references":[{"apiVersion":"v1","kind":"X","name":"o","uid":"owner-2"}]`, `"uid":"a.example.com-2","references":[]`), want: "its authentication tag is wrong"},
		{name: "the digest of a file is changed", change: replace(`"sha256": "`, `"sha256": "0`), want: "its SHA-256 differs"},
		{name: "the digest of a file is removed", change: func(m []byte) []byte {
			_, rest, _ := bytes.Cut(m, []byte(`"sha256": "`))
			return reseal(bytes.Replace(m, rest[:2*sha256.Size], nil, 1))
		}, want: "names an invalid file"},
		{name: "it is said to be of another cluster", change: replace(`"uid": "one"`, `"uid": "two"`), want: Foreign},
		{name: "the tag is that of another backup", change: func(m []byte) []byte {
			return reseal(bytes.Replace(m, tagOf(m), tagOf(manifestOf(other)), 1))
		}, want: "its authentication tag is wrong"},
		{name: "the tag is removed", change: func(m []byte) []byte { return reseal(bytes.Replace(m, tagOf(m), nil, 1)) }, want: "has no authentication tag"},
		{name: "the key is removed", change: func(m []byte) []byte {
			return replace(`"authenticated_by": "`+keyOf(m)+`"`, `"notes": []`)(m)
		}, want: Unauthenticated},
		{name: "tag and key are removed", change: func(m []byte) []byte {
			return replace(`"authenticated_by": "`+keyOf(m)+`"`, `"notes": []`)(bytes.Replace(m, tagOf(m), nil, 1))
		}, want: Unauthenticated},
		{name: "the key is one that we do not have", change: func(m []byte) []byte { return replace(keyOf(m), strings.Repeat("0", 2*keyIDSize))(m) }, want: Foreign},
		{name: "the key is no key", change: func(m []byte) []byte { return replace(keyOf(m), strings.Repeat("x", 2*keyIDSize))(m) }, want: "names an invalid key"},
		{name: "the key is not of this secret", change: func([]byte) []byte { return manifestOf(foreign) }, want: Foreign},
		{name: "our key is named over a tag of another secret", change: func(m []byte) []byte {
			f := manifestOf(foreign)
			return replace(keyOf(f), keyOf(m))(f)
		}, want: "its authentication tag is wrong"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "runs")
			name := filepath.Join(authenticated(t, dir, testID, "one", ours), ManifestFile)
			if err := os.WriteFile(name, tt.change(read(name)), 0o600); err != nil {
				t.Fatal(err)
			}
			got, err := judge(t, dir, testID, ours)
			if err != nil {
				got = err.Error()
			}
			if !strings.Contains(got, tt.want) || got == Authenticated {
				t.Errorf("%s, want %s", got, tt.want)
			}
		})
	}
}

// A program that knows no tags reads the digest of the last sumSize bytes.
func TestOlderProgramsReadTags(t *testing.T) {
	name := filepath.Join(authenticated(t, filepath.Join(t.TempDir(), "runs"), testID, "one", ours), ManifestFile)
	b, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(reseal(b), b) {
		t.Error("the digest is not that of all bytes before it")
	}
	if err := checkJSON(b); err != nil {
		t.Errorf("%v:\n%s", err, b)
	}
}

// mutations is the number of mutations of a backup; make soak sets it to 100,000.
func mutations(t *testing.T) int {
	t.Helper()
	n := 30_000
	if testneeds.Short() {
		n = 3000
	}
	return testneeds.Number(t, "CONSTELLATION_BACKUP_MUTATIONS", n)
}

// mutate returns a copy of b with one change: bits, bytes, a piece that is cut out, doubled, moved or replaced by a
// piece of another file, or another end.
func mutate(r *rand.Rand, b, other []byte) []byte {
	out := bytes.Clone(b)
	if len(out) == 0 {
		return []byte{byte(r.UintN(256))}
	}
	at := r.IntN(len(out))
	n := min(1+r.IntN(40), len(out)-at)
	switch r.IntN(10) {
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
		copy(out[at:at+n], other[r.IntN(len(other)):])
	case 8:
		to := r.IntN(len(out) - n + 1)
		piece := bytes.Clone(out[at : at+n])
		out = slices.Delete(out, at, at+n)
		out = slices.Insert(out, min(to, len(out)), piece...)
	case 9:
		return bytes.Clone(other)
	}
	return out
}

// mended is the manifest with size and digest of a changed file, and a right digest of itself: what somebody
// without the secret can do.
func mended(manifest, was, now []byte) []byte {
	hexOf := func(b []byte) []byte { s := sha256.Sum256(b); return []byte(hex.EncodeToString(s[:])) }
	out := bytes.Replace(manifest, hexOf(was), hexOf(now), 1)
	out = bytes.Replace(out, fmt.Appendf(nil, `"size": %d,`, len(was)), fmt.Appendf(nil, `"size": %d,`, len(now)), 1)
	return reseal(out)
}

// No mutation of a backup is accepted, with mended digests or without.
func TestMutatedBackupIsNotAccepted(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "runs")
	testMutations(t, dir, authenticated(t, dir, testID, "one", ours), ours, mutations(t))
}

// testMutations makes n changes of the files of the backup at path, which keys authenticate.
func testMutations(t *testing.T, dir, path string, keys Keys, n int) {
	t.Helper()
	files := map[string][]byte{}
	var names []string
	err := filepath.WalkDir(path, func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		files[name], err = os.ReadFile(name)
		names = append(names, name)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	manifest := filepath.Join(path, ManifestFile)
	write := func(name string, b []byte) {
		if err := os.WriteFile(name, b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if got, err := judge(t, dir, testID, keys); got != Authenticated || err != nil {
		t.Fatalf("unchanged: %s, %v", got, err)
	}
	seed := rand.Uint64()
	r := rand.New(rand.NewPCG(seed, 1))
	results := map[string]int{}
	for i := 0; i < n; {
		name := names[r.IntN(len(names))]
		if r.IntN(2) == 0 {
			name = manifest
		}
		now := mutate(r, files[name], files[names[r.IntN(len(names))]])
		mend := r.IntN(2) == 0
		if mend && name == manifest {
			now = reseal(now)
		}
		if bytes.Equal(now, files[name]) { // the seal alone was changed and mended, or nothing was
			continue
		}
		i++
		if mend && name != manifest {
			write(manifest, mended(files[manifest], files[name], now))
		}
		write(name, now)
		got, err := judge(t, dir, testID, keys)
		var broken *NotWhole
		switch {
		case err == nil && (got == Authenticated || !mend):
			t.Fatalf("seed %d, mutation %d of %s, mended %v, was accepted as %s:\n%q", seed, i, name, mend, got, now)
		case err != nil && errors.As(err, &broken):
			got = "damaged"
		case err != nil:
			got = "refused"
		}
		results[got]++
		write(name, files[name])
		if mend && name != manifest {
			write(manifest, files[manifest])
		}
	}
	t.Logf("%d mutations, 0 accepted: %v", n, results)
}

// checkJSON returns an error unless b is one JSON document.
func checkJSON(b []byte) error {
	var v any
	return json.Unmarshal(b, &v)
}

// A restore makes requests of the names of types.
func TestTypesWithPathsAreDamage(t *testing.T) {
	for _, bad := range []Type{
		{Version: "v1/namespaces/a/services/http:b:80/proxy/c?x=", Resource: "secrets"},
		{Version: "v1", Resource: "secrets/../../x"},
		{Version: "v1", Resource: "secrets?x"},
		{Group: "a/b", Version: "v1", Resource: "widgets"},
		{Group: "a..b", Version: "v1", Resource: "widgets"},
		{Version: "", Resource: "secrets"},
	} {
		dir := filepath.Join(t.TempDir(), "runs")
		w, err := Create(dir, testID)
		if err != nil {
			t.Fatal(err)
		}
		w.types = append(w.types, bad) // as a program of somebody else would write it
		if _, err := w.Commit(Manifest{}); err != nil {
			t.Fatal(err)
		}
		b, err := Open(dir, testID, Keys{})
		if b != nil {
			b.Close()
		}
		var n *NotWhole
		if !errors.As(err, &n) {
			t.Errorf("%+v: %v, want damage", bad, err)
		}
	}
}

// What Open read is used, so Verify must not authenticate another manifest.
func TestManifestThatChangesAfterOpenIsDamage(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "runs")
	write := func(under string, name string) {
		t.Helper()
		w, err := Create(under, testID)
		if err != nil {
			t.Fatal(err)
		}
		w.Authenticate(ours.Secret)
		if _, err := w.Commit(Manifest{Cluster: Cluster{Name: name}}); err != nil {
			t.Fatal(err)
		}
	}
	write(dir, "a")
	b, err := Open(dir, testID, ours)
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	if err := b.Verify(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	other := filepath.Join(t.TempDir(), "runs")
	write(other, "b")
	if err := os.Rename(filepath.Join(other, testID, Dir, ManifestFile), filepath.Join(b.Path(), ManifestFile)); err != nil {
		t.Fatal(err)
	}
	var n *NotWhole
	if err := b.Verify(t.Context(), nil); !errors.As(err, &n) {
		t.Errorf("%v, want damage", err)
	}
}

// A list does not call a damaged backup authenticated.
func TestDamagedBackupIsListedWithoutAuthentication(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "runs")
	w, err := Create(dir, testID)
	if err != nil {
		t.Fatal(err)
	}
	w.Authenticate(ours.Secret)
	if _, err := w.Commit(Manifest{}); err != nil {
		t.Fatal(err)
	}
	one := func() Entry {
		t.Helper()
		list, err := List(dir, ours)
		if err != nil || len(list) != 1 {
			t.Fatalf("%+v, %v", list, err)
		}
		return list[0]
	}
	if e := one(); e.Authentication != Authenticated {
		t.Errorf("whole: %+v", e)
	}
	if err := os.WriteFile(filepath.Join(dir, testID, Dir, "stranger"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if e := one(); e.Complete || e.Authentication != "" {
		t.Errorf("damaged: %+v", e)
	}
}
