package sandbox

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// logLimit bounds a daemon's log, in bytes; one older file of that size is kept beside
// it. Months of a quiet sandbox fit, and a day of one that complains every second.
const logLimit = 8 << 20

// boundedLog is a handler that keeps the file behind its program's standard error
// small: when it has grown to limit it becomes path + ".1", in place of an older one,
// and a new file takes its place under standard output and standard error. So a
// panic, too, is written where people look.
//
// Whatever the program's standard error is, if it is not the file at path nothing is
// done about it: a daemon that is started by hand writes to a terminal.
type boundedLog struct {
	slog.Handler
	file *logFile // shared by the handlers that are derived from one
}

func newBoundedLog(h slog.Handler, path string, limit int64) slog.Handler {
	return boundedLog{h, &logFile{path: path, limit: limit, outputs: []int{unix.Stdout, unix.Stderr}}}
}

func (b boundedLog) Handle(ctx context.Context, r slog.Record) error {
	// Losing the bound is better than losing the record.
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

// logFile is the file that some descriptors of this process write to. It may be used
// concurrently.
type logFile struct {
	path    string
	limit   int64
	outputs []int // descriptors; the last one decides whether the file is behind them

	mu sync.Mutex
}

// rotate puts the file aside if it is large enough, and has the outputs begin a new
// one. On an error the outputs write on to the file that they had.
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
