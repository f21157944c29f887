package joinservice

import (
	"context"
	"crypto/x509"
	"encoding/json"
	"errors"
	"net"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"

	"constellation/engine/atls"
	"constellation/engine/attestation"
	"constellation/engine/cloud"
	"constellation/engine/cloud/gcp"
	"constellation/engine/cloud/gcp/attest"
	"constellation/engine/cloud/gcp/attest/attesttest"
	"constellation/engine/cloud/gcp/attest/attesttest/lab"
	"constellation/engine/cloud/gcp/gcptest"
	"constellation/joinservice/joinproto"
)

// project is a cluster of machines of an emulated Google Cloud. The join service on one of them judges by Google's method,
// and its evidence is made with an emulated TPM.
type project struct {
	*site
	p                      *lab.Project
	workers, controlPlanes string // groups
	service                *lab.VM
	r                      *replica
}

func newProject(t *testing.T) *project {
	t.Helper()
	g := prepareProject(t)
	g.r = g.run(g.service.Issuer(), "127.0.0.1:0")
	return g
}

// prepareProject is newProject without the join service.
func prepareProject(t *testing.T) *project {
	t.Helper()
	g := &project{site: newSite(t), p: lab.NewProject(t)}
	g.workers, g.controlPlanes = g.p.Group("workers", cloud.Worker, gcptest.UID), g.p.Group("control-planes", cloud.ControlPlane, gcptest.UID)
	g.roots = string(g.p.Authority.RootPEM())
	g.rawJoinConfig(vendorDemand(t), nil)
	g.service = g.p.Start(g.controlPlanes, nil)
	g.service.Join(clusterID)
	g.method, g.list = g.service.Method(), g.service.View
	return g
}

