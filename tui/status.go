package tui

import (
	"cmp"
	"context"
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"constellation/engine"
	"constellation/engine/cluster"
	"constellation/engine/plan"
	"constellation/tui/term"
	"constellation/tui/view"
)

func statusCommand(s *session) *cobra.Command {
	var (
		out    format
		access cluster.Access
	)
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show versions, nodes and health of the cluster",
		Long: `Show the current state of the cluster: current and target versions, nodes, machines that
have not joined yet, services and health problems.

Without a workspace, or with --kubeconfig or --context, it shows any cluster: versions,
nodes, cordons, Plans, and what keeps a drain stuck.

It changes nothing. The exit code is 1 if the API server does not answer.`,
		Example: `  constellation status
  constellation status --context prod-eu
  constellation status -o json | jq '.nodes[].name'`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			sel, err := selectCluster(s, "get status of", access, true)
			if err != nil {
				return err
			}
			if ws, _, err := s.workspace(); err == nil && ws.Unmanaged() && !access.Given() && access.As == "" {
				return printStatus(cmd.Context(), s, out)
			}
			if sel != nil {
				return printStatusOf(cmd.Context(), s, out, access, sel)
			}
			return printStatus(cmd.Context(), s, out)
		},
	}
	accessFlags(s, cmd, &access)
	outputFlag(cmd, &out, "output format: text, or json for one document")
	return cmd
}

// printStatus runs `status`.
func printStatus(ctx context.Context, s *session, f format) error {
	eng, _, _, err := s.engineOf()
	if err != nil {
		return err
	}
	ctx, stop := s.signals(ctx)
	defer stop()
	st, err := eng.Status(ctx)
	if err != nil {
		return err
	}
	if f == asJSON {
		if err := document(s.out, st); err != nil {
			return err
		}
	} else if st.Server != "" { // adopted
		s.print(anyStatusText(s.page(), &st, s.formatter()))
	} else {
		s.print(statusText(s.page(), &st))
	}
	if st.Stage == engine.StageCluster && !st.Reachable {
		return &plan.Error{Op: "get status of cluster " + st.Cluster, Err: errors.New(cmp.Or(st.Problem, "the API server does not answer")), Remedy: st.Remedy}
	}
	return nil
}

// statusText renders the output of status.
func statusText(pg view.Page, st *engine.Status) []string {
	w := view.PrintedWidth
	lines := []string{pg.Row(w).Add(term.Plain, "cluster "+cmp.Or(term.Clean(st.Cluster), "(none)")+"   "+stageWord(st.Stage)+view.Marked(st.Simulated, st.NotAttested, "   ")).String()}
	lines = append(lines, view.ClusterSummary(pg, w, st, nil)...)
	lines = append(lines, view.Findings(pg, w, st.Health, len(st.Health))...)
	lines = append(lines, view.NodeRows(pg, w, len(st.Nodes)+len(st.Machines)+2, st, 0)...)
	if len(st.Services) > 0 {
		lines = append(lines, pg.Rule(w, "Services", ""))
		for _, v := range st.Services {
			sign, sty := pg.OK, term.Good
			if v.Ready < v.Wanted {
				sign, sty = pg.Warn, term.Caution
			}
			lines = append(lines, pg.Row(w).Add(term.Plain, " ").Add(sty, sign).Add(term.Plain, " ").Col(term.Plain, term.Clean(v.Name), 30).
				Col(term.Plain, fmt.Sprintf("%d/%d", v.Ready, v.Wanted), 7).Col(term.Plain, term.Clean(v.Version), 16).Add(term.Faint, term.Clean(v.Message)).String())
		}
	}
	return lines
}

// stageWord describes the stage of a workspace.
func stageWord(s engine.Stage) string {
	switch s {
	case engine.StageEmpty:
		return "not configured"
	case engine.StageConfigured:
		return "configured, no machines"
	case engine.StageReady:
		return "machines started, no cluster"
	case engine.StagePartial:
		return "init incomplete"
	case engine.StageCluster:
		return "initialised"
	}
	return string(s)
}

// printStatusOf prints the status of a cluster without a workspace.
func printStatusOf(ctx context.Context, s *session, f format, a cluster.Access, sel *cluster.Selected) error {
	eng, _, _, err := s.engineOf()
	if err != nil {
		return err
	}
	ctx, stop := s.signals(ctx)
	defer stop()
	st, err := eng.StatusOf(ctx, *sel)
	if err != nil {
		return err
	}
	if f == asJSON {
		if err := document(s.out, st); err != nil {
			return err
		}
	} else {
		s.print(anyStatusText(s.page(), &st, formatterOf(s, a, sel)))
	}
	if !st.Reachable {
		return &plan.Error{Op: fmt.Sprintf("get status of context %q", sel.Context), Err: errors.New(st.Problem), Remedy: st.Remedy}
	}
	return nil
}

// anyStatusText renders the status of a cluster without a workspace.
func anyStatusText(pg view.Page, st *engine.Status, sp view.CommandFormatter) []string {
	w := view.PrintedWidth
	pg.Commands = sp
	lines := []string{
		"cluster " + term.Clean(st.Cluster) + " (" + term.Clean(st.Server) + ")",
		fmt.Sprintf("Kubernetes %s, %d of %d nodes ready, %d cordoned", cmp.Or(term.Clean(st.APIServer), "unknown"), st.Counts["ready"], st.Counts["nodes"], st.Counts["cordoned"]),
	}
	for _, n := range st.Notes {
		lines = append(lines, term.Wrap(term.Clean(n), w)...)
	}
	lines = append(lines, view.Findings(pg, w, st.Health, len(st.Health))...)
	lines = append(lines, view.NodeRows(pg, w, len(st.Nodes)+2, st, 0)...)
	for i, p := range st.Plans {
		if i == 0 {
			lines = append(lines, pg.Rule(w, "Plans", ""))
		}
		lines = append(lines, pg.Row(w).Pad(2).Col(term.Plain, term.Clean(p.Name), 34).Col(term.Plain, term.Clean(p.State), 12).Col(term.Plain, term.Clean(p.Version), 16).Add(term.Faint, term.Clean(p.Text)).String())
	}
	return lines
}

// printHome prints an overview of the workspace and the next commands.
func printHome(ctx context.Context, s *session) error {
	eng, _, _, err := s.engineOf()
	if err != nil {
		return err
	}
	ctx, stop := s.signals(ctx)
	defer stop()
	h, err := eng.Home(ctx)
	if err != nil {
		return err
	}
	pg := s.page()
	fmt.Fprintf(s.out, "workspace %s\ncluster   %s, %s\n", term.Clean(h.Dir), cmp.Or(term.Clean(h.Cluster), "(none)"), stageWord(h.Stage)+view.Marked(h.Simulated, h.NotAttested, ", "))
	s.print(view.Findings(pg, view.PrintedWidth, h.Problems, len(h.Problems)))
	s.print(view.Recent(pg, view.PrintedWidth, 6, &h))
	for _, n := range h.Next {
		line := "next      " + s.formatter().Line(term.Clean(n.Command))
		if t := term.Clean(n.Title); t != "" {
			line += "   # " + t
		}
		fmt.Fprintln(s.out, line)
	}
	return nil
}
