package engine

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"constellation/assets"
	"constellation/engine/attestation/certifier"
	"constellation/engine/check"
	"constellation/engine/cloud/providers"
	"constellation/engine/cluster"
	"constellation/engine/kms"
	"constellation/engine/kubeadm"
	"constellation/engine/plan"
	"constellation/engine/registry"
	"constellation/engine/release"
	"constellation/engine/workspace"
)

// kinds returns the definitions of the release, in the order of its data.
func (i *clusterRun) kinds() ([]assets.File, error) {
	all, err := assets.CRDsFor(i.release.Version.String())
	if err != nil {
		return nil, err
	}
	var out []assets.File
	for _, want := range i.release.CRDs {
		k := slices.IndexFunc(all, func(f assets.File) bool { return f.Name == want })
		if k < 0 {
			return nil, fmt.Errorf("this program has no kind %s of release %s", want, i.release.Version)
		}
		out = append(out, all[k])
	}
	return out, nil
}

// want reads from the configuration which charts to install besides those of the release, and
// their settings.
func (f *facts) want(c *workspace.Config) {
	f.extra, f.noPlans, f.pulls, f.section = c.Charts, c.Plans != nil && !*c.Plans, c.Registry, c.Provider.Section
	f.pods, f.kubernetes = c.PodCIDR, c.Kubernetes
	f.noNetworkPolicies = slices.Contains(c.HardeningOff(), kubeadm.ItemNetworkPolicies)
}

// operatorReplicas is the number of the operator's replicas where there are several control
// planes. The second one reports what its member of etcd has when a snapshot of another member
// is taken.
const operatorReplicas = 2

// PlansNamespace is where the cluster carries out Plans.
const PlansNamespace = "system-upgrade"

// otherPlans names the Deployment that carries out Plans where ours would; empty if none does, and if
// ours is not wanted.
func (i *clusterRun) otherPlans(ctx context.Context, k Cluster) (string, error) {
	if i.noPlans {
		return "", nil
	}
	return k.OtherPlans(ctx)
}

// charts returns the charts of the release with their values for this cluster, in which others,
// if not empty, carries out Plans. running returns the version of the API servers.
func (i *clusterRun) charts(others string, running func() (string, error)) ([]cluster.Chart, error) {
	from, err := providers.Known(i.state.Infrastructure.Provider)
	if err != nil {
		return nil, err
	}
	cloudValues := from.At(i.state.Infrastructure.Section).ChartValues(i.section)
	out, err := i.partCharts(running)
	if err != nil {
		return nil, err
	}
	for _, c := range i.release.Charts {
		if from.NoJoin && i.serves(c.Name, release.JoinService) {
			continue
		}
		if c.Source != "" {
			one, err := i.foreignChart(c)
			if err != nil {
				return nil, err
			}
			out = append(out, one)
			continue
		}
		one, err := i.ownChart(c, from, cloudValues, others)
		if err != nil {
			return nil, err
		}
		out = append(out, one)
	}
	for _, c := range i.extra {
		one, err := i.foreignChart(c)
		if err != nil {
			return nil, err
		}
		out = append(out, one)
	}
	for n := range out {
		out[n].Recreate = i.accepted != nil && i.accepted(check.FindingDestructive+out[n].Name)
	}
	return out, nil
}

