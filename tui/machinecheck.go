package tui

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync"

	"github.com/spf13/cobra"

	"constellation/engine/machinecheck"
	"constellation/engine/plan"
	"constellation/engine/words"
	"constellation/engine/workspace"
	"constellation/tui/term"
	"constellation/tui/view"
)

func machineCheck(s *session) *cobra.Command {
	var (
		o        sshOptions
		role     string
		fix, yes bool
		out      format
	)
	cmd := &cobra.Command{
		Use:   "check",
		Short: "Check Linux machines for what keeps them from being nodes",
		Long: `Log in to Linux machines by SSH and check whether they can become nodes. Check reports the
distribution, kernel modules and parameters, swap, ports, clock, control groups, disk space,
memory, host name, firewall, container runtimes, and what other clusters left there. Each
finding has the command that mends it. Several machines are checked side by side, and must
differ in host name and machine ID.

Check runs one script on each machine, which changes nothing and needs no workspace. With --fix
it then lists the commands of findings about kernel modules, kernel parameters and swap, runs
them as root after a prompt, or with --yes, and checks again. Other findings stay with you. Without
root, with neither a login of root nor --sudo, some findings are not checked.

Host keys are strict: a machine must be in ~/.ssh/known_hosts, or have the fingerprint of
--host-key. Logins use the agent, key files and certificates beside them, and no password.
~/.ssh/config is not read. On a terminal, check prompts for passphrases of keys and for the
password of sudo.

Exit code: 0 nothing stands in the way; 1 a machine could not be checked or mended; 2 bad flag;
4 a finding stands in the way; 5 --fix was not accepted, and nothing was changed.`,
		Example: `  constellation machine check --ssh root@10.0.0.11
  constellation machine check --ssh admin@10.0.0.11 --ssh admin@10.0.0.12 --sudo --role control-plane
  constellation machine check --ssh admin@10.0.0.11 --jump admin@bastion.example.com --key id_ed25519
  constellation machine check --ssh root@10.0.0.11 --ssh root@10.0.0.12 --fix
  constellation machine check --ssh root@10.0.0.11 --host-key SHA256:IGDmYJXWOPZ3gDA5tKDHBS4b2rPKPKZd4J9aX2n6FGo
  constellation machine check --ssh root@10.0.0.11 -o json | jq '.machines[].findings[] | {severity, id, command}'`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return runMachineCheck(cmd.Context(), s, &o, role, fixing{fix, yes}, out)
		},
	}
	sshFlags(cmd, &o, "; may be repeated")
	cmd.Flags().StringVar(&role, "role", "worker", "`role` of the machines: control-plane or worker")
	cmd.Flags().BoolVar(&fix, "fix", false, "mend kernel modules, kernel parameters and swap")
	cmd.Flags().BoolVarP(&yes, "yes", "y", false, "run the commands of --fix without a prompt")
	_ = cmd.RegisterFlagCompletionFunc("role", fixed("control-plane", "worker"))
	outputFlag(cmd, &out, "output format: text, or json for one document")
	return cmd
}

// fixing says whether findings are mended, and whether without a prompt.
type fixing struct{ wanted, yes bool }

