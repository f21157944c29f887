package engine

import (
	"context"
	"fmt"

	"constellation/engine/cluster"
)

// LocalData asks the cluster what is on the disks of its nodes and in no backup.
func (e *Engine) LocalData(ctx context.Context) (cluster.LocalData, error) {
	b, err := e.ws.Kubeconfig()
	if err != nil {
		return cluster.LocalData{}, err
	}
	i, err := e.inspect(ctx, b)
	if err != nil {
		return cluster.LocalData{}, fmt.Errorf("look for volumes on nodes: %w", err)
	}
	return i.LocalData(ctx)
}
