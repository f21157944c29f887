package kubeadm

import (
	"crypto/tls"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"strings"

	"gopkg.in/yaml.v3"
)

// copiesDir has the copies, below the directory for them.
const copiesDir = "renewed"

// renewed are groups of files, below the root, that an upgrade by kubeadm writes: certificates with new keys, kubeconfigs,
// and the kubelet's configuration. kubeadm truncates a file and writes it again, without a sync.
var renewed = func() (out [][]string) {
	for _, name := range []string{"apiserver", "apiserver-etcd-client", "apiserver-kubelet-client", "front-proxy-client", "etcd/server", "etcd/peer", "etcd/healthcheck-client"} {
		at := "etc/kubernetes/pki/" + name
		out = append(out, []string{at + ".crt", at + ".key"})
	}
	for _, name := range []string{"etc/kubernetes/admin.conf", "etc/kubernetes/super-admin.conf", "etc/kubernetes/controller-manager.conf", "etc/kubernetes/scheduler.conf", "var/lib/kubelet/config.yaml", "var/lib/kubelet/instance-config.yaml"} {
		out = append(out, []string{name})
	}
	return out
}()

// whole reports whether the contents of a group are complete: a certificate with its key, or a document.
func whole(content [][]byte) bool {
	if len(content) == 2 {
		_, err := tls.X509KeyPair(content[0], content[1])
		return err == nil
	}
	var doc struct {
		Kind  string `yaml:"kind"`
		Users []any  `yaml:"users"`
	}
	if yaml.Unmarshal(content[0], &doc) != nil || doc.Kind == "" {
		return false
	}
	// kubeadm's kubeconfig ends with its user, and that with the key.
	return doc.Kind != "Config" || len(doc.Users) > 0 && strings.HasSuffix(string(content[0]), "\n")
}

// read returns the contents of a group below dir; fs.ErrNotExist if it has none of the files.
func read(root *os.Root, dir string, group []string) (content [][]byte, err error) {
	missing := 0
	for _, name := range group {
		b, err := root.ReadFile(path.Join(dir, name))
		if errors.Is(err, fs.ErrNotExist) {
			missing++
		} else if err != nil {
			return nil, err
		}
		content = append(content, b)
	}
	if missing == len(group) {
		return nil, fs.ErrNotExist
	}
	return content, nil
}

// KeepRenewed copies the files that an upgrade by kubeadm writes to a directory that is private to root. A group that is not
// complete keeps its earlier copy. root is the host's.
func KeepRenewed(root, copies *os.Root) error {
	var all error
	for _, group := range renewed {
		content, err := read(root, ".", group)
		if errors.Is(err, fs.ErrNotExist) || err == nil && !whole(content) {
			continue
		}
		for i, name := range group {
			if err == nil {
				err = putSynced(copies, path.Join(copiesDir, name), content[i])
			}
		}
		if err != nil {
			all = errors.Join(all, fmt.Errorf("copy %s: %w", group[0], err))
		}
	}
	return all
}

// RestoreRenewed puts the copies of files back that a power cut left incomplete: an empty certificate, or that of another
// key. Without them etcd or the API server of the host does not start, and kubeadm does not mend that. It returns the first
// file of each group that it put back. No kubeadm may run meanwhile.
func RestoreRenewed(root, copies *os.Root) (restored []string, all error) {
	for _, group := range renewed {
		content, err := read(root, ".", group)
		if err == nil && whole(content) || errors.Is(err, fs.ErrNotExist) {
			continue // a group that somebody removed stays away
		}
		if err == nil {
			content, err = read(copies, copiesDir, group)
		}
		if errors.Is(err, fs.ErrNotExist) || err == nil && !whole(content) {
			continue
		}
		for i, name := range group {
			if err == nil {
				err = putSynced(root, name, content[i])
			}
		}
		if err != nil {
			all = errors.Join(all, fmt.Errorf("restore %s: %w", group[0], err))
			continue
		}
		restored = append(restored, "/"+group[0])
	}
	return restored, all
}

// ForgetRenewed removes the copies, after it has written to disk what they are of.
func ForgetRenewed(root, copies *os.Root) error {
	for _, group := range renewed {
		for _, name := range group {
			f, err := root.Open(name)
			if errors.Is(err, fs.ErrNotExist) {
				continue
			}
			if err == nil {
				err = errors.Join(f.Sync(), f.Close())
			}
			if err != nil {
				return fmt.Errorf("write %s to disk: %w", name, err)
			}
		}
	}
	return copies.RemoveAll(copiesDir)
}

// putSynced writes a file, whole or not at all, with the mode of the one that it replaces.
func putSynced(root *os.Root, name string, content []byte) error {
	mode := fs.FileMode(0o600)
	if info, err := root.Stat(name); err == nil {
		mode = info.Mode().Perm()
	}
	if err := root.MkdirAll(path.Dir(name), 0o700); err != nil {
		return err
	}
	tmp := path.Join(path.Dir(name), "."+path.Base(name)+".tmp")
	f, err := root.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, mode)
	if err != nil {
		return err
	}
	_, err = f.Write(content)
	if err = errors.Join(err, f.Sync(), f.Close()); err == nil {
		err = root.Rename(tmp, name)
	}
	if err != nil {
		return errors.Join(err, root.Remove(tmp))
	}
	return nil
}
