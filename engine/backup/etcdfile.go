package backup

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"slices"

	"google.golang.org/protobuf/encoding/protowire"
)

// The format of etcd's database, which is that of bbolt. The file comes from a machine that
// may be hostile, so every offset is checked before use; bbolt itself maps the file and trusts
// it.
const (
	boltMagic   = 0xED0CDAED
	boltVersion = 2

	boltHeader  = 16 // bytes before the elements of a page: id, flags, count, overflow
	boltElement = 16 // bytes of an element, of a branch or of a leaf
	boltMeta    = 64 // bytes of a meta, its checksum last

	boltBranch = 0x01
	boltLeaf   = 0x02
	boltIsMeta = 0x04

	boltBucket = 0x01 // flag of a leaf's element whose value is a bucket

	// maxBoltPage bounds one page with its overflow, in bytes. etcd's largest request has a few
	// megabytes.
	maxBoltPage = 64 << 20
	// maxBoltDepth bounds the depth of a tree; one of this depth exceeds any disk.
	maxBoltDepth = 32
)

// errEtcdFile means that a file is not a database of etcd.
var errEtcdFile = errors.New("not a database of etcd")

// EtcdFile is an untrusted snapshot of etcd. It is safe for concurrent use if its reader is.
type EtcdFile struct {
	r     io.ReaderAt
	page  int64 // size of a page, in bytes
	pages int64 // of the database
	root  uint64
}

// EtcdMember is a member of etcd in a snapshot.
type EtcdMember struct {
	ID   uint64
	Name string // empty before its first start
}

// EtcdEntry is one revision of one key. Its slices are valid until the callback returns.
type EtcdEntry struct {
	Key, Value []byte
	// Revision is that of the change, like the API server's resourceVersion.
	Revision int64
	Deleted  bool // by this revision; Value is empty then
	// Created, Modified, Version and Lease are what the value says of itself.
	Created, Modified, Version, Lease int64
}

// OpenEtcd opens the snapshot of size bytes in r. It ignores the digest that etcd may append.
func OpenEtcd(r io.ReaderAt, size int64) (*EtcdFile, error) {
	f := &EtcdFile{r: r}
	var best uint64
	// The second meta page is at an offset of one page, and only a meta page has the page size:
	// try all possible ones.
	for at := int64(0); at == 0 || at <= 64<<10; at = max(4096, 2*at) {
		var b [boltHeader + boltMeta]byte
		if at > 0 && f.page != 0 && at != f.page {
			continue
		}
		if _, err := r.ReadAt(b[:], at); err != nil {
			break
		}
		m := b[boltHeader:]
		h := fnv.New64a()
		h.Write(m[:boltMeta-8])
		if binary.LittleEndian.Uint16(b[8:])&boltIsMeta == 0 || binary.LittleEndian.Uint32(m) != boltMagic || binary.LittleEndian.Uint32(m[4:]) != boltVersion ||
			binary.LittleEndian.Uint64(m[boltMeta-8:]) != h.Sum64() {
			continue
		}
		page, tx := int64(binary.LittleEndian.Uint32(m[8:])), binary.LittleEndian.Uint64(m[48:])
		if page < 512 || page > 64<<10 || page&(page-1) != 0 || f.page != 0 && tx < best {
			continue
		}
		f.page, f.root, best = page, binary.LittleEndian.Uint64(m[16:]), tx
	}
	if f.page == 0 {
		return nil, fmt.Errorf("%w: it has no valid meta page", errEtcdFile)
	}
	f.pages = size / f.page
	return f, nil
}

// Members returns the members in the order of their IDs.
func (f *EtcdFile) Members() ([]EtcdMember, error) {
	root, inline, err := f.bucket("members")
	if err != nil {
		return nil, err
	}
	var out []EtcdMember
	w := f.walk(func(_ uint32, key, value []byte) error {
		var m struct {
			ID   uint64 `json:"id"`
			Name string `json:"name"`
		}
		if err := json.Unmarshal(value, &m); err != nil {
			return fmt.Errorf("%w: member %q is not readable", errEtcdFile, clipped(key))
		}
		if len(out) >= 1000 {
			return fmt.Errorf("%w: more than 1000 members", errEtcdFile)
		}
		out = append(out, EtcdMember{ID: m.ID, Name: m.Name})
		return nil
	})
	if err := w.tree(root, inline); err != nil {
		return nil, err
	}
	slices.SortFunc(out, func(a, b EtcdMember) int { return cmp.Compare(a.ID, b.ID) })
	return out, nil
}

// Compacted returns the revision before which the database has no history.
func (f *EtcdFile) Compacted() (revision int64, err error) {
	root, inline, err := f.bucket("meta")
	if err != nil {
		return 0, err
	}
	w := f.walk(func(_ uint32, key, value []byte) error {
		if k := string(key); (k == "finishedCompactRev" || k == "scheduledCompactRev") && len(value) >= 8 {
			revision = max(revision, int64(binary.BigEndian.Uint64(value)))
		}
		return nil
	})
	return revision, w.tree(root, inline)
}

