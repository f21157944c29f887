package preflight

import (
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"constellation/engine/plan"
)

const (
	nodePage   = "https://kubernetes.io/docs/reference/node/node-status/"
	cordonPage = "https://kubernetes.io/docs/concepts/architecture/nodes/#manual-node-administration"
)

var nodeChecks = []checkItem{
	{
		id: "node-conditions", area: "nodes", ref: nodePage, run: nodeConditions,
		title: "every node is ready, reachable and free of resource pressure",
		needs: []source{sourceNodes},
	},
	{
		id: "node-leases", area: "nodes", ref: nodePage, run: nodeLeases,
		title: "every node reports, and clocks agree",
		needs: []source{sourceNodes, sourceLeases},
	},
	{
		id: "cordoned-nodes", area: "nodes", ref: cordonPage, run: cordonedNodes,
		title: "no node is cordoned",
		needs: []source{sourceNodes},
	},
}

func role(n *corev1.Node) string {
	if _, ok := n.Labels[controlPlaneLabel]; ok {
		return "control plane"
	}
	return "worker"
}

// nodeConditions reports unhealthy nodes. An unready control plane blocks, because the
// upgrade begins there. A role without any ready node blocks too.
func nodeConditions(w *world, _ *probe) []plan.Finding {
	ready := map[string]int{}
	for i := range w.nodes {
		if why, _ := unwell(&w.nodes[i]); why == "" {
			ready[role(&w.nodes[i])]++
		}
	}
	var found []plan.Finding
	for i := range w.nodes {
		n := &w.nodes[i]
		name := printable(n.Name)
		f := plan.Finding{Objects: []string{object("node", "", n.Name)}, Owner: groupOf(n)}
		if why, since := unwell(n); why != "" {
			f.Severity = plan.Warn
			if role(n) == "control plane" || ready[role(n)] == 0 {
				f.Severity = plan.Block
			}
			f.Title = fmt.Sprintf("node %s (%s) is unhealthy: %s", name, role(n), why)
			if !since.IsZero() {
				f.Detail = "since " + plainDuration(w.now.Sub(since))
			}
			f.Remedy = "repair the machine; if it is lost, delete the node, and its group creates a new one"
			f.Command = command("kubectl delete node %s", n.Name)
			if f.Severity == plan.Block {
				f.Remedy = "repair the machine"
				f.Command = ""
			}
			found = append(found, f)
			continue
		}
		var pressed, details []string
		for _, c := range n.Status.Conditions {
			switch c.Type {
			case corev1.NodeMemoryPressure, corev1.NodeDiskPressure, corev1.NodePIDPressure:
				if c.Status == corev1.ConditionTrue {
					pressed = append(pressed, string(c.Type))
					details = append(details, fmt.Sprintf("%s for %s: %s", c.Type, plainDuration(w.now.Sub(c.LastTransitionTime.Time)), printable(c.Message)))
				}
			}
		}
		if len(pressed) > 0 {
			f.Title = fmt.Sprintf("node %s (%s) has resource pressure: %s", name, role(n), strings.Join(pressed, ", "))
			f.Detail = strings.Join(details, "; ")
			f.Remedy = "free that resource: the kubelet evicts pods, and the node accepts none"
			found = append(found, f)
		}
	}
	return fold(found, "unhealthy nodes")
}

// groupOf names the scaling group of n; empty if it has none.
func groupOf(n *corev1.Node) string {
	if g := n.Annotations["constellation.edgeless.systems/scaling-group-id"]; g != "" {
		return "scaling group " + printable(g)
	}
	return ""
}

// unwell returns why n cannot run pods, and since when; empty if it can.
func unwell(n *corev1.Node) (string, time.Time) {
	if !n.DeletionTimestamp.IsZero() {
		return "it is being deleted", n.DeletionTimestamp.Time
	}
	var why []string
	var since time.Time
	known := false
	for _, c := range n.Status.Conditions {
		switch {
		case c.Type == corev1.NodeReady:
			known = true
			if c.Status != corev1.ConditionTrue {
				why = append(why, strings.TrimSuffix(fmt.Sprintf("Ready is %s: %s", printable(string(c.Status)), strings.TrimSuffix(printable(c.Message), ".")), ": "))
				since = c.LastTransitionTime.Time
			}
		case c.Type == corev1.NodeNetworkUnavailable && c.Status == corev1.ConditionTrue:
			why = append(why, strings.TrimSuffix("its network is not configured: "+printable(c.Message), ": "))
		}
	}
	if !known {
		why = append(why, "its kubelet has never reported")
	}
	for _, t := range n.Spec.Taints {
		if t.Key == corev1.TaintNodeUnreachable {
			why = append(why, "it is unreachable")
			break
		}
	}
	return strings.Join(why, "; "), since
}

