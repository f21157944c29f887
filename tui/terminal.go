package tui

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

	// Bubble Tea would ask the terminal for its colours, and wait, before main runs.
	_ "constellation/tui/quiet"

	tea "github.com/charmbracelet/bubbletea"
)

// All that touches a terminal is in this file: whether there is one, how it starts
// and ends, its size and colours, what is written to it and how. Screens return
// strings. To paint in another way, replace what is here.

const (
	// frameGap is the least time between two frames.
	frameGap = time.Second / 30
	// keyGap is that before a frame which shows what a key did. Nobody types that fast, so that
	// it costs nothing, and whoever types sees no delay.
	keyGap = frameGap / 4
	// probeLimit is how long a terminal may take to tell its background colour. Nothing
	// waits for the answer but the end of the program, so that it does not land in the
	// user's shell.
	probeLimit = 120 * time.Millisecond
	// stopLimit is how long a terminal that takes no more bytes may hold up the end.
	stopLimit = 2 * time.Second
	// copyLimit is how much the clipboard sequence may carry; terminals drop more.
	copyLimit = 74_994
)

// Sequences a terminal obeys.
const (
	seqAltOn, seqAltOff       = "\x1b[?1049h", "\x1b[?1049l"
	seqCursorOn, seqCursorOff = "\x1b[?25h", "\x1b[?25l"
	seqWrapOn, seqWrapOff     = "\x1b[?7h", "\x1b[?7l"
	seqPasteOn, seqPasteOff   = "\x1b[?2004h", "\x1b[?2004l"
	seqSyncOn, seqSyncOff     = "\x1b[?2026h", "\x1b[?2026l"
	seqClear                  = "\x1b[2J"
	seqReset                  = "\x1b[0m"
	seqClearRight             = "\x1b[K"
	// What is the colour of your background, and what are you? Every terminal answers
	// the second question, so its answer ends the first one.
	seqProbe = "\x1b]11;?\x07\x1b[c"
)

// Messages that the terminal sends to the console, beside Bubble Tea's own
// (tea.KeyMsg, tea.WindowSizeMsg).
type (
	// background is the terminal's answer to the question for its colours.
	background struct{ light bool }
	// signalled is a signal that ends the program.
	signalled struct{ sig syscall.Signal }
)

// terminal is the user's terminal while the console is shown.
type terminal struct {
	in, out *os.File
	look    look
	env     func(string) string
	program *tea.Program

	frames chan string   // the newest frame that is not painted yet
	hurry  chan struct{} // holds that it shows what a key did
	quit   chan struct{} // closed when the painter shall end
	gone   chan struct{} // closed when it has

	mu            sync.Mutex
	saved         *term.State
	live          bool
	shown         []string // lines on the screen, as written
	old, new      []glyph  // room to take lines apart
	width, height int
	filter        *replies
	keeper        io.WriteCloser // see keep; nil if there is none
}

// newTerminal returns the terminal that in and out belong to. Nothing is written or
// changed before run.
func newTerminal(in, out *os.File, env func(string) string) *terminal {
	t := &terminal{in: in, out: out, env: env, look: lookOf(env), frames: make(chan string, 1), hurry: make(chan struct{}, 1)}
	t.width, t.height = 80, 24
	if w, h, err := term.GetSize(int(out.Fd())); err == nil && w > 0 && h > 0 {
		t.width, t.height = w, h
	}
	return t
}

// isTerminal reports whether f is one.
func isTerminal(f any) bool {
	file, ok := f.(*os.File)
	return ok && term.IsTerminal(int(file.Fd()))
}

// notInteractive says why the console cannot be shown; empty if it can.
func notInteractive(in, out any, env func(string) string) string {
	switch {
	case !isTerminal(in):
		return "stdin is not a terminal"
	case !isTerminal(out):
		return "stdout is not a terminal"
	case env("TERM") == "dumb" || env("TERM") == "":
		return "the terminal cannot move its cursor (TERM=" + env("TERM") + ")"
	case env("CI") != "":
		return "CI is set"
	}
	return ""
}

