package tui

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"constellation/engine/plan"
	"constellation/engine/workspace"
	"constellation/tui/term"
	"constellation/tui/view"
)

// session is one invocation of the program: its arguments, its workspace, its engine, and how it
// prints and prompts. All its methods are in this file. Verbs are functions of a session.
type session struct {
	App
	dir   string // as given with -C
	debug bool
	// accessible disables the console; see plainly.
	accessible bool
	began      bool // the arguments were valid and the verb started
	runs       bool // the verb is in longVerbs
	out        *guarded
	level      *slog.LevelVar
	log        *slog.Logger
	debugFile  *os.File
	update     *updateNotice // nil if this command does not look for a newer release

	mu     sync.Mutex
	caught syscall.Signal // the signal that ended the verb; 0 if none did
	wrote  string         // the file that a read-only verb wrote
}

// exitStatus ends the program with an exit code and prints no error: the verb has
// printed everything already.
type exitStatus int

func (e exitStatus) Error() string { return fmt.Sprintf("exit status %d", int(e)) }

// longVerbs are the verbs that change something step by step. A signal stops them at a
// point where they can be resumed; see also Resumable. All other verbs are read-only or short.
var longVerbs = []string{"init", "upgrade prepare", "backup create", "backup restore", "upgrade apply", "upgrade execute", "machine revoke", "machine add", "machine remove", "infra create", "infra terminate", "conformance"}

func newSession(a App) *session {
	s := &session{App: a, level: &slog.LevelVar{}}
	s.out = &guarded{w: a.Stdout, gone: func() {
		if !s.runs {
			return // the reader, such as head, closed the pipe on purpose
		}
		s.remark("stdout was closed by its reader; the run continues, and its record is in the workspace")
	}}
	// Without --debug nothing is logged: users read events.
	s.level.Set(slog.LevelError + 4)
	s.log = slog.New(slog.NewTextHandler(stderrOf{s}, &slog.HandlerOptions{Level: s.level}))
	return s
}

// stderrOf is the log's writer: stderr, or debugFile while the console owns the terminal.
type stderrOf struct{ s *session }

func (w stderrOf) Write(p []byte) (int, error) {
	if f := w.s.debugFile; f != nil {
		return f.Write(p)
	}
	return w.s.Stderr.Write(p)
}

// execute runs the command line and returns the exit code.
func (s *session) execute(args []string) int {
	// A closed pipe must not kill a run half-way; see guarded.
	pipe := make(chan os.Signal, 1)
	signal.Notify(pipe, syscall.SIGPIPE)
	defer signal.Stop(pipe)

	root := rootCommand(s)
	if s.RunSandbox != nil && delegated(root, SandboxVerb, args) {
		code, err := s.RunSandbox(args)
		if err != nil {
			view.WriteError(s.Stderr, s.formatter(), err)
			return plan.ExitCode(err)
		}
		return code
	}
	root.SetArgs(args)
	root.SetIn(s.Stdin)
	root.SetOut(s.out)
	root.SetErr(s.Stderr)
	cmd, err := root.ExecuteContextC(context.Background())
	defer endUpdateNotice(s)
	s.mu.Lock()
	caught := s.caught
	s.mu.Unlock()
	var status exitStatus
	switch {
	case errors.As(err, &status):
		return int(status)
	case err == nil && caught == 0 && s.out.failed != nil:
		view.WriteError(s.Stderr, s.formatter(), &plan.Error{Op: "write output", Err: s.out.failed, Remedy: "free disk space or redirect the output, then run the command again"})
		return plan.ExitFailed
	case err == nil && caught == 0:
		return plan.ExitDone
	case caught != 0 && !s.runs:
		switch {
		case s.wrote != "":
			s.remark("%s; %s was written", signalName(caught), term.Clean(s.wrote))
		case err != nil:
			s.remark("%s; nothing was changed", signalName(caught))
		default:
			s.remark("%s", signalName(caught))
		}
		return 128 + int(caught)
	case !s.began && err != nil:
		err = &plan.Error{Op: err.Error(), Remedy: "see " + cmd.CommandPath() + " --help", Exit: plan.ExitUsage}
	}
	switch {
	case err != nil && plan.ExitCode(err) == plan.ExitNothing:
		s.remark("%s", view.Explain(err, s.formatter()).What)
	case err != nil:
		view.WriteError(s.Stderr, s.formatter(), err)
	}
	if caught != 0 {
		return 128 + int(caught)
	}
	return plan.ExitCode(err)
}

