package drill

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"constellation/engine"
	"constellation/engine/cloud/gcp"
	"constellation/engine/sandbox/recorder"
	"constellation/engine/version"
	"constellation/internal/delay"
)

// fault is a fault that a drill can inject.
type fault struct {
	name, does string
	machines   []string // kinds that support it
	// clouds are the clouds that have it: emulated ones by their providers, and ownCloud. nil means ownCloud alone, and any cloud if
	// hollow machines cannot have it: then it is of the machines.
	clouds []string
	// at are the points at which it can start; nil means those of a replacement. placed are those
	// of an upgrade in place; nil means that it is not injected there.
	at, placed []string
	// anywhere means that it affects the cluster or its cloud, not the machine of
	// the point.
	anywhere bool
	lasts    bool // for the seed's duration
	// ofDisk means that the machine is a control plane whose etcd has a faulty disk.
	// Machines have such disks from their first boot on.
	ofDisk bool
	// loses means that a machine is lost for good, with its disk. A cluster with one control plane does not survive that.
	loses bool
	// named means that only drills that name it have it, among their faults in any case. So it does not change the meaning of seeds.
	named bool
	// cutAt is the point of kubeadm at which a machine loses power; see [run.cutAhead].
	cutAt   string
	excuses []recorder.Rule
	// happen injects it and ends it; on is the machine, wait blocks for the duration.
	happen func(ctx context.Context, x *run, on string, wait func()) error
}

// ownCloud is the cloud of a sandbox.
const ownCloud = ""

var (
	// emulated are the clouds that can be emulated in front of machines.
	emulated = []string{gcp.Name}
	anyCloud = append([]string{ownCloud}, emulated...)
)

// has reports whether the fault exists with a cloud.
func (f *fault) has(cloud string) bool {
	return slices.Contains(f.of(), cloud)
}

// of returns the clouds that have the fault.
func (f *fault) of() []string {
	switch {
	case f.clouds != nil:
		return f.clouds
	case slices.Contains(f.machines, hollow):
		return []string{ownCloud}
	}
	return anyCloud
}

// longestFault is the maximum duration of a fault.
var longestFault = map[string]time.Duration{hollow: 6 * time.Second, simulated: 12 * time.Second, real: 25 * time.Second}

// most is the minimum number of occurrences of a point at which the fault can start.
func (f *fault) most(kind, point string, spec engine.DrillSpec) int {
	controlPlanes := max(spec.ControlPlanes, 1)
	nodes, drained := workers+controlPlanes, workers+controlPlanes
	if controlPlanes == 1 { // it is not drained, and its agent upgrades the cluster's Kubernetes
		drained = workers
	}
	switch {
	case spec.InPlace && point == pointScheduled:
		return nodes
	case spec.InPlace && point == pointUpgraded: // the drill ends with the last one
		return nodes - 1
	case spec.InPlace && slices.Contains(perUpgrade, point):
		return drained
	case !slices.Contains(perNode, point), f.ofDisk: // control planes are replaced first
		return 1
	case kind == hollow:
		return hollowWorkers
	default:
		return nodes
	}
}

// points are those at which a fault can start on machines of a kind. With stays, their
// version of Kubernetes does not change.
func (f *fault) points(kind string, stays bool) []string {
	at := f.at
	if at == nil {
		at = perNode
	}
	if kind == hollow || stays { // kubeadm has nothing to do
		at = slices.DeleteFunc(slices.Clone(at), func(p string) bool { return p == pointKubeadm })
	}
	return at
}

// inPlace are the points at which a fault can start in an upgrade in place between two versions.
func (f *fault) inPlace(from, to string) []string {
	a, err := version.Parse(from)
	b, other := version.Parse(to)
	if err == nil && other == nil && a.MinorDistance(b) == 0 && f.cutAt == pointEtcd { // patches of a minor have the same etcd
		return nil
	}
	return f.placed
}

// pointEtcd is where kubeadm replaces etcd.
const pointEtcd = "upgrade-etcd"

// Kinds of machines with a fault: all, or those that run programs.
var (
	everywhere = []string{real, simulated, hollow}
	running    = []string{real, simulated}
)

// ofCloud makes a temporary fault of the cloud.
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

