package sshhost_test

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/crypto/ssh"
	"golang.org/x/crypto/ssh/agent"

	"constellation/engine/plan"
	"constellation/engine/sshhost"
	"constellation/engine/sshhost/sshdtest"
	"constellation/internal/testneeds"
)

func dial(t *testing.T, o sshhost.Options) *sshhost.Host {
	t.Helper()
	h, err := sshhost.Dial(t.Context(), o)
	if err != nil {
		t.Fatalf("%v\n%s", err, plan.Remedy(err))
	}
	t.Cleanup(h.Close)
	return h
}

// refused checks that a login fails with a cause, and that its remedy and text have these parts.
func refused(t *testing.T, o sshhost.Options, cause error, parts ...string) {
	t.Helper()
	h, err := sshhost.Dial(t.Context(), o)
	if err == nil {
		h.Close()
		t.Fatal("the login succeeded")
	}
	checkError(t, err, cause, parts...)
}

func checkError(t *testing.T, err, cause error, parts ...string) {
	t.Helper()
	if cause != nil && !errors.Is(err, cause) {
		t.Errorf("error %v, want %v", err, cause)
	}
	if plan.Remedy(err) == "" {
		t.Errorf("%v has no remedy", err)
	}
	for _, p := range parts {
		if !strings.Contains(err.Error()+"\n"+plan.Remedy(err), p) {
			t.Errorf("%q is in neither error nor remedy:\n%v\n%s", p, err, plan.Remedy(err))
		}
	}
}

func run(t *testing.T, h *sshhost.Host, c sshhost.Command) sshhost.Result {
	t.Helper()
	r, err := h.Run(t.Context(), c)
	if err != nil {
		t.Fatalf("%v\n%s", err, plan.Remedy(err))
	}
	return r
}

func TestParseTarget(t *testing.T) {
	for _, tt := range []struct{ in, user, address, text string }{
		{in: "admin@10.0.0.11", user: "admin", address: "10.0.0.11:22", text: "admin@10.0.0.11"},
		{in: "admin@10.0.0.11:2222", user: "admin", address: "10.0.0.11:2222", text: "admin@10.0.0.11:2222"},
		{in: "root@node-1.example.com", user: "root", address: "node-1.example.com:22", text: "root@node-1.example.com"},
		{in: "root@fd00::1", user: "root", address: "[fd00::1]:22", text: "root@fd00::1"},
		{in: "root@[fd00::1]", user: "root", address: "[fd00::1]:22", text: "root@fd00::1"},
		{in: "root@[fd00::1]:2222", user: "root", address: "[fd00::1]:2222", text: "root@[fd00::1]:2222"},
		{in: "first.last@corp.com@10.0.0.1", user: "first.last@corp.com", address: "10.0.0.1:22", text: "first.last@corp.com@10.0.0.1"},
	} {
		got, err := sshhost.ParseTarget(tt.in)
		if err != nil || got.User != tt.user || got.Address() != tt.address || got.String() != tt.text {
			t.Errorf("%s: %+v %v", tt.in, got, err)
		}
	}
	for _, in := range []string{
		"", "10.0.0.1", "@10.0.0.1", "root@", "-oProxyCommand=x@h", "root@-h", "root@h:0", "root@h:70000", "root@h:x", "root@a b", "root@h;id", "root@h\x1b[2J", "ro ot@h", "root@$(id)", "root@fe80::1%eth0", "root@h/..",
	} {
		_, err := sshhost.ParseTarget(in)
		if plan.ExitCode(err) != plan.ExitUsage || plan.Remedy(err) == "" || strings.ContainsRune(err.Error(), 0x1b) {
			t.Errorf("%q: %v", in, err)
		}
	}
}

