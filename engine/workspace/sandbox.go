package workspace

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"errors"
	"fmt"
	"net/netip"
	"strings"

	"constellation/engine/cloud/providers"
	"constellation/engine/cloud/section"
	"constellation/engine/plan"
)

// SandboxInfo is what a workspace must know about its sandbox.
type SandboxInfo struct {
	Name string `json:"name"`
	// Cloud is the name of the provider that the sandbox emulates; empty: it is a cloud of its own.
	Cloud string `json:"cloud,omitempty"`
	// Hollow says that its machines are simulated, and that its cluster is there.
	Hollow     bool   `json:"hollow,omitempty"`
	UID        string `json:"uid"`
	Release    string `json:"release"`
	Kubernetes string `json:"kubernetes"`
	// Image is the version of the OS image, Measurements its expected registers:
	// PCR index to 64 hex digits.
	Image        string            `json:"image"`
	Measurements map[uint32]string `json:"measurements"`
	// TrustRoots are PEM certificates: the roots of attestation keys.
	TrustRoots string `json:"trustRoots"`
	// ClusterEndpoint and InitEndpoint are host:port on this computer;
	// InClusterEndpoint is the load balancer as machines see it.
	ClusterEndpoint   string `json:"clusterEndpoint"`
	InitEndpoint      string `json:"initEndpoint"`
	InClusterEndpoint string `json:"inClusterEndpoint"`
	NodeCIDR          string `json:"nodeCIDR"`
	PodCIDR           string `json:"podCIDR"`
	ServiceCIDR       string `json:"serviceCIDR"`
	ControlPlanes     int    `json:"controlPlanes"`
	Workers           int    `json:"workers"`
	// Socket is the path of the control API.
	Socket string `json:"socket"`
	// Simulated says that its machines are processes that only do as machines would.
	Simulated bool `json:"simulated,omitempty"`
	// InitSecret proves that the caller owns the machines. It goes into the state
	// file and nowhere else.
	InitSecret []byte `json:"-"`
	// Kubeconfig leads to the cluster, where that comes with the sandbox.
	Kubeconfig []byte `json:"-"`
}

// Provider is the name of the provider that the information is of.
func (i SandboxInfo) Provider() string { return cmp.Or(i.Cloud, providers.Local) }

// config returns the provider's section of a configuration.
func (i SandboxInfo) config() section.Values {
	c, _ := i.sections()
	return c
}

// state returns the provider's section of a state.
func (i SandboxInfo) state() section.Values {
	_, s := i.sections()
	return s
}

func (i SandboxInfo) sections() (config, state section.Values) {
	return providers.SandboxSections(i.Provider(), providers.SandboxOf{Name: i.Name, UID: i.UID, Socket: i.Socket, Hollow: i.Hollow, Simulated: i.Simulated})
}

// Has reports whether a state is of machines of the sandbox, or of an earlier one of its name.
func (i SandboxInfo) Has(s *State) bool {
	have := s.Infrastructure
	p, ok := providers.Named(have.Provider)
	return ok && have.Provider == i.Provider() && section.Differs(p.State, p.State, have.Section, i.state()) == ""
}

// hollowNote is the comment above the attestation of hollow machines.
const hollowNote = "The machines of this cluster are hollow: simulated, so they prove nothing, and what\n    # follows is never asked for."

// clusterName names the cluster in a sandbox. That of hollow machines says so, wherever
// it is shown.
func (i SandboxInfo) clusterName() string {
	if !i.Hollow || strings.Contains(i.Name, "hollow") {
		return i.Name
	}
	name := "hollow-" + i.Name
	return strings.TrimRight(name[:min(len(name), 37)], "-")
}