// Read calls do with every entry, older revisions first, and returns the revision of the
// database: that of its last entry, or of its compaction if that is later.
func (f *EtcdFile) Read(ctx context.Context, do func(EtcdEntry) error) (revision int64, err error) {
	if revision, err = f.Compacted(); err != nil {
		return 0, err
	}
	root, inline, err := f.bucket("key")
	if err != nil {
		return 0, err
	}
	n := 0
	w := f.walk(func(_ uint32, key, value []byte) error {
		if n++; n%1024 == 0 && ctx.Err() != nil {
			return ctx.Err()
		}
		e, err := entryOf(key, value)
		if err != nil {
			return err
		}
		// etcd finds a key by the revision that it is stored under, and returns the one in the
		// value. Restoring with a higher revision writes an entry that has no key.
		if !e.Deleted && len(e.Key) > 0 && e.Modified != e.Revision {
			return fmt.Errorf("%w: revision %d says to be revision %d", errEtcdFile, e.Revision, e.Modified)
		}
		revision = max(revision, e.Revision)
		return do(e)
	})
	if err := w.tree(root, inline); err != nil {
		return 0, err
	}
	return revision, nil
}

// entryOf decodes an entry: its key is the revision (8 bytes, '_', 8 bytes, and 't' for a
// deletion), its value the protocol buffer mvccpb.KeyValue.
func entryOf(key, value []byte) (EtcdEntry, error) {
	e := EtcdEntry{Deleted: len(key) == 18 && key[17] == 't'}
	if len(key) < 17 || key[8] != '_' || len(key) > 17 && !e.Deleted {
		return e, fmt.Errorf("%w: invalid revision %q", errEtcdFile, clipped(key))
	}
	e.Revision = int64(binary.BigEndian.Uint64(key))
	if e.Revision < 0 {
		return e, fmt.Errorf("%w: invalid revision %q", errEtcdFile, clipped(key))
	}
	for len(value) > 0 {
		num, typ, n := protowire.ConsumeTag(value)
		if n < 0 {
			return e, fmt.Errorf("%w: revision %d is not readable", errEtcdFile, e.Revision)
		}
		value = value[n:]
		if typ == protowire.BytesType && (num == 1 || num == 5) {
			b, n := protowire.ConsumeBytes(value)
			if n < 0 {
				return e, fmt.Errorf("%w: revision %d is not readable", errEtcdFile, e.Revision)
			}
			if value = value[n:]; num == 1 {
				e.Key = b
			} else {
				e.Value = b
			}
			continue
		}
		if typ == protowire.VarintType {
			v, _ := protowire.ConsumeVarint(value) // whether there is one is seen below
			switch num {
			case 2:
				e.Created = int64(v)
			case 3:
				e.Modified = int64(v)
			case 4:
				e.Version = int64(v)
			case 6:
				e.Lease = int64(v)
			}
		}
		if n = protowire.ConsumeFieldValue(num, typ, value); n < 0 {
			return e, fmt.Errorf("%w: revision %d is not readable", errEtcdFile, e.Revision)
		}
		value = value[n:]
	}
	return e, nil
}

// bucket returns the root page of a bucket at the top, or its only page if that is inline.
func (f *EtcdFile) bucket(name string) (root uint64, inline []byte, err error) {
	found := false
	w := f.walk(func(flags uint32, key, value []byte) error {
		if string(key) != name || flags&boltBucket == 0 {
			return nil
		}
		if len(value) < 16 {
			return fmt.Errorf("%w: bucket %s is not readable", errEtcdFile, name)
		}
		found, root = true, binary.LittleEndian.Uint64(value)
		if root == 0 {
			inline = slices.Clone(value[16:])
		}
		return nil
	})
	if err := w.tree(f.root, nil); err != nil {
		return 0, nil, err
	}
	if !found {
		return 0, nil, fmt.Errorf("%w: bucket %s is missing", errEtcdFile, name)
	}
	return root, inline, nil
}

// walk reads one tree in order.
func (f *EtcdFile) walk(do func(flags uint32, key, value []byte) error) *boltWalk {
	return &boltWalk{f: f, do: do}
}

type boltWalk struct {
	f    *EtcdFile
	do   func(flags uint32, key, value []byte) error
	seen int64  // pages
	last []byte // the previous key; nil at the start
	bufs [maxBoltDepth][]byte
}

// tree reads the tree at root, or the page inline.
func (w *boltWalk) tree(root uint64, inline []byte) error {
	if inline != nil {
		return w.elements(inline, nil, nil, maxBoltDepth-1)
	}
	return w.node(root, nil, nil, 0)
}

