package caller

import (
	"bufio"
	"context"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"time"
)

// Kinds of frames. A frame is its kind, the length of its content in four bytes, and the content.
const (
	FrameStdout = 'o'
	FrameStderr = 'e'
	// FrameExit is the last one. Its content is an Exit in JSON.
	FrameExit = 'x'

	// MaxFrame bounds the content of a frame, in bytes.
	MaxFrame = 64 << 10
)

// Exit is how a command ended.
type Exit struct {
	Code   int    `json:"code"` // -1 by a signal
	Signal string `json:"signal,omitempty"`
	// Error is why the command did not start.
	Error string `json:"error,omitempty"`
}

// EncodeArgv is the value of ArgvHeader.
func EncodeArgv(argv []string) (string, error) {
	b, err := json.Marshal(argv)
	return base64.StdEncoding.EncodeToString(b), err
}

func decodeArgv(s string) (argv []string, err error) {
	b, err := base64.StdEncoding.DecodeString(s)
	if err == nil {
		err = json.Unmarshal(b, &argv)
	}
	if err == nil && len(argv) == 0 {
		err = errors.New("it is empty")
	}
	return argv, err
}

// ReadFrame reads a frame into buf, which has MaxFrame bytes.
func ReadFrame(r *bufio.Reader, buf []byte) (kind byte, content []byte, err error) {
	var head [5]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return 0, nil, err
	}
	n := binary.BigEndian.Uint32(head[1:])
	if n > MaxFrame {
		return 0, nil, fmt.Errorf("a frame has %d bytes, want at most %d", n, MaxFrame)
	}
	_, err = io.ReadFull(r, buf[:n])
	return head[0], buf[:n], err
}

// frames writes frames to the answer of a request.
type frames struct {
	mu sync.Mutex
	w  http.ResponseWriter
}

func (f *frames) write(kind byte, p []byte) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	for first := true; first || len(p) > 0; first = false {
		n := min(len(p), MaxFrame)
		head := [5]byte{kind}
		binary.BigEndian.PutUint32(head[1:], uint32(n))
		if _, err := f.w.Write(head[:]); err != nil {
			return err
		}
		if _, err := f.w.Write(p[:n]); err != nil {
			return err
		}
		p = p[n:]
	}
	return http.NewResponseController(f.w).Flush()
}

// outputOf is a stream of a command.
type outputOf struct {
	f    *frames
	kind byte
}

func (o outputOf) Write(p []byte) (int, error) {
	if err := o.f.write(o.kind, p); err != nil {
		return 0, err
	}
	return len(p), nil
}

// run runs a command. A console that ends the request ends the command. A connection that is lost only ends
// its stdin, as with SSH: an installation of packages is not stopped half-way.
func (c *Call) run(w http.ResponseWriter, r *http.Request, lost func() bool) {
	c.running.Add(1)
	defer c.running.Done()
	f := &frames{w: w}
	exit := func(x Exit) {
		if b, err := json.Marshal(x); err == nil {
			_ = f.write(FrameExit, b)
		}
	}
	argv, err := decodeArgv(r.Header.Get(ArgvHeader))
	if err != nil {
		http.Error(w, "read the command: "+err.Error(), http.StatusBadRequest)
		return
	}
	w.WriteHeader(http.StatusOK)
	_ = http.NewResponseController(w).Flush()
	cmd := exec.CommandContext(context.WithoutCancel(r.Context()), argv[0], argv[1:]...)
	cmd.Dir, cmd.Env = "/", c.Env
	if cmd.Env == nil {
		cmd.Env = os.Environ()
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Stdout, cmd.Stderr = outputOf{f, FrameStdout}, outputOf{f, FrameStderr}
	cmd.WaitDelay = 2 * time.Second // for what it leaves behind with its output open
	in, err := cmd.StdinPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		exit(Exit{Code: 127, Error: err.Error()})
		return
	}
	go func() {
		_, _ = io.Copy(in, r.Body) // a command may end before it has read everything
		_ = in.Close()
	}()
	done := make(chan struct{})
	go func() {
		select {
		case <-done:
		case <-r.Context().Done():
			select {
			case <-done:
				return
			default:
			}
			if !lost() {
				_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
			}
		}
	}()
	err = cmd.Wait()
	close(done)
	state := cmd.ProcessState
	if state == nil {
		exit(Exit{Code: -1, Error: err.Error()})
		return
	}
	x := Exit{Code: state.ExitCode()}
	if ws, ok := state.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
		x.Signal = ws.Signal().String()
	}
	exit(x)
}
