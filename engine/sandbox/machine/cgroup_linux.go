package machine

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// cgroupParent is the directory of all sandboxes' cgroups. It exists in every hierarchy,
// below the cgroup of the process that starts machines. It is relative for runc, so that
// machines stay under the limits of that process.
const cgroupParent = "constellation"

// cgroupMounts lists the mount points of cgroup hierarchies: one on a host with
// cgroup v2, one per controller with v1, and possibly both.
func cgroupMounts() ([]string, error) {
	infos, err := mountinfo.GetMounts(mountinfo.FSTypeFilter("cgroup", "cgroup2"))
	if err != nil {
		return nil, fmt.Errorf("list cgroup hierarchies: %w", err)
	}
	var dirs []string
	for _, m := range infos {
		// Machines mount hierarchies below their own roots, in their own namespaces.
		// Only the mounts of this computer count.
		if strings.HasPrefix(m.Mountpoint, "/sys/fs/cgroup") {
			dirs = append(dirs, m.Mountpoint)
		}
	}
	return dirs, nil
}

// findCgroups returns the directories constellation/<path> in all hierarchies,
// below any parent cgroup.
func findCgroups(path string) ([]string, error) {
	mounts, err := cgroupMounts()
	if err != nil {
		return nil, err
	}
	suffix := "/" + cgroupParent + "/" + path
	var found []string
	for _, m := range mounts {
		err := filepath.WalkDir(m, func(p string, d fs.DirEntry, err error) error {
			if err != nil {
				if errors.Is(err, fs.ErrNotExist) {
					return nil // it was removed during the walk
				}
				return err
			}
			if !d.IsDir() {
				return nil
			}
			if strings.HasSuffix(p, suffix) {
				found = append(found, p)
				return fs.SkipDir
			}
			return nil
		})
		if err != nil {
			return nil, fmt.Errorf("find cgroups: %w", err)
		}
	}
	return found, nil
}

// cgroupProcesses lists the processes of a cgroup and its descendants.
func cgroupProcesses(dir string) ([]int, error) {
	var pids []int
	err := filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		if err != nil || d.Name() != "cgroup.procs" {
			return ignoreGone(err)
		}
		b, err := os.ReadFile(p)
		if err != nil {
			return ignoreGone(err)
		}
		for f := range strings.FieldsSeq(string(b)) {
			pid, err := strconv.Atoi(f)
			if err != nil {
				return err
			}
			pids = append(pids, pid)
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("list processes of %s: %w", dir, err)
	}
	return pids, nil
}

// ignoreGone drops the errors of reading a removed or threaded
// cgroup.
func ignoreGone(err error) error {
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENODEV) || errors.Is(err, unix.EOPNOTSUPP) {
		return nil
	}
	return err
}

// emptyCgroup kills the processes in the cgroup and waits until they are gone.
func emptyCgroup(ctx context.Context, dir string) error {
	for wait := time.Millisecond; ; wait = min(2*wait, 100*time.Millisecond) {
		pids, err := cgroupProcesses(dir)
		if err != nil {
			return err
		}
		if len(pids) == 0 {
			return nil
		}
		for _, pid := range pids {
			if pid <= 1 || pid == os.Getpid() {
				return fmt.Errorf("empty cgroup %s: process %d does not belong there", dir, pid)
			}
			p, err := identify(pid)
			if err != nil {
				continue // it has ended meanwhile
			}
			// The number may belong to another process since it was read from the cgroup.
			if now, err := cgroupProcesses(dir); err != nil || !slices.Contains(now, pid) {
				continue
			}
			if err := p.signal(unix.SIGKILL); err != nil {
				return err
			}
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("empty cgroup %s: %d processes do not end: %w", dir, len(pids), ctx.Err())
		case <-time.After(wait):
		}
	}
}

// removeCgroups kills all processes in constellation/<path> and removes these directories
// in all hierarchies.
func removeCgroups(ctx context.Context, path string) error {
	dirs, err := findCgroups(path)
	if err != nil {
		return err
	}
	for _, dir := range dirs {
		if err := emptyCgroup(ctx, dir); err != nil {
			return err
		}
		if err := removeCgroup(ctx, dir); err != nil {
			return err
		}
		if parent := filepath.Dir(dir); filepath.Base(parent) == cgroupParent {
			// If other sandboxes use it, rmdir fails, as intended.
			_ = unix.Rmdir(parent)
		}
	}
	return nil
}

// removeCgroup removes a cgroup and its descendants, the deepest first.
func removeCgroup(ctx context.Context, dir string) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("remove cgroup: %w", err)
	}
	for _, e := range entries {
		if e.IsDir() {
			if err := removeCgroup(ctx, filepath.Join(dir, e.Name())); err != nil {
				return err
			}
		}
	}
	// A cgroup is busy for a moment after its last process has ended.
	for wait := time.Millisecond; ; wait = min(2*wait, 100*time.Millisecond) {
		err := unix.Rmdir(dir)
		if err == nil || errors.Is(err, unix.ENOENT) {
			return nil
		}
		if !errors.Is(err, unix.EBUSY) {
			return fmt.Errorf("remove cgroup %s: %w", dir, err)
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("remove cgroup %s: %w", dir, err)
		case <-time.After(wait):
		}
	}
}

