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

// A snapshot contains every secret of the cluster, so access needs RBAC. Callers connect through
// a port-forward to the operator's pod. The port is on the host's loopback, where other programs
// can connect too. So the caller sends a token that was issued for this purpose alone. The API
// server authenticates it (TokenReview) and checks the right to create etcdsnapshots
// (SubjectAccessReview). That resource exists for this check only.
const (
	// SnapshotPath is the path from which GET returns a snapshot.
	SnapshotPath = "/v1/etcd-snapshot"
	// EtcdStatePath is the path from which GET with ?revision=N returns the state of the host's etcd
	// member at a revision, see [EtcdState].
	EtcdStatePath = "/v1/etcd-state"
	// SnapshotAudience is the required audience of the token.
	SnapshotAudience = "constellation-etcd-snapshot"
	// SnapshotAccount is the ServiceAccount, in the operator's namespace, that may create
	// snapshots. The right to create tokens of it implies access to snapshots.
	SnapshotAccount = "etcd-snapshot"

	snapshotResource = "etcdsnapshots"
	snapshotVerb     = "create"
)

// Trailers of a snapshot. A snapshot without them is incomplete.
const (
	TrailerSHA256   = "Snapshot-Sha256"   // of the whole file, in hex
	TrailerSize     = "Snapshot-Size"     // in bytes
	TrailerRevision = "Snapshot-Revision" // at least contained in the snapshot
	TrailerVersion  = "Snapshot-Etcd-Version"
	TrailerCluster  = "Snapshot-Etcd-Cluster" // ID, in hex
	TrailerMember   = "Snapshot-Etcd-Member"  // ID, in hex
)

// EtcdState is the state of an etcd member at a revision. IDs are in hex.
type EtcdState struct {
	ClusterID string   `json:"cluster_id"`
	MemberID  string   `json:"member_id"` // that answers
	Members   []string `json:"members"`   // all of the cluster
	SHA256    string   `json:"sha256"`    // of all keys, see backup.EtcdState
}

// reviewTimeout bounds the API server's reviews of a caller.
const reviewTimeout = 10 * time.Second

// snapshots streams etcd snapshots from the agent, one at a time.
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

// begin admits a caller, or answers with an error. The handler of an admitted caller must call end.
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

// serveState answers with the state of the host's member at a revision.
func (s *snapshots) serveState(w http.ResponseWriter, r *http.Request) {
	user, end, ok := s.begin(w, r)
	if !ok {
		return
	}
	defer end()
	revision, err := strconv.ParseInt(r.URL.Query().Get("revision"), 10, 64)
	if err != nil || revision <= 0 {
		http.Error(w, "revision must be a positive number", http.StatusBadRequest)
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

// hexID formats an ID as etcd does; empty for none.
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
		panic(http.ErrAbortHandler) // an aborted connection marks the file as incomplete
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

// sent records whether anything was written.
type sent struct {
	to  io.Writer
	any bool
}

func (s *sent) Write(p []byte) (int, error) {
	s.any = true
	return s.to.Write(p)
}

// admit returns the caller's name. The caller may read the error, which comes with its HTTP status.
func (s *snapshots) admit(r *http.Request) (user string, code int, err error) {
	token, ok := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
	if !ok || token == "" {
		return "", http.StatusUnauthorized, fmt.Errorf("a bearer token for the audience %s is required", SnapshotAudience)
	}
	ctx, cancel := context.WithTimeout(r.Context(), reviewTimeout)
	defer cancel()
	who, err := s.client.AuthenticationV1().TokenReviews().Create(ctx, &authenticationv1.TokenReview{
		Spec: authenticationv1.TokenReviewSpec{Token: token, Audiences: []string{SnapshotAudience}},
	}, metav1.CreateOptions{})
	if err != nil {
		return "", http.StatusServiceUnavailable, errors.New("the API server did not review the token; try again")
	}
	// An API server that does not support audiences returns none.
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
		return u.Username, http.StatusServiceUnavailable, errors.New("the API server did not review the caller's rights; try again")
	case !may.Status.Allowed:
		return u.Username, http.StatusForbidden, fmt.Errorf("%s may not %s %s.%s", u.Username, snapshotVerb, snapshotResource, v1alpha1.GroupVersion.Group)
	}
	return u.Username, http.StatusOK, nil
}

// snapshot writes a snapshot of the host's member to w. If there is no error, the snapshot is
// complete and the agent has verified it.
func (h *agentHost) snapshot(ctx context.Context, w io.Writer) (*upgradeproto.SnapshotSummary, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // only this ends an unfinished stream
	stream, err := h.agent.SnapshotEtcd(ctx, &upgradeproto.SnapshotEtcdRequest{})
	if err != nil {
		return nil, fmt.Errorf("take snapshot of etcd: %w", words(err))
	}
	for {
		m, err := stream.Recv()
		switch {
		case errors.Is(err, io.EOF):
			return nil, errors.New("take snapshot of etcd: the stream ended early")
		case err != nil:
			return nil, fmt.Errorf("take snapshot of etcd: %w", words(err))
		}
		if sum := m.GetSummary(); sum != nil {
			return sum, nil
		}
		if _, err := w.Write(m.GetData()); err != nil {
			return nil, fmt.Errorf("forward snapshot of etcd: %w", err)
		}
	}
}

// etcdState returns the state of the host's member at a revision.
func (h *agentHost) etcdState(ctx context.Context, revision int64) (*upgradeproto.EtcdStateResponse, error) {
	r, err := h.agent.EtcdState(ctx, &upgradeproto.EtcdStateRequest{Revision: revision})
	if err != nil {
		return nil, fmt.Errorf("read etcd at revision %d: %w", revision, words(err))
	}
	return r, nil
}
