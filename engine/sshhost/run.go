package sshhost

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/crypto/ssh"

	"constellation/engine/plan"
)

// DefaultMaxOutput limits the output of a command.
const DefaultMaxOutput = 1 << 20

// Command is a command to run on a machine.
type Command struct {
	// Argv is the program and its arguments. They are quoted, so no shell interprets them. They are
	// visible to all users of the machine: secrets belong into Stdin.
	Argv []string
	// Root runs the command as root, with sudo if the target allows it and the user is not root.
	Root  bool
	Stdin io.Reader
	// MaxOutput limits stdout and stderr together, in bytes; zero is DefaultMaxOutput. A command that
	// prints more is ended.
	MaxOutput int
	// Stdout gets what the command prints there, while it runs. The result has none of it, and its amount
	// is not limited. A write that fails ends the command.
	Stdout io.Writer
}

// Result has the output of a command and its exit. Output of a machine is hostile: [Text] makes it safe
// to show.
type Result struct {
	Stdout, Stderr []byte
	// Exit is the exit code; -1 if a signal ended the command.
	Exit   int
	Signal string
}

// Err returns an error if the command failed, with the end of what it printed.
func (r Result) Err() error {
	if r.Exit == 0 {
		return nil
	}
	out := bytes.TrimSpace(r.Stderr)
	if len(out) == 0 {
		out = bytes.TrimSpace(r.Stdout)
	}
	how := fmt.Sprintf("exit code %d", r.Exit)
	if r.Signal != "" {
		how = "signal " + Text([]byte(r.Signal))
	}
	if len(out) == 0 {
		return errors.New(how)
	}
	return fmt.Errorf("%s: %s", how, Text(out[max(0, len(out)-maxText):]))
}

