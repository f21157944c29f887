package sandbox

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"constellation/engine/cloud"
	"constellation/engine/cloud/sandboxapi"
	"constellation/engine/release"
	"constellation/engine/sandbox/machine"
	"constellation/engine/sandbox/simulated"
)

// stateSchema is raised when a daemon can no longer read the state of an older one.
const stateSchema = 1

// state is all that a daemon needs to continue after another one stopped. It is
// stored in the sandbox's directory, readable by its owner alone, since it holds
// the token of the control API.
type state struct {
	Schema    int       `json:"schema"`
	Name      string    `json:"name"`
	UID       string    `json:"uid"`
	Workspace string    `json:"workspace"`
	Created   time.Time `json:"created"`

	// Simulated marks a sandbox of package simulated, whose machines have the addresses
	// Nodes. Otherwise machines are real, with the addresses of package machine.
	Simulated bool         `json:"simulated,omitempty"`
	Nodes     netip.Prefix `json:"nodes,omitzero"`

	// Cloud is the name of the provider that the sandbox emulates; empty: it is a cloud of its own.
	Cloud string `json:"cloud,omitempty"`

	// Release, Kubernetes and Image (its version) are what the sandbox was made for.
	Release    string `json:"release"`
	Kubernetes string `json:"kubernetes"`
	Image      string `json:"image"`

	Token string `json:"token"`
	// InitSecretSHA256 is in hex. The secret itself is in a separate file.
	InitSecretSHA256 string `json:"initSecretSHA256"`
	// Ports on the host's loopback; zero until chosen.
	KubernetesPort uint16 `json:"kubernetesPort"`
	InitPort       uint16 `json:"initPort"`

	// RegistryPort is the loopback port of the only registry of machines; zero: the sandbox's own.
	RegistryPort uint16 `json:"registryPort,omitempty"`

	// releaseKey is set while a sandbox is created. A sandbox compiles its own Kubernetes, so it
	// acts as a release builder. Its images hold the public key.
	releaseKey *release.PrivateKey

	Groups    []group     `json:"groups"`
	Instances []*instance `json:"instances"`
	// Tokens maps every name that CreateInstance was called with, as "<group>/<name>", to the
	// machine that it created, even after the machine's deletion.
	Tokens map[string]string `json:"tokens"`
	// NextIndex is the index in the addresses of the next machine.
	NextIndex int `json:"nextIndex"`
	// InitMachine is the machine behind the init port.
	InitMachine string   `json:"initMachine"`
	Faults      []string `json:"faults"`
	// CloudFaults are those of the emulated cloud.
	CloudFaults []string `json:"cloudFaults,omitempty"`
	// Struck lists the one-shot faults that were already injected.
	Struck []string `json:"struck"`

	Catalogue []machine.Image `json:"catalogue"`
	// Hollow is nil for real machines. Instances and tokens of hollow ones are not stored:
	// they end with the daemon.
	Hollow *hollowState `json:"hollow,omitempty"`

	// Containers are the images of our own services: reference → file.
	Containers map[string]string `json:"containers"`
}

type group struct {
	Name  string     `json:"name"`
	Role  cloud.Role `json:"role"`
	Image string     `json:"image"` // version
	Count int        `json:"count"`
	Next  int        `json:"next"` // number of the next machine; numbers are never reused
}

// want is the desired state of an instance.
type want string

const (
	wantRunning want = "running"
	wantStopped want = "stopped"
	wantDeleted want = "deleted"
)

type instance struct {
	Name    string          `json:"name"`
	Group   string          `json:"group"`
	Role    cloud.Role      `json:"role"`
	Image   string          `json:"image"` // version
	Index   int             `json:"index"`
	Want    want            `json:"want"`
	Boot    sandboxapi.Boot `json:"boot"`
	Message string          `json:"message"`
	Created time.Time       `json:"created"`
	Started time.Time       `json:"started"`
	Token   string          `json:"token,omitempty"` // of the call that created it, if any
	ID      string          `json:"id,omitempty"`    // in the emulated cloud
	// Nodes is the address range of its sandbox, if that is not package machine's.
	Nodes netip.Prefix `json:"nodes,omitzero"`
}

// Addresses of machines: 10.42.0.<index>, or 127.a.b.<index> of simulated ones, and
// 10.244.<index>.0/24. Index 1 is the gateway.
const firstIndex, lastIndex = 2, 254

var podCIDR = netip.MustParsePrefix("10.244.0.0/16")

func (i *instance) ip() netip.Addr {
	nodes := i.Nodes
	if !nodes.IsValid() {
		nodes = machine.Nodes
	}
	a := nodes.Addr().As4()
	a[3] = byte(i.Index)
	return netip.AddrFrom4(a)
}

