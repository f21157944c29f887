package sandbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"time"

	"constellation/assets"
	"constellation/engine"
	"constellation/engine/cloud"
	"constellation/engine/cloud/sandboxapi"
	"constellation/engine/plan"
	"constellation/engine/release"
	"constellation/engine/sandbox/build"
	"constellation/engine/sandbox/machine"
	"constellation/engine/version"
	"constellation/engine/workspace"
)

// Hollow describes a sandbox of hollow (simulated, like kubemark's) nodes, whose cluster exists
// from the start. Package hollow runs it.
type Hollow struct {
	// Name, UID and Token of the control API are those of the sandbox. Dir is its directory, in
	// which it may keep files.
	Name, UID, Token, Dir string
	// Socket is the address of the owner's API, Kubeconfig the file for the
	// administrator's access.
	Socket, Kubeconfig string
	// Workspace, Release, Kubernetes and Image are as in engine.SandboxSpec. Images are the
	// available versions of the OS.
	Workspace, Release, Kubernetes, Image string
	Images                                []string
	Created                               time.Time

	ControlPlanes, Workers int
	Times                  sandboxapi.HollowTimes
	Faults                 []string

	// Binaries are the paths of Kubernetes' programs by name. Operator is the path of the release's operator.
	Binaries map[string]string
	Operator string
}

// Defaults of a hollow sandbox.
const (
	hollowKind         = "hollow"
	hollowControlPlane = 3
	// hollowMost is the maximum number of workers in a configuration.
	hollowMost = 5000
	// hollowStart is the maximum time between two progress reports of the starting daemon.
	hollowStart = 2 * time.Minute
)

var hollowTimes = sandboxapi.HollowTimes{Boot: 5 * time.Second, Join: time.Second, Drain: 3 * time.Second}

// hollowNodes are the addresses of hollow machines. No packet is ever sent there, nor to the
// addresses of their pods.
const hollowNodes = "10.42.0.0/16"

// kubeconfigName is the file with the administrator's kubeconfig, in the directory of a hollow
// sandbox.
const kubeconfigName = "admin.conf"

// hollowState is the part of the state that only hollow sandboxes have.
type hollowState struct {
	Times sandboxapi.HollowTimes `json:"times"`
}

// hollow describes the sandbox of a state, and locates the programs that it needs.
func (d Dirs) hollow(st *state) (Hollow, error) {
	h := Hollow{
		Name: st.Name, UID: st.UID, Token: st.Token, Dir: d.of(st.Name), Socket: d.of(st.Name, socketName), Kubeconfig: d.of(st.Name, kubeconfigName),
		Workspace: st.Workspace, Release: st.Release, Kubernetes: st.Kubernetes, Image: st.Image, Created: st.Created,
		Times: st.Hollow.Times, Faults: st.Faults,
		ControlPlanes: st.group(sandboxapi.ControlPlaneGroup).Count, Workers: st.group(sandboxapi.WorkerGroup).Count,
	}
	cat, err := release.Load(assets.Releases())
	if err != nil {
		return h, err
	}
	for _, rel := range cat.Releases() {
		h.Images = append(h.Images, rel.Version.String())
	}
	if !slices.Contains(h.Images, st.Image) {
		return h, usage("start sandbox "+st.Name, "choose one of "+strings.Join(h.Images, ", "), "there is no OS image %s", st.Image)
	}
	a, err := build.Load(d.Cache, st.Kubernetes)
	if err != nil {
		return h, err
	}
	h.Binaries = a.Binaries
	h.Operator, err = build.ReleaseBinary(st.Release, "operator")
	return h, err
}

// isHollow reports whether a sandbox of that name exists and has hollow machines.
func (d Dirs) isHollow(name string) bool {
	st, err := readState(d.of(name, stateName))
	return err == nil && st.Hollow != nil
}

