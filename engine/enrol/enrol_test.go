package enrol_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"constellation/engine/enrol"
	"constellation/engine/plan"
	"constellation/engine/sshhost"
	"constellation/engine/sshhost/sshdtest"
	"constellation/internal/testneeds"
)

// Programs of Debian and systemd, which would change this computer. They keep their state in files below
// $FAKE. The package "runtime" has a program, a configuration file and a library.
const (
	fakeSystemctl = `#!/bin/sh
[ "$1" = -q ] && shift
verb=$1 unit=$2
for last; do :; done
known() { [ -e "$FAKE/machine/etc/systemd/$1" ] || [ -e "$FAKE/known/$1" ]; }
case $verb in
show) if known "$last"; then echo loaded; else echo not-found; fi ;;
is-enabled) if [ -e "$FAKE/enabled/$unit" ]; then echo enabled; else echo disabled; exit 1; fi ;;
is-active) if [ -e "$FAKE/active/$unit" ]; then echo active; else echo inactive; exit 3; fi ;;
enable) known "$unit" && touch "$FAKE/enabled/$unit" ;;
disable) rm -f "$FAKE/enabled/$unit" ;;
start | restart | reload-or-restart) known "$unit" && touch "$FAKE/active/$unit" && echo "$verb $unit" >>"$FAKE/log" ;;
stop) rm -f "$FAKE/active/$unit" ;;
try-restart) echo "$verb $unit" >>"$FAKE/log" ;;
esac`
	fakeApt = `#!/bin/sh
echo "$*" >>"$FAKE/args"
case " $* " in
*" -s "*)
  [ -e "$FAKE/lists" ] || case $* in *.deb*) ;; *) echo 'E: Unable to locate package'; exit 100 ;; esac
  echo "Inst libc-bin [1] (2 Debian)"
  echo "Inst library (1 Debian)"
  echo "Inst runtime (1 Debian)" ;;
*" update "*) touch "$FAKE/lists" ;;
*" install "*)
  [ ! -e "$FAKE/offline" ] || { echo 'E: Failed to fetch'; exit 100; }
  mkdir -p "$FAKE/machine/bin" "$FAKE/machine/etc/runtime" "$FAKE/machine/lib"
  echo program >"$FAKE/machine/bin/runtime"
  [ -e "$FAKE/machine/etc/runtime/conf" ] || echo default >"$FAKE/machine/etc/runtime/conf"
  echo library >"$FAKE/machine/lib/library"
  touch "$FAKE/installed/runtime" "$FAKE/installed/library" "$FAKE/known/runtime.service" "$FAKE/active/runtime.service"
  echo install >>"$FAKE/log" ;;
*" purge "*)
  for p; do case $p in
  runtime) rm -f "$FAKE/machine/bin/runtime" "$FAKE/machine/etc/runtime/conf" "$FAKE/known/runtime.service" "$FAKE/held"; rmdir "$FAKE/machine/etc/runtime" ;;
  library) rm -f "$FAKE/machine/lib/library" ;;
  esac; rm -f "$FAKE/installed/$p"; done; rmdir "$FAKE/machine/lib" "$FAKE/machine/bin" 2>/dev/null; true ;;
esac`
	fakeMark  = "#!/bin/sh\ncase $1 in hold) touch \"$FAKE/held\" ;; unhold) rm -f \"$FAKE/held\" ;; esac"
	fakeQuery = `#!/bin/sh
for last; do :; done
case $3 in
*Conffiles*) echo " $FAKE/machine/etc/runtime/conf $(echo default | md5sum | cut -d' ' -f1)" ;;
*) if [ -e "$FAKE/installed/$last" ]; then echo installed; else exit 1; fi ;;
esac`
	fakeDpkg = "#!/bin/sh\n"
)

// box is a machine: a folder with its files, and the state of the programs above.
type box struct {
	t   *testing.T
	s   *sshdtest.Server
	dir string
	now time.Time
}

// fakePrograms writes the programs above, and returns their folder.
func fakePrograms(t *testing.T) string {
	t.Helper()
	testneeds.Program(t, "flock", "util-linux")
	programs := t.TempDir()
	if err := os.Chmod(programs, 0o755); err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{"systemctl": fakeSystemctl, "apt-get": fakeApt, "apt-mark": fakeMark, "dpkg-query": fakeQuery, "dpkg": fakeDpkg} {
		write(t, filepath.Join(programs, name), text, 0o755)
	}
	return programs
}

// newBox makes a machine with some files.
func newBox(t *testing.T, o sshdtest.Options) *box {
	t.Helper()
	testneeds.Root(t, "to enrol as root")
	programs := fakePrograms(t)
	b := &box{t: t, dir: memory(t), now: time.Date(2026, 11, 27, 16, 20, 0, 0, time.UTC)}
	o.Config += fmt.Sprintf("\nSetEnv PATH=%s:/usr/local/bin:/usr/bin:/bin FAKE=%s", programs, b.dir)
	b.fill()
	b.s = sshdtest.Start(t, o)
	return b
}

