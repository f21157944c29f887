package bootstrapper

import (
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	"constellation/engine/attestation"
	"constellation/engine/cloud"
	"constellation/engine/release"
)

// Reasons for refusing a console. answer maps them to the console's error.
var (
	errSecret       = errors.New("the init secret differs from the one in this machine's cloud")
	errOtherInit    = errors.New("another init, for another cluster, has claimed this machine")
	errCluster      = errors.New("there is a cluster behind the load balancer already; this machine is about to join it")
	errNotFinished  = errors.New("there is no result to acknowledge yet")
	errFailedInit   = errors.New("the init failed; there is no result to acknowledge")
	errNoMember     = errors.New("the machine is no control plane of a cluster that waits for keys")
	errOtherCluster = errors.New("the machine belongs to another cluster")
	errOtherKeys    = errors.New("the keys are derived from another master secret")
	errNothing      = errors.New("no init was started on this machine")
	errFetched      = errors.New("the result was fetched and acknowledged")
	errStopping     = errors.New("the bootstrapper is stopping")
)

// fieldError is an invalid field of a request.
type fieldError struct{ field, problem string }

func (e *fieldError) Error() string { return e.field + ": " + e.problem }

// limitedError asks a caller to retry later.
type limitedError struct{ wait time.Duration }

func (e *limitedError) Error() string {
	return fmt.Sprintf("too many wrong init secrets; retry in %s", max(time.Second, e.wait.Round(time.Second)))
}

// answer converts an error for the caller.
func answer(err error) error {
	var field *fieldError
	var limited *limitedError
	switch {
	case err == nil:
		return nil
	case errors.As(err, &limited):
		return later(codes.ResourceExhausted, err.Error(), limited.wait)
	case errors.Is(err, errSecret):
		return status.Error(codes.Unauthenticated, err.Error())
	case errors.As(err, &field):
		return status.Error(codes.InvalidArgument, err.Error())
	case errors.Is(err, errOtherInit), errors.Is(err, errOtherHolder):
		return status.Error(codes.AlreadyExists, err.Error())
	case errors.Is(err, errJoinHolds), errors.Is(err, errMember), errors.Is(err, errCluster), errors.Is(err, errFetched),
		errors.Is(err, errNotFinished), errors.Is(err, errFailedInit), errors.Is(err, errNothing),
		errors.Is(err, errNoMember), errors.Is(err, errOtherCluster), errors.Is(err, errOtherKeys),
		errors.Is(err, release.ErrNoMachineKeys):
		return status.Error(codes.FailedPrecondition, err.Error())
	case errors.Is(err, errStopping):
		return later(codes.Unavailable, err.Error(), time.Second)
	case errors.Is(err, context.Canceled):
		return status.Error(codes.Canceled, "the caller disconnected")
	case errors.Is(err, context.DeadlineExceeded):
		return status.Error(codes.DeadlineExceeded, "the caller's deadline expired")
	case errors.Is(err, cloud.ErrUnavailable), errors.Is(err, cloud.ErrThrottled), errors.Is(err, attestation.ErrTPM):
		return later(codes.Unavailable, err.Error(), 2*time.Second)
	}
	if _, ok := status.FromError(err); ok { // of the stream itself
		return err
	}
	return status.Error(codes.Internal, err.Error())
}

func later(c codes.Code, text string, wait time.Duration) error {
	st := status.New(c, text)
	if d, err := st.WithDetails(&errdetails.RetryInfo{RetryDelay: durationpb.New(wait)}); err == nil {
		st = d
	}
	return st.Err()
}
