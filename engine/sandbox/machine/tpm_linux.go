package machine

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// A TPM is a directory and, while it is switched on, a process of swtpm:
//
//	state/    persistent state of the TPM, including its seeds; 0700
//	port/     tpm.sock and the event log, the only part that a machine sees
//	swtpm.log output of swtpm since its last start
const (
	tpmState  = "state"
	tpmPort   = "port"
	tpmSocket = "tpm.sock"
)

// socketPathMax is the maximum length of the path of a unix socket.
const socketPathMax = 107

// tpm is the TPM in one directory. Its methods must not be called concurrently.
type tpm struct{ dir string }

func (t tpm) port() string     { return filepath.Join(t.dir, tpmPort) }
func (t tpm) socket() string   { return filepath.Join(t.dir, tpmPort, tpmSocket) }
func (t tpm) address() string  { return "unix:" + t.socket() }
func (t tpm) eventLog() string { return filepath.Join(t.dir, tpmPort, EventLogName) }

// StartTPM switches the TPM in dir on and returns its address. A running TPM is
// reset. A missing one is manufactured, with SHA-256 as its only bank.
// All PCRs are zero afterwards. It serves one client at a time.
//
// The TPM outlives this process. stop switches it off; its state in dir stays.
func StartTPM(ctx context.Context, dir string) (address string, stop func() error, err error) {
	dir, err = filepath.Abs(dir)
	if err != nil {
		return "", nil, fmt.Errorf("start TPM: %w", err)
	}
	t := tpm{dir: dir}
	if err := t.manufacture(ctx); err != nil {
		return "", nil, err
	}
	if err := t.powerOn(ctx); err != nil {
		return "", nil, err
	}
	return t.address(), func() error {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		return t.powerOff(ctx)
	}, nil
}

// manufacture gives a new TPM its seeds. It does nothing if the TPM has seeds.
func (t tpm) manufacture(ctx context.Context) error {
	if len(t.socket()) > socketPathMax {
		return fmt.Errorf("make TPM: the path %s is longer than a socket's may be (%d)", t.socket(), socketPathMax)
	}
	state := filepath.Join(t.dir, tpmState)
	if _, err := os.Stat(state); err == nil {
		return nil
	}
	if err := os.MkdirAll(t.port(), 0o755); err != nil {
		return fmt.Errorf("make TPM: %w", err)
	}
	if err := os.Chmod(t.port(), 0o755); err != nil { // override the umask
		return fmt.Errorf("make TPM: %w", err)
	}
	// The directory is renamed when the seeds are complete, so that a crash in
	// between leaves no incomplete TPM.
	fresh := state + ".new"
	if err := os.RemoveAll(fresh); err != nil {
		return fmt.Errorf("make TPM: %w", err)
	}
	if err := os.Mkdir(fresh, 0o700); err != nil {
		return fmt.Errorf("make TPM: %w", err)
	}
	// swtpm_setup reads a configuration that may name a CA of this computer. Ours is
	// empty, since the endorsement key's certificate is unused: the cloud
	// certifies an attestation key.
	config := filepath.Join(t.dir, "swtpm_setup.conf")
	if err := os.WriteFile(config, nil, 0o600); err != nil {
		return fmt.Errorf("make TPM: %w", err)
	}
	cmd := exec.CommandContext(ctx, tool("swtpm_setup"), "--tpm2", "--runas", strconv.Itoa(os.Geteuid()),
		"--tpmstate", fresh, "--config", config, "--pcr-banks", "sha256", "--overwrite")
	// It runs an emulator, which outlives it when it alone is killed.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = 5 * time.Second
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("make TPM: swtpm_setup: %w: %s", err, lastLine(out))
	}
	if err := os.Rename(fresh, state); err != nil {
		return fmt.Errorf("make TPM: %w", err)
	}
	return nil
}

// powerOn resets the TPM: it restarts swtpm.
func (t tpm) powerOn(ctx context.Context) error {
	if err := t.powerOff(ctx); err != nil {
		return err
	}
	for _, stale := range []string{t.socket(), t.eventLog()} {
		if err := os.Remove(stale); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("start TPM: %w", err)
		}
	}
	// swtpm returns when the socket exists.
	cmd := exec.CommandContext(ctx, tool("swtpm"), "socket", "--tpm2",
		"--tpmstate", "dir="+filepath.Join(t.dir, tpmState)+",mode=0600",
		"--server", "type=unixio,path="+t.socket()+",mode=0600",
		"--flags", "not-need-init,startup-clear",
		"--log", "file="+filepath.Join(t.dir, "swtpm.log")+",level=1,truncate",
		"--daemon")
	cmd.Dir = "/"
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("start TPM: swtpm: %w: %s", err, lastLine(out))
	}
	ps, err := t.processes()
	if err != nil {
		return fmt.Errorf("start TPM: %w", err)
	}
	if len(ps) != 1 {
		return fmt.Errorf("start TPM: %d processes of swtpm run, want 1", len(ps))
	}
	return nil
}

// powerOff stops swtpm. It is idempotent.
func (t tpm) powerOff(ctx context.Context) error {
	ps, err := t.processes()
	if err != nil {
		return err
	}
	for _, p := range ps {
		if err := p.stop(ctx, unix.SIGTERM, 2*time.Second); err != nil {
			return fmt.Errorf("stop TPM: %w", err)
		}
	}
	return nil
}

// processes finds the TPM's process, regardless of its parent, by the state directory in its
// arguments: a record could be missing after a crash.
func (t tpm) processes() ([]process, error) {
	argument := []byte("dir=" + filepath.Join(t.dir, tpmState) + ",mode=0600")
	return processesWhere(func(pid string) bool {
		line, err := os.ReadFile("/proc/" + pid + "/cmdline")
		if err != nil {
			return false
		}
		args := bytes.Split(line, []byte{0})
		if filepath.Base(string(args[0])) != "swtpm" {
			return false
		}
		for _, a := range args {
			if bytes.Equal(a, argument) {
				return true
			}
		}
		return false
	})
}

// processesWhere lists the running processes whose number matches.
func processesWhere(match func(pid string) bool) ([]process, error) {
	names, err := processNumbers()
	if err != nil {
		return nil, err
	}
	var ps []process
	for _, name := range names {
		if !match(name) {
			continue
		}
		pid, err := strconv.Atoi(name)
		if err != nil {
			continue
		}
		if p, err := identify(pid); err == nil {
			ps = append(ps, p)
		}
	}
	return ps, nil
}

// processNumbers lists all processes of this computer, as their names in /proc.
func processNumbers() ([]string, error) {
	proc, err := os.Open("/proc")
	if err != nil {
		return nil, fmt.Errorf("list processes: %w", err)
	}
	defer proc.Close()
	names, err := proc.Readdirnames(-1)
	if err != nil {
		return nil, fmt.Errorf("list processes: %w", err)
	}
	var pids []string
	for _, n := range names {
		if n[0] >= '1' && n[0] <= '9' {
			pids = append(pids, n)
		}
	}
	return pids, nil
}

// lastLine returns the last non-empty line of a program's output, usually
// the error message.
func lastLine(out []byte) string {
	lines := strings.Split(strings.TrimSpace(string(out)), "\n")
	return strings.TrimSpace(lines[len(lines)-1])
}
