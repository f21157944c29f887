package engine

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"

	"constellation/engine/atls"
	"constellation/engine/attestation"
	"constellation/engine/attestation/attestationtest"
	"constellation/engine/attestation/certifier"
	"constellation/engine/attestation/certifier/signer"
	"constellation/engine/attestation/keyprocess"
	"constellation/engine/check"
	"constellation/engine/cloud"
	"constellation/engine/cloud/gcp"
	"constellation/engine/cloud/gcp/attest"
	"constellation/engine/cloud/gcp/attest/attesttest/lab"
	"constellation/engine/cloud/gcp/gcptest"
	"constellation/engine/cloud/providers"
	"constellation/engine/cloud/section"
	"constellation/engine/cluster"
	"constellation/engine/plan"
	"constellation/engine/workspace"
)

// TestInitJudgesMachinesAtGoogle has the first machine of a cluster at Google: its evidence is real, and the API is emulated.
func TestInitJudgesMachinesAtGoogle(t *testing.T) {
	p := lab.NewProject(t)
	entry, _ := providers.Named(gcp.Name)
	entry.Name = "gcplab"
	entry.Judge = func(state section.Values) attestation.Method {
		return attest.Method(attest.Config{Cluster: func(ctx context.Context) (attest.Cluster, error) {
			c := attest.Cluster{Project: state.Text("project"), UID: state.Text("uid")}
			instances, err := gcp.New(ctx, gcp.Options{Project: c.Project, UID: c.UID, Zones: state.List("zones"), HTTP: p.Client()})
			c.Instances = instances
			return c, err
		}})
	}
	defer providers.Register(entry)()
	clusterID := bytes.Repeat([]byte{7}, 32)
	c, s := &workspace.Config{}, &workspace.State{}
	c.Provider.Name = entry.Name
	c.Attestation.TPM2 = &workspace.TPM2Config{TrustRoots: string(p.Authority.RootPEM()), Measurements: lab.Measurements()}
	s.Infrastructure.UID, s.ClusterValues.ClusterID = gcptest.UID, clusterID
	s.Infrastructure.Section = section.Values{"project": gcptest.Project, "zones": gcptest.Zones, "uid": gcptest.UID}

	controlPlanes := p.Group("control-planes", cloud.ControlPlane, gcptest.UID)
	first, resumed, used := p.Start(controlPlanes, nil), p.Start(controlPlanes, nil), p.Start(controlPlanes, nil)
	resumed.Join(clusterID)
	used.Join([]byte("another cluster"))
	worker := p.Start(p.Group("workers", cloud.Worker, gcptest.UID), nil)
	other := p.Start(p.Group("others", cloud.ControlPlane, "another-cluster"), nil)
	changed := p.Start(controlPlanes, nil)
	changed.Measure(9, "another kernel")
	certPEM, keyPEM, err := attestationtest.CreateCA("sandbox")
	if err != nil {
		t.Fatal(err)
	}
	ca, err := attestationtest.ParseCA(certPEM, keyPEM)
	if err != nil {
		t.Fatal(err)
	}
	id := first.Identity()
	id.Incarnation = "" // certificates of sandboxes have none
	sandbox, err := attestationtest.NewSoftwareIssuer(ca, id, lab.Boot(), nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name   string
		issuer attestation.Issuer
		change func(*workspace.Config, *workspace.State)
		revoke string
		want   error // nil: accepted
		remedy string
	}{
		{name: "an unused control plane", issuer: first.Issuer()},
		{name: "a control plane that works for this init", issuer: resumed.Issuer()},
		{name: "a control plane of another cluster", issuer: used.Issuer(), want: attestation.ErrMember},
		{name: "a worker", issuer: worker.Issuer(), want: attestation.ErrIdentity, remedy: "not a control plane of"},
		{name: "a machine with another UID", issuer: other.Issuer(), want: attestation.ErrIdentity},
		{name: "another kernel", issuer: changed.Issuer(), want: attestation.ErrMeasurement},
		{name: "evidence of a sandbox", issuer: sandbox, want: attestation.ErrDocument},
		{
			name: "Google's roots, which did not certify it", issuer: first.Issuer(), want: attestation.ErrTrust, remedy: "trustRoots",
			change: func(c *workspace.Config, _ *workspace.State) { c.Attestation.TPM2.TrustRoots = string(attest.Roots()) },
		},
		{
			name: "a state of another project", issuer: first.Issuer(), want: attestation.ErrIdentity,
			change: func(_ *workspace.Config, s *workspace.State) {
				s.Infrastructure.Section = section.Values{"project": "another-project", "zones": gcptest.Zones, "uid": gcptest.UID}
			},
		},
		{name: "a user without the permission", issuer: first.Issuer(), revoke: "compute.instances.get", want: cloud.ErrDenied, remedy: "log in with `gcloud auth application-default login`"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if tt.revoke != "" {
				p.Revoke(tt.revoke)
				defer p.Grant(tt.revoke)
			}
			c, s := *c, *s
			tpm := *c.Attestation.TPM2
			c.Attestation.TPM2 = &tpm
			if tt.change != nil {
				tt.change(&c, &s)
			}
			v, err := initValidator(&c, &s)
			if err != nil {
				t.Fatal(err)
			}
			l, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			server := grpc.NewServer(grpc.Creds(atls.NewServer(atls.Config{Purpose: atls.PurposeInit, Issuer: tt.issuer})))
			go server.Serve(l)
			defer server.Stop()
			ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
			defer cancel()
			link, err := dialer{l.Addr().String(), v, func(attestation.Statement) error { return nil }}.dial(ctx)
			if err == nil {
				defer link.Close()
			}
			if tt.want == nil {
				if err != nil || link.machine.Role != cloud.ControlPlane || link.machine.UID != gcptest.UID || !link.attested {
					t.Errorf("got %+v, %v", link, err)
				}
				return
			}
			if !errors.Is(err, tt.want) {
				t.Fatalf("got %v, want %v", err, tt.want)
			}
			e, again := dialError(l.Addr().String(), providers.AdviceFor(gcp.Name, s.Infrastructure.Section), err)
			if again || e.Remedy == "" || !strings.Contains(e.Remedy, tt.remedy) {
				t.Errorf("again %t, %v, remedy %q, want %q", again, e, e.Remedy, tt.remedy)
			}
		})
	}
	// `constellation verify` judges members in the same way.
	_, v, err := memberValidator(c, s)
	if err != nil {
		t.Fatal(err)
	}
	for name, tt := range map[string]struct {
		m    *lab.VM
		want string
	}{"a control plane of the cluster": {m: resumed, want: Verified}, "an unused machine": {m: first, want: Refused}, "a machine of another cluster": {m: other, want: Refused}} {
		services := fakeServices{map[string]attestation.Issuer{"pod": tt.m.Issuer()}, atls.PurposeJoin, nil, v}
		got := verifyOne(t.Context(), services, cluster.JoinService{Node: tt.m.Certified.Name, Pod: "pod"}, verifiers{api: v, advice: providers.AdviceFor(gcp.Name, nil)})
		if got.Result != tt.want || tt.want == Verified && got.SecureBoot != attestation.SecureBootOn {
			t.Errorf("%s: %+v, want %s", name, got, tt.want)
		}
	}
	verifyByCertifier(t, p, c, s, resumed, v)
	e, again := dialError("192.0.2.1:9000", providers.AdviceFor(gcp.Name, nil), fmt.Errorf("read machine x: %w", cloud.ErrUnavailable))
	if !again || !strings.Contains(e.Error(), "read the first machine from project") {
		t.Errorf("an API that does not answer: again %t, %v", again, e)
	}
}

