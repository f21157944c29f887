package backup

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"constellation/internal/testneeds"
)

// whole is the content of a whole backup of fill.
const wholeObjects = 12

// make writes a backup with every feature, like the engine does; before may be nil.
func makeBackup(dir string, before func(op, name string, n int) error) (err error) {
	w, err := create(dir, testID, before)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, w.Abort())
		}
	}()
	if err := fill(w); err != nil {
		return err
	}
	if err := w.Snapshot(func(out Sink) (Snapshot, error) {
		db := []byte(strings.Repeat("etcd", 1024))
		sum := sha256.Sum256(db)
		_, err := out.Write(append(db, sum[:]...))
		return Snapshot{Revision: 7}, err
	}); err != nil {
		return err
	}
	_, err = w.Commit(Manifest{})
	return err
}

// verdict describes the content of dir: nothing, whole, or why it is not whole. It fails the
// test if something verifies without being whole.
func verdict(t *testing.T, dir string) string {
	t.Helper()
	all, err := ListVerified(t.Context(), dir, Keys{}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if len(all) == 0 {
		return "nothing"
	}
	if len(all) != 1 {
		t.Fatalf("%d backups", len(all))
	}
	if !all[0].Complete {
		return all[0].Why
	}
	b, err := Open(dir, testID, Keys{})
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	n := 0
	for _, typ := range b.Manifest().Types {
		for _, err := range b.Objects(typ) {
			if err != nil {
				t.Fatal(err)
			}
			n++
		}
	}
	if n != wholeObjects || b.Manifest().Etcd.Size != 4128 {
		t.Errorf("it verifies but has %d objects and %d bytes of etcd", n, b.Manifest().Etcd.Size)
	}
	return "whole"
}

// effects counts the write operations of makeBackup.
func effects(t *testing.T) (ops []string) {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "runs")
	if err := makeBackup(dir, func(op, name string, _ int) error { ops = append(ops, op+" "+name); return nil }); err != nil {
		t.Fatal(err)
	}
	if v := verdict(t, dir); v != "whole" {
		t.Fatal(v)
	}
	return ops
}

func TestKillAtEachEffect(t *testing.T) {
	ops := effects(t)
	killed := errors.New("killed")
	seen := map[string]int{}
	for i := range ops {
		dir := filepath.Join(t.TempDir(), "runs")
		n := 0
		err := makeBackup(dir, func(string, string, int) error {
			if n++; n > i { // a killed process does nothing more, including Abort
				return killed
			}
			return nil
		})
		if !errors.Is(err, killed) {
			t.Fatalf("before %q: %v", ops[i], err)
		}
		v := verdict(t, dir)
		seen[v]++
		if renamed := i > slices.IndexFunc(ops, func(op string) bool { return op == opRename+" "+ManifestFile }); (v == "whole") != renamed {
			t.Errorf("before %q: %s", ops[i], v)
		}
	}
	t.Logf("%d points: %v", len(ops), seen)
}

func TestFailureOfEachEffect(t *testing.T) {
	ops := effects(t)
	for _, fault := range []error{syscall.ENOSPC, syscall.EIO, syscall.EDQUOT, syscall.EROFS} {
		for i := range ops {
			dir := filepath.Join(t.TempDir(), "runs")
			n := 0
			err := makeBackup(dir, func(string, string, int) error {
				if n++; n == i+1 {
					return fault
				}
				return nil
			})
			if !errors.Is(err, fault) {
				t.Fatalf("%v at %q: %v", fault, ops[i], err)
			}
			if v := verdict(t, dir); v != "nothing" {
				t.Errorf("%v at %q leaves: %s", fault, ops[i], v)
			}
		}
	}
}

