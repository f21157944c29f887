package providers_test

import (
	"crypto/x509"
	"encoding/pem"
	"errors"
	"net/netip"
	"strings"
	"testing"

	"constellation/engine/attestation"
	"constellation/engine/attestation/attestationtest"
	"constellation/engine/cloud"
	"constellation/engine/cloud/gcp"
	"constellation/engine/cloud/providers"
	"constellation/engine/cloud/section"
)

func google(t *testing.T) providers.Provider {
	t.Helper()
	p, ok := providers.Named(gcp.Name)
	if !ok {
		t.Fatal("no provider gcp")
	}
	return p
}

// TestEvidenceFollowsTheAddresses has the addresses that bootstrappers and join services start with.
func TestEvidenceFollowsTheAddresses(t *testing.T) {
	p := google(t)
	emulator, ok := p.Emulator(section.Values{"socket": "/run/cloud.sock"})
	if !ok {
		t.Fatal("no emulator")
	}
	const simulated = "http://127.1.0.2:8090?compute=http://127.1.0.1:8091/compute/v1/"
	for _, tt := range []struct {
		name, metadata, tpm string
		want                attestation.Variant // empty: refused
	}{
		{name: "a machine at Google, by defaults", want: attestation.VendorTPM2},
		{name: "a machine at Google, named", metadata: gcp.DefaultMetadata, tpm: "/dev/tpmrm0", want: attestation.VendorTPM2},
		{name: "another TPM of the kernel", tpm: "/dev/tpmrm1", want: attestation.VendorTPM2},
		{name: "a sandbox", metadata: emulator.Metadata, tpm: emulator.TPM, want: attestation.EmulatedVendorTPM2},
		{name: "a simulated machine of a sandbox", metadata: simulated, tpm: "unix:/tmp/demo/tpm.sock", want: attestation.EmulatedVendorTPM2},
		{name: "an emulator's address at a machine with a real TPM", metadata: emulator.Metadata},
		{name: "an emulator's TPM at Google's address", tpm: emulator.TPM},
		{name: "Google's address with another API", metadata: gcp.DefaultMetadata + "?compute=https://lies.example.com/compute/v1/"},
		{name: "another metadata server", metadata: "http://lies.example.com"},
		{name: "Google's address by another name", metadata: "http://169.254.169.254"},
		{name: "a TPM that is no path", tpm: "enrolled:/var/lib/x"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			on, err := p.On(tt.metadata, tt.tpm)
			if tt.want == "" {
				if err == nil || !strings.Contains(err.Error(), "neither those of a machine at Google") || on.Attestation.Validator != nil {
					t.Errorf("got evidence of variant %q, %v", on.Attestation.Variant, err)
				}
				return
			}
			if err != nil || on.Attestation.Variant != tt.want {
				t.Errorf("got variant %q, %v, want %q", on.Attestation.Variant, err, tt.want)
			}
		})
	}
	// Other providers have one method.
	other, _ := providers.Named(providers.Local)
	if on, err := other.On("http://somewhere", "/dev/tpm0"); err != nil || on.Attestation.Variant != attestation.TPM2 || on.MetadataAddress != "http://somewhere" || on.TPMAddress != "/dev/tpm0" {
		t.Errorf("sandbox: %+v, %v", on, err)
	}
}