// nodes is the address range of the sandbox's machines.
func (s *state) nodes() netip.Prefix {
	if s.Nodes.IsValid() {
		return s.Nodes
	}
	return machine.Nodes
}

// gateway is the address of the cloud, and of the load balancer, in the sandbox's network.
func (s *state) gateway() netip.Addr {
	if s.Simulated {
		return simulated.Gateway(s.Nodes)
	}
	return machine.Gateway
}

func (i *instance) podCIDR() netip.Prefix {
	a := podCIDR.Addr().As4()
	a[2] = byte(i.Index)
	return netip.PrefixFrom(netip.AddrFrom4(a), 24)
}

// newState returns the state of a sandbox that has no machines yet.
func newState(name, workspace string, now time.Time) *state {
	return &state{
		Schema: stateSchema, Name: name, Workspace: workspace, Created: now.UTC(), NextIndex: firstIndex,
		Tokens: map[string]string{}, Containers: map[string]string{},
		Groups: []group{
			{Name: sandboxapi.ControlPlaneGroup, Role: cloud.ControlPlane},
			{Name: sandboxapi.WorkerGroup, Role: cloud.Worker},
		},
	}
}

// buildReleases makes the sandbox a release builder with its own key.
func (s *state) buildReleases() (err error) {
	s.releaseKey, err = release.NewPrivateKey("sandbox-" + s.Name)
	return err
}

func (s *state) clone() *state {
	b, err := json.Marshal(s)
	if err != nil {
		panic(fmt.Sprintf("marshal sandbox state: %v", err)) // plain data
	}
	var c state
	if err := json.Unmarshal(b, &c); err != nil {
		panic(fmt.Sprintf("unmarshal sandbox state: %v", err))
	}
	return &c
}

func (s *state) group(name string) *group {
	for i := range s.Groups {
		if s.Groups[i].Name == name {
			return &s.Groups[i]
		}
	}
	return nil
}

func (s *state) instance(name string) *instance {
	for _, i := range s.Instances {
		if i.Name == name {
			return i
		}
	}
	return nil
}

// image returns the catalogue's entry for a version.
func (s *state) image(version string) (machine.Image, bool) {
	for _, i := range s.Catalogue {
		if i.Version == version {
			return i, true
		}
	}
	return machine.Image{}, false
}

// freeIndex returns an unused address index. Recently used ones come last, so that a
// client of a deleted machine does not reach another one.
func (s *state) freeIndex() (int, bool) {
	used := map[int]bool{}
	for _, i := range s.Instances {
		used[i.Index] = true
	}
	for range lastIndex - firstIndex + 1 {
		i := s.NextIndex
		if s.NextIndex++; s.NextIndex > lastIndex {
			s.NextIndex = firstIndex
		}
		if !used[i] {
			return i, true
		}
	}
	return 0, false
}

// errForeignState means that a state file is of another version of this program.
var errForeignState = errors.New("written by another version of this program")

// readState reads a state file. The error may wrap fs.ErrNotExist or
// errForeignState.
func readState(file string) (*state, error) {
	b, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("read sandbox state: %w", err)
	}
	var s state
	if err := json.Unmarshal(b, &s); err != nil {
		return nil, fmt.Errorf("read sandbox state %s: %w", file, err)
	}
	if s.Schema != stateSchema {
		return nil, fmt.Errorf("read sandbox state %s: %w (schema %d, not %d)", file, errForeignState, s.Schema, stateSchema)
	}
	if s.Tokens == nil {
		s.Tokens = map[string]string{}
	}
	if s.Containers == nil {
		s.Containers = map[string]string{}
	}
	return &s, nil
}

func (s *state) write(file string) error {
	b, err := json.MarshalIndent(s, "", "  ")
	if err != nil {
		return fmt.Errorf("write sandbox state: %w", err)
	}
	if err := writeFile(file, append(b, '\n'), 0o600); err != nil {
		return fmt.Errorf("write sandbox state: %w", err)
	}
	return nil
}

// writeFile replaces a file atomically: a reader, or the next start after a crash,
// sees the old content or the new.
func writeFile(file string, b []byte, mode fs.FileMode) (err error) {
	dir := filepath.Dir(file)
	f, err := os.CreateTemp(dir, "."+filepath.Base(file)+".*")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			f.Close()
			os.Remove(f.Name())
		}
	}()
	if err := f.Chmod(mode); err != nil {
		return err
	}
	if _, err := f.Write(b); err != nil {
		return err
	}
	if err := f.Sync(); err != nil {
		return err
	}
	if err := f.Close(); err != nil {
		return err
	}
	if err := os.Rename(f.Name(), file); err != nil {
		return err
	}
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	return d.Sync()
}
