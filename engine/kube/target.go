package kube

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"

	"constellation/engine/cluster"
	"constellation/operator/api/v1alpha1"
)

// NodeTarget implements [engine.Cluster].
func (c *Client) NodeTarget(ctx context.Context) (cluster.NodeTarget, error) {
	nv, err := c.nodeVersion(ctx)
	if err != nil {
		return cluster.NodeTarget{}, err
	}
	return targetOf(nv), nil
}

func (c *Client) nodeVersion(ctx context.Context) (*v1alpha1.NodeVersion, error) {
	var nv *v1alpha1.NodeVersion
	err := retry(ctx, func(ctx context.Context) error {
		u, err := c.dynamic.Resource(nodeVersions).Get(ctx, v1alpha1.NodeVersionName, metav1.GetOptions{})
		if err != nil {
			return err
		}
		nv = &v1alpha1.NodeVersion{}
		return runtime.DefaultUnstructuredConverter.FromUnstructured(u.Object, nv)
	})
	if err != nil {
		return nil, fmt.Errorf("read NodeVersion: %w", err)
	}
	return nv, nil
}

func targetOf(nv *v1alpha1.NodeVersion) cluster.NodeTarget {
	how := nv.Spec.Rollout
	t := cluster.NodeTarget{
		Image: nv.Spec.Image, ImageVersion: nv.Spec.ImageVersion,
		Components: nv.Spec.KubernetesComponentsReference, Kubernetes: nv.Spec.KubernetesClusterVersion, Etcd: nv.Spec.EtcdImageTag,
		KeepWorkers: how.KeepWorkers, Paused: how.Paused, Cancelled: how.Cancel,
	}
	if how.MaxSurge != nil {
		t.MaxSurge = how.MaxSurge.String()
	}
	for _, m := range nv.Status.EtcdMembers {
		t.Members = append(t.Members, cluster.EtcdMember{Node: m.Node, Version: m.Version, Storage: m.StorageVersion})
	}
	for _, x := range nv.Status.Conditions {
		t.Conditions = append(t.Conditions, cluster.Condition{Type: x.Type, Status: string(x.Status), Reason: x.Reason, Message: x.Message, Since: x.LastTransitionTime.Time})
	}
	slices.SortFunc(t.Conditions, func(a, b cluster.Condition) int { return strings.Compare(a.Type, b.Type) })
	return t
}

// SetNodeTarget implements [engine.Cluster].
func (c *Client) SetNodeTarget(ctx context.Context, t cluster.NodeTarget) error {
	return c.setNodeTarget(ctx, t, nil)
}

// TryNodeTarget implements [engine.Cluster].
func (c *Client) TryNodeTarget(ctx context.Context, t cluster.NodeTarget) error {
	return c.setNodeTarget(ctx, t, []string{metav1.DryRunAll})
}

// setNodeTarget applies the fields of t only: server-side apply leaves all other fields to
// their managers.
func (c *Client) setNodeTarget(ctx context.Context, t cluster.NodeTarget, dryRun []string) error {
	spec := map[string]any{
		"image": t.Image, "imageVersion": t.ImageVersion,
		"kubernetesComponentsReference": t.Components, "kubernetesClusterVersion": t.Kubernetes,
	}
	how := map[string]any{} // unknown to release v1.0.0
	if t.KeepWorkers {
		how["keepWorkers"] = true
	}
	if t.MaxSurge != "" {
		how["maxSurge"] = surgeOf(t.MaxSurge)
	}
	have, err := c.nodeVersion(ctx)
	if err == nil && have.Spec.Rollout.Cancel {
		how["cancel"] = false
	}
	// Older releases do not have the field. An empty one overwrites what another manager set.
	if t.Etcd != "" || err == nil && have.Spec.EtcdImageTag != "" {
		spec["etcdImageTag"] = t.Etcd
	}
	if len(how) > 0 {
		spec["rollout"] = how
	}
	b, err := json.Marshal(map[string]any{
		"apiVersion": v1alpha1.GroupVersion.String(),
		"kind":       "NodeVersion",
		"metadata":   map[string]any{"name": v1alpha1.NodeVersionName},
		"spec":       spec,
	})
	if err != nil {
		return fmt.Errorf("marshal NodeVersion: %w", err)
	}
	err = retry(ctx, func(ctx context.Context) error {
		_, err := c.dynamic.Resource(nodeVersions).Patch(ctx, v1alpha1.NodeVersionName, types.ApplyPatchType, b,
			metav1.PatchOptions{FieldManager: fieldManager, Force: new(true), DryRun: dryRun})
		return err
	})
	if err != nil {
		return fmt.Errorf("apply NodeVersion: %w", err)
	}
	return nil
}

// surgeOf is a number, or a percentage as text.
func surgeOf(s string) any {
	if n, err := strconv.Atoi(s); err == nil {
		return n
	}
	return s
}