func TestEvidenceFollowsTheState(t *testing.T) {
	p := google(t)
	real := section.Values{"project": "my-project", "zones": []string{"europe-west3-a"}, "uid": "u"}
	emulated := section.Values{"project": "my-project", "zones": []string{"europe-west3-a"}, "uid": "u", "socket": "/run/cloud.sock"}
	for name, tt := range map[string]struct {
		p    providers.Provider
		want attestation.Variant
	}{
		"the entry itself": {p, attestation.VendorTPM2}, "no state": {p.At(nil), attestation.VendorTPM2}, "Google": {p.At(real), attestation.VendorTPM2}, "a sandbox": {p.At(emulated), attestation.EmulatedVendorTPM2},
	} {
		if tt.p.Attestation.Variant != tt.want {
			t.Errorf("%s: variant %s, want %s", name, tt.p.Attestation.Variant, tt.want)
		}
	}
	if p.Fixed != nil {
		t.Error("machines at Google are refused")
	}
	values, sandbox := p.At(real).ChartValues(nil), p.At(emulated).ChartValues(nil)
	if values["joinservice.eventLogDir"] != "/sys/kernel/security" || values["joinservice.tpmDevice"] != "/dev/tpmrm0" || values["metadataURL"] != gcp.DefaultMetadata {
		t.Errorf("values at Google: %v", values)
	}
	if sandbox["joinservice.eventLogDir"] != "" || sandbox["joinservice.tpmDevice"] != "" {
		t.Errorf("values in a sandbox: %v", sandbox)
	}
}

// TestSandboxEvidenceAtGoogle judges evidence of a sandbox as each program at Google does, under roots that contain the
// sandbox's own.
func TestSandboxEvidenceAtGoogle(t *testing.T) {
	p := google(t)
	certPEM, keyPEM, err := attestationtest.CreateCA("sandbox")
	if err != nil {
		t.Fatal(err)
	}
	ca, err := attestationtest.ParseCA(certPEM, keyPEM)
	if err != nil {
		t.Fatal(err)
	}
	boot := []attestation.MeasuredEvent{{PCR: 4, Digest: make([]byte, 32), Description: "boot loader"}}
	id := attestation.Identity{Name: "cp-0", ProviderID: "gce://my-project/europe-west3-a/cp-0", UID: "u", Group: "control-planes", Role: cloud.ControlPlane, IP: netip.MustParseAddr("10.0.0.2")}
	issuer, err := attestationtest.NewSoftwareIssuer(ca, id, boot, nil)
	if err != nil {
		t.Fatal(err)
	}
	doc, err := issuer.Issue(t.Context(), []byte("nonce"))
	if err != nil {
		t.Fatal(err)
	}
	both := x509.NewCertPool()
	for rest := append(certPEM, p.Roots()...); len(rest) > 0; {
		var b *pem.Block
		if b, rest = pem.Decode(rest); b == nil {
			break
		}
		c, err := x509.ParseCertificate(b.Bytes)
		if err != nil {
			t.Fatal(err)
		}
		both.AddCert(c)
	}
	measurements := attestation.Enforced(attestation.PredictPCRs(boot))
	machine, err := p.On("", "")
	if err != nil {
		t.Fatal(err)
	}
	sandbox, err := p.On("http://127.1.0.2?compute=http://127.1.0.1/compute/v1/", "unix:/run/tpm/tpm.sock")
	if err != nil {
		t.Fatal(err)
	}
	for name, tt := range map[string]struct {
		p     providers.Provider
		roots *x509.CertPool
		want  error
	}{
		"a machine at Google":                              {p: machine, roots: both, want: attestation.ErrDocument},
		"a machine at Google with the sandbox's roots":     {p: machine, roots: ca.Roots(), want: attestation.ErrDocument},
		"the console":                                      {p: p.At(section.Values{"project": "my-project", "zones": []string{"europe-west3-a"}, "uid": "u"}), roots: both, want: attestation.ErrDocument},
		"a machine at Google with an emulator's addresses": {p: sandbox, roots: both, want: attestation.ErrTrust},
		"a machine of a sandbox that emulates Google":      {p: sandbox, roots: ca.Roots(), want: attestation.ErrDocument},
	} {
		if _, err := tt.p.Attestation.Validator(tt.roots, measurements, attestation.Options{}).Validate(t.Context(), doc, []byte("nonce")); !errors.Is(err, tt.want) {
			t.Errorf("%s: %v, want %v", name, err, tt.want)
		}
	}
}
