package bootstrapper

import (
	"bytes"
	"context"
	"crypto/x509"
	"errors"
	"strings"
	"testing"

	"constellation/engine/attestation"
	"constellation/engine/cloud"
	"constellation/engine/cloud/gcp/attest/attesttest"
	"constellation/engine/cloud/gcp/attest/attesttest/lab"
	"constellation/engine/cloud/gcp/gcptest"
)

// behindBalancer is the metadata of a machine whose account may not list others: control planes are found by the load
// balancer alone.
type behindBalancer struct{ Metadata }

// Peers implements Metadata.
func (behindBalancer) Peers(context.Context) ([]cloud.Instance, error) { return nil, cloud.ErrDenied }

// atGoogle makes r's machine one of an emulated Google Cloud, whose evidence and whose judgement are those of Google's
// machines. A join service judges its evidence as service does.
func (r *rig) atGoogle(p *lab.Project, v, service *lab.VM) {
	r.t.Helper()
	r.cloud.instance = v.Instance()
	r.m.Metadata, r.m.TPM, r.m.registers = behindBalancer{v.View}, v.TPM, nil
	r.m.Issuer, r.m.Validator, r.m.Roots = v.Issuer(), v.Method().Validator, p.Roots()
	r.judge = func(rule attestation.PCR15) attestation.Validator {
		return service.Method().Validator(p.Roots(), lab.Measurements(), attestation.Options{PCR15: rule, UID: gcptest.UID})
	}
}

// TestJoinAtGoogle has a machine that joins by Google's evidence, and one in each place that its bootstrapper must refuse.
func TestJoinAtGoogle(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name string
		// service changes the join service's machine, or its issuer.
		role    cloud.Role
		uid     string
		change  func(*attesttest.Machine, *x509.Certificate)
		sandbox bool
		want    string // in the log; empty: the machine joins
	}{
		{name: "a control plane", role: cloud.ControlPlane, uid: gcptest.UID},
		{name: "a worker that poses as the join service", role: cloud.Worker, uid: gcptest.UID, want: "is a worker, expected a control-plane"},
		{name: "a control plane of another cluster", role: cloud.ControlPlane, uid: "another-cluster", want: "the cluster has no machine"},
		{
			name: "a control plane of another project", role: cloud.ControlPlane, uid: gcptest.UID, want: "is in the project",
			change: func(m *attesttest.Machine, _ *x509.Certificate) { m.Project = "another-project" },
		},
		{
			name: "a former control plane", role: cloud.ControlPlane, uid: gcptest.UID, want: "the cluster has no machine",
			change: func(m *attesttest.Machine, _ *x509.Certificate) { m.Number-- },
		},
		{name: "a control plane of a sandbox", role: cloud.ControlPlane, uid: gcptest.UID, sandbox: true, want: "no evidence of variant vendor-tpm2"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			r, p := newRig(t, cloud.Worker), lab.NewProject(t)
			host := p.Start(p.Group("services", tt.role, tt.uid), tt.change)
			host.Join(clusterB)
			judge := host
			if tt.uid != gcptest.UID || tt.change != nil { // the joiner meets its evidence before its judgement
				judge = p.Start(p.Group("control-planes", cloud.ControlPlane, gcptest.UID), nil)
			}
			v := p.Start(p.Group("workers", cloud.Worker, gcptest.UID), nil)
			r.atGoogle(p, v, judge)
			s := r.serveJoins(func(s *service) {
				if s.issuer = host.Issuer(); tt.sandbox {
					s.issuer = s.member
				}
			})
			x := r.start()
			if tt.want != "" {
				wait(t, tt.want, func() bool { return strings.Contains(r.logged(), tt.want) })
				if s.asked() != 0 {
					t.Error("a ticket was requested")
				}
				x.stop(t)
				return
			}
			if err := x.end(t); err != nil {
				t.Fatalf("%v\n%s", err, r.logged())
			}
			if h, _ := r.holder(); h.State != member || h.Node != v.Certified.Name || !bytes.Equal(r.register(), attestation.ClusterIDPCR(clusterB)) {
				t.Errorf("holder %+v, register 15 is %x", h, r.register())
			}
		})
	}
}

// TestMachineAtGoogleJudgesItselfFirst has machines whose bootstrapper ends before it speaks to anybody.
func TestMachineAtGoogleJudgesItselfFirst(t *testing.T) {
	t.Parallel()
	p := lab.NewProject(t)
	cp, workers := p.Group("control-planes", cloud.ControlPlane, gcptest.UID), p.Group("workers", cloud.Worker, gcptest.UID)
	service, v := p.Start(cp, nil), p.Start(workers, nil)
	lie := func(from, to string) func(*rig) {
		return func(r *rig) {
			view := p.ViewOf(lab.Rewrite(p.MetadataOf(v.Certified.Name), from, to))
			r.m.Metadata, r.m.Validator = view, p.MethodOf(view).Validator
		}
	}
	ca := newCA(t)
	for _, tt := range []struct {
		name   string
		change func(*rig)
		is     error
		want   string
	}{
		{name: "the metadata server names another cluster", change: lie(gcptest.UID, "fedcba9876543210"), is: attestation.ErrIdentity, want: "the cluster has no machine"},
		{name: "the metadata server names another project", change: lie(gcptest.Project, "another-project"), is: attestation.ErrIdentity, want: "is in the project"},
		{name: "the trust roots are others", change: func(r *rig) { r.m.Roots = ca.Roots() }, is: attestation.ErrTrust, want: "compare attestation.tpm2.trustRoots"},
		{name: "there are no trust roots", change: func(r *rig) { r.m.Roots = nil }, is: attestation.ErrTrust},
		{name: "the account lacks the permission", change: func(*rig) { p.Revoke("compute.instances.get") }, is: cloud.ErrDenied, want: "compute.instances.get"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := newRig(t, cloud.Worker)
			r.atGoogle(p, v, service)
			tt.change(r)
			defer p.Grant("compute.instances.get")
			if err := r.start().end(t); !errors.Is(err, tt.is) || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %v, want %v with %q", err, tt.is, tt.want)
			}
			if _, held := r.holder(); held {
				t.Error("the machine is claimed")
			}
		})
	}
}
