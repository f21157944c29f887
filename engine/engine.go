// Package engine decides what to do to a cluster and does it.
//
// It reads the workspace (configuration, state), observes the cloud and the cluster, makes
// a [Plan] of the result, runs the plan and reports progress as a stream of [Event]
// values. Everything a user sees comes from here; console, plain printer and JSON Lines
// only render it.
//
// The cluster is the only source of truth: the engine keeps no journal that decides anything. A
// run that ended half-way is resumed by planning again, and each step observes
// whether its effect is there already.
//
// The package knows neither a Kubernetes client nor Helm nor a terminal. What it
// needs from a cluster is [Cluster], implemented by engine/kube; what it needs from
// a cloud is [Provider]. It never writes a secret into an event, an error or a log.
package engine

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"time"

	"constellation/engine/check"
	"constellation/engine/plan"
	"constellation/engine/release"
	"constellation/engine/workspace"
)

// Sandbox is the cloud on this computer, as the verbs of the command line need it.
// Package sandbox implements it. Where a method takes the name of a sandbox, the
// absolute path of a workspace stands for the sandbox that was made for it.
type Sandbox interface {
	// Up starts the sandbox that spec describes, or finds it running, and returns
	// when its API answers; its machines may still be booting.
	Up(ctx context.Context, spec SandboxSpec, emit func(plan.Event)) (workspace.SandboxInfo, error)
	// Down removes the sandbox and all it left on this computer. Nothing to remove
	// is a success.
	Down(ctx context.Context, name string, emit func(plan.Event)) error
	// Status describes one sandbox. The error wraps cloud.ErrNotFound if there is none.
	Status(ctx context.Context, name string) (SandboxStatus, error)
	// Exec runs command in a machine, a login shell if there is none, and returns
	// its exit code.
	Exec(ctx context.Context, name, machine string, command []string, stdin io.Reader, stdout, stderr io.Writer, tty bool) (int, error)
	// Fetch builds the binaries and images of a Kubernetes version into the cache.
	Fetch(ctx context.Context, version string, emit func(plan.Event)) error
	// Power operates the power switches of machines, of all of them if none is named, and returns
	// when the machines that should run are ready.
	Power(ctx context.Context, name string, action PowerAction, machines []string, emit func(plan.Event)) error
	// SetFaults makes the faults of a running sandbox those of the list, and no others.
	SetFaults(ctx context.Context, name string, faults []string) error
	// FaultKinds lists the faults that a sandbox can have.
	FaultKinds() []FaultKind
}

// FaultKind is a fault that a sandbox can have.
type FaultKind struct {
	Name string `json:"name"`
	Form string `json:"form"` // how it is written, such as quota=MACHINES
	Does string `json:"does"` // a clause
}

// PowerAction is what can be done to a machine's switch.
type PowerAction string

// Actions on a machine's power switch.
const (
	PowerReboot PowerAction = "reboot"    // it shuts down in order, and is switched on
	PowerCut    PowerAction = "power-cut" // it is off at once, and switched on again
	PowerOff    PowerAction = "off"       // it is off at once, and stays off
	PowerOn     PowerAction = "on"
)

// SandboxSpec configures a sandbox. Zero fields take their defaults.
type SandboxSpec struct {
	// Name is a DNS label; the default is made from the workspace's directory.
	Name string
	// Workspace is the absolute path of the directory that the sandbox belongs to.
	Workspace     string
	ControlPlanes int    // default 1
	Workers       int    // default 2
	Kubernetes    string // such as v1.35.4
	Image         string // version of the OS image, such as v1.0.0
	Release       string // what init will deploy
	// Machines is real, which is the default, or hollow: simulated, on a control plane of
	// plain processes that is complete when Up returns. An existing sandbox keeps its kind.
	Machines string
	// Boot, Join and Drain are how long hollow machines take to boot, to join after that,
	// and to end a pod. Zero: 5 s, 1 s and 3 s, or what they take already.
	Boot, Join, Drain time.Duration
	// Install allows the missing packages of this computer to be installed.
	Install bool
	// Faults are the faults to inject into the cloud, such as "api-429=0.2" or
	// "boot-delay=worker-1:30s"; an error lists the existing ones.
	Faults []string
}