// faults are all faults, by name. Users see the descriptions.
var faults = []fault{
	{
		name: "api-429", does: "half of all cloud API calls fail with 429", machines: everywhere, clouds: anyCloud, anywhere: true, lasts: true, placed: perUpgrade,
		happen: ofCloud(always("api-429=0.5")),
	},
	{
		name: "api-500", does: "half of all cloud API calls fail with 500", machines: everywhere, clouds: anyCloud, anywhere: true, lasts: true, placed: perUpgrade,
		happen: ofCloud(always("api-500=0.5")),
	},
	{
		name: "api-latency", does: "each cloud API call takes a second longer", machines: everywhere, clouds: anyCloud, anywhere: true, lasts: true, placed: perUpgrade,
		happen: ofCloud(always("api-latency=1s")),
	},
	{
		name: "create-timeout", does: "create calls make the machine, but time out", machines: everywhere, anywhere: true, lasts: true,
		at: []string{pointBegun, pointIntent}, happen: ofCloud(always("create-timeout=1")),
	},
	{
		name: "describe-lag", does: "the cloud API returns data that is up to 3 s old", machines: everywhere, anywhere: true, lasts: true, placed: perUpgrade,
		happen: ofCloud(always("describe-lag=3s")),
	},
	{
		name: "lost-delete", does: "delete calls succeed without deleting the machine", machines: everywhere, anywhere: true, lasts: true,
		at: []string{pointCordoned, pointBound}, happen: ofCloud(always("lost-delete=1")),
	},
	{
		name: "never-join", does: "a new machine receives no metadata, so it cannot join", machines: everywhere, clouds: anyCloud, lasts: true,
		at: []string{pointRequested}, happen: ofCloud(func(on string) string { return "never-join=" + on }),
	},
	{
		name: "operator-killed", does: "the process of the operator is killed", machines: everywhere, clouds: anyCloud, anywhere: true, placed: perUpgrade,
		happen: func(ctx context.Context, x *run, _ string, _ func()) error { return x.site.killOperator(ctx) },
	},
	{
		name: "partial-list", does: "every third machine list silently lacks one machine", machines: everywhere, anywhere: true, lasts: true, placed: perUpgrade,
		happen: ofCloud(always("partial-list=0.3")),
	},
	{
		name: "api-server-killed", does: "the API server is killed, and restarts later", machines: []string{hollow}, clouds: anyCloud, anywhere: true, lasts: true,
		happen: func(ctx context.Context, x *run, _ string, wait func()) error {
			x.site.stopAPIServer()
			wait()
			return x.site.startAPI(ctx)
		},
	},
	{
		name: "console-killed", does: "the console that upgrades is killed, and its command is repeated", machines: running, anywhere: true,
		at: []string{pointBegun, pointKubeadm, pointIntent, pointCordoned}, placed: []string{pointBegun, pointKubeadm, pointScheduled, pointUpgrading},
		happen: func(ctx context.Context, x *run, _ string, _ func()) error { return x.site.killConsole(ctx) },
	},
	{
		name: "power-cut", does: "a machine loses power for a moment, and boots again", machines: running,
		at: ofMachines, placed: ofNodes, excuses: hurt,
		happen: func(ctx context.Context, x *run, on string, _ func()) error { return x.power(ctx, on) },
	},
	{
		name: "power-cut-etcd", does: "a control plane loses its power when kubeadm replaces its etcd", machines: running,
		at: []string{pointKubeadm}, placed: []string{pointKubeadm}, excuses: hurt, cutAt: pointEtcd, happen: inUpgrade("power-cut-etcd"),
	},
	{
		name: "power-cut-api-server", does: "a control plane loses its power when kubeadm replaces its API server", machines: running,
		at: []string{pointKubeadm}, placed: []string{pointKubeadm}, excuses: hurt, cutAt: "upgrade-api-server", happen: inUpgrade("power-cut-api-server"),
	},
	ofMachine("frozen", "all processes of a machine stop", running),
	ofMachine("isolated", "a machine loses all network connectivity", []string{real}),
	noNode(ofMachine("tpm-hangs", "a machine's TPM does not respond", running)),
	ofMachine("disk-full", "the directories of a machine's programs are full", []string{real}),
	ofMachine("disk-read-only", "the directories of a machine's programs are read-only", []string{real}),
	{
		name: "cut-to-cloud", does: "packets from a machine to its cloud and the load balancer are dropped; packets from them arrive", machines: []string{real}, lasts: true,
		at: ofMachines, placed: ofNodes, excuses: hurt, happen: ofCloud(func(on string) string { return "cut-to=" + on + ":cloud" }),
	},
	{
		name: "console-cut", does: "all connections between the console and the cluster stall", machines: running, anywhere: true, lasts: true,
		at: []string{pointBegun, pointKubeadm, pointIntent, pointCordoned}, placed: []string{pointBegun, pointKubeadm, pointScheduled, pointUpgrading},
		excuses: unseen, happen: ofCloud(always("console-cut")),
	},
	{
		name: "component-corrupt", does: "the downloaded kubelet has one changed byte", machines: running, anywhere: true, lasts: true,
		at: []string{pointKubeadm, pointIntent, pointRequested}, placed: []string{pointBegun, pointKubeadm, pointScheduled, pointCordoned}, happen: ofCloud(always("component-corrupt=kubelet")),
	},
	{
		name: "component-truncate", does: "downloads of the kubelet end after half of it", machines: running, anywhere: true, lasts: true,
		at: []string{pointKubeadm, pointIntent, pointRequested}, placed: []string{pointBegun, pointKubeadm, pointScheduled, pointCordoned}, happen: ofCloud(always("component-truncate=kubelet")),
	},
	{
		name: "registry-empty", does: "the image registry has no images", machines: []string{real}, anywhere: true, lasts: true,
		at: []string{pointKubeadm, pointRequested, pointAdopted}, placed: []string{pointBegun, pointKubeadm}, happen: ofCloud(always("registry-empty")),
	},
	{
		name: "slow-disk", does: "each fsync of a control plane's etcd takes 300 ms longer", machines: []string{real}, lasts: true, ofDisk: true,
		at: ofMachines, placed: []string{pointKubeadm}, excuses: hurt, happen: ofCloud(func(on string) string { return "slow-disk=" + on + ":300ms" }),
	},
	{
		name: "lost-writes", does: "a control plane loses power for a moment, and all data that its etcd wrote without fsync", machines: []string{real}, ofDisk: true,
		at: ofMachines, placed: []string{pointKubeadm}, excuses: hurt, happen: losing("lost-writes"),
	},
	{
		name: "torn-writes", does: "a control plane loses power for a moment, and half of the pages that its etcd wrote without fsync", machines: []string{real}, ofDisk: true,
		at: ofMachines, placed: []string{pointKubeadm}, excuses: hurt, happen: losing("torn-writes"),
	},
	// Of upgrades in place alone. Their order decides what seeds of these drills mean.
	{
		name: "agent-killed", does: "the process of a node's agent is killed", machines: running, at: []string{},
		placed: []string{pointKubeadm, pointUpgrading, pointApplying, pointUpgraded}, happen: killing("agent"),
	},
	{
		name: "relay-killed", does: "the process between the operator and a node's agent is killed", machines: running, at: []string{},
		placed: []string{pointCordoned, pointUpgrading, pointApplying}, happen: killing("relay"),
	},
	inStage("power-cut-download", "a node loses its power while its agent downloads kubeadm", "download-kubeadm"),
	inStage("power-cut-node", "a node loses its power when its agent runs kubeadm", "run-kubeadm"),
	inStage("power-cut-kubelet", "a node loses its power while its agent downloads the kubelet", "download-kubelet"),
	// Of emulated clouds alone.
	ofGCP("stockout", "the zone has no machines left", "stockout"),
	{
		name: "quota", does: "the project may not have more machines than it has", machines: everywhere, clouds: []string{gcp.Name}, anywhere: true, lasts: true,
		happen: func(ctx context.Context, x *run, on string, wait func()) error {
			return ofCloud(always(fmt.Sprint("quota=", x.site.size)))(ctx, x, on, wait)
		},
	},
	ofGCP("role-revoked", "the account of the operator may not change groups", "role-revoked=compute.instanceGroupManagers.update"),
	ofGCP("operation-lost", "operations of the cloud that start meanwhile never end, and have no effect", "operation-lost"),
	{
		name: "name-reuse", does: "a machine is gone, and its group makes another one of its name", machines: everywhere, clouds: []string{gcp.Name},
		at: []string{pointAdopted, pointReady, pointCordoned}, lasts: true, excuses: hurt, loses: true,
		happen: ofCloud(func(on string) string { return "name-reuse=" + on }),
	},
	// Of drills that name them.
	{
		name: powerCutAll, does: "all machines lose power at once for a moment, and boot again; only if --faults names it", machines: running, anywhere: true, named: true,
		at: append([]string{pointKubeadm}, perNode...), placed: ofNodes, excuses: hurt, happen: cutAll,
	},
}

