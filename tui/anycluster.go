package tui

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"constellation/engine"
	"constellation/engine/cluster"
	"constellation/engine/plan"
	"constellation/engine/workspace"
	"constellation/tui/term"
	"constellation/tui/view"
)

// selectCluster returns the cluster that the flags of a verb select; nil means the workspace's.
// Without flags and without a workspace it is that of the current context, if current is set. In
// a workspace it refuses the address of another cluster.
func (s *session) selectCluster(verb string, a cluster.Access, current bool) (*cluster.Selected, error) {
	if err := impersonates(a); err != nil {
		return nil, err
	}
	ws, _, err := s.workspace()
	if err != nil {
		return nil, err
	}
	given := a.Given() || a.As != "" || a.RequestTimeout != 0
	inside := ws.Has(workspace.ConfigFile) || ws.Has(workspace.KubeconfigFile)
	if s.Clusters == nil || !given && (inside || !current || s.dir != ".") {
		return nil, nil
	}
	if ws.Has(workspace.KubeconfigFile) && a.Kubeconfig == "" && a.Context == "" && a.ClusterName == "" {
		a.Kubeconfig = ws.Path(workspace.KubeconfigFile) // the workspace's cluster, as another user
	}
	sel, err := s.Clusters.Select(a)
	if err != nil {
		if !given {
			return nil, nil // the verb's own error names the workspace
		}
		return nil, err
	}
	if ws.Has(workspace.ConfigFile) && ws.Has(workspace.KubeconfigFile) {
		if err := s.sameCluster(verb, ws, &sel); err != nil {
			return nil, err
		}
	}
	return &sel, nil
}

// sameCluster returns an error if a selected cluster is not that of the workspace.
func (s *session) sameCluster(verb string, ws *workspace.Workspace, sel *cluster.Selected) error {
	own, err := ws.Kubeconfig()
	if err != nil {
		return err
	}
	_, server, err := workspace.KubeconfigServer(own)
	if err != nil {
		return err
	}
	if server.Value == sel.Server {
		return nil
	}
	return &plan.Error{
		Op: fmt.Sprintf("%s context %q", verb, sel.Context), Exit: plan.ExitUsage,
		Err:    fmt.Errorf("it leads to %s, and the workspace %s to %s", sel.Server, filepath.Base(ws.Path(".")), server.Value),
		Remedy: "leave out the flags to use the workspace's cluster, or run the command in another directory",
	}
}

// sameUser returns an error if a selected user is not that of the workspace's kubeconfig.
func (s *session) sameUser(ws *workspace.Workspace, sel *cluster.Selected) error {
	own, err := s.Clusters.Select(cluster.Access{Kubeconfig: ws.Path(workspace.KubeconfigFile)})
	if err != nil || own.Identity == sel.Identity {
		return nil // a kubeconfig that cannot be read is reported by the check itself
	}
	return &plan.Error{
		Op: fmt.Sprintf("check context %q", sel.Context), Exit: plan.ExitUsage,
		Err:    fmt.Errorf("its user is not the one of %s, which a check in a workspace uses", workspace.KubeconfigFile),
		Remedy: "leave out the flags to check as the workspace's user, or run the command in another directory",
	}
}

// formatterOf formats commands for a selected cluster; nil is the workspace's.
func (s *session) formatterOf(a cluster.Access, sel *cluster.Selected) view.CommandFormatter {
	if sel == nil {
		return s.formatter()
	}
	sp := view.CommandFormatter{Program: s.Program, Context: a.Context}
	if a.Kubeconfig != "" {
		sp.Kubeconfig = a.Kubeconfig
		if path, err := filepath.Abs(a.Kubeconfig); err == nil {
			sp.Kubeconfig = path
		}
	}
	return sp
}

// printStatusOf prints the status of a cluster without a workspace.
func (s *session) printStatusOf(ctx context.Context, f format, a cluster.Access, sel *cluster.Selected) error {
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
		s.print(s.anyStatusText(&st, s.formatterOf(a, sel)))
	}
	if !st.Reachable {
		return &plan.Error{Op: fmt.Sprintf("get status of context %q", sel.Context), Err: errors.New(st.Problem), Remedy: st.Remedy}
	}
	return nil
}

// anyStatusText renders the status of a cluster without a workspace.
func (s *session) anyStatusText(st *engine.Status, sp view.CommandFormatter) []string {
	pg, w := s.page(), view.PrintedWidth
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

// backupFolder makes the folder for backups of a selected cluster and opens it as workspace: dir,
// or one with the name of the context.
func (s *session) backupFolder(sel *cluster.Selected, dir string) error {
	if dir == "" {
		dir = filepath.Join(s.dir, engine.FolderOf(sel.Context))
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return &plan.Error{Op: "create folder " + dir, Err: workspace.WithoutPath(err), Exit: plan.ExitUsage, Remedy: "name another one with --dir"}
	}
	s.dir = dir
	return nil
}
