package machine

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/creack/pty"
	"golang.org/x/sys/unix"
	"golang.org/x/term"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
)

// Exec runs a command in a machine as root and returns its exit code. It works in any
// process on this computer, even if another one drives the machines. When ctx ends, the
// command is terminated, and killed two seconds later. The error wraps ErrNotFound
// or ErrNotRunning. A failed command is no error but an exit code. A command
// that does not exist ends with 255 and a message on Err.
func (h *Host) Exec(ctx context.Context, name string, command []string, stdio Stdio) (int, error) {
	m, err := h.Machine(name)
	if err == nil && m.Power != Running {
		err = fmt.Errorf("run a command in machine %s: %w", name, ErrNotRunning)
	}
	if err == nil && len(command) == 0 {
		err = fmt.Errorf("run a command in machine %s: there is none", name)
	}
	if err != nil {
		return 0, err
	}
	dir, err := os.MkdirTemp("", "constellation-exec-")
	if err != nil {
		return 0, fmt.Errorf("run a command in machine %s: %w", name, err)
	}
	defer func() { _ = removeTree(filepath.Dir(dir), filepath.Base(dir)) }()
	pidFile := filepath.Join(dir, "pid")
	args := []string{"--root", filepath.Join(h.dir, runcDir), "exec", "--pid-file", pidFile}
	if stdio.TTY {
		args = append(args, "--tty", "--env", "TERM="+terminalType())
	}
	cmd := exec.CommandContext(ctx, tool("runc"), append(append(args, name), command...)...)
	// runc forwards signals to the command. runc itself is not killed before the command
	// ends: it must reap the command, or the machine could not end.
	var last *time.Timer
	cmd.Cancel = func() error {
		last = time.AfterFunc(killAfter, func() { _ = killRecorded(pidFile) })
		return cmd.Process.Signal(syscall.SIGTERM)
	}
	cmd.WaitDelay = 3 * killAfter
	var finish func()
	if stdio.TTY {
		finish, err = connectTerminal(cmd, stdio)
	} else {
		finish, err = connectPipes(cmd, stdio)
	}
	if err != nil {
		return 0, fmt.Errorf("run a command in machine %s: %w", name, err)
	}
	err = cmd.Run()
	if ctx.Err() != nil {
		err = ctx.Err()
	}
	if last != nil {
		last.Stop()
	}
	finish()
	var exit *exec.ExitError
	switch {
	case ctx.Err() == nil && errors.As(err, &exit) && exit.ExitCode() >= 0:
		return exit.ExitCode(), nil
	case errors.Is(err, exec.ErrWaitDelay):
		return cmd.ProcessState.ExitCode(), nil // a child process still holds its output
	case err != nil:
		return 0, fmt.Errorf("run a command in machine %s: %w", name, err)
	}
	return 0, nil
}

// killAfter is how long a command may take to end after SIGTERM.
const killAfter = 2 * time.Second

// killRecorded kills the command itself, which survives its runc.
func killRecorded(pidFile string) error {
	b, err := os.ReadFile(pidFile)
	if err != nil {
		return nil // it never started
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil {
		return err
	}
	p, err := identify(pid)
	if err != nil {
		return nil // it has ended
	}
	return p.signal(unix.SIGKILL)
}

func terminalType() string {
	if t := os.Getenv("TERM"); t != "" {
		return t
	}
	return "xterm"
}

// connectPipes connects the command's input and output without a terminal.
func connectPipes(cmd *exec.Cmd, stdio Stdio) (finish func(), err error) {
	cmd.Stdout, cmd.Stderr = stdio.Out, stdio.Err
	// We forward an interrupt at our terminal ourselves.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if f, ok := stdio.In.(*os.File); ok && !term.IsTerminal(int(f.Fd())) {
		cmd.Stdin = f
		return func() {}, nil
	}
	if stdio.In == nil {
		return func() {}, nil
	}
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	// No waiting here: a reader such as a terminal may block long after the
	// command has ended. Its next write then finds the pipe closed.
	go func() {
		defer in.Close()
		_, _ = io.Copy(in, stdio.In)
	}()
	return func() {}, nil
}

