//go:build linux

package agent

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"hash"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"constellation/agent/upgradeproto"
	"constellation/engine/backup"
)

const (
	// memberTimeout bounds the status request of one member. The operator trusts the answer for
	// twice as long after its request.
	memberTimeout = 5 * time.Second
	// chunkSize is in bytes, of a snapshot.
	chunkSize = 32 << 10
	// statePage is about how many bytes are read of etcd at a time.
	statePage = 2 << 20
	// window is in bytes, of what etcd may send before it was read.
	window = 256 << 10
	// snapshotStall is how long a snapshot may wait for its receiver, or for etcd: in the
	// meantime etcd keeps all deleted data.
	snapshotStall = time.Minute
)

// Etcd is the access to a host's member of etcd. The zero value is kubeadm's default.
type Etcd struct {
	// Endpoint is the member's URL. Empty means https://127.0.0.1:2379.
	Endpoint string
	// PKI is the directory of ca.crt, healthcheck-client.crt and healthcheck-client.key.
	// Empty means /etc/kubernetes/pki/etcd below the host's root.
	PKI string
}

// etcd serves the verbs of etcd.
type etcd struct {
	endpoint, pki string
	// change is held by verbs that change the membership or the leader, from the check to the
	// change.
	change sync.Mutex
	// snapshots holds a token while one is taken.
	snapshots chan struct{}
}

func newEtcd(h Host) *etcd {
	e := &etcd{endpoint: h.Etcd.Endpoint, pki: h.Etcd.PKI, snapshots: make(chan struct{}, 1)}
	if e.endpoint == "" {
		e.endpoint = h.local("https", "2379", "")
	}
	if e.pki == "" {
		e.pki = h.path("etc/kubernetes/pki/etcd")
	}
	return e
}

// dial returns a client of one member, which the caller closes.
func (e *etcd) dial(ctx context.Context, endpoint string) (*clientv3.Client, error) {
	cfg := clientv3.Config{
		Endpoints: []string{endpoint}, Context: ctx, DialTimeout: memberTimeout, Logger: zap.NewNop(),
		// Fixed windows: gRPC's dynamic ones grow to megabytes for a snapshot.
		DialOptions:       []grpc.DialOption{grpc.WithInitialWindowSize(window), grpc.WithInitialConnWindowSize(window)},
		DialKeepAliveTime: 10 * time.Second, DialKeepAliveTimeout: 10 * time.Second,
	}
	if strings.HasPrefix(endpoint, "https:") {
		// Read each time: upgrades renew the certificates.
		ca, err := os.ReadFile(filepath.Join(e.pki, "ca.crt"))
		if errors.Is(err, os.ErrNotExist) {
			return nil, status.Error(codes.FailedPrecondition, "the host has no etcd")
		}
		if err != nil {
			return nil, fmt.Errorf("read the authority of etcd: %w", err)
		}
		pair, err := tls.LoadX509KeyPair(filepath.Join(e.pki, "healthcheck-client.crt"), filepath.Join(e.pki, "healthcheck-client.key"))
		if err != nil {
			return nil, fmt.Errorf("read the client certificate of etcd: %w", err)
		}
		pool := x509.NewCertPool()
		if !pool.AppendCertsFromPEM(ca) {
			return nil, errors.New("read the authority of etcd: no certificate in ca.crt")
		}
		cfg.TLS = &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: pool, Certificates: []tls.Certificate{pair}}
	}
	return clientv3.New(cfg)
}

// members lists the members with a linearizable read, and queries each.
func (e *etcd) members(ctx context.Context) (*upgradeproto.EtcdMembersResponse, error) {
	c, err := e.dial(ctx, e.endpoint)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	lctx, cancel := context.WithTimeout(ctx, 2*memberTimeout)
	defer cancel()
	l, err := c.MemberList(lctx) // linearizable
	if err != nil {
		return nil, fmt.Errorf("list members of etcd: %w", err)
	}
	r := &upgradeproto.EtcdMembersResponse{ClusterId: l.Header.GetClusterId()}
	var wg sync.WaitGroup
	leaders := make([]uint64, len(l.Members))
	for i, m := range l.Members {
		em := &upgradeproto.EtcdMember{
			Id: m.GetID(), Name: m.GetName(), PeerUrls: m.GetPeerURLs(), ClientUrls: m.GetClientURLs(), Learner: m.GetIsLearner(),
		}
		r.Members = append(r.Members, em)
		wg.Go(func() {
			var err error
			if leaders[i], err = e.ask(ctx, em); err != nil {
				em.Trouble = clip(err.Error())
			}
			em.Healthy = em.Trouble == ""
		})
	}
	wg.Wait()
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	// A member leads only if it reports so itself: the others may lag.
	for i, em := range r.Members {
		em.Leader = leaders[i] == em.Id
	}
	return r, nil
}

