package joinservice

import (
	"context"
	"errors"
	"math/rand/v2"
	"runtime/debug"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	utilnet "k8s.io/apimachinery/pkg/util/net"

	"constellation/engine/cloud"
	"constellation/joinservice/joinproto"
)

// Reasons for refusing a ticket. answer maps them to the caller's error.
var (
	errNoEvidence      = errors.New("the connection carries no evidence")
	errNotReady        = errors.New("the join service has no usable join-config yet")
	errStopping        = errors.New("this join service is stopping")
	errBusy            = errors.New("too many machines are joining at once")
	errUnknownInstance = errors.New("the cloud does not list this instance yet, or no longer")
	errUsedMachine     = errors.New("this machine already belongs to the cluster; it needs a new TPM state to join again")
	errAlreadyNode     = errors.New("a Node of this name exists already, and a former node cannot join again; replace the machine, or delete the Node")
	errOtherInstance   = errors.New("the cloud's data of this instance differs from the evidence")
	errOtherKey        = errors.New("the evidence is by another key than the list of machines has: another computer was enrolled under this name since, or this one was; to enrol this one, run `constellation machine add`, then `constellation init`")
	errOtherAddress    = errors.New("the evidence came from the address of another machine of the list: the identity was copied to that machine, or it forwards connections; remove that machine and reinstall it")
	errRequest         = errors.New("certificate request refused")
	errNoComponents    = errors.New("no components are published yet for joining machines")
	errComponents      = errors.New("components do not match the digest in their name")
	errUnassigned      = errors.New("this machine is a spare that is not assigned to its group")
	errReleased        = errors.New("this machine was released from its group; it must reset itself")
	errNoCertifier     = errors.New("this cluster has no certifier")
	errCertifier       = errors.New("the certifier of this control plane does not answer")
	errKeyService      = errors.New("the key service of this control plane does not answer")
	errSigner          = errors.New("the CA signer of this control plane cannot answer at the moment")
	errSecrets         = errors.New("this machine does not get the keys of control planes; see the join service's log")
	errCertification   = errors.New("certificate of the attestation key refused")
	errCertified       = errors.New("a certificate confirms this machine: the vendor's API must, so connect without it")
	errTokenTaken      = errors.New("the name of this machine's bootstrap token is used by another machine")
)

