package kube

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	applycorev1 "k8s.io/client-go/applyconfigurations/core/v1"
	"k8s.io/client-go/rest"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"sigs.k8s.io/yaml"

	"constellation/assets"
	"constellation/engine/cluster"
	"constellation/operator/api/v1alpha1"
)

// Keys of the ConfigMaps.
const (
	joinConfigName = "join-config"

	keyComponents = "components"
	keyVersion    = "cluster-version"

	// The newest attestation requirements; followed by a dot and an image version, those of the
	// image.
	keyAttestation = "attestationConfig"
	keyClusterID   = "clusterID"
	keyTrustRoots  = "trustRoots"
	keyRotation    = "certifierRotation" // joinservice reads it
)

// rotationManager is the field manager of keyRotation, annotationRotation the record of the newest rotation.
const (
	rotationManager    = "constellation-certifier"
	annotationRotation = "constellation.edgeless.systems/certifier-rotation"
)

// annotationWeakened records when and how attestation requirements were weakened.
const annotationWeakened = "constellation.edgeless.systems/measurements-weakened"

func resourceOf(plural string) schema.GroupVersionResource {
	return v1alpha1.GroupVersion.WithResource(plural)
}

var (
	nodeVersions = resourceOf("nodeversions")
	joiningNodes = resourceOf("joiningnodes")
	kindsOfKinds = schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"}
)

func unmarshal(b []byte, into any) error {
	if err := json.Unmarshal(b, into); err != nil {
		return fmt.Errorf("decode answer: %w", err)
	}
	return nil
}

// Components implements [engine.Cluster].
func (c *Client) Components(ctx context.Context, name string) (cluster.Components, error) {
	out := cluster.Components{Name: name}
	err := retry(ctx, func(ctx context.Context) error {
		m, err := c.core.CoreV1().ConfigMaps(systemNamespace).Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		out.Kubernetes, out.Statement = m.Data[keyVersion], m.Annotations[v1alpha1.AnnotationStatement]
		out.List, out.Agent, out.Unenrolled = nil, nil, nil
		if text := m.Annotations[v1alpha1.AnnotationUnenrolled]; text != "" {
			out.Unenrolled = strings.Split(text, ",")
		}
		if text := m.Annotations[v1alpha1.AnnotationAgent]; text != "" {
			if err := unmarshal([]byte(text), &out.Agent); err != nil {
				return err
			}
		}
		return unmarshal([]byte(m.Data[keyComponents]), &out.List)
	})
	if err != nil {
		return cluster.Components{}, fmt.Errorf("read ConfigMap %s: %w", name, err)
	}
	return out, nil
}

// PublishComponents implements [engine.Cluster].
func (c *Client) PublishComponents(ctx context.Context, want cluster.Components) error {
	if want.Name != cluster.ComponentsName(want.List) {
		return fmt.Errorf("create ConfigMap %s: name does not match the digest of the list", want.Name)
	}
	b, err := json.Marshal(want.List)
	if err != nil {
		return fmt.Errorf("marshal components: %w", err)
	}
	m := &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Name: want.Name, Namespace: systemNamespace, Labels: map[string]string{"app.kubernetes.io/part-of": "constellation"}},
		Immutable:  new(true),
		Data:       map[string]string{keyComponents: string(b), keyVersion: want.Kubernetes},
	}
	m.Annotations = map[string]string{}
	if want.Statement != "" {
		m.Annotations[v1alpha1.AnnotationStatement] = want.Statement
	}
	if want.Agent != nil {
		if b, err = json.Marshal(want.Agent); err != nil {
			return fmt.Errorf("marshal enrolment program: %w", err)
		}
		m.Annotations[v1alpha1.AnnotationAgent] = string(b)
		if len(want.Unenrolled) > 0 {
			m.Annotations[v1alpha1.AnnotationUnenrolled] = strings.Join(want.Unenrolled, ",")
		}
	}
	err = retry(ctx, func(ctx context.Context) error {
		_, err := c.core.CoreV1().ConfigMaps(systemNamespace).Create(ctx, m, metav1.CreateOptions{FieldManager: fieldManager})
		return err
	})
	if err == nil {
		return nil
	}
	if !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("create ConfigMap %s: %w", want.Name, err)
	}
	// The name is a digest of the list, so an existing object is equal, or was tampered with.
	have, err := c.Components(ctx, want.Name)
	if err != nil {
		return err
	}
	if have.Kubernetes != want.Kubernetes || !slices.Equal(have.List, want.List) {
		return fmt.Errorf("create ConfigMap %s: it exists with other content; delete it if it is unused", want.Name)
	}
	if (want.Statement == "" || have.Statement == want.Statement) && (want.Agent == nil || have.Agent != nil && *have.Agent == *want.Agent) {
		return nil
	}
	// Objects published by older programs lack both.
	b, err = json.Marshal(map[string]any{"metadata": map[string]any{"annotations": m.Annotations}})
	if err != nil {
		return fmt.Errorf("marshal statement: %w", err)
	}
	err = retry(ctx, func(ctx context.Context) error {
		_, err := c.core.CoreV1().ConfigMaps(systemNamespace).Patch(ctx, want.Name, types.MergePatchType, b, metav1.PatchOptions{FieldManager: fieldManager})
		return err
	})
	if err != nil {
		return fmt.Errorf("annotate ConfigMap %s: %w", want.Name, err)
	}
	return nil
}

