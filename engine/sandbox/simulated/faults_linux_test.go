package simulated

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"constellation/engine/sandbox/machine"
)

func TestMain(m *testing.M) {
	if IsStandIn(os.Args[1:]) { // a machine is a process of this program
		os.Exit(Main(os.Args[1:]))
	}
	os.Exit(m.Run())
}

// getRandom is a TPM command that succeeds in any state.
var getRandom = []byte{0x80, 0x01, 0, 0, 0, 12, 0, 0, 0x01, 0x7b, 0, 8}

// A frozen machine does nothing, its TPM fails as requested, and neither
// fault keeps it from being switched off.
func TestSimulatedMachinesSuffer(t *testing.T) {
	dir, err := os.MkdirTemp("", "sim") // t.TempDir can be too long for a socket's name
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	program := filepath.Join(dir, "program")
	if err := os.WriteFile(program, []byte("#!/bin/sh\nsleep 1000 &\nwait\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	img, err := Image(dir, "v1.1.0", map[string]string{"bootstrapper": program, "agent": program}, []byte("[]"), nil)
	if err != nil {
		t.Fatal(err)
	}
	h := NewHost(dir, "suffer", t.TempDir(), slog.New(slog.DiscardHandler))
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	const name = "worker-0"
	if err := h.Network(ctx); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(h.Sweep(context.Background()), h.Close()); err != nil {
			t.Error(err)
		}
	})
	ip := Nodes("suffer").Addr().Next().Next()
	if err := h.Start(ctx, machine.Spec{Name: name, IP: ip, Image: &img}, nil); err != nil {
		t.Fatal(err)
	}
	if err := h.WaitReady(ctx, name); err != nil {
		t.Fatal(err)
	}
	// The machine's own process, two programs, and the children of each.
	states := func() (n, stopped int) {
		if err := eachProcess(h.path(name), func(pid int, its, _ bool) {
			if _, state := stat(pid); its && state != "Z" {
				n++
				if state == "T" {
					stopped++
				}
			}
		}); err != nil {
			t.Fatal(err)
		}
		return n, stopped
	}
	setFaults := func(a machine.Faults) {
		t.Helper()
		if err := h.SetFaults(ctx, name, a); err != nil {
			t.Fatal(err)
		}
	}
	if err := poll(ctx, func() (bool, error) { n, _ := states(); return n == 5, nil }); err != nil {
		t.Fatal(err)
	}
	setFaults(machine.Faults{Frozen: true})
	if n, stopped := states(); n != 5 || stopped != n {
		t.Errorf("%d of %d processes are frozen, want 5", stopped, n)
	}
	setFaults(machine.Faults{})
	if n, stopped := states(); n != 5 || stopped != 0 {
		t.Errorf("%d of %d processes are frozen still", stopped, n)
	}

	answer := func() <-chan error {
		c, err := net.Dial("unix", h.path(name, tpmDir, tpmSocket))
		if err != nil {
			t.Fatal(err)
		}
		done := make(chan error, 1)
		go func() {
			defer c.Close()
			_, err := c.Write(getRandom)
			if err == nil {
				_, err = io.ReadFull(c, make([]byte, 10))
			}
			done <- err
		}()
		return done
	}
	if err := <-answer(); err != nil {
		t.Errorf("the TPM of a machine that is well: %v", err)
	}
	setFaults(machine.Faults{TPMHangs: true})
	late := answer()
	select {
	case err := <-late:
		t.Errorf("a TPM that hangs has answered: %v", err)
	case <-time.After(100 * time.Millisecond):
	}
	setFaults(machine.Faults{Frozen: true, TPMHangs: true})
	setFaults(machine.Faults{})
	if err := <-late; err != nil {
		t.Errorf("a TPM that hung does not answer: %v", err)
	}
	setFaults(machine.Faults{TPMGone: true})
	setFaults(machine.Faults{})
	if err := <-answer(); err == nil {
		t.Error("a TPM that was gone came back before the machine was switched on again")
	}

	for _, a := range []machine.Faults{{Isolated: true}, {DiskFull: true}, {DiskReadOnly: true}, {Lost: []machine.Peer{{IP: ip}}}} {
		if err := h.SetFaults(ctx, name, a); !errors.Is(err, errors.ErrUnsupported) {
			t.Errorf("%+v: %v, want that it cannot be", a, err)
		}
	}
	if err := h.KillContainer(ctx, name, "operator"); err == nil {
		t.Error("an operator was killed that there is not")
	}
	if err := h.KillUnit(ctx, name, "kubelet"); err == nil {
		t.Error("a unit was killed that there is not")
	}
	agent := func() (pid int) {
		if err := eachProcess(h.path(name), func(id int, its, _ bool) {
			if args, err := os.ReadFile(fmt.Sprint("/proc/", id, "/cmdline")); its && err == nil && strings.Contains(string(args), "agent.sock") {
				pid = id
			}
		}); err != nil {
			t.Fatal(err)
		}
		return pid
	}
	before := agent()
	if err := h.KillUnit(ctx, name, "agent"); err != nil {
		t.Error(err)
	}
	if err := poll(ctx, func() (bool, error) { now := agent(); return now != 0 && now != before, nil }); err != nil {
		t.Errorf("an agent that was killed does not start again: %v", err)
	}

	setFaults(machine.Faults{Frozen: true})
	if err := h.Boot(ctx, name, nil); err != nil {
		t.Fatal(err)
	}
	if err := h.WaitReady(ctx, name); err != nil {
		t.Fatal(err)
	}
	if err := <-answer(); err != nil {
		t.Errorf("the TPM of a machine that was switched on again: %v", err)
	}
}
