package sandbox

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"constellation/engine/cloud"
	"constellation/engine/cloud/sandboxapi"
	"constellation/engine/sandbox/machine"
	"constellation/engine/sandbox/machine/disk"
)

// computer is an in-memory fake of machine.Host: a machine takes a second to start
// and another to be ready.
type computer struct {
	mu       sync.Mutex
	machines map[string]*twin
	fail     map[string][]error // by "<call> <machine>": what the next calls return
	hang     map[string]bool    // machines that never become ready
	starts   int
	suffers  map[string]machine.Faults
	written  map[string][]string // by machine and pattern
}

type twin struct {
	machine.Machine
	off  chan struct{}  // closed when it goes down
	lost machine.Faults // its faults when it last went down
}

func newComputer() *computer {
	return &computer{machines: map[string]*twin{}, fail: map[string][]error{}, hang: map[string]bool{}}
}

func (c *computer) scripted(call, name string) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	key := call + " " + name
	if len(c.fail[key]) == 0 {
		return nil
	}
	err := c.fail[key][0]
	c.fail[key] = c.fail[key][1:]
	return err
}

// script makes the next calls for a machine fail with errs.
func (c *computer) script(call, name string, errs ...error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.fail[call+" "+name] = errs
}

// look returns the state of a machine; the zero value if there is none.
func (c *computer) look(name string) machine.Machine {
	m, _ := c.Machine(name)
	return m
}

func sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}

func (c *computer) Start(ctx context.Context, spec machine.Spec, fw machine.Firmware) error {
	c.mu.Lock()
	if c.machines[spec.Name] != nil {
		c.mu.Unlock()
		return machine.ErrExists
	}
	c.starts++
	m := &twin{Machine: machine.Machine{Name: spec.Name, IP: spec.IP, Power: machine.Creating}}
	c.machines[spec.Name] = m
	c.mu.Unlock()
	if err := c.scripted("start", spec.Name); err != nil {
		return err
	}
	return c.on(ctx, m, fw, true)
}

func (c *computer) on(ctx context.Context, m *twin, fw machine.Firmware, first bool) error {
	if err := fw(ctx, machine.PowerOn{Machine: m.Name, First: first}); err != nil {
		return err
	}
	if err := sleep(ctx, time.Second); err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	m.Power, m.Booted, m.off = machine.Running, time.Now(), make(chan struct{})
	m.Boots++
	return nil
}

func (c *computer) Boot(ctx context.Context, name string, fw machine.Firmware) error {
	c.mu.Lock()
	m := c.machines[name]
	c.mu.Unlock()
	if m == nil {
		return machine.ErrNotFound
	}
	return c.on(ctx, m, fw, false)
}

func (c *computer) Reboot(ctx context.Context, name string, fw machine.Firmware) error {
	if err := c.Kill(ctx, name); err != nil {
		return err
	}
	return c.Boot(ctx, name, fw)
}

func (c *computer) Kill(_ context.Context, name string) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	m := c.machines[name]
	if m == nil {
		return machine.ErrNotFound
	}
	if m.Power == machine.Running {
		close(m.off)
		m.lost = c.suffers[name]
	}
	m.Power = machine.Off
	return nil
}

func (c *computer) Remove(ctx context.Context, name string) error {
	if err := c.scripted("remove", name); err != nil {
		return err
	}
	if err := c.Kill(ctx, name); err != nil {
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.machines, name)
	return nil
}

func (c *computer) WaitReady(ctx context.Context, name string) error {
	c.mu.Lock()
	hang := c.hang[name]
	c.mu.Unlock()
	if hang {
		<-ctx.Done()
		return ctx.Err()
	}
	return sleep(ctx, time.Second)
}

func (c *computer) Wait(ctx context.Context, name string) error {
	c.mu.Lock()
	m := c.machines[name]
	c.mu.Unlock()
	if m == nil {
		return machine.ErrNotFound
	}
	select {
	case <-m.off:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (c *computer) Machine(name string) (machine.Machine, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if m := c.machines[name]; m != nil {
		return m.Machine, nil
	}
	return machine.Machine{}, machine.ErrNotFound
}

func (c *computer) SetFaults(_ context.Context, name string, a machine.Faults) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if m := c.machines[name]; m == nil || m.Power != machine.Running {
		return machine.ErrNotRunning
	}
	if c.suffers == nil {
		c.suffers = map[string]machine.Faults{}
	}
	c.suffers[name] = a
	return nil
}

func (c *computer) Written(name, pattern string) ([]string, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.written[name+pattern]), nil
}

