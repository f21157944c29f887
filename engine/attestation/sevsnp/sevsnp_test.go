package sevsnp

import (
	"context"
	"errors"
	"fmt"
	mathrand "math/rand/v2"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-sev-guest/verify/testdata"
	"github.com/google/go-sev-guest/verify/trust"

	"constellation/internal/mutation"
	"constellation/internal/testneeds"
)

// amdPublishes is the collateral of the recorded report. go-sev-guest has no revocation list.
func amdPublishes(_ context.Context, url string) ([]byte, error) {
	switch url {
	case "https://kdsintf.amd.com/vcek/v1/Milan/cert_chain":
		return trust.AskArkMilanVcekBytes, nil
	case "https://kdsintf.amd.com/vcek/v1/Milan/3ac3fe21e13fb0990eb28a802e3fb6a29483a6b0753590c951bdd3b8e53786184ca39e359669a2b76a1936776b564ea464cdce40c05f63c9b610c5068b006b5d?blSPL=2&teeSPL=0&snpSPL=5&ucodeSPL=68":
		return testdata.VcekBytes, nil
	}
	return nil, fmt.Errorf("AMD publishes nothing at %s", url)
}

// policy is the one that the recorded report satisfies, but for debugging and revocation.
func policy() Policy {
	return Policy{
		Collateral: amdPublishes, Binding: append([]byte{1, 2, 3, 4, 5}, make([]byte, 59)...), Now: time.Date(2023, 1, 1, 0, 0, 0, 0, time.UTC),
		Processor: "Milan", Minimum: Versions{BootLoader: 2, SNP: 5, Microcode: 68},
	}
}

var lenient = weakness{debug: true, revocations: true}

func TestRecordedReport(t *testing.T) {
	m, err := judge(t.Context(), testdata.AttestationBytes, policy(), lenient)
	if err != nil || len(m) != MeasurementSize {
		t.Fatalf("got %x, %v", m, err)
	}
	for _, tt := range []struct {
		name string
		edit func(*Policy)
		weak weakness
		text string
	}{
		{name: "its measurement", edit: func(p *Policy) { p.Measurement = m }, weak: lenient},
		{name: "the whole policy", weak: weakness{}, text: "vcek/v1/Milan/crl"},
		{name: "without a revocation list", weak: weakness{debug: true}, text: "vcek/v1/Milan/crl"},
		{name: "a machine that can be debugged", weak: weakness{revocations: true}, text: "debug"},
		{name: "another binding", edit: func(p *Policy) { p.Binding = make([]byte, BindingSize) }, weak: lenient, text: "REPORT_DATA"},
		{name: "another measurement", edit: func(p *Policy) { p.Measurement = make([]byte, MeasurementSize) }, weak: lenient, text: "MEASUREMENT"},
		{name: "a newer boot loader", edit: func(p *Policy) { p.Minimum.BootLoader++ }, weak: lenient, text: "TCB"},
		{name: "newer firmware", edit: func(p *Policy) { p.Minimum.SNP++ }, weak: lenient, text: "TCB"},
		{name: "newer microcode", edit: func(p *Policy) { p.Minimum.Microcode++ }, weak: lenient, text: "TCB"},
		{name: "before its certificate", edit: func(p *Policy) { p.Now = time.Date(2019, 1, 1, 0, 0, 0, 0, time.UTC) }, weak: lenient, text: "not yet valid"},
		{name: "after its certificate", edit: func(p *Policy) { p.Now = time.Date(2049, 1, 1, 0, 0, 0, 0, time.UTC) }, weak: lenient, text: "expired"},
		{name: "another processor", edit: func(p *Policy) { p.Processor = "Genoa" }, weak: lenient, text: "Genoa"},
		{name: "an unknown processor", edit: func(p *Policy) { p.Processor = "Naples" }, weak: lenient, text: "not known"},
		{name: "a short binding", edit: func(p *Policy) { p.Binding = p.Binding[1:] }, weak: lenient, text: "63 bytes"},
		{name: "no binding", edit: func(p *Policy) { p.Binding = nil }, weak: lenient, text: "0 bytes"},
		{name: "no minimum versions", edit: func(p *Policy) { p.Minimum = Versions{} }, weak: lenient, text: "outdated firmware"},
		{name: "no collateral", edit: func(p *Policy) { p.Collateral = nil }, weak: lenient, text: "no collateral"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			trust.ClearProductCertCache()
			p := policy()
			if tt.edit != nil {
				tt.edit(&p)
			}
			_, err := judge(t.Context(), testdata.AttestationBytes, p, tt.weak)
			if tt.text == "" && err != nil || tt.text != "" && (err == nil || !strings.Contains(err.Error(), tt.text)) {
				t.Errorf("got %v, want %q", err, tt.text)
			}
		})
	}
	if _, err := Judge(t.Context(), testdata.AttestationBytes, policy()); !errors.Is(err, ErrReport) {
		t.Errorf("the whole policy: %v", err)
	}
}

// mutations is how many mutations are judged by default. `make soak` judges 100,000.
const mutations = 300

// TestMutatedReports mutates the recorded report, under the policy that it satisfies. None may be accepted.
func TestMutatedReports(t *testing.T) {
	total := testneeds.Number(t, "CONSTELLATION_EVIDENCE_MUTATIONS", mutations)
	var refused, next atomic.Int64
	var wg sync.WaitGroup
	for range runtime.GOMAXPROCS(0) {
		wg.Go(func() {
			for seed := next.Add(1); seed <= int64(total) && !t.Failed(); seed = next.Add(1) {
				b := mutation.Layout(mathrand.New(mathrand.NewPCG(uint64(seed), 24)), testdata.AttestationBytes)
				if _, err := judge(t.Context(), b, policy(), lenient); !errors.Is(err, ErrReport) {
					t.Errorf("seed %d: %v", seed, err)
				}
				refused.Add(1)
			}
		})
	}
	wg.Wait()
	t.Logf("%d mutations, %d refused", total, refused.Load())
}
