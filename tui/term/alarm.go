package term

import "time"

// wakeOffset is the offset of wake-ups from a full second, so that clocks read then already
// show the new second.
const wakeOffset = 5 * time.Millisecond

// nextWake rounds d such that the wait ends just after a full second. All timers then fire
// together, which saves CPU wake-ups.
func nextWake(now time.Time, d time.Duration) time.Duration {
	now = now.Round(0) // the wall clock, which is on the screen
	at := now.Add(d - wakeOffset).Round(time.Second).Add(wakeOffset)
	if !at.After(now) {
		at = at.Add(time.Second)
	}
	return at.Sub(now)
}
