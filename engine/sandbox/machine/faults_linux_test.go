package machine

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"constellation/engine/sandbox/machine/disk"
)

// Two machines get one fault after the other. Each takes effect, ends when it is removed,
// and does not keep the machine from being switched off.
func TestMachinesSufferAndRecover(t *testing.T) {
	b := realMachines(t)
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	if err := b.host.Network(ctx); err != nil {
		t.Fatal(err)
	}
	const one, two = "control-plane-0", "worker-0"
	specs := map[string]Spec{}
	for i, name := range []string{one, two} {
		specs[name] = b.spec(name, byte(i))
		if err := b.host.Start(ctx, specs[name], nil); err != nil {
			t.Fatal(err)
		}
		if err := b.host.WaitReady(ctx, name); err != nil {
			t.Fatal(err)
		}
	}
	setFaults := func(t *testing.T, name string, a Faults) {
		t.Helper()
		for range 2 { // it is idempotent
			if err := b.host.SetFaults(ctx, name, a); err != nil {
				t.Fatal(err)
			}
		}
	}
	// reaches reports whether packets from one machine arrive at another. If they should, it
	// waits longer, since neighbor discovery has to repeat.
	reaches := func(t *testing.T, from, to string, should bool) bool {
		t.Helper()
		address := netip.AddrPortFrom(specs[to].IP, 7000).String()
		var l net.PacketConn
		if err := inNamespace(b.host.namespace(to), func() (err error) {
			l, err = new(net.ListenConfig).ListenPacket(ctx, "udp", address)
			return err
		}); err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		c, err := b.host.DialFrom(ctx, from, "udp", address)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		tries := 10
		if should {
			tries = 100
		}
		for range tries {
			_, _ = c.Write([]byte("hello")) // an error means that nothing arrives
			if err := l.SetReadDeadline(time.Now().Add(100 * time.Millisecond)); err != nil {
				t.Fatal(err)
			}
			if _, _, err := l.ReadFrom(make([]byte, 16)); err == nil {
				return true
			}
		}
		return false
	}
	ways := func(t *testing.T, there, back bool) {
		t.Helper()
		if got := [2]bool{reaches(t, one, two, there), reaches(t, two, one, back)}; got != [2]bool{there, back} {
			t.Errorf("the first reaches the second: %t, the second the first: %t; want %t and %t", got[0], got[1], there, back)
		}
	}
	ways(t, true, true)

	t.Run("what one sends to the other is lost, one way only", func(t *testing.T) {
		setFaults(t, one, Faults{Lost: []Peer{{IP: specs[two].IP, PodCIDR: specs[two].PodCIDR}}})
		ways(t, false, true)
		setFaults(t, one, Faults{})
		ways(t, true, true)
		routes := b.run(t, one, "ip", "route", "show")
		if strings.Contains(routes, specs[two].PodCIDR.String()) || !strings.Contains(routes, "default via "+Gateway.String()) {
			t.Errorf("the routes are\n%s", routes)
		}
	})
	t.Run("a machine without its cable", func(t *testing.T) {
		setFaults(t, one, Faults{Isolated: true})
		ways(t, false, false)
		setFaults(t, one, Faults{})
		ways(t, true, true)
	})
	for _, tt := range []struct {
		a     Faults
		words string
	}{
		{Faults{DiskFull: true}, "No space left on device"},
		{Faults{DiskReadOnly: true}, "Read-only file system"},
	} {
		t.Run("a disk on which is "+tt.words, func(t *testing.T) {
			b.run(t, one, "sh", "-c", "echo before >/usr/local/bin/probe")
			setFaults(t, one, tt.a)
			if got := b.run(t, one, "cat", "/usr/local/bin/probe"); got != "before" {
				t.Errorf("it reads %q", got)
			}
			for _, dir := range spoiled {
				got := b.run(t, one, "sh", "-c", "{ head -c 200000 /dev/zero >"+dir+"/new; } 2>&1 || :")
				if !strings.Contains(got, tt.words) {
					t.Errorf("writing to %s says %q", dir, got)
				}
			}
			setFaults(t, one, Faults{})
			if got := b.run(t, one, "sh", "-c", "echo after >/usr/local/bin/probe; cat /usr/local/bin/probe; findmnt -rno TARGET,SOURCE | grep -c constellation-full || :"); got != "after\n0" {
				t.Errorf("afterwards it says %q", got)
			}
		})
	}
	t.Run("a slow disk that loses unsynced writes", func(t *testing.T) {
		if err := disk.Supported(); err != nil {
			t.Skip(err)
		}
		const sync = "dd if=/dev/zero of=/var/lib/etcd/probe bs=1 count=1 conv=fsync 2>/dev/null; date +%s%N"
		mounted := func(pid int) bool {
			t.Helper()
			b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/mountinfo")
			if err != nil {
				t.Fatal(err)
			}
			return strings.Contains(string(b), "fuse.constellation")
		}
		pid := func() int {
			t.Helper()
			m, err := b.host.Machine(one)
			if err != nil {
				t.Fatal(err)
			}
			return m.PID
		}
		setFaults(t, one, Faults{LostWrites: true})
		if mounted(pid()) {
			t.Error("the disk was exchanged while the machine ran")
		}
		if err := b.host.Reboot(ctx, one, nil); err != nil {
			t.Fatal(err)
		}
		if !mounted(pid()) || mounted(os.Getpid()) {
			t.Errorf("it is mounted in the machine: %t, on this computer: %t", mounted(pid()), mounted(os.Getpid()))
		}
		const slow = 300 * time.Millisecond
		setFaults(t, one, Faults{SlowDisk: slow, LostWrites: true})
		took := func() time.Duration {
			t.Helper()
			times := strings.Fields(b.run(t, one, "sh", "-c", "date +%s%N; "+sync))
			var at [2]int64
			for i := range at {
				n, err := strconv.ParseInt(times[i], 10, 64)
				if err != nil {
					t.Fatal(err)
				}
				at[i] = n
			}
			return time.Duration(at[1] - at[0])
		}
		for took() < slow { // the disk's process gets the change by a signal
			if ctx.Err() != nil {
				t.Fatal("it is not slow")
			}
		}
		b.run(t, one, "sh", "-c", "cd /var/lib/etcd; echo synced >kept; sync kept; echo not >lost; echo not >>kept")
		if err := b.host.Kill(ctx, one); err != nil {
			t.Fatal(err)
		}
		if ps, err := b.host.etcdDisk(one).processes(); err != nil || len(ps) > 0 {
			t.Errorf("of a machine that is off the disk has %d processes, %v", len(ps), err)
		}
		if err := b.host.SetFaults(ctx, one, Faults{}); !errors.Is(err, ErrNotRunning) {
			t.Errorf("a machine that is off: %v", err)
		}
		if err := b.host.Boot(ctx, one, nil); err != nil {
			t.Fatal(err)
		}
		if mounted(pid()) {
			t.Error("the disk fails after the end of the fault")
		}
		if got := b.run(t, one, "sh", "-c", "cd /var/lib/etcd; cat kept; ls"); got != "synced\nkept\nprobe" {
			t.Errorf("the disk has %q", got)
		}
	})
	t.Run("a TPM that does not answer, and one that is gone", func(t *testing.T) {
		states := func() (all []string) {
			ps, err := b.host.tpm(one).processes()
			if err != nil {
				t.Fatal(err)
			}
			for _, p := range ps {
				stat, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(p.PID), "stat"))
				if err != nil {
					t.Fatal(err)
				}
				all = append(all, string(stat[strings.LastIndexByte(string(stat), ')')+2]))
			}
			return all
		}
		until := func(want ...string) {
			t.Helper()
			for !slices.Equal(states(), want) {
				select {
				case <-ctx.Done():
					t.Fatalf("its processes are %q, want %q", states(), want)
				case <-time.After(5 * time.Millisecond):
				}
			}
		}
		setFaults(t, one, Faults{TPMHangs: true})
		until("T")
		setFaults(t, one, Faults{})
		until("S")
		setFaults(t, one, Faults{TPMGone: true})
		until()
		if err := b.host.Reboot(ctx, one, nil); err != nil {
			t.Fatal(err)
		}
		until("S")
	})
	t.Run("a frozen machine does nothing, goes on, and can be killed", func(t *testing.T) {
		b.run(t, two, "sh", "-c", "setsid sh -c 'while :; do echo >>/root/beat; sleep 0.02; done' >/dev/null 2>&1 </dev/null &")
		beat := func() int64 {
			info, err := os.Stat(b.host.path(two, "upper", "root", "beat"))
			if err != nil {
				return 0
			}
			return info.Size()
		}
		beats := func() {
			t.Helper()
			for was := beat(); beat() == was; {
				select {
				case <-ctx.Done():
					t.Fatal("it does not beat")
				case <-time.After(5 * time.Millisecond):
				}
			}
		}
		beats()
		setFaults(t, two, Faults{Frozen: true})
		was := beat()
		time.Sleep(200 * time.Millisecond) // ten times as long as a beat
		if now := beat(); now != was {
			t.Errorf("it went on from %d to %d", was, now)
		}
		setFaults(t, two, Faults{})
		beats()
		setFaults(t, two, Faults{Frozen: true, DiskFull: true})
		if err := b.host.Kill(ctx, two); err != nil {
			t.Fatal(err)
		}
		if err := b.host.Boot(ctx, two, nil); err != nil {
			t.Fatal(err)
		}
		if err := b.host.WaitReady(ctx, two); err != nil {
			t.Fatal(err)
		}
		b.run(t, two, "sh", "-c", "echo ok >/usr/local/bin/probe")
		ways(t, true, true)
	})
	t.Run("files that a machine has written are visible to the host, without those of its image", func(t *testing.T) {
		b.run(t, two, "sh", "-c", "mkdir -p /etc/kubernetes/tmp/a1 /var/lib/etcd/member && echo >/etc/kubernetes/tmp/a1/x && echo >/var/lib/etcd/member/db && ln -s / /etc/kubernetes/tmp/a2")
		for pattern, want := range map[string]int{
			"/etc/kubernetes/tmp/a*/x": 1, "/var/lib/etcd/member/db": 1, "/etc/os-release": 0, "/etc/kubernetes/tmp/a2/etc/passwd": 0,
		} {
			if got, err := b.host.Written(two, pattern); err != nil || len(got) != want {
				t.Errorf("%s: %v, %v, want %d", pattern, got, err, want)
			}
		}
	})
}
