package callhome_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"constellation/engine/callhome"
	"constellation/engine/callhome/caller"
	"constellation/engine/plan"
	"constellation/engine/sshhost"
	"constellation/internal/testneeds"
)

// console is a listener on this computer, and what it reported.
type console struct {
	t *testing.T
	l *callhome.Listener
	o callhome.Options

	mu      sync.Mutex
	now     time.Time
	refused []callhome.Refusal
	expired []int
	served  chan struct{}
	stop    context.CancelFunc
}

type work func(ctx context.Context, i int, h *callhome.Host) ([]string, error)

// listen starts a console that waits for one machine at each address.
func listen(t *testing.T, w work, addresses ...string) *console {
	t.Helper()
	program := filepath.Join(t.TempDir(), "bootstrapper")
	if err := os.WriteFile(program, []byte("#!/bin/sh\nread -r token\necho \"$@\" \"token=$token\" \"$(ls -l \"$0\")\"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	c := &console{t: t, now: time.Date(2026, 11, 27, 20, 0, 0, 0, time.UTC), served: make(chan struct{})}
	c.o = callhome.Options{Listen: "127.0.0.1:0", Programs: map[string]string{arch(t): program}, ValidFor: time.Hour, Now: func() time.Time {
		c.mu.Lock()
		defer c.mu.Unlock()
		return c.now
	}}
	for i, a := range addresses {
		c.o.Machines = append(c.o.Machines, callhome.Machine{Name: fmt.Sprintf("worker-%d", i), Address: netip.MustParseAddr(a), Work: "prepare this machine"})
	}
	c.start(w)
	return c
}

func (c *console) start(w work) {
	c.t.Helper()
	var err error
	if c.l, err = callhome.Listen(c.t.Context(), c.o); err != nil {
		c.t.Fatalf("%v\n%s", err, plan.Remedy(err))
	}
	ctx, stop := context.WithCancel(c.t.Context())
	c.stop, c.served = stop, make(chan struct{})
	go func() {
		defer close(c.served)
		c.l.Serve(ctx, callhome.Events{
			Work: w,
			Refused: func(r callhome.Refusal) {
				c.mu.Lock()
				defer c.mu.Unlock()
				c.refused = append(c.refused, r)
			},
			Expired: func(i int) {
				c.mu.Lock()
				defer c.mu.Unlock()
				c.expired = append(c.expired, i)
			},
		})
	}()
	c.t.Cleanup(func() {
		stop()
		<-c.served
	})
}

func (c *console) lastRefusal() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.refused) == 0 {
		return ""
	}
	r := c.refused[len(c.refused)-1]
	return r.From + ": " + r.Reason
}

func arch(t *testing.T) string {
	t.Helper()
	out, err := exec.Command("uname", "-m").Output()
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(out))
}

// words are the address of the console, the digest and the token, from a printed command.
func words(t *testing.T, command string) (address, pin, token string) {
	t.Helper()
	for line := range strings.Lines(strings.ReplaceAll(command, "\\\n", "")) {
		if c, ok := strings.CutPrefix(line, "console="); ok {
			address = strings.TrimSpace(c)
		}
		if f := strings.Fields(line); len(f) == 7 && f[0] == "echo" && f[4] == "call" {
			return address, f[6], f[1]
		}
	}
	t.Fatalf("no call in\n%s", command)
	return "", "", ""
}

// owner is a machine whose owner reads what is printed.
type owner struct {
	mu    sync.Mutex
	lines []string
}

func (o *owner) print(line string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.lines = append(o.lines, line)
}

func (o *owner) text() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return strings.Join(o.lines, "\n")
}

// machine is a machine that calls for the i-th token.
func (c *console) machine(i int) (*caller.Call, *owner) {
	o := &owner{}
	call := &caller.Call{Print: o.print, Patience: 2 * time.Second}
	call.Console, call.Pin, call.Token = words(c.t, c.l.Command(i))
	return call, o
}

