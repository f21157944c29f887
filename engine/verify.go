package engine

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"time"

	"constellation/engine/atls"
	"constellation/engine/attestation"
	"constellation/engine/cloud"
	"constellation/engine/cloud/providers"
	"constellation/engine/cluster"
	"constellation/engine/plan"
	"constellation/engine/workspace"
)

// Verifier is what Verify needs of a cluster besides [Cluster].
type Verifier interface {
	// JoinServices returns one entry for each control plane, sorted by node.
	JoinServices(context.Context) ([]cluster.JoinService, error)
	// DialJoinService connects to the attested TLS of a join service. The path to it need not be trusted.
	DialJoinService(context.Context, cluster.JoinService) (net.Conn, error)
}

// Verification is what fresh evidence of the control planes states. It is the JSON output of `verify`.
type Verification struct {
	Schema  string    `json:"schema"`
	Cluster string    `json:"cluster"`
	Time    time.Time `json:"time"`
	// Variant is that of the evidence.
	Variant string `json:"variant"`
	// Simulated says that the machines only do as machines would, NotAttested that no hardware vouches for some.
	Simulated   bool `json:"simulated,omitempty"`
	NotAttested bool `json:"notAttested,omitempty"`
	// Measured says that registers are compared with the configuration.
	Measured bool `json:"measured"`
	// Verified says that the evidence of all control planes was accepted.
	Verified bool              `json:"verified"`
	Machines []VerifiedMachine `json:"machines"`
}

// Results of a VerifiedMachine.
const (
	Verified    = "verified"
	Refused     = "refused"
	NotVerified = "not-verified" // its evidence could not be had
)

// VerifiedMachine is a control plane.
type VerifiedMachine struct {
	Node   string `json:"node"`
	Result string `json:"result"`
	// Reason and Remedy say why the result is not Verified.
	Reason string `json:"reason,omitempty"`
	Remedy string `json:"remedy,omitempty"`

	ProviderID string `json:"providerID,omitempty"`
	IP         string `json:"ip,omitempty"`
	// Attested is whether a TPM vouches for the registers.
	Attested bool `json:"attested"`
	// SecureBoot is on or off; empty if the evidence does not prove it.
	SecureBoot string `json:"secureBoot,omitempty"`
	// Certifier is the certificate of the machine by the certifier of the cluster; nil: it shows none that is known.
	Certifier *CertifiedBy `json:"certifier,omitempty"`
	// WithoutAPI says that this certificate took the place of the cloud's API, which did not answer.
	WithoutAPI bool `json:"withoutAPI,omitempty"`
	// Registers are the SHA-256 registers in hex, by index.
	Registers map[uint32]string `json:"registers,omitempty"`
	// Warnings name registers that differ from a measurement that only warns.
	Warnings []string `json:"warnings,omitempty"`
}

const (
	verifyLimit  = 20 * time.Second // for one machine
	verifyAtOnce = 4
)

// Verify has the join service of each control plane make fresh evidence, and judges it by configuration and state alone. Of
// the cluster's own data, only the list of control planes counts. Workers make no evidence after they joined.
// The error is about the workspace or the cluster.
func (e *Engine) Verify(ctx context.Context) (Verification, error) {
	const op = "verify the cluster"
	c, s, err := e.ws.Load()
	if errors.Is(err, workspace.ErrAdopted) || err == nil && s.Adopted() {
		return Verification{}, &plan.Error{Op: op, Err: errors.New("it was adopted: its machines make no evidence"), Remedy: "use this command for clusters that `constellation init` made", Exit: plan.ExitUsage}
	}
	if err != nil {
		return Verification{}, err
	}
	if err := e.ws.OnMachines("verify"); err != nil { // hollow machines
		return Verification{}, err
	}
	from, v, err := memberValidator(c, s)
	if err != nil {
		return Verification{}, err
	}
	judges := verifiers{api: v, advice: c.Advice()}
	if judges.by, err = e.certifierOf(s); err == nil {
		judges.certifier, err = judgeWith(c, s, judges.by)
	}
	if err != nil {
		return Verification{}, err
	}
	out := Verification{
		Schema: plan.Schema, Cluster: c.Name, Time: e.now().UTC(), Variant: string(from.Attestation.Variant), Simulated: s.Simulated(), NotAttested: s.NotAttested(),
		Measured: !from.Attestation.Unmeasured,
	}
	err = e.onCluster(ctx, op, func(_ context.Context, k Cluster) error { // with limits of its own
		limited, cancel := context.WithTimeout(ctx, e.limits.api)
		defer cancel()
		services, ok := k.(Verifier)
		if !ok {
			return errors.New("this connection reaches no join services")
		}
		list, err := services.JoinServices(limited)
		if err != nil {
			return err
		}
		if len(list) == 0 {
			return errors.New("the cluster lists no control plane")
		}
		out.Machines = make([]VerifiedMachine, len(list))
		slots := make(chan struct{}, verifyAtOnce)
		var all sync.WaitGroup
		for n, one := range list {
			all.Go(func() {
				slots <- struct{}{}
				defer func() { <-slots }()
				out.Machines[n] = verifyOne(ctx, services, one, judges)
			})
		}
		all.Wait()
		return ctx.Err()
	})
	if err != nil {
		return Verification{}, err
	}
	out.Verified = !slices.ContainsFunc(out.Machines, func(m VerifiedMachine) bool { return m.Result != Verified })
	return out, nil
}

