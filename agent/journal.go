//go:build linux

package agent

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"slices"
	"sync"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"constellation/agent/upgradeproto"
	"constellation/engine/kubeadm"
	journalfile "constellation/internal/journal"
)

const (
	journalFile = "upgrade.jsonl"

	// maxKept bounds the lines of a run in a journal, and the bytes of their text; the oldest are
	// dropped. A run has about 150 lines.
	maxKept      = 4000
	maxKeptBytes = 1 << 20
	// maxJournal is in bytes: beyond, the file is rewritten with the kept lines.
	maxJournal = 4 << 20
	// maxEntry is in bytes, for one line of the file.
	maxEntry = 256 << 10
	// unsynced bounds the lines that a power failure can lose.
	unsynced = 500
)

// errStopping ends streams of an agent that stops. The work may continue.
var errStopping = errors.New("the agent is stopping")

// head is the first entry of a journal.
type head struct {
	// Request is without its position in the stream.
	Request json.RawMessage `json:"request"`
	Started time.Time       `json:"started"`
	Boot    string          `json:"boot"`
	// Stage is the latest; Dropped counts lines that were dropped.
	Stage   string `json:"stage,omitempty"`
	Dropped uint64 `json:"dropped,omitempty"`
}

// entry is one line of a journal's file; one of its fields is set.
type entry struct {
	Head *head `json:"head,omitempty"`
	// Said is an UpgradeResponse.
	Said json.RawMessage `json:"said,omitempty"`
	// Next is the position in kubeadm's output after Said.
	Next int64 `json:"next,omitempty"`
	// Process is a kubeadm that is about to run.
	Process *kubeadm.Process `json:"process,omitempty"`
}

// journal is the record of the latest request for all present and future callers, of this
// process or the next. It is safe for concurrent use.
type journal struct {
	log *slog.Logger
	dir *os.Root

	mu      sync.Mutex
	request *upgradeproto.UpgradeRequest // nil: no request yet
	head    head
	said    []*upgradeproto.UpgradeResponse
	bytes   int // of the text of said
	seq     uint64
	stage   string
	final   bool
	process *kubeadm.Process
	next    int64         // position in the output of process
	changed chan struct{} // closed and replaced at each change

	file   *journalfile.File
	lines  int  // since the last sync
	broken bool // lines cannot be written; memory continues
}

// openJournal reads the journal of an earlier process. It drops a truncated entry, and
// everything after it.
func openJournal(dir *os.Root, boot string, log *slog.Logger) (*journal, error) {
	j := &journal{log: log, dir: dir, changed: make(chan struct{})}
	first := true
	f, err := journalfile.Open(dir, journalFile, 0, maxEntry, func(line []byte) bool {
		ok := j.replay(line, first)
		first = false
		return ok
	})
	if errors.Is(err, fs.ErrNotExist) {
		return j, nil
	}
	if err != nil {
		return nil, fmt.Errorf("open journal of upgrades: %w", err)
	}
	if j.request == nil { // it never began: heads are written atomically
		f.Close()
		return j, nil
	}
	if err := f.Repair(); err != nil {
		f.Close()
		return nil, fmt.Errorf("open journal of upgrades: %w", err)
	}
	if j.head.Boot != boot {
		// Lines that were sent but did not reach the disk must not share their numbers with others.
		j.seq += 2 * unsynced
	}
	j.file = f
	return j, nil
}

// replay adds one line of the file in memory and reports whether it is valid.
func (j *journal) replay(line []byte, first bool) bool {
	var e entry
	if json.Unmarshal(line, &e) != nil || first != (e.Head != nil) {
		return false
	}
	switch {
	case e.Head != nil:
		r := &upgradeproto.UpgradeRequest{}
		if protojson.Unmarshal(e.Head.Request, r) != nil {
			return false
		}
		j.request, j.head, j.stage = r, *e.Head, e.Head.Stage
	case e.Process != nil:
		j.process, j.next = e.Process, 0
	default:
		m := &upgradeproto.UpgradeResponse{}
		if protojson.Unmarshal(e.Said, m) != nil || m.GetKind() == nil || m.GetSeq() <= j.seq {
			return false
		}
		j.keep(m)
		if e.Next > 0 {
			j.next = e.Next
		}
	}
	return true
}

// keep adds m in memory. The caller holds mu, or has exclusive access to j.
func (j *journal) keep(m *upgradeproto.UpgradeResponse) {
	j.seq = m.GetSeq()
	j.said = append(j.said, m)
	j.bytes += proto.Size(m)
	switch k := m.GetKind().(type) {
	case *upgradeproto.UpgradeResponse_Progress:
		j.stage = k.Progress.GetStage()
	case *upgradeproto.UpgradeResponse_Success, *upgradeproto.UpgradeResponse_Failure:
		j.final = true
	}
	for len(j.said) > maxKept || j.bytes > maxKeptBytes && len(j.said) > 1 {
		j.bytes -= proto.Size(j.said[0])
		j.said[0] = nil
		j.said = j.said[1:]
		j.head.Dropped++
	}
}

