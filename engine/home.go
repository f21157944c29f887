package engine

import (
	"context"
	"errors"

	"constellation/assets"
	"constellation/engine/cloud/providers"
	"constellation/engine/compat"
	"constellation/engine/plan"
	"constellation/engine/release"
	"constellation/engine/words"
	"constellation/engine/workspace"
)

// Home reads the workspace and says what makes sense to do next. It asks neither cloud
// nor cluster, so it answers at once.
func (e *Engine) Home(ctx context.Context) (Home, error) {
	h := Home{Dir: e.ws.Dir(), Stage: StageEmpty}
	if err := ctx.Err(); err != nil {
		return h, err
	}
	e.readFiles(&h)
	e.suggest(&h)
	return h, nil
}

// problem adds a file that cannot be used.
func (h *Home) problem(id string, err error) {
	f := blockErr("cannot use "+id, err)
	f.ID, f.Source = id, "files"
	h.Problems = append(h.Problems, *f)
}

// config reads the configuration. Machines that `infra create` makes are measured later: until they exist, the file may
// have placeholders.
func (e *Engine) config() (*workspace.Config, error) {
	c, err := e.ws.Config()
	if err == nil || e.ws.Has(workspace.StateFile) {
		return c, err
	}
	unfilled, fillErr := e.ws.UnfilledConfig()
	if fillErr != nil {
		return nil, err
	}
	if p, ok := providers.Named(unfilled.Provider.Name); !ok || !p.Infra {
		return nil, err
	}
	return unfilled, nil
}

// load reads configuration and state. If machines are still to be made, they are what lacks, and not the values of their
// registers.
func (e *Engine) load() (*workspace.Config, *workspace.State, error) {
	c, s, err := e.ws.Load()
	if err != nil && !errors.Is(err, workspace.ErrAdopted) && !e.ws.Has(workspace.StateFile) {
		if _, unfilled := e.config(); unfilled == nil {
			_, err = e.ws.State()
		}
	}
	return c, s, err
}

// readFiles reads configuration, state and runs, and derives the stage of the workspace.
func (e *Engine) readFiles(h *Home) {
	c, err := e.config()
	switch {
	case err == nil:
		h.Config, h.Cluster, h.Stage = c, c.Name, StageConfigured
	case !errors.Is(err, workspace.ErrAbsent):
		h.problem(workspace.ConfigFile, err)
		h.Stage = StageConfigured
	}
	s, err := e.ws.State()
	switch {
	case err == nil:
		h.State, h.Simulated, h.NotAttested = s, s.Simulated(), s.NotAttested()
		if h.Cluster == "" {
			h.Cluster = s.Infrastructure.Name
		}
		h.Adopted = s.Unmanaged()
		switch {
		case h.Adopted:
			h.Stage = StageCluster
		case len(s.ClusterValues.ClusterID) == 0 && s.Enrolled() && c != nil && len(c.NodeGroups) == 0:
			h.Stage = StageConfigured // the first enrolment was interrupted, or all machines were removed
		case len(s.ClusterValues.ClusterID) == 0 && !s.Adopted():
			h.Stage = StageReady
		case !e.ws.Has(workspace.KubeconfigFile):
			h.Stage = StagePartial
		default:
			h.Stage = StageCluster
		}
	case !errors.Is(err, workspace.ErrAbsent):
		h.problem(workspace.StateFile, err)
	}
	if h.Config != nil && h.State != nil {
		if err := e.ws.Belong(h.Config, h.State); err != nil {
			h.problem(workspace.StateFile, err)
		}
	}
	if h.Runs, err = e.Runs(); err != nil {
		h.problem(plan.RunsDir, err)
	}
	if len(h.Runs) > 0 && h.Stage == StageCluster && h.Runs[0].Verb == plan.VerbInit && !h.Runs[0].Complete() && !workspace.Completed(e.ws, h.Runs) {
		h.Stage = StagePartial // the first node is there, the rest may not be
	}
}