func (c *computer) Console(name string) string { return "/state/" + name + "/console.log" }

func (c *computer) names() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Sorted(maps.Keys(c.machines))
}

// testFleet returns a fleet of 1 + 2 desired machines on a computer that may
// have machines already. stop ends it like a crash of its daemon.
func testFleet(t *testing.T, c *computer, st *state) (f *fleet, stop func()) {
	t.Helper()
	if st == nil {
		st = newState("demo", "/work", time.Now())
		st.Token, st.InitSecretSHA256 = "the-token", strings.Repeat("ab", 32)
		st.Release, st.Kubernetes, st.Image = "v1.1.0", "v1.35.4", "v1.0.0"
		st.Catalogue = []machine.Image{{Version: "v1.0.0"}, {Version: "v1.1.0"}}
		for i := range st.Groups {
			st.Groups[i].Image = st.Image
		}
	}
	file := filepath.Join(t.TempDir(), "state.json")
	f = &fleet{
		log: discard(), platform: c,
		firmware: func(cloud.Instance) machine.Firmware {
			return func(context.Context, machine.PowerOn) error { return nil }
		},
		spec:  func(cloud.Instance, *machine.Spec) {},
		admit: func(context.Context, machine.Demand) error { return nil },
		save:  func(s *state) error { return s.write(file) },
	}
	ctx, cancel := context.WithCancel(t.Context())
	if err := f.start(ctx, st); err != nil {
		t.Fatal(err)
	}
	stop = func() { cancel(); f.wait() }
	t.Cleanup(stop)
	return f, stop
}

// boots returns the progress of every instance, as "name:boot".
func boots(f *fleet) []string {
	s, _ := f.snapshot()
	var out []string
	for _, i := range s.ordered() {
		out = append(out, fmt.Sprintf("%s:%s", i.Name, i.Boot))
	}
	return out
}

func scale(t *testing.T, f *fleet, controlPlanes, workers int) {
	t.Helper()
	if err := errors.Join(f.SetCount(t.Context(), sandboxapi.ControlPlaneGroup, controlPlanes), f.SetCount(t.Context(), sandboxapi.WorkerGroup, workers)); err != nil {
		t.Fatal(err)
	}
}

func wantList(t *testing.T, what string, got []string, want ...string) {
	t.Helper()
	if !slices.Equal(got, want) {
		t.Errorf("%s: got %v, want %v", what, got, want)
	}
}

func TestFleetFollowsItsGroups(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newComputer()
		f, stop := testFleet(t, c, nil)
		defer stop()
		scale(t, f, 1, 2)
		wantList(t, "at once", boots(f), "control-plane-0:creating", "worker-0:creating", "worker-1:creating")
		time.Sleep(1500 * time.Millisecond)
		wantList(t, "after the start", boots(f), "control-plane-0:booting", "worker-0:booting", "worker-1:booting")
		time.Sleep(time.Second)
		wantList(t, "after the boot", boots(f), "control-plane-0:ready", "worker-0:ready", "worker-1:ready")

		scale(t, f, 1, 1)
		synctest.Wait()
		wantList(t, "scaled down", c.names(), "control-plane-0", "worker-0")

		scale(t, f, 1, 2)
		time.Sleep(3 * time.Second)
		wantList(t, "numbers are not used again", c.names(), "control-plane-0", "worker-0", "worker-2")
		seen := map[string]bool{}
		for _, i := range f.Instances() {
			if seen[i.IP.String()] || !machine.Nodes.Contains(i.IP) || i.IP == machine.Gateway {
				t.Errorf("%s has address %s", i.Name, i.IP)
			}
			seen[i.IP.String()] = true
			if i.PodCIDR.Bits() != 24 || !podCIDR.Contains(i.PodCIDR.Addr()) || seen[i.PodCIDR.String()] {
				t.Errorf("%s has pods %s", i.Name, i.PodCIDR)
			}
			seen[i.PodCIDR.String()] = true
		}
	})
}

