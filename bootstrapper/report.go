package bootstrapper

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/timestamppb"

	"constellation/joinservice/joinproto"
)

const (
	// reportBuffer is how many lines wait while the join service does not take them;
	// more are dropped. What is said is also in this machine's journal.
	reportBuffer = 512
	// reportFlush is how long the last words may take.
	reportFlush = 5 * time.Second
	// reportOpen bounds how long one join service may take until it listens, and
	// reportPause the pauses until the next ones are asked. A control plane that is not
	// heard for 15 s loses its turn.
	reportOpen  = 5 * time.Second
	reportPause = 2 * time.Second
)

// report tells the join service how the join goes, for as long as the join lasts: a
// stream that breaks is opened anew at once, whether or not there is something to say,
// because the join service keeps a control plane's turn for as long as one is open. It
// never fails and never makes the join wait: what cannot be sent is dropped.
type report struct {
	log   *slog.Logger
	lines chan *joinproto.ReportRequest
	sent  chan struct{} // closed when everything was sent or given up
	stop  context.CancelFunc
	once  sync.Once

	// dial returns the join services that may listen, best first, not connected yet.
	dial func(context.Context) ([]*serviceConn, error)
	wait func(context.Context, *pause) error
}

// newReport begins a report to first, or, if that is nil, to one that dial finds.
func newReport(ctx context.Context, first *serviceConn, dial func(context.Context) ([]*serviceConn, error), wait func(context.Context, *pause) error, log *slog.Logger) *report {
	r := &report{log: log, lines: make(chan *joinproto.ReportRequest, reportBuffer), sent: make(chan struct{}), dial: dial, wait: wait}
	// The last words are said when ctx may have ended already.
	ctx, r.stop = context.WithCancel(context.WithoutCancel(ctx))
	go func() {
		defer close(r.sent)
		r.send(ctx, first)
	}()
	return r
}

// send reports to one join service after the other until one has taken the last word,
// or ctx ends.
func (r *report) send(ctx context.Context, first *serviceConn) {
	var p pause
	var told string
	var last *joinproto.ReportRequest // how the join ended, once it did
	next := []*serviceConn{first}
	if first == nil {
		next = nil
	}
	for {
		var err error
		if next == nil {
			next, err = r.dial(ctx)
		}
		var lived time.Duration
		for _, conn := range next {
			var s reportStream
			if s, err = openReport(ctx, conn); err != nil {
				continue
			}
			if told != "" {
				r.log.Info("join reported again")
				told = ""
			}
			start := time.Now()
			if last, err = r.stream(s, last); err == nil {
				closeAll(next)
				return
			}
			lived = time.Since(start)
			break
		}
		if err == nil {
			err = errors.New("the cloud knows no control plane")
		}
		closeAll(next)
		next = nil
		if ctx.Err() != nil {
			return
		}
		if why := err.Error(); why != told {
			r.log.Warn("join not reported", "err", err)
			told = why
		}
		// What was long there is asked for at once: another replica answers, if there is one.
		if lived >= reportPause {
			p = pause{}
			continue
		}
		if r.wait(ctx, &p) != nil {
			return
		}
	}
}

func closeAll(conns []*serviceConn) {
	for _, c := range conns {
		c.Close()
	}
}

type reportStream = grpc.ClientStreamingClient[joinproto.ReportRequest, joinproto.ReportResponse]

// openReport opens a stream, for which it connects.
func openReport(ctx context.Context, conn *serviceConn) (reportStream, error) {
	ctx, cancel := context.WithCancel(ctx) // as long as the stream
	late := time.AfterFunc(reportOpen, cancel)
	s, err := joinproto.NewJoinServiceClient(conn).Report(ctx)
	if !late.Stop() && err == nil {
		err = context.DeadlineExceeded
	}
	if err != nil {
		cancel()
		return nil, conn.why(err)
	}
	return s, nil
}

// stream sends lines until there are no more, and returns nil once the join service
// has confirmed that it took them. The end of the join is returned, and said first on
// the next stream: whether it arrived is not known.
func (r *report) stream(s reportStream, last *joinproto.ReportRequest) (*joinproto.ReportRequest, error) {
	// The join service answers once, at the end. Waiting for that from the beginning
	// notices that it is gone while there is nothing to say. So does a line that cannot
	// be sent.
	ended := make(chan error, 1)
	go func() { ended <- s.RecvMsg(&joinproto.ReportResponse{}) }()
	if last != nil {
		_ = s.Send(last)
	}
	for {
		select {
		case err := <-ended:
			if err == nil {
				err = errors.New("the join service ended the report")
			}
			return last, err
		case m, more := <-r.lines:
			if !more {
				_ = s.CloseSend() // it never fails
				return last, <-ended
			}
			if m.GetState() == stateFailed || m.GetStep() == stepJoin && m.GetState() == stateDone {
				last = m
			}
			_ = s.Send(m)
		}
	}
}

// say reports one line. It is not safe for concurrent use: the lines of kubeadm come
// while the join waits for it.
func (r *report) say(step, state string, level slog.Level, text string) {
	r.log.Log(context.Background(), level, "join progressed", "step", step, "state", state, "text", text)
	select {
	case r.lines <- &joinproto.ReportRequest{Time: timestamppb.Now(), Step: step, State: state, Level: levelName(level), Text: text}:
	default:
	}
}

// close sends what is left, for a few seconds at most.
func (r *report) close() {
	r.once.Do(func() {
		close(r.lines)
		t := time.NewTimer(reportFlush)
		defer t.Stop()
		select {
		case <-r.sent:
		case <-t.C:
		}
		r.stop()
		<-r.sent
	})
}
