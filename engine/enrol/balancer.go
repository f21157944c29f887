package enrol

import (
	"bytes"
	_ "embed" // the configuration files
	"fmt"
	"net/netip"
	"slices"
	"text/template"
)

// Balancer is the load balancer of a control plane, which every control plane has alike: haproxy in front of all API
// servers, and keepalived, which moves Address to a machine whose haproxy answers.
type Balancer struct {
	Address  netip.Addr
	Port     int
	RouterID int // of VRRP
	// Interface is the network interface of this machine that gets the address.
	Interface string
	// Servers are all control planes.
	Servers []Server
}

// Server is a control plane.
type Server struct {
	Name    string
	Address netip.Addr
}

// Files of a balancer.
const (
	HAProxyFile    = "/etc/haproxy/haproxy.cfg"
	KeepalivedFile = "/etc/keepalived/keepalived.conf"

	balancerCheck = "/usr/lib/constellation/balancer-check"
)

// monitorAddress is where haproxy answers keepalived, at the port of the balancer.
const monitorAddress = "127.0.0.2"

var (
	//go:embed haproxy.cfg
	haproxyText string
	//go:embed keepalived.conf
	keepalivedText string
	//go:embed balancer-check.sh
	checkText string

	balancerFiles = []struct {
		File
		text *template.Template
	}{
		{File{Path: balancerCheck, Mode: 0o755}, template.Must(template.New("check").Parse(checkText))},
		{File{Path: HAProxyFile, Mode: 0o644, Default: "haproxy", Own: true, Needs: "this haproxy serves something else: move its configuration away, or have an own load balancer as endpoint and remove balancer from the configuration"}, template.Must(template.New("haproxy").Parse(haproxyText))},
		{File{Path: KeepalivedFile, Mode: 0o644, Default: "keepalived", Own: true, Needs: "this keepalived serves something else: move its configuration away, or have an own load balancer as endpoint and remove balancer from the configuration"}, template.Must(template.New("keepalived").Parse(keepalivedText))},
	}
)

// WithBalancer returns the Spec of a control plane with a balancer.
func (s Spec) WithBalancer(b Balancer) (Spec, error) {
	data := struct {
		Balancer
		Cluster, Machine, Monitor, Check string
		Own                              netip.Addr
		Peers                            []Server
	}{Balancer: b, Cluster: s.Cluster, Machine: s.Machine, Monitor: monitorAddress, Check: balancerCheck}
	data.Servers = slices.Clone(b.Servers)
	slices.SortFunc(data.Servers, func(x, y Server) int { return x.Address.Compare(y.Address) })
	for _, x := range data.Servers {
		if x.Name == s.Machine {
			data.Own = x.Address
		} else {
			data.Peers = append(data.Peers, x)
		}
	}
	if !data.Own.IsValid() || b.Interface == "" {
		return Spec{}, fmt.Errorf("set up the balancer of %s: its address or its interface is not known", s.Machine)
	}
	s.Files, s.Packages, s.Units, s.Trees = slices.Clone(s.Files), slices.Clone(s.Packages), slices.Clone(s.Units), slices.Clone(s.Trees)
	for _, f := range balancerFiles {
		var out bytes.Buffer
		if err := f.text.Execute(&out, data); err != nil {
			return Spec{}, fmt.Errorf("write %s: %w", f.Path, err)
		}
		f.Data = out.Bytes()
		s.Files = append(s.Files, f.File)
	}
	// The units reload with kill of procps.
	s.Packages = append(s.Packages, Package{"procps", "/bin/kill"}, Package{"haproxy", "/usr/sbin/haproxy"}, Package{"keepalived", "/usr/sbin/keepalived"})
	s.Units = append(s.Units, Unit{Name: "haproxy.service", Start: true, Reload: true}, Unit{Name: "keepalived.service", Start: true, Reload: true})
	s.Trees = append(s.Trees, "/var/lib/haproxy") // which its package leaves
	return s, s.validate()
}
