package main

import (
	"errors"
	"log/slog"
	"strings"
	"testing"

	"constellation/bootstrapper"
)

// A bootstrapper at Google ends if it got addresses of an emulator in part, and a restart does not help.
func TestAddressesThatContradict(t *testing.T) {
	t.Setenv("CONSTELLATION_PROVIDER", "gcp")
	for name, tt := range map[string]struct{ metadata, tpm string }{
		"an emulator's metadata server beside a real TPM": {metadata: "http://127.0.0.1:8090?compute=http://127.0.0.1:8091/compute/v1/", tpm: "/dev/tpmrm0"},
		"an emulator's TPM at Google":                     {tpm: "unix:/run/tpm/tpm.sock"},
		"another metadata server":                         {metadata: "http://192.0.2.1", tpm: "/dev/tpmrm0"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Setenv("CONSTELLATION_METADATA", tt.metadata)
			err := offer(t.Context(), bootstrapper.Machine{TPM: tt.tpm, Root: t.TempDir(), Log: slog.New(slog.DiscardHandler)})
			if !errors.Is(err, bootstrapper.ErrStuck) || !strings.Contains(err.Error(), "neither those of a machine at Google") {
				t.Errorf("got %v", err)
			}
		})
	}
}
