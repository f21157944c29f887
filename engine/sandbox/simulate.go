package sandbox

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"time"

	"constellation/assets"
	"constellation/engine"
	"constellation/engine/attestation"
	"constellation/engine/plan"
	"constellation/engine/release"
	"constellation/engine/sandbox/build"
	"constellation/engine/sandbox/machine"
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
	if err = st.buildReleases(); err == nil {
		err = s.simulatedImages(st, cat, nil, t)
	}
	if err != nil {
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
// exist. Versions of keep stay as they are. st has a release key.
func (s *Sandboxes) simulatedImages(st *state, cat *release.Catalogue, keep map[string]machine.Image, t *teller) error {
	op := "prepare images"
	dir := s.dirs.of(st.Name)
	peers := []attestation.Measurements{}
	for _, rel := range cat.Releases() { // the oldest first
		v := rel.Version.String()
		if img, ok := keep[v]; ok {
			st.Catalogue = append(st.Catalogue, img)
			peers = append(peers, attestation.Enforced(predict(img)))
			continue
		}
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

// renewImages replaces the OS images and services that another build of this program left in a sandbox, so that its cluster can be
// upgraded to this build. It keeps images that a machine or a group has: a cloud does not change the image of an existing machine.
// It requires that no daemon serves the sandbox. Sandboxes of real machines and of emulated clouds stay as they are.
func (s *Sandboxes) renewImages(name string, t *teller) error {
	op := "renew images of sandbox " + name
	st, err := readState(s.dirs.of(name, stateName))
	if err != nil {
		return &plan.Error{Op: op, Err: err}
	}
	if !st.Simulated || st.Hollow != nil || st.Cloud != "" {
		return nil
	}
	cat, err := release.Load(assets.Releases())
	if err != nil {
		return &plan.Error{Op: op, Err: err}
	}
	next := st.clone()
	keyFile := s.dirs.of(st.Name, releaseKeyName)
	switch b, err := os.ReadFile(keyFile); {
	case err == nil:
		if next.releaseKey, err = release.ParsePrivateKey(releaseKeyName, b); err != nil {
			return &plan.Error{Op: op, Err: err}
		}
	case errors.Is(err, fs.ErrNotExist) && slices.ContainsFunc(st.Catalogue, trustsKeys):
		return nil // somebody took its key away, so nothing can be signed for its machines
	case errors.Is(err, fs.ErrNotExist): // the program that made it signed nothing
		err := next.buildReleases()
		var b []byte
		if err == nil {
			b, err = next.releaseKey.PrivatePEM()
		}
		if err == nil {
			err = writeFile(keyFile, b, 0o600)
		}
		if err != nil {
			return &plan.Error{Op: op, Err: err}
		}
	default:
		return &plan.Error{Op: op, Err: err}
	}
	keep := map[string]machine.Image{}
	for _, img := range st.Catalogue {
		_, err := build.ReleaseBinary(img.Version, "bootstrapper")
		if err != nil || st.uses(img.Version) {
			keep[img.Version] = img
		}
	}
	next.Catalogue = nil
	if err := s.simulatedImages(next, cat, keep, t); err != nil {
		return err
	}
	var renewed []string
	for _, img := range next.Catalogue {
		if old, ok := st.image(img.Version); !ok || !reflect.DeepEqual(old, img) {
			renewed = append(renewed, img.Version)
		}
	}
	if len(renewed) == 0 {
		return nil
	}
	if err := next.write(s.dirs.of(st.Name, stateName)); err != nil {
		return &plan.Error{Op: op, Err: err}
	}
	t.warn(stepImages, "images "+strings.Join(renewed, ", ")+" are of this program now: another build of it made the sandbox")
	return nil
}

// trustsKeys is whether machines of an image accept signed components alone.
func trustsKeys(img machine.Image) bool {
	_, err := os.Stat(filepath.Join(img.Dir, path.Base(release.MachineKeys)))
	return err == nil
}

// uses is whether a machine or group has an image, or new machines get it.
func (s *state) uses(image string) bool {
	return s.Image == image || slices.ContainsFunc(s.Groups, func(g group) bool { return g.Image == image }) ||
		slices.ContainsFunc(s.Instances, func(i *instance) bool { return i.Image == image })
}
