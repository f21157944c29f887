// Package liblog lets what libraries log into the log of a program whose readers want to
// know about their nodes.
package liblog

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"syscall"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	utilnet "k8s.io/apimachinery/pkg/util/net"
)

// again is how often it is said that the API server does not answer.
const again = 30 * time.Second

// Handler returns a handler for the loggers of controller-runtime and client-go, which
// passes on to h: their news of themselves as debug lines; errors that say no more than
// that the API server does not answer as debug lines, too, after one warning in 30 s, since
// each of dozens of watches tells its own of them while an API server restarts; all else as
// it is.
func Handler(h slog.Handler) slog.Handler {
	return &handler{Handler: h, said: &said{now: time.Now}}
}

type handler struct {
	slog.Handler
	said *said // shared with those that With made of it
}

// said is when it was said last that the API server does not answer.
type said struct {
	now func() time.Time

	mu   sync.Mutex
	last time.Time
}

// due reports whether it is time to say it, and notes that it was.
func (s *said) due() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.now()
	if !s.last.IsZero() && now.Sub(s.last) < again {
		return false
	}
	s.last = now
	return true
}

func (h *handler) Enabled(ctx context.Context, l slog.Level) bool {
	if l == slog.LevelInfo {
		l = slog.LevelDebug
	}
	return h.Handler.Enabled(ctx, l)
}

func (h *handler) Handle(ctx context.Context, r slog.Record) error {
	switch {
	case r.Level == slog.LevelInfo:
		r.Level = slog.LevelDebug
	case r.Level >= slog.LevelWarn:
		err := errorOf(r)
		if !away(err) {
			break
		}
		if h.Handler.Enabled(ctx, slog.LevelWarn) && h.said.due() {
			w := slog.NewRecord(r.Time, slog.LevelWarn, "the API server does not answer; it is asked again", r.PC)
			w.AddAttrs(slog.Any("err", err))
			return h.Handler.Handle(ctx, w)
		}
		r.Level = slog.LevelDebug
	}
	if !h.Handler.Enabled(ctx, r.Level) {
		return nil
	}
	return h.Handler.Handle(ctx, r)
}

func (h *handler) WithAttrs(a []slog.Attr) slog.Handler {
	return &handler{Handler: h.Handler.WithAttrs(a), said: h.said}
}

func (h *handler) WithGroup(name string) slog.Handler {
	return &handler{Handler: h.Handler.WithGroup(name), said: h.said}
}

// errorOf returns the error that a record is about.
func errorOf(r slog.Record) (err error) {
	r.Attrs(func(a slog.Attr) bool {
		if e, ok := a.Value.Any().(error); ok {
			err = e
		}
		return err == nil
	})
	return err
}

// away reports whether err says that nobody answers, or not now. What an API server says
// about a request, and what is wrong with its certificate, is something else.
func away(err error) bool {
	var timeout interface{ Timeout() bool }
	switch {
	case err == nil:
		return false
	case utilnet.IsConnectionRefused(err), utilnet.IsConnectionReset(err), utilnet.IsProbableEOF(err), utilnet.IsHTTP2ConnectionLost(err),
		errors.Is(err, syscall.EHOSTUNREACH), errors.Is(err, syscall.ENETUNREACH), errors.Is(err, syscall.EPIPE), errors.Is(err, context.DeadlineExceeded):
		return true
	case apierrors.IsServiceUnavailable(err), apierrors.IsTooManyRequests(err), apierrors.IsTimeout(err), apierrors.IsServerTimeout(err):
		return true
	}
	return errors.As(err, &timeout) && timeout.Timeout()
}
