// Package sandbox is a throwaway cloud on this computer.
//
// It hides everything between "one control plane and two workers" and machines
// that boot, know who they are, are attested, find each other, pull images and
// download components, without an account and without a network: groups and
// instances, an instance metadata service, a load balancer, an image registry, a
// mirror of Kubernetes' binaries, and an authority that certifies the machines'
// attestation keys, as a public cloud's does. Nothing outside trusts that authority.
//
// [Sandboxes] is what the command line needs; a daemon per sandbox, [Serve], does
// the work and outlives the command. Machines outlive the daemon: a new one finds
// them. Several sandboxes live side by side, each in a network of its own in which
// all use the same addresses:
//
//	169.254.169.254:80   metadata, to machines, by their address
//	10.42.0.1:8090       control API, to control planes, by a token
//	10.42.0.1:6443       load balancer to the API servers
//	10.42.0.1:9000       to the bootstrapper of one control plane, always the same while it listens
//	10.42.0.1:30090      load balancer to the join service
//	10.42.0.1:5000       image registry, mirror of every registry
//	10.42.0.1:8080       Kubernetes' binaries
//	10.42.0.0/24         machines, 10.244.0.0/16 their pods
//
// On the computer itself it opens two ports of 127.0.0.1, which lead to 6443 and
// 9000, and a unix socket for its owner. The wire formats are those of
// [constellation/engine/cloud/sandboxapi].
//
// A sandbox may be hollow: its machines are simulated, which takes no root, and its
// cluster is made with it. Everything above but the socket and the faults is missing
// then, and all ends with the daemon; see [Hollow] and package hollow.
//
// Faults on request are part of the cloud: see [constellation/engine.SandboxSpec].
//
// The package never compiles anything but in [Sandboxes.Fetch], never decides what
// a cluster should be, and never touches a sandbox that it was not asked about.
package sandbox

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"constellation/assets"
	"constellation/engine"
	"constellation/engine/attestation"
	"constellation/engine/attestation/attestationtest"
	"constellation/engine/cloud"
	"constellation/engine/cloud/providers"
	"constellation/engine/cloud/sandboxapi"
	"constellation/engine/plan"
	"constellation/engine/release"
	"constellation/engine/sandbox/build"
	"constellation/engine/sandbox/machine"
	"constellation/engine/sandbox/simulated"
	"constellation/engine/version"
	"constellation/engine/words"
	"constellation/engine/workspace"
)

// Services of the cluster get addresses of this range.
const serviceCIDR = "10.96.0.0/12"

// Defaults of a sandbox.
const (
	defaultControlPlanes = 1
	defaultWorkers       = 2
)

const (
	daemonStart = 30 * time.Second
	// answerWithin is how long a daemon may take before it counts as one that hangs
	// and is replaced, which costs its machines nothing.
	answerWithin = 8 * time.Second
	// bootPatience is how long Up watches booting machines.
	bootPatience = time.Minute
	// cacheUnused is how long unused entries stay in the cache.
	cacheUnused = 30 * 24 * time.Hour
)

// Sandboxes are the sandboxes of one user on this computer. It implements
// engine.Sandbox and is safe for concurrent use, also by several processes.
type Sandboxes struct {
	dirs Dirs
	exe  string
	log  *slog.Logger
}

// New returns the sandboxes below dirs. exe is this program, which is started as
// "exe sandbox daemon NAME" and must then call Serve; "" means os.Executable.
func New(dirs Dirs, exe string, log *slog.Logger) *Sandboxes {
	return &Sandboxes{dirs: dirs, exe: exe, log: log}
}

var _ engine.Sandbox = (*Sandboxes)(nil)

// steps of Up and Down, as events name them.
const (
	stepCheck    = "check-computer"
	stepRootfs   = "prepare-rootfs"
	stepImages   = "prepare-images"
	stepDaemon   = "start-cloud"
	stepFaults   = "set-faults"
	stepMachines = "boot-machines"
	stepFiles    = "write-files"
	stepRemove   = "remove-machines"
	stepClean    = "remove-files"
	stepBuild    = "build-kubernetes"
)

// teller numbers events and adds their time.
type teller struct {
	emit  func(plan.Event)
	seq   uint64
	start map[string]time.Time
	last  [2]int // last values of progressIfNew
}

func newTeller(emit func(plan.Event)) *teller {
	if emit == nil {
		emit = func(plan.Event) {}
	}
	return &teller{emit: emit, start: map[string]time.Time{}, last: [2]int{-1, -1}}
}

func (t *teller) tell(e plan.Event) {
	t.seq++
	e.Seq, e.Time = t.seq, time.Now().UTC()
	t.emit(e)
}

// step reports the state of a step. text names its subject, or its result.
func (t *teller) step(id, state, text string) {
	e := plan.Event{Kind: plan.KindStep, Step: id, State: state, Text: text}
	if state == plan.StateRunning {
		t.start[id] = time.Now()
	} else if s, ok := t.start[id]; ok {
		e.TookMS = time.Since(s).Milliseconds()
	}
	t.tell(e)
}

func (t *teller) progress(id, text string, current, total int64) {
	t.tell(plan.Event{Kind: plan.KindProgress, Step: id, Text: text, Current: current, Total: total})
}

func (t *teller) warn(id, text string) {
	t.tell(plan.Event{Kind: plan.KindLog, Step: id, Source: "sandbox", Level: "warn", Text: text})
}

// usage returns an error that the caller caused, with a remedy.
func usage(op, remedy string, format string, args ...any) error {
	return &plan.Error{Op: op, Err: fmt.Errorf(format, args...), Remedy: remedy, Exit: plan.ExitUsage}
}

// Kinds of machines, as SandboxSpec.Machines has them.
const (
	machinesAuto      = "auto"
	machinesReal      = "real"
	machinesSimulated = "simulated"
)

// onlyRoot refuses real machines without root before any other check: without root even the
// directories of sandboxes are different.
func onlyRoot(op string) error {
	if canReal() {
		return nil
	}
	return &plan.Error{
		Op: op, Err: machine.ErrUnsupported,
		Remedy: "run the same command as root, for example with sudo, or ask for --machines=simulated", Exit: plan.ExitBlocked,
	}
}

// onlyLinux refuses hollow machines on other systems: only Linux guarantees that the processes
// of their cluster end with their daemon.
func onlyLinux(op string) error {
	if runtime.GOOS == "linux" {
		return nil
	}
	return &plan.Error{Op: op, Err: errors.New("hollow machines need Linux"), Remedy: "run the same command on Linux", Exit: plan.ExitBlocked}
}

func canReal() bool { return runtime.GOOS == "linux" && os.Geteuid() == 0 }