// JoinConfig implements [engine.Cluster].
func (c *Client) JoinConfig(ctx context.Context) (cluster.JoinConfig, error) {
	var out cluster.JoinConfig
	err := retry(ctx, func(ctx context.Context) error {
		m, err := c.core.CoreV1().ConfigMaps(systemNamespace).Get(ctx, joinConfigName, metav1.GetOptions{})
		if err != nil {
			return err
		}
		out = cluster.JoinConfig{
			Attestation: m.Data[keyAttestation], TrustRoots: m.Data[keyTrustRoots], ClusterID: m.Data[keyClusterID],
			Weakened: m.Annotations[annotationWeakened], Revision: m.ResourceVersion,
		}
		for k, v := range m.Data {
			if image, ok := strings.CutPrefix(k, keyAttestation+"."); ok {
				if out.Generations == nil {
					out.Generations = map[string]string{}
				}
				out.Generations[image] = v
			}
		}
		return nil
	})
	if err != nil {
		return cluster.JoinConfig{}, fmt.Errorf("read ConfigMap %s: %w", joinConfigName, err)
	}
	return out, nil
}

// PublishJoinConfig implements [engine.Cluster].
func (c *Client) PublishJoinConfig(ctx context.Context, j cluster.JoinConfig) error {
	m := applycorev1.ConfigMap(joinConfigName, systemNamespace).
		WithLabels(map[string]string{"app.kubernetes.io/part-of": "constellation"}).
		WithData(map[string]string{keyAttestation: j.Attestation, keyTrustRoots: j.TrustRoots, keyClusterID: j.ClusterID})
	for image, g := range j.Generations {
		m.WithData(map[string]string{keyAttestation + "." + image: g})
	}
	if j.Weakened != "" {
		m.WithAnnotations(map[string]string{annotationWeakened: j.Weakened})
	}
	if j.Revision != "" {
		m.WithResourceVersion(j.Revision)
	}
	err := retry(ctx, func(ctx context.Context) error {
		_, err := c.core.CoreV1().ConfigMaps(systemNamespace).Apply(ctx, m, metav1.ApplyOptions{FieldManager: fieldManager, Force: true})
		return err
	})
	if apierrors.IsConflict(err) {
		return fmt.Errorf("apply ConfigMap %s: %w", joinConfigName, cluster.ErrConflict)
	}
	if err != nil {
		return fmt.Errorf("apply ConfigMap %s: %w", joinConfigName, err)
	}
	return nil
}

// CertifierRotation implements [engine.Rotator].
func (c *Client) CertifierRotation(ctx context.Context) (string, error) {
	var out string
	err := retry(ctx, func(ctx context.Context) error {
		m, err := c.core.CoreV1().ConfigMaps(systemNamespace).Get(ctx, joinConfigName, metav1.GetOptions{})
		if err == nil {
			out = m.Data[keyRotation]
		}
		return err
	})
	if err != nil {
		return "", fmt.Errorf("read ConfigMap %s: %w", joinConfigName, err)
	}
	return out, nil
}

