package tui

import (
	"context"

	"constellation/engine/machinecheck"
	"constellation/engine/plan"
	"constellation/engine/sshhost"
	"constellation/engine/workspace"
	"constellation/tui/console"
)

// consoleMachines is how a console works with the machines of a workspace, by the code of the verbs; nil if its
// configuration has no list of machines.
func consoleMachines(s *session, eng Engine, ws *workspace.Workspace) *console.Machines {
	if c, err := ws.Config(); err != nil || !workspace.HasMachineList(c) {
		return nil
	}
	v := &inventory{s, ws, func() (Engine, error) { return eng, nil }}
	return &console.Machines{
		List: v.list,
		Check: func(ctx context.Context, to console.MachineLogin, group string, ask console.Ask) (machinecheck.Report, error) {
			o := sshOf(to)
			r := machinecheck.Report{Schema: plan.Schema, Time: s.Now().UTC(), CLI: s.Release}
			targets, err := o.targets()
			if err == nil {
				r.Role, err = machinecheck.ParseRole(group)
			}
			if err != nil {
				return r, err
			}
			r.Machines = s.CheckMachines(ctx, machinecheck.Request{Targets: targets, SSH: o.asking(s, prompts(ask)), Needs: machinecheck.Needs{Role: r.Role, CA: ownCA(ws)}}, func(machinecheck.Result) {})
			if ctx.Err() != nil {
				return r, context.Cause(ctx)
			}
			return r, machineVerdict(r.Machines)
		},
	}
}

// sshOf returns the flags of a login.
func sshOf(to console.MachineLogin) *sshOptions {
	return &sshOptions{machines: to.Machines, key: to.Key, jump: to.Jump, hostKeys: to.HostKeys, sudo: to.Sudo, timeout: sshhost.DefaultTimeout}
}

// prompts are those of a console.
func prompts(ask console.Ask) *secretPrompts {
	return &secretPrompts{ask: ask, known: map[string][]byte{}}
}
