package tui

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"constellation/engine"
)

// applyOptions are what the command line says about `upgrade apply` and `upgrade execute`
// beside the request.
type applyOptions struct {
	yes, nonInteractive bool
	timeout             time.Duration
	out                 format
}

func (s *session) upgradeApplyCommand() *cobra.Command {
	var (
		r engine.ApplyRequest
		o applyOptions
	)
	cmd := &cobra.Command{
		Use:   "apply",
		Short: "Upgrade the cluster: backup, services, then node after node",
		Long: `Apply checks the next hop as upgrade check does, shows what will change, asks once, and
carries it out: a verified backup, what the new nodes install and must prove, the
services, and the target of all nodes, image and Kubernetes in one write. From then on
the operator replaces node after node, and apply only watches.

The hop is the one to what constellation-conf.yaml asks for, or on the way to --to and
--kubernetes. If neither asks for anything newer than what runs, it is the next hop to the
newest that can be reached.

Findings that block stop it with exit code 4. --yes answers the question and accepts
ordinary warnings. What weakens or destroys something is accepted by its name alone, typed
or with --ack: measurements-weaker, oldest-supports-kubernetes (image and Kubernetes minor
in one write), local-data (volumes that go with their nodes), no-backup. Nothing is asked
later.

On a terminal all of this is in the console: the plan, the names and the question, the
steps, and the nodes, with P, R and C to pause, resume and cancel. With --accessible it is
asked and told line by line.

Apply can be interrupted at any time: before the target is set it stops after the current
step, afterwards the cluster goes on alone, and the same command comes back to it. One
console at a time works on a cluster; another one ends with 8 and says who does, and in
the console shows the nodes meanwhile.`,
		Example: `  constellation upgrade check --write-config && constellation upgrade apply
  constellation upgrade apply --non-interactive --yes -o json > events.jsonl
  constellation upgrade apply --non-interactive --yes -o markdown >> "$GITHUB_STEP_SUMMARY"
  constellation upgrade apply --to v1.1.0 --kubernetes v1.36.3 --ack oldest-supports-kubernetes
  constellation upgrade apply --dry-run                  # the whole of it, without any effect
  constellation upgrade apply --yes --surge 10% --detach  # set the target, then leave`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return s.apply(cmd.Context(), applyStart(r, o.yes), o)
		},
	}
	s.applyFlags(cmd, &r, &o)
	fl := cmd.Flags()
	fl.StringVar(&r.Surge, "surge", "", "machines beyond the wanted number at any moment: `N or P%` (default: as it is, 1 at first)")
	fl.BoolVar(&r.Detach, "detach", false, "leave when the target is set; the cluster goes on alone")
	fl.TextVar(&r.Release, "to", r.Release, "`release` to go to (default: what the configuration asks for)")
	fl.TextVar(&r.Kubernetes, "kubernetes", r.Kubernetes, "Kubernetes `version` to go to (default: what the configuration asks for)")
	fl.BoolVar(&r.NoDryRun, "no-dry-run", false, "leave out questions of the check that are asked as dry runs")
	fl.StringVar(&r.Feed, "feed", "", "directory or address of the release feed (default: that of the configuration)")
	fl.StringArrayVar(&r.FeedKeys, "feed-key", nil, "file with a public key that the feed is signed with; may be repeated")
	_ = cmd.RegisterFlagCompletionFunc("kubernetes", fixed(s.Kubernetes...))
	_ = cmd.RegisterFlagCompletionFunc("to", fixed(s.Releases...))
	_ = cmd.RegisterFlagCompletionFunc("surge", fixed("1", "2", "10%"))
	_ = cmd.MarkFlagFilename("feed-key", "pub", "pem")
	return cmd
}