// remark writes a remark about the invocation to stderr.
func (s *session) remark(format string, args ...any) {
	fmt.Fprintf(s.Stderr, "remark  "+format+"\n", args...)
}

// signals cancels the returned context at SIGINT, SIGTERM or SIGHUP; the second signal
// ends the program at once. The console handles signals itself.
func (s *session) signals(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	ch := make(chan os.Signal, 2)
	watched := []os.Signal{syscall.SIGINT, syscall.SIGTERM}
	if !signal.Ignored(syscall.SIGHUP) { // nohup
		watched = append(watched, syscall.SIGHUP)
	}
	signal.Notify(ch, watched...)
	done := make(chan struct{})
	go func() {
		for n := 0; ; n++ {
			select {
			case <-done:
				return
			case sig := <-ch:
				if n > 0 {
					os.Exit(128 + int(sig.(syscall.Signal)))
				}
				got := sig.(syscall.Signal)
				s.mu.Lock()
				s.caught = got
				s.mu.Unlock()
				if s.runs {
					s.remark("%s: stopping at the next point where the command can be resumed; repeat to stop at once", signalName(got))
				}
				// The result event then carries the exit code of the process.
				cancel(&plan.Error{Err: errors.New(signalName(got)), Exit: 128 + int(got)})
			}
		}
	}()
	var once sync.Once
	return ctx, func() { once.Do(func() { signal.Stop(ch); close(done) }); cancel(nil) }
}

