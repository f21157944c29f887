package sandbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"constellation/engine/cloud"
	"constellation/engine/cloud/sandboxapi"
	"constellation/engine/sandbox/machine"
	"constellation/internal/delay"
)

const (
	// bootTimeout is twenty times the boot time on two busy cores.
	bootTimeout = 2 * time.Minute
	// startTries limits the attempts to create a machine before it counts as failed.
	startTries = 3
	// crashWindow is the minimum uptime: a machine that goes down earlier
	// does not count as having run.
	crashWindow = 10 * time.Second
)

// platform is what a fleet needs from the computer that runs its machines.
// *machine.Host implements it and documents the contracts.
type platform interface {
	Start(ctx context.Context, spec machine.Spec, firmware machine.Firmware) error
	Boot(ctx context.Context, name string, firmware machine.Firmware) error
	Reboot(ctx context.Context, name string, firmware machine.Firmware) error
	Kill(ctx context.Context, name string) error
	Remove(ctx context.Context, name string) error
	WaitReady(ctx context.Context, name string) error
	Wait(ctx context.Context, name string) error
	Machine(name string) (machine.Machine, error)
	Console(name string) string
	SetFaults(ctx context.Context, name string, a machine.Faults) error
	Written(name, pattern string) ([]string, error)
}

// fleet reconciles the machines of this computer with the groups. All changes of
// the sandbox's state go through it.
//
// Every instance has a goroutine that drives it to its desired state. It starts from the
// observed state, so new instances, remains of a crashed daemon and changed
// requests are handled alike.
type fleet struct {
	log      *slog.Logger
	platform platform
	// firmware returns the firmware that runs when the instance's machine is switched on.
	firmware func(cloud.Instance) machine.Firmware
	// spec completes the specification of a new machine.
	spec func(cloud.Instance, *machine.Spec)
	// admit returns an error if this computer cannot run so many more machines.
	admit func(context.Context, machine.Demand) error
	save  func(*state) error

	mu      sync.Mutex
	st      *state
	faults  *Faults
	drivers map[string]*driver
	changed chan struct{} // closed and replaced with each change
	ending  bool          // the machines are being deleted with the sandbox

	ctx context.Context
	wg  sync.WaitGroup
}

// driver is the goroutine of one instance.
type driver struct {
	wake   chan struct{} // buffered: something about the instance changed
	cancel context.CancelFunc
	reboot []chan error // callers that wait for a reboot
}

// start drives all instances of st until ctx ends; wait blocks until they stopped.
func (f *fleet) start(ctx context.Context, st *state) error {
	flt, err := ParseFaults(st.Faults)
	if err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.ctx, f.st, f.faults = ctx, st, flt
	f.drivers, f.changed = map[string]*driver{}, make(chan struct{})
	for _, i := range st.Instances {
		f.drive(i.Name)
	}
	f.wg.Go(func() { f.injectFaults(ctx) })
	f.wg.Go(func() { f.cutPower(ctx) })
	return nil
}

func (f *fleet) wait() { f.wg.Wait() }

// update changes the state with fn and writes it to disk first: if the write fails, the
// state is unchanged. The caller holds mu.
func (f *fleet) update(fn func(*state) error) error {
	next := f.st.clone()
	if err := fn(next); err != nil {
		return err
	}
	if err := f.save(next); err != nil {
		return err
	}
	f.st = next
	close(f.changed)
	f.changed = make(chan struct{})
	return nil
}

// snapshot returns the immutable state and a channel that is closed at the next
// change.
func (f *fleet) snapshot() (*state, <-chan struct{}) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.st, f.changed // update replaces the state and never modifies it
}

// Faults returns the active faults.
func (f *fleet) Faults() *Faults {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.faults
}

// SetFaults replaces the faults.
func (f *fleet) SetFaults(spec []string) error { return f.replaceFaults(spec, nil, nil) }

