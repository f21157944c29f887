// Package term talks to the terminal and formats text for it.
//
// Terminal runs a Bubble Tea model: it sets the terminal up, reads keys and replies, paints
// frames with as few bytes as possible, and restores the terminal after a crash, a signal or
// a suspend. Theme and Row build lines in the columns and colours that the terminal has. Clean
// makes text from outside safe to show; Width, Cut and Wrap count columns. Alarm wakes a screen
// that stays open for hours.
//
// The package has no notion of a cluster, a run or a command, and imports only engine/plain of
// this module. Nothing else in tui accesses the terminal.
package term

import (
	"bytes"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"runtime/debug"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/charmbracelet/x/ansi"
	"golang.org/x/sys/unix"
	"golang.org/x/term"

	// Without it, Bubble Tea queries the terminal's colours and waits before main runs.
	_ "constellation/tui/term/quiet"

	tea "github.com/charmbracelet/bubbletea"
)

const (
	// FrameGap is the minimum time between two frames.
	FrameGap = time.Second / 30
	// keyGap is the minimum time before a frame after a key press: short enough that the user
	// sees no delay.
	keyGap = FrameGap / 4
	// probeLimit is the timeout for the terminal's reply to the colour query. Only the end of
	// the program waits for the reply, so that it does not go to the user's shell.
	probeLimit = 120 * time.Millisecond
	// stopLimit is the timeout for restoring a terminal that accepts no more output.
	stopLimit = 2 * time.Second
	// copyLimit is the maximum payload of the clipboard sequence; terminals drop longer ones.
	copyLimit = 74_994
)

// Terminal escape sequences.
const (
	SeqAltOn     = "\x1b[?1049h"
	SeqAltOff    = "\x1b[?1049l"
	SeqCursorOn  = "\x1b[?25h"
	SeqCursorOff = "\x1b[?25l"
	SeqWrapOn    = "\x1b[?7h"
	SeqWrapOff   = "\x1b[?7l"
	SeqPasteOn   = "\x1b[?2004h"
	SeqPasteOff  = "\x1b[?2004l"

	seqSyncOn, seqSyncOff = "\x1b[?2026h", "\x1b[?2026l"
	seqClear              = "\x1b[2J"
	seqReset              = "\x1b[0m"
	seqClearRight         = "\x1b[K"
	// Queries of the background colour (OSC 11) and the device attributes (DA1). Every
	// terminal replies to the second one, so its reply ends the wait for the first.
	seqProbe = "\x1b]11;?\x07\x1b[c"
)

// Messages that the terminal sends to the console, beside Bubble Tea's own
// (tea.KeyMsg, tea.WindowSizeMsg).
type (
	// Background is the terminal's reply to the query of its background colour.
	Background struct{ Light bool }
	// Signalled is a signal that ends the program.
	Signalled struct{ Sig syscall.Signal }
)

// Terminal is the user's terminal while the console is shown.
type Terminal struct {
	in, Out *os.File
	Display Display
	// OnCrash is called after a panic, before the program exits; it may be nil.
	OnCrash func()
	env     func(string) string
	program *tea.Program

	frames      chan string   // the newest frame not painted yet
	urgent      chan struct{} // has an element if that frame follows a key press
	quit        chan struct{} // closed to stop the painter
	painterDone chan struct{} // closed when the painter has stopped

	mu            sync.Mutex
	saved         *term.State
	Live          bool
	shown         []string // lines on the screen, as written
	old, new      []glyph  // buffers for differ
	Width, Height int
	filter        *replies
	restorer      io.WriteCloser // see keep; nil if there is none
}

// NewTerminal returns the terminal of in and out. It writes and changes nothing before run.
func NewTerminal(in, out *os.File, env func(string) string) *Terminal {
	t := &Terminal{in: in, Out: out, env: env, Display: DisplayOf(env), frames: make(chan string, 1), urgent: make(chan struct{}, 1)}
	t.Width, t.Height = 80, 24
	if w, h, err := term.GetSize(int(out.Fd())); err == nil && w > 0 && h > 0 {
		t.Width, t.Height = w, h
	}
	return t
}

// IsTerminal reports whether f is a terminal.
func IsTerminal(f any) bool {
	file, ok := f.(*os.File)
	return ok && term.IsTerminal(int(file.Fd()))
}

