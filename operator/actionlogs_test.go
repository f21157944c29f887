package operator

import "testing"

// TestEveryActionHasALogMessage fails when a new kind of action is not in the table.
func TestEveryActionHasALogMessage(t *testing.T) {
	logsItself := map[actionKind]bool{drainNode: true, startUpgrade: true, upgradeNode: true, publishComponents: true}
	for _, kind := range actionKinds() {
		if none := int(kind) >= len(actionLogs) || actionLogs[kind] == ""; none != logsItself[kind] {
			t.Errorf("%s: has no log message is %v, want %v", kind, none, logsItself[kind])
		}
	}
}
