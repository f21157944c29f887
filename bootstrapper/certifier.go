package bootstrapper

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"constellation/engine/attestation/certifier/signer"
	"constellation/joinservice/joinproto"
)

// certifyTimeout bounds the request for a certificate, which the join waits for.
const certifyTimeout = 10 * time.Second

// certified is an issuer that adds a certificate of the cluster's certifier to evidence.
type certified interface {
	RequestCertificate(context.Context) ([]byte, error)
	AnswerChallenge(ctx context.Context, challenge []byte) ([]byte, error)
	UseCertificate(der []byte) error
}

// certify gets a certificate from a join service, if its cluster has a certifier. With it, later connections of this boot do not need
// the API of the cloud. The join does not depend on it.
func (c *JoinClient) certify(ctx context.Context, conn *serviceConn) {
	issuer, ok := c.Issuer.(certified)
	if !ok {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, certifyTimeout)
	defer cancel()
	err := requestCertificate(ctx, issuer, conn)
	switch {
	case err == nil:
		c.Log.Info("certificate of this machine received")
	case status.Code(err) == codes.Unimplemented: // no certifier, or a join service of an earlier release
	default:
		c.Log.Warn("certificate of this machine not received", "err", err)
	}
}

// requestCertificate has issuer use a certificate of the certifier behind conn.
func requestCertificate(ctx context.Context, issuer certified, conn grpc.ClientConnInterface) error {
	stream, err := joinproto.NewJoinServiceClient(conn).Certify(ctx)
	if err != nil {
		return err
	}
	request, err := issuer.RequestCertificate(ctx)
	if err != nil {
		return err
	}
	challenge, err := exchange(stream, &joinproto.CertifyRequest{Request: request})
	if err != nil {
		return err
	}
	answer, err := issuer.AnswerChallenge(ctx, challenge.GetChallenge())
	if err != nil {
		return err
	}
	last, err := exchange(stream, &joinproto.CertifyRequest{Answer: answer})
	if err != nil {
		return err
	}
	return issuer.UseCertificate(last.GetCertificate())
}

// exchange sends a message and returns the next one of the other side.
func exchange(stream joinproto.JoinService_CertifyClient, m *joinproto.CertifyRequest) (*joinproto.CertifyResponse, error) {
	if err := stream.Send(m); err != nil && !errors.Is(err, io.EOF) { // Recv has the reason of an end
		return nil, err
	}
	return stream.Recv()
}

// storeKeys seals the keys of the certifier for the process of RunCertifier. It does nothing without any.
func (b *bootstrapper) storeKeys(ctx context.Context, clusterID, keys []byte) error {
	if len(keys) == 0 {
		return nil
	}
	return signer.Store(ctx, b.m.StateDir, b.m.TPM, clusterID, keys)
}

// RunCertifier serves the join service of this machine at a socket until ctx ends, with the keys that an init or a ticket brought. It
// is for a process of its own, which needs no network. m needs StateDir, TPM and Log alone.
func RunCertifier(ctx context.Context, m Machine, socket string) error {
	// A core dump, or a debugger of another process, would have the keys.
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return fmt.Errorf("protect memory: %w", err)
	}
	state, err := os.OpenRoot(m.StateDir)
	if err != nil {
		return fmt.Errorf("open state directory: %w", err)
	}
	h, err := readHolder(state)
	if err = errors.Join(err, state.Close()); err != nil {
		return err
	}
	if h == nil {
		return errors.New("this machine belongs to no cluster")
	}
	s, err := signer.Open(ctx, signer.Config{Dir: m.StateDir, TPM: m.TPM, ClusterID: h.clusterID(), Log: m.Log})
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(socket), 0o700); err != nil {
		return fmt.Errorf("create directory: %w", err)
	}
	l, err := signer.Listen(ctx, socket)
	if err != nil {
		return err
	}
	if m.Ready != nil {
		m.Ready()
	}
	return s.Serve(ctx, l)
}
