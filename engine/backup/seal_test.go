package backup

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"filippo.io/age"
)

// somebody is an identity of age with its recipient.
func somebody(t testing.TB) (Identity, string) {
	t.Helper()
	i, err := age.GenerateX25519Identity()
	if err != nil {
		t.Fatal(err)
	}
	return i, i.Recipient().String()
}

// snapshot is a small database with the digest at its end.
func snapshot() []byte {
	db := []byte(strings.Repeat("etcd", 1024))
	sum := sha256.Sum256(db)
	return append(db, sum[:]...)
}

// makeSealed writes an encrypted backup with every feature; before may be nil.
func makeSealed(dir string, recipients []string, before func(op, name string, n int) error) (err error) {
	w, err := create(dir, testID, before)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, w.Abort())
		}
	}()
	if err := w.Encrypt(recipients); err != nil {
		return err
	}
	w.Authenticate(ours.Secret)
	if err := fill(w); err != nil {
		return err
	}
	if err := w.Snapshot(func(out Sink) (Snapshot, error) {
		db := snapshot()
		if _, err := out.Write(db); err != nil {
			return Snapshot{}, err
		}
		back := make([]byte, len(db))
		if _, err := out.ReadAt(back, 0); err != nil && !errors.Is(err, io.EOF) {
			return Snapshot{}, err
		}
		if !bytes.Equal(back, db) {
			return Snapshot{}, errors.New("the snapshot is read back with other bytes")
		}
		return Snapshot{Revision: 7}, nil
	}); err != nil {
		return err
	}
	_, err = w.Commit(Manifest{Cluster: Cluster{Name: "demo", UID: "one", Server: "v1.35.4"}})
	return err
}

// contentOf returns all objects with their owners.
func contentOf(t *testing.T, b *Backup) (out []string) {
	t.Helper()
	for _, typ := range b.Manifest().Types {
		for o, err := range b.Objects(typ) {
			if err != nil {
				t.Fatal(err)
			}
			out = append(out, string(o.JSON)+string(o.Owners))
		}
		for o, err := range b.Owners(typ) {
			if err != nil {
				t.Fatal(err)
			}
			out = append(out, o.Namespace+o.Name+o.UID+string(o.References))
		}
	}
	return out
}

func TestEncryptedRoundTrip(t *testing.T) {
	alice, toAlice := somebody(t)
	bob, toBob := somebody(t)
	eve, _ := somebody(t)
	plain := filepath.Join(t.TempDir(), "runs")
	if err := makeBackup(plain, nil); err != nil {
		t.Fatal(err)
	}
	p, err := Open(plain, testID, Keys{})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	want := contentOf(t, p)

	dir := filepath.Join(t.TempDir(), "runs")
	if err := makeSealed(dir, []string{toAlice, toBob}, nil); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name           string
		keys           Keys
		open           bool
		authentication string
	}{
		{name: "the first recipient", keys: Keys{ours.Secret, []Identity{alice}}, open: true, authentication: Authenticated},
		{name: "the second recipient", keys: Keys{ours.Secret, []Identity{eve, bob}}, open: true, authentication: Authenticated},
		{name: "a recipient without the secret", keys: Keys{nil, []Identity{alice}}, open: true, authentication: Foreign},
		{name: "nobody", keys: ours, open: false, authentication: Authenticated},
		{name: "somebody else", keys: Keys{ours.Secret, []Identity{eve}}, open: false, authentication: Authenticated},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b, err := Open(dir, testID, tt.keys)
			if err != nil {
				t.Fatal(err)
			}
			defer b.Close()
			var read, total int64
			if err := b.Verify(t.Context(), func(done, all int64) { read, total = max(read, done), all }); err != nil || read != total {
				t.Errorf("verify: %v, %d of %d bytes", err, read, total)
			}
			m := b.Manifest()
			if b.Authentication() != tt.authentication || m.Encrypted == nil || strings.Join(m.Encrypted.Recipients, " ") != toAlice+" "+toBob {
				t.Errorf("%s, %+v", b.Authentication(), m.Encrypted)
			}
			if tt.open {
				if got := contentOf(t, b); strings.Join(got, "\n") != strings.Join(want, "\n") || m.Etcd.Revision != 7 || m.Cluster.Server != "v1.35.4" {
					t.Errorf("content %q, want %q; %+v", got, want, m)
				}
				return
			}
			if err := b.Locked(); !errors.Is(err, ErrLocked) {
				t.Errorf("locked: %v", err)
			}
			if len(m.Types) > 0 || m.Objects > 0 || m.Etcd != nil || m.Cluster.Server != "" || m.Cluster.Name != "demo" || m.Created.IsZero() || m.Bytes == 0 {
				t.Errorf("shown without an identity: %+v", m)
			}
		})
	}
}

