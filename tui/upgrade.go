package tui

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"constellation/engine"
	"constellation/engine/check"
	"constellation/engine/plan"
	"constellation/tui/term"
	"constellation/tui/view"
)

func upgradeCommand(s *session) *cobra.Command {
	cmd := group("upgrade", "Check, run and control upgrades of the cluster",
		"Check which versions the cluster can be upgraded to, upgrade it (apply) or only parts of it\n(prepare, execute), and control a running rollout (pause, resume, cancel, skip, retry).",
		"  constellation upgrade check --write-config\n  constellation upgrade apply\n  constellation upgrade pause")
	cmd.AddCommand(upgradeCheckCommand(s), upgradeApplyCommand(s), upgradePrepareCommand(s), upgradeExecuteCommand(s))
	cmd.AddCommand(rolloutCommands(s)...)
	return cmd
}

func upgradeCheckCommand(s *session) *cobra.Command {
	var (
		r                check.Request
		exitCode, update bool
		f                = checkFormat(text)
	)
	cmd := &cobra.Command{
		Use:   "check",
		Short: "List reachable versions and preflight the next hop",
		Long: `List the versions you can upgrade to, the upgrade path to each, and the changes of the next
hop. Then run preflight checks for the next hop: removed APIs that clients still use,
PodDisruptionBudgets that allow no eviction, webhooks whose service would be unavailable,
nodes that are too old, and more.

Check reads the cluster, the cloud and the release feed, and changes nothing in the cluster.
Some checks send dry-run requests, which the API server validates but does not persist;
--no-dry-run skips them.

--write-config writes the values of the next hop into constellation-conf.yaml and keeps
comments and order. Without a next hop, it writes those that run, as after
"upgrade apply --to", which changes no configuration.

Exit code: 0 with any findings; 1 if the cluster is unreachable. With --exit-code: 4 if
every path is blocked or a finding blocks the next hop, 6 if an upgrade is available and
nothing blocks it, 0 if nothing is newer.`,
		Example: `  constellation upgrade check                          # newest version, path and findings
  constellation upgrade check --to v1.1.0 --kubernetes v1.36.3
  constellation upgrade check --write-config           # write the next hop into the configuration
  constellation upgrade check --exit-code -o json | jq '.path[0].to'
  constellation upgrade check -o markdown > ticket.md
  constellation upgrade check --feed https://releases.example.com --feed-key release.pub`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			r.WriteConfig = r.WriteConfig || update
			return runUpgradeCheck(cmd.Context(), s, r, f, exitCode)
		},
	}
	fl := cmd.Flags()
	fl.BoolVar(&r.WriteConfig, "write-config", false, "write the values of the next hop into constellation-conf.yaml")
	fl.BoolVar(&update, "update-config", false, "alias of --write-config")
	fl.TextVar(&r.Release, "to", r.Release, "`release` to plan for (default: the newest reachable one)")
	fl.TextVar(&r.Kubernetes, "kubernetes", r.Kubernetes, "Kubernetes `version` to plan for (default: the newest reachable one)")
	fl.BoolVar(&exitCode, "exit-code", false, "exit with 6 if an upgrade is available, with 4 if every path is blocked or a finding blocks the next hop")
	fl.BoolVar(&r.NoDryRun, "no-dry-run", false, "skip checks that send dry-run requests")
	fl.BoolVar(&r.NoPreflight, "no-preflight", false, "show versions and path only; skip all preflight checks")
	fl.StringVar(&r.Feed, "feed", "", "release feed: folder, https `address` or bundle:FILE (default: from the configuration)")
	fl.StringArrayVar(&r.FeedKeys, "feed-key", nil, "public key `file` that verifies the feed; may be repeated")
	fl.Bool("non-interactive", false, "accepted for consistency; this command never prompts")
	fl.VarP(&f, "output", "o", "output format: text, json for one document, or markdown")
	_ = cmd.RegisterFlagCompletionFunc("output", fixed("text", "json", "markdown"))
	_ = cmd.RegisterFlagCompletionFunc("kubernetes", fixed(s.Kubernetes...))
	_ = cmd.RegisterFlagCompletionFunc("to", fixed(s.Releases...))
	_ = cmd.MarkFlagFilename("feed-key", "pub", "pem")
	return cmd
}

