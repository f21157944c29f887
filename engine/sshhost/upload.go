package sshhost

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path"
	"strconv"
	"strings"

	"github.com/pkg/sftp"

	"constellation/engine/plan"
)

// Scripts of an upload. The first one holds a private folder until its stdin ends, also by a lost
// connection. The second one, as root, copies the file beside its target, verifies the copy, and
// renames it.
const (
	holdScript = `umask 077
d=$(mktemp -d /var/tmp/constellation-upload.XXXXXX) || exit 1
trap 'rm -rf -- "$d"' EXIT
trap 'exit 1' HUP INT TERM
printf '\n%s %s\n' "$0" "$d"
cat >/dev/null`
	PlaceScript = `set -eu
umask 077
from=$1 to=$2 mode=$3 want=$4
t=$(mktemp "${to%/*}/.constellation-upload.XXXXXX")
trap 'rm -f -- "$t"' EXIT
trap 'exit 1' HUP INT TERM
cat -- "$from" >"$t"
sum=$(sha256sum <"$t")
[ "${sum%% *}" = "$want" ] || { echo 'the digest of the copy differs' >&2; exit 97; }
chown 0:0 "$t"
chmod "$mode" "$t"
sync "$t"
mv -fT -- "$t" "$to"`
)

// Upload writes size bytes of r to a file of the machine, as root, with owner root. The folder must
// exist. The bytes go to a private temporary file first. Their digest is compared on the machine
// before the file replaces its target in one step. So a lost connection leaves the target as it was.
func (h *Host) Upload(ctx context.Context, file string, mode fs.FileMode, size int64, r io.Reader) error {
	op := "upload " + file + " to " + h.target.String()
	if !path.IsAbs(file) || path.Clean(file) != file || file == "/" || strings.ContainsRune(file, 0) {
		return fmt.Errorf("upload %q: want an absolute path of a file", file)
	}
	if mode&^fs.ModePerm != 0 {
		return fmt.Errorf("upload %s: mode %s has more than permissions", file, mode)
	}
	dir, release, err := h.holdFolder(ctx, op)
	if err != nil {
		return err
	}
	defer release()
	sum, err := h.send(ctx, op, path.Join(dir, "file"), size, r)
	if err != nil {
		return err
	}
	res, err := h.Run(ctx, Command{Root: true, Argv: []string{"sh", "-c", PlaceScript, "sh", path.Join(dir, "file"), file, strconv.FormatUint(uint64(mode), 8), sum}})
	if err != nil {
		return err
	}
	if err := res.Err(); err != nil {
		return &plan.Error{Op: op, Err: err, Remedy: "check the folder " + path.Dir(file) + " and the free space on the machine, then run the command again"}
	}
	return nil
}

// holdFolder makes a private temporary folder, which the machine deletes when release is called or the
// connection ends.
func (h *Host) holdFolder(ctx context.Context, op string) (dir string, release func(), err error) {
	const mark = "constellation-folder"
	line, err := commandLine([]string{"sh", "-c", holdScript, mark})
	if err != nil {
		return "", nil, err
	}
	var out, errs []byte
	found := make(chan string, 1)
	s, err := h.start(op, line, 64<<10, nil, func(p []byte) {
		out = append(out, p...)
		if _, rest, ok := strings.Cut(string(out), "\n"+mark+" "); ok {
			if name, _, ok := strings.Cut(rest, "\n"); ok {
				select {
				case found <- name:
				default:
				}
			}
		}
	}, func(p []byte) { errs = append(errs, p...) })
	if err != nil {
		return "", nil, err
	}
	ended := make(chan struct{})
	var r Result
	var failed error
	go func() {
		failed = s.wait(ctx, &r)
		close(ended)
	}()
	select {
	case dir = <-found:
		if !path.IsAbs(dir) || Text([]byte(dir)) != dir {
			s.stop(errors.New("no folder"))
			return "", nil, &plan.Error{Op: op, Err: fmt.Errorf("the machine named the temporary folder %q", Text([]byte(dir))), Remedy: "check mktemp on the machine"}
		}
		return dir, func() {
			_ = s.input.Close()
			<-ended
		}, nil
	case <-ended:
		if failed == nil {
			failed = &plan.Error{Op: op, Err: errors.New("no temporary folder was made: " + Text(errs)), Remedy: "check the free space of /var/tmp on the machine"}
		}
		return "", nil, failed
	}
}

// send writes a file by SFTP and returns the digest of what was sent.
func (h *Host) send(ctx context.Context, op, name string, size int64, r io.Reader) (string, error) {
	client, err := sftp.NewClient(h.client(), sftp.UseConcurrentWrites(true))
	if err != nil {
		if lost(err) || h.silent.Load() {
			if _, _, alive := h.client().SendRequest("keepalive@openssh.com", true, nil); alive != nil {
				return "", h.ended(op, err)
			}
		}
		return "", &plan.Error{Op: op, Err: errors.New("the machine serves no SFTP"), Remedy: "install openssh-sftp-server, and enable `Subsystem sftp` in its sshd_config"}
	}
	defer client.Close()
	stop := context.AfterFunc(ctx, func() { _ = client.Close() })
	defer stop()
	f, err := client.Create(name)
	if err == nil {
		sum := sha256.New()
		in := &exact{r: io.TeeReader(r, sum), left: size}
		_, err = f.ReadFromWithConcurrency(in, 64)
		if closeErr := f.Close(); err == nil {
			err = closeErr
		}
		if err == nil && in.err == nil {
			return hex.EncodeToString(sum.Sum(nil)), nil
		}
		if in.err != nil {
			return "", fmt.Errorf("%s: %w", op, in.err)
		}
	}
	var status *sftp.StatusError
	switch {
	case ctx.Err() != nil:
		return "", context.Cause(ctx)
	case errors.As(err, &status):
		return "", &plan.Error{Op: op, Err: errors.New("write the temporary file: " + Text([]byte(err.Error()))), Remedy: "check the free space of /var/tmp on the machine"}
	case errors.Is(err, sftp.ErrSSHFxConnectionLost):
		return "", h.ended(op, io.EOF)
	}
	return "", h.ended(op, err)
}

// exact reads exactly left bytes. More or fewer are an error.
type exact struct {
	r    io.Reader
	left int64
	err  error // of the source
}

func (e *exact) Read(p []byte) (int, error) {
	n, err := e.r.Read(p)
	e.left -= int64(n)
	switch {
	case e.left < 0:
		e.err = errors.New("the content is longer than its size")
	case errors.Is(err, io.EOF) && e.left > 0:
		e.err = io.ErrUnexpectedEOF
	case err != nil && !errors.Is(err, io.EOF):
		e.err = err
	}
	if e.err != nil {
		return n, e.err
	}
	return n, err
}
