package backup

import (
	"bytes"
	"context"
	"crypto/aes"
	"crypto/cipher"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"

	"filippo.io/age"
)

// An encrypted backup has a manifest.json with what lists need, and otherwise files of age:
//
//	manifest.json  ID, dates, cluster, recipients; name, size and SHA-256 of the files below; the tag
//	manifest.age   the manifest of the content, encrypted to the recipients
//	<number>.age   the other files, encrypted to an identity that manifest.age contains
//
// So the recipients are needed once, and a writer can read what it wrote. No unencrypted byte of a cluster is on disk.

// SealedSchema is the version of the format of an encrypted backup's manifest.json.
const SealedSchema = "2.0"

// SealedManifest is the name of the encrypted manifest.
const SealedManifest = "manifest.age"

var sealedRE = regexp.MustCompile(`^[0-9]{4,9}\.age$`)

// Encryption describes the encryption of a backup.
type Encryption struct {
	// Recipients are those of the configuration. The files do not prove that they are encrypted to these.
	Recipients []string `json:"recipients"`
	// Holes is the number of types that could not be read.
	Holes int `json:"holes,omitempty"`
	// Objects is the number of objects, Etcd whether there is a snapshot of etcd.
	Objects int64 `json:"objects"`
	Etcd    bool  `json:"etcd"`
}

// Identity decrypts backups.
type Identity = age.Identity

// Recipient is a public key that backups are encrypted to.
type Recipient = age.Recipient

// ParseRecipient reads a public key of age, such as age1... of age-keygen.
func ParseRecipient(s string) (Recipient, error) {
	// Errors of age may quote a secret key that was written instead.
	if strings.HasPrefix(strings.ToUpper(s), "AGE-SECRET-KEY-") {
		return nil, errors.New("is a secret key of age, want the public key")
	}
	list, err := age.ParseRecipients(strings.NewReader(s))
	if err != nil || len(list) != 1 || strings.ContainsAny(s, "\r\n") {
		return nil, errors.New("is not a public key of age, which begins with age1")
	}
	return list[0], nil
}

// ParseIdentities reads a file of age-keygen. Errors contain nothing of it.
func ParseIdentities(b []byte) ([]Identity, error) {
	list, err := age.ParseIdentities(bytes.NewReader(b))
	if err != nil {
		return nil, errors.New("is not a file of age-keygen with a secret key, AGE-SECRET-KEY-1..., on a line of its own")
	}
	return list, nil
}

// ErrLocked is wrapped if a backup is encrypted, and no identity opens it.
var ErrLocked = errors.New("the backup is encrypted")

// sealer encrypts the files of a backup.
type sealer struct {
	to       []Recipient
	names    []string
	identity *age.X25519Identity
	last     int    // number of the last file
	files    []File // encrypted files that are complete
}

// Encrypt has all files encrypted. names are what the configuration calls the recipients. It must be called before
// anything is written.
func (w *Writer) Encrypt(names []string) error {
	s := &sealer{names: names}
	for i, n := range names {
		r, err := ParseRecipient(n)
		if err != nil { // it may be a secret key, so it is not quoted
			return fmt.Errorf("recipient %d %w", i+1, err)
		}
		s.to = append(s.to, r)
	}
	// Recipients that cannot be mixed are found before anything is written.
	if _, err := age.Encrypt(io.Discard, s.to...); err != nil {
		return fmt.Errorf("encrypt backup: %w", err)
	}
	var err error
	if s.identity, err = age.GenerateX25519Identity(); err != nil {
		return fmt.Errorf("encrypt backup: %w", err)
	}
	if err := w.spool.encrypt(); err != nil {
		return fmt.Errorf("encrypt backup: %w", err)
	}
	w.seal = s
	return nil
}

// newHash computes the digest of content. That of an encrypted file covers its content, so the content has none.
func (w *Writer) newHash() hash.Hash {
	if w.seal != nil {
		return noHash{}
	}
	return sha256.New()
}

// noHash is a digest without bytes.
type noHash struct{}

func (noHash) Write(b []byte) (int, error) { return len(b), nil }
func (noHash) Sum(b []byte) []byte         { return b }
func (noHash) Reset()                      {}
func (noHash) Size() int                   { return 0 }
func (noHash) BlockSize() int              { return 1 }
func (noHash) Clone() (hash.Cloner, error) { return noHash{}, nil }

