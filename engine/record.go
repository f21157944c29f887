package engine

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"constellation/engine/plan"
	"constellation/engine/rollout"
	"constellation/engine/workspace"
)

// Record returns the path of the events of a run of this workspace: of the ID, or of its
// beginning if there is but one like that, or of the newest run if the ID is "last".
func (e *Engine) Record(run string) (path string, err error) {
	s, err := e.run(run)
	if err != nil {
		return "", err
	}
	return filepath.Join(s.Dir, plan.EventsFile), nil
}

// run finds a run.
func (e *Engine) run(id string) (plan.RunSummary, error) {
	all, err := e.Runs()
	if err != nil {
		return plan.RunSummary{}, err
	}
	var found []plan.RunSummary
	for _, s := range all {
		if s.ID == id || id == "last" && len(found) == 0 {
			return s, nil
		}
		if id != "" && strings.HasPrefix(s.ID, id) {
			found = append(found, s)
		}
	}
	fail := &plan.Error{Op: fmt.Sprintf("find run %q", id), Err: errors.New("this workspace has no record of it"), Remedy: "`constellation history` lists the runs", Exit: plan.ExitUsage}
	switch len(found) {
	case 1:
		return found[0], nil
	case 0:
		return plan.RunSummary{}, fail
	}
	fail.Err = fmt.Errorf("%d runs begin like that", len(found))
	return plan.RunSummary{}, fail
}

// PastRun reads the record of a run; see Record for its ID.
func (e *Engine) PastRun(id string) (rollout.PastRun, error) {
	s, err := e.run(id)
	if err != nil {
		return rollout.PastRun{}, err
	}
	f, err := os.Open(filepath.Join(s.Dir, plan.EventsFile))
	if err != nil {
		return rollout.PastRun{}, &plan.Error{Op: "read the record of " + s.ID, Err: workspace.WithoutPath(err)}
	}
	defer f.Close()
	out, err := rollout.ReadPastRun(s, f)
	if err != nil {
		return rollout.PastRun{}, &plan.Error{Op: "read the record of " + s.ID, Err: workspace.WithoutPath(err)}
	}
	return out, nil
}
