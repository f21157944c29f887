package machine

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// powerOn boots a machine with an existing disk, from the TPM to the first process. After
// an error the machine may be partly on. powerOff cleans that up.
func (h *Host) powerOn(ctx context.Context, r *record, firmware Firmware) error {
	start := time.Now()
	t := h.tpm(r.Name)
	if err := t.manufacture(ctx); err != nil {
		return err
	}
	if err := t.powerOn(ctx); err != nil {
		return err
	}
	if err := h.portOf(r.Machine).plug(); err != nil {
		return err
	}
	lower := lowerDirs(&r.Image)
	events, err := measure(ctx, r.Image.Rootfs, lower[0], &h.memory)
	if err != nil {
		return err
	}
	if !sameEvents(events, r.Image.Events) {
		h.log.Warn("image was found changed", "node", r.Name, "image", r.Image.Version)
	}
	if firmware != nil {
		boot := PowerOn{Machine: r.Name, TPM: t.address(), EventLog: t.eventLog(), Events: events, First: r.Boots == 0}
		if err := firmware(ctx, boot); err != nil {
			return fmt.Errorf("run firmware: %w", err)
		}
	}
	root := h.path(r.Name, "root")
	if err := mountOverlay(root, h.path(r.Name, "upper"), h.path(r.Name, "work"), lower...); err != nil {
		return err
	}
	if err := proveRoot(root); err != nil {
		return err
	}
	h.mu.Lock()
	limit := h.memMax
	err = restrictDevices(h.id)
	h.mu.Unlock()
	if err != nil {
		return err
	}
	if err := writeBundle(h.path(r.Name, "bundle"), bundleSpec{
		name: r.Name, root: root, namespace: h.namespace(r.Name), cgroup: cgroupParent + "/" + h.cgroup(r.Name),
		disk: h.path(r.Name, "disk"), tpm: t.port(),
	}); err != nil {
		return err
	}
	// Two steps: between create and start everything is in place, and no process of the machine
	// has run yet.
	init, err := h.create(ctx, r.Name)
	if err != nil {
		return err
	}
	r.Init = init
	if err := proveContainer(init.PID, root); err != nil {
		return err
	}
	if err := h.etcdDisk(r.Name).powerOn(init); err != nil {
		return err
	}
	if err := limitMemory(h.id, limit); err != nil {
		return err
	}
	if err := h.runc(ctx, "start", r.Name); err != nil {
		return err
	}
	// It is recorded only now: after an earlier crash the record shows a machine that is off,
	// and runc's own records suffice to end it.
	r.Boots++
	r.Booted = time.Now().UTC()
	if err := writeJSON(h.path(r.Name, recordName), r); err != nil {
		return err
	}
	h.log.Info("machine switched on", "node", r.Name, "image", r.Image.Version, "boot", r.Boots, "took", time.Since(start).Round(time.Millisecond))
	return nil
}

func (h *Host) portOf(m Machine) port {
	return port{hub: h.hub(), machine: h.namespace(m.Name), ip: m.IP, podCIDR: m.PodCIDR}
}

// proveRoot checks that root is a machine's root, and not this computer's by mistake:
// an overlay, a separate mount, with the marker and the first program
// that only a machine has.
func proveRoot(root string) error {
	var st unix.Statfs_t
	if err := unix.Statfs(root, &st); err != nil {
		return fmt.Errorf("check root of machine: %w", err)
	}
	if st.Type != unix.OVERLAYFS_SUPER_MAGIC {
		return fmt.Errorf("check root of machine: %s is no overlay", root)
	}
	if info, err := os.Lstat(filepath.Join(root, marker)); err != nil || !info.Mode().IsRegular() {
		return fmt.Errorf("check root of machine: %s has no marker", root)
	}
	if target, err := os.Readlink(filepath.Join(root, initLink)); err != nil || target != "/lib/systemd/systemd" {
		return fmt.Errorf("check root of machine: %s has no first program", root)
	}
	for _, ours := range []string{marker, initLink} {
		if _, err := os.Lstat("/" + ours); !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("check root of machine: /%s exists on this computer, which looks like a machine's root; refusing to go on", ours)
		}
	}
	return nil
}

