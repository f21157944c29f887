// Package machinecheck answers: can this Linux machine become a node, and what stands in the way?
//
// [Observe] runs one script on a machine, which prints [Facts] and changes nothing. [Judge] makes
// findings of facts, each with the command that mends it. It is a pure function of its arguments.
//
// The answer of a machine is hostile. [Parse] accepts only lines that the script can print, in bounded
// number and length, and an answer that is whole. A value that could not be read is Unread; it is never
// taken for absent.
package machinecheck

import (
	"errors"
	"fmt"
	"math"
	"net/netip"
	"regexp"
	"strconv"
	"strings"
	"time"

	"constellation/engine/cloud/machines"
)

// Facts are what a machine reports about itself.
type Facts struct {
	// Root is whether root observed them. Others cannot read everything.
	Root bool `json:"root"`
	// OS is from /etc/os-release.
	OS   OS     `json:"os"`
	Arch string `json:"arch"` // as `uname -m` prints it
	// Kernel is the release of the kernel.
	Kernel   string `json:"kernel"`
	HostName string `json:"hostName"`
	// Virtualization is what systemd-detect-virt prints: none, kvm, docker.
	Virtualization string `json:"virtualization,omitempty"`
	Systemd        bool   `json:"systemd"`
	// MachineID and ProductID are one-way names of /etc/machine-id and of the hardware's UUID. Clones
	// have the same ones. They are empty if they could not be read.
	MachineID string `json:"machineID,omitempty"`
	ProductID string `json:"productID,omitempty"`

	Modules []Module `json:"modules"`
	Sysctls []Sysctl `json:"sysctls"`
	Swaps   []Swap   `json:"swaps,omitempty"`
	// SwapAtBoot is whether /etc/fstab has swap.
	SwapAtBoot bool   `json:"swapAtBoot,omitempty"`
	Memory     int64  `json:"memoryKiB"`
	Cores      int    `json:"cores"`
	Cgroup     Cgroup `json:"cgroup"`
	Disks      []Disk `json:"disks"`
	// Listens are the TCP ports in use.
	Listens   []Listen   `json:"listens,omitempty"`
	Firewalls []Firewall `json:"firewalls,omitempty"`
	AppArmor  string     `json:"appArmor"` // enabled, no-parser or disabled
	SELinux   string     `json:"seLinux"`  // enforcing, permissive or disabled
	Programs  []Program  `json:"programs,omitempty"`
	// Containerd is absent if there is no /etc/containerd/config.toml.
	Containerd *Containerd `json:"containerd,omitempty"`
	// Remains are files of a cluster.
	Remains []string `json:"remains,omitempty"`
	// Server is the API server in kubelet.conf. CA is the digest of the certificate authority in
	// /etc/kubernetes/pki; compare it with CADigest. Both are empty without these files.
	Server string `json:"server,omitempty"`
	CA     string `json:"ca,omitempty"`
	// Proxies are settings of HTTP proxies, without passwords.
	Proxies []string `json:"proxies,omitempty"`
	// Lacks are programs that the kubelet needs.
	Lacks []string `json:"lacks,omitempty"`
	// TPM is the major version of the TPM; empty without one.
	TPM       string         `json:"tpm,omitempty"`
	Addresses []netip.Prefix `json:"addresses,omitempty"`
	// Networks are the interfaces of Addresses.
	Networks []Network `json:"networks,omitempty"`
	// Holder is the hardware address that answers at the address of the balancer, unread if it could not be
	// found out; empty if none does, or without such a balancer. BalancerCluster is the ID of the cluster for
	// which this machine has the balancer.
	Holder          string   `json:"holder,omitempty"`
	BalancerCluster string   `json:"balancerCluster,omitempty"`
	DefaultRoute    Answer   `json:"defaultRoute"`
	Nameservers     []string `json:"nameservers,omitempty"`
	// Resolved is whether systemd-resolved has a file with the real name servers.
	Resolved bool  `json:"resolved,omitempty"`
	Clock    Clock `json:"clock"`
}

