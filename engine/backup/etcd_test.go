package backup

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"strings"
	"testing"
)

// etcdSnapshot is a database of n pages in etcd's snapshot format.
func etcdSnapshot(n int) []byte {
	b := bytes.Repeat([]byte("0123456789abcdef"), n*page/16)
	sum := sha256.Sum256(b)
	return append(b, sum[:]...)
}

func TestVerifyEtcdSnapshot(t *testing.T) {
	flipped := etcdSnapshot(2000)
	flipped[4711]++
	for _, tt := range []struct {
		name  string
		data  []byte
		wrong string // empty if it is whole
	}{
		{name: "one of a page", data: etcdSnapshot(1), wrong: ""},
		{name: "a long one", data: etcdSnapshot(2000), wrong: ""},
		{name: "a flipped byte", data: flipped, wrong: "etcd's hash"},
		{name: "a hash and nothing else", data: etcdSnapshot(0), wrong: "not a snapshot of etcd"},
		{name: "half a page", data: etcdSnapshot(3)[page/2:], wrong: "not a snapshot of etcd"},
		{name: "no hash", data: etcdSnapshot(3)[:3*page], wrong: "not a snapshot of etcd"},
		{name: "nothing", wrong: "not a snapshot of etcd"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			const id = "backup-20261121070501-1a2b3c4d"
			dir := t.TempDir()
			w, err := Create(dir, id)
			if err != nil {
				t.Fatal(err)
			}
			if err := w.Snapshot(func(out Sink) (Snapshot, error) {
				for b := tt.data; len(b) > 0; { // in pieces of all sizes
					n := min(len(b), 1+len(b)%100_000)
					if _, err := out.Write(b[:n]); err != nil {
						return Snapshot{}, err
					}
					b = b[n:]
				}
				return Snapshot{Revision: 7}, nil
			}); err != nil {
				t.Fatal(err)
			}
			if _, err := w.Commit(Manifest{}); err != nil {
				t.Fatal(err)
			}
			b, err := Open(dir, id, Keys{})
			if err != nil {
				t.Fatal(err)
			}
			defer b.Close()
			err = b.Verify(t.Context(), nil)
			var not *NotWhole
			if tt.wrong == "" && err != nil || tt.wrong != "" && (!errors.As(err, &not) || len(not.Damage) != 1 || !strings.Contains(not.Damage[0], tt.wrong)) {
				t.Errorf("got %v, want %q", err, tt.wrong)
			}
		})
	}
	t.Run("the check does not depend on the size of writes", func(t *testing.T) {
		data := etcdSnapshot(4)
		for n := 1; n < 200; n++ {
			e := newEtcdEnd()
			for b := data; len(b) > 0; b = b[min(n, len(b)):] {
				e.write(b[:min(n, len(b))])
			}
			if text := e.wrong(); text != "" {
				t.Fatalf("in pieces of %d bytes it %s", n, text)
			}
		}
	})
}
