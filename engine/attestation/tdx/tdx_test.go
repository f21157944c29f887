package tdx

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/pem"
	"errors"
	"fmt"
	mathrand "math/rand/v2"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	recorded "github.com/google/go-tdx-guest/testing"
	"github.com/google/go-tdx-guest/testing/testdata"

	"constellation/internal/mutation"
	"constellation/internal/testneeds"
)

// intelPublishes is the recorded collateral of the recorded quote.
func intelPublishes(_ context.Context, url string) (map[string][]string, []byte, error) {
	if r, ok := recorded.TestGetter.Responses[url]; ok {
		return r.Header, r.Body, nil
	}
	return nil, nil, fmt.Errorf("Intel publishes nothing at %s", url)
}

// policy is the one that the recorded quote satisfies, but for the levels of the collateral. Nothing is known about what its 64 bytes
// mean.
func policy() Policy {
	const body, reportData = 48, 520 // offsets of the body in a quote, and of the bound bytes in a body
	return Policy{
		Collateral: intelPublishes, Binding: bytes.Clone(testdata.RawQuote[body+reportData : body+reportData+BindingSize]),
		Now: time.Date(2023, time.July, 1, 1, 0, 0, 0, time.UTC),
	}
}

var lenient = weakness{collateral: true}

func TestRecordedQuote(t *testing.T) {
	m, err := judge(t.Context(), testdata.RawQuote, policy(), lenient)
	if err != nil || len(m) != MeasurementSize {
		t.Fatalf("got %x, %v", m, err)
	}
	without := func(part string) func(*Policy) {
		return func(p *Policy) {
			p.Collateral = func(ctx context.Context, url string) (map[string][]string, []byte, error) {
				if strings.Contains(url, part) {
					return nil, nil, errors.New("no answer about " + part)
				}
				return intelPublishes(ctx, url)
			}
		}
	}
	changed := func(part string) func(*Policy) {
		return func(p *Policy) {
			p.Collateral = func(ctx context.Context, url string) (map[string][]string, []byte, error) {
				h, b, err := intelPublishes(ctx, url)
				if strings.Contains(url, part) {
					b = bytes.Clone(b)
					b[len(b)-8] ^= 1 // of its signature
				}
				return h, b, err
			}
		}
	}
	for _, tt := range []struct {
		name string
		edit func(*Policy)
		weak weakness
		text string
	}{
		{name: "its measurement", edit: func(p *Policy) { p.Measurement = m }, weak: lenient},
		{name: "the whole policy", text: "no matching TCB level found"},
		{name: "without levels", edit: without("tdx/certification/v4/tcb"), text: "no answer about"},
		{name: "without the identity of the enclave", edit: without("qe/identity"), text: "no answer about"},
		{name: "without a revocation list of processors", edit: without("pckcrl"), text: "no answer about"},
		{name: "without a revocation list of the root", edit: without("IntelSGXRootCA"), text: "no answer about"},
		{name: "changed levels", edit: changed("tdx/certification/v4/tcb"), text: "tcbInfo"},
		{name: "a changed identity of the enclave", edit: changed("qe/identity"), text: "QeIdentity"},
		{name: "a changed revocation list of processors", edit: changed("pckcrl"), text: "CRL"},
		{name: "a changed revocation list of the root", edit: changed("IntelSGXRootCA"), text: "CRL"},
		{name: "outdated collateral", edit: func(p *Policy) { p.Now = time.Date(2024, 1, 1, 0, 0, 0, 0, time.UTC) }, text: "expired"},
		{name: "another binding", edit: func(p *Policy) { p.Binding = make([]byte, BindingSize) }, weak: lenient, text: "REPORT_DATA"},
		{name: "another measurement", edit: func(p *Policy) { p.Measurement = make([]byte, MeasurementSize) }, weak: lenient, text: "MR_TD"},
		{name: "before its certificate", edit: func(p *Policy) { p.Now = time.Date(2019, 1, 1, 0, 0, 0, 0, time.UTC) }, weak: lenient, text: "not yet valid"},
		{name: "after its certificate", edit: func(p *Policy) { p.Now = time.Date(2053, 1, 1, 0, 0, 0, 0, time.UTC) }, weak: lenient, text: "expired"},
		{name: "a short binding", edit: func(p *Policy) { p.Binding = p.Binding[1:] }, weak: lenient, text: "63 bytes"},
		{name: "a short measurement", edit: func(p *Policy) { p.Measurement = []byte{1} }, weak: lenient, text: "measurement has 1 bytes"},
		{name: "no binding", edit: func(p *Policy) { p.Binding = nil }, weak: lenient, text: "0 bytes"},
		{name: "no collateral", edit: func(p *Policy) { p.Collateral = nil }, weak: lenient, text: "no collateral"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p := policy()
			if tt.edit != nil {
				tt.edit(&p)
			}
			_, err := judge(t.Context(), testdata.RawQuote, p, tt.weak)
			if tt.text == "" && err != nil || tt.text != "" && (err == nil || !strings.Contains(err.Error(), tt.text)) {
				t.Errorf("got %v, want %q", err, tt.text)
			}
		})
	}
	if _, err := Judge(t.Context(), testdata.RawQuote, policy()); !errors.Is(err, ErrQuote) {
		t.Errorf("the whole policy: %v", err)
	}
}

