//go:build linux

package agent

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"constellation/agent/upgradeproto"
	"constellation/engine/backup"
	"constellation/engine/sandbox/controlplane"
	"constellation/internal/testneeds"
)

// member is a real etcd.
type member struct {
	cmd    *exec.Cmd
	client string // its URL
	args   []string
}

func (m *member) start(t testing.TB) {
	t.Helper()
	m.cmd = exec.Command(m.args[0], m.args[1:]...)
	if err := m.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	cmd := m.cmd
	t.Cleanup(func() {
		if cmd.ProcessState == nil {
			cmd.Process.Kill()
			cmd.Wait()
		}
	})
}

func (m *member) kill() {
	m.cmd.Process.Kill()
	m.cmd.Wait()
}

// certificates creates the certificates that kubeadm creates for etcd, in dir.
func certificates(t testing.TB, dir string) {
	t.Helper()
	write := func(name, kind string, der []byte) {
		if err := os.WriteFile(filepath.Join(dir, name), pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	var ca *x509.Certificate
	var caKey *ecdsa.PrivateKey
	for i, name := range []string{"ca", "server", "healthcheck-client"} {
		key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		if err != nil {
			t.Fatal(err)
		}
		c := &x509.Certificate{
			SerialNumber: big.NewInt(int64(i + 1)), Subject: pkix.Name{CommonName: name}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
			IsCA: i == 0, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
			ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		}
		if i == 0 {
			ca, caKey = c, key
		}
		der, err := x509.CreateCertificate(rand.Reader, c, ca, &key.PublicKey, caKey)
		if err != nil {
			t.Fatal(err)
		}
		if i == 0 {
			if ca, err = x509.ParseCertificate(der); err != nil {
				t.Fatal(err)
			}
		}
		k, err := x509.MarshalPKCS8PrivateKey(key)
		if err != nil {
			t.Fatal(err)
		}
		write(name+".crt", "CERTIFICATE", der)
		write(name+".key", "PRIVATE KEY", k)
	}
}

// etcdProgram returns the etcd of the oldest Kubernetes in the cache.
func etcdProgram(t testing.TB) string {
	t.Helper()
	dir, err := controlplane.FindBinaries()
	if err != nil {
		t.Skip(err)
	}
	return filepath.Join(dir, "etcd")
}

// etcdVersion returns the version that the program reports.
func etcdVersion(t testing.TB) string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), etcdProgram(t), "--version").Output()
	first, _, _ := strings.Cut(string(out), "\n")
	v, ok := strings.CutPrefix(first, "etcd Version: ")
	if err != nil || !ok {
		t.Fatalf("etcd --version: %v, %q", err, out)
	}
	return v
}

// startEtcd runs a cluster of n members with kubeadm's certificates.
func startEtcd(t testing.TB, n int) (members []*member, pki string) {
	t.Helper()
	testneeds.ControlPlane(t)
	bin := etcdProgram(t)
	pki = t.TempDir()
	certificates(t, pki)
	var initial, peers, clients []string
	for i := range n {
		peers = append(peers, "http://"+freeAddress(t))
		clients = append(clients, "https://"+freeAddress(t))
		initial = append(initial, fmt.Sprintf("m%d=%s", i, peers[i]))
	}
	for i := range n {
		m := &member{client: clients[i], args: []string{
			bin, "--name", fmt.Sprintf("m%d", i), "--data-dir", t.TempDir(), "--log-level", "error", "--snapshot-count", "10000",
			"--listen-client-urls", clients[i], "--advertise-client-urls", clients[i], "--listen-peer-urls", peers[i], "--initial-advertise-peer-urls", peers[i],
			"--initial-cluster", strings.Join(initial, ","), "--heartbeat-interval", "200", "--election-timeout", "2000", "--unsafe-no-fsync",
			"--client-cert-auth", "--trusted-ca-file", filepath.Join(pki, "ca.crt"), "--cert-file", filepath.Join(pki, "server.crt"), "--key-file", filepath.Join(pki, "server.key"),
		}}
		m.start(t)
		members = append(members, m)
	}
	return members, pki
}

func freeAddress(t testing.TB) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