// memory returns a new folder, in memory if there is some: each step syncs files.
func memory(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "enrol")
	if err != nil {
		return t.TempDir()
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

// fill makes the files of the machine as they are before.
func (b *box) fill() {
	t := b.t
	t.Helper()
	for _, d := range []string{"machine/etc/systemd", "machine/var", "known", "enabled", "active", "installed"} {
		if err := os.MkdirAll(filepath.Join(b.dir, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	write(t, b.path("etc/motd"), "welcome\n", 0o640)
	if err := os.Chown(b.path("etc/motd"), 7, 8); err != nil {
		t.Fatal(err)
	}
	write(t, b.path("etc/hosts"), "127.0.0.1 localhost\n", 0o644)
	if err := os.Symlink("hosts", b.path("etc/alias")); err != nil {
		t.Fatal(err)
	}
	// A unit that existed and ran.
	write(t, filepath.Join(b.dir, "known/old.service"), "", 0o644)
	write(t, filepath.Join(b.dir, "active/old.service"), "", 0o644)
}

// empty deletes everything, for another machine in the same place.
func (b *box) empty() {
	b.t.Helper()
	entries, err := os.ReadDir(b.dir)
	if err != nil {
		b.t.Fatal(err)
	}
	for _, e := range entries {
		if err := os.RemoveAll(filepath.Join(b.dir, e.Name())); err != nil {
			b.t.Fatal(err)
		}
	}
	b.fill()
}

func write(t *testing.T, path, text string, mode fs.FileMode) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), mode); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(path, mode); err != nil {
		t.Fatal(err)
	}
}

func (b *box) path(name string) string { return filepath.Join(b.dir, "machine", name) }

// tree describes all files of the machine, and its units.
func (b *box) tree() string {
	b.t.Helper()
	var out strings.Builder
	err := filepath.WalkDir(b.dir, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name, _ := filepath.Rel(b.dir, p)
		if name == "state" || name == "lock.step" {
			return errors.New(name + " is left")
		}
		if name == "." || slices.Contains([]string{"log", "lock", "lists", "offline", "args"}, name) {
			return nil
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		st := info.Sys().(*syscall.Stat_t)
		fmt.Fprintf(&out, "%s %s %d:%d", name, info.Mode(), st.Uid, st.Gid)
		switch {
		case info.Mode().IsRegular():
			content, err := os.ReadFile(p)
			if err != nil {
				return err
			}
			fmt.Fprintf(&out, " %x", sha256.Sum256(content))
		case info.Mode()&fs.ModeSymlink != 0:
			to, _ := os.Readlink(p)
			out.WriteString(" " + to)
		}
		out.WriteString("\n")
		return nil
	})
	if err != nil {
		b.t.Fatal(err)
	}
	return out.String()
}

// spec is a Spec that does a bit of everything.
func (b *box) spec() enrol.Spec {
	return enrol.Spec{
		Cluster: "uid-1", ClusterName: "mine", Machine: "worker-1", Release: "v1.1.0",
		Files: []enrol.File{
			{Path: b.path("usr/lib/it/agent"), Mode: 0o755, Data: []byte("agent v1")},
			{Path: b.path("etc/motd"), Mode: 0o600, Data: []byte("secret")},
			{Path: b.path("etc/alias"), Mode: 0o644, Data: []byte("no link")},
			{Path: b.path("etc/systemd/new.service"), Mode: 0o644, Data: []byte("[Unit]\n")},
			{Path: b.path("etc/runtime/conf"), Mode: 0o644, Data: []byte("ours\n"), Default: "runtime"},
			{Path: b.path("opt/bin/plugin"), Link: "/usr/lib/plugin", Keep: true},
		},
		Packages: []enrol.Package{{Name: "runtime", Program: b.path("bin/runtime")}},
		Units:    []enrol.Unit{{Name: "runtime.service", Start: true}, {Name: "new.service", Start: true}, {Name: "old.service"}},
		Trees:    []string{b.path("var/data"), b.path("opt")},
	}
}

func (b *box) request(s enrol.Spec) enrol.Request {
	r := enrol.Request{Spec: s, Who: "admin@laptop", Now: func() time.Time { return b.now }}
	return r.On(filepath.Join(b.dir, "state"), filepath.Join(b.dir, "lock"))
}

func (b *box) dial() *sshhost.Host {
	b.t.Helper()
	h, err := sshhost.Dial(b.t.Context(), b.s.Options())
	if err != nil {
		b.t.Fatalf("%v\n%s", err, plan.Remedy(err))
	}
	b.t.Cleanup(h.Close)
	return h
}

// line is a connection that counts calls, and that is cut after some of them.
type line struct {
	*sshhost.Host
	mu    sync.Mutex
	calls int
	cut   int // after so many calls; 0: never
	sent  []string
}

func (l *line) count() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.calls++
	return l.calls == l.cut
}

func (l *line) Run(ctx context.Context, c sshhost.Command) (sshhost.Result, error) {
	last := l.count()
	if c.Stdout != nil { // it runs as long as the lock is held
		if last {
			l.Close()
		}
		return l.Host.Run(ctx, c)
	}
	r, err := l.Host.Run(ctx, c)
	if last {
		l.Close()
		return sshhost.Result{}, sshhost.ErrLost
	}
	return r, err
}

func (l *line) Upload(ctx context.Context, file string, mode fs.FileMode, size int64, r io.Reader) error {
	last := l.count()
	err := l.Host.Upload(ctx, file, mode, size, r)
	l.mu.Lock()
	l.sent = append(l.sent, file)
	l.mu.Unlock()
	if last {
		l.Close()
		return sshhost.ErrLost
	}
	return err
}

func (b *box) install(l *line, s enrol.Spec) (enrol.Outcome, error) {
	return enrol.Install(b.t.Context(), l, b.request(s))
}

func (b *box) mustInstall(s enrol.Spec) (*line, enrol.Outcome) {
	b.t.Helper()
	l := &line{Host: b.dial()}
	out, err := b.install(l, s)
	if err != nil {
		b.t.Fatalf("%v\n%s", err, plan.Remedy(err))
	}
	return l, out
}

func (b *box) mustRemove() enrol.Outcome {
	b.t.Helper()
	out, err := enrol.Remove(b.t.Context(), b.dial(), b.request(enrol.Spec{Cluster: "uid-1"}))
	if err != nil {
		b.t.Fatalf("%v\n%s", err, plan.Remedy(err))
	}
	return out
}

