package machine

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"constellation/engine/sandbox/machine/disk"
)

// etcdPath is the one of diskDirs that supports disk faults.
const etcdPath = "/var/lib/etcd"

// diskSettings maps the faults of a machine to settings of etcd's disk.
func (a Faults) diskSettings() disk.Settings {
	s := disk.Settings{Sync: a.SlowDisk}
	switch {
	case a.LostWrites:
		s.Loss = disk.All
	case a.TornWrites:
		s.Loss = disk.Torn
	}
	return s
}

// etcdDisk is the disk of a machine's etcd: an ordinary directory, or a faulty one, which
// its own process serves while the machine is on. See package disk.
type etcdDisk struct{ dir, name, log string }

func (h *Host) etcdDisk(machine string) etcdDisk {
	dir := filepath.Dir(diskDir(h.path(machine, "disk"), etcdPath))
	return etcdDisk{dir: dir, name: filepath.Base(etcdPath), log: h.path(machine, "disk.log")}
}

// set changes the faults of the disk. An ordinary disk becomes faulty at the next
// boot.
func (d etcdDisk) set(s disk.Settings) error {
	file := disk.SettingsFile(d.dir, d.name)
	if _, err := os.Stat(file); errors.Is(err, fs.ErrNotExist) && s == (disk.Settings{}) {
		return nil
	}
	if err := writeJSON(file, s); err != nil {
		return fmt.Errorf("set how disk fails: %w", err)
	}
	ps, err := d.processes()
	for _, p := range ps {
		err = errors.Join(err, p.signal(unix.SIGHUP))
	}
	return err
}

// mountTimeout limits the start of the disk's process.
const mountTimeout = 30 * time.Second

// powerOn mounts a faulty disk over the machine's directory, in the namespace of
// its first process, which has not started yet. It does nothing for an ordinary disk.
func (d etcdDisk) powerOn(init process) error {
	file := disk.SettingsFile(d.dir, d.name)
	var s disk.Settings
	err := readJSON(file, &s)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("mount disk of etcd: %w", err)
	}
	if s == (disk.Settings{}) {
		return os.Remove(file)
	}
	namespace, err := os.Open("/proc/" + strconv.Itoa(init.PID) + "/ns/mnt")
	if err != nil {
		return fmt.Errorf("mount disk of etcd: %w", err)
	}
	defer namespace.Close()
	if !init.alive() { // the number may belong to another process
		return errors.New("mount disk of etcd: the machine is gone")
	}
	log, err := os.OpenFile(d.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return fmt.Errorf("mount disk of etcd: %w", err)
	}
	defer log.Close()
	ready, theirs, err := os.Pipe()
	if err != nil {
		return fmt.Errorf("mount disk of etcd: %w", err)
	}
	defer ready.Close()
	// /proc/self/exe is this program even if its file was replaced. The process outlives this one.
	cmd := exec.CommandContext(context.Background(), "/proc/self/exe", disk.Args(d.dir, d.name, etcdPath)...)
	cmd.Args[0] = "constellation"
	cmd.Dir, cmd.Env, cmd.Stderr = "/", []string{}, log
	cmd.ExtraFiles = []*os.File{namespace, theirs} // NamespaceFD and ReadyFD
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	err = cmd.Start()
	_ = theirs.Close()
	if err != nil {
		return fmt.Errorf("mount disk of etcd: %w", err)
	}
	go func() { _ = cmd.Wait() }() // its output is in the log
	if err := ready.SetReadDeadline(time.Now().Add(mountTimeout)); err != nil {
		return fmt.Errorf("mount disk of etcd: %w", err)
	}
	said, err := io.ReadAll(ready)
	if err == nil && string(said) != disk.Ready {
		err = errors.New(string(said))
	}
	if err != nil {
		_ = cmd.Process.Kill()
		return fmt.Errorf("mount disk of etcd: %w; see %s", err, d.log)
	}
	return nil
}

// cutWithin limits the rollback of unsynced writes.
const cutWithin = 20 * time.Second

// powerOff ends the disk's process. With a cut, unsynced writes are lost according to the
// settings. It returns after the rollback.
func (d etcdDisk) powerOff(ctx context.Context, cut bool) error {
	ps, err := d.processes()
	if err != nil {
		return err
	}
	grace := time.Duration(0)
	if cut {
		grace = cutWithin
	}
	for _, p := range ps {
		if err := p.stop(ctx, unix.SIGTERM, grace); err != nil {
			return fmt.Errorf("end disk of etcd: %w", err)
		}
	}
	return nil
}

// processes finds the disk's process by its arguments, as [tpm.processes] does.
func (d etcdDisk) processes() ([]process, error) {
	want := disk.Args(d.dir, d.name, etcdPath)
	return processesWhere(func(pid string) bool {
		line, err := os.ReadFile("/proc/" + pid + "/cmdline")
		if err != nil {
			return false
		}
		var args []string
		for _, a := range bytes.Split(bytes.TrimSuffix(line, []byte{0}), []byte{0}) {
			args = append(args, string(a))
		}
		return slices.Equal(args[1:], want)
	})
}