// replaceFaults is SetFaults with those of an emulated cloud. emulate, unless nil, has the cloud have them.
func (f *fleet) replaceFaults(spec, ofCloud []string, emulate func([]string) error) error {
	flt, err := ParseFaults(spec)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrConflict, err)
	}
	possible := flt.Real
	if s, _ := f.snapshot(); s.Simulated {
		possible = flt.Simulated
	}
	if err := possible(); err != nil {
		return err
	}
	// Without the lock: a fault that ends machines calls Remove.
	if emulate != nil {
		if err := emulate(ofCloud); err != nil {
			return fmt.Errorf("%w: %w", ErrConflict, err)
		}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := f.update(func(s *state) error {
		s.Faults, s.CloudFaults = spec, ofCloud
		// A fault that stays has struck already. A fault that is set again strikes again.
		s.Struck = slices.DeleteFunc(s.Struck, func(key string) bool {
			name, cut := strings.CutPrefix(key, cutKey(""))
			if cut {
				return f.faults.powerCut[name] != flt.powerCut[name]
			}
			return f.faults.kill[name] != flt.kill[name]
		})
		return nil
	}); err != nil {
		return err
	}
	f.faults = flt
	for _, d := range f.drivers { // a machine that never booted may do so now
		d.interrupt()
	}
	return nil
}

// Sandbox returns the sandbox's name.
func (f *fleet) Sandbox() string { s, _ := f.snapshot(); return s.Name }

// Token returns the token of the control API.
func (f *fleet) Token() string { s, _ := f.snapshot(); return s.Token }

// Groups returns the groups.
func (f *fleet) Groups() []cloud.Group { s, _ := f.snapshot(); return s.groups() }

// Instance returns an instance by its name.
func (f *fleet) Instance(name string) (cloud.Instance, bool) {
	s, _ := f.snapshot()
	if i := s.instance(name); i != nil {
		return s.describe(i), true
	}
	return cloud.Instance{}, false
}

// Instances returns all instances by role and number.
func (f *fleet) Instances() []cloud.Instance {
	s, _ := f.snapshot()
	out := make([]cloud.Instance, 0, len(s.Instances))
	for _, i := range s.ordered() {
		out = append(out, s.describe(i))
	}
	return out
}

func (s *state) ordered() []*instance {
	return slices.SortedFunc(slices.Values(s.Instances), func(a, b *instance) int {
		return cmp.Or(cmp.Compare(a.Role, b.Role), cmp.Compare(a.Created.UnixNano(), b.Created.UnixNano()), cmp.Compare(a.Index, b.Index))
	})
}

// describe returns the public description of an instance.
func (s *state) describe(i *instance) cloud.Instance {
	out := cloud.Instance{
		Name: i.Name, ProviderID: sandboxapi.ProviderID(s.Name, i.Name), Group: sandboxapi.GroupID(s.Name, i.Group), Role: i.Role,
		Image: sandboxapi.ImageReference(s.Name, i.Image), IP: i.ip(), PodCIDR: i.podCIDR(), Created: i.Created, Token: i.Token, Message: i.Message,
	}
	switch {
	case i.Want == wantDeleted:
		out.State = cloud.Terminating
	case i.Boot == sandboxapi.BootFailed:
		out.State = cloud.Failed
	case i.Boot == sandboxapi.BootStopped:
		out.State = cloud.Stopped
	case i.Boot == sandboxapi.BootReady:
		out.State = cloud.Ready
	default:
		out.State = cloud.Creating
	}
	return out
}

func (s *state) groups() []cloud.Group {
	out := make([]cloud.Group, 0, len(s.Groups))
	for _, g := range s.Groups {
		out = append(out, cloud.Group{
			ID: sandboxapi.GroupID(s.Name, g.Name), Name: g.Name, Role: g.Role, Count: g.Count,
			Image: sandboxapi.ImageReference(s.Name, g.Image), AutoscalerName: sandboxapi.GroupID(s.Name, g.Name),
		})
	}
	return out
}

// byIP returns the instance with an address.
func (f *fleet) byIP(ip netip.Addr) (cloud.Instance, bool) {
	s, _ := f.snapshot()
	for _, i := range s.Instances {
		if i.ip() == ip.Unmap() {
			return s.describe(i), true
		}
	}
	return cloud.Instance{}, false
}

// SetImage sets the image of future instances of a group.
func (f *fleet) SetImage(group, version string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.update(func(s *state) error {
		g := s.group(group)
		if g == nil {
			return fmt.Errorf("group %s: %w", group, errNoSuch)
		}
		if _, ok := s.image(version); !ok {
			return fmt.Errorf("image %s: %w", version, errNoSuch)
		}
		g.Image = version
		return nil
	})
}

