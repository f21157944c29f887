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

// afflictAgain is when a machine is looked at again that could not be afflicted, because it
// was booting, say; lookAgain how often files of machines are looked for.
const (
	afflictAgain = time.Second
	lookAgain    = 50 * time.Millisecond
)

// afflict keeps machines suffering from what the faults say until ctx ends, through all
// their boots.
func (f *fleet) afflict(ctx context.Context) {
	suffers := map[string]string{} // machine → boot and affliction
	for {
		s, changed := f.snapshot()
		flt, again := f.Faults(), false
		for _, i := range s.Instances {
			a := flt.affliction(s, i.Name)
			m, err := f.platform.Machine(i.Name)
			if err != nil || m.Power != machine.Running {
				delete(suffers, i.Name)
				again = again || a.Any() // it is told of when it runs, but not by a change
				continue
			}
			key := fmt.Sprintf("%d %+v", m.Boots, a)
			if suffers[i.Name] == key || !a.Any() && suffers[i.Name] == "" {
				continue
			}
			if err := f.platform.Afflict(ctx, i.Name, a); err != nil {
				f.log.Debug("machine not afflicted", "node", i.Name, "err", err)
				again = true
				continue
			}
			f.log.Warn("fault injected", "node", i.Name, "suffers", fmt.Sprintf("%+v", a))
			suffers[i.Name] = key
		}
		var later <-chan time.Time
		if again {
			later = time.After(afflictAgain)
		}
		select {
		case <-ctx.Done():
			return
		case <-changed:
		case <-later:
		}
	}
}

// cutKey is how the fault is remembered to have struck.
func cutKey(machine string) string { return "power-cut/" + machine }

// cutPower looks for the files by which machines show that they are at the point at which
// their power is to go. What was there when the fault was set is no such file.
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
			later = time.After(lookAgain)
		}
		select {
		case <-ctx.Done():
			return
		case <-changed:
		case <-later:
		}
	}
}

// cut takes the power from a machine, once for each fault, and gives it back.
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
