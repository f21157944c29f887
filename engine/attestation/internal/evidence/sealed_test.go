package evidence

import (
	"bytes"
	"crypto/x509"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"

	"constellation/internal/swtpm"
)

// TestSealedSecrets has the machine that a secret was sealed on, and everything that it must not be readable on.
func TestSealedSecrets(t *testing.T) {
	t.Parallel()
	cluster, secret := []byte("a cluster"), []byte("canary-of-a-sealed-secret")
	address, reset := swtpm.Start(t)
	start := func(events []MeasuredEvent, member []byte) {
		t.Helper()
		if err := Measure(t.Context(), address, EventLogPath(address), events); err != nil {
			t.Fatal(err)
		}
		if member != nil {
			if err := ExtendClusterID(t.Context(), address, member); err != nil {
				t.Fatal(err)
			}
		}
	}
	start(boot(), nil)
	sealed, err := Seal(t.Context(), address, cluster, secret) // before the machine is a member, as a join does
	if err != nil {
		t.Fatal(err)
	}
	if bytes.Contains(sealed, secret) {
		t.Error("the secret is readable")
	}
	if _, err := Unseal(t.Context(), address, sealed); !errors.Is(err, ErrSealed) || !strings.Contains(err.Error(), "PCR 15") {
		t.Errorf("before the machine is a member: %v", err)
	}
	other := append(boot(), MeasuredEvent{PCR: 4, Digest: digest("another boot loader"), Description: "another boot loader"})
	for _, tt := range []struct {
		name   string
		events []MeasuredEvent
		member []byte
		want   string // in the error; empty: none
	}{
		{name: "a reboot of the member", events: boot(), member: cluster},
		{name: "a member of another cluster", events: boot(), member: []byte("another"), want: "PCR 15"},
		{name: "another boot loader", events: other, member: cluster, want: "PCR 4"},
		{name: "a later reboot of the member", events: boot(), member: cluster},
	} {
		t.Run(tt.name, func(t *testing.T) {
			reset()
			start(tt.events, tt.member)
			got, err := Unseal(t.Context(), address, sealed)
			if tt.want == "" && (err != nil || !bytes.Equal(got, secret)) || tt.want != "" && (!errors.Is(err, ErrSealed) || !errors.Is(err, ErrTPM) || !strings.Contains(err.Error(), tt.want)) {
				t.Errorf("got %d bytes, %v; want %q", len(got), err, tt.want)
			}
		})
	}
	t.Run("the disk in another machine", func(t *testing.T) {
		thief, _ := swtpm.Start(t)
		if err := errors.Join(Measure(t.Context(), thief, EventLogPath(thief), boot()), ExtendClusterID(t.Context(), thief, cluster)); err != nil {
			t.Fatal(err)
		}
		if _, err := Unseal(t.Context(), thief, sealed); !errors.Is(err, ErrSealed) || !strings.Contains(err.Error(), "this TPM did not seal it") {
			t.Errorf("got %v", err)
		}
	})
	t.Run("a changed file", func(t *testing.T) {
		for _, change := range []func(*sealedSecret){
			func(s *sealedSecret) { s.Data[len(s.Data)-1] ^= 1 },
			func(s *sealedSecret) { s.Private[len(s.Private)-1] ^= 1 },
			func(s *sealedSecret) { s.Public[len(s.Public)-1] ^= 1 },
			func(s *sealedSecret) { s.Version++ },
		} {
			var s sealedSecret
			if err := json.Unmarshal(sealed, &s); err != nil {
				t.Fatal(err)
			}
			change(&s)
			b, err := EncodeMessage(s)
			if err != nil {
				t.Fatal(err)
			}
			if got, err := Unseal(t.Context(), address, b); err == nil {
				t.Errorf("got %q", got)
			}
		}
		if got, err := Unseal(t.Context(), address, sealed); err != nil || !bytes.Equal(got, secret) {
			t.Errorf("the unchanged file: %v", err)
		}
	})
	t.Run("refused secrets", func(t *testing.T) {
		for _, b := range [][]byte{nil, make([]byte, maxSealed+1)} {
			if _, err := Seal(t.Context(), address, cluster, b); err == nil {
				t.Errorf("%d bytes were sealed", len(b))
			}
		}
		if _, err := Seal(t.Context(), address, nil, secret); err == nil {
			t.Error("a secret was sealed to no cluster")
		}
		if _, err := Seal(t.Context(), "unix:/nowhere", cluster, secret); !errors.Is(err, ErrTPM) {
			t.Errorf("without a TPM: %v", err)
		}
	})
}

