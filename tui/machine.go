package tui

import (
	"context"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"constellation/engine"
)

func (s *session) machineCommand() *cobra.Command {
	cmd := group("machine", "Revoke a machine that was captured",
		"Work on one machine of the cluster. Rollouts replace machines by themselves; these verbs are\nfor what a rollout cannot know.",
		"  constellation machine revoke worker-1 --replace")
	cmd.AddCommand(s.machineRevokeCommand())
	return cmd
}

// revokeOptions are what the command line says about `machine revoke` beside the request.
type revokeOptions struct {
	yes, nonInteractive bool
	timeout             time.Duration
	out                 format
}

func (s *session) machineRevokeCommand() *cobra.Command {
	var (
		r engine.RevokeRequest
		o revokeOptions
	)
	cmd := &cobra.Command{
		Use:   "revoke NODE",
		Short: "Shut a captured machine out, and remove it",
		Long: `Revoke shuts one machine out of the cluster for good, and removes it: for a machine that
somebody else controls, or may control. It works in this order:

  1. the record constellation-revoked-nodes names the machine: no join service gives it a
     ticket, and an admission policy refuses all writes with its client certificate
  2. its bootstrap token is deleted
  3. its pods are deleted, so that others are made elsewhere and Services lead to them
  4. the operator removes its etcd member, if it is a control plane, then machine and Node

The machine is removed before another one is made, and it is not drained: a captured machine
is not asked, and PodDisruptionBudgets are not respected. With --replace the operator makes
a new machine in the group afterwards, and the command waits until that is Ready. The new
machine has another name. It gets no labels and taints of the old Node, because the machine
could have written them.

What the machine knew stays known: change the secrets that its pods had. A control plane has
the keys of the cluster's certificate authorities, which a revocation cannot take back.

The command can be interrupted at any time: the same command goes on where it was. From the
second step on the cluster goes on alone. It runs beside an upgrade and does not wait for it.

Exit code: 0 done; 2 if there is no such machine; 3 if it is revoked and removed already;
4 if it is the last control plane, or etcd would lose its quorum; 5 if it was not accepted.`,
		Example: `  constellation machine revoke worker-1 --dry-run --yes
  constellation machine revoke worker-1 --replace --reason "kubelet key found in a backup"
  constellation machine revoke worker-1 --replace --non-interactive --yes
  constellation machine revoke worker-1 --kubeconfig admin.conf --yes -o json | jq 'select(.kind == "node")'`,
		Args:              oneArg("the name of a node", "`constellation status` lists them"),
		ValidArgsFunction: s.completeNode,
		RunE: func(cmd *cobra.Command, args []string) error {
			r.Node = args[0]
			return s.revoke(cmd.Context(), r, o)
		},
	}
	fl := cmd.Flags()
	fl.BoolVar(&r.Replace, "replace", false, "make a new machine in its group, and wait until it is Ready")
	fl.StringVar(&r.Reason, "reason", "", "why, for the record: one `line` of at most 200 bytes")
	fl.StringVar(&r.Kubeconfig, "kubeconfig", "", "`file` that leads to the cluster (default: that of the workspace)")
	fl.BoolVar(&r.Rehearse, "dry-run", false, "show what would be done, and change nothing")
	fl.BoolVarP(&o.yes, "yes", "y", false, "the plan and its warnings are accepted")
	fl.BoolVar(&o.nonInteractive, "non-interactive", false, "ask nothing")
	fl.DurationVar(&o.timeout, "timeout", 0, "stop after this long, such as 10m; the same command goes on (0: never)")
	s.outputFlag(cmd, &o.out, "what to print: text, or json for one event per line")
	_ = cmd.MarkFlagFilename("kubeconfig")
	_ = cmd.RegisterFlagCompletionFunc("reason", fixed())
	return cmd
}

// revoke runs `machine revoke`. On a terminal it asks once, after the plan was shown, for
// the name of the machine.
func (s *session) revoke(ctx context.Context, r engine.RevokeRequest, o revokeOptions) error {
	out := s.printer(o.out, true)
	defer func() { out.close() }()
	eng, _, _, err := s.engineOf()
	if err != nil {
		return s.unplanned(out, o.out, err)
	}
	ctx, stop := s.limited(ctx, o.timeout)
	defer stop()
	plan, err := eng.PlanRevoke(ctx, r)
	if err != nil {
		return s.unplanned(out, o.out, err)
	}
	out, err = s.accept(plan, out, o.out, acceptance{
		yes: o.yes, asks: o.out == text && !o.nonInteractive && s.asks(),
		question: "Type " + clean(r.Node) + " to revoke this machine: ", name: r.Node, show: s.tellPreview,
	})
	if err != nil {
		return err
	}
	return eng.Run(ctx, plan, out.event)
}

// completeNode completes the nodes of the cluster.
func (s *session) completeNode(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	const done = cobra.ShellCompDirectiveNoFileComp
	if len(args) > 0 {
		return nil, done
	}
	eng, _, _, err := s.engineOf()
	if err != nil {
		return nil, done
	}
	ctx, cancel := context.WithTimeout(cmd.Context(), 2*time.Second) // somebody waits at a prompt
	defer cancel()
	st, err := eng.Status(ctx)
	if err != nil {
		return nil, done
	}
	var out []string
	for _, n := range st.Nodes {
		out = append(out, n.Name)
	}
	slices.Sort(out)
	return out, done
}
