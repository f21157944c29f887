package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"path/filepath"
	"strings"
	"testing"
	"testing/iotest"

	"constellation/bootstrapper"
	"constellation/engine/attestation"
	"constellation/engine/attestation/authority"
	"constellation/engine/cloud"
	"constellation/engine/cloud/machines"
)

func TestIdentityVerbs(t *testing.T) {
	t.Parallel()
	m := bootstrapper.Machine{Root: t.TempDir(), TPM: "/dev/tpmrm0"}
	verb := func(in string, args ...string) (stdout, stderr string, code int) {
		t.Helper()
		var out, errs bytes.Buffer
		code = identity(t.Context(), m, args, strings.NewReader(in), &out, &errs)
		return out.String(), errs.String(), code
	}
	must := func(in string, args ...string) string {
		t.Helper()
		out, errs, code := verb(in, args...)
		if code != 0 || errs != "" {
			t.Fatalf("identity %v: exit %d, %s", args, code, errs)
		}
		return out
	}
	cert, key, err := authority.Create("demo")
	if err != nil {
		t.Fatal(err)
	}
	a, err := authority.Parse(cert, key)
	if err != nil {
		t.Fatal(err)
	}
	if _, errs, code := verb("", "answer"); code != exitFailed || !strings.Contains(errs, "read challenge") {
		t.Errorf("no challenge: exit %d, %s", code, errs)
	}
	request := []byte(must("", "request", "-tpm", "none"))
	challenge, expect, err := a.Challenge(request)
	if err != nil {
		t.Fatal(err)
	}
	id := attestation.Identity{Name: "worker-0", ProviderID: "enrolled://demo/worker-0", UID: "demo", Group: "workers", Role: cloud.Worker}
	id.IP = id.IP.Next() // invalid
	answer := []byte(must(string(challenge), "answer"))
	if _, err := a.Certify(request, answer, expect, id); err == nil {
		t.Error("certified a machine without an address")
	}
	if err := id.IP.UnmarshalText([]byte("10.0.0.12")); err != nil {
		t.Fatal(err)
	}
	certificate, err := a.Certify(request, answer, expect, id)
	if err != nil {
		t.Fatal(err)
	}
	var stored attestation.EnrolledIdentity
	if err := json.Unmarshal([]byte(must(string(certificate), "store")), &stored); err != nil || stored.Machine != id || stored.Attested || stored.Kind != attestation.KindKey {
		t.Errorf("stored %+v, %v", stored, err)
	}
	if _, err := attestation.NewEnrolledIssuer("enrolled:"+filepath.Join(m.Root, machines.IdentityDir)).Issue(t.Context(), []byte("nonce")); err != nil {
		t.Error(err)
	}

	for _, tt := range []struct {
		args  []string
		in    string
		code  int
		wants string
	}{
		{code: exitUsage, wants: "needs one verb"},
		{args: []string{"request", "now"}, code: exitUsage, wants: "needs one verb"},
		{args: []string{"request", "-moon"}, code: exitUsage, wants: "-tpm address"},
		{args: []string{"request", "-tpm", "/dev/tpmrm9"}, code: exitFailed, wants: "this machine has a key in a file"},
		{args: []string{"forget"}, code: exitUsage, wants: `unexpected verb "forget"`},
		{args: []string{"store"}, in: "{}", code: exitFailed, wants: "identity store: read certificate of the machine: it is not PEM"},
		{args: []string{"store"}, in: strings.Repeat("x", maxInput+1), code: exitFailed, wants: "more than 65536 bytes"},
	} {
		if out, errs, code := verb(tt.in, tt.args...); code != tt.code || !strings.Contains(errs, tt.wants) || out != "" {
			t.Errorf("identity %v: exit %d, %s", tt.args, code, errs)
		}
	}
	var errs bytes.Buffer
	if code := identity(t.Context(), m, []string{"answer"}, iotest.ErrReader(errors.New("cut")), &errs, &errs); code != exitFailed || !strings.Contains(errs.String(), "read stdin: cut") {
		t.Errorf("a lost connection: exit %d, %s", code, errs.String())
	}
	errs.Reset()
	other := m
	other.Root, other.TPM = t.TempDir(), "enrolled:/elsewhere"
	if code := identity(t.Context(), other, []string{"store"}, bytes.NewReader(certificate), &errs, &errs); code != exitFailed || !strings.Contains(errs.String(), "enrol the machine with") {
		t.Errorf("a machine without an identity: exit %d, %s", code, errs.String())
	}
	var out bytes.Buffer
	if code := identity(t.Context(), other, []string{"request", "-tpm=none"}, nil, &out, &errs); code != 0 {
		t.Errorf("another directory: exit %d, %s", code, errs.String())
	}
	if code := identity(t.Context(), other, []string{"store"}, bytes.NewReader(certificate), &out, &errs); code != exitFailed || !strings.Contains(errs.String(), "issued for another key") {
		t.Errorf("a stolen certificate: exit %d, %s", code, errs.String())
	}
}
