package joinservice

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"constellation/engine/attestation"
	"constellation/engine/kms"
	"constellation/engine/kubeadm"
	"constellation/joinservice/joinproto"
)

// kmsPoll is the poll interval for a generation in join-config that the key service of this machine does not use yet.
const kmsPoll = 5 * time.Second

// keyKMSGeneration is the key of join-config with the generation of the key that encrypts Secrets, after a first rotation. It is no secret:
// control planes derive the keys of all generations.
const keyKMSGeneration = "kmsGeneration"

const (
	// keyKMSFingerprint is the key of join-config of a cluster that is older than its encryption of Secrets: the fingerprint of the keys of its
	// key services. A control plane without keys waits for them after it joined.
	keyKMSFingerprint = "kmsFingerprint"
	// keyKMSMode is the key of join-config with the mode in which API servers store Secrets, a [kubeadm.Encryption]. Only with
	// keyKMSFingerprint.
	keyKMSMode = "kmsMode"
)

// addKMS adds to the ticket of a control plane what it needs to encrypt Secrets.
func (s *Server) addKMS(ctx context.Context, t *joinproto.IssueJoinTicketResponse, to attestation.Identity) error {
	config := s.kube.config()
	fingerprint, mode := config[keyKMSFingerprint], kubeadm.Encryption(config[keyKMSMode])
	keys, err := s.kms.HandOver(ctx, to)
	if err != nil && (fingerprint == "" || mode != kubeadm.Decrypt) {
		return fmt.Errorf("%w: %w", errKeyService, err)
	}
	t.KmsKeys, t.KmsFingerprint = keys, fingerprint
	if fingerprint != "" {
		t.KmsMode = string(mode)
	}
	if err != nil { // this machine is as old as the cluster, or has no keys yet
		s.log.Info("ticket without keys of the key service", "node", to.Name, "fingerprint", fingerprint, "err", err)
	}
	return nil
}

// setMode has the API server of this machine store Secrets in the mode of join-config, unless it is known, the mode that was set last.
func (s *Server) setMode(ctx context.Context, known string) (now string, err error) {
	mode := s.kube.config()[keyKMSMode]
	if mode == "" || mode == known {
		return known, nil
	}
	if err := s.kms.SetEncryption(ctx, mode); err != nil {
		return known, fmt.Errorf("use %s %.20q of join-config: %w", keyKMSMode, mode, err)
	}
	s.log.Info("mode of encryption passed to the key service", "mode", mode)
	return mode, nil
}

// raise has the key service use the generation of join-config, if it is greater than known, which the key service uses. The key service
// goes a limited way at once, so a forged number uses few generations up.
func (s *Server) raise(ctx context.Context, known uint32) (now uint32, err error) {
	text := s.kube.config()[keyKMSGeneration]
	if text == "" {
		return known, nil
	}
	n, err := strconv.ParseUint(text, 10, 32)
	if err != nil {
		return known, fmt.Errorf("read %s of join-config: %.40q is no number", keyKMSGeneration, text)
	}
	wanted := uint32(n)
	if wanted <= known {
		return known, nil
	}
	if known, err = s.kms.Ready(ctx); err != nil || wanted <= known {
		return known, err
	}
	if now, err = s.kms.Raise(ctx, min(wanted, known+kms.MaxRaise)); err != nil {
		return known, fmt.Errorf("use %s %d of join-config: %w", keyKMSGeneration, wanted, err)
	}
	s.log.Info("generation passed to the key service", "from", known, "generation", now, "wanted", wanted)
	return now, nil
}

// runKeyService polls join-config for a greater generation, and for another mode, until ctx ends.
func (s *Server) runKeyService(ctx context.Context, ready <-chan struct{}) {
	if s.kms == nil {
		return
	}
	select {
	case <-ctx.Done():
		return
	case <-ready:
	}
	tick := time.NewTicker(s.kmsEvery)
	defer tick.Stop()
	var known uint32
	var mode, told, toldMode string
	for {
		var err error
		if known, err = s.raise(ctx, known); told != text(err) && ctx.Err() == nil {
			if told = text(err); err != nil {
				s.log.Warn("generation not passed to the key service", "err", err)
			}
		}
		if mode, err = s.setMode(ctx, mode); toldMode != text(err) && ctx.Err() == nil {
			if toldMode = text(err); err != nil {
				s.log.Warn("mode of encryption not passed to the key service", "err", err)
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}