func TestCreateIsIdempotentAndCounts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newComputer()
		f, stop := testFleet(t, c, nil)
		defer stop()
		scale(t, f, 1, 1)
		if err := f.SetImage(sandboxapi.WorkerGroup, "v1.1.0"); err != nil {
			t.Fatal(err)
		}
		var wg sync.WaitGroup
		got := make([]cloud.Instance, 8)
		for n := range got {
			wg.Go(func() {
				i, err := first(f.Create(t.Context(), sandboxapi.WorkerGroup, []string{"heir-1"}))
				if err != nil {
					t.Error(err)
				}
				got[n] = i
			})
		}
		wg.Wait()
		for _, i := range got {
			if i.Name != "worker-1" || i.Image != "sandboxes/demo/images/v1.1.0" || i.State != cloud.Creating {
				t.Errorf("got %+v", i)
			}
		}
		time.Sleep(3 * time.Second)
		s, _ := f.snapshot()
		if n := s.group(sandboxapi.WorkerGroup).Count; n != 2 || len(c.names()) != 3 {
			t.Errorf("group counts %d, machines %v", n, c.names())
		}

		// Deleting an instance lowers the count once and consumes the token.
		for range 3 {
			if err := f.Remove("worker-1"); err != nil {
				t.Fatal(err)
			}
		}
		synctest.Wait()
		s, _ = f.snapshot()
		if n := s.group(sandboxapi.WorkerGroup).Count; n != 1 {
			t.Errorf("group counts %d after the delete", n)
		}
		again, err := first(f.Create(t.Context(), sandboxapi.WorkerGroup, []string{"heir-1"}))
		if err != nil || again.Name != "worker-1" || again.State != cloud.Terminated {
			t.Errorf("the spent token made %+v, %v", again, err)
		}
		wantList(t, "machines", c.names(), "control-plane-0", "worker-0")
	})
}

func first[T any](l []T, err error) (T, error) {
	if len(l) == 0 {
		var none T
		return none, err
	}
	return l[0], err
}

func TestManyAreMadeAndDeletedAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newComputer()
		f, stop := testFleet(t, c, nil)
		defer stop()
		scale(t, f, 0, 1)
		summary := func(l []cloud.Instance) (out []string) {
			for _, i := range l {
				out = append(out, fmt.Sprintf("%s %s %s", i.Token, i.Name, i.State))
			}
			return out
		}
		l, err := f.Create(t.Context(), sandboxapi.WorkerGroup, []string{"b", "a", "b"})
		if err != nil {
			t.Fatal(err)
		}
		wantList(t, "created", summary(l), "b worker-1 Creating", "a worker-2 Creating", "b worker-1 Creating")
		time.Sleep(5 * time.Second)
		if err := f.Remove("worker-0", "worker-1", "worker-1", "worker-7"); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		// The order is the caller's: a deleted instance, a running one, a new one.
		l, err = f.Create(t.Context(), sandboxapi.WorkerGroup, []string{"b", "a", "c"})
		if err != nil {
			t.Fatal(err)
		}
		wantList(t, "asked again", summary(l), "b worker-1 Terminated", "a worker-2 Ready", "c worker-3 Creating")
		time.Sleep(5 * time.Second)
		wantList(t, "listed", summary(f.Instances()), "a worker-2 Ready", "c worker-3 Ready")
		if s, _ := f.snapshot(); s.group(sandboxapi.WorkerGroup).Count != 2 {
			t.Errorf("group counts %d", s.group(sandboxapi.WorkerGroup).Count)
		}

		f.save = func(*state) error { return errors.New("no space left on device") }
		if _, err := f.Create(t.Context(), sandboxapi.WorkerGroup, []string{"d", "e"}); err == nil {
			t.Error("what could not be written was created")
		}
		if err := f.Remove("worker-2", "worker-3"); err == nil {
			t.Error("what could not be written was deleted")
		}
		wantList(t, "after errors", summary(f.Instances()), "a worker-2 Ready", "c worker-3 Ready")
	})
}

