package release

import (
	"archive/tar"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// BundleScheme is the URL scheme of a bundle: bundle:PATH.
const BundleScheme = "bundle:"

// ErrBundle means that a file is not a complete bundle.
var ErrBundle = errors.New("it is not a complete bundle")

const (
	bundleManifest = "bundle.json"
	bundleFeed     = "feed/"
	bundleBlobs    = "blobs/sha256/"
	maxBlob        = 64 << 20
)

// BundleContents is bundle.json, the first file of a bundle: a tar archive for air-gapped
// sites. It lists all other files in their order:
//
//	feed/<file>            a whole feed, as its publisher signed it; or none
//	blobs/sha256/<digest>  fetched charts
//
// Its digests detect accidental damage. Trust comes from the feed's signatures and the
// digests of charts, as without a bundle.
type BundleContents struct {
	Schema string        `json:"schema"`
	Charts []BundleChart `json:"charts"`
	Files  []BundleFile  `json:"files"`
}

// BundleChart is a chart in a bundle.
type BundleChart struct {
	Name    string `json:"name"`
	Version string `json:"version"`
	Source  string `json:"source"`
	Digest  string `json:"digest"`
}

// BundleFile is a file of a bundle.
type BundleFile struct {
	Name   string `json:"name"`
	SHA256 string `json:"sha256"`
	Length int64  `json:"length"`
}

// CopyFeed reads the whole feed at a location with the checks of Open; it never uses an older
// copy, and copies none that is older than what was seen at any location. Each file except the
// signatures has the digest of the index.
func CopyFeed(ctx context.Context, location string, o Options) (map[string][]byte, *Feed, error) {
	s, c, now, err := prepare(location, o)
	if err != nil {
		return nil, nil, err
	}
	f, err := current(ctx, s, c, o.Keys, now)
	if err != nil {
		return nil, nil, err
	}
	// The verified bytes are copied: a second request could get others.
	out := map[string][]byte{indexName: []byte(f.raw.Index), indexName + signature: []byte(f.raw.Signature)}
	if f.raw.Roots != "" {
		out[rootName] = []byte(f.raw.Roots)
	}
	get := func(name string, limit int64) error {
		a, err := s.read(ctx, name, limit, "")
		if err != nil {
			return in(s, name, err)
		}
		out[name] = a.bytes
		return nil
	}
	names := slices.Sorted(maps.Keys(f.index.Files))
	for _, name := range names {
		if err := get(name, f.index.Files[name].Length); err != nil {
			return nil, nil, err
		}
		if err := f.index.Files[name].check(out[name]); err != nil {
			return nil, nil, in(s, name, fmt.Errorf("%w: %w", ErrAltered, err))
		}
	}
	for _, r := range f.summaries {
		names, err := f.statementsOf(ctx, r.Version)
		if err != nil {
			return nil, nil, err
		}
		for _, name := range names {
			if err := get(name, MaxStatement); err != nil {
				return nil, nil, err
			}
		}
	}
	for _, name := range names {
		if err := get(name+signature, maxSignature); err != nil {
			return nil, nil, err
		}
	}
	return out, f, nil
}

// WriteBundle writes a bundle of a feed, which may be empty, and of charts' archives by
// digest. The output is reproducible.
func WriteBundle(w io.Writer, c BundleContents, feed, blobs map[string][]byte) error {
	all := map[string][]byte{}
	for name, b := range feed {
		all[bundleFeed+name] = b
	}
	for dgst, b := range blobs {
		all[bundleBlobs+strings.TrimPrefix(dgst, "sha256:")] = b
	}
	c.Schema, c.Files = schema, []BundleFile{}
	names := slices.Sorted(maps.Keys(all))
	for _, name := range names {
		c.Files = append(c.Files, BundleFile{name, digest(all[name]), int64(len(all[name]))})
	}
	if c.Charts == nil {
		c.Charts = []BundleChart{}
	}
	manifest, err := encodeJSON(c)
	if err != nil {
		return err
	}
	t := tar.NewWriter(w)
	for i := -1; i < len(names); i++ {
		name, b := bundleManifest, manifest
		if i >= 0 {
			name, b = names[i], all[names[i]]
		}
		if err := t.WriteHeader(&tar.Header{Name: name, Mode: 0o644, Size: int64(len(b)), Typeflag: tar.TypeReg, Format: tar.FormatUSTAR}); err != nil {
			return err
		}
		if _, err := t.Write(b); err != nil {
			return err
		}
	}
	return t.Close()
}

// Bundle is a bundle whose files were all verified.
type Bundle struct {
	BundleContents
	path string
	at   map[string]int64 // offset of a file
}

// OpenBundle verifies the whole bundle at a path. The error wraps ErrBundle if it is not a
// bundle, or was modified.
func OpenBundle(path string) (*Bundle, error) {
	path, err := filepath.Abs(path)
	if err != nil {
		return nil, err
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, withoutName(err)
	}
	defer f.Close()
	if info, err := f.Stat(); err != nil || !info.Mode().IsRegular() {
		return nil, fmt.Errorf("%w: it is not a regular file", ErrBundle)
	}
	b := &Bundle{path: path, at: map[string]int64{}}
	if err := b.read(f); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrBundle, err)
	}
	return b, nil
}

