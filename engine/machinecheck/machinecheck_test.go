package machinecheck

import (
	"bytes"
	"context"
	"encoding/pem"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"constellation/engine/cloud"
	"constellation/engine/plan"
	"constellation/engine/sshhost"
	"constellation/engine/sshhost/sshdtest"
	"constellation/internal/testneeds"
)

const mark = "recorded"

// recorded returns an answer of testdata with replaced lines: an edit "KEY VALUE" replaces all lines of
// the key, "KEY" deletes them, and "+KEY VALUE" adds a line.
func recorded(t *testing.T, file string, edits ...string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("testdata", file))
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSuffix(string(b), "\n"), "\n")
	head, lines := lines[0], lines[1:len(lines)-1]
	for _, e := range edits {
		line, add := strings.CutPrefix(e, "+")
		key, _, has := strings.Cut(line, " ")
		if !add {
			n := len(lines)
			lines = slices.DeleteFunc(lines, func(l string) bool { return strings.HasPrefix(l+" ", key+" ") })
			if len(lines) == n {
				t.Fatalf("%s has no line of %s", file, key)
			}
		}
		if has {
			lines = append(lines, line)
		}
	}
	return strings.Join(append(append([]string{head}, lines...), fmt.Sprintf("end %d %s", len(lines), mark), ""), "\n")
}

