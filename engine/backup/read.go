package backup

import (
	"bufio"
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"iter"
	"path"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
)

// maxHead bounds the part of a manifest in memory: all except the owners.
const maxHead = 64 << 20

var ownersMark = []byte(",\n\"owners\":{")

// Backup is a backup that was opened. It is safe for concurrent use.
type Backup struct {
	id        string
	keys      Keys
	disk      *disk
	front     Manifest          // what manifest.json says
	manifest  Manifest          // the same, or that of the encrypted content
	owners    int64             // start of the owners in the manifest
	head      [sha256.Size]byte // digest of what read was given of manifest.json, of frontSize bytes
	frontSize int64
	identity  Identity // of the encrypted files; nil if there are none, or the backup is locked
	locked    error    // see Locked
}

// Open opens the backup id in dir and reads its manifest only: see [Backup.Verify]. The error
// is a [*NotWhole] if the manifest is missing or invalid. It wraps fs.ErrNotExist if there is
// no such backup, and [ErrRefused] if a directory is not safe to use.
func Open(dir, id string, keys Keys) (*Backup, error) {
	if !ValidID(id) {
		return nil, fmt.Errorf("open backup %q: invalid ID", id)
	}
	top, err := openDisk(dir)
	if err != nil {
		return nil, err
	}
	defer top.close()
	run, err := top.sub(id)
	if err != nil {
		return nil, err
	}
	defer run.close()
	d, err := run.sub(Dir)
	if err != nil {
		return nil, err
	}
	b := &Backup{id: id, keys: keys, disk: d}
	if err := b.read(); err != nil {
		d.close()
		return nil, err
	}
	return b, nil
}

// Close closes the backup.
func (b *Backup) Close() { b.disk.close() }

// ID returns the ID of the backup.
func (b *Backup) ID() string { return b.id }

// Path returns the directory of the backup.
func (b *Backup) Path() string { return b.disk.root.Name() }

// Manifest returns the backup's manifest.
func (b *Backup) Manifest() Manifest { return b.manifest }

func (b *Backup) damaged(format string, a ...any) error {
	return &NotWhole{ID: b.id, Damage: []string{fmt.Sprintf(format, a...)}}
}

// damage is the error of an unusable file.
func (b *Backup) damage(name string, err error) error {
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return b.damaged("%s is missing", name)
	case errors.Is(err, ErrRefused):
		return fmt.Errorf("backup %s: %w", b.id, err)
	}
	return b.damaged("%v", err)
}

// read reads the manifest without the owners.
func (b *Backup) read() error {
	f, _, err := b.disk.open(ManifestFile)
	if errors.Is(err, fs.ErrNotExist) {
		return b.damaged("%s is missing: the backup was not completed", ManifestFile)
	}
	if err != nil {
		return b.damage(ManifestFile, err)
	}
	defer f.Close()
	head, owners, err := b.readHead(f, ManifestFile)
	if err != nil {
		return err
	}
	b.owners = owners
	b.frontSize = int64(len(head) - 1) // without the brace
	b.head = sha256.Sum256(head[:b.frontSize])
	if err := json.Unmarshal(head, &b.front); err != nil {
		return b.damaged("%s cannot be read: %v", ManifestFile, err)
	}
	if err := b.checkFront(); err != nil {
		return err
	}
	if b.front.Encrypted != nil {
		return b.unlock()
	}
	b.manifest = b.front
	return b.check()
}

// readHead reads a manifest up to the owners, and returns it as a JSON object.
func (b *Backup) readHead(f io.Reader, name string) (head []byte, owners int64, err error) {
	buf := make([]byte, 64<<10)
	for {
		n, err := f.Read(buf)
		from := max(0, len(head)-len(ownersMark))
		head = append(head, buf[:n]...)
		if i := bytes.Index(head[from:], ownersMark); i >= 0 {
			head = head[:from+i]
			break
		}
		if len(head) > 0 && head[0] != '{' || len(head) > maxHead {
			return nil, 0, b.damaged("%s is not the manifest of a backup", name)
		}
		if err == io.EOF {
			return nil, 0, b.damaged("%s is truncated", name)
		}
		if err != nil {
			return nil, 0, b.damaged("read %s: %v", name, bare(err))
		}
	}
	owners = int64(len(head) + len(ownersMark) - 1)
	return append(head, '}'), owners, nil
}