// ask queries the status of one member, and the leader that it sees.
func (e *etcd) ask(ctx context.Context, m *upgradeproto.EtcdMember) (leader uint64, err error) {
	if m.GetName() == "" || len(m.GetClientUrls()) == 0 {
		return 0, errors.New("has not started")
	}
	ctx, cancel := context.WithTimeout(ctx, memberTimeout)
	defer cancel()
	c, err := e.dial(ctx, m.GetClientUrls()[0])
	if err != nil {
		return 0, err
	}
	defer c.Close()
	s, err := c.Status(ctx, m.GetClientUrls()[0])
	if err != nil {
		return 0, fmt.Errorf("does not answer: %w", err)
	}
	m.Version, m.StorageVersion, m.DbSize, m.AppliedIndex = s.Version, s.StorageVersion, s.DbSize, s.RaftAppliedIndex
	switch {
	case s.Header.GetMemberId() != m.GetId():
		return 0, fmt.Errorf("another member, %x, answers at its address", s.Header.GetMemberId())
	case s.Leader == 0:
		return 0, errors.New("has no leader")
	case len(s.Errors) > 0:
		return s.Leader, errors.New(strings.Join(s.Errors, "; "))
	case s.IsLearner:
		return s.Leader, nil // a learner serves no reads
	}
	// Through a quorum, like `etcdctl endpoint health`.
	if _, err := c.Get(ctx, "health"); err != nil && !errors.Is(err, rpctypes.ErrPermissionDenied) {
		return s.Leader, fmt.Errorf("linearizable read failed: %w", err)
	}
	return s.Leader, nil
}

// called formats the name of a member.
func called(m *upgradeproto.EtcdMember) string {
	if m.GetName() == "" {
		return fmt.Sprintf("%x", m.GetId())
	}
	return fmt.Sprintf("%s (%x)", m.GetName(), m.GetId())
}

// remove removes a member, unless that would endanger the others.
func (e *etcd) remove(ctx context.Context, req *upgradeproto.RemoveEtcdMemberRequest) (*upgradeproto.RemoveEtcdMemberResponse, error) {
	if req.GetId() == 0 {
		return nil, status.Error(codes.InvalidArgument, "id is missing")
	}
	e.change.Lock()
	defer e.change.Unlock()
	l, err := e.members(ctx)
	if err != nil {
		return nil, err
	}
	m, err := mayLeave(l.GetMembers(), req.GetId(), req.GetName())
	if err != nil {
		return nil, status.Error(codes.FailedPrecondition, err.Error())
	}
	if m == nil {
		return &upgradeproto.RemoveEtcdMemberResponse{}, nil
	}
	c, err := e.dial(ctx, e.endpoint)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	ctx, cancel := context.WithTimeout(ctx, 2*memberTimeout)
	defer cancel()
	switch _, err := c.MemberRemove(ctx, m.GetId()); {
	case errors.Is(err, rpctypes.ErrMemberNotFound): // another caller did
		return &upgradeproto.RemoveEtcdMemberResponse{}, nil
	case err != nil:
		return nil, fmt.Errorf("remove member %s of etcd: %w", called(m), err)
	}
	return &upgradeproto.RemoveEtcdMemberResponse{Removed: true}, nil
}

// mayLeave returns the member with id and name if the others can do without it, nil if there
// is none, and otherwise why it must stay.
func mayLeave(members []*upgradeproto.EtcdMember, id uint64, name string) (*upgradeproto.EtcdMember, error) {
	var leaving *upgradeproto.EtcdMember
	var sick []string
	voters, healthy := 0, 0
	for _, m := range members {
		if m.GetId() == id {
			leaving = m
		} else if m.GetName() == name && name != "" {
			return nil, fmt.Errorf("the member called %s is %x, not %x", name, m.GetId(), id)
		} else if !m.GetHealthy() {
			sick = append(sick, called(m)+": "+m.GetTrouble())
		}
		if !m.GetLearner() {
			voters++
			if m.GetHealthy() {
				healthy++
			}
		}
	}
	switch {
	case leaving == nil:
		return nil, nil
	case leaving.GetName() != name:
		return nil, fmt.Errorf("member %x is called %q, not %q", id, leaving.GetName(), name)
	case leaving.GetLeader():
		return nil, fmt.Errorf("%s leads; move the leader first", called(leaving))
	case len(sick) > 0:
		return nil, fmt.Errorf("another member is not healthy: %s", strings.Join(sick, ", "))
	case healthy <= voters/2:
		return nil, fmt.Errorf("%d of %d voters are healthy, which is not a quorum", healthy, voters)
	case !leaving.GetLearner() && voters == 1:
		return nil, fmt.Errorf("%s is the only voter", called(leaving))
	}
	return leaving, nil
}

