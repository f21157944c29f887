package machinecheck

import (
	"cmp"
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"time"

	"constellation/engine/cloud"
	"constellation/engine/plan"
	"constellation/engine/words"
)

// Needs are what a machine is meant for.
type Needs struct {
	Role cloud.Role
	// CA is the digest of the cluster's certificate authority, as of CADigest: a machine of this cluster
	// is fine. If it is empty, a machine of any cluster is refused.
	CA string
	// Balancer is what a control plane is to have besides; nil: nothing.
	Balancer *Balancer
	// TPM is the address of the TPM that the machine is to use, such as unix:/run/tpm/socket; empty, auto and none name no
	// other one than the kernel's. TPMs are those of enrolled machines, by address.
	TPM  string
	TPMs map[netip.Addr]string
	// Listed are the addresses of the workspace's machines, by name.
	Listed map[string]netip.Addr
}

// Limits of a judgement. Memory and cores of a control plane are those of kubeadm's own preflight.
const (
	controlPlaneMemory = 1700 << 10 // KiB
	workerMemory       = 512 << 10
	controlPlaneCores  = 2
	leastDisk          = 2 << 20 // KiB
	goodDisk           = 10 << 20
	leastInodes        = 50_000
	badClock           = 5 * time.Minute
	goodClock          = 2 * time.Second
)

// port is a TCP port of a node.
type port struct {
	port int
	of   string
	role cloud.Role // empty: of all nodes
}

// Ports are the TCP ports that the parts of a node listen on.
var ports = []port{
	{10248, "kubelet", ""},
	{10249, "kube-proxy", ""},
	{10250, "kubelet", ""},
	{10256, "kube-proxy", ""},
	{9000, "bootstrapper", ""},
	{2379, "etcd", cloud.ControlPlane},
	{2380, "etcd", cloud.ControlPlane},
	{2381, "etcd", cloud.ControlPlane},
	{6443, "kube-apiserver", cloud.ControlPlane},
	{10257, "kube-controller-manager", cloud.ControlPlane},
	{10259, "kube-scheduler", cloud.ControlPlane},
	{9090, "join service", cloud.ControlPlane},
	{9091, "join service", cloud.ControlPlane},
	{30090, "join service", cloud.ControlPlane},
	{9092, "operator", cloud.ControlPlane},
	{9093, "operator", cloud.ControlPlane},
	{9094, "operator", cloud.ControlPlane},
	{9095, "operator", cloud.ControlPlane},
	{9096, "autoscaler", cloud.ControlPlane},
	{9097, "autoscaler", cloud.ControlPlane},
}

// Ports returns the TCP ports that a node of this role listens on.
func Ports(r cloud.Role) (out []int) {
	for _, p := range ports {
		if p.role == "" || p.role == r {
			out = append(out, p.port)
		}
	}
	slices.Sort(out)
	return out
}

// Judge returns what stands in the way of a machine that is to become a node, the worst first. Block
// means that it cannot become one as it is.
func Judge(f Facts, n Needs) []plan.Finding {
	j := &judge{f: f, n: n}
	for _, check := range []func(*judge){
		(*judge).root, (*judge).system, (*judge).host, (*judge).listed, (*judge).modules, (*judge).sysctls, (*judge).swap, (*judge).size, (*judge).disks, (*judge).cgroup, (*judge).clock,
		(*judge).cluster, (*judge).programs, (*judge).containerd, (*judge).balancer, (*judge).ports, (*judge).firewalls, (*judge).security, (*judge).network, (*judge).tpm,
	} {
		check(j)
	}
	sortWorst(j.out)
	return j.out
}

func sortWorst(list []plan.Finding) {
	order := []plan.Severity{plan.Block, plan.Warn, plan.NotChecked, plan.Info}
	slices.SortStableFunc(list, func(a, b plan.Finding) int {
		return cmp.Compare(slices.Index(order, a.Severity), slices.Index(order, b.Severity))
	})
}

