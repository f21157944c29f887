package main

import "testing"

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
			if err := run(t.Context(), tt.args); err == nil || err.Error() != tt.want {
				t.Errorf("got error %v, want %q", err, tt.want)
			}
		})
	}
}
