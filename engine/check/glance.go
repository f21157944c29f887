package check

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"constellation/engine/cluster"
	"constellation/engine/distribution"
	"constellation/engine/lifecycle"
	"constellation/engine/plan"
	"constellation/engine/version"
	"constellation/engine/words"
)

// Observer is a cluster that Look observes.
type Observer interface {
	// Version returns the version that the API server reports. It is the first request.
	Version(ctx context.Context) (string, error)
	// Observe returns what the distribution is recognised by, and the nodes. The error is about
	// the nodes.
	Observe(ctx context.Context) (distribution.Facts, NodeList, error)
}

// NodeList are the first nodes of a cluster.
type NodeList struct {
	Nodes []NodeGlance
	// More is the number of other nodes.
	More int
}

// NodeGlance is a node.
type NodeGlance struct {
	Name         string `json:"name"`
	Kubernetes   string `json:"kubernetes"`
	ControlPlane bool   `json:"controlPlane,omitempty"`
	Ready        bool   `json:"ready"`
	Cordoned     bool   `json:"cordoned,omitempty"`
}

// GlanceState is how a cluster answered.
type GlanceState string

// States of a Glance.
const (
	GlanceReachable   GlanceState = "reachable"
	GlanceUnreachable GlanceState = "unreachable"
	// GlanceDenied means that the API server does not accept the credentials, or that its
	// certificate is not valid.
	GlanceDenied GlanceState = "denied"
	// GlanceForbidden means that the user may not read the version.
	GlanceForbidden GlanceState = "forbidden"
	// GlanceInvalid means that the kubeconfig is not valid, or that another server answered.
	GlanceInvalid GlanceState = "invalid"
)

// Glance is what a few cheap read requests show about a cluster. It is no check.
type Glance struct {
	Schema  string    `json:"schema"`
	Time    time.Time `json:"time"`
	Context string    `json:"context"`
	Server  string    `json:"server"`

	State GlanceState `json:"state"`
	// Problem is why the cluster is not reachable, in one line.
	Problem string `json:"problem,omitempty"`

	Kubernetes   string                    `json:"kubernetes,omitempty"`
	Distribution distribution.Distribution `json:"distribution"`
	// Nodes are the first nodes, MoreNodes is the number of others. NodesUnknown is why they
	// could not be read.
	Nodes        []NodeGlance `json:"nodes"`
	MoreNodes    int          `json:"moreNodes,omitempty"`
	NodesUnknown string       `json:"nodesUnknown,omitempty"`
	// Findings are problems that are visible without a check.
	Findings []plan.Finding `json:"findings"`
	// TookMS is the time until all answers were there.
	TookMS int64 `json:"tookMS"`
}

// Look observes a cluster within the deadline of ctx.
func Look(ctx context.Context, c Observer, s cluster.Selected, now time.Time) (g Glance) {
	g = Glance{Schema: plan.Schema, Time: now.UTC(), Context: s.Context, Server: s.Server, Nodes: []NodeGlance{}, Findings: []plan.Finding{}}
	began := time.Now()
	defer func() { g.TookMS = time.Since(began).Milliseconds() }()
	// The requests are sent at once: the version alone decides about the state, and the rest
	// counts only if it is read within the same deadline.
	type rest struct {
		facts distribution.Facts
		nodes NodeList
		err   error
	}
	read := make(chan rest, 1)
	go func() {
		var r rest
		r.facts, r.nodes, r.err = c.Observe(ctx)
		read <- r
	}()
	text, err := c.Version(ctx)
	if err != nil {
		g.State, g.Problem = glanceState(ctx, err)
		return g
	}
	running, err := version.Parse(text)
	if err != nil {
		g.State, g.Problem = GlanceInvalid, "the address is not one of a Kubernetes API server"
		return g
	}
	g.State, g.Kubernetes = GlanceReachable, text
	var r rest
	select {
	case r = <-read:
	case <-ctx.Done():
		r.err = ctx.Err()
	}
	r.facts.GitVersion = text
	g.Distribution = distribution.Recognise(r.facts)
	g.Nodes = append(g.Nodes, r.nodes.Nodes...)
	g.MoreNodes = r.nodes.More
	switch {
	case errors.Is(r.err, cluster.ErrForbidden):
		g.NodesUnknown = "the user may not list nodes"
	case r.err != nil:
		g.NodesUnknown = "no answer in time"
	}
	g.Findings = append(g.Findings, visible(running, g.Nodes)...)
	return g
}

