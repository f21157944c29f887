package tui

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/creack/pty"
	"golang.org/x/sys/unix"

	"constellation/engine"
)

// stepTimeout is the timeout of each step. It is generous, and still shorter than the wait for a
// terminal that does not reply, which takes five seconds or never ends.
const stepTimeout = 4 * time.Second

// onTerminal is the program on a pseudo terminal that sends no replies unless the test does.
type onTerminal struct {
	t    *testing.T
	cmd  *exec.Cmd
	tty  *os.File // our end
	own  *os.File // the program's end, to read its settings
	was  *unix.Termios
	done chan error

	mu     sync.Mutex
	out    bytes.Buffer
	answer func([]byte) []byte // returns the replies to output of the program
}

func (p *onTerminal) output() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.out.String()
}

// startOn runs the program with args on a terminal of w x h.
func startOn(t *testing.T, w, h uint16, env []string, answer func([]byte) []byte, args ...string) *onTerminal {
	t.Helper()
	return startWith(t, "", w, h, env, answer, args...)
}

// startWith is startOn with keys typed before the program starts.
func startWith(t *testing.T, typed string, w, h uint16, env []string, answer func([]byte) []byte, args ...string) *onTerminal {
	t.Helper()
	tty, own, err := pty.Open()
	if err != nil {
		t.Skipf("needs pseudo terminals: %v", err)
	}
	if err := pty.Setsize(tty, &pty.Winsize{Cols: w, Rows: h}); err != nil {
		t.Fatal(err)
	}
	p := &onTerminal{t: t, tty: tty, own: own, done: make(chan error, 1), answer: answer}
	if p.was, err = unix.IoctlGetTermios(int(own.Fd()), getTermios); err != nil {
		t.Fatal(err)
	}
	p.types(typed)
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	p.cmd = exec.Command(exe)
	p.cmd.Args = append([]string{"constellation"}, args...) // see TestMain
	p.cmd.Dir = t.TempDir()
	p.cmd.Env = append([]string{"TERM=xterm-256color", "LANG=C.UTF-8", "HOME=" + p.cmd.Dir, "PATH=" + os.Getenv("PATH")}, env...)
	p.cmd.Stdin, p.cmd.Stdout, p.cmd.Stderr = own, own, own
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		buf := make([]byte, 4096)
		for {
			n, err := tty.Read(buf)
			p.mu.Lock()
			p.out.Write(buf[:n])
			p.mu.Unlock()
			if n > 0 && p.answer != nil {
				if a := p.answer(buf[:n]); len(a) > 0 {
					_, _ = tty.Write(a)
				}
			}
			if err != nil {
				return
			}
		}
	}()
	go func() { p.done <- p.cmd.Wait() }()
	t.Cleanup(func() {
		_ = p.cmd.Process.Kill()
		tty.Close()
		own.Close()
	})
	return p
}

// sees waits until the program has written text.
func (p *onTerminal) sees(text string) {
	p.t.Helper()
	for end := time.Now().Add(stepTimeout); ; time.Sleep(5 * time.Millisecond) {
		if strings.Contains(p.output(), text) {
			return
		}
		if time.Now().After(end) {
			p.t.Fatalf("%q was not written; what was:\n%q", text, p.output())
		}
	}
}

func (p *onTerminal) types(keys string) {
	p.t.Helper()
	if _, err := io.WriteString(p.tty, keys); err != nil {
		p.t.Fatal(err)
	}
}

// ends waits for the end of the program and returns its exit code.
func (p *onTerminal) ends() int {
	p.t.Helper()
	select {
	case err := <-p.done:
		var exit *exec.ExitError
		if err != nil && !errors.As(err, &exit) {
			p.t.Fatal(err)
		}
		return p.cmd.ProcessState.ExitCode()
	case <-time.After(stepTimeout):
		p.t.Fatalf("the program does not end; it wrote\n%q", p.output())
	}
	return 0
}

// restored checks that the terminal has its original state.
func (p *onTerminal) restored() {
	p.t.Helper()
	now, err := unix.IoctlGetTermios(int(p.own.Fd()), getTermios)
	if err != nil {
		p.t.Fatal(err)
	}
	if *now != *p.was {
		p.t.Errorf("the terminal's settings differ: %+v, want %+v", *now, *p.was)
	}
	for on, off := range map[string]string{seqAltOn: seqAltOff, seqCursorOff: seqCursorOn, seqWrapOff: seqWrapOn, seqPasteOn: seqPasteOff} {
		for end := time.Now().Add(stepTimeout); ; time.Sleep(5 * time.Millisecond) {
			out := p.output() // the last bytes may still be on their way to us
			if strings.LastIndex(out, on) < strings.LastIndex(out, off) {
				break
			}
			if time.Now().After(end) {
				p.t.Fatalf("%q is not taken back", on)
			}
		}
	}
}

