package attest

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/sha256"
	"crypto/x509"
	"errors"
	"math/big"
	mathrand "math/rand/v2"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-tpm/tpm2"

	"constellation/engine/atls"
	"constellation/engine/attestation"
	"constellation/engine/attestation/attestationtest"
	"constellation/engine/cloud"
	"constellation/engine/cloud/gcp"
	"constellation/engine/cloud/gcp/attest/attesttest"
	"constellation/internal/mutation"
	"constellation/internal/swtpm"
)

// boot is what the firmware and the boot loader of a machine measure.
func boot(secureBoot bool) []attestation.MeasuredEvent {
	event := func(pcr uint32, data string) attestation.MeasuredEvent {
		h := sha256.Sum256([]byte(data))
		return attestation.MeasuredEvent{PCR: pcr, Digest: h[:], Description: data}
	}
	return []attestation.MeasuredEvent{
		event(0, "GCE Virtual Firmware v1"), event(7, string(attesttest.SecureBoot(secureBoot))), event(7, "db"), event(4, "shim"),
		event(8, "grub_cmd: linux /vmlinuz"), event(9, "vmlinuz"), event(14, "MokList"),
	}
}

// vm is a virtual machine with an emulated TPM.
type vm struct {
	m       attesttest.Machine
	address string
	reset   func()
}

// start starts a machine whose TPM has a key of RSA, on P-256, or both.
func start(t testing.TB, a *attesttest.Authority, m attesttest.Machine, secureBoot bool, rsa ...bool) vm {
	t.Helper()
	address, reset := swtpm.Start(t)
	for _, r := range rsa {
		if err := a.Provision(t.Context(), address, m, r); err != nil {
			t.Fatal(err)
		}
	}
	v := vm{m, address, reset}
	v.boot(t, secureBoot)
	return v
}

func (v vm) boot(t testing.TB, secureBoot bool) {
	t.Helper()
	if err := errors.Join(
		attestationtest.Measure(t.Context(), v.address, attestation.EventLogPath(v.address), boot(secureBoot)),
		attestationtest.HandOver(t.Context(), v.address),
	); err != nil {
		t.Fatal(err)
	}
}

// instance is the machine as the API has it.
func (v vm) instance(role cloud.Role, ip string) cloud.Instance {
	return cloud.Instance{
		Name: v.m.Name, ProviderID: gcp.ProviderID(v.m.Project, v.m.Zone, v.m.Name), Incarnation: strconv.FormatUint(v.m.Number, 10),
		Group: gcp.GroupID(v.m.Project, v.m.Zone, string(role)), Role: role, State: cloud.Ready, IP: netip.MustParseAddr(ip),
	}
}

// method is that of a cluster with the machines.
func method(a *attesttest.Authority, c Config, machines ...cloud.Instance) attestation.Method {
	i := &instances{byKey: map[string]cloud.Instance{}}
	for _, m := range machines {
		i.byKey[m.Key()] = m
	}
	c.Cluster = func(context.Context) (Cluster, error) {
		return Cluster{Project: worker.Project, UID: clusterUID, Instances: i}, nil
	}
	c.HTTP = &http.Client{Transport: files{attesttest.Address: string(a.Intermediate.Raw)}}
	return Method(c)
}

func measured() attestation.Measurements {
	all := attestation.PredictPCRs(boot(true))
	return attestation.Enforced(map[uint32][]byte{4: all[4], 8: all[8], 9: all[9]})
}

var random = bytes.Repeat([]byte{24}, attestation.MaxUserData)

// TestEvidenceOfATPM makes evidence with an emulated TPM whose memory is as that of Google's, under an authority
// that imitates Google's.
func TestEvidenceOfATPM(t *testing.T) {
	a := newAuthority(t)
	for name, rsa := range map[string][]bool{"P-256": {false}, "RSA": {true}, "both keys": {true, false}} {
		t.Run(name, func(t *testing.T) {
			v := start(t, a, worker, true, rsa...)
			m := method(a, Config{SecureBoot: true}, v.instance(cloud.Worker, "10.0.0.2"))
			issuer := m.Issuer(v.address)
			doc, err := issuer.Issue(t.Context(), random)
			if err != nil {
				t.Fatal(err)
			}
			st, err := m.Validator(poolOf(a.Root), measured(), attestation.Options{UID: clusterUID, Role: cloud.Worker}).Validate(t.Context(), doc, random)
			if err != nil {
				t.Fatal(err)
			}
			if id := st.Identity; id.Name != worker.Name || id.Incarnation != "4611686018427387904" || id.IP != netip.MustParseAddr("10.0.0.2") || st.SecureBoot != attestation.SecureBootOn {
				t.Errorf("got %+v", st)
			}
			p, err := attestationtest.ParseVendorDocument(doc)
			if err != nil {
				t.Fatal(err)
			}
			c, err := x509.ParseCertificate(p.Certificate)
			if err != nil {
				t.Fatal(err)
			}
			if _, onCurve := c.PublicKey.(*ecdsa.PublicKey); onCurve == (name == "RSA") || len(p.Intermediates) != 1 {
				t.Errorf("the key is a %T, and %d intermediate certificates came with it", c.PublicKey, len(p.Intermediates))
			}
			if _, err := m.Validator(poolOf(a.Root), measured(), attestation.Options{}).Validate(t.Context(), doc, random[1:]); !errors.Is(err, attestation.ErrQuote) {
				t.Errorf("for another connection: %v", err)
			}
			if _, err := m.Validator(roots(t), measured(), attestation.Options{}).Validate(t.Context(), doc, random); !errors.Is(err, attestation.ErrTrust) {
				t.Errorf("under Google's roots: %v", err)
			}
			mutateDocument(t, m.Validator(poolOf(a.Root), measured(), attestation.Options{}), doc)
			t.Logf("%d bytes", len(doc))
		})
	}
}

