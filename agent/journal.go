//go:build linux

package agent

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"sync"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"constellation/agent/upgradeproto"
	"constellation/engine/kubeadm"
)

const (
	journalFile = "upgrade.jsonl"

	// maxKept bounds what a journal keeps of a run, in lines and in bytes of their text;
	// the oldest go first. A run has about 150 lines.
	maxKept      = 4000
	maxKeptBytes = 1 << 20
	// maxJournal is in bytes: beyond, the file is written anew with what is kept.
	maxJournal = 4 << 20
	// maxEntry is in bytes, for one line of the file.
	maxEntry = 256 << 10
	// unsynced bounds the lines that a loss of power can take.
	unsynced = 500
)

// errStopping ends streams of an agent that stops. The work may go on.
var errStopping = errors.New("the agent is stopping")

// head begins a journal.
type head struct {
	// Request is without its place in the stream.
	Request json.RawMessage `json:"request"`
	Started time.Time       `json:"started"`
	Boot    string          `json:"boot"`
	// Stage is the latest; Dropped counts lines that are not kept any more.
	Stage   string `json:"stage,omitempty"`
	Dropped uint64 `json:"dropped,omitempty"`
}

// entry is one line of a journal's file; one of its fields is set.
type entry struct {
	Head *head `json:"head,omitempty"`
	// Said is an UpgradeResponse.
	Said json.RawMessage `json:"said,omitempty"`
	// Next is where the output of kubeadm goes on after Said.
	Next int64 `json:"next,omitempty"`
	// Process is a kubeadm that is about to run.
	Process *kubeadm.Process `json:"process,omitempty"`
}

// journal is what became of the latest request, as it is told to everybody who asks,
// now or later, by this process or the next. It is safe for concurrent use.
type journal struct {
	log *slog.Logger
	dir *os.Root

	mu      sync.Mutex
	request *upgradeproto.UpgradeRequest // nil: nothing was ever asked
	head    head
	said    []*upgradeproto.UpgradeResponse
	bytes   int // of the text of said
	seq     uint64
	stage   string
	final   bool
	process *kubeadm.Process
	next    int64         // where the output of process goes on
	changed chan struct{} // closed and replaced at each change

	file   *os.File
	size   int64
	lines  int  // since the last sync
	broken bool // lines cannot be written; memory goes on
}

// openJournal reads what an earlier process wrote. An entry that was cut is dropped,
// and everything after it.
func openJournal(dir *os.Root, boot string, log *slog.Logger) (*journal, error) {
	j := &journal{log: log, dir: dir, changed: make(chan struct{})}
	f, err := dir.OpenFile(journalFile, os.O_RDWR, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return j, nil
	}
	if err != nil {
		return nil, fmt.Errorf("open journal of upgrades: %w", err)
	}
	br := bufio.NewReaderSize(f, 64<<10)
	for first := true; ; first = false {
		line, err := readEntry(br)
		if err != nil || !j.replay(line, first) {
			break
		}
		j.size += int64(len(line))
	}
	if j.request == nil { // it never began: heads are written whole
		f.Close()
		return j, nil
	}
	err = f.Truncate(j.size)
	if err == nil {
		_, err = f.Seek(j.size, io.SeekStart)
	}
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("open journal of upgrades: %w", err)
	}
	if j.head.Boot != boot {
		// Lines that were told and did not reach the disk must not share their numbers
		// with others.
		j.seq += 2 * unsynced
	}
	j.file = f
	return j, nil
}

// readEntry reads one line with its end, and fails at one that is too long.
func readEntry(br *bufio.Reader) ([]byte, error) {
	var line []byte
	for {
		part, err := br.ReadSlice('\n')
		line = append(line, part...)
		if !errors.Is(err, bufio.ErrBufferFull) {
			return line, err
		}
		if len(line) > maxEntry {
			return nil, bufio.ErrTooLong
		}
	}
}

// replay takes one line of the file into memory and reports whether it could.
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

// keep takes m into memory. The caller holds mu, or nobody else knows j.
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

// begin forgets the latest run and begins another. It returns when that is on disk.
func (j *journal) begin(req *upgradeproto.UpgradeRequest, boot string) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	b, err := protojson.Marshal(req)
	if err != nil {
		return fmt.Errorf("begin journal: %w", err)
	}
	n := &journal{request: req, head: head{Request: b, Started: time.Now().UTC(), Boot: boot}}
	f, size, err := j.write(n)
	if err != nil {
		return err
	}
	j.replace(f, size)
	j.request, j.head, j.said, j.bytes, j.seq, j.stage, j.final, j.process, j.next = req, n.head, nil, 0, 0, "", false, nil, 0
	return nil
}

// resume goes on with a run that was interrupted, in the name of req, which asks for
// the same.
func (j *journal) resume(req *upgradeproto.UpgradeRequest, boot string) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	b, err := protojson.Marshal(req)
	if err != nil {
		return fmt.Errorf("go on with journal: %w", err)
	}
	h := j.head
	h.Request, h.Boot, h.Stage = b, boot, j.stage
	f, size, err := j.write(&journal{request: req, head: h, said: j.said})
	if err != nil {
		return err
	}
	j.replace(f, size)
	j.request, j.head, j.process = req, h, nil
	return nil
}