// applyFlags are those that apply and execute share.
func (s *session) applyFlags(cmd *cobra.Command, r *engine.ApplyRequest, o *applyOptions) {
	fl := cmd.Flags()
	fl.BoolVarP(&o.yes, "yes", "y", false, "the plan and its ordinary warnings are accepted")
	fl.BoolVar(&o.nonInteractive, "non-interactive", false, "ask nothing")
	fl.StringArrayVar(&r.Acknowledge, "ack", nil, "`ID` of a finding that is accepted by name; may be repeated")
	fl.StringSliceVar(&r.Skip, "skip-phases", nil, "`steps` to leave out, with commas between: "+strings.Join(engine.ApplySteps, ", "))
	fl.BoolVar(&r.Rehearse, "dry-run", false, "rehearse the plan: ask what can be asked, change nothing")
	fl.DurationVar(&o.timeout, "timeout", 0, "stop after this long, such as 1h; the same command goes on (0: never)")
	o.out = text
	fl.VarP((*checkFormat)(&o.out), "output", "o", "what to print: text, json for one event per line, or markdown for a summary at the end (lines go to stderr)")
	_ = cmd.RegisterFlagCompletionFunc("output", fixed("text", "json", "markdown"))
	_ = cmd.RegisterFlagCompletionFunc("ack", fixed("measurements-weaker", "oldest-supports-kubernetes", "local-data", "no-backup"))
	_ = cmd.RegisterFlagCompletionFunc("skip-phases", fixed(engine.ApplySteps...))
}

func (s *session) upgradeExecuteCommand() *cobra.Command {
	var (
		r    engine.ApplyRequest
		o    applyOptions
		helm bool
	)
	cmd := &cobra.Command{
		Use:   "execute --helm",
		Short: "Bring the services alone to the release of this program",
		Long: `Execute --helm backs up, and brings kinds and charts of the services to the release of
this program. It sets no target, replaces no node, and needs no configuration.`,
		Example: `  constellation upgrade execute --helm
  constellation upgrade execute --helm --non-interactive --yes -o json`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if !helm {
				return &engine.Error{Err: errors.New("nothing is named that is to be executed"), Remedy: "add --helm", Exit: engine.ExitUsage}
			}
			return s.apply(cmd.Context(), executeStart(r, o.yes), o)
		},
	}
	cmd.Flags().BoolVar(&helm, "helm", false, "the charts of the services")
	s.applyFlags(cmd, &r, &o)
	return cmd
}

// apply plans, asks if somebody is there to answer, and runs: in the console if there can
// be one.
func (s *session) apply(ctx context.Context, u *upgradeStart, o applyOptions) error {
	if o.out == text && s.interactive(o.nonInteractive) {
		return s.console(ctx, consoleOptions{upgrade: u, timeout: o.timeout})
	}
	out := s.printer(o.out, true)
	defer func() { out.close() }()
	eng, _, _, err := s.engineOf()
	if err != nil {
		return s.unplanned(out, o.out, err)
	}
	ctx, stop := s.limited(ctx, o.timeout)
	defer stop()
	progress := s.checkProgress()
	plan, err := u.plan(ctx, eng, u.request, progress.event)
	progress.live.clear()
	if err != nil {
		return s.unplanned(out, o.out, err)
	}
	out, err = s.accept(plan, out, o.out, acceptance{
		yes: o.yes, acknowledged: u.request.Acknowledge, asks: o.out == text && !o.nonInteractive && s.asks(),
		question: "Upgrade cluster " + clean(plan.Cluster) + "?", show: func(p *engine.Plan, _ sink) { s.print(s.planText(p)) },
	})
	if err != nil {
		return err
	}
	return eng.Run(ctx, plan, out.event)
}

// planText draws an upgrade for those who must accept it.
func (s *session) planText(p *engine.Plan) []string {
	c := s.sheet()
	c.w = s.answerWidth()
	w := c.w
	lines := []string{fmt.Sprintf("%s of cluster %s, from %s to %s", p.Verb, clean(p.Cluster)+marked(p.Simulated, ", "), clean(p.From.String()), clean(p.To.String())), ""}
	return append(lines, c.upgradeSections(w, p)...)
}