func kindOf(st *state) string {
	switch {
	case st.Hollow != nil:
		return hollowKind
	case st.Simulated:
		return machinesSimulated
	}
	return machinesReal
}

// hollowSpec refuses settings that hollow machines do not support.
func hollowSpec(op string, spec engine.SandboxSpec, f *Faults) error {
	switch {
	case spec.Workers > hollowMost:
		return usage(op, fmt.Sprintf("ask for at most %d", hollowMost), "%d hollow workers are too many", spec.Workers)
	case spec.Boot < 0 || spec.Join < 0 || spec.Drain < 0:
		return usage(op, "give a duration such as 5s", "a time is below zero")
	}
	err := f.Hollow()
	if f.metadataFail > 0 {
		err = errors.Join(err, errors.New("hollow machines ask for no metadata, so that cannot fail"))
	}
	if err != nil {
		return usage(op, "leave it out, or try it on real machines", "%w", err)
	}
	return nil
}

// upHollow is Up for a hollow sandbox. The caller holds its lock. st is nil for a new
// sandbox.
func (s *Sandboxes) upHollow(ctx context.Context, st *state, spec engine.SandboxSpec, t *teller) (workspace.SandboxInfo, error) {
	var none workspace.SandboxInfo
	op := "start sandbox " + spec.Name
	fresh := st == nil
	if fresh {
		var err error
		if st, err = s.newHollow(spec, t); err != nil {
			return none, err
		}
		if err := s.writeNew(ctx, st); err != nil {
			return none, &plan.Error{Op: op, Err: err}
		}
	}
	client := sandboxapi.NewClient("unix:"+s.dirs.of(spec.Name, socketName), "")
	probe, cancel := context.WithTimeout(ctx, answerWithin)
	info, err := client.Sandbox(probe)
	cancel()
	if ctx.Err() != nil {
		return none, &plan.Error{Op: op, Err: context.Cause(ctx)}
	}
	if err == nil {
		t.step(stepDaemon, plan.StateSkipped, "it is running")
		if info, err = s.awaitHollow(ctx, client, spec.Name, info, t); err != nil {
			return none, err
		}
		if err := s.changeHollow(ctx, client, st, info, spec, t); err != nil {
			return none, err
		}
	} else {
		if !fresh {
			t.warn(stepDaemon, "its daemon has ended, and with it all hollow machines and their cluster, with everything in it: a new cluster begins, with new machines")
			if err := s.changeState(st, spec); err != nil {
				return none, &plan.Error{Op: op, Err: err}
			}
		}
		t.step(stepDaemon, plan.StateRunning, "Start the control plane, and machines that are hollow: simulated, nothing runs in them")
		if info, err = s.startDaemon(ctx, spec.Name, client); err == nil {
			info, err = s.awaitHollow(ctx, client, spec.Name, info, t)
		}
		if err != nil {
			t.step(stepDaemon, plan.StateFailed, err.Error())
			return none, err
		}
		t.step(stepDaemon, plan.StateDone, fmt.Sprintf("%d hollow machines are nodes", len(info.Machines)))
	}
	status, err := s.Status(ctx, spec.Name)
	if err != nil {
		return none, err
	}
	if status.Kubeconfig, err = os.ReadFile(s.dirs.of(spec.Name, kubeconfigName)); err != nil {
		return none, &plan.Error{Op: op, Err: err}
	}
	return s.handOver(spec, status.SandboxInfo, t)
}

