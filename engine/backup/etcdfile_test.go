package backup

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"strings"
	"testing"

	"google.golang.org/protobuf/encoding/protowire"
)

// boltFile is a database of pages of 512 bytes: two metas, and trees of the buckets meta,
// members and key, the last with a branch above its leaves.
func boltFile(entries int) []byte {
	const size = 512
	var pages [][]byte
	add := func(flags uint16, elements [][2][]byte, leafFlags uint32, children []uint64) uint64 {
		id := uint64(len(pages))
		b := make([]byte, boltHeader+len(elements)*boltElement)
		binary.LittleEndian.PutUint64(b, id)
		binary.LittleEndian.PutUint16(b[8:], flags)
		binary.LittleEndian.PutUint16(b[10:], uint16(len(elements)))
		for i, e := range elements {
			at := b[boltHeader+i*boltElement:]
			pos := uint32(len(b) - boltHeader - i*boltElement)
			if flags == boltBranch {
				binary.LittleEndian.PutUint32(at, pos)
				binary.LittleEndian.PutUint32(at[4:], uint32(len(e[0])))
				binary.LittleEndian.PutUint64(at[8:], children[i])
			} else {
				binary.LittleEndian.PutUint32(at, leafFlags)
				binary.LittleEndian.PutUint32(at[4:], pos)
				binary.LittleEndian.PutUint32(at[8:], uint32(len(e[0])))
				binary.LittleEndian.PutUint32(at[12:], uint32(len(e[1])))
			}
			b = append(append(b, e[0]...), e[1]...)
		}
		n := (len(b) + size - 1) / size
		binary.LittleEndian.PutUint32(b[12:], uint32(n-1))
		b = append(b, make([]byte, n*size-len(b))...)
		for ; len(b) > 0; b = b[size:] {
			pages = append(pages, b[:size])
		}
		return id
	}
	add(boltIsMeta, nil, 0, nil)
	add(boltIsMeta, nil, 0, nil)
	var children []uint64
	var firsts, leaf [][2][]byte
	flush := func() {
		if len(leaf) > 0 {
			firsts = append(firsts, [2][]byte{leaf[0][0], nil})
			children = append(children, add(boltLeaf, leaf, 0, nil))
			leaf = nil
		}
	}
	for i := 1; i <= entries; i++ {
		k := fmt.Appendf(binary.BigEndian.AppendUint64(nil, uint64(i)), "_%08d", 0)
		var v []byte
		v = protowire.AppendBytes(protowire.AppendTag(v, 1, protowire.BytesType), fmt.Appendf(nil, "/registry/x/%d", i))
		v = protowire.AppendVarint(protowire.AppendTag(v, 3, protowire.VarintType), uint64(i))
		if i%5 == 0 {
			k = append(k, 't')
		} else {
			v = protowire.AppendBytes(protowire.AppendTag(v, 5, protowire.BytesType), bytes.Repeat([]byte{'v'}, i*7%900))
		}
		if leaf = append(leaf, [2][]byte{k, v}); len(leaf) == 4 {
			flush()
		}
	}
	flush()
	keys := add(boltBranch, firsts, 0, children)
	members := add(boltLeaf, [][2][]byte{{[]byte("8e9e05c52164694d"), []byte(`{"id":10276657743932975437,"peerURLs":["https://10.42.0.2:2380"],"name":"control-plane-0"}`)}}, 0, nil)
	meta := add(boltLeaf, [][2][]byte{{[]byte("finishedCompactRev"), append(binary.BigEndian.AppendUint64(nil, 3), "_\x00\x00\x00\x00\x00\x00\x00\x00"...)}}, 0, nil)
	bucket := func(root uint64) []byte {
		return append(binary.LittleEndian.AppendUint64(nil, root), make([]byte, 8)...)
	}
	root := add(boltLeaf, [][2][]byte{{[]byte("key"), bucket(keys)}, {[]byte("members"), bucket(members)}, {[]byte("meta"), bucket(meta)}}, boltBucket, nil)
	for i := range 2 {
		m := pages[i][boltHeader:]
		binary.LittleEndian.PutUint32(m, boltMagic)
		binary.LittleEndian.PutUint32(m[4:], boltVersion)
		binary.LittleEndian.PutUint32(m[8:], size)
		binary.LittleEndian.PutUint64(m[16:], root)
		binary.LittleEndian.PutUint64(m[40:], uint64(len(pages)))
		binary.LittleEndian.PutUint64(m[48:], uint64(i+7))
		seal(m)
	}
	return bytes.Join(pages, nil)
}

func seal(meta []byte) {
	h := fnv.New64a()
	h.Write(meta[:boltMeta-8])
	binary.LittleEndian.PutUint64(meta[boltMeta-8:], h.Sum64())
}

// readAll reads a whole database.
func readAll(b []byte) (members []EtcdMember, entries int, revision int64, err error) {
	f, err := OpenEtcd(bytes.NewReader(b), int64(len(b)))
	if err != nil {
		return nil, 0, 0, err
	}
	if members, err = f.Members(); err != nil {
		return nil, 0, 0, err
	}
	revision, err = f.Read(context.Background(), func(e EtcdEntry) error { entries++; return nil })
	return members, entries, revision, err
}

