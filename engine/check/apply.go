package check

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"constellation/engine/plan"
	"constellation/engine/version"
)

// IDs of findings of `upgrade apply`.
const (
	FindingNoBackup = "no-backup"
	findingLocal    = "local-data"
)

// Services is the requested release of the services.
func (c *Run) Services() version.Version {
	if !c.Request.Release.IsZero() {
		return c.Request.Release
	}
	return c.Config.Services
}

// Current reports that there is nothing to apply.
func (c *Run) Current() error {
	what := fmt.Sprintf("cluster %s runs release %s with Kubernetes %s", c.Config.Name, c.Now.Services, c.Now.Kubernetes)
	e := &plan.Error{Err: errors.New(what + ": no newer version is reachable"), Remedy: "`constellation upgrade check` lists the versions", Exit: plan.ExitNothing}
	if c.there {
		e.Err = errors.New(what + ": the cluster runs the requested versions already")
	}
	return e
}

// JudgeApply adds the findings against applying the hop to those against preparing it.
func (c *Run) JudgeApply(skips func(step string) bool) {
	if skips(StepBackup) {
		c.Find(WithoutBackup)
	} else {
		c.drop(plan.BackupAge) // apply makes a backup
	}
	if skips(StepAgents) && len(c.Enrols) > 0 {
		c.drop(findingEnrolled)
		c.Find(AgentsFinding(c.Enrols, c.Catalogue, "leave `--skip-phases "+StepAgents+"` out: the hop then installs the release keys and the verifying agent in place"))
	}
	if skips(plan.StepCharts) && !skips(StepTarget) && !c.Now.Services.Is(c.Hop.Planned().Services) {
		c.Find(plan.Finding{
			ID: "services-first", Severity: plan.Block, Source: "release", Title: fmt.Sprintf("services %s run, and the hop needs those of release %s", c.Now.Services, c.Hop.To.Release),
			Detail: "the operator and the join service in the cluster do the work, and those of another release may not support the hop",
			Remedy: "leave `--skip-phases " + plan.StepCharts + "` out",
		})
	}
}

// Name marks the findings that the user must acknowledge by name. Those that block only until
// acknowledged become warnings: the plan prompts for the name.
func (c *Run) Name() {
	for i := range c.Out.Findings {
		f := &c.Out.Findings[i]
		lost := func(o string) bool { return strings.HasPrefix(o, "persistentvolume") }
		switch {
		case f.Severity == plan.Block && slices.Contains(Acknowledgeable, f.ID):
			f.Severity, f.Named = plan.Warn, true
		case f.Named:
		case f.Severity == plan.Warn && (f.ID == FindingNoBackup || f.ID == findingLocal && slices.ContainsFunc(f.Objects, lost)):
			f.Named = true
		default:
			continue
		}
		if !slices.Contains(c.Acknowledged, f.ID) {
			f.Remedy = strings.TrimPrefix(f.Remedy+"; to accept it, `--ack "+f.ID+"`", "; ")
		}
	}
}

// WithoutBackup is the finding about a skipped backup.
var WithoutBackup = plan.Finding{
	ID: FindingNoBackup, Severity: plan.Warn, Source: "backup", Title: "no backup is made: what the upgrade destroys cannot be restored",
	Remedy: "leave `--skip-phases " + StepBackup + "` out",
}