// SandboxStatus is a sandbox as it is now.
type SandboxStatus struct {
	workspace.SandboxInfo
	State   string    `json:"state"` // running, stopped (the daemon does not answer)
	Created time.Time `json:"created,omitzero"`
	// KubernetesVersions are those that its mirror serves.
	KubernetesVersions []string         `json:"kubernetesVersions,omitempty"`
	Faults             []string         `json:"faults,omitempty"`
	Machines           []SandboxMachine `json:"machines"`
}

// SandboxMachine is one machine of a sandbox.
type SandboxMachine struct {
	Name    string    `json:"name"`
	Group   string    `json:"group"`
	Role    string    `json:"role"`
	IP      string    `json:"ip"`
	Image   string    `json:"image"`
	Boot    string    `json:"boot"` // creating, booting, ready, stopped, failed
	Message string    `json:"message,omitempty"`
	Console string    `json:"console,omitempty"` // path of its console's log
	Started time.Time `json:"started,omitzero"`
}

// Deps are what an engine works with. Zero fields get defaults, except Connect and Inspect:
// without them, everything that needs a cluster is an error.
type Deps struct {
	// Connect returns the cluster that a kubeconfig leads to. It need not reach it.
	Connect func(ctx context.Context, kubeconfig []byte) (Cluster, error)
	// FindSandbox returns the sandbox called name. The error wraps cloud.ErrNotFound if there is
	// none. It may be nil.
	FindSandbox func(ctx context.Context, name string) (SandboxStatus, error)
	// Inspect returns what looks at the cluster that a kubeconfig leads to without changing
	// it. It need not reach it.
	Inspect func(ctx context.Context, kubeconfig []byte) (check.Inspector, error)
	// Backups returns what reads and restores backups of the cluster that a kubeconfig leads
	// to. It need not reach it.
	Backups func(ctx context.Context, kubeconfig []byte) (BackupCluster, error)
	// Releases opens the release data at a directory or an address, signed by one of keys, merged
	// with the program's own releases; without a location only the latter. The default is
	// OpenReleases.
	Releases func(ctx context.Context, location string, keys []release.Key) (release.Source, error)
	// Provider returns the cloud that the machines are in; the default is NewProvider.
	Provider func(ctx context.Context, c *workspace.Config, s *workspace.State) (Provider, error)
	// Buildable are the versions of Kubernetes that a sandbox can build; empty if
	// that is not known.
	Buildable []string
	// Log is for those who debug the program; the default discards everything.
	Log *slog.Logger
	Now func() time.Time
}

// Engine works on the cluster of one workspace. Its methods may be called
// concurrently.
type Engine struct {
	ws        *workspace.Workspace
	connect   func(context.Context, []byte) (Cluster, error)
	inspect   func(context.Context, []byte) (check.Inspector, error)
	backups   func(context.Context, []byte) (BackupCluster, error)
	releases  func(context.Context, string, []release.Key) (release.Source, error)
	sandbox   func(context.Context, string) (SandboxStatus, error)
	provider  func(context.Context, *workspace.Config, *workspace.State) (Provider, error)
	log       *slog.Logger
	now       func() time.Time
	limits    limits
	responses responseTimes

	buildable []string
}

// New returns an engine for a workspace.
func New(w *workspace.Workspace, d Deps) *Engine {
	e := &Engine{
		ws: w, connect: d.Connect, inspect: d.Inspect, backups: d.Backups, releases: d.Releases, sandbox: d.FindSandbox, provider: d.Provider,
		log: d.Log, now: d.Now, limits: defaultLimits, buildable: d.Buildable,
	}
	if e.connect == nil {
		e.connect = func(context.Context, []byte) (Cluster, error) {
			return nil, errors.New("connect to cluster: this program has no Kubernetes client")
		}
	}
	if e.inspect == nil {
		e.inspect = func(context.Context, []byte) (check.Inspector, error) {
			return nil, errors.New("look at the cluster: this program has no Kubernetes client")
		}
	}
	if e.backups == nil {
		e.backups = func(context.Context, []byte) (BackupCluster, error) {
			return nil, errors.New("back up the cluster: this program has no Kubernetes client")
		}
	}
	if e.releases == nil {
		e.releases = OpenReleases
	}
	if e.provider == nil {
		e.provider = NewProvider
	}
	if e.log == nil {
		e.log = slog.New(slog.DiscardHandler)
	}
	if e.now == nil {
		e.now = time.Now
	}
	return e
}
