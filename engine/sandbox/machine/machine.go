// Package machine runs real machines on this computer: runc containers whose
// first process is systemd, with containerd, a network of their own and a TPM 2.0.
//
// It implements everything between "a machine with this name, address and
// OS image" and a running system: Debian's packages, overlays, network namespaces,
// cgroups, processes, and their discovery and removal after the
// program that started them is gone.
//
// A [Host] owns the machines of one sandbox. All that it creates is below the
// sandbox's directory, in its own network namespaces and cgroups, or is a
// process whose identity is recorded. It changes nothing else of this computer:
// it never loads kernel modules, never writes a sysctl outside of its own
// network namespaces, never raises a limit, and never removes a directory
// while something is mounted below it. Isolation is runc's. It protects
// this computer from accidents, but not from hostile code
// that runs as root inside a machine.
//
// The package is independent of clusters: it neither attests nor joins
// anything. Its callers put files into machines, serve their requests on
// the address [Gateway], and measure them when they are switched on.
package machine

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"io/fs"
	"net/netip"
	"path/filepath"
	"time"

	"constellation/engine/cloud/sandboxapi"
)

// The network of a sandbox. All sandboxes use the same addresses without conflict,
// because each has a bridge in its own network namespace.
var (
	// Nodes is the range of the machines' addresses.
	Nodes = netip.MustParsePrefix("10.42.0.0/24")
	// Gateway is the address of the bridge: every machine's default route, and the
	// address on which the cloud listens.
	Gateway = netip.MustParseAddr("10.42.0.1")
	// MetadataAddr is the address, also on the bridge, of the metadata service.
	MetadataAddr = netip.MustParseAddr("169.254.169.254")
)

// DebianVariable is the environment variable with the release of Debian of machines, such
// as trixie. It is for tests; empty is the release that OS images are made of.
const DebianVariable = "CONSTELLATION_SANDBOX_DEBIAN"

// Paths and addresses inside a machine.
const (
	// TPMDir is the directory of the machine's TPM socket, tpm.sock, and of
	// EventLogName. The machine cannot write to it.
	TPMDir = sandboxapi.TPMDir
	// TPMAddress is the TPM's address as seen from inside of the machine.
	TPMAddress = "unix:" + TPMDir + "/tpm.sock"
	// EventLogName is the file in TPMDir that [PowerOn.EventLog] names.
	EventLogName = "binary_bios_measurements"
	// DefaultPauseImage is what Spec.PauseImage means when it is empty.
	DefaultPauseImage = "registry.k8s.io/pause:3.10.1"
	// RegistryMirror is the only registry from which machines pull images.
	RegistryMirror = "http://10.42.0.1:5000"
)

// Errors that callers may want to distinguish.
var (
	// ErrNotFound means that the host has no such machine.
	ErrNotFound = errors.New("no such machine")
	// ErrExists means that the name is taken.
	ErrExists = errors.New("machine exists already")
	// ErrBusy means that another process holds the lock on the machines of this directory.
	ErrBusy = errors.New("another process drives these machines")
	// ErrNotRunning means that the machine exists but is switched off.
	ErrNotRunning = errors.New("machine is switched off")
	// ErrUnsupported means that this computer cannot run real machines at all.
	ErrUnsupported = errors.New("real machines need Linux and root")
)

// Progress reports the progress of a longer operation.
type Progress struct {
	// Text is the current step, in the present: "installing containerd".
	Text string
	// Current and Total count units of the work; Total is zero when unknown.
	Current, Total int64
	// Took is the duration so far.
	Took time.Duration
}

// Event is one measurement before a machine's first instruction runs,
// to be extended into a PCR in this order. It has the fields of
// attestation.MeasuredEvent and converts to it.
type Event struct {
	PCR         uint32 `json:"pcr"`
	Digest      []byte `json:"digest"` // SHA-256 of the measured data
	Description string `json:"description"`
}

