package support

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"fmt"
	"io"
	"time"
)

// archive writes a compressed tar archive. All its files are in one folder.
type archive struct {
	gz   *gzip.Writer
	tar  *tar.Writer
	root string
	now  time.Time
}

func newArchive(w io.Writer, root string, now time.Time) *archive {
	gz := gzip.NewWriter(w)
	return &archive{gz: gz, tar: tar.NewWriter(gz), root: root, now: now}
}

func (a *archive) add(path string, b []byte) error {
	h := &tar.Header{Name: a.root + "/" + path, Mode: 0o600, Size: int64(len(b)), ModTime: a.now.Truncate(time.Second), Typeflag: tar.TypeReg}
	if err := a.tar.WriteHeader(h); err != nil {
		return err
	}
	_, err := a.tar.Write(b)
	return err
}

func (a *archive) close() error {
	if err := a.tar.Close(); err != nil {
		return err
	}
	return a.gz.Close()
}

// encode returns v as JSON for people.
func encode(v any) ([]byte, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	if err := e.Encode(v); err != nil {
		return nil, fmt.Errorf("encode JSON: %w", err)
	}
	return b.Bytes(), nil
}

// tail keeps the last limit bytes of what is written to it.
type tail struct {
	limit int
	b     []byte
	total int64
}

// Write implements [io.Writer].
func (t *tail) Write(p []byte) (int, error) {
	t.total += int64(len(p))
	t.b = append(t.b, p...)
	if len(t.b) > 2*t.limit {
		t.b = t.b[:copy(t.b, t.b[len(t.b)-t.limit:])]
	}
	return len(p), nil
}

// maxCutLine bounds the incomplete line at the beginning of what a tail kept. A secret that was cut is in it.
const maxCutLine = 64 << 10

// lines returns the last complete lines, and what was left out before them; empty if nothing was.
func (t *tail) lines() (b []byte, cut string) {
	b = t.b
	if len(b) > t.limit {
		b = b[len(b)-t.limit:]
	}
	if int64(len(b)) == t.total {
		return b, ""
	}
	if i := bytes.IndexByte(b, '\n'); i >= 0 && i < maxCutLine {
		b = b[i+1:]
	} else {
		b = b[min(maxCutLine, len(b)):]
	}
	return b, fmt.Sprintf("the first %d of %d bytes are left out", t.total-int64(len(b)), t.total)
}
