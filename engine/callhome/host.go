package callhome

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/netip"
	"path"
	"strconv"
	"strings"
	"time"

	"constellation/engine/callhome/caller"
	"constellation/engine/plan"
	"constellation/engine/sshhost"
)

// Host is a machine that called. It runs commands as *sshhost.Host does, and always as root.
type Host struct {
	address netip.Addr
	client  *http.ClientConn
	lost    <-chan struct{} // closed when the connection is
}

// newHost makes the console the client of HTTP/2 on a connection.
func newHost(ctx context.Context, conn net.Conn, address netip.Addr, lost <-chan struct{}) (*Host, error) {
	var protocols http.Protocols
	protocols.SetUnencryptedHTTP2(true) // TLS is below
	t := &http.Transport{
		Protocols: &protocols, DisableCompression: true, HTTP2: &http.HTTP2Config{SendPingTimeout: caller.Silence, PingTimeout: caller.Silence},
		DialContext: func(context.Context, string, string) (net.Conn, error) { return conn, nil },
	}
	c, err := t.NewClientConn(ctx, "http", "machine:80")
	return &Host{address: address, client: c, lost: lost}, err
}

// Target names the machine by its address. It has no user.
func (h *Host) Target() sshhost.Target { return sshhost.Target{Host: h.address.String()} }

func (h *Host) request(ctx context.Context, path string, body io.Reader) (*http.Request, error) {
	return http.NewRequestWithContext(ctx, http.MethodPost, "http://machine"+path, body)
}

// post sends a document and waits until the machine has it.
func (h *Host) post(path string, b []byte) error {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	r, err := h.request(ctx, path, bytes.NewReader(b))
	if err != nil {
		return err
	}
	a, err := h.client.RoundTrip(r)
	if err != nil {
		return err
	}
	return a.Body.Close()
}

// Say prints a line for the owner of the machine.
func (h *Host) Say(line string) {
	_ = h.post(caller.PathSay, []byte(line[:min(len(line), caller.MaxLine)])) // the next command shows whether the connection is lost
}

// end ends the call.
func (h *Host) end(e caller.End) {
	if b, err := json.Marshal(e); err == nil {
		_ = h.post(caller.PathEnd, b) // a machine that does not get it calls again, and is refused
	}
	_ = h.client.Close()
}