func stream(t *testing.T, name string) string {
	t.Helper()
	path, err := filepath.Abs(filepath.Join("testdata", "streams", name+".jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	return "FAKE_RUN=" + path
}

// Verbs without a console must not query the terminal. The libraries would do so and wait
// five seconds for the reply; package quiet prevents that.
func TestVerbsDoNotQueryTheTerminal(t *testing.T) {
	for args, says := range map[string]string{"version": "kubernetes ", "--help": "for more information", "config validate": "fix "} {
		t.Run(args, func(t *testing.T) {
			p := startOn(t, 80, 24, nil, nil, strings.Fields(args)...)
			p.ends()
			p.sees(says)
			if out := p.output(); strings.Contains(out, "\x1b") {
				t.Errorf("an escape sequence was written: %q", out)
			}
		})
	}
}

// On a terminal prepare asks once, after the plan; earlier keys are no answer.
func TestPrepareAsksOnATerminal(t *testing.T) {
	for _, tt := range []struct {
		name, answer string
		exit         int
		says         string
	}{
		{"yes", "y\n", engine.ExitDone, "cluster demo is prepared for image v1.1.0"},
		{"no is the default", "\n", engine.ExitUnacknowledged, "the plan was not accepted; nothing was changed"},
		{"no", "never\n", engine.ExitUnacknowledged, "the plan was not accepted; nothing was changed"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p := startWith(t, "y\n", 100, 30, []string{stream(t, "prepare")}, nil, "upgrade", "prepare")
			p.sees("Publish this? [y/N]")
			if out := p.output(); !strings.Contains(out, " target-file        would ") || strings.Contains(out, " start     Publish") {
				t.Errorf("before the answer:\n%s", out)
			}
			p.types(tt.answer)
			p.sees(tt.says)
			if code := p.ends(); code != tt.exit {
				t.Errorf("exit %d, want %d", code, tt.exit)
			}
		})
	}
	p := startWith(t, "", 100, 30, []string{stream(t, "prepare")}, nil, "upgrade", "prepare", "--non-interactive")
	if code := p.ends(); code != engine.ExitUnacknowledged || strings.Contains(p.output(), "[y/N]") {
		t.Errorf("non-interactive: exit %d\n%s", code, p.output())
	}
}

func TestConsoleOnATerminalWithoutReplies(t *testing.T) {
	p := startOn(t, 80, 24, []string{stream(t, "init")}, nil)
	p.sees("Configuration")
	p.types("q")
	if code := p.ends(); code != 0 {
		t.Errorf("ended with %d", code)
	}
	p.restored()
	p.sees("nothing has been created; come back: ")
}

// Keys typed before the console started must not trigger anything.
func TestKeysTypedBeforeTheConsoleAreDiscarded(t *testing.T) {
	p := startWith(t, "q\r\rq?", 80, 24, []string{stream(t, "init")}, nil)
	p.sees("Configuration")
	p.types("?")
	p.sees("Keys: config") // the earlier keys neither quit nor opened anything
	p.types("?q")
	if code := p.ends(); code != 0 {
		t.Errorf("ended with %d", code)
	}
	p.restored()
}

// A reply in any form changes the colours and is not read as keys.
func TestConsoleOnATerminalWithReplies(t *testing.T) {
	for _, tt := range []struct{ name, colour string }{
		{"ended by BEL", "\x1b]11;rgb:ffff/ffff/ffff\a"},
		{"ended by ST", "\x1b]11;rgb:ff/ff/ff\x1b\\"},
		{"no colour, only device attributes", ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			asked := make(chan struct{}, 1)
			p := startOn(t, 80, 24, []string{stream(t, "init")}, func(b []byte) []byte {
				if !bytes.Contains(b, []byte("\x1b[c")) {
					return nil
				}
				asked <- struct{}{}
				return []byte(tt.colour + "\x1b[?62;22c")
			})
			select {
			case <-asked:
			case <-time.After(stepTimeout):
				t.Fatal("the background colour was not queried")
			}
			p.sees("Configuration")
			if tt.colour != "" {
				p.sees("38;5;2") // a colour of the light theme follows the first frame
			}
			p.types("?")
			p.sees("Keys: config")
			p.types("?q")
			if code := p.ends(); code != 0 {
				t.Errorf("ended with %d", code)
			}
			p.restored()
		})
	}
}

