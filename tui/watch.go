package tui

import (
	"cmp"
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"constellation/engine"
	"constellation/engine/cluster"
	"constellation/engine/plan"
	"constellation/engine/rollout"
	"constellation/tui/console"
	"constellation/tui/term"
	"constellation/tui/view"
)

// watchOptions are the flags of `watch`.
type watchOptions struct {
	engine.WatchRequest
	access         cluster.Access
	replay, filter string
	nonInteractive bool
	out            format
}

func watchCommand(s *session) *cobra.Command {
	var o watchOptions
	cmd := &cobra.Command{
		Use:   "watch",
		Short: "Watch a rollout live, or replay a recorded one",
		Long: `Show the state of every node during a rollout: first all nodes, then each change. Watch needs
only a kubeconfig with read access. Any number of users can start and leave it at any time,
from any computer, without an effect on the rollout.

While the API server is unreachable, watch shows the last observed state with its age and
reconnects. Without a terminal it prints one line per change, as upgrade apply does, until
all nodes are at the target and no Plan of upgrade.cattle.io has a node in progress.

Without a workspace, or with --kubeconfig or --context, it watches any cluster: nodes,
versions, cordons and Plans. While a drain is stuck it names what waits on what, the command
that frees it, and its risk. Such a watch ends with --once or an interrupt.

--replay plays a recorded run or the output of -o json, without a cluster. It takes a file,
or a run ID or last (see history). Append @TIME to start at a time, or @+5m to start five
minutes after the beginning.`,
		Example: `  constellation watch                                    # on a terminal: the console
  constellation watch --once -o json | jq -c 'select(.kind == "node")'
  constellation watch --kubeconfig ~/.kube/config        # read-only, from any computer
  constellation watch --context prod-eu --once           # any cluster, no workspace
  constellation watch --once --filter 'state:drain age>5m'
  constellation watch --replay last
  constellation watch --replay events.jsonl@14:02:11`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if _, err := view.ParseFilter(o.filter); err != nil {
				return &plan.Error{Op: "read --filter", Err: err, Exit: plan.ExitUsage, Remedy: "write a filter such as 'state:drain group:workers age>5m text'"}
			}
			if o.replay != "" {
				return runReplay(cmd.Context(), s, o)
			}
			sel, err := selectCluster(s, "watch", o.access, true)
			if err != nil {
				return err
			}
			o.Cluster, o.Kubeconfig = sel, o.access.Kubeconfig
			if o.out == text && !o.Once && s.interactive(o.nonInteractive) {
				return showConsole(cmd.Context(), s, consoleOptions{watch: &o})
			}
			return runWatch(cmd.Context(), s, o)
		},
	}
	fl := cmd.Flags()
	fl.BoolVar(&o.Once, "once", false, "print the current state and exit")
	fl.StringVar(&o.replay, "replay", "", "replay a `record`: FILE[@TIME] or RUN[@TIME]")
	fl.StringVar(&o.filter, "filter", "", "show only matching machines: `terms` such as state:drain group:workers age>5m")
	accessFlags(s, cmd, &o.access)
	fl.BoolVar(&o.nonInteractive, "non-interactive", false, "print instead of opening the console")
	outputFlag(cmd, &o.out, "output format: text, or json for one event per line")
	_ = cmd.RegisterFlagCompletionFunc("replay", completeRuns(s))
	_ = cmd.RegisterFlagCompletionFunc("filter", fixed("state:drain", "state:failed", "state:outdated", "age>5m", "try>1"))
	for _, live := range []string{"kubeconfig", "context"} {
		cmd.MarkFlagsMutuallyExclusive("replay", live)
	}
	return cmd
}

// runWatch prints a live rollout as lines, or with --once its current state.
func runWatch(ctx context.Context, s *session, o watchOptions) error {
	page := o.Once && o.out == text
	out := filtered(s, o)
	defer out.close()
	eng, _, _, err := s.engineOf()
	if err != nil {
		return unplanned(s, out, o.out, err)
	}
	ctx, stop := s.signals(ctx)
	defer stop()
	began := false
	b := &rollout.Board{}
	err = eng.Watch(ctx, o.WatchRequest, func(ev plan.Event) {
		began = true
		if page {
			if ofWatch(ev) {
				s.remark("%s", term.Clean(ev.Text))
			}
			b.Apply(ev)
			return
		}
		out.event(ev)
	})
	switch {
	case err != nil && !began:
		return unplanned(s, out, o.out, err)
	case page && began:
		s.print(boardText(s.page(), s.answerWidth(), b, o, false, s.Now(), eng.APIHealth()))
	}
	return err
}

