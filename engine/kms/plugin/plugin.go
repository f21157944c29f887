//go:build linux

// Package plugin is the key service of a control plane: the process that encrypts for the API server of its machine as a KMS v2
// plugin of Kubernetes. Package kms has its keys.
//
// A [Server] serves two unix sockets that root alone can open, and uses no network. At one of them the API server has its keys encrypted
// and decrypted, and gets no key of this process. At the other one the join service gets the keys for a new control plane. A program
// that may open the first one, and has the content of etcd, can decrypt the Secrets of the cluster.
package plugin

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	kmsapi "k8s.io/kms/apis/v2"

	"constellation/engine/attestation/keyprocess"
	"constellation/engine/cloud"
	"constellation/engine/kms"
)

// Config configures a Server.
type Config struct {
	// Dir has kms.SealedFile. Only root has access.
	Dir string
	// TPM is the address of the machine's TPM, see attestation.OpenTPM.
	TPM string
	// ClusterID is that of the cluster, to seal keys of a greater generation.
	ClusterID []byte
	// SetEncryption has the API server of this machine store Secrets in a mode, and reports whether that is a change. Nil: it cannot.
	SetEncryption func(mode string) (changed bool, err error)
	// Log gets each hand-over, each raise, and refusals. Nil: none.
	Log *slog.Logger

	now func() time.Time
}

// raiseEvery is the least time between two raises of the generation. With kms.MaxRaise it bounds how fast a forged number in the
// cluster uses generations up.
const raiseEvery = 30 * time.Second

// Server is a key service. Create it with Open.
type Server struct {
	kmsapi.UnimplementedKeyManagementServiceServer
	c      Config
	log    *slog.Logger
	keys   atomic.Pointer[kms.Keys]
	seldom rate.Sometimes // failures are logged once a second: an API server repeats them

	raising sync.Mutex // held while keys are replaced
	raised  time.Time

	polled, used atomic.Uint32 // generations, see use
}

// Store seals keys, as kms.Keys.Encode returns them, for the Server of a directory on a machine that is, or becomes, a member of the
// cluster.
func Store(ctx context.Context, dir, tpm string, clusterID, keys []byte) error {
	if _, err := kms.Parse(keys); err != nil {
		return err
	}
	return keyprocess.Store(ctx, dir, kms.SealedFile, tpm, clusterID, keys)
}

// Open returns a Server with the unsealed keys of its directory. The error wraps attestation.ErrSealed if this machine, as it
// booted, cannot read them, and fs.ErrNotExist without any.
func Open(ctx context.Context, c Config) (*Server, error) {
	b, err := keyprocess.Load(ctx, c.Dir, kms.SealedFile, c.TPM)
	if err != nil {
		return nil, fmt.Errorf("open key service: %w", err)
	}
	defer clear(b)
	keys, err := kms.Parse(b)
	if err != nil {
		return nil, err
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	if c.now == nil {
		c.now = time.Now
	}
	s := &Server{c: c, log: c.Log, seldom: rate.Sometimes{Interval: time.Second}}
	s.keys.Store(keys)
	return s, nil
}

// Serve serves the API server and the join service, at listeners of keyprocess.Listen, until ctx ends. It closes both.
func (s *Server) Serve(ctx context.Context, apiServer, joinService net.Listener) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	g := grpc.NewServer(grpc.MaxRecvMsgSize(64 << 10))
	kmsapi.RegisterKeyManagementServiceServer(g, s)
	stop := context.AfterFunc(ctx, g.Stop)
	defer stop()
	s.log.Info("key service started", "key", s.keys.Load().ID())
	ended := make(chan error, 2)
	go func() {
		err := g.Serve(apiServer)
		if ctx.Err() != nil {
			err = nil
		}
		ended <- err
	}()
	go func() { ended <- keyprocess.Serve(ctx, joinService, s.log, s.answer) }()
	err := <-ended
	cancel()
	return errors.Join(err, <-ended)
}

// Status implements KMS v2.
func (s *Server) Status(context.Context, *kmsapi.StatusRequest) (*kmsapi.StatusResponse, error) {
	keys := s.keys.Load()
	if g := keys.Generation(); s.polled.Swap(g) == g {
		s.use(g)
	}
	return &kmsapi.StatusResponse{Version: "v2", Healthz: "ok", KeyId: keys.ID()}, nil
}