// node reads a page and all below it. Keys must be at least from and, unless to is nil, less
// than to: etcd searches by these bounds.
func (w *boltWalk) node(id uint64, from, to []byte, depth int) error {
	f := w.f
	if depth >= maxBoltDepth || w.seen >= f.pages { // a loop
		return fmt.Errorf("%w: cycle in its tree", errEtcdFile)
	}
	if id >= uint64(f.pages) {
		return fmt.Errorf("%w: page %d is missing", errEtcdFile, id)
	}
	var h [boltHeader]byte
	if _, err := f.r.ReadAt(h[:], int64(id)*f.page); err != nil {
		return fmt.Errorf("read page %d: %w", id, err)
	}
	n := (1 + int64(binary.LittleEndian.Uint32(h[12:]))) * f.page
	if n > maxBoltPage || int64(id)*f.page+n > f.pages*f.page {
		return fmt.Errorf("%w: page %d has %d bytes", errEtcdFile, id, n)
	}
	// A page with overflow counts fully, or a few elements could make the read endless.
	if w.seen += n / f.page; w.seen > f.pages {
		return fmt.Errorf("%w: cycle in its tree", errEtcdFile)
	}
	if int64(cap(w.bufs[depth])) < n {
		w.bufs[depth] = make([]byte, n)
	}
	b := w.bufs[depth][:n]
	if _, err := f.r.ReadAt(b, int64(id)*f.page); err != nil {
		return fmt.Errorf("read page %d: %w", id, err)
	}
	return w.elements(b, from, to, depth)
}

func (w *boltWalk) elements(b, from, to []byte, depth int) error {
	if len(b) < boltHeader {
		return errBoltPage
	}
	flags, p := binary.LittleEndian.Uint16(b[8:]), boltPage{b: b, count: int(binary.LittleEndian.Uint16(b[10:]))}
	if boltHeader+p.count*boltElement > len(b) {
		return errBoltPage
	}
	switch flags {
	case boltBranch:
		return w.branch(p, from, to, depth)
	case boltLeaf:
		return w.leaf(p, from, to)
	}
	return errBoltPage
}

var errBoltPage = fmt.Errorf("%w: a page is not readable", errEtcdFile)

// boltPage is a page with its elements.
type boltPage struct {
	b     []byte
	count int // of its elements
}

// element returns the description of element i.
func (p boltPage) element(i int) []byte { return p.b[boltHeader+i*boltElement:] }

// part returns n bytes at pos after the start of element i.
func (p boltPage) part(i int, pos, n uint64) ([]byte, bool) {
	at := uint64(boltHeader+i*boltElement) + pos
	if at > uint64(len(p.b)) || n > uint64(len(p.b))-at {
		return nil, false
	}
	return p.b[at : at+n : at+n], true
}

// branchKey returns the key of element i of a branch.
func (p boltPage) branchKey(i int) ([]byte, bool) {
	e := p.element(i)
	return p.part(i, uint64(binary.LittleEndian.Uint32(e)), uint64(binary.LittleEndian.Uint32(e[4:])))
}

// branch reads the pages below a branch.
func (w *boltWalk) branch(p boltPage, from, to []byte, depth int) error {
	for i := range p.count {
		key, ok := p.branchKey(i)
		next := to
		if ok && i+1 < p.count {
			next, ok = p.branchKey(i + 1)
		}
		// The first bound of a page may be lower than that of its parent, if its first keys were
		// deleted.
		if !ok || i > 0 && from != nil && bytes.Compare(key, from) < 0 || next != nil && bytes.Compare(key, next) >= 0 {
			return errBoltPage
		}
		if err := w.node(binary.LittleEndian.Uint64(p.element(i)[8:]), key, next, depth+1); err != nil {
			return err
		}
	}
	return nil
}

// leaf passes on the keys and values of a leaf.
func (w *boltWalk) leaf(p boltPage, from, to []byte) error {
	var used uint64 // elements that overlap would make more of a file than it has
	for i := range p.count {
		e := p.element(i)
		pos, ksize, vsize := uint64(binary.LittleEndian.Uint32(e[4:])), uint64(binary.LittleEndian.Uint32(e[8:])), uint64(binary.LittleEndian.Uint32(e[12:]))
		kv, ok := p.part(i, pos, ksize+vsize)
		if used += ksize + vsize; !ok || used > uint64(len(p.b)) {
			return errBoltPage
		}
		key := kv[:ksize:ksize]
		if from != nil && bytes.Compare(key, from) < 0 || to != nil && bytes.Compare(key, to) >= 0 || w.last != nil && bytes.Compare(key, w.last) <= 0 {
			return fmt.Errorf("%w: its keys are not in order", errEtcdFile)
		}
		if w.last = append(w.last[:0], key...); w.last == nil {
			w.last = []byte{}
		}
		if err := w.do(binary.LittleEndian.Uint32(e), key, kv[ksize:]); err != nil {
			return err
		}
	}
	return nil
}

// clipped shortens untrusted text for an error.
func clipped(b []byte) []byte { return b[:min(len(b), 32)] }