// glanceState classifies the error of the first request.
func glanceState(ctx context.Context, err error) (GlanceState, string) {
	text := err.Error()
	switch {
	case strings.Contains(text, "getting credentials"), strings.Contains(text, "exec plugin"):
		return GlanceDenied, "the credential plugin failed"
	case errors.Is(err, cluster.ErrForbidden):
		return GlanceForbidden, "the user may not read the version"
	case errors.Is(err, cluster.ErrDenied) && strings.Contains(text, "x509"):
		return GlanceDenied, "the server's certificate is not valid"
	case errors.Is(err, cluster.ErrDenied):
		return GlanceDenied, "the credentials are not accepted"
	case ctx.Err() != nil, errors.Is(err, context.DeadlineExceeded):
		return GlanceUnreachable, "no answer in time"
	case strings.Contains(text, "connection refused"):
		return GlanceUnreachable, "connection refused"
	case strings.Contains(text, "no such host"):
		return GlanceUnreachable, "the address has no such host"
	}
	return GlanceUnreachable, "no answer"
}

// maxKubeletSkew is how many minors a kubelet may be older than the API server.
const maxKubeletSkew = 3

// visible returns what the version and the nodes show.
func visible(running version.Version, nodes []NodeGlance) (out []plan.Finding) {
	var down, cordoned, old []string
	for i := range nodes {
		n := &nodes[i]
		if !n.Ready {
			down = append(down, n.Name)
		}
		if n.Cordoned {
			cordoned = append(cordoned, n.Name)
		}
		if v, err := version.Parse(n.Kubernetes); err == nil && (running.Minor()-v.Minor() > maxKubeletSkew || v.Minor() > running.Minor()) {
			old = append(old, n.Name+" "+n.Kubernetes)
		}
	}
	add := func(id string, s plan.Severity, list []string, one, many, remedy string) {
		if len(list) == 0 {
			return
		}
		title := one
		if len(list) > 1 {
			title = strconv.Itoa(len(list)) + " " + many
		}
		out = append(out, plan.Finding{ID: id, Severity: s, Source: "nodes", Title: title, Detail: someOf(list), Remedy: remedy})
	}
	add("nodes-not-ready", plan.Warn, down, "1 node is not Ready", "nodes are not Ready", "kubectl describe node NAME")
	add("kubelet-skew", plan.Warn, old, "the version of 1 kubelet does not fit the API server", "versions of kubelets do not fit the API server",
		fmt.Sprintf("upgrade kubelets: they may be %d minors older than the API server, and never newer", maxKubeletSkew))
	add("nodes-cordoned", plan.Warn, cordoned, "1 node is cordoned", "nodes are cordoned", "kubectl uncordon NAME, unless an upgrade runs")
	if newest := lifecycle.Newest(); newest.Minor()-running.Minor() > supportedMinors-1 {
		out = append(out, plan.Finding{
			ID: "out-of-support", Severity: plan.Warn, Source: "versions", Title: running.MinorString() + " gets no patches from the Kubernetes project",
			Detail: fmt.Sprintf("the project maintains %d minors, and %s is out", supportedMinors, newest.MinorString()), Remedy: "upgrade, or use the extended support of the cluster's provider",
		})
	}
	return out
}

// someOf lists the first names.
func someOf(list []string) string {
	const most = 5
	if len(list) > most {
		list = append(list[:most:most], fmt.Sprintf("%d more", len(list)-most))
	}
	return words.And(list)
}

// supportedMinors is the number of minors that the Kubernetes project maintains.
const supportedMinors = 3
