package check

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
	"constellation/engine/words"
)

// StepAgents is the ID of the step that names the enrolment program. Only plans that upgrade
// nodes with non-verifying agents in place have it.
const StepAgents = "agents"

// findingAgents is the ID of the finding about agents that do not verify components.
const findingAgents = "agents-unverified"

// findingEnrolled is the ID of the finding about agents that the hop replaces.
const findingEnrolled = "agents-enrolled"

// Unverified returns the nodes of groups upgraded in place whose agents run components without
// verifying them, sorted by name. Other nodes get a verifying agent with their next image.
//
// Image and group come from the cloud: a kubelet of an older release could have written those of
// its Node, and the group becomes part of a command that the user copies. A node counts as
// enrolled if its components, which the operator records, include an enrolment program. An image
// whose version the catalogue does not have counts as one whose agents do not verify.
func Unverified(nodes []cluster.Node, machines []cluster.CloudMachine, enrolled map[string]cluster.Components, catalogue *cloud.Catalogue) []cluster.Node {
	of := make(map[string]*cluster.CloudMachine, len(machines))
	for i := range machines {
		of[machines[i].Name] = &machines[i]
	}
	var out []cluster.Node
	for i := range nodes {
		n := &nodes[i]
		m := of[n.Name]
		if !n.InPlace || m == nil || m.Verifies || enrolled[n.Components].Enrolled(n.Name) {
			continue
		}
		found := *n
		found.Group, found.Image, found.ImageVersion = m.GroupName, m.Image, ""
		if m.Image != "" {
			if v, err := catalogue.Version(m.Image); err == nil {
				if release.AgentVerifies(v) {
					continue
				}
				found.ImageVersion = v.String()
			}
		}
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

// EnrolledBy returns the components of nodes that are upgraded in place, by their names. Absent
// ConfigMaps count as having no enrolment program.
func EnrolledBy(ctx context.Context, k Published, nodes []cluster.Node) (map[string]cluster.Components, error) {
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

// InGroups returns text such as "2 of workers (worker-0, worker-1)".
func InGroups(nodes []cluster.Node) string {
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

// AgentsFinding warns of agents that do not verify components.
func AgentsFinding(nodes []cluster.Node, catalogue *cloud.Catalogue, remedy string) plan.Finding {
	why := "the machines have images of releases before " + release.FirstVerifying.String()
	unknown := slices.IndexFunc(nodes, func(n cluster.Node) bool { return n.ImageVersion == "" })
	switch {
	case imageless(nodes):
		why = "the cloud does not report the release of their agents"
	case unknown >= 0 && nodes[unknown].Image != "":
		_, err := catalogue.Version(nodes[unknown].Image)
		why = fmt.Sprintf("the machines have images of releases before %s, or of unknown releases (%v)", release.FirstVerifying, err)
	}
	f := plan.Finding{
		ID: findingAgents, Severity: plan.Warn, Source: "release", Title: "the agents of " + words.Count(len(nodes), "node") + " install components without verifying a statement",
		Detail: InGroups(nodes) + ": " + why + ", and their groups are upgraded in place", Remedy: remedy,
	}
	for i := range nodes {
		f.Objects = append(f.Objects, nodes[i].Name)
	}
	return f
}

// imageless reports whether nodes have no images, as in a cloud that selects none.
func imageless(nodes []cluster.Node) bool {
	return !slices.ContainsFunc(nodes, func(n cluster.Node) bool { return n.Image != "" })
}

// AgentsUnchecked reports why the check of the agents failed.
func AgentsUnchecked(err error) plan.Finding {
	return plan.Finding{ID: findingAgents, Severity: plan.NotChecked, Source: "release", Title: "not checked which agents verify components", Detail: err.Error(), Remedy: "try again when the cluster and the cloud answer"}
}

// ReplaceOnce is the remedy where no upgrade of Kubernetes in place enrols the agents.
func ReplaceOnce(nodes []cluster.Node) string {
	var groups []string
	for i := range nodes {
		groups = append(groups, cmp.Or(nodes[i].Group, nodes[i].Role))
	}
	slices.Sort(groups)
	var patches []string
	for _, g := range slices.Compact(groups) {
		patches = append(patches, "`kubectl patch scalinggroup "+g+" --type merge -p '{\"spec\":{\"strategy\":\"Replace\"}}'`")
	}
	what := "the image"
	if imageless(nodes) {
		what = "Kubernetes"
	}
	return "upgrade Kubernetes: the step `" + StepAgents + "` of the plan installs the release keys and the verifying agent in place; or have the machines replaced once: " +
		words.And(patches) + ", then an upgrade of " + what
}

// judgeAgents finds agents that do not verify components. The hop enrols agents of nodes whose
// Kubernetes it upgrades in place, if the cloud has an enrolment program.
func (c *Run) judgeAgents(ctx context.Context, kubeconfig []byte, next cluster.Components) {
	if c.Enrols = nil; c.Cloud == nil || !slices.ContainsFunc(c.Now.Nodes, func(n cluster.Node) bool { return n.InPlace }) {
		return
	}
	limited, cancel := context.WithTimeout(ctx, CheckLimit)
	defer cancel()
	machines, err := c.Cloud.Machines(limited)
	var enrolled map[string]cluster.Components
	if err == nil {
		var k Published
		if k, err = c.Connect(limited, kubeconfig); err == nil {
			enrolled, err = EnrolledBy(limited, k, c.Now.Nodes)
		}
	}
	if err != nil {
		c.Find(AgentsUnchecked(err))
		return
	}
	var left []cluster.Node
	for _, n := range Unverified(c.Now.Nodes, machines, enrolled, c.Catalogue) {
		// The operator skips nodes that have, or claim, the next components already.
		if c.upgradesInPlace(&n) && next.Agent != nil && n.Components != next.Name {
			c.Enrols = append(c.Enrols, n)
		} else {
			left = append(left, n)
		}
	}
	if len(left) > 0 {
		c.Find(AgentsFinding(left, c.Catalogue, ReplaceOnce(left)))
	}
	if len(c.Enrols) > 0 {
		c.Find(plan.Finding{
			ID: findingEnrolled, Severity: plan.Info, Source: "release", Title: "the hop installs the release keys and the verifying agent on " + words.Count(len(c.Enrols), "machine") + " in place",
			Detail: InGroups(c.Enrols) + ": their agents install components without verifying a statement, until then", Objects: NamesOf(c.Enrols),
		})
	}
}

// upgradesInPlace reports whether the hop upgrades Kubernetes on a node without replacing it.
func (c *Run) upgradesInPlace(n *cluster.Node) bool {
	touched := c.Hop.ReplaceWorkers
	if n.Role == string(cloud.ControlPlane) {
		touched = c.Hop.ReplaceControlPlanes
	}
	return n.InPlace && touched && c.Hop.To.Kubernetes != c.Hop.From.Kubernetes
}

// NamesOf returns the names of nodes, in their order.
func NamesOf(nodes []cluster.Node) []string {
	out := make([]string, len(nodes))
	for i := range nodes {
		out[i] = nodes[i].Name
	}
	return out
}
