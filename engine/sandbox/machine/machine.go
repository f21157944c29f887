// Package machine runs real machines on this computer: runc containers whose
// first process is systemd, with containerd, a network of their own and a TPM 2.0.
//
// It hides everything that stands between "a machine with this name, address and
// OS image" and a running system: Debian's packages, overlays, network namespaces,
// cgroups, processes, and how all of that is found again and taken away when the
// program that started it is gone.
//
// A [Host] owns the machines of one sandbox. Whatever it makes lies below the
// sandbox's directory, in network namespaces and cgroups of its own, or is a
// process whose identity is written down; nothing else of this computer is
// changed. It never loads kernel modules, never writes a sysctl outside of the
// network namespaces it made, never raises a limit, and never removes a directory
// while something is mounted below it. Isolation is runc's. It keeps machines
// from harming this computer by accident; it is no defence against hostile code
// that runs as root inside of a machine.
//
// The package does not know what a cluster is: it neither attests nor joins
// anything. Its callers put files into machines, serve them what they ask for on
// the address [Gateway], and measure them when they are switched on.
package machine

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"net/netip"
	"path/filepath"
	"time"
)

// The network of a sandbox. All sandboxes use the same numbers; they never meet,
// because each has a bridge in a network namespace of its own.
var (
	// Nodes is the range of the machines' addresses.
	Nodes = netip.MustParsePrefix("10.42.0.0/24")
	// Gateway is the bridge's address: every machine's default route, and where
	// the cloud listens.
	Gateway = netip.MustParseAddr("10.42.0.1")
	// MetadataAddr is the address, also on the bridge, of the metadata service.
	MetadataAddr = netip.MustParseAddr("169.254.169.254")
)

// Where things are inside of a machine.
const (
	// TPMDir is the directory of the machine's TPM socket, tpm.sock, and of
	// EventLogName. The machine cannot write to it.
	TPMDir = "/var/lib/constellation-tpm"
	// TPMAddress is the TPM's address as seen from inside of the machine.
	TPMAddress = "unix:" + TPMDir + "/tpm.sock"
	// EventLogName is the file in TPMDir that [PowerOn.EventLog] names.
	EventLogName = "binary_bios_measurements"
	// DefaultPauseImage is what Spec.PauseImage means when it is empty.
	DefaultPauseImage = "registry.k8s.io/pause:3.10.1"
	// RegistryMirror is asked first, and alone, for every image that a machine pulls.
	RegistryMirror = "http://10.42.0.1:5000"
)

// Errors that callers may want to tell apart.
var (
	// ErrNotFound means that the host has no such machine.
	ErrNotFound = errors.New("no such machine")
	// ErrExists means that the name is taken.
	ErrExists = errors.New("machine exists already")
	// ErrBusy means that another process drives the machines of this directory.
	ErrBusy = errors.New("another process drives these machines")
	// ErrNotRunning means that the machine exists but is switched off.
	ErrNotRunning = errors.New("machine is switched off")
	// ErrUnsupported means that this computer cannot run real machines at all.
	ErrUnsupported = errors.New("real machines need Linux and root")
)

// Progress tells how far a longer piece of work has come.
type Progress struct {
	// Text says what is being done, in the present: "installing containerd".
	Text string
	// Current and Total count units of the work; Total is zero when unknown.
	Current, Total int64
	// Took is how long the work has been going on.
	Took time.Duration
}

