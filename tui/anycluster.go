package tui

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"constellation/engine"
	"constellation/engine/adopt"
	"constellation/engine/cluster"
	"constellation/engine/plan"
	"constellation/engine/workspace"
	"constellation/tui/view"
)

// selectCluster returns the cluster that the flags of a verb select; nil means the workspace's.
// Without flags and without a workspace it is that of the current context, if current is set. In
// a workspace it refuses the address of another cluster.
func selectCluster(s *session, verb string, a cluster.Access, current bool) (*cluster.Selected, error) {
	if err := impersonates(a); err != nil {
		return nil, err
	}
	ws, _, err := s.workspace()
	if err != nil {
		return nil, err
	}
	given := a.Given() || a.As != "" || a.RequestTimeout != 0
	inside := ws.Has(workspace.ConfigFile) || ws.Has(workspace.KubeconfigFile)
	if s.Clusters != nil && !given && verb != backUp {
		if sel, err := adoptedCluster(s, ws); sel != nil || err != nil {
			return sel, err
		}
	}
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
		if err := sameCluster(verb, ws, &sel); err != nil {
			return nil, err
		}
	}
	return &sel, nil
}

// backUp is the verb of a backup, which uses the kubeconfig of its workspace by itself.
const backUp = "back up"

// adoptedCluster returns the cluster of a workspace that `adopt` wrote; nil if it is another
// workspace.
func adoptedCluster(s *session, ws *workspace.Workspace) (*cluster.Selected, error) {
	if !ws.Unmanaged() {
		return nil, nil
	}
	sel, err := s.Clusters.Select(cluster.Access{Kubeconfig: ws.Path(workspace.KubeconfigFile)})
	if err != nil {
		return nil, err
	}
	sel.Note = adopt.Upgrade
	return &sel, nil
}

// sameCluster returns an error if a selected cluster is not that of the workspace.
func sameCluster(verb string, ws *workspace.Workspace, sel *cluster.Selected) error {
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
func sameUser(known Clusters, ws *workspace.Workspace, sel *cluster.Selected) error {
	own, err := known.Select(cluster.Access{Kubeconfig: ws.Path(workspace.KubeconfigFile)})
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
func formatterOf(s *session, a cluster.Access, sel *cluster.Selected) view.CommandFormatter {
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

// backupFolder makes the folder for backups of a selected cluster and opens it as workspace: dir,
// or one with the name of the context.
func backupFolder(s *session, sel *cluster.Selected, dir string) error {
	if dir == "" {
		dir = filepath.Join(s.dir, engine.FolderOf(sel.Context))
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return &plan.Error{Op: "create folder " + dir, Err: workspace.WithoutPath(err), Exit: plan.ExitUsage, Remedy: "name another one with --dir"}
	}
	s.dir = dir
	return nil
}

// ownCluster refuses an access that leads elsewhere than a workspace.
func ownCluster(known Clusters, ws *workspace.Workspace, a cluster.Access) error {
	if a.User != "" || a.As != "" || a.RequestTimeout != 0 {
		return &plan.Error{
			Op: "read flags", Err: errors.New("--user, --as and --request-timeout do not apply in a workspace: its own kubeconfig is used"), Exit: plan.ExitUsage,
			Remedy: "run the command in another directory, with --kubeconfig",
		}
	}
	if !a.Given() {
		return nil
	}
	sel, err := known.Select(a)
	if err != nil {
		return err
	}
	if err := sameCluster("check", ws, &sel); err != nil {
		return err
	}
	return sameUser(known, ws, &sel)
}
