package engine

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"

	"constellation/engine/atls"
	"constellation/engine/attestation"
	"constellation/engine/attestation/attestationtest"
	"constellation/engine/attestation/authority"
	"constellation/engine/cloud"
	"constellation/engine/cloud/section"
	"constellation/engine/cluster"
	"constellation/engine/plan"
	"constellation/engine/workspace"
)

// fakeServices are join services with real attested TLS, each with an issuer, or an error that a connection to it has.
type fakeServices struct {
	issuers map[string]attestation.Issuer // by pod
	purpose atls.Purpose
	err     error
	demands attestation.Validator
}

func (f fakeServices) JoinServices(context.Context) ([]cluster.JoinService, error) { return nil, nil }

func (f fakeServices) DialJoinService(_ context.Context, s cluster.JoinService) (net.Conn, error) {
	if f.err != nil {
		return nil, f.err
	}
	x, y := net.Pipe()
	server := atls.NewServer(atls.Config{Purpose: f.purpose, Issuer: f.issuers[s.Pod], Validator: func() attestation.Validator { return f.demands }})
	go func() {
		_, _, _ = server.ServerHandshake(y)
		_ = y.Close()
	}()
	return x, nil
}

func TestVerifyJudgesEvidence(t *testing.T) {
	certPEM, keyPEM, err := attestationtest.CreateCA("cloud")
	if err != nil {
		t.Fatal(err)
	}
	ca, err := attestationtest.ParseCA(certPEM, keyPEM)
	if err != nil {
		t.Fatal(err)
	}
	otherPEM, otherKey, err := attestationtest.CreateCA("another cloud")
	if err != nil {
		t.Fatal(err)
	}
	otherCA, err := attestationtest.ParseCA(otherPEM, otherKey)
	if err != nil {
		t.Fatal(err)
	}
	clusterID := bytes.Repeat([]byte{7}, 32)
	boot := []attestation.MeasuredEvent{{PCR: 4, Digest: bytes.Repeat([]byte{1}, 32), Description: "boot loader"}}
	issuer := func(ca *attestationtest.CA, change func(*attestation.Identity), boot []attestation.MeasuredEvent, cluster []byte) attestation.Issuer {
		t.Helper()
		id := attestation.Identity{Name: "cp-0", ProviderID: "sandbox://demo/cp-0", UID: "u", Group: "g", Role: cloud.ControlPlane, IP: netip.MustParseAddr("10.0.0.2")}
		if change != nil {
			change(&id)
		}
		i, err := attestationtest.NewSoftwareIssuer(ca, id, boot, cluster)
		if err != nil {
			t.Fatal(err)
		}
		return i
	}
	c, s := &workspace.Config{}, &workspace.State{}
	c.Provider.Name = "sandbox"
	c.Attestation.TPM2 = &workspace.TPM2Config{TrustRoots: string(certPEM), Measurements: attestation.Enforced(attestation.PredictPCRs(boot))}
	s.Infrastructure.UID, s.ClusterValues.ClusterID = "u", clusterID
	from, v, err := memberValidator(c, s)
	if err != nil || from.Attestation.Variant != attestation.TPM2 {
		t.Fatal(from.Attestation.Variant, err)
	}
	for _, tt := range []struct {
		name    string
		issuer  attestation.Issuer
		service cluster.JoinService
		purpose atls.Purpose
		err     error
		result  string
		reason  string
	}{
		{name: "a control plane", issuer: issuer(ca, nil, boot, clusterID), result: Verified},
		{name: "another boot loader", issuer: issuer(ca, nil, []attestation.MeasuredEvent{{PCR: 4, Digest: bytes.Repeat([]byte{2}, 32)}}, clusterID), result: Refused, reason: "PCR 4"},
		{name: "another cluster", issuer: issuer(ca, nil, boot, []byte("another")), result: Refused, reason: "cluster"},
		{name: "a machine of no cluster", issuer: issuer(ca, nil, boot, nil), result: Refused},
		{name: "a worker", issuer: issuer(ca, func(i *attestation.Identity) { i.Role = cloud.Worker }, boot, clusterID), result: Refused, reason: "is a worker"},
		{name: "other infrastructure", issuer: issuer(ca, func(i *attestation.Identity) { i.UID = "x" }, boot, clusterID), result: Refused, reason: "belongs to"},
		{name: "another control plane", issuer: issuer(ca, func(i *attestation.Identity) { i.Name = "cp-1" }, boot, clusterID), result: Refused, reason: "it is of cp-1, which answered in the place of cp-0"},
		{name: "another cloud", issuer: issuer(otherCA, nil, boot, clusterID), result: Refused, reason: "unknown authority"},
		{name: "evidence for another purpose", issuer: issuer(ca, nil, boot, clusterID), purpose: atls.PurposeInit, result: Refused, reason: "another connection"},
		{name: "no pod", service: cluster.JoinService{Node: "cp-0", Problem: "no pod of the join service is on it"}, result: NotVerified, reason: "no pod"},
		{name: "no right", err: fmt.Errorf("%w: pods/portforward", cluster.ErrForbidden), result: NotVerified, reason: "too few rights"},
		{name: "no connection", err: errors.New("connection refused"), result: NotVerified, reason: "connection refused"},
		{name: "no evidence", issuer: broken{}, result: NotVerified, reason: "could not make its evidence"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if tt.purpose == "" {
				tt.purpose = atls.PurposeJoin
			}
			if tt.service.Node == "" {
				tt.service = cluster.JoinService{Node: "cp-0", Pod: "pod", Port: 9090}
			}
			got := verifyOne(t.Context(), fakeServices{map[string]attestation.Issuer{"pod": tt.issuer}, tt.purpose, tt.err, v}, tt.service, verifiers{api: v, advice: c.Advice()})
			if got.Result != tt.result || !strings.Contains(got.Reason, tt.reason) || (got.Remedy == "") != (tt.result == Verified) {
				t.Errorf("got %+v, want %s with %q", got, tt.result, tt.reason)
			}
			if tt.result == Verified && (got.ProviderID != "sandbox://demo/cp-0" || len(got.Registers[4]) != 64 || !got.Attested) {
				t.Errorf("got %+v", got)
			}
			if tt.result != Verified && (got.Registers != nil || got.Attested) {
				t.Errorf("a machine that is not verified has %+v", got)
			}
		})
	}
	s.ClusterValues.ClusterID = nil
	var e *plan.Error
	if _, _, err := memberValidator(c, s); !errors.As(err, &e) || e.Exit != plan.ExitUsage || e.Remedy == "" {
		t.Errorf("without a cluster: %v", err)
	}
}

