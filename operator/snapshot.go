package operator

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"constellation/agent/upgradeproto"
	"constellation/operator/api/v1alpha1"
)

// A snapshot holds every secret of the cluster, so it is given only to those to whom
// the API server would give them. The path to it is a port-forward to the operator's
// pod; the port is one of the host's loopback, where others may ask too. So the caller
// shows a token that was made for this purpose alone, the API server says whose it is,
// and whether they may create etcdsnapshots. That resource exists for this question only.
const (
	// SnapshotPath is where a snapshot is had with GET.
	SnapshotPath = "/v1/etcd-snapshot"
	// EtcdStatePath is where with GET and ?revision=N is had what the host's member of etcd
	// has at a revision, see [EtcdState].
	EtcdStatePath = "/v1/etcd-state"
	// SnapshotAudience is for whom the token must have been made.
	SnapshotAudience = "constellation-etcd-snapshot"
	// SnapshotAccount is the ServiceAccount, in the operator's namespace, that may create
	// snapshots. Who may create tokens of it may have one.
	SnapshotAccount = "etcd-snapshot"

	snapshotResource = "etcdsnapshots"
	snapshotVerb     = "create"
)

// Trailers of a snapshot: only with them it is whole.
const (
	TrailerSHA256   = "Snapshot-Sha256"   // of the whole file, in hex
	TrailerSize     = "Snapshot-Size"     // in bytes
	TrailerRevision = "Snapshot-Revision" // which it shows, or a later one
	TrailerVersion  = "Snapshot-Etcd-Version"
	TrailerCluster  = "Snapshot-Etcd-Cluster" // ID, in hex
	TrailerMember   = "Snapshot-Etcd-Member"  // ID, in hex
)

// EtcdState is what a member of etcd has at a revision. IDs are in hex.
type EtcdState struct {
	ClusterID string   `json:"cluster_id"`
	MemberID  string   `json:"member_id"` // that answers
	Members   []string `json:"members"`   // all of the cluster
	SHA256    string   `json:"sha256"`    // of all keys, see backup.EtcdState
}

// reviewTimeout bounds what is asked of the API server about a caller.
const reviewTimeout = 10 * time.Second

// snapshots passes snapshots of etcd on from the agent, one at a time.
type snapshots struct {
	client kubernetes.Interface
	take   func(context.Context, io.Writer) (*upgradeproto.SnapshotSummary, error)
	state  func(ctx context.Context, revision int64) (*upgradeproto.EtcdStateResponse, error) // nil serves none
	log    *slog.Logger
	free   chan struct{} // holds the permission to take one
}

func newSnapshots(c kubernetes.Interface, take func(context.Context, io.Writer) (*upgradeproto.SnapshotSummary, error), log *slog.Logger) *snapshots {
	s := &snapshots{client: c, take: take, log: log, free: make(chan struct{}, 1)}
	s.free <- struct{}{}
	return s
}

// serve answers at address until ctx ends.
func (s *snapshots) serve(ctx context.Context, address string) error {
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", address)
	if err != nil {
		return fmt.Errorf("serve snapshots: %w", err)
	}
	server := &http.Server{Handler: s.handler(), ReadHeaderTimeout: reviewTimeout, BaseContext: func(net.Listener) context.Context { return ctx }}
	stop := context.AfterFunc(ctx, func() { _ = server.Close() })
	defer stop()
	if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve snapshots: %w", err)
	}
	return nil
}

// handler returns what serves all paths.
func (s *snapshots) handler() http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET "+SnapshotPath, s)
	if s.state != nil {
		mux.HandleFunc("GET "+EtcdStatePath, s.serveState)
	}
	return mux
}

// begin admits a caller, and answers those that it does not. What it admits calls end.
func (s *snapshots) begin(w http.ResponseWriter, r *http.Request) (user string, end func(), ok bool) {
	user, code, err := s.admit(r)
	if err != nil {
		s.log.Warn("snapshot refused", "user", user, "err", err)
		http.Error(w, err.Error(), code)
		return user, nil, false
	}
	select {
	case <-s.free:
		return user, func() { s.free <- struct{}{} }, true
	default:
		w.Header().Set("Retry-After", "10")
		http.Error(w, "another snapshot is being taken; try again when it has ended", http.StatusServiceUnavailable)
		return user, nil, false
	}
}