// powerCutAll is the fault that hits all machines.
const powerCutAll = "power-cut-all"

// outageLimit is how long machines may take to be Ready nodes again after a power cut of all of them.
const outageLimit = 5 * time.Minute

// cutAll power-cycles all machines at once. It returns when they are Ready nodes again, or have not become that in time. The
// recorder's rule judges that.
func cutAll(ctx context.Context, x *run, _ string, _ func()) error {
	begun := time.Now()
	x.switches.Lock()
	names, err := x.site.powerAll(ctx, func(names []string) {
		for _, name := range names {
			x.switched[name]++
		}
	})
	x.switches.Unlock()
	if err != nil {
		return err
	}
	wait, cancel := context.WithTimeout(ctx, outageLimit)
	defer cancel()
	for {
		away := x.site.away(wait, names, begun)
		if len(away) == 0 || !delay.For(wait, recorder.Poll) {
			took := time.Since(begun)
			x.tell("%d machines lost their power; after %s, %d of them are not Ready", len(names), took.Round(100*time.Millisecond), len(away))
			x.rec.Record(&recorder.Outage{Machines: names, Away: away, TookMS: took.Milliseconds()})
			return nil
		}
	}
}

// ofGCP is a temporary fault of the emulated Google Cloud.
func ofGCP(name, does, spec string) fault {
	return fault{
		name: name, does: does, machines: everywhere, clouds: []string{gcp.Name}, anywhere: true, lasts: true, happen: ofCloud(always(spec)),
	}
}