// ofWatch reports whether a watch itself logged ev: which file the context is from, or what the
// output lacks in a cluster of others.
func ofWatch(ev plan.Event) bool {
	return ev.Kind == plan.KindLog && ev.Source == string(plan.VerbWatch)
}

// runReplay plays a record: in the console on a terminal, else as lines.
func runReplay(ctx context.Context, s *session, o watchOptions) error {
	find := func(run string) (string, error) {
		eng, _, _, err := s.engineOf()
		if err != nil {
			return "", err
		}
		return eng.Record(run)
	}
	live := s.liveLine()
	r, err := console.ReadRecord(o.replay, find, live.Set)
	live.Clear()
	if err != nil {
		return err
	}
	for i, bad := range r.Bad {
		if i == 5 {
			s.remark("%s: %d more invalid lines skipped", term.Clean(r.Path), len(r.Bad)-i)
			break
		}
		s.remark("%s, %s; line skipped", term.Clean(r.Path), bad)
	}
	if r.Note != "" {
		s.remark("%s: %s", term.Clean(r.Path), r.Note)
	}
	switch {
	case o.out == text && !o.Once && s.interactive(o.nonInteractive):
		return showConsole(ctx, s, consoleOptions{watch: &o, replay: r})
	case o.Once && o.out == text:
		b, at := &rollout.Board{}, r.Events[len(r.Events)-1].Time
		if !r.At.IsZero() {
			at = r.At
		}
		for _, ev := range r.Events {
			if ev.Time.After(at) {
				break
			}
			b.Apply(ev)
		}
		s.print(boardText(s.page(), s.answerWidth(), b, o, true, at, engine.APIHealth{}))
		return nil
	}
	out := filtered(s, o)
	defer out.close()
	ctx, stop := s.signals(ctx)
	defer stop()
	for _, ev := range r.Events {
		if ctx.Err() != nil {
			break
		}
		// hello and plan are printed even if the replay starts after them.
		if !ev.Time.Before(r.At) || ev.Kind == plan.KindHello || ev.Kind == plan.KindPlan {
			out.event(ev)
		} else if f, ok := out.(*sieve); ok {
			f.pass(ev)
		}
	}
	return nil
}

// filtered returns the printer for events that match the filter.
func filtered(s *session, o watchOptions) sink {
	var out sink
	if o.out == asJSON {
		out = jsonPrinter{s.out}
	} else {
		p := newPlainPrinter(s.out, nil, s.Now)
		p.sp = s.formatter()
		if o.replay == "" {
			p.first = "waiting for the API server to answer"
		}
		out = p
	}
	f, err := view.ParseFilter(o.filter)
	if err != nil || len(f.Terms) == 0 { // the command has validated the filter
		return out
	}
	return &sieve{sink: out, f: f}
}

// sieve passes on the nodes and log lines that match a filter, and all other events. It also passes
// on what a watch itself logs.
type sieve struct {
	sink
	f view.Filter
	b rollout.Board
}

// pass records an event before the start of a replay without printing it.
func (s *sieve) pass(ev plan.Event) {
	if ev.Kind == plan.KindNode {
		s.b.Apply(ev)
	}
}

func (s *sieve) event(ev plan.Event) {
	switch ev.Kind {
	case plan.KindNode:
		s.b.Apply(ev)
		if n := s.b.Node(ev.Node); n == nil || !s.f.Node(n, ev.Time) {
			return
		}
	case plan.KindLog:
		if ofWatch(ev) {
			break
		}
		if x := (rollout.BoardLine{Time: ev.Time, Source: ev.Source, Node: ev.Node, Level: ev.Level, Text: ev.Text}); !s.f.Line(&x) {
			return
		}
	}
	s.sink.event(ev)
}

