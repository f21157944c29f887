package drill

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"constellation/engine"
	"constellation/engine/sandbox/recorder"
)

// fault is something that can go wrong in a drill.
type fault struct {
	name, does string
	machines   []string // that can have it
	// at are the points at which it can begin; nil are those that a replacement has.
	at []string
	// anywhere means that it happens to the cluster or its cloud, not to the machine that
	// the point is about.
	anywhere bool
	lasts    bool // as long as the seed says
	// ofDisk means that the machine is a control plane whose etcd has a disk that can fail.
	// Machines have such disks from their first boot on.
	ofDisk bool
	// cutAt is the point of kubeadm at which a machine's power goes; see [run.cutAhead].
	cutAt   string
	excuses []recorder.Rule
	// happen makes it happen and ends it; on is the machine, wait waits as long as it lasts.
	happen func(ctx context.Context, x *run, on string, wait func()) error
}

// longestFault is how long a fault may last.
var longestFault = map[string]time.Duration{hollow: 6 * time.Second, simulated: 12 * time.Second, real: 25 * time.Second}

// most is how often there is a point of a name at least at which the fault can begin.
func (f *fault) most(kind, point string, controlPlanes int) int {
	switch {
	case !slices.Contains(perNode, point), f.ofDisk: // control planes are replaced first
		return 1
	case kind == hollow:
		return hollowWorkers
	default:
		return workers + max(controlPlanes, 1)
	}
}

// points are those at which a fault can begin on machines of a kind that are upgraded to a
// version of Kubernetes.
func (f *fault) points(kind, kubernetes string) []string {
	at := f.at
	if at == nil {
		at = perNode
	}
	if kind == hollow || kubernetes == kubernetesFrom { // kubeadm has nothing to do
		at = slices.DeleteFunc(slices.Clone(at), func(p string) bool { return p == pointKubeadm })
	}
	return at
}

// Machines that can have a fault: all, or those in which programs run.
var (
	everywhere = []string{real, simulated, hollow}
	running    = []string{real, simulated}
)

// ofCloud makes a fault of the cloud that lasts a while.
func ofCloud(spec func(on string) string) func(context.Context, *run, string, func()) error {
	return func(ctx context.Context, x *run, on string, wait func()) error {
		f := spec(on)
		if err := x.cloudFault(ctx, f, true); err != nil {
			return err
		}
		wait()
		return x.cloudFault(ctx, f, false)
	}
}

func always(spec string) func(string) string { return func(string) string { return spec } }

