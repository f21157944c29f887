package evidence

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/x509"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/go-eventlog/extract"
	"github.com/google/go-eventlog/tcg"
)

// TestBootLogsOfRealLogs compares what a document has of the logs of real machines with what go-eventlog
// extracts from them.
func TestBootLogsOfRealLogs(t *testing.T) {
	for name, log := range realLogs() {
		t.Run(name, func(t *testing.T) {
			b, err := newBootLog(log)
			if err != nil {
				t.Fatal(err)
			}
			der, err := b.marshal()
			if err != nil {
				t.Fatal(err)
			}
			if b, err = parseBootLog(der); err != nil {
				t.Fatal(err)
			}
			pcrs, err := replayLog(log)
			if err != nil {
				t.Fatal(err)
			}
			for _, i := range loggedPCRs() {
				if pcrs[i] == nil {
					pcrs[i] = make([]byte, pcrSize)
				}
			}
			if err := b.explains(pcrs); err != nil {
				t.Error(err)
			}
			for _, i := range loggedPCRs() {
				right := pcrs[i]
				pcrs[i] = extend(right, make([]byte, pcrSize))
				if b.explains(pcrs) == nil {
					t.Errorf("another value of PCR %d is explained, too", i)
				}
				pcrs[i] = right
			}
			on, err := b.secureBootEnabled()
			if err != nil {
				t.Fatal(err)
			}
			events, err := tcg.ParseAndReplay(log, mrs(pcrs), tcg.ParseOpts{})
			if err != nil {
				t.Fatal(err)
			}
			want, err := extract.SecureBootState(events, extract.TPMRegisterConfig, extract.Opts{AllowEmptySBVar: true})
			if err != nil {
				t.Fatal(err)
			}
			if on != want.GetEnabled() {
				t.Errorf("Secure Boot is %v, go-eventlog has %v", on, want.GetEnabled())
			}
			t.Logf("%d bytes of %d, Secure Boot %v", len(der), len(log), on)
		})
	}
}

// variable is the data of an event of a UEFI variable.
func variable(name string, chars, size byte, value ...byte) []byte {
	b := append(bytes.Clone(secureBootVariable), chars, 0, 0, 0, 0, 0, 0, 0, size, 0, 0, 0, 0, 0, 0, 0)
	for _, c := range []byte(name) {
		b = append(b, c, 0)
	}
	return append(b, value...)
}

func TestSecureBootState(t *testing.T) {
	for _, tt := range []struct {
		name string
		data []byte
		on   bool
		text string // empty: no error
	}{
		{name: "on", data: variable("SecureBoot", 10, 1, 1), on: true},
		{name: "off", data: variable("SecureBoot", 10, 1, 0)},
		{name: "without a value", data: variable("SecureBoot", 10, 0)},
		{name: "another value", data: variable("SecureBoot", 10, 1, 2), text: "is 02"},
		{name: "two bytes", data: variable("SecureBoot", 10, 2, 1, 1), text: "is 0101"},
		{name: "a byte too many", data: variable("SecureBoot", 10, 1, 1, 1), text: "is 0101"},
		{name: "a byte too few", data: variable("SecureBoot", 10, 1), text: "is "},
		{name: "another variable", data: variable("SetupMode_", 10, 1, 1), text: "not of the variable"},
		{name: "another length of the name", data: variable("SecureBoot", 11, 1, 1), text: "not of the variable"},
		{name: "of a vendor", data: append([]byte{1}, variable("SecureBoot", 10, 1, 1)[1:]...), text: "no UEFI global variable"},
		{name: "cut off", data: variable("", 10, 1)[:20], text: "no UEFI global variable"},
		{name: "empty", text: "no UEFI global variable"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			h := sha256.Sum256(tt.data)
			on, err := bootLog{registers: []events{{pcrSecureBoot, h[:]}}, secureBoot: tt.data}.secureBootEnabled()
			if on != tt.on || tt.text == "" && err != nil || tt.text != "" && (err == nil || !strings.Contains(err.Error(), tt.text)) {
				t.Errorf("got %v, %v", on, err)
			}
		})
	}
	on := variable("SecureBoot", 10, 1, 1)
	h := sha256.Sum256(on)
	for name, b := range map[string]bootLog{
		"it is the second event":    {registers: []events{{pcrSecureBoot, append(make([]byte, pcrSize), h[:]...)}}, secureBoot: on},
		"it is in another register": {registers: []events{{0, h[:]}}, secureBoot: on},
		"it was not measured":       {registers: []events{{pcrSecureBoot, make([]byte, pcrSize)}}, secureBoot: on},
	} {
		if _, err := b.secureBootEnabled(); err == nil {
			t.Errorf("%s: it was accepted", name)
		}
	}
}