// settled waits until all members are healthy and one leads, and returns them by name.
func settled(t testing.TB, c upgradeproto.AgentClient, n int) (by map[string]*upgradeproto.EtcdMember, leader *upgradeproto.EtcdMember) {
	t.Helper()
	until(t, "etcd is healthy and has a leader", func() bool {
		l, err := c.EtcdMembers(t.Context(), &upgradeproto.EtcdMembersRequest{})
		if err != nil || len(l.Members) != n {
			return false
		}
		by, leader = map[string]*upgradeproto.EtcdMember{}, nil
		for _, m := range l.Members {
			by[m.Name] = m
			if !m.Healthy {
				return false
			}
			if m.Leader {
				leader = m
			}
		}
		return leader != nil
	})
	return by, leader
}

func refused(t *testing.T, err error, want string) {
	t.Helper()
	if status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), want) {
		t.Errorf("got %v, want a refusal with %q", err, want)
	}
}

func TestMembersOfEtcd(t *testing.T) {
	members, pki := startEtcd(t, 3)
	c, _ := start(t, Host{Root: t.TempDir(), Etcd: Etcd{Endpoint: members[0].client, PKI: pki}})
	by, leader := settled(t, c, 3)
	for i, m := range members {
		got := by[fmt.Sprintf("m%d", i)]
		if got.Id == 0 || got.ClientUrls[0] != m.client || got.Version != etcdVersion(t) || got.DbSize == 0 || got.AppliedIndex == 0 || got.Learner {
			t.Errorf("member %d: %v", i, got)
		}
	}
	var others []*upgradeproto.EtcdMember
	for _, m := range by {
		if m != leader {
			others = append(others, m)
		}
	}
	remove := func(id uint64, name string) (bool, error) {
		r, err := c.RemoveEtcdMember(t.Context(), &upgradeproto.RemoveEtcdMemberRequest{Id: id, Name: name})
		return r.GetRemoved(), err
	}
	move := func(from, to uint64) (*upgradeproto.MoveEtcdLeaderResponse, error) {
		return c.MoveEtcdLeader(t.Context(), &upgradeproto.MoveEtcdLeaderRequest{AwayFrom: from, To: to})
	}

	// The leader stays until it has passed leadership on.
	_, err := remove(leader.Id, leader.Name)
	refused(t, err, "move the leader first")
	// The name and the ID must be those of the same member.
	_, err = remove(others[0].Id, others[1].Name)
	refused(t, err, "called")
	_, err = remove(4711, others[1].Name)
	refused(t, err, "not 1267")
	_, err = move(leader.Id, 4711)
	refused(t, err, "is not a healthy voter")

	r, err := move(leader.Id, others[1].Id)
	if err != nil || !r.Moved || r.Leader != others[1].Id {
		t.Fatalf("move: %v, %v", r, err)
	}
	_, now := settled(t, c, 3)
	if now.Id != others[1].Id {
		t.Errorf("%s leads, want %s", now.Name, others[1].Name)
	}
	if r, err := move(leader.Id, 0); err != nil || r.Moved || r.Leader != now.Id {
		t.Errorf("again: %v, %v; want no move", r, err)
	}

	// While one member does not respond, no other one can be removed, but it can.
	var dead *member
	var deadly, alive *upgradeproto.EtcdMember
	for i := 1; i < 3; i++ { // the agent's own must live
		if m := by[fmt.Sprintf("m%d", i)]; m.Id != now.Id {
			dead, deadly = members[i], m
		}
	}
	for _, m := range by {
		if m.Id != now.Id && m.Id != deadly.Id {
			alive = m
		}
	}
	dead.kill()
	_, err = remove(alive.Id, alive.Name)
	refused(t, err, "another member is not healthy: "+deadly.Name)
	l, err := c.EtcdMembers(t.Context(), &upgradeproto.EtcdMembersRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range l.Members {
		if m.Healthy == (m.Id == deadly.Id) || m.Healthy != (m.Trouble == "") {
			t.Errorf("with one dead: %v", m)
		}
	}
	if ok, err := remove(deadly.Id, deadly.Name); err != nil || !ok {
		t.Errorf("remove the dead one: %v, %v", ok, err)
	}
	if ok, err := remove(deadly.Id, deadly.Name); err != nil || ok {
		t.Errorf("remove it again: %v, %v", ok, err)
	}

	// A learner is reported as one, never leads, and its failure blocks changes of voters.
	by, leader = settled(t, c, 2)
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	own, err := newEtcd(Host{Etcd: Etcd{PKI: pki}}).dial(ctx, members[0].client)
	if err != nil {
		t.Fatal(err)
	}
	defer own.Close()
	var learner *clientv3.MemberAddResponse
	until(t, "a learner is added", func() bool {
		learner, err = own.MemberAddAsLearner(ctx, []string{"http://" + freeAddress(t)})
		return err == nil
	})
	for _, m := range by {
		if m.Id != leader.Id {
			_, err = remove(m.Id, m.Name)
			refused(t, err, "has not started")
			_, err = move(leader.Id, learner.Member.ID)
			refused(t, err, "is not a healthy voter")
		}
	}
	if ok, err := remove(learner.Member.ID, ""); err != nil || !ok {
		t.Errorf("remove a learner that never started: %v, %v", ok, err)
	}

	// Down to one, which stays.
	for _, m := range by {
		if m.Id != leader.Id {
			if m.Name == "m0" { // the agent asks this one
				if _, err := move(leader.Id, m.Id); err != nil {
					t.Fatal(err)
				}
				m = leader
			}
			if ok, err := remove(m.Id, m.Name); err != nil || !ok {
				t.Errorf("remove the second: %v, %v", ok, err)
			}
			break
		}
	}
	by, last := settled(t, c, 1)
	_, err = remove(last.Id, last.Name)
	refused(t, err, "leads")
	_, err = move(last.Id, 0)
	refused(t, err, "no other voter")
	if len(by) != 1 {
		t.Errorf("left: %v", by)
	}
}

func TestQuorumIsKept(t *testing.T) {
	m := func(id uint64, flags string) *upgradeproto.EtcdMember {
		return &upgradeproto.EtcdMember{
			Id: id, Name: fmt.Sprintf("m%d", id), Healthy: !strings.Contains(flags, "s"), Learner: strings.Contains(flags, "l"), Leader: strings.Contains(flags, "L"), Trouble: "sick",
		}
	}
	type list = []*upgradeproto.EtcdMember
	for _, tt := range []struct {
		name    string
		members list
		id      uint64
		want    string // "" means that it may leave
	}{
		{name: "one of three", members: list{m(1, "L"), m(2, ""), m(3, "")}, id: 3, want: ""},
		{name: "the unhealthy one of three", members: list{m(1, "L"), m(2, ""), m(3, "s")}, id: 3, want: ""},
		{name: "a healthy one besides an unhealthy one", members: list{m(1, "L"), m(2, ""), m(3, "s")}, id: 2, want: "another member is not healthy"},
		{name: "an unhealthy one besides another unhealthy one", members: list{m(1, "L"), m(2, "s"), m(3, "s")}, id: 2, want: "another member is not healthy"},
		{name: "a voter besides an unhealthy learner", members: list{m(1, "L"), m(2, ""), m(3, ""), m(4, "ls")}, id: 2, want: "another member is not healthy"},
		{name: "the unhealthy one of two", members: list{m(1, "L"), m(2, "s")}, id: 2, want: "not a quorum"},
		{name: "one of two", members: list{m(1, "L"), m(2, "")}, id: 2, want: ""},
		{name: "the leader", members: list{m(1, "L"), m(2, ""), m(3, "")}, id: 1, want: "move the leader first"},
		{name: "the only voter", members: list{m(1, ""), m(2, "l")}, id: 1, want: "the only voter"},
		{name: "a learner", members: list{m(1, "L"), m(2, "l")}, id: 2, want: ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, err := mayLeave(tt.members, tt.id, fmt.Sprintf("m%d", tt.id))
			if tt.want == "" && (err != nil || got.GetId() != tt.id) || tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)) {
				t.Errorf("got %v, %v; want %q", got, err, tt.want)
			}
		})
	}
}