// faults are all, by name. What they do is told to people.
var faults = []fault{
	{
		name: "api-429", does: "the cloud answers half of all calls with 429", machines: everywhere, anywhere: true, lasts: true,
		happen: ofCloud(always("api-429=0.5")),
	},
	{
		name: "api-500", does: "the cloud answers half of all calls with 500", machines: everywhere, anywhere: true, lasts: true,
		happen: ofCloud(always("api-500=0.5")),
	},
	{
		name: "api-latency", does: "the cloud answers a second late", machines: everywhere, anywhere: true, lasts: true,
		happen: ofCloud(always("api-latency=1s")),
	},
	{
		name: "create-timeout", does: "the cloud makes machines and does not say so", machines: everywhere, anywhere: true, lasts: true,
		at: []string{pointBegun, pointIntent}, happen: ofCloud(always("create-timeout=1")),
	},
	{
		name: "describe-lag", does: "the cloud describes machines as they were some seconds ago", machines: everywhere, anywhere: true, lasts: true,
		happen: ofCloud(always("describe-lag=3s")),
	},
	{
		name: "lost-delete", does: "the cloud accepts deletions and forgets them", machines: everywhere, anywhere: true, lasts: true,
		at: []string{pointCordoned, pointBound}, happen: ofCloud(always("lost-delete=1")),
	},
	{
		name: "never-join", does: "a new machine learns nothing about its cluster, and cannot join", machines: everywhere, lasts: true,
		at: []string{pointRequested}, happen: ofCloud(func(on string) string { return "never-join=" + on }),
	},
	{
		name: "operator-killed", does: "the process of the operator is killed", machines: everywhere, anywhere: true,
		happen: func(ctx context.Context, x *run, _ string, _ func()) error { return x.site.killOperator(ctx) },
	},
	{
		name: "partial-list", does: "every third list of machines lacks one", machines: everywhere, anywhere: true, lasts: true,
		happen: ofCloud(always("partial-list=0.3")),
	},
	{
		name: "api-server-killed", does: "the API server is killed, and is back later", machines: []string{hollow}, anywhere: true, lasts: true,
		happen: func(ctx context.Context, x *run, _ string, wait func()) error {
			x.site.stopAPIServer()
			wait()
			return x.site.startAPI(ctx)
		},
	},
	{
		name: "console-killed", does: "the console that upgrades is killed, and its command given again", machines: running, anywhere: true,
		at:     []string{pointBegun, pointKubeadm, pointIntent, pointCordoned},
		happen: func(ctx context.Context, x *run, _ string, _ func()) error { return x.site.killConsole(ctx) },
	},
	{
		name: "power-cut", does: "a machine loses its power for a moment, and boots", machines: running,
		at: ofMachines, excuses: hurt,
		happen: func(ctx context.Context, x *run, on string, _ func()) error { return x.power(ctx, on) },
	},
	{
		name: "power-cut-etcd", does: "a control plane loses its power when kubeadm replaces its etcd", machines: running,
		at: []string{pointKubeadm}, excuses: hurt, cutAt: "upgrade-etcd", happen: inUpgrade("power-cut-etcd"),
	},
	{
		name: "power-cut-api-server", does: "a control plane loses its power when kubeadm replaces its API server", machines: running,
		at: []string{pointKubeadm}, excuses: hurt, cutAt: "upgrade-api-server", happen: inUpgrade("power-cut-api-server"),
	},
	ofMachine("frozen", "no process of a machine gets a turn", running),
	ofMachine("isolated", "a machine's cable is out", []string{real}),
	ofMachine("tpm-hangs", "a machine's TPM does not answer", running),
	ofMachine("disk-full", "nothing more fits where a machine's programs are installed", []string{real}),
	ofMachine("disk-read-only", "nothing can be written where a machine's programs are installed", []string{real}),
	{
		name: "cut-to-cloud", does: "what a machine sends to its cloud and the load balancer is lost; what they send arrives", machines: []string{real}, lasts: true,
		at: ofMachines, excuses: hurt, happen: ofCloud(func(on string) string { return "cut-to=" + on + ":cloud" }),
	},
	{
		name: "console-cut", does: "nothing passes between the console and the cluster", machines: running, anywhere: true, lasts: true,
		at: []string{pointBegun, pointKubeadm, pointIntent, pointCordoned}, excuses: unseen, happen: ofCloud(always("console-cut")),
	},
	{
		name: "component-corrupt", does: "the kubelet is served with one byte changed", machines: running, anywhere: true, lasts: true,
		at: []string{pointKubeadm, pointIntent, pointRequested}, happen: ofCloud(always("component-corrupt=kubelet")),
	},
	{
		name: "component-truncate", does: "half of the kubelet is served", machines: running, anywhere: true, lasts: true,
		at: []string{pointKubeadm, pointIntent, pointRequested}, happen: ofCloud(always("component-truncate=kubelet")),
	},
	{
		name: "registry-empty", does: "the image registry has no image", machines: []string{real}, anywhere: true, lasts: true,
		at: []string{pointKubeadm, pointRequested, pointAdopted}, happen: ofCloud(always("registry-empty")),
	},
	{
		name: "slow-disk", does: "each sync of a control plane's etcd takes 300 ms longer", machines: []string{real}, lasts: true, ofDisk: true,
		at: ofMachines, excuses: hurt, happen: ofCloud(func(on string) string { return "slow-disk=" + on + ":300ms" }),
	},
	{
		name: "lost-writes", does: "a control plane loses its power for a moment, and what its etcd wrote and did not sync", machines: []string{real}, ofDisk: true,
		at: ofMachines, excuses: hurt, happen: losing("lost-writes"),
	},
	{
		name: "torn-writes", does: "a control plane loses its power for a moment, and half of the pages that its etcd wrote and did not sync", machines: []string{real}, ofDisk: true,
		at: ofMachines, excuses: hurt, happen: losing("torn-writes"),
	},
}

// diskThatCanFail is the fault by which all machines of a sandbox get a disk that can fail.
// It does no harm.
const diskThatCanFail = "slow-disk=1:1ns"

var (
	// ofMachines are the points at which a machine can be hurt. One that goes is spared.
	ofMachines = []string{pointKubeadm, pointAdopted, pointReady, pointCordoned}
	// unseen are rules that are judged by two views, of which a fault makes one old.
	unseen = []recorder.Rule{
		recorder.ReadyFloor, recorder.Pairs, recorder.LeaseMoved, recorder.EtcdVoters, recorder.WorkersLast, recorder.AutoscalerPaused, recorder.MachineTracked, recorder.VersionSkew,
	}
	// hurt are rules that a machine which suffers breaks whatever anybody decides, and
	// those that cannot be judged while it is the control plane that does.
	hurt = append([]recorder.Rule{recorder.ServiceAnswers}, unseen...)
)

// ofMachine is a fault that a machine suffers from for a while.
func ofMachine(name, does string, machines []string) fault {
	return fault{
		name: name, does: does, machines: machines, at: ofMachines, lasts: true, excuses: hurt,
		happen: ofCloud(func(on string) string { return name + "=" + on }),
	}
}

// losing cuts the power of a machine that loses by it what a fault of disks says.
func losing(fault string) func(context.Context, *run, string, func()) error {
	return func(ctx context.Context, x *run, on string, _ func()) error {
		spec := fault + "=" + on
		if err := x.cloudFault(ctx, spec, true); err != nil {
			return err
		}
		return errors.Join(x.power(ctx, on), x.cloudFault(ctx, spec, false))
	}
}

