package evidence

import (
	"context"
	"crypto/sha256"
	"fmt"
	"net/netip"
	"testing"

	"constellation/engine/cloud"
	"constellation/internal/swtpm"
)

func newCA(t testing.TB, name string) *CA {
	t.Helper()
	cert, key, err := CreateCA(name)
	if err != nil {
		t.Fatal(err)
	}
	ca, err := ParseCA(cert, key)
	if err != nil {
		t.Fatal(err)
	}
	return ca
}

func worker(n int) Identity {
	return Identity{
		Name:       fmt.Sprintf("worker-%d", n),
		ProviderID: fmt.Sprintf("sandbox://demo/worker-%d", n),
		UID:        "demo",
		Group:      "sandboxes/demo/groups/workers",
		Role:       cloud.Worker,
		IP:         netip.AddrFrom4([4]byte{10, 42, 0, byte(n + 20)}),
	}
}

// boot is what the image of the tests measures.
func boot() []MeasuredEvent {
	d := func(s string) []byte { h := sha256.Sum256([]byte(s)); return h[:] }
	return []MeasuredEvent{
		{4, d("boot loader"), "boot loader"},
		{9, d("kernel"), "kernel"},
		{9, d("initrd"), "initrd"},
		{11, d("image v1.1.0"), "image v1.1.0"},
	}
}

// bootedTPM is a provisioned and measured TPM.
func bootedTPM(t testing.TB, ca *CA, id Identity) string {
	t.Helper()
	address, _ := swtpm.Start(t)
	if err := Provision(context.Background(), address, ca, id); err != nil {
		t.Fatal(err)
	}
	if err := Measure(context.Background(), address, EventLogPath(address), boot()); err != nil {
		t.Fatal(err)
	}
	return address
}
