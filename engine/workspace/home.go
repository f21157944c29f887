package workspace

import (
	"os"
	"slices"

	"constellation/engine/plan"
)

// RestoreKubeconfig is what helps against a kubeconfig that is gone: the first node
// gives it away once.
const RestoreKubeconfig = "restore the file from your copy: the first machine gave it away once, and `init` cannot get it again. If it is lost, take the machines down and up again"

// Completed reports whether one of the runs made the cluster of this workspace complete.
// A run that ended before the master secret was written was of an earlier cluster.
func Completed(w *Workspace, runs []plan.RunSummary) bool {
	info, err := os.Stat(w.Path(MasterSecretFile))
	if err != nil {
		return false
	}
	return slices.ContainsFunc(runs, func(r plan.RunSummary) bool {
		return r.Verb == plan.VerbInit && r.Complete() && !r.Ended.Before(info.ModTime())
	})
}
