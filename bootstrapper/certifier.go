package bootstrapper

import (
	"context"
	"errors"
	"io"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

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
