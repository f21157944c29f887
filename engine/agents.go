package engine

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"constellation/engine/cloud"
	"constellation/engine/cluster"
	"constellation/engine/plan"
	"constellation/engine/release"
	"constellation/engine/version"
	"constellation/engine/words"
)

// StepAgents is the ID of the step that names the enrolment program. Only plans have it that
// upgrade nodes in place whose agents verify nothing.
const StepAgents = "agents"

// findingAgents is the ID of the finding about agents that verify nothing.
const findingAgents = "agents-unverified"

// findingEnrolled is the ID of the finding about agents that the hop replaces.
const findingEnrolled = "agents-enrolled"

// unverified are nodes of groups that are upgraded in place whose agents run components that
// nobody vouches for, sorted by name. Other nodes get such an agent with their next image.
//
// Image and group come from the cloud, because a kubelet of an older program could write those of
// its Node, and the group stands in a command that the user copies. A node that was enrolled is
// known by its components, which the operator records: their ConfigMap names an enrolment program,
// and it did so before any node had them.
func unverified(nodes []cluster.Node, machines []cluster.CloudMachine, enrolled map[string]cluster.Components) []cluster.Node {
	of := make(map[string]*cluster.CloudMachine, len(machines))
	for i := range machines {
		of[machines[i].Name] = &machines[i]
	}
	var out []cluster.Node
	for i := range nodes {
		n := &nodes[i]
		m := of[n.Name]
		if !n.InPlace || m == nil || enrolled[n.Components].Enrolled(n.Name) {
			continue
		}
		v, err := version.Parse(m.Image[strings.LastIndexByte(m.Image, '/')+1:])
		if err == nil && release.AgentVerifies(v) {
			continue
		}
		found := *n
		found.Group = cluster.GroupName(m.Group)
		out = append(out, found)
	}
	slices.SortFunc(out, func(a, b cluster.Node) int { return strings.Compare(a.Name, b.Name) })
	return out
}

// withComponents returns the sorted names of the nodes that have, or claim, components.
func withComponents(nodes []cluster.Node, components string) (names []string) {
	for i := range nodes {
		if nodes[i].Components == components {
			names = append(names, nodes[i].Name)
		}
	}
	slices.Sort(names)
	return names
}

// enrolledBy returns the components of nodes that are upgraded in place by their names.
// ConfigMaps that are not there name no enrolment program.
func enrolledBy(ctx context.Context, k Cluster, nodes []cluster.Node) (map[string]cluster.Components, error) {
	out := map[string]cluster.Components{}
	for i := range nodes {
		name := nodes[i].Components
		if _, known := out[name]; known || name == "" || !nodes[i].InPlace {
			continue
		}
		c, err := k.Components(ctx, name)
		if err != nil && !errors.Is(err, cluster.ErrAbsent) {
			return nil, err
		}
		out[name] = c
	}
	return out, nil
}

// inGroups is "2 of workers (worker-0, worker-1)".
func inGroups(nodes []cluster.Node) string {
	by := map[string][]string{}
	for i := range nodes {
		g := cmp.Or(nodes[i].Group, nodes[i].Role)
		by[g] = append(by[g], nodes[i].Name)
	}
	var out []string
	for _, g := range slices.Sorted(maps.Keys(by)) {
		out = append(out, fmt.Sprintf("%d of %s (%s)", len(by[g]), g, strings.Join(by[g], ", ")))
	}
	return words.And(out)
}

// agentsFinding warns of agents that verify nothing.
func agentsFinding(nodes []cluster.Node, remedy string) plan.Finding {
	f := plan.Finding{
		ID: findingAgents, Severity: plan.Warn, Source: "release", Title: "the agents of " + words.Count(len(nodes), "node") + " run components that nobody vouches for",
		Detail: inGroups(nodes) + ": the machines have images of releases before " + release.FirstVerifying.String() + ", and their groups are upgraded in place", Remedy: remedy,
	}
	for i := range nodes {
		f.Objects = append(f.Objects, nodes[i].Name)
	}
	return f
}

