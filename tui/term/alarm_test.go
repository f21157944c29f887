package term

import (
	"testing"
	"time"
)

func TestNextWakeIsJustAfterAFullSecond(t *testing.T) {
	full := time.Date(2026, 11, 21, 7, 5, 1, 0, time.UTC)
	for _, tt := range []struct {
		name       string
		since      time.Duration // since the full second
		d, ringsIn time.Duration
	}{
		{"a second after a wake-up", 5 * time.Millisecond, time.Second, time.Second},
		{"a little late", 25 * time.Millisecond, time.Second, 980 * time.Millisecond},
		{"so late that the next second is near", 800 * time.Millisecond, time.Second, 1205 * time.Millisecond},
		{"three seconds", 15 * time.Millisecond, 3 * time.Second, 2990 * time.Millisecond},
		{"much less than a second", 5 * time.Millisecond, time.Millisecond, time.Second},
		{"shortly before a wake-up", 2 * time.Millisecond, time.Millisecond, 3 * time.Millisecond},
	} {
		if got := nextWake(full.Add(tt.since), tt.d); got != tt.ringsIn {
			t.Errorf("%s: in %s, want %s", tt.name, got, tt.ringsIn)
		}
	}
}

// All waiters are woken, also those added while others wait, and none too early.
func TestAlarmWakesAll(t *testing.T) {
	a := NewAlarm()
	defer a.Close()
	begun := time.Now()
	later, soon := a.After(2*time.Second), a.After(time.Millisecond)
	waited := map[string]time.Duration{"soon": (<-soon).Sub(begun)}
	again := a.After(time.Millisecond)
	waited["again"] = (<-again).Sub(begun)
	waited["later"] = (<-later).Sub(begun)
	first := nextWake(begun, time.Millisecond)
	for name, least := range map[string]time.Duration{"soon": first, "again": first + 900*time.Millisecond, "later": nextWake(begun, 2*time.Second)} {
		if waited[name] < least {
			t.Errorf("%s: woken after %s, want %s at least", name, waited[name], least)
		}
	}
}
