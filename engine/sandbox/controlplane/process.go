package controlplane

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"time"
)

var errPortTaken = errors.New("port taken by somebody else")

// process is a child that dies with its parent.
type process struct {
	cmd  *exec.Cmd
	log  string
	done chan struct{}
	// err is what the process ended with; it may be read once done is closed.
	err error
}

// spawn starts path with args, its output going to the file log.
func spawn(path string, args []string, log string) (*process, error) {
	f, err := os.OpenFile(log, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return nil, err
	}
	// The process lives until it is killed, not as long as the call that starts it.
	p := &process{cmd: exec.CommandContext(context.Background(), path, args...), log: log, done: make(chan struct{})}
	p.cmd.Stdout, p.cmd.Stderr = f, f
	dieWithParent(p.cmd)
	started := make(chan error)
	go func() {
		// The kernel sends the parent-death signal when the thread that forked ends, so
		// that thread is kept for as long as the child lives.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := p.cmd.Start()
		f.Close()
		started <- err
		if err != nil {
			return
		}
		p.err = p.cmd.Wait()
		close(p.done)
	}()
	if err := <-started; err != nil {
		return nil, err
	}
	return p, nil
}

// Child is another program that dies with this process.
type Child struct{ p *process }

// StartChild starts the program at path with args; what it writes is added to the file
// log.
func StartChild(path string, args []string, log string) (Child, error) {
	p, err := spawn(path, args, log)
	if err != nil {
		return Child{}, fmt.Errorf("start %s: %w", filepath.Base(path), err)
	}
	return Child{p}, nil
}

// Ended is closed when the child has ended.
func (c Child) Ended() <-chan struct{} { return c.p.done }

// PID returns the child's process ID, and zero when it has ended.
func (c Child) PID() int { return c.p.pid() }

// End asks the child to end, kills it if it has not after grace, and waits for its end.
func (c Child) End(grace time.Duration) {
	_ = c.p.cmd.Process.Signal(os.Interrupt) // already ended is as good
	select {
	case <-c.p.done:
	case <-time.After(grace):
		c.p.kill()
	}
}

func (p *process) pid() int {
	select {
	case <-p.done:
		return 0
	default:
		return p.cmd.Process.Pid
	}
}

// exit describes why the process ended, with the end of its log, or returns nil if
// it still runs.
func (p *process) exit() error {
	select {
	case <-p.done:
	default:
		return nil
	}
	tail := logTail(p.log)
	if strings.Contains(tail, "address already in use") {
		return errPortTaken
	}
	return fmt.Errorf("%s ended: %w; its log ends with:\n%s", filepath.Base(p.cmd.Path), p.err, tail)
}

func (p *process) kill() {
	_ = p.cmd.Process.Kill() // already ended is as good
	<-p.done
}

// run starts one part of the control plane and waits until it is ready. A nil ready
// means that the part need not be waited for.
func (c *ControlPlane) run(ctx context.Context, name string, args []string, ready func(context.Context) bool) error {
	p, err := spawn(filepath.Join(c.bin, name), args, filepath.Join(c.dir, name+".log"))
	if err != nil {
		return fmt.Errorf("start %s: %w", name, err)
	}
	c.mu.Lock()
	c.procs[name] = p
	c.mu.Unlock()
	if ready == nil {
		return nil
	}
	err = poll(ctx, func() (bool, error) {
		if err := c.exited("etcd"); err != nil {
			return false, err
		}
		return ready(ctx), p.exit()
	})
	if err != nil && ctx.Err() != nil {
		return fmt.Errorf("%s did not become ready: %w; its log ends with:\n%s", name, err, logTail(p.log))
	}
	return err
}

// exited returns why a part ended, and nil if it runs or was stopped by us.
func (c *ControlPlane) exited(name string) error {
	c.mu.Lock()
	p := c.procs[name]
	c.mu.Unlock()
	if p == nil {
		return nil
	}
	return p.exit()
}

func (c *ControlPlane) stop(name string) {
	c.mu.Lock()
	p := c.procs[name]
	delete(c.procs, name)
	c.mu.Unlock()
	if p != nil {
		p.kill()
	}
}

// poll calls done every 50 ms until it says true or fails, or ctx ends.
func poll(ctx context.Context, done func() (bool, error)) error {
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		ok, err := done()
		if err != nil {
			return err
		}
		if ok {
			return nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
	}
}

// logTail returns the last lines of a log, enough to see why a process ended.
func logTail(path string) string {
	const size = 4096
	b, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	if len(b) > size {
		b = b[len(b)-size:]
		if i := bytes.IndexByte(b, '\n'); i >= 0 {
			b = b[i+1:]
		}
	}
	return strings.TrimSpace(string(b))
}
