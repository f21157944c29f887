package check

import (
	"context"
	"errors"

	"constellation/assets"
	"constellation/engine/cloud"
	"constellation/engine/plan"
	"constellation/engine/workspace"
)

// ForeseeCharts fetches the charts of the hop and compares them with the installed ones.
func (c *Run) ForeseeCharts(ctx context.Context) error {
	if c.Hop == nil || c.Request.NoPreflight || c.Prepares && !c.Applies {
		return nil
	}
	rel, err := c.Known.Release(ctx, c.Hop.Planned().Services)
	if err != nil {
		c.Log.Debug("release not read", "release", c.Hop.To.Release, "err", err)
		return ctx.Err()
	}
	state := c.State
	if c.BringsEncryption(c, rel) {
		next := *state
		next.ClusterValues.EncryptionPending = true // a step before the charts does that
		state = &next
		c.Out.Notes = append(c.Out.Notes, "This upgrade encrypts the Secrets of the cluster in etcd. `encryptSecrets: false` in the configuration prevents that.")
	}
	charts := c.Charts(c.Config, state, rel, c.location, c.ControlPlanes())
	changes, err := c.LookAtCharts(ctx, charts)
	if err == nil && changes != nil {
		c.Out.Changes.ChartChanges, c.Out.Changes.Charts = changes, nil
		for _, x := range changes {
			c.Out.Changes.Charts = append(c.Out.Changes.Charts, x.String())
		}
	}
	c.Fetched = charts.Fetched()
	return ctx.Err()
}

// ControlPlanes returns the number of control planes, without those that are being replaced.
func (c *Run) ControlPlanes() int {
	n := 0
	for _, node := range c.Now.Nodes {
		if node.Role == string(cloud.ControlPlane) && node.Heir == "" {
			n++
		}
	}
	return n
}

// LookAtCharts records obstacles in the charts of a run and returns their changes; nil if the
// changes are unknown.
func (c *Run) LookAtCharts(ctx context.Context, charts Charts) ([]plan.ChartChange, error) {
	if blocked := charts.Fetch(ctx); len(blocked) > 0 {
		c.Out.Findings = append(c.Out.Findings, blocked...)
		return nil, workspace.ErrAbsent
	}
	changes, found, err := charts.Compare(ctx)
	if err != nil {
		if !errors.Is(err, assets.ErrUnknownRelease) { // only the program of that release contains its charts
			c.Log.Debug("charts not compared", "err", err)
		}
		return nil, err
	}
	c.Out.Findings = append(c.Out.Findings, found...)
	if changes == nil {
		changes = []plan.ChartChange{}
	}
	return changes, nil
}