// serveState answers what the host's member has at a revision.
func (s *snapshots) serveState(w http.ResponseWriter, r *http.Request) {
	user, end, ok := s.begin(w, r)
	if !ok {
		return
	}
	defer end()
	revision, err := strconv.ParseInt(r.URL.Query().Get("revision"), 10, 64)
	if err != nil || revision <= 0 {
		http.Error(w, "revision must be a number above zero", http.StatusBadRequest)
		return
	}
	start := time.Now()
	state, err := s.state(r.Context(), revision)
	if err != nil {
		s.log.Warn("state of etcd not read", "user", user, "revision", revision, "err", err)
		code := http.StatusBadGateway
		if status.Code(err) == codes.Unimplemented {
			code = http.StatusNotFound // the agent is older
		}
		http.Error(w, err.Error(), code)
		return
	}
	out := EtcdState{ClusterID: hexID(state.GetClusterId()), MemberID: hexID(state.GetMemberId()), SHA256: hex.EncodeToString(state.GetSha256())}
	for _, id := range state.GetMembers() {
		out.Members = append(out.Members, hexID(id))
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(out) // the caller sees that it is cut off
	s.log.Info("state of etcd read", "user", user, "revision", revision, "took", time.Since(start))
}

// hexID is how etcd writes an ID; empty for none.
func hexID(id uint64) string {
	if id == 0 {
		return ""
	}
	return strconv.FormatUint(id, 16)
}

// ServeHTTP implements http.Handler.
func (s *snapshots) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	user, end, ok := s.begin(w, r)
	if !ok {
		return
	}
	defer end()
	start := time.Now()
	w.Header().Set("Trailer", strings.Join([]string{TrailerSHA256, TrailerSize, TrailerRevision, TrailerVersion, TrailerCluster, TrailerMember}, ", "))
	w.Header().Set("Content-Type", "application/octet-stream")
	out := &sent{to: w}
	sum, err := s.take(r.Context(), out)
	switch {
	case err != nil && !out.any:
		s.log.Warn("snapshot failed", "user", user, "err", err)
		w.Header().Del("Trailer")
		http.Error(w, err.Error(), http.StatusBadGateway)
		return
	case err != nil:
		s.log.Warn("snapshot failed", "user", user, "err", err)
		panic(http.ErrAbortHandler) // the connection is cut, so nobody takes it for whole
	}
	h := w.Header()
	h.Set(TrailerSHA256, hex.EncodeToString(sum.GetSha256()))
	h.Set(TrailerSize, strconv.FormatInt(sum.GetSize(), 10))
	h.Set(TrailerRevision, strconv.FormatInt(sum.GetRevision(), 10))
	h.Set(TrailerVersion, sum.GetEtcdVersion())
	h.Set(TrailerCluster, hexID(sum.GetClusterId()))
	h.Set(TrailerMember, hexID(sum.GetMemberId()))
	s.log.Info("snapshot taken", "user", user, "bytes", sum.GetSize(), "revision", sum.GetRevision(), "took", time.Since(start))
}

// sent notes whether anything was written.
type sent struct {
	to  io.Writer
	any bool
}

func (s *sent) Write(p []byte) (int, error) {
	s.any = true
	return s.to.Write(p)
}

// admit says who asks. An error is fit for the caller's eyes, with the status to go
// with it.
func (s *snapshots) admit(r *http.Request) (user string, code int, err error) {
	token, ok := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
	if !ok || token == "" {
		return "", http.StatusUnauthorized, fmt.Errorf("a bearer token for the audience %s is needed", SnapshotAudience)
	}
	ctx, cancel := context.WithTimeout(r.Context(), reviewTimeout)
	defer cancel()
	who, err := s.client.AuthenticationV1().TokenReviews().Create(ctx, &authenticationv1.TokenReview{
		Spec: authenticationv1.TokenReviewSpec{Token: token, Audiences: []string{SnapshotAudience}},
	}, metav1.CreateOptions{})
	if err != nil {
		return "", http.StatusServiceUnavailable, errors.New("the API server could not be asked whose token it is; try again")
	}
	// An API server that does not know of audiences returns none.
	if !who.Status.Authenticated || !slices.Contains(who.Status.Audiences, SnapshotAudience) {
		return "", http.StatusUnauthorized, fmt.Errorf("the token is not valid for the audience %s", SnapshotAudience)
	}
	u := who.Status.User
	extra := make(map[string]authorizationv1.ExtraValue, len(u.Extra))
	for k, v := range u.Extra {
		extra[k] = authorizationv1.ExtraValue(v)
	}
	may, err := s.client.AuthorizationV1().SubjectAccessReviews().Create(ctx, &authorizationv1.SubjectAccessReview{
		Spec: authorizationv1.SubjectAccessReviewSpec{
			User: u.Username, Groups: u.Groups, UID: u.UID, Extra: extra,
			ResourceAttributes: &authorizationv1.ResourceAttributes{Group: v1alpha1.GroupVersion.Group, Resource: snapshotResource, Verb: snapshotVerb},
		},
	}, metav1.CreateOptions{})
	switch {
	case err != nil:
		return u.Username, http.StatusServiceUnavailable, errors.New("the API server could not be asked what the caller may do; try again")
	case !may.Status.Allowed:
		return u.Username, http.StatusForbidden, fmt.Errorf("%s may not %s %s.%s", u.Username, snapshotVerb, snapshotResource, v1alpha1.GroupVersion.Group)
	}
	return u.Username, http.StatusOK, nil
}

// snapshot writes a snapshot of the host's member to w. It is whole if there is no
// error; the agent has checked it then.
func (h *agentHost) snapshot(ctx context.Context, w io.Writer) (*upgradeproto.SnapshotSummary, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // a stream that is left ends only so
	stream, err := h.agent.SnapshotEtcd(ctx, &upgradeproto.SnapshotEtcdRequest{})
	if err != nil {
		return nil, fmt.Errorf("take snapshot of etcd: %w", words(err))
	}
	for {
		m, err := stream.Recv()
		switch {
		case errors.Is(err, io.EOF):
			return nil, errors.New("take snapshot of etcd: it ended before its end")
		case err != nil:
			return nil, fmt.Errorf("take snapshot of etcd: %w", words(err))
		}
		if sum := m.GetSummary(); sum != nil {
			return sum, nil
		}
		if _, err := w.Write(m.GetData()); err != nil {
			return nil, fmt.Errorf("pass snapshot of etcd on: %w", err)
		}
	}
}

// etcdState returns what the host's member has at a revision.
func (h *agentHost) etcdState(ctx context.Context, revision int64) (*upgradeproto.EtcdStateResponse, error) {
	r, err := h.agent.EtcdState(ctx, &upgradeproto.EtcdStateRequest{Revision: revision})
	if err != nil {
		return nil, fmt.Errorf("read etcd at revision %d: %w", revision, words(err))
	}
	return r, nil
}