// Columns is the width of the terminal that f is; 0 if f is no terminal.
func Columns(f any) int {
	file, ok := f.(*os.File)
	if !ok {
		return 0
	}
	w, _, err := term.GetSize(int(file.Fd()))
	if err != nil {
		return 0
	}
	return w
}

// NotInteractive returns why the console cannot be shown; empty if it can.
func NotInteractive(in, out any, env func(string) string) string {
	switch {
	case !IsTerminal(in):
		return "stdin is not a terminal"
	case !IsTerminal(out):
		return "stdout is not a terminal"
	case env("TERM") == "dumb" || env("TERM") == "":
		return "the terminal cannot move its cursor (TERM=" + env("TERM") + ")"
	case env("CI") != "":
		return "CI is set"
	}
	return ""
}

// DisplayOf detects the capabilities of the terminal from the environment: colour depth, UTF-8
// locale, and a first guess at the background.
func DisplayOf(env func(string) string) Display {
	var l Display
	name := env("TERM")
	switch depth := env("COLORTERM"); {
	case env("NO_COLOR") != "" || name == "dumb" || name == "": // any non-empty value counts
		l.Colours = NoColours
	case depth == "truecolor" || depth == "24bit" || strings.HasSuffix(name, "-direct"):
		l.Colours = TrueColour
	case strings.Contains(name, "256color"):
		l.Colours = Colours256
	case strings.Contains(name, "kitty") || strings.Contains(name, "alacritty") || strings.Contains(name, "ghostty") ||
		strings.Contains(name, "foot") || strings.Contains(name, "wezterm"):
		l.Colours = TrueColour
	case strings.HasPrefix(name, "tmux") || strings.HasPrefix(name, "screen"):
		l.Colours = Colours256
	default:
		l.Colours = Colours16
	}
	locale := env("LC_ALL")
	if locale == "" {
		locale = env("LC_CTYPE")
	}
	if locale == "" {
		locale = env("LANG")
	}
	locale = strings.ToLower(locale)
	l.Ascii = !strings.Contains(locale, "utf-8") && !strings.Contains(locale, "utf8")
	// COLORFGBG is "foreground;background" in the sixteen colours.
	if f := strings.Split(env("COLORFGBG"), ";"); len(f) > 1 {
		if bg, err := strconv.Atoi(f[len(f)-1]); err == nil {
			l.Light = bg == 7 || bg > 8
		}
	}
	return l
}

// Run shows the model until it quits, and returns it. It restores the terminal, also after a
// panic.
func (t *Terminal) Run(ctx context.Context, m tea.Model) (tea.Model, error) {
	t.filter = &replies{File: t.in}
	t.program = tea.NewProgram(Host{m, t},
		tea.WithContext(ctx),
		tea.WithInput(t.filter),
		// We handle painting, signals and panics: see paint, signals and rescue.
		tea.WithOutput(io.Discard), tea.WithoutRenderer(), tea.WithoutSignalHandler(), tea.WithoutCatchPanics())
	t.filter.send = t.Send

	if err := t.start(); err != nil {
		return m, fmt.Errorf("set up the terminal: %w", err)
	}
	defer t.release()
	t.Paint(m.View())

	t.quit, t.painterDone = make(chan struct{}), make(chan struct{})
	go t.painter()
	defer func() {
		close(t.quit)
		select {
		case <-t.painterDone:
		case <-time.After(stopLimit):
		}
	}()

	stopSignals := t.signals()
	defer stopSignals()

	end, err := t.program.Run()
	if h, ok := end.(Host); ok {
		m = h.m
	}
	return m, err
}

// Send sends a message to the console. It blocks until the console has received it or has
// ended. It is safe for concurrent use.
func (t *Terminal) Send(m tea.Msg) { t.program.Send(m) }

// start sets the terminal up. It is called again after a suspension, during which the shell
// may have changed all settings.
func (t *Terminal) start() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	saved, err := term.MakeRaw(int(t.in.Fd()))
	if err != nil {
		return err
	}
	first := t.saved == nil
	if first {
		t.saved = saved
	}
	if first {
		// Keys typed before the first frame were not meant for the console.
		DiscardInput(t.in)
	}
	t.Live, t.shown = true, nil
	if w, h, err := term.GetSize(int(t.Out.Fd())); err == nil && w > 0 && h > 0 {
		t.Width, t.Height = w, h
	}
	seq := SeqAltOn + SeqCursorOff + SeqWrapOff + SeqPasteOn + seqClear
	if first && t.Display.Colours != NoColours && t.env("TERM") != "linux" {
		t.filter.expect(time.Now())
		seq += seqProbe
	}
	if _, err = io.WriteString(t.Out, seq); err == nil {
		t.startRestorer()
	}
	return err
}

