package bootstrapper

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"strings"

	"github.com/moby/sys/mountinfo"

	"constellation/engine/kubeadm"
	"constellation/internal/journal"
)

// nodeDirs are directories with files of Kubernetes and this package that kubeadm does not
// remove. Only their contents are removed, since some are mounts.
var nodeDirs = []string{
	"/etc/kubernetes", "/var/lib/etcd", "/var/lib/kubelet", "/var/log/kubernetes",
}

// Reset removes the node from its cluster: kubeadm undoes its changes, and everything that
// belongs to the cluster is removed from the disk, the claim last, so that an interrupted
// reset can be repeated. It needs no Metadata, Issuer or Roots.
//
// unused reports whether the machine looks unused now. Only a restart clears register 15 of a
// TPM: after a reset, such a machine must be rebooted, or replaced, before it can become a node
// again. An enrolled machine without a TPM is unused at once.
func Reset(ctx context.Context, m Machine, say func(line string)) (unused bool, err error) {
	b, err := open(m)
	if err != nil {
		return false, err
	}
	defer b.close()
	return b.reset(ctx, say)
}

// reset is Reset with the state directory open.
func (b *bootstrapper) reset(ctx context.Context, say func(line string)) (unused bool, err error) {
	if err := emptyDir(b.m.RunDir); err != nil {
		return false, err
	}
	if b.host.kubeadm.Installed() {
		if err := b.host.kubeadm.Reset(ctx, func(l kubeadm.Line) { say(lineText(l)) }); err != nil {
			return false, err
		}
	}
	root, err := os.OpenRoot(b.m.Root)
	if err != nil {
		return false, fmt.Errorf("open the host's file system: %w", err)
	}
	defer root.Close()
	for _, dir := range nodeDirs {
		if err := empty(root, b.m.Root, dir); err != nil {
			return false, err
		}
		say("cleared " + dir)
	}
	if err := b.forget(); err != nil {
		return false, err
	}
	pcrs, err := b.m.registers.read(ctx, clusterRegister)
	if err != nil {
		return false, fmt.Errorf("read register 15: %w", err)
	}
	return len(bytes.Trim(pcrs[clusterRegister], "\x00")) == 0, nil
}

// forget removes all files of this package and register 15 where software can, the claim last.
func (b *bootstrapper) forget() error {
	entries, err := fs.ReadDir(b.state.FS(), ".")
	if err != nil {
		return fmt.Errorf("clear state: %w", err)
	}
	for _, e := range entries {
		if e.Name() == holderFile || e.Name() == lockFileName {
			continue
		}
		if err := b.state.RemoveAll(e.Name()); err != nil {
			return fmt.Errorf("clear state: %w", err)
		}
	}
	if err := journal.SyncDir(b.state); err != nil {
		return fmt.Errorf("clear state: %w", err)
	}
	// A crash in between leaves a claim with a zero register 15, as after a reboot.
	if err := b.m.registers.clear(); err != nil {
		return fmt.Errorf("clear register 15: %w", err)
	}
	return removeAll(b.state, holderFile)
}

// empty removes the content of dir, or fails if anything is mounted below it.
func empty(root *os.Root, base, dir string) error {
	name := strings.TrimPrefix(dir, "/")
	d, err := root.OpenRoot(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("clear %s: %w", dir, err)
	}
	defer d.Close()
	full := path.Join(base, name)
	below, err := mountinfo.GetMounts(func(i *mountinfo.Info) (skip, stop bool) {
		return !strings.HasPrefix(i.Mountpoint, full+"/"), false
	})
	if err != nil {
		return fmt.Errorf("clear %s: %w", dir, err)
	}
	if len(below) > 0 {
		return fmt.Errorf("clear %s: %s is mounted below it; unmount it, or restart the machine, and reset again", dir, below[0].Mountpoint)
	}
	entries, err := fs.ReadDir(d.FS(), ".")
	if err != nil {
		return fmt.Errorf("clear %s: %w", dir, err)
	}
	for _, e := range entries {
		if err := d.RemoveAll(e.Name()); err != nil {
			return fmt.Errorf("clear %s: %w", dir, err)
		}
	}
	return nil
}