// Answer is yes, no or unread.
type Answer string

// Answers.
const (
	Yes    Answer = "yes"
	No     Answer = "no"
	Unread Answer = "unread"
)

// OS is the distribution of a machine.
type OS struct {
	ID      string `json:"id"`
	Version string `json:"version,omitempty"`
	Like    string `json:"like,omitempty"`
	Name    string `json:"name,omitempty"`
}

// Module is a module of the kernel.
type Module struct {
	Name string `json:"name"`
	// State is loaded, builtin, loadable or missing.
	State string `json:"state"`
	// AtBoot is whether the configuration of the machine loads it.
	AtBoot bool `json:"atBoot"`
}

// Sysctl is a parameter of the kernel.
type Sysctl struct {
	Name string `json:"name"`
	// Value is empty if the kernel has no such parameter.
	Value string `json:"value,omitempty"`
	// AtBoot is whether the configuration of the machine sets it to 1.
	AtBoot bool `json:"atBoot"`
}

// Swap is an area of swap that is in use.
type Swap struct {
	Name string `json:"name"`
	Type string `json:"type"`
	KiB  int64  `json:"kib"`
}

// Cgroup is the version of control groups: v1, v2 or hybrid, which is v1 with a mounted v2.
type Cgroup struct {
	Version     string   `json:"version"`
	Controllers []string `json:"controllers,omitempty"` // of v2
}

// Disk is the file system of a folder. A number is -1 if it could not be read.
type Disk struct {
	Path       string `json:"path"`
	Free       int64  `json:"freeKiB"`
	Size       int64  `json:"sizeKiB"`
	FreeInodes int64  `json:"freeInodes"`
	Inodes     int64  `json:"inodes"`
	Writable   bool   `json:"writable"` // by the user that observed it
}

// Listen is a TCP port in use. Program is empty if it could not be read.
type Listen struct {
	Port    int    `json:"port"`
	Program string `json:"program,omitempty"`
}

// Firewall is a tool that filters packets.
type Firewall struct {
	Tool string `json:"tool"`
	// State is active, input-drop, forward-drop or unread.
	State string `json:"state"`
}

// Program is a container runtime or a part of Kubernetes.
type Program struct {
	Name string `json:"name"`
	Path string `json:"path"`
	// State is that of its systemd unit, such as active.
	State string `json:"state,omitempty"`
	// Package is the Debian package that has it.
	Package string `json:"package,omitempty"`
	Version string `json:"version,omitempty"`
}

// Network is an address of a network interface.
type Network struct {
	Interface string       `json:"interface"`
	Address   netip.Prefix `json:"address"`
}

// Clock compares the machine's clock with that of the console.
type Clock struct {
	// Offset is by how much the machine is ahead; the true value is within Uncertainty of it.
	Offset       time.Duration `json:"offset"` // nanoseconds in JSON
	Uncertainty  time.Duration `json:"uncertainty"`
	Synchronized Answer        `json:"synchronized"`
	// Service is whether systemd has a time service turned on; empty if the answer lacks it.
	Service Answer `json:"service,omitempty"`
}

// Limits of an answer.
const (
	// MaxAnswer is the maximum length of an answer in bytes.
	MaxAnswer  = 256 << 10
	maxLine    = 512
	maxRepeats = 512 // of one list
	maxNoise   = 16 << 10
)

const header = "constellation-machine-facts 1 "