// checkFront checks what manifest.json says of the backup as a whole.
func (b *Backup) checkFront() error {
	m := &b.front
	want := Schema
	if m.Encrypted != nil {
		want = SealedSchema
	}
	major, _, _ := strings.Cut(m.Schema, ".")
	if ours, _, _ := strings.Cut(want, "."); major != ours {
		return fmt.Errorf("backup %s has format %q, and this program reads %s: use a newer one", b.id, m.Schema, want)
	}
	if m.AuthenticatedBy != "" && !keyIDRE.MatchString(m.AuthenticatedBy) {
		return b.damaged("%s names an invalid key", ManifestFile)
	}
	if m.ID != b.id {
		return b.damaged("%s belongs to backup %q", ManifestFile, m.ID)
	}
	if m.Encrypted != nil {
		return b.checkSealed()
	}
	return nil
}

// check returns an error unless Commit could have written the manifest of the content.
func (b *Backup) check() error {
	m := &b.manifest
	if major, _, _ := strings.Cut(m.Schema, "."); major != "1" || m.ID != b.id {
		return b.damaged("%s has format %q and is of backup %q", ManifestFile, m.Schema, m.ID)
	}
	var objects, size, ofTypes int64
	files := map[string]*File{}
	for i := range m.Files {
		f := &m.Files[i]
		if files[f.Name] != nil || !b.valid(f) {
			return b.damaged("%s names an invalid file %q", ManifestFile, f.Name)
		}
		files[f.Name] = f
		objects += f.Objects
		size += f.Size
	}
	named := map[string]bool{}
	for _, t := range m.Types {
		// A restore makes requests of these names.
		if !labelRE.MatchString(t.Version) || !labelRE.MatchString(t.Resource) || t.Group != "" && (!partRE.MatchString(t.Group) || strings.Contains(t.Group, "..")) {
			return b.damaged("%s names an invalid type %q of %q", ManifestFile, t.Resource, t.Group+"/"+t.Version)
		}
		ofTypes += t.Objects
		for _, name := range t.Files {
			if files[name] == nil || named[name] {
				return b.damaged("%s names %s in the wrong place", ManifestFile, name)
			}
			named[name] = true
		}
	}
	if f := files[SnapshotFile]; (f != nil) != (m.Etcd != nil) || f != nil && (f.Size != m.Etcd.Size || f.SHA256 != m.Etcd.SHA256) {
		return b.damaged("%s contradicts itself about %s", ManifestFile, SnapshotFile)
	} else if f != nil {
		named[SnapshotFile] = true
	}
	if objects != m.Objects || size != m.Bytes || ofTypes != m.Objects || len(named) != len(files) {
		return b.damaged("%s contradicts itself: its sums are wrong", ManifestFile)
	}
	return nil
}

// valid reports whether a manifest may have an entry. Only encrypted content has no digest.
func (b *Backup) valid(f *File) bool {
	if checkName(f.Name) != nil || f.Name == ManifestFile || f.Size < 0 || f.Objects < 0 || f.Owners != nil && (f.Owners.At < 1 || f.Owners.Size < 0) {
		return false
	}
	if b.front.Encrypted == nil {
		return f.SHA256 != "" && f.Stored == "" && len(f.Skip) == 0
	}
	return true
}

func (b *Backup) file(name string) *File {
	i := slices.IndexFunc(b.manifest.Files, func(f File) bool { return f.Name == name })
	if i < 0 {
		return nil
	}
	return &b.manifest.Files[i]
}

