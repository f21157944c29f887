package gcptest

import (
	"fmt"
	"slices"
	"time"
)

// PreemptedAfter is the time from the announcement that a machine is preempted until it is stopped.
const PreemptedAfter = 30 * time.Second

// Values of a machine's maintenance-event.
const (
	NoMaintenance = "NONE"
	Terminate     = "TERMINATE_ON_HOST_MAINTENANCE"
	Migrate       = "MIGRATE_ON_HOST_MAINTENANCE"
)

// announcement is what the metadata server of a machine announces.
type announcement struct {
	preempted   bool
	maintenance string
}

// Preempt announces to a machine that it is preempted. After PreemptedAfter it is gone, and its group makes another one of its
// name.
func (c *Cloud) Preempt(name string) error {
	id, err := c.announce(name, func(a *announcement) { a.preempted = true })
	if err != nil {
		return err
	}
	time.AfterFunc(PreemptedAfter, func() {
		c.locked(func() {
			if c.idOf(name) == id {
				c.kill(name, time.Now())
				c.settle(time.Now())
			}
		})
	})
	return nil
}

// Maintain announces the maintenance of a machine's host, or its end with NoMaintenance.
func (c *Cloud) Maintain(name, event string) error {
	if !slices.Contains([]string{NoMaintenance, Terminate, Migrate}, event) {
		return fmt.Errorf("maintain the host of %s: there is no event %s", name, event)
	}
	_, err := c.announce(name, func(a *announcement) { a.maintenance = event })
	return err
}

// announce changes what is announced to a machine, and returns the machine's number.
func (c *Cloud) announce(name string, change func(*announcement)) (id uint64, err error) {
	c.locked(func() {
		if id = c.idOf(name); id == 0 {
			err = fmt.Errorf("there is no machine %s", name)
			return
		}
		a := c.announcements[id]
		change(&a)
		c.announcements[id] = a
		c.broadcast()
	})
	return id, err
}

// broadcast wakes requests that wait for a change. Callers hold the lock.
func (c *Cloud) broadcast() {
	close(c.announced)
	c.announced = make(chan struct{})
}

// idOf returns the number of the machine that has a name now; zero: there is none. Callers hold the lock.
func (c *Cloud) idOf(name string) uint64 {
	for _, g := range c.groups {
		for _, m := range g.managed {
			if m.name == name && m.vm != nil {
				return m.vm.Id
			}
		}
	}
	return 0
}

// announcedTo returns the entries preempted and maintenance-event of a machine.
func (c *Cloud) announcedTo(id uint64) (preempted, maintenance string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	a := c.announcements[id]
	preempted, maintenance = "FALSE", NoMaintenance
	if a.preempted {
		preempted = "TRUE"
	}
	if a.maintenance != "" {
		maintenance = a.maintenance
	}
	return preempted, maintenance
}
