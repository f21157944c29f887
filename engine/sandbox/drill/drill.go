// Package drill upgrades throwaway clusters under injected faults, and evaluates the result.
//
// A drill creates a cluster of its own, records it from outside with package recorder, starts
// the upgrade, and injects faults at named points: "when the second node is cordoned, cut
// the power of that machine". A seed determines the faults, their points, and their durations,
// so a drill can be repeated. The behavior in between depends on real
// processes and varies with them. After the last fault the
// upgrade must end, and the recorder's invariants must have held all the time.
//
// Faults excuse some violations, and only while they last: a machine without power is not
// Ready. The report lists excused violations separately.
package drill

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"
	ctrllog "sigs.k8s.io/controller-runtime/pkg/log"

	"constellation/engine"
	"constellation/engine/cloud"
	"constellation/engine/cloud/sandboxapi"
	"constellation/engine/plan"
	"constellation/engine/sandbox"
	"constellation/engine/sandbox/machine/disk"
	"constellation/engine/sandbox/recorder"
	"constellation/engine/version"
)

const (
	// defaultCount is the default number of faults of a drill.
	defaultCount = 4
	// recovery is how long the excuses of a fault apply after its end.
	recovery = 30 * time.Second
	// recoveryOfLost is the same for a fault that loses a machine. Its Node becomes not Ready after 50 s
	// (--node-monitor-grace-period). Then the operator deletes the Node, and another machine joins.
	recoveryOfLost = 2 * time.Minute
	// settling limits the wait after the upgrade for deletions and leases.
	settling = 2 * time.Minute
	// cleaning limits the removal of a drill.
	cleaning = 3 * time.Minute
)

// Names of kinds of machines.
const (
	real      = "real"
	simulated = "simulated"
	hollow    = "hollow"
)

// op is the operation in errors.
const op = "drill"

// Drills runs drills on this computer. It implements engine.Drills.
type Drills struct {
	dirs  sandbox.Dirs
	boxes engine.Sandbox
	log   *slog.Logger
}

// New returns a runner of drills with the sandboxes below dirs.
func New(dirs sandbox.Dirs, boxes engine.Sandbox, log *slog.Logger) *Drills {
	return &Drills{dirs: dirs, boxes: boxes, log: log}
}

var _ engine.Drills = (*Drills)(nil)

// site is a cluster that is ready to be upgraded. Functions for faults may be nil.
type site struct {
	what string // in words
	// kubernetes is the version after the upgrade. Its path can have more hops than one.
	kubernetes string
	// controlPlanes are the candidates for the upgrade by kubeadm.
	controlPlanes []string
	// laterPlanes lists the control planes of the moment.
	laterPlanes func(ctx context.Context) []string
	cluster     *rest.Config
	cloud       *sandboxapi.Client
	// machines are those of cloud, with their provider IDs at an emulated vendor; nil: cloud has them.
	machines recorder.Cloud
	// size is the number of machines outside of an upgrade.
	size int
	// setFaults replaces the faults of the cloud and its machines; nil: cloud does.
	setFaults func(ctx context.Context, spec []string) error
	host      recorder.Host // nil without access to machines
	service   string        // IP:port of a web server, or empty
	// nameless: operators are not named after their nodes.
	nameless bool
	limits   recorder.Limits
	unseen   []recorder.Rule // rules that cannot be violated here
	limit    time.Duration   // for the upgrade

	// begin sets the target, and later calls giveUp if that fails. It goes on if giveUp returns false. rest ends the drill's own processes in the cluster. It is
	// called before the recorder's last observation.
	begin func(ctx context.Context, giveUp func(error) bool) error
	rest  func(context.Context)
	close func(context.Context) error

	killOperator  func(context.Context) error
	killConsole   func(context.Context) error
	stopAPIServer func()
	startAPI      func(context.Context) error
	power         func(ctx context.Context, machine string) error // power-cycles a machine
	// powerAll power-cycles all machines at once, after it has announced them, and returns their names. away
	// returns those that exist and have no Ready node that reported since a time.
	powerAll func(ctx context.Context, announce func(names []string)) ([]string, error)
	away     func(ctx context.Context, names []string, since time.Time) []string
	// kill kills the agent or the relay of a machine. runs returns the latest runs of all agents.
	// Both are nil unless nodes are upgraded in place.
	kill func(ctx context.Context, machine, program string) error
	runs func(ctx context.Context) []recorder.Run
}

