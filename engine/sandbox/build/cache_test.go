package build

import (
	"bufio"
	"context"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

// adopted returns a store with one file in it, called bin/x and made as "key" says.
func adopted(t *testing.T) *store {
	t.Helper()
	cache := t.TempDir()
	s, err := openStore(cache, "v1")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(s.dir, 0o755); err != nil {
		t.Fatal(err)
	}
	stage, remove, err := s.stage()
	if err != nil {
		t.Fatal(err)
	}
	defer remove()
	file := filepath.Join(stage, "x")
	if err := os.WriteFile(file, []byte("content"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := s.adopt(file, "bin/x", record{Key: "key"}); err != nil {
		t.Fatal(err)
	}
	if s, err = openStore(cache, "v1"); err != nil { // as another process sees it
		t.Fatal(err)
	}
	return s
}

func TestStoreVouches(t *testing.T) {
	later := time.Now().Add(time.Hour)
	for _, tt := range []struct {
		name string
		do   func(t *testing.T, file string)
		key  string
		want bool
	}{
		{name: "for a file as it was made", do: func(*testing.T, string) {}, key: "key", want: true},
		{name: "not for one that was made otherwise", do: func(*testing.T, string) {}, key: "other", want: false},
		{name: "for a copy with another time", do: func(t *testing.T, file string) { touch(t, file, later) }, key: "key", want: true},
		{name: "not for a truncated one", do: func(t *testing.T, file string) {
			if err := os.Truncate(file, 3); err != nil {
				t.Fatal(err)
			}
		}, key: "key", want: false},
		{name: "not for one of the same size that was altered", do: func(t *testing.T, file string) {
			if err := os.WriteFile(file, []byte("CONTENT"), 0o755); err != nil {
				t.Fatal(err)
			}
			touch(t, file, later)
		}, key: "key", want: false},
		{name: "not for one that is gone", do: func(t *testing.T, file string) {
			if err := os.Remove(file); err != nil {
				t.Fatal(err)
			}
		}, key: "key", want: false},
		{name: "not for a directory", do: func(t *testing.T, file string) {
			if err := errors.Join(os.Remove(file), os.Mkdir(file, 0o755)); err != nil {
				t.Fatal(err)
			}
		}, key: "key", want: false},
		{name: "not when its manifest is broken", do: func(t *testing.T, file string) {
			if err := os.Truncate(filepath.Join(filepath.Dir(file), "..", manifestFile), 20); err != nil {
				t.Fatal(err)
			}
		}, key: "key", want: false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := adopted(t)
			tt.do(t, s.path("bin/x"))
			s, err := openStore(filepath.Dir(filepath.Dir(s.dir)), "v1")
			if err != nil {
				t.Fatal(err)
			}
			if got := s.has("bin/x", tt.key); got != tt.want {
				t.Errorf("has is %v, want %v", got, tt.want)
			}
		})
	}
}

func touch(t *testing.T, file string, at time.Time) {
	t.Helper()
	if err := os.Chtimes(file, at, at); err != nil {
		t.Fatal(err)
	}
}

func TestTouchedFileIsReadOnce(t *testing.T) {
	s := adopted(t)
	at := time.Now().Add(time.Hour)
	touch(t, s.path("bin/x"), at)
	if !s.has("bin/x", "key") {
		t.Fatal("a touched file is not taken")
	}
	if err := s.save(); err != nil {
		t.Fatal(err)
	}
	s, err := openStore(filepath.Dir(filepath.Dir(s.dir)), "v1")
	if err != nil {
		t.Fatal(err)
	}
	if got := s.files["bin/x"].Modified; !got.Equal(at) {
		t.Errorf("the manifest has the time %v, want %v: the file is read every time", got, at)
	}
}

func TestSweepRemovesUnfinishedWorkOnly(t *testing.T) {
	s := adopted(t)
	left, _, err := s.stage() // as a killed process leaves it
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(left, "half"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := s.sweep(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(left); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("unfinished work is still there: %v", err)
	}
	if !s.has("bin/x", "key") {
		t.Error("finished work is gone")
	}
}

func TestLockIsHeldByOne(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	var inside, most int
	var mu sync.Mutex
	var all sync.WaitGroup
	for range 5 {
		all.Go(func() {
			unlock, err := lock(t.Context(), path, func(string) {})
			if err != nil {
				t.Error(err)
				return
			}
			mu.Lock()
			inside++
			most = max(most, inside)
			mu.Unlock()
			time.Sleep(time.Millisecond) // long enough for the others to try
			mu.Lock()
			inside--
			mu.Unlock()
			unlock()
		})
	}
	all.Wait()
	if most != 1 {
		t.Errorf("%d held the lock at once", most)
	}
}

func TestLockWaitsForAnotherProcessAndItsDeath(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	if os.Getenv("LOCK") != "" { // this is the other process
		if _, err := lock(t.Context(), os.Getenv("LOCK"), func(string) {}); err != nil {
			t.Fatal(err)
		}
		os.Stdout.WriteString("locked\n")
		select {}
	}
	other := exec.Command(os.Args[0], "-test.run=^"+t.Name()+"$")
	other.Env = append(os.Environ(), "LOCK="+path)
	out, err := other.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := other.Start(); err != nil {
		t.Fatal(err)
	}
	defer other.Wait()
	defer other.Process.Kill()
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil || line != "locked\n" {
		t.Fatalf("the other process has written %q, %v", line, err)
	}

	ctx, cancel := context.WithCancel(t.Context())
	_, err = lock(ctx, path, func(string) { cancel() })
	if !errors.Is(err, context.Canceled) {
		t.Errorf("waiting for a lock ends with %v, want the end of the context", err)
	}
	var holder string
	unlock, err := lock(t.Context(), path, func(h string) {
		holder = h
		other.Process.Kill()
	})
	if err != nil {
		t.Fatal(err)
	}
	unlock()
	if !strings.HasPrefix(holder, "process ") {
		t.Errorf("the lock was held by %q, want the other process by its number", holder)
	}
}
