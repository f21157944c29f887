//go:build !linux

package machine

import (
	"context"
	"io"
	"log/slog"
	"net"
	"time"
)

// Host is documented on Linux, the only supported system.
type Host struct{}

// Check returns the problems that keep this computer from starting the machines in want.
func Check(ctx context.Context, cacheDir, stateDir string, want Demand) []Problem {
	return []Problem{{ID: "system", What: ErrUnsupported.Error(), Remedy: "run the sandbox on a Linux computer, as root"}}
}

// InstallPackages installs Debian packages with apt-get.
func InstallPackages(ctx context.Context, packages []string, output io.Writer) error {
	return ErrUnsupported
}

// Rootfs makes the root file system of machines, once per cache.
func Rootfs(ctx context.Context, cacheDir string, progress func(Progress)) (string, error) {
	return "", ErrUnsupported
}

// OSImage makes an OS image over a root file system, once per content.
func OSImage(ctx context.Context, cacheDir, rootfs string, spec ImageSpec, progress func(Progress)) (*Image, error) {
	return nil, ErrUnsupported
}

// Prune removes cache entries that have not been used for the time unused.
func Prune(ctx context.Context, cacheDir string, keep []string, unused time.Duration) ([]string, error) {
	return nil, ErrUnsupported
}

// StartTPM switches a TPM on.
func StartTPM(ctx context.Context, dir string) (address string, stop func() error, err error) {
	return "", nil, ErrUnsupported
}

// NewHost returns the host of the machines in dir.
func NewHost(dir, name string, log *slog.Logger) (*Host, error) { return nil, ErrUnsupported }

// Network takes the lock on the machines and makes the bridge, if it is missing.
func (h *Host) Network(ctx context.Context) error { return ErrUnsupported }

// Close releases the lock. Machines keep running.
func (h *Host) Close() error { return nil }

// Listen listens inside of the sandbox's network.
func (h *Host) Listen(ctx context.Context, network, address string) (net.Listener, error) {
	return nil, ErrUnsupported
}

// Dial connects from inside of the sandbox's network.
func (h *Host) Dial(ctx context.Context, network, address string) (net.Conn, error) {
	return nil, ErrUnsupported
}

// DialFrom connects from inside of a machine.
func (h *Host) DialFrom(ctx context.Context, name, network, address string) (net.Conn, error) {
	return nil, ErrUnsupported
}

// LimitMemory bounds the memory of all machines together.
func (h *Host) LimitMemory(bytes int64) {}

// Start makes a machine and boots it.
func (h *Host) Start(ctx context.Context, spec Spec, firmware Firmware) error { return ErrUnsupported }

// Boot switches on a machine that is off.
func (h *Host) Boot(ctx context.Context, name string, firmware Firmware) error { return ErrUnsupported }

// Reboot shuts a machine down and switches it on again.
func (h *Host) Reboot(ctx context.Context, name string, firmware Firmware) error {
	return ErrUnsupported
}

// Kill cuts the power.
func (h *Host) Kill(ctx context.Context, name string) error { return ErrUnsupported }

// Remove kills a machine and removes its disk, its TPM and its network.
func (h *Host) Remove(ctx context.Context, name string) error { return ErrUnsupported }

// WaitReady waits until the machine's containerd answers.
func (h *Host) WaitReady(ctx context.Context, name string) error { return ErrUnsupported }

// Wait waits until the machine is off.
func (h *Host) Wait(ctx context.Context, name string) error { return ErrUnsupported }

// Machine returns the state of one machine.
func (h *Host) Machine(name string) (Machine, error) { return Machine{}, ErrUnsupported }

// Machines lists all machines by name.
func (h *Host) Machines() ([]Machine, error) { return nil, ErrUnsupported }

// Exec runs a command in a machine.
func (h *Host) Exec(ctx context.Context, name string, command []string, stdio Stdio) (int, error) {
	return 0, ErrUnsupported
}

// Console returns the path of the output of the machine's first process and of runc.
func (h *Host) Console(name string) string { return "" }

// SetFaults injects faults into a running machine.
func (h *Host) SetFaults(ctx context.Context, name string, a Faults) error { return ErrUnsupported }

// Written lists files of a machine's disk.
func (h *Host) Written(name, pattern string) ([]string, error) { return nil, ErrUnsupported }

// Sweep removes all resources of a crashed or finished sandbox.
func (h *Host) Sweep(ctx context.Context) error { return ErrUnsupported }