// upgradeSections are those of an upgrade's plan: versions, what else changes, steps,
// findings, and what must be read. On the screen what speaks against it comes first.
func (c *console) upgradeSections(w int, p *engine.Plan) []string {
	k := &engine.Check{Findings: p.Findings, Changes: p.Changes, Path: []engine.Hop{{}}}
	var lines []string
	if !c.th.uncut && len(p.Blocked()) > 0 {
		return c.findingGroups(w, &engine.Check{Findings: p.Findings})
	}
	if len(p.Components) > 0 {
		lines = append(lines, c.th.rule(w, "Versions", ""))
		for _, x := range p.Components {
			lines = append(lines, c.th.row(w).pad(2).add(plain, c.componentLine(x)).String())
		}
	}
	if rows := c.changeRows(w, k); len(rows) > 0 {
		rows[0] = c.th.rule(w, "Will change", "")
		lines = append(lines, rows...)
		if c.th.uncut { // on the screen it stands with what is at stake
			lines = append(lines, c.th.row(w).pad(2).col(faint, "last backup", 14).add(plain, c.backupWords(p.LastBackup)).String())
		}
	}
	lines = append(lines, c.th.rule(w, "Steps", count(len(p.Steps), "step")))
	const indent = 22
	for i, st := range p.Steps {
		r := c.th.row(w).num(faint, fmt.Sprint(i+1), 2).pad(1).col(strong, clean(st.ID), 17)
		if st.Finished {
			lines = append(lines, r.add(faint, "done before: "+clean(st.Title)).String())
			continue
		}
		text := clean(st.Title) + ": " + clean(st.Effect)
		if st.Final {
			text += " (point of no return)"
		}
		for n, l := range wrap(text, max(20, w-indent)) {
			if n > 0 {
				r = c.th.row(w).pad(indent)
			}
			lines = append(lines, r.add(plain, l).String())
		}
		for _, d := range st.Details {
			lines = append(lines, c.prose(w, indent, faint, clean(d))...)
		}
	}
	lines = append(lines, c.findingGroups(w, k)...)
	lines = append(lines, "")
	for _, n := range p.Notes {
		lines = append(lines, c.prose(w, 0, plain, clean(c.deps.sp.text(n)))...)
	}
	for _, st := range p.Steps {
		if st.Warning != "" && !st.Finished {
			lines = append(lines, c.prose(w, 0, caution, "Warning: "+clean(st.Warning))...)
		}
	}
	return lines
}

// backupWords say how old a backup is, and what it holds.
func (c *console) backupWords(b *engine.LastBackup) string {
	if b == nil {
		return "none"
	}
	s := fmt.Sprintf("%s, %s, %s", ago(b.Created, c.now), amountOf(b.Objects, "object"), bytesOf(b.Bytes))
	if !b.Etcd {
		return s + ", without etcd"
	}
	return s + ", with a snapshot of etcd"
}

// componentLine is "Kubernetes: v1.35.4 -> v1.36.3".
func (c *console) componentLine(x engine.ComponentCheck) string {
	name := clean(x.Name)
	if x.Part {
		name = "  " + name
	}
	return fmt.Sprintf("%-22s %s %s %s", name, orElse(clean(x.Now), "(none)"), c.th.to, clean(x.NextHop))
}

// rolloutCommands are pause, resume, cancel, skip and retry.
func (s *session) rolloutCommands() []*cobra.Command {
	yes, no := true, false
	var out []*cobra.Command
	for _, x := range []struct {
		use, short, long, done string
		change                 engine.RolloutChange
	}{
		{
			"pause", "Begin no further replacement",
			"Pause the rollout: nothing more is begun, and what is under way is finished. The cluster\nworks as before meanwhile; after ten minutes its autoscaler is given back.",
			"paused: what is under way is finished, nothing more is begun",
			engine.RolloutChange{Paused: &yes},
		},
		{
			"resume", "Go on with a rollout that was paused or cancelled",
			"Resume goes on with the same target after pause or cancel.",
			"goes on",
			engine.RolloutChange{Paused: &no, Cancelled: &no},
		},
		{
			"cancel", "End the rollout where it stands",
			"Cancel ends the rollout where it stands: what is under way is finished, the autoscaler is\ngiven back, and nodes stay as they are. Resume goes on with the same target; upgrade apply\nsets it, or another one, anew.",
			"cancelled: what is under way is finished, all other nodes stay as they are",
			engine.RolloutChange{Cancelled: &yes},
		},
	} {
		var f format
		cmd := &cobra.Command{
			Use: x.use, Short: x.short, Long: x.long + "\n\nThe exit code is 3 if it is so already.",
			Example: "  constellation upgrade " + x.use + "\n  constellation upgrade " + x.use + " -o json",
			Args:    cobra.NoArgs,
			RunE: func(cmd *cobra.Command, _ []string) error {
				return s.changeRollout(cmd.Context(), x.change, x.done, f)
			},
		}
		s.outputFlag(cmd, &f, "what to print: text, or json for one document")
		out = append(out, cmd)
	}
	for _, x := range []struct {
		use, short, long, done string
		skip                   bool
	}{
		{
			"skip", "Leave a node, or a group, as it is",
			"Skip has this rollout, and later ones, leave a node as it is, or a group with all its nodes.\nA replacement that is under way is given up, unless the old node is bound to go already. Workers\nwait for a control plane that is skipped: no kubelet may be newer than an API server.\nUpgrade retry lets it go.",
			"left as it is", true,
		},
		{
			"retry", "Let a node go that was skipped or postponed, or try a failed upgrade again",
			"Retry lets a node or a group go that was skipped, and tries a node again now that was\npostponed because its replacement had failed, or whose upgrade in place has failed. Of a\ncontrol plane whose agent could not upgrade Kubernetes it tries that again now.",
			"replaced as any other", false,
		},
	} {
		var f format
		cmd := &cobra.Command{
			Use: x.use + " NODE-OR-GROUP", Short: x.short, Long: x.long + "\n\nThe exit code is 3 if there is nothing to do.",
			Example: "  constellation upgrade " + x.use + " worker-3\n  constellation upgrade " + x.use + " worker-3 -o json",
			Args:    oneArg("the name of a node or a group", "`constellation status` lists both"), ValidArgsFunction: s.completeSkip,
			RunE: func(cmd *cobra.Command, args []string) error {
				return s.skip(cmd.Context(), args[0], x.skip, x.done, f)
			},
		}
		s.outputFlag(cmd, &f, "what to print: text, or json for one document")
		out = append(out, cmd)
	}
	return out
}