func TestFleetFindsWhatACrashLeft(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newComputer()
		f, crash := testFleet(t, c, nil)
		scale(t, f, 1, 3)
		time.Sleep(3 * time.Second)
		if err := f.stop(t.Context(), "worker-2", "test"); err != nil {
			t.Fatal(err)
		}
		if _, err := f.Create(t.Context(), sandboxapi.WorkerGroup, []string{"late"}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(500 * time.Millisecond)
		crash()
		c.machines["worker-3"] = &twin{Machine: machine.Machine{Name: "worker-3", Power: machine.Creating}} // partially created
		c.Kill(t.Context(), "worker-1")                                                                     // and this one dies while the daemon is down
		st, _ := f.snapshot()
		before := c.look("control-plane-0").Booted

		f, stop := testFleet(t, c, st.clone())
		defer stop()
		time.Sleep(5 * time.Second)
		wantList(t, "adopted", boots(f), "control-plane-0:ready", "worker-0:ready", "worker-1:ready", "worker-2:stopped", "worker-3:ready")
		if !c.look("control-plane-0").Booted.Equal(before) {
			t.Error("a machine that ran was booted again")
		}
		if i, err := first(f.Create(t.Context(), sandboxapi.WorkerGroup, []string{"late"})); err != nil || i.Name != "worker-3" {
			t.Errorf("the token was forgotten: %+v %v", i, err)
		}
	})
}

func TestMachineThatDoesNotStartIsFailedAndTriedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newComputer()
		f, stop := testFleet(t, c, nil)
		defer stop()
		c.script("start", "worker-0", errors.New("no space left on device"))
		scale(t, f, 0, 1)
		time.Sleep(500 * time.Millisecond)
		if i, _ := f.byIP(f.Instances()[0].IP); !strings.Contains(i.Message, "no space left on device") {
			t.Errorf("message %q", i.Message)
		}
		wantList(t, "nothing half-made stays", c.names())
		time.Sleep(5 * time.Second)
		wantList(t, "second try", boots(f), "worker-0:ready")
		if m := f.Instances()[0].Message; m != "" {
			t.Errorf("old message %q stays", m)
		}

		c.script("start", "worker-1", slices.Repeat([]error{errors.New("disk quota exceeded")}, startTries)...)
		scale(t, f, 0, 2)
		time.Sleep(3500 * time.Millisecond)
		wantList(t, "given up for now", boots(f), "worker-0:ready", "worker-1:failed")
		time.Sleep(10 * time.Second)
		wantList(t, "until it has booted too often", boots(f), "worker-0:ready", "worker-1:ready")
	})
}

func TestMachineThatHangsIsFailedUntilItIsReady(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newComputer()
		c.hang["worker-0"] = true
		f, stop := testFleet(t, c, nil)
		defer stop()
		scale(t, f, 0, 1)
		time.Sleep(bootTimeout + 5*time.Second)
		i := f.Instances()[0]
		if i.State != cloud.Failed || !strings.Contains(i.Message, "/state/worker-0/console.log") {
			t.Errorf("got %+v", i)
		}
		if err := f.Remove("worker-0"); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		wantList(t, "machines", c.names())
	})
}

func TestMachineThatGoesDownIsSwitchedOnAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newComputer()
		f, stop := testFleet(t, c, nil)
		defer stop()
		scale(t, f, 0, 1)
		time.Sleep(time.Minute)
		c.Kill(t.Context(), "worker-0") // looks like "systemctl reboot" inside the machine
		time.Sleep(3 * time.Second)
		wantList(t, "back", boots(f), "worker-0:ready")
		if c.look("worker-0").Boots != 2 || c.starts != 1 {
			t.Errorf("%d boots, %d starts", c.look("worker-0").Boots, c.starts)
		}

		// A machine that goes down repeatedly counts as failed.
		for range startTries {
			time.Sleep(5 * time.Second)
			c.Kill(t.Context(), "worker-0")
		}
		synctest.Wait()
		wantList(t, "crash loop", boots(f), "worker-0:failed")
	})
}

