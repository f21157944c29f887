package metadata

import (
	"context"
	"sync"
	"time"

	"constellation/engine/cloud/notice"
	"constellation/internal/delay"
)

// Entries that announce something, and what they have.
const (
	preemptedEntry   = "instance/preempted"
	maintenanceEntry = "instance/maintenance-event"

	isPreempted  = "TRUE"
	isTerminated = "TERMINATE_ON_HOST_MAINTENANCE"
	isMigrated   = "MIGRATE_ON_HOST_MAINTENANCE"
)

// Documented times from an announcement until it happens: https://cloud.google.com/compute/docs/instances/preemptible and
// https://cloud.google.com/compute/docs/metadata/getting-live-migration-notice. Machines with a GPU have an hour.
const (
	preemptedWithin   = 30 * time.Second
	maintenanceWithin = time.Minute
)

// retryMin and retryMax bound the pause after an error.
const (
	retryMin = time.Second
	retryMax = 15 * time.Second
)

// Notices is the notice.Source of the machine.
func (s Server) Notices(ctx context.Context, told func(notice.Notice), failed func(error)) {
	var (
		mu                     sync.Mutex
		preempted, maintenance string
		last                   notice.Notice
		once                   bool
	)
	set := func(entry *string, text string) {
		mu.Lock()
		defer mu.Unlock()
		*entry = text
		if n := announced(preempted, maintenance); preempted != "" && maintenance != "" && (n != last || !once) {
			last, once = n, true
			told(n)
		}
	}
	var all sync.WaitGroup
	all.Go(func() { s.follow(ctx, preemptedEntry, func(text string) { set(&preempted, text) }, failed) })
	all.Go(func() { s.follow(ctx, maintenanceEntry, func(text string) { set(&maintenance, text) }, failed) })
	all.Wait()
}

// announced returns what the values of both entries mean.
func announced(preempted, maintenance string) notice.Notice {
	switch {
	case preempted == isPreempted:
		return notice.Notice{Reason: notice.Preempted, Within: preemptedWithin}
	case maintenance == isTerminated:
		return notice.Notice{Reason: notice.HostTerminates, Within: maintenanceWithin}
	case maintenance == isMigrated:
		return notice.Notice{Reason: notice.HostMigrates, Within: maintenanceWithin}
	}
	return notice.Notice{}
}

// follow calls changed with an entry, and after each change, until ctx ends.
func (s Server) follow(ctx context.Context, path string, changed func(text string), failed func(error)) {
	last, pause := "", retryMin
	for ctx.Err() == nil {
		text, version, err := s.change(ctx, path, last)
		if err != nil {
			if pause == retryMin && ctx.Err() == nil { // the first one in a row
				failed(err)
			}
			if !delay.For(ctx, pause) {
				return
			}
			pause = min(2*pause, retryMax)
			continue
		}
		pause = retryMin
		if version == last { // nothing happened for a minute; a server that answers at once is not asked again at once
			if !delay.For(ctx, retryMin) {
				return
			}
			continue
		}
		last = version
		changed(text)
	}
}