type judge struct {
	f      Facts
	n      Needs
	out    []plan.Finding
	member bool // it has a kubelet.conf
}

func (j *judge) add(s plan.Severity, id string, f plan.Finding) {
	f.ID, f.Severity, f.Source = id, s, "machine"
	j.out = append(j.out, f)
}

func (j *judge) root() {
	if !j.f.Root {
		j.add(plan.NotChecked, "machine-root", plan.Finding{
			Title: "not checked as root: firewall rules, programs at ports, and files of a cluster may be missing from this report", Remedy: "log in as root, or repeat the check with --sudo",
		})
	}
}

// supported are the distributions that are tested, with their versions.
var supported = map[string][]string{"debian": {"12", "13"}}

// architectures are those that components exist for, as `uname -m` prints them.
var architectures = []string{"x86_64", "aarch64"}

func (j *judge) system() {
	name := cmp.Or(j.f.OS.Name, j.f.OS.ID, "an unknown distribution")
	if !slices.Contains(supported[j.f.OS.ID], j.f.OS.Version) {
		j.add(plan.Warn, "machine-distribution", plan.Finding{
			Title: name + " is untested", Detail: "tested are Debian 12 and Debian 13", Remedy: "use Debian 13, or try the machine in a test cluster first",
		})
	}
	if !slices.Contains(architectures, j.f.Arch) {
		j.add(plan.Block, "machine-architecture", plan.Finding{Title: fmt.Sprintf("the architecture %s is not supported", cmp.Or(j.f.Arch, "(unknown)")), Remedy: "use a machine with amd64 or arm64"})
	}
	if !j.f.Systemd {
		j.add(plan.Block, "machine-systemd", plan.Finding{
			Title: "systemd is not the init of this machine", Detail: "kubelet, containerd and the agent are systemd units", Remedy: "use a machine that systemd boots",
		})
	}
	if len(j.f.Lacks) > 0 {
		j.add(plan.Block, "machine-tools", plan.Finding{
			Title: "the kubelet needs programs that are missing: " + words.And(j.f.Lacks), Remedy: "install the packages that have them", Command: j.install("mount", "coreutils"),
		})
	}
}

// install is the command that installs Debian packages; empty on other distributions.
func (j *judge) install(packages ...string) string {
	if j.f.OS.ID != "debian" && !slices.Contains(strings.Fields(j.f.OS.Like), "debian") {
		return ""
	}
	return "apt-get install -y " + strings.Join(packages, " ")
}