// lookOf reads from the environment what can be known without asking: how many
// colours, whether the locale is UTF-8, and a first guess at the background.
func lookOf(env func(string) string) look {
	var l look
	name := env("TERM")
	switch depth := env("COLORTERM"); {
	case env("NO_COLOR") != "" || name == "dumb" || name == "": // any value but the empty one counts
		l.colours = noColours
	case depth == "truecolor" || depth == "24bit" || strings.HasSuffix(name, "-direct"):
		l.colours = trueColour
	case strings.Contains(name, "256color"):
		l.colours = colours256
	case strings.Contains(name, "kitty") || strings.Contains(name, "alacritty") || strings.Contains(name, "ghostty") ||
		strings.Contains(name, "foot") || strings.Contains(name, "wezterm"):
		l.colours = trueColour
	case strings.HasPrefix(name, "tmux") || strings.HasPrefix(name, "screen"):
		l.colours = colours256
	default:
		l.colours = colours16
	}
	locale := env("LC_ALL")
	if locale == "" {
		locale = env("LC_CTYPE")
	}
	if locale == "" {
		locale = env("LANG")
	}
	locale = strings.ToLower(locale)
	l.ascii = !strings.Contains(locale, "utf-8") && !strings.Contains(locale, "utf8")
	// COLORFGBG is "foreground;background" in the sixteen colours.
	if f := strings.Split(env("COLORFGBG"), ";"); len(f) > 1 {
		if bg, err := strconv.Atoi(f[len(f)-1]); err == nil {
			l.light = bg == 7 || bg > 8
		}
	}
	return l
}

// run shows the model until it quits, and returns it. The terminal is given back as
// it was, also when something panics.
func (t *terminal) run(ctx context.Context, m tea.Model) (tea.Model, error) {
	t.filter = &replies{File: t.in}
	t.program = tea.NewProgram(host{m, t},
		tea.WithContext(ctx),
		tea.WithInput(t.filter),
		// Painting, signals and panics are ours: see paint, signals and rescue.
		tea.WithOutput(io.Discard), tea.WithoutRenderer(), tea.WithoutSignalHandler(), tea.WithoutCatchPanics())
	t.filter.send = t.send

	if err := t.start(); err != nil {
		return m, fmt.Errorf("set up the terminal: %w", err)
	}
	defer t.release()
	t.paint(m.View())

	t.quit, t.gone = make(chan struct{}), make(chan struct{})
	go t.painter()
	defer func() {
		close(t.quit)
		select {
		case <-t.gone:
		case <-time.After(stopLimit):
		}
	}()

	stopSignals := t.signals()
	defer stopSignals()

	end, err := t.program.Run()
	if h, ok := end.(host); ok {
		m = h.m
	}
	return m, err
}

// send hands a message to the console; it may be called from anywhere. It returns
// when the console has taken it, or has ended.
func (t *terminal) send(m tea.Msg) { t.program.Send(m) }

// start takes the terminal over, or over again: while the program was stopped its
// shell may have changed everything.
func (t *terminal) start() error {
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
		// What was typed before there was anything to see was not meant for it.
		dropTyped(t.in)
	}
	t.live, t.shown = true, nil
	if w, h, err := term.GetSize(int(t.out.Fd())); err == nil && w > 0 && h > 0 {
		t.width, t.height = w, h
	}
	seq := seqAltOn + seqCursorOff + seqWrapOff + seqPasteOn + seqClear
	if first && t.look.colours != noColours && t.env("TERM") != "linux" {
		t.filter.open(time.Now())
		seq += seqProbe
	}
	if _, err = io.WriteString(t.out, seq); err == nil {
		t.keep()
	}
	return err
}

// seqBack gives a terminal back.
const seqBack = seqReset + seqPasteOff + seqWrapOn + seqCursorOn + seqAltOff

// keep has a shell wait for our end. If it comes without a word, as with kill -9, the shell
// shows what was on the terminal before. The settings of the line are mended by the shell
// that started us. It is no harm if there is none. The caller holds mu.
func (t *terminal) keep() {
	if t.keeper != nil {
		return
	}
	cmd := exec.CommandContext(context.Background(), "/bin/sh", "-c", `trap '' HUP INT QUIT TERM TSTP TTOU; read -r word || printf %s "$1"`, "sh", seqBack)
	cmd.Stdout = t.out
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // keys are not for it
	in, err := cmd.StdinPipe()
	if err != nil || cmd.Start() != nil {
		return
	}
	t.keeper = in
	go func() { _ = cmd.Wait() }()
}

// stop gives the terminal back. It may be called more than once and from anywhere.
func (t *terminal) stop() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.live {
		return
	}
	t.live = false
	_, _ = io.WriteString(t.out, seqBack)
	if t.keeper != nil {
		_, _ = io.WriteString(t.keeper, "done\n")
		t.keeper.Close()
		t.keeper = nil
	}
	t.filter.drain()
	_ = term.Restore(int(t.in.Fd()), t.saved)
}

