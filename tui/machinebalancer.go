package tui

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"constellation/engine/enrol"
	"constellation/engine/machinecheck"
	"constellation/engine/plan"
	"constellation/engine/words"
	"constellation/engine/workspace"
)

// controlPlane is the group of control planes.
const controlPlane workspace.Role = "control-plane"

// ownBalancer is the balancer that control planes of the workspace get; nil without one.
func ownBalancer(ws *workspace.Workspace) *machinecheck.Balancer {
	l, err := ws.MachineList()
	if err != nil || l.Balancer == nil {
		return nil
	}
	expected := slices.ContainsFunc(l.Machines, func(m workspace.Machine) bool { return m.Group == controlPlane })
	return &machinecheck.Balancer{Cluster: l.UID, Address: l.Balancer.Address, Port: l.Balancer.Port, Interface: l.Balancer.Interface, Expected: expected}
}

// isMember reports whether a checked machine is a node of the cluster and stays one.
func (x *addition) isMember(i int) bool {
	return !x.rejoins[i] && slices.ContainsFunc(x.results[i].Findings, func(f plan.Finding) bool { return f.ID == "machine-member" })
}

// balanced returns an error if a machine that is a node is not listed, or if a control plane is new and not all are named
// that have a balancer.
func (x *addition) balanced(e *workspace.Enrolment) error {
	if e.Balancer == nil || x.needs.Role != controlPlane {
		return nil
	}
	named := func(in []workspace.Machine, name string) bool {
		return slices.ContainsFunc(in, func(m workspace.Machine) bool { return m.Name == name })
	}
	isNew := false
	for i, m := range x.machines {
		if named(e.Machines, m.Name) {
			continue
		}
		isNew = true
		if x.isMember(i) {
			return &plan.Error{Op: "add " + x.results[i].Machine, Err: fmt.Errorf("it is a node of this cluster, and the configuration does not list %s", m.Name), Remedy: "name it as in the configuration with --name", Exit: plan.ExitNothing}
		}
	}
	var names, logins []string
	for _, m := range e.Machines {
		if isNew && m.Group == controlPlane && !named(x.machines, m.Name) {
			names, logins = append(names, m.Name), append(logins, "--ssh USER@"+m.Address)
		}
	}
	if len(names) == 0 {
		return nil
	}
	return &plan.Error{
		Op: "add " + words.Count(len(x.machines), "machine"), Err: fmt.Errorf("the balancer on %s must get the new address, too", words.And(names)), Exit: plan.ExitUsage,
		Remedy: "add to the command: " + strings.Join(logins, " ") + "; a machine that is lost: `constellation machine remove NAME --gone` first",
	}
}

// alone returns an error if machines that call are control planes which others must learn of: those cannot be called.
func (x *addition) alone(e *workspace.Enrolment) error {
	if e.Balancer == nil || x.needs.Role != controlPlane || !slices.ContainsFunc(e.Machines, func(m workspace.Machine) bool { return m.Group == controlPlane }) {
		return nil
	}
	return &plan.Error{
		Op: "add " + words.Count(len(x.machines), "machine"), Err: errors.New("the balancers of the other control planes must get the new address, too"), Exit: plan.ExitUsage,
		Remedy: "add it with --ssh, and name the other control planes in the same command",
	}
}

// inOrder enrols the machines of the batch, and returns the first error. With a balancer, control planes that exist learn
// of new ones first: two machines that do not expect each other would both take the address.
func (x *addition) inOrder(ctx context.Context, e *workspace.Enrolment, step func(int, enrol.Step), done func(int, enrol.Result) error) (failed error) {
	var parts [2][]int
	for i, j := range x.batch.Jobs {
		k := 1
		if e.Balancer != nil && slices.ContainsFunc(e.Machines, func(m workspace.Machine) bool { return m.Name == j.Spec.Machine }) {
			k = 0
		}
		parts[k] = append(parts[k], i)
	}
	for _, part := range parts {
		b := x.batch
		b.Jobs = nil
		for _, i := range part {
			if failed != nil {
				_ = done(i, enrol.Result{Err: &plan.Error{Op: "add machine " + x.batch.Jobs[i].Spec.Machine, Err: errors.New("another control plane did not get its address"), Remedy: "run the same command again when that is mended"}})
				continue
			}
			b.Jobs = append(b.Jobs, x.batch.Jobs[i])
		}
		if len(b.Jobs) == 0 {
			continue
		}
		x.s.Enrol.Install(ctx, b, func(k int, s enrol.Step) { step(part[k], s) }, func(k int, r enrol.Result) {
			failed = cmp.Or(failed, done(part[k], r))
		})
	}
	return failed
}

// withBalancer adds the balancer to the Spec of a machine, if it gets one.
func withBalancer(s enrol.Spec, e *workspace.Enrolment, m workspace.Machine, f *machinecheck.Facts) (enrol.Spec, error) {
	if e.Balancer == nil || m.Group != controlPlane {
		return s, nil
	}
	b := enrol.Balancer{Address: e.Balancer.Address, Port: e.Balancer.Port, RouterID: e.Balancer.RouterID, Interface: e.Balancer.Interface}
	for _, x := range e.Machines {
		ip, err := netip.ParseAddr(x.Address)
		if err != nil {
			return s, fmt.Errorf("read the address of %s: %w", x.Name, err)
		}
		if x.Name == m.Name && b.Interface == "" {
			b.Interface = f.InterfaceFor(b.Address, ip)
		}
		if x.Group == controlPlane {
			b.Servers = append(b.Servers, enrol.Server{Name: x.Name, Address: ip})
		}
	}
	if b.Interface == "" {
		return s, &plan.Error{Op: "add " + m.Name, Err: fmt.Errorf("no network interface has the network of %s or the address %s", b.Address, m.Address), Remedy: "write the interface of the balancer into the configuration", Exit: plan.ExitUsage}
	}
	return s.WithBalancer(b)
}

// shorten is how the balancers of the others forget a control plane of the list that was removed; none if they need not.
func shorten(s *session, l *workspace.MachineList, removed string) []string {
	var names, logins []string
	had := false
	for _, m := range l.Machines {
		switch {
		case m.Group != controlPlane:
		case m.Name == removed:
			had = true
		default:
			names, logins = append(names, m.Name), append(logins, "--ssh USER@"+m.Address)
		}
	}
	if l.Balancer == nil || !had || len(names) == 0 {
		return nil
	}
	return []string{fmt.Sprintf("the balancer on %s still lists it: run `%s --group control-plane %s`", words.And(names), s.command("machine add"), strings.Join(logins, " "))}
}
