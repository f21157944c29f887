package bootstrapper

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"constellation/engine/attestation"
	"constellation/engine/attestation/attestationtest"
	workspace "constellation/engine/attestation/authority"
	"constellation/engine/cloud"
)

// enrol gives r's machine a key that the authority of a workspace certified, in place of the TPM of
// a cloud. tpm is the address of the TPM with the key, or attestation.NoTPM. It returns what enrols
// another machine, and returns the address of its identity.
func (r *rig) enrol(tpm string) (another func(attestation.Identity) string) {
	r.t.Helper()
	cert, key, err := workspace.Create("workspace")
	if err != nil {
		r.t.Fatal(err)
	}
	a, err := workspace.Parse(cert, key)
	if err != nil {
		r.t.Fatal(err)
	}
	dir := filepath.Join(r.ctl, "identity")
	if err := attestationtest.EnrolTPM(r.t.Context(), a, dir, tpm, r.tpm.id); err != nil {
		r.t.Fatal(err)
	}
	r.m.TPM, r.m.registers = "enrolled:"+dir, nil
	method := attestation.EnrolledMethod()
	r.m.Issuer, r.m.Validator = method.Issuer(r.m.TPM), method.Validator
	if r.m.Roots, err = attestation.ParseRoots(cert); err != nil {
		r.t.Fatal(err)
	}
	r.judge = func(rule attestation.PCR15) attestation.Validator {
		return method.Validator(r.m.Roots, nil, attestation.Options{PCR15: rule, UID: r.tpm.id.UID, Role: r.tpm.id.Role})
	}
	return func(id attestation.Identity) string {
		r.t.Helper()
		dir := r.t.TempDir()
		if err := attestationtest.Enrol(r.t.Context(), a, dir, id); err != nil {
			r.t.Fatal(err)
		}
		return "enrolled:" + dir
	}
}

// register is what register 15 of r's machine holds.
func (r *rig) register() []byte {
	r.t.Helper()
	pcrs, err := attestation.ReadPCRs(r.t.Context(), r.m.TPM, clusterRegister)
	if err != nil {
		r.t.Fatal(err)
	}
	return pcrs[clusterRegister]
}

// TestLifeOfAnEnrolledMachine takes a machine without a TPM through an init, a reboot, a reset, and
// an init for another cluster.
func TestLifeOfAnEnrolledMachine(t *testing.T) {
	r := newRig(t, cloud.ControlPlane)
	r.enrol(attestation.NoTPM)
	x := r.start()
	if got, err := collect(r.console(x.addr).Init(t.Context(), r.request(clusterA))); err != nil || outline(got) != goodInit {
		t.Fatalf("init: %s, %v", outline(got), err)
	}
	x.stop(t)
	if !bytes.Equal(r.register(), attestation.ClusterIDPCR(clusterA)) {
		t.Errorf("register 15 of a member is %x", r.register())
	}
	x = r.start() // as after a reboot: the marker is on disk
	x.stop(t)
	if !bytes.Equal(r.register(), attestation.ClusterIDPCR(clusterA)) {
		t.Errorf("register 15 after a reboot is %x", r.register())
	}
	if unused, err := Reset(t.Context(), r.m, func(string) {}); err != nil || !unused {
		t.Fatalf("reset: unused %t, %v", unused, err)
	}
	x = r.start()
	if got, err := collect(r.console(x.addr).Init(t.Context(), r.request(clusterB))); err != nil || outline(got) != goodInit {
		t.Errorf("init after a reset: %s, %v", outline(got), err)
	}
	x.stop(t)
}

func TestLockAndMarkerMustAgree(t *testing.T) {
	for _, tt := range []struct {
		name  string
		spoil func(t *testing.T, r *rig)
		stuck string // part of the error of the next start
	}{
		{name: "a marker without a claim", spoil: func(t *testing.T, r *rig) { os.Remove(filepath.Join(r.m.StateDir, holderFile)) }, stuck: "the disk has no claim; run `bootstrapper reset` on it"},
		{name: "a claim without a marker", spoil: func(t *testing.T, r *rig) { os.Remove(filepath.Join(r.ctl, "identity/cluster")) }},
		{name: "a marker of another cluster", spoil: func(t *testing.T, r *rig) {
			if err := errors.Join(attestation.ClearClusterID(r.m.TPM), attestation.ExtendClusterID(t.Context(), r.m.TPM, clusterB)); err != nil {
				t.Fatal(err)
			}
		}, stuck: "name different clusters"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := newRig(t, cloud.Worker)
			r.enrol(attestation.NoTPM)
			if err := os.MkdirAll(r.m.StateDir, 0o700); err != nil {
				t.Fatal(err)
			}
			l, err := openLock(t.Context(), openState(t, r.m.StateDir), tpm(r.m.TPM))
			if err != nil {
				t.Fatal(err)
			}
			if err := errors.Join(l.ClaimJoin(t.Context(), clusterA), l.Joined(t.Context(), "worker-0")); err != nil {
				t.Fatal(err)
			}
			tt.spoil(t, r)
			err = r.start().end(t)
			if tt.stuck == "" {
				if err != nil || !bytes.Equal(r.register(), attestation.ClusterIDPCR(clusterA)) {
					t.Errorf("%v; register 15 is %x", err, r.register())
				}
				return
			}
			if !errors.Is(err, ErrStuck) || !strings.Contains(err.Error(), tt.stuck) {
				t.Errorf("got %v, want %q", err, tt.stuck)
			}
			if unused, err := Reset(t.Context(), r.m, func(string) {}); err != nil || !unused {
				t.Errorf("reset: unused %t, %v", unused, err)
			}
			if _, held := r.holder(); held {
				t.Error("the claim is left after a reset")
			}
		})
	}
}