func nothing(context.Context, int, *callhome.Host) ([]string, error) { return []string{"done"}, nil }

func TestRun(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	big := filepath.Join(t.TempDir(), "big")
	content := bytes.Repeat([]byte("0123456789abcdef"), 64<<10)
	if err := os.WriteFile(big, content, 0o600); err != nil {
		t.Fatal(err)
	}
	failed := errors.New("the end")
	c := listen(t, func(ctx context.Context, _ int, h *callhome.Host) ([]string, error) {
		run := func(c sshhost.Command) sshhost.Result {
			t.Helper()
			r, err := h.Run(ctx, c)
			if err != nil {
				t.Errorf("%q: %v", c.Argv, err)
			}
			return r
		}
		if h.Target().String() != "127.0.0.1" {
			t.Errorf("the target is %s", h.Target())
		}
		if r := run(sshhost.Command{Argv: []string{"sh", "-c", `cat; echo "$1" >&2; pwd; exit 3`, "sh", "a 'b'\n$HOME"}, Stdin: bytes.NewReader(content), MaxOutput: 4 << 20}); !bytes.Equal(r.Stdout, append(content, "/\n"...)) || string(r.Stderr) != "a 'b'\n$HOME\n" || r.Exit != 3 {
			t.Errorf("%d bytes, %q, exit %d", len(r.Stdout), r.Stderr, r.Exit)
		}
		if r := run(sshhost.Command{Argv: []string{"sh", "-c", "kill -9 $$"}}); r.Exit != -1 || r.Signal != "killed" || r.Err() == nil {
			t.Errorf("a signal: %+v", r)
		}
		if r := run(sshhost.Command{Argv: []string{"no-such-program"}}); r.Exit != 127 || !strings.Contains(string(r.Stderr), "not found") {
			t.Errorf("no program: %+v", r)
		}
		// Stdin that stays open ends with the command.
		in, out := io.Pipe()
		run(sshhost.Command{Argv: []string{"true"}, Stdin: in})
		_ = out.Close()
		// Output is bounded, and is not if it is streamed.
		if _, err := h.Run(ctx, sshhost.Command{Argv: []string{"sh", "-c", "while :; do echo 0123456789; done"}, MaxOutput: 1 << 10}); !errors.Is(err, sshhost.ErrTooMuch) {
			t.Errorf("endless output: %v", err)
		}
		var stream bytes.Buffer
		if r := run(sshhost.Command{Argv: []string{"cat", big}, MaxOutput: 10, Stdout: &stream}); !bytes.Equal(stream.Bytes(), content) || len(r.Stdout) > 0 {
			t.Errorf("%d bytes were streamed", stream.Len())
		}
		// A process in the background that keeps the output open does not hold the command.
		begin := time.Now()
		if run(sshhost.Command{Argv: []string{"sh", "-c", "sleep 30 & echo $!"}}); time.Since(begin) > 20*time.Second {
			t.Error("a process in the background held the command")
		}
		// The end of the context ends the command.
		pid := filepath.Join(dir, "pid")
		short, cancel := context.WithCancelCause(ctx)
		w := writer(func(p []byte) (int, error) { cancel(failed); return len(p), nil })
		if _, err := h.Run(short, sshhost.Command{Argv: []string{"sh", "-c", "echo $$ >$0; echo; sleep 300", pid}, Stdout: w}); !errors.Is(err, failed) {
			t.Errorf("a context that ended: %v", err)
		}
		text, _ := os.ReadFile(pid)
		gone := filepath.Join("/proc", strings.TrimSpace(string(text)), "fd", "0")
		for begin := time.Now(); time.Since(begin) < 20*time.Second; time.Sleep(10 * time.Millisecond) {
			if _, err := os.Lstat(gone); err != nil {
				gone = ""
				break
			}
		}
		if gone != "" {
			t.Error("the command still runs")
		}
		return []string{"all is well"}, nil
	}, "127.0.0.1")
	call, o := c.machine(0)
	if err := call.Run(t.Context()); err != nil || !strings.HasSuffix(o.text(), "all is well") || !strings.Contains(o.text(), "will prepare this machine") {
		t.Errorf("the call: %v\n%s", err, o.text())
	}
	<-c.served
	if conn, err := net.Dial("tcp", c.l.Console(0)); err == nil {
		conn.Close()
		t.Error("the console still listens")
	}
}

