package machines

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"constellation/engine/cloud"
)

func data() MachineData {
	return MachineData{
		Inventory: Inventory{Schema: "1", Cluster: "u", Endpoint: "api.example.com", Machines: []Entry{
			{Name: "cp-0", Address: "10.0.0.11", Group: cloud.ControlPlane, ProviderID: ProviderID("u", "cp-0")},
			{Name: "w-0", Address: "10.0.0.12", Group: cloud.Worker, ProviderID: ProviderID("u", "w-0")},
		}},
		Self: "w-0", InitSecretHash: strings.Repeat("ab", 32),
	}
}

func TestMetadataOfAFile(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "machine.json")
	m := NewMetadata(path)
	if _, err := m.Self(t.Context()); !errors.Is(err, cloud.ErrUnavailable) {
		t.Errorf("without the file: %v", err)
	}
	write := func(v any) {
		t.Helper()
		b, err := json.Marshal(v)
		if err == nil {
			err = os.WriteFile(path, b, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	write(data())
	self, err := m.Self(t.Context())
	if err != nil || self.Name != "w-0" || self.Role != cloud.Worker || self.IP.String() != "10.0.0.12" || self.ProviderID != "machines://u/w-0" || self.Group != GroupID("u", cloud.Worker) || self.State != cloud.Ready {
		t.Errorf("self %+v, %v", self, err)
	}
	if peers, err := m.Peers(t.Context()); err != nil || len(peers) != 2 || peers[0].Role != cloud.ControlPlane {
		t.Errorf("peers %+v, %v", peers, err)
	}
	if host, err := m.LoadBalancer(t.Context()); err != nil || host != "api.example.com" {
		t.Errorf("endpoint %q, %v", host, err)
	}
	if h, err := m.InitSecretHash(t.Context()); err != nil || len(h) != 32 {
		t.Errorf("hash %x, %v", h, err)
	}
	// Pods have the inventory alone.
	write(data().Inventory)
	if _, err := m.Self(t.Context()); !errors.Is(err, cloud.ErrNotFound) {
		t.Errorf("an inventory names this machine: %v", err)
	}
	if _, err := m.InitSecretHash(t.Context()); err == nil {
		t.Error("an inventory has a hash of the init secret")
	}
	if peers, err := m.Peers(t.Context()); err != nil || len(peers) != 2 {
		t.Errorf("peers %+v, %v", peers, err)
	}
	if _, err := NewControl(path).Instance(t.Context(), ProviderID("u", "w-9")); err == nil || errors.Is(err, cloud.ErrNotFound) || !strings.Contains(err.Error(), "machine add") {
		t.Errorf("a machine that is not listed: %v", err)
	}
	twice := data()
	twice.Machines[1] = twice.Machines[0]
	write(twice)
	if _, err := m.Peers(t.Context()); !errors.Is(err, cloud.ErrUnavailable) {
		t.Errorf("a machine that is listed twice: %v", err)
	}
}