// ownChart returns a chart of this program with its values for this cluster, whose cloud is from and has cloudValues.
func (i *clusterRun) ownChart(c release.Chart, from providers.Provider, cloudValues map[string]any, others string) (none cluster.Chart, err error) {
	files, err := assets.ChartFor(c.Name, i.release.Version.String())
	if err != nil {
		return none, err
	}
	values := deepCopy(c.Values)
	values["release"] = i.release.Version.String()
	assets.SetValues(values, files, cloudValues)
	for _, s := range i.release.Services {
		if s.Chart == c.Name {
			assets.SetValue(values, i.imageOf(s.Image), valueKey(s.Name), "image")
		}
	}
	if err := i.setRegistry(values, files, c.Name); err != nil {
		return none, err
	}
	if i.state.ClusterValues.Certifier && assets.HasValue(files, "joinservice", "certifier") {
		assets.SetValue(values, certifier.Socket, "joinservice", "certifier")
	}
	if i.state.ClusterValues.KeyService() && assets.HasValue(files, "joinservice", "kms") {
		assets.SetValue(values, kms.KeysSocket, "joinservice", "kms")
	}
	if i.state.ClusterValues.KeyService() && assets.HasValue(files, "operator", "rotateKey") {
		assets.SetValue(values, true, "operator", "rotateKey")
	}
	if i.controlPlanes > 1 && assets.HasValue(files, "operator", "replicas") {
		assets.SetValue(values, operatorReplicas, "operator", "replicas")
	}
	if (others != "" || i.noPlans) && assets.HasValue(files, "plans") {
		assets.SetValue(values, false, "plans", "enabled")
	}
	if assets.HasValue(files, "networkPolicies") {
		assets.SetValue(values, !i.noNetworkPolicies && !from.NoJoin, "networkPolicies") // the owner of an adopted cluster decides
	}
	return cluster.Chart{Name: c.Name, Namespace: c.Namespace, Version: strings.TrimPrefix(i.release.Version.String(), "v"), Files: files, Values: values, Needs: c.Needs}, nil
}

// serves reports whether a chart deploys a service of the release.
func (f *facts) serves(chart, service string) bool {
	s, ok := f.release.Service(service)
	return ok && s.Chart == chart
}

// valueKey is a service's key in the values of its chart: its name without dashes.
func valueKey(service string) string { return strings.ReplaceAll(service, "-", "") }

// deepCopy copies nested maps; everything else in values is never changed.
func deepCopy(m map[string]any) map[string]any {
	out := make(map[string]any, len(m)+2)
	maps.Copy(out, m)
	for k, v := range out {
		if n, ok := v.(map[string]any); ok {
			out[k] = deepCopy(n)
		}
	}
	return out
}

func (i *clusterRun) chartsEffect() string {
	if i.release == nil {
		return ""
	}
	var parts []string
	charts := len(i.release.Charts) + len(i.extra)
	from, _ := providers.Known(i.state.Infrastructure.Provider) // charts reports an unknown one
	for _, s := range i.release.Services {
		switch {
		case s.Chart == "":
		case from.NoJoin && s.Name == release.JoinService:
			charts--
		default:
			parts = append(parts, s.Name+" "+s.Version.String())
		}
	}
	for _, c := range i.foreignCharts() {
		parts = append(parts, c.Name+" "+c.Version)
	}
	if from.Parts != nil {
		of, _ := from.Parts(providers.ClusterOf{Config: i.section, State: i.state.Infrastructure.Section, PodCIDR: i.pods}) // a finding reports its error
		for _, p := range of {
			charts++
			parts = append(parts, p.Chart)
		}
	}
	return fmt.Sprintf("%d kinds and %d charts with %s", len(i.release.CRDs), charts, strings.Join(parts, ", "))
}

func (i *clusterRun) chartsDone(ctx context.Context) (bool, error) {
	kinds, err := i.kinds()
	if err != nil {
		return false, err
	}
	return i.glance(ctx, func(ctx context.Context, k Cluster) (bool, error) {
		outdated, err := k.OutdatedKinds(ctx, kinds)
		if err != nil || len(outdated) > 0 {
			return false, err
		}
		others, err := i.otherPlans(ctx, k)
		if err != nil {
			return false, err
		}
		charts, err := i.charts(others, runningVersion(ctx, k))
		if err != nil {
			return false, err
		}
		if from, err := i.e.ws.Registry(i.pulls); err != nil {
			return false, err
		} else if has, err := k.HasRegistry(ctx, from, i.plansHere(others)); err != nil || !has {
			return false, err
		}
		for _, c := range charts {
			if current, err := k.ChartCurrent(ctx, c); err != nil || !current {
				return false, err
			}
		}
		before, err := k.ChartSet(ctx) // of a run that was cut off just before its end
		return err == nil && before == nil, err
	})
}