func TestRun(t *testing.T) {
	t.Parallel()
	s := sshdtest.Start(t, sshdtest.Options{})
	h := dial(t, s.Options())
	if want := ssh.FingerprintSHA256(sshdtest.Signer(t, s.HostKey).PublicKey()); h.Fingerprint() != want {
		t.Errorf("fingerprint %s, want %s", h.Fingerprint(), want)
	}
	odd := []string{"", " ", "a b", `it's`, `"$HOME"`, "`id`", "$(id)", `back\slash`, `\`, "*", "~", "line\nbreak", "-n", "ümläut", "a=b", "#", "!x", "\x01\x7f", "{a,b}"}
	r := run(t, h, sshhost.Command{Argv: append([]string{"printf", `%s\0`}, odd...)})
	if got := strings.Split(strings.TrimSuffix(string(r.Stdout), "\x00"), "\x00"); !slices.Equal(got, odd) {
		t.Errorf("arguments arrived as %q, want %q", got, odd)
	}
	r = run(t, h, sshhost.Command{Argv: []string{"sh", "-c", "cat; echo oops >&2; exit 3"}, Stdin: strings.NewReader("in")})
	if string(r.Stdout) != "in" || string(r.Stderr) != "oops\n" || r.Exit != 3 || r.Err() == nil || r.Err().Error() != "exit code 3: oops" {
		t.Errorf("%q %q %d %v", r.Stdout, r.Stderr, r.Exit, r.Err())
	}
	r = run(t, h, sshhost.Command{Argv: []string{"sh", "-c", "kill -TERM $$"}})
	if r.Exit != -1 || r.Signal != "TERM" || r.Err() == nil {
		t.Errorf("a command that a signal ended: %+v", r)
	}
	for _, argv := range [][]string{nil, {""}, {"echo", "a\x00b"}} {
		if _, err := h.Run(t.Context(), sshhost.Command{Argv: argv}); err == nil {
			t.Errorf("%q ran", argv)
		}
	}
	var all sync.WaitGroup
	for i := range 5 {
		all.Go(func() {
			if r, err := h.Run(t.Context(), sshhost.Command{Argv: []string{"echo", fmt.Sprint(i)}}); err != nil || string(r.Stdout) != fmt.Sprintln(i) {
				t.Errorf("command %d: %q %v", i, r.Stdout, err)
			}
		})
	}
	all.Wait()
	h.Close()
	_, err := h.Run(t.Context(), sshhost.Command{Argv: []string{"true"}})
	checkError(t, err, sshhost.ErrLost)
}

func TestHostileOutput(t *testing.T) {
	t.Parallel()
	h := dial(t, sshdtest.Start(t, sshdtest.Options{}).Options())
	r := run(t, h, sshhost.Command{Argv: []string{"sh", "-c", `printf '\033]0;title\007\033[2J\342\200\256evil\nA\314\201\314\201\314\201\314\201\314\201\314\201\377' >&2; exit 1`}})
	got := r.Err().Error()
	if want := "exit code 1: ?]0;title??[2J?evil A\u0301\u0301\u0301\u0301???"; got != want {
		t.Errorf("error %q, want %q", got, want)
	}
	if long := sshhost.Text(bytes.Repeat([]byte("x"), 1<<20)); len(long) > 400 {
		t.Errorf("text of 1 MiB became one of %d bytes", len(long))
	}
	// Without a limit this command does not end.
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	r, err := h.Run(ctx, sshhost.Command{Argv: []string{"yes"}, MaxOutput: 1000})
	checkError(t, err, sshhost.ErrTooMuch)
	if len(r.Stdout) > 1000 {
		t.Errorf("%d bytes were kept", len(r.Stdout))
	}
	_, err = h.Run(ctx, sshhost.Command{Argv: []string{"sh", "-c", "yes >&2"}, MaxOutput: 1000})
	checkError(t, err, sshhost.ErrTooMuch)
}

func TestStream(t *testing.T) {
	t.Parallel()
	h := dial(t, sshdtest.Start(t, sshdtest.Options{}).Options())
	// The output arrives while the command runs, and may be larger than the limit.
	in, out := io.Pipe()
	more, input := io.Pipe()
	result := make(chan sshhost.Result, 1)
	go func() {
		r, err := h.Run(t.Context(), sshhost.Command{Argv: []string{"sh", "-c", "echo first; read x; echo err >&2; head -c 100000 /dev/zero"}, Stdin: more, Stdout: out, MaxOutput: 1000})
		_ = out.CloseWithError(err)
		result <- r
	}()
	first := make([]byte, 6)
	if _, err := io.ReadFull(in, first); err != nil || string(first) != "first\n" {
		t.Fatalf("%q %v", first, err)
	}
	if _, err := input.Write([]byte("go\n")); err != nil {
		t.Fatal(err)
	}
	rest, err := io.ReadAll(in)
	if r := <-result; err != nil || len(rest) != 100000 || len(r.Stdout) > 0 || string(r.Stderr) != "err\n" {
		t.Errorf("%d bytes, %v, result %q %q", len(rest), err, r.Stdout, r.Stderr)
	}
	// A reader that is gone ends the command.
	broken := errors.New("no reader")
	if _, err := h.Run(t.Context(), sshhost.Command{Argv: []string{"yes"}, Stdout: failingWriter{broken}}); !errors.Is(err, broken) {
		t.Errorf("a reader that is gone: %v", err)
	}
}

type failingWriter struct{ err error }

func (f failingWriter) Write([]byte) (int, error) { return 0, f.err }

func TestCancel(t *testing.T) {
	t.Parallel()
	h := dial(t, sshdtest.Start(t, sshdtest.Options{}).Options())
	ctx, cancel := context.WithCancel(t.Context())
	in, out := io.Pipe() // the command has begun when it reads
	go func() {
		_, _ = out.Write([]byte("x"))
		cancel()
	}()
	if _, err := h.Run(ctx, sshhost.Command{Argv: []string{"sh", "-c", "cat; sleep 1000"}, Stdin: in}); !errors.Is(err, context.Canceled) {
		t.Errorf("a cancelled command ended with %v", err)
	}
	_ = out.Close()
	if r := run(t, h, sshhost.Command{Argv: []string{"echo", "again"}}); string(r.Stdout) != "again\n" {
		t.Errorf("after it, a command printed %q", r.Stdout)
	}
	ctx, cancel = context.WithCancel(t.Context())
	cancel()
	if _, err := sshhost.Dial(ctx, sshdtest.Start(t, sshdtest.Options{}).Options()); !errors.Is(err, context.Canceled) {
		t.Errorf("a cancelled login ended with %v", err)
	}
}

func TestHostKeys(t *testing.T) {
	t.Parallel()
	s := sshdtest.Start(t, sshdtest.Options{})
	real := ssh.FingerprintSHA256(sshdtest.Signer(t, s.HostKey).PublicKey())
	other := sshdtest.NewKey(t)
	address := fmt.Sprintf("[127.0.0.1]:%d", s.Port)
	with := func(lines string, fingerprints ...string) sshhost.Options {
		o := s.Options()
		o.KnownHosts, o.Fingerprints = []string{filepath.Join(s.Dir, "none"), s.Write(t, "known."+fmt.Sprint(len(lines), len(fingerprints)), lines)}, fingerprints
		return o
	}
	refused(t, with(""), sshhost.ErrUnknownHost, real, "ssh-keyscan -t ed25519 -p "+fmt.Sprint(s.Port)+" 127.0.0.1 >> ", "ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub", "--host-key "+real)
	refused(t, with("other.example.com "+sshdtest.Authorized(t, s.HostKey)), sshhost.ErrUnknownHost)
	refused(t, with(address+" "+sshdtest.Authorized(t, other)), sshhost.ErrChangedHostKey, real, "intercept", fmt.Sprintf("ssh-keygen -R '[127.0.0.1]:%d' -f ", s.Port))
	refused(t, with(address+" "+sshdtest.Authorized(t, s.HostKey)+"@revoked * "+sshdtest.Authorized(t, s.HostKey)), sshhost.ErrRevokedHostKey)
	refused(t, with("not a line of known_hosts\n"), nil, "known.", ":1")
	// A key of another type is a changed one, and not an unknown one.
	curve, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	signer, err := ssh.NewSignerFromKey(curve)
	if err != nil {
		t.Fatal(err)
	}
	refused(t, with(address+" "+string(ssh.MarshalAuthorizedKey(signer.PublicKey()))), sshhost.ErrChangedHostKey)

	var x *sshhost.HostKeyError
	_, err = sshhost.Dial(t.Context(), with(""))
	if !errors.As(err, &x) || x.Fingerprint != real || x.Type != "ssh-ed25519" {
		t.Errorf("host key of the error: %+v", x)
	}
	dial(t, with("", real))
	dial(t, with(address+" "+sshdtest.Authorized(t, s.HostKey), real))
	refused(t, with("", ssh.FingerprintSHA256(sshdtest.Signer(t, other).PublicKey())), sshhost.ErrUnknownHost)
	refused(t, with(address+" "+sshdtest.Authorized(t, s.HostKey), ssh.FingerprintSHA256(sshdtest.Signer(t, other).PublicKey())), nil, "not the given fingerprint")
	// A fingerprint does not overrule known_hosts.
	refused(t, with(address+" "+sshdtest.Authorized(t, other), real), sshhost.ErrChangedHostKey)
	refused(t, with("", "MD5:00"), nil, "SHA256:")
}

func TestHostCertificate(t *testing.T) {
	t.Parallel()
	ca, key := sshdtest.NewKey(t), sshdtest.NewKey(t)
	dir := t.TempDir()
	file := filepath.Join(dir, "host_key-cert.pub")
	write := func(before time.Time) {
		c := certificate(t, ca, key, ssh.HostCert, []string{"127.0.0.1"}, before)
		if err := os.WriteFile(file, ssh.MarshalAuthorizedKey(c), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(time.Now().Add(time.Hour))
	s := sshdtest.Start(t, sshdtest.Options{HostKey: key, Config: "HostCertificate " + file})
	o := s.Options()
	o.KnownHosts = []string{s.Write(t, "authority", fmt.Sprintf("@cert-authority [127.0.0.1]:%d %s", s.Port, sshdtest.Authorized(t, ca)))}
	dial(t, o)
	// Its key alone is as good.
	dial(t, s.Options())
	o.KnownHosts = append(o.KnownHosts, s.KnownHosts)
	dial(t, o)
	o.KnownHosts = []string{s.Write(t, "stranger", fmt.Sprintf("@cert-authority [127.0.0.1]:%d %s", s.Port, sshdtest.Authorized(t, sshdtest.NewKey(t))))}
	refused(t, o, sshhost.ErrChangedHostKey)
}

func certificate(t *testing.T, ca, key ed25519.PrivateKey, kind uint32, principals []string, before time.Time) *ssh.Certificate {
	t.Helper()
	c := &ssh.Certificate{
		Key: sshdtest.Signer(t, key).PublicKey(), CertType: kind, KeyId: "test", ValidPrincipals: principals, ValidAfter: 1, ValidBefore: uint64(before.Unix()),
		Permissions: ssh.Permissions{Extensions: map[string]string{"permit-port-forwarding": ""}},
	}
	if kind == ssh.HostCert {
		c.Permissions = ssh.Permissions{}
	}
	if err := c.SignCert(rand.Reader, sshdtest.Signer(t, ca)); err != nil {
		t.Fatal(err)
	}
	return c
}

func TestLogin(t *testing.T) {
	t.Parallel()
	s := sshdtest.Start(t, sshdtest.Options{})
	right, err := ssh.ParseRawPrivateKey([]byte(read(t, s.Key)))
	if err != nil {
		t.Fatal(err)
	}
	key := *right.(*ed25519.PrivateKey)
	wrong := s.Write(t, "wrong", sshdtest.Private(t, sshdtest.NewKey(t)))
	locked := s.Write(t, "locked", sshdtest.Encrypted(t, key, "sesame"))
	as := func(file string) sshhost.Options {
		o := s.Options()
		o.Target.KeyFile = file
		return o
	}
	ask := func(o sshhost.Options, answer string) (sshhost.Options, *int) {
		n := new(int)
		o.Passphrase = func(_ context.Context, file string) ([]byte, error) {
			*n++
			return []byte(answer), nil
		}
		return o, n
	}
	refused(t, as(wrong), sshhost.ErrLogin, "ssh-copy-id -i "+wrong)
	refused(t, as(filepath.Join(s.Dir, "none")), os.ErrNotExist)
	refused(t, as(filepath.Join(s.Dir, "sshd_config")), nil, "no private key")
	refused(t, as(locked), sshhost.ErrPassphrase, "ssh-add "+locked)
	o, asked := ask(as(locked), "open")
	refused(t, o, sshhost.ErrPassphrase, "is wrong")
	if *asked != 1 {
		t.Errorf("asked %d times for a wrong passphrase", *asked)
	}
	o, asked = ask(as(locked), "sesame")
	dial(t, o)
	if *asked != 1 {
		t.Errorf("asked %d times for a passphrase", *asked)
	}
	// No passphrase is asked for if the machine does not want the key.
	o, asked = ask(as(s.Write(t, "other", sshdtest.Encrypted(t, sshdtest.NewKey(t), "x"))), "x")
	refused(t, o, sshhost.ErrLogin)
	if *asked != 0 {
		t.Errorf("asked %d times for the passphrase of a key that the machine does not accept", *asked)
	}
	// The user may take longer than the limit of the connection. A computer under load may exceed a short one.
	for _, limit := range []time.Duration{time.Second, 4 * time.Second, 16 * time.Second} {
		o = as(locked)
		o.Timeout = limit
		o.Passphrase = func(context.Context, string) ([]byte, error) {
			time.Sleep(limit + 100*time.Millisecond)
			return []byte("sesame"), nil
		}
		var h *sshhost.Host
		if h, err = sshhost.Dial(t.Context(), o); err == nil {
			h.Close()
			break
		}
	}
	if err != nil {
		t.Errorf("a login with a slow user: %v", err)
	}
	// Default keys are tried in order, and those that cannot be used are left out.
	o = as("")
	o.Keys = []string{filepath.Join(s.Dir, "none"), wrong, s.Key}
	dial(t, o)
	o.Keys = nil
	refused(t, o, nil, "no key to log in with", "ssh-add")

	keyring := agent.NewKeyring()
	if err := keyring.Add(agent.AddedKey{PrivateKey: &key}); err != nil {
		t.Fatal(err)
	}
	o = as("")
	o.Agent = serveAgent(t, keyring)
	dial(t, o)
	o.Target.KeyFile = locked // the agent has it decrypted
	dial(t, o)
	o.Target.KeyFile = s.Write(t, "id.pub", sshdtest.Authorized(t, key)) // the agent alone has its private key
	dial(t, o)
	o.Target.KeyFile = s.Write(t, "stranger.pub", sshdtest.Authorized(t, sshdtest.NewKey(t)))
	refused(t, o, nil, "agent does not hold")
	o.Target.KeyFile, o.Agent = "", filepath.Join(s.Dir, "none")
	refused(t, o, nil, "agent of SSH_AUTH_SOCK does not answer")
}

func TestPasswordsAreNotSent(t *testing.T) {
	t.Parallel()
	s := sshdtest.Start(t, sshdtest.Options{Config: "PubkeyAuthentication no\nPasswordAuthentication yes"})
	refused(t, s.Options(), sshhost.ErrLogin, "password")
}

func TestUserCertificate(t *testing.T) {
	t.Parallel()
	ca, key := sshdtest.NewKey(t), sshdtest.NewKey(t)
	dir := t.TempDir()
	authority := filepath.Join(dir, "ca.pub")
	if err := os.WriteFile(authority, []byte(sshdtest.Authorized(t, ca)), 0o600); err != nil {
		t.Fatal(err)
	}
	s := sshdtest.Start(t, sshdtest.Options{Config: "TrustedUserCAKeys " + authority})
	o := s.Options()
	o.Target.KeyFile = s.Write(t, "certified", sshdtest.Private(t, key))
	refused(t, o, sshhost.ErrLogin)
	s.Write(t, "certified-cert.pub", string(ssh.MarshalAuthorizedKey(certificate(t, ca, key, ssh.UserCert, []string{s.User}, time.Now().Add(time.Hour)))))
	dial(t, o)
	s.Write(t, "certified-cert.pub", string(ssh.MarshalAuthorizedKey(certificate(t, ca, key, ssh.UserCert, []string{s.User}, time.Unix(1_700_000_000, 0)))))
	refused(t, o, sshhost.ErrLogin, "ended on 2023-11-14")
}

func TestJumpHost(t *testing.T) {
	t.Parallel()
	first, last := sshdtest.Start(t, sshdtest.Options{}), sshdtest.Start(t, sshdtest.Options{})
	o := last.Options()
	o.Target.Jump = []sshhost.Target{first.Options().Target}
	refused(t, o, sshhost.ErrUnknownHost, fmt.Sprint("127.0.0.1:", first.Port))
	o.KnownHosts = []string{first.KnownHosts}
	refused(t, o, sshhost.ErrUnknownHost, fmt.Sprint("-J ", first.User, "@127.0.0.1:", first.Port))
	o.KnownHosts = []string{first.KnownHosts, last.KnownHosts}
	h := dial(t, o)
	r := run(t, h, sshhost.Command{Argv: []string{"sh", "-c", "echo $SSH_CONNECTION"}})
	if f := strings.Fields(string(r.Stdout)); len(f) != 4 || f[3] != fmt.Sprint(last.Port) {
		t.Errorf("the command ran at %q, want port %d", r.Stdout, last.Port)
	}
	if !strings.Contains(first.Log(t), "Accepted publickey") {
		t.Error("the jump host was not used")
	}
	o.Target.Port = closedPort(t)
	refused(t, o, sshhost.ErrUnreachable, "jump host did not forward")

	none := sshdtest.Start(t, sshdtest.Options{Config: "AllowTcpForwarding no"})
	o = last.Options()
	o.Target.Jump, o.KnownHosts = []sshhost.Target{none.Options().Target}, append(o.KnownHosts, none.KnownHosts)
	refused(t, o, sshhost.ErrUnreachable, "AllowTcpForwarding")
}

func TestUnreachable(t *testing.T) {
	t.Parallel()
	s := sshdtest.Start(t, sshdtest.Options{})
	o := s.Options()
	o.Target.Port = closedPort(t)
	refused(t, o, sshhost.ErrUnreachable, "refused", "systemctl start ssh")
	o.Target.Host = "no-such-host.invalid"
	refused(t, o, sshhost.ErrUnreachable, "does not resolve")

	silent := listen(t, func(c net.Conn) { _, _ = io.Copy(io.Discard, c) })
	o = s.Options()
	o.Target.Port, o.Timeout = silent, 200*time.Millisecond
	refused(t, o, sshhost.ErrSilent, "200ms")
	o.Timeout = time.Minute
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if _, err := sshhost.Dial(ctx, o); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a login whose context ended: %v", err)
	}
	web := listen(t, func(c net.Conn) { _, _ = io.WriteString(c, "HTTP/1.1 400 \x1b[2JBad Request\r\n\r\n") })
	o.Target.Port, o.Timeout = web, 5*time.Second
	_, err := sshhost.Dial(t.Context(), o)
	checkError(t, err, nil)
	if strings.ContainsRune(err.Error(), 0x1b) {
		t.Errorf("the error has a control character: %q", err)
	}
}

// TestSilentMachine freezes a connection: the machine neither answers nor closes it.
func TestSilentMachine(t *testing.T) {
	t.Parallel()
	s := sshdtest.Start(t, sshdtest.Options{})
	p := newProxy(t, s.Port)
	o := p.options(t, s)
	o.Silence = time.Second
	h := dial(t, o)
	done := make(chan error, 1)
	in, out := io.Pipe()
	go func() {
		_, err := h.Run(t.Context(), sshhost.Command{Argv: []string{"cat"}, Stdin: in})
		_ = in.Close()
		done <- err
	}()
	_, _ = out.Write([]byte("x"))
	p.freeze()
	select {
	case err := <-done:
		checkError(t, err, sshhost.ErrSilent)
	case <-time.After(20 * time.Second):
		t.Error("the command still waits for a machine that does not answer")
	}
	_ = out.Close()
}

func TestUpload(t *testing.T) {
	t.Parallel()
	testneeds.Root(t, "to upload as root")
	s := sshdtest.Start(t, sshdtest.Options{})
	h := dial(t, s.Options())
	file := filepath.Join(t.TempDir(), "it's a file")
	content := bytes.Repeat([]byte("0123456789abcdef"), 1<<17) // 2 MiB
	put := func(b []byte, size int) error {
		return h.Upload(t.Context(), file, 0o751, int64(size), bytes.NewReader(b))
	}
	if err := put(content, len(content)); err != nil {
		t.Fatalf("%v\n%s", err, plan.Remedy(err))
	}
	info, err := os.Stat(file)
	if got := read(t, file); err != nil || got != string(content) || info.Mode().Perm() != 0o751 {
		t.Errorf("the file has %d bytes and mode %s", len(got), info.Mode())
	}
	for _, tt := range []struct{ size int }{{len(content) - 1}, {len(content) + 1}, {0}} {
		if err := put(content, tt.size); err == nil {
			t.Errorf("%d bytes were uploaded as %d", len(content), tt.size)
		}
	}
	if err := put(nil, 0); err != nil || read(t, file) != "" {
		t.Errorf("an empty file: %v", err)
	}
	broken := errors.New("the disk of this computer")
	if err := h.Upload(t.Context(), file, 0o600, 1<<20, io.MultiReader(bytes.NewReader(content[:1<<19]), failing{broken})); !errors.Is(err, broken) {
		t.Errorf("a source that fails: %v", err)
	}
	checkError(t, h.Upload(t.Context(), filepath.Join(filepath.Dir(file), "none", "file"), 0o600, 0, bytes.NewReader(nil)), nil, "none")
	for _, bad := range []string{"", "relative", "/", "/a/../b", "/a\x00b"} {
		if err := h.Upload(t.Context(), bad, 0o600, 0, bytes.NewReader(nil)); err == nil {
			t.Errorf("%q was accepted as a file", bad)
		}
	}
	noRemains(t, h, filepath.Dir(file), filepath.Base(file))

	bare := dial(t, sshdtest.Start(t, sshdtest.Options{Config: "Subsystem other /bin/false"}).Options())
	checkError(t, bare.Upload(t.Context(), file, 0o600, 0, bytes.NewReader(nil)), nil, "serves no SFTP", "openssh-sftp-server")
	noRemains(t, bare, filepath.Dir(file), filepath.Base(file))
}

// noRemains checks that the folder has these files alone, and that temporary folders are gone.
func noRemains(t *testing.T, h *sshhost.Host, dir string, want ...string) {
	t.Helper()
	deadline := time.Now().Add(10 * time.Second)
	for {
		r := run(t, h, sshhost.Command{Argv: []string{"ls", "-A", "/var/tmp"}})
		entries, err := os.ReadDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		var names []string
		for _, e := range entries {
			names = append(names, e.Name())
		}
		if len(r.Stdout) == 0 && slices.Equal(names, want) {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("left over: %q in /var/tmp, %q in the folder of the target", r.Stdout, names)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// TestUploadIsCut cuts the connection at many points of an upload.
func TestUploadIsCut(t *testing.T) {
	t.Parallel()
	testneeds.Root(t, "to upload as root")
	s := sshdtest.Start(t, sshdtest.Options{})
	file := filepath.Join(t.TempDir(), "file")
	before := []byte("as it was\n")
	if err := os.WriteFile(file, before, 0o600); err != nil {
		t.Fatal(err)
	}
	content := bytes.Repeat([]byte("new "), 1<<18) // 1 MiB
	p := newProxy(t, s.Port)
	cut := 0
	for _, after := range []int{4 << 10, 8 << 10, 100 << 10, 600 << 10, 1<<20 + 10<<10} {
		p.limit(0)
		h := dial(t, p.options(t, s))
		p.limit(after)
		err := h.Upload(t.Context(), file, 0o600, int64(len(content)), bytes.NewReader(content))
		got := read(t, file)
		switch {
		case err == nil:
			if got != string(content) {
				t.Errorf("cut after %d: the upload succeeded, and the file has %d bytes", after, len(got))
			}
		case got != string(before) && got != string(content):
			t.Errorf("cut after %d: the file has %d bytes, which is neither the old nor the new content", after, len(got))
		default:
			cut++
			checkError(t, err, sshhost.ErrLost)
		}
		h.Close()
	}
	if cut < 3 {
		t.Errorf("%d uploads were cut, want at least 3", cut)
	}
	noRemains(t, dial(t, s.Options()), filepath.Dir(file), "file")
}

type failing struct{ err error }

func (f failing) Read([]byte) (int, error) { return 0, f.err }

func read(t *testing.T, file string) string {
	t.Helper()
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func serveAgent(t *testing.T, keyring agent.Agent) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "agent") // names of sockets are short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	l, err := net.Listen("unix", filepath.Join(dir, "s"))
	if err != nil {
		t.Fatal(err)
	}
	serveOn(t, l, func(c net.Conn) { _ = agent.ServeAgent(keyring, c) })
	return filepath.Join(dir, "s")
}

func closedPort(t *testing.T) int {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port
}

// listen serves connections until the end of the test.
func listen(t *testing.T, serve func(net.Conn)) (port int) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	serveOn(t, l, serve)
	return l.Addr().(*net.TCPAddr).Port
}

func serveOn(t *testing.T, l net.Listener, serve func(net.Conn)) {
	t.Helper()
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				serve(c)
			}()
		}
	}()
}

// proxy forwards connections, until it cuts or freezes them.
type proxy struct {
	port int

	mu     sync.Mutex
	left   int // bytes to the server before the cut; 0: no limit
	frozen chan struct{}
}

func newProxy(t *testing.T, port int) *proxy {
	p := &proxy{frozen: make(chan struct{})}
	p.port = listen(t, func(c net.Conn) {
		up, err := net.Dial("tcp", fmt.Sprint("127.0.0.1:", port))
		if err != nil {
			return
		}
		defer up.Close()
		done := make(chan struct{}, 2)
		go func() { p.forward(c, up, true); done <- struct{}{} }()
		go func() { p.forward(up, c, false); done <- struct{}{} }()
		<-done
	})
	t.Cleanup(func() { p.limit(1) })
	return p
}

// options reach s through the proxy.
func (p *proxy) options(t *testing.T, s *sshdtest.Server) sshhost.Options {
	o := s.Options()
	o.Target.Port = p.port
	o.KnownHosts = []string{s.Write(t, "known_proxy", fmt.Sprintf("[127.0.0.1]:%d %s", p.port, sshdtest.Authorized(t, s.HostKey)))}
	return o
}

func (p *proxy) limit(n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.left = n
}

func (p *proxy) freeze() { close(p.frozen) }

func (p *proxy) forward(to, from net.Conn, free bool) {
	buf := make([]byte, 4<<10)
	for {
		n, err := from.Read(buf)
		if err != nil {
			return
		}
		select {
		case <-p.frozen:
			continue
		default:
		}
		if !free {
			p.mu.Lock()
			cut := p.left > 0 && p.left <= n
			if p.left > 0 {
				p.left -= n
			}
			p.mu.Unlock()
			if cut {
				return
			}
		}
		if _, err := to.Write(buf[:n]); err != nil {
			return
		}
	}
}