// ownCgroup returns the directory of this process's cgroup in the hierarchy of a v1
// controller, or in that of v2 for "". It returns "" if this computer has no such
// hierarchy.
func ownCgroup(controller string) (string, error) {
	fsType := "cgroup"
	if controller == "" {
		fsType = "cgroup2"
	}
	infos, err := mountinfo.GetMounts(mountinfo.FSTypeFilter(fsType))
	if err != nil {
		return "", fmt.Errorf("find cgroup: %w", err)
	}
	b, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return "", fmt.Errorf("find cgroup: %w", err)
	}
	for _, m := range infos {
		if !strings.HasPrefix(m.Mountpoint, "/sys/fs/cgroup") || controller != "" && !slices.Contains(strings.Split(m.VFSOptions, ","), controller) {
			continue
		}
		for line := range strings.Lines(string(b)) {
			// number:controllers:path, without controllers for v2
			f := strings.SplitN(strings.TrimSpace(line), ":", 3)
			if len(f) == 3 && slices.Contains(strings.Split(f[1], ","), controller) {
				return filepath.Join(m.Mountpoint, strings.TrimPrefix(f[2], strings.TrimSuffix(m.Root, "/"))), nil
			}
		}
	}
	return "", nil
}

// onlyUnified reports whether this computer has cgroup v2 and no hierarchy of v1.
func onlyUnified() (bool, error) {
	v1, err := mountinfo.GetMounts(mountinfo.FSTypeFilter("cgroup"))
	if err != nil {
		return false, fmt.Errorf("find cgroup: %w", err)
	}
	return !slices.ContainsFunc(v1, func(m *mountinfo.Info) bool { return strings.HasPrefix(m.Mountpoint, "/sys/fs/cgroup") }), nil
}

// makeUnified makes a machine's cgroup in the v2 hierarchy of a computer that also has v1,
// and returns its directory; "" if the computer does not have both. runc ignores that
// hierarchy then, and systemd in the machine would take over this computer's
// cgroups.
func makeUnified(path string) (string, error) {
	v1, err := ownCgroup("memory")
	if err != nil || v1 == "" {
		return "", err
	}
	v2, err := ownCgroup("")
	if err != nil || v2 == "" {
		return "", err
	}
	dir := filepath.Join(v2, cgroupParent, path)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", fmt.Errorf("make cgroup: %w", err)
	}
	return dir, nil
}

// machineDevices are the devices that runc permits in every container: mknod of any node, but
// access only to harmless ones.
var machineDevices = []string{
	"c *:* m", "b *:* m",
	"c 1:3 rwm", "c 1:5 rwm", "c 1:7 rwm", "c 1:8 rwm", "c 1:9 rwm", // null, zero, full, random, urandom
	"c 5:0 rwm", "c 5:2 rwm", "c 136:* rwm", // tty, ptmx, terminals
	"c 10:200 rwm", // tun, in the machine's own network
}

// restrictDevices denies other devices to the cgroup above all machines of a sandbox.
// runc denies them to each machine too, but with cgroup v1 root in a machine could
// permit itself everything that the parent cgroup permits. With v2 it cannot. Calls
// must not be concurrent.
func restrictDevices(sandbox string) error {
	own, err := ownCgroup("devices")
	if err != nil || own == "" {
		return err
	}
	dir := filepath.Join(own, cgroupParent, sandbox)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("restrict devices: %w", err)
	}
	list, err := os.ReadFile(filepath.Join(dir, "devices.list"))
	if err != nil {
		return fmt.Errorf("restrict devices: %w", err)
	}
	if !strings.HasPrefix(string(list), "a ") {
		return nil // done before the first machine, or the parent denies more
	}
	// The parent may be restricted itself. Then fewer devices can be permitted.
	for _, rule := range append([]string{"a"}, machineDevices...) {
		file := "devices.allow"
		if rule == "a" {
			file = "devices.deny"
		}
		if err := os.WriteFile(filepath.Join(dir, file), []byte(rule), 0); err != nil && file == "devices.deny" {
			return fmt.Errorf("restrict devices: %w", err)
		}
	}
	return nil
}

// limitMemory limits the memory of all machines of a sandbox, whose cgroups exist.
// Zero means no limit.
func limitMemory(sandbox string, bytes int64) error {
	if bytes <= 0 {
		return nil
	}
	dirs, err := findCgroups(sandbox)
	if err != nil {
		return err
	}
	for _, dir := range dirs {
		for _, file := range []string{"memory.max", "memory.limit_in_bytes"} {
			err := os.WriteFile(filepath.Join(dir, file), strconv.AppendInt(nil, bytes, 10), 0)
			if err == nil {
				return nil
			}
			// Only the memory controller's hierarchy has the file. Elsewhere it cannot be created.
			if !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, fs.ErrPermission) {
				return fmt.Errorf("limit memory of all machines: %w", err)
			}
		}
	}
	return errors.New("limit memory of all machines: this computer has no memory controller for them")
}
