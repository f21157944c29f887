package tui

import (
	"bytes"
	"errors"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/creack/pty"
	"golang.org/x/sys/unix"

	"constellation/engine/plan"
	"constellation/tui/term"
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
	p.seesTimes(text, 1)
}

// seesTimes waits until the program has written the text n times.
func (p *onTerminal) seesTimes(text string, n int) {
	p.t.Helper()
	for end := time.Now().Add(stepTimeout); ; time.Sleep(5 * time.Millisecond) {
		if strings.Count(p.output(), text) >= n {
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
	for on, off := range map[string]string{term.SeqAltOn: term.SeqAltOff, term.SeqCursorOff: term.SeqCursorOn, term.SeqWrapOff: term.SeqWrapOn, term.SeqPasteOn: term.SeqPasteOff} {
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
	path, err := filepath.Abs(filepath.Join("internal/enginefake/testdata/streams", name+".jsonl"))
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
		{name: "yes", answer: "y\n", exit: plan.ExitDone, says: "cluster demo is prepared for image v1.1.0"},
		{name: "no is the default", answer: "\n", exit: plan.ExitUnacknowledged, says: "the plan was not accepted; nothing was changed"},
		{name: "no", answer: "never\n", exit: plan.ExitUnacknowledged, says: "the plan was not accepted; nothing was changed"},
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
	if code := p.ends(); code != plan.ExitUnacknowledged || strings.Contains(p.output(), "[y/N]") {
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

// skipIfIgnored skips the test if its parent ignores the signal, as nohup does: the program inherits
// and respects that.
func skipIfIgnored(t *testing.T, sig os.Signal) {
	t.Helper()
	if signal.Ignored(sig) {
		t.Skipf("%v is ignored by the program that started this test", sig)
	}
}

func TestSignalsRestoreTheTerminal(t *testing.T) {
	for sig, want := range map[syscall.Signal]int{syscall.SIGTERM: plan.ExitTerminated, syscall.SIGHUP: plan.ExitHungUp, syscall.SIGINT: plan.ExitInterrupted} {
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
	p.sees(term.SeqBack)
}

// A suspended program leaves a usable terminal, and redraws its screen afterwards.
func TestSuspendAndResume(t *testing.T) {
	p := startOn(t, 80, 24, []string{stream(t, "init")}, nil)
	p.sees("Configuration")
	p.types("\x1a")
	p.sees(term.SeqAltOff)
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
	if code := p.ends(); code != plan.ExitFailed {
		t.Errorf("ended with %d, want 1", code)
	}
	p.sees("the console crashed: the fake engine was asked to")
	p.restored()
}

func TestTerminalsWithoutACursorGetPlainText(t *testing.T) {
	for _, tt := range []struct{ name, env, why string }{
		{name: "TERM is dumb", env: "TERM=dumb", why: "the terminal cannot move its cursor (TERM=dumb)"},
		{name: "CI", env: "CI=true", why: "CI is set"},
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
	if code := p.ends(); code != plan.ExitStopped {
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
	path, err := filepath.Abs(filepath.Join("internal/enginefake/testdata/checks", name+".json"))
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
	if code := p.ends(); code != plan.ExitInterrupted {
		t.Errorf("ended with %d, want %d", code, plan.ExitInterrupted)
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