// Parse reads the answer of a machine to the script with this mark. from and to are when the console
// started the script and had its answer. Lines before the header are ignored within limits, because
// startup files of shells print some.
func Parse(answer []byte, mark string, from, to time.Time) (Facts, error) {
	bad := func(format string, args ...any) (Facts, error) {
		return Facts{}, fmt.Errorf("read the machine's answer: "+format, args...)
	}
	if len(answer) > MaxAnswer {
		return bad("it has more than %d bytes", MaxAnswer)
	}
	noise, body, ok := strings.Cut("\n"+string(answer), "\n"+header+mark+"\n")
	if !ok {
		return bad("it has no header of the script")
	}
	if len(noise) > maxNoise {
		return bad("%d bytes stand before its header, want at most %d", len(noise), maxNoise)
	}
	p := parser{}
	seen := map[string]int{}
	for n := 1; ; n++ {
		line, rest, ok := strings.Cut(body, "\n")
		if !ok {
			return bad("it ends after %d lines, without the line `end`", n-1)
		}
		body = rest
		if line == fmt.Sprintf("end %d %s", n-1, mark) {
			break
		}
		if len(line) > maxLine || strings.IndexFunc(line, func(r rune) bool { return r < ' ' || r > '~' }) >= 0 {
			return bad("line %d is too long or has characters that the script does not print", n)
		}
		key, value, ok := strings.Cut(line, " ")
		k, known := keys[key]
		if !ok || !known || value == "" {
			return bad("line %d is none of the script's lines", n)
		}
		if seen[key]++; seen[key] > 1 && !k.list || seen[key] > maxRepeats {
			return bad("line %d repeats %s too often", n, key)
		}
		if err := k.set(&p, value); err != nil {
			return bad("line %d: %s %q: %w", n, key, value, err)
		}
	}
	if body != "" {
		return bad("it continues after the line `end`")
	}
	for key, k := range keys {
		if !k.list && seen[key] == 0 {
			return bad("it lacks %s", key)
		}
	}
	if err := p.clock(from, to); err != nil {
		return bad("%w", err)
	}
	p.containerd()
	return p.Facts, nil
}

// parser collects facts.
type parser struct {
	Facts
	begin, end time.Time // of the script, by the machine's clock
	config     []string  // lines of containerd's configuration
}

// clock computes the offset. The machine's time at the begin is between from and to minus the run of
// the script.
func (p *parser) clock(from, to time.Time) error {
	ran := p.end.Sub(p.begin)
	if ran < 0 || ran > to.Sub(from)+time.Second {
		return fmt.Errorf("its clock went on by %s during a script of %s", ran, to.Sub(from))
	}
	slack := max(0, to.Sub(from)-ran)
	p.Clock.Offset = p.begin.Sub(from.Add(slack / 2)).Round(time.Millisecond)
	p.Clock.Uncertainty = (slack / 2).Round(time.Millisecond)
	return nil
}

// key describes one key of an answer.
type key struct {
	list bool // may be absent, and repeated
	set  func(p *parser, value string) error
}

// one is a key that stands once.
func one(set func(p *parser, value string) error) key { return key{set: set} }

