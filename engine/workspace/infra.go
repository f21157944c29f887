package workspace

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"

	"constellation/engine/cloud/providers"
	"constellation/engine/cloud/section"
	"constellation/engine/plan"
)

// InfraFile has the UID and the init secret of machines that `infra create` makes, until all objects exist and the
// state file has them. 0600.
const InfraFile = "constellation-infra.yaml"

// uidSize is the number of bytes of a UID that is part of the names of objects.
const uidSize = 4

// NewInfra returns the beginning of a state of machines that will be made, with a UID and an init secret of its own.
// It writes nothing. The error has ExitUsage if the workspace has files of another cluster.
func (w *Workspace) NewInfra(c *Config, values section.Values) (*State, error) {
	if err := w.checkLeftovers("cluster " + c.Name); err != nil {
		return nil, err
	}
	random := make([]byte, uidSize+32)
	if _, err := rand.Read(random); err != nil {
		return nil, fmt.Errorf("make the init secret: %w", err)
	}
	uid := hex.EncodeToString(random[:uidSize])
	values["uid"] = uid
	return &State{Version: StateVersion, Infrastructure: Infrastructure{
		UID: uid, Name: c.Name, Provider: c.Provider.Name, InitSecret: random[uidSize:], Section: values,
	}}, nil
}

// Infra returns the state of machines that this program makes or has made, and whether they are complete. The error
// wraps ErrAbsent if it has begun none.
func (w *Workspace) Infra() (s *State, complete bool, err error) {
	switch s, err := w.State(); {
	case err == nil:
		return s, true, nil
	case !errors.Is(err, ErrAbsent):
		return nil, false, err
	}
	b, err := w.read(InfraFile)
	if errors.Is(err, ErrAbsent) {
		return nil, false, &plan.Error{Op: "read state", Err: absentFile{StateFile, w.root}, Exit: plan.ExitUsage, Remedy: "run `constellation infra create`"}
	}
	if err != nil {
		return nil, false, err
	}
	if s, err = parseState(b, InfraFile, true); err != nil {
		return nil, false, &plan.Error{Err: err, Exit: plan.ExitUsage, Remedy: "restore the file from a backup: the objects at the cloud are found by the UID in it"}
	}
	return s, false, nil
}

// BeginInfra writes the beginning of a state, before anything is made.
func (w *Workspace) BeginInfra(s *State) error {
	b, err := s.marshal()
	if err != nil {
		return fmt.Errorf("write %s: %w", InfraFile, err)
	}
	return w.Write(InfraFile, b, 0o600)
}

// CompleteInfra writes the state of machines behind a load balancer, and removes InfraFile. What init has added stays.
func (w *Workspace) CompleteInfra(s *State) error {
	if err := w.WriteState(s); err != nil {
		return err
	}
	return w.remove(InfraFile)
}

// ForgetInfra removes the state of machines that do not exist any more.
func (w *Workspace) ForgetInfra() error {
	return errors.Join(w.remove(StateFile), w.remove(InfraFile))
}

// WithBalancer returns the state with the addresses of machines behind a load balancer.
func (s *State) WithBalancer(host string, api, initial int, c *Config, nodes Infrastructure) *State {
	out := *s
	i := &out.Infrastructure
	i.ClusterEndpoint, i.InitEndpoint, i.InClusterEndpoint = net.JoinHostPort(host, strconv.Itoa(api)), net.JoinHostPort(host, strconv.Itoa(initial)), host
	i.APIServerCertSANs, i.NodeCIDR, i.PodCIDR, i.Section = []string{host}, nodes.NodeCIDR, c.PodCIDR, nodes.Section
	return &out
}

// SameInfra reports whether two states describe the same machines.
func (s *State) SameInfra(t *State) bool {
	a, errA := s.marshal()
	b, errB := t.marshal()
	return errA == nil && errB == nil && string(a) == string(b)
}

// Emulated reports whether the machines of the state are those of an emulator: nothing else may make or delete them.
func (s *State) Emulated() bool {
	p, ok := providers.Named(s.Infrastructure.Provider)
	if !ok || p.Emulator == nil {
		return false
	}
	_, ok = p.Emulator(s.Infrastructure.Section)
	return ok
}

// UnfilledConfig reads the configuration. Measurements and trust roots may still be placeholders: no machine needs
// them to be made.
func (w *Workspace) UnfilledConfig() (*Config, error) {
	b, err := w.ReadConfig()
	if err != nil {
		return nil, err
	}
	r, c := readConfig(b)
	if p := placeholdersOf((&reader{}).document(b)); p.any() {
		r.errs = slices.DeleteFunc(r.errs, func(e FieldError) bool { return p.holds(e.Field) })
	}
	if err := r.err(ConfigFile); err != nil {
		return nil, &plan.Error{Err: err, Exit: plan.ExitUsage, Remedy: "correct the file; `constellation config validate` checks it again"}
	}
	return c, nil
}
