package engine

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"

	"constellation/engine/atls"
	"constellation/engine/attestation"
	"constellation/engine/cloud"
	"constellation/engine/cloud/providers"
	"constellation/engine/plan"
	"constellation/engine/workspace"
)

// errOther means that another machine answered behind the load balancer than the one
// that was asked before. Trying again reaches the right one sooner or later.
var errOther = errors.New("another machine answered")

// link is a connection to the bootstrapper of one attested machine.
type link struct {
	*grpc.ClientConn
	machine  attestation.Identity
	attested bool
}

// dialer connects to the bootstrapper of the first node.
type dialer struct {
	endpoint  string
	validator attestation.Validator
	// accept judges the machine after its evidence was accepted, and before anything
	// is sent to it. It wraps errOther to have the next one tried.
	accept func(attestation.Statement) error
}

// dial connects once. Its error wraps one of package attestation's, errOther, or
// what the network said.
func (d dialer) dial(ctx context.Context) (*link, error) {
	var mu sync.Mutex
	var cause error // why the handshake failed; gRPC keeps only its text
	var peer attestation.Statement
	note := func(err error) {
		mu.Lock()
		defer mu.Unlock()
		cause = err
	}
	creds := judge{
		TransportCredentials: atls.NewClient(atls.Config{
			Purpose:   atls.PurposeInit,
			Validator: func() attestation.Validator { return d.validator },
			OnFailure: func(_ net.Addr, err error) { note(err) },
		}),
		accept: func(s attestation.Statement) error {
			if err := d.accept(s); err != nil {
				note(err)
				return err
			}
			mu.Lock()
			defer mu.Unlock()
			peer = s
			return nil
		},
	}
	conn, err := grpc.NewClient("passthrough:///"+d.endpoint,
		grpc.WithTransportCredentials(creds),
		grpc.WithDisableServiceConfig(),
		// kubeadm may be silent for minutes; a connection that died meanwhile is noticed.
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 15 * time.Second, Timeout: 10 * time.Second}),
		// A proxy of the environment would be asked to lead to an address that only this computer knows.
		grpc.WithContextDialer(func(ctx context.Context, addr string) (net.Conn, error) {
			c, err := (&net.Dialer{Timeout: 5 * time.Second}).DialContext(ctx, "tcp", addr)
			if err != nil {
				note(err)
			}
			return c, err
		}))
	if err != nil {
		return nil, err
	}
	conn.Connect()
	for {
		switch s := conn.GetState(); s {
		case connectivity.Ready:
			mu.Lock()
			defer mu.Unlock()
			return &link{conn, peer.Identity, peer.Attested}, nil
		case connectivity.TransientFailure, connectivity.Shutdown:
			conn.Close()
			mu.Lock()
			defer mu.Unlock()
			if cause == nil {
				cause = errors.New("the connection was closed")
			}
			return nil, cause
		default:
			if !conn.WaitForStateChange(ctx, s) {
				conn.Close()
				return nil, ctx.Err()
			}
		}
	}
}

// judge is credentials that ask accept about the machine at the other end.
type judge struct {
	credentials.TransportCredentials
	accept func(attestation.Statement) error
}

// ClientHandshake implements credentials.TransportCredentials.
func (j judge) ClientHandshake(ctx context.Context, authority string, c net.Conn) (net.Conn, credentials.AuthInfo, error) {
	conn, info, err := j.TransportCredentials.ClientHandshake(ctx, authority, c)
	if err != nil {
		return nil, nil, err
	}
	a, ok := info.(atls.AuthInfo)
	if !ok || a.Statement == nil {
		conn.Close()
		return nil, nil, errors.New("the other side showed no evidence")
	}
	if err := j.accept(*a.Statement); err != nil {
		conn.Close()
		return nil, nil, err
	}
	return conn, info, nil
}

// Clone implements credentials.TransportCredentials.
func (j judge) Clone() credentials.TransportCredentials {
	return judge{j.TransportCredentials.Clone(), j.accept}
}

