package machine

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"
)

func TestUnusedCacheEntriesArePruned(t *testing.T) {
	const month = 30 * 24 * time.Hour
	cache := t.TempDir()
	changes, err := customisation()
	if err != nil {
		t.Fatal(err)
	}
	current := rootfsKey(changes)
	put := func(name string, age time.Duration) string {
		t.Helper()
		dir := filepath.Join(cache, name)
		if err := os.MkdirAll(filepath.Join(dir, "tree", "usr"), 0o755); err != nil {
			t.Fatal(err)
		}
		when := time.Now().Add(-age)
		if err := os.Chtimes(dir, when, when); err != nil {
			t.Fatal(err)
		}
		return dir
	}
	put("rootfs/"+current, 2*month)
	put("rootfs/bookworm-old", 2*month)
	put("rootfs/bookworm-recent", month-time.Hour)
	kept := put("rootfs/bookworm-kept", 2*month)
	mounted := put("rootfs/bookworm-mounted", 2*month)
	put("os-images/v1.0.0-old", month+time.Hour)
	used := put("os-images/v1.0.0-kept", month+time.Hour)
	put("os-images/v1.1.0-recent", time.Hour)
	put("kubernetes/v1.30.0", 12*month)
	if err := os.WriteFile(filepath.Join(cache, "rootfs", "lock"), nil, 0o600); err != nil {
		t.Fatal(err)
	}

	left := []string{
		"kubernetes/v1.30.0", "os-images/lock", "os-images/v1.0.0-kept", "os-images/v1.1.0-recent",
		"rootfs/" + current, "rootfs/bookworm-kept", "rootfs/bookworm-recent", "rootfs/lock",
	}
	gone := []string{filepath.Join(cache, "os-images/v1.0.0-old"), filepath.Join(cache, "rootfs/bookworm-old")}
	// Only root can mount, and -short mounts nothing. Without a mount it is old like the others.
	if root := filepath.Join(t.TempDir(), "root"); os.Geteuid() == 0 && !testing.Short() {
		for _, dir := range []string{root, root + "-upper", root + "-work"} {
			if err := os.Mkdir(dir, 0o755); err != nil {
				t.Fatal(err)
			}
		}
		if err := mountOverlay(root, root+"-upper", root+"-work", filepath.Join(mounted, "tree")); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := unmountBelow(context.Background(), root); err != nil {
				t.Error(err)
			}
		})
		left = append(left, "rootfs/bookworm-mounted")
	} else {
		gone = slices.Insert(gone, 1, mounted) // in the order of names
	}

	removed, err := Prune(t.Context(), cache, []string{kept, used}, month)
	if err != nil || !slices.Equal(removed, gone) {
		t.Errorf("removed %q, %v; want %q", removed, err, gone)
	}
	var have []string
	for _, pattern := range []string{"*/*", "*/.*"} {
		found, _ := filepath.Glob(filepath.Join(cache, pattern))
		for _, f := range found {
			name, _ := filepath.Rel(cache, f)
			have = append(have, name)
		}
	}
	slices.Sort(have)
	slices.Sort(left)
	if !slices.Equal(have, left) {
		t.Errorf("left are %q, want %q", have, left)
	}

	if again, err := Prune(t.Context(), cache, []string{kept, used}, month); err != nil || len(again) != 0 {
		t.Errorf("a second time removed %q, %v", again, err)
	}
	if none, err := Prune(t.Context(), filepath.Join(cache, "not", "there"), nil, month); err != nil || len(none) != 0 {
		t.Errorf("without a cache removed %q, %v", none, err)
	}
}

func TestUseKeepsARootFileSystem(t *testing.T) {
	cache := t.TempDir()
	changes, err := customisation()
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(cache, "rootfs", rootfsKey(changes))
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	long := time.Now().Add(-1000 * time.Hour)
	if err := os.Chtimes(dir, long, long); err != nil {
		t.Fatal(err)
	}
	if got, err := Rootfs(t.Context(), cache, nil); err != nil || got != dir {
		t.Fatalf("got %q, %v, want %q", got, err, dir)
	}
	if info, err := os.Stat(dir); err != nil || time.Since(info.ModTime()) > time.Hour {
		t.Errorf("it was used and looks as old as before: %v, %v", info.ModTime(), err)
	}
}