// suggest adds the next commands for the stage, and the problem of a lost kubeconfig.
func (e *Engine) suggest(h *Home) {
	suggest := func(title, verb, why string) {
		h.Next = append(h.Next, Suggestion{title, e.command(verb), why})
	}
	// Only the first init of a cluster gets a kubeconfig.
	lost := h.Stage == StagePartial && !e.ws.Has(workspace.KubeconfigFile) && !e.ws.Has(workspace.PendingFile) && workspace.Completed(e.ws, h.Runs)

	if h.Config == nil && len(h.Problems) > 0 {
		suggest("Check the configuration", "config validate", "it cannot be read as it is")
	}
	switch h.Stage {
	case StageEmpty, StageConfigured:
		for _, o := range NextSteps(*h) {
			suggest(o.Title, o.Verb, o.Reason)
		}
	case StageReady:
		suggest("Create the cluster", "init", "machines exist and belong to no cluster yet")
	case StagePartial:
		if lost {
			h.problem(workspace.KubeconfigFile, &plan.Error{Err: e.ws.Absent(workspace.KubeconfigFile), Remedy: workspace.RestoreKubeconfig})
			suggest("Show the machines", "status", "the cluster was complete, and its kubeconfig is missing")
			break
		}
		suggest("Continue creating the cluster", "init", "an init was interrupted; finished steps are skipped")
		suggest("Show the status", "status", "")
	case StageCluster:
		suggest("Show the status", "status", "")
		if h.Adopted {
			suggest("Check what stands against an upgrade", "check", "")
			suggest("Install the operator, which upgrades nodes", "adopt --operator", "without it, upgrades stay with kubeadm")
		} else {
			suggest("Check for upgrades", "upgrade check", newerThan(h.Config))
		}
		var err error
		if h.Backup, err = e.lastBackup(h.State); err == nil && h.Backup.Old(e.now()) {
			why := "there is none yet"
			if h.Backup != nil {
				why = "the last one is " + hours(e.now().Sub(h.Backup.Created)) + " old"
			}
			suggest("Create a backup", "backup create", why)
		}
	}
}

// NextStep is a command that leads to machines and their configuration.
type NextStep struct{ Title, Verb, Reason string }

// NextSteps returns the commands that lead from a workspace without a cluster to one with
// machines.
func NextSteps(h Home) (steps []NextStep) {
	all := providers.Clouds()
	switch h.Stage {
	case StageEmpty:
		for _, p := range all {
			if p.Advice.Up != "" {
				steps = append(steps, NextStep{p.Advice.UpTitle, p.Advice.Up, p.Advice.UpReason})
			}
		}
		for _, p := range all {
			title := "Write a configuration"
			if len(all) > 1 {
				title += " for " + p.Name
			}
			steps = append(steps, NextStep{title, "config generate " + p.Name, "with comments, to be filled in"})
		}
	case StageConfigured:
		for _, p := range all {
			if p.Advice.Up != "" && (h.Config == nil || h.Config.Provider.Name == p.Name) {
				steps = append(steps, NextStep{"Start the machines", p.Advice.Up, "the configuration exists, the machines do not"})
			}
			if p.Infra && h.Config != nil && h.Config.Provider.Name == p.Name {
				steps = append(steps, NextStep{"Show what the machines need", "infra plan", "the configuration exists, the machines do not"})
				steps = append(steps, NextStep{"Create the machines", "infra create", ""})
			}
			if p.Enrolled && h.Config != nil && h.Config.Provider.Name == p.Name {
				steps = append(steps, NextStep{"Prepare the machines", "machine add --group control-plane --ssh USER@HOST", "the configuration exists and lists no machine"})
			}
		}
	}
	return steps
}

// newerThan names the newest release and Kubernetes of this program if the configuration has
// older ones, otherwise it is empty. It reads local data only.
func newerThan(c *workspace.Config) string {
	source, err := release.Embedded(assets.Releases())
	if err != nil || c == nil {
		return ""
	}
	all, err := source.Summaries(context.Background()) // which asks nobody: the releases are embedded
	if err != nil {
		return ""
	}
	r, k := compat.NewestOf(all)
	var parts []string
	if c.Services.Less(r) || !c.Image.IsZero() && c.Image.Less(r) {
		parts = append(parts, "release "+r.String())
	}
	if c.Kubernetes.Less(k) {
		parts = append(parts, "Kubernetes "+k.String())
	}
	if len(parts) == 0 {
		return ""
	}
	if len(parts) == 1 {
		return parts[0] + " is known"
	}
	return words.And(parts) + " are known"
}