func TestRebootAndStop(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newComputer()
		f, stop := testFleet(t, c, nil)
		defer stop()
		scale(t, f, 1, 0)
		time.Sleep(3 * time.Second)
		if err := f.reboot(t.Context(), "control-plane-0"); err != nil {
			t.Fatal(err)
		}
		wantList(t, "reboot returned", boots(f), "control-plane-0:booting")
		if c.look("control-plane-0").Boots != 2 {
			t.Error("it did not boot")
		}
		if err := f.stop(t.Context(), "control-plane-0", "unplugged"); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute)
		if i := f.Instances()[0]; i.State != cloud.Stopped || i.Message != "unplugged" {
			t.Errorf("got %+v", i)
		}
		if err := f.reboot(t.Context(), "control-plane-0"); err != nil {
			t.Fatal(err)
		}
		time.Sleep(3 * time.Second)
		wantList(t, "switched on", boots(f), "control-plane-0:ready")
		for _, err := range []error{f.reboot(t.Context(), "worker-9"), f.stop(t.Context(), "worker-9", "")} {
			if !errors.Is(err, errNoSuch) {
				t.Errorf("got %v", err)
			}
		}
	})
}

// A machine that is being made has no power to cut. It is made nevertheless.
func TestRebootOfAMachineThatIsBeingMade(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newComputer()
		f, stop := testFleet(t, c, nil)
		defer stop()
		if err := f.SetFaults([]string{"boot-delay=worker-0:10s"}); err != nil {
			t.Fatal(err)
		}
		scale(t, f, 0, 1)
		time.Sleep(time.Second)
		if err := f.stop(t.Context(), "worker-0", "unplugged"); err != nil {
			t.Error(err)
		}
		if err := f.reboot(t.Context(), "worker-0"); !errors.Is(err, cloud.ErrNotFound) {
			t.Errorf("reboot of a machine that does not exist yet: %v", err)
		}
		time.Sleep(time.Minute)
		wantList(t, "made", boots(f), "worker-0:ready")
	})
}

func TestRemovalIsRepeatedUntilItSucceeds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newComputer()
		f, stop := testFleet(t, c, nil)
		defer stop()
		scale(t, f, 0, 1)
		time.Sleep(3 * time.Second)
		c.script("remove", "worker-0", errors.New("device or resource busy"))
		if err := f.Remove("worker-0"); err != nil {
			t.Fatal(err)
		}
		time.Sleep(100 * time.Millisecond)
		if i := f.Instances(); len(i) != 1 || i[0].State != cloud.Terminating || !strings.Contains(i[0].Message, "busy") {
			t.Errorf("got %+v", i)
		}
		time.Sleep(2 * time.Second)
		if i := f.Instances(); len(i) != 0 || len(c.names()) != 0 {
			t.Errorf("left: %+v %v", i, c.names())
		}
	})
}

func TestWhatCannotBeWrittenDoesNotHappen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newComputer()
		f, stop := testFleet(t, c, nil)
		defer stop()
		f.save = func(*state) error { return errors.New("no space left on device") }
		if err := f.SetCount(t.Context(), sandboxapi.WorkerGroup, 2); err == nil {
			t.Error("accepted")
		}
		if _, err := f.Create(t.Context(), sandboxapi.WorkerGroup, []string{"heir"}); err == nil {
			t.Error("accepted")
		}
		synctest.Wait()
		wantList(t, "machines", c.names())
		if len(f.Instances()) != 0 {
			t.Errorf("instances %v", f.Instances())
		}
	})
}

func TestFullComputerRefuses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, stop := testFleet(t, newComputer(), nil)
		defer stop()
		f.admit = func(context.Context, machine.Demand) error {
			return errors.New("124 of 128 inotify instances are in use")
		}
		if err := f.SetCount(t.Context(), sandboxapi.WorkerGroup, 1); !errors.Is(err, errCapacity) {
			t.Errorf("got %v", err)
		}
		if _, err := f.Create(t.Context(), sandboxapi.WorkerGroup, []string{"heir"}); !errors.Is(err, errCapacity) {
			t.Errorf("got %v", err)
		}
	})
}

