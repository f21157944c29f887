package tui

import (
	"cmp"
	"errors"
	"fmt"

	"constellation/engine/cluster"
	"constellation/engine/plan"
	"constellation/engine/preferences"
	"constellation/engine/workspace"
	"constellation/tui/term"
)

// guard is what preferences say about the cluster of a verb.
type guard struct {
	prefs preferences.Preferences
	// context and server are those of the kubeconfig; empty if it cannot be read.
	context, server string
	// name is the name of the workspace's cluster, or else the context.
	name string
}

// guards reports whether the cluster is guarded if it has this name.
func (g *guard) guards(name string) bool {
	return g.prefs.Guarded(name, g.server) || g.context != "" && g.prefs.Guarded(g.context, g.server)
}

// guardOf returns the guard of the workspace's cluster, or of the one that an access selects. The
// error is about the preferences.
func guardOf(s *session, a cluster.Access) (*guard, error) {
	prefs, err := preferences.Read(s.Env)
	if err != nil {
		return nil, err
	}
	g := &guard{prefs: prefs}
	if len(prefs.Guards) == 0 {
		return g, nil
	}
	ws, _, err := s.workspace()
	if err != nil {
		return nil, err
	}
	if !a.Given() {
		if c, err := workspace.PartOfConfig(ws, "name"); err == nil {
			g.name = c.Name
		}
		if st, err := ws.State(); err == nil {
			g.name = cmp.Or(g.name, st.Infrastructure.Name)
		}
	}
	if !a.Given() && ws.Has(workspace.KubeconfigFile) {
		a.Kubeconfig = ws.Path(workspace.KubeconfigFile)
	}
	switch {
	case s.Clusters != nil && a.Given():
		if sel, err := s.Clusters.Select(a); err == nil { // the verb itself reports the error
			g.context, g.server = sel.Context, sel.Server
		}
	case s.Clusters == nil: // a program without Kubernetes clients
		g.context, g.server = ofKubeconfig(ws)
	}
	g.name = cmp.Or(g.name, g.context)
	return g, nil
}

// ofKubeconfig returns the context and the server of the workspace's kubeconfig; empty if it cannot
// be read.
func ofKubeconfig(ws *workspace.Workspace) (context, server string) {
	b, err := ws.Kubeconfig()
	if err != nil {
		return "", ""
	}
	doc, at, err := workspace.KubeconfigServer(b)
	var current struct {
		Context string `yaml:"current-context"`
	}
	if err != nil || doc.Decode(&current) != nil {
		return "", ""
	}
	return current.Context, at.Value
}

// unlock prompts for the name of a guarded cluster before a verb changes it. Scripts are not
// asked: a verb without a terminal, with --non-interactive, or with -o json.
func unlock(s *session, a cluster.Access, f format, nonInteractive bool) error {
	if f != text || nonInteractive || !s.asks() {
		return nil
	}
	g, err := guardOf(s, a)
	if err != nil {
		return err
	}
	return g.unlock(s)
}

// unlockNamed is unlock for a cluster whose name is all that is known: it has no workspace here.
func unlockNamed(s *session, name string, f format, nonInteractive bool) error {
	if f != text || nonInteractive || !s.asks() {
		return nil
	}
	prefs, err := preferences.Read(s.Env)
	if err != nil {
		return err
	}
	return (&guard{prefs: prefs, name: name}).unlock(s)
}

// unlock prompts for the name of the cluster if it is guarded.
func (g *guard) unlock(s *session) error {
	name := term.Clean(g.name)
	if name == "" || !g.guards(g.name) {
		return nil
	}
	if s.prompt().typed(fmt.Sprintf("This cluster is guarded by your preferences. Type %s to change it: ", name), name) {
		return nil
	}
	return &plan.Error{Op: "change cluster " + name, Err: errors.New("it is guarded, and its name was not typed; nothing was changed"), Exit: plan.ExitUnacknowledged}
}