func TestSyncBeforeManifestIsRenamed(t *testing.T) {
	ops := effects(t)
	at := slices.Index(ops, opRename+" "+ManifestFile)
	if at < 0 || slices.Index(ops[at:], opSyncDir+" .") != 1 || len(ops) != at+2 {
		t.Fatalf("the end is %q", ops[max(0, at):])
	}
	dirty, entries := map[string]bool{}, map[string]bool{}
	for _, op := range ops[:at] {
		for _, kind := range []string{opSyncDir, opSync, opWrite, opCreate, opMkdir, opCut, opRemove} {
			name, ok := strings.CutPrefix(op, kind+" ")
			if !ok {
				continue
			}
			switch kind {
			case opWrite, opCut:
				dirty[name] = name != spoolFile
			case opSync:
				delete(dirty, name)
			case opCreate, opMkdir:
				dirty[name] = kind == opCreate && name != spoolFile
				entries[name] = true
			case opSyncDir:
				for e := range entries {
					if filepath.Dir(e) == name || name == "." && !strings.Contains(e, "/") {
						delete(entries, e)
					}
				}
			}
			break
		}
	}
	for name, d := range dirty {
		if d {
			t.Errorf("%s is not synced", name)
		}
	}
	for name := range entries {
		t.Errorf("the directory of %s is not synced", name)
	}
}

func TestVerifyDetectsEveryFlippedBit(t *testing.T) {
	testneeds.Time(t, "10 s")
	dir := filepath.Join(t.TempDir(), "runs")
	if err := makeBackup(dir, nil); err != nil {
		t.Fatal(err)
	}
	root := filepath.Join(dir, testID, Dir)
	bits := 0
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		good, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		for i := range good {
			bad := bytes.Clone(good)
			bad[i] ^= 1 << (i % 8)
			f, err := os.OpenFile(path, os.O_WRONLY, 0)
			if err != nil {
				return err
			}
			_, err = f.WriteAt(bad[i:i+1], int64(i))
			if err = errors.Join(err, f.Close()); err != nil {
				return err
			}
			bits++
			b, err := Open(dir, testID, Keys{})
			if err == nil {
				err = b.Verify(context.Background(), nil)
				b.Close()
			}
			if err == nil {
				t.Errorf("%s, byte %d: not found", filepath.Base(path), i)
			}
			if err := os.WriteFile(path, good, 0o600); err != nil {
				return err
			}
		}
		return os.WriteFile(path, good, 0o600)
	})
	if err != nil {
		t.Fatal(err)
	}
	if v := verdict(t, dir); v != "whole" || bits < 5000 {
		t.Errorf("%s after %d bits", v, bits)
	}
}

func TestVerifyDetectsMissingAndUnexpectedFiles(t *testing.T) {
	for _, tt := range []struct {
		name   string
		change func(root string) error
		want   string // contained in the reason
	}{
		{name: "a file less", change: func(r string) error { return os.Remove(filepath.Join(r, "a.example.com/widgets.json")) }, want: "widgets.json is missing"},
		{name: "a file more", change: func(r string) error { return os.WriteFile(filepath.Join(r, "a.example.com/x.json"), nil, 0o600) }, want: "x.json does not belong to it"},
		{name: "a directory more", change: func(r string) error { return os.Mkdir(filepath.Join(r, "x"), 0o700) }, want: "x does not belong to it"},
		{name: "a truncated file", change: func(r string) error { return os.Truncate(filepath.Join(r, SnapshotFile), 10) }, want: "has 10 bytes, want 4128"},
		{name: "a truncated manifest", change: func(r string) error { return os.Truncate(filepath.Join(r, ManifestFile), 100) }, want: "manifest.json is truncated"},
		{name: "no manifest", change: func(r string) error { return os.Remove(filepath.Join(r, ManifestFile)) }, want: "the backup was not completed"},
		{name: "a file that is a link", change: func(r string) error {
			f := filepath.Join(r, "a.example.com/widgets.json")
			return errors.Join(os.Rename(f, r+"/../moved"), os.Symlink(r+"/../moved", f))
		}, want: "it is a symbolic link"},
		{name: "a file that others may write", change: func(r string) error { return os.Chmod(filepath.Join(r, "a.example.com/widgets.json"), 0o620) }, want: "others may write it"},
		{name: "a directory that others may write", change: func(r string) error { return os.Chmod(filepath.Join(r, "a.example.com"), 0o770) }, want: "others may write it"},
		{name: "a directory that is a link", change: func(r string) error {
			d := filepath.Join(r, "a.example.com")
			return errors.Join(os.Rename(d, r+"/../moved"), os.Symlink("../moved", d))
		}, want: "a.example.com does not belong to it"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "runs")
			if err := makeBackup(dir, nil); err != nil {
				t.Fatal(err)
			}
			if err := tt.change(filepath.Join(dir, testID, Dir)); err != nil {
				t.Fatal(err)
			}
			var all []string
			b, err := Open(dir, testID, Keys{})
			if err == nil {
				err = b.Verify(t.Context(), nil)
				b.Close()
			}
			var n *NotWhole
			if errors.As(err, &n) {
				all = n.Damage
			}
			if !strings.Contains(strings.Join(all, "\n"), tt.want) {
				t.Errorf("%v: %q", err, all)
			}
		})
	}
}

