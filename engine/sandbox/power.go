package sandbox

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"constellation/engine"
	"constellation/engine/cloud"
	"constellation/engine/cloud/sandboxapi"
	"constellation/engine/plan"
)

const stepPower = "switch-machines"

// Power switches machines on or off, like a power button: the named ones, or all if none
// is named. It switches all of them at the same time, and returns when those that must
// run are ready. It does not check the health of their cluster. Machines that are already
// in the desired state are left alone.
func (s *Sandboxes) Power(ctx context.Context, name string, action engine.PowerAction, machines []string, emit func(plan.Event)) error {
	t := newTeller(emit)
	client, name, err := s.reach(name, string(action)+" machines")
	if err != nil {
		return err
	}
	op := fmt.Sprintf("%s machines of sandbox %s", action, name)
	if s.dirs.isHollow(name) {
		return usage(op, "`constellation sandbox up --fault never-boot=0.1` is what may happen to them; delete one's Node with kubectl to lose it", "its machines are hollow: they have no power and boot nothing")
	}
	info, err := client.Sandbox(ctx)
	if err != nil {
		return &plan.Error{Op: op, Err: err, Remedy: "start its cloud with `constellation sandbox up`"}
	}
	chosen, err := choose(info.Machines, machines)
	if err != nil {
		return usage(op, "name some of its machines, or say --all", "%w", err)
	}
	text := map[engine.PowerAction]string{
		engine.PowerReboot: "Reboot", engine.PowerCut: "Cut the power of", engine.PowerOff: "Switch off", engine.PowerOn: "Switch on",
	}[action]
	if text == "" {
		return usage(op, "choose reboot, power-cut, off or on", "%q is nothing that can be done to a machine", action)
	}
	t.step(stepPower, plan.StateRunning, text+" "+named(chosen))
	err = switched(ctx, client, action, chosen)
	if err == nil && action != engine.PowerOff {
		err = t.untilReady(ctx, client, chosen)
	}
	if err != nil {
		err = &plan.Error{Op: op, Err: err, Remedy: "look at them with `constellation sandbox status`"}
		t.step(stepPower, plan.StateFailed, err.Error())
		return err
	}
	done := named(chosen) + " ready again; their cluster may take a little longer"
	if action == engine.PowerOff {
		done = named(chosen) + " off until `constellation sandbox machine on`"
	}
	t.step(stepPower, plan.StateDone, done)
	return nil
}

// reach returns the control API of a sandbox that exists, and its name.
func (s *Sandboxes) reach(nameOrWorkspace, what string) (*sandboxapi.Client, string, error) {
	name, err := s.dirs.resolve(nameOrWorkspace)
	if err != nil {
		return nil, "", usage(what, "give the sandbox's name, or the directory it was made for", "%w", err)
	}
	if _, err := readState(s.dirs.of(name, stateName)); err != nil {
		op := what + " of sandbox " + name
		if errors.Is(err, fs.ErrNotExist) {
			return nil, "", &plan.Error{Op: op, Err: noSuch(), Remedy: "start it with `constellation sandbox up`" + otherUsers()}
		}
		return nil, "", &plan.Error{Op: op, Err: err}
	}
	return sandboxapi.NewClient("unix:"+s.dirs.of(name, socketName), ""), name, nil
}

// choose finds machines by their names. Without names it returns all that are not being deleted.
func choose(there []sandboxapi.Machine, names []string) ([]sandboxapi.Machine, error) {
	var all []string
	var chosen []sandboxapi.Machine
	for _, m := range there {
		if m.State == cloud.Terminating {
			continue
		}
		all = append(all, m.Name)
		if len(names) == 0 || slices.Contains(names, m.Name) {
			chosen = append(chosen, m)
		}
	}
	for _, n := range names {
		if !slices.Contains(all, n) {
			return nil, fmt.Errorf("there is no machine %s; there are %s", n, strings.Join(all, ", "))
		}
	}
	if len(chosen) == 0 {
		return nil, errors.New("it has no machines")
	}
	return chosen, nil
}

func named(machines []sandboxapi.Machine) string {
	if len(machines) == 1 {
		return machines[0].Name
	}
	return fmt.Sprint(len(machines), " machines")
}

// switched applies the action to all machines at once. A power cycle switches all off before
// it switches any on, like a power failure.
func switched(ctx context.Context, client *sandboxapi.Client, action engine.PowerAction, machines []sandboxapi.Machine) error {
	each := func(do func(context.Context, string) error) error {
		g, ctx := errgroup.WithContext(ctx)
		for _, m := range machines {
			g.Go(func() error { return do(ctx, m.ProviderID) })
		}
		return g.Wait()
	}
	if action == engine.PowerCut || action == engine.PowerOff {
		if err := each(client.StopInstance); err != nil || action == engine.PowerOff {
			return err
		}
	}
	if action == engine.PowerOn {
		machines = slices.DeleteFunc(slices.Clone(machines), func(m sandboxapi.Machine) bool { return m.Boot != sandboxapi.BootStopped })
	}
	return each(client.RebootInstance)
}

// untilReady reports the progress of boots until all machines are ready, or one has failed.
func (t *teller) untilReady(ctx context.Context, client *sandboxapi.Client, machines []sandboxapi.Machine) error {
	seen := map[string]sandboxapi.Boot{}
	for {
		info, err := client.Sandbox(ctx)
		if err != nil {
			return err
		}
		ready := 0
		for _, m := range info.Machines {
			if !slices.ContainsFunc(machines, func(c sandboxapi.Machine) bool { return c.Name == m.Name }) {
				continue
			}
			if old := seen[m.Name]; old != m.Boot {
				_, group, _ := sandboxapi.ParseGroupID(m.Group)
				t.tell(plan.Event{Kind: plan.KindNode, Step: stepPower, Node: m.Name, Group: group, From: string(old), To: string(m.Boot), Text: m.Message})
				seen[m.Name] = m.Boot
			}
			switch m.Boot {
			case sandboxapi.BootReady:
				ready++
			case sandboxapi.BootFailed:
				return fmt.Errorf("%s did not boot: %s; its console: %s", m.Name, orUnknown(m.Message), m.Console)
			case sandboxapi.BootStopped:
				return fmt.Errorf("%s was switched off meanwhile: %s", m.Name, orUnknown(m.Message))
			case sandboxapi.BootCreating, sandboxapi.BootBooting:
			}
		}
		t.progressIfNew(stepPower, ready, len(machines))
		if ready >= len(machines) {
			return nil
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(100 * time.Millisecond):
		}
	}
}
