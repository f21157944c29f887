package gcp

import (
	"context"
	"fmt"
	"strings"

	"constellation/engine/cloud"
	"constellation/engine/component"
	"constellation/engine/plan"
	"constellation/engine/version"
)

// Console implements providers.Console for the user's computer. It changes nothing.
type Console struct{ cloud *Cloud }

// NewConsole returns the view of the console.
func NewConsole(c *Cloud) Console { return Console{c} }

// Describe returns what the machines belong to. Google Cloud has no addresses of the cluster.
func (c Console) Describe(ctx context.Context) (cloud.Info, error) {
	groups, err := c.cloud.Groups(ctx)
	if err != nil {
		return cloud.Info{}, err
	}
	if len(groups) == 0 {
		return cloud.Info{}, fmt.Errorf("find groups with %s=%s in %s: %w", LabelUID, c.cloud.uid, strings.Join(c.cloud.zones, ", "), cloud.ErrNotFound)
	}
	return cloud.Info{UID: c.cloud.uid, Name: c.cloud.project}, nil
}

// Groups returns the groups of the cluster.
func (c Console) Groups(ctx context.Context) ([]cloud.Group, error) { return c.cloud.Groups(ctx) }

// Machines returns the machines of the cluster. How far a machine has booted is not known.
func (c Console) Machines(ctx context.Context) ([]cloud.Machine, error) {
	all, err := c.cloud.Instances(ctx)
	out := make([]cloud.Machine, 0, len(all))
	for _, i := range all {
		m := cloud.Machine{Instance: i, GroupName: GroupName(i.Group)}
		switch i.State {
		case cloud.Creating:
			m.Stage = plan.NodeCreating
		case cloud.Failed, cloud.Stopped:
			m.Stage = plan.NodeFailed
		case cloud.Terminating, cloud.Terminated:
			m.Stage = plan.NodeGone
		}
		out = append(out, m)
	}
	return out, err
}

// Images returns the images of the project that have LabelVersion. Their measurements are not known.
func (c Console) Images(ctx context.Context) ([]cloud.Image, error) {
	var out []cloud.Image
	err := c.cloud.client.List(ctx, "list images of project "+c.cloud.project, func(token string) (string, error) {
		page, err := c.cloud.api.Images.List(c.cloud.project).Filter("labels." + LabelVersion + ":*").MaxResults(pageSize).PageToken(token).
			Fields("nextPageToken,items(name,labels,status)").Context(ctx).Do()
		if err != nil {
			return "", err
		}
		for _, i := range page.Items {
			v, err := version.Parse(strings.Replace(strings.Replace(i.Labels[LabelVersion], "-", ".", 1), "-", ".", 1))
			if err == nil && i.Status == "READY" {
				out = append(out, cloud.Image{Reference: "projects/" + c.cloud.project + "/global/images/" + i.Name, Version: v.String()})
			}
		}
		return page.NextPageToken, nil
	})
	return out, err
}

// Components fails: Google Cloud offers none, and those of the release are used.
func (c Console) Components(ctx context.Context, v version.Version) (component.Signed, error) {
	if err := ctx.Err(); err != nil {
		return component.Signed{}, err
	}
	return component.Signed{}, fmt.Errorf("components of Kubernetes %s: %w: Google Cloud offers none", v, cloud.ErrNotFound)
}