func withoutName(err error) error {
	var p *fs.PathError
	if errors.As(err, &p) {
		return p.Err
	}
	return err
}

func (b *Bundle) read(f *os.File) error {
	t := tar.NewReader(f)
	if _, err := nextFile(t, bundleManifest, maxIndex); err != nil {
		return err
	}
	manifest, err := io.ReadAll(t)
	if err != nil {
		return fmt.Errorf("it ends in the middle of %s", bundleManifest)
	}
	if err := strictJSON(manifest, &b.BundleContents); err != nil {
		return fmt.Errorf("%s cannot be read: %w", bundleManifest, err)
	}
	if b.Schema != schema {
		return fmt.Errorf("its format is %q, want %q", shorten(b.Schema), schema)
	}
	for _, want := range b.Files {
		if !isBundled(want.Name, want.SHA256) || b.at[want.Name] != 0 {
			return fmt.Errorf("%s names %q, which is unknown or a duplicate", bundleManifest, shorten(want.Name))
		}
		h, err := nextFile(t, want.Name, maxBlob)
		if err != nil {
			return err
		}
		if b.at[want.Name], err = f.Seek(0, io.SeekCurrent); err != nil {
			return err
		}
		sum := sha256.New()
		if n, err := io.Copy(sum, t); err != nil || n != h.Size {
			return fmt.Errorf("it ends in the middle of %s", want.Name)
		}
		if h.Size != want.Length || hex.EncodeToString(sum.Sum(nil)) != want.SHA256 {
			return fmt.Errorf("%s was modified after the bundle was made", want.Name)
		}
	}
	if _, err := t.Next(); !errors.Is(err, io.EOF) {
		return errors.New("unexpected data after its last file")
	}
	if n, err := f.Read(make([]byte, 1)); n > 0 || !errors.Is(err, io.EOF) {
		return errors.New("unexpected data after its end")
	}
	return nil
}

// nextFile goes to the next file of a bundle, which must be name with at most limit bytes.
func nextFile(t *tar.Reader, name string, limit int64) (*tar.Header, error) {
	h, err := t.Next()
	switch {
	case errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF):
		return nil, fmt.Errorf("it ends before %s", name)
	case err != nil:
		return nil, fmt.Errorf("at %s it is damaged", name)
	case h.Format&tar.FormatUSTAR == 0 || len(h.PAXRecords) > 0:
		return nil, fmt.Errorf("%s is in another format of tar", name)
	case h.Name != name || h.Typeflag != tar.TypeReg:
		return nil, fmt.Errorf("it holds %s instead of %s", shorten(h.Name), name)
	case h.Size > limit:
		return nil, fmt.Errorf("%s has %d bytes, more than %d", name, h.Size, limit)
	}
	return h, nil
}

// isBundled reports whether a bundle may contain a file called name: one of a feed, or a blob that is
// called after its digest.
func isBundled(name, digest string) bool {
	if feed, ok := strings.CutPrefix(name, bundleFeed); ok {
		plain := strings.TrimSuffix(feed, signature)
		return plain == indexName || feed == rootName || validName(plain) || isStatement(plain)
	}
	blob, ok := strings.CutPrefix(name, bundleBlobs)
	return ok && blob == digest
}

// HasFeed reports whether it contains a feed.
func (b *Bundle) HasFeed() bool { return b.at[bundleFeed+indexName] != 0 }

// Blob returns a chart's archive by digest; false if it is not in the bundle.
func (b *Bundle) Blob(dgst string) ([]byte, bool, error) {
	return b.file(bundleBlobs + strings.TrimPrefix(dgst, "sha256:"))
}

// file returns a file, which must not have changed since the bundle was opened.
func (b *Bundle) file(name string) ([]byte, bool, error) {
	i := slices.IndexFunc(b.Files, func(f BundleFile) bool { return f.Name == name })
	if i < 0 {
		return nil, false, nil
	}
	f, err := os.Open(b.path)
	if err != nil {
		return nil, false, withoutName(err)
	}
	defer f.Close()
	out := make([]byte, b.Files[i].Length)
	if _, err := f.ReadAt(out, b.at[name]); err != nil || digest(out) != b.Files[i].SHA256 {
		return nil, false, fmt.Errorf("%w: %s has changed in the meantime", ErrBundle, name)
	}
	return out, true, nil
}

// bundleStore is the store of a bundle's feed.
type bundleStore struct{ b *Bundle }

func (s bundleStore) location() string { return BundleScheme + s.b.path }

func (s bundleStore) read(ctx context.Context, name string, limit int64, _ string) (answer, error) {
	if err := ctx.Err(); err != nil {
		return answer{}, err
	}
	b, ok, err := s.b.file(bundleFeed + name)
	switch {
	case err != nil:
		return answer{}, fmt.Errorf("%w: %w", ErrUnreachable, err)
	case !ok:
		return answer{}, ErrAbsent
	case int64(len(b)) > limit:
		return answer{}, tooLong(int64(len(b)), limit)
	}
	return answer{bytes: b}, nil
}