// kind selects the machines of a new sandbox. If the user did not choose, it also returns why
// they are not real: because this computer cannot have real machines. Missing packages, which
// can be installed, are no such reason.
func (s *Sandboxes) kind(ctx context.Context, spec engine.SandboxSpec) (simulate bool, why string) {
	switch {
	case spec.Machines == machinesSimulated:
		return true, ""
	case spec.Machines == machinesReal:
		return false, ""
	case emulatedCloud(spec) != "":
		return true, "real machines of an emulated cloud need --machines real"
	case !canReal():
		return true, machine.ErrUnsupported.Error()
	}
	for _, p := range machine.Check(ctx, s.dirs.Cache, s.dirs.of(spec.Name), machine.Demand{}) {
		switch p.ID {
		case "capabilities", "cgroups", "overlay", "network":
			return true, p.What
		}
	}
	return false, ""
}

// Up starts the sandbox that spec describes, or finds it running and scales its groups
// to spec. It waits for machines to boot, up to a limit: an event reports those that
// do not, and Up still succeeds.
// Cancelling ctx leaves a partial sandbox. The next Up continues, and Down removes it.
func (s *Sandboxes) Up(ctx context.Context, spec engine.SandboxSpec, emit func(plan.Event)) (workspace.SandboxInfo, error) {
	t := newTeller(emit)
	var none workspace.SandboxInfo
	spec, err := s.complete(spec)
	if err != nil {
		return none, err
	}
	op := "start sandbox " + spec.Name
	if before, err := readState(s.dirs.of(spec.Name, stateName)); err == nil && spec.Machines == machinesAuto && before.Hollow != nil {
		spec.Machines = hollowKind
	}
	switch spec.Machines {
	case hollowKind:
		err = onlyLinux(op)
	case machinesReal:
		err = onlyRoot(op)
	}
	if err != nil {
		return none, err
	}
	unlock, err := s.dirs.lock(ctx, spec.Name, func() {
		t.tell(plan.Event{Kind: plan.KindWait, Text: "another command is working on sandbox " + spec.Name})
	})
	if err != nil {
		return none, &plan.Error{Op: op, Err: err}
	}
	defer func() {
		_, err := os.Lstat(s.dirs.of(spec.Name))
		unlock(errors.Is(err, fs.ErrNotExist)) // refused before it began: leave no trace
		s.dirs.tidy()
	}()

	st, fresh, err := s.admit(op, spec)
	if err != nil {
		return none, err
	}
	if spec.Machines == hollowKind {
		return s.upHollow(ctx, st, spec, t)
	}
	if fresh {
		if err := s.create(ctx, spec, t); err != nil {
			return none, err
		}
	}
	client := sandboxapi.NewClient("unix:"+s.dirs.of(spec.Name, socketName), "")
	info, err := s.ensureDaemon(ctx, op, spec.Name, fresh, client, t)
	if err != nil {
		return none, err
	}
	if err := s.scale(ctx, client, info, spec, t); err != nil {
		return none, err
	}
	if err := s.watchBoot(ctx, client, t); err != nil {
		return none, err
	}
	status, err := s.Status(ctx, spec.Name)
	if err != nil {
		return none, err
	}
	handed, err := s.handOver(spec, status.SandboxInfo, t)
	if err == nil && !status.Simulated {
		s.prune(ctx, t)
	}
	return handed, err
}

// admit returns the state of an existing sandbox, and whether there is none yet. It refuses a spec
// that contradicts this state, has invalid faults, or does not fit the workspace. It changes nothing.
func (s *Sandboxes) admit(op string, spec engine.SandboxSpec) (st *state, fresh bool, err error) {
	st, err = readState(s.dirs.of(spec.Name, stateName))
	fresh = errors.Is(err, fs.ErrNotExist)
	if err != nil && !fresh {
		return nil, false, &plan.Error{Op: op, Err: err, Remedy: "run `constellation sandbox down` for it with the program that made it, or again with this one"}
	}
	info := workspace.SandboxInfo{Name: spec.Name, Cloud: spec.Cloud}
	if !fresh {
		info.UID, info.Cloud = st.UID, st.Cloud
		if err := agree(st, spec); err != nil {
			return nil, false, err
		}
	}
	f, err := checkFaults(emulatedCloud(engine.SandboxSpec{Cloud: info.Cloud}), spec.Faults, machineNames(st, spec))
	if err != nil {
		return nil, false, usage(op, "correct or leave out the faults", "%w", err)
	}
	ws, err := workspace.OpenWorkspace(spec.Workspace)
	if err != nil {
		return nil, false, err
	}
	if err := ws.CheckForSandbox(info); err != nil {
		return nil, false, err
	}
	if spec.Machines == hollowKind {
		err = hollowSpec(op, spec, f)
	}
	return st, fresh, err
}

// ensureDaemon starts the daemon of a sandbox unless it is running. fresh is whether this program has just made the sandbox.
func (s *Sandboxes) ensureDaemon(ctx context.Context, op, name string, fresh bool, client *sandboxapi.Client, t *teller) (sandboxapi.Info, error) {
	probe, cancel := context.WithTimeout(ctx, answerWithin)
	info, err := client.Sandbox(probe)
	cancel()
	if err == nil {
		t.step(stepDaemon, plan.StateSkipped, "it is running")
		return info, nil
	}
	if ctx.Err() != nil {
		return info, &plan.Error{Op: op, Err: context.Cause(ctx)}
	}
	t.step(stepDaemon, plan.StateRunning, "Start the cloud")
	if !fresh {
		err = s.endDaemon(ctx, op, name)
		if err == nil {
			err = s.renewImages(name, t)
		}
		if err != nil {
			t.step(stepDaemon, plan.StateFailed, err.Error())
			return info, err
		}
	}
	if info, err = s.startDaemon(ctx, name, client); err != nil {
		t.step(stepDaemon, plan.StateFailed, err.Error())
		return info, err
	}
	text := "the cloud runs"
	if n := len(info.Machines); n > 0 {
		text = fmt.Sprintf("the cloud runs again, with the %d machines that it had", n)
	}
	t.step(stepDaemon, plan.StateDone, text)
	return info, nil
}

// prune removes cache entries that no sandbox has used for a long time. A failure
// is not fatal.
func (s *Sandboxes) prune(ctx context.Context, t *teller) {
	dirs, files, err := s.inUse()
	if err != nil { // the needs of a sandbox of another version of this program are unknown
		s.log.Info("cache not pruned", "err", err)
		return
	}
	gone, err1 := machine.Prune(ctx, s.dirs.Cache, dirs, cacheUnused)
	more, err2 := build.PruneServices(s.dirs.Cache, files, cacheUnused)
	for _, path := range append(gone, more...) {
		s.log.Info("removed from the cache", "path", path, "unused", cacheUnused)
	}
	if err := errors.Join(err1, err2); err != nil {
		t.warn(stepFiles, err.Error())
	}
}

