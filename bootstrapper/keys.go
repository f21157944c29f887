package bootstrapper

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"constellation/engine/attestation/certifier/signer"
	"constellation/engine/attestation/keyprocess"
	"constellation/engine/kms"
	"constellation/engine/kms/plugin"
	"constellation/engine/kubeadm"
	"constellation/internal/delay"
)

// secretKeys are the keys that an init or a ticket brings a control plane, each for a process of its own. Nil: the cluster has none.
type secretKeys struct {
	certifier []byte // for RunCertifier
	kms       []byte // for RunKeyService
}

// storeKeys seals the keys, and records their fingerprints. It removes the keys of an earlier attempt to initialize the cluster. awaited
// is the fingerprint of the keys of the key service, which may come later; empty: any.
func (b *bootstrapper) storeKeys(ctx context.Context, clusterID []byte, keys secretKeys, awaited string) error {
	ids := map[string]string{}
	if awaited != "" {
		ids[keyprocess.KeyService] = awaited
	}
	if err := b.makeEncryptionDir(); err != nil {
		return err
	}
	for _, k := range keyKinds() {
		if err := removeAll(b.state, k.file); err != nil {
			return err
		}
		if len(k.of(keys)) == 0 {
			continue
		}
		id, err := k.fingerprint(k.of(keys))
		if err != nil {
			return err
		}
		if err := k.store(ctx, b.m.StateDir, b.m.TPM, clusterID, k.of(keys)); err != nil {
			return err
		}
		ids[k.process] = id
	}
	return b.writeKeyIDs(ids)
}

// makeEncryptionDir makes the directory of the API server's configuration, which the unit of the key service may write only if it exists
// when that starts.
func (b *bootstrapper) makeEncryptionDir() error {
	root, err := os.OpenRoot(b.m.Root)
	if err == nil {
		err = root.MkdirAll(strings.TrimPrefix(kubeadm.HardeningDir, "/"), 0o755)
		err = errors.Join(err, root.Close())
	}
	if err != nil {
		return fmt.Errorf("make directory for the configuration of the API server: %w", err)
	}
	return nil
}

// encryption returns the mode in which the API server of a machine with a root directory stores Secrets; empty if none is configured, or an
// unknown one.
func encryption(root string) (kubeadm.Encryption, error) {
	r, err := os.OpenRoot(root)
	if err != nil {
		return "", err
	}
	defer r.Close()
	for _, mode := range []kubeadm.Encryption{kubeadm.Encrypt, kubeadm.Decrypt, kubeadm.AwaitKeys} {
		for name, want := range kubeadm.EncryptionFiles(mode) {
			have, err := r.ReadFile(strings.TrimPrefix(name, "/"))
			if errors.Is(err, fs.ErrNotExist) {
				return "", nil
			}
			if err != nil {
				return "", fmt.Errorf("read configuration of the API server: %w", err)
			}
			if bytes.Equal(have, want) {
				return mode, nil
			}
		}
	}
	return "", nil
}

// setEncryption has the API server of a machine store Secrets in a mode. It reads a changed file within a minute.
func setEncryption(root string, mode kubeadm.Encryption) (changed bool, err error) {
	if mode != kubeadm.Encrypt && mode != kubeadm.Decrypt {
		return false, fmt.Errorf("mode of encryption is %.20q, want %s or %s", mode, kubeadm.Encrypt, kubeadm.Decrypt)
	}
	have, err := encryption(root)
	switch {
	case err != nil || have == mode:
		return false, err
	case have == "":
		return false, errors.New("the API server of this machine has no configuration of encryption that this release knows")
	}
	return true, host{root: root}.write(hostFiles(kubeadm.EncryptionFiles(mode)))
}

// encrypts reports whether the API server of this machine encrypts Secrets.
func (b *bootstrapper) encrypts() (bool, error) {
	_, err := b.state.Lstat(kms.SealedFile)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("find the keys of the key service: %w", err)
	}
	return true, nil
}

