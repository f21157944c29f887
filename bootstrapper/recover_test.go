package bootstrapper

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-tpm/tpm2"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"constellation/bootstrapper/initproto"
	"constellation/engine/attestation"
	"constellation/engine/attestation/certifier/signer"
	"constellation/engine/attestation/keyprocess"
	"constellation/engine/cloud"
	"constellation/engine/cloud/gcp/attest/attesttest/lab"
	"constellation/engine/cloud/gcp/gcptest"
	"constellation/engine/kms"
)

// encrypting is the first control plane of clusterB, whose init was acknowledged. It has keys of a key service, and of a certifier
// unless those are nil.
type encrypting struct {
	*rig
	vm       *lab.VM
	kms      []byte
	canaries [][]byte
	stopKeys func() // ends its key service
}

func newEncrypting(t *testing.T, certifier []byte) *encrypting {
	t.Helper()
	e := &encrypting{rig: newRig(t, cloud.ControlPlane)}
	e.kms, e.canaries = kmsKeys(t)
	p := lab.NewProject(t)
	e.vm = p.Start(p.Group("control-planes", cloud.ControlPlane, gcptest.UID), nil)
	e.atGoogle(p, e.vm, e.vm)
	e.m.Metadata = withSecret{e.m.Metadata}
	e.stopKeys = e.serveKeys()
	x := e.start()
	req := e.request(clusterB)
	req.KmsKeys, req.CertifierKeys = bytes.Clone(e.kms), bytes.Clone(certifier)
	if _, err := collect(e.console(x.addr).Init(t.Context(), req)); err != nil {
		t.Fatalf("%v\n%s", err, e.logged())
	}
	if _, err := e.console(x.addr).Ack(t.Context(), &initproto.AckRequest{InitSecret: initSecret}); err != nil {
		t.Fatal(err)
	}
	if err := x.end(t); err != nil {
		t.Fatal(err)
	}
	return e
}

// lose stops the key service, has lose change the machine, and starts the key service again as its unit does.
func (e *encrypting) lose(lose func(e *encrypting)) {
	e.t.Helper()
	e.stopKeys()
	lose(e)
	e.stopKeys = e.serveKeys()
}

func (e *encrypting) remove(names ...string) {
	e.t.Helper()
	for _, n := range names {
		if err := os.Remove(filepath.Join(e.m.StateDir, n)); err != nil {
			e.t.Fatal(err)
		}
	}
}

// again starts a Run after an earlier one. A program that another test starts may have the lock for a moment.
func (e *encrypting) again() (x *run) {
	e.t.Helper()
	wait(e.t, "the lock is free", func() bool {
		x = e.start()
		select {
		case err := <-x.done:
			x.done <- err // for end
			return err == nil || !strings.Contains(err.Error(), "another bootstrapper is running")
		default:
			return true
		}
	})
	return x
}

// boots is a Run that ends by itself, and starts the kubelet once.
func (e *encrypting) boots() {
	e.t.Helper()
	before := len(e.started())
	if err := e.again().end(e.t); err != nil {
		e.t.Errorf("%v\n%s", err, e.logged())
	}
	if n := len(e.started()) - before; n != 1 {
		e.t.Errorf("the kubelet was started %d times", n)
	}
}

func recovery(cluster, keys []byte) *initproto.RecoverRequest {
	return &initproto.RecoverRequest{InitSecret: initSecret, ClusterId: cluster, KmsKeys: bytes.Clone(keys)}
}