// Objects yields the objects of t, a type of the manifest, in the order of the files, those
// without owners first. Memory holds one object. It ends after an error, which is a
// [*NotWhole] for damage that can be detected without [Backup.Verify].
func (b *Backup) Objects(t Type) iter.Seq2[Object, error] {
	return func(yield func(Object, error) bool) {
		for _, name := range t.Files {
			if !b.objects(name, yield) {
				return
			}
		}
	}
}

func (b *Backup) objects(name string, yield func(Object, error) bool) bool {
	entry := b.file(name)
	if entry == nil {
		yield(Object{}, fmt.Errorf("backup %s has no file %q", b.id, name))
		return false
	}
	f, err := b.openFile(entry)
	if err != nil {
		yield(Object{}, err)
		return false
	}
	defer f.Close()
	next := func() (Owned, error) { return Owned{}, nil }
	if entry.Owners != nil {
		owners, stop := iter.Pull2(b.ownersOf(entry))
		defer stop()
		next = func() (Owned, error) {
			o, err, ok := owners()
			if !ok {
				return o, b.damaged("%s has too few owners for %s", ManifestFile, name)
			}
			return o, err
		}
	}
	s := NewScanner(f)
	var n int64
	for s.Next() {
		n++
		o, err := next()
		if err != nil {
			yield(Object{}, err)
			return false
		}
		if entry.Owners != nil && (len(s.Item().UID) < 2 || string(s.Item().UID[1:len(s.Item().UID)-1]) != o.UID) {
			yield(Object{}, b.damaged("%s names the owners of an object other than %s", ManifestFile, name))
			return false
		}
		if !yield(Object{JSON: s.Item().JSON, Owners: o.References}, nil) {
			return false
		}
	}
	if err := s.Err(); err != nil {
		yield(Object{}, b.damaged("read %s: %v", name, bare(err)))
		return false
	}
	if n != entry.Objects {
		yield(Object{}, b.damaged("%s has %d objects, want %d as in %s", name, n, entry.Objects, ManifestFile))
		return false
	}
	return true
}

// Owners yields the owners of the objects of t that have owners, in the order of the file.
// Memory holds one object.
func (b *Backup) Owners(t Type) iter.Seq2[Owned, error] {
	return func(yield func(Owned, error) bool) {
		for _, name := range t.Files {
			f := b.file(name)
			if f == nil || f.Owners == nil {
				continue
			}
			for o, err := range b.ownersOf(f) {
				if !yield(o, err) || err != nil {
					return
				}
			}
		}
	}
}

func (b *Backup) ownersOf(entry *File) iter.Seq2[Owned, error] {
	return func(yield func(Owned, error) bool) {
		f, done, err := b.manifestAt()
		if err != nil {
			yield(Owned{}, err)
			return
		}
		defer done()
		lines := bufio.NewReaderSize(io.NewSectionReader(f, b.owners+entry.Owners.At, entry.Owners.Size), 64<<10)
		for {
			line, err := lines.ReadBytes('\n')
			if len(line) > 0 {
				var o Owned
				if json.Unmarshal(bytes.TrimSuffix(bytes.TrimSuffix(line, []byte("\n")), []byte(",")), &o) != nil {
					yield(Owned{}, b.damaged("%s lacks the owners for %s", ManifestFile, entry.Name))
					return
				}
				if !yield(o, nil) {
					return
				}
			}
			if err == io.EOF {
				return
			}
			if err != nil {
				yield(Owned{}, b.damaged("read %s: %v", ManifestFile, bare(err)))
				return
			}
		}
	}
}

// Verify reads the whole backup and returns nil if it is whole: no file is missing or
// unexpected, every byte is unchanged, and there is no hole. Otherwise the error is a
// [*NotWhole] with all reasons, or that of ctx. progress, which may be nil, receives the read
// and total bytes, never concurrently.
func (b *Backup) Verify(ctx context.Context, progress func(done, total int64)) error {
	return b.verify(ctx, true, progress)
}

