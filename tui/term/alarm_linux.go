package term

import (
	"os"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Alarm is a timer that fires at full seconds for any number of waiters. A timer of the Go
// runtime wakes at least two threads, a kernel timer (timerfd) only one. It is safe for
// concurrent use.
type Alarm struct {
	f   *os.File
	raw syscall.RawConn
	fd  int

	mu     sync.Mutex
	closed bool
	due    []waiter
}

type waiter struct {
	at time.Time
	c  chan time.Time
}

// NewAlarm returns an alarm; the caller must close it. Without a timerfd it returns nil, which works as well.
func NewAlarm() *Alarm {
	fd, err := unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_NONBLOCK|unix.TFD_CLOEXEC)
	if err != nil {
		return nil
	}
	a := &Alarm{f: os.NewFile(uintptr(fd), "timer"), fd: fd}
	if a.raw, err = a.f.SyscallConn(); err != nil || a.f.SetDeadline(time.Time{}) != nil {
		a.f.Close()
		return nil
	}
	a.arm(time.Now())
	go func() {
		for a.raw.Read(expired) == nil {
			a.wakeDue()
		}
	}()
	return a
}

// Close releases the timer and ends all waits.
func (a *Alarm) Close() {
	if a == nil {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.closed = true
	a.f.Close()
}

// expired reports whether a timer has expired. Reading the timer would also tell, but wake another
// thread of the runtime.
func expired(fd uintptr) bool {
	var left unix.ItimerSpec
	return unix.TimerfdGettime(int(fd), &left) != nil || left.Value == (unix.Timespec{})
}

// After is time.After, rounded to full seconds: see nextWake.
func (a *Alarm) After(d time.Duration) <-chan time.Time {
	now := time.Now()
	d = nextWake(now, d)
	if a == nil {
		return time.After(d)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	c := make(chan time.Time, 1)
	a.due = append(a.due, waiter{now.Add(d), c})
	a.arm(now)
	return c
}

// wakeDue wakes the waiters that are due.
func (a *Alarm) wakeDue() {
	a.mu.Lock()
	defer a.mu.Unlock()
	now := time.Now()
	a.due = slices.DeleteFunc(a.due, func(s waiter) bool {
		if s.at.After(now) {
			return false
		}
		s.c <- now
		return true
	})
	a.arm(now)
}

// arm arms the timer for the next waiter. The caller holds mu, except in NewAlarm.
func (a *Alarm) arm(now time.Time) {
	if a.closed {
		return
	}
	next := time.Hour // always arm it: a disarmed timer looks expired
	for _, s := range a.due {
		next = min(next, max(s.at.Sub(now), 1))
	}
	_ = unix.TimerfdSettime(a.fd, 0, &unix.ItimerSpec{Value: unix.NsecToTimespec(int64(next))}, nil)
}