// memberValidator returns what judges control planes of the cluster, and the provider of its machines.
func memberValidator(c *workspace.Config, s *workspace.State) (providers.Provider, attestation.Validator, error) {
	judge, from, err := judgeOf(c, s, nil)
	if err != nil {
		return from, nil, err
	}
	if len(s.ClusterValues.ClusterID) == 0 {
		return from, nil, &plan.Error{Op: "read " + workspace.StateFile, Err: errors.New("it has no ID of a cluster"), Remedy: "run `constellation init`, or restore the file from a backup", Exit: plan.ExitUsage}
	}
	return from, judge(attestation.PCR15ClusterID(s.ClusterValues.ClusterID)), nil
}

// verifiers judge control planes.
type verifiers struct {
	api attestation.Validator
	// certifier is for clouds whose API does not answer. Nil: the cluster has no certifier.
	certifier attestation.Validator
	by        *certifierOf
	advice    providers.Advice
}

// verifyOne judges one control plane. The API of the cloud comes first.
func verifyOne(ctx context.Context, k Verifier, s cluster.JoinService, v verifiers) VerifiedMachine {
	out, err := verifyBy(ctx, k, s, v.api, v)
	if v.certifier == nil || !errors.Is(err, cloud.ErrDenied) && !errors.Is(err, cloud.ErrUnavailable) && !errors.Is(err, cloud.ErrThrottled) {
		return out
	}
	if second, err := verifyBy(ctx, k, s, v.certifier, v); err == nil && second.Result == Verified {
		second.WithoutAPI = true
		return second
	}
	return out
}

// verifyBy judges one control plane with one validator.
func verifyBy(ctx context.Context, k Verifier, s cluster.JoinService, judge attestation.Validator, v verifiers) (VerifiedMachine, error) {
	ctx, cancel := context.WithTimeout(ctx, verifyLimit)
	defer cancel()
	out := VerifiedMachine{Node: s.Node, Result: NotVerified}
	if s.Problem != "" {
		out.Reason, out.Remedy = s.Problem, "`kubectl -n constellation-system get pods -o wide` shows the pods of the join service"
		return out, nil
	}
	conn, err := k.DialJoinService(ctx, s)
	if err == nil {
		var st attestation.Statement
		if st, err = atls.Inspect(ctx, atls.PurposeJoin, judge, conn); err == nil && st.Identity.Name != s.Node {
			err = fmt.Errorf("%w: it is of %s, which answered in the place of %s", attestation.ErrIdentity, st.Identity.Name, s.Node)
		}
		if err == nil {
			out = verified(out, st)
			out.Certifier = v.by.certified(st.OfCertifier)
			return out, nil
		}
	}
	out.Reason = err.Error()
	out.Result, out.Remedy = whyNotVerified(err, v.advice)
	return out, err
}

// verified fills in what a statement says.
func verified(out VerifiedMachine, st attestation.Statement) VerifiedMachine {
	out.Result, out.ProviderID, out.IP = Verified, st.Identity.ProviderID, st.Identity.IP.String()
	out.Attested, out.SecureBoot, out.Warnings = st.Attested, st.SecureBoot, st.Warnings
	out.Registers = make(map[uint32]string, len(st.PCRs))
	for i, b := range st.PCRs {
		out.Registers[i] = hex.EncodeToString(b)
	}
	return out
}

// whyNotVerified returns the result of an error, and what can be done.
func whyNotVerified(err error, a providers.Advice) (result, remedy string) {
	switch {
	case errors.Is(err, attestation.ErrMeasurement):
		return Refused, "if an upgrade to another image runs, repeat the command at its end; after `upgrade apply --to RELEASE`, run `constellation upgrade check --to RELEASE --write-config`; otherwise find out who changed the machine, and replace it"
	case errors.Is(err, attestation.ErrTrust):
		return Refused, "compare the trust roots in " + workspace.ConfigFile + " with those of " + a.Cloud
	case errors.Is(err, attestation.ErrMember), errors.Is(err, attestation.ErrIdentity), errors.Is(err, attestation.ErrQuote):
		return Refused, "something else answers in the place of this control plane: find out what, and run `constellation machine revoke`"
	case errors.Is(err, attestation.ErrDocument):
		return Refused, "its join service makes other evidence than " + a.Cloud + " has: is it of this cluster?"
	case errors.Is(err, cloud.ErrDenied):
		return NotVerified, a.Denied
	case errors.Is(err, cloud.ErrUnavailable), errors.Is(err, cloud.ErrThrottled):
		return NotVerified, a.Unreachable
	case errors.Is(err, cluster.ErrForbidden):
		return NotVerified, "use a kubeconfig whose user may create pods/portforward in constellation-system"
	}
	return NotVerified, "run the same command again; the log of the join service names the reason if it cannot make evidence"
}
