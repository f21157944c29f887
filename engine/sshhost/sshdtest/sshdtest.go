// Package sshdtest starts the sshd of OpenSSH for tests: with keys and configuration of its own, at a
// port of loopback.
//
// If root runs the test, sshd gets a mount namespace with its own /run and /var/tmp, and with files
// bound over those of this computer, so that a test needs to change none of them.
package sshdtest

import (
	"bufio"
	"crypto/ed25519"
	"crypto/rand"
	"encoding/pem"
	"fmt"
	mathrand "math/rand/v2"
	"net"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/crypto/ssh"

	"constellation/engine/sshhost"
	"constellation/internal/testneeds"
)

// Options of a server. The zero value is a server that accepts Server.Key for the user of the test.
type Options struct {
	// User logs in; empty is the user of the test.
	User string
	// Config are more lines of sshd_config. SFTP is served unless they name a subsystem.
	Config string
	// Bind maps files of this computer to what the server sees instead. It needs root, and so does Setup,
	// shell commands that run in the server's namespace before it starts.
	Bind  map[string]string
	Setup string
	// HostKey is used instead of a new one.
	HostKey ed25519.PrivateKey
}

// Password is that of the user of Sudoers.
const Password = "right horse"

const passwordHash = "$6$constellation$5ch9ZnzZQ9RzCeIMwmRffq9pmSvLugYR3CxLZrW.wQ7YmzdRk8iRTURY8cuaqXkT8y2OOemVzmwXkQHX7yLb01"

// Sudoers returns options with a user of its own, tester, whom these rules of sudo concern. sudo is the real
// one; the user and the rules exist in the server's namespace alone. It needs root.
func Sudoers(t testing.TB, rules string) Options {
	t.Helper()
	testneeds.Root(t, "to add a user in a namespace")
	testneeds.Program(t, "sudo", "sudo")
	dir := t.TempDir()
	bind := map[string]string{}
	for file, add := range map[string]string{
		"/etc/passwd": "tester:x:4242:4242::/run/sshdtest/home:/bin/sh\n", "/etc/group": "tester:x:4242:\n", "/etc/shadow": "tester:" + passwordHash + ":19000:0:99999:7:::\n",
		"/etc/sudoers": rules + "\n",
	} {
		b, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if file == "/etc/sudoers" {
			b = nil
		}
		mine := filepath.Join(dir, filepath.Base(file))
		mode := os.FileMode(0o644)
		if file == "/etc/shadow" || file == "/etc/sudoers" {
			mode = 0o440
		}
		if err := os.WriteFile(mine, append(b, add...), mode); err != nil {
			t.Fatal(err)
		}
		bind[file] = mine
	}
	return Options{User: "tester", Bind: bind, Setup: "mkdir /run/sshdtest/home && chown 4242:4242 /run/sshdtest/home"}
}

// Server is a running sshd.
type Server struct {
	Port int
	User string
	// Dir is the server's folder. Key is the file of a private key that it accepts, HostKey its own key,
	// and KnownHosts a file with that key.
	Dir, Key, KnownHosts string
	HostKey              ed25519.PrivateKey
}

