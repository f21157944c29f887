package bootstrapper

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"slices"
	"sync"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"constellation/bootstrapper/initproto"
)

const (
	recordFile     = "init-record.jsonl"
	requestFile    = "init-request.json"
	kubeconfigFile = "init-kubeconfig"

	// maxLines bounds the lines of a record; an init has a few hundred.
	maxLines = 10_000
	// maxResponse is in bytes, for one line of the file.
	maxResponse = 1 << 20
)

// record has all messages to a console about an init, from the first byte. It is stored on
// disk, so that a console that attaches later, or to a later process, gets the same. The
// kubeconfig is in a separate file, which is deleted after the Ack.
type record struct {
	log *slog.Logger

	mu      sync.Mutex
	said    []*initproto.InitResponse
	final   bool
	lines   int
	left    int           // number of dropped lines
	changed chan struct{} // closed and replaced at each change
	file    *os.File
	size    int64 // of the file
	last    int64 // of its last line
	broken  bool  // the file cannot be written; memory continues
}

// openRecord reads the messages of an earlier process. It drops a truncated last line.
func openRecord(state *os.Root, log *slog.Logger) (*record, error) {
	f, err := state.OpenFile(recordFile, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open record of the init: %w", err)
	}
	r := &record{log: log, changed: make(chan struct{}), file: f}
	br := bufio.NewReaderSize(f, 64<<10)
	for {
		line, err := br.ReadBytes('\n')
		if err != nil || len(line) > maxResponse {
			break
		}
		m := &initproto.InitResponse{}
		if protojson.Unmarshal(line, m) != nil || m.GetKind() == nil {
			break
		}
		r.size, r.last = r.size+int64(len(line)), int64(len(line))
		r.keep(m)
	}
	err = f.Truncate(r.size)
	if err == nil {
		_, err = f.Seek(r.size, 0)
	}
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("open record of the init: %w", err)
	}
	return r, nil
}

func (r *record) close() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.file.Close()
}

// empty reports whether there is no message yet.
func (r *record) empty() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.said) == 0
}

// ended reports whether the final message was sent.
func (r *record) ended() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.final
}

// keep adds m in memory. The caller holds mu, or has exclusive access to r.
func (r *record) keep(m *initproto.InitResponse) {
	m.Seq = uint64(len(r.said)) + 1
	r.said = append(r.said, m)
	switch m.Kind.(type) {
	case *initproto.InitResponse_Log:
		r.lines++
	case *initproto.InitResponse_Success, *initproto.InitResponse_Failure:
		r.final = true
	}
}

// reopen removes a failure that was the final message, because the work continues. Followers
// that received it have ended; all others receive the further messages.
func (r *record) reopen() {
	r.mu.Lock()
	defer r.mu.Unlock()
	n := len(r.said) - 1
	if !r.final || r.said[n].GetFailure() == nil {
		return
	}
	r.said, r.final = slices.Clone(r.said[:n]), false // others still read the old ones
	if r.broken {
		return
	}
	r.size -= r.last
	err := r.file.Truncate(r.size)
	if err == nil {
		_, err = r.file.Seek(r.size, 0)
	}
	if err == nil {
		err = r.file.Sync()
	}
	r.unwritten(err)
}

// add sends m to all present and future followers. After the final message nothing is added.
func (r *record) add(m *initproto.InitResponse) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.final {
		return
	}
	if m.GetLog() != nil && r.lines >= maxLines {
		r.left++
		return
	}
	if last := m.GetSuccess() != nil || m.GetFailure() != nil; last && r.left > 0 {
		r.put(&initproto.InitResponse{Kind: &initproto.InitResponse_Log{Log: &initproto.Log{
			Source: "bootstrapper", Level: "warn", Line: fmt.Sprintf("%d further lines are not kept", r.left),
		}}})
	}
	r.put(m)
	close(r.changed)
	r.changed = make(chan struct{})
}

// put keeps m and writes it to disk. The caller holds mu.
func (r *record) put(m *initproto.InitResponse) {
	m.Time = timestamppb.Now()
	r.keep(m)
	if r.broken {
		return
	}
	b, err := protojson.Marshal(m)
	if err == nil {
		b = append(b, '\n')
		_, err = r.file.Write(b)
		r.size, r.last = r.size+int64(len(b)), int64(len(b))
	}
	// Lines are not synced to disk; other messages are.
	if err == nil && m.GetLog() == nil {
		err = r.file.Sync()
	}
	r.unwritten(err)
}

// unwritten abandons the file if err is not nil. The caller holds mu.
func (r *record) unwritten(err error) {
	if err != nil {
		r.broken = true
		r.log.Warn("record of the init not kept on disk", "err", err)
	}
}

func (r *record) progress(p *initproto.Progress) {
	r.add(&initproto.InitResponse{Kind: &initproto.InitResponse_Progress{Progress: p}})
}

func (r *record) line(source, level, line string) {
	r.add(&initproto.InitResponse{Kind: &initproto.InitResponse_Log{Log: &initproto.Log{Source: source, Level: level, Line: line}}})
}

// follow sends all messages from the start to the final one, or until ctx or stop end. A slow
// receiver delays no other.
func (r *record) follow(ctx context.Context, stop <-chan struct{}, send func(*initproto.InitResponse) error) error {
	for next := 0; ; {
		r.mu.Lock()
		said, final, changed := r.said[next:len(r.said):len(r.said)], r.final, r.changed
		r.mu.Unlock()
		for _, m := range said {
			if err := send(m); err != nil {
				return err
			}
		}
		next += len(said)
		if final {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		case <-stop:
			return errStopping
		}
	}
}

// keepRequest stores the request of an init, without its secret.
func keepRequest(state *os.Root, req *initproto.InitRequest) error {
	b, err := protojson.Marshal(cloneRequest(req))
	if err != nil {
		return fmt.Errorf("keep the request: %w", err)
	}
	return replaceFile(state, requestFile, b, 0o600)
}

// keptRequest returns the stored request, or nil.
func keptRequest(state *os.Root) (*initproto.InitRequest, error) {
	b, err := state.ReadFile(requestFile)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read the request of the init: %w", err)
	}
	r := &initproto.InitRequest{}
	if err := protojson.Unmarshal(b, r); err != nil {
		return nil, fmt.Errorf("%w: %s is damaged; `bootstrapper reset` and a reboot make the machine unused", ErrStuck, requestFile)
	}
	return r, nil
}

// withKubeconfig returns m in the form to send: a success carries the kubeconfig.
func withKubeconfig(state *os.Root, m *initproto.InitResponse) (*initproto.InitResponse, error) {
	if m.GetSuccess() == nil {
		return m, nil
	}
	b, err := state.ReadFile(kubeconfigFile)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, errFetched
	}
	if err != nil {
		return nil, fmt.Errorf("read the kubeconfig: %w", err)
	}
	c := proto.Clone(m).(*initproto.InitResponse)
	c.GetSuccess().Kubeconfig = b
	return c, nil
}