// AdoptSandbox writes constellation-conf.yaml and constellation-state.yaml for a
// sandbox where they are absent, and constellation-admin.conf if its cluster comes with it,
// and returns the names of what it wrote or changed.
//
// Files that belong to something else are never touched: a state file of another
// sandbox, or of an earlier one of this name, is an error with ExitUsage that says
// what to do. Addresses that changed because the sandbox was started again are
// brought up to date.
func (w *Workspace) AdoptSandbox(i SandboxInfo) (written []string, err error) {
	switch s, err := w.State(); {
	case err == nil:
		if err := w.sameSandbox(s, i); err != nil {
			return nil, err
		}
		if len(i.InitSecret) == 0 {
			i.InitSecret = s.Infrastructure.InitSecret
		}
		fresh, err := newState(i)
		if err != nil {
			return nil, fmt.Errorf("write %s: %w", StateFile, err)
		}
		fresh.ClusterValues = s.ClusterValues
		before, _ := s.marshal()
		after, err := fresh.marshal()
		if err != nil {
			return nil, fmt.Errorf("write %s: %w", StateFile, err)
		}
		if !bytes.Equal(before, after) {
			if err := w.Write(StateFile, after, 0o600); err != nil {
				return nil, err
			}
			written = append(written, StateFile)
		}
	case errors.Is(err, ErrAbsent):
		if err := w.checkLeftovers("sandbox " + i.Name); err != nil {
			return nil, err
		}
		s, err := newState(i)
		if err != nil {
			return nil, fmt.Errorf("write %s: %w", StateFile, err)
		}
		if err := w.WriteState(s); err != nil {
			return nil, err
		}
		written = append(written, StateFile)
	default:
		return nil, err
	}
	if !w.Has(ConfigFile) {
		b, err := GenerateConfig(i.Provider(), GenerateOptions{Sandbox: &i})
		if err != nil {
			return written, err
		}
		if _, err := w.WriteConfig(b); err != nil {
			return written, err
		}
		written = append(written, ConfigFile)
	}
	if len(i.Kubeconfig) > 0 {
		if have, err := w.Kubeconfig(); err != nil || !bytes.Equal(have, i.Kubeconfig) {
			if err := w.Write(KubeconfigFile, i.Kubeconfig, 0o600); err != nil {
				return written, err
			}
			written = append(written, KubeconfigFile)
		}
	}
	return written, nil
}

// checkLeftovers refuses files of a cluster that need a state file to belong to it.
func (w *Workspace) checkLeftovers(machines string) error {
	var names []string
	for _, f := range []string{KubeconfigFile, MasterSecretFile} {
		if w.Has(f) {
			names = append(names, f)
		}
	}
	if len(names) == 0 {
		return nil
	}
	return &plan.Error{
		Op: "write " + w.Path(StateFile), Err: fmt.Errorf("%s of another cluster would get mixed up with %s", strings.Join(names, " and "), machines),
		Exit: plan.ExitUsage, Remedy: "move these files to a safe place, or use another directory with -C",
	}
}

// sameSandbox returns an error unless s is the state of sandbox i.
func (w *Workspace) sameSandbox(s *State, i SandboxInfo) error {
	var why string
	switch have := s.Infrastructure; {
	case !i.Has(s):
		why = fmt.Sprintf("it belongs to %s %q", have.Provider, have.Name)
	case have.UID != i.UID:
		why = fmt.Sprintf("it belongs to an earlier sandbox %q, which was taken down", i.Name)
	default:
		return nil
	}
	return &plan.Error{
		Op: "use " + w.Path(StateFile), Err: errors.New(why), Exit: plan.ExitUsage,
		Remedy: fmt.Sprintf("move %s away, or use another directory with -C", strings.Join(w.ClusterFiles(), ", ")),
	}
}

// newState returns the state of a sandbox that has no cluster yet.
func newState(i SandboxInfo) (*State, error) {
	s := &State{Version: StateVersion, Infrastructure: Infrastructure{
		UID: i.UID, Name: i.clusterName(), Provider: i.Provider(),
		ClusterEndpoint: i.ClusterEndpoint, InitEndpoint: i.InitEndpoint, InClusterEndpoint: i.InClusterEndpoint,
		InitSecret: i.InitSecret,
		Section:    i.state(),
	}}
	var err error
	if s.Infrastructure.NodeCIDR, err = netip.ParsePrefix(i.NodeCIDR); err != nil {
		return nil, err
	}
	if s.Infrastructure.PodCIDR, err = netip.ParsePrefix(i.PodCIDR); err != nil {
		return nil, err
	}
	for _, e := range []string{i.ClusterEndpoint, i.InClusterEndpoint} {
		if h := hostOf(e); h != "" {
			s.Infrastructure.APIServerCertSANs = append(s.Infrastructure.APIServerCertSANs, h)
		}
	}
	if i.Hollow {
		// Its cluster comes with it, and was made with no master secret.
		sum := sha256.Sum256([]byte("hollow " + i.UID))
		s.ClusterValues = ClusterValues{ClusterID: sum[:], MeasurementSalt: sum[:]}
	}
	// What we write we must be able to read.
	b, err := s.marshal()
	if err != nil {
		return nil, err
	}
	return ParseState(b)
}
