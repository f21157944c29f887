package kubeadm

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"
)

// Where kubeadm has static pods and what it leaves of upgrades, below the root.
const (
	manifestsDir = "etc/kubernetes/manifests"
	tmpDir       = "etc/kubernetes/tmp"
)

// staticPods are those of a control plane; etcd may be elsewhere.
var staticPods = []string{"etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler"}

// leftovers are prefixes of what upgrades leave in tmpDir, etcd's whole data among it.
var leftovers = []string{"kubeadm-backup-manifests-", "kubeadm-backup-etcd-", "kubeadm-upgraded-manifests", "kubeadm-kubelet-config", "kubeadm-kubelet-env"}

// RestoreManifests puts static pods back that an interrupted upgrade lost: between
// two moves of kubeadm a manifest is in its backup and nowhere else, and kubeadm never
// mends that. It returns the names of those that it put back. No kubeadm may run
// meanwhile. A static pod without a backup is left out, and a host without any is no
// control plane. root is the host's.
func RestoreManifests(root *os.Root) ([]string, error) {
	backups, err := newestFirst(root, leftovers[0])
	if err != nil {
		return nil, fmt.Errorf("restore static pods: %w", err)
	}
	var restored, missing []string
	for _, pod := range staticPods {
		if _, err := root.Lstat(path.Join(manifestsDir, pod+".yaml")); errors.Is(err, fs.ErrNotExist) {
			missing = append(missing, pod)
		} else if err != nil {
			return nil, fmt.Errorf("restore static pods: %w", err)
		}
	}
	if len(missing) == len(staticPods) {
		return nil, nil
	}
	for _, pod := range missing {
		name := pod + ".yaml"
		for _, b := range backups {
			err := restore(root, path.Join(tmpDir, b, name), name)
			if errors.Is(err, fs.ErrNotExist) {
				continue
			}
			if err != nil {
				return restored, fmt.Errorf("restore static pod %s: %w", pod, err)
			}
			restored = append(restored, pod)
			break
		}
	}
	return restored, nil
}

// restore copies a manifest to its place, whole or not at all.
func restore(root *os.Root, from, name string) error {
	src, err := root.Open(from)
	if err != nil {
		return err
	}
	defer src.Close()
	tmp := path.Join(manifestsDir, "."+name+".restored") // kubelets ignore it
	dst, err := root.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return fmt.Errorf("write it: %s", bareMessage(err)) // not fs.ErrNotExist of the source
	}
	_, err = io.Copy(dst, src)
	if err = errors.Join(err, dst.Sync(), dst.Close()); err != nil {
		return errors.Join(err, root.Remove(tmp))
	}
	return root.Rename(tmp, path.Join(manifestsDir, name))
}

// RemoveOldBackups removes what upgrades left behind, but the newest of each sort.
func RemoveOldBackups(root *os.Root) error {
	for _, prefix := range leftovers {
		found, err := newestFirst(root, prefix)
		if err != nil {
			return fmt.Errorf("remove old backups: %w", err)
		}
		for _, name := range found[min(1, len(found)):] {
			if err := root.RemoveAll(path.Join(tmpDir, name)); err != nil {
				return fmt.Errorf("remove old backups: %w", err)
			}
		}
	}
	return nil
}

// newestFirst lists what has the prefix in tmpDir.
func newestFirst(root *os.Root, prefix string) ([]string, error) {
	entries, err := fs.ReadDir(root.FS(), tmpDir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	type dated struct {
		name string
		time int64
	}
	var found []dated
	for _, e := range entries {
		if i, err := e.Info(); err == nil && strings.HasPrefix(e.Name(), prefix) {
			found = append(found, dated{e.Name(), i.ModTime().UnixNano()})
		}
	}
	// Names end in a time of a second's grain.
	slices.SortFunc(found, func(a, b dated) int { return cmp.Or(cmp.Compare(b.time, a.time), cmp.Compare(b.name, a.name)) })
	names := make([]string, len(found))
	for i, f := range found {
		names[i] = f.name
	}
	return names, nil
}

func bareMessage(err error) string {
	var p *fs.PathError
	if errors.As(err, &p) {
		err = p.Err
	}
	return err.Error()
}
