//go:build !linux

package term

import "time"

// Alarm is a timer that fires at full seconds. It is safe for concurrent use.
type Alarm struct{}

// NewAlarm returns nil, which works as an Alarm.
func NewAlarm() *Alarm { return nil }

func (*Alarm) Close() {}

// After is time.After, rounded to full seconds: see nextWake.
func (*Alarm) After(d time.Duration) <-chan time.Time { return time.After(nextWake(time.Now(), d)) }