// output is a file of a backup that is written sequentially, encrypted or not.
type output struct {
	w    *Writer
	f    *file
	name string // as stored

	enc     io.WriteCloser // nil without encryption
	ended   bool           // enc is closed
	sum     hash.Hash      // of the encrypted bytes, as size
	size    int64
	plain   int64 // unencrypted bytes that were written
	skip    []Span
	skipped int64 // sum of skip

	once    sync.Once // what follows is set
	back    io.ReaderAt
	backErr error
}

// create makes a file of the backup.
func (w *Writer) create(name string) (*output, error) {
	if w.seal == nil {
		f, err := w.disk.create(name)
		if err != nil {
			return nil, err
		}
		return &output{w: w, f: f, name: name}, nil
	}
	w.mu.Lock()
	w.seal.last++
	stored := fmt.Sprintf("%04d.age", w.seal.last)
	w.mu.Unlock()
	return w.createSealed(stored, w.seal.identity.Recipient())
}

func (w *Writer) createSealed(stored string, to ...Recipient) (*output, error) {
	f, err := w.disk.create(stored)
	if err != nil {
		return nil, err
	}
	o := &output{w: w, f: f, name: stored, sum: sha256.New()}
	if o.enc, err = age.Encrypt(sealed{o}, to...); err != nil {
		f.f.Close()
		return nil, fmt.Errorf("encrypt %s: %w", stored, err)
	}
	return o, nil
}

// sealed takes the encrypted bytes of an output.
type sealed struct{ o *output }

// Write implements [io.Writer].
func (s sealed) Write(b []byte) (int, error) {
	n, err := s.o.f.Write(b)
	s.o.sum.Write(b[:n])
	s.o.size += int64(n)
	return n, err
}

// Write implements [io.Writer].
func (o *output) Write(b []byte) (int, error) {
	if o.enc == nil {
		return o.f.Write(b)
	}
	n, err := o.enc.Write(b)
	o.plain += int64(n)
	return n, err
}

// ReadAt implements [io.ReaderAt]. An encrypted file cannot be written any more afterwards.
func (o *output) ReadAt(b []byte, at int64) (int, error) {
	if o.enc == nil {
		return o.f.f.ReadAt(b, at)
	}
	o.once.Do(func() {
		if o.backErr = o.end(); o.backErr == nil {
			o.back, _, o.backErr = age.DecryptReaderAt(o.f.f, o.size, o.w.seal.identity)
		}
	})
	if o.backErr != nil {
		return 0, fmt.Errorf("read %s: %w", o.name, o.backErr)
	}
	return o.back.ReadAt(b, at)
}

// end encrypts the rest.
func (o *output) end() error {
	if o.ended {
		return nil
	}
	o.ended = true
	return o.enc.Close()
}

// cut truncates the file to n bytes. Encrypted bytes stay, and are left out when the file is read: a key stream must
// not encrypt two different texts.
func (o *output) cut(n int64) error {
	if o.enc == nil {
		return o.f.cut(n)
	}
	if at := n + o.skipped; o.plain > at {
		o.skip = append(o.skip, Span{At: at, Size: o.plain - at})
		o.skipped += o.plain - at
	}
	return nil
}

// finish syncs the file to disk and closes it. entry is that of the manifest.
func (o *output) finish(entry *File) error {
	if o.enc == nil {
		return o.f.finish()
	}
	if err := o.end(); err != nil {
		o.close()
		return err
	}
	if err := o.f.finish(); err != nil {
		return err
	}
	entry.Stored, entry.Skip = o.name, o.skip
	o.w.mu.Lock()
	defer o.w.mu.Unlock()
	o.w.seal.files = append(o.w.seal.files, File{Name: o.name, Size: o.size, SHA256: hex.EncodeToString(o.sum.Sum(nil))})
	return nil
}

func (o *output) close() { o.f.f.Close() }

// discard removes the file.
func (o *output) discard() error {
	o.close()
	return o.w.disk.remove(o.name)
}