// vendorDemand has the attestation requirements of the project's machines.
func vendorDemand(t *testing.T) string {
	t.Helper()
	b, err := json.Marshal(map[string]any{"variant": attestation.VendorTPM2, "measurements": lab.Measurements()})
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// ofService is what machines demand of a join service.
func ofService(v *lab.VM, roots *x509.CertPool) attestation.Validator {
	return v.Method().Validator(roots, lab.Measurements(), attestation.Options{PCR15: attestation.PCR15Member(), Role: cloud.ControlPlane, UID: gcptest.UID})
}

// sandbox is the evidence of a sandbox that names a machine.
func (g *project) sandbox(v *lab.VM, member []byte) attestation.Issuer {
	id := v.Identity()
	id.Incarnation = "" // its certificates have none
	return g.issuer(id, lab.Boot(), member)
}

// knows is an API with one machine, which needs no permission.
type knows struct{ one cloud.Instance }

// Instance implements attest.Instances.
func (k knows) Instance(context.Context, string) (cloud.Instance, error) { return k.one, nil }

// joins requests a ticket for v with the evidence of an issuer. It judges the join service as a machine of the cluster does,
// whatever v belongs to and may do.
func (g *project) joins(t *testing.T, addr string, v *lab.VM, issuer attestation.Issuer) (*joinproto.IssueJoinTicketResponse, error) {
	t.Helper()
	known := attest.Method(attest.Config{Cluster: func(context.Context) (attest.Cluster, error) {
		return attest.Cluster{Project: gcptest.Project, UID: gcptest.UID, Instances: knows{g.service.Instance()}}, nil
	}})
	trusting := known.Validator(g.p.Roots(), lab.Measurements(), attestation.Options{PCR15: attestation.PCR15Member(), Role: cloud.ControlPlane, UID: gcptest.UID})
	conn, err := grpc.NewClient("passthrough:///"+addr, grpc.WithTransportCredentials(atls.NewClient(atls.Config{
		Purpose: atls.PurposeJoin, Issuer: issuer, Validator: func() attestation.Validator { return trusting },
	})))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	return request(t, joinproto.NewJoinServiceClient(conn), v.Identity(), issuer)
}

// wantRefused fails the test unless no ticket was issued, and the log of the join service has each of logged.
func (g *project) wantRefused(t *testing.T, got *joinproto.IssueJoinTicketResponse, err error, logged ...string) {
	t.Helper()
	if got != nil || err == nil {
		t.Fatal("a ticket was issued")
	}
	for _, l := range logged {
		eventually(t, "the reason is logged: "+l, func() (string, bool) { return g.r.log.String(), strings.Contains(g.r.log.String(), l) })
	}
	g.r.refusals.mu.Lock() // the log is limited to five of them a second
	g.r.refusals.n = 0
	g.r.refusals.mu.Unlock()
}

// TestJoinAttacksAtGoogle has a join service of Google's method, which judges machines by the emulated API with the account
// of its own machine.
func TestJoinAttacksAtGoogle(t *testing.T) {
	t.Parallel()
	g := newProject(t)
	t.Run("a worker", func(t *testing.T) {
		v := g.p.Start(g.workers, nil)
		got, err := g.joins(t, g.r.addr, v, v.Issuer())
		if err != nil || got.GetToken() == "" || len(got.GetControlPlaneFiles()) > 0 {
			t.Fatalf("ticket with %d files of control planes, %v\n%s", len(got.GetControlPlaneFiles()), err, g.r.log)
		}
		if !strings.Contains(g.r.log.String(), `"provider_id":"`+v.Instance().ProviderID+`"`) {
			t.Error("the log lacks the provider ID")
		}
	})
	t.Run("a control plane", func(t *testing.T) {
		v := g.p.Start(g.controlPlanes, nil)
		got, err := g.joins(t, g.r.addr, v, v.Issuer())
		if err != nil || len(got.GetControlPlaneFiles()) == 0 {
			t.Errorf("ticket with %d files of control planes, %v", len(got.GetControlPlaneFiles()), err)
		}
	})
	for _, attack := range []struct {
		name   string
		change func(*attesttest.Machine, *x509.Certificate) // of the machine's certificate
		uid    string                                       // of the cluster of its group; empty: this one
		issuer func(*testing.T, *lab.VM) attestation.Issuer // nil: that of the machine
		logged []string
	}{
		{
			name: "a machine of another project", change: func(m *attesttest.Machine, _ *x509.Certificate) { m.Project = "another-project" },
			logged: []string{"connection refused", `is in the project \"another-project\", the cluster in \"demo-project\"`},
		},
		{name: "a machine of another cluster in the project", uid: "another-cluster", logged: []string{"connection refused", "the cluster has no machine gce://demo-project/europe-west3-a/others-"}},
		{
			name: "a machine under the number of another one", change: func(m *attesttest.Machine, _ *x509.Certificate) { m.Number++ },
			logged: []string{"connection refused", "the cluster has no machine"},
		},
		{
			name: "a machine under a name that the cluster does not have", change: func(m *attesttest.Machine, _ *x509.Certificate) { m.Name = "workers-unknown" },
			logged: []string{"connection refused", "the cluster has no machine gce://demo-project/europe-west3-a/workers-unknown"},
		},
		{
			name: "an expired certificate", change: func(_ *attesttest.Machine, c *x509.Certificate) { c.NotAfter = time.Now().Add(-time.Minute) },
			logged: []string{"connection refused", "certificate has expired or is not yet valid", "compare the clock"},
		},
		{
			name: "a certificate of the future", change: func(_ *attesttest.Machine, c *x509.Certificate) { c.NotBefore = time.Now().Add(time.Hour) },
			logged: []string{"connection refused", "certificate has expired or is not yet valid"},
		},
		{
			name: "evidence of another connection", issuer: func(t *testing.T, v *lab.VM) attestation.Issuer {
				r := &replayed{Issuer: v.Issuer()}
				if _, err := g.joins(t, g.r.addr, v, r); err != nil {
					t.Fatal(err)
				}
				return r
			}, logged: []string{"connection refused", "it was made for another connection"},
		},
		{
			name: "evidence of a sandbox", issuer: func(_ *testing.T, v *lab.VM) attestation.Issuer { return g.sandbox(v, nil) },
			logged: []string{"connection refused", "no evidence of variant vendor-tpm2"},
		},
		{
			name: "evidence of a sandbox that emulates Google Cloud", issuer: func(_ *testing.T, v *lab.VM) attestation.Issuer {
				return attest.Emulated(attest.Config{}).Issuer(v.TPM)
			},
			logged: []string{"connection refused", "no evidence of variant vendor-tpm2"},
		},
		{
			name: "another boot loader", issuer: func(_ *testing.T, v *lab.VM) attestation.Issuer {
				v.Measure(4, "another boot loader")
				return v.Issuer()
			}, logged: []string{"connection refused", "PCR 4"},
		},
		{
			name: "a member of another cluster", issuer: func(_ *testing.T, v *lab.VM) attestation.Issuer {
				v.Join([]byte("another cluster"))
				return v.Issuer()
			}, logged: []string{"connection refused", "belongs to"},
		},
	} {
		t.Run(attack.name, func(t *testing.T) {
			group := g.workers
			if attack.uid != "" {
				group = g.p.Group("others", cloud.Worker, attack.uid)
			}
			v := g.p.Start(group, attack.change)
			issuer := v.Issuer()
			if attack.issuer != nil {
				issuer = attack.issuer(t, v)
			}
			before := len(g.r.log.String())
			got, err := g.joins(t, g.r.addr, v, issuer)
			g.wantRefused(t, got, err)
			for _, l := range attack.logged {
				eventually(t, "the reason is logged: "+l, func() (string, bool) { s := g.r.log.String()[before:]; return s, strings.Contains(s, l) })
			}
		})
	}
	t.Run("a deleted machine whose name was reused", func(t *testing.T) {
		v := g.p.Start(g.workers, nil)
		g.p.Kill(v.Certified.Name)
		eventually(t, "the machine is made again", func() (string, bool) {
			i, err := v.View.Self(t.Context())
			return i.Incarnation, err == nil && i.Key() != v.Key
		})
		got, err := g.joins(t, g.r.addr, v, v.Issuer())
		_, number := cloud.SplitKey(v.Key)
		g.wantRefused(t, got, err, "the cluster has no machine "+v.Instance().ProviderID+" with the number "+number)
	})
	t.Run("the join service has no permission", func(t *testing.T) {
		v := g.p.Start(g.workers, nil)
		g.p.Revoke("compute.instances.get")
		got, err := g.joins(t, g.r.addr, v, v.Issuer())
		g.wantRefused(t, got, err, "grant the permission compute.instances.get to the account that sent the request")
		g.p.Grant("compute.instances.get")
		if _, err := g.joins(t, g.r.addr, v, v.Issuer()); err != nil {
			t.Errorf("with the permission: %v", err)
		}
	})
	t.Run("a worker poses as the join service", func(t *testing.T) {
		liar, v := g.p.Start(g.workers, nil), g.p.Start(g.workers, nil)
		liar.Join(clusterID)
		if err := meets(t, v, g, liar.Issuer()); !errors.Is(err, attestation.ErrIdentity) || !strings.Contains(err.Error(), "is a worker, expected a control-plane") {
			t.Errorf("a worker: %v", err)
		}
		if err := meets(t, v, g, g.service.Issuer()); err != nil {
			t.Errorf("a control plane: %v", err)
		}
		if err := meets(t, v, g, g.sandbox(g.service, clusterID)); !errors.Is(err, attestation.ErrDocument) {
			t.Errorf("a sandbox: %v", err)
		}
	})
}

// meets returns why v refuses a server with evidence of an issuer in the place of the join service; nil: it does not.
func meets(t *testing.T, v *lab.VM, g *project, issuer attestation.Issuer) error {
	t.Helper()
	x, y := net.Pipe()
	defer x.Close()
	defer y.Close()
	accepts := v.Method().Validator(g.p.Roots(), lab.Measurements(), attestation.Options{})
	done := make(chan struct{})
	go func() {
		defer close(done)
		_, _, err := atls.NewServer(atls.Config{Purpose: atls.PurposeJoin, Issuer: issuer, Validator: func() attestation.Validator { return accepts }}).ServerHandshake(y)
		if err != nil {
			_ = y.Close()
		}
	}()
	_, _, err := atls.NewClient(atls.Config{Purpose: atls.PurposeJoin, Issuer: v.Issuer(), Validator: func() attestation.Validator { return ofService(v, g.p.Roots()) }}).ClientHandshake(t.Context(), "", x)
	_ = x.Close()
	<-done
	return err
}

// TestDriftAtGoogle has machines that booted something else than the measured one. The policy decides: an enforced register
// refuses them, one that only warns does not. The log names the machine and the registers that differ.
func TestDriftAtGoogle(t *testing.T) {
	t.Parallel()
	g := newProject(t)
	demand := lab.Measurements()
	kernel := demand[9]
	kernel.WarnOnly = true
	demand[9] = kernel
	b, err := json.Marshal(map[string]any{"variant": attestation.VendorTPM2, "measurements": demand})
	if err != nil {
		t.Fatal(err)
	}
	loads := strings.Count(g.r.log.String(), "join-config loaded")
	g.rawJoinConfig(string(b), nil)
	eventually(t, "the policy is read", func() (string, bool) {
		return g.r.log.String(), strings.Count(g.r.log.String(), "join-config loaded") > loads
	})
	for _, tt := range []struct {
		name    string
		events  map[uint32]string
		refused bool
		logged  []string // with %s for the name of the machine
		not     string
	}{
		{name: "as measured", not: "measurement differed"},
		{name: "a register that warns", events: map[uint32]string{9: "an updated kernel"}, logged: []string{`"measurement differed"`, `"node":"%s"`, "PCR 9 (kernel and initrd) is "}},
		{name: "a register that is enforced", events: map[uint32]string{4: "another boot loader"}, refused: true, logged: []string{`"connection refused"`, "machine gce://demo-project/europe-west3-a/%s: ", "PCR 4 (boot loader) is "}, not: "PCR 9"},
		{name: "both", events: map[uint32]string{8: "another command line", 9: "an updated kernel"}, refused: true, logged: []string{"machine gce://demo-project/europe-west3-a/%s: ", "PCR 8 (kernel command line) is "}, not: "measurement differed"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			v := g.p.Start(g.workers, nil)
			for register, event := range tt.events {
				v.Measure(register, event)
			}
			before := len(g.r.log.String())
			got, err := g.joins(t, g.r.addr, v, v.Issuer())
			if refused := err != nil; refused != tt.refused || refused == (got.GetToken() != "") {
				t.Errorf("ticket %t, %v", got.GetToken() != "", err)
			}
			for _, l := range tt.logged {
				l = strings.ReplaceAll(l, "%s", v.Certified.Name)
				eventually(t, "it is logged: "+l, func() (string, bool) { s := g.r.log.String()[before:]; return s, strings.Contains(s, l) })
			}
			if s := g.r.log.String()[before:]; tt.not != "" && strings.Contains(s, tt.not) {
				t.Errorf("the log has %q:\n%s", tt.not, s)
			}
		})
	}
}

