package joinservice

import (
	"context"
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"constellation/engine/component/componentproto"
	"constellation/engine/registry"
)

// registryAge is how long the registry is cached; its login may change.
const registryAge = 10 * time.Second

// pulls is the registry of joining machines, and when it was read.
type pulls struct {
	from *componentproto.Registry
	read time.Time
}

// registry returns the registry of joining machines; nil if none is configured. A machine must not
// join without it, so a Secret that cannot be read is an error.
func (k *kube) registry(ctx context.Context) (*componentproto.Registry, error) {
	if k.registrySecret == "" {
		return nil, nil
	}
	if p := k.pulls.Load(); p != nil && time.Since(p.read) < registryAge {
		return p.from, nil
	}
	v, err, _ := k.flight.Do("registry", func() (any, error) {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), ticketTimeout/2)
		defer cancel()
		s, err := k.core.Secrets(k.ns).Get(ctx, k.registrySecret, metav1.GetOptions{})
		if err != nil {
			return nil, fmt.Errorf("read Secret of the registry: %w", err)
		}
		from, err := parseRegistry(s)
		if err != nil {
			return nil, fmt.Errorf("read Secret %s of the registry: %w", k.registrySecret, err)
		}
		k.pulls.Store(&pulls{from, time.Now()})
		return from, nil
	})
	if err != nil {
		return nil, err
	}
	return v.(*componentproto.Registry), nil
}

// parseRegistry reads what the engine wrote. Its errors contain no login.
func parseRegistry(s *corev1.Secret) (*componentproto.Registry, error) {
	r := registry.Registry{Address: string(s.Data[registry.KeyAddress]), CABundle: string(s.Data[registry.KeyCA])}
	if problem, _ := registry.BadAddress(r.Address); problem != "" {
		return nil, errors.New("its address " + problem)
	}
	r, err := r.FromSecret(s.Data[corev1.DockerConfigJsonKey])
	if err != nil {
		return nil, err
	}
	return registry.ToProto(r), nil
}
