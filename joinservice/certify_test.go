package joinservice

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"constellation/engine/atls"
	"constellation/engine/attestation"
	"constellation/engine/attestation/certifier"
	"constellation/engine/attestation/certifier/signer"
	"constellation/engine/attestation/keyprocess"
	"constellation/engine/cloud"
	"constellation/engine/cloud/gcp/attest"
	"constellation/engine/cloud/gcp/attest/attesttest/lab"
	"constellation/engine/cloud/gcp/gcptest"
	"constellation/internal/syncbuffer"
	"constellation/joinservice/joinproto"
)

// certifiedProject is a project whose control plane has a certifier.
type certifiedProject struct {
	*project
	t     *testing.T
	owner *signer.Owner
	keys  []byte
	dir   string
	log   *syncbuffer.Buffer
	stop  func() // ends the certifier
}

func newCertifiedProject(t *testing.T) *certifiedProject {
	t.Helper()
	c := &certifiedProject{project: prepareProject(t), t: t, dir: t.TempDir(), log: &syncbuffer.Buffer{}}
	var err error
	if c.owner, err = signer.NewOwner(bytes.Repeat([]byte{5}, signer.SecretSize)); err != nil {
		t.Fatal(err)
	}
	k, err := c.owner.Keys(1)
	if err == nil {
		c.keys, err = k.Encode()
	}
	if err == nil {
		err = signer.Store(t.Context(), c.dir, c.service.TPM, clusterID, c.keys)
	}
	if err != nil {
		t.Fatal(err)
	}
	c.certifier = filepath.Join(c.dir, "certifier.sock")
	c.serve()
	t.Cleanup(c.scan)
	c.r = c.run(c.service.Issuer(), "127.0.0.1:0")
	return c
}

// serve runs the certifier.
func (c *certifiedProject) serve() {
	c.t.Helper()
	s, err := signer.Open(c.t.Context(), signer.Config{Dir: c.dir, TPM: c.service.TPM, ClusterID: clusterID, Log: slog.New(slog.NewJSONHandler(c.log, nil))})
	if err != nil {
		c.t.Fatal(err)
	}
	l, err := keyprocess.Listen(c.t.Context(), c.certifier, nil)
	if err != nil {
		c.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Serve(ctx, l) }()
	c.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			c.t.Errorf("the certifier ended: %v", err)
		}
	})
	c.t.Cleanup(c.stop)
}

// scan fails the test if the secret key is in a log, or in a file of the certifier.
func (c *certifiedProject) scan() {
	_, after, _ := bytes.Cut(c.keys, []byte(`"key":"`))
	inBase64, _, ok := bytes.Cut(after, []byte(`"`))
	raw, err := base64.StdEncoding.DecodeString(string(inBase64))
	if err != nil || !ok {
		c.t.Errorf("the keys have another form: %v", err)
		return
	}
	look := func(where string, b []byte) {
		for _, canary := range [][]byte{raw, inBase64, []byte(hex.EncodeToString(raw)), []byte(base64.StdEncoding.EncodeToString(c.keys)[:60])} {
			if bytes.Contains(b, canary) {
				c.t.Errorf("%s has the key", where)
			}
		}
	}
	look("the log of the certifier", []byte(c.log.String()))
	if c.r != nil {
		look("the log of the join service", []byte(c.r.log.String()))
	}
	err = filepath.WalkDir(c.dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		b, err := os.ReadFile(path)
		look(path, b)
		return err
	})
	if err != nil {
		c.t.Error(err)
	}
}

