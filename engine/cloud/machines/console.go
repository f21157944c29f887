package machines

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"constellation/engine/cloud"
	"constellation/engine/cloud/section"
	"constellation/engine/component"
	"constellation/engine/version"
)

// programs are the components of a machine that an upgrade replaces.
var programs = []string{"kubeadm", "kubelet", "kubectl"}

// IsProgram reports whether a component is one of those.
func IsProgram(name string) bool { return slices.Contains(programs, name) }

// Console is the inventory as the console reads it: from the configuration. It sends no request.
type Console struct {
	list       []Machine
	components []section.Values
	sizes      map[cloud.Role]int
	uid        string // of enrolled machines; empty for adopted ones
}

// NewConsole returns the view of a section of the configuration.
func NewConsole(config section.Values) Console {
	return Console{list: List(config), components: config.Table(ComponentsTable)}
}

// NewEnrolledConsole is NewConsole of enrolled machines.
func NewEnrolledConsole(config, state section.Values) Console {
	c := NewConsole(config)
	c.uid, c.sizes = state.Text("uid"), Sizes(config)
	for n := range c.list {
		c.list[n].ProviderID = ProviderID(c.uid, c.list[n].Name)
	}
	return c
}

// Describe returns the versions of Kubernetes that the configuration has components of. An inventory has no
// identity but that of its cluster.
func (c Console) Describe(context.Context) (out cloud.Info, err error) {
	out.UID = c.uid
	for _, r := range c.components {
		if v, err := version.Parse(r.Text("kubernetes")); err == nil && !slices.ContainsFunc(out.Kubernetes, v.Equal) {
			out.Kubernetes = append(out.Kubernetes, v)
		}
	}
	return out, nil
}

// inventory returns the machines as the operator has them, without the cluster.
func (c Console) inventory() Inventory {
	i := Inventory{Cluster: c.uid, Sizes: c.sizes, Machines: make([]Entry, len(c.list))}
	for n, m := range c.list {
		i.Machines[n] = m.Entry()
	}
	return i
}

// Groups returns a group for each role.
func (c Console) Groups(context.Context) ([]cloud.Group, error) {
	i := c.inventory()
	return i.Groups(), nil
}

// Machines returns the machines of the configuration.
func (c Console) Machines(context.Context) ([]cloud.Machine, error) {
	out := make([]cloud.Machine, len(c.list))
	for n, m := range c.list {
		out[n].Verifies = true
		out[n].GroupName = string(m.Group)
		out[n].Instance = cloud.Instance{Name: m.Name, ProviderID: m.ProviderID, Role: m.Group, State: cloud.Ready, Spare: m.Spare}
		out[n].IP, _ = netip.ParseAddr(m.Address) // empty is no address
	}
	return out, nil
}

// Images returns none.
func (Console) Images(context.Context) ([]cloud.Image, error) { return nil, nil }

// Components returns the components that the configuration has for a version. The error wraps
// cloud.ErrNotFound if it has none: those of the release count then.
func (c Console) Components(_ context.Context, v version.Version) (component.Signed, error) {
	var out component.Signed
	for _, name := range programs {
		n := slices.IndexFunc(c.components, func(r section.Values) bool {
			of, err := version.Parse(r.Text("kubernetes"))
			return err == nil && of.Equal(v) && r.Text("name") == name
		})
		if n < 0 {
			continue
		}
		out.List = append(out.List, component.Component{Name: name, URL: c.components[n].Text("url"), Digest: c.components[n].Text("digest"), Path: "/usr/local/bin/" + name, Mode: 0o755})
	}
	switch {
	case len(out.List) == 0:
		return component.Signed{}, fmt.Errorf("components of Kubernetes %s: %w in the configuration", v, cloud.ErrNotFound)
	case len(out.List) < len(programs):
		return component.Signed{}, fmt.Errorf("components of Kubernetes %s: the configuration has some of kubeadm, kubelet and kubectl, and needs all", v)
	}
	if err := out.List.Validate(); err != nil {
		return component.Signed{}, errors.Join(fmt.Errorf("components of Kubernetes %s in the configuration", v), err)
	}
	return out, nil
}
