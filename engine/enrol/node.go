package enrol

import (
	"context"
	"debug/elf"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"constellation/assets"
	"constellation/engine/plan"
	"constellation/engine/sshhost"
)

// Paths on a machine that is a node or waits to become one.
const (
	Bootstrapper    = "/usr/lib/constellation/bootstrapper"
	Agent           = "/usr/lib/constellation/agent"
	EnvironmentFile = "/etc/constellation/environment"

	unitsDir         = "/etc/systemd/system/"
	bootstrapperUnit = "constellation-bootstrapper.service"
)

// keyUnits start processes with keys on a control plane whose cluster has them. Each has a service of its name.
var keyUnits = []string{"constellation-certifier.path", "constellation-kms.path"}

// containerd's configuration, where the machine has that of its package or none. The kubelet needs the
// control groups of systemd, and network plugins install themselves in /opt/cni/bin.
const containerdConfig = `# Written by constellation: this machine is enrolled for a cluster.
version = 2

[plugins."io.containerd.grpc.v1.cri".cni]
  bin_dir = "/opt/cni/bin"
  conf_dir = "/etc/cni/net.d"

[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"

  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
    SystemdCgroup = true

[plugins."io.containerd.grpc.v1.cri".registry]
  config_path = "/etc/containerd/certs.d"
`

// plugins are the network plugins of the package containernetworking-plugins.
var plugins = []string{
	"bandwidth", "bridge", "dhcp", "firewall", "host-device", "host-local", "ipvlan", "loopback", "macvlan", "portmap", "ptp", "sbr", "static", "tuning", "vlan", "vrf",
}

// Programs are the files of this computer that a node runs.
type Programs struct{ Bootstrapper, Agent string }

// architectures are the names of architectures: as `uname -m` prints them, as releases call them, and as files have them.
var architectures = []struct {
	uname, name string
	machine     elf.Machine
}{
	{"x86_64", "amd64", elf.EM_X86_64},
	{"aarch64", "arm64", elf.EM_AARCH64},
}

// Architectures are those that releases have programs for, as `uname -m` prints them.
func Architectures() (out []string) {
	for _, a := range architectures {
		out = append(out, a.uname)
	}
	return out
}

// FindPrograms finds the programs of a release for the architecture that `uname -m` calls arch. Beside this
// program, releases/RELEASE has those of its own architecture. dir is another folder with them; it is the
// only one that is searched, unless it is empty.
func FindPrograms(dir, release, arch string) (Programs, error) {
	op := "find the programs of " + release
	name, want := "", elf.EM_NONE
	for _, a := range architectures {
		if a.uname == arch {
			name, want = a.name, a.machine
		}
	}
	if name == "" {
		return Programs{}, &plan.Error{Op: op, Err: fmt.Errorf("there are none for the architecture %s", sshhost.Text([]byte(arch))), Remedy: "use a machine with amd64 or arm64"}
	}
	dirs := []string{dir}
	if dir == "" {
		exe, err := os.Executable()
		if err == nil {
			exe, err = filepath.EvalSymlinks(exe)
		}
		if err != nil {
			return Programs{}, &plan.Error{Op: op, Err: err, Remedy: "name their folder with --programs"}
		}
		dirs = []string{filepath.Join(filepath.Dir(exe), "releases", release)}
	}
	dirs = append(dirs, filepath.Join(dirs[0], "linux_"+name), filepath.Join(dirs[0], "releases", release))
	var why error
	for _, d := range dirs {
		p := Programs{filepath.Join(d, "bootstrapper"), filepath.Join(d, "agent")}
		err := errors.Join(isProgram(p.Bootstrapper, want), isProgram(p.Agent, want))
		if err == nil {
			return p, nil
		}
		if why == nil || !errors.Is(err, fs.ErrNotExist) {
			why = err
		}
	}
	if j, ok := why.(interface{ Unwrap() []error }); ok {
		why = j.Unwrap()[0]
	}
	return Programs{}, &plan.Error{
		Op: op + " for linux/" + name, Err: why, Exit: plan.ExitUsage,
		Remedy: fmt.Sprintf("unpack constellation_%s_linux_%s.tar.gz of this release, and name its folder with --programs; in a source tree run `make build`", strings.TrimPrefix(release, "v"), name),
	}
}