// commitSealed writes the manifest of the content encrypted, and returns that of the directory.
func (w *Writer) commitSealed(out *Manifest) (Manifest, error) {
	o, err := w.createSealed(SealedManifest, w.seal.to...)
	if err != nil {
		return Manifest{}, err
	}
	if err := w.writeManifest(o, out, nil, w.seal.identity.String()); err != nil {
		return Manifest{}, err
	}
	out.Encrypted = &Encryption{Recipients: w.seal.names, Holes: len(out.Holes), Objects: out.Objects, Etcd: out.Etcd != nil}
	front := Manifest{
		Schema: SealedSchema, ID: out.ID, Created: out.Created, Ended: out.Ended, Holes: []Hole{}, Files: w.seal.files, Encrypted: out.Encrypted,
		Cluster: Cluster{Name: out.Cluster.Name, ID: out.Cluster.ID, UID: out.Cluster.UID},
	}
	slices.SortFunc(front.Files, func(a, b File) int { return strings.Compare(a.Name, b.Name) })
	for _, f := range front.Files {
		front.Bytes += f.Size
	}
	return front, nil
}

// encrypt has the spool encrypted with a key that is in memory alone.
func (s *spool) encrypt() error {
	key := make([]byte, 32)
	rand.Read(key) // never fails
	block, err := aes.NewCipher(key)
	if err != nil {
		return err
	}
	s.aead, err = cipher.NewGCM(block)
	return err
}

// nonce is that of a block of the spool. No two have the same position.
func (s *spool) nonce(at int64) []byte {
	n := make([]byte, s.aead.NonceSize())
	binary.BigEndian.PutUint64(n, uint64(at)) //nolint:gosec // positions are not negative
	return n
}

// read returns a block.
func (s *spool) read(b block) ([]byte, error) {
	buf := make([]byte, b.size, b.size+64)
	if s.aead != nil {
		buf = buf[:b.size+int64(s.aead.Overhead())]
	}
	if _, err := s.f.ReadAt(buf, b.at); err != nil {
		return nil, bare(err)
	}
	if s.aead == nil {
		return buf, nil
	}
	return s.aead.Open(buf[:0], s.nonce(b.at), buf, nil)
}

// checkSealed returns an error unless Commit could have written the manifest.json of an encrypted backup.
func (b *Backup) checkSealed() error {
	m := &b.front
	var size int64
	names := map[string]bool{}
	for _, f := range m.Files {
		if f.Name != SealedManifest && !sealedRE.MatchString(f.Name) || names[f.Name] || f.Size < 0 || f.Owners != nil || f.Stored != "" || len(f.Skip) > 0 {
			return b.damaged("%s names an invalid file %q", ManifestFile, f.Name)
		}
		names[f.Name] = true
		size += f.Size
	}
	if size != m.Bytes || !names[SealedManifest] || len(m.Types) > 0 || m.Etcd != nil || m.Objects != 0 || m.Encrypted.Holes < 0 {
		return b.damaged("%s contradicts itself: its sums are wrong", ManifestFile)
	}
	return nil
}

// unlock reads the manifest of the content. Without an identity that fits, the backup stays locked.
func (b *Backup) unlock() error {
	b.manifest = b.front
	if len(b.keys.Identities) == 0 {
		b.locked = ErrLocked
		return nil
	}
	r, done, err := b.manifestAt()
	var no *age.NoIdentityMatchError
	switch {
	case errors.As(err, &no):
		b.locked = fmt.Errorf("%w, and to none of the given identities", ErrLocked)
		return nil
	case err != nil:
		return err
	}
	defer done()
	head, owners, err := b.readHead(io.NewSectionReader(r, 0, 1<<62), SealedManifest)
	if err != nil {
		return err
	}
	var inner struct {
		Manifest
		Identity string `json:"identity"`
	}
	if err := json.Unmarshal(head, &inner); err != nil {
		return b.damaged("%s cannot be read", SealedManifest)
	}
	if b.identity, err = age.ParseX25519Identity(inner.Identity); err != nil {
		return b.damaged("%s has no identity", SealedManifest)
	}
	b.owners, b.manifest = owners, inner.Manifest
	m := &b.manifest
	if m.Encrypted != nil || m.AuthenticatedBy != "" || m.Cluster.UID != b.front.Cluster.UID || !m.Created.Equal(b.front.Created) || len(m.Holes) != b.front.Encrypted.Holes ||
		m.Objects != b.front.Encrypted.Objects || (m.Etcd != nil) != b.front.Encrypted.Etcd {
		return b.damaged("%s and %s contradict each other", ManifestFile, SealedManifest)
	}
	if err := b.check(); err != nil {
		return err
	}
	stored := map[string]bool{SealedManifest: true}
	for _, f := range m.Files {
		if stored[f.Stored] || !slices.ContainsFunc(b.front.Files, func(o File) bool { return o.Name == f.Stored }) {
			return b.damaged("%s and %s contradict each other about %s", ManifestFile, SealedManifest, f.Name)
		}
		stored[f.Stored] = true
	}
	if len(stored) != len(b.front.Files) {
		return b.damaged("%s and %s contradict each other about the files", ManifestFile, SealedManifest)
	}
	m.Encrypted, m.AuthenticatedBy = b.front.Encrypted, b.front.AuthenticatedBy
	return nil
}