func (s *site) replaceFaults(ctx context.Context, spec []string) error {
	if s.setFaults != nil {
		return s.setFaults(ctx, spec)
	}
	return s.cloud.SetFaults(ctx, spec)
}

// teller prints progress.
type teller func(format string, args ...any)

// run is a drill in progress.
type run struct {
	site *site
	rec  *recorder.Recorder
	tell teller

	mu      sync.Mutex
	begun   time.Time
	ahead   context.Context //nolint:containedctx // ends when the upgrade is past all points
	active  []string        // faults of the cloud
	cuts    map[string]*cut // by fault; see [run.cutAhead]
	report  []engine.DrillInjection
	windows []window

	switches sync.Mutex     // held during use of a machine's power switch
	switched map[string]int // power cycles by machine

	wg sync.WaitGroup
}

// window is the time in which a fault excuses breaches of some rules.
type window struct {
	fault    string
	from, to time.Time // to includes the recovery
	rules    []recorder.Rule
}

// Drill runs a drill. See [engine.Drills].
func (d *Drills) Drill(ctx context.Context, spec engine.DrillSpec, tell func(string)) (engine.DrillReport, error) {
	started := time.Now()
	r := engine.DrillReport{Seed: spec.Seed, Program: version.Release, Started: started.UTC(), Injected: []engine.DrillInjection{}, Rules: []engine.DrillRule{}, Summary: []string{}}
	say := func(format string, args ...any) {
		if tell != nil {
			tell(fmt.Sprintf(format, args...))
		}
	}
	kind, err := d.machines(spec.Machines)
	if err != nil {
		return r, err
	}
	r.Machines, r.InPlace, r.Cloud = kind, spec.InPlace, spec.Cloud
	if spec, err = d.Versions(spec); err != nil {
		return r, err
	}
	vs, err := versionsOf(kind, spec)
	if err != nil {
		return r, err
	}
	r.KubernetesFrom, r.KubernetesTo = vs.kubernetesFrom, vs.kubernetesTo
	injections, err := scenario(kind, spec)
	if err != nil {
		return r, err
	}
	if kind != hollow {
		spec.ControlPlanes = cmp.Or(spec.ControlPlanes, 1)
		r.ControlPlanes = spec.ControlPlanes
	}
	disks := slices.ContainsFunc(injections, func(in engine.DrillInjection) bool { return faultNamed(in.Fault).ofDisk })
	if err := disk.Supported(); disks && err != nil {
		return r, &plan.Error{Op: op, Err: err, Exit: plan.ExitBlocked, Remedy: "name the faults that there may be with --faults, without slow-disk, lost-writes and torn-writes"}
	}
	place, leave, err := d.enter(ctx, spec.Workspace, say)
	if err != nil {
		return r, err
	}
	defer leave()

	// Log messages of libraries are not for users of drills.
	klog.SetLogger(logr.Discard())
	ctrllog.SetLogger(logr.Discard())
	say("making a cluster of %s machines", kind)
	var s *site
	var lasting []string // faults that last for the whole drill
	if disks {
		lasting = []string{diskThatCanFail}
	}
	if kind == hollow {
		s, err = d.hollow(ctx, place, spec.Cloud, vs, say)
	} else {
		s, err = d.running(ctx, kind, place, spec, vs, lasting, say)
	}
	if err != nil {
		return r, &plan.Error{Op: op + ": make a cluster", Err: err, Exit: plan.ExitCode(err), Remedy: plan.Remedy(err)}
	}
	defer func() {
		clean, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleaning)
		defer cancel()
		if err := s.close(clean); err != nil {
			say("not all of the drill is gone: %v; `constellation sandbox down` tries again", err)
		}
	}()
	r.Cluster = s.what
	var machines recorder.Cloud = s.cloud
	if s.machines != nil {
		machines = s.machines
	}
	rec, err := recorder.Start(ctx, recorder.Config{Cluster: s.cluster, Cloud: machines, Host: s.host, Service: s.service, Nameless: s.nameless, File: spec.Journal, Log: d.log})
	if err != nil {
		return r, &plan.Error{Op: op, Err: err}
	}
	defer rec.Close()

	x := &run{site: s, rec: rec, tell: say, active: lasting, switched: map[string]int{}, report: injections}
	held, why := x.upgrade(ctx, injections)
	if ctx.Err() != nil {
		return r, &plan.Error{Op: op, Err: context.Cause(ctx), Exit: plan.ExitCode(context.Cause(ctx))}
	}
	journal := rec.Journal()
	r.Injected = x.report
	r.RolledMS = recorder.Summarize(journal).Makespan.Milliseconds()
	r.Summary = strings.Split(recorder.Summarize(journal).String(), "\n")
	cannot := s.unseen
	if !slices.ContainsFunc(injections, func(in engine.DrillInjection) bool { return in.Fault == powerCutAll }) {
		cannot = append(slices.Clone(cannot), recorder.OutageOver)
	}
	r.Rules = judge(recorder.Check(journal, s.limits), x.windows, cannot)
	r.Outcome, r.Why = outcome(held, why, r)
	r.TookMS = time.Since(started).Milliseconds()
	r.Repeat = repeat(kind, spec)
	return r, nil
}