// keys are all keys of an answer.
var keys = map[string]key{
	"clock.begin":        one(func(p *parser, v string) error { return setTime(&p.begin, v) }),
	"clock.end":          one(func(p *parser, v string) error { return setTime(&p.end, v) }),
	"clock.synchronized": one(func(p *parser, v string) error { return setAnswer(&p.Clock.Synchronized, v) }),
	"clock.service":      {true, func(p *parser, v string) error { return setAnswer(&p.Clock.Service, v) }},
	"user": one(func(p *parser, v string) error {
		n, err := number(v)
		p.Root = n == 0
		return err
	}),
	"os.id":          text(func(p *parser) *string { return &p.OS.ID }),
	"os.version":     text(func(p *parser) *string { return &p.OS.Version }),
	"os.like":        text(func(p *parser) *string { return &p.OS.Like }),
	"os.name":        text(func(p *parser) *string { return &p.OS.Name }),
	"arch":           text(func(p *parser) *string { return &p.Arch }),
	"kernel":         text(func(p *parser) *string { return &p.Kernel }),
	"hostname":       text(func(p *parser) *string { return &p.HostName }),
	"virtualization": text(func(p *parser) *string { return &p.Virtualization }),
	"id.machine":     text(func(p *parser) *string { return &p.MachineID }),
	"id.product":     text(func(p *parser) *string { return &p.ProductID }),
	"cluster.server": text(func(p *parser) *string { return &p.Server }),
	"cluster.ca":     text(func(p *parser) *string { return &p.CA }),
	"tpm":            text(func(p *parser) *string { return &p.TPM }),
	"apparmor":       choice(func(p *parser) *string { return &p.AppArmor }, "enabled", "no-parser", "disabled"),
	"selinux":        choice(func(p *parser) *string { return &p.SELinux }, "enforcing", "permissive", "disabled"),
	"systemd":        flag(func(p *parser) *bool { return &p.Systemd }),
	"swap.fstab":     flag(func(p *parser) *bool { return &p.SwapAtBoot }),
	"resolved":       flag(func(p *parser) *bool { return &p.Resolved }),
	"memory": one(func(p *parser, v string) (err error) {
		p.Memory, err = number(v)
		return err
	}),
	"cores": one(func(p *parser, v string) error {
		n, err := number(v)
		if err == nil && n > math.MaxInt32 {
			return errRange
		}
		p.Cores = int(n)
		return err
	}),
	"cgroup": one(func(p *parser, v string) error {
		f := strings.Fields(v)
		switch f[0] {
		case "v1", "v2", "hybrid":
			p.Cgroup = Cgroup{f[0], f[1:]}
		case "?":
			p.Cgroup = Cgroup{Version: string(Unread)}
		default:
			return errValue
		}
		return nil
	}),
	"route.default": one(func(p *parser, v string) error { return setAnswer(&p.DefaultRoute, v) }),

	"module": fields(3, 3, func(p *parser, f []string) error {
		switch f[1] {
		case "loaded", "builtin", "loadable", "missing":
		default:
			return errValue
		}
		if !nameRE.MatchString(f[0]) {
			return errValue
		}
		p.Modules = append(p.Modules, Module{f[0], f[1], f[2] == "yes"})
		return nil
	}),
	"sysctl": fields(3, 3, func(p *parser, f []string) error {
		if !nameRE.MatchString(f[0]) || !nameRE.MatchString(f[1]) {
			return errValue
		}
		p.Sysctls = append(p.Sysctls, Sysctl{f[0], absent(f[1]), f[2] == "yes"})
		return nil
	}),
	"swap": fields(3, 3, func(p *parser, f []string) error {
		n, err := number(f[2])
		p.Swaps = append(p.Swaps, Swap{f[0], f[1], n})
		return err
	}),
	"disk": fields(6, 6, func(p *parser, f []string) error {
		if !nameRE.MatchString(f[0]) {
			return errValue
		}
		d := Disk{Path: f[0], Writable: f[5] == "yes"}
		for i, to := range []*int64{&d.Free, &d.Size, &d.FreeInodes, &d.Inodes} {
			if f[i+1] == "?" {
				*to = -1
				continue
			}
			n, err := number(f[i+1])
			if err != nil {
				return err
			}
			*to = n
		}
		p.Disks = append(p.Disks, d)
		return nil
	}),
	"listen": fields(2, 2, func(p *parser, f []string) error {
		n, err := number(f[0])
		if err != nil || n < 1 || n > 65535 {
			return errRange
		}
		p.Listens = append(p.Listens, Listen{int(n), known(f[1])})
		return nil
	}),
	"firewall": fields(2, 2, func(p *parser, f []string) error {
		state := f[1]
		if state == "?" {
			state = string(Unread)
		}
		p.Firewalls = append(p.Firewalls, Firewall{f[0], state})
		return nil
	}),
	"program": fields(4, math.MaxInt, func(p *parser, f []string) error {
		if !nameRE.MatchString(f[0]) || !nameRE.MatchString(f[1]) || f[3] != "?" && !nameRE.MatchString(f[3]) {
			return errValue
		}
		p.Programs = append(p.Programs, Program{f[0], f[1], known(f[2]), known(f[3]), known(strings.Join(f[4:], " "))})
		return nil
	}),
	"containerd.config": {true, func(p *parser, v string) error {
		switch v {
		case containerdPackage, containerdDumped, containerdFile:
		case "?":
			v = string(Unread)
		default:
			return errValue
		}
		p.Containerd = &Containerd{Source: v}
		return nil
	}},
	"containerd.line": line(func(p *parser) *[]string { return &p.config }),
	"tool": fields(2, 2, func(p *parser, f []string) error {
		if f[1] != "yes" {
			p.Lacks = append(p.Lacks, f[0])
		}
		return nil
	}),
	"address": fields(2, 2, func(p *parser, f []string) error {
		a, err := netip.ParsePrefix(f[0])
		if err != nil {
			return errValue
		}
		p.Addresses = append(p.Addresses, a)
		if machines.ValidInterface(f[1]) { // it becomes part of a configuration file
			p.Networks = append(p.Networks, Network{f[1], a})
		}
		return nil
	}),
	"balancer.holder": {list: true, set: func(p *parser, v string) error {
		if v == "?" {
			p.Holder = string(Unread)
			return nil
		}
		if absent(v) != "" && !hardwareRE.MatchString(v) {
			return errValue
		}
		p.Holder = absent(v)
		return nil
	}},
	"balancer.cluster": {list: true, set: func(p *parser, v string) error {
		if absent(v) != "" && !nameRE.MatchString(v) {
			return errValue
		}
		p.BalancerCluster = absent(v)
		return nil
	}},
	"remains":    line(func(p *parser) *[]string { return &p.Remains }),
	"proxy":      line(func(p *parser) *[]string { return &p.Proxies }),
	"nameserver": line(func(p *parser) *[]string { return &p.Nameservers }),
}