func TestBootFaults(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newComputer()
		f, stop := testFleet(t, c, nil)
		defer stop()
		if err := f.SetFaults([]string{"boot-delay=worker-0:30s", "never-boot=worker-1"}); err != nil {
			t.Fatal(err)
		}
		scale(t, f, 1, 2)
		time.Sleep(20 * time.Second)
		wantList(t, "delayed", boots(f), "control-plane-0:ready", "worker-0:creating", "worker-1:booting")
		time.Sleep(20 * time.Second)
		wantList(t, "delay over", boots(f), "control-plane-0:ready", "worker-0:ready", "worker-1:booting")
		time.Sleep(bootTimeout)
		wantList(t, "given up", boots(f), "control-plane-0:ready", "worker-0:ready", "worker-1:failed")
		if err := f.SetFaults(nil); err != nil {
			t.Fatal(err)
		}
		time.Sleep(3 * time.Second)
		wantList(t, "faults over", boots(f), "control-plane-0:ready", "worker-0:ready", "worker-1:ready")
		if err := f.SetFaults([]string{"meteor"}); err == nil {
			t.Error("an unknown fault was accepted")
		}
	})
}

func TestKillFaultStrikesOnceAtItsPoint(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newComputer()
		f, stop := testFleet(t, c, nil)
		defer stop()
		if err := f.SetFaults([]string{"kill=worker-0:component"}); err != nil {
			t.Fatal(err)
		}
		scale(t, f, 0, 2)
		time.Sleep(3 * time.Second)
		ips := map[string]cloud.Instance{}
		for _, i := range f.Instances() {
			ips[i.Name] = i
			f.pass(i.IP, pointMetadata)
		}
		f.pass(ips["worker-1"].IP, pointComponent)
		synctest.Wait()
		wantList(t, "other points", boots(f), "worker-0:ready", "worker-1:ready")
		f.pass(ips["worker-0"].IP, pointComponent)
		synctest.Wait()
		wantList(t, "struck", boots(f), "worker-0:stopped", "worker-1:ready")
		if err := f.reboot(t.Context(), "worker-0"); err != nil {
			t.Fatal(err)
		}
		time.Sleep(3 * time.Second)
		f.pass(ips["worker-0"].IP, pointComponent)
		synctest.Wait()
		wantList(t, "only once", boots(f), "worker-0:ready", "worker-1:ready")
	})
}

func TestInitPortStaysWithItsMachine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newComputer()
		f, stop := testFleet(t, c, nil)
		defer stop()
		at := func() string {
			if b := f.initBackends(); len(b) > 0 {
				return b[0].name
			}
			return "nobody"
		}
		if err := f.SetFaults([]string{"never-boot=control-plane-0"}); err != nil {
			t.Fatal(err)
		}
		scale(t, f, 3, 0)
		if got := at(); got != "nobody" {
			t.Errorf("before any boot: %s", got)
		}
		time.Sleep(3 * time.Second)
		if got := at(); got != "control-plane-1" {
			t.Errorf("the first that booted is control-plane-1, not %s", got)
		}
		if err := f.SetFaults(nil); err != nil {
			t.Fatal(err)
		}
		time.Sleep(3 * time.Second)
		if err := f.reboot(t.Context(), "control-plane-1"); err != nil {
			t.Fatal(err)
		}
		if got := at(); got != "control-plane-1" {
			t.Errorf("while it reboots: %s", got)
		}
		if n := len(f.initBackends()); n != 1 {
			t.Errorf("while it reboots, %d machines are behind the port", n)
		}
		time.Sleep(3 * time.Second)
		if got, n := at(), len(f.initBackends()); got != "control-plane-1" || n != 3 {
			t.Errorf("after its reboot: %s is the first of %d machines", got, n)
		}
		if err := f.stop(t.Context(), "control-plane-1", ""); err != nil {
			t.Fatal(err)
		}
		if got := at(); got != "control-plane-0" {
			t.Errorf("after its end: %s", got)
		}
		if got := len(f.controlPlanes(6443)); got != 2 {
			t.Errorf("%d backends for the API server", got)
		}
	})
}