// repeat returns the arguments that repeat the drill.
func repeat(kind string, spec engine.DrillSpec) []string {
	args := []string{"sandbox", "drill", "--machines=" + kind, fmt.Sprint("--seed=", spec.Seed)}
	if spec.InPlace {
		args = append(args, "--in-place")
	}
	if spec.Cloud != "" {
		args = append(args, "--cloud="+spec.Cloud)
	}
	if spec.ControlPlanes > 1 {
		args = append(args, fmt.Sprint("--control-planes=", spec.ControlPlanes))
	}
	if spec.Count != 0 {
		args = append(args, fmt.Sprint("--count=", spec.Count))
	}
	if spec.KubernetesFrom != kubernetesFrom {
		args = append(args, "--kubernetes-from="+spec.KubernetesFrom)
	}
	if spec.KubernetesFrom != kubernetesFrom || spec.Kubernetes != kubernetesTo {
		args = append(args, "--kubernetes="+spec.Kubernetes)
	}
	if len(spec.Faults) > 0 {
		args = append(args, "--faults="+strings.Join(spec.Faults, ","))
	}
	return args
}

// machines selects the kind of machines.
func (d *Drills) machines(asked string) (string, error) {
	can := os.Geteuid() == 0 // machine.Check reports the rest
	switch asked {
	case hollow, simulated, real:
		return asked, nil
	case "", "auto":
		if can {
			return real, nil
		}
		return simulated, nil
	}
	return "", &plan.Error{Op: "drill", Err: fmt.Errorf("there are no %q machines for drills", asked), Exit: plan.ExitUsage, Remedy: "say --machines=real, --machines=simulated or --machines=hollow"}
}

// outcome returns the result, and the reason.
func outcome(ended bool, why string, r engine.DrillReport) (string, string) {
	var broken []string
	for _, rule := range r.Rules {
		if len(rule.Breaches) > 0 {
			broken = append(broken, rule.Rule)
		}
	}
	var failed []string
	injected := 0
	for _, i := range r.Injected {
		if i.Err != "" {
			failed = append(failed, i.Fault)
		}
		if i.AtMS >= 0 {
			injected++
		}
	}
	switch {
	case !ended:
		return engine.DrillFailed, why
	case len(broken) > 0:
		return engine.DrillFailed, "these invariants did not hold: " + strings.Join(broken, ", ")
	case len(failed) > 0:
		return engine.DrillVoid, "these faults could not be injected, or not be ended: " + strings.Join(failed, ", ")
	case injected == 0:
		return engine.DrillVoid, "the upgrade came to none of the points at which something was to go wrong"
	}
	return engine.DrillPassed, ""
}

// judge groups breaches by rule. The result contains all rules.
func judge(breaches []recorder.Breach, windows []window, unseen []recorder.Rule) []engine.DrillRule {
	rules := make([]engine.DrillRule, 0, len(recorder.Rules))
	for _, name := range recorder.Rules {
		rule := engine.DrillRule{Rule: string(name), NotAsked: slices.Contains(unseen, name)}
		for _, b := range breaches {
			if b.Rule != name {
				continue
			}
			i := slices.IndexFunc(windows, func(w window) bool {
				return slices.Contains(w.rules, name) && !b.Time.Before(w.from) && b.Time.Before(w.to)
			})
			if i < 0 {
				rule.Breaches = append(rule.Breaches, b.String())
			} else {
				rule.Excused = append(rule.Excused, b.String()+" ("+windows[i].fault+")")
			}
		}
		rules = append(rules, rule)
	}
	return rules
}