// buffers are those of verifications: a list verifies many backups.
var buffers = sync.Pool{New: func() any { b := make([]byte, 256<<10); return &b }}

// Look is Verify without reading the files' content: it does not detect changed bytes.
func (b *Backup) Look(ctx context.Context) error { return b.verify(ctx, false, nil) }

func (b *Backup) verify(ctx context.Context, deep bool, progress func(done, total int64)) error {
	out := &NotWhole{ID: b.id, Holes: b.manifest.Holes}
	if b.locked != nil && b.front.Encrypted.Holes > 0 {
		out.Holes = []Hole{{Resource: "content", Reason: fmt.Sprintf("%d types could not be read; with an identity they are named", b.front.Encrypted.Holes)}}
	}
	var mu sync.Mutex
	wrong := func(format string, a ...any) {
		mu.Lock()
		defer mu.Unlock()
		out.Damage = append(out.Damage, fmt.Sprintf(format, a...))
	}
	b.strangers(wrong)
	var done atomic.Int64
	total := b.front.Bytes
	names := make([]string, 0, len(b.front.Files)+1)
	names = append(names, ManifestFile)
	for _, f := range b.front.Files {
		names = append(names, f.Name)
	}
	if info, err := b.disk.root.Lstat(ManifestFile); err == nil {
		total += info.Size()
	}
	read := func(n int) {
		now := done.Add(int64(n))
		if progress != nil {
			mu.Lock()
			defer mu.Unlock()
			progress(now, total)
		}
	}
	var next atomic.Int64
	var wg sync.WaitGroup
	for range 2 {
		wg.Go(func() {
			pooled := buffers.Get().(*[]byte)
			defer buffers.Put(pooled)
			buf := *pooled
			for ctx.Err() == nil {
				i := int(next.Add(1)) - 1
				if i >= len(names) {
					return
				}
				if names[i] == ManifestFile {
					b.verifyManifest(ctx, buf, read, wrong)
				} else {
					b.verifyFile(ctx, &b.front.Files[i-1], deep, buf, read, wrong)
				}
			}
		})
	}
	wg.Wait()
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("verify backup %s: %w", b.id, context.Cause(ctx))
	}
	if len(out.Damage)+len(out.Holes) == 0 {
		return nil
	}
	slices.Sort(out.Damage)
	return out
}

// strangers reports unexpected files, and directories that are not safe.
func (b *Backup) strangers(wrong func(string, ...any)) {
	known, dirs := map[string]bool{ManifestFile: true}, map[string]bool{}
	for _, f := range b.front.Files {
		known[f.Name] = true
		if d := path.Dir(f.Name); d != "." {
			dirs[d] = true
		}
	}
	var walk func(dir string)
	walk = func(dir string) {
		entries, err := b.disk.entries(dir)
		if err != nil {
			wrong("%v", err)
			return
		}
		for _, e := range entries {
			name := path.Join(dir, e.Name())
			switch {
			case e.IsDir() && dirs[name]:
				info, err := b.disk.root.Lstat(name)
				if err == nil {
					err = own(info, true)
				}
				if err != nil {
					wrong("directory %s: %v", name, bare(err))
				}
				walk(name)
			case e.IsDir() || !known[name]:
				wrong("%s does not belong to it", name)
			}
		}
	}
	walk(".")
}

// each reads a file block by block.
func each(ctx context.Context, f io.Reader, buf []byte, do func([]byte)) error {
	for {
		if err := ctx.Err(); err != nil {
			return err
		}
		n, err := f.Read(buf)
		do(buf[:n])
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return bare(err)
		}
	}
}

func (b *Backup) verifyManifest(ctx context.Context, buf []byte, read func(int), wrong func(string, ...any)) {
	f, _, err := b.disk.open(ManifestFile)
	if err != nil {
		wrong("%v", b.damage(ManifestFile, err))
		return
	}
	defer f.Close()
	// Callers use what Open read, so Verify authenticates exactly that.
	head := sha256.New()
	src := io.MultiReader(io.TeeReader(io.LimitReader(f, b.frontSize), head), f)
	b.verifyDigest(ctx, src, ManifestFile, buf, b.keys.mac(&b.front), b.front.AuthenticatedBy != "", read, wrong)
	if ctx.Err() == nil && !bytes.Equal(head.Sum(nil), b.head[:]) {
		wrong("%s was modified after it was opened", ManifestFile)
	}
}

