package main

import (
	"context"
	"errors"
	"strings"

	"github.com/spf13/cobra"

	"constellation/engine"
	"constellation/engine/plan"
	"constellation/tui"
)

func (v *verbs) sandboxMachine() *cobra.Command {
	cmd := tui.Group("machine", "Reboot, power-cycle, stop and start machines",
		`Reboot machines, cut their power, switch them off and on. A cluster recovers from each of
these by itself, even if all of its machines are affected at once.`,
		`  constellation sandbox machine reboot worker-0
  constellation sandbox machine power-cut --all`)
	cmd.AddCommand(
		v.switchMachines(engine.PowerReboot, "Reboot machines gracefully",
			`Shut machines down gracefully and start them again. Processes that do not end within 20
seconds are killed. A machine that is off is started.`),
		v.switchMachines(engine.PowerCut, "Cut and restore the power of machines",
			`Cut the power of all given machines at the same moment and restore it: no process gets a
signal. Disks keep their contents. Writes that were not synced survive too, because the
host's page cache keeps them.`),
		v.switchMachines(engine.PowerOff, "Switch machines off without a shutdown",
			`Cut the power of machines. They stay off until sandbox machine on. The cloud reports them as stopped
and does not delete them.`),
		v.switchMachines(engine.PowerOn, "Switch machines on", `Switch machines on. Running machines are not changed.`),
	)
	return cmd
}

func (v *verbs) switchMachines(action engine.PowerAction, short, long string) *cobra.Command {
	var (
		name string
		all  bool
		out  tui.Format
	)
	verb := string(action)
	cmd := &cobra.Command{
		Use:   verb + " MACHINE...|--all",
		Short: short,
		Long: long + `

The command returns when the machines have booted. Their nodes become Ready shortly after;
run status to check.`,
		Example: "  constellation sandbox machine " + verb + " worker-0\n  constellation sandbox machine " + verb + " --all",
		Args: func(_ *cobra.Command, args []string) error {
			switch {
			case all && len(args) > 0:
				return errors.New("want machine names or --all, got both")
			case !all && len(args) == 0:
				return errors.New("want machine names or --all")
			}
			return nil
		},
		ValidArgsFunction: func(cmd *cobra.Command, _ []string, _ string) ([]string, cobra.ShellCompDirective) {
			return v.machineNames(cmd.Context(), name), cobra.ShellCompDirectiveNoFileComp
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			return v.withNamed(cmd.Context(), name, func(ctx context.Context, box engine.Sandbox, name string) error {
				stream := v.Stream(out, "sandbox")
				defer stream.Close()
				err := box.Power(ctx, name, action, args, stream.Event)
				which := "all machines"
				if !all {
					which = strings.Join(args, ", ")
				}
				stream.End(verb+" of "+which, err, plan.Result{Next: []string{v.Command("status")}})
				return err
			})
		},
	}
	cmd.Flags().BoolVar(&all, "all", false, "all machines at the same time")
	v.nameFlag(cmd, &name)
	v.OutputFlag(cmd, &out, "output format: text, or json for one event per line")
	return cmd
}