// Nothing of the content, not even a name of a kind, is on disk.
func TestEncryptedBackupShowsNothing(t *testing.T) {
	_, to := somebody(t)
	dir := filepath.Join(t.TempDir(), "runs")
	var spooled []byte
	var w *Writer
	w, err := create(dir, testID, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := w.Encrypt([]string{to}); err != nil {
		t.Fatal(err)
	}
	if err := fill(w); err != nil {
		t.Fatal(err)
	}
	w.Hole(Hole{Group: "example.com", Resource: "gizmos", Reason: "secret reason"})
	spooled = make([]byte, w.spool.size)
	if _, err := w.spool.f.ReadAt(spooled, 0); err != nil {
		t.Fatal(err)
	}
	if _, err := w.Commit(Manifest{Cluster: Cluster{Name: "demo", UID: "one", Server: "v1.35.4"}}); err != nil {
		t.Fatal(err)
	}
	look := func(name string, b []byte) {
		for _, word := range []string{"widget", "Widget", "example.com", "owner-2", "shop", "v1.35.4", "AGE-SECRET-KEY", "gizmos", "secret reason"} {
			if bytes.Contains(b, []byte(word)) || strings.Contains(name, word) {
				t.Errorf("%s contains %q", name, word)
			}
		}
	}
	look("spool", spooled)
	n := 0
	err = filepath.WalkDir(w.Path(), func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		b, err := os.ReadFile(name)
		look(strings.TrimPrefix(name, dir), b)
		n++
		return err
	})
	if err != nil || n != 6 {
		t.Errorf("%d files, %v", n, err)
	}
	all, err := List(dir, Keys{})
	if err != nil || len(all) != 1 || all[0].Complete || !all[0].Encrypted || !strings.Contains(all[0].Why, "1 types could not be read") {
		t.Errorf("listed as %+v, %v", all, err)
	}
}

// A page that is requested again leaves its first bytes in the encrypted file, and not in the content.
func TestEncryptedRollback(t *testing.T) {
	me, to := somebody(t)
	dir := filepath.Join(t.TempDir(), "runs")
	w, err := Create(dir, testID)
	if err != nil {
		t.Fatal(err)
	}
	if err := w.Encrypt([]string{to}); err != nil {
		t.Fatal(err)
	}
	tw, err := w.Type(Type{Group: "example.com", Version: "v1", Resource: "widgets", Kind: "Widget"}, "")
	if err != nil {
		t.Fatal(err)
	}
	step := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	add := func(names ...string) {
		t.Helper()
		for _, n := range names {
			s := NewScanner(strings.NewReader(fmt.Sprintf(`{"metadata":{},"items":[{"metadata":{"name":%q,"uid":%q},"spec":%q}]}`, n, n, strings.Repeat(n, 50_000))))
			for s.Next() {
				step(tw.Add(s.Item()))
			}
			step(s.Err())
		}
	}
	add("discarded")
	step(tw.Reset())
	step(tw.Mark())
	add("a", "b")
	step(tw.Mark())
	add("x", "y", "z")
	step(tw.Rollback())
	add("x")
	step(tw.Rollback())
	add("c")
	step(tw.Mark())
	add("y")
	step(tw.Rollback())
	step(tw.Close("7"))
	if _, err := w.Commit(Manifest{}); err != nil {
		t.Fatal(err)
	}
	b, err := Open(dir, testID, Keys{Identities: []Identity{me}})
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	if err := b.Verify(t.Context(), nil); err != nil {
		t.Error(err)
	}
	var got []string
	for _, line := range contentOf(t, b) {
		_, rest, _ := strings.Cut(line, `"name":"`)
		got = append(got, rest[:1])
	}
	if strings.Join(got, " ") != "a b c" {
		t.Errorf("objects %q", got)
	}
	if skip := b.Manifest().Files[0].Skip; len(skip) == 0 {
		t.Error("nothing was rolled back on disk: the test covers nothing")
	}
}