type writer func(p []byte) (int, error)

func (w writer) Write(p []byte) (int, error) { return w(p) }

func TestUpload(t *testing.T) {
	t.Parallel()
	testneeds.Root(t, "to set owners of files")
	dir := t.TempDir()
	c := listen(t, func(ctx context.Context, _ int, h *callhome.Host) ([]string, error) {
		file := filepath.Join(dir, "file")
		if err := h.Upload(ctx, file, 0o640, 5, strings.NewReader("first")); err != nil {
			t.Error(err)
		}
		// A source that breaks off leaves the file as it was.
		if err := h.Upload(ctx, file, 0o600, 9, io.MultiReader(strings.NewReader("second"), broken{})); err == nil {
			t.Error("a source that cannot be read was uploaded")
		}
		if err := h.Upload(ctx, file, 0o600, 4, strings.NewReader("longer")); err == nil {
			t.Error("a file that is longer than its size was uploaded")
		}
		if err := h.Upload(ctx, dir+"/none/file", 0o600, 1, strings.NewReader("x")); err == nil || plan.Remedy(err) == "" {
			t.Errorf("no folder: %v", err)
		}
		info, err := os.Stat(file)
		if b, _ := os.ReadFile(file); err != nil || string(b) != "first" || info.Mode().Perm() != 0o640 {
			t.Errorf("the file is %q %v %v", b, info, err)
		}
		list, _ := os.ReadDir(dir)
		if len(list) != 1 {
			t.Errorf("left over: %v", list)
		}
		return nil, nil
	}, "127.0.0.1")
	call, _ := c.machine(0)
	if err := call.Run(t.Context()); err != nil {
		t.Error(err)
	}
}

type broken struct{}

func (broken) Read([]byte) (int, error) { return 0, errors.New("broken") }

// TestRefusals has every wrong use of a token refused at both ends, and the right one admitted after all of them.
func TestRefusals(t *testing.T) {
	t.Parallel()
	hold, held := make(chan struct{}), make(chan struct{}, 1)
	c := listen(t, func(context.Context, int, *callhome.Host) ([]string, error) {
		held <- struct{}{}
		<-hold
		return []string{"prepared"}, nil
	}, "127.0.0.1", "127.0.0.1")
	refused := func(what, want, remedy string, change func(*caller.Call)) {
		t.Helper()
		call, o := c.machine(0)
		change(call)
		err := call.Run(t.Context())
		var e *caller.Error
		if !errors.As(err, &e) || !errors.Is(err, caller.ErrRefused) || !strings.Contains(err.Error(), want) || !strings.Contains(e.Remedy, remedy) || o.text() != "" {
			t.Errorf("%s: the machine reports %v, %q", what, err, o.text())
		}
		if is := c.lastRefusal(); !strings.Contains(is, want) {
			t.Errorf("%s: the console reports %q", what, is)
		}
		for _, l := range []callhome.Refusal{{Reason: c.lastRefusal()}, {Reason: fmt.Sprint(err)}} {
			if call.Token != "" && strings.Contains(l.Reason, call.Token) {
				t.Errorf("%s: the token is in %q", what, l.Reason)
			}
		}
	}
	nobody := func(*caller.Call) {}
	refused("a wrong token", "none of this console", "prints now", func(c *caller.Call) { c.Token = "WRONG" })
	refused("no token", "none of this console", "", func(c *caller.Call) { c.Token = "" })
	refused("another address", "the token of worker-0 is for 127.0.0.1, and the connection comes from 127.0.0.7", "--source", func(c *caller.Call) {
		c.Dial = func(ctx context.Context, address string) (net.Conn, error) {
			return (&net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 7)}}).DialContext(ctx, "tcp", address)
		}
	})
	if !strings.HasPrefix(c.lastRefusal(), "127.0.0.7: ") {
		t.Errorf("the console reports %q", c.lastRefusal())
	}
	first, o := c.machine(0)
	ended := make(chan error, 1)
	go func() { ended <- first.Run(t.Context()) }()
	<-held
	refused("a second connection", "in use by another connection", "wait until it ended", nobody)
	close(hold)
	if err := <-ended; err != nil || !strings.HasSuffix(o.text(), "prepared") {
		t.Errorf("the machine: %v\n%s", err, o.text())
	}
	refused("a second use", "was used at 2026-11-27T20:00:00Z", "somebody else had the token", nobody)
	c.mu.Lock()
	c.now = c.now.Add(time.Hour)
	c.mu.Unlock()
	refused("an expired token", "worker-1 expired at 2026-11-27T21:00:00Z", "--valid-for", func(call *caller.Call) {
		_, _, call.Token = words(t, c.l.Command(1))
	})
}

