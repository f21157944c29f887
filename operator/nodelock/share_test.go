package nodelock

import (
	"testing"
	"time"
)

func TestParseNote(t *testing.T) {
	at := time.Date(2026, 11, 28, 9, 0, 0, 0, time.UTC)
	for _, tt := range []struct {
		name, note, plan string
	}{
		{name: "as written", note: Note("system-upgrade/os", at), plan: "system-upgrade/os"},
		{name: "empty", note: ""},
		{name: "no time", note: "system-upgrade/os"},
		{name: "another time format", note: "system-upgrade/os 1732784400"},
		{name: "no namespace", note: "/os 2026-11-28T09:00:00Z"},
		{name: "no name", note: "system-upgrade/ 2026-11-28T09:00:00Z"},
		{name: "no slash", note: "os 2026-11-28T09:00:00Z"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			plan, when := ParseNote(tt.note)
			if plan != tt.plan || plan != "" && !when.Equal(at) {
				t.Errorf("ParseNote(%q) = %q, %s", tt.note, plan, when)
			}
		})
	}
}
