package kube

import (
	"bytes"
	"context"
	"errors"
	"fmt"

	"gopkg.in/yaml.v3"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"constellation/engine/cluster"
)

const (
	kubeadmConfigName = "kubeadm-config"
	keyClusterConfig  = "ClusterConfiguration"
	signingFlag       = "cluster-signing-duration"
)

// BoundSigning implements [engine.Cluster].
func (c *Client) BoundSigning(ctx context.Context, duration string) (changed bool, err error) {
	err = retry(ctx, func(ctx context.Context) error {
		maps := c.core.CoreV1().ConfigMaps(systemNamespace)
		m, err := maps.Get(ctx, kubeadmConfigName, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return nil // not a kubeadm cluster
		}
		if err != nil {
			return err
		}
		after, err := withSigning(m.Data[keyClusterConfig], duration)
		if err != nil || after == "" {
			return err
		}
		m.Data[keyClusterConfig] = after
		if _, err := maps.Update(ctx, m, metav1.UpdateOptions{FieldManager: fieldManager}); err != nil {
			return err
		}
		changed = true
		return nil
	})
	if apierrors.IsConflict(err) {
		return false, fmt.Errorf("update ConfigMap %s: %w", kubeadmConfigName, cluster.ErrConflict)
	}
	if err != nil {
		return false, fmt.Errorf("update ConfigMap %s: %w", kubeadmConfigName, err)
	}
	return changed, nil
}

// withSigning returns a ClusterConfiguration of kubeadm with the controller manager's flag for
// the lifetime of signed certificates; empty if the flag is set already. All else keeps its
// order.
func withSigning(config, duration string) (string, error) {
	var doc yaml.Node
	if err := yaml.Unmarshal([]byte(config), &doc); err != nil {
		return "", fmt.Errorf("read %s: %w", keyClusterConfig, err)
	}
	if doc.Kind != yaml.DocumentNode || len(doc.Content) != 1 || doc.Content[0].Kind != yaml.MappingNode {
		return "", errors.New("read " + keyClusterConfig + ": want a mapping")
	}
	scalar := func(s string) *yaml.Node { return &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Value: s} }
	// child returns the value of a key, and creates it if missing.
	child := func(m *yaml.Node, key string, kind yaml.Kind) *yaml.Node {
		for i := 0; i+1 < len(m.Content); i += 2 {
			if m.Content[i].Value == key {
				v := m.Content[i+1]
				if v.Kind != kind && len(v.Content) == 0 { // null or empty
					v.Kind, v.Tag, v.Value, v.Style = kind, "", "", 0
				}
				return v
			}
		}
		v := &yaml.Node{Kind: kind}
		m.Content = append(m.Content, scalar(key), v)
		return v
	}
	root := doc.Content[0]
	version := ""
	for i := 0; i+1 < len(root.Content); i += 2 {
		if root.Content[i].Value == "apiVersion" {
			version = root.Content[i+1].Value
		}
	}
	manager := child(root, "controllerManager", yaml.MappingNode)
	if version == "kubeadm.k8s.io/v1beta3" { // a mapping of flags
		args := child(manager, "extraArgs", yaml.MappingNode)
		for i := 0; i+1 < len(args.Content); i += 2 {
			if args.Content[i].Value == signingFlag {
				return "", nil
			}
		}
		args.Content = append(args.Content, scalar(signingFlag), scalar(duration))
	} else {
		args := child(manager, "extraArgs", yaml.SequenceNode)
		if args.Kind != yaml.SequenceNode {
			return "", fmt.Errorf("read %s: controllerManager.extraArgs of %s is not a list", keyClusterConfig, version)
		}
		for _, a := range args.Content {
			for i := 0; i+1 < len(a.Content); i += 2 {
				if a.Content[i].Value == "name" && a.Content[i+1].Value == signingFlag {
					return "", nil
				}
			}
		}
		args.Content = append(args.Content, &yaml.Node{Kind: yaml.MappingNode, Content: []*yaml.Node{scalar("name"), scalar(signingFlag), scalar("value"), scalar(duration)}})
	}
	var b bytes.Buffer
	e := yaml.NewEncoder(&b)
	e.SetIndent(2)
	if err := errors.Join(e.Encode(&doc), e.Close()); err != nil {
		return "", fmt.Errorf("write %s: %w", keyClusterConfig, err)
	}
	return b.String(), nil
}
