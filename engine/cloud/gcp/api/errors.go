package api

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"time"

	compute "google.golang.org/api/compute/v1"
	"google.golang.org/api/googleapi"

	"constellation/engine/cloud"
)

// Error is an error of Compute Engine with its remedy. It wraps an error of package cloud.
type Error struct {
	// Op is what failed: "create machines of group workers".
	Op string
	// Code is the reason in the words of Compute Engine; Message its explanation.
	Code, Message string
	// Kind is an error of package cloud; nil: no other one fits.
	Kind error
	// Permission is what the credentials lack; empty: not known, or not the reason.
	Permission string
	// Remedy is what a person can do, in the imperative; empty: nothing.
	Remedy string

	ended bool // the operation has ended: a repeated request would get this error again
	lost  bool // the operation has not ended in time
}

// Error implements error.
func (e *Error) Error() string {
	text := e.Op
	if e.Kind != nil {
		text += ": " + e.Kind.Error()
	}
	if e.Message != "" {
		text += ": " + e.Message
	}
	if e.Code != "" {
		text += " (" + e.Code + ")"
	}
	if e.Remedy != "" {
		text += "; " + e.Remedy
	}
	return text
}

// Ended reports whether an operation has ended with this error. A repeated request would get it again.
func (e *Error) Ended() bool { return e.ended }

// Lost reports whether an operation has not ended in time. A repeated request with the same ID would wait for it again.
func (e *Error) Lost() bool { return e.lost }

// Unwrap returns the error of package cloud.
func (e *Error) Unwrap() error { return e.Kind }

// NoCredentials is the remedy of missing or refused credentials.
const NoCredentials = "run on a machine with a service account, configure workload identity federation, or run `gcloud auth application-default login`"

// rule maps errors of Compute Engine to an error of package cloud and a remedy.
type rule struct {
	codes  []string // reasons of HTTP errors, and codes of errors of operations
	kind   error
	remedy string // {permission} and {zone} are replaced
}

// errCapacity and errQuota wrap ErrUnavailable, too: the request can succeed later as it is.
var (
	errCapacity = fmt.Errorf("%w: %w", cloud.ErrUnavailable, cloud.ErrCapacity)
	errQuota    = fmt.Errorf("%w: %w", cloud.ErrUnavailable, cloud.ErrQuota)
)

// rules is the table of errors. Codes are at
// https://cloud.google.com/compute/docs/troubleshooting/troubleshooting-vm-creation,
// https://cloud.google.com/compute/docs/api/how-tos/api-requests-responses and
// https://cloud.google.com/compute/docs/reference/rest/v1/errors.
var rules = []rule{
	{
		codes: []string{"ZONE_RESOURCE_POOL_EXHAUSTED", "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS", "RESOURCE_POOL_EXHAUSTED", "stockout", "VM_MIN_COUNT_NOT_REACHED"}, kind: errCapacity,
		remedy: "wait, use another zone or another machine type, or reserve machines",
	},
	{
		codes: []string{"quotaExceeded", "QUOTA_EXCEEDED", "limitExceeded", "LIMIT_EXCEEDED"}, kind: errQuota,
		remedy: "request a higher quota of the project on the page IAM & Admin > Quotas, or delete unused resources",
	},
	{codes: []string{"rateLimitExceeded", "userRateLimitExceeded", "RATE_LIMIT_EXCEEDED", "RESOURCE_OPERATION_RATE_EXCEEDED"}, kind: cloud.ErrThrottled},
	{
		codes: []string{"accessNotConfigured", "SERVICE_DISABLED"}, kind: cloud.ErrDenied,
		remedy: "enable the Compute Engine API of the project: `gcloud services enable compute.googleapis.com`",
	},
	{codes: []string{"billingNotEnabled", "BILLING_DISABLED"}, kind: cloud.ErrDenied, remedy: "link the project to a billing account"},
	{
		codes: []string{"forbidden", "PERMISSIONS_ERROR", "insufficientPermissions", "ACCESS_TOKEN_SCOPE_INSUFFICIENT", "IAM_PERMISSION_DENIED"}, kind: cloud.ErrDenied,
		remedy: "grant {permission} to the account that sent the request",
	},
	{codes: []string{"authError", "required", "UNAUTHENTICATED"}, kind: cloud.ErrDenied, remedy: NoCredentials},
	{codes: []string{"alreadyExists", "RESOURCE_ALREADY_EXISTS", "conditionNotMet", "CONDITION_NOT_MET", "resourceInUseByAnotherResource", "RESOURCE_IN_USE_BY_ANOTHER_RESOURCE", "fingerprintMismatch"}, kind: cloud.ErrConflict},
	{codes: []string{"notFound", "RESOURCE_NOT_FOUND"}, kind: cloud.ErrNotFound},
	{codes: []string{"backendError", "internalError", "INTERNAL_ERROR", "resourceNotReady", "RESOURCE_NOT_READY", "UNSUPPORTED_OPERATION_IN_PROGRESS"}, kind: cloud.ErrUnavailable},
}