// upgrade starts the upgrade, injects the faults of the plan, and waits for the end. why
// is the reason in a sentence if it did not end.
func (x *run) upgrade(ctx context.Context, plan []engine.DrillInjection) (ended bool, why string) {
	late := fmt.Errorf("it did not end within %s", x.site.limit)
	ctx, cancel := context.WithTimeoutCause(ctx, x.site.limit, late)
	defer cancel()
	ctx, giveUp := context.WithCancelCause(ctx)
	defer giveUp(nil)
	// Faults end with the drill in any case.
	defer func() {
		x.wg.Wait()
		clean, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
		defer cancel()
		if err := x.site.replaceFaults(clean, []string{}); err != nil {
			x.tell("the cloud's faults are not ended: %v", err)
		}
	}()
	if name := x.site.limits.Secret; name != "" {
		read, done := context.WithTimeout(ctx, time.Minute)
		x.rec.ReadSecret(read, name)
		done()
	}
	x.begun = time.Now()
	x.rec.Begin()
	x.tell("the upgrade begins: %s", x.site.what)
	inKubeadm, past := context.WithCancelCause(ctx)
	defer past(nil)
	x.ahead = inKubeadm
	x.cutAhead(inKubeadm, plan)
	unless := func(err error) bool {
		if x.outage() {
			return false // a console refuses an upgrade while nodes are not Ready
		}
		giveUp(err)
		return true
	}
	if err := x.site.begin(ctx, unless); err != nil {
		return false, fmt.Sprintf("the upgrade could not be begun: %v", err)
	}
	seen := newSeen()
	from := 0
	var target *recorder.Target
	err := x.rec.Wait(ctx, func(j []recorder.Entry) bool {
		for ; from < len(j); from++ {
			e := &j[from]
			if t, is := e.Fact.(*recorder.Target); is {
				target = t
			}
			for _, at := range seen.points(e) {
				for i := range plan {
					if plan[i].Point == at.point && plan[i].Nth == at.nth {
						x.inject(ctx, i, at.subject)
					}
				}
			}
		}
		if seen.count[pointBegun] == 0 || !target.Ready || target.Kubernetes != x.site.kubernetes {
			return false
		}
		past(errPast)
		return x.quiet()
	})
	if err != nil {
		return false, fmt.Sprintf("the upgrade did not get to its end: %v; the target: %s", context.Cause(ctx), lastly(target))
	}
	x.wg.Wait()
	x.tell("the upgrade is over after %s; waiting for what is left to go", time.Since(x.begun).Round(100*time.Millisecond))
	settle, done := context.WithTimeout(ctx, settling)
	defer done()
	err = x.rec.Wait(settle, settled)
	// An operator outside of the cluster is on no node: it releases its lease when it ends.
	x.site.rest(ctx)
	err = errors.Join(err, x.rec.Wait(settle, unled))
	if err != nil {
		x.tell("something is left %s after the end of the upgrade", settling)
	}
	if x.site.runs != nil {
		for _, r := range x.site.runs(settle) {
			x.rec.Record(&r)
		}
	}
	if name := x.site.limits.Secret; name != "" {
		read, done := context.WithTimeout(ctx, time.Minute)
		x.rec.ReadSecret(read, name)
		done()
	}
	x.rec.End()
	return true, ""
}

// errPast is why a power cut in kubeadm is not awaited any more.
var errPast = errors.New("the upgrade is past it")

func lastly(t *recorder.Target) string {
	if t == nil {
		return "its target was never seen"
	}
	return fmt.Sprintf("ready %t, %s; phase %q; waiting: %q", t.Ready, cmp.Or(t.Reason, "no reason"), t.Phase, t.Waiting)
}

// quiet reports whether no fault lasts.
func (x *run) quiet() bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	return !slices.ContainsFunc(x.report, func(i engine.DrillInjection) bool { return i.AtMS >= 0 && i.EndMS < 0 })
}