// boardText prints the state of a rollout, live or recorded.
func boardText(pg view.Page, w int, b *rollout.Board, o watchOptions, recorded bool, at time.Time, pulse engine.APIHealth) []string {
	pg.Now = at
	what := "as of " + at.UTC().Format("2006-01-02 15:04:05Z")
	if recorded {
		what = "recorded, " + what
	}
	lines := []string{fmt.Sprintf("cluster %s  to %s  %s", cmp.Or(term.Clean(b.Cluster), "(unknown)"), cmp.Or(term.AsciiIf(pg.Ascii, view.TargetText(pg, b)), "(no target)"), what)}
	if eta := view.ETA(pg, b, at); eta != "" {
		lines[0] += "  " + eta
	}
	f, err := view.ParseFilter(o.filter)
	list := view.Flight{List: view.MachinesOf(b, f, view.SortSlowest, at), Filter: o.filter, Err: err}
	lines = append(lines, view.Pipeline(pg, b, w, 30)...)
	if len(b.Groups()) > 0 {
		lines = append(lines, view.GroupRows(pg, b, w, 100)...)
	}
	if len(b.Plans) > 0 {
		lines = append(lines, view.NodePlanRows(pg, b, w, 100)...)
	}
	lines = append(lines, view.FlightView(pg, b, list, w, 60)...)
	reason, remedy := view.BoardReason(pg, b)
	lines = append(lines, "", reason)
	if remedy != "" {
		lines = append(lines, "To do: "+pg.Commands.Text(remedy))
	}
	api := ""
	if !recorded {
		api = view.APIStatus(pg, pulse)
	}
	return append(lines, view.WatchSafety(pg, b, w, api, time.Time{}))
}

func historyCommand(s *session) *cobra.Command {
	var f format
	cmd := &cobra.Command{
		Use:   "history [RUN]",
		Short: "List past runs, or show one in detail",
		Long: `List the recorded runs of this workspace, newest first: verb, target, user, duration and
result. With a run ID, a unique prefix of it, or "last", show that run in detail: plan,
accepted warnings, steps, time of nodes in each state, and the longest waits.

watch --replay plays the record of a run.`,
		Example: `  constellation history
  constellation history last
  constellation history upgrade-20261121070501 -o json
  constellation watch --replay last`,
		Args: cobra.MaximumNArgs(1),
		ValidArgsFunction: func(cmd *cobra.Command, args []string, word string) ([]string, cobra.ShellCompDirective) {
			if len(args) > 0 {
				return nil, cobra.ShellCompDirectiveNoFileComp
			}
			list, _ := completeRuns(s)(cmd, args, word)
			return list, cobra.ShellCompDirectiveNoFileComp
		},
		RunE: func(_ *cobra.Command, args []string) error {
			eng, _, _, err := s.engineOf()
			if err != nil {
				return err
			}
			if len(args) == 0 {
				return listRuns(s, eng, f)
			}
			run, err := eng.PastRun(args[0])
			if err != nil {
				return err
			}
			if f == asJSON {
				return document(s.out, struct {
					Schema string `json:"schema"`
					rollout.PastRun
				}{plan.Schema, run})
			}
			s.print(pastRunText(s.page(), s.answerWidth(), &run))
			return nil
		},
	}
	outputFlag(cmd, &f, "output format: text, or json for one document")
	return cmd
}

func listRuns(s *session, eng Engine, f format) error {
	runs, err := eng.Runs()
	if err != nil {
		return err
	}
	if f == asJSON {
		return document(s.out, struct {
			Schema string            `json:"schema"`
			Runs   []plan.RunSummary `json:"runs"`
		}{plan.Schema, append([]plan.RunSummary{}, runs...)})
	}
	if len(runs) == 0 {
		fmt.Fprintf(s.out, "no recorded runs in this workspace\n")
		return nil
	}
	lines := []string{fmt.Sprintf("%-42s %-20s %8s  %-11s %4s  %s", "run", "began", "took", "end", "exit", "by, to")}
	for _, r := range runs {
		took := "-"
		if !r.Ended.IsZero() {
			took = term.Duration(r.Ended.Sub(r.Started))
		}
		what := strings.TrimSpace(term.Clean(r.By) + "  " + term.Clean(cmp.Or(r.Node, r.To.String())))
		exit := fmt.Sprint(r.Exit)
		if r.Status == plan.StateRunning {
			exit = ""
		}
		lines = append(lines, fmt.Sprintf("%-42s %-20s %8s  %-11s %4s  %s", term.Clean(r.ID), r.Started.UTC().Format("2006-01-02 15:04:05Z"), took, term.Clean(r.Status), exit, what))
	}
	s.print(append(lines, "", "next  "+s.command("history "+term.Clean(runs[0].ID))))
	return nil
}

