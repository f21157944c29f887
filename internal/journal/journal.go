// Package journal stores the messages of a long operation on a node, one per line of a file, and sends
// them to followers. The messages survive a crash of their writer: the next process reads them and
// appends to the file.
//
// It does not know what a line means. The bootstrapper stores the messages of an init, the agent those
// of an upgrade.
package journal

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
)

// File is a file to which lines are appended. It is not safe for concurrent use.
type File struct {
	f    *os.File
	size int64 // in bytes, of the valid lines
	last int64 // in bytes, of the last line
}

// Open opens a file in dir, with flags such as os.O_CREATE, and calls keep with each line, including
// its line break. The file ends at the first line that keep refuses, that has more than limit bytes, or
// that a crash cut off. Call Repair before Append.
func Open(dir *os.Root, name string, flags, limit int, keep func(line []byte) bool) (*File, error) {
	f, err := dir.OpenFile(name, os.O_RDWR|flags, 0o600)
	if err != nil {
		return nil, err
	}
	j := &File{f: f}
	for br := bufio.NewReaderSize(f, 64<<10); ; {
		line, err := readLine(br, limit)
		if err != nil || !keep(line) {
			return j, nil // the rest cannot be read, and is not needed
		}
		j.last = int64(len(line))
		j.size += j.last
	}
}

// readLine reads one line with its line break. It stops once it has read more than limit bytes.
func readLine(br *bufio.Reader, limit int) ([]byte, error) {
	var line []byte
	for {
		part, err := br.ReadSlice('\n')
		line = append(line, part...)
		if !errors.Is(err, bufio.ErrBufferFull) {
			return line, err
		}
		if len(line) > limit {
			return nil, bufio.ErrTooLong
		}
	}
}

// Replace creates or replaces a file in dir with content, whose lines are complete. It returns when
// that is on disk. After an error, the former file is unchanged.
func Replace(dir *os.Root, name string, content []byte) (*File, error) {
	tmp := name + ".new"
	f, err := dir.OpenFile(tmp, os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return nil, err
	}
	_, err = f.Write(content)
	if err == nil {
		err = f.Sync()
	}
	if err == nil {
		err = dir.Rename(tmp, name)
	}
	if err == nil {
		err = SyncDir(dir)
	}
	if err != nil {
		f.Close()
		_ = dir.Remove(tmp) // the present error is more specific
		return nil, err
	}
	return &File{f: f, size: int64(len(content))}, nil
}

// Size returns the size of the valid lines in bytes.
func (j *File) Size() int64 { return j.size }

// Repair removes everything after the last valid line.
func (j *File) Repair() error {
	if err := j.f.Truncate(j.size); err != nil {
		return err
	}
	_, err := j.f.Seek(j.size, io.SeekStart)
	return err
}

// Append appends a line, which has no line break. With sync it returns when all lines are on disk.
func (j *File) Append(line []byte, sync bool) error {
	line = append(line, '\n')
	n, err := j.f.Write(line)
	j.size, j.last = j.size+int64(n), int64(len(line))
	if err == nil && sync {
		err = j.f.Sync()
	}
	return err
}

// DropLast removes the line that was read or appended last. It returns when that is on disk. Another
// call needs an Append in between.
func (j *File) DropLast() error {
	if j.last == 0 {
		return fmt.Errorf("drop last line: %w", os.ErrInvalid)
	}
	j.size, j.last = j.size-j.last, 0
	if err := j.Repair(); err != nil {
		return err
	}
	return j.f.Sync()
}

// Close closes the file.
func (j *File) Close() error { return j.f.Close() }

// SyncDir makes earlier creations, renames and removals in a directory durable.
func SyncDir(dir *os.Root) error {
	f, err := dir.Open(".")
	if err != nil {
		return err
	}
	defer f.Close()
	return f.Sync()
}

// Batch has the messages that a follower has not received yet.
type Batch[M any] struct {
	Messages []M
	Final    bool            // no message follows
	Changed  <-chan struct{} // closed when there are more messages
}

// Follow sends the messages that next returns until the final one, until next or send fail, or until ctx
// or stop end. After stop it returns stopped. A slow receiver delays no other.
func Follow[M any](ctx context.Context, stop <-chan struct{}, stopped error, next func() (Batch[M], error), send func(M) error) error {
	for {
		b, err := next()
		if err != nil {
			return err
		}
		for _, m := range b.Messages {
			if err := send(m); err != nil {
				return err
			}
		}
		if b.Final {
			return nil
		}
		select {
		case <-b.Changed:
		case <-ctx.Done():
			return ctx.Err()
		case <-stop:
			return stopped
		}
	}
}