// PublishCertifierRotation implements [engine.Rotator]. It has a field manager of its own, so that PublishJoinConfig keeps the keys.
func (c *Client) PublishCertifierRotation(ctx context.Context, old, rotation, record string) error {
	err := retry(ctx, func(ctx context.Context) error {
		have, err := c.core.CoreV1().ConfigMaps(systemNamespace).Get(ctx, joinConfigName, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if have.Data[keyRotation] == rotation {
			return nil // an answer was lost
		}
		if have.Data[keyRotation] != old {
			return cluster.ErrConflict
		}
		m := applycorev1.ConfigMap(joinConfigName, systemNamespace).WithResourceVersion(have.ResourceVersion).
			WithAnnotations(map[string]string{annotationRotation: record}).WithData(map[string]string{keyRotation: rotation})
		_, err = c.core.CoreV1().ConfigMaps(systemNamespace).Apply(ctx, m, metav1.ApplyOptions{FieldManager: rotationManager, Force: true})
		if apierrors.IsConflict(err) {
			err = cluster.ErrConflict
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("apply ConfigMap %s: %w", joinConfigName, err)
	}
	return nil
}

// kindFrom decodes a CustomResourceDefinition.
func kindFrom(f assets.File) (*unstructured.Unstructured, error) {
	u := &unstructured.Unstructured{}
	if err := yaml.Unmarshal(f.Data, &u.Object); err != nil {
		return nil, fmt.Errorf("read kind %s: %w", f.Name, err)
	}
	if u.GetKind() != "CustomResourceDefinition" || u.GetName() != f.Name {
		return nil, fmt.Errorf("read kind %s: content is %s %q", f.Name, u.GetKind(), u.GetName())
	}
	unstructured.RemoveNestedField(u.Object, "status")
	unstructured.RemoveNestedField(u.Object, "metadata", "creationTimestamp")
	return u, nil
}

// applyKind applies a kind and returns the API server's result. With dry it changes nothing.
func (c *Client) applyKind(ctx context.Context, u *unstructured.Unstructured, dry bool) (got *unstructured.Unstructured, err error) {
	b, err := json.Marshal(u)
	if err != nil {
		return nil, err
	}
	o := metav1.PatchOptions{FieldManager: fieldManager, Force: new(true)}
	if dry {
		o.DryRun = []string{metav1.DryRunAll}
	}
	err = retry(ctx, func(ctx context.Context) error {
		got, err = c.dynamic.Resource(kindsOfKinds).Patch(ctx, u.GetName(), types.ApplyPatchType, b, o)
		return err
	})
	return got, err
}

// OutdatedKinds implements [engine.Cluster]. It compares by dry runs, since only the API
// server applies its own defaults.
func (c *Client) OutdatedKinds(ctx context.Context, kinds []assets.File) (outdated []string, err error) {
	for _, f := range kinds {
		u, err := kindFrom(f)
		if err != nil {
			return nil, err
		}
		var have *unstructured.Unstructured
		err = retry(ctx, func(ctx context.Context) (err error) {
			have, err = c.dynamic.Resource(kindsOfKinds).Get(ctx, u.GetName(), metav1.GetOptions{})
			return err
		})
		if errors.Is(err, cluster.ErrAbsent) {
			outdated = append(outdated, f.Name)
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("read kind %s: %w", f.Name, err)
		}
		would, err := c.applyKind(ctx, u, true)
		if err != nil {
			return nil, fmt.Errorf("compare kind %s: %w", f.Name, err)
		}
		same := reflect.DeepEqual(have.Object["spec"], would.Object["spec"]) && reflect.DeepEqual(have.GetLabels(), would.GetLabels()) &&
			reflect.DeepEqual(have.GetAnnotations(), would.GetAnnotations())
		if !same || !established(have) {
			outdated = append(outdated, f.Name)
		}
	}
	return outdated, nil
}

func established(crd *unstructured.Unstructured) bool {
	conditions, _, _ := unstructured.NestedSlice(crd.Object, "status", "conditions")
	for _, x := range conditions {
		if m, ok := x.(map[string]any); ok && m["type"] == "Established" && m["status"] == "True" {
			return true
		}
	}
	return false
}

// ApplyKinds implements [engine.Cluster].
func (c *Client) ApplyKinds(ctx context.Context, kinds []assets.File, report func(name string)) error {
	all := make([]*unstructured.Unstructured, len(kinds))
	for i, f := range kinds {
		u, err := kindFrom(f)
		if err != nil {
			return err
		}
		if all[i], err = c.applyKind(ctx, u, false); err != nil {
			return fmt.Errorf("apply kind %s: %w", f.Name, err)
		}
	}
	for _, u := range all {
		if err := c.served(ctx, u); err != nil {
			return fmt.Errorf("wait for kind %s: %w", u.GetName(), err)
		}
		report(u.GetName())
	}
	c.discovery.Invalidate()
	return nil
}

// servedResources returns the resources of a definition in all versions that are served.
func servedResources(crd *unstructured.Unstructured) (served []schema.GroupVersionResource) {
	group, _, _ := unstructured.NestedString(crd.Object, "spec", "group")
	plural, _, _ := unstructured.NestedString(crd.Object, "spec", "names", "plural")
	versions, _, _ := unstructured.NestedSlice(crd.Object, "spec", "versions")
	for _, v := range versions {
		if m, _ := v.(map[string]any); m["served"] == true {
			name, _ := m["name"].(string)
			served = append(served, schema.GroupVersionResource{Group: group, Version: name, Resource: plural})
		}
	}
	return served
}

// served returns when the API server serves a kind, which happens a moment after the condition
// Established.
func (c *Client) served(ctx context.Context, crd *unstructured.Unstructured) error {
	for _, r := range servedResources(crd) {
		for {
			err := retry(ctx, func(ctx context.Context) error {
				_, err := c.dynamic.Resource(r).List(ctx, metav1.ListOptions{Limit: 1})
				return err
			})
			if err == nil {
				break
			}
			if !errors.Is(err, cluster.ErrAbsent) {
				return err
			}
			select { // there is no event for this; the gap is a fraction of a second
			case <-ctx.Done():
				return err
			case <-time.After(50 * time.Millisecond):
			}
		}
	}
	return nil
}

// Expect implements [engine.Cluster].
func (c *Client) Expect(ctx context.Context, n cluster.ExpectedNode) error {
	var have *corev1.Node
	err := retry(ctx, func(ctx context.Context) (err error) {
		have, err = c.core.CoreV1().Nodes().Get(ctx, n.Name, metav1.GetOptions{})
		return err
	})
	switch {
	case errors.Is(err, cluster.ErrAbsent):
	case err != nil:
		return fmt.Errorf("read node %s: %w", n.Name, err)
	case have.Annotations[v1alpha1.AnnotationComponents] == n.Components:
		return nil
	}
	j := &v1alpha1.JoiningNode{
		TypeMeta:   metav1.TypeMeta{APIVersion: v1alpha1.GroupVersion.String(), Kind: "JoiningNode"},
		ObjectMeta: metav1.ObjectMeta{Name: n.Name},
		Spec:       v1alpha1.JoiningNodeSpec{Name: n.Name, ComponentsReference: n.Components, IsControlPlane: n.ControlPlane, ProviderID: n.ProviderID},
	}
	if !n.Deadline.IsZero() {
		j.Spec.Deadline = &metav1.Time{Time: n.Deadline}
	}
	if err := c.apply(ctx, joiningNodes, n.Name, j); err != nil {
		return fmt.Errorf("apply JoiningNode %s: %w", n.Name, err)
	}
	return nil
}

// apply applies the spec of a cluster-scoped object of ours.
func (c *Client) apply(ctx context.Context, r schema.GroupVersionResource, name string, o any) error {
	m, err := runtime.DefaultUnstructuredConverter.ToUnstructured(o)
	if err != nil {
		return err
	}
	delete(m, "status")
	unstructured.RemoveNestedField(m, "metadata", "creationTimestamp")
	b, err := json.Marshal(m)
	if err != nil {
		return err
	}
	return retry(ctx, func(ctx context.Context) error {
		_, err := c.dynamic.Resource(r).Patch(ctx, name, types.ApplyPatchType, b, metav1.PatchOptions{FieldManager: fieldManager, Force: new(true)})
		return err
	})
}

// apiConfig converts config to a kubeconfig, for APIs that require one.
func apiConfig(config *rest.Config) clientcmdapi.Config {
	k := clientcmdapi.NewConfig()
	k.Clusters["c"] = &clientcmdapi.Cluster{Server: config.Host, CertificateAuthorityData: config.CAData, CertificateAuthority: config.CAFile, InsecureSkipTLSVerify: config.Insecure}
	k.AuthInfos["u"] = &clientcmdapi.AuthInfo{
		ClientCertificateData: config.CertData, ClientKeyData: config.KeyData,
		ClientCertificate: config.CertFile, ClientKey: config.KeyFile, Token: config.BearerToken,
	}
	k.Contexts["x"] = &clientcmdapi.Context{Cluster: "c", AuthInfo: "u"}
	k.CurrentContext = "x"
	return *k
}