// fits refuses a size of a group that is out of range, or for which this computer lacks resources.
func (f *fleet) fits(ctx context.Context, group string, count int) error {
	if limit := lastIndex - firstIndex + 1; count < 0 || count > limit {
		return fmt.Errorf("%w: a group has 0 to %d machines", ErrConflict, limit)
	}
	s, _ := f.snapshot()
	g := s.group(group)
	if g == nil {
		return fmt.Errorf("group %s: %w", group, errNoSuch)
	}
	return f.check(ctx, g.Role, count-g.Count)
}

// SetCount adds instances to a group or deletes those with the highest numbers.
func (f *fleet) SetCount(ctx context.Context, name string, count int) error {
	if err := f.fits(ctx, name, count); err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	var touched []string
	err := f.update(func(s *state) error {
		touched = nil
		g := s.group(name)
		if g == nil {
			return fmt.Errorf("group %s: %w", name, errNoSuch)
		}
		var members []*instance
		for _, i := range s.ordered() {
			if i.Group == name && i.Want != wantDeleted {
				members = append(members, i)
			}
		}
		for len(members) > count {
			last := members[len(members)-1]
			last.Want = wantDeleted
			touched, members = append(touched, last.Name), members[:len(members)-1]
		}
		for n := len(members); n < count; n++ {
			i, err := s.add(g)
			if err != nil {
				return err
			}
			touched = append(touched, i.Name)
		}
		g.Count = count
		return nil
	})
	if err != nil {
		return err
	}
	f.rouse(touched...)
	return nil
}

// check refuses n more machines of a role if this computer cannot run them.
func (f *fleet) check(ctx context.Context, role cloud.Role, n int) error {
	if n <= 0 {
		return nil
	}
	d := machine.Demand{Workers: n}
	if role == cloud.ControlPlane {
		d = machine.Demand{ControlPlanes: n}
	}
	if err := f.admit(ctx, d); err != nil {
		return fmt.Errorf("%w: %w", errCapacity, err)
	}
	return nil
}

// add puts a new instance into g.
func (s *state) add(g *group) (*instance, error) {
	index, ok := s.freeIndex()
	if !ok {
		return nil, fmt.Errorf("%w: all %d addresses are taken", ErrConflict, lastIndex-firstIndex+1)
	}
	prefix := "worker-"
	if g.Role == cloud.ControlPlane {
		prefix = "control-plane-"
	}
	i := &instance{
		Name: fmt.Sprint(prefix, g.Next), Group: g.Name, Role: g.Role, Image: g.Image, Index: index,
		Want: wantRunning, Boot: sandboxapi.BootCreating, Created: time.Now().UTC(), Nodes: s.Nodes,
	}
	g.Next++
	s.Instances = append(s.Instances, i)
	return i, nil
}

// Create makes an instance for each of a caller's tokens, once per token: all or,
// after an error, none of the new ones. The result is in the order of
// tokens; deleted instances are Terminated.
func (f *fleet) Create(ctx context.Context, groupName string, tokens []string) ([]cloud.Instance, error) {
	s, _ := f.snapshot()
	g := s.group(groupName)
	if g == nil {
		return nil, fmt.Errorf("group %s: %w", groupName, errNoSuch)
	}
	if err := f.check(ctx, g.Role, len(s.unused(groupName, tokens))); err != nil {
		return nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.st.unused(groupName, tokens)) > 0 { // no concurrent call has created them
		var names []string
		err := f.update(func(s *state) error {
			g := s.group(groupName)
			for _, token := range s.unused(groupName, tokens) {
				i, err := s.add(g)
				if err != nil {
					return err
				}
				g.Count++
				i.Token, s.Tokens[groupName+"/"+token] = token, i.Name
				names = append(names, i.Name)
			}
			return nil
		})
		if err != nil {
			return nil, err
		}
		f.rouse(names...)
	}
	out := make([]cloud.Instance, 0, len(tokens))
	for _, token := range tokens {
		out = append(out, f.st.created(groupName, token))
	}
	return out, nil
}

// unused returns the tokens that have created no instance, without duplicates.
func (s *state) unused(group string, tokens []string) []string {
	var out []string
	for _, t := range tokens {
		if s.Tokens[group+"/"+t] == "" && !slices.Contains(out, t) {
			out = append(out, t)
		}
	}
	return out
}

