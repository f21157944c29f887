package bootstrapper

import (
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"math/big"
	"net"
	"os"
	"os/exec"
	"path"
	"slices"
	"strings"
	"time"

	"constellation/engine/component"
	"constellation/engine/kubeadm"
	"constellation/engine/registry"
	"constellation/internal/pemkey"
)

const (
	// servingTTL and clockSkew equal those of the join service.
	servingTTL = 90 * 24 * time.Hour
	clockSkew  = 10 * time.Minute
)

// host has the operations of an init and a join on this machine.
type host struct {
	root      string
	installer *component.Installer
	kubeadm   kubeadm.Runner
}

// hostFile is a file that must exist before kubeadm runs.
type hostFile struct {
	path string // absolute
	data []byte
	mode fs.FileMode
}

// write writes files, each atomically.
func (h host) write(files []hostFile) error {
	root, err := os.OpenRoot(h.root)
	if err != nil {
		return fmt.Errorf("open the host's file system: %w", err)
	}
	defer root.Close()
	for _, f := range files {
		name := strings.TrimPrefix(f.path, "/")
		if err := root.MkdirAll(path.Dir(name), 0o755); err != nil {
			return fmt.Errorf("write %s: %w", f.path, err)
		}
		if err := replaceFile(root, name, f.data, f.mode); err != nil {
			return err
		}
	}
	return nil
}

// hostFiles are files of package kubeadm, which root alone reads.
func hostFiles(m map[string][]byte) []hostFile {
	var files []hostFile
	for _, name := range slices.Sorted(maps.Keys(m)) {
		files = append(files, hostFile{name, m[name], 0o600})
	}
	return files
}

// forgetEncryption removes what a former cluster of this machine wrote for its API server.
func (h host) forgetEncryption() error {
	root, err := os.OpenRoot(h.root)
	if err != nil {
		return fmt.Errorf("open the file system: %w", err)
	}
	defer root.Close()
	files := kubeadm.EncryptionFiles(kubeadm.Encrypt)
	maps.Copy(files, kubeadm.EncryptionPatch())
	for name := range files {
		if err := root.Remove(strings.TrimPrefix(name, "/")); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("remove configuration of a former API server: %w", err)
		}
	}
	return nil
}

// registryFiles are the settings of the container runtime for r; none without an address.
func registryFiles(r registry.Registry) []hostFile {
	if r.Address == "" {
		return nil
	}
	var files []hostFile
	for _, f := range r.MachineFiles() {
		files = append(files, hostFile{f.Path, f.Data, f.Mode})
	}
	return files
}

// init runs kubeadm init. The kubelet's serving certificate is signed by the cluster's CA, so
// both are created before kubeadm starts the kubelet.
func (h host) init(ctx context.Context, c kubeadm.Cluster, n kubeadm.Node, lines func(kubeadm.Line)) error {
	config, err := kubeadm.NewInit(c, n)
	if err != nil {
		return err
	}
	patches, err := kubeadm.HostPatches(h.root)
	if err != nil {
		return err
	}
	config = config.WithPatches(patches)
	if err := h.forgetEncryption(); err != nil {
		return err
	}
	files := kubeadm.ControlPlaneFiles()
	if c.EncryptSecrets {
		maps.Copy(files, kubeadm.EncryptionFiles(kubeadm.Encrypt))
	}
	if err := h.write(hostFiles(files)); err != nil {
		return err
	}
	if err := h.kubeadm.CreateCA(ctx, config, lines); err != nil {
		return err
	}
	if err := h.signServing(n, time.Now()); err != nil {
		return err
	}
	if err := h.kubeadm.Init(ctx, config, lines); err != nil {
		return err
	}
	h.hideKubelet(lines)
	return nil
}

// hideKubelet makes the kubelet's configuration readable for root alone. kubeadm writes it for everybody, and an
// upgrade keeps the mode of a file. A node works without that.
func (h host) hideKubelet(lines func(kubeadm.Line)) {
	root, err := os.OpenRoot(h.root)
	if err == nil {
		for _, name := range []string{"var/lib/kubelet/config.yaml", "var/lib/kubelet/kubeadm-flags.env"} {
			if e := root.Chmod(name, 0o600); e != nil && !errors.Is(e, fs.ErrNotExist) {
				err = e
			}
		}
		err = errors.Join(err, root.Close())
	}
	if err != nil {
		lines(kubeadm.Line{Level: slog.LevelWarn, Text: "restrict the kubelet's configuration: " + err.Error()})
	}
}

