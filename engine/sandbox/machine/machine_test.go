package machine

import (
	"bytes"
	"context"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"
)

func cache(t *testing.T) string {
	t.Helper()
	dir, err := os.UserCacheDir()
	if err != nil {
		t.Fatal(err)
	}
	return filepath.Join(dir, "constellation")
}

func TestDev(t *testing.T) {
	ctx := context.Background()
	start := time.Now()
	rootfs, err := Rootfs(ctx, cache(t), func(p Progress) { t.Log(p.Took.Round(time.Millisecond), p.Text) })
	if err != nil {
		t.Fatal(err)
	}
	t.Log("rootfs", time.Since(start), rootfs)
	script := filepath.Join(t.TempDir(), "script")
	if err := os.WriteFile(script, []byte("#!/bin/sh\nexec sleep infinity\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	start = time.Now()
	image, err := OSImage(ctx, cache(t), rootfs, ImageSpec{Version: "v1.1.0", Bootstrapper: script, Agent: script}, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Log("image", time.Since(start), image)
	h, err := NewHost(t.TempDir(), "dev", slog.New(slog.NewTextHandler(t.Output(), nil)))
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		start := time.Now()
		if err := h.Sweep(ctx); err != nil {
			t.Error(err)
		}
		t.Log("sweep", time.Since(start))
	}()
	if err := h.Network(ctx); err != nil {
		t.Fatal(err)
	}
	start = time.Now()
	if err := h.Start(ctx, Spec{Name: "control-plane-0", IP: netip.MustParseAddr("10.42.0.10"), PodCIDR: netip.MustParsePrefix("10.244.1.0/24"), Image: image,
		Files: map[string]File{"/etc/constellation/environment": {}}}, nil); err != nil {
		t.Fatal(err)
	}
	t.Log("start", time.Since(start))
	wait, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	if err := h.WaitReady(wait, "control-plane-0"); err != nil {
		t.Error(err)
	}
	t.Log("ready", time.Since(start))
	for _, c := range []string{"systemctl is-system-running --wait; systemctl --failed; systemctl list-units --no-pager", "systemd-analyze; systemd-analyze blame | head -30; systemd-analyze critical-chain", "cat /proc/self/status | grep Cap; mount; ls -la /dev; cat /sys/fs/cgroup/devices/devices.list; ip addr; ip route", "ps 2>/dev/null; ls /proc | grep '^[0-9]' | while read p; do echo $p $(tr '\\0' ' ' < /proc/$p/cmdline) $(ls -l /proc/$p/fd 2>/dev/null| grep -c inotify); done; journalctl --no-pager | tail -150"} {
		var out bytes.Buffer
		code, err := h.Exec(ctx, "control-plane-0", []string{"sh", "-c", c}, Stdio{Out: &out, Err: &out})
		t.Log(code, err, "\n"+out.String())
	}
	b, _ := os.ReadFile(h.Console("control-plane-0"))
	t.Log(string(b))
}
