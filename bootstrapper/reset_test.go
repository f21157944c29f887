package bootstrapper

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"constellation/engine/cloud"
	"constellation/internal/testneeds"
)

func TestResetAndAReboot(t *testing.T) {
	r := newRig(t, cloud.ControlPlane)
	x := r.start()
	if _, err := collect(r.console(x.addr).Init(t.Context(), r.request(clusterA))); err != nil {
		t.Fatal(err)
	}
	x.stop(t)
	etcd := filepath.Join(r.m.Root, "var/lib/etcd/member/wal")
	os.MkdirAll(etcd, 0o700)
	outside := filepath.Join(r.ctl, "outside")
	os.WriteFile(outside, nil, 0o600)
	os.Symlink(outside, filepath.Join(r.m.Root, "var/lib/kubelet/link"))

	var said []string
	unused, err := Reset(t.Context(), r.m, func(l string) { said = append(said, l) })
	if err != nil || unused {
		t.Errorf("unused %t, %v: register 15 is still set", unused, err)
	}
	if !strings.HasSuffix(r.calls(), " reset") || !strings.Contains(strings.Join(said, "\n"), "[reset] Stopping the kubelet service") {
		t.Errorf("kubeadm was called with %s; output %q", r.calls(), said)
	}
	for _, dir := range nodeDirs {
		if e, err := os.ReadDir(filepath.Join(r.m.Root, dir)); err == nil && len(e) > 0 {
			t.Errorf("%s still contains %v", dir, e)
		}
	}
	if e, _ := os.ReadDir(r.m.StateDir); len(e) != 1 || e[0].Name() != lockFileName {
		t.Errorf("state still contains %v", e)
	}
	if !exists(outside) {
		t.Error("followed a symbolic link")
	}
	// Not before the machine was restarted.
	if err := r.start().end(t); !errors.Is(err, ErrStuck) || !strings.Contains(err.Error(), "restart the machine") {
		t.Errorf("without a restart: %v", err)
	}
	r.tpm.reboot()
	if unused, err := Reset(t.Context(), r.m, func(string) {}); err != nil || !unused {
		t.Errorf("reset of an unused machine: %t %v", unused, err)
	}
	x = r.start()
	if got, err := collect(r.console(x.addr).Init(t.Context(), r.request(clusterB))); err != nil || outline(got) != goodInit {
		t.Errorf("a second init: %s, %v", outline(got), err)
	}
	x.stop(t)
}

func TestResetThatFailsKeepsTheClaim(t *testing.T) {
	r := newRig(t, cloud.ControlPlane)
	x := r.start()
	if _, err := collect(r.console(x.addr).Init(t.Context(), r.request(clusterA))); err != nil {
		t.Fatal(err)
	}
	x.stop(t)
	r.script("fail-reset", "1")
	if _, err := Reset(t.Context(), r.m, func(string) {}); err == nil || !strings.Contains(err.Error(), "kubeadm reset") {
		t.Errorf("got %v", err)
	}
	if h, held := r.holder(); !held || h.State != member {
		t.Errorf("holder %+v", h)
	}
	testneeds.Root(t, "to mount a file system")
	below := filepath.Join(r.m.Root, "var/lib/kubelet/pods/x")
	os.MkdirAll(below, 0o700)
	if err := syscall.Mount("tmpfs", below, "tmpfs", 0, "size=64k"); err != nil {
		t.Skip("cannot mount: ", err)
	}
	defer syscall.Unmount(below, syscall.MNT_DETACH)
	os.WriteFile(filepath.Join(below, "precious"), nil, 0o600)
	// The scripted reset removes the tree as it can; the mount stays.
	if _, err := Reset(t.Context(), r.m, func(string) {}); err == nil || !strings.Contains(err.Error(), "is mounted below it") {
		t.Errorf("with a mount below: %v", err)
	}
	if _, held := r.holder(); !held {
		t.Error("the claim was removed although the reset has failed")
	}
}