// connect connects as the machine v with the evidence of an issuer.
func (c *certifiedProject) connect(issuer attestation.Issuer) joinproto.JoinServiceClient {
	c.t.Helper()
	known := attest.Method(attest.Config{Cluster: func(context.Context) (attest.Cluster, error) {
		return attest.Cluster{Project: gcptest.Project, UID: gcptest.UID, Instances: knows{c.service.Instance()}}, nil
	}})
	trusting := known.Validator(c.p.Roots(), lab.Measurements(), attestation.Options{PCR15: attestation.PCR15Member(), Role: cloud.ControlPlane, UID: gcptest.UID})
	conn, err := grpc.NewClient("passthrough:///"+c.r.addr, grpc.WithTransportCredentials(atls.NewClient(atls.Config{
		Purpose: atls.PurposeJoin, Issuer: issuer, Validator: func() attestation.Validator { return trusting },
	})))
	if err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(func() { conn.Close() })
	return joinproto.NewJoinServiceClient(conn)
}

// certify has the join service certify the key of asker, on a connection with the evidence of issuer.
func (c *certifiedProject) certify(issuer attestation.Issuer, asker *attestation.VendorIssuer) ([]byte, error) {
	c.t.Helper()
	stream, err := c.connect(issuer).Certify(c.t.Context())
	if err != nil {
		return nil, err
	}
	request, err := asker.RequestCertificate(c.t.Context())
	if err != nil {
		return nil, err
	}
	if err := stream.Send(&joinproto.CertifyRequest{Request: request}); err != nil {
		_, err = stream.Recv()
		return nil, err
	}
	m, err := stream.Recv()
	if err != nil {
		return nil, err
	}
	answer, err := asker.AnswerChallenge(c.t.Context(), m.GetChallenge())
	if err != nil {
		return nil, err
	}
	if err := stream.Send(&joinproto.CertifyRequest{Answer: answer}); err != nil {
		_, err = stream.Recv()
		return nil, err
	}
	if m, err = stream.Recv(); err != nil {
		return nil, err
	}
	return m.GetCertificate(), nil
}

func vendorIssuer(v *lab.VM) *attestation.VendorIssuer { return v.Issuer().(*attestation.VendorIssuer) }