// SeqBack restores a terminal.
const SeqBack = seqReset + SeqPasteOff + SeqWrapOn + SeqCursorOn + SeqAltOff

// startRestorer starts a helper shell that restores the screen if this process dies without doing so,
// as after kill -9. The user's shell restores the line settings. A failure to start it is
// ignored. The caller holds mu.
func (t *Terminal) startRestorer() {
	if t.restorer != nil {
		return
	}
	cmd := exec.CommandContext(context.Background(), "/bin/sh", "-c", `trap '' HUP INT QUIT TERM TSTP TTOU; read -r word || printf %s "$1"`, "sh", SeqBack)
	cmd.Stdout = t.Out
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // so that it gets no signals from keys
	in, err := cmd.StdinPipe()
	if err != nil || cmd.Start() != nil {
		return
	}
	t.restorer = in
	go func() { _ = cmd.Wait() }()
}

// stop restores the terminal. It is idempotent and safe for concurrent use.
func (t *Terminal) stop() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.Live {
		return
	}
	t.Live = false
	_, _ = io.WriteString(t.Out, SeqBack)
	if t.restorer != nil {
		_, _ = io.WriteString(t.restorer, "done\n")
		t.restorer.Close()
		t.restorer = nil
	}
	t.filter.drain()
	_ = term.Restore(int(t.in.Fd()), t.saved)
}

// release is stop with a timeout, for the end of the program: a terminal that accepts no
// output, because its line is dead or its user pressed Ctrl-S, must not block the exit.
func (t *Terminal) release() {
	done := make(chan struct{})
	go func() { t.stop(); close(done) }()
	select {
	case <-done:
	case <-time.After(stopLimit):
		_ = term.Restore(int(t.in.Fd()), t.saved)
	}
}

// suspend restores the terminal, stops the process group as the shell expects, and returns
// when the process continues.
func (t *Terminal) suspend() {
	t.stop()
	cont := make(chan os.Signal, 1)
	signal.Notify(cont, syscall.SIGCONT)
	// SIGTSTP does not stop a Go program that has ever called signal.Notify for it. SIGTTOU
	// does: it stops the whole job, but only if a shell can continue it. Without a shell the
	// kernel ignores it, and we continue.
	_ = syscall.Kill(0, syscall.SIGTTOU)
	select {
	case <-cont:
	case <-time.After(200 * time.Millisecond):
	}
	signal.Stop(cont)
}

// signals turns signals into messages until the returned function is called.
func (t *Terminal) signals() (stop func()) {
	ch := make(chan os.Signal, 8)
	signal.Notify(ch, syscall.SIGWINCH, syscall.SIGTSTP, syscall.SIGCONT, syscall.SIGINT, syscall.SIGTERM)
	if !signal.Ignored(syscall.SIGHUP) { // nohup
		signal.Notify(ch, syscall.SIGHUP)
	}
	done := make(chan struct{})
	go func() {
		defer t.rescue()
		for {
			select {
			case <-done:
				return
			case s := <-ch:
				switch s {
				case syscall.SIGTSTP, syscall.SIGCONT, syscall.SIGWINCH:
					if s == syscall.SIGTSTP {
						t.suspend()
					}
					if s != syscall.SIGWINCH && t.start() != nil {
						continue
					}
					if w, h, ok := t.resize(); ok {
						t.Send(tea.WindowSizeMsg{Width: w, Height: h})
					}
				default:
					t.Send(Signalled{s.(syscall.Signal)})
				}
			}
		}
	}()
	return func() { signal.Stop(ch); close(done) }
}

// resize reads the size of the terminal and invalidates the screen.
func (t *Terminal) resize() (w, h int, ok bool) {
	w, h, err := term.GetSize(int(t.Out.Fd()))
	if err != nil || w <= 0 || h <= 0 {
		return 0, 0, false
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.Width, t.Height, t.shown = w, h, nil
	return w, h, true
}

// Redraw makes the next frame a complete one.
func (t *Terminal) Redraw() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.shown = nil
}

