package tui

import "time"

// afterSecond is the offset of wake-ups from a full second, so that clocks read then already
// show the new second.
const afterSecond = 5 * time.Millisecond

// ringsIn rounds d such that the wait ends just after a full second. All timers then fire
// together, which saves CPU wake-ups.
func ringsIn(now time.Time, d time.Duration) time.Duration {
	now = now.Round(0) // the wall clock, which is on the screen
	at := now.Add(d - afterSecond).Round(time.Second).Add(afterSecond)
	if !at.After(now) {
		at = at.Add(time.Second)
	}
	return at.Sub(now)
}