// runMachineCheck runs `machine check`.
func runMachineCheck(ctx context.Context, s *session, o *sshOptions, role string, fix fixing, f format) error {
	r := machinecheck.Report{Schema: plan.Schema, Time: s.Now().UTC(), CLI: s.Release}
	var err error
	if r.Role, err = machinecheck.ParseRole(role); err != nil {
		return err
	}
	targets, err := o.targets()
	if err != nil {
		return err
	}
	ctx, stop := s.signals(ctx)
	defer stop()
	if fix.yes && !fix.wanted {
		return &plan.Error{Op: "read flags", Err: errors.New("--yes needs --fix"), Remedy: "add --fix, or leave out --yes", Exit: plan.ExitUsage}
	}
	live := s.liveLine()
	var shown sync.Mutex // of the terminal
	done, doing := 0, "checking"
	progress := func() {
		live.Set(fmt.Sprintf("%s %s%s, %d done", doing, words.Count(len(targets), "machine"), term.Clean(o.jumpText()), done))
	}
	next := func() {
		shown.Lock()
		defer shown.Unlock()
		done++
		progress()
	}
	progress()
	ssh := o.options(s, func(prompt func()) {
		shown.Lock()
		defer shown.Unlock()
		live.Clear()
		prompt()
		progress()
	})
	of := machinecheck.Request{Targets: targets, SSH: ssh, Needs: machinecheck.Needs{Role: r.Role}}
	if ws, _, err := s.workspace(); err == nil {
		of.Needs = needsOf(ws, r.Role)
	}
	check := func() {
		done, doing = 0, "checking"
		r.Machines = s.CheckMachines(ctx, of, func(machinecheck.Result) { next() })
		live.Clear()
	}
	check()
	if fix.wanted && ctx.Err() == nil && machineFixes(r.Machines) > 0 {
		if err := confirmFixes(s, r.Machines, fix, o.nonInteractive, f); err != nil {
			return err
		}
		done, doing = 0, "mending"
		r.Fixed = s.FixMachines(ctx, of, r.Machines, func(machinecheck.Fixed) { next() })
		check()
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	switch {
	case f == asJSON:
		err = document(s.out, r)
	case len(r.Machines) != 1 || r.Machines[0].Err == nil: // else the error has everything
		s.print(view.MachineReport(s.page(), s.answerWidth(), &r))
	}
	if err != nil {
		return err
	}
	for _, x := range r.Fixed {
		if x.Err != nil {
			return x.Err
		}
	}
	return machineVerdict(r.Machines)
}

// needsOf are what the check of a machine is for: a role in the cluster of a workspace.
func needsOf(ws *workspace.Workspace, role workspace.Role) machinecheck.Needs {
	n := machinecheck.Needs{Role: role, CA: ownCA(ws), Balancer: ownBalancer(ws)}
	l, err := ws.MachineList()
	if err != nil {
		return n
	}
	n.TPMs, n.Listed = map[netip.Addr]string{}, map[string]netip.Addr{}
	for _, m := range l.Machines {
		ip, err := netip.ParseAddr(m.Address)
		if err != nil {
			continue
		}
		n.Listed[m.Name] = ip
		if m.TPM != "" {
			n.TPMs[ip] = m.TPM
		}
	}
	return n
}

// ownCA is the digest of the certificate authority of the workspace's cluster, whose nodes are recognised by it.
// It is empty without a cluster.
func ownCA(ws *workspace.Workspace) string {
	b, err := ws.Kubeconfig()
	if err != nil {
		return ""
	}
	return machinecheck.CADigest(workspace.KubeconfigCA(b))
}

// machineFixes counts the commands that mend findings.
func machineFixes(results []machinecheck.Result) (n int) {
	for i := range results {
		n += len(machinecheck.Fixes(&results[i]))
	}
	return n
}

// confirmFixes lists the commands and returns an error unless the user wants them.
func confirmFixes(s *session, results []machinecheck.Result, fix fixing, nonInteractive bool, f format) error {
	n, on := 0, 0
	for i := range results {
		list := machinecheck.Fixes(&results[i])
		if len(list) == 0 {
			continue
		}
		n, on = n+len(list), on+1
		if f == asJSON {
			continue
		}
		fmt.Fprintf(s.out, "on %s, as root:\n", term.Clean(results[i].Machine))
		for _, c := range list {
			fmt.Fprintf(s.out, "  %s\n", term.Clean(c))
		}
	}
	op := "mend " + words.Count(on, "machine")
	switch {
	case fix.yes:
		return nil
	case f == asJSON:
		return &plan.Error{Op: op, Err: errors.New("the commands were not accepted; nothing was changed"), Remedy: "read them in the findings of the check without --fix, then run the same command with --yes", Exit: plan.ExitUnacknowledged}
	case nonInteractive || !s.asks():
		return &plan.Error{Op: op, Err: errors.New("the commands were not accepted; nothing was changed"), Remedy: "read them above, then run the same command with --yes", Exit: plan.ExitUnacknowledged}
	case !s.prompt().confirmed(fmt.Sprintf("Run %s on %s?", words.Count(n, "command"), words.Count(on, "machine"))):
		return &plan.Error{Op: op, Err: errors.New("the commands were not accepted; nothing was changed"), Exit: plan.ExitUnacknowledged}
	}
	return nil
}

// machineVerdict is the result of a check as an error; nil if nothing stands in the way.
func machineVerdict(results []machinecheck.Result) error {
	op := "check " + words.Count(len(results), "machine")
	var failed, blocked []machinecheck.Result
	for _, r := range results {
		switch {
		case r.Err != nil:
			failed = append(failed, r)
		case !r.Ready:
			blocked = append(blocked, r)
		}
	}
	if len(failed) > 0 {
		if len(results) == 1 {
			return failed[0].Err
		}
		return &plan.Error{Op: op, Err: fmt.Errorf("%d of them could not be checked, such as %s", len(failed), failed[0].Machine), Remedy: failed[0].Remedy}
	}
	if len(blocked) == 0 {
		return nil
	}
	list, total := blocked[0].Blocked(), 0
	for i := range blocked {
		total += len(blocked[i].Blocked())
	}
	where := ""
	if len(results) > 1 {
		where = fmt.Sprintf(" on %d of them, such as %s", len(blocked), blocked[0].Machine)
	}
	return &plan.Error{Op: op, Err: fmt.Errorf("%s in the way%s: %s", words.Count(total, "finding"), where, list[0].Title), Remedy: list[0].Remedy, Exit: plan.ExitBlocked}
}
