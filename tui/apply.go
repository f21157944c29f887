package tui

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"constellation/engine"
	"constellation/engine/cluster"
	"constellation/engine/plan"
	"constellation/tui/console"
	"constellation/tui/term"
	"constellation/tui/view"
)

func upgradeApplyCommand(s *session) *cobra.Command {
	var (
		r engine.ApplyRequest
		o runOptions
	)
	cmd := &cobra.Command{
		Use:   "apply",
		Short: "Upgrade the cluster: backup, services, rolling replacement",
		Long: `Upgrade the cluster by one hop. Apply runs the checks of upgrade check, shows the plan,
prompts once, and then:

  1. takes a verified backup
  2. publishes the components and reference measurements of the new nodes
  3. upgrades the services
  4. sets the target of all nodes, image and Kubernetes in one write

The operator then replaces the nodes (rolling update), and apply reports the progress.

The hop leads to the versions in constellation-conf.yaml, or towards --to and --kubernetes.
If neither is newer than the running versions, it is the next hop towards the newest
reachable versions.

Findings that block stop apply with exit code 4. --yes accepts the plan and ordinary
warnings. Findings that weaken or destroy something must be acknowledged by ID, typed or
with --ack: measurements-weaker, oldest-supports-kubernetes (image and Kubernetes minor in
one write), local-data (volumes deleted with their nodes), no-backup. Once accepted, apply
never prompts.

On a terminal apply runs in the console. P, R and C pause, resume and cancel the rollout.
With --accessible it prompts and prints line by line.

Apply can be interrupted at any time. Before the target is set, it stops after the current
step. Afterwards the rollout continues in the cluster. Run the same command again to resume
or to reattach. Only one console may run an upgrade of a cluster: a second one exits with 8
and names the first; on a terminal it shows the nodes meanwhile.`,
		Example: `  constellation upgrade check --write-config && constellation upgrade apply
  constellation upgrade apply --non-interactive --yes -o json > events.jsonl
  constellation upgrade apply --non-interactive --yes -o markdown >> "$GITHUB_STEP_SUMMARY"
  constellation upgrade apply --to v1.1.0 --kubernetes v1.36.3 --ack oldest-supports-kubernetes
  constellation upgrade apply --dry-run                  # rehearse, change nothing
  constellation upgrade apply --yes --surge 10% --detach  # set the target, then leave`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return runUpgrade(cmd.Context(), s, console.Apply(r, o.yes), o)
		},
	}
	applyFlags(cmd, &r, &o)
	fl := cmd.Flags()
	fl.StringVar(&r.Surge, "surge", "", "maximum surge: extra machines at any time, `N or P%` (default: unchanged, initially 1)")
	fl.BoolVar(&r.Detach, "detach", false, "exit once the target is set; the rollout continues in the cluster")
	fl.TextVar(&r.Release, "to", r.Release, "target `release` (default: from the configuration)")
	fl.TextVar(&r.Kubernetes, "kubernetes", r.Kubernetes, "target Kubernetes `version` (default: from the configuration)")
	fl.BoolVar(&r.NoDryRun, "no-dry-run", false, "skip checks that send dry-run requests")
	fl.StringVar(&r.Feed, "feed", "", "release feed: folder, https `address` or bundle:FILE (default: from the configuration)")
	fl.StringArrayVar(&r.FeedKeys, "feed-key", nil, "public key `file` that verifies the feed; may be repeated")
	_ = cmd.RegisterFlagCompletionFunc("kubernetes", fixed(s.Kubernetes...))
	_ = cmd.RegisterFlagCompletionFunc("to", fixed(s.Releases...))
	_ = cmd.RegisterFlagCompletionFunc("surge", fixed("1", "2", "10%"))
	_ = cmd.MarkFlagFilename("feed-key", "pub", "pem")
	return cmd
}

func upgradeExecuteCommand(s *session) *cobra.Command {
	var (
		r    engine.ApplyRequest
		o    runOptions
		helm bool
	)
	cmd := &cobra.Command{
		Use:   "execute --helm",
		Short: "Upgrade only the services to this program's release",
		Long: `Execute --helm takes a backup, then upgrades CRDs and Helm charts of the services to the
release of this program. It sets no target, replaces no node, and needs no configuration.`,
		Example: `  constellation upgrade execute --helm
  constellation upgrade execute --helm --non-interactive --yes -o json`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if !helm {
				return &plan.Error{Err: errors.New("no part of the upgrade is selected"), Remedy: "add --helm", Exit: plan.ExitUsage}
			}
			return runUpgrade(cmd.Context(), s, console.Execute(r, o.yes), o)
		},
	}
	cmd.Flags().BoolVar(&helm, "helm", false, "upgrade the Helm charts of the services")
	applyFlags(cmd, &r, &o)
	return cmd
}

