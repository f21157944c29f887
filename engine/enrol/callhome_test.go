package enrol_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"constellation/engine/callhome"
	"constellation/engine/callhome/caller"
	"constellation/engine/enrol"
	"constellation/engine/plan"
	"constellation/engine/sshhost"
	"constellation/internal/testneeds"
)

// callBox is a machine that calls. Its steps run on this computer, with the programs of a box.
type callBox struct {
	*box
	env  []string
	mu   sync.Mutex
	conn net.Conn // the newest connection of the machine
}

func newCallBox(t *testing.T) *callBox {
	t.Helper()
	testneeds.Root(t, "to enrol as root")
	programs := fakePrograms(t)
	b := &callBox{box: &box{t: t, dir: memory(t), now: time.Date(2026, 11, 27, 16, 20, 0, 0, time.UTC)}}
	b.env = []string{"PATH=" + programs + ":/usr/local/bin:/usr/bin:/bin", "FAKE=" + b.dir}
	b.fill()
	return b
}

// call has the machine call a console that works on it. Both run until the end of the call.
func (b *callBox) call(work func(context.Context, enrol.Machine) error) error {
	t := b.t
	t.Helper()
	program := filepath.Join(t.TempDir(), "bootstrapper")
	write(t, program, "", 0o600)
	l, err := callhome.Listen(t.Context(), callhome.Options{
		Listen: "127.0.0.1:0", Programs: map[string]string{"any": program}, ValidFor: time.Hour, Now: time.Now,
		Machines: []callhome.Machine{{Name: "worker-1", Address: netip.MustParseAddr("127.0.0.1"), Work: "prepare it"}},
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	served := make(chan struct{})
	go func() {
		defer close(served)
		l.Serve(ctx, callhome.Events{
			Work:    func(ctx context.Context, _ int, h *callhome.Host) ([]string, error) { return nil, work(ctx, h) },
			Refused: func(r callhome.Refusal) { t.Errorf("refused: %+v", r) },
			Expired: func(int) { t.Error("expired") },
		})
	}()
	defer func() {
		stop()
		<-served
	}()
	c := caller.Call{Env: b.env, Print: func(string) {}, Patience: time.Second, Dial: func(ctx context.Context, address string) (net.Conn, error) {
		conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", address)
		b.mu.Lock()
		defer b.mu.Unlock()
		b.conn = conn
		return conn, err
	}}
	for line := range strings.Lines(strings.ReplaceAll(l.Command(0), "\\\n", "")) {
		if f := strings.Fields(line); len(f) == 7 && f[4] == "call" {
			c.Token, c.Console, c.Pin = f[1], l.Console(0), f[6]
		}
	}
	return c.Run(t.Context())
}

// cut ends the newest connection, as a network does that is gone.
func (b *callBox) cut() {
	b.mu.Lock()
	defer b.mu.Unlock()
	_ = b.conn.Close()
}

// callLine counts the calls on a machine that called, and cuts the connection before or after one of them.
type callLine struct {
	enrol.Machine
	b     *callBox
	calls int
	at    int
	late  bool
}

func (l *callLine) count() (cut bool) {
	l.b.mu.Lock()
	defer l.b.mu.Unlock()
	l.calls++
	return l.calls == l.at
}

func (l *callLine) Run(ctx context.Context, c sshhost.Command) (sshhost.Result, error) {
	cut := l.count()
	if cut && (!l.late || c.Stdout != nil) {
		l.b.cut()
	}
	r, err := l.Machine.Run(ctx, c)
	if cut {
		l.b.cut()
	}
	return r, err
}

func (l *callLine) Upload(ctx context.Context, file string, mode fs.FileMode, size int64, r io.Reader) error {
	cut := l.count()
	if cut && !l.late {
		r = io.MultiReader(io.LimitReader(r, size/2), readFunc(func([]byte) (int, error) { l.b.cut(); return 0, io.ErrUnexpectedEOF }))
	}
	err := l.Machine.Upload(ctx, file, mode, size, r)
	if cut {
		l.b.cut()
	}
	return err
}

type readFunc func([]byte) (int, error)

func (f readFunc) Read(p []byte) (int, error) { return f(p) }

// TestEnrolACaller enrols and removes a machine that calls.
func TestEnrolACaller(t *testing.T) {
	t.Parallel()
	b := newCallBox(t)
	before := b.tree()
	s := b.spec()
	install := func(ctx context.Context, m enrol.Machine) error {
		_, err := enrol.Install(ctx, m, b.request(s))
		return err
	}
	if err := b.call(install); err != nil {
		t.Fatal(err)
	}
	for file, want := range map[string]string{"usr/lib/it/agent": "agent v1", "etc/motd": "secret", "etc/runtime/conf": "ours\n"} {
		if got, err := os.ReadFile(b.path(file)); err != nil || string(got) != want {
			t.Errorf("%s is %q %v, want %q", file, got, err, want)
		}
	}
	if info, err := os.Stat(filepath.Join(b.dir, "state/journal.json")); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the journal: %v %v", info, err)
	}
	// Another workspace is refused, and the remedy names no login.
	other := s
	other.Cluster = "uid-2"
	err := b.call(func(ctx context.Context, m enrol.Machine) error {
		_, err := enrol.Install(ctx, m, b.request(other))
		if !errors.Is(err, enrol.ErrOtherCluster) || !strings.Contains(plan.Remedy(err), "machine remove worker-1 --print-command") {
			t.Errorf("another workspace: %v\n%s", err, plan.Remedy(err))
		}
		return err
	})
	if err == nil || !strings.Contains(err.Error(), "enrolled for another cluster") {
		t.Errorf("the machine reports %v", err)
	}
	// A second console is kept out by the lock.
	err = b.call(func(ctx context.Context, m enrol.Machine) error {
		r := b.request(s)
		r.Prepare = func(context.Context, enrol.Machine) error {
			second := b.call(func(ctx context.Context, m enrol.Machine) error {
				_, err := enrol.Install(ctx, m, b.request(s))
				if !errors.Is(err, enrol.ErrHeld) {
					t.Errorf("the second console: %v", err)
				}
				return err
			})
			if second == nil || !strings.Contains(second.Error(), "admin@laptop since") {
				t.Errorf("the second machine reports %v", second)
			}
			return nil
		}
		_, err := enrol.Install(ctx, m, r)
		return err
	})
	if err != nil {
		t.Error(err)
	}
	if err := b.call(func(ctx context.Context, m enrol.Machine) error {
		_, err := enrol.Remove(ctx, m, b.request(enrol.Spec{Cluster: "uid-1"}))
		return err
	}); err != nil || b.tree() != before {
		t.Errorf("the removal: %v\n%s\nwant\n%s", err, b.tree(), before)
	}
}

// TestCallerCutAtEachStep cuts the connection before and after each call of an installation. The machine calls again by
// itself, with the same token, and is completed.
func TestCallerCutAtEachStep(t *testing.T) {
	t.Parallel()
	b := newCallBox(t)
	before := b.tree()
	s := b.spec()
	s.Files = []enrol.File{s.Files[0], s.Files[1], s.Files[3], s.Files[5]}
	install := func(at int, late bool) (calls, attempts int, err error) {
		err = b.call(func(ctx context.Context, m enrol.Machine) error {
			if attempts++; attempts > 1 {
				_, err := enrol.Install(ctx, m, b.request(s))
				return err
			}
			l := &callLine{Machine: m, b: b, at: at, late: late}
			_, err := enrol.Install(ctx, l, b.request(s))
			calls = l.calls
			return err
		})
		return calls, attempts, err
	}
	calls, attempts, err := install(0, false)
	if err != nil || attempts != 1 || calls < 14 {
		t.Fatalf("%d calls, %d attempts: %v", calls, attempts, err)
	}
	for at := 3; at <= calls; at++ { // before, the machine is only read
		b.empty()
		// After the last call the work is done, and only the result does not arrive.
		if _, attempts, err := install(at, at%2 == 0); at < calls && (err != nil || attempts != 2) {
			t.Errorf("cut at call %d: %d attempts, %v", at, attempts, err)
		}
		for _, f := range s.Files {
			got, err := os.ReadFile(f.Path)
			if f.Link == "" && (err != nil || !bytes.Equal(got, f.Data)) {
				t.Errorf("cut at call %d: %s is %q %v", at, f.Path, got, err)
			}
		}
		if at%4 > 0 {
			continue
		}
		if err := b.call(func(ctx context.Context, m enrol.Machine) error {
			_, err := enrol.Remove(ctx, m, b.request(enrol.Spec{Cluster: "uid-1"}))
			return err
		}); err != nil || b.tree() != before {
			t.Errorf("the removal after a cut at call %d: %v\n%s\nwant\n%s", at, err, b.tree(), before)
		}
	}
}