// TestExpiry ends a console whose tokens are not used.
func TestExpiry(t *testing.T) {
	t.Parallel()
	c := listen(t, nothing, "127.0.0.1")
	c.stop()
	<-c.served
	c.o.ValidFor = 50 * time.Millisecond
	c.start(nothing)
	<-c.served
	if len(c.expired) != 1 {
		t.Errorf("expired: %v", c.expired)
	}
}

// TestAnotherConsole has a token that is not sent to a program with another certificate.
func TestAnotherConsole(t *testing.T) {
	t.Parallel()
	c := listen(t, nothing, "127.0.0.1")
	call, _ := c.machine(0)
	other := listen(t, nothing, "127.0.0.1")
	call.Console = other.l.Console(0)
	var e *caller.Error
	if err := call.Run(t.Context()); !errors.As(err, &e) || !strings.Contains(err.Error(), "its certificate is not the one of the command") || e.Remedy == "" || other.lastRefusal() != "" {
		t.Errorf("another certificate: %v", err)
	}
	call.Pin = "short"
	if err := call.Run(t.Context()); !errors.As(err, &e) {
		t.Errorf("a broken digest: %v", err)
	}
}

// TestConsoleEnds has a console that is interrupted in the middle of the work. The machine reports why, and the old
// command is worthless for the next console.
func TestConsoleEnds(t *testing.T) {
	t.Parallel()
	begun := make(chan struct{})
	c := listen(t, func(ctx context.Context, _ int, h *callhome.Host) ([]string, error) {
		close(begun)
		_, err := h.Run(ctx, sshhost.Command{Argv: []string{"sleep", "300"}})
		return nil, err
	}, "127.0.0.1")
	call, o := c.machine(0)
	ended := make(chan error, 1)
	go func() { ended <- call.Run(t.Context()) }()
	<-begun
	c.stop()
	var e *caller.Error
	if err := <-ended; !errors.As(err, &e) || !strings.Contains(err.Error(), "the console ended") || !strings.Contains(e.Remedy, "repeat its command") {
		t.Errorf("the machine reports %v\n%s", err, o.text())
	}
	<-c.served
	c.o.Listen = call.Console
	c.start(nothing)
	if err := call.Run(t.Context()); !errors.As(err, &e) || !strings.Contains(e.Remedy, "prints now") {
		t.Errorf("the old command at the next console: %v", err)
	}
	next, _ := c.machine(0)
	if err := next.Run(t.Context()); err != nil {
		t.Errorf("the new command: %v", err)
	}
}