func (b *box) log() string {
	out, err := os.ReadFile(filepath.Join(b.dir, "log"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		b.t.Fatal(err)
	}
	return string(out)
}

func TestInstallAndRemove(t *testing.T) {
	t.Parallel()
	b := newBox(t, sshdtest.Options{})
	before := b.tree()
	s := b.spec()

	would, err := enrol.Examine(t.Context(), b.dial(), b.request(s))
	if err != nil || b.tree() != before {
		t.Fatalf("a rehearsal changed the machine, or failed: %v", err)
	}
	want := []string{
		"install runtime of the distribution, held back from upgrades", "write " + b.path("usr/lib/it/agent"), "replace " + b.path("etc/motd"), "replace " + b.path("etc/alias"),
		"write " + b.path("etc/systemd/new.service"), "write " + b.path("etc/runtime/conf"), "write " + b.path("opt/bin/plugin"), "restart runtime.service and new.service",
	}
	if !slices.Equal(would.Changes, want) {
		t.Errorf("a rehearsal reports %q", would.Changes)
	}
	var steps []string
	r := b.request(s)
	r.Report = func(x enrol.Step) {
		if steps = append(steps, x.Title); x.Title == "verify" && x.Done+1 != x.Total {
			t.Errorf("the last step is %d of %d", x.Done+1, x.Total)
		}
	}
	prepared := 0
	r.Prepare = func(context.Context, enrol.Machine) error {
		if prepared++; strings.Contains(b.log(), "start new.service") {
			t.Error("the unit runs before the identity is there")
		}
		return nil
	}
	did, err := enrol.Install(t.Context(), b.dial(), r)
	if err != nil {
		t.Fatalf("%v\n%s", err, plan.Remedy(err))
	}
	if !slices.Equal(did.Changes, want) || prepared != 1 || len(steps) < 10 || steps[len(steps)-1] != "verify" {
		t.Errorf("changes %q, steps %q", did.Changes, steps)
	}
	for file, want := range map[string]string{"usr/lib/it/agent": "agent v1", "etc/motd": "secret", "etc/alias": "no link", "etc/runtime/conf": "ours\n"} {
		if got, err := os.ReadFile(b.path(file)); err != nil || string(got) != want {
			t.Errorf("%s is %q %v, want %q", file, got, err, want)
		}
	}
	if got, err := os.ReadFile(b.path("etc/hosts")); err != nil || string(got) != "127.0.0.1 localhost\n" {
		t.Errorf("the target of a link became %q", got)
	}
	if info, err := os.Stat(filepath.Join(b.dir, "state/journal.json")); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the journal: %v %v", info, err)
	}
	for _, name := range []string{"held", "enabled/new.service", "active/new.service", "active/runtime.service"} {
		if _, err := os.Stat(filepath.Join(b.dir, name)); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}

	// Equal files are not sent again.
	logged := b.log()
	l, did := b.mustInstall(s)
	if len(did.Changes) > 0 || len(l.sent) > 0 || b.log() != logged {
		t.Errorf("the repetition changed %q, sent %q", did.Changes, l.sent)
	}
	// Another release sends what differs, and restarts units.
	s.Release, s.Files[0].Data = "v1.2.0", []byte("agent v2")
	if l, did = b.mustInstall(s); !slices.Equal(l.sent, []string{b.path("usr/lib/it/agent")}) || len(did.Changes) != 2 || b.log() == logged {
		t.Errorf("the next release changed %q, sent %q", did.Changes, l.sent)
	}
	// A file that was changed on the machine is sent again.
	write(t, b.path("etc/motd"), "changed", 0o644)
	if l, _ = b.mustInstall(s); !slices.Equal(l.sent, []string{b.path("etc/motd")}) {
		t.Errorf("sent %q", l.sent)
	}

	// The programs of the machine leave files.
	if err := os.MkdirAll(b.path("var/data/deep"), 0o700); err != nil {
		t.Fatal(err)
	}
	write(t, b.path("var/data/deep/file"), "x", 0o600)
	write(t, b.path("var/.data.0123.partial"), "x", 0o600)
	reset := b.request(enrol.Spec{Cluster: "uid-1"})
	reset.Reset = func(context.Context, enrol.Machine) error {
		if _, err := os.Stat(filepath.Join(b.dir, "active/new.service")); err == nil {
			t.Error("the unit runs during the reset")
		}
		if _, err := os.Stat(filepath.Join(b.dir, "active/runtime.service")); err != nil {
			t.Error("the unit of the package, which the reset needs, does not run")
		}
		return nil
	}
	out, err := enrol.Remove(t.Context(), b.dial(), reset)
	if err != nil {
		t.Fatalf("%v\n%s", err, plan.Remedy(err))
	}
	if is := b.tree(); is != before {
		t.Errorf("the machine is\n%s\nwant\n%s", is, before)
	}
	if len(out.Changes) < 4 || !slices.Contains(out.Changes, "removed the packages library and runtime") || !strings.Contains(out.Notes[0], "--fix") {
		t.Errorf("removal: %q %q", out.Changes, out.Notes)
	}
	_, err = enrol.Remove(t.Context(), b.dial(), reset)
	if !errors.Is(err, enrol.ErrNotEnrolled) || plan.ExitCode(err) != plan.ExitNothing || plan.Remedy(err) == "" {
		t.Errorf("a second removal: %v", err)
	}
	if is := b.tree(); is != before {
		t.Errorf("after a second removal the machine is\n%s", is)
	}
}