// TestRecover has a control plane lose the keys of its key service in each way that a recovery helps with.
func TestRecover(t *testing.T) {
	t.Parallel()
	otherSecret, err := kms.First(bytes.Repeat([]byte{7}, kms.SecretSize), 1)
	if err != nil {
		t.Fatal(err)
	}
	otherKeys, err := otherSecret.Encode()
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name   string
		lose   func(e *encrypting)
		reason string
		old    bool // no fingerprint is recorded
	}{
		{name: "the file is missing", lose: func(e *encrypting) { e.remove(kms.SealedFile) }, reason: "kms-key.json is missing"},
		{name: "the file is damaged", reason: "read sealed secret", lose: func(e *encrypting) {
			if err := os.WriteFile(filepath.Join(e.m.StateDir, kms.SealedFile), []byte("{"), 0o600); err != nil {
				e.t.Fatal(err)
			}
		}},
		{name: "the machine booted otherwise", lose: func(e *encrypting) { e.vm.Measure(8, "another command line") }, reason: "secret is sealed to another machine or boot"},
		{name: "the TPM was cleared", lose: func(e *encrypting) { clearTPM(e.t, e.vm.TPM) }, reason: "secret is sealed to another machine or boot"},
		{name: "a machine of an earlier release", lose: func(e *encrypting) { e.remove(kms.SealedFile, keyIDsFile) }, reason: "kms-key.json is missing", old: true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			e := newEncrypting(t, nil)
			keys, err := kms.Parse(e.kms)
			if err != nil {
				t.Fatal(err)
			}
			e.lose(tt.lose)
			e.judge = func(rule attestation.PCR15) attestation.Validator { // the owner accepts the new command line
				m := lab.Measurements()
				delete(m, 8)
				return e.vm.Method().Validator(e.m.Roots, m, attestation.Options{PCR15: rule, UID: gcptest.UID})
			}
			before := len(e.started())
			x := e.again()
			if x.addr == "" {
				t.Fatalf("it does not listen\n%s", e.logged())
			}
			if n := len(e.started()) - before; n != 1 {
				t.Errorf("the kubelet was started %d times before the keys are there", n)
			}
			// Its evidence shows a member of this cluster, and of no other.
			judge := e.judge
			e.judge = memberOf(judge, clusterA)
			if _, err := e.console(x.addr).Recover(t.Context(), recovery(clusterB, e.kms)); err == nil {
				t.Error("the machine showed evidence of another cluster")
			}
			e.judge = memberOf(judge, clusterB)
			c := e.console(x.addr)
			lost, err := c.Recovery(t.Context(), &initproto.RecoveryRequest{InitSecret: initSecret})
			if err != nil || len(lost.GetLost()) != 1 || lost.GetNodeName() != e.vm.Certified.Name {
				t.Fatalf("it waits for %v, %v", lost, err)
			}
			want := keys.Fingerprint()
			if tt.old {
				want = ""
			}
			if l := lost.GetLost()[0]; l.GetProcess() != keyprocess.KeyService || !strings.Contains(l.GetReason(), tt.reason) || l.GetFingerprint() != want {
				t.Errorf("it waits for %v, want fingerprint %q and reason %q", l, want, tt.reason)
			}
			stored, _ := os.ReadFile(filepath.Join(e.m.StateDir, kms.SealedFile))
			for name, r := range map[string]struct {
				req  *initproto.RecoverRequest
				code codes.Code
			}{
				"a wrong init secret": {&initproto.RecoverRequest{InitSecret: []byte("guess"), ClusterId: clusterB, KmsKeys: e.kms}, codes.Unauthenticated},
				"another cluster":     {recovery(clusterA, e.kms), codes.FailedPrecondition},
				"malformed keys":      {recovery(clusterB, []byte("none")), codes.InvalidArgument},
				"no keys":             {recovery(clusterB, nil), codes.InvalidArgument},
				"another secret":      {recovery(clusterB, otherKeys), codes.FailedPrecondition},
			} {
				if tt.old && name == "another secret" {
					continue // nothing to compare with
				}
				if _, err := c.Recover(t.Context(), r.req); status.Code(err) != r.code {
					t.Errorf("%s: %v, want %s", name, err, r.code)
				}
			}
			if _, err := c.Recovery(t.Context(), &initproto.RecoveryRequest{InitSecret: []byte("guess")}); status.Code(err) != codes.Unauthenticated {
				t.Errorf("what it lost, for a wrong init secret: %v", err)
			}
			if _, err := c.Init(t.Context(), e.request(clusterB)); err != nil {
				t.Error(err)
			} else if _, err := collect(c.Init(t.Context(), e.request(clusterB))); status.Code(err) != codes.FailedPrecondition {
				t.Errorf("an init of a member: %v", err)
			}
			if now, _ := os.ReadFile(filepath.Join(e.m.StateDir, kms.SealedFile)); !bytes.Equal(now, stored) {
				t.Error("a refused request changed the file")
			}
			got, err := c.Recover(t.Context(), recovery(clusterB, e.kms))
			if err != nil || len(got.GetStored()) != 1 || got.GetStored()[0] != keyprocess.KeyService {
				t.Fatalf("stored %v, %v\n%s", got, err, e.logged())
			}
			if err := x.end(t); err != nil {
				t.Fatal(err)
			}
			if g, err := (kms.Client{Socket: e.m.KeysSocket}).HandOver(t.Context(), e.vm.Identity()); err != nil || !bytes.Equal(g, e.kms) {
				t.Errorf("handed over %d bytes, %v", len(g), err)
			}
			e.scan("at the end", e.canaries)
			var ids map[string]string
			if b, err := os.ReadFile(filepath.Join(e.m.StateDir, keyIDsFile)); err != nil || json.Unmarshal(b, &ids) != nil || ids[keyprocess.KeyService] != keys.Fingerprint() {
				t.Errorf("fingerprints %v, %v", ids, err)
			}
			e.boots()
		})
	}
}