// quote quotes s for shells. A backslash stands outside the quotes, where POSIX shells and fish agree.
func quote(s string) string {
	if s != "" && strings.Trim(s, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-+=:,./@%") == "" && s[0] != '=' {
		return s
	}
	return "'" + strings.NewReplacer(`'`, `'\''`, `\`, `'\\'`).Replace(s) + "'"
}

// commandLine quotes argv.
func commandLine(argv []string) (string, error) {
	if len(argv) == 0 || argv[0] == "" {
		return "", errors.New("run a command: it is empty")
	}
	parts := make([]string, len(argv))
	for i, a := range argv {
		if strings.ContainsRune(a, 0) {
			return "", fmt.Errorf("run %s: argument %d contains a NUL byte", Text([]byte(argv[0])), i)
		}
		parts[i] = quote(a)
	}
	return strings.Join(parts, " "), nil
}

// Run runs a command and returns what it printed. A command that fails is no error: its exit code is
// in the result. The end of ctx ends the command; one that sudo started may continue on the machine.
// The login shell of the user must be a POSIX shell or fish.
func (h *Host) Run(ctx context.Context, c Command) (Result, error) {
	if !c.Root {
		return h.run(ctx, c)
	}
	uid, err := h.user(ctx)
	switch {
	case err != nil:
		return Result{}, err
	case uid == 0:
		return h.run(ctx, c)
	case !h.target.Sudo:
		return Result{}, &plan.Error{Op: "run a command as root on " + h.target.String(), Err: ErrNotRoot, Remedy: "allow sudo with --sudo, or log in as root"}
	}
	return h.sudo(ctx, c)
}

// user returns the ID of the user. It is read once.
func (h *Host) user(ctx context.Context) (int, error) {
	h.mu.Lock()
	uid := h.uid
	h.mu.Unlock()
	if uid >= 0 {
		return uid, nil
	}
	r, err := h.run(ctx, Command{Argv: []string{"id", "-u"}})
	if err != nil {
		return 0, err
	}
	// A startup file of the shell may print lines before.
	lines := strings.Fields(string(r.Stdout))
	if r.Exit == 0 && len(lines) > 0 {
		if n, err := strconv.Atoi(lines[len(lines)-1]); err == nil && n >= 0 {
			h.mu.Lock()
			h.uid = n
			h.mu.Unlock()
			return n, nil
		}
	}
	return 0, &plan.Error{Op: "run commands on " + h.target.String(), Err: fmt.Errorf("`id -u` printed %q", Text(append(r.Stdout, r.Stderr...))), Remedy: "give the user a POSIX shell, which runs commands"}
}

// session is a command that runs.
type session struct {
	s     *ssh.Session
	h     *Host
	op    string
	input io.WriteCloser

	mu    sync.Mutex
	left  int           // bytes that it may still print
	err   error         // why it was aborted
	abort chan struct{} // closed then

	writing sync.Mutex // held while a stream is written
}

// stop aborts a command. The machine may keep the session open as long as a process holds it, so
// nothing waits for that, and what it still prints is dropped.
func (s *session) stop(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stopLocked(err)
}

func (s *session) stopLocked(err error) {
	if s.err != nil {
		return
	}
	s.err = err
	close(s.abort)
	go func() {
		_ = s.s.Signal(ssh.SIGKILL)
		_ = s.s.Close()
	}()
}

// output is one of the streams of a session.
type output struct {
	s    *session
	take func(p []byte) // is called with the bytes within the limit
}

func (w output) Write(p []byte) (int, error) {
	w.s.mu.Lock()
	defer w.s.mu.Unlock()
	switch {
	case w.s.err != nil:
		return 0, w.s.err
	case len(p) > w.s.left:
		w.s.stopLocked(&plan.Error{Op: w.s.op, Err: fmt.Errorf("%w: the command was ended", ErrTooMuch), Remedy: "check what the machine prints at a login without a terminal"})
		return 0, w.s.err
	}
	w.s.left -= len(p)
	w.take(p)
	return len(p), nil
}

// stream is the stdout of a session that goes to a writer.
type stream struct {
	s  *session
	to io.Writer
}

func (w stream) Write(p []byte) (int, error) {
	w.s.writing.Lock()
	defer w.s.writing.Unlock()
	w.s.mu.Lock()
	err := w.s.err
	w.s.mu.Unlock()
	if err != nil {
		return 0, err
	}
	n, err := w.to.Write(p)
	if err != nil {
		w.s.stop(err)
	}
	return n, err
}

// start starts a command line. stdout and stderr get its output, with a lock held; to gets stdout instead
// unless it is nil.
func (h *Host) start(op, line string, limit int, to io.Writer, stdout, stderr func([]byte)) (*session, error) {
	ses, err := h.client().NewSession()
	if err != nil {
		return nil, h.ended(op, err)
	}
	s := &session{s: ses, h: h, op: op, left: cmp.Or(limit, DefaultMaxOutput), abort: make(chan struct{})}
	ses.Stdout, ses.Stderr = output{s, stdout}, output{s, stderr}
	if to != nil {
		ses.Stdout = stream{s, to}
	}
	if s.input, err = ses.StdinPipe(); err == nil {
		err = ses.Start(line)
	}
	if err != nil {
		_ = ses.Close()
		return nil, h.ended(op, err)
	}
	return s, nil
}

// wait waits for the end of a command.
func (s *session) wait(ctx context.Context, r *Result) error {
	unwatch := context.AfterFunc(ctx, func() { s.stop(context.Cause(ctx)) })
	defer unwatch()
	ended := make(chan error, 1)
	go func() { ended <- s.s.Wait() }()
	var err error
	select {
	case <-s.abort:
		s.writing.Lock() // nothing is written after the end
		defer s.writing.Unlock()
		return s.err
	case err = <-ended:
		_ = s.s.Close()
	}
	s.mu.Lock()
	aborted := s.err
	s.mu.Unlock()
	var exit *ssh.ExitError
	switch {
	case aborted != nil:
		return aborted
	case err == nil:
		return nil
	case errors.As(err, &exit):
		r.Exit, r.Signal = exit.ExitStatus(), exit.Signal()
		if r.Signal != "" {
			r.Exit = -1
		}
		return nil
	}
	return s.h.ended(s.op, err)
}

// ended explains an error of the connection.
func (h *Host) ended(op string, err error) error {
	if h.silent.Load() {
		return &plan.Error{Op: op, Err: fmt.Errorf("%w: it answered nothing any more", ErrSilent), Remedy: "check the machine and the network, then run the command again"}
	}
	var open *ssh.OpenChannelError
	if errors.As(err, &open) {
		return &plan.Error{Op: op, Err: errors.New("the machine opened no session: " + Text([]byte(open.Message))), Remedy: "check MaxSessions and ForceCommand in its sshd_config"}
	}
	if lost(err) {
		return lostError(op)
	}
	return &plan.Error{Op: op, Err: errors.New(Text([]byte(err.Error()))), Remedy: "read the machine's log: `journalctl -u ssh`"}
}

func (h *Host) client() *ssh.Client { return h.clients[len(h.clients)-1] }

// feed copies stdin to a command, and closes it.
func (s *session) feed(stdin io.Reader) {
	if stdin != nil {
		_, _ = io.Copy(s.input, stdin) // a command may end before it has read everything
	}
	_ = s.input.Close()
}

func (h *Host) operation(argv []string) string {
	return "run " + Text([]byte(argv[0])) + " on " + h.target.String()
}

// run runs a command as the user.
func (h *Host) run(ctx context.Context, c Command) (Result, error) {
	line, err := commandLine(c.Argv)
	if err != nil {
		return Result{}, err
	}
	var r Result
	s, err := h.start(h.operation(c.Argv), line, c.MaxOutput, c.Stdout,
		func(p []byte) { r.Stdout = append(r.Stdout, p...) }, func(p []byte) { r.Stderr = append(r.Stderr, p...) })
	if err != nil {
		return Result{}, err
	}
	go s.feed(c.Stdin)
	if err := s.wait(ctx, &r); err != nil {
		return Result{}, err
	}
	return r, nil
}

// sudo runs a command with sudo: without a password if that works.
func (h *Host) sudo(ctx context.Context, c Command) (Result, error) {
	h.mu.Lock()
	password := slices.Clone(h.password)
	h.mu.Unlock()
	defer func() { clear(password) }()
	if password == nil {
		r, err := h.sudoOnce(ctx, c, nil)
		if !errors.Is(err, ErrSudoPassword) || h.ask == nil {
			return r, err
		}
		p, err := h.ask(ctx, h.target)
		if err != nil {
			return Result{}, err
		}
		password = p
	}
	r, err := h.sudoOnce(ctx, c, password)
	if err == nil {
		h.mu.Lock()
		if h.password == nil {
			h.password = slices.Clone(password)
		}
		h.mu.Unlock()
	}
	return r, err
}

// sudoOnce runs a command with sudo. The password is sent when sudo prompts, and the command's stdin
// when the command runs. If sudo needs no password, the command does not read one.
func (h *Host) sudoOnce(ctx context.Context, c Command, password []byte) (Result, error) {
	if _, err := commandLine(c.Argv); err != nil {
		return Result{}, err
	}
	nonce := rand.Text()
	prompt, begins := []byte("[prompt "+nonce+"]"), []byte("[begins "+nonce+"]\n")
	argv := []string{"env", "LC_ALL=C", "sudo", "-n"}
	if password != nil {
		// -k ignores what an earlier sudo left, so that the password is always read.
		argv = []string{"env", "LC_ALL=C", "sudo", "-k", "-S", "-p", string(prompt)}
	}
	argv = append(argv, "--", "sh", "-c", `printf '[begins %s]\n' "$0" >&2; exec "$@"`, nonce)
	line, err := commandLine(append(argv, c.Argv...))
	if err != nil {
		return Result{}, err
	}
	var (
		r       Result
		before  []byte // what sudo printed
		began   = make(chan struct{})
		prompts = make(chan int, 2) // sudo has prompted so many times
		asked   int
		runs    bool
	)
	s, err := h.start(h.operation(c.Argv), line, c.MaxOutput, c.Stdout, func(p []byte) { r.Stdout = append(r.Stdout, p...) }, func(p []byte) {
		if runs {
			r.Stderr = append(r.Stderr, p...)
			return
		}
		before = append(before, p...)
		if n := bytes.Count(before, prompt); n > asked && n <= 2 {
			asked = n
			prompts <- n
		}
		if i := bytes.Index(before, begins); i >= 0 {
			runs = true
			r.Stderr = append(r.Stderr, before[i+len(begins):]...)
			before = before[:i]
			close(began)
		}
	})
	if err != nil {
		return Result{}, err
	}
	op := "use sudo on " + h.target.String()
	done := make(chan struct{})
	go func() {
		late := time.NewTimer(h.timeout)
		defer late.Stop()
		for {
			select {
			case <-done:
				return
			case <-began:
				s.feed(c.Stdin)
				return
			case n := <-prompts:
				if n > 1 {
					s.stop(wrongPassword(op))
					return
				}
				_, _ = s.input.Write(append(slices.Clone(password), '\n'))
			case <-late.C:
				s.stop(&plan.Error{Op: op, Err: fmt.Errorf("%w: within %s it neither prompted for a password nor ran the command", ErrSudoRefused, h.timeout), Remedy: "raise --timeout for a slow machine. If sudo asks for a second factor, which is not supported, permit the user NOPASSWD in sudoers, or log in as root"})
				return
			}
		}
	}()
	err = s.wait(ctx, &r)
	close(done)
	if err != nil {
		return Result{}, err
	}
	select {
	case <-began:
		return r, nil
	default:
		return Result{}, sudoError(op, h.target, before, r.Exit, password != nil)
	}
}

func wrongPassword(op string) error {
	return &plan.Error{Op: op, Err: fmt.Errorf("%w, and the given one is wrong", ErrSudoPassword), Remedy: "run the command again with the password of this user"}
}

// sudoError explains why sudo did not run a command.
func sudoError(op string, t Target, printed []byte, exit int, gave bool) error {
	said := string(printed)
	has := func(parts ...string) bool {
		return slices.ContainsFunc(parts, func(p string) bool { return strings.Contains(said, p) })
	}
	switch {
	case has("must have a tty"):
		return &plan.Error{Op: op, Err: fmt.Errorf("%w: its rules demand a terminal", ErrSudoRefused), Remedy: "take requiretty out of sudoers for this user: `Defaults:" + t.User + " !requiretty`"}
	case has("a password is required", "no password was provided", "incorrect password attempt") && gave:
		return wrongPassword(op)
	case has("a password is required"):
		return &plan.Error{Op: op, Err: ErrSudoPassword, Remedy: "run the command on a terminal, which prompts for the password, or permit the user NOPASSWD in sudoers"}
	case exit == 127:
		return &plan.Error{Op: op, Err: fmt.Errorf("%w: it is not installed", ErrSudoRefused), Remedy: "install sudo on the machine, or log in as root"}
	}
	return &plan.Error{Op: op, Err: fmt.Errorf("%w: %s", ErrSudoRefused, Text(printed)), Remedy: "permit the user all commands in sudoers (`" + t.User + " ALL=(ALL) ALL`), or log in as root"}
}
