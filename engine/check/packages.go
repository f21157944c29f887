package check

import (
	"context"
	"errors"

	"constellation/engine/cloud"
	"constellation/engine/cloud/machines"
	"constellation/engine/cluster"
	"constellation/engine/plan"
	"constellation/engine/words"
)

// findingPackages is the ID of the finding about packages of the distribution, which an upgrade in place keeps or upgrades.
const findingPackages = "packages"

// packagesPublished is a cluster in which the list of machines says whether upgrades in place upgrade packages.
type packagesPublished interface {
	UpgradesPackages(ctx context.Context) (bool, error)
}

// judgePackages reports what the hop does with the packages of containerd, runc and network plugins. The operator follows
// the list in the cluster, which can differ from the configuration until it is published.
func (c *Run) judgePackages(ctx context.Context, kubeconfig []byte) {
	if c.State == nil || !c.State.Enrolled() && !c.State.Adopted() {
		return
	}
	var nodes []cluster.Node
	for i := range c.Now.Nodes {
		n := &c.Now.Nodes[i]
		if c.upgradesInPlace(n) || n.InPlace && n.Role == string(cloud.ControlPlane) && c.Hop.ReplaceControlPlanes && c.Hop.Planned().Etcd != "" {
			nodes = append(nodes, *n)
		}
	}
	if len(nodes) == 0 {
		return
	}
	limited, cancel := context.WithTimeout(ctx, CheckLimit)
	defer cancel()
	k, err := c.Connect(limited, kubeconfig)
	upgraded := false
	if err == nil {
		err = errors.New("this program has no Kubernetes client")
		if p, ok := k.(packagesPublished); ok {
			upgraded, err = p.UpgradesPackages(limited)
		}
	}
	c.Find(packagesFinding(nodes, machines.UpgradesPackages(c.Config.Provider.Section), upgraded, c.State.Enrolled(), err))
}

// packagesFinding is the finding about the packages of nodes. wanted is from the configuration, upgraded from the list in
// the cluster, which could not be read if err is not nil.
func packagesFinding(nodes []cluster.Node, wanted, upgraded, enrolled bool, err error) plan.Finding {
	const which = "packages of containerd, runc and network plugins"
	f := plan.Finding{ID: findingPackages, Severity: plan.Info, Source: "cluster", Objects: NamesOf(nodes)}
	on := " on " + words.Count(len(nodes), "machine")
	publish := "`constellation adopt --operator`"
	if enrolled {
		publish = "`constellation init`"
	}
	switch {
	case err != nil:
		f.Severity, f.Title, f.Detail, f.Objects = plan.NotChecked, "not checked whether the hop upgrades "+which, err.Error(), nil
		f.Remedy = "try again when the cluster answers"
		return f
	case upgraded:
		f.Title = "the hop upgrades " + which + on
		f.Detail = InGroups(nodes) + ": with apt, to the newest versions in the repositories of each machine, while its node is drained"
	default:
		f.Title = "the hop leaves " + which + on + " as they are"
		f.Detail = InGroups(nodes) + ": `packages: upgrade` in the configuration has each hop upgrade them with apt"
	}
	if wanted != upgraded {
		f.Severity = plan.Warn
		f.Detail = InGroups(nodes) + ": the configuration has `packages: " + packagesText(wanted) + "`, and the list of machines in the cluster has " + packagesText(upgraded)
		f.Remedy = "publish the configuration first: " + publish
	}
	return f
}

func packagesText(upgrade bool) string {
	if upgrade {
		return machines.PackagesUpgrade
	}
	return machines.PackagesHeld
}
