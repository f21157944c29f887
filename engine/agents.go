package engine

import (
	"context"
	"fmt"

	"constellation/engine/check"
	"constellation/engine/plan"
	"constellation/engine/words"
)

// agentsStep names the enrolment program, with which the operator begins on each node.
func (i *clusterRun) agentsStep() plan.Step {
	want := i.components
	return plan.Step{
		ID:    check.StepAgents,
		Title: "Install the release keys and the verifying agent on " + words.Count(len(i.enrols), "machine") + " in place",
		Effect: fmt.Sprintf("ConfigMap %s names the agent of the new image; the operator installs it on %s once, before it upgrades Kubernetes there",
			shortName(want.Name), words.And(check.NamesOf(i.enrols))),
		Details: []string{check.InGroups(i.enrols) + ": from then on they install only what a release builder vouches for"},
		Done: func(ctx context.Context) (bool, error) {
			return i.glance(ctx, func(ctx context.Context, k Cluster) (bool, error) {
				got, err := k.Components(ctx, want.Name)
				return err == nil && got.Serves(want), err
			})
		},
		Run: func(ctx context.Context, r *plan.Reporter) error {
			return i.inCluster(ctx, r, "name the verifying agent", func(ctx context.Context, k Cluster) error { return k.PublishComponents(ctx, want) })
		},
	}
}
