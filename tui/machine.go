package tui

import (
	"context"

	"github.com/spf13/cobra"

	"constellation/engine"
	"constellation/engine/cluster"
	"constellation/engine/plan"
	"constellation/tui/term"
)

func machineCommand(s *session) *cobra.Command {
	cmd := group("machine", "Check and prepare Linux machines, revoke one",
		"Check whether Linux machines can become nodes, prepare them for a cluster, give them back, and\nremove a machine of the cluster in an incident. Rollouts replace machines by themselves.",
		"  constellation machine check --ssh root@10.0.0.11\n  constellation machine add --ssh root@10.0.0.11 --group control-plane\n  constellation machine list\n  constellation machine revoke worker-1 --replace")
	cmd.AddCommand(machineCheck(s), machineAdd(s), machineList(s), machineLogs(s), machineRemove(s), machineRevoke(s))
	return cmd
}

func machineRevoke(s *session) *cobra.Command {
	var (
		r engine.RevokeRequest
		o runOptions
	)
	cmd := &cobra.Command{
		Use:   "revoke NODE",
		Short: "Revoke the access of a compromised machine and delete it",
		Long: `Revoke permanently excludes one machine from the cluster and deletes it. Use it when the
machine is compromised or may be. It works in this order:

  1. The record constellation-revoked-nodes names the machine. Join services then refuse it
     a join ticket, and an admission policy denies all writes with its client certificate.
  2. Its bootstrap token is deleted.
  3. Its pods are deleted, so that their controllers recreate them on other nodes.
  4. The operator removes its etcd member, if it is a control plane, then machine and Node.

The machine is deleted before a replacement is created. It is not drained, and
PodDisruptionBudgets are not respected, because a compromised machine cannot be trusted to
cooperate. With --replace the operator then creates a new machine in the group, and the
command waits until it is Ready. The new machine has another name, and does not inherit the
old Node's labels and taints, because the old machine could have written them.

Rotate all secrets that pods on the machine could read. A control plane holds the keys of
the cluster's certificate authorities; a revocation cannot withdraw them.

The command can be interrupted at any time; run it again to resume. From the second step on
the cluster continues by itself. A running upgrade neither blocks the command nor waits.

Exit code: 0 done; 2 no such machine; 3 the machine is revoked and deleted already; 4 it is
the last control plane, or etcd would lose quorum; 5 the plan was not accepted.`,
		Example: `  constellation machine revoke worker-1 --dry-run --yes
  constellation machine revoke worker-1 --replace --reason "kubelet key found in a backup"
  constellation machine revoke worker-1 --replace --non-interactive --yes
  constellation machine revoke worker-1 --kubeconfig admin.conf --yes -o json | jq 'select(.kind == "node")'`,
		Args:              oneArg("the name of a node", "run `constellation status` to see all nodes"),
		ValidArgsFunction: completeNodes(s, false),
		RunE: func(cmd *cobra.Command, args []string) error {
			r.Node = args[0]
			return runRevoke(cmd.Context(), s, r, o)
		},
	}
	fl := cmd.Flags()
	fl.BoolVar(&r.Replace, "replace", false, "create a replacement in its group and wait until it is Ready")
	fl.StringVar(&r.Reason, "reason", "", "reason to record: one `line` of at most 200 bytes")
	fl.StringVar(&r.Kubeconfig, "kubeconfig", "", "kubeconfig `file` (default: the one in the workspace)")
	fl.BoolVar(&r.Rehearse, "dry-run", false, "show the plan and change nothing")
	fl.BoolVarP(&o.yes, "yes", "y", false, "accept the plan and its warnings")
	fl.BoolVar(&o.nonInteractive, "non-interactive", false, "never prompt")
	fl.DurationVar(&o.timeout, "timeout", 0, "stop after this time, such as 10m; run again to resume (0: no limit)")
	outputFlag(cmd, &o.out, "output format: text, or json for one event per line")
	_ = cmd.MarkFlagFilename("kubeconfig")
	_ = cmd.RegisterFlagCompletionFunc("reason", fixed())
	return cmd
}

// runRevoke runs `machine revoke`. The prompt wants the name of the machine.
func runRevoke(ctx context.Context, s *session, r engine.RevokeRequest, o runOptions) error {
	question := fixedQuestion("Type " + term.Clean(r.Node) + " to revoke this machine: ")
	return planAndRun(ctx, s, o, acceptance{question: question, name: r.Node, access: cluster.Access{Kubeconfig: r.Kubeconfig}}, func(ctx context.Context, eng Engine) (*plan.Plan, error) {
		return eng.PlanRevoke(ctx, r)
	})
}