// inUse lists the cache entries that the sandboxes here need, also while they are stopped:
// directories of OS images and root file systems, and files of our services.
func (s *Sandboxes) inUse() (dirs, files []string, err error) {
	entries, err := os.ReadDir(s.dirs.sandboxes())
	if err != nil {
		return nil, nil, fmt.Errorf("look for sandboxes: %w", err)
	}
	for _, e := range entries {
		if !e.IsDir() {
			continue
		}
		st, err := readState(s.dirs.of(e.Name(), stateName))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, nil, err
		}
		if st.Simulated { // its files are in its own directory
			continue
		}
		for _, img := range st.Catalogue {
			dirs = append(dirs, img.Dir, img.Rootfs)
		}
		for _, file := range st.Containers {
			files = append(files, file)
		}
	}
	return dirs, files, nil
}

// complete fills the zero fields of spec that do not depend on an existing sandbox.
func (s *Sandboxes) complete(spec engine.SandboxSpec) (engine.SandboxSpec, error) {
	const op = "start sandbox"
	if !filepath.IsAbs(spec.Workspace) {
		return spec, usage(op, "give the directory that the sandbox is for", "%q is no absolute path", spec.Workspace)
	}
	spec.Workspace = filepath.Clean(spec.Workspace)
	var err error
	if spec.Name == "" {
		spec.Name, err = s.dirs.resolve(spec.Workspace)
	} else if !sandboxapi.ValidName(spec.Name) {
		_, err = s.dirs.resolve(spec.Name)
	}
	if err != nil {
		return spec, usage(op, "choose another --name", "%w", err)
	}
	for field, v := range map[string]*string{"Kubernetes version": &spec.Kubernetes, "image": &spec.Image, "release": &spec.Release} {
		if *v == "" {
			continue
		}
		parsed, err := version.Parse(*v)
		if err != nil {
			return spec, usage(op, "give a version such as "+build.DefaultVersion, "%s %q: %w", field, *v, err)
		}
		*v = parsed.String()
	}
	switch p := spec.RegistryPort; {
	case p < 0 || p > 65535:
		return spec, usage(op, "pass the port of a registry on this computer, or omit the flag", "--registry-port is %d, want 1 to 65535", p)
	case slices.Contains([]uint16{metadataPort, controlPort, registryPort, mirrorPort, apiServerPort, initPort, joinPort}, uint16(p)) && p != 0:
		return spec, usage(op, "start the registry at another port", "the sandbox itself uses port %d of its gateway", p)
	case p != 0 && spec.Machines != machinesReal:
		return spec, usage(op, "add --machines real", "only real machines pull images")
	}
	if err := checkCloud(op, spec); err != nil {
		return spec, err
	}
	switch spec.Machines {
	case "":
		spec.Machines = machinesAuto
	case machinesAuto, machinesReal, machinesSimulated, hollowKind:
	default:
		return spec, usage(op, "leave --machines out, or say auto, real or simulated", "there are no %q machines", spec.Machines)
	}
	if spec.Machines != hollowKind && (spec.Boot != 0 || spec.Join != 0 || spec.Drain != 0) && !s.dirs.isHollow(spec.Name) {
		return spec, usage(op, "add --hollow, or leave these times out", "only hollow machines have configurable times to boot, to join, and to end a pod")
	}
	if _, _, err := divideFaults(emulatedCloud(spec), spec.Faults); err != nil {
		return spec, usage(op, "correct or leave out the faults", "%w", err)
	}
	return spec, nil
}

// checkCloud refuses a cloud that no sandbox can emulate, or not with the rest of spec.
func checkCloud(op string, spec engine.SandboxSpec) error {
	have := providers.Sandboxed()
	switch {
	case spec.Cloud == "" || spec.Cloud == providers.Local:
		return nil
	case !slices.Contains(have, spec.Cloud):
		return usage(op, "pass --cloud "+words.Or(have)+", or omit the flag", "there is no sandbox of cloud %q", spec.Cloud)
	case spec.Machines == hollowKind:
		return usage(op, "leave --hollow or --cloud out", "hollow machines are in the sandbox's own cloud only")
	}
	return nil
}

// emulatedCloud is the cloud of a new sandbox for its state.
func emulatedCloud(spec engine.SandboxSpec) string {
	if spec.Cloud == providers.Local {
		return ""
	}
	return spec.Cloud
}

// machineNames lists the machines of a sandbox, or those that spec gives a new one.
func machineNames(st *state, spec engine.SandboxSpec) (names []string) {
	if st != nil && len(st.Instances) > 0 {
		for _, i := range st.ordered() {
			names = append(names, i.Name)
		}
		return names
	}
	for n := range count(spec.ControlPlanes, defaultControlPlanes) {
		names = append(names, fmt.Sprint("control-plane-", n))
	}
	for n := range count(spec.Workers, defaultWorkers) {
		names = append(names, fmt.Sprint("worker-", n))
	}
	return names
}

// agree refuses a spec that conflicts with the existing sandbox.
func agree(st *state, spec engine.SandboxSpec) error {
	op := "start sandbox " + spec.Name
	if st.Workspace != spec.Workspace {
		return usage(op, "choose another name with --name, or run the command there with -C", "it belongs to %s", st.Workspace)
	}
	if is := kindOf(st); spec.Machines != machinesAuto && spec.Machines != is {
		return usage(op, "leave --machines out, or run `constellation sandbox down` first, which deletes it, or use another workspace with -C", "its machines are %s, not %s", is, spec.Machines)
	}
	if spec.Cloud != "" && spec.Cloud != cmp.Or(st.Cloud, providers.Local) {
		return usage(op, "leave --cloud out, or run `constellation sandbox down` first, which deletes it, or use another workspace with -C", "its cloud is %s, not %s", cmp.Or(st.Cloud, providers.Local), spec.Cloud)
	}
	if spec.RegistryPort != 0 && spec.RegistryPort != int(st.RegistryPort) {
		return usage(op, "run `constellation sandbox down` first, which deletes it, or use another workspace with -C", "it was made for another registry")
	}
	for _, f := range []struct{ what, has, wants string }{
		{"Kubernetes", st.Kubernetes, spec.Kubernetes},
		{"image", st.Image, spec.Image},
		{"release", st.Release, spec.Release},
	} {
		if f.wants != "" && f.wants != f.has {
			return usage(op, "upgrade its cluster, or run `constellation sandbox down` first, which deletes it",
				"it was made for %s %s, not %s", f.what, f.has, f.wants)
		}
	}
	return nil
}