// newHollow returns the state of a new hollow sandbox, if all programs for it exist.
func (s *Sandboxes) newHollow(spec engine.SandboxSpec, t *teller) (*state, error) {
	op := "start sandbox " + spec.Name
	t.step(stepCheck, plan.StateRunning, "Check this computer")
	fail := func(err error) (*state, error) {
		t.step(stepCheck, plan.StateFailed, err.Error())
		return nil, err
	}
	st := newState(spec.Name, spec.Workspace, time.Now())
	st.Release = cmp.Or(spec.Release, version.Release)
	st.Kubernetes, st.Image = cmp.Or(spec.Kubernetes, build.DefaultVersion), cmp.Or(spec.Image, st.Release)
	st.Hollow = &hollowState{}
	spec.ControlPlanes, spec.Workers = count(spec.ControlPlanes, hollowControlPlane), count(spec.Workers, defaultWorkers)
	spec.Boot, spec.Join, spec.Drain = cmp.Or(spec.Boot, hollowTimes.Boot), cmp.Or(spec.Join, hollowTimes.Join), cmp.Or(spec.Drain, hollowTimes.Drain)
	change(st, spec)
	if _, err := s.dirs.hollow(st); err != nil {
		if !errors.As(err, new(*plan.Error)) {
			err = fromBuild(op, err)
		}
		return fail(err)
	}
	t.step(stepCheck, plan.StateDone, "it can simulate machines")
	return st, nil
}

// change applies spec to a state. Zero fields change nothing.
func change(st *state, spec engine.SandboxSpec) {
	for group, n := range map[string]int{sandboxapi.ControlPlaneGroup: spec.ControlPlanes, sandboxapi.WorkerGroup: spec.Workers} {
		if n != 0 {
			st.group(group).Count = max(n, 0)
		}
	}
	x := &st.Hollow.Times
	*x = sandboxapi.HollowTimes{Boot: cmp.Or(spec.Boot, x.Boot), Join: cmp.Or(spec.Join, x.Join), Drain: cmp.Or(spec.Drain, x.Drain)}
	if spec.Faults != nil {
		st.Faults = spec.Faults
	}
}

func (s *Sandboxes) changeState(st *state, spec engine.SandboxSpec) error {
	change(st, spec)
	return st.write(s.dirs.of(st.Name, stateName))
}

// awaitHollow reports the progress of a hollow sandbox until it is complete.
func (s *Sandboxes) awaitHollow(ctx context.Context, c *sandboxapi.Client, name string, info sandboxapi.Info, t *teller) (sandboxapi.Info, error) {
	op := "start the cluster of sandbox " + name
	said, since := "", time.Now()
	for {
		if info.Hollow == nil {
			return info, &plan.Error{Op: op, Err: errors.New("its machines are not hollow")}
		}
		doing := info.Hollow.Doing
		switch {
		case doing == "":
			return info, nil
		case doing != said:
			said, since = doing, time.Now()
			t.progress(stepDaemon, doing, 0, 0)
		case time.Since(since) > hollowStart:
			return info, &plan.Error{Op: op, Err: fmt.Errorf("it is not done after %s: %s", hollowStart, doing), Remedy: "its log says more: " + s.dirs.of(name, logName)}
		}
		select {
		case <-ctx.Done():
			return info, &plan.Error{Op: op, Err: context.Cause(ctx), Remedy: "run the command again; it goes on where this one ended"}
		case <-time.After(200 * time.Millisecond):
		}
		var err error
		if info, err = c.Sandbox(ctx); err != nil && ctx.Err() == nil {
			return info, &plan.Error{Op: op, Err: lastWords(s.dirs.of(name, logName), 0, err), Remedy: "its log says more: " + s.dirs.of(name, logName)}
		}
	}
}