func TestDecrypt(t *testing.T) {
	me, to := somebody(t)
	dir := filepath.Join(t.TempDir(), "runs")
	if err := makeSealed(dir, []string{to}, nil); err != nil {
		t.Fatal(err)
	}
	b, err := Open(dir, testID, Keys{ours.Secret, []Identity{me}})
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	out := filepath.Join(t.TempDir(), "plain")
	path, err := b.Decrypt(t.Context(), out, nil)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := judge(t, out, testID, ours); got != Authenticated || err != nil {
		t.Errorf("%s, %v", got, err)
	}
	p, err := Open(out, testID, ours)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	if got, want := contentOf(t, p), contentOf(t, b); strings.Join(got, "\n") != strings.Join(want, "\n") || p.Manifest().Encrypted != nil {
		t.Errorf("content %q, want %q", got, want)
	}
	if db, err := os.ReadFile(filepath.Join(path, SnapshotFile)); err != nil || !bytes.Equal(db, snapshot()) {
		t.Errorf("etcd has %d bytes, %v", len(db), err)
	}
	if _, err := b.Decrypt(t.Context(), out, nil); !errors.Is(err, fs.ErrExist) {
		t.Errorf("over an existing one: %v", err)
	}
	locked, err := Open(dir, testID, ours)
	if err != nil {
		t.Fatal(err)
	}
	defer locked.Close()
	if _, err := locked.Decrypt(t.Context(), t.TempDir(), nil); !errors.Is(err, ErrLocked) {
		t.Errorf("without an identity: %v", err)
	}
}

func TestRecipients(t *testing.T) {
	i, to := somebody(t)
	secret := i.(*age.X25519Identity).String()
	pq, err := age.GenerateHybridIdentity()
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name string
		bad  bool
		text []string
	}{
		{name: "X25519", bad: false, text: []string{to}},
		{name: "post-quantum", bad: false, text: []string{pq.Recipient().String()}},
		{name: "mixed", bad: true, text: []string{to, pq.Recipient().String()}},
		{name: "a secret key", bad: true, text: []string{secret}},
		{name: "a secret key in lower case", bad: true, text: []string{strings.ToLower(secret)}},
		{name: "two in one", bad: true, text: []string{to + "\n" + to}},
		{name: "a comment", bad: true, text: []string{"# " + to}},
		{name: "empty", bad: true, text: []string{""}},
		{name: "none", bad: true, text: nil},
		{name: "ssh", bad: true, text: []string{"ssh-ed25519 AAAA"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w, err := Create(filepath.Join(t.TempDir(), "runs"), testID)
			if err != nil {
				t.Fatal(err)
			}
			defer w.Abort()
			err = w.Encrypt(tt.text)
			if (err != nil) != tt.bad {
				t.Errorf("%v", err)
			}
			if err != nil && strings.Contains(tt.name, "secret") && !strings.Contains(err.Error(), "secret key") {
				t.Errorf("%v", err)
			}
		})
	}
	for _, text := range []string{"", "AGE-SECRET-KEY-1XXX", "x" + secret, to} {
		if _, err := ParseIdentities([]byte(text)); err == nil || strings.Contains(err.Error(), "XXX") {
			t.Errorf("%q is read: %v", text, err)
		}
	}
	if list, err := ParseIdentities([]byte("# created\n" + secret + "\n")); err != nil || len(list) != 1 {
		t.Errorf("%d identities, %v", len(list), err)
	}
}

