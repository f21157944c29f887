package journal

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"os"
	"slices"
	"strings"
	"testing"
)

func openDir(t *testing.T) *os.Root {
	t.Helper()
	dir, err := os.OpenRoot(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { dir.Close() })
	return dir
}

// open opens a file and returns it with the lines that are kept: all except "bad".
func open(t *testing.T, dir *os.Root, flags int) (*File, []string) {
	t.Helper()
	var lines []string
	f, err := Open(dir, "f", flags, 1<<20, func(line []byte) bool {
		lines = append(lines, strings.TrimSuffix(string(line), "\n"))
		return string(line) != "bad\n"
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f, lines
}

func content(t *testing.T, dir *os.Root) string {
	t.Helper()
	b, err := dir.ReadFile("f")
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func TestRepair(t *testing.T) {
	for _, tt := range []struct{ name, before, after string }{
		{name: "an empty file", before: "", after: "new\n"},
		{name: "complete lines", before: "a\nb\n", after: "a\nb\nnew\n"},
		{name: "a truncated line", before: "a\nb", after: "a\nnew\n"},
		{name: "lines after a damaged one", before: "a\nbad\nb\n", after: "a\nnew\n"},
		{name: "a line longer than the limit", before: "a\n" + strings.Repeat("x", 2<<20) + "\nb\n", after: "a\nnew\n"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := openDir(t)
			if err := dir.WriteFile("f", []byte(tt.before), 0o600); err != nil {
				t.Fatal(err)
			}
			f, _ := open(t, dir, 0)
			if got := content(t, dir); got != tt.before {
				t.Errorf("Open changed the file to %.40q", got)
			}
			if err := f.Repair(); err != nil {
				t.Fatal(err)
			}
			if err := f.Append([]byte("new"), true); err != nil {
				t.Fatal(err)
			}
			if got := content(t, dir); got != tt.after || f.Size() != int64(len(tt.after)) {
				t.Errorf("the file is %.40q and Size %d, want %q", got, f.Size(), tt.after)
			}
		})
	}
}

func TestOpenCreatesOnlyOnRequest(t *testing.T) {
	dir := openDir(t)
	if _, err := Open(dir, "f", 0, 1, nil); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("Open returned %v, want fs.ErrNotExist", err)
	}
	open(t, dir, os.O_CREATE)
	if i, err := dir.Stat("f"); err != nil || i.Mode() != 0o600 {
		t.Errorf("the file is %v, %v, want mode 0600", i, err)
	}
}

func TestDropLast(t *testing.T) {
	dir := openDir(t)
	if err := dir.WriteFile("f", []byte("a\nb\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	f, _ := open(t, dir, 0)
	if err := f.Repair(); err != nil {
		t.Fatal(err)
	}
	if err := f.DropLast(); err != nil {
		t.Fatal(err)
	}
	if err := f.DropLast(); err == nil || content(t, dir) != "a\n" {
		t.Errorf("a second DropLast returned %v and left %q, want an error and %q", err, content(t, dir), "a\n")
	}
	if err := f.Append([]byte("c"), false); err != nil {
		t.Fatal(err)
	}
	if got := content(t, dir); got != "a\nc\n" {
		t.Errorf("the file is %q, want %q", got, "a\nc\n")
	}
}

func TestReplace(t *testing.T) {
	dir := openDir(t)
	if err := dir.WriteFile("f", []byte("old\nold\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := Replace(dir, "f", []byte("new\n"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := f.Append([]byte("more"), true); err != nil {
		t.Fatal(err)
	}
	if got := content(t, dir); got != "new\nmore\n" || f.Size() != int64(len(got)) {
		t.Errorf("the file is %q and Size %d", got, f.Size())
	}
	if _, err := dir.Stat("f.new"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the temporary file: %v, want fs.ErrNotExist", err)
	}
	// A directory at the target makes the rename fail.
	if err := errors.Join(dir.Remove("f"), dir.Mkdir("f", 0o700)); err != nil {
		t.Fatal(err)
	}
	if _, err := Replace(dir, "f", []byte("x\n")); err == nil {
		t.Error("Replace over a directory succeeded")
	}
	if _, err := dir.Stat("f.new"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the temporary file after an error: %v, want fs.ErrNotExist", err)
	}
}

func TestFollow(t *testing.T) {
	stopped, broken := errors.New("stopped"), errors.New("broken")
	open, closed := make(chan struct{}), make(chan struct{})
	close(closed)
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	for _, tt := range []struct {
		name    string
		ctx     context.Context
		stop    <-chan struct{}
		batches []Batch[string]
		sendErr error
		want    string
		err     error
	}{
		{name: "until the final message", ctx: t.Context(), batches: []Batch[string]{{Messages: []string{"a", "b"}, Changed: closed}, {Changed: closed}, {Messages: []string{"c"}, Final: true}}, want: "abc"},
		{name: "until the context ends", ctx: ended, batches: []Batch[string]{{Messages: []string{"a"}, Changed: open}}, want: "a", err: context.Canceled},
		{name: "until stop", ctx: t.Context(), stop: closed, batches: []Batch[string]{{Messages: []string{"a"}, Changed: open}}, want: "a", err: stopped},
		{name: "until the receiver fails", ctx: t.Context(), batches: []Batch[string]{{Messages: []string{"a", "b"}, Changed: closed}}, sendErr: broken, err: broken},
		{name: "until the source fails", ctx: t.Context(), batches: []Batch[string]{{Messages: []string{"a"}, Changed: closed}}, want: "a", err: fs.ErrInvalid},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var got bytes.Buffer
			left := slices.Clone(tt.batches)
			err := Follow(tt.ctx, tt.stop, stopped, func() (Batch[string], error) {
				if len(left) == 0 {
					return Batch[string]{}, fs.ErrInvalid
				}
				b := left[0]
				left = left[1:]
				return b, nil
			}, func(m string) error {
				if tt.sendErr == nil {
					got.WriteString(m)
				}
				return tt.sendErr
			})
			if got.String() != tt.want || !errors.Is(err, tt.err) {
				t.Errorf("sent %q and returned %v, want %q, %v", got.String(), err, tt.want, tt.err)
			}
		})
	}
}