// release is stop for the end of the program: a terminal that takes no more bytes,
// because its line is dead or its user pressed Ctrl-S, must not keep it alive.
func (t *terminal) release() {
	done := make(chan struct{})
	go func() { t.stop(); close(done) }()
	select {
	case <-done:
	case <-time.After(stopLimit):
		_ = term.Restore(int(t.in.Fd()), t.saved)
	}
}

// suspend gives the terminal back, stops the process as the shell expects, and takes
// the terminal again when the process goes on.
func (t *terminal) suspend() {
	t.stop()
	cont := make(chan os.Signal, 1)
	signal.Notify(cont, syscall.SIGCONT)
	// SIGTSTP no longer stops a Go program that has once asked to be told of it.
	// SIGTTOU does, under the same rule: the whole job, and only if there is a shell
	// that can continue it. Without one the kernel does nothing, and we go on.
	_ = syscall.Kill(0, syscall.SIGTTOU)
	select {
	case <-cont:
	case <-time.After(200 * time.Millisecond):
	}
	signal.Stop(cont)
}

// signals turns signals into messages until the returned function is called.
func (t *terminal) signals() (stop func()) {
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
						t.send(tea.WindowSizeMsg{Width: w, Height: h})
					}
				default:
					t.send(signalled{s.(syscall.Signal)})
				}
			}
		}
	}()
	return func() { signal.Stop(ch); close(done) }
}

// resize asks for the size of the terminal and forgets what is on the screen.
func (t *terminal) resize() (w, h int, ok bool) {
	w, h, err := term.GetSize(int(t.out.Fd()))
	if err != nil || w <= 0 || h <= 0 {
		return 0, 0, false
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.width, t.height, t.shown = w, h, nil
	return w, h, true
}

// redraw writes all of the next frame, whatever is on the screen.
func (t *terminal) redraw() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.shown = nil
}

