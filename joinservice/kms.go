package joinservice

import (
	"context"
	"encoding/json"
	"fmt"
	"strconv"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"constellation/engine/kms"
)

// kmsPoll is the poll interval for a generation in join-config that the key service of this machine does not use yet.
const kmsPoll = 5 * time.Second

// setMode has the API server of this machine store Secrets in the mode of join-config, unless it is known, the mode that was set last.
func (s *Server) setMode(ctx context.Context, known string) (now string, err error) {
	mode := s.kube.config()[kms.ModeKey]
	if mode == "" || mode == known {
		return known, nil
	}
	if err := s.kms.SetEncryption(ctx, mode); err != nil {
		return known, fmt.Errorf("use %s %.20q of join-config: %w", kms.ModeKey, mode, err)
	}
	s.log.Info("mode of encryption passed to the key service", "mode", mode)
	return mode, nil
}

// raise has the key service use the generation of join-config, if it is greater than known, which the key service uses. The key service
// goes a limited way at once, so a forged number uses few generations up.
func (s *Server) raise(ctx context.Context, known uint32) (now uint32, err error) {
	text := s.kube.config()[kms.GenerationKey]
	if text == "" {
		return known, nil
	}
	n, err := strconv.ParseUint(text, 10, 32)
	if err != nil {
		return known, fmt.Errorf("read %s of join-config: %.40q is no number", kms.GenerationKey, text)
	}
	wanted := uint32(n)
	if wanted <= known {
		return known, nil
	}
	if known, err = s.kms.Ready(ctx); err != nil || wanted <= known {
		return known, err
	}
	if now, err = s.kms.Raise(ctx, min(wanted, known+kms.MaxRaise)); err != nil {
		return known, fmt.Errorf("use %s %d of join-config: %w", kms.GenerationKey, wanted, err)
	}
	s.log.Info("generation passed to the key service", "from", known, "generation", now, "wanted", wanted)
	return now, nil
}

// reportUse writes the generation with which the API server of this machine encrypts, unless it equals told, which was written last. It
// removes those of Nodes that are gone.
func (s *Server) reportUse(ctx context.Context, told uint32) (now uint32, err error) {
	used, err := s.kms.Used(ctx)
	demands := s.snapshot.Load()
	if err != nil || used == 0 || used == told || demands == nil {
		return told, nil // a key service of an earlier release does not tell; one that is down is logged elsewhere
	}
	ctx, cancel := context.WithTimeout(ctx, ticketTimeout)
	defer cancel()
	maps := s.kube.core.ConfigMaps(s.kube.ns)
	write := func(data map[string]any) (*corev1.ConfigMap, error) {
		b, err := json.Marshal(map[string]any{"data": data})
		if err != nil {
			return nil, err
		}
		return maps.Patch(ctx, kms.UseConfigMap, types.MergePatchType, b, metav1.PatchOptions{})
	}
	have, err := write(map[string]any{demands.node: strconv.FormatUint(uint64(used), 10)})
	if apierrors.IsNotFound(err) { // services of an earlier release
		return used, nil
	}
	if err != nil {
		return told, fmt.Errorf("write ConfigMap %s: %w", kms.UseConfigMap, err)
	}
	s.log.Info("API server encrypts with another generation", "generation", used)
	gone := map[string]any{}
	for name := range have.Data {
		if _, err := s.kube.core.Nodes().Get(ctx, name, metav1.GetOptions{}); name != demands.node && apierrors.IsNotFound(err) {
			gone[name] = nil
		}
	}
	if len(gone) > 0 {
		if _, err := write(gone); err != nil {
			return used, fmt.Errorf("write ConfigMap %s: %w", kms.UseConfigMap, err)
		}
	}
	return used, nil
}

// runKeyService polls join-config for a greater generation, and for another mode, until ctx ends. It reports what the API server uses.
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
	var known, used uint32
	var mode, told, toldMode, toldUse string
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
		if used, err = s.reportUse(ctx, used); toldUse != text(err) && ctx.Err() == nil {
			if toldUse = text(err); err != nil {
				s.log.Warn("generation of the API server not reported", "err", err)
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}