// untouched reports whether nothing of a cluster is on this machine: no kubelet configuration,
// no static pods, and no etcd data. A kubeadm init that failed in its preflight leaves it so.
// An unreadable path counts as a trace.
func (h host) untouched() bool {
	root, err := os.OpenRoot(h.root)
	if err != nil {
		return false
	}
	defer root.Close()
	for _, name := range []string{"etc/kubernetes/kubelet.conf", "etc/kubernetes/manifests", "var/lib/etcd"} {
		i, err := root.Stat(name)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil || !i.IsDir() {
			return false
		}
		if entries, err := fs.ReadDir(root.FS(), name); err != nil || len(entries) > 0 {
			return false
		}
	}
	return true
}

// signServing creates the kubelet's serving certificate with the cluster's CA, like the join
// service does for all other nodes.
func (h host) signServing(n kubeadm.Node, now time.Time) error {
	root, err := os.OpenRoot(h.root)
	if err != nil {
		return fmt.Errorf("open the host's file system: %w", err)
	}
	defer root.Close()
	ca, signer, err := readAuthority(root)
	if err != nil {
		return err
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return fmt.Errorf("generate the kubelet's key: %w", err)
	}
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127))
	if err != nil {
		return fmt.Errorf("sign the kubelet's certificate: %w", err)
	}
	until := now.Add(servingTTL)
	if until.After(ca.NotAfter) {
		until = ca.NotAfter
	}
	der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{
		SerialNumber: serial,
		Subject:      nodeSubject(n.Name),
		DNSNames:     []string{n.Name}, IPAddresses: []net.IP{n.IP.AsSlice()},
		NotBefore: now.Add(-clockSkew), NotAfter: until,
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		BasicConstraintsValid: true,
	}, ca, key.Public(), signer)
	if err != nil {
		return fmt.Errorf("sign the kubelet's certificate: %w", err)
	}
	files, err := servingFiles(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), key)
	if err != nil {
		return err
	}
	return h.write(files)
}

// servingFiles are the kubelet's serving key and certificate.
func servingFiles(certificate []byte, key *ecdsa.PrivateKey) ([]hostFile, error) {
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, fmt.Errorf("encode the kubelet's key: %w", err)
	}
	return []hostFile{
		{kubeadm.KubeletCertFile, certificate, 0o644},
		{kubeadm.KubeletKeyFile, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}), 0o600},
	}, nil
}

// nodeSubject is the subject of a kubelet's certificate.
func nodeSubject(name string) pkix.Name {
	return pkix.Name{CommonName: "system:node:" + name, Organization: []string{"system:nodes"}}
}

// readAuthority reads the CA that kubeadm created. Its errors contain nothing of the content.
func readAuthority(root *os.Root) (*x509.Certificate, crypto.Signer, error) {
	dir := strings.TrimPrefix(kubeadm.PKIDir, "/")
	b, err := root.ReadFile(dir + "/ca.crt")
	if err != nil {
		return nil, nil, fmt.Errorf("read the cluster's authority: %w", err)
	}
	block, _ := pem.Decode(b)
	if block == nil {
		return nil, nil, errors.New("read the cluster's authority: ca.crt is not PEM")
	}
	cert, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		return nil, nil, fmt.Errorf("read the cluster's authority: %w", err)
	}
	if b, err = root.ReadFile(dir + "/ca.key"); err != nil {
		return nil, nil, fmt.Errorf("read the cluster's authority: %w", err)
	}
	if key, ok := pemkey.Parse(b); ok {
		return cert, key, nil
	}
	return nil, nil, errors.New("read the cluster's authority: ca.key contains no private key")
}

// startKubelet starts the kubelet of a member with systemd.
func startKubelet(ctx context.Context) error {
	out, err := exec.CommandContext(ctx, "systemctl", "start", "--no-block", "kubelet.service").CombinedOutput()
	if err != nil {
		return fmt.Errorf("start the kubelet: %w: %s", err, strings.TrimSpace(string(out)))
	}
	return nil
}