// parse parses an answer; the clocks agree.
func parse(t *testing.T, answer string) Facts {
	t.Helper()
	begin := regexp.MustCompile(`(?m)^clock.begin (\d+)`).FindStringSubmatch(answer)
	var at time.Time
	if begin == nil || setTime(&at, begin[1]) != nil {
		t.Fatalf("the answer has no time:\n%s", answer)
	}
	f, err := Parse([]byte(answer), mark, at, at.Add(2*time.Second))
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// TestRecordedMachines has the answer of a real machine of the sandbox, with nothing edited. debian12.txt is
// an edited copy without findings, and fedora.txt has the lines of another distribution.
func TestRecordedMachines(t *testing.T) {
	for _, tt := range []struct {
		file, os string
		edits    []string
		want     []string
	}{
		{file: "sandbox.txt", os: "debian 12", want: []string{"ok machine-tpm", "warn machine-cgroup", "warn machine-disk", "warn machine-network-plugin", "warn machine-runtime"}},
		{file: "debian12.txt", os: "debian 12"},
		{file: "debian12.txt", os: "debian 13", edits: []string{"os.version 13", "os.name Debian GNU/Linux 13 (trixie)"}},
		{file: "fedora.txt", os: "fedora 42", want: []string{"warn machine-distribution", "warn machine-firewall", "warn machine-selinux", "warn machine-sysctls"}},
	} {
		f := parse(t, recorded(t, tt.file, tt.edits...))
		if got := f.OS.ID + " " + f.OS.Version; got != tt.os {
			t.Errorf("%s is %s, want %s", tt.file, got, tt.os)
		}
		var got []string
		for _, x := range Judge(f, Needs{Role: cloud.Worker}) {
			got = append(got, string(x.Severity)+" "+x.ID)
		}
		if slices.Sort(got); !slices.Equal(got, tt.want) {
			t.Errorf("%s: findings %q, want %q", tt.os, got, tt.want)
		}
	}
}

func TestFindings(t *testing.T) {
	ca := strings.Repeat("ab", 32)
	for _, tt := range []struct {
		name     string
		edits    []string
		role     cloud.Role
		ca       string
		severity plan.Severity
		id       string
		text     string // in title or detail
		command  string
	}{
		{name: "not root", edits: []string{"user 1000"}, severity: plan.NotChecked, id: "machine-root", text: "not checked as root"},
		{name: "another distribution", edits: []string{"os.id ubuntu", "os.version 24.04", "os.name Ubuntu 24.04.3 LTS"}, severity: plan.Warn, id: "machine-distribution", text: "Ubuntu 24.04.3 LTS is untested"},
		{name: "an older Debian", edits: []string{"os.version 11"}, severity: plan.Warn, id: "machine-distribution", text: "untested"},
		{name: "32 bits", edits: []string{"arch i686"}, severity: plan.Block, id: "machine-architecture", text: "i686"},
		{name: "no systemd", edits: []string{"systemd no"}, severity: plan.Block, id: "machine-systemd", text: "systemd"},
		{name: "missing tool", edits: []string{"tool mount no"}, severity: plan.Block, id: "machine-tools", text: "mount", command: "apt-get install -y mount coreutils"},
		{name: "localhost", edits: []string{"hostname localhost"}, severity: plan.Block, id: "machine-host-name", text: "localhost"},
		{name: "underscore in the name", edits: []string{"hostname my_node"}, severity: plan.Block, id: "machine-host-name", text: "my_node", command: "hostnamectl set-hostname NAME"},
		{name: "long name", edits: []string{"hostname " + strings.Repeat("a", 64)}, severity: plan.Block, id: "machine-host-name"},
		{name: "capital letters", edits: []string{"hostname Node1"}, severity: plan.Warn, id: "machine-host-name", text: "node1", command: "hostnamectl set-hostname node1"},
		{name: "no overlay", edits: []string{"module overlay missing no"}, severity: plan.Block, id: "machine-kernel-modules", text: "overlay"},
		{name: "no br_netfilter", edits: []string{"module br_netfilter missing no"}, severity: plan.Warn, id: "machine-kernel-modules", text: "br_netfilter"},
		{name: "br_netfilter is not loaded", edits: []string{"module br_netfilter loadable no"}, severity: plan.Warn, id: "machine-kernel-modules", command: "modprobe br_netfilter && echo br_netfilter > /etc/modules-load.d/br_netfilter.conf"},
		{name: "br_netfilter until the reboot", edits: []string{"module br_netfilter loaded no"}, severity: plan.Warn, id: "machine-kernel-modules", text: "after a reboot", command: "echo br_netfilter > /etc/modules-load.d/br_netfilter.conf"},
		{name: "no forwarding", edits: []string{"sysctl net.ipv4.ip_forward 0 no"}, severity: plan.Block, id: "machine-sysctls", text: "ip_forward is 0", command: "echo 'net.ipv4.ip_forward = 1' > /etc/sysctl.d/90-kubernetes-ip_forward.conf && sysctl -w net.ipv4.ip_forward=1"},
		{name: "forwarding until the reboot", edits: []string{"sysctl net.ipv4.ip_forward 1 no"}, severity: plan.Warn, id: "machine-sysctls", text: "after a reboot"},
		{name: "bridges pass iptables", edits: []string{"sysctl net.bridge.bridge-nf-call-iptables 0 no"}, severity: plan.Warn, id: "machine-sysctls", text: "bridge-nf-call-iptables is 0"},
		{name: "swap", edits: []string{"+swap /dev/sda2 partition 2097148", "swap.fstab yes"}, severity: plan.Block, id: "machine-swap", text: "/dev/sda2", command: `swapoff -a && sed -i.before-kubernetes -E '/^[^#].*[[:space:]]swap[[:space:]]/s/^/#/' /etc/fstab`},
		{name: "swap of a unit", edits: []string{"+swap /dev/zram0 partition 2097148"}, severity: plan.Block, id: "machine-swap", command: "swapoff -a"},
		{name: "swap after a reboot", edits: []string{"swap.fstab yes"}, severity: plan.Warn, id: "machine-swap", text: "after a reboot"},
		{name: "one core", edits: []string{"cores 1"}, role: cloud.ControlPlane, severity: plan.Block, id: "machine-cores", text: "1 core"},
		{name: "small control plane", edits: []string{"memory 1048576"}, role: cloud.ControlPlane, severity: plan.Block, id: "machine-memory", text: "1024 MiB"},
		{name: "small worker", edits: []string{"memory 262144"}, severity: plan.Block, id: "machine-memory", text: "256 MiB"},
		{name: "full disk", edits: []string{"disk /var/lib 1048576 104857600 1000000 1000000 yes"}, severity: plan.Block, id: "machine-disk", text: "1024 MiB free"},
		{name: "little space", edits: []string{"disk /var/lib 5242880 20971520 1000000 1000000 yes"}, severity: plan.Warn, id: "machine-disk", text: "of 20 GiB free"},
		{name: "little of a large disk", edits: []string{"disk /var/lib 20971520 1048576000 1000000 1000000 yes"}, severity: plan.Warn, id: "machine-disk", text: "15 %"},
		{name: "few inodes", edits: []string{"disk /var/lib 104857600 104857600 10 1000000 yes"}, severity: plan.Warn, id: "machine-disk", text: "10 free inodes"},
		{name: "unknown space", edits: []string{"disk /var/lib ? ? ? ? yes"}, severity: plan.NotChecked, id: "machine-disk"},
		{name: "read-only file system", edits: []string{"+disk /opt 104857600 104857600 1000000 1000000 no"}, severity: plan.Block, id: "machine-disk", text: "/opt is not writable"},
		{name: "control groups v1", edits: []string{"cgroup v1"}, severity: plan.Warn, id: "machine-cgroup", text: "v1"},
		{name: "hybrid control groups", edits: []string{"cgroup hybrid"}, severity: plan.Warn, id: "machine-cgroup", text: "hybrid"},
		{name: "no memory controller", edits: []string{"cgroup v2 cpuset cpu io pids"}, severity: plan.Block, id: "machine-cgroup", text: "memory"},
		{name: "unknown control groups", edits: []string{"cgroup ?"}, severity: plan.NotChecked, id: "machine-cgroup"},
		{name: "nothing synchronises the clock", edits: []string{"clock.synchronized no"}, severity: plan.Warn, id: "machine-clock", command: "apt-get install -y systemd-timesyncd && timedatectl set-ntp true"},
		{name: "a time service that reaches no server", edits: []string{"clock.synchronized no", "+clock.service yes"}, severity: plan.Warn, id: "machine-clock", text: "its time service has not synchronised it", command: "journalctl -n 20 -u systemd-timesyncd -u chrony -u ntpsec"},
		{name: "a time service that is off", edits: []string{"clock.synchronized no", "+clock.service no"}, severity: plan.Warn, id: "machine-clock", text: "nothing synchronises it"},
		{name: "unknown synchronisation", edits: []string{"clock.synchronized ?"}, severity: plan.NotChecked, id: "machine-clock"},
		{name: "node of another cluster", edits: []string{"cluster.server https://10.9.9.9:6443", "cluster.ca " + ca, "+remains /etc/kubernetes/kubelet.conf", "+listen 10250 kubelet"}, ca: strings.Repeat("cd", 32), severity: plan.Block, id: "machine-other-cluster", text: "https://10.9.9.9:6443", command: "kubeadm reset"},
		{name: "node of no known cluster", edits: []string{"cluster.server https://10.9.9.9:6443", "+remains /etc/kubernetes/kubelet.conf"}, severity: plan.Block, id: "machine-other-cluster"},
		{name: "node of this cluster", edits: []string{"cluster.server https://10.9.9.9:6443", "cluster.ca " + ca, "+remains /etc/kubernetes/kubelet.conf", "+listen 10250 kubelet", "+program kubelet /usr/bin/kubelet active kubelet Kubernetes v1.36.4"}, ca: ca, severity: plan.Info, id: "machine-member"},
		{name: "kubeadm half initialised", edits: []string{"+remains /etc/kubernetes/pki/ca.crt", "+remains /etc/kubernetes/admin.conf", "+remains /var/lib/etcd/member"}, severity: plan.Block, id: "machine-half-initialised", command: "kubeadm reset"},
		{name: "join that did not end", edits: []string{"+remains /etc/kubernetes/bootstrap-kubelet.conf"}, severity: plan.Block, id: "machine-half-initialised"},
		{name: "claimed", edits: []string{"+remains /var/lib/constellation/node.json"}, severity: plan.Block, id: "machine-claimed"},
		{name: "k3s", edits: []string{"+remains /etc/rancher/k3s"}, severity: plan.Block, id: "machine-other-kubernetes"},
		{name: "network plugin", edits: []string{"+remains /etc/cni/net.d/87-podman-bridge.conflist"}, severity: plan.Warn, id: "machine-network-plugin"},
		{name: "containerd of Debian", edits: []string{"+program containerd /usr/bin/containerd active containerd containerd github.com/containerd/containerd 1.6.20"}, severity: plan.Warn, id: "machine-runtime", text: "package containerd", command: "apt-mark hold containerd"},
		{name: "Docker", edits: []string{"+program dockerd /usr/bin/dockerd active docker-ce Docker version 28.0.0"}, severity: plan.Warn, id: "machine-runtime", text: "28.0.0", command: "systemctl disable --now docker.socket docker"},
		{name: "kubelet that runs", edits: []string{"+program kubelet /usr/bin/kubelet active kubelet Kubernetes v1.36.4"}, severity: plan.Block, id: "machine-runtime", command: "systemctl disable --now kubelet"},
		{name: "kubelet that is installed", edits: []string{"+program kubelet /usr/bin/kubelet inactive kubelet Kubernetes v1.36.4"}, severity: plan.Warn, id: "machine-runtime", command: "apt-get remove -y kubelet"},
		{name: "port of a worker", edits: []string{"+listen 10250 nginx"}, severity: plan.Block, id: "machine-ports", text: "port 10250 of the kubelet is in use by nginx", command: "ss -ltnp 'sport = :10250'"},
		{name: "port of a control plane", edits: []string{"+listen 6443 ?"}, role: cloud.ControlPlane, severity: plan.Block, id: "machine-ports", text: "in use by a program"},
		{name: "waits for a cluster", edits: []string{"+listen 9000 bootstrapper"}, severity: plan.Warn, id: "machine-enrolled"},
		{name: "ufw", edits: []string{"+firewall ufw active"}, severity: plan.Warn, id: "machine-firewall", text: "9000 and 10250", command: "ufw allow proto tcp from NETWORK to any port 9000,10250 && ufw default allow routed"},
		{name: "nftables drops", edits: []string{"+firewall nftables input-drop"}, severity: plan.Warn, id: "machine-firewall", text: "drops packets"},
		{name: "iptables drops forwarded packets", edits: []string{"+firewall iptables forward-drop"}, severity: plan.Warn, id: "machine-firewall", text: "forwarded", command: "iptables-legacy -S"},
		{name: "unread firewall", edits: []string{"+firewall nftables ?"}, severity: plan.NotChecked, id: "machine-firewall"},
		{name: "AppArmor without parser", edits: []string{"apparmor no-parser"}, severity: plan.Warn, id: "machine-apparmor", command: "apt-get install -y apparmor"},
		{name: "SELinux", edits: []string{"selinux enforcing"}, severity: plan.Warn, id: "machine-selinux", command: "setenforce 0"},
		{name: "proxy", edits: []string{"+proxy /etc/environment http_proxy http://***@proxy:3128"}, severity: plan.Warn, id: "machine-proxy", text: "proxy:3128"},
		{name: "no default route", edits: []string{"route.default no"}, severity: plan.Warn, id: "machine-route"},
		{name: "resolver on loopback", edits: []string{"nameserver 127.0.0.1", "resolved no"}, severity: plan.Warn, id: "machine-resolver", text: "127.0.0.1"},
		{name: "containerd with cgroupfs", edits: containerdLines("containerd", "false", "/opt/cni/bin", "[]"), severity: plan.Block, id: "machine-containerd", text: "SystemdCgroup of the runtime runc is not true", command: "mv /etc/containerd/config.toml /etc/containerd/config.toml.before"},
		{name: "containerd without CRI, as of Docker's package", edits: containerdLines("containerd", "true", "/opt/cni/bin", `["cri"]`), severity: plan.Block, id: "machine-containerd", text: "turns off the CRI plugin"},
		{name: "containerd with plugins elsewhere", edits: containerdLines("containerd", "true", "/usr/lib/cni", "[]"), severity: plan.Warn, id: "machine-containerd", text: "bin_dir in /etc/containerd/config.toml is /usr/lib/cni"},
		{name: "containerd's file without containerd", edits: containerdLines("file", "false", "/opt/cni/bin", "[]"), severity: plan.Block, id: "machine-containerd"},
		{name: "containerd's file that imports others", edits: slices.Insert(containerdLines("file", "true", "/opt/cni/bin", "[]"), 1, `+containerd.line imports = ["/etc/containerd/conf.d/*.toml"]`), severity: plan.NotChecked, id: "machine-containerd"},
		{name: "containerd's file that is no TOML", edits: []string{"+containerd.config containerd", "+containerd.line [plugins"}, severity: plan.NotChecked, id: "machine-containerd"},
		{name: "containerd's unread file", edits: []string{"+containerd.config ?"}, severity: plan.NotChecked, id: "machine-containerd", text: "not checked"},
		{name: "no TPM", edits: []string{"tpm -"}, severity: plan.Info, id: "machine-tpm", text: "only if --tpm of `machine add` names another one"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			role := tt.role
			if role == "" {
				role = cloud.Worker
			}
			found := Judge(parse(t, recorded(t, "debian12.txt", tt.edits...)), Needs{Role: role, CA: tt.ca})
			if len(found) != 1 {
				t.Fatalf("%d findings, want one: %+v", len(found), found)
			}
			f := found[0]
			if f.ID != tt.id || f.Severity != tt.severity || f.Command != tt.command && tt.command != "" || !strings.Contains(f.Title+f.Detail, tt.text) {
				t.Errorf("finding %+v", f)
			}
			if f.Remedy == "" && f.Severity != plan.Info {
				t.Error("it has no remedy")
			}
		})
	}
}