// show has a frame painted soon: at once if the last one is older than frameGap, or than
// keyGap if the frame shows what a key did. If frames come faster than the terminal takes
// them, only the newest is painted.
func (t *terminal) show(frame string, key bool) {
	for {
		select {
		case t.frames <- frame:
			if key {
				select {
				case t.hurry <- struct{}{}:
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

// painter paints the frames that are shown until quit is closed. It sleeps when
// there are none.
func (t *terminal) painter() {
	defer t.rescue()
	defer close(t.gone)
	var next, nextKey time.Time // before which nothing is painted, and nothing that a key did
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
			case <-t.hurry:
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
		case <-t.hurry:
		default:
		}
		began := time.Now()
		t.paint(f)
		ended := time.Now()
		slow := 2 * ended.Sub(began) // a slow line gets fewer frames
		next, nextKey = ended.Add(max(frameGap, slow)), ended.Add(max(keyGap, slow))
	}
}

// paint writes those lines of a frame that differ from what is on the screen, in one
// write.
func (t *terminal) paint(frame string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.live {
		return
	}
	lines := strings.Split(frame, "\n")
	if len(lines) > t.height {
		lines = lines[:t.height]
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
		if w > t.width {
			now, w = ansi.Truncate(now, t.width, ""), t.width
		}
		b.WriteString(now)
		b.WriteString(seqReset)
		if w < t.width { // at the edge it would clear the last character
			b.WriteString(seqClearRight)
		}
	}
	pen.use("")
	t.shown = lines
	if b.Len() == 0 {
		return
	}
	// A terminal that is gone says so with a signal; there is nobody to tell here.
	_, _ = t.out.Write(append(append([]byte(seqSyncOn), b.Bytes()...), seqSyncOff...))
}

// differ writes those columns of a line that differ from what is on the screen, and reports
// whether it could.
func (t *terminal) differ(pen *brush, y int, was, now string) bool {
	var ok bool
	if t.old, ok = glyphsOf(was, t.old); !ok || len(t.old) > t.width {
		return false
	}
	if t.new, ok = glyphsOf(now, t.new); !ok || len(t.new) > t.width {
		return false
	}
	pen.difference(y, t.old, t.new)
	return true
}

// copy puts text on the user's clipboard, through whatever terminal and multiplexer
// there are. Whether they allow it cannot be known. It reports whether text was
// small enough.
func (t *terminal) copy(text string) bool {
	enc := base64.StdEncoding.EncodeToString([]byte(text))
	if len(enc) > copyLimit {
		return false
	}
	seq := "\x1b]52;c;" + enc + "\x07"
	if t.env("TMUX") != "" { // tmux takes the one or passes on the other, as it is configured
		seq += "\x1bPtmux;\x1b" + seq + "\x1b\\"
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.live {
		_, _ = io.WriteString(t.out, seq)
	}
	return true
}

// rescue is deferred in each goroutine of ours while the console is shown: a panic
// must not leave the user with a raw terminal and no message.
func (t *terminal) rescue() {
	r := recover()
	if r == nil {
		return
	}
	stack := debug.Stack()
	t.release()
	fmt.Fprintf(os.Stderr, "constellation: the console broke: %v\n\n%s\nThe run is safe: the same command goes on where it was.\n", r, stack)
	os.Exit(1)
}

// host is the model as Bubble Tea sees it: it paints after each message and guards
// each command.
type host struct {
	m tea.Model
	t *terminal
}

func (h host) Init() tea.Cmd { return h.t.guard(h.m.Init()) }

func (h host) Update(msg tea.Msg) (tea.Model, tea.Cmd) {
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

func (h host) View() string { return "" }

// guard makes a panic in a command end the program in order.
func (t *terminal) guard(cmd tea.Cmd) tea.Cmd {
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

// replies reads the terminal's input and takes out its answers to our question.
// Without that they would be taken for keys.
type replies struct {
	*os.File
	send func(tea.Msg)

	mu    sync.Mutex
	asked time.Time // zero if nothing is awaited
	held  []byte    // the beginning of an answer
}

// open says that the question has been asked.
func (r *replies) open(now time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.asked = now
}

// Read reads keys.
func (r *replies) Read(p []byte) (int, error) {
	r.mu.Lock()
	held := len(r.held)
	copy(p, r.held)
	r.held = nil
	r.mu.Unlock()
	n, err := r.File.Read(p[held:])
	n += held
	if err != nil && n == 0 {
		return 0, err
	}
	return copy(p, r.take(p[:n])), err
}

// take returns b without answers.
func (r *replies) take(b []byte) []byte {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.asked.IsZero() {
		return b
	}
	if i := bytes.Index(b, []byte("\x1b]11;")); i >= 0 {
		end, size := oscEnd(b[i:])
		if end < 0 {
			return r.hold(b, i)
		}
		if light, ok := lightColour(string(b[i+len("\x1b]11;") : i+end])); ok && r.send != nil {
			go r.send(background{light})
		}
		b = append(b[:i:i], b[i+end+size:]...)
	}
	if i := bytes.Index(b, []byte("\x1b[?")); i >= 0 {
		end := bytes.IndexByte(b[i:], 'c')
		if end < 0 {
			return r.hold(b, i)
		}
		r.asked = time.Time{}
		return append(b[:i:i], b[i+end+1:]...)
	}
	for _, start := range []string{"\x1b]11;", "\x1b[?"} { // an answer that was cut in two
		for n := len(start) - 1; n > 1; n-- {
			if bytes.HasSuffix(b, []byte(start[:n])) {
				return r.hold(b, len(b)-n)
			}
		}
	}
	return b
}

// hold keeps b from i on for the next read, unless it has become too long to be an
// answer.
func (r *replies) hold(b []byte, i int) []byte {
	if len(b)-i > 64 || time.Since(r.asked) > 10*probeLimit {
		r.asked = time.Time{}
		return b
	}
	r.held = bytes.Clone(b[i:])
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

// drain waits for an answer that is still under way, so that it does not end up in
// the user's shell. It ends at the latest probeLimit after the question.
func (r *replies) drain() {
	for {
		r.mu.Lock()
		asked := r.asked
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

// lightColour reads rgb:RRRR/GGGG/BBBB and reports whether it is a light colour.
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

// raw puts a terminal into raw mode, for a program inside a machine that does its
// own editing, and returns what puts it back.
func raw(f *os.File) (restore func(), err error) {
	saved, err := term.MakeRaw(int(f.Fd()))
	if err != nil {
		return nil, err
	}
	return func() { _ = term.Restore(int(f.Fd()), saved) }, nil
}

// liveLine is one line at the bottom of plain output that is written over again
// and again, on terminals only. The zero value writes nothing.
type liveLine struct {
	out   *os.File
	look  look
	drawn bool
}

// set draws text in place of what was there.
func (l *liveLine) set(text string) {
	if l.out == nil {
		return
	}
	if w, _, err := term.GetSize(int(l.out.Fd())); err == nil && w > 1 {
		text = cutMiddle(text, w-1, newTheme(look{ascii: l.look.ascii}).ellipsis)
	}
	text = asciiIf(l.look.ascii, text)
	l.drawn = true
	_, _ = io.WriteString(l.out, "\r"+text+seqClearRight)
}

// clear takes the line away.
func (l *liveLine) clear() {
	if l.out == nil || !l.drawn {
		return
	}
	l.drawn = false
	_, _ = io.WriteString(l.out, "\r"+seqClearRight)
}