// certifiedBy returns the issuer of a control plane whose certifier has keys of a generation.
func certifiedBy(t *testing.T, m *lab.VM, judge attestation.Validator, clusterID []byte, owner *signer.Owner, generation uint32) attestation.Issuer {
	t.Helper()
	dir, nonce := t.TempDir(), []byte("nonce")
	issuer := m.Issuer().(*attestation.VendorIssuer)
	der, err := func() ([]byte, error) {
		k, err := owner.Keys(generation)
		if err != nil {
			return nil, err
		}
		b, err := k.Encode()
		if err == nil {
			err = signer.Store(t.Context(), dir, m.TPM, clusterID, b)
		}
		if err != nil {
			return nil, err
		}
		server, err := signer.Open(t.Context(), signer.Config{Dir: dir, TPM: m.TPM, ClusterID: clusterID})
		if err != nil {
			return nil, err
		}
		client := certifier.Client{Socket: filepath.Join(dir, "s")}
		l, err := keyprocess.Listen(t.Context(), client.Socket, nil)
		if err != nil {
			return nil, err
		}
		go func() { _ = server.Serve(t.Context(), l) }()
		doc, err := issuer.Issue(t.Context(), nonce)
		if err != nil {
			return nil, err
		}
		st, err := judge.Validate(t.Context(), doc, nonce)
		if err != nil {
			return nil, err
		}
		request, err := issuer.RequestCertificate(t.Context())
		if err != nil {
			return nil, err
		}
		begun, err := client.Begin(t.Context(), request)
		if err != nil {
			return nil, err
		}
		answer, err := issuer.AnswerChallenge(t.Context(), begun.Challenge)
		if err != nil {
			return nil, err
		}
		return begun.Finish(t.Context(), answer, st)
	}()
	if err == nil {
		err = issuer.UseCertificate(der)
	}
	if err != nil {
		t.Fatal(err)
	}
	return issuer
}

