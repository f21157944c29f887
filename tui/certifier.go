package tui

import (
	"context"

	"github.com/spf13/cobra"

	"constellation/engine"
	"constellation/engine/plan"
)

func certifierCommand(s *session) *cobra.Command {
	cmd := group("certifier", "Rotate the keys of the cluster's certifier",
		"The certifier of a cluster vouches for what the API of its cloud had about machines. Clusters in\nGoogle Cloud have one, on each control plane.",
		"  constellation certifier rotate")
	cmd.AddCommand(certifierRotate(s))
	return cmd
}

func certifierRotate(s *session) *cobra.Command {
	var (
		r engine.RotateRequest
		o runOptions
	)
	cmd := &cobra.Command{
		Use:   "rotate",
		Short: "Replace the keys of the certifier by the next ones",
		Long: `Rotate replaces the keys of the cluster's certifier by those of the next generation, which are
derived from the master secret of the workspace. It works in this order:

  1. ConfigMap join-config gets the next keys, encrypted for the present ones, and a record
     with the user, the time and the reason.
  2. The file of the master secret gets the generation. Renew your copy of it.
  3. The command waits until the evidence of each control plane has a certificate by the next
     keys. That takes about a minute.

Certificates of the former keys are accepted until they end, seven days at most. With --revoke
they are refused at once: use it after a theft. A thief of the former keys who still reads
join-config gets the next ones, too, so first remove that access.

The command refuses to begin unless each control plane shows a certificate by the present keys.
It can be interrupted at any time; run it again to complete the rotation. A rotation cannot be
undone: rotate again.`,
		Example: `  constellation certifier rotate
  constellation certifier rotate --revoke --reason "keys found in a backup" --non-interactive --yes`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return planAndRun(cmd.Context(), s, o, acceptance{question: fixedQuestion("Rotate the keys of the certifier?")}, func(ctx context.Context, eng Engine) (*plan.Plan, error) {
				return eng.PlanRotate(ctx, r)
			})
		},
	}
	fl := cmd.Flags()
	fl.BoolVar(&r.Revoke, "revoke", false, "refuse certificates of the former keys at once")
	fl.StringVar(&r.Reason, "reason", "", "reason to record: one `line` of at most 200 bytes")
	fl.BoolVar(&r.Rehearse, "dry-run", false, "show the plan and change nothing")
	fl.BoolVarP(&o.yes, "yes", "y", false, "accept the plan and its warnings")
	fl.BoolVar(&o.nonInteractive, "non-interactive", false, "never prompt")
	fl.DurationVar(&o.timeout, "timeout", 0, "stop after this time, such as 10m; run again to resume (0: no limit)")
	outputFlag(cmd, &o.out, "output format: text, or json for one event per line")
	_ = cmd.RegisterFlagCompletionFunc("reason", fixed())
	return cmd
}
