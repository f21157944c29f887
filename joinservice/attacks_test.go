package joinservice

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"constellation/engine/atls"
	"constellation/engine/attestation"
	"constellation/engine/attestation/attestationtest"
	workspace "constellation/engine/attestation/authority"
	"constellation/engine/cloud"
	"constellation/engine/cloud/machines"
	"constellation/internal/swtpm"
	"constellation/joinservice/joinproto"
)

// yard is a cluster of enrolled machines. Each has an address of this computer from which it connects.
type yard struct {
	*site
	a    *workspace.Authority
	r    *replica
	file string // the list in the pod of the join service
	list machines.Inventory
}

// newYard starts a join service whose key is in a real TPM emulator, and which reads the list of machines from a file.
func newYard(t *testing.T) *yard {
	t.Helper()
	y := &yard{site: newSite(t), file: filepath.Join(t.TempDir(), machines.InventoryKey)}
	var pem string
	y.a, pem = newWorkspace(t, time.Now().Add(-time.Hour), time.Now().Add(time.Hour))
	y.roots = pem
	y.rawJoinConfig(`{"variant":"enrolled","measurements":{}}`, nil)
	y.list = machines.Inventory{Schema: "1", Cluster: uid, Endpoint: "api.example.com"}
	cp := y.machine("control-plane-0", cloud.ControlPlane, "127.0.0.11", swtpmOf(t))
	y.enlist(cp)
	if err := attestation.ExtendClusterID(t.Context(), cp.address(), clusterID); err != nil {
		t.Fatal(err)
	}
	y.method, y.site.list = attestation.EnrolledMethod(), machines.NewMetadata(y.file)
	y.r = y.run(cp.issuer(), "127.0.0.1:0")
	return y
}

// newWorkspace returns the authority of a workspace that is valid between two times, and its certificate.
func newWorkspace(t *testing.T, from, to time.Time) (*workspace.Authority, string) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	c := &x509.Certificate{
		Subject: pkix.Name{CommonName: "demo machines"}, NotBefore: from, NotAfter: to, KeyUsage: x509.KeyUsageCertSign,
		BasicConstraintsValid: true, IsCA: true, MaxPathLenZero: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, c, c, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	secret, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	cert := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	a, err := workspace.Parse(cert, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: secret}))
	if err != nil {
		t.Fatal(err)
	}
	return a, string(cert)
}

func swtpmOf(t *testing.T) string {
	t.Helper()
	address, _ := swtpm.Start(t)
	return address
}

// enrolled is a machine with an identity, the row of the list that its enrolment writes, and its address.
type enrolled struct {
	t   *testing.T
	dir string
	id  attestation.Identity
	key string
}

func (m *enrolled) address() string            { return "enrolled:" + m.dir }
func (m *enrolled) issuer() attestation.Issuer { return attestation.NewEnrolledIssuer(m.address()) }

// machine enrols a machine in the workspace. tpm is the address of its TPM, or attestation.NoTPM.
func (y *yard) machine(name string, role cloud.Role, ip, tpm string) *enrolled {
	y.t.Helper()
	return y.enrolBy(y.a, uid, name, role, ip, tpm)
}

func (y *yard) enrolBy(a *workspace.Authority, uid, name string, role cloud.Role, ip, tpm string) *enrolled {
	t := y.t.(*testing.T)
	t.Helper()
	m := &enrolled{t: t, dir: filepath.Join(t.TempDir(), "identity"), id: attestation.Identity{
		Name: name, ProviderID: machines.ProviderID(uid, name), UID: uid, Group: machines.GroupID(uid, role), Role: role, IP: netip.MustParseAddr(ip),
	}}
	request, _, err := attestation.RequestIdentity(t.Context(), m.dir, tpm)
	if err != nil {
		t.Fatal(err)
	}
	_, expect, err := a.Challenge(request)
	if err == nil {
		err = attestationtest.EnrolTPM(t.Context(), a, m.dir, tpm, m.id)
	}
	if err != nil {
		t.Fatal(err)
	}
	m.key = expect.Key
	return m
}

// copied returns a machine with the files of m's identity.
func (m *enrolled) copied() *enrolled {
	m.t.Helper()
	c := *m
	c.dir = filepath.Join(m.t.TempDir(), "identity")
	if err := os.CopyFS(c.dir, os.DirFS(m.dir)); err != nil {
		m.t.Fatal(err)
	}
	return &c
}

