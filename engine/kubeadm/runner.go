//go:build linux

package kubeadm

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"

	"constellation/engine/version"
)

// Runner runs kubeadm. Its zero value runs [DefaultPath]. Runs of one host must
// not overlap; the Runner does not see to that.
//
// kubeadm runs in a process group of its own, with no terminal and no input. It
// ends when the calling process dies. When ctx ends, the group is asked to stop
// (SIGTERM) and killed after Grace. kubeadm leaves a half-made node behind then,
// so callers pass a ctx that does not end with a connection.
//
// Lines are passed on as they come, one at a time, from another goroutine; when
// the method returns no further line follows. lines may be nil.
type Runner struct {
	// Path of the binary; "" means DefaultPath.
	Path string
	// Dir is where configuration lies while kubeadm runs, in a directory of its own
	// that only root can enter; "" means the system's directory for temporary files.
	Dir string
	// Grace is how long kubeadm may take to stop; zero means 10 s.
	Grace time.Duration
}

// Error is a run of kubeadm that failed.
type Error struct {
	// Command is what was run, without options: "kubeadm init".
	Command string
	// Code is kubeadm's exit code, or -1 if a signal ended it.
	Code int
	// Message is what kubeadm said about it, in one line of at most 2 kB without
	// secrets.
	Message string
	brief   string // of Message; "" if that is all
	cause   error
}

// Error is one line of a few hundred bytes. Of several causes it names the first and
// counts the others; all are in the lines.
func (e *Error) Error() string {
	switch {
	case e.brief != "":
		return e.Command + ": " + e.brief
	case e.Message != "":
		return e.Command + ": " + e.Message
	}
	return fmt.Sprintf("%s: %v", e.Command, e.cause)
}

// Unwrap returns why the process ended.
func (e *Error) Unwrap() error { return e.cause }

// Preflight reports whether kubeadm refused before it changed anything.
func (e *Error) Preflight() bool { return e.Code == 2 }

// InvalidConfig reports whether kubeadm did not accept its configuration, which no
// repetition mends.
func (e *Error) InvalidConfig() bool { return e.Code == 3 }

// transient are words of an API server that is away or only just back, and of
// checks that depend on what starts after it. The exit code is the same for all.
var transient = []string{
	"connection refused", "connection reset by peer", "context deadline exceeded", "i/o timeout", "TLS handshake timeout",
	"Client.Timeout exceeded", "unexpected EOF", "no route to host", "etcdserver: ", "the server is currently unable to handle the request",
	"[ERROR CreateJob]", "[ERROR ControlPlaneNodesReady]", "could not find server",
}

// Transient reports whether kubeadm failed for want of an API server, or of what
// needs a moment after one is back. The same command may succeed later.
func (e *Error) Transient() bool {
	for _, w := range transient {
		if strings.Contains(e.Message, w) {
			return true
		}
	}
	return false
}

func (r Runner) path() string {
	if r.Path == "" {
		return DefaultPath
	}
	return r.Path
}

// Installed reports whether there is a kubeadm to run.
func (r Runner) Installed() bool {
	i, err := os.Stat(r.path())
	return err == nil && i.Mode().IsRegular() && i.Mode()&0o111 != 0
}

// CreateCA makes the cluster's certificate authority, so that certificates can be
// signed before Init starts what needs them. An authority that exists is kept.
func (r Runner) CreateCA(ctx context.Context, c Config, lines func(Line)) error {
	return r.run(ctx, &c, lines, "init", "phase", "certs", "ca")
}

// Init makes this host the first node of a cluster.
func (r Runner) Init(ctx context.Context, c Config, lines func(Line)) error {
	return r.run(ctx, &c, lines, "init", "--skip-token-print")
}

// Join makes this host a node of an existing cluster.
func (r Runner) Join(ctx context.Context, c Config, lines func(Line)) error {
	return r.run(ctx, &c, lines, "join")
}

// Reset undoes what Init and Join did to this host, as far as kubeadm can: the
// kubelet and all containers of Kubernetes stop, etcd's member leaves its cluster
// if that answers, and the node's files are removed.
func (r Runner) Reset(ctx context.Context, lines func(Line)) error {
	return r.run(ctx, nil, lines, "reset", "--force", "--cri-socket="+criSocket)
}

// Validate asks kubeadm whether it would accept c. Unknown fields are errors.
func (r Runner) Validate(ctx context.Context, c Config) error {
	return r.run(ctx, &c, nil, "config", "validate")
}

// Version returns what the binary says it is.
func (r Runner) Version(ctx context.Context) (version.Version, error) {
	var out string
	if err := r.run(ctx, nil, func(l Line) { out = l.Text }, "version", "--output=short"); err != nil {
		return version.Version{}, err
	}
	v, err := version.Parse(out)
	if err != nil {
		return version.Version{}, fmt.Errorf("kubeadm version: %w", err)
	}
	return v, nil
}