// Locked returns why the content cannot be read; nil if it can. The error wraps [ErrLocked].
func (b *Backup) Locked() error { return b.locked }

// manifestAt opens the manifest of the content.
func (b *Backup) manifestAt() (r io.ReaderAt, done func(), err error) {
	name := ManifestFile
	if b.front.Encrypted != nil {
		name = SealedManifest
	}
	f, info, err := b.disk.open(name)
	if err != nil {
		return nil, nil, b.damage(name, err)
	}
	r, done = f, func() { f.Close() }
	if b.front.Encrypted == nil {
		return r, done, nil
	}
	r, _, err = age.DecryptReaderAt(f, info.Size(), b.keys.Identities...)
	var no *age.NoIdentityMatchError
	if errors.As(err, &no) {
		done()
		return nil, nil, err
	}
	if err != nil {
		done()
		return nil, nil, b.damaged("%s cannot be decrypted: %v", name, err)
	}
	return r, done, nil
}

// content is an open file.
type content struct {
	io.Reader
	f *os.File
}

// Close implements [io.Closer].
func (c content) Close() error { return c.f.Close() }

// openFile opens a file of the content.
func (b *Backup) openFile(entry *File) (io.ReadCloser, error) {
	if b.front.Encrypted == nil {
		f, _, err := b.disk.open(entry.Name)
		if err != nil {
			return nil, b.damage(entry.Name, err)
		}
		return f, nil
	}
	f, _, err := b.disk.open(entry.Stored)
	if err != nil {
		return nil, b.damage(entry.Stored, err)
	}
	r, err := b.decrypt(f, entry)
	if err != nil {
		f.Close()
		return nil, b.damaged("%s cannot be decrypted: %v", entry.Stored, err)
	}
	return content{r, f}, nil
}

// decrypt returns the content of a file.
func (b *Backup) decrypt(f io.Reader, entry *File) (io.Reader, error) {
	r, err := age.Decrypt(f, b.identity)
	if err != nil || len(entry.Skip) == 0 {
		return r, err
	}
	return &skipping{r: r, skip: entry.Skip}, nil
}

// skipping leaves parts of a file out.
type skipping struct {
	r    io.Reader
	at   int64
	skip []Span
}

// Read implements [io.Reader].
func (s *skipping) Read(b []byte) (int, error) {
	for len(s.skip) > 0 {
		next := s.skip[0]
		if s.at < next.At {
			b = b[:min(int64(len(b)), next.At-s.at)]
			break
		}
		if _, err := io.CopyN(io.Discard, s.r, next.Size); err != nil {
			if errors.Is(err, io.EOF) {
				err = io.ErrUnexpectedEOF
			}
			return 0, err
		}
		s.at += next.Size
		s.skip = s.skip[1:]
	}
	n, err := s.r.Read(b)
	s.at += int64(n)
	return n, err
}

// counted hashes and reports what is read.
type counted struct {
	r    io.Reader
	sum  hash.Hash
	read func(int)
}

// Read implements [io.Reader].
func (c *counted) Read(b []byte) (int, error) {
	n, err := c.r.Read(b)
	c.sum.Write(b[:n])
	c.read(n)
	return n, err
}

// verifySealed verifies an encrypted file, and its content if the backup is not locked.
func (b *Backup) verifySealed(ctx context.Context, f io.Reader, want *File, buf []byte, read func(int), wrong func(string, ...any)) {
	src := &counted{f, sha256.New(), read}
	problem := ""
	if b.locked == nil {
		problem = b.sealedProblem(ctx, src, want.Name, buf)
	}
	if err := each(ctx, src, buf, func([]byte) {}); err != nil { // the rest
		wrong("read %s: %v", want.Name, err)
		return
	}
	switch {
	case hex.EncodeToString(src.sum.Sum(nil)) != want.SHA256:
		wrong("%s was modified: its SHA-256 differs", want.Name)
	case problem != "":
		wrong("%s", problem)
	}
}