// agentsUnchecked reports why the agents could not be judged.
func agentsUnchecked(err error) plan.Finding {
	return plan.Finding{ID: findingAgents, Severity: plan.NotChecked, Source: "release", Title: "not checked which agents verify components", Detail: err.Error(), Remedy: "try again when the cluster and the cloud answer"}
}

// replaceOnce is the remedy where no upgrade of Kubernetes in place enrols the agents.
func replaceOnce(nodes []cluster.Node) string {
	var groups []string
	for i := range nodes {
		groups = append(groups, cmp.Or(nodes[i].Group, nodes[i].Role))
	}
	slices.Sort(groups)
	var patches []string
	for _, g := range slices.Compact(groups) {
		patches = append(patches, "`kubectl patch scalinggroup "+g+" --type merge -p '{\"spec\":{\"strategy\":\"Replace\"}}'`")
	}
	return "upgrade Kubernetes: the step `" + StepAgents + "` of the plan installs the release keys and the verifying agent in place; or have the machines replaced once: " +
		words.And(patches) + ", then an upgrade of the image"
}

// judgeAgents finds agents that verify nothing. Those of nodes whose Kubernetes the hop upgrades
// in place are enrolled by it, if the cloud has an enrolment program.
func (c *checkRun) judgeAgents(ctx context.Context, kubeconfig []byte, next cluster.Components) {
	if c.enrols = nil; c.provider == nil || !slices.ContainsFunc(c.now.Nodes, func(n cluster.Node) bool { return n.InPlace }) {
		return
	}
	limited, cancel := context.WithTimeout(ctx, checkLimit)
	defer cancel()
	machines, err := c.provider.Machines(limited)
	var enrolled map[string]Components
	if err == nil {
		var k Cluster
		if k, err = c.e.connect(limited, kubeconfig); err == nil {
			enrolled, err = enrolledBy(limited, k, c.now.Nodes)
		}
	}
	if err != nil {
		c.find(agentsUnchecked(err))
		return
	}
	var left []cluster.Node
	for _, n := range unverified(c.now.Nodes, machines, enrolled) {
		// The operator upgrades no node that has, or claims, the next components already.
		if c.upgradesInPlace(&n) && next.Agent != nil && n.Components != next.Name {
			c.enrols = append(c.enrols, n)
		} else {
			left = append(left, n)
		}
	}
	if len(left) > 0 {
		c.find(agentsFinding(left, replaceOnce(left)))
	}
	if len(c.enrols) > 0 {
		c.find(plan.Finding{
			ID: findingEnrolled, Severity: plan.Info, Source: "release", Title: "the hop installs the release keys and the verifying agent on " + words.Count(len(c.enrols), "machine") + " in place",
			Detail: inGroups(c.enrols) + ": their agents run components that nobody vouches for, until then", Objects: namesOf(c.enrols),
		})
	}
}

// upgradesInPlace reports whether the hop upgrades Kubernetes of a node as it is.
func (c *checkRun) upgradesInPlace(n *cluster.Node) bool {
	touched := c.hop.ReplaceWorkers
	if n.Role == string(cloud.ControlPlane) {
		touched = c.hop.ReplaceControlPlanes
	}
	return n.InPlace && touched && c.hop.To.Kubernetes != c.hop.From.Kubernetes
}

func namesOf(nodes []cluster.Node) []string {
	out := make([]string, len(nodes))
	for i := range nodes {
		out[i] = nodes[i].Name
	}
	return out
}

// agentsStep names the enrolment program, with which the operator begins on each node.
func (i *clusterRun) agentsStep() plan.Step {
	want := i.components
	return plan.Step{
		ID:    StepAgents,
		Title: "Install the release keys and the verifying agent on " + words.Count(len(i.enrols), "machine") + " in place",
		Effect: fmt.Sprintf("ConfigMap %s names the agent of the new image; the operator installs it on %s once, before it upgrades Kubernetes there",
			shortName(want.Name), words.And(namesOf(i.enrols))),
		Details: []string{inGroups(i.enrols) + ": from then on they install only what a release builder vouches for"},
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
