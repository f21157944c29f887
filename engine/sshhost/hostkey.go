package sshhost

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"slices"
	"strings"

	"golang.org/x/crypto/ssh"
	"golang.org/x/crypto/ssh/knownhosts"

	"constellation/engine/plan"
)

// HostKeyError reports a host key that was not accepted. It is ErrUnknownHost, ErrChangedHostKey or
// ErrRevokedHostKey.
type HostKeyError struct {
	Cause error
	// Address is HOST:PORT; Type is the type of the key that the machine presented, such as
	// ssh-ed25519, and Fingerprint its SHA256:… fingerprint.
	Address, Type, Fingerprint string
	// Known are the keys that known_hosts has for the machine.
	Known []KnownKey
}

// KnownKey is a line of a known_hosts file.
type KnownKey struct {
	File              string
	Line              int
	Type, Fingerprint string
}

// Error names the key.
func (e *HostKeyError) Error() string {
	out := fmt.Sprintf("%s: the machine presented %s %s", e.Cause, e.Type, e.Fingerprint)
	for _, k := range e.Known {
		out += fmt.Sprintf("; %s:%d has %s %s", k.File, k.Line, k.Type, k.Fingerprint)
	}
	return out
}

// Unwrap returns the cause.
func (e *HostKeyError) Unwrap() error { return e.Cause }

// keyTypes are the types of host keys in order of preference, with their signature algorithms.
var keyTypes = []struct {
	name, file string // file is the one of the machine that has such a key
	algorithms []string
}{
	{ssh.KeyAlgoED25519, "ed25519", []string{ssh.KeyAlgoED25519}},
	{ssh.KeyAlgoECDSA256, "ecdsa", []string{ssh.KeyAlgoECDSA256}},
	{ssh.KeyAlgoECDSA384, "ecdsa", []string{ssh.KeyAlgoECDSA384}},
	{ssh.KeyAlgoECDSA521, "ecdsa", []string{ssh.KeyAlgoECDSA521}},
	{ssh.KeyAlgoRSA, "rsa", []string{ssh.KeyAlgoRSASHA512, ssh.KeyAlgoRSASHA256}},
}

// certificates are the algorithms of host certificates in order of preference.
var certificates = []string{
	ssh.CertAlgoED25519v01, ssh.CertAlgoECDSA256v01, ssh.CertAlgoECDSA384v01, ssh.CertAlgoECDSA521v01, ssh.CertAlgoRSASHA512v01, ssh.CertAlgoRSASHA256v01,
}

// hostKeys are the known host keys.
type hostKeys struct {
	check        ssh.HostKeyCallback
	authorities  bool // some file has an authority that signs host keys
	fingerprints []string
	file         string // that a remedy appends to
}

// readHostKeys reads known_hosts files. A file that does not exist is empty.
func readHostKeys(files, fingerprints []string) (*hostKeys, error) {
	out := &hostKeys{fingerprints: fingerprints, file: "~/.ssh/known_hosts"}
	if len(files) > 0 {
		out.file = files[0]
	}
	var exist []string
	for _, name := range files {
		b, err := os.ReadFile(name)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		} else if err != nil {
			return nil, &plan.Error{Op: "read known host keys", Err: err, Remedy: "make the file readable, or remove it"}
		}
		out.authorities = out.authorities || bytes.Contains(b, []byte("@cert-authority"))
		exist = append(exist, name)
	}
	if err := CheckFingerprints(fingerprints); err != nil {
		return nil, err
	}
	check, err := knownhosts.New(exist...)
	if err != nil {
		return nil, &plan.Error{Op: "read known host keys", Err: err, Remedy: "correct or delete this line"}
	}
	out.check = check
	return out, nil
}

// CheckFingerprints returns an error if one of [Options.Fingerprints] cannot be that of a key.
func CheckFingerprints(list []string) error {
	for _, f := range list {
		if !strings.HasPrefix(f, "SHA256:") || len(f) != len("SHA256:")+43 {
			return &plan.Error{Op: fmt.Sprintf("read fingerprint %q", f), Err: errors.New("it is not SHA256: and 43 characters"), Exit: plan.ExitUsage, Remedy: "copy it from the output of `ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub` on the machine"}
		}
	}
	return nil
}

// known returns the keys of a machine in known_hosts.
func (k *hostKeys) known(address string) []knownhosts.KnownKey {
	var mismatch *knownhosts.KeyError
	if err := k.check(address, noAddress{}, noKey{}); errors.As(err, &mismatch) {
		return mismatch.Want
	}
	return nil
}

// algorithms are the algorithms of host keys that are offered to a machine: those of known keys first,
// so that a machine with several keys presents a known one.
func (k *hostKeys) algorithms(address string) []string {
	var first, rest []string
	known := k.known(address)
	for _, t := range keyTypes {
		if slices.ContainsFunc(known, func(x knownhosts.KnownKey) bool { return x.Key.Type() == t.name }) {
			first = append(first, t.algorithms...)
		} else {
			rest = append(rest, t.algorithms...)
		}
	}
	if k.authorities {
		first = append(slices.Clone(certificates), first...)
	}
	return append(first, rest...)
}