// killing kills a process on a machine.
func killing(program string) func(context.Context, *run, string, func()) error {
	return func(ctx context.Context, x *run, on string, _ func()) error { return x.site.kill(ctx, on, program) }
}

// inStage cuts the power of a node in a stage of its agent's upgrade. The cut is requested when the
// node is cordoned, since stages are shorter than their observation.
func inStage(name, does, point string) fault {
	return fault{
		name: name, does: does, machines: running, at: []string{}, placed: []string{pointCordoned}, excuses: hurt,
		happen: func(_ context.Context, x *run, on string, _ func()) error {
			_, err := x.cutAt(x.ahead, on, point)
			return err
		},
	}
}

// diskThatCanFail is the fault by which all machines of a sandbox get a faulty disk.
// It has no effect by itself.
const diskThatCanFail = "slow-disk=1:1ns"

var (
	// ofMachines are the points at which a machine can get a fault. Machines in deletion are excluded.
	ofMachines = []string{pointKubeadm, pointAdopted, pointReady, pointCordoned}
	// ofNodes are those of a node that is upgraded in place.
	ofNodes = []string{pointKubeadm, pointScheduled, pointCordoned, pointUpgrading, pointApplying, pointUpgraded}
	// unseen are rules that need two views, of which a fault makes one stale. A node that is upgraded in place can be
	// cordoned, get its kubelet and be uncordoned meanwhile, and is then seen with the new kubelet alone.
	unseen = []recorder.Rule{
		recorder.ReadyFloor, recorder.Pairs, recorder.LeaseMoved, recorder.EtcdVoters, recorder.WorkersLast, recorder.AutoscalerPaused, recorder.MachineTracked, recorder.MachineKept, recorder.VersionSkew,
	}
	// hurt are rules that a faulty machine breaks regardless of the operator, and
	// those that cannot be evaluated if it is the control plane.
	hurt = append([]recorder.Rule{recorder.ServiceAnswers, recorder.BudgetKept}, unseen...)
)

// ofMachine is a temporary fault of a machine.
func ofMachine(name, does string, machines []string) fault {
	return fault{
		name: name, does: does, machines: machines, at: ofMachines, placed: ofNodes, lasts: true, excuses: hurt,
		happen: ofCloud(func(on string) string { return name + "=" + on }),
	}
}

// noNode keeps a fault out of upgrades in place, which do not notice it.
func noNode(f fault) fault {
	f.placed = nil
	return f
}

