package operator

import (
	"slices"
	"testing"

	"constellation/operator/decision"
)

// TestEveryActionHasAnEffect fails when a new kind of action is not in the table.
func TestEveryActionHasAnEffect(t *testing.T) {
	logsItself := []decision.ActionKind{decision.DrainNode, decision.StartUpgrade, decision.UpgradeNode, decision.PublishComponents}
	kinds := decision.ActionKinds()
	if last := int(kinds[len(kinds)-1]); len(effects) != last+1 {
		t.Fatalf("the table has %d rows, want %d", len(effects), last+1)
	}
	for _, kind := range kinds {
		e := effects[kind]
		if (e.write == nil) == (e.apply == nil) {
			t.Errorf("%s: one of write and apply must be set", kind)
		}
		if e.event != nil && e.write == nil {
			t.Errorf("%s: events are recorded for writes alone", kind)
		}
		if none := e.log == ""; none != slices.Contains(logsItself, kind) {
			t.Errorf("%s: has no log message is %v, want %v", kind, none, !none)
		}
	}
}
