package sandbox

import (
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
)

// openLog returns an output that appends to path, as the daemon's standard error does.
func openLog(t *testing.T, path string) *os.File {
	t.Helper()
	f, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

func TestLogStaysWithinItsBounds(t *testing.T) {
	const limit = 4096
	path := filepath.Join(t.TempDir(), logName)
	out := openLog(t, path)
	log := slog.New(boundedLog{slog.NewTextHandler(out, nil), &logFile{path: path, limit: limit, outputs: []int{int(out.Fd())}}})

	var all sync.WaitGroup
	for n := range 4 {
		all.Go(func() {
			log := log.With("writer", n).WithGroup("g")
			for i := range 250 {
				log.Info("something happened", "i", i)
			}
		})
	}
	all.Wait()
	log.Info("the last word")

	older, err := os.ReadFile(path + ".1")
	if err != nil {
		t.Fatal(err)
	}
	newer, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	// Each of the four writers may add one record after another writer has checked the size.
	const slack = 4 * 256
	if len(older) < limit || len(older) > limit+slack || len(newer) > limit+slack {
		t.Errorf("sizes %d and %d, want at most %d and a record for each writer", len(older), len(newer), limit)
	}
	if !strings.HasSuffix(string(newer), "msg=\"the last word\"\n") {
		t.Errorf("the newer file ends with %q", lastLines(string(newer), 1))
	}
	for n, line := range strings.Split(strings.TrimSpace(string(older)+string(newer)), "\n") {
		if !strings.HasPrefix(line, "time=") || !strings.Contains(line, "msg=") {
			t.Errorf("line %d is torn: %q", n, line)
		}
	}
	// Writes that bypass the log, like a panic, go to the newer file too.
	fmt.Fprintln(out, "panic: example")
	if b, _ := os.ReadFile(path); !strings.HasSuffix(string(b), "panic: example\n") {
		t.Errorf("what the program wrote itself is not in %s", path)
	}
	entries, _ := os.ReadDir(filepath.Dir(path))
	if len(entries) != 2 {
		t.Errorf("%d files, want 2", len(entries))
	}
}

func TestLogThatIsNotOursIsLeftAlone(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "elsewhere")
	out := openLog(t, path)
	if err := os.WriteFile(filepath.Join(dir, logName), []byte("a daemon's of before\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	log := slog.New(boundedLog{slog.NewTextHandler(out, nil), &logFile{path: filepath.Join(dir, logName), limit: 10, outputs: []int{int(out.Fd())}}})
	for range 3 {
		log.Info("hello")
	}
	if b, _ := os.ReadFile(path); strings.Count(string(b), "msg=hello") != 3 {
		t.Errorf("the output holds %q", b)
	}
	if b, _ := os.ReadFile(filepath.Join(dir, logName)); string(b) != "a daemon's of before\n" {
		t.Errorf("%s holds %q", logName, b)
	}
	if entries, _ := os.ReadDir(dir); len(entries) != 2 {
		t.Errorf("%d files, want 2", len(entries))
	}
}