// containerdLines are edits: an answer with settings of containerd, those of the whole file first.
func containerdLines(source, systemd, plugins, disabled string) []string {
	return []string{
		"+containerd.config " + source, "+containerd.line disabled_plugins = " + disabled,
		`+containerd.line [plugins."io.containerd.grpc.v1.cri".cni]`, fmt.Sprintf("+containerd.line bin_dir = %q", plugins),
		`+containerd.line [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]`, "+containerd.line SystemdCgroup = " + systemd,
	}
}

// Passwords in addresses of proxies stay on the machine, whatever characters they have.
func TestProxyPasswords(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "environment")
	if err := os.WriteFile(file, []byte("http_proxy=http://proxy:3128\nexport HTTPS_PROXY=\"http://user:p/w@d@proxy:3128\" ftp_proxy=http://a:b@c\nALL_PROXY=user:p/w@d@proxy:3128\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	functions := strings.TrimSuffix(script, "main \"$1\" </dev/null\n")
	out, err := exec.CommandContext(t.Context(), "sh", "-c", strings.ReplaceAll(functions, " /etc/environment\n", " "+file+"\n")+"proxies\n").Output()
	if want := "/etc/environment http_proxy http://proxy:3128\n/etc/environment HTTPS_PROXY http://***@proxy:3128 ftp_proxy=http://***@c\n/etc/environment ALL_PROXY ***@proxy:3128\n"; err != nil || !strings.HasPrefix(string(out), want) {
		t.Errorf("%v\ngot\n%swant\n%s", err, out, want)
	}
}

