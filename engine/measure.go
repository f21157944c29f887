package engine

import (
	"context"
	"encoding/hex"
	"errors"
	"time"

	"constellation/engine/attestation"
	"constellation/engine/cloud/providers"
	"constellation/engine/plan"
	"constellation/engine/workspace"
)

// MeasuredMachine is what the first control plane booted. It is the JSON output of `config measure`.
type MeasuredMachine struct {
	Schema     string `json:"schema"`
	Name       string `json:"name"`
	ProviderID string `json:"providerID"`
	// SecureBoot is on or off; empty if the evidence does not prove it.
	SecureBoot string `json:"secureBoot,omitempty"`
	// Registers are the SHA-256 registers in hex, by index.
	Registers map[uint32]string `json:"registers"`
	// Unknown are those that have no value in the configuration.
	Unknown []uint32 `json:"unknown"`
	// Written says that the configuration has them now.
	Written bool `json:"written"`
}

// measureLimit bounds one connection to the first machine.
const measureLimit = 20 * time.Second

// Measure reads the registers of an unused control plane at the init endpoint. All of its evidence is judged except the
// registers whose values are not known. With write, those are written to the configuration: from then on, machines must have
// booted what this one did.
func (e *Engine) Measure(ctx context.Context, write bool) (MeasuredMachine, error) {
	const op = "measure the first machine"
	c, unknown, err := e.ws.Unmeasured()
	if err != nil {
		return MeasuredMachine{}, err
	}
	s, err := e.ws.State()
	if err != nil {
		return MeasuredMachine{}, err
	}
	usage := func(reason, remedy string) (MeasuredMachine, error) {
		return MeasuredMachine{}, &plan.Error{Op: op, Err: errors.New(reason), Remedy: remedy, Exit: plan.ExitUsage}
	}
	from, known := providers.Named(c.Provider.Name)
	switch {
	case !known || s.Infrastructure.Provider != c.Provider.Name:
		return usage("state and configuration are of different providers", "put the files of one cluster back together")
	case from.Attestation.Unmeasured || from.NoJoin:
		return usage("machines of provider "+c.Provider.Name+" are not measured", "run `constellation init`, which needs no measurements")
	case len(s.ClusterValues.InitNode) > 0:
		return usage("the first machine was chosen already, and only an unused one is measured", "`constellation verify -o json` shows the registers of control planes")
	case write && len(unknown) == 0:
		return MeasuredMachine{}, &plan.Error{Op: "the configuration has a value for each register, and nothing was written", Remedy: "edit attestation.tpm2.measurements to change one", Exit: plan.ExitNothing}
	}
	if err := e.ws.OnMachines("config measure"); err != nil { // hollow machines
		return MeasuredMachine{}, err
	}
	st, err := firstStatement(ctx, c, s)
	if err != nil {
		return MeasuredMachine{}, err
	}
	out := MeasuredMachine{
		Schema: plan.Schema, Name: st.Identity.Name, ProviderID: st.Identity.ProviderID, SecureBoot: st.SecureBoot, Registers: make(map[uint32]string, len(st.PCRs)), Unknown: unknown,
	}
	for i, b := range st.PCRs {
		out.Registers[i] = hex.EncodeToString(b)
	}
	if !write {
		return out, nil
	}
	out.Written = true
	return out, e.ws.WriteMeasurements(unknown, out.Registers)
}

// firstStatement returns what evidence of an unused control plane states.
func firstStatement(ctx context.Context, c *workspace.Config, s *workspace.State) (st attestation.Statement, err error) {
	judge, _, err := judgeOf(c, s, nil)
	if err != nil {
		return st, err
	}
	ctx, cancel := context.WithTimeout(ctx, measureLimit)
	defer cancel()
	link, err := dialer{s.Infrastructure.InitEndpoint, judge(attestation.PCR15Zero()), func(got attestation.Statement) error { st = got; return nil }}.dial(ctx)
	if err != nil {
		e, again := dialError(s.Infrastructure.InitEndpoint, c.Advice(), err)
		if again && e.Remedy == "" {
			e.Remedy = "check that a machine is up: " + c.Advice().Failed + ". Then run the same command again"
		}
		return st, e
	}
	return st, link.Close()
}
