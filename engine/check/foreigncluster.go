package check

import (
	"context"
	"errors"
	"fmt"
	"slices"
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

// Foreign is a cluster that others made and upgrade.
type Foreign interface {
	// Version returns the version that the API server reports. It is the first request.
	Version(ctx context.Context) (string, error)
	// Facts returns what the distribution is recognised by.
	Facts(ctx context.Context) distribution.Facts
	// Preflight is that of Inspector.
	Preflight(ctx context.Context, hops []PreflightRequest, emit func(plan.Event)) ([][]plan.Finding, error)
	// Title returns the title of a check.
	Title(id string) string
	// MissingRules returns the rules of denied requests as YAML; empty without any.
	MissingRules() string
}

// ForeignRequest describes a check without a workspace.
type ForeignRequest struct {
	// Kubernetes is the target, a minor or a version: "v1.37", "v1.37.2". Empty means the next
	// minor.
	Kubernetes string
	// DryRun allows requests that others could notice: dry-run evictions and requests to
	// kubelets.
	DryRun bool
}

// maxHops bounds the path to a target.
const maxHops = 12

// ForeignCluster checks what stands against upgrades of a cluster that others upgrade, per minor
// up to the target.
func ForeignCluster(ctx context.Context, c Foreign, s cluster.Selected, r ForeignRequest, now time.Time, emit func(plan.Event)) (ClusterCheck, error) {
	out := ClusterCheck{
		Schema: plan.Schema, Time: now.UTC(), CLI: version.Release, Source: SourceCluster, Name: s.Context, Server: s.Server, DryRun: r.DryRun,
		Hops: []HopCheck{}, NotApplicable: []Inapplicable{},
	}
	target, err := parseTarget(r.Kubernetes)
	if err != nil {
		return ClusterCheck{}, err
	}
	text, err := c.Version(ctx)
	if err != nil {
		return ClusterCheck{}, ForeignDown(s, err)
	}
	running, err := version.Parse(text)
	if err != nil {
		return ClusterCheck{}, &plan.Error{Op: "read the version of " + s.Server, Err: err, Remedy: "is this the address of a Kubernetes API server?"}
	}
	facts := c.Facts(ctx)
	if err := ctx.Err(); err != nil {
		return ClusterCheck{}, err
	}
	facts.GitVersion = text
	out.Kubernetes, out.Distribution = text, distribution.Recognise(facts)
	path, err := minors(running, target)
	if err != nil {
		return ClusterCheck{}, err
	}
	out.Target = path[len(path)-1].String()
	requests := make([]PreflightRequest, len(path))
	not := out.Distribution.NotApplicable()
	for i, to := range path {
		from := running
		if i > 0 {
			from = path[i-1]
		}
		requests[i] = PreflightRequest{
			From: from, To: to, ReplaceControlPlanes: !out.Distribution.Managed, ReplaceWorkers: true, DryRun: r.DryRun, Quiet: !r.DryRun, Foreign: true, NotApplicable: not,
		}
		if out.Distribution.Managed {
			requests[i].Surge = surge // managed node groups add a machine before they drain one
		}
	}
	found, err := c.Preflight(ctx, requests, emit)
	if err != nil {
		return ClusterCheck{}, ForeignDown(s, err)
	}
	for i, f := range found {
		from := requests[i].From.String()
		if i == 0 {
			from = text
			if beyond := beyondData(running, path[0], path[len(path)-1], false); beyond != nil {
				f = append(f, *beyond)
			}
		}
		out.Hops = append(out.Hops, HopCheck{From: from, To: path[i].String(), Findings: newIn(out.Hops, f)})
	}
	for id, why := range not {
		out.NotApplicable = append(out.NotApplicable, Inapplicable{ID: id, Title: c.Title(id), Why: why})
	}
	slices.SortFunc(out.NotApplicable, func(a, b Inapplicable) int { return strings.Compare(a.ID, b.ID) })
	out.MissingRules = c.MissingRules()
	if s.Note != "" {
		out.Notes = append(out.Notes, s.Note)
	}
	if out.Distribution.Name == distribution.Constellation {
		out.Notes = append(out.Notes, "This cluster was made by constellation. `constellation upgrade check` in its workspace also checks images, services and releases.")
	}
	if !r.DryRun {
		out.Notes = append(out.Notes, "Evictions were computed from PodDisruptionBudgets. --dry-run-requests tests them by dry run, which calls admission webhooks, and reads from kubelets.")
	}
	return out, nil
}

// newIn returns the findings that no earlier hop has, the worst first.
func newIn(earlier []HopCheck, found []plan.Finding) []plan.Finding {
	out := []plan.Finding{}
	for _, f := range found {
		known := slices.ContainsFunc(earlier, func(h HopCheck) bool {
			return slices.ContainsFunc(h.Findings, func(o plan.Finding) bool { return o.ID == f.ID && o.Title == f.Title })
		})
		if !known {
			out = append(out, f)
		}
	}
	SortFindings(out)
	return out
}

// parseTarget parses a minor or a version. The patch of a minor is 0.
func parseTarget(s string) (version.Version, error) {
	if s == "" {
		return version.Version{}, nil
	}
	full := s
	if strings.Count(s, ".") == 1 {
		full += ".0"
	}
	v, err := version.Parse(full)
	if err != nil || v.Major() != 1 {
		return v, &plan.Error{Op: fmt.Sprintf("read --kubernetes %q", s), Err: errors.New("want a minor or a version"), Exit: plan.ExitUsage, Remedy: fmt.Sprintf("write for example %s or %s", lifecycle.Newest().MinorString(), lifecycle.Newest())}
	}
	return v, nil
}

// minors returns the versions of the hops from running to target.
func minors(running, target version.Version) ([]version.Version, error) {
	if target.IsZero() {
		return []version.Version{version.MustParse(fmt.Sprintf("v1.%d.0", running.Minor()+1))}, nil
	}
	steps := target.Minor() - running.Minor()
	switch {
	case steps < 0:
		return nil, &plan.Error{Op: "check for " + target.MinorString(), Err: fmt.Errorf("the cluster runs %s already", running), Exit: plan.ExitUsage, Remedy: "name a newer version with --kubernetes"}
	case steps > maxHops:
		return nil, &plan.Error{Op: "check for " + target.MinorString(), Err: fmt.Errorf("it is %d minors ahead of %s, want %d at most", steps, running.MinorString(), maxHops), Exit: plan.ExitUsage, Remedy: "name an older version; the data of this program ends at " + lifecycle.Newest().MinorString()}
	case steps == 0:
		return []version.Version{target}, nil
	}
	var out []version.Version
	for m := running.Minor() + 1; m < target.Minor(); m++ {
		out = append(out, version.MustParse("v1."+strconv.Itoa(m)+".0"))
	}
	return append(out, target), nil
}

// kubectl is the command kubectl with the flags that select s.
func kubectl(s cluster.Selected) string {
	c := "kubectl"
	if path := s.Access.Kubeconfig; path != "" {
		c += " --kubeconfig " + ShellQuote(path)
	}
	return c + " --context " + ShellQuote(s.Context)
}

// ForeignDown adds operation and remedy to the error of a cluster that does not answer.
func ForeignDown(s cluster.Selected, err error) error {
	if errors.Is(err, context.Canceled) {
		return err
	}
	out := &plan.Error{Op: "read the cluster of context " + strconv.Quote(s.Context), Err: err}
	switch text := err.Error(); {
	case strings.Contains(text, "getting credentials"), strings.Contains(text, "exec plugin"):
		out.Err = errors.New("the credential plugin of the kubeconfig failed; its own message is above")
		out.Remedy = "log in again with the tool of the cluster's provider, then run the command again"
	case errors.Is(err, cluster.ErrForbidden):
		out.Remedy = "ask an administrator for the rights that `constellation check --print-rbac` lists"
	case errors.Is(err, cluster.ErrDenied):
		out.Remedy = "log in again, or use a kubeconfig whose certificates and credentials are valid"
	case errors.Is(err, cluster.ErrUnreachable), errors.Is(err, context.DeadlineExceeded):
		out.Err = fmt.Errorf("the API server at %s does not answer: %w", s.Server, err)
		out.Remedy = "check the network and the address of the context; `" + kubectl(s) + " version` should answer"
	default:
		out.Remedy = "check that the address of the context, " + s.Server + ", is the one of a Kubernetes API server"
	}
	return out
}

// Verdict is the summary of a check in one sentence, with its worst severity.
func (k *ClusterCheck) Verdict() (plan.Severity, string) {
	n := map[plan.Severity]int{}
	for _, f := range k.Findings() {
		n[f.Severity]++
	}
	to := " to " + k.Target
	switch {
	case n[plan.Block] > 0:
		return plan.Block, words.Count(n[plan.Block], "finding") + " can stop or break the upgrade" + to
	case n[plan.Warn] > 0:
		return plan.Warn, "nothing blocks the upgrade" + to + "; " + words.Count(n[plan.Warn], "warning")
	case n[plan.NotChecked] > 0:
		return plan.NotChecked, "nothing found against the upgrade" + to + "; " + words.Count(n[plan.NotChecked], "check") + " could not run"
	}
	return plan.Info, "nothing found against the upgrade" + to
}