// TestVerifyOfEnrolledMachines has a control plane with a key in a file, which no hardware vouches for.
func TestVerifyOfEnrolledMachines(t *testing.T) {
	cert, key, err := authority.Create("demo machines")
	if err != nil {
		t.Fatal(err)
	}
	a, err := authority.Parse(cert, key)
	if err != nil {
		t.Fatal(err)
	}
	dir, clusterID := t.TempDir(), bytes.Repeat([]byte{7}, 32)
	id := attestation.Identity{Name: "cp-0", ProviderID: "machines://u/cp-0", UID: "u", Group: "g", Role: cloud.ControlPlane, IP: netip.MustParseAddr("10.0.0.2")}
	if err := attestationtest.Enrol(t.Context(), a, dir, id); err != nil {
		t.Fatal(err)
	}
	issuer := attestation.NewEnrolledIssuer("enrolled:" + dir)
	c, s := &workspace.Config{}, &workspace.State{}
	c.Provider.Name, c.Attestation.TPM2 = "enrolled", &workspace.TPM2Config{}
	s.Infrastructure.Provider, s.Infrastructure.UID, s.ClusterValues.ClusterID = "enrolled", "u", clusterID
	s.Infrastructure.Section = section.Values{"authority": string(cert)}
	from, v, err := memberValidator(c, s)
	if err != nil || from.Attestation.Variant != attestation.Enrolled {
		t.Fatal(from.Attestation.Variant, err)
	}
	one := func() VerifiedMachine {
		services := fakeServices{map[string]attestation.Issuer{"pod": issuer}, atls.PurposeJoin, nil, v}
		return verifyOne(t.Context(), services, cluster.JoinService{Node: "cp-0", Pod: "pod"}, verifiers{api: v, advice: c.Advice()})
	}
	if got := one(); got.Result != Refused {
		t.Errorf("before it is a member: %+v", got)
	}
	if err := attestation.ExtendClusterID(t.Context(), "enrolled:"+dir, clusterID); err != nil {
		t.Fatal(err)
	}
	if got := one(); got.Result != Verified || got.Attested {
		t.Errorf("as a member: %+v", got)
	}
}

// broken is the issuer of a machine whose TPM fails.
type broken struct{}

func (broken) Variant() attestation.Variant { return attestation.TPM2 }
func (broken) Issue(context.Context, []byte) ([]byte, error) {
	return nil, attestation.ErrTPM
}
