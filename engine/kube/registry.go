package kube

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"regexp"
	"strings"

	"gopkg.in/yaml.v3"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	applycorev1 "k8s.io/client-go/applyconfigurations/core/v1"

	"constellation/engine"
	"constellation/engine/cluster"
	"constellation/engine/registry"
)

// registryNamespaces have pods of our charts.
func registryNamespaces(plans bool) []string {
	all := []string{Namespace, systemNamespace}
	if plans {
		all = append(all, engine.PlansNamespace)
	}
	return all
}

// registrySecret is the content of the Secret of r.
func registrySecret(r registry.Registry) map[string][]byte {
	m := map[string][]byte{corev1.DockerConfigJsonKey: r.DockerConfig(), registry.KeyAddress: []byte(r.Address)}
	if r.CABundle != "" {
		m[registry.KeyCA] = []byte(r.CABundle)
	}
	return m
}

// Registry implements [engine.Cluster].
func (c *Client) Registry(ctx context.Context) (r registry.Registry, err error) {
	err = retry(ctx, func(ctx context.Context) error {
		s, err := c.core.CoreV1().Secrets(Namespace).Get(ctx, registry.SecretName, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			r = registry.Registry{}
			return nil
		}
		if err != nil {
			return err
		}
		r = registry.Registry{Address: string(s.Data[registry.KeyAddress]), CABundle: string(s.Data[registry.KeyCA])}
		if with, err := r.FromSecret(s.Data[corev1.DockerConfigJsonKey]); err == nil {
			r = with
		} // else somebody changed the Secret, and its login is none
		return nil
	})
	if err != nil {
		return registry.Registry{}, fmt.Errorf("read Secret %s: %w", registry.SecretName, err)
	}
	return r, nil
}

// HasRegistry implements [engine.Cluster].
func (c *Client) HasRegistry(ctx context.Context, want registry.Registry, plans bool) (has bool, err error) {
	err = retry(ctx, func(ctx context.Context) error {
		has = false
		for _, ns := range registryNamespaces(plans) {
			s, err := c.core.CoreV1().Secrets(ns).Get(ctx, registry.SecretName, metav1.GetOptions{})
			switch {
			case apierrors.IsNotFound(err):
				has = want.Address == ""
				return nil
			case err != nil:
				return err
			case want.Address == "" || !maps.EqualFunc(s.Data, registrySecret(want), bytes.Equal):
				return nil
			}
		}
		m, err := c.core.CoreV1().ConfigMaps(systemNamespace).Get(ctx, kubeadmConfigName, metav1.GetOptions{})
		if err != nil {
			return err
		}
		repository, err := imageRepository(m.Data[keyClusterConfig])
		has = repository == want.Repository()
		return err
	})
	if err != nil {
		return false, fmt.Errorf("read Secret %s: %w", registry.SecretName, err)
	}
	return has, nil
}

// SetRegistry implements [engine.Cluster].
func (c *Client) SetRegistry(ctx context.Context, want registry.Registry, plans bool) (changed bool, err error) {
	err = retry(ctx, func(ctx context.Context) error {
		again, err := c.setRegistry(ctx, want, plans)
		changed = changed || again
		return err
	})
	return changed, err
}

func (c *Client) setRegistry(ctx context.Context, want registry.Registry, plans bool) (changed bool, err error) {
	before, err := c.Registry(ctx)
	if err != nil {
		return false, err
	}
	if want.Address == "" {
		if before.Address == "" {
			return false, nil
		}
		if changed, err = c.setRepository(ctx, before.Repository(), registry.Upstream); err != nil {
			return false, err
		}
		// Ours last: it is the record of the address.
		for _, ns := range []string{engine.PlansNamespace, systemNamespace, Namespace} {
			err := c.core.CoreV1().Secrets(ns).Delete(ctx, registry.SecretName, metav1.DeleteOptions{})
			if err != nil && !apierrors.IsNotFound(err) {
				return changed, fmt.Errorf("delete Secret %s/%s: %w", ns, registry.SecretName, err)
			}
		}
		return changed, nil
	}
	if err := c.ownNamespace(ctx); err != nil {
		return false, err
	}
	for _, ns := range registryNamespaces(plans) {
		if ns == engine.PlansNamespace {
			// The chart of the operator adopts it.
			n := applycorev1.Namespace(ns).WithLabels(map[string]string{"pod-security.kubernetes.io/enforce": "privileged"})
			if _, err := c.core.CoreV1().Namespaces().Apply(ctx, n, metav1.ApplyOptions{FieldManager: fieldManager, Force: true}); err != nil {
				return false, fmt.Errorf("create namespace %s: %w", ns, err)
			}
		}
		s := applycorev1.Secret(registry.SecretName, ns).WithType(corev1.SecretTypeDockerConfigJson).
			WithLabels(map[string]string{"app.kubernetes.io/part-of": "constellation"}).WithData(registrySecret(want))
		if _, err := c.core.CoreV1().Secrets(ns).Apply(ctx, s, metav1.ApplyOptions{FieldManager: fieldManager, Force: true}); err != nil {
			return false, fmt.Errorf("write Secret %s/%s: %w", ns, registry.SecretName, err)
		}
	}
	return c.setRepository(ctx, "", want.Repository())
}

// setRepository writes imageRepository into kubeadm's configuration, and reports whether it was another. With from, only that
// value is replaced.
func (c *Client) setRepository(ctx context.Context, from, to string) (changed bool, err error) {
	err = retry(ctx, func(ctx context.Context) error {
		all := c.core.CoreV1().ConfigMaps(systemNamespace)
		m, err := all.Get(ctx, kubeadmConfigName, metav1.GetOptions{})
		if err != nil {
			return err
		}
		is, err := imageRepository(m.Data[keyClusterConfig])
		if err != nil || is == to || from != "" && is != from {
			return err
		}
		if m.Data[keyClusterConfig], err = withImageRepository(m.Data[keyClusterConfig], to); err != nil {
			return err
		}
		changed = true // also if the answer is lost
		_, err = all.Update(ctx, m, metav1.UpdateOptions{FieldManager: fieldManager})
		return err
	})
	if apierrors.IsConflict(err) {
		err = cluster.ErrConflict
	}
	if err != nil {
		return false, fmt.Errorf("update ConfigMap %s: %w", kubeadmConfigName, err)
	}
	return changed, nil
}

// imageRepository returns that of a ClusterConfiguration of kubeadm.
func imageRepository(config string) (string, error) {
	var c struct {
		ImageRepository string `yaml:"imageRepository"`
	}
	if err := yaml.Unmarshal([]byte(config), &c); err != nil {
		return "", fmt.Errorf("read %s: %w", keyClusterConfig, err)
	}
	return c.ImageRepository, nil
}

var repositoryLineRE = regexp.MustCompile(`(?m)^imageRepository:.*$`)

// withImageRepository changes that line of a ClusterConfiguration alone.
func withImageRepository(config, to string) (string, error) {
	line := "imageRepository: " + to
	out := repositoryLineRE.ReplaceAllLiteralString(config, line)
	if out == config {
		out = strings.TrimSuffix(config, "\n") + "\n" + line + "\n"
	}
	is, err := imageRepository(out)
	if err == nil && is != to {
		err = fmt.Errorf("write %s: imageRepository would be %q, want %q", keyClusterConfig, is, to)
	}
	return out, err
}
