package tui

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"constellation/engine/infra"
	"constellation/engine/plan"
	"constellation/engine/words"
	"constellation/tui/term"
	"constellation/tui/view"
)

func infraCommand(s *session) *cobra.Command {
	cmd := group("infra", "Create and delete machines and network at a cloud",
		"Create what a cluster needs of its cloud, and delete it: network, firewall, load balancer, and groups of\nmachines. It is for the provider gcp, and was never run against Google: see docs/clouds/gcp.md.",
		"  constellation infra plan\n  constellation infra create\n  constellation infra terminate")
	cmd.AddCommand(infraPlan(s), infraCreate(s), infraTerminate(s))
	return cmd
}

// infraRoles are the values of --print-role.
var infraRoles = []string{"infra", "control-plane", "worker"}

func infraPlan(s *session) *cobra.Command {
	var (
		role string
		out  format
	)
	cmd := &cobra.Command{
		Use:   "plan",
		Short: "Show what create makes, and what exists",
		Long: `List the objects that the cluster of constellation-conf.yaml needs of its cloud, in the order in
which ` + "`infra create`" + ` makes them. For each, plan reports whether it exists, is to be made, or differs
from what create makes. It only reads, and changes nothing.

Plan also reports what create needs beside that: image, machine types, permissions, and the
network, subnetwork or address that the configuration names. Each finding has a remedy.

--print-role prints the least role of an account, with the commands that grant it, and reads no
cloud: infra for the account that runs ` + "`constellation infra`" + `, control-plane and worker for the service
accounts of machines.

Exit codes: 0 create can run, or all exists; 1 the cloud cannot be read; 2 bad configuration; 4 a
finding blocks create.`,
		Example: `  constellation infra plan
  constellation infra plan -o json | jq '.objects[] | {kind, name, state}'
  constellation infra plan --print-role >role.yaml
  constellation infra plan --print-role=control-plane`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if cmd.Flags().Changed("print-role") {
				return printInfraRole(s, role, out)
			}
			return runInfraPlan(cmd.Context(), s, out)
		},
	}
	cmd.Flags().StringVar(&role, "print-role", infraRoles[0], "print the least `role` and exit: infra, control-plane or worker")
	cmd.Flags().Lookup("print-role").NoOptDefVal = infraRoles[0]
	_ = cmd.RegisterFlagCompletionFunc("print-role", fixed(infraRoles...))
	outputFlag(cmd, &out, "output format: text, or json for one document")
	return cmd
}

// roleDocument is the JSON output of `infra plan --print-role`.
type roleDocument struct {
	Schema string `json:"schema"`
	infra.Role
}

func printInfraRole(s *session, name string, f format) error {
	eng, _, _, err := s.engineOf()
	if err != nil {
		return err
	}
	roles, err := eng.InfraRoles()
	if err != nil {
		return err
	}
	for _, r := range roles {
		if r.Name == name {
			if f == asJSON {
				return document(s.out, roleDocument{plan.Schema, r})
			}
			fmt.Fprint(s.out, r.Text)
			return nil
		}
	}
	return badFlag(fmt.Errorf("--print-role is %q", term.Clean(name)), "want "+words.Or(infraRoles))
}

func runInfraPlan(ctx context.Context, s *session, f format) error {
	eng, _, _, err := s.engineOf()
	if err != nil {
		return err
	}
	ctx, stop := s.signals(ctx)
	defer stop()
	r, err := eng.Infrastructure(ctx)
	if err != nil {
		return err
	}
	if f == asJSON {
		err = document(s.out, r)
	} else {
		s.print(view.InfraReport(s.page(), s.answerWidth(), &r))
	}
	if err != nil {
		return err
	}
	blocks := r.Blocked()
	if n := len(blocks); n > 0 {
		return &plan.Error{Op: "plan the infrastructure of cluster " + r.Cluster, Exit: plan.ExitBlocked, Err: fmt.Errorf("%s in the way: %s", words.Count(n, "finding"), blocks[0].Title), Remedy: blocks[0].Remedy}
	}
	return nil
}