// mutateDocument judges mutations of a document. None may be accepted.
func mutateDocument(t *testing.T, v attestation.Validator, doc []byte) {
	t.Helper()
	if _, err := v.Validate(t.Context(), doc, random); err != nil {
		t.Fatal(err)
	}
	for seed := range mutations {
		b := mutation.Bytes(mathrand.New(mathrand.NewPCG(uint64(seed), 25)), doc)
		if refusal(t, v, b, random) == nil {
			t.Errorf("seed %d was accepted: %x", seed, b)
		}
	}
}

// TestSecondFormOfASignature has the one change of a document that a validator cannot refuse: with an ECDSA
// signature (r, s), (r, -s) is a signature of the same quote. It states the same.
func TestSecondFormOfASignature(t *testing.T) {
	a := newAuthority(t)
	v := start(t, a, worker, true, false)
	m := method(a, Config{}, v.instance(cloud.Worker, "10.0.0.2"))
	doc, err := m.Issuer(v.address).Issue(t.Context(), random)
	if err != nil {
		t.Fatal(err)
	}
	p, err := attestationtest.ParseVendorDocument(doc)
	if err != nil {
		t.Fatal(err)
	}
	sig, err := tpm2.Unmarshal[tpm2.TPMTSignature](p.Signature)
	if err != nil {
		t.Fatal(err)
	}
	ecc, err := sig.Signature.ECDSA()
	if err != nil {
		t.Fatal(err)
	}
	order, _ := new(big.Int).SetString("ffffffff00000000ffffffffffffffffbce6faada7179e84f3b9cac2fc632551", 16)
	ecc.SignatureS.Buffer = order.Sub(order, new(big.Int).SetBytes(ecc.SignatureS.Buffer)).FillBytes(make([]byte, 32))
	p.Signature = tpm2.Marshal(sig)
	judge := m.Validator(poolOf(a.Root), measured(), attestation.Options{})
	want, err := judge.Validate(t.Context(), doc, random)
	if err != nil {
		t.Fatal(err)
	}
	got, err := judge.Validate(t.Context(), document(t, p), random)
	if err != nil || got.Identity != want.Identity || !bytes.Equal(got.PCRs[4], want.PCRs[4]) {
		t.Errorf("got %+v, %v; want %+v", got, err, want)
	}
}

