//go:build linux

package agent

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"gopkg.in/yaml.v3"

	"constellation/agent/upgradeproto"
	"constellation/engine/kubeadm"
	"constellation/engine/version"
	"constellation/internal/delay"
)

// programTimeout is how long a program may take to print its version.
const programTimeout = 10 * time.Second

// busyPause separates attempts to run a program whose file is still open for writing.
const busyPause = 10 * time.Millisecond

// Host is the agent's host. The zero value is this one.
type Host struct {
	// Root is the root of the host's file system. Empty means "/".
	Root string
	// Name is the name of the host. Empty means the kernel's.
	Name string
	// Address is where the host's own kubelet, API server and etcd listen. Empty means 127.0.0.1.
	Address string
	// StateDir stores the runs. Empty means /var/lib/constellation/agent below Root.
	StateDir string
	// KubeadmTimeout bounds one run of kubeadm; zero means ten minutes.
	KubeadmTimeout time.Duration
	// InstallTimeout bounds the installation of components; zero means two hours.
	InstallTimeout time.Duration
	// RestartKubelet restarts the kubelet after its installation; nil means systemctl.
	RestartKubelet func(context.Context) error
	// KubeletHealth is the URL of the kubelet's health. Empty means the kubelet's default.
	KubeletHealth string
	// APIHealth is the URL of the readiness of a control plane's API server. Empty means
	// kubeadm's default.
	APIHealth string
	// APICalm is how long it must be ready without interruption; zero means 10 s.
	APICalm time.Duration
	// Programs is the PATH of the host's apt-get, dpkg and systemctl. Empty means that of a distribution, if Root is "/".
	Programs string
	// Runtime is the socket of the host's container runtime. Empty means containerd's default.
	Runtime string
	// PackagesWait is how long another program may have the lock of the packages; zero means two minutes.
	PackagesWait time.Duration
	// Etcd is the access to the host's member of etcd. Its zero value is kubeadm's default.
	Etcd Etcd
}

// local returns the URL of a port of the host itself.
func (h Host) local(scheme, port, path string) string {
	address := h.Address
	if address == "" {
		address = "127.0.0.1"
	}
	return scheme + "://" + net.JoinHostPort(address, port) + path
}

func (h Host) stateDir() string {
	if h.StateDir == "" {
		return h.path("var/lib/constellation/agent")
	}
	return h.StateDir
}

func (h Host) path(elem ...string) string {
	root := h.Root
	if root == "" {
		root = "/"
	}
	return filepath.Join(append([]string{root}, elem...)...)
}

// Status reads the state of the host. A missing part is left empty; an unreadable one is an
// error.
func (h Host) Status(ctx context.Context) (*upgradeproto.StatusResponse, error) {
	r := &upgradeproto.StatusResponse{AgentVersion: version.Release}
	var err error
	if r.ImageVersion, err = h.imageVersion(); err != nil {
		return nil, err
	}
	if r.BootId, err = h.bootID(); err != nil {
		return nil, err
	}
	if r.KubeadmVersion, err = programVersion(ctx, h.path("usr/local/bin/kubeadm"), "version", "-o", "short"); err != nil {
		return nil, err
	}
	if r.KubeletVersion, err = programVersion(ctx, h.path("usr/local/bin/kubelet"), "--version"); err != nil {
		return nil, err
	}
	if r.StaticPods, err = h.staticPods(); err != nil {
		return nil, err
	}
	switch _, err := os.Stat(h.path("etc/kubernetes/kubelet.conf")); {
	case errors.Is(err, fs.ErrNotExist):
		return r, nil // belongs to no cluster
	case err != nil:
		return nil, fmt.Errorf("stat the kubelet's credentials: %w", err)
	}
	if r.NodeName, err = h.nodeName(); err != nil {
		return nil, err
	}
	r.Role = "worker"
	for _, name := range controlPlane { // one of them may be in transition to another version
		if _, ok := r.StaticPods[name]; ok {
			r.Role = "control-plane"
		}
	}
	return r, nil
}

// nodeName returns the name of the host, which is that of its Node.
func (h Host) nodeName() (string, error) {
	if h.Name != "" {
		return h.Name, nil
	}
	name, err := os.Hostname()
	if err != nil {
		return "", fmt.Errorf("read the host's name: %w", err)
	}
	return name, nil
}