// proveContainer checks that a process which runc has created, but not yet started, is
// in its own namespaces and has root as its root directory.
func proveContainer(pid int, root string) error {
	proc := "/proc/" + strconv.Itoa(pid)
	for _, ns := range []string{"mnt", "pid", "net", "ipc", "uts", "cgroup"} {
		theirs, err := os.Readlink(proc + "/ns/" + ns)
		if err != nil {
			return fmt.Errorf("check container: %w", err)
		}
		// Not /proc/self, which is the main thread: if that thread once created a network
		// namespace it stays there, because the runtime cannot end it.
		ours, err := os.Readlink("/proc/thread-self/ns/" + ns)
		if err != nil {
			return fmt.Errorf("check container: %w", err)
		}
		if theirs == ours {
			return fmt.Errorf("check container: it shares the %s namespace of this computer", ns)
		}
	}
	var theirs, expected unix.Stat_t
	if err := unix.Stat(proc+"/root/", &theirs); err != nil {
		return fmt.Errorf("check container: %w", err)
	}
	if err := unix.Stat(root, &expected); err != nil {
		return fmt.Errorf("check container: %w", err)
	}
	if theirs.Dev != expected.Dev || theirs.Ino != expected.Ino {
		return errors.New("check container: its root is not the machine's")
	}
	return nil
}

// create has runc prepare the container up to the start of its first
// process.
func (h *Host) create(ctx context.Context, name string) (process, error) {
	console, err := os.OpenFile(h.Console(name), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return process{}, fmt.Errorf("open console: %w", err)
	}
	defer console.Close()
	unified, err := makeUnified(h.cgroup(name))
	if err != nil {
		return process{}, err
	}
	pidFile := h.path(name, "init.pid")
	if err := h.runcIn(ctx, unified, console, "create", "--bundle", h.path(name, "bundle"), "--pid-file", pidFile, name); err != nil {
		return process{}, err
	}
	b, err := os.ReadFile(pidFile)
	if err != nil {
		return process{}, fmt.Errorf("read number of first process: %w", err)
	}
	pid, err := strconv.Atoi(string(b))
	if err != nil {
		return process{}, fmt.Errorf("read number of first process: %w", err)
	}
	return identify(pid)
}

// runc runs runc and waits for it.
func (h *Host) runc(ctx context.Context, args ...string) error {
	return h.runcIn(ctx, "", nil, args...)
}

// runcIn runs runc in the v2 cgroup, unless that is empty, and waits for it. The container
// inherits output. runc writes its own messages to a log file beside it.
func (h *Host) runcIn(ctx context.Context, cgroup string, output *os.File, args ...string) error {
	log, err := os.CreateTemp(h.dir, ".runc-*.log")
	if err != nil {
		return fmt.Errorf("run runc: %w", err)
	}
	defer os.Remove(log.Name())
	defer log.Close()
	cmd := exec.CommandContext(ctx, tool("runc"), append([]string{"--root", filepath.Join(h.dir, runcDir), "--log", log.Name()}, args...)...)
	if output != nil {
		cmd.Stdout, cmd.Stderr = output, output
	}
	// A separate process group: an interrupt at the terminal must not reach machines.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if cgroup != "" {
		dir, err := os.Open(cgroup)
		if err != nil {
			return fmt.Errorf("run runc: %w", err)
		}
		defer dir.Close()
		cmd.SysProcAttr.UseCgroupFD, cmd.SysProcAttr.CgroupFD = true, int(dir.Fd())
	}
	if err := cmd.Run(); err != nil {
		if ctx.Err() != nil {
			err = ctx.Err()
		}
		words, _ := os.ReadFile(log.Name())
		return fmt.Errorf("runc %s: %w: %s", args[0], err, lastLine(words))
	}
	return nil
}

// powerOff releases all resources of a machine except its disk. It is idempotent, completes an
// interrupted call, and ignores missing resources.
func (h *Host) powerOff(ctx context.Context, r record) error {
	// A frozen process does not die until it is thawed.
	if err := freeze(ctx, h.cgroup(r.Name), false); err != nil {
		return err
	}
	// After a power cut the disk answers no request, so processes that wait for it end
	// only after the disk's process has ended.
	cut := r.Init.alive()
	if err := r.Init.signal(unix.SIGKILL); err != nil {
		return err
	}
	if err := h.etcdDisk(r.Name).powerOff(ctx, cut); err != nil {
		return err
	}
	// The kernel reports the end of the first process after all others of the machine have ended.
	if err := r.Init.stop(ctx, unix.SIGKILL, 0); err != nil {
		return err
	}
	// This also ends a container that was not recorded because of a crash.
	if _, err := os.Lstat(filepath.Join(h.dir, runcDir, r.Name)); err == nil {
		if err := h.runc(ctx, "delete", "--force", r.Name); err != nil {
			return err
		}
	}
	if err := removeCgroups(ctx, h.cgroup(r.Name)); err != nil {
		return err
	}
	if err := unmountBelow(ctx, h.path(r.Name)); err != nil {
		return err
	}
	if err := h.tpm(r.Name).powerOff(ctx); err != nil {
		return err
	}
	return h.portOf(r.Machine).unplug(ctx)
}
