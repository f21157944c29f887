// Package liblog filters the log messages of libraries, so that a program's log shows mostly its own
// messages.
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

// again is the minimum interval between two warnings that the API server does not answer.
const again = 30 * time.Second

// Handler returns a handler for the loggers of controller-runtime and client-go, which writes to h.
// It lowers their info messages to debug level. It also lowers errors that only mean that the
// API server does not answer, except for one warning in 30 s: dozens of watches report the same
// error while an API server restarts. All other records stay unchanged.
func Handler(h slog.Handler) slog.Handler {
	return &handler{Handler: h, said: &said{now: time.Now}}
}

type handler struct {
	slog.Handler
	said *said // shared with handlers derived by With
}

// said is the time of the last warning that the API server does not answer.
type said struct {
	now func() time.Time

	mu   sync.Mutex
	last time.Time
}

// due reports whether a warning is due, and records its time.
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
			w := slog.NewRecord(r.Time, slog.LevelWarn, "API server not reachable, will retry", r.PC)
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

// errorOf returns the error of a record.
func errorOf(r slog.Record) (err error) {
	r.Attrs(func(a slog.Attr) bool {
		if e, ok := a.Value.Any().(error); ok {
			err = e
		}
		return err == nil
	})
	return err
}

// away reports whether err means that the API server is unreachable or unavailable. Other errors of
// an API server, and certificate errors, do not count.
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