// power cuts the power of a machine now, and gives it back.
func (x *run) power(ctx context.Context, on string) error {
	x.switches.Lock()
	defer x.switches.Unlock()
	x.switched[on]++
	return x.site.power(ctx, on)
}

// cut is a power cut that was asked for ahead.
type cut struct {
	over chan struct{} // closed when the machine has booted, or never will for this
	// Set before over is closed.
	from time.Time // when it may have struck
	err  error
}

// cutAhead asks, before the upgrade begins, for the power cuts in kubeadm that a drill is
// to have, one after the other. Kubeadm shows where it is by files, and is faster than what
// is seen of it through the cluster. They are given up when ctx ends.
func (x *run) cutAhead(ctx context.Context, plan []engine.DrillInjection) {
	x.cuts = map[string]*cut{}
	var order []*fault
	for i := range faults { // in the order in which kubeadm comes to them
		f := &faults[i]
		if f.cutAt != "" && slices.ContainsFunc(plan, func(in engine.DrillInjection) bool { return in.Fault == f.name }) {
			order, x.cuts[f.name] = append(order, f), &cut{over: make(chan struct{})}
		}
	}
	x.wg.Go(func() {
		for _, f := range order {
			c := x.cuts[f.name]
			c.from, c.err = x.cutAny(ctx, f.cutAt)
			close(c.over)
		}
	})
}

// cutAny cuts the power of the one control plane that comes to a point, whichever it is,
// and says when that may have been. It returns when the machine has booted.
func (x *run) cutAny(ctx context.Context, point string) (time.Time, error) {
	type struck struct {
		from time.Time
		err  error
	}
	others, stop := context.WithCancel(ctx)
	defer stop()
	all := make(chan struck)
	for _, on := range x.site.controlPlanes {
		go func() {
			from, err := x.cutAt(others, on, point)
			all <- struck{from, err}
		}()
	}
	var is struck
	for i := range x.site.controlPlanes {
		if s := <-all; i == 0 || s.err == nil {
			is = s
		}
		if is.err == nil {
			stop()
		}
	}
	return is.from, is.err
}

// cutAt cuts the power of a machine when it comes to a point, and says when that may have
// been. It returns when the machine has booted.
func (x *run) cutAt(ctx context.Context, on, point string) (from time.Time, err error) {
	// booted says when the machine did so, zero if nobody knows, and how often another fault was the cause.
	booted := func() (t time.Time, others int) {
		x.switches.Lock()
		defer x.switches.Unlock()
		info, err := x.site.cloud.Sandbox(ctx)
		if err != nil {
			return t, 0
		}
		for _, m := range info.Machines {
			if m.Name == on {
				t = m.Started
			}
		}
		return t, x.switched[on]
	}
	var before time.Time
	var others int
	if err := until(ctx, x.site.limit, "the cloud says when "+on+" booted", func() bool { before, others = booted(); return !before.IsZero() }); err != nil {
		return from, err
	}
	from = time.Now()
	spec := "power-cut=" + on + ":" + point
	whatever := context.WithoutCancel(ctx) // what was asked for is taken back
	err = x.cloudFault(whatever, spec, true)
	if err == nil {
		err = until(ctx, x.site.limit, "the power of "+on+" was cut at "+point, func() bool {
			asked := time.Now()
			switch now, by := booted(); {
			case now.IsZero():
			case now.Equal(before), by != others:
				from, before, others = asked, now, by
			default:
				return true
			}
			return false
		})
	}
	return from, errors.Join(err, x.cloudFault(whatever, spec, false))
}

// inUpgrade waits for a power cut that was asked for ahead.
func inUpgrade(fault string) func(context.Context, *run, string, func()) error {
	return func(_ context.Context, x *run, _ string, _ func()) error {
		c := x.cuts[fault]
		<-c.over
		return c.err
	}
}

func faultNamed(name string) *fault {
	for i := range faults {
		if faults[i].name == name {
			return &faults[i]
		}
	}
	panic(fmt.Sprintf("no fault %q", name)) // a scenario is made of these
}

// Faults lists what can go wrong. See [engine.Drills].
func (d *Drills) Faults() []engine.DrillFault {
	out := make([]engine.DrillFault, len(faults))
	for i := range faults {
		f := &faults[i]
		out[i] = engine.DrillFault{Name: f.name, Does: f.does, Machines: f.machines, Points: f.points(f.machines[0], kubernetesTo)}
	}
	return out
}

// cloudFault begins or ends a fault of the cloud, beside those that there are.
func (x *run) cloudFault(ctx context.Context, spec string, begin bool) error {
	x.mu.Lock()
	defer x.mu.Unlock()
	if begin {
		x.active = append(x.active, spec)
	} else if i := slices.Index(x.active, spec); i >= 0 {
		x.active = slices.Delete(x.active, i, i+1)
	}
	return x.site.cloud.SetFaults(ctx, append([]string{}, x.active...))
}
