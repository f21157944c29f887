package sshhost

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"syscall"

	"golang.org/x/crypto/ssh"

	"constellation/engine/plain"
	"constellation/engine/plan"
)

// Causes of errors. Each error of this package that wraps one of them also has a remedy.
var (
	// ErrUnknownHost and ErrChangedHostKey are also a [HostKeyError], which has the fingerprints.
	ErrUnknownHost    = errors.New("the host key is in no known_hosts file")
	ErrChangedHostKey = errors.New("the host key is not the known one")
	ErrRevokedHostKey = errors.New("the host key is revoked")
	// ErrLogin: the machine accepted no key.
	ErrLogin = errors.New("the machine accepted no key")
	// ErrPassphrase: a key is encrypted, and its passphrase is missing or wrong.
	ErrPassphrase = errors.New("the key is encrypted")
	// ErrUnreachable: no connection was made. ErrSilent: the machine did not answer in time.
	// ErrLost: the connection ended early.
	ErrUnreachable = errors.New("the machine is not reachable")
	ErrSilent      = errors.New("the machine did not answer in time")
	ErrLost        = errors.New("the connection was lost")
	// ErrNotRoot: a command needs root, the user is not root, and the target does not allow sudo.
	ErrNotRoot = errors.New("the user is not root")
	// ErrSudoPassword: sudo needs a password that is missing or wrong. ErrSudoRefused: sudo does not
	// permit the user to run commands, or it is not installed.
	ErrSudoPassword = errors.New("sudo needs a password")
	ErrSudoRefused  = errors.New("sudo refused")
	// ErrTooMuch: a command printed more than its limit.
	ErrTooMuch = errors.New("too much output")
)

// maxText is the maximum length of text of a machine in an error.
const maxText = 300

// Text returns text of a machine as one line that is safe to show: characters that are not visible
// become spaces or ?, and long text is cut.
func Text(b []byte) string { return text(b, maxText) }

func text(b []byte, limit int) string {
	if len(b) > 16*limit {
		b = b[:16*limit]
	}
	var out strings.Builder
	var shown plain.Filter
	n := 0
	for _, r := range strings.Join(strings.Fields(string(b)), " ") {
		if n++; n > limit {
			out.WriteString("...")
			break
		}
		if r == '\ufffd' || !shown.Shows(r) {
			r = '?'
		}
		out.WriteRune(r)
	}
	return out.String()
}

// lost reports whether err means that a connection ended early.
func lost(err error) bool {
	var missing *ssh.ExitMissingError
	return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, net.ErrClosed) || errors.Is(err, io.ErrClosedPipe) ||
		errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE) || errors.As(err, &missing)
}

// connectError explains why no connection to t was made.
func connectError(ctx context.Context, t Target, limit fmt.Stringer, err error) error {
	op := "connect to " + t.Address()
	var dns *net.DNSError
	var open *ssh.OpenChannelError
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, os.ErrDeadlineExceeded), errors.Is(err, syscall.ETIMEDOUT):
		return &plan.Error{Op: op, Err: fmt.Errorf("%w: no connection within %s", ErrSilent, limit), Remedy: "check that the machine runs, and that no firewall drops connections to this port"}
	case errors.As(err, &dns):
		return &plan.Error{Op: op, Err: fmt.Errorf("%w: the name does not resolve", ErrUnreachable), Remedy: "correct the name, or use the machine's address"}
	case errors.Is(err, syscall.ECONNREFUSED):
		return &plan.Error{Op: op, Err: fmt.Errorf("%w: connection refused", ErrUnreachable), Remedy: "start the SSH server of the machine (`systemctl start ssh`), or name its port as USER@HOST:PORT"}
	case errors.As(err, &open):
		return &plan.Error{Op: op, Err: fmt.Errorf("%w: the jump host did not forward the connection: %s", ErrUnreachable, Text([]byte(open.Message))), Remedy: "check the address, and AllowTcpForwarding in the jump host's sshd_config"}
	case lost(err):
		return lostError(op)
	}
	return &plan.Error{Op: op, Err: fmt.Errorf("%w: %s", ErrUnreachable, Text([]byte(err.Error()))), Remedy: "check the address and the route to the machine"}
}

func lostError(op string) error {
	return &plan.Error{Op: op, Err: ErrLost, Remedy: "run the command again; if it repeats, read the machine's log: `journalctl -u ssh`"}
}
