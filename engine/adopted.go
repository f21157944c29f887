package engine

import (
	"context"

	"constellation/engine/adopt"
	"constellation/engine/cluster"
	"constellation/engine/workspace"
)

// statusAdopted describes the cluster of a workspace that `adopt` wrote.
func (e *Engine) statusAdopted(ctx context.Context, c *workspace.Config) (Status, error) {
	b, err := e.ws.Kubeconfig()
	if err != nil {
		return Status{}, err
	}
	doc, server, err := workspace.KubeconfigServer(b)
	var current struct {
		Context string `yaml:"current-context"`
	}
	if err == nil {
		err = doc.Decode(&current)
	}
	if err != nil {
		return Status{}, e.ws.BadKubeconfig(err)
	}
	st, err := e.StatusOf(ctx, cluster.Selected{
		Context: current.Context, Server: server.Value, Kubeconfig: b, Note: adopt.Upgrade,
		Access: cluster.Access{Kubeconfig: e.ws.Path(workspace.KubeconfigFile)},
	})
	st.Cluster, st.Provider = c.Name, c.Provider.Name
	return st, err
}
