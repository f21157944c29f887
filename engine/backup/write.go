package backup

import (
	"bufio"
	"bytes"
	"cmp"
	"crypto/cipher"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

const (
	listHead = `{"apiVersion":"v1","kind":"List","items":[` + "\n"
	listTail = "\n]}\n"

	// temporary is the name of the incomplete manifest.
	temporary = ".manifest.json.tmp"

	writeBuffer = 128 << 10
	// ownersBlock is the size of the in-memory part of a type's owners.
	ownersBlock = 64 << 10
)

// Writer makes one backup. Its methods may be called concurrently, except Commit and Abort,
// one of which must be called at the end.
type Writer struct {
	parent string
	id     string
	began  time.Time
	top    *disk // <parent>
	run    *disk // <parent>/<id>
	disk   *disk // <parent>/<id>/backups
	spool  *spool

	mu     sync.Mutex
	names  map[string]bool // names in use
	types  []Type
	files  []File
	owners map[string][]block // by file name
	holes  []Hole
	notes  []string
	etcd   *Snapshot
	from   Cluster
	open   map[*stream]bool
	secret []byte  // see Authenticate
	seal   *sealer // nil without encryption
	bytes  atomic.Int64
	made   bool // this backup created the directory of the run
	inside bool // this backup created its directory
}

// Create starts a backup in parent, which is created if missing, but not its parents. The
// error wraps [ErrRefused] if a directory is not safe to use.
func Create(parent, id string) (*Writer, error) { return create(parent, id, nil) }

func create(parent, id string, before func(op, name string, n int) error) (*Writer, error) {
	if !ValidID(id) {
		return nil, fmt.Errorf("create backup %q: invalid ID", id)
	}
	parent, err := filepath.Abs(parent)
	if err != nil {
		return nil, fmt.Errorf("create backup %s: %w", id, err)
	}
	if err := os.Mkdir(parent, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, fmt.Errorf("create %s: %w", parent, bare(err))
	}
	w := &Writer{parent: parent, id: id, began: time.Now().UTC(), names: map[string]bool{}, owners: map[string][]block{}, open: map[*stream]bool{}}
	if err := w.begin(before); err != nil {
		// A refused directory, or one of another user, was not created here, and stays.
		if w.disk != nil {
			_ = w.disk.remove(spoolFile)
		}
		if w.inside {
			_ = w.run.remove(Dir)
		}
		if w.made {
			_ = w.top.remove(id)
		}
		w.close()
		return nil, err
	}
	return w, nil
}

// begin creates the directories.
func (w *Writer) begin(before func(op, name string, n int) error) (err error) {
	if w.top, err = openDisk(w.parent); err != nil {
		return err
	}
	w.top.before = before
	switch err := w.top.mkdir(w.id); {
	case err == nil:
		w.made = true
	case !errors.Is(err, fs.ErrExist): // it exists if the run stores its events there
		return err
	}
	if w.run, err = w.top.sub(w.id); err != nil {
		return err
	}
	if err = w.run.mkdir(Dir); err != nil {
		return err
	}
	w.inside = true
	if w.disk, err = w.run.sub(Dir); err != nil {
		return err
	}
	w.spool, err = newSpool(w.disk)
	return err
}

// Path returns the directory of the backup.
func (w *Writer) Path() string { return filepath.Join(w.parent, w.id, Dir) }

// ID returns the ID of the backup.
func (w *Writer) ID() string { return w.id }

// Bytes returns the number of bytes of objects and snapshot written so far.
func (w *Writer) Bytes() int64 { return w.bytes.Load() }

// Hole records a gap.
func (w *Writer) Hole(h Hole) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.holes = append(w.holes, h)
}

// From records the origin of the objects.
func (w *Writer) From(c Cluster) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.from = c
}

// Authenticate has Commit add a tag to the manifest, with a key derived from secret.
func (w *Writer) Authenticate(secret []byte) { w.secret = secret }

// Holes returns the gaps recorded so far.
func (w *Writer) Holes() []Hole {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.holes)
}

// Note adds a sentence to the manifest.
func (w *Writer) Note(text string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.notes = append(w.notes, text)
}