// A crash before any effect, and a failure of any, leaves no encrypted backup that verifies.
func TestFaultsOfEncryptedBackup(t *testing.T) {
	me, to := somebody(t)
	keys := Keys{ours.Secret, []Identity{me}}
	var ops []string
	if err := makeSealed(filepath.Join(t.TempDir(), "runs"), []string{to}, func(op, name string, _ int) error { ops = append(ops, op+" "+name); return nil }); err != nil {
		t.Fatal(err)
	}
	renamed := false
	for i := range ops {
		killed := errors.New("killed")
		for _, once := range []bool{false, true} {
			dir := filepath.Join(t.TempDir(), "runs")
			n := 0
			fault := killed
			if once {
				fault = syscall.ENOSPC
			}
			err := makeSealed(dir, []string{to}, func(string, string, int) error {
				if n++; n > i && (!once || n == i+1) {
					return fault
				}
				return nil
			})
			if !errors.Is(err, fault) {
				t.Fatalf("%v at %q: %v", fault, ops[i], err)
			}
			all, err := ListVerified(t.Context(), dir, keys, nil)
			if err != nil {
				t.Fatal(err)
			}
			if once && len(all) > 0 {
				t.Errorf("%v at %q leaves %+v", fault, ops[i], all)
			}
			if !once && (len(all) > 0 && all[0].Complete) != renamed {
				t.Errorf("killed before %q: %+v", ops[i], all)
			}
		}
		renamed = renamed || ops[i] == opRename+" "+ManifestFile
	}
}

// No mutation of an encrypted backup is accepted, with an identity or without.
func TestMutatedEncryptedBackupIsNotAccepted(t *testing.T) {
	me, to := somebody(t)
	n := mutations(t)
	if os.Getenv("CONSTELLATION_BACKUP_MUTATIONS") == "" {
		n /= 6 // decrypting takes longer
	}
	for name, keys := range map[string]Keys{"with an identity": {ours.Secret, []Identity{me}}, "without one": ours} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "runs")
			if err := makeSealed(dir, []string{to}, nil); err != nil {
				t.Fatal(err)
			}
			testMutations(t, dir, filepath.Join(dir, testID, Dir), keys, n)
		})
	}
}

// Variants of a backup, for benchmarks.
var variants = []string{"plain", "authenticated", "encrypted"}

// BenchmarkBackup writes, completes and verifies a backup of 64 MiB of objects.
func BenchmarkBackup(b *testing.B) {
	_, to := somebody(b)
	const objects = 4096
	item := fmt.Sprintf(`{"metadata":{"name":"w","namespace":"shop","uid":"u"},"spec":%q}`, strings.Repeat("some configuration of a workload; ", 480))
	list := `{"metadata":{},"items":[` + item + `]}`
	s := NewScanner(strings.NewReader(list))
	if !s.Next() {
		b.Fatal(s.Err())
	}
	one := *s.Item()
	for _, v := range variants {
		b.Run(v, func(b *testing.B) {
			b.SetBytes(int64(objects * len(item)))
			for range b.N {
				dir := filepath.Join(b.TempDir(), "runs")
				w, err := Create(dir, testID)
				if err != nil {
					b.Fatal(err)
				}
				keys := Keys{}
				if v != "plain" {
					keys = ours
					w.Authenticate(ours.Secret)
				}
				if v == "encrypted" {
					if err := w.Encrypt([]string{to}); err != nil {
						b.Fatal(err)
					}
				}
				t, err := w.Type(Type{Group: "example.com", Version: "v1", Resource: "widgets", Kind: "Widget", Namespaced: true}, "")
				if err != nil {
					b.Fatal(err)
				}
				for i := range objects {
					if i%500 == 0 {
						err = t.Mark()
					}
					if err == nil {
						err = t.Add(&one)
					}
					if err != nil {
						b.Fatal(err)
					}
				}
				if err := t.Close("7"); err != nil {
					b.Fatal(err)
				}
				if _, err := w.Commit(Manifest{}); err != nil {
					b.Fatal(err)
				}
				back, err := Open(dir, testID, keys)
				if err != nil {
					b.Fatal(err)
				}
				if err := back.Verify(b.Context(), nil); err != nil {
					b.Fatal(err)
				}
				back.Close()
				b.StopTimer()
				if err := os.RemoveAll(dir); err != nil {
					b.Fatal(err)
				}
				b.StartTimer()
			}
		})
	}
}
