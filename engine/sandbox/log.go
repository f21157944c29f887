package sandbox

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// logLimit limits a daemon's log, in bytes. One older file of that size is kept beside
// it. That is enough for months of a quiet sandbox, or a day of one error per second.
const logLimit = 8 << 20

// boundedLog is a handler that rotates the file behind its program's standard error
// at limit: the file becomes path + ".1", in place of an older one, and a new file
// replaces it under standard output and standard error. So a panic is also written
// to the current log.
//
// It does nothing if standard error is not the file at path: a daemon that is started by
// hand writes to a terminal.
type boundedLog struct {
	slog.Handler
	file *logFile // shared by the handlers that are derived from one
}

func newBoundedLog(h slog.Handler, path string, limit int64) slog.Handler {
	return boundedLog{h, &logFile{path: path, limit: limit, outputs: []int{unix.Stdout, unix.Stderr}}}
}

func (b boundedLog) Handle(ctx context.Context, r slog.Record) error {
	// An unbounded log is better than a lost record.
	rotated := b.file.rotate()
	err := b.Handler.Handle(ctx, r)
	if rotated != nil {
		return rotated
	}
	return err
}

func (b boundedLog) WithAttrs(as []slog.Attr) slog.Handler {
	return boundedLog{b.Handler.WithAttrs(as), b.file}
}

func (b boundedLog) WithGroup(name string) slog.Handler {
	return boundedLog{b.Handler.WithGroup(name), b.file}
}

// logFile is the file behind some descriptors of this process. It is safe for
// concurrent use.
type logFile struct {
	path    string
	limit   int64
	outputs []int // descriptors; the last one decides whether the file is behind them

	mu sync.Mutex
}

// rotate moves the file aside if it is large enough, and points the outputs to a new
// one. On an error the outputs keep the old file.
func (l *logFile) rotate() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	var now, there unix.Stat_t
	if err := unix.Fstat(l.outputs[len(l.outputs)-1], &now); err != nil || now.Size < l.limit {
		return nil //nolint:nilerr // without a standard error there is nothing to bound
	}
	if err := unix.Stat(l.path, &there); err != nil || there.Dev != now.Dev || there.Ino != now.Ino {
		return nil //nolint:nilerr // it is not the file that this is about
	}
	if err := os.Rename(l.path, l.path+".1"); err != nil {
		return fmt.Errorf("bound log: %w", err)
	}
	f, err := os.OpenFile(l.path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return fmt.Errorf("bound log: %w", err)
	}
	defer f.Close()
	for _, fd := range l.outputs {
		if err := unix.Dup2(int(f.Fd()), fd); err != nil {
			return fmt.Errorf("bound log: %w", err)
		}
	}
	return nil
}