// nameRE matches what becomes part of a command that users copy.
var nameRE = regexp.MustCompile(`^[A-Za-z0-9_./+-]{1,128}$`)

var hardwareRE = regexp.MustCompile(`^[0-9a-f]{2}(:[0-9a-f]{2}){5,19}$`)

var (
	errValue = errors.New("unknown value")
	errRange = errors.New("out of range")
)

// absent returns the empty string for the mark of an absent value, known also for an unread one.
func absent(s string) string {
	if s == "-" {
		return ""
	}
	return s
}

func known(s string) string {
	if s == "?" {
		return ""
	}
	return absent(s)
}

func text(to func(*parser) *string) key {
	return one(func(p *parser, v string) error {
		*to(p) = known(v)
		return nil
	})
}

func choice(to func(*parser) *string, values ...string) key {
	return one(func(p *parser, v string) error {
		for _, x := range values {
			if v == x {
				*to(p) = v
				return nil
			}
		}
		return errValue
	})
}

func flag(to func(*parser) *bool) key {
	return one(func(p *parser, v string) error {
		if v != "yes" && v != "no" {
			return errValue
		}
		*to(p) = v == "yes"
		return nil
	})
}

func line(to func(*parser) *[]string) key {
	return key{true, func(p *parser, v string) error {
		*to(p) = append(*to(p), v)
		return nil
	}}
}

func fields(least, most int, set func(*parser, []string) error) key {
	return key{true, func(p *parser, v string) error {
		f := strings.Fields(v)
		if len(f) < least || len(f) > most {
			return fmt.Errorf("%d fields, want %d", len(f), least)
		}
		return set(p, f)
	}}
}

func number(s string) (int64, error) {
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil || n < 0 {
		return 0, errRange
	}
	return n, nil
}

func setAnswer(to *Answer, v string) error {
	switch v {
	case "yes", "no":
		*to = Answer(v)
	case "?", "-":
		*to = Unread
	default:
		return errValue
	}
	return nil
}

// setTime reads seconds with nanoseconds. A date of another kind than GNU's prints no nanoseconds.
func setTime(to *time.Time, v string) error {
	s, frac, _ := strings.Cut(v, ".")
	sec, err := number(s)
	if err != nil {
		return err
	}
	nano, err := number(frac)
	if err != nil || len(frac) != 9 {
		nano = 0
	}
	*to = time.Unix(sec, nano)
	return nil
}