func TestRepliesAreRemovedFromTheInput(t *testing.T) {
	const colour, what = "\x1b]11;rgb:1111/2222/3333\x1b\\", "\x1b[?64;1;2c"
	for _, tt := range []struct {
		name string
		in   []string
		want string
	}{
		{"whole", []string{colour + what + "q"}, "q"},
		{"with keys around", []string{"a" + colour + "b" + what + "c"}, "abc"},
		{"split in the colour", []string{colour[:9], colour[9:] + what + "q"}, "q"},
		{"split in the beginning", []string{colour[:3], colour[3:] + what + "q"}, "q"},
		{"split in the second reply", []string{colour + what[:5], what[5:] + "q"}, "q"},
		{"only device attributes", []string{what + "q"}, "q"},
		{"Escape is a key", []string{"\x1b"}, "\x1b"},
		{"arrows are keys", []string{"\x1b[A\x1b[B"}, "\x1b[A\x1b[B"},
		{"after the reply all input is keys", []string{what, what}, what},
	} {
		r := &replies{}
		r.expect(time.Now())
		var got []byte
		for _, s := range tt.in {
			b := append(bytes.Clone(r.partial), s...)
			r.partial = nil
			got = append(got, r.take(b)...)
		}
		if string(got) != tt.want {
			t.Errorf("%s: keys %q, want %q", tt.name, got, tt.want)
		}
	}
}

// skipIfIgnored skips the test if its parent ignores the signal, as nohup does: the program inherits
// and respects that.
func skipIfIgnored(t *testing.T, sig os.Signal) {
	t.Helper()
	if signal.Ignored(sig) {
		t.Skipf("%v is ignored by the program that started this test", sig)
	}
}

func TestSignalsRestoreTheTerminal(t *testing.T) {
	for sig, want := range map[syscall.Signal]int{syscall.SIGTERM: engine.ExitTerminated, syscall.SIGHUP: engine.ExitHungUp, syscall.SIGINT: engine.ExitInterrupted} {
		t.Run(sig.String(), func(t *testing.T) {
			skipIfIgnored(t, sig)
			p := startOn(t, 80, 24, []string{stream(t, "init"), "FAKE_STAGE=partial", "FAKE_PACE=1"}, nil)
			p.sees("Machines")
			if err := p.cmd.Process.Signal(sig); err != nil {
				t.Fatal(err)
			}
			if code := p.ends(); code != want {
				t.Errorf("ended with %d, want %d", code, want)
			}
			p.restored()
		})
	}
}

// After kill -9 the helper shell restores the screen.
func TestKillRestoresTheScreen(t *testing.T) {
	p := startOn(t, 80, 24, []string{stream(t, "init"), "FAKE_STAGE=partial", "FAKE_PACE=1"}, nil)
	p.sees("Machines")
	if err := p.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	p.ends()
	p.sees(seqBack)
}

// A suspended program leaves a usable terminal, and redraws its screen afterwards.
func TestSuspendAndResume(t *testing.T) {
	p := startOn(t, 80, 24, []string{stream(t, "init")}, nil)
	p.sees("Configuration")
	p.types("\x1a")
	p.sees(seqAltOff)
	// No shell controls this session, so the kernel does not stop the program: it must set the
	// terminal up again on its own.
	for end := time.Now().Add(stepTimeout); strings.Count(p.output(), "Configuration") < 2; time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("the screen was not drawn again: %q", p.output())
		}
	}
	p.types("q")
	p.ends()
	p.restored()
}

func TestResizeRedraws(t *testing.T) {
	p := startOn(t, 80, 24, []string{stream(t, "init")}, nil)
	p.sees("Configuration")
	if err := pty.Setsize(p.tty, &pty.Winsize{Cols: 50, Rows: 24}); err != nil {
		t.Fatal(err)
	}
	p.sees("width 50 of 60")
	p.types("q")
	p.ends()
	p.restored()
}

