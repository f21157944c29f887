package kube

import (
	"context"
	"fmt"
	"time"

	"constellation/engine/check"
	"constellation/engine/cluster"
	"constellation/engine/distribution"
	"constellation/engine/kube/benchmark"
	"constellation/engine/kube/preflight"
	"constellation/engine/plan"
	"constellation/engine/version"
)

// SecurityChecks returns the checks of the guides.
func (Clusters) SecurityChecks() []check.SecurityCheck { return benchmark.Checks() }

// SecurityRole is the manifest of the least ClusterRole for a complete comparison with the guides.
func (Clusters) SecurityRole() string {
	return preflight.ClusterRole("constellation-check-security", benchmark.Rights())
}

// Security compares a cluster with the guides. only is the ID of one check; empty: all.
func (Clusters) Security(ctx context.Context, s cluster.Selected, timeout time.Duration, only string, emit func(plan.Event)) (check.Security, error) {
	f, err := openSelected(s, timeout)
	if err != nil {
		return check.Security{}, err
	}
	text, err := f.Version(ctx)
	if err != nil {
		return check.Security{}, check.ForeignDown(s, err)
	}
	running, err := version.Parse(text)
	if err != nil {
		return check.Security{}, &plan.Error{Op: "read the version of " + s.Server, Err: err, Remedy: "is this the address of a Kubernetes API server?"}
	}
	facts := f.Facts(ctx)
	facts.GitVersion = text
	r := benchmark.Request{Version: running, Distribution: distribution.Recognise(facts), Only: only}
	config := f.config
	wrap, requests := preflight.Record() // without the requests of Facts
	config.Wrap(wrap)
	out, err := benchmark.Run(ctx, config, r, emit)
	if err != nil {
		return check.Security{}, fmt.Errorf("compare the cluster with the guides: %w", classify(err))
	}
	out.Schema, out.Time, out.CLI, out.Name, out.Server = plan.Schema, time.Now().UTC(), version.Release, s.Context, s.Server
	out.Kubernetes, out.Distribution = text, r.Distribution
	if missing := benchmark.Missing(requests.Sent(), requests.Denied()); len(missing) > 0 {
		out.MissingRules = preflight.ClusterRole("constellation-check-security-missing", missing)
	}
	if s.Note != "" {
		out.Notes = append(out.Notes, s.Note)
	}
	return out, nil
}
