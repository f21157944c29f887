// Package sshhost answers: how is a machine reached by SSH?
//
// [Dial] logs in to a machine, through jump hosts if there are any. [Host.Run] runs a command there,
// as root if asked, and [Host.Upload] writes a file. Nothing is installed on the machine.
//
// Host keys are strict. A machine whose key is in no known_hosts file and a machine whose key has
// changed are two errors, [ErrUnknownHost] and [ErrChangedHostKey], each with its remedy. Users log in
// with keys: an agent, key files, and OpenSSH certificates beside them. There is no login with a
// password. ~/.ssh/config is not read.
//
// Text that a machine sends is hostile. Its amount is bounded, and errors contain it on one line
// without control characters. The bytes of a [Result] are as the machine sent them; [Text] cleans them.
// Passphrases and passwords of sudo come from callbacks. They are in no argument, log, error or file.
package sshhost

import (
	"errors"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"constellation/engine/plan"
)

// DefaultPort is the port of SSH.
const DefaultPort = 22

// Target is a login on a machine.
type Target struct {
	User, Host string
	// Port is 22 if it is zero.
	Port int
	// KeyFile is the private key to log in with, or a public key whose private key the agent holds. If
	// it is set, no other key is offered. Jump hosts get the same key unless they name their own.
	KeyFile string
	// Jump are the machines through which the target is reached, the first one first.
	Jump []Target
	// Sudo allows sudo where a command needs root and the user is not root.
	Sudo bool
}

var (
	userRE = regexp.MustCompile(`^[A-Za-z0-9_][A-Za-z0-9_.@+-]{0,63}\$?$`)
	hostRE = regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9._-]{0,252}[A-Za-z0-9])?\.?$`)
)

// ParseTarget reads USER@HOST or USER@HOST:PORT. An IPv6 address with a port is in brackets.
func ParseTarget(s string) (Target, error) {
	bad := func(why string) (Target, error) {
		return Target{}, &plan.Error{Op: "read machine " + strconv.QuoteToASCII(s), Err: errors.New(why), Remedy: "write it as USER@HOST or USER@HOST:PORT, such as admin@10.0.0.11", Exit: plan.ExitUsage}
	}
	i := strings.LastIndexByte(s, '@')
	if i < 1 {
		return bad("it names no user")
	}
	t := Target{User: s[:i], Host: s[i+1:]}
	if !userRE.MatchString(t.User) {
		return bad("the name of the user has other characters than letters, digits and ._@+-")
	}
	if _, err := netip.ParseAddr(t.Host); err == nil && !strings.Contains(t.Host, "%") {
		return t, nil
	}
	if host, port, err := net.SplitHostPort(t.Host); err == nil {
		n, err := strconv.Atoi(port)
		if err != nil || n < 1 || n > 65535 {
			return bad("the port is not a number from 1 to 65535")
		}
		t.Host, t.Port = host, n
		if a, err := netip.ParseAddr(host); err == nil && a.Zone() == "" {
			return t, nil
		}
	} else {
		t.Host = strings.TrimSuffix(strings.TrimPrefix(t.Host, "["), "]")
		if a, err := netip.ParseAddr(t.Host); err == nil && a.Zone() == "" {
			return t, nil
		}
	}
	if !hostRE.MatchString(t.Host) {
		return bad("the host is neither a name nor an address")
	}
	return t, nil
}

// String is USER@HOST, with the port if it is not 22.
func (t Target) String() string {
	host := t.Host
	if t.port() != DefaultPort {
		host = t.Address()
	}
	if t.User == "" {
		return host
	}
	return t.User + "@" + host
}

// Address is HOST:PORT.
func (t Target) Address() string { return net.JoinHostPort(t.Host, strconv.Itoa(t.port())) }

func (t Target) port() int {
	if t.Port == 0 {
		return DefaultPort
	}
	return t.Port
}

// UserFiles returns options with what OpenSSH uses without a configuration: the user's and the
// computer's known_hosts, the agent of SSH_AUTH_SOCK, and the user's default keys. env is os.Getenv.
func UserFiles(env func(string) string) Options {
	o := Options{KnownHosts: []string{"/etc/ssh/ssh_known_hosts"}, Agent: env("SSH_AUTH_SOCK")}
	home := env("HOME")
	if home == "" {
		var err error
		if home, err = os.UserHomeDir(); err != nil {
			return o
		}
	}
	dir := filepath.Join(home, ".ssh")
	o.KnownHosts = slices.Insert(o.KnownHosts, 0, filepath.Join(dir, "known_hosts"))
	for _, name := range []string{"id_ed25519", "id_ecdsa", "id_rsa"} {
		o.Keys = append(o.Keys, filepath.Join(dir, name))
	}
	return o
}