// run executes "kubeadm args", with c as its configuration unless nil.
func (r Runner) run(ctx context.Context, c *Config, lines func(Line), args ...string) (err error) {
	command := "kubeadm"
	for _, a := range args {
		if strings.HasPrefix(a, "-") {
			break
		}
		command += " " + a
	}
	var secrets []string
	if c != nil {
		secrets = c.secrets()
		dir, err := r.writeConfig(*c)
		if err != nil {
			return fmt.Errorf("%s: %w", command, err)
		}
		defer func() {
			if e := os.RemoveAll(dir); e != nil && err == nil {
				err = fmt.Errorf("%s: remove configuration: %w", command, e)
			}
		}()
		args = append(args, "--config="+filepath.Join(dir, configFile))
	}

	var last tail
	w := &lineWriter{emit: func(raw string) {
		l := parseLine(raw, secrets)
		if l.Text == "" {
			return
		}
		last.add(l)
		if lines != nil {
			lines(l)
		}
	}}
	cmd := exec.CommandContext(ctx, r.path(), args...)
	cmd.Stdout, cmd.Stderr = w, w // one and the same: os/exec then writes from one goroutine
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGTERM) }
	grace := r.Grace
	if grace == 0 {
		grace = 10 * time.Second
	}
	// After this time os/exec kills kubeadm and no longer waits for other processes that
	// hold its output.
	cmd.WaitDelay = grace

	done := make(chan error, 1)
	go func() {
		// The signal for the parent's death is sent when the thread that started the
		// child ends. Locked and never unlocked, it is this goroutine's own.
		runtime.LockOSThread()
		done <- cmd.Run()
	}()
	err = <-done
	if cmd.Process != nil && ctx.Err() != nil {
		// The rest of the process group, if any.
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
	}
	w.flush()
	if err == nil {
		return nil
	}
	if ctx.Err() != nil {
		return fmt.Errorf("%s: %w", command, context.Cause(ctx))
	}
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return &Error{Command: command, Code: exit.ExitCode(), Message: last.message(), brief: last.brief(), cause: err}
	}
	return fmt.Errorf("%s: %w", command, err)
}

const configFile = "kubeadm.yaml"

// writeConfig writes c to a new directory that only root can enter.
func (r Runner) writeConfig(c Config) (dir string, err error) {
	b, err := c.YAML()
	if err != nil {
		return "", err
	}
	if dir, err = os.MkdirTemp(r.Dir, "kubeadm-"); err != nil { // 0700
		return "", fmt.Errorf("write configuration: %w", err)
	}
	if err := os.WriteFile(filepath.Join(dir, configFile), b, 0o600); err != nil {
		return "", errors.Join(fmt.Errorf("write configuration: %w", err), os.RemoveAll(dir))
	}
	return dir, nil
}

// tail keeps the lines that explain a failure.
type tail struct {
	errors []string
	last   string
	check  string // the first error of a preflight check
	checks int
}

func (t *tail) add(l Line) {
	t.last = l.Text
	// kubeadm prints the cause, then advice; several preflight errors stand in
	// lines of their own below one that announces them.
	if l.Level >= slog.LevelError && len(t.errors) < 8 {
		t.errors = append(t.errors, l.Text)
	}
	if strings.HasPrefix(l.Text, "[ERROR") {
		if t.checks++; t.checks == 1 {
			t.check = l.Text
		}
	}
}

// maxBrief is in bytes: about what a line or two of a terminal hold.
const maxBrief = 300

// brief is what a failure's cause is: the first check that failed, which says more
// than the lines that announce it, or else the message unless it is long. It has
// little more than maxBrief bytes.
func (t *tail) brief() string {
	s, more := t.check, t.checks-1
	if s == "" {
		if s, more = t.message(), 0; len(s) > maxBrief && len(t.errors) > 0 {
			s, more = t.errors[0], len(t.errors)-1
		}
	}
	// A check that failed several times may tell it as "[ERROR Check]: [one, another]".
	if name, list, ok := strings.Cut(s, "]: ["); ok && strings.HasSuffix(list, "]") {
		list = strings.TrimSuffix(list, "]")
		all := []string{list}
		if w := strings.SplitAfterN(list, " ", 3); len(w) == 3 { // causes hold commas, but begin alike
			all = strings.Split(list, ", "+w[0]+w[1])
		}
		s, more = name+"]: "+all[0], more+len(all)-1
	}
	// The end of a long line is what happened, its beginning where.
	if n := len(s); n > maxBrief {
		s = strings.ToValidUTF8(s[:maxBrief/2], "") + " ... " + strings.ToValidUTF8(s[n-maxBrief/2:], "")
	}
	if more > 0 {
		s += fmt.Sprintf(", and %d more", more)
	}
	return s
}

// message is one line of at most 2 kB.
func (t *tail) message() string {
	s := strings.Join(t.errors, "; ")
	if s == "" {
		s = t.last
	}
	if len(s) > 2048 {
		s = strings.ToValidUTF8(s[:2048], "") + "..."
	}
	return s
}