// TestContainerd passes configurations through the script, as containerd's releases print them with `config dump`. Only
// those settings that a node needs leave the machine.
func TestContainerd(t *testing.T) {
	t.Parallel()
	read := func(file string) string {
		t.Helper()
		b, err := os.ReadFile(filepath.Join("testdata", file))
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	const plugins, debians = "/opt/cni/bin", "/usr/lib/cni"
	systemd := func(s string) string { return strings.ReplaceAll(s, "SystemdCgroup = false", "SystemdCgroup = true") }
	v1 := "[plugins.cri]\n  systemd_cgroup = true\n[plugins.cri.cni]\n  bin_dir = \"" + plugins + "\"\n"
	for _, tt := range []struct {
		name, config string
		want         Containerd
	}{
		{name: "1.6, Debian's file with cgroupfs", config: read("containerd-1.6.toml"), want: Containerd{CRI: true, Runtime: "runc", PluginFolders: []string{debians}}},
		{name: "1.6 with systemd", config: systemd(read("containerd-1.6.toml")), want: Containerd{CRI: true, Runtime: "runc", SystemdCgroup: true, PluginFolders: []string{debians}}},
		{name: "1.7", config: read("containerd-1.7.toml"), want: Containerd{CRI: true, Runtime: "runc", PluginFolders: []string{debians}}},
		{name: "2", config: systemd(read("containerd-2.toml")), want: Containerd{CRI: true, Runtime: "runc", SystemdCgroup: true, PluginFolders: []string{debians, plugins}}},
		{name: "2 with cgroupfs", config: read("containerd-2.toml"), want: Containerd{CRI: true, Runtime: "runc", PluginFolders: []string{debians, plugins}}},
		{name: "another default runtime", config: strings.Replace(systemd(read("containerd-1.6.toml")), `default_runtime_name = "runc"`, `default_runtime_name = "nvidia"`, 1), want: Containerd{CRI: true, Runtime: "nvidia", PluginFolders: []string{debians}}},
		{name: "version 1", config: v1, want: Containerd{CRI: true, Runtime: "runc", SystemdCgroup: true, PluginFolders: []string{plugins}}},
		{name: "as an enrolment writes it", config: "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.runc.options]\nSystemdCgroup = true\n", want: Containerd{CRI: true, Runtime: "runc", SystemdCgroup: true, PluginFolders: []string{plugins}}},
	} {
		tt.want.Source = containerdDumped
		functions := strings.TrimSuffix(script, "main \"$1\" </dev/null\n")
		cmd := exec.Command("sh", "-c", functions+"\nsettings")
		cmd.Stdin = strings.NewReader(tt.config + "\n[plugins.\"io.containerd.grpc.v1.cri\".registry.configs.\"r.example.com\".auth]\n  password = \"s3cret\"\n")
		out, err := cmd.CombinedOutput()
		if err != nil || strings.Contains(string(out), "s3cret") || len(strings.Split(string(out), "\n")) > 100 {
			t.Fatalf("%s: %v\n%s", tt.name, err, out)
		}
		edits := []string{"+containerd.config containerd"}
		for l := range strings.Lines(string(out)) {
			edits = append(edits, "+containerd.line "+strings.TrimSpace(l))
		}
		if got := parse(t, recorded(t, "debian12.txt", edits...)).Containerd; got == nil || !slices.Equal(got.PluginFolders, tt.want.PluginFolders) || got.Source != tt.want.Source || got.CRI != tt.want.CRI || got.Runtime != tt.want.Runtime || got.SystemdCgroup != tt.want.SystemdCgroup {
			t.Errorf("%s: %+v, want %+v of\n%s", tt.name, got, tt.want, out)
		}
	}
}

// A machine got another address, for example by DHCP.
func TestChangedAddress(t *testing.T) {
	f := parse(t, recorded(t, "debian12.txt"))
	for _, tt := range []struct {
		name   string
		listed map[string]netip.Addr
		want   string
	}{
		{name: "the machine has the address", listed: map[string]netip.Addr{"node-11": netip.MustParseAddr("10.0.0.11")}},
		{name: "it is not listed", listed: map[string]netip.Addr{"node-12": netip.MustParseAddr("10.0.0.12")}},
		{name: "it is listed with another address", listed: map[string]netip.Addr{"node-11": netip.MustParseAddr("10.0.0.12")}, want: "node-11 is in the list with address 10.0.0.12, and the machine has 10.0.0.11"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			found := Judge(f, Needs{Role: cloud.Worker, Listed: tt.listed})
			switch {
			case tt.want == "" && len(found) == 0:
			case len(found) != 1 || found[0].ID != "machine-address" || found[0].Severity != plan.Warn || found[0].Title != tt.want:
				t.Errorf("findings %+v, want %q", found, tt.want)
			}
		})
	}
}