func TestSnapshotIsComplete(t *testing.T) {
	members, pki := startEtcd(t, 1)
	c, _ := start(t, Host{Root: t.TempDir(), Etcd: Etcd{Endpoint: members[0].client, PKI: pki}})
	settled(t, c, 1)
	own, err := newEtcd(Host{Etcd: Etcd{PKI: pki}}).dial(t.Context(), members[0].client)
	if err != nil {
		t.Fatal(err)
	}
	defer own.Close()
	value := strings.Repeat("v", 100_000)
	for i := range 30 {
		if _, err := own.Put(t.Context(), fmt.Sprintf("k%d", i), value); err != nil {
			t.Fatal(err)
		}
	}
	b, sum, err := snapshot(c.SnapshotEtcd(t.Context(), &upgradeproto.SnapshotEtcdRequest{}))
	if err != nil {
		t.Fatal(err)
	}
	whole, body := sha256.Sum256(b), sha256.Sum256(b[:len(b)-sha256.Size])
	if int64(len(b)) != sum.GetSize() || len(b) < 3_000_000 || !bytes.Equal(whole[:], sum.GetSha256()) || !bytes.Equal(body[:], b[len(b)-sha256.Size:]) || sum.Revision != 31 || sum.EtcdVersion != etcdVersion(t) {
		t.Errorf("%d bytes, %v", len(b), sum)
	}
	// A canceled receiver frees the slot for the next.
	ctx, cancel := context.WithCancel(t.Context())
	stream, err := c.SnapshotEtcd(ctx, &upgradeproto.SnapshotEtcdRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := stream.Recv(); err != nil {
		t.Fatal(err)
	}
	if _, _, err := snapshot(c.SnapshotEtcd(t.Context(), &upgradeproto.SnapshotEtcdRequest{})); err != nil && status.Code(err) != codes.ResourceExhausted {
		t.Errorf("a second one at a time: %v", err)
	}
	cancel()
	until(t, "another snapshot", func() bool {
		_, sum, err := snapshot(c.SnapshotEtcd(t.Context(), &upgradeproto.SnapshotEtcdRequest{}))
		return err == nil && sum.GetSize() > 3_000_000 // etcd writes to its database by itself
	})
	members[0].kill()
	if _, sum, err := snapshot(c.SnapshotEtcd(t.Context(), &upgradeproto.SnapshotEtcdRequest{})); err == nil || sum != nil {
		t.Error("a snapshot of an etcd that has ended")
	}
}

// TestStateOfEtcd compares the state that one member reports with the snapshot of another.
func TestStateOfEtcd(t *testing.T) {
	members, pki := startEtcd(t, 3)
	ctx := t.Context()
	var agents []upgradeproto.AgentClient
	for _, m := range members[:2] {
		c, _ := start(t, Host{Root: t.TempDir(), Etcd: Etcd{Endpoint: m.client, PKI: pki}})
		agents = append(agents, c)
	}
	settled(t, agents[0], 3)
	own, err := newEtcd(Host{Etcd: Etcd{PKI: pki}}).dial(ctx, members[2].client)
	if err != nil {
		t.Fatal(err)
	}
	defer own.Close()
	must := func(_ any, err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	lease, err := own.Grant(ctx, 3600)
	must(nil, err)
	for i := range 700 {
		must(own.Put(ctx, fmt.Sprintf("k%d", i%600), strings.Repeat("v", i*i%9000), clientv3.WithLease(lease.ID)))
	}
	must(own.Txn(ctx).Then(clientv3.OpPut("a", "1"), clientv3.OpPut("b", "2"), clientv3.OpDelete("k1")).Commit())
	must(own.Delete(ctx, "k2", clientv3.WithPrefix()))
	compact, err := own.Put(ctx, "a", "2")
	must(nil, err)
	must(own.Delete(ctx, "a"))
	must(own.Put(ctx, "a", "3"))
	must(own.Compact(ctx, compact.Header.GetRevision(), clientv3.WithCompactPhysical()))
	at, err := own.Put(ctx, "empty", "")
	must(nil, err)
	revision := at.Header.GetRevision()
	must(own.Put(ctx, "a", "4")) // is not of the revision
	must(own.Delete(ctx, "b"))

	b, sum, err := snapshot(agents[0].SnapshotEtcd(ctx, &upgradeproto.SnapshotEtcdRequest{}))
	must(nil, err)
	f, err := backup.OpenEtcd(bytes.NewReader(b), sum.GetSize())
	must(nil, err)
	var s backup.EtcdState
	must(f.Read(ctx, func(e backup.EtcdEntry) error {
		if e.Revision <= revision {
			s.Put(e)
		}
		return nil
	}))
	file, err := f.Members()
	must(nil, err)
	got, err := agents[1].EtcdState(ctx, &upgradeproto.EtcdStateRequest{Revision: revision})
	must(nil, err)
	if !bytes.Equal(got.GetSha256(), s.Sum()) || s.Len() != 491 || got.GetClusterId() != sum.GetClusterId() || got.GetMemberId() == sum.GetMemberId() || sum.GetMemberId() == 0 {
		t.Errorf("the snapshot of %v has %x of %d keys, the other member %v", sum, s.Sum(), s.Len(), got)
	}
	for _, m := range file {
		if !slices.Contains(got.GetMembers(), m.ID) || len(file) != 3 {
			t.Errorf("members %v, the other member reports %v", file, got.GetMembers())
		}
	}
	// One bit of one value is another state.
	s.Put(backup.EtcdEntry{Key: []byte("empty"), Value: []byte{0}, Created: revision, Modified: revision, Version: 1})
	if bytes.Equal(got.GetSha256(), s.Sum()) {
		t.Error("another value has the same sum")
	}
	for revision, want := range map[int64]codes.Code{0: codes.InvalidArgument, 2: codes.OutOfRange} {
		if _, err := agents[1].EtcdState(ctx, &upgradeproto.EtcdStateRequest{Revision: revision}); status.Code(err) != want {
			t.Errorf("revision %d: %v, want %s", revision, err, want)
		}
	}
	members[1].kill()
	if _, err := agents[1].EtcdState(ctx, &upgradeproto.EtcdStateRequest{Revision: revision}); err == nil {
		t.Error("the state of an etcd that has ended")
	}
}

func snapshot(stream upgradeproto.Agent_SnapshotEtcdClient, err error) (b []byte, sum *upgradeproto.SnapshotSummary, _ error) {
	for err == nil {
		var m *upgradeproto.SnapshotEtcdResponse
		if m, err = stream.Recv(); err == nil {
			b = append(b, m.GetData()...)
			sum = m.GetSummary()
		}
	}
	if errors.Is(err, io.EOF) {
		err = nil
	}
	return b, sum, err
}

func TestDamagedSnapshotsAreFound(t *testing.T) {
	db := bytes.Repeat([]byte("0123456789abcdef"), 3*chunkSize/16)
	h := sha256.Sum256(db)
	good := append(bytes.Clone(db), h[:]...)
	flipped := bytes.Clone(good)
	flipped[len(flipped)/2] ^= 1
	for _, tt := range []struct {
		name string
		in   []byte
		ok   bool
	}{
		{name: "whole", in: good, ok: true},
		{name: "without its hash", in: db, ok: false},
		{name: "cut by a page", in: good[512:], ok: false},
		{name: "cut by a byte", in: good[:len(good)-1], ok: false},
		{name: "a bit flipped", in: flipped, ok: false},
		{name: "empty", ok: false},
		{name: "the hash of no data", in: sha256Of(nil), ok: false},
	} {
		for _, small := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, in small pieces %t", tt.name, small), func(t *testing.T) {
				var r io.Reader = bytes.NewReader(tt.in)
				if small {
					r = io.MultiReader(bytes.NewReader(tt.in[:min(7, len(tt.in))]), bytes.NewReader(tt.in[min(7, len(tt.in)):]))
				}
				sum, err := checkSnapshot(r, func([]byte) error { return nil })
				if tt.ok != (err == nil) || !tt.ok && status.Code(err) != codes.DataLoss || tt.ok && sum.GetSize() != int64(len(tt.in)) {
					t.Errorf("got %v, %v", sum, err)
				}
			})
		}
	}
	var got []byte
	fed := sha256.New()
	for i := 0; i < len(good); i += 13 {
		got = advance(fed, got, good[i:min(i+13, len(good))])
	}
	if !bytes.Equal(fed.Sum(nil), got) {
		t.Error("pieces shorter than the hash are hashed wrongly")
	}
}

func sha256Of(b []byte) []byte {
	h := sha256.Sum256(b)
	return h[:]
}

func TestHostWithoutEtcd(t *testing.T) {
	c, _ := start(t, Host{Root: t.TempDir()})
	_, err := c.EtcdMembers(t.Context(), &upgradeproto.EtcdMembersRequest{}, grpc.WaitForReady(true))
	refused(t, err, "no etcd")
}
