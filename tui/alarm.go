package tui

import "time"

// afterSecond is how long after a full second an alarm rings: a clock that is read then shows
// the next one for sure.
const afterSecond = 5 * time.Millisecond

// ringsIn is in how long an alarm rings for who wants to wait for d: about then, just after a
// full second. All that waits is woken together that way, and so is the computer.
func ringsIn(now time.Time, d time.Duration) time.Duration {
	now = now.Round(0) // by the clock that is shown
	at := now.Add(d - afterSecond).Round(time.Second).Add(afterSecond)
	if !at.After(now) {
		at = at.Add(time.Second)
	}
	return at.Sub(now)
}
