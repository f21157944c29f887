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

// Afflict makes a running machine suffer from a, and from nothing else; the zero value
// heals it, but for a TPM that is gone. Repeating it changes nothing. What it suffers ends
// when it is switched off, too, but for its disk; how that fails may be said of a machine
// that is off. The error wraps ErrNotFound or ErrNotRunning.
func (h *Host) Afflict(ctx context.Context, name string, a Affliction) error {
	unlock, err := h.change(name)
	if err != nil {
		return fmt.Errorf("afflict machine: %w", err)
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
		err = h.afflict(ctx, r, a)
	}
	if err != nil {
		return fmt.Errorf("afflict machine %s: %w", name, err)
	}
	return nil
}

func (h *Host) afflict(ctx context.Context, r record, a Affliction) error {
	if err := h.portOf(r.Machine).cut(a.Isolated, a.Lost); err != nil {
		return err
	}
	if err := h.tpm(r.Name).afflict(ctx, a.TPMHangs, a.TPMGone); err != nil {
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
		if err := freeze(ctx, h.cgroup(r.Name), false); err != nil { // nothing can be run in it otherwise
			return err
		}
		if err := h.spoil(ctx, r.Name, is, want); err != nil {
			return err
		}
	}
	return freeze(ctx, h.cgroup(r.Name), a.Frozen)
}

// freeze stops all processes of a cgroup, or lets them go on. The kernel has done so when
// it returns.
func freeze(ctx context.Context, cgroup string, frozen bool) error {
	dirs, err := findCgroups(cgroup)
	if err != nil {
		return err
	}
	for _, dir := range dirs {
		// v1 has the first file in one hierarchy; v2 has the second in all of its own.
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

// nobody is a hardware address that no machine has: what is sent to it is lost, and whoever
// sends it does not get to know.
var nobody = net.HardwareAddr{0x02, 0x42, 0x00, 0x00, 0xde, 0xad}

// cut takes the machine's cable out of the bridge or puts it in, and loses what it sends to
// some peers and their pods, and to no others. All of it is in namespaces of the sandbox.
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
		if n.HardwareAddr.String() != nobody.String() || slices.ContainsFunc(lost, func(l Peer) bool { return l.IP == ip.Unmap() }) {
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
			if r.Dst == nil || r.Dst.IP.IsUnspecified() { // the default route, which is not ours
				continue
			}
			if err := inside.RouteDel(&r); err != nil && !errors.Is(err, unix.ESRCH) {
				return fmt.Errorf("mend way from %s to %s: %w", p.ip, ip, err)
			}
		}
	}
	for _, l := range lost {
		if err := inside.NeighSet(&netlink.Neigh{LinkIndex: index, Family: unix.AF_INET, State: netlink.NUD_PERMANENT, IP: l.IP.AsSlice(), HardwareAddr: nobody}); err != nil {
			return fmt.Errorf("cut way from %s to %s: %w", p.ip, l.IP, err)
		}
		if !l.PodCIDR.IsValid() {
			continue
		}
		// Otherwise the bridge would bring what is for its pods.
		if err := inside.RouteReplace(&netlink.Route{LinkIndex: index, Dst: ipNet(l.PodCIDR), Gw: l.IP.AsSlice()}); err != nil {
			return fmt.Errorf("cut way from %s to %s: %w", p.ip, l.PodCIDR, err)
		}
	}
	return nil
}

// afflict stops a TPM in the middle of whatever it does, or lets it go on; or ends it, for
// as long as its machine is on.
func (t tpm) afflict(ctx context.Context, hangs, gone bool) error {
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

// What can be done to a machine's disk; the words are the sources of the mounts.
const (
	diskFull     = "full"
	diskReadOnly = "read-only"
)

// spoiled are the directories of a machine whose disk can be full or read-only: where what
// is installed, what kubeadm writes, and what our own programs remember lie. A file that is
// open already does not get to know.
var spoiled = []string{"/usr/local/bin", "/etc/kubernetes", "/var/lib/constellation"}

// spoiledBy says what was done to a machine's disk, by its own mounts.
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

// spoil takes from a machine's disk what was done to it, and does something else to it.
func (h *Host) spoil(ctx context.Context, name, is, want string) error {
	script := "set -e\n"
	for i, dir := range spoiled {
		full := "/run/constellation-full/" + strconv.Itoa(i)
		if is != "" {
			script += fmt.Sprintf("if mountpoint -q %[1]s; then umount -l %[1]s; fi\nif mountpoint -q %[2]s; then umount -l %[2]s; fi\n", dir, full)
		}
		switch want {
		case diskFull:
			// The directory under a layer that is full: what is there can be read.
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

// Written lists the files of a machine's disk that match a pattern of [filepath.Match], an
// absolute path as the machine sees it, and that are not of its image.
func (h *Host) Written(name, pattern string) ([]string, error) {
	dir, rest := h.path(name, "upper"), strings.TrimPrefix(pattern, "/")
	for _, d := range diskDirs {
		if below, ok := strings.CutPrefix(pattern, d.path+"/"); ok {
			dir, rest = h.path(name, diskDir("disk", d.path)), below
		}
	}
	root, err := os.OpenRoot(dir) // no link in the machine leads out of it
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("look at disk of machine %s: %w", name, err)
	}
	defer root.Close()
	return fs.Glob(root.FS(), rest)
}