// runUpgrade plans, prompts if it can, and runs: in the console if the terminal allows it.
func runUpgrade(ctx context.Context, s *session, u *console.Upgrade, o runOptions) error {
	if o.out == text && s.interactive(o.nonInteractive) {
		return showConsole(ctx, s, consoleOptions{upgrade: u, timeout: o.timeout})
	}
	return planAndRun(ctx, s, o, acceptance{
		acknowledged: u.Request.Acknowledge, question: func(p *plan.Plan) string { return "Upgrade cluster " + term.Clean(p.Cluster) + "?" },
		show: func(p *plan.Plan, _ sink) { s.print(planText(s.page(), s.answerWidth(), p)) },
	}, func(ctx context.Context, eng Engine) (*plan.Plan, error) {
		progress := newCheckProgress(s)
		defer progress.live.Clear()
		return u.Plan(ctx, eng, u.Request, progress.event)
	})
}

// planText renders an upgrade's plan for the prompt.
func planText(pg view.Page, w int, p *plan.Plan) []string {
	lines := []string{fmt.Sprintf("%s of cluster %s, from %s to %s", p.Verb, term.Clean(p.Cluster)+view.Marked(p.Simulated, p.NotAttested, ", "), term.Clean(p.From.String()), term.Clean(p.To.String())), ""}
	return append(lines, view.UpgradeSections(pg, w, p)...)
}

// rolloutCommands returns pause, resume, cancel, skip and retry.
func rolloutCommands(s *session) []*cobra.Command {
	yes, no := true, false
	var out []*cobra.Command
	for _, x := range []struct {
		use, short, long, done string
		change                 cluster.RolloutChange
	}{
		{
			"pause", "Pause the rollout",
			"Pause the rollout: replacements in progress finish, no new one starts. Workloads keep running.\nAfter ten minutes the cluster autoscaler is enabled again. Upgrade resume continues.",
			"paused: replacements in progress finish, no new one starts",
			cluster.RolloutChange{Paused: &yes},
		},
		{
			"resume", "Resume a paused or cancelled rollout",
			"Resume a paused or cancelled rollout with the same target.",
			"resumed",
			cluster.RolloutChange{Paused: &no, Cancelled: &no},
		},
		{
			"cancel", "Stop the rollout and keep the remaining nodes",
			"Stop the rollout: replacements in progress finish, the remaining nodes keep their version, and\nthe cluster autoscaler is enabled again. Upgrade resume continues with the same target;\nupgrade apply sets the same or another one.",
			"cancelled: replacements in progress finish, all other nodes keep their version",
			cluster.RolloutChange{Cancelled: &yes},
		},
	} {
		var (
			f              format
			nonInteractive bool
		)
		cmd := &cobra.Command{
			Use: x.use, Short: x.short, Long: x.long + "\n\nThe exit code is 3 if the rollout is in that state already.",
			Example: "  constellation upgrade " + x.use + "\n  constellation upgrade " + x.use + " -o json",
			Args:    cobra.NoArgs,
			RunE: func(cmd *cobra.Command, _ []string) error {
				if err := unlock(s, cluster.Access{}, f, nonInteractive); err != nil {
					return err
				}
				return runRolloutChange(cmd.Context(), s, x.change, x.done, f)
			},
		}
		outputFlag(cmd, &f, "output format: text, or json for one document")
		cmd.Flags().BoolVar(&nonInteractive, "non-interactive", false, "never prompt for the name of a guarded cluster")
		out = append(out, cmd)
	}
	for _, x := range []struct {
		use, short, long, done string
		skip                   bool
	}{
		{
			"skip", "Exclude a node or a group from rollouts",
			"Exclude a node, or a group with all its nodes, from this and later rollouts. A replacement in\nprogress is aborted, unless the old node is being removed already. Workers wait for a skipped\ncontrol plane, because no kubelet may be newer than an API server. Upgrade retry ends the skip.",
			"skipped", true,
		},
		{
			"retry", "Resume a skipped or postponed node or group",
			"Resume a skipped node or group. After a failed replacement or a failed in-place upgrade of the\nnode, retry at once instead of after the backoff. After a failed upgrade of Kubernetes by the\nagent of a control plane, retry that upgrade.",
			"resumed: the rollout replaces it in turn", false,
		},
	} {
		var (
			f              format
			nonInteractive bool
		)
		cmd := &cobra.Command{
			Use: x.use + " NODE-OR-GROUP", Short: x.short, Long: x.long + "\n\nThe exit code is 3 if there is nothing to do.",
			Example: "  constellation upgrade " + x.use + " worker-3\n  constellation upgrade " + x.use + " worker-3 -o json",
			Args:    oneArg("the name of a node or a group", "run `constellation status` to see both"), ValidArgsFunction: completeNodes(s, true),
			RunE: func(cmd *cobra.Command, args []string) error {
				if err := unlock(s, cluster.Access{}, f, nonInteractive); err != nil {
					return err
				}
				return runSkip(cmd.Context(), s, args[0], x.skip, x.done, f)
			},
		}
		outputFlag(cmd, &f, "output format: text, or json for one document")
		cmd.Flags().BoolVar(&nonInteractive, "non-interactive", false, "never prompt for the name of a guarded cluster")
		out = append(out, cmd)
	}
	return out
}