// answer converts an error for the caller: a code, a sentence, and a retry delay if a retry
// can help. Details of the cluster stay in the log.
func answer(err error) error {
	var (
		held    *turnHeldError
		used    *turnUsedError
		leaving *leavingError
		revoked *revokedError
		name    *revokedNameError
	)
	for _, silent := range []error{errCertifier, errKeyService, errSigner} {
		if errors.Is(err, silent) {
			return later(codes.Unavailable, silent.Error(), 3*time.Second)
		}
	}
	switch {
	case errors.Is(err, errNoEvidence):
		return status.Error(codes.Unauthenticated, err.Error())
	case errors.Is(err, errReleased):
		return released()
	case errors.Is(err, errUnassigned):
		return later(codes.Unavailable, err.Error(), spareRetry)
	case errors.Is(err, errOtherInstance), errors.Is(err, errUsedMachine), errors.Is(err, errOtherKey), errors.Is(err, errOtherAddress):
		return status.Error(codes.PermissionDenied, err.Error())
	case errors.Is(err, errNoCertifier):
		return status.Error(codes.Unimplemented, err.Error())
	case errors.Is(err, errCertification):
		return status.Error(codes.InvalidArgument, errCertification.Error())
	case errors.Is(err, errCertified):
		return status.Error(codes.FailedPrecondition, err.Error())
	case errors.Is(err, errSecrets):
		return status.Error(codes.PermissionDenied, errSecrets.Error())
	case errors.Is(err, errRequest):
		return status.Error(codes.InvalidArgument, err.Error())
	case errors.As(err, &revoked):
		return status.Error(codes.PermissionDenied, revoked.Error())
	case errors.As(err, &name):
		return later(codes.Unavailable, name.Error(), time.Minute)
	case errors.As(err, &leaving):
		return status.Error(codes.FailedPrecondition, leaving.Error())
	case errors.As(err, &held):
		return later(codes.Unavailable, err.Error(), turnRetry)
	case errors.As(err, &used):
		return later(codes.Unavailable, err.Error(), max(turnRetry, used.wait))
	case errors.Is(err, errBusy):
		return later(codes.ResourceExhausted, err.Error(), 2*time.Second)
	case errors.Is(err, errStopping), errors.Is(err, errTokenTaken):
		return later(codes.Unavailable, err.Error(), time.Second)
	case errors.Is(err, errUnknownInstance), errors.Is(err, errNoComponents), errors.Is(err, errNotReady), errors.Is(err, errAlreadyNode):
		return later(codes.Unavailable, err.Error(), 3*time.Second)
	case errors.Is(err, errComponents):
		return status.Error(codes.FailedPrecondition, "the published components are damaged; see the join service's log")
	case errors.Is(err, context.Canceled):
		return status.Error(codes.Canceled, "the caller disconnected")
	case apierrors.IsInvalid(err):
		return status.Error(codes.FailedPrecondition, "a JoiningNode of this name contradicts the request; see the join service's log")
	case apierrors.IsForbidden(err), apierrors.IsUnauthorized(err):
		// An API server that has just started denies everything until it has loaded the roles.
		return later(codes.Unavailable, "the join service lacks a permission in the cluster; see its log", 5*time.Second)
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, cloud.ErrUnavailable), errors.Is(err, cloud.ErrThrottled), transient(err):
		return later(codes.Unavailable, "the cluster or its cloud does not answer at the moment", 3*time.Second)
	}
	return status.Error(codes.Internal, "the join service failed; see its log")
}

// spareRetry is about how often a spare asks whether it was assigned.
const spareRetry = 5 * time.Second

// released is the answer to a machine that must reset itself.
func released() error {
	st := status.New(codes.FailedPrecondition, errReleased.Error())
	if d, err := st.WithDetails(&errdetails.ErrorInfo{Reason: joinproto.ReasonReleased, Domain: joinproto.ErrorDomain}); err == nil {
		st = d
	}
	return st.Err()
}

// transient reports whether the API server was unavailable for the moment.
func transient(err error) bool {
	return apierrors.IsTooManyRequests(err) || apierrors.IsServerTimeout(err) || apierrors.IsTimeout(err) ||
		apierrors.IsInternalError(err) || apierrors.IsServiceUnavailable(err) || apierrors.IsConflict(err) ||
		apierrors.IsNotFound(err) || utilnet.IsConnectionRefused(err) || utilnet.IsConnectionReset(err) ||
		utilnet.IsProbableEOF(err) || utilnet.IsHTTP2ConnectionLost(err)
}

// later asks the caller to retry after about wait, with jitter, so that callers refused
// together do not return together.
func later(c codes.Code, text string, wait time.Duration) error {
	st := status.New(c, text)
	wait += rand.N(wait / 2)
	if d, err := st.WithDetails(&errdetails.RetryInfo{RetryDelay: durationpb.New(wait)}); err == nil {
		st = d
	}
	return st.Err()
}

func code(err error) string { return status.Code(err).String() }

func (s *Server) recoverUnary(ctx context.Context, req any, info *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (_ any, err error) {
	defer s.recovered(info.FullMethod, &err)
	return handle(ctx, req)
}

func (s *Server) recoverStream(srv any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handle grpc.StreamHandler) (err error) {
	defer s.recovered(info.FullMethod, &err)
	return handle(srv, stream)
}

// recovered contains a panic of one request.
func (s *Server) recovered(method string, err *error) {
	if p := recover(); p != nil {
		s.log.Error("request panicked", "method", method, "panic", p, "stack", string(debug.Stack()))
		*err = status.Error(codes.Internal, "the join service failed; see its log")
	}
}