// pastRunText renders a run in detail.
func pastRunText(pg view.Page, w int, r *rollout.PastRun) []string {
	lines := []string{
		fmt.Sprintf("run       %s  (%s of cluster %s)", term.Clean(r.ID), r.Verb, cmp.Or(term.Clean(r.Cluster), "(unknown)")),
		fmt.Sprintf("by        %s, with %s", cmp.Or(term.Clean(r.By), "(unknown user)"), cmp.Or(term.Clean(r.Tool), "(unknown program)")),
		fmt.Sprintf("began     %s, took %s", r.Started.UTC().Format("2006-01-02 15:04:05Z"), term.Duration(time.Duration(r.TookMS)*time.Millisecond)),
		fmt.Sprintf("end       %s, exit %d  %s", term.Clean(r.Status), r.Exit, term.Clean(r.Text)),
	}
	from, to := term.Clean(r.From.String()), term.Clean(r.To.String())
	if from != "" {
		lines = append(lines, "from      "+from)
	}
	if to != "" {
		lines = append(lines, "to        "+to)
	}
	if r.Replaced+r.Failed+r.Nodes > 0 {
		lines = append(lines, fmt.Sprintf("machines  %d seen, %d nodes reached the target, %d failed", r.Nodes, r.Replaced, r.Failed))
	}
	if r.Resume != "" {
		lines = append(lines, "resume    "+pg.Commands.Line(term.Clean(r.Resume)))
	}
	lines = append(lines, pg.Rule(w, "Steps", ""))
	for _, st := range r.Steps {
		took := ""
		if st.TookMS > 0 {
			took = term.Duration(time.Duration(st.TookMS) * time.Millisecond)
		}
		what := term.Clean(st.Text)
		if what == "" {
			what = term.Clean(st.Title)
		}
		lines = append(lines, fmt.Sprintf("  %-18s %-9s %8s  %s", term.Clean(st.ID), cmp.Or(term.Clean(st.State), "pending"), took, what))
	}
	lines = append(lines, pg.Rule(w, "Accepted", ""))
	if len(r.Accepted) == 0 {
		lines = append(lines, "  no warnings")
	}
	for _, f := range r.Accepted {
		by := "with the plan"
		if f.Named {
			by = "by name"
		}
		lines = append(lines, fmt.Sprintf("  %-26s %-14s %s", term.Clean(f.ID), by, term.Clean(f.Title)))
	}
	if len(r.Stages) > 0 {
		lines = append(lines, pg.Rule(w, "Time in each state", ""), fmt.Sprintf("  %-12s %8s %8s %8s", "state", "machines", "p50", "p95"))
		for _, st := range r.Stages {
			lines = append(lines, fmt.Sprintf("  %-12s %8d %8s %8s", term.Clean(st.State), st.Machines, term.Duration(time.Duration(st.P50MS)*time.Millisecond), term.Duration(time.Duration(st.P95MS)*time.Millisecond)))
		}
	}
	if len(r.Waits) > 0 {
		lines = append(lines, pg.Rule(w, "Longest waits", ""))
		for _, x := range r.Waits {
			lines = append(lines, fmt.Sprintf("  %8s  %s  %s", term.Duration(time.Duration(x.TookMS)*time.Millisecond), x.Since.UTC().Format("15:04:05Z"), term.Clean(x.Text)))
		}
	}
	for _, b := range r.Bad {
		lines = append(lines, "  invalid record: "+term.Clean(b))
	}
	return append(lines, "", "replay  "+pg.Commands.Command("watch --replay "+view.QuoteArg(term.Clean(r.ID))))
}
