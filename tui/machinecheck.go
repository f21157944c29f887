package tui

import (
	"cmp"
	"context"
	"fmt"
	"strings"
	"sync"

	"github.com/spf13/cobra"

	"constellation/engine/machinecheck"
	"constellation/engine/plan"
	"constellation/engine/words"
	"constellation/tui/term"
	"constellation/tui/view"
)

func machineCheck(s *session) *cobra.Command {
	var (
		o    sshOptions
		role string
		out  format
	)
	cmd := &cobra.Command{
		Use:   "check",
		Short: "Check Linux machines for what keeps them from being nodes",
		Long: `Log in to Linux machines by SSH and check whether they can become nodes. Check reports the
distribution, kernel modules and parameters, swap, ports, clock, control groups, disk space,
memory, host name, firewall, container runtimes, and what other clusters left there. Each
finding has the command that mends it. Several machines are checked side by side, and must
differ in host name and machine ID.

Check runs one script on each machine, which changes nothing and needs no workspace. Without
root, with neither a login of root nor --sudo, some findings are not checked.

Host keys are strict: a machine must be in ~/.ssh/known_hosts, or have the fingerprint of
--host-key. Logins use the agent, key files and certificates beside them, and no password.
~/.ssh/config is not read. On a terminal, check prompts for passphrases of keys and for the
password of sudo.

Exit code: 0 nothing stands in the way; 1 a machine could not be checked; 2 bad flag; 4 a
finding stands in the way.`,
		Example: `  constellation machine check --ssh root@10.0.0.11
  constellation machine check --ssh admin@10.0.0.11 --ssh admin@10.0.0.12 --sudo --role control-plane
  constellation machine check --ssh admin@10.0.0.11 --jump admin@bastion.example.com --key id_ed25519
  constellation machine check --ssh root@10.0.0.11 --host-key SHA256:IGDmYJXWOPZ3gDA5tKDHBS4b2rPKPKZd4J9aX2n6FGo
  constellation machine check --ssh root@10.0.0.11 -o json | jq '.machines[].findings[] | {severity, id, command}'`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return runMachineCheck(cmd.Context(), s, &o, role, out)
		},
	}
	sshFlags(cmd, &o, "; may be repeated")
	cmd.Flags().StringVar(&role, "role", "worker", "`role` of the machines: control-plane or worker")
	_ = cmd.RegisterFlagCompletionFunc("role", fixed("control-plane", "worker"))
	outputFlag(cmd, &out, "output format: text, or json for one document")
	return cmd
}

// runMachineCheck runs `machine check`.
func runMachineCheck(ctx context.Context, s *session, o *sshOptions, role string, f format) error {
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
	live := s.liveLine()
	var shown sync.Mutex // of the terminal
	done := 0
	progress := func() {
		live.Set(fmt.Sprintf("checking %s%s, %d done", words.Count(len(targets), "machine"), term.Clean(o.jumpText()), done))
	}
	progress()
	ssh := o.options(s, func(prompt func()) {
		shown.Lock()
		defer shown.Unlock()
		live.Clear()
		prompt()
		progress()
	})
	r.Machines = s.CheckMachines(ctx, machinecheck.Request{Targets: targets, SSH: ssh, Needs: machinecheck.Needs{Role: r.Role}}, func(machinecheck.Result) {
		shown.Lock()
		defer shown.Unlock()
		done++
		progress()
	})
	live.Clear()
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	switch {
	case f == asJSON:
		err = document(s.out, r)
	case len(r.Machines) != 1 || r.Machines[0].Err == nil: // else the error has everything
		s.print(machineText(s.page(), s.answerWidth(), &r))
	}
	if err != nil {
		return err
	}
	return machineVerdict(r.Machines)
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

// machineText renders the results: one line for each machine, then the findings of each.
func machineText(pg view.Page, w int, report *machinecheck.Report) (lines []string) {
	results := report.Machines
	name := 0
	for _, r := range results {
		name = max(name, term.Width(term.Clean(r.Machine)))
	}
	name = min(name, 40)
	for i := range results {
		r := &results[i]
		severity, verdict := machineSummary(r, string(report.Role))
		sign, st := view.SeveritySignOf(pg, severity)
		lines = append(lines, pg.Row(w).Add(st, sign+" ").Col(term.Strong, term.Clean(r.Machine), name+2).Add(term.Plain, verdict).String())
	}
	for i := range results {
		lines = append(lines, "", pg.Rule(w, term.Clean(results[i].Machine), ""))
		lines = append(lines, machineRows(pg, w, &results[i])...)
	}
	return lines
}

// machineSummary is the verdict about a machine in a few words.
func machineSummary(r *machinecheck.Result, role string) (plan.Severity, string) {
	if r.Error != "" {
		return plan.Block, "could not be checked"
	}
	n := map[plan.Severity]int{}
	for _, f := range r.Findings {
		n[f.Severity]++
	}
	var more []string
	if n[plan.Warn] > 0 {
		more = append(more, words.Count(n[plan.Warn], "warning"))
	}
	if n[plan.NotChecked] > 0 {
		more = append(more, fmt.Sprintf("%d not checked", n[plan.NotChecked]))
	}
	as := strings.ReplaceAll(role, "-", " ")
	severity, verdict := plan.Info, "can become a "+as
	switch {
	case n[plan.Block] > 0:
		severity, verdict = plan.Block, "cannot become a "+as+": "+words.Count(n[plan.Block], "finding")+" in the way"
	case n[plan.Warn] > 0:
		severity = plan.Warn
	case n[plan.NotChecked] > 0:
		severity = plan.NotChecked
	}
	return severity, strings.Join(append([]string{verdict}, more...), ", ")
}

// machineRows are the facts and findings of a machine.
func machineRows(pg view.Page, w int, r *machinecheck.Result) (lines []string) {
	signed := func(s plan.Severity, text string) {
		sign, st := view.SeveritySignOf(pg, s)
		for k, p := range term.Wrap(term.Clean(text), max(20, w-4)) {
			x := pg.Row(w).Pad(4)
			if k == 0 {
				x = pg.Row(w).Pad(2).Add(st, sign+" ")
			}
			lines = append(lines, x.Add(term.Plain, p).String())
		}
	}
	if r.Error != "" {
		signed(plan.Block, r.Error)
		return append(lines, view.FindingDetail(pg, w, 4, plan.Finding{Remedy: r.Remedy})...)
	}
	f := r.Facts
	about := []string{cmp.Or(f.HostName, "no host name"), cmp.Or(f.OS.Name, "unknown distribution"), f.Arch, "kernel " + f.Kernel, words.Count(f.Cores, "core"), fmt.Sprintf("%.1f GiB", float64(f.Memory)/(1<<20))}
	if f.TPM == "2" {
		about = append(about, "TPM 2.0")
	}
	for _, p := range term.Wrap(term.Clean(strings.Join(about, ", ")), max(20, w-4)) {
		lines = append(lines, pg.Row(w).Pad(2).Add(term.Faint, p).String())
	}
	for i := range r.Findings {
		x := r.Findings[i]
		signed(x.Severity, x.Title+" ["+x.ID+"]")
		lines = append(lines, view.FindingDetail(pg, w, 4, x)...)
	}
	return lines
}
