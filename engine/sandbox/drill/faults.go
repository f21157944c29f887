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
	excuses  []recorder.Rule
	// happen makes it happen and ends it; on is the machine, wait waits as long as it lasts.
	happen func(ctx context.Context, x *run, on string, wait func()) error
}

// longestFault is how long a fault may last.
var longestFault = map[string]time.Duration{hollow: 6 * time.Second, simulated: 12 * time.Second, real: 25 * time.Second}

// most is how often there is a point of a name at least.
func most(kind, point string) int {
	switch {
	case !slices.Contains(perNode, point):
		return 1
	case kind == hollow:
		return hollowWorkers
	default:
		return workers + controlPlanes
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
		happen: func(ctx context.Context, x *run, on string, _ func()) error { return x.site.power(ctx, on) },
	},
	{
		name: "power-cut-etcd", does: "a control plane loses its power when kubeadm replaces its etcd", machines: running,
		at: []string{pointKubeadm}, excuses: hurt, happen: inUpgrade("upgrade-etcd"),
	},
	{
		name: "power-cut-api-server", does: "a control plane loses its power when kubeadm replaces its API server", machines: running,
		at: []string{pointKubeadm}, excuses: hurt, happen: inUpgrade("upgrade-api-server"),
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
}

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

// inUpgrade cuts the power of the machine that is being upgraded when it comes to a point
// that it shows by a file. It ends when the machine has booted.
func inUpgrade(point string) func(context.Context, *run, string, func()) error {
	return func(ctx context.Context, x *run, on string, _ func()) error {
		spec := "power-cut=" + on + ":" + point
		if err := x.cloudFault(ctx, spec, true); err != nil {
			return err
		}
		booted := func() time.Time {
			info, err := x.site.cloud.Sandbox(ctx)
			if err != nil {
				return time.Time{}
			}
			for _, m := range info.Machines {
				if m.Name == on {
					return m.Started
				}
			}
			return time.Time{}
		}
		before := booted()
		err := until(ctx, 8*time.Minute, "the power of "+on+" was cut at "+point, func() bool { now := booted(); return !now.IsZero() && !now.Equal(before) })
		return errors.Join(err, x.cloudFault(ctx, spec, false))
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