func infraCreate(s *session) *cobra.Command {
	var o runOptions
	cmd := &cobra.Command{
		Use:   "create",
		Short: "Create machines and what they need",
		Long: `Create what the cluster of constellation-conf.yaml needs of its cloud, as ` + "`infra plan`" + ` lists it:
network, subnetwork, firewall rules, the load balancer of the API servers, and groups of machines.
Create shows the plan, asks once, makes one object after the other, and waits for the machines.
At the end it writes constellation-state.yaml.

All objects bear the UID of the cluster, in their label or description. Create never touches other
objects. What the configuration names, such as a network of your own, is used as it is. An object
that exists and differs is reported and stays as it is.

Create can be interrupted at any time: run the same command again. The UID is in
constellation-infra.yaml until all objects exist, so keep that file.

The cloud charges for machines, disks and the address from then on.

Exit codes: 0 done; 1 failed; 2 bad configuration; 3 all exists; 4 a finding blocks; 5 the plan was
not accepted; 7 stopped, run again.`,
		Example: `  constellation infra create
  constellation infra create --yes --timeout 15m
  constellation infra create --non-interactive --yes -o json | jq -r 'select(.kind == "step") | [.state, .text] | @tsv'`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			question := func(p *plan.Plan) string {
				return fmt.Sprintf("Create the infrastructure of cluster %s?", term.Clean(p.Cluster))
			}
			return planAndRun(cmd.Context(), s, o, acceptance{question: question}, func(ctx context.Context, eng Engine) (*plan.Plan, error) { return eng.PlanInfraCreate(ctx) })
		},
	}
	fl := cmd.Flags()
	fl.BoolVarP(&o.yes, "yes", "y", false, "accept the plan and its warnings")
	fl.BoolVar(&o.nonInteractive, "non-interactive", false, "never prompt")
	fl.DurationVar(&o.timeout, "timeout", 0, "stop after this time, such as 15m; run again to resume (0: no limit)")
	outputFlag(cmd, &o.out, "output format: text, or json for one event per line")
	return cmd
}

func infraTerminate(s *session) *cobra.Command {
	var (
		o       runOptions
		confirm string
	)
	cmd := &cobra.Command{
		Use:   "terminate",
		Short: "Delete all that create made",
		Long: `Delete everything at the cloud that bears the UID of this workspace: load balancer, groups with
their machines and disks, templates, firewall rules, network. Terminate lists it first, and asks
for the name of the cluster. Scripts pass the name with --confirm.

Objects without the UID stay, also if they have such a name. Objects that the configuration names
stay, too. At the end terminate lists again, proves that nothing is left, and removes
constellation-state.yaml. Disks that workloads of the cluster made do not bear the UID and stay.

Terminate can be interrupted at any time: run the same command again.

Exit codes: 0 nothing is left; 1 failed; 2 another name than that of the cluster; 3 there is
nothing to delete; 5 the name was not given; 7 stopped, run again.`,
		Example: `  constellation infra terminate
  constellation infra terminate --confirm demo
  constellation infra terminate --confirm demo -o json | jq -r 'select(.kind == "result") | .text'`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return runInfraTerminate(cmd.Context(), s, o, confirm)
		},
	}
	fl := cmd.Flags()
	fl.StringVar(&confirm, "confirm", "", "`name` of the cluster, instead of the prompt")
	fl.BoolVar(&o.nonInteractive, "non-interactive", false, "never prompt")
	fl.DurationVar(&o.timeout, "timeout", 0, "stop after this time, such as 15m; run again to resume (0: no limit)")
	outputFlag(cmd, &o.out, "output format: text, or json for one event per line")
	_ = cmd.RegisterFlagCompletionFunc("confirm", fixed())
	return cmd
}

// runInfraTerminate runs `infra terminate`. The prompt wants the name of the cluster.
func runInfraTerminate(ctx context.Context, s *session, o runOptions, confirm string) error {
	name := ""
	if ws, _, err := s.workspace(); err == nil {
		if st, _, err := ws.Infra(); err == nil { // else the plan reports it
			name = st.Infrastructure.Name
		}
	}
	if confirm != "" && name != "" && confirm != name {
		return &plan.Error{Op: "terminate cluster " + name, Err: fmt.Errorf("--confirm names %q; nothing was deleted", term.Clean(confirm)), Remedy: "name the cluster of this folder, or another folder with -C", Exit: plan.ExitUsage}
	}
	o.yes = confirm != "" && confirm == name
	a := acceptance{name: name, flag: "--confirm " + name, question: fixedQuestion("Type " + term.Clean(name) + " to delete all of this: ")}
	return planAndRun(ctx, s, o, a, func(ctx context.Context, eng Engine) (*plan.Plan, error) { return eng.PlanInfraTerminate(ctx) })
}
