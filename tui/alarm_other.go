//go:build !linux

package tui

import "time"

// alarm wakes those who wait, at full seconds. It is safe for concurrent use.
type alarm struct{}

// newAlarm returns an alarm, which has to be closed; nil if there can be none.
func newAlarm() *alarm { return nil }

func (*alarm) close() {}

// after is time.After for who need not be woken to the moment: see ringsIn.
func (*alarm) after(d time.Duration) <-chan time.Time { return time.After(ringsIn(time.Now(), d)) }