// show schedules a frame: immediately if the last one is older than FrameGap, or than keyGap
// after a key press. If frames come faster than the terminal accepts them, only the newest is
// painted.
func (t *Terminal) show(frame string, key bool) {
	for {
		select {
		case t.frames <- frame:
			if key {
				select {
				case t.urgent <- struct{}{}:
				default:
				}
			}
			return
		default:
		}
		select {
		case <-t.frames:
		default:
		}
	}
}

// painter paints scheduled frames until quit is closed.
func (t *Terminal) painter() {
	defer t.rescue()
	defer close(t.painterDone)
	var next, nextKey time.Time // earliest times of the next frame, and of one after a key press
	for {
		var f string
		select {
		case <-t.quit:
			return
		case f = <-t.frames:
		}
		for due := next; ; {
			wait := time.Until(due)
			if wait <= 0 {
				break
			}
			timer := time.NewTimer(wait)
			select {
			case <-t.quit:
				timer.Stop()
				return
			case <-t.urgent:
				due = nextKey
			case <-timer.C:
			}
			timer.Stop()
		}
		select {
		case f = <-t.frames: // a newer one
		default:
		}
		select {
		case <-t.urgent:
		default:
		}
		began := time.Now()
		t.Paint(f)
		ended := time.Now()
		slow := 2 * ended.Sub(began) // fewer frames on a slow line
		next, nextKey = ended.Add(max(FrameGap, slow)), ended.Add(max(keyGap, slow))
	}
}

// Paint writes the changed lines of a frame in one write.
func (t *Terminal) Paint(frame string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.Live {
		return
	}
	lines := strings.Split(frame, "\n")
	if len(lines) > t.Height {
		lines = lines[:t.Height]
	}
	var b bytes.Buffer
	pen := brush{b: &b}
	if t.shown == nil {
		b.WriteString(seqClear)
	}
	for i := range max(len(lines), len(t.shown)) {
		var now, was string
		if i < len(lines) {
			now = lines[i]
		}
		if i < len(t.shown) {
			was = t.shown[i]
		}
		if now == was {
			continue
		}
		if t.shown != nil && t.differ(&pen, i, was, now) {
			continue
		}
		pen.use("")
		fmt.Fprintf(&b, "\x1b[%d;1H", i+1)
		w := ansi.StringWidth(now)
		if w > t.Width {
			now, w = ansi.Truncate(now, t.Width, ""), t.Width
		}
		b.WriteString(now)
		b.WriteString(seqReset)
		if w < t.Width { // at the right edge it would clear the last character
			b.WriteString(seqClearRight)
		}
	}
	pen.use("")
	t.shown = lines
	if b.Len() == 0 {
		return
	}
	// The error is ignored: a terminal that is gone sends SIGHUP.
	_, _ = t.Out.Write(append(append([]byte(seqSyncOn), b.Bytes()...), seqSyncOff...))
}

// differ writes the changed columns of a line. It reports false if the line must be written as
// a whole.
func (t *Terminal) differ(pen *brush, y int, was, now string) bool {
	var ok bool
	if t.old, ok = glyphsOf(was, t.old); !ok || len(t.old) > t.Width {
		return false
	}
	if t.new, ok = glyphsOf(now, t.new); !ok || len(t.new) > t.Width {
		return false
	}
	pen.difference(y, t.old, t.new)
	return true
}