// create writes all files that the daemon of a new sandbox needs.
func (s *Sandboxes) create(ctx context.Context, spec engine.SandboxSpec, t *teller) error {
	op := "start sandbox " + spec.Name
	cat, err := release.Load(assets.Releases())
	if err != nil {
		return &plan.Error{Op: op, Err: err}
	}
	if spec.Release == "" {
		spec.Release = version.Release
	}
	if spec.Kubernetes == "" {
		spec.Kubernetes = build.DefaultVersion
	}
	if spec.Image == "" {
		spec.Image = spec.Release
	}
	rv, err := version.Parse(spec.Release)
	if err != nil {
		return usage(op, "give a release such as v1.1.0", "%w", err)
	}
	rel, err := cat.Release(rv)
	if err != nil {
		return usage(op, "choose a release that this program has", "%w", err)
	}
	kv, err := version.Parse(spec.Kubernetes)
	if err != nil {
		return usage(op, "give a version such as "+build.DefaultVersion, "%w", err)
	}
	if _, err := rel.ForKubernetes(kv); err != nil {
		return usage(op, fmt.Sprintf("choose a version of Kubernetes %s", strings.Join(rel.Minors(), " or ")), "%w", err)
	}

	if emulatedCloud(spec) != "" {
		files, err := assets.ChartFor("constellation-operator", spec.Release)
		if err != nil {
			return &plan.Error{Op: op, Err: err}
		}
		if !assets.HasValue(files, "cloudURL") { // it is built into the chart
			return usage(op, "choose a newer --release, or leave --cloud out", "the operator of release %s works in the sandbox's own cloud only", spec.Release)
		}
	}

	t.step(stepCheck, plan.StateRunning, "Check this computer")
	if simulate, why := s.kind(ctx, spec); simulate {
		return s.simulate(ctx, spec, cat, why, t)
	}
	want := machine.Demand{ControlPlanes: count(spec.ControlPlanes, defaultControlPlanes), Workers: count(spec.Workers, defaultWorkers), New: true, There: s.dirs.residents()}
	if err := s.check(ctx, spec, want, t); err != nil {
		t.step(stepCheck, plan.StateFailed, err.Error())
		return err
	}
	artifacts, err := build.Load(s.dirs.Cache, spec.Kubernetes)
	if err != nil {
		err = fromBuild(op, err)
		t.step(stepCheck, plan.StateFailed, err.Error())
		return err
	}
	t.step(stepCheck, plan.StateDone, "it can run these machines")

	t.step(stepRootfs, plan.StateRunning, "Prepare the root file system of machines")
	rootfs, err := machine.Rootfs(ctx, s.dirs.Cache, func(p machine.Progress) { t.progress(stepRootfs, p.Text, p.Current, p.Total) })
	if err != nil {
		t.step(stepRootfs, plan.StateFailed, err.Error())
		return &plan.Error{Op: op, Err: err}
	}
	t.step(stepRootfs, plan.StateDone, "it is there")

	t.step(stepImages, plan.StateRunning, "Prepare images")
	st := newState(spec.Name, spec.Workspace, time.Now())
	st.Release, st.Kubernetes, st.Image = spec.Release, artifacts.Version, spec.Image
	if st.CloudFaults, st.Faults, err = divideFaults(emulatedCloud(spec), spec.Faults); err != nil {
		return err
	}
	st.RegistryPort, st.Cloud = uint16(spec.RegistryPort), emulatedCloud(spec)
	if err := s.images(ctx, st, cat, rootfs, t); err != nil {
		t.step(stepImages, plan.StateFailed, err.Error())
		return err
	}
	for i := range st.Groups {
		st.Groups[i].Image = st.Image
	}
	t.step(stepImages, plan.StateDone, fmt.Sprintf("%d OS images and %d of our services", len(st.Catalogue), len(st.Containers)))

	if err := s.writeNew(ctx, st); err != nil {
		return &plan.Error{Op: op, Err: err}
	}
	return nil
}

// count interprets the numbers of a spec: zero is the default, a negative number is none.
func count(n, byDefault int) int {
	if n == 0 {
		return byDefault
	}
	return max(n, 0)
}

// check verifies that this computer can run the machines, and installs missing
// packages if permitted.
func (s *Sandboxes) check(ctx context.Context, spec engine.SandboxSpec, want machine.Demand, t *teller) error {
	_, ofMachines, err := divideFaults(emulatedCloud(spec), spec.Faults)
	var faults *Faults
	if err == nil {
		faults, err = ParseFaults(ofMachines)
	}
	if err == nil {
		err = faults.Real()
	}
	if err != nil {
		return usage("check this computer", "leave the fault out", "%w", err)
	}
	problems := machine.Check(ctx, s.dirs.Cache, s.dirs.of(spec.Name), want)
	var packages []string
	for _, p := range problems {
		packages = append(packages, p.Packages...)
	}
	if len(packages) > 0 && spec.Install {
		t.progress(stepCheck, "installing "+strings.Join(packages, " "), 0, 0)
		var output strings.Builder
		if err := machine.InstallPackages(ctx, packages, &output); err != nil {
			return &plan.Error{
				Op: "install " + strings.Join(packages, " "), Err: fmt.Errorf("%w: %s", err, lastLines(output.String(), 3)),
				Remedy: "install them by hand",
			}
		}
		problems = machine.Check(ctx, s.dirs.Cache, s.dirs.of(spec.Name), want)
	}
	if len(problems) == 0 {
		return nil
	}
	what, remedies := make([]string, len(problems)), make([]string, len(problems))
	// Missing packages are the only problem that acknowledgement solves.
	exit := plan.ExitUnacknowledged
	for i, p := range problems {
		what[i], remedies[i] = p.What, p.Remedy
		if len(p.Packages) == 0 || spec.Install {
			exit = plan.ExitBlocked
		}
	}
	return &plan.Error{
		Op: "start sandbox " + spec.Name, Err: errors.New(strings.Join(what, "; ")),
		Remedy: strings.Join(slices.Compact(remedies), "; "), Exit: exit,
	}
}

// images makes the catalogue: an OS image of each release whose programs exist,
// and the images of its services.
func (s *Sandboxes) images(ctx context.Context, st *state, cat *release.Catalogue, rootfs string, t *teller) error {
	op := "prepare images"
	if err := st.buildReleases(); err != nil {
		return &plan.Error{Op: op, Err: err}
	}
	peers := []attestation.Measurements{}
	for _, rel := range cat.Releases() { // the oldest first
		v := rel.Version.String()
		programs := map[string]string{}
		var missing error
		for _, name := range []string{"bootstrapper", "agent"} {
			var err error
			if programs[name], err = build.ReleaseBinary(v, name); err != nil {
				missing = err
			}
		}
		var containers []build.Image
		if missing == nil {
			containers, missing = build.Services(ctx, s.dirs.Cache, v, func(p build.Progress) { t.progress(stepImages, p.Text, p.Current, p.Total) })
		}
		if missing != nil {
			if v == st.Release || v == st.Image || !errors.Is(missing, fs.ErrNotExist) {
				return fromBuild(op, missing)
			}
			t.warn(stepImages, fmt.Sprintf("release %s is not offered: %v", v, missing))
			continue
		}
		for _, c := range containers {
			st.Containers[c.Ref] = c.Path
		}
		// An image accepts its own join service and those of older
		// releases, whose nodes it meets when a cluster is upgraded to it.
		known, err := json.Marshal(peers)
		if err != nil {
			return &plan.Error{Op: op, Err: err}
		}
		img, err := machine.OSImage(ctx, s.dirs.Cache, rootfs, machine.ImageSpec{
			Version: v, Bootstrapper: programs["bootstrapper"], Agent: programs["agent"], Peers: known, ReleaseKeys: st.releaseKey.PEM(),
		}, func(p machine.Progress) { t.progress(stepImages, p.Text, p.Current, p.Total) })
		if err != nil {
			return &plan.Error{Op: op, Err: err}
		}
		st.Catalogue = append(st.Catalogue, *img)
		peers = append(peers, attestation.Enforced(predict(*img)))
	}
	return imageThere(op, st)
}

