package tui

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"constellation/engine/check"
	"constellation/engine/cluster"
	"constellation/engine/findings"
	"constellation/engine/plan"
	"constellation/engine/workspace"
	"constellation/tui/view"
)

// securityDocument is the JSON output of `check --security`.
type securityDocument struct {
	*check.Security
	// Findings are the failed checks, by object, and those that are not visible; a baseline is read from here.
	Findings []findings.Judged `json:"findings"`
	// Failing is the number of findings that --fail-on counts, Exit the exit code.
	Failing int `json:"failing"`
	Exit    int `json:"exit"`
}

// runSecurity runs `check --security`.
func runSecurity(ctx context.Context, s *session, o clusterCheckOptions) error {
	if o.printRBAC {
		fmt.Fprint(s.out, s.Clusters.SecurityRole())
		return nil
	}
	var explained *check.SecurityCheck
	if o.explain != "" {
		var err error
		if explained, err = findSecurityCheck(s.Clusters.SecurityChecks(), o.explain); err != nil {
			return err
		}
		o.explain = explained.ID
	}
	rules, err := o.rules(s.Now())
	if err != nil {
		return err
	}
	sel, err := selectedForSecurity(s, o.Access)
	if err != nil {
		return explainAlone(s, explained, err, o.format)
	}
	ctx, stop := s.signals(ctx)
	defer stop()
	progress := newCheckProgress(s)
	k, err := s.Clusters.Security(ctx, sel, o.RequestTimeout, o.explain, progress.event)
	progress.live.Clear()
	if err != nil {
		if ctx.Err() != nil {
			return err
		}
		return explainAlone(s, explained, err, o.format)
	}
	if ws, _, err := s.workspace(); err == nil && ws.Has(workspace.StateFile) && !o.Given() {
		if _, state, err := ws.Load(); err == nil {
			k.Simulated, k.NotAttested = state.Simulated(), state.NotAttested()
		}
	}
	return writeSecurity(s, &k, o, rules)
}

// findSecurityCheck returns the check with an ID, or with a number of CIS.
func findSecurityCheck(list []check.SecurityCheck, id string) (*check.SecurityCheck, error) {
	at := slices.IndexFunc(list, func(c check.SecurityCheck) bool { return c.ID == id || c.ID == "cis-"+id || c.ID == "nsa-"+id })
	if at < 0 {
		return nil, &plan.Error{
			Op: fmt.Sprintf("explain %q", id), Err: errors.New("no check has this ID"), Exit: plan.ExitUsage,
			Remedy: "name one such as " + list[0].ID + "; the list is in docs/security-checks.md",
		}
	}
	return &list[at], nil
}

// explainAlone prints what a check demands if the cluster cannot be read, and returns the error.
func explainAlone(s *session, c *check.SecurityCheck, err error, f pipelineFormat) error {
	if c != nil && f == pipelineFormat(text) {
		s.print(view.SecurityExplained(s.page(), s.answerWidth(), "", &check.SecurityResult{SecurityCheck: *c}))
	}
	return err
}

// selectedForSecurity returns the cluster of an access: in a workspace, its own.
func selectedForSecurity(s *session, a cluster.Access) (cluster.Selected, error) {
	sel, err := selectCluster(s, "check", a, true)
	if err != nil {
		return cluster.Selected{}, err
	}
	if sel != nil {
		return *sel, nil
	}
	ws, _, err := s.workspace()
	if err != nil {
		return cluster.Selected{}, err
	}
	switch {
	case ws.Has(workspace.KubeconfigFile):
		a.Kubeconfig = ws.Path(workspace.KubeconfigFile)
	case ws.Has(workspace.ConfigFile):
		return cluster.Selected{}, &plan.Error{
			Op: "check the security of the cluster", Err: errors.New("this workspace has no " + workspace.KubeconfigFile), Exit: plan.ExitUsage, Remedy: "run `constellation init` first, or name another cluster with --kubeconfig",
		}
	}
	return s.Clusters.Select(a)
}

// writeSecurity prints how a cluster stands against the guides.
func writeSecurity(s *session, k *check.Security, o clusterCheckOptions, rules *findings.Rules) error {
	sp := formatterOf(s, o.Access, &cluster.Selected{})
	judged, notes := rules.Judge(k.Findings())
	k.Notes = append(k.Notes, notes...)
	k.Notes = append(k.Notes, ignoredNotes(judged)...)
	d := securityDocument{Security: k, Findings: judged, Failing: len(findings.Threshold(o.failOn).Failing(judged))}
	if d.Failing > 0 {
		d.Exit = plan.ExitBlocked
	}
	var err error
	pg := s.page()
	pg.Commands = sp
	switch {
	case o.format == pipelineFormat(asJSON):
		err = document(s.out, d)
	case o.format == asSARIF:
		err = writeSARIF(s.out, k.CLI, rules, judged)
	case o.explain != "" && len(k.Results) == 1:
		s.print(view.SecurityExplained(pg, s.answerWidth(), k.Name+view.Marked(k.Simulated, k.NotAttested, ", "), &k.Results[0]))
	case o.format == pipelineFormat(asMarkdown):
		_, err = fmt.Fprint(s.out, view.SecurityMarkdown(k, sp))
	default:
		s.print(view.SecurityCheck(pg, s.answerWidth(), k))
	}
	if err == nil && d.Exit != plan.ExitDone {
		err = exitStatus(d.Exit)
	}
	return err
}

// ignoredNotes say which failed checks do not count for --fail-on.
func ignoredNotes(judged []findings.Judged) (out []string) {
	var ignored []string
	known := 0
	for i := range judged {
		j := &judged[i]
		if j.Severity != plan.Block && j.Severity != plan.Warn {
			continue
		}
		switch {
		case j.Ignored != nil:
			what := j.ID
			if len(j.Objects) > 0 {
				what += " " + j.Objects[0]
			}
			ignored = append(ignored, fmt.Sprintf("%s is ignored until %s: %s.", what, j.Ignored.Until, strings.TrimSuffix(j.Ignored.Reason, ".")))
		case j.Known:
			known++
		}
	}
	if known > 0 {
		out = append(out, fmt.Sprintf("The baseline has %d of the failures.", known))
	}
	return append(out, ignored...)
}