// TestCertifierAtGoogle goes from the evidence of a machine at Google to a certificate, and uses it where the API refuses to answer.
func TestCertifierAtGoogle(t *testing.T) {
	t.Parallel()
	c := newCertifiedProject(t)
	eventually(t, "the join service certified its own machine", func() (string, bool) {
		return c.r.log.String(), strings.Contains(c.r.log.String(), "certificate of this machine renewed")
	})
	eventually(t, "the authorities are used", func() (string, bool) {
		return c.r.log.String(), strings.Count(c.r.log.String(), "join-config loaded") >= 2
	})

	t.Run("a control plane gets the keys, a worker does not", func(t *testing.T) {
		v := c.p.Start(c.controlPlanes, nil)
		got, err := c.joins(t, c.r.addr, v, v.Issuer())
		if err != nil || !bytes.Equal(got.GetCertifierKeys(), c.keys) || !strings.Contains(c.log.String(), "certifier keys handed over") {
			t.Errorf("a control plane: %d bytes, %v\n%s", len(got.GetCertifierKeys()), err, c.log)
		}
		if err := c.r.turn.release(t.Context(), v.Certified.Name); err != nil {
			t.Error(err)
		}
		v = c.p.Start(c.workers, nil)
		got, err = c.joins(t, c.r.addr, v, v.Issuer())
		if err != nil || len(got.GetCertifierKeys()) > 0 {
			t.Errorf("a worker: %d bytes, %v", len(got.GetCertifierKeys()), err)
		}
	})
	t.Run("a worker joins by its certificate", func(t *testing.T) {
		v := c.p.Start(c.workers, nil)
		issuer := vendorIssuer(v)
		der, err := c.certify(issuer, issuer)
		if err != nil {
			t.Fatalf("%v\n%s", err, c.r.log)
		}
		c.p.Revoke("compute.instances.get")
		defer c.p.Grant("compute.instances.get")
		if _, err := c.joins(t, c.r.addr, v, issuer); err == nil {
			t.Error("without the certificate it got a ticket, although the API does not answer")
		}
		if err := issuer.UseCertificate(der); err != nil {
			t.Fatal(err)
		}
		got, err := c.joins(t, c.r.addr, v, issuer)
		if err != nil || got.GetToken() == "" || len(got.GetControlPlaneFiles())+len(got.GetCertifierKeys()) > 0 {
			t.Errorf("with the certificate: %v\n%s", err, c.r.log)
		}
		// The vendor must confirm it each time.
		if _, err := c.certify(issuer, issuer); status.Code(err) != codes.FailedPrecondition {
			t.Errorf("a certificate was renewed by a certificate: %v", err)
		}
	})
	t.Run("the owner verifies the control plane without the API", func(t *testing.T) {
		c.p.Revoke("compute.instances.get")
		defer c.p.Grant("compute.instances.get")
		inspect := func(o *signer.Owner) (attestation.Statement, error) {
			k, err := o.Keys(1)
			if err != nil {
				t.Fatal(err)
			}
			roots, err := attestation.ParseRoots(k.Authorities(time.Now()))
			if err != nil {
				t.Fatal(err)
			}
			v := c.service.Method().Validator(c.p.Roots(), lab.Measurements(), attestation.Options{
				PCR15: attestation.PCR15ClusterID(clusterID), UID: gcptest.UID, Role: cloud.ControlPlane, Certifiers: roots,
			})
			conn, err := net.Dial("tcp", c.r.addr)
			if err != nil {
				t.Fatal(err)
			}
			return atls.Inspect(t.Context(), atls.PurposeJoin, v, conn)
		}
		if st, err := inspect(c.owner); err != nil || !st.Certified || st.Identity != c.service.Identity() {
			t.Errorf("got %+v, %v", st, err)
		}
		stranger, err := signer.NewOwner(bytes.Repeat([]byte{6}, signer.SecretSize))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := inspect(stranger); !errors.Is(err, cloud.ErrDenied) {
			t.Errorf("the owner of another cluster: %v", err)
		}
	})
	t.Run("a deleted machine keeps its certificate", func(t *testing.T) {
		v := c.p.Start(c.workers, nil)
		issuer := vendorIssuer(v)
		der, err := c.certify(issuer, issuer)
		if err == nil {
			err = issuer.UseCertificate(der)
		}
		if err != nil {
			t.Fatal(err)
		}
		c.p.Kill(v.Certified.Name) // its group makes another one of that name
		eventually(t, "the machine is made again", func() (string, bool) {
			i, err := v.View.Self(t.Context())
			return i.Incarnation, err == nil && i.Key() != v.Key
		})
		got, err := c.joins(t, c.r.addr, v, issuer)
		c.wantRefused(t, got, err, "with the incarnation")
	})
	for _, tt := range []struct {
		name          string
		issuer, asker func() attestation.Issuer
		code          codes.Code
		logged        string
	}{
		{
			name: "a request for the key of another machine", code: codes.InvalidArgument, logged: "the request is for the key",
			issuer: func() attestation.Issuer { return c.p.Start(c.workers, nil).Issuer() }, asker: func() attestation.Issuer { return c.p.Start(c.controlPlanes, nil).Issuer() },
		},
		{
			name: "a machine of another cluster", code: codes.Unavailable, logged: "the cluster has no machine",
			issuer: func() attestation.Issuer {
				return c.p.Start(c.p.Group("others", cloud.Worker, "another-cluster"), nil).Issuer()
			},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			issuer := tt.issuer()
			asker := issuer
			if tt.asker != nil {
				asker = tt.asker()
			}
			_, err := c.certify(issuer, asker.(*attestation.VendorIssuer))
			if status.Code(err) != tt.code {
				t.Errorf("got %v, want %v", err, tt.code)
			}
			eventually(t, "the reason is logged", func() (string, bool) { return c.r.log.String(), strings.Contains(c.r.log.String(), tt.logged) })
		})
	}
	t.Run("too few messages", func(t *testing.T) {
		stream, err := c.connect(c.p.Start(c.workers, nil).Issuer()).Certify(t.Context())
		if err == nil {
			err = stream.CloseSend()
		}
		if err != nil {
			t.Fatal(err)
		}
		if _, err := stream.Recv(); status.Code(err) != codes.InvalidArgument {
			t.Errorf("got %v", err)
		}
	})
	t.Run("the owner rotates the keys", func(t *testing.T) {
		v := c.p.Start(c.workers, nil)
		issuer := vendorIssuer(v)
		der, err := c.certify(issuer, issuer)
		if err == nil {
			err = issuer.UseCertificate(der)
		}
		if err != nil {
			t.Fatal(err)
		}
		forged, err := func() ([]byte, error) {
			o, err := signer.NewOwner(bytes.Repeat([]byte{6}, signer.SecretSize))
			if err != nil {
				return nil, err
			}
			return o.Rotation(1, false)
		}()
		if err != nil {
			t.Fatal(err)
		}
		c.rotation = string(forged)
		c.rawJoinConfig(vendorDemand(t), nil)
		eventually(t, "a rotation of somebody else is refused", func() (string, bool) {
			return c.r.log.String(), strings.Contains(c.r.log.String(), "the owner did not sign it")
		})
		rotation, err := c.owner.Rotation(1, false)
		if err != nil {
			t.Fatal(err)
		}
		c.rotation = string(rotation)
		c.rawJoinConfig(vendorDemand(t), nil)
		loaded, renewed := strings.Count(c.r.log.String(), "join-config loaded"), strings.Count(c.r.log.String(), "certificate of this machine renewed")
		eventually(t, "the rotation is used", func() (string, bool) {
			return c.r.log.String(), strings.Contains(c.r.log.String(), "rotation passed to the certifier") && strings.Count(c.r.log.String(), "join-config loaded") > loaded
		})
		eventually(t, "this machine gets a certificate by the next keys", func() (string, bool) {
			return c.r.log.String(), strings.Count(c.r.log.String(), "certificate of this machine renewed") > renewed
		})
		if _, g, err := (certifier.Client{Socket: c.certifier}).Authorities(t.Context()); err != nil || g != 2 {
			t.Errorf("generation %d, %v", g, err)
		}
		c.p.Revoke("compute.instances.get")
		defer c.p.Grant("compute.instances.get")
		if _, err := c.joins(t, c.r.addr, v, issuer); err != nil {
			t.Errorf("with a certificate of the former keys: %v", err)
		}
	})
	t.Run("the certifier does not answer", func(t *testing.T) {
		c.stop()
		v := c.p.Start(c.controlPlanes, nil)
		got, err := c.joins(t, c.r.addr, v, v.Issuer())
		if got != nil || status.Code(err) != codes.Unavailable || !strings.Contains(c.r.log.String(), errCertifier.Error()) {
			t.Errorf("a control plane without the keys: %v", err)
		}
		w := c.p.Start(c.workers, nil)
		if _, err := c.joins(t, c.r.addr, w, w.Issuer()); err != nil {
			t.Errorf("a worker: %v", err)
		}
		if _, err := c.certify(w.Issuer(), vendorIssuer(w)); status.Code(err) != codes.Unavailable {
			t.Errorf("a certificate: %v", err)
		}
		c.serve()
		if got, err = c.joins(t, c.r.addr, v, v.Issuer()); err != nil || len(got.GetCertifierKeys()) == 0 {
			t.Errorf("after its restart: %v", err)
		}
	})
}

// TestNoCertifier has a cluster without one.
func TestNoCertifier(t *testing.T) {
	t.Parallel()
	g := newProject(t)
	c := &certifiedProject{project: g, t: t}
	v := g.p.Start(g.workers, nil)
	if _, err := c.certify(v.Issuer(), vendorIssuer(v)); status.Code(err) != codes.Unimplemented {
		t.Errorf("got %v", err)
	}
}