// TestFailedWork leaves the token valid.
func TestFailedWork(t *testing.T) {
	t.Parallel()
	n := 0
	c := listen(t, func(context.Context, int, *callhome.Host) ([]string, error) {
		if n++; n == 1 {
			return []string{"block: swap is on"}, &plan.Error{Op: "check", Err: errors.New("swap is on"), Remedy: "run swapoff -a"}
		}
		return nil, nil
	}, "127.0.0.1")
	call, o := c.machine(0)
	var e *caller.Error
	if err := call.Run(t.Context()); !errors.As(err, &e) || !strings.Contains(err.Error(), "swap is on") || e.Remedy != "run swapoff -a" || !strings.Contains(o.text(), "block: swap is on") {
		t.Errorf("the machine reports %v\n%s", err, o.text())
	}
	if err := call.Run(t.Context()); err != nil {
		t.Errorf("the same command again: %v", err)
	}
}

// TestHostileMachines answers with what no caller sends.
func TestHostileMachines(t *testing.T) {
	t.Parallel()
	var failed error
	c := listen(t, func(ctx context.Context, _ int, h *callhome.Host) ([]string, error) {
		_, failed = h.Run(ctx, sshhost.Command{Argv: []string{"true"}})
		return nil, failed
	}, "127.0.0.1")
	for name, answer := range map[string]string{
		"a frame of 4 GiB":  "o\xff\xff\xff\xff",
		"an unknown frame":  "?\x00\x00\x00\x01x",
		"no exit":           "o\x00\x00\x00\x01x",
		"no JSON":           "x\x00\x00\x00\x02\x1b[",
		"an endless stream": strings.Repeat("o\x00\x01\x00\x00"+strings.Repeat("x", 64<<10), 32),
	} {
		if err := c.answer(0, answer); err != nil || failed == nil || strings.ContainsRune(failed.Error(), 0x1b) || plan.Remedy(failed) == "" {
			t.Errorf("%s: %v, %v", name, err, failed)
		}
	}
}

// TestSilentConnections fills all places of other addresses; the machine still gets through.
func TestSilentConnections(t *testing.T) {
	t.Parallel()
	c := listen(t, nothing, "127.0.0.1")
	call, _ := c.machine(0)
	for i := range 160 {
		d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 1, byte(1+i%20))}}
		conn, err := d.DialContext(t.Context(), "tcp", call.Console)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
	}
	if err := call.Run(t.Context()); err != nil {
		t.Error(err)
	}
}