// TestDemandsAtGoogle has contents of join-config that a join service at Google must not use.
func TestDemandsAtGoogle(t *testing.T) {
	t.Parallel()
	p := lab.NewProject(t)
	cp, worker := p.Group("control-planes", cloud.ControlPlane, gcptest.UID), p.Group("workers", cloud.Worker, gcptest.UID)
	v := p.Start(cp, nil)
	v.Join(clusterID)
	data := func(demand string, roots []byte) map[string]string {
		return map[string]string{"attestationConfig": demand, "clusterID": strings.Repeat("07", 32), "trustRoots": string(roots)}
	}
	good := vendorDemand(t)
	snapshotOf := func(v *lab.VM, m attestation.Method, data map[string]string) error {
		_, err := newSnapshot(t.Context(), data, m.Issuer(v.TPM), m, nil)
		return err
	}
	if err := snapshotOf(v, v.Method(), data(good, p.Authority.RootPEM())); err != nil {
		t.Fatal(err)
	}
	lying := func(from, to string) *gcp.Machine {
		return p.ViewOf(lab.Rewrite(p.MetadataOf(v.Certified.Name), from, to))
	}
	stranger := p.Start(worker, nil)
	for _, tt := range []struct {
		name string
		err  error
		want string
	}{
		{name: "of a sandbox", err: snapshotOf(v, v.Method(), data(strings.Replace(good, "vendor-tpm2", "tpm2", 1), p.Authority.RootPEM())), want: `variant is "tpm2", want "vendor-tpm2"`},
		{name: "of Google at a sandbox", err: snapshotOf(v, attest.Emulated(attest.Config{}), data(good, p.Authority.RootPEM())), want: `variant is "vendor-tpm2", want "emulated-vendor-tpm2"`},
		{name: "without roots", err: snapshotOf(v, v.Method(), data(good, nil)), want: "there is no certificate"},
		{name: "with other roots", err: snapshotOf(v, v.Method(), data(good, attest.Roots())), want: "compare attestation.tpm2.trustRoots in the configuration with Google's roots"},
		{name: "a metadata server that names another project", err: snapshotOf(v, p.MethodOf(lying(gcptest.Project, "another-project")), data(good, p.Authority.RootPEM())), want: `is in the project "demo-project", the cluster in "another-project"`},
		{name: "a metadata server that names another cluster", err: snapshotOf(v, p.MethodOf(lying(gcptest.UID, "fedcba9876543210")), data(good, p.Authority.RootPEM())), want: "the cluster has no machine"},
		{name: "a machine that is no member", err: snapshotOf(stranger, stranger.Method(), data(good, p.Authority.RootPEM())), want: "attest this machine"},
	} {
		if tt.err == nil || !strings.Contains(tt.err.Error(), tt.want) {
			t.Errorf("%s: %v, want %q", tt.name, tt.err, tt.want)
		}
	}
}
