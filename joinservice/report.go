package joinservice

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unicode"
	"unicode/utf8"

	"golang.org/x/time/rate"

	"constellation/engine/atls"
	"constellation/engine/cloud"
	"constellation/joinservice/joinproto"
)

const (
	// Limits of a joining machine's report: maxText bytes per line, linesPerSecond with a burst
	// for kubeadm's start. Further lines are counted and dropped.
	maxText        = 1024
	maxWord        = 64
	linesPerSecond = 20
	lineBurst      = 400

	// lastStep is the step whose end is the end of the join.
	lastStep    = "kubeadm-join"
	stateDone   = "done"
	stateFailed = "failed"

	// finishTimeout bounds the cleanup after a join.
	finishTimeout = 10 * time.Second
)

// Report implements the contract of package joinproto. While it is open it renews the turn of
// a joining control plane.
func (s *Server) Report(stream joinproto.JoinService_ReportServer) error {
	ctx, cancel := context.WithCancel(stream.Context())
	defer cancel()
	st, ok := atls.PeerStatement(ctx)
	if !ok {
		return answer(errNoEvidence)
	}
	id := st.Identity
	log := s.log.With("node", id.Name)
	r, end := s.reporters.open(id.Name, cancel)
	if r == nil {
		return answer(errStopping)
	}
	defer end()
	if id.Role == cloud.ControlPlane {
		var wg sync.WaitGroup
		wg.Go(func() { s.keepTurn(ctx, log, id.Name, r) })
		defer wg.Wait()
		defer cancel()
	}
	// Recv ends only with the stream's context.
	type received struct {
		m   *joinproto.ReportRequest
		err error
	}
	lines := make(chan received)
	go func() {
		for {
			m, err := stream.Recv()
			select {
			case lines <- received{m, err}:
			case <-ctx.Done():
				return
			}
			if err != nil {
				return
			}
		}
	}()
	for {
		select {
		case <-ctx.Done():
			return answer(errStopping)
		case in := <-lines:
			if errors.Is(in.err, io.EOF) {
				return stream.SendAndClose(&joinproto.ReportResponse{})
			}
			if in.err != nil {
				log.Info("node stopped reporting", "err", in.err)
				return in.err
			}
			r.line(ctx, log, in.m)
			if in.m.GetState() == stateFailed || in.m.GetStep() == lastStep && in.m.GetState() == stateDone {
				s.finish(ctx, log, id.Name, id.Role, in.m.GetState() == stateDone)
			}
		}
	}
}

// keepTurn renews the turn of a control plane until ctx ends or the turn is lost, while r
// receives lines.
func (s *Server) keepTurn(ctx context.Context, log *slog.Logger, node string, r *reporter) {
	tick := time.NewTicker(turnRenewal)
	defer tick.Stop()
	silent := false
	for {
		if d := r.silence(time.Now()); d >= turnSilence {
			if !silent {
				log.Warn("control-plane turn not renewed", "err", fmt.Errorf("no new line in its report for %s", d.Round(time.Second)))
			}
			silent = true
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			continue
		}
		silent = false
		try, cancel := context.WithTimeout(ctx, turnGap)
		err := s.turn.renew(try, node)
		cancel()
		switch {
		case ctx.Err() != nil:
			return
		case errors.Is(err, errTurnLost):
			log.Info("control-plane turn not kept", "err", err)
			return
		case err != nil:
			log.Warn("control-plane turn not renewed", "err", err)
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// finish revokes the ticket's token and turn. A machine whose join failed keeps its token for
// a retry.
func (s *Server) finish(ctx context.Context, log *slog.Logger, node string, role cloud.Role, done bool) {
	// The machine may disconnect right after its last message.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), finishTimeout)
	defer cancel()
	if role == cloud.ControlPlane {
		if err := s.turn.release(ctx, node); err != nil {
			log.Warn("control-plane turn not released", "err", err)
		}
	}
	if !done {
		return
	}
	if err := s.kube.deleteToken(ctx, node); err != nil {
		log.Warn("bootstrap token not deleted", "err", err)
	}
}

// reporters has the machines with open reports, by name. The zero value is ready to use.
type reporters struct {
	mu     sync.Mutex
	byName map[string]*reporter
	closed bool
}

// reporter limits the reports of one machine over all its connections.
type reporter struct {
	limit   *rate.Limiter
	dropped atomic.Int64
	heard   atomic.Int64 // time of the last line, in nanoseconds since 1970
	// open streams with their cancel functions. Guarded by reporters.mu.
	streams map[int]context.CancelFunc
	next    int
}

// open registers a stream of the machine, which stop cancels; end removes it. It returns nil
// while the service is stopping.
func (r *reporters) open(name string, stop context.CancelFunc) (one *reporter, end func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return nil, nil
	}
	if r.byName == nil {
		r.byName = map[string]*reporter{}
	}
	one = r.byName[name]
	if one == nil {
		one = &reporter{limit: rate.NewLimiter(linesPerSecond, lineBurst), streams: map[int]context.CancelFunc{}}
		one.heard.Store(time.Now().UnixNano())
		r.byName[name] = one
	}
	n := one.next
	one.next++
	one.streams[n] = stop
	return one, func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		if delete(one.streams, n); len(one.streams) == 0 {
			delete(r.byName, name)
		}
	}
}

// close cancels all streams and accepts no more.
func (r *reporters) close() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.closed = true
	for _, one := range r.byName {
		for _, stop := range one.streams {
			stop()
		}
	}
}