func TestTPMOutsideOfTheKernelIsNamed(t *testing.T) {
	f := parse(t, recorded(t, "debian12.txt", "tpm -"))
	const other = "unix:/run/tpm/sock"
	for _, tt := range []struct {
		name, want string
		needs      Needs
	}{
		{name: "it is chosen", want: other, needs: Needs{TPM: other}},
		{name: "the machine is enrolled with it", want: other, needs: Needs{TPMs: map[netip.Addr]string{f.Addresses[0].Addr(): other}}},
		{name: "the machine is enrolled with it, and is added again", want: other, needs: Needs{TPM: "auto", TPMs: map[netip.Addr]string{f.Addresses[0].Addr(): other}}},
		{name: "another machine is enrolled with it", want: "only if --tpm", needs: Needs{TPMs: map[netip.Addr]string{netip.MustParseAddr("192.0.2.1"): other}}},
		{name: "that of the kernel is chosen", want: "only if --tpm", needs: Needs{TPM: "/dev/tpmrm0"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tt.needs.Role = cloud.Worker
			found := Judge(f, tt.needs)
			if len(found) != 1 || found[0].ID != "machine-tpm" || !strings.Contains(found[0].Title, tt.want) {
				t.Errorf("findings %+v", found)
			}
		})
	}
}

// A new Debian gets all its commands at once: no finding appears only after the first commands.
func TestFixesOfANewMachine(t *testing.T) {
	edits := []string{"module br_netfilter loadable no", "sysctl net.ipv4.ip_forward 0 no", "+sysctl net.bridge.bridge-nf-call-iptables - no", "swap.fstab yes"}
	r := Result{Findings: Judge(parse(t, recorded(t, "debian12.txt", edits...)), Needs{Role: cloud.Worker})}
	want := []string{
		"echo 'net.ipv4.ip_forward = 1' > /etc/sysctl.d/90-kubernetes-ip_forward.conf && sysctl -w net.ipv4.ip_forward=1",
		"modprobe br_netfilter && echo br_netfilter > /etc/modules-load.d/br_netfilter.conf",
		"echo 'net.bridge.bridge-nf-call-iptables = 1' > /etc/sysctl.d/90-kubernetes-bridge-nf-call-iptables.conf",
		`sed -i.before-kubernetes -E '/^[^#].*[[:space:]]swap[[:space:]]/s/^/#/' /etc/fstab`,
	}
	if got := Fixes(&r); !slices.Equal(got, want) {
		t.Errorf("commands %q, want %q", got, want)
	}
}

func TestContainersGetNoCommandsForTheirHost(t *testing.T) {
	f := parse(t, recorded(t, "debian12.txt", "virtualization lxc", "module overlay missing no", "+swap /dev/sda2 partition 1", "clock.synchronized no"))
	for _, x := range Judge(f, Needs{Role: cloud.Worker}) {
		if x.Command != "" || !strings.Contains(x.Remedy+x.Detail, "host") {
			t.Errorf("finding %+v", x)
		}
	}
}