// limited is signals with a timeout, unless limit is 0.
func (s *session) limited(ctx context.Context, limit time.Duration) (context.Context, context.CancelFunc) {
	ctx, stop := s.signals(ctx)
	if limit <= 0 {
		return ctx, stop
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	return ctx, func() { cancel(); stop() }
}

func signalName(s syscall.Signal) string {
	switch s {
	case syscall.SIGINT:
		return "interrupted"
	case syscall.SIGTERM:
		return "terminated"
	case syscall.SIGHUP:
		return "hung up"
	}
	return s.String()
}

// workspace opens the directory given with -C.
func (s *session) workspace() (*workspace.Workspace, string, error) {
	dir, err := filepath.Abs(s.dir)
	if err != nil {
		return nil, "", &plan.Error{Op: "open workspace " + s.dir, Err: err, Exit: plan.ExitUsage}
	}
	ws, err := workspace.OpenWorkspace(dir)
	return ws, dir, err
}

// newWorkspace is workspace for the verbs that create one. It creates the directory given
// with -C if its parent exists.
func (s *session) newWorkspace() (*workspace.Workspace, string, error) {
	if err := os.Mkdir(s.dir, 0o755); err != nil && !errors.Is(err, fs.ErrExist) && !errors.Is(err, fs.ErrNotExist) {
		return nil, "", &plan.Error{Op: "create workspace " + s.dir, Err: err, Exit: plan.ExitUsage, Remedy: "name another directory with -C"}
	}
	return s.workspace()
}

// engineOf returns the engine of the workspace.
func (s *session) engineOf() (Engine, *workspace.Workspace, string, error) {
	ws, dir, err := s.workspace()
	if err != nil {
		return nil, nil, "", err
	}
	eng, err := s.Engine(ws, s.log)
	return eng, ws, dir, err
}

// findSandbox returns the sandbox of a workspace; nil if it has none.
func (s *session) findSandbox(ctx context.Context, dir string) *workspace.SandboxInfo {
	if s.FindSandbox == nil {
		return nil
	}
	st, err := s.FindSandbox(ctx, dir)
	if err != nil {
		s.log.Debug("sandbox not found", "workspace", dir, "err", err)
		return nil
	}
	return &st.SandboxInfo
}

// logToFile writes the debug log to a file, so that it does not disturb the screen.
func (s *session) logToFile(ws *workspace.Workspace) error {
	f, err := os.OpenFile(ws.Path("constellation-debug.log"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return &plan.Error{Op: "open the debug log", Err: err}
	}
	s.debugFile = f
	return nil
}

// interactive reports whether the console can be shown. If the user did not decline it
// and it cannot be shown, it prints why.
func (s *session) interactive(declined bool) bool {
	if declined || s.plainly() {
		return false
	}
	why := term.NotInteractive(s.Stdin, s.Stdout, s.Env)
	if why != "" {
		s.remark("%s: continuing as with --non-interactive", why)
	}
	return why == ""
}

// asks reports whether the program can prompt: stdin and stdout are terminals, outside CI.
func (s *session) asks() bool {
	return term.IsTerminal(s.Stdin) && term.IsTerminal(s.Stdout) && s.Env("CI") == ""
}

// plainly reports accessible mode: output is only appended, line by line, and prompts are
// plain text. Screen readers and braille displays need this.
func (s *session) plainly() bool { return s.accessible || s.Env("ACCESSIBLE") != "" }

// prompt returns the prompt of this invocation.
func (s *session) prompt() prompt { return prompt{s.Stdin, s.Stderr} }

// formatter returns the command formatter of this invocation.
func (s *session) formatter() view.CommandFormatter {
	sp := view.CommandFormatter{Program: s.Program, Dir: s.dir}
	if dir, err := filepath.Abs(s.dir); err == nil { // else kubectl commands get no --kubeconfig
		sp.Home, sp.Kubeconfig = dir, filepath.Join(dir, workspace.KubeconfigFile)
	}
	return sp
}

// command returns a command line of this program for the same workspace.
func (s *session) command(args string) string { return s.formatter().Command(args) }

// page is what printed pages share: without colours, in a width that fits most windows and
// logs. It needs no console.
func (s *session) page() view.Page {
	th := term.NewTheme(term.Display{Ascii: term.DisplayOf(s.Env).Ascii})
	return view.Page{Theme: th.Printed(), Now: s.Now(), Commands: s.formatter()}
}

// answerWidth is the line width of printed output: the width of the terminal within
// limits, else view.PrintedWidth.
func (s *session) answerWidth() int {
	w := term.Columns(s.Stdout)
	if w <= 0 {
		return view.PrintedWidth
	}
	return max(view.MinWidth, min(w, 120))
}

// print writes lines without trailing spaces.
func (s *session) print(lines []string) {
	for _, l := range lines {
		fmt.Fprintln(s.out, strings.TrimRight(l, " "))
	}
}

// printer returns the renderer of a run's events without the console. With live it shows a
// status line at the bottom of a terminal; without a terminal it prints progress lines at
// intervals.
func (s *session) printer(f format, live bool) sink {
	switch f {
	case asJSON:
		return jsonPrinter{s.out}
	case asMarkdown: // progress lines go to stderr, the page to stdout
		p := newPlainPrinter(&guarded{w: s.Stderr}, nil, s.Now)
		p.sp = s.formatter()
		return &runSummary{out: s.out, lines: p, sp: p.sp}
	}
	var l *term.LiveLine
	if file, ok := s.Stdout.(*os.File); ok && live && !s.plainly() && term.NotInteractive(file, file, s.Env) == "" {
		l = &term.LiveLine{Out: file, Display: term.Display{Ascii: term.DisplayOf(s.Env).Ascii}}
	}
	p := newPlainPrinter(s.out, l, s.Now)
	p.sp = s.formatter()
	return p
}

// liveLine returns a progress line on stderr. It shows nothing if stderr is not a terminal
// or lines must not be overwritten.
func (s *session) liveLine() term.LiveLine {
	if f, ok := s.Stderr.(*os.File); ok && term.IsTerminal(f) && !s.plainly() {
		return term.LiveLine{Out: f, Display: term.Display{Ascii: term.DisplayOf(s.Env).Ascii}}
	}
	return term.LiveLine{}
}

// liveTable is liveLine with several lines.
func (s *session) liveTable() term.LiveTable {
	l := s.liveLine()
	return term.LiveTable{Out: l.Out, Display: l.Display}
}

// framed returns the event stream of a verb without a plan that works on object.
func (s *session) framed(out sink, object string) *framed {
	return &framed{out: out, now: s.Now, began: s.Now(), hello: plan.Event{
		Kind: plan.KindHello, Schema: plan.Schema, Tool: "constellation " + s.Release, Object: object,
	}}
}