// sealedProblem returns what is wrong with the content of an encrypted file; empty if nothing is.
func (b *Backup) sealedProblem(ctx context.Context, f io.Reader, stored string, buf []byte) string {
	var problems []string
	wrong := func(format string, a ...any) { problems = append(problems, fmt.Sprintf(format, a...)) }
	if stored == SealedManifest {
		r, err := age.Decrypt(f, b.keys.Identities...)
		if err != nil {
			return fmt.Sprintf("%s cannot be decrypted: %v", stored, err)
		}
		b.verifyDigest(ctx, r, stored, buf, nil, false, func(int) {}, wrong)
		return strings.Join(problems, "; ")
	}
	i := slices.IndexFunc(b.manifest.Files, func(e File) bool { return e.Stored == stored })
	if i < 0 { // unlock has compared the names
		return stored + " does not belong to it"
	}
	r, err := b.decrypt(f, &b.manifest.Files[i])
	if err != nil {
		return fmt.Sprintf("%s cannot be decrypted: %v", stored, err)
	}
	b.verifyContent(ctx, r, &b.manifest.Files[i], buf, func(int) {}, wrong)
	return strings.Join(problems, "; ")
}

// Decrypt writes an unlocked backup without encryption to parent/<ID>/backups, and returns that path. The copy is
// authenticated if the backup is. progress, which may be nil, receives the bytes written.
func (b *Backup) Decrypt(ctx context.Context, parent string, progress func(done, total int64)) (path string, err error) {
	if b.locked != nil {
		return "", fmt.Errorf("decrypt backup %s: %w", b.id, b.locked)
	}
	m := b.manifest
	w, err := Create(parent, b.id)
	if err != nil {
		return "", err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, w.Abort())
		}
	}()
	if b.Authentication() == Authenticated {
		w.Authenticate(b.keys.Secret)
	}
	w.types, w.holes, w.notes, w.etcd, w.from, w.began = m.Types, m.Holes, m.Notes, m.Etcd, m.Cluster, m.Created
	buf := make([]byte, 256<<10)
	for i := range m.Files {
		if err := b.copyFile(ctx, w, &m.Files[i], buf, func(n int) {
			if done := w.bytes.Add(int64(n)); progress != nil {
				progress(done, m.Bytes)
			}
		}); err != nil {
			return "", err
		}
	}
	_, err = w.Commit(Manifest{Secrets: m.Secrets, Created: m.Created})
	return w.Path(), err
}

// copyFile adds a file with its owners to w.
func (b *Backup) copyFile(ctx context.Context, w *Writer, entry *File, buf []byte, wrote func(int)) error {
	from, err := b.openFile(entry)
	if err != nil {
		return err
	}
	defer from.Close()
	if dir, _, ok := strings.Cut(entry.Name, "/"); ok {
		if err := w.disk.ensure(dir); err != nil {
			return err
		}
	}
	to, err := w.create(entry.Name)
	if err != nil {
		return err
	}
	var failed error
	h := sha256.New()
	err = each(ctx, from, buf, func(p []byte) {
		if failed == nil {
			h.Write(p)
			wrote(len(p))
			_, failed = to.Write(p)
		}
	})
	if err = errors.Join(err, failed); err != nil {
		to.close()
		return fmt.Errorf("copy %s: %w", entry.Name, err)
	}
	out := File{Name: entry.Name, Size: entry.Size, Objects: entry.Objects, SHA256: hex.EncodeToString(h.Sum(nil))}
	if entry.SHA256 != "" && out.SHA256 != entry.SHA256 {
		to.close()
		return b.damaged("%s was modified: its SHA-256 differs", entry.Name)
	}
	if err := to.finish(&out); err != nil {
		return err
	}
	w.files = append(w.files, out)
	if entry.Owners == nil {
		return nil
	}
	r, done, err := b.manifestAt()
	if err != nil {
		return err
	}
	defer done()
	owners := io.NewSectionReader(r, b.owners+entry.Owners.At, entry.Owners.Size)
	for {
		n, err := io.ReadFull(owners, buf)
		if n > 0 {
			blk, err := w.spool.add(buf[:n])
			if err != nil {
				return err
			}
			w.owners[entry.Name] = append(w.owners[entry.Name], blk)
		}
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			blk, err := w.spool.add([]byte(",\n")) // which Commit cuts off
			w.owners[entry.Name] = append(w.owners[entry.Name], blk)
			return err
		}
		if err != nil {
			return b.damaged("read %s: %v", SealedManifest, err)
		}
	}
}