func TestUnsafeDirectoriesAreRefused(t *testing.T) {
	for _, tt := range []struct {
		name   string
		change func(dir string) error
	}{
		{"a link", func(d string) error { return errors.Join(os.Mkdir(d+"2", 0o700), os.Symlink(d+"2", d)) }},
		{"writable by the group", func(d string) error { return errors.Join(os.Mkdir(d, 0o700), os.Chmod(d, 0o770)) }},
		{"writable by all", func(d string) error { return errors.Join(os.Mkdir(d, 0o700), os.Chmod(d, 0o777)) }},
		{"a file", func(d string) error { return os.WriteFile(d, nil, 0o600) }},
		{"that of a run is a link", func(d string) error {
			return errors.Join(os.Mkdir(d, 0o700), os.Mkdir(d+"2", 0o700), os.Symlink(d+"2", filepath.Join(d, testID)))
		}},
		{"somebody else's", func(d string) error {
			if os.Geteuid() != 0 {
				return errors.ErrUnsupported // only root can change the owner
			}
			return errors.Join(os.Mkdir(d, 0o700), os.Chown(d, 12345, 12345))
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "runs")
			err := tt.change(dir)
			if errors.Is(err, errors.ErrUnsupported) {
				t.Skip("only root can give a directory away")
			}
			if err != nil {
				t.Fatal(err)
			}
			if _, err := Create(dir, testID); !errors.Is(err, ErrRefused) {
				t.Errorf("create: %v", err)
			}
			if _, err := Open(dir, testID, Keys{}); !errors.Is(err, ErrRefused) {
				t.Errorf("open: %v", err)
			}
		})
	}
}

func TestHolesAreNotWhole(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "runs")
	w, err := Create(dir, testID)
	if err != nil {
		t.Fatal(err)
	}
	w.Hole(Hole{Group: "example.com", Resource: "widgets", Reason: "its conversion webhook does not answer"})
	if _, err := w.Commit(Manifest{}); err != nil {
		t.Fatal(err)
	}
	if v := verdict(t, dir); v != "it lacks widgets.example.com: its conversion webhook does not answer" {
		t.Error(v)
	}
}

