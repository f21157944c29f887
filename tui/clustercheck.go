package tui

import (
	"context"
	"fmt"
	"io"
	"slices"

	"github.com/spf13/cobra"

	"constellation/engine/check"
	"constellation/engine/cluster"
	"constellation/engine/findings"
	"constellation/engine/plan"
	"constellation/engine/workspace"
	"constellation/tui/view"
)

// clusterCheckOptions are the flags of `check`.
type clusterCheckOptions struct {
	cluster.Access
	pipelineOptions
	offline           findings.OfflineRequest
	kubernetes        string
	dryRun, printRBAC bool
	// security compares the cluster with the guides; explain is the ID of one of their checks.
	security bool
	explain  string
}

func checkCommand(s *session) *cobra.Command {
	var o clusterCheckOptions
	cmd := &cobra.Command{
		Use:   "check",
		Short: "Check any cluster for what stands against an upgrade",
		Long: `Check a cluster for what would stop or break an upgrade of Kubernetes. It needs a kubeconfig
and no workspace, and the cluster needs nothing of constellation. Check recognises the
distribution, and lists findings per minor up to --kubernetes (default: the next minor).

The flags that select a cluster and a user are those of kubectl, and so are the rules: the
variable KUBECONFIG may list several files. In a workspace without these flags, check is
upgrade check.

--manifests and --from-backup check files instead, without a cluster. Manifests are the YAML
and JSON files of a folder; each finding names file and line. Templates and other files that
cannot be read are listed as skipped. Secrets are never parsed.

Check changes nothing and sends read requests alone. Evictions are computed. With
--dry-run-requests, dry-run evictions test them, which calls admission webhooks, and
kubelets are queried. Reads that the user may not make are listed with the missing RBAC
rules; --print-rbac prints the least ClusterRole for a complete check.

With --security, check compares the cluster with the CIS Kubernetes Benchmark and the NSA/CISA
hardening guide instead. It reads kubelets through the API server, or else directly with the
client certificate of the kubeconfig. It sends two requests without credentials. Settings that
the API does not show are listed as not visible, never as passed. --explain prints one check
whole. Failed checks are findings: level 1 blocks, the rest warns.

Findings have stable IDs. --baseline, --ignore and --ignore-file exclude findings from
--fail-on; they are still printed. A rule needs a reason and an end.

Exit code: 0 with any findings; 1 if the cluster or folder cannot be read; 2 for a bad flag
or kubeconfig. With --fail-on: 4 if a finding counts that is at least that severe.`,
		Example: `  constellation check                                     # current context, next minor
  constellation check --context prod-eu --kubernetes v1.37
  constellation check --fail-on blocking -o json | jq '.hops[].findings[].id'
  constellation check -o markdown > ticket.md
  constellation check --print-rbac | kubectl apply -f -
  constellation check --manifests deploy --kubernetes v1.37 --fail-on blocking -o sarif
  constellation check --security
  constellation check --security --fail-on blocking -o json | jq '.results[] | {id, status}'
  constellation check --explain cis-1.2.27
  constellation check --from-backup backup-20261121070501-1a2b3c4d
  constellation check --baseline old.json --fail-on warning
  constellation check --ignore 'single-replica/deployment/shop/web,until=2027-03-31,reason=a cache'`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if o.security || o.explain != "" {
				return runSecurity(cmd.Context(), s, o)
			}
			if o.offline.Manifests == "" && o.offline.Backup == "" {
				return runCheck(cmd.Context(), s, o)
			}
			if o.kubernetes != "" {
				if err := (*minorFlag)(&o.offline.To).Set(o.kubernetes); err != nil {
					return &plan.Error{Op: "read --kubernetes", Err: err, Exit: plan.ExitUsage, Remedy: "name a minor or a patch"}
				}
			}
			return runOfflineCheck(cmd.Context(), s, o.offline, o.pipelineOptions)
		},
	}
	accessFlags(s, cmd, &o.Access)
	fl := cmd.Flags()
	fl.StringVar(&o.kubernetes, "kubernetes", "", "target `version` or minor, such as v1.37 (default: the next minor)")
	fl.BoolVar(&o.dryRun, "dry-run-requests", false, "also send dry-run evictions and query kubelets; others can notice it")
	fl.BoolVar(&o.printRBAC, "print-rbac", false, "print the least ClusterRole for a complete check and exit")
	fl.BoolVar(&o.security, "security", false, "compare the cluster with the CIS benchmark and the NSA/CISA guide")
	fl.StringVar(&o.explain, "explain", "", "print one check of --security whole, by its `ID`, such as cis-1.2.27")
	fl.StringVar(&o.offline.Manifests, "manifests", "", "check the manifests in this `folder`")
	fl.StringVar(&o.offline.Backup, "from-backup", "", "check the backup in this `folder`")
	o.flags(cmd)
	for _, source := range []string{"manifests", "from-backup"} {
		_ = cmd.MarkFlagDirname(source)
		for _, live := range []string{"kubeconfig", "context", "cluster", "user", "as", "dry-run-requests", "print-rbac", "security", "explain"} {
			cmd.MarkFlagsMutuallyExclusive(source, live)
		}
	}
	cmd.MarkFlagsMutuallyExclusive("manifests", "from-backup")
	for _, upgrade := range []string{"kubernetes", "dry-run-requests"} {
		cmd.MarkFlagsMutuallyExclusive("security", upgrade)
		cmd.MarkFlagsMutuallyExclusive("explain", upgrade)
	}
	_ = cmd.RegisterFlagCompletionFunc("explain", func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
		if s.Clusters == nil {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return view.SecurityIDs(s.Clusters.SecurityChecks()), cobra.ShellCompDirectiveNoFileComp
	})
	_ = cmd.RegisterFlagCompletionFunc("kubernetes", fixed(slices.Concat(s.Minors, s.Kubernetes)...))
	return cmd
}