// Copy sends text to the user's clipboard (OSC 52) through the terminal and tmux. It cannot
// detect whether they allow it. It reports whether text is short enough.
func (t *Terminal) Copy(text string) bool {
	enc := base64.StdEncoding.EncodeToString([]byte(text))
	if len(enc) > copyLimit {
		return false
	}
	seq := "\x1b]52;c;" + enc + "\x07"
	if t.env("TMUX") != "" { // tmux handles the first or passes on the second, as configured
		seq += "\x1bPtmux;\x1b" + seq + "\x1b\\"
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.Live {
		_, _ = io.WriteString(t.Out, seq)
	}
	return true
}

// rescue recovers from a panic, restores the terminal, prints the stack and exits. Each of our
// goroutines defers it while the console is shown.
func (t *Terminal) rescue() {
	r := recover()
	if r == nil {
		return
	}
	stack := debug.Stack()
	t.release()
	if t.OnCrash != nil {
		t.OnCrash()
	}
	fmt.Fprintf(os.Stderr, "constellation: the console crashed: %v\n\n%s\nThe run is safe: the same command resumes it.\n", r, stack)
	os.Exit(1)
}

// Host wraps the model for Bubble Tea: it paints after each message and guards each command.
type Host struct {
	m tea.Model
	t *Terminal
}

// Init implements tea.Model.
func (h Host) Init() tea.Cmd { return h.t.guard(h.m.Init()) }

// Update implements tea.Model.
func (h Host) Update(msg tea.Msg) (tea.Model, tea.Cmd) {
	defer h.t.rescue()
	if k, ok := msg.(tea.KeyMsg); ok && k.Type == tea.KeyCtrlZ {
		_ = syscall.Kill(syscall.Getpid(), syscall.SIGTSTP) // see signals
		return h, nil
	}
	_, key := msg.(tea.KeyMsg)
	var cmd tea.Cmd
	h.m, cmd = h.m.Update(msg)
	h.t.show(h.m.View(), key)
	return h, h.t.guard(cmd)
}

// View implements tea.Model; the painter shows the frames instead.
func (h Host) View() string { return "" }

// guard defers rescue in a command and in the commands of a batch.
func (t *Terminal) guard(cmd tea.Cmd) tea.Cmd {
	if cmd == nil {
		return nil
	}
	return func() tea.Msg {
		defer t.rescue()
		msg := cmd()
		if batch, ok := msg.(tea.BatchMsg); ok {
			for i := range batch {
				batch[i] = t.guard(batch[i])
			}
		}
		return msg
	}
}

// replies reads the terminal's input and removes its replies to our queries, which would
// otherwise be read as keys.
type replies struct {
	*os.File
	send func(tea.Msg)

	mu        sync.Mutex
	queriedAt time.Time // time of the query; zero if no reply is expected
	partial   []byte    // an incomplete reply
}

// expect records that the query was sent.
func (r *replies) expect(now time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.queriedAt = now
}

// Read reads input without replies.
func (r *replies) Read(p []byte) (int, error) {
	r.mu.Lock()
	held := len(r.partial)
	copy(p, r.partial)
	r.partial = nil
	r.mu.Unlock()
	n, err := r.File.Read(p[held:])
	n += held
	if err != nil && n == 0 {
		return 0, err
	}
	return copy(p, r.take(p[:n])), err
}

// take removes replies from b and handles them.
func (r *replies) take(b []byte) []byte {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.queriedAt.IsZero() {
		return b
	}
	if i := bytes.Index(b, []byte("\x1b]11;")); i >= 0 {
		end, size := oscEnd(b[i:])
		if end < 0 {
			return r.keepPartial(b, i)
		}
		if light, ok := lightColour(string(b[i+len("\x1b]11;") : i+end])); ok && r.send != nil {
			go r.send(Background{light})
		}
		b = append(b[:i:i], b[i+end+size:]...)
	}
	if i := bytes.Index(b, []byte("\x1b[?")); i >= 0 {
		end := bytes.IndexByte(b[i:], 'c')
		if end < 0 {
			return r.keepPartial(b, i)
		}
		r.queriedAt = time.Time{}
		return append(b[:i:i], b[i+end+1:]...)
	}
	for _, start := range []string{"\x1b]11;", "\x1b[?"} { // a reply split between two reads
		for n := len(start) - 1; n > 1; n-- {
			if bytes.HasSuffix(b, []byte(start[:n])) {
				return r.keepPartial(b, len(b)-n)
			}
		}
	}
	return b
}

// keepPartial keeps b[i:] for the next read, unless it is too long or too late for a reply.
func (r *replies) keepPartial(b []byte, i int) []byte {
	if len(b)-i > 64 || time.Since(r.queriedAt) > 10*probeLimit {
		r.queriedAt = time.Time{}
		return b
	}
	r.partial = bytes.Clone(b[i:])
	return b[:i]
}

// oscEnd finds the end of an operating system command and the length of its
// terminator.
func oscEnd(b []byte) (at, size int) {
	for i := range b {
		if b[i] == '\a' {
			return i, 1
		}
		if b[i] == '\\' && i > 0 && b[i-1] == 0x1b {
			return i - 1, 2
		}
	}
	return -1, 0
}

// drain waits for an outstanding reply, so that it does not go to the user's shell. It returns
// at the latest probeLimit after the query.
func (r *replies) drain() {
	for {
		r.mu.Lock()
		asked := r.queriedAt
		r.mu.Unlock()
		left := probeLimit - time.Since(asked)
		if asked.IsZero() || left <= 0 {
			return
		}
		fds := []unix.PollFd{{Fd: int32(r.Fd()), Events: unix.POLLIN}}
		n, err := unix.Poll(fds, int(left/time.Millisecond)+1)
		if errors.Is(err, syscall.EINTR) {
			continue
		}
		if err != nil || n == 0 || fds[0].Revents&unix.POLLIN == 0 {
			return
		}
		var buf [256]byte
		if _, err := r.Read(buf[:]); err != nil {
			return
		}
	}
}

// lightColour parses rgb:RRRR/GGGG/BBBB and reports whether the colour is light.
func lightColour(s string) (light, ok bool) {
	s, found := strings.CutPrefix(s, "rgb:")
	if !found {
		return false, false
	}
	parts := strings.Split(s, "/")
	if len(parts) != 3 {
		return false, false
	}
	var rgb [3]float64
	for i, p := range parts {
		v, err := strconv.ParseUint(p, 16, 32)
		if err != nil || len(p) == 0 || len(p) > 4 {
			return false, false
		}
		rgb[i] = float64(v) / float64(uint64(1)<<(4*len(p))-1)
	}
	return 0.299*rgb[0]+0.587*rgb[1]+0.114*rgb[2] > 0.5, true
}

// MakeRaw puts a terminal into raw mode, for an interactive program inside a machine, and returns
// a function that restores it.
func MakeRaw(f *os.File) (restore func(), err error) {
	saved, err := term.MakeRaw(int(f.Fd()))
	if err != nil {
		return nil, err
	}
	return func() { _ = term.Restore(int(f.Fd()), saved) }, nil
}

// LiveLine is a status line at the bottom of plain output that is overwritten in place, on
// terminals only. The zero value writes nothing.
type LiveLine struct {
	Out     *os.File
	Display Display
	drawn   bool
}

// Set replaces the text of the line.
func (l *LiveLine) Set(text string) {
	if l.Out == nil {
		return
	}
	if w, _, err := term.GetSize(int(l.Out.Fd())); err == nil && w > 1 {
		text = CutMiddle(text, w-1, NewTheme(Display{Ascii: l.Display.Ascii}).Ellipsis)
	}
	text = AsciiIf(l.Display.Ascii, text)
	l.drawn = true
	_, _ = io.WriteString(l.Out, "\r"+text+seqClearRight)
}

// Clear removes the line.
func (l *LiveLine) Clear() {
	if l.Out == nil || !l.drawn {
		return
	}
	l.drawn = false
	_, _ = io.WriteString(l.Out, "\r"+seqClearRight)
}

// LiveTable is LiveLine with several lines. A table that is higher than the terminal shows its first lines.
type LiveTable struct {
	Out     *os.File
	Display Display
	drawn   int // lines
}

// Set replaces the lines.
func (l *LiveTable) Set(lines []string) {
	if l.Out == nil {
		return
	}
	w, h, err := term.GetSize(int(l.Out.Fd()))
	if err != nil || w < 2 || h < 3 {
		return
	}
	if len(lines) > h-2 {
		lines = lines[:h-2]
	}
	var out strings.Builder
	out.WriteString(l.erase())
	ellipsis := NewTheme(Display{Ascii: l.Display.Ascii}).Ellipsis
	for _, line := range lines {
		out.WriteString(AsciiIf(l.Display.Ascii, Cut(line, w-1, ellipsis)) + seqClearRight + "\r\n")
	}
	l.drawn = len(lines)
	_, _ = io.WriteString(l.Out, out.String())
}

// Clear removes the lines.
func (l *LiveTable) Clear() {
	if l.Out == nil || l.drawn == 0 {
		return
	}
	_, _ = io.WriteString(l.Out, l.erase())
	l.drawn = 0
}

// erase goes to the first line, and clears all of them.
func (l *LiveTable) erase() string {
	if l.drawn == 0 {
		return ""
	}
	return fmt.Sprintf("\r\x1b[%dA\x1b[J", l.drawn)
}