// imageThere refuses an image that is not in the catalogue.
func imageThere(op string, st *state) error {
	if _, ok := st.image(st.Image); !ok {
		var have []string
		for _, img := range st.Catalogue {
			have = append(have, img.Version)
		}
		return usage(op, "choose one of "+strings.Join(have, ", "), "there is no OS image %s", st.Image)
	}
	return nil
}

// writeNew writes the secrets of a new sandbox and, last, its state: a sandbox
// exists when its state does. It removes the remains of an older sandbox first.
func (s *Sandboxes) writeNew(ctx context.Context, st *state) error {
	switch {
	case st.Hollow != nil:
		dir := s.dirs.of(st.Name)
		if err := s.dirs.remove(st.Name); err != nil {
			return err
		}
		if err := os.MkdirAll(dir, privateDirMode); err != nil {
			return fmt.Errorf("write sandbox: %w", err)
		}
	case !st.Simulated: // the images of simulated machines are there already
		if err := s.clear(ctx, st.Name); err != nil {
			return err
		}
	}
	random := make([]byte, 3*32)
	if _, err := rand.Read(random); err != nil {
		return fmt.Errorf("write sandbox: %w", err)
	}
	secret := random[:32]
	st.InitSecretSHA256 = digest(secret)
	st.Token = hex.EncodeToString(random[32:64])
	st.UID = hex.EncodeToString(random[64:80])
	cert, key, err := attestationtest.CreateCA(st.Name)
	if err != nil {
		return err
	}
	type file struct {
		name string
		data []byte
		mode fs.FileMode
	}
	files := []file{
		{secretName, []byte(hex.EncodeToString(secret) + "\n"), 0o600},
		{caKeyName, key, 0o600},
		{caName, cert, 0o644},
	}
	if st.releaseKey != nil {
		b, err := st.releaseKey.PrivatePEM()
		if err != nil {
			return fmt.Errorf("write sandbox: %w", err)
		}
		files = append(files, file{releaseKeyName, b, 0o600})
	}
	for _, f := range files {
		if err := writeFile(s.dirs.of(st.Name, f.name), f.data, f.mode); err != nil {
			return fmt.Errorf("write sandbox: %w", err)
		}
	}
	return st.write(s.dirs.of(st.Name, stateName))
}

// clear makes the empty directory of a new sandbox.
func (s *Sandboxes) clear(ctx context.Context, name string) error {
	dir := s.dirs.of(name)
	if _, err := os.Lstat(dir); err == nil {
		host, err := s.dirs.host(name, nil, s.log)
		if err != nil {
			return err
		}
		if err := host.Sweep(ctx); err != nil {
			return err
		}
		if err := s.dirs.remove(name); err != nil {
			return err
		}
	}
	if err := os.MkdirAll(dir, privateDirMode); err != nil {
		return fmt.Errorf("write sandbox: %w", err)
	}
	return nil
}

// endDaemon ends a hung daemon, which would keep its machines locked, and a new daemon out.
func (s *Sandboxes) endDaemon(ctx context.Context, op, name string) error {
	if p, err := readProcess(s.dirs.of(name, pidName)); err == nil && p.alive() {
		if err := p.end(ctx, serveGrace+time.Second); err != nil {
			return &plan.Error{Op: op, Err: err, Remedy: "its log says more: " + s.dirs.of(name, logName)}
		}
	}
	return nil
}

