package operator

import (
	"testing"

	"constellation/operator/decision"
)

// TestEveryActionHasALogMessage fails when a new kind of action is not in the table.
func TestEveryActionHasALogMessage(t *testing.T) {
	logsItself := map[decision.ActionKind]bool{decision.DrainNode: true, decision.StartUpgrade: true, decision.UpgradeNode: true, decision.PublishComponents: true}
	for _, kind := range decision.ActionKinds() {
		if none := int(kind) >= len(actionLogs) || actionLogs[kind] == ""; none != logsItself[kind] {
			t.Errorf("%s: has no log message is %v, want %v", kind, none, logsItself[kind])
		}
	}
}
