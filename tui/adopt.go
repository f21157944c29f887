package tui

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"time"

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
		s.print(adoptText(s.page(), s.answerWidth(), &r, formatterOf(s, o.access, &sel)))
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
	kubeconfig, err := s.Clusters.Kubeconfig(sel.Access)
	if err != nil {
		return err
	}
	a := workspace.Adoption{Name: r.Name, UID: r.UID, Kubernetes: r.Kubernetes, Server: r.Server, Kubeconfig: kubeconfig, Machines: r.Machines()}
	if r.Written, err = ws.Adopt(a, s.Now()); err != nil {
		return err
	}
	r.Dir = ws.Dir()
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

// adoptText renders the report of an examination.
func adoptText(pg view.Page, w int, r *adopt.Report, sp view.CommandFormatter) []string {
	pg.Commands = sp
	lines := []string{"examination of context " + term.Clean(r.Context) + " (" + term.Clean(r.Server) + ")"}
	severity, verdict := plan.Info, "can be adopted: nothing stands in the way"
	if n := len(r.Blocked()); n > 0 {
		severity, verdict = plan.Block, "cannot be adopted: "+words.Count(n, "finding")+" in the way"
	}
	sign, st := view.SeveritySignOf(pg, severity)
	lines = append(lines, pg.Row(w).Add(st, sign+" ").Add(term.Strong, verdict).String(), "")
	row := func(head, text string) {
		for i, p := range term.Wrap(term.Clean(text), max(20, w-18)) {
			x := pg.Row(w).Pad(18)
			if i == 0 {
				x = pg.Row(w).Pad(2).Col(term.Faint, head, 16)
			}
			lines = append(lines, x.Add(term.Plain, p).String())
		}
	}
	row("Kubernetes", r.Kubernetes)
	row("distribution", r.Distribution.Title)
	if len(r.Offers) == 0 {
		adoptFacts(r, row)
	}
	if len(r.Findings) > 0 {
		lines = append(lines, "", pg.Rule(w, "Findings", ""))
		for i := range r.Findings {
			f := &r.Findings[i]
			sign, st := view.SeveritySignOf(pg, f.Severity)
			for k, p := range term.Wrap(term.Clean(f.Title+" ["+f.ID+"]"), max(20, w-4)) {
				x := pg.Row(w).Pad(4)
				if k == 0 {
					x = pg.Row(w).Pad(2).Add(st, sign+" ")
				}
				lines = append(lines, x.Add(term.Plain, p).String())
			}
			lines = append(lines, view.FindingDetail(pg, w, 4, *f)...)
		}
	}
	list := func(title string, items []string) {
		if len(items) == 0 {
			return
		}
		lines = append(lines, "", pg.Rule(w, title, ""))
		for _, item := range items {
			for k, p := range term.Wrap(term.Clean(sp.Text(item)), max(20, w-4)) {
				lines = append(lines, []string{"  - ", "    "}[min(k, 1)]+p)
			}
		}
	}
	list("What fits this cluster", r.Offers)
	if len(r.Offers) == 0 {
		list("What adopting does", r.Would)
		list("What it never touches", r.Never)
	}
	for _, n := range append(r.Notes[:len(r.Notes):len(r.Notes)], adoptNote(r)) {
		if n != "" {
			lines = append(lines, "")
			lines = append(lines, term.Wrap(term.Clean(n), w)...)
		}
	}
	return lines
}

// adoptNote is how the cluster is upgraded after an adoption; empty if it is not adopted.
func adoptNote(r *adopt.Report) string {
	if len(r.Offers) > 0 || r.Upgrade != adopt.Upgrade {
		return ""
	}
	return "Upgrades stay with kubeadm: adopt installs no operator and no agent."
}

// adoptFacts writes what was found.
func adoptFacts(r *adopt.Report, row func(head, text string)) {
	if r.Configured != "" && r.Configured != r.Kubernetes {
		row("kubeadm-config", r.Configured)
	}
	if r.Endpoint != "" {
		row("endpoint", r.Endpoint)
	}
	etcd := r.Etcd.Mode
	if len(r.Etcd.Members) > 0 {
		etcd += ", " + words.Count(len(r.Etcd.Members), "member") + " (" + strings.Join(r.Etcd.Members, ", ") + ")"
	}
	if r.Etcd.Version != "" {
		etcd += ", version " + r.Etcd.Version
	}
	row("etcd", etcd)
	network := "none recognised; routes may be made outside the cluster"
	if len(r.Network) > 0 {
		network = addOnsText(r.Network)
	}
	row("network", network)
	if len(r.AddOns) > 0 {
		row("add-ons", addOnsText(r.AddOns))
	}
	for i, n := range r.Nodes {
		head := ""
		if i == 0 {
			head = "nodes"
		}
		if i == maxAdopted {
			row(head, fmt.Sprintf("and %d more: -o json lists all", len(r.Nodes)-i))
			break
		}
		state := "Ready"
		if !n.Ready {
			state = "not Ready"
		}
		if n.Unscheduled {
			state += ", cordoned"
		}
		row(head, strings.Join([]string{n.Name, string(n.Role), cmp.Or(n.Address, "no address"), "kubelet " + n.Kubernetes, cmp.Or(n.Runtime, "unknown runtime"), state}, ", "))
	}
	for i, c := range r.Certificates {
		head := ""
		if i == 0 {
			head = "certificates"
		}
		row(head, fmt.Sprintf("%s: since %s, until %s", c.Of, c.NotBefore.Format(time.DateOnly), c.NotAfter.Format(time.DateOnly)))
	}
	for i, t := range r.Tokens {
		head := ""
		if i == 0 {
			head = "join tokens"
		}
		end := "never ends"
		if !t.Expires.IsZero() {
			end = "until " + t.Expires.UTC().Format(time.RFC3339)
		}
		row(head, strings.TrimSuffix(t.ID+", "+end+", "+t.Description, ", "))
	}
	if n := len(r.Changes); n > 0 {
		row("static pods", words.Count(n, "difference")+" from what kubeadm renders; see below")
	}
}

// maxAdopted is the number of nodes in text.
const maxAdopted = 20

func addOnsText(list []adopt.AddOn) string {
	var out []string
	for _, a := range list {
		out = append(out, strings.TrimSpace(a.Name+" "+a.Version))
	}
	return strings.Join(out, ", ")
}