// eitherValidator accepts what one of two accepts: a machine that belongs to no
// cluster, or one that belongs to the cluster being made.
type eitherValidator struct{ first, second attestation.Validator }

// Variant implements attestation.Validator.
func (v eitherValidator) Variant() attestation.Variant { return v.first.Variant() }

// Validate implements attestation.Validator.
func (v eitherValidator) Validate(ctx context.Context, document, userData []byte) (attestation.Statement, error) {
	s, err := v.first.Validate(ctx, document, userData)
	if errors.Is(err, attestation.ErrMember) {
		return v.second.Validate(ctx, document, userData)
	}
	return s, err
}

// trustRoots returns the certificates in PEM that vouch for machines: the authority of the workspace if it enrolled
// them.
func trustRoots(c *workspace.Config, s *workspace.State) string {
	if s.Enrolled() {
		return s.Infrastructure.Section.Text("authority")
	}
	return c.Attestation.TPM2.TrustRoots
}

// initValidator returns what judges the machine that becomes, or became, the first
// node. Its register 15 is zero, or holds the ID of this very cluster. Its error is
// an *Error about the trust roots.
func initValidator(c *workspace.Config, s *workspace.State) (attestation.Validator, error) {
	judge, _, err := judgeOf(c, s, nil)
	if err != nil {
		return nil, err
	}
	return eitherValidator{judge(attestation.PCR15Zero()), judge(attestation.PCR15ClusterID(s.ClusterValues.ClusterID))}, nil
}

// judgeOf returns what judges control planes of the infrastructure whose register 15 has a value, and their provider. Certificates
// of certifiers take the place of the cloud's API; nil: the API is asked. Its
// error is an *Error about the configuration.
func judgeOf(c *workspace.Config, s *workspace.State, certifiers *x509.CertPool) (func(pcr15 attestation.PCR15) attestation.Validator, providers.Provider, error) {
	roots, err := attestation.ParseRoots([]byte(trustRoots(c, s)))
	if err != nil {
		return nil, providers.Provider{}, &plan.Error{Op: "read attestation.tpm2.trustRoots", Err: err, Remedy: "correct the field in " + workspace.ConfigFile, Exit: plan.ExitUsage}
	}
	from, err := providers.Find(c.Provider.Name)
	if err != nil {
		return nil, providers.Provider{}, &plan.Error{Op: "read provider", Err: err, Remedy: "correct the field in " + workspace.ConfigFile, Exit: plan.ExitUsage}
	}
	from = from.At(s.Infrastructure.Section)
	return func(pcr15 attestation.PCR15) attestation.Validator {
		return from.Attestation.Validator(roots, c.Attestation.TPM2.Measurements, attestation.Options{PCR15: pcr15, UID: s.Infrastructure.UID, Role: cloud.ControlPlane, Certifiers: certifiers})
	}, from, nil
}

