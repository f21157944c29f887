package main

import (
	"strings"
	"testing"
)

// A join service without a cloud ends before it asks for access to a cluster.
func TestNoProviderIsAssumed(t *testing.T) {
	for _, tt := range []struct {
		name string
		args []string
		want string
	}{
		{name: "no provider", want: "--provider: no provider is named: use enrolled or gcp or sandbox"},
		{name: "an empty provider", args: []string{"--provider="}, want: "--provider: no provider is named: use enrolled or gcp or sandbox"},
		{name: "another provider", args: []string{"--provider=moon"}, want: `--provider: provider "moon" is not known: use enrolled or gcp or sandbox`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if err := serve(t.Context(), tt.args); err == nil || err.Error() != tt.want {
				t.Errorf("got error %v, want %q", err, tt.want)
			}
		})
	}
}

// A join service at Google ends if it got addresses of an emulator in part.
func TestAddressesThatContradict(t *testing.T) {
	for _, args := range [][]string{
		{"--provider=gcp", "--tpm=unix:/run/tpm/tpm.sock"},
		{"--provider=gcp", "--metadata=http://127.0.0.1:8090?compute=http://127.0.0.1:8091/compute/v1/"},
		{"--provider=gcp", "--metadata=http://192.0.2.1"},
	} {
		if err := sign(t.Context(), args); err == nil || !strings.Contains(err.Error(), "--metadata, --tpm: provider gcp: ") || !strings.Contains(err.Error(), "neither those of a machine at Google") {
			t.Errorf("%q: %v", args, err)
		}
	}
}