// skipAnswer is the JSON output of skip and retry.
type skipAnswer struct {
	Schema string `json:"schema"`
	cluster.SkipState
	// Changed is false if nothing had to change.
	Changed bool `json:"changed"`
}

func runSkip(ctx context.Context, s *session, name string, skip bool, done string, f format) error {
	eng, _, _, err := s.engineOf()
	if err != nil {
		return err
	}
	ctx, stop := s.signals(ctx)
	defer stop()
	h, err := eng.Skip(ctx, name, skip)
	if err != nil && (plan.ExitCode(err) != plan.ExitNothing || f != asJSON) {
		return err
	}
	a := skipAnswer{Schema: plan.Schema, SkipState: h, Changed: err == nil}
	if err == nil {
		if a.Held = skip; !skip {
			a.Postponed, a.Failed = time.Time{}, false
		}
	}
	if f == asJSON {
		if derr := document(s.out, a); derr != nil {
			return derr
		}
		return err
	}
	switch {
	case h.Failed && !skip:
		done = "retried now"
	case skip:
		done += "; `" + s.command("upgrade retry "+term.Clean(a.Name)) + "` resumes it"
	}
	fmt.Fprintf(s.out, "%s %s is %s\n", a.Kind, term.Clean(a.Name), done)
	return nil
}

// rolloutAnswer is the JSON output of pause, resume and cancel.
type rolloutAnswer struct {
	Schema    string      `json:"schema"`
	Target    plan.Target `json:"target"`
	Paused    bool        `json:"paused"`
	Cancelled bool        `json:"cancelled"`
	// Changed is false if nothing had to change.
	Changed bool   `json:"changed"`
	Reason  string `json:"reason,omitempty"`
	Message string `json:"message,omitempty"`
}

func runRolloutChange(ctx context.Context, s *session, c cluster.RolloutChange, done string, f format) error {
	eng, _, _, err := s.engineOf()
	if err != nil {
		return err
	}
	ctx, stop := s.signals(ctx)
	defer stop()
	ro, err := eng.ChangeRollout(ctx, c)
	if err != nil && plan.ExitCode(err) != plan.ExitNothing {
		return err
	}
	a := rolloutAnswer{
		Schema: plan.Schema, Target: plan.Target{Image: ro.Target.ImageVersion, Kubernetes: ro.Target.Kubernetes},
		Paused: ro.Target.Paused, Cancelled: ro.Target.Cancelled, Changed: err == nil, Reason: ro.Reason, Message: ro.Message,
	}
	if err == nil && c.Paused != nil {
		a.Paused = *c.Paused
	}
	if err == nil && c.Cancelled != nil {
		a.Cancelled = *c.Cancelled
	}
	if f == asJSON {
		if derr := document(s.out, a); derr != nil {
			return derr
		}
		return err
	}
	if err != nil {
		return err
	}
	to := "Kubernetes " + term.Clean(a.Target.Kubernetes)
	if a.Target.Image != "" {
		to = "image " + term.Clean(a.Target.Image) + " and " + to
	}
	fmt.Fprintf(s.out, "the rollout to %s %s\n", to, done)
	fmt.Fprintf(s.out, "next  %s\n", s.command("watch"))
	return nil
}
