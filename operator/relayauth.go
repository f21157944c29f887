package operator

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
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

// gate admits to a relay the operator and no other caller. It is safe for concurrent use.
type gate struct {
	client   kubernetes.Interface
	account  string // user name of the operator's ServiceAccount
	audience string
}

func newGate(c kubernetes.Interface, namespace, node string) gate {
	return gate{client: c, account: "system:serviceaccount:" + namespace + ":" + OperatorAccount, audience: RelayAudienceOf(node)}
}

// admit returns nil if the call bears a valid token of the operator for this relay. Else
// it returns a status: Unauthenticated, PermissionDenied for the token of another account,
// or Unavailable if the API server does not answer. None of them contains the token.
func (g gate) admit(ctx context.Context) error {
	md, _ := metadata.FromIncomingContext(ctx)
	values := md.Get(authorization)
	token := ""
	if len(values) == 1 {
		token, _ = strings.CutPrefix(values[0], bearer)
	}
	if token == "" || token == values[0] { // without the prefix
		return status.Errorf(codes.Unauthenticated, "the relay needs one bearer token for the audience %s", g.audience)
	}
	ctx, cancel := context.WithTimeout(ctx, reviewTimeout)
	defer cancel()
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
	return nil
}

func (g gate) unary(ctx context.Context, req any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
	if err := g.admit(ctx); err != nil {
		return nil, err
	}
	return next(ctx, req)
}

func (g gate) stream(srv any, s grpc.ServerStream, _ *grpc.StreamServerInfo, next grpc.StreamHandler) error {
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