// changeHollow applies spec to a running hollow sandbox.
func (s *Sandboxes) changeHollow(ctx context.Context, c *sandboxapi.Client, st *state, info sandboxapi.Info, spec engine.SandboxSpec, t *teller) error {
	op := "set up sandbox " + spec.Name
	if spec.Faults != nil && !slices.Equal(spec.Faults, info.Faults) {
		if err := c.SetFaults(ctx, spec.Faults); err != nil {
			return &plan.Error{Op: op, Err: err}
		}
		t.step(stepFaults, plan.StateDone, fmt.Sprintf("faults: %s (before: %s)", orNone(spec.Faults), orNone(info.Faults)))
	}
	if x := (sandboxapi.HollowTimes{Boot: spec.Boot, Join: spec.Join, Drain: spec.Drain}); x != (sandboxapi.HollowTimes{}) {
		if err := c.SetHollowTimes(ctx, x); err != nil {
			return &plan.Error{Op: op, Err: err}
		}
	}
	for _, g := range info.Groups {
		n := spec.Workers
		if g.Role == cloud.ControlPlane {
			n = spec.ControlPlanes
		}
		if n == 0 || max(n, 0) == g.Count {
			continue
		}
		t.step(stepMachines, plan.StateDone, fmt.Sprintf("group %s goes from %d hollow machines to %d", g.Name, g.Count, max(n, 0)))
		if err := c.SetGroupCount(ctx, g.ID, max(n, 0)); err != nil {
			return &plan.Error{Op: op, Err: err}
		}
	}
	if err := s.changeState(st, spec); err != nil {
		return &plan.Error{Op: op, Err: err}
	}
	return nil
}

// statusHollow is Status for a hollow sandbox. out already has the fields that come from the state.
func (s *Sandboxes) statusHollow(ctx context.Context, st *state, out engine.SandboxStatus) (engine.SandboxStatus, error) {
	out.Hollow, out.NodeCIDR, out.PodCIDR, out.InClusterEndpoint = true, hollowNodes, podCIDR.String(), "127.0.0.1"
	out.InitEndpoint = out.ClusterEndpoint // there is no init
	// Without firmware there are no measurements.
	out.Measurements = map[uint32]string{4: strings.Repeat("0", 64), 9: strings.Repeat("0", 64), 11: strings.Repeat("0", 64)}
	out.ControlPlanes, out.Workers = st.group(sandboxapi.ControlPlaneGroup).Count, st.group(sandboxapi.WorkerGroup).Count
	info, err := sandboxapi.NewClient("unix:"+out.Socket, "").Sandbox(ctx)
	if ctx.Err() != nil {
		return out, &plan.Error{Op: "look at sandbox " + st.Name, Err: context.Cause(ctx)}
	}
	if err != nil {
		return out, nil // everything else ended with the daemon
	}
	out.State, out.KubernetesVersions, out.Faults = "running", info.KubernetesVersions, info.Faults
	out.ClusterEndpoint, out.InitEndpoint = info.KubernetesEndpoint, info.KubernetesEndpoint
	if info.Hollow != nil && info.Hollow.Doing != "" {
		out.State = "starting"
	}
	for _, m := range info.Machines {
		out.Machines = append(out.Machines, describeMachine(m))
	}
	return out, nil
}

// removeHollow ends the daemon of a hollow sandbox, and with it everything else.
func (s *Sandboxes) removeHollow(ctx context.Context, name string, t *teller) error {
	p, pidErr := readProcess(s.dirs.of(name, pidName))
	if err := sandboxapi.NewClient("unix:"+s.dirs.of(name, socketName), "").Shutdown(ctx, true); err != nil && ctx.Err() == nil && !errors.Is(err, cloud.ErrUnavailable) {
		t.warn(stepRemove, err.Error())
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if pidErr != nil {
		return nil
	}
	return p.end(ctx, 2*serveGrace)
}

// serveHollow is Serve for a hollow sandbox.
func serveHollow(ctx context.Context, dirs Dirs, st *state, log *slog.Logger, simulate func(context.Context, Hollow, *slog.Logger) error) error {
	h, err := dirs.hollow(st)
	if err != nil {
		return err
	}
	if p, err := readProcess(dirs.of(st.Name, pidName)); err == nil && p.alive() {
		return fmt.Errorf("process %d serves it: %w", p.pid, machine.ErrBusy)
	}
	if err := self().write(dirs.of(st.Name, pidName)); err != nil {
		return err
	}
	defer os.Remove(dirs.of(st.Name, pidName))
	return simulate(ctx, h, log)
}
