// Package sandboxapi speaks to the cloud that package sandbox runs on this computer.
//
// [Metadata] is what a machine may ask about itself and its peers: plain HTTP at
// 169.254.169.254, answered by source address, so that a machine, or a pod in its
// host's network, needs no credentials and can be nobody else. Pods with an
// address of their own are refused. [Client] is the control API: groups, instances,
// images and components; control planes reach it with the bearer token that
// metadata gives to them alone, the host through a unix socket.
//
// # Formats
//
//	provider ID   sandbox://<sandbox>/<machine>
//	group         sandboxes/<sandbox>/groups/<group>
//	image         sandboxes/<sandbox>/images/<version>
//
// A sandbox's name is a DNS label of at most 40 characters. The groups are
// "control-plane" and "workers", their machines are control-plane-0, worker-0 and
// so on; a replacement gets the next number that was never used. A node is named
// as its machine. A version is a release, such as v1.1.0.
//
// Errors wrap those of package cloud. The package retries nothing: its callers
// know what waiting costs. It never follows a proxy of the environment.
package sandboxapi

import (
	"fmt"
	"net/netip"
	"regexp"
	"strings"
	"time"

	"constellation/engine/cloud"
)

// Names of the two groups of a sandbox.
const (
	ControlPlaneGroup = "control-plane"
	WorkerGroup       = "workers"
)

// TPMDir is the directory of a machine that has the socket of its TPM, tpm.sock.
const TPMDir = "/var/lib/constellation-tpm"

const scheme = "sandbox://"

var nameRE = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$`)

// ValidName reports whether name may name a sandbox: a DNS label of at most 40
// characters.
func ValidName(name string) bool { return nameRE.MatchString(name) }

// ProviderID returns what the spec.providerID of machine's Node holds.
func ProviderID(sandbox, machine string) string { return scheme + sandbox + "/" + machine }

// ParseProviderID splits a provider ID of this cloud.
func ParseProviderID(id string) (sandbox, machine string, err error) {
	rest, ok := strings.CutPrefix(id, scheme)
	if ok {
		sandbox, machine, ok = strings.Cut(rest, "/")
	}
	if !ok || !ValidName(sandbox) || !validSegment(machine) {
		return "", "", fmt.Errorf("parse provider ID %q: want %s<sandbox>/<machine>", id, scheme)
	}
	return sandbox, machine, nil
}

// GroupID returns the ID of a group.
func GroupID(sandbox, group string) string { return "sandboxes/" + sandbox + "/groups/" + group }

// ParseGroupID splits the ID of a group.
func ParseGroupID(id string) (sandbox, group string, err error) {
	sandbox, group, ok := parseResource(id, "groups")
	if !ok {
		return "", "", fmt.Errorf("parse group %q: want sandboxes/<sandbox>/groups/<group>", id)
	}
	return sandbox, group, nil
}

// ImageReference returns the reference of the OS image of a release.
func ImageReference(sandbox, version string) string {
	return "sandboxes/" + sandbox + "/images/" + version
}

// ParseImageReference splits the reference of an OS image.
func ParseImageReference(ref string) (sandbox, version string, err error) {
	sandbox, version, ok := parseResource(ref, "images")
	if !ok {
		return "", "", fmt.Errorf("parse image %q: want sandboxes/<sandbox>/images/<version>", ref)
	}
	return sandbox, version, nil
}

func parseResource(id, collection string) (sandbox, name string, ok bool) {
	parts := strings.Split(id, "/")
	if len(parts) != 4 || parts[0] != "sandboxes" || parts[2] != collection ||
		!ValidName(parts[1]) || !validSegment(parts[3]) {
		return "", "", false
	}
	return parts[1], parts[3], true
}

var segmentRE = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9.+-]{0,62}$`)

// ValidToken reports whether s may name a request to create an instance.
func ValidToken(s string) bool { return validSegment(s) }

// validSegment keeps a name from changing the path that it becomes part of.
func validSegment(s string) bool { return segmentRE.MatchString(s) }

// Boot is how far a machine's start has come.
type Boot string

// A machine's start, in order. Failed and Stopped machines have left it.
const (
	BootCreating Boot = "creating" // files, network and TPM are being made
	BootBooting  Boot = "booting"  // PID 1 runs
	BootReady    Boot = "ready"    // container runtime and bootstrapper are up
	BootStopped  Boot = "stopped"
	BootFailed   Boot = "failed"
)

// Machine is an instance with what only the host that runs it can tell.
type Machine struct {
	cloud.Instance
	Boot Boot `json:"boot"`
	// Started is when PID 1 was started last; zero before that.
	Started time.Time `json:"started,omitzero"`
	// Console is the path on the host of the log of the machine's console.
	Console string `json:"console,omitempty"`
}

// Info describes a running sandbox.
type Info struct {
	Name string `json:"name"`
	// UID names this incarnation of the sandbox; attestation keys are certified for it.
	UID string `json:"uid"`
	// Release is what init deploys, Kubernetes the version it deploys.
	Release    string `json:"release"`
	Kubernetes string `json:"kubernetes"`
	// KubernetesVersions are those whose components the mirror serves.
	KubernetesVersions []string `json:"kubernetesVersions"`
	// KubernetesEndpoint and InitEndpoint are host:port on the host's loopback;
	// they lead to the load balancer.
	KubernetesEndpoint string `json:"kubernetesEndpoint"`
	InitEndpoint       string `json:"initEndpoint"`
	// LoadBalancer is the load balancer's address in the sandbox's own network.
	LoadBalancer netip.Addr `json:"loadBalancer"`
	// Workspace is the directory that the sandbox was made for.
	Workspace string `json:"workspace,omitempty"`
	// TrustRoots are PEM certificates: the roots of attestation keys.
	TrustRoots string        `json:"trustRoots"`
	Groups     []cloud.Group `json:"groups"`
	Machines   []Machine     `json:"machines"`
	Faults     []string      `json:"faults,omitempty"`
	Created    time.Time     `json:"created"`
	// Emulator is nil for a sandbox that is a cloud of its own.
	Emulator *Emulator `json:"emulator,omitempty"`
	// Hollow is nil where machines are real.
	Hollow *Hollow `json:"hollow,omitempty"`
}

// Emulator describes a sandbox that emulates the cloud of a vendor.
type Emulator struct {
	// Cloud is the name of its provider.
	Cloud string `json:"cloud"`
	// Calls counts the calls of the vendor's API by method, since the start of the daemon. Problems counts those that the
	// API does not have.
	Calls    map[string]int `json:"calls"`
	Problems int            `json:"problems"`
}

// Hollow is what a sandbox with simulated machines has to tell besides.
type Hollow struct {
	// Doing is the current step until the cluster is complete; then empty.
	Doing string `json:"doing,omitempty"`
	HollowTimes
}

// HollowTimes are how long hollow machines take to boot, to join after that, and to end
// a pod. Zero leaves a time as it is.
type HollowTimes struct {
	Boot  time.Duration `json:"boot,omitempty"`
	Join  time.Duration `json:"join,omitempty"`
	Drain time.Duration `json:"drain,omitempty"`
}