const (
	// leaseLimit is the longest interval between heartbeats of a node (--node-monitor-grace-period).
	leaseLimit = 50 * time.Second
	// clockLimit is the tolerated clock difference: leases are read at most that much later.
	clockLimit = sourceLimit
)

// nodeLeases reports Ready nodes that send no heartbeat, or whose clock is wrong. A lease
// carries the time of the node's clock. If no lease agrees with this computer's clock, this
// computer's clock is wrong, and nodes are compared with each other.
func nodeLeases(w *world, _ *probe) []plan.Finding {
	var ages []time.Duration
	for i := range w.nodes {
		if t, ok := w.leases[w.nodes[i].Name]; ok && isReady(&w.nodes[i]) {
			ages = append(ages, w.now.Sub(t))
		}
	}
	var found []plan.Finding
	var offset time.Duration
	if len(ages) > 0 {
		slices.Sort(ages)
		middle := ages[(len(ages)-1)/2]
		agree := slices.ContainsFunc(ages, func(age time.Duration) bool { return -clockLimit <= age && age <= leaseLimit })
		if !agree {
			offset = middle
			found = append(found, plan.Finding{
				Title:  "the clocks of this computer and of the nodes are " + plainDuration(middle.Abs()) + " apart",
				Detail: fmt.Sprintf("%s reported about that long %s now", count(len(ages), "ready node"), map[bool]string{true: "before", false: "after"}[middle > 0]),
				Remedy: "correct the clock: the validity of certificates and tokens depends on it",
			})
		}
	}
	var wrong []plan.Finding
	for i := range w.nodes {
		n := &w.nodes[i]
		if !isReady(n) {
			continue // reported by node-conditions
		}
		t, ok := w.leases[n.Name]
		age := w.now.Sub(t) - offset
		f := plan.Finding{Objects: []string{object("node", "", n.Name)}, Owner: groupOf(n), Remedy: "check its kubelet and its clock"}
		switch {
		case !ok && w.now.Sub(n.CreationTimestamp.Time) < leaseLimit:
			continue // new node: the kubelet creates its lease shortly after its Node
		case !ok:
			f.Title = fmt.Sprintf("node %s has never reported: it has no lease", printable(n.Name))
		case age > leaseLimit:
			f.Title = fmt.Sprintf("node %s reported %s ago: it is about to become NotReady, or its clock is behind", printable(n.Name), plainDuration(age))
		case age < -clockLimit:
			f.Title = fmt.Sprintf("the clock of node %s is %s ahead", printable(n.Name), plainDuration(-age))
		default:
			continue
		}
		wrong = append(wrong, f)
	}
	return append(found, fold(wrong, "nodes that do not report in time")...)
}

func isReady(n *corev1.Node) bool {
	return slices.ContainsFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
	})
}

// cordonedNodes reports nodes cordoned by others. The upgrade does not uncordon them.
func cordonedNodes(w *world, _ *probe) []plan.Finding {
	l := w.lookup()
	var found []plan.Finding
	for i := range w.nodes {
		n := &w.nodes[i]
		if !n.Spec.Unschedulable {
			continue
		}
		by, since := cordonedBy(n)
		f := plan.Finding{
			Title: fmt.Sprintf("node %s (%s) is cordoned", printable(n.Name), role(n)), Owner: asked(by), Objects: []string{object("node", "", n.Name)},
			Detail: "by an unknown client", Remedy: "uncordon it if the reason no longer applies: evicted pods cannot be scheduled there",
			Command: command("kubectl uncordon %s", n.Name),
		}
		if by != "" {
			f.Detail = "by " + printable(by)
			if !since.IsZero() {
				f.Detail += ", " + plainDuration(w.now.Sub(since)) + " ago"
			}
		}
		switch {
		case w.request.Foreign: // others decide what becomes of it
		case l.place[n.Name] > 0:
			f.Detail += fmt.Sprintf("; it is replaced (%s), and the new node will not be cordoned", l.position(n.Name))
		default:
			f.Detail += "; it is kept, and stays cordoned"
		}
		found = append(found, f)
	}
	return fold(found, "cordoned nodes")
}

// cordonedBy is the field manager that cordoned n, and the time of its last write.
func cordonedBy(n *corev1.Node) (string, time.Time) {
	for i := range n.ManagedFields {
		m := &n.ManagedFields[i]
		if m.FieldsV1 != nil && strings.Contains(m.FieldsV1.GetRawString(), `"f:unschedulable"`) {
			if m.Time == nil {
				return m.Manager, time.Time{}
			}
			return m.Manager, m.Time.Time
		}
	}
	return "", time.Time{}
}