// TestJoinOfAnEnrolledMachineIsRetried has joins that fail or are killed. The marker survives
// reboots, so the next start clears it if it needs another ticket.
func TestJoinOfAnEnrolledMachineIsRetried(t *testing.T) {
	for _, tt := range []struct {
		name    string
		tickets int // requested in all
		expire  bool
	}{
		{name: "with its ticket", tickets: 1},
		{name: "with another ticket", tickets: 2, expire: true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := newRig(t, cloud.Worker)
			another := r.enrol(attestation.NoTPM)
			s := r.serveJoins(func(s *service) {
				address := another(s.member.id)
				if err := attestation.ExtendClusterID(t.Context(), address, clusterB); err != nil {
					t.Fatal(err)
				}
				s.issuer = attestation.NewEnrolledIssuer(address)
			})
			r.script("fail-join", "3") // a permanent failure
			if err := r.start().end(t); !errors.Is(err, ErrStuck) || !strings.Contains(err.Error(), "scripted") || !strings.Contains(err.Error(), "restart the machine to retry") {
				t.Fatalf("ended with %v", err)
			}
			if !bytes.Equal(r.register(), attestation.ClusterIDPCR(clusterB)) {
				t.Errorf("register 15 of a claimed machine is %x", r.register())
			}
			if tt.expire {
				old := time.Now().Add(-ticketLife - time.Second)
				if err := os.Chtimes(filepath.Join(r.m.StateDir, ticketFile), old, old); err != nil {
					t.Fatal(err)
				}
			}
			r.unscript("fail-join")
			if err := r.start().end(t); err != nil {
				t.Errorf("the next start: %v", err)
			}
			if h, _ := r.holder(); h.State != member || s.asked() != tt.tickets || !bytes.Equal(r.register(), attestation.ClusterIDPCR(clusterB)) {
				t.Errorf("holder %+v, %d tickets, register 15 is %x", h, s.asked(), r.register())
			}
		})
	}
}

// A crash between the two steps of a reset leaves a state in which the reset can be repeated.
func TestResetOfAnEnrolledMachineKeepsTheClaimUntilTheEnd(t *testing.T) {
	r := newRig(t, cloud.Worker)
	r.enrol(attestation.NoTPM)
	if err := os.MkdirAll(r.m.StateDir, 0o700); err != nil {
		t.Fatal(err)
	}
	l, err := openLock(t.Context(), openState(t, r.m.StateDir), tpm(r.m.TPM))
	if err != nil {
		t.Fatal(err)
	}
	if err := l.ClaimJoin(t.Context(), clusterA); err != nil {
		t.Fatal(err)
	}
	marker := filepath.Join(r.ctl, "identity/cluster")
	if err := errors.Join(os.Remove(marker), os.MkdirAll(filepath.Join(marker, "x"), 0o700)); err != nil {
		t.Fatal(err)
	}
	if _, err := Reset(t.Context(), r.m, func(string) {}); err == nil || !strings.Contains(err.Error(), "clear register 15") {
		t.Errorf("with a marker that cannot be removed: %v", err)
	}
	if _, held := r.holder(); !held {
		t.Error("the claim was removed although the marker is left")
	}
	if err := os.RemoveAll(marker); err != nil {
		t.Fatal(err)
	}
	if unused, err := Reset(t.Context(), r.m, func(string) {}); err != nil || !unused {
		t.Errorf("repeated: unused %t, %v", unused, err)
	}
}

func TestServiceValidatorOfAnEnrolledMachine(t *testing.T) {
	r := newRig(t, cloud.ControlPlane)
	r.enrol(attestation.NoTPM)
	b, err := open(r.m)
	if err != nil {
		t.Fatal(err)
	}
	defer b.close()
	v, err := b.serviceValidator(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	judge := func() error {
		t.Helper()
		nonce := []byte("nonce")
		doc, err := r.m.Issuer.Issue(t.Context(), nonce)
		if err != nil {
			t.Fatal(err)
		}
		_, err = v.Validate(t.Context(), doc, nonce)
		return err
	}
	if err := judge(); !errors.Is(err, attestation.ErrMember) {
		t.Errorf("a join service on an unused machine: %v", err)
	}
	if err := attestation.ExtendClusterID(t.Context(), r.m.TPM, clusterA); err != nil {
		t.Fatal(err)
	}
	if err := judge(); err != nil {
		t.Errorf("a join service on a member: %v", err)
	}
}