func upgradePrepareCommand(s *session) *cobra.Command {
	var (
		r engine.PrepareRequest
		o runOptions
	)
	cmd := &cobra.Command{
		Use:   "prepare",
		Short: "Publish the next hop's requirements without a rollout",
		Long: `Publish what nodes need for the next hop: the components they install and the reference
measurements they are attested against. Prepare first runs the checks of upgrade check.
Machines with the old and with the new image can join afterwards.

Prepare replaces no node and does not set the target. At the end it prints the kubectl
command that sets the target, and writes the same target into constellation-nodeversion.yaml
for GitOps. Once the target is set, the operator replaces the nodes.

The hop leads to the versions in constellation-conf.yaml, or towards --to and --kubernetes.
If neither is newer than the running versions, it is the next hop towards the newest
reachable versions.

Findings that block stop prepare with exit code 4. Accept warnings with --yes, or each by
its ID with --acknowledge. Two findings block unless they are acknowledged by ID:
measurements-weaker (some registers are no longer enforced; recorded in the cluster) and
oldest-supports-kubernetes (image and Kubernetes change in one write). Prepare can be
interrupted at any time; run it again to resume.`,
		Example: `  constellation upgrade check --write-config && constellation upgrade prepare
  constellation upgrade prepare --non-interactive --yes
  constellation upgrade prepare --to v1.1.0 --kubernetes v1.36.3 --acknowledge oldest-supports-kubernetes
  constellation upgrade prepare --yes -o json | jq 'select(.kind == "result").data.patch'`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return runPrepare(cmd.Context(), s, r, o) },
	}
	fl := cmd.Flags()
	fl.BoolVarP(&o.yes, "yes", "y", false, "accept the plan and its warnings")
	fl.BoolVar(&o.nonInteractive, "non-interactive", false, "never prompt")
	fl.StringArrayVar(&r.Acknowledge, "acknowledge", nil, "`ID` of a finding to acknowledge; may be repeated")
	// The remedies of findings name --ack, as `upgrade apply` has it.
	fl.SetNormalizeFunc(func(_ *pflag.FlagSet, name string) pflag.NormalizedName {
		if name == "ack" {
			name = "acknowledge"
		}
		return pflag.NormalizedName(name)
	})
	fl.TextVar(&r.Release, "to", r.Release, "target `release` (default: from the configuration)")
	fl.TextVar(&r.Kubernetes, "kubernetes", r.Kubernetes, "target Kubernetes `version` (default: from the configuration)")
	fl.BoolVar(&r.NoDryRun, "no-dry-run", false, "skip checks that send dry-run requests")
	fl.StringVar(&r.Feed, "feed", "", "release feed: folder, https `address` or bundle:FILE (default: from the configuration)")
	fl.StringArrayVar(&r.FeedKeys, "feed-key", nil, "public key `file` that verifies the feed; may be repeated")
	fl.DurationVar(&o.timeout, "timeout", 0, "stop after this time, such as 10m; run again to resume (0: no limit)")
	outputFlag(cmd, &o.out, "output format: text, or json for one event per line")
	_ = cmd.RegisterFlagCompletionFunc("kubernetes", fixed(s.Kubernetes...))
	_ = cmd.RegisterFlagCompletionFunc("to", fixed(s.Releases...))
	_ = cmd.RegisterFlagCompletionFunc("acknowledge", fixed("measurements-weaker", "oldest-supports-kubernetes"))
	_ = cmd.MarkFlagFilename("feed-key", "pub", "pem")
	return cmd
}

// runPrepare runs `upgrade prepare`.
func runPrepare(ctx context.Context, s *session, r engine.PrepareRequest, o runOptions) error {
	a := acceptance{acknowledged: r.Acknowledge, question: fixedQuestion("Publish this?")}
	return planAndRun(ctx, s, o, a, func(ctx context.Context, eng Engine) (*plan.Plan, error) {
		progress := newCheckProgress(s)
		defer progress.live.Clear()
		return eng.PlanPrepare(ctx, r, progress.event)
	})
}

// runUpgradeCheck runs `upgrade check` and prints its result.
func runUpgradeCheck(ctx context.Context, s *session, r check.Request, f checkFormat, exitCode bool) error {
	eng, _, _, err := s.engineOf()
	if err != nil {
		return err
	}
	ctx, stop := s.signals(ctx)
	defer stop()
	progress := newCheckProgress(s)
	k, err := eng.Check(ctx, r, progress.event)
	progress.live.Clear()
	if k.Config != nil && k.Config.Written {
		s.wrote = k.Config.Path
	}
	if k.Schema != "" && ctx.Err() == nil { // a check of an unreachable cluster still has release data
		if perr := writeCheck(s, &k, r, f); perr != nil {
			return perr
		}
	}
	if err != nil {
		return err
	}
	if exitCode && k.Exit != plan.ExitDone {
		return exitStatus(k.Exit)
	}
	return nil
}

func writeCheck(s *session, k *check.Check, r check.Request, f checkFormat) error {
	switch f {
	case "json":
		return document(s.out, k)
	case "markdown":
		_, err := fmt.Fprint(s.out, view.Markdown(k, s.formatter()))
		return err
	}
	s.print(checkText(s.page(), s.answerWidth(), k, r))
	return nil
}

// checkText renders the check that r asked for: the verdict first, then the details.
func checkText(pg view.Page, w int, k *check.Check, r check.Request) []string {
	severity, text := view.Verdict(k)
	sign, st := view.SeveritySignOf(pg, severity)
	head, feed := "upgrade check of cluster "+term.Clean(k.Cluster)+view.Marked(k.Simulated, k.NotAttested, ", "), view.FeedText(k.Feed, pg.Now)
	lines := []string{head + ", " + feed}
	if term.Width(lines[0]) > w {
		lines = append([]string{head}, term.Wrap(feed, w)...)
	}
	for _, p := range term.Wrap(term.Clean(text), w-2) {
		lines = append(lines, pg.Row(w).Add(st, sign+" ").Add(term.Strong, p).String())
		sign = " "
	}
	lines = append(lines, "")
	lines = append(lines, view.VersionRows(pg, w, k, "", true)...)
	lines = append(lines, view.PathRows(pg, w, k, 0)...)
	lines = append(lines, view.ChangeRows(pg, w, k)...)
	lines = append(lines, view.FindingGroups(pg, w, k)...)
	for i, n := range k.Notes {
		if i == 0 {
			lines = append(lines, "")
		}
		lines = append(lines, term.Clean(n))
	}
	return append(lines, view.NextRows(pg, k, r)...)
}

// checkProgress shows the progress of a check on stderr, if stderr is a terminal.
type checkProgress struct {
	live  term.LiveLine
	now   func() time.Time
	so    view.RunningCheck
	shown time.Time
}

func newCheckProgress(s *session) *checkProgress {
	p := &checkProgress{now: s.Now}
	p.live = s.liveLine()
	return p
}

func (p *checkProgress) event(ev plan.Event) {
	if ev.Object == check.CheckVersions {
		return
	}
	p.so.Apply(ev)
	if now := p.now(); now.Sub(p.shown) > 100*time.Millisecond {
		p.shown = now
		p.live.Set(p.so.Summary())
	}
}
