package bootstrapper

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc/codes"

	"constellation/bootstrapper/initproto"
	"constellation/engine/attestation"
	"constellation/engine/attestation/certifier/signer"
	"constellation/engine/attestation/keyprocess"
	"constellation/engine/cloud"
	"constellation/engine/kms"
	"constellation/engine/kms/plugin"
	"constellation/engine/kubeadm"
)

// keyIDsFile has the fingerprints of the keys that this machine was given, by process. It survives the loss of the keys, and has no
// secret.
const keyIDsFile = "key-ids.json"

// keyKind is one kind of secret keys.
type keyKind struct {
	process string // that has them, as in initproto.LostKeys
	field   string // of requests
	file    string // with the sealed keys
	store   func(ctx context.Context, dir, tpm string, clusterID, keys []byte) error
	// fingerprint returns an error for malformed keys.
	fingerprint func(keys []byte) (string, error)
	of          func(secretKeys) []byte
}

func keyKinds() []keyKind {
	return []keyKind{
		{
			process: keyprocess.Certifier, field: "certifier_keys", file: signer.SealedFile, store: signer.Store,
			fingerprint: func(b []byte) (string, error) {
				k, err := signer.Parse(b)
				if err != nil {
					return "", err
				}
				return k.Fingerprint(), nil
			},
			of: func(k secretKeys) []byte { return k.certifier },
		},
		{
			process: keyprocess.KeyService, field: "kms_keys", file: kms.SealedFile, store: plugin.Store,
			fingerprint: func(b []byte) (string, error) {
				k, err := kms.Parse(b)
				if err != nil {
					return "", err
				}
				return k.Fingerprint(), nil
			},
			of: func(k secretKeys) []byte { return k.kms },
		},
	}
}

// readKeyIDs returns the fingerprints of the keys that this machine was given. A machine of an earlier release has none.
func (b *bootstrapper) readKeyIDs() (map[string]string, error) {
	out := map[string]string{}
	text, err := b.state.ReadFile(keyIDsFile)
	if errors.Is(err, fs.ErrNotExist) {
		return out, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read fingerprints of keys: %w", err)
	}
	if err := json.Unmarshal(text, &out); err != nil {
		return nil, fmt.Errorf("read fingerprints of keys: %s is damaged: %w", keyIDsFile, err)
	}
	return out, nil
}

func (b *bootstrapper) writeKeyIDs(ids map[string]string) error {
	if len(ids) == 0 {
		return removeAll(b.state, keyIDsFile)
	}
	text, err := json.Marshal(ids)
	if err != nil {
		return err
	}
	return replaceFile(b.state, keyIDsFile, text, 0o600)
}

// lostKeys are keys that this machine had, and cannot read.
type lostKeys struct {
	keyKind
	reason string
	id     string // fingerprint of the keys; "": not recorded
}

// findLost returns the keys that this member was given and cannot read: their file is missing or damaged, or the TPM does not open it.
// A TPM that does not answer is no such reason. Fingerprints that an earlier release did not record are recorded.
func (b *bootstrapper) findLost(ctx context.Context) ([]lostKeys, error) {
	ids, err := b.readKeyIDs()
	if err != nil {
		// Without them, no keys are compared; the owner's proof remains.
		b.m.Log.Warn("fingerprints of keys not read", "err", err)
		ids = map[string]string{}
	}
	var out []lostKeys
	for _, k := range keyKinds() {
		keys, err := keyprocess.Load(ctx, b.m.StateDir, k.file, b.m.TPM)
		id := ""
		if err == nil {
			id, err = k.fingerprint(keys)
			clear(keys)
		}
		lost := lostKeys{keyKind: k, id: ids[k.process]}
		switch {
		case err == nil:
			if ids[k.process] == id {
				continue
			}
			ids[k.process] = id
			if err := b.writeKeyIDs(ids); err != nil {
				return nil, err
			}
			continue
		case errors.Is(err, fs.ErrNotExist):
			if lost.id == "" && (k.process != keyprocess.KeyService || !b.configured()) {
				continue // it never had any
			}
			lost.reason = k.file + " is missing"
			if mode, err := encryption(b.m.Root); err == nil && mode == kubeadm.AwaitKeys && k.process == keyprocess.KeyService {
				b.m.Log.Info("waiting for the first keys of the key service", "fingerprint", lost.id)
				lost.reason = "the cluster is about to encrypt Secrets"
				out = append(out, lost)
				continue
			}
		case errors.Is(err, attestation.ErrSealed), !errors.Is(err, attestation.ErrTPM):
			lost.reason = err.Error()
			if cause := errors.Unwrap(err); cause != nil {
				lost.reason = cause.Error() // without the remedy
			}
		default:
			b.m.Log.Warn("keys not checked", "process", k.process, "err", err)
			continue
		}
		b.m.Log.Error("keys of this control plane are lost", "process", k.process, "reason", lost.reason, "fingerprint", lost.id)
		out = append(out, lost)
	}
	return out, nil
}

// configured reports whether the API server of this machine was configured to encrypt.
func (b *bootstrapper) configured() bool {
	mode, err := encryption(b.m.Root)
	return err == nil && mode != ""
}