// connectTerminal gives the command a terminal: ours, if there is one, driven by
// runc, or a new pseudo-terminal whose data are copied.
func connectTerminal(cmd *exec.Cmd, stdio Stdio) (finish func(), err error) {
	if f, ok := stdio.In.(*os.File); ok && term.IsTerminal(int(f.Fd())) {
		cmd.Stdin, cmd.Stdout, cmd.Stderr = f, stdio.Out, stdio.Out
		return func() {}, nil
	}
	master, slave, err := pty.Open()
	if err != nil {
		return nil, fmt.Errorf("open terminal: %w", err)
	}
	if err := pty.Setsize(master, &pty.Winsize{Rows: 24, Cols: 80}); err != nil {
		return nil, errors.Join(err, master.Close(), slave.Close())
	}
	cmd.Stdin, cmd.Stdout, cmd.Stderr = slave, slave, slave
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	out := stdio.Out
	if out == nil {
		out = io.Discard
	}
	copied := make(chan struct{})
	go func() {
		defer close(copied)
		_, _ = io.Copy(out, master) // ends when the last slave is closed
	}()
	if stdio.In != nil {
		go func() { _, _ = io.Copy(master, stdio.In) }()
	}
	return func() {
		_ = slave.Close()
		<-copied
		_ = master.Close()
	}, nil
}

// containerdSocket is containerd's address inside a machine.
const containerdSocket = "/run/containerd/containerd.sock"

// WaitReady waits until the machine's containerd answers, the last step of the
// boot. The error wraps ErrNotRunning if the machine goes off
// meanwhile. If ctx ends first, the error names the units that have not started.
func (h *Host) WaitReady(ctx context.Context, name string) error {
	r, err := h.read(name)
	if err != nil {
		return fmt.Errorf("wait for machine %s: %w", name, err)
	}
	if !r.Init.alive() {
		return fmt.Errorf("wait for machine %s: %w", name, ErrNotRunning)
	}
	up, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		if r.Init.wait(up) == nil {
			stop(ErrNotRunning)
		}
	}()
	err = containerdAnswers(up, r.Init.PID)
	if err != nil {
		err = fmt.Errorf("wait for machine %s: %w", name, context.Cause(up))
		if ctx.Err() != nil {
			err = fmt.Errorf("%w: %s", err, h.diagnose(name))
		}
	}
	stop(nil)
	<-watched
	return err
}

// containerdAnswers polls containerd's health through the machine's file system: a
// watch would use inotify instances, which are scarce on the whole computer.
func containerdAnswers(ctx context.Context, pid int) error {
	socket := "/proc/" + strconv.Itoa(pid) + "/root" + containerdSocket
	conn, err := grpc.NewClient("passthrough:///containerd",
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff: backoff.Config{BaseDelay: 10 * time.Millisecond, Multiplier: 1.5, Jitter: 0.1, MaxDelay: 100 * time.Millisecond},
		}),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", socket)
		}))
	if err != nil {
		return err
	}
	defer conn.Close()
	for {
		_, err := grpc_health_v1.NewHealthClient(conn).Check(ctx, &grpc_health_v1.HealthCheckRequest{}, grpc.WaitForReady(true))
		// Any response counts. Unavailable means that the connection failed.
		if status.Code(err) != codes.Unavailable || ctx.Err() != nil {
			return ctx.Err()
		}
	}
}

// diagnose describes in one line the units for which a booting machine waits.
func (h *Host) diagnose(name string) string {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	var out strings.Builder
	code, err := h.Exec(ctx, name, []string{"systemctl", "--no-legend", "--plain", "--state=failed,activating", "list-units"}, Stdio{Out: &out})
	if err != nil || code != 0 {
		return "its systemd does not answer; see " + h.Console(name)
	}
	var units []string
	for line := range strings.Lines(out.String()) {
		if f := strings.Fields(line); len(f) > 3 {
			units = append(units, f[0]+" is "+f[2])
		}
	}
	if len(units) == 0 {
		return "all of its units are up"
	}
	return strings.Join(units, ", ")
}
