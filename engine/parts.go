package engine

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"constellation/assets"
	"constellation/engine/cloud/providers"
	"constellation/engine/cluster"
	"constellation/engine/compat"
	"constellation/engine/plan"
	"constellation/engine/version"
	"constellation/engine/workspace"
)

// findingParts is the ID of the finding about third-party software that clusters in a cloud need.
const findingParts = "cloud-software"

// partCharts returns the charts of third-party software that the configuration switches on for its cloud. running returns
// the version of the API servers; it is called only for a part that follows them.
func (f *facts) partCharts(running func() (string, error)) ([]cluster.Chart, error) {
	from, err := providers.Known(f.state.Infrastructure.Provider)
	if err != nil || from.Parts == nil {
		return nil, err
	}
	op := "install the software of the cloud"
	parts, err := from.Parts(providers.ClusterOf{Config: f.section, State: f.state.Infrastructure.Section, PodCIDR: f.pods})
	if err != nil {
		return nil, &plan.Error{Op: op, Err: err, Exit: plan.ExitUsage, Remedy: "correct provider." + from.Name + " in " + workspace.ConfigFile}
	}
	if len(parts) == 0 {
		return nil, nil
	}
	images, err := assets.CloudImages()
	if err != nil {
		return nil, err
	}
	var out []cluster.Chart
	for _, p := range parts {
		c := cluster.Chart{Name: p.Chart, Namespace: p.Namespace, Values: deepCopy(p.Values), Needs: p.Needs}
		for _, value := range slices.Sorted(maps.Keys(p.Images)) {
			main := value == "image"
			image, err := f.partImage(images, p, p.Images[value], main, running)
			if err != nil {
				return nil, &plan.Error{Op: op, Err: err, Exit: plan.ExitBlocked, Remedy: plan.Remedy(err)}
			}
			if c.Values[value] = image.Image; main {
				c.Version = strings.TrimPrefix(image.Version, "v")
			}
		}
		if c.Files, err = assets.CloudChart(p.Chart, "v"+c.Version); err != nil {
			return nil, err
		}
		out = append(out, c)
	}
	return out, nil
}

// partImage returns an image of a part. Of several versions, the newest that fits.
func (f *facts) partImage(images []assets.CloudImage, p providers.Part, name string, main bool, running func() (string, error)) (out assets.CloudImage, err error) {
	var fits []assets.CloudImage
	for _, i := range images {
		if i.Name == name {
			fits = append(fits, i)
		}
	}
	if main && p.Own != "" {
		own := assets.CloudImage{Name: name, Image: p.Own}
		_, tag, _ := strings.Cut(p.Own[strings.LastIndexByte(p.Own, '/')+1:], ":")
		own.Version, _, _ = strings.Cut(tag, "@")
		major, _, _ := strings.Cut(strings.TrimPrefix(own.Version, "v"), ".")
		own.Kubernetes = "v1." + major
		fits = []assets.CloudImage{own}
	}
	if len(fits) == 0 {
		return out, fmt.Errorf("the program has no image %s", name)
	}
	if !main || !p.Follows {
		return fits[len(fits)-1], nil
	}
	text, err := running()
	if err != nil {
		return out, err
	}
	now, err := version.Parse(text)
	if err != nil {
		return out, fmt.Errorf("read the version of the API servers: %w", err)
	}
	var built []version.Version
	for _, i := range fits {
		v, err := version.Parse(i.Kubernetes + ".0")
		if err != nil {
			return out, fmt.Errorf("read the version of %s %s: %w", name, i.Version, err)
		}
		built = append(built, v)
	}
	best, problem := compat.ControllerManager(built, now, f.kubernetes)
	if problem != "" {
		return out, &plan.Error{
			Err: fmt.Errorf("no %s fits: %s", name, problem), Exit: plan.ExitBlocked,
			Remedy: "name an image with its digest in cloudControllerManagerImage, or go to another version of Kubernetes",
		}
	}
	return fits[slices.IndexFunc(built, best.Equal)], nil
}

// partsFinding returns what stands against the third-party software of the cloud; nil: nothing.
func (i *clusterRun) partsFinding(running func() (string, error)) *plan.Finding {
	if _, err := i.partCharts(running); err != nil {
		var e *plan.Error
		detail := err.Error()
		if errors.As(err, &e) && e.Err != nil {
			detail = e.Err.Error()
		}
		return &plan.Finding{
			ID: findingParts, Severity: plan.Block, Source: "charts", Field: "provider." + i.state.Infrastructure.Provider, Title: "the software of the cloud cannot be installed", Detail: detail, Remedy: plan.Remedy(err),
		}
	}
	return nil
}

// runningVersion returns what asks a cluster for the version of its API servers.
func runningVersion(ctx context.Context, k Cluster) func() (string, error) {
	return func() (string, error) { return k.Version(ctx) }
}