const (
	// keyServiceTimeout bounds how long the start of an API server waits for the key service. A TPM may take seconds.
	keyServiceTimeout = 30 * time.Second
	keyServicePoll    = 100 * time.Millisecond
)

// awaitKeyService waits until the key service of this machine answers, if it has one. An API server would start without it, too, but
// notices it ten seconds late.
func (b *bootstrapper) awaitKeyService(ctx context.Context) error {
	if ok, err := b.encrypts(); !ok || err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, keyServiceTimeout)
	defer cancel()
	for first := true; ; first = false {
		_, err := kms.Client{Socket: b.m.KeysSocket}.Ready(ctx)
		if err == nil {
			return nil
		}
		if first {
			b.m.Log.Info("waiting for the key service", "err", err)
		}
		if !delay.For(ctx, keyServicePoll) {
			return fmt.Errorf("wait for the key service: %w", err)
		}
	}
}

// RunCertifier serves the join service of this machine at a socket until ctx ends, with the keys that an init or a ticket brought. It
// is for a process of its own, which needs no network. m needs StateDir, TPM, Root and Log alone.
func RunCertifier(ctx context.Context, m Machine, socket string) error {
	h, err := openKeys(m)
	if err != nil {
		return err
	}
	s, err := signer.Open(ctx, signer.Config{Dir: m.StateDir, TPM: m.TPM, ClusterID: h.clusterID(), Log: m.Log})
	if err != nil {
		return err
	}
	l, err := listenForKeys(ctx, m, socket)
	if err != nil {
		return err
	}
	if m.Ready != nil {
		m.Ready()
	}
	return s.Serve(ctx, l[0])
}

// RunKeyService serves the API server of this machine at a socket, and its join service at m.KeysSocket, like RunCertifier.
func RunKeyService(ctx context.Context, m Machine, socket string) error {
	h, err := openKeys(m)
	if err != nil {
		return err
	}
	if m.Root == "" {
		m.Root = "/"
	}
	set := func(mode string) (bool, error) { return setEncryption(m.Root, kubeadm.Encryption(mode)) }
	s, err := plugin.Open(ctx, plugin.Config{Dir: m.StateDir, TPM: m.TPM, ClusterID: h.clusterID(), SetEncryption: set, Log: m.Log})
	if err != nil {
		return err
	}
	// Its keys came after the machine joined.
	if mode, err := encryption(m.Root); err != nil {
		return err
	} else if mode == kubeadm.AwaitKeys {
		if _, err := setEncryption(m.Root, kubeadm.Decrypt); err != nil {
			return err
		}
		m.Log.Info("API server may read encrypted Secrets")
	}
	l, err := listenForKeys(ctx, m, socket, m.KeysSocket)
	if err != nil {
		return err
	}
	if m.Ready != nil {
		m.Ready()
	}
	return s.Serve(ctx, l[0], l[1])
}

// openKeys prepares a process with keys, and returns the holder of the machine.
func openKeys(m Machine) (*holder, error) {
	if err := keyprocess.Protect(); err != nil {
		return nil, err
	}
	state, err := os.OpenRoot(m.StateDir)
	if err != nil {
		return nil, fmt.Errorf("open state directory: %w", err)
	}
	h, err := readHolder(state)
	if err = errors.Join(err, state.Close()); err != nil {
		return nil, err
	}
	if h == nil {
		return nil, errors.New("this machine belongs to no cluster")
	}
	return h, nil
}

// listenForKeys makes sockets, each in a directory that only root may enter.
func listenForKeys(ctx context.Context, m Machine, sockets ...string) ([]net.Listener, error) {
	var out []net.Listener
	for _, socket := range sockets {
		err := os.MkdirAll(filepath.Dir(socket), 0o700)
		var l net.Listener
		if err == nil {
			l, err = keyprocess.Listen(ctx, socket, m.Log)
		}
		if err != nil {
			for _, l := range out {
				l.Close()
			}
			return nil, fmt.Errorf("serve keys: %w", err)
		}
		out = append(out, l)
	}
	return out, nil
}