// use notes that the API server encrypts with a generation. An API server that sees a new key in an answer to Status has a seed encrypted
// with it before it asks again. After a restart of this process alone it has none encrypted, so a second answer counts, too.
func (s *Server) use(generation uint32) {
	for old := s.used.Load(); generation > old && !s.used.CompareAndSwap(old, generation); old = s.used.Load() {
	}
}

// Encrypt implements KMS v2.
func (s *Server) Encrypt(_ context.Context, r *kmsapi.EncryptRequest) (*kmsapi.EncryptResponse, error) {
	keys := s.keys.Load()
	c, id, err := keys.Encrypt(r.GetPlaintext())
	if err != nil {
		return nil, s.refuse("encryption refused", r.GetUid(), err)
	}
	s.use(keys.Generation())
	return &kmsapi.EncryptResponse{Ciphertext: c, KeyId: id}, nil
}

// Decrypt implements KMS v2.
func (s *Server) Decrypt(_ context.Context, r *kmsapi.DecryptRequest) (*kmsapi.DecryptResponse, error) {
	plain, err := s.keys.Load().Decrypt(r.GetCiphertext(), r.GetKeyId())
	if err != nil {
		return nil, s.refuse("decryption refused", r.GetUid(), err)
	}
	return &kmsapi.DecryptResponse{Plaintext: plain}, nil
}

// refuse logs a refusal, and returns the error for the API server. uid is that of the request in the API server's log.
func (s *Server) refuse(text, uid string, err error) error {
	s.seldom.Do(func() { s.log.Warn("request of the API server refused", "request", text, "uid", uid, "err", err) })
	return status.Error(codes.InvalidArgument, err.Error())
}

// answer serves the join service.
func (s *Server) answer(ctx context.Context, m keyprocess.Message, log *slog.Logger) (keyprocess.Message, error) {
	switch m.Op {
	case keyprocess.Generation:
		return keyprocess.Message{Generation: s.keys.Load().Generation()}, nil
	case keyprocess.Used:
		return keyprocess.Message{Generation: s.used.Load()}, nil
	case keyprocess.HandOver:
		if m.Machine == nil || m.Machine.Role != cloud.ControlPlane {
			return keyprocess.Message{}, errors.New("only control planes get the keys of the key service")
		}
		keys := s.keys.Load()
		b, err := keys.Encode()
		if err != nil {
			return keyprocess.Message{}, err
		}
		log.Info("keys of the key service handed over", "node", m.Machine.Name, "provider_id", m.Machine.ProviderID, "key", keys.ID())
		return keyprocess.Message{Keys: b}, nil
	case keyprocess.Raise:
		return s.raise(ctx, m.Generation, log)
	case keyprocess.Encryption:
		if s.c.SetEncryption == nil {
			return keyprocess.Message{}, errors.New("this machine has one mode of encryption")
		}
		changed, err := s.c.SetEncryption(m.Encryption)
		if changed && err == nil {
			log.Info("mode of the encryption of Secrets set", "mode", m.Encryption)
		}
		return keyprocess.Message{}, err
	}
	return keyprocess.Message{}, fmt.Errorf("operation %.20q is not known", m.Op)
}

// raise has the keys of a greater generation encrypt. They are on disk before the first use, so that a restart does not go back.
func (s *Server) raise(ctx context.Context, generation uint32, log *slog.Logger) (keyprocess.Message, error) {
	s.raising.Lock()
	defer s.raising.Unlock()
	old := s.keys.Load()
	if generation <= old.Generation() {
		return keyprocess.Message{Generation: old.Generation()}, nil
	}
	next, err := old.Raised(generation)
	if err != nil {
		return keyprocess.Message{}, err
	}
	if wait := raiseEvery - s.c.now().Sub(s.raised); !s.raised.IsZero() && wait > 0 {
		return keyprocess.Message{}, fmt.Errorf("the generation was raised to %d less than %s ago; try again in %s", old.Generation(), raiseEvery, wait.Round(time.Second))
	}
	b, err := next.Encode()
	if err != nil {
		return keyprocess.Message{}, err
	}
	defer clear(b)
	if err := Store(ctx, s.c.Dir, s.c.TPM, s.c.ClusterID, b); err != nil {
		return keyprocess.Message{}, err
	}
	s.keys.Store(next)
	s.raised = s.c.now()
	log.Info("generation of the key service raised", "from", old.Generation(), "key", next.ID())
	return keyprocess.Message{Generation: next.Generation()}, nil
}