// created returns the instance that a token created. A deleted one is Terminated.
func (s *state) created(groupName, token string) cloud.Instance {
	name := s.Tokens[groupName+"/"+token]
	if i := s.instance(name); i != nil {
		return s.describe(i)
	}
	return cloud.Instance{
		Name: name, ProviderID: sandboxapi.ProviderID(s.Name, name), Group: sandboxapi.GroupID(s.Name, groupName),
		Role: s.group(groupName).Role, State: cloud.Terminated, Token: token,
	}
}

// Remove deletes instances and ignores unknown names.
func (f *fleet) Remove(names ...string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	var touched []string
	for _, name := range names {
		if i := f.st.instance(name); i != nil && i.Want != wantDeleted {
			touched = append(touched, name)
		}
	}
	if len(touched) == 0 {
		return nil
	}
	err := f.update(func(s *state) error {
		for _, name := range touched {
			i := s.instance(name)
			if i.Want == wantDeleted { // named twice
				continue
			}
			i.Want, i.Message = wantDeleted, ""
			if g := s.group(i.Group); g.Count > 0 {
				g.Count--
			}
		}
		return nil
	})
	if err == nil {
		f.rouse(touched...)
	}
	return err
}

// stop switches an instance off and waits until it is off.
func (f *fleet) stop(ctx context.Context, name, why string) error {
	if err := f.wantFor(name, wantStopped, why); err != nil {
		return err
	}
	return f.until(ctx, name, func(i *instance) bool { return i.Boot == sandboxapi.BootStopped })
}

// until waits for a condition of an instance. It fails if the instance disappears.
func (f *fleet) until(ctx context.Context, name string, ok func(*instance) bool) error {
	for {
		s, changed := f.snapshot()
		i := s.instance(name)
		if i == nil {
			return fmt.Errorf("instance %s: %w", name, errNoSuch)
		}
		if ok(i) {
			return nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-f.ctx.Done():
			return f.ctx.Err()
		case <-changed:
		}
	}
}

// wantFor sets the desired state of an instance that is not being deleted.
func (f *fleet) wantFor(name string, w want, why string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	i := f.st.instance(name)
	switch {
	case i == nil:
		return fmt.Errorf("instance %s: %w", name, errNoSuch)
	case i.Want == w || i.Want == wantDeleted:
		return nil
	}
	err := f.update(func(s *state) error {
		i := s.instance(name)
		i.Want, i.Message = w, why
		return nil
	})
	if err == nil {
		f.rouse(name)
	}
	return err
}

// reboot switches an instance off and on and returns when PID 1 runs again. A
// stopped instance is switched on.
func (f *fleet) reboot(ctx context.Context, name string) error {
	done := make(chan error, 1)
	f.mu.Lock()
	i, d := f.st.instance(name), f.drivers[name]
	if i == nil || d == nil || i.Want == wantDeleted {
		f.mu.Unlock()
		return fmt.Errorf("instance %s: %w", name, errNoSuch)
	}
	if i.Want != wantRunning {
		if err := f.update(func(s *state) error {
			i := s.instance(name)
			i.Want, i.Message = wantRunning, ""
			return nil
		}); err != nil {
			f.mu.Unlock()
			return err
		}
	}
	d.reboot = append(d.reboot, done)
	d.interrupt()
	f.mu.Unlock()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return ctx.Err()
	case <-f.ctx.Done():
		return f.ctx.Err()
	}
}

// interrupt makes a driver observe its machine again. The caller holds mu.
func (d *driver) interrupt() {
	if d.cancel != nil {
		d.cancel()
	}
	select {
	case d.wake <- struct{}{}:
	default:
	}
}

// rouse makes drivers reconcile their instances, new ones included. The caller holds mu.
func (f *fleet) rouse(names ...string) {
	for _, name := range names {
		if d := f.drivers[name]; d != nil {
			d.interrupt()
		} else {
			f.drive(name)
		}
	}
}

// drive starts the goroutine of an instance. The caller holds mu.
func (f *fleet) drive(name string) {
	d := &driver{wake: make(chan struct{}, 1)}
	f.drivers[name] = d
	f.wg.Go(func() { f.run(name, d) })
}