// Run runs a command. A command that fails is no error: its exit code is in the result.
func (h *Host) Run(ctx context.Context, c sshhost.Command) (sshhost.Result, error) {
	if len(c.Argv) == 0 || c.Argv[0] == "" {
		return sshhost.Result{}, errors.New("run a command: it is empty")
	}
	op := "run " + sshhost.Text([]byte(c.Argv[0])) + " on " + h.address.String()
	argv, err := caller.EncodeArgv(c.Argv)
	if err != nil {
		return sshhost.Result{}, fmt.Errorf("%s: %w", op, err)
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var body io.Reader = http.NoBody
	if c.Stdin != nil {
		body = io.NopCloser(c.Stdin) // the caller closes it
	}
	r, err := h.request(ctx, caller.PathRun, body)
	if err != nil {
		return sshhost.Result{}, fmt.Errorf("%s: %w", op, err)
	}
	r.ContentLength = -1
	r.Header.Set(caller.ArgvHeader, argv)
	a, err := h.client.RoundTrip(r)
	if err != nil {
		return sshhost.Result{}, h.failed(ctx, op, err)
	}
	defer func() {
		cancel(nil) // else Close waits until stdin ends
		_ = a.Body.Close()
	}()
	if a.StatusCode != http.StatusOK {
		return sshhost.Result{}, h.failed(ctx, op, fmt.Errorf("the machine answered %d", a.StatusCode))
	}
	res, err := h.read(op, a.Body, c)
	if err != nil {
		return sshhost.Result{}, h.failed(ctx, op, err)
	}
	return res, nil
}

// read reads the output of a command until its exit. All of it is hostile.
func (h *Host) read(op string, from io.Reader, c sshhost.Command) (out sshhost.Result, err error) {
	left := cmp.Or(c.MaxOutput, sshhost.DefaultMaxOutput)
	in, buf := bufio.NewReader(from), make([]byte, caller.MaxFrame)
	for {
		kind, p, err := caller.ReadFrame(in, buf)
		if err != nil {
			return out, err
		}
		streamed := kind == caller.FrameStdout && c.Stdout != nil
		if kind != caller.FrameExit && !streamed {
			if left -= len(p); left < 0 {
				return out, &plan.Error{Op: op, Err: fmt.Errorf("%w: the command was ended", sshhost.ErrTooMuch), Remedy: "check what the program on the machine prints"}
			}
		}
		switch {
		case streamed:
			if _, err := c.Stdout.Write(p); err != nil {
				return out, err
			}
		case kind == caller.FrameStdout:
			out.Stdout = append(out.Stdout, p...)
		case kind == caller.FrameStderr:
			out.Stderr = append(out.Stderr, p...)
		case kind == caller.FrameExit:
			var x caller.Exit
			if err := json.Unmarshal(p, &x); err != nil {
				return out, fmt.Errorf("read the exit of the command: %w", err)
			}
			out.Exit, out.Signal = x.Code, x.Signal
			if x.Error != "" {
				out.Stderr = append(out.Stderr, x.Error...)
			}
			if x.Signal != "" {
				out.Exit = -1
			}
			return out, nil
		default:
			return out, fmt.Errorf("the machine sent a frame of the kind %q", kind)
		}
	}
}

// failed explains an error of a command.
func (h *Host) failed(ctx context.Context, op string, err error) error {
	var known *plan.Error
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case errors.As(err, &known):
		return err
	}
	select {
	case <-h.lost:
		err = nil
	default:
	}
	if err == nil || errors.Is(err, sshhost.ErrLost) || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return &plan.Error{Op: op, Err: sshhost.ErrLost, Remedy: lostRemedy}
	}
	return &plan.Error{Op: op, Err: errors.New(sshhost.Text([]byte(err.Error()))), Remedy: "run the command on the machine again"}
}

// maxFile bounds a file that is uploaded from memory, in bytes.
const maxFile = 64 << 20

// Upload writes a file of the machine, as root. A lost connection leaves the previous file.
func (h *Host) Upload(ctx context.Context, file string, mode fs.FileMode, size int64, r io.Reader) error {
	op := "upload " + file + " to " + h.address.String()
	if !path.IsAbs(file) || path.Clean(file) != file || file == "/" || strings.ContainsRune(file, 0) {
		return fmt.Errorf("upload %q: want an absolute path of a file", file)
	}
	if mode&^fs.ModePerm != 0 {
		return fmt.Errorf("upload %s: mode %s has more than permissions", file, mode)
	}
	sum := sha256.New()
	seeker, ok := r.(io.ReadSeeker)
	if !ok {
		b, err := io.ReadAll(io.LimitReader(r, maxFile+1))
		if err != nil {
			return fmt.Errorf("%s: %w", op, err)
		}
		seeker = bytes.NewReader(b)
	}
	n, err := io.Copy(sum, seeker)
	if err == nil && n != size {
		err = fmt.Errorf("the content has %d bytes, want %d", n, size)
	}
	if err == nil {
		_, err = seeker.Seek(0, io.SeekStart)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", op, err)
	}
	res, err := h.Run(ctx, sshhost.Command{
		Root: true, Stdin: seeker,
		Argv: []string{"sh", "-c", sshhost.PlaceScript, "sh", "/dev/stdin", file, strconv.FormatUint(uint64(mode), 8), hex.EncodeToString(sum.Sum(nil))},
	})
	if err != nil {
		return err
	}
	if err := res.Err(); err != nil {
		return &plan.Error{Op: op, Err: err, Remedy: "check the folder " + path.Dir(file) + " and the free space on the machine, then run the command there again"}
	}
	return nil
}