func TestPanicRestoresTheTerminal(t *testing.T) {
	p := startOn(t, 80, 24, []string{stream(t, "init"), "FAKE_PANIC=1"}, nil)
	if code := p.ends(); code != engine.ExitFailed {
		t.Errorf("ended with %d, want 1", code)
	}
	p.sees("the console crashed: the fake engine was asked to")
	p.restored()
}

func TestTerminalsWithoutACursorGetPlainText(t *testing.T) {
	for _, tt := range []struct{ name, env, why string }{
		{"TERM is dumb", "TERM=dumb", "the terminal cannot move its cursor (TERM=dumb)"},
		{"CI", "CI=true", "CI is set"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p := startOn(t, 80, 24, []string{stream(t, "init"), tt.env}, nil)
			if code := p.ends(); code != 0 {
				t.Errorf("ended with %d", code)
			}
			p.sees("remark  " + tt.why)
			if strings.Contains(p.output(), "\x1b") {
				t.Errorf("an escape sequence was written: %q", p.output())
			}
		})
	}
}

func TestNoColour(t *testing.T) {
	p := startOn(t, 80, 24, []string{stream(t, "init"), "NO_COLOR=yes"}, nil)
	p.sees("Configuration")
	p.types("q")
	p.ends()
	out := p.output()
	if regexp.MustCompile(`\x1b\[[0-9;]*[1-9][0-9;]*m`).MatchString(out) || strings.Contains(out, "\x1b]11") {
		t.Errorf("colours were written or queried: %q", out)
	}
}

// Ctrl-C twice ends the program, which prints how to come back.
func TestLeavingARunPrintsASummary(t *testing.T) {
	p := startOn(t, 80, 24, []string{stream(t, "init"), "FAKE_STAGE=partial", "FAKE_PACE=1"}, nil)
	p.sees("Machines")
	p.types("\x03")
	p.sees("Leave this run?")
	p.types("\x03")
	if code := p.ends(); code != engine.ExitStopped {
		t.Errorf("ended with %d, want 7", code)
	}
	p.restored()
	p.sees("of 8 done")
}

// A run continues after the reader of stdout has closed it.
func TestRunOutlivesItsReader(t *testing.T) {
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	var stderr bytes.Buffer
	cmd := exec.Command(exe)
	cmd.Args = []string{"constellation", "init", "--yes", "-o", "json"}
	cmd.Dir, cmd.Stdout, cmd.Stderr = t.TempDir(), w, &stderr
	cmd.Env = append(os.Environ(), stream(t, "init"), "FAKE_PACE=100")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	w.Close()
	if _, err := r.Read(make([]byte, 10)); err != nil {
		t.Fatal(err)
	}
	r.Close()
	if err := cmd.Wait(); err != nil {
		t.Errorf("the run ended with %v", err)
	}
	if !strings.Contains(stderr.String(), "remark  stdout was closed by its reader") {
		t.Errorf("stderr says %q", stderr.String())
	}
}

// answering selects the check that the fake engine returns.
func answering(t *testing.T, name string) string {
	t.Helper()
	path, err := filepath.Abs(filepath.Join("testdata", "checks", name+".json"))
	if err != nil {
		t.Fatal(err)
	}
	return "FAKE_CHECK=" + path
}

// An interrupted query cannot be resumed, and its output does not say so.
func TestInterruptedAnswer(t *testing.T) {
	p := startOn(t, 80, 24, []string{answering(t, "trouble"), "FAKE_HANGS=1"}, nil, "upgrade", "check")
	p.sees("0 of 1 checked")
	p.types("\x03")
	if code := p.ends(); code != engine.ExitInterrupted {
		t.Errorf("ended with %d, want %d", code, engine.ExitInterrupted)
	}
	p.sees("remark  interrupted; nothing was changed")
	if s := p.output(); strings.Contains(s, "taken up again") || strings.Contains(s, "error") || strings.Contains(s, "Versions") {
		t.Errorf("it says %q", s)
	}
}

// A reader that closes stdout early causes no error.
func TestAnswerWithoutReader(t *testing.T) {
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	r.Close()
	defer w.Close()
	var stderr bytes.Buffer
	cmd := exec.Command(exe)
	cmd.Args = []string{"constellation", "upgrade", "check"}
	cmd.Dir, cmd.Stdout, cmd.Stderr = t.TempDir(), w, &stderr
	cmd.Env = append(os.Environ(), answering(t, "trouble"))
	if err := cmd.Run(); err != nil || stderr.Len() > 0 {
		t.Errorf("ended with %v and says %q", err, stderr.String())
	}
}