// silence returns the time since the machine's last line.
func (r *reporter) silence(now time.Time) time.Duration {
	return now.Sub(time.Unix(0, r.heard.Load()))
}

// line logs one line for m.
func (r *reporter) line(ctx context.Context, log *slog.Logger, m *joinproto.ReportRequest) {
	r.heard.Store(time.Now().UnixNano())
	if !r.limit.Allow() {
		r.dropped.Add(1)
		return
	}
	attrs := []slog.Attr{
		slog.String("step", printable(m.GetStep(), maxWord)),
		slog.String("state", printable(m.GetState(), maxWord)),
		slog.String("text", printable(m.GetText(), maxText)),
	}
	if t := m.GetTime(); t.IsValid() {
		attrs = append(attrs, slog.Time("at", t.AsTime()))
	}
	if n := r.dropped.Swap(0); n > 0 {
		attrs = append(attrs, slog.Int64("unlogged", n))
	}
	log.LogAttrs(ctx, levelOf(m.GetLevel()), "node reported", attrs...)
}

func levelOf(s string) slog.Level {
	switch s {
	case "debug":
		return slog.LevelDebug
	case "warn":
		return slog.LevelWarn
	case "error":
		return slog.LevelError
	}
	return slog.LevelInfo
}

// printable returns s with control characters and other misleading characters escaped, cut to
// about limit bytes.
func printable(s string, limit int) string {
	var b strings.Builder
	for i := 0; i < len(s); {
		if b.Len() >= limit {
			fmt.Fprintf(&b, "… (%d bytes more)", len(s)-i)
			break
		}
		r, size := utf8.DecodeRuneInString(s[i:])
		switch {
		case r == utf8.RuneError && size == 1:
			fmt.Fprintf(&b, `\x%02x`, s[i])
		case r == '\t':
			b.WriteByte(' ')
		case unicode.IsPrint(r):
			b.WriteRune(r)
		default:
			fmt.Fprintf(&b, `\u%04x`, r)
		}
		i += size
	}
	return b.String()
}

// quiet passes a few events per second and counts the others.
type quiet struct {
	mu      sync.Mutex
	window  time.Time
	n       int
	dropped int64
}

const quietPerSecond = 5

// next reports whether the event may be logged, and how many were dropped since the last one.
func (q *quiet) next(now time.Time) (dropped int64, ok bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if now.Sub(q.window) >= time.Second {
		q.window, q.n = now, 0
	}
	if q.n++; q.n > quietPerSecond {
		q.dropped++
		return 0, false
	}
	dropped, q.dropped = q.dropped, 0
	return dropped, true
}
