package golden_test

import (
	"os"
	"path/filepath"
	"testing"

	"constellation/internal/golden"
)

// recorder is a test that records failures.
type recorder struct {
	testing.TB
	failed bool
}

func (r *recorder) Helper()               {}
func (r *recorder) Errorf(string, ...any) { r.failed = true }
func (r *recorder) Fatalf(string, ...any) { r.failed = true; panic(r) }

func equal(t *testing.T, path, got string) (failed bool) {
	r := &recorder{TB: t}
	defer func() {
		if p := recover(); p != nil && p != any(r) {
			panic(p)
		}
		failed = r.failed
	}()
	golden.Equal(r, path, got)
	return r.failed
}

func TestEqual(t *testing.T) {
	if golden.Updating() {
		t.Skip("with -update nothing differs")
	}
	path := filepath.Join(t.TempDir(), "file")
	if !equal(t, path, "a") {
		t.Error("a missing file is accepted")
	}
	if err := os.WriteFile(path, []byte("a"), 0o600); err != nil {
		t.Fatal(err)
	}
	if equal(t, path, "a") {
		t.Error("equal content is rejected")
	}
	if !equal(t, path, "b") {
		t.Error("other content is accepted")
	}
	if b, err := os.ReadFile(path); err != nil || string(b) != "a" {
		t.Errorf("without -update the file has changed to %q (%v)", b, err)
	}
}