// accept returns an error unless key is that of the machine at address. via are the jump hosts to it.
func (k *hostKeys) accept(address string, remote net.Addr, key ssh.PublicKey, t Target, via []Target) error {
	err := k.check(address, remote, key)
	if cert, is := key.(*ssh.Certificate); is && err != nil {
		// Without an authority for it, a certificate is no more than its key.
		keyErr := k.check(address, remote, cert.Key)
		if keyErr == nil || strings.Contains(err.Error(), "no authorities") {
			err, key = keyErr, cert.Key
		}
	}
	print := ssh.FingerprintSHA256(key)
	x := &HostKeyError{Address: address, Type: key.Type(), Fingerprint: print}
	var revoked *knownhosts.RevokedError
	var mismatch *knownhosts.KeyError
	switch {
	case errors.As(err, &revoked):
		x.Cause = ErrRevokedHostKey
		x.Known = knownKeys([]knownhosts.KnownKey{revoked.Revoked})
	case err == nil && (len(k.fingerprints) == 0 || slices.Contains(k.fingerprints, print)):
		return nil
	case err == nil:
		// A given fingerprint restricts a known machine, too.
		return &plan.Error{Op: "verify the host key of " + address, Err: fmt.Errorf("it is %s %s, which is not the given fingerprint", x.Type, print), Remedy: "compare both with `" + t.showKey(x.Type) + "` on the machine's own console"}
	case errors.As(err, &mismatch) && len(mismatch.Want) == 0 && slices.Contains(k.fingerprints, print):
		return nil
	case errors.As(err, &mismatch) && len(mismatch.Want) == 0:
		x.Cause = ErrUnknownHost
	case errors.As(err, &mismatch):
		x.Cause, x.Known = ErrChangedHostKey, knownKeys(mismatch.Want)
	default:
		return &plan.Error{Op: "verify the host key of " + address, Err: errors.New(Text([]byte(err.Error()))), Remedy: "renew the machine's host certificate, or correct known_hosts"}
	}
	return &plan.Error{Op: "verify the host key of " + address, Err: x, Remedy: k.remedy(x, t, via)}
}

func knownKeys(list []knownhosts.KnownKey) (out []KnownKey) {
	for _, k := range list {
		out = append(out, KnownKey{k.Filename, k.Line, k.Key.Type(), ssh.FingerprintSHA256(k.Key)})
	}
	return out
}

// remedy is what to do about a key that was not accepted.
func (k *hostKeys) remedy(x *HostKeyError, t Target, via []Target) string {
	compare := "compare the fingerprint with `" + t.showKey(x.Type) + "` on the machine's own console"
	add := fmt.Sprintf("`ssh-keyscan -t %s -p %d %s >> %s`", shortType(x.Type), t.port(), t.Host, shellFile(k.file))
	if len(via) > 0 { // ssh-keyscan knows no jump hosts
		var jumps []string
		for _, j := range via {
			jumps = append(jumps, j.String())
		}
		add = fmt.Sprintf("`ssh -p %d -J %s %s@%s`, which asks whether to add it", t.port(), strings.Join(jumps, ","), t.User, t.Host)
	}
	switch {
	case errors.Is(x, ErrRevokedHostKey):
		return "do not log in: this key is marked @revoked; give the machine a new host key"
	case errors.Is(x, ErrChangedHostKey):
		name := t.Host
		if t.port() != DefaultPort {
			name = fmt.Sprintf("'[%s]:%d'", t.Host, t.port())
		}
		return fmt.Sprintf("somebody may intercept the connection, unless the machine was reinstalled: %s; only if they are equal, run `ssh-keygen -R %s -f %s` and %s", compare, name, shellFile(x.Known[0].File), add)
	}
	return compare + "; if they are equal, run " + add + ", or give the fingerprint with --host-key " + x.Fingerprint
}

// showKey is the command that prints the fingerprint of a machine's key of a type.
func (t Target) showKey(typ string) string {
	return "ssh-keygen -lf /etc/ssh/ssh_host_" + shortType(typ) + "_key.pub"
}

// shortType is the name of a type of keys for ssh-keyscan and in the names of files.
func shortType(typ string) string {
	for _, t := range keyTypes {
		if t.name == typ {
			return t.file
		}
	}
	return "ed25519"
}

// shellFile is a file name in a command; ~ stays as it is.
func shellFile(name string) string {
	if strings.HasPrefix(name, "~/") {
		return name
	}
	return quote(name)
}

// noKey and noAddress query known_hosts for the keys that it has.
type (
	noKey     struct{}
	noAddress struct{}
)

func (noKey) Type() string                        { return "none" }
func (noKey) Marshal() []byte                     { return nil }
func (noKey) Verify([]byte, *ssh.Signature) error { return errors.New("no key") }
func (noAddress) Network() string                 { return "tcp" }
func (noAddress) String() string                  { return "0.0.0.0:0" }