func TestClock(t *testing.T) {
	answer := recorded(t, "debian12.txt", "clock.begin 1000000.250000000", "clock.end 1000000.750000000")
	machine := time.Unix(1_000_000, 0)
	for _, tt := range []struct {
		name              string
		from              time.Time
		took              time.Duration
		offset, uncertain time.Duration
		want              string
	}{
		{name: "equal", from: machine, took: time.Second, uncertain: 250 * time.Millisecond},
		{name: "ahead", from: machine.Add(-time.Minute), took: time.Second, offset: time.Minute, uncertain: 250 * time.Millisecond, want: "warn 1m0s ahead of"},
		{name: "behind", from: machine.Add(time.Hour), took: time.Second, offset: -time.Hour, uncertain: 250 * time.Millisecond, want: "block 1h0m0s behind"},
		{name: "a slow connection proves nothing", from: machine.Add(-10 * time.Second), took: 21 * time.Second, uncertain: 10250 * time.Millisecond},
	} {
		f, err := Parse([]byte(answer), mark, tt.from, tt.from.Add(tt.took))
		if err != nil || f.Clock.Offset != tt.offset || f.Clock.Uncertainty != tt.uncertain {
			t.Errorf("%s: %+v %v", tt.name, f.Clock, err)
		}
		got := ""
		for _, x := range Judge(f, Needs{Role: cloud.Worker}) {
			got += string(x.Severity) + " " + x.Title
		}
		severity, text, _ := strings.Cut(tt.want, " ")
		if (got == "") != (tt.want == "") || !strings.HasPrefix(got, severity) || !strings.Contains(got, text) {
			t.Errorf("%s: %q, want %q", tt.name, got, tt.want)
		}
	}
	if _, err := Parse([]byte(answer), mark, machine, machine.Add(-10*time.Second)); err == nil {
		t.Error("an answer that took less time than its script was accepted")
	}
}

func TestAnswersThatAreRefused(t *testing.T) {
	good := recorded(t, "debian12.txt")
	at := time.Unix(1_795_784_444, 0)
	edit := func(old, with string) string {
		t.Helper()
		if !strings.Contains(good, old) {
			t.Fatalf("the answer has no %q", old)
		}
		return strings.Replace(good, old, with, 1)
	}
	lines := strings.SplitAfter(good, "\n")
	for name, answer := range map[string]string{
		"nothing":                "",
		"garbage":                "\x00\xff\x1b[2J",
		"another mark":           strings.ReplaceAll(good, mark, "other"),
		"another version":        edit("facts 1 ", "facts 2 "),
		"truncated in a line":    good[:len(good)/2],
		"truncated at a line":    strings.Join(lines[:len(lines)/2], ""),
		"without the end":        strings.Join(lines[:len(lines)-2], ""),
		"a missing line":         edit("selinux disabled\n", ""),
		"an unknown key":         edit("selinux disabled", "sudo disabled"),
		"a repeated key":         edit("selinux disabled", "arch x86_64\nselinux disabled"),
		"an escape sequence":     edit("hostname ", "hostname \x1b]0;x\x07"),
		"another character":      edit("hostname ", "hostname \u202e"),
		"a long line":            edit("hostname ", "hostname "+strings.Repeat("a", 600)),
		"a carriage return":      strings.ReplaceAll(good, "\n", "\r\n"),
		"a bad number":           edit("cores ", "cores -"),
		"a huge number":          edit("cores ", "cores 99999999999999999999"),
		"a bad choice":           edit("selinux disabled", "selinux maybe"),
		"a bad state":            edit("module overlay ", "module overlay x"),
		"a command in a name":    edit("module overlay ", "module $(reboot) "),
		"a command in a package": recorded(t, "debian12.txt", "+program containerd /usr/bin/containerd active x;reboot 1.6"),
		"too few fields":         recorded(t, "debian12.txt", "+swap /dev/sda2"),
		"a port above 65535":     recorded(t, "debian12.txt", "+listen 65536 x"),
		"a bad source":           recorded(t, "debian12.txt", "+containerd.config x"),
		"text after the end":     good + "more\n",
		"much before the header": strings.Repeat("noise\n", 5000) + good,
		"too many lines":         strings.Replace(good, "\nend ", strings.Repeat("\nremains x", 600)+"\nend ", 1),
		"too many bytes":         strings.Repeat("x", MaxAnswer+1),
		"without a value":        edit("selinux disabled", "selinux "),
	} {
		f, err := Parse([]byte(answer), mark, at, at.Add(time.Hour*24*365*10))
		if err == nil {
			t.Errorf("%s: accepted as %+v", name, f)
		} else if strings.ContainsAny(err.Error(), "\x00\x1b\r\n") || len(err.Error()) > 700 {
			t.Errorf("%s: the error is %q", name, err)
		}
	}
	if _, err := Parse([]byte("Welcome!\nno mail\n"+good), mark, at, at.Add(time.Hour*24*365*10)); err != nil {
		t.Errorf("text of a startup file before the answer: %v", err)
	}
}