// statuses map answers whose reason the table lacks.
var statuses = map[int]error{
	http.StatusUnauthorized: cloud.ErrDenied, http.StatusForbidden: cloud.ErrDenied, http.StatusNotFound: cloud.ErrNotFound,
	http.StatusConflict: cloud.ErrConflict, http.StatusPreconditionFailed: cloud.ErrConflict, http.StatusTooManyRequests: cloud.ErrThrottled,
}

// permission finds the missing right in a message: "Required 'compute.instances.list' permission for
// 'projects/p'".
var permission = regexp.MustCompile(`[Rr]equired '([a-zA-Z.]+)' permission`)

// failure returns the error of a reason.
func failure(op, code, message string, status int) *Error {
	e := &Error{Op: op, Code: code, Message: message, Kind: statuses[status]}
	if status >= http.StatusInternalServerError {
		e.Kind = cloud.ErrUnavailable
	}
	if m := permission.FindStringSubmatch(message); m != nil {
		e.Permission = m[1]
	}
	for _, r := range rules {
		for _, c := range r.codes {
			if strings.EqualFold(c, code) {
				e.Kind = r.kind
				right := "the permission that the message names"
				if e.Permission != "" {
					right = "the permission " + e.Permission
				}
				e.Remedy = strings.ReplaceAll(r.remedy, "{permission}", right)
			}
		}
	}
	return e
}

// explain returns an error of the client as one of this package. It is nil for nil.
func explain(op string, err error, now time.Time) error {
	var answer *googleapi.Error
	switch {
	case err == nil:
		return nil
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return fmt.Errorf("%s: %w", op, err)
	case errors.As(err, new(*Error)):
		return fmt.Errorf("%s: %w", op, err) // of the credentials
	case !errors.As(err, &answer):
		return fmt.Errorf("%s: %w: %w", op, cloud.ErrUnavailable, err)
	}
	code := ""
	for _, item := range answer.Errors {
		code = item.Reason
	}
	e := failure(op, code, answer.Message, answer.Code)
	if errors.Is(e.Kind, cloud.ErrThrottled) {
		e.Kind = &cloud.ThrottledError{Until: reopens(answer.Header, now)}
	}
	return e
}

// reopens returns when a rate limit is refilled: at the time that the answer names, or with the next
// minute (https://cloud.google.com/compute/api-quota).
func reopens(h http.Header, now time.Time) time.Time {
	if n, err := strconv.Atoi(h.Get("Retry-After")); err == nil && n > 0 {
		return now.Add(time.Duration(n) * time.Second)
	}
	return now.Truncate(time.Minute).Add(time.Minute)
}

// explainOperation returns the error of an operation that has ended.
func explainOperation(op string, o *compute.Operation, now time.Time) error {
	if o.Error == nil || len(o.Error.Errors) == 0 {
		if o.HttpErrorStatusCode >= http.StatusBadRequest {
			e := failure(op, "", o.HttpErrorMessage, int(o.HttpErrorStatusCode))
			e.ended = true
			return e
		}
		return nil
	}
	first := o.Error.Errors[0]
	e := failure(op, first.Code, first.Message, int(o.HttpErrorStatusCode))
	e.ended = true
	if errors.Is(e.Kind, cloud.ErrThrottled) {
		e.Kind = &cloud.ThrottledError{Until: reopens(nil, now)}
	}
	return e
}

// Attempt returns why the last attempt of a group to create a machine failed; nil: it did not.
func Attempt(m *compute.ManagedInstance) *Error {
	if m.LastAttempt == nil || m.LastAttempt.Errors == nil || len(m.LastAttempt.Errors.Errors) == 0 {
		return nil
	}
	first := m.LastAttempt.Errors.Errors[0]
	return failure("create "+m.Name, first.Code, first.Message, 0)
}