// begin discards the latest run and starts another. It returns when that is on disk.
func (j *journal) begin(req *upgradeproto.UpgradeRequest, boot string) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	b, err := protojson.Marshal(req)
	if err != nil {
		return fmt.Errorf("begin journal: %w", err)
	}
	n := &journal{request: req, head: head{Request: b, Started: time.Now().UTC(), Boot: boot}}
	f, err := j.write(n)
	if err != nil {
		return err
	}
	j.replace(f)
	j.request, j.head, j.said, j.bytes, j.seq, j.stage, j.final, j.process, j.next = req, n.head, nil, 0, 0, "", false, nil, 0
	return nil
}

// resume continues an interrupted run for req, an equal request.
func (j *journal) resume(req *upgradeproto.UpgradeRequest, boot string) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	b, err := protojson.Marshal(req)
	if err != nil {
		return fmt.Errorf("continue journal: %w", err)
	}
	h := j.head
	h.Request, h.Boot, h.Stage = b, boot, j.stage
	f, err := j.write(&journal{request: req, head: h, said: j.said})
	if err != nil {
		return err
	}
	j.replace(f)
	j.request, j.head, j.process = req, h, nil
	return nil
}

// write writes the content of n to a new file, renames it to the journal, and returns when it
// is on disk.
func (j *journal) write(n *journal) (*journalfile.File, error) {
	var b bytes.Buffer
	add := func(e entry) error {
		line, err := json.Marshal(e)
		b.Write(line)
		b.WriteByte('\n')
		return err
	}
	err := add(entry{Head: &n.head})
	if n.process != nil {
		err = errors.Join(err, add(entry{Process: n.process}))
	}
	for i, m := range n.said {
		said, e := protojson.Marshal(m)
		en := entry{Said: said}
		if i == len(n.said)-1 {
			en.Next = n.next
		}
		err = errors.Join(err, e, add(en))
	}
	if err != nil {
		return nil, fmt.Errorf("write journal: %w", err)
	}
	f, err := journalfile.Replace(j.dir, journalFile, b.Bytes())
	if err != nil {
		return nil, fmt.Errorf("write journal: %w", err)
	}
	return f, nil
}

func (j *journal) replace(f *journalfile.File) {
	if j.file != nil {
		j.file.Close()
	}
	j.file, j.lines, j.broken = f, 0, false
}

// stageIs reports a change of a stage's state, and returns when it is on disk.
func (j *journal) stageIs(stage, state, text string) error {
	return j.add(&upgradeproto.UpgradeResponse{Kind: &upgradeproto.UpgradeResponse_Progress{
		Progress: &upgradeproto.Progress{Stage: stage, State: state, Text: text},
	}}, 0)
}

// line reports a line. A failure to write it to disk is not fatal.
func (j *journal) line(source, level, text string, next int64) {
	_ = j.add(&upgradeproto.UpgradeResponse{Kind: &upgradeproto.UpgradeResponse_Log{
		Log: &upgradeproto.Log{Source: source, Level: level, Line: text},
	}}, next)
}

// succeed and fail report the final message. It stands even if it cannot be written: the next
// agent will treat the run as interrupted, and resuming it is harmless.
func (j *journal) succeed() {
	_ = j.add(&upgradeproto.UpgradeResponse{Kind: &upgradeproto.UpgradeResponse_Success{
		Success: &upgradeproto.Success{KubernetesVersion: j.request.GetKubernetesVersion()},
	}}, 0)
}

func (j *journal) fail(f *upgradeproto.Failure) {
	_ = j.add(&upgradeproto.UpgradeResponse{Kind: &upgradeproto.UpgradeResponse_Failure{Failure: f}}, 0)
}

// add sends m to all followers and writes it to disk. All messages except lines are on disk
// when it returns nil; an error means that m is not, but was sent.
func (j *journal) add(m *upgradeproto.UpgradeResponse, next int64) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.final {
		return nil
	}
	m.Seq, m.Time = j.seq+1, timestamppb.Now()
	j.keep(m)
	if next > 0 {
		j.next = next
	}
	close(j.changed)
	j.changed = make(chan struct{})
	return j.put(m, next)
}

