package bootstrapper

import (
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
	"constellation/internal/journal"
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
	file    *journal.File
	broken  bool // the file cannot be written; memory continues
}

// openRecord reads the messages of an earlier process. It drops a truncated last line.
func openRecord(state *os.Root, log *slog.Logger) (*record, error) {
	r := &record{log: log, changed: make(chan struct{})}
	f, err := journal.Open(state, recordFile, os.O_CREATE, maxResponse, func(line []byte) bool {
		m := &initproto.InitResponse{}
		if protojson.Unmarshal(line, m) != nil || m.GetKind() == nil {
			return false
		}
		r.keep(m)
		return true
	})
	if err != nil {
		return nil, fmt.Errorf("open record of the init: %w", err)
	}
	if err := f.Repair(); err != nil {
		f.Close()
		return nil, fmt.Errorf("open record of the init: %w", err)
	}
	r.file = f
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
	if !r.broken {
		r.unwritten(r.file.DropLast())
	}
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
		err = r.file.Append(b, m.GetLog() == nil) // lines are not synced to disk
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
	next := 0
	return journal.Follow(ctx, stop, errStopping, func() (journal.Batch[*initproto.InitResponse], error) {
		r.mu.Lock()
		defer r.mu.Unlock()
		b := journal.Batch[*initproto.InitResponse]{Messages: r.said[next:len(r.said):len(r.said)], Final: r.final, Changed: r.changed}
		next = len(r.said)
		return b, nil
	}, send)
}

// keepRequest stores the request of an init, without its secrets.
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
