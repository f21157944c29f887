package tui

import (
	"context"

	"github.com/spf13/cobra"

	"constellation/engine"
	"constellation/engine/plan"
)

func recoverCommand(s *session) *cobra.Command {
	var (
		r engine.RecoverRequest
		o runOptions
	)
	cmd := &cobra.Command{
		Use:   "recover [NODE...]",
		Short: "Send secret keys to control planes that lost theirs",
		Long: `Recover sends control planes the keys with which API servers decrypt Secrets, and those of the
certifier. A control plane needs them if their file is lost or damaged, its TPM was cleared, or its
boot chain was changed on purpose. Without them its API server serves no Secrets.

It derives the keys from the master secret of the workspace, and needs no API server:

  1. A control plane that boots without its keys starts its kubelet, and listens for them.
  2. Recover verifies the evidence of the machine: a member of this cluster, with a boot chain
     that the configuration accepts.
  3. The machine checks the init secret, and that the keys are those that it had. It seals them
     to its TPM.
  4. The command waits until the API server reads Secrets.

Without a name, each control plane that waits for keys gets them. A master secret of another
cluster is refused before any key is sent. The command can be interrupted at any time; run it
again to continue. A control plane whose file was lost while it runs listens after its next boot.`,
		Example: `  constellation recover
  constellation recover control-plane-1 --dry-run
  constellation recover --non-interactive --yes --output json`,
		Args: cobra.ArbitraryArgs, ValidArgsFunction: completeNodes(s, false),
		RunE: func(cmd *cobra.Command, args []string) error {
			r.Nodes = args
			return planAndRun(cmd.Context(), s, o, acceptance{question: fixedQuestion("Send the keys to control planes that wait for them?")}, func(ctx context.Context, eng Engine) (*plan.Plan, error) {
				return eng.PlanRecover(ctx, r)
			})
		},
	}
	fl := cmd.Flags()
	fl.BoolVar(&r.Rehearse, "dry-run", false, "show the plan and send no keys")
	fl.BoolVarP(&o.yes, "yes", "y", false, "accept the plan and its warnings")
	fl.BoolVar(&o.nonInteractive, "non-interactive", false, "never prompt")
	fl.DurationVar(&o.timeout, "timeout", 0, "stop after this time, such as 10m; run again to resume (0: no limit)")
	outputFlag(cmd, &o.out, "output format: text, or json for one event per line")
	return cmd
}