func TestSignalsEndAScriptedRun(t *testing.T) {
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for sig, want := range map[syscall.Signal]int{syscall.SIGINT: 130, syscall.SIGTERM: 143, syscall.SIGHUP: 129} {
		t.Run(sig.String(), func(t *testing.T) {
			skipIfIgnored(t, sig)
			cmd := exec.Command(exe)
			cmd.Args = []string{"constellation", "init", "--non-interactive", "--yes"}
			cmd.Dir = t.TempDir()
			cmd.Env = append(os.Environ(), stream(t, "init"), "FAKE_PACE=1")
			var stderr bytes.Buffer
			cmd.Stderr = &stderr
			out, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			if _, err := out.Read(make([]byte, 1)); err != nil {
				t.Fatal(err)
			}
			if err := cmd.Process.Signal(sig); err != nil {
				t.Fatal(err)
			}
			_, _ = io.Copy(io.Discard, out)
			_ = cmd.Wait()
			if code := cmd.ProcessState.ExitCode(); code != want || !strings.Contains(stderr.String(), "stopping at the next point where the command can be resumed") {
				t.Errorf("ended with %d, want %d; stderr %q", code, want, stderr.String())
			}
		})
	}
}

// BenchmarkEventToScreen measures the latency from a progress event of a run to the bytes that
// the terminal receives, including the gaps between batches and between frames. Events occur
// at random moments of the gaps. The target is 100 ms.
func BenchmarkEventToScreen(b *testing.B) {
	tty, own, err := pty.Open()
	if err != nil {
		b.Skipf("needs pseudo terminals: %v", err)
	}
	defer tty.Close()
	defer own.Close()
	if err := pty.Setsize(tty, &pty.Winsize{Cols: 120, Rows: 40}); err != nil {
		b.Fatal(err)
	}
	events := recorded(b, "init")
	emits := make(chan func(engine.Event), 1)
	e := &liveEngine{fakeEngine{home: demoHome(engine.StagePartial), plan: planIn(b, events)}, emits}
	term := newTerminal(own, own, func(k string) string { return map[string]string{"TERM": "xterm-256color", "LANG": "C.UTF-8"}[k] })
	c := newConsole(b.Context(), term.display, consoleDeps{engine: e, now: time.Now, send: term.send})
	ended := make(chan error, 1)
	go func() { _, err := term.run(b.Context(), c); ended <- err }()
	seen := make(chan int, 64)
	go func() {
		buf := make([]byte, 1<<16)
		marker := regexp.MustCompile(`benchmark-([0-9]+)-`)
		for {
			n, err := tty.Read(buf)
			if err != nil {
				return
			}
			for _, m := range marker.FindAllSubmatch(buf[:n], -1) {
				i, _ := strconv.Atoi(string(m[1]))
				select {
				case seen <- i:
				default:
				}
			}
		}
	}()
	emit := <-emits
	emit(events[0])
	emit(engine.Event{Kind: engine.KindStep, Step: "init-first-node", State: engine.StateRunning, Time: time.Now()})
	var took []time.Duration
	i := 0
	for b.Loop() {
		time.Sleep(time.Duration(rand.IntN(70)) * time.Millisecond)
		i++
		began := time.Now()
		emit(engine.Event{Kind: engine.KindProgress, Step: "init-first-node", Time: began, Text: fmt.Sprintf("benchmark-%d-", i)})
		for got := 0; got < i; {
			select {
			case got = <-seen:
			case <-time.After(stepTimeout):
				b.Fatal("the event does not reach the screen")
			}
		}
		took = append(took, time.Since(began))
	}
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)/2].Microseconds())/1000, "p50-ms")
	b.ReportMetric(float64(took[len(took)*99/100].Microseconds())/1000, "p99-ms")
	b.ReportMetric(float64(took[len(took)-1].Microseconds())/1000, "max-ms")
	term.send(signalled{syscall.SIGTERM})
	if err := <-ended; err != nil {
		b.Fatal(err)
	}
}

// liveEngine passes its emit function to the test.
type liveEngine struct {
	fakeEngine
	emits chan func(engine.Event)
}

func (l *liveEngine) Run(ctx context.Context, _ *engine.Plan, emit func(engine.Event)) error {
	l.emits <- emit
	<-ctx.Done()
	return ctx.Err()
}