// memberOf judges members of one cluster.
func memberOf(judge func(attestation.PCR15) attestation.Validator, cluster []byte) func(attestation.PCR15) attestation.Validator {
	return func(attestation.PCR15) attestation.Validator { return judge(attestation.PCR15ClusterID(cluster)) }
}

// clearTPM does what a firmware does when its user clears the TPM.
func clearTPM(t *testing.T, address string) {
	t.Helper()
	dev, err := attestation.OpenTPM(t.Context(), address)
	if err != nil {
		t.Fatal(err)
	}
	defer dev.Close()
	if _, err := (tpm2.Clear{AuthHandle: tpm2.AuthHandle{Handle: tpm2.TPMRHLockout, Auth: tpm2.PasswordAuth(nil)}}).Execute(dev); err != nil {
		t.Fatal(err)
	}
}

// TestRecoverKeysOfTheCertifier has a control plane lose the keys of both processes. It stores all of them, or none.
func TestRecoverKeysOfTheCertifier(t *testing.T) {
	t.Parallel()
	certifier, canaries := certifierKeys(t)
	e := newEncrypting(t, certifier)
	e.lose(func(e *encrypting) { e.remove(kms.SealedFile, signer.SealedFile) })
	x := e.again()
	c := e.console(x.addr)
	lost, err := c.Recovery(t.Context(), &initproto.RecoveryRequest{InitSecret: initSecret})
	if err != nil || len(lost.GetLost()) != 2 || lost.GetLost()[0].GetFingerprint() == "" {
		t.Fatalf("it waits for %v, %v", lost, err)
	}
	req := recovery(clusterB, e.kms)
	if _, err := c.Recover(t.Context(), req); status.Code(err) != codes.InvalidArgument || exists(filepath.Join(e.m.StateDir, kms.SealedFile)) {
		t.Errorf("half of the keys: %v; stored: %t", err, exists(filepath.Join(e.m.StateDir, kms.SealedFile)))
	}
	req.CertifierKeys = bytes.Clone(certifier)
	if got, err := c.Recover(t.Context(), req); err != nil || len(got.GetStored()) != 2 {
		t.Fatalf("stored %v, %v", got, err)
	}
	if err := x.end(t); err != nil {
		t.Fatal(err)
	}
	client, stop := e.serveCertifier()
	defer stop()
	if got, err := client.HandOver(t.Context(), e.vm.Identity()); err != nil || !bytes.Equal(got, certifier) {
		t.Errorf("handed over %d bytes, %v", len(got), err)
	}
	e.scan("at the end", append(e.canaries, canaries...))
	e.boots()
}

