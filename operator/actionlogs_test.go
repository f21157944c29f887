package operator

import "testing"

// TestEveryActionHasANameAndALogMessage fails when a new kind of action is in no table.
func TestEveryActionHasANameAndALogMessage(t *testing.T) {
	logsItself := map[actionKind]bool{drainNode: true, startUpgrade: true, upgradeNode: true, publishComponents: true}
	for kind := pauseAutoscaler; kind <= publishComponents; kind++ {
		if int(kind) >= len(actionNames) || actionNames[kind] == "" {
			t.Errorf("action %d has no name", kind)
			continue
		}
		if none := int(kind) >= len(actionLogs) || actionLogs[kind] == ""; none != logsItself[kind] {
			t.Errorf("%s: has no log message is %v, want %v", actionNames[kind], none, logsItself[kind])
		}
	}
	if got, want := len(actionNames), int(publishComponents)+1; got != want {
		t.Errorf("%d names, want %d", got, want)
	}
}