func TestLookOfTheEnvironment(t *testing.T) {
	for _, tt := range []struct {
		env  string
		want display
	}{
		{"TERM=xterm-256color LANG=en_US.UTF-8", display{colours: colours256}},
		{"TERM=xterm LANG=de_DE.utf8", display{colours: colours16}},
		{"TERM=xterm LANG=C", display{colours: colours16, ascii: true}},
		{"TERM=xterm", display{colours: colours16, ascii: true}},
		{"TERM=xterm-kitty LC_ALL=C.UTF-8 LANG=C", display{colours: trueColour}},
		{"TERM=xterm LC_ALL=C LANG=C.UTF-8", display{colours: colours16, ascii: true}},
		{"TERM=screen COLORTERM=truecolor LANG=C.UTF-8", display{colours: trueColour}},
		{"TERM=tmux LANG=C.UTF-8", display{colours: colours256}},
		{"TERM=xterm-256color NO_COLOR=1 LANG=C.UTF-8", display{}},
		{"TERM=xterm-256color NO_COLOR=anything LANG=C.UTF-8", display{}},
		{"TERM=xterm COLORFGBG=0;15 LANG=C.UTF-8", display{colours: colours16, light: true}},
		{"TERM=xterm COLORFGBG=15;default;0 LANG=C.UTF-8", display{colours: colours16}},
	} {
		env := map[string]string{}
		for kv := range strings.FieldsSeq(tt.env) {
			k, v, _ := strings.Cut(kv, "=")
			env[k] = v
		}
		if got := displayOf(func(k string) string { return env[k] }); got != tt.want {
			t.Errorf("%s: %+v, want %+v", tt.env, got, tt.want)
		}
	}
}

// An emulator of the sequences that paint uses must show exactly the frame, whatever was on
// the screen before.
func TestPaintShowsTheFrame(t *testing.T) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	term := &terminal{out: w, live: true, width: 20, height: 4}
	frames := []string{
		"one\ntwo\nthree\nfour", "one\n2\nthree\nfour", "one\n2", "exactly twenty chars\nab", "x", "日本語\n\x1b[31mred\x1b[0m\nend",
		"a\nb\nc\nd\ne is beyond the screen", "this line is longer than the screen is wide",
	}
	want := [][]string{
		{"one", "two", "three", "four"},
		{"one", "2", "three", "four"},
		{"one", "2", "", ""},
		{"exactly twenty chars", "ab", "", ""},
		{"x", "", "", ""},
		{"日本語", "red", "end", ""},
		{"a", "b", "c", "d"},
		{"this line is longer ", "", "", ""},
	}
	screen := newEmulator(20, 4)
	go func() {
		for _, f := range frames {
			term.paint(f)
			_, _ = w.WriteString("\x00") // end of a frame
		}
		w.Close()
	}()
	all, err := io.ReadAll(r)
	if err != nil {
		t.Fatal(err)
	}
	for i, b := range bytes.Split(bytes.TrimSuffix(all, []byte{0}), []byte{0}) {
		screen.write(t, string(b))
		for y, l := range want[i] {
			if got := screen.line(y); got != strings.TrimRight(l, " ") {
				t.Errorf("frame %d, line %d shows %q, want %q", i+1, y+1, got, l)
			}
		}
	}
}