// dialError puts an error of dial into the user's words, and reports whether trying
// again may help.
func dialError(endpoint string, a providers.Advice, err error) (e *plan.Error, again bool) {
	e = &plan.Error{Op: "connect to the first machine at " + endpoint, Err: err}
	var record tls.RecordHeaderError
	var alert tls.AlertError
	switch {
	case errors.Is(err, errOther):
		return e, true
	case errors.Is(err, attestation.ErrMeasurement):
		e.Op = "check what the first machine booted"
		e.Remedy = "the machine is not trusted and got no data. If it runs the intended image, copy that image's measurements to attestation.tpm2.measurements in " + workspace.ConfigFile
	case errors.Is(err, attestation.ErrTrust):
		e.Op = "verify the certificate chain of the first machine's TPM"
		e.Remedy = "the machine is not trusted and got no data. attestation.tpm2.trustRoots in " + workspace.ConfigFile + " must hold the root of the cloud that the machine is in"
	case errors.Is(err, attestation.ErrMember):
		e.Op = "check that the first machine is unused"
		e.Remedy = "it belongs to another cluster. Is initEndpoint in " + workspace.StateFile + " right? A used machine must be replaced: " + a.Renew
	case errors.Is(err, attestation.ErrIdentity):
		e.Op = "check the identity of the first machine"
		e.Remedy = "the endpoint is not a control plane of " + a.Cloud + ". Is initEndpoint in " + workspace.StateFile + " right?"
	case errors.Is(err, attestation.ErrDocument):
		e.Op = "read the evidence of the first machine"
		e.Remedy = "nothing was sent to it. Either initEndpoint in " + workspace.StateFile + " is the address of another service, or the machine's image is of a release that this program does not support"
	case errors.Is(err, attestation.ErrQuote):
		e.Op = "check the evidence of the first machine"
		e.Remedy = "it was altered or replayed between this computer and the machine, or the machine is broken. Nothing was sent to it"
	case errors.Is(err, cloud.ErrDenied):
		e.Op = "read the first machine from " + a.Cloud
		e.Remedy = a.Denied
	case errors.Is(err, cloud.ErrUnavailable) || errors.Is(err, cloud.ErrThrottled):
		e.Op = "read the first machine from " + a.Cloud
		return e, true
	case errors.As(err, &record) || errors.As(err, &alert) || strings.Contains(err.Error(), "first record does not look like a TLS handshake") || strings.Contains(err.Error(), "no application protocol"):
		e.Err = fmt.Errorf("the endpoint is not a bootstrapper: %w", err)
		e.Remedy = "initEndpoint in " + workspace.StateFile + " leads to something else: write the address that " + a.Look + " shows"
	case isName(err):
		e.Remedy = "initEndpoint in " + workspace.StateFile + " names a host that does not exist"
	default:
		e.Err = plainCause(err)
		return e, true
	}
	return e, false
}

// plainCause takes addresses and layers out of an error of the network: where to is
// said by the caller, and the rest helps nobody who waits for a machine.
func plainCause(err error) error {
	var op *net.OpError
	switch {
	case errors.As(err, &op) && op.Err != nil:
		var sys *os.SyscallError
		if errors.As(op.Err, &sys) {
			return sys.Err
		}
		return op.Err
	case errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF):
		return errors.New("the connection was closed")
	}
	return err
}

func isName(err error) bool {
	var d *net.DNSError
	return errors.As(err, &d) && d.IsNotFound
}

// callError puts an error of a call to the bootstrapper into the user's words, and
// reports whether attaching again may help.
func callError(a providers.Advice, err error) (e *plan.Error, again bool) {
	s, _ := status.FromError(err)
	e = &plan.Error{Op: "start the first node", Err: errors.New(s.Message())}
	switch s.Code() {
	case codes.Unauthenticated, codes.PermissionDenied:
		e.Remedy = "the init secret in " + workspace.StateFile + " is not the one that the machines were made with: restore the file, or get machines that have another one: " + a.Renew
	case codes.ResourceExhausted, codes.Unavailable, codes.Aborted, codes.DeadlineExceeded:
		return e, true
	case codes.FailedPrecondition, codes.AlreadyExists:
		e.Remedy = "if that cluster is yours, restore its " + workspace.StateFile + " and " + workspace.KubeconfigFile + " back; otherwise get new machines: " + a.Renew
	case codes.Unimplemented:
		e.Err = errors.New("the endpoint is not a bootstrapper of this release")
		e.Remedy = "image and this program are incompatible: take an image of the release that this program belongs to"
	case codes.InvalidArgument:
		e.Remedy = "the machine's bootstrapper rejects the request: use an image of this program's release"
	case codes.Unknown:
		if errors.Is(err, io.EOF) { // the stream ended without a result
			return e, true
		}
	}
	return e, false
}

// backoff gives decorrelated waiting times between least and most.
type backoff struct {
	least, most, last time.Duration
}

// next returns how long to wait now.
func (b *backoff) next() time.Duration {
	b.last = max(b.last, b.least)
	b.last = min(b.most, b.least+rand.N(b.last*3-b.least+1))
	return b.last
}