// runCheck runs `check`.
func runCheck(ctx context.Context, s *session, o clusterCheckOptions) error {
	if o.printRBAC {
		fmt.Fprint(s.out, s.Clusters.CheckRole(o.dryRun))
		return nil
	}
	if err := impersonates(o.Access); err != nil {
		return err
	}
	rules, err := o.rules(s.Now())
	if err != nil {
		return err
	}
	ws, _, err := s.workspace()
	if err != nil {
		return err
	}
	own, err := adoptedCluster(s, ws)
	if err != nil {
		return err
	}
	if ws.Has(workspace.ConfigFile) && own == nil {
		if done, err := checkWorkspace(ctx, s, ws, o, rules); done || err != nil {
			return err
		}
	}
	sel, err := selectedForCheck(s, ws, own, o.Access)
	if err != nil {
		return err
	}
	ctx, stop := s.signals(ctx)
	defer stop()
	progress := newCheckProgress(s)
	k, err := s.Clusters.Check(ctx, sel, o.RequestTimeout, check.ForeignRequest{Kubernetes: o.kubernetes, DryRun: o.dryRun}, progress.event)
	progress.live.Clear()
	if err != nil {
		return err
	}
	return writeClusterCheck(s, &k, o, rules)
}

// selectedForCheck returns the cluster of an access. In the workspace of an adopted cluster, own, it is
// that one, and another is refused.
func selectedForCheck(s *session, ws *workspace.Workspace, own *cluster.Selected, a cluster.Access) (cluster.Selected, error) {
	if own != nil && !a.Given() && a.As == "" {
		return *own, nil
	}
	if own != nil && a.Kubeconfig == "" && a.Context == "" && a.ClusterName == "" {
		a.Kubeconfig = ws.Path(workspace.KubeconfigFile) // as another user
	}
	sel, err := s.Clusters.Select(a)
	if err != nil || own == nil {
		return sel, err
	}
	return sel, sameCluster("check", ws, &sel)
}