// enlist publishes the list with these machines, in place of those of their names.
func (y *yard) enlist(list ...*enrolled) {
	y.t.Helper()
	for _, m := range list {
		y.delist(m.id.Name)
		y.list.Machines = append(y.list.Machines, machines.Entry{Name: m.id.Name, Address: m.id.IP.String(), Group: m.id.Role, ProviderID: m.id.ProviderID, Key: m.key})
	}
	y.publishList()
}

// delist takes a machine from the list.
func (y *yard) delist(name string) {
	y.t.Helper()
	var kept []machines.Entry
	for _, e := range y.list.Machines {
		if e.Name != name {
			kept = append(kept, e)
		}
	}
	y.list.Machines = kept
	y.publishList()
}

func (y *yard) publishList() {
	y.t.Helper()
	b, err := json.Marshal(y.list)
	if err == nil {
		err = os.WriteFile(y.file, b, 0o600)
	}
	if err != nil {
		y.t.Fatal(err)
	}
}

// joins requests a ticket with the evidence of an issuer, from an address of this computer.
func (y *yard) joins(t *testing.T, id attestation.Identity, issuer attestation.Issuer, from string) (*joinproto.IssueJoinTicketResponse, error) {
	t.Helper()
	roots, err := attestation.ParseRoots([]byte(y.roots))
	if err != nil {
		t.Fatal(err)
	}
	v := y.method.Validator(roots, nil, attestation.Options{PCR15: attestation.PCR15Member(), Role: cloud.ControlPlane})
	conn, err := grpc.NewClient("passthrough:///"+y.r.addr,
		grpc.WithTransportCredentials(atls.NewClient(atls.Config{Purpose: atls.PurposeJoin, Issuer: issuer, Validator: func() attestation.Validator { return v }})),
		grpc.WithContextDialer(func(ctx context.Context, addr string) (net.Conn, error) {
			return (&net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}).DialContext(ctx, "tcp", addr)
		}))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	return request(t, joinproto.NewJoinServiceClient(conn), id, issuer)
}

// joinsAs is joins of a machine at its own address.
func (y *yard) joinsAs(t *testing.T, m *enrolled) (*joinproto.IssueJoinTicketResponse, error) {
	t.Helper()
	return y.joins(t, m.id, m.issuer(), m.id.IP.String())
}

// wantTicket fails the test unless a worker gets a ticket, which has no secret of control planes.
func (y *yard) wantTicket(t *testing.T, m *enrolled) {
	t.Helper()
	if got, err := y.joinsAs(t, m); err != nil || len(got.GetControlPlaneFiles()) > 0 || got.GetToken() == "" {
		t.Errorf("%s gets a ticket with %d secrets of control planes, %v", m.id.Name, len(got.GetControlPlaneFiles()), err)
	}
}

// wantNoTicket fails the test unless the ticket was refused with a code and a text, and the log of the join service has
// each of logged. The code OK stands for a refused handshake.
func (y *yard) wantNoTicket(t *testing.T, got *joinproto.IssueJoinTicketResponse, err error, code codes.Code, text string, logged ...string) {
	t.Helper()
	if got != nil {
		t.Fatal("a ticket was issued")
	}
	if code != codes.OK { // else the handshake fails
		refused(t, err, code, text)
	}
	eventually(t, "the reason is logged", func() (string, bool) {
		lines := strings.Split(strings.TrimSpace(y.r.log.String()), "\n")
		last := lines[len(lines)-1]
		for _, l := range logged {
			if !strings.Contains(last, l) {
				return last, false
			}
		}
		return last, true
	})
	y.r.refusals.mu.Lock() // the log is limited to five of them a second
	y.r.refusals.n = 0
	y.r.refusals.mu.Unlock()
}