// losing cuts the power of a machine whose disk then loses data.
func losing(fault string) func(context.Context, *run, string, func()) error {
	return func(ctx context.Context, x *run, on string, _ func()) error {
		spec := fault + "=" + on
		if err := x.cloudFault(ctx, spec, true); err != nil {
			return err
		}
		return errors.Join(x.power(ctx, on), x.cloudFault(ctx, spec, false))
	}
}

// power power-cycles a machine now.
func (x *run) power(ctx context.Context, on string) error {
	x.switches.Lock()
	defer x.switches.Unlock()
	x.switched[on]++
	return x.site.power(ctx, on)
}

// cut is a power cut that was requested in advance.
type cut struct {
	over chan struct{} // closed when the machine has booted, or never will for this
	// Set before over is closed.
	from time.Time // when it may have struck
	err  error
}

// cutAhead requests, before the upgrade starts, the drill's power cuts in kubeadm,
// one after the other. Kubeadm's progress shows in files, and is faster than
// its observation through the cluster. The requests are cancelled when ctx ends.
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

// cutAny cuts the power of the first control plane that reaches a point, of those at the begin
// and of those that replaced them,
// and returns the earliest possible time. It returns after the machine has booted.
func (x *run) cutAny(ctx context.Context, point string) (time.Time, error) {
	type struck struct {
		from time.Time
		err  error
	}
	others, stop := context.WithCancel(ctx)
	defer stop()
	all := make(chan struck)
	asked := map[string]bool{}
	pending := 0
	ask := func(names []string) {
		for _, on := range names {
			if asked[on] {
				continue
			}
			asked[on] = true
			pending++
			go func() {
				from, err := x.cutAt(others, on, point)
				all <- struck{from, err}
			}()
		}
	}
	ask(x.site.controlPlanes)
	tick := time.NewTicker(planesPoll)
	defer tick.Stop()
	is := struck{err: errNoPlane}
	for pending > 0 {
		select {
		case s := <-all:
			pending--
			if errors.Is(is.err, errNoPlane) || s.err == nil {
				is = s
			}
			if is.err == nil {
				stop()
			}
		case <-tick.C:
			// An earlier hop may have replaced those of the begin.
			if x.site.laterPlanes != nil && others.Err() == nil {
				ask(x.site.laterPlanes(others))
			}
		}
	}
	return is.from, is.err
}

// planesPoll is the interval at which control planes are listed while a power cut is awaited.
const planesPoll = time.Second

var errNoPlane = errors.New("the cluster has no control plane")

// cutAt cuts the power of a machine when it reaches a point, and returns the earliest possible
// time. It returns after the machine has booted.
func (x *run) cutAt(ctx context.Context, on, point string) (from time.Time, err error) {
	// booted returns the machine's boot time, zero if unknown, and the number of boots by other faults.
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
	if err := until(ctx, x.site.limit, "the cloud reports when "+on+" booted", func() bool { before, others = booted(); return !before.IsZero() }); err != nil {
		return from, err
	}
	from = time.Now()
	spec := "power-cut=" + on + ":" + point
	whatever := context.WithoutCancel(ctx) // the request must be withdrawn
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

// inUpgrade waits for a power cut that was requested in advance.
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

// Faults lists the faults. See [engine.Drills].
func (d *Drills) Faults() []engine.DrillFault {
	out := make([]engine.DrillFault, len(faults))
	for i := range faults {
		f := &faults[i]
		out[i] = engine.DrillFault{Name: f.name, Does: f.does, Machines: f.machines, Points: f.points(f.machines[0], false), InPlacePoints: f.placed, OwnCloud: f.has(ownCloud)}
		for _, name := range emulated {
			if f.has(name) {
				out[i].Clouds = append(out[i].Clouds, name)
			}
		}
	}
	return out
}

// cloudFault adds or removes a fault of the cloud and keeps the others.
func (x *run) cloudFault(ctx context.Context, spec string, begin bool) error {
	x.mu.Lock()
	defer x.mu.Unlock()
	if begin {
		x.active = append(x.active, spec)
	} else if i := slices.Index(x.active, spec); i >= 0 {
		x.active = slices.Delete(x.active, i, i+1)
	}
	return x.site.replaceFaults(ctx, append([]string{}, x.active...))
}
