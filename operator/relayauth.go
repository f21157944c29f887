package operator

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/time/rate"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	corev1client "k8s.io/client-go/kubernetes/typed/core/v1"
)

// The right to forward ports in our namespace, which the built-in role edit includes, must
// not be the right to upgrade nodes. So a relay demands a token of the operator's
// ServiceAccount. Each node has an audience of its own: root on a node can read what the
// relay receives there, and a relay elsewhere refuses that token.
const (
	// RelayAudience is the prefix of the audience; the node's name follows.
	RelayAudience = "constellation-relay:"
	// OperatorAccount is the ServiceAccount that relays accept, in the operator's namespace.
	OperatorAccount = "constellation-operator"

	relayTokenLife = 10 * time.Minute // the least that API servers issue
	// relayTokenSpare is how much of its life a token must have left when it is sent.
	relayTokenSpare = 4 * time.Minute
	authorization   = "authorization"
	bearer          = "Bearer "
)

// RelayAudienceOf returns the audience of tokens for the relay on node.
func RelayAudienceOf(node string) string { return RelayAudience + node }

// Reviews cost the API server and the relay's share of its requests, so callers cannot have them
// made without a bound.
const (
	// A token that was accepted is not reviewed again for reviewedFor, nor after it expires.
	reviewedFor = 30 * time.Second
	// maxReviewed is how many accepted tokens are remembered. The operator has one at a time.
	maxReviewed = 8
	// Each second brings reviewRate reviews of callers that are not known yet, up to
	// reviewBurst at once. A connection of the operator has as many of its own.
	reviewRate, reviewBurst = 2, 10
	// reviewSkew is how far the clocks of this node and of the API server may differ.
	reviewSkew = time.Minute
)

// gate admits to a relay the operator and no other caller. It is safe for concurrent use.
type gate struct {
	client   kubernetes.Interface
	account  string // user name of the operator's ServiceAccount
	audience string
	now      func() time.Time
	strange  *rate.Limiter // reviews for callers that are not known yet
	known    *rate.Limiter // reviews on connections of the operator
	callers  *callers      // nil: connections are not told apart

	mu       sync.Mutex
	reviewed map[[sha256.Size]byte]time.Time // until when an accepted token is not reviewed again
}

func newGate(c kubernetes.Interface, namespace, node string) *gate {
	return &gate{
		client: c, account: "system:serviceaccount:" + namespace + ":" + OperatorAccount, audience: RelayAudienceOf(node), now: time.Now,
		strange: rate.NewLimiter(reviewRate, reviewBurst), known: rate.NewLimiter(reviewRate, reviewBurst),
		reviewed: map[[sha256.Size]byte]time.Time{},
	}
}

// admit returns nil if the call bears a valid token of the operator for this relay. Else
// it returns a status: Unauthenticated, PermissionDenied for the token of another account,
// or Unavailable if the API server does not answer or too many tokens are to be reviewed.
// None of them contains the token.
func (g *gate) admit(ctx context.Context) error {
	md, _ := metadata.FromIncomingContext(ctx)
	values := md.Get(authorization)
	token := ""
	if len(values) == 1 {
		token, _ = strings.CutPrefix(values[0], bearer)
	}
	if token == "" || token == values[0] { // without the prefix
		return status.Errorf(codes.Unauthenticated, "the relay needs one bearer token for the audience %s", g.audience)
	}
	// A token that could not be accepted even if it is genuine costs no review.
	expires, err := g.claims(token)
	if err != nil {
		return err
	}
	address := ""
	if p, ok := peer.FromContext(ctx); ok && p.Addr != nil {
		address = p.Addr.String()
	}
	id := sha256.Sum256([]byte(token))
	if g.accepted(id) {
		g.callers.admitted(address)
		return nil
	}
	// Strangers cannot use up the reviews of the operator's renewed tokens.
	limit := g.strange
	if g.callers.knows(address) {
		limit = g.known
	}
	if !limit.AllowN(g.now(), 1) {
		return status.Errorf(codes.Unavailable, "more than %d tokens a second are to be reviewed; retry", reviewRate)
	}
	ctx, cancel := context.WithTimeout(ctx, reviewTimeout)
	defer cancel()
	asked := g.now()
	review, err := g.client.AuthenticationV1().TokenReviews().Create(ctx, &authenticationv1.TokenReview{
		Spec: authenticationv1.TokenReviewSpec{Token: token, Audiences: []string{g.audience}},
	}, metav1.CreateOptions{})
	switch {
	case err != nil:
		return status.Error(codes.Unavailable, "the API server did not review the caller's token; retry")
	// An API server that does not support audiences returns none.
	case !review.Status.Authenticated || !slices.Contains(review.Status.Audiences, g.audience):
		return status.Errorf(codes.Unauthenticated, "the token is not valid for the audience %s", g.audience)
	case review.Status.User.Username != g.account:
		return status.Errorf(codes.PermissionDenied, "%s may not use the relay: it serves %s only", review.Status.User.Username, g.account)
	}
	g.accept(id, asked, expires)
	g.callers.admitted(address)
	return nil
}