// installCharts installs the kinds and then the charts. If it is canceled while they become
// ready, the next run finds them installed.
func (i *clusterRun) installCharts(ctx context.Context, r *plan.Reporter) error {
	k, err := i.connect(ctx)
	if err != nil {
		return err
	}
	kinds, err := i.kinds()
	if err != nil {
		return err
	}
	limited, cancel := context.WithTimeout(ctx, i.e.limits.api)
	others, err := i.otherPlans(limited, k)
	cancel()
	if err != nil {
		return i.clusterError("find the controller of Plans", err)
	}
	if others != "" {
		r.Log("charts", "", "warn", fmt.Sprintf("Deployment %s/%s executes Plans, so the controller of the release stays off", PlansNamespace, others))
	}
	limited, cancel = context.WithTimeout(ctx, i.e.limits.api)
	charts, err := i.charts(others, runningVersion(limited, k))
	cancel()
	if err != nil {
		return err
	}
	from, err := i.e.ws.Registry(i.pulls)
	if err != nil {
		return err
	}
	r.Hide([]byte(from.Password))
	_, stop := i.monitorAPI(ctx, r, k, i.e.limits.poll)
	defer stop()
	if err := i.publishRegistry(ctx, r, k, from, i.plansHere(others)); err != nil {
		return err
	}
	total := int64(len(kinds))
	done := int64(0)
	r.Part("kinds", plan.StateRunning, "", 0, total)
	limited, cancel = context.WithTimeout(ctx, i.e.limits.api)
	err = k.ApplyKinds(limited, kinds, func(name string) {
		done++
		r.Part("kinds", plan.StateRunning, name, done, total)
	})
	err = i.clusterError("apply kinds", err)
	cancel()
	if err != nil {
		r.Part("kinds", plan.StateFailed, "", done, total)
		return err
	}
	r.Part("kinds", plan.StateDone, "", total, total)

	if !i.state.Adopted() { // else the lifetime is its owner's decision
		if err := i.boundSigning(ctx, r, k); err != nil {
			return err
		}
	}

	limit := i.e.limits.chart
	if len(i.foreignCharts()) > 0 {
		limit *= 2 // of those images are pulled that no node has yet
	}
	set := ChartSet{Charts: charts, Limit: limit, Report: r.Part, Explain: i.clusterError}
	return set.Apply(ctx, k)
}

// publishRegistry has the cluster pull from a registry.
func (i *clusterRun) publishRegistry(ctx context.Context, r *plan.Reporter, k Cluster, from registry.Registry, plans bool) error {
	ctx, cancel := context.WithTimeout(ctx, i.e.limits.api)
	defer cancel()
	has, err := k.HasRegistry(ctx, from, plans)
	moved := false
	if err == nil && !has {
		moved, err = k.SetRegistry(ctx, from, plans)
	}
	if err != nil {
		return i.clusterError("publish the registry", err)
	}
	if moved {
		r.Log("charts", "", "info", "kubeadm's configuration has another image repository; nodes take it over as they are upgraded or replaced")
	}
	return nil
}

// boundSigning bounds the lifetime of the certificates that the cluster signs for nodes.
func (i *clusterRun) boundSigning(ctx context.Context, r *plan.Reporter, k Cluster) error {
	// Clusters of older programs have certificates of nodes that live a year.
	limited, cancel := context.WithTimeout(ctx, i.e.limits.api)
	bounded, err := k.BoundSigning(limited, kubeadm.SigningDuration)
	cancel()
	if err != nil {
		return i.clusterError("bound the lifetime of node certificates", err)
	}
	if bounded {
		r.Log("charts", "", "info", "kubeadm's configuration bounds certificates of nodes to "+kubeadm.SigningDuration+"; control planes take it over as they are upgraded or replaced")
	}
	return nil
}
