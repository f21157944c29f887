package tui

import (
	"context"

	"github.com/spf13/cobra"

	"constellation/engine/cluster"
	"constellation/tui/term"
)

func initCommand(s *session) *cobra.Command {
	var (
		o              consoleOptions
		nonInteractive bool
		out            format
	)
	cmd := &cobra.Command{
		Use:   "init",
		Short: "Create the cluster",
		Long: `Create the cluster that constellation-conf.yaml describes. Init verifies the attestation
evidence of the first machine, runs kubeadm init on it, installs the services, and waits
until the other machines have joined and are Ready.

A new cluster is hardened. Section hardening of the configuration switches items off.

On a terminal the console shows the preflight checks and the plan, and asks before it
creates anything. With --non-interactive it needs --yes and prints one line per change,
or with -o json one event per line.

Init can be interrupted at any time. Run the same command again to resume it.`,
		Example: `  constellation init
  constellation init --non-interactive --yes
  constellation init --yes -o json > events.jsonl
  constellation init --yes --timeout 10m`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if out == asJSON || !s.interactive(nonInteractive) {
				return runInit(cmd.Context(), s, o, out, out == text && !nonInteractive && s.plainly() && s.asks())
			}
			o.wizard = true
			return showConsole(cmd.Context(), s, o)
		},
	}
	cmd.Flags().BoolVar(&nonInteractive, "non-interactive", false, "print and never prompt")
	cmd.Flags().BoolVarP(&o.yes, "yes", "y", false, "accept the plan and its warnings")
	cmd.Flags().DurationVar(&o.timeout, "timeout", 0, "stop after this time, such as 10m; run again to resume (0: no limit)")
	outputFlag(cmd, &out, "output format: text, or json for one event per line")
	return cmd
}

// runInit runs init without the console. Unless asks is set it never prompts, and all
// consent must come from flags.
func runInit(ctx context.Context, s *session, o consoleOptions, f format, asks bool) error {
	out := s.printer(f, false)
	defer func() { out.close() }()
	eng, _, _, err := s.engineOf()
	if err != nil {
		return unplanned(s, out, f, err)
	}
	if err := unlock(s, cluster.Access{}, f, !asks); err != nil {
		return err
	}
	ctx, stop := s.limited(ctx, o.timeout)
	defer stop()
	plan, err := eng.PlanInit(ctx)
	if err != nil {
		return unplanned(s, out, f, err)
	}
	a := acceptance{yes: o.yes, asks: asks, question: fixedQuestion("Create cluster " + term.Clean(plan.Cluster) + "?")}
	out, err = a.accept(s, plan, out, f)
	if err != nil {
		return err
	}
	return eng.Run(ctx, plan, out.event)
}