func FuzzParse(f *testing.F) {
	for _, name := range []string{"debian12.txt", "fedora.txt"} {
		b, err := os.ReadFile(filepath.Join("testdata", name))
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	at := time.Unix(1_795_784_444, 0)
	f.Fuzz(func(t *testing.T, answer []byte) {
		facts, err := Parse(answer, mark, at, at.Add(time.Minute))
		if err != nil {
			return
		}
		for _, x := range Judge(facts, Needs{Role: cloud.ControlPlane}) {
			if x.ID == "" || x.Title == "" || strings.IndexFunc(x.Title+x.Command, func(r rune) bool { return r < ' ' || r > '~' }) >= 0 {
				t.Errorf("finding %+v", x)
			}
		}
	})
}

func TestTogether(t *testing.T) {
	f := parse(t, recorded(t, "debian12.txt"))
	clone, other := f, f
	clone.HostName = strings.ToUpper(f.HostName)
	other.HostName, other.MachineID, other.ProductID = "other", "0123456789abcdef", ""
	got := Together([]string{"a@1", "b@2", "c@3"}, []Facts{f, clone, other})
	for i, want := range []int{3, 3, 0} {
		if len(got[i]) != want {
			t.Errorf("machine %d has %d findings, want %d: %+v", i, len(got[i]), want, got[i])
		}
	}
	if len(got[0]) == 3 && (got[0][0].Title != "the host name "+f.HostName+" is also that of b@2" || got[0][1].Title != "the machine has the same machine ID as b@2: one is a clone") {
		t.Errorf("findings %+v", got[0])
	}
}

func TestCADigest(t *testing.T) {
	der := []byte(strings.Repeat("certificate", 20))
	cert := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	// The commands of the script.
	cmd := exec.Command("sh", "-c", `sed -n '/BEGIN CERT/,/END CERT/p' | grep -v -e '^-----' | tr -d ' \r\n' | sha256sum | cut -c1-64`)
	cmd.Stdin = bytes.NewReader(cert)
	out, err := cmd.Output()
	if err != nil || CADigest(cert) != strings.TrimSpace(string(out)) || CADigest([]byte("x")) != "" {
		t.Errorf("digest %s, the script prints %s %v", CADigest(cert), out, err)
	}
}

// TestDocumented checks that the documentation has each finding.
func TestDocumented(t *testing.T) {
	doc, err := os.ReadFile("../../docs/machine-check.md")
	if err != nil {
		t.Fatal(err)
	}
	source, err := os.ReadFile("judge.go")
	if err != nil {
		t.Fatal(err)
	}
	ids := regexp.MustCompile(`"machine-[a-z-]+"`).FindAllString(string(source), -1)
	if len(ids) < 30 {
		t.Errorf("%d finding IDs in the source, want at least 30", len(ids))
	}
	for _, id := range ids {
		if !strings.Contains(string(doc), "`"+strings.Trim(id, `"`)+"`") {
			t.Errorf("the documentation lacks %s", id)
		}
	}
}

// TestScript runs the script of this package with the shells that a machine may have.
func TestScript(t *testing.T) {
	t.Parallel()
	for _, shell := range []string{"dash", "bash"} {
		path := testneeds.Program(t, shell, shell)
		cmd := exec.Command(path, "-s", "--", mark)
		cmd.Stdin = strings.NewReader(script)
		from := time.Now()
		out, err := cmd.CombinedOutput() // it prints nothing else, on stderr either
		if err != nil {
			t.Fatalf("%s: %v\n%s", shell, err, out)
		}
		f, err := Parse(out, mark, from, time.Now())
		if err != nil {
			t.Fatalf("%s: %v\n%s", shell, err, out)
		}
		host, err := os.Hostname()
		if err != nil || f.HostName != host || f.Root != (os.Geteuid() == 0) || f.Cores < 1 || f.Memory < 1<<10 || len(f.Disks) == 0 || len(f.Modules) != 3 || len(f.Sysctls) != 2 {
			t.Errorf("%s: facts %+v", shell, f)
		}
		if c := f.Clock; max(c.Offset, -c.Offset) > c.Uncertainty+10*time.Millisecond {
			t.Errorf("%s: the clock of this computer differs from itself by %s, within %s", shell, c.Offset, c.Uncertainty)
		}
	}
	// Values are one line of printable ASCII.
	for _, shell := range []string{"dash", "bash"} {
		cmd := exec.Command(shell, "-c", script[:strings.Index(script, "# One fact for each line")]+`fact text "$1" b; fact none ""; fact long "$2"; fact last "$(printf '\374~')"`, "-", "x\ty\nz\n\x1b[1m", strings.Repeat("a", 500))
		want := "text x y z  [1m b\nnone -\nlong " + strings.Repeat("a", 400) + "\nlast  ~\n"
		if out, err := cmd.CombinedOutput(); err != nil || string(out) != want {
			t.Errorf("%s: %q %v, want %q", shell, out, err, want)
		}
	}
	// A part of the script runs nothing.
	cmd := exec.Command("sh", "-s", "--", mark)
	cmd.Stdin = strings.NewReader(script[:len(script)-len("main \"$1\" </dev/null\n")])
	if out, err := cmd.CombinedOutput(); err != nil || len(out) > 0 {
		t.Errorf("the script without its last line printed %q, %v", out, err)
	}
}

func TestSlowMachinesGetMoreTime(t *testing.T) {
	for _, tt := range []struct{ timeout, want time.Duration }{{0, Limit}, {sshhost.DefaultTimeout, Limit}, {time.Second, Limit}, {3 * time.Minute, 9 * time.Minute}} {
		if got := limitOf(sshhost.Options{Timeout: tt.timeout}); got != tt.want {
			t.Errorf("with --timeout %s the limit is %s, want %s", tt.timeout, got, tt.want)
		}
	}
}

func TestCheckBySSH(t *testing.T) {
	t.Parallel()
	s := sshdtest.Start(t, sshdtest.Options{})
	o := s.Options()
	gone := o.Target
	gone.Host = "no-such-host.invalid"
	calls := 0
	got := Check(t.Context(), Request{Targets: []sshhost.Target{o.Target, gone, o.Target}, SSH: o, Needs: Needs{Role: cloud.Worker}}, func(Result) { calls++ })
	if len(got) != 3 || calls != 3 {
		t.Fatalf("%d results, %d calls", len(got), calls)
	}
	for _, i := range []int{0, 2} {
		r := got[i]
		if r.Err != nil || r.Facts == nil || r.HostKey == "" || r.Took <= 0 || r.Ready {
			t.Fatalf("result %d: %+v", i, r)
		}
		if r.Findings[0].Severity != plan.Block || !slices.ContainsFunc(r.Findings, func(f plan.Finding) bool { return f.ID == "machine-name-used-twice" }) {
			t.Errorf("findings of result %d: %+v", i, r.Findings)
		}
	}
	if r := got[1]; !errors.Is(r.Err, sshhost.ErrUnreachable) || r.Remedy == "" || r.Facts != nil || r.Ready {
		t.Errorf("an unreachable machine: %+v", r)
	}
}

// found are findings of a machine: two that --fix mends, with these commands, and one that it does not.
func found(first, second, other string) Result {
	return Result{Findings: []plan.Finding{
		{ID: "machine-swap", Severity: plan.Block, Command: first},
		{ID: "machine-member", Severity: plan.Block, Command: other},
		{ID: "machine-sysctls", Severity: plan.Warn, Command: first},
		{ID: "machine-kernel-modules", Severity: plan.Warn},
		{ID: "machine-sysctls", Severity: plan.Warn, Command: second},
	}}
}

func TestFixesAreSettingsOfTheKernel(t *testing.T) {
	t.Parallel()
	r := found("swapoff -a", "sysctl", "kubeadm reset")
	if got := Fixes(&r); !slices.Equal(got, []string{"swapoff -a", "sysctl"}) {
		t.Errorf("commands %q", got)
	}
	// No other kind of finding is mended, whatever a machine answers.
	for _, f := range Judge(Facts{Swaps: []Swap{{Name: "/dev/sda2"}}, Remains: []string{"/etc/cni/net.d/x.conf"}, Disks: []Disk{{Path: "/var/lib", Free: 1, Size: 100 << 20}}}, Needs{Role: cloud.Worker}) {
		one := Result{Findings: []plan.Finding{f}}
		if mends := len(Fixes(&one)) > 0; mends != (f.ID == "machine-swap") {
			t.Errorf("%s: %q is run: %t", f.ID, f.Command, mends)
		}
	}
}

// The commands run in their order, as root, until one fails. Another machine goes on.
func TestFixBySSH(t *testing.T) {
	t.Parallel()
	s := sshdtest.Start(t, sshdtest.Options{})
	o, dir := s.Options(), t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	exists := func(name string) bool { _, err := os.Stat(at(name)); return err == nil }
	gone := o.Target
	gone.Host = "no-such-host.invalid"
	r := Request{Targets: []sshhost.Target{o.Target, gone, o.Target, o.Target}, SSH: o}
	results := []Result{
		found("touch "+at("one")+" && echo 'a b' > "+at("two"), "touch "+at("three"), "touch "+at("other")),
		found("touch "+at("gone"), "", ""),
		{Findings: []plan.Finding{{ID: "machine-memory", Severity: plan.Block}}},
		found("echo no such file >&2; exit 3", "touch "+at("after"), ""),
	}
	calls := 0
	got := Fix(t.Context(), r, results, func(Fixed) { calls++ })
	if len(got) != 3 || calls != 3 {
		t.Fatalf("%d machines, %d calls: %+v", len(got), calls, got)
	}
	if !errors.Is(got[1].Err, sshhost.ErrUnreachable) || got[1].Failed == "" || len(got[1].Done) > 0 {
		t.Errorf("an unreachable machine: %+v", got[1])
	}
	if exists("other") || exists("gone") || exists("after") {
		t.Error("a command ran that should not")
	}
	if os.Geteuid() != 0 {
		if !errors.Is(got[0].Err, sshhost.ErrNotRoot) || plan.Remedy(got[0].Err) == "" || exists("one") {
			t.Errorf("without root: %+v", got[0])
		}
		return
	}
	if got[0].Err != nil || len(got[0].Done) != 2 || !exists("one") || !exists("two") || !exists("three") {
		t.Errorf("the first machine: %+v", got[0])
	}
	if x := got[2]; x.Err == nil || !strings.Contains(x.Error, "no such file") || x.Remedy == "" || x.Failed != "echo no such file >&2; exit 3" || len(x.Done) > 0 {
		t.Errorf("a command that fails: %+v", x)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if got := Fix(ctx, r, results[:1], func(Fixed) {}); len(got) != 1 || got[0].Err == nil || len(got[0].Done) > 0 {
		t.Errorf("after Ctrl-C: %+v", got)
	}
}