// The faults of a machine last through all of its boots, until they are removed.
func TestMachinesSuffer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newComputer()
		f, stop := testFleet(t, c, nil)
		defer stop()
		scale(t, f, 1, 2)
		time.Sleep(time.Minute)
		suffers := func(name string) machine.Faults {
			c.mu.Lock()
			defer c.mu.Unlock()
			return c.suffers[name]
		}
		if err := f.SetFaults([]string{"frozen=worker-0", "cut-to=worker-1:cloud"}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(2 * retryFault)
		lost := machine.Faults{Lost: []machine.Peer{{IP: machine.Gateway}}}
		if a, b := suffers("worker-0"), suffers("worker-1"); !a.Frozen || !reflect.DeepEqual(b, lost) {
			t.Errorf("they suffer from %+v and %+v", a, b)
		}
		c.mu.Lock()
		c.suffers = nil // a machine loses its faults when it is switched off
		c.mu.Unlock()
		if err := f.reboot(t.Context(), "worker-0"); err != nil {
			t.Fatal(err)
		}
		time.Sleep(2 * retryFault)
		if !suffers("worker-0").Frozen || suffers("worker-1").Any() {
			t.Errorf("after one has booted they suffer from %+v and %+v", suffers("worker-0"), suffers("worker-1"))
		}
		if err := f.SetFaults(nil); err != nil {
			t.Fatal(err)
		}
		time.Sleep(2 * retryFault)
		if suffers("worker-0").Any() {
			t.Error("it suffers after the end of the fault")
		}
	})
}

// A power cut applies the disk faults of that moment, including those that were set just
// before.
func TestPowerCutLosesWhatTheFaultsSay(t *testing.T) {
	if err := disk.Supported(); err != nil {
		t.Skipf("a fleet refuses the fault here: %v", err)
	}
	synctest.Test(t, func(t *testing.T) {
		c := newComputer()
		f, stop := testFleet(t, c, nil)
		defer stop()
		scale(t, f, 1, 0)
		time.Sleep(time.Minute)
		cuts := 20 // the order is random
		if testing.Short() {
			cuts = 4
		}
		for n := range cuts {
			if err := f.SetFaults([]string{"lost-writes=control-plane-0"}); err != nil {
				t.Fatal(err)
			}
			if err := f.stop(t.Context(), "control-plane-0", "its power is cut"); err != nil {
				t.Fatal(err)
			}
			c.mu.Lock()
			lost := c.machines["control-plane-0"].lost
			c.mu.Unlock()
			if !lost.LostWrites {
				t.Fatalf("at cut %d it suffered from %+v", n, lost)
			}
			if err := f.SetFaults(nil); err != nil {
				t.Fatal(err)
			}
			if err := f.reboot(t.Context(), "control-plane-0"); err != nil {
				t.Fatal(err)
			}
			time.Sleep(time.Minute)
		}
	})
}

// A power cut strikes once, when the machine writes a new file.
func TestPowerCutStrikesAtItsPoint(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newComputer()
		f, stop := testFleet(t, c, nil)
		defer stop()
		scale(t, f, 1, 2)
		time.Sleep(time.Minute)
		write := func(files ...string) {
			c.mu.Lock()
			c.written = map[string][]string{"control-plane-0" + filePoints["upgrade-etcd"]: files}
			c.mu.Unlock()
		}
		boots := func() int {
			m, err := c.Machine("control-plane-0")
			if err != nil {
				t.Fatal(err)
			}
			return m.Boots
		}
		write("old")
		if err := f.SetFaults([]string{"power-cut=control-plane-0:upgrade-etcd"}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute)
		if n := boots(); n != 1 {
			t.Fatalf("it has booted %d times for faults from before", n)
		}
		write("old", "new")
		time.Sleep(time.Minute)
		write("old", "new", "newer")
		time.Sleep(time.Minute)
		if n := boots(); n != 2 {
			t.Errorf("it has booted %d times, want once more", n)
		}
		if i, ok := f.Instance("control-plane-0"); !ok || i.State != cloud.Ready {
			t.Errorf("it is %+v", i)
		}
		if err := f.SetFaults([]string{"power-cut=control-plane-0:upgrade-etcd", "quota=9"}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute)
		write("newest")
		time.Sleep(time.Minute)
		if n := boots(); n != 2 {
			t.Errorf("it has booted %d times after another fault was set", n)
		}
	})
}