// skipAnswer is the answer of skip and retry.
type skipAnswer struct {
	Schema string `json:"schema"`
	engine.Holding
	// Changed is false if it was so before.
	Changed bool `json:"changed"`
}

func (s *session) skip(ctx context.Context, name string, skip bool, done string, f format) error {
	eng, _, _, err := s.engineOf()
	if err != nil {
		return err
	}
	ctx, stop := s.signals(ctx)
	defer stop()
	h, err := eng.Skip(ctx, name, skip)
	if err != nil && (engine.ExitCode(err) != engine.ExitNothing || f != asJSON) {
		return err
	}
	a := skipAnswer{Schema: engine.Schema, Holding: h, Changed: err == nil}
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
		done = "tried again now"
	case skip:
		done += "; `" + s.command("upgrade retry "+clean(a.Name)) + "` lets it go"
	}
	fmt.Fprintf(s.out, "%s %s is %s\n", a.Kind, clean(a.Name), done)
	return nil
}

// completeSkip offers the nodes and groups of the cluster.
func (s *session) completeSkip(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	eng, _, _, err := s.engineOf()
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	ctx, cancel := context.WithTimeout(cmd.Context(), 2*time.Second) // somebody waits at a prompt
	defer cancel()
	st, err := eng.Status(ctx)
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	var out []string
	for _, n := range st.Nodes {
		out = append(out, n.Name)
		if n.Group != "" && !slices.Contains(out, n.Group) {
			out = append(out, n.Group)
		}
	}
	slices.Sort(out)
	return out, cobra.ShellCompDirectiveNoFileComp
}

// rolloutAnswer is the answer of pause, resume and cancel.
type rolloutAnswer struct {
	Schema    string        `json:"schema"`
	Target    engine.Target `json:"target"`
	Paused    bool          `json:"paused"`
	Cancelled bool          `json:"cancelled"`
	// Changed is false if it was so before.
	Changed bool   `json:"changed"`
	Reason  string `json:"reason,omitempty"`
	Message string `json:"message,omitempty"`
}

func (s *session) changeRollout(ctx context.Context, c engine.RolloutChange, done string, f format) error {
	eng, _, _, err := s.engineOf()
	if err != nil {
		return err
	}
	ctx, stop := s.signals(ctx)
	defer stop()
	ro, err := eng.ChangeRollout(ctx, c)
	if err != nil && engine.ExitCode(err) != engine.ExitNothing {
		return err
	}
	a := rolloutAnswer{
		Schema: engine.Schema, Target: engine.Target{Image: ro.Target.ImageVersion, Kubernetes: ro.Target.Kubernetes},
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
	fmt.Fprintf(s.out, "the rollout to image %s and Kubernetes %s %s\n", clean(a.Target.Image), clean(a.Target.Kubernetes), done)
	fmt.Fprintf(s.out, "next  %s\n", s.command("watch"))
	return nil
}
