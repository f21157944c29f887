package joinservice

import (
	"encoding/hex"
	"errors"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"

	"constellation/engine/attestation"
	"constellation/engine/attestation/attestationtest"
	workspace "constellation/engine/attestation/authority"
	"constellation/engine/cloud"
	"constellation/internal/swtpm"
)

// The join service of a control plane with a TPM admits machines with and without one.
func TestJoinConfigWithTPMs(t *testing.T) {
	t.Parallel()
	testUnmeasured(t, true)
}

// Machines of a workspace need no measurements. Those of a cloud do.
func TestUnmeasuredJoinConfig(t *testing.T) {
	t.Parallel()
	testUnmeasured(t, false)
}

// testUnmeasured has a join service judge machines, which have TPMs or keys in files.
func testUnmeasured(t *testing.T, tpms bool) {
	t.Helper()
	tpm := func() string {
		if tpms {
			address, _ := swtpm.Start(t)
			return address
		}
		return attestation.NoTPM
	}
	cert, key, err := workspace.Create("demo")
	if err != nil {
		t.Fatal(err)
	}
	a, err := workspace.Parse(cert, key)
	if err != nil {
		t.Fatal(err)
	}
	method := attestation.EnrolledMethod()
	enrol := func(name, uid string, role cloud.Role, cluster []byte, tpm string) attestation.Issuer {
		t.Helper()
		dir := filepath.Join(t.TempDir(), "identity")
		id := attestation.Identity{Name: name, ProviderID: "enrolled://demo/" + name, UID: uid, Group: "workers", Role: role, IP: netip.MustParseAddr("10.0.0.12")}
		if err := attestationtest.EnrolTPM(t.Context(), a, dir, tpm, id); err != nil {
			t.Fatal(err)
		}
		if cluster != nil {
			if err := attestation.ExtendClusterID(t.Context(), "enrolled:"+dir, cluster); err != nil {
				t.Fatal(err)
			}
		}
		return method.Issuer("enrolled:" + dir)
	}
	config := func(demand string) map[string]string {
		return map[string]string{"attestationConfig": demand, "attestationConfig.v1.1.0": demand, "clusterID": hex.EncodeToString(clusterID), "trustRoots": string(cert)}
	}
	service := enrol("control-plane-0", "demo", cloud.ControlPlane, clusterID, tpm())
	s, err := newSnapshot(t.Context(), config(`{"variant":"enrolled","measurements":{}}`), service, method, nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name    string
		machine attestation.Issuer
		want    error
		unused  bool
		file    bool // has the key
	}{
		{name: "an unused machine", machine: enrol("worker-0", "demo", cloud.Worker, nil, tpm()), unused: true, file: !tpms},
		{name: "a machine without a TPM", machine: enrol("worker-3", "demo", cloud.Worker, nil, attestation.NoTPM), unused: true, file: true},
		{name: "a member", machine: service, file: !tpms},
		{name: "a member of another cluster", machine: enrol("worker-1", "demo", cloud.Worker, []byte("other"), tpm()), want: attestation.ErrMember},
		{name: "a machine of another workspace", machine: enrol("worker-2", "other", cloud.Worker, nil, tpm()), want: attestation.ErrIdentity},
	} {
		nonce := []byte("nonce")
		doc, err := tt.machine.Issue(t.Context(), nonce)
		if err != nil {
			t.Fatal(err)
		}
		st, err := s.validator.Validate(t.Context(), doc, nonce)
		if !errors.Is(err, tt.want) || err == nil && (unused(st) != tt.unused || st.Attested == tt.file) {
			t.Errorf("%s: %+v, %v", tt.name, st, err)
		}
	}
	if _, err := newSnapshot(t.Context(), config(`{"variant":"tpm2","measurements":{}}`), service, method, nil); err == nil || !strings.Contains(err.Error(), `variant is "tpm2", want "enrolled"`) {
		t.Errorf("another variant: %v", err)
	}
	for _, demand := range []string{`{"variant":"tpm2","measurements":{}}`, `{"variant":"tpm2"}`} {
		if _, err := newSnapshot(t.Context(), config(demand), service, attestation.TPMMethod(), nil); err == nil || !strings.Contains(err.Error(), "no measurements, so every machine would be accepted") {
			t.Errorf("a cloud's machines with %s: %v", demand, err)
		}
	}
	if _, err := newSnapshot(t.Context(), config(`{"variant":"enrolled","measurements":{}}`), service, attestation.TPMMethod(), nil); err == nil || !strings.Contains(err.Error(), `variant is "enrolled", want "tpm2"`) {
		t.Errorf("a cloud's machines with an enrolled join-config: %v", err)
	}
}