func vendorOf(as certifiedAs) func([]*x509.Certificate, *x509.CertPool, time.Time) (Certified, error) {
	return func([]*x509.Certificate, *x509.CertPool, time.Time) (Certified, error) { return as, nil }
}

// TestCertifierBesideAVendor has certificates of a certifier in documents, and what a verifier makes of each.
func TestCertifierBesideAVendor(t *testing.T) {
	cloudCA, certifier, stranger := newCA(t, "cloud"), newCA(t, "certifier"), newCA(t, "stranger")
	f := vendorForger(t, cloudCA)
	id := worker(0)
	id.Incarnation = "42"
	unreachable, foreign := errors.New("unreachable"), errors.New("foreign")
	for _, tt := range []struct {
		name  string
		by    *CA
		usage string // certified for another usage
		key   string
		names error
		life  int // hours
		trust *CA
		want  error
	}{
		{name: "accepted without the API", by: certifier, life: 1, trust: certifier},
		{name: "of another certifier", by: stranger, life: 1, trust: certifier, want: unreachable},
		{name: "expired", by: certifier, life: -1, trust: certifier, want: unreachable},
		{name: "nobody trusts a certifier", by: certifier, life: 1, want: unreachable},
		{name: "of a machine that the vendor did not certify", by: certifier, life: 1, trust: certifier, names: foreign, want: unreachable},
		{name: "of another key", by: certifier, key: "other", life: 1, trust: certifier, want: ErrDocument},
		{name: "of another key, and nobody trusts a certifier", by: certifier, key: "other", life: 1, want: ErrDocument},
		{name: "of another usage", by: certifier, usage: "tpm2", life: 1, trust: certifier, want: unreachable},
	} {
		t.Run(tt.name, func(t *testing.T) {
			key := f.key
			if tt.key != "" {
				key = fixedKey(t, tt.key)
			}
			certificate, err := tt.by.certifyUntil(key.Public(), oidVendorKey(), id, time.Now().Add(time.Duration(tt.life)*time.Hour))
			if tt.usage != "" {
				certificate, err = tt.by.certify(key.Public(), oidAttestationKey(), worker(0))
			}
			if err != nil {
				t.Fatal(err)
			}
			doc, err := vendorDocument{evidence: f.document(t), certificate: certificate}.marshal()
			if err != nil {
				t.Fatal(err)
			}
			o := Options{}
			if tt.trust != nil {
				o.Certifiers = tt.trust.Roots()
			}
			v := Vendor{Certified: vendorOf(certifiedAs{err: unreachable, other: tt.names})}
			st, err := NewVendorValidator(v, cloudCA.Roots(), images(), o).Validate(t.Context(), doc, nonce)
			if !errors.Is(err, tt.want) || tt.want == nil && (err != nil || st.Identity != id || !st.Certified || st.Key == "") {
				t.Errorf("got %+v, %v; want %v", st, err, tt.want)
			}
			// With the API, each certificate that can be read is good enough: the API decides.
			v.Certified = vendorOf(certifiedAs{id: id, other: tt.names})
			st, err = NewVendorValidator(v, cloudCA.Roots(), images(), o).Validate(t.Context(), doc, nonce)
			if wantErr := errors.Is(tt.want, ErrDocument); wantErr != (err != nil) || err == nil && (st.Identity != id || st.Certified != (tt.want == nil)) {
				t.Errorf("with the API: %+v, %v", st, err)
			}
		})
	}
}
