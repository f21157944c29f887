package ocipack

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path"
	"slices"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// A File is one file of a layer: a regular file with Content or the content of the file From, a
// link, or a directory. Directories above it need no File.
type File struct {
	Path    string // absolute
	Content string
	From    string
	Link    string // target
	Dir     bool
	Mode    int64
	Owner   int // of user and group
}

// Layer is an uncompressed layer. Compression would cost more time than it saves:
// images travel from one directory of this computer to another.
type Layer struct {
	digest v1.Hash
	size   int64
	write  func(io.Writer) error
}

var _ v1.Layer = (*Layer)(nil)

// NewLayer makes a layer of entries that is the same on every computer: sorted, and as old as date. Files are read again whenever the layer is; they must
// not change meanwhile.
func NewLayer(date time.Time, files []File) (*Layer, error) {
	all := make(map[string]File)
	for _, e := range files {
		all[e.Path] = e
	}
	for _, e := range files {
		for dir := path.Dir(e.Path); dir != "/"; dir = path.Dir(dir) {
			if _, ok := all[dir]; !ok {
				all[dir] = File{Path: dir, Dir: true, Mode: 0o755}
			}
		}
	}
	sorted := slices.SortedFunc(maps.Values(all), func(a, b File) int { return strings.Compare(a.Path, b.Path) })
	return measure(func(w io.Writer) error {
		t := tar.NewWriter(w)
		for _, e := range sorted {
			if err := e.writeTo(t, date); err != nil {
				return err
			}
		}
		return t.Close()
	})
}

// LayerFromFile makes a layer of a tar file.
func LayerFromFile(name string) (*Layer, error) {
	return measure(func(w io.Writer) error {
		f, err := os.Open(name)
		if err != nil {
			return err
		}
		defer f.Close()
		_, err = io.Copy(w, f)
		return err
	})
}

func measure(write func(io.Writer) error) (*Layer, error) {
	h := sha256.New()
	n := &counter{}
	if err := write(io.MultiWriter(h, n)); err != nil {
		return nil, fmt.Errorf("make layer: %w", err)
	}
	return &Layer{digest: v1.Hash{Algorithm: "sha256", Hex: hex.EncodeToString(h.Sum(nil))}, size: n.n, write: write}, nil
}

type counter struct{ n int64 }

func (c *counter) Write(p []byte) (int, error) { c.n += int64(len(p)); return len(p), nil }

func (e File) writeTo(t *tar.Writer, date time.Time) error {
	h := &tar.Header{Name: strings.TrimPrefix(e.Path, "/"), Mode: e.Mode, ModTime: date, Uid: e.Owner, Gid: e.Owner, Format: tar.FormatUSTAR, Typeflag: tar.TypeReg}
	var content io.Reader
	switch {
	case e.Dir:
		h.Typeflag, h.Name = tar.TypeDir, h.Name+"/"
	case e.Link != "":
		h.Typeflag, h.Linkname, h.Mode = tar.TypeSymlink, e.Link, 0o777
	case e.From != "":
		f, err := os.Open(e.From)
		if err != nil {
			return err
		}
		defer f.Close()
		info, err := f.Stat()
		if err != nil {
			return err
		}
		h.Size, content = info.Size(), f
	default:
		h.Size, content = int64(len(e.Content)), strings.NewReader(e.Content)
	}
	if err := t.WriteHeader(h); err != nil {
		return err
	}
	if content == nil {
		return nil
	}
	_, err := io.Copy(t, content)
	return err
}

// WriteFile writes the layer to a tar file.
func (l *Layer) WriteFile(name string) error {
	f, err := os.Create(name)
	if err != nil {
		return err
	}
	return errors.Join(l.write(f), f.Close())
}

// Digest implements [v1.Layer].
func (l *Layer) Digest() (v1.Hash, error) { return l.digest, nil }

// DiffID implements [v1.Layer].
func (l *Layer) DiffID() (v1.Hash, error) { return l.digest, nil }

// Size implements [v1.Layer].
func (l *Layer) Size() (int64, error) { return l.size, nil }

// MediaType implements [v1.Layer].
func (l *Layer) MediaType() (types.MediaType, error) { return types.OCIUncompressedLayer, nil }

// Compressed implements [v1.Layer]: the layer is not compressed.
func (l *Layer) Compressed() (io.ReadCloser, error) { return l.Uncompressed() }

// Uncompressed implements [v1.Layer].
func (l *Layer) Uncompressed() (io.ReadCloser, error) {
	r, w := io.Pipe()
	go func() { w.CloseWithError(l.write(w)) }() // ends when r is closed
	return r, nil
}

// Compressed is a layer with its content in memory, compressed by gzip. Equal content and an equal
// version of Go make equal bytes.
type Compressed struct {
	v1.Layer
	diffID v1.Hash
}

// Compress compresses a layer for registries.
func Compress(l *Layer) (*Compressed, error) {
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	if err := errors.Join(l.write(z), z.Close()); err != nil {
		return nil, fmt.Errorf("compress layer: %w", err)
	}
	return &Compressed{static.NewLayer(b.Bytes(), types.OCILayer), l.digest}, nil
}

// DiffID implements [v1.Layer].
func (c *Compressed) DiffID() (v1.Hash, error) { return c.diffID, nil }

// Uncompressed implements [v1.Layer].
func (c *Compressed) Uncompressed() (io.ReadCloser, error) {
	r, err := c.Compressed()
	if err != nil {
		return nil, err
	}
	return gzip.NewReader(r)
}