// TestCutAtEachStep cuts the connection after each call of an installation. Repeating it completes the machine,
// and removing it restores all files. Then removals are cut.
func TestCutAtEachStep(t *testing.T) {
	t.Parallel()
	b := newBox(t, sshdtest.Options{})
	before := b.tree()
	s := b.spec()
	s.Files = []enrol.File{s.Files[0], s.Files[1], s.Files[3], s.Files[5]}
	l, _ := b.mustInstall(s)
	installs := l.calls
	installed := func() {
		t.Helper()
		for _, f := range s.Files {
			got, err := os.ReadFile(f.Path)
			if f.Link == "" && (err != nil || !bytes.Equal(got, f.Data)) {
				t.Errorf("%s is %q %v", f.Path, got, err)
			}
		}
		for _, name := range []string{"held", "enabled/new.service", "active/new.service", "active/runtime.service"} {
			if _, err := os.Stat(filepath.Join(b.dir, name)); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
		var j enrol.Journal
		text, err := os.ReadFile(filepath.Join(b.dir, "state/journal.json"))
		if err == nil {
			err = json.Unmarshal(text, &j)
		}
		if err != nil || j.State != enrol.Installed {
			t.Errorf("the journal is %s: %v", j.State, err)
		}
	}
	installed()
	remove := func(cut int) (int, error) {
		l := &line{Host: b.dial(), cut: cut}
		_, err := enrol.Remove(t.Context(), l, b.request(enrol.Spec{Cluster: "uid-1"}))
		return l.calls, err
	}
	removals, err := remove(0)
	if err != nil || b.tree() != before {
		t.Fatalf("removal: %v\n%s", err, b.tree())
	}
	if installs < 14 || removals < 8 {
		t.Fatalf("%d and %d calls", installs, removals)
	}
	for cut := 4; cut <= installs; cut++ { // before, nothing is written
		for _, resumed := range []bool{true, false} {
			b.empty()
			if _, err := b.install(&line{Host: b.dial(), cut: cut}, s); !errors.Is(err, sshhost.ErrLost) {
				t.Errorf("cut after call %d of the installation: %v", cut, err)
			}
			if resumed {
				b.mustInstall(s)
				installed()
			}
			if _, err := remove(0); err != nil && (resumed || !errors.Is(err, enrol.ErrNotEnrolled)) {
				t.Errorf("removal after a cut after call %d of the installation: %v", cut, err)
			}
			if is := b.tree(); is != before {
				t.Errorf("after a cut after call %d of the installation, resumed %v, the removal left\n%s\nwant\n%s", cut, resumed, is, before)
			}
		}
	}
	for cut := 4; cut <= removals; cut++ {
		b.empty()
		b.mustInstall(s)
		if _, err := remove(cut); !errors.Is(err, sshhost.ErrLost) {
			t.Errorf("cut after call %d of the removal: %v", cut, err)
		}
		if cut < removals {
			if _, err := b.install(&line{Host: b.dial()}, s); err == nil || !strings.Contains(err.Error(), "its removal began") || !strings.Contains(plan.Remedy(err), "machine remove worker-1") {
				t.Errorf("an installation after half a removal: %v", err)
			}
		}
		if _, err := remove(0); err != nil && !errors.Is(err, enrol.ErrNotEnrolled) {
			t.Errorf("after a cut after call %d of the removal: %v", cut, err)
		}
		if is := b.tree(); is != before {
			t.Errorf("after a cut after call %d of the removal the machine is\n%s\nwant\n%s", cut, is, before)
		}
	}
}

// TestRestartIsNotForgotten has a connection that is cut between a changed file and the restart of its unit.
func TestRestartIsNotForgotten(t *testing.T) {
	t.Parallel()
	b := newBox(t, sshdtest.Options{})
	s := b.spec()
	b.mustInstall(s)
	s.Files[0].Data = []byte("agent v2")
	cut := &line{Host: b.dial(), cut: 7} // the upload
	if _, err := b.install(cut, s); !errors.Is(err, sshhost.ErrLost) || len(cut.sent) != 1 {
		t.Fatalf("%v, sent %q", err, cut.sent)
	}
	if err := os.Remove(filepath.Join(b.dir, "log")); err != nil {
		t.Fatal(err)
	}
	l, did := b.mustInstall(s)
	if len(l.sent) > 0 || !slices.Equal(did.Changes, []string{"restart runtime.service and new.service"}) || !strings.Contains(b.log(), "restart new.service") {
		t.Errorf("changes %q, sent %q, log %s", did.Changes, l.sent, b.log())
	}
}

func TestTwoConsoles(t *testing.T) {
	t.Parallel()
	b := newBox(t, sshdtest.Options{})
	s := b.spec()
	r := b.request(s)
	var second, removal error
	first := b.dial()
	r.Prepare = func(ctx context.Context, _ enrol.Machine) error {
		other := b.request(s)
		other.Who = "evil\x1b[2J"
		_, second = enrol.Install(ctx, b.dial(), other)
		_, removal = enrol.Remove(ctx, b.dial(), other)
		return nil
	}
	if _, err := enrol.Install(t.Context(), first, r); err != nil {
		t.Fatal(err)
	}
	for _, err := range []error{second, removal} {
		if !errors.Is(err, enrol.ErrHeld) || plan.ExitCode(err) != plan.ExitHeld || !strings.Contains(err.Error(), "admin@laptop since 2026-11-27T16:20:00Z") || plan.Remedy(err) == "" {
			t.Errorf("the second console: %v", err)
		}
	}
	// A console whose lock is gone changes nothing any more.
	b.empty()
	var lost error
	r.Prepare = func(context.Context, enrol.Machine) error {
		write(t, filepath.Join(b.dir, "lock"), "another\nother@laptop\n", 0o600)
		return nil
	}
	if _, lost = enrol.Install(t.Context(), b.dial(), r); !errors.Is(lost, enrol.ErrHeld) {
		t.Errorf("without the lock: %v", lost)
	}
	if log := b.log(); strings.Contains(log, "start new.service") {
		t.Errorf("units were started without the lock:\n%s", log)
	}
}

func TestRefusals(t *testing.T) {
	t.Parallel()
	b := newBox(t, sshdtest.Options{})
	s := b.spec()
	b.mustInstall(s)
	other := s
	other.Cluster, other.Machine = "uid-2", "node-1"
	for _, run := range []func() error{
		func() error { _, err := b.install(&line{Host: b.dial()}, other); return err },
		func() error { _, err := enrol.Examine(t.Context(), b.dial(), b.request(other)); return err },
		func() error { _, err := enrol.Remove(t.Context(), b.dial(), b.request(other)); return err },
	} {
		if err := run(); !errors.Is(err, enrol.ErrOtherCluster) || plan.ExitCode(err) != plan.ExitBlocked || !strings.Contains(err.Error(), "mine (uid-1) as worker-1") || !strings.Contains(plan.Remedy(err), "machine remove worker-1 --ssh") {
			t.Errorf("another workspace: %v\n%s", err, plan.Remedy(err))
		}
	}
	copied := s
	copied.Machine, copied.Others = "worker-2", []string{s.Machine}
	for _, run := range []func() error{
		func() error { _, err := b.install(&line{Host: b.dial()}, copied); return err },
		func() error { _, err := enrol.Examine(t.Context(), b.dial(), b.request(copied)); return err },
	} {
		if err := run(); plan.ExitCode(err) != plan.ExitBlocked || !strings.Contains(err.Error(), "the journal of worker-1, which is another machine of this cluster: its disk was copied") || !strings.Contains(plan.Remedy(err), "reinstall it") {
			t.Errorf("a copied disk: %v\n%s", err, plan.Remedy(err))
		}
	}
	journal := filepath.Join(b.dir, "state/journal.json")
	good, err := os.ReadFile(journal)
	if err != nil {
		t.Fatal(err)
	}
	write(t, journal, strings.Replace(string(good), b.path("etc/motd"), "/etc/$(reboot)", 1), 0o600)
	if _, err := b.install(&line{Host: b.dial()}, s); err == nil || !strings.Contains(err.Error(), "is no path") || plan.Remedy(err) == "" {
		t.Errorf("a damaged journal: %v", err)
	}
	write(t, journal, string(good), 0o600)
	b.mustRemove()

	if err := os.MkdirAll(b.path("usr/lib/it/agent"), 0o755); err != nil {
		t.Fatal(err)
	}
	if _, err := b.install(&line{Host: b.dial()}, s); err == nil || !strings.Contains(err.Error(), "exists and is no file") {
		t.Errorf("a folder in the place of a file: %v", err)
	}
	b.empty()
	write(t, filepath.Join(b.dir, "offline"), "", 0o600)
	if _, err := b.install(&line{Host: b.dial()}, s); err == nil || !strings.Contains(err.Error(), "apt-get install: E: Failed to fetch") || !strings.Contains(plan.Remedy(err), "--packages") || !strings.Contains(plan.Remedy(err), "--proxy") {
		t.Errorf("packages that cannot be loaded: %v", err)
	}
	if err := os.Remove(filepath.Join(b.dir, "offline")); err != nil {
		t.Fatal(err)
	}
	b.mustInstall(s)
}

// TestFilesOfTheUserStay has a configuration of the package that was changed, and a file that is there.
func TestFilesOfTheUserStay(t *testing.T) {
	t.Parallel()
	b := newBox(t, sshdtest.Options{})
	for _, d := range []string{"bin", "etc/runtime", "opt/bin"} {
		if err := os.MkdirAll(b.path(d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	write(t, b.path("bin/runtime"), "program", 0o755)
	write(t, b.path("etc/runtime/conf"), "mine\n", 0o644)
	write(t, b.path("opt/bin/plugin"), "mine", 0o755)
	write(t, filepath.Join(b.dir, "known/runtime.service"), "", 0o644)
	write(t, filepath.Join(b.dir, "active/runtime.service"), "", 0o644)
	before := b.tree()
	_, out := b.mustInstall(b.spec())
	if len(out.Notes) != 1 || !strings.Contains(out.Notes[0], "etc/runtime/conf was changed by hand and stays") || strings.Contains(b.log(), "install") {
		t.Errorf("notes %q, log %s", out.Notes, b.log())
	}
	if _, out := b.mustInstall(b.spec()); len(out.Changes) > 0 || len(out.Notes) != 1 {
		t.Errorf("the repetition: %+v", out)
	}
	b.mustRemove()
	if is := b.tree(); is != before {
		t.Errorf("the machine is\n%s\nwant\n%s", is, before)
	}
	// The configuration of the package itself is replaced, and given back.
	write(t, b.path("etc/runtime/conf"), "default\n", 0o644)
	before = b.tree()
	b.mustInstall(b.spec())
	if got, err := os.ReadFile(b.path("etc/runtime/conf")); err != nil || string(got) != "ours\n" {
		t.Errorf("the configuration is %q %v", got, err)
	}
	b.mustRemove()
	if is := b.tree(); is != before {
		t.Errorf("the machine is\n%s\nwant\n%s", is, before)
	}
}

// A configuration that serves something else is refused before anything is changed.
func TestOwnFiles(t *testing.T) {
	t.Parallel()
	b := newBox(t, sshdtest.Options{})
	s := b.spec()
	s.Files[4].Own, s.Files[4].Needs = true, "move it away"
	if err := os.MkdirAll(b.path("etc/runtime"), 0o755); err != nil {
		t.Fatal(err)
	}
	write(t, b.path("etc/runtime/conf"), "of the user\n", 0o644)
	before := b.tree()
	_, err := enrol.Examine(t.Context(), b.dial(), b.request(s))
	if plan.ExitCode(err) != plan.ExitBlocked || plan.Remedy(err) != "move it away" || !strings.Contains(err.Error(), "etc/runtime/conf is there") {
		t.Errorf("a rehearsal: %v", err)
	}
	if _, err := enrol.Install(t.Context(), b.dial(), b.request(s)); plan.ExitCode(err) != plan.ExitBlocked || b.tree() != before {
		t.Errorf("an installation: %v", err)
	}
	write(t, b.path("etc/runtime/conf"), "default\n", 0o644) // that of the package
	b.mustInstall(s)
	write(t, b.path("etc/runtime/conf"), "changed later\n", 0o644)
	if l, _ := b.mustInstall(s); !slices.Equal(l.sent, []string{b.path("etc/runtime/conf")}) {
		t.Errorf("sent %q", l.sent)
	}
}

// A part is added to what a machine has, and taken back with it. Units that read their files again are not restarted.
func TestParts(t *testing.T) {
	t.Parallel()
	b := newBox(t, sshdtest.Options{})
	before := b.tree()
	part := enrol.Spec{
		Cluster: "uid-1", ClusterName: "mine", Machine: "worker-1", Release: "v1.2.0", Part: true,
		Files: []enrol.File{{Path: b.path("etc/systemd/extra.service"), Mode: 0o644, Data: []byte("[Unit]\n")}},
		Units: []enrol.Unit{{Name: "extra.service", Start: true, Reload: true}},
	}
	if _, err := enrol.Install(t.Context(), b.dial(), b.request(part)); !errors.Is(err, enrol.ErrNotEnrolled) || plan.ExitCode(err) != plan.ExitBlocked || plan.Remedy(err) == "" {
		t.Errorf("a machine without an enrolment: %v", err)
	}
	b.mustInstall(b.spec())
	logged := b.log()
	if _, out := b.mustInstall(part); !slices.Equal(out.Changes, []string{"write " + b.path("etc/systemd/extra.service"), "start or reload extra.service"}) {
		t.Errorf("changes %q", out.Changes)
	}
	if got := strings.TrimPrefix(b.log(), logged); got != "reload-or-restart extra.service\n" {
		t.Errorf("units: %q", got)
	}
	if journal, err := os.ReadFile(filepath.Join(b.dir, "state/journal.json")); err != nil || !strings.Contains(string(journal), `"release": "v1.1.0"`) {
		t.Errorf("the journal names another release than that of the programs, %v:\n%s", err, journal)
	}
	if l, out := b.mustInstall(part); len(out.Changes)+len(l.sent) > 0 {
		t.Errorf("again: %q", out.Changes)
	}
	b.mustRemove()
	if is := b.tree(); is != before {
		t.Errorf("the machine is\n%s\nwant\n%s", is, before)
	}
}

func TestDiskFull(t *testing.T) {
	t.Parallel()
	full := t.TempDir()
	b := newBox(t, sshdtest.Options{Setup: "mount -t tmpfs -o size=64k tmpfs " + full})
	before := b.tree()
	s := b.spec()
	s.Files = append(s.Files, enrol.File{Path: full + "/folder/file", Mode: 0o644, Data: bytes.Repeat([]byte("x"), 128<<10)})
	_, err := b.install(&line{Host: b.dial()}, s)
	if err == nil || !strings.Contains(err.Error(), "No space left") || !strings.Contains(plan.Remedy(err), "free space") {
		t.Fatalf("a full disk: %v\n%s", err, plan.Remedy(err))
	}
	b.mustRemove()
	if is := b.tree(); is != before {
		t.Errorf("the machine is\n%s\nwant\n%s", is, before)
	}
	r, err := b.dial().Run(t.Context(), sshhost.Command{Argv: []string{"ls", "-A", full}})
	if err != nil || len(r.Stdout) > 0 {
		t.Errorf("left over: %s %v", r.Stdout, err)
	}
}

func TestSudo(t *testing.T) {
	t.Parallel()
	b := newBox(t, sshdtest.Sudoers(t, "Defaults !secure_path, !env_reset\ntester ALL=(ALL) ALL"))
	if err := os.Chmod(b.dir, 0o755); err != nil {
		t.Fatal(err)
	}
	before := b.tree()
	o := b.s.Options()
	o.Target.Sudo = true
	asked := 0
	o.SudoPassword = func(context.Context, sshhost.Target) ([]byte, error) {
		asked++
		return []byte(sshdtest.Password), nil
	}
	h, err := sshhost.Dial(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	if _, err := enrol.Install(t.Context(), h, b.request(b.spec())); err != nil {
		t.Fatalf("%v\n%s", err, plan.Remedy(err))
	}
	if got, err := os.ReadFile(b.path("etc/motd")); err != nil || string(got) != "secret" || asked != 1 {
		t.Errorf("the file is %q %v; asked %d times for the password", got, err, asked)
	}
	if _, err := enrol.Remove(t.Context(), h, b.request(b.spec())); err != nil {
		t.Fatal(err)
	}
	if is := b.tree(); is != before {
		t.Errorf("the machine is\n%s\nwant\n%s", is, before)
	}
}

// TestPackagesOfThisComputer enrols a machine without a repository: its packages are sent, also after a cut, and installed
// from their files.
func TestPackagesOfThisComputer(t *testing.T) {
	t.Parallel()
	build := testneeds.Program(t, "dpkg-deb", "dpkg")
	b := newBox(t, sshdtest.Options{})
	before := b.tree()
	dir := t.TempDir()
	for _, name := range []string{"runtime_1_amd64", "library_1_all", "runtime_1_arm64"} {
		root := filepath.Join(t.TempDir(), name)
		if err := os.MkdirAll(filepath.Join(root, "DEBIAN"), 0o755); err != nil {
			t.Fatal(err)
		}
		field := strings.Split(name, "_")
		write(t, filepath.Join(root, "DEBIAN/control"), fmt.Sprintf("Package: %s\nVersion: %s\nArchitecture: %s\nMaintainer: a\nDescription: b\n", field[0], field[1], field[2]), 0o644)
		if out, err := exec.Command(build, "--build", root, filepath.Join(dir, name+".deb")).CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
	}
	write(t, filepath.Join(dir, "SHA256SUMS"), strings.Repeat("0", 64)+"  ./library_1_all.deb\n", 0o644)
	if _, err := enrol.PackageFiles(dir, "x86_64"); plan.ExitCode(err) != plan.ExitUsage || !strings.Contains(err.Error(), "library_1_all.deb has the SHA-256") {
		t.Errorf("another digest: %v", err)
	}
	if err := os.Remove(filepath.Join(dir, "SHA256SUMS")); err != nil {
		t.Fatal(err)
	}
	if _, err := enrol.PackageFiles(t.TempDir(), "x86_64"); plan.ExitCode(err) != plan.ExitUsage || !strings.Contains(plan.Remedy(err), "apt-get download") {
		t.Errorf("an empty folder: %v", err)
	}
	s := b.spec()
	var err error
	if s.Debs, err = enrol.PackageFiles(dir, "x86_64"); err != nil || len(s.Debs) != 2 {
		t.Fatalf("%d files, %v", len(s.Debs), err)
	}
	write(t, filepath.Join(b.dir, "offline"), "", 0o600)
	if _, err := b.install(&line{Host: b.dial(), cut: 7}, s); !errors.Is(err, sshhost.ErrLost) {
		t.Errorf("cut at the first package: %v", err)
	}
	// A file that changes on the way is not installed.
	first := s.Debs[0].Local
	whole, err := os.ReadFile(first)
	if err != nil {
		t.Fatal(err)
	}
	bad := s
	bad.Debs = []enrol.File{s.Debs[1], s.Debs[0]}
	bad.Debs[1].Path = "/" + strings.Repeat("1", 64) + ".deb"
	if _, err := b.install(&line{Host: b.dial()}, bad); err == nil || !strings.Contains(err.Error(), "came incomplete") {
		t.Errorf("another content: %v", err)
	}
	write(t, first, string(whole), 0o644)
	if err := os.Remove(filepath.Join(b.dir, "offline")); err != nil {
		t.Fatal(err)
	}
	_, out := b.mustInstall(s)
	if !slices.Contains(out.Changes, "install runtime from 2 files of this computer, held back from upgrades") {
		t.Errorf("changes %q", out.Changes)
	}
	args, err := os.ReadFile(filepath.Join(b.dir, "args"))
	// apt downloads a package from a repository that it knows and that has the same version, even if the machine does not
	// reach it. Its simulation and its installation ignore repositories.
	if strings.Count(string(args), "-o Dir::Etc::SourceList=/dev/null -o Dir::Etc::SourceParts=/dev/null") < 2 {
		t.Errorf("apt-get %s", args)
	}
	// apt of Debian 13 does not find files with --no-download.
	if last := string(args[bytes.LastIndex(args, []byte("-o DPkg")):]); err != nil || strings.Contains(last, "--no-download") || strings.Count(last, ".deb") != 2 {
		t.Errorf("apt-get %s", args)
	}
	if _, err := os.Stat(filepath.Join(b.dir, "state/packages")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the packages stay on the machine: %v", err)
	}
	b.mustRemove()
	if is := b.tree(); is != before {
		t.Errorf("the machine is\n%s\nwant\n%s", is, before)
	}
}

// TestProxy has apt use a proxy, and units get it.
func TestProxy(t *testing.T) {
	t.Parallel()
	b := newBox(t, sshdtest.Options{})
	s := b.spec()
	s.Proxy = "http://10.0.0.1:3128"
	b.mustInstall(s)
	args, err := os.ReadFile(filepath.Join(b.dir, "args"))
	if err != nil || strings.Count(string(args), "-o Acquire::http::Proxy=http://10.0.0.1:3128 -o Acquire::https::Proxy=http://10.0.0.1:3128") != 2 {
		t.Errorf("apt-get %s", args)
	}
	var text string
	units := 0
	for _, f := range enrol.Proxy(s.Proxy, []string{"10.0.0.0/24"}) {
		if text += string(f.Data); strings.Contains(f.Path, ".service.d/") {
			units++
		}
	}
	if units != 3 || !strings.Contains(text, "HTTPS_PROXY=http://10.0.0.1:3128\nNO_PROXY=localhost,127.0.0.0/8,::1,.svc,.cluster.local,10.0.0.0/24\n") {
		t.Errorf("%d units, %s", units, text)
	}
	for _, bad := range []string{"10.0.0.1:3128", "http://user:secret@10.0.0.1:3128", "https://10.0.0.1:3128", "http://10.0.0.1", "http://-o:1", "http://a b:1", "http://10.0.0.1:3128/x", "http://a\n:1"} {
		if enrol.ValidProxy(bad) {
			t.Errorf("%q is a proxy", bad)
		}
		s.Proxy = bad
		if _, err := enrol.Install(t.Context(), nil, b.request(s)); err == nil || strings.Contains(err.Error(), "secret") {
			t.Errorf("%q: %v", bad, err)
		}
	}
}

// TestRejoin has a node that its cluster does not have any more.
func TestRejoin(t *testing.T) {
	t.Parallel()
	b := newBox(t, sshdtest.Options{})
	const unit = "constellation-bootstrapper.service"
	s := b.spec()
	s.Files = append(s.Files, enrol.File{Path: b.path("etc/systemd/" + unit), Mode: 0o644, Data: []byte("[Unit]\n")})
	s.Units = append(s.Units, enrol.Unit{Name: unit, Start: true})
	running := func() bool { _, err := os.Stat(filepath.Join(b.dir, "active", unit)); return err == nil }
	var did []string
	var fails error
	again := func(s enrol.Spec) (enrol.Outcome, error) {
		r := b.request(s)
		r.Rejoin = true
		r.Reset = func(context.Context, enrol.Machine) error {
			if running() {
				t.Error("the bootstrapper runs during the reset")
			}
			did = append(did, "reset")
			return fails
		}
		r.Prepare = func(context.Context, enrol.Machine) error { did = append(did, "prepare"); return nil }
		return enrol.Install(t.Context(), b.dial(), r)
	}
	if _, err := again(s); !errors.Is(err, enrol.ErrNotEnrolled) || plan.ExitCode(err) != plan.ExitBlocked || !strings.Contains(plan.Remedy(err), "kubeadm reset") {
		t.Errorf("without a journal: %v", err)
	}
	b.mustInstall(s)
	other := s
	other.Machine = "worker-2"
	if _, err := again(other); plan.ExitCode(err) != plan.ExitUsage || !strings.Contains(err.Error(), "worker-1 of this cluster, not worker-2") {
		t.Errorf("another name: %v", err)
	}
	if _, err := again(s); plan.ExitCode(err) != plan.ExitBlocked || !strings.Contains(err.Error(), "becoming a node") || len(did) > 0 {
		t.Errorf("while it joins: %v, did %q", err, did)
	}
	ends := func() { // as a bootstrapper whose machine is a node
		if err := os.Remove(filepath.Join(b.dir, "active", unit)); err != nil {
			t.Fatal(err)
		}
	}
	ends()
	r := b.request(s)
	r.Rejoin = true
	if would, err := enrol.Examine(t.Context(), b.dial(), r); err != nil || len(would.Changes) != 2 || !strings.HasPrefix(would.Changes[0], "reset the node") || running() {
		t.Errorf("a rehearsal: %+v %v", would, err)
	}
	if out, err := again(s); err != nil || len(out.Changes) != 2 || !slices.Equal(did, []string{"reset", "prepare"}) || !running() || !strings.Contains(b.log(), "restart "+unit) {
		t.Errorf("%+v %v, did %q, log %s", out, err, did, b.log())
	}
	// After a lost connection the machine is no node any more, so it is added as any other.
	ends()
	fails = sshhost.ErrLost
	if _, err := again(s); !errors.Is(err, sshhost.ErrLost) || running() {
		t.Errorf("a lost connection: %v", err)
	}
	if _, out := b.mustInstall(s); len(out.Changes) != 1 || !running() {
		t.Errorf("after a lost connection: %+v", out)
	}
}

// TestLoginsThatFail adds a machine, and gives it back, with logins that the machine or the user's files refuse. Nothing
// is changed on the machine, and each error has its remedy.
func TestLoginsThatFail(t *testing.T) {
	t.Parallel()
	testneeds.Root(t, "to enrol as root")
	s := sshdtest.Start(t, sshdtest.Options{})
	asks, refuses := sshdtest.Start(t, sshdtest.Sudoers(t, "tester ALL=(ALL) ALL")), sshdtest.Start(t, sshdtest.Sudoers(t, "root ALL=(ALL) ALL"))
	wrong := s.Write(t, "wrong", sshdtest.Private(t, sshdtest.NewKey(t)))
	changed := s.Write(t, "changed", fmt.Sprintf("[127.0.0.1]:%d %s", s.Port, sshdtest.Authorized(t, sshdtest.NewKey(t))))
	unknown := s.Write(t, "unknown", "")
	written := filepath.Join(memory(t), "file")
	for _, tt := range []struct {
		name   string
		server *sshdtest.Server
		edit   func(*sshhost.Options)
		want   error
		remedy string
	}{
		{name: "wrong key", server: s, edit: func(o *sshhost.Options) { o.Target.KeyFile = wrong }, want: sshhost.ErrLogin, remedy: "ssh-copy-id"},
		{name: "changed host key", server: s, edit: func(o *sshhost.Options) { o.KnownHosts = []string{changed} }, want: sshhost.ErrChangedHostKey, remedy: "ssh-keygen -R"},
		{name: "unknown host key", server: s, edit: func(o *sshhost.Options) { o.KnownHosts = []string{unknown} }, want: sshhost.ErrUnknownHost, remedy: "ssh-keyscan"},
		{name: "a user without sudo", server: asks, edit: func(*sshhost.Options) {}, want: sshhost.ErrNotRoot, remedy: "--sudo"},
		{name: "a password that nobody types", server: asks, edit: func(o *sshhost.Options) { o.Target.Sudo = true }, want: sshhost.ErrSudoPassword, remedy: "NOPASSWD"},
		{name: "a wrong password", server: asks, edit: func(o *sshhost.Options) {
			o.Target.Sudo = true
			o.SudoPassword = func(context.Context, sshhost.Target) ([]byte, error) { return []byte("wrong"), nil }
		}, want: sshhost.ErrSudoPassword},
		{name: "sudo refuses", server: refuses, edit: func(o *sshhost.Options) {
			o.Target.Sudo = true
			o.SudoPassword = func(context.Context, sshhost.Target) ([]byte, error) { return []byte(sshdtest.Password), nil }
		}, want: sshhost.ErrSudoRefused},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			o := tt.server.Options()
			tt.edit(&o)
			now := func() time.Time { return time.Date(2026, 11, 27, 16, 20, 0, 0, time.UTC) }
			spec := enrol.Spec{Cluster: "uid-1", Machine: "worker-1", Release: "v1.1.0", Files: []enrol.File{{Path: written, Mode: 0o600, Data: []byte("x")}}}
			add := enrol.InstallAll(t.Context(), enrol.Batch{SSH: o, Jobs: []enrol.Job{{Target: o.Target, Spec: spec}}, Who: "admin@laptop", Now: now}, func(int, enrol.Step) {}, func(int, enrol.Result) {})
			_, remove := enrol.RemoveOne(t.Context(), enrol.Removal{SSH: o, Cluster: "uid-1", Machine: "worker-1", Who: "admin@laptop", Now: now, Report: func(enrol.Step) {}})
			for verb, err := range map[string]error{"add": add[0].Err, "remove": remove} {
				if !errors.Is(err, tt.want) || plan.Remedy(err) == "" || !strings.Contains(plan.Remedy(err), tt.remedy) || strings.Contains(err.Error(), "wrong\n") {
					t.Errorf("%s: %v\n%s", verb, err, plan.Remedy(err))
				}
			}
			for _, path := range []string{written, enrol.StateDir} {
				if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
					t.Errorf("%s: %v", path, err)
				}
			}
		})
	}
}

// TestRemovalFromAFullDisk has a machine whose disk is full when it is given back. It stays enrolled, and the same command
// restores it when there is space.
func TestRemovalFromAFullDisk(t *testing.T) {
	t.Parallel()
	b := newBox(t, sshdtest.Options{})
	state := filepath.Join(b.dir, "state")
	before := b.tree()
	// The journal and the copies have a small disk of their own in the server's namespace, which the test reaches by SSH.
	o := sshdtest.Options{Config: fmt.Sprintf("SetEnv PATH=%s:/usr/local/bin:/usr/bin:/bin FAKE=%s", fakePrograms(t), b.dir), Setup: "mkdir " + state + " && mount -t tmpfs -o size=256k tmpfs " + state}
	b.s = sshdtest.Start(t, o)
	b.mustInstall(b.spec())
	h := b.dial()
	do := func(script string) {
		t.Helper()
		if r, err := h.Run(t.Context(), sshhost.Command{Argv: []string{"sh", "-c", script, "sh", state}}); err != nil {
			t.Fatal(err)
		} else if err := r.Err(); err != nil {
			t.Fatal(err)
		}
	}
	do(`cat /dev/zero >"$1/full" 2>/dev/null || [ -s "$1/full" ]`)
	_, err := enrol.Remove(t.Context(), h, b.request(enrol.Spec{Cluster: "uid-1"}))
	if err == nil || !strings.Contains(err.Error(), "No space left") || !strings.Contains(plan.Remedy(err), "free space") {
		t.Fatalf("a full disk: %v\n%s", err, plan.Remedy(err))
	}
	for _, name := range []string{"machine/etc/motd", "active/new.service", "installed/runtime"} {
		if _, err := os.Stat(filepath.Join(b.dir, name)); err != nil {
			t.Errorf("a removal that did not begin changed the machine: %v", err)
		}
	}
	do(`rm "$1/full"`)
	// The folder of the journal is a mount, so it alone cannot be deleted.
	if _, err := enrol.Remove(t.Context(), h, b.request(enrol.Spec{Cluster: "uid-1"})); err != nil && !strings.Contains(err.Error(), "step forget") {
		t.Fatalf("with space: %v", err)
	}
	if err := errors.Join(os.Remove(state), os.Remove(filepath.Join(b.dir, "lock.step"))); err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	if is := b.tree(); is != before {
		t.Errorf("the machine is\n%s\nwant\n%s", is, before)
	}
}