// Start starts a server until the end of the test, or skips the test.
func Start(t testing.TB, o Options) *Server {
	t.Helper()
	sshd := testneeds.Program(t, "/usr/sbin/sshd", "openssh-server")
	s := &Server{User: o.User, Dir: t.TempDir(), HostKey: o.HostKey}
	if s.User == "" {
		u, err := user.Current()
		if err != nil {
			t.Fatal(err)
		}
		s.User = u.Username
	}
	if s.HostKey == nil {
		s.HostKey = NewKey(t)
	}
	clientKey := NewKey(t)
	s.Key = s.Write(t, "id", Private(t, clientKey))
	s.Write(t, "host_key", Private(t, s.HostKey))
	s.Write(t, "authorized_keys", Authorized(t, clientKey))
	s.Port = freePort(t)
	s.KnownHosts = s.Write(t, "known_hosts", fmt.Sprintf("[127.0.0.1]:%d %s", s.Port, Authorized(t, s.HostKey)))

	keys := s.Dir
	if os.Geteuid() == 0 {
		keys = "/run/sshdtest" // which other users can read
	}
	if !strings.Contains(o.Config, "Subsystem ") {
		o.Config += "\nSubsystem sftp internal-sftp"
	}
	config := s.Write(t, "sshd_config", strings.Join([]string{
		o.Config, "ListenAddress 127.0.0.1", fmt.Sprint("Port ", s.Port), "HostKey " + filepath.Join(s.Dir, "host_key"), "AuthorizedKeysFile " + keys + "/authorized_keys",
		"PidFile none", "StrictModes no", "UsePAM no", "PasswordAuthentication no", "KbdInteractiveAuthentication no", "LogLevel INFO", "",
	}, "\n"))
	argv := []string{sshd, "-D", "-e", "-f", config}
	if os.Geteuid() == 0 {
		unshare := testneeds.Program(t, "unshare", "util-linux")
		script := "set -e\nmount -t tmpfs -o mode=755 tmpfs /run\nmount -t tmpfs -o mode=1777 tmpfs /var/tmp\nmkdir /run/sshd " + keys + "\ncp " + s.Dir + "/authorized_keys " + keys + "\nchmod 755 " + keys + "\nchmod 644 " + keys + "/authorized_keys\n"
		// A startup file of the developer would run before each command.
		script += "for f in /root/.bashrc /root/.bash_profile /root/.profile; do if [ -e $f ]; then mount --bind /dev/null $f; fi; done\n"
		for to, from := range o.Bind {
			script += "mount --bind " + from + " " + to + "\n"
		}
		argv = append([]string{unshare, "--mount", "--propagation", "private", "sh", "-c", script + o.Setup + "\n" + `exec "$0" "$@"`}, argv...)
	} else if len(o.Bind) > 0 || o.Setup != "" {
		t.Fatal("the test must declare that it needs root")
	}
	log, err := os.Create(filepath.Join(s.Dir, "log"))
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(argv[0], argv[1:]...) //nolint:noctx // the cleanup ends it
	out, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	listens, done := make(chan bool, 1), make(chan struct{})
	go func() {
		defer close(done)
		for lines := bufio.NewScanner(out); lines.Scan(); {
			fmt.Fprintln(log, lines.Text())
			if strings.Contains(lines.Text(), "Server listening on") {
				listens <- true
			}
		}
		close(listens)
	}()
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		_ = out.Close()
		if t.Failed() {
			t.Logf("log of sshd:\n%s", s.Log(t))
		}
	})
	if !<-listens {
		text := s.Log(t)
		if strings.Contains(text, "unshare:") || strings.Contains(text, "permission denied") {
			t.Skipf("needs a mount namespace: %s", text)
		}
		t.Fatalf("sshd did not start:\n%s", text)
	}
	return s
}

// freePort returns a port without a listener. It is below those that kernels give to connections (32768 on Linux): such a
// port could be taken before sshd listens.
func freePort(t testing.TB) int {
	t.Helper()
	for range 100 {
		port := 20000 + mathrand.IntN(12000)
		l, err := net.Listen("tcp", fmt.Sprint("127.0.0.1:", port)) //nolint:noctx // it only finds a free port
		if err != nil {
			continue
		}
		_ = l.Close()
		return port
	}
	t.Fatal("no free port between 20000 and 32000")
	return 0
}

// Log returns the server's log.
func (s *Server) Log(t testing.TB) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(s.Dir, "log"))
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// Options returns options that log in to the server.
func (s *Server) Options() sshhost.Options {
	return sshhost.Options{
		Target: sshhost.Target{User: s.User, Host: "127.0.0.1", Port: s.Port, KeyFile: s.Key}, KnownHosts: []string{s.KnownHosts},
	}
}

// Write writes a file of the server's folder and returns its path.
func (s *Server) Write(t testing.TB, name, content string) string {
	t.Helper()
	path := filepath.Join(s.Dir, name)
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// NewKey makes a key.
func NewKey(t testing.TB) ed25519.PrivateKey {
	t.Helper()
	_, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

// Private returns a private key in OpenSSH's format.
func Private(t testing.TB, key ed25519.PrivateKey) string {
	t.Helper()
	block, err := ssh.MarshalPrivateKey(key, "")
	if err != nil {
		t.Fatal(err)
	}
	return string(pem.EncodeToMemory(block))
}

// Encrypted returns a private key that a passphrase encrypts.
func Encrypted(t testing.TB, key ed25519.PrivateKey, passphrase string) string {
	t.Helper()
	block, err := ssh.MarshalPrivateKeyWithPassphrase(key, "", []byte(passphrase))
	if err != nil {
		t.Fatal(err)
	}
	return string(pem.EncodeToMemory(block))
}

// Authorized returns a public key as a line of authorized_keys.
func Authorized(t testing.TB, key ed25519.PrivateKey) string {
	t.Helper()
	return string(ssh.MarshalAuthorizedKey(Signer(t, key).PublicKey()))
}

// Signer returns the signer of a key.
func Signer(t testing.TB, key ed25519.PrivateKey) ssh.Signer {
	t.Helper()
	s, err := ssh.NewSignerFromKey(key)
	if err != nil {
		t.Fatal(err)
	}
	return s
}