// isProgram checks that a file is a program for Linux on this architecture.
func isProgram(file string, want elf.Machine) error {
	f, err := elf.Open(file)
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return err
		}
		return fmt.Errorf("read %s: %w", file, err)
	}
	defer f.Close()
	if f.Machine != want {
		return fmt.Errorf("%s is a program for %s", file, f.Machine)
	}
	return nil
}

// Node completes the Spec of a machine that is to become a node: programs, units, containerd. The Spec has
// the names and the files of the cluster.
func Node(s Spec, p Programs) (Spec, error) {
	own := s.Files
	s.Files = []File{{Path: Bootstrapper, Mode: 0o755, Local: p.Bootstrapper}, {Path: Agent, Mode: 0o755, Local: p.Agent}}
	for _, u := range []struct{ asset, path string }{
		{bootstrapperUnit, unitsDir + bootstrapperUnit},
		{"constellation-agent.service", unitsDir + "constellation-agent.service"},
		{"kubelet.service", unitsDir + "kubelet.service"},
		{"10-kubeadm.conf", unitsDir + "kubelet.service.d/10-kubeadm.conf"},
	} {
		b, err := fs.ReadFile(assets.Systemd(), u.asset)
		if err != nil {
			return Spec{}, fmt.Errorf("read unit: %w", err)
		}
		s.Files = append(s.Files, File{Path: u.path, Mode: 0o644, Data: b})
	}
	s.Files = append(s.Files, File{Path: "/etc/containerd/config.toml", Mode: 0o644, Data: []byte(containerdConfig), Default: "containerd", Needs: "SystemdCgroup = true there, and bin_dir with the network plugins"})
	for _, name := range plugins {
		s.Files = append(s.Files, File{Path: "/opt/cni/bin/" + name, Link: "/usr/lib/cni/" + name, Keep: true})
	}
	s.Files = append(s.Files, own...)
	s.Packages = []Package{{"containerd", "/usr/bin/containerd"}, {"runc", "/usr/sbin/runc"}, {"containernetworking-plugins", "/usr/lib/cni/loopback"}}
	s.Units = []Unit{{Name: "containerd.service", Start: true}, {Name: "kubelet.service"}, {Name: "constellation-agent.service", Start: true}, {Name: bootstrapperUnit, Start: true}}
	s.Trees = []string{
		"/var/lib/constellation", "/var/lib/constellation-identity", "/usr/lib/constellation", "/etc/constellation", "/run/constellation-agent", "/run/constellation-bootstrapper",
		"/etc/kubernetes", "/var/lib/kubelet", "/var/lib/etcd", "/var/log/pods", "/var/log/containers", "/var/log/kubernetes", "/usr/libexec/kubernetes", unitsDir + "kubelet.service.d",
		"/var/lib/containerd", "/etc/containerd/certs.d", "/opt/containerd", "/etc/cni", "/var/lib/cni", "/opt/cni",
		"/usr/local/bin/kubeadm", "/usr/local/bin/kubelet", "/usr/local/bin/kubectl", "/usr/local/bin/crictl",
	}
	return s, s.validate()
}

// ResetNode takes a node out of its cluster and deletes what belongs to it. The bootstrapper is stopped.
// Without the bootstrapper there is nothing to reset.
func ResetNode(ctx context.Context, m Machine) error {
	_, err := resetNode(ctx, m)
	return err
}

// resetNode is ResetNode, and reports whether the machine must be restarted before it can be a node again.
func resetNode(ctx context.Context, m Machine) (restart bool, err error) {
	op := "reset " + m.Target().String()
	ctx, cancel := context.WithTimeoutCause(ctx, packageLimit, &plan.Error{Op: op, Err: errors.New("it did not end within " + packageLimit.String()), Remedy: "read `journalctl` on the machine, then run the same command again"})
	defer cancel()
	r, err := m.Run(ctx, sshhost.Command{Argv: inEnvironment("reset"), Root: true})
	if err != nil {
		return false, err
	}
	if err := r.Err(); err != nil {
		return false, &plan.Error{Op: op, Err: err, Remedy: "mend it on the machine, then run the same command again"}
	}
	return strings.Contains(string(r.Stdout), "Register 15 of the TPM"), nil
}
