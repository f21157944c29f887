package tui

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"constellation/engine/adopt"
	"constellation/engine/cluster"
	"constellation/engine/plan"
	"constellation/engine/words"
	"constellation/engine/workspace"
	"constellation/tui/term"
	"constellation/tui/view"
)

// adoptOptions are the flags of `adopt`.
type adoptOptions struct {
	access                                      cluster.Access
	name                                        string
	dryRun, undo, operator, yes, nonInteractive bool
	out                                         format
}

func adoptCommand(s *session) *cobra.Command {
	var o adoptOptions
	cmd := &cobra.Command{
		Use:   "adopt",
		Short: "Make a workspace for a cluster that kubeadm made",
		Long: `Examine a cluster that plain kubeadm made, and write a workspace for it. Adopt reports what
it found: versions, etcd, certificates, add-ons, static pods that were changed by hand, and
bootstrap tokens. It lists what it would do, what it never touches, and what stands in the way.

Without --operator, adopt sends read requests alone and changes nothing in the cluster. After
a prompt, or with --yes, it writes the workspace: a configuration with the provider machines,
the state, and a copy of the context of your kubeconfig. In that folder check, status, watch
and backup create need no flags. Upgrades are still done with kubeadm.

--operator installs the operator in the cluster of the workspace, and an agent on each
machine, by a pod with root rights that is removed again. From then on upgrade check and
upgrade apply work, and nodes are upgraded in place. No kubelet or pod is restarted.

--undo takes the operator and the agents out, and removes the files that adopt wrote. A file
that was changed since is kept and named.

Clusters of managed services and of other installers are refused by name, with the commands
that fit them.

Exit codes: 0 adopted, undone, or with --dry-run nothing stands in the way; 1 the cluster cannot
be read; 2 bad flag or kubeconfig, or the folder has another cluster; 3 adopted or undone already;
4 a finding stands in the way; 5 --yes is missing.`,
		Example: `  constellation adopt --dry-run                       # current context; writes nothing
  constellation -C prod-eu adopt --context prod-eu
  constellation -C prod-eu adopt --kubeconfig admin.conf --yes
  constellation adopt --dry-run -o json | jq '.findings[] | {severity, id, title}'
  constellation -C prod-eu adopt --operator           # shows the plan, then prompts
  constellation -C prod-eu adopt --undo`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			switch {
			case o.undo:
				return undoAdopt(cmd.Context(), s, o)
			case o.operator:
				return adoptOperator(cmd.Context(), s, o)
			}
			return runAdopt(cmd.Context(), s, o)
		},
	}
	accessFlags(s, cmd, &o.access)
	fl := cmd.Flags()
	fl.StringVar(&o.name, "name", "", "`name` of the cluster in the workspace (default: from the context)")
	fl.BoolVar(&o.dryRun, "dry-run", false, "report and write nothing")
	fl.BoolVar(&o.operator, "operator", false, "install the operator and an agent on each machine")
	fl.BoolVar(&o.undo, "undo", false, "take out the operator, the agents and the files of adopt")
	fl.BoolVarP(&o.yes, "yes", "y", false, "write the workspace without a prompt")
	fl.BoolVar(&o.nonInteractive, "non-interactive", false, "never prompt")
	outputFlag(cmd, &o.out, "output format: text, or json for one document")
	for _, f := range []string{"name", "kubeconfig", "context", "cluster", "user", "as"} {
		cmd.MarkFlagsMutuallyExclusive("undo", f)
		cmd.MarkFlagsMutuallyExclusive("operator", f)
	}
	cmd.MarkFlagsMutuallyExclusive("undo", "operator")
	cmd.MarkFlagsMutuallyExclusive("undo", "dry-run")
	cmd.MarkFlagsMutuallyExclusive("operator", "dry-run")
	return cmd
}