// imageVersion reads IMAGE_VERSION of os-release(5).
func (h Host) imageVersion() (string, error) {
	b, err := os.ReadFile(h.path("etc/os-release"))
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	if err != nil {
		return "", fmt.Errorf("read the image version: %w", err)
	}
	sc := bufio.NewScanner(bytes.NewReader(b))
	for sc.Scan() {
		if v, ok := strings.CutPrefix(sc.Text(), "IMAGE_VERSION="); ok {
			return strings.Trim(v, `"'`), nil
		}
	}
	return "", sc.Err()
}

// bootID returns the kernel's name of the host's boot; empty if Root has no such file.
func (h Host) bootID() (string, error) {
	b, err := os.ReadFile(h.path("proc/sys/kernel/random/boot_id"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return "", fmt.Errorf("read the boot's ID: %w", err)
	}
	return strings.TrimSpace(string(b)), nil
}

var versionPattern = regexp.MustCompile(`v[0-9]+\.[0-9]+\.[0-9]+[0-9A-Za-z.+-]*`)

// programVersion runs program and returns the first version that it prints. A missing program
// has none.
func programVersion(ctx context.Context, program string, args ...string) (string, error) {
	if _, err := os.Stat(program); errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	ctx, cancel := context.WithTimeout(ctx, programTimeout)
	defer cancel()
	out, err := exec.CommandContext(ctx, program, args...).Output()
	// A process that was forked while the program was being written keeps its file open until its own
	// exec. Until then the kernel refuses to run the program (golang.org/issue/22315).
	for errors.Is(err, syscall.ETXTBSY) && delay.For(ctx, busyPause) {
		if again, failed := exec.CommandContext(ctx, program, args...).Output(); failed == nil || ctx.Err() == nil { // else the first error names the cause
			out, err = again, failed
		}
	}
	if err != nil {
		return "", fmt.Errorf("read version of %s: %w", program, err)
	}
	v := versionPattern.FindString(string(out))
	if v == "" {
		return "", fmt.Errorf("read version of %s: no version in its output", program)
	}
	return v, nil
}

// customized returns the configuration of an upgrade with the host's own options: its patches
// and its UpgradeConfiguration.
func (h Host) customized(c kubeadm.Config) (kubeadm.Config, error) {
	patches, err := kubeadm.HostPatches(h.path())
	if err != nil {
		return c, err
	}
	c = c.WithPatches(patches)
	file := h.path(kubeadm.UpgradeFile)
	b, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		return c, nil
	}
	if err == nil {
		c, err = c.WithHost(b)
	}
	if err != nil {
		return c, fmt.Errorf("read %s: %w", file, err)
	}
	return c, nil
}

// staticPods maps the containers of the host's static pods to their images.
func (h Host) staticPods() (map[string]string, error) {
	dir := h.path("etc/kubernetes/manifests")
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list static pods: %w", err)
	}
	images := map[string]string{}
	for _, e := range entries {
		if e.IsDir() || filepath.Ext(e.Name()) != ".yaml" || strings.HasPrefix(e.Name(), ".") {
			continue // the kubelet ignores them too
		}
		b, err := os.ReadFile(filepath.Join(dir, e.Name()))
		if err != nil {
			return nil, fmt.Errorf("read static pod: %w", err)
		}
		var pod struct {
			Spec struct {
				Containers []struct{ Name, Image string }
			}
		}
		if err := yaml.Unmarshal(b, &pod); err != nil {
			return nil, fmt.Errorf("parse static pod %s: %w", e.Name(), err)
		}
		for _, c := range pod.Spec.Containers {
			images[c.Name] = c.Image
		}
	}
	return images, nil
}

// toStatus gives an error of the host its gRPC code.
func toStatus(err error) error {
	var etcd rpctypes.EtcdError
	switch _, known := status.FromError(err); {
	case known:
		return err
	case errors.Is(err, context.Canceled):
		return status.Error(codes.Canceled, err.Error())
	case errors.Is(err, context.DeadlineExceeded):
		return status.Error(codes.DeadlineExceeded, err.Error())
	case errors.Is(err, fs.ErrPermission):
		return status.Error(codes.PermissionDenied, err.Error())
	case errors.Is(err, syscall.ENOSPC):
		return status.Error(codes.ResourceExhausted, err.Error())
	case errors.As(err, &etcd) && etcd.Code() != codes.Unknown:
		return status.Error(etcd.Code(), err.Error())
	}
	return status.Error(codes.Unavailable, err.Error())
}
