package engine

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"constellation/engine/check"
	"constellation/engine/cloud/providers"
	"constellation/engine/cluster"
	"constellation/engine/plan"
	"constellation/engine/rollout"
	"constellation/engine/words"
)

// notManaged is the one line about what a cluster without our operator does not have.
const notManaged = "The cluster has no NodeVersion: target, replacements and services are shown for clusters of constellation alone."

// foreign is what a Cluster also has if it can be looked at without our kinds.
type foreign interface {
	// Manages reports whether the cluster serves our kinds.
	Manages(ctx context.Context) (bool, error)
	// StuckDrains returns what keeps pods on nodes that they should leave.
	StuckDrains(ctx context.Context) ([]plan.Finding, error)
	// WatchNodes is WatchRollout without our kinds.
	WatchNodes(ctx context.Context, changed func()) error
}

// unmanaged is a cluster without a NodeVersion, as a rollout that has no target.
type unmanaged struct {
	Cluster
	f foreign
}

// Rollout implements [Cluster].
func (unmanaged) Rollout(context.Context) (cluster.Rollout, error) {
	return cluster.Rollout{Unmanaged: true, Observed: true}, nil
}

// Expected implements [Cluster].
func (unmanaged) Expected(context.Context) ([]cluster.ExpectedNode, error) { return nil, nil }

// WatchRollout implements [Cluster].
func (u unmanaged) WatchRollout(ctx context.Context, changed func()) error {
	return u.f.WatchNodes(ctx, changed)
}

// Follow implements [Cluster]: there are no services.
func (unmanaged) Follow(ctx context.Context, _ string, _ time.Time, _ func(cluster.LogLine)) error {
	<-ctx.Done()
	return ctx.Err()
}

// undecided is a cluster whose API server has not answered yet: it may have a NodeVersion or not.
type undecided struct {
	Cluster
	f foreign

	mu    sync.Mutex
	found Cluster // nil until it is known
}

