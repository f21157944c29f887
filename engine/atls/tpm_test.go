package atls

import (
	"errors"
	"testing"

	"constellation/engine/attestation"
	"constellation/engine/attestation/attestationtest"
	"constellation/engine/cloud"
	"constellation/internal/swtpm"
)

// startTPM runs a TPM emulator, provisioned and measured, for the test.
func startTPM(t *testing.T, ca *attestationtest.CA, id attestation.Identity) (address string) {
	t.Helper()
	address, _ = swtpm.Start(t)
	if err := errors.Join(
		attestationtest.Provision(t.Context(), address, ca, id),
		attestationtest.Measure(t.Context(), address, attestation.EventLogPath(address), events("v1.1.0")),
		attestationtest.HandOver(t.Context(), address),
	); err != nil {
		t.Fatal(err)
	}
	return address
}

// TestJoinWithTPMs is a join as it is between two machines, and what happens when
// the machine that joined tries again.
func TestJoinWithTPMs(t *testing.T) {
	w := newWorld(t)
	node := startTPM(t, w.ca, identity("worker-0", cloud.Worker))
	service := startTPM(t, w.ca, identity("control-plane-0", cloud.ControlPlane))
	cluster := []byte("cluster")
	if err := attestation.ExtendClusterID(t.Context(), service, cluster); err != nil {
		t.Fatal(err)
	}
	client, server := w.clientConfig(), w.serverConfig()
	client.Issuer, server.Issuer = attestation.NewTPMIssuer(node), attestation.NewTPMIssuer(service)

	o := meet(t, client, server)
	if o.client != nil || o.server != nil {
		t.Fatalf("client: %v, server: %v", o.client, o.server)
	}
	if nameOf(o.toClient) != "control-plane-0" || nameOf(o.toServer) != "worker-0" {
		t.Errorf("they took each other for %q and %q", nameOf(o.toClient), nameOf(o.toServer))
	}
	if err := attestation.ExtendClusterID(t.Context(), node, cluster); err != nil {
		t.Fatal(err)
	}
	if o := meet(t, client, server); !errors.Is(o.server, attestation.ErrMember) || !errors.Is(o.client, ErrRefused) {
		t.Errorf("the member joined again: client: %v, server: %v", o.client, o.server)
	}
	client.Purpose, server.Purpose = PurposeInit, PurposeInit
	server.Issuer, server.Validator = client.Issuer, nil
	client.Issuer, client.Validator = nil, w.accepts(attestation.PCR15Zero())
	if o := meet(t, client, server); !errors.Is(o.client, attestation.ErrMember) {
		t.Errorf("the member starts a cluster of its own: %v", o.client)
	}
}