// outage reports whether all machines lose their power, or did so a short time ago.
func (x *run) outage() bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	return slices.ContainsFunc(x.report, func(i engine.DrillInjection) bool {
		return i.Fault == powerCutAll && i.AtMS >= 0 && (i.EndMS < 0 || time.Since(x.begun) < time.Duration(i.EndMS)*time.Millisecond+recovery)
	})
}

// settled reports whether the cloud has its initial number of machines, all
// ready, no node is marked, the autoscaler is in its initial state, and a probed service has answered
// every node since the last deletion. All other remains count as breaches.
func settled(j []recorder.Entry) bool {
	var first, last *recorder.Machines
	var scalerThen, scaler recorder.Scaler
	nodes := map[string]recorder.Node{}
	answered, asked := map[string]bool{}, false
	begun := false
	for i := range j {
		e := &j[i]
		begun = begun || e.Fact == recorder.Begin
		switch f := e.Fact.(type) {
		case *recorder.Machines:
			if !begun {
				first = f
			}
			last = f
		case *recorder.Scaler:
			if !begun {
				scalerThen = *f
			}
			scaler = *f
		case *recorder.Node:
			nodes[f.Name] = *f
			if f.Gone {
				clear(answered)
			}
		case *recorder.Probe:
			if f.From != "" && f.Err == "" {
				answered[f.From], asked = true, true
			}
		}
	}
	if first == nil || len(last.List) != len(first.List) || scaler.Replicas != scalerThen.Replicas {
		return false
	}
	for _, m := range last.List {
		if m.State != string(cloud.Ready) {
			return false
		}
	}
	for _, n := range nodes {
		// Kubernetes removes the taints of a node a moment after it is Ready.
		if tainted := slices.ContainsFunc(n.Taints, func(t string) bool { return strings.HasPrefix(t, "node.kubernetes.io/") }); !n.Gone && (!n.Ready || tainted || n.Heir != "" || n.CordonedByUs || asked && !answered[n.Name]) {
			return false
		}
	}
	return true
}

// unled reports whether there is no leader, or a leader that runs on a node.
func unled(j []recorder.Entry) bool {
	nodes := map[string]bool{}
	holder := ""
	for i := range j {
		switch f := j[i].Fact.(type) {
		case *recorder.Lease:
			holder = f.Holder
		case *recorder.Node:
			nodes[f.Name] = !f.Gone
		}
	}
	return holder == "" || nodes[holder]
}

// inject starts a fault and ensures its end. It does not wait.
func (x *run) inject(ctx context.Context, i int, subject string) {
	x.mu.Lock()
	in := &x.report[i]
	in.On, in.AtMS = subject, time.Since(x.begun).Milliseconds()
	f := faultNamed(in.Fault)
	if f.anywhere {
		subject, in.On = "", ""
	}
	name, lasts, point := in.Fault, time.Duration(in.LastsMS)*time.Millisecond, fmt.Sprint(in.Point, " ", in.Nth)
	x.mu.Unlock()
	x.wg.Go(func() {
		w := window{fault: name, from: time.Now(), rules: f.excuses}
		what := name
		if subject != "" {
			what += " on " + subject
		}
		x.tell("%s: %s", point, what)
		x.rec.Note("fault begins: %s", what)
		// Faults end regularly even when the drill is cancelled.
		err := f.happen(context.WithoutCancel(ctx), x, subject, func() {
			t := time.NewTimer(lasts)
			defer t.Stop()
			select {
			case <-ctx.Done():
			case <-t.C:
			}
		})
		// This entry wakes up waiters for quiet.
		defer x.rec.Note("fault ended: %s", what)
		x.over(i, f, w, what, err)
	})
}

// over reports the end of a fault.
func (x *run) over(i int, f *fault, w window, what string, err error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if c := x.cuts[f.name]; c != nil && c.err == nil && c.from.Before(w.from) { // it struck before it was observed
		w.from, x.report[i].AtMS = c.from, c.from.Sub(x.begun).Milliseconds()
	}
	if f.cutAt == "" && errors.Is(err, errPast) { // the node was past that stage: nothing happened that excuses a breach
		x.report[i].AtMS = -1
		return
	}
	now := time.Now()
	w.to = now.Add(recovery)
	if f.loses {
		w.to = now.Add(recoveryOfLost)
	}
	x.windows = append(x.windows, w)
	x.report[i].EndMS = now.Sub(x.begun).Milliseconds()
	if err != nil {
		x.report[i].Err = err.Error()
		x.tell("%s went wrong itself: %v", what, err)
	}
}