// run drives an instance to its desired state, until that is "gone" or the fleet ends.
func (f *fleet) run(name string, d *driver) {
	log := f.log.With("node", name)
	for fails := 0; f.ctx.Err() == nil; {
		ctx, cancel := context.WithCancel(f.ctx)
		f.mu.Lock()
		d.cancel = cancel
		select {
		case <-d.wake: // whatever it was, it is looked at now
		default:
		}
		i := f.st.instance(name)
		waiters := d.reboot
		d.reboot = nil
		f.mu.Unlock()

		var err error
		switch {
		case i.Want == wantDeleted:
			if err = f.platform.Remove(ctx, name); err == nil || errors.Is(err, machine.ErrNotFound) {
				if err = f.forget(name); err == nil {
					cancel()
					answer(waiters, fmt.Errorf("instance %s: %w", name, errNoSuch))
					return
				}
			}
		case i.Want == wantStopped:
			f.spoilDisk(ctx, i)
			if err = f.platform.Kill(ctx, name); err == nil || errors.Is(err, machine.ErrNotFound) || errors.Is(err, machine.ErrNotRunning) {
				if err = f.note(name, func(i *instance) { i.Boot = sandboxapi.BootStopped }); err == nil {
					<-ctx.Done()
				}
			}
		case len(waiters) > 0:
			err = f.restart(ctx, i)
			answer(waiters, err)
		default:
			err = f.keep(ctx, i, log)
		}
		interrupted := ctx.Err() != nil
		cancel()
		if interrupted {
			fails = 0
			continue
		}
		if err == nil {
			fails = 0
			continue
		}
		fails++
		log.Warn("machine not as wanted", "want", i.Want, "try", fails, "err", err)
		f.setback(name, fails, err)
		again := time.NewTimer(min(time.Second<<min(fails-1, 10), time.Minute))
		select {
		case <-f.ctx.Done():
		case <-d.wake:
			fails = 0
		case <-again.C:
		}
		again.Stop()
	}
	f.mu.Lock()
	waiters := d.reboot
	f.mu.Unlock()
	answer(waiters, context.Canceled)
}

func answer(waiters []chan error, err error) {
	for _, w := range waiters {
		w <- err
	}
}

// setback records a failure in the description of the instance.
func (f *fleet) setback(name string, fails int, err error) {
	if err := f.note(name, func(i *instance) {
		i.Message = err.Error()
		if fails >= startTries && i.Want == wantRunning {
			i.Boot = sandboxapi.BootFailed
		}
	}); err != nil {
		f.log.Warn("setback not recorded", "node", name, "err", err)
	}
}

// keep boots an instance if it is off, waits until it is ready, and then until it
// goes down. It returns nil if the instance ran for at least crashWindow.
func (f *fleet) keep(ctx context.Context, i *instance, log *slog.Logger) error {
	m, err := f.platform.Machine(i.Name)
	switch {
	case errors.Is(err, machine.ErrNotFound):
		err = f.make(ctx, i, log)
	case err != nil:
	case m.Power == machine.Creating: // a crash left it half-made
		if err = f.platform.Remove(ctx, i.Name); err == nil {
			err = f.make(ctx, i, log)
		}
	case m.Power == machine.Off:
		if err = f.boot(ctx, i); err == nil {
			err = f.booting(i.Name)
		}
	default:
		log.Debug("machine found running", "boot", i.Boot)
	}
	if err != nil {
		return err
	}
	if m, err = f.platform.Machine(i.Name); err != nil {
		return err
	}
	if err := f.ready(ctx, i, log); err != nil {
		return err
	}
	if err := f.platform.Wait(ctx, i.Name); err != nil {
		return err
	}
	// It ended by itself: a reboot from inside, or a crash. A cloud
	// switches it on again in both cases.
	log.Warn("machine went down", "up", time.Since(m.Booted).Round(time.Second))
	if err := f.note(i.Name, func(i *instance) {
		i.Boot, i.Message = sandboxapi.BootBooting, "it went down by itself and is switched on again"
	}); err != nil {
		return err
	}
	if up := time.Since(m.Booted); up < crashWindow {
		return fmt.Errorf("it went down %s after its start; see its console: %s", up.Round(time.Millisecond), f.platform.Console(i.Name))
	}
	return nil
}

