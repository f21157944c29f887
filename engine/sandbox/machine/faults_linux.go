package machine

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/moby/sys/mountinfo"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// SetFaults injects the faults in a into a running machine and removes all others; the zero value
// removes all, except that a missing TPM stays missing. It is idempotent. Faults end when the
// machine is switched off, except those of its disk, which can also be set while the machine
// is off. The error wraps ErrNotFound or ErrNotRunning.
func (h *Host) SetFaults(ctx context.Context, name string, a Faults) error {
	unlock, err := h.change(name)
	if err != nil {
		return fmt.Errorf("set faults of machine: %w", err)
	}
	defer unlock()
	r, err := h.read(name)
	if err == nil {
		err = h.etcdDisk(name).set(a.diskSettings())
	}
	if err == nil && !r.Init.alive() {
		err = ErrNotRunning
	}
	if err == nil {
		err = h.setFaults(ctx, r, a)
	}
	if err != nil {
		return fmt.Errorf("set faults of machine %s: %w", name, err)
	}
	return nil
}

func (h *Host) setFaults(ctx context.Context, r record, a Faults) error {
	if err := h.portOf(r.Machine).cut(a.Isolated, a.Lost); err != nil {
		return err
	}
	if err := h.tpm(r.Name).setFault(ctx, a.TPMHangs, a.TPMGone); err != nil {
		return err
	}
	want := ""
	switch {
	case a.DiskFull:
		want = diskFull
	case a.DiskReadOnly:
		want = diskReadOnly
	}
	is, err := spoiledBy(r.Init.PID)
	if err != nil {
		return err
	}
	if is != want {
		if err := freeze(ctx, h.cgroup(r.Name), false); err != nil { // no command runs in a frozen machine
			return err
		}
		if err := h.spoil(ctx, r.Name, is, want); err != nil {
			return err
		}
	}
	return freeze(ctx, h.cgroup(r.Name), a.Frozen)
}

// freeze stops or resumes all processes of a cgroup. The kernel has completed that when
// it returns.
func freeze(ctx context.Context, cgroup string, frozen bool) error {
	dirs, err := findCgroups(cgroup)
	if err != nil {
		return err
	}
	for _, dir := range dirs {
		// With v1 one hierarchy has the first file. With v2 every cgroup has the second.
		for _, f := range []struct{ file, on, off string }{{"freezer.state", "FROZEN", "THAWED"}, {"cgroup.freeze", "1", "0"}} {
			want := f.off
			if frozen {
				want = f.on
			}
			path := filepath.Join(dir, f.file)
			for wait := time.Millisecond; ; wait = min(2*wait, 50*time.Millisecond) {
				b, err := os.ReadFile(path)
				if errors.Is(err, fs.ErrNotExist) {
					break
				}
				if err != nil {
					return fmt.Errorf("freeze: %w", err)
				}
				if strings.TrimSpace(string(b)) == want {
					break
				}
				if err := os.WriteFile(path, []byte(want), 0); err != nil {
					return fmt.Errorf("freeze: %w", err)
				}
				select {
				case <-ctx.Done():
					return fmt.Errorf("freeze: %w", ctx.Err())
				case <-time.After(wait):
				}
			}
		}
	}
	return nil
}

// unusedMAC is a hardware address that no machine has: frames to it are dropped without
// an error.
var unusedMAC = net.HardwareAddr{0x02, 0x42, 0x00, 0x00, 0xde, 0xad}

// cut disconnects the machine from the bridge or connects it, and drops its packets to the
// given peers and their pods, and to no others. All changes are in namespaces of the sandbox.
func (p port) cut(isolated bool, lost []Peer) error {
	hub, hubNS, err := handleAt(p.hub)
	if err != nil {
		return err
	}
	defer hubNS.Close()
	defer hub.Close()
	cable, err := hub.LinkByName(p.name())
	if err == nil && isolated {
		err = hub.LinkSetDown(cable)
	} else if err == nil {
		err = hub.LinkSetUp(cable)
	}
	if err != nil {
		return fmt.Errorf("cut %s: %w", p.ip, err)
	}
	inside, insideNS, err := handleAt(p.machine)
	if err != nil {
		return err
	}
	defer insideNS.Close()
	defer inside.Close()
	eth0, err := inside.LinkByName("eth0")
	if err != nil {
		return fmt.Errorf("cut %s: %w", p.ip, err)
	}
	index := eth0.Attrs().Index
	there, err := inside.NeighList(index, unix.AF_INET)
	if err != nil {
		return fmt.Errorf("cut %s: %w", p.ip, err)
	}
	for _, n := range there {
		ip, _ := netip.AddrFromSlice(n.IP)
		if n.HardwareAddr.String() != unusedMAC.String() || slices.ContainsFunc(lost, func(l Peer) bool { return l.IP == ip.Unmap() }) {
			continue
		}
		if err := inside.NeighDel(&n); err != nil && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("mend way from %s to %s: %w", p.ip, ip, err)
		}
		routes, err := inside.RouteListFiltered(unix.AF_INET, &netlink.Route{Gw: n.IP, LinkIndex: index}, netlink.RT_FILTER_GW|netlink.RT_FILTER_OIF)
		if err != nil {
			return fmt.Errorf("mend way from %s to %s: %w", p.ip, ip, err)
		}
		for _, r := range routes {
			if r.Dst == nil || r.Dst.IP.IsUnspecified() { // the default route is not ours
				continue
			}
			if err := inside.RouteDel(&r); err != nil && !errors.Is(err, unix.ESRCH) {
				return fmt.Errorf("mend way from %s to %s: %w", p.ip, ip, err)
			}
		}
	}
	for _, l := range lost {
		if err := inside.NeighSet(&netlink.Neigh{LinkIndex: index, Family: unix.AF_INET, State: netlink.NUD_PERMANENT, IP: l.IP.AsSlice(), HardwareAddr: unusedMAC}); err != nil {
			return fmt.Errorf("cut way from %s to %s: %w", p.ip, l.IP, err)
		}
		if !l.PodCIDR.IsValid() {
			continue
		}
		// Otherwise the bridge would deliver packets to its pods.
		if err := inside.RouteReplace(&netlink.Route{LinkIndex: index, Dst: ipNet(l.PodCIDR), Gw: l.IP.AsSlice()}); err != nil {
			return fmt.Errorf("cut way from %s to %s: %w", p.ip, l.PodCIDR, err)
		}
	}
	return nil
}