func TestPrune(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "runs")
	put := func(day int, whole bool) string {
		id := fmt.Sprintf("backup-202611%02d070501-1a2b3c4d", day)
		w, err := Create(dir, id)
		if err != nil {
			t.Fatal(err)
		}
		if whole {
			if _, err := w.Commit(Manifest{Created: time.Date(2026, 11, day, 7, 5, 1, 0, time.UTC)}); err != nil {
				t.Fatal(err)
			}
		}
		return id
	}
	torn, first, second, third, newest := put(1, false), put(2, true), put(3, true), put(4, true), put(5, false)
	if err := os.WriteFile(filepath.Join(dir, first, "plan.json"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	got, err := Prune(dir, 2, Keys{})
	if err != nil || !slices.Equal(got, []string{torn, first}) {
		t.Errorf("%v, %v", got, err)
	}
	if got, err := Prune(dir, 0, Keys{}); err != nil || !slices.Equal(got, []string{second}) {
		t.Errorf("keep none: %v, %v", got, err)
	}
	all, err := List(dir, Keys{})
	if err != nil {
		t.Fatal(err)
	}
	var ids []string
	for _, e := range all {
		ids = append(ids, e.ID)
	}
	slices.Sort(ids)
	if !slices.Equal(ids, []string{third, newest}) {
		t.Errorf("left: %v", ids)
	}
	if _, err := os.Stat(filepath.Join(dir, first, "plan.json")); err != nil {
		t.Errorf("the record of the run: %v", err)
	}
}

func TestKilledPruneLeavesNoValidBackup(t *testing.T) {
	for i := range 100 {
		dir := filepath.Join(t.TempDir(), "runs")
		if err := makeBackup(dir, nil); err != nil {
			t.Fatal(err)
		}
		d, err := openDisk(dir)
		if err != nil {
			t.Fatal(err)
		}
		n := 0
		d.before = func(string, string, int) error {
			if n++; n > i {
				return errors.New("killed")
			}
			return nil
		}
		err = d.removeBackup(testID)
		d.close()
		if v := verdict(t, dir); i > 0 && v == "whole" {
			t.Errorf("after %d effects: %s", i, v)
		}
		if err == nil {
			return
		}
	}
	t.Error("it does not terminate")
}

// helperDir makes the test binary run the program to kill.
const helperDir = "BACKUP_TEST_HELPER_DIR"

func TestMain(m *testing.M) {
	if dir := os.Getenv(helperDir); dir != "" {
		if err := makeBackup(dir, nil); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// TestKernelFaults injects faults into the system calls of a process of its own, as the tests
// above do into the package's operations: it kills the process at each, or lets the call fail.
func TestKernelFaults(t *testing.T) {
	testneeds.Time(t, "half a minute: it starts hundreds of processes")
	strace := testneeds.Program(t, "strace", "strace")
	log := filepath.Join(t.TempDir(), "calls")
	run := func(args ...string) (dir string, err error) {
		dir = filepath.Join(t.TempDir(), "runs")
		cmd := exec.CommandContext(t.Context(), strace, slices.Concat([]string{"-f", "-o", log}, args, []string{os.Args[0]})...)
		cmd.Env = append(os.Environ(), helperDir+"="+dir, "GOMAXPROCS=1")
		err = cmd.Run()
		return dir, err
	}
	if dir, err := run(); err != nil || verdict(t, dir) != "whole" {
		t.Skipf("strace cannot trace here: %v", err)
	}
	text, err := os.ReadFile(log)
	if err != nil {
		t.Fatal(err)
	}
	runs, whole := 0, 0
	for _, call := range []string{"mkdirat", "openat", "write", "pwrite64", "fsync", "renameat", "unlinkat"} {
		for _, fault := range []string{"signal=KILL", "error=ENOSPC", "error=EIO", "error=EDQUOT"} {
			for n := range bytes.Count(text, []byte(" "+call+"(")) {
				dir, err := run("-e", fmt.Sprintf("inject=%s:%s:when=%d", call, fault, n+1))
				runs++
				v := "nothing"
				if _, serr := os.Stat(dir); serr == nil {
					v = verdict(t, dir)
				}
				if v == "whole" {
					whole++
				}
				if err == nil && v != "whole" { // Go's runtime tolerates failures of its own calls
					t.Errorf("%s %s %d: exit 0, but found: %s", call, fault, n+1, v)
				}
			}
		}
	}
	t.Logf("%d runs, whole after %d", runs, whole)
}
