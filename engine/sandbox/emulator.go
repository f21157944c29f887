package sandbox

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"

	"constellation/engine"
	"constellation/engine/attestation"
	"constellation/engine/cloud"
	"constellation/engine/cloud/cloudtest/wire"
	"constellation/engine/cloud/providers"
	"constellation/engine/cloud/sandboxapi"
)

// emulator is the cloud of a vendor in front of the machines of a sandbox. Its groups own the machines: the sandbox
// creates and deletes none by itself.
type emulator struct {
	provider providers.Provider
	// api serves the vendor's API, below apiPath.
	api     http.Handler
	apiPath string
	// metadata returns the metadata server of a machine, or of the owner's computer if name is empty. It serves
	// metadataPath.
	metadata     func(name string) http.Handler
	metadataPath string
	// unavailable is what a metadata server serves that fails.
	unavailable http.Handler
	// setFaults replaces the faults of the cloud.
	setFaults func(spec []string) error
	// resize sets the size of a group of the sandbox.
	resize func(group string, n int) error
	// boot is what firmware of the vendor measures first.
	boot []attestation.MeasuredEvent
	// provision has the TPM at an address make the attestation key of a machine, and certifies it as the vendor does. id is
	// that of the machine in the vendor's API.
	provision func(ctx context.Context, tpm, machine, id string) error
	// calls counts the calls by method. problems counts requests and answers that the vendor's API does not have.
	calls    func() map[string]int
	problems atomic.Int64
}

// emulators open the emulators by the names of their providers.
var emulators = map[string]func(d *daemon, st *state, e *emulator) error{"gcp": emulateGCP}

// emulate opens the emulator of a sandbox; nil: it is a cloud of its own.
func (d *daemon) emulate(st *state) (*emulator, error) {
	if st.Cloud == "" {
		return nil, nil
	}
	open := emulators[st.Cloud]
	p, ok := providers.Named(st.Cloud)
	if open == nil || !ok {
		return nil, fmt.Errorf("this program cannot emulate cloud %q", st.Cloud)
	}
	e := &emulator{}
	_, section := p.Sandbox(providers.SandboxOf{Name: st.Name, UID: st.UID, Socket: d.dirs.of(st.Name, socketName), Simulated: st.Simulated})
	e.provider = p.At(section)
	if err := open(d, st, e); err != nil {
		return nil, fmt.Errorf("emulate cloud %s: %w", st.Cloud, err)
	}
	return e, nil
}

// problem records a request or an answer that the vendor's API does not have.
func (e *emulator) problem(d *daemon) func(string) {
	return func(text string) {
		d.log.Warn("call outside the schema of the emulated cloud", "cloud", e.provider.Name, "problem", text, "problems", e.problems.Add(1))
	}
}

// host adds the vendor's API and the metadata server of the owner to the API on the owner's socket.
func (e *emulator) host(next http.Handler) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("/", next)
	mux.Handle(e.apiPath, e.api)
	mux.Handle(e.metadataPath, e.metadata(""))
	return mux
}

// machineMetadata serves each machine its metadata of the emulated cloud.
func (a *api) machineMetadata(e *emulator) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		self, err := a.caller(r)
		if err != nil {
			a.refuse(w, err)
			return
		}
		a.fleet.pass(self.IP, pointMetadata)
		if flt := a.fleet.Faults(); strikes(flt.metadataFail) || flt.NeverJoins(self.Name) {
			e.unavailable.ServeHTTP(w, r)
			return
		}
		e.metadata(self.Name).ServeHTTP(w, r)
	})
}

// emulatedFleet is the fleet whose machines the groups of an emulator own, for the API on the owner's socket.
type emulatedFleet struct {
	*fleet
	emulator *emulator
}

// errOwned means that only the emulated cloud changes machines.
var errOwned = fmt.Errorf("%w: the groups of the emulated cloud own the machines", ErrConflict)

// SetCount implements Fleet.
func (f emulatedFleet) SetCount(ctx context.Context, group string, n int) error {
	if err := f.fits(ctx, group, n); err != nil {
		return err
	}
	return f.emulator.resize(group, n)
}

// SetImage implements Fleet.
func (emulatedFleet) SetImage(string, string) error { return errOwned }

// Create implements Fleet.
func (emulatedFleet) Create(context.Context, string, []string) ([]cloud.Instance, error) {
	return nil, errOwned
}

// Remove implements Fleet.
func (emulatedFleet) Remove(...string) error { return errOwned }

// SetFaults implements Fleet.
func (f emulatedFleet) SetFaults(spec []string) error {
	ofCloud, ofMachines, err := divideFaults(f.emulator.provider.Name, spec)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrConflict, err)
	}
	return f.replaceFaults(ofMachines, ofCloud, f.emulator.setFaults)
}

// vendorFaults are the faults of an emulated cloud.
type vendorFaults struct {
	kinds []engine.FaultKind
	check func(spec []string) error
}