// write writes what n holds to a new file, puts it in the place of the old one, and
// returns when it is on disk.
func (j *journal) write(n *journal) (*os.File, int64, error) {
	const tmp = journalFile + ".new"
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
		return nil, 0, fmt.Errorf("write journal: %w", err)
	}
	f, err := j.dir.OpenFile(tmp, os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return nil, 0, fmt.Errorf("write journal: %w", err)
	}
	_, err = f.Write(b.Bytes())
	if err == nil {
		err = f.Sync()
	}
	if err == nil {
		err = j.dir.Rename(tmp, journalFile)
	}
	if err == nil {
		err = syncDir(j.dir)
	}
	if err != nil {
		f.Close()
		_ = j.dir.Remove(tmp) // the error at hand says more
		return nil, 0, fmt.Errorf("write journal: %w", err)
	}
	return f, int64(b.Len()), nil
}

func (j *journal) replace(f *os.File, size int64) {
	if j.file != nil {
		j.file.Close()
	}
	j.file, j.size, j.lines, j.broken = f, size, 0, false
}

// stageIs tells a change of a stage's state, and returns when it is on disk.
func (j *journal) stageIs(stage, state, text string) error {
	return j.add(&upgradeproto.UpgradeResponse{Kind: &upgradeproto.UpgradeResponse_Progress{
		Progress: &upgradeproto.Progress{Stage: stage, State: state, Text: text},
	}}, 0)
}

// line tells a line. That it is not on disk is no reason to stop.
func (j *journal) line(source, level, text string, next int64) {
	_ = j.add(&upgradeproto.UpgradeResponse{Kind: &upgradeproto.UpgradeResponse_Log{
		Log: &upgradeproto.Log{Source: source, Level: level, Line: text},
	}}, next)
}

// succeed and fail tell the last word. It stands even if it cannot be written: the
// next agent will call the run interrupted, and going on with it is harmless.
func (j *journal) succeed() {
	_ = j.add(&upgradeproto.UpgradeResponse{Kind: &upgradeproto.UpgradeResponse_Success{
		Success: &upgradeproto.Success{KubernetesVersion: j.request.GetKubernetesVersion()},
	}}, 0)
}

func (j *journal) fail(f *upgradeproto.Failure) {
	_ = j.add(&upgradeproto.UpgradeResponse{Kind: &upgradeproto.UpgradeResponse_Failure{Failure: f}}, 0)
}

// add tells m to everybody who follows and writes it down. All but lines are on disk
// when it returns nil; an error means that they are not, and that m was told anyway.
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

// put writes m down. The caller holds mu.
func (j *journal) put(m *upgradeproto.UpgradeResponse, next int64) error {
	if j.broken && m.GetLog() != nil {
		return nil
	}
	if j.broken || j.size > maxJournal {
		// Also the way back after a disk that was full: everything that is kept, anew.
		h := j.head
		h.Stage = j.stage
		f, size, err := j.write(&journal{head: h, said: j.said, process: j.process, next: j.next})
		if err != nil {
			return j.unwritten(err)
		}
		j.replace(f, size)
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
	b = append(b, '\n')
	n, err := j.file.Write(b)
	j.size += int64(n)
	if err != nil {
		return err
	}
	if j.lines++; sync || j.lines >= unsynced {
		j.lines = 0
		return j.file.Sync()
	}
	return nil
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

// started writes down which process is about to become kubeadm.
func (j *journal) started(p kubeadm.Process) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.broken {
		return errors.New("write down which process it is: the journal cannot be written")
	}
	if err := j.append(entry{Process: &p}, true); err != nil {
		return j.unwritten(fmt.Errorf("write down which process it is: %w", err))
	}
	j.process, j.next = &p, 0
	return nil
}

// latest returns what the run was asked for, when, and whether it has ended; nil if
// there never was one.
func (j *journal) latest() (req *upgradeproto.UpgradeRequest, started time.Time, final bool) {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.request, j.head.Started, j.final
}

// current returns the stage that the run is in.
func (j *journal) current() string {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.stage
}

// kubeadm returns the latest process that was to become kubeadm, and where its output
// goes on.
func (j *journal) kubeadm() (*kubeadm.Process, int64) {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.process, j.next
}

// run describes the latest run; nil if there never was one.
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

// follow sends what comes after number after, until the last word of the run that
// began at started, or until ctx or stop end. A slow receiver delays nobody else.
func (j *journal) follow(ctx context.Context, stop <-chan struct{}, started time.Time, after uint64, send func(*upgradeproto.UpgradeResponse) error) error {
	for {
		j.mu.Lock()
		if !j.head.Started.Equal(started) { // the run ended and another began
			j.mu.Unlock()
			return errors.New("the run has ended, and another has begun")
		}
		i := len(j.said)
		for i > 0 && j.said[i-1].GetSeq() > after {
			i--
		}
		said, final, changed := append([]*upgradeproto.UpgradeResponse(nil), j.said[i:]...), j.final, j.changed
		j.mu.Unlock()
		for _, m := range said {
			if err := send(m); err != nil {
				return err
			}
			after = m.GetSeq()
		}
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

func (j *journal) close() {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.file != nil {
		j.file.Close()
	}
}

func syncDir(d *os.Root) error {
	f, err := d.Open(".")
	if err != nil {
		return err
	}
	defer f.Close()
	return f.Sync()
}
