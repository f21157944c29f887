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
var longestFault = map[string]time.Duration{hollow: 6 * time.Second, real: 25 * time.Second}

// most is how often there is a point of a name at least.
func most(kind, point string) int {
	switch {
	case !slices.Contains(perNode, point):
		return 1
	case kind == hollow:
		return hollowWorkers
	default:
		return realWorkers + realControlPlanes
	}
}

// points are those at which a fault can begin on machines of a kind.
func (f *fault) points(kind string) []string {
	at := f.at
	if at == nil {
		at = perNode
	}
	if kind == hollow { // its control planes are at the target
		at = slices.DeleteFunc(slices.Clone(at), func(p string) bool { return p == pointKubeadm })
	}
	return at
}

var everywhere = []string{real, hollow}

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
		name: "console-killed", does: "the console that upgrades is killed, and its command given again", machines: []string{real}, anywhere: true,
		at:     []string{pointBegun, pointKubeadm, pointIntent, pointCordoned},
		happen: func(ctx context.Context, x *run, _ string, _ func()) error { return x.site.killConsole(ctx) },
	},
	{
		name: "power-cut", does: "a machine loses its power for a moment, and boots", machines: []string{real},
		at:      []string{pointKubeadm, pointAdopted, pointReady, pointCordoned},
		excuses: []recorder.Rule{recorder.ReadyFloor, recorder.ServiceAnswers, recorder.EtcdVoters},
		happen: func(ctx context.Context, x *run, on string, _ func()) error {
			if on == "" {
				return errors.New("the point names no machine")
			}
			return x.site.power(ctx, on)
		},
	},
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
		out[i] = engine.DrillFault{Name: f.name, Does: f.does, Machines: f.machines, Points: f.points(f.machines[0])}
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