// make creates a machine and boots it for the first time.
func (f *fleet) make(ctx context.Context, i *instance, log *slog.Logger) error {
	flt := f.Faults()
	if flt.NeverBoots(i.Name) {
		log.Warn("fault injected", "fault", "never-boot")
		if err := f.note(i.Name, func(i *instance) { i.Boot = sandboxapi.BootBooting }); err != nil {
			return err
		}
		if !delay.For(ctx, bootTimeout) {
			return ctx.Err()
		}
		if err := f.late(i.Name); err != nil {
			return err
		}
		<-ctx.Done()
		return ctx.Err()
	}
	if d := flt.BootDelay(i.Name); d > 0 {
		log.Warn("fault injected", "fault", "boot-delay", "delay", d)
		if !delay.For(ctx, d) {
			return ctx.Err()
		}
	}
	s, _ := f.snapshot()
	img, ok := s.image(i.Image)
	if !ok {
		return fmt.Errorf("image %s: %w", i.Image, errNoSuch)
	}
	desc := s.describe(i)
	spec := machine.Spec{Name: i.Name, IP: i.ip(), PodCIDR: i.podCIDR(), Image: &img}
	f.spec(desc, &spec)
	spec.Faults = f.Faults().machineFaults(s, i.Name)
	if err := f.platform.Start(ctx, spec, f.firmware(desc)); err != nil {
		// A partially created machine cannot be used. If the removal fails, the next observation finds it again.
		if rmErr := f.platform.Remove(context.WithoutCancel(ctx), i.Name); rmErr != nil && !errors.Is(rmErr, machine.ErrNotFound) {
			log.Warn("half-made machine not removed", "err", rmErr)
		}
		return fmt.Errorf("start machine: %w", err)
	}
	return f.booting(i.Name)
}

func (f *fleet) booting(name string) error {
	return f.note(name, func(i *instance) {
		i.Boot, i.Started = sandboxapi.BootBooting, time.Now().UTC()
	})
}

// restart switches a machine off and on and notifies the callers of reboot.
func (f *fleet) restart(ctx context.Context, i *instance) error {
	m, err := f.platform.Machine(i.Name)
	if errors.Is(err, machine.ErrNotFound) { // it is made next
		return fmt.Errorf("instance %s has no machine yet: %w", i.Name, errNoSuch)
	}
	if err != nil {
		return fmt.Errorf("reboot machine: %w", err)
	}
	if m.Power == machine.Off {
		err = f.boot(ctx, i)
	} else {
		err = f.platform.Reboot(ctx, i.Name, f.firmware(f.describe(i)))
	}
	if err != nil {
		return fmt.Errorf("reboot machine: %w", err)
	}
	return f.booting(i.Name)
}

// spoilDisk applies the current disk faults to a power cut, including faults that were
// set just before.
func (f *fleet) spoilDisk(ctx context.Context, i *instance) {
	s, _ := f.snapshot()
	if a := f.Faults().machineFaults(s, i.Name); a.FailsAsDisk() {
		f.setFaults(ctx, i, a)
	}
}

// setFaults sets the faults of a machine, which may be off.
func (f *fleet) setFaults(ctx context.Context, i *instance, a machine.Faults) {
	if err := f.platform.SetFaults(ctx, i.Name, a); err != nil && !errors.Is(err, machine.ErrNotRunning) {
		f.log.Debug("fault not injected", "node", i.Name, "err", err)
	}
}

// boot switches on a machine that is off, with the disk faults of its instance.
func (f *fleet) boot(ctx context.Context, i *instance) error {
	s, _ := f.snapshot()
	f.setFaults(ctx, i, f.Faults().machineFaults(s, i.Name))
	return f.platform.Boot(ctx, i.Name, f.firmware(f.describe(i)))
}

// ready waits until a machine that was switched on is ready. After a timeout the machine
// counts as failed, but the wait goes on.
func (f *fleet) ready(ctx context.Context, i *instance, log *slog.Logger) error {
	start := time.Now()
	rctx, cancel := context.WithTimeout(ctx, bootTimeout)
	err := f.platform.WaitReady(rctx, i.Name)
	late := rctx.Err() != nil && ctx.Err() == nil
	cancel()
	if err != nil && late {
		log.Warn("machine did not boot in time", "limit", bootTimeout, "err", err)
		if err := f.late(i.Name); err != nil {
			return err
		}
		err = f.platform.WaitReady(ctx, i.Name)
	}
	if err != nil {
		return fmt.Errorf("wait for boot: %w", err)
	}
	log.Info("machine ready", "took", time.Since(start).Round(time.Millisecond))
	return f.note(i.Name, func(i *instance) { i.Boot, i.Message = sandboxapi.BootReady, "" })
}

