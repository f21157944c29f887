//go:build linux

package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"google.golang.org/protobuf/encoding/protojson"

	"constellation/agent/upgradeproto"
	"constellation/engine/release"
	"constellation/engine/version"
)

// Path of an agent below the root of a host, and where an agent that verifies nothing stores
// the program that its caller calls kubeadm.
const (
	programPath   = "usr/lib/constellation/agent"
	enrolmentPath = "usr/local/bin/kubeadm"
)

// enrolTimeout is how long the old agent may take to end. It waits five seconds for streams.
const enrolTimeout = time.Minute

// enrolment is the agent as an old agent runs it in place of kubeadm: it installs itself and
// the appended release keys on the host, and terminates the old agent. The unit starts the new
// one, which finds an interrupted run that it does not resume.
type enrolment struct {
	root    string // of the host
	program string // path of the enrolment program
	parent  int    // the old agent
	out     io.Writer
	end     func(pid int) error
	gone    func(pid int) bool
}

// IsEnrolment reports whether this program runs in place of kubeadm.
func IsEnrolment() bool { return filepath.Base(os.Args[0]) == filepath.Base(enrolmentPath) }

// Enrol is the main function of an enrolment program. It returns the exit code.
func Enrol() int {
	err := func() error {
		program, err := os.Readlink("/proc/self/exe")
		if err != nil {
			return fmt.Errorf("find this program: %w", err)
		}
		root, ok := strings.CutSuffix(program, "/"+enrolmentPath)
		if !ok {
			return fmt.Errorf("find the root of the host: %s does not end with %s", program, enrolmentPath)
		}
		e := enrolment{
			root: root + "/", program: program, parent: os.Getppid(), out: os.Stdout,
			end:  func(pid int) error { return syscall.Kill(pid, syscall.SIGTERM) },
			gone: func(pid int) bool { return os.Getppid() != pid },
		}
		return e.run(os.Args[1:])
	}()
	if err != nil {
		fmt.Fprintln(os.Stderr, "error: enrol agent:", err)
		return 1
	}
	return 0
}

// run answers the two calls of kubeadm that an old agent makes.
func (e enrolment) run(args []string) error {
	switch {
	case slices.Equal(args, []string{"version", "-o", "short"}):
		v, err := e.version()
		if err == nil {
			_, err = fmt.Fprintln(e.out, v)
		}
		return err
	case len(args) > 1 && args[0] == "upgrade" && args[1] == "node":
		return e.install()
	}
	return fmt.Errorf("unknown arguments %q: this program replaces kubeadm once, to install the agent", strings.Join(args, " "))
}

// version is that of the request in the journal: an old agent compares it with kubeadm's.
func (e enrolment) version() (version.Version, error) {
	f, err := os.Open(filepath.Join(e.root, "var/lib/constellation/agent", journalFile))
	if err != nil {
		return version.Version{}, fmt.Errorf("open the journal of the old agent: %w", err)
	}
	defer f.Close()
	var first entry
	if err := json.NewDecoder(io.LimitReader(f, maxEntry)).Decode(&first); err != nil || first.Head == nil {
		return version.Version{}, errors.Join(errors.New("read the journal of the old agent: it has no head"), err)
	}
	var req upgradeproto.UpgradeRequest
	if err := protojson.Unmarshal(first.Head.Request, &req); err != nil {
		return version.Version{}, fmt.Errorf("read the journal of the old agent: %w", err)
	}
	return version.Parse(req.GetKubernetesVersion())
}

func (e enrolment) install() error {
	b, err := os.ReadFile(e.program)
	if err != nil {
		return fmt.Errorf("read this program: %w", err)
	}
	program, keys, err := release.SplitEnrolment(b)
	if err != nil {
		return err
	}
	exe, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", e.parent))
	if err != nil || filepath.Base(strings.TrimSuffix(exe, " (deleted)")) != filepath.Base(programPath) {
		return errors.Join(fmt.Errorf("process %d, which started this program, is not an agent", e.parent), err)
	}
	// The keys come first: an agent without keys installs nothing. Those of the image stay.
	switch _, err := release.MachineTrust(e.root); {
	case errors.Is(err, release.ErrNoMachineKeys):
		if err := putWhole(filepath.Join(e.root, release.MachineKeys), keys, 0o644); err != nil {
			return err
		}
		fmt.Fprintln(e.out, "[enrol] Installed the release keys")
	case err != nil:
		return err
	}
	if err := putWhole(filepath.Join(e.root, programPath), program, 0o755); err != nil {
		return err
	}
	fmt.Fprintln(e.out, "[enrol] Installed the agent of release "+version.Release)
	if err := e.end(e.parent); err != nil {
		return fmt.Errorf("end the old agent: %w", err)
	}
	// The old agent must not see a success: it would continue with its stages.
	ctx, cancel := context.WithTimeout(context.Background(), enrolTimeout)
	defer cancel()
	for tick := time.NewTicker(20 * time.Millisecond); !e.gone(e.parent); {
		select {
		case <-ctx.Done():
			return fmt.Errorf("the old agent, process %d, has not ended within %s", e.parent, enrolTimeout)
		case <-tick.C:
		}
	}
	return nil
}

// unfinished is the name under which putWhole writes a file. It is always the same, so that a file of an interrupted
// installation is written again, or found by the removal.
func unfinished(path string) string {
	return filepath.Join(filepath.Dir(path), "."+filepath.Base(path)+".enrol")
}

// putWhole writes a file atomically and durably.
func putWhole(path string, b []byte, mode fs.FileMode) error {
	fail := func(err error) error { return fmt.Errorf("install %s: %w", filepath.Base(path), err) }
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return fail(err)
	}
	f, err := os.OpenFile(unfinished(path), os.O_WRONLY|os.O_CREATE|os.O_TRUNC|syscall.O_NOFOLLOW, 0o600)
	if err != nil {
		return fail(err)
	}
	defer os.Remove(f.Name()) // it was renamed on success
	_, err = f.Write(b)
	err = errors.Join(err, f.Chmod(mode), f.Sync(), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return fail(err)
	}
	return nil
}