// decide returns the cluster as it was found.
func (u *undecided) decide(ctx context.Context) (Cluster, error) {
	u.mu.Lock()
	found := u.found
	u.mu.Unlock()
	if found != nil {
		return found, nil
	}
	found, err := find(ctx, u.Cluster, u.f)
	if err != nil {
		return nil, err
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	u.found = found
	return found, nil
}

// Rollout implements [Cluster].
func (u *undecided) Rollout(ctx context.Context) (cluster.Rollout, error) {
	k, err := u.decide(ctx)
	if err != nil {
		return cluster.Rollout{}, err
	}
	return k.Rollout(ctx)
}

// Expected implements [Cluster].
func (u *undecided) Expected(ctx context.Context) ([]cluster.ExpectedNode, error) {
	k, err := u.decide(ctx)
	if err != nil {
		return nil, err
	}
	return k.Expected(ctx)
}

// WatchRollout implements [Cluster].
func (u *undecided) WatchRollout(ctx context.Context, changed func()) error {
	k, err := u.decide(ctx)
	if err != nil {
		return err
	}
	return k.WatchRollout(ctx, changed)
}

// Follow implements [Cluster].
func (u *undecided) Follow(ctx context.Context, service string, since time.Time, line func(cluster.LogLine)) error {
	k, err := u.decide(ctx)
	if err != nil {
		return err
	}
	return k.Follow(ctx, service, since, line)
}

// find returns k, or what stands for it if it has no NodeVersion. The error means that the API
// server did not answer.
func find(ctx context.Context, k Cluster, f foreign) (Cluster, error) {
	silent := func(err error) bool {
		return errors.Is(err, cluster.ErrUnreachable) || err != nil && ctx.Err() != nil
	}
	manages, err := f.Manages(ctx)
	if silent(err) {
		return nil, err
	}
	if err != nil || manages {
		if _, err := k.NodeTarget(ctx); silent(err) {
			return nil, err
		} else if !errors.Is(err, cluster.ErrAbsent) {
			return k, nil
		}
	}
	return unmanaged{k, f}, nil
}

// asFound returns k, or what stands for it if it has no NodeVersion. A cluster that does not answer
// decides this with its first answer.
func asFound(ctx context.Context, k Cluster) Cluster {
	f, ok := k.(foreign)
	if !ok {
		return k
	}
	found, err := find(ctx, k, f)
	if err != nil {
		return &undecided{Cluster: k, f: f}
	}
	return found
}

// A watch looks for the causes of stuck drains every stuckEvery at most, for stuckLimit at most.
const (
	stuckEvery = 30 * time.Second
	stuckLimit = 10 * time.Second
)

// advice remembers what a watch knows about stuck drains.
type advice struct {
	at    time.Time
	found []plan.Finding
}

// look returns the advice for an observation of k: none if no node is cordoned or not ready. An
// error keeps the previous advice until the next list.
func (a *advice) look(ctx context.Context, k Cluster, now *rollout.View) []plan.Finding {
	var f foreign
	switch k := k.(type) {
	case unmanaged:
		f = k.f
	case *undecided:
		f = k.f
	default:
		return nil
	}
	if !now.Disturbed {
		a.found = nil
		return nil
	}
	if a.at.IsZero() || now.At.Sub(a.at) >= stuckEvery {
		a.at = now.At
		ctx, cancel := context.WithTimeout(ctx, stuckLimit)
		defer cancel()
		if found, err := f.StuckDrains(ctx); err == nil {
			a.found = found
		}
	}
	return a.found
}

// NodePlanStatus is a Plan of upgrade.cattle.io in a status.
type NodePlanStatus struct {
	Name    string `json:"name"`
	Version string `json:"version,omitempty"`
	State   string `json:"state"`
	Text    string `json:"text,omitempty"`
	// Total nodes are selected, of which Done have the version.
	Total    int64 `json:"total"`
	Done     int64 `json:"done"`
	Applying int64 `json:"applying"`
	Failed   int64 `json:"failed"`
}

// StatusOf describes the present state of a cluster without a workspace. If its API server does
// not answer, Reachable is false. The error is about the kubeconfig.
func (e *Engine) StatusOf(ctx context.Context, s cluster.Selected) (Status, error) {
	st := Status{
		Schema: plan.Schema, Cluster: s.Context, Server: s.Server, Time: e.now().UTC(), Stage: StageCluster,
		Nodes: []cluster.Node{}, Machines: []Machine{}, Health: []plan.Finding{}, Counts: map[string]int64{"nodes": 0, "ready": 0, "current": 0, "machines": 0, "wanted": 0, "cordoned": 0},
	}
	k, err := e.connect(cluster.WithRequestTimeout(ctx, s.RequestTimeout), s.Kubeconfig)
	if err != nil {
		return Status{}, &plan.Error{Op: fmt.Sprintf("use context %q", s.Context), Err: err, Exit: plan.ExitUsage, Remedy: "correct the kubeconfig"}
	}
	ctx, cancel := context.WithTimeout(ctx, lookLimit)
	defer cancel()
	if st.APIServer, err = k.Version(ctx); err != nil {
		if errors.Is(err, context.Canceled) {
			return Status{}, err
		}
		down := check.ForeignDown(s, err)
		st.Problem, st.Remedy = down.Error(), plan.Remedy(down)
		return st, nil
	}
	st.Reachable = true
	if s.Note != "" {
		st.Notes = append(st.Notes, s.Note)
	}
	k = asFound(ctx, k)
	_, st.Unmanaged = k.(unmanaged)
	var mu sync.Mutex // of st
	unread := func(what string, err error) {
		mu.Lock()
		defer mu.Unlock()
		if err != nil && !errors.Is(err, cluster.ErrAbsent) {
			st.Notes = append(st.Notes, fmt.Sprintf("%s could not be read: %v", what, err))
		}
	}
	var nodes []*cluster.Node
	var target cluster.NodeTarget
	var stuck []plan.Finding
	var running sync.WaitGroup
	running.Go(func() {
		var err error
		nodes, err = k.Nodes(ctx)
		unread("nodes", err)
	})
	running.Go(func() {
		plans, err := k.Plans(ctx)
		for _, p := range plans {
			st.Plans = append(st.Plans, NodePlanStatus{p.Name, p.Version, p.State, p.Text, p.Total, p.Done, p.Applying, p.Failed})
		}
		unread("Plans of upgrade.cattle.io", err)
	})
	if u, ok := k.(unmanaged); ok {
		running.Go(func() {
			var err error
			stuck, err = u.f.StuckDrains(ctx)
			unread("drains", err)
		})
		st.Notes = append(st.Notes, notManaged)
	} else {
		running.Go(func() {
			var err error
			target, err = k.NodeTarget(ctx)
			st.Target, st.Conditions = plan.Target{Image: target.ImageVersion, Kubernetes: target.Kubernetes}, target.Conditions
			unread("NodeVersion", err)
		})
		running.Go(func() {
			var err error
			st.Services, err = k.Services(ctx)
			unread("services", err)
		})
	}
	running.Wait()
	slices.Sort(st.Notes)
	st.judgeNodes(nodes, target)
	st.Health = append(st.Health, stuck...)
	return st, nil
}

// judgeNodes counts the nodes and adds those that are not ready or are cordoned to the health.
func (st *Status) judgeNodes(nodes []*cluster.Node, target cluster.NodeTarget) {
	var late, cordoned []string
	for _, shared := range nodes {
		n := *shared
		n.ImageVersion = providers.ImageVersion(n.Image)
		if n.Image != "" && n.Image == target.Image {
			n.ImageVersion = target.ImageVersion
		}
		st.Nodes = append(st.Nodes, n)
		if n.State == plan.NodeReady {
			st.Counts["ready"]++
		} else {
			late = append(late, named(n.Name, n.Message))
		}
		if n.Cordoned {
			cordoned = append(cordoned, n.Name)
		}
	}
	st.Counts["nodes"], st.Counts["cordoned"] = int64(len(nodes)), int64(len(cordoned))
	if len(late) > 0 {
		st.Health = append(st.Health, plan.Finding{ID: "nodes-ready", Severity: plan.Warn, Title: fmt.Sprintf("%d of %s not ready", len(late), words.Count(len(nodes), "node")), Detail: some(late), Source: "health"})
	}
	if len(cordoned) > 0 {
		st.Health = append(st.Health, plan.Finding{ID: "cordoned-nodes", Severity: plan.Warn, Title: fmt.Sprintf("%d of %s cordoned", len(cordoned), words.Count(len(nodes), "node")), Detail: some(cordoned), Source: "health"})
	}
}

// FolderOf is the name of a folder for the backups of a context.
func FolderOf(context string) string {
	safe := strings.Map(func(r rune) rune {
		if r < 128 && (r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune("._@-", r)) {
			return r
		}
		return '-'
	}, context)
	return cmp.Or(strings.TrimLeft(safe, ".-"), "cluster")
}