func TestEtcdFile(t *testing.T) {
	b := boltFile(60)
	members, entries, revision, err := readAll(b)
	if err != nil || entries != 60 || revision != 60 || len(members) != 1 || members[0] != (EtcdMember{ID: 10276657743932975437, Name: "control-plane-0"}) {
		t.Errorf("got %v, %d entries, revision %d, %v", members, entries, revision, err)
	}
	// etcd's history may end with a compaction that left fewer entries.
	if _, entries, revision, err := readAll(boltFile(2)); err != nil || entries != 2 || revision != 3 {
		t.Errorf("got %d entries, revision %d, %v", entries, revision, err)
	}
	f, err := OpenEtcd(bytes.NewReader(b), int64(len(b)))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.Read(t.Context(), func(e EtcdEntry) error {
		if want := fmt.Sprintf("/registry/x/%d", e.Revision); string(e.Key) != want || e.Deleted != (e.Revision%5 == 0) || !e.Deleted && len(e.Value) != int(e.Revision*7%900) {
			t.Errorf("revision %d is %s, %d bytes, deleted %t", e.Revision, e.Key, len(e.Value), e.Deleted)
		}
		return nil
	}); err != nil {
		t.Error(err)
	}

	// The last page is the root with the three buckets.
	root := len(b) - 512
	at := func(b []byte, name string) []byte { return b[root:][bytes.Index(b[root:], []byte(name))+len(name):] }
	for name, tt := range map[string]struct {
		change func([]byte)
		words  string
	}{
		"no meta":                     {func(b []byte) { clear(b[:1024]) }, "meta page"},
		"a page beyond the end":       {func(b []byte) { binary.LittleEndian.PutUint64(at(b, "key"), 1<<40) }, "is missing"},
		"a bucket that is the root":   {func(b []byte) { binary.LittleEndian.PutUint64(at(b, "key"), uint64(root/512)) }, ""},
		"an element beyond its page":  {func(b []byte) { binary.LittleEndian.PutUint32(b[root+boltHeader+4:], 1<<30) }, "not readable"},
		"an overflow beyond the file": {func(b []byte) { binary.LittleEndian.PutUint32(b[root+12:], 1<<31) }, "bytes"},
		"a page of another kind":      {func(b []byte) { binary.LittleEndian.PutUint16(b[root+8:], 0x10) }, "not readable"},
		"more elements than page":     {func(b []byte) { binary.LittleEndian.PutUint16(b[root+10:], 0xffff) }, "not readable"},
		"keys that are not in order":  {func(b []byte) { copy(b[bytes.Index(b, []byte("\x00\x00\x00\x02_")):], "\x00\x00\x00\x01_") }, "order"},
		"a member that is not JSON":   {func(b []byte) { copy(b[bytes.Index(b, []byte(`{"id"`)):], "?????") }, "not readable"},
		"a database without members":  {func(b []byte) { copy(b[root+bytes.Index(b[root:], []byte("members")):], "mem6ers") }, "bucket members is missing"},
		"a malformed revision":        {func(b []byte) { copy(b[bytes.Index(b, []byte("\x00\x07_")):], "\x00\x07-") }, "invalid revision"},
		"a value of another revision": {func(b []byte) { copy(b[bytes.Index(b, []byte("/registry/x/7\x18\x07")):], "/registry/x/7\x18\x06") }, "revision 7 says to be revision 6"},
	} {
		t.Run(name, func(t *testing.T) {
			b := bytes.Clone(b)
			tt.change(b)
			if _, _, _, err := readAll(b); err == nil || !strings.Contains(err.Error(), tt.words) {
				t.Errorf("got %v", err)
			}
		})
	}
	t.Run("a cyclic tree", func(t *testing.T) {
		b := bytes.Clone(b)
		for at := 1024; at < len(b); at += 512 { // every branch points to itself
			if binary.LittleEndian.Uint16(b[at+8:]) == boltBranch && binary.LittleEndian.Uint64(b[at:]) == uint64(at/512) {
				binary.LittleEndian.PutUint64(b[at+boltHeader+8:], uint64(at/512))
			}
		}
		if _, _, _, err := readAll(b); err == nil || !strings.Contains(err.Error(), "cycle in its tree") {
			t.Errorf("got %v", err)
		}
	})
}

// FuzzEtcdFile reads data of a hostile machine: it terminates and does not panic.
func FuzzEtcdFile(f *testing.F) {
	f.Add([]byte{}, uint32(0), uint64(0))
	f.Add([]byte("key"), uint32(1024), uint64(1<<40))
	f.Fuzz(func(t *testing.T, patch []byte, at uint32, word uint64) {
		b := boltFile(20)
		at %= uint32(len(b) - 8)
		copy(b[at:], patch)
		binary.LittleEndian.PutUint64(b[(at*7)%uint32(len(b)-8):], word)
		for i := range 2 {
			seal(b[512*i+boltHeader:])
		}
		_, _, _, _ = readAll(b)
	})
}