// verifyDigest verifies the digest at the end of a manifest, and its tag if it is tagged. Without mac the tag may be
// any.
func (b *Backup) verifyDigest(ctx context.Context, f io.Reader, name string, buf []byte, mac hash.Hash, tagged bool, read func(int), wrong func(string, ...any)) {
	h := sha256.New()
	end := sumSize // the bytes that are part of neither digest nor tag
	if tagged {
		end += tagSize
	}
	var tail []byte
	err := each(ctx, f, buf, func(p []byte) {
		read(len(p))
		tail = append(tail, p...)
		if n := len(tail) - end; n > 0 {
			h.Write(tail[:n])
			if mac != nil {
				mac.Write(tail[:n])
			}
			tail = append(tail[:0], tail[n:]...)
		}
	})
	if err != nil {
		wrong("read %s: %v", name, err)
		return
	}
	if len(tail) == end && end > sumSize {
		h.Write(tail[:tagSize])
		switch has := string(tail[:tagSize]); {
		case !strings.HasPrefix(has, tagHead):
			wrong("%s has no authentication tag, but names the key of one", name)
		case mac != nil && !hmac.Equal([]byte(has), []byte(tag(mac))):
			wrong("%s was modified by somebody without the master secret: its authentication tag is wrong", name)
		}
		tail = tail[tagSize:]
	}
	if string(tail) != sumHead+hex.EncodeToString(h.Sum(nil))+sumTail {
		wrong("%s was modified: its SHA-256 differs", name)
	}
}

func (b *Backup) verifyFile(ctx context.Context, want *File, deep bool, buf []byte, read func(int), wrong func(string, ...any)) {
	f, info, err := b.disk.open(want.Name)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		wrong("%s is missing", want.Name)
		return
	case err != nil:
		wrong("%v", err)
		return
	}
	defer f.Close()
	if info.Size() != want.Size {
		wrong("%s has %d bytes, want %d", want.Name, info.Size(), want.Size)
		return
	}
	switch {
	case !deep:
	case b.front.Encrypted != nil:
		b.verifySealed(ctx, f, want, buf, read, wrong)
	default:
		b.verifyContent(ctx, f, want, buf, read, wrong)
	}
}

// verifyContent verifies the content of a file.
func (b *Backup) verifyContent(ctx context.Context, f io.Reader, want *File, buf []byte, read func(int), wrong func(string, ...any)) {
	var h hash.Hash = noHash{}
	if want.SHA256 != "" {
		h = sha256.New()
	}
	var lines, size int64
	var end *etcdEnd
	if want.Name == SnapshotFile {
		end = newEtcdEnd()
	}
	err := each(ctx, f, buf, func(p []byte) {
		h.Write(p)
		size += int64(len(p))
		if end != nil {
			end.write(p)
		}
		lines += int64(bytes.Count(p, []byte("\n")))
		read(len(p))
	})
	if err != nil {
		wrong("read %s: %v", want.Name, err)
		return
	}
	if want.SHA256 != "" && hex.EncodeToString(h.Sum(nil)) != want.SHA256 {
		wrong("%s was modified: its SHA-256 differs", want.Name)
		return
	}
	if size != want.Size {
		wrong("%s has %d bytes, want %d", want.Name, size, want.Size)
		return
	}
	if end != nil {
		if text := end.wrong(); text != "" {
			wrong("%s %s", want.Name, text)
		}
		return
	}
	if lines != want.Objects+2 { // an object per line, with one line before and one after
		wrong("%s has %d objects, want %d as in %s", want.Name, lines-2, want.Objects, ManifestFile)
	}
}
