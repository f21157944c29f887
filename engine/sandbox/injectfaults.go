package sandbox

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"constellation/engine/sandbox/machine"
)

// retryFault is the delay until a fault is injected again into a machine that was not ready for
// it, for example because it was booting. filePoll is the interval at which files of machines are polled.
const (
	retryFault = time.Second
	filePoll   = 50 * time.Millisecond
)

// injectFaults injects the machine faults into running machines until ctx ends, and again after
// each of their boots.
func (f *fleet) injectFaults(ctx context.Context) {
	suffers := map[string]string{} // machine → boot and fault
	for {
		s, changed := f.snapshot()
		flt, again := f.Faults(), false
		for _, i := range s.Instances {
			a := flt.machineFaults(s, i.Name)
			m, err := f.platform.Machine(i.Name)
			if err != nil || m.Power != machine.Running {
				delete(suffers, i.Name)
				again = again || a.Any() // a start wakes this loop, a change of the machine does not
				continue
			}
			key := fmt.Sprintf("%d %+v", m.Boots, a)
			if suffers[i.Name] == key || !a.Any() && suffers[i.Name] == "" {
				continue
			}
			if err := f.platform.SetFaults(ctx, i.Name, a); err != nil {
				f.log.Debug("fault not injected", "node", i.Name, "err", err)
				again = true
				continue
			}
			f.log.Warn("fault injected", "node", i.Name, "suffers", fmt.Sprintf("%+v", a))
			suffers[i.Name] = key
		}
		var later <-chan time.Time
		if again {
			later = time.After(retryFault)
		}
		select {
		case <-ctx.Done():
			return
		case <-changed:
		case <-later:
		}
	}
}

// cutKey is the key under which a power-cut fault is recorded as injected.
func cutKey(machine string) string { return "power-cut/" + machine }

// cutPower polls for the files that mark the point at which a machine loses power. Files that
// existed when the fault was set do not count.
func (f *fleet) cutPower(ctx context.Context) {
	known := map[string][]string{} // fault → files
	for {
		s, changed := f.snapshot()
		flt := f.Faults()
		waiting := map[string]bool{}
		for _, name := range slices.Sorted(maps.Keys(flt.powerCut)) {
			point := flt.powerCut[name]
			pattern := filePoints[point]
			if pattern == "" || slices.Contains(s.Struck, cutKey(name)) {
				continue
			}
			fault := name + ":" + point
			waiting[fault] = true
			files, err := f.platform.Written(name, pattern)
			if err != nil {
				f.log.Debug("disk of machine not seen", "node", name, "err", err)
				continue
			}
			before, looked := known[fault]
			if !looked {
				known[fault] = append([]string{}, files...)
				continue
			}
			if slices.ContainsFunc(files, func(file string) bool { return !slices.Contains(before, file) }) {
				f.cut(ctx, name, point)
			}
		}
		maps.DeleteFunc(known, func(fault string, _ []string) bool { return !waiting[fault] })
		var later <-chan time.Time
		if len(waiting) > 0 {
			later = time.After(filePoll)
		}
		select {
		case <-ctx.Done():
			return
		case <-changed:
		case <-later:
		}
	}
}

// cut switches a machine off and on again, once for each fault.
func (f *fleet) cut(ctx context.Context, name, point string) {
	f.mu.Lock()
	err := f.update(func(s *state) error {
		if slices.Contains(s.Struck, cutKey(name)) {
			return errStruck
		}
		s.Struck = append(s.Struck, cutKey(name))
		return nil
	})
	f.mu.Unlock()
	if errors.Is(err, errStruck) {
		return
	}
	f.log.Warn("fault injected", "fault", "power-cut", "node", name, "point", point)
	if err == nil {
		err = f.stop(ctx, name, "its power was cut by a fault at "+point)
	}
	if err == nil {
		err = f.reboot(ctx, name)
	}
	if err != nil && ctx.Err() == nil {
		f.log.Warn("fault not injected", "node", name, "err", err)
	}
}

var errStruck = errors.New("it has struck")
