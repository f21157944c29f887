package tui

import (
	"errors"
	"strings"
	"testing"

	"constellation/engine"
	"constellation/engine/plan"
	"constellation/tui/internal/enginefake"
)

func TestVerifyPrints(t *testing.T) {
	good := engine.VerifiedMachine{Node: "control-plane-0", Result: engine.Verified, Attested: true, IP: "10.42.0.2", ProviderID: "sandbox://demo/control-plane-0", Registers: map[uint32]string{4: "aa"}}
	file, secure := good, good
	file.Attested, secure.SecureBoot = false, "on"
	certified := good
	certified.Certifier = &engine.CertifiedBy{Generation: 2}
	alone := certified
	alone.WithoutAPI = true
	warned := good
	warned.Warnings = []string{"PCR 9 differs"}
	refused := engine.VerifiedMachine{Node: "control-plane-1", Result: engine.Refused, Reason: "PCR 4 is aa, expected bb", Remedy: "replace the machine"}
	missing := engine.VerifiedMachine{Node: "control-plane-2", Result: engine.NotVerified, Reason: "no pod", Remedy: "look at the pods"}
	for _, tt := range []struct {
		name     string
		v        engine.Verification
		err      error
		code     int
		out, not []string
		says     string // on stderr
	}{
		{
			name: "verified", v: engine.Verification{Cluster: "demo", Variant: "tpm2", Measured: true, Verified: true, Machines: []engine.VerifiedMachine{good}},
			out: []string{"cluster demo   evidence tpm2", "control-plane-0", "verified", "a TPM and the measurements of the configuration", "Workers make no evidence"}, not: []string{"Needs attention"},
		},
		{name: "a key in a file", v: engine.Verification{Cluster: "demo", Variant: "enrolled", NotAttested: true, Verified: true, Machines: []engine.VerifiedMachine{file}}, out: []string{"not attested", "no hardware vouches for it"}, not: []string{"measurements"}},
		{name: "Secure Boot", v: engine.Verification{Variant: "vendor-tpm2", Measured: true, Machines: []engine.VerifiedMachine{secure}}, out: []string{"configuration, Secure Boot on"}},
		{name: "a certifier", v: engine.Verification{Measured: true, Machines: []engine.VerifiedMachine{certified}}, out: []string{"configuration, certified by generation 2"}, not: []string{"API"}},
		{name: "a certifier without the API", v: engine.Verification{Machines: []engine.VerifiedMachine{alone}}, out: []string{"certified by generation 2 in the place of the cloud's API"}},
		{name: "a warning", v: engine.Verification{Verified: true, Machines: []engine.VerifiedMachine{warned}}, out: []string{"control-plane-0: PCR 9 differs"}},
		{
			name: "refused", v: engine.Verification{Cluster: "demo", Machines: []engine.VerifiedMachine{good, refused, missing}}, code: plan.ExitBlocked,
			out: []string{"control-plane-1: evidence refused", "PCR 4 is aa, expected bb", "replace the machine", "control-plane-2: no evidence"}, says: "the evidence of control-plane-1 was refused",
		},
		{name: "no evidence", v: engine.Verification{Machines: []engine.VerifiedMachine{good, missing}}, code: plan.ExitFailed, out: []string{"no pod", "look at the pods"}, says: "there is no evidence of control-plane-2"},
		{name: "no cluster", err: &plan.Error{Op: "verify the cluster", Err: errors.New("no kubeconfig"), Remedy: "copy it", Exit: plan.ExitUsage}, code: plan.ExitUsage, says: "no kubeconfig"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			for _, args := range [][]string{{"verify"}, {"verify", "-o", "json"}} {
				out, errs, code := printed(t, &enginefake.Engine{Verification: tt.v, VerifiedErr: tt.err}, "", args...)
				if code != tt.code || !strings.Contains(errs, tt.says) {
					t.Errorf("%v: exit %d, want %d; stderr %q, want %q", args, code, tt.code, errs, tt.says)
				}
				if len(args) > 1 {
					if tt.err == nil && !strings.HasPrefix(out, "{") {
						t.Errorf("no document: %q", out)
					}
					continue
				}
				for _, want := range tt.out {
					if !strings.Contains(out, want) {
						t.Errorf("%q is not in\n%s", want, out)
					}
				}
				for _, x := range tt.not {
					if strings.Contains(out, x) {
						t.Errorf("%q is in\n%s", x, out)
					}
				}
			}
		})
	}
}

func TestConfigMeasurePrints(t *testing.T) {
	m := engine.MeasuredMachine{Name: "cp-0", ProviderID: "gce://p/z/cp-0", SecureBoot: "on", Registers: map[uint32]string{4: "aa", 9: "bb", 10: "cc"}, Unknown: []uint32{4, 9}}
	complete := m
	complete.Unknown = nil
	for _, tt := range []struct {
		name     string
		m        engine.MeasuredMachine
		args     string
		err      error
		code     int
		out, not string
	}{
		{name: "shown", m: m, out: "PCR 4    aa  not in the configuration", not: "wrote"},
		{name: "how to write it", m: m, out: "config measure --write"},
		{name: "the machine", m: m, out: "machine cp-0   gce://p/z/cp-0   Secure Boot on"},
		{name: "written", m: m, args: "--write", out: "wrote PCR 4 and 9 to constellation-conf.yaml", not: "not in the configuration"},
		{name: "all are known", m: complete, out: "PCR 10   cc", not: "next"},
		{name: "as JSON", m: m, args: "-o json", out: `"4": "aa"`},
		{name: "nothing to write", args: "--write", err: &plan.Error{Op: "measure the first machine", Err: errors.New("the configuration has a value"), Exit: plan.ExitNothing}, code: plan.ExitNothing},
	} {
		t.Run(tt.name, func(t *testing.T) {
			out, errs, code := printed(t, &enginefake.Engine{Measured: tt.m, MeasuredErr: tt.err}, "", append([]string{"config", "measure"}, strings.Fields(tt.args)...)...)
			if code != tt.code || !strings.Contains(out, tt.out) || tt.not != "" && strings.Contains(out, tt.not) {
				t.Errorf("exit %d, %q; want %q and not %q\n%s", code, errs, tt.out, tt.not, out)
			}
		})
	}
}