// TestPaintShowsAnyFrame paints frames of random lines, styles, widths and sizes: the screen
// must show the last one, whatever was there before.
func TestPaintShowsAnyFrame(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	words := []string{"a", "bc", " ", "   ", "ready", "█", "▒▒", "·", "日", "→", "0", "12", "e\u0301"}
	styles := []string{"", "\x1b[1m", "\x1b[38;5;111m", "\x1b[31m\x1b[1m"}
	line := func(w int) string {
		var b strings.Builder
		for used := 0; ; {
			x := words[rnd.IntN(len(words))]
			if used += width(x); used > w || rnd.IntN(12) == 0 {
				return b.String()
			}
			st := styles[rnd.IntN(len(styles))]
			b.WriteString(st + x)
			if st != "" {
				b.WriteString(seqReset)
			}
		}
	}
	for range 40 {
		w, h := 8+rnd.IntN(60), 1+rnd.IntN(6)
		f, err := os.CreateTemp(t.TempDir(), "out")
		if err != nil {
			t.Fatal(err)
		}
		term := &terminal{out: f, live: true, width: w, height: h}
		screen := newEmulator(w, h)
		var lines []string
		from := int64(0)
		for n := range 60 {
			if n%5 == 0 || len(lines) != h {
				lines = make([]string, h)
				for i := range lines {
					lines[i] = line(w)
				}
			} else {
				lines = slices.Clone(lines)
				lines[rnd.IntN(h)] = line(w)
				// A change of a few columns of a line is the most frequent one.
				if i := rnd.IntN(h); strings.Contains(lines[i], "ready") {
					lines[i] = strings.Replace(lines[i], "ready", "reedy", 1)
				}
			}
			term.paint(strings.Join(lines, "\n"))
			end, err := f.Seek(0, io.SeekCurrent)
			if err != nil {
				t.Fatal(err)
			}
			b := make([]byte, end-from)
			if _, err := f.ReadAt(b, from); err != nil && len(b) > 0 {
				t.Fatal(err)
			}
			from = end
			screen.write(t, string(b))
			for y, l := range lines {
				want := strings.TrimRight(strings.ReplaceAll(stripStyle(l), "e\u0301", "e"), " ")
				if got := strings.ReplaceAll(screen.line(y), "e\u0301", "e"); got != want {
					t.Fatalf("%dx%d, frame %d, line %d shows %q, want %q", w, h, n, y+1, got, want)
				}
				glyphs, ok := glyphsOf(l, nil)
				for x := range glyphs {
					if got := screen.styles[y][x]; ok && glyphs[x] != blank && got != glyphs[x].style {
						t.Fatalf("%dx%d, frame %d, line %d, column %d has style %q, want %q", w, h, n, y+1, x+1, got, glyphs[x].style)
					}
				}
			}
		}
		f.Close()
	}
}

// emulator is a terminal that supports the sequences of paint and fails on all others.
type emulator struct {
	cells  [][]rune
	styles [][]string
	style  string
	x, y   int
}

func newEmulator(w, h int) *emulator {
	e := &emulator{cells: make([][]rune, h), styles: make([][]string, h)}
	for i := range e.cells {
		e.cells[i], e.styles[i] = make([]rune, w), make([]string, w)
	}
	e.clear(0, 0, h)
	return e
}

func (e *emulator) clear(x, y, rows int) {
	for i := y; i < y+rows; i++ {
		for j := range e.cells[i] {
			if i > y || j >= x {
				e.cells[i][j], e.styles[i][j] = ' ', ""
			}
		}
	}
}

func (e *emulator) line(y int) string {
	return strings.TrimRight(strings.ReplaceAll(string(e.cells[y]), "\x01", ""), " ")
}

func (e *emulator) write(t *testing.T, s string) {
	t.Helper()
	for len(s) > 0 {
		if s[0] == 0x1b {
			end := strings.IndexAny(s[1:], "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz") + 2
			seq := s[:end]
			s = s[end:]
			switch {
			case seq == seqSyncOn || seq == seqSyncOff:
			case seq == seqReset:
				e.style = ""
			case strings.HasSuffix(seq, "m"):
				if !colourOnly(e.style) || !colourOnly(seq) {
					seq = e.style + seq
				}
				e.style = seq
			case strings.HasSuffix(seq, "G"):
				if _, err := fmt.Sscanf(seq, "\x1b[%dG", &e.x); err != nil {
					t.Fatalf("sequence %q: %v", seq, err)
				}
				e.x--
			case seq == seqClear:
				e.clear(0, 0, len(e.cells))
			case seq == seqClearRight:
				e.clear(e.x, e.y, 1)
			case strings.HasSuffix(seq, "H"):
				if _, err := fmt.Sscanf(seq, "\x1b[%d;%dH", &e.y, &e.x); err != nil {
					t.Fatalf("sequence %q: %v", seq, err)
				}
				e.x, e.y = e.x-1, e.y-1
			default:
				t.Fatalf("unknown sequence %q", seq)
			}
			continue
		}
		r := []rune(s)[0]
		s = s[len(string(r)):]
		w := width(string(r))
		if w == 0 { // a mark on the character before
			continue
		}
		if e.x+w > len(e.cells[e.y]) {
			t.Fatalf("line %d is written beyond the edge", e.y+1)
		}
		e.cells[e.y][e.x], e.styles[e.y][e.x] = r, e.style
		for i := 1; i < w; i++ {
			e.cells[e.y][e.x+i] = 1
		}
		e.x += w
	}
}
