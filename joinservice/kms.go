package joinservice

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"constellation/engine/kms"
)

// kmsPoll is the poll interval for a generation in join-config that the key service of this machine does not use yet.
const kmsPoll = 5 * time.Second

// keyKMSGeneration is the key of join-config with the generation of the key that encrypts Secrets, after a first rotation. It is no secret:
// control planes derive the keys of all generations.
const keyKMSGeneration = "kmsGeneration"

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

// runKeyService polls join-config for a greater generation until ctx ends.
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
	told := ""
	for {
		var err error
		if known, err = s.raise(ctx, known); told != text(err) && ctx.Err() == nil {
			if told = text(err); err != nil {
				s.log.Warn("generation not passed to the key service", "err", err)
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}