// Event is one thing that was measured before a machine's first instruction ran,
// to be extended into a PCR in this order. It has the fields of
// attestation.MeasuredEvent and converts to it.
type Event struct {
	PCR         uint32 `json:"pcr"`
	Digest      []byte `json:"digest"` // SHA-256 of what was measured
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

// ImageSpec says what an OS image adds to the root file system.
type ImageSpec struct {
	// Version is the release that the image belongs to, such as v1.1.0.
	Version string
	// Bootstrapper and Agent are paths of the programs on this computer.
	Bootstrapper, Agent string
	// Peers is the content of /usr/lib/constellation/peers.json. Empty means "[]".
	Peers []byte
	// ReleaseKeys is the content of /usr/lib/constellation/release-keys.pem: whose
	// components machines of the image install. Empty: the image has no such file, and its
	// machines install none.
	ReleaseKeys []byte
}

// Image is an OS image: a layer over a root file system. It is a description of
// directories in the cache; copying it is fine.
type Image struct {
	Version string `json:"version"`
	// Rootfs and Dir are directories in the cache, see [Rootfs] and [OSImage].
	Rootfs string `json:"rootfs"`
	Dir    string `json:"dir"`
	// Events are what a machine of this image measures as long as nobody changes
	// the files. [Host.Start] measures anew.
	Events []Event `json:"events"`
}

// ProgramsOf returns the directory on this computer that holds an image's own programs and
// release keys.
func ProgramsOf(img Image) string { return filepath.Join(img.Dir, "layer", "usr/lib/constellation") }

// File is a file that is put into a machine's disk before it boots for the first time.
type File struct {
	Data []byte
	// Mode holds permission bits. Zero means 0644.
	Mode fs.FileMode
}

// Spec describes a machine.
type Spec struct {
	// Name is the host name: a DNS label of at most 40 characters.
	Name string
	// IP lies in [Nodes] and is not [Gateway]. Callers see to it that it is unique.
	IP netip.Addr
	// PodCIDR is routed to the machine, whose pods get addresses of it.
	PodCIDR netip.Prefix
	Image   *Image
	// Files are written over the image, by absolute path. The host adds
	// /etc/hostname, /etc/hosts, /etc/machine-id, /etc/resolv.conf, the CNI list
	// and containerd's configuration, which Files may replace.
	Files map[string]File
	// PauseImage is the image of pod sandboxes. Empty means [DefaultPauseImage].
	PauseImage string
	// Affliction is what it suffers from when it boots, as far as its disk is concerned;
	// [Host.Afflict] is for the rest.
	Affliction Affliction
}

// PowerOn is what a [Firmware] gets to know.
type PowerOn struct {
	Machine string
	// TPM is the address of the machine's TPM on this computer, which was just
	// reset: all PCRs are zero.
	TPM string
	// EventLog is the path on this computer of a file that does not exist yet, and
	// that the machine will see as EventLogName in TPMDir.
	EventLog string
	// Events are the measurements of the bytes that will boot.
	Events []Event
	// First is true once in a machine's life: its TPM is new and not provisioned.
	First bool
}

// Firmware is run each time a machine is switched on, after its TPM and before its
// first process. An error keeps the machine from starting. It may be called
// concurrently for different machines. Nil measures nothing.
type Firmware func(context.Context, PowerOn) error

// Power says whether a machine runs.
type Power string

// Values of Power.
const (
	// Creating: between the begin of Start and the machine's first process, or left
	// half-made by a crash. Such a machine can only be removed.
	Creating Power = "creating"
	Running  Power = "running"
	// Off: it was stopped or killed, or its first process ended. Its disk is kept.
	Off Power = "off"
)

// Machine is what a host knows of one of its machines.
type Machine struct {
	Name    string       `json:"name"`
	IP      netip.Addr   `json:"ip"`
	PodCIDR netip.Prefix `json:"podCIDR"`
	Image   Image        `json:"image"`
	Power   Power        `json:"power"`
	// PID is the machine's first process as this computer sees it; 0 unless Running.
	PID int `json:"pid"`
	// TPM is the address of the machine's TPM on this computer; empty unless the
	// machine is Running.
	TPM     string    `json:"tpm"`
	Created time.Time `json:"created"`
	// Booted is when the machine was switched on last; zero if never.
	Booted time.Time `json:"booted"`
	// Boots counts how often it was switched on.
	Boots int `json:"boots"`
}

// Affliction is what a running machine suffers from. The zero value is health.
type Affliction struct {
	// Frozen: none of its processes gets a turn; its connections stay open.
	Frozen bool
	// Isolated: its cable is out of the bridge.
	Isolated bool
	// Lost are peers that what it sends to never reaches; what they send does.
	Lost []Peer
	// DiskFull and DiskReadOnly keep it from writing new files where programs are
	// installed, where kubeadm writes, and where our programs remember; other
	// directories, and files that are open, are as ever.
	DiskFull, DiskReadOnly bool
	// SlowDisk is how much longer each sync of etcd's data takes. LostWrites and
	// TornWrites: what etcd has not synced is lost when the power is cut, all of it or
	// half of the pages. A machine that has booted without any of the three suffers from
	// its next boot on.
	SlowDisk               time.Duration
	LostWrites, TornWrites bool
	// TPMHangs: its TPM does not answer, until it does again. TPMGone: there is none,
	// until the machine is switched on anew.
	TPMHangs, TPMGone bool
}

// Any reports whether it suffers from anything.
func (a Affliction) Any() bool {
	return a.Frozen || a.Isolated || len(a.Lost) > 0 || a.DiskFull || a.DiskReadOnly || a.FailsAsDisk() || a.TPMHangs || a.TPMGone
}

// FailsAsDisk reports whether its disk must be one that can fail.
func (a Affliction) FailsAsDisk() bool { return a.SlowDisk > 0 || a.LostWrites || a.TornWrites }

// Peer is who a machine may not reach: an address and, unless it is zero, the range of
// its pods.
type Peer struct {
	IP      netip.Addr
	PodCIDR netip.Prefix
}

// Stdio connects a command that runs in a machine.
type Stdio struct {
	// In may be nil: the command reads nothing.
	In io.Reader
	// Out and Err may be nil: what is written is dropped. With a TTY everything
	// goes to Out.
	Out, Err io.Writer
	// TTY gives the command a terminal. If In is a terminal of this process, it is
	// the one that is used, and its size is followed; otherwise one of 80×24.
	TTY bool
}

// Demand says how many machines a caller is about to start.
type Demand struct {
	ControlPlanes, Workers int
	// New says that they are a cluster of their own, with what only one of its control planes takes.
	New bool
	// There are machines that run or will soon, of any sandbox. They are counted with
	// all that they will take, of which a machine without a cluster has only a part.
	There []Resident
}

// Resident is a machine as those see it who reckon with it.
type Resident struct {
	// Dir and Sandbox are what [NewHost] was given.
	Dir, Sandbox string
	Name         string
	ControlPlane bool
	// Abandoned says that nobody will start it: it counts only while it runs.
	Abandoned bool
}

// Problem is a reason why machines cannot be started, found before anything was
// touched.
type Problem struct {
	// ID is stable and in kebab-case: "packages", "inotify", "root", ...
	ID string
	// What is one sentence with the numbers; Remedy says what to do, with the
	// command where there is one.
	What, Remedy string
	// Packages are Debian packages whose installation would solve the problem, see
	// [InstallPackages]. Often empty.
	Packages []string
}

func (p Problem) String() string { return p.What + "; " + p.Remedy }
