package check

import (
	"bytes"
	"encoding/hex"
	"errors"
	"strings"
	"testing"

	"constellation/engine/attestation"
	"constellation/engine/cloud"
	"constellation/engine/plan"
	"constellation/engine/version"
	"constellation/engine/workspace"
)

// A console gives keys to control planes of the image that the user chose, and to no others.
func TestExpectedMeasurements(t *testing.T) {
	register := func(v string) string { return strings.Repeat(v, 64) }
	image := func(v, is string) cloud.Image {
		return cloud.Image{Version: v, Measurements: map[uint32]string{11: register(is)}}
	}
	config := func(v, is string) *workspace.Config {
		b, err := hex.DecodeString(register(is))
		if err != nil {
			t.Fatal(err)
		}
		c := &workspace.Config{Image: version.MustParse(v)}
		c.Attestation.TPM2 = &workspace.TPM2Config{Measurements: attestation.Measurements{11: {Expected: b}}}
		return c
	}
	for _, tt := range []struct {
		name, release string
		next          *workspace.Config
		target        string // of the cluster
		want          string // digit of register 11
		fails         bool
	}{
		{name: "nothing is named", want: "a"},
		{name: "a hop", next: config("v1.1.0", "b"), release: "v1.1.0", want: "b"},
		{name: "the named release", release: "v1.1.0", want: "b"},
		{name: "the release of the configuration", release: "v1.0.0", want: "a"},
		{name: "a release that the cluster alone names", target: "v1.1.0", want: "a"},
		{name: "a release whose register has no digest", release: "v1.2.0", fails: true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := &Run{Config: config("v1.0.0", "a"), Next: tt.next, Images: []cloud.Image{image("v1.0.0", "c"), image("v1.1.0", "b"), image("v1.2.0", "x")}}
			c.Now.Target.ImageVersion = tt.target
			if tt.release != "" {
				c.Request.Release = version.MustParse(tt.release)
			}
			got, err := c.Expected(t.Context())
			if tt.fails {
				var e *plan.Error
				if !errors.As(err, &e) || e.Remedy == "" {
					t.Errorf("the error is %v, want one with a remedy", err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			want, _ := hex.DecodeString(register(tt.want))
			if is := got.Attestation.TPM2.Measurements[11].Expected; !bytes.Equal(is, want) {
				t.Errorf("register 11 is %x, want %x", is, want)
			}
			if is := c.Config.Attestation.TPM2.Measurements[11].Expected; hex.EncodeToString(is) != register("a") {
				t.Errorf("the configuration changed: register 11 is %x", is)
			}
		})
	}
}
