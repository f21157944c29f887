package tui

import (
	"errors"
	"strings"

	"github.com/spf13/cobra"

	"constellation/engine"
)

func (s *session) sandboxMachine() *cobra.Command {
	cmd := group("machine", "Reboot machines, cut their power, switch them off and on",
		`Reboot machines, cut their power, switch them off and on. A cluster comes back by itself
from each of these, also if they happen to all of its machines at once.`,
		`  constellation sandbox machine reboot worker-0
  constellation sandbox machine power-cut --all`)
	cmd.AddCommand(
		s.switchMachines(engine.PowerReboot, "Shut machines down in order and switch them on again",
			`Shut machines down as their own reboot would, and switch them on again. What has not
ended after 20 seconds is killed. One that is off is switched on.`),
		s.switchMachines(engine.PowerCut, "Take the power from machines and give it back",
			`Take the power from machines, all at the same moment, and give it back: nothing in them
gets to know. Their disks stay as they are; what was written and not synchronised is
there, because the computer that they run on keeps it.`),
		s.switchMachines(engine.PowerOff, "Take the power from machines",
			`Take the power from machines. They are off until they are switched on; the cloud calls
them stopped and deletes none.`),
		s.switchMachines(engine.PowerOn, "Switch machines on that are off", `Switch machines on that are off. Those that run are left alone.`),
	)
	return cmd
}

func (s *session) switchMachines(action engine.PowerAction, short, long string) *cobra.Command {
	var (
		name string
		all  bool
		out  format
	)
	verb := string(action)
	cmd := &cobra.Command{
		Use:   verb + " MACHINE...|--all",
		Short: short,
		Long: long + `

It returns when the machines are ready. Their nodes are Ready a little later: ask
status.`,
		Example: "  constellation sandbox machine " + verb + " worker-0\n  constellation sandbox machine " + verb + " --all",
		Args: func(_ *cobra.Command, args []string) error {
			switch {
			case all && len(args) > 0:
				return errors.New("name machines or say --all, not both")
			case !all && len(args) == 0:
				return errors.New("name machines, or say --all")
			}
			return nil
		},
		ValidArgsFunction: func(cmd *cobra.Command, _ []string, _ string) ([]string, cobra.ShellCompDirective) {
			return s.machineNames(cmd.Context(), name), cobra.ShellCompDirectiveNoFileComp
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			boxName, err := s.sandboxName(name)
			if err != nil {
				return err
			}
			ctx, stop := s.signals(cmd.Context())
			defer stop()
			box, err := s.Sandbox(s.log)
			if err != nil {
				return err
			}
			p := s.printer(out, true)
			defer p.close()
			stream := s.framed(p, "sandbox")
			err = box.Power(ctx, boxName, action, args, stream.event)
			which := "all machines"
			if !all {
				which = strings.Join(args, ", ")
			}
			stream.end(verb+" of "+which, err, engine.Result{Next: []string{s.command("status")}})
			return err
		},
	}
	cmd.Flags().BoolVar(&all, "all", false, "all machines, at the same time")
	s.nameFlag(cmd, &name)
	s.outputFlag(cmd, &out, "what to print: text, or json for one event per line")
	return cmd
}