// has reports whether the cloud has a fault, with or without a value.
func (v vendorFaults) has(spec string) bool {
	name, _, _ := strings.Cut(spec, "=")
	return slices.ContainsFunc(v.kinds, func(k engine.FaultKind) bool { return k.Name == name })
}

// emulatedFaults are the faults of emulated clouds, by the names of their providers.
var emulatedFaults = map[string]vendorFaults{"gcp": gcpFaults()}

// ofOwnCloud are the faults of the API of a sandbox that is a cloud of its own.
var ofOwnCloud = []string{"api-429", "api-500", "api-latency", "describe-lag", "create-timeout", "quota", "partial-list", "partial-list-told", "lost-delete"}

// divideFaults divides faults into those of the emulated cloud, which are valid, and those of its machines. Without an emulated cloud,
// all are of machines.
func divideFaults(cloud string, spec []string) (ofCloud, ofMachines []string, err error) {
	vendor, emulated := emulatedFaults[cloud]
	if !emulated {
		return nil, spec, nil
	}
	var wrong []string
	for _, s := range spec {
		name, _, _ := strings.Cut(s, "=")
		switch {
		case vendor.has(s):
			ofCloud = append(ofCloud, s)
		case slices.Contains(ofOwnCloud, name):
			wrong = append(wrong, s)
		default:
			ofMachines = append(ofMachines, s)
		}
	}
	if len(wrong) > 0 {
		err = fmt.Errorf("cloud %s cannot have %s: only the sandbox's own cloud can", cloud, strings.Join(wrong, ", "))
	}
	return ofCloud, ofMachines, errors.Join(err, vendor.check(ofCloud))
}

// machinesOf returns an error if a fault of an emulated cloud names none of these machines.
func (v vendorFaults) machinesOf(ofCloud, machines []string) error {
	var errs []error
	for _, s := range ofCloud {
		name, value, _ := strings.Cut(s, "=")
		i := slices.IndexFunc(v.kinds, func(k engine.FaultKind) bool { return k.Name == name })
		machine, _, _ := strings.Cut(value, ":")
		if form := strings.TrimPrefix(v.kinds[i].Form, name+"="); (form == "MACHINE" || strings.HasPrefix(form, "MACHINE:")) && !slices.Contains(machines, machine) {
			errs = append(errs, fmt.Errorf("fault %s: there is no such machine", s))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("%w; the machines are %s", err, strings.Join(machines, ", "))
	}
	return nil
}

// placed are the machines of a fleet as those of an emulated cloud. It implements wire.Fleet.
type placed struct {
	*fleet
	// image returns the version of the image of a reference; empty: there is none.
	image func(reference string) string
}

// Start implements wire.Fleet.
func (p placed) Start(m wire.Machine) (place wire.Place, err error) {
	if err := p.check(p.ctx, m.Role, 1); err != nil {
		return place, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ending {
		return place, errors.New("the sandbox shuts down")
	}
	err = p.update(func(s *state) error {
		g := s.group(m.Group)
		if g == nil {
			return fmt.Errorf("group %s: %w", m.Group, errNoSuch)
		}
		if s.instance(m.Name) != nil {
			return fmt.Errorf("%w: there is a machine %s", ErrConflict, m.Name)
		}
		version := p.image(m.Image)
		if _, ok := s.image(version); !ok {
			return fmt.Errorf("image %s: %w", m.Image, errNoSuch)
		}
		i, err := s.add(g)
		if err != nil {
			return err
		}
		i.Name, i.Image, i.Token, i.ID = m.Name, version, m.Token, m.ID
		g.Image = version
		g.Count++
		place = wire.Place{IP: i.ip(), Pods: i.podCIDR()}
		return nil
	})
	if err == nil {
		p.rouse(m.Name)
	}
	return place, err
}

// of returns the machine of an ID of the emulated cloud.
func (p placed) of(id string) *instance {
	s, _ := p.snapshot()
	if n := slices.IndexFunc(s.Instances, func(i *instance) bool { return i.ID == id }); n >= 0 {
		return s.Instances[n]
	}
	return nil
}

// Stop implements wire.Fleet.
func (p placed) Stop(id string) {
	i := p.of(id)
	if i == nil {
		return
	}
	if err := p.Remove(i.Name); err != nil {
		p.log.Warn("machine not deleted", "node", i.Name, "err", err)
	}
}

// State implements wire.Fleet.
func (p placed) State(id string) cloud.State {
	if i := p.of(id); i != nil {
		return p.describe(i).State
	}
	return cloud.Terminated
}

// about returns the emulator for the description of a sandbox; nil: there is none.
func (e *emulator) about() *sandboxapi.Emulator {
	if e == nil {
		return nil
	}
	return &sandboxapi.Emulator{Cloud: e.provider.Name, Calls: e.calls(), Problems: int(e.problems.Load())}
}