// PCRs that a boot extends. All others are zero when the machine starts.
const (
	// PCRBoot covers the boot chain: the first program and how it is started.
	PCRBoot = 4
	// PCRRootfs covers every file of the root file system below the image's layer.
	PCRRootfs = 9
	// PCRImage covers the image's own layer: version, binaries and units.
	PCRImage = 11
)

// ImageSpec describes what an OS image adds to the root file system.
type ImageSpec struct {
	// Version is the release that the image belongs to, such as v1.1.0.
	Version string
	// Bootstrapper and Agent are paths of the programs on this computer.
	Bootstrapper, Agent string
	// Peers is the content of /usr/lib/constellation/peers.json. Empty means "[]".
	Peers []byte
	// ReleaseKeys is the content of /usr/lib/constellation/release-keys.pem: the keys that
	// sign the components which machines of the image install. If it is empty, the image has no
	// such file, and its machines install no components.
	ReleaseKeys []byte
}

// Image is an OS image: a layer over a root file system. It refers to
// directories in the cache; copying it is fine.
type Image struct {
	Version string `json:"version"`
	// Rootfs and Dir are directories in the cache, see [Rootfs] and [OSImage].
	Rootfs string `json:"rootfs"`
	Dir    string `json:"dir"`
	// Events are the measurements of a machine of this image while the files are
	// unmodified. [Host.Start] measures again.
	Events []Event `json:"events"`
}

// ProgramsOf returns the directory on this computer with an image's own programs and
// release keys.
func ProgramsOf(img Image) string { return filepath.Join(img.Dir, "layer", "usr/lib/constellation") }

// File is a file that is written to a machine's disk before its first boot.
type File struct {
	Data []byte
	// Mode holds permission bits. Zero means 0644.
	Mode fs.FileMode
}

// Spec describes a machine.
type Spec struct {
	// Name is the host name: a DNS label of at most 40 characters.
	Name string
	// IP is in [Nodes] and is not [Gateway]. Callers must ensure that it is unique.
	IP netip.Addr
	// PodCIDR is the address range of the machine's pods, routed to the machine.
	PodCIDR netip.Prefix
	Image   *Image
	// Files are written over the image, by absolute path. The host adds
	// /etc/hostname, /etc/hosts, /etc/machine-id, /etc/resolv.conf, the CNI list
	// and containerd's configuration, which Files may replace.
	Files map[string]File
	// PauseImage is the image of pod sandboxes. Empty means [DefaultPauseImage].
	PauseImage string
	// Faults has the disk faults at boot;
	// [Host.SetFaults] injects the others.
	Faults Faults
}

// EnvironmentFile has the environment of the bootstrapper's unit, relative to the root.
const EnvironmentFile = "etc/constellation/environment"

// PowerOn is the input of a [Firmware].
type PowerOn struct {
	Machine string
	// TPM is the address of the machine's TPM on this computer, which was just
	// reset: all PCRs are zero.
	TPM string
	// EventLog is the path on this computer of a file that does not exist yet. The
	// machine sees it as EventLogName in TPMDir.
	EventLog string
	// Events are the measurements of the files that will boot.
	Events []Event
	// First is true once per machine: its TPM is new and not provisioned.
	First bool
}

// Firmware runs each time a machine is switched on, after its TPM and before its
// first process. An error keeps the machine from starting. It may be called
// concurrently for different machines. Nil measures nothing.
type Firmware func(context.Context, PowerOn) error

// Power is the power state of a machine.
type Power string

// Values of Power.
const (
	// Creating: between the beginning of Start and the machine's first process, or partly
	// created before a crash. Such a machine can only be removed.
	Creating Power = "creating"
	Running  Power = "running"
	// Off: it was stopped or killed, or its first process ended. Its disk is kept.
	Off Power = "off"
)

