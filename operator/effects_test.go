package operator

import (
	"testing"

	"constellation/operator/decision"
)

// TestEveryActionHasAnEffect fails when a new kind of action is not in the table.
func TestEveryActionHasAnEffect(t *testing.T) {
	kinds := decision.ActionKinds()
	if last := int(kinds[len(kinds)-1]); len(effects) != last+1 {
		t.Fatalf("the table has %d rows, want %d", len(effects), last+1)
	}
	for _, kind := range kinds {
		switch e := effects[kind].(type) {
		case write:
			if e.send == nil || e.log == "" {
				t.Errorf("%s: a write needs send and log", kind)
			}
		case start:
			if e == nil {
				t.Errorf("%s: start is nil", kind)
			}
		default:
			t.Errorf("%s: has no effect", kind)
		}
	}
}
