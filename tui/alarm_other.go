//go:build !linux

package tui

import "time"

// alarm is a timer that fires at full seconds. It is safe for concurrent use.
type alarm struct{}

// newAlarm returns nil, which works as an alarm.
func newAlarm() *alarm { return nil }

func (*alarm) close() {}

// after is time.After, rounded to full seconds: see nextWake.
func (*alarm) after(d time.Duration) <-chan time.Time { return time.After(nextWake(time.Now(), d)) }
