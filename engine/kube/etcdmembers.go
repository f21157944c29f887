package kube

import (
	"cmp"
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"time"

	corev1 "k8s.io/api/core/v1"

	"constellation/engine"
	"constellation/engine/backup"
	"constellation/engine/cluster"
)

// Where the operator runs on several control planes, the other members of etcd report their
// state at the last revision of the first lists. The snapshot contains the history up to it.

const (
	// memberLimit bounds how long a member may take, which reads all of etcd.
	memberLimit = 10 * time.Minute
	// maxStateKeys bounds how many keys a snapshot may have for this.
	maxStateKeys = 5_000_000
)

// memberAnswer is the state that another member of etcd reported.
type memberAnswer struct {
	node string
	err  error

	ClusterID string   `json:"cluster_id"`
	MemberID  string   `json:"member_id"`
	Members   []string `json:"members"`
	SHA256    string   `json:"sha256"`
}

// memberAnswers are those of the members on other machines than that of a snapshot.
type memberAnswers struct {
	revision int64 // that they were asked for
	asked    int
	answers  chan memberAnswer
}

// askMembers asks the members of etcd on other machines than that of source what they have at
// a revision, until ctx ends. Zero is no revision.
func (c *Client) askMembers(ctx context.Context, revision int64, pods []corev1.Pod, source *corev1.Pod, token string) *memberAnswers {
	m := &memberAnswers{revision: revision, answers: make(chan memberAnswer, len(pods))}
	if revision == 0 {
		return m
	}
	asked := []string{source.Spec.NodeName}
	for i := range pods {
		p := &pods[i]
		if slices.Contains(asked, p.Spec.NodeName) {
			continue
		}
		asked = append(asked, p.Spec.NodeName)
		m.asked++
		go func() {
			ctx, cancel := context.WithTimeout(ctx, memberLimit)
			defer cancel()
			a := memberAnswer{node: p.Spec.NodeName}
			a.err = c.askMember(ctx, p, token, revision, &a)
			m.answers <- a // there is room for all
		}()
	}
	return m
}

func (c *Client) askMember(ctx context.Context, p *corev1.Pod, token string, revision int64, out *memberAnswer) error {
	resp, tunnel, err := c.askOperator(ctx, p, token, etcdStatePath+"?revision="+strconv.FormatInt(revision, 10))
	if err != nil {
		return err
	}
	defer tunnel.Close()
	defer resp.Body.Close()
	if err := json.NewDecoder(io.LimitReader(resp.Body, 64<<10)).Decode(out); err != nil {
		return fmt.Errorf("%w: its answer is not readable", cluster.ErrUnreachable)
	}
	return nil
}

// state returns what a snapshot has at the revision that the members were asked for; nil if
// none was asked, or if the snapshot does not show it.
func (m *memberAnswers) state(ctx context.Context, db *backup.EtcdFile) (*backup.EtcdState, error) {
	compacted, err := db.Compacted()
	if err != nil {
		return nil, fmt.Errorf("%w: %w", engine.ErrImpostor, err)
	}
	if m.asked == 0 || compacted > m.revision {
		return nil, nil
	}
	s := &backup.EtcdState{}
	_, err = db.Read(ctx, func(e backup.EtcdEntry) error {
		if s != nil && e.Revision <= m.revision {
			if s.Put(e); s.Len() > maxStateKeys {
				s = nil
			}
		}
		return nil
	})
	if err != nil && ctx.Err() == nil {
		err = fmt.Errorf("%w: %w", engine.ErrImpostor, err)
	}
	return s, err
}

// compare compares a snapshot with what other members have. Those that did not answer are
// noted as unchecked.
func (m *memberAnswers) compare(ctx context.Context, s *backup.Snapshot, db *backup.EtcdFile, members []backup.EtcdMember) error {
	state, err := m.state(ctx, db)
	if err != nil {
		return err
	}
	unchecked := func(node, why string, args ...any) {
		s.Unchecked = append(s.Unchecked, "etcd on "+node+", "+fmt.Sprintf(why, args...))
	}
	for range m.asked {
		var a memberAnswer
		select {
		case a = <-m.answers:
		case <-ctx.Done():
			return ctx.Err()
		}
		switch {
		case errors.Is(a.err, cluster.ErrAbsent):
			unchecked(a.node, "because its operator or agent is older")
			continue
		case a.err != nil:
			unchecked(a.node, "which did not answer: %v", a.err)
			continue
		case s.ClusterID != "" && a.ClusterID != s.ClusterID:
			return fmt.Errorf("%w: its etcd has the cluster ID %s, and etcd on %s has %s", engine.ErrImpostor, clean(s.ClusterID), a.node, clean(a.ClusterID))
		case !slices.ContainsFunc(members, func(m backup.EtcdMember) bool { return m.Name == a.node && etcdID(m.ID) == a.MemberID }):
			return fmt.Errorf("%w: its etcd has no member %s with the ID %s, and that on %s has", engine.ErrImpostor, a.node, clean(cmp.Or(a.MemberID, "0")), a.node)
		}
		for _, id := range a.Members {
			if !slices.ContainsFunc(members, func(m backup.EtcdMember) bool { return etcdID(m.ID) == id }) {
				return fmt.Errorf("%w: it lacks the member %s of etcd that %s has: members change at the moment, or it is an old one", cluster.ErrUnreachable, clean(id), a.node)
			}
		}
		// A member may have been removed since, and old versions of etcd left removed ones in
		// the database.
		for _, m := range members {
			if !slices.Contains(a.Members, etcdID(m.ID)) {
				unchecked(a.node, "which does not have the member %s of the snapshot", etcdID(m.ID))
			}
		}
		switch {
		case state == nil:
			unchecked(a.node, "because the snapshot does not show revision %d, or has more than %d keys", m.revision, maxStateKeys)
		case hex.EncodeToString(state.Sum()) != a.SHA256:
			return fmt.Errorf("%w: it differs from what etcd on %s has at revision %d", engine.ErrImpostor, a.node, m.revision)
		default:
			s.Witnesses = append(s.Witnesses, a.node)
		}
	}
	slices.Sort(s.Witnesses)
	return nil
}

// etcdID is how etcd writes an ID.
func etcdID(id uint64) string { return strconv.FormatUint(id, 16) }