// runAdopt runs `adopt` without --undo.
func runAdopt(ctx context.Context, s *session, o adoptOptions) error {
	if err := impersonates(o.access); err != nil {
		return err
	}
	sel, err := s.Clusters.Select(adoptedAccess(s, o.access))
	if err != nil {
		return err
	}
	ctx, stop := s.signals(ctx)
	defer stop()
	progress := newCheckProgress(s)
	r, err := s.Clusters.Examine(ctx, sel, adopt.Request{CLI: s.Release, Name: o.name, Flags: contextFlags(o.access, &sel)}, progress.event)
	progress.live.Clear()
	if err != nil {
		return err
	}
	r.DryRun = o.dryRun
	print := func() error {
		if o.out == asJSON {
			return document(s.out, r)
		}
		pg := s.page()
		pg.Commands = formatterOf(s, o.access, &sel)
		s.print(view.AdoptReport(pg, s.answerWidth(), &r))
		return nil
	}
	if list := r.Blocked(); len(list) > 0 {
		if err := print(); err != nil {
			return err
		}
		return &plan.Error{
			Op: "adopt " + strings.TrimSpace("context "+fmt.Sprintf("%q", sel.Context)), Exit: plan.ExitBlocked,
			Err: fmt.Errorf("%s in the way: %s", words.Count(len(list), "finding"), list[0].Title), Remedy: list[0].Remedy,
		}
	}
	if o.dryRun {
		return print()
	}
	ws, done, err := adoptFolder(s, &r)
	if err != nil {
		return err
	}
	if done {
		return &plan.Error{Op: "cluster " + r.Name + " is adopted in " + ws.Dir() + " already; nothing was written", Exit: plan.ExitNothing}
	}
	if err := confirmAdoption(s, o, &r, &sel, print); err != nil {
		return err
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if ws == nil {
		if ws, _, err = s.newWorkspace(); err != nil {
			return err
		}
	}
	if err := writeAdoption(s, ws, &sel, &r); err != nil {
		return err
	}
	if o.out == asJSON {
		return document(s.out, r)
	}
	for _, name := range r.Written {
		fmt.Fprintf(s.out, "wrote %s\n", term.Clean(ws.Path(name)))
	}
	for _, line := range term.Wrap(adopt.Upgrade, s.answerWidth()) {
		fmt.Fprintln(s.out, line)
	}
	fmt.Fprintf(s.out, "next  %s\n", s.command("check"))
	return nil
}

// writeAdoption writes the workspace of an examined cluster, and its files and folder into the report.
func writeAdoption(s *session, ws *workspace.Workspace, sel *cluster.Selected, r *adopt.Report) error {
	kubeconfig, err := s.Clusters.Kubeconfig(sel.Access)
	if err != nil {
		return err
	}
	a := workspace.Adoption{Name: r.Name, UID: r.UID, Kubernetes: r.Kubernetes, Server: r.Server, Kubeconfig: kubeconfig, Machines: r.Machines()}
	r.Written, err = ws.Adopt(a, s.Now())
	r.Dir = ws.Dir()
	return err
}

// adoptedAccess is a, or the kubeconfig of a folder whose adoption is repeated.
func adoptedAccess(s *session, a cluster.Access) cluster.Access {
	if a.Given() {
		return a
	}
	if ws, _, err := s.workspace(); err == nil && ws.IsAdopted() && ws.Has(workspace.KubeconfigFile) {
		a.Kubeconfig = ws.Path(workspace.KubeconfigFile)
	}
	return a
}

// adoptFolder returns the workspace if its folder exists, and whether the cluster is adopted there.
// It refuses the folder of another cluster.
func adoptFolder(s *session, r *adopt.Report) (ws *workspace.Workspace, done bool, err error) {
	ws, _, err = s.workspace()
	if err != nil {
		return nil, false, nil //nolint:nilerr // it is made after the prompt
	}
	if err := ws.CanAdopt(r.UID); err != nil {
		return nil, false, err
	}
	return ws, ws.IsAdopted() && ws.Has(workspace.ConfigFile) && ws.Has(workspace.KubeconfigFile), nil
}

// confirmAdoption prints the report and returns an error unless the user wants the workspace.
func confirmAdoption(s *session, o adoptOptions, r *adopt.Report, sel *cluster.Selected, print func() error) error {
	if o.out == text || !o.yes {
		if err := print(); err != nil {
			return err
		}
	}
	if o.yes {
		return nil
	}
	if o.nonInteractive || o.out == asJSON || !s.asks() {
		return &plan.Error{Op: "adopt cluster " + r.Name, Err: errors.New("the adoption was not accepted; nothing was written"), Remedy: "read the report above, then run the same command with --yes", Exit: plan.ExitUnacknowledged}
	}
	if !s.prompt().confirmed(fmt.Sprintf("Write a workspace for %s into %s?", term.Clean(cmp.Or(r.Name, sel.Context)), term.Clean(workspaceDir(s)))) {
		return &plan.Error{Op: "adopt cluster " + r.Name, Err: errors.New("the adoption was not accepted; nothing was written"), Exit: plan.ExitUnacknowledged}
	}
	return nil
}

func workspaceDir(s *session) string {
	if dir, err := filepath.Abs(s.dir); err == nil {
		return dir
	}
	return s.dir
}

// contextFlags are the flags that select the context again, with a leading space.
func contextFlags(a cluster.Access, sel *cluster.Selected) string {
	var b strings.Builder
	if a.Kubeconfig != "" {
		b.WriteString(" --kubeconfig " + view.QuoteArg(a.Kubeconfig))
	}
	b.WriteString(" --context " + view.QuoteArg(sel.Context))
	return b.String()
}

// undoDocument is the JSON output of `adopt --undo`.
type undoDocument struct {
	Schema string `json:"schema"`
	Dir    string `json:"dir"`
	workspace.Undone
}

// undoAdopt runs `adopt --undo`.
func undoAdopt(ctx context.Context, s *session, o adoptOptions) error {
	ws, _, err := s.workspace()
	if err != nil {
		return err
	}
	f := o.out
	if ws.Touched() {
		if err := executeAdoption(ctx, s, o, Engine.PlanRemoveOperator, "Take the operator and the agents out?"); err != nil {
			return err
		}
		if f == asJSON {
			_, err := ws.UndoAdopt() // the stream of events has its end
			return err
		}
	}
	done, err := ws.UndoAdopt()
	if err != nil {
		return err
	}
	if f == asJSON {
		return document(s.out, undoDocument{plan.Schema, ws.Dir(), done})
	}
	for _, name := range done.Removed {
		fmt.Fprintf(s.out, "removed %s\n", term.Clean(ws.Path(name)))
	}
	for _, name := range done.Kept {
		fmt.Fprintf(s.out, "kept    %s: it was changed after the adoption\n", term.Clean(ws.Path(name)))
	}
	if ws.Has(plan.RunsDir) {
		fmt.Fprintf(s.out, "kept    %s: backups and records of runs\n", term.Clean(ws.Path(plan.RunsDir)))
	}
	return nil
}

// adoptOperator installs the operator in an adopted cluster.
func adoptOperator(ctx context.Context, s *session, o adoptOptions) error {
	return executeAdoption(ctx, s, o, Engine.PlanOperator, "Install the operator and the agents?")
}

// executeAdoption executes a plan for an adopted cluster, with progress as of all plans.
func executeAdoption(ctx context.Context, s *session, o adoptOptions, planned func(Engine, context.Context) (*plan.Plan, error), question string) error {
	out := s.printer(o.out, true)
	defer func() { out.close() }()
	eng, _, _, err := s.engineOf()
	if err != nil {
		return unplanned(s, out, o.out, err)
	}
	if err := unlock(s, cluster.Access{}, o.out, o.nonInteractive); err != nil {
		return err
	}
	ctx, stop := s.signals(ctx)
	defer stop()
	pl, err := planned(eng, ctx)
	if err != nil {
		return unplanned(s, out, o.out, err)
	}
	a := acceptance{yes: o.yes, asks: o.out == text && !o.nonInteractive && s.asks(), question: fixedQuestion(question)}
	if out, err = a.accept(s, pl, out, o.out); err != nil {
		return err
	}
	return eng.Run(ctx, pl, out.event)
}