// TestNoRecoveryWithoutALoss has machines that wait for no keys.
func TestNoRecoveryWithoutALoss(t *testing.T) {
	t.Parallel()
	keys, _ := kmsKeys(t)
	t.Run("a machine in no cluster", func(t *testing.T) {
		t.Parallel()
		r := newRig(t, cloud.ControlPlane)
		x := r.start()
		if _, err := r.console(x.addr).Recover(t.Context(), recovery(clusterB, keys)); status.Code(err) != codes.FailedPrecondition {
			t.Errorf("got %v", err)
		}
		if _, err := r.console(x.addr).Recovery(t.Context(), &initproto.RecoveryRequest{InitSecret: initSecret}); status.Code(err) != codes.FailedPrecondition {
			t.Errorf("what it lost: %v", err)
		}
		x.stop(t)
		if exists(filepath.Join(r.m.StateDir, kms.SealedFile)) || exists(filepath.Join(r.m.StateDir, keyIDsFile)) {
			t.Error("something was stored")
		}
	})
	t.Run("a worker", func(t *testing.T) {
		t.Parallel()
		r := newRig(t, cloud.Worker)
		r.serveJoins(nil)
		if err := r.start().end(t); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(r.m.StateDir, keyIDsFile), []byte(`{"key service":"0123456789abcdef"}`), 0o600); err != nil {
			t.Fatal(err)
		}
		x := r.start()
		if err := x.end(t); err != nil || x.addr != "" || !strings.Contains(r.logged(), "keys not awaited") {
			t.Errorf("%v, it listens at %q\n%s", err, x.addr, r.logged())
		}
	})
	t.Run("a control plane with its keys", func(t *testing.T) {
		t.Parallel()
		e := newEncrypting(t, nil)
		e.remove(keyIDsFile) // it joined with an earlier release
		e.boots()
		if !exists(filepath.Join(e.m.StateDir, keyIDsFile)) {
			t.Error("the fingerprint was not recorded")
		}
	})
	t.Run("the file comes back", func(t *testing.T) {
		t.Parallel()
		e := newEncrypting(t, nil)
		at := filepath.Join(e.m.StateDir, kms.SealedFile)
		e.lose(func(e *encrypting) {
			if err := os.Rename(at, at+".away"); err != nil {
				t.Fatal(err)
			}
		})
		x := e.again()
		if x.addr == "" {
			t.Fatal("it does not listen")
		}
		if err := os.Rename(at+".away", at); err != nil {
			t.Fatal(err)
		}
		if err := x.end(t); err != nil {
			t.Error(err)
		}
	})
}

// TestRecoverAfterACrash has the process die while a control plane waits for keys, and the result of its init was not fetched.
func TestRecoverAfterACrash(t *testing.T) {
	t.Parallel()
	e := &encrypting{rig: newRig(t, cloud.ControlPlane)}
	e.kms, e.canaries = kmsKeys(t)
	p := lab.NewProject(t)
	e.vm = p.Start(p.Group("control-planes", cloud.ControlPlane, gcptest.UID), nil)
	e.atGoogle(p, e.vm, e.vm)
	e.m.Metadata = withSecret{e.m.Metadata}
	e.stopKeys = e.serveKeys()
	x := e.start()
	req := e.request(clusterB)
	req.KmsKeys = bytes.Clone(e.kms)
	if _, err := collect(e.console(x.addr).Init(t.Context(), req)); err != nil {
		t.Fatal(err)
	}
	x.stop(t)
	e.lose(func(e *encrypting) { e.remove(kms.SealedFile) })
	e.again().stop(t)
	x = e.again()
	c := e.console(x.addr)
	if _, err := c.Recover(t.Context(), recovery(clusterB, e.kms)); err != nil {
		t.Fatal(err)
	}
	// It still has the result.
	all, err := collect(c.Init(t.Context(), e.request(clusterB)))
	if err != nil || success(all) == nil {
		t.Fatalf("%v\n%s", err, e.logged())
	}
	if _, err := c.Ack(t.Context(), &initproto.AckRequest{InitSecret: initSecret}); err != nil {
		t.Fatal(err)
	}
	if err := x.end(t); err != nil {
		t.Fatal(err)
	}
}