// late records that a machine exceeded its boot timeout.
func (f *fleet) late(name string) error {
	return f.note(name, func(i *instance) {
		i.Boot = sandboxapi.BootFailed
		i.Message = fmt.Sprintf("not ready %s after its start; see its console: %s", bootTimeout, f.platform.Console(name))
	})
}

func (f *fleet) describe(i *instance) cloud.Instance {
	s, _ := f.snapshot()
	return s.describe(i)
}

// note changes the record of an instance that exists.
func (f *fleet) note(name string, fn func(*instance)) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.update(func(s *state) error {
		if i := s.instance(name); i != nil {
			fn(i)
		}
		return nil
	})
}

// forget removes the record of an instance that is gone.
func (f *fleet) forget(name string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := f.update(func(s *state) error {
		s.Instances = slices.DeleteFunc(s.Instances, func(i *instance) bool { return i.Name == name })
		return nil
	}); err != nil {
		return err
	}
	delete(f.drivers, name)
	return nil
}

// controlPlanes returns the load balancer's backends, the oldest first.
func (f *fleet) controlPlanes(port uint16) []backend {
	s, _ := f.snapshot()
	var out []backend
	for _, i := range s.ordered() {
		if i.Role == cloud.ControlPlane && i.Want == wantRunning && i.Boot != sandboxapi.BootCreating {
			out = append(out, backend{i.Name, netip.AddrPortFrom(i.ip(), port)})
		}
	}
	return out
}

// initBackends returns the control planes behind the init port. The first one stays
// the same while that machine exists, also during a reboot or a restart of its
// bootstrapper: a console that reconnects must find the init that it began,
// not begin another one elsewhere. The others follow when that machine is ready,
// for consoles that recover control planes.
func (f *fleet) initBackends() []backend {
	f.mu.Lock()
	defer f.mu.Unlock()
	usable := func(i *instance) bool {
		return i != nil && i.Role == cloud.ControlPlane && i.Want == wantRunning && i.Boot != sandboxapi.BootFailed
	}
	i := f.st.instance(f.st.InitMachine)
	if !usable(i) {
		i = nil
		for _, c := range f.st.ordered() {
			if usable(c) && c.Boot == sandboxapi.BootReady {
				i = c
				break
			}
		}
		if i == nil {
			return nil
		}
		if err := f.update(func(s *state) error { s.InitMachine = i.Name; return nil }); err != nil {
			f.log.Warn("init machine not chosen", "err", err)
			return nil
		}
		f.log.Info("init machine chosen", "node", i.Name)
	}
	out := []backend{{i.Name, netip.AddrPortFrom(i.ip(), initPort)}}
	for _, c := range f.st.ordered() {
		if c != i && usable(c) && c.Boot == sandboxapi.BootReady && i.Boot == sandboxapi.BootReady {
			out = append(out, backend{c.Name, netip.AddrPortFrom(c.ip(), initPort)})
		}
	}
	return out
}

// pass injects the fault "kill" if it is set for the machine at ip and
// this point, and was not injected before.
func (f *fleet) pass(ip netip.Addr, point string) {
	i, ok := f.byIP(ip)
	if !ok {
		return
	}
	f.mu.Lock()
	cut := f.faults.powerCut[i.Name] == point && !slices.Contains(f.st.Struck, cutKey(i.Name))
	strike := f.faults.kill[i.Name] == point && !slices.Contains(f.st.Struck, i.Name)
	if strike {
		if err := f.update(func(s *state) error { s.Struck = append(s.Struck, i.Name); return nil }); err != nil {
			f.log.Warn("fault not recorded", "node", i.Name, "err", err)
		}
	}
	f.mu.Unlock()
	if cut {
		f.wg.Go(func() { f.cut(f.ctx, i.Name, point) })
	}
	if strike {
		f.log.Warn("fault injected", "fault", "kill", "node", i.Name, "point", point)
		if err := f.wantFor(i.Name, wantStopped, "killed by a fault at "+point); err != nil {
			f.log.Warn("fault not injected", "node", i.Name, "err", err)
		}
	}
}
