package simulated

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"constellation/engine/sandbox/machine"
)

// answerWithin is how long a machine that is not frozen may take to answer its host.
const answerWithin = 5 * time.Second

// SetFaults injects the faults that are possible for processes of one user on one loopback
// interface: a frozen machine, or a failing TPM. Network and disk faults are not possible; then the
// error wraps [errors.ErrUnsupported].
func (h *Host) SetFaults(ctx context.Context, name string, a machine.Faults) error {
	fail := func(err error) error { return fmt.Errorf("set faults of simulated machine %s: %w", name, err) }
	if a.Isolated || len(a.Lost) > 0 || a.DiskFull || a.DiskReadOnly || a.FailsAsDisk() {
		return fail(fmt.Errorf("%w: it has neither a cable nor a disk of its own", errors.ErrUnsupported))
	}
	dir, pid := h.path(name), 0
	if err := readPID(dir, &pid); err != nil {
		return fail(err)
	}
	// A frozen machine cannot receive messages; thaw it first.
	if err := thaw(dir, pid); err != nil {
		return fail(err)
	}
	fault := tpmAnswers
	switch {
	case a.TPMGone:
		fault = tpmGone
	case a.TPMHangs:
		fault = tpmHangs
	}
	if err := h.ask(ctx, name, "tpm/"+string(fault)); err != nil {
		return fail(err)
	}
	if !a.Frozen {
		return nil
	}
	if err := freeze(ctx, dir, pid); err != nil {
		return fail(err)
	}
	return nil
}

// KillContainer kills the process of a container of any pod on a machine; its kubelet
// stand-in restarts it. If no such container runs, it returns an error.
func (h *Host) KillContainer(ctx context.Context, name, container string) error {
	if err := h.ask(ctx, name, "kill/"+container); err != nil {
		return fmt.Errorf("kill %s on simulated machine %s: %w", container, name, err)
	}
	return nil
}

// KillUnit kills the process of a unit on a machine, "agent" or "bootstrapper", which restarts as
// by systemd. If it does not run, it returns an error.
func (h *Host) KillUnit(ctx context.Context, name, unit string) error {
	if err := h.ask(ctx, name, "kill-unit/"+unit); err != nil {
		return fmt.Errorf("kill %s on simulated machine %s: %w", unit, name, err)
	}
	return nil
}

func (h *Host) ask(ctx context.Context, name, what string) error {
	ctx, cancel := context.WithTimeout(ctx, answerWithin)
	defer cancel()
	return ask(ctx, h.path(name), what)
}

// kill kills the process of every container with this name, and reports whether there was one.
func (p *pods) kill(name string) (killed bool) {
	for _, w := range p.list() {
		for _, c := range w.containers {
			c.mu.Lock()
			if c.spec.Name == name && c.running && c.process != nil {
				killed = c.process.cmd.Process.Kill() == nil || killed
			}
			c.mu.Unlock()
		}
	}
	return killed
}

// tpmFault is the fault state of a TPM.
type tpmFault string

const (
	tpmAnswers tpmFault = "answers"
	tpmHangs   tpmFault = "hangs"
	tpmGone    tpmFault = "gone" // until the machine is switched on again
)

// tpmState holds the fault state of a TPM, which changes while it serves.
type tpmState struct {
	mu      sync.Mutex
	changed *sync.Cond // by mu
	fault   tpmFault
}

func newTPMState() *tpmState {
	t := &tpmState{fault: tpmAnswers}
	t.changed = sync.NewCond(&t.mu)
	return t
}

// set changes the fault state; false if there is no such state.
func (t *tpmState) set(fault tpmFault) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case !slices.Contains([]tpmFault{tpmAnswers, tpmHangs, tpmGone}, fault):
		return false
	case t.fault != tpmGone:
		t.fault = fault
		t.changed.Broadcast()
	}
	return true
}

// wait blocks while the TPM hangs. It returns an error if the TPM is gone.
func (t *tpmState) wait() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	for t.fault == tpmHangs {
		t.changed.Wait()
	}
	if t.fault == tpmGone {
		return errors.New("there is no TPM")
	}
	return nil
}