// A join service with a real TPM emulator refuses machines that are not those of its list, over real TLS, and logs the
// reason and a remedy.
func TestJoinAttacksOnEnrolledMachines(t *testing.T) {
	t.Parallel()
	y := newYard(t)
	for _, attack := range []struct {
		name string
		run  func(*testing.T, *yard)
	}{
		{"a copied disk whose key is in a TPM", copiedTPMIdentity},
		{"a copied disk whose key is in a file", copiedFileIdentity},
		{"two machines with one certificate", oneCertificateTwice},
		{"a replaced machine under a known name", replacedMachine},
		{"a machine that was reinstalled", reinstalledMachine},
		{"a machine of another workspace", otherWorkspace},
		{"a worker that asks for a control plane", workerAsControlPlane},
		{"a machine that was removed from the list", removedMachine},
		{"expired and future certificates", otherTimes},
		{"replayed evidence", replayedEvidence},
		{"evidence that another machine relays", relayedEvidence},
		{"firmware that was changed", changedFirmware},
	} {
		t.Run(attack.name, func(t *testing.T) {
			inner, s := *y, *y.site
			s.t = t
			inner.site = &s
			attack.run(t, &inner)
			y.list = inner.list
		})
	}
}

// changedFirmware has a machine that measures other firmware at its second request. That is recorded and logged, not refused.
func changedFirmware(t *testing.T, y *yard) {
	maps := y.admin.CoreV1().ConfigMaps(namespace)
	if _, err := maps.Create(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: machines.RegistersConfigMap}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	tpm := swtpmOf(t)
	m, thief := y.machine("firmware-0", cloud.Worker, "127.0.0.30", tpm), y.machine("firmware-1", cloud.Worker, "127.0.0.31", attestation.NoTPM)
	y.enlist(m, thief)
	recorded := func() (r machines.Registers) {
		t.Helper()
		cm, err := maps.Get(t.Context(), machines.RegistersConfigMap, metav1.GetOptions{})
		if err == nil && cm.Data[thief.id.Name] != "" {
			t.Errorf("a machine without a TPM has registers: %s", cm.Data[thief.id.Name])
		}
		if err == nil && cm.Data[m.id.Name] != "" {
			err = json.Unmarshal([]byte(cm.Data[m.id.Name]), &r)
		}
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	if got, err := y.joins(t, m.id, m.issuer(), thief.id.IP.String()); got != nil || err == nil || recorded().Key != "" {
		t.Errorf("from the address of another machine: %v, recorded %+v", err, recorded())
	}
	y.wantTicket(t, thief)
	y.wantTicket(t, m)
	if r := recorded(); r.Key != m.key || len(r.Values) != 8 || r.Changed != nil {
		t.Errorf("first recorded: %+v", r)
	}
	if strings.Contains(y.r.log.String(), "registers") {
		t.Error("the first boot is logged")
	}
	other := []attestation.MeasuredEvent{{PCR: 0, Digest: bytes.Repeat([]byte{2}, 32), Description: "other firmware"}}
	if err := attestationtest.Measure(t.Context(), tpm, filepath.Join(t.TempDir(), "log"), other); err != nil {
		t.Fatal(err)
	}
	y.wantTicket(t, m)
	if r := recorded(); r.String() != "0 (firmware)" {
		t.Errorf("recorded after the change: %+v", r)
	}
	if log := y.r.log.String(); !strings.Contains(log, "registers changed") || !strings.Contains(log, "0 (firmware)") {
		t.Error("the change is not logged")
	}
}

// copiedTPMIdentity has the files of an identity on a computer with another TPM, and on one without.
func copiedTPMIdentity(t *testing.T, y *yard) {
	m := y.machine("copied-0", cloud.Worker, "127.0.0.12", swtpmOf(t))
	y.enlist(m)
	thief, original := m.copied(), filepath.Join(m.dir, "tpm")
	b, err := os.ReadFile(original)
	if err != nil {
		t.Fatal(err)
	}
	var reference map[string]any
	if err := json.Unmarshal(b, &reference); err != nil {
		t.Fatal(err)
	}
	reference["address"] = swtpmOf(t) // where the reference finds the thief's TPM
	if b, err = json.Marshal(reference); err == nil {
		err = os.WriteFile(filepath.Join(thief.dir, "tpm"), b, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	if _, err := thief.issuer().Issue(t.Context(), []byte("nonce")); err == nil || !strings.Contains(err.Error(), "the identity was copied from another machine, or the TPM was replaced") {
		t.Errorf("evidence with another TPM: %v", err)
	}
	if got, err := y.joins(t, thief.id, thief.issuer(), thief.id.IP.String()); err == nil {
		t.Errorf("a ticket for %s", got.GetKubernetesVersion())
	}
	y.wantTicket(t, m)
}

// copiedFileIdentity has the key of a machine on another one of the list, which is refused. From any other address the copy
// is as good as the original.
func copiedFileIdentity(t *testing.T, y *yard) {
	m, thief := y.machine("copied-1", cloud.Worker, "127.0.0.13", attestation.NoTPM), y.machine("thief-1", cloud.Worker, "127.0.0.14", attestation.NoTPM)
	y.enlist(m, thief)
	got, err := y.joins(t, m.id, m.copied().issuer(), thief.id.IP.String())
	y.wantNoTicket(t, got, err, codes.PermissionDenied, "the identity was copied to that machine", "join ticket refused", "evidence of copied-1 (127.0.0.13) came from thief-1 (127.0.0.14)", "remove that machine and reinstall it")
	y.wantTicket(t, m)
}

// oneCertificateTwice has a copied key at an address that is in no list: it gets a ticket until a Node of its name exists,
// and none afterwards.
func oneCertificateTwice(t *testing.T, y *yard) {
	m := y.machine("twice-0", cloud.Worker, "127.0.0.15", attestation.NoTPM)
	y.enlist(m)
	twin := m.copied()
	y.wantTicket(t, m)
	if _, err := y.joins(t, m.id, twin.issuer(), "127.0.0.99"); err != nil {
		t.Errorf("the copy before a Node exists: %v", err) // docs/security.md states this limit
	}
	if _, err := y.admin.CoreV1().Nodes().Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: m.id.Name}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	got, err := y.joins(t, m.id, twin.issuer(), "127.0.0.99")
	y.wantNoTicket(t, got, err, codes.Unavailable, "a Node of this name exists already", `"peer":"127.0.0.99"`, "delete the Node")
}

// replacedMachine has a computer that was replaced by another one, under its name and at its address.
func replacedMachine(t *testing.T, y *yard) {
	for _, tpm := range []func() string{func() string { return swtpmOf(t) }, func() string { return attestation.NoTPM }} {
		old := y.machine("replaced-0", cloud.Worker, "127.0.0.16", tpm())
		y.enlist(old)
		next := y.machine("replaced-0", cloud.Worker, "127.0.0.16", tpm())
		y.enlist(next)
		got, err := y.joinsAs(t, old)
		y.wantNoTicket(t, got, err, codes.PermissionDenied, "another computer was enrolled under this name since", "join ticket refused", "constellation machine add")
		y.wantTicket(t, next)
	}
}

// reinstalledMachine has a fresh disk on the computer of a machine: without an identity there is no evidence, and with
// another key it needs the list.
func reinstalledMachine(t *testing.T, y *yard) {
	tpm := swtpmOf(t)
	old := y.machine("fresh-0", cloud.Worker, "127.0.0.17", tpm)
	y.enlist(old)
	fresh := *old
	fresh.dir = t.TempDir()
	if _, err := fresh.issuer().Issue(t.Context(), []byte("nonce")); err == nil || !strings.Contains(err.Error(), "enrol the machine with `constellation machine add`") {
		t.Errorf("evidence without an identity: %v", err)
	}
	next := y.machine("fresh-0", cloud.Worker, "127.0.0.17", tpm)
	got, err := y.joinsAs(t, next)
	y.wantNoTicket(t, got, err, codes.PermissionDenied, "constellation init", "join ticket refused", next.key, old.key)
	y.enlist(next)
	y.wantTicket(t, next)
}

// otherWorkspace has a machine that the authority of another workspace certified, and one of another cluster.
func otherWorkspace(t *testing.T, y *yard) {
	a, _ := newWorkspace(t, time.Now().Add(-time.Hour), time.Now().Add(time.Hour))
	m := y.enrolBy(a, uid, "foreign-0", cloud.Worker, "127.0.0.18", swtpmOf(t))
	y.enlist(m)
	got, err := y.joinsAs(t, m)
	y.wantNoTicket(t, got, err, codes.OK, "", "connection refused", "certificate signed by unknown authority", "constellation machine remove")
	m = y.enrolBy(y.a, "other", "foreign-1", cloud.Worker, "127.0.0.19", attestation.NoTPM)
	got, err = y.joinsAs(t, m)
	y.wantNoTicket(t, got, err, codes.OK, "", "connection refused", `wrong instance: foreign-1 belongs to \"other\"`)
}

// workerAsControlPlane has a worker whose row says that it is a control plane.
func workerAsControlPlane(t *testing.T, y *yard) {
	m := y.machine("riser-0", cloud.Worker, "127.0.0.20", swtpmOf(t))
	y.enlist(m)
	y.list.Machines[len(y.list.Machines)-1].Group = cloud.ControlPlane
	y.publishList()
	got, err := y.joinsAs(t, m)
	y.wantNoTicket(t, got, err, codes.PermissionDenied, `role of riser-0 is "worker", in the cloud "control-plane"`, "join ticket refused", "constellation machine remove")
	y.enlist(m)
	y.wantTicket(t, m) // it has no secret of control planes
}

// removedMachine has a machine that keeps its certificate after its removal.
func removedMachine(t *testing.T, y *yard) {
	m := y.machine("removed-0", cloud.Worker, "127.0.0.21", swtpmOf(t))
	y.enlist(m)
	y.delist(m.id.Name)
	got, err := y.joinsAs(t, m)
	y.wantNoTicket(t, got, err, codes.Unavailable, "does not list this instance yet, or no longer", "join ticket refused", "constellation init")
}

// otherTimes has certificates that are not valid now.
func otherTimes(t *testing.T, y *yard) {
	now := time.Now()
	past, expired := newWorkspace(t, now.Add(-2*time.Hour), now.Add(-time.Minute))
	future, early := newWorkspace(t, now.Add(time.Hour), now.Add(2*time.Hour))
	roots := y.roots
	y.roots += expired + early
	loads := strings.Count(y.r.log.String(), "join-config loaded")
	y.rawJoinConfig(`{"variant":"enrolled","measurements":{}}`, nil)
	eventually(t, "the roots are read again", func() (string, bool) {
		return y.r.log.String(), strings.Count(y.r.log.String(), "join-config loaded") > loads
	})
	y.roots = roots
	for name, a := range map[string]*workspace.Authority{"expired-0": past, "early-0": future} {
		m := y.enrolBy(a, uid, name, cloud.Worker, "127.0.0.22", attestation.NoTPM)
		y.enlist(m)
		got, err := y.joinsAs(t, m)
		y.wantNoTicket(t, got, err, codes.OK, "", "connection refused", "certificate has expired or is not yet valid", "compare the clocks")
		y.delist(name)
	}
}

// replayed makes the first evidence of an issuer again and again.
type replayed struct {
	attestation.Issuer
	first []byte
}

func (r *replayed) Issue(ctx context.Context, userData []byte) (doc []byte, err error) {
	if r.first == nil {
		r.first, err = r.Issuer.Issue(ctx, userData)
	}
	return r.first, err
}

// replayedEvidence uses the evidence of one connection for another one.
func replayedEvidence(t *testing.T, y *yard) {
	for tpm, reason := range map[string]string{swtpmOf(t): "it was made for another connection", attestation.NoTPM: "did not sign it for this connection"} {
		m := y.machine("replayed-0", cloud.Worker, "127.0.0.23", tpm)
		y.enlist(m)
		r := &replayed{Issuer: m.issuer()}
		if _, err := y.joins(t, m.id, r, m.id.IP.String()); err != nil {
			t.Fatal(err)
		}
		got, err := y.joins(t, m.id, r, m.id.IP.String())
		y.wantNoTicket(t, got, err, codes.OK, "", "connection refused", reason)
	}
}

// relayedEvidence has a machine of the list answer with evidence that the TPM of another one makes.
func relayedEvidence(t *testing.T, y *yard) {
	m, relay := y.machine("relayed-0", cloud.Worker, "127.0.0.24", swtpmOf(t)), y.machine("relay-0", cloud.Worker, "127.0.0.25", swtpmOf(t))
	y.enlist(m, relay)
	got, err := y.joins(t, m.id, m.issuer(), relay.id.IP.String())
	y.wantNoTicket(t, got, err, codes.PermissionDenied, "came from the address of another machine", "join ticket refused", "relay-0")
}