func TestBoots(t *testing.T) {
	a := newAuthority(t)
	v := start(t, a, worker, false, false)
	i := v.instance(cloud.Worker, "10.0.0.2")
	judge := func(c Config, o attestation.Options) (attestation.Statement, error) {
		t.Helper()
		m := method(a, c, i)
		doc, err := m.Issuer(v.address).Issue(t.Context(), random)
		if err != nil {
			t.Fatal(err)
		}
		return m.Validator(poolOf(a.Root), measured(), o).Validate(t.Context(), doc, random)
	}
	if st, err := judge(Config{}, attestation.Options{}); err != nil || st.SecureBoot != attestation.SecureBootOff {
		t.Errorf("without Secure Boot: %+v, %v", st, err)
	}
	if _, err := judge(Config{SecureBoot: true}, attestation.Options{}); !errors.Is(err, attestation.ErrMeasurement) || !strings.Contains(err.Error(), "enableSecureBoot") {
		t.Errorf("without Secure Boot, which is required: %v", err)
	}
	// A machine that claims Secure Boot later in the same register.
	fake := sha256.Sum256(attesttest.SecureBoot(true))
	if err := attestationtest.Measure(t.Context(), v.address, attestation.EventLogPath(v.address), []attestation.MeasuredEvent{{PCR: 7, Digest: fake[:], Description: string(attesttest.SecureBoot(true))}}); err != nil {
		t.Fatal(err)
	}
	if st, err := judge(Config{}, attestation.Options{}); err != nil || st.SecureBoot != attestation.SecureBootOff {
		t.Errorf("after a false event: %+v, %v", st, err)
	}
	cluster := []byte("cluster")
	if err := attestation.ExtendClusterID(t.Context(), v.address, cluster); err != nil {
		t.Fatal(err)
	}
	if _, err := judge(Config{}, attestation.Options{}); !errors.Is(err, attestation.ErrMember) {
		t.Errorf("as a member: %v", err)
	}
	if _, err := judge(Config{}, attestation.Options{PCR15: attestation.PCR15ClusterID(cluster)}); err != nil {
		t.Error(err)
	}
	v.reset()
	v.boot(t, true)
	if st, err := judge(Config{SecureBoot: true}, attestation.Options{}); err != nil || st.SecureBoot != attestation.SecureBootOn {
		t.Errorf("after a restart with Secure Boot: %+v, %v", st, err)
	}
	// Registers that the log does not explain.
	if err := os.Remove(strings.TrimPrefix(attestation.EventLogPath(v.address), "unix:")); err != nil {
		t.Fatal(err)
	}
	if _, err := method(a, Config{}, i).Issuer(v.address).Issue(t.Context(), random); !errors.Is(err, attestation.ErrTPM) || !strings.Contains(err.Error(), "event log") {
		t.Errorf("without an event log: %v", err)
	}
}

func TestTPMWithoutACertifiedKey(t *testing.T) {
	a := newAuthority(t)
	v := start(t, a, worker, true)
	if _, err := method(a, Config{}).Issuer(v.address).Issue(t.Context(), random); !errors.Is(err, attestation.ErrTPM) || !strings.Contains(err.Error(), "template") {
		t.Errorf("got %v", err)
	}
}

// TestJoin is the handshake of a join between machines of two clusters.
func TestJoin(t *testing.T) {
	a := newAuthority(t)
	node := start(t, a, worker, true, false)
	other := worker
	other.Name, other.Number = "control-planes-0123", 77
	service := start(t, a, other, true, false)
	if err := attestation.ExtendClusterID(t.Context(), service.address, []byte("cluster")); err != nil {
		t.Fatal(err)
	}
	joiner, server := node.instance(cloud.Worker, "10.0.0.2"), service.instance(cloud.ControlPlane, "10.0.0.3")
	m := method(a, Config{}, joiner, server)
	config := func(v vm, m attestation.Method, o attestation.Options) atls.Config {
		return atls.Config{Purpose: atls.PurposeJoin, Issuer: m.Issuer(v.address), Validator: func() attestation.Validator {
			return m.Validator(poolOf(a.Root), measured(), o)
		}}
	}
	ofService := attestation.Options{PCR15: attestation.PCR15Member(), Role: cloud.ControlPlane, UID: clusterUID}
	meet := func(client, server atls.Config) (toServer attestation.Statement, clientErr, serverErr error) {
		t.Helper()
		x, y := net.Pipe()
		defer x.Close()
		defer y.Close()
		done := make(chan struct{})
		go func() {
			defer close(done)
			_, info, err := atls.NewServer(server).ServerHandshake(y)
			serverErr = err
			if err == nil {
				toServer = *info.(atls.AuthInfo).Statement
			} else {
				_ = y.Close()
			}
		}()
		_, _, clientErr = atls.NewClient(client).ClientHandshake(t.Context(), "", x)
		<-done
		return toServer, clientErr, serverErr
	}
	st, clientErr, serverErr := meet(config(node, m, ofService), config(service, m, attestation.Options{UID: clusterUID}))
	if clientErr != nil || serverErr != nil || st.Identity.Name != worker.Name || st.Identity.Role != cloud.Worker || st.Identity.IP != joiner.IP {
		t.Errorf("the service met %+v; client: %v, service: %v", st.Identity, clientErr, serverErr)
	}
	// The node is in no list of the cluster.
	without := method(a, Config{}, server)
	if _, _, serverErr := meet(config(node, m, ofService), config(service, without, attestation.Options{UID: clusterUID})); !errors.Is(serverErr, attestation.ErrIdentity) {
		t.Errorf("an unknown node: %v", serverErr)
	}
	// A worker poses as the join service.
	if _, clientErr, _ := meet(config(node, m, ofService), config(node, m, attestation.Options{UID: clusterUID})); !errors.Is(clientErr, attestation.ErrMember) {
		t.Errorf("a worker as the service: %v", clientErr)
	}
}