// checkWorkspace runs `upgrade check` for the cluster of a workspace. It refuses a kubeconfig of
// another cluster.
func checkWorkspace(ctx context.Context, s *session, ws *workspace.Workspace, o clusterCheckOptions, rules *findings.Rules) (bool, error) {
	if err := ownCluster(s.Clusters, ws, o.Access); err != nil {
		return false, err
	}
	r := check.Request{NoDryRun: !o.dryRun}
	if o.kubernetes != "" {
		if err := r.Kubernetes.UnmarshalText([]byte(o.kubernetes)); err != nil {
			return false, &plan.Error{Op: "read --kubernetes", Err: err, Exit: plan.ExitUsage, Remedy: "in a workspace, name a version with its patch, such as v1.36.3"}
		}
	}
	eng, _, _, err := s.engineOf()
	if err != nil {
		return false, err
	}
	ctx, stop := s.signals(ctx)
	defer stop()
	progress := newCheckProgress(s)
	k, err := eng.Check(ctx, r, progress.event)
	progress.live.Clear()
	judged, notes := rules.Judge(k.Findings)
	k.Notes = append(k.Notes, notes...)
	if k.Schema != "" && ctx.Err() == nil {
		write := func() error { return writeCheck(s, &k, r, checkFormat(o.format)) }
		if o.format == asSARIF {
			write = func() error { return writeSARIF(s.out, k.CLI, rules, judged) }
		}
		if perr := write(); perr != nil {
			return true, perr
		}
	}
	if err == nil && len(findings.Threshold(o.failOn).Failing(judged)) > 0 {
		err = exitStatus(plan.ExitBlocked)
	}
	return true, err
}

func writeSARIF(out io.Writer, cli string, rules *findings.Rules, judged []findings.Judged) error {
	return findings.WriteSARIF(out, findings.Report{Tool: cli, Compared: rules.Baseline != nil, Findings: judged})
}

// clusterDocument is the JSON output of a check of a cluster without a workspace.
type clusterDocument struct {
	*check.ClusterCheck
	// Findings are those of all hops; a baseline is read from here.
	Findings []findings.Judged `json:"findings"`
	// Failing is the number of findings that --fail-on counts, Exit the exit code.
	Failing int `json:"failing"`
	Exit    int `json:"exit"`
}

// marked is k with the titles of findings that do not count marked. judged are those of all hops.
func marked(k *check.ClusterCheck, judged []findings.Judged) *check.ClusterCheck {
	out := *k
	out.Hops = slices.Clone(k.Hops)
	for i := range out.Hops {
		h := &out.Hops[i]
		h.Findings = slices.Clone(h.Findings)
		for j := range h.Findings {
			h.Findings[j].Title += status(&judged[0])
			judged = judged[1:]
		}
	}
	return &out
}

// writeClusterCheck prints the result of a check without a workspace.
func writeClusterCheck(s *session, k *check.ClusterCheck, o clusterCheckOptions, rules *findings.Rules) error {
	sp := formatterOf(s, o.Access, &cluster.Selected{})
	judged, notes := rules.Judge(k.Findings())
	k.Notes = append(k.Notes, notes...)
	d := clusterDocument{ClusterCheck: k, Findings: judged, Failing: len(findings.Threshold(o.failOn).Failing(judged))}
	if d.Failing > 0 {
		d.Exit = plan.ExitBlocked
	}
	var err error
	switch o.format {
	case pipelineFormat(asJSON):
		err = document(s.out, d)
	case asSARIF:
		err = writeSARIF(s.out, k.CLI, rules, judged)
	case pipelineFormat(asMarkdown):
		_, err = fmt.Fprint(s.out, view.ClusterCheckMarkdown(marked(k, judged), sp))
	default:
		pg := s.page()
		pg.Commands = sp
		s.print(view.ClusterCheck(pg, s.answerWidth(), marked(k, judged)))
	}
	if err == nil && d.Exit != plan.ExitDone {
		err = exitStatus(d.Exit)
	}
	return err
}