// verifyByCertifier verifies a control plane with a certificate of the first generation, while the API answers and while it does not.
func verifyByCertifier(t *testing.T, p *lab.Project, c *workspace.Config, s *workspace.State, m *lab.VM, api attestation.Validator) {
	t.Helper()
	owner := func(b byte) *signer.Owner {
		o, err := signer.NewOwner(bytes.Repeat([]byte{b}, signer.SecretSize))
		if err != nil {
			t.Fatal(err)
		}
		return o
	}
	issuer := certifiedBy(t, m, api, s.ClusterValues.ClusterID, owner(1), 1)
	services := fakeServices{map[string]attestation.Issuer{"pod": issuer}, atls.PurposeJoin, nil, api}
	for _, tt := range []struct {
		name       string
		by         *certifierOf
		generation uint32 // that is shown; 0: none
		without    string // result without the API
	}{
		{name: "the present keys", by: &certifierOf{owner(1), 1}, generation: 1, without: Verified},
		{name: "the former keys", by: &certifierOf{owner(1), 2}, generation: 1, without: NotVerified},
		{name: "keys before the former ones", by: &certifierOf{owner(1), 3}, without: NotVerified},
		{name: "keys of another owner", by: &certifierOf{owner(2), 1}, without: NotVerified},
		{name: "no master secret", without: NotVerified},
	} {
		judges := verifiers{api: api, by: tt.by, advice: providers.AdviceFor(gcp.Name, nil)}
		var err error
		if judges.certifier, err = judgeWith(c, s, tt.by); err != nil {
			t.Fatal(err)
		}
		one := cluster.JoinService{Node: m.Certified.Name, Pod: "pod"}
		got := verifyOne(t.Context(), services, one, judges)
		if got.Result != Verified || got.WithoutAPI || (got.Certifier != nil) != (tt.generation > 0) || got.Certifier != nil && got.Certifier.Generation != tt.generation {
			t.Errorf("%s: %+v", tt.name, got)
		}
		p.Revoke("compute.instances.get")
		got = verifyOne(t.Context(), services, one, judges)
		p.Grant("compute.instances.get")
		if got.Result != tt.without || got.WithoutAPI != (tt.without == Verified) {
			t.Errorf("%s, without the API: %+v", tt.name, got)
		}
	}
}