// claims returns when a token expires, or the status with which it is refused for what it
// claims. The claims are not trusted: the API server reviews the token afterwards.
func (g *gate) claims(token string) (time.Time, error) {
	wrong := status.Errorf(codes.Unauthenticated, "the token is not valid for the audience %s", g.audience)
	parts := strings.Split(token, ".")
	if len(parts) != 3 {
		return time.Time{}, wrong
	}
	payload, err := base64.RawURLEncoding.DecodeString(parts[1])
	if err != nil {
		return time.Time{}, wrong
	}
	var c struct {
		Audience []string `json:"aud"`
		Subject  string   `json:"sub"`
		Expires  float64  `json:"exp"`
	}
	if json.Unmarshal(payload, &c) != nil || !slices.Contains(c.Audience, g.audience) || c.Expires <= 0 {
		return time.Time{}, wrong
	}
	expires := time.Unix(int64(min(c.Expires, 1<<40)), 0)
	switch {
	case g.now().After(expires.Add(reviewSkew)):
		return time.Time{}, wrong
	case c.Subject != g.account:
		return time.Time{}, status.Errorf(codes.PermissionDenied, "%.300q may not use the relay: it serves %s only", c.Subject, g.account)
	}
	return expires, nil
}

// accepted reports whether a token was reviewed a moment ago.
func (g *gate) accepted(id [sha256.Size]byte) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	until, ok := g.reviewed[id]
	if ok && !g.now().Before(until) {
		delete(g.reviewed, id)
		ok = false
	}
	return ok
}

// accept remembers a token that the API server accepted.
func (g *gate) accept(id [sha256.Size]byte, asked, expires time.Time) {
	g.mu.Lock()
	defer g.mu.Unlock()
	until := asked.Add(reviewedFor)
	if expires.Before(until) {
		until = expires
	}
	for len(g.reviewed) >= maxReviewed {
		var first [sha256.Size]byte
		for other, end := range g.reviewed {
			if at, ok := g.reviewed[first]; !ok || end.Before(at) {
				first = other
			}
		}
		delete(g.reviewed, first)
	}
	g.reviewed[id] = until
}

func (g *gate) unary(ctx context.Context, req any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
	if err := g.admit(ctx); err != nil {
		return nil, err
	}
	return next(ctx, req)
}

func (g *gate) stream(srv any, s grpc.ServerStream, _ *grpc.StreamServerInfo, next grpc.StreamHandler) error {
	if err := g.admit(s.Context()); err != nil {
		return err
	}
	return next(srv, s)
}

// relayToken is the operator's token for the relay on one node. It requests a new one
// before the last expires. It is safe for concurrent use.
type relayToken struct {
	accounts corev1client.ServiceAccountInterface
	pod      string // that the token is bound to; empty: none
	audience string
	now      func() time.Time

	mu     sync.Mutex
	token  string
	renews time.Time
}

// RequireTransportSecurity implements credentials.PerRPCCredentials. TLS to the kubelet
// carries the connection, which gRPC cannot see.
func (t *relayToken) RequireTransportSecurity() bool { return false }

// GetRequestMetadata implements credentials.PerRPCCredentials.
func (t *relayToken) GetRequestMetadata(ctx context.Context, _ ...string) (map[string]string, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.token == "" || !t.now().Before(t.renews) {
		if err := t.renew(ctx); err != nil {
			// The code makes the call one that is retried.
			return nil, status.Errorf(codes.Unavailable, "request token for the relay: %v", err)
		}
	}
	return map[string]string{authorization: bearer + t.token}, nil
}

func (t *relayToken) renew(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, reviewTimeout)
	defer cancel()
	spec := authenticationv1.TokenRequestSpec{Audiences: []string{t.audience}, ExpirationSeconds: ptr(int64(relayTokenLife / time.Second))}
	if t.pod != "" {
		// The API server adds the UID, so the token ends with this pod.
		spec.BoundObjectRef = &authenticationv1.BoundObjectReference{Kind: "Pod", APIVersion: "v1", Name: t.pod}
	}
	asked := t.now()
	r, err := t.accounts.CreateToken(ctx, OperatorAccount, &authenticationv1.TokenRequest{Spec: spec}, metav1.CreateOptions{})
	if err != nil {
		return err
	}
	if r.Status.Token == "" {
		return errors.New("the API server returned none")
	}
	// The lifetime counts from our clock, because the API server's may differ.
	life := r.Status.ExpirationTimestamp.Sub(r.CreationTimestamp.Time)
	if r.CreationTimestamp.IsZero() || life <= 0 || life > relayTokenLife {
		life = relayTokenLife
	}
	t.token, t.renews = r.Status.Token, asked.Add(life-relayTokenSpare)
	return nil
}

// genuine returns an error unless p is a pod of the relay's DaemonSet. A mirror pod, which
// any kubelet can make, has no ServiceAccount.
func genuine(p *corev1.Pod) error {
	owner := metav1.GetControllerOf(p)
	switch {
	case p.Annotations[corev1.MirrorPodAnnotationKey] != "":
		return fmt.Errorf("pod %s is a mirror pod", p.Name)
	case p.Spec.ServiceAccountName != RelayName:
		return fmt.Errorf("pod %s has ServiceAccount %q, want %s", p.Name, p.Spec.ServiceAccountName, RelayName)
	case owner == nil || owner.Kind != "DaemonSet" || owner.Name != RelayName:
		return fmt.Errorf("pod %s does not belong to DaemonSet %s", p.Name, RelayName)
	}
	return nil
}