var nodeNameRE = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?(\.[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)*$`)

func (j *judge) host() {
	name := j.f.HostName
	lower := strings.ToLower(name)
	x := plan.Finding{Remedy: "name the machine with letters, digits and hyphens", Command: "hostnamectl set-hostname NAME"}
	switch {
	case lower == "localhost" || strings.HasPrefix(lower, "localhost."):
		x.Title = "the host name is localhost, which identifies no machine"
	case len(lower) > 253 || !nodeNameRE.MatchString(lower):
		x.Title = fmt.Sprintf("the host name %q is not a valid name of a node", name)
	case name != lower:
		x.Title, x.Remedy = fmt.Sprintf("the host name %s has capital letters; the node would be named %s", name, lower), "rename the machine, so that both names are equal"
		x.Command = "hostnamectl set-hostname " + lower
		j.add(plan.Warn, "machine-host-name", x)
		return
	default:
		return
	}
	j.add(plan.Block, "machine-host-name", x)
}

// container reports whether the kernel is shared with a host, whose settings these are.
func (j *judge) container() bool {
	return slices.Contains([]string{"docker", "podman", "lxc", "lxc-libvirt", "systemd-nspawn", "openvz", "rkt", "wsl", "proot", "pouch", "container-other"}, j.f.Virtualization)
}

// listed compares the addresses of the machine with the list of the workspace.
func (j *judge) listed() {
	name := strings.ToLower(j.f.HostName)
	want, ok := j.n.Listed[name]
	if !ok || len(j.f.Addresses) == 0 || slices.ContainsFunc(j.f.Addresses, func(p netip.Prefix) bool { return p.Addr() == want }) {
		return
	}
	var has []string
	for _, p := range j.f.Addresses {
		has = append(has, p.Addr().String())
	}
	j.add(plan.Warn, "machine-address", plan.Finding{
		Title:  fmt.Sprintf("%s is in the list with address %s, and the machine has %s", name, want, words.And(has)),
		Detail: "its certificate, its kubelet and the other machines use the address of the list, unless another machine has this name",
		Remedy: "give it the address of the list again; else drain it, delete its Node, and run `constellation machine remove` and `machine add`",
	})
}

func (j *judge) modules() {
	for _, m := range j.f.Modules {
		file := "/etc/modules-load.d/" + m.Name + ".conf"
		x := plan.Finding{Objects: []string{m.Name}, Command: fmt.Sprintf("modprobe %s && echo %[1]s > %s", m.Name, file)}
		if j.container() {
			x.Command, x.Detail = "", "this machine is a container; its host loads modules"
		}
		needed := m.Name != "br_netfilter" // which only network plugins with a bridge need
		switch {
		case m.State == "missing":
			x.Title, x.Command = fmt.Sprintf("the kernel has no module %s", m.Name), ""
			x.Remedy = "install the kernel's complete package of modules, such as linux-image-amd64 instead of a reduced one, and reboot"
			if j.container() {
				x.Remedy = "load the module on the host"
			}
			severity := plan.Warn
			if needed {
				severity = plan.Block
			}
			j.add(severity, "machine-kernel-modules", x)
		case m.State == "loadable" && !needed:
			x.Title, x.Remedy = fmt.Sprintf("the module %s is not loaded", m.Name), "load it now and at each boot"
			j.add(plan.Warn, "machine-kernel-modules", x)
		case m.State == "loaded" && !needed && !m.AtBoot && !j.container():
			x.Title, x.Remedy = fmt.Sprintf("the module %s is loaded, and no configuration loads it after a reboot", m.Name), "load it at each boot"
			x.Command = fmt.Sprintf("echo %s > %s", m.Name, file)
			j.add(plan.Warn, "machine-kernel-modules", x)
		}
	}
}

// bridgeSysctl is the kernel parameter of the module br_netfilter.
const bridgeSysctl = "net.bridge.bridge-nf-call-iptables"

// loadable reports whether a module is not loaded, but can be.
func (j *judge) loadable(module string) bool {
	return slices.ContainsFunc(j.f.Modules, func(m Module) bool { return m.Name == module && m.State == "loadable" })
}

func (j *judge) sysctls() {
	for _, s := range j.f.Sysctls {
		set := fmt.Sprintf("echo '%s = 1' > /etc/sysctl.d/90-kubernetes-%s.conf", s.Name, s.Name[strings.LastIndexByte(s.Name, '.')+1:])
		x := plan.Finding{Objects: []string{s.Name}, Remedy: "set it now and at each boot", Command: set + " && sysctl -w " + s.Name + "=1"}
		severity := plan.Warn
		switch {
		case s.Name == bridgeSysctl && s.Value == "" && !s.AtBoot && !j.container() && j.loadable("br_netfilter"):
			// The parameter does not exist yet. Loading the module sets it to 1.
			x.Title, x.Remedy, x.Command = fmt.Sprintf("no configuration sets %s, which the module br_netfilter has", s.Name), "set it at each boot", set
		case s.Value == "" || s.Value == "1" && (s.AtBoot || j.container()):
			continue
		case s.Value == "1":
			x.Title, x.Remedy, x.Command = fmt.Sprintf("%s is 1, and no configuration sets it after a reboot", s.Name), "set it at each boot", set
		default:
			x.Title = fmt.Sprintf("%s is %s, want 1", s.Name, s.Value)
			if s.Name == "net.ipv4.ip_forward" {
				severity, x.Detail = plan.Block, "pods on different nodes cannot reach each other, and kubeadm refuses the machine"
			}
		}
		j.add(severity, "machine-sysctls", x)
	}
}

func (j *judge) swap() {
	x := plan.Finding{Remedy: "turn swap off, and remove it from /etc/fstab"}
	switch {
	case len(j.f.Swaps) > 0:
		var names []string
		for _, s := range j.f.Swaps {
			names = append(names, s.Name)
		}
		x.Title, x.Detail = "swap is on: "+words.And(names), "the kubelet does not start with swap unless its configuration permits it"
		x.Command = "swapoff -a"
		if j.f.SwapAtBoot {
			x.Command += ` && sed -i.before-kubernetes -E '/^[^#].*[[:space:]]swap[[:space:]]/s/^/#/' /etc/fstab`
		} else {
			x.Remedy = "turn swap off, and the systemd unit that turns it on: `systemctl list-units --type=swap`"
		}
		if j.container() {
			x.Command, x.Remedy = "", "this machine is a container: turn swap off on its host"
		}
		j.add(plan.Block, "machine-swap", x)
	case j.f.SwapAtBoot:
		x.Title, x.Remedy = "swap is off, and /etc/fstab turns it on after a reboot", "remove it from /etc/fstab"
		x.Command = `sed -i.before-kubernetes -E '/^[^#].*[[:space:]]swap[[:space:]]/s/^/#/' /etc/fstab`
		j.add(plan.Warn, "machine-swap", x)
	}
}

func (j *judge) size() {
	least := int64(workerMemory)
	if j.n.Role == cloud.ControlPlane {
		least = controlPlaneMemory
		if j.f.Cores < controlPlaneCores {
			j.add(plan.Block, "machine-cores", plan.Finding{Title: fmt.Sprintf("the machine has %s, and a control plane needs %d", words.Count(j.f.Cores, "core"), controlPlaneCores), Remedy: "use a larger machine, or make this one a worker"})
		}
	}
	if j.f.Memory < least {
		j.add(plan.Block, "machine-memory", plan.Finding{Title: fmt.Sprintf("the machine has %s of memory, and a %s needs %s", mib(j.f.Memory), roleName(j.n.Role), mib(least)), Remedy: "use a larger machine"})
	}
}

func roleName(r cloud.Role) string {
	if r == cloud.ControlPlane {
		return "control plane"
	}
	return "worker"
}

func mib(kib int64) string {
	if kib >= 10<<20 {
		return fmt.Sprintf("%d GiB", kib>>20)
	}
	return fmt.Sprintf("%d MiB", kib>>10)
}

func (j *judge) disks() {
	for i, d := range j.f.Disks {
		data := strings.HasPrefix(d.Path, "/var/lib") && !slices.ContainsFunc(j.f.Disks[:i], func(e Disk) bool {
			return e.Size == d.Size && e.Inodes == d.Inodes // the same file system
		})
		x := plan.Finding{Objects: []string{d.Path}, Remedy: "free or add space", Command: "du -xh --max-depth=2 " + d.Path + " | sort -h | tail"}
		switch {
		case j.f.Root && !d.Writable:
			x.Title, x.Remedy, x.Command = d.Path+" is not writable by root", "mount its file system for writing", "findmnt -T "+d.Path
			j.add(plan.Block, "machine-disk", x)
		case !data:
		case d.Free < 0 || d.Size <= 0:
			x.Title, x.Remedy, x.Command = "not checked how much space "+d.Path+" has", "check it by hand", "df -h "+d.Path
			j.add(plan.NotChecked, "machine-disk", x)
		case d.Free < leastDisk:
			x.Title = fmt.Sprintf("%s has %s free, and a node needs %s", d.Path, mib(d.Free), mib(leastDisk))
			j.add(plan.Block, "machine-disk", x)
		case d.Free < goodDisk || d.Free < d.Size*15/100:
			x.Title = fmt.Sprintf("%s has %s of %s free", d.Path, mib(d.Free), mib(d.Size))
			x.Detail = "the kubelet evicts pods below 15 % of free space for images"
			j.add(plan.Warn, "machine-disk", x)
		}
		if data && d.Inodes > 0 && d.FreeInodes >= 0 && d.FreeInodes < leastInodes {
			j.add(plan.Warn, "machine-disk", plan.Finding{Objects: x.Objects, Title: fmt.Sprintf("%s has %d free inodes; images need many", d.Path, d.FreeInodes), Remedy: "delete small files, or make a file system with more inodes"})
		}
	}
}

func (j *judge) cgroup() {
	c := j.f.Cgroup
	switch c.Version {
	case "v2":
		var lacks []string
		for _, name := range []string{"cpu", "cpuset", "memory", "pids"} {
			if !slices.Contains(c.Controllers, name) {
				lacks = append(lacks, name)
			}
		}
		if len(lacks) > 0 {
			j.add(plan.Block, "machine-cgroup", plan.Finding{Title: "the control group controllers " + words.And(lacks) + " are off", Remedy: "enable them on the kernel's command line, such as cgroup_enable=memory, and reboot"})
		}
	case string(Unread):
		j.add(plan.NotChecked, "machine-cgroup", plan.Finding{Title: "not checked which version of control groups the machine has", Remedy: "check that it prints cgroup2fs", Command: "stat -fc %T /sys/fs/cgroup"})
	default:
		j.add(plan.Warn, "machine-cgroup", plan.Finding{
			Title: "the machine uses control groups " + c.Version, Detail: "Kubernetes deprecates v1: a kubelet of v1.35 or newer starts there only with failCgroupV1: false",
			Remedy: "boot with systemd.unified_cgroup_hierarchy=1 on the kernel's command line", Reference: "https://kubernetes.io/docs/concepts/architecture/cgroups/",
		})
	}
}

func (j *judge) clock() {
	c := j.f.Clock
	off := max(c.Offset, -c.Offset)
	how := "ahead of"
	if c.Offset < 0 {
		how = "behind"
	}
	x := plan.Finding{Remedy: "synchronise the clock", Command: "timedatectl set-ntp true"}
	waits := c.Service == Yes && c.Synchronized == No
	if waits {
		x = plan.Finding{Remedy: "let the time service reach a time server: it is on, and has not synchronised the clock", Command: "journalctl -n 20 -u systemd-timesyncd -u chrony -u ntpsec"}
	}
	if off -= c.Uncertainty; off > goodClock {
		severity := plan.Warn
		x.Title = fmt.Sprintf("the clock is %s %s this computer's", max(c.Offset, -c.Offset).Round(100*time.Millisecond), how)
		x.Detail = "etcd and certificates need clocks that agree"
		if off > badClock {
			severity = plan.Block
		}
		if j.container() {
			x.Command, x.Remedy = "", "this machine is a container: synchronise the clock of its host"
		}
		j.add(severity, "machine-clock", x)
		return
	}
	switch {
	case j.container():
	case waits:
		x.Title = "the clock is right, and its time service has not synchronised it"
		j.add(plan.Warn, "machine-clock", x)
	case c.Synchronized == No:
		x.Title, x.Remedy = "the clock is right, and nothing synchronises it", "start a time service"
		if command := j.install("systemd-timesyncd"); command != "" {
			x.Command = command + " && " + x.Command
		}
		j.add(plan.Warn, "machine-clock", x)
	case c.Synchronized == Unread:
		j.add(plan.NotChecked, "machine-clock", plan.Finding{Title: "the clock is right; not checked whether anything synchronises it", Remedy: "start a time service, such as systemd-timesyncd or chrony", Command: x.Command})
	}
}

// kubernetes are programs of a node; a port that they hold belongs to a cluster.
var kubernetes = []string{"kubelet", "kube-proxy", "kube-apiserver", "kube-scheduler", "kube-controller", "etcd", "bootstrapper", "joinservice", "operator"}

func (j *judge) cluster() {
	has := func(prefix string) bool {
		return slices.ContainsFunc(j.f.Remains, func(p string) bool { return strings.HasPrefix(p, prefix) })
	}
	var left []string // of kubeadm
	for _, p := range j.f.Remains {
		if !strings.HasPrefix(p, "/etc/cni/") && !strings.Contains(p, "/rancher") && !strings.Contains(p, "/k0s") && !strings.Contains(p, "/microk8s") && p != "/var/lib/constellation/node.json" {
			left = append(left, p)
		}
	}
	switch {
	case has("/etc/rancher/"), has("/var/lib/rancher"), has("/var/lib/k0s"), has("/var/snap/microk8s"):
		j.add(plan.Block, "machine-other-kubernetes", plan.Finding{
			Title: "another distribution of Kubernetes is on this machine", Objects: j.f.Remains, Remedy: "remove it with its own program, such as k3s-uninstall.sh, or use another machine",
		})
	case j.f.Server != "":
		j.member = true
		if j.n.CA != "" && j.n.CA == j.f.CA {
			j.add(plan.Info, "machine-member", plan.Finding{Title: "the machine is a node of this cluster already", Detail: "its API server is " + j.f.Server})
			return
		}
		j.add(plan.Block, "machine-other-cluster", plan.Finding{
			Title: "the machine is a node of another cluster, whose API server is " + j.f.Server, Objects: left,
			Remedy: "remove the node from that cluster with `kubectl drain` and `kubectl delete node`, then reset the machine; this deletes its pods and, on a control plane, its etcd member", Command: "kubeadm reset",
		})
	case len(left) > 0:
		j.add(plan.Block, "machine-half-initialised", plan.Finding{
			Title: "kubeadm left files here, and the machine is no node: an init or join did not end, or a reset was incomplete", Objects: left,
			Remedy: "reset the machine; this deletes the files and etcd's data", Command: "kubeadm reset",
		})
	}
	if has("/var/lib/constellation/") {
		j.add(plan.Block, "machine-claimed", plan.Finding{
			Title: "the machine was claimed for a cluster of constellation", Objects: []string{"/var/lib/constellation/node.json"}, Remedy: "remove it from its cluster, or reinstall the machine; a claim is permanent",
		})
	}
	if has("/etc/cni/") && !j.member && len(left) == 0 {
		j.add(plan.Warn, "machine-network-plugin", plan.Finding{
			Title: "a network plugin is configured already", Objects: j.f.Remains, Remedy: "if it is not the plugin of the new cluster, move its files away: containerd uses the first one by name", Command: "mv /etc/cni/net.d /etc/cni/net.d.before",
		})
	}
}

func (j *judge) programs() {
	for _, p := range j.f.Programs {
		at := p.Path
		if p.Package != "" {
			at += ", package " + p.Package
		}
		x := plan.Finding{Objects: []string{p.Path}, Detail: strings.TrimSpace(p.Version + " (" + at + ")")}
		severity := plan.Warn
		switch p.Name {
		case "containerd":
			x.Title, x.Remedy = "a containerd is installed already", "stop what uses it, and keep the distribution from upgrading it"
			if p.Package != "" {
				x.Command = "apt-mark hold " + p.Package
			}
		case "dockerd":
			x.Title = "Docker is installed, which sets the policy of forwarded packets to drop and owns containerd's containers"
			x.Remedy, x.Command = "stop it, or use another machine", "systemctl disable --now docker.socket docker"
		case "crio":
			x.Title, x.Remedy, x.Command = "CRI-O is installed; nodes use containerd", "stop it", "systemctl disable --now crio"
		case "kubelet":
			if j.member {
				continue
			}
			x.Title, x.Remedy = "a kubelet is installed already", "remove it, or hold its package: two versions of one program confuse upgrades"
			if p.Package != "" {
				x.Command = "apt-get remove -y " + p.Package
			}
			if p.State == "active" {
				severity, x.Title, x.Command = plan.Block, "a kubelet runs here, and the machine is no node", "systemctl disable --now kubelet"
			}
		case "k3s", "rke2":
			severity = plan.Block
			x.Title, x.Remedy = p.Name+" is installed, which is another distribution of Kubernetes", "remove it with its own program, or use another machine"
		default:
			continue // kubeadm alone does nothing
		}
		j.add(severity, "machine-runtime", x)
	}
}

func (j *judge) ports() {
	blocked := slices.ContainsFunc(j.out, func(f plan.Finding) bool {
		return slices.Contains([]string{"machine-member", "machine-other-cluster", "machine-half-initialised", "machine-claimed", "machine-other-kubernetes"}, f.ID)
	})
	for _, p := range append(slices.Clip(ports), j.balancerPorts()...) {
		if p.role != "" && p.role != j.n.Role {
			continue
		}
		i := slices.IndexFunc(j.f.Listens, func(l Listen) bool { return l.Port == p.port })
		if i < 0 {
			continue
		}
		by := j.f.Listens[i].Program
		if by == "bootstrapper" && !blocked {
			j.add(plan.Warn, "machine-enrolled", plan.Finding{
				Title: "the bootstrapper runs here already: the machine waits for a cluster", Objects: []string{fmt.Sprint(p.port)}, Remedy: "run `constellation init` with this machine, or remove the machine first",
			})
			continue
		}
		if blocked && (by == "" || slices.ContainsFunc(kubernetes, func(k string) bool { return strings.HasPrefix(by, k) })) {
			continue // another finding has the reason
		}
		j.add(plan.Block, "machine-ports", plan.Finding{
			Title: fmt.Sprintf("port %d of the %s is in use by %s", p.port, p.of, cmp.Or(by, "a program")), Objects: []string{fmt.Sprint(p.port)},
			Remedy: "stop this program, or move it to another port", Command: fmt.Sprintf("ss -ltnp 'sport = :%d'", p.port),
		})
	}
}

func (j *judge) firewalls() {
	var list []string
	for _, p := range Ports(j.n.Role) {
		if p == 10250 || p == 9000 || p == 6443 || p == 2379 || p == 2380 || p == 30090 {
			list = append(list, fmt.Sprint(p))
		}
	}
	if b := j.n.balancer(); b != nil {
		list = append(list, fmt.Sprint(b.Port))
	}
	other := "other nodes must reach TCP " + words.And(list)
	if j.n.balancer() != nil {
		other += ", and other control planes VRRP (IP protocol 112)"
	}
	for _, w := range j.f.Firewalls {
		x := plan.Finding{Detail: other, Objects: []string{w.Tool}, Remedy: "permit these ports from the other nodes, and traffic of pods"}
		switch w.State {
		case "active":
			x.Title = w.Tool + " is active"
			switch w.Tool {
			case "ufw":
				x.Command = "ufw allow proto tcp from NETWORK to any port " + strings.Join(list, ",") + " && ufw default allow routed"
				if j.n.balancer() != nil {
					x.Command += " && ufw allow proto vrrp from NETWORK"
				}
			case "firewalld":
				x.Command = "firewall-cmd --permanent --zone=trusted --add-source=NETWORK && firewall-cmd --reload"
			}
		case "input-drop":
			x.Title, x.Command = w.Tool+" drops packets that no rule permits", "nft list chains"
		case "forward-drop":
			x.Title, x.Command, x.Detail = w.Tool+" drops forwarded packets that no rule permits", "nft list chains", "pods on different nodes cannot reach each other"
		default:
			j.add(plan.NotChecked, "machine-firewall", plan.Finding{Title: "not checked whether " + w.Tool + " filters packets", Objects: []string{w.Tool}, Detail: other, Remedy: "list its rules as root", Command: "nft list ruleset"})
			continue
		}
		if w.Tool == "iptables" {
			x.Command = "iptables-legacy -S"
		}
		j.add(plan.Warn, "machine-firewall", x)
	}
}

func (j *judge) security() {
	if j.f.AppArmor == "no-parser" {
		j.add(plan.Warn, "machine-apparmor", plan.Finding{
			Title: "AppArmor is on and its parser is missing: containers run without a profile", Remedy: "install the parser", Command: j.install("apparmor"),
		})
	}
	if j.f.SELinux == "enforcing" {
		j.add(plan.Warn, "machine-selinux", plan.Finding{
			Title: "SELinux is enforcing, which is untested here", Detail: "containerd needs the policy of container-selinux", Remedy: "install container-selinux, or make SELinux permissive and /etc/selinux/config alike", Command: "setenforce 0",
		})
	}
}

func (j *judge) network() {
	if len(j.f.Proxies) > 0 {
		j.add(plan.Warn, "machine-proxy", plan.Finding{
			Title: "the machine reaches the network through a proxy", Detail: strings.Join(j.f.Proxies, "; "),
			Remedy: "name it with --proxy of `constellation machine add`, which excludes the cluster's own networks; or do so by hand in NO_PROXY, and mirror the images: `constellation release mirror --help`",
		})
	}
	if j.f.DefaultRoute == No {
		j.add(plan.Warn, "machine-route", plan.Finding{Title: "the machine has no default route", Detail: "the kubelet and kubeadm choose the node's address by it", Remedy: "add a default route, or name the address explicitly", Command: "ip route add default via GATEWAY"})
	}
	loops := len(j.f.Nameservers) > 0 && !j.f.Resolved
	for _, s := range j.f.Nameservers {
		a, err := netip.ParseAddr(s)
		loops = loops && err == nil && a.IsLoopback()
	}
	if loops {
		j.add(plan.Warn, "machine-resolver", plan.Finding{
			Title: "/etc/resolv.conf names only the machine itself (" + words.And(j.f.Nameservers) + "): CoreDNS would query itself", Remedy: "set resolvConf of the kubelet to a file with the real name servers",
		})
	}
}

func (j *judge) tpm() {
	if j.f.TPM != "" && j.f.TPM != "1" {
		return
	}
	other := j.n.TPM
	if other == "auto" { // an enrolled machine keeps its own
		other = ""
	}
	for _, p := range j.f.Addresses {
		other = cmp.Or(other, j.n.TPMs[p.Addr()])
	}
	title := "the kernel of the machine has no TPM 2.0: the machine is attested only if --tpm of `machine add` names another one"
	if strings.HasPrefix(other, "unix:") {
		title = "the kernel of the machine has no TPM 2.0; the one at " + other + " is used"
	}
	j.add(plan.Info, "machine-tpm", plan.Finding{Title: title})
}

// Together returns findings about machines that must differ, keyed by their index in list. names are
// what the user calls them.
func Together(names []string, list []Facts) map[int][]plan.Finding {
	out := map[int][]plan.Finding{}
	for _, x := range []struct {
		id, title, remedy, command string
		of                         func(Facts) string
	}{
		{"machine-name-used-twice", "the host name %[1]s is also that of %[2]s", "rename one of them", "hostnamectl set-hostname NAME", func(f Facts) string { return strings.ToLower(f.HostName) }},
		{"machine-cloned", "the machine has the same machine ID as %[2]s: one is a clone", "give the clone an ID of its own, then reboot it", "rm /etc/machine-id /var/lib/dbus/machine-id; systemd-machine-id-setup", func(f Facts) string { return f.MachineID }},
		{"machine-cloned", "the machine has the same hardware UUID as %[2]s", "give the virtual machine a UUID of its own", "", func(f Facts) string {
			if (&judge{f: f}).container() {
				return "" // it is that of the host
			}
			return f.ProductID
		}},
	} {
		for i := range list {
			var same []string
			for k := range list {
				if k != i && x.of(list[k]) != "" && x.of(list[k]) == x.of(list[i]) {
					same = append(same, names[k])
				}
			}
			if len(same) > 0 {
				title := fmt.Sprintf(x.title, x.of(list[i]), words.And(same))
				out[i] = append(out[i], plan.Finding{ID: x.id, Severity: plan.Block, Source: "machine", Title: title, Remedy: x.remedy, Command: x.command})
			}
		}
	}
	return out
}