// move ensures that a member is not the leader.
func (e *etcd) move(ctx context.Context, req *upgradeproto.MoveEtcdLeaderRequest) (*upgradeproto.MoveEtcdLeaderResponse, error) {
	if req.GetAwayFrom() == 0 || req.GetAwayFrom() == req.GetTo() {
		return nil, status.Error(codes.InvalidArgument, "away_from is missing, or the same as to")
	}
	e.change.Lock()
	defer e.change.Unlock()
	l, err := e.members(ctx)
	if err != nil {
		return nil, err
	}
	leader, heir, err := successor(l.GetMembers(), req.GetTo())
	if err != nil {
		return nil, status.Error(codes.FailedPrecondition, err.Error())
	}
	if leader.GetId() != req.GetAwayFrom() {
		return &upgradeproto.MoveEtcdLeaderResponse{Leader: leader.GetId()}, nil
	}
	if heir == nil {
		return nil, status.Error(codes.FailedPrecondition, "no other voter is healthy")
	}
	// Only the leader itself accepts this request.
	c, err := e.dial(ctx, leader.GetClientUrls()[0])
	if err != nil {
		return nil, err
	}
	defer c.Close()
	ctx, cancel := context.WithTimeout(ctx, 2*memberTimeout)
	defer cancel()
	if _, err := c.MoveLeader(ctx, heir.GetId()); err != nil {
		return nil, fmt.Errorf("move the leader of etcd from %s to %s: %w", called(leader), called(heir), err)
	}
	return &upgradeproto.MoveEtcdLeaderResponse{Moved: true, Leader: heir.GetId()}, nil
}

// successor returns the leader and its successor: the voter with id, or the healthy one with
// the highest applied index if id is zero; nil if there is none.
func successor(members []*upgradeproto.EtcdMember, id uint64) (leader, heir *upgradeproto.EtcdMember, err error) {
	for _, m := range members {
		if m.GetLeader() {
			leader = m
		}
	}
	if leader == nil {
		return nil, nil, errors.New("no member leads")
	}
	for _, m := range members {
		if m == leader || m.GetLearner() || !m.GetHealthy() {
			continue
		}
		if id == m.GetId() || id == 0 && (heir == nil || m.GetAppliedIndex() > heir.GetAppliedIndex()) {
			heir = m
		}
	}
	if id != 0 && heir == nil && leader.GetId() != id {
		return nil, nil, fmt.Errorf("%x is not a healthy voter", id)
	}
	return leader, heir, nil
}