// put writes m to disk. The caller holds mu.
func (j *journal) put(m *upgradeproto.UpgradeResponse, next int64) error {
	if j.broken && m.GetLog() != nil {
		return nil
	}
	if j.broken || j.file.Size() > maxJournal {
		// This also recovers from a full disk: everything that is kept is rewritten.
		h := j.head
		h.Stage = j.stage
		f, err := j.write(&journal{head: h, said: j.said, process: j.process, next: j.next})
		if err != nil {
			return j.unwritten(err)
		}
		j.replace(f)
		return nil
	}
	said, err := protojson.Marshal(m)
	if err != nil {
		return j.unwritten(err)
	}
	return j.unwritten(j.append(entry{Said: said, Next: next}, m.GetLog() == nil))
}

// append writes e to the end of the file. The caller holds mu.
func (j *journal) append(e entry, sync bool) error {
	b, err := json.Marshal(e)
	if err != nil {
		return err
	}
	if j.lines++; j.lines >= unsynced {
		sync = true
	}
	if sync {
		j.lines = 0
	}
	return j.file.Append(b, sync)
}

func (j *journal) unwritten(err error) error {
	if err == nil {
		return nil
	}
	if !j.broken {
		j.log.Warn("journal not kept on disk", "err", err)
	}
	j.broken = true
	return err
}

// started records the process that is about to become kubeadm.
func (j *journal) started(p kubeadm.Process) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.broken {
		return errors.New("record the process: the journal cannot be written")
	}
	if err := j.append(entry{Process: &p}, true); err != nil {
		return j.unwritten(fmt.Errorf("record the process: %w", err))
	}
	j.process, j.next = &p, 0
	return nil
}

// latest returns the request of the run, its start, and whether it has ended; nil if there was
// none.
func (j *journal) latest() (req *upgradeproto.UpgradeRequest, started time.Time, final bool) {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.request, j.head.Started, j.final
}

// current returns the stage of the run.
func (j *journal) current() string {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.stage
}

// kubeadm returns the latest process that was to become kubeadm, and the position in its
// output.
func (j *journal) kubeadm() (*kubeadm.Process, int64) {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.process, j.next
}

// run describes the latest run; nil if there was none.
func (j *journal) run(running bool) *upgradeproto.Run {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.request == nil {
		return nil
	}
	r := &upgradeproto.Run{
		Token: j.request.GetToken(), KubernetesVersion: j.request.GetKubernetesVersion(), What: j.request.GetWhat(),
		State: upgradeproto.Run_INTERRUPTED, Stage: j.stage, Started: timestamppb.New(j.head.Started), Updated: timestamppb.New(j.head.Started), Seq: j.seq,
	}
	if running {
		r.State = upgradeproto.Run_RUNNING
	}
	for i := len(j.said) - 1; i >= 0; i-- {
		m := j.said[i]
		if i == len(j.said)-1 {
			r.Updated = m.GetTime()
			switch k := m.GetKind().(type) {
			case *upgradeproto.UpgradeResponse_Success:
				r.State = upgradeproto.Run_SUCCEEDED
			case *upgradeproto.UpgradeResponse_Failure:
				r.State, r.Stage, r.Message = upgradeproto.Run_FAILED, k.Failure.GetStage(), k.Failure.GetMessage()
			case *upgradeproto.UpgradeResponse_Progress:
				if r.State == upgradeproto.Run_INTERRUPTED {
					r.Message = k.Progress.GetText()
				}
			}
		}
		if l := m.GetLog(); l != nil {
			r.LastLine = l.GetLine()
			break
		}
	}
	return r
}

// follow sends the messages after number after, until the final one of the run that started at
// started, or until ctx or stop end. A slow receiver delays no other.
func (j *journal) follow(ctx context.Context, stop <-chan struct{}, started time.Time, after uint64, send func(*upgradeproto.UpgradeResponse) error) error {
	return journalfile.Follow(ctx, stop, errStopping, func() (journalfile.Batch[*upgradeproto.UpgradeResponse], error) {
		return j.since(started, after)
	}, func(m *upgradeproto.UpgradeResponse) error {
		if err := send(m); err != nil {
			return err
		}
		after = m.GetSeq()
		return nil
	})
}

// since returns the messages after number after of the run that started at started.
func (j *journal) since(started time.Time, after uint64) (journalfile.Batch[*upgradeproto.UpgradeResponse], error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if !j.head.Started.Equal(started) { // the run ended and another began
		return journalfile.Batch[*upgradeproto.UpgradeResponse]{}, errors.New("the run has ended, and another has started")
	}
	i := len(j.said)
	for i > 0 && j.said[i-1].GetSeq() > after {
		i--
	}
	return journalfile.Batch[*upgradeproto.UpgradeResponse]{Messages: slices.Clone(j.said[i:]), Final: j.final, Changed: j.changed}, nil
}

func (j *journal) close() {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.file != nil {
		j.file.Close()
	}
}