// TestCommand runs the printed command with the program of the console.
func TestCommand(t *testing.T) {
	t.Parallel()
	testneeds.Root(t, "as the command wants")
	testneeds.Program(t, "curl", "curl")
	c := listen(t, nothing, "127.0.0.1")
	command := c.l.Command(0)
	address, pin, token := words(t, command)
	run := func(path, command string) (string, error) {
		cmd := exec.CommandContext(t.Context(), "sh", "-c", command)
		cmd.Env = []string{"PATH=" + path}
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	const path = "/usr/sbin:/usr/bin:/sbin:/bin"
	out, err := run(path, command)
	if err != nil || !strings.HasPrefix(out, "call "+address+" "+pin+" token="+token+" -rwx------ ") {
		t.Errorf("%v\n%s", err, out)
	}
	// Without curl it takes wget.
	only := t.TempDir()
	for _, name := range []string{"sh", "id", "uname", "mktemp", "wget", "sha256sum", "chmod", "rm", "ls"} {
		if err := os.Symlink(testneeds.Program(t, name, name), filepath.Join(only, name)); err != nil {
			t.Fatal(err)
		}
	}
	if out, err := run(only, command); err != nil || !strings.HasPrefix(out, "call "+address) {
		t.Errorf("without curl: %v\n%s", err, out)
	}
	if err := os.Remove(filepath.Join(only, "wget")); err != nil {
		t.Fatal(err)
	}
	if out, err := run(only, command); err == nil || out != "constellation: neither curl nor wget is here: install one of them\n" {
		t.Errorf("without curl and wget: %v\n%s", err, out)
	}
	// User data have the same script. Both can be copied from a terminal with 80 columns.
	data := c.l.CloudInit(0)
	for line := range strings.Lines(command + data) {
		if len(line) > 80 {
			t.Errorf("a line of %d bytes: %s", len(line)-1, line)
		}
	}
	var script strings.Builder
	if _, body, ok := strings.Cut(data, "  - |\n"); ok {
		for line := range strings.Lines(body) {
			script.WriteString(strings.TrimPrefix(line, "    "))
		}
	}
	if !strings.HasSuffix(command, ") "+script.String()) || !strings.HasPrefix(data, "#cloud-config\n") {
		t.Errorf("user data:\n%s", data)
	}
	// A program with another digest is not run.
	for _, file := range c.o.Programs {
		if err := os.WriteFile(file, []byte("#!/bin/sh\necho hostile\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if out, err := run(path, command); err == nil || !strings.Contains(out, "not the one of this command") || strings.Contains(out, "hostile") {
		t.Errorf("another program: %v\n%s", err, out)
	}
	if out, err := run(path, strings.Replace(command, arch(t)+")", "other)", 1)); err == nil || !strings.Contains(out, "no program for "+arch(t)) {
		t.Errorf("another architecture: %v\n%s", err, out)
	}
	if left, _ := filepath.Glob("/var/lib/constellation-call.*"); len(left) > 0 {
		t.Errorf("left over: %q", left)
	}
}

func TestOptions(t *testing.T) {
	t.Parallel()
	c := listen(t, nothing, "127.0.0.1")
	for _, at := range []string{"127.0.0.1", "host:1", "127.0.0.1:http", "127.0.0.1:70000"} {
		o := c.o
		o.Listen = at
		if _, err := callhome.Listen(t.Context(), o); plan.ExitCode(err) != plan.ExitUsage || plan.Remedy(err) == "" {
			t.Errorf("--listen %s: %v", at, err)
		}
	}
	o := c.o
	o.Listen = c.l.Console(0)
	if _, err := callhome.Listen(t.Context(), o); err == nil || !strings.Contains(plan.Remedy(err), "--listen") {
		t.Errorf("a port in use: %v", err)
	}
	for _, at := range []string{"", ":0", "0.0.0.0:0"} {
		o.Listen = at
		l, err := callhome.Listen(t.Context(), o)
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		if host, _, _ := net.SplitHostPort(l.Console(0)); host != "127.0.0.1" {
			t.Errorf("--listen %q: machines connect to %s", at, l.Console(0))
		}
	}
}

// answer is a machine that answers commands with text. It returns when the console ended the call.
func (c *console) answer(i int, text string) error {
	address, _, token := words(c.t, c.l.Command(i))
	conn, err := tls.Dial("tcp", address, &tls.Config{InsecureSkipVerify: true, NextProtos: []string{caller.Protocol}})
	if err != nil {
		return err
	}
	defer conn.Close()
	b, err := json.Marshal(caller.Hello{Token: token})
	if err == nil {
		_, err = conn.Write(append(b, '\n'))
	}
	if err != nil {
		return err
	}
	for one := make([]byte, 1); one[0] != '\n'; {
		if _, err := conn.Read(one); err != nil {
			return err
		}
	}
	closed := make(chan struct{})
	var protocols http.Protocols
	protocols.SetUnencryptedHTTP2(true)
	s := &http.Server{Protocols: &protocols, ConnState: func(_ net.Conn, s http.ConnState) {
		if s == http.StateClosed {
			close(closed)
		}
	}, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == caller.PathRun {
			_, _ = io.WriteString(w, text)
		}
	})}
	defer s.Close()
	l := &one{conn: struct{ net.Conn }{conn}, closed: closed}
	go func() { _ = s.Serve(l) }()
	<-closed
	return nil
}

// one is a listener with one connection.
type one struct {
	conn   net.Conn
	closed chan struct{}
}

func (o *one) Accept() (net.Conn, error) {
	if c := o.conn; c != nil {
		o.conn = nil
		return c, nil
	}
	<-o.closed
	return nil, net.ErrClosed
}

func (o *one) Close() error   { return nil }
func (o *one) Addr() net.Addr { return &net.TCPAddr{} }