// startDaemon starts the cloud of a sandbox and waits until it answers.
func (s *Sandboxes) startDaemon(ctx context.Context, name string, client *sandboxapi.Client) (sandboxapi.Info, error) {
	var none sandboxapi.Info
	op := "start the cloud of sandbox " + name
	logFile := s.dirs.of(name, logName)
	remedy := "its log says more: " + logFile
	if err := s.endDaemon(ctx, op, name); err != nil {
		return none, err
	}
	exe := s.exe
	if exe == "" {
		var err error
		if exe, err = os.Executable(); err != nil {
			return none, &plan.Error{Op: op, Err: err}
		}
	}
	out, err := os.OpenFile(logFile, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return none, &plan.Error{Op: op, Err: err}
	}
	defer out.Close()
	begin, err := out.Seek(0, io.SeekEnd)
	if err != nil {
		return none, &plan.Error{Op: op, Err: err}
	}
	cmd := exec.Command(exe, "sandbox", "daemon", name) //nolint:noctx // it outlives this command
	cmd.Stdout, cmd.Stderr = out, out
	cmd.Dir = "/" // keeps no directory of the user busy
	cmd.Env = append(os.Environ(), "XDG_CACHE_HOME="+filepath.Dir(s.dirs.Cache), "XDG_STATE_HOME="+filepath.Dir(s.dirs.State))
	// A session of its own protects it from a terminal's hang-up or interrupt.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return none, &plan.Error{Op: op, Err: err}
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	limit := time.NewTimer(daemonStart)
	defer limit.Stop()
	for {
		info, err := client.Sandbox(ctx)
		if err == nil {
			return info, nil
		}
		select {
		case <-ctx.Done():
			return none, &plan.Error{Op: op, Err: context.Cause(ctx)}
		case err := <-ended:
			return none, &plan.Error{Op: op, Err: lastWords(logFile, begin, err), Remedy: remedy}
		case <-limit.C:
			return none, &plan.Error{Op: op, Err: fmt.Errorf("it does not answer after %s: %w", daemonStart, err), Remedy: remedy}
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// lastWords returns the last error that an ended daemon logged since begin, or else its
// exit status.
func lastWords(logFile string, begin int64, ended error) error {
	b, err := os.ReadFile(logFile)
	if int64(len(b)) < begin {
		begin = 0 // the file was full, and this is a new one
	}
	if err == nil && int64(len(b)) > begin {
		return errors.New(lastLines(string(b[begin:]), 1))
	}
	if ended == nil {
		return errors.New("it ended without a word")
	}
	return fmt.Errorf("it ended without a word: %w", ended)
}

func lastLines(s string, n int) string {
	lines := strings.Split(strings.TrimSpace(s), "\n")
	return strings.Join(lines[max(len(lines)-n, 0):], "\n")
}

// scale sets group sizes and faults to those of spec. In an existing
// sandbox a zero changes nothing.
func (s *Sandboxes) scale(ctx context.Context, c *sandboxapi.Client, info sandboxapi.Info, spec engine.SandboxSpec, t *teller) error {
	op := "set up sandbox " + spec.Name
	if spec.Faults != nil && !slices.Equal(spec.Faults, info.Faults) {
		if err := inTime(op, spec.Faults, info); err != nil {
			return err
		}
		if err := c.SetFaults(ctx, spec.Faults); err != nil {
			return &plan.Error{Op: op, Err: err}
		}
		t.step(stepFaults, plan.StateDone, fmt.Sprintf("faults: %s (before: %s)", orNone(spec.Faults), orNone(info.Faults)))
	}
	// Control planes come last. A sandbox without one was never set up: after an error or a
	// crash in between, the next up starts with all groups again.
	begun := slices.ContainsFunc(info.Groups, func(g cloud.Group) bool { return g.Role == cloud.ControlPlane && g.Count > 0 })
	groups := slices.Clone(info.Groups)
	slices.SortStableFunc(groups, func(a, b cloud.Group) int {
		last := func(g cloud.Group) int {
			if g.Role == cloud.ControlPlane {
				return 1
			}
			return 0
		}
		return last(a) - last(b)
	})
	for _, g := range groups {
		wanted, byDefault := spec.ControlPlanes, defaultControlPlanes
		if g.Role == cloud.Worker {
			wanted, byDefault = spec.Workers, defaultWorkers
		}
		if wanted == 0 && begun {
			continue
		}
		n := count(wanted, byDefault)
		if n == g.Count {
			continue
		}
		if begun {
			t.progress(stepMachines, fmt.Sprintf("group %s goes from %d machines to %d", g.Name, g.Count, n), 0, 0)
		}
		if err := c.SetGroupCount(ctx, g.ID, n); err != nil {
			return &plan.Error{Op: op, Err: err, Remedy: "ask for fewer machines, or make room for them"}
		}
	}
	return nil
}

func orNone(faults []string) string {
	if len(faults) == 0 {
		return "none"
	}
	return strings.Join(faults, ", ")
}

// inTime refuses new faults that strike only at a machine's creation, if the machines already
// exist: the faults would have no effect.
func inTime(op string, faults []string, info sandboxapi.Info) error {
	_, faults, err := divideFaults(cloudOf(info), slices.DeleteFunc(slices.Clone(faults), func(s string) bool { return slices.Contains(info.Faults, s) }))
	var f *Faults
	if err == nil {
		f, err = ParseFaults(faults)
	}
	if err != nil { // complete has checked it
		return usage(op, "correct or leave out the faults", "%w", err)
	}
	for _, m := range info.Machines {
		if m.Boot == sandboxapi.BootCreating {
			continue
		}
		fault := ""
		if _, ok := f.bootDelay[m.Name]; ok {
			fault = "boot-delay"
		}
		if f.neverBoot[m.Name] {
			fault = "never-boot"
		}
		if fault != "" {
			return usage(op, "name a machine that is not there yet and ask for one more, or take the sandbox down and up again with the fault",
				"fault %s strikes when a machine is made, and %s is there already", fault, m.Name)
		}
	}
	return nil
}

// watchBoot reports the progress of boots until all have ended or failed.
func (s *Sandboxes) watchBoot(ctx context.Context, c *sandboxapi.Client, t *teller) error {
	t.step(stepMachines, plan.StateRunning, "Boot the machines")
	limit := time.NewTimer(bootPatience)
	defer limit.Stop()
	seen := map[string]sandboxapi.Boot{}
	for expired := false; ; {
		info, err := c.Sandbox(ctx)
		if err != nil {
			err = &plan.Error{Op: "boot the machines", Err: err, Remedy: "run the command again; it goes on where this one ended"}
			t.step(stepMachines, plan.StateFailed, err.Error())
			return err
		}
		ready, open := 0, 0
		var late []sandboxapi.Machine
		for _, m := range info.Machines {
			if old := seen[m.Name]; old != m.Boot && m.State != cloud.Terminating {
				_, group, _ := sandboxapi.ParseGroupID(m.Group)
				t.tell(plan.Event{
					Kind: plan.KindNode, Step: stepMachines, Node: m.Name, Group: group, From: string(old), To: string(m.Boot), Text: m.Message,
				})
				seen[m.Name] = m.Boot
			}
			switch {
			case m.Boot == sandboxapi.BootReady && m.State != cloud.Terminating:
				ready++
			case m.State == cloud.Terminating, m.Boot == sandboxapi.BootCreating, m.Boot == sandboxapi.BootBooting:
				open++
				late = append(late, m)
			default:
				late = append(late, m)
			}
		}
		t.progressIfNew(stepMachines, ready, len(info.Machines))
		if open == 0 || expired {
			for _, m := range late {
				t.warn(stepMachines, fmt.Sprintf("%s is %s and not ready: %s; its console: %s", m.Name, m.Boot, orUnknown(m.Message), m.Console))
			}
			t.step(stepMachines, plan.StateDone, fmt.Sprintf("%d of %d machines are ready", ready, len(info.Machines)))
			return nil
		}
		select {
		case <-ctx.Done():
			return &plan.Error{Op: "boot the machines", Err: context.Cause(ctx), Remedy: "run the command again; it goes on where this one ended"}
		case <-limit.C:
			expired = true
		case <-time.After(100 * time.Millisecond):
		}
	}
}

func orUnknown(s string) string {
	if s == "" {
		return "no reason is known yet"
	}
	return s
}

// progressIfNew reports numbers that differ from the last reported ones.
func (t *teller) progressIfNew(step string, current, total int) {
	if t.last == [2]int{current, total} {
		return
	}
	t.last = [2]int{current, total}
	t.progress(step, "machines are ready", int64(current), int64(total))
}

// handOver writes the workspace's data about its sandbox, where they are
// missing.
func (s *Sandboxes) handOver(spec engine.SandboxSpec, info workspace.SandboxInfo, t *teller) (workspace.SandboxInfo, error) {
	secret, err := os.ReadFile(s.dirs.of(info.Name, secretName))
	if err == nil {
		info.InitSecret, err = hex.DecodeString(strings.TrimSpace(string(secret)))
	}
	if err != nil {
		return info, &plan.Error{Op: "read the init secret of sandbox " + info.Name, Err: err}
	}
	t.step(stepFiles, plan.StateRunning, "Write the files of the workspace")
	written, differs, err := adopt(spec.Workspace, info, s.dirs.of(info.Name, configSumName))
	if err != nil {
		t.step(stepFiles, plan.StateFailed, err.Error())
		return info, err
	}
	if len(differs) > 0 {
		t.warn(stepFiles, fmt.Sprintf("%s has other values than the sandbox in %s: init needs the provider's section of sandbox %s, and measurements and trustRoots as `constellation sandbox status -o json` shows them",
			workspace.ConfigFile, strings.Join(differs, ", "), info.Name))
	}
	if len(written) == 0 {
		t.step(stepFiles, plan.StateSkipped, "they are there")
	} else {
		t.step(stepFiles, plan.StateDone, "wrote "+strings.Join(written, " and "))
	}
	return info, nil
}

// Down removes a sandbox: machines, daemon, files. It works on partial remains, and may be
// repeated until it succeeds. If there is nothing to remove, it succeeds.
func (s *Sandboxes) Down(ctx context.Context, name string, emit func(plan.Event)) error {
	t := newTeller(emit)
	at := "" // the workspace
	if filepath.IsAbs(name) {
		at = name
	}
	name, err := s.dirs.resolve(name)
	if err != nil {
		return usage("take sandbox down", "give its name, or the directory it was made for", "%w", err)
	}
	op := "take sandbox " + name + " down"
	if at != "" {
		if err := s.downDrill(ctx, at, t); err != nil {
			return err
		}
	}
	hollow := s.dirs.isHollow(name)
	none := func() error {
		t.step(stepRemove, plan.StateNothing, "there is no sandbox "+name+otherUsers())
		if at == "" {
			return nil
		}
		if err := forgetTold(t, at, workspace.SandboxInfo{Name: name}, ""); err != nil {
			return &plan.Error{Op: op, Err: err}
		}
		return nil
	}
	if _, err := os.Lstat(s.dirs.sandboxes()); errors.Is(err, fs.ErrNotExist) {
		return none() // do not create a directory only for the lock
	}
	unlock, err := s.dirs.lock(ctx, name, func() {
		t.tell(plan.Event{Kind: plan.KindWait, Text: "another command is working on sandbox " + name})
	})
	if err != nil {
		return &plan.Error{Op: op, Err: err}
	}
	defer s.dirs.tidy()
	defer unlock(true)
	if _, err := os.Lstat(s.dirs.of(name)); errors.Is(err, fs.ErrNotExist) {
		return none()
	}
	// The removal of processes and mounts needs neither. Without a state only the workspace is unknown.
	st, _ := readState(s.dirs.of(name, stateName))
	if !hollow && (st == nil || !st.Simulated) && !simulated.Found(s.dirs.of(name)) {
		if err := onlyRoot(op); err != nil {
			return err
		}
	}
	sum, _ := os.ReadFile(s.dirs.of(name, configSumName))

	t.step(stepRemove, plan.StateRunning, "Remove the machines")
	remove, gone := s.remove, "processes, mounts, networks and cgroups are gone"
	switch {
	case hollow:
		remove, gone = s.removeHollow, "hollow machines and the processes of their cluster are gone"
	case st != nil && st.Simulated:
		gone = "the processes of simulated machines are gone"
	}
	if err := remove(ctx, name, t); err != nil {
		err = &plan.Error{Op: op, Err: err, Remedy: "run the command again; it goes on where this one ended"}
		t.step(stepRemove, plan.StateFailed, err.Error())
		return err
	}
	t.step(stepRemove, plan.StateDone, gone)

	t.step(stepClean, plan.StateRunning, "Remove the files")
	// The workspace first: while this directory exists, its sandbox can be found.
	err = nil
	if st != nil {
		err = forgetTold(t, st.Workspace, workspace.SandboxInfo{Name: name, UID: st.UID, Cloud: st.Cloud}, strings.TrimSpace(string(sum)))
	}
	if err == nil {
		err = s.dirs.remove(name)
	}
	if err != nil {
		err = &plan.Error{Op: op, Err: err, Remedy: "run the command again; it goes on where this one ended"}
		t.step(stepClean, plan.StateFailed, err.Error())
		return err
	}
	t.step(stepClean, plan.StateDone, "nothing of it is left")
	return nil
}

// remove ends all processes and mounts of a sandbox.
func (s *Sandboxes) remove(ctx context.Context, name string, t *teller) error {
	client := sandboxapi.NewClient("unix:"+s.dirs.of(name, socketName), "")
	p, pidErr := readProcess(s.dirs.of(name, pidName))
	// A regular shutdown by the daemon comes first. If it fails, the machines are removed without it.
	if err := client.Shutdown(ctx, true); err != nil {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if !errors.Is(err, cloud.ErrUnavailable) {
			t.warn(stepRemove, err.Error())
		}
	}
	if pidErr == nil {
		if err := p.end(ctx, serveGrace+2*time.Second); err != nil {
			return err
		}
	}
	st, err := readState(s.dirs.of(name, stateName))
	if err != nil {
		st = nil
	}
	host, err := s.dirs.host(name, st, s.log)
	if err != nil {
		return err
	}
	return host.Sweep(ctx)
}

// noSuch is the error of a sandbox that this user does not have.
func noSuch() error {
	if os.Geteuid() != 0 {
		return fmt.Errorf("%w: you have no such sandbox", cloud.ErrNotFound)
	}
	return fmt.Errorf("%w: there is no such sandbox", cloud.ErrNotFound)
}

// otherUsers returns a hint that another user may own the sandbox.
func otherUsers() string {
	if os.Geteuid() == 0 {
		return ""
	}
	return "; a sandbox belongs to the user who started it: ask again as root, for example with sudo, if that was root"
}

// Status describes one sandbox, also without a running daemon. The error wraps
// cloud.ErrNotFound if there is none.
func (s *Sandboxes) Status(ctx context.Context, name string) (engine.SandboxStatus, error) {
	var out engine.SandboxStatus
	name, err := s.dirs.resolve(name)
	if err != nil {
		return out, usage("look at sandbox", "give its name, or the directory it was made for", "%w", err)
	}
	op := "look at sandbox " + name
	st, err := readState(s.dirs.of(name, stateName))
	if errors.Is(err, fs.ErrNotExist) {
		return out, &plan.Error{Op: op, Err: noSuch(), Remedy: "start it with `constellation sandbox up`" + otherUsers()}
	}
	if err != nil {
		return out, &plan.Error{Op: op, Err: err}
	}
	trust, err := os.ReadFile(s.dirs.of(name, caName))
	if err != nil {
		return out, &plan.Error{Op: op, Err: err}
	}
	out = engine.SandboxStatus{
		SandboxInfo: workspace.SandboxInfo{
			Name: st.Name, Cloud: st.Cloud, UID: st.UID, Release: st.Release, Kubernetes: st.Kubernetes, Image: st.Image, TrustRoots: string(trust),
			ClusterEndpoint: loopback(st.KubernetesPort), InitEndpoint: loopback(st.InitPort), InClusterEndpoint: st.gateway().String(),
			Simulated: st.Simulated, NodeCIDR: st.nodes().String(), PodCIDR: podCIDR.String(), ServiceCIDR: serviceCIDR,
			Socket: s.dirs.of(name, socketName),
		},
		State: "stopped", Created: st.Created, Faults: slices.Concat(st.CloudFaults, st.Faults), Machines: []engine.SandboxMachine{},
	}
	if st.Hollow != nil {
		return s.statusHollow(ctx, st, out)
	}
	if img, ok := st.image(st.Image); ok {
		out.Measurements = measurements(img)
	}
	for _, g := range st.Groups {
		if g.Role == cloud.ControlPlane {
			out.ControlPlanes = g.Count
		} else {
			out.Workers = g.Count
		}
	}
	info, err := sandboxapi.NewClient("unix:"+out.Socket, "").Sandbox(ctx)
	if err == nil {
		out.State, out.KubernetesVersions = "running", info.KubernetesVersions
		if e := info.Emulator; e != nil {
			out.Calls, out.Problems = e.Calls, e.Problems
		}
		for _, m := range info.Machines {
			out.Machines = append(out.Machines, describeMachine(m))
		}
		return out, nil
	}
	if ctx.Err() != nil {
		return out, &plan.Error{Op: op, Err: context.Cause(ctx)}
	}
	// Without a daemon, Status still reports the observed state of the machines.
	host, err := s.dirs.host(name, st, s.log)
	if err != nil {
		return out, &plan.Error{Op: op, Err: err}
	}
	for _, i := range st.ordered() {
		m := sandboxapi.Machine{Instance: st.describe(i), Boot: sandboxapi.BootStopped, Started: i.Started, Console: host.Console(i.Name)}
		if seen, err := host.Machine(i.Name); err == nil && seen.Power == machine.Running {
			m.Boot = i.Boot
		}
		out.Machines = append(out.Machines, describeMachine(m))
	}
	return out, nil
}

func describeMachine(m sandboxapi.Machine) engine.SandboxMachine {
	_, group, _ := sandboxapi.ParseGroupID(m.Group)
	_, image, _ := sandboxapi.ParseImageReference(m.Image)
	return engine.SandboxMachine{
		Name: m.Name, Group: group, Role: string(m.Role), IP: m.IP.String(), Image: image, Boot: string(m.Boot),
		Message: m.Message, Console: m.Console, Started: m.Started,
	}
}

// Exec runs command in a machine, by default a login shell, and returns its
// exit code. With tty the command gets a terminal. It works without the
// daemon.
func (s *Sandboxes) Exec(ctx context.Context, name, node string, command []string, stdin io.Reader, stdout, stderr io.Writer, tty bool) (int, error) {
	name, err := s.dirs.resolve(name)
	if err != nil {
		return 0, usage("run command in a machine", "give the sandbox's name, or the directory it was made for", "%w", err)
	}
	op := fmt.Sprintf("run command in %s of sandbox %s", node, name)
	st, err := readState(s.dirs.of(name, stateName))
	if errors.Is(err, fs.ErrNotExist) {
		return 0, &plan.Error{Op: op, Err: noSuch(), Remedy: "start it with `constellation sandbox up`" + otherUsers()}
	}
	if err != nil {
		return 0, &plan.Error{Op: op, Err: err}
	}
	if st.Hollow != nil {
		return 0, usage(op, "look at its Node with `kubectl describe node "+node+"`", "the machines of this sandbox are hollow: nothing runs in them, so there is nothing to run a command in")
	}
	if st.instance(node) == nil {
		var have []string
		for _, i := range st.ordered() {
			have = append(have, i.Name)
		}
		return 0, usage(op, "its machines are "+strings.Join(have, ", "), "%w: no machine %s", cloud.ErrNotFound, node)
	}
	host, err := s.dirs.host(name, st, s.log)
	if err != nil {
		return 0, &plan.Error{Op: op, Err: err}
	}
	if len(command) == 0 {
		command = []string{"/bin/bash", "-l"}
		if st.Simulated { // it has no files of its own for a login shell
			command = []string{"/bin/sh"}
		}
	}
	code, err := host.Exec(ctx, node, command, machine.Stdio{In: stdin, Out: stdout, Err: stderr, TTY: tty})
	if err != nil {
		return code, &plan.Error{Op: op, Err: err, Remedy: "look at the machine with `constellation sandbox status`"}
	}
	return code, nil
}

// Fetch gets the binaries and images of a Kubernetes version into the cache. That
// takes minutes the first time and is immediate afterwards. A running sandbox offers the
// version at once.
func (s *Sandboxes) Fetch(ctx context.Context, kubernetes string, from engine.FetchOptions, emit func(plan.Event)) error {
	t := newTeller(emit)
	op := "fetch Kubernetes " + kubernetes
	v, err := version.Parse(kubernetes)
	if err != nil {
		return usage(op, "choose one of "+strings.Join(build.Versions(), ", "), "%w", err)
	}
	if !slices.Contains(build.Versions(), v.String()) {
		return usage(op, "choose one of "+strings.Join(build.Versions(), ", "), "it cannot be built here")
	}
	o := build.Options{FromSource: from.FromSource, Mirror: from.Mirror}
	if err := o.Validate(); err != nil {
		return usage(op, "give --mirror the address of a server with copies of the published files, such as https://mirror.example/files", "%w", err)
	}
	if !o.FromSource && build.Cached(s.dirs.Cache, v.String()) {
		t.step(stepBuild, plan.StateSkipped, "Kubernetes "+v.String()+" is in the cache")
		return nil
	}
	t.step(stepBuild, plan.StateRunning, "Get Kubernetes "+v.String())
	if _, err := build.Kubernetes(ctx, s.dirs.Cache, v.String(), o, func(p build.Progress) {
		if p.Notice {
			t.warn(stepBuild, p.Text)
			return
		}
		t.progress(stepBuild, p.Text, p.Current, p.Total)
	}); err != nil {
		err = fromBuild(op, err)
		t.step(stepBuild, plan.StateFailed, err.Error())
		return err
	}
	t.step(stepBuild, plan.StateDone, "Kubernetes "+v.String()+" is in the cache")
	return nil
}

// fromBuild keeps the remedy of an error of package build.
func fromBuild(op string, err error) error {
	var b *build.Error
	if errors.As(err, &b) {
		return &plan.Error{Op: b.Op, Err: b.Err, Remedy: b.Remedy}
	}
	return &plan.Error{Op: op, Err: err}
}
