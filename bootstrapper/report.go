package bootstrapper

import (
	"context"
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
)

// report tells the join service how the join goes. It never fails and never makes the
// join wait: what cannot be sent is dropped.
type report struct {
	log   *slog.Logger
	lines chan *joinproto.ReportRequest
	sent  chan struct{} // closed when everything was sent or given up
	stop  context.CancelFunc
	once  sync.Once
}

// newReport begins a report on conn; nil means that there is nobody to tell.
func newReport(ctx context.Context, conn *grpc.ClientConn, log *slog.Logger) *report {
	r := &report{log: log, lines: make(chan *joinproto.ReportRequest, reportBuffer), sent: make(chan struct{})}
	// The last words are said when ctx may have ended already.
	ctx, r.stop = context.WithCancel(context.WithoutCancel(ctx))
	go func() {
		defer close(r.sent)
		if conn == nil {
			for range r.lines {
			}
			return
		}
		r.send(ctx, conn)
	}()
	return r
}

func (r *report) send(ctx context.Context, conn *grpc.ClientConn) {
	stream, err := joinproto.NewJoinServiceClient(conn).Report(ctx)
	if err != nil {
		r.log.Warn("join not reported", "err", err)
	}
	for m := range r.lines {
		if err == nil {
			if err = stream.Send(m); err != nil {
				r.log.Warn("join no longer reported", "err", err)
			}
		}
	}
	if err == nil {
		if _, err := stream.CloseAndRecv(); err != nil {
			r.log.Warn("end of the join not acknowledged", "err", err)
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