func TestBootLogsAreRefused(t *testing.T) {
	digest := make([]byte, pcrSize)
	for name, b := range map[string]bootLog{
		"a register of the operating system": {registers: []events{{10, digest}}},
		"a register that does not exist":     {registers: []events{{24, digest}}},
		"half a digest":                      {registers: []events{{0, digest[:16]}}},
		"no digest":                          {registers: []events{{0, nil}}},
		"registers out of order":             {registers: []events{{1, digest}, {0, digest}}},
		"a register twice":                   {registers: []events{{1, digest}, {1, digest}}},
	} {
		der, err := b.marshal()
		if err != nil {
			t.Fatal(err)
		}
		if _, err := parseBootLog(der); err == nil {
			t.Errorf("%s: it was read", name)
		}
	}
	zero := map[uint32][]byte{}
	for _, i := range loggedPCRs() {
		zero[i] = make([]byte, pcrSize)
	}
	if err := (bootLog{}).explains(zero); err != nil {
		t.Error(err)
	}
	if (bootLog{locality: 3}).explains(zero) == nil {
		t.Error("a locality without events was accepted")
	}
	zero[10] = extend(zero[10], make([]byte, pcrSize))
	if err := (bootLog{}).explains(zero); err != nil {
		t.Errorf("a register of the operating system counts: %v", err)
	}
}

// FuzzParseVendorDocument checks that each document has one spelling.
func FuzzParseVendorDocument(f *testing.F) {
	inner, err := bootLog{registers: []events{{7, make([]byte, 64)}}, secureBoot: variable("SecureBoot", 10, 1, 1), locality: 3}.marshal()
	if err != nil {
		f.Fatal(err)
	}
	doc, err := vendorDocument{intermediates: [][]byte{{1}, {2}}, evidence: inner}.marshal()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(doc, inner)
	f.Fuzz(func(t *testing.T, doc, log []byte) {
		if d, err := parseVendorDocument(doc); err == nil {
			if out, err := d.marshal(); err != nil || !bytes.Equal(out, doc) {
				t.Errorf("another spelling of %x: %x, %v", doc, out, err)
			}
		}
		if b, err := parseBootLog(log); err == nil {
			if out, err := b.marshal(); err != nil || !bytes.Equal(out, log) {
				t.Errorf("another spelling of %x: %x, %v", log, out, err)
			}
		}
	})
}

// certifiedAs is a vendor's judgement.
type certifiedAs struct {
	id    Identity
	err   error
	other error // of Names
}

// String implements Certified.
func (c certifiedAs) String() string { return c.id.Name }

// Names implements Certified.
func (c certifiedAs) Names(context.Context, Identity) error { return c.other }

// Identify implements Certified.
func (c certifiedAs) Identify(context.Context) (Identity, error) { return c.id, c.err }

// vendorForger forges evidence that a vendor judges, of a machine without Secure Boot.
func vendorForger(t *testing.T, ca *CA) *forger {
	t.Helper()
	f := newForger(t, ca)
	off := string(variable("SecureBoot", 10, 1, 0))
	events := append(boot(), MeasuredEvent{PCR: pcrSecureBoot, Digest: digest(off), Description: off})
	f.measured(events)
	firmware := newEventLog()
	for _, e := range events {
		if e.PCR != 11 { // of the operating system
			firmware = appendEvent(firmware, e)
		}
	}
	log, err := BootLog(firmware)
	if err != nil {
		t.Fatal(err)
	}
	f.log = log
	return f
}

// TestVendorsDecide has vendors that answer in each way. Package attest of a cloud tests a real one.
func TestVendorsDecide(t *testing.T) {
	ca := newCA(t, "cloud")
	f := vendorForger(t, ca)
	doc, err := vendorDocument{evidence: f.document(t)}.marshal()
	if err != nil {
		t.Fatal(err)
	}
	id := worker(0)
	id.Incarnation = "42"
	untrusted, unreachable := errors.New("untrusted"), errors.New("unreachable")
	for _, tt := range []struct {
		name   string
		vendor Vendor
		as     certifiedAs
		want   error
	}{
		{name: "accepted", as: certifiedAs{id: id}},
		{name: "not certified", vendor: Vendor{Certified: func([]*x509.Certificate, *x509.CertPool, time.Time) (Certified, error) { return nil, untrusted }}, want: ErrTrust},
		{name: "Secure Boot is required", vendor: Vendor{SecureBoot: true}, as: certifiedAs{id: id}, want: ErrMeasurement},
		{name: "the API does not answer", as: certifiedAs{err: unreachable}, want: unreachable},
		{name: "the API describes no machine", as: certifiedAs{id: Identity{Name: "worker-0"}}, want: ErrIdentity},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if tt.vendor.Certified == nil {
				tt.vendor.Certified = func([]*x509.Certificate, *x509.CertPool, time.Time) (Certified, error) { return tt.as, nil }
			}
			st, err := NewVendorValidator(tt.vendor, ca.Roots(), images(), Options{}).Validate(t.Context(), doc, nonce)
			if !errors.Is(err, tt.want) || tt.want == nil && (err != nil || st.Identity != id || st.SecureBoot != SecureBootOff || !st.Attested) {
				t.Errorf("got %+v, %v; want %v", st, err, tt.want)
			}
		})
	}
	if _, err := ca.certify(f.key.Public(), oidAttestationKey(), id); err == nil {
		t.Error("a certificate for an incarnation lost it")
	}
}
