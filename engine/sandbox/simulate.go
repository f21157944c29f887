package sandbox

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"time"

	"constellation/engine"
	"constellation/engine/attestation"
	"constellation/engine/plan"
	"constellation/engine/release"
	"constellation/engine/sandbox/build"
	"constellation/engine/sandbox/simulated"
)

// simulate creates the files of a new sandbox of simulated machines. why is the reason for not
// using real ones; empty if the user requested simulated ones.
func (s *Sandboxes) simulate(ctx context.Context, spec engine.SandboxSpec, cat *release.Catalogue, why string, t *teller) (err error) {
	op := "start sandbox " + spec.Name
	st := newState(spec.Name, spec.Workspace, time.Now())
	st.Simulated, st.Nodes = true, simulated.Nodes(spec.Name)
	if err := simulated.Check(st.Nodes); err != nil {
		t.step(stepCheck, plan.StateFailed, err.Error())
		return &plan.Error{Op: op, Err: err, Exit: plan.ExitBlocked}
	}
	faults, err := ParseFaults(spec.Faults)
	if err == nil {
		err = faults.Simulated()
	}
	if err != nil {
		t.step(stepCheck, plan.StateFailed, err.Error())
		return usage(op, "leave it out, or try it on real machines", "%w", err)
	}
	artifacts, err := build.Load(s.dirs.Cache, spec.Kubernetes)
	if err != nil {
		err = fromBuild(op, err)
		t.step(stepCheck, plan.StateFailed, err.Error())
		return err
	}
	text := "machines are simulated"
	if why != "" {
		text += ": " + why
	}
	t.warn(stepCheck, text)
	t.step(stepCheck, plan.StateDone, "it can run simulated machines")

	t.step(stepImages, plan.StateRunning, "Prepare images")
	st.Release, st.Kubernetes, st.Image, st.Faults = spec.Release, artifacts.Version, spec.Image, spec.Faults
	st.Cloud = emulatedCloud(spec)
	if err := s.clear(ctx, st.Name); err != nil {
		return &plan.Error{Op: op, Err: err}
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.dirs.remove(st.Name))
		}
	}()
	if err := s.simulatedImages(st, cat, t); err != nil {
		t.step(stepImages, plan.StateFailed, err.Error())
		return err
	}
	for i := range st.Groups {
		st.Groups[i].Image = st.Image
	}
	t.step(stepImages, plan.StateDone, fmt.Sprintf("%d OS images (simulated) and %d of our services", len(st.Catalogue), len(st.Containers)))
	if err := s.writeNew(ctx, st); err != nil {
		return &plan.Error{Op: op, Err: err}
	}
	return nil
}

// simulatedImages makes the catalogue: OS image and services of each release whose programs
// exist.
func (s *Sandboxes) simulatedImages(st *state, cat *release.Catalogue, t *teller) error {
	op := "prepare images"
	dir := s.dirs.of(st.Name)
	if err := st.buildReleases(); err != nil {
		return &plan.Error{Op: op, Err: err}
	}
	peers := []attestation.Measurements{}
	for _, rel := range cat.Releases() { // the oldest first
		v := rel.Version.String()
		programs := map[string]string{}
		var missing error
		for _, name := range []string{"bootstrapper", "agent", "joinservice", "operator"} {
			var err error
			if programs[name], err = build.ReleaseBinary(v, name); err != nil {
				missing = err
			}
		}
		if missing != nil {
			if v == st.Release || v == st.Image || !errors.Is(missing, fs.ErrNotExist) {
				return fromBuild(op, missing)
			}
			t.warn(stepImages, fmt.Sprintf("release %s is not offered: %v", v, missing))
			continue
		}
		for _, name := range []string{"agent", "joinservice", "operator"} {
			file, err := simulated.Service(dir, name, v, programs[name])
			if err != nil {
				return &plan.Error{Op: op, Err: err}
			}
			st.Containers[build.ServiceReference(name, v)] = file
			if name != "agent" { // the OS image has it, too
				delete(programs, name)
			}
		}
		known, err := json.Marshal(peers)
		if err != nil {
			return &plan.Error{Op: op, Err: err}
		}
		img, err := simulated.Image(dir, v, programs, known, st.releaseKey.PEM())
		if err != nil {
			return &plan.Error{Op: op, Err: err}
		}
		st.Catalogue = append(st.Catalogue, img)
		peers = append(peers, attestation.Enforced(predict(img)))
	}
	return imageThere(op, st)
}
