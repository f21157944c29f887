package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"time"

	"constellation/engine"
	"constellation/engine/check"
	"constellation/engine/cloud/sandboxapi/sandboxexec"
	"constellation/engine/cluster"
	"constellation/engine/kube"
	"constellation/engine/mcpserver"
	"constellation/engine/plan"
	"constellation/engine/rollout"
	"constellation/engine/version"
	"constellation/engine/words"
	"constellation/engine/workspace"
	"constellation/tui"
)

// serveMCP serves a cluster to an assistant. All its connections are read-only.
func serveMCP(ctx context.Context, r tui.MCPRequest) error {
	o := mcpserver.Options{Release: version.Release}
	if r.Workspace == nil {
		o.Secrets = kube.Credentials(r.Selected.Kubeconfig)
		return mcpserver.Serve(ctx, kubeconfigSource{r.Selected, r.Timeout}, o, r.In, r.Out)
	}
	if kubeconfig, err := r.Workspace.Kubeconfig(); err == nil { // else there is no connection
		o.Secrets = kube.Credentials(kubeconfig)
	}
	return mcpserver.Serve(ctx, newWorkspaceSource(r.Workspace), o, r.In, r.Out)
}

// kubeconfigSource is a cluster without a workspace.
type kubeconfigSource struct {
	selected cluster.Selected
	timeout  time.Duration
}

func (k kubeconfigSource) open() (*kube.Foreign, error) {
	f, err := kube.OpenReadOnly(k.selected.Kubeconfig, k.timeout, nil)
	if err != nil {
		return nil, &plan.Error{Op: "use context " + strconv.Quote(k.selected.Context), Err: err, Exit: plan.ExitUsage, Remedy: "correct the kubeconfig"}
	}
	return f, nil
}

func (k kubeconfigSource) Check(ctx context.Context, kubernetes string) (mcpserver.Report, error) {
	f, err := k.open()
	if err != nil {
		return mcpserver.Report{}, err
	}
	c, err := check.ForeignCluster(ctx, f, k.selected, check.ForeignRequest{Kubernetes: kubernetes}, time.Now(), func(plan.Event) {})
	if err != nil {
		return mcpserver.Report{}, err
	}
	_, verdict := c.Verdict()
	out := mcpserver.Report{
		Time: c.Time, Cluster: c.Name, Kubernetes: c.Kubernetes, Target: c.Target, Verdict: verdict, Distribution: c.Distribution.Title, Evidence: c.Distribution.Evidence,
		NotApplicable: map[string]string{}, MissingRules: c.MissingRules, Notes: c.Notes,
	}
	for _, x := range c.NotApplicable {
		out.NotApplicable[x.ID] = x.Why
	}
	for _, h := range c.Hops {
		hop := ""
		if len(c.Hops) > 1 {
			hop = h.From + " to " + h.To
		}
		for _, x := range h.Findings {
			out.Findings = append(out.Findings, mcpserver.Finding{Hop: hop, Finding: x})
		}
	}
	return out, nil
}

// lookLimit bounds the tool status.
const lookLimit = 20 * time.Second

func (k kubeconfigSource) Status(ctx context.Context) (any, error) {
	f, err := k.open()
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, lookLimit)
	defer cancel()
	return check.Look(ctx, f, k.selected, time.Now()), nil
}

func (kubeconfigSource) Runs() ([]plan.RunSummary, error) { return nil, mcpserver.ErrNoWorkspace }

func (kubeconfigSource) PastRun(string) (rollout.PastRun, error) {
	return rollout.PastRun{}, mcpserver.ErrNoWorkspace
}

// workspaceSource is the cluster of a workspace.
type workspaceSource struct{ *engine.Engine }

// newWorkspaceSource returns the source of a workspace. Its engine has read-only clients and no
// client for backups.
func newWorkspaceSource(w *workspace.Workspace) mcpserver.Source {
	log := slog.New(slog.DiscardHandler)
	return workspaceSource{engine.New(w, engine.Deps{
		Connect: func(_ context.Context, kubeconfig []byte) (engine.Cluster, error) {
			return kube.ConnectReadOnly(kubeconfig, log)
		},
		Inspect: func(_ context.Context, kubeconfig []byte) (check.Inspector, error) {
			return kube.ConnectReadOnly(kubeconfig, log)
		},
		WhySilent: sandboxexec.WhySilent, Buildable: sandboxexec.KubernetesVersions(), Log: log,
	})}
}

func (w workspaceSource) Check(ctx context.Context, kubernetes string) (mcpserver.Report, error) {
	r := check.Request{NoDryRun: true}
	if kubernetes != "" {
		if err := r.Kubernetes.UnmarshalText([]byte(kubernetes)); err != nil {
			return mcpserver.Report{}, errors.New("read kubernetes: in a workspace, want a version with its patch, such as v1.36.3")
		}
	}
	c, err := w.Engine.Check(ctx, r, func(plan.Event) {})
	if c.Schema == "" && err != nil {
		return mcpserver.Report{}, err
	}
	out := mcpserver.Report{Time: c.Time, Cluster: c.Cluster, Distribution: "Constellation", Notes: c.Notes, Kubernetes: c.Current.Kubernetes, Target: c.Goal.Kubernetes}
	counts := map[plan.Severity]int{}
	for _, x := range c.Findings {
		counts[x.Severity]++
		out.Findings = append(out.Findings, mcpserver.Finding{Finding: x})
	}
	hop := "no newer version can be reached"
	if len(c.Path) > 0 {
		hop = "the next upgrade leads to " + c.Path[0].To.String()
	}
	out.Verdict = fmt.Sprintf("%s; %s and %s", hop, words.Count(counts[plan.Block], "blocking finding"), words.Count(counts[plan.Warn], "warning"))
	return out, nil
}

func (w workspaceSource) Status(ctx context.Context) (any, error) { return w.Engine.Status(ctx) }
