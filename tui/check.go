package tui

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"

	"github.com/spf13/cobra"

	"constellation/engine/check"
	"constellation/engine/cluster"
	"constellation/engine/findings"
	"constellation/engine/plan"
	"constellation/engine/workspace"
	"constellation/tui/view"
)

// failOn is the value of --fail-on.
type failOn findings.Threshold

func (f *failOn) String() string { return string(*f) }
func (f *failOn) Type() string   { return "blocking|warning" }
func (f *failOn) Set(s string) error {
	t, err := findings.ParseThreshold(s)
	if err != nil {
		return errors.New("want blocking or warning")
	}
	*f = failOn(t)
	return nil
}

// clusterCheckOptions are the flags of `check`.
type clusterCheckOptions struct {
	cluster.Access
	pipelineOptions
	offline           findings.OfflineRequest
	kubernetes        string
	dryRun, printRBAC bool
}

func (s *session) checkCommand() *cobra.Command {
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

Check changes nothing and sends read requests alone. Evictions are computed. With
--dry-run-requests, dry-run evictions test them, which calls admission webhooks, and
kubelets are queried. Reads that the user may not make are listed with the missing RBAC
rules; --print-rbac prints the least ClusterRole for a complete check.

--manifests and --from-backup check without a cluster: the YAML and JSON files of a
directory, with file and line of each finding, or a backup with its etcd snapshot.
--baseline, --ignore and --ignore-file exclude findings from --fail-on. A rule needs a
reason and an end.

Exit code: 0 with any findings; 1 if the cluster is unreachable or the directory cannot be
read; 2 for a bad flag or kubeconfig. With --fail-on: 4 if a finding is at least that severe.`,
		Example: `  constellation check                                     # current context, next minor
  constellation check --context prod-eu --kubernetes v1.37
  constellation check --fail-on blocking -o json | jq '.hops[].findings[].id'
  constellation check -o markdown > ticket.md
  constellation check --manifests deploy --kubernetes v1.37 -o sarif > check.sarif
  constellation check --manifests . --baseline baseline.json --fail-on warning
  constellation check --print-rbac | kubectl apply -f -`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return s.checkAny(cmd.Context(), o) },
	}
	s.accessFlags(cmd, &o.Access)
	fl := cmd.Flags()
	fl.StringVar(&o.kubernetes, "kubernetes", "", "target `version` or minor, such as v1.37 (default: the next minor)")
	fl.BoolVar(&o.dryRun, "dry-run-requests", false, "also send dry-run evictions and query kubelets; others can notice it")
	fl.BoolVar(&o.printRBAC, "print-rbac", false, "print the least ClusterRole for a complete check and exit")
	fl.StringVar(&o.offline.Manifests, "manifests", "", "check the manifests in this `folder`, not a cluster")
	fl.StringVar(&o.offline.Backup, "from-backup", "", "check the backup in this `folder`, not a cluster")
	_ = cmd.MarkFlagDirname("manifests")
	_ = cmd.MarkFlagDirname("from-backup")
	o.flags(cmd)
	_ = cmd.RegisterFlagCompletionFunc("kubernetes", fixed(s.Kubernetes...))
	return cmd
}

// accessFlags adds the flags of kubectl that select a cluster and a user.
func (s *session) accessFlags(cmd *cobra.Command, a *cluster.Access) {
	fl := cmd.Flags()
	fl.StringVar(&a.Kubeconfig, "kubeconfig", "", "kubeconfig `file` (default: KUBECONFIG, or ~/.kube/config)")
	fl.StringVar(&a.Context, "context", "", "`context` of the kubeconfig (default: the current one)")
	fl.StringVar(&a.ClusterName, "cluster", "", "`cluster` of the kubeconfig, instead of the context's")
	fl.StringVar(&a.User, "user", "", "`user` of the kubeconfig, instead of the context's")
	fl.StringVar(&a.As, "as", "", "`user` to impersonate")
	fl.StringVar(&a.AsUID, "as-uid", "", "`UID` to impersonate")
	fl.StringArrayVar(&a.AsGroups, "as-group", nil, "`group` to impersonate; may be repeated")
	fl.DurationVar(&a.RequestTimeout, "request-timeout", 0, "limit of one request, such as 10s (0: the program's limits)")
	_ = cmd.MarkFlagFilename("kubeconfig")
	_ = cmd.RegisterFlagCompletionFunc("context", func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
		if s.Clusters == nil {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		names, err := s.Clusters.Contexts(*a)
		if err != nil {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return names, cobra.ShellCompDirectiveNoFileComp
	})
}

// checkAny runs `check`.
func (s *session) checkAny(ctx context.Context, o clusterCheckOptions) error {
	if o.printRBAC {
		fmt.Fprint(s.out, s.Clusters.CheckRole(o.dryRun))
		return nil
	}
	if o.As == "" && (o.AsUID != "" || len(o.AsGroups) > 0) {
		return &plan.Error{Op: "read flags", Err: errors.New("--as-group and --as-uid need --as"), Exit: plan.ExitUsage, Remedy: "name the user to impersonate with --as"}
	}
	if o.offline.Manifests != "" || o.offline.Backup != "" {
		if o.Given() || o.dryRun {
			return &plan.Error{Op: "read flags", Err: errors.New("--manifests and --from-backup check no cluster"), Exit: plan.ExitUsage, Remedy: "leave out the flags that select or query a cluster"}
		}
		var err error
		if o.offline.To, err = minorOf(o.kubernetes); err != nil {
			return err
		}
		return s.checkOffline(ctx, o.offline, o.pipelineOptions)
	}
	ws, _, err := s.workspace()
	if err != nil {
		return err
	}
	if ws.Has(workspace.ConfigFile) {
		if done, err := s.checkWorkspace(ctx, ws, o); done || err != nil {
			return err
		}
	}
	sel, err := s.Clusters.Select(o.Access)
	if err != nil {
		return err
	}
	ctx, stop := s.signals(ctx)
	defer stop()
	progress := s.checkProgress()
	k, err := s.Clusters.Check(ctx, sel, o.RequestTimeout, check.ForeignRequest{Kubernetes: o.kubernetes, DryRun: o.dryRun}, progress.event)
	progress.live.Clear()
	if err != nil {
		return err
	}
	return s.writeClusterCheck(&k, o)
}

// checkWorkspace runs `upgrade check` for the cluster of a workspace. It refuses a kubeconfig of
// another cluster.
func (s *session) checkWorkspace(ctx context.Context, ws *workspace.Workspace, o clusterCheckOptions) (bool, error) {
	if o.Given() {
		sel, err := s.Clusters.Select(o.Access)
		if err != nil {
			return false, err
		}
		own, err := ws.Kubeconfig()
		if err != nil {
			return false, err
		}
		_, server, err := workspace.KubeconfigServer(own)
		if err != nil {
			return false, err
		}
		if server.Value != sel.Server {
			return false, &plan.Error{
				Op: fmt.Sprintf("check context %q", sel.Context), Exit: plan.ExitUsage,
				Err:    fmt.Errorf("it leads to %s, and the workspace %s to %s", sel.Server, filepath.Base(ws.Path(".")), server.Value),
				Remedy: "leave out the flags to check the workspace's cluster, or run the command in another directory",
			}
		}
	}
	rules, err := o.rules(s.Now())
	if err != nil {
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
	progress := s.checkProgress()
	k, err := eng.Check(ctx, r, progress.event)
	progress.live.Clear()
	judged, notes := rules.Judge(k.Findings)
	k.Notes = append(k.Notes, notes...)
	if k.Schema != "" && ctx.Err() == nil {
		if o.format == asSARIF {
			if perr := findings.WriteSARIF(s.out, findings.Report{Tool: k.CLI, Compared: rules.Baseline != nil, Findings: judged}); perr != nil {
				return true, perr
			}
		} else if perr := s.writeCheck(&k, r, checkFormat(o.format)); perr != nil {
			return true, perr
		}
	}
	if err == nil && len(findings.Threshold(o.failOn).Failing(judged)) > 0 {
		err = exitStatus(plan.ExitBlocked)
	}
	return true, err
}

// writeClusterCheck prints the result of a check without a workspace.
func (s *session) writeClusterCheck(k *check.ClusterCheck, o clusterCheckOptions) error {
	sp := view.CommandFormatter{Program: s.Program, Context: o.Context}
	if o.Kubeconfig != "" {
		sp.Kubeconfig = o.Kubeconfig
		if path, err := filepath.Abs(o.Kubeconfig); err == nil {
			sp.Kubeconfig = path
		}
	}
	judged, failing, compared, err := s.judgeCluster(k, o.pipelineOptions)
	if err != nil {
		return err
	}
	switch o.format {
	case asSARIF:
		if err := findings.WriteSARIF(s.out, findings.Report{Tool: k.CLI, Compared: compared, Findings: judged}); err != nil {
			return err
		}
	case "json":
		if err := document(s.out, k); err != nil {
			return err
		}
	case "markdown":
		if _, err := fmt.Fprint(s.out, view.ClusterCheckMarkdown(k, sp)); err != nil {
			return err
		}
	default:
		pg := s.page()
		pg.Commands = sp
		s.print(view.ClusterCheck(pg, s.answerWidth(), k))
	}
	if failing > 0 {
		return exitStatus(plan.ExitBlocked)
	}
	return nil
}
