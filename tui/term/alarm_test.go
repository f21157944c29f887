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
		{name: "a second after a wake-up", since: 5 * time.Millisecond, d: time.Second, ringsIn: time.Second},
		{name: "a little late", since: 25 * time.Millisecond, d: time.Second, ringsIn: 980 * time.Millisecond},
		{name: "so late that the next second is near", since: 800 * time.Millisecond, d: time.Second, ringsIn: 1205 * time.Millisecond},
		{name: "three seconds", since: 15 * time.Millisecond, d: 3 * time.Second, ringsIn: 2990 * time.Millisecond},
		{name: "much less than a second", since: 5 * time.Millisecond, d: time.Millisecond, ringsIn: time.Second},
		{name: "shortly before a wake-up", since: 2 * time.Millisecond, d: time.Millisecond, ringsIn: 3 * time.Millisecond},
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
