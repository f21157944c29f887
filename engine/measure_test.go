package engine

import (
	"bytes"
	"errors"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc"

	"constellation/engine/atls"
	"constellation/engine/attestation"
	"constellation/engine/attestation/attestationtest"
	"constellation/engine/cloud"
	"constellation/engine/plan"
	"constellation/engine/workspace"
)

func TestMeasure(t *testing.T) {
	certPEM, keyPEM, err := attestationtest.CreateCA("cloud")
	if err != nil {
		t.Fatal(err)
	}
	ca, err := attestationtest.ParseCA(certPEM, keyPEM)
	if err != nil {
		t.Fatal(err)
	}
	boot := []attestation.MeasuredEvent{{PCR: 4, Digest: bytes.Repeat([]byte{1}, 32)}, {PCR: 9, Digest: bytes.Repeat([]byte{2}, 32)}, {PCR: 11, Digest: bytes.Repeat([]byte{3}, 32)}}
	issuer := func(role cloud.Role, member []byte) attestation.Issuer {
		t.Helper()
		id := attestation.Identity{Name: "m-0", ProviderID: "sandbox://demo/m-0", UID: "0123456789abcdef", Group: "g", Role: role, IP: netip.MustParseAddr("10.0.0.2")}
		i, err := attestationtest.NewSoftwareIssuer(ca, id, boot, member)
		if err != nil {
			t.Fatal(err)
		}
		return i
	}
	// workspaceOf returns the engine of a workspace whose init endpoint is a machine with an issuer.
	workspaceOf := func(i attestation.Issuer) (*Engine, string) {
		t.Helper()
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		server := grpc.NewServer(grpc.Creds(atls.NewServer(atls.Config{Purpose: atls.PurposeInit, Issuer: i})))
		go server.Serve(l)
		t.Cleanup(server.Stop)
		dir := t.TempDir()
		ws, err := workspace.OpenWorkspace(dir)
		if err != nil {
			t.Fatal(err)
		}
		b, err := workspace.GenerateConfig("sandbox", workspace.GenerateOptions{Name: "demo"})
		if err != nil {
			t.Fatal(err)
		}
		roots := "trustRoots: |\n      " + strings.ReplaceAll(strings.TrimSpace(string(certPEM)), "\n", "\n      ")
		if _, err := ws.WriteConfig(bytes.Replace(b, []byte(`trustRoots: ""`), []byte(roots), 1)); err != nil {
			t.Fatal(err)
		}
		if _, err := ws.AdoptSandbox(workspace.SandboxInfo{
			Name: "demo", UID: "0123456789abcdef", Release: "v1.1.0", Kubernetes: "v1.36.4", Image: "v1.1.0", TrustRoots: string(certPEM),
			ClusterEndpoint: "127.0.0.1:36443", InitEndpoint: l.Addr().String(), InClusterEndpoint: "10.42.0.1", NodeCIDR: "10.42.0.0/24", PodCIDR: "10.244.0.0/16", ServiceCIDR: "10.96.0.0/12",
			ControlPlanes: 1, Workers: 1, Socket: "/run/sandbox/demo/api.sock", InitSecret: bytes.Repeat([]byte("0"), 32),
		}); err != nil {
			t.Fatal(err)
		}
		return &Engine{ws: ws}, filepath.Join(dir, workspace.ConfigFile)
	}
	exit := func(err error) int {
		var e *plan.Error
		if !errors.As(err, &e) || e.Remedy == "" {
			t.Errorf("no remedy: %v", err)
			return -1
		}
		return e.Exit
	}

	e, file := workspaceOf(issuer(cloud.ControlPlane, nil))
	before, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	m, err := e.Measure(t.Context(), false)
	if err != nil || m.Name != "m-0" || len(m.Unknown) != 3 || m.Written || len(m.Registers[4]) != 64 {
		t.Fatalf("got %+v, %v", m, err)
	}
	if after, err := os.ReadFile(file); err != nil || !bytes.Equal(before, after) {
		t.Errorf("the configuration was changed: %v", err)
	}
	if m, err = e.Measure(t.Context(), true); err != nil || !m.Written {
		t.Fatalf("got %+v, %v", m, err)
	}
	c, err := e.ws.Config()
	if err != nil {
		t.Fatal(err)
	}
	warnings, err := c.Attestation.TPM2.Measurements.Compare(attestation.PredictPCRs(boot))
	if err != nil || len(warnings) > 0 || len(c.Attestation.TPM2.Measurements) != 3 {
		t.Errorf("measurements %v, %q, %v", c.Attestation.TPM2.Measurements, warnings, err)
	}
	if _, err := e.Measure(t.Context(), true); exit(err) != plan.ExitNothing {
		t.Errorf("again: %v", err)
	}
	if m, err := e.Measure(t.Context(), false); err != nil || len(m.Unknown) != 0 {
		t.Errorf("a complete configuration: %+v, %v", m, err)
	}
	if now, err := os.ReadFile(file); err != nil || bytes.Count(now, []byte("\n")) != bytes.Count(before, []byte("\n")) {
		t.Errorf("the layout was changed: %v", err)
	}

	st, err := e.ws.State()
	if err != nil {
		t.Fatal(err)
	}
	st.ClusterValues.InitNode = "sandbox://demo/m-0"
	if err := e.ws.WriteState(st); err != nil {
		t.Fatal(err)
	}
	if _, err := e.Measure(t.Context(), false); exit(err) != plan.ExitUsage || !strings.Contains(plan.Remedy(err), "constellation verify") {
		t.Errorf("after init: %v", err)
	}

	for name, i := range map[string]attestation.Issuer{"a worker": issuer(cloud.Worker, nil), "a member of a cluster": issuer(cloud.ControlPlane, []byte("cluster"))} {
		e, file := workspaceOf(i)
		before, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if m, err := e.Measure(t.Context(), true); exit(err) < 0 || m.Written {
			t.Errorf("%s: %+v, %v", name, m, err)
		}
		if after, err := os.ReadFile(file); err != nil || !bytes.Equal(before, after) {
			t.Errorf("%s: the configuration was changed: %v", name, err)
		}
	}
}