// clusterDir is the workspace of a drill's own sandbox, in the drill's directory.
const clusterDir = "cluster"

// enter creates the directory of a drill below a workspace, after it has removed the remains of a
// killed drill. leave removes it again.
func (d *Drills) enter(ctx context.Context, workspace string, say teller) (place string, leave func(), err error) {
	if st, err := d.boxes.Status(ctx, workspace); err == nil {
		return "", nil, &plan.Error{
			Op: op, Err: fmt.Errorf("sandbox %s is up in %s, and a drill wants the place for itself", st.Name, workspace),
			Exit: plan.ExitBlocked, Remedy: "run it in another directory with -C, or take the sandbox down",
		}
	}
	place = filepath.Join(workspace, sandbox.DrillDir)
	if err := os.Mkdir(place, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return "", nil, &plan.Error{Op: op, Err: err}
	}
	lock, err := sandbox.LockDrill(place)
	if err != nil {
		return "", nil, &plan.Error{Op: op, Err: err, Exit: plan.ExitHeld, Remedy: "wait for it, or run this one in another directory with -C"}
	}
	if _, there := d.boxes.Status(ctx, filepath.Join(place, clusterDir)); there == nil {
		say("removing the sandbox of a drill that was killed")
		err = d.boxes.Down(ctx, filepath.Join(place, clusterDir), nil)
	}
	if err == nil {
		err = sandbox.ClearDrill(place)
	}
	if err != nil {
		lock()
		return "", nil, &plan.Error{Op: op + ": remove what an earlier one left", Err: err}
	}
	return place, func() {
		if err := sandbox.ClearDrill(place); err != nil {
			say("not removed: %v", err)
		} else if err := os.RemoveAll(place); err != nil {
			say("not removed: %v", err)
		}
		lock()
	}, nil
}

// possible returns a usage error for drills that do not exist.
func possible(kind string, spec engine.DrillSpec) error {
	if kind == hollow && spec.ControlPlanes != 0 || !slices.Contains([]int{0, 1, 3, 5}, spec.ControlPlanes) {
		return &plan.Error{
			Op: op, Err: fmt.Errorf("there are no drills of %d control planes on %s machines", spec.ControlPlanes, kind), Exit: plan.ExitUsage,
			Remedy: "say --control-planes=1, 3 or 5, and of machines that are not hollow",
		}
	}
	if spec.InPlace && kind == hollow {
		return &plan.Error{
			Op: op, Err: errors.New("hollow machines have no agents, so they cannot be upgraded in place"), Exit: plan.ExitUsage,
			Remedy: "pass --machines=simulated or --machines=real, or leave out --in-place",
		}
	}
	if spec.Cloud != "" && !slices.Contains(emulated, spec.Cloud) {
		return &plan.Error{
			Op: op, Err: fmt.Errorf("there are no drills with cloud %q", spec.Cloud), Exit: plan.ExitUsage,
			Remedy: "pass --cloud=" + strings.Join(emulated, " or ") + ", or leave out --cloud",
		}
	}
	if spec.Cloud != "" && spec.InPlace {
		return &plan.Error{
			Op: op, Err: errors.New("groups of an emulated cloud are not upgraded in place"), Exit: plan.ExitUsage,
			Remedy: "leave out --in-place or --cloud",
		}
	}
	return nil
}

// lone reports whether a loss of a control plane could be that of etcd. Those of hollow machines are none.
func lone(kind string, spec engine.DrillSpec) bool { return kind != hollow && spec.ControlPlanes < 3 }

// inOrder shuffles faults. Named ones come first, so that no other one takes their place.
func inOrder(rng *rand.Rand, allowed []*fault) []*fault {
	var named, others []*fault
	for _, n := range rng.Perm(len(allowed)) {
		if f := allowed[n]; f.named {
			named = append(named, f)
		} else {
			others = append(others, f)
		}
	}
	return append(named, others...)
}

// chosen reports whether a drill may draw the fault.
func (f *fault) chosen(spec engine.DrillSpec) bool {
	return len(spec.Faults) == 0 && !f.named || slices.Contains(spec.Faults, f.name)
}