// TestMalformedQuotes judges quotes of all lengths, and such whose lengths inside are wrong.
func TestMalformedQuotes(t *testing.T) {
	for n := 0; n < signedTo; n += 7 {
		if _, err := judge(t.Context(), testdata.RawQuote[:n], policy(), lenient); !errors.Is(err, ErrQuote) {
			t.Fatalf("the first %d bytes: %v", n, err)
		}
	}
	for n := 632; n+4 <= 1500; n++ { // where the signed data and their certificates begin
		for _, length := range []uint32{0, 1, 1 << 16, 1<<31 - 1, 1<<32 - 1} {
			b := bytes.Clone(testdata.RawQuote)
			binary.LittleEndian.PutUint32(b[n:], length)
			if bytes.Equal(b, testdata.RawQuote) {
				continue
			}
			if _, err := judge(t.Context(), b, policy(), lenient); !errors.Is(err, ErrQuote) {
				t.Fatalf("%d at byte %d: %v", length, n, err)
			}
		}
	}
	if _, err := judge(t.Context(), make([]byte, MaxQuote+1), policy(), lenient); err == nil || !strings.Contains(err.Error(), "at most 32768 are read") {
		t.Errorf("a long quote: %v", err)
	}
}

// mutations is how many mutations are judged by default. `make soak` judges 100,000.
const mutations = 300

// signedTo is the end of what signatures cover, and of the certificates. Nothing reads what follows.
var signedTo = bytes.LastIndex(testdata.RawQuote, []byte(end)) + len(end)

const end = "-----END CERTIFICATE-----"

// content returns what a quote has before its certificates, and these without their encoding: base64 can have unused bits.
func content(quote []byte) (out []byte) {
	at := max(0, bytes.Index(quote, []byte("-----BEGIN CERTIFICATE-----")))
	out = bytes.Clone(quote[:at])
	for block, rest := pem.Decode(quote[at:]); block != nil; block, rest = pem.Decode(rest) {
		out = append(out, block.Bytes...)
	}
	return out
}

// TestMutatedQuotes mutates the recorded quote, under the policy that it satisfies. None with another content may be accepted.
func TestMutatedQuotes(t *testing.T) {
	total := testneeds.Number(t, "CONSTELLATION_EVIDENCE_MUTATIONS", mutations)
	var refused, next atomic.Int64
	var wg sync.WaitGroup
	for range runtime.GOMAXPROCS(0) {
		wg.Go(func() {
			for seed := next.Add(1); seed <= int64(total) && !t.Failed(); seed = next.Add(1) {
				r := mathrand.New(mathrand.NewPCG(uint64(seed), 25))
				b := append(mutation.Layout(r, testdata.RawQuote[:signedTo]), testdata.RawQuote[signedTo:]...)
				_, err := judge(t.Context(), b, policy(), lenient)
				switch {
				case errors.Is(err, ErrQuote):
					refused.Add(1)
				case err != nil || !bytes.Equal(content(b), content(testdata.RawQuote)):
					t.Errorf("seed %d: %v", seed, err)
				}
			}
		})
	}
	wg.Wait()
	t.Logf("%d mutations, %d refused, %d with the same content", total, refused.Load(), int64(total)-refused.Load())
}
