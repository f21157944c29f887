package engine

import (
	"context"
	"io"
	"time"

	"constellation/engine/plan"
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
	// Fetch gets the binaries and images of a Kubernetes version into the cache.
	Fetch(ctx context.Context, version string, from FetchOptions, emit func(plan.Event)) error
	// Power operates the power switches of machines, of all of them if none is named, and returns
	// when the machines that should run are ready.
	Power(ctx context.Context, name string, action PowerAction, machines []string, emit func(plan.Event)) error
	// SetFaults makes the faults of a running sandbox those of the list, and no others.
	SetFaults(ctx context.Context, name string, faults []string) error
	// FaultKinds lists the faults that a sandbox of an emulated cloud can have; empty: of the sandbox's own cloud.
	FaultKinds(cloud string) []FaultKind
}

// FetchOptions say where the programs of a Kubernetes version come from. The zero value means from
// the addresses at which the projects publish them, and from source where these have none.
type FetchOptions struct {
	FromSource bool   // compile all programs
	Mirror     string // URL of copies of the published files, each below the name of its host
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
	// Cloud is the provider whose cloud the sandbox emulates; empty: none, or that of an existing sandbox.
	Cloud string
	// Machines is real, which is the default, or hollow: simulated, on a control plane of
	// plain processes that is complete when Up returns. An existing sandbox keeps its kind.
	Machines string
	// Boot, Join and Drain are how long hollow machines take to boot, to join after that,
	// and to end a pod. Zero: 5 s, 1 s and 3 s, or what they take already.
	Boot, Join, Drain time.Duration
	// RegistryPort is a port of this computer's loopback, at which a registry serves pulls by HTTPS. Real machines
	// reach it at the same port of the sandbox's gateway, and pull from nothing else. Zero: the sandbox serves all images.
	RegistryPort int
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
	KubernetesVersions []string `json:"kubernetesVersions,omitempty"`
	Faults             []string `json:"faults,omitempty"`
	// Calls counts the calls of the API of an emulated cloud by method, Problems those that the API does not have.
	Calls    map[string]int   `json:"calls,omitempty"`
	Problems int              `json:"problems,omitempty"`
	Machines []SandboxMachine `json:"machines"`
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