// setFault suspends a TPM process at an arbitrary point, or resumes it; or ends it until the
// machine is switched on again.
func (t tpm) setFault(ctx context.Context, hangs, gone bool) error {
	if gone {
		return t.powerOff(ctx)
	}
	ps, err := t.processes()
	if err != nil {
		return err
	}
	sig := unix.SIGCONT
	if hangs {
		sig = unix.SIGSTOP
	}
	for _, p := range ps {
		if err := p.signal(sig); err != nil {
			return fmt.Errorf("stop TPM: %w", err)
		}
	}
	return nil
}

// Disk faults. The values are the sources of the mounts.
const (
	diskFull     = "full"
	diskReadOnly = "read-only"
)

// spoiled are the directories of a machine that disk faults make full or read-only: those of
// installed programs, of kubeadm, and of our programs' state. Files that are already
// open are not affected.
var spoiled = []string{"/usr/local/bin", "/etc/kubernetes", "/var/lib/constellation"}

// spoiledBy returns the current fault of a machine's disk, according to its mounts.
func spoiledBy(pid int) (string, error) {
	f, err := os.Open(fmt.Sprintf("/proc/%d/mountinfo", pid))
	if err != nil {
		return "", fmt.Errorf("look at mounts of machine: %w", err)
	}
	defer f.Close()
	infos, err := mountinfo.GetMountsFromReader(f, nil)
	if err != nil {
		return "", fmt.Errorf("look at mounts of machine: %w", err)
	}
	for _, m := range infos {
		if m.Mountpoint != spoiled[0] {
			continue
		}
		if m.Source == "constellation-"+diskFull {
			return diskFull, nil
		}
		return diskReadOnly, nil
	}
	return "", nil
}

// spoil removes the current fault of a machine's disk and injects another one.
func (h *Host) spoil(ctx context.Context, name, is, want string) error {
	script := "set -e\n"
	for i, dir := range spoiled {
		full := "/run/constellation-full/" + strconv.Itoa(i)
		if is != "" {
			script += fmt.Sprintf("if mountpoint -q %[1]s; then umount -l %[1]s; fi\nif mountpoint -q %[2]s; then umount -l %[2]s; fi\n", dir, full)
		}
		switch want {
		case diskFull:
			// The original directory is below a full layer: existing files stay readable.
			script += fmt.Sprintf("mkdir -p %[1]s %[2]s\nmount -t tmpfs -o size=64k constellation-full %[2]s\nmkdir %[2]s/upper %[2]s/work\n"+
				"mount -t overlay -o lowerdir=%[1]s,upperdir=%[2]s/upper,workdir=%[2]s/work constellation-full %[1]s\nhead -c 1M /dev/zero >%[2]s/fill 2>/dev/null || :\n", dir, full)
		case diskReadOnly:
			script += fmt.Sprintf("mkdir -p %[1]s\nmount --bind %[1]s %[1]s\nmount -o remount,bind,ro %[1]s\n", dir)
		}
	}
	var out strings.Builder
	code, err := h.Exec(ctx, name, []string{"/bin/sh", "-c", script}, Stdio{Out: &out, Err: &out})
	if err == nil && code != 0 {
		err = fmt.Errorf("spoil disk: exit code %d: %s", code, lastLine([]byte(out.String())))
	}
	return err
}

// Written lists the files of a machine's disk that match a pattern of [filepath.Match] and are
// not part of its image. The pattern is an absolute path in the machine.
func (h *Host) Written(name, pattern string) ([]string, error) {
	dir, rest := h.path(name, "upper"), strings.TrimPrefix(pattern, "/")
	for _, d := range diskDirs {
		if below, ok := strings.CutPrefix(pattern, d.path+"/"); ok {
			dir, rest = h.path(name, diskDir("disk", d.path)), below
		}
	}
	root, err := os.OpenRoot(dir) // symbolic links in the machine cannot leave it
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("look at disk of machine %s: %w", name, err)
	}
	defer root.Close()
	return fs.Glob(root.FS(), rest)
}