// scenario returns the faults of a seed.
func scenario(kind string, spec engine.DrillSpec) ([]engine.DrillInjection, error) {
	if err := possible(kind, spec); err != nil {
		return nil, err
	}
	spec.KubernetesFrom = cmp.Or(spec.KubernetesFrom, kubernetesFrom)
	stays := spec.Kubernetes == spec.KubernetesFrom
	pointsOf := func(f *fault) []string {
		if spec.InPlace {
			return f.inPlace(spec.KubernetesFrom, spec.Kubernetes)
		}
		return f.points(kind, stays)
	}
	var allowed []*fault
	for i := range faults {
		f := &faults[i]
		if len(pointsOf(f)) == 0 { // its points do not occur here
			continue
		}
		if slices.Contains(f.machines, kind) && f.has(spec.Cloud) && (!f.loses || !lone(kind, spec)) && f.chosen(spec) {
			allowed = append(allowed, f)
		}
	}
	for _, name := range spec.Faults {
		i := slices.IndexFunc(faults, func(f fault) bool { return f.name == name })
		switch {
		case i < 0:
			return nil, &plan.Error{Op: op, Err: fmt.Errorf("there is no fault %q", name), Exit: plan.ExitUsage, Remedy: "`constellation sandbox drill --list` shows what can go wrong"}
		case !slices.Contains(faults[i].machines, kind):
			return nil, &plan.Error{
				Op: op, Err: fmt.Errorf("%s machines cannot have the fault %s", kind, name), Exit: plan.ExitUsage,
				Remedy: "leave it out, or say --machines=" + faults[i].machines[0] + ", which can",
			}
		case faults[i].loses && lone(kind, spec):
			return nil, &plan.Error{
				Op: op, Err: fmt.Errorf("%s could lose the only control plane", name), Exit: plan.ExitUsage,
				Remedy: "leave it out, or add --control-planes=3",
			}
		case !faults[i].has(spec.Cloud):
			return nil, &plan.Error{
				Op: op, Err: fmt.Errorf("cloud %s cannot have the fault %s", cmp.Or(spec.Cloud, "of the sandbox"), name), Exit: plan.ExitUsage,
				Remedy: "leave it out, or choose the cloud with --cloud; `constellation sandbox drill --list` shows which have it",
			}
		case spec.InPlace && len(pointsOf(&faults[i])) == 0:
			return nil, &plan.Error{
				Op: op, Err: fmt.Errorf("%s does not affect an upgrade in place from %s to %s", name, spec.KubernetesFrom, spec.Kubernetes), Exit: plan.ExitUsage,
				Remedy: "leave it out, or leave --in-place out",
			}
		case !spec.InPlace && len(faults[i].points(kind, false)) == 0:
			return nil, &plan.Error{
				Op: op, Err: fmt.Errorf("%s affects upgrades in place only", name), Exit: plan.ExitUsage,
				Remedy: "leave it out, or add --in-place",
			}
		case !slices.Contains(allowed, &faults[i]):
			return nil, &plan.Error{
				Op: op, Err: fmt.Errorf("nothing comes to a point at which %s could happen: Kubernetes stays at %s", name, spec.Kubernetes), Exit: plan.ExitUsage,
				Remedy: "leave it out, or leave --kubernetes out",
			}
		}
	}
	rng := rand.New(rand.NewPCG(spec.Seed, 0x6472696c6c)) //nolint:gosec // a drill is repeated by its seed
	order := inOrder(rng, allowed)
	out := []engine.DrillInjection{}
	for n := range cmp.Or(spec.Count, defaultCount) {
		f := order[n%len(order)]
		points := pointsOf(f)
		in := engine.DrillInjection{Fault: f.name, AtMS: -1, EndMS: -1}
		in.Point = points[rng.IntN(len(points))]
		in.Nth = 1 + rng.IntN(f.most(kind, in.Point, spec))
		if f.lasts {
			shortest, longest := time.Second, longestFault[kind]
			in.LastsMS = (shortest + time.Duration(rng.Int64N(int64(longest-shortest)))).Round(100 * time.Millisecond).Milliseconds()
		}
		out = append(out, in)
	}
	return out, nil
}