// TestRotationsThatAreRefused has what stands against a rotation.
func TestRotationsThatAreRefused(t *testing.T) {
	owner, err := signer.NewOwner(bytes.Repeat([]byte{1}, signer.SecretSize))
	if err != nil {
		t.Fatal(err)
	}
	other, err := signer.NewOwner(bytes.Repeat([]byte{2}, signer.SecretSize))
	if err != nil {
		t.Fatal(err)
	}
	c := &certifierOf{owner, 1}
	for name, tt := range map[string]struct {
		by   *signer.Owner
		want uint32 // 0: refused
	}{"of this owner": {owner, 2}, "of another owner": {other, 0}} {
		b, err := tt.by.Rotation(1, false)
		if err != nil {
			t.Fatal(err)
		}
		if g, _, err := c.published(string(b)); g != tt.want || (err == nil) != (tt.want > 0) {
			t.Errorf("%s: generation %d, %v", name, g, err)
		}
	}
	if g, _, err := c.published(""); g != 0 || err != nil {
		t.Errorf("none: generation %d, %v", g, err)
	}
	by := func(g uint32) *CertifiedBy { return &CertifiedBy{Generation: g} }
	v := &Verification{Machines: []VerifiedMachine{
		{Node: "cp-0", Result: Verified, Certifier: by(2)}, {Node: "cp-1", Result: Verified, Certifier: by(1)}, {Node: "cp-2", Result: Verified}, {Node: "cp-3", Result: NotVerified, Certifier: by(2)},
	}}
	behind := notAt(v, 2)
	if got := strings.Join(behind, " "); got != "cp-1 cp-2 cp-3" {
		t.Errorf("behind are %s", got)
	}
	for _, tt := range []struct {
		name    string
		to      uint32
		behind  []string
		revoke  bool
		revokes bool   // so does the published one
		want    string // ID of the finding; empty: none
	}{
		{name: "a new one", to: 3},
		{name: "a control plane lacks the present keys", to: 3, behind: behind, want: "certifier-behind"},
		{name: "one that is under way", to: 2, behind: behind},
		{name: "a revocation while one is under way", to: 2, behind: behind, revoke: true, want: "certifier-rotation-under-way"},
		{name: "a revocation that is under way", to: 2, behind: behind, revoke: true, revokes: true},
	} {
		x, p := &rotating{request: RotateRequest{Revoke: tt.revoke}, to: tt.to}, &plan.Plan{}
		x.judge(p, tt.behind, 2, tt.revokes)
		if tt.want == "" && len(p.Findings) > 0 || tt.want != "" && (len(p.Blocked()) != 1 || p.Blocked()[0].ID != tt.want || p.Blocked()[0].Remedy == "") {
			t.Errorf("%s: %+v", tt.name, p.Findings)
		}
	}
}

// Join services get the variant that belongs to the machines of the state.
func TestVariantOfJoinConfigFollowsTheState(t *testing.T) {
	c := &workspace.Config{}
	c.Provider.Name, c.Attestation.TPM2 = gcp.Name, &workspace.TPM2Config{Measurements: lab.Measurements()}
	at := func(socket string) *workspace.State {
		s := &workspace.State{}
		s.Infrastructure.Section = section.Values{"project": "p", "uid": "u", "zones": []string{"europe-west3-a"}, "socket": socket}
		return s
	}
	for name, tt := range map[string]struct {
		s    *workspace.State
		want attestation.Variant
	}{"Google": {at(""), attestation.VendorTPM2}, "a sandbox": {at("/run/cloud.sock"), attestation.EmulatedVendorTPM2}, "no state": {nil, attestation.VendorTPM2}} {
		text, err := check.AttestationJSON(c, tt.s)
		if err != nil || !strings.Contains(text, `"variant":"`+string(tt.want)+`"`) {
			t.Errorf("%s: %s, %v, want %s", name, text, err, tt.want)
		}
	}
}
