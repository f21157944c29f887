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
	// reportBuffer is how many lines wait while the join service does not accept them; more are
	// dropped. All lines are in this machine's journal as well.
	reportBuffer = 512
	// reportFlush is how long the final messages may take.
	reportFlush = 5 * time.Second
	// reportOpen bounds the time to open a stream to one join service, and reportPause the pauses
	// before the next one is tried. A control plane without a report for 15 s loses the turn.
	reportOpen  = 5 * time.Second
	reportPause = 2 * time.Second
)

// report sends the progress of the join to the join service while the join lasts. A broken
// stream is reopened at once, even without a line to send, because an open stream renews the
// turn. It never fails and never delays the join: lines that cannot be sent
// are dropped.
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

// newReport starts a report to first, or, if that is nil, to one that dial finds.
func newReport(ctx context.Context, first *serviceConn, dial func(context.Context) ([]*serviceConn, error), wait func(context.Context, *pause) error, log *slog.Logger) *report {
	r := &report{log: log, lines: make(chan *joinproto.ReportRequest, reportBuffer), sent: make(chan struct{}), dial: dial, wait: wait}
	// The final messages are sent even if ctx has ended.
	ctx, r.stop = context.WithCancel(context.WithoutCancel(ctx))
	go func() {
		defer close(r.sent)
		r.send(ctx, first)
	}()
	return r
}

// send reports to one join service after another until one has accepted the final message, or
// ctx ends.
func (r *report) send(ctx context.Context, first *serviceConn) {
	var p pause
	var told string
	var last *joinproto.ReportRequest // result of the join, once it ended
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
				r.log.Info("join report resumed")
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
			err = errors.New("the cloud lists no control plane")
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
		// A stream that was open for long is replaced at once: another replica answers, if there is
		// one.
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

// stream sends lines until there are no more, and returns nil once the join service has
// confirmed them. The end of the join is returned, and sent first on the next stream, since
// its delivery is unknown.
func (r *report) stream(s reportStream, last *joinproto.ReportRequest) (*joinproto.ReportRequest, error) {
	// The join service answers once, at the end. Waiting for that from the start detects a lost
	// connection while there is nothing to send. So does a line that cannot be sent.
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

// say reports one line. It is not safe for concurrent use: kubeadm's lines come while the join
// waits for it.
func (r *report) say(step, state string, level slog.Level, text string) {
	r.log.Log(context.Background(), level, "join progressed", "step", step, "state", state, "text", text)
	select {
	case r.lines <- &joinproto.ReportRequest{Time: timestamppb.Now(), Step: step, State: state, Level: levelName(level), Text: text}:
	default:
	}
}

// close sends the remaining lines, for a few seconds at most.
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