// Machine is the observed state of a machine.
type Machine struct {
	Name    string       `json:"name"`
	IP      netip.Addr   `json:"ip"`
	PodCIDR netip.Prefix `json:"podCIDR"`
	Image   Image        `json:"image"`
	Power   Power        `json:"power"`
	// PID is the number of the machine's first process on this computer; 0 unless Running.
	PID int `json:"pid"`
	// TPM is the address of the machine's TPM on this computer; empty unless the
	// machine is Running.
	TPM     string    `json:"tpm"`
	Created time.Time `json:"created"`
	// Booted is the time of the last boot; zero if there was none.
	Booted time.Time `json:"booted"`
	// Boots is the number of boots.
	Boots int `json:"boots"`
}

// Faults is the set of faults of a running machine. The zero value has none.
type Faults struct {
	// Frozen: none of its processes runs; its connections stay open.
	Frozen bool
	// Isolated: it is disconnected from the bridge.
	Isolated bool
	// Lost are peers to which its packets are dropped. Packets from them arrive.
	Lost []Peer
	// DiskFull and DiskReadOnly prevent new files in the directories of installed
	// programs, of kubeadm, and of our programs' state. Other
	// directories, and open files, are not affected.
	DiskFull, DiskReadOnly bool
	// SlowDisk is the additional duration of each sync of etcd's data. LostWrites and
	// TornWrites: at a power cut etcd loses unsynced writes, all of them or
	// half of the pages. On a machine that booted without any of the three, they take effect
	// at its next boot.
	SlowDisk               time.Duration
	LostWrites, TornWrites bool
	// TPMHangs: its TPM does not answer while the fault is set. TPMGone: it has no TPM
	// until the machine is switched on again.
	TPMHangs, TPMGone bool
}

// Any reports whether there is any fault.
func (a Faults) Any() bool {
	return a.Frozen || a.Isolated || len(a.Lost) > 0 || a.DiskFull || a.DiskReadOnly || a.FailsAsDisk() || a.TPMHangs || a.TPMGone
}

// FailsAsDisk reports whether the machine needs a faulty disk.
func (a Faults) FailsAsDisk() bool { return a.SlowDisk > 0 || a.LostWrites || a.TornWrites }

// Peer is an unreachable peer: an address and, unless it is zero, the range of
// its pods.
type Peer struct {
	IP      netip.Addr
	PodCIDR netip.Prefix
}

// Stdio connects a command that runs in a machine.
type Stdio struct {
	// In may be nil: the command reads nothing.
	In io.Reader
	// Out and Err may be nil: the output is dropped. With a TTY all output
	// goes to Out.
	Out, Err io.Writer
	// TTY gives the command a terminal. If In is a terminal of this process, the command
	// uses it and follows its size. Otherwise it gets one of 80×24.
	TTY bool
}

// Demand is the number of machines that a caller is about to start.
type Demand struct {
	ControlPlanes, Workers int
	// New marks a new cluster, which also needs the resources of one leading control plane.
	New bool
	// There are machines of any sandbox that run or will run. Each counts with its
	// full demand, although a machine without a cluster has only a part of it.
	There []Resident
}

// Resident is a machine whose resources are reserved.
type Resident struct {
	// Dir and Sandbox are the arguments of [NewHost].
	Dir, Sandbox string
	Name         string
	ControlPlane bool
	// Abandoned means that it will not be started again: it counts only while it runs.
	Abandoned bool
}

// Problem is a reason why machines cannot be started, found before any
// change.
type Problem struct {
	// ID is stable and in kebab-case: "packages", "inotify", "root", ...
	ID string
	// What describes the problem in one sentence, with the numbers. Remedy is the next step, with the
	// command if there is one.
	What, Remedy string
	// Packages are Debian packages whose installation would solve the problem, see
	// [InstallPackages]. Often empty.
	Packages []string
}

func (p Problem) String() string { return p.What + "; " + p.Remedy }

// longestDir is the length of the name of a machine's directory, because paths of sockets must be short.
const longestDir = 20

// DirOf returns the name of a machine's directory: that of the machine, or its first characters and a hash. It returns such a name
// as it is.
func DirOf(name string) string {
	if len(name) <= longestDir {
		return name
	}
	sum := sha256.Sum256([]byte(name))
	return name[:longestDir-9] + "." + hex.EncodeToString(sum[:4])
}