// Type starts the objects of t; it ignores t.Objects and t.Files. name is the name of the file
// without ".json"; empty means <group>/<resource>.
func (w *Writer) Type(t Type, name string) (*TypeWriter, error) {
	if name == "" {
		name = t.name()
	}
	if err := checkName(name + ".json"); err != nil {
		return nil, err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.names[name] {
		return nil, fmt.Errorf("write %s.json: it exists already", name)
	}
	w.names[name] = true
	t.Objects, t.Files = 0, nil
	prefix, err := json.Marshal(struct {
		APIVersion string `json:"apiVersion"`
		Kind       string `json:"kind"`
	}{t.APIVersion(), t.Kind})
	if err != nil {
		return nil, fmt.Errorf("write %s.json: %w", name, err)
	}
	prefix[len(prefix)-1] = ','
	return &TypeWriter{w: w, t: t, prefix: prefix, plain: &stream{w: w, name: name + ".json"}, owned: &stream{w: w, name: name + ".owned.json"}}, nil
}

// TypeWriter writes the objects of one type. It is for one goroutine.
type TypeWriter struct {
	w            *Writer
	t            Type
	prefix       []byte // for objects without type
	plain, owned *stream
	refs         bytes.Buffer // owners that are not in the spool yet
	blocks       []block

	mark struct {
		plain, owned position
		refs         int
		blocks       int
	}
}

// Add writes an object.
func (t *TypeWriter) Add(i *Item) error {
	to := t.plain
	if i.Owners != nil {
		to = t.owned
		if err := t.addOwners(i); err != nil {
			return err
		}
	}
	if i.Typed {
		return to.add(nil, i.JSON)
	}
	return to.add(t.prefix, i.JSON[1:])
}

func (t *TypeWriter) addOwners(i *Item) error {
	null := func(b []byte) []byte {
		if b == nil {
			return []byte(`""`)
		}
		return b
	}
	b := &t.refs
	b.WriteByte('{')
	if i.Namespace != nil {
		b.WriteString(`"namespace":`)
		b.Write(i.Namespace)
		b.WriteByte(',')
	}
	b.WriteString(`"name":`)
	b.Write(null(i.Name))
	b.WriteString(`,"uid":`)
	b.Write(null(i.UID))
	b.WriteString(`,"references":`)
	if err := json.Compact(b, i.Owners); err != nil {
		return fmt.Errorf("%w: %w", ErrSyntax, err)
	}
	b.WriteString("},\n")
	if b.Len() < ownersBlock {
		return nil
	}
	// Owners after the mark may be rolled back; all are flushed at the next mark.
	return t.flushOwners()
}

func (t *TypeWriter) flushOwners() error {
	if t.refs.Len() == 0 {
		return nil
	}
	blk, err := t.w.spool.add(t.refs.Bytes())
	if err != nil {
		return err
	}
	t.blocks = append(t.blocks, blk)
	t.refs.Reset()
	return nil
}

// Mark sets the position to which Rollback returns: the start of a page that may have to be
// requested again.
func (t *TypeWriter) Mark() error {
	if err := t.flushOwners(); err != nil {
		return err
	}
	t.mark.blocks = len(t.blocks)
	var err error
	if t.mark.plain, err = t.plain.position(); err != nil {
		return err
	}
	t.mark.owned, err = t.owned.position()
	return err
}

// Rollback discards everything added since the last Mark.
func (t *TypeWriter) Rollback() error {
	t.refs.Reset()
	t.blocks = t.blocks[:t.mark.blocks]
	if err := t.plain.back(t.mark.plain); err != nil {
		return err
	}
	return t.owned.back(t.mark.owned)
}

// Reset discards everything: the type is read again from the start.
func (t *TypeWriter) Reset() error {
	t.refs.Reset()
	t.blocks, t.mark.blocks, t.mark.plain, t.mark.owned = nil, 0, position{}, position{}
	if err := t.plain.back(position{}); err != nil {
		return err
	}
	return t.owned.back(position{})
}

// Retype records that the objects are read again in another version.
func (t *TypeWriter) Retype(as Type) { t.t.Version, t.t.Status = as.Version, as.Status }

// Objects returns the number of objects.
func (t *TypeWriter) Objects() int64 { return t.plain.at.objects + t.owned.at.objects }

// Discard removes the files of the type.
func (t *TypeWriter) Discard() error {
	return errors.Join(t.plain.discard(), t.owned.discard())
}

// Close adds the type to the backup. Its files are on disk then.
func (t *TypeWriter) Close(resourceVersion string) error {
	if err := t.flushOwners(); err != nil {
		return err
	}
	t.t.ResourceVersion, t.t.Objects = resourceVersion, t.Objects()
	var files []File
	for _, s := range []*stream{t.plain, t.owned} {
		f, err := s.finish()
		if err != nil {
			return err
		}
		if f.Name != "" {
			files = append(files, f)
			t.t.Files = append(t.t.Files, f.Name)
		}
	}
	t.w.mu.Lock()
	defer t.w.mu.Unlock()
	t.w.types = append(t.w.types, t.t)
	t.w.files = append(t.w.files, files...)
	if len(t.blocks) > 0 {
		t.w.owners[t.owned.name] = t.blocks
	}
	return nil
}

// position is a place in a stream.
type position struct {
	size, objects int64
	hash          hash.Hash // nil at the beginning
}

// stream is a file of objects. The file exists only with objects.
type stream struct {
	w    *Writer
	name string
	f    *output
	buf  *bufio.Writer
	at   position
}

func (s *stream) begin() error {
	if dir := path.Dir(s.name); dir != "." && s.w.seal == nil {
		if err := s.w.disk.ensure(dir); err != nil {
			return err
		}
	}
	f, err := s.w.create(s.name)
	if err != nil {
		return err
	}
	s.f, s.buf, s.at = f, bufio.NewWriterSize(f, writeBuffer), position{hash: s.w.newHash()}
	s.w.mu.Lock()
	s.w.open[s] = true
	s.w.mu.Unlock()
	return nil
}

func (s *stream) add(prefix, object []byte) error {
	before := ",\n"
	if s.f == nil {
		if err := s.begin(); err != nil {
			return err
		}
	}
	if s.at.objects == 0 {
		before = listHead
	}
	for _, b := range [][]byte{[]byte(before), prefix, object} {
		if err := s.write(b); err != nil {
			return err
		}
	}
	s.at.objects++
	return nil
}

func (s *stream) write(b []byte) error {
	s.at.hash.Write(b)
	s.at.size += int64(len(b))
	s.w.bytes.Add(int64(len(b)))
	_, err := s.buf.Write(b)
	return err
}

func (s *stream) position() (position, error) {
	p := s.at
	if s.f == nil {
		return p, nil
	}
	h, err := s.at.hash.(hash.Cloner).Clone()
	if err != nil {
		return p, fmt.Errorf("write %s: %w", s.name, err)
	}
	p.hash = h
	return p, s.buf.Flush()
}

// back returns to a position.
func (s *stream) back(p position) error {
	if s.f == nil || s.at.size == p.size {
		return nil
	}
	if p.size == 0 {
		return s.discard()
	}
	s.w.bytes.Add(p.size - s.at.size)
	s.buf.Reset(s.f)
	h, err := p.hash.(hash.Cloner).Clone()
	if err != nil {
		return fmt.Errorf("write %s: %w", s.name, err)
	}
	s.at = position{p.size, p.objects, h}
	return s.f.cut(p.size)
}

func (s *stream) discard() error {
	if s.f == nil {
		return nil
	}
	s.forget()
	f := s.f
	s.w.bytes.Add(-s.at.size)
	s.f, s.buf, s.at = nil, nil, position{}
	return f.discard()
}

func (s *stream) forget() {
	s.w.mu.Lock()
	delete(s.w.open, s)
	s.w.mu.Unlock()
}

// finish completes the file; the name is empty if there is none.
func (s *stream) finish() (File, error) {
	if s.f == nil {
		return File{}, nil
	}
	if err := s.write([]byte(listTail)); err != nil {
		return File{}, err
	}
	if err := s.buf.Flush(); err != nil {
		return File{}, err
	}
	s.forget()
	out := File{Name: s.name, Size: s.at.size, Objects: s.at.objects, SHA256: hex.EncodeToString(s.at.hash.Sum(nil))}
	if err := s.f.finish(&out); err != nil {
		return File{}, err
	}
	return out, nil
}

// Sink is a file that is written sequentially. It can be read back when all is written.
type Sink interface {
	io.Writer
	io.ReaderAt
}

// Snapshot writes etcd.snapshot: fill writes the bytes and returns their description. Size and
// digest are computed from the bytes. After an error it removes the file and may be called
// again.
func (w *Writer) Snapshot(fill func(Sink) (Snapshot, error)) error {
	f, err := w.create(SnapshotFile)
	if err != nil {
		return err
	}
	h := sha256.New()
	var n int64
	info, err := fill(sink{f, func(b []byte) (int, error) {
		h.Write(b)
		n += int64(len(b))
		w.bytes.Add(int64(len(b)))
		return f.Write(b)
	}})
	if err != nil {
		w.bytes.Add(-n)
		return errors.Join(err, f.discard())
	}
	sum := hex.EncodeToString(h.Sum(nil))
	if info.SHA256 != "" && info.SHA256 != sum || info.Size != 0 && info.Size != n {
		w.bytes.Add(-n)
		return errors.Join(errors.New("the received snapshot differs from the one taken"), f.discard())
	}
	entry := File{Name: SnapshotFile, Size: n, SHA256: sum}
	if err := f.finish(&entry); err != nil {
		w.bytes.Add(-n)
		return errors.Join(err, f.discard())
	}
	info.Size, info.SHA256 = n, sum
	w.mu.Lock()
	defer w.mu.Unlock()
	w.etcd = &info
	w.files = append(w.files, entry)
	return nil
}

type sink struct {
	io.ReaderAt
	write func([]byte) (int, error)
}

// Write implements [io.Writer].
func (s sink) Write(b []byte) (int, error) { return s.write(b) }

// Commit completes the backup. It uses Secrets of m, Created if set, and the fields of Cluster
// that From has not set, and returns the written manifest. After an error the backup is
// invalid, and Abort removes it.
func (w *Writer) Commit(m Manifest) (Manifest, error) {
	out := Manifest{
		Schema: Schema, ID: w.id, Created: w.began, Ended: time.Now().UTC(), Cluster: w.from, Secrets: m.Secrets,
		Types: w.types, Files: w.files, Holes: w.holes, Etcd: w.etcd, Notes: w.notes,
	}
	out.Cluster.Name, out.Cluster.ID = cmp.Or(out.Cluster.Name, m.Cluster.Name), cmp.Or(out.Cluster.ID, m.Cluster.ID)
	out.Cluster.UID, out.Cluster.Server = cmp.Or(out.Cluster.UID, m.Cluster.UID), cmp.Or(out.Cluster.Server, m.Cluster.Server)
	if !m.Created.IsZero() {
		out.Created = m.Created.UTC()
	}
	if out.Holes == nil {
		out.Holes = []Hole{}
	}
	if len(w.open) > 0 {
		return out, errors.New("write manifest.json: a type was not closed")
	}
	slices.SortFunc(out.Types, func(a, b Type) int {
		return strings.Compare(a.Group+"/"+a.Resource+"/"+first(a.Files), b.Group+"/"+b.Resource+"/"+first(b.Files))
	})
	slices.SortFunc(out.Files, func(a, b File) int { return strings.Compare(a.Name, b.Name) })
	dirs := map[string]bool{}
	var at int64 = 1 // after the brace
	for i := range out.Files {
		f := &out.Files[i]
		out.Objects += f.Objects
		out.Bytes += f.Size
		if d := path.Dir(f.Name); d != "." && w.seal == nil {
			dirs[d] = true
		}
		if blocks := w.owners[f.Name]; len(blocks) > 0 {
			var n int64
			for _, b := range blocks {
				n += b.size
			}
			n -= 2 // no comma after the last
			at += int64(len(ownersKey(f.Name, at > 1)))
			f.Owners = &Span{at, n}
			at += n + int64(len(ownersEnd))
		}
	}
	if err := w.writeManifests(&out); err != nil {
		return out, err
	}
	for _, d := range slices.Sorted(func(yield func(string) bool) {
		for d := range dirs {
			if !yield(d) {
				return
			}
		}
	}) {
		if err := w.disk.syncDir(d); err != nil {
			return out, err
		}
	}
	if err := w.disk.syncDir("."); err != nil {
		return out, err
	}
	if err := w.run.syncDir("."); err != nil {
		return out, err
	}
	if err := w.top.syncDir("."); err != nil {
		return out, err
	}
	if err := w.disk.rename(temporary, ManifestFile); err != nil {
		return out, err
	}
	if err := w.disk.syncDir("."); err != nil {
		return out, err
	}
	w.close()
	return out, nil
}

func first(s []string) string {
	if len(s) == 0 {
		return ""
	}
	return s[0]
}

const ownersEnd = "\n]"

func ownersKey(name string, more bool) string {
	comma := ""
	if more {
		comma = ","
	}
	return comma + "\n\"" + name + "\":[\n"
}

// The end of a manifest, around the hex digits.
const (
	sumHead = "},\n\"sha256\":\""
	sumTail = "\"}\n"
	sumSize = len(sumHead) + 2*sha256.Size + len(sumTail)
)

// writeManifests writes the manifest, under its temporary name, and that of encrypted content before it.
func (w *Writer) writeManifests(out *Manifest) error {
	front := *out
	if w.seal != nil {
		var err error
		if front, err = w.commitSealed(out); err != nil {
			return err
		}
	}
	var mac hash.Hash
	if len(w.secret) > 0 {
		_, front.AuthenticatedBy = tagKey(w.secret, front.Cluster.UID)
		mac = Keys{Secret: w.secret}.mac(&front)
		out.AuthenticatedBy = front.AuthenticatedBy
	}
	f, err := w.disk.create(temporary)
	if err != nil {
		return err
	}
	return w.writeManifest(&output{w: w, f: f, name: temporary}, &front, mac, "")
}

// writeManifest writes a manifest, with a tag if mac is not nil, and with the identity of encrypted files.
func (w *Writer) writeManifest(f *output, m *Manifest, mac hash.Hash, identity string) error {
	head, err := json.MarshalIndent(struct {
		*Manifest
		Identity string `json:"identity,omitempty"`
	}{m, identity}, "", " ")
	if err != nil {
		f.close()
		return fmt.Errorf("write manifest.json: %w", err)
	}
	h := sha256.New()
	buf := bufio.NewWriterSize(f, writeBuffer)
	out := io.MultiWriter(h, buf)
	if mac != nil {
		out = io.MultiWriter(h, buf, mac)
	}
	err = func() error {
		if _, err := fmt.Fprintf(out, "%s,\n\"owners\":{", bytes.TrimSuffix(head, []byte("\n}"))); err != nil {
			return err
		}
		more := false
		for i := range m.Files {
			f := &m.Files[i]
			if f.Owners == nil {
				continue
			}
			if _, err := io.WriteString(out, ownersKey(f.Name, more)); err != nil {
				return err
			}
			more = true
			left := f.Owners.Size
			for _, b := range w.owners[f.Name] {
				n := min(left, b.size)
				data, err := w.spool.read(b)
				if err == nil {
					_, err = out.Write(data[:n])
				}
				if err != nil {
					return fmt.Errorf("write manifest.json: %w", err)
				}
				left -= n
			}
			if _, err := io.WriteString(out, ownersEnd); err != nil {
				return err
			}
		}
		if mac != nil {
			if _, err := io.WriteString(io.MultiWriter(h, buf), tag(mac)); err != nil {
				return err
			}
		}
		sum := hex.EncodeToString(h.Sum(nil))
		if _, err := io.WriteString(buf, sumHead+sum+sumTail); err != nil {
			return err
		}
		return buf.Flush()
	}()
	if err != nil {
		f.close()
		return err
	}
	return f.finish(&File{})
}

// Abort ends a backup that was not committed and removes its files.
func (w *Writer) Abort() error {
	for s := range w.open {
		s.f.close()
	}
	w.open = nil
	defer w.close()
	// The manifest goes first: a partly removed directory must not pass for a backup.
	if err := w.disk.remove(ManifestFile); err != nil {
		return err
	}
	if err := w.run.removeTree(Dir); err != nil {
		return err
	}
	if w.made {
		return w.top.remove(w.id)
	}
	return nil
}

func (w *Writer) close() {
	if w.spool != nil {
		w.spool.f.Close()
	}
	for _, d := range []*disk{w.disk, w.run, w.top} {
		if d != nil {
			d.close()
		}
	}
}

// spool holds the owners until the manifest is written. Its file has no name, so that a crash
// leaves nothing behind.
type spool struct {
	mu   sync.Mutex
	d    *disk
	f    *os.File
	size int64
	aead cipher.AEAD // nil without encryption
}

// block is a part of the spool, with its size before encryption.
type block struct{ at, size int64 }

const spoolFile = ".owners.tmp"

func newSpool(d *disk) (*spool, error) {
	f, err := d.create(spoolFile)
	if err != nil {
		return nil, err
	}
	if err := d.remove(spoolFile); err != nil {
		f.f.Close()
		return nil, err
	}
	return &spool{d: d, f: f.f}, nil
}

func (s *spool) add(b []byte) (block, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := block{s.size, int64(len(b))}
	if s.aead != nil {
		b = s.aead.Seal(nil, s.nonce(s.size), b, nil)
	}
	err := s.d.ask(opWrite, spoolFile, len(b))
	if err == nil {
		_, err = s.f.WriteAt(b, s.size)
	}
	if err != nil {
		return block{}, fmt.Errorf("write owners: %w", bare(err))
	}
	s.size += int64(len(b))
	return out, nil
}