// snapshot sends a snapshot of the host's member, and its summary once it is verified. It
// keeps one chunk in memory.
func (e *etcd) snapshot(ctx context.Context, send func(*upgradeproto.SnapshotEtcdResponse) error) error {
	select {
	case e.snapshots <- struct{}{}:
		defer func() { <-e.snapshots }()
	default:
		return status.Error(codes.ResourceExhausted, "another snapshot is being taken")
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	stall := time.AfterFunc(snapshotStall, func() {
		cancel(status.Errorf(codes.DeadlineExceeded, "the snapshot made no progress for %s", snapshotStall))
	})
	defer stall.Stop()
	c, err := e.dial(ctx, e.endpoint)
	if err != nil {
		return err
	}
	defer c.Close()
	// Asked first: the client would wait long for an unreachable member, and a snapshot does not
	// always contain its description.
	sctx, done := context.WithTimeout(ctx, memberTimeout)
	now, err := c.Status(sctx, e.endpoint)
	done()
	if err != nil {
		return cause(ctx, fmt.Errorf("take a snapshot of etcd: %w", err))
	}
	s, err := c.SnapshotWithVersion(ctx)
	if err != nil {
		return cause(ctx, fmt.Errorf("take a snapshot of etcd: %w", err))
	}
	defer s.Snapshot.Close()
	sum, err := checkSnapshot(s.Snapshot, func(data []byte) error {
		stall.Reset(snapshotStall)
		return send(&upgradeproto.SnapshotEtcdResponse{Kind: &upgradeproto.SnapshotEtcdResponse_Data{Data: data}})
	})
	if err != nil {
		return cause(ctx, err)
	}
	sum.Revision, sum.EtcdVersion = now.Header.GetRevision(), now.Version
	sum.ClusterId, sum.MemberId = now.Header.GetClusterId(), now.Header.GetMemberId()
	return send(&upgradeproto.SnapshotEtcdResponse{Kind: &upgradeproto.SnapshotEtcdResponse_Summary{Summary: sum}})
}

// state returns a hash of all keys that the host's member has at a revision. It reads page by
// page, and keeps a hash of each key.
func (e *etcd) state(ctx context.Context, revision int64) (*upgradeproto.EtcdStateResponse, error) {
	if revision <= 0 {
		return nil, status.Error(codes.InvalidArgument, "revision is missing")
	}
	select {
	case e.snapshots <- struct{}{}:
		defer func() { <-e.snapshots }()
	default:
		return nil, status.Error(codes.ResourceExhausted, "a snapshot is being taken")
	}
	c, err := e.dial(ctx, e.endpoint)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	first, cancel := context.WithTimeout(ctx, 2*memberTimeout)
	defer cancel()
	l, err := c.MemberList(first) // linearizable: the member has applied the revision then
	if err == nil {
		_, err = c.Get(first, "health")
	}
	if err != nil {
		return nil, fmt.Errorf("read etcd at revision %d: %w", revision, err)
	}
	r := &upgradeproto.EtcdStateResponse{ClusterId: l.Header.GetClusterId(), MemberId: l.Header.GetMemberId()}
	for _, m := range l.Members {
		r.Members = append(r.Members, m.GetID())
	}
	var s backup.EtcdState
	for from, limit := "\x00", int64(16); ; {
		page, cancel := context.WithTimeout(ctx, snapshotStall)
		got, err := c.Get(page, from, clientv3.WithFromKey(), clientv3.WithRev(revision), clientv3.WithLimit(limit), clientv3.WithSerializable())
		cancel()
		switch {
		case errors.Is(err, rpctypes.ErrCompacted):
			return nil, status.Errorf(codes.OutOfRange, "etcd has compacted revision %d", revision)
		case err != nil:
			return nil, fmt.Errorf("read etcd at revision %d: %w", revision, err)
		}
		size := int64(1)
		for _, kv := range got.Kvs {
			s.Put(backup.EtcdEntry{Key: kv.Key, Value: kv.Value, Created: kv.CreateRevision, Modified: kv.ModRevision, Version: kv.Version, Lease: kv.Lease})
			size += int64(len(kv.Key) + len(kv.Value))
		}
		if !got.More || len(got.Kvs) == 0 {
			break
		}
		from = string(got.Kvs[len(got.Kvs)-1].Key) + "\x00"
		limit = min(max(statePage*int64(len(got.Kvs))/size, 16), 512)
	}
	r.Sha256 = s.Sum()
	return r, nil
}

// cause returns why ctx ended if it did, and err otherwise.
func cause(ctx context.Context, err error) error {
	if c := context.Cause(ctx); c != nil {
		return c
	}
	return err
}

// checkSnapshot passes a snapshot on and verifies it on the way: a database of whole pages,
// then its SHA-256.
func checkSnapshot(r io.Reader, send func([]byte) error) (*upgradeproto.SnapshotSummary, error) {
	body, whole := sha256.New(), sha256.New()
	var size int64
	var tail []byte // possibly the hash at the end
	for {
		buf := make([]byte, chunkSize) // gRPC may retain the sent buffer
		n, err := io.ReadFull(r, buf)
		if n > 0 {
			size += int64(n)
			whole.Write(buf[:n])
			tail = advance(body, tail, buf[:n])
			if err := send(buf[:n]); err != nil {
				return nil, err
			}
		}
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			break
		}
		if err != nil {
			return nil, fmt.Errorf("take a snapshot of etcd: %w", err)
		}
	}
	switch {
	case size%512 != sha256.Size || size == sha256.Size:
		return nil, status.Errorf(codes.DataLoss, "the snapshot has %d bytes, which is not a database with its hash", size)
	case !bytes.Equal(body.Sum(nil), tail):
		return nil, status.Error(codes.DataLoss, "the snapshot does not match its hash")
	}
	return &upgradeproto.SnapshotSummary{Size: size, Sha256: whole.Sum(nil)}, nil
}

// advance hashes all of tail and b except their last 32 bytes, which it returns.
func advance(h hash.Hash, tail, b []byte) []byte {
	if len(b) >= sha256.Size {
		h.Write(tail)
		h.Write(b[:len(b)-sha256.Size])
		return append(tail[:0], b[len(b)-sha256.Size:]...)
	}
	tail = append(tail, b...)
	if k := len(tail) - sha256.Size; k > 0 {
		h.Write(tail[:k])
		tail = append(tail[:0], tail[k:]...)
	}
	return tail
}
