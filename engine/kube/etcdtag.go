package kube

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"gopkg.in/yaml.v3"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"constellation/engine/cluster"
	"constellation/engine/kubeadm"
)

// EtcdTag implements [engine.Cluster].
func (c *Client) EtcdTag(ctx context.Context) (tag string, err error) {
	err = retry(ctx, func(ctx context.Context) error {
		m, err := c.core.CoreV1().ConfigMaps(systemNamespace).Get(ctx, kubeadmConfigName, metav1.GetOptions{})
		if err != nil {
			return err
		}
		tag, err = kubeadm.EtcdTag(m.Data[keyClusterConfig])
		return err
	})
	if apierrors.IsNotFound(err) {
		return "", fmt.Errorf("read ConfigMap %s: %w", kubeadmConfigName, cluster.ErrAbsent)
	}
	if err != nil {
		return "", fmt.Errorf("read ConfigMap %s: %w", kubeadmConfigName, err)
	}
	return tag, nil
}

// SetEtcdTag implements [engine.Cluster].
func (c *Client) SetEtcdTag(ctx context.Context, from, to string) error {
	err := retry(ctx, func(ctx context.Context) error {
		maps := c.core.CoreV1().ConfigMaps(systemNamespace)
		m, err := maps.Get(ctx, kubeadmConfigName, metav1.GetOptions{})
		if err != nil {
			return err
		}
		is, err := kubeadm.EtcdTag(m.Data[keyClusterConfig])
		switch {
		case err != nil || is == to:
			return err
		case is != from:
			return fmt.Errorf("etcd.local.imageTag is %q, want %q: %w", is, from, cluster.ErrConflict)
		}
		if m.Data[keyClusterConfig], err = withEtcdTag(m.Data[keyClusterConfig], to); err != nil {
			return err
		}
		_, err = maps.Update(ctx, m, metav1.UpdateOptions{FieldManager: fieldManager})
		return err
	})
	if apierrors.IsConflict(err) {
		err = cluster.ErrConflict
	}
	if err != nil {
		return fmt.Errorf("update ConfigMap %s: %w", kubeadmConfigName, err)
	}
	return nil
}

// withEtcdTag returns a ClusterConfiguration with another etcd.local.imageTag; an empty one removes
// the field. It changes that line alone, so that everything else stays as it was written.
func withEtcdTag(config, tag string) (string, error) {
	var doc yaml.Node
	if err := yaml.Unmarshal([]byte(config), &doc); err != nil {
		return "", fmt.Errorf("read %s: %w", keyClusterConfig, err)
	}
	child := func(m *yaml.Node, key string) (name, value *yaml.Node) {
		for i := 0; m != nil && m.Kind == yaml.MappingNode && i+1 < len(m.Content); i += 2 {
			if m.Content[i].Value == key {
				return m.Content[i], m.Content[i+1]
			}
		}
		return nil, nil
	}
	if len(doc.Content) != 1 {
		return "", errors.New("read " + keyClusterConfig + ": want a mapping")
	}
	_, etcd := child(doc.Content[0], "etcd")
	_, local := child(etcd, "local")
	if local == nil || local.Kind != yaml.MappingNode || local.Style&yaml.FlowStyle != 0 || len(local.Content) == 0 {
		return "", errors.New("read " + keyClusterConfig + ": etcd.local has no fields on lines of their own")
	}
	lines := strings.SplitAfter(config, "\n")
	at, indent := local.Content[0].Line-1, strings.Repeat(" ", local.Content[0].Column-1)
	name, _ := child(local, "imageTag")
	line := indent + "imageTag: " + tag + "\n"
	if tag == "" {
		line = ""
	}
	if name != nil {
		lines[name.Line-1] = line
	} else {
		lines[at] = line + lines[at]
	}
	out := strings.Join(lines, "")
	if is, err := kubeadm.EtcdTag(out); err != nil || is != tag {
		return "", fmt.Errorf("write %s: etcd.local.imageTag would be %q, want %q: %w", keyClusterConfig, is, tag, errors.Join(err, errors.ErrUnsupported))
	}
	return out, nil
}
