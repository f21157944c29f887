package cluster

import (
	"errors"
	"fmt"
)

// Errors that implementations of [Cluster] wrap.
var (
	// ErrAbsent means that the cluster has no such object, or not its kind yet.
	ErrAbsent = errors.New("not found")
	// ErrUnreachable means that the API server did not answer. Trying again may help.
	ErrUnreachable = errors.New("the API server does not answer")
	// ErrDenied means that the kubeconfig does not allow the call, or is not of this
	// cluster. Trying again does not help.
	ErrDenied = errors.New("denied by the API server")
	// ErrForbidden is an ErrDenied of an authenticated user: the kubeconfig is of this cluster,
	// but its user lacks permissions for the call.
	ErrForbidden = fmt.Errorf("%w: too few rights", ErrDenied)
	// ErrConflict means that the object was changed after it was read.
	ErrConflict = errors.New("changed by somebody else")
	// ErrNotEncrypting means that an API server stores Secrets as they are.
	ErrNotEncrypting = errors.New("the API server does not encrypt Secrets")
)