// awaitFirstKeys waits for the keys of the key service, if this machine joined without them: its cluster is about to encrypt Secrets.
func (b *bootstrapper) awaitFirstKeys(ctx context.Context) error {
	mode, err := encryption(b.m.Root)
	if err != nil || mode != kubeadm.AwaitKeys {
		return err
	}
	lost, err := b.findLost(ctx)
	if err != nil {
		return err
	}
	if lost, err = b.recoverable(ctx, lost); err != nil || len(lost) == 0 {
		return err
	}
	return b.serve(ctx, nil, lost)
}

func isLost(lost []lostKeys, process string) bool {
	return slices.ContainsFunc(lost, func(l lostKeys) bool { return l.process == process })
}

// recoverable returns lost if this machine may get keys: a worker never does.
func (b *bootstrapper) recoverable(ctx context.Context, lost []lostKeys) ([]lostKeys, error) {
	if len(lost) == 0 {
		return nil, nil
	}
	self, err := b.self(ctx)
	if err != nil {
		return nil, err
	}
	if self.Role != cloud.ControlPlane {
		b.m.Log.Warn("keys not awaited", "role", string(self.Role))
		return nil, nil
	}
	return lost, nil
}

// Recovery implements the contract of package initproto.
func (s *initServer) Recovery(ctx context.Context, req *initproto.RecoveryRequest) (*initproto.RecoveryResponse, error) {
	err := s.authorize(ctx, req.GetInitSecret())
	out := &initproto.RecoveryResponse{}
	if err == nil {
		s.mu.Lock()
		defer s.mu.Unlock()
		h, held := s.b.lock.holder()
		if !held || h.State != member {
			err = errNoMember
		}
		out.NodeName = h.Node
		for _, l := range s.lost {
			out.Lost = append(out.Lost, &initproto.LostKeys{Process: l.process, Reason: l.reason, Fingerprint: l.id})
		}
	}
	if err != nil {
		s.refused(ctx, err)
		return nil, answer(err)
	}
	return out, nil
}

// Recover implements the contract of package initproto.
func (s *initServer) Recover(ctx context.Context, req *initproto.RecoverRequest) (*initproto.RecoverResponse, error) {
	err := s.authorize(ctx, req.GetInitSecret())
	out := &initproto.RecoverResponse{}
	if err == nil {
		out.Stored, err = s.recoverKeys(ctx, req)
	}
	if err != nil {
		s.refused(ctx, err)
		return nil, answer(err)
	}
	if err := s.b.awaitKeyService(ctx); err != nil {
		return nil, later(codes.Unavailable, "the keys are stored: "+err.Error(), time.Second)
	}
	return out, nil
}

// recoverKeys stores the keys that this machine waits for. All are checked before one is stored.
func (s *initServer) recoverKeys(ctx context.Context, req *initproto.RecoverRequest) (stored []string, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch h, held := s.b.lock.holder(); {
	case !held || h.State != member:
		return nil, errNoMember
	case !bytes.Equal(h.clusterID(), req.GetClusterId()):
		return nil, errOtherCluster
	}
	sent := secretKeys{req.GetCertifierKeys(), req.GetKmsKeys()}
	defer clear(sent.certifier)
	defer clear(sent.kms)
	ids, err := s.b.readKeyIDs()
	if err != nil {
		ids = map[string]string{}
	}
	for _, l := range s.lost {
		keys := l.of(sent)
		if len(keys) == 0 {
			return nil, &fieldError{l.field, "this machine waits for them, and the request has none"}
		}
		id, err := l.fingerprint(keys)
		if err != nil {
			return nil, &fieldError{l.field, err.Error()}
		}
		if l.id != "" && id != l.id {
			return nil, fmt.Errorf("%w: the fingerprint of the keys of the %s is %s, want %s", errOtherKeys, l.process, id, l.id)
		}
		ids[l.process] = id
	}
	for _, l := range s.lost {
		if err := l.store(ctx, s.b.m.StateDir, s.b.m.TPM, req.GetClusterId(), l.of(sent)); err != nil {
			return nil, err
		}
		stored = append(stored, l.process)
	}
	if len(stored) == 0 {
		return nil, nil
	}
	if err := s.b.writeKeyIDs(ids); err != nil {
		return nil, err
	}
	s.lost = nil
	s.b.m.Log.Info("keys recovered", "processes", strings.Join(stored, ", "), "peer", source(ctx))
	return stored, nil
}

// awaitKeys closes s.recovered when this machine has all its keys, and its key service answers.
func (s *initServer) awaitKeys(ctx context.Context) {
	tick := time.NewTicker(s.b.pollKeys())
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if s.hasKeys(ctx) {
			close(s.recovered)
			return
		}
	}
}

// hasKeys reports whether nothing is lost any more. Somebody could have brought the file back.
func (s *initServer) hasKeys(ctx context.Context) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if isLost(s.lost, keyprocess.Certifier) {
		return false
	}
	encrypts, err := s.b.encrypts()
	if err != nil || !encrypts && len(s.lost) > 0 {
		return false
	}
	if encrypts {
		if _, err := (kms.Client{Socket: s.b.m.KeysSocket}).Ready(ctx); err != nil {
			return false
		}
	}
	s.lost = nil
	return true
}

// pollKeys is the poll interval for the key service of a machine that waits for keys.
func (b *bootstrapper) pollKeys() time.Duration {
	if b.m.hurry > 0 {
		return b.m.hurry
	}
	return time.Second
}
